"""The applications of a server: the gateway, models, samplers and processors, each with arguments of its own."""

import re
from typing import Annotated, Literal

from pydantic import BaseModel, Field, ValidationInfo, ValidatorFunctionWrapHandler, field_validator

from twinkle.server.config.allowed import STRICT, Rule, refusal
from twinkle.server.config.placement import DeploymentOptions, DeviceGroup, DeviceMesh
from twinkle.server.config.sections import Directory

__all__ = ["ARGUMENTS", "PROCESSOR_PLACEMENT", "ApplicationSpec", "ModelArgs", "ProcessorArgs", "SamplerArgs"]
__all__ += ["ServerArgs"]

_WORD = re.compile(r"\S+")
_DEVICE = re.compile(r"cpu|cuda(:\d+)?", re.A)
_ROUTE = re.compile(r"/|(/[\w.~-]+)+", re.A)


def _matching(pattern: re.Pattern[str], words: str) -> Rule:
    def check(text: str) -> str:
        if not pattern.fullmatch(text):
            raise ValueError
        return text

    return Rule(check, words)


def _model_names(names: tuple[object, ...]) -> tuple[str, ...]:
    """Each is a name, or a mapping with the one key model_name."""
    plain = [one["model_name"] if isinstance(one, dict) and list(one) == ["model_name"] else one for one in names]
    checked = tuple(name for name in plain if isinstance(name, str) and _WORD.fullmatch(name))
    if len(checked) != len(names):
        raise ValueError
    return checked


Name = Annotated[str, _matching(_WORD, "a name without spaces")]
Names = Annotated[tuple[Name, ...], Field(strict=False)]
ModelNames = Annotated[
    tuple[object, ...], Field(strict=False), Rule(_model_names, "a list of names, or of mappings {model_name: NAME}")
]
Device = Annotated[str, _matching(_DEVICE, "cpu, cuda or cuda:N")]
Route = Annotated[str, _matching(_ROUTE, "a path such as /api/v1")]

_MODEL_ID = "The model: `org/name` or `hf://…`, `ms://…`, `pypi://…`, `random://…` or a directory; any name for mock."
_GROUP = "Devices of the application; the embedded runtime takes the kind and number of one device from it."
_MESH = "Layout of the devices; the embedded runtime has one."
_PROCESSES = "Processes on each machine; the embedded runtime has one."
_NO_EFFECT = "no effect on the embedded runtime."


class ServerArgs(BaseModel):
    """Arguments of the gateway (`import_path: server`)."""

    model_config = STRICT

    supported_models: ModelNames | None = Field(
        default=None,
        description="Names that get_server_capabilities lists, in this order; null is every name of every model.",
    )


class ModelArgs(BaseModel):
    """Arguments of a base model that is trained (`import_path: model`)."""

    model_config = STRICT

    model_id: Name = Field(description=_MODEL_ID)
    backend: Literal["transformers", "megatron", "mock"] = Field(
        description="What computes: transformers, mock (numpy, made-up numbers) for tests, or megatron, which can be "
        "configured and not launched yet."
    )
    aliases: Names = Field(default=(), description="Other names under which the model answers.")
    dtype: Literal["bf16", "fp32"] | None = Field(
        default=None, description="Number format; null lets the device decide."
    )
    device: Device | None = Field(
        default=None, description="Device; null is the device_group's, else CUDA where there is one."
    )
    compiled: bool = Field(
        default=False, description="Compile the decoder layers at start: slower start, faster steps on CUDA."
    )
    max_tokens_per_batch: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Upper bound of the tokens computed at once; null is what memory allows."
    )
    memory_budget_gib: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="Memory for weights, adapters and activations together; null is what is free."
    )
    merge: bool = Field(default=True, description="Compute the requests of several tenants in one device batch.")
    nproc_per_node: int = Field(default=1, ge=1, description=_PROCESSES)
    device_group: DeviceGroup | None = Field(default=None, description=_GROUP)
    device_mesh: DeviceMesh | None = Field(default=None, description=_MESH)

    @property
    def compute_device(self) -> str | None:
        """`device`, else that of the device_group; None: nobody said."""
        return self.device or (self.device_group.device if self.device_group else None)

    @property
    def processes(self) -> int:
        """How many train together."""
        in_group = self.device_group.processes if self.device_group else 1
        return max(self.nproc_per_node, in_group, self.device_mesh.size if self.device_mesh else 1)


