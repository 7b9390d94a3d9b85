# SPDX-License-Identifier: Apache-2.0
"""Times decoding with and without `--lookup`, on texts of this repository.

    flownpu make-model gemma3-1b gemma3-1b --random --symmetric
    python -m benchmarks.lookup gemma3-1b

A model with random weights does not write text in which a lookup finds anything. So the text is *forced*: the model
computes all that it would, but the next token of a known text is chosen, as if the model had written it. The text then
determines which candidates are kept, the machine what they cost. With --own the model chooses itself, which makes sense
for a trained model only:

    flownpu convert tests/fixtures/gemma3-topics topics
    python -m benchmarks.lookup topics --own

Tokens are those of the tests' small model, whose vocabulary of 4096 was made from this kind of text: they are shorter
than a large vocabulary's. Plain decoding is GenAI's own loop on the unchanged graph; the two take turns, and the ratio
is the median of the pairs' ratios.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from flownpu.generate.language_model import LanguageModel, Sampling
from flownpu.generate.speculative.choice import Choice
from flownpu.generate.speculative.generator import SpeculativeGenerator, Tally
from flownpu.generate.speculative.model import Speculation

ROOT = Path(__file__).parents[1]
GREEDY = Sampling(temperature=0)


class ForcedChoice(Choice):
    """Chooses the tokens of a text, by making the logit of the text's next token by far the largest."""

    def __init__(self, choice: Choice, text: list[int]) -> None:
        self.generator, self._row = choice.generator, choice._row
        self._text = iter(text)

    def next(self, logits: NDArray[np.float32]) -> int:
        """See `Choice.next`; the logits are copied, so that this costs as much as a real choice."""
        forced = logits.copy()
        forced[next(self._text)] = 1e6
        return super().next(forced)


def texts() -> Iterator[tuple[str, str, str]]:
    """Tasks: their kind, their prompt, and the text of the answer."""
    page = (ROOT / "docs" / "use" / "serve.md").read_text(encoding="utf-8")
    section = page[page.index("## How answers are computed") : page.index("## Bounds")]
    yield "quote", f"{section}\nQuote the section word by word.\n", section
    edited = section.replace("request", "query").replace("conversation", "dialogue")
    yield "edit", f"{section}\nWrite query for request, and dialogue for conversation.\n", edited
    other = (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8")
    yield "chat", f"{section[:1500]}\nTell me about decisions of another kind.\n", other[2000:]
    code = (ROOT / "graph_rewrites" / "last_token_logits.py").read_text(encoding="utf-8")
    similar = (ROOT / "graph_rewrites" / "newest_logits.py").read_text(encoding="utf-8")
    yield "code", f"{code}\n# Another rule of this kind:\n", similar


def decode(generator: Any, prompt: list[int], count: int) -> float:
    """Seconds of `count` tokens after the first."""
    generator.append_tokens(np.array(prompt, np.int32))
    generator.generate_next_token()
    started = time.perf_counter()
    for _ in range(count):
        generator.generate_next_token()
    return time.perf_counter() - started


def main(
    model: Annotated[Path, typer.Argument(help="Folder of a converted model.")],
    tokens: Annotated[int, typer.Option(min=8, help="New tokens of an answer.")] = 192,
    repeats: Annotated[int, typer.Option(min=1, help="Pairs of answers.")] = 5,
    own: Annotated[bool, typer.Option(help="The model chooses its tokens itself.")] = False,
) -> None:
    """Measures each kind of text in turn."""
    tokenizer = Tokenizer.from_file(str(ROOT / "tests" / "fixtures" / "gemma3-topics" / "tokenizer.json"))
    plain, looking = LanguageModel(model), LanguageModel(model, speculation=Speculation(lookup=True))
    how = "its own choices" if own else "forced texts"
    table = Table(title=f"{model.name}, {how}, {tokens} new tokens, {repeats} pairs")
    for heading in ("text", "prompt", "plain tokens/s", "with --lookup", "times", "tokens a step", "kept of proposed"):
        table.add_column(heading, justify="left" if heading == "text" else "right")
    for kind, before, after in texts():
        prompt, text = tokenizer.encode(before).ids, tokenizer.encode(after, add_special_tokens=False).ids
        prompt = prompt[-(plain.context_length - tokens - 8) :]
        context, pairs, tally = len(prompt) + tokens + 8, [], Tally()
        for _ in range(repeats):
            seconds = decode(plain.generator(context, GREEDY, min_length=context), prompt, tokens)
            generator = looking.generator(context, GREEDY, min_length=context)
            assert isinstance(generator, SpeculativeGenerator)
            if not own:
                # The reader cannot be made to choose a text's tokens, so every step uses the choice, as for sampled
                # text.
                generator._choice, generator._reader_chooses = ForcedChoice(generator._choice, [*text, *text]), False
            pairs.append((seconds, decode(generator, prompt, tokens)))
            tally = generator.tally
        rates = [tokens / median(side) for side in zip(*pairs, strict=True)]
        table.add_row(
            kind,
            str(len(prompt)),
            *(f"{rate:.1f}" for rate in rates),
            f"{median(first / second for first, second in pairs):.2f}",
            f"{tokens / tally.steps:.2f}",
            f"{tally.kept} of {tally.candidates}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)
