"""The library's public names, constructors and methods that existing scripts rely on.

The tables list what must exist; names of packages and modules are in tests/support/existing_names.py. What does not
exist is in the tables of ``compatibility.py`` (modules and their names) or in ABSENT (attributes of classes), with the
reason, and tests check that it is absent; docs/compatibility.md lists both for users.
"""

import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from functools import cache

import pytest

from tests.support.existing_names import MODULES, PACKAGES
from tests.support.paths import ROOT, SOURCE
from twinkle.compatibility import PATHS
from twinkle_client.compatibility import NotYet

pytest.importorskip("torch")
pytest.importorskip("datasets")
pytest.importorskip("transformers")

SRC = SOURCE
COMPATIBILITY = ROOT / "docs" / "compatibility.md"

_TEMPLATE = "model_id use_chat_template max_length truncation_strategy default_system enable_thinking"
_GRPO = "epsilon epsilon_high beta entropy_coef ignore_index"
_POLICY_METRIC = "device_mesh process_group ignore_index temperature epsilon epsilon_high top_k_kl"
_MODEL = (
    "model_cls model_id config device_mesh mixed_precision strategy ddp_config fsdp_config grad_scaler_config "
    "memory_efficient_init"
)
_PUSH = "repo_id folder_path path_in_repo commit_message commit_description token private revision ignore_patterns"

