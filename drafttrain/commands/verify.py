"""`drafttrain verify`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from drafttrain.command import Several, command, result_of
from drafttrain.flags import NO_KWARGS, TemplateKwargs
from drafttrain.formats.engines import FORMATS, PACKAGES
from drafttrain.values import Count, Depth, FileDtype, Name, OneOf, Place

if TYPE_CHECKING:
    from drafttrain.files import Json

ENGINES = ("auto", "none", "all", *PACKAGES)


@command
def verify(
    *,
    drafter: Place | Path | None = None,
    all_kinds: bool = False,
    exported: Place | Path | None = None,
    format: Annotated[str, OneOf(FORMATS)] | None = None,
    dtype: FileDtype = "bfloat16",
    engine: Annotated[str, OneOf(ENGINES)] = "auto",
    engine_python: Annotated[Sequence[Place | Path], Several()] = (),
    target: Name | Path = "",
    suite: Place | Path = "drafttrain",
    chat_template_kwargs: TemplateKwargs = NO_KWARGS,
    prompts: Count = 8,
    max_new_tokens: Count = 64,
    speculative_tokens: Depth | None = None,
    output: Place | Path | None = None,
) -> Json:
    """Prove that an exported drafter computes what it computes here.

    ```
    drafttrain verify --drafter runs/drafter --exported runs/export
    drafttrain verify --drafter runs/drafter --engine vllm --engine-python ~/vllm/bin/python --output verify.json
    drafttrain verify --drafter runs/draft --engine transformers
    drafttrain verify --drafter runs/drafter --engine all --engine-python vllm=~/vllm/bin/python llama.cpp=~/llama/bin/python
    drafttrain verify --all-kinds --engine all --engine-python vllm=~/vllm/bin/python --output kinds.json
    ```

    Always: every tensor of the export must have the name, shape and dtype that the engine's loader
    expects and be finite; then the export is read back as a drafter, which must draft what the
    original drafts on random inputs. With --engine: the engine answers prompts greedily with a
    chain of --speculative-tokens, and so does our decoder; texts and accepted lengths are compared.

    --engine all has a row for every engine; those that cannot run here are rows that say so, with
    the release whose rules the files follow. A row that differs or fails is exit status 1: in
    float32 any other text and accepted lengths more than 2% apart; in half precision, where near
    ties fall differently, 5%.

    --all-kinds trains a tiny drafter of each kind for a tiny random target on the spot. Finished
    rows are in OUTPUT.partial.jsonl; the same command continues there.
    scripts/verify_engines_cpu.sh makes an environment for each engine that runs on a CPU and runs
    all of this.

    Args:
        drafter: a trained drafter's folder or Hub id
        all_kinds: a tiny drafter of every kind that engines load, in float32
        exported: folder written by drafttrain export (default: export it now, for the engine)
        format: format of what is exported now (default: the engine's, else the kind's first)
        dtype: type of the weights of what is exported now, and of the target's
        engine: the engine that also runs it (default: vllm or llama.cpp if installed)
        engine_python: interpreters that have vllm, or xllamacpp for llama.cpp; with several
            engines each as ENGINE=PATH (default: this one)
        target: short name, folder or Hub id (default: the recorded one)
        suite: source of the prompts: a suite's name or JSONL file
        chat_template_kwargs: variables of the target's chat template, as JSON:
            '{"enable_thinking": false}'; a question's own come first
        prompts: prompts at most, taken evenly from all categories
        max_new_tokens: most tokens of an answer
        speculative_tokens: length of the chain (default: the tuned depth, else 3)
        output: JSON file to write
    """
    return result_of("export.verify_export", locals())
