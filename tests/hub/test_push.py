"""Publishing: what goes up, what is refused, and the real huggingface_hub client against a server of its protocol."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import configuration_utils, modeling_utils

from drafttrain.cli import main
from drafttrain.data.store import Store, load_records, read_meta
from drafttrain.drafters.dflash.model import DFlash, DFlashConfig
from drafttrain.drafters.eagle3.export import SHIPPING
from drafttrain.drafters.registry import load_trained
from drafttrain.errors import UserError
from drafttrain.formats.public_names import shorten
from drafttrain.hub.upload import check_private
from drafttrain.target import Target
from tests.conftest import loaded_target, make_target
from tests.drafters.eagle3_files import make_head
from tests.files import ROOT, dump_json, load_json
from tests.formats.checkpoints import make_checkpoint
from tests.hub.hub_server import READ_ONLY, TOKEN, HubServer


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A target, a drafter for it with a training record, a suite, data, and an evaluation of the drafter."""
    folder = tmp_path_factory.mktemp("work")
    target = loaded_target(folder / "target", layers=8)
    make_head(target).save_pretrained(folder / "drafter")
    config = {
        "kind": "eagle3",
        "target": str(folder / "target"),
        "data": str(folder / "data"),
        "loss": "kl",
        "init": "target",
        "output_dir": str(folder / "drafter"),
        "max_length": 512,
        "drafter": {"ttt_steps": 4},
        "trainer": {"seed": 3},
    }
    record = {
        "config": config,
        "steps": 12,
        "seconds": 30.0,
        "parameters": 12345,
        "device": "cpu",
        "processes": 1,
    }
    dump_json(folder / "drafter" / "training.json", record)
    (folder / "drafter" / "decoding.json").write_text('{"tree": "chain:2"}')
    with Store(
        folder / "data",
        {"target": target.identity(), "sampling": {"temperature": 1.0, "max_new_tokens": 8}},
    ) as store:
        for i in range(3):
            row = {"id": str(i), "tokens": [1, 2, 3, 4], "spans": [[2, 4]], "finish": ["stop"]}
            store.append({**row, "source": str(folder / "prompts.jsonl")})
    (folder / "suite.jsonl").write_text(
        '{"question_id": "a", "category": "chat", "turns": ["Hello there"]}\n'
    )
    assert evaluate(folder, str(folder / "drafter"), folder / "results.json") == 0
    return folder


def evaluate(folder: Path, drafter: str, output: Path) -> int:
    return main(eval_command(folder, drafter, output))


def eval_command(folder: Path, drafter: str, output: Path) -> list[str]:
    return ["eval", "--target", str(folder / "target"), "--drafter", drafter, "--suite", str(folder / "suite.jsonl"),
            "--dtype", "float32", "--baselines", "autoregressive", "--max-new-tokens", "12", "--output", str(output)]  # fmt: skip


def push_command(work: Path, *more: str) -> list[str]:
    return ["push", "--drafter", str(work / "drafter"), "--repo", "writer/head", "--results", str(work / "results.json"),
            "--base-model", "someone/base", "--dtype", "float32", *more]  # fmt: skip


@pytest.mark.thorough
def test_the_target_is_read_where_it_is_and_named_as_published(work, tmp_path, monkeypatch):
    """No request to the Hub: the published name of a local target is text."""
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda *a, **k: pytest.fail("asked the Hub")
    )
    target = Target.load(str(work / "target"), "float32")
    options = {"num_hidden_layers": 1, "feature_layers": (1, 4), "mask_token_id": 290}
    block = DFlash(DFlashConfig.for_target(target, draft_vocab_size=0, **options))
    block.save_pretrained(tmp_path / "dflash")
    for drafter in (work / "drafter", tmp_path / "dflash"):
        out = tmp_path / f"out-{drafter.name}"
        command = [
            "push",
            "--drafter",
            str(drafter),
            "--repo",
            "writer/head",
            "--without-evaluation",
            "--dtype",
            "float32",
        ]
        assert (
            main([*command, "--base-model", "someone/base", "--dry-run", "--output", str(out)]) == 0
        )
    described = load_json(tmp_path / "out-drafter" / "speculators" / "config.json")
    verifier = {"name_or_path": "someone/base", "architectures": ["LlamaForCausalLM"]}
    assert described["speculators_config"]["verifier"] == verifier
    assert load_json(tmp_path / "out-dflash" / "vllm" / "config.json")["num_target_layers"] == 8


