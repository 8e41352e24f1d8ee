"""Bounds on what a chat template computes.

A template is a program from the target's folder: its loops, products and paddings could take any time
and memory. So each rendering has an allowance, from which operations are paid before they are done.
The unit is a character; an item of a list costs ten, a call fifty.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Any

from jinja2 import nodes, pass_context
from jinja2.visitor import NodeTransformer

if TYPE_CHECKING:
    from jinja2 import Environment, Template
    from jinja2.runtime import Context

_LEAST = 5_000_000  # the allowance of a rendering with small inputs
_MOST = 1_000_000_000
_PASSES = 1000  # over the inputs
_STEP = 10
_CALL = 50
_PAID = "paid "  # a filter's name, which no template can write


class _Allowance(threading.local):
    """What the thread's rendering may still spend; None outside of one."""

    left: int | None = None


_allowance = _Allowance()


def _spend(amount: int) -> None:
    if _allowance.left is None:
        return
    _allowance.left -= amount
    if _allowance.left < 0:
        raise OverflowError("it computes too much for its inputs")


def _size(value: object) -> int:
    """Pays for a value, with all that it holds; returns its size."""
    if isinstance(value, str):  # nearly always
        size = _STEP + len(value)
        _spend(size)
        return size
    size = 0
    waiting = [value]
    while waiting:
        one = waiting.pop()
        amount = _STEP
        if isinstance(one, (str, bytes)):
            amount += len(one)
        elif isinstance(one, int):
            # A number may have millions of digits.
            amount += one.bit_length() // 8
        elif isinstance(one, dict):
            waiting += [*one, *one.values()]
        elif isinstance(one, (list, tuple, set)):
            waiting += one
        _spend(amount)
        size += amount
    return size


def _pay(subject: object, values: Iterable[object], form: bool = False) -> None:
    """Pays for an operation that may put a value beside each character or item of its subject, or
    as many characters as a number says.

    Args:
        form: the subject is a format, in which numbers are widths.
    """
    numbers = [1]
    for value in values:
        parts = [value]
        if isinstance(value, tuple):
            parts = [*value]
        for part in parts:
            if isinstance(part, int):
                numbers.append(abs(part))
            else:
                numbers.append(_size(part))
    if form:
        numbers += map(int, re.findall(r"\d{1,12}", str(subject)))
    _spend(_size(subject) * max(numbers))


@pass_context  # so that it is not computed when the template is compiled
def _paid(_: Context, value: object) -> object:
    _size(value)
    return value


def _filter(plain: Callable[..., object]) -> Callable[..., object]:
    """A filter that is paid for."""
    first = int(hasattr(plain, "jinja_pass_arg"))  # some get a context before the subject

    @functools.wraps(plain)
    def paid(*args: object, **kwargs: object) -> object:
        # An iterator could be read only once, and is read here to be paid for.
        values = [list(value) if isinstance(value, Iterator) else value for value in args]
        options = [*values[first + 1 :], *kwargs.values()]
        _pay(values[first], options, plain.__name__ == "do_format")
        result = plain(*values, **kwargs)
        _size(result)
        return result

    return paid


class _Payments(NodeTransformer):
    """Wraps what the sandbox has no hook for: texts that are joined, lists and what is compared."""

    def generic_visit(self, node: nodes.Node) -> nodes.Node:  # type: ignore[override]
        super().generic_visit(node)
        if isinstance(node, nodes.Output | nodes.Concat):
            node.nodes = [_through(one) for one in node.nodes]
        elif isinstance(node, nodes.For):
            node.iter = _through(node.iter)
        elif isinstance(node, nodes.Operand):
            node.expr = _through(node.expr)
        # A slice copies; an item does not.
        sliced = isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        if sliced or isinstance(node, nodes.List | nodes.Dict):
            return _through(node)
        if isinstance(node, nodes.Tuple) and node.ctx == "load":  # not names of an assignment
            return _through(node)
        return node


def _through(node: nodes.Node) -> nodes.Filter:
    return nodes.Filter(node, _PAID, [], [], None, None, lineno=node.lineno)


@functools.cache
def environment() -> Environment:
    """The environment in which transformers renders templates, with operations that are paid for."""
    plain: Any = _own_compiler()("").environment  # a SandboxedEnvironment
    made = plain.overlay()

    def call(
        context: Context,
        function: object,
        /,
        *args: object,
        **kwargs: object,
    ) -> object:
        _spend(_CALL)
        values = [*args, *kwargs.values()]
        method = getattr(function, "__wrapped__", function)  # of the sandbox's str.format
        if isinstance(method, BuiltinFunctionType):
            _pay(method.__self__, values, method.__name__.startswith("format"))
        else:
            _size(values)
        result = plain.call(context, function, *args, **kwargs)
        _size(result)
        return result

    def product(_: Context, sign: str, left: object, right: object) -> object:
        # A sum is as long as both sides; `*` repeats one, `%` pads to widths, `**` grows a number.
        if sign == "+":
            _size(left)
            _size(right)
        else:
            _pay(left, [right], sign == "%")
            if sign == "*":
                _pay(right, [left])
        return plain.binop_table[sign](left, right)

    def bounded_range(*bounds: int) -> range:
        found = range(*bounds)
        _spend(_STEP * len(found))
        return found

    made.call = call
    made.call_binop = product
    made.intercepted_binops = frozenset(("*", "**", "%", "+"))
    made.filters = {name: _filter(one) for name, one in plain.filters.items()}
    made.filters[_PAID] = _paid
    made.globals = {**plain.globals, "range": bounded_range}
    # It writes placeholder text of any length.
    del made.globals["lipsum"]
    return made  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=64)
def _compiled(template: str) -> Template:
    made = environment()
    return made.from_string(_Payments().visit(made.parse(template)).set_environment(made))


@functools.cache
def _own_compiler() -> Callable[[str], Template]:
    """transformers' compiler of templates, which compiles those of our renderings here from now on."""
    from transformers.utils import chat_template_utils

    plain = chat_template_utils._compile_jinja_template

    def compiled(template: str) -> Template:
        if _allowance.left is None:  # a rendering of somebody else
            return plain(template)
        return _compiled(template)

    chat_template_utils._compile_jinja_template = compiled  # type: ignore[assignment]
    return plain


@contextmanager
def bounded(*inputs: object) -> Iterator[None]:
    """Within it, the thread's `apply_chat_template` may compute what fits its inputs' size.

    Beyond that, it raises OverflowError.
    """
    environment()
    # Measuring the inputs is not charged.
    _allowance.left = None
    _allowance.left = min(_LEAST + _PASSES * _size(inputs), _MOST)
    try:
        yield
    finally:
        _allowance.left = None
