"""Accepted length of heads on prompts with images: trained with images, trained without, and n-grams.

A tiny LLaVA learns easy-vqa until it answers in sentences, on this machine. Then drafttrain's commands make heads for
it: prompts, generate, train, eval. All heads learn from the same answers for the same minutes of CPU time:

    with images      the rows as they are
    without images   the same rows without pictures and placeholders, which the target then reads as text
    layer 0          as with images; the target's input embeddings are one feature more
    image_embeds     as layer 0; the head embeds images, not placeholders

Decoding reads the right image on every side, so that the texts are the same. The head with images is also given other
features of the prompt:

    replaced    those of the same question about another image
    hidden      zeros at the image's placeholders

Needs the packages easy-vqa, Pillow and torchvision:

    python eval/bench_images.py --folder runs/images --output eval/results/images_easy-vqa_zen5_cpu.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import easy_vqa
import torch
import transformers as hf
from benchmark import result_path, write_result
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from drafttrain import cli
from drafttrain.batch import TargetOutput
from drafttrain.data.sources import easy_vqa_rows
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.registry import load_drafter
from drafttrain.evaluation.suites import load_suite
from drafttrain.files import Json, write_json
from drafttrain.inference import Decoder
from drafttrain.ops.tree_cache import TreeCache
from drafttrain.target import Target
from drafttrain.target.sight import ImagePrompt
from drafttrain.training.limits import TimeBudget

SPECIAL = ["<s>", "</s>", "<pad>", "<image>"]
TEMPLATE = (
    "<s>{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<image>{% else %}{{ c['text'] }}{% endif %}{% endfor %}"
    "{% endif %}{% if m['role'] == 'assistant' %}</s>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
COLORS = {"green", "red", "gray", "teal", "black", "yellow", "brown", "blue"}
SHAPES = {"circle", "rectangle", "triangle"}
SIDE = 64  # pixels
PATCH = 8
TREE = "chain:5"
# Figures of `drafttrain eval` beside those that are measured here.
EVALUATED = ("accepted_length", "acceptance_by_depth", "decoding_speedup", "identical_outputs")

# name -> folder of its data, and its own keys
HEADS: dict[str, tuple[str, Json]] = {
    "with images": ("data", {}),
    "without images": ("data_text", {}),
    "layer 0": ("data", {"feature_layers": [0, 1, 2]}),
    "image_embeds": ("data", {"image_embeds": True}),
}


# -- the target ------------------------------------------------------------------------------------


def sentences(split: str) -> list[tuple[str, str, int]]:
    """(question, sentence, number of the picture); the sentence says what the picture shows, then the answer."""
    rows = list(zip(*getattr(easy_vqa, f"get_{split}_questions")(), strict=True))
    said: dict[int, set[str]] = defaultdict(set)
    for question, answer, number in rows:
        said[number].add(answer)
        # "what color is the circle?" tells the shape.
        if question.startswith("what"):
            said[number] |= (COLORS | SHAPES) & set(question.strip("?").split())
    made = []
    for question, answer, number in rows:
        color = said[number] & COLORS
        shape = said[number] & SHAPES
        if color and shape:
            text = f"I can see one {color.pop()} {shape.pop()} in the picture, so the answer is {answer}."
            made.append((question, text, number))
    return made


def make_processor(texts: Iterator[str]) -> hf.LlavaProcessor:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens={"image_token": "<image>"},
        chat_template=TEMPLATE,
    )
    square = {"height": SIDE, "width": SIDE}
    images = hf.CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=square)
    return hf.LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )


def make_model(tokenizer: hf.PreTrainedTokenizerBase) -> hf.LlavaForConditionalGeneration:
    vision = hf.CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=PATCH,
        projection_dim=64,
    )
    text = hf.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    config = hf.LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=3,
        vision_feature_layer=-1,
    )
    model = hf.LlavaForConditionalGeneration(config)
    model.generation_config.eos_token_id = 1
    return model


def batch_of(
    processor: hf.LlavaProcessor, rows: list[tuple[str, str, int]], pixels: Tensor
) -> dict[str, Tensor]:
    """Padded rows; -100 in labels but at answers."""
    tokenizer = processor.tokenizer
    patches = (SIDE // PATCH) ** 2
    ids = []
    labels = []
    for question, answer, _ in rows:
        before = f"<s>user: {'<image>' * patches}{question}\nassistant: "
        prompt = tokenizer(before, add_special_tokens=False).input_ids
        said = tokenizer(f"{answer}</s>", add_special_tokens=False).input_ids
        ids.append(torch.tensor(prompt + said))
        labels.append(torch.tensor([-100] * len(prompt) + said))
    pad = torch.nn.utils.rnn.pad_sequence
    padded = pad(ids, batch_first=True, padding_value=2)
    return {
        "input_ids": padded,
        "attention_mask": (padded != 2).long(),
        "labels": pad(labels, batch_first=True, padding_value=-100),
        "pixel_values": pixels[[number for _, _, number in rows]],
    }


def train_tower(
    model: hf.LlavaForConditionalGeneration,
    rows: list[tuple[str, str, int]],
    pixels: Tensor,
    steps: int,
    random: Random,
) -> float:
    """Trains the tower to tell the kinds of pictures apart, as published towers are pretrained; returns its accuracy."""
    # "I can see one red circle in the picture": words 4 and 5.
    kind_of = {number: tuple(answer.split()[4:6]) for _, answer, number in rows}
    kinds = sorted(set(kind_of.values()))
    numbers = sorted(kind_of)
    labels = torch.tensor([kinds.index(kind_of[number]) for number in numbers])
    tower = model.model.vision_tower
    head = torch.nn.Linear(tower.config.hidden_size, len(kinds))
    optimizer = torch.optim.AdamW([*tower.parameters(), *head.parameters()], lr=2e-3)
    share = 0.0
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(step / 50, 1 - step / steps + 0.02)
        chosen = torch.tensor(random.sample(range(len(numbers)), 64))
        seen = tower(pixels[[numbers[i] for i in chosen.tolist()]]).last_hidden_state[:, 1:]
        logits = head(seen.mean(dim=1))
        loss = torch.nn.functional.cross_entropy(logits, labels[chosen])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(tower.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        share = 0.95 * share + 0.05 * float((logits.argmax(-1) == labels[chosen]).float().mean())
        if step % 100 == 0:
            print(f"tower: step {step}, accuracy {share:.2f}", flush=True)
    return share


def train_target(folder: Path, steps: int, seed: int) -> Json:
    """Trains the target, and saves it as a checkpoint that `Target.load` reads."""
    rows = sentences("train")
    processor = make_processor(f"{question}\n{answer}" for question, answer, _ in rows)
    paths = easy_vqa.get_train_image_paths()
    images = [Image.open(paths[number]).convert("RGB") for number in range(len(paths))]
    pixels = processor.image_processor(images, return_tensors="pt")["pixel_values"]
    torch.manual_seed(seed)
    model = make_model(processor.tokenizer).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    random = Random(seed)
    accuracy = train_tower(model, rows, pixels, 2 * steps, random)
    for step in range(1, steps + 1):
        rate = 2e-3 * min(step / 50, 1 - step / steps + 0.02)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = model(**batch_of(processor, random.sample(rows, 48), pixels)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"target: step {step}, loss {loss:.4f}", flush=True)
    model.eval().save_pretrained(folder)
    processor.save_pretrained(folder)
    parameters = sum(weight.numel() for weight in model.parameters())
    return {
        "parameters": parameters,
        "tower_accuracy": round(accuracy, 3),
        "steps": steps,
        "last_loss": round(float(loss.detach()), 4),
    }


# -- its head, by the commands ---------------------------------------------------------------------


def run(*words: object) -> None:
    """A command of drafttrain, which must succeed."""
    given = [str(word) for word in words]
    print("drafttrain", *given, flush=True)
    assert cli.main(given) == 0


def head_folder(folder: Path, name: str) -> Path:
    return folder / f"head_{name.replace(' ', '_')}"


def drop_images(source: Path, data: Path, placeholder: int) -> None:
    """Writes the rows of a data set without their pictures and placeholders."""
    data.mkdir(exist_ok=True)
    (data / "meta.json").write_text((source / "meta.json").read_text())
    lines = []
    for part in sorted(source.glob("part-*.jsonl")):
        for line in part.read_text().splitlines():
            row = json.loads(line)
            # All images stand before the one answer.
            count = row["tokens"].count(placeholder)
            row["tokens"] = [token for token in row["tokens"] if token != placeholder]
            row["spans"] = [[start - count, end - count] for start, end in row["spans"]]
            del row["images"]
            lines.append(json.dumps(row))
    (data / "part-0000.jsonl").write_text("\n".join(lines) + "\n")


def make_answers(folder: Path, prompts: int) -> None:
    """Prompts and the target's answers, with images and without; what is there already is kept."""
    target = folder / "target"
    asked = folder / "prompts.jsonl"
    if not asked.exists():
        run("prompts", "--source", "easy-vqa", "--count", prompts, "--output", asked)
    options = [
        "--temperature",
        0,
        "--max-new-tokens",
        40,
        "--max-length",
        160,
        "--dtype",
        "float32",
    ]
    run("generate", "--target", target, "--prompts", asked, "--output", folder / "data", *options)
    drop_images(folder / "data", folder / "data_text", SPECIAL.index("<image>"))


