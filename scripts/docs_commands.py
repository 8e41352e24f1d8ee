"""Runs every command of README, tutorials and how-tos with tiny models, as a user would.

python scripts/docs_commands.py                        # all pages, and a plan for every recipe
python scripts/docs_commands.py docs/tutorials/*.md    # these pages

Each page runs in a folder of its own, in which a target of 20 thousand weights has the name of every target,
and a small EAGLE-3 head, a data set and results stand where pages name those of earlier steps. Settings behind those of
the page end each command within seconds. What a container or accelerate's launcher starts runs in one process. What
needs a GPU, a server, the Hub or another program is listed with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FIXTURES = ROOT / "tests" / "fixtures"
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs" / "tutorials").glob("*.md")),
    *sorted((ROOT / "docs" / "how-to").glob("*.md")),
]
SECONDS = 900  # that a command may take, also on a busy machine
# Settings that end a command within seconds, after those of the page.
SMALL = {
    "prompts": "--count 4 --overwrite",
    "generate": "--max-new-tokens 12 --max-length 256 --overwrite",
    "eval": "--limit 1 --max-new-tokens 4 --baselines autoregressive",
    "tune": "--max-new-tokens 16 --prompts 2 --repeats 1 --dry-run",
    "sweep": "--limit 2 --max-new-tokens 4 --batch-sizes 1,2 --lengths 1,2 --contexts 0,16",
    "trace": "--max-new-tokens 6",
    "train": "target=smollm2-135m max_steps=2 max_length=64 decode_prompts=1 decode_tokens=4 use_cpu=true"
    " validation=0.2 per_device_train_batch_size=2",
    "adapt": "--once",
    # A head of two training steps may agree more when it is read wrongly.
    "doctor": "--texts 0",
    # Four tokens of a tiny target on a busy machine measure nothing.
    "push": "--accept-implausible",
}
# By kind: sizes of the tiny target.
SIZES = {
    "eagle3": "drafter.draft_vocab_size=128 drafter.num_key_value_heads=1",
    "quickstart": "drafter.draft_vocab_size=128 drafter.num_key_value_heads=1 drafter.intermediate_size=64",
    "draft_model": "init=target drafter.layers=[0,1]",
}
# By kind: what fits a recipe to the tiny target; others have key heads of their own.
STAND_IN = {
    "draft_model": "drafter.layers=[0,1]",
    "hydra": "",
    "medusa": "",
    "mlp_speculator": "",
    "draft_model_pretrain": "",
}
# What cannot run here, by a pattern of the command's line.
LEFT_OUT = {
    r"^(?!drafttrain )": "another program",
    r"\.\.\.|\[|\bTARGET\b|\bRECIPE\b|\bCOMMAND\b|USER/": "a reader fills it in",
    r"--url|--server |target_url=|bench-server|train qwen3-235b|journal.jsonl": "needs a server",
    r"\bruns/see/": "needs the target that eval/bench_images.py trains",
    r"serve-target|--backend vllm|--engine(-python| (?!none|transformers))|--engine-python": "needs an engine",
    r"--device cuda|--device-map|target_device_map|sequence_parallel": "needs several processes or GPUs",
    r"drafttrain fetch|--checkpoint (?!runs/)\w[\w-]*/": "needs a network",
    r"--source \w[\w.-]*/": "needs the Hub",
    r"drafttrain push(?!.*--dry-run)": "publishes",
    r"drafttrain completion|--format gguf|--target-gguf": "needs another program",
}
# Folders in runs/ that pages name before a command of theirs that runs here has written them.
HEADS = (
    "drafter",
    "quickstart/drafter",
    "support/drafter",
    "head/published",
    "llama-3.1-8b/eagle3",
    "qwen3-235b-a22b/eagle3",
)
DATA_SETS = ("", "quickstart", "support", "head", "llama-3.1-8b", "qwen3-8b", "qwen3-235b-a22b")
TARGETS = r"(?<![\w./-])(?:meta-llama|Qwen|google|openai|HuggingFaceTB|mistralai)/[\w.-]+"


def commands(page: Path) -> Iterator[str]:
    """The command lines of a page's blocks, and what launchers start in place of them."""
    for words in written(page):
        yield shlex.join(started(inside(words)))


def inside(words: list[str]) -> list[str]:
    """What `docker run` starts in an image of ours; other words as they are."""
    if words[:2] != ["docker", "run"]:
        return words
    image = next(i for i, word in enumerate(words) if word.startswith("drafttrain:"))
    entry = "drafttrain"
    if "--entrypoint" in words:
        entry = words[words.index("--entrypoint") + 1]
    return [entry, *words[image + 1 :]]


def started(words: list[str]) -> list[str]:
    """The command that each process of `accelerate launch` runs; other words as they are."""
    if words[0] != "accelerate":
        return words
    for i, word in enumerate(words):
        if word in ("drafttrain.train", "drafttrain/train.py"):
            return ["drafttrain", "train", *words[i + 1 :]]
        if word == "drafttrain.cli":
            return ["drafttrain", *words[i + 1 :]]
    return words


def written(page: Path) -> Iterator[list[str]]:
    """The words of each command of a page's blocks, without those of blocks marked as not run."""
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(
        r"(<!-- not \w+: [^>]+? -->\n)?^( *)```bash\n((?s:.*?))^\2```", text, re.M
    ):
        if found[1]:
            continue
        for line in found[3].replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                del words[0]
            if words:
                yield words


def left_out(line: str) -> str:
    """Why a command does not run here; '' for one that does."""
    for pattern, reason in LEFT_OUT.items():
        if re.search(pattern, line):
            return reason
    return ""


