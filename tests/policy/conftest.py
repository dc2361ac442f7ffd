"""Makes `small_engine` importable by the tests of policies."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
