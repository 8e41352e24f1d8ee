"""The built kernels are kept in a private folder; what is damaged, foreign or of another build is never loaded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from hypothesis import given

from drafttrain.files import cache_folder
from drafttrain.ops import native
from tests.fuzz import Fault, file_faults, fuzz, outcome, seeds

pytestmark = pytest.mark.skipif(
    native.cpu_kernels() is None or os.name != "posix", reason="no C compiler here"
)


class Compiler:
    """Stands for cc: copies a library that was built once. Attributes: builds: how often it was asked; kept: files it made."""

    def __init__(self, folder: Path, built: Path):
        self.path = folder / "cc"
        self.log = folder / "log"
        self.cache = folder / "cache"
        self.folder = self.cache / "kernels"
        self.built = built
        self.say("1.0")

    def say(self, version: str) -> None:
        """Writes the compiler anew, of this version."""
        script = f'#!/bin/sh\ncase "$1" in --version) echo {version}; exit;; esac\necho built >> {self.log}\n'
        script += f'while [ "$1" != -o ]; do shift; done\ncp {self.built} "$2"\n'
        self.path.write_text(script)
        self.path.chmod(0o700)

    @property
    def builds(self) -> int:
        return self.log.read_text().count("built") if self.log.is_file() else 0

    @property
    def kept(self) -> list[Path]:
        return sorted(self.folder.glob("*.so"))

    def load(self) -> bool:
        library = native.cpu_kernels.__wrapped__()
        return library is not None and all(hasattr(library, name) for name in native._ARGUMENTS)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A copy of the library that was built, or found, when this module was imported."""
    name = native._name(native._compiler(), native._chosen_flags())
    kept = native._kept(cache_folder() / "kernels", name)
    return shutil.copyfile(kept, tmp_path_factory.mktemp("built") / "built.so")


@pytest.fixture
def compiler(tmp_path, built, monkeypatch):
    made = Compiler(tmp_path, built)
    monkeypatch.setenv("CC", str(made.path))
    monkeypatch.setenv("DRAFTTRAIN_CACHE", str(made.cache))
    return made


def test_a_build_is_kept_where_only_the_user_may_enter(compiler):
    before = os.umask(0)
    try:
        compiler.cache.mkdir()
        compiler.cache.chmod(0o777)  # the user's choice, as /tmp/x may be
        assert compiler.load() and compiler.load() and compiler.builds == 1
    finally:
        os.umask(before)
    (kept,) = compiler.kept
    assert compiler.folder.stat().st_mode & 0o777 == 0o700
    assert not kept.stat().st_mode & 0o022
    assert {path.name for path in compiler.folder.iterdir()} == {kept.name}


def test_damaged_libraries_are_built_again(compiler):
    assert compiler.load()
    (kept,) = compiler.kept
    good = kept.read_bytes()

    @fuzz(examples=20)
    @given(fault=file_faults(), seed=seeds())
    def damaged(fault: Fault, seed: int) -> None:
        content = fault.apply(good, Random(seed))
        before = compiler.builds
        kept.write_bytes(content)
        assert (
            outcome("kernel library", fault.name, lambda: None if compiler.load() else sys.exit(1))
            == ""
        )
        assert compiler.builds == before + (content != good)
        assert kept.read_bytes() == good

    damaged()


def test_a_library_without_the_functions_is_built_again(compiler, tmp_path):
    assert compiler.load()
    (kept,) = compiler.kept
    (tmp_path / "other.c").write_text("int unrelated(void) { return 1; }")
    other = tmp_path / "other.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", str(tmp_path / "other.c"), "-o", str(other)], check=True
    )
    kept.unlink()
    named = kept.name.rpartition("-")[0] + f"-{native._digest(other.read_bytes())}.so"
    shutil.copy(other, compiler.folder / named)
    (compiler.folder / named).chmod(0o700)
    assert compiler.load() and compiler.builds == 2
    assert [path.name for path in compiler.kept] == [kept.name]


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o777, 0o1777])
def test_a_folder_that_others_may_enter_is_refused_in_one_line(compiler, caplog, mode):
    compiler.folder.mkdir(parents=True)
    compiler.folder.chmod(mode)
    assert compiler.load() and compiler.load() and compiler.builds == 2
    assert not compiler.kept
    assert (
        caplog.messages[0].endswith(f"remove it, or run chmod 700 {compiler.folder}")
        and len(caplog.messages) == 2
    )


@pytest.mark.parametrize("kind", ["link", "file", "another user's"])
def test_what_is_not_the_users_own_folder_is_refused(compiler, caplog, monkeypatch, tmp_path, kind):
    compiler.cache.mkdir()
    if kind == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        compiler.folder.symlink_to(tmp_path / "elsewhere")
    elif kind == "file":
        compiler.folder.write_text("")
    else:
        compiler.folder.mkdir(mode=0o700)
        monkeypatch.setattr(native.os, "geteuid", lambda: os.getuid() + 1)
    assert compiler.load() and compiler.builds == 1
    assert (
        len(caplog.messages) == 1
        and "kernels are built again for this process" in caplog.messages[0]
    )
    assert not list(tmp_path.rglob("cpu-*"))


@pytest.mark.parametrize("kind", ["link", "writable", "another user's", "folder", "unreadable"])
def test_a_library_that_others_could_have_written_is_not_loaded(
    compiler, tmp_path, kind, monkeypatch
):
    assert compiler.load()
    (kept,) = compiler.kept
    loaded: list[str] = []
    load = native._load
    monkeypatch.setattr(native, "_load", lambda path: loaded.append(str(path)) or load(path))
    if kind == "link":
        kept.rename(tmp_path / "planted.so")
        kept.symlink_to(tmp_path / "planted.so")
    elif kind == "writable":
        kept.chmod(0o722)
    elif kind == "folder":
        kept.unlink()
        kept.mkdir()
    elif kind == "unreadable":
        kept.write_bytes(b"")
        kept.chmod(0)
    elif os.geteuid() == 0:
        os.chown(kept, 65534, 65534)
    else:
        pytest.skip("only root may give files away")
    assert compiler.load() and compiler.builds == 2
    assert len(loaded) == 1 and loaded[0].endswith("built.so")


def test_another_version_of_the_compiler_builds_its_own(compiler):
    assert compiler.load()
    compiler.say("2.0")
    assert compiler.load() and compiler.builds == 2 and len(compiler.kept) == 2


def test_a_folder_that_cannot_be_written_costs_a_build(compiler, caplog, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(native.Path, "write_bytes", full)
    assert compiler.load() and not compiler.kept
    assert "cannot keep the kernels (No space left on device)" in caplog.text
