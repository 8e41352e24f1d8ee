"""A training step without data: the real code on tensors that have shapes and no numbers, to learn
what memory it takes.

    target, drafter    built on torch's meta device      ->   a `_Ghost` per weight
    step               features, forward, backward       ->   every tensor's storage, from its allocation to its release
    result             weights, gradients, optimizer states, and what the step holds at its peak with the line that reached it

Floating-point tensors are meta tensors. Integers (tokens, anchors, rows) have data on the CPU,
because shapes depend on them. A GPU's step runs as it would there: FlexAttention and the fused loss
are stood in for by what they allocate. What the prediction leaves out is the CUDA context, cuBLAS
workspaces and fragmentation: about 1 GB, and a few per cent.

Source: wrapper subclasses, torch.utils._python_dispatch; rounding to 512 bytes, torch's CUDA
caching allocator.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.attention.flex_attention import AuxOutput
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers import PretrainedConfig

from drafttrain.batch import Batch
from drafttrain.losses import divergence, fused, parse_loss
from drafttrain.ops import path_attention
from drafttrain.states.origins import Origin, Row, RowStates
from drafttrain.states.source import NoTarget, TargetSource
from drafttrain.target import Target
from drafttrain.target.parts import build_language_model
from drafttrain.training.muon import matrices_of
from drafttrain.training.step import step_inputs

_BLOCK = 512  # bytes; the CUDA allocator's unit
_aten = torch.ops.aten
_INDEXING = (
    _aten.index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
)
_ghosts: list[_Ghosts] = []  # of the dry step that runs


@dataclass(frozen=True)
class StepMemory:
    """Bytes of a training step by part, without the CUDA context, and what else a plan reads.

    Gradients count in full, although the peak may come before they exist: features, logits and
    activations are what the peak has beyond the other parts.
    """

    target: int  # its weights; of a target without layers, the embedding and the head
    drafter: int
    gradients: int
    features: int  # the target's part of the batch
    logits: int  # tensors as wide as a vocabulary
    activations: int  # what else the step holds at its peak
    at: str  # the line that reached the peak; empty outside drafttrain's own lines
    trained: int  # weights
    flops: float  # of the matrix products and attention of the whole step
    state_width: int  # numbers per token that the drafter reads of the target, last state included
    largest: int = 0  # trained weights of the largest module
    matrices: int = 0  # trained weights that Muon would step

    @property
    def working(self) -> int:
        """What the step holds at its peak beyond weights, gradients and optimizer states."""
        return self.features + self.logits + self.activations


class _Ghost(torch.Tensor):
    """A tensor of the dry step. `data_` is a meta tensor, or a CPU tensor of integers."""

    data_: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, data: Tensor, device: torch.device) -> _Ghost:
        layout = {"dtype": data.dtype, "layout": data.layout, "device": device}
        make: Any = torch.Tensor._make_wrapper_subclass
        made: _Ghost = make(
            cls,
            data.size(),
            data.stride(),
            data.storage_offset(),
            **layout,
        )
        made.data_ = data
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload,
        types: object,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        return _ghosts[-1].run(func, args, kwargs or {})

    def tolist(self) -> Any:
        if self.data_.is_meta:
            return torch.zeros(self.shape).tolist()
        return self.data_.tolist()


class _Ghosts(TorchDispatchMode):
    """Runs operations on ghosts, and counts the bytes of their storages while they are used."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device
        self.now = 0
        self.peak = 0
        self.at = ""
        self.vocabularies: set[int] = set()  # widths of logits
        self.logits = 0
        self.logits_at_peak = 0
        self.flops = 0.0
        self._users: Counter[int] = Counter()  # tensors per storage
        self._wide: dict[int, int] = {}  # bytes of logits per storage

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        return self.run(func, args, kwargs or {})

    def wrap(self, data: Tensor) -> _Ghost:
        """A ghost of new data or of a view.

        Floats lose their numbers; integers without numbers become zeros.
        """
        if data.is_floating_point():
            if not data.is_meta:
                data = data.to("meta")
        elif data.is_meta:
            data = torch.zeros(data.shape, dtype=data.dtype)

        storage = data.untyped_storage()
        key = storage._cdata
        size = -(-storage.nbytes() // _BLOCK) * _BLOCK
        if not self._users[key]:
            self.now += size
            if data.dim() > 1 and data.shape[-1] in self.vocabularies:
                self._wide[key] = size
                self.logits += size
            if self.now > self.peak:
                self.peak = self.now
                self.at = _place()
                self.logits_at_peak = self.logits
        self._users[key] += 1
        # The finalizer holds the storage, so that no other takes its key.
        weakref.finalize(data, self._release, key, size, storage)
        return _Ghost(data, self.device)

    def _release(self, key: int, size: int, storage: torch.UntypedStorage) -> None:
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
            self.now -= size
            self.logits -= self._wide.pop(key, 0)

    def _wrapped(self, out: object) -> Any:
        if isinstance(out, Tensor) and not isinstance(out, _Ghost):
            return self.wrap(out)
        if isinstance(out, list | tuple):
            return type(out)(map(self._wrapped, out))
        return out

    def run(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Runs one operation, on meta tensors where a float takes part, else on the integers."""
        given = _tensors([*args, *kwargs.values()])
        ghosts = [x for x in given if isinstance(x, _Ghost)]
        if not ghosts and (given or kwargs.get("device") is None):
            return func(*args, **kwargs)
        if func is _aten._local_scalar_dense.default:
            if args[0].data_.is_meta:
                return 1.0
            return args[0].data_.item()

        floats = any(x.data_.is_meta for x in ghosts)
        # A factory of floats makes no numbers; arange and full take theirs from the arguments.
        if not given and kwargs.get("dtype") is None:
            floats = func.overloadpacket not in (_aten.arange, _aten.full)
        elif not given:
            floats = kwargs["dtype"].is_floating_point
        plain = [_plain(x) for x in args]
        options = {}
        for name, x in kwargs.items():
            if name not in ("pin_memory", "non_blocking", "device"):
                options[name] = _plain(x)
        if "device" in kwargs:
            options["device"] = torch.device("meta" if floats else "cpu")

        written = []  # places of the arguments that the operation changes
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written.append(place)
        if floats:
            if func in _INDEXING:
                plain[1] = _without_masks(plain[1])
            for place in written:
                x = args[place] if place < len(args) else None
                if isinstance(x, _Ghost) and not x.data_.is_meta:
                    return args[written[0]]  # integers computed from floats: leave them
            plain = _on_meta(plain)
            options = {name: _on_meta(x) for name, x in options.items()}

        count = flop_registry.get(func.overloadpacket)
        if func is _aten._grouped_mm.default:
            # The experts' product; its meta kernel takes bfloat16 alone.
            narrow = [x.bfloat16() for x in plain[:2]]
            out = func(*narrow, *plain[2:], **options).to(plain[0].dtype)
            count = _grouped_flops
        else:
            out = func(*plain, **options)
        if floats and count is not None:
            self.flops += count(*plain, **options, out_val=out)
        if not written:
            return self._wrapped(out)

        # An operation in place returns what it changed.
        return args[written[0]]

    def take(self, module: nn.Module) -> int:
        """Makes a module's weights ghosts; returns their bytes."""
        before = self.now
        known: dict[int, nn.Parameter] = {}  # tied weights stay one
        for each in module.modules():
            for name, weight in each._parameters.items():
                if weight is None or isinstance(weight, _Ghost):
                    continue
                if id(weight) not in known:
                    ghost = self.wrap(weight.detach())
                    known[id(weight)] = nn.Parameter(ghost, weight.requires_grad)
                each._parameters[name] = known[id(weight)]
            for name, buffer in each._buffers.items():
                if buffer is not None and not isinstance(buffer, _Ghost):
                    each._buffers[name] = self.wrap(buffer)
        return self.now - before


@dataclass(frozen=True)
class StepSetting:
    """How a dry step runs."""

    rows: int = 1  # of a batch
    length: int = 4096  # tokens of a row
    prompt: int = 128  # tokens of each row that are not learned
    gpu: bool = True  # with the kernels of a GPU; False for those of a CPU
    target_dtype: torch.dtype = torch.bfloat16
    drafter_dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = torch.bfloat16  # of the drafter's products; None: its weights'
    checkpointing: bool = False  # activations of a depth are computed again in backward
    # The target runs in the step; its states come from a disk or a server, and it has no layers
    # here; or it is not read (loss=next_token).
    source: Literal["online", "states", "none"] = "online"
    accumulates: bool = False  # gradients of earlier micro-batches exist when the step begins
    trains: bool = True  # False for an evaluation: no gradients are computed
    keeps: bool = False  # states are kept between epochs, in bfloat16


def dry_step(
    config: PretrainedConfig,
    setting: StepSetting,
    loss: str,
    build: Callable[[Target], Any],
) -> StepMemory:
    """The memory of one training step.

    Args:
        config: the target's.
        build: makes the drafter of the target, on the meta device.
    """
    with torch.device("meta"):
        model = build_language_model(config, dtype=setting.target_dtype)
        model.eval().requires_grad_(False)
        target = Target.wrap(model, None, name=config.model_type, dtype=setting.target_dtype)
        drafter = build(target)
        drafter.to(setting.drafter_dtype).train(setting.trains)

    with _prepared(setting.gpu) as ghosts:
        # Weights.
        if setting.source == "online":
            weights = ghosts.take(model)
        else:
            weights = ghosts.take(model.get_input_embeddings())
            weights += ghosts.take(model.get_output_embeddings())
        own = ghosts.take(drafter)
        drafter.kept_ids = ghosts.wrap(torch.arange(len(drafter.kept_ids)))
        if setting.checkpointing:
            drafter.gradient_checkpointing_enable()

        with ghosts:
            drafter.bind(target)
            rows = setting.rows
            length = setting.length
            prompt = min(setting.prompt, length - 2)  # something is learned of short rows too
            ids = ghosts.wrap(torch.randint(0, target.vocab_size, (rows, length)))
            lengths = ghosts.wrap(torch.full((rows,), length))
            mask = ghosts.wrap((torch.arange(length) >= prompt).repeat(rows, 1))
            batch = Batch(ids, lengths, mask, ghosts.wrap(torch.arange(rows)))
            trained = [x for x in drafter.parameters() if x.requires_grad]
            held = ghosts.now
            ghosts.peak = ghosts.now
            # Else states would count.
            ghosts.vocabularies = {target.vocab_size, len(drafter.kept_ids)} - {target.hidden_size}
            if setting.accumulates:
                for weight in trained:
                    weight.grad = torch.empty_like(weight)
            given: NoTarget | TargetSource = NoTarget()
            if setting.source != "none":
                given = _source(target, drafter, loss, setting)
            total = ghosts.wrap(torch.tensor(rows * length))

            # Forward. Nothing here may hold a tensor longer than the trainer does.
            before = ghosts.now
            with (
                torch.autocast("cpu", setting.autocast, enabled=setting.autocast is not None),
                torch.set_grad_enabled(setting.trains),
            ):
                inputs = step_inputs(batch, target, given, total, measure=True)
                read = ghosts.now - before
                step = drafter(inputs)
            del inputs

            # Backward, after autocast is left, as in the trainer. The engine gets a graph edge: a
            # call with a tensor would leave `_GpuKernels`.
            if setting.trains:
                edge = torch.autograd.graph.get_gradient_edge(step.loss)
                torch.autograd.backward(edge, torch.ones_like(step.loss))

        gradients = sum(x.grad.nbytes for x in trained if x.grad is not None)
        count = sum(x.numel() for x in trained)
        matrices = matrices_of(drafter)
        beyond = max(0, ghosts.peak - held - gradients)
        logits = min(ghosts.logits_at_peak, beyond)
        read = min(read, beyond - logits)
        return StepMemory(
            target=weights,
            drafter=own,
            gradients=gradients,
            features=read,
            logits=logits,
            activations=beyond - logits - read,
            at=ghosts.at,
            trained=count,
            flops=ghosts.flops,
            state_width=(len(drafter.feature_layers) + 1) * target.hidden_size,
            largest=_largest_module(drafter),
            matrices=sum(x.numel() for x in matrices),
        )


def _largest_module(drafter: nn.Module) -> int:
    """Trained weights of the module that has the most of its own."""
    counts = []
    for module in drafter.modules():
        own = module.parameters(recurse=False)
        counts.append(sum(x.numel() for x in own if x.requires_grad))
    return max(counts)


@contextmanager
def _prepared(gpu: bool) -> Iterator[_Ghosts]:
    """Lets code inside run on ghosts, as on this kind of device."""
    with ExitStack() as open_:
        if gpu:
            open_.enter_context(_GpuKernels())
        # torch.tensor(..., device=...) first makes a CPU tensor.
        before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        open_.callback(torch._C._set_only_lift_cpu_tensors, before)
        _ghosts.append(_Ghosts(torch.device("cpu")))  # autocast knows no meta tensors
        open_.callback(_ghosts.pop)
        yield _ghosts[-1]


class _GivenStates(Origin):
    """States of every conversation, which are there without being read."""

    name = "stored"

    def __init__(self, width: int, hidden: int):
        self.width = width
        self.hidden = hidden

    def states(self, rows: Sequence[Row]) -> list[RowStates | None]:
        found: list[RowStates | None] = []
        for row in rows:
            length = len(row.tokens)
            features = torch.empty(length, self.width, dtype=torch.bfloat16, device="cpu")
            last = torch.empty(length, self.hidden, dtype=torch.bfloat16, device="cpu")
            found.append(row.cut(RowStates(features, last)))
        return found


def _source(
    target: Target,
    drafter: Any,
    loss: str,
    setting: StepSetting,
) -> TargetSource:
    origin = None
    if setting.source == "states":
        width = len(drafter.feature_layers) * target.hidden_size
        origin = _GivenStates(width, target.hidden_size)
    source = TargetSource(
        target,
        drafter.feature_layers,
        drafter.kept_ids,
        origin,
        limit_bytes=float(setting.keeps),
        temperatures=parse_loss(loss).temperatures,
    )
    if setting.gpu:
        source.online.together = None
    return source


class _FusedNorm(torch.autograd.Function):
    """What torch's fused RMS norm keeps: its input and a float32 per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight, _ = ctx.saved_tensors
        if weight is None:
            return torch.empty_like(x), None
        return torch.empty_like(x), torch.empty_like(weight)


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *_: object,
    **__: object,
) -> Tensor:
    # Only a draft model's attention is differentiated; the target has no backward.
    if torch.is_grad_enabled() and query.requires_grad:
        out: Tensor = _Flex.apply(query, key, value)[0]
        return out
    query.new_empty(query.shape[:-1], dtype=torch.float32)  # log-sum-exps, released at once
    _count_attention(query, key, 2)
    return query.new_empty(*query.shape[:-1], value.shape[-1])


class _Flex(torch.autograd.Function):
    """What FlexAttention keeps: its inputs, outputs and log-sum-exps."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(query)
        lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, lse)
        _count_attention(query, key, 2)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        query, key, value, _, lse = ctx.saved_tensors
        torch.empty_like(lse)  # sums of out * grad
        _count_attention(query, key, 5)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _grouped_flops(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """Operations of rows [t, k] by experts [n, k, m], or of either product of its backward."""
    if a.dim() > b.dim():
        return 2 * a.shape[1] * b.numel()
    return 2 * a.numel() * b.shape[-1]


def _count_attention(query: Tensor, key: Tensor, products: int) -> None:
    """Counts `products` products of every query [..., n, e] with half of the keys [..., m, e]."""
    _ghosts[-1].flops += products * query.numel() * key.shape[-2]


def _attend(
    own: Any,
    spans: Any,
    query: Tensor,
    base: tuple[Tensor, Tensor],
    tensors: Any,
) -> Tensor:
    if not len(query):
        return query
    query, base, tensors = path_attention.narrowed(query, base, tensors)
    out, lse = path_attention.span_attention_gpu(query, *base, spans, _flex)
    return own.merge(query, out, lse, tensors, flash=False)[0]


def _flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    **options: object,
) -> tuple[Tensor, AuxOutput]:
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query = query.to(dtype)
        key = key.to(dtype)
        value = value.to(dtype)
    out, lse = _Flex.apply(query, key, value)
    return out, AuxOutput(lse=lse)


def _rms_norm(
    x: Tensor,
    shape: object,
    weight: Tensor | None = None,
    eps: object = None,
) -> Tensor:
    out: Tensor = _FusedNorm.apply(x, weight)
    return out


_STAND_INS: dict[object, Callable[..., object]] = {
    divergence.has_kernel: lambda hidden: True,
    fused.launch_rows: lambda *args, **options: None,
    path_attention.attend_spans: _attend,
    F.scaled_dot_product_attention: _flash,
    F.rms_norm: _rms_norm,
}


class _GpuKernels(TorchFunctionMode):
    """Functions that a GPU runs by kernels allocate here what those kernels do."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        return _STAND_INS.get(func, func)(*args, **(kwargs or {}))


def _tensors(values: Iterable[object]) -> list[Tensor]:
    """The tensors among values and their lists."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


def _without_masks(indices: Iterable[object]) -> list[object]:
    """Indices with the places of a mask's true elements, which are as many as its numbers say."""
    found: list[object] = []
    for index in indices:
        if isinstance(index, Tensor) and index.dtype == torch.bool and not index.is_meta:
            found += index.nonzero().unbind(1)
        else:
            found.append(index)
    return found


def _plain(x: object) -> Any:
    if isinstance(x, list | tuple):
        return [_plain(each) for each in x]
    if isinstance(x, _Ghost):
        return x.data_
    return x


def _on_meta(x: object) -> Any:
    if isinstance(x, list | tuple):
        return [_on_meta(each) for each in x]
    if isinstance(x, Tensor) and not x.is_meta:
        return x.to("meta")
    return x


def _place() -> str:
    """The innermost line of drafttrain that runs, outside this file."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if "drafttrain" in name and name != __file__ and "site-packages" not in name:
            return f"{name.rpartition('drafttrain/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
