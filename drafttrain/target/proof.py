"""The proof that a model runs through our attention: states and logits are its own.

Two rows of four tokens run with the model's own attention, then both interleaved in one row through
ours:

    row a    a0 a1 a2 a3                     model's own attention, two rows
    row b    b0 b1 b2 b3
    packed   a0 b0 a1 b1 a2 b2 a3 b3         our attention, one row; positions 0 0 1 1 2 2 3 3

The states must agree: so nothing but attention mixes tokens, position ids are honored, and no mask,
bias or window is lost. And `head` must give the model's logits. Families multiply logits by a value
of their config or divide by it, under names that do not tell which: the factor is the one that
reproduces the model's logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from drafttrain.batch import TargetOutput
from drafttrain.errors import UserError
from drafttrain.ops.tree_attention import AttentionForm
from drafttrain.target.attention import (
    ATTENTION,
    LAST,
    AttentionContext,
    InterleavedRows,
    attention_context,
)

# transformers' names of layer types: with plain attention, and with a state.
_SERVED = {"full_attention", "sliding_attention"}
_RECURRENT = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
_TOKENS = 4  # of each row
# Largest relative errors of states. In half precision rounding may send a token to another expert;
# unrelated states would differ by 1.4.
_STATES = 1e-2
_STATES_HALF = 0.5
# Largest relative errors of the head alone, on the model's own states.
LOGITS = 1e-3
LOGITS_HALF = 2e-2


class ProvenModel(Protocol):
    """What this subpackage reads of a `Target`, whose module imports it."""

    model: Any
    body: Any
    config: Any
    name: str
    path: str
    dtype: torch.dtype
    reason: str
    layers: nn.ModuleList
    forms: list[AttentionForm]
    num_layers: int
    hidden_size: int
    vocab_size: int
    tokenizer: PreTrainedTokenizerBase
    max_positions: int | None
    logit_scale: float
    continuation: Any  # of own_cache.py

    @property
    def compute_dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    def check_length(self, length: int, /) -> None: ...
    def hook(self, layers: Sequence[int], /) -> None: ...
    def head(self, hidden: Tensor, /) -> Tensor: ...
    def forward(
        self,
        ids: Tensor,
        layers: Sequence[int],
        at: Tensor | None = None,
        context: AttentionContext | None = None,
        /,
    ) -> TargetOutput: ...
    def run_body(
        self,
        ids: Tensor,
        layers: Sequence[int],
        context: AttentionContext | None,
        /,
        **options: Any,
    ) -> tuple[TargetOutput, Any]: ...


def unsupported(
    target: ProvenModel,
    fault: str,
) -> UserError:
    """The error for a model that cannot be a target."""
    return UserError(f"target={target.name!r} ({type(target.model).__name__}) {fault}")


def described(error: Exception) -> str:
    """One line about what code of other libraries raised."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def unpackable(model: PreTrainedModel, body: PreTrainedModel) -> str | None:
    """Why a model's class or config cannot attend through a context; None if no reason is found.

    Args:
        body: the model below its head, whose layers attend.
    """
    layer_types = getattr(model.config.get_text_config(), "layer_types", None)
    types: set[str] = set()
    named = ""
    if layer_types:
        types = set(layer_types) - _SERVED
    if types:
        named = f" ({', '.join(sorted(types))})"
    if "chunked_attention" in types:
        return "attends in fixed chunks, which no window of an attention context can express"
    if model._is_stateful or types & _RECURRENT:
        return f"keeps recurrent state{named}, from which rejected tokens cannot be rolled back"
    if types:
        return f"has layers of an unsupported type{named}"
    if body._can_set_attn_implementation():
        return None
    return "does not use the transformers attention interface"


def check_rows(
    target: ProvenModel,
    ids: Tensor,
    positions: Tensor | None,
    context: object,
) -> None:
    """Raises UserError for packed rows, which a model's own forward cannot tell apart."""
    consecutive = True
    if positions is not None:
        expected = torch.arange(ids.shape[1], device=ids.device)
        consecutive = bool((positions == expected).all())
    if context is not None or not consecutive:
        raise UserError(
            f"target {target.name!r} runs its own forward and cache, which packed rows cannot share ({target.reason}); "
            "give it a row per sequence"
        )


