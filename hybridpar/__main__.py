"""`python -m hybridpar`: the same as the command hybridpar."""

import sys

from hybridpar.cli import main

sys.exit(main())
