"""Prompt lookup."""

UNTRAINED = True
# N-grams cost nothing, so trained drafters are measured against them, in this tree.
BASELINE_TREE = "chain:5"
