"""Pictures: encoded bytes and their hash."""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from drafttrain.extras import require

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Picture:
    """An encoded picture.

    Attributes:
        data: the encoded bytes (PNG, JPEG).
        digest: SHA-256 of the bytes, as hexadecimal digits.
    """

    data: bytes = field(repr=False)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    def pixels(self) -> Image:
        """The decoded picture in RGB."""
        require("PIL", "a prompt with images")
        from PIL import Image

        return Image.open(io.BytesIO(self.data)).convert("RGB")
