"""Drafters. A kind is a folder with a model.py, here or in a folder that $DRAFTTRAIN_KINDS names;
see docs/developer.
"""

import os

__path__ += [
    folder for folder in os.environ.get("DRAFTTRAIN_KINDS", "").split(os.pathsep) if folder
]
