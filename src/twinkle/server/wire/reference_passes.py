"""Passes with a reference model, in the form that scripts for older SDKs use.

``forward`` with ``disable_lora`` in its loss_fn_config is computed without the adapter, that is, by the base model. The
script sends the log-probabilities that it returned back as ``ref_logps`` of importance_sampling. With them the loss is
DPO, and the datums are pairs: chosen, rejected, chosen, rejected, and so on.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from twinkle.errors import InvalidInputError, UnknownNameError
from twinkle.images import SentImages
from twinkle.model.csr import dense
from twinkle.model.types import Datum, FloatArray, Preference
from twinkle.server.types import TrainPass

REF_LOGPS = "ref_logps"
_DISABLE_LORA = "disable_lora"
_BETA, _SFT_WEIGHT = "dpo_beta", "dpo_sft_weight"
_LOSS = "importance_sampling"


def named_pass(
    sequences: Sequence[tuple[Datum, SentImages]], loss: str, config: Mapping[str, float], *, trains: bool
) -> TrainPass:
    """Return a pass with one of the server's own losses, ``loss``. ``trains``: whether it computes a gradient."""
    data, sent = tuple(datum for datum, _ in sequences), tuple(images for _, images in sequences)
    images = sent if any(sent) else ()
    without_adapter = _without_adapter(config, trains)
    config = {key: value for key, value in config.items() if key != _DISABLE_LORA}
    if any(REF_LOGPS in datum.extras for datum in data):
        preference = _preference(data, loss, config)
        plain = tuple(replace(datum, extras={}) for datum in data)
        return TrainPass(plain, loss, {}, preference=preference, without_adapter=without_adapter, images=images)
    for key in (_BETA, _SFT_WEIGHT):
        if key in config:
            allowed = f"{key} only together with {REF_LOGPS} in every datum"
            raise InvalidInputError(f"loss_fn_config[{key!r}]", config[key], allowed)
    return TrainPass(data, loss, config, without_adapter=without_adapter, images=images)


def _without_adapter(config: Mapping[str, float], trains: bool) -> bool:
    """Return whether the pass is to be computed by the base model alone."""
    value = config.get(_DISABLE_LORA, 0.0)
    if value not in (0.0, 1.0):
        raise InvalidInputError(f"loss_fn_config[{_DISABLE_LORA!r}]", value, "1 (without the adapter) or 0")
    if value and trains:
        raise InvalidInputError(f"loss_fn_config[{_DISABLE_LORA!r}]", value, "0, or forward: only adapters are trained")
    return bool(value)


def _preference(data: Sequence[Datum], loss: str, config: Mapping[str, float]) -> Preference:
    """Return the parameters of DPO, after checking that loss, pairs and configuration fit together."""
    if loss != _LOSS:
        raise InvalidInputError("loss_fn", loss, f"{_LOSS} where datums have {REF_LOGPS}")
    if len(data) % 2:
        raise InvalidInputError("data", f"{len(data)} datums", f"pairs with {REF_LOGPS}: chosen and rejected in turn")
    for key in config:
        if key not in (_BETA, _SFT_WEIGHT):
            raise UnknownNameError(f"key in loss_fn_config with {REF_LOGPS}", key, (_BETA, _SFT_WEIGHT))
    beta, sft_weight = config.get(_BETA, 0.1), config.get(_SFT_WEIGHT, 0.0)
    if not (math.isfinite(beta) and beta > 0):
        raise InvalidInputError(f"loss_fn_config[{_BETA!r}]", beta, "a finite number above 0")
    if not (math.isfinite(sft_weight) and sft_weight >= 0):
        raise InvalidInputError(f"loss_fn_config[{_SFT_WEIGHT!r}]", sft_weight, "a finite number, 0 or more")
    ref_logps = tuple(_ref_logps(datum, f"data[{index}]") for index, datum in enumerate(data))
    return Preference(ref_logps, beta, sft_weight)


def _ref_logps(datum: Datum, where: str) -> FloatArray:
    """Return a datum's reference log-probabilities: one for each target, and one target for each token."""
    field = f"{where}.loss_fn_inputs[{REF_LOGPS!r}]"
    given, shape = datum.extras.get(REF_LOGPS), datum.targets.shape
    if given is None or given.shape != shape or len(shape) != 1:
        got = None if given is None else f"shape {given.shape}"
        raise InvalidInputError(field, got, f"one number for each of {shape[0] if shape else 0} target tokens")
    reference = dense(given)  # it has one dimension, and sparse tensors have two
    if not np.isfinite(reference).all():
        raise InvalidInputError(field, "NaN or infinity", "finite numbers")
    if datum.weights is not None and datum.weights.shape != shape:
        raise InvalidInputError(f"{where}.loss_fn_inputs['weights']", f"shape {datum.weights.shape}", f"{shape}")
    return reference
