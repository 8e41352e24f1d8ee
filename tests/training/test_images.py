"""Training on rows with images: their states, and `train`, `features` and `plan` on data with both kinds of rows."""

from __future__ import annotations

import json
import re

import pytest
import torch

from drafttrain.batch import Batch
from drafttrain.cli import main
from drafttrain.data.loader import collate, cut_row, pack_rows, training_rows
from drafttrain.data.row_images import RowImages
from drafttrain.data.store import FeatureStore, Store, load_records
from drafttrain.drafters.common.rows import HostPass
from drafttrain.errors import UserError
from drafttrain.images import BadPicture, PictureStore
from drafttrain.ops.tree_attention import TreeLayout
from drafttrain.ops.tree_cache import TreeCache
from drafttrain.states.source import TargetSource
from tests.data.seeing import PLACEHOLDER, TOKENS, picture
from tests.drafters.contract import compare_depths
from tests.drafters.helpers import make_drafter, run_step
from tests.training.runs import write_recipe
from tests.vlm_models import build

pytestmark = pytest.mark.usefixtures("seeing_processor")
LAYERS = (1, 2)
ROWS = 12  # every third is text


def write_data(folder, target, answered=None):
    """Rows about one picture, two and none. answered: more tokens of the first row's answer."""
    pictures = PictureStore(folder)
    with Store(folder, {"target": target.identity(), "sampling": {"temperature": 0.0}}) as store:
        for number in range(ROWS):
            names = [pictures.add(picture(number + i)) for i in range(number % 3)]
            prompt = [70, *[PLACEHOLDER] * (TOKENS * len(names)), 71, 80 + number]
            answer = [100 + number + i for i in range(6 + number)]
            if number == 1:
                answer += answered or []
            row = {
                "id": f"row{number}",
                "tokens": prompt + answer,
                "spans": [[len(prompt), len(prompt) + len(answer)]],
                "finish": ["stop"],
                "source": "test",
            }
            if names:
                row["images"] = names
            store.append(row)
    return folder


@pytest.fixture
def data(seeing, tmp_path):
    return write_data(tmp_path / "data", seeing.load())


@pytest.mark.thorough
def test_states_of_batches_with_and_without_images(seeing, data):
    """Packed or not, each row's states are those that it has alone, with its own pictures."""
    target = seeing.load()
    records = load_records(data, images=True)
    images = RowImages.of(records, str(data), target)
    images.check()
    rows, _ = training_rows(records, 64, 0, 0)
    pictures = PictureStore(data)
    want = {}
    for number, record in enumerate(records):
        ids = torch.tensor(record["tokens"])
        if record["images"]:
            shown = [pictures.get(name) for name in record["images"]]
            out = target.read_images(target.image_row(ids, shown), LAYERS)
        else:
            out = target.forward(ids[None], LAYERS)
        want[number] = out.features[0]
    for together in (1, None):
        for made in (rows, pack_rows(rows, 64, 0)):
            source = TargetSource(target, LAYERS, torch.arange(300))
            source.online.images = images
            source.online.together = together
            batch = Batch.of(collate(list(made)))
            features, _, _ = source(batch)
            places = batch.conversations().tolist()
            for (row, start, length), index in zip(places, batch.index.tolist(), strict=True):
                got = features[row, start : start + length]
                torch.testing.assert_close(got, want[index], atol=1e-5, rtol=1e-4)
    # Other pictures give other states; a row of no data set has none.
    assert not torch.allclose(want[1][1], want[4][1])
    assert images.prompt(-1, ids) is None
    (data / "images" / picture(1).name).unlink()
    with pytest.raises(BadPicture, match="no such file"):
        images.check()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "options"),
    [("qwen3_vl", {}), ("llava", {}), ("llava", {"image_embeds": True})],
)
def test_training_step_k_is_what_decoding_computes_behind_an_image(
    tmp_path, monkeypatch, family, options
):
    """Positions on three axes and on one: the head's are the plain index, its embeddings the placeholder's or the image's."""
    case = build(family, tmp_path / "target")
    target = case.load()
    template = "{{ messages[0]['content'][1]['text'] }}" + case.marker
    monkeypatch.setattr(case.processor, "chat_template", template, raising=False)
    decoder = make_drafter(target, ttt_steps=3, **options).eval()
    trainer = make_drafter(target, ttt_steps=3, loss="ce", **options).eval()
    prompt = target.image_prompt(f"look{case.marker}what?", [picture(1)])
    out = target.prefill_images(prompt, decoder.feature_layers, TreeCache(128), 0)
    root = 75
    session = decoder.start(prompt.ids, 128)
    session.extend(torch.tensor([*prompt.ids[1:].tolist(), root]), out.features[0])
    pictures = PictureStore(tmp_path)
    images = RowImages(target, pictures, [[pictures.add(picture(1))]])
    source = TargetSource(target, trainer.feature_layers, trainer.kept_ids)
    source.online.images = images

    def metrics_of(answer):
        tokens = [*prompt.ids.tolist(), *answer]
        row = cut_row(tokens, [[len(prompt), len(tokens)]], 0, 128)
        with torch.no_grad():
            return run_step(trainer, target, Batch.of(collate([row])), source=source).metrics

    compare_depths(decoder, session, root, metrics_of)


