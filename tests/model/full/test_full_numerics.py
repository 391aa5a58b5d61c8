"""A run that trains all parameters gives the losses, gradients and weights of a plain torch loop.

Equal means, in fp32: weights and gradients ‖a − b‖₂/‖b‖₂ ≤ 1e-5 for each tensor, losses
and log-probabilities |Δ| ≤ 1e-5·max(1, |x|). tests/model/trainer/test_numerics.py says why Adam's eps is large here.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.model.full.plain_run import RUN, PlainRun, full_trainer, request, the_result, with_run
from tests.support.models.reference import (
    LOSSES,
    assert_logprobs_close,
    assert_numbers_close,
    assert_tensors_close,
    toy_llama,
)
from tests.support.models.tiny_models import tiny_model
from twinkle.loss import TOKEN_LOSSES
from twinkle.model import AdamParams, FullSpec, FullTrainer, TrainFailure
from twinkle.model.library.parameter_groups import build_optimizer
from twinkle.model.multi_lora.optimizer import build_lora_optimizer, take_step

pytestmark = pytest.mark.matrix

# Two requests a step: the first three steps have each loss once, the fourth has the first ones again.
WINDOWS = (
    ("cross_entropy", "importance_sampling"),
    ("ppo", "cispo"),
    ("dro", "gspo"),
    ("cross_entropy", "ppo"),
)
# tied and untied embeddings; biases of attention, norms and head; norms in the attention; soft caps and scaled inputs
FAMILIES = ("llama", "llama-tied", "qwen2", "qwen3", "phi", "gemma2")


def adam(step: int) -> AdamParams:
    """Return other settings at each step. Every second gradient is clipped."""
    return AdamParams(
        learning_rate=2e-3 / (1 + step),
        beta1=0.9 - 0.02 * step,
        beta2=0.95 + 0.01 * step,
        eps=0.1 + 0.05 * step,
        weight_decay=0.1 * step,
        grad_clip_norm=3.0 if step % 2 else 0.0,
    )


def assert_same_training(trainer: FullTrainer, model: PreTrainedModel) -> None:
    """Train the trainer's run and a plain copy of the model with all windows, and compare everything on the way."""
    plain = PlainRun(model)
    for step, losses in enumerate(WINDOWS):
        for number, loss in enumerate(losses):
            item = request(model, 10 * step + number, 5, 21, 9, loss=loss)
            ours, theirs = the_result(trainer.forward_backward([item])), plain.forward_backward(item)
            assert_numbers_close(ours.metrics["loss:sum"], theirs.loss)
            assert_logprobs_close(ours.logprobs, theirs.logprobs)
        assert_tensors_close(trainer.gradients(RUN), plain.gradients())
        params = adam(step)
        norm = plain.optim_step(params)
        assert norm > 3.0, "clipping changes something"
        assert_numbers_close(trainer.optim_step(RUN, params)["unclipped_grad_l2:mean"], norm)
        assert_tensors_close(trainer.weights(RUN), plain.weights())
    assert trainer.step_count(RUN) == len(WINDOWS)


def test_every_loss_is_trained() -> None:
    assert {loss for losses in WINDOWS for loss in losses} == set(TOKEN_LOSSES) == set(LOSSES)


@pytest.mark.parametrize("family", FAMILIES)
def test_training_equals_plain_torch(family: str) -> None:
    model = tiny_model(family)
    assert_same_training(with_run(model), model)


def test_all_weights_of_linear_attention_get_their_gradients() -> None:
    """One pass: its gates amplify rounding (see test_architectures.py), and each step amplifies it further."""
    model = tiny_model("qwen3_5")
    trainer, plain = with_run(model), PlainRun(model)
    item = request(model, 0, 5, 21, 9)
    ours, theirs = the_result(trainer.forward_backward([item])), plain.forward_backward(item)
    assert_logprobs_close(ours.logprobs, theirs.logprobs)
    assert_tensors_close(trainer.gradients(RUN), plain.gradients(), 5e-5)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_many_small_micro_batches_equal_plain_torch(tied: bool) -> None:
    """Sequences are longer than a batch that keeps its activations, so that some are recomputed."""
    model = toy_llama(tie_word_embeddings=tied)
    trainer = with_run(model, max_tokens_per_batch=12)
    trainer._model.engine.head.chunk_rows = 7
    assert_same_training(trainer, model)


def test_several_requests_of_a_call_add_up() -> None:
    model = toy_llama()
    trainer, plain = with_run(model), PlainRun(model)
    items = [request(model, seed, 6, 11, loss=loss) for seed, loss in enumerate(("cross_entropy", "ppo", "dro"))]
    results = trainer.forward_backward(items)
    for item, result in zip(items, results, strict=True):
        assert not isinstance(result, TrainFailure)
        assert_numbers_close(result.metrics["loss:sum"], plain.forward_backward(item).loss)
    assert_tensors_close(trainer.gradients(RUN), plain.gradients())


