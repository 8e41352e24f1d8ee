"""Attention of new tokens over a committed prefix and over their own ancestors.

A forward of tree verification has L committed keys followed by n new ones (the root and the tree's
nodes). Every new token sees the prefix, its ancestors and itself. A sliding window counts
positions, not slots, because siblings share a position.

    slots      0 .. L-1   L      L+1   L+2   L+3            keys that a token sees
    token      prefix     root   a     b     a1             a1 (child of a): prefix, root, a, a1
    position   0 .. L-1   L      L+1   L+1   L+2

The mask depends on the tree alone: a `TreeLayout` builds it once and all layers share it. On a CPU
trees of up to 64 tokens and chains of any length take the kernel of cpu_layers.c (`CpuPlan`), whose
result for a token is the same to the bit in any tree. Everything else is plain torch: fused
attention, or two matrix products, with a group's query heads folded into rows. No path repeats keys
or values in memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cached_property
from typing import TypedDict, Unpack

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from drafttrain.ops.native import built_kernels, cpu_kernels
from drafttrain.ops.packing import address_of, check_form

# The CPU kernel keeps a token's ancestors in one 64-bit word. Chains are cut into pieces of as many.
_KERNEL_TOKENS = 64
# Rows per block of long chains (prefill under a window or a soft cap), so that no mask is quadratic
# in length.
_BLOCK = 256
# Formats of keys and values that the CPU kernel reads.
STORED = (torch.float32, torch.bfloat16)
# Ancestors of a chain's tokens: all before, and itself.
_CHAIN = [(2 << token) - 1 for token in range(_KERNEL_TOKENS)]


class AttentionForm(TypedDict):
    """How a layer of some family turns scores into weights."""

    # factor of the dot products
    scaling: float
    # visible positions, own included; None for all
    window: int | None
    # c in c * tanh(score / c), applied to scaled scores (Gemma 2); None for none
    softcap: float | None
    # [heads], a logit per head that joins the softmax without a value (gpt-oss); None for none
    sinks: Tensor | None


class TreeLayout:
    """Where the new tokens of one forward stand: behind which prefix, and below which ancestors.

    Attributes:
        prefix_len: L, committed tokens in the cache, at slots 0 to L - 1.
        parents: per tree node the index of its parent among the nodes, -1 below the root; None for
            a chain.
        held: tokens of the tree whose keys earlier forwards stored behind the prefix; the tree
            grows.
        count: n, new tokens. With parents, token 0 of a tree is the root and token i+1 is node i.
        tree_depths: [held + n], depths of all tokens. reach: positions up to the deepest one's,
            from 0 on.
        depths: [n] int array, those of the new tokens.
        base: position of slot 0, set by the cache that the forward is announced to: earlier
            positions are beyond its window, or (then it may be negative) images before the new
            tokens have fewer positions than tokens. New token i stands at position
            base + L + depths[i].
    """

    base = 0

    def __init__(
        self,
        prefix_len: int,
        parents: Sequence[int] | None = None,
        count: int | None = None,
        held: int = 0,
    ):
        self.prefix_len = prefix_len
        self.parents = parents
        self.held = held
        if parents is None:
            if count is None or held:
                raise ValueError(
                    f"count={count}, held={held}: a chain needs its length and holds no tokens"
                )
            self.count = count
            self.tree_depths = list(range(count))
            deepest = count - 1
        else:
            self.count = len(parents) + 1 - held
            depths = [0]
            for parent in parents:
                if not -1 <= parent < len(depths) - 1:
                    raise ValueError(
                        f"parents[{len(depths) - 1}]={parent} must be -1 or an earlier node"
                    )
                depths.append(depths[parent + 1] + 1)
            self.tree_depths = depths
            deepest = max(depths)
        if min(prefix_len, held, self.count) < 0:
            raise ValueError(
                f"prefix_len={prefix_len}, held={held}, count={self.count}: none may be negative"
            )
        self.reach = prefix_len + deepest + 1
        self._masks: dict[tuple[object, ...], Tensor] = {}

    @property
    def end(self) -> int:
        """Slots of the prefix and of all tokens of the tree."""
        return self.prefix_len + self.held + self.count

    def last(self, count: int) -> TreeLayout:
        """The layout of a chain's last tokens, behind those before them."""
        if self.parents is not None:
            raise ValueError(f"count={count}: only a chain's last tokens can be laid out alone")
        return TreeLayout(self.end - count, count=count)

    @cached_property
    def depths(self) -> np.ndarray:
        return np.asarray(self.tree_depths[self.held :])

    @cached_property
    def plan(self) -> CpuPlan | None:
        """The CPU kernel's plan if the keys begin at slot 0; None if the kernel does not serve it."""
        return CpuPlan.build([(0, self)])

    @cached_property
    def ancestors(self) -> list[int]:
        """Bits of each token of the tree, held ones included.

        Bit j of a token's number is set if token j is an ancestor or the token itself.
        """
        if self.parents is None:
            # A chain sees all earlier tokens.
            return [(2 << token) - 1 for token in range(self.count)]
        seen = [1]  # the root's
        for node, parent in enumerate(self.parents):
            seen.append(seen[parent + 1] | 2 << node)  # node i is token i + 1, whose bit is 2 << i
        return seen

    def ancestor_words(self, words: int) -> np.ndarray:
        """[held + n, words] uint32: bit j of word w is bit 32 * w + j of a token's `ancestors`."""
        raw = b"".join(bits.to_bytes(4 * words, "little") for bits in self.ancestors)
        return np.frombuffer(raw, dtype="<u4").reshape(-1, words)

    def positions(self) -> Tensor:
        """[1, n] int64 position ids."""
        return torch.from_numpy((self.depths + (self.base + self.prefix_len))[None])

    def mask(
        self,
        window: int | None,
        repeats: int,
        like: Tensor,
    ) -> tuple[int, Tensor | None]:
        """The additive mask over the keys that any new token can see.

        Args:
            window: visible positions, own included; None for all.
            repeats: how many query heads share a key head; the rows are tiled that often.
            like: gives dtype and device.

        Returns:
            The first visible key slot, and [repeats*n, L+held+n-first] of 0 and -inf, or None if
            all is visible.
        """
        # A window back to position 0 hides nothing.
        if window is not None and window >= self.reach:
            window = None
        first = 0
        if window is not None:
            first = max(0, self.prefix_len + 1 - window)  # the oldest key that the root sees
        if self.count == 1 and not self.held:  # one token sees every key from there on
            return first, None
        if self.parents is None:
            before = self.prefix_len - first
            return first, self.chain_mask(before, self.count, window, repeats, like)
        key = (first, window, repeats, like.dtype, like.device)
        if key not in self._masks:
            bias = np.tile(self._bias(first, window), (repeats, 1))
            mask = torch.from_numpy(bias).to(like.dtype)
            # Pageable memory is staged before the call returns.
            self._masks[key] = mask.to(like.device, non_blocking=True)
        return first, self._masks[key]

    def chain_mask(
        self,
        before: int,
        count: int,
        window: int | None,
        repeats: int,
        like: Tensor,
    ) -> Tensor:
        """[repeats*count, before+count], the mask of chained tokens behind `before` keys.

        It is made on the device once per shape.
        """
        key = (before, count, window, repeats, like.dtype, like.device)
        if key not in self._masks:
            token = torch.arange(before, before + count, device=like.device)[:, None]
            seen = torch.arange(before + count, device=like.device)
            hidden = seen > token  # [count, before + count]
            if window is not None:
                hidden = hidden | (seen <= token - window)
            bias = torch.zeros(
                hidden.shape,
                dtype=like.dtype,
                device=like.device,
            )
            bias.masked_fill_(hidden, float("-inf"))
            self._masks[key] = bias.repeat(repeats, 1)
        return self._masks[key]

    def _bias(self, first: int, window: int | None) -> np.ndarray:
        """[n, L+held+n-first], the mask of a tree over the keys from slot `first` on."""
        prefix = self.prefix_len - first
        n = self.held + self.count  # tokens of the tree, held ones included
        bias = np.zeros((n, prefix + n), dtype=np.float32)
        words = self.ancestor_words(-(-n // 32))  # rounded up
        bits = np.unpackbits(
            words.view(np.uint8),
            axis=1,
            count=n,
            bitorder="little",
        )  # [n, n]
        bias[:, prefix:][bits == 0] = -np.inf
        if window is not None:
            new = self.prefix_len + np.asarray(self.tree_depths)  # [n] positions
            keys = np.concatenate((np.arange(first, self.prefix_len), new))
            bias[new[:, None] - keys[None, :] >= window] = -np.inf
        return bias[self.held :]


class BlockLayout(TreeLayout):
    """A block behind a prefix, whose tokens see each other in both directions.

    It is a tree of one path, whose tokens have later ones among their `ancestors`.

    Args:
        size: tokens of the block. held: its first tokens, whose keys are stored already.
    """

    def __init__(
        self,
        prefix_len: int,
        size: int,
        held: int = 0,
    ):
        super().__init__(prefix_len, range(-1, size - 2), held=held)
        self.ancestors = [(1 << size) - 1] * size

    def last(self, count: int) -> BlockLayout:
        size = self.held + self.count
        return BlockLayout(self.prefix_len, size, size - count)

    def mask(
        self,
        window: int | None,
        repeats: int,
        like: Tensor,
    ) -> tuple[int, Tensor | None]:
        if window is None or window >= self.reach:
            return 0, None
        return super().mask(window, repeats, like)


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: TreeLayout,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attends with n new tokens over L committed, the held and n new keys.

    Args:
        query: [b, heads, n, head_dim], RoPE applied.
        key: [b, kv_heads, L+held+n, head_dim]; query head i reads key head i // (heads / kv_heads).
        value: [b, kv_heads, L+held+n, value_dim].
        layout: which keys each token sees; the same for all b rows.
        scaling, window, softcap, sinks: see `AttentionForm`.

    Returns:
        [b, heads, n, value_dim].
    """
    n = query.shape[2]
    prefix = layout.prefix_len
    form = AttentionForm(
        scaling=scaling,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )
    plain = softcap is None and sinks is None and (window is None or window >= n)
    causal = layout.parents is None and prefix == 0 and plain
    # The kernel cuts chains into pieces of 64; fused causal attention reads a long prompt at once.
    if key.shape[0] == 1 and query.device.type == "cpu" and not (causal and n > _KERNEL_TOKENS):
        plan = layout.plan
        if plan is not None and plan.serves(query, key, value):
            return plan.attend(query, key[0], value[0], **form).transpose(1, 2)
    if causal and n > 1:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            scale=scaling,
            enable_gqa=True,
        )
    if layout.parents is None and n > _BLOCK:
        return _in_blocks(query, key, value, layout, form)
    first, mask = layout.mask(window, query.shape[1] // key.shape[1], query)
    return masked_attention(query, key[:, :, first:], value[:, :, first:], mask, form)


class CpuPlan:
    """What the CPU kernel reads about a packed forward of several sequences' new tokens.

    Args:
        parts: per sequence the first slot of its keys on the slot axis, and its layout.

    Attributes:
        address: of the kernel's struct plan, which no call writes to.
        counts: new tokens of each sequence. tokens: N, of all.
        parts: struct parts, one per sequence or several for a long chain.
        slots, positions: how many the kernel reads or writes, from 0 on.
        ends: slots of each sequence, from 0 on.
    """

    def __init__(self, parts: Sequence[tuple[int, TreeLayout]]):
        self.positions = 0
        self.counts: list[int] = []
        self.ends: list[int] = []
        numbers: list[int] = []  # seven of each part
        ancestors: list[int] = []
        depths: list[int] = []
        begin = 0  # new tokens of earlier sequences
        for slot, layout in parts:
            count = layout.count
            held = layout.held
            prefix = layout.prefix_len
            base = layout.base % (1 << 64)  # of 64 bits, which C reads with their sign
            node = len(ancestors)  # tokens of earlier trees, held ones included
            tree = layout.parents is not None
            if slot < 0 or (tree and held + count > _KERNEL_TOKENS):
                raise ValueError(
                    f"slot={slot}, {held + count} tokens: slots begin at 0, a tree has {_KERNEL_TOKENS} at most"
                )
            if not tree:
                # Pieces of a chain, each behind all tokens before it, which are stored first.
                for start in range(0, count, _KERNEL_TOKENS):
                    piece = min(count - start, _KERNEL_TOKENS)
                    numbers += (slot, prefix + start, begin + start, piece, 0, node, base)
                ancestors += _CHAIN[:count]  # shared by all pieces
                depths += layout.tree_depths[:_KERNEL_TOKENS]
            else:
                numbers += (slot, prefix, begin, count, held, node, base)
                ancestors += layout.ancestors
                depths += layout.tree_depths
            begin += count
            self.counts.append(count)
            self.ends.append(slot + prefix + held + count)
            self.positions = max(self.positions, layout.base + layout.reach)
        self.tokens = begin
        self.parts = len(numbers) // 7
        self.slots = max(self.ends, default=0)
        # struct plan of cpu_layers.c, and behind it what it points to: one array is made faster than
        # four.
        self._plan = array("Q", (0, self.parts, 0, 0, *numbers, *ancestors, *depths))
        self.address = address_of(self._plan)
        at = self.address + 8 * 4  # bytes, as in the next two
        self._plan[0] = at
        self._plan[2] = at + 8 * len(numbers)
        self._plan[3] = at + 8 * (len(numbers) + len(ancestors))

    @staticmethod
    def build(parts: Sequence[tuple[int, TreeLayout]]) -> CpuPlan | None:
        """A plan; None if a tree is too large for the kernel."""
        if cpu_kernels() is None:
            return None
        for _, layout in parts:
            if layout.parents is not None and layout.held + layout.count > _KERNEL_TOKENS:
                return None
        return CpuPlan(parts)

    def serves(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> bool:
        """Whether the kernel reads these tensors, whose shapes are as in `attend`.

        Queries are float32 on a CPU, keys and values float32 or bfloat16, head widths multiples of
        16, and no gradients are wanted.
        """
        e = keys.shape[-1]
        ve = values.shape[-1]
        if query.device.type != "cpu" or e % 16 or ve % 16 or torch.is_grad_enabled():
            return False
        if query.dtype != torch.float32 or keys.dtype not in STORED or values.dtype != keys.dtype:
            return False
        contiguous = query.stride(-1) == keys.stride(-1) == values.stride(-1) == 1
        return contiguous and keys.stride(-2) == e and values.stride(-2) == ve

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        new: tuple[Tensor, Tensor] | None = None,
        **form: Unpack[AttentionForm],
    ) -> Tensor:
        """Stores the new keys and values, if any are given, and attends.

        Args:
            query: [1, heads, N, e]; keys, values: [kv_heads, slots, e], float32 or bfloat16.
            new: keys and values [1, kv_heads, N, e] of the new tokens; None if they are stored
                already.

        Returns:
            [1, N, heads, value_dim].

        Raises:
            TypeError, ValueError: a dtype, shape, stride or device that the kernel does not read;
                see `serves`.
        """
        self._check(query, keys, values, new, form)
        _, heads, n, e = query.shape
        ve = values.shape[-1]
        out = query.new_empty((1, n, heads, ve))
        sinks = form["sinks"]
        if sinks is not None:
            sinks = sinks.float().contiguous()
        # Per new tensor its address, and the strides of heads and of tokens.
        fresh: tuple[int | None, ...] = (None, 0, 0, None, 0, 0)
        if new is not None:
            key, value = new
            if key.stride(-1) != 1:
                key = key.contiguous()
            if value.stride(-1) != 1:
                value = value.contiguous()
            fresh = (
                key.data_ptr(),
                key.stride(1),
                key.stride(2),
                value.data_ptr(),
                value.stride(1),
                value.stride(2),
            )
        built_kernels().tree_attention(
            query.data_ptr(),
            query.stride(1),
            query.stride(2),
            *fresh,
            keys.data_ptr(),
            keys.stride(0),
            values.data_ptr(),
            values.stride(0),
            keys.dtype == torch.bfloat16,
            out.data_ptr(),
            heads,
            len(keys),
            e,
            ve,
            self.address,
            form["scaling"],
            form["window"] or 0,  # 0 stands for none, as below
            form["softcap"] or 0.0,
            None if sinks is None else sinks.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def _check(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        new: tuple[Tensor, Tensor] | None,
        form: AttentionForm,
    ) -> None:
        if query.dim() != 4 or keys.dim() != 3 or values.dim() != 3:
            raise ValueError("query must be [1, heads, N, e], keys and values [kv_heads, slots, e]")
        heads = query.shape[1]
        kv_heads, slots, e = keys.shape
        ve = values.shape[2]
        stored = torch.float32
        if keys.dtype in STORED:
            stored = keys.dtype
        check_form("query", query, (1, heads, self.tokens, e))
        check_form("keys", keys, (kv_heads, slots, e), stored)
        check_form("values", values, (kv_heads, slots, ve), stored)
        if new is not None:
            check_form("new key", new[0], (1, kv_heads, self.tokens, e))
            check_form("new value", new[1], (1, kv_heads, self.tokens, ve))
        if e % 16 or ve % 16 or not kv_heads or not heads or heads % kv_heads:
            raise ValueError(
                f"heads={heads}, kv_heads={kv_heads}, widths {e} and {ve}: widths must be multiples of 16"
            )
        if slots < self.slots:
            raise ValueError(f"keys and values have {slots} slots, must have {self.slots} at least")
        if query.stride(-1) != 1 or keys.stride()[1:] != (e, 1) or values.stride()[1:] != (ve, 1):
            raise ValueError(
                "the last dimension of query, and the last two of keys and values, must be contiguous"
            )
        sinks = form["sinks"]
        negative = (form["window"] or 0) < 0 or (form["softcap"] or 0) < 0
        if negative or (sinks is not None and (sinks.numel() != heads or not sinks.is_cpu)):
            raise ValueError(
                f"window={form['window']}, softcap={form['softcap']} may not be negative; sinks must be [{heads}] on the CPU"
            )


def _in_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: TreeLayout,
    form: AttentionForm,
) -> Tensor:
    """A long chain, _BLOCK rows at a time."""
    window = form["window"]
    repeats = query.shape[1] // key.shape[1]
    parts = []
    for start in range(0, query.shape[2], _BLOCK):
        rows = query[:, :, start : start + _BLOCK]
        count = rows.shape[2]
        begin = layout.prefix_len + start  # slot of the block's first token
        end = begin + count
        if window is None or window >= end:
            # All earlier keys are visible, so the mask is the block's own triangle.
            first = 0
            mask = layout.chain_mask(0, count, None, repeats, query)
        else:
            first = max(0, begin + 1 - window)  # the oldest key that the block's first token sees
            mask = layout.chain_mask(
                begin - first,
                count,
                window,
                repeats,
                query,
            )
        keys = key[:, :, first:end]
        values = value[:, :, first:end]
        parts.append(masked_attention(rows, keys, values, mask, form))
    return torch.cat(parts, dim=2)


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    form: AttentionForm,
) -> Tensor:
    """Attention with the query heads of a group folded into rows; the mask includes the window.

    Args:
        mask: [groups*n, T] additive, over the last T keys; all keys before them are visible.
    """
    b, heads, n, _ = query.shape
    kv_heads = key.shape[1]
    scaling = form["scaling"]
    softcap = form["softcap"]
    sinks = form["sinks"]
    rows = heads // kv_heads * n
    folded = query.reshape(b, kv_heads, rows, -1)
    masked = 0  # keys under the mask
    if mask is not None:
        masked = mask.shape[1]

    # Fused attention, but not with a mask in float32 on a CPU.
    plain = softcap is None and sinks is None
    if plain and (mask is None or query.device.type != "cpu" or query.dtype != torch.float32):
        if mask is not None and masked < key.shape[2]:
            mask = F.pad(mask, (key.shape[2] - masked, 0))
        out = F.scaled_dot_product_attention(
            folded,
            key,
            value,
            attn_mask=mask,
            scale=scaling,
        )
        return out.reshape(b, heads, n, -1)

    # Two matrix products. Scores are [b * kv_heads, groups*n, T].
    queries = folded.flatten(0, 1)
    keys = key.flatten(0, 1).transpose(1, 2)  # [b * kv_heads, e, T]
    # One call for product, scale and mask, unless the product must not be rounded to 16 bits.
    if softcap is None and mask is not None and masked == key.shape[2] and query.dtype.itemsize > 2:
        scores = torch.baddbmm(mask, queries, keys, alpha=scaling)
    else:
        scores = _exact_scores(queries, keys) * scaling
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if mask is not None:
            scores[..., -masked:] += mask
    if sinks is None:
        weights = scores.softmax(dim=-1, dtype=torch.float32)
    else:
        # A sink is one more column of scores, which has no value.
        by_head = sinks.view(kv_heads, -1, 1).expand(-1, -1, n)  # [kv_heads, groups, n]
        by_row = by_head.reshape(kv_heads, rows, 1)
        column = by_row.repeat(b, 1, 1).to(scores.dtype)
        joined = torch.cat((scores, column), dim=-1)
        weights = joined.softmax(dim=-1, dtype=torch.float32)[..., :-1]
    out = torch.bmm(weights.to(value.dtype), value.flatten(0, 1))  # [b * kv_heads, groups*n, e]
    return out.view(b, heads, n, -1)


def _exact_scores(queries: Tensor, keys: Tensor) -> Tensor:
    """Batched products of queries and keys: 16-bit ones with float32 sums, others in their dtype.

    Fused attention sums 16-bit products in float32 too.
    """
    if queries.dtype.itemsize > 2:
        return torch.bmm(queries, keys)
    if queries.is_cuda:  # tensor cores read 16 bits and write 32
        return torch.bmm(queries, keys, out_dtype=torch.float32)
    return torch.bmm(queries.float(), keys.float())
