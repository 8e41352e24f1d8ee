"""The vLLM side of bench_generate.py; runs in vLLM's own environment and imports nothing of ours.

    python vllm_generate_side.py JOB.json

The job's keys: target, dtype, prompts (token ids), stop_ids, max_new_tokens, temperature, top_k, top_p, seed, sequences at once,
max_model_len. Every line of the input that holds a number answers that many prompts (0: all) and prints lengths and seconds.
"""

import json
import sys
import time


def main() -> None:
    with open(sys.argv[1]) as file:
        job = json.load(file)
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=job["target"],
        dtype=job["dtype"],
        max_num_seqs=job["sequences"],
        max_model_len=job["max_model_len"],
        seed=job["seed"],
    )
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        params = SamplingParams(
            temperature=job["temperature"],
            top_k=job["top_k"],
            top_p=job["top_p"],
            max_tokens=job["max_new_tokens"],
            stop_token_ids=job["stop_ids"],
            detokenize=False,
        )
        wanted = prompts[: int(line) or None]
        began = time.perf_counter()
        answers = llm.generate(wanted, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        lengths = [len(answer.outputs[0].token_ids) for answer in answers]
        print(json.dumps({"lengths": lengths, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
