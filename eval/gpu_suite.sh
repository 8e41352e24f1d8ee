#!/usr/bin/env bash
# Everything that needs a GPU, in one command of at most 40 minutes on an H100; no network. See eval/gpu_suite.py --help.
#   bash eval/gpu_suite.sh [FOLDER] [--visit N] [--step NAME ...] [--again] [--pretend [--bare]]
cd "$(dirname "$0")/.." && PYTHONPATH=$PWD:$PWD/build/carried/packages exec "${PYTHON:-python}" eval/gpu_suite.py "$@"
