"""Batches for a model: padded, without padding, packed, with images; and the way back to rows."""

import numpy as np
import pytest
import torch

from twinkle import DeviceMesh
from twinkle.errors import InvalidInputError, UnknownNameError, UnsupportedError
from twinkle.processor import InputProcessor


def row(length, start=1, **more):
    ids = np.arange(start, start + length)
    return {
        "input_ids": ids,
        "labels": [-100, *ids[1:].tolist()],
        "attention_mask": np.ones(length, dtype=np.int64),
        "position_ids": np.arange(length),
        "length": length,
        "messages": [{"role": "user", "content": "x"}],
        **more,
    }


def test_padded_right_and_left():
    right = InputProcessor()([row(3), row(1, start=7)])
    assert right["input_ids"].tolist() == [[1, 2, 3], [7, 0, 0]]
    assert right["labels"].tolist() == [[-100, 2, 3], [-100, -100, -100]]
    assert right["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert right["position_ids"].tolist() == [[0, 1, 2], [0, -1, -1]]
    assert set(right) == {"input_ids", "labels", "attention_mask", "position_ids"}  # the arguments of a model's forward
    left = InputProcessor(padding_side="left")([row(3), row(1, start=7)])
    assert left["input_ids"].tolist() == [[1, 2, 3], [0, 0, 7]]
    assert left["position_ids"].tolist() == [[0, 1, 2], [-1, -1, 0]]


def test_one_row_alone():
    for inputs in (row(3), [row(3)]):
        batch = InputProcessor()(inputs)
        assert batch["input_ids"].shape == (1, 3)
        assert batch["input_ids"].dtype == torch.int64


def test_padding_free():
    batch = InputProcessor(padding_free=True)([row(3), row(2, start=7)])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 7, 8]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert "attention_mask" not in batch
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 3, 5]
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    assert batch["max_length_q"] == batch["max_length_k"] == 3


@pytest.mark.parametrize(
    ("positions", "packed"), [([0, 1, 2, 0, 1], True), ([0, 1, 2, 0], True), ([0, 0], True), ([0, 1, 2, 3], False)]
)
def test_packed_rows_are_recognised(positions, packed):
    length = len(positions)
    batch = InputProcessor()([row(length, position_ids=positions), row(length)])
    assert batch["input_ids"].shape == ((1, 2 * length) if packed else (2, length))
    assert ("cu_seq_lens_q" in batch) == packed
    assert ("attention_mask" in batch) == (not packed)


def test_rope_positions():
    positions = np.tile(np.arange(3), (4, 1, 1))
    inputs = [row(3, position_ids=positions), row(1, position_ids=positions[..., :1])]
    padded = InputProcessor()(inputs)
    assert padded["position_ids"].shape == (4, 2, 3)
    assert padded["position_ids"][2].tolist() == [[0, 1, 2], [0, -1, -1]]
    joined = InputProcessor(padding_free=True)(inputs)
    assert joined["position_ids"].shape == (4, 1, 4)
    assert joined["cu_seq_lens_q"].tolist() == [0, 3, 4]


def test_images_of_a_batch_follow_each_other():
    with_image = row(3, pixel_values=np.ones((5, 2), dtype=np.float32), image_grid_thw=[[1, 1, 5]])
    with_two = row(2, pixel_values=[torch.zeros(2, 2), torch.zeros(1, 2)], image_grid_thw=[[1, 1, 2], [1, 1, 1]])
    batch = InputProcessor()([with_image, row(1), with_two])
    assert batch["pixel_values"].shape == (8, 2)
    assert batch["image_grid_thw"].tolist() == [[1, 1, 5], [1, 1, 2], [1, 1, 1]]
    sound = InputProcessor()([row(2, input_features=np.zeros((4, 6)))])
    assert sound["input_features"].shape == (4, 6, 1)


def test_routed_experts_reach_to_the_end():
    experts = np.ones((2, 3, 4), dtype=np.int64)
    batch = InputProcessor()([row(3, routed_experts=experts), row(2, routed_experts=experts)])
    assert batch["routed_experts"].shape == (2, 3, 3, 4)
    assert batch["routed_experts"].sum(dim=(2, 3)).tolist() == [[12, 12, 0], [12, 12, 0]]
    joined = InputProcessor(padding_free=True)([row(3, routed_experts=experts), row(2, routed_experts=experts)])
    assert joined["routed_experts"].sum(dim=(2, 3)).tolist() == [[12, 12, 0, 12, 12]]


def test_micro_batches():
    processor = InputProcessor()
    rows = processor.prepare_inputs([row(n) for n in (1, 2, 3, 4)])
    (whole,) = processor.collate_fn(rows)
    assert whole["input_ids"].shape == (4, 4)
    equal = processor.collate_fn(rows, micro_batch_size=2)
    assert [batch["input_ids"].shape for batch in equal] == [(2, 4), (2, 4)]
    assert torch.equal(torch.cat([batch["labels"] for batch in equal]), whole["labels"])
    assert [len(batch["messages"]) for batch in equal] == [2, 2]
    varied = processor.collate_fn(rows, micro_batch_size=2, variable_seq_lengths=True)
    assert [batch["input_ids"].shape for batch in varied] == [(2, 2), (2, 4)]
    free = InputProcessor(padding_free=True).collate_fn(rows, micro_batch_size=2)
    assert [batch["input_ids"].shape for batch in free] == [(1, 3), (1, 7)]
    with pytest.raises(InvalidInputError, match="micro_batch_size: got 3, allowed: a divisor of 4"):
        processor.collate_fn(rows, micro_batch_size=3)