class _ProofRun(NamedTuple):
    """The results of the proof's forwards. The last three are relative errors."""

    rows: InterleavedRows  # with the attention calls
    scale: float  # factor on the head's products
    states: float  # of packed states
    head: float  # of the head on the model's own states
    logits: float  # of both together


@torch.no_grad()
def prove(target: ProvenModel) -> tuple[list[AttentionForm], float]:
    """Routes a model's attention through our interface; proves that states and logits stay the same.

    Returns:
        How each layer attends, and the factor on the head's products.

    Raises:
        UserError: layers that do not call the interface, a window that is not passed on, other
            states or logits; names the relative error.
    """
    most_of_states = by_precision(target, _STATES, _STATES_HALF)
    most_of_head = by_precision(target, LOGITS, LOGITS_HALF)
    advice = "use a target with plain attention"
    try:
        run = _run(target)
    except UserError:
        raise
    except Exception as error:  # other libraries' code may fail under our attention
        fault = f"fails on a proof of {2 * _TOKENS} tokens ({described(error)}); {advice}"
        raise unsupported(target, fault) from error
    layers = [layer for layer, _ in run.rows.forms]
    forms = [form for _, form in run.rows.forms]
    fault = ""
    # Written so that NaN fails too.
    if sorted(layers) != list(range(target.num_layers)):
        fault = f"calls the transformers attention interface for layers {sorted(layers)}"
    # Some masks hide all but a window, although no layer passed a window to the attention function.
    elif run.rows.masked - {form["window"] for form in forms}:
        fault = (
            f"does not pass its window of {max(run.rows.masked)} tokens to the attention interface"
        )
    elif not run.states <= most_of_states:
        fault = f"computes other states for packed rows than for one row (relative error {run.states:.2g})"
    elif not run.head <= most_of_head or not run.logits <= most_of_states:
        fault = f"transforms its logits in an unknown way (relative error of ours {max(run.head, run.logits):.2g})"
        advice = "use a target whose logits are its head's products, scaled or soft-capped as its config says"
    if fault:
        raise unsupported(target, f"{fault}; {advice}")
    # Calls may come in another order than the layers have.
    return [forms[layers.index(i)] for i in range(target.num_layers)], run.scale


def by_precision(target: ProvenModel, single: float, half: float) -> float:
    """The largest relative error of two, by the precision in which a target computes."""
    if target.compute_dtype.itemsize < 4:
        return half
    return single


def _run(target: ProvenModel) -> _ProofRun:
    n = _TOKENS
    ids = proof_tokens(target, 2 * n).view(2, n)
    rows = InterleavedRows(n)
    # Both rows' tokens alternate, and each pair has its position in its own row.
    positions = torch.arange(n, device=target.device).repeat_interleave(2)[None]
    states: list[Tensor] = []  # what the body returns, per forward
    caught: dict[int, Tensor] = {}

    def returned(_module, _args, out):
        states.append(out.last_hidden_state)

    target.hook(())  # it catches what the head reads, where the body returns something else
    hook = target.body.register_forward_hook(returned)
    try:
        # First with the model's own attention: afterwards the model calls ours.
        with attention_context(None, caught):
            own = target.model(input_ids=ids, use_cache=False).logits.float()  # [2, n, v]
        # Not of the whole model: towers keep their attention.
        target.body.set_attn_implementation(ATTENTION)
        packed = target.forward(ids.t().reshape(1, -1), (), positions, rows).last_hidden
    finally:
        hook.remove()
    before, after = states  # [2, n, h], [1, 2n, h]
    # The tokens of the two rows come apart again.
    after = after.view(n, 2, -1).transpose(0, 1)  # [2, n, h]
    # What the head read is caught only where the body returns something else.
    scale, head = find_scale(target, caught.get(LAST, before), own)
    logits = target.head(packed).view(n, 2, -1).transpose(0, 1)  # [2, n, v]
    return _ProofRun(
        rows=rows,
        scale=scale,
        states=relative_error(after, before),
        head=head,
        logits=relative_error(logits, own),
    )


