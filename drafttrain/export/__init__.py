"""Drafters in the formats of engines, and back. drafttrain.export(...) is commands/export.py's."""
