#!/usr/bin/env bash
# What to run when a GPU is at hand: the tests that need one, then the benchmarks. No network, no downloads.
#   bash eval/gpu_suite.sh [FOLDER] [STEP ...]     FOLDER for the JSON, eval/results unless given; all steps unless named
# Each step stays below 8 minutes, so they can also be run one at a time. A step that fails does not stop the others.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-eval/results}
shift || true
mkdir -p "$out"
export PYTHONPATH=$PWD HF_HUB_OFFLINE=1
gpu=$(python -c 'import torch; print(torch.cuda.get_device_name().split()[1].split("-")[0].lower())') || exit 2
failed=()

step() { # NAME COMMAND...
    local name=$1
    shift
    if [ ${#wanted[@]} -gt 0 ] && [[ " ${wanted[*]} " != *" $name "* ]]; then return; fi
    echo "== $name: $*"
    timeout 480 "$@" || failed+=("$name")
}
wanted=("$@")
tree() { # NAME PREFIX NODES BATCH
    step "$1" python eval/bench_tree_attention.py --prefix "$2" --nodes "$3" --batch "$4" \
        --output "$out/$1_$gpu.json"
}
decode() { # NAME LAYERSxHIDDEN
    step "$1" python eval/bench_decode.py --random "$2" --dtype bfloat16 --output "$out/$1_$gpu.json"
}

step test_kernels python -m pytest -q -m gpu tests/ops
step test_decode python -m pytest -q -m gpu tests/inference
tree tree_attention 8192 64 1
tree tree_attention_long 32768 32 1
tree tree_attention_batch 2048 16 16
decode decode_random-30x576 30x576
decode decode_random-16x2048 16x2048
decode decode_random-32x4096 32x4096

if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}"
    exit 1
fi
