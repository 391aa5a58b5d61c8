"""All parameters trained on meshes of processes: the numbers of a plain torch loop, and the files of one process.

Equal means the same as in tests/model/full/test_full_numerics.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.model.full.plain_run import RUN, PlainRun, request
from tests.model.megatron.full_programs import Saved, Sizes, Window, fail_and_continue, save, take_over, train
from tests.model.megatron.trainer_programs import make_model
from tests.model.parallel.process_pool import ProcessPool
from tests.support.models.reference import (
    TOLERANCE,
    assert_numbers_close,
    assert_tensors_close,
    relative_error,
)
from twinkle.errors import CapacityError
from twinkle.model import AdamParams, AdapterSnapshot, Datum, FullTrainer, TrainItem
from twinkle.model.megatron.full import load_full_trainer

pytestmark = pytest.mark.megatron

TP2: Sizes = {"tp_size": 2}
PP2: Sizes = {"pp_size": 2}
SP: Sizes = {"tp_size": 2, "sequence_parallel": True}
DP2: Sizes = {"dp_size": 2}
EP2: Sizes = {"dp_size": 2, "ep_size": 2}
EP2_TP2: Sizes = {"tp_size": 2, "ep_size": 2}
EP2_SP: Sizes = {"tp_size": 2, "ep_size": 2, "sequence_parallel": True}
TP2_PP2: Sizes = {"tp_size": 2, "pp_size": 2}
TP2_PP2_SP: Sizes = {"tp_size": 2, "pp_size": 2, "sequence_parallel": True}
DP2_TP2: Sizes = {"dp_size": 2, "tp_size": 2}
DP2_PP2: Sizes = {"dp_size": 2, "pp_size": 2}
DP2_TP2_EP2_SP: Sizes = {"dp_size": 2, "tp_size": 2, "ep_size": 2, "sequence_parallel": True}
DP2_PP2_EP2: Sizes = {"dp_size": 2, "pp_size": 2, "ep_size": 2}

LOSSES = (("cross_entropy", "importance_sampling"), ("ppo", "cispo"), ("gspo", "dro"))


def adam(step: int) -> AdamParams:
    """Return other settings at each step. The second gradient is clipped."""
    return AdamParams(
        learning_rate=2e-3 / (1 + step),
        beta1=0.9 - 0.02 * step,
        beta2=0.95 + 0.01 * step,
        eps=0.1 + 0.05 * step,
        weight_decay=0.1 * step,
        grad_clip_norm=3.0 if step % 2 else 0.0,
    )


@dataclass(frozen=True)
class Case:
    """A model in a folder, requests, and what a plain torch loop makes of them; the lists have one entry per window."""

    folder: Path
    model: PreTrainedModel
    windows: list[Window]
    losses: list[float]
    logprobs: list[Any]
    gradients: list[dict[str, Any]]
    weights: list[dict[str, Any]]


Cases = Callable[[str], Case]


def make_windows(model: PreTrainedModel) -> list[Window]:
    """Return two requests for each step. One has a single sequence, so that some data ranks have none of it."""
    windows: list[Window] = []
    for step, losses in enumerate(LOSSES):
        lengths = ((5, 21, 9, 3), (30,) if step == 1 else (5, 8, 20))
        items = [request(model, 10 * step + number, *lengths[number], loss=loss) for number, loss in enumerate(losses)]
        windows.append((items, adam(step)))
    return windows


def make_case(name: str, folder: Path) -> Case:
    model = make_model(name)
    model.save_pretrained(folder)
    windows = make_windows(model)
    if name.startswith("qwen3_5"):
        # A plain loop with Transformers' delta rule, which adds up in another order, is compared in tests/model/full.
        alone = train(folder, {}, windows)
        return Case(folder, model, windows, *(alone[each] for each in ("losses", "logprobs", "gradients", "weights")))
    plain, case = PlainRun(model), Case(folder, model, windows, [], [], [], [])
    for items, params in windows:
        for item in items:
            result = plain.forward_backward(item)
            case.losses.append(result.loss)
            case.logprobs.append(result.logprobs)
        case.gradients.append(plain.gradients())
        plain.optim_step(params)
        case.weights.append(plain.weights())
    return case


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    """Returns the case of a model."""
    made: dict[str, Case] = {}

    def case(name: str) -> Case:
        if name not in made:
            made[name] = make_case(name, tmp_path_factory.mktemp(name))
        return made[name]

    return case


def compare(together: list[dict[str, Any]], case: Case) -> None:
    """Compare the results of all ranks with the plain loop."""
    by_data = {each["data"]: each for each in together}
    for each in together:  # the ranks of one model have the same results
        same = by_data[each["data"]]
        assert each["losses"] == same["losses"]
        assert each["norms"] == together[0]["norms"]
        assert each["padding"] == 0
        assert_tensors_close(each["computed"], together[0]["weights"][-1], 0.0)
        assert each is together[0] or not any(each["gradients"] + each["weights"]), "arrays are those of the first rank"
    # The gates and decays of linear attention amplify rounding, and steps of all parameters amplify it again.
    bound = 2e-4 if "qwen3_5" in case.model.config.model_type else TOLERANCE
    for number, loss in enumerate(case.losses):
        assert_numbers_close(sum(each["losses"][number] for each in by_data.values()), loss)
        for data, each in by_data.items():
            for ours, theirs in zip(each["logprobs"][number], case.logprobs[number][data :: len(by_data)], strict=True):
                assert_numbers_close(ours, theirs, bound)
    for window, gradients in enumerate(case.gradients):
        assert_tensors_close(together[0]["gradients"][window], gradients, bound)
        # torch's own norm in fp32 is too inexact for wide models
        numbers = np.concatenate([each.astype(np.float64).ravel() for each in gradients.values()])
        found = [together[0]["norms"][window], *together[0]["other norms"][window]]
        np.testing.assert_allclose(found, [np.linalg.norm(numbers, kind) for kind in (2, 1, np.inf)], rtol=bound)
        assert_tensors_close(together[0]["weights"][window], case.weights[window], bound)


@pytest.mark.parametrize("name", ["llama_biases", "llama_tied", "qwen3_5", "qwen3_moe"])
def test_one_process(cases: Cases, name: str) -> None:
    case = cases(name)
    compare([train(case.folder, {"dp_size": 1}, case.windows)], case)


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        pytest.param(TP2, "llama_tied", id="tp2 tied"),
        pytest.param(TP2, "qwen3", id="tp2 norms of queries and keys"),
        pytest.param(SP, "llama_biases", id="sp biases"),
        pytest.param(SP, "qwen3", id="sp norms of queries and keys"),
        pytest.param(TP2, "qwen3_moe", id="tp2 the same experts"),
        pytest.param(EP2_TP2, "qwen3_moe", id="tp2 ep2"),
        pytest.param(EP2_SP, "qwen3_moe_plain", id="tp2 ep2 sp"),
        pytest.param(PP2, "qwen2", id="pp2"),
        pytest.param(PP2, "llama_tied", id="pp2 tied"),
        pytest.param(PP2, "qwen3_5_tied", id="pp2 linear attention, tied"),
        pytest.param(DP2, "llama", id="dp2"),
        pytest.param(DP2, "qwen3_5", id="dp2 linear attention"),
        pytest.param(EP2, "qwen3_moe", id="dp2 ep2"),
    ],
)
def test_two_processes(cases: Cases, two: ProcessPool, sizes: Sizes, name: str) -> None:
    case = cases(name)
    compare(two.run(train, case.folder, sizes, case.windows), case)


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        pytest.param(TP2_PP2, "llama", id="tp2 pp2"),
        pytest.param(TP2_PP2_SP, "llama_tied", id="tp2 pp2 sp tied"),
        pytest.param(TP2_PP2, "wide", id="tp2 pp2 wide"),
        pytest.param(DP2_TP2, "llama_biases", id="dp2 tp2"),
        pytest.param(DP2_TP2_EP2_SP, "qwen3_moe", id="dp2 tp2 ep2 sp"),
        pytest.param(DP2_PP2_EP2, "qwen3_moe", id="dp2 pp2 ep2"),
        pytest.param(DP2_PP2, "llama_tied", id="dp2 pp2 tied"),
    ],
)
def test_four_processes(cases: Cases, four: ProcessPool, sizes: Sizes, name: str) -> None:
    case = cases(name)
    compare(four.run(train, case.folder, sizes, case.windows), case)


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        pytest.param(DP2, "qwen3_moe", id="dp2 the same experts"),
        pytest.param(EP2, "qwen3_moe", id="dp2 ep2"),
        pytest.param(DP2_TP2, "llama_biases", id="dp2 tp2"),
        pytest.param(DP2_PP2, "llama_tied", id="dp2 pp2 tied"),
    ],
)
def test_data_ranks_share_the_optimizer(
    cases: Cases, two: ProcessPool, four: ProcessPool, sizes: Sizes, name: str
) -> None:
    """Each data rank has half of the optimizer's state of its cut, and the numbers are the same."""
    case, pool = cases(name), two if sizes in (DP2, EP2) else four
    results = pool.run(train, case.folder, {**sizes, "share_optimizer": True}, case.windows)
    compare(results, case)
    every = pool.run(train, case.folder, sizes, case.windows[:1])
    for shared, whole in zip(results, every, strict=True):
        # Shares are rounded up. Experts that are divided already are on one rank only, which has their state.
        most = whole["state"] - 1 if sizes is EP2 else whole["state"] / 2 + 100
        assert whole["state"] / 2 <= shared["state"] <= most


