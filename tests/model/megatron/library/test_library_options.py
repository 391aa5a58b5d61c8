"""Options of the library's models on Megatron: what is accepted, what is refused and why. One process is enough."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model.megatron import library_programs, stage_programs
from twinkle.errors import (
    AdapterExistsError,
    CapacityError,
    InvalidInputError,
    TwinkleError,
    UnknownNameError,
    UnsupportedError,
    UserError,
)
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.model import MegatronModel, MultiLoraMegatronModel
from twinkle.model.megatron import MegatronStrategy
from twinkle.model.megatron.config import read_shape
from twinkle.model.megatron.library.optimizer import OptimizerParamScheduler
from twinkle.patch import Patch

pytestmark = pytest.mark.megatron

LORA: dict[str, Any] = {"r": 2, "lora_alpha": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("qwen3")
    stage_programs.make_model("qwen3").save_pretrained(made)
    return made


def make(folder: Path | str, kind: Any = MegatronModel, **options: Any) -> Any:
    return kind(folder, **{"mixed_precision": "no", "device": "cpu", **options})


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"num_layer": 4}, UnknownNameError, "option of a Megatron model 'num_layer'"),
        ({"fp8": "hybrid"}, UnsupportedError, "fp8: got 'hybrid', allowed: False; fp8 needs Transformer Engine"),
        ({"transformer_impl": "transformer_engine"}, UnsupportedError, "allowed: 'local'"),
        ({"virtual_pipeline_model_parallel_size": 2}, UnsupportedError, "one stage of the pipeline"),
        ({"context_parallel_size": 2}, UnsupportedError, "context parallelism needs Transformer Engine"),
        ({"hidden_dropout": 0.1}, UnsupportedError, "hidden_dropout: got 0.1, allowed: 0.0"),
        ({"num_layers": 8}, UnsupportedError, "num_layers: got 8, allowed: 4; it comes from the model's own"),
        ({"tensor_model_parallel_size": 2}, UnsupportedError, "tensor_model_parallel_size: got 2, allowed: 1"),
        ({"qk_layernorm": False}, UnsupportedError, "qk_layernorm: got False, allowed: True"),
        ({"moe_z_loss_coeff": 0.1}, UnsupportedError, "moe_z_loss_coeff: got 0.1, allowed: None; the layers here"),
        ({"mtp_num_layers": 1}, UnsupportedError, "mtp_num_layers: got 1, allowed: None"),
        ({"cpu_offloading": True}, UnsupportedError, "cpu_offloading: got True, allowed: False"),
        ({"bf16": True}, UnsupportedError, "bf16: got True, allowed: False"),
        ({"recompute_granularity": "half"}, InvalidInputError, "recompute_granularity: got 'half'"),
        ({"recompute_num_layers": 0}, InvalidInputError, "recompute_num_layers: got 0"),
        ({"ddp_config": {"bucket": 1}}, UnknownNameError, "ddp_config entry 'bucket'"),
        ({"ddp_config": {"use_megatron_fsdp": True}}, UnsupportedError, "ddp_config.use_megatron_fsdp"),
        ({"load_weights": False}, UnsupportedError, "load_weights: got False, allowed: True"),
        ({"config": object()}, UnsupportedError, "config: a Megatron model is loaded as its own configuration says"),
        ({"mixed_precision": "fp16"}, InvalidInputError, "mixed_precision: got 'fp16'"),
        ({"seed": "x"}, InvalidInputError, "seed: got 'x'"),
        ({"device": "meta"}, InvalidInputError, "device: got 'meta', allowed: cpu or cuda"),
        ({"use_distributed_optimizer": 1}, InvalidInputError, "use_distributed_optimizer"),
        ({"max_logits_per_request": 0}, InvalidInputError, "max_logits_per_request"),
    ],
)
def test_what_a_model_refuses(folder: Path, options: Any, error: type[TwinkleError], text: str) -> None:
    for kind in (MegatronModel, MultiLoraMegatronModel):
        with pytest.raises(error) as caught:
            make(folder, kind, **options)
        assert text in str(caught.value)


def test_images_are_refused_by_name(folder: Path) -> None:
    model = make(folder, MultiLoraMegatronModel)
    model.add_adapter_to_model("a", LORA)
    row = {"input_ids": [1, 2], "labels": [2, -100], "pixel_values": [[0.0] * 1536], "image_grid_thw": [[1, 2, 2]]}
    with pytest.raises(UnsupportedError, match=r"inputs\[1\]\.pixel_values: the Megatron backend reads text only"):
        model.forward_only(inputs=[{"input_ids": [1]}, row], adapter_name="a")
    with pytest.raises(UnsupportedError, match="qwen3_vl: the Megatron backend supports the families llama"):
        make("random://qwen3-vl-tiny")


def test_options_that_change_no_result_are_accepted(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="twinkle"):
        model = make(
            folder,
            variable_seq_lengths=True,
            moe_token_dispatcher_type="alltoall",
            hidden_size=32,
            sequence_parallel=False,
            bias_activation_fusion=True,
            recompute_granularity="selective",
            ddp_config={"overlap_grad_reduce": True},
            fp8=None,
            cuda_graph_impl="none",
        )
    assert model.strategy.order == "tp-cp-ep-dp-pp"
    assert [type(chunk).__name__ for chunk in model.model] == ["GPTModel"]


MESHES = [
    ({"cp_size": 2, "tp_size": 2}, UnsupportedError, "cp_size=2", "dp_size=2, tp_size=2, pp_size=1"),
    ({"vpp_size": 2, "pp_size": 2}, UnsupportedError, "vpp_size=2", "dp_size=1, tp_size=1, pp_size=2"),
    ({"etp_size": 2, "tp_size": 2}, UnsupportedError, "etp_size=2", "dp_size=1, tp_size=2, pp_size=1"),
    ({"fsdp_size": 2}, UnsupportedError, "fsdp_size=2", "dp_size=2, tp_size=1, pp_size=1"),
    ({"ulysses_size": 2, "dp_size": 2}, UnsupportedError, "ulysses_size=2", "dp_size=2, tp_size=1, pp_size=1"),
    ({"tp_size": 4}, InvalidInputError, "tp_size: got 4", "1 or 2, which divide"),
    ({"pp_size": 3}, InvalidInputError, "pp_size: got 3", "1 or 2 or 4, which divide its 4 layers"),
    ({"dp_size": 2, "ep_size": 2}, InvalidInputError, "ep_size: got 2", "1: qwen3 has no experts"),
]


@pytest.mark.parametrize(("sizes", "error", "text", "works"), MESHES)
def test_a_mesh_that_cannot_work_is_refused_with_one_that_does(
    folder: Path, sizes: Any, error: type[TwinkleError], text: str, works: str
) -> None:
    """It is refused before processes wait for each other: there is only one here."""
    mesh = DeviceMesh.from_sizes(device_type="cpu", **sizes)
    for kind in (MegatronModel, MultiLoraMegatronModel):
        with pytest.raises(error) as caught:
            make(folder, kind, device_mesh=mesh)
        assert text in str(caught.value)
        assert works in str(caught.value)


def test_experts_with_tensor_parallelism_are_sequence_parallel() -> None:
    mesh = DeviceMesh.from_sizes(tp_size=2, ep_size=2, device_type="cpu")
    experts, dense = (read_shape(stage_programs.CONFIGS[name]()) for name in ("qwen3_moe", "qwen3"))
    assert MegatronStrategy(mesh).for_shape(experts).sequence_parallel
    plain = MegatronStrategy(DeviceMesh.from_sizes(tp_size=2, device_type="cpu"))
    assert not plain.for_shape(dense).sequence_parallel
    assert str(plain.sizes) == "dp_size=1, tp_size=2, pp_size=1"


def test_the_limits_of_many_adapters(folder: Path) -> None:
    model = make(folder, MultiLoraMegatronModel, max_loras=1, max_r=4, max_length=6)
    for config, text in (({**LORA, "r": 8}, "r: got 8"), ("a/folder", "config_or_dir: got 'a/folder'")):
        with pytest.raises(InvalidInputError) as caught:
            model.add_adapter_to_model("a", config)
        assert text in str(caught.value)
    model.add_adapter_to_model("a", LORA)
    with pytest.raises(CapacityError, match="max_loras: 1 adapters exist"):
        model.add_adapter_to_model("b", LORA)
    with pytest.raises(InvalidInputError, match="adapter_name: got None"):
        model.forward_only(inputs=library_programs.rows(1))
    long = {"input_ids": list(range(9)), "labels": [*range(1, 9), -100]}
    with pytest.raises(InvalidInputError, match="at most max_length=6"):
        model.forward_backward(inputs=[long], adapter_name="a")
    with pytest.raises(UnsupportedError, match="disable_lora: got True"):
        model.forward_backward(inputs=library_programs.rows(1), adapter_name="a", disable_lora=True)
    model.remove_adapter("a")
    model.add_adapter_to_model("b", LORA)


def test_seeds(folder: Path) -> None:
    one, other, third = (make(folder, seed=seed) for seed in (5, 5, 6))
    for model in (one, other, third):
        model.add_adapter_to_model("a", LORA)
    first, second, last = (model.get_state_dict() for model in (one, other, third))
    assert all(first[name].equal(second[name]) for name in first)
    assert any(not first[name].equal(last[name]) for name in first)


def test_a_model_without_adapters_scores(folder: Path) -> None:
    model, rows = make(folder), library_programs.rows(3)
    alone = model.forward_only(inputs=rows)["logps"]
    assert model.get_peft_config_dict() is None
    model.add_adapter_to_model("a", LORA)  # B is zero: the same model
    torch.testing.assert_close(model.forward_only(inputs=rows)["logps"], alone, rtol=1e-5, atol=1e-5)
    with pytest.raises(AdapterExistsError):
        model.add_adapter_to_model("a", LORA)
    with pytest.raises(UnknownNameError, match="adapter 'b'"):
        model.forward_only(inputs=rows, adapter_name="b")


def test_settings_of_all_parameters_come_before_no_adapter(folder: Path) -> None:
    model = make(folder)
    model.set_loss("CrossEntropyLoss")
    with pytest.raises(UserError, match="set_loss came before it and was for all parameters"):
        model.add_adapter_to_model("a", LORA)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"clip_grad": 0.5}, "clip_grad: got 0.5, allowed: 1.0; max_grad_norm"),
        ({"min_lr": 1e-5}, "min_lr: got 1e-05, allowed: 0"),
        ({"optimizer": "sgd"}, "optimizer: got 'sgd', allowed: 'adam'"),
        ({"fp16": True}, "fp16: got True"),
        ({"sgd_momentum": 0.5}, "option of Megatron's optimizer 'sgd_momentum'"),
        ({"decoupled_weight_decay": 1}, "decoupled_weight_decay: got 1"),
        ({"adam_eps": 0.0}, "eps: got 0.0"),
    ],
)
def test_what_the_optimizer_refuses(folder: Path, options: Any, text: str) -> None:
    model = make(folder)
    model.add_adapter_to_model("a", LORA)
    with pytest.raises(TwinkleError) as caught:
        model.set_optimizer("default", **options)
    assert text in str(caught.value)


def test_names_of_megatrons_optimizer(folder: Path) -> None:
    model = make(folder)
    model.add_adapter_to_model("a", LORA)
    for name in ("", "default", "Adam", "MegatronOptimizer", "MegatronDistributedOptimizer"):
        model.set_optimizer(name, lr=1e-3, adam_beta1=0.8, use_distributed_optimizer=True, clip_grad=1.0, bf16=True)
        group = model.optimizer_group["a"].optimizer.param_groups[0]
        assert type(model.optimizer_group["a"].optimizer) is torch.optim.AdamW
        assert (group["lr"], group["betas"], group["eps"]) == (1e-3, (0.8, 0.999), 1e-8)
    model.set_optimizer("default", decoupled_weight_decay=False)
    assert type(model.optimizer_group["a"].optimizer) is torch.optim.Adam
    assert model.optimizer_group["a"].lr == [1e-4]
    with pytest.raises(InvalidInputError, match="lr_decay_steps: got None"):
        model.set_lr_scheduler("default")
    model.set_lr_scheduler("default", lr_decay_steps=4, lr_warmup_steps=1)
    rates = []
    for _ in range(4):
        rates.append(model.optimizer_group["a"].lr[0])
        model.lr_step()
    model.lr_step(3)
    assert model.optimizer_group["a"].lr == [0.0]
    assert rates == pytest.approx([0.0, 1e-4, 0.75e-4, 0.25e-4])


def scheduler(**options: Any) -> OptimizerParamScheduler:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.1, weight_decay=0.01)
    return OptimizerParamScheduler(optimizer, **{"lr_decay_steps": 10, **options})


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, [0.1, 0.05, 0.0, 0.0]),
        ({"lr_decay_style": "linear", "min_lr": 0.02}, [0.1, 0.06, 0.02, 0.02]),
        ({"lr_decay_style": "constant"}, [0.1] * 4),
        ({"lr_decay_style": "inverse-square-root"}, [0.1, 0.1 / 5**0.5, 0.1 / 10**0.5, 0.0]),
        ({"lr_warmup_steps": 5, "init_lr": 0.01, "max_lr": 0.2}, [0.01, 0.2, 0.0, 0.0]),
    ],
)
def test_learning_rates_are_megatrons(options: Any, wanted: list[float]) -> None:
    made = scheduler(**options)
    assert [made.rate(step) for step in (0, 5, 10, 11)] == pytest.approx(wanted)


def test_weight_decay_is_scheduled_if_it_is_asked_for() -> None:
    made = scheduler(start_wd=0.0, end_wd=0.1, wd_incr_style="linear")
    assert [made.weight_decay(step) for step in (0, 5, 10, 11)] == pytest.approx([0.0, 0.05, 0.1, 0.1])
    assert scheduler().weight_decay(3) is None


@pytest.mark.parametrize(
    "options",
    [
        {"lr_decay_style": "WSD"},
        {"wd_incr_style": "x"},
        {"lr_warmup_steps": 10},
        {"lr_decay_steps": 0},
        {"min_lr": 1.0},
        {"start_wd": 0.1},
        {"start_wd": 0.1, "end_wd": 0.2},
    ],
)
def test_schedules_that_make_no_sense_are_refused(options: Any) -> None:
    with pytest.raises(TwinkleError):
        scheduler(**options)


def test_patches(folder: Path) -> None:
    class Mark(Patch):
        def __call__(self, module: Any, *args: Any, **kwargs: Any) -> None:
            module.marked = kwargs["word"]

    model = make(folder)
    model.apply_patch(Mark(), word="x")
    assert model.model[0].marked == "x"
    with pytest.raises(UnsupportedError, match="TransformersEmbeddingPatch: use task='embedding'"):
        model.apply_patch("TransformersEmbeddingPatch")
    with pytest.raises(UnsupportedError, match="adapters share their base model"):
        make(folder, MultiLoraMegatronModel).apply_patch(Mark())


def test_merging_is_refused_where_it_cannot_be(folder: Path, tmp_path: Path) -> None:
    model = make(folder, MultiLoraMegatronModel)
    model.add_adapter_to_model("a", LORA)
    with pytest.raises(UnsupportedError, match="save_optimizer=True needs merge_lora=False"):
        model.save("x", tmp_path, adapter_name="a", merge_lora=True, save_optimizer=True)
    model.optimizer_group["a"].cur_step = 1
    assert model.save("x", tmp_path, 2, adapter_name="a", merge_lora=True) is None
    assert list(tmp_path.iterdir()) == []
