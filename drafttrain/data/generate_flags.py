"""`drafttrain generate`: its help and flags."""

from __future__ import annotations

import argparse

from drafttrain.flags import add_sampling_flags, add_target_flags, add_template_flag
from drafttrain.values import Amount, AnyText, Count, Place, Size, adder, value

HELP = """let the target answer the prompts: the distillation data

Conversations are regenerated turn by turn; token ids, response spans and finish reasons are written to DIR. An
interrupted run continues when run again; several processes share the work. Prompts may hold tools and tool turns: a recorded
result follows where the target makes the recorded calls.

  drafttrain generate --target smollm2-135m --prompts prompts.jsonl --output data --max-new-tokens 256
  accelerate launch --num_processes 8 -m drafttrain.cli generate --target T --prompts P --output DIR
  drafttrain generate --target T --prompts P --output DIR --backend openai --url http://a:8000/v1 --url http://b:8000/v1
  drafttrain generate --target T --prompts P --output DIR --chat-template-kwargs '{"enable_thinking": false}'
  drafttrain generate --target T --prompts P --output DIR --backend vllm --tensor-parallel-size 8 -- --enable-expert-parallel
  drafttrain generate --target T --prompts chats.jsonl --output DIR --backend existing     # keep the answers in the file
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser)
    add_target_flags(parser)
    add(
        "--prompts",
        Place,
        required=True,
        help='JSONL: {"id", "messages": [...], perhaps "tools"} or {"id", "text"} a line',
    )
    add_template_flag(parser, "; a row's own chat_template_kwargs come first")
    add("--output", Place, required=True, help="folder of the data set")
    add_sampling_flags(parser, temperature=1.0, penalties=True)
    add("--max-new-tokens", Count, default=512, help="of a response (default: %(default)s)")
    add("--max-length", Count, default=2048, help="tokens of a conversation (default: %(default)s)")
    add(
        "--slots",
        value(Count, or_word="auto"),
        default="auto",
        help="sequences that run together; --backend openai: requests per server (default: by memory; 32 requests)",
    )
    add(
        "--max-tokens",
        Size,
        default=0,
        help="stop after this many response tokens of this process",
    )
    add(
        "--max-minutes",
        Amount,
        default=0,
        help="stop after this time; running responses are cut and marked (servers and vllm finish them)",
    )
    add(
        "--features",
        default="none",
        help="target states to store: none, default (three layers), wide (six) or 2,15,27",
    )
    add("--backend", default="local", choices=["local", "openai", "vllm", "existing"], help="what answers: the target here, "
        "servers, vLLM started here, or nothing: the file's own answers stay")  # fmt: skip
    add(
        "--url",
        action="append",
        default=[],
        help="server of --backend openai; repeat it for several",
    )
    add(
        "--model",
        default="",
        help="model name in requests to the server (default: the first it lists)",
    )
    add_vllm_flags(parser)
    add("--overwrite", action="store_true", help="replace the data set in --output, which is deleted when the new one is "
        "complete; other files in the folder stay")  # fmt: skip


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that `engine_options` reads."""
    add = adder(parser)
    prefix = "for --backend vllm: "
    add("--tensor-parallel-size", Count, help=prefix + "GPUs that share each layer")
    add("--pipeline-parallel-size", Count, help=prefix + "groups of GPUs that share the layers")
    add(
        "--quantization",
        AnyText,
        help=prefix + "method, such as fp8 or awq (default: as the target's config says)",
    )
    more = "any other flags of `vllm serve`, such as -- --distributed-executor-backend ray"
    add("vllm_flags", AnyText, nargs="*", default=[], metavar="-- FLAGS", help=prefix + more)
