# SPDX-License-Identifier: Apache-2.0
"""The errors whose text is shown to the user as it is: what was expected, what was found, what to do."""

import importlib
import importlib.util
from types import ModuleType


class FlowNPUError(RuntimeError):
    """An error that the user can correct. Its message is complete: the command line prints it and nothing else."""


class ContextLengthError(FlowNPUError):
    """A prompt leaves no room for an answer in the context."""


class MissingDependencyError(FlowNPUError):
    """A package that only some commands need is not installed. The message has the pip command that installs it."""


def require(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Imports an optional dependency.

    Args:
        module: the module's name, such as "onnxruntime_genai".
        extra: the extra of this package that installs it.
        purpose: what needs it, as the subject of the error's sentence: "flownpu run".

    Raises:
        MissingDependencyError: the module, or one that it imports, is not installed; the message has the pip command.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise _missing(error.name or module, extra, purpose) from error


def check_installed(module: str, *, extra: str, purpose: str) -> None:
    """Like `require`, for a module that only another process imports."""
    if importlib.util.find_spec(module) is None:
        raise _missing(module, extra, purpose)


def _missing(module: str, extra: str, purpose: str) -> MissingDependencyError:
    return MissingDependencyError(f'{purpose} needs the Python package {module}: pip install "flownpu[{extra}]"')


def check_text(text: str) -> None:
    """Raises FlowNPUError if a text came from bytes that are not UTF-8, which Python keeps as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        before = text[max(0, error.start - 20) : error.start]
        given = text[error.start].encode(
            "utf-8", "surrogatepass" if ord(text[error.start]) < 0xDC80 else "surrogateescape"
        )
        raise FlowNPUError(
            f"expected a text in UTF-8, got the byte 0x{given[0]:02x} after {before!r}: convert "
            "it (`iconv -f latin1 -t utf-8`)"
        ) from error
