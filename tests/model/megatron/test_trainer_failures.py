"""What goes wrong on one rank of a mesh goes wrong on all, for the same tenant; and adapters move between meshes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch

from tests.model.megatron import failure_programs, trainer_programs
from tests.model.parallel.process_pool import ProcessPool
from tests.support.models.reference import assert_numbers_close, assert_tensors_close
from twinkle.model import AdapterSnapshot, Trainer, TrainItem

pytestmark = pytest.mark.megatron

TP2: Mapping[str, Any] = {"tp_size": 2}
PP2: Mapping[str, Any] = {"pp_size": 2}
TP2_PP2: Mapping[str, Any] = {"tp_size": 2, "pp_size": 2}
DP2_TP2: Mapping[str, Any] = {"dp_size": 2, "tp_size": 2}
MESHES = pytest.mark.parametrize("sizes", [TP2, PP2], ids=["tp2", "pp2"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("llama")
    trainer_programs.make_model("llama").save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def requests() -> list[trainer_programs.Request]:
    return trainer_programs.make_calls(trainer_programs.make_model("llama"), "llama")[0]


@MESHES
def test_a_tenant_that_fails_on_one_rank_fails_on_all_and_alone(
    folder: Path, two: ProcessPool, sizes: Mapping[str, Any]
) -> None:
    alone = failure_programs.one_tenant_after_another_fails(folder, {})
    for each in two.on(sizes).run(failure_programs.one_tenant_after_another_fails, folder, sizes):
        good, nan, not_finite, refused, token, empty, unknown, other = each["errors"]
        assert good is None
        assert other is None
        assert "is nan" in nan
        assert "NaN or infinity" in not_finite
        assert "something else" in refused
        assert "97" in token
        assert "at least one datum" in empty
        assert "unknown" in unknown
        for name in ("good", "other"):
            assert_tensors_close(each["gradients"][name], alone["gradients"][name])
        for name in ("nan", "not finite", "refused", "token", "empty"):
            assert each["gradients"][name] == {}, name
        assert each["passes"] == [1, 1, 0, 0, 0, 0, 0]


@MESHES
def test_different_requests_are_an_error_on_all_ranks(folder: Path, two: ProcessPool, sizes: Mapping[str, Any]) -> None:
    for errors in two.on(sizes).run(failure_programs.different_requests, folder, sizes):
        *wrong, good = errors
        assert all("the same" in error for error in wrong), wrong
        assert good == ""  # the ranks are still in step


@MESHES
def test_a_loss_that_breaks_down_fails_its_tenant_on_all_ranks(
    folder: Path, two: ProcessPool, sizes: Mapping[str, Any]
) -> None:
    """With a pipeline only the last stage calls the loss, and the others wait for its gradient."""
    for each in two.on(sizes).run(failure_programs.broken_objective, folder, sizes):
        assert each["error"] == "the loss failed: ZeroDivisionError: a mistake in a script's loss"
        assert each["gradients"]["a"] == {}
        assert each["gradients"]["good"]


@pytest.mark.parametrize(
    ("sizes", "failing"),
    [(TP2, 0), (TP2, 1), (PP2, 0), (PP2, 1), (TP2_PP2, 1), (TP2_PP2, 2), (DP2_TP2, 3)],
    ids=lambda each: "-".join(map(str, each.items())) if isinstance(each, Mapping) else str(each),
)
def test_a_rank_that_fails_in_a_pass_fails_all_and_is_named(
    folder: Path, request: pytest.FixtureRequest, sizes: Mapping[str, Any], failing: int
) -> None:
    """The others wait for it in a group that it is in, or for a rank that waits for it."""
    pool = request.getfixturevalue("two" if len(sizes) == 1 else "four").on(sizes)
    try:
        answers = pool.run(failure_programs.one_rank_fails, folder, sizes, failing)
    finally:
        pool.close()  # its processes have no groups any more
    for errors in answers:
        assert len(errors) == 2
        for error in errors:
            assert f"rank {failing} failed: OutOfMemoryError: tried to allocate 7 GiB" in error


def test_micro_batches_of_several_tenants_fill_the_pipeline(
    folder: Path, two: ProcessPool, requests: list[trainer_programs.Request]
) -> None:
    """All requests would fit one micro-batch, but then one stage would always wait for the other."""
    for runs in two.on(PP2).run(failure_programs.pipeline_runs, folder, "llama", PP2, requests):
        assert len(runs) == 1
        assert len(runs[0]) >= 4
        assert max(runs[0]) > 1


def test_experts_of_a_rank_without_sequences_are_used(two: ProcessPool, tmp_path: Path) -> None:
    """The rank without sequences runs as many micro-batches as the other: forward alone first, then with backward."""
    trainer_programs.make_model("qwen3_moe").save_pretrained(tmp_path)
    loss, gradients = failure_programs.all_on_one_rank(tmp_path, {})
    sizes = {"dp_size": 2, "ep_size": 2}
    answers = two.on(sizes).run(failure_programs.all_on_one_rank, tmp_path, sizes)
    assert_numbers_close([each for each, _ in answers], [0.0, loss])
    for _, found in answers:
        assert_tensors_close(found, gradients)


@MESHES
def test_adapters_that_do_not_fit_together_are_trained_in_groups(
    folder: Path, two: ProcessPool, sizes: Mapping[str, Any], requests: list[trainer_programs.Request]
) -> None:
    alone = failure_programs.few_at_a_time(folder, "llama", {}, requests)
    assert alone["resident"] == 8
    for each in two.on(sizes).run(failure_programs.few_at_a_time, folder, "llama", sizes, requests):
        assert each["resident"] < 8
        for name, gradients in alone["gradients"].items():
            assert_tensors_close(each["gradients"][name], gradients)


def test_checkpoints_move_between_a_mesh_and_one_process(
    folder: Path, four: ProcessPool, requests: list[trainer_programs.Request], tmp_path: Path
) -> None:
    pool = four.on(TP2_PP2)
    trained = pool.run(failure_programs.save_trained, folder, "llama", TP2_PP2, requests, tmp_path / "mesh")
    alone = failure_programs.load_saved(folder, "llama", {}, tmp_path / "mesh", tmp_path / "alone")
    back = pool.run(failure_programs.load_saved, folder, "llama", TP2_PP2, tmp_path / "alone", tmp_path / "back")
    for states in (*trained, *back):
        assert states.keys() == alone.keys()
        for name, state in states.items():
            assert_same_state(state, alone[name])
    for path in (tmp_path / "mesh").rglob("*.safetensors"):
        relative = path.relative_to(tmp_path / "mesh")
        assert path.read_bytes() == (tmp_path / "alone" / relative).read_bytes()
        assert path.read_bytes() == (tmp_path / "back" / relative).read_bytes()


def assert_same_state(ours: AdapterSnapshot, theirs: AdapterSnapshot) -> None:
    assert (ours.step, ours.passes, ours.layout, ours.optimizer) == (
        theirs.step,
        theirs.passes,
        theirs.layout,
        theirs.optimizer,
    )
    for field in ("weights", "exp_avg", "exp_avg_sq"):
        left, right = vars(ours)[field], vars(theirs)[field]
        np.testing.assert_array_equal(left.view(np.int32), right.view(np.int32), err_msg=field)


def test_adapters_saved_on_a_mesh_load_in_peft(
    folder: Path, two: ProcessPool, requests: list[trainer_programs.Request], tmp_path: Path
) -> None:
    two.on(TP2).run(failure_programs.save_trained, folder, "llama", TP2, requests, tmp_path)
    trainer = Trainer.from_pretrained(folder, device="cpu", dtype="fp32")
    tokens = np.arange(3, 15)
    for path in sorted(tmp_path.iterdir()):
        model = peft.PeftModel.from_pretrained(trainer_programs.make_model("llama"), str(path))
        with torch.no_grad():
            wanted_TV = model(input_ids=torch.from_numpy(tokens)[None]).logits[0].log_softmax(-1)
        trainer.create_adapter_from_checkpoint(path.name, path)
        targets = np.tile(np.arange(97), (len(tokens), 1))
        result = trainer.forward([TrainItem(path.name, [failure_programs.Datum(tokens, targets)])])[0]
        assert_numbers_close(result.logprobs[0], wanted_TV.numpy())


def test_one_process_yields_between_micro_batches(folder: Path, requests: list[trainer_programs.Request]) -> None:
    """A server with one process runs other work between micro-batches, and on a CPU between layers."""
    items = [request.item for request in requests]
    whole, stepped = (trainer_programs.make_trainer(folder, {"dp_size": 1}, 60) for _ in range(2))
    for trainer in (whole, stepped):
        trainer_programs.add_tenants(trainer, "llama")
    whole.forward_backward(items)
    pauses: list[str] = []
    steps = stepped.in_steps(items, train=True, limit=lambda: 30, give_way=lambda: pauses.append("layer"))
    pauses += ["micro-batch" for _ in steps]
    assert pauses.count("micro-batch") > 2
    assert pauses.count("layer") > 2
    for name in whole.adapter_ids():
        assert_tensors_close(stepped.gradients(name), whole.gradients(name))


def test_a_random_model_is_that_of_the_transformers_trainer(two: ProcessPool) -> None:
    alone = failure_programs.random_model({})
    for each in two.on(TP2).run(failure_programs.random_model, TP2):
        assert_numbers_close(each, alone)
