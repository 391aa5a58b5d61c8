"""Every callable that the existing scripts and documents use can be imported and takes the keywords they pass.

tests/library/test_library_surface.py compares whole signatures of the library. Here are the client's callables, and
keywords that scripts and documents pass beyond a signature. What a keyword does is tested with the class it belongs to.
"""

import inspect
from importlib import import_module
from operator import attrgetter

import pytest

pytest.importorskip("transformers")

_ADAPTER = "adapter_name"
_INPUTS = f"inputs {_ADAPTER}"
_POLICY_LOSS = "epsilon epsilon_high beta entropy_coef ignore_index clip_range"

# module:callable, and the keywords
KEYWORDS = {
    "twinkle_client:init_twinkle_client": "base_url api_key session_heartbeat_interval session_metadata",
    "twinkle_client:init_tinker_client": "base_url api_key",
    "twinkle:init_twinkle_client": "base_url api_key",
    "twinkle:init_tinker_client": "",
    "twinkle_client.manager:TwinkleClient": "base_url api_key session_heartbeat_interval",
    "twinkle_client:TwinkleClient.list_training_runs": "limit offset all_users",
    "twinkle_client:TwinkleClient.list_training_runs_with_cursor": "limit offset all_users",
    "twinkle_client:TwinkleClient.get_training_run": "run_id",
    "twinkle_client:TwinkleClient.list_checkpoints": "run_id",
    "twinkle_client:TwinkleClient.get_checkpoint_path": "run_id checkpoint_id",
    "twinkle_client:TwinkleClient.get_checkpoint_twinkle_path": "run_id checkpoint_id",
    "twinkle_client:TwinkleClient.delete_checkpoint": "run_id checkpoint_id",
    "twinkle_client:TwinkleClient.get_weights_info": "twinkle_path",
    "twinkle_client:TwinkleClient.get_latest_checkpoint_path": "run_id",
    "twinkle_client:TwinkleClient.find_training_run_by_model": "base_model",
    "twinkle_client:TwinkleClient.get_server_capabilities": "",
    "twinkle_client:TwinkleClient.get_capacity_info": "",
    "twinkle_client:TwinkleClient.health_check": "",
    "twinkle_client.model:MultiLoraTransformersModel": "model_id",
    "twinkle_client.model:MultiLoraTransformersModel.add_adapter_to_model": f"{_ADAPTER} config "
    "gradient_accumulation_steps save_dir",
    "twinkle_client.model:MultiLoraTransformersModel.forward": _INPUTS,
    "twinkle_client.model:MultiLoraTransformersModel.forward_only": f"{_INPUTS} disable_lora temperature "
    "return_logits task",
    "twinkle_client.model:MultiLoraTransformersModel.forward_backward": f"{_INPUTS} advantages old_logps ref_outputs "
    "ref_logps task temperature gradient_accumulation_steps",
    "twinkle_client.model:MultiLoraTransformersModel.clip_grad_norm": "max_grad_norm norm_type",
    "twinkle_client.model:MultiLoraTransformersModel.clip_grad_and_step": "max_grad_norm norm_type",
    "twinkle_client.model:MultiLoraTransformersModel.set_loss": "loss_cls epsilon beta loss_type sft_weight",
    "twinkle_client.model:MultiLoraTransformersModel.set_optimizer": "optimizer_cls lr",
    "twinkle_client.model:MultiLoraTransformersModel.set_lr_scheduler": "scheduler_cls num_warmup_steps",
    "twinkle_client.model:MultiLoraTransformersModel.set_template": "template_cls model_id max_length enable_thinking",
    "twinkle_client.model:MultiLoraTransformersModel.set_processor": "processor_cls padding_side",
    "twinkle_client.model:MultiLoraTransformersModel.add_metric": "metric_cls is_training beta",
    "twinkle_client.model:MultiLoraTransformersModel.apply_patch": "patch_cls",
    "twinkle_client.model:MultiLoraTransformersModel.calculate_metric": "is_training",
    "twinkle_client.model:MultiLoraTransformersModel.save": "name save_optimizer is_sampler consumed_train_samples "
    "interval",
    "twinkle_client.model:MultiLoraTransformersModel.load": "name load_optimizer",
    "twinkle_client.model:MultiLoraTransformersModel.resume_from_checkpoint": "name resume_only_model",
    "twinkle_client.model:MultiLoraTransformersModel.upload_to_hub": "checkpoint_dir hub_model_id hub_token "
    "async_upload poll_interval",
    "twinkle_client.sampler:vLLMSampler": "model_id",
    "twinkle_client.sampler:vLLMSampler.set_template": f"template_cls {_ADAPTER} model_id enable_thinking",
    "twinkle_client.sampler:vLLMSampler.sample": f"inputs sampling_params {_ADAPTER} adapter_uri num_samples",
    "twinkle_client.sampler:vLLMSampler.add_adapter_to_sampler": f"{_ADAPTER} config",
    "twinkle_client.rollout:ClientMultiTurnRollout": "sampler template tool_manager sampling_params max_turns "
    "max_trajectory_tokens",
    "twinkle_client.dataset:Dataset": "dataset_meta",
    "twinkle_client.dataset:Dataset.map": "preprocess_func dataset_meta init_args",
    "twinkle_client.dataset:Dataset.filter": "filter_func dataset_meta init_args",
    "twinkle_client.dataloader:DataLoader": "dataset batch_size",
    "twinkle_client.processor:InputProcessor": "device_mesh padding_free framework",
    # beyond a signature: keywords that go on to another callable, and names of the documents
    "twinkle.dataset:Dataset": "dataset_meta streaming split trust_remote_code num_proc revision",
    "twinkle.dataset:Dataset.map": "load_from_cache_file remove_columns num_proc",
    "twinkle.dataset:Dataset.encode": "add_generation_prompt batched load_from_cache_file",
    "twinkle.dataset:LazyDataset": "dataset_meta",
    "twinkle.dataset:LazyDataset.encode": "add_generation_prompt batched",
    "twinkle.dataloader:DataLoader": "dataset batch_size min_batch_size device_mesh num_workers shuffle drop_last "
    "sampler batch_sampler generator collate_fn worker_init_fn",
    "twinkle.model:TransformersModel": "model_id device_mesh strategy ddp_config attn_implementation remote_group",
    "twinkle.model:TransformersModel.forward_backward": "inputs micro_batch_size task old_logps advantages ref_outputs",
    "twinkle.model:TransformersModel.set_optimizer": "optimizer_cls lr adjust_lr_fn foreach",
    "twinkle.model:TransformersModel.set_lr_scheduler": "scheduler_cls num_warmup_steps num_training_steps T_max "
    "eta_min",
    "twinkle.model:TransformersModel.save": "name output_dir interval adapter_name save_optimizer "
    "consumed_train_samples",
    "twinkle.loss:GRPOLoss": _POLICY_LOSS,
    "twinkle.loss:GSPOLoss": _POLICY_LOSS,
    "twinkle.loss:SAPOLoss": "epsilon beta tau_pos tau_neg tau clip_range",
    "twinkle.loss:CISPOLoss": _POLICY_LOSS,
    "twinkle.loss:BNPOLoss": _POLICY_LOSS,
    "twinkle.loss:DRGRPOLoss": "epsilon beta max_completion_length clip_range",
    "twinkle.loss:CPOLoss": "beta bc_coef cpo_alpha",
    "twinkle.loss:GKDLoss": "beta temperature topk teacher_mode",
    "twinkle.loss:DPOLoss": "beta label_smoothing loss_type reference_free sft_weight",
    "twinkle.loss:InfonceLoss": "temperature use_batch hard_negatives",
    "twinkle.advantage:GRPOAdvantage.__call__": "rewards num_generations scale",
    "twinkle.metric:CompletionRewardMetric.accumulate": "completion_lengths rewards generate_time weight_sync_time",
    "twinkle.server.common:input_feature_to_datum": "",
    "twinkle_agentic.tools.tool_manager:ToolManager": "tools",
    "twinkle_agentic.envs:EnvTool": "env tool_name description parameters",
    "twinkle_agentic.envs:OpenEnv": "env_name env_kwargs action_mapper",
    "twinkle_agentic.rollout.multi_turn:MultiTurnRollout": "sampler template sampling_params max_turns trace_dir "
    "trace_callback success_callback",
}


@pytest.mark.parametrize("path", KEYWORDS)
def test_keywords_are_taken(path: str) -> None:
    module, _, name = path.partition(":")
    called = attrgetter(name)(import_module(module))
    parameters = inspect.signature(called).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    assert set(KEYWORDS[path].split()) <= {parameter.name for parameter in parameters}
