"""Swaps in SGLang, against a server that speaks its routes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drafttrain.cli import main
from drafttrain.errors import UserError
from drafttrain.inside_vllm.head_files import SwapRefused, read_head
from drafttrain.serving.swap_sglang import check_head, shared_parts
from drafttrain.watch import Watch, Watched
from tests.files import load_jsonl
from tests.serving.live_server import write_head
from tests.serving.sglang_server import SglangServer, said

DRAFTERS = Path(__file__).parents[1] / "fixtures" / "drafters"
OWN_OUTPUT = {"draft_vocab_size": 3}


@pytest.fixture
def heads(tmp_path):
    """The head that a server is started with, a, and another one, b."""
    write_head(tmp_path / "a", 1.0, **OWN_OUTPUT)
    return write_head(tmp_path / "b", 2.0, **OWN_OUTPUT).parent


@pytest.fixture
def start(heads, request):
    """Starts servers; stops them after the test."""

    def begin(**info):
        server = SglangServer(heads / "a", **info)
        request.addfinalizer(server.close)
        return server

    return begin


def swap(server, *words):
    return main(["swap", "--server", server.url, *words])


def values(server):
    return [float(rank.draft["fc"][0, 0]) for rank in server.ranks]


def refused(
    server,
    capsys,
    message,
    drafter="b",
):
    """Asserts that a swap ends in one line and that the old head serves."""
    assert swap(server, "--drafter", str(drafter)) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert set(values(server)) == {1.0} and not server.open


def test_a_head_is_swapped_in_and_back_in_all_ranks(start, heads, capsys):
    server = start(ranks=2)
    assert swap(server, "--drafter", str(heads / "b")) == 0
    assert values(server) == [2.0, 2.0] and not server.open
    assert "/flush_cache" in server.routes
    # The server itself knows which head serves, so another process does too.
    assert swap(server) == 0
    digest = read_head(heads / "b", "").digest
    assert f"serves b (sha256 {digest[:12]})" in capsys.readouterr().out
    assert swap(server, "--drafter", "a") == 0 and values(server) == [1.0, 1.0]


def test_a_trained_drafter_is_exported_beside_the_served_head(start, heads, capsys):
    refused(start(), capsys, "does not fit the served head", DRAFTERS / "eagle3")
    assert (heads / "eagle3" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"fc": torch.zeros(2, 3)}, "fc is torch.float32 [2, 3]"),
        ({"fc": torch.full((2, 6), torch.nan)}, "not finite"),
        ({"d2t": torch.tensor([3, 4, 5])}, "keeps other tokens (d2t)"),
    ],
)
def test_what_would_end_the_server_is_refused(
    start,
    heads,
    capsys,
    tensors,
    message,
):
    write_head(heads / "b", 2.0, tensors, **OWN_OUTPUT)
    server = start()
    refused(server, capsys, message)
    assert server.routes == []


def test_a_head_over_the_files_of_the_start_is_refused(start, heads, capsys):
    server = start()
    write_head(heads / "a", 3.0, **OWN_OUTPUT)
    refused(server, capsys, "it was started with folder='a'", heads / "a")
    assert swap(server, "--drafter", "b") == swap(server, "--drafter", "a") == 0
    assert values(server) == [3.0]


def test_what_the_drafter_shares_with_the_target_is_not_sent(start, heads, capsys):
    for name in "ab":
        write_head(heads / name, 1.0, {"embed_tokens.weight": torch.zeros(4, 2)}, **OWN_OUTPUT)
    refused(start(), capsys, "embed_tokens.weight would change the target")
    assert shared_parts(OWN_OUTPUT, "EAGLE3") == {"embed_tokens"}
    tied = {**OWN_OUTPUT, "tie_word_embeddings": True}
    for config, algorithm in (({}, "EAGLE3"), (tied, "EAGLE3"), (OWN_OUTPUT, "EAGLE")):
        assert shared_parts(config, algorithm) == {"embed_tokens", "lm_head"}


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"version": "0.5.22"}, "it is SGLang 0.5.22, and swaps need 0.5.23"),
        ({"dp_size": 2}, "one data-parallel and pipeline stage only"),
        ({"speculative_algorithm": "DFLASH"}, "it drafts by DFLASH"),
        ({"enable_multi_layer_eagle": True}, "one head of EAGLE3, EAGLE"),
        ({"speculative_draft_model_quantization": "fp8"}, "its drafter is quantized"),
        ({"speculative_draft_model_path": "org/head"}, "(org/head) are not on this machine"),
    ],
)
def test_servers_that_cannot_swap_for_all_ranks_say_why(start, capsys, info, message):
    server = start(**info)
    refused(server, capsys, message)
    assert server.routes == []


def test_every_rank_is_counted_and_a_part_is_rolled_back(start, capsys):
    server = start(ranks=2)
    load = server.ranks[1].load
    server.ranks[1].load = lambda pairs: None
    refused(server, capsys, "not every rank took the new weights")
    server.ranks[1].load = load
    rank = server.ranks.pop()
    refused(server, capsys, "1 of 2 ranks give checksums")
    server.ranks.append(rank)
    assert swap(server, "--drafter", "b") == 0 and values(server) == [2.0, 2.0]


def test_a_rollback_that_cannot_begin_is_no_kept_head(start, capsys):
    server = start(ranks=2)
    server.ranks[1].load = lambda pairs: None
    begin = server.begin_weight_update

    def once(**body):
        server.begin_weight_update = lambda **_: said("no update can begin")
        return begin(**body)

    server.begin_weight_update = once
    assert swap(server, "--drafter", "b") == 2
    printed = capsys.readouterr().err
    assert "has weights of two heads" in printed and "keeps its head" not in printed


def test_updates_that_fail_leave_the_old_head(start, capsys):
    server = start()
    update = server.update_weights_from_tensor
    server.update_weights_from_tensor = lambda **_: said("derived weight caches")
    refused(server, capsys, "derived weight caches")
    server.update_weights_from_tensor = update
    server.version = "policy-7"
    refused(server, capsys, "its weight_version is 'policy-7'")
    server.version = "default"
    # What a killed client leaves: SGLang's own words say how to go on.
    server.begin_weight_update()
    assert swap(server, "--drafter", "b") == 2
    assert "call end_weight_update() first" in capsys.readouterr().err and values(server) == [1.0]


def test_a_changed_target_is_said_aloud(start, capsys):
    server = start()
    (rank,) = server.ranks
    rank.load = lambda pairs: rank.target["model.embed_tokens.weight"].zero_()
    assert swap(server, "--drafter", "b") == 2
    assert "changed the target's weights" in capsys.readouterr().err


def test_numbers_that_its_update_cannot_read_are_refused(heads):
    small = {"scale": torch.ones(2).to(torch.float8_e4m3fn)}
    head = read_head(write_head(heads / "b", 1.0, small), "b")
    with pytest.raises(SwapRefused, match="does not read scale of"):
        check_head(head, head, "EAGLE3")


def test_the_watcher_swaps_and_takes_samples_of_what_is_counted(start, heads, tmp_path):
    server = start(ranks=2)
    watched = Watched(swapped=True)
    output = tmp_path / "out"
    output.mkdir()
    watch = Watch(server.url, "", output, watched)
    watch.sample("b")
    for _ in range(3):
        server.counters.update(spec_verify_calls=60, generation_tokens=170, num_requests=20)
        watch.sample("b")
    # Three times 60 passes, 150 tokens behind the first of each answer: a sample after the second.
    assert watched.samples == [2.5]
    assert watch.bring(heads / "b") and values(server) == [2.0, 2.0]
    watch.close()
    assert [row["event"] for row in load_jsonl(output / "journal.jsonl")] == [
        "start",
        "swap",
        "stop",
    ]


def test_a_watcher_needs_a_page_of_metrics(start, tmp_path):
    server = start()
    server.counters = None
    with pytest.raises(UserError, match=r"no page of metrics.*--enable-metrics"):
        Watch(server.url, "", tmp_path, Watched())
