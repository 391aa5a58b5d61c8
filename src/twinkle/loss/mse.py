"""Mean squared error, for models whose logits are the predicted numbers."""

from typing import Any

import torch.nn.functional as F

from twinkle.errors import InvalidInputError
from twinkle.loss.alignment import compute_dtype
from twinkle.loss.interface import Inputs, Loss, LossOutput, Outputs
from twinkle.loss.token_logps import required

__all__ = ["MSELoss"]


class MSELoss(Loss):
    """Mean of (logits − labels)² over all elements. Logits may have one dimension more, of size 1."""

    require_logits = True
    require_logps = False

    def __call__(self, inputs: Inputs, outputs: Outputs, **_: Any) -> LossOutput:
        predicted, labels = required(outputs, "logits"), inputs["labels"]
        if predicted.shape == (*labels.shape, 1):
            predicted = predicted.squeeze(-1)
        if predicted.shape != labels.shape:  # torch would broadcast, which is not what was meant
            raise InvalidInputError(
                "labels", f"shape {tuple(labels.shape)}", f"that of logits, {tuple(predicted.shape)}"
            )
        dtype = compute_dtype(predicted)
        return {"loss": F.mse_loss(predicted.to(dtype), labels.to(dtype)), "num_tokens": 0}
