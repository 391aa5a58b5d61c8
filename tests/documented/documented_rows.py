"""Statements of the existing Twinkle's public documents that needed work here, numbered from 1.

Documents: A and B, overview and server configuration of the older layout; C and D, the same of the newer layout; E,
developer notes. Each row has one test, ``test_row_NN_…``, in this folder; ``test_walk.py`` checks that none is missing.
A row with a reason does not work word for word; its reason is in
docs/compatibility.md, and its test shows what a user meets instead.
"""

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["works", "reason"]


@dataclass(frozen=True)
class Row:
    number: int
    document: str
    statement: str
    outcome: Outcome = "works"


_REASON: Outcome = "reason"

_STATEMENTS: tuple[tuple[str, str] | tuple[str, str, Outcome], ...] = (
    ("A", "two server modes, `server_type: twinkle` and `server_type: tinker`", _REASON),
    ("A", "`use_megatron: true`"),
    ("A", "changing `from twinkle import` to `from twinkle_client import` migrates local code"),
    ("A", "very large models with Megatron's parallel strategies"),
    ("A", "`cookbook/client/twinkle/transformer/{server.py,server_config.yaml}`"),
    ("A", "`cookbook/client/twinkle/megatron/{server.py,server_config.yaml}`"),
    ("A", "`cookbook/client/twinkle/grpo.py`"),
    ("A", "`cookbook/client/twinkle/sample.py`"),
    ("A", "`cookbook/client/twinkle/self_congnition.py`"),
    ("A", "`cookbook/client/tinker/transformer/{server.py,server_config.yaml}`"),
    ("A", "`cookbook/client/tinker/megatron/{server.py,server_config.yaml}`"),
    ("A", "`cookbook/client/tinker/megatron/server_config_7b.yaml`"),
    ("A", "`cookbook/client/tinker/lora.py`"),
    ("A", "`cookbook/client/tinker/sample.py`"),
    ("A", "`cookbook/client/tinker/self_congnition.py`, training and evaluation"),
    ("A", "`cookbook/client/tinker/short_math_grpo.py`"),
    ("A", "`python cookbook/client/tinker/transformer/server.py`"),
    ("A", "`python cookbook/client/tinker/lora.py`"),
    ("C", "`backend: megatron`"),
    ("C", "rewriting the imports migrates local code"),
    ("C", "`transformer/server_config_e2e.yaml`"),
    ("C", "`megatron/run.sh`"),
    ("C", "`cookbook/client/server/megatron/server_config.yaml`", _REASON),
    ("C", "`cookbook/client/server/megatron/server_config_4b.yaml`"),
    ("C", "`twinkle/self_host/multi_modal.py`"),
    ("C", "`twinkle/self_host/self_congnition.py`"),
    ("C", "`twinkle/modelscope/multi_modal.py`"),
    ("C", "`twinkle/modelscope/self_congnition.py`"),
    ("C", "`tinker/self_host/multi_modal.py`"),
    ("C", "a tree that shows `cookbook/twinkle` and `cookbook/tinker`", _REASON),
    ("B", "`python -m twinkle.server --config server_config.yaml`"),
    ("B", "`python -m twinkle.server --config … --server-type tinker`"),
    ("B", "`-c, --config` is required"),
    ("B", "`-t, --server-type`, by default twinkle"),
    ("B", "`--log-level`, by default `INFO`"),
    ("B", "the Twinkle YAML file, word for word"),
    ("B", "`server_type: twinkle`"),
    ("B", "`host: 0.0.0.0`"),
    ("B", "a server application with `route_prefix: /server` and empty `args:`"),
    ("B", "deployments named `TwinkleServer`, `ModelManagement`, `ProcessorManagement`, …"),
    ("B", "`autoscaling_config`: min_replicas, max_replicas, target_ongoing_requests", _REASON),
    ("B", "`ray_actor_options.num_cpus: 0.1`"),
    ("B", "`route_prefix: /models/Qwen/Qwen2.5-7B-Instruct`"),
    ("B", "`device_group.ranks` are the numbers of the GPUs to use"),
    ("B", "a processor application with `route_prefix: /processors`"),
    ("B", "`nproc_per_node` and `ncpu_proc_per_node` of a processor", _REASON),
    ("B", "`device_group` and `device_mesh` of a processor", _REASON),
    ("B", "the Megatron fragment of the YAML file"),
    ("B", "Megatron needs no `adapter_config`"),
    ("B", "the Tinker YAML file, word for word"),
    ("B", "`sampler_type: vllm` or `torch`"),
    ("B", "a processor in Twinkle mode only, a sampler in both modes", _REASON),
    ("B", "`mesh_dim_names` dp, tp, pp", _REASON),
    ("D", "the package `twinkle.server.common`: datum, io_utils, router, serialize, …"),
    ("D", "the package `twinkle.server.gateway` with `build_server_app`", _REASON),
    ("D", "the package `twinkle.server.model` with `build_model_app`", _REASON),
    ("D", "the module `model.backends.megatron_model`", _REASON),
    ("D", "the package `twinkle.server.processor` with `build_processor_app`", _REASON),
    ("D", "the package `twinkle.server.sampler` with `build_sampler_app`", _REASON),
    ("D", "`python -m twinkle.server` is the simplified command line"),
    ("D", "`twinkle_client.types.checkpoint` with `ResolvedLoadPath`"),
    ("D", "the response with a checkpoint's path in `twinkle_client.types.server`"),
    ("D", "`twinkle.server.utils.task_queue` with `schedule_task_and_wait`", _REASON),
    ("D", "endpoints under `/tinker/*`"),
    ("D", "a heartbeat request and route of processors"),
    ("D", "verbs of the client return typed pydantic responses"),
    ("D", "`twinkle_client.processor.base`"),
    ("D", "`twinkle_client.http.utils`: settings, session id, `/api/v1`"),
    ("D", "`twinkle_client.http.http_utils`: session header, the server's text in errors"),
    ("D", "`twinkle_client.http.heartbeat`"),
    ("D", "`ServerStateProxy`", _REASON),
    ("D", "`checkpoint_base`", _REASON),
    ("D", "`adapter_max_lifetime`"),
    ("D", "an internal proxy to `/tinker/*` on deployments", _REASON),
    ("D", "`twinkle.infra._ray.ray_helper` with `RayHelper`", _REASON),
    ("D", "`twinkle.hub.hub`: a push that did not succeed is an error"),
    ("D", "setup.cfg with flake8", _REASON),
    ("D", "`cookbook/transformers/sp_fsdp_dense.py`: sequence parallelism with FSDP"),
    ("D", "`cookbook/transformers/fsdp2.py`"),
    ("D", "`twinkle/self_host/self_congnition.py` with the combined step"),
    ("D", "`twinkle/self_host/grpo.py` on GSM8K"),
    ("D", "Megatron's configurations with a processor application"),
    ("D", "`megatron/server.py` uses server_config_4b.yaml by default"),
    ("D", "README_ZH.md"),
    ("E", "`twinkle.utils.platform` and `twinkle.utils.framework`"),
    ("E", "`twinkle.model.multi_lora_transformers`"),
    ("E", "`twinkle.sampler.vllm_sampler`"),
    ("E", "services in `twinkle.server.twinkle`", _REASON),
    ("E", "a small lazy API, `_LazyModule`", _REASON),
    ("E", "`python -m unittest` runs the tests, one of which draws the infra graph", _REASON),
    ("E", "GPU or NPU by platform, ranks from the environment", _REASON),
    ("E", "`MultiAdapter` wraps the base model", _REASON),
    ("E", "FSDP is refused for multi-LoRA", _REASON),
    ("E", "`poetry install --with transformers,ray`", _REASON),
    ("E", "`python cookbook/client/server.py`, server_config.yaml"),
    ("E", "the model application binds MultiLoraTransformersModel", _REASON),
    ("E", "`VLLMEngine`, `twinkle.patch.vllm_lora_weights`, `twinkle.sampler.vllm_engine`", _REASON),
    ("E", "determinism sets variables such as CUDA_LAUNCH_BLOCKING", _REASON),
    ("E", "`vLLMSampler`: set_template, set_processor, sample() on trajectories", _REASON),
)

ROWS = tuple(Row(number, *row) for number, row in enumerate(_STATEMENTS, 1))
