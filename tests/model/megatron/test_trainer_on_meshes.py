"""Eight tenants, fused, on meshes of processes: the same numbers as in one process, and as PEFT.

The tenants differ in ranks, losses, lengths, targets and LoRA options; some have adapters on the head.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
from transformers import PreTrainedModel

from tests.model.megatron import stage_programs, trainer_programs
from tests.model.megatron.trainer_programs import Request, train
from tests.model.parallel.process_pool import ProcessPool
from tests.support.models.reference import TOLERANCE, Reference, assert_numbers_close, assert_tensors_close

pytestmark = pytest.mark.megatron

Sizes = Mapping[str, Any]
Results = dict[str, Any]

TP2: Sizes = {"tp_size": 2}
PP2: Sizes = {"pp_size": 2}
SP: Sizes = {"tp_size": 2, "sequence_parallel": True}
DP2: Sizes = {"dp_size": 2}
TP2_PP2: Sizes = {"tp_size": 2, "pp_size": 2}
TP2_PP2_SP: Sizes = {"tp_size": 2, "pp_size": 2, "sequence_parallel": True}
DP2_TP2: Sizes = {"dp_size": 2, "tp_size": 2}
EP2: Sizes = {"dp_size": 2, "ep_size": 2}
EP2_TP2: Sizes = {"tp_size": 2, "ep_size": 2}


@dataclass(frozen=True)
class Case:
    """A model in a folder, the requests of its tenants, and what one process of the Transformers trainer makes of them."""

    name: str
    folder: Path
    model: PreTrainedModel
    calls: list[list[Request]]
    alone: Results


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Returns the case of a model."""
    made: dict[str, Case] = {}

    def case(name: str) -> Case:
        if name not in made:
            folder, model = tmp_path_factory.mktemp(name), stage_programs.make_model(name)
            model.save_pretrained(folder)
            calls = trainer_programs.make_calls(model, name)
            made[name] = Case(name, folder, model, calls, train(folder, name, {}, calls))
        return made[name]

    return case


def compare(together: list[Results], alone: Results) -> None:
    """Compare the results of all ranks with those of one process."""
    by_data = {each["data"]: each for each in together}
    for each in together:  # the ranks of one model know all results of their sequences; all ranks have all weights
        same = by_data[each["data"]]
        assert each["losses"] == same["losses"]
        assert_equal(each["logprobs"], same["logprobs"])
        assert_equal(each["outputs"], same["outputs"])
        assert each["counts"] == alone["counts"]
        for name in alone["weights"]:
            assert_equal(each["weights"][name], together[0]["weights"][name])
            assert_equal(each["moments"][name], together[0]["moments"][name])
    for key, loss in alone["losses"].items():
        assert_numbers_close(sum(each["losses"][key] for each in by_data.values()), loss)
    for kind in ("logprobs", "outputs"):
        merged = {key: array for each in by_data.values() for key, array in each[kind].items()}
        assert merged.keys() == alone[kind].keys()
        for key, array in alone[kind].items():
            assert (merged[key] is None) == (array is None)
            if array is not None:
                assert_numbers_close(merged[key], array)
    for window, gradients in alone["gradients"].items():
        for name in gradients:
            assert_tensors_close(together[0]["gradients"][window][name], gradients[name])
    for key, norm in alone["norms"].items():
        assert_numbers_close(together[0]["norms"][key], norm)
    for name in alone["weights"]:
        assert_tensors_close(together[0]["weights"][name], alone["weights"][name])
        assert_tensors_close(together[0]["moments"][name], alone["moments"][name])


def assert_equal(ours: Mapping[Any, Any], theirs: Mapping[Any, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name, wanted in theirs.items():
        np.testing.assert_array_equal(ours[name], wanted, err_msg=str(name))


@pytest.mark.parametrize("sizes", [TP2, PP2, SP, DP2], ids=["tp2", "pp2", "sp", "dp2"])
def test_eight_tenants_on_two_processes(cases: Callable[[str], Case], two: ProcessPool, sizes: Sizes) -> None:
    case = cases("llama")
    compare(two.run(train, case.folder, case.name, sizes, case.calls), case.alone)


@pytest.mark.parametrize("sizes", [TP2_PP2, TP2_PP2_SP, DP2_TP2], ids=["tp2 pp2", "tp2 pp2 sp", "dp2 tp2"])
def test_eight_tenants_on_four_processes(cases: Callable[[str], Case], four: ProcessPool, sizes: Sizes) -> None:
    case = cases("llama")
    compare(four.run(train, case.folder, case.name, sizes, case.calls), case.alone)


def test_one_process_is_the_transformers_trainer(cases: Callable[[str], Case]) -> None:
    case = cases("llama")
    compare([train(case.folder, case.name, {"dp_size": 1}, case.calls)], case.alone)


@pytest.mark.parametrize("sizes", [EP2, EP2_TP2], ids=["ep2", "ep2 tp2"])
def test_experts_that_are_spread(cases: Callable[[str], Case], two: ProcessPool, sizes: Sizes) -> None:
    """With EP2 the ranks have different sequences, and different numbers of micro-batches."""
    case = cases("qwen3_moe")
    compare(two.run(train, case.folder, case.name, sizes, case.calls), case.alone)


@pytest.mark.parametrize(
    "wrong",
    ["no sum of whole factors", "no sum of the inputs' gradients", "exchanged cuts", "unmasked vocabulary"],
)
def test_mistakes_are_found(cases: Callable[[str], Case], two: ProcessPool, wrong: str) -> None:
    """The comparison fails when one part of the arithmetic is left out."""
    case = cases("llama")
    results = two.run(train, case.folder, case.name, TP2, case.calls, 60, wrong)
    with pytest.raises(AssertionError):
        compare(results, case.alone)
