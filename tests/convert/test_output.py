# SPDX-License-Identifier: Apache-2.0
"""An output is complete or missing, and never replaces anything without --force."""

import errno
import hashlib
import json
import os
import shutil
import sys
from collections import namedtuple
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
import transformers

from flownpu.convert import ConversionError, Progress, convert
from flownpu.convert import output as output_module
from flownpu.convert.graph import data_file
from flownpu.convert.output import output_folder
from flownpu.generate.chat_template import ChatTemplate
from flownpu.graph_rewrites.testing import declare_simplified_layer_normalization


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_output_has_expected_files(checkpoint: Path, tmp_path: Path) -> None:
    convert(checkpoint, tmp_path / "deep" / "er" / "model")
    assert listing(tmp_path / "deep" / "er" / "model") == [
        "flownpu_manifest.json",
        "genai_config.json",
        "model.onnx",
        "model.onnx.data",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "deep" / "er" / "model").stat().st_mode & 0o777 == 0o777 & ~mask


def test_manifest_names_source_sums_versions_and_errors(checkpoint: Path, tmp_path: Path) -> None:
    convert(checkpoint, tmp_path / "model", kv_dtype="fp16")
    manifest = json.loads((tmp_path / "model" / "flownpu_manifest.json").read_text())
    for folder, files in ((checkpoint, manifest["source"]["files"]), (tmp_path / "model", manifest["files"])):
        assert files
        for name, facts in files.items():
            assert facts["sha256"] == hashlib.sha256((folder / name).read_bytes()).hexdigest()
    assert "model.safetensors" in manifest["source"]["files"]
    assert {*manifest["files"], "flownpu_manifest.json"} == set(listing(tmp_path / "model"))
    assert manifest["source"]["model_type"] == "gemma3_text"
    assert manifest["settings"]["kv_dtype"] == "fp16"
    assert {"flownpu", "numpy", "python"} <= set(manifest["versions"])
    errors = manifest["quantisation"]["relative_error"]
    assert len(errors) == 1 + 3 * 4
    # Normal weights in groups of 32: the range is about 4 deviations, in 15 steps of s; a uniform rounding error is
    # s / sqrt(12) = 4 / 15 / 3.46 = 0.077 of the deviation.
    assert all(0.03 < error < 0.1 for error in errors.values())


