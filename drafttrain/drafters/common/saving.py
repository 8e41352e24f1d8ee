"""Loading and saving drafters as transformers does, with and without weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from drafttrain.errors import UserError
from drafttrain.ops.packing import weights_of
from drafttrain.target.loading import quiet_bars
from drafttrain.values import refuse_options

# Options of transformers' `save_pretrained` that are of the upload.
UPLOAD = {
    "token",
    "private",
    "revision",
    "create_pr",
    "commit_message",
    "commit_description",
    "tags",
}


class NamedDrafter:
    """A drafter that is found by its name.

    Attributes:
        kind: the kind's name. name: the one that it was loaded by. fresh: it was loaded without a
            target, and `generate` is to prepare it for one.
        load_named: `registry.load_unbound`, which the registry sets when it is imported.
    """

    load_named: ClassVar[Callable[..., Any]]
    kind: str = ""
    name: str = ""
    fresh: bool = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}(kind={self.kind}, no weights)"

    # -- loading and saving ------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        revision: str = "",
        **others: object,
    ) -> Self:
        """A drafter of any kind.

        Its weights are exactly those that its config promises. Code of a repository never runs.

        Args:
            name: a folder or Hub id, or another name as in `load_drafter`. On a kind's class it
                must name that kind.
            dtype: of the weights (default: as saved). device: default the CPU.
            revision: branch, tag or commit of a Hub id.

        Returns:
            A drafter that can be trained further, saved, pushed, or given to `generate`, which
            prepares it for its target.

        Raises:
            UserError: nothing there, files that do not fit together, another kind, or an option
                that is none of these.
        """
        # torch_dtype is the option's former name in transformers.
        dtype = others.pop("torch_dtype", dtype)  # type: ignore[assignment]
        refuse_options("Drafter.from_pretrained", others, ("dtype", "device", "revision"))
        drafter = cls.load_named(str(name), dtype, device, revision)
        if not isinstance(drafter, cls):
            raise UserError(
                f"{str(name)!r} is of kind {drafter.kind!r}, not {cls.kind!r}; use Drafter.from_pretrained"
            )
        return drafter

    def save_pretrained(self, save_directory: str | Path, **options: Any) -> None:
        """Writes the drafter to a folder.

        Raises:
            UserError: a kind without weights, or a combination.
        """
        raise UserError(
            f"kind={self.kind!r} has no weights of its own to save; write its name where it is used"
        )

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Uploads what `save_pretrained` writes.

        `drafttrain.push` adds a card, results and engines' formats.

        Raises:
            UserError: a kind without weights, or a combination.
        """
        raise UserError(
            f"kind={self.kind!r} has no weights of its own to publish; name the trained drafter"
        )


class SavedWeights(PreTrainedModel if TYPE_CHECKING else object):  # type: ignore[misc]
    """A drafter with weights. Packed for decoding, most of them are no parameters.

    Attributes:
        as_saved: the folder or tensors with the weights as they were before decoding rounded and
            packed them; None: unchanged.
    """

    kind: str
    name: str
    fresh: bool
    as_saved: Path | dict[str, Tensor] | None = None

    @property
    def device(self) -> torch.device:
        return next(weights_of(self)).device

    @property
    def dtype(self) -> torch.dtype:
        return next(weight.dtype for weight in weights_of(self) if weight.is_floating_point())

    def __repr__(self) -> str:
        count = sum(weight.numel() for weight in weights_of(self))
        name = self.config.target.get("name", "")
        dtype = str(self.dtype).removeprefix("torch.")
        kept = len(self.kept_ids)
        if self.fresh:
            state = "fresh"
        elif self.as_saved is None:
            state = "as trained"
        else:
            state = "packed for decoding"
        return (
            f"{type(self).__name__}(kind={self.kind}, {count / 1e6:,.1f}M parameters, {dtype} on {self.device}, drafts {kept:,} "
            f"tokens, for target {name!r}, {state})"
        )

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | Path,
        *,
        push_to_hub: bool = False,
        repo_id: str = "",
        **options: Any,
    ) -> None:
        """Writes the drafter as transformers does, with the weights that it had before packing.

        Args:
            push_to_hub: also upload it, to `repo_id` (default: the folder's name). options: of
                transformers' `save_pretrained` and, with push_to_hub, of its `push_to_hub`.

        Raises:
            UserError: `repo_id` and other options of an upload without push_to_hub.
        """
        upload = {key: options.pop(key) for key in UPLOAD & options.keys()}
        if (repo_id or upload) and not push_to_hub:
            raise UserError(
                f"{next(iter(upload), 'repo_id')} is of an upload; set push_to_hub=True, or leave it out"
            )
        with quiet_bars():
            self._unpacked().write(save_directory, **options)
        if push_to_hub:
            if not repo_id:
                repo_id = Path(save_directory).name
            self.push_to_hub(repo_id, **upload)

    def write(self, folder: str | Path, **options: Any) -> None:
        """Writes config and weights; options: of transformers' `save_pretrained`."""
        PreTrainedModel.save_pretrained(self, folder, **options)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:  # type: ignore[override]
        return PreTrainedModel.push_to_hub(self, repo_id, **options)

    def keep_saved(self, folder: Path | None = None) -> None:
        """Notes the weights that `save_pretrained` will write, before they change for decoding.

        They are those of a folder, else the present ones.
        """
        if self.as_saved is not None:
            return
        if folder is not None:
            self.as_saved = folder
        else:
            self.as_saved = self.state_dict()

    def _unpacked(self) -> Self:
        """The drafter as it was before `keep_saved`."""
        if self.as_saved is None:
            return self
        if isinstance(self.as_saved, Path):
            other = self.load(self.as_saved)
        else:
            other = self.blank()
            other.load_state_dict(self.as_saved, assign=True)
        other.config = self.config
        return other

    # -- copies ------------------------------------------------------------------------------------

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For copies and pickles: packed for decoding, the drafter as it was before.

        `generate` prepares the copy again.
        """
        if self.as_saved is None:
            return super().__reduce_ex__(protocol)
        other = self._unpacked().eval()
        other.name = self.name
        other.fresh = True
        return other.__reduce_ex__(protocol)

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        """As torch's.

        Raises:
            UserError: the weights were rounded or packed for decoding.
        """
        if self.as_saved is not None:
            raise UserError(
                f"this drafter ({self.kind}) is packed for decoding, so load_state_dict cannot replace its weights; load them "
                "into copy.deepcopy(drafter), which is unpacked, and let `generate` prepare that"
            )
        return super().load_state_dict(*args, **options)
