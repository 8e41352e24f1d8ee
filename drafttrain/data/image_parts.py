"""Images in messages: the forms in which they are published, and the one that is stored.

    OpenAI    {"type": "image_url", "image_url": {"url": SOURCE}}
    HF        {"type": "image", "image" or "path" or "url": SOURCE}
    LLaVA     "<image>" in the text, and the row's column `image` or `images`
    a column  the row's images stand before the first question
    stored    {"type": "image", "image": "<digest>.png"} and {"type": "text", "text": "..."}

SOURCE is what `read_picture` reads. Text without images stays a string.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from drafttrain.files import Json
from drafttrain.images import BadPicture

MARKER = "<image>"  # of LLaVA's rows
_IMAGE = ("image", "image_url", "input_image")
_SOURCES = ("image", "image_url", "path", "url")
_OTHER = ("audio", "video", "input_audio", "audio_url", "video_url", "input_video")
_COLUMNS = ("images", "image")


def read_parts(content: Iterable[object]) -> list[Json] | None:
    """The parts of a content in the stored form, sources as they are; None for an unknown part.

    An image that its row's column holds has the source None. Empty texts are left out.

    Raises BadPicture: audio or video.
    """
    parts = []
    for given in content:
        part = _part(given)
        if part is None:
            return None
        if part != text_part(""):
            parts.append(part)
    return parts


def text_part(text: str) -> Json:
    return {"type": "text", "text": text}


def image_part(source: object) -> Json:
    return {"type": "image", "image": source}


def _part(given: object) -> Json | None:
    """One part; None if it is neither text nor an image. Raises BadPicture."""
    if isinstance(given, str):
        return text_part(given)
    if not isinstance(given, Mapping):
        return None
    kind = given.get("type")
    if kind in _OTHER or any(given.get(key) is not None for key in _OTHER):
        raise BadPicture("audio or video", "messages may have text and images only")
    if kind in _IMAGE or (kind is None and any(given.get(key) is not None for key in _SOURCES)):
        for key in _SOURCES:
            source = given.get(key)
            if key == "image_url" and isinstance(source, Mapping):
                source = source.get("url")
            if source is not None:
                return image_part(source)
        return image_part(None)
    text = given.get("text")
    if isinstance(text, str):
        return text_part(text)
    return None


def row_images(row: Mapping[str, object]) -> list[object]:
    """The images of a row's column."""
    for key in _COLUMNS:
        held = row.get(key)
        if isinstance(held, list | tuple):
            found = [image for image in held if image is not None]
            if found:
                return found
        elif held is not None and not (isinstance(held, str) and not held):
            return [held]
    return []


def place_images(messages: Sequence[Json], images: Sequence[object]) -> list[Json]:
    """The messages with the images of the row's column at their places.

    Places are parts without a source, and LLaVA's markers in texts. Without any, and without images
    of the messages' own, the images stand before the first question.

    Raises BadPicture: more images than places, or fewer.
    """
    waiting = deque(images)
    placed = []
    places = 0
    for message in messages:
        content = message.get("content")
        if images and isinstance(content, str) and message["role"] in ("user", "system"):
            content = _at_markers(content)
        if isinstance(content, list):
            parts = []
            for part in content:
                if part.get("type") == "image" and part["image"] is None:
                    places += 1
                    if waiting:
                        part = image_part(waiting.popleft())
                parts.append(part)
            content = parts
        placed.append({**message, "content": content})

    if not places and waiting and not any_image(messages):
        return in_front(messages, images)
    if waiting or places > len(images):
        raise BadPicture("image: no place", f"{len(images)} images in the row and {places} places")
    return placed


def _at_markers(text: str) -> str | list[Json]:
    """The text as parts where it holds markers."""
    pieces = text.split(MARKER)
    if len(pieces) == 1:
        return text
    parts = []
    for number, piece in enumerate(pieces):
        if number:
            parts.append(image_part(None))
        if piece.strip():  # LLaVA writes a line break between image and text
            parts.append(text_part(piece.strip("\n")))
    return parts


def in_front(messages: Sequence[Json], images: Sequence[object]) -> list[Json]:
    """The messages with all images before the text of the first question."""
    made = list(messages)
    if not images:
        return made
    for number, message in enumerate(messages):
        if message["role"] == "user":
            content = message["content"]
            if isinstance(content, str):
                content = [text_part(content)]
            parts = [image_part(image) for image in images]
            made[number] = {**message, "content": [*parts, *content]}
            break
    return made


def content_text(content: object) -> str:
    """The text of a message's content, its parts on lines of their own; '' for None."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    return "\n".join(part["text"] for part in content if part["type"] == "text")


def image_sources(messages: Iterable[Mapping[str, object]]) -> Iterator[object]:
    """The sources of the images of messages, in order."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            for part in content:
                if part["type"] == "image":
                    yield part["image"]


def any_image(messages: Iterable[Mapping[str, object]]) -> bool:
    """Whether a message shows an image."""
    return next(iter(image_sources(messages)), None) is not None


def has_images(parts: Iterable[Mapping[str, object]]) -> bool:
    """Whether a part of a content is an image."""
    return any(part["type"] == "image" for part in parts)


def with_sources(messages: Sequence[Json], change: Callable[[object], Json]) -> list[Json]:
    """The messages with the part that `change` makes of each image's source."""
    made = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            parts = []
            for part in content:
                if part["type"] == "image":
                    part = change(part["image"])
                parts.append(part)
            message = {**message, "content": parts}
        made.append(message)
    return made
