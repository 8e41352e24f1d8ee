#!/usr/bin/env bash
# Builds the wheel into dist/ and checks that it holds every file that the package reads at run time.
#   bash scripts/wheel.sh              builds and checks it
#   bash scripts/wheel.sh --install    installs it without extras into a new environment and runs it there, far from this checkout
# $PROJECT_URL, by default the repository that GitHub Actions runs for, becomes the wheel's project URL and completes the links of
# its long description. Without one these links become plain text, because a package index cannot follow them.
set -euo pipefail
cd "$(dirname "$0")/.."
case "${1:-}" in "" | --install) ;; *) echo "error: unknown option $1 (known: --install)" >&2; exit 2 ;; esac
url="${PROJECT_URL:-${GITHUB_REPOSITORY:+$GITHUB_SERVER_URL/$GITHUB_REPOSITORY}}"
python="${PYTHON:-python3}"

rm -rf build  # with files of an earlier build
mkdir -p build/source
git ls-files -co --exclude-standard -z | while IFS= read -rd '' file; do [ ! -f "$file" ] || printf '%s\0' "$file"; done \
  | tar -c --null -T - | tar -x -C build/source
"$python" - build/source "$url" <<'PYTHON'
import re
import sys
from pathlib import Path

folder, url = Path(sys.argv[1]), sys.argv[2].rstrip("/")
readme, project = folder / "README.md", folder / "pyproject.toml"
links = r"(!?)\[([^\]]*)\]\((?!https?://|#|mailto:)([^)]+)\)"


def absolute(found):
    image, text, path = found.groups()
    if url:
        return f"{image}[{text}]({url}/{'raw' if image else 'blob'}/main/{path})"
    return "" if image else text


readme.write_text(re.sub(links, absolute, readme.read_text()))
if url:
    urls = {"Repository": url, "Documentation": f"{url}/tree/main/docs", "Changelog": f"{url}/blob/main/CHANGELOG.md", "Issues": f"{url}/issues"}
    table = "\n".join(["[project.urls]", *(f'{name} = "{where}"' for name, where in urls.items())])
    project.write_text(f"{project.read_text()}\n{table}\n")
PYTHON
"$python" -m venv build/wheel
build/wheel/bin/python -m pip install --quiet --disable-pip-version-check build
mkdir -p dist
build/wheel/bin/python -m build --wheel --outdir build/dist build/source > build/log 2>&1 || { tail -n 30 build/log >&2; exit 1; }
wheel="$(basename build/dist/*.whl)"
build/wheel/bin/python - "build/dist/$wheel" <<'PYTHON'
import re
import sys
import zipfile
from pathlib import Path

archive = zipfile.ZipFile(sys.argv[1])
held = set(archive.namelist())
source = Path("build/source")
needed = {path.relative_to(source).as_posix() for path in (source / "drafttrain").rglob("*") if path.is_file()}
missing = sorted(needed - held)
for folder in ("eval/suites", "configs"):  # data files: below share/drafttrain in the wheel
    if folder in (source / "pyproject.toml").read_text():
        files = [path.relative_to(source / folder) for path in (source / folder).rglob("*") if path.suffix in (".jsonl", ".json", ".yaml")]
        missing += [f"{folder}/{file}" for file in files if not any(name.endswith(f"/{file.as_posix()}") for name in held)]
if missing:
    sys.exit(f"the wheel lacks {', '.join(missing)}")
(metadata,) = (archive.read(name).decode() for name in held if name.endswith(".dist-info/METADATA"))
if broken := re.findall(r"\]\((?!https?://|#|mailto:)([^)]+)\)", metadata):
    sys.exit(f"the long description has relative links: {', '.join(broken)}")
print(f"{sys.argv[1]}: {len(held)} files, nothing missing")
PYTHON
mv "build/dist/$wheel" dist/
[ "${1:-}" = --install ] || exit 0

# -- runs it: nothing below reads the checkout but the small target, data set and drafter of the tests -------------------
away="$(mktemp -d)"
trap 'rm -rf "$away"' EXIT
"$python" -m venv "$away/venv"
"$away/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt "dist/$wheel"
cp -r tests/fixtures "$away/files"
cd "$away/files"
unset PYTHONPATH
export PATH="$away/venv/bin:$PATH" HF_HUB_OFFLINE=1 PYTHONSAFEPATH=1 TRANSFORMERS_VERBOSITY=error
python - "$OLDPWD" <<'PYTHON'
import sys
import drafttrain

if drafttrain.__file__.startswith(sys.argv[1]) or sys.argv[1] in sys.path:
    sys.exit(f"drafttrain is imported from the checkout: {drafttrain.__file__}")
PYTHON
drafttrain --version
drafttrain > /dev/null
python -m drafttrain eval --target target --drafter drafters/eagle3 --suite suite.jsonl --dtype float32 --max-new-tokens 8 --output eval.json
accelerate launch --cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no -m drafttrain.train run.yaml output_dir=trained max_steps=2
drafttrain eval --target target --drafter trained --suite drafttrain --limit 1 --dtype float32 --max-new-tokens 8 --output suite.json
echo hello | drafttrain chat --target target --drafter ngram --json --max-new-tokens 8 > chat.jsonl
python -c "import json; json.load(open('eval.json'))['overall']; json.loads(open('chat.jsonl').read())['answer']"
echo "dist/$wheel runs in a new environment of $(pip list --format=freeze | wc -l) packages, $(du -sm "$away/venv" | cut -f1) MB"
