"""Command lines that serve a drafter, per engine: printed by `drafttrain export` and put in the
model card.

Sources: vLLM docs/features/spec_decode, SGLang docs/advanced_features/speculative_decoding,
TensorRT-LLM docs/features/speculative-decoding and triton_backend/all_models/llmapi, llama.cpp
tools/server (`llama-server --help`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.registry import decoding_settings, default_tree
from drafttrain.drafters.shipping import (
    GGUF_NAME,
    TARGET_OVERRIDES,
    TOKENIZERS,
    Trained,
    shipped_kinds,
    shipping,
)
from drafttrain.errors import UserError
from drafttrain.export.batch_schedule import Entry, sglang_config, vllm_keys
from drafttrain.files import Json
from drafttrain.formats.engines import ENGINES

_TREES = (
    "SGLang",
    "TensorRT-LLM, Triton",
)  # engines that draft dynamic trees; the others draft chains
# What to type, per engine. settings: see `_settings`.
_COMMANDS = {
    "vLLM": "vllm serve {target} {overrides}--speculative-config '{settings}'",
    "SGLang": "python -m sglang.launch_server --model-path {target} {settings}",
    "TensorRT-LLM, Triton": """cat > speculative.yaml <<'EOF'
speculative_config:
{settings}
EOF
trtllm-serve {target} --config speculative.yaml
# Triton: the same keys in all_models/llmapi/tensorrt_llm/1/model.yaml, beside
#   model: {target}
# then: python3 scripts/launch_triton_server.py --model_repo=all_models/llmapi""",
    "llama.cpp": """# target.gguf: {target} as GGUF of any type; drafttrain export --format gguf --target-gguf float16 writes one
llama-server -m target.gguf {settings}""",
    "transformers": """model = AutoModelForCausalLM.from_pretrained("{target}")
assistant = {settings}{tokenizers})""",
    "drafttrain": """from drafttrain import generate

out = generate("{target}", "The capital of France is", drafter="{drafter}", tree="{tree}")
print(out.text, out.stats.accepted_length)""",
}

# Of a draft model with another vocabulary (universal assisted generation).
_TOKENIZERS = """, tokenizer=AutoTokenizer.from_pretrained("{target}"),
               assistant_tokenizer=AutoTokenizer.from_pretrained("{drafter}")"""


class Recipe(NamedTuple):
    """How one engine serves a drafter."""

    engine: str
    commands: str = ""  # what to type
    reasons: Sequence[str] = ()  # why the engine cannot serve it; empty if it can


