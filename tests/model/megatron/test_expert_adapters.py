"""Adapters on experts that are divided among processes: their files, their memory, and what fails.

That they train as in one process is tested in ``test_trainer_on_meshes``.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.model.megatron import experts_programs, failure_programs, trainer_programs
from tests.model.megatron.test_trainer_failures import assert_same_state
from tests.model.parallel.process_pool import ProcessPool
from tests.support.models.reference import assert_tensors_close
from twinkle.model import Trainer

pytestmark = pytest.mark.megatron

EP2: Mapping[str, Any] = {"dp_size": 2, "ep_size": 2}
EP2_TP2: Mapping[str, Any] = {"tp_size": 2, "ep_size": 2}
EP4_TP2: Mapping[str, Any] = {"dp_size": 2, "tp_size": 2, "ep_size": 4}
MESHES = pytest.mark.parametrize("sizes", [EP2, EP2_TP2], ids=["ep2", "ep2 tp2"])
HIDDEN, WIDTH, EXPERTS, LAYERS, BUCKET = 32, 24, 8, 3, 8  # of the model, whose second layer has no experts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("qwen3_moe")
    trainer_programs.make_model("qwen3_moe").save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def requests() -> list[trainer_programs.Request]:
    return trainer_programs.make_calls(trainer_programs.make_model("qwen3_moe"), "qwen3_moe")[0]


@pytest.mark.parametrize(
    ("sizes", "pool"), [(EP2, "two"), (EP2_TP2, "two"), (EP4_TP2, "four")], ids=["ep2", "ep2 tp2", "ep4 tp2"]
)
def test_checkpoints_move_between_meshes_and_one_process(
    folder: Path,
    request: pytest.FixtureRequest,
    pool: str,
    sizes: Mapping[str, Any],
    requests: list[trainer_programs.Request],
    tmp_path: Path,
) -> None:
    ranks = request.getfixturevalue(pool).on(sizes)
    trained = ranks.run(failure_programs.save_trained, folder, "qwen3_moe", sizes, requests, tmp_path / "mesh")
    alone = failure_programs.load_saved(folder, "qwen3_moe", {}, tmp_path / "mesh", tmp_path / "alone")
    back = ranks.run(failure_programs.load_saved, folder, "qwen3_moe", sizes, tmp_path / "alone", tmp_path / "back")
    for states in (*trained, *back):
        assert states.keys() == alone.keys()
        for name, state in states.items():
            assert_same_state(state, alone[name])
    for path in (tmp_path / "mesh").rglob("*.safetensors"):
        relative = path.relative_to(tmp_path / "mesh")
        assert path.read_bytes() == (tmp_path / "alone" / relative).read_bytes()
        assert path.read_bytes() == (tmp_path / "back" / relative).read_bytes()


@MESHES
def test_requests_that_other_ranks_have(folder: Path, two: ProcessPool, sizes: Mapping[str, Any]) -> None:
    """A gradient that is not finite fails its request everywhere. Each rank has the memory of its own cut."""
    alone = experts_programs.others_requests(folder, {})
    assert alone["errors"].keys() == {"not finite"}
    experts = LAYERS * 3 * EXPERTS * WIDTH * BUCKET  # numbers of factors that each expert has
    for each in two.on(sizes).run(experts_programs.others_requests, folder, sizes):
        assert each["errors"] == alone["errors"]
        assert each["passes"] == alone["passes"] == [2, 3, 0]
        for kind in ("first", "gradients"):
            assert each[kind]["not finite"] == {}
            for name in ("first", "last"):
                assert_tensors_close(each[kind][name], alone[kind][name])
        saved = alone["sizes"]["first"] - each["sizes"]["first"]
        assert saved == experts // 2 or ("tp_size" in sizes and saved > experts // 2)
        assert each["host bytes"] * alone["sizes"]["first"] == alone["host bytes"] * each["sizes"]["first"]


def test_adapters_of_other_ranks_are_paged_in(
    folder: Path, two: ProcessPool, requests: list[trainer_programs.Request]
) -> None:
    alone = failure_programs.few_at_a_time(folder, "qwen3_moe", {}, requests)
    for each in two.on(EP2).run(failure_programs.few_at_a_time, folder, "qwen3_moe", EP2, requests):
        assert each["resident"] < 8
        for name, gradients in alone["gradients"].items():
            assert_tensors_close(each["gradients"][name], gradients)


def test_adapters_that_ranks_need_together_must_fit(folder: Path, two: ProcessPool) -> None:
    for refused, trained in two.on(EP2).run(experts_programs.no_room_for_others, folder, EP2):
        assert refused.startswith(
            "2 adapters on experts, which 2 data parallel ranks need at the same time, do not fit"
        )
        assert trained == ""


def test_one_process_has_the_memory_of_one_process(folder: Path) -> None:
    """An adapter without cuts is the Transformers trainer's."""
    spec = experts_programs.SPEC
    ours = trainer_programs.make_trainer(folder, {"dp_size": 1}, 60)
    theirs = Trainer.from_pretrained(folder, device="cpu", dtype="fp32")
    assert ours.host_bytes_of(spec) == theirs.host_bytes_of(spec)
