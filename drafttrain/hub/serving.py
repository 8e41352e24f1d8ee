"""Command lines that serve a drafter, per engine: printed by `drafttrain export` and put in the model card.

Sources: vLLM docs/features/spec_decode, SGLang docs/advanced_features/speculative_decoding, TensorRT-LLM
docs/features/speculative-decoding and triton_backend/all_models/llmapi, llama.cpp tools/server (`llama-server --help`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drafttrain.drafters.base import TreeSpec, default_tree
from drafttrain.hub.fetch import MODELS


@dataclass(frozen=True)
class Recipe:
    """How one engine serves a drafter.

    Attributes:
        engine: its name. commands: what to type, or empty where `reasons` say why it cannot.
    """

    engine: str
    commands: str = ""
    reasons: Sequence[str] = field(default_factory=tuple)


def public_name(name: str) -> str:
    """A model's name that means something elsewhere: the Hub id of a short name, a Hub id as it is, of a path its last part."""
    if name in MODELS:
        return MODELS[name].repo
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.startswith("."):
        return name
    return Path(name).name


def recipes(
    kind: str,
    drafter: str,
    target: str,
    tree: TreeSpec,
    obstacles: Mapping[str, Sequence[str]],
    feature_layers: Sequence[int] = (),
    gguf: str = "",
    side: str = "",
) -> list[Recipe]:
    """Every engine's recipe.

    Args:
        kind: eagle3 or draft_model. drafter, target: Hub ids or folders.
        tree: the tuned one; engines that only draft chains get its depth.
        obstacles: per engine why it cannot run this drafter.
        feature_layers: given if they are not the default ones, which TensorRT-LLM must be told.
        gguf: name of the GGUF file, if there is one. side: what our own decoder merges in, such as +ngram.
    """
    depth = max(tree.depth, 1)
    made = [
        Recipe("vLLM", _vllm(kind, drafter, target, depth), obstacles.get("vllm", ())),
        Recipe("SGLang", _sglang(kind, drafter, target, tree), obstacles.get("sglang", ())),
        Recipe(
            "TensorRT-LLM, Triton", _tensorrt(kind, drafter, target, depth, feature_layers), obstacles.get("sglang", ())
        ),
    ]
    if kind == "draft_model":
        made.append(Recipe("llama.cpp", _llama_cpp(gguf or "draft.gguf", depth), obstacles.get("gguf", ())))
        made.append(Recipe("transformers", _transformers(drafter, target, depth)))
    else:
        needs = "needs a causal language model as drafter, and this is a head on the target's states"
        made += [Recipe("llama.cpp", reasons=[needs]), Recipe("transformers", reasons=[needs])]
    made.append(Recipe("drafttrain", _ours(drafter + side, target, tree)))
    return [Recipe(recipe.engine, reasons=recipe.reasons) if recipe.reasons else recipe for recipe in made]


def as_text(made: Sequence[Recipe]) -> str:
    """For the terminal."""
    parts = []
    for recipe in made:
        body = f"not served: {'; '.join(recipe.reasons)}" if recipe.reasons else recipe.commands
        parts.append(f"-- {recipe.engine}\n{body}")
    return "\n\n".join(parts)


def _vllm(kind: str, drafter: str, target: str, depth: int) -> str:
    method = {"eagle3": "eagle3", "draft_model": "draft_model"}[kind]
    config = {"method": method, "model": drafter, "num_speculative_tokens": depth}
    return f"vllm serve {target} --speculative-config '{json.dumps(config)}'"


def _sglang(kind: str, drafter: str, target: str, tree: TreeSpec) -> str:
    algorithm = {"eagle3": "EAGLE3", "draft_model": "STANDALONE"}[kind]
    dynamic = tree.shape == "dynamic"
    top_k, nodes = (tree.top_k, tree.budget) if dynamic else (1, max(tree.depth, 1))
    return (
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {algorithm} \\\n"
        f"  --speculative-draft-model-path {drafter} --speculative-num-steps {max(tree.depth, 1)} \\\n"
        f"  --speculative-eagle-topk {top_k} --speculative-num-draft-tokens {nodes + 1}"
    )


def _tensorrt(kind: str, drafter: str, target: str, depth: int, layers: Sequence[int]) -> str:
    decoding = {"eagle3": "Eagle3", "draft_model": "DraftTarget"}[kind]
    lines = [
        "speculative_config:",
        f"  decoding_type: {decoding}",
        f"  max_draft_len: {depth}",
        f"  speculative_model: {drafter}",
    ]
    if layers:
        lines.append(f"  eagle3_layers_to_capture: {[layer - 1 for layer in layers]}")
    config = "\n".join(lines)
    return (
        f"cat > speculative.yaml <<'EOF'\n{config}\nEOF\n"
        f"trtllm-serve {target} --backend pytorch --extra_llm_api_options speculative.yaml\n"
        "# Triton: the same keys in all_models/llmapi/tensorrt_llm/1/model.yaml, beside\n"
        f"#   model: {target}\n"
        "# then: python3 scripts/launch_triton_server.py --model_repo=all_models/llmapi"
    )


def _llama_cpp(gguf: str, depth: int) -> str:
    return f"llama-server -m target.gguf --spec-type draft-simple --spec-draft-model {gguf} --spec-draft-n-max {depth}"


def _transformers(drafter: str, target: str, depth: int) -> str:
    return (
        f'model = AutoModelForCausalLM.from_pretrained("{target}")\n'
        f'assistant = AutoModelForCausalLM.from_pretrained("{drafter}")\n'
        f"assistant.generation_config.num_assistant_tokens = {depth}\n"
        "model.generate(**inputs, assistant_model=assistant)"
    )


def _ours(drafter: str, target: str, tree: TreeSpec) -> str:
    return (
        "from drafttrain import generate\n\n"
        f'out = generate("{target}", "The capital of France is", drafter="{drafter}", tree="{tree}")\n'
        "print(out.text, out.stats.accepted_length)"
    )


def fastest(results: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The measured run that gained most; None without one that drafted."""
    measured = [run for run in results if run["decoding"].get("tree", {}).get("depth")]
    return max(measured, key=lambda run: run["overall"].get("speedup_vs_fastest") or 0.0, default=None)


def tuned_tree(folder: Path, results: Sequence[dict[str, Any]] = (), default_depth: int = 3) -> TreeSpec:
    """The tree to serve with: of the fastest measured run, else of decoding.json, else a chain of the default depth."""
    best = fastest(results)
    if best is not None:
        return TreeSpec.parse(best["decoding"]["tree"]["spec"])
    tree = TreeSpec.parse(default_tree(str(folder)) or f"chain:{default_depth}")
    return tree if tree.depth else TreeSpec.parse(f"chain:{default_depth}")
