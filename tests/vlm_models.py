"""Tiny random checkpoints of models that read images, with their processors, built on the spot."""

from __future__ import annotations

import functools
import io
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers as hf
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import pad
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from drafttrain.images import Picture
from drafttrain.target import Target

VOCAB = 300  # 256 bytes, then special tokens
SEEN = 28  # pixels of an image's sides, in most families
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "vocab_size": VOCAB,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
    "initializer_range": 0.2,  # large enough that images change the text
}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": SEEN,
    "patch_size": 14,
    "initializer_range": 0.2,
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
LAYERS = ("sliding_attention", "full_attention", "full_attention")
SQUARE = {"height": SEEN, "width": SEEN}


def _qwen(family, token):
    old = family in ("qwen2_vl", "qwen2_5_vl", "glm4v")
    patch = 14 if old else 16
    vision = {
        "depth": 1,
        "num_heads": 2,
        "patch_size": patch,
        "spatial_merge_size": 2,
        "hidden_size": 32,
        "out_hidden_size": 32,
        "intermediate_size": 48,
        "initializer_range": 0.2,
    }
    vision |= {
        "qwen2_vl": {"embed_dim": 32, "mlp_ratio": 2},
        "qwen2_5_vl": {"fullatt_block_indexes": [0]},
        "qwen3_vl": {"depth": 2, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        "qwen3_5": {"num_position_embeddings": 16},
        "glm4v": {"image_size": 56},
    }[family]
    text = dict(TEXT, rope_parameters=MROPE | ({} if old else {"mrope_interleaved": True}))
    if family == "glm4v":
        text["rope_parameters"] = {
            **MROPE,
            "partial_rotary_factor": 0.5,
            "mrope_section": [1, 1, 2],
        }
    if family == "qwen3_5":
        text["rope_parameters"]["partial_rotary_factor"] = 1.0
        text |= {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        }
    sizes = {"patch_size": patch, "merge_size": 2}
    config = {
        "text_config": text,
        "vision_config": vision,
        "image_token_id": token("<|image|>"),
        "video_token_id": token("<|video|>"),
    }
    if family == "glm4v":
        config |= {
            "image_start_token_id": token("<|begin|>"),
            "image_end_token_id": token("<|end|>"),
        }
        images = hf.Glm4vImageProcessorPil(size=_edges(28, 150), **sizes)
    else:
        config |= {
            "vision_start_token_id": token("<|begin|>"),
            "vision_end_token_id": token("<|end|>"),
        }
        images = hf.Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=84 * 84, **sizes)
    return config, {"image_processor": images, "video_processor": Video()}


def _edges(least, most):
    return {"shortest_edge": least * least, "longest_edge": most * most}


def _gemma3(family, token):
    # Norms after each part make its weights scale-free; a small embedding keeps the last token from winning.
    text = {
        **TEXT,
        "query_pre_attn_scalar": 16,
        "sliding_window": 12,
        "layer_types": list(LAYERS),
        "initializer_range": 0.02,
    }
    return {
        "text_config": text,
        "vision_config": {**TOWER, "vision_use_head": False},
        "mm_tokens_per_image": 4,
        "image_token_index": token("<|image|>"),
        "boi_token_index": token("<|begin|>"),
        "eoi_token_index": token("<|end|>"),
    }, {"image_processor": hf.Gemma3ImageProcessorPil(size=SQUARE), "image_seq_length": 4}


def _gemma4(family, token):
    text = {
        **TEXT,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": VOCAB,
        "global_head_dim": 16,
        "sliding_window": 12,
        "layer_types": list(LAYERS),
        "initializer_range": 0.05,
        "use_bidirectional_attention": "vision",
    }
    vision = {
        **TOWER,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "pooling_kernel_size": 2,
        "position_embedding_size": 64,
        "default_output_length": 70,
    }
    return {
        "text_config": text,
        "vision_config": vision,
        "audio_config": None,
        "image_token_id": token("<|image|>"),
        "boi_token_id": token("<|begin|>"),
        "eoi_token_id": token("<|end|>"),
        "video_token_id": token("<pad>"),
    }, {
        "image_processor": hf.Gemma4ImageProcessorPil(
            patch_size=14, max_soft_tokens=70, pooling_kernel_size=2
        ),
        "video_processor": Video(),
        "feature_extractor": hf.Gemma4AudioFeatureExtractor(),
    }


def _clip(**more):
    return {**TOWER, "model_type": "clip_vision_model", "projection_dim": 32, **more}


def _siglip(**more):
    return {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False, **more}


def _llama(**more):
    return {**TEXT, "model_type": "llama", **more}


def _qwen2(**more):
    return {**TEXT, "model_type": "qwen2", **more}


def _llava(family, token):
    config = {
        "text_config": _llama(),
        "vision_config": _clip(num_hidden_layers=2),
        "image_token_index": token("<|image|>"),
    }
    return config, {
        "image_processor": hf.CLIPImageProcessorPil(size={"shortest_edge": SEEN}, crop_size=SQUARE),
        "patch_size": 14,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }


def _lighton_ocr(family, token):
    config = {
        "text_config": {**TEXT, "model_type": "qwen3"},
        "vision_config": {**TOWER, "model_type": "pixtral", "head_dim": 16},
        "image_token_id": token("<|image|>"),
    }
    images = hf.PixtralImageProcessorPil(
        size={"longest_edge": 56}, patch_size={"height": 28, "width": 28}
    )
    return config, {"image_processor": images}


