"""A new adapter's weights depend on the seed of ``initialize`` and its name, not on the class of the model."""

import peft
import pytest
import torch

import twinkle
from tests.support.models.plain_training import LORA, MODEL
from twinkle.infra import adapter_seed
from twinkle.model import MultiLoraTransformersModel, TransformersModel


@pytest.fixture(autouse=True)
def _settings_end_with_the_test():
    yield
    twinkle.shutdown()


def weights(kind: type, name: str = "first", seed: int | None = None, **config: object) -> dict[str, torch.Tensor]:
    model = kind(model_id=MODEL, mixed_precision="fp32", device="cpu")
    model.add_adapter_to_model(name, peft.LoraConfig(**LORA, **config), seed=seed)
    return model.get_state_dict(adapter_name=name)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[key], other[key]) for key in one)


def test_both_classes_begin_with_the_same_weights():
    twinkle.initialize(seed=5)
    plain = weights(TransformersModel)
    torch.manual_seed(99)  # has no influence
    assert same(plain, weights(MultiLoraTransformersModel))
    assert not same(plain, weights(TransformersModel, "second"))
    assert not same(plain, weights(TransformersModel, seed=1))
    assert same(weights(TransformersModel, seed=1), weights(MultiLoraTransformersModel, "second", seed=1))


def test_another_initialisation_is_left_to_peft():
    twinkle.initialize(seed=5)
    gaussian = weights(TransformersModel, init_lora_weights="gaussian")
    assert not same(gaussian, weights(TransformersModel))


def test_seeds_are_made_of_seed_and_name():
    assert adapter_seed("a") is None  # without initialize, torch's generator decides
    twinkle.initialize(seed=5)
    first = adapter_seed("a")
    assert first == adapter_seed("a") != adapter_seed("b")
    twinkle.initialize(seed=6)
    assert adapter_seed("a") != first


def test_the_client_makes_the_same_seeds():
    from twinkle_client.client.session import adapter_seed as of_client

    for seed in (0, 42, 2**32 - 1):
        twinkle.initialize(seed=seed)
        for name in ("default", "adder", "ü x"):
            assert of_client(seed, name) == adapter_seed(name)