# Parameters in their positional order.
SIGNATURES = {
    "twinkle:initialize": "mode nproc_per_node ncpu_proc_per_node seed full_determinism groups global_device_mesh "
    "lazy_collect name notifier",
    "twinkle:DeviceMesh": "mesh mesh_dim_names ep_size etp_size ep_fsdp_size vpp_size ulysses_size sequence_parallel "
    "device_type",
    "twinkle:DeviceMesh.from_sizes": "world_size dp_size fsdp_size tp_size pp_size ulysses_size cp_size ep_size "
    "etp_size ep_fsdp_size vpp_size device_type sequence_parallel",
    "twinkle:DeviceGroup": "name ranks device_type gpus_per_worker visible_devices",
    "twinkle:remote_class": "execute",
    "twinkle:remote_function": "dispatch execute collect sync lazy_collect timeout",
    "twinkle:get_device_placement": "device_group",
    "twinkle.infra:collect_tensor_dict": "outputs device_mesh",
    "twinkle.notifier:DingNotifier": "ding_url secret timeout",
    "twinkle.notifier:notify_exception": "notifier context exc name",
    "twinkle.data_format:SamplingParams": "max_tokens seed stop temperature top_k top_p repetition_penalty logprobs "
    "prompt_logprobs num_samples",
    "twinkle.data_format:SampledSequence": "stop_reason tokens logprobs decoded new_input_feature routed_experts",
    "twinkle.data_format:SampleResponse": "sequences prompt_token_ids prompt_logprobs topk_prompt_logprobs",
    "twinkle.data_format:user_data_get": "items key default",
    "twinkle.template:Template": _TEMPLATE,
    "twinkle.template:Qwen3_5Template": _TEMPLATE,
    "twinkle.template:DeepseekV4Template": _TEMPLATE,
    "twinkle.template:Template.encode": "trajectory add_generation_prompt",
    "twinkle.template:Template.concat_input_feature": "feature new_tokens",
    "twinkle.template:Template.format_trajectory": "trajectory add_default_system",
    "twinkle.preprocessor:SelfCognitionProcessor": "model_name model_author",
    "twinkle.preprocessor:GSM8KProcessor": "system add_assistant",
    "twinkle.preprocessor:EmojiDPOProcessor": "system chosen_key rejected_key prompt_key",
    "twinkle.preprocessor:CLEVRProcessor": "system",
    "twinkle.preprocessor:OlympiadBenchProcessor": "system language",
    "twinkle.dataset:DatasetMeta": "dataset_id subset_name split data_slice data",
    "twinkle.dataset:Dataset": "dataset_meta",
    "twinkle.dataset:Dataset.map": "preprocess_func dataset_meta init_args",
    "twinkle.dataset:Dataset.filter": "filter_func dataset_meta init_args",
    "twinkle.dataset:Dataset.encode": "add_generation_prompt",
    "twinkle.dataset:Dataset.cast_column": "column decode",
    "twinkle.dataset:Dataset.mix_dataset": "interleave",
    "twinkle.dataset:Dataset.save_as": "output_path format batch_size mode",
    "twinkle.dataset:PackingDataset": "dataset_meta packing_num_proc",
    "twinkle.dataset:IterablePackingDataset": "dataset_meta packing_interval packing_num_proc cyclic",
    "twinkle.dataloader:DataLoader": "dataset batch_size min_batch_size device_mesh max_retries",
    "twinkle.dataloader:DataLoader.resume_from_checkpoint": "consumed_train_samples cur_step "
    "gradient_accumulation_steps",
    "twinkle.sampler:vLLMSampler": "model_id engine_args device_mesh",
    "twinkle.sampler:vLLMSampler.sample": "inputs sampling_params adapter_name adapter_path return_encoded "
    "use_base_model",
    "twinkle.sampler:LocalSampler.sample": "inputs sampling_params adapter_name adapter_path",
    "twinkle.cli:CLI.from_args": "argv env_file config_file",
    "twinkle_agentic.envs:EnvTool": "env tool_name description parameters",
    "twinkle_agentic.envs:OpenEnv": "env_name env_cls env_kwargs action_cls action_mapper",
    "twinkle_agentic.envs:EnvPool": "pool_size device_mesh env_kwargs",
    "twinkle_agentic.envs:StepResult": "observation reward done info",
    "twinkle_agentic.rollout:MultiTurnRollout": "sampler template tool_manager sampling_params max_turns "
    "max_trajectory_tokens trace_dir trace_callback success_callback",
    "twinkle_agentic.rollout:MultiTurnRollout.__call__": "trajectories sampling_params tool_manager global_step",
    "twinkle_agentic.rollout:extend_with_bridge": "feature tool_messages template",
    "twinkle.dataloader:RetrySampler": "original_sampler dataset max_retries skip_samples seed",
    "twinkle.dataloader:DeviceMeshSampler": "original_batch_sampler device_mesh min_batch_size skip_samples",
    "twinkle.dataloader:DeviceMeshIterableFetcher": "dataset auto_collation collate_fn drop_last batch_size "
    "device_mesh min_batch_size max_retries",
    "twinkle.processor:InputProcessor": "device_mesh padding_free framework padding_side",
    "twinkle.processor:InputProcessor.collate_fn": "inputs micro_batch_size variable_seq_lengths",
    "twinkle.model:TransformersModel": _MODEL,
    "twinkle.model:TransformersValueModel": _MODEL,
    "twinkle.model:MultiLoraTransformersModel": _MODEL.replace("fsdp_config", "fsdp_config lora_config")
    + " max_loras max_r max_length target_modules",
    "twinkle.model:TwinkleModel.upload_to_hub": "checkpoint_dir hub_model_id hub_token async_upload",
    "twinkle.model:TwinkleModel.forward": "inputs adapter_name temperature return_logits task",
    "twinkle.model:TwinkleModel.forward_only": "inputs adapter_name temperature return_logits task disable_lora",
    "twinkle.model:TwinkleModel.backward": "adapter_name gradient_accumulation_steps",
    "twinkle.model:TwinkleModel.clip_grad_norm": "max_grad_norm norm_type adapter_name gradient_accumulation_steps",
    "twinkle.model:TwinkleModel.step": "adapter_name gradient_accumulation_steps optim_params",
    "twinkle.model:TwinkleModel.clip_grad_and_step": "max_grad_norm norm_type",
    "twinkle.model:TwinkleModel.set_loss": "loss_cls adapter_name",
    "twinkle.model:TwinkleModel.set_optimizer": "optimizer_cls lr weight_decay params adapter_name",
    "twinkle.model:TwinkleModel.set_lr_scheduler": "scheduler_cls adapter_name",
    "twinkle.model:TwinkleModel.set_template": "template_cls adapter_name",
    "twinkle.model:TwinkleModel.set_processor": "processor_cls adapter_name",
    "twinkle.model:TwinkleModel.add_metric": "metric_cls is_training adapter_name",
    "twinkle.model:TwinkleModel.calculate_metric": "is_training adapter_name",
    "twinkle.model:TransformersModel.add_adapter_to_model": "adapter_name config_or_dir is_trainable "
    "gradient_accumulation_steps",
    "twinkle.model:TwinkleModel.save": "name output_dir interval adapter_name save_optimizer consumed_train_samples",
    "twinkle.model:TwinkleModel.load": "name output_dir adapter_name load_optimizer token",
    "twinkle.model:TwinkleModel.resume_from_checkpoint": "checkpoint_dir resume_only_model adapter_name",
    "twinkle.loss:CrossEntropyLoss": "ignore_index reduction dft",
    "twinkle.loss:ChunkedCrossEntropyLoss": "chunk_size ignore_index reduction dft",
    "twinkle.loss:LigerFusedLinearCrossEntropyLoss": "ignore_index reduction label_smoothing softcap",
    "twinkle.loss:GRPOLoss": _GRPO,
    "twinkle.loss:GSPOLoss": _GRPO,
    "twinkle.loss:PPOLoss": f"loss_agg_mode {_GRPO}",
    "twinkle.loss:PPOValueLoss": "epsilon ignore_index",
    "twinkle.loss:SAPOLoss": "epsilon beta tau_pos tau_neg",
    "twinkle.loss:CISPOLoss": _GRPO,
    "twinkle.loss:BNPOLoss": _GRPO,
    "twinkle.loss:DRGRPOLoss": "epsilon beta max_completion_length",
    "twinkle.loss:GKDLoss": "beta temperature ignore_index chunk_size",
    "twinkle.loss:DPOLoss": "beta label_smoothing ignore_index loss_type reference_free sft_weight",
    "twinkle.loss:SimPOLoss": "beta gamma",
    "twinkle.loss:CPOLoss": "beta bc_coef",
    "twinkle.loss:ORPOLoss": "lambda_orpo",
    "twinkle.loss:InfonceLoss": "temperature use_batch hard_negatives mask_fake_negative fake_neg_margin include_qq "
    "include_dd process_group",
    "twinkle.metric:TrainMetric": "device_mesh process_group",
    "twinkle.metric:CompletionRewardMetric": "device_mesh process_group",
    "twinkle.metric:DPOMetric": "device_mesh process_group ignore_index beta",
    "twinkle.metric:GRPOMetric": _POLICY_METRIC,
    "twinkle.metric:PPOMetric": _POLICY_METRIC,
    "twinkle.metric:PPOValueMetric": "device_mesh process_group epsilon ignore_index",
    "twinkle.metric:GSPOMetric": _POLICY_METRIC,
    "twinkle.metric:CISPOMetric": _POLICY_METRIC,
    "twinkle.advantage:GAEAdvantage": "gamma gae_lambda normalize",
    "twinkle.advantage:GAEAdvantage.__call__": "rewards values masks normalize",
    "twinkle.advantage:GAEAdvantage.build_token_rewards": "rewards lengths old_logps ref_logps kl_coef",
    "twinkle.advantage:GRPOAdvantage.__call__": "rewards num_generations scale",
    "twinkle.advantage:RLOOAdvantage.__call__": "rewards num_generations scale",
    "twinkle.reward:MathReward": "ground_truth_key",
    "twinkle.reward:Reward.__call__": "trajectories ground_truths",
    "twinkle.module.scheduler:CosineWarmupScheduler": "optimizer num_warmup_steps num_training_steps num_cycles "
    "last_epoch",
    "twinkle.module.scheduler:LinearWarmupScheduler": "optimizer num_warmup_steps num_training_steps last_epoch",
    "twinkle.hub:HubOperation.create_model_repo": "repo_id token private",
    "twinkle.hub:HubOperation.push_to_hub": _PUSH,
    "twinkle.hub:HubOperation.async_push_to_hub": _PUSH,
    "twinkle.hub:HubOperation.wait_for": "repo_ids",
    "twinkle.hub:HubOperation.load_dataset": "dataset_id subset_name split streaming revision",
    "twinkle.hub:HubOperation.download_model": "model_id_or_path revision download_model ignore_patterns token "
    "ignore_model",
    "twinkle.hub:HubOperation.download_file": "repo_id repo_type allow_patterns token",
}

