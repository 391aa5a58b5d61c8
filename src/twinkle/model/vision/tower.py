"""Runs the vision tower of a model, which no adapter changes: the features of an image are constants."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from twinkle.model.types import FloatArray, VisionSpec


@dataclass(frozen=True)
class ImageFeatures:
    """What the decoder gets for an image of n tokens: (n, H) instead of embeddings, and what DeepStack adds later."""

    embeddings_nH: Tensor
    added: tuple[Tensor, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.embeddings_nH, *self.added))

    def changed(self, change: Callable[[Tensor], Tensor]) -> "ImageFeatures":
        """Return the features with each of their tensors changed."""
        return ImageFeatures(change(self.embeddings_nH), tuple(map(change, self.added)))


def deepstack_features(seen: Any, tokens: Sequence[int]) -> list[Sequence[Tensor]]:
    """Return the features of each image for each layer of DeepStack, from what ``get_image_features`` returned.

    ``tokens``: how many each image has. Transformers 5.17 and earlier have one tensor for all images.
    """
    layers = getattr(seen, "deepstack_features", None) or ()
    return [each.split(list(tokens)) if isinstance(each, Tensor) else each for each in layers]


class Tower:
    """The vision tower of a model."""

    def __init__(self, model: PreTrainedModel, spec: VisionSpec) -> None:
        self._model: Any = model.base_model
        self._merge = spec.merge
        self.device: torch.device = self._model.visual.device

    @torch.no_grad()
    def features(self, images: Sequence[tuple[FloatArray | Tensor, tuple[int, int]]]) -> list[ImageFeatures]:
        """Compute the features of images together.

        Each is its patches, on the device or in an array of the host, and its (rows, columns) in tokens.
        """
        patches = torch.cat([self._on_device(each) for each, _ in images])
        grids = [(1, rows * self._merge, columns * self._merge) for _, (rows, columns) in images]
        seen = self._model.get_image_features(patches, torch.tensor(grids, device=self.device), return_dict=True)
        layers = deepstack_features(seen, [rows * columns for _, (rows, columns) in images])
        added = zip(*layers, strict=True) if layers else (() for _ in images)
        # Copies: views of one image would keep the memory of all images that were computed with it.
        return [
            ImageFeatures(each.clone(), tuple(layer.clone() for layer in more))
            for each, more in zip(seen.pooler_output, added, strict=True)
        ]

    def _on_device(self, patches: FloatArray | Tensor) -> Tensor:
        if isinstance(patches, Tensor):
            return patches
        # From pinned memory the copy does not wait for what the GPU computes now.
        on_host = torch.from_numpy(patches)
        return on_host.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else on_host
