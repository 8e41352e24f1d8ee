"""vLLM worker extension: puts another head's weights in the place of the served one's.

    --worker-extension-cls drafttrain.inside_vllm.swap_worker.DrafterSwapWorker

swap_route.py calls its methods in every worker, each between two steps of the engine:

    check    reads the files, compares them with the served head's, and keeps them in memory
    apply    loads what was checked; after a failure, the old head again
    settle   keeps the new head, or goes back to the old one because another worker failed

Nothing changes before every worker has the new head whole in its memory. Weights are loaded as vLLM
reloads them layer by layer, which unpacks what CPUs pack and keeps the storage that CUDA graphs
read. In between, the drafter is on the meta device, so a step would end the engine; `apply` is one
call therefore.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from drafttrain.inside_vllm.head_files import (
    ROOT,
    HeadFiles,
    SwapRefused,
    check_vocabulary,
    compare,
    folder_below,
    read_head,
    refuse_shared,
)

EXTENSION = "drafttrain.inside_vllm.swap_worker.DrafterSwapWorker"
# Methods that a swap was run for. Others keep weights that vLLM computes once, when it starts (dflash,
# heads that draft in parallel), or are a part of the target's checkpoint (mtp).
METHODS = ("eagle3", "eagle")
Answer = dict[str, object]  # of a worker: ok, and error or what it did


class ServedHead(Protocol):
    """The head inside an engine, as `HeadSwaps` needs it."""

    vocabulary: int  # tokens of the target

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Replaces the weights. A failure may leave it without any."""

    def shared(self) -> set[str]:
        """Names of the parts that are the target's own."""


class HeadSwaps:
    """The swaps of one worker.

    Args:
        head: in the engine. served: its files, read before anybody could change them. root: folder
            whose subfolders may be swapped in.
    """

    def __init__(self, head: ServedHead, served: HeadFiles, root: str):
        self.head = head
        self.served = served
        self.root = root
        self.swaps = 0
        self._checked: HeadFiles | None = None
        self._previous: HeadFiles | None = None  # while other workers may still fail

    def show(self) -> Answer:
        """What serves."""
        dtypes = {str(it.dtype) for it in self.served.tensors.values() if it.is_floating_point()}
        return {
            "ok": True,
            "folder": self.served.folder,
            "sha256": self.served.digest,
            "swaps": self.swaps,
            "root": self.root,
            "architectures": self.served.config.get("architectures") or [],
            "dtypes": sorted(name.removeprefix("torch.") for name in dtypes),
        }

    def check(self, name: str, wanted: str) -> Answer:
        """Reads and checks the head in a folder below the root.

        Args:
            wanted: digest that its files must have; '' for any.

        Raises:
            SwapRefused: it cannot take the served one's place.
        """
        self._checked = None
        new = read_head(folder_below(self.root, name), name, self.served.size + 1_000_000)
        if wanted and new.digest != wanted:
            raise SwapRefused(
                f"folder={name!r} has other files here than where the swap was asked for "
                f"(sha256 {new.digest[:12]}, {wanted[:12]} there)"
            )
        compare(new, self.served)
        refuse_shared(new, self.head.shared())
        check_vocabulary(new, self.head.vocabulary)
        self._checked = new
        return {"ok": True, "sha256": new.digest, "tensors": len(new.tensors)}

    def apply(self, digest: str) -> Answer:
        """Loads the checked head.

        Raises:
            SwapRefused: nothing of this digest was checked last, or it did not load and the old one
                is back.
        """
        new = self._checked
        self._checked = None
        if new is None or new.digest != digest:
            raise SwapRefused("another swap came between; try again")
        self._load(new)
        self._previous = self.served
        self.served = new
        return {"ok": True, "sha256": digest}

    def settle(self, keep: bool) -> Answer:
        """Ends a swap: keeps what was loaded, or goes back. Raises SwapRefused as `apply`."""
        previous = self._previous
        self._previous = None
        if previous is None:
            return {"ok": True}
        if keep:
            self.swaps += 1
        else:
            self._load(previous)
            self.served = previous
        return {"ok": True}

    def _load(self, new: HeadFiles) -> None:
        try:
            self.head.load(new.tensors)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            try:
                self.head.load(self.served.tensors)
            except Exception as second:
                raise SwapRefused(
                    f"{reason}; the old head did not load again ({type(second).__name__}): restart "
                    "the server"
                ) from second
            raise SwapRefused(f"rolled back, the new head did not load ({reason})") from error


