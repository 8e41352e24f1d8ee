"""Secrets never get into errors and recorded JSON, and a push that would publish one stops; ordinary text is no secret."""

from __future__ import annotations

import json
import string
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from drafttrain.credentials import find_secret, redact
from drafttrain.errors import UserError
from drafttrain.files import JsonlLog, write_json
from drafttrain.hub.upload import check_private
from tests.files import ROOT
from tests.fuzz import fuzz, outcome, seeds

ALNUM = string.ascii_letters + string.digits
HEX = "0123456789abcdef"


def word(random: Random, letters: str, count: int) -> str:
    return "".join(random.choice(letters) for _ in range(count))


# Kind -> a secret of it, as (text around it, the secret).
KINDS: dict[str, Callable[[Random], tuple[str, str]]] = {
    "hf_": lambda r: ("{}", "hf_" + word(r, ALNUM, 34)),
    "sk-": lambda r: ("{}", "sk-" + word(r, ALNUM, 47) + "1"),
    "sk-proj-": lambda r: (
        "{}",
        "sk-proj-" + word(r, ALNUM, 20) + "_" + word(r, ALNUM, 60) + "-7" + word(r, ALNUM, 20),
    ),
    "sk-ant-": lambda r: ("{}", "sk-ant-api03-" + word(r, ALNUM, 90)),
    "ghp_": lambda r: ("{}", f"gh{r.choice('opsur')}_" + word(r, ALNUM, 36)),
    "github_pat_": lambda r: ("{}", "github_pat_" + word(r, ALNUM, 22) + "_" + word(r, ALNUM, 59)),
    "AKIA": lambda r: (
        "{}",
        r.choice(["AKIA", "ASIA"]) + word(r, string.ascii_uppercase + "234567", 16),
    ),
    "AIza": lambda r: ("{}", "AIza" + word(r, ALNUM + "_", 35)),
    "xox": lambda r: (
        "{}",
        f"xox{r.choice('bpars')}-" + word(r, string.digits, 12) + "-" + word(r, ALNUM, 24),
    ),
    "glpat-": lambda r: ("{}", "glpat-" + word(r, ALNUM, 20)),
    "private key": lambda r: (
        "{}\nMIIEvQIBADANBgkq",
        f"-----BEGIN {r.choice(['', 'RSA ', 'EC ', 'OPENSSH '])}PRIVATE KEY-----",
    ),
    "URL": lambda r: (
        f"{r.choice(['http', 'https', 'postgres', 's3'])}://{{}}@host.example.org:80/v1",
        "me:" + word(r, ALNUM, 9),
    ),
    "wandb": lambda r: (
        r.choice(["WANDB_API_KEY={}", "wandb login {}", '"wandb_key": "{}"', "api_key: '{}'"]),
        word(r, HEX, 40),
    ),
}
# Where a secret may stand: the file's name and its content around the text.
PLACES: dict[str, Callable[[str, Path], None]] = {
    "README.md": lambda text, path: path.write_text(f"# Card\n\nSee {text} for more\n"),
    "meta.json": lambda text, path: path.write_text(
        json.dumps({"a": [1, {"b": f"x\n{text}\ty"}]}, indent=1)
    ),
    "part-0000.jsonl": lambda text, path: path.write_text(
        '{"id": 1}\n' + json.dumps({"text": f"({text})"}) + "\n"
    ),
    "recipe.yaml": lambda text, path: path.write_text(f"data: runs\nnote: {text}\n"),
    "NOTICE": lambda text, path: path.write_text(f"{text}\n"),
    "model.safetensors": lambda text, path: save_file(
        {"w": torch.zeros(2)}, str(path), {"note": f"at {text}."}
    ),
    "draft.gguf": lambda text, path: path.write_bytes(
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(text)) + text.encode() + bytes(999)
    ),
}


@fuzz(examples=60)
@given(kind=st.sampled_from(list(KINDS)), name=st.sampled_from(list(PLACES)), seed=seeds())
def test_a_push_stops_at_every_kind_in_every_file(kind, name, seed, tmp_path_factory):
    around, secret = KINDS[kind](Random(seed))
    folder = tmp_path_factory.mktemp("folder")
    PLACES[name](around.format(secret), folder / name)
    text = outcome(
        f"search before a push: {name}", kind, lambda: check_private(folder, [Path(name)])
    )
    assert name in text and "looks like a" in text, (kind, secret)
    assert secret not in text


