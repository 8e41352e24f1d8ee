"""A target without its layers, for training on stored states and for formats.

A shell has the target's config, tokenizer and identity and, on request, the weights around its
layers: input embedding, final norm and head. They are read from just the files that hold them, so
the layers' files need not be there.

No family is named here. The model is built on the meta device, and its own forward shows what lies
behind the layers:

    the body's forward, each layer returning `states`     states -> final norm -> last_hidden_state  the module between them
    the model's forward, its body returning `states`      states -> head, scale, cap -> logits       the factor on products
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel
from transformers.core_model_loading import (
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig

from drafttrain.batch import TargetOutput
from drafttrain.errors import UserError
from drafttrain.files import open_tensors
from drafttrain.target.attention import MASKLESS
from drafttrain.target.devices import resolve_device, resolve_dtype
from drafttrain.target.generation import read_generation_config
from drafttrain.target.loading import (
    check_finite,
    check_sizes,
    loading,
    model_config,
    tensor_files,
    text_part,
    weights_folder,
)
from drafttrain.target.own_layer import weight_rules
from drafttrain.target.parts import build_language_model, image_class
from drafttrain.target.proof import (
    LOGITS,
    LOGITS_HALF,
    by_precision,
    described,
    find_scale,
    unsupported,
)
from drafttrain.target.sight import Sight
from drafttrain.target.target import Target, Tokenizer, resolve_target

_FIX = "give a folder with config.json, safetensors and tokenizer, or a Hub id"
_TOKENS = 4  # of the forwards that show what is behind the layers


def load_shell(
    name: str,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    weights: bool = False,
) -> TargetShell:
    """A target without its layers.

    Args:
        weights: read embedding, final norm and head, in this dtype and to this device; of a Hub id
            only their files are downloaded. Without, all weights are on the meta device.

    Raises:
        UserError: no config or tokenizer can be loaded by that name; the weights are missing,
            quantized, of another shape or not finite; or the model's forward does not show its
            final norm or how it computes logits.
    """
    path = resolve_target(name)
    what = f"target={name!r}"
    options: dict[str, torch.dtype] = {}  # without a dtype, the config's
    if weights:
        options["dtype"] = resolve_dtype(dtype, resolve_device(device))
    generation = read_generation_config(path, name)
    with loading(f"{what}: config and tokenizer", _FIX):
        whole = model_config(path, trust_remote_code)
        config = text_part(whole)
        check_sizes(config, "", what, _FIX)
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            model = build_language_model(config, trust_remote_code=trust_remote_code, **options)
    # Many targets have none; config and tokenizer name the end of sequence too.
    if generation is not None:
        model.generation_config = generation
    model.eval().requires_grad_(False)
    shell = TargetShell(model, tokenizer, name, path, model.dtype)
    if image_class(whole) is not None:
        shell.sight = Sight(shell)  # for its processor
        shell.sight.trust_remote_code = trust_remote_code
    shell._choose_path(packed_only=False)
    if weights:
        shell.read_weights(resolve_device(device))
    return shell


class TargetShell(Target):
    """A target whose layers have no weights: it embeds, norms and computes logits, but does not run.

    Attributes:
        norm: the final norm; an identity where the model has none, None before `read_weights`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        name: str,
        path: str,
        dtype: torch.dtype,
    ):
        super().__init__(model, tokenizer, name, path, dtype)
        self.norm: nn.Module | None = None

    @property
    def device(self) -> torch.device:
        return self.embed_weight.device

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.embed_weight.dtype

    @torch.no_grad()
    def final_norm(self, states: Tensor) -> Tensor:
        """The last layer's output [..., h] (feature layer num_layers) -> the head's input [..., h]."""
        assert self.norm is not None, "a shell with weights"
        return self.norm(states)

    def forward(self, *_: object, **__: object) -> TargetOutput:
        """Raises UserError: there are no layers to run."""
        self.require_layers()

    def pack(self, keep_dtype: bool = False) -> Target:
        """Raises UserError, as every way of running the target does."""
        self.require_layers()

    def last_layers(self, count: int) -> Sequence[nn.Module]:
        """Reads the last layers without experts, which are never copied.

        Prints a note and returns none if their files are missing or quantized.
        """
        kept = len(self.layers) - min(count, self.num_layers)
        blank = copy.deepcopy(self.layers[kept:])  # layers without weights, put back below
        parts = []
        for layer in self.layers[kept:]:
            for name, part in layer.named_modules():
                if part._parameters and ".experts" not in f".{name}":
                    parts.append(part)
        try:
            if getattr(self.config, "quantization_config", None) is not None:
                raise UserError("they are quantized")
            with loading(f"target={self.name!r}", _FIX):
                _read(self, parts, self.device)
            return list(self.layers[kept:])
        except UserError as error:
            print(
                f"note: nothing is copied from the layers of target {self.name!r}: {error}",
                flush=True,
            )
            return []
        finally:
            for number, layer in enumerate(blank, kept):  # their memory is freed with the copies
                self.layers[number] = layer

    def require_layers(self) -> NoReturn:
        raise UserError(
            f"target={self.name!r} was loaded without its layers, so it can neither compute states nor decode; load the whole "
            "target for that"
        )

    # -- weights -----------------------------------------------------------------------------------

    @torch.no_grad()
    def read_weights(self, place: torch.device) -> None:
        """Reads embedding, final norm and head to a device; finds the factor on the products."""
        norm, output = self._find_norm()
        project_in = getattr(self.body, "project_in", None)
        embedding = self.model.get_input_embeddings()
        parts = (embedding, self.lm_head, norm, self._project_out, project_in)
        with loading(f"target={self.name!r}", _FIX):
            _read(self, parts, place)
        self.model.requires_grad_(False)
        self.norm = norm

        # The model's own head over given states shows the factor.
        generator = torch.Generator().manual_seed(0)
        states = torch.randn(1, _TOKENS, self.hidden_size, generator=generator)
        states = states.to(place, self.compute_dtype)
        if self._project_out is None:
            output.last_hidden_state = states
        else:
            output.last_hidden_state = self._project_out(states)
        ids = torch.zeros(1, _TOKENS, dtype=torch.long, device=place)
        try:
            with _answering([self.body], output):
                own = self.model(input_ids=ids, use_cache=False).logits.float()  # [1, _TOKENS, v]
        except Exception as error:
            fault = f"does not show its head ({described(error)}); load the whole target"
            raise unsupported(self, fault) from error
        self.logit_scale, off = find_scale(self, states, own)
        if not off <= by_precision(self, LOGITS, LOGITS_HALF):
            raise unsupported(
                self,
                f"transforms its logits in an unknown way (relative error of ours {off:.2g})",
            )

    def _find_norm(self) -> tuple[nn.Module, Any]:
        """The module between the last layer and the body's result, and that result, on meta.

        The module is an identity if there is none.
        """
        states = torch.empty(
            1,
            _TOKENS,
            self.hidden_size,
            device="meta",
            dtype=self.dtype,
        )
        ids = torch.zeros(1, _TOKENS, dtype=torch.long, device="meta")
        self.model.set_attn_implementation(MASKLESS)
        reason = ""
        mask = {"attention_mask": torch.ones(1, _TOKENS, device="meta")}
        # Families differ in what their layers return, and some look for padding in the ids where no
        # mask is given.
        answers = (states, (states,), (states, None), (states, None, None))
        for answer, more in itertools.product(answers, ({}, mask)):
            try:
                with _answering(self.layers, answer), self._calls() as calls:
                    output = self.body(
                        input_ids=ids,
                        use_cache=False,
                        **more,
                    )
                between = _path(calls, states, output.last_hidden_state)
            except Exception as error:  # code of other libraries, around stand-ins for its layers
                if not reason:
                    reason = described(error)
                continue
            if between is not None:
                if self._project_out in between:
                    between.remove(self._project_out)
                if not between:
                    return nn.Identity(), output
                if len(between) == 1:
                    return between[0], output
            reason = "the body's result is not one norm of the last layer's"
        raise unsupported(
            self,
            f"does not show its final norm ({reason}); load the whole target",
        )

    @contextlib.contextmanager
    def _calls(self) -> Iterator[list[tuple[nn.Module, Any, Any]]]:
        """Collects module, inputs and output of every call of a module outside the layers."""
        calls: list[tuple[nn.Module, Any, Any]] = []

        def called(module, args, output):
            if args:
                calls.append((module, args, output))

        inside = {id(module) for module in self.layers.modules()}
        inside.add(id(self.body))
        hooks = []
        for module in self.body.modules():
            if id(module) not in inside:
                hooks.append(module.register_forward_hook(called))
        try:
            yield calls
        finally:
            for hook in hooks:
                hook.remove()


