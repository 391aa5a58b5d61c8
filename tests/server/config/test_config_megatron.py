"""Models with ``backend: megatron``: the meshes that they may have, and what is refused with what to use instead.

None of this needs megatron-core.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from twinkle.errors import MissingDependencyError
from twinkle.extras import find_spec
from twinkle.server.cli.launch import run_server
from twinkle.server.config import ServerConfig, load_config
from twinkle.server.config.demand import Machine, machine_notes
from twinkle.server.config.meshes import describe_mesh, device_mesh, mesh_notes
from twinkle.server.config.rules import package_notes
from twinkle.server.config.server_config import find_problems
from twinkle.server.config.without_effect import without_effect
from twinkle.utils.requirements import exists

TINY = "random://llama-tiny"  # 2 layers, 4 attention heads, 2 key-value heads


def group(ranks: object, device: str = "cpu") -> dict[str, object]:
    return {"name": "m", "ranks": ranks, "device_type": device}


def applications(model_id: str = "org/large", sampler: str | None = None, **args: Any) -> list[dict[str, Any]]:
    model = {"model_id": model_id, "backend": "megatron", **args}
    found = [{"name": "model", "import_path": "model", "args": model}]
    if sampler is not None:
        sampled = {"model_id": model_id, "sampler_type": sampler}
        found.append({"name": "sampler", "import_path": "sampler", "args": sampled})
    return found


def configured(runtime: str = "ray", **args: Any) -> ServerConfig:
    return ServerConfig.model_validate({"runtime": runtime, "applications": applications(**args)})


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"device_group": group(4), "device_mesh": {"tp_size": 2, "pp_size": 2}}, "dp 1 × tp 2 × pp 2, 4 processes"),
        ({"nproc_per_node": 8, "device_mesh": {"dp_size": 2, "tp_size": 4}}, "dp 2 × tp 4 × pp 1, 8 processes"),
        ({"device_mesh": {"world_size": 4, "dp_size": 2, "pp_size": 2}}, "dp 2 × tp 1 × pp 2, 4 processes"),
        ({"device_group": group(2)}, "dp 2 × tp 1 × pp 1, 2 processes"),
        (
            {"device_mesh": {"dp_size": 2, "tp_size": 2, "ep_size": 4, "sequence_parallel": True}},
            "dp 2 × tp 2 × pp 1, ep 4, sequence parallel, 4 processes",
        ),
        ({"device_mesh": {"mesh": [0, 1], "mesh_dim_names": ["dp"]}}, "dp 2 × tp 1 × pp 1, 2 processes"),
        (
            {"device_mesh": {"mesh": [[0, 1], [2, 3]], "mesh_dim_names": ["pp", "tp"]}},
            "dp 1 × tp 2 × pp 2, 4 processes",
        ),
        ({}, "1 process"),
    ],
)
def test_meshes(args: dict[str, Any], words: str) -> None:
    model = configured(**args).served_models[0].model
    assert describe_mesh(model) == f"megatron, {words}"
    assert device_mesh(model).world_size == model.processes


def test_the_mesh_of_the_processes_is_the_configured_one() -> None:
    sizes = {"dp_size": 2, "tp_size": 2, "pp_size": 2, "ep_size": 2, "sequence_parallel": True}
    mesh = device_mesh(configured(device_mesh=sizes).served_models[0].model)
    assert (mesh.dp_world_size, mesh.tp_world_size, mesh.pp_world_size, mesh.ep_size) == (2, 2, 2, 2)
    assert mesh.sequence_parallel
    assert [mesh.get_data_rank_from_global_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("mesh", "key", "allowed"),
    [
        ({"cp_size": 2, "tp_size": 2}, "cp_size", "1: context parallelism needs Transformer Engine; the nearest mesh "),
        ({"fsdp_size": 4}, "fsdp_size", "the nearest mesh that works: dp_size=4, tp_size=1, pp_size=1"),
        ({"ulysses_size": 2, "dp_size": 2}, "ulysses_size", "1: sequence_parallel=True divides tokens among tp"),
        ({"vpp_size": 2, "pp_size": 2}, "vpp_size", "the nearest mesh that works: dp_size=1, tp_size=1, pp_size=2"),
        ({"etp_size": 2, "tp_size": 2}, "etp_size", "1: experts are spread by ep_size, each is whole"),
        ({"ep_fsdp_size": 2, "dp_size": 2}, "ep_fsdp_size", "1: experts are spread by ep_size, each is whole"),
        ({"dp_size": 2, "tp_size": 3, "ep_size": 4}, "ep_size", "a divisor of the world size 6"),
        ({"tp_size": 2, "pp_size": 2, "ep_size": 4}, "ep_size", "1 or 2, which divide dp × tp = 2"),
        ({"world_size": 8, "tp_size": 2}, "world_size", "2, which is dp 1 × tp 2"),
        (
            {"mesh": [[0, 1], [2, 3]], "mesh_dim_names": ["cp", "tp"]},
            "mesh_dim_names",
            "no cp: context parallelism needs Transformer Engine; the nearest mesh that works: dp_size=2, tp_size=2",
        ),
        ({"mesh": [0, 1], "mesh_dim_names": ["ep"]}, "mesh_dim_names", "ep is no dimension of its own"),
        ({"mesh": [[0, 2], [1, 3]], "mesh_dim_names": ["pp", "tp"]}, "mesh", "numbered along tp first"),
    ],
)
def test_what_no_megatron_model_has(mesh: dict[str, Any], key: str, allowed: str) -> None:
    (problem,) = find_problems({"runtime": "ray", "applications": applications(device_mesh=mesh)})
    assert problem.field == f"applications[0].args.device_mesh.{key}"
    assert allowed in problem.allowed


def test_the_number_of_processes_is_that_of_the_mesh() -> None:
    given = {"device_group": group(8), "device_mesh": {"tp_size": 2, "pp_size": 2}}
    (problem,) = find_problems({"runtime": "ray", "applications": applications(**given)})
    assert problem.field == "applications[0].args.device_mesh"
    assert problem.allowed.startswith("8 processes, as many as device_group or nproc_per_node has")
    assert problem.allowed.endswith("the nearest mesh that works: dp_size=2, tp_size=2, pp_size=2")
    (problem,) = find_problems(
        {"runtime": "ray", "applications": applications(device_group=group(2), device_mesh={"tp_size": 4})}
    )
    assert (problem.field, problem.allowed) == (
        "applications[0].args.device_group.ranks",
        "4, as many as device_mesh or nproc_per_node has",
    )


@pytest.mark.parametrize(
    ("mesh", "key", "allowed"),
    [
        ({"tp_size": 4}, "tp_size", "1 or 2, which divide its 4 attention heads, 2 key-value heads"),
        ({"pp_size": 4}, "pp_size", "1 or 2, which divide its 2 layers"),
        ({"dp_size": 2, "ep_size": 2}, "ep_size", "1: llama has no experts"),
        ({"mesh": [0, 1, 2, 3], "mesh_dim_names": ["pp"]}, "mesh", "pp of 1 or 2, which divide its 2 layers"),
    ],
)
def test_a_model_on_this_machine_says_which_sizes_work(mesh: dict[str, Any], key: str, allowed: str) -> None:
    (problem,) = find_problems({"runtime": "ray", "applications": applications(TINY, device_mesh=mesh)})
    assert problem.field == f"applications[0].args.device_mesh.{key}"
    assert problem.allowed.startswith(allowed)


def folder_of(tmp_path: Path, **config: object) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_a_folder_with_experts(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 9}
    folder = folder_of(tmp_path, model_type="qwen3_moe", num_experts=6, **sizes)
    fine = {"device_mesh": {"dp_size": 3, "tp_size": 2, "ep_size": 6}}
    assert find_problems({"runtime": "ray", "applications": applications(folder, **fine)}) == []
    bad = {"device_mesh": {"dp_size": 4, "ep_size": 4}}
    (problem,) = find_problems({"runtime": "ray", "applications": applications(folder, **bad)})
    assert problem.allowed == "1 or 2 or 3 or 6, which divide its 6 experts"


@pytest.mark.parametrize("runtime", ["ray", "embedded"])
def test_a_family_that_megatron_does_not_run(tmp_path: Path, runtime: str) -> None:
    folder = folder_of(tmp_path, model_type="gemma2")
    (problem,) = find_problems({"runtime": runtime, "applications": applications(folder)})
    assert problem.field == "applications[0].args.model_id"
    assert "llama, qwen2, qwen3, qwen3_5, qwen3_moe" in problem.allowed
    assert "gemma2" in problem.allowed


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_5_moe_text", "gpt_oss"])
def test_families_whose_experts_megatron_does_not_run(tmp_path: Path, family: str) -> None:
    folder = folder_of(tmp_path, model_type=family)
    (problem,) = find_problems({"runtime": "ray", "applications": applications(folder)})
    assert problem.allowed == (
        "a model of the families llama, qwen2, qwen3, qwen3_5, qwen3_moe with backend: megatron (this one is of "
        f"{family.removesuffix('_text')})"
    )


@pytest.mark.parametrize("nested", [True, False], ids=["with a tower", "text"])
def test_linear_attention_is_not_cut(tmp_path: Path, nested: bool) -> None:
    sizes = {"num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 16}
    text = {"model_type": "qwen3_5_text", **sizes}
    config = {"model_type": "qwen3_5", "text_config": text} if nested else text
    folder = folder_of(tmp_path, **config)

    def problems(**mesh: int) -> list[tuple[str, str]]:
        found = find_problems({"runtime": "ray", "applications": applications(folder, device_mesh=mesh)})
        return [(problem.field.rpartition(".")[2], problem.allowed) for problem in found]

    assert problems(dp_size=2, pp_size=2) == problems(dp_size=2) == []
    text_of_tp = "1: qwen3_5 has layers with linear attention, which are not cut; the nearest mesh that works: "
    assert problems(tp_size=2, pp_size=2) == [("tp_size", f"{text_of_tp}dp_size=2, tp_size=1, pp_size=2")]
    assert problems(pp_size=4) == [("pp_size", "1 or 2 or 3 or 6, which divide its 6 layers")]
    assert problems(dp_size=2, ep_size=2) == [("ep_size", "1: qwen3_5 has no experts")]


def test_linear_attention_is_not_cut_whatever_its_sizes_are(tmp_path: Path) -> None:
    given = applications(folder_of(tmp_path, model_type="qwen3_5"), device_mesh={"tp_size": 2})
    (problem,) = find_problems({"runtime": "ray", "applications": given})
    assert problem.field == "applications[0].args.device_mesh.tp_size"
    assert problem.allowed.startswith("1: qwen3_5 has layers with linear attention")


def test_a_configuration_that_leaves_sizes_to_defaults_is_checked_by_the_launch(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, model_type="llama", num_hidden_layers=3)
    given = applications(folder, device_mesh={"pp_size": 2})
    assert find_problems({"runtime": "ray", "applications": given}) == []


def test_one_process_is_embedded_and_several_need_ray() -> None:
    assert configured("embedded", sampler="torch", device_mesh={"tp_size": 1}).served_models[0].model.processes == 1
    found = find_problems({"runtime": "embedded", "applications": applications(device_mesh={"tp_size": 2})})
    assert [problem.field for problem in found] == ["applications[0].args.device_mesh.tp_size"]
    assert "more processes or devices need runtime: ray" in found[0].allowed


@pytest.mark.parametrize(
    ("args", "allowed"),
    [
        ({"device_mesh": {"tp_size": 2}}, "False, because its layers communicate"),
        ({"train_mode": "full"}, "false with backend: megatron and train_mode: full"),
        ({"device_mesh": {"pp_size": 2}}, None),
        ({}, None),
    ],
)
def test_which_models_are_compiled(args: dict[str, Any], allowed: str | None) -> None:
    found = find_problems({"runtime": "ray", "applications": applications(compiled=True, **args)})
    assert [problem.field for problem in found] == ([] if allowed is None else ["applications[0].args.compiled"])
    assert all(problem.allowed == allowed for problem in found)


@pytest.mark.parametrize("sampler", ["torch", "vllm"])
def test_samplers(sampler: str) -> None:
    served = configured(sampler=sampler, device_mesh={"tp_size": 2}).served_models[0]
    assert served.sampler is not None
    assert served.sampler.sampler_type == sampler
    found = find_problems({"runtime": "ray", "applications": applications(sampler="mock")})
    assert [problem.allowed for problem in found] == ["torch or vllm, as the model's backend is megatron"]


def test_the_older_key(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    mesh = "device_mesh: {mesh: [[0, 1], [2, 3]], mesh_dim_names: [pp, tp]}"
    file.write_text(
        "applications:\n  - {name: m, import_path: model, args: {model_id: org/large, use_megatron: true, "
        f"nproc_per_node: 4, {mesh}}}}}\n"
    )
    config, notes = load_config(file)
    assert config.runtime == "ray"
    assert describe_mesh(config.served_models[0].model) == "megatron, dp 1 × tp 2 × pp 2, 4 processes"
    assert "applications[0].args.use_megatron: became backend: megatron" in notes


def test_sequence_parallel_needs_tensor_parallel() -> None:
    notes = without_effect(configured(device_mesh={"dp_size": 2, "sequence_parallel": True}))
    assert notes == [
        "applications[0].args.device_mesh.sequence_parallel: has no effect without a tp_size above 1",
    ]
    assert without_effect(configured(device_mesh={"tp_size": 2, "sequence_parallel": True})) == []


def test_engines_of_other_servers_are_one_here() -> None:
    wide = {"name": "s", "ranks": 4, "device_type": "cuda", "gpus_per_worker": 2}
    given = applications(sampler="vllm", device_mesh={"pp_size": 2})
    given[1]["args"] |= {"nproc_per_node": 4, "device_group": wide, "device_mesh": {"tp_size": 2, "dp_size": 2}}
    (note,) = without_effect(ServerConfig.model_validate({"runtime": "ray", "applications": given}))
    assert note.startswith("applications[1].args.device_mesh.dp_size: has no effect: a sampler has one engine")
    assert "2 of its 4 devices" in note
    given[1]["args"]["sampler_type"] = "torch"
    given[1]["args"]["device_group"] = {**wide, "device_type": "cpu"}
    notes = without_effect(ServerConfig.model_validate({"runtime": "ray", "applications": given}))
    assert notes[1] == "applications[1].args.device_group.gpus_per_worker: has no effect on CPUs"


def test_check_config_shows_the_mesh_and_what_it_needs() -> None:
    given = configured(device_group=group(4, "cuda"), device_mesh={"tp_size": 2, "pp_size": 2})
    assert mesh_notes(given.applications) == ["applications[0].args: megatron, dp 1 × tp 2 × pp 2, 4 processes"]
    assert mesh_notes(configured().applications) == []
    notes = machine_notes(given.applications, "ray", Machine(cpus=2, gpus=0, has_ray=True))
    assert any("need 4 GPUs (4 rank processes of 1 (model))" in note for note in notes)


@pytest.mark.skipif(find_spec("megatron") is not None, reason="megatron-core is installed")
def test_a_missing_package_is_a_note_and_stops_a_launch() -> None:
    (note,) = package_notes(configured().applications)
    assert note.startswith("applications[0].args.backend: megatron needs the package 'megatron-core'")
    with pytest.raises(MissingDependencyError, match=r"pip install 'twinkle-posttrain\[megatron\]'"):
        run_server(configured())


def test_a_present_package_is_no_note() -> None:
    assert (package_notes(configured().applications) == []) == exists("megatron-core")
