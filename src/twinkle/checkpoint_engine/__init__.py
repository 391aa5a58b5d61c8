"""Weight synchronisation: a sampler gets the present weights of a model that is trained.

May import ``twinkle.sampler``, ``twinkle.model`` and what is below them. Its names are imported when they are first
used, because they need torch.
"""

from typing import TYPE_CHECKING

from twinkle.compatibility import find_name
from twinkle.extras import load

if TYPE_CHECKING:
    from twinkle.checkpoint_engine.manager import CheckpointEngineManager
    from twinkle.model.weights.buckets import TensorMeta
    from twinkle.model.weights.engines import CheckpointEngine, HCCLCheckpointEngine, NCCLCheckpointEngine

__all__ = [
    "CheckpointEngine",
    "CheckpointEngineManager",
    "HCCLCheckpointEngine",
    "NCCLCheckpointEngine",
    "TensorMeta",
]

_HOME = {
    "CheckpointEngine": "twinkle.model.weights.engines",
    "CheckpointEngineManager": "twinkle.checkpoint_engine.manager",
    "HCCLCheckpointEngine": "twinkle.model.weights.engines",
    "NCCLCheckpointEngine": "twinkle.model.weights.engines",
    "TensorMeta": "twinkle.model.weights.buckets",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        return find_name(__name__, name)
    return load(_HOME[name], name)
