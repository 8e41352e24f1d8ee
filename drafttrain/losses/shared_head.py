"""A head that several depths of a step read: products with it, and the one sum of its gradients.

    linear_divergence(read_0, head, ...).loss  \\
    linear_divergence(read_1, head, ...).loss   +  head.term()   -> one [d, h] gradient, whatever the number of depths
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# Numbers of a head of another dtype that are converted at a time on a GPU: 128 MB in float32.
_CONVERTED = 2**25


class SharedHead:
    """A head's weight, and the gradient that each call of `linear_divergence` adds to in place.

    Args:
        weight: [d, h], trainable or frozen.
    """

    def __init__(self, weight: Tensor):
        self.weight = weight
        self._converted = weight.detach()
        self._gradient: Tensor | None = None  # [d, h], sum of all calls so far
        if weight.requires_grad and torch.is_grad_enabled():
            dtype = weight.dtype
            if dtype == torch.float16:
                dtype = torch.float32  # so that a loss scale fits
            self._gradient = torch.zeros_like(weight, dtype=dtype)

    def weight_for(self, rows: Tensor) -> Tensor:
        """[d, h] for products with these rows, in their dtype.

        On a GPU a weight narrower than the rows stays narrow: `products` converts it in parts.
        """
        wider = rows.dtype.itemsize > self.weight.dtype.itemsize
        by_parts = wider and rows.device.type != "cpu"
        if self._converted.dtype != rows.dtype and not by_parts:
            self._converted = self.weight.detach().to(rows.dtype)  # once for all depths
        return self._converted

    def add(self, grad: Tensor, rows: Tensor, size: Tensor) -> None:
        """Adds the gradient of a chunk: grad [c, d] of its logits, rows [c, h].

        size: factor of a float16 gradient; 1 for others.
        """
        total = self._gradient
        if total is not None and total.dtype == grad.dtype:
            total.addmm_(grad.t(), rows)
        elif total is not None:
            for part in _parts(total):  # in the rows' dtype, as autocast multiplies
                into = total[part]  # a view: `total[part] += x` would also copy the sum onto itself
                made = grad[:, part].t() @ rows
                if grad.dtype == torch.float16:
                    made = made.float() * size
                into += made

    def term(self) -> Tensor:
        """A zero that carries the weight's gradient, with the same factor as the calls' losses."""
        if self._gradient is None:
            return self.weight.new_zeros(())
        return _Gradient.apply(self.weight, self._gradient)


class _Gradient(torch.autograd.Function):
    """Zero, whose gradient in the weight is a given matrix."""

    @staticmethod
    def forward(
        ctx,
        weight: Tensor,
        gradient: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(gradient)
        return gradient.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return ctx.saved_tensors[0] * grad, None  # autograd converts it to the weight's dtype


def _parts(weight: Tensor) -> Iterator[slice]:
    """Rows of a weight [d, h] that are converted at a time."""
    rows = max(1, _CONVERTED // weight.shape[1])
    for begin in range(0, len(weight), rows):
        yield slice(begin, begin + rows)


def products(rows: Tensor, weight: Tensor) -> Tensor:
    """[c, h] rows and [d, h] weight -> [c, d] logits in the rows' dtype.

    A weight of another dtype is converted part by part.
    """
    if weight.dtype == rows.dtype:
        return F.linear(rows, weight)
    out = rows.new_empty(len(rows), len(weight))
    for part in _parts(weight):
        out[:, part] = F.linear(rows, weight[part].to(rows.dtype))
    return out


def products_backward(grad: Tensor, weight: Tensor) -> Tensor:
    """[c, d] gradient of the logits and [d, h] weight -> [c, h], the rows' gradient."""
    if weight.dtype == grad.dtype:
        return grad @ weight
    out = grad.new_zeros(len(grad), weight.shape[1])
    for part in _parts(weight):
        out.addmm_(grad[:, part], weight[part].to(grad.dtype))
    return out
