"""Prompts with images: rendering, conversations, and `drafttrain generate` on every backend."""

from __future__ import annotations

import base64
import json
from dataclasses import replace

import pytest

from drafttrain.data.chat import ChatInputs, TemplateRefuses, render_text
from drafttrain.data.conversation import ChatRenderer, Conversation
from drafttrain.data.image_parts import read_images
from drafttrain.data.image_prompts import chat_prompt
from drafttrain.data.masks import recorded_conversations
from drafttrain.data.store import load_records, read_meta
from drafttrain.errors import UserError
from drafttrain.images import BadPicture, Picture, PictureStore
from drafttrain.target import load_shell
from drafttrain.target.sight import Sight
from tests.data.commands import generate
from tests.data.faulty_server import Handler, LocalServer, chat, completion
from tests.data.seeing import (
    PLACEHOLDER,
    TEMPLATE,
    TOKENS,
    answer,
    make_seeing,
    picture,
    said,
    shown,
    stored,
    user,
    write_rows,
)

ASK = "which colour is it?"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return make_seeing(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(autouse=True)
def processor(built, monkeypatch):
    monkeypatch.setattr(Sight, "_load_processor", lambda self: built.processor)


@pytest.fixture
def target(built):
    return load_shell(built.folder)


def decoded(target, ids):
    return target.tokenizer.decode(ids)


def ids(target, text):
    return target.tokenizer(text)["input_ids"]


def images_of(text):
    return text.replace("<|image|>", "<|image|>" * TOKENS)


def prompt_of(target, folder, *messages):
    read = read_images(messages, PictureStore(folder).read)
    return chat_prompt(target, read, ChatInputs())


# -- rendering ------------------------------------------------------------------------------------


def test_placeholders_are_expanded(target, tmp_path):
    names = stored(tmp_path)
    prompt = prompt_of(target, tmp_path, user(shown(names[0]), ASK, shown(names[1])))
    text = f"user: <|image|>{ASK}<|image|></s>assistant: "
    assert decoded(target, prompt.ids) == images_of(text)
    assert prompt.digests == (picture(0).digest, picture(1).digest)
    plain = prompt_of(target, tmp_path, {"role": "user", "content": "hi"})
    assert plain == ids(target, "user: hi</s>assistant: ")


def test_a_template_that_reads_parts_only(target):
    parts = (
        "{% for m in messages %}{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}"
        "{{ c['text'] }}{% endfor %}{% endfor %}"
    )
    messages = [{"role": "user", "content": ASK}]
    assert render_text(target.tokenizer, messages, inputs=ChatInputs(template=parts)) == ASK
    seen = [user(shown("a.png"), ASK)]
    with pytest.raises(TemplateRefuses, match="writes no images"):
        render_text(target.tokenizer, seen, inputs=ChatInputs(template=parts))


def test_text_that_looks_like_an_image_is_refused(target):
    seen = [user(shown("a.png"), "what does <|image|> mean?")]
    with pytest.raises(TemplateRefuses, match=r"holds '<\|image\|>'"):
        render_text(target.tokenizer, seen)


def test_the_processors_template_comes_first(target, built, monkeypatch, tmp_path):
    names = stored(tmp_path)
    monkeypatch.setattr(built.processor, "chat_template", "<s>" + TEMPLATE)
    prompt = prompt_of(target, tmp_path, user(shown(names[0]), ASK))
    assert decoded(target, prompt.ids).startswith("<s>user: <|image|>")


def test_a_target_that_reads_text_only(target_dir, tmp_path):
    names = stored(tmp_path)
    with pytest.raises(UserError, match="reads no images") as caught:
        prompt_of(load_shell(str(target_dir)), tmp_path, user(shown(names[0]), ASK))
    assert not isinstance(caught.value, BadPicture)  # every row would fail


# -- conversations --------------------------------------------------------------------------------


def opened(target, folder, *messages, **more):
    row = {"id": "r", "messages": list(messages)}
    renderer = ChatRenderer(target, PictureStore(folder))
    it = Conversation.from_row(row, "p")
    it.open(renderer)
    return replace(it, **more) if more else it, renderer


def test_turns_about_the_same_image(target, tmp_path):
    names = stored(tmp_path)
    it, renderer = opened(
        target, tmp_path, user(shown(names[0]), ASK), answer("x"), user("and now?")
    )
    it.accept(ids(target, "red</s>"), "stop")
    glue = it.next_turn(renderer, 200)
    assert decoded(target, glue) == "user: and now?</s>assistant: "
    it.accept(ids(target, "still red</s>"), "stop")
    assert it.next_turn(renderer, 200) is None and it.rest(renderer, 200) is None
    record = it.record(renderer)
    assert record["images"] == [names[0]] and "part" not in record
    assert [decoded(target, record["tokens"][a:b]) for a, b in record["spans"]] == [
        "red</s>",
        "still red</s>",
    ]
    text = f"user: <|image|>{ASK}</s>assistant: red</s>user: and now?</s>assistant: still red</s>"
    assert decoded(target, record["tokens"]) == images_of(text)
    assert PLACEHOLDER not in [
        token for a, b in record["spans"] for token in record["tokens"][a:b]
    ]


def test_a_turn_with_a_new_image_begins_a_row(target, tmp_path):
    names = stored(tmp_path)
    it, renderer = opened(
        target,
        tmp_path,
        user(shown(names[0]), ASK),
        answer("x"),
        user("and", shown(names[1]), "?"),
    )
    it.accept(ids(target, "red</s>"), "stop")
    assert it.next_turn(renderer, 200) is None and it.follows
    later = it.rest(renderer, 200)
    first = it.record(renderer)
    assert first["images"] == [names[0]] and first["id"] == "r/0" and first["part"] == 0
    text = f"user: <|image|>{ASK}</s>assistant: red</s>user: and<|image|>?</s>assistant: "
    assert decoded(target, later.tokens) == images_of(text)
    assert later.image_prompt.digests == (picture(0).digest, picture(1).digest)
    later.accept(ids(target, "blue</s>"), "stop")
    assert later.record(renderer)["images"] == names[:2]
    assert later.record(renderer)["spans"] == [[len(later.tokens) - 5, len(later.tokens)]]

    # Without room for it, the conversation ends.
    it.follows = True
    assert it.rest(renderer, 20) is None


# -- generate -------------------------------------------------------------------------------------


def rows_of(names):
    return [
        {"id": "one", "messages": [user(shown(names[0]), ASK), answer("red")]},
        {"id": "two", "messages": [user(shown(names[0]), "or", shown(names[1])), answer("blue")]},
        {"id": "text", "messages": [{"role": "user", "content": ASK}, answer("green")]},
        {"id": "gone", "messages": [user(shown("gone.png"), ASK), answer("x")]},
        {"id": "many", "messages": [user(*[shown(names[2])] * 20, ASK), answer("x")]},
    ]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "p" / "prompts.jsonl"
    path.parent.mkdir()
    names = stored(path.parent)
    write_rows(path, rows_of(names))
    return path


def listed(output):
    """Reasons of failed rows, by id."""
    found = {}
    for path in output.glob("failed-*.jsonl"):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            found[row["id"]] = row["reason"]
    return found


BAD = {"gone": "image: no such file", "many": "prompt with images too long"}
SHORT = ("--max-length", "80", "--max-new-tokens", "6")


def test_the_target_here(built, target, prompts, tmp_path, capsys):
    output = tmp_path / "data"
    words = ("--temperature", "0", "--dtype", "float32", "--features", "1", *SHORT)
    assert generate(built.folder, prompts, output, *words) == 0
    rows = {row["id"]: row for row in load_records(output)}
    assert set(rows) == {"one", "two", "text"} and listed(output) == BAD
    out = capsys.readouterr().out
    assert "prompt with images too long: raise --max-length" in out
    assert "image: no such file: replace that image" in out
    assert rows["text"]["images"] is None
    assert rows["two"]["images"] == [picture(0).name, picture(1).name]
    assert read_meta(output)["counts"]["images"] == 3
    copies = {path.name for path in (output / "images").iterdir()}
    assert copies == {picture(0).name, picture(1).name}
    # The text is the model's own.
    for key, digests in (("one", [0]), ("two", [0, 1])):
        ids = rows[key]["tokens"]
        (start, end), *_ = rows[key]["spans"]
        seeing = built.load()
        text = decoded(target, ids[:start]).replace("<|image|>" * TOKENS, "<|image|>")
        prompt = seeing.image_prompt(text, [picture(number) for number in digests])
        assert prompt.ids.tolist() == ids[:start]
        assert built.generate(prompt, end - start) == ids[start:end]

    # Run again: nothing is asked for twice, and a mended image is answered.
    (prompts.parent / "gone.png").write_bytes(picture(3).data)
    assert generate(built.folder, prompts, output, *words) == 0
    rows = {row["id"]: row for row in load_records(output)}
    assert rows["gone"]["images"] == [picture(3).name]
    assert listed(output) == {"many": BAD["many"]}
    assert "this run: 1 conversation," in capsys.readouterr().out


def test_recorded_answers(built, target, prompts, tmp_path):
    output = tmp_path / "data"
    words = ("--backend", "existing", "--max-length", "80")
    assert generate(built.folder, prompts, output, *words) == 0
    rows = {row["id"]: row for row in load_records(output)}
    assert set(rows) == {"one", "two", "text"} and listed(output) == BAD
    text = "user: <|image|>or<|image|></s>assistant: blue</s>"
    assert decoded(target, rows["two"]["tokens"]) == images_of(text)
    (start, end), *_ = rows["two"]["spans"]
    assert decoded(target, rows["two"]["tokens"][start:end]) == "blue</s>"
    assert rows["two"]["images"] == [picture(0).name, picture(1).name]
    assert (output / "images" / picture(1).name).is_file()
    # An overwritten set takes its pictures with it.
    write_rows(prompts, [rows_of([picture(2).name] * 4)[0]])
    assert generate(built.folder, prompts, output, *words, "--overwrite") == 0
    assert [path.name for path in (output / "images").iterdir()] == [picture(2).name]


def test_recorded_turns_with_new_images(target, tmp_path):
    names = stored(tmp_path)
    turns = [user(shown(names[0]), "a"), answer("b"), user("c"), answer("d")]
    turns += [user(shown(names[1]), "e"), answer("f")]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"id": "r", "messages": turns}) + "\n")
    renderer = ChatRenderer(target, PictureStore(tmp_path))
    ((_, records),) = recorded_conversations(target.tokenizer, path, renderer=renderer)
    assert [record["images"] for record in records] == [names[:1], names[:2]]
    assert [len(record["spans"]) for record in records] == [2, 1]
    assert records[0]["part"] == 0 and "part" not in records[1]
    assert records[1]["tokens"].count(PLACEHOLDER) == 2 * TOKENS
    ((_, refused),) = recorded_conversations(target.tokenizer, path)
    assert "images in these conversations are not read" in str(refused)


