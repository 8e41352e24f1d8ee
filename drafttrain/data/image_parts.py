"""Images in messages: the forms in which they are published, and the one that is stored.

    OpenAI    {"type": "image_url", "image_url": {"url": SOURCE}}
    HF        {"type": "image", "image" or "path" or "url": SOURCE}
    LLaVA     "<image>" in the text, and the row's column `image` or `images`
    a column  the row's images stand before the first question
    stored    {"type": "image", "image": "<digest>.png"} and {"type": "text", "text": "..."}

SOURCE is what `read_picture` reads. Text without images stays a string.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from drafttrain.files import Json
from drafttrain.images import BadPicture, Picture

# {"role", "content"}; of an assistant also {"tool_calls", "reasoning_content"}, of a tool
# {"tool_call_id", "name"}.
Message = Mapping[str, Any]
_MARKER = re.compile(r"\n?<image>\n?")  # of LLaVA's rows, which write a line break behind it
_IMAGE = ("image", "image_url", "input_image")
_SOURCES = ("image", "image_url", "path", "url")
_OTHER = ("audio", "video", "input_audio", "audio_url", "video_url", "input_video")


def text_part(text: str) -> Json:
    return {"type": "text", "text": text}


def image_part(source: object) -> Json:
    return {"type": "image", "image": source}


def read_parts(content: Iterable[object]) -> list[Json] | None:
    """The parts of a content in the stored form, sources as they are; None for an unknown part.

    An image that its row's column holds has the source None. Empty texts are left out.

    Raises BadPicture: audio or video.
    """
    parts = []
    for given in content:
        # Text may stand between parts as it is.
        if isinstance(given, str):
            given = text_part(given)
        if not isinstance(given, Mapping):
            return None
        held = {key: value for key, value in given.items() if value is not None}
        if held.get("type") in _OTHER:
            raise BadPicture("audio or video", "messages may have text and images only")
        if held.get("type") in _IMAGE:
            source = next((held[key] for key in _SOURCES if key in held), None)
            # OpenAI's part holds the address in a mapping of its own.
            if isinstance(source, Mapping) and "url" in source:
                source = source["url"]
            parts.append(image_part(source))
        elif not isinstance(held.get("text"), str):
            return None
        elif held["text"]:
            parts.append(text_part(held["text"]))
    return parts


def row_images(row: Mapping[str, object]) -> list[object]:
    """The images of a row's column `images` or `image`."""
    for key in ("images", "image"):
        held = row.get(key)
        if not isinstance(held, list | tuple):
            held = [held]
        found = [image for image in held if image is not None and image != ""]
        if found:
            return found
    return []


def place_images(messages: Sequence[Json], images: Sequence[object]) -> list[Json]:
    """The messages with the images of the row's column at their places.

    Places are parts without a source, and LLaVA's markers in texts. Without any image among the
    messages, those of the column stand before the first question.

    Raises BadPicture: more images than places, or fewer.
    """
    if images:
        messages = [_at_markers(message) for message in messages]
    sources = sources_in(messages)
    # Nothing says where the images belong.
    if not sources:
        return in_front(messages, images)
    places = sum(source is None for source in sources)
    if places != len(images):
        raise BadPicture("image: no place", f"{len(images)} images in the row and {places} places")
    waiting = deque(images)

    def place(source: object) -> Json:
        if source is None:
            source = waiting.popleft()
        return image_part(source)

    return with_images(messages, place)


def _at_markers(message: Json) -> Json:
    """A message of the user or the system, in parts where its text holds markers."""
    content = message["content"]
    if message["role"] not in ("user", "system") or not isinstance(content, str):
        return message
    first, *others = _MARKER.split(content)  # an image before each of the others
    if not others:
        return message
    parts = [text_part(first)]
    for text in others:
        parts += [image_part(None), text_part(text)]
    return {**message, "content": read_parts(parts)}


def in_front(messages: Sequence[Json], images: Sequence[object]) -> list[Json]:
    """The messages with all images before the text of the first question."""
    made = list(messages)
    for number, message in enumerate(messages):
        if message["role"] == "user" and images:
            parts = [image_part(image) for image in images]
            made[number] = {**message, "content": [*parts, text_part(message["content"])]}
            break
    return made


def content_text(content: object) -> str:
    """The text of a message's content, its parts on lines of their own; '' for None."""
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if part["type"] == "text")
    return str(content or "")


def sources_in(messages: Iterable[Message]) -> list[object]:
    """The sources or pictures of the images of messages, in order."""
    found: list[object] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            found += [part["image"] for part in content if part["type"] == "image"]
    return found


def images_in(messages: Iterable[Message]) -> list[Picture]:
    """The pictures of messages whose images were read, in order."""
    return cast("list[Picture]", sources_in(messages))


def with_images(messages: Sequence[Message], change: Callable[..., Json]) -> list[Json]:
    """The messages with the part that `change` makes of each image."""
    made = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            parts = [change(part["image"]) if part["type"] == "image" else part for part in content]
            made.append({**message, "content": parts})
        else:
            made.append(dict(message))
    return made


def read_images(messages: Sequence[Message], read: Callable[[object], Picture]) -> list[Json]:
    """The messages with their pictures. read: reads a source; raises BadPicture."""
    return with_images(messages, lambda source: image_part(read(source)))


def with_names(messages: Sequence[Message]) -> list[Json]:
    """The messages with the names of their pictures, as they are stored."""
    return with_images(messages, lambda picture: image_part(picture.name))


def with_uris(messages: Sequence[Message]) -> list[Json]:
    """The messages as OpenAI's API takes them: pictures as data URIs."""
    return with_images(
        messages,
        lambda picture: {"type": "image_url", "image_url": {"url": picture.uri}},
    )
