"""`drafttrain chat`."""

from __future__ import annotations

from pathlib import Path

from drafttrain.command import command, result_of
from drafttrain.flags import NO_KWARGS, Device, TemplateKwargs
from drafttrain.values import (
    AnyText,
    Count,
    Dtype,
    Fraction,
    Penalty,
    Place,
    PositiveFraction,
    Seed,
    Size,
    Temperature,
)


@command
def chat(
    *,
    target: Place | Path,
    drafter: Place | Path,
    dtype: Dtype = "auto",
    device: Device = "auto",
    trust_remote_code: bool = False,
    chat_template_kwargs: TemplateKwargs = NO_KWARGS,
    system: AnyText = "",
    tree: str | None = None,
    temperature: Temperature = 0.0,
    top_p: PositiveFraction = 1.0,
    top_k: Size = 0,
    min_p: Fraction = 0.0,
    repetition_penalty: Penalty | None = None,
    seed: Seed = 0,
    max_new_tokens: Count = 1024,
    json: bool = False,
) -> None:
    """Talk to the target in the terminal and watch the drafter at work.

    ```
    drafttrain chat --target smollm2-135m --drafter runs/drafter+ngram
    drafttrain chat --target smollm2-135m --drafter ngram --temperature 0.7 --system "You answer in one sentence."
    drafttrain chat --target smollm2-135m --drafter runs/drafter --json < questions.txt > answers.jsonl
    ```

    Tokens that a drafter proposed are shaded, matches of the text in another color; the others are
    the target's own. The line below an answer shows tokens per second and accepted length; /plain
    decodes the same answer again without drafts and shows the ratio. The text is the target's own
    either way. Without a terminal each line of the input is a message; answers go to stdout, figures to stderr. In the
    conversation:

    ```
    /plain          switch drafting off, which decodes the last answer again to compare, and on again
    /image PATH     show an image with the next message; again for several
    /system TEXT    set the system message, or none
    /reset          begin a new conversation
    /save FILE      write the conversation and its figures as JSON
    /help           show this list
    /quit           end, as Ctrl-D does
    ```

    Args:
        target: short name, folder or Hub id
        drafter: a drafter's folder or Hub id, also with :OPTION=VALUE, KIND or KIND:OPTIONS
            (lookahead, ngram, ngram_store, suffix, token_recycling), or FOLDER+KIND
        dtype: float32, bfloat16, float16 or auto (bfloat16 where the device has it)
        device: cpu, cuda, cuda:N or auto
        trust_remote_code: run model code that comes with the target
        chat_template_kwargs: variables of the target's chat template, as JSON:
            '{"enable_thinking": false}'
        system: the system message (default: as the chat template says)
        tree: tree of a round: chain:3, dynamic:5,8,24, ... (default: the tree in the drafter's
            decoding.json, else chain:3)
        temperature: sampling temperature; 0 decodes greedily
        top_p: share of probability to sample from; 1 keeps all tokens
        top_k: number of likeliest tokens to sample from; 0 keeps all
        min_p: least probability of a token, as a share of the likeliest's; 0 keeps all tokens
        repetition_penalty: penalty of repeated tokens, also of greedy decoding; 1 turns it off
            (default: as the target's generation_config says)
        seed: seed of the sampling
        max_new_tokens: most tokens of an answer
        json: print one JSON object per turn, and no colors
    """
    result_of("reports.terminal_chat", locals())
