"""Run the command `hybridpar` as `python -m hybridpar`."""

import sys

from hybridpar.cli import main

sys.exit(main())
