from __future__ import annotations

import json
import math
import socket
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from tokenizers import normalizers

from drafttrain import cli
from drafttrain.data import backends
from drafttrain.data.store import load_records, read_meta
from drafttrain.data.vllm_backend import applied_rules, token_biases
from drafttrain.files import write_jsonl
from tests.conftest import CHAT_TEMPLATE, make_tokenizer
from tests.data.commands import generate
from tests.data.faulty_server import Handler, LocalServer, chat, completion
from tests.files import load_json, load_jsonl


class Server(LocalServer):
    """A chat completion server whose first replies can be faults.

    Args:
        answers: ids that it answers with, one entry per turn, in place of text; it then exchanges token ids.
        tokenizer: its own. message: more fields of its chat messages.
    """

    def __init__(self, failures=(), answers=(), tokenizer=None, message=None):
        self.failures = list(failures)
        self.requests = []
        self.lock = threading.Lock()
        self.answers = answers
        self.tokenizer = tokenizer
        self.message = message or {}
        self.start()

    def respond(self, handler: Handler, body: dict) -> None:
        by_ids = self.answers and body.get("return_token_ids")
        if body["max_tokens"] == 1:  # asks how the server exchanges tokens
            handler.answer(self.ids(body) if self.answers else completion("a", "length"))
            return
        with self.lock:
            self.requests.append((handler.path, body))
            if self.failures:
                handler.reply(self.failures.pop(0), b'{"error": "no"}')
                return
        if by_ids:
            handler.answer(self.ids(body))
        elif handler.path.endswith("chat/completions"):
            finish = "length" if body["messages"][-1]["content"] == "cut" else "stop"
            good = chat(f"reply {len(body['messages'])}", finish)
            good["choices"][0]["message"].update(self.message)
            handler.answer(good)
        else:
            handler.answer(completion(" a time"))

    def ids(self, body: dict) -> dict:
        """A completion as vLLM writes it with return_token_ids."""
        read = body["prompt"]
        if isinstance(read, str):
            read = self.tokenizer(read, add_special_tokens=body["add_special_tokens"])["input_ids"]
        answer = self.answers[min(read.count(257), len(self.answers)) - 1] if self.answers else []
        finish = "stop" if answer[-1] == 257 else "length"
        choice = {
            "text": "?",
            "token_ids": answer,
            "prompt_token_ids": read,
            "finish_reason": finish,
            "stop_reason": None,
        }
        return {"choices": [choice]}


@pytest.fixture
def prompts(tmp_path):
    def user(text):
        return {"role": "user", "content": text}

    rows = [
        {
            "id": f"c{i}",
            "messages": [user(f"hello {i}"), {"role": "assistant", "content": "x"}, user("go on")],
        }
        for i in range(4)
    ]
    rows += [
        {
            "id": "cut",
            "messages": [user("cut"), {"role": "assistant", "content": "x"}, user("never asked")],
        }
    ]
    rows += [{"id": "text", "text": "once upon"}]
    path = tmp_path / "prompts.jsonl"
    write_jsonl(path, rows)
    return path


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(backends, "_FIRST_PAUSE", 0.001)


def check_rows(tokenizer, rows) -> None:
    assert set(rows) == {"c0", "c1", "c2", "c3", "cut", "text"}
    first = rows["c2"]
    text = tokenizer.decode(first["tokens"])
    spans = [tokenizer.decode(first["tokens"][start:end]) for start, end in first["spans"]]
    assert spans == ["reply 1<|im_end|>", "reply 3<|im_end|>"]
    assert first["finish"] == ["stop", "stop"]
    assert text == (
        "<|im_start|>user\nhello 2<|im_end|>\n<|im_start|>assistant\nreply 1<|im_end|>\n"
        "<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\nreply 3<|im_end|>"
    )
    assert rows["cut"]["finish"] == ["length"]
    assert tokenizer.decode(rows["cut"]["tokens"]).endswith("reply 1")
    assert tokenizer.decode(rows["text"]["tokens"]) == "once upon a time<|im_end|>"


