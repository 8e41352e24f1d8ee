"""vLLM's own class of a DSpark drafter, loaded by vLLM beside a target, computed without its scheduler; imports nothing of ours.

    python vllm_block_side.py JOB.json

The job names target (a folder) and heads (exported folders, each next to a file HEAD.inputs.safetensors: features [t, f*h] of
the context, root [1], the last committed token) and answer, the file to write. HEAD.outputs.safetensors gets tokens [depth],
log_probs [depth, d] of each drafted token's draft vocabulary, and confidence [depth].

vLLM creates the class, maps names, copies weights, lends embedding and head, and computes all but the attention over pages of a
cache and the loop over a block's tokens, which are a GPU's (v1/worker/gpu/spec_decode/dspark/speculator.py, _sample_sequential).
"""

import json
import os
import sys


def main() -> None:
    with open(sys.argv[1]) as file:
        job = json.load(file)
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the only runner that has the method
    import torch
    import vllm
    from safetensors.torch import load_file, save_file
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.model_loader import get_model
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
    from vllm.v1.worker.gpu.spec_decode.dspark.utils import load_dspark_model
    from vllm.v1.worker.gpu.spec_decode.utils import get_parallel_drafting_token_id

    context: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(self, query, key, value, *_, **__):
        """A block over its context and all of itself."""
        query, key, value = (
            part.view(len(part), -1, self.head_size).transpose(0, 1) for part in (query, key, value)
        )
        before = [part.transpose(0, 1) for part in context[self.layer_name]]
        key = torch.cat((before[0], key), 1)
        value = torch.cat((before[1], value), 1)
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, scale=self.impl.scale, enable_gqa=True
        )
        return out.transpose(0, 1).flatten(1)

    def normalize(self, all_k):
        """The norm of each layer [layers, t, kv_heads, e]; vLLM's CPU kernel takes the first layer's weight for all."""
        scaled = torch.nn.functional.rms_norm(all_k, all_k.shape[-1:], eps=self._rms_norm_eps)
        return scaled * self._k_norm_weights[:, None, None]

    Attention.forward = attend
    DFlashQwen3Model._normalize_context_k = normalize
    VllmConfig._validate_v2_model_runner = lambda self: (
        None
    )  # it asks for Triton, and no runner is made
    if not torch.accelerator.is_available():
        torch.accelerator.empty_cache = lambda: (
            None
        )  # which vLLM calls after loading, and torch refuses on a CPU
    found = []
    for number, folder in enumerate(job["heads"]):
        with open(f"{folder}/config.json") as file:
            described = json.load(file)
        depth = described["block_size"]
        config = EngineArgs(
            model=job["target"],
            dtype="float32",
            max_model_len=256,
            enforce_eager=True,
            speculative_config={
                "method": "dspark",
                "model": folder,
                "num_speculative_tokens": depth,
            },
        ).create_engine_config()
        with set_current_vllm_config(config), torch.no_grad():
            if number == 0:
                init_distributed_environment(1, 0, f"file://{job['answer']}.ranks", 0, "gloo")
                initialize_model_parallel()
            model = load_dspark_model(get_model(vllm_config=config), config)
            for layer in model.model.layers:
                attention = layer.self_attn.attn

                def keep(held, key, value, *_):
                    context[held.layer_name] = key, value

                attention.impl.do_kv_cache_update = keep
                assert layer.self_attn.causal is False
            hf = config.speculative_config.draft_model_config.hf_config
            given = load_file(f"{folder}.inputs.safetensors")
            features = given["features"]
            root = given["root"]
            places = torch.arange(len(features))
            states = model.combine_hidden_states(features)
            model.precompute_and_store_context_kv(states, places, places)
            anchor = getattr(hf, "sample_from_anchor", True)  # as the speculator reads it
            size = depth if anchor else depth + 1
            masks = torch.full((size - 1,), get_parallel_drafting_token_id(hf))
            out = model(
                torch.cat((root, masks)), torch.arange(len(features), len(features) + size)
            )[-depth:]
            base = model.compute_draft_logits(out)
            previous = root
            tokens = []
            rows = []
            confidence = []
            for k in range(depth):
                embed = model.markov_embed(previous)
                logits = base[k : k + 1] + model.markov_bias(embed)
                previous = model.map_draft_to_target(logits.argmax(-1))
                confidence.append(model.compute_confidence(out[k : k + 1], embed))
                tokens.append(previous)
                rows.append(logits.log_softmax(-1)[0])
        outputs = {
            "tokens": torch.cat(tokens),
            "log_probs": torch.stack(rows),
            "confidence": torch.cat(confidence),
        }
        save_file(
            {name: value.contiguous() for name, value in outputs.items()},
            f"{folder}.outputs.safetensors",
        )
        found.append({"class": type(model).__name__})
    with open(job["answer"], "w") as file:
        json.dump({"heads": found, "version": vllm.__version__}, file)


if __name__ == "__main__":
    main()