_VERBS = (
    "forward forward_only calculate_loss backward forward_backward clip_grad_norm step zero_grad lr_step "
    "clip_grad_and_step set_loss set_optimizer set_lr_scheduler save load get_state_dict resume_from_checkpoint "
    "apply_patch add_metric calculate_metric add_adapter_to_model set_template set_processor get_train_configs "
    "upload_to_hub set_grad_scaler"
)

ATTRIBUTES = {
    "twinkle": "__version__ __release_datetime__ framework_util torch_util",
    "twinkle.model:TransformersModel.forward": "_execute _collect _dispatch _lazy_collect _sync",
    "twinkle.cli:Args": "get to_dict __getitem__ "
    "get_model_args get_lora_args get_dataset_args get_template_args get_training_args get_optimizer_args "
    "get_scheduler_args get_loss_args get_sampler_args get_sampling_args get_infra_args get_server_args get_rl_args "
    "get_checkpoint_args",
    "twinkle.cli:ConfigRegistry": "resolve all_keys",
    "twinkle.cli:ConfigResolver": "apply",
    "twinkle.cli:ValueCaster": "auto_cast coerce_to_field",
    "twinkle.sampler:vLLMSampler": "sample set_template receive_weights reset_prefix_cache reset_mm_cache "
    "reset_encoder_cache sleep wake_up get_state_keys shutdown",
    "twinkle.checkpoint_engine:CheckpointEngineManager": "sync_weights",
    "twinkle_agentic.tools:ToolManager": "register unregister names copy tool_infos call __call__",
    "twinkle_agentic.envs:Env": "reset step tools evaluate close __enter__ __exit__",
    "twinkle_agentic.envs:EnvTool": "last_result done episode_reward from_env tool_info __call__",
    "twinkle_agentic.envs:EnvPool": "reset step reset_batch step_batch close get_adapters",
    "twinkle:Platform": "get_platform get_platform_names visible_device_env device_prefix get_local_device "
    "device_backend get_rank get_local_rank get_world_size get_local_world_size get_nnodes get_node_rank "
    "is_local_master is_master is_last_rank get_peer_index get_device_rng_state set_device_rng_state",
    "twinkle:DeviceMesh": "dp_rank fsdp_rank tp_rank pp_rank cp_rank ep_rank dp_world_size fsdp_world_size "
    "tp_world_size pp_world_size cp_world_size ep_world_size etp_world_size world_size is_single_process order "
    "data_rank data_world_size get_data_rank_from_global_rank get_slice get_tp_ranks get_tp_last_ranks "
    "is_tp_last_rank get_pp_stage_ranks get_pp_first_ranks get_pp_last_ranks is_pp_first_rank is_pp_last_rank "
    "get_collect_ranks has_dim get_dim_size create_process_group get_dim_group to_torch_device_mesh",
    "twinkle.notifier:Notifier": "to_dict from_dict __call__",
    "twinkle.template:Template": "image_placeholder video_placeholder audio_placeholder pre_pipeline_names "
    "post_pipeline_names encode batch_encode concat_input_feature format_trajectory check batch_check decode "
    "batch_decode parse_tool_call clean_tool_call set_mm_position_ids get_vllm_input_ids pre_forward_hook "
    "map_col_to_row map_row_to_col processor config",
    "twinkle.template:DeepseekV4Template": "parse clean",
    "twinkle.template:ToolCallParser": "open_marker close_marker detect parse clean extract_tool_result",
    "twinkle.template:ToolCallRegistry": "register parsers detect_first",
    "twinkle.preprocessor:Preprocessor": "map_col_to_row map_row_to_col",
    "twinkle.preprocessor:GSM8KProcessor": "extract_ground_truth preprocess",
    "twinkle.dataset:DatasetMeta": "get_id",
    "twinkle.dataset:Dataset": "set_template map filter encode check cast_column add_dataset mix_dataset save_as "
    "flush_save datasets dataset __getitem__ __len__",
    "twinkle.dataset:PackingDataset": "pack_dataset",
    "twinkle.dataset:IterablePackingDataset": "pack_dataset",
    "twinkle.dataloader:DataLoader": "set_processor get_state skip_consumed_samples resume_from_checkpoint __len__ "
    "__iter__",
    "twinkle.processor:InputProcessor": "prepare_inputs align_routed_experts collate_fn postprocess_tensor_sp "
    "unpack_packed_sequences unpack_inputs",
    "twinkle.model:TransformersModel": f"{_VERBS} get_peft_config_dict model",
    "twinkle.model:TransformersValueModel": f"{_VERBS} model",
    "twinkle.model:MultiLoraTransformersModel": f"{_VERBS} get_peft_config_dict remove_adapter",
    "twinkle.loss:Loss": "require_logits require_entropy require_logps require_values",
    "twinkle.metric:Metric": "accumulate calculate reset gather_results",
    "twinkle.reward:GSM8KAccuracyReward": "extract_answer",
    "twinkle.data_format:SamplingParams": "to_vllm to_transformers from_dict",
    "twinkle.hub:HubOperation": "source_type remove_source_type try_login create_model_repo push_to_hub "
    "async_push_to_hub wait_for load_dataset download_model download_file",
}

