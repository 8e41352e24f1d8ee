"""`drafttrain serve-target` starts and ends vLLM."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from drafttrain.cli import main
from drafttrain.errors import UserError
from drafttrain.serving import serve_target
from drafttrain.states.engine_server import flag_value, free_port
from drafttrain.states.server import StateServer, served_layers
from drafttrain.target import load_shell
from drafttrain.target.attention import LAST
from tests.files import load_json
from tests.states.stand_ins import engine


def test_the_command_has_layers_connector_and_folder(tmp_path, target_dir, capsys):
    where = tmp_path / "states"
    words = [
        "serve-target",
        "--target",
        str(target_dir),
        "--states-dir",
        str(where),
        "--dry-run",
        "--layers",
        "3,1",
    ]
    assert (
        main(
            [
                *words,
                "--engine-python",
                engine(tmp_path, gpu=True),
                "--",
                "--tensor-parallel-size",
                "8",
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    ours = "--host 127.0.0.1 --no-enable-prefix-caching --no-async-scheduling"
    begin = "-m vllm.entrypoints.openai.api_server --model"
    assert f"{begin} {target_dir} {ours} --tensor-parallel-size 8" in said
    assert '"eagle_aux_hidden_state_layer_ids": [1, 3, 4]' in said and "PYTHONPATH" not in said
    assert '"ExampleHiddenStatesConnector"' in said and f'"shared_storage_path": "{where}"' in said
    assert main([*words, "--engine-python", engine(tmp_path, named=False)]) == 0
    said = capsys.readouterr().out
    assert (
        "-m vllm.entrypoints.openai.api_server --model" in said
        and '"CpuHiddenStatesConnector"' in said
    )
    assert said.startswith("PYTHONPATH=") and not where.exists()


@pytest.mark.parametrize(
    "words",
    [
        ["--api-key", "opensesame-7"],
        ["--api-key=opensesame-7"],
        ["--hf-token", "opensesame-7"],
        ["--hf-overrides", '{"api_key": "opensesame-7"}'],
        ["--otlp-traces-endpoint", "http://me:opensesame-7@host/"],
        ["--middleware", "Authorization: Bearer opensesame-7"],
        ["--note", "of-the-environment-7"],
    ],
)
def test_no_secret_is_in_the_printed_command(tmp_path, target_dir, monkeypatch, capsys, words):
    monkeypatch.setenv("HF_TOKEN", "of-the-environment-7")
    command = ["serve-target", "--target", str(target_dir), "--layers", "1", "--dry-run"]
    assert main([*command, "--engine-python", engine(tmp_path), "--", *words]) == 0
    said = capsys.readouterr()
    assert "***" in said.out
    assert "opensesame" not in said.out + said.err
    assert "of-the-environment" not in said.out + said.err


def test_a_server_listens_to_this_machine_unless_asked(tmp_path, target_dir):
    shell = load_shell(str(target_dir))
    python = engine(tmp_path)
    words = StateServer(shell, (1,), ("--port", "1"), python).words
    assert words[words.index("--host") + 1] == "127.0.0.1"
    open_to_all = StateServer(shell, (1,), ("--host=0.0.0.0",), python)
    assert "--host" not in open_to_all.words and "--host=0.0.0.0" in open_to_all.words
    assert open_to_all.url == "http://127.0.0.1:8000"


def test_a_key_among_vllms_flags_is_passed_and_not_printed(tmp_path, target_dir):
    flags = ("--api-key", "topsecret-1234", "--max-model-len", "99")
    server = StateServer(load_shell(str(target_dir)), (1,), flags, engine(tmp_path))
    assert "topsecret-1234" in server.words
    assert "topsecret" not in str(server) and "--api-key '***' --max-model-len 99" in str(server)


def test_vllms_command_is_used_where_it_runs(tmp_path, target_dir):
    """A script names its interpreter; that of an environment that was moved is gone."""
    server = StateServer(load_shell(str(target_dir)), (1,), (), engine(tmp_path))
    script = tmp_path / "vllm"
    script.write_text(f"#!{tmp_path}/python\n")
    assert server.words[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]  # it is no program
    script.chmod(0o755)
    assert server.words[:3] == [str(script), "serve", str(target_dir)]
    script.write_text(f"#!{tmp_path}/moved/python\n")
    assert server.words[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("recipe", "layers"),
    [
        ("kind: eagle3\ndrafter: {feature_layers: [0, 3]}", "0, 3, 4"),
        ("kind: eagle3", "1, 2, 4"),
        ("kind: medusa", "4"),
    ],
)
def test_a_recipe_names_target_and_layers(tmp_path, target_dir, recipe, layers, capsys):
    (tmp_path / "r.yaml").write_text(
        f"target: {target_dir}\ndata: d\noutput_dir: {tmp_path}\n{recipe}\n"
    )
    words = [
        "serve-target",
        "--recipe",
        str(tmp_path / "r.yaml"),
        "--dry-run",
        "--engine-python",
        engine(tmp_path),
    ]
    assert main(words) == 0
    assert f'"eagle_aux_hidden_state_layer_ids": [{layers}]' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "target='' names nothing to serve; give --target T, or --recipe FILE"),
        (["--target", "TARGET", "--engine-python", "ENGINE"], "has no vLLM; name the interpreter of an environment that has it"),
        (["--target", "TARGET", "--", "--speculative-config", "{}"], "--speculative-config is set by this command"),
        (["--target", "TARGET", "--", "--port", "x"], "--port='x' must be a whole number"),
        (["--target", "TARGET", "--layers", "9"], "must be none, default, wide, or distinct layers from 0 to 4"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_one_line(tmp_path, target_dir, words, message, capsys):
    places = {"TARGET": str(target_dir), "ENGINE": engine(tmp_path, vllm=False)}
    assert main(["serve-target", *(places.get(word, word) for word in words)]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_of_others_and_one_in_use_are_refused_and_left_alone(tmp_path, target_dir):
    shell = load_shell(str(target_dir))
    python = engine(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.safetensors").touch()
    with pytest.raises(
        UserError,
        match="holds other files, or belongs to another user; name an empty or new folder",
    ):
        StateServer(shell, (1,), (), python, str(tmp_path / "mine")).start()
    first, second = (
        StateServer(shell, (1,), (), python, str(tmp_path / "states")) for _ in range(2)
    )
    first.start()
    try:
        old = first.folder / "cmpl-1.safetensors"
        new = first.folder / "cmpl-2.safetensors"
        for path in (old, new):
            path.touch()
        os.utime(old, (1, 1))
        first.sweep()
        assert not old.exists() and new.exists()  # a client may be about to read it
        with pytest.raises(
            UserError,
            match="belongs to a server that is running; give each one a folder and a port",
        ):
            second.start()
    finally:
        second.stop()
        first.stop()
    assert not first.folder.exists() and (tmp_path / "mine" / "model.safetensors").exists()


def test_a_server_that_ends_by_itself_is_one_line_with_its_command(
    tmp_path, target_dir, monkeypatch
):
    python = engine(tmp_path, does="sys.exit(3)")
    server = StateServer(
        load_shell(str(target_dir)), (1,), ("--port", "1"), python, str(tmp_path / "states")
    )
    server.start()
    server.child.wait()
    with pytest.raises(
        UserError,
        match=r"vLLM ended with exit status 3, its lines above say why; try the command by hand: .*vllm",
    ):
        server.wait_until_ready()
    server.stop()


@pytest.mark.thorough
def test_a_signal_ends_both_also_a_server_that_does_not_listen(
    tmp_path, target_dir, monkeypatch, capsys
):
    monkeypatch.setattr(StateServer.stop, "__defaults__", (0.2,))
    monkeypatch.setattr(serve_target, "_LOOK_SECONDS", 0.02)
    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    python = engine(
        tmp_path, "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    )
    server = StateServer(
        load_shell(str(target_dir)), (1,), ("--port", "1"), python, str(tmp_path / "states")
    )
    seen = tmp_path / "seen.json"

    def press() -> None:
        while not (seen.exists() and seen.read_text().endswith("]")):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press).start()
    try:
        assert serve_target.watch(server, "tiny") == 128 + signal.SIGINT
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert "ended by SIGINT; vLLM has ended, and its states are deleted" in capsys.readouterr().err
    with pytest.raises(ProcessLookupError):
        os.kill(load_json(seen)[0], 0)
    assert not (tmp_path / "states").exists()


def test_layers_and_flags(target):
    assert served_layers((3, LAST, 1), target) == (1, 3, 4) and served_layers((4, 2), target) == (
        2,
        4,
    )
    assert served_layers((), target) == (4,)
    assert (
        flag_value(["--port", "1", "--port=2"], "--port", "8000") == "2"
        and flag_value(["--port"], "--port", "8") == "8"
    )
    assert free_port() > 1023
