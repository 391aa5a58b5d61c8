"""A critic: a language model whose head is replaced by one that predicts the value of each token's state."""

from typing import Any, NoReturn

from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.loss import Loss, PPOValueLoss
from twinkle.metric import LossMetric, TrainMetric
from twinkle.model.library.components import FunctionLoss
from twinkle.model.library.optimizer_group import OptimizerGroup, TrainStatus
from twinkle.model.library.remote_verbs import at_once
from twinkle.model.transformers.causal_forward import Asked
from twinkle.model.transformers.model import TransformersModel
from twinkle.model.transformers.value_head import load_value_model


class TransformersValueModel(TransformersModel):
    """A :class:`TransformersModel` that outputs "values" (B, T) instead of log-probabilities; all of it is trained.

    ``values[b, t]`` belongs to ``labels[b, t]``: it is the value of the state in which that label is chosen, that is,
    of the tokens up to position t. The head begins with zeros, so that all values are 0 at first. ``model_id`` may also
    be a checkpoint of a value model; its head is loaded then. The default loss is :class:`twinkle.loss.PPOValueLoss`.
    """

    _load_model = staticmethod(load_value_model)
    _default_metrics = (LossMetric, TrainMetric)

    @at_once
    def add_adapter_to_model(self, adapter_name: str, config_or_dir: Any, *_: Any, **__: Any) -> None:
        raise UnsupportedError(
            "add_adapter_to_model: all parameters of a value model are trained, so it has no adapters"
        )

    @at_once
    def base_model(self) -> NoReturn:
        """Refuse to be what a sampler samples from."""
        raise UnsupportedError("sampler: a value model has no distribution over tokens, so nothing can be sampled")

    @at_once
    def offer_weights(self, *, adapter_name: str | None = None, merge_and_sync: bool = True) -> NoReturn:
        """Refuse to send weights to a sampler."""
        raise UnsupportedError("sync_weights: a value model has no distribution over tokens, so no sampler can use it")

    def _add_group(self, group: OptimizerGroup) -> None:
        group.loss_instance = PPOValueLoss()
        super()._add_group(group)

    def _check_loss(self, loss: Loss) -> None:
        if not loss.require_values and not isinstance(loss, FunctionLoss):
            allowed = "PPOValueLoss, another loss with require_values = True, or a function"
            raise InvalidInputError("loss_cls", type(loss).__name__, f"for a value model: {allowed}")

    def _asked(self, loss: Loss, status: TrainStatus, temperature: float, return_logits: bool, task: str) -> Asked:
        """Check the options of a forward pass. Those of a distribution over tokens have no meaning for values."""
        for name, value, only in (
            ("task", task, "causal_lm"),
            ("temperature", temperature, 1.0),
            ("return_logits", return_logits, False),
        ):
            if value != only:
                raise InvalidInputError(name, value, f"{only!r}: a value model has no distribution over tokens")
        return Asked(values=True)
