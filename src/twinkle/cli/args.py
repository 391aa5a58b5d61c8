"""The options of training scripts, in groups, with their defaults.

Scripts use the groups they need; ``get_…_args`` returns a group as a dict without the options that are None (for the
model, the template, LoRA and the optimizer with the changes that those methods describe). If two groups have a field of
the same name, the plain name means the field that is marked as primary; the other one is called ``<group>_<name>``.
"""

from dataclasses import asdict, dataclass, field, fields
from typing import Any

__all__ = [
    "Args",
    "CheckpointArgs",
    "DatasetArgs",
    "InfraArgs",
    "LoraArgs",
    "LossArgs",
    "ModelArgs",
    "OptimizerArgs",
    "RLArgs",
    "SamplerArgs",
    "SamplingArgs",
    "SchedulerArgs",
    "ServerArgs",
    "TemplateArgs",
    "TrainingArgs",
]

PRIMARY = "primary"  # in a field's metadata: the plain name means this field, see above


@dataclass
class ModelArgs:
    model_id: str | None = field(default=None, metadata={PRIMARY: True})
    model_cls: str | None = None
    tokenizer_id: str | None = None
    mixed_precision: str = "auto"
    strategy: str = "accelerate"
    memory_efficient_init: bool = False
    gradient_checkpointing: bool = True
    trust_remote_code: bool = False
    load_weights: bool = True
    recompute_granularity: str = "full"
    recompute_method: str = "uniform"
    recompute_num_layers: int = 1
    recompute_modules: list[str] | None = None
    use_distributed_optimizer: bool = True
    variable_seq_lengths: bool = True
    ddp_config: dict[str, Any] | None = None
    fsdp_config: dict[str, Any] | None = None
    grad_scaler_config: dict[str, Any] | None = None
    enable_liger: bool = False
    enable_fused_ce: bool = True


@dataclass
class LoraArgs:
    use_lora: bool = False
    lora_r: int = 8
    lora_alpha: int = 32
    lora_dropout: float = 0.05
    lora_target_modules: str | list[str] | None = None
    adapter_name: str = "default"
    lora_path: str | None = None


@dataclass
class DatasetArgs:
    dataset_id: str = ""
    subset_name: str = "default"
    split: str = "train"
    streaming: bool = False
    num_proc: int | None = None
    data_slice: int | list[int] | None = None
    revision: str | None = None


@dataclass
class TemplateArgs:
    template_cls: str | None = None
    model_id: str | None = None
    max_length: int = 8192
    truncation_strategy: str = "raise"
    use_chat_template: bool = True
    enable_thinking: bool = True
    default_system: str | None = None


@dataclass
class TrainingArgs:
    max_steps: int = 200
    num_train_epochs: int | None = None
    batch_size: int = 8
    mini_batch_size: int | None = None
    micro_batch_size: int = 2
    gradient_accumulation_steps: int = 1
    output_dir: str = "./output"
    save_steps: int = 50
    save_total_limit: int | None = None
    log_interval: int = 10
    eval_interval: int | None = None
    eval_samples: int | None = None
    train_samples: int | None = None
    resume_from_checkpoint: str | None = None
    resume_only_model: bool = False
    ignore_data_skip: bool = False
    seed: int = field(default=42, metadata={PRIMARY: True})
    full_determinism: bool = False
    padding_free: bool = False


@dataclass
class OptimizerArgs:
    optimizer_cls: str = "AdamW"
    learning_rate: float = 1e-5
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0


@dataclass
class SchedulerArgs:
    scheduler_cls: str = "CosineAnnealingLR"
    num_warmup_steps: int = 0
    num_training_steps: int | None = None
    t_max: int | None = None
    eta_min: float = 0.0
    lr_decay_steps: int | None = None
    max_lr: float | None = None


@dataclass
class LossArgs:
    loss_cls: str = "CrossEntropyLoss"
    loss_type: str = "sigmoid"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    beta: float = 0.1
    sft_weight: float = 1.0
    entropy_coef: float = 0.0
    ignore_index: int = -100
    value_clip: float = 0.2


@dataclass
class SamplerArgs:
    sampler_type: str = "vLLMSampler"
    gpu_memory_utilization: float = 0.8
    max_model_len: int | None = None
    tensor_parallel_size: int | None = None
    enable_lora: bool = False
    max_lora_rank: int = 32
    enforce_eager: bool = False


@dataclass
class SamplingArgs:
    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    num_samples: int = 1
    logprobs: int | None = None
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None


@dataclass
class InfraArgs:
    mode: str = "local"
    nproc_per_node: int = 8
    ncpu_proc_per_node: int = 8
    model_gpus: int | None = None
    sampler_gpus: int | None = None
    ref_model_gpus: int | None = None
    critic_model_gpus: int | None = None
    world_size: int | None = None
    dp_size: int | None = None
    fsdp_size: int | None = None
    tp_size: int | None = None
    pp_size: int | None = None
    cp_size: int | None = None
    ep_size: int | None = None
    etp_size: int | None = None
    ep_fsdp_size: int | None = None
    vpp_size: int | None = None
    ulysses_size: int | None = None
    sequence_parallel: bool = False
    lazy_collect: bool = True


