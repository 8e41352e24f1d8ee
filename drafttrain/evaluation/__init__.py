"""Measuring a drafter.

suites.py, bfcl.py                evaluation prompts
runner.py, sides.py               the run: drafter and baselines on the same prompts, interleaved
metrics.py, resampling.py         figures of results.json; bootstrap intervals
verdicts.py, plausibility.py      whether speculation pays; figures that cannot be right
diagnose.py                       likely causes of low acceptance
held_out.py                       accepted length on held-out prompts during training
"""
