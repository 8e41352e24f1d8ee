"""mlx-dspark's side of a comparison; a script that imports nothing of ours.

    python mlx_side.py JOB.json

The job's keys: program (its package), load and generate (its functions for the kind), binds (whether
the draft borrows the target's head), target and draft (folders), exact (compute in float32),
prompts (token ids), tokens, depth, ends (tokens that end an answer) and answer, the file to write:
per prompt its tokens, and the rounds of all prompts.
"""

import json
import sys


def main() -> None:
    with open(sys.argv[1]) as file:
        job = json.load(file)
    import mlx.core as mx

    if not mx.metal.is_available():  # its kernels for small batches are made at import
        mx.fast.metal_kernel = lambda *args, **kwargs: None
    import importlib.metadata

    from mlx_dspark import generate, load

    target, tokenizer = load.load_target(job["target"], require_tap=True)
    draft, _ = getattr(load, job["load"])(job["draft"], quantize=False)
    run = getattr(generate, job["generate"])
    if job["exact"]:
        target.model.set_dtype(mx.float32)
        draft.set_dtype(mx.float32)
    if job["binds"]:
        draft.bind(target.model)
    ends = set(job["ends"])
    generate.eos_token_ids = lambda tokenizer: ends  # it adds turn ends of its own
    tokens = []
    rounds = 0
    for prompt in job["prompts"]:
        made = run(
            target,
            tokenizer,
            draft,
            prompt_ids=prompt,
            max_new_tokens=job["tokens"],
            max_draft_tokens=job["depth"],
            lookup_drafts=False,
            temperature=0.0,
        )
        tokens.append(made.token_ids[: job["tokens"]])  # its last round may commit more
        rounds += made.num_rounds
    version = importlib.metadata.version(job["program"])
    with open(job["answer"], "w") as file:
        json.dump({"tokens": tokens, "rounds": rounds, "version": version}, file)


if __name__ == "__main__":
    main()