@dataclass
class ServerArgs:
    config: str | None = None
    ray_namespace: str = "twinkle_cluster"
    host: str = "0.0.0.0"
    port: int = 8000
    log_level: str = "INFO"


@dataclass
class RLArgs:
    num_generations: int = 8
    advantage_type: str = "GRPOAdvantage"
    advantage_scale: str = "group"
    reward_fns: list[str] | None = None
    student_model_id: str | None = None
    teacher_model_id: str | None = None
    gkd_beta: float = 0.5
    gkd_temperature: float = 1.0
    gkd_topk: int = 64
    router_replay_mode: str = "disabled"
    gamma: float = 1.0
    gae_lambda: float = 0.95
    kl_coef: float = 0.0
    normalize_advantages: bool = True
    critic_learning_rate: float = 1e-5


@dataclass
class CheckpointArgs:
    save_optimizer: bool = True
    merge_and_sync: bool = True
    platform: str = "GPU"
    lora_sync_dir: str | None = None


@dataclass
class Args:
    """All options of a script. ``extra`` holds options whose names no group has: the script's own."""

    model: ModelArgs = field(default_factory=ModelArgs)
    lora: LoraArgs = field(default_factory=LoraArgs)
    dataset: DatasetArgs = field(default_factory=DatasetArgs)
    template: TemplateArgs = field(default_factory=TemplateArgs)
    training: TrainingArgs = field(default_factory=TrainingArgs)
    optimizer: OptimizerArgs = field(default_factory=OptimizerArgs)
    scheduler: SchedulerArgs = field(default_factory=SchedulerArgs)
    loss: LossArgs = field(default_factory=LossArgs)
    sampler: SamplerArgs = field(default_factory=SamplerArgs)
    sampling: SamplingArgs = field(default_factory=SamplingArgs)
    infra: InfraArgs = field(default_factory=InfraArgs)
    server: ServerArgs = field(default_factory=ServerArgs)
    rl: RLArgs = field(default_factory=RLArgs)
    checkpoint: CheckpointArgs = field(default_factory=CheckpointArgs)
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def groups(self) -> dict[str, Any]:
        """Return the groups by name, in order."""
        return {each.name: vars(self)[each.name] for each in fields(self) if each.name != "extra"}

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of ``key`` in the first group that has it, else in ``extra``, else ``default``.

        An option of ``extra`` is found by ``my-flag``, as on the command line, and by ``my_flag``.
        """
        for group in self.groups.values():
            if key in vars(group):
                return vars(group)[key]
        return self.extra.get(key, self.extra.get(key.replace("-", "_"), default))

    def __getitem__(self, key: str) -> Any:
        missing = object()
        value = self.get(key, missing)
        if value is missing:
            raise KeyError(key)
        return value

    def to_dict(self) -> dict[str, Any]:
        """Return all options in one dict; a name that an earlier group has already becomes ``<group>_<name>``."""
        flat: dict[str, Any] = {}
        for name, group in self.groups.items():
            for key, value in asdict(group).items():
                flat[f"{name}_{key}" if key in flat else key] = value
        return {**self.extra, **flat}

    def get_model_args(self) -> dict[str, Any]:
        """Return the options of the model's group that are not None; ``model_id`` defaults to that of the template."""
        return _said({**asdict(self.model), "model_id": self.model.model_id or self.template.model_id})

    def get_lora_args(self) -> dict[str, Any]:
        """Return four arguments of PEFT's ``LoraConfig``; by default, ``target_modules`` is "all-linear"."""
        lora = self.lora
        return {
            "target_modules": lora.lora_target_modules or "all-linear",
            "r": lora.lora_r,
            "lora_alpha": lora.lora_alpha,
            "lora_dropout": lora.lora_dropout,
        }

    def get_dataset_args(self) -> dict[str, Any]:
        return _said(asdict(self.dataset))

    def get_template_args(self) -> dict[str, Any]:
        """Return the options of the template's group that are not None; ``model_id`` defaults to that of the model."""
        return _said({**asdict(self.template), "model_id": self.template.model_id or self.model.model_id})

    def get_training_args(self) -> dict[str, Any]:
        return _said(asdict(self.training))

    def get_optimizer_args(self) -> dict[str, Any]:
        """Return the options of the optimizer's group that are not None, with ``learning_rate`` renamed to ``lr``."""
        said = _said(asdict(self.optimizer))
        return {"lr" if name == "learning_rate" else name: value for name, value in said.items()}

    def get_scheduler_args(self) -> dict[str, Any]:
        return _said(asdict(self.scheduler))

    def get_loss_args(self) -> dict[str, Any]:
        return _said(asdict(self.loss))

    def get_sampler_args(self) -> dict[str, Any]:
        return _said(asdict(self.sampler))

    def get_sampling_args(self) -> dict[str, Any]:
        return _said(asdict(self.sampling))

    def get_infra_args(self) -> dict[str, Any]:
        return _said(asdict(self.infra))

    def get_server_args(self) -> dict[str, Any]:
        return _said(asdict(self.server))

    def get_rl_args(self) -> dict[str, Any]:
        return _said(asdict(self.rl))

    def get_checkpoint_args(self) -> dict[str, Any]:
        return _said(asdict(self.checkpoint))


def _said(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