# -- servers --------------------------------------------------------------------------------------


class SeeingServer(LocalServer):
    """A server of the target that reads images in chats.

    Args:
        by_ids: it exchanges token ids. expanded: placeholders of an image, as it counts them.
    """

    def __init__(self, tokenizer, by_ids, expanded=TOKENS):
        self.tokenizer = tokenizer
        self.by_ids = by_ids
        self.expanded = expanded
        self.requests = []
        self.start()

    def respond(self, handler: Handler, body: dict) -> None:
        if handler.path.endswith("/completions") and "messages" not in body:
            read = body["prompt"]
            if isinstance(read, str):
                read = self.tokenizer(read, add_special_tokens=False)["input_ids"]
            assert PLACEHOLDER not in read, "ids of placeholders drop the images"
            reply = completion("?", "length")
            if self.by_ids:
                reply["choices"][0] |= {
                    "token_ids": self.tokenizer("text</s>")["input_ids"],
                    "prompt_token_ids": read,
                    "finish_reason": "stop",
                }
            handler.answer(reply)
            return
        self.requests.append(body)
        pictures = []
        messages = []
        for message in body["messages"]:
            parts = []
            for part in message["content"] if isinstance(message["content"], list) else ():
                if part["type"] == "image_url":
                    data = base64.b64decode(part["image_url"]["url"].partition(",")[2])
                    pictures.append(Picture(data).digest)
                    part = shown("x")
                parts.append(part)
            messages.append({**message, "content": parts or message["content"]})
        text = render_text(self.tokenizer, messages, True)
        marks = text.replace("<|image|>", "<|image|>" * self.expanded)
        reply = chat(f"seen {len(pictures)}")
        del reply["choices"][0]["token_ids"]
        if self.by_ids:
            assert body["return_token_ids"] and body["top_k"] == -1
            reply["prompt_token_ids"] = self.tokenizer(marks)["input_ids"]
            reply["choices"][0]["token_ids"] = self.tokenizer(f"seen {len(pictures)}")["input_ids"]
        handler.answer(reply)


