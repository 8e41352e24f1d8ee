"""Our decoder inside Spec-Bench: a `forward_func` for the loop in its evaluation/eval.py.

A script next to Spec-Bench's other inference_*.py needs only these lines and their argument parser:

    from drafttrain.evaluation.spec_bench import forward_function

    model = AutoModelForCausalLM.from_pretrained(args.model_path, dtype=..., device_map="cuda")
    tokenizer = AutoTokenizer.from_pretrained(args.model_path)
    run_eval(model=model, tokenizer=tokenizer, forward_func=forward_function(model, tokenizer,
    "runs/drafter"), ...)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

from drafttrain.drafters.registry import chosen_tree, load_drafter
from drafttrain.errors import UserError
from drafttrain.inference import Decoder, SamplingParams, Stats, strip_padding
from drafttrain.target import Target

# (inputs, model, tokenizer, max_new_tokens) -> output ids [1, L + new], new tokens, decoding steps,
# tokens of each step
Forward = Callable[..., tuple[Tensor, int, int, list[int]]]


def forward_function(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: str,
    *,
    tree: str | None = None,
    sampling: SamplingParams | None = None,
) -> Forward:
    """Makes the function that Spec-Bench calls for every turn.

    Args:
        model: the loaded transformers model that Spec-Bench gets too; it is frozen and gets our
            attention.
        drafter: a name as in `load_drafter`; `none` decodes plainly, for Spec-Bench's baseline.
        tree: the tree of a round; default: the one in the drafter's decoding.json, else chain:3.
        sampling: greedy by default. Spec-Bench seeds torch for each choice; sampled tokens follow
            that seed.

    Returns:
        forward(inputs, model, tokenizer, max_new_tokens); inputs: a tokenizer's output for one
        prompt. Returns what
        Spec-Bench's loop unpacks: output ids [1, L + new] with the prompt, the number of new
        tokens, the number of steps
        (target passes after the prefill), and the tokens committed by each step, bonus token
        included. The prefill's own
        token belongs to no step, so the new tokens are one more than the sum of the list.

    Raises:
        UserError: an unsupported model, a drafter of another target, or a wrong tree.
    """
    target = Target.wrap(model, tokenizer, model.name_or_path or type(model).__name__)
    spec = chosen_tree(tree, drafter)
    decoder = Decoder(target, load_drafter(drafter, target), spec=spec, sampling=sampling)

    def forward(
        inputs: BatchEncoding,
        model: object,
        tokenizer: object,
        max_new_tokens: int,
        **_: object,
    ) -> tuple[Tensor, int, int, list[int]]:
        ids = inputs.input_ids  # [1, L] int64
        if ids.shape[0] != 1:
            raise UserError(
                f"input_ids has {ids.shape[0]} rows; Spec-Bench answers one prompt at a time"
            )
        mask = inputs.get("attention_mask", torch.ones_like(ids))
        (prompt,) = strip_padding(ids, mask)
        (made,) = decoder.generate(
            [prompt],
            max_new_tokens=max_new_tokens,
            seed=torch.initial_seed(),
        )
        new = torch.tensor([made.tokens], dtype=ids.dtype, device=ids.device)  # [1, new]
        return (
            torch.cat((ids, new), dim=1),
            len(made.tokens),
            made.stats.target_passes,
            committed(made.stats),
        )

    return forward


def committed(stats: Stats) -> list[int]:
    """Tokens that each round committed, bonus token included."""
    lengths = [accepted + 1 for accepted in stats.accepted]
    # A last path that EOS or a stop string cuts has no bonus token.
    if lengths:
        lengths[-1] -= sum(lengths) - (stats.new_tokens - 1)
    return lengths