@fuzz(examples=60)
@given(kind=st.sampled_from(list(KINDS)), seed=seeds())
def test_no_kind_is_recorded_or_shown(kind, seed, tmp_path_factory):
    around, secret = KINDS[kind](Random(seed))
    text = around.format(secret)
    content = {
        "command": ["drafttrain", "x", f"--url={text}", text],
        "deep": [{"note": f"before {text} after"}],
    }
    path = tmp_path_factory.mktemp("folder") / "results.json"
    write_json(path, content)
    log = JsonlLog(path.with_suffix(".jsonl"), content)
    log.close()
    JsonlLog(path.with_suffix(".jsonl"), content).close()  # the same settings again
    written = (
        path.read_text()
        + path.with_suffix(".jsonl").read_text()
        + str(UserError(f"url={text!r} is wrong"))
    )
    assert secret not in written, written
    assert outcome("recorded JSON and errors", kind, lambda: None) == ""
    assert redact(redact(text)) == redact(text)


@fuzz(examples=24)
@given(seed=seeds())
def test_values_of_secret_names_are_hidden_whatever_they_look_like(seed):
    random = Random(seed)
    secret = word(random, ALNUM + "+/._", random.randint(5, 40))
    name = random.choice(
        [
            "api_key",
            "api-key",
            "hub_token",
            "hf-token",
            "wandb_api_key",
            "password",
            "client_secret",
        ]
    )
    for value in (
        [f"--{name}", secret],
        [f"--{name}={secret}"],
        [f"{name}={secret}"],
        {name: secret},
        {"a": {name.upper(): secret}},
        f"http://host/v1?{name}={secret}&x=1",
        f"https://user:{word(random, ALNUM, 9)}@host/{name}={secret}",
        f"Authorization: Bearer {secret}___",
    ):
        assert secret not in json.dumps(redact(value)), value
    assert redact(["--api-key-env", "NAME", "--max-new-tokens", "9"]) == [
        "--api-key-env",
        "NAME",
        "--max-new-tokens",
        "9",
    ]


def test_values_of_the_environment_are_hidden(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "just-my-own-word")
    monkeypatch.setenv("MY_SERVER_TOKEN", "shorter1")
    assert redact("with token=abcd, {'token': 'abcd'}") == "with token=***, {'token': '***'}"
    assert redact("the server said: just-my-own-word? shorter1!") == "the server said: ***? ***!"


@pytest.mark.parametrize(
    "text",
    [
        "max_new_tokens=2.5 must be 1 or more",
        "target='someone/model' and eos_token='</s>', pad_token: '<pad>', tokens_per_second=3.25",
        "url='http://localhost:8000/v1' cannot be reached; write http://HOST:PORT",
        "key='chain:3' must be one of a, b, c",
        "sha256 is b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "drafttrain eval --drafter runs/drafter --output results.json",
        "first drafted token: 0.58 right on held-out training data, 0.31 accepted here",
    ],
)
def test_ordinary_errors_stay_as_they_are(text):
    assert redact(text) == text and find_secret(text) is None


@fuzz(examples=24)
@given(seed=seeds())
def test_ids_and_hashes_are_no_secrets(seed):
    random = Random(seed)
    row = {
        "id": word(random, HEX, random.choice([16, 32, 40, 64])),
        "tokens": random.choices(range(50000), k=200),
    }
    row |= {
        "revision": word(random, HEX, 40),
        "text": word(random, ALNUM + "    +/=", 2000),
        "file": word(random, ALNUM, 12),
    }
    assert find_secret(json.dumps(row)) is None
    assert redact(row) == row


OWN = ("eval/results", "eval/suites", "tests/fixtures", "docs", "drafttrain", "configs")


@pytest.mark.thorough
@pytest.mark.parametrize("folder", OWN)
def test_our_own_files_hold_no_secrets(folder):
    files = [
        path
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    assert files
    for path in files:
        for line in path.read_bytes().decode(errors="replace").splitlines():
            assert find_secret(line) is None, (path, line[:300])


@pytest.mark.parametrize(
    "text",
    [
        "hf_xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
        "AKIAIOSFODNN7EXAMPLE",
        "postgres://user:password@localhost/db",
        "https://<user>:<password>@host/",
        "https://${USER}:${PASS}@host/",
        "sk-your-api-key-of-1-long-placeholdertext",
    ],
)
def test_placeholders_are_no_secrets(text):
    assert find_secret(text) is None
