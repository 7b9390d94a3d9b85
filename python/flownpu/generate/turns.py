# SPDX-License-Identifier: Apache-2.0
"""The content of a conversation's turns: a text, or parts, which are texts and images."""

from collections.abc import Mapping, Sequence
from typing import Any

Content = str | list[dict[str, str]]
"""A text, or parts: {"type": "text", "text": ...} and {"type": "image"}."""

IMAGE = "<start_of_image>"
"""Marks an image's place in a text, like Gemma's chat template."""


def text_of(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    """A content as one text, with a mark for each image; parts are {"type": "text", "text"} and {"type": "image"}."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(IMAGE if part["type"] == "image" else part["text"] for part in content)
