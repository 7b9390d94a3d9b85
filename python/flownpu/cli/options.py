# SPDX-License-Identifier: Apache-2.0
"""Arguments and options that several commands share."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from flownpu.cli.output import conversion_progress, status
from flownpu.errors import require
from flownpu.generate.language_model import LanguageModel, Sampling
from flownpu.generate.speculative.model import Speculation
from flownpu.hub.store import find_model, find_source
from flownpu.model.folder import is_embedding_folder, is_pipeline_folder, is_reranker_folder, read_genai_config
from flownpu.system.opencl_loader import use_packages_of

if TYPE_CHECKING:
    from flownpu.serve.processes.protocol import ModelSettings

# The provider that runs a model, the device on which FlowNPU's does, and the type to which matrix products round
# activations.
Provider = Literal["flownpu", "cpu"]
Device = Literal[
    "auto", "cpu", "npu", "emulate", "gpu",
    "npu+gpu", "npu+cpu", "gpu+npu", "gpu+cpu", "cpu+npu", "cpu+gpu", "emulate+gpu", "emulate+cpu",
]  # fmt: skip
Activations = Literal["bf16", "int8"]


def model_folder(model: Path) -> Path:
    """The folder of a model that is given as a path or as a name; one that was not pulled yet is."""
    with conversion_progress() as report:
        return find_model(model, report, status)


def named_model(model: Path | None) -> Path | None:
    """As `model_folder`, for arguments and options that may be left out."""
    return None if model is None else model_folder(model)


def draft_model(model: Path | None) -> Path | None:
    """As `named_model`, but for the word that stands for the model's own head."""
    return model if model == OWN_HEAD else named_model(model)


def named_source(source: Path) -> Path:
    """The checkpoint or file of a model that is given as a path or as a name."""
    with conversion_progress() as report:
        return find_source(source, None, report).path


