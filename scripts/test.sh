#!/usr/bin/env bash
# Installs what the tests need into .venv, checks lint and types, and runs the tests.
#   bash scripts/test.sh            everything that needs no GPU and no minutes: what CI runs
#   bash scripts/test.sh --fast     without the tests marked `thorough`: what to run before each commit
#   bash scripts/test.sh -m slow    other arguments go to pytest
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh
extras="[dev]"
case "$*" in *slow*) extras="[dev,docs]" ;; esac  # one of the slow tests builds the documentation site
install_drafttrain "$extras"
# A process per core, each with one thread.
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 WANDB_MODE=offline DS_ACCELERATOR=cpu TOKENIZERS_PARALLELISM=false
ruff check .
ruff format --check .
# Types are checked beside the tests: without its cache mypy keeps one core busy for two minutes.
types="$(mktemp)"
trap 'kill "${checking:-}" 2>/dev/null || true; rm -f "$types"' EXIT
mypy > "$types" 2>&1 &
checking=$!
selection="not slow and not gpu"
if [ "${1:-}" = --fast ]; then
    shift
    selection="$selection and not thorough"
fi
case " $* " in *" -m "*) ;; *) set -- -m "$selection" "$@" ;; esac
passed=0
python -m pytest -n "${PYTEST_PROCESSES:-2}" --dist worksteal "$@" || passed=$?
wait "$checking" || passed=1
cat "$types"
exit "$passed"
