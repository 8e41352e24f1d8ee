"""A tiny target that reads images, pictures, and rows about them."""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image
from transformers import AutoTokenizer

from drafttrain.images import Picture, PictureStore
from tests.files import dump_jsonl
from tests.vlm_models import build

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<|image|>{% else %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endif %}</s>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
TOKENS = 4  # of an image
PLACEHOLDER = 259


def make_seeing(folder: Path):
    """Writes a LLaVA with a chat template; returns it as tests/vlm_models.py builds it."""
    built = build("llava", folder)
    built.processor.chat_template = TEMPLATE
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return built


def picture(number: int) -> Picture:
    file = io.BytesIO()
    Image.new("RGB", (30 + number, 30), (40 * number % 256, 90, 200)).save(file, "PNG")
    return Picture(file.getvalue())


def shown(source: object) -> dict:
    return {"type": "image", "image": source}


def said(text: str) -> dict:
    return {"type": "text", "text": text}


def user(*content: object) -> dict:
    """A message of the user, of texts and pictures' parts."""
    parts = [said(part) if isinstance(part, str) else part for part in content]
    return {"role": "user", "content": parts}


def answer(text: str) -> dict:
    return {"role": "assistant", "content": text}


def write_rows(path: Path, rows: list[dict], count: int = 4) -> list[str]:
    """Writes prompts and a store of pictures beside them; returns the pictures' names."""
    dump_jsonl(path, rows)
    return stored(path.parent, count)


def stored(folder: Path, count: int = 4) -> list[str]:
    """The names of pictures in the store of a folder."""
    store = PictureStore(folder)
    return [store.add(picture(number)) for number in range(count)]
