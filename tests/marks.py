"""Marks of tests that need what a machine may lack."""

import pytest

from drafttrain.ops.native import cpu_kernels

needs_compiler = pytest.mark.skipif(cpu_kernels() is None, reason="no C compiler here")