@pytest.mark.parametrize(
    ("wrong", "sizes", "name"),
    [
        ("no sum over tp", SP, "llama"),
        ("no sum over tp", TP2, "qwen3"),
        ("counted twice", TP2, "llama"),
        ("no sum of ends", PP2, "llama_tied"),
    ],
)
def test_mistakes_are_found(cases: Cases, two: ProcessPool, wrong: str, sizes: Sizes, name: str) -> None:
    """The comparison fails when one sum of gradients is left out, or counts a part twice."""
    case = cases(name)
    results = two.run(train, case.folder, sizes, case.windows, "fp32", wrong)
    with pytest.raises(AssertionError):
        compare(results, case)


def test_bf16_computes_with_rounded_master_weights(cases: Cases, two: ProcessPool) -> None:
    """Gradients are as far from those of fp32 as in one process: activations are rounded to 8 bits there, too."""
    case = cases("llama_tied")
    wanted = (case.gradients[0], case.weights[-1])
    alone = train(case.folder, {}, case.windows, "bf16")
    bounds = [
        2 * max(relative_error(ours[name], theirs[name]) for name in theirs)
        for ours, theirs in zip((alone["gradients"][0], alone["weights"][-1]), wanted, strict=True)
    ]
    for sizes in (TP2, PP2, {**DP2, "share_optimizer": True}):
        first, second = two.run(train, case.folder, sizes, case.windows, "bf16")
        assert_tensors_close(first["gradients"][0], wanted[0], bounds[0])
        assert_tensors_close(first["weights"][-1], wanted[1], bounds[1])
        for name, weight in first["weights"][-1].items():
            rounded = torch.from_numpy(weight).bfloat16().float().numpy()
            assert np.array_equal(first["computed"][name], rounded), name
            assert np.array_equal(second["computed"][name], rounded), name


