"""`drafttrain eval`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from drafttrain.command import (
    Drafting,
    Loaded,
    Model,
    Shown,
    Tokenizer,
    command,
    outcome_of,
    take_drafter,
    take_target,
)
from drafttrain.flags import NO_KWARGS, Device, TemplateKwargs
from drafttrain.values import (
    Count,
    Dtype,
    File,
    Fraction,
    Name,
    Penalty,
    Place,
    PositiveFraction,
    Seed,
    Size,
    Temperature,
)

if TYPE_CHECKING:
    from drafttrain.evaluation.results_schema import Results

    Names = str | Sequence[str]
    OptionalDrafting = Drafting | None
else:
    Names = str
    OptionalDrafting = Annotated[Place | Path, Loaded("none")]


@command
def evaluate(
    target: Model,
    drafter: OptionalDrafting,
    output: Place | Path | None = None,
    *,
    tokenizer: Tokenizer = None,
    suite: Place | Path = "drafttrain",
    limit: Count | None = None,
    max_new_tokens: Count = 128,
    batch_size: Count = 1,
    tree: str | None = None,
    calibrate: File | Path | None = None,
    temperature: Temperature = 0.0,
    top_p: PositiveFraction = 1.0,
    top_k: Size = 0,
    min_p: Fraction = 0.0,
    repetition_penalty: Penalty | None = None,
    seed: Seed = 0,
    chat_template_kwargs: TemplateKwargs = NO_KWARGS,
    baselines: Names = "autoregressive,hf_generate,ngram",
    assistant: Name | Path = "",
    dtype: Dtype = "auto",
    device: Device = "auto",
    trust_remote_code: bool = False,
    progress: Shown = False,
) -> Results:
    """Measure a drafter in the lossless tree decoder against plain decoding.

    ```
    drafttrain eval --target smollm2-135m --drafter runs/quickstart/drafter --output results.json
    drafttrain eval --target smollm2-135m --drafter ngram --suite mt_bench.jsonl --limit 10 --tree dynamic:4,4,8
    ```

    Every prompt is answered by our engine with the drafter, by our engine without it
    (autoregressive), by transformers' generate on a model of its own, and beside a trained drafter
    by our engine with n-grams alone, in rotating order. After an interruption the same command
    continues with the next prompt.

    Args:
        target: short name, folder or Hub id; from Python also a Target, or a loaded model
        drafter: a drafter's folder or Hub id, also with :OPTION=VALUE, KIND or KIND:OPTIONS
            (lookahead, ngram, ngram_store, suffix, token_recycling), or FOLDER+KIND, or none; from
            Python also a loaded drafter
        output: results file (default: results.json beside the drafter; from Python none)
        tokenizer: the tokenizer of a loaded model
        suite: agentic, drafttrain, drawn, tools, spec_bench, mt_bench, humaneval, mbpp, gsm8k,
            math_500, aime_2024, aime_2025, gpqa, arena_hard, livecodebench, longbench, bfcl, alpaca,
            cnn_dm, speculator_benchmarks, mmstar, chartqa, coco_captions, easy_vqa, speed_bench,
            speed_bench_1k, speed_bench_2k, speed_bench_8k, speed_bench_16k,
            speed_bench_32k, a JSONL file in FastChat's question format, or NAME:FILE for a public
            suite in a file
        limit: questions at most, taken evenly from all categories
        max_new_tokens: most tokens of an answer
        batch_size: prompts at a time, on every side; --tree auto times single ones
        tree: tree of a round: none, chain:3, fanout:4x2x1, dynamic:5,8,24, paths:0,1,0-0, all with
            @sample, @stop=P or @cut=P, or auto: the fastest of a list, found by timing (default:
            the tree in the drafter's decoding.json, else auto)
        calibrate: prompts for --tree auto: JSONL of messages, turns or text
        temperature: sampling temperature; 0 decodes greedily
        top_p: share of probability to sample from; 1 keeps all tokens
        top_k: number of likeliest tokens to sample from; 0 keeps all
        min_p: least probability of a token, as a share of the likeliest's; 0 keeps all tokens
        repetition_penalty: penalty of repeated tokens, also of greedy decoding; 1 turns it off
            (default: as the target's generation_config says)
        seed: seed of the sampling
        chat_template_kwargs: variables of the target's chat template, as JSON:
            '{"enable_thinking": false}'; a question's own come first
        baselines: a list of autoregressive, hf_generate, ngram, hf_prompt_lookup, hf_assisted, or none;
            ngram is n-grams alone, beside a trained drafter
        assistant: draft model of hf_assisted: a causal LM's folder or Hub id (default: the
            target's own first layers)
        dtype: float32, bfloat16, float16 or auto (bfloat16 where the device has it)
        device: cpu, cuda, cuda:N or auto
        trust_remote_code: run model code that comes with the target
        progress: print what the command prints; the logger `drafttrain` gets it otherwise

    Returns:
        The content of results.json: overall figures, figures by category, and a record for each
        prompt.

    Raises:
        UserError: an unknown option, a value out of range, or anything that cannot be loaded.
    """
    args = Namespace(**locals())
    from drafttrain.evaluation.results_schema import Results
    from drafttrain.files import check_json

    loaded = (take_target("evaluate", args), take_drafter("evaluate", args))
    found = outcome_of("tuning.eval_command", args, *loaded, keeps=False)["result"]
    check_json(found, "evaluate", "measure again", Results)
    return found  # type: ignore[return-value]  # checked
