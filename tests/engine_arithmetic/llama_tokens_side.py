"""llama.cpp's tokens of a text, by its python server; a script that imports nothing of ours.

    python llama_tokens_side.py JOB.json

The job's keys: target (GGUF file), text, answer (the file to write).
"""

import json
import sys
import urllib.request

import xllamacpp as llama

if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        job = json.load(file)
    params = llama.CommonParams()
    params.model.path = job["target"]
    params.n_ctx, params.port, params.warmup = 256, 0, False
    server = llama.Server(params)
    body = json.dumps({"content": job["text"], "add_special": False}).encode()
    request = urllib.request.Request(
        f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as reply, open(job["answer"], "w") as file:
        json.dump(json.load(reply), file)
