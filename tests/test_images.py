"""Pictures: what is read, what is refused with a reason, and the store."""

from __future__ import annotations

import base64
import io
import random
import sys
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from PIL import Image

from drafttrain import images
from drafttrain.errors import UserError
from drafttrain.images import BadPicture, Picture, PictureStore, read_picture

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")


def encoded(
    image,
    form="PNG",
    **options,
):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def noise(
    width=9,
    height=7,
    seed=0,
):
    data = random.Random(seed).randbytes(3 * width * height)
    return Image.frombytes("RGB", (width, height), data)


def inline(data, kind="image/png"):
    return f"data:{kind};base64," + base64.b64encode(data).decode()


def sent(picture):
    """The pixels of what a server gets."""
    data = base64.b64decode(picture.uri.partition(",")[2])
    return Image.open(io.BytesIO(data)).convert("RGB").tobytes()


PNG = encoded(noise())


def reason(source, **options):
    with pytest.raises(BadPicture) as caught:
        read_picture(source, **options)
    assert str(caught.value).startswith(caught.value.reason)
    return caught.value.reason


@pytest.mark.parametrize("form", FORMATS)
def test_formats_keep_their_bytes(form):
    data = encoded(noise(), form)
    picture = read_picture(data)
    assert picture.data == data and picture.pixels().mode == "RGB"
    assert picture.name == f"{picture.digest}.{form.lower()}"
    assert sent(picture) == picture.pixels().tobytes()


def test_sources_of_one_picture(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(PNG)
    cells = [{"bytes": PNG, "path": "gone.png"}, {"bytes": None, "path": str(path)}]
    for source in [PNG, inline(PNG), path, "a.png", *cells]:
        assert read_picture(source, tmp_path) == Picture(PNG)
    assert read_picture(noise()).pixels().tobytes() == noise().tobytes()


def test_pixels_are_upright_and_without_alpha():
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    turned = read_picture(encoded(noise(), exif=exif))
    clear = read_picture(encoded(Image.new("RGBA", (2, 2), (10, 20, 30, 0))))
    assert turned.pixels().size == (7, 9)
    assert clear.pixels().getpixel((0, 0)) == (10, 20, 30)
    # Engines treat both differently, so they get the pixels.
    assert all(sent(picture) == picture.pixels().tobytes() for picture in (turned, clear))


def test_reasons(tmp_path, monkeypatch):
    pages = [noise(seed=seed) for seed in range(3)]
    bomb = encoded(Image.new("1", (20_000, 20_000)))
    assert len(bomb) < 100_000
    cases = {
        "animated": [
            encoded(pages[0], form, save_all=True, append_images=pages[1:])
            for form in ("GIF", "TIFF")
        ],
        "no such file": ["nope.png", tmp_path, "/dev/zero", "\0"],
        "unreadable": ["a" * 5000, inline(PNG) + "!!!"],
        "broken": [PNG[:60], encoded(noise(64, 64), "JPEG")[:-200]],
        "not an image": [b"", b"%!PS-Adobe", b"<svg/>"],
        "unknown source": [inline(PNG, "text/html"), 3, {"bytes": None, "path": None}],
        "URL": ["http://127.0.0.1:9/a.png", "HTTPS://a/b"],
        "too large": [bomb],
    }
    for name, sources in cases.items():
        for source in sources:
            assert reason(source, folder=tmp_path) == f"image: {name}"
    monkeypatch.setattr(images, "MOST_BYTES", 50)
    (tmp_path / "a.png").write_bytes(PNG)
    for source in (PNG, tmp_path / "a.png"):
        assert reason(source) == "image: too large"


def test_urls_are_downloaded_where_allowed(monkeypatch):
    def answer(request):
        return httpx.Response(404 if "gone" in request.url.path else 200, content=PNG)

    def stream(
        method,
        url,
        **options,
    ):
        client = httpx.Client(transport=httpx.MockTransport(answer))
        return client.stream(method, url, **options)

    assert reason("http://[", allow_urls=True) == "image: unreadable"
    monkeypatch.setattr(httpx, "stream", stream)
    assert read_picture("http://a/b.png", allow_urls=True) == Picture(PNG)
    assert reason("http://a/gone", allow_urls=True) == "image: unreadable"
    monkeypatch.setattr(images, "MOST_BYTES", len(PNG) - 1)
    assert reason("http://a/b.png", allow_urls=True) == "image: too large"


def test_random_bytes_have_a_reason():
    rng = random.Random(0)
    wholes = [encoded(noise(), form) for form in FORMATS]
    for _ in range(400):
        data = bytearray(rng.choice(wholes))
        for _ in range(rng.randint(1, 12)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        with suppress(BadPicture):
            picture = read_picture(bytes(data[: rng.randint(1, 2 * len(data))]))
            assert picture.pixels().mode == "RGB" and picture.uri


def test_the_store_holds_each_picture_once(tmp_path):
    store = PictureStore(tmp_path)
    name = store.add(Picture(PNG))
    assert store.add(Picture(PNG)) == name and len(list(store.images.iterdir())) == 1
    assert store.get(name) == store.read(name) == store.read(store.images / name) == Picture(PNG)
    (store.images / name).write_bytes(PNG + b"more")
    with pytest.raises(BadPicture, match="was changed"):
        store.get(name)
    Path(tmp_path, "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        PictureStore(tmp_path / "file").add(Picture(PNG))


def test_without_pillow_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UserError, match=r"drafttrain\[vision\]") as caught:
        read_picture(PNG)
    assert not isinstance(caught.value, BadPicture)
