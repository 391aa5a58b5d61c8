"""Import paths of other versions of the library and the server: a line for each, and where it leads.

A path of a module is moved, and works with a warning that names the new path; or absent, and importing it is an error
that says what to use instead; or not there yet, and then its names can be imported but not used. ``module:name`` is a
name that an existing module does not have; that module's ``__getattr__`` returns :func:`find_name`. How Python finds
these paths is in :mod:`twinkle_client.compatibility`. docs/compatibility.md lists all of them for users.
"""

from twinkle.errors import UnsupportedError
from twinkle_client.compatibility import Absent, Moved, NotYet, OlderImportPaths, Table

__all__ = ["PATHS", "find_name", "install", "unusable_name"]

_APPLICATIONS = (
    "the applications of a server share its state and reach each other by handles, so they are not built one by one; "
    "twinkle.server.launch_server starts all that a configuration names"
)
_STATE = "the server's state is a database; twinkle_client.TwinkleClient lists runs and checkpoints"
_SERVER = "how the server queues, journals and keeps its work is internal; see docs/architecture.md"
_ENGINE = "engines have one interface, Sampler; vLLM's is twinkle.sampler.vllm.VllmSampler"
_LAZY = "packages import their names on first use, by the __getattr__ of Python modules"
_EXPERTS = (
    "TransformersModel(fsdp_config={'expert_parallel': {…}}) takes the settings as a dict, and divides experts over "
    "processes as it does all weights; a module of transformers alone is not changed"
)
_NPU = "there is no backend for NPUs"
_NO_MIXIN = (
    "models have offer_weights and send_weights themselves, and samplers prepare_weights, receive_bucket and "
    "finish_weights; CheckpointEngineManager calls them"
)
_NO_PATCH = "vLLM runs unpatched; adapters reach it as files in memory"
_FAILURES = "set TWINKLE_FAIL_FAST=0 for TransformersModel; a multi-LoRA pass that fails is refused on all ranks"
_CLIPPING = "a model's clip_grad_norm normalises and clips its gradients"
_CONTEXT = "context parallelism needs Transformer Engine, which is not used here"
_ZEROMQ = "nothing here uses ZeroMQ; weights travel over NCCL or through Ray's object store"
_DOCUMENT = "no release of the existing library has it either"

