# SPDX-License-Identifier: Apache-2.0
"""Exports tiny random checkpoints with optimum, in an environment of its own.

optimum-onnx 0.1.0, the newest, takes transformers below 4.58; the tests compare with transformers 5. This file is also
the script that runs in that environment: it makes the checkpoints (so that the same transformers writes and reads
them), exports them with `optimum-cli export onnx`, and generates with ORTModelForCausalLM.
"""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

# All other packages (torch, onnx, onnxruntime, numpy and the like) come from the tests' own environment: installing
# them again would take 1 GB and minutes. Pinned are those whose versions there are too new for optimum-onnx.
REQUIREMENTS = (
    "optimum-onnx==0.1.0",  # the newest
    "optimum==2.0.0",  # what optimum-onnx 0.1.0 asks for (~=2.0.0)
    "transformers==4.57.6",  # the newest below 4.58
    "tokenizers==0.22.1",  # transformers 4.57 takes 0.22.0 to 0.23.0
    "huggingface-hub==0.36.0",  # transformers 4.57 takes versions below 1.0
)

# Sizes that leave padding in blocks of 32 rows and 256 columns, and a window far below the context.
DECODER = {
    "hidden_size": 128,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,  # five times the usual one, so that logits differ by more than rounding
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "vocab_size": 260,
}
ENCODER = {
    "hidden_size": 96,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "initializer_range": 0.1,
}
WINDOW = 8
# 25 patches and a token for the class: a multiple of no block's size.
IMAGE = {"image_size": 30, "patch_size": 6}
TEXT = {"vocab_size": 260, "max_position_embeddings": 64}
CLIP_TOKENS = {"eos_token_id": 1, "bos_token_id": 2, "pad_token_id": 0}

# More than the window, so that layers with a window drop tokens.
NEW_TOKENS = 12

# In the oldest opset that optimum takes, a norm with a mean is several nodes, and sizes are given in other places.
OLD_OPSET = {"llama-opset14": "14", "bert-opset14": "14"}
DECODERS = ("llama", "qwen3", "gemma2", "gemma3", "llama-opset14")
# A model that runs only with a setting after loading: its heads are wider than hidden size / heads.
WIDE, WIDE_SIZE = "qwen3-wide", 64
TASKS = {
    **dict.fromkeys(DECODERS, "text-generation-with-past"),
    "bert": "feature-extraction",
    "bert-opset14": "feature-extraction",
    "bert-classification": "text-classification",
    "vit": "image-classification",
    "clip": "feature-extraction",
}


class ExporterError(RuntimeError):
    """The script failed in its environment."""


def environment(name: str = "optimum", more: tuple[str, ...] = ()) -> Path:
    """The Python interpreter of optimum's environment, which is made if there is none, and kept in the cache folder.

    Args:
        name: the environment's folder in the cache folder.
        more: packages that are installed beside optimum, without their dependencies.

    Raises:
        FlowNPUError: pip failed; its last lines, and the file with all of them.
    """
    from scripts.environments import cache_folder, finished_folder, run

    root, packages = cache_folder() / name, sysconfig.get_paths()["purelib"]
    requirements = [*REQUIREMENTS, *more]
    with finished_folder(root / "environment", [sys.version, packages, *requirements]) as folder:
        if folder is not None:
            run([sys.executable, "-m", "venv", "--without-pip", folder], root / "venv.log")
            pip = [sys.executable, "-m", "pip", "--python", folder, "install", "--disable-pip-version-check"]
            # Python compiles a module at its import, and most of these are never imported.
            run([*pip, "--no-compile", "--no-deps", *requirements], root / "pip.log")
            # Last on the path, so that what was installed above hides the newer versions of the tests' environment.
            site = next((folder / "lib").glob("python*")) / "site-packages"
            (site / "tests_environment.pth").write_text(packages + "\n", encoding="utf-8")
    return root / "environment" / "bin" / "python"