@pytest.mark.parametrize("by_ids", [True, False])
def test_servers_get_images_in_chats(built, target, prompts, tmp_path, by_ids):
    output = tmp_path / "data"
    with SeeingServer(target.tokenizer, by_ids) as server:
        words = ("--backend", "openai", "--url", server.url, *SHORT)
        assert generate(built.folder, prompts, output, *words, "--max-new-tokens", "12") == 0
    rows = {row["id"]: row for row in load_records(output)}
    assert set(rows) == {"one", "two", "text"} and listed(output) == BAD
    text = "user: <|image|>or<|image|></s>assistant: seen 2</s>"
    assert decoded(target, rows["two"]["tokens"]) == images_of(text)
    assert rows["two"]["images"] == [picture(0).name, picture(1).name]
    assert (output / "images" / picture(1).name).is_file()
    asked = [body for body in server.requests if len(body["messages"][0]["content"]) == 3]
    assert asked[0]["messages"][0]["content"][1] == said("or")


def test_a_server_that_reads_another_prompt(built, target, prompts, tmp_path, capsys):
    output = tmp_path / "data"
    with SeeingServer(target.tokenizer, True, TOKENS + 1) as server:
        words = ("--backend", "openai", "--url", server.url, *SHORT)
        assert generate(built.folder, prompts, output, *words) == 0
    assert listed(output) == {**BAD, "one": "token ids", "two": "token ids"}
    failed = (output / "failed-0000.jsonl").read_text()
    assert "they differ from token" in failed


def test_prompts_that_are_refused_at_once(built, target_dir, tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        json.dumps({"id": "a", "messages": [user(ASK, {"type": "video", "video": "v"})]}) + "\n"
    )
    assert generate(built.folder, path, tmp_path / "a") == 2
    assert "messages may have text and images only" in capsys.readouterr().err
    names = write_rows(path, [], 1)
    write_rows(path, [{"id": "a", "messages": [user(shown(names[0]), ASK)]}], 1)
    assert generate(target_dir, path, tmp_path / "b") == 2
    assert "reads no images" in capsys.readouterr().err
