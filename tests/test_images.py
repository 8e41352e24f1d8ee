"""Pictures: what is read, what is refused with a reason, and the store."""

from __future__ import annotations

import base64
import io
import random
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from PIL import Image, PngImagePlugin

from drafttrain import images
from drafttrain.errors import UserError
from drafttrain.images import BadPicture, Picture, PictureStore, read_picture


def encoded(image, form="PNG", **options):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def striped(width=6, height=4):
    """A picture whose pixels differ."""
    image = Image.new("RGB", (width, height))
    image.putdata([(7 * i % 256, 40 * (i % 5), 255 - i) for i in range(width * height)])
    return image


PNG = encoded(striped())


def frames(count):
    pages = [striped(6, 4 + i) for i in range(count)]
    return [page.resize((6, 4)).rotate(90 * i) for i, page in enumerate(pages)]


def reason(source, **options):
    with pytest.raises(BadPicture) as caught:
        read_picture(source, **options)
    assert str(caught.value).startswith(caught.value.reason)
    assert "\n" not in str(caught.value)
    return caught.value.reason


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_formats_keep_their_bytes(form):
    data = encoded(striped(), form)
    picture = read_picture(data)
    assert picture.data == data
    assert picture.pixels().size == (6, 4) and picture.pixels().mode == "RGB"
    assert picture.name.startswith(picture.digest) and picture.name.count(".") == 1
    decoded = base64.b64decode(picture.uri.partition(",")[2])
    assert list(Image.open(io.BytesIO(decoded)).convert("RGB").getdata()) == list(
        picture.pixels().getdata()
    )


def test_sources_of_one_picture(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.png").write_bytes(PNG)
    uri = "data:image/png;base64," + base64.b64encode(PNG).decode()
    sources = [
        PNG,
        bytearray(PNG),
        uri,
        tmp_path / "deep" / "a.png",
        {"bytes": PNG, "path": "gone.png"},
        {"bytes": None, "path": str(tmp_path / "deep" / "a.png")},
    ]
    assert {read_picture(source) for source in sources} == {Picture(PNG)}
    assert read_picture("deep/a.png", tmp_path) == Picture(PNG)
    assert list(read_picture(striped()).pixels().getdata()) == list(striped().getdata())


def test_pixels_are_upright_and_without_alpha():
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    turned = read_picture(encoded(striped(), "PNG", exif=exif))
    assert turned.pixels().size == (4, 6)
    seen = Image.new("RGBA", (2, 2), (10, 20, 30, 0))
    clear = read_picture(encoded(seen))
    assert clear.pixels().getpixel((0, 0)) == (10, 20, 30)
    # Engines treat both differently, so they get the pixels.
    for picture in (turned, clear):
        sent = Image.open(io.BytesIO(base64.b64decode(picture.uri.partition(",")[2])))
        assert sent.mode == "RGB" and list(sent.getdata()) == list(picture.pixels().getdata())


def test_reasons(tmp_path, monkeypatch):
    several = frames(3)
    gif = encoded(several[0], "GIF", save_all=True, append_images=several[1:])
    tiff = encoded(several[0], "TIFF", save_all=True, append_images=several[1:])
    assert reason(gif) == reason(tiff) == "image: animated"
    assert reason("nope.png", folder=tmp_path) == "image: no such file"
    assert reason(str(tmp_path)) == "image: no such file"
    assert reason("\0") == "image: no such file"
    assert reason("a" * 5000) == "image: unreadable"
    assert reason(PNG[:60]) == "image: broken"
    assert reason(encoded(striped(64, 64), "JPEG")[:-200]) == "image: broken"
    assert reason(b"") == reason(b"%!PS-Adobe") == reason(b"<svg/>") == "image: not an image"
    assert reason("data:text/html;base64,aaaa") == reason(3) == "image: unknown source"
    assert reason("data:image/png,abc") == reason({"bytes": None, "path": None})
    assert reason("data:image/png;base64,!!!") == "image: unreadable"
    assert reason("http://127.0.0.1:9/a.png") == reason("HTTPS://a/b") == "image: URL"

    # A decompression bomb: few bytes, many pixels.
    bomb = encoded(Image.new("1", (20_000, 20_000)))
    assert len(bomb) < 100_000 and reason(bomb) == "image: too large"
    monkeypatch.setattr(images, "MOST_BYTES", 50)
    (tmp_path / "a.png").write_bytes(PNG)
    assert reason(PNG) == reason(tmp_path / "a.png") == "image: too large"
    assert reason("data:image/png;base64," + "A" * 200) == "image: too large"


def test_a_bomb_in_metadata():
    notes = PngImagePlugin.PngInfo()
    notes.add_text("a", "x" * 3_000_000, zip=True)
    with pytest.raises(BadPicture, match="image: "):
        read_picture(encoded(striped(), pnginfo=notes))


def test_urls_are_downloaded_where_allowed(monkeypatch):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(404 if "gone" in self.path else 200)
            self.end_headers()
            self.wfile.write(PNG * (100 if "large" in self.path else 1))

        def log_message(self, *_):
            pass

    monkeypatch.setattr(images, "MOST_BYTES", 10 * len(PNG))
    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        assert read_picture(f"{url}/a.png", allow_urls=True) == Picture(PNG)
        assert reason(f"{url}/gone", allow_urls=True) == "image: unreadable"
        assert reason(f"{url}/large", allow_urls=True) == "image: too large"
    finally:
        server.shutdown()
        server.server_close()
    assert reason(f"{url}/a.png", allow_urls=True) == "image: unreadable"
    assert reason("http://[", allow_urls=True) == "image: unreadable"


def test_random_bytes_have_a_reason():
    rng = random.Random(0)
    wholes = [encoded(striped(9, 9), form) for form in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")]
    for _ in range(400):
        data = bytearray(rng.choice(wholes))
        for _ in range(rng.randint(1, 12)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if rng.random() < 0.3:
            del data[rng.randrange(len(data)) :]
        try:
            picture = read_picture(bytes(data))
            assert picture.pixels().mode == "RGB" and picture.uri.startswith("data:image/")
        except BadPicture as bad:
            assert bad.reason.startswith("image: ")


def test_the_store_holds_each_picture_once(tmp_path):
    store = PictureStore(tmp_path / "set")
    picture = read_picture(PNG)
    name = store.add(picture)
    assert name == store.add(Picture(PNG)) == picture.name
    assert [path.name for path in (tmp_path / "set" / "images").iterdir()] == [name]
    assert store.get(name) == store.read(name) == store.read(picture) == picture

    (store.images / name).write_bytes(PNG + b"more")
    with pytest.raises(BadPicture, match="image: broken"):
        store.get(name)
    (store.images / name).unlink()
    with pytest.raises(BadPicture, match="image: no such file"):
        store.read(name)
    (tmp_path / "set" / "images").rmdir()
    (tmp_path / "set" / "images").write_text("a file")
    with pytest.raises(UserError, match="cannot be written"):
        store.add(picture)


def test_without_pillow_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UserError, match=r"drafttrain\[vision\]") as caught:
        read_picture(PNG)
    assert not isinstance(caught.value, BadPicture)
