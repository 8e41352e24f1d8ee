"""What an 8B target costs on one GPU, from random weights of its shapes: no download, no network.

    train      an EAGLE-3 step with the target online: tokens per second, and peak memory against the dry step's prediction
    decode     a round's time, plain, with chains and with trees, against the time to read the target's weights once
    generate   response tokens per second of the data engine
    predict    the memory of `train`, without a GPU

    python eval/bench_gpu.py decode --output eval/results/gpu_decode_h100.json
    python eval/bench_gpu.py train --rows 4 --length 4096 --output eval/results/gpu_train_h100.json

The target's next token is a fixed permutation of its last one, far from any tie, so its text is known beforehand and does not
depend on rounding. Random drafters are never right. For `decode`, their first path therefore takes the target's own continuation,
token by token with the probability `--accept`, so that verification and commit do what they do for a trained head; this costs a
round one upload of some tokens. Reading the weights is timed as a copy of a large buffer, bytes read plus written.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from benchmark import result_path, write_result
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from drafttrain.batch import Batch, TokenTree
from drafttrain.drafters.base import StepInputs
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.forwarding import ForwardingDrafter
from drafttrain.drafters.registry import kind_class
from drafttrain.environment import peak_memory, reset_peak
from drafttrain.inference import Decoder, SamplingParams
from drafttrain.inference.responses import ResponseEngine, ResponseRequest
from drafttrain.states.source import TargetSource
from drafttrain.target import Target
from drafttrain.target.devices import DTYPES, resolve_device
from drafttrain.training.dry_step import StepSetting, dry_step

ROUND_GOAL = 1.25  # a round of a chain of 5, in readings of the target's weights
MEMORY_GOAL = 0.15  # how far the prediction may be off
# layers, hidden size, inner size, heads, key heads, vocabulary: Llama-3.1-8B, SmolLM2-135M, and one that any machine runs
SHAPES = {
    "8b": (32, 4096, 14336, 32, 8, 128_256),
    "135m": (30, 576, 1536, 9, 3, 49_152),
    "tiny": (4, 32, 64, 4, 2, 300),
}
TREES = ("none", "chain:5", "dynamic:8,10,60")


def make_config(shape: str) -> LlamaConfig:
    layers, hidden, inner, heads, kv_heads, vocabulary = SHAPES[shape]
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        vocab_size=vocabulary,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        eos_token_id=None,
    )


def make_target(shape: str, dtype: torch.dtype, device: torch.device) -> Target:
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(
        dtype
    )  # float32 weights of 8B parameters take 32 GB before they are rounded
    try:
        with device:
            model = LlamaForCausalLM(make_config(shape)).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(default)
    write_permutation(model)
    return Target.wrap(model, None, name=f"random-{shape}", dtype=dtype)


def next_tokens(vocabulary: int) -> Tensor:
    """[v] the token that follows each token."""
    return torch.randperm(vocabulary, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def write_permutation(model: LlamaForCausalLM) -> None:
    """Makes `next_tokens` the model's text: layers that compute as ever but add little, and a head that knows each embedding.

    Random weights alone give near ties, which batched and single passes round differently.
    """
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(1e-4)
        layer.mlp.down_proj.weight.mul_(1e-4)
    embeddings = model.get_input_embeddings().weight  # [v, h]
    following = next_tokens(len(embeddings)).to(embeddings.device)
    model.lm_head.weight[following] = embeddings


def continuation(prompt: list[int], count: int, following: Tensor) -> list[int]:
    """The `count` tokens that the target writes behind a prompt."""
    text = []
    token = prompt[-1]
    for _ in range(count):
        token = int(following[token])
        text.append(token)
    return text


def make_drafter(target: Target, words: int, device: torch.device) -> Any:
    cls: Any = kind_class("eagle3")
    with device:
        drafter = cls(cls.config_class.for_target(target, draft_vocab_size=words))
    drafter.kept_ids.copy_(torch.arange(words))
    drafter = drafter.to(device)
    drafter.bind(target)
    return drafter


def prompts_of(args: argparse.Namespace, target: Target, count: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(args.seed)
    return torch.randint(0, target.vocab_size, (count, args.prompt), generator=draw).tolist()


# -- training ---------------------------------------------------------------------------------------------------------


def train(args: argparse.Namespace, device: torch.device) -> None:
    dtype = DTYPES[args.dtype]
    target = make_target(args.shape, dtype, device)
    drafter = make_drafter(target, args.words, device).float().train()
    if args.gradient_checkpointing:
        drafter.gradient_checkpointing_enable()
    source = TargetSource(target, drafter.feature_layers, drafter.kept_ids)
    trained = [x for x in drafter.parameters() if x.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=device.type == "cuda")
    ids = torch.randint(0, target.vocab_size, (args.rows, args.length))
    mask = (torch.arange(args.length) >= args.prompt).repeat(args.rows, 1)
    batch = Batch(
        ids, torch.full((args.rows,), args.length), mask, torch.full((args.rows,), -1)
    ).to(device)
    half = torch.bfloat16 if args.autocast else None

    def step() -> float:
        began = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast(device.type, half, enabled=args.autocast):
            given = source(batch)
            total = torch.tensor(int(mask.sum()), device=device)
            made = drafter(StepInputs(batch, target.embed(batch.input_ids), *given, total))
        made.loss.backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    step()
    reset_peak(device)
    seconds = [step() for _ in range(args.repeats)]
    peak = peak_memory(device) / 1e9
    predicted = predict(args)
    off = abs(predicted["total"] / peak - 1) if peak else None
    speed = args.rows * args.length / statistics.median(seconds)
    shown = "none" if off is None else f"{off:.0%}"
    print(
        f"{speed:,.0f} tokens/s, peak {peak:.1f} GB, predicted {predicted['total']:.1f} GB, off by {shown}"
    )
    sides = {"ours": {"tokens_per_second": round(speed, 1), "seconds": seconds, "peak_gb": peak}}
    more = {
        "predicted_gb": predicted,
        "memory_off": off,
        "memory_goal": MEMORY_GOAL,
        "autocast": args.autocast,
    }
    shapes = {name: getattr(args, name) for name in ("rows", "length", "prompt")}
    write_result(
        args.output,
        predicted["total"] / peak if peak else 0.0,
        1.0,
        sides,
        device,
        **more,
        **shapes,
    )


def predict(args: argparse.Namespace) -> dict[str, Any]:
    """Gigabytes by part, see `StepMemory`, with AdamW's two float32 states per trained weight."""
    cls: Any = kind_class("eagle3")
    step = dry_step(
        make_config(args.shape),
        StepSetting(
            rows=args.rows,
            length=args.length,
            prompt=args.prompt,
            target_dtype=DTYPES[args.dtype],
            autocast=torch.bfloat16 if args.autocast else None,
            checkpointing=args.gradient_checkpointing,
        ),
        "kl",
        lambda target: cls(cls.config_class.for_target(target, draft_vocab_size=args.words)),
    )
    parts = {"target": step.target, "drafter": step.drafter, "gradients": step.gradients}
    parts["optimizer"] = 8 * step.trained
    parts |= {"features": step.features, "logits": step.logits, "activations": step.activations}
    parts["total"] = sum(parts.values())
    return {**{name: size / 1e9 for name, size in parts.items()}, "at": step.at}