def small(line: str) -> list[str]:
    """A command's words with tiny models and sizes."""
    line = re.sub(TARGETS, "smollm2-135m", line)
    # A target of random weights writes no prompts.
    line = re.sub(
        r"--source magpie|--max-prompt-tokens \d+", "--source file --input chats.jsonl", line
    )
    # Nor has it a template with variables.
    line = re.sub(r"--chat-template-kwargs '.*?'", "", line)
    line = re.sub(r"--suite (?:mt_bench|humaneval)", "--suite heldout.jsonl", line)
    line = line.replace(
        "target=T data=D output_dir=O", "target=smollm2-135m data=runs/data output_dir=runs/o"
    )
    line = line.replace(
        "--target T --data D --output_dir O",
        "--target smollm2-135m --data runs/data --output_dir runs/p",
    )
    words = shlex.split(line)
    for end, word in enumerate(words):
        if word in ("|", "&&", ">", "<", "2>"):
            del words[end:]
            break
    words += shlex.split(SMALL.get(words[1], ""))
    if words[1] == "train" and "init=" not in line:
        words += shlex.split(SIZES.get(Path(words[2]).stem, ""))
    elif words[1] == "train":
        words.append("drafter={}")  # the small head's own sizes, not those of the recipe
    return words


def make_folder(folder: Path) -> None:
    """Fills a folder with what pages take from a checkout and from their earlier steps."""
    for name in ("configs", "eval", "scripts", "drafttrain"):
        (folder / name).symlink_to(ROOT / name)
    for name in HEADS:
        shutil.copytree(FIXTURES / "drafters" / "eagle3", folder / "runs" / name)
    for name in DATA_SETS:
        shutil.copytree(FIXTURES / "data", folder / "runs" / name / "data")
    shutil.copytree(FIXTURES / "data", folder / "runs" / "legal")
    shutil.copy(FIXTURES / "results" / "eagle3.json", folder / "results.json")
    for name in ("results", "hot", "other", "before"):
        shutil.copy(FIXTURES / "results" / "eagle3.json", folder / "runs" / f"{name}.json")
    for name in ("chats.jsonl", "support.jsonl"):
        shutil.copy(FIXTURES / "chats.jsonl", folder / name)
    rows = []
    for number, line in enumerate((FIXTURES / "chats.jsonl").read_text().splitlines()):
        rows.append(json.dumps({"id": str(number), **json.loads(line)}) + "\n")
    (folder / "prompts.jsonl").write_text("".join(rows))
    turns = [{"role": "user", "content": "Name rivers."}, {"role": "assistant", "content": "Rhine"}]
    (folder / "logs").mkdir()
    log = json.dumps({"messages": turns}) + "\n"
    (folder / "logs" / "answers.jsonl").write_text(log * 240)
    shutil.copytree(FIXTURES / "target", folder / "target")  # as the small head's config names it
    shutil.copy(FIXTURES / "suite.jsonl", folder / "heldout.jsonl")
    prompt = {"id": "one", "text": "One river"}
    for name in ("llama-3.1-8b/ultrachat.jsonl", "qwen3-8b/prompts.jsonl"):
        (folder / "runs" / name).write_text(json.dumps(prompt) + "\n")
    (folder / "corpus.txt").write_text("One river.\nTwo rivers.\n" * 40)
    for name in ("smollm2-135m", "gemma3-270m"):
        shutil.copytree(FIXTURES / "target", folder / ".cache" / "models" / name)


def run(words: list[str], folder: Path) -> str:
    """Runs a command; returns '' or how it failed."""
    environment = {**os.environ, "DRAFTTRAIN_CACHE": str(folder / ".cache"), "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", "drafttrain", *words[1:]]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"no end within {SECONDS} s"
    if done.returncode == 0:
        return ""
    last = done.stderr.strip().splitlines()[-1:] or ["no word on stderr"]
    return f"status {done.returncode}: {last[0]}"


def run_page(page: Path) -> int:
    """Runs a page's commands in order; returns how many failed."""
    failed = 0
    with tempfile.TemporaryDirectory(prefix="drafttrain-docs-") as name:
        make_folder(Path(name))
        for line in commands(page):
            reason = left_out(line)
            if reason:
                print(f"  left out ({reason}): {line}", flush=True)
                continue
            problem = run(small(line), Path(name))
            failed += bool(problem)
            print(f"  {problem or 'ok'}: {line}", flush=True)
    return failed


def plan_recipes() -> int:
    """Plans every recipe; returns how many failed."""
    listed = [sys.executable, "-m", "drafttrain", "recipes", "--json"]
    done = subprocess.run(listed, capture_output=True, text=True, cwd=ROOT, check=True)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="drafttrain-docs-") as name:
        make_folder(Path(name))
        for recipe in json.loads(done.stdout)["result"]["recipes"]:
            shipped = recipe["recipe"]
            words = ["drafttrain", "plan", shipped]
            if shipped == "quickstart":
                words += ["target=smollm2-135m", "data=runs/data", "output_dir=runs/out"]
                words += ["max_length=256"]
            elif shipped.startswith(("smollm2-135m/", "gemma3-270m/")):  # a tiny one in their place
                words += ["max_length=256"]
                words += shlex.split(
                    STAND_IN.get(Path(shipped).name, "drafter.num_key_value_heads=1")
                )
            problem = run(words, Path(name))
            failed += bool(problem)
            print(f"  {problem or 'ok'}: {shlex.join(words)}", flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "pages", nargs="*", type=Path, help="pages to run (default: all, and every plan)"
    )
    args = parser.parse_args()
    failed = 0
    for page in args.pages or PAGES:
        print(page.resolve().relative_to(ROOT), flush=True)
        failed += run_page(page)
    if not args.pages:
        print("plans", flush=True)
        failed += plan_recipes()
    print(f"{failed} commands failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