def test_forward_computes_the_same_without_a_gradient() -> None:
    model = toy_llama()
    trainer, plain = with_run(model), PlainRun(model)
    item = request(model, 3, 8, 17, loss="ppo", statistics=True)
    scored = the_result(trainer.forward([item]))
    assert trainer.gradients(RUN) == {}
    assert trainer.optim_step(RUN, adam(0)) == {"unclipped_grad_l2:mean": 0.0, "no_gradient:max": 1.0}
    assert trainer.step_count(RUN) == 0
    trained, theirs = the_result(trainer.forward_backward([item])), plain.forward_backward(item)
    assert_logprobs_close(scored.logprobs, theirs.logprobs)
    assert_numbers_close(scored.metrics["loss:sum"], theirs.loss)
    assert scored.metrics.keys() == trained.metrics.keys()
    with torch.no_grad():
        for datum, values in zip(item.data, scored.values, strict=True):
            probs_TV = plain.model(input_ids=torch.from_numpy(datum.tokens)[None]).logits[0].double().softmax(-1)
            assert_numbers_close(values.entropies, torch.special.entr(probs_TV).sum(-1).numpy())
            assert np.array_equal(values.predictions, probs_TV.argmax(-1).numpy())


# --- optimizers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("SGD", {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}),
        ("NAdam", {"lr": 2e-3, "eps": 0.1, "weight_decay": 0.1}),
        ("ASGD", {"lr": 0.02, "weight_decay": 0.1}),
        ("RMSprop", {"lr": 2e-3, "eps": 0.1, "momentum": 0.5, "weight_decay": 0.1}),
    ],
)
def test_other_optimizers_are_torchs(name: str, settings: Mapping[str, Any]) -> None:
    model = toy_llama()
    trainer, plain = with_run(model), PlainRun(model, name, **settings)
    for seed in range(3):
        item = request(model, seed)
        trainer.forward_backward([item])
        plain.forward_backward(item)
        trainer.scale_gradient(RUN, 0.1)
        for parameter in plain.parameters.values():
            parameter.grad *= 0.1
        trainer.optimizer_step(RUN, name, settings)
        plain.step()
    assert_tensors_close(trainer.weights(RUN), plain.weights())


def test_another_optimizer_begins_with_state_of_its_own() -> None:
    model = toy_llama()
    trainer, item, settings = with_run(model), request(model, 1), {"lr": 0.01, "momentum": 0.9}
    trainer.forward_backward([item])
    trainer.optim_step(RUN, adam(0))
    now = trainer.weights(RUN)
    trainer.forward_backward([item])
    gradients = trainer.gradients(RUN)
    trainer.optimizer_step(RUN, "SGD", settings)
    expected = {name: now[name] - np.float32(0.01) * gradients[name] for name in now}
    assert_tensors_close(trainer.weights(RUN), expected, 1e-6)
    assert trainer.step_count(RUN) == 1


@pytest.mark.parametrize("optimizer", ["AdamW", "Adam", "SGD", "NAdam"])
def test_the_librarys_weight_decay_spares_norms_and_biases(optimizer: str) -> None:
    """A step of the verbs equals one of the optimizer that a TransformersModel builds, with the same gradient."""
    model = tiny_model("qwen2")  # it has biases
    options = {"momentum": 0.9} if optimizer == "SGD" else {"eps": 0.1}
    settings = build_lora_optimizer(optimizer, 0.01, 0.5, options)
    trainer, plain = with_run(model), PlainRun(model)
    plain.optimizer = build_optimizer(optimizer, plain.parameters, 0.01, 0.5, None, options)
    assert [len(group["params"]) > 0 for group in plain.optimizer.param_groups] == [True, True]
    for seed in range(2):
        item = request(model, seed)
        trainer.forward_backward([item])
        plain.forward_backward(item)
        take_step(trainer, RUN, settings)
        plain.step()
    assert_tensors_close(trainer.weights(RUN), plain.weights())


def test_tinkers_weight_decay_is_for_all_weights() -> None:
    """With a gradient of zero, AdamW only shrinks the weights: all by the same factor."""
    model = tiny_model("qwen2")
    trainer = with_run(model)
    before = trainer.weights(RUN)
    trainer.forward_backward([request(model, 1)])
    trainer.scale_gradient(RUN, 0.0)
    trainer.optim_step(RUN, AdamParams(learning_rate=0.1, weight_decay=0.5))
    assert_tensors_close(trainer.weights(RUN), {name: each * np.float32(0.95) for name, each in before.items()}, 1e-6)


# --- bf16 -------------------------------------------------------------------------------------------------------------


def test_bf16_computes_with_rounded_master_weights() -> None:
    """Steps too small for bf16 add up in the fp32 master weights; the model computes with these, rounded."""
    model = toy_llama()
    trainer = full_trainer(model, dtype=torch.bfloat16)
    trainer.create_adapter(RUN, FullSpec())
    fresh = trainer.weights(RUN)
    assert_tensors_close(fresh, PlainRun(model).weights(), 0.0)
    params = AdamParams(learning_rate=1e-5, eps=1e-8)
    for seed in range(3):
        trainer.forward_backward([request(model, seed)])
        trainer.optim_step(RUN, params)
    masters = trainer.weights(RUN)
    for name, tensor in trainer.compute_weights().items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, torch.from_numpy(masters[name]).bfloat16()), name
    norm = "model.norm.weight"
    moved = np.abs(masters[norm] - fresh[norm])
    assert (moved > 0).all()
    assert (moved < 2.0**-9).all(), "less than half of the distance between 1 and the next bf16 number below it"


def test_bf16_gradients_are_close_to_those_of_fp32() -> None:
    """Activations and weights are rounded to 8 bits, a relative error of 2⁻⁹ each; the sums are fp32."""
    model = toy_llama()
    halves, whole = with_run(model, dtype=torch.bfloat16), with_run(model)
    item = request(model, 1, 30, 20)
    for trainer in (halves, whole):
        trainer.forward_backward([item])
    assert_tensors_close(halves.gradients(RUN), whole.gradients(RUN), 5e-2)
