"""A model that belongs to others, such as a policy in training, as a target for a while.

`Target.wrap` keeps a model: it freezes it, has it attend through our interface and hooks its
layers. Here all of that is taken back. The weights are read where they are and never written.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from drafttrain.errors import UserError
from drafttrain.ops.packing import cpu_has_bfloat16
from drafttrain.target.parts import find_body
from drafttrain.target.target import Target, Tokenizer


@contextlib.contextmanager
def borrowed(policy: nn.Module, tokenizer: Tokenizer) -> Iterator[Target]:
    """A target of a model as it is now, which is then left as it was found.

    Training mode and `requires_grad` of every part, attention, experts and hooks are put back.

    Args:
        policy: a transformers model, also wrapped by PEFT or DDP.

    Raises:
        UserError: as `Target.wrap` and `inner_model`; bfloat16 on a CPU that does not multiply it.
    """
    model = inner_model(policy)
    # `Target.wrap` would turn the weights themselves into float32.
    if model.dtype == torch.bfloat16 and model.device.type == "cpu" and not cpu_has_bfloat16():
        raise UserError(
            "policy has bfloat16 weights, which this CPU cannot multiply; train it in float32"
        )
    name = model.name_or_path or type(model).__name__
    modes = [(module, module.training) for module in model.modules()]
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    body = find_body(model)
    attention = body.config._attn_implementation
    experts = model.config._experts_implementation
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    target: Target | None = None
    try:
        target = Target.wrap(model, tokenizer, name, name)
        yield target
    finally:
        if target is not None:
            target.release_steps()
            for hook in target.hooks:
                hook.remove()
        if body.config._attn_implementation != attention:
            body.set_attn_implementation(attention)
        if model.config._experts_implementation != experts:
            model.config._experts_implementation = experts
        torch.backends.cuda.enable_cudnn_sdp(cudnn)  # a setting of the whole process
        for weight in trained:  # not all: quantized ones can have no gradient
            weight.requires_grad_(True)
        for module, mode in modes:
            module.training = mode


@contextlib.contextmanager
def decoding(policy: nn.Module, tokenizer: Tokenizer) -> Iterator[Target]:
    """A target that decodes as the policy is now.

    On a CPU it is a packed copy, with adapters merged: three times the policy's memory, for passes
    that take a fraction of the time. Elsewhere it is `borrowed`.
    """
    model = inner_model(policy)
    if model.device.type != "cpu":
        with borrowed(policy, tokenizer) as target:
            yield target
        return
    # Packing replaces layers, and merging changes weights: both only in a copy.
    copied = copy.deepcopy(policy)
    if callable(getattr(copied, "merge_and_unload", None)):  # PEFT's
        copied = copied.merge_and_unload()  # type: ignore[operator]
    yield Target.wrap(inner_model(copied), tokenizer, type(model).__name__).pack()


def inner_model(policy: nn.Module) -> PreTrainedModel:
    """The transformers model in what PEFT, DDP or torch.compile wrap.

    Raises:
        UserError: none, or one whose weights here are not all of what computes its logits.
    """
    model = next((part for part in policy.modules() if isinstance(part, PreTrainedModel)), None)
    if model is None:
        raise UserError(
            f"policy is a {type(policy).__name__} without a transformers model; give the model"
        )
    # A value head, or the virtual tokens of prompt tuning, which the model alone does not see.
    own = {id(weight) for weight in model.parameters()}
    for name, weight in policy.named_parameters():
        # DeepSpeed's ZeRO-3 leaves empty weights behind, FSDP sharded ones.
        if weight.is_meta or not weight.numel() or isinstance(weight, DTensor):
            raise UserError(
                f"policy: {name} is not whole in this process (sharded or offloaded); gather the "
                "weights around the call"
            )
        if id(weight) not in own:
            raise UserError(
                f"policy: {name} is outside of its transformers model, whose tokens it may change; "
                "give the model itself, or use adapters within its layers (LoRA)"
            )
    # An adapter's module has the plain weight as its `weight`, which is not what it computes.
    head = model.get_output_embeddings()
    plain = isinstance(model.get_input_embeddings(), nn.Embedding) and isinstance(head, nn.Linear)
    if model is not policy and not plain:
        raise UserError(
            "policy: its embedding or head has an adapter, and drafters learn from plain ones; "
            "leave both out of target_modules and modules_to_save, or merge the adapter"
        )
    return model