class SamplerArgs(BaseModel):
    """Arguments of sampling on a base model (`import_path: sampler`). torch can share the trainer's weights."""

    model_config = STRICT

    model_id: Name = Field(description="The `model_id` of a model application.")
    sampler_type: Literal["torch", "mock", "vllm"] = Field(
        description="torch or vllm for a model on transformers, mock for one on mock."
    )
    engine_args: dict[str, object] | None = Field(
        default=None,
        description="Arguments of vLLM's engine under vLLM's names; only for vllm. It has weights of its own: on a GPU "
        "`gpu_memory_utilization` here and `memory_budget_gib` of the model divide the memory, and both must be set; "
        "in a process of its own the former is enough.",
    )
    memory_dir: Directory | None = Field(
        default=None,
        description="Where vLLM finds the weights of versions: a directory in memory; null is /dev/shm. Only for vllm.",
    )
    nproc_per_node: int = Field(default=1, ge=1, description=_PROCESSES)
    device_group: DeviceGroup | None = Field(
        default=None,
        description="Devices; the embedded runtime uses the model's. On Ray a group with another name than the model's "
        "gives the sampler a process of its own.",
    )
    device_mesh: DeviceMesh | None = Field(default=None, description=_MESH)


class ProcessorArgs(BaseModel):
    """Arguments of datasets and loaders on the server (`import_path: processor`): a process for each session."""

    model_config = STRICT

    max_workers: int = Field(
        default=16, ge=1, description="Sessions that may have processors at the same time; each has a process."
    )
    ncpu_proc_per_node: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description=f"On Ray: replicas, where deployments[0] says no number; {_NO_EFFECT}"
    )
    nproc_per_node: int = Field(default=1, ge=1, description=f"The same; {_NO_EFFECT}")
    device_group: DeviceGroup | None = Field(default=None, description=f"Its `ranks` are the same; {_NO_EFFECT}")
    device_mesh: DeviceMesh | None = Field(default=None, description="No effect: there is nothing to lay out.")

    @property
    def processes(self) -> int:
        """Replicas, unless the deployment says how many; each has the processes of its sessions besides."""
        in_group = self.device_group.processes if self.device_group else 1
        return max(self.ncpu_proc_per_node or 1, self.nproc_per_node, in_group)


# Keys of ProcessorArgs that are for the Ray runtime.
PROCESSOR_PLACEMENT = frozenset({"ncpu_proc_per_node", "nproc_per_node", "device_group", "device_mesh"})

ARGUMENTS: dict[str, type[BaseModel]] = {
    "server": ServerArgs,
    "model": ModelArgs,
    "sampler": SamplerArgs,
    "processor": ProcessorArgs,
}
Arguments = ServerArgs | ModelArgs | SamplerArgs | ProcessorArgs


class ApplicationSpec(BaseModel):
    """One service of the server."""

    model_config = STRICT

    name: Name = Field(description="Name of the application; each has its own.")
    import_path: Literal["server", "model", "sampler", "processor"] = Field(
        description="Which service; decides `args`."
    )
    route_prefix: Route | None = Field(
        default=None,
        description="/api/v1 for server, /api/v1/processor for processor, /api/v1/model/NAME and /api/v1/sampler/NAME "
        "for the others, where NAME becomes another name of the model. null is the same with the model's own name.",
    )
    args: Arguments = Field(default_factory=dict, validate_default=True, description="Arguments of that service.")
    deployments: Annotated[tuple[DeploymentOptions, ...], Field(strict=False, max_length=1)] = Field(
        default=(), description="Ray Serve options; no effect on the embedded runtime."
    )

    @field_validator("args", mode="wrap")
    @classmethod
    def _by_import_path(cls, value: object, _: ValidatorFunctionWrapHandler, info: ValidationInfo) -> object:
        """The one schema that ``import_path`` names; a union of all would report the errors of each."""
        if "import_path" not in info.data:  # wrong itself, and reported
            return value
        schema = ARGUMENTS[info.data["import_path"]]
        if isinstance(value, BaseModel) and not isinstance(value, schema):
            raise refusal(schema.__name__)
        return schema.model_validate(value)
