"""Run ../self_host/multi_modal.py on ModelScope's training service, with the API key in MODELSCOPE_TOKEN."""

import os
import runpy
import sys
from pathlib import Path

from twinkle_client import init_tinker_client

if "MODELSCOPE_TOKEN" not in os.environ and not {"-h", "--help"} & {*sys.argv}:
    sys.exit("MODELSCOPE_TOKEN: not set; it holds your API key of ModelScope")
os.environ["TWINKLE_SERVER_TOKEN"] = os.environ.get("MODELSCOPE_TOKEN", "")
os.environ.setdefault("TWINKLE_SERVER_URL", "https://www.modelscope.cn/twinkle")
os.environ.setdefault("TWINKLE_MODEL", "Qwen/Qwen3.6-27B")
init_tinker_client()  # without this, the SDK accepts only keys in the format of Tinker's service
runpy.run_path(str(Path(__file__).parents[1] / "self_host" / "multi_modal.py"), run_name="__main__")
