#!/usr/bin/env bash
# Installs what the tests need into .venv and runs them. Arguments go to pytest:  bash scripts/test.sh -m slow
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh
install_drafttrain "[dev]"
# A process per core, each with one thread.
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 WANDB_MODE=offline DS_ACCELERATOR=cpu TOKENIZERS_PARALLELISM=false
ruff check . && ruff format --check . && mypy
if [ "$#" -eq 0 ]; then set -- -m "not slow and not gpu"; fi
python -m pytest -n "${PYTEST_PROCESSES:-2}" "$@"
