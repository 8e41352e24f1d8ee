"""Drafter heads as GGUF files, which llama.cpp loads beside the target's file.

They are models of architectures of their own:

    ours                         GGUF
    decoder layers               blk.{i}.*; queries and keys in rotary order (2i, 2i + 1) where the architecture rotates so
    kept_ids [d]                 d2t [d] int64: target ids themselves, where other engines read target id - drafter id
    the target's head rows       output.weight [d, h]; left out where all of the target's rows are used
    the target's embedding       left out; token_embd.weight [v, h] where the target scales its rows, which llama.cpp does in the
                                 target's graph only, or [v + 1, h] with a learned mask as the last row
    tokenizer, vocabulary size   the target's

Sources, of release b11549: src/models/{eagle3,dflash}.cpp and common/speculative.cpp;
conversion/{llama,qwen}.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from drafttrain.drafters.common.trainable import TrainableDrafter
from drafttrain.drafters.form import (
    Form,
    Turn,
    Weight,
    check_fixed,
    fill,
    read_form,
    unchanged,
)
from drafttrain.drafters.read_back import compare_drafters
from drafttrain.drafters.shipping import GGUF_NAME, D, ExportRequest, Shipping, Trained
from drafttrain.errors import UserError
from drafttrain.files import Json
from drafttrain.formats.engines import EngineRelease
from drafttrain.formats.read_gguf import dtype_of, read_gguf
from drafttrain.formats.weights import check_names, dtype_name
from drafttrain.formats.write_gguf import (
    layer_keys,
    rope_factors,
    rope_of,
    tensor_name,
    to_neighbors,
    write_file,
)
from drafttrain.target import Target, load_shell

RELEASE = "b11549"  # of llama.cpp, whose rules these are
# Families of targets that write_gguf.py writes, but of which llama.cpp gives drafters no states.
_NO_STATES = ("qwen2", "gemma3_text", "gemma3")


class GgufHeads(Shipping[D]):
    """Kinds that llama.cpp reads.

    Attributes:
        gguf_arch: its name of the architecture. gguf_layers: the family, in gguf.MODEL_ARCH, whose
            layers its own are like.
        gguf_names: llama.cpp's name of what is not in a layer and not named like the family's, by
            ours.
        gguf_ropes: rotary scalings that it computes.
    """

    gguf_arch = ""
    gguf_layers = "LLAMA"
    gguf_names: Mapping[str, str] = {}
    gguf_ropes: tuple[str, ...] = ("default", "linear")

    def gguf_keys(self, drafter: D) -> Json:
        """Keys beside those of the layers and the tokenizer, without the architecture's prefix."""
        raise NotImplementedError

    def gguf_unsupported(self, drafter: D) -> list[str]:
        """Features that llama.cpp does not compute."""
        target = drafter.config.target
        found = []
        kind = rope_of(drafter.config)["rope_type"]
        if kind not in self.gguf_ropes:
            ropes = ", ".join(self.gguf_ropes)
            found.append(
                f"rope_type={kind!r}: llama.cpp {RELEASE} computes {ropes} in {self.gguf_arch}"
            )
        count = target.get("num_layers")
        # -1 is what the head reads, and the number of layers the last layer's output.
        outside = [layer for layer in drafter.feature_layers if layer < 0 or layer == count]
        if outside:
            found.append(
                f"feature_layers={outside}: llama.cpp {RELEASE} gives the inputs of layers, not the last one's output"
            )
        family = target.get("model_type")
        if family in _NO_STATES:
            found.append(
                f"target of family {family}: llama.cpp {RELEASE} gives no states of it and stops"
            )
        return found

    def lacking(self, trained: Trained, form: str, engine: EngineRelease) -> list[str]:
        if form != "gguf":
            return super().lacking(trained, form, engine)
        return self.gguf_unsupported(self.load(trained))

    def write(self, trained: Trained, form: str, request: ExportRequest) -> list[Path]:
        """Writes draft.gguf. Reads the target's weights only where the file needs rows of them."""
        if form != "gguf":
            return super().write(trained, form, request)
        name = request.target_of(trained)
        if not name:
            raise UserError(
                "format='gguf' needs the target's tokenizer, and no target is recorded; pass --target"
            )
        drafter = self.load(trained)
        target = self._target(name, drafter)
        path = write_file(
            request.output / GGUF_NAME,
            self.gguf_arch,
            drafter.config,
            self._own_keys(drafter),
            fill(self.gguf_form(drafter, target), drafter.state_dict()),
            dtype_name(request.dtype),
            Path(target.path),
            _rows(drafter),
        )
        return [path]

    def _own_keys(self, drafter: D) -> Json:
        """`gguf_keys` by their full names, and the token at positions to predict."""
        keys = {f"{self.gguf_arch}.{key}": value for key, value in self.gguf_keys(drafter).items()}
        mask = getattr(drafter.config, "mask_token_id", None)
        if "mask" in drafter.state_dict():
            mask = drafter.config.vocab_size
        if mask is not None:
            keys["tokenizer.ggml.mask_token_id"] = mask
        return keys

    def gguf_name(self, own: str, drafter: TrainableDrafter) -> str:
        """llama.cpp's name of one of our tensors."""
        if own in self.gguf_names:
            return self.gguf_names[own]
        # EAGLE-3's only layer has a name of its own.
        plain = own.replace("midlayer.", "layers.0.")
        for name in (f"model.{plain}", plain):
            found = tensor_name(self.gguf_layers, drafter.config.num_hidden_layers, name)
            if found:
                return found
        raise UserError(f"{own} has no place in llama.cpp's {self.gguf_arch} ({RELEASE})")

    def gguf_form(self, drafter: D, target: Target) -> Form:
        """Every tensor of a file, by llama.cpp's names.

        target: with weights, if the file needs rows of them.
        """
        kept = drafter.kept_ids.cpu()  # [d] int64
        form: Form = {}
        # The drafter's own weights.
        for own in drafter.state_dict():
            if own not in ("kept_ids", "mask"):
                theirs = self.gguf_name(own, drafter)
                form[theirs] = Weight(own, *self._rotations(theirs, drafter))
        # What an engine cannot take from the target itself.
        if not _keeps_all(drafter):
            form["d2t"] = Weight("kept_ids")
            # Otherwise the drafter has trained its own rows.
            if "output.weight" not in form:
                form["output.weight"] = target.head_weight[kept]
        if self._needs_table(drafter, target):
            table = target.embed(torch.arange(target.vocab_size))
            form["token_embd.weight"] = table
            if "mask" in drafter.state_dict():
                # The mask becomes one more token of the vocabulary, with the last id.
                form["token_embd.weight"] = Weight(
                    "mask",
                    there=lambda mask: torch.cat((table, mask[None].to(table))),
                    back=lambda rows: rows[-1],
                )
        return form

    def _target(self, name: str, drafter: D) -> Target:
        """The target, with weights only where a file needs rows of them."""
        target = load_shell(name)
        if self._needs_rows(drafter, target):
            return load_shell(name, dtype="float32", device="cpu", weights=True)
        return target

    def _needs_table(self, drafter: D, target: Target) -> bool:
        """Whether a file needs the target's embedding."""
        if "mask" in drafter.state_dict():
            return True
        # A subclass may scale rows in its forward (Gemma), which llama.cpp does in the target's
        # graph.
        plain = type(target.model.get_input_embeddings()) is nn.Embedding
        return not plain or target.embed_scale != 1.0

    def _needs_rows(self, drafter: D, target: Target) -> bool:
        """Whether a file needs rows of the target's head or embedding."""
        if "lm_head.weight" not in drafter.state_dict() and not _keeps_all(drafter):
            return True
        return self._needs_table(drafter, target)

    @torch.no_grad()
    def check(self, trained: Trained, exported: Path) -> Json:
        """Reads a GGUF file back as a drafter, which must draft what the original does.

        Other formats are checked as in the base class.
        """
        file = exported / GGUF_NAME
        if not file.is_file():
            return super().check(trained, exported)
        where = repr(str(file))
        original = self.load(trained)
        keys, found = read_gguf(file)
        dtype = dtype_of(keys)
        if dtype is None:
            raise UserError(f"{where} has file type {keys.get('general.file_type')}; export again")
        self._check_keys(original, keys, found, where)
        back = self._read_back(original, found, dtype, where)
        depth = self.checked_depth(back.config.to_dict())
        return compare_drafters(original, back, dtype, depth, where)

    def _check_keys(
        self,
        original: D,
        keys: Json,
        found: Mapping[str, Tensor],
        where: str,
    ) -> None:
        """Raises UserError if a file describes another drafter."""
        arch = keys.get("general.architecture")
        config = original.config
        if arch != self.gguf_arch:
            raise UserError(
                f"{where} is of architecture {arch}, and the drafter is written as {self.gguf_arch}"
            )
        # The keys of the architecture are those that the drafter would be written with.
        own = layer_keys(arch, config, _rows(original)) | self._own_keys(original)
        found_keys = {name: value for name, value in keys.items() if name.startswith(f"{arch}.")}
        for name in {**own, **found_keys}:
            value = keys.get(name)
            ours = own.get(name)
            if not _agree(value, ours):
                raise UserError(
                    f"{where} says {name}={value!r}, and the drafter has {ours!r}; pass its own export"
                )
        # Without the table the file's vocabulary is the target's.
        kept = found.get("d2t", torch.arange(config.vocab_size))  # [d] int64
        if not torch.equal(kept, original.kept_ids):
            raise UserError(
                f"{where} keeps other tokens than the drafter (d2t); pass its own export"
            )

    def _read_back(
        self,
        original: D,
        found: dict[str, Tensor],
        dtype: torch.dtype,
        where: str,
    ) -> D:
        """The drafter that llama.cpp makes of a file whose keys are the drafter's."""
        # Rows of the original that no file holds stay; all other values are the file's.
        back = original.blank()
        back.load_state_dict(original.state_dict())
        target = self._target(original.config.target["name"], original)
        form = self.gguf_form(back, target)
        factors = rope_factors(original.config)
        if factors is not None:
            form["rope_freqs.weight"] = torch.from_numpy(factors)

        expected = fill(form, original.state_dict())
        check_names(found, {name: tuple(value.shape) for name, value in expected.items()}, where)
        for name in ("token_embd.weight", "output.weight"):
            weight = form.get(name)
            if weight is not None and weight != Weight("lm_head.weight"):
                # Rows of the target, which a file holds in its own dtype.
                count = len(expected[name]) if isinstance(weight, Tensor) else target.vocab_size
                rows = expected[name][:count].to(dtype).float()
                check_fixed(name, found[name][:count], rows, where)
                if isinstance(weight, Tensor):
                    form[name] = found[name]
        state = back.state_dict() | read_form(form, found, where)
        for name, values in state.items():
            if not values.isfinite().all():
                raise UserError(
                    f"{where}: {name} holds values that are not finite; use an earlier checkpoint"
                )
        back.load_state_dict(state)
        return back

    def _rotations(self, name: str, drafter: D) -> tuple[Turn, Turn]:
        """From our rotary order to the architecture's, and back."""
        if self.gguf_layers != "LLAMA":
            return unchanged, unchanged
        return (
            lambda values: to_neighbors(name, values, drafter.config),
            lambda values: to_neighbors(name, values, drafter.config, back=True),
        )


def _rows(drafter: TrainableDrafter) -> int:
    """Number of tokens of the file's vocabulary: the target's, and a learned mask."""
    if "mask" in drafter.state_dict():
        return drafter.config.vocab_size + 1
    return drafter.config.vocab_size


def _keeps_all(drafter: TrainableDrafter) -> bool:
    """Whether row i of the head belongs to token i, for all of the file's tokens."""
    return torch.equal(drafter.kept_ids.cpu(), torch.arange(_rows(drafter)))


def _agree(value: object, ours: object) -> bool:
    """Whether a file's value is ours; GGUF rounds to float32."""
    if isinstance(value, float) and isinstance(ours, float):
        return math.isclose(value, ours, rel_tol=1e-6)
    return value == ours
