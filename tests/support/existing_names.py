"""The public names of the existing packages, as far as scripts, documents and tests of the existing Twinkle use them.

``PACKAGES`` has the names that each package exports, ``MODULES`` the modules that are imported by their own path, with
the names that are imported from there (none: the module alone). Each name exists here too, or docs/compatibility.md
says why not; tests/library/test_library_surface.py checks that.
"""

_FRAMEWORK = (
    "seed_everything gather_object is_torch_available is_torch_npu_available is_gpu_available is_npu_available "
    "empty_cache get_current_device get_device set_device to_local_tensor synchronize contains_nan ipc_collect"
)

PACKAGES = {
    "twinkle": "DeviceGroup DeviceMesh GPU NPU Platform Plugin check_unsafe exists find_free_port find_node_ip "
    "get_device_placement get_logger init_tinker_client init_twinkle_client initialize is_master remote_class "
    "remote_function requires trust_remote_code",
    "twinkle.infra": "initialize remote_class remote_function get_device_placement collect_tensor_dict",
    "twinkle.utils": "framework_util torch_util exists requires Platform GPU NPU MPS find_node_ip find_free_port "
    "trust_remote_code check_unsafe DeviceMesh Plugin DeviceGroup get_logger is_master is_last_rank construct_class "
    "ensure_hccl_socket_env ensure_npu_backend processing_lock PosixFileLock try_claim_once acquire_lock release_lock "
    "to_device clone_state_dict_to_cpu pad_sequence_to_length pad_and_stack_tensors selective_log_softmax "
    "split_cp_inputs gather_cp_load_balanced stateless_init_process_group find_layers find_all_linears "
    "get_modules_to_not_convert get_llm_model align_logps_to_mask filter_from_config_kwargs LazyTensor "
    "SafetensorLazyLoader StreamingSafetensorSaver is_valid_ipv6_address deep_getattr signature_info "
    "has_signature_parameter call_with_supported_kwargs copy_files_by_pattern get_runtime_meta stable_seed load_image "
    "load_mm_file Fp8Dequantizer MxFp4Dequantizer get_timeout_s_from_env configure_zmq_socket safe_loss nccl_safe "
    "nccl_safe_megatron normalize_and_clip_grad_norm",
    "twinkle.framework_util": _FRAMEWORK,
    "twinkle.torch_util": _FRAMEWORK,
    "twinkle.notifier": "Notifier DingNotifier notify_exception",
    "twinkle.cli": "CLI Args ModelArgs LoraArgs DatasetArgs TemplateArgs TrainingArgs OptimizerArgs SchedulerArgs "
    "LossArgs SamplerArgs SamplingArgs InfraArgs ServerArgs RLArgs CheckpointArgs ConfigSource DotEnvSource "
    "EnvVarSource YamlSource CLISource ConfigRegistry ConfigResolver ValueCaster",
    "twinkle.data_format": "InputFeature Message Tool ToolCall LossOutput ModelOutput SampledSequence SampleResponse "
    "SamplingParams Trajectory pack_value user_data_get",
    "twinkle.template": "Template DeepseekV4Template Qwen3_5Template ClineParser HermesQwenParser ReActParser "
    "ToolCallParser ToolCallRegistry VCPParser",
    "twinkle.template.tools": "ClineParser HermesQwenParser ReActParser ToolCallParser ToolCallRegistry VCPParser",
    "twinkle.preprocessor": "DataFilter Preprocessor EmojiDPOProcessor AlpacaProcessor CompetitionMathGRPOProcessor "
    "CompetitionMathProcessor CountdownProcessor GSM8KProcessor SelfCognitionProcessor CLEVRProcessor "
    "OlympiadBenchProcessor",
    "twinkle.dataset": "Dataset DatasetMeta IterableDataset IterablePackingDataset LazyDataset PackingDataset",
    "twinkle.dataloader": "DataLoader DeviceMeshIterableFetcher DeviceMeshSampler RetrySampler",
    "twinkle.processor": "InputProcessor",
    "twinkle.model": "TwinkleModel TransformersModel MultiLoraTransformersModel MegatronModel MultiLoraMegatronModel "
    "TransformersValueModel",
    "twinkle.loss": "Loss CrossEntropyLoss ChunkedCrossEntropyLoss LigerFusedLinearCrossEntropyLoss MSELoss GRPOLoss "
    "GSPOLoss SAPOLoss CISPOLoss BNPOLoss DRGRPOLoss GKDLoss DPOLoss SimPOLoss CPOLoss ORPOLoss InfonceLoss PPOLoss "
    "PPOValueLoss torch_loss_mapping",
    "twinkle.metric": "Accuracy Metric CompletionRewardMetric DPOMetric EmbeddingMetric GRPOMetric GSPOMetric "
    "CISPOMetric LossMetric TrainMetric PPOMetric PPOValueMetric",
    "twinkle.advantage": "Advantage GRPOAdvantage RLOOAdvantage GAEAdvantage",
    "twinkle.reward": "Reward FormatReward GSM8KAccuracyReward GSM8KFormatReward MathReward MultiModalAccuracyReward "
    "OlympiadBenchAccuracyReward OlympiadBenchFormatReward OlympiadBenchQualityReward",
    "twinkle.sampler": "Sampler BaseSamplerEngine VLLMEngine vLLMSampler",
    "twinkle.checkpoint_engine": "CheckpointEngine CheckpointEngineMixin CheckpointEngineManager NCCLCheckpointEngine "
    "HCCLCheckpointEngine TensorMeta",
    "twinkle.kernel": "kernelize hub npu_builtin liger_builtin KernelChoice DEFAULT_KERNEL_CONFIG",
    "twinkle.patch": "apply_patch apply_context Patch",
    "twinkle.hub": "HFHub HubOperation MSHub MODEL_ID_ALIASES_ENV build_model_alias_map load_model_alias_map "
    "resolve_model_id_alias",
    "twinkle.module.scheduler": "CosineWarmupScheduler LinearWarmupScheduler",
    "twinkle.server": "launch_server",
    "twinkle.server.common": "input_feature_to_datum datum_to_input_feature extract_rl_features_for_loss",
    "twinkle_client": "init_twinkle_client init_tinker_client",
    "twinkle_client.model": "MultiLoraTransformersModel",
    "twinkle_client.sampler": "vLLMSampler",
    "twinkle_client.processor": "InputProcessor",
    "twinkle_client.dataset": "Dataset LazyDataset PackingDataset IterableDataset IterablePackingDataset",
    "twinkle_client.dataloader": "DataLoader",
    "twinkle_client.rollout": "ClientMultiTurnRollout",
    "twinkle_client.types": "CreateSessionRequest CreateSessionResponse SessionHeartbeatRequest "
    "SessionHeartbeatResponse SupportedModel GetServerCapabilitiesResponse HealthResponse DeleteCheckpointResponse "
    "ErrorResponse WeightsInfoRequest WeightsInfoResponse ServerWeightsInfoResponse CheckpointPathResponse "
    "CapacityInfoResponse Cursor Checkpoint TrainingRun TrainingRunsResponse CheckpointsListResponse "
    "ParsedCheckpointTwinklePath LoraConfig CreateModelRequest ResolvedLoadPath CreateRequest ForwardRequest "
    "ForwardOnlyRequest AdapterRequest SetLossRequest SetOptimizerRequest SetLrSchedulerRequest SaveRequest "
    "UploadToHubRequest LoadRequest ResumeFromCheckpointRequest AddAdapterRequest SetTemplateRequest "
    "SetProcessorRequest CalculateMetricRequest GetStateDictRequest ClipGradAndStepRequest ApplyPatchRequest "
    "AddMetricRequest OkResponse BackwardResponse StepResponse ZeroGradResponse LrStepResponse SetLossResponse "
    "SetOptimizerResponse SetLrSchedulerResponse LoadResponse SetTemplateResponse SetProcessorResponse "
    "ClipGradAndStepResponse ApplyPatchResponse AddMetricResponse ModelResult ForwardResponse ForwardBackwardResponse "
    "CalculateLossResponse ClipGradNormResponse GetTrainConfigsResponse GetStateDictResponse CalculateMetricResponse "
    "SaveResponse TrainingProgressResponse UploadToHubResponse UploadStatusResponse CreateResponse AddAdapterResponse "
    "SampleRequest SampledSequenceModel SampleResponseModel SampleResponseModelList SamplerAddAdapterRequest "
    "SamplerAddAdapterResponse SamplerCreateResponse SamplerSetTemplateRequest SamplerSetTemplateResponse "
    "ProcessorCreateRequest ProcessorCreateResponse ProcessorCallRequest ProcessorCallResponse "
    "ProcessorHeartbeatRequest ProcessorHeartbeatResponse",
    "twinkle_agentic.tools": "Tool ToolManager ExtractCondensed",
    "twinkle_agentic.envs": "Env StepResult EnvTool OpenEnv OpenEnvClient EnvPool EnvPoolAdapter AgentEnv",
    "twinkle_agentic.rollout": "MultiTurnRollout APIMultiTurnRollout MultiTurnCondenseRollout",
    "twinkle_agentic.chunker": "NativeChunker",
    "twinkle_agentic.condenser": "ModelCondenser KeywordCondenser",
    "twinkle_agentic.data_format": "Chunk Chunks",
    "twinkle_agentic.protocol": "API OpenAI",
    "twinkle_agentic.reward": "CoTReward F1Reward ToolExploreReward",
    "twinkle_agentic.sampler": "RouterSampler",
    "twinkle_agentic.preprocessor": "FixUnicodeFilter RemoveRepeatSentencesFilter SpecialCharsFilter TokenNumFilter "
    "HardFilter DeadLoopFilter DedupFilter IntentClassifier MessageNormalizer MessageSanityFilter ModelFilter "
    "PIIPresidioFilter RefuseFilter TokenSoupFilter ScoreFilter QualityPreprocessor ChrMinScorer SIFDScorer "
    "PassNScorer ParaphraseScorer LLMBackend OpenAIBackend SamplerBackend",
    "twinkle_client.auto": "",
    "twinkle_client.skills": "LocalSkillProvider ModelScopeSkillProvider Skill SkillManager SkillProvider",
}

