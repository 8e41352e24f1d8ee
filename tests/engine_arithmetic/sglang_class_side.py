"""SGLang's own model classes on the CPU: what their loaders take from exported folders. Imports nothing of ours.

    python sglang_class_side.py JOB.json

The job says wheel (of an SGLang release, which needs no installation), heads (exported folders) and answer, the file to write:
per head, the class, parameters that no tensor reached, tensors that reached no parameter, and an error of the loader.

The classes' modules are the wheel's. Everything around them (kernels, parallel layers, the server) is replaced by plain
stand-ins of one rank, so constructors and `load_weights` run as released: names, shapes, stacked parameters, config keys. They
compute nothing.
"""

import importlib.abc
import importlib.util
import json
import sys
import tempfile
import types
import zipfile
from pathlib import Path
from unittest.mock import MagicMock

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig

REAL = {
    f"sglang.srt.{name}"
    for name in (
        "models.llama", "models.llama_eagle", "models.llama_eagle3", "models.dflash", "models.dspark", "speculative.dflash_utils",
        "speculative.dspark_components.dspark_config", "models.kimi_k25_eagle3",
    )
}  # fmt: skip
MODULES = {"LlamaForCausalLMEagle": "llama_eagle", "LlamaForCausalLMEagle3": "llama_eagle3", "DFlashDraftModel": "dflash",
           "Qwen3DSparkModel": "dspark", "Eagle3DeepseekV2ForCausalLM": "kimi_k25_eagle3"}  # fmt: skip
REACHED: set[int] = set()  # ids of the parameters that a loader wrote to
USED: set[int] = set()  # ids of the tensors that it wrote


def write(param, loaded, shard=None):
    sizes = getattr(param, "shards", {})
    part = param.data if shard is None else param.data.narrow(0, *sizes[shard])
    if part.shape != loaded.shape:
        raise ValueError(f"shape {list(loaded.shape)} for {list(part.shape)}")
    part.copy_(loaded)
    USED.add(id(loaded))
    param.seen = {*getattr(param, "seen", set()), shard}
    if param.seen >= set(sizes):
        REACHED.add(id(param))


def parameter(*shape, shards=()):
    made = nn.Parameter(torch.zeros(*shape), requires_grad=False)
    made.weight_loader, made.shards, begin = write, {}, 0
    for name, size in shards:
        made.shards[name] = (begin, size)
        begin = begin + size
    return made


class Anything(nn.Module):
    """Attributes that a stand-in lacks are mocks."""

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("weight", "bias"):
                raise
            return MagicMock(name=name)


class Linear(Anything):
    def __init__(self, input_size, output_size, bias=True, **_):
        super().__init__()
        self.weight, self.bias = (
            parameter(output_size, input_size),
            parameter(output_size) if bias else None,
        )


class Stacked(Anything):
    def make(self, width, shards, bias):
        total = sum(size for _, size in shards)
        self.weight = parameter(total, width, shards=shards)
        self.bias = parameter(total, shards=shards) if bias else None


class QKV(Stacked):
    def __init__(
        self, hidden_size, head_size, total_num_heads, total_num_kv_heads=None, bias=True, **_
    ):
        super().__init__()
        queries = total_num_heads * head_size
        keys = (total_num_kv_heads or total_num_heads) * head_size
        self.make(hidden_size, [("q", queries), ("k", keys), ("v", keys)], bias)


class Merged(Stacked):
    def __init__(self, input_size, output_sizes, bias=True, **_):
        super().__init__()
        self.make(input_size, list(enumerate(output_sizes)), bias)


class Table(Anything):
    def __init__(self, rows, width, **_):
        super().__init__()
        self.num_embeddings = rows
        self.weight = parameter(rows, width)


class Norm(Anything):
    def __init__(self, size, eps=1e-6, **_):
        super().__init__()
        self.variance_epsilon = eps
        self.weight = parameter(size)


