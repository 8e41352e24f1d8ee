"""What vLLM's own processes import to swap a drafter while they serve.

head_files.py     a head's files, compared with the head that serves; the client reads them too
swap_worker.py    the extension of each worker: check, load, roll back
swap_route.py     the route of the API server

These modules import nothing of drafttrain but each other: vLLM's environment needs the package's
files (pip install --no-deps drafttrain), not its dependencies.
"""