def make_head(folder: Path, name: str, minutes: float) -> Json:
    """Trains a head, unless it is there; returns what is known about its training."""
    data, keys = HEADS[name]
    output = head_folder(folder, name)
    recipe = {
        "kind": "eagle3",
        "target": str(folder / "target"),
        "data": str(folder / data),
        "output_dir": str(output),
        "dtype": "float32",
        "use_cpu": True,
        "max_minutes": minutes,
        "max_steps": 100_000,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-3,
        "max_length": 160,
        "logging_steps": 50,
        "save_steps": 100_000,
        "drafter": {"ttt_steps": 4, "draft_vocab_size": 0, **keys},
    }
    facts = output / "training.json"
    if not facts.exists():
        write_json(folder / "recipe.yaml", recipe)  # JSON is YAML
        run("train", folder / "recipe.yaml")
    trained = json.loads(facts.read_text())
    return {"steps": trained["steps"], "held_out_loss": trained["held_out"]["eval_loss"]}


def evaluate(folder: Path, name: str, questions: int) -> Json:
    """What `drafttrain eval` says about a head."""
    measured = ["--suite", "easy_vqa", "--limit", questions, "--max-new-tokens", 40, "--tree", TREE]
    measured += ["--baselines", "autoregressive,ngram", "--dtype", "float32"]
    output = folder / f"eval_{name.replace(' ', '_')}.json"
    head = head_folder(folder, name)
    run("eval", "--target", folder / "target", "--drafter", head, "--output", output, *measured)
    overall = json.loads(output.read_text())["overall"]
    return {key: overall[key] for key in EVALUATED}


