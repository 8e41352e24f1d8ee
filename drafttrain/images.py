"""Pictures of prompts: read from files, data URIs and data sets, checked once, and stored by content.

    prompts.jsonl               {"type": "image", "image": "3f9a....png"} in the messages
    images/3f9a....png          the encoded bytes, named by their SHA-256

Pixels are those that transformers' `load_image` gives: the EXIF orientation is applied, then the
colors are converted to RGB (an alpha channel is dropped). Engines differ here: vLLM blends
transparent pixels with white, SGLang ignores the orientation. `Picture.uri` therefore sends such a
picture as these pixels, so that every engine sees what the target sees here.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import re
import secrets
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drafttrain.errors import UserError, first_line, reason_of, shown
from drafttrain.extras import require
from drafttrain.files import writing

FOLDER = "images"  # beside a file of prompts or in a data set
MOST_PIXELS = 89_478_485  # Pillow's limit, above which it warns of a decompression bomb
MOST_BYTES = 32_000_000  # of an encoded picture
_ORIENTATION = 0x0112  # the EXIF tag
_SECONDS = 30.0  # of a download
# Pillow's other formats are rare in data sets, and some start other programs.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
# The beginning of an encoded picture -> the end of its file's name.
_SUFFIXES = {
    b"\x89PNG": "png",
    b"\xff\xd8": "jpg",
    b"RIFF": "webp",
    b"GIF8": "gif",
    b"BM": "bmp",
    b"II": "tiff",
    b"MM": "tiff",
}
_MEDIA = {"jpg": "jpeg"}  # subtypes of media types that are no suffix
_NAME = re.compile(r"[0-9a-f]{64}\.[a-z]{3,4}")


class BadPicture(UserError):
    """A picture, or another part of a message, that cannot be used. It costs one row, not the run.

    Attributes:
        reason: its kind, by which such rows are counted, such as `image: no such file`.
    """

    def __init__(self, reason: str, detail: str):
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class Picture:
    """An encoded picture.

    Attributes:
        data: the bytes of a PNG, JPEG, WebP, GIF, BMP or TIFF file.
        digest: SHA-256 of the bytes, in hex.
    """

    data: bytes = field(repr=False)
    digest: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", hashlib.sha256(self.data).hexdigest())

    @staticmethod
    def of(data: bytes, where: str = "picture") -> Picture:
        """The picture of these bytes, decoded once to check it.

        Raises BadPicture, which names `where`.
        """
        if len(data) > MOST_BYTES:
            raise BadPicture(
                "image: too large",
                f"{where} has {len(data)} bytes; at most {MOST_BYTES} are read",
            )
        picture = Picture(data)
        picture._upright(picture._decoded(where), where)
        return picture

    @property
    def name(self) -> str:
        """The name of its file in a `PictureStore`."""
        return f"{self.digest}.{self._suffix}"

    @property
    def _suffix(self) -> str:
        for beginning, suffix in _SUFFIXES.items():
            if self.data.startswith(beginning):
                return suffix
        return "bin"

    def pixels(self) -> Any:
        """The picture as a `PIL.Image` in RGB, upright. Raises BadPicture."""
        return self._upright(self._decoded(self.digest), self.digest)

    @property
    def uri(self) -> str:
        """A data URI that every engine decodes to `pixels`."""
        image = self._decoded(self.digest)
        plain = image.mode in ("RGB", "L") and "transparency" not in image.info
        if plain and image.getexif().get(_ORIENTATION, 1) == 1:
            kind = _MEDIA.get(self._suffix, self._suffix)
            content = self.data
        else:
            kind = "png"
            content = encoded(self.pixels())
        return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"

    def _upright(self, image: Any, where: str) -> Any:
        """A decoded picture in RGB, with its EXIF orientation applied. Raises BadPicture."""
        from PIL import ImageOps

        try:
            return ImageOps.exif_transpose(image).convert("RGB")
        except Exception as error:  # of metadata, or of a mode without a conversion
            raise BadPicture("image: broken", f"{where}: {first_line(error)}") from error

    def _decoded(self, where: str) -> Any:
        """The picture as Pillow reads it. Raises BadPicture."""
        require("PIL", "a prompt with images")
        from PIL import Image

        try:
            with warnings.catch_warnings():
                # Its limit is an error below; other warnings are of odd metadata.
                warnings.simplefilter("ignore")
                image = Image.open(io.BytesIO(self.data), formats=_FORMATS)
        except Image.DecompressionBombError as error:
            raise BadPicture("image: too large", f"{where}: {first_line(error)}") from error
        # Decoders of broken files raise errors of many classes.
        except Exception as error:
            known = ", ".join(_FORMATS)
            raise BadPicture(
                "image: not an image", f"{where} holds no picture that Pillow reads ({known})"
            ) from error

        width, height = image.size
        if width * height > MOST_PIXELS:
            raise BadPicture(
                "image: too large",
                f"{where} has {width} x {height} pixels; at most {MOST_PIXELS} are decoded",
            )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                # A phone's JPEG may hold a preview behind the picture, which is no animation.
                frames = 1
                if image.format != "MPO":
                    frames = getattr(image, "n_frames", 1)
                image.load()
                image.getexif()
        except Exception as error:
            raise BadPicture(
                "image: broken", f"{where} cannot be decoded ({first_line(error)})"
            ) from error
        if frames > 1:
            raise BadPicture(
                "image: animated", f"{where} has {frames} frames; save the one that is meant"
            )
        return image


def encoded(image: Any) -> bytes:
    """A PIL image as a PNG file, which keeps every pixel."""
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


def read_picture(source: object, folder: Path | None = None, allow_urls: bool = False) -> Picture:
    """Reads a picture.

    Args:
        source: a path, relative to `folder`; a data URI; an http(s) URL; a cell of an image column
            of `datasets` ({"bytes", "path"}); encoded bytes; or a PIL image.
        folder: where relative paths begin; the present folder by default.
        allow_urls: download from URLs.

    Raises:
        BadPicture: a picture that is missing, broken, animated or too large, a URL that is not
            allowed, or a source of another form.
        UserError: Pillow is not installed.
    """
    if isinstance(source, Mapping):
        data = source.get("bytes")
        if data is None:
            data = source.get("path")
        return read_picture(data, folder, allow_urls)
    if isinstance(source, bytes | bytearray):
        return Picture.of(bytes(source))
    if isinstance(source, str | Path):
        text = str(source)
        scheme = text.partition(":")[0].lower()
        if scheme == "data":
            return Picture.of(_in_data_uri(text), shown(text))
        if scheme in ("http", "https"):
            return Picture.of(_downloaded(text, allow_urls), shown(text))
        return Picture.of(_in_file(text, folder), shown(text))
    if hasattr(source, "save") and hasattr(source, "convert"):
        return _of_image(source)
    raise BadPicture(
        "image: unknown source", f"{shown(source)} is not a path, a data URI or an image"
    )


def _of_image(image: Any) -> Picture:
    """The picture of a PIL image; the file that it was read from is not kept."""
    try:
        content = encoded(image)
    except Exception as error:  # images may be read as late as here
        raise BadPicture("image: broken", first_line(error)) from error
    return Picture.of(content)


def _in_file(text: str, folder: Path | None) -> bytes:
    """The bytes of a file. Raises BadPicture."""
    try:
        path = Path(text.removeprefix("file://")).expanduser()
        if folder is not None:
            path = folder / path
        if not path.is_file():  # nor a pipe, which would be waited for
            raise BadPicture("image: no such file", shown(str(path)))
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise BadPicture(
                "image: too large",
                f"{shown(text)} has {size} bytes; at most {MOST_BYTES} are read",
            )
        return path.read_bytes()
    except (OSError, ValueError, RuntimeError) as error:  # of the disk, or of odd paths
        raise BadPicture("image: unreadable", f"{shown(text)}: {reason_of(error)}") from error


def _in_data_uri(text: str) -> bytes:
    """The bytes of a data URI. Raises BadPicture."""
    head, comma, content = text.partition(",")
    kind = head[len("data:") :].lower()
    if not comma or not kind.startswith("image/") or not kind.endswith(";base64"):
        raise BadPicture("image: unknown source", f"{shown(head)} is not data:image/...;base64,...")
    if len(content) > 2 * MOST_BYTES:
        raise BadPicture("image: too large", f"a data URI of {len(content)} characters")
    try:
        return base64.b64decode("".join(content.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadPicture("image: broken", f"base64 of a data URI: {first_line(error)}") from error


def _downloaded(url: str, allowed: bool) -> bytes:
    """The bytes at a URL. Raises BadPicture."""
    import httpx

    if not allowed:
        raise BadPicture(
            "image: URL",
            f"{shown(url)} is not downloaded without --allow-urls; or give a local copy",
        )
    content = bytearray()
    try:
        with httpx.stream("GET", url, timeout=_SECONDS, follow_redirects=True) as reply:
            reply.raise_for_status()
            for piece in reply.iter_bytes():
                content += piece
                if len(content) > MOST_BYTES:
                    raise BadPicture(
                        "image: too large", f"{shown(url)} has over {MOST_BYTES} bytes"
                    )
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise BadPicture("image: not downloaded", f"{shown(url)}: {first_line(error)}") from error
    return bytes(content)


class PictureStore:
    """Pictures by their content, in the folder `images` beside a file of prompts or in a data set.

    Args:
        folder: of the prompts or of the data set; `images` is created with the first picture.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.images = folder / FOLDER

    def add(self, picture: Picture) -> str:
        """Stores a picture, once; returns its name. Raises UserError: it cannot be written."""
        path = self.images / picture.name
        with writing(path):
            if not path.is_file():
                self.images.mkdir(parents=True, exist_ok=True)
                # Complete or not at all, also where other processes write the same picture.
                part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
                part.write_bytes(picture.data)
                part.replace(path)
        return picture.name

    def get(self, name: str) -> Picture:
        """The picture of that name. Raises BadPicture: it is missing, or was changed."""
        picture = Picture(_in_file(name, self.images))
        if picture.name != name:
            raise BadPicture(
                "image: broken", f"{self.images / name} was changed: its name is not its SHA-256"
            )
        return picture

    def read(self, source: object, allow_urls: bool = False) -> Picture:
        """The picture of a message's part: one that was read, a name, or a source of `read_picture`.

        Relative paths begin in the store's folder. Raises as `read_picture`.
        """
        if isinstance(source, Picture):
            return source
        if isinstance(source, str) and _NAME.fullmatch(source):
            return self.get(source)
        return read_picture(source, self.folder, allow_urls)
