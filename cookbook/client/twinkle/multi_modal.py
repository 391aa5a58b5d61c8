"""Run self_host/multi_modal.py. This is its name in older documents."""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).parent / "self_host/multi_modal.py"), run_name="__main__")
