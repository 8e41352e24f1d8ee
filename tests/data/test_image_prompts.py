"""Prompts with images: rendering, conversations, and `drafttrain generate` on every backend."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from drafttrain import cli
from drafttrain.data.chat import ChatInputs, TemplateRefuses, render_text
from drafttrain.data.conversation import ChatRenderer, Conversation
from drafttrain.data.image_parts import read_images
from drafttrain.data.image_prompts import chat_prompt
from drafttrain.data.masks import recorded_conversations
from drafttrain.data.store import load_records, read_meta
from drafttrain.errors import UserError
from drafttrain.images import PictureStore, read_picture
from drafttrain.target import load_shell
from tests.data.commands import generate
from tests.data.faulty_server import LocalServer, chat, completion
from tests.data.seeing import (
    PLACEHOLDER,
    TEMPLATE,
    TOKENS,
    answer,
    picture,
    said,
    shown,
    stored,
    user,
    write_rows,
)
from tests.files import load_jsonl

pytestmark = pytest.mark.usefixtures("seeing_processor")
ASK = "which colour is it?"


@pytest.fixture
def target(seeing):
    return load_shell(seeing.folder)


def tokens_of(target, text):
    """Token ids of a text with a marker per image, expanded."""
    return target.tokenizer(text.replace("<|image|>", "<|image|>" * 4))["input_ids"]


def prompt_of(
    target,
    folder,
    *messages,
):
    read = read_images(messages, PictureStore(folder).read)
    return chat_prompt(target, read, ChatInputs())


# -- rendering ------------------------------------------------------------------------------------


def test_placeholders_are_expanded(
    target,
    seeing,
    tmp_path,
    monkeypatch,
):
    names = stored(tmp_path)
    asked = user(shown(names[0]), ASK, shown(names[1]))
    prompt = prompt_of(target, tmp_path, asked)
    text = f"user: <|image|>{ASK}<|image|></s>assistant: "
    assert prompt.ids.tolist() == tokens_of(target, text)
    assert prompt.digests == (picture(0).digest, picture(1).digest)
    # The processor's template comes first.
    monkeypatch.setattr(seeing.processor, "chat_template", "<s>" + TEMPLATE)
    assert prompt_of(target, tmp_path, asked).ids.tolist() == tokens_of(target, "<s>" + text)


def test_templates_that_drop_a_part(target):
    parts = ChatInputs(
        template="{% for m in messages %}{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}"
        "{{ c['text'] }}{% endfor %}{% endfor %}"
    )
    assert render_text(target.tokenizer, [{"role": "user", "content": ASK}], inputs=parts) == ASK
    with pytest.raises(TemplateRefuses, match="writes no images"):
        render_text(target.tokenizer, [user(shown("a"), ASK)], inputs=parts)
    with pytest.raises(TemplateRefuses, match=r"holds '<\|image\|>'"):
        render_text(target.tokenizer, [user(shown("a"), "<|image|>")])


# -- conversations --------------------------------------------------------------------------------


def test_turns(target, tmp_path):
    """A later turn goes on in the row; one with a new image begins another."""
    names = stored(tmp_path)
    messages = [user(shown(names[0]), ASK), answer("x"), user("and now?"), answer("x")]
    messages.append(user("and", shown(names[1]), "?"))
    renderer = ChatRenderer(target, PictureStore(tmp_path))
    it = Conversation.from_row({"id": "r", "messages": messages}, "p")
    it.open(renderer)
    it.accept(tokens_of(target, "red</s>"), "stop")
    glue = "user: and now?</s>assistant: "
    assert it.next_turn(renderer, 200) == tokens_of(target, glue)
    it.accept(tokens_of(target, "still</s>"), "stop")
    assert it.next_turn(renderer, 200) is None
    later = it.rest(renderer, 200)
    before = f"user: <|image|>{ASK}</s>assistant: red</s>{glue}still</s>"
    first = it.record(renderer)
    assert first["images"] == names[:1] and first["id"] == "r/0" and first["part"] == 0
    assert first["tokens"] == tokens_of(target, before) and len(first["spans"]) == 2
    assert later.tokens == tokens_of(target, f"{before}user: and<|image|>?</s>assistant: ")
    assert later.image_prompt.digests == (picture(0).digest, picture(1).digest)
    later.accept(tokens_of(target, "blue</s>"), "stop")
    record = later.record(renderer)
    assert record["images"] == names[:2] and len(record["spans"]) == 1
    it.follows = True
    assert it.rest(renderer, 20) is None  # no room for it

    # Recorded answers make the same rows.
    texts = iter(["red", "still"])
    said_by = [answer(next(texts)) if m["role"] == "assistant" else m for m in messages]
    path = tmp_path / "rows.jsonl"
    write_rows(path, [{"id": "r", "messages": [*said_by, answer("blue")]}])
    ((_, rows),) = recorded_conversations(target.tokenizer, path, renderer=renderer)
    assert [row["tokens"] for row in rows] == [first["tokens"], record["tokens"]]
    assert [row["images"] for row in rows] == [names[:1], names[:2]]
    assert [row["spans"] for row in rows] == [first["spans"], record["spans"]]
    ((_, refused),) = recorded_conversations(target.tokenizer, path)
    assert "images in these conversations are not read" in str(refused)


# -- generate -------------------------------------------------------------------------------------


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "p" / "prompts.jsonl"
    path.parent.mkdir()
    names = stored(path.parent)
    asked = {
        "one": user(shown(names[0]), ASK),
        "two": user(shown(names[0]), "or", shown(names[1])),
        "text": {"role": "user", "content": ASK},
        "gone": user(shown("gone.png"), ASK),
        "many": user(*[shown(names[2])] * 20, ASK),
    }
    rows = [{"id": key, "messages": [message, answer("red")]} for key, message in asked.items()]
    write_rows(path, rows)
    return path


def listed(output):
    """Reasons of failed rows, by id."""
    rows = load_jsonl(output / "failed-0000.jsonl")
    return {row["id"]: row["reason"] for row in rows}


BAD = {"gone": "image: no such file", "many": "prompt with images too long"}
SHORT = ("--max-length", "80", "--max-new-tokens", "9", "--temperature", "0", "--dtype", "float32")
TWO = [picture(0).name, picture(1).name]


def check_rows(output):
    rows = {row["id"]: row for row in load_records(output, images=True)}
    assert set(rows) == {"one", "two", "text"} and listed(output) == BAD
    assert [rows[key]["images"] for key in ("one", "two", "text")] == [TWO[:1], TWO, None]
    assert {path.name for path in (output / "images").iterdir()} == set(TWO)
    with pytest.raises(UserError, match="has rows with images"):
        load_records(output)
    assert read_meta(output)["counts"]["images"] == 3
    return rows


def test_the_target_here(
    seeing,
    target,
    prompts,
    tmp_path,
    capsys,
):
    output = tmp_path / "data"
    words = (seeing.folder, prompts, output, "--features", "1", *SHORT)
    assert generate(*words) == 0
    out = capsys.readouterr().out
    assert "too long: raise --max-length" in out and "no such file: replace that image" in out
    sees = seeing.load()
    for key, row in check_rows(output).items():
        if key != "text":  # the text is the model's own
            (start, end), *_ = row["spans"]
            text = target.tokenizer.decode(row["tokens"][:start]).replace(
                "<|image|>" * 4, "<|image|>"
            )
            prompt = sees.image_prompt(text, [picture(0), picture(1)][: len(row["images"])])
            assert prompt.ids.tolist() == row["tokens"][:start]
            assert seeing.generate(prompt, end - start) == row["tokens"][start:end]

    # Run again: nothing is asked for twice, and a mended image is answered.
    (prompts.parent / "gone.png").write_bytes(picture(3).data)
    assert generate(*words) == 0
    assert "this run: 1 conversation," in capsys.readouterr().out
    assert listed(output) == {"many": BAD["many"]}


def test_recorded_answers(
    seeing,
    target,
    prompts,
    tmp_path,
):
    output = tmp_path / "data"
    words = (seeing.folder, prompts, output, "--backend", "existing", "--max-length", "80")
    assert generate(*words) == 0
    row = check_rows(output)["two"]
    text = "user: <|image|>or<|image|></s>assistant: "
    assert row["tokens"] == tokens_of(target, f"{text}red</s>")
    assert row["spans"] == [[len(tokens_of(target, text)), len(row["tokens"])]]
    # Published sets have their pictures.
    words_of = (
        f"--data {output} --repo a/b --prompt-license own --dry-run --output {tmp_path / 'hub'}"
    )
    assert cli.main(["push-data", *words_of.split()]) == 0
    assert {path.name for path in (tmp_path / "hub" / "images").iterdir()} == set(TWO)
    # An overwritten set takes its pictures with it.
    asked = user(shown(picture(2).name), ASK)
    write_rows(prompts, [{"id": "one", "messages": [asked, answer("red")]}])
    assert generate(*words, "--overwrite") == 0
    assert [path.name for path in (output / "images").iterdir()] == [picture(2).name]


class SeeingServer(LocalServer):
    """A server of the target that reads images in chats.

    Args:
        by_ids: it exchanges token ids. extra: text that it puts before a prompt with images.
    """

    def __init__(
        self,
        target,
        by_ids,
        extra="",
    ):
        self.target = target
        self.by_ids = by_ids
        self.extra = extra
        self.start()

    def respond(
        self,
        handler,
        body,
    ):
        if "prompt" in body:
            reply = completion("seen 0")
            text = body["prompt"]
            ids = text if isinstance(text, list) else tokens_of(self.target, text)
            assert 259 not in ids, "/v1/completions drops images"
            more = {"prompt_token_ids": ids}
        else:
            pictures = []
            messages = []
            for message in body["messages"]:
                parts = message["content"]
                if isinstance(parts, str):
                    parts = [said(parts)]
                found = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
                pictures += map(read_picture, found)
                parts = [part if part["type"] == "text" else shown("a") for part in parts]
                messages.append({"role": message["role"], "content": parts})
            text = self.extra + render_text(self.target.tokenizer, messages, True)
            reply = chat(f"seen {len(pictures)}")
            reply["prompt_token_ids"] = tokens_of(self.target, text)
            del reply["choices"][0]["token_ids"]
            more = {}
        if self.by_ids:
            text = reply["choices"][0].get("text") or f"seen {len(pictures)}"
            reply["choices"][0] |= {"token_ids": tokens_of(self.target, text), **more}
        handler.answer(reply)


@pytest.mark.parametrize("by_ids", [True, False])
def test_servers_get_images_in_chats(
    seeing,
    target,
    prompts,
    tmp_path,
    by_ids,
):
    output = tmp_path / "data"
    with SeeingServer(target, by_ids) as server:
        words = ("--backend", "openai", "--url", server.url, *SHORT[:-2])
        assert generate(seeing.folder, prompts, output, *words) == 0
    text = "user: <|image|>or<|image|></s>assistant: seen 2</s>"
    assert check_rows(output)["two"]["tokens"] == tokens_of(target, text)


@pytest.mark.parametrize("more", [[], [70]])
def test_vllm_in_process_gets_markers_and_pixels(
    seeing,
    target,
    prompts,
    tmp_path,
    monkeypatch,
    more,
):
    """more: tokens that vLLM reads besides."""
    asked = []
    engine = SimpleNamespace(add_request=lambda *given: asked.append(given))

    def step():
        key, prompt, _ = asked.pop()
        ids = []
        for token in prompt["prompt_token_ids"]:
            ids += [token] * TOKENS if token == PLACEHOLDER else [token]
        pixels = prompt.get("multi_modal_data", {"image": []})["image"]
        assert [image.mode for image in pixels] == ["RGB"] * (ids.count(PLACEHOLDER) // TOKENS)
        said = tokens_of(target, f"{[image.width for image in pixels]}</s>")
        done = SimpleNamespace(token_ids=said, finish_reason="stop", stop_reason=None)
        yield SimpleNamespace(
            request_id=key, finished=True, outputs=[done], prompt_token_ids=ids + more
        )

    engine.step = step
    fake = SimpleNamespace(
        LLM=lambda **_: SimpleNamespace(llm_engine=engine),
        SamplingParams=SimpleNamespace,
        sampling_params=SimpleNamespace(RequestOutputKind=SimpleNamespace(FINAL_ONLY=2)),
    )
    monkeypatch.setitem(sys.modules, "vllm", fake)
    output = tmp_path / "data"
    assert generate(seeing.folder, prompts, output, "--backend", "vllm", *SHORT) == 0
    if more:
        assert listed(output) == {**BAD, "one": "token ids", "two": "token ids"}
        return
    text = "user: <|image|>or<|image|></s>assistant: [30, 31]</s>"
    assert check_rows(output)["two"]["tokens"] == tokens_of(target, text)


def test_a_server_that_reads_another_prompt(
    seeing,
    target,
    prompts,
    tmp_path,
):
    output = tmp_path / "data"
    with SeeingServer(target, True, "<s>") as server:
        words = ("--backend", "openai", "--url", server.url, *SHORT[:-2])
        assert generate(seeing.folder, prompts, output, *words) == 0
    assert listed(output) == {**BAD, "one": "token ids", "two": "token ids"}


def test_prompts_that_are_refused_at_once(
    seeing,
    target_dir,
    prompts,
    tmp_path,
    capsys,
):
    assert generate(target_dir, prompts, tmp_path / "a") == 2
    assert "reads no images" in capsys.readouterr().err
    write_rows(prompts, [{"id": "a", "messages": [user(ASK, {"type": "video"})]}])
    assert generate(seeing.folder, prompts, tmp_path / "b") == 2
    assert "messages may have text and images only" in capsys.readouterr().err