KEYS = {
    "Message": "role type content tool_calls tool_call_id reasoning_content",
    "ToolCall": "id type function",
    "Tool": "type function",
    "Trajectory": "messages tools user_data images videos audios prompt",
    "InputFeature": "input_ids attention_mask position_ids labels completion_mask length routed_experts",
    "ModelOutput": "logits loss logps num_tokens embeddings routed_experts entropies",
    "LossOutput": "loss num_tokens",
}

LOSS_NAMES = (
    "mse chunked_cross_entropy cross_entropy liger_fused_linear_cross_entropy gkd grpo gspo sapo cispo bnpo dr_grpo "
    "dpo simpo cpo orpo infonce ppo ppo_value"
)

# A class, the attributes that it does not have, and why.
ABSENT = [
    ("twinkle.infra:Platform", "get_vllm_device_uuid", "gpu_id() of a model or of a sampler names its GPU"),
    (
        "twinkle.processor:InputProcessor",
        "split_cp",
        "a processor does not cut rows along the sequence; TransformersModel does, with ulysses_size",
    ),
    (
        "twinkle.processor:InputProcessor",
        "to_transformers_dict",
        "part of calling a processor, not a separate step",
    ),
    (
        "twinkle.sampler:vLLMSampler",
        "sample_stream apply_patch add_adapter_to_sampler encode_trajectory decode_response "
        "load_full_weights_from_path",
        "only a server streams; weights come through sync_weights and receive_weights; .template encodes and decodes",
    ),
]


