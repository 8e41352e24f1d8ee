"""How each kind of drafter is shipped. A kind is one module here, named as in drafters/, that defines SHIPPING.

    class Eagle3Shipping(Shipping): ...        formats and what they refuse, writing, checking, recipes, the card's line
    SHIPPING = Eagle3Shipping()

Export, import, verify, push and the card ask that object and know no kind by name. A kind without a module here is shipped by
`Shipping` itself: no engine loads it, and on the Hub it lies in our own format.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from drafttrain.drafters.registry import kind_folders
from drafttrain.drafters.trained import Trained
from drafttrain.errors import UserError

FORMATS = ("vllm", "sglang", "transformers", "gguf")
# Engines in the recipes' order, and the format whose rules each follows.
ENGINES = {
    "vLLM": "vllm",
    "SGLang": "sglang",
    "TensorRT-LLM, Triton": "sglang",
    "llama.cpp": "gguf",
    "transformers": "transformers",
}
GGUF_NAME = "draft.gguf"  # the file of the gguf format


@dataclass(frozen=True)
class Format:
    """A kind in one of FORMATS.

    Attributes:
        text: what is written, for help texts and cards. engines: those of ENGINES that load it.
    """

    text: str
    engines: tuple[str, ...]


@dataclass(frozen=True)
class Request:
    """What exported files are to be.

    Attributes:
        output: folder to write. dtype: of the weights.
        target: the target's name, empty if unknown; for keys that name it, and for a tokenizer.
        depth: speculative tokens per round, where a format records them.
    """

    output: Path
    dtype: torch.dtype = torch.bfloat16
    target: str = ""
    depth: int = 3


class Shipping:
    """How drafters of one kind are shipped; this class itself is for kinds that no engine loads.

    Attributes:
        formats: those that the kind can be written in, by name.
        verifiable: engines that `drafttrain verify` can run the kind in, and the format that each is given:
            `vllm`, `transformers`, `llama.cpp` (see hub/engine_runs.py).
        in_root: formats that a repository has in its root, beside our own keys; others are in a folder of their name.
    """

    formats: Mapping[str, Format] = {}
    verifiable: Mapping[str, str] = {}
    in_root: Sequence[str] = ()

    def line(self, trained: Trained, parameters: str) -> str:
        """What such a drafter is, in half a sentence, for the card. parameters: their number, as text."""
        return f"of kind {trained.kind}, {parameters} parameters"

    def refusals(self, trained: Trained, form: str) -> list[str]:
        """Why a format (and so the engines that follow its rules) cannot express this drafter; empty if it can.

        Overriding methods say first what this one says.
        """
        if form in self.formats:
            return []
        return [f"no {form} format is known for kind {trained.kind!r}"]

    def write(self, trained: Trained, form: str, request: Request) -> list[Path]:
        """Writes a drafter that the format does not refuse.

        Returns:
            The files written.

        Raises:
            UserError: something is missing, or the output cannot be written.
        """
        raise NotImplementedError(form)

    def check(self, trained: Trained, exported: Path) -> dict[str, Any]:
        """Loads exported files as an engine would, by name and shape, and compares what they compute with ours.

        Returns:
            Figures for the report.

        Raises:
            UserError: they differ, or lack what an engine looks for.
        """
        raise NotImplementedError(str(exported))

    def options(self, trained: Trained) -> Mapping[str, Mapping[str, Any]]:
        """What each of ENGINES must be told to draft with this kind. An engine that is not named knows no such drafter.

        vLLM: keys of --speculative-config (method). SGLang: flags of launch_server (speculative-algorithm). TensorRT-LLM:
        keys of speculative_config (decoding_type). llama.cpp, transformers: none. Model and number of tokens are added;
        a value here wins, and None drops the key.
        """
        return {}

    def most_tokens(self, trained: Trained) -> int | None:
        """Speculative tokens that an engine can be told to draft at most; None for any number."""
        return None

    def publish(self, trained: Trained, request: Request) -> list[tuple[str, str]]:
        """Writes everything that a repository has of the drafter itself: our own format, and each engine's in a folder.

        Args:
            request: output is the repository's folder, target the name to publish.

        Returns:
            Weight files with their purpose.
        """
        drafter = trained.load()
        drafter.config.target = {**trained.target, "name": request.target}
        drafter.to(request.dtype).save_pretrained(request.output)
        files = [("model.safetensors", "the drafter, for drafttrain")]
        for form, described in self.formats.items():
            if reasons := self.refusals(trained, form):
                print(f"no {form} format: {'; '.join(reasons)}")
                continue
            self.write(trained, form, replace(request, output=request.output / form))
            files.append((f"{form}/model.safetensors", f"{described.text}, for {', '.join(described.engines)}"))
        return files

    # -- the way back -------------------------------------------------------------------------------------------

    reads = ""  # published checkpoints that `drafttrain import` reads, for messages

    def recognises(self, config: Mapping[str, Any]) -> bool:
        """Whether a published checkpoint's config.json is of this kind."""
        return False

    def read(self, folder: Path, target: dict[str, Any], allow_pickle: bool = False) -> PreTrainedModel:
        """A published checkpoint as one of our drafters, on the CPU in its dtype.

        Args:
            target: identity of its target, see `Target.identity`.

        Raises:
            UserError: it computes what ours cannot, lacks weights, or was made for another target.
        """
        raise NotImplementedError(str(folder))


def shipped_kinds() -> list[str]:
    """The kinds that have an export module."""
    return list(kind_folders("export.py"))


def shipping(kind: str) -> Shipping:
    """How a kind is shipped."""
    if kind not in shipped_kinds():
        return Shipping()
    return importlib.import_module(f"{__package__}.{kind}.export").SHIPPING


def format_lines() -> str:
    """Every kind's formats for the help; those in which the same is written share a line."""
    lines = []
    for kind in shipped_kinds():
        formats = shipping(kind).formats
        for described in dict.fromkeys(formats.values()):
            names = ", ".join(form for form, other in formats.items() if other == described)
            lines.append(f"  {kind:<15} {names:<27} {described.text} ({'; '.join(described.engines)})")
    return "\n".join(lines)


def check_expressible(trained: Trained, form: str) -> Shipping:
    """The drafter's kind, if the format can express it.

    Raises:
        UserError: it cannot, with every reason.
    """
    kind = shipping(trained.kind)
    if reasons := kind.refusals(trained, form):
        others = [other for other in kind.formats if other != form and not kind.refusals(trained, other)]
        way = (
            f"--format {' or '.join(others)} can" if others else "drafttrain eval, generate and push still work with it"
        )
        raise UserError(f"format={form!r} cannot express this drafter: {'; '.join(reasons)}; {way}")
    return kind
