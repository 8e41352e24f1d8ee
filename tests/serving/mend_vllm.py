"""vLLM plugin for tests: mends sampled answers of drafting servers on CPUs (vLLM issue 55005).

Without Triton vLLM 0.32 writes the temperature, top_k and top_p of drafted positions into a copy that is
dropped, so these positions are sampled at whatever was in memory. Greedy answers do not use them.
"""

from __future__ import annotations


def mend():
    from vllm.utils import cpu_triton_utils

    cpu_triton_utils._expand_kernel_impl = expand


def expand(output, values, ends, replace_from, replace_to, MAX_NUM_TOKENS=None):
    """Repeats each request's value for its drafted tokens; `ends` are their running sums."""
    counts = ends.diff(prepend=ends.new_zeros(1))
    kept = values.masked_fill(values == replace_from, replace_to)
    output.copy_(kept.repeat_interleave(counts))
