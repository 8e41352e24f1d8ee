"""`drafttrain generate`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from drafttrain.command import AnyNumber, command, result_of
from drafttrain.flags import NO_KWARGS, Device, TemplateKwargs
from drafttrain.values import (
    Amount,
    AnyText,
    Count,
    Dtype,
    Fraction,
    Penalty,
    Place,
    PositiveFraction,
    Seed,
    Size,
    Temperature,
)

if TYPE_CHECKING:
    from drafttrain.files import Json


@command
def generate(
    *vllm_flags: Annotated[AnyText, AnyNumber()],
    target: Place | Path,
    prompts: Place | Path,
    output: Place | Path,
    dtype: Dtype = "auto",
    device: Device = "auto",
    trust_remote_code: bool = False,
    chat_template_kwargs: TemplateKwargs = NO_KWARGS,
    temperature: Temperature = 1.0,
    top_p: PositiveFraction = 1.0,
    top_k: Size = 0,
    min_p: Fraction = 0.0,
    repetition_penalty: Penalty | None = None,
    seed: Seed = 0,
    max_new_tokens: Count = 512,
    max_length: Count = 2048,
    slots: Literal["auto"] | Count = "auto",
    max_tokens: Size = 0,
    max_minutes: Amount = 0.0,
    features: str = "none",
    backend: Literal["local", "openai", "vllm", "existing"] = "local",
    url: Sequence[str] = (),
    model: str = "",
    tensor_parallel_size: Count | None = None,
    pipeline_parallel_size: Count | None = None,
    quantization: AnyText | None = None,
    allow_urls: bool = False,
    overwrite: bool = False,
) -> Json:
    """Let the target answer the prompts: the distillation data.

    Conversations are regenerated turn by turn; token ids, response spans and finish reasons are
    written to DIR. An interrupted run continues when run again; several processes share the work.
    Prompts may hold tools and tool turns: a recorded result follows where the target makes the
    recorded calls. Prompts may hold images (drafttrain prompts stores them), which are copied into
    DIR.

    ```
    drafttrain generate --target smollm2-135m --prompts prompts.jsonl --output data --max-new-tokens 256
    accelerate launch --num_processes 8 -m drafttrain.cli generate --target T --prompts P --output DIR
    drafttrain generate --target T --prompts P --output DIR --backend openai --url http://a:8000/v1 --url http://b:8000/v1
    drafttrain generate --target T --prompts P --output DIR --chat-template-kwargs '{"enable_thinking": false}'
    drafttrain generate --target T --prompts P --output DIR --backend vllm --tensor-parallel-size 8 -- --enable-expert-parallel
    drafttrain generate --target T --prompts chats.jsonl --output DIR --backend existing     # keep the answers in the file
    ```

    Args:
        vllm_flags: for --backend vllm: any other flags of `vllm serve`, such as --
            --distributed-executor-backend ray
        target: short name, folder or Hub id
        prompts: JSONL: {"id", "messages": [...], perhaps "tools"} or {"id", "text"} a line
        output: folder of the data set
        dtype: float32, bfloat16, float16 or auto (bfloat16 where the device has it)
        device: cpu, cuda, cuda:N or auto
        trust_remote_code: run model code that comes with the target
        chat_template_kwargs: variables of the target's chat template, as JSON:
            '{"enable_thinking": false}'; a row's own chat_template_kwargs come first
        temperature: sampling temperature; 0 decodes greedily
        top_p: share of probability to sample from; 1 keeps all tokens
        top_k: number of likeliest tokens to sample from; 0 keeps all
        min_p: least probability of a token, as a share of the likeliest's; 0 keeps all tokens
        repetition_penalty: also of greedy decoding; 1 turns it off (default: as the target's
            generation_config says)
        seed: seed of the sampling
        max_new_tokens: most tokens of a response
        max_length: most tokens of a conversation
        slots: sequences that run together; --backend openai: requests per server (default: by
            memory; 32 requests)
        max_tokens: stop after this many response tokens of this process
        max_minutes: stop after this time; running responses are cut and marked (servers and
            vllm finish them)
        features: target states to store: none, default (three layers), wide (six) or 2,15,27
        backend: what answers: the target here, servers, vLLM started here, or nothing: the
            file's own answers stay
        url: server of --backend openai; repeat it for several
        model: model name in requests to the server (default: the first it lists)
        tensor_parallel_size: for --backend vllm: GPUs that share each layer
        pipeline_parallel_size: for --backend vllm: groups of GPUs that share the layers
        quantization: for --backend vllm: method, such as fp8 or awq (default: as the target's
            config says)
        allow_urls: download images that prompts name by URL
        overwrite: replace the data set in --output, which is deleted when the new one is
            complete; other files in the folder stay
    """
    return result_of("data.generate", locals())
