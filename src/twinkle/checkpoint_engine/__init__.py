"""Weight synchronisation: a sampler gets the present weights of a model that is trained.

May import ``twinkle.sampler``, ``twinkle.model`` and what is below them.
"""

from twinkle.checkpoint_engine.manager import CheckpointEngineManager
from twinkle.compatibility import find_name
from twinkle.model.weights.buckets import TensorMeta
from twinkle.model.weights.engines import CheckpointEngine, HCCLCheckpointEngine, NCCLCheckpointEngine

__all__ = [
    "CheckpointEngine",
    "CheckpointEngineManager",
    "HCCLCheckpointEngine",
    "NCCLCheckpointEngine",
    "TensorMeta",
]


def __getattr__(name: str) -> object:
    return find_name(__name__, name)