class _Worker(Protocol):
    """The parts of vLLM's worker that are used here."""

    vllm_config: object
    model_runner: object


class VllmHead:
    """The head of a vLLM worker."""

    def __init__(self, worker: _Worker):
        self.config = worker.vllm_config
        self.runner = worker.model_runner
        self.vocabulary = self.config.model_config.get_vocab_size()  # type: ignore[attr-defined]

    @property
    def model(self) -> nn.Module:
        """The drafter's module."""
        return self.runner.get_draft_model()  # type: ignore[attr-defined, no-any-return]

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        described = self.config.speculative_config.draft_model_config  # type: ignore[attr-defined]
        model = self.model
        with set_current_vllm_config(self.config):
            initialize_layerwise_reload(model)
            try:
                model.load_weights(tensors.items())  # type: ignore[operator]
            finally:
                finalize_layerwise_reload(model, described)

    def shared(self) -> set[str]:
        return shared_parts(self.model, self.runner.get_model())  # type: ignore[attr-defined]


def shared_parts(drafter: nn.Module, target: nn.Module) -> set[str]:
    """Last names of the drafter's modules that are the target's own, or hold a weight of its."""
    modules = {id(module) for module in target.modules()}
    # Packed weights of CPUs are empty tensors, which say nothing.
    weights = {id(weight) for weight in target.parameters() if weight.numel()}
    found = set()
    for name, module in drafter.named_modules(remove_duplicate=False):
        own = {id(weight) for weight in module.parameters(recurse=False)}
        if name and (id(module) in modules or own & weights):
            found.add(name.rpartition(".")[2])
    return found


def served_files(config: object) -> HeadFiles:
    """The files of the head that the server was started with.

    Args:
        config: vLLM's.

    Raises:
        SwapRefused: a method whose head cannot be swapped.
    """
    speculative = config.speculative_config  # type: ignore[attr-defined]
    if speculative is None:
        raise SwapRefused("the server does not draft: it has no --speculative-config")
    if speculative.method not in METHODS:
        raise SwapRefused(
            f"the server drafts by {speculative.method}, and swaps are proven for "
            f"{', '.join(METHODS)}; restart it with the new drafter"
        )
    if speculative.parallel_drafting:
        raise SwapRefused(
            "the server drafts in parallel, from states that it computes when it starts; restart it "
            "with the new drafter"
        )
    model = speculative.draft_model_config
    folder = Path(model.model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(
            snapshot_download(model.model, revision=model.revision, local_files_only=True)
        )
    return read_head(folder, str(model.model))


class DrafterSwapWorker:
    """Mixed into vLLM's worker class; `self` is the worker. Each method answers and never raises,
    for an exception in one worker would leave the others waiting.
    """

    def drafttrain_show(self) -> Answer:
        """What serves; the first call, at the start, reads its files."""
        return self._drafttrain_answer(HeadSwaps.show)

    def drafttrain_check(self, folder: str, digest: str) -> Answer:
        """Reads and checks a head."""
        return self._drafttrain_answer(lambda swaps: swaps.check(folder, digest))

    def drafttrain_apply(self, digest: str) -> Answer:
        """Loads the checked head."""
        return self._drafttrain_answer(lambda swaps: swaps.apply(digest))

    def drafttrain_settle(self, keep: bool) -> Answer:
        """Keeps the loaded head, or goes back to the one before."""
        return self._drafttrain_answer(lambda swaps: swaps.settle(keep))

    def _drafttrain_answer(self, act: Callable[[HeadSwaps], Answer]) -> Answer:
        try:
            swaps = getattr(self, "_drafttrain_state", None)
            if swaps is None:
                served = served_files(self.vllm_config)  # type: ignore[attr-defined]
                head = VllmHead(self)  # type: ignore[arg-type]  # the worker, once mixed in
                swaps = HeadSwaps(head, served, os.environ.get(ROOT, ""))
                self._drafttrain_state = swaps
            return act(swaps)
        except SwapRefused as refused:
            return {"ok": False, "error": str(refused)}
        except Exception as error:
            reason = str(error).strip() or "no reason given"
            return {"ok": False, "error": f"{type(error).__name__}: {reason.splitlines()[0]}"}
