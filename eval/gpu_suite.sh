#!/usr/bin/env bash
# Everything that needs a GPU, in one command of at most 40 minutes on an H100; no network. See eval/gpu_suite.py --help.
#   bash eval/gpu_suite.sh [FOLDER] [--step NAME ...] [--again] [--pretend]
cd "$(dirname "$0")/.." && PYTHONPATH=$PWD exec python eval/gpu_suite.py "$@"
