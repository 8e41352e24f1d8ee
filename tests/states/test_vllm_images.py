"""A real vLLM server gives the local states of rows with images. Its environment needs torchvision.

VLLM_PYTHON names the interpreter of an environment with vLLM; DRAFTTRAIN_SEEING folders of small checkpoints with processors,
separated by colons.
"""

from __future__ import annotations

import os

import pytest

from drafttrain.images import Picture
from drafttrain.states.engine_server import free_port
from drafttrain.states.served import Served
from drafttrain.states.server import StateServer
from drafttrain.target import Target, load_shell
from tests.vlm_models import picture

PYTHON = os.environ.get("VLLM_PYTHON", "")
FOLDERS = [folder for folder in os.environ.get("DRAFTTRAIN_SEEING", "").split(":") if folder]
LAYERS = (1, 2)


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="VLLM_PYTHON is not set")
@pytest.mark.skipif(not FOLDERS, reason="DRAFTTRAIN_SEEING is not set")
@pytest.mark.parametrize("folder", FOLDERS or [""])
def test_vllms_states_of_rows_with_images_are_the_local_ones(folder, tmp_path, monkeypatch):
    pytest.importorskip("torchvision", reason="the processors of most families need it")
    for name, value in {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }.items():
        monkeypatch.setenv(name, os.environ.get(name, value))
    target = Target.load(folder, "float32", "cpu")
    shell = load_shell(folder, "float32", "cpu", weights=True)
    words = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "512")
    port = ("--port", str(free_port()))
    server = StateServer(shell, LAYERS, (*words, *port), PYTHON, str(tmp_path / "states"))
    server.start()
    try:
        server.wait_until_ready()
        client = Served([server.url], shell, LAYERS)
        for pictures in ([picture(1)], [picture(2), picture(3, 120, 60)]):
            row = row_of(target, pictures)
            ours = target.read_images(row, LAYERS)
            got = client.request(row.ids.tolist(), pictures)
            assert (got.features - ours.features[0]).abs().max() < 1e-4
            assert (got.last - ours.last_hidden[0]).abs().max() < 1e-4
        client.close()
    finally:
        server.stop()


def row_of(target: Target, pictures: list[Picture]):
    question = [*({"type": "image"} for _ in pictures), {"type": "text", "text": "What is it?"}]
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "A café in 東京."},
    ]
    text = target.tokenizer.apply_chat_template(messages, tokenize=False)
    return target.image_prompt(text, pictures)