# -- decoding ---------------------------------------------------------------------------------------------------------


class Simulated(ForwardingDrafter):
    """A drafter whose first path takes the true continuation, each token with a probability until one fails."""

    def __init__(self, inner: Any, truths: dict[tuple[int, ...], list[int]], accept: float):
        super().__init__(inner)
        self.truths = truths
        self.accept = accept
        self.random = random.Random(0)
        self.read: dict[
            int, tuple[int, list[int]]
        ] = {}  # by session: tokens read, and the whole text

    def start(self, prompt_ids: Tensor, max_length: int) -> Any:
        session = self.inner.start(prompt_ids, max_length)
        prompt = prompt_ids.tolist()
        self.read[id(session)] = (1, prompt + self.truths[tuple(prompt)])
        return session

    def extend_all(
        self, sessions: Sequence[Any], tokens: Sequence[Tensor], features: Sequence[Tensor]
    ) -> None:
        for session, new in zip(sessions, tokens, strict=True):
            count, text = self.read[id(session)]
            self.read[id(session)] = (count + len(new), text)
        self.inner.extend_all(sessions, tokens, features)

    def propose_all(self, sessions: Sequence[Any], spec: Any, samplers: Any) -> list[TokenTree]:
        trees = self.inner.propose_all(sessions, spec, samplers)
        return [
            self._corrected(session, tree) for session, tree in zip(sessions, trees, strict=True)
        ]

    def _corrected(self, session: Any, tree: TokenTree) -> TokenTree:
        place, text = self.read[id(session)]
        node = -1
        chosen = []
        found = []
        for true in text[place:]:
            child = next((i for i, parent in enumerate(tree.parents) if parent == node), None)
            if child is None or self.random.random() >= self.accept:
                break
            chosen = [*chosen, child]
            found = [*found, true]
            node = child
        if not chosen:
            return tree
        both = torch.tensor([chosen, found], device=tree.tokens.device)  # one upload
        return replace(tree, tokens=tree.tokens.index_copy(0, both[0], both[1]))


def read_seconds(target: Target, device: torch.device) -> float:
    """Seconds to read the target's weights once (its embedding is not read), at the speed of a large copy."""
    size = (
        sum(x.nbytes for x in target.model.parameters())
        - target.model.get_input_embeddings().weight.nbytes
    )
    source = torch.empty(min(size, 2**30), dtype=torch.uint8, device=device)
    into = torch.empty_like(source)
    times = []
    for _ in range(8):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        into.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return size * statistics.median(times[2:]) / (2 * source.nbytes)


