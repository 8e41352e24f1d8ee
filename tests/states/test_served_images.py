"""Rows with images through servers of states: chats whose token ids must be the row's."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset

from drafttrain.data.row_images import RowImages, sendable_rows
from drafttrain.errors import UserError
from drafttrain.images import PictureStore, read_picture
from drafttrain.states.origins import Row
from drafttrain.states.served import Served
from drafttrain.states.server import StateServer
from drafttrain.target import Target, load_shell
from tests.data.seeing import PLACEHOLDER, picture, shown, user
from tests.states.fake_state_server import FakeStateServer
from tests.states.stand_ins import engine

LAYERS = (1, 2)
SERVED = (1, 2, 3)


class SeeingServer(FakeStateServer):
    """Answers chats as vLLM does. drops: it reads the text alone; blind: it has no chats."""

    drops = blind = False
    chats = 0

    def respond(self, handler, body):
        if "messages" not in body:
            super().respond(handler, body)
        elif self.blind:
            handler.reply(400, b'{"error": "Chat template is passed with request"}')
        else:
            handler.answer(self.chat(body))

    @torch.no_grad()
    def chat(self, body: dict) -> dict:
        self.chats += 1
        (message,) = body["messages"]
        urls = [part["image_url"]["url"] for part in message["content"] if "image_url" in part]
        text = "".join(part.get("text", "") for part in message["content"])
        assert "add_generation_prompt" in body and "part['text']" in body["chat_template"]
        target = self.computes
        prompt = target.image_prompt(text, [read_picture(url) for url in urls])
        out = target.read_images(prompt, self.layers)
        states = out.features[0].reshape(len(prompt), len(self.layers), -1).clone()
        ids = prompt.ids
        reply = {"choices": [{"message": {"content": ""}}], "prompt_token_ids": ids.tolist()}
        if self.drops:
            kept = ids != PLACEHOLDER
            ids = ids[kept]
            states = states[kept]
            reply["prompt_token_ids"] = ids.tolist()
        if body.get("prompt_logprobs"):
            logprobs = target.head(out.last_hidden[0]).log_softmax(-1)
            reply["prompt_logprobs"] = [None]
            for row in logprobs[:-1]:
                best = {}
                for token in row.topk(8).indices.tolist():
                    best[str(token)] = {"logprob": float(row[token])}
                reply["prompt_logprobs"].append(best)
        reply["kv_transfer_params"] = {"hidden_states_path": str(self.write(ids, states, ""))}
        return reply


@pytest.fixture(scope="module")
def target(seeing) -> Target:
    return seeing.load()


@pytest.fixture(scope="module")
def shell(seeing) -> Target:
    made = load_shell(seeing.folder, "float32", "cpu", weights=True)
    made.sight._processor = seeing.processor
    return made


@pytest.fixture
def server(tmp_path, target):
    with SeeingServer(target, tmp_path / "states", SERVED) as running:
        yield running


@pytest.fixture
def client(server, shell):
    made = Served([server.url], shell, LAYERS, timeout=600.0, patience=600.0)
    yield made
    made.close()


def row_of(target, *content):
    """The ids of a question with pictures and of its answer."""
    text = target.tokenizer.apply_chat_template(
        [user(*content), {"role": "assistant", "content": "A red square."}], tokenize=False
    )
    pictures = [part["image"] for part in content if not isinstance(part, str)]
    return target.image_prompt(text, pictures), pictures


CONTENTS = [
    (shown(picture(0)), "What is it?"),
    ("Left ", shown(picture(1)), shown(picture(2)), " right?"),  # placeholders side by side
    ("The same ", shown(picture(1)), "\n", shown(picture(1)), " twice"),
]


@pytest.mark.thorough
@pytest.mark.parametrize("content", CONTENTS)
def test_states_of_rows_with_images_are_the_local_ones(client, target, content):
    prompt, pictures = row_of(target, *content)
    ours = target.read_images(prompt, LAYERS)
    got = client.request(prompt.ids.tolist(), pictures)
    torch.testing.assert_close(got.features, ours.features[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.last, ours.last_hidden[0], rtol=1e-5, atol=1e-5)


def test_rows_of_a_data_set_go_with_their_pictures(client, server, target, tmp_path):
    prompt, pictures = row_of(target, *CONTENTS[0])
    store = PictureStore(tmp_path)
    client.images = RowImages(client.shell, store, [[store.add(pictures[0])], None])
    text = torch.arange(5, 40)
    rows = [Row(0, prompt.ids), Row(1, text)]
    found = client.states(rows)
    seen = found[0]
    read = found[1]
    ours = target.read_images(prompt, LAYERS).features[0, :-1]
    torch.testing.assert_close(seen.features, ours, rtol=1e-5, atol=1e-5)
    ours = target.forward(text[None], LAYERS).features[0, :-1]
    torch.testing.assert_close(read.features, ours, rtol=1e-5, atol=1e-5)
    assert server.chats == 1
    assert len(server.requests[-1]) == 34


def test_a_server_that_drops_images_is_refused_with_the_place(client, server, target):
    prompt, pictures = row_of(target, *CONTENTS[0])
    server.drops = True
    message = rf"reads a row of {len(prompt)} tokens with 1 image as {len(prompt) - 4} tokens, other ones from token 6 on"
    with pytest.raises(UserError, match=message) as raised:
        client.request(prompt.ids.tolist(), pictures)
    assert "\n" not in str(raised.value)


def test_a_server_without_such_chats_is_refused(client, server, target):
    prompt, pictures = row_of(target, *CONTENTS[0])
    server.blind = True
    with pytest.raises(
        UserError, match=r"gives no states of rows with images .HTTP 400.* serve-target"
    ):
        client.request(prompt.ids.tolist(), pictures)


def test_the_first_row_with_images_is_a_proof_too(client, server, target):
    prompt, pictures = row_of(target, *CONTENTS[0])
    client.prove()
    original = server.chat

    def other(body):  # as if its towers were others
        reply = original(body)
        for entries in reply["prompt_logprobs"][6:]:
            for entry in entries.values():
                entry["logprob"] -= 1.0
        return reply

    server.chat = other
    with pytest.raises(UserError, match="log-probabilities differ from those of the target's head"):
        client.request(prompt.ids.tolist(), pictures)
    server.chat = original
    client.request(prompt.ids.tolist(), pictures)
    server.chat = lambda body: original({**body, "prompt_logprobs": None})  # asked for once
    client.request(prompt.ids.tolist(), pictures)


def test_a_row_of_other_pictures_is_refused(shell, target):
    prompt, pictures = row_of(target, *CONTENTS[0])
    with pytest.raises(UserError, match=r"does not hold the 4 tokens of its image 2"):
        shell.sight.marked_ids(prompt.ids.tolist(), [*pictures, picture(1)])


def test_rows_that_the_tokenizer_splits_otherwise_are_left_out(shell, target, capsys):
    prompt, _ = row_of(target, *CONTENTS[0])
    ids = prompt.ids.tolist()
    bytes_of_no_letter = [*ids[:-1], 127, ids[-1]]  # decoded to a replacement character
    rows = [
        {"tokens": ids, "images": ["a"]},
        {"tokens": bytes_of_no_letter, "images": ["a"]},
        {"tokens": bytes_of_no_letter, "images": None},  # sent as ids
    ]
    kept = sendable_rows(Dataset.from_list(rows), shell)
    assert [len(row["tokens"]) for row in kept] == [len(ids), len(ids) + 1]
    assert "note: 1 row left out: servers read images in chats" in capsys.readouterr().out
    with pytest.raises(UserError, match="none of 1 row can be read: servers read images in chats"):
        sendable_rows(Dataset.from_list(rows[1:2]), shell)


def test_rows_that_max_length_cuts_inside_a_character_are_left_out(shell, target, capsys):
    prompt, _ = row_of(target, *CONTENTS[0])
    begin = len(prompt)
    letter = target.tokenizer("é")["input_ids"]  # a token per byte
    row = {"tokens": [*prompt.ids.tolist(), *letter], "spans": [[begin, begin + 2]]}
    rows = Dataset.from_list([{**row, "images": ["a"]}, {**row, "images": None}])
    kept = sendable_rows(rows, shell, begin + 1)
    assert kept["images"] == [None]
    assert "note: 1 row left out" in capsys.readouterr().out
    # Whole, or cut where the answer begins: before that the images stand.
    for length in (0, begin + 2, 3):
        assert len(sendable_rows(rows, shell, length)) == 2


def test_servers_of_targets_that_see_take_templates_of_requests(shell, tmp_path):
    flag = "--trust-request-chat-template"
    python = engine(tmp_path)
    assert StateServer(shell, LAYERS, (), python).words.count(flag) == 1
    assert StateServer(shell, LAYERS, (flag,), python).words.count(flag) == 1
