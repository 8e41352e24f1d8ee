#!/usr/bin/env bash
# Builds the wheel into dist/ and checks that it holds every file that the package reads at run time.
set -euo pipefail
cd "$(dirname "$0")/.."
rm -rf build  # setuptools would put files of an earlier build into the wheel
python3 -m venv build/wheel
build/wheel/bin/python -m pip install --quiet --disable-pip-version-check build
build/wheel/bin/python -m build --wheel --outdir dist .
build/wheel/bin/python - dist/*.whl <<'PYTHON'
import sys
import zipfile
from pathlib import Path

held = set(zipfile.ZipFile(sys.argv[-1]).namelist())
needed = {path.as_posix() for path in Path("drafttrain").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
shared = [*Path("eval/suites").glob("*.jsonl"), *(path for path in Path("configs").rglob("*.*") if path.is_file())]
ends = tuple("/share/drafttrain/" + path.as_posix().removeprefix("eval/") for path in shared)
missing = sorted(needed - held) + [end for end in ends if not any(name.endswith(end) for name in held)]
if missing:
    sys.exit(f"the wheel lacks {', '.join(missing)}")
print(f"{sys.argv[-1]}: {len(held)} files, nothing missing")
PYTHON