@pytest.mark.thorough
def test_openai_with_two_servers_and_errors_first(target_dir, prompts, tmp_path, tokenizer):
    with Server([500, 429]) as one, Server([503]) as two:
        options = [
            "--backend",
            "openai",
            "--url",
            one.url,
            "--url",
            two.url + "/v1/",
            "--temperature",
            "0.5",
        ]
        assert (
            generate(
                target_dir,
                prompts,
                tmp_path / "out",
                *options,
                "--top-k",
                "9",
                "--max-new-tokens",
                "77",
            )
            == 0
        )
        asked = one.requests + two.requests
        assert one.requests
        assert two.requests
        assert len(asked) == 4 * 2 + 2 + 3
    check_rows(tokenizer, {row["id"]: row for row in load_records(tmp_path / "out")})
    path, body = next((path, body) for path, body in asked if len(body.get("messages", [])) == 3)
    assert path == "/v1/chat/completions"
    assert body["model"] == "served-model"
    assert body["max_tokens"] == 77
    assert body["temperature"] == 0.5
    assert body["top_k"] == 9
    assert body["messages"][1] == {"role": "assistant", "content": "reply 1"}
    assert len({body["seed"] for _, body in asked}) == 10, "a seed per response, kept over retries"


def test_unreachable_server(target_dir, prompts, tmp_path, capsys):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    assert generate(target_dir, prompts, tmp_path / "a", "--backend", "openai", "--url", url) == 2
    assert f"url='{url}' cannot be reached (ConnectError" in capsys.readouterr().err
    assert (
        generate(
            target_dir, prompts, tmp_path / "b", "--backend", "openai", "--url", url, "--model", "m"
        )
        == 2
    )
    assert f"url='{url}' cannot be reached (ConnectError" in capsys.readouterr().err