def test_rows_without_a_batch_dimension():
    rows = [{"input_ids": torch.arange(n), "labels": [1] * n, "position_ids": torch.arange(n)} for n in (3, 2)]
    (batch,) = InputProcessor().collate_fn(rows)
    assert batch["input_ids"].tolist() == [[0, 1, 2], [0, 1, 0]]
    assert batch["labels"].tolist() == [[1, 1, 1], [1, 1, -100]]
    (flat,) = InputProcessor(padding_free=True).collate_fn(rows)
    assert flat["input_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert [len(part["input_ids"]) for part in InputProcessor().collate_fn(rows, micro_batch_size=1)] == [1, 1]


def test_a_device_mesh_is_accepted():
    mesh = DeviceMesh.from_sizes(dp_size=1)
    assert InputProcessor(device_mesh=mesh).device_mesh is mesh


def test_unpacking_undoes_packing():
    rows = [row(3), row(2, start=7)]
    packed = InputProcessor(padding_free=True)(rows)
    padded = InputProcessor()(rows)
    logps = torch.arange(5.0)[None]
    logits = torch.arange(10.0).reshape(1, 5, 2)
    inputs, outputs = InputProcessor().unpack_packed_sequences(packed, {"logps": logps, "logits": logits, "loss": 1})
    assert torch.equal(inputs["labels"], padded["labels"])
    assert outputs["logps"].tolist() == [[0, 1, 2], [3, 4, 0]]
    assert outputs["logits"].shape == (2, 3, 2)
    assert outputs["loss"] == 1
    same, _ = InputProcessor().unpack_packed_sequences(padded)
    assert same.keys() == padded.keys()
    assert torch.equal(InputProcessor().unpack_inputs([packed])[0]["labels"], padded["labels"])


@pytest.mark.parametrize("options", [{}, {"padding_side": "left"}, {"padding_free": True}])
def test_embeddings_are_of_the_last_token(options):
    processor = InputProcessor(**options)
    batch = processor([row(3), row(1, start=7)])
    ids = batch["input_ids"].float()
    features = torch.stack([ids, ids**2], dim=-1)  # a different direction for each token
    outputs = processor.postprocess_tensor_sp(batch, {"features": features, "loss": 0}, task="embedding")
    assert set(outputs) == {"embeddings", "loss"}
    last = torch.tensor([[3.0, 9.0], [7.0, 49.0]])
    torch.testing.assert_close(outputs["embeddings"], last / last.norm(dim=1, keepdim=True))
    assert processor.postprocess_tensor_sp(batch, {"features": features}).keys() == {"features"}
    with pytest.raises(UnsupportedError, match="sequence parallelism"):
        processor.postprocess_tensor_sp(batch, {"features": features}, sp_strategy=object())


def test_models_of_both_backends_take_the_same_batch():
    plain, other = (InputProcessor(framework=name)([row(2), row(3)]) for name in ("transformers", "megatron"))
    assert plain.keys() == other.keys()
    assert all(torch.equal(plain[name], other[name]) for name in plain)


def test_packed_parameters_of_megatron_are_refused_by_name():
    """The name can be imported, because scripts do; a processor makes none."""
    from twinkle.processor import PackedSeqParams

    with pytest.raises(UnsupportedError, match=r"PackedSeqParams: a type of megatron-core; .* cu_seq_lens_q"):
        PackedSeqParams(qkv_format="thd")


def test_what_is_refused():
    with pytest.raises(UnknownNameError, match="framework 'jax'"):
        InputProcessor(framework="jax")
    with pytest.raises(InvalidInputError, match="padding_side"):
        InputProcessor(padding_side="up")
    with pytest.raises(InvalidInputError, match="inputs"):
        InputProcessor()([])
    with pytest.raises(InvalidInputError, match="labels: got '1 of 2 rows have it'"):
        InputProcessor()([row(2), {"input_ids": [1]} | {"attention_mask": [1], "position_ids": [0], "length": 1}])


def test_rows_of_text_beside_rows_with_images() -> None:
    seen = row(
        3,
        mm_token_type_ids=[0, 1, 0],
        position_ids=np.arange(3).repeat(4).reshape(3, 4).T[:, None],
        pixel_values=np.ones((4, 6), np.float32),
        image_grid_thw=[[1, 2, 2]],
    )
    text = row(2, start=7, position_ids=[0, 1])
    batch = InputProcessor()([text, seen])
    assert batch["mm_token_type_ids"].tolist() == [[0, 0, 0], [0, 1, 0]]
    assert batch["position_ids"].tolist() == [[[0, 1, -1], [0, 1, 2]]] * 4
    joined = InputProcessor(padding_free=True)([text, seen])
    assert joined["mm_token_type_ids"].tolist() == [[0, 0, 0, 1, 0]]
    assert joined["cu_seq_lens_q"].tolist() == [0, 2, 5]
    assert "mm_token_type_ids" not in InputProcessor()([row(2, mm_token_type_ids=[0, 0])])
