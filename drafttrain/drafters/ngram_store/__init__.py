"""An n-gram store."""

UNTRAINED = True
