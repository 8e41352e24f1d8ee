"""Drafters in the formats of engines, and back. drafttrain.export(...) is drafttrain/pipeline.py's."""

import sys

from drafttrain.callable_module import CallableModule

sys.modules[__name__].__class__ = CallableModule
