"""The drafter contract, and how a kind's name becomes its class.

A kind is one module in this folder that defines `KIND`, the class with that contract. Trained kinds are
`PreTrainedModel`s with both halves; training-free kinds fulfil the proposal half only.

    training half    training_step(batch, target_output, teacher, ...) -> StepOutput
    proposal half    start(prompt_ids, ...) -> Session;  session.extend(tokens, features);  session.propose(spec)
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from drafttrain.batch import TokenTree
from drafttrain.errors import UserError
from drafttrain.ops.packing import pack
from drafttrain.target import Target


@dataclass(frozen=True)
class TreeSpec:
    """The shape of tree that a round drafts.

    shape      text form             meaning
    none       none                  no drafting: plain autoregressive decoding
    chain      chain:3               the 3 likeliest tokens one after the other
    fanout     fanout:4x2x1          4 children of the root, 2 of each of them, 1 of each of those
    dynamic    dynamic:5,8,24        EAGLE-2 (arXiv 2406.16858): depth 5, the 8 likeliest paths expand by 8 tokens each,
                                     the 24 likeliest nodes by path probability are verified
    """

    shape: str = "chain"
    depth: int = 3
    fanout: tuple[int, ...] = ()
    top_k: int = 1
    budget: int = 3

    @staticmethod
    def parse(text: str) -> TreeSpec:
        """Reads the text form above.

        Raises:
            UserError: an unknown shape or a number that is no positive integer.
        """
        shape, _, rest = text.strip().partition(":")
        try:
            if shape == "none" and not rest:
                return TreeSpec("none", 0, (), 0, 0)
            numbers = tuple(int(x) for x in rest.replace("x", ",").split(","))
            if min(numbers) < 1:
                raise ValueError
            if shape == "chain" and len(numbers) == 1:
                return TreeSpec("chain", numbers[0], (1,) * numbers[0], 1, numbers[0])
            if shape == "fanout":
                size, level = 0, 1
                for number in numbers:
                    level *= number
                    size += level
                return TreeSpec("fanout", len(numbers), numbers, max(numbers), size)
            if shape == "dynamic" and len(numbers) == 3:
                return TreeSpec("dynamic", numbers[0], (), numbers[1], numbers[2])
        except ValueError:
            pass
        raise UserError(
            f"tree={text!r} is not a tree; write none, chain:3, fanout:4x2x1 or dynamic:DEPTH,TOPK,NODES (dynamic:5,8,24)"
        )

    def __str__(self) -> str:
        if self.shape == "none":
            return "none"
        if self.shape == "chain":
            return f"chain:{self.depth}"
        if self.shape == "fanout":
            return "fanout:" + "x".join(map(str, self.fanout))
        return f"dynamic:{self.depth},{self.top_k},{self.budget}"


class Session(Protocol):
    """A drafter at work on one sequence. Its cache always reflects committed tokens and true target features."""

    def extend(self, tokens: Tensor, features: Tensor) -> None:
        """Takes what the target has just committed.

        Args:
            tokens: [m] int64; tokens[i] follows the position that features[i] belongs to. The first call after `start`
                covers the whole prompt: tokens are prompt[1:] plus the first sampled token.
            features: [m, f*h], the target's features at those positions (f may be 0).
        """
        ...

    def propose(self, spec: TreeSpec) -> TokenTree:
        """Drafts a tree below the last committed token. May return fewer nodes than asked, or none."""
        ...


@runtime_checkable
class Drafter(Protocol):
    """The proposal half of the contract, which every kind fulfils."""

    kind: str
    feature_layers: tuple[int, ...]

    def start(self, prompt_ids: Tensor, max_length: int) -> Session:
        """Begins a sequence. prompt_ids: [L] int64; max_length: most tokens the sequence can reach (cache size)."""
        ...

    def bind(self, target: Target) -> None:
        """Attaches what is shared with the target (embedding) and checks that the two belong together.

        Raises:
            UserError: trained for another hidden size, vocabulary or tokenizer.
        """
        ...


def kinds() -> list[str]:
    """Every kind's name: the modules of this folder that define KIND."""
    names = [module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])]
    return sorted(name for name in names if hasattr(importlib.import_module(f"{__package__}.{name}"), "KIND"))


def kind_class(name: str) -> Any:
    """The class of a kind.

    Raises:
        UserError: no such kind; names the ones there are.
    """
    if name not in kinds():
        raise UserError(f"kind={name!r} is not a drafter kind; there are {', '.join(kinds())}")
    return importlib.import_module(f"{__package__}.{name}").KIND


def load_drafter(name: str, target: Target) -> Drafter | None:
    """A drafter for decoding: a saved folder or Hub id, a kind without weights (`ngram`), `none`, or FIRST+SECOND.

    FIRST+SECOND merges a training-free kind's match into the first's tree. Returns it bound to the target, on its
    device and in its compute dtype.

    Raises:
        UserError: nothing there, not a drafter of ours, or made for another target.
    """
    if name == "none":
        return None
    first, plus, second = name.rpartition("+")
    if plus and second in kinds() and not kind_class(second).trainable:
        from drafttrain.drafters.combined import CombinedDrafter

        main = load_drafter(first, target)
        assert main is not None, "none+KIND is KIND"
        # On top of another drafter only matches of two tokens and more are worth their nodes.
        return CombinedDrafter(main, kind_class(second)(min_n=2))
    if name in kinds() and not kind_class(name).trainable:
        drafter = kind_class(name)()
    else:
        drafter = _load_trained(name).to(device=target.device, dtype=target.compute_dtype).eval()
        if target.device.type == "cpu":
            getattr(drafter, "pack", lambda: pack(drafter))()
    drafter.bind(target)
    return drafter


def _load_trained(name: str) -> Any:
    path = Path(name).expanduser()
    if not path.exists() and (name.startswith((".", "/", "~")) or name.count("/") != 1):
        raise UserError(f"drafter={name!r}: no such folder, and not a Hub id (user/name); kinds without weights: ngram")
    try:
        if path.exists():
            config_file = path / "config.json"
        else:
            from huggingface_hub import hf_hub_download

            config_file = Path(hf_hub_download(name, "config.json"))
        config = json.loads(config_file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"drafter={name!r}: config.json cannot be read ({error}); train one or check the path"
        ) from error
    kind = config.get("drafter_kind")
    if kind is None:
        raise UserError(f"drafter={name!r}: config.json has no drafter_kind, so it was not saved by drafttrain")
    return kind_class(kind).from_pretrained(name, use_safetensors=True)
