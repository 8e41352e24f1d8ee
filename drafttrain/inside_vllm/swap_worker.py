"""vLLM worker extension: puts another head's weights in the place of the served one's.

    --worker-extension-cls drafttrain.inside_vllm.swap_worker.DrafterSwapWorker

swap_route.py calls its methods in every worker, each between two steps of the engine:

    check    reads the files, compares them with the served head's, and keeps them in memory
    apply    loads what was checked; also the head before, when another worker failed

Nothing changes before every worker has the new head whole in its memory. Weights are loaded as vLLM
reloads them layer by layer, which unpacks what CPUs pack and keeps the storage that CUDA graphs
read. In between, the drafter is on the meta device, so a step would end the engine; `apply` is one
call therefore.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drafttrain.inside_vllm.head_files import (
    ROOT,
    HeadFiles,
    SwapRefused,
    check,
    folder_below,
    read_head,
    refuse_small_layers,
)

Vllms = Any  # an object of vLLM's, which mypy does not see
EXTENSION = "drafttrain.inside_vllm.swap_worker.DrafterSwapWorker"
# Methods that a swap was run for. Others keep weights that vLLM computes once, when it starts (dflash,
# heads that draft in parallel), or are a part of the target's checkpoint (mtp).
METHODS = ("eagle3", "eagle")
Answer = dict[str, object]  # of a worker: error, or which head serves


class ServedHead:
    """The head of one vLLM worker. Its files are read when it is made, before anybody changes them.

    Raises:
        SwapRefused: a server whose head cannot be swapped.
    """

    def __init__(self, worker: Vllms):
        self.config = worker.vllm_config
        self.runner = worker.model_runner
        self.root = os.environ.get(ROOT, "")
        self.served = self._first()
        self.checked = self.served
        # What `apply` goes back to when another worker failed.
        self.before = self.served

    def _first(self) -> HeadFiles:
        """The files that the server was started with."""
        drafting = self.config.speculative_config
        if not self.root:
            raise SwapRefused(f"the server has no {ROOT}: set it to the folder of heads")
        if drafting is None or drafting.method not in METHODS or drafting.parallel_drafting:
            method = getattr(drafting, "method", None)
            raise SwapRefused(
                f"the server drafts by {method}, and swaps are proven for {', '.join(METHODS)} "
                "without parallel drafting; restart it with the new drafter"
            )
        folder = drafting.draft_model_config.model
        return read_head(Path(folder), folder)

    def show(self) -> Answer:
        """Which head serves."""
        return {
            "folder": self.served.folder,
            "sha256": self.served.digest,
            # Clients stand elsewhere.
            "root": str(Path(self.root).resolve()),
            "dtype": self.served.dtype,
        }

    def check(self, name: str, wanted: str) -> Answer:
        """Reads and checks the head in a folder below the root.

        Args:
            wanted: digest that its files must have; '' for any.

        Raises:
            SwapRefused: it cannot take the served one's place.
        """
        # A head that fits has the served one's tensors; the rest of its file are names and shapes.
        room = self.served.size + 1_000_000
        new = read_head(folder_below(self.root, name), name, room)
        if wanted not in ("", new.digest):
            raise SwapRefused(
                f"folder={name!r} has other files here than where the swap was asked for"
            )
        vocabulary = self.config.model_config.get_vocab_size()
        parts = shared_parts(self.runner.get_draft_model(), self.runner.get_model())
        refuse_small_layers(new)
        check(new, self.served, parts, vocabulary)
        self.checked = new
        return {"sha256": new.digest}

    def apply(self, digest: str) -> Answer:
        """Loads the checked head, or the one before.

        Raises:
            SwapRefused: nothing of this digest is there, or it did not load and the old one is back.
        """
        known = {head.digest: head for head in (self.before, self.checked, self.served)}
        if digest not in known:
            raise SwapRefused("another swap came between; try again")
        # Asked again for what serves already, as after an answer that got lost: nothing to do.
        if digest != self.served.digest:
            try:
                self.load(known[digest])
            except Exception as error:
                self.load(self.served)
                raise SwapRefused(f"rolled back, the new head did not load ({error})") from error
            self.before = self.served
            self.served = known[digest]
        return self.show()

    @torch.no_grad()
    def load(self, head: HeadFiles) -> None:
        """Replaces the weights. A failure may leave the drafter without any."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader import reload

        drafter = self.runner.get_draft_model()
        with set_current_vllm_config(self.config):
            reload.initialize_layerwise_reload(drafter)
            try:
                drafter.load_weights(head.tensors.items())
            finally:  # also packs again what was unpacked, if loading failed
                described = self.config.speculative_config.draft_model_config
                reload.finalize_layerwise_reload(drafter, described)


def shared_parts(drafter: nn.Module, target: nn.Module) -> set[str]:
    """Last names of the drafter's modules that are the target's own, or hold a weight of its."""
    own: set[int] = {id(module) for module in target.modules()}
    # Packed weights of CPUs are empty tensors, which say nothing.
    own |= {id(weight) for weight in target.parameters() if weight.numel()}
    found = set()
    for name, module in drafter.named_modules(remove_duplicate=False):
        for part in (module, *module.parameters(recurse=False)):
            if name and id(part) in own:
                found.add(name.rpartition(".")[2])
    return found


class DrafterSwapWorker:
    """Mixed into vLLM's worker class; `self` is the worker. It answers and never raises, for an
    exception in one worker would leave the others waiting.
    """

    def drafttrain_head(self, act: str, *args: str) -> Answer:
        """Shows, checks or applies; the first call, at the start, reads the served head's files.

        Args:
            act: a method of `ServedHead`, with its args.
        """
        try:
            if not hasattr(self, "_drafttrain_served"):
                self._drafttrain_served = ServedHead(self)
            answer: Answer = getattr(self._drafttrain_served, act)(*args)
            return answer
        except SwapRefused as refused:
            line = str(refused)
        except Exception as error:
            line = f"{type(error).__name__}: {error}"
        return {"error": " ".join(line.split())[:500]}
