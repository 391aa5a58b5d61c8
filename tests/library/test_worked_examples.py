"""Small examples computed by hand, one for each rule that scripts rely on."""

import numpy as np
import pytest
import torch

pytest.importorskip("datasets")
pytest.importorskip("transformers")

from twinkle.advantage import GRPOAdvantage
from twinkle.dataset import Dataset, DatasetMeta, LazyDataset, PackingDataset
from twinkle.model import TransformersModel
from twinkle.processor import InputProcessor
from twinkle.template import Template

MODEL = "random://llama-tiny"


class Given(Template):
    """A template that renders nothing: tokens and labels are given."""

    def feature(self, ids: list[int], labels: list[int]) -> dict[str, np.ndarray]:
        return self._invoke_post_pipeline([{"input_ids": np.array(ids), "labels": np.array(labels)}])[0]


@pytest.fixture(scope="module")
def template() -> Given:
    return Given(MODEL)


def test_position_t_predicts_token_t_plus_1(template):
    a, b, c, d, e = range(5, 10)
    feature = template.feature([a, b, c, d, e], [-100, -100, c, d, e])
    assert feature["labels"].tolist() == [-100, c, d, e, -100]


def test_sampled_tokens_are_labelled(template):
    a, b, x, y = range(5, 9)
    prompt = template.feature([a, b], [-100, -100])
    grown = template.concat_input_feature(prompt, [x, y])
    assert grown["input_ids"].tolist() == [a, b, x, y]
    assert grown["labels"].tolist() == [-100, x, y, -100]  # as many labels as sampled log-probabilities


def feature(tokens: int) -> dict[str, list[int]]:
    ids = list(range(5, 6 + tokens))
    return {"input_ids": ids, "labels": [*ids[1:], -100]}


def trained(reduction: str, micro_batches: list[list[dict[str, list[int]]]]) -> torch.Tensor:
    """Return the gradient of one update over the micro-batches."""
    model = TransformersModel(model_id=MODEL, mixed_precision="fp32", device="cpu")
    model.set_loss("cross_entropy", reduction=reduction)
    model.set_optimizer("SGD", lr=1.0, weight_decay=0.0)
    for batch in micro_batches:
        model.forward_backward(inputs=batch, gradient_accumulation_steps=len(micro_batches))
    model.clip_grad_norm(1e9)
    return model.model.get_output_embeddings().weight.grad.clone()


def test_sums_are_divided_by_the_tokens_of_the_window():
    """Micro-batches with 30 and 10 tokens give the mean over all 40."""
    apart = trained("sum", [[feature(30)], [feature(10)]])
    together = trained("mean", [[feature(30), feature(10)]])
    assert torch.allclose(apart, together, atol=1e-6)


def test_means_are_averaged_over_micro_batches():
    apart = trained("mean", [[feature(30)], [feature(10)]])
    alone = [trained("mean", [[feature(tokens)]]) for tokens in (30, 10)]
    assert torch.allclose(apart, (alone[0] + alone[1]) / 2, atol=1e-6)


def test_updates_come_after_whole_windows():
    model = TransformersModel(model_id=MODEL, mixed_precision="fp32", device="cpu")
    model.set_optimizer("SGD", lr=0.1)
    weight = model.model.get_output_embeddings().weight
    updated = []
    for step in range(1, 7):
        before = weight.detach().clone()
        model.forward_backward(inputs=[feature(4)], gradient_accumulation_steps=2)
        model.clip_grad_and_step()
        if not torch.equal(before, weight):
            updated.append(step)
    assert updated == [2, 4, 6]


def test_advantages_of_a_group():
    rewards = [0.0, 1.0, 0.0, 1.0]
    assert GRPOAdvantage()(rewards, num_generations=2).tolist() == pytest.approx([-0.7071, 0.7071] * 2, abs=1e-4)
    assert GRPOAdvantage()(rewards, num_generations=2, scale="none").tolist() == [-0.5, 0.5, -0.5, 0.5]


@pytest.mark.parametrize("kind", [Dataset, LazyDataset])
def test_interleaving_ends_with_the_shortest(kind):
    dataset = kind(DatasetMeta(data=[{"a": n} for n in range(4)]))
    dataset.add_dataset(DatasetMeta(data=[{"a": n} for n in range(10, 13)]))
    dataset.mix_dataset()
    assert [dataset[n]["a"] for n in range(len(dataset))] == [0, 10, 1, 11, 2, 12]


def test_packing_fills_bins(template):
    rows = [
        {"input_ids": [1] * n, "labels": [1] * n, "position_ids": list(range(n)), "length": n} for n in (5, 4, 3, 2)
    ]
    dataset = PackingDataset(DatasetMeta(data=rows))
    dataset.set_template(Template(MODEL, max_length=8))
    dataset.pack_dataset()
    packs = [dataset[n] for n in range(len(dataset))]
    assert sorted(pack["length"] for pack in packs) == [6, 8]
    full = next(pack for pack in packs if pack["length"] == 8)
    assert list(full["position_ids"]) == [0, 1, 2, 3, 4, 0, 1, 2]


@pytest.mark.parametrize("positions", [[0, 1, 2, 0, 1], [0, 1, 2, 0]])
def test_a_second_start_is_a_second_sequence(positions):
    batch = InputProcessor()([{"input_ids": [7] * len(positions), "position_ids": positions}])
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, len(positions)]