def decode(args: argparse.Namespace, device: torch.device) -> None:
    target = make_target(args.shape, DTYPES[args.dtype], device)
    drafter = make_drafter(target, args.words, device).to(DTYPES[args.dtype]).eval()
    reading = read_seconds(target, device)
    prompts = prompts_of(args, target, args.batch)
    options: dict[str, Any] = {"eos_ids": (), "max_rows": args.batch}
    following = next_tokens(target.vocab_size)
    truths = [continuation(prompt, args.tokens, following) for prompt in prompts]
    simulated = Simulated(
        drafter, {tuple(p): t for p, t in zip(prompts, truths, strict=True)}, args.accept
    )
    sides: dict[str, Any] = {}
    fused = target._native
    # Plain decoding by the model's own layers, then all with fused ones.
    for tree in ("own layers", *TREES):
        target._native = fused if tree in TREES else None
        target.release_steps()
        decoder = Decoder(
            target,
            simulated if tree in TREES[1:] else None,
            spec=TreeSpec.parse(tree if tree in TREES else "none"),
            **options,
        )
        seconds = []
        made = []
        for _ in range(args.repeats + 1):  # the first one captures
            began = time.perf_counter()
            made = decoder.generate(prompts, max_new_tokens=args.tokens)
            # Accepted lengths differ from run to run, and with them the shapes that are captured.
            seconds.append(time.perf_counter() - began - decoder.capture_seconds)
        rounds = max(one.stats.target_passes for one in made)
        committed = sum(len(one.tokens) for one in made)
        best = statistics.median(seconds[1:])
        sides[tree] = {
            "round_ms": 1000 * best / rounds,
            "round_in_readings": best / rounds / reading,
            "tokens_per_second": committed / best,
            "accepted_length": committed / sum(one.stats.target_passes for one in made),
            "as_expected": sum(one.tokens == truth for one, truth in zip(made, truths, strict=True))
            / len(made),
        }
        print(tree, {name: round(value, 3) for name, value in sides[tree].items()}, flush=True)
    ratio = sides["chain:5"]["tokens_per_second"] / sides["none"]["tokens_per_second"]
    more = {
        "weights_ms": 1000 * reading,
        "round_goal": ROUND_GOAL,
        "accept": args.accept,
        "batch": args.batch,
    }
    write_result(
        args.output,
        ratio,
        1.0,
        sides,
        device,
        round_in_readings=sides["chain:5"]["round_in_readings"],
        **more,
    )


# -- generation -------------------------------------------------------------------------------------------------------


def generate(args: argparse.Namespace, device: torch.device) -> None:
    target = make_target(args.shape, DTYPES[args.dtype], device)
    prompts = prompts_of(args, target, args.batch)
    requests = [ResponseRequest(str(i), ids, args.tokens, ()) for i, ids in enumerate(prompts)]
    speeds = []
    for _ in range(args.repeats + 1):
        engine = ResponseEngine(target, slots=args.batch, max_length=args.prompt + args.tokens)
        began = time.perf_counter()
        tokens = sum(len(made.tokens) for made in engine.run(requests, SamplingParams(1.0)))
        speeds.append(tokens / (time.perf_counter() - began))
    speed = statistics.median(speeds[1:])
    print(f"{speed:,.0f} response tokens/s at batch {args.batch}")
    sides = {"ours": {"tokens_per_second": round(speed, 1), "runs": speeds}}
    write_result(
        args.output,
        1.0,
        1.0,
        sides,
        device,
        batch=args.batch,
        tokens=args.tokens,
        prompt=args.prompt,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job", choices=["train", "decode", "generate", "predict"])
    parser.add_argument("--shape", choices=list(SHAPES), default="8b")
    parser.add_argument("--words", type=int, default=32_000, help="of the drafter's vocabulary")
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=list(DTYPES),
        help="of the target, and of a drafter that decodes",
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=1, help="train: rows of a step")
    parser.add_argument("--length", type=int, default=4096, help="train: tokens of a row")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument(
        "--no-autocast", dest="autocast", action="store_false", help="train: multiply in float32"
    )
    parser.add_argument(
        "--gradient-checkpointing",
        action="store_true",
        help="train: compute a depth's activations twice",
    )
    parser.add_argument(
        "--batch", type=int, default=1, help="decode and generate: sequences at a time"
    )
    parser.add_argument(
        "--tokens", type=int, default=128, help="decode and generate: new tokens per prompt"
    )
    parser.add_argument(
        "--accept",
        type=float,
        default=0.75,
        help="decode: chance that a drafted token is the target's",
    )
    parser.add_argument("--output", type=result_path)
    args = parser.parse_args()
    if args.job == "predict":
        print(
            {
                name: round(size, 2) if isinstance(size, float) else size
                for name, size in predict(args).items()
            }
        )
        return
    {"train": train, "decode": decode, "generate": generate}[args.job](
        args, resolve_device(args.device)
    )


if __name__ == "__main__":
    main()
