"""Base class of trained drafters: beginning, binding to a target, loading and packing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from drafttrain.batch import TokenTree
from drafttrain.config import neighbours
from drafttrain.drafters.base import (
    NEW,
    Drafter,
    KeepTokens,
    Session,
)
from drafttrain.drafters.common import lora, rows
from drafttrain.drafters.common.context_tokens import ContextVocabulary
from drafttrain.drafters.common.layers import DraftLayer, Rotary
from drafttrain.drafters.common.rows import Ask, Children, DraftPass, JointSession, Places
from drafttrain.drafters.common.saving import NamedDrafter, SavedWeights
from drafttrain.drafters.common.static_draft import DraftSteps
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.registry import drafter_folder, kind_of
from drafttrain.errors import UserError
from drafttrain.files import Json
from drafttrain.formats.weights import (
    Shapes,
    check_kept_ids,
    check_names,
    file_shapes,
    read_weights,
)
from drafttrain.ops.graphs import GraphPool
from drafttrain.ops.native import cpu_kernels
from drafttrain.ops.packing import PackedLinear, pack
from drafttrain.ops.tree_cache import ROOM, Buffers, TreeCache
from drafttrain.target import Target
from drafttrain.target.loading import check_finite, loading
from drafttrain.values import check, kinds_of

_FUSING = ("fc", "eh_proj")  # linear layers that fuse what decoder layers read
_REPAIR = "use the folder as training or import wrote it"
# Fields of a target's identity that a drafter records, and that must equal those of the target it
# is used with.
RECORDED: dict[str, type] = {
    "hidden_size": int,
    "num_layers": int,
    "vocab_size": int,
    "tokenizer": str,
}


class TrainableDrafter(SavedWeights, Drafter, PreTrainedModel):  # type: ignore[misc]  # `from_pretrained` knows every kind
    """A drafter with weights, saved and loaded as transformers does.

    A kind sets `config_class`, a `TargetedConfig`, makes its modules and registers the buffer
    `kept_ids` in `__init__`.

    Attributes:
        kept_ids: [d] int64, the target id of each drafter id.
        static: rounds may be captured in CUDA graphs. static_depth: the deepest node that the kind
            predicts; None for any.
        windows: positions that the tokens of each layer with a cache see; 0 for all.
        embed: the target's embedding, ids [...] -> [..., h]; attached by `bind` as a plain
            function, so that it is neither trained, saved nor sharded with the drafter.
        embed_table: its rows [v, h], if the embedding does nothing else and a kernel reads them.
    """

    base_model_prefix = ""
    supports_gradient_checkpointing = True
    trainable = True
    takes_packed_rows = True
    config_class: Any = None  # a TargetedConfig
    kept_ids: Tensor
    embed: Callable[[Tensor], Tensor]
    embed_table: Tensor | None = None
    static = False
    windows: tuple[int, ...] = ()
    static_depth: int | None = None

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    @property
    def vocabulary(self) -> Tensor | None:
        return self.kept_ids

    @classmethod
    def begin(
        cls,
        target: Target,
        init: str,
        options: Json,
        loss: str,
        keep: KeepTokens | None = None,
    ) -> Self:
        options = cls.check_options(options)
        if init not in NEW:
            return cls._continue(target, init, options, loss)
        size = int(options.pop("draft_vocab_size", 0))
        if keep is not None:
            kept = keep(size)  # [d] int64 target ids
        else:
            kept = torch.arange(size or target.vocab_size)
        options["loss"] = loss
        if init == "native":
            return cls.native(target, kept, options)
        drafter = cls(cls.config_class.for_target(target, **options, draft_vocab_size=len(kept)))
        drafter.kept_ids.copy_(kept)
        if init == "target":
            copied = drafter.initialize(target, kept)
            print("initialized from the target:", ", ".join(copied) or "nothing", flush=True)
        return drafter

    @classmethod
    def check_options(cls, options: Json) -> Json:
        """Returns a recipe's `drafter:` keys, each converted to its kind of value.

        Raises:
            UserError: an unknown key, or a value that is not valid for its key.
        """
        kinds = kinds_of(cls.config_class)
        known = [name for name in vars(cls.config_class()) if not name.startswith("_")]
        for name in options:
            if name not in known:
                raise UserError(f"unknown key drafter.{name}{neighbours(name, known)}")
        checked = dict(options)
        for name, value in options.items():
            if name in kinds:
                checked[name] = check(f"drafter.{name}", value, kinds[name], words=True)
        return checked

    @torch.no_grad()
    def initialize(self, target: Target, kept_ids: Tensor) -> list[str]:
        self.kept_ids.copy_(kept_ids)
        return self.copy_from(target)

    def take_words(self, target: Target, kept_ids: Tensor) -> bool:
        """Exchanges the vocabulary [d], where that loses nothing: the head is the target's rows.

        Returns whether it did. A drafter with a head of its own keeps its vocabulary.
        """
        return False

    def head_rows(self, target: Target) -> Tensor:
        """[d, h] the target's head rows of the kept tokens; all of them are its own tensor."""
        rows = target.head_weight
        if len(self.kept_ids) == len(rows):
            return rows
        return rows[self.kept_ids.to(rows.device)]

    def copy_from(self, target: Target) -> list[str]:
        """Copies what fits from the target, after `kept_ids` is set; returns the copied names."""
        return []

    @classmethod
    def _continue(
        cls,
        target: Target,
        init: str,
        options: Json,
        loss: str,
    ) -> Self:
        """Loads a drafter to train it further.

        The data may be of another domain, or the target may have been fine-tuned since.
        Everything that its weights depend on (sizes, kept vocabulary, feature layers, norms) stays
        as saved. How it is trained (`recipe_keys` of its config, and the loss) follows the recipe.
        """
        kind = kind_of(init, key="init")
        if kind != cls.kind:
            raise UserError(
                f"kind={cls.kind!r}, but init={init!r} holds a drafter of kind {kind!r}; set that kind"
            )
        # Published heads are bfloat16, in which the steps of training would be rounded away.
        drafter = cls.load(drafter_folder(init, "init")).float()
        config = drafter.config
        # Keys of the training follow the recipe; all others must be as saved.
        for name, value in options.items():
            saved = getattr(config, name)
            if name in config.recipe_keys:
                setattr(config, name, value)
                continue
            meant = value
            if name == "draft_vocab_size":
                meant = config.vocab_size  # 0 keeps all tokens, and there are no more
                if value:
                    meant = min(value, meant)
            elif value == 0:  # a size that follows from others
                completed = copy.deepcopy(config)
                setattr(completed, name, value)
                completed.check()
                meant = getattr(completed, name)
            if _plain(meant) != _plain(saved):
                raise UserError(
                    f"drafter.{name}={value!r}, but the drafter of init={init!r} has {saved!r}, and its weights fix that; drop "
                    "the key, or train a new drafter with init=target"
                )
        config.loss = loss
        drafter.bind(target)
        config.target = target.identity()
        return drafter

    @classmethod
    def saved_config(cls, folder: Path) -> Any:
        """The config of a saved drafter. Raises UserError: one that cannot be read."""
        what = f"drafter={str(folder)!r}"
        with loading(what, _REPAIR):
            try:
                return cls.config_class.from_pretrained(str(folder))
            except UserError as error:  # of a value
                raise UserError(f"{what}: config.json: {error}") from error

    @classmethod
    def load(cls, folder: Path) -> Self:
        """A saved drafter.

        Raises:
            UserError: files whose tensors are not exactly those that config.json describes, values
                that are not finite, kept ids that are none, or no recorded target.
        """
        what = f"drafter={str(folder)!r}"
        config = cls.saved_config(folder)
        for key, kind in RECORDED.items():
            if not isinstance(config.target.get(key), kind):
                raise UserError(f"{what}: config.json records no target.{key}; {_REPAIR}")
        cls.check_files(folder, config)
        with loading(what, _REPAIR):
            parent: Any = super(NamedDrafter, cls)  # transformers' own `from_pretrained`
            drafter = parent.from_pretrained(str(folder), use_safetensors=True)
        drafter.finish_loading(folder)
        weights = list(drafter.named_parameters()) + list(drafter.named_buffers())
        check_finite(weights, what, _REPAIR)
        check_kept_ids(drafter.kept_ids, config.vocab_size, what)
        return drafter

    @classmethod
    def check_files(cls, folder: Path, config: Any) -> None:
        """Checks names and shapes of a folder's tensors against a drafter of this config.

        Raises:
            UserError: a tensor is missing, unknown or of another shape.
        """
        what = f"drafter={str(folder)!r}"
        with loading(what, _REPAIR), torch.device("meta"):
            shapes = {name: tuple(value.shape) for name, value in cls(config).state_dict().items()}
        found = file_shapes(folder)
        check_names(found, cls.stored_shapes(shapes, found, config), what)

    @classmethod
    def stored_shapes(
        cls,
        shapes: Shapes,
        found: Shapes,
        config: Any,
    ) -> Shapes:
        """The shapes that a file must hold, for a drafter of `shapes`; found: those it holds."""
        return shapes

    def finish_loading(self, folder: Path) -> None:
        """Reads what a file stores in another form."""

    def load_checkpoint(self, folder: str | Path) -> bool:
        """Checks a training checkpoint, which the trainer then loads by names.

        The trainer checks one of several shards itself.
        """
        folder = Path(folder)
        if (folder / "model.safetensors").is_file():
            self.check_files(folder, self.config)
            weights = read_weights(folder).items()
            check_finite(weights, f"checkpoint={str(folder)!r}", "delete it")
        return False

    def blank(self) -> Self:
        return type(self)(self.config)

    def plain_state(self) -> dict[str, Tensor]:
        return self.state_dict()

    def pack(self) -> None:
        """Packs linear layers and norms as far as the CPU kernels support them."""
        self.keep_saved()
        pack(self)

    def bind(self, target: Target) -> None:
        """Checks that the target is the recorded one, and attaches its embedding.

        Hidden size, depth, vocabulary and tokenizer are compared.
        """
        recorded = self.config.target
        actual = target.identity()
        if recorded.get("tokenizer") and not actual["tokenizer"]:
            raise UserError(
                f"target {target.name!r} has no tokenizer, by which a drafter knows its target; pass tokenizer= with the model, "
                "or Target.from_pretrained(model, tokenizer=...)"
            )
        for key in RECORDED:
            if key in recorded and recorded[key] != actual[key]:
                raise UserError(
                    f"drafter was trained for target {recorded.get('name')!r} with {key}={recorded[key]!r}, but target "
                    f"{actual['name']!r} has {key}={actual[key]!r}; use its own target, or train a drafter for this one"
                )
        # The drafter's own sizes, also of drafters that record no target.
        sizes = {"vocab_size": target.vocab_size}
        if self.config.width_field:
            sizes[self.config.width_field] = target.hidden_size
        for key, theirs in sizes.items():
            ours = getattr(self.config, key)
            if ours != theirs:
                raise UserError(
                    f"drafter is for a target with {key}={ours}, but {target.name!r} has {theirs}; use its own target"
                )
        if max(self.feature_layers, default=0) > target.num_layers:
            raise UserError(
                f"feature_layers={list(self.feature_layers)} reach beyond the {target.num_layers} layers of {target.name!r}"
            )
        self.embed = target.embed
        self.embed_table = target.embed_table()

    # -- static steps ------------------------------------------------------------------------------

    def open_steps(
        self,
        pool: GraphPool,
        capacity: int,
        rows: int,
        spec: TreeSpec,
        last: DraftSteps | None,
    ) -> DraftSteps | None:
        if not self.static or not self.kept_ids.numel():
            return None
        if last is not None and last.fits(self, capacity, rows, spec):
            return last
        return DraftSteps(self, pool, capacity, rows, spec)

    def static_layers(self) -> Buffers:
        """Empty keys and values [1, kv_heads, 0, e] of each layer with a cache; none by default."""
        return {}

    # -- drafting ----------------------------------------------------------------------------------

    # A kind writes both below once; they run on the host's caches and in captured steps, where they
    # may not wait for the device. See common/rows.py.

    def read_committed(self, ids: Tensor, features: Tensor, at: DraftPass) -> Tensor:
        """Reads committed tokens of all sequences.

        Args:
            ids: [n] int64. features: [n, f*h] of the tokens before them. at: the tokens' pass.

        Returns:
            [R, ...], the sequences' roots: what `draft` reads of each one's last token.
        """
        raise NotImplementedError

    def draft(
        self,
        roots: Tensor,
        places: Places,
        width: int | None,
    ) -> tuple[Children, Ask]:
        """Drafts below roots [R, ...].

        Args:
            width: top tokens of a node that are enough; None: all logits are needed.

        Returns:
            The roots' children, and the function that computes those of deeper nodes.
        """
        raise NotImplementedError

    def grow_by_kernel(
        self,
        sessions: rows.Sessions,
        spec: TreeSpec,
        roots: Tensor,
    ) -> list[TokenTree] | None:
        """Greedy trees below roots [R, ...] by one C call; None where it does not apply."""
        return None

    def kernel_lacks(self, spec: TreeSpec) -> str:
        """Why no C call grows the trees of a spec; empty where one does."""
        return f"no C call grows those of {self.kind}"

    @property
    def steps_in_c(self) -> bool:
        """Whether a pass on a CPU is a C call."""
        return False

    def implementation(self, spec: TreeSpec) -> str:
        passes = "passes module by module"
        if not self.kept_ids.is_cpu:
            if self.static:
                return "static steps, in CUDA graphs"
            return passes
        lacks = self.kernel_lacks(spec)
        if not lacks:
            return "trees in one C call"
        if self.steps_in_c:
            passes = "a C call per pass"
        return f"{passes}, trees grown in Python ({lacks})"

    def start(self, prompt_ids: Tensor, max_length: int) -> Session:
        return JointSession(self, TreeCache(0))

    extend_all = rows.extend
    propose_all = rows.propose