def call(python: Path, task: str, **arguments: Any) -> None:
    """Runs one of the script's tasks in optimum's environment.

    Raises:
        ExporterError: it failed; with the end of what it printed.
    """
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "ORT_DISABLE_TELEMETRY": "1"}
    # -P: Python is not to put this file's folder on its path.
    command = [python, "-P", __file__, task, json.dumps(arguments, default=str)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ExporterError(f"{task} failed in optimum's environment:\n{(done.stdout + done.stderr)[-3000:]}")


# --- In optimum's environment -----------------------------------------------------------------------------------------


def family(name: str) -> str:
    """The name of the model that an export was made of."""
    return name.removesuffix("-opset14").removesuffix("-wide")


def _make_model(name: str) -> Any:
    import torch
    import transformers as t

    torch.manual_seed(0)
    decoder = {**DECODER, "head_dim": WIDE_SIZE} if name == WIDE else DECODER
    gemma = {"sliding_window": WINDOW, "query_pre_attn_scalar": 24, "tie_word_embeddings": True}
    kinds = ["sliding_attention", "full_attention"]
    clip = {**ENCODER, "projection_dim": 64}
    model = {
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**DECODER, tie_word_embeddings=False)),
        "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**decoder, tie_word_embeddings=True)),
        "gemma2": lambda: t.Gemma2ForCausalLM(t.Gemma2Config(**DECODER, **gemma)),
        "gemma3": lambda: t.Gemma3ForCausalLM(t.Gemma3TextConfig(**DECODER, **gemma, layer_types=kinds)),
        "bert": lambda: t.BertModel(t.BertConfig(**ENCODER, **TEXT)),
        "bert-classification": lambda: t.BertForSequenceClassification(t.BertConfig(**ENCODER, **TEXT)),
        "vit": lambda: t.ViTForImageClassification(t.ViTConfig(**ENCODER, **IMAGE)),
        "clip": lambda: t.CLIPModel(
            t.CLIPConfig(
                text_config={**clip, **TEXT, **CLIP_TOKENS}, vision_config={**clip, **IMAGE}, projection_dim=64
            )
        ),
    }[family(name)]()
    for parameter_name, parameter in model.named_parameters():
        # They start as constants, which would hide a lost or swapped weight.
        is_norm = "norm" in parameter_name.lower()
        if is_norm or parameter_name.endswith("bias"):
            ones = is_norm and not parameter_name.endswith("bias") and not name.startswith("gemma")
            torch.nn.init.normal_(parameter, mean=float(ones), std=0.2)
    return model


def _export(output: str, names: list[str]) -> None:
    from optimum.commands.optimum_cli import main

    for name in names:
        checkpoint = Path(output) / f"{name}-checkpoint"
        _make_model(name).save_pretrained(checkpoint)
        # The command line itself, but in one process: importing torch and transformers takes seconds.
        sys.argv = ["optimum-cli", "export", "onnx", "--task", TASKS[family(name)], "--model"]
        sys.argv += [str(checkpoint), str(Path(output) / name)]
        if name in OLD_OPSET:
            sys.argv += ["--opset", OLD_OPSET[name]]
        main()


def _export_checkpoint(checkpoint: str, output: str) -> None:
    """Exports a decoder whose checkpoint exists already."""
    from optimum.exporters.onnx import main_export

    main_export(checkpoint, output, task="text-generation-with-past", do_validation=False)


def _generate(library: str, runs: list[dict[str, Any]]) -> None:
    """Greedy generation of batches.

    Args:
        library: the path of FlowNPU's library.
        runs: each with `model` (a folder), `provider`, its `options`, `inputs` (an npz file of input_ids and
            attention_mask) and `output` (the npz file to write: new tokens [batch, NEW_TOKENS], and the logits that
            they were chosen by); `head_size` where it is not hidden size / heads.
    """
    import numpy as np
    import onnxruntime

    onnxruntime.register_execution_provider_library("FlowNPUExecutionProvider", library)
    for run in runs:
        try:
            _generate_one(**run)
        except onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument as error:
            np.savez(run["output"], error=str(error))


def _generate_one(
    model: str, provider: str, options: dict[str, str], inputs: str, output: str, head_size: int = 0
) -> None:
    import numpy as np
    import torch
    from optimum.onnxruntime import ORTModelForCausalLM

    decoder = ORTModelForCausalLM.from_pretrained(model, provider=provider, provider_options=options)
    # For a model that it does not know (Gemma 2), optimum-onnx 0.1.0 takes num_attention_heads, whatever the export.
    decoder.num_key_value_heads = decoder.config.num_key_value_heads
    if head_size:
        decoder.embed_size_per_head = head_size
    generated = decoder.generate(
        **{name: torch.from_numpy(array) for name, array in np.load(inputs).items()},
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logits = np.stack([step.float().numpy() for step in generated.logits], axis=1)
    np.savez(output, tokens=generated.sequences.numpy()[:, -NEW_TOKENS:], logits=logits)


if __name__ == "__main__":
    tasks = {"export": _export, "export_checkpoint": _export_checkpoint, "generate": _generate}
    tasks[sys.argv[1]](**json.loads(sys.argv[2]))
