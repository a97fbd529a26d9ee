"""The programs in tools/ are scripts that import their neighbours: give the tests the same path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
