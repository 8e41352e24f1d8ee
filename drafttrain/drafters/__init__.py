"""Drafters. A kind is a folder with a model.py, here or in a folder of $DRAFTTRAIN_KINDS.

See docs/developer.
"""

import os

for folder in os.environ.get("DRAFTTRAIN_KINDS", "").split(os.pathsep):
    if folder:
        __path__.append(folder)
