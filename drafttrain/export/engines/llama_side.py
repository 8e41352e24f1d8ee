"""llama.cpp's side of a comparison, by its python server (xllamacpp); a script that imports nothing
of ours.

    python llama_side.py JOB.json

The job's keys: target and draft (GGUF files; draft may be null), type (llama-server's --spec-type),
exact (caches in float32, and plain attention), prompts (token ids), tokens, depth, p_min (the
probability below which a draft ends; 0 if missing), max_model_len, threads and answer, the file to
write: per prompt its tokens, and the number of offered and of accepted draft tokens. With timed,
also the server's timings of each prompt, and the instructions of the CPU that it was built for.
"""

import json
import sys
import urllib.request


def main() -> None:
    with open(sys.argv[1]) as file:
        job = json.load(file)
    import xllamacpp as llama

    params = llama.CommonParams()
    params.model.path = job["target"]
    params.n_ctx = job["max_model_len"]
    params.n_parallel = 1
    params.cpuparams.n_threads = job["threads"]
    params.warmup = False
    params.port = 0  # any free one
    draft = params.speculative.draft
    if job["exact"]:
        params.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        for part in (params, draft):
            part.cache_type_k = part.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    if job["draft"]:
        kind = "COMMON_SPECULATIVE_TYPE_" + job["type"].upper().replace("-", "_")
        params.speculative.types = [getattr(llama.common_speculative_type, kind)]
        draft.mparams.path = job["draft"]
        # Without p_min a chain always has its full length, whatever its probability.
        draft.n_max, draft.n_min, draft.p_min = job["depth"], 0, job.get("p_min", 0.0)
    server = llama.Server(params)
    address = server.listening_address
    tokens = []
    offered = []
    accepted = []
    timings = []
    for prompt in job["prompts"]:
        body = {
            "prompt": prompt,
            "n_predict": job["tokens"],
            "temperature": 0.0,
            "return_tokens": True,
            "cache_prompt": False,
        }
        request = urllib.request.Request(
            f"{address}/completion",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as reply:
            answer = json.load(reply)
        tokens.append(answer["tokens"])
        timings.append(answer["timings"])
        offered.append(answer["timings"].get("draft_n", 0))
        accepted.append(answer["timings"].get("draft_n_accepted", 0))
    answers = {
        "tokens": tokens,
        "offered": offered,
        "accepted": accepted,
        "version": llama.__version__,
    }
    if job.get("timed"):
        answers |= {"timings": timings, "instructions": llama.get_system_info()}
    with open(job["answer"], "w") as file:
        json.dump(answers, file)


if __name__ == "__main__":
    main()
