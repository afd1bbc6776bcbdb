"""Makes the benchmarks importable; last in the path, so that the package under test stays the
installed one."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))
