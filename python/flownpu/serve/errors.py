# SPDX-License-Identifier: Apache-2.0
"""Errors as clients of OpenAI's API read them: a status code and one JSON object."""

from typing import Any

_ANTHROPIC_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}

LONGEST = 2000
"""Characters of a message. It may repeat what a client sent, megabytes if the client likes; its ends explain."""


class ApiError(Exception):
    """An error that a client receives.

    Args:
        status: the HTTP status code.
        message: what was expected, what came, what to do.
        code: a word for programs, such as "unknown_field".
        parameter: the field of the request that is wrong, such as "messages.0.content"; None: no single field.
        headers: further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        parameter: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        if len(message) > LONGEST:
            message = f"{message[: LONGEST // 2]} ... {message[-LONGEST // 2 :]}"
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.parameter = parameter
        self.headers = headers or {}

    def document(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, kind)
        return {"error": {"message": self.message, "type": kind, "param": self.parameter, "code": self.code}}

    def anthropic_document(self) -> dict[str, Any]:
        """Anthropic's error object, which has no field for the parameter: the message names it."""
        kind = "api_error" if self.status >= 500 else "invalid_request_error"
        kind = _ANTHROPIC_KINDS.get(self.status, kind)
        return {"type": "error", "error": {"type": kind, "message": self.message}}


def invalid(message: str, parameter: str | None = None, code: str | None = None) -> ApiError:
    """Status 400: the request is wrong."""
    return ApiError(400, message, parameter=parameter, code=code)


def too_long(message: str, parameter: str) -> ApiError:
    """Status 400: a prompt does not fit in the context. Clients look for this code to shorten conversations."""
    return invalid(message, parameter, "context_length_exceeded")


def mistake() -> ApiError:
    """Status 500: the server has a bug, whose details are only logged."""
    return ApiError(500, "the server made a mistake; its log says which")


def too_slow(seconds: float) -> ApiError:
    """Status 504: an answer took more than `seconds`."""
    return ApiError(504, f"the answer took more than {seconds:.0f} s, and was given up", code="timeout")


def not_loaded(name: str, error: Exception) -> ApiError:
    """Status 503: a model cannot be opened."""
    return ApiError(503, f"the model {name} cannot be loaded: {error}", code="model_not_loaded")


def unknown_model(name: str, known: list[str]) -> ApiError:
    """Status 404: there is no such model."""
    there = ", ".join(known) or "none"
    return ApiError(404, f"no model {name!r} here; there is {there}", code="model_not_found", parameter="model")


def busy(message: str, seconds: float) -> ApiError:
    """Status 429: there are too many requests. `seconds` is when to try again (Retry-After)."""
    return ApiError(429, message, code="queue_full", headers={"Retry-After": str(max(1, round(seconds)))})