def recipes(
    trained: Trained,
    drafter: str,
    target: str,
    depth: int | None = None,
    results: Sequence[Json] = (),
    published: bool = False,
    schedule: list[Entry] | None = None,
) -> list[Recipe]:
    """Every engine's recipe for a drafter.

    Args:
        drafter, target: Hub ids or folders, as they are to appear.
        depth: speculative tokens; the tuned tree's unless given. Engines that only draft chains get
            the depth.
        results: measured runs; the fastest gives the tree, and the kind that our own decoder merges
            in, such as +ngram.
        published: `drafter` is a repository that `Shipping.publish` filled, not a folder in one
            format.
        schedule: draft lengths by batch size, for vLLM and SGLang, which can follow one.
    """
    kind = shipping(trained.kind)
    if depth:
        tree = TreeSpec.parse(f"chain:{depth}")
    else:
        tree = tuned_tree(trained.folder, results)
    unsupported = {
        name: kind.unsupported(trained, engine.form, engine) for name, engine in ENGINES.items()
    }
    options = kind.options(trained)
    most = engine_depth(trained, tree)
    if most == tree.depth:
        theirs = tree
    else:
        theirs = TreeSpec.parse(f"chain:{most}")
    chain = TreeSpec.parse(f"chain:{depth or engine_chain(trained, results)}")
    made = []
    for engine, (_, form, _) in ENGINES.items():
        if unsupported[engine] or engine not in options:
            made.append(
                Recipe(
                    engine,
                    reasons=unsupported[engine] or [f"it knows no drafter of kind {trained.kind}"],
                )
            )
            continue
        place = drafter
        before = ""
        if published and kind.withheld(trained, form):
            place = f"{drafter.rpartition('/')[2]}-{form}"
            before = f"drafttrain export --drafter {drafter} --format {form} --output {place}\n"
        elif published and form not in kind.in_root:
            place = f"{drafter}/{form}"
            before = f'hf download {drafter} --include "{form}/*" --local-dir {drafter}\n'
        elif published and form == "gguf":
            before = f"hf download {drafter} {GGUF_NAME} --local-dir {drafter}\n"
        own = dict(options[engine])
        overrides = ""
        if TARGET_OVERRIDES in own:
            overrides = f"--hf-overrides '{json.dumps(own.pop(TARGET_OVERRIDES))}' "
        words = {"target": target, "drafter": place, "depth": chain.depth, "overrides": overrides}
        both = ""
        if own.pop(TOKENIZERS, False):
            both = _TOKENIZERS.format(**words)
        settings = _settings(engine, place, theirs if engine in _TREES else chain, own, schedule)
        if "--speculative-adaptive-config" in settings:
            before += f"echo '{json.dumps(sglang_config(schedule or []))}' > adaptive.json\n"
        made.append(
            Recipe(
                engine,
                before + _COMMANDS[engine].format(**words, tokenizers=both, settings=settings),
            )
        )
    _, plus, side = str((fastest(results) or {}).get("kind", "")).partition("+")
    ours = _COMMANDS["drafttrain"].format(target=target, drafter=drafter + plus + side, tree=tree)
    return [*made, Recipe("drafttrain", ours)]


def own_drafting(drafter: str, target: str, depth: int) -> list[Recipe]:
    """How engines draft by themselves what a drafter without weights drafts here.

    Raises:
        UserError: no engine does.
    """
    found = shipping(drafter.partition(":")[0]).own_drafting
    if not found:
        known = ", ".join(kind for kind in shipped_kinds() if shipping(kind).own_drafting)
        raise UserError(
            f"drafter={drafter!r} has no weights to export, and no engine drafts so; they have settings for {known}"
        )
    return [
        Recipe(engine, text.format(target=target, depth=depth)) for engine, text in found.items()
    ]


def _settings(
    engine: str,
    drafter: str,
    tree: TreeSpec,
    options: Mapping[str, object],
    schedule: list[Entry] | None,
) -> str:
    """An engine's settings as its command takes them: a kind's options (`Shipping.options`) over
    the defaults.
    """
    adaptive = schedule and options.get("speculative-algorithm") in ("EAGLE", "EAGLE3")
    if adaptive:  # which knows chains only
        tree = TreeSpec.parse(f"chain:{max(1, *(entry.tokens for entry in schedule or ()))}")
    if tree.shape == "dynamic":
        top_k = tree.top_k
        nodes = tree.budget
    else:
        top_k = 1
        nodes = tree.depth
    defaults: dict[str, Json] = {
        "vLLM": {"method": None, "model": drafter, "num_speculative_tokens": tree.depth},
        "SGLang": {
            "speculative-algorithm": None,
            "speculative-draft-model-path": drafter,
            "speculative-num-steps": tree.depth,
            "speculative-eagle-topk": top_k,
            "speculative-num-draft-tokens": nodes + 1,
        },
        "TensorRT-LLM, Triton": {
            "decoding_type": None,
            "max_draft_len": tree.depth,
            "speculative_model": drafter,
        },
        "llama.cpp": {
            "spec-type": None,
            "spec-draft-model": f"{drafter}/{GGUF_NAME}",
            "spec-draft-n-max": tree.depth,
        },
    }
    if options.get("decoding_type") == "Eagle3" and tree.shape == "dynamic":
        budget = min(max(nodes, tree.depth), top_k * tree.depth)  # what its rule admits
        defaults["TensorRT-LLM, Triton"] |= {
            "use_dynamic_tree": "true",
            "dynamic_tree_max_topK": top_k,
            "max_total_draft_tokens": budget,
        }
    chosen = {
        key: value
        for key, value in {**defaults.get(engine, {}), **options}.items()
        if value is not None
    }
    if engine == "transformers":
        return _assisted(drafter, tree.depth, options)
    if engine == "vLLM":
        return json.dumps(
            {
                **chosen,
                **(
                    vllm_keys(schedule)
                    if schedule and "num_speculative_tokens" not in options
                    else {}
                ),
            }
        )
    if adaptive:
        chosen |= {"speculative-adaptive": "", "speculative-adaptive-config": "adaptive.json"}
    if engine in ("SGLang", "llama.cpp"):  # two flags per line
        flags = [f"--{flag} {value}".rstrip() for flag, value in chosen.items()]
        return " \\\n  ".join(
            [flags[0], *(" ".join(flags[at : at + 2]) for at in range(1, len(flags), 2))]
        )
    return "\n".join(f"  {key}: {value}" for key, value in chosen.items())