def _path(
    calls: Sequence[tuple[nn.Module, Any, Any]],
    begin: Tensor,
    end: Tensor,
) -> list[nn.Module] | None:
    """The modules that made the tensor `end` of `begin`, in order.

    None if plain operations contributed.
    """
    found: list[nn.Module] = []
    state = begin
    for module, args, output in calls:
        if args[0] is state or getattr(args[0], "_base", None) is state:  # the tensor or a view
            found.append(module)
            state = output
    if end is state or end._base is state:
        return found
    return None


@contextlib.contextmanager
def _answering(
    modules: Sequence[nn.Module] | nn.ModuleList,
    answer: object,
) -> Iterator[None]:
    """While active, these modules return `answer` instead of computing anything."""
    for module in modules:
        module.forward = lambda *_args, **_kwargs: answer
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def _read(
    shell: TargetShell,
    modules: Iterable[nn.Module | None],
    place: torch.device,
) -> None:
    """Loads the weights of those modules that are the model's, as transformers loads models."""
    model = shell.model
    wanted_ids = {id(module) for module in modules}
    parts = {name: part for name, part in model.named_modules() if id(part) in wanted_ids}
    where = shell.path
    what = f"target={shell.name!r}"
    # Buffers that a class computes (Gemma's embedding scale), while its weights are on meta.
    for module in parts.values():
        if module._buffers:
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[key] = torch.empty_like(buffer, device=place)
            model._init_weights(module)

    # The files that hold the wanted tensors.
    shapes = model.state_dict()
    wanted = set()
    for part_name, module in parts.items():
        wanted |= {f"{part_name}.{key}" for key in module.state_dict()}
    mapping, renamed, converted = weight_rules(model)
    sources: dict[str, dict[str, str]] = defaultdict(dict)  # file -> its tensors -> their own names

    def placed(key: str) -> str:
        """The parameter that a tensor of the files becomes."""
        return rename_source_key(key, renamed, converted, model.base_model_prefix, shapes)[0]

    for key, file in tensor_files(where).items():
        own = key
        name = placed(key)
        if name not in shapes:
            # Files of a model that reads images too put a word before the text's names.
            own = key.removeprefix("language_model.")
            name = placed(own)
        if name in wanted or (name not in shapes and own in wanted):
            sources[file][key] = own
    folder = weights_folder(where, sources)

    with contextlib.ExitStack() as opened:
        slices: dict[str, Any] = {}
        for file, keys in sources.items():
            if not (folder / file).is_file():
                raise UserError(
                    f"{what}: {file}, which holds {next(iter(keys))}, is not there; download it again"
                )
            tensors = opened.enter_context(
                open_tensors(folder / file, "target", "download it again")
            )
            for key, own in keys.items():
                slices[own] = tensors.get_slice(key)
        for key, part in slices.items():
            kind = part.get_dtype()
            if kind not in ("F64", "F32", "F16", "BF16"):
                raise UserError(f"{what}: {key} is quantized ({kind}); load the whole target")
        config = LoadStateDictConfig(
            device_map={"": place},
            dtype=shell.dtype,
            dtype_plan=model._get_dtype_plan(shell.dtype),
            weight_mapping=mapping,
        )
        info, _ = convert_and_load_state_dict_in_model(model, slices, config)
    model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
    shell.lm_head = model.get_output_embeddings()

    loaded = [(name, value) for name, value in model.state_dict().items() if name in wanted]
    wrong = {name for name, value in loaded if value.device.type == "meta"}
    wrong |= {str(entry[0]) for entry in info.mismatched_keys}
    wrong |= set(info.conversion_errors)
    if wrong:
        first = sorted(wrong)[:3]
        raise UserError(
            f"{what}: its files do not hold {', '.join(first)} as config.json describes; {_FIX}"
        )
    check_finite(loaded, what, _FIX)
