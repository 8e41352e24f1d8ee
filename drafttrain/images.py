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
import hashlib
import io
import re
import secrets
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from drafttrain.errors import UserError, first_line, reason_of, shown
from drafttrain.extras import require
from drafttrain.files import writing

if TYPE_CHECKING:
    from PIL import Image

MOST_PIXELS = 89_478_485  # Pillow's limit, above which it warns of a decompression bomb
MOST_BYTES = 32_000_000  # of an encoded picture
_ORIENTATION = 0x0112  # the EXIF tag
_SECONDS = 30.0  # of a download
# Pillow's other formats are rare in data sets, and some start other programs.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
# The beginning of an encoded picture -> its format, as in media types and names of files.
_KINDS = {
    b"\x89PNG": "png",
    b"\xff\xd8": "jpeg",
    b"RIFF": "webp",
    b"GIF8": "gif",
    b"BM": "bmp",
    b"II": "tiff",
    b"MM": "tiff",
}
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

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def _kind(self) -> str:
        for beginning, kind in _KINDS.items():
            if self.data.startswith(beginning):
                return kind
        return "bin"

    @property
    def name(self) -> str:
        """The name of its file in a `PictureStore`."""
        return f"{self.digest}.{self._kind}"

    def pixels(self) -> Image.Image:
        """The picture as a `PIL.Image` in RGB, upright. Raises BadPicture."""
        return self.read(self.digest)[1]

    @property
    def uri(self) -> str:
        """A data URI that every engine decodes to `pixels`."""
        image, pixels = self.read(self.digest)
        data = self.data
        kind = self._kind
        plain = image.mode in ("RGB", "L") and "transparency" not in image.info
        if not plain or image.getexif().get(_ORIENTATION, 1) != 1:
            data = _png(pixels)
            kind = "png"
        return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"

    def read(self, where: str) -> tuple[Image.Image, Image.Image]:
        """The picture as Pillow decodes it, and its `pixels`.

        Raises BadPicture, which names `where`; UserError: Pillow is not installed.
        """
        require("PIL", "a prompt with images")
        from PIL import Image, ImageOps, UnidentifiedImageError

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of bombs, which are errors here, and odd metadata
                image = Image.open(io.BytesIO(self.data), formats=_FORMATS)
                if image.width * image.height > MOST_PIXELS:
                    raise Image.DecompressionBombError(f"over {MOST_PIXELS} pixels")
                # A phone's JPEG may hold a preview behind the picture, which is no animation.
                if image.format != "MPO" and getattr(image, "n_frames", 1) > 1:
                    raise BadPicture("image: animated", f"{where} has several frames; save one")
                image.load()
                return image, ImageOps.exif_transpose(image).convert("RGB")
        except BadPicture:
            raise
        except Image.DecompressionBombError as error:
            raise BadPicture("image: too large", f"{where}: {first_line(error)}") from error
        except UnidentifiedImageError as error:
            known = ", ".join(_FORMATS)
            raise BadPicture("image: not an image", f"{where} is none of {known}") from error
        except Exception as error:  # decoders of broken files raise errors of many classes
            raise BadPicture("image: broken", f"{where}: {first_line(error)}") from error


def _png(image: Image.Image) -> bytes:
    """A PIL image as a PNG file, which keeps every pixel."""
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


def read_picture(source: object, folder: Path | None = None, allow_urls: bool = False) -> Picture:
    """Reads a picture, and decodes it once to check it.

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
    picture = Picture(encoded(source, folder, allow_urls))
    picture.read(shown(source)[:80])
    return picture


def encoded(source: object, folder: Path | None = None, allow_urls: bool = False) -> bytes:
    """The bytes of a source of `read_picture`, unchecked but for their number. Raises BadPicture."""
    if isinstance(source, Mapping):
        source = source["path"] if source.get("bytes") is None else source["bytes"]
    where = shown(source)
    try:
        if isinstance(source, bytes | bytearray):
            data = bytes(source)
        elif isinstance(source, str | Path):
            data = _at(str(source), folder, allow_urls)
        elif hasattr(source, "convert"):
            data = _png(source)  # type: ignore[arg-type]  # a PIL image, by its methods
        else:
            raise BadPicture("image: unknown source", f"{where} is no path, data URI or image")
    except UserError:
        raise
    except (
        Exception
    ) as error:  # of the disk, the network, odd paths, and images read as late as here
        raise BadPicture("image: unreadable", f"{where}: {reason_of(error)}") from error
    if len(data) > MOST_BYTES:
        raise BadPicture("image: too large", f"{where} has over {MOST_BYTES} bytes")
    return data


def _at(source: str, folder: Path | None, allow_urls: bool) -> bytes:
    """The bytes of a data URI, at a URL, or of a file; no more than one too many."""
    scheme = source.partition(":")[0].lower()
    if scheme == "data":
        head, _, content = source.partition(",")
        if not head.startswith("data:image/") or not head.endswith(";base64"):
            raise BadPicture("image: unknown source", f"{shown(head)} is not data:image/...;base64")
        return base64.b64decode(content[: 2 * MOST_BYTES], validate=True)
    if scheme in ("http", "https"):
        return _downloaded(source, allow_urls)
    path = Path(folder or "", Path(source).expanduser())
    if not path.is_file():  # nor a pipe, which would be waited for
        raise BadPicture("image: no such file", shown(str(path)))
    with path.open("rb") as file:
        return file.read(MOST_BYTES + 1)


def _downloaded(url: str, allowed: bool) -> bytes:
    import httpx

    if not allowed:
        raise BadPicture("image: URL", f"{shown(url)} is not downloaded without --allow-urls")
    content = bytearray()
    with httpx.stream("GET", url, timeout=_SECONDS, follow_redirects=True) as reply:
        reply.raise_for_status()
        for piece in reply.iter_bytes():
            content += piece
            if len(content) > MOST_BYTES:
                break
    return bytes(content)


class PictureStore:
    """Pictures by their content, in the folder `images` beside a file of prompts or in a data set.

    Args:
        folder: of the prompts or of the data set; `images` is created with the first picture.
        allow_urls: download pictures that `read` is given by URL.
    """

    def __init__(self, folder: Path, allow_urls: bool = False):
        self.folder = folder
        self.allow_urls = allow_urls
        self.images = folder / "images"

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
        picture = Picture(encoded(name, self.images))
        if picture.name != name:
            raise BadPicture("image: broken", f"{self.images / name} was changed")
        return picture

    def named(self, source: object) -> str:
        """The name of the picture of a source, which is not decoded. Raises BadPicture."""
        if isinstance(source, str) and _NAME.fullmatch(source):
            return source
        return Picture(encoded(source, self.folder)).name

    def read(self, source: object) -> Picture:
        """The picture of a message's part: one that was read, a name, or a source of `read_picture`.

        Relative paths begin in the store's folder. Raises as `read_picture`.
        """
        if isinstance(source, Picture):
            return source
        if isinstance(source, str) and _NAME.fullmatch(source):
            return self.get(source)
        return read_picture(source, self.folder, self.allow_urls)
