"""Seconds to the first token of each turn of a conversation: with the last text kept, and with every prompt read anew.

    python eval/bench_turns.py --target smollm2-135m --drafter runs/drafter+ngram --output eval/results/turns_cpu.json

The turns are questions of one length; each prompt holds the questions and the answers so far, as a chat template renders them.
Both sides answer a turn before the next one, in rotating order, and get the same texts. The headline is the first turn's seconds
over the last turn's, with the text kept: 1 where a long conversation answers as quickly as a new one. Without a drafter, only
plain decoding is measured.
"""

from __future__ import annotations

import argparse
import statistics

from benchmark import alternate, result_path, write_result

from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.registry import load_drafter
from drafttrain.inference import Decoder, Generation
from drafttrain.target import Target

GOAL = 1 / 1.3
QUESTIONS = (
    "Explain in a few sentences how a bicycle stays upright while somebody rides it.",
    "Describe in a few sentences how bread dough rises before a baker bakes it.",
    "Say in a few sentences why the sea is salty while most rivers are not.",
    "Tell me in a few sentences how a library decides which books it keeps.",
    "Summarise in a few sentences what we have talked about until now.",
)


def conversation(decoders: dict[str, Decoder], count: int) -> dict[str, list[Generation]]:
    """Each side's answers to all turns; the text goes on with the first side's."""
    made: dict[str, list[Generation]] = {name: [] for name in decoders}
    first = next(iter(decoders))
    target = decoders[first].target
    messages: list[dict[str, str]] = []
    for number, question in enumerate(QUESTIONS):
        messages.append({"role": "user", "content": question})
        prompt = target.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        names = list(decoders)
        turned = number % len(names)
        for name in names[turned:] + names[:turned]:
            (answer,) = decoders[name].generate([prompt], max_new_tokens=count)
            made[name].append(answer)
        tokens = made[first][-1].tokens
        if any(made[name][-1].tokens != tokens for name in names):
            raise SystemExit(f"turn {number + 1}: the sides' answers differ")
        text = target.tokenizer.decode(tokens, skip_special_tokens=True)
        messages.append({"role": "assistant", "content": text})
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", help="a name of a drafter; none for plain decoding alone")
    parser.add_argument("--tree", default="dynamic:4,4,8@stop=0.1")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=result_path)
    args = parser.parse_args()

    target = Target.load(args.target, args.dtype).pack()
    drafters = {"plain": None}
    if args.drafter:
        drafters["drafted"] = load_drafter(args.drafter, target)
    spec = TreeSpec.parse(args.tree)

    def run() -> dict[str, list[tuple[int, float]]]:
        decoders = {}
        for name, drafter in drafters.items():
            for keep in (True, False):
                side = f"{name}, {'kept' if keep else 'anew'}"
                decoders[side] = Decoder(target, drafter, spec=spec, keep=keep)
        answers = conversation(decoders, args.max_new_tokens)
        return {
            side: [(each.stats.prompt_tokens, each.stats.prefill_seconds) for each in made]
            for side, made in answers.items()
        }

    runs = alternate({"conversation": run}, args.repeats)["conversation"]
    sides = {}
    for side in runs[0]:
        turns = []
        for number, (prompt_tokens, _) in enumerate(runs[0][side]):
            seconds = statistics.median(found[side][number][1] for found in runs)
            turns.append({"prompt_tokens": prompt_tokens, "first_token_seconds": round(seconds, 4)})
        sides[side] = turns
        print(side, turns)
    kept = [turn["first_token_seconds"] for turn in sides["plain, kept"]]
    write_result(
        args.output, kept[0] / kept[-1], GOAL, sides, target.device, dtype=str(target.dtype)
    )


if __name__ == "__main__":
    main()
