#!/usr/bin/env bash
# Runs every command of README, tutorials and how-tos, and a plan for every recipe, in a new environment with drafttrain[all] alone.
#   bash scripts/docs_commands.sh [PAGE ...]
set -euo pipefail
cd "$(dirname "$0")/.."
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt ".[all]"
OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" "$folder/bin/python" scripts/docs_commands.py "$@"