def _assisted(drafter: str, depth: int, options: Mapping[str, object]) -> str:
    """transformers' lines after `assistant = `, the last call's end left out."""
    lines = [f'AutoModelForCausalLM.from_pretrained("{drafter}")']
    more = ""
    if "speculation_type" in options:  # drafts its whole block
        lines = [f'AutoModel.from_pretrained("{drafter}")']
        more = f', speculation_type="{options["speculation_type"]}"'
    else:
        lines.append(f"assistant.generation_config.num_assistant_tokens = {depth}")
    return "\n".join([*lines, f"model.generate(**inputs, assistant_model=assistant{more}"])


def as_text(made: Sequence[Recipe]) -> str:
    """The recipes for the terminal."""
    return "\n\n".join(
        f"-- {engine}\n" + (f"not served, because {'; '.join(reasons)}" if reasons else commands)
        for engine, commands, reasons in made
    )


def fastest(results: Sequence[Json]) -> Json | None:
    """The measured run with the highest speed-up; None if no run drafted."""
    measured = [run for run in results if run["decoding"].get("tree", {}).get("depth")]
    return max(
        measured,
        key=lambda run: run["overall"].get("speedup_vs_fastest") or 0.0,
        default=None,
    )


def engine_chain(trained: Trained, results: Sequence[Json] = ()) -> int:
    """Speculative tokens for engines that draft chains: of the fastest measured chain, else tune's,
    else the tree's depth.
    """
    measured = fastest(
        [
            run
            for run in results
            if run["decoding"].get("tree", {}).get("spec", "").startswith("chain:")
        ]
    )
    if measured is not None:
        return engine_depth(trained, TreeSpec.parse(measured["decoding"]["tree"]["spec"]))
    tuned = decoding_settings(str(trained.folder)).get("chain")
    return engine_depth(
        trained, TreeSpec.parse(tuned) if tuned else tuned_tree(trained.folder, results)
    )


def engine_depth(trained: Trained, tree: TreeSpec) -> int:
    """Speculative tokens for an engine: the tree's depth, at most what the drafter reaches; all of
    a block.
    """
    kind = shipping(trained.kind)
    if fixed := kind.block_depth(trained):
        return fixed
    if kind.depth_key:
        return min(tree.depth, trained.config[kind.depth_key])
    return tree.depth


def tuned_tree(folder: Path, results: Sequence[Json] = (), default_depth: int = 3) -> TreeSpec:
    """The tree to serve with: the fastest measured run's, else decoding.json's, else a chain of the
    default depth.
    """
    best = fastest(results)
    if best is not None:
        return TreeSpec.parse(best["decoding"]["tree"]["spec"])
    tree = TreeSpec.parse(default_tree(str(folder)) or f"chain:{default_depth}")
    if tree.depth:
        return tree
    return TreeSpec.parse(f"chain:{default_depth}")