def _idefics3(family, token):
    images = hf.Idefics3ImageProcessorPil(
        size={"longest_edge": 2 * SEEN}, max_image_size={"longest_edge": SEEN}
    )
    config = {
        "text_config": _llama(),
        "vision_config": {**TOWER},
        "scale_factor": 2,
        "image_token_id": token("<image>"),
    }
    return config, {"image_processor": images, "image_seq_len": 1}


def _internvl(family, token):
    return {
        "text_config": _qwen2(),
        "vision_config": {**TOWER, "image_size": [SEEN, SEEN], "patch_size": [14, 14]},
        "image_token_id": token("<IMG_CONTEXT>"),
        "downsample_ratio": 0.5,
    }, {
        "image_processor": hf.GotOcr2ImageProcessorPil(
            size=SQUARE, crop_to_patches=True, min_patches=1, max_patches=2
        ),
        "video_processor": Video(),
        "image_seq_length": 1,
    }


def _deepseek_vl(family, token):
    return {
        "text_config": _llama(),
        "vision_config": _siglip(),
        "image_token_id": token("<image_placeholder>"),
    }, {
        "image_processor": hf.DeepseekVLImageProcessorPil(size=SQUARE),
        "num_image_tokens": 4,
    }


MARKS = ["<|image|>", "<|video|>", "<|begin|>", "<|end|>"]
IDEFICS = ["<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>"]
IDEFICS += [f"<row_{i}_col_{j}>" for i in (1, 2) for j in (1, 2)]
INTERN = ["<img>", "</img>", "<IMG_CONTEXT>", "<video>"]
_QWEN_TOKENS = {
    "image_token": "<|image|>",
    "video_token": "<|video|>",
    "vision_bos_token": "<|begin|>",
    "vision_eos_token": "<|end|>",
}
_GEMMA = {"image_token": "<|image|>", "boi_token": "<|begin|>", "eoi_token": "<|end|>"}
_GEMMA4 = _GEMMA | {"audio_token": "<|video|>", "boa_token": "<a>", "eoa_token": "</a>"}
_PIXTRAL = {
    "image_token": "<|image|>",
    "image_break_token": "<|video|>",
    "image_end_token": "<|end|>",
}
# Family: what builds config and processor parts, special tokens beside MARKS, those that the tokenizer names, and an
# image's marker in a prompt.
_IN_QWEN = (_qwen, [], _QWEN_TOKENS, "<|begin|><|image|><|end|>")
FAMILIES = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v"), _IN_QWEN),
    "gemma3": (_gemma3, [], _GEMMA, "<|begin|>"),
    "gemma4": (_gemma4, ["<a>", "</a>"], _GEMMA4, "<|image|>"),
    "llava": (_llava, [], {"image_token": "<|image|>"}, "<|image|>"),
    "lighton_ocr": (_lighton_ocr, [], _PIXTRAL, "<|image|>"),
    "idefics3": (_idefics3, IDEFICS, {}, "<image>"),
    "internvl": (
        _internvl,
        INTERN,
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        "<IMG_CONTEXT>",
    ),
    "deepseek_vl": (
        _deepseek_vl,
        ["<image_placeholder>"],
        {"image_token": "<image_placeholder>"},
        "<image_placeholder>",
    ),
}


class Video:
    """Stands for a video processor, which needs torchvision."""


class Built(NamedTuple):
    """A checkpoint on the disk."""

    folder: str
    marker: str  # of an image in a prompt
    processor: Any
    model: Any  # transformers' own

    def load(self):
        """The target, with its processor as if it had loaded that."""
        target = Target.load(self.folder, dtype="float32", device="cpu")
        target.sight._processor = self.processor
        return target

    def logits(self, prompt):
        with torch.no_grad():
            return self.model(input_ids=prompt.ids[None], **prompt.tensors).logits

    def generate(self, prompt, count):
        """The tokens that transformers writes greedily."""
        with torch.no_grad():
            out = self.model.generate(
                input_ids=prompt.ids[None],
                attention_mask=torch.ones_like(prompt.ids[None]),
                **prompt.tensors,
                max_new_tokens=count,
                do_sample=False,
            )
        return out[0, len(prompt) :].tolist()


def build(family, folder):
    """Writes a checkpoint of a family; its processor reads images without torchvision."""
    make, more, named, marker = FAMILIES[family]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<s>", "</s>", "<pad>", *MARKS, *more])  # ids from 256
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens=named,
    )
    config, parts = make(family, tokenizer.convert_tokens_to_ids)
    torch.manual_seed(0)
    made = hf.AutoConfig.for_model(family, **config)
    model = hf.AutoModelForImageTextToText.from_config(made, dtype=torch.float32).eval()
    for weight in model.parameters():
        if weight.ndim > 1 and not weight.any():
            torch.nn.init.normal_(weight, std=0.5)  # Gemma 3's projector would hide all images
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    kind = getattr(hf, PROCESSOR_MAPPING_NAMES[family])

    class Bare(kind):
        def check_argument_for_proper_class(self, _name, argument):  # refuses `Video`
            return type(argument)

    return Built(str(folder), marker, Bare(tokenizer=tokenizer, **parts), model)


def prompt_with(prompt, answer):
    """The prompt with more text behind it."""
    more = torch.tensor(answer, dtype=torch.long)
    tensors = dict(prompt.tensors)
    for name in tensors.keys() & {"mm_token_type_ids", "token_type_ids"}:
        tensors[name] = pad(tensors[name], (0, len(more)))
    return replace(prompt, ids=torch.cat((prompt.ids, more)), tensors=tensors)


@functools.cache
def picture(seed, width=84, height=70):
    """Noise."""
    numbers = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    data = io.BytesIO()
    Image.fromarray(numbers).save(data, "PNG")
    return Picture(data.getvalue())