def absent_paths() -> list[str]:
    return [f"{owner}{'.' if ':' in owner else ':'}{name}" for owner, names, _ in ABSENT for name in names.split()]


def find(path: str) -> object:
    module, _, names = path.partition(":")
    value: object = importlib.import_module(module)
    for name in names.split(".") if names else []:
        value = getattr(value, name)
    return value


def found(module, name):
    """Return whether a name can be imported."""
    try:
        find(f"{module}:{name}" if name else module)
    except (AttributeError, ImportError):
        return False
    return True


@cache
def declared():
    """Return the paths that docs/compatibility.md gives a reason for: modules, and names as ``module:name``."""
    page = COMPATIBILITY.read_text()
    section = page.split("\n## Import paths\n")[1].split("\n## ")[0]
    paths = {path for path, here in re.findall(r"^\| `([^`]+)` \| (.+) \|$", section, re.MULTILINE) if here[0] != "`"}
    return paths | {f"{owner}:{name}" for owner, names, _ in ABSENT for name in names.split()}


def is_declared(module, name):
    parts = module.split(".")
    above = {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
    return bool((above | {f"{module}:{name}", f"{module}.{name}"}) & declared())


@pytest.mark.filterwarnings("ignore:.*older import path:DeprecationWarning")
@pytest.mark.parametrize("module", sorted({*PACKAGES, *MODULES}))
def test_each_existing_name_is_here_or_has_a_reason(module):
    names = f"{PACKAGES.get(module, '')} {MODULES.get(module, '')}".split() or [""]
    missing = {name for name in names if not found(module, name) and not is_declared(module, name)}
    assert not missing, sorted(missing)


@pytest.mark.parametrize("module", [name for name in PACKAGES if name not in PATHS])
def test_names_are_public(module):
    not_yet = {path.partition(":")[2] for path, entry in PATHS.items() if isinstance(entry, NotYet)}
    here = {name for name in PACKAGES[module].split() if found(module, name)}
    assert here - not_yet <= set(importlib.import_module(module).__all__)


@pytest.mark.parametrize("path", SIGNATURES)
def test_parameters_have_their_names_and_order(path):
    expected = SIGNATURES[path].split()
    found = list(inspect.signature(find(path)).parameters)
    assert [name for name in found if name in expected] == expected
    assert set(found[: found.index(expected[-1])]) <= {*expected, "self"}  # no other parameter in between


@pytest.mark.parametrize("path", ATTRIBUTES)
def test_classes_have_their_methods(path):
    owner = find(path)
    assert [name for name in ATTRIBUTES[path].split() if not hasattr(owner, name)] == []


@pytest.mark.parametrize("name", KEYS)
def test_dicts_have_their_keys(name):
    kind = find(f"twinkle.data_format:{name}")
    assert set(KEYS[name].split()) <= set(kind.__annotations__)
    assert kind.__required_keys__ == frozenset()  # rows may come from anywhere, so no key is required


def test_losses_have_their_names():
    assert set(find("twinkle.loss:torch_loss_mapping")) == set(LOSS_NAMES.split())


@pytest.mark.parametrize("path", absent_paths())
def test_what_is_absent_is_absent(path):
    with pytest.raises((AttributeError, ImportError)):
        find(path)


def test_users_are_told_what_is_absent():
    section = COMPATIBILITY.read_text().split("## Library: names that are not there")[1].split("\n## ")[0]
    told = [
        (re.findall("`([^`]+)`", where)[0], " ".join(re.findall("`([^`]+)`", names)), why.replace("`", "").strip())
        for where, names, why in re.findall(r"^\| (`[^|]+) \| ([^|]+) \| ([^|]+) \|$", section, re.MULTILINE)
    ]
    assert told == ABSENT


def test_packages_are_light_until_they_are_used():
    """Importing a package is cheap; its dependencies are imported when one of its names is used."""
    packages = [name for name in PACKAGES if name.startswith("twinkle.") and name != "twinkle.module.scheduler"]
    packages += ["twinkle_agentic.tools", "twinkle_agentic.envs", "twinkle_agentic.rollout"]
    code = f"import {', '.join(packages)}, json, sys; print(json.dumps(sorted(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert set(json.loads(done.stdout)).isdisjoint({"datasets", "peft", "torch", "transformers", "vllm"})
