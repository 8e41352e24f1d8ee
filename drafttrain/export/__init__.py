"""Drafters in the formats of engines, and back. drafttrain.export(...) is commands/export.py's."""

import sys

from drafttrain.callable_module import CallableModule

sys.modules[__name__].__class__ = CallableModule