class DecoderDrafter(TrainableDrafter):
    """A trained drafter of decoder layers, with a cache.

    A kind calls `finish` when it has made its modules.

    Attributes:
        lm_head: its own linear layer [d, h] over its vocabulary; None: it uses the target's.
        head: the one that it uses, after `bind` in any case. No submodule: the target's is neither
            trained nor saved.
        adapted: only adapters are trained, in linear layers of its decoder layers and in what fuses
            their input.
        scales_head: the target's factor of logits is in the rows that it uses of the target's.
        context: the tokens of texts that may join its vocabulary, set by `bind`; None: none may.
    """

    lm_head: nn.Linear | None
    head: nn.Linear | PackedLinear
    scales_head = True
    adapted = False
    packed = False
    stored = torch.float32  # of cached keys and values on a CPU
    name_options = ("extra_vocab_size",)
    context: ContextVocabulary | None = None

    def finish(self, own_head: bool) -> None:
        """Ends a kind's `__init__`. own_head: it has a head of its own."""
        config = self.config
        self.lm_head = None
        if own_head:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
            self._use_head(self.lm_head)
        self.feature_layers = tuple(config.feature_layers)
        self.register_buffer("kept_ids", torch.arange(config.draft_vocab_size))
        self.rotary = Rotary(config.rotary_dim, config.rope_parameters)
        self.windows = config.windows
        self.gradient_checkpointing = False
        self.post_init()

    def _use_head(self, head: nn.Linear | PackedLinear) -> None:
        self.__dict__["head"] = head

    @classmethod
    def begin(
        cls,
        target: Target,
        init: str,
        options: Json,
        loss: str,
        keep: KeepTokens | None = None,
    ) -> Self:
        own = dict(options)
        adapters = cls.check_options({"lora": own.pop("lora", None) or {}})["lora"]
        if adapters and init in NEW:
            raise UserError(
                f"drafter.lora={adapters} trains adapters of a trained drafter, but init={init!r} begins a new one; set "
                "init to a drafter's folder or Hub id, or drop the key"
            )
        drafter = super().begin(target, init, own, loss, keep)
        drafter.config.lora = adapters
        if adapters:
            drafter.add_adapters(adapters, init)
        return drafter

    # -- adapters ----------------------------------------------------------------------------------

    def add_adapters(self, options: Json, base: str) -> None:
        """Adds LoRA adapters and freezes all other weights; base: the drafter's name."""
        paths = {module: name for name, module in self.named_modules()}
        linear = []
        for layer in self.decoder_layers:
            for name, module in layer.named_modules():
                if isinstance(module, nn.Linear):
                    linear.append(f"{paths[layer]}.{name}")
        # The other linear modules are heads, whose weights losses and kernels read as they are.
        linear += [name for name in paths.values() if name.rpartition(".")[2] in _FUSING]
        lora.add_lora(self, options, linear, base)
        self.adapted = True

    def plain_state(self) -> dict[str, Tensor]:
        if self.adapted:
            return lora.merged(self, self.state_dict())
        return super().plain_state()

    def merge_adapters(self) -> None:
        """Merges adapters into the layers and removes them; without adapters, does nothing."""
        if self.adapted:
            lora.unload(self)
            self.adapted = False

    def keep_saved(self, folder: Path | None = None) -> None:
        # Kernels read the layers' weights alone, so adapters join these before any is packed.
        self.merge_adapters()
        super().keep_saved(folder)

    def write(
        self,
        folder: str | Path,
        state_dict: dict[str, Tensor] | None = None,
        **options: object,
    ) -> None:
        """As the base class; adapters are merged, and are in the folder `adapter` too."""
        if not self.adapted:
            super().write(folder, state_dict=state_dict, **options)
            return
        state = state_dict or self.state_dict()
        plain = self.blank()
        plain.load_state_dict(lora.merged(self, state))
        TrainableDrafter.write(plain, folder, **options)
        if options.get("is_main_process", True):
            lora.save_adapter(self, state, Path(folder) / lora.FOLDER)

    def load_checkpoint(self, folder: str | Path) -> bool:
        """As the base class; with adapters, reads those alone."""
        if not self.adapted:
            return super().load_checkpoint(folder)
        lora.load_adapter(self, Path(folder) / lora.FOLDER)
        return True

    def bind(self, target: Target) -> None:
        super().bind(target)
        self.context = None
        if self.config.extra_vocab_size:
            self.context = ContextVocabulary(target, self.kept_ids, self.config.extra_vocab_size)
        if self.lm_head is not None:
            return
        rows = self.head_rows(target).detach().to(target.device)  # [d, h]
        if self.scales_head and target.logit_scale != 1.0:
            rows = rows * target.logit_scale
        head = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
        head.weight = nn.Parameter(rows, requires_grad=False)
        self._use_head(PackedLinear(head) if self.packed else head)

    @property
    def joins_tokens(self) -> bool:
        return self.uses_text and self.config.extra_vocab_size > 0

    def start(self, prompt_ids: Tensor, max_length: int) -> JointSession:
        # One layer without a window needs all positions.
        cache = TreeCache(max_length + ROOM, dtype=self.stored, window=min(self.windows))
        text = None  # tokens that join the sequence's vocabulary, where any may
        if self.uses_text and self.context is not None:
            text = self.context.open(self.head.weight)
        return JointSession(self, cache, text)

    def static_layers(self) -> Buffers:
        config = self.config
        empty = next(self.parameters()).new_empty(1, config.num_key_value_heads, 0, config.head_dim)
        return dict.fromkeys(range(len(self.windows)), (empty, empty))

    @property
    def decoder_layers(self) -> list[DraftLayer]:
        return list(self.layers)  # type: ignore[arg-type]

    def pack(self) -> None:
        """Packs layers for the CPU kernels (float32), then linear layers and norms."""
        self.keep_saved()
        weight = next(self.parameters())
        fits = weight.dtype == torch.float32 and weight.device.type == "cpu"
        if fits and cpu_kernels() is not None:
            for layer in self.decoder_layers:
                layer.pack(self.rotary.width)
            self.pack_depths()
        super().pack()
        self.packed = True
        if self.lm_head is not None:
            self._use_head(self.lm_head)

    def pack_depths(self) -> None:
        """Called when the layers are packed, for kinds that can do more."""


def _plain(value: object) -> object:
    """A config value as JSON holds it."""
    if isinstance(value, tuple):
        return list(value)
    return value