@torch.no_grad()
def prove_own(target: ProvenModel) -> float:
    """Proves that a model's own forward gives a target's states.

    It must give each layer's states, which later tokens and padding do not change, and the head
    must give the model's own logits.

        rows      a0 .. a7           the states of these positions must be the same
        padded    a0 .. a7 x x x     in both

    Returns:
        The factor on the head's products.

    Raises:
        UserError: a model that fails on it, sees later tokens, or transforms its logits in an
            unknown way.
    """
    n = 2 * _TOKENS
    most_of_states = by_precision(target, _STATES, _STATES_HALF)
    most_of_head = by_precision(target, LOGITS, LOGITS_HALF)
    layers = range(target.num_layers + 1)
    # Rows of 3n/2 tokens; what the first n give must not depend on those behind them.
    ids = proof_tokens(target, 3 * n).view(2, -1)  # [2, 3n/2]
    try:
        own = target.model(input_ids=ids[:, :n], use_cache=False).logits.float()  # [2, n, v]
        rows = target.forward(ids[:, :n], layers)
        padded = target.forward(ids, layers)
        shapes = {tuple(x.shape[:2]) for x in (rows.last_hidden, rows.features, own)}
        if shapes != {(2, n)} or rows.last_hidden.shape[2] != target.hidden_size:
            raise ValueError(f"{n} tokens have states and logits of {sorted(shapes)}")
    except UserError as error:  # layers whose states are no features
        fault = f"has layers without a state per token ({str(error).partition(';')[0]})"
        raise unsupported(target, fault) from error
    # The forward looks up each layer's states by its number.
    except KeyError as error:
        fault = f"does not run its layer {error} on text"
        raise unsupported(target, fault) from error
    except Exception as error:  # code of other libraries
        fault = f"fails on a proof of {n} tokens ({described(error)})"
        raise unsupported(target, fault) from error
    seen = max(
        relative_error(padded.features[:, :n], rows.features),
        relative_error(padded.last_hidden[:, :n], rows.last_hidden),
    )
    if not seen <= most_of_states:
        fault = f"computes states that change with later tokens (relative error {seen:.2g}); use a causal model"
        raise unsupported(target, fault)
    scale, head = find_scale(target, rows.last_hidden, own)
    if not head <= most_of_head:
        fault = f"transforms its logits in an unknown way (relative error of ours {head:.2g})"
        advice = "use a target whose logits are its head's products"
        raise unsupported(target, f"{fault}; {advice}")
    return scale


def proof_tokens(target: ProvenModel, count: int) -> Tensor:
    """[count] different ids, spread over the vocabulary."""
    return torch.arange(1, count + 1, device=target.device) * target.vocab_size // (count + 2)


def find_scale(
    target: ProvenModel,
    states: Tensor,
    own: Tensor,
) -> tuple[float, float]:
    """The factor on the head's products that reproduces the model's logits best, and its error.

    The factor is set on the target.
    """

    def error(scale: float) -> float:
        target.logit_scale = scale
        return relative_error(target.head(states), own)

    errors = {scale: error(scale) for scale in _scales(target.config)}
    if not any(found <= LOGITS for found in errors.values()):
        # A rule that the config does not name: fit the factor.
        target.logit_scale = 1.0
        products = target.head(states).to(own.device)
        scale = float((products * own).sum() / products.square().sum())
        errors[scale] = error(scale)
    # NaN compares as neither smaller nor larger; the pair puts it last.
    best = min(errors, key=lambda scale: (math.isnan(errors[scale]), errors[scale]))
    target.logit_scale = best
    return best, errors[best]


def _scales(config: PreTrainedConfig) -> Iterator[float]:
    """Factors that a config may name: one, each value that scales the head, and its inverse."""
    yield 1.0
    for key, value in vars(config).items():
        if "scal" not in key and "mult" not in key:
            continue
        of_head = any(word in key for word in ("logit", "head", "output"))
        if of_head and isinstance(value, (int, float)) and value:
            yield float(value)
            yield 1.0 / value


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Relative error; NaN if either is not finite."""
    ours = ours.to(theirs.device).float()
    theirs = theirs.float()
    return float((ours - theirs).norm() / theirs.norm())
