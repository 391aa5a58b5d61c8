"""Damage needs the servers of the service's tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "server"))
