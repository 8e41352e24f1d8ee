"""JetSpec drafters as vLLM and JetSpec's own engine load them: `DFlashDraftModel` with causal blocks.

dflash_config says `causal` for vLLM (0.32) and `causal_head` for JetSpec. NeMo Automodel 0.7 writes
`causal` there, but `is_causal: false` beside it, which vLLM reads first: export such a drafter
again before you serve it. vLLM drafts chains; trees are JetSpec's and drafttrain's.

Sources: hao-ai-lab/JetSpec models/draft_head.py; NeMo Automodel 0.7 recipes/llm/train_jetspec.py;
vLLM 0.32 model_executor/models/qwen3_dflash.py.
"""

from __future__ import annotations

from drafttrain.drafters.dflash.export import EngineBlocks, vllm_block
from drafttrain.drafters.jetspec.model import JetSpec
from drafttrain.drafters.shipping import EngineSettings, Format, Trained
from drafttrain.files import Json
from drafttrain.formats.engines import EngineRelease


class JetSpecShipping(EngineBlocks[JetSpec]):
    """vLLM; our own format goes to the Hub too."""

    description = "a JetSpec drafter (arXiv 2606.18394), causal blocks of {block_size}, {layers}, {parameters} parameters"
    formats = {"vllm": Format("JetSpec as DFlashDraftModel", ("vLLM",))}
    verifiable = {"vllm": "vllm"}
    in_root = ()
    drafter_class = JetSpec
    causal_in = ("vLLM",)
    architecture = "DFlashDraftModel"
    reads = "JetSpec drafters (DFlashDraftModel with causal_head, NeMo's with causal)"

    def lacking(self, trained: Trained, form: str, engine: EngineRelease) -> list[str]:
        found = super().lacking(trained, form, engine)
        if trained.config.get("sample_from_anchor"):
            found.append(
                f"sample_from_anchor=true: {engine.name} predicts at masks only, for kind jetspec"
            )
        return found

    def block_keys(self, drafter: JetSpec) -> Json:
        keys = super().block_keys(drafter)
        keys["dflash_config"]["causal_head"] = drafter.config.causal
        return keys

    def options(self, trained: Trained) -> EngineSettings:
        return {"vLLM": vllm_block("dflash", self.block_depth(trained))}


SHIPPING = JetSpecShipping()