PATHS: Table = {
    # the library
    "twinkle.checkpoint_engine.base": Moved("twinkle.checkpoint_engine"),
    "twinkle.checkpoint_engine:CheckpointEngineMixin": Absent(_NO_MIXIN),
    "twinkle.cli.cli": Moved("twinkle.cli"),
    "twinkle.dataset.base": Moved("twinkle.dataset"),
    "twinkle.hub.hub": Moved("twinkle.hub"),
    "twinkle.hub:Hub": Absent(f"{_DOCUMENT}; HubOperation, HFHub and MSHub do the work"),
    "twinkle.infra._ray": Absent("how groups are placed on Ray is internal; twinkle.initialize(mode='ray') does it"),
    "twinkle.infra:RayHelper": Absent("how groups are placed on Ray is internal"),
    "twinkle.infra:ResourceManager": Absent("how groups are placed on Ray is internal"),
    "twinkle.kernel.builtin": Absent("the existing library has no such module any more; see twinkle.kernel"),
    "twinkle.kernel.core": Moved("twinkle.kernel"),
    "twinkle.kernel.liger": Absent("the existing library has no such module any more; see twinkle.kernel"),
    "twinkle.kernel.npu_impls": Absent(_NPU),
    "twinkle.kernel:DEFAULT_KERNEL_CONFIG": Absent("nothing is replaced by default; kernelize takes a mapping"),
    "twinkle.kernel:KernelChoice": Absent("the values of a mapping for kernelize are classes and functions"),
    "twinkle.kernel:liger_builtin": NotYet(
        "Liger's layers are not offered as a mapping yet; LigerFusedLinearCrossEntropyLoss is its loss, and functions "
        "of liger_kernel.transformers change a model of transformers, such as model.model"
    ),
    "twinkle.loss_scale": Absent(f"{_DOCUMENT}; labels of -100 leave tokens out of a loss"),
    "twinkle.model.multi_lora:LoraTenant": Absent("the Trainer keeps adapters in its own store, not in PEFT slots"),
    "twinkle.model.multi_lora:MultiLora": Absent("the Trainer keeps adapters in its own store, not in PEFT slots"),
    "twinkle.model.multi_lora_target_parameters": Absent(
        "adapters may differ in `target_parameters` of their `LoraConfig`, so no manager is needed"
    ),
    "twinkle.model.multi_lora_transformers": Moved("twinkle.model"),
    "twinkle.model.transformers.moe": NotYet(_EXPERTS, "ExpertParallelConfig ExpertShardingSpec apply_expert_parallel"),
    "twinkle.model.transformers.moe.expert_parallel": Moved("twinkle.model.transformers.moe"),
    "twinkle.model.transformers.moe.router_replay": Moved("twinkle.model.library.router_replay"),
    "twinkle.model.transformers.multi_lora_transformers": Moved("twinkle.model"),
    "twinkle.model.transformers.strategy": Absent(
        "the device mesh of a model decides: fsdp_size shards, dp_size replicates, ulysses_size divides sequences"
    ),
    "twinkle.model:MultiAdapter": Absent("the Trainer keeps adapters in its own store, beside the base model"),
    "twinkle.notifier.base": Moved("twinkle.notifier"),
    "twinkle.patch.gdn_padding_free": Absent(
        "the Trainer packs Qwen3.5 without a patch; in TransformersModel it trains on padded rows"
    ),
    "twinkle.patch.megatron_emb": Absent("task='embedding' of a model's forward returns embeddings, without a patch"),
    "twinkle.patch.megatron_peft": Absent("adapters of a MegatronModel are not modules of PEFT; it saves PEFT's files"),
    "twinkle.patch.no_split_modules": Moved("twinkle.patch"),
    "twinkle.patch.qwen3_chat_template": Absent(
        "Qwen3_5Template finds the turns of the assistant without changing the chat template"
    ),
    "twinkle.patch.transformers_emb": Moved("twinkle.patch"),
    "twinkle.patch.transformers_fused_ce": Moved("twinkle.patch"),
    "twinkle.patch.vllm_lora_weights": Absent(_NO_PATCH),
    "twinkle.patch.vllm_moe_loader": Absent(_NO_PATCH),
    "twinkle.preprocessor.base": Moved("twinkle.preprocessor"),
    "twinkle.preprocessor.olympiad_bench": Moved("twinkle.preprocessor"),
    "twinkle.processor.base": Moved("twinkle.processor", {"PackedSeqParams": "twinkle.processor:PackedSeqParams"}),
    "twinkle.processor:PackedSeqParams": NotYet(
        "a type of megatron-core; a processor gives models of both backends cu_seq_lens_q instead"
    ),
    "twinkle.reward.olympiad_bench": Moved("twinkle.reward"),
    "twinkle.sampler.vllm_engine": Absent(_ENGINE),
    "twinkle.sampler.vllm_sampler": Moved("twinkle.sampler"),
    "twinkle.sampler.vllm_sampler.vllm_engine": Absent(_ENGINE),
    "twinkle.sampler.vllm_sampler.vllm_sampler": Moved("twinkle.sampler"),
    "twinkle.sampler:BaseSamplerEngine": Absent(_ENGINE),
    "twinkle.sampler:VLLMEngine": Absent(_ENGINE),
    "twinkle.utils.device_mesh": Moved("twinkle.infra"),
    "twinkle.utils.framework": Moved(
        "twinkle.framework_util", {"Framework": "twinkle.framework_util", "Torch": "twinkle.torch_util"}
    ),
    "twinkle.utils.grad_clip": Absent(_CLIPPING),
    "twinkle.utils.import_utils": Absent(_LAZY),
    "twinkle.utils.loader": Moved("twinkle.utils"),
    "twinkle.utils.nccl_safe": Absent(_FAILURES),
    "twinkle.utils.platform": Moved("twinkle.infra"),
    "twinkle.utils.platforms": Moved("twinkle.infra"),
    "twinkle.utils.seed": Moved("twinkle.utils"),
    "twinkle.utils.transformers_utils": Moved("twinkle.utils"),
    "twinkle.utils.utils": Moved("twinkle.utils"),
    "twinkle.utils.zmq_utils": Absent(_ZEROMQ),
    "twinkle.utils:Fp8Dequantizer": Absent("transformers reads quantised weights"),
    "twinkle.utils:MxFp4Dequantizer": Absent("transformers reads quantised weights"),
    "twinkle.utils:_LazyModule": Absent(_LAZY),
    "twinkle.utils:acquire_lock": Absent("PosixFileLock and processing_lock lock files"),
    "twinkle.utils:configure_zmq_socket": Absent(_ZEROMQ),
    "twinkle.utils:ensure_npu_backend": Absent(_NPU),
    "twinkle.utils:find_all_linears": Absent("LoraConfig(target_modules='all-linear') finds the linear layers"),
    "twinkle.utils:find_layers": Absent("a model's named_modules() lists its layers"),
    "twinkle.utils:gather_cp_load_balanced": Absent(_CONTEXT),
    "twinkle.utils:get_llm_model": Absent("transformers finds it: model.get_decoder()"),
    "twinkle.utils:get_modules_to_not_convert": Absent("weights are not quantised for training"),
    "twinkle.utils:get_runtime_meta": Absent("notify_exception adds the host, Python's version and the rank itself"),
    "twinkle.utils:get_timeout_s_from_env": Absent(_ZEROMQ),
    "twinkle.utils:nccl_safe_megatron": Absent(_FAILURES),
    "twinkle.utils:normalize_and_clip_grad_norm": Absent(_CLIPPING),
    "twinkle.utils:release_lock": Absent("PosixFileLock and processing_lock lock files"),
    "twinkle.utils:safe_loss": Absent(_FAILURES),
    "twinkle.utils:split_cp_inputs": Absent(_CONTEXT),
    "twinkle.utils:stateless_init_process_group": Absent("NCCLCheckpointEngine makes its own group"),
    "twinkle.version": Moved(
        "twinkle",
        {"__release_datetime__": "twinkle:__release_datetime__", "__version__": "twinkle:__version__"},
    ),
    # the server
    "twinkle.server.cli.app": Absent("the command is python -m twinkle.server, or twinkle-server"),
    "twinkle.server.common.checkpoint_base": Absent(_STATE),
    "twinkle.server.common.checkpoint_factory": Absent(_STATE),
    "twinkle.server.common.io_utils": Absent(_STATE),
    "twinkle.server.common.router": Absent(
        "a request goes to the replica that owns its adapter; the number of replicas is set in the configuration"
    ),
    "twinkle.server.common.serialize": Moved("twinkle_client.common.serialize"),
    "twinkle.server.config.persistence": Absent("the sections of a configuration are in twinkle.server.config"),
    "twinkle.server.config.telemetry": Absent("the sections of a configuration are in twinkle.server.config"),
    "twinkle.server.deployment": Absent(_APPLICATIONS),
    "twinkle.server.exceptions": Absent("the library and the server raise the errors of twinkle.errors"),
    "twinkle.server.gateway.openai_bridge": Absent(_SERVER),
    "twinkle.server.gateway.openai_handlers": Absent(_SERVER),
    "twinkle.server.gateway.tinker_handlers": Absent(_SERVER),
    "twinkle.server.gateway.twinkle_handlers": Absent(_SERVER),
    "twinkle.server.gateway:build_server_app": Absent(_APPLICATIONS),
    "twinkle.server.model": Absent(_APPLICATIONS),
    "twinkle.server.processor": Absent(_APPLICATIONS),
    "twinkle.server.sampler": Absent(_APPLICATIONS),
    "twinkle.server.state.backend": Absent(_STATE),
    "twinkle.server.state.future_manager": Absent(_STATE),
    "twinkle.server.state.model_manager": Absent(_STATE),
    "twinkle.server.state.models": Absent(_STATE),
    "twinkle.server.state.sampling_manager": Absent(_STATE),
    "twinkle.server.state.server_state": Absent(_STATE),
    "twinkle.server.state.session_manager": Absent(_STATE),
    "twinkle.server.state:ServerStateProxy": Absent(_STATE),
    "twinkle.server.telemetry.correlation": Absent(_SERVER),
    "twinkle.server.tinker": Absent("one server speaks both protocols; twinkle.server.launch_server starts it"),
    "twinkle.server.twinkle": Absent("one server speaks both protocols; twinkle.server.launch_server starts it"),
    "twinkle.server.utils": Absent(_SERVER),
}

_FINDER = OlderImportPaths("twinkle", PATHS, UnsupportedError)


def install() -> None:
    """Let Python find the older paths of the library. ``import twinkle`` calls it."""
    _FINDER.install()


def unusable_name(module: str, name: str, error: Exception) -> type:
    """Return a placeholder of a name whose use is this error, because a package is not installed.

    A script that offers the name as one of several choices runs with the others.
    """
    return _FINDER.unusable(module, name, error)


def find_name(module: str, name: str) -> object:
    """Return the placeholder of a name that a module does not have yet; raise an error for other missing names."""
    return _FINDER.find_name(module, name)