def test_conversion_gives_same_bytes_again(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        convert(checkpoint, tmp_path / name)
    for name in listing(tmp_path / "one"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


def test_graph_passes_checker(checkpoint: Path, tmp_path: Path) -> None:
    convert(checkpoint, tmp_path / "model")
    model = onnx.load(tmp_path / "model" / "model.onnx")
    declare_simplified_layer_normalization()
    onnx.checker.check_model(model)


def test_tensors_lie_at_multiples_of_page(checkpoint: Path, tmp_path: Path) -> None:
    convert(checkpoint, tmp_path / "model")
    model = ir.load(tmp_path / "model" / "model.onnx")
    external = [
        v.const_value for v in model.graph.initializers.values() if isinstance(v.const_value, ir.ExternalTensor)
    ]
    assert len(external) == 1 + 3 * 4 + 3 * 6 + 1 + 4  # embedding, projections, norms, final norm, rotary caches
    assert all(tensor.offset % 4096 == 0 for tensor in external)
    assert {tensor.location for tensor in external} == {"model.onnx.data"}
    end = max(tensor.offset + tensor.length for tensor in external)
    assert end == (tmp_path / "model" / "model.onnx.data").stat().st_size


def test_failed_replacement_keeps_model(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, rename = tmp_path / "model", Path.rename
    convert(checkpoint, output)
    before = (output / "model.onnx").read_bytes()

    def fail_for_the_new_one(path: Path, target: Path) -> Path:
        if path.suffix == ".partial":
            raise OSError(errno.EIO, "I/O error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail_for_the_new_one)
    with pytest.raises(ConversionError, match="I/O error"):
        convert(checkpoint, output, kv_dtype="fp16", force=True)
    assert (output / "model.onnx").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_empty_output_folder_is_accepted(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    convert(checkpoint, tmp_path / "model")
    assert (tmp_path / "model" / "model.onnx").exists()


@pytest.mark.parametrize("existing", [False, True])
def test_folder_that_cannot_be_renamed_gets_files(
    existing: bool, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount point cannot be renamed, and has separate free space. Files of an earlier model in it are replaced."""
    output, rename, asked = tmp_path / "model", Path.rename, []
    convert(checkpoint, output) if existing else output.mkdir()
    before = output.stat().st_ino

    def busy(path: Path, target: Path) -> Path:
        if output in (path, Path(target)):
            raise OSError(errno.EBUSY, "Device or resource busy")
        return rename(path, target)

    usage = shutil.disk_usage
    monkeypatch.setattr(Path, "rename", busy)
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == output)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(Path(path)) or usage(path))
    convert(checkpoint, output, kv_dtype="fp16", force=existing)
    assert asked == [output]
    assert output.stat().st_ino == before
    assert json.loads((output / "flownpu_manifest.json").read_text())["settings"]["kv_dtype"] == "fp16"
    assert not [name for name in listing(tmp_path) if ".partial" in name or ".previous" in name]

    def interrupt(_: Progress) -> None:
        raise KeyboardInterrupt

    names = listing(output)
    with pytest.raises(KeyboardInterrupt):
        convert(checkpoint, output, force=True, progress=interrupt)
    assert listing(output) == names


def test_working_directory_stays_usable(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for force in (False, True):
        convert(checkpoint, Path(), force=force)
        assert Path("flownpu_manifest.json").is_file()
    assert not [name for name in listing(tmp_path) if ".partial" in name or ".previous" in name]


def test_mount_on_same_file_system_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts, place = tmp_path / "mountinfo", tmp_path / "a model"
    place.mkdir()
    mounts.write_text(f"36 35 98:0 / {str(place).replace(' ', chr(92) + '040')} rw - ext4 /dev/root rw\n")
    monkeypatch.setattr(output_module, "_MOUNTS", mounts)
    assert output_module._is_mount_point(place)
    assert not output_module._is_mount_point(tmp_path)


@pytest.mark.skipif(sys.platform == "win32", reason="folders are locked as POSIX does")
@pytest.mark.parametrize("inside", [False, True])
def test_leftovers_of_killed_process_are_removed(inside: bool, checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "model"
    left = output / ".in.0123abcd.partial" if inside else tmp_path / ".model.0123abcd.partial"
    left.mkdir(parents=True)
    (left / "model.onnx.data").write_bytes(bytes(100))
    with output_folder(tmp_path / "other", force=False, size=1) as written:
        convert(checkpoint, output)
        assert not left.exists()
        assert written.exists()
        with output_folder(tmp_path / "other", force=False, size=1) as second:
            assert written.exists()
            (second / "flownpu_manifest.json").write_text("{}")
        shutil.rmtree(tmp_path / "other")


def test_force_does_not_replace_foreign_folder(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear.txt").write_text("")
    with pytest.raises(ConversionError, match="no conversion wrote"):
        convert(checkpoint, tmp_path / "letters", force=True)
    with pytest.raises(ConversionError, match="no conversion wrote"):
        convert(checkpoint, checkpoint, force=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConversionError, match="no folder"):
        convert(checkpoint, tmp_path / "file", force=True)
    assert listing(tmp_path / "letters") == ["dear.txt"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("bug"), OSError(errno.ENOSPC, "full")])
@pytest.mark.parametrize("existing", [False, True])
def test_interruption_leaves_nothing(error: BaseException, existing: bool, checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "new" / "model"
    if existing:
        convert(checkpoint, output)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    names = listing(tmp_path)

    def interrupt(progress: Progress) -> None:
        if progress.done > progress.total / 2:
            raise error

    expected = ConversionError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected):
        convert(checkpoint, output, force=True, progress=interrupt)
    assert listing(tmp_path) == names
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_full_disk_is_named(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(data_file.DataFile, "write", full)
    with pytest.raises(ConversionError, match="the disk became full"):
        convert(checkpoint, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_too_little_room_is_refused_before_anything_is_written(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 10, 1000))
    before = listing(tmp_path)
    with pytest.raises(ConversionError, match="MB free"):
        convert(checkpoint, tmp_path / "model")
    assert listing(tmp_path) == before


def test_progress_counts_every_weight_and_byte(checkpoint: Path, tmp_path: Path) -> None:
    seen: list[Progress] = []
    convert(checkpoint, tmp_path / "model", progress=seen.append)
    stages = {progress.stage: progress for progress in seen}
    assert list(stages) == ["quantise", "sum"]
    assert all(progress.done == progress.total for progress in stages.values())
    assert stages["quantise"].total == 300 * 96 + 3 * ((6 + 4) * 16 * 96 + 6 * 16 * 96 + 3 * 96 * 160)
    assert [p.done for p in seen if p.stage == "quantise"] == sorted(p.done for p in seen if p.stage == "quantise")


def test_chat_templates_are_copied_and_render_as_checkpoints(checkpoint: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(checkpoint, source)
    (source / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools[0].name }}{{ sep_token }}")
    (source / "special_tokens_map.json").write_text('{"sep_token": "<sep>"}')
    convert(source, tmp_path / "model")
    manifest = json.loads((tmp_path / "model" / "flownpu_manifest.json").read_text())
    for files in (manifest["source"]["files"], manifest["files"]):
        assert "additional_chat_templates/tool_use.jinja" in files
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    messages, tools = [{"role": "user", "content": "Hi"}], [{"name": "f"}]
    for given in ([], tools):
        expected = tokenizer.apply_chat_template(messages, given or None, tokenize=False, add_generation_prompt=True)
        assert ChatTemplate.of(tmp_path / "model").render(messages, given) == expected
