"""The input of a model: one tokenised sequence.

Shapes: T tokens, L layers, K experts of a token.
"""

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

__all__ = ["InputFeature"]


class InputFeature(TypedDict, total=False):
    """One sequence of T tokens.

    ``labels[t]`` is the target of position t, that is token t + 1, or −100 where nothing is learnt; the last label is
    −100. A template makes arrays; rows from disk or from the network hold lists instead. A processor adds more keys
    for images and other media (``pixel_values``, ``image_grid_thw`` …).
    """

    input_ids: "NDArray[np.int64] | Sequence[int]"
    attention_mask: "NDArray[np.int64] | Sequence[int]"
    position_ids: "NDArray[np.int64] | Sequence[int]"
    labels: "NDArray[np.int64] | Sequence[int]"
    completion_mask: "NDArray[np.int64] | Sequence[int]"
    length: int
    routed_experts: "NDArray[np.int64] | Sequence[Sequence[Sequence[int]]]"  # (T, L, K)
