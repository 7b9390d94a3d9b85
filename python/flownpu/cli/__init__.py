# SPDX-License-Identifier: Apache-2.0
"""The command line `flownpu`: one file a command, and the one place where an error becomes a line and an exit code."""

import contextlib
import logging
import os
import platform
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from importlib import import_module
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, get_type_hints

import typer

from flownpu.build_info import build_info
from flownpu.cli.output import LogLines, status
from flownpu.doctor.checks import Status
from flownpu.doctor.libraries import diagnose_module
from flownpu.errors import FlowNPUError
from flownpu.system import ENDING_SIGNALS, prepare_streams

__all__ = ["application", "main"]


def _print_version(wanted: bool) -> None:
    if wanted:
        from flownpu import __version__  # noqa: PLC0415 they take 50 ms to import, which other commands save
        from flownpu.machine import module_versions  # noqa: PLC0415

        build = build_info()
        others = {"python": platform.python_version(), **module_versions("onnxruntime", "onnxruntime_genai")}
        around = ", ".join(f"{name} {version}" for name, version in others.items())
        typer.echo(f"flownpu {__version__} ({build}; {around})")
        raise typer.Exit


def _flownpu(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the versions and leave.")
    ] = False,
) -> None:
    """Run 4-bit language models in ONNX Runtime on AMD Ryzen AI NPUs, and on any CPU."""
    del debug, version  # `main` reads the first option, and a callback has handled the second.


# The place of each command below this package: its module and its function.
_COMMANDS = {
    "convert": "convert:convert",
    "pull": "models.pull:pull",
    "list": "models.listing:list_models",
    "remove": "models.remove:remove",
    "export-q4nx": "export_q4nx:export_q4nx",
    "run": "generating.run:run",
    "chat": "generating.chat:chat",
    "imagine": "imagine:imagine",
    "embed": "embedding.embed:embed",
    "rerank": "embedding.rerank:rerank",
    "serve": "serving.serve:serve",
    "batch": "serving.batch:batch",
    "bench": "bench:bench",
    "tune": "tune:tune_model",
    "inspect": "inspect:inspect",
    "explain": "explain:explain",
    "verify": "verify:verify",
    "build": "build:build",
    "compile": "compile_model:compile_model_folder",
    "predict": "predict:predict",
    "trace": "trace:trace",
    "selftest": "selftest:selftest",
    "doctor": "doctor:doctor",
    "make-model": "make_model:make_model",
}


def application(arguments: Sequence[str] = ()) -> typer.Typer:
    """The program with all commands, or with the one that the command line names: to import all takes most of a second.

    It has `doctor` alone where the module that the other commands call does not load. `main` hears Ctrl-C by then.
    """
    app = typer.Typer(
        name="flownpu",
        no_args_is_help=True,
        add_completion=False,
        # An error is one line. `main` prints it, with the traceback if --debug is given.
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_flownpu)
    # No option before the command has a value.
    named = next((argument for argument in arguments if not argument.startswith("-")), "")
    names = {named} & _COMMANDS.keys() or _COMMANDS.keys()
    if diagnose_module().status is Status.BAD:  # the others cannot be imported
        names = {"doctor"}
    for name, place in _COMMANDS.items():
        if name in names:
            module, _, function = place.partition(":")
            app.command(name)(_with_groups(getattr(import_module(f"flownpu.cli.{module}"), function)))
    return app


def _with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """A command as typer reads it: each parameter whose type is a dataclass is replaced by the fields of that class."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    parameters: list[Parameter] = []
    for name, parameter in signature(command).parameters.items():
        if name in groups:
            types = get_type_hints(groups[name], include_extras=True)
            parameters += [_keyword(each.name, each.default, types[each.name]) for each in fields(groups[name])]
        else:
            parameters.append(_keyword(name, parameter.default, hints[name]))

    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{each.name: values.pop(each.name) for each in fields(group)})
        command(**values)

    run.__doc__ = command.__doc__
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return run


def _keyword(name: str, default: Any, annotation: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; the process's own if none is given.

    Returns:
        The exit code: 0, 1 if the command failed, 2 if it was not understood, 130 after Ctrl-C, 143 after SIGTERM.
    """
    code = _run(sys.argv[1:] if arguments is None else arguments)
    try:
        sys.stdout.flush()
    # the reader of the pipe has ended, as `head` does: the rest of the output is dropped, also when Python ends
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _run(arguments: list[str]) -> int:
    prepare_streams()
    # ONNX Runtime's Linux wheels send telemetry unless this is set before they are imported.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    logging.basicConfig(format="%(message)s", handlers=[LogLines()])
    debug = "--debug" in arguments
    try:
        with _endings_clean_up():
            _check_module(arguments)
            # --debug is understood behind the command too.
            application(arguments)(args=[each for each in arguments if each != "--debug"], prog_name="flownpu")
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # noqa: BLE001 the outermost edge: whatever went wrong becomes a line and an exit code
        if debug:
            traceback.print_exc()
        status(f"error: {_describe(error)}")
        return 1
    return 0


def _check_module(arguments: list[str]) -> None:
    """Raises FlowNPUError where the module in C++ does not load; else the command would be reported as unknown."""
    module = diagnose_module()
    if module.status is Status.BAD and not {"doctor", "--version"} & set(arguments):
        raise FlowNPUError(f"{module.name} {module.found}. Mend it with: {module.remedy}. `flownpu doctor` says more")


@contextlib.contextmanager
def _endings_clean_up() -> Iterator[None]:
    """Makes SIGTERM and a closing terminal end a command by an exception, which removes incomplete output."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set signal handlers
        yield
        return

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    # An ignored signal (nohup) stays ignored.
    before = {
        number: signal.getsignal(number) for number in ENDING_SIGNALS if signal.getsignal(number) != signal.SIG_IGN
    }
    for number in before:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _describe(error: Exception) -> str:
    # These errors carry a message for the user: our own errors, the system's, and those of ONNX Runtime and GenAI.
    if isinstance(error, (RuntimeError, ValueError, OSError)) or type(error).__module__.startswith("onnxruntime"):
        return str(error) or type(error).__name__
    return f"{type(error).__name__}: {error}. This is a bug of flownpu; `flownpu --debug ...` shows where it happened"
