"""Eight tenants, fused, on meshes of processes: the same numbers as in one process, and as PEFT.

The tenants differ in ranks, losses, lengths, targets and LoRA options; some have adapters on the head.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from transformers import PreTrainedModel

from tests.model.megatron import trainer_programs
from tests.model.megatron.trainer_programs import Request, train
from tests.model.parallel.process_pool import ProcessPool
from tests.support.models.reference import LOSSES, TOLERANCE, Reference, loss_inputs, pick, relative_error
from twinkle.model import TokenValues, TrainItem

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
EP2_PP2: Sizes = {"dp_size": 2, "pp_size": 2, "ep_size": 2}
EP2_TP2_DP2: Sizes = {"dp_size": 2, "tp_size": 2, "ep_size": 2}
EP4_TP2_SP: Sizes = {"dp_size": 2, "tp_size": 2, "ep_size": 4, "sequence_parallel": True}


@dataclass(frozen=True)
class Case:
    """A model, the requests of its tenants, and what one process of the Transformers trainer makes of them."""

    name: str
    folder: Path
    model: PreTrainedModel
    calls: list[list[Request]]
    alone: Results

    @cached_property
    def peft(self) -> Results:
        """Return what PEFT makes of the requests.

        Without those of tenants with dropout, which PEFT draws, and of tenants on experts or on query, key and value of
        linear attention, whose form PEFT does not have: tests/model compares those with the plain model.
        """
        results: Results = {"losses": {}, "gradients": {1: {}, 2: {}}, "norms": {}, "weights": {}}
        specs = {name: tenant.spec for name, tenant in trainer_programs.tenants(self.name).items()}
        others = re.compile(r"\.experts\.|\.in_proj_[qkv]\.")
        in_own_form = {name for name, each in self.alone["initial"].items() if any(map(others.search, each))}
        for name, spec in specs.items():
            if spec.dropout or name in in_own_form:
                continue
            config = peft.LoraConfig(**{**self.alone["configs"][name], "inference_mode": False})
            reference = Reference(self.model, spec, self.alone["initial"][name], config)
            for number, requests in enumerate(self.calls):
                for item in (request.item for request in requests if request.item.adapter_id == name):
                    results["losses"][number, name] = plain_pass(reference, item)
                if number > 0:
                    results["gradients"][number][name] = reference.gradients()
                    results["norms"][number, name] = reference.optim_step(trainer_programs.ADAM)
            results["weights"][name] = reference.weights()
        return results


def plain_pass(reference: Reference, item: TrainItem) -> float:
    """Add the gradient of a request, with all its options, and return the loss."""
    if item.temperature == 1.0 and item.objective is None:
        return reference.forward_backward(item).loss
    logprobs = []
    for datum in item.data:
        logits_TV = reference.model(input_ids=torch.from_numpy(datum.tokens)[None]).logits[0] / item.temperature
        logprobs.append(pick(logits_TV.log_softmax(-1), datum))
    if item.objective is None:
        pairs = zip(logprobs, item.data, strict=True)
        loss = sum(LOSSES[item.loss](each.double(), loss_inputs(item, datum)).sum() for each, datum in pairs)
        loss.backward()
        return float(loss)
    nothing = np.zeros(0)
    value = item.objective([TokenValues(each.detach().numpy(), nothing, nothing) for each in logprobs])
    torch.autograd.backward(logprobs, [torch.from_numpy(slope) for slope in value.logprobs])
    return value.loss


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Returns the case of a model."""
    made: dict[str, Case] = {}

    def case(name: str) -> Case:
        if name not in made:
            folder, model = tmp_path_factory.mktemp(name), trainer_programs.make_model(name)
            model.save_pretrained(folder)
            calls = trainer_programs.make_calls(model, name)
            made[name] = Case(name, folder, model, calls, train(folder, name, {}, calls))
        return made[name]

    return case


def check(case: Case, together: list[Results]) -> None:
    """Compare the results of all ranks with each other, with those of one process, and with those of PEFT."""
    by_data = {each["data"]: each for each in together}
    for each in together:  # the ranks of one model know all results of their sequences; all have all weights and norms
        same = by_data[each["data"]]
        assert each["losses"] == same["losses"]
        assert each["norms"] == together[0]["norms"]
        assert_equal(each["logprobs"], same["logprobs"])
        assert_equal(each["outputs"], same["outputs"])
        assert each["counts"] == case.alone["counts"]
        for name in case.alone["weights"]:
            assert_equal(each["weights"][name], together[0]["weights"][name])
            assert_equal(each["moments"][name], together[0]["moments"][name])
    merged = merge(together)
    # Transformers' delta rule adds up in another order, which gates amplify: tests/model/decoder has the same bound.
    of_peft = 5e-5 if case.name == "qwen3_5" else TOLERANCE
    for theirs, tolerance in ((case.alone, TOLERANCE), (case.peft, of_peft)):
        found = differences(merged, theirs, tolerance)
        assert not found, "\n".join(found)


