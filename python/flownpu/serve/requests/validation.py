# SPDX-License-Identifier: Apache-2.0
"""The error that a client receives for a request that pydantic refuses: the field's name, and the required value."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from flownpu.serve.errors import ApiError, invalid

Kind = TypeVar("Kind", bound=BaseModel)
Place = tuple[str | int, ...]
NAME_LENGTH = 200
"""Most characters of a field's name that an error repeats: names that the server does not know are the client's."""
OBJECTS = ("dict_type", "model_type", "model_attributes_type")
"""Pydantic's errors about values that are no objects; their messages name classes and types of Python."""


def validated(kind: type[Kind], document: Any) -> Kind:
    """A document as a request.

    Raises:
        ApiError: it is none of this kind.
    """
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        raise refusal(error.errors(), document) from error


def refusal(errors: Sequence[Any], body: Any) -> ApiError:
    """The error that a client receives: one of those that pydantic found, without the values that the client sent.

    Args:
        errors: what `errors()` of pydantic's or FastAPI's exception returns.
        body: the document in which they were found.
    """
    place, found = _meant(errors, body)
    name = ".".join(map(str, place))[:NAME_LENGTH]
    first = found[0]
    match first["type"]:
        case "extra_forbidden":
            return invalid(f"unknown field {name}", name, "unknown_field")
        case "missing" if name:
            return invalid(f"the field {name} is missing", name, "missing_field")
        case "union_tag_not_found":
            name = f"{name}.type"
            return invalid(f"the field {name} is missing", name, "missing_field")
        case "union_tag_invalid":
            name = f"{name}.type"
            return invalid(f"{name}: Input should be one of {first['ctx']['expected_tags']}", name, "invalid_value")
    if not name:
        return invalid("expected a JSON object as body")
    return invalid(f"{name}: {_expected(found)}", name, "invalid_value")


def _meant(errors: Sequence[Any], body: Any) -> tuple[Place, list[Any]]:
    """The place of the error that the client meant, and all errors at this place.

    Where a union is expected, each of its members reports why it does not match. The one that the client meant matches
    most of the request: the one with the deepest error, then the one with the fewest errors, then the last of a list.
    """
    places = []
    for error in errors:
        location: Place = tuple(part for number, part in enumerate(error["loc"]) if number or part != "body")
        place = _place(location, body, is_missing=error["type"] == "missing")
        places.append((place, tuple(part for part in location if part not in place), error))
    deepest = max(len(place) for place, _, _ in places)
    errors_of = Counter(branch for _, branch, _ in places)
    fewest = min(errors_of[branch] for place, branch, _ in places if len(place) == deepest)
    meant = [(place, error) for place, branch, error in places if len(place) == deepest and errors_of[branch] == fewest]
    best = max((place for place, _ in meant), key=lambda place: [part for part in place if isinstance(part, int)])
    return best, [error for place, error in meant if place == best]


def _place(location: Place, value: Any, *, is_missing: bool) -> Place:
    """The keys and indices of an error's location; the other parts are pydantic's names of a union's members."""
    if not location:
        return ()
    part, rest = location[0], location[1:]
    if is_missing and not rest:
        return (part,)
    ways = [_place(rest, value, is_missing=is_missing)]
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    if part in keys:
        ways.append((part, *_place(rest, value[part], is_missing=is_missing)))
    return max(ways, key=len)


def _expected(errors: Sequence[Any]) -> str:
    """The value that a field must have; the alternatives if each member of a union refuses its type."""
    texts = [
        "Input should be an object" if error["type"] in OBJECTS else error["msg"].removeprefix("Value error, ")
        for error in errors
    ]
    beginning = "Input should be "
    # A member of the union with the value's type explains more than members of other types.
    own = [text for text in texts if not text.startswith(beginning)]
    return own[0] if own else beginning + " or ".join(dict.fromkeys(text.removeprefix(beginning) for text in texts))
