"""Lookahead decoding."""

UNTRAINED = True
