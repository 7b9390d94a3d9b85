# SPDX-License-Identifier: Apache-2.0
"""Behaviour of all commands: help, version, one line for an error, exit codes, no telemetry."""

import importlib.metadata
import os
import subprocess
import sys
from typing import get_args, get_type_hints

import pytest
from rich.text import Text

import flownpu.cli
from flownpu.cli import application, main

CALLBACKS = {command.name: command.callback for command in application().registered_commands}
COMMANDS = sorted(CALLBACKS)


def test_commands_equal_documentation():
    assert COMMANDS == [
        "batch", "bench", "build", "chat", "compile", "convert", "doctor", "embed", "explain", "export-q4nx",
        "imagine", "inspect", "list", "make-model", "predict", "pull", "remove", "rerank", "run", "selftest", "serve",
        "trace", "tune", "verify",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "command", [[], *([name] for name in COMMANDS)], ids=lambda command: " ".join(command) or "top"
)
def test_help_is_shown(flownpu, command):
    done = flownpu(*command, "--help")
    assert done.code == 0
    assert "Usage: flownpu" in done.out


@pytest.mark.parametrize("command", COMMANDS)
def test_options_all_have_help(command):
    hints = get_type_hints(CALLBACKS[command], include_extras=True)
    descriptions = {name: get_args(hint)[1].help for name, hint in hints.items() if name != "return"}
    assert [name for name, text in descriptions.items() if not text] == []
    # Text in square brackets is markup to the help's printer, which shows none of it.
    assert [name for name, text in descriptions.items() if Text.from_markup(text).plain != text] == []
    assert descriptions


def test_missing_arguments_show_help(flownpu):
    assert "Usage: flownpu" in (done := flownpu()).out + done.err
    assert done.code == 2


def test_version_names_packages(flownpu):
    done = flownpu("--version")
    assert done.code == 0
    for package in ("flownpu", "onnxruntime", "onnxruntime-genai"):
        assert f"{package} {importlib.metadata.version(package)}" in done.out


def test_run_imports_no_slow_module_that_other_commands_need(model):
    script = """
import sys
from flownpu.cli import main
assert main(["run", sys.argv[1], "-p", "loops", "--max-new-tokens", "1"]) == 0
slow = {"importlib.metadata", "ml_dtypes", "multiprocessing", "onnxruntime", "rich.progress", "rich.table"}
slow |= {"flownpu.ops", "jinja2", "psutil"}  # another process renders; a process that is slow is watched
print(*sorted(slow & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script, model], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == ""


@pytest.mark.parametrize("line", ["walk", "run", "run x --colour red", "run x --device tpu", "bench x --repeats 0"])
def test_unknown_argument_exits_with_2(flownpu, line):
    done = flownpu(*line.split())
    assert done.code == 2
    assert "Error" in done.err
    assert done.out == ""


def test_error_is_one_line_on_stderr(flownpu, tmp_path):
    done = flownpu("run", tmp_path / "absent", "-p", "x")
    assert (done.code, done.out) == (1, "")
    assert done.err == (
        f"error: no such folder: {tmp_path / 'absent'}. `flownpu convert CHECKPOINT {tmp_path / 'absent'}` "
        "makes a model folder\n"
    )


@pytest.mark.parametrize("where", ["before", "behind"])
def test_debug_shows_traceback(flownpu, tmp_path, where):
    arguments = ["run", tmp_path / "absent", "-p", "x"]
    done = flownpu(*(["--debug", *arguments] if where == "before" else [*arguments, "--debug"]))
    assert done.code == 1
    assert "Traceback" in done.err
    assert done.err.splitlines()[-1].startswith("error: no such folder")


def test_unexpected_error_is_called_bug(flownpu, monkeypatch, tmp_path):
    def fail(*_arguments, **_options):
        raise KeyError("scale")

    monkeypatch.setattr("flownpu.cli.options.LanguageModel", fail)
    done = flownpu("run", tmp_path, "-p", "x")
    assert done.code == 1
    assert done.err == (
        "error: KeyError: 'scale'. This is a bug of flownpu; `flownpu --debug ...` shows where it happened\n"
    )


def test_missing_package_names_install_command(flownpu, monkeypatch, model):
    monkeypatch.setitem(sys.modules, "onnxruntime_genai", None)
    done = flownpu("run", model, "-p", "x", "--provider", "cpu")
    assert done.code == 1
    assert (
        done.err == 'error: Text generation needs the Python package onnxruntime_genai: pip install "flownpu[genai]"\n'
    )


def test_ctrl_c_while_commands_are_imported_is_quiet():
    script = (
        "import importlib, sys; find = importlib.import_module\n"
        "def interrupted(name, *others):\n"
        "    if name == 'flownpu.cli.doctor': raise KeyboardInterrupt\n"
        "    return find(name, *others)\n"
        "importlib.import_module = interrupted\n"
        "from flownpu.cli import main; sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", script, "doctor"], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (130, b"")


def test_command_imports_no_other_command(model):
    """Importing all takes most of a second; only the answer to an unknown command needs all of them."""
    script = (
        "import sys; from flownpu.cli import main; code = main(sys.argv[1:])\n"
        "print([name for name in ('bench', 'doctor', 'inspect') if f'flownpu.cli.{name}' in sys.modules])\n"
        "sys.exit(code)"
    )

    def imported(*arguments):
        done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout.splitlines()[-1]

    assert imported("--debug", "inspect", str(model)) == (0, "['inspect']")
    assert imported("no-such-command") == (2, "['bench', 'doctor', 'inspect']")


def test_closed_pipe_raises_no_error(model):
    # `flownpu ... | head -1`: the pipe is closed before the program has written all.
    line = f"{sys.executable} -c 'from flownpu.cli import main; main()' inspect {model} --json | head -1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {line}"], capture_output=True, text=True, check=False)
    assert done.stdout == "{\n"
    assert "Traceback" not in done.stderr
    assert "Broken pipe" not in done.stderr


def test_closed_pipe_at_exit_is_no_error():
    """Output that is not yet written when the command ends: Python would complain, and end with 120."""
    reader, writer = os.pipe()
    os.close(reader)
    script = "import sys; from flownpu.cli import main; print('left'); sys.exit(main(['no-such-command']))"
    buffered = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, "-c", script], stdout=writer, stderr=subprocess.PIPE, text=True, env=buffered, check=False
    )
    os.close(writer)
    assert done.returncode == 2
    assert "no-such-command" in done.stderr
    assert "Broken pipe" not in done.stderr


def test_telemetry_is_not_sent(model, tmp_path):
    # ONNX Runtime's telemetry keeps an identifier and a queue of events below the home folder.
    environment = {key: value for key, value in os.environ.items() if key != "ORT_DISABLE_TELEMETRY"}
    environment |= {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    script = "import sys; from flownpu.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", script, "run", str(model), "-p", "x", "--provider", "cpu"]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_telemetry_stays_as_user_has_set_it(monkeypatch, capsys):
    monkeypatch.setenv("ORT_DISABLE_TELEMETRY", "0")
    assert main(["--version"]) == 0
    assert os.environ["ORT_DISABLE_TELEMETRY"] == "0"
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY")
    assert flownpu.cli.main(["--version"]) == 0
    assert os.environ["ORT_DISABLE_TELEMETRY"] == "1"
    capsys.readouterr()