def prepare_unmeasured(folder):
    """Fills `out` with what a push of the folder's `drafter` uploads."""
    words = f"--drafter {folder}/drafter --repo writer/head --base-model someone/base --output {folder}/out"
    assert main(["push", *words.split(), "--without-evaluation", "--dry-run"]) == 0


@pytest.mark.thorough
def test_a_published_drafter_is_imported_as_it_was_trained(work, tmp_path):
    target = Target.load(str(work / "target"), "float32")
    make_head(target, ttt_steps=6, depth_share=0.5, depth_decay=0.7).save_pretrained(
        tmp_path / "drafter"
    )
    prepare_unmeasured(tmp_path)
    back = ["import", "--checkpoint", str(tmp_path / "out"), "--target", str(work / "target")]
    assert main([*back, "--output", str(tmp_path / "back")]) == 0
    config = load_json(tmp_path / "back" / "config.json")
    assert (config["ttt_steps"], config["depth_share"], config["depth_decay"]) == (6, 0.5, 0.7)


@pytest.mark.thorough
def test_a_published_head_loads_without_warnings(work, tmp_path, monkeypatch):
    """Its root is read by engines as a Llama's and by us as a head."""
    said = []
    for module in (configuration_utils, modeling_utils):
        monkeypatch.setattr(module.logger, "warning", lambda text, *_: said.append(text))
    assert main(push_command(work, "--dry-run", "--output", str(tmp_path / "out"))) == 0
    assert load_json(tmp_path / "out" / "config.json")["model_type"] == "llama"
    load_trained(str(tmp_path / "out"))
    assert not [text for text in said if "of type" in text]


