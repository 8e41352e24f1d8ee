"""Prompt lookup."""

UNTRAINED = True
