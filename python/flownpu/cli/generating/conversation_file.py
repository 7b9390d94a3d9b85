# SPDX-License-Identifier: Apache-2.0
"""Conversations as files: their turns in JSON, as OpenAI's API has them, and the paths of their images."""

import json
from pathlib import Path

from flownpu.errors import FlowNPUError
from flownpu.generate.conversation import Conversation
from flownpu.generate.image_prompts import read_images

ROLES = ("system", "user", "assistant")


def save_conversation(conversation: Conversation, file: Path) -> None:
    """Writes the turns into a file, and replaces it if it is there.

    Raises:
        FlowNPUError: the file cannot be written.
    """
    images = [str(image.path.resolve()) for image in conversation.images]
    document = {"messages": conversation.messages, "images": images}
    try:
        file.write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise FlowNPUError(f"{file} cannot be written: {error.strerror}") from error


def load_conversation(conversation: Conversation, file: Path) -> None:
    """Replaces the conversation by that of a file.

    Raises:
        FlowNPUError: the file or an image cannot be read, or the file is of something else; nothing changes.
    """
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        messages, names = document["messages"], document["images"]
        fits = all(one["role"] in ROLES and isinstance(one["content"], str | list) for one in messages)
        paths = [Path(name) for name in names]
    except OSError as error:
        raise FlowNPUError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise FlowNPUError(f"{file}: expected a conversation that /save wrote") from error
    if not fits:
        raise FlowNPUError(f"{file}: expected turns of {', '.join(ROLES)}, with texts")
    conversation.restore(messages, read_images(conversation.model.folder, paths) if paths else [])
