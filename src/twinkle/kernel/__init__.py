"""Replace layers and functions of a model by faster ones. torch is imported when a name is first used.

The trainer of the server and of ``MultiLoraTransformersModel`` chooses its kernels itself; this is for scripts with a
``TransformersModel`` or a plain model of transformers.
"""

from typing import TYPE_CHECKING

from twinkle.compatibility import find_name
from twinkle.extras import load

if TYPE_CHECKING:
    from twinkle.kernel.replacement import HubRef, hub, kernelize, npu_builtin

__all__ = ["HubRef", "hub", "kernelize", "npu_builtin"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        return find_name(__name__, name)
    return load("twinkle.kernel.replacement", name)
