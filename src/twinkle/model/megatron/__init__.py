"""Training with megatron-core: tensor, pipeline, sequence and expert parallelism.

One process runs one pipeline stage of the model, and holds a cut of its weights. This room may import all other rooms
of the model except :mod:`twinkle.model.transformers`. Only :mod:`.mcore` imports megatron-core. The library's models,
in :mod:`.library`, are names of ``twinkle.model`` and of this package.
"""

from typing import TYPE_CHECKING

from twinkle.compatibility import find_name
from twinkle.extras import load

if TYPE_CHECKING:
    from twinkle.model.megatron.library.model import MegatronModel
    from twinkle.model.megatron.library.multi_lora import MultiLoraMegatronModel
    from twinkle.model.megatron.library.strategy import MegatronStrategy

__all__ = ["MegatronModel", "MegatronStrategy", "MultiLoraMegatronModel"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        return find_name(__name__, name)
    if name == "MegatronStrategy":
        return load("twinkle.model.megatron.library.strategy", name)
    return load("twinkle.model", name)
