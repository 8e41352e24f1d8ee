"""Drafter kinds: `kind: NAME` in a config resolves to the module drafters/NAME.py."""
