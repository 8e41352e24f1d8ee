"""Modules are importable by their former names."""

from __future__ import annotations

import importlib
import sys

import pytest

from drafttrain import moved


@pytest.mark.parametrize("former", sorted(moved.MOVED))
def test_a_former_name_gives_the_module_of_today(former):
    today = importlib.import_module(f"drafttrain.{moved.MOVED[former]}")
    spec = today.__spec__
    sys.modules.pop(f"drafttrain.{former}", None)
    with pytest.warns(DeprecationWarning, match=f"is now drafttrain.{moved.MOVED[former]}"):
        assert importlib.import_module(f"drafttrain.{former}") is today
    assert today.__spec__ is spec


@pytest.mark.filterwarnings("ignore:drafttrain.decode:DeprecationWarning")
def test_documented_names():
    from drafttrain.decode import Decoder, generate, generate_batch, stream
    from drafttrain.decode.engine import Decoder as Same

    from drafttrain import inference

    assert (Decoder, generate) == (inference.Decoder, inference.generate) and Same is Decoder
    assert (generate_batch, stream) == (inference.generate_batch, inference.stream)


def test_other_names_stay_unknown():
    for name in ("drafttrain.decoder", "drafttrain.hub.nothing", "drafttrain.decode.nothing"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)
