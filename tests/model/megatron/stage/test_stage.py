"""A stage of every family gives the log-probabilities and gradients of transformers' own model, on every mesh."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.model.megatron import stage_programs
from tests.model.parallel.process_pool import ProcessPool

pytestmark = pytest.mark.megatron

TP2: Mapping[str, Any] = {"tp_size": 2}
PP2: Mapping[str, Any] = {"pp_size": 2}
DP2: Mapping[str, Any] = {"dp_size": 2}
SP: Mapping[str, Any] = {"tp_size": 2, "sequence_parallel": True}
EP2: Mapping[str, Any] = {"dp_size": 2, "ep_size": 2}
EP2_TP2: Mapping[str, Any] = {"tp_size": 2, "ep_size": 2}  # the experts are divided among the two ranks of tp
EP2_SP: Mapping[str, Any] = {**EP2_TP2, "sequence_parallel": True}
TP2_PP2: Mapping[str, Any] = {"tp_size": 2, "pp_size": 2}
TP2_PP2_SP: Mapping[str, Any] = {**TP2_PP2, "sequence_parallel": True}
DP2_TP2: Mapping[str, Any] = {"dp_size": 2, "tp_size": 2}
DENSE = ("llama", "llama_biases", "llama_tied", "qwen2", "qwen2_window", "qwen3")
LINEAR = ("qwen3_5", "qwen3_5_tied")  # three of four layers have linear attention, which is not cut
MIXTURES = ("qwen3_moe", "qwen3_moe_plain")


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Returns the folder of each model, by its name."""
    made = {}
    for name in stage_programs.CONFIGS:
        made[name] = tmp_path_factory.mktemp(name)
        stage_programs.make_model(name).save_pretrained(made[name])
    return made


def wanted_logprobs(name: str) -> list[Tensor]:
    model = stage_programs.make_model(name)
    with torch.no_grad():
        return [model(each[None]).logits[0].log_softmax(-1) for each in stage_programs.make_tokens()]


def wanted_gradients(name: str) -> dict[str, Tensor]:
    """Return the gradients of transformers' model for the sum of squares of all hidden states."""
    model = stage_programs.make_model(name)
    for each in stage_programs.make_tokens():
        model.base_model(each[None]).last_hidden_state.square().sum().backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def check_logprobs(name: str, sizes: Mapping[str, Any], found: list[list[Tensor] | None]) -> None:
    """Compare what the ranks of the last stage have scored; ranks are numbered along tp, then dp, then pp."""
    wanted, tp, dp = wanted_logprobs(name), sizes.get("tp_size", 1), sizes.get("dp_size", 1)
    heads = found[-tp * dp :]
    assert [each is None for each in found] == [True] * (len(found) - len(heads)) + [False] * len(heads)
    for rank, scored in enumerate(heads):
        torch.testing.assert_close(scored, wanted[rank // tp :: dp], rtol=1e-5, atol=1e-5)


def check_gradients(name: str, found: list[list[tuple[str, int | None, int, int, Tensor]]]) -> None:
    """Add up what the ranks have of each weight's gradient, and compare with the gradient of transformers' model."""
    wanted = wanted_gradients(name)
    sums = {each: torch.zeros_like(gradient) for each, gradient in wanted.items()}
    for pieces in found:
        for piece, dim, start, stop, gradient in pieces:
            place = sums[piece] if dim is None else sums[piece].narrow(dim, start, stop - start)
            place += gradient[: len(place)]
            assert not gradient[len(place) :].any(), "the padding of the vocabulary gets no gradient"
    assert wanted.keys() - {"lm_head.weight"} == {piece for pieces in found for piece, *_ in pieces}
    for each, gradient in wanted.items():
        scale = gradient.abs().max()
        torch.testing.assert_close(
            sums[each] / scale, gradient / scale, rtol=0, atol=1e-5, msg=lambda m, e=each: f"{e}: {m}"
        )


def check(name: str, sizes: Mapping[str, Any], folder: Path, pool: ProcessPool) -> None:
    check_logprobs(name, sizes, pool.run(stage_programs.score, folder, sizes))
    check_gradients(name, pool.run(stage_programs.gradients, folder, sizes))


@pytest.mark.parametrize("name", [*DENSE, *LINEAR, *MIXTURES])
def test_one_process(folders: Mapping[str, Path], name: str) -> None:
    check_logprobs(name, {}, [stage_programs.score(folders[name], {})])
    check_gradients(name, [stage_programs.gradients(folders[name], {})])


# Each mesh is a test that takes all models: making the groups of a mesh takes seconds and dozens of threads.


@pytest.mark.parametrize("sizes", [TP2, PP2, SP], ids=str)
def test_two_processes(folders: Mapping[str, Path], two: ProcessPool, sizes: Mapping[str, Any]) -> None:
    for name in (*DENSE, *MIXTURES, *([] if "tp_size" in sizes else LINEAR)):
        check(name, sizes, folders[name], two)


def test_linear_attention_on_data_ranks(folders: Mapping[str, Path], two: ProcessPool) -> None:
    check("qwen3_5", DP2, folders["qwen3_5"], two)
    check_gradients("qwen3_5", two.run(stage_programs.gradients, folders["qwen3_5"], DP2, True))


@pytest.mark.parametrize("sizes", [EP2, EP2_TP2, EP2_SP], ids=str)
def test_experts_on_two_processes(folders: Mapping[str, Path], two: ProcessPool, sizes: Mapping[str, Any]) -> None:
    for name in MIXTURES:
        check(name, sizes, folders[name], two)
    recomputed = two.run(stage_programs.gradients, folders["qwen3_moe"], sizes, True)  # its layers communicate again
    check_gradients("qwen3_moe", recomputed)


@pytest.mark.parametrize("sizes", [TP2_PP2, TP2_PP2_SP, DP2_TP2], ids=str)
def test_four_processes(folders: Mapping[str, Path], four: ProcessPool, sizes: Mapping[str, Any]) -> None:
    for name in ("llama_biases", "llama_tied"):
        check(name, sizes, folders[name], four)


@pytest.mark.parametrize(
    "sizes", [{**TP2_PP2, "ep_size": 2}, {**DP2_TP2, "ep_size": 4}, {**DP2_TP2, "ep_size": 2}], ids=str
)
def test_experts_on_four_processes(folders: Mapping[str, Path], four: ProcessPool, sizes: Mapping[str, Any]) -> None:
    check("qwen3_moe", sizes, folders["qwen3_moe"], four)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("sizes", [{}, TP2], ids=str)
def test_one_gpu(folders: Mapping[str, Path], two: ProcessPool, sizes: Mapping[str, Any]) -> None:
    """Both ranks of tp are on the same GPU and communicate by gloo: NCCL wants a GPU for each."""
    cuda, bound = torch.device("cuda", 0), 0.02  # on a CPU it is 0.006 at most, as for transformers
    for name in ("llama_biases", "qwen3", *([] if sizes else MIXTURES)):
        for dtype in (torch.float32, torch.bfloat16):
            arguments = (stage_programs.score, folders[name], sizes, dtype, cuda)
            found = two.run(*arguments) if sizes else [arguments[0](*arguments[1:])]
            if dtype == torch.float32:
                check_logprobs(name, sizes, found)
                continue
            for scored in found:
                for one, wanted in zip(scored, wanted_logprobs(name), strict=True):
                    assert ((one - wanted).norm() / wanted.norm()) < bound
