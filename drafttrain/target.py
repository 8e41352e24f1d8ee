"""The frozen target: loading, features, embedding, head, tokenizer. The only file that knows HF model internals.

Everything that runs the target (training, response generation, tree verification) goes through `Target`, so features
mean the same thing everywhere. Decoders plug their own attention in through `attention_context`: the transformers
attention interface then hands each layer's fresh queries, keys and values to a context object that owns the cache and
the mask. The model's own code stays unpatched, so any decoder-only family with that interface works.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from drafttrain.batch import TargetOutput
from drafttrain.errors import UserError
from drafttrain.ops.packing import SKINNY_ROWS, cpu_has_bfloat16, pack
from drafttrain.target_native import NativeBody

ATTENTION = "drafttrain"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_active = threading.local()


class AttentionContext(Protocol):
    """A decoder's cache and mask: receives each layer's new keys and values and returns its attention output."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Stores key and value [b, kv_heads, n, head_dim], attends with query [b, heads, n, head_dim].

        Returns [b, n, heads, head_dim]. RoPE is already applied. `window` counts visible positions, own included.
        """
        ...


@contextlib.contextmanager
def attention_context(context: AttentionContext) -> Iterator[None]:
    """While active, every target forward in this thread attends through `context`."""
    previous = getattr(_active, "context", None)
    _active.context = context
    try:
        yield
    finally:
        _active.context = previous


def _attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    context: AttentionContext | None = getattr(_active, "context", None)
    if context is not None:
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        out = context.attend(
            module.layer_idx,
            query,
            key,
            value,
            scaling=scaling,
            window=kwargs.get("sliding_window"),
            softcap=kwargs.get("softcap"),
            sinks=kwargs.get("s_aux"),
        )
        return out, None
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)


def _mask(*args, **kwargs):
    return None if getattr(_active, "context", None) is not None else sdpa_mask(*args, **kwargs)


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, _mask)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """'auto' means bfloat16 where the device multiplies it natively, else float32."""
    if name == "auto":
        fast = device.type == "cuda" or (device.type == "cpu" and cpu_has_bfloat16())
        return torch.bfloat16 if fast else torch.float32
    if name not in DTYPES:
        raise UserError(f"dtype={name!r} is not one of {', '.join(['auto', *DTYPES])}")
    return DTYPES[name]


def resolve_device(name: str = "auto") -> torch.device:
    if name != "auto":
        return torch.device(name)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def resolve_target(name: str) -> str:
    """A short name that `drafttrain fetch` has cached, a local folder, or a Hub id, as something HF can load.

    Raises:
        UserError: a local path that does not exist or holds no config.json.
    """
    from drafttrain.hub.fetch import cached_model

    cached = cached_model(name)
    if cached is not None:
        return str(cached)
    path = Path(name).expanduser()
    looks_local = path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local and not (path / "config.json").is_file():
        raise UserError(f"target={name!r}: no model folder with a config.json there; check the path, or use a Hub id")
    return str(path) if looks_local else name


class Target:
    """A frozen causal language model with its tokenizer.

    Attributes:
        name: what the user called it; `path`: what was loaded.
        dtype: the numeric format of its weights; `compute_dtype`: what it computes in. They differ on CPUs without
            bfloat16 units, where bfloat16 weights are held and multiplied as float32 (faster there, and more exact).
        hidden_size, vocab_size, num_layers: h, rows of the head, decoder layers.
        eos_ids: every token id that ends a response.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, name: str, path: str, dtype: torch.dtype):
        self.model: Any = model  # families differ in what they offer beyond PreTrainedModel
        self.tokenizer, self.name, self.path, self.dtype = tokenizer, name, path, dtype
        self.config = self.model.config.get_text_config()
        self.body: Any = self.model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
        self.hidden_size: int = self.config.hidden_size
        self.num_layers: int = self.config.num_hidden_layers
        self.softcap: float | None = getattr(self.config, "final_logit_softcapping", None)
        self.logit_scale: float = getattr(self.config, "logit_scale", None) or 1.0
        self.logit_scale /= getattr(self.config, "logits_scaling", None) or 1.0
        head: Any = self.model.get_output_embeddings()
        if head is None:
            raise UserError(f"target={name!r} ({type(model).__name__}) has no language-model head")
        self.lm_head = head
        self.vocab_size: int = head.weight.shape[0]
        self.layers = self._find_layers()
        self.eos_ids = self._find_eos()
        self._packed = False
        self._native: NativeBody | None = None

    # -- loading ------------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, name: str, dtype: str = "auto", device: str = "auto", trust_remote_code: bool = False) -> Target:
        """Loads a target by short name, folder or Hub id, frozen and in eval mode.

        Raises:
            UserError: nothing loadable there, an unknown dtype, or a model without the attention interface.
        """
        where, place = resolve_target(name), resolve_device(device)
        wanted = resolve_dtype(dtype, place)
        try:
            config = AutoConfig.from_pretrained(where, trust_remote_code=trust_remote_code)
            tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=trust_remote_code)
            model = AutoModelForCausalLM.from_pretrained(
                where, config=config, dtype=wanted, trust_remote_code=trust_remote_code, use_safetensors=True
            )
        except (OSError, ValueError) as error:
            first = str(error).strip().splitlines()[0]
            raise UserError(
                f"target={name!r} cannot be loaded ({first}); give a folder with config.json, safetensors and tokenizer, "
                "a reachable Hub id, or fetch one: drafttrain fetch smollm2-135m"
            ) from error
        moved: Any = model
        return cls.wrap(moved.to(place), tokenizer, name, where, wanted)

    @classmethod
    def wrap(
        cls, model: PreTrainedModel, tokenizer: Any, name: str = "", path: str = "", dtype: torch.dtype | None = None
    ) -> Target:
        """Makes a Target of a loaded HF model. The model is frozen, and attends through our interface from now on."""
        dtype = dtype or next(model.parameters()).dtype
        if not getattr(model, "_supports_sdpa", False):
            raise UserError(
                f"target={name!r} ({type(model).__name__}) does not use the transformers attention interface"
            )
        layer_types = set(getattr(model.config.get_text_config(), "layer_types", None) or [])
        recurrent = layer_types - {"full_attention", "sliding_attention"}
        if recurrent or getattr(model, "_is_stateful", False):
            what = ", ".join(sorted(recurrent)) or "recurrent state"
            raise UserError(
                f"target={name!r} ({type(model).__name__}) has {what} layers: rejected tokens cannot be rolled back"
            )
        if dtype == torch.bfloat16 and model.device.type == "cpu" and not cpu_has_bfloat16():
            model = model.float()
        model.set_attn_implementation(ATTENTION)
        model.eval().requires_grad_(False)
        return cls(model, tokenizer, name, path, dtype)

    def pack(self) -> Target:
        """Readies the model for fast inference on a CPU (no effect elsewhere). Costs a second copy of the weights."""
        if not self._packed and self.device.type == "cpu":
            self._native = NativeBody.of(self)
            pack(self.model)
            self.lm_head = self.model.get_output_embeddings()
            self._packed = True
        return self

    def _find_layers(self) -> nn.ModuleList:
        for module in self.body.modules():
            if isinstance(module, nn.ModuleList) and len(module) == self.num_layers:
                return module
        raise UserError(
            f"target={self.name!r} ({type(self.model).__name__}): no list of {self.num_layers} decoder layers"
        )

    def _find_eos(self) -> list[int]:
        ids: set[int] = set()
        sources = (getattr(self.model, "generation_config", None), self.config)
        for eos in (getattr(source, "eos_token_id", None) for source in sources):
            ids.update(eos if isinstance(eos, (list, tuple)) else [] if eos is None else [eos])
        if self.tokenizer is not None and self.tokenizer.eos_token_id is not None:
            ids.add(self.tokenizer.eos_token_id)
        return sorted(ids)

    # -- facts --------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def compute_dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def default_feature_layers(self) -> tuple[int, ...]:
        """EAGLE-3's choice (arXiv 2503.01840): the inputs of layers 2, L//2 and L-3, a low, a middle, a high state."""
        count = self.num_layers
        return tuple(sorted({min(2, count - 1), count // 2, max(count - 3, 0)}))

    @property
    def embed_weight(self) -> Tensor:
        """[v, h] input embedding rows (unscaled; `embed` applies the model's scale)."""
        return self.model.get_input_embeddings().weight

    @property
    def head_weight(self) -> Tensor:
        return self.lm_head.weight

    def identity(self) -> dict[str, Any]:
        """What a drafter records about its target, to be checked before the two are used together."""
        return {
            "name": self.name,
            "model_type": self.config.model_type,
            "hidden_size": self.hidden_size,
            "num_layers": self.num_layers,
            "vocab_size": self.vocab_size,
            "tokenizer": tokenizer_fingerprint(self.tokenizer),
        }

    # -- forwards -----------------------------------------------------------------------------------------------

    def embed(self, ids: Tensor) -> Tensor:
        """[...] ids -> [..., h], as the target's first layer receives them (Gemma's scale included)."""
        return self.model.get_input_embeddings()(ids)

    def head(self, hidden: Tensor, weight: Tensor | None = None) -> Tensor:
        """[..., h] -> float32 logits over the vocabulary, or over the given head rows `weight` [d, h]."""
        logits = self.lm_head(hidden) if weight is None else F.linear(hidden, weight)
        return self.shape_logits(logits.float())

    def shape_logits(self, logits: Tensor) -> Tensor:
        """What the model does to raw head products: scale and soft cap."""
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        feature_layers: Sequence[int],
        position_ids: Tensor | None = None,
        context: AttentionContext | None = None,
    ) -> TargetOutput:
        """Runs the body of the model.

        Args:
            input_ids: [b, s].
            feature_layers: i picks the input of layer i (HF's hidden_states[i]); i == num_layers the last layer's output
                before the final norm.
            position_ids: [b, s]; needed with `context`, whose tokens need not be consecutive.
            context: a decoder's cache and mask. Without one, plain causal attention over the rows.

        Returns:
            features [b, s, f*h] and last_hidden [b, s, h]. The head is not applied.
        """
        few = input_ids.shape[0] == 1 and input_ids.shape[1] <= SKINNY_ROWS
        if self._native is not None and few and context is not None and position_ids is not None:
            return self._native.forward(input_ids, feature_layers, position_ids, context)
        caught: dict[int, Tensor] = {}
        handles = [self._catch(i, caught) for i in set(feature_layers)]
        scope = attention_context(context) if context is not None else contextlib.nullcontext()
        try:
            with scope:
                out = self.body(input_ids=input_ids, position_ids=position_ids, use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        last = out.last_hidden_state
        parts = [caught[i] for i in feature_layers]
        return TargetOutput(torch.cat(parts, dim=-1) if parts else last[..., :0], last)

    def _catch(self, layer: int, caught: dict[int, Tensor]):
        if layer < self.num_layers:

            def before(_module, args, kwargs):
                caught[layer] = args[0] if args else kwargs["hidden_states"]

            return self.layers[layer].register_forward_pre_hook(before, with_kwargs=True)

        def after(_module, _args, output):
            caught[layer] = output[0] if isinstance(output, tuple) else output

        return self.layers[-1].register_forward_hook(after)

    @torch.no_grad()
    def check_head(self) -> None:
        """Proves on one token that head(last_hidden) is what the model itself returns.

        Raises:
            UserError: the model does something to its logits that `head` does not know.
        """
        ids = torch.full((1, 2), min(3, self.vocab_size - 1), device=self.device)
        ours = self.head(self.forward(ids, ()).last_hidden)
        theirs = self.model(input_ids=ids, use_cache=False).logits.float()
        if not torch.allclose(ours, theirs, rtol=2e-2, atol=2e-2 * theirs.abs().max().item()):
            raise UserError(
                f"target={self.name!r} ({type(self.model).__name__}) transforms its logits in an unknown way"
            )


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A short hash of the vocabulary (token text -> id); equal hashes mean that token ids mean the same."""
    if tokenizer is None:
        return ""
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return hashlib.sha256(json.dumps(vocab, ensure_ascii=True).encode()).hexdigest()[:16]
