# SPDX-License-Identifier: Apache-2.0
"""Writes a tokenizer.json that gives the same tokens and is read in less than half the time.

Byte-pair encoding joins, again and again, the neighbours whose merge comes first in the list, the leftmost if it is
there more than once. Lists that were made of a SentencePiece model have each way to cut each token in two: 515,000
merges for Gemma's 262,144 tokens. All but one of a token's are never used. For when a merge joins two tokens, no merge
has crossed the edges of the two before. So those within them were the same that the text of the two alone gets, and
that text has one last merge.
"""

import json
import math
import re
from collections import Counter
from itertools import pairwise
from typing import Any

from flownpu.convert.errors import ConversionError

TOKENIZER = "tokenizer.json"
_BYTE = re.compile("<0x[0-9A-F]{2}>")


def quick_tokenizer(content: bytes) -> bytes:
    """The contents of a tokenizer.json without the merges that are never used, and with a sorted vocabulary.

    Hugging Face's `tokenizers` (0.23) puts the vocabulary into an ordered map first, which takes least time in order.
    Other models than byte-pair encoding are returned as they are.

    Raises:
        ConversionError: it is not JSON.
    """
    try:
        tokenizer = json.loads(content)
    except ValueError as error:
        raise ConversionError(f"{TOKENIZER} is not valid JSON ({error}): download it again") from error
    model = tokenizer.get("model") if isinstance(tokenizer, dict) else None
    if not isinstance(model, dict) or model.get("type") != "BPE" or not {"vocab", "merges"} <= set(model):
        return content
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    used = _used(merges) if _begins_with_characters(model, merges) else merges
    # `tokenizers` splits a text at its spaces, and takes one that begins like this for a comment.
    as_texts = not any(" " in left + right or left.startswith("#version") for left, right in used)
    model["merges"] = [" ".join(merge) for merge in used] if as_texts else used
    model["vocab"] = dict(sorted(model["vocab"].items()))
    return json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":")).encode()


def _begins_with_characters(model: dict[str, Any], merges: list[tuple[str, ...]]) -> bool:
    """Whether all merges take part always, and join tokens that are made of a text's characters.

    They are not if they join <unk> or bytes, which stand for characters that are no tokens, or if tokens have other
    names within a word than at its ends.
    """
    if any(model.get(name) for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")):
        return False
    return not any(token == model.get("unk_token") or _BYTE.fullmatch(token) for merge in merges for token in merge)


def _used(merges: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Those of the merges that join tokens of some text, in the same order."""
    ranks = {merge: rank for rank, merge in enumerate(merges)}  # the last counts of two that are the same
    ways = Counter(map("".join, ranks))
    last = {token: _last_merge(token, ranks) for token, number in ways.items() if number > 1}
    kept = (rank for merge, rank in ranks.items() if last.get("".join(merge), rank) == rank)
    return [merges[rank] for rank in sorted(kept)]


def _last_merge(token: str, ranks: dict[tuple[str, ...], int]) -> float:
    """The rank of the merge that makes the token of its characters; infinity if the merges do not make it."""
    parts = list(token)
    found = [ranks.get(pair, math.inf) for pair in pairwise(parts)]
    while len(found) > 1 and (first := min(found)) < math.inf:
        place = found.index(first)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
        del found[place]
        for changed in range(max(place - 1, 0), min(place + 1, len(found))):
            found[changed] = ranks.get((parts[changed], parts[changed + 1]), math.inf)
    return min(found, default=math.inf)