@pytest.mark.parametrize("packed", [False, True])
def test_heads_that_embed_images(seeing, packed):
    """Read as one prompt or with a prompt of text: the root is that of layer 0 in the placeholders' place."""
    target = seeing.load()
    drafter = make_drafter(target, image_embeds=True).eval()
    assert drafter.feature_layers[0] == 0
    if packed:
        drafter.pack()
    prompt = target.image_prompt("see <|image|>!", [picture(1)])
    out = target.prefill_images(prompt, drafter.feature_layers, TreeCache(64), 0)
    features = out.features[0]  # [L, f*h]
    text = torch.arange(70, 70 + len(prompt))
    prompts = [prompt.ids, text, prompt.ids]
    states = [features, target.forward(text[None], drafter.feature_layers).features[0], features]
    follow = [torch.cat((ids[1:], torch.tensor([75]))) for ids in prompts]
    # The root token is a placeholder by chance: its features are not known yet.
    follow[2][-1] = PLACEHOLDER
    sessions = [drafter.start(ids, 64) for ids in prompts]
    drafter.extend_all(sessions, follow, states)
    table = target.embed_weight

    def root(number, embeds):
        """The root of one prompt whose tokens have these embeddings."""
        session = drafter.start(prompts[number], 64)
        at = HostPass([session], [TreeLayout(session.length, count=len(embeds))], last=True)
        with torch.no_grad():
            return drafter.advance(drafter.fuse(states[number]), embeds, at, 0)

    h = target.hidden_size
    shown = (prompt.ids == PLACEHOLDER)[1:, None]
    behind = torch.where(shown, features[1:, :h], table[prompt.ids[1:]])
    assert not torch.equal(behind, table[prompt.ids[1:]])
    for number, embeds in enumerate(
        [
            torch.cat((behind, table[75][None])),
            table[follow[1]],
            torch.cat((behind, table[PLACEHOLDER][None])),
        ]
    ):
        torch.testing.assert_close(sessions[number].root, root(number, embeds))


def recipe(tmp_path, seeing, data, name, **extra):
    """Words of a run into a folder of its own."""
    folder = tmp_path / name
    folder.mkdir()
    words = write_recipe(
        folder,
        seeing.folder,
        data,
        **{"logging_steps": 3, "max_length": 64, "packing": True, "cache_gb": 0, **extra},
    )
    return words, folder / "drafter" / "training.json"


@pytest.mark.thorough
def test_runs_with_the_target_and_on_stored_states(seeing, data, tmp_path, capsys):
    """Both read the same states, and both decode held-out prompts with their images."""
    words, record = recipe(tmp_path, seeing, data, "online", validation=0.3)
    assert main(["plan", *words]) == 0
    assert main(["train", *words]) == 0
    online = json.loads(record.read_text())
    assert online["target_features"]["online"] > 0 and online["best"]["accepted_length"] >= 1

    taken = ["features", "--data", str(data), "--dtype", "float32", "--store-dtype", "float32"]
    assert main([*taken, "--layers", "default", "--max-length", "6"]) == 0
    # An image is never cut: row 2 ends behind its two images.
    store = FeatureStore.open(str(data), (0, 1, 2))
    assert len(store.get("row2")["features"]) == 2 * TOKENS + 2
    assert len(store.get("row0")["features"]) == 5
    assert main([*taken, "--layers", "default", "--overwrite"]) == 0
    for path in (data / "images").iterdir():
        path.unlink()  # what is stored is not read again
    words, record = recipe(tmp_path, seeing, data, "stored", validation=0.3)
    capsys.readouterr()
    assert main(["train", *words]) == 0
    assert "without its layers: every conversation has stored states" in capsys.readouterr().out
    stored = json.loads(record.read_text())
    assert stored["target_features"]["online"] == 0
    for name, value in online["held_out"].items():
        if "loss" in name or "agree" in name:
            assert stored["held_out"][name] == pytest.approx(value, rel=1e-3), name


REFUSED = {
    "on_policy": ({"on_policy": {"share": 0.5}}, "on_policy={'share': 0.5} reads text only"),
    "loss": (
        {"loss": "next_token", "kind": "draft_model", "drafter": {}},
        "loss='next_token' reads text only",
    ),
}


@pytest.mark.parametrize("key", REFUSED)
def test_keys_that_read_text_only(seeing, data, tmp_path, capsys, key):
    extra, message = REFUSED[key]
    words, _ = recipe(tmp_path, seeing, data, "run", **{"packing": False, **extra})
    assert main(["train", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.thorough
def test_answers_that_hold_a_placeholder(seeing, tmp_path, capsys):
    """Such a row is left out and counted; elsewhere it is refused."""
    data = write_data(tmp_path / "data", seeing.load(), [PLACEHOLDER, 71])
    words, _ = recipe(tmp_path, seeing, data, "run", max_steps=1, save_steps=1)
    assert main(["train", *words]) == 0
    said = capsys.readouterr().out
    assert re.search(rf"note: 1 row.? left out: .* \(token {PLACEHOLDER}\)", said)
    assert main(["features", "--data", str(data), "--layers", "1", "--dtype", "float32"]) == 0
    assert "11 of 11 conversations to do" in capsys.readouterr().out
    records = load_records(data, images=True)
    images = RowImages.of(records, str(data), seeing.load())
    with pytest.raises(UserError, match="a row has 5 placeholders"):
        images.prompt(1, torch.tensor(records[1]["tokens"]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"image_embeds": True, "feature_layers": [1, 2]},
            r"feature_layers=\[1, 2\] do not begin with it; add it",
        ),
    ],
)
def test_image_embeds_need_layer_0(seeing, options, message):
    with pytest.raises(UserError, match=message):
        make_drafter(seeing.load(), **options)


def test_image_embeds_of_a_target_of_text(target):
    with pytest.raises(UserError, match="reads no images"):
        make_drafter(target, image_embeds=True)