# --- files and snapshots ----------------------------------------------------------------------------------------------


def assert_same_state(ours: AdapterSnapshot, theirs: AdapterSnapshot, *, gradient: bool = True) -> None:
    """Compare bit by bit. ``gradient``: also that of an open window."""
    assert (ours.layout, ours.step, ours.passes) == (theirs.layout, theirs.step, theirs.passes)
    assert (ours.optimizer, ours.scalars) == (theirs.optimizer, theirs.scalars)
    for name in ("weights", "exp_avg", "exp_avg_sq", *(["gradient"] if gradient else [])):
        np.testing.assert_array_equal(vars(ours)[name], vars(theirs)[name], err_msg=name)


def contents(folder: Path) -> Mapping[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def check_moved(saved: Saved, states: Mapping[str, AdapterSnapshot], into: Path, base: AdapterSnapshot) -> None:
    """Check what another mesh, or one process, made of files and of a snapshot."""
    assert_same_state(states["fresh"], base)
    assert_same_state(states["reset"], base)
    assert_same_state(states["loaded"], saved.snapshot, gradient=False)
    assert states["loaded"].gradient is None
    np.testing.assert_array_equal(states["exported"].weights, saved.snapshot.weights)
    assert states["exported"].step == 0
    assert_same_state(states["restored"], saved.snapshot)
    assert contents(into / "again") == contents(saved.checkpoint)
    assert contents(into / "exported again") == contents(saved.exported)


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        pytest.param(TP2_PP2_SP, "llama_tied", id="tp2 pp2 sp tied"),
        pytest.param(DP2_TP2_EP2_SP, "qwen3_moe", id="dp2 tp2 ep2 sp"),
        pytest.param({**DP2_TP2, "share_optimizer": True}, "llama_biases", id="dp2 tp2 shared"),
        pytest.param({**DP2_PP2, "share_optimizer": True}, "qwen3_5", id="dp2 pp2 shared, linear attention"),
    ],
)
def test_files_move_between_meshes(
    cases: Cases, two: ProcessPool, four: ProcessPool, tmp_path: Path, sizes: Sizes, name: str
) -> None:
    """Files and snapshots of a mesh continue on one process of Transformers, on another mesh, and the way back."""
    case = cases(name)
    saved, *others = four.run(save, case.folder, sizes, case.windows, tmp_path / "mesh")
    assert all(len(each.snapshot.weights) == 0 for each in others), "whole rows are those of the first rank"
    window = case.windows[0]
    alone = take_over(case.folder, {}, saved, window, tmp_path / "alone")
    check_moved(saved, alone, tmp_path / "alone", alone["fresh"])
    again = take_over(case.folder, {"dp_size": 1}, saved, window, tmp_path / "one")
    check_moved(saved, again, tmp_path / "one", alone["fresh"])
    for pool, mesh in ((four, sizes), (two, PP2)):
        into = tmp_path / f"pool of {pool.size}"
        moved = pool.run(take_over, case.folder, mesh, saved, window, into)[0]
        check_moved(saved, moved, into, alone["fresh"])
        for state in ("continued", "stepped"):
            for kind in ("weights", "gradient") if state == "continued" else ("weights", "exp_avg"):
                ours, theirs = vars(moved[state])[kind], vars(alone[state])[kind]
                assert_tensors_close({kind: ours}, {kind: theirs})
    loaded = AutoModelForCausalLM.from_pretrained(saved.exported)
    parameters = dict(loaded.named_parameters())
    names = FullTrainer.from_pretrained(case.folder, device="cpu", dtype="fp32")._weights.layout.names
    assert parameters.keys() == set(names)
    weights = np.concatenate([parameters[each].detach().numpy().ravel() for each in names])
    np.testing.assert_array_equal(weights, saved.snapshot.weights)


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [TP2_PP2, DP2_TP2], ids=["tp2 pp2", "dp2 tp2"])
def test_a_request_that_fails_on_one_data_rank_fails_on_all(cases: Cases, four: ProcessPool, sizes: Sizes) -> None:
    case = cases("llama")
    items = [request(case.model, seed, 5, 9, 4) for seed in (1, 2)]
    bad = [
        TrainItem(RUN, [Datum(np.array([1, 97]), np.array([1, 2]))]),
        TrainItem(RUN, [Datum(np.array([1, 2]), np.array([1, 2]), np.array([3e38, 3e38], np.float32))]),
    ]
    results = four.run(fail_and_continue, case.folder, sizes, items, bad)
    plain = PlainRun(case.model)
    for item in items:
        plain.forward_backward(item)
    for each in results:
        assert each["errors"] == [None, "InvalidInputError", "NonFiniteError", "AdapterNotFoundError", None]
        assert "Muon" in each["refused"]
        assert "exists already" in each["written"]
    assert_tensors_close(results[0]["gradients"], plain.gradients())


def test_too_little_memory_is_refused_before_anything_runs(cases: Cases) -> None:
    with pytest.raises(CapacityError, match="training all parameters needs"):
        load_full_trainer(cases("llama").folder, device="cpu", dtype="fp32", memory_budget_bytes=10_000)
