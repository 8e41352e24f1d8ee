"""How a model's attention and features are reached: through the transformers attention interface and hooks that stay.

`attention_context` hands each layer's fresh queries, keys and values to a context, which owns the cache and the mask, while
the model's own code stays unpatched. Without a context the model computes what it always did.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, and_masks, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from drafttrain.errors import UserError
from drafttrain.ops.tree_attention import TreeLayout, tree_attention

ATTENTION = "drafttrain"
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
def attention_context(context: AttentionContext, caught: dict[int, Tensor] | None = None) -> Iterator[None]:
    """While active, every target forward in this thread attends through `context`; `caught` takes the hooked features."""
    previous = getattr(_active, "context", None), getattr(_active, "caught", None)
    _active.context, _active.caught = context, caught
    try:
        yield
    finally:
        _active.context, _active.caught = previous


@contextlib.contextmanager
def apart(documents: Tensor) -> Iterator[None]:
    """While active, forwards without a context make masks that keep the conversations of a row apart.

    Layers get these masks as arguments, so gradient checkpointing has them when it computes a layer again.

    Args:
        documents: [b, s], tokens of one conversation have one number in their row.
    """
    _active.documents = documents
    try:
        yield
    finally:
        _active.documents = None


class Rows:
    """Plain causal attention over the rows of one forward, in any form of it that a family knows."""

    def __init__(self, length: int):
        self.layout = TreeLayout(0, count=length)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **form: Any) -> Tensor:
        return tree_attention(query, key, value, self.layout, **form).transpose(1, 2)


class Probe(Rows):
    """Attends as if two rows came interleaved in one (a0 b0 a1 b1 ...), and notes what a model asks for.

    Attributes:
        layers: the layer of each call. windows: those given with the calls; masked: those of the masks it wanted.
    """

    def __init__(self, length: int):
        super().__init__(length)
        self.layers: list[int] = []
        self.windows: set[int | None] = set()
        self.masked: set[int] = set()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **form: Any) -> Tensor:
        self.layers.append(layer)
        self.windows.add(form["window"])
        query, key, value = (torch.cat((x[:, :, 0::2], x[:, :, 1::2])) for x in (query, key, value))
        out = super().attend(layer, query, key, value, **form)
        return torch.stack((out[:1], out[1:]), dim=2).flatten(1, 2)


def _attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    context: AttentionContext | None = getattr(_active, "context", None)
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if context is not None:
        if attention_mask is not None or kwargs.get("position_bias") is not None:
            raise UserError(f"{type(module).__name__} brings its own mask or position bias, which no context can apply")
        out = context.attend(
            getattr(module, "layer_idx", -1),
            query,
            key,
            value,
            scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
            window=kwargs.get("sliding_window"),
            softcap=softcap,
            sinks=sinks,
        )
        return out, None
    # Whoever calls the model itself, transformers' generate for one, gets what it would have computed before.
    options = {"dropout": dropout, "scaling": scaling, **kwargs}
    if softcap is None and sinks is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    n, seen = query.shape[2], key.shape[2]
    if attention_mask is None:  # `sdpa_mask` leaves out plain causal ones
        attention_mask = torch.ones(n, seen, dtype=torch.bool, device=query.device).tril(seen - n)
    bias = torch.zeros_like(attention_mask, dtype=query.dtype)
    bias = bias.masked_fill(~attention_mask, torch.finfo(query.dtype).min)
    eager = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
    return eager(module, query, key, value, bias, **options)


# Features are caught by hooks that are registered once per module and stay: a compiled or captured forward keeps them.
# They write to the dict of the running `Target.forward`, and do nothing while the model runs for somebody else.
# The feature layer that is the state the head reads, behind the last norm.
LAST = -1


def catch_input(layer: int, _module, args, kwargs):
    caught = getattr(_active, "caught", None)
    if caught is not None:
        caught[layer] = args[0] if args else kwargs["hidden_states"]


def catch_output(layer: int, _module, _args, output):
    caught = getattr(_active, "caught", None)
    if caught is not None:
        caught[layer] = output[0] if isinstance(output, tuple) else output


def hook_features(module: nn.Module, catch: Any, layer: int) -> None:
    """Registers a hook unless the module has it already, from another Target of the same model or from its original."""
    before = catch is catch_input
    present: Any = module._forward_pre_hooks if before else module._forward_hooks
    if any(getattr(other, "func", None) is catch for other in present.values()):
        return
    hook = functools.partial(catch, layer)
    if before:
        module.register_forward_pre_hook(hook, with_kwargs=True)
    else:
        module.register_forward_hook(hook)


def _mask(*args, **kwargs):
    context = getattr(_active, "context", None)
    if isinstance(context, Probe):
        context.masked |= {kwargs["local_size"]} if kwargs.get("local_size") else set()
    if context is not None:
        return None
    documents: Tensor | None = getattr(_active, "documents", None)
    if documents is not None:

        def together(row: Any, _head: Any, query: Any, key: Any) -> Any:
            return documents[row, query] == documents[row, key]

        kwargs["mask_function"] = and_masks(kwargs["mask_function"], together)
        kwargs["allow_is_causal_skip"] = False
    return sdpa_mask(*args, **kwargs)


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, _mask)