class Latent(Anything):
    def __init__(
        self, hidden_size, num_heads, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, q_lora_rank, kv_lora_rank, **_
    ):  # fmt: skip
        super().__init__()
        self.qk_nope_head_dim = qk_nope_head_dim
        self.qk_rope_head_dim = qk_rope_head_dim
        self.v_head_dim = v_head_dim
        self.q_lora_rank = q_lora_rank
        self.kv_lora_rank = kv_lora_rank
        self.q_a_layernorm = Norm(q_lora_rank)
        self.kv_a_layernorm = Norm(kv_lora_rank)
        self.q_b_proj = Linear(
            q_lora_rank, num_heads * (qk_nope_head_dim + qk_rope_head_dim), False
        )
        self.kv_b_proj = Linear(kv_lora_rank, num_heads * (qk_nope_head_dim + v_head_dim), False)
        self.o_proj = Linear(num_heads * v_head_dim, hidden_size, False)


class GatedMLP(Anything):
    def __init__(self, hidden_size, intermediate_size, **_):
        super().__init__()
        self.gate_up_proj = Merged(hidden_size, [intermediate_size] * 2, False)
        self.down_proj = Linear(intermediate_size, hidden_size, False)


class Struct:
    def __init_subclass__(cls, **_):
        pass

    def __init__(self, **fields):
        vars(self).update(fields)


STAND_INS = {
    "QKVParallelLinear": QKV, "MergedColumnParallelLinear": Merged, "RowParallelLinear": Linear,
    "ColumnParallelLinear": Linear, "get_rope_config": lambda _: (1e4, None),
    "ReplicatedLinear": Linear, "VocabParallelEmbedding": Table, "ParallelLMHead": Table, "RMSNorm": Norm, "GemmaRMSNorm": Norm,
    "default_weight_loader": write, "add_prefix": lambda name, prefix: f"{prefix}.{name}",
    "get_tensor_model_parallel_world_size": lambda: 1, "get_tensor_model_parallel_rank": lambda: 0, "Struct": Struct,
    "get_attention_tp_size": lambda: 1, "get_attention_tp_rank": lambda: 0, "is_npu": lambda: False, "is_hip": lambda: False,
    "get_parallel": lambda: types.SimpleNamespace(tp_size=1, tp_rank=0, attn_tp_size=1, attn_tp_rank=0, pp_group=MagicMock()),
    "append_stages": lambda *_: (None, None), "get_layer_id": lambda name: None,
    "maybe_remap_kv_scale_name": lambda name, _: name, "DeepseekV2AttentionMLA": Latent, "DeepseekV2MLP": GatedMLP,
    "get_embedding_tp_kwargs": dict,
}  # fmt: skip


class Flags:
    """SGLang's environment variables: all off, as by default."""

    def __getattr__(self, name):
        return types.SimpleNamespace(get=lambda: False)


STAND_INS["envs"] = Flags()


class Stub(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return STAND_INS.get(name) or MagicMock(name=name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, root):
        self.root = root

    def find_spec(self, name, path=None, target=None):
        if name in REAL:
            return importlib.util.spec_from_file_location(
                name, self.root / (name.replace(".", "/") + ".py")
            )
        if name.partition(".")[0] in ("sglang", "sgl_kernel", "msgspec", "sgl_kernel_npu"):
            return importlib.util.spec_from_loader(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Stub(spec.name)

    def exec_module(self, module):
        pass


def loaded(folder: str) -> dict[str, object]:
    described = json.loads((Path(folder) / "config.json").read_text())
    config = AutoConfig.from_pretrained(folder)
    name = described["architectures"][0]
    module = importlib.import_module(f"sglang.srt.models.{MODULES[name]}")
    model = getattr(module, name)(config)
    # Plain torch parameters have no loader of their own, which the default one serves.
    weights = load_file(Path(folder) / "model.safetensors")
    REACHED.clear()
    USED.clear()
    found: dict[str, object] = {"class": name, "error": ""}
    try:
        model.load_weights(iter(weights.items()))
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
    missing = [key for key, value in model.named_parameters() if id(value) not in REACHED]
    return {
        **found,
        "missing": sorted(missing),
        "unused": sorted(k for k, v in weights.items() if id(v) not in USED),
    }


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    with tempfile.TemporaryDirectory() as root:
        with zipfile.ZipFile(job["wheel"]) as wheel:
            for name in wheel.namelist():
                if name.removesuffix(".py").replace("/", ".") in REAL:
                    wheel.extract(name, root)
        sys.meta_path.insert(0, Finder(Path(root)))
        heads = [loaded(folder) for folder in job["heads"]]
    Path(job["answer"]).write_text(json.dumps({"heads": heads}))


if __name__ == "__main__":
    main()
