"""The inference engines and a trainer: the files that each loads, and the release whose rules the files follow."""

from __future__ import annotations

from typing import NamedTuple

from packaging.version import InvalidVersion, Version

from drafttrain.errors import UserError

ENGINE_FORMATS = ("vllm", "sglang", "transformers", "gguf")
FORMATS = (*ENGINE_FORMATS, "speculators")


class EngineRelease(NamedTuple):
    """An inference engine, in the release whose loader decides what it supports."""

    name: str
    form: str  # one of FORMATS: the files that it loads
    release: str

    def before(self, release: str) -> bool:
        """Whether this release is older than another."""
        return Version(self.release) < Version(release)

    def of_release(self, release: str) -> EngineRelease:
        """The engine in another release; the same for an empty one.

        Raises:
            UserError: not a version number.
        """
        if not release:
            return self
        try:
            return self._replace(release=str(Version(release)))
        except InvalidVersion as error:
            raise UserError(
                f"engine-version={release!r} is not a version number; write for example {self.release}"
            ) from error


# In the order of the recipes. The releases are those whose sources the rules were read from; the
# first engine of a format is the one that the format is written for.
ENGINES: dict[str, EngineRelease] = {
    "vLLM": EngineRelease("vLLM", "vllm", "0.32.0"),
    "SGLang": EngineRelease("SGLang", "sglang", "0.5.23"),
    # Its main branch after 1.2.1.
    "TensorRT-LLM, Triton": EngineRelease("TensorRT-LLM, Triton", "sglang", "1.3"),
    "llama.cpp": EngineRelease("llama.cpp", "gguf", "11549"),
    "transformers": EngineRelease("transformers", "transformers", "5.23"),
    # On Apple's GPUs, by mlx-dspark, whose release this is.
    "MLX": EngineRelease("MLX", "vllm", "0.20.3"),
}
# Classes of targets that read images and hand features to a drafter: in vLLM those with SupportsEagle3, in SGLang those with
# set_eagle3_layers_to_capture (EAGLE-3) or set_dflash_layers_to_capture (DFlash, DSpark). Each engine serves more classes,
# without such drafters.
_BOTH = (
    "Cosmos3ForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
    "Glm5NextForConditionalGeneration",
    "InternS1ProForConditionalGeneration",
    "InternS2MobiusForConditionalGeneration",
    "InternS2PreviewForConditionalGeneration",
    "KimiK25ForConditionalGeneration",
    "MiniMaxM3SparseForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen4ExpForConditionalGeneration",
)
# In SGLang EAGLE-3 alone, or blocks alone.
_STEPS = ("Llama4ForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration")
_BLOCKS = (
    "KimiK3ForConditionalGeneration",
    "MuseGlimmerForConditionalGeneration",
    "NemotronH_Nano_VL_V2",
)
_IN_VLLM = (
    *_BOTH,
    *_STEPS,
    *_BLOCKS,
    "CohereCompassForConditionalGeneration",
    "Exaone4_5_ForConditionalGeneration",
    "LightOnOCRForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "MiMoV2OmniForCausalLM",
    "MiniCPMV4_6ForConditionalGeneration",
    "MiniCPMV4_7ForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "OpenCUAForConditionalGeneration",
    "PixtralForConditionalGeneration",
    "Qwen3OmniMoeForConditionalGeneration",
)
_SGLANG_BLOCKS = (
    *_BOTH,
    *_BLOCKS,
    "InklingForConditionalGeneration",
    "Lfm2VlForConditionalGeneration",
    "MuseSparkForConditionalGeneration",
)
# (engine, its speculative-algorithm where classes differ by that) -> classes
SEEING_TARGETS: dict[tuple[str, str], tuple[str, ...]] = {
    ("vLLM", ""): _IN_VLLM,
    ("SGLang", "EAGLE3"): (*_BOTH, *_STEPS, "Gemma3ForConditionalGeneration"),
    ("SGLang", "DFLASH"): _SGLANG_BLOCKS,
    ("SGLang", "DSPARK"): _SGLANG_BLOCKS,
}
MROPE_NOTE = (
    "the target gives the tokens of an image few positions (M-RoPE). Heads are trained on the plain index, which vLLM's "
    "GPU runner (V2) gives them. Its older runner, the only one on CPUs, gives others, and writes drafts after the first "
    "to wrong cache slots (vLLM issue 54498): text stays exact, but behind images it accepts less than measured here. "
    "Compare there with --speculative-tokens 1"
)
# A trainer, which loads what it continues.
SPECULATORS = EngineRelease("speculators", "speculators", "0.9.0")
# Engines that can be run, and the package of each in its environment.
PACKAGES = {
    "vllm": "vllm",
    "transformers": "transformers",
    "llama.cpp": "xllamacpp",
    "mlx": "mlx_dspark",
}
GGUF_TYPES = ("float32", "float16", "bfloat16", "q8_0")  # of a GGUF file's matrices


def engine_of(form: str) -> EngineRelease:
    """The engine that a format is written for."""
    every = (*ENGINES.values(), SPECULATORS)
    return next(engine for engine in every if engine.form == form)
