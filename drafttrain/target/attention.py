"""How a model's attention and features are reached without patching its code.

transformers calls the attention of every layer through a registered function, by the name in the
model's config. `Target.wrap` sets that name to "drafttrain", so each layer calls `_attention`
below. The function's signature belongs to transformers and has no place for our cache, so a forward
leaves it in a variable of its thread for as long as it runs:

    Target.forward(ids, context)              transformers                       this module
      with attention_context(context):   ->     layer i
        model.body(ids)                           q, k, v = projections, RoPE
                                                  attention(module, q, k, v) ->  _attention:
                                                  _active.context
                                                                                   .attend(i, q, k,
                                                                                   v, **form)
                                                  output projection, MLP     <-      cache, mask, kernel: the context's
      _active.caught[i]                  <-     inputs of hooked layers      <-  catch_input (hooks that stay)

The variable is thread-local, so forwards of one model in several threads each see their own
context. Without a context the model computes what it always did. The native CPU path
(native_body.py) calls the context itself and uses nothing of this module.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Protocol, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, and_masks, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from drafttrain.errors import UserError
from drafttrain.ops.tree_attention import AttentionForm, TreeLayout, tree_attention
from drafttrain.ops.tree_cache import TreeCache

ATTENTION = "drafttrain"  # our name among transformers' attention functions
# The same for a forward without layers: transformers makes no masks, which would read values.
MASKLESS = "drafttrain_maskless"
LAST = -1  # the feature layer behind the last norm, which the head reads


class AttentionContext(Protocol):
    """A decoder's cache and mask: takes each layer's new keys and values, returns its attention."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        **form: Unpack[AttentionForm],
    ) -> Tensor:
        """Stores the new keys and values of a layer and attends. RoPE is already applied.

        Args:
            query: [b, heads, n, head_dim]. key, value: [b, kv_heads, n, head_dim].

        Returns:
            [b, n, heads, head_dim].
        """
        ...


class _Active(threading.local):
    """The running forward of this thread, for `_attention`, `_mask` and the feature hooks."""

    context: AttentionContext | None = None
    keys: TreeCache | None = None
    caught: dict[int, Tensor] | None = None  # features by layer
    documents: Tensor | None = None  # see `apart`


_active = _Active()


@contextlib.contextmanager
def attention_context(
    context: AttentionContext | None,
    caught: dict[int, Tensor] | None = None,
    keys: TreeCache | None = None,
) -> Iterator[None]:
    """While active, every target forward in this thread attends through `context`.

    Args:
        caught: receives the hooked features.
        keys: without a context, stores every layer's keys and values.
    """
    outer = (_active.context, _active.caught, _active.keys)
    _active.context = context
    _active.caught = caught
    _active.keys = keys
    try:
        yield
    finally:
        _active.context, _active.caught, _active.keys = outer


@contextlib.contextmanager
def apart(documents: Tensor) -> Iterator[None]:
    """While active, forwards without a context mask the conversations of a row from each other.

    Layers receive these masks as arguments, so gradient checkpointing has them when it recomputes a
    layer.

    Args:
        documents: [b, s], tokens of one conversation have one number in their row.
    """
    _active.documents = documents
    try:
        yield
    finally:
        _active.documents = None


class CausalRows:
    """The context of a plain forward: causal attention over each row, in a family's own form."""

    def __init__(self, length: int):
        self.layout = TreeLayout(0, count=length)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        **form: Unpack[AttentionForm],
    ) -> Tensor:
        return tree_attention(query, key, value, self.layout, **form).transpose(1, 2)


class DocumentAttention:
    """The context of one row of several documents: each attends causally, and only to itself."""

    def __init__(self, lengths: list[int]):
        self.lengths = lengths
        self.layouts: dict[int, TreeLayout] = {}  # by length; they keep windowed layers' masks

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        **form: Unpack[AttentionForm],
    ) -> Tensor:
        """Attention of one layer, as `AttentionContext.attend` declares it; no keys are cached."""
        plain = form["softcap"] is None and form["sinks"] is None
        window = form["window"]
        outs = []
        queries = query.split(self.lengths, dim=2)
        keys = key.split(self.lengths, dim=2)
        values = value.split(self.lengths, dim=2)
        for q, k, v, length in zip(queries, keys, values, self.lengths, strict=True):
            if plain and (window is None or window >= length):
                out = F.scaled_dot_product_attention(
                    q,
                    k,
                    v,
                    is_causal=True,
                    scale=form["scaling"],
                    enable_gqa=True,
                )
            else:
                layout = self.layouts.setdefault(length, TreeLayout(0, count=length))
                out = tree_attention(q, k, v, layout, **form)
            outs.append(out)
        return torch.cat(outs, dim=2).transpose(1, 2)  # [1, n, heads, e]


