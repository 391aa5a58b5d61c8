"""All that we import from megatron-core. No other module imports it, so that a new release changes one file.

Its layers are not used: our own stand in the slots of its ``GPTModel``, which holds one pipeline stage. Its process
groups, pipeline schedules and model container are used.
"""

import warnings

from twinkle.extras import require

require("megatron", "the Megatron backend")

with warnings.catch_warnings():
    # Several modules warn that Transformer Engine and Apex are not installed. Nothing here uses them.
    warnings.filterwarnings("ignore", message=".*Apex.*", category=UserWarning)
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = [
    "DistributedDataParallelConfig",
    "GPTModel",
    "ModelType",
    "ModuleSpec",
    "ProcessGroupCollection",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "get_forward_backward_func",
    "parallel_state",
]
