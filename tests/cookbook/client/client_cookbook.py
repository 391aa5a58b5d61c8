"""The path of the client scripts, and the model that tests run them on."""

import re
from pathlib import Path

from tests.support.paths import ROOT

CLIENT = ROOT / "cookbook" / "client"
MODEL = "random://llama-tiny"
SEEING_MODEL = "random://qwen3-vl-tiny"  # that of the scripts with pictures

# Scripts that only run another one, at paths of older documents.
FORWARDS = {
    "tinker/lora.py": "tinker/self_host/lora.py",
    "tinker/multi_modal.py": "tinker/self_host/multi_modal.py",
    "tinker/sample.py": "tinker/self_host/sample.py",
    "tinker/self_congnition.py": "tinker/self_host/self_cognition.py",
    "tinker/short_math_grpo.py": "tinker/self_host/short_math_grpo.py",
    "twinkle/grpo.py": "twinkle/self_host/short_math_grpo.py",
    "twinkle/modelscope/self_congnition.py": "twinkle/modelscope/self_cognition.py",
    "twinkle/multi_modal.py": "twinkle/self_host/multi_modal.py",
    "twinkle/sample.py": "twinkle/self_host/sample.py",
    "twinkle/self_congnition.py": "twinkle/self_host/self_cognition.py",
    "twinkle/self_host/grpo.py": "twinkle/self_host/short_math_grpo.py",
    "twinkle/self_host/self_congnition.py": "twinkle/self_host/self_cognition.py",
}
# Configurations at paths of older documents, and the file that each equals. A YAML file cannot forward.
CONFIGURATIONS = {
    "server_config.yaml": "server/transformer/server_config.yaml",
    "tinker/megatron/server_config.yaml": "server/megatron/server_config_4b.yaml",
    "tinker/megatron/server_config_7b.yaml": "server/megatron/server_config_7b.yaml",
    "tinker/transformer/server_config.yaml": "server/transformer/server_config.yaml",
    "twinkle/megatron/server_config.yaml": "server/megatron/server_config_4b.yaml",
    "twinkle/transformer/server_config.yaml": "server/transformer/server_config.yaml",
}


def is_real(script: Path) -> bool:
    """Return whether a script is more than another name of one."""
    return script.relative_to(CLIENT).as_posix() not in FORWARDS


def without_data(text: str) -> str:
    """Return the text of a script without the line that chooses its default data."""
    return re.sub(r"^sys\.argv\[1:1\] = .*\n", "", text, flags=re.MULTILINE)