@pytest.mark.thorough
def test_a_card_shows_what_engines_accepted(work, tmp_path, capsys):
    row = {
        "kind": "eagle3",
        "engine": "vLLM",
        "release": "0.32.0",
        "loads": True,
        "same_text": 6,
        "prompts": 6,
        "rounds": 40,
        "accepted_length": 1.25,
        "ours": 1.3,
        "verdict": "same",
    }
    other = {**row, "engine": "SGLang", "prompts": None, "accepted_length": None, "ours": None}
    verified = tmp_path / "verify.json"
    dump_json(verified, {"rows": [row, other]})
    command = push_command(work, "--dry-run", "--output", str(tmp_path / "out"))
    assert main([*command, "--verified", str(verified)]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| vLLM | 0.32.0 | 6 | 6 | 1.250 | 1.300 |" in card and "| SGLang |" not in card
    assert "an engine may gain less, or lose" in card
    dump_json(verified, {"rows": [{**row, "kind": "medusa"}]})
    assert main([*command, "--verified", str(verified)]) == 2
    assert "is of medusa, this drafter is 'eagle3'" in capsys.readouterr().err


@pytest.mark.thorough
def test_a_card_names_the_data_of_a_training_elsewhere(work, tmp_path):
    shutil.copytree(work / "drafter", tmp_path / "drafter")
    file = tmp_path / "drafter" / "training.json"
    record = load_json(file)
    record["config"]["data"] = "/not/here"
    facts = {
        "counts": {"conversations": 77, "response_tokens": 1234},
        "sampling": {"temperature": 0.7},
    }
    dump_json(file, {**record, "data_set": facts})
    prepare_unmeasured(tmp_path)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "77 conversations with 1234 tokens that the target wrote itself (temperature 0.7" in card


@pytest.mark.thorough
def test_a_card_shows_what_the_drafter_accepts_alone(work, tmp_path):
    """Engines draft without our merged matches, so a merged figure alone would promise too much."""
    alone = load_json(work / "results.json")
    merged = {
        **alone,
        "kind": f"{alone['kind']}+ngram",
        "overall": {**alone["overall"], "accepted_length": 9.0},
    }
    files = [tmp_path / "merged.json", tmp_path / "alone.json"]
    for file, content in zip(files, (merged, alone), strict=True):
        dump_json(file, content)
    push = push_command(work, "--dry-run", "--output", str(tmp_path / "out"))
    at = push.index("--results") + 1
    assert main([*push[:at], *map(str, files), *push[at + 1 :]]) == 0
    card = " ".join((tmp_path / "out" / "README.md").read_text().split())
    assert (
        f"alone, as engines draft with it, it accepts {alone['overall']['accepted_length']:.2f} per pass"
        in card
    )


@pytest.mark.thorough
def test_a_card_says_which_temperature_was_not_measured(work, tmp_path, capsys):
    greedy = load_json(work / "results.json")
    sampled = {**greedy, "decoding": {**greedy["decoding"], "temperature": 1.0}}
    file = tmp_path / "sampled.json"
    dump_json(file, sampled)
    push = push_command(work, "--dry-run", "--output", str(tmp_path / "greedy"))
    assert main(push) == 0
    said = "Temperature 1 has not been measured: `drafttrain eval --target"
    assert said in (tmp_path / "greedy" / "README.md").read_text()
    assert "note: no results at temperature 1, and the card says so" in capsys.readouterr().out
    both = push_command(work, "--dry-run", "--output", str(tmp_path / "both"))
    at = both.index("--results") + 2
    assert main([*both[:at], str(file), *both[at:]]) == 0
    assert "has not been measured" not in (tmp_path / "both" / "README.md").read_text()


@pytest.mark.thorough
def test_a_dry_run_writes_what_would_go_up_and_no_local_path(work, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(push_command(work, "--dry-run", "--output", str(out), "--license", "mit")) == 0
    printed = capsys.readouterr().out
    files = [path.relative_to(out) for path in out.rglob("*") if path.is_file()]
    names = {str(path) for path in files if not path.name.startswith(".")}  # hidden ones stay here
    assert names == {
        "README.md",
        "config.json",
        "model.safetensors",
        "speculators/config.json",
        "speculators/model.safetensors",
        "decoding.json",
        "training.json",
        "results/1-suite-t0.json",
        "plots/results.png",
    }
    assert all(name in printed for name in names) and "dry run: nothing was uploaded" in printed
    for name in names:
        if not name.endswith((".png", ".safetensors")):
            text = (out / name).read_text()
            for private in (str(work), str(ROOT), str(Path.home()), "/tmp/", "prompts.jsonl"):
                assert private not in text, (name, private)
    card = (out / "README.md").read_text()
    results = load_json(work / "results.json")
    for expected in (
        "base_model: someone/base", "license: mit", "- speculative-decoding", f"{results['overall']['accepted_length']:.2f}",
        "| **all** | 1 |", results["device"], '"num_speculative_tokens": 2', "--speculative-num-steps 2", "max_draft_len: 2",
        "recipe: kind eagle3, loss kl", "12 steps", "3 conversations", "## Limits", "tree `chain:2`",
    ):  # fmt: skip
        assert expected in card, expected
    assert "prompts: a file of the publisher's (3)" in card
    assert load_json(out / "decoding.json")["chain"].startswith("chain:")
    table = [line for line in card.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1 and len(table) == 4
    assert "{{" not in card and "{%" not in card
    # Both forms hold the head, and a second dry run replaces the first.
    identity = {**make_target(layers=8).identity(), "name": "someone/base"}
    weights = [SHIPPING.read(out / part, identity).state_dict() for part in ("", "speculators")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert main(push_command(work, "--dry-run", "--output", str(out))) == 0
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("")
    assert main(push_command(work, "--dry-run", "--output", str(tmp_path / "other"))) == 2
    assert (tmp_path / "other" / "thesis.txt").exists()


@pytest.mark.thorough
def test_no_evaluation_or_a_foreign_one_is_refused(work, tmp_path, capsys):
    bare = [
        "push",
        "--drafter",
        str(work / "drafter"),
        "--repo",
        "writer/head",
        "--dry-run",
        "--output",
        str(tmp_path / "o"),
    ]
    assert main(bare) == 2
    assert "there is no evaluation to publish" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()
    assert main([*bare, "--without-evaluation"]) == 0
    card = (tmp_path / "o" / "README.md").read_text()
    assert "## Not measured" in card
    assert "`drafttrain eval --target target --drafter writer/head`" in card
    results = load_json(work / "results.json")
    for change, message in (
        ({"target": "someone/else"}, "are for target 'someone/else'"),
        ({"kind": "ngram"}, "measured a drafter of kind 'ngram'"),
    ):
        dump_json(tmp_path / "r.json", {**results, **change})
        assert main([*bare, "--results", str(tmp_path / "r.json")]) == 2
        assert message in capsys.readouterr().err
    assert (
        main(
            [
                "push",
                "--drafter",
                str(work / "drafter"),
                "--repo",
                "noslash",
                "--without-evaluation",
            ]
        )
        == 2
    )


def test_both_spellings_of_license_are_accepted(work, tmp_path, capsys):
    data = ["push-data", "--data", str(work / "data"), "--repo", "writer/data", "--dry-run"]
    for number, spelling in enumerate(("license", "licence")):
        out = tmp_path / str(number)
        flags = [f"--{spelling}", "mit", f"--prompt-{spelling}", "our own", "--output", str(out)]
        assert main([*data, *flags]) == 0
        card = (out / "README.md").read_text()
        assert "license: mit" in card and "license of the prompts: our own" in card
    for command in ("push", "push-data"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert "--license" in capsys.readouterr().out


def test_published_lines_are_those_of_the_data(work, tmp_path):
    """Lines with and without reasoning, and the rows of a conversation whose earlier turns are rewritten."""
    source = tmp_path / "data"
    shutil.copytree(work / "data", source)
    rewritten = {**load_records(source)[0], "id": "x#0", "reasoning": [1], "part": 0}
    del rewritten["images"]
    with (source / "part-0000.jsonl").open("a") as file:
        file.write(json.dumps(rewritten) + "\n")
    out = tmp_path / "out"
    words = f"--data {source} --repo writer/data --prompt-license own --dry-run --output {out}"
    assert main(["push-data", *words.split()]) == 0
    made, held = (load_records(folder).remove_columns("source") for folder in (out, source))
    assert made.to_list() == held.to_list()
    counts = read_meta(out)["counts"]
    assert counts["rows"] == counts["conversations"] + 1 == len(held)
    assert counts["reasoning_tokens"] == 1


def test_private_things_are_found(tmp_path):
    assert shorten(
        {
            "a": [
                "/home/me/run/x.json",
                "data=/tmp/d",
                "user/name",
                "runs/a/b+ngram",
                "https://a/b/c",
                "a / b",
            ]
        }
    ) == {"a": ["x.json", "data=d", "user/name", "b+ngram", "https://a/b/c", "a / b"]}
    for text, message in (
        (f"see {TOKEN}", "looks like a Hugging Face token"),
        ("in /home/somebody/x", "/home/somebody/x"),
    ):
        (tmp_path / "README.md").write_text(text)
        with pytest.raises(UserError, match=message) as caught:
            check_private(tmp_path, [Path("README.md")])
        assert TOKEN not in str(caught.value)
    (tmp_path / "README.md").write_text("https://huggingface.co/home/x and user/home/x")
    check_private(tmp_path, [Path("README.md")])


def test_a_draft_model_is_published_with_its_gguf_file(tmp_path, capsys):
    make_checkpoint(tmp_path / "draft", "llama")
    described = {
        "drafter_kind": "draft_model",
        "target": {"name": "someone/base", "vocab_size": 300},
    }
    dump_json(tmp_path / "draft" / "drafttrain.json", described)
    command = [
        "push",
        "--drafter",
        str(tmp_path / "draft"),
        "--repo",
        "writer/draft",
        "--without-evaluation",
        "--dry-run",
    ]
    assert main([*command, "--output", str(tmp_path / "out")]) == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "draft.gguf",
        "README.md",
    } <= names
    assert load_json(tmp_path / "out" / "drafttrain.json")["drafter_kind"] == "draft_model"
    card = (tmp_path / "out" / "README.md").read_text()
    assert (
        "--spec-draft-model writer/draft/draft.gguf" in card and "assistant_model=assistant" in card
    )


_DRIVER = """
import json, os, sys, time, urllib.request
time.sleep = lambda seconds: None  # the client waits between its tries
from drafttrain.cli import main
report = []
for token, command in json.loads(sys.stdin.read()):
    os.environ.pop("HF_TOKEN", None)
    if token:
        os.environ["HF_TOKEN"] = token
    print(f"=== {len(report)}", flush=True)
    print(f"=== {len(report)}", file=sys.stderr, flush=True)
    if command == "heal":
        urllib.request.urlopen(os.environ["HF_ENDPOINT"] + "/heal").close()
        report.append(0)
    else:
        report.append(main(command))
print("=== " + json.dumps(report))
"""


def run_against(
    server: HubServer, home: Path, commands: list
) -> tuple[list[int], list[str], list[str]]:
    """Commands in one process whose Hub is the server; their status, and what each printed and complained of."""
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("HF_")},
        "HF_ENDPOINT": server.url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "*",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    done = subprocess.run([sys.executable, "-c", _DRIVER], input=json.dumps(commands), env=environment, capture_output=True,
                          text=True, cwd=home, check=False, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    out = [part.partition("\n")[2] for part in f"\n{done.stdout}".split("\n=== ")[1:-1]]
    errors = [part.partition("\n")[2] for part in f"\n{done.stderr}".split("\n=== ")[1:]]
    return json.loads(done.stdout.rpartition("=== ")[2]), out, errors


@pytest.mark.slow
def test_the_hub_from_login_to_reading_back(work, tmp_path):
    """Auth failures, an interrupted upload that resumes, an update with a tag, and an evaluation of the published drafter."""
    push = push_command(work)
    data = [
        "push-data",
        "--data",
        str(work / "data"),
        "--repo",
        "writer/data",
        "--prompt-licence",
        "our own, CC0",
    ]
    with HubServer() as server:
        server.break_after = 1
        commands = [
            ("", push),
            ("hf_" + "wrong" * 6, push),
            (READ_ONLY, push),
            (TOKEN, push),
            (TOKEN, "heal"),
            (TOKEN, push),
            (TOKEN, push),
            (TOKEN, push_command(work, "--licence", "mit")),
            (TOKEN, eval_command(work, "writer/head", tmp_path / "again.json")),
            (TOKEN, data),
            ("", eval_command(work, "writer/missing", tmp_path / "none.json")),
        ]
        status, out, errors = run_against(server, tmp_path, commands)
        assert status == [2, 2, 2, 2, 0, 0, 0, 0, 0, 0, 2], errors
        assert "not logged in; run hf auth login" in errors[0]
        assert "does not accept the token (401)" in errors[1]
        assert "may not write there (403)" in errors[2]
        assert "the upload broke off" in errors[3] and "run the same command again" in errors[3]
        assert "the Hub does not provide it" in errors[10]
        head = server.repositories["models", "writer/head"]
        # Of three large files one had arrived before the break, and it was not sent again.
        puts = Counter(
            line.rpartition("/")[2] for line in server.log if line.startswith("PUT /lfs/")
        )
        assert puts.keys() == server.objects.keys() and len(puts) == 3
        assert min(puts.values()) == 1 and max(puts.values()) > 1
        # The first push that came through made v1, the same again changed nothing, the changed card made v2.
        assert list(head.tags) == ["v1", "v2"] and head.tags["v2"] == head.head
        for said in out[5:7]:
            *_, address, then = said.strip().splitlines()
            assert address.endswith("/writer/head/tree/v1")
            assert then == "next: drafttrain eval --target TARGET --drafter writer/head"
        before = head.commits[head.tags["v1"]]
        after = head.commits[head.tags["v2"]]
        assert set(before) <= set(after) and ".gitattributes" in after
        assert b"license: mit" in after["README.md"] and b"license: mit" not in before["README.md"]
        everything = b"".join(
            content for files in head.commits.values() for content in files.values()
        )
        assert TOKEN.encode() not in everything and TOKEN not in "".join(out + errors)
        rows = server.repositories["datasets", "writer/data"].commits[
            server.repositories["datasets", "writer/data"].head
        ]
        assert rows["part-0000.jsonl"].count(b"\n") == 3 and b"our own, CC0" in rows["README.md"]
        assert str(work).encode() not in b"".join(rows.values())
    local, hub = (load_json(path) for path in (work / "results.json", tmp_path / "again.json"))
    assert hub["kind"] == "eagle3" and hub["decoding"]["tree"]["spec"] == "chain:2"
    for key in ("accepted_length", "tokens", "target_passes", "identical_outputs"):
        assert hub["overall"][key] == local["overall"][key]