def merge(together: list[Results]) -> Results:
    """Return the results of all ranks together: each data rank has the losses of its own sequences."""
    by_data = {each["data"]: each for each in together}
    merged = dict(together[0])
    merged["losses"] = {key: sum(each["losses"][key] for each in by_data.values()) for key in merged["losses"]}
    for kind in ("logprobs", "outputs"):
        merged[kind] = {key: array for each in by_data.values() for key, array in each[kind].items()}
    return merged


def differences(ours: Results, theirs: Results, tolerance: float = TOLERANCE) -> list[str]:
    """Return what is not equal, up to a tolerance, of all that ``theirs`` has. ``tolerance``: that of tensors."""
    found = []
    for kind in ("losses", "norms", "logprobs", "outputs"):
        assert kind not in theirs or kind in ("losses", "norms") or ours[kind].keys() == theirs[kind].keys()
        for key, wanted in theirs.get(kind, {}).items():
            if not numbers_close(ours[kind][key], wanted):
                found.append(f"{kind} {key}")
    tensors = {f"weights {name}": (ours["weights"][name], wanted) for name, wanted in theirs["weights"].items()}
    for name, wanted in theirs.get("moments", {}).items():
        tensors[f"moments {name}"] = ours["moments"][name], wanted
    for window, gradients in theirs["gradients"].items():
        for name, wanted in gradients.items():
            tensors[f"gradients {window} {name}"] = ours["gradients"][window][name], wanted
    for text, (left, right) in tensors.items():
        assert left.keys() == right.keys()
        found += [f"{text} {name}" for name in right if not relative_error(left[name], right[name]) <= tolerance]
    return found


def numbers_close(ours: object, theirs: object) -> bool:
    left, right = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    return bool((np.abs(left - right) <= TOLERANCE * np.maximum(1.0, np.abs(right))).all())


