"""twinkle.server.common: functions with which scripts for the tinker SDK make datums."""

import subprocess
import sys

import numpy as np
import pytest

from twinkle.errors import InvalidInputError

types = pytest.importorskip("tinker").types
torch = pytest.importorskip("torch")

from twinkle.server.common import (  # noqa: E402
    datum_to_input_feature,
    extract_rl_features_for_loss,
    input_feature_to_datum,
)


class Positions:
    """The part of a template that sets positions."""

    def set_mm_position_ids(self, feature):
        return {**feature, "position_ids": np.arange(len(feature["input_ids"]))}


def tensor(values, dtype="float32"):
    return types.TensorData(data=list(values), dtype=dtype, shape=[len(values)])


def datum(**inputs):
    return types.Datum(model_input=types.ModelInput.from_ints([5, 6, 7]), loss_fn_inputs=inputs)


@pytest.mark.parametrize("make", [list, np.array, torch.tensor, lambda row: [row], lambda row: torch.tensor([row])])
def test_labels_become_targets_and_weights(make):
    made = input_feature_to_datum({"input_ids": make([5, 6, 7]), "labels": make([-100, 7, 0]), "messages": object()})
    assert made.model_input.to_ints() == [5, 6, 7]
    assert made.loss_fn_inputs["target_tokens"].to_numpy().tolist() == [0, 7, 0]
    assert made.loss_fn_inputs["target_tokens"].to_numpy().dtype == np.int64
    assert made.loss_fn_inputs["weights"].to_numpy().tolist() == [0.0, 1.0, 1.0]
    assert made.loss_fn_inputs["weights"].to_numpy().dtype == np.float32


def test_a_feature_without_labels_has_nothing_to_learn():
    assert dict(input_feature_to_datum({"input_ids": [1, 2]}).loss_fn_inputs) == {}


def test_labels_beyond_the_tokens_are_cut_and_missing_ones_are_a_mistake():
    made = input_feature_to_datum({"input_ids": [1, 2], "labels": [2, 3, 4]})
    assert made.loss_fn_inputs["target_tokens"].to_numpy().tolist() == [2, 3]
    with pytest.raises(InvalidInputError, match="labels"):
        input_feature_to_datum({"input_ids": [1, 2], "labels": [2]})


def test_there_and_back_with_images():
    pixels = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    feature = {"input_ids": [1, 2, 3], "labels": [2, -100, 9], "pixel_values": pixels, "image_grid_thw": [[1, 2, 3]]}
    back = datum_to_input_feature(input_feature_to_datum(feature), Positions())
    assert back["input_ids"].tolist() == [1, 2, 3]
    assert back["labels"].tolist() == [2, -100, 9]  # the last target of a datum is a real token
    assert back["attention_mask"].tolist() == [1, 1, 1]
    assert back["position_ids"].tolist() == [0, 1, 2]
    assert back["length"] == 3
    assert back["pixel_values"].tolist() == pixels.tolist()
    assert back["image_grid_thw"].tolist() == [[1, 2, 3]]


def test_without_weights_a_target_of_zero_is_padding():
    bare = datum(target_tokens=tensor([6, 7, 0], "int64"))
    (feature,) = datum_to_input_feature([bare], Positions())
    assert feature["labels"].tolist() == [6, 7, -100]
    assert bare.loss_fn_inputs["weights"].to_numpy().tolist() == [1.0, 1.0, 0.0]


def test_datums_that_cannot_be_features():
    with pytest.raises(InvalidInputError, match="target_tokens"):
        datum_to_input_feature(datum(weights=tensor([1, 1, 1])), Positions())
    with pytest.raises(InvalidInputError, match="target_tokens"):
        datum_to_input_feature(datum(target_tokens=tensor([1, 2], "int64")), Positions())


def test_a_real_template_adds_positions():
    from twinkle.template import Template

    template = Template.__new__(Template)  # positions need no tokenizer
    feature = datum_to_input_feature(datum(target_tokens=tensor([6, 7, 8], "int64")), template)
    assert feature["position_ids"].tolist() == [0, 1, 2]


def test_what_a_loss_reads():
    full = {"logprobs": tensor([-0.5, -1.5]), "advantages": tensor([1.0, 2.0]), "ref_logps": tensor([-0.25, -0.5])}
    found = extract_rl_features_for_loss([datum(**full), datum(**{**full, "ref_logps": tensor([-1.0, -2.0, -3.0])})])
    assert found["old_logps"] == [[-0.5, -1.5]] * 2
    assert found["advantages"] == [[1.0, 2.0]] * 2
    assert found["ref_outputs"]["logps"].tolist() == [[-0.25, -0.5, 0.0], [-1.0, -2.0, -3.0]]
    assert extract_rl_features_for_loss([datum()]) == {}
    with pytest.raises(InvalidInputError, match="1 of 2"):
        extract_rl_features_for_loss([datum(**full), datum()])


def test_the_dpo_loss_takes_the_reference_as_it_comes():
    from twinkle.loss import DPOLoss

    logps = torch.tensor([[-1.0, -2.0, -0.5], [-1.5, -0.5, -0.25]])
    reference = {"logps": np.array([[-1.0, -2.0, -1.0], [-1.0, -0.5, -0.5]], np.float32)}
    labels = torch.tensor([[1, 2, 3], [1, 2, 3]])
    losses = [
        DPOLoss(beta=0.1)({"labels": labels}, {"logps": logps}, ref_outputs={"logps": kind(reference["logps"])})
        for kind in (np.asarray, torch.tensor)
    ]
    assert torch.equal(losses[0]["loss"], losses[1]["loss"])


def test_importing_it_loads_no_server():
    code = "import twinkle.server.common, sys; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & {"fastapi", "pydantic", "starlette", "tinker", "torch", "uvicorn", "ray"}