OWN_HEAD = Path("mtp")
"""The draft that is the model's own head."""
ModelFolder = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        help="Folder that `flownpu convert` wrote, or a name such as gemma3:1b, which `flownpu pull` explains.",
        callback=model_folder,
    ),
]
ProviderOption = Annotated[
    Provider, typer.Option("--provider", help="flownpu, or cpu: ONNX Runtime's own CPU provider, to compare with.")
]
DeviceOption = Annotated[
    Device | None,
    typer.Option(
        "--device",
        help="Where FlowNPU runs the model; auto: where prices that `flownpu tune` wrote are least, else on the NPU if "
        "there is one. Of two, the first reads prompts and the second writes tokens.",
    ),
]
ActivationsOption = Annotated[
    Activations | None,
    typer.Option("--activations", help="What matrix products round activations to; int8 is faster and less exact."),
]
Threads = Annotated[
    int | None, typer.Option("--threads", min=1, help="Threads of the CPU kernels. (default: one for each core)")
]
Option = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="KEY=VALUE", help="Any option of FlowNPU's provider; may be repeated."),
]
Temperature = Annotated[float | None, typer.Option(min=0.0, help="0 is greedy. (default: the model's own settings)")]
TopK = Annotated[int | None, typer.Option(min=1, help="Sample among the k likeliest tokens.")]
TopP = Annotated[
    float | None,
    typer.Option(min=0.0, max=1.0, help="Sample among the likeliest tokens with this probability in all."),
]
Seed = Annotated[int | None, typer.Option(min=0, help="Seed of the sampling: the same seed gives the same text.")]
Lookup = Annotated[
    bool,
    typer.Option(
        "--lookup",
        help="Guess tokens from earlier text, and check several a step: the same text in less time.",
    ),
]
DraftFolder = Annotated[
    Path | None,
    typer.Option(
        "--draft",
        metavar="MODEL",
        callback=draft_model,
        help="Guess tokens with this smaller model of the same family, or with the model's own head for multi-token "
        "prediction (mtp), and check several a step.",
    ),
]
DraftDevice = Annotated[
    Device | None,
    typer.Option("--draft-device", help="Where the --draft model runs, while the model checks. (default: --device)"),
]
Context = Annotated[int, typer.Option(min=2, help="Tokens of a prompt and its answer: the size of the KV cache.")]
Slots = Annotated[int, typer.Option(min=1, help="Answers computed at the same time, and conversations kept.")]
AllowControlTokens = Annotated[
    bool,
    typer.Option(
        "--allow-control-tokens",
        help="Texts like <start_of_turn> in messages are control tokens; otherwise they are plain text.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


@dataclass(frozen=True)
class SamplingOptions:
    """How `run` and `chat` choose tokens."""

    temperature: Temperature = None
    top_k: TopK = None
    top_p: TopP = None
    seed: Seed = None

    def sampling(self) -> Sampling:
        """The options as generation takes them."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.seed)


@dataclass(frozen=True)
class DecodingOptions:
    """How commands that generate text decode it, and read their prompts."""

    lookup: Lookup = False
    draft: DraftFolder = None
    draft_device: DraftDevice = None
    allow_control_tokens: AllowControlTokens = False

    def speculation(self) -> Speculation:
        """The sources of candidates."""
        has_head = self.draft == OWN_HEAD
        if self.draft_device is not None and (has_head or self.draft is None):
            raise typer.BadParameter("expected --draft with the folder of a model", param_hint="--draft-device")
        use_packages_of({"device": self.draft_device or ""})
        return Speculation(self.lookup, None if has_head else self.draft, self.draft_device, head=has_head)


@dataclass(frozen=True)
class SessionOptions:
    """The provider that runs a model, and its settings."""

    provider: ProviderOption = "flownpu"
    device: DeviceOption = None
    activations: ActivationsOption = None
    threads: Threads = None
    option: Option = None

    def settings(self) -> dict[str, Any]:
        """The arguments `provider`, `options` and `threads` for opening a model.

        Raises:
            typer.BadParameter: an `--option` is not of the form KEY=VALUE.
        """
        options = provider_options(self.device, self.activations, self.option)
        return {"provider": self.provider, "options": options, "threads": self.threads}


def open_model(folder: Path, session: SessionOptions, decoding: DecodingOptions) -> LanguageModel:
    """Opens a model folder as the command line's options say.

    Raises:
        typer.BadParameter: an `--option` is not of the form KEY=VALUE.
    """
    return LanguageModel(
        folder,
        **session.settings(),
        speculation=decoding.speculation(),
        allow_control_tokens=decoding.allow_control_tokens,
    )


def provider_options(
    device: Device | None, activations: Activations | None, option: list[str] | None
) -> dict[str, str]:
    """The options of FlowNPU's provider by key.

    Raises:
        typer.BadParameter: an `--option` is not of the form KEY=VALUE.
    """
    options: dict[str, str] = {}
    for text in option or []:
        key, separator, value = text.partition("=")
        if not key or not separator:
            raise typer.BadParameter(f"expected KEY=VALUE, such as cpu_isa=avx2, got {text!r}", param_hint="--option")
        options[key] = value
    if device is not None:
        options["device"] = device
    use_packages_of(options)
    if activations is not None:
        options["activations"] = activations
    return options


def served_models(
    models: list[str], context: int, slots: int, session: SessionOptions, decoding: DecodingOptions
) -> "dict[str, ModelSettings]":
    """Models for a server, by name: NAME=MODEL, or a folder, whose last part is the name, or a name of the hub.

    Raises:
        typer.BadParameter: two have the same name, or a draft model is given for several.
        FlowNPUError: a folder holds no model.
    """
    if decoding.draft not in (None, OWN_HEAD) and len(models) > 1:
        raise typer.BadParameter(
            f"a draft model is of one model's family, got {len(models)} models: serve each with its own",
            param_hint="--draft",
        )
    named: dict[str, ModelSettings] = {}
    for text in models:
        name, separator, place = text.partition("=")
        if not separator or not name or os.sep in name:
            name, place = "", text
        folder = model_folder(Path(place))
        name = name or (folder.resolve().name if folder == Path(place) else place)
        if name in named:
            raise typer.BadParameter(f"two models have the name {name}: expected NAME=MODEL to tell them apart")
        if not (is_embedding_folder(folder) or is_pipeline_folder(folder) or is_reranker_folder(folder)):
            read_genai_config(folder)
        named[name] = model_settings(folder, context, slots, session, decoding)
    return named


def model_settings(
    folder: Path, context: int, slots: int, session: SessionOptions, decoding: DecodingOptions
) -> "ModelSettings":
    """How a server opens a model.

    Raises:
        typer.BadParameter: an `--option` is not of the form KEY=VALUE.
    """
    protocol = require("flownpu.serve.processes.protocol", extra="serve", purpose="Serving models")
    made: ModelSettings = protocol.ModelSettings(
        folder,
        **session.settings(),
        context=context,
        slots=slots,
        speculation=decoding.speculation(),
        allow_control_tokens=decoding.allow_control_tokens,
    )
    return made
