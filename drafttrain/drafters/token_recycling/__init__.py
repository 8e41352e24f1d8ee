"""Token Recycling."""

UNTRAINED = True
