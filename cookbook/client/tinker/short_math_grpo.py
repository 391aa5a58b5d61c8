"""Run self_host/short_math_grpo.py. This is its name in older documents."""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).parent / "self_host/short_math_grpo.py"), run_name="__main__")
