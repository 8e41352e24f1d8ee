"""Swapping a drafter while vLLM serves. vLLM's processes import swap_route.py (the route) and
swap_worker.py (each worker); head_files.py reads and compares heads for them and for the client.

These modules import nothing of drafttrain but each other: vLLM's environment needs the package's
files (pip install --no-deps drafttrain), not its dependencies.
"""
