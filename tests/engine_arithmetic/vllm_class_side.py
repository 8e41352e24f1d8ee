"""vLLM's own model class of an EAGLE-3 head, loaded by vLLM and computed without its scheduler; imports nothing of ours.

    python vllm_class_side.py JOB.json

The job names target (a folder) and heads (exported folders, each next to a file HEAD.inputs.safetensors: table [v, h], the
embedding; tokens [t]; features [t, f*h]) and answer, the file to write. HEAD.outputs.safetensors gets logits [2, v] over the
target's vocabulary: of the last token, and of the next depth, which reads its likeliest token and its state.

vLLM creates the class, maps names and copies weights, and runs every layer; only the attention over pages of a cache, which needs
a running engine, is replaced by a plain one.
"""

import json
import sys


def main() -> None:
    with open(sys.argv[1]) as file:
        job = json.load(file)
    import torch
    import vllm
    from safetensors.torch import load_file, save_file
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention import Attention, MLAAttention
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.model_executor.model_loader import get_model

    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(self, query, key, value, *_, **__):
        """query [t, heads * e] after the keys and values of earlier calls, from position 0 on."""
        query, key, value = (
            part.view(len(part), -1, self.head_size) for part in (query, key, value)
        )
        return over(self, query, key, value, self.impl.scale, self.sliding_window)

    def attend_latent(self, query, narrow, rotated, *_, **__):
        """query [t, heads, e], normed narrow vectors [t, rank], rotated keys of all heads [t, 1, r]."""
        wide = self.kv_b_proj(narrow)[0].view(len(narrow), self.num_heads, -1)
        key, value = wide.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        rotated = rotated.view(len(narrow), 1, -1).expand(-1, self.num_heads, -1)
        key = torch.cat((key, rotated), dim=-1)
        return over(self, query.view(*key.shape), key, value, self.scale, None)

    def over(self, query, key, value, scale, window):
        """[t, heads, e] each -> [t, heads * width of the values]."""
        query, key, value = (part.transpose(0, 1) for part in (query, key, value))
        before = seen.get(self.layer_name)
        if before is not None:
            key = torch.cat((before[0], key), 1)
            value = torch.cat((before[1], value), 1)
        seen[self.layer_name] = key, value
        count = query.shape[1]
        total = key.shape[1]
        distance = torch.arange(total - count, total)[:, None] - torch.arange(total)
        mask = distance >= 0
        if window:
            mask &= distance < window
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scale, enable_gqa=True
        )
        return out.transpose(0, 1).flatten(1)

    Attention.forward = attend
    MLAAttention.forward = attend_latent
    # Of queries by head, which latent attention has, vLLM 0.32's operation for CPUs rotates the first head alone.
    RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native
    if not torch.accelerator.is_available():
        torch.accelerator.empty_cache = lambda: (
            None
        )  # which vLLM calls after loading, and torch refuses on a CPU
    found = []
    for number, folder in enumerate(job["heads"]):
        config = EngineArgs(
            model=job["target"],
            dtype="float32",
            max_model_len=256,
            enforce_eager=True,
            speculative_config={"method": "eagle3", "model": folder, "num_speculative_tokens": 2},
        ).create_engine_config()
        with set_current_vllm_config(config), torch.no_grad():
            if number == 0:
                init_distributed_environment(1, 0, f"file://{job['answer']}.ranks", 0, "gloo")
                initialize_model_parallel()
            model = get_model(
                vllm_config=config, model_config=config.speculative_config.draft_model_config
            )
            given = load_file(f"{folder}.inputs.safetensors")
            # The engine puts the target's embedding here.
            model.model.embed_tokens.weight.data[: len(given["table"])] = given["table"]
            seen.clear()
            tokens = given["tokens"]
            positions = torch.arange(len(given["tokens"]))
            logits = []
            hidden = model.combine_hidden_states(given["features"])
            for _ in range(2):
                out, state = model(tokens, positions, hidden)
                logits.append(model.compute_logits(out[-1:])[0])
                tokens = logits[-1].argmax()[None]
                positions = positions[-1:] + 1
                hidden = state[-1:]
        save_file({"logits": torch.stack(logits)}, f"{folder}.outputs.safetensors")
        described = config.speculative_config.draft_model_config.hf_config
        layers = getattr(described, "eagle_aux_hidden_state_layer_ids", None) or []
        found.append({"class": type(model).__name__, "feature_layers": list(layers)})
    with open(job["answer"], "w") as file:
        json.dump({"heads": found, "version": vllm.__version__}, file)


if __name__ == "__main__":
    main()
