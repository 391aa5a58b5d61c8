"""Templates: convert conversations to tokens and labels, and tokens to text and tool calls.

The module behind a name, and with it what it needs of numpy, Jinja and Transformers, is imported when the name is
first used.
"""

from typing import TYPE_CHECKING

from twinkle.extras import load

if TYPE_CHECKING:
    from twinkle.template.deepseek_v4 import DeepseekV4Template
    from twinkle.template.qwen import Qwen2_5VLTemplate, Qwen3_5Template, Qwen3Template
    from twinkle.template.template import Template
    from twinkle.template.tools import (
        ClineParser,
        HermesQwenParser,
        ReActParser,
        ToolCallParser,
        ToolCallRegistry,
        VCPParser,
    )

__all__ = [
    "ClineParser",
    "DeepseekV4Template",
    "HermesQwenParser",
    "Qwen2_5VLTemplate",
    "Qwen3Template",
    "Qwen3_5Template",
    "ReActParser",
    "Template",
    "ToolCallParser",
    "ToolCallRegistry",
    "VCPParser",
]

_HOME = {
    "ClineParser": "twinkle.template.tools",
    "DeepseekV4Template": "twinkle.template.deepseek_v4",
    "HermesQwenParser": "twinkle.template.tools",
    "Qwen2_5VLTemplate": "twinkle.template.qwen",
    "Qwen3Template": "twinkle.template.qwen",
    "Qwen3_5Template": "twinkle.template.qwen",
    "ReActParser": "twinkle.template.tools",
    "Template": "twinkle.template.template",
    "ToolCallParser": "twinkle.template.tools",
    "ToolCallRegistry": "twinkle.template.tools",
    "VCPParser": "twinkle.template.tools",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return load(_HOME[name], name)
