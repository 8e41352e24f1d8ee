"""Suffix matching in the sequence, earlier answers and a corpus."""

UNTRAINED = True
