#!/usr/bin/env bash
# From a fresh clone to a drafter with a measured speed-up on OUTPUT/report.html. A second run continues an interrupted one.
#
#   bash scripts/quickstart.sh [--target NAME|PATH|HUB_ID] [--budget MINUTES] [--output DIR]
#
# --budget covers prompts, generation and training (default 8, at least half a minute each; tuning and evaluation take about 4
# more). More minutes give more data and longer training: with a GPU or several hours, the same script trains a better drafter.
set -euo pipefail
cd "$(dirname "$0")/.."

target=smollm2-135m
budget=8
output=runs/quickstart
while [ "$#" -gt 0 ]; do
  case "$1" in
    --target) target="$2"; shift 2 ;;
    --budget) budget="$2"; shift 2 ;;
    --output) output="$2"; shift 2 ;;
    -h|--help) sed -n '2,7p' "$0" | cut -c3-; exit 0 ;;
    *) echo "error: unknown option $1 (known: --target --budget --output)" >&2; exit 2 ;;
  esac
done

source scripts/env.sh
install_drafttrain "[gguf,plots]"
export TOKENIZERS_PARALLELISM=false TRANSFORMERS_VERBOSITY=error
minutes() { awk -v b="$budget" -v share="$1" 'BEGIN { m = b * share; printf "%.2f", m < 0.5 ? 0.5 : m }'; }
have() { [ -f "$1" ] && echo "$1 is there already; delete it to make it again"; }
stage() { printf '\n== %s\n' "$*"; }
# A command whose next step is a stage of this script. Its output is a pipe: lines come at once, and as wide as the terminal.
export PYTHONUNBUFFERED=1 COLUMNS="${COLUMNS:-$(tput cols 2>/dev/null || echo 140)}"
step() { drafttrain "$@" | sed '/^next: /d'; }

# On a GPU the target runs inside each training step: an 8B's states of an hour would fill most disks.
features=default
if on_gpu; then
  features=none
  echo "on a GPU: training runs the target too, and no states are stored (they would take 57 KB per token of an 8B)"
fi

case "$target" in
  smollm2-135m|gemma3-270m) stage "1/6 target"; step fetch "$target" ;;
esac

stage "2/6 prompts, written by the target itself"
have "$output/prompts.jsonl" || step prompts --source magpie --target "$target" --output "$output/prompts.jsonl" \
  --count "$(awk -v b="$budget" 'BEGIN { printf "%d", 400 * b }')" --max-prompt-tokens 128 --max-minutes "$(minutes 0.13)"

# Eight prompts are kept for tuning: text that the head has learned would promise too much.
head -n 8 "$output/prompts.jsonl" > "$output/tune-prompts.jsonl"
tail -n +9 "$output/prompts.jsonl" > "$output/train-prompts.jsonl"

stage "3/6 distillation data: the target's own answers"
have "$output/data/summary.json" || step generate --target "$target" --prompts "$output/train-prompts.jsonl" \
  --output "$output/data" --features "$features" --max-new-tokens 256 --temperature 0.5 --max-minutes "$(minutes 0.47)"

stage "4/6 training an EAGLE-3 head"
step train configs/quickstart.yaml target="$target" data="$output/data" output_dir="$output/drafter" \
  max_minutes="$(minutes 0.40)"

stage "5/6 the fastest tree on this machine"
# What tune and eval print is kept in files: the report below shows the one table that matters, and advises nothing that this
# script has done or cannot do.
have "$output/drafter/decoding.json" || drafttrain tune --target "$target" --drafter "$output/drafter+ngram" \
  --dtype bfloat16 --calibrate "$output/tune-prompts.jsonl" --output "$output/tune.json" > "$output/tune.txt"
echo "$output/tune.txt says which trees were compared"

stage "6/6 evaluation in the tree decoder"
{
drafttrain eval --target "$target" --drafter "$output/drafter+ngram" --dtype bfloat16 --limit 12 --max-new-tokens 64 \
  --output "$output/results.json"
} > "$output/eval.txt"
step report "$output/results.json" --output "$output/report.html" --output "$output/report.png"
stage "done: open $output/report.html in a browser"
echo "serve it: drafttrain export --drafter $output/drafter --format vllm --output $output/export    (or sglang, gguf)"
echo "talk to it: drafttrain chat --target $target --drafter $output/drafter+ngram    (source .venv/bin/activate first)"
