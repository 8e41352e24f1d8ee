"""The frozen target: loading, features, embedding, head, tokenizer.

Everything that runs the target (training, response generation, tree verification) goes through
`Target`, so features mean the same thing everywhere. This subpackage is the only place that knows
the insides of transformers' models:

    target.py        Target: load or wrap a model, run it
    proof.py         proves that states and logits are the model's own: through our attention, or else of its own forward
    own_cache.py, snapshots.py: decoding with a model's own cache, where our attention cannot serve it
    sight.py         prompts with images: towers, processor, and the forward that reads both
    parts.py         which modules of such a model are its text part
    shell.py         a target without its layers
    own_layer.py     a layer of the target's class with weights of its own, for drafters
    loading.py       loads models whose files hold exactly what their config promises
    attention.py     the registered attention function and feature hooks, through which a model's layers reach our cache
    experts.py       experts whose passes a GPU can capture
    native_body.py   the same forward as a few C calls, for decoding on a CPU
    fused_body.py    the same forward with fewer launches, for decoding on a GPU
    fetch.py, convert_gguf.py: getting one

A family needs no code here. A model whose layers call the transformers attention interface decodes
packed trees through our cache; any other causal model (recurrent layers, chunks, attention code of
its own) runs its own forward with its own cache. `Target.wrap` proves either. Models that see later
tokens, or whose logits are not their head's products, are refused.

A Target holds no state of a call: several threads may run forwards of one Target at the same time,
each with its own context.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from drafttrain.batch import TargetOutput
from drafttrain.errors import UserError, shown
from drafttrain.files import hub_snapshot, is_hub_id
from drafttrain.images import Picture
from drafttrain.ops.native import cpu_kernels, multiplies_bfloat16, return_freed_memory
from drafttrain.ops.packing import PackedLinear, cpu_has_bfloat16, pack, weights_of, without_grad
from drafttrain.ops.tree_attention import AttentionForm
from drafttrain.ops.tree_cache import TreeCache
from drafttrain.target.attention import (
    LAST,
    AttentionContext,
    CausalRows,
    attention_context,
    hook_features,
)
from drafttrain.target.devices import resolve_device, resolve_dtype, share_of_gpus
from drafttrain.target.experts import most_captured
from drafttrain.target.fetch import resolve_target
from drafttrain.target.fused_body import FusedBody
from drafttrain.target.generation import TargetGeneration, end_tokens, read_generation_config
from drafttrain.target.loading import (
    load_language_model,
    loading,
    longest_row,
    tokenizer_fingerprint,
)
from drafttrain.target.native_body import NativeBody, plain_embedding
from drafttrain.target.own_cache import Continuation, pack_proven
from drafttrain.target.parts import Parts, build_language_model, find_body, image_class
from drafttrain.target.proof import check_rows, prove, prove_own, unpackable, unsupported
from drafttrain.target.sight import ImagePrompt, Sight
from drafttrain.target.snapshots import SnapshotCache
from drafttrain.values import Place, check, refuse_options

_LOADABLE = "give a folder with config.json, safetensors and tokenizer, a Hub id, or fetch one: drafttrain fetch smollm2-135m"
logger = logging.getLogger(__name__)
_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken")
_packing = threading.Lock()
Tokenizer = PreTrainedTokenizerBase | None  # None only for models that tests build


class Target:
    """A frozen causal language model with its tokenizer.

    Attributes:
        name: the user's name for it. path: what was loaded.
        dtype: the numeric format of its weights. `compute_dtype` is the format of its states. They
            differ on CPUs, which hold bfloat16 weights as float32: always without bfloat16 units,
            and to decode (`widen`) with them.
        rounds: packed linear layers round their inputs to bfloat16, so that products are of
            bfloat16 numbers; sums are float32.
        body: the model below its head.
        layers: its decoder layers.
        hidden_size, vocab_size, num_layers: h, rows of the head, number of decoder layers.
        max_positions: the longest sequence that it reads, or None if nothing limits it.
        eos_ids: every token id that ends a response.
        generation: the rules of its generation_config for decoding.
        decoding_path: "packed": rows and trees share a forward through our attention; "snapshot":
            its own forward and cache. Without weights, its config decides.
        reason: why it is not packed; empty if it is.
        continuation: how its own cache is used, None if it is packed.
        forms: how each layer attends; empty without weights and on the snapshot path.
        sight: how it reads images, None if its class reads none. Nothing is loaded for it before
            the first prompt with images.
        hooks: that it has registered with the model, see `hook`.
        idle_steps: captured decoding steps (CUDA graphs) between two calls of the decoder, see
            `take_idle_steps`.
        most_captured: the most tokens of a pass that a CUDA graph can capture, None for any number.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        name: str,
        path: str,
        dtype: torch.dtype,
    ):
        self.model: Any = model  # families differ in what they offer beyond PreTrainedModel
        self.tokenizer: Any = tokenizer
        self.name = name
        self.path = path
        self.dtype = dtype
        self.config = self.model.config.get_text_config()
        self.body: Any = find_body(model)
        self.hidden_size: int = self.config.hidden_size
        self.num_layers: int = self.config.num_hidden_layers
        self.max_positions = longest_row(self.config)
        self.embed_scale: float = 1.0
        if getattr(self.config, "embedding_multiplier", None):
            self.embed_scale = self.config.embedding_multiplier
        self.softcap: float | None = None
        for key in ("output_logit_soft_cap", "logits_soft_cap", "final_logit_softcapping"):
            if getattr(self.config, key, None):
                self.softcap = getattr(self.config, key)
        self.logit_scale = 1.0  # `prove` finds it
        head = self.model.get_output_embeddings()
        if head is None:
            raise unsupported(self, "has no language-model head")
        self.lm_head: nn.Linear | PackedLinear = head
        self.vocab_size: int = head.weight.shape[0]
        self.layers = self._find_layers()
        self.generation = TargetGeneration(model, self.vocab_size, name)
        self.eos_ids = end_tokens((self.generation.config, self.config, tokenizer), self.vocab_size)
        self.decoding_path: Literal["packed", "snapshot"] = "packed"
        self.reason = ""
        self.continuation: Continuation | None = None
        self.forms: list[AttentionForm] = []
        self.rounds = False
        self._packed = False
        self._native: NativeBody | FusedBody | None = None
        self._hooked: set[int] = set()
        self.hooks: list[RemovableHandle] = []
        self.sight: Sight | None = None
        if image_class(model.config) is type(model):
            self.sight = Sight(self)
        self.idle_steps: list[Any] = []
        self.most_captured: int | None = None

    # -- loading -----------------------------------------------------------------------------------

    @classmethod
    def load(
        cls,
        name: str,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        trust_remote_code: bool = False,
        device_map: str | dict[str, int | str] = "",
        revision: str = "",
        tokenizer: Tokenizer = None,
    ) -> Target:
        """Loads a target by short name, folder or Hub id, frozen and in eval mode.

        Args:
            revision: branch, tag or commit of a Hub id.
            tokenizer: in place of its own.
            device_map: spreads the layers of a target that is too large for one device over the
                GPUs: `auto`, `balanced`, `sequential` or a map, see accelerate's dispatch. Of n
                processes on a machine each uses every n-th GPU. Inputs and outputs are on the first
                one.

        Raises:
            UserError: nothing loadable there, an unknown dtype, weights that are missing, unknown
                or not finite, or a model whose states or logits through our attention are not its
                own.
        """
        where = resolve_target(name)
        place = resolve_device(device)
        if revision:
            if not is_hub_id(where):
                raise UserError(
                    f"revision={revision!r} needs a Hub id, but target={name!r} is not one; leave it out"
                )
            files = list(_FILES)
            if trust_remote_code:
                files.append("*.py")
            snapshot = hub_snapshot(where, files, "target", revision=revision)
            where = str(snapshot)
        wanted = resolve_dtype(dtype, place)
        generation = read_generation_config(where, name)
        options: dict[str, Any] = {"dtype": wanted, "trust_remote_code": trust_remote_code}
        if device_map:
            options["device_map"] = device_map
            options["max_memory"] = share_of_gpus()
        elif place.type != "cpu":  # straight to the device, without a copy in the host's memory
            options["device_map"] = {"": place}
        if tokenizer is None:
            with loading(f"target={name!r}", _LOADABLE):
                tokenizer = AutoTokenizer.from_pretrained(
                    where,
                    trust_remote_code=trust_remote_code,
                )
        model = load_language_model(
            where,
            f"target={name!r}",
            _LOADABLE,
            **options,
        )
        if generation is not None:
            model.generation_config = generation
        if not device_map:
            model = model.to(place)
        target = cls.wrap(model, tokenizer, name, where, wanted)
        if target.sight is not None:
            target.sight.trust_remote_code = trust_remote_code
        if target.decoding_path == "snapshot":
            how = f"target {name!r} decodes by its own forward and cache ({target.continuation})"
            logger.info(f"{how}: {target.reason}")
        return target

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | PreTrainedModel | Target,
        *,
        tokenizer: Tokenizer = None,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        device_map: str | dict[str, int | str] = "",
        revision: str = "",
        trust_remote_code: bool = False,
        packed: bool = True,
        **others: object,
    ) -> Target:
        """A target that is ready to decode: `load` and `pack` a name, or `wrap` a loaded model.

        Args:
            model: a short name, folder or Hub id; a loaded transformers model, which is frozen; a
                Target is returned as it is.
            tokenizer: of a loaded model; in place of a name's own.
            dtype, device: `auto` unless given; those of a loaded model are its own.
            device_map: see `load`.
            revision: branch, tag or commit of a Hub id.
            trust_remote_code: run code that comes with the model.
            packed: lay out the weights of a name for decoding on a CPU, a second copy of them; a
                loaded model stays as it is.

        Raises:
            UserError: as `load` and `wrap`; options of a name with a loaded model; an unknown
                option.
        """
        dtype = others.pop("torch_dtype", dtype)  # type: ignore[assignment]  # the option's former name in transformers
        named = {"dtype": dtype, "device": device, "device_map": device_map, "revision": revision}
        known = ("tokenizer", *named, "trust_remote_code", "packed")
        refuse_options("Target.from_pretrained", others, known)
        given: Any = {key: value for key, value in named.items() if value}
        if isinstance(model, str | Path):
            name = check("model", str(model), Place)
            target = cls.load(
                name,
                trust_remote_code=trust_remote_code,
                tokenizer=tokenizer,
                **given,
            )
            if packed:
                return target.pack()
            return target
        if given:
            raise UserError(
                f"{next(iter(given))}= is for a name, but this model is loaded already; leave it out"
            )
        if isinstance(model, Target) and tokenizer in (None, model.tokenizer):
            return model
        if not isinstance(model, PreTrainedModel):
            raise UserError(
                f"model={shown(model)} must be a name, a loaded model, or a Target without tokenizer="
            )
        path = model.name_or_path or ""
        return cls.wrap(
            model,
            tokenizer,
            name=path or type(model).__name__,
            path=path,
        )

    @classmethod
    def wrap(
        cls,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        name: str = "",
        path: str = "",
        dtype: torch.dtype | None = None,
        freeze: bool = True,
    ) -> Target:
        """Makes a Target of a loaded model and freezes it.

        The model attends through our interface from now on, if that is proven. A draft model, which
        is trained and whose forwards are packed, is wrapped with freeze=False.

        Raises:
            UserError: a model that sees later tokens, or whose logits or cached continuation we do
                not reproduce; with freeze=False, one that an attention context cannot run. Names
                its class and the reason.
        """
        if dtype is None:
            dtype = next(model.parameters()).dtype
        model.eval()
        if freeze:
            if dtype == torch.bfloat16 and model.device.type == "cpu" and not cpu_has_bfloat16():
                model = model.float()
            model.requires_grad_(False)
        target = cls(model, tokenizer, name, path, dtype)
        if target.device.type == "cuda":
            # torch prefers cuDNN on some GPUs, which plans anew for every shape of attention: with
            # prompts and rows of all lengths that takes longer than the attention.
            torch.backends.cuda.enable_cudnn_sdp(False)
            target.most_captured = most_captured(model, name)
        target._choose_path(packed_only=not freeze)
        if target.device.type == "cuda" and freeze and target.decoding_path == "packed":
            target._native = FusedBody.of(target)
        return target

    def _choose_path(self, packed_only: bool) -> None:
        """Proves the packed path or else the snapshot path.

        Without weights (`meta`) the model stands for one that runs elsewhere, and its config
        decides.
        """
        own = self.body.config._attn_implementation  # put back if ours is not proven
        self.reason = unpackable(self.model, self.body) or ""
        meta = self.device.type == "meta"
        try:
            if self.reason:
                fault = f"{self.reason}; use a model with plain attention"
                raise unsupported(self, fault)
            if not meta:
                self.forms, self.logit_scale = prove(self)
        except UserError as error:
            if packed_only:
                raise
            self.decoding_path = "snapshot"
            if not self.reason:
                self.reason = str(error)
            if self.body.config._attn_implementation != own:
                self.body.set_attn_implementation(own)
            if not meta:
                self.logit_scale = prove_own(self)
                self.continuation = Continuation.prove(self)

    def __repr__(self) -> str:
        count = sum(weight.numel() for weight in weights_of(self.model))
        dtype = str(self.dtype).removeprefix("torch.")
        how = "packed for decoding" if self._packed else "not packed"
        return (
            f"Target({self.name!r}: {type(self.model).__name__}, {count / 1e6:,.1f}M parameters, {dtype} on {self.device}, "
            f"{self.num_layers} layers, {self.vocab_size:,} tokens, {how})"
        )

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles hold; raises UserError for native layers, which hold addresses."""
        if isinstance(self._native, NativeBody):
            raise UserError(
                f"target {self.name!r} is packed for decoding and cannot be copied or pickled; copy it before pack()"
            )
        return vars(self)

    def widen(self) -> None:
        """Computes in float32 from now on where that decodes faster.

        That is so for bfloat16 weights on a CPU with our kernels: they stream the weights as
        bfloat16, and multiply them as such where the CPU can (`rounds`).
        """
        half = self.dtype == self.compute_dtype == torch.bfloat16
        if half and not self._packed and self.device.type == "cpu" and cpu_kernels() is not None:
            self.model.float()

    def pack(self, keep_dtype: bool = False) -> Target:
        """Packs the weights for fast inference on a CPU, a second copy; no effect elsewhere.

        Args:
            keep_dtype: keep computing in the present dtype, where training reads the same target.
        """
        with _packing:
            if not self._packed and self.device.type == "cpu":
                if not keep_dtype:
                    self.widen()
                if self.continuation is None:
                    self._native = NativeBody.of(self)
                    pack(self.model)
                else:
                    pack_proven(self)
                self.lm_head = self.model.get_output_embeddings()
                self._packed = True
                if self._native is not None:
                    self._shrink()
                self._round_inputs()
                # packing replaces linear layers, hooks included (OPT-350m's projection has one)
                self._hooked.clear()
        return self

    @property
    def implementation(self) -> str:
        """What a pass over packed rows runs, and why nothing faster does."""
        if self.decoding_path == "snapshot":
            return f"its own forward and cache ({self.reason})"
        if isinstance(self._native, NativeBody):
            return "all layers in one C call"
        if isinstance(self._native, FusedBody):
            return "fused kernels between its products"
        lacks = "fused kernels lack its layers"
        if self.device.type == "cpu":
            lacks = "the C kernels lack its layers"
            if cpu_kernels() is None:
                lacks = "no C kernels could be built"
        return f"transformers' modules ({lacks})"

    def _shrink(self) -> None:
        """Frees half of the plain weights whose packed copies the native body reads."""
        for module in self.body.modules():
            if isinstance(module, PackedLinear):
                module.shrink()
        if isinstance(self.lm_head, PackedLinear) and self.lm_head.kernel:
            self.lm_head.panels()  # now, because making them takes memory
        return_freed_memory()

    def _round_inputs(self) -> None:
        """Sets `rounds` for a bfloat16 target that computes in float32 (`widen`) on such a CPU."""
        half = self.dtype == torch.bfloat16 and self.compute_dtype == torch.float32
        self.rounds = half and self.device.type == "cpu" and multiplies_bfloat16()
        if not self.rounds:
            return
        for module in self.model.modules():
            if isinstance(module, PackedLinear):
                module.rounded = True
        if isinstance(self._native, NativeBody):
            for layer in self._native.layers:
                layer.round_inputs()

    def _find_layers(self) -> nn.ModuleList:
        """The decoder layers."""
        for module in self.body.modules():
            if isinstance(module, nn.ModuleList) and len(module) == self.num_layers:
                return module
        lists = [module for module in self.body.children() if isinstance(module, nn.ModuleList)]
        if len(lists) != 1:
            fault = f"has no list of {self.num_layers} decoder layers"
            raise unsupported(self, fault)
        self.num_layers = len(lists[0])  # the config counts an encoder's layers, or parts of layers
        return lists[0]

    # -- facts -------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def compute_dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def product_dtype(self) -> torch.dtype:
        """What its linear layers multiply."""
        return torch.bfloat16 if self.rounds else self.compute_dtype

    @property
    def default_feature_layers(self) -> tuple[int, ...]:
        """EAGLE-3's choice: the inputs of layers 2, L//2 and L-3, a low, a middle and a high state.

        Source: arXiv 2503.01840.
        """
        count = self.num_layers
        return tuple(sorted({min(2, count - 1), count // 2, max(count - 3, 0)}))

    @property
    def embed_weight(self) -> Tensor:
        """[v, h] input embedding rows (unscaled; `embed` applies the model's scale)."""
        return self.model.get_input_embeddings().weight

    @property
    def head_weight(self) -> Tensor:
        """[v, h]; a projection of the states before the head (OPT-350m) is multiplied in."""
        out = self._project_out
        if out is None:
            return self.lm_head.weight
        return self.lm_head.weight @ out.weight

    @property
    def head_bias(self) -> Tensor | None:
        """[v], added to the head's products (Phi); None in most families."""
        return getattr(self.lm_head, "bias", None)

    @property
    def _project_out(self) -> nn.Linear | None:
        return getattr(self.body, "project_out", None)

    def last_layers(self, count: int) -> Sequence[nn.Module]:
        """The last `count` layers with their weights, for drafters that start as copies.

        None where they cannot be read.
        """
        return list(self.layers)[-count:]

    def identity(self) -> dict[str, Any]:
        """What a drafter records about its target, to be checked when the two are used together."""
        return {
            "name": self.name,
            "model_type": self.config.model_type,
            "hidden_size": self.hidden_size,
            "num_layers": self.num_layers,
            "vocab_size": self.vocab_size,
            "tokenizer": tokenizer_fingerprint(self.tokenizer),
        }

    # -- forwards ----------------------------------------------------------------------------------

    def embed(self, ids: Tensor) -> Tensor:
        """[...] ids -> [..., h], the first layer's input without learned positions.

        Gemma's scale is included.
        """
        embeds = self.model.get_input_embeddings()(ids)
        # OPT-350m embeds in fewer columns than h.
        project_in = getattr(self.body, "project_in", None)
        if project_in is not None:
            embeds = project_in(embeds)
        if self.embed_scale == 1.0:
            return embeds
        return embeds * self.embed_scale

    embed_table = plain_embedding

    def head(self, hidden: Tensor) -> Tensor:
        """[..., h] -> float32 logits over the vocabulary."""
        device = hidden.device
        if self._project_out is not None:
            hidden = self._project_out(hidden)
        logits = self.lm_head(hidden).to(device)
        return self.shape_logits(logits.float())

    @property
    def shapes_logits(self) -> bool:
        """Whether `shape_logits` changes anything."""
        return self.logit_scale != 1.0 or self.softcap is not None

    def shape_logits(self, logits: Tensor) -> Tensor:
        """Scales and soft-caps the head's products [..., v], as the model does."""
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.softcap is None:
            return logits
        return torch.tanh(logits / self.softcap) * self.softcap

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        feature_layers: Sequence[int],
        position_ids: Tensor | None = None,
        context: AttentionContext | SnapshotCache | None = None,
    ) -> TargetOutput:
        """Runs the body of the model.

        Args:
            input_ids: [b, s].
            feature_layers: f layers. i is the input of layer i (HF's hidden_states[i]), num_layers
                the last layer's output before the final norm, LAST (-1) the state behind it, which
                the head reads.
            position_ids: [b, s]; needed with `context`, whose tokens need not be consecutive.
            context: a decoder's cache and mask. Without one, plain causal attention over the rows.
                On the snapshot path it is a `SnapshotCache`; rows without one begin at position 0,
                with padding on the right.

        Returns:
            features [b, s, f*h] and last_hidden [b, s, h]. The head is not applied.

        Raises:
            UserError: rows longer than the target reads, or packed ones on the snapshot path.
        """
        native = self._native if input_ids.shape[0] == 1 else None  # it reads packed rows
        if native is not None and context is not None and position_ids is not None:
            assert not isinstance(context, SnapshotCache)  # native layers are of the packed path
            return native.forward(
                input_ids,
                feature_layers,
                position_ids,
                context,
            )
        if isinstance(context, SnapshotCache):
            return context.forward(input_ids, feature_layers)
        if context is None:
            self.check_length(input_ids.shape[1])
        if self.decoding_path == "snapshot":
            check_rows(self, input_ids, position_ids, context)
            out, _ = self.run_body(
                input_ids,
                feature_layers,
                None,
                use_cache=False,
            )
            return out
        if context is None:
            context = CausalRows(input_ids.shape[1])
        out, _ = self.run_body(
            input_ids,
            feature_layers,
            context,
            position_ids=position_ids,
            use_cache=False,
        )
        return out

    @property
    def processor(self) -> ProcessorMixin:
        """transformers' processor of images and text, loaded on first use.

        Raises:
            UserError: the target reads no images or has no processor, or torchvision or Pillow is
                missing.
        """
        return self.require_sight().processor

    def image_prompt(self, text: str, pictures: Sequence[Picture]) -> ImagePrompt:
        """A prompt with images.

        Args:
            text: the rendered chat template, with a marker per image.
            pictures: in the markers' order.

        Raises:
            UserError: as `processor`; text and pictures that do not go together.
        """
        return self.require_sight().prompt(text, pictures)

    def image_row(self, ids: Tensor, pictures: Sequence[Picture]) -> ImagePrompt:
        """A stored row, or its beginning, as a prompt with images.

        Args:
            ids: [L] int64, each image expanded to its placeholder tokens.
            pictures: of the row, in order; at least one.

        Raises:
            UserError: as `processor`; a row with more or fewer placeholders than its pictures take, such as
                one whose answer holds a placeholder.
        """
        return self.require_sight().row(ids, pictures)

    def read_images(self, prompt: ImagePrompt, feature_layers: Sequence[int]) -> TargetOutput:
        """`forward` of a whole conversation with images: states of all its L positions.

        Args:
            feature_layers: as in `forward`.

        Returns:
            features [1, L, f*h] and last_hidden [1, L, h].

        Raises:
            UserError: longer than the target reads, or a class that does not continue prompts with
                images as it continues text.
        """
        return self._seeing().read(prompt, feature_layers)

    def prefill_images(
        self,
        prompt: ImagePrompt,
        feature_layers: Sequence[int],
        cache: TreeCache | SnapshotCache,
        row: int,
    ) -> TargetOutput:
        """`read_images` into an empty row of a decoder's cache, which then holds all L tokens."""
        return self._seeing().prefill(prompt, feature_layers, cache, row)

    def _seeing(self) -> Sight:
        self.require_layers()
        return self.require_sight()

    def require_sight(self) -> Sight:
        """How it reads images. Raises UserError: it reads none."""
        if self.sight is None:
            fault = "reads no images; use a target that does, or text only"
            raise unsupported(self, fault)
        return self.sight

    @without_grad
    def score(
        self,
        input_ids: Tensor,
        feature_layers: Sequence[int],
        context: TreeCache | SnapshotCache,
    ) -> tuple[Tensor, Tensor]:
        """`forward` and `head` of the tokens [1, n] that a cache has announced, on a CPU in one kernel call.

        Returns:
            Features [n, f*h] and logits [n, v].
        """
        native = self._native
        if isinstance(native, NativeBody):
            made = native.score(
                input_ids,
                feature_layers,
                context,
                self.lm_head,
            )
            if made is not None:
                features, logits = made
                return features, self.shape_logits(logits)
        positions = context.positions(input_ids.device)
        out = self.forward(input_ids, feature_layers, positions, context)
        return out.features[0], self.head(out.last_hidden[0])

    def run_body(
        self,
        input_ids: Tensor,
        feature_layers: Sequence[int],
        context: AttentionContext | None,
        /,
        **options: Any,
    ) -> tuple[TargetOutput, Any]:
        """One call of the model's body with these options.

        Returns:
            The caught features [b, s, f*h] and last states [b, s, h], and the body's own output.
        """
        self.hook(feature_layers)
        caught: dict[int, Tensor] = {}
        with attention_context(context, caught):
            out = self.body(input_ids=input_ids, **options)
        device = input_ids.device  # a spread target has its states on several devices
        last = caught.get(LAST, out.last_hidden_state).to(device)
        caught[LAST] = last
        return TargetOutput.of(caught, feature_layers, last), out

    def unwrapped(self) -> Any | None:
        """Another model of the same class and weights, with the attention that transformers chooses.

        None where weights cannot be shared: on a CPU, which decodes with packed ones, quantized,
        or spread over devices.
        """
        placed = getattr(self.model, "hf_device_map", {})
        spread = len(set(placed.values())) > 1
        quantized = getattr(self.model.config, "quantization_config", None) is not None
        if self.device.type == "cpu" or spread or quantized:
            return None
        config = copy.deepcopy(self.model.config)
        config._attn_implementation = None
        with torch.device("meta"):
            if self.sight is not None and not Parts(self.model).towers:
                model = build_language_model(config, self.dtype)
            else:
                model = type(self.model)._from_config(config, dtype=self.dtype)
        model.load_state_dict(self.model.state_dict(), assign=True)
        model.tie_weights()
        # State dicts leave out what classes compute, rotary frequencies for one.
        for (_, own), (_, given) in zip(
            model.named_modules(), self.model.named_modules(), strict=True
        ):
            for key, value in {**own._buffers, **vars(own)}.items():
                if isinstance(value, Tensor) and value.is_meta:
                    setattr(own, key, getattr(given, key))
        return model.eval()

    def take_idle_steps(self) -> Any:
        """Removes and returns captured steps that an earlier call left; None if there are none.

        Only one of several threads gets them. It appends them to `idle_steps` after use.
        """
        try:
            return self.idle_steps.pop()
        except IndexError:
            return None

    def release_steps(self) -> None:
        """Frees captured steps that wait for the next call, with their cache and memory pool."""
        self.idle_steps.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @contextmanager
    def off_gpu(self) -> Iterator[float | None]:
        """Leaves the GPU to another program meanwhile; yields its free share, None without a GPU."""
        device = self.device
        if device.type != "cuda":
            yield None
            return
        logger.info(
            "target %r is in the host's memory while another program has the GPU", self.name
        )
        self.release_steps()
        self.model.to("cpu")
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        try:
            yield free / total
        finally:
            self.model.to(device)

    def require_layers(self) -> Target:
        """Itself. Raises UserError for a target without its layers, see `TargetShell`."""
        return self

    def check_length(self, length: int) -> None:
        """Raises UserError for a sequence longer than the target reads."""
        if self.max_positions is not None and length > self.max_positions:
            raise UserError(
                f"rows of {length} tokens, but target {self.name!r} reads at most {self.max_positions}; shorten them"
            )

    def hook(self, feature_layers: Sequence[int]) -> None:
        """Registers the hooks that catch these features.

        `forward` does so itself; captured passes must find the hooks in place.
        """
        # OPT-350m projects the last norm's output; the projection counts as part of the head.
        project_out = self._project_out
        wanted = set(feature_layers)
        if project_out is None:
            wanted.discard(LAST)
        else:
            wanted.add(LAST)
        for layer in wanted - self._hooked:
            if layer == self.num_layers:
                hook = hook_features(self.layers[-1], layer, output=True)
            elif layer == LAST and project_out is not None:
                hook = hook_features(project_out, layer)
            else:
                hook = hook_features(self.layers[layer], layer)
            if hook is not None:
                self.hooks.append(hook)
            self._hooked.add(layer)
