"""`drafttrain prompts`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from drafttrain.command import Alias, Several, command, result_of
from drafttrain.flags import Device
from drafttrain.values import (
    Amount,
    Count,
    Dtype,
    File,
    Fraction,
    Place,
    PositiveFraction,
    Seed,
    Size,
    Temperature,
)

if TYPE_CHECKING:
    from drafttrain.files import Json


@command
def prompts(
    *,
    source: Place | Path,
    output: Place | Path,
    count: Count | None = None,
    input: File | Path | None = None,
    subset: str | None = None,
    split: str = "train",
    columns: str = "",
    images: Place | Path | None = None,
    allow_urls: bool = False,
    target: Place | Path | None = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    trust_remote_code: bool = False,
    temperature: Temperature = 0.8,
    top_p: PositiveFraction = 1.0,
    url: Sequence[str] = (),
    openings: Place | Path = "builtin",
    opening_share: Fraction = 0.5,
    max_prompt_tokens: Count = 256,
    slots: Literal["auto"] | Count = "auto",
    max_minutes: Amount | None = None,
    min_chars: Size = 10,
    max_chars: Size = 8000,
    min_tokens: Size = 0,
    max_tokens: Size = 0,
    exclude: Annotated[Sequence[File | Path], Several()] = (),
    exclude_suites: Annotated[bool, Alias("--no-exclude-suites")] = True,
    ngram: Count = 8,
    seed: Seed = 0,
    overwrite: bool = False,
) -> Json:
    """Collect prompts for the target to answer.

    Each line of the output is a JSON object: {"id", "messages" or "text", "source"}.

    ```
    drafttrain prompts --source magpie --target smollm2-135m --count 2000 --output prompts.jsonl
    drafttrain prompts --source magpie --target T --url http://a:8000 --url http://b:8000 --output prompts.jsonl
    drafttrain prompts --source file --input chats.jsonl --output prompts.jsonl
    drafttrain prompts --source HuggingFaceH4/ultrachat_200k --split train_sft --count 50000 --output prompts.jsonl
    ```

    ```
    magpie   the target writes the user turns itself, from its chat template's opening
             (no template: free-running text)
    file     JSONL: FastChat turns, ShareGPT conversations, OpenAI messages, prompt or
             instruction (+ input), plain text; tools (OpenAI, ShareGPT, xLAM, ToolACE,
             Hermes), chat_template_kwargs and images of a row are kept
    easy-vqa 38,575 questions about 4,000 drawn pictures: pip install easy-vqa
    ID       a data set of the Hub, or a local folder of one, such as a folder of CSV or JSON
             files; --columns maps columns with other names
    ```

    Images are stored once each, in the folder `images` beside the output: those of OpenAI's and HF's
    message parts, of LLaVA's "<image>", and of a column image or images. Prompts with one that is
    missing, broken, animated or too large are dropped and counted.

    Prompts are shuffled by --seed and filtered by length. Duplicates are dropped, and so are
    prompts that share --ngram consecutive words with a file of --exclude or with the evaluation
    suites of drafttrain. An interrupted magpie run continues when run again; a finished file is not
    changed.

    Args:
        source: magpie, file, easy-vqa, or a data set id
        output: JSONL file to write; FILE.summary.json holds the counts
        count: number of prompts (default: 1000 for magpie, else all)
        input: for file: the JSONL file
        subset: for a data set: its configuration
        split: for a data set: its split
        columns: for a data set: our names = its names: messages=conversations,system=preamble
        images: folder where relative paths of images begin (default: beside the rows)
        allow_urls: download images that rows name by URL
        target: for magpie: the model that writes; its tokenizer also counts --min-tokens and
            --max-tokens
        dtype: for magpie: float32, bfloat16, float16 or auto (bfloat16 where the device has it)
        device: for magpie: cpu, cuda, cuda:N or auto
        trust_remote_code: run model code that comes with the target
        temperature: for magpie: sampling temperature; large models stay coherent at 1.0
        top_p: for magpie: share of probability to sample from; below 1 is slow on a CPU
        url: for magpie: server of the target; repeat it for several (default: run here)
        openings: for magpie: builtin, none, or a file with one beginning per line
        opening_share: share of prompts that get an opening
        max_prompt_tokens: for magpie: longer prompts are dropped
        slots: for magpie: sequences that run together; --url: requests per server (default: by
            memory; 128 requests)
        max_minutes: for magpie: stop after this time and keep the prompts so far
        min_chars: least characters of a prompt
        max_chars: most characters of a prompt; 0: no limit
        min_tokens: least tokens of a prompt; needs --target
        max_tokens: most tokens of a prompt; needs --target; 0: no limit
        exclude: drop overlaps with these
        exclude_suites: also drop prompts that overlap with drafttrain's suites
        ngram: consecutive shared words that count as overlap
        seed: seed of the order and of what magpie samples
        overwrite: replace an earlier result, when the new one is complete
    """
    return result_of("data.prompts", locals())
