"""Run ../self_host/dpo.py on ModelScope's training service, with the API key in MODELSCOPE_TOKEN."""

import os
import runpy
from pathlib import Path

os.environ.setdefault("TWINKLE_SERVER_URL", "https://www.modelscope.cn/twinkle")
os.environ["TWINKLE_SERVER_TOKEN"] = os.environ["MODELSCOPE_TOKEN"]
os.environ.setdefault("TWINKLE_MODEL", "Qwen/Qwen3.6-27B")
runpy.run_path(str(Path(__file__).parents[1] / "self_host" / "dpo.py"), run_name="__main__")
