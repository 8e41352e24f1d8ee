"""vLLM's side of a comparison; a script that runs in vLLM's own environment and imports nothing of
ours.

    python vllm_side.py JOB.json

The job's keys: target, dtype, prompts (token ids), images (files per prompt; may be missing), tokens,
repeats, warm_up, max_model_len, ignore_eos, speculative (vLLM's speculative_config or null),
hf_overrides (of the target's config,
or null), memory (vLLM's gpu_memory_utilization; may be missing) and answer, the file to write:
runs, the last run's tokens, and vLLM's counters of speculative decoding. With steps, each prompt is
run without compilation and once, step by step; in place of runs the answer holds the number of
tokens of each step, rounds, the steps after the prefills, and read, the token ids of each prompt. vLLM's own
counters leave out steps without drafts.
"""

import json
import sys
import time


def stepped(llm, prompt, params, number):
    """The tokens of an answer, how many each of the engine's steps gave, and the prompt's tokens."""
    engine = llm.llm_engine
    tokens: list[int] = []
    sizes: list[int] = []
    read: list[int] = []
    engine.add_request(str(number), prompt, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            made = list(output.outputs[0].token_ids)  # all up to now
            sizes += [len(made) - len(tokens)] * (len(made) > len(tokens))
            tokens = made
            read = list(output.prompt_token_ids)
    return tokens, sizes, read


def inputs(job):
    """The prompts as vLLM takes them."""
    found = []
    for number, ids in enumerate(job["prompts"]):
        prompt = {"prompt_token_ids": ids}
        files = job["images"][number] if "images" in job else []
        if files:
            from PIL import Image

            prompt["multi_modal_data"] = {
                "image": [Image.open(file).convert("RGB") for file in files]
            }
        found.append(prompt)
    return found


def main() -> None:
    with open(sys.argv[1]) as file:
        job = json.load(file)
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=job["target"],
        dtype=job["dtype"],
        max_num_seqs=1,
        max_model_len=job["max_model_len"],
        speculative_config=job["speculative"],
        hf_overrides=job.get("hf_overrides"),
        enable_prefix_caching=False,
        disable_log_stats=False,
        enforce_eager=job.get("steps", False),
        **job.get("memory", {}),
    )
    params = SamplingParams(temperature=0, max_tokens=job["tokens"], ignore_eos=job["ignore_eos"])
    prompts = inputs(job)
    if job["warm_up"]:
        llm.generate(prompts[:1], params, use_tqdm=False)
    print("vllm: ready", flush=True)
    runs = []
    texts = []
    steps: list[list[int]] = []
    read: list[list[int]] = []
    if job.get("steps"):
        answers = [stepped(llm, prompt, params, i) for i, prompt in enumerate(prompts)]
        texts = [tokens for tokens, _, _ in answers]
        steps = [sizes for _, sizes, _ in answers]
        read = [ids for _, _, ids in answers]
    for _ in range(0 if steps else job["repeats"]):
        began = time.perf_counter()
        texts = [
            llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids
            for prompt in prompts
        ]
        seconds = time.perf_counter() - began
        tokens = sum(len(text) for text in texts)
        runs.append({"seconds": round(seconds, 3), "tokens_per_second": round(tokens / seconds, 2)})
    print("vllm: measured", flush=True)
    counters = {}
    for metric in llm.get_metrics():
        if "spec_decode" in metric.name and hasattr(metric, "value"):
            counters[metric.name] = metric.value
    import vllm

    with open(job["answer"], "w") as file:
        answer = {"runs": runs, "tokens": [list(text) for text in texts], "counters": counters}
        if steps:
            rounds = sum(len(sizes) - 1 for sizes in steps)
            answer |= {"steps": steps, "rounds": rounds, "read": read}
        json.dump({**answer, "version": vllm.__version__}, file)


if __name__ == "__main__":
    main()
