"""Command lines that serve a drafter, per engine: printed by `drafttrain export` and put in the model card.

Sources: vLLM docs/features/spec_decode, SGLang docs/advanced_features/speculative_decoding, TensorRT-LLM
docs/features/speculative-decoding and triton_backend/all_models/llmapi, llama.cpp tools/server (`llama-server --help`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.registry import default_tree
from drafttrain.drafters.shipping import ENGINES, FORMATS, GGUF_NAME, Trained, shipping
from drafttrain.files import Json

Options = Mapping[str, object]  # an engine's settings, see `Shipping.options`


@dataclass(frozen=True)
class Recipe:
    """How one engine serves a drafter.

    Attributes:
        engine: its name. commands: what to type; empty where `reasons` say why the engine cannot serve it.
    """

    engine: str
    commands: str = ""
    reasons: Sequence[str] = field(default_factory=tuple)


def recipes(
    trained: Trained,
    drafter: str,
    target: str,
    depth: int | None = None,
    results: Sequence[Json] = (),
    published: bool = False,
) -> list[Recipe]:
    """Every engine's recipe for a drafter.

    Args:
        drafter, target: Hub ids or folders, as they are to appear.
        depth: speculative tokens; the tuned tree's unless given. Engines that only draft chains get the depth.
        results: measured runs; the fastest gives the tree, and the kind that our own decoder merges in, such as +ngram.
        published: `drafter` is a repository that `Shipping.publish` filled, not a folder in one format.
    """
    kind = shipping(trained.kind)
    tree = TreeSpec.parse(f"chain:{depth}") if depth else tuned_tree(trained.folder, results)
    unsupported = {form: kind.unsupported(trained, form) for form in FORMATS}
    options, most = kind.options(trained), engine_depth(trained, tree)
    theirs = tree if most == tree.depth else TreeSpec.parse(f"chain:{most}")
    made = []
    for engine, form in ENGINES.items():
        if unsupported[form] or engine not in options:
            made.append(Recipe(engine, reasons=unsupported[form] or [f"it knows no drafter of kind {trained.kind}"]))
            continue
        place, before = drafter, ""
        if published and form not in kind.in_root:
            place, before = f"{drafter}/{form}", f'hf download {drafter} --include "{form}/*" --local-dir {drafter}\n'
        elif published and form == "gguf":
            before = f"hf download {drafter} {GGUF_NAME} --local-dir {drafter}\n"
        made.append(Recipe(engine, before + _COMMANDS[engine](place, target, theirs, options[engine])))
    _, plus, side = str((fastest(results) or {}).get("kind", "")).partition("+")
    return [*made, Recipe("drafttrain", _ours(drafter + plus + side, target, tree))]


def as_text(made: Sequence[Recipe]) -> str:
    """The recipes for the terminal."""
    parts = []
    for recipe in made:
        body = f"not served, because {'; '.join(recipe.reasons)}" if recipe.reasons else recipe.commands
        parts.append(f"-- {recipe.engine}\n{body}")
    return "\n\n".join(parts)


def _chosen(defaults: Options, options: Options) -> Json:
    """A kind's options over the defaults; None drops a key."""
    return {key: value for key, value in {**defaults, **options}.items() if value is not None}


def _vllm(drafter: str, target: str, tree: TreeSpec, options: Options) -> str:
    defaults = {"method": None, "model": drafter, "num_speculative_tokens": tree.depth}
    return f"vllm serve {target} --speculative-config '{json.dumps(_chosen(defaults, options))}'"


def _sglang(drafter: str, target: str, tree: TreeSpec, options: Options) -> str:
    top_k, nodes = (tree.top_k, tree.budget) if tree.shape == "dynamic" else (1, tree.depth)
    defaults = {
        "speculative-algorithm": None,
        "speculative-draft-model-path": drafter,
        "speculative-num-steps": tree.depth,
        "speculative-eagle-topk": top_k,
        "speculative-num-draft-tokens": nodes + 1,
    }
    flags = [f"--{flag} {value}" for flag, value in _chosen(defaults, options).items()]
    lines = [" ".join(flags[at : at + 2]) for at in range(1, len(flags), 2)]
    return " \\\n  ".join((f"python -m sglang.launch_server --model-path {target} {flags[0]}", *lines))


def _tensorrt(drafter: str, target: str, tree: TreeSpec, options: Options) -> str:
    defaults = {"decoding_type": None, "max_draft_len": tree.depth, "speculative_model": drafter}
    keys = "\n".join(f"  {key}: {value}" for key, value in _chosen(defaults, options).items())
    return (
        f"cat > speculative.yaml <<'EOF'\nspeculative_config:\n{keys}\nEOF\n"
        f"trtllm-serve {target} --backend pytorch --extra_llm_api_options speculative.yaml\n"
        "# Triton: the same keys in all_models/llmapi/tensorrt_llm/1/model.yaml, beside\n"
        f"#   model: {target}\n"
        "# then: python3 scripts/launch_triton_server.py --model_repo=all_models/llmapi"
    )


def _llama_cpp(drafter: str, target: str, tree: TreeSpec, options: Options) -> str:
    gguf = f"{drafter}/{GGUF_NAME}"
    return f"llama-server -m target.gguf --spec-type draft-simple --spec-draft-model {gguf} --spec-draft-n-max {tree.depth}"


def _transformers(drafter: str, target: str, tree: TreeSpec, options: Options) -> str:
    return (
        f'model = AutoModelForCausalLM.from_pretrained("{target}")\n'
        f'assistant = AutoModelForCausalLM.from_pretrained("{drafter}")\n'
        f"assistant.generation_config.num_assistant_tokens = {tree.depth}\n"
        "model.generate(**inputs, assistant_model=assistant)"
    )


_COMMANDS = {
    "vLLM": _vllm,
    "SGLang": _sglang,
    "TensorRT-LLM, Triton": _tensorrt,
    "llama.cpp": _llama_cpp,
    "transformers": _transformers,
}


def _ours(drafter: str, target: str, tree: TreeSpec) -> str:
    return (
        "from drafttrain import generate\n\n"
        f'out = generate("{target}", "The capital of France is", drafter="{drafter}", tree="{tree}")\n'
        "print(out.text, out.stats.accepted_length)"
    )


def fastest(results: Sequence[Json]) -> Json | None:
    """The measured run with the highest speed-up; None if no run drafted."""
    measured = [run for run in results if run["decoding"].get("tree", {}).get("depth")]
    return max(measured, key=lambda run: run["overall"].get("speedup_vs_fastest") or 0.0, default=None)


def engine_depth(trained: Trained, tree: TreeSpec) -> int:
    """Speculative tokens for an engine: the tree's depth, at most the depth that the drafter reaches."""
    most = shipping(trained.kind).most_tokens(trained)
    return tree.depth if most is None else min(tree.depth, most)


def tuned_tree(folder: Path, results: Sequence[Json] = (), default_depth: int = 3) -> TreeSpec:
    """The tree to serve with: the fastest measured run's, else decoding.json's, else a chain of the default depth."""
    best = fastest(results)
    if best is not None:
        return TreeSpec.parse(best["decoding"]["tree"]["spec"])
    tree = TreeSpec.parse(default_tree(str(folder)) or f"chain:{default_depth}")
    return tree if tree.depth else TreeSpec.parse(f"chain:{default_depth}")