# Names that tests of the existing Twinkle import from parts inside its server are left out.
MODULES = {
    "twinkle.cli.cli": "Args ConfigRegistry ConfigResolver ConfigSource",
    "twinkle.data_format.message": "Message Tool",
    "twinkle.data_format.sampling": "SampleResponse SampledSequence SamplingParams",
    "twinkle.dataset.base": "DatasetMeta",
    "twinkle.hub.hub": "HubOperation",
    "twinkle.kernel.core": "HubRef hub kernelize",
    "twinkle.kernel.npu_impls.moe": "GmmFunction npu_grouped_mm npu_packed_moe_experts_forward "
    "npu_qwen3_5_moe_sparse_block_forward",
    "twinkle.kernel.npu_impls.rotary": "npu_apply_multimodal_rotary_pos_emb npu_apply_rotary_pos_emb",
    "twinkle.loss_scale": "LossScale",
    "twinkle.model.megatron": "MegatronModel MultiLoraMegatronModel",
    "twinkle.model.multi_lora": "LoraTenant MultiLora",
    "twinkle.model.multi_lora_target_parameters": "TargetParameterLoraManager",
    "twinkle.model.transformers": "TransformersModel",
    "twinkle.model.transformers.moe": "apply_expert_parallel ExpertShardingSpec",
    "twinkle.model.transformers.moe.expert_parallel": "ExpertParallelConfig",
    "twinkle.model.transformers.moe.router_replay": "RouterReplayAction",
    "twinkle.model.transformers.multi_lora_transformers": "MultiLoraTransformersModel",
    "twinkle.model.transformers.strategy": "AccelerateStrategy NativeFSDPStrategy",
    "twinkle.model.transformers.strategy.native_fsdp": "NativeFSDPStrategy",
    "twinkle.model.transformers.strategy.sequence_parallel": "SequenceParallelConfig SequenceParallelStrategy "
    "sequence_parallel",
    "twinkle.model.transformers.strategy.sequence_parallel.linear_attention_sp": "Qwen3_5GatedDeltaNetUlyssesPatch",
    "twinkle.notifier.base": "notify_exception",
    "twinkle.patch.gdn_padding_free": "GatedDeltaNetPaddingFreePatch",
    "twinkle.patch.megatron_emb": "MegatronEmbeddingPatch",
    "twinkle.patch.megatron_peft": "MegatronPeft",
    "twinkle.patch.no_split_modules": "NoSplitModulesPatch",
    "twinkle.patch.qwen3_chat_template": "Qwen3AllowToolTailTemplate Qwen3ChatTemplate",
    "twinkle.patch.transformers_emb": "TransformersEmbeddingPatch get_lm_head_model",
    "twinkle.patch.transformers_fused_ce": "TransformersFusedCEPatch",
    "twinkle.patch.vllm_lora_weights": "TensorLoRARequest VLLMLoraWeights",
    "twinkle.patch.vllm_moe_loader": "VLLMMoEWeights",
    "twinkle.preprocessor.base": "Preprocessor",
    "twinkle.preprocessor.llm": "GSM8KProcessor",
    "twinkle.preprocessor.olympiad_bench": "OlympiadBenchProcessor",
    "twinkle.processor.base": "InputProcessor PackedSeqParams",
    "twinkle.reward.base": "Reward",
    "twinkle.reward.olympiad_bench": "OlympiadBenchAccuracyReward OlympiadBenchFormatReward OlympiadBenchQualityReward",
    "twinkle.sampler.torch_sampler": "",
    "twinkle.sampler.vllm_sampler": "vLLMSampler",
    "twinkle.sampler.vllm_sampler.vllm_engine": "VLLMEngine",
    "twinkle.sampler.vllm_sampler.vllm_sampler": "vLLMSampler",
    "twinkle.template.deepseek_v4": "DeepseekV4Template",
    "twinkle.utils.device_mesh": "DeviceGroup DeviceMesh Platform",
    "twinkle.utils.framework": "Framework Torch",
    "twinkle.utils.grad_clip": "normalize_and_clip_grad_norm",
    "twinkle.utils.import_utils": "_LazyModule",
    "twinkle.utils.loader": "Plugin construct_class",
    "twinkle.utils.logger": "get_logger",
    "twinkle.utils.nccl_safe": "safe_loss nccl_safe nccl_safe_megatron",
    "twinkle.utils.network": "find_free_port find_node_ip is_valid_ipv6_address",
    "twinkle.utils.parallel": "PosixFileLock processing_lock try_claim_once",
    "twinkle.utils.platforms": "MPS",
    "twinkle.utils.safetensors": "LazyTensor SafetensorLazyLoader StreamingSafetensorSaver",
    "twinkle.utils.seed": "stable_seed",
    "twinkle.utils.torch_utils": "clone_state_dict_to_cpu selective_log_softmax to_device pad_and_stack_tensors "
    "pad_sequence_to_length",
    "twinkle.utils.transformers_utils": "align_logps_to_mask filter_from_config_kwargs",
    "twinkle.utils.unsafe": "check_unsafe trust_remote_code",
    "twinkle.utils.utils": "call_with_supported_kwargs copy_files_by_pattern deep_getattr has_signature_parameter "
    "signature_info",
    "twinkle.utils.zmq_utils": "get_timeout_s_from_env configure_zmq_socket",
    "twinkle.version": "__version__ __release_datetime__",
    "twinkle.server.cli": "main",
    "twinkle.server.config": "ServerConfig ApplicationSpec HttpOptions ModelArgs SamplerArgs ServerArgs ProcessorArgs "
    "PersistenceConfig TelemetryConfig ConfigParseError",
    "twinkle.server.launcher": "ServerLauncher",
    **dict.fromkeys(
        (
            f"twinkle.server.{path}"
            for path in (
                "cli.app",
                "common.datum",
                "config.persistence",
                "config.telemetry",
                "deployment",
                "exceptions",
                "gateway",
                "gateway.openai_bridge",
                "gateway.openai_handlers",
                "gateway.tinker_handlers",
                "gateway.twinkle_handlers",
                "model",
                "model.app",
                "model.backends.common",
                "model.backends.mock_model",
                "model.tinker_handlers",
                "model.twinkle_handlers",
                "processor",
                "processor.twinkle_handlers",
                "sampler",
                "sampler.app",
                "sampler.backends.mock_sampler",
                "sampler.tinker_handlers",
                "sampler.twinkle_handlers",
                "state",
                "state.backend.factory",
                "state.backend.file_backend",
                "state.backend.memory_backend",
                "state.backend.redis_backend",
                "state.future_manager",
                "state.model_manager",
                "state.models",
                "state.sampling_manager",
                "state.server_state",
                "state.session_manager",
                "telemetry",
                "telemetry.correlation",
                "telemetry.tracing",
                "utils.task_errors",
                "utils.task_queue.config",
                "utils.task_queue.mixin",
            )
        ),
        "",
    ),
    "twinkle_client.auto.runtime": "TrainingRuntime",
    "twinkle_client.common.serialize": "serialize_object deserialize_object",
    "twinkle_client.http": "http_get http_post http_delete set_base_url get_base_url set_api_key set_session_id "
    "set_request_id",
    "twinkle_client.manager": "TwinkleClient TwinkleClientError",
    "twinkle_client.rollout.multi_turn": "ClientMultiTurnRollout",
    "twinkle_client.skills.base": "Skill SkillProvider",
    "twinkle_client.skills.local_provider": "LocalSkillProvider",
    "twinkle_client.skills.manager": "SkillManager",
    "twinkle_client.skills.modelscope_provider": "ModelScopeSkillProvider",
    "twinkle_client.types.checkpoint": "ResolvedLoadPath",
    "twinkle_client.types.model": "",
    "twinkle_client.types.processor": "",
    "twinkle_client.types.sampler": "",
    "twinkle_client.types.server": "",
    "twinkle_client.types.session": "",
    "twinkle_client.types.training": "",
    "twinkle_client.utils.patch_tinker": "patch_tinker",
    "twinkle_agentic.chunker.base": "",
    "twinkle_agentic.chunker.native": "NativeChunker _hard_cut _split_keep",
    "twinkle_agentic.condenser.base": "",
    "twinkle_agentic.condenser.keyword": "KeywordCondenser",
    "twinkle_agentic.condenser.model": "ModelCondenser",
    "twinkle_agentic.envs.agentenv": "AgentEnv",
    "twinkle_agentic.envs.base": "Env StepResult",
    "twinkle_agentic.envs.env_tool": "EnvTool",
    "twinkle_agentic.envs.openenv": "OpenEnv",
    "twinkle_agentic.preprocessor.pii_presidio_filter": "Strategy",
    "twinkle_agentic.preprocessor.refuse_filter": "RefuseFilter",
    "twinkle_agentic.preprocessor.token_soup": "TokenSoupFilter",
    "twinkle_agentic.preprocessor.utils": "",
    "twinkle_agentic.protocol.base": "API",
    "twinkle_agentic.protocol.openai": "OpenAI",
    "twinkle_agentic.reward.f1": "_extract_final_answer _f1_score",
    "twinkle_agentic.rollout.api_multi_turn": "APIMultiTurnRollout",
    "twinkle_agentic.rollout.base": "",
    "twinkle_agentic.rollout.bridge": "extend_with_bridge",
    "twinkle_agentic.rollout.multi_turn": "MultiTurnRollout",
    "twinkle_agentic.rollout.multi_turn_condense": "MultiTurnCondenseRollout",
    "twinkle_agentic.sampler.router_sampler": "RouterSampler",
    "twinkle_agentic.tools.base": "Tool",
    "twinkle_agentic.tools.extract_condensed": "ExtractCondensed TOOL_NAME",
    "twinkle_agentic.tools.tool_manager": "ToolManager",
}
