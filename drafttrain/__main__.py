"""`python -m drafttrain COMMAND` is `drafttrain COMMAND`."""

import sys

from drafttrain.cli import main

sys.exit(main())