# -- what the head reads of the prompt -------------------------------------------------------------


class Prefill:
    """The target's prefill, with other features for the head.

    Attributes:
        given: the prompt whose features the head gets; "hidden" for zeros at the placeholders; None for its own.
    """

    def __init__(self, target: Target):
        self.target = target
        self.own = target.prefill_images
        self.given: ImagePrompt | str | None = None

    def __call__(
        self,
        prompt: ImagePrompt,
        feature_layers: Sequence[int],
        cache: TreeCache,
        row: int,
    ) -> TargetOutput:
        out = self.own(prompt, feature_layers, cache, row)
        features = out.features  # [1, L, f*h]
        if isinstance(self.given, ImagePrompt):
            features = self.target.read_images(self.given, feature_layers).features
        elif self.given == "hidden":
            shown = prompt.ids == self.target.require_sight().placeholder
            features = features.masked_fill(shown[None, :, None], 0.0)
        return TargetOutput(features, out.last_hidden)


def measure(folder: Path, count: int) -> tuple[Json, float]:
    """Figures of every side on questions of the suite easy_vqa, and the share of right answers."""
    target = Target.load(str(folder / "target"), "float32", "cpu").pack()
    prefill = Prefill(target)
    target.prefill_images = prefill  # type: ignore[method-assign, assignment]
    questions = list(load_suite("easy_vqa").questions)
    Random(0).shuffle(questions)
    drafters = {"n-grams": load_drafter("ngram", target)}
    for name in HEADS:
        drafters[name] = load_drafter(str(head_folder(folder, name)), target)
    for name in ("replaced", "hidden"):
        drafters[name] = drafters["with images"]
    answer_of = {row["id"]: row["answer"] for row in easy_vqa_rows("test")}
    totals: Json = {name: {"passes": 0, "committed": 0} for name in drafters}
    right = 0
    for number, question in enumerate(questions[:count]):
        prompt = question.prompt_for(target)
        assert isinstance(prompt, ImagePrompt)
        # The same words about the picture of another question.
        picture = questions[-1 - number].images[0]
        other = target.image_row(prompt.ids, [picture])
        given = {"replaced": other, "hidden": "hidden"}
        texts = []
        for name, drafter in drafters.items():
            prefill.given = given.get(name)
            decoder = Decoder(target, drafter, spec=TreeSpec.parse(TREE))
            (made,) = decoder.generate([prompt], max_new_tokens=40)
            totals[name]["passes"] += made.stats.target_passes
            totals[name]["committed"] += made.stats.new_tokens - 1
            texts.append(made.tokens)
        assert texts == [texts[0]] * len(texts), "drafting changed a text"
        said = target.tokenizer.decode(texts[0], skip_special_tokens=True)
        right += said.rstrip(".").endswith(f" {answer_of[question.question_id]}")
    for side in totals.values():
        side["accepted_length"] = round(side["committed"] / side["passes"], 3)
    return totals, right / count


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, required=True, help="of target, data and head; what is there is kept"
    )
    parser.add_argument("--target-steps", type=int, default=300)
    parser.add_argument("--only-target", action="store_true", help="end when the target is trained")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument(
        "--minutes", type=float, default=1.0, help="CPU time of each head's training"
    )
    parser.add_argument("--questions", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=result_path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    facts = args.folder / "target.json"
    if not facts.exists():
        write_json(facts, train_target(args.folder / "target", args.target_steps, args.seed))
    if args.only_target:
        return
    TimeBudget.clock = staticmethod(time.process_time)  # other programs may run here
    make_answers(args.folder, args.prompts)
    trained = {name: make_head(args.folder, name, args.minutes) for name in HEADS}
    sides, right = measure(args.folder, args.questions)
    compared = ("with images", "without images")
    evaluated = {name: evaluate(args.folder, name, args.questions) for name in compared}
    for name, facts_of_head in trained.items():
        sides[name] |= facts_of_head
    write_result(
        args.output,
        sides["with images"]["accepted_length"] / sides["without images"]["accepted_length"],
        1.0,
        sides,
        torch.device("cpu"),
        target=json.loads(facts.read_text()),
        right_answers=round(right, 3),
        tree=TREE,
        minutes=args.minutes,
        eval_command=evaluated,
    )


if __name__ == "__main__":
    main()