def test_vllm_not_installed(target_dir, prompts, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert generate(target_dir, prompts, tmp_path / "out", "--backend", "vllm") == 2
    assert "vllm is not installed here; pip install vllm" in capsys.readouterr().err


class FakeEngine:
    """vLLM's engine: answers `reply N` to the N-th message, two requests per step, the newest first."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.asked = []
        self.most = 0

    def add_request(self, key, prompt, params):
        self.asked.append((key, prompt["prompt_token_ids"], params))
        self.most = max(self.most, len(self.asked))

    def step(self):
        now = self.asked[-2:]
        self.asked = self.asked[:-2]
        for key, ids, params in now:
            assert 257 in params.stop_token_ids
            text = self.tokenizer.decode(ids)
            turns = text.count("assistant") * 2 - 1
            reply, stop = (f"reply {turns}", [257]) if turns > 0 else (" a time", [])
            reason, stop = ("length", []) if "cut" in text else ("stop", stop)
            token_ids = self.tokenizer(reply, add_special_tokens=False)["input_ids"] + stop
            completion = SimpleNamespace(
                token_ids=token_ids, finish_reason=reason, stop_reason=None
            )
            yield SimpleNamespace(request_id=key, finished=True, outputs=[completion])
        yield SimpleNamespace(request_id="0", finished=False, outputs=[])


@pytest.fixture
def vllm(monkeypatch, tokenizer):
    """A fake of vLLM in process; `made` holds the arguments of its engines, `params` those of its requests."""
    fake = SimpleNamespace(made=[], params=[], engine=FakeEngine(tokenizer))
    fake.LLM = lambda **options: (
        fake.made.append(options) or SimpleNamespace(llm_engine=fake.engine)
    )
    fake.SamplingParams = lambda **values: fake.params.append(values) or SimpleNamespace(**values)
    fake.sampling_params = SimpleNamespace(RequestOutputKind=SimpleNamespace(FINAL_ONLY=2))
    monkeypatch.setitem(sys.modules, "vllm", fake)
    return fake


def test_vllm_in_process(target_dir, prompts, tmp_path, tokenizer, vllm):
    options = ["--backend", "vllm", "--max-length", "300", "--slots", "4", "--min-p", "0.1"]
    options += [
        "--tensor-parallel-size",
        "2",
        "--pipeline-parallel-size",
        "3",
        "--quantization",
        "fp8",
    ]
    assert generate(target_dir, prompts, tmp_path / "out", *options) == 0
    check_rows(tokenizer, {row["id"]: row for row in load_records(tmp_path / "out")})
    (made,) = vllm.made
    assert made["model"] == str(target_dir)
    assert made["max_model_len"] == 300
    assert (made["tensor_parallel_size"], made["pipeline_parallel_size"], made["quantization"]) == (
        2,
        3,
        "fp8",
    )
    assert made["max_num_seqs"] == 4 == vllm.engine.most
    assert {values["min_p"] for values in vllm.params} == {0.1}


def test_vllm_applies_what_it_can_of_the_generation_config(
    target_dir, prompts, tmp_path, vllm, capsys
):
    path = target_dir / "generation_config.json"
    rules = {
        "repetition_penalty": 1.3,
        "suppress_tokens": [7],
        "bad_words_ids": [[8], [257]],
        "min_new_tokens": 5,
        "sequence_bias": [[[9], 0.5]],
        "no_repeat_ngram_size": 3,
    }
    path.write_text(json.dumps({**load_json(path), **rules}))
    assert generate(target_dir, prompts, tmp_path / "out", "--backend", "vllm") == 0
    assert (
        "does not apply no_repeat_ngram_size of the target's generation_config"
        in capsys.readouterr().err
    )
    for values in vllm.params:
        assert values["repetition_penalty"] == 1.3 and values["min_tokens"] == 5
        assert values["logit_bias"] == {9: 0.5, 8: -math.inf, 7: -math.inf}
    del rules["no_repeat_ngram_size"], rules["repetition_penalty"]
    recorded = read_meta(tmp_path / "out")["sampling"]
    assert recorded["generation_config"] == rules and recorded["repetition_penalty"] == 1.3
    assert (
        generate(
            target_dir, prompts, tmp_path / "own", "--backend", "vllm", "--repetition-penalty", "1"
        )
        == 0
    )
    assert vllm.params[-1]["repetition_penalty"] == 1


def test_biases_are_what_transformers_computes(target):
    generation = target.model.generation_config
    generation.update(
        suppress_tokens=[7], bad_words_ids=[[8], [257]], sequence_bias=[[[9], 0.5], [[8], 2.0]]
    )
    rules = applied_rules(target.generation.rules)
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(0))
    prompt = torch.arange(5)
    want = logits.clone()
    for processor in target.generation.rules.processors(target.model, prompt, 9, {257}):
        want = processor(prompt[None], want)
    for token, bias in token_biases(rules, {257}).items():
        logits[0, token] += bias
    assert torch.equal(logits, want)
    generation.bad_words_ids = [[8], [1, 2]]
    assert "bad_words_ids" not in applied_rules(target.generation.rules).settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--url", "http://a"],
            "url and model need --backend openai; --backend local asks no server",
        ),
        (["--tensor-parallel-size", "2"], "'tensor_parallel_size' is for --backend vllm"),
        (
            ["--backend", "openai", "--url", "http://a", "--", "--enforce-eager"],
            "'--enforce-eager' is for --backend vllm",
        ),
    ],
)
def test_flags_of_other_backends_are_refused(
    target_dir, prompts, tmp_path, capsys, options, message
):
    assert generate(target_dir, prompts, tmp_path / "out", *options) == 2
    assert message in capsys.readouterr().err


# -- token ids ------------------------------------------------------------------------------------------------------

ODD = [[108, 200, 3, 257], [5, 5, 257]]  # no text is tokenized like this


def test_ids_are_stored_as_served(target_dir, prompts, tmp_path, capsys, tokenizer):
    with (
        Server(answers=ODD, tokenizer=tokenizer) as one,
        Server(answers=ODD, tokenizer=tokenizer) as two,
    ):
        options = [
            "--backend",
            "openai",
            "--url",
            one.url,
            "--url",
            two.url,
            "--repetition-penalty",
            "1.5",
        ]
        assert generate(target_dir, prompts, tmp_path / "out", *options) == 0
        asked = [body for server in (one, two) for _, body in server.requests]
    assert (
        "prompts and answers are exchanged as token ids, and stored as served"
        in capsys.readouterr().out
    )
    rows = {row["id"]: row for row in load_records(tmp_path / "out")}
    assert set(rows) == {"c0", "c1", "c2", "c3", "cut", "text"}
    for key, row in rows.items():
        spans = [row["tokens"][start:end] for start, end in row["spans"]]
        assert spans == (ODD[1:] if key == "text" else ODD), key
        for start, _ in row["spans"]:
            assert row["tokens"][:start] in [body["prompt"] for body in asked]
        assert row["finish"] == ["stop"] * len(spans)
    for body in asked:
        assert (body["top_k"], body["min_p"], body["repetition_penalty"]) == (-1, 0.0, 1.5)
        assert body["stop_token_ids"] == [257] and body["return_token_ids"] is True


def test_another_tokenizer_is_refused(target_dir, prompts, tmp_path, capsys, tokenizer):
    other = make_tokenizer()
    other._tokenizer.normalizer = normalizers.Lowercase()
    with Server(answers=ODD, tokenizer=other) as server:
        options = ["--backend", "openai", "--url", server.url]
        assert generate(target_dir, prompts, tmp_path / "out", *options) == 2
    shown = capsys.readouterr().err.splitlines()
    # The first command of a process also names its device.
    errors = [line for line in shown if not line.startswith("device ")]
    assert len(errors) == 1
    assert "serves another tokenizer than target=" in errors[0]
    assert "serve the target" in errors[0]


@pytest.mark.thorough
def test_one_server_without_ids_makes_all_answer_in_text(
    target_dir, prompts, tmp_path, capsys, tokenizer
):
    with Server(answers=ODD, tokenizer=tokenizer) as one, Server() as two:
        options = ["--backend", "openai", "--url", two.url, "--url", one.url]
        assert generate(target_dir, prompts, tmp_path / "out", *options) == 0
    check_rows(tokenizer, {row["id"]: row for row in load_records(tmp_path / "out")})
    said = capsys.readouterr().out
    assert (
        f"{two.url}: no exchange of token ids (malformed: choices.0.token_ids: field required)"
        in said
    )
    assert "as served" not in said


def test_sampled_answers_of_a_server_of_states_are_refused(
    target_dir, prompts, tmp_path, capsys, tokenizer
):
    """vLLM 0.32 runs the extraction of states as speculative decoding, and its sampled tokens are then wrong."""
    with Server(answers=ODD, tokenizer=tokenizer) as server:
        plain = server.ids
        server.ids = lambda body: {
            **plain(body),
            "kv_transfer_params": {"hidden_states_path": "/states/a.safetensors"},
        }
        words = ["--backend", "openai", "--url", server.url]
        assert generate(target_dir, prompts, tmp_path / "out", *words, "--temperature", "0.8") == 2
        assert "samples wrong tokens while it does so" in capsys.readouterr().err
        assert generate(target_dir, prompts, tmp_path / "greedy", *words, "--temperature", "0") == 0


def test_a_prompt_that_the_server_changed_costs_the_conversation(
    target_dir, prompts, tmp_path, tokenizer, capsys
):
    with Server(answers=ODD, tokenizer=tokenizer) as server:
        plain = server.ids
        server.ids = lambda body: plain(
            body if body["max_tokens"] == 1 else {**body, "prompt": body["prompt"][:-1]}
        )
        assert (
            generate(
                target_dir, prompts, tmp_path / "out", "--backend", "openai", "--url", server.url
            )
            == 2
        )
    assert (
        "token ids 6; the last reply: token ids: the server read another prompt than was sent"
        in capsys.readouterr().err
    )


THINKING = CHAT_TEMPLATE.replace(
    "message['content'] +",
    "('<t>' + message['thinking'] + '</t>' if message['thinking'] else '') + message['content'] +",
)


@pytest.mark.thorough
@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_reasoning_apart_is_put_back(target_dir, tmp_path, capsys, tokenizer, field):
    path = tmp_path / "prompts.jsonl"
    options = ["--backend", "openai", "--url"]
    path.write_text('{"id": "a", "messages": [{"role": "user", "content": "hi"}]}')
    with Server(message={field: "\nhm hm\n"}) as server:
        assert generate(target_dir, path, tmp_path / "none", *options, server.url) == 2
        assert (
            "reasoning: the chat template does not write the reasoning" in capsys.readouterr().err
        )
        (target_dir / "chat_template.jinja").write_text(THINKING)
        assert generate(target_dir, path, tmp_path / "both", *options, server.url) == 0
    with Server(
        message={field: "hm", "content": None}
    ) as server:  # cut off, or ended, while it reasoned
        assert generate(target_dir, path, tmp_path / "half", *options, server.url) == 0
    for name, want in (("both", "<t>\nhm hm\n</t>reply 1<|im_end|>"), ("half", "<t>hm<|im_end|>")):
        (row,) = load_records(tmp_path / name)
        assert tokenizer.decode(row["tokens"][slice(*row["spans"][0])]) == want


# -- prompts that the target writes on servers --------------------------------------------------------------------------


def write(target_dir, output, *more: str) -> int:
    return cli.main(
        [
            "prompts",
            "--source",
            "magpie",
            "--target",
            str(target_dir),
            "--output",
            str(output),
            "--count",
            "6",
            "--slots",
            "3",
            "--openings",
            "none",
            *more,
        ]
    )


@pytest.mark.thorough
def test_prompts_are_written_by_servers(target_dir, tmp_path, tokenizer, capsys):
    """The frame of a user's turn is sent as ids, each request with a seed of its own; one that fails is counted."""
    topics = [
        "tulips",
        "engines",
        "a long river",
        "seven planets",
        "old clocks",
        "bread and salt",
        "deep snow",
        "chess",
    ]
    with Server(answers=ODD, tokenizer=tokenizer) as server:

        def ids(body: dict) -> dict:
            number = len(server.requests) - 1
            text = f"Please tell me everything about {topics[number % len(topics)]} ({number})."
            answer = tokenizer(text, add_special_tokens=False)["input_ids"]
            cut = number == 1  # too long
            choice = {
                "token_ids": answer if cut else [*answer, 257],
                "finish_reason": "length" if cut else "stop",
            }
            return {
                "choices": [{**choice, "prompt_token_ids": body["prompt"] if number != 2 else [1]}]
            }

        probe = server.ids
        server.ids = lambda body: probe(body) if body["max_tokens"] == 1 else ids(body)
        assert write(target_dir, tmp_path / "p.jsonl", "--url", server.url) == 0
        asked = [body for _, body in server.requests]
    rows = load_jsonl(tmp_path / "p.jsonl")
    said = " ".join(capsys.readouterr().out.split())
    assert len(rows) == 6 and all(
        row["messages"][0]["content"].startswith("Please tell me") for row in rows
    )
    assert tokenizer.decode(asked[0]["prompt"]) == "<|im_start|>user\n"
    assert len({body["seed"] for body in asked}) == len(asked) >= 8
    assert (
        257 in asked[0]["stop_token_ids"]
        and asked[0]["temperature"] == 0.8
        and asked[0]["max_tokens"] == 256
    )
    assert "dropped: failed request: token ids" in said and "dropped: unfinished" in said


@pytest.mark.thorough
def test_a_server_without_ids_cannot_continue_an_open_turn(target_dir, tmp_path, capsys):
    with Server() as server:
        assert write(target_dir, tmp_path / "p.jsonl", "--url", server.url) == 2
    assert "source=magpie needs servers that exchange token ids" in capsys.readouterr().err
    assert (
        write(target_dir, tmp_path / "p.jsonl", "--url", "http://127.0.0.1:1", "--dtype", "float32")
        == 2
    )
    assert "dtype and device are for a target that runs here" in capsys.readouterr().err
