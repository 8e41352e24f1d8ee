"""`drafttrain export`."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from drafttrain.command import (
    Drafting,
    Model,
    Shown,
    command,
    name_of,
    outcome_of,
    take_drafter,
)
from drafttrain.formats.engines import FORMATS, GGUF_TYPES
from drafttrain.values import Depth, ExportDtype, File, Name, OneOf, Place


@dataclass(frozen=True)
class ExportResult:
    """An exported drafter. files: what was written. serve: how to serve it, as text. formats: those
    that the drafter can be written in, where the call names none.
    """

    output: Path
    files: tuple[Path, ...]
    serve: str = field(repr=False)
    formats: tuple[str, ...] = ()


@command
def export(
    drafter: Drafting,
    format: Annotated[str, OneOf(FORMATS)] | None = None,
    output: Place | Path | None = None,
    *,
    engine_version: Name = "",
    dtype: ExportDtype = "bfloat16",
    target: Model | None = None,
    target_gguf: Annotated[str, OneOf(GGUF_TYPES)] | None = None,
    speculative_tokens: Depth | None = None,
    schedule: File | Path | None = None,
    swap_root: Name | Path = "",
    progress: Shown = False,
) -> ExportResult:
    """Write a drafter in the form that an engine loads, and print how to serve it.

    ```
    drafttrain export --drafter runs/drafter --format vllm --output runs/export
    ```

    Without --format, lists the formats that the drafter can be written in; docs/reference/cli.md
    lists those of every kind. --format gguf --target-gguf float16 also writes the target as GGUF
    file, where none is at hand. A drafter with features that the format does not support is an
    error that lists them. For n-grams, which engines draft by themselves, --drafter with that
    kind's name prints their settings. Check the result by:

    ```
    drafttrain verify --drafter runs/drafter --exported runs/export
    ```

    Args:
        drafter: a trained drafter's folder or Hub id, or a kind without weights, to print its
            recipes only; from Python also a loaded drafter
        format: format to write, named after its engine, or speculators for that trainer
        output: folder to write
        engine_version: release of the engine that is to load it (default: vllm: vLLM 0.32.0,
            sglang: SGLang 0.5.23, transformers: transformers 5.23, gguf: llama.cpp 11549,
            speculators: speculators 0.9.0)
        dtype: type of the weights; float8 and nvfp4 round the layers of an eagle3 head for vLLM, the
            other weights are bfloat16
        target: name of the target in recipes; has the tokenizer (default: the recorded one)
        target_gguf: with --format gguf: also write the target, as target.gguf of this type
        speculative_tokens: tokens drafted per round (default: the depth in decoding.json, else 3)
        schedule: a sweep's summary.json or an estimate's output: recipes of vLLM and SGLang then
            draft by batch size
        swap_root: folder around OUTPUT; vLLM's recipe then swaps heads below it while it serves
            (drafttrain swap)
        progress: print what the command prints; the logger `drafttrain` gets it otherwise
    """
    args = Namespace(**locals())
    from drafttrain.files import scratch_folder

    loaded = take_drafter("export", args)
    if target is None:
        args.target = ""
    elif not isinstance(args.target, str):
        args.target = name_of(args.target)
    with scratch_folder() as scratch:
        found = outcome_of("export.export_drafter", args, loaded, scratch)
    result = found["result"]
    folder = Path()
    if output is not None:
        folder = Path(output).expanduser()
    return ExportResult(
        output=folder,
        files=tuple(Path(name) for name in found["wrote"]),
        serve=result.get("serve", ""),
        formats=tuple(result.get("formats", ())),
    )