class InterleavedRows(CausalRows):
    """Attends as if two rows were interleaved in one (a0 b0 a1 b1 ...), and records the calls.

    Attributes:
        forms: (layer, form) of each call.
        masked: windows of the masks that the model asked for.
    """

    def __init__(self, length: int):
        super().__init__(length)
        self.forms: list[tuple[int, AttentionForm]] = []
        self.masked: set[int] = set()

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        **form: Unpack[AttentionForm],
    ) -> Tensor:
        self.forms.append((layer, form))
        query = torch.cat((query[:, :, 0::2], query[:, :, 1::2]))  # [2, heads, n, e]
        key = torch.cat((key[:, :, 0::2], key[:, :, 1::2]))  # [2, kv_heads, n, e]
        value = torch.cat((value[:, :, 0::2], value[:, :, 1::2]))
        out = super().attend(layer, query, key, value, **form)  # [2, n, heads, e]
        return torch.stack((out[:1], out[1:]), dim=2).flatten(1, 2)  # [1, 2n, heads, e]


def _attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """The attention function that transformers calls in every layer, with transformers' arguments."""
    context = _active.context
    softcap = kwargs.get("softcap")
    sinks = kwargs.get("s_aux")
    if context is not None:
        if attention_mask is not None or kwargs.get("position_bias") is not None:
            raise UserError(
                f"{type(module).__name__} brings its own mask or position bias, which no context can apply"
            )
        if scaling is None:
            scaling = query.shape[-1] ** -0.5
        window = kwargs.get("sliding_window")
        form = AttentionForm(
            scaling=scaling,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
        out = context.attend(
            getattr(module, "layer_idx", -1),
            query,
            key,
            value,
            **form,
        )
        # Contiguous, as transformers' own functions return it: some families take views of it.
        return out.contiguous(), None

    # Without a context (transformers' own generate, for example) the model computes what it did
    # before it was wrapped.
    if _active.keys is not None:
        _active.keys.write(getattr(module, "layer_idx", -1), key, value)
    options = {"dropout": dropout, "scaling": scaling, **kwargs}
    if softcap is None and sinks is None:
        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            **options,
        )
    # Eager attention, with the mask as a bias.
    n = query.shape[2]
    seen = key.shape[2]
    if attention_mask is None:  # `sdpa_mask` leaves out plain causal ones
        attention_mask = torch.ones(n, seen, dtype=torch.bool, device=query.device).tril(seen - n)
    bias = torch.zeros_like(attention_mask, dtype=query.dtype)
    bias = bias.masked_fill(~attention_mask, torch.finfo(query.dtype).min)
    eager = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
    return eager(module, query, key, value, bias, **options)


def _mask(*args, **kwargs):
    """The mask function that transformers calls once per forward and kind of mask.

    A context needs no mask.
    """
    context = _active.context
    documents = _active.documents
    if context is not None:
        if isinstance(context, InterleavedRows) and kwargs.get("local_size"):
            context.masked.add(kwargs["local_size"])
        return None
    if documents is not None:

        def together(row, _head, query, key):
            return documents[row, query] == documents[row, key]

        kwargs["mask_function"] = and_masks(kwargs["mask_function"], together)
        kwargs["allow_is_causal_skip"] = False
    return sdpa_mask(*args, **kwargs)


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, _mask)
ALL_ATTENTION_FUNCTIONS.register(MASKLESS, _attention)


# -- features --------------------------------------------------------------------------------------
# Hooks are registered once per module and stay, because a compiled or captured forward keeps those
# that it found. They write to the dict of the running `Target.forward` and do nothing in any other
# forward of the model.

_hooking = threading.Lock()


def catch_input(layer: int, _module, args, kwargs):
    """A forward pre-hook: catches the module's input."""
    if _active.caught is not None:
        _active.caught[layer] = args[0] if args else kwargs["hidden_states"]


def catch_output(
    layer: int,
    _module,
    _args,
    _kwargs,
    output,
):
    """A forward hook: catches the module's output."""
    if _active.caught is not None:
        first = output[0] if isinstance(output, (tuple, list)) else output
        _active.caught[layer] = first


def hook_features(
    module: nn.Module,
    layer: int,
    output: bool = False,
) -> RemovableHandle | None:
    """Has a module's input (or output) caught as the feature of a layer.

    A module keeps one hook of each kind. Another Target of the same model, or the original of a
    copied model, may have registered it already: then None is returned.
    """
    catch: Callable
    if output:
        catch = catch_output
        present = module._forward_hooks
    else:
        catch = catch_input
        present = module._forward_pre_hooks
    with _hooking:
        if any(getattr(hook, "func", None) is catch for hook in present.values()):
            return None
        register = module.register_forward_hook if output else module.register_forward_pre_hook
        return register(functools.partial(catch, layer), with_kwargs=True)
