"""Adapters that are cut over processes train, move and are written as whole ones.

Copies are equal to the last bit. After steps, last bits may differ: torch rounds the ends of a row otherwise than its
middle, and cut rows have other ends.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.model.parallel.cut_programs import (
    SPECS,
    Layout,
    gathered_bits,
    other_optimizers,
    paged,
    restored,
    train,
)
from tests.model.parallel.process_pool import ProcessPool
from tests.support.thorough import by_default
from twinkle.model import AdapterSnapshot

TOLERANCE = 1e-5
ALONE, TP2, PP2, BOTH, DATA = Layout(), Layout(tp=2), Layout(pp=2), Layout(tp=2, pp=2), Layout(tp=2, dp=2)
TEXTS = ("adapter_config.json", "trainer_state.json")
TENSORS = ("adapter_model.safetensors", "optimizer.safetensors")
FILES = TEXTS + TENSORS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alone")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    return train(ALONE, str(folder))


@pytest.fixture
def pool(request: pytest.FixtureRequest, layout: Layout) -> ProcessPool:
    pool: ProcessPool = request.getfixturevalue({2: "two", 4: "four"}[layout.world])
    return pool


def assert_equal(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name, wanted in theirs.items():
        assert np.array_equal(ours[name], wanted), name


def assert_close(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name, wanted in theirs.items():
        error = np.linalg.norm(ours[name] - wanted) / max(np.linalg.norm(wanted), 1e-30)
        assert error <= TOLERANCE, f"{name}: {error:.1e}"


def arrays(snapshot: AdapterSnapshot) -> dict[str, Any]:
    rows = {name: vars(snapshot)[name] for name in ("weights", "exp_avg", "exp_avg_sq")}
    return rows if snapshot.gradient is None else {**rows, "gradient": snapshot.gradient}


def facts(snapshot: AdapterSnapshot) -> tuple[Any, ...]:
    return snapshot.spec, snapshot.step, snapshot.layout, snapshot.optimizer, dict(snapshot.scalars), snapshot.passes


@pytest.mark.parametrize("layout", by_default(BOTH, of=[TP2, PP2, BOTH]), ids=["tp2", "pp2", "tp2pp2"])
def test_cut_adapters_train_as_whole_ones(
    pool: ProcessPool, layout: Layout, alone: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    ranks = pool.run(train, layout, str(tmp_path))
    for found in ranks:
        np.testing.assert_allclose(found["losses"], alone["losses"], rtol=TOLERANCE)
        np.testing.assert_allclose(found["norms"], alone["norms"], rtol=1e-6)
        np.testing.assert_allclose(found["steps"], alone["steps"], rtol=1e-6)
        assert (found["shapes"], found["configs"]) == (alone["shapes"], alone["configs"])
        for name in SPECS:
            assert_equal(found["first"][name], alone["first"][name])
            assert_close(found["gradients"][name], alone["gradients"][name])
            for kind in ("open", "closed"):
                assert_close(arrays(found[kind][name]), arrays(alone[kind][name]))
                assert facts(found[kind][name]) == facts(alone[kind][name])
            assert_close(found["clipped"][name], alone["clipped"][name])
            assert_equal(found["clipped"][name], ranks[0]["clipped"][name])  # norms are the same on all ranks
            config, tensors = found["exported"][name]
            assert config == alone["exported"][name][0]
            assert tensors.keys() == alone["exported"][name][1].keys()
            for key, whole in alone["exported"][name][1].items():  # rounded to bf16, by at most 2^-9
                assert (tensors[key] - whole).float().norm() <= 2**-8 * whole.float().norm(), key
    for name in SPECS:
        own, copy = tmp_path / name, tmp_path / f"{name}-copy"
        assert all((own / file).read_bytes() == (copy / file).read_bytes() for file in FILES)
        assert all((own / file).read_bytes() == (folder / name / file).read_bytes() for file in TEXTS)
        for file in TENSORS:
            assert_close(load_file(own / file), load_file(folder / name / file))
    for rank, found in enumerate(ranks):
        assert found["copies"] == ranks[rank // layout.tp * layout.tp]["copies"]
        assert found["sizes"]["all"] < 0.9 * alone["sizes"]["all"]
    if layout.pp > 1:
        assert ranks[0]["sizes"]["head"] == ranks[-1]["sizes"]["first"] == 0


@pytest.mark.parametrize("layout", [TP2, BOTH], ids=["tp2", "tp2pp2"])
def test_adapters_move_between_meshes(pool: ProcessPool, layout: Layout, alone: dict[str, Any], folder: Path) -> None:
    """An open window continues on another mesh, and files are read there."""
    expected = restored(ALONE, alone["open"], str(folder))
    for found in pool.run(restored, layout, alone["open"], str(folder)):
        for name in SPECS:
            assert_equal(arrays(found["before"][name]), arrays(alone["open"][name]))
            assert_close(arrays(found["after"][name]), arrays(expected["after"][name]))
            assert_equal(arrays(found["read"][name]), arrays(alone["closed"][name]))
            assert facts(found["read"][name])[1:] == facts(alone["closed"][name])[1:]


@pytest.mark.parametrize("layout", [DATA], ids=["tp2dp2"])
def test_cut_adapters_are_trained_by_data_parallel_ranks(
    pool: ProcessPool, layout: Layout, alone: dict[str, Any], tmp_path: Path
) -> None:
    ranks = pool.run(train, layout, str(tmp_path))
    for name in SPECS:
        for found in ranks:
            assert_close(found["gradients"][name], alone["gradients"][name])
            assert_close(arrays(found["open"][name]), arrays(alone["open"][name]))
            assert_close(found["clipped"][name], alone["clipped"][name])
            assert_equal(found["clipped"][name], ranks[0]["clipped"][name])


@pytest.mark.parametrize("layout", [BOTH], ids=["tp2pp2"])
def test_every_optimizer_takes_its_steps_on_cut_adapters(pool: ProcessPool, layout: Layout) -> None:
    expected = other_optimizers(ALONE)
    ranks = pool.run(other_optimizers, layout)
    for found in ranks:
        assert found.keys() == expected.keys()
        for name, snapshot in expected.items():
            assert_close(arrays(found[name]), arrays(snapshot))
            assert_equal(arrays(found[name]), arrays(ranks[0][name]))
            assert facts(found[name]) == facts(snapshot)


@pytest.mark.parametrize("layout", [TP2, BOTH], ids=["tp2", "tp2pp2"])
def test_all_ranks_page_the_same_adapters(pool: ProcessPool, layout: Layout) -> None:
    """Also on a stage that has nothing of some adapters."""
    _, weights = paged(ALONE)
    ranks = pool.run(paged, layout)
    for resident, found in ranks:
        assert resident == ranks[0][0]
        assert any(len(names) < len(SPECS) for names in resident)
        for name in SPECS:
            assert_close(found[name], weights[name])


@pytest.mark.parametrize("layout", [TP2, PP2, BOTH], ids=["tp2", "pp2", "tp2pp2"])
def test_gathering_keeps_every_bit(pool: ProcessPool, layout: Layout) -> None:
    for before, after in pool.run(gathered_bits, layout):
        assert before == after
