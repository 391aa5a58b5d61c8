"""What a mesh or a model cannot do is refused when the model is built, with the sizes that work."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from transformers import GemmaConfig, LlamaConfig

from tests.model.megatron import stage_programs
from tests.model.parallel.process_pool import ProcessPool
from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.model.megatron.config import _FAMILIES, check_sizes, read_rope, read_shape, refuse_options
from twinkle.model.megatron.mesh import join_mesh
from twinkle.model.megatron.sizes import FAMILIES, MeshSizes, read_sizes

pytestmark = pytest.mark.megatron


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        (
            {"cp_size": 2, "tp_size": 2, "pp_size": 2},
            r"cp_size=2: context parallelism .* mesh that works: dp_size=2, tp_size=2, pp_size=2",
        ),
        ({"fsdp_size": 2, "tp_size": 2}, r"fsdp_size=2: .* dp_size=2, tp_size=2, pp_size=1"),
        (
            {"dp_size": 2, "ulysses_size": 2},
            r"ulysses_size=2: sequence_parallel=True .* dp_size=2, tp_size=1, pp_size=1",
        ),
        ({"pp_size": 2, "vpp_size": 2}, r"vpp_size=2: a process runs one stage .* dp_size=1, tp_size=1, pp_size=2"),
        ({"tp_size": 2, "etp_size": 2}, r"etp_size=2: experts are spread by ep_size"),
    ],
)
def test_kinds_of_parallelism_that_are_not_here(sizes: Mapping[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedError, match=text):
        read_sizes(DeviceMesh.from_sizes(device_type="cpu", **sizes))


def test_experts_are_divided_within_a_stage() -> None:
    with pytest.raises(InvalidInputError, match=r"ep_size: got 4, allowed: 1 or 2, which divide dp × tp = 2"):
        read_sizes(DeviceMesh.from_sizes(device_type="cpu", tp_size=2, pp_size=2, ep_size=4))


def test_ranks_are_numbered_as_megatron_numbers_them() -> None:
    mesh = DeviceMesh([[0, 2], [1, 3]], ("dp", "tp"), device_type="cpu")
    with pytest.raises(InvalidInputError, match="numbered along tp first, then dp, then pp"):
        read_sizes(mesh)
    assert read_sizes(DeviceMesh([[0, 2], [1, 3]], ("tp", "dp"), device_type="cpu")) == MeshSizes(dp=2, tp=2)


@pytest.mark.parametrize(
    ("name", "sizes", "text"),
    [
        ("llama", MeshSizes(tp=4), r"tp_size: got 4, allowed: 1 or 2, which divide its 4 attention heads, 2 key-value"),
        ("llama", MeshSizes(pp=3), r"pp_size: got 3, allowed: 1 or 2 or 4, which divide its 4 layers"),
        ("llama", MeshSizes(dp=2, ep=2), r"ep_size: got 2, allowed: 1: llama has no experts"),
        ("qwen3_moe", MeshSizes(dp=3, ep=3), r"ep_size: got 3, allowed: 1 or 2 or 4 or 8, which divide its 8 experts"),
    ],
)
def test_sizes_that_do_not_divide_the_model(name: str, sizes: MeshSizes, text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        check_sizes(read_shape(stage_programs.CONFIGS[name]()), sizes)


def test_odd_intermediate_features() -> None:
    shape = read_shape(LlamaConfig(**{**stage_programs._SIZES, "intermediate_size": 33}))
    with pytest.raises(InvalidInputError, match=r"tp_size: got 2, allowed: 1, which divide its .* 33 intermediate"):
        check_sizes(shape, MeshSizes(tp=2))


def test_families_and_options_of_models() -> None:
    with pytest.raises(
        UnsupportedError, match=r"gemma: the Megatron backend supports .* llama, qwen2, qwen3, qwen3_5, qwen3_moe"
    ):
        read_shape(GemmaConfig())
    with pytest.raises(UnsupportedError, match="its weights are quantized"):
        read_shape(LlamaConfig(quantization_config={"quant_method": "fp8"}))
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(UnsupportedError, match="rope_type 'dynamic'; supported: default, linear, llama3, yarn"):
        read_rope(LlamaConfig(rope_parameters=dynamic))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("fp8", "hybrid"),
        ("fp4", "e2m1"),
        ("transformer_impl", "transformer_engine"),
        ("context_parallel_size", 2),
        ("virtual_pipeline_model_parallel_size", 2),
        ("expert_tensor_parallel_size", 2),
        ("tp_comm_overlap", True),
    ],
)
def test_options_of_megatron_that_are_not_here(option: str, value: object) -> None:
    with pytest.raises(UnsupportedError, match=f"{option}: got "):
        refuse_options({option: value})
    refuse_options({option: None, "recompute_granularity": "full"})


def test_one_process_has_no_groups() -> None:
    mesh = join_mesh(DeviceMesh.from_sizes(device_type="cpu", tp_size=1), torch.device("cpu"))
    assert mesh.is_first
    assert mesh.is_last
    assert mesh.world.size == mesh.tp.size == mesh.model.size == 1


def test_a_process_has_one_mesh(two: ProcessPool) -> None:
    for text in two.run(stage_programs.second_mesh, {"tp_size": 2}, {"pp_size": 2}):
        assert text.startswith(
            "UnsupportedError: device_mesh: got dp_size=1, tp_size=1, pp_size=2, but this process has"
        )
        assert "dp_size=1, tp_size=2, pp_size=1; megatron-core has one mesh in a process" in text


def test_the_stage_is_refused_before_weights_are_made(two: ProcessPool) -> None:
    assert (
        two.run(stage_programs.refusal, {"dp_size": 2, "ep_size": 2})
        == ["InvalidInputError: ep_size: got 2, allowed: 1: llama has no experts"] * 2
    )


def test_the_families_that_a_configuration_is_checked_with() -> None:
    assert set(FAMILIES) == set(_FAMILIES)