def assert_equal(ours: Mapping[Any, Any], theirs: Mapping[Any, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name, wanted in theirs.items():
        np.testing.assert_array_equal(ours[name], wanted, err_msg=str(name))


def run(pool: ProcessPool, case: Case, sizes: Sizes, *options: Any) -> list[Results]:
    groups = {name: size for name, size in sizes.items() if name != "sequence_parallel"}
    return pool.on(groups).run(train, case.folder, case.name, sizes, case.calls, *options)


Cases = Callable[[str], Case]


def test_one_process_is_the_transformers_trainer(cases: Cases) -> None:
    case = cases("llama")
    check(case, [train(case.folder, case.name, {"dp_size": 1}, case.calls)])


@pytest.mark.parametrize("sizes", [PP2, DP2, TP2, SP], ids=["pp2", "dp2", "tp2", "sp"])
def test_eight_tenants_on_two_processes(cases: Cases, two: ProcessPool, sizes: Sizes) -> None:
    case = cases("llama")
    check(case, run(two, case, sizes))


@pytest.mark.parametrize(
    ("model", "sizes"),
    [("qwen3", TP2), ("qwen3", PP2), ("qwen3_moe", EP2)],
    ids=["tp2", "pp2", "ep2"],
)
def test_long_sequences_are_recomputed(cases: Cases, two: ProcessPool, model: str, sizes: Sizes) -> None:
    """Sequences above the token budget run with recomputed activations, in micro-batches of one sequence."""
    case = cases(model)
    check(case, run(two, case, sizes, 12))


@pytest.mark.parametrize("sizes", [TP2_PP2, TP2_PP2_SP, DP2_TP2], ids=["tp2 pp2", "tp2 pp2 sp", "dp2 tp2"])
def test_eight_tenants_on_four_processes(cases: Cases, four: ProcessPool, sizes: Sizes) -> None:
    case = cases("llama")
    check(case, run(four, case, sizes))


@pytest.mark.parametrize("sizes", [PP2, DP2], ids=["pp2", "dp2"])
def test_linear_attention_on_two_processes(cases: Cases, two: ProcessPool, sizes: Sizes) -> None:
    """With PP2 the first stage has linear attention in all of its layers, and the second one in one of two."""
    case = cases("qwen3_5")
    check(case, run(two, case, sizes))


def test_linear_attention_on_four_processes(cases: Cases, four: ProcessPool) -> None:
    """Activations are recomputed, as for long sequences above."""
    case = cases("qwen3_5")
    check(case, run(four, case, {"dp_size": 2, "pp_size": 2}, 12))


def test_a_wide_model(cases: Cases, four: ProcessPool) -> None:
    """Toy models can be bit-equal where wide ones are not."""
    case = cases("wide")
    check(case, run(four, case, TP2_PP2_SP))


@pytest.mark.parametrize("sizes", [EP2, EP2_TP2, TP2], ids=["ep2", "ep2 tp2", "tp2"])
def test_experts_that_are_spread(cases: Cases, two: ProcessPool, sizes: Sizes) -> None:
    """With EP2 the ranks have different sequences, and different numbers of micro-batches. With TP2 both have all
    experts, and each computes them for half of the rows.
    """
    case = cases("qwen3_moe")
    check(case, run(two, case, sizes))


@pytest.mark.parametrize("sizes", [EP2_PP2, EP4_TP2_SP, EP2_TP2_DP2], ids=["ep2 pp2", "ep4 tp2 sp", "ep2 tp2 dp2"])
def test_experts_that_are_spread_over_four_processes(cases: Cases, four: ProcessPool, sizes: Sizes) -> None:
    case = cases("qwen3_moe")
    check(case, run(four, case, sizes))


# --- mistakes that the comparison must find ---------------------------------------------------------------------------


def test_gradients_of_whole_factors_that_are_not_added_up_are_found(cases: Cases, two: ProcessPool) -> None:
    case = cases("llama")
    found = differences(merge(run(two, case, TP2, 60, "no sum of whole factors")), case.alone)
    first = [each.split(" ", 2)[2] for each in found if each.startswith("gradients 1 ")]
    whole = [name for name in first if is_whole_factor(name)]
    assert whole, "the gradients of whole factors are parts of a sum"
    assert first == whole, "those of the cut factors do not need the sum"
    assert not [each for each in found if each.startswith(("losses (0", "losses (1"))], "the forward pass is right"


def test_gradients_of_factors_that_experts_share_are_added_up(cases: Cases, two: ProcessPool) -> None:
    case = cases("qwen3_moe")
    found = differences(merge(run(two, case, EP2_TP2, 60, "no sum of whole factors")), case.alone)
    first = [each.split(" ", 2)[2] for each in found if each.startswith("gradients 1 ")]
    assert [name for name in first if ".experts.w1.lora_A" in name]
    assert [name for name in first if ".experts.w2.lora_B" in name]
    assert not [name for name in first if not is_whole_factor(name)], "each expert's own factors are complete"


def test_gradients_of_requests_of_other_ranks_are_found(cases: Cases, two: ProcessPool) -> None:
    """With EP2 a rank computes its experts for requests of which it has no sequence."""
    case = cases("qwen3_moe")
    found = differences(merge(run(two, case, EP2, 60, "no gradients of others' requests")), case.alone)
    first = [each for each in found if each.startswith("gradients 1 ")]
    assert first
    assert not [each for each in first if ".experts." not in each]
    assert not [each for each in found if each.startswith(("losses (0", "losses (1"))], "the forward pass is right"


def is_whole_factor(name: str) -> bool:
    by_inputs = "o_proj" in name or "down_proj" in name or "experts.w2" in name
    return name.endswith("lora_B.weight" if by_inputs else "lora_A.weight")


def test_input_gradients_of_column_layers_that_are_not_added_up_are_found(cases: Cases, two: ProcessPool) -> None:
    case = cases("llama")
    found = differences(merge(run(two, case, TP2, 60, "no sum of the inputs' gradients")), case.alone)
    assert [each for each in found if each.startswith("gradients 1 ")]
    assert not [each for each in found if each.startswith(("losses (0", "losses (1"))], "the forward pass is right"


def test_linear_attention_that_does_not_know_where_sequences_begin_is_found(cases: Cases, two: ProcessPool) -> None:
    case = cases("qwen3_5")
    found = differences(merge(run(two, case, PP2, 60, "no bounds of sequences")), case.alone)
    packed = {name for name, each in trainer_programs.tenants("qwen3_5").items() if len(each.lengths) > 1}
    assert {f"losses {(0, name)}" for name in packed} <= set(found)


def test_exchanged_cuts_are_found(cases: Cases, two: ProcessPool) -> None:
    case = cases("llama")
    found = differences(merge(run(two, case, TP2, 60, "exchanged cuts")), case.alone)
    assert {f"losses {(0, name)}" for name in case.alone["weights"]} <= set(found)


def test_a_vocabulary_whose_padding_is_not_masked_is_found(cases: Cases, two: ProcessPool) -> None:
    case = cases("llama")
    assert case.model.config.vocab_size % 2, "there is padding"
    found = differences(merge(run(two, case, TP2, 60, "unmasked vocabulary")), case.alone)
    assert {f"losses {(0, name)}" for name in case.alone["weights"]} <= set(found)
