"""Where an application runs: device groups and meshes, and the Ray Serve options of its deployment.

The embedded runtime is one process on one device: a model or sampler that asks for more is refused (rules.py). Serve's
options are checked for both runtimes and take effect on Ray only.
"""

import re
from math import prod
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from twinkle.server.config.messages import Rule, SparseSection, Words, refusal

_DEVICE_TYPES = {"cpu": "cpu", "cuda": "cuda", "gpu": "cuda"}
_SIZES = ("world_size", "dp_size", "fsdp_size", "tp_size", "pp_size", "cp_size")
_OTHER_SIZES = ("ulysses_size", "ep_size", "etp_size", "ep_fsdp_size", "vpp_size")


def _device_type(text: str) -> str:
    if text.lower() not in _DEVICE_TYPES:
        raise ValueError
    return _DEVICE_TYPES[text.lower()]


def _mesh(value: object) -> object:
    """Return nested lists of ranks as nested tuples; ValueError for an empty list or a part that is no rank (≥ 0)."""
    if type(value) is int and value >= 0:
        return value
    if isinstance(value, list | tuple) and value:
        return tuple(_mesh(part) for part in value)
    raise ValueError


def _deployment_name(text: str) -> str:
    """Return the name; ValueError for characters that have a meaning in Serve's names of replicas and in file names."""
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", text):
        raise ValueError
    return text


def _queue(value: int) -> int:
    if value != -1 and value < 1:
        raise ValueError
    return value


def _gpus(value: float) -> float:
    """Return the number; ValueError for one that Ray refuses: it gives a process parts of one GPU, or whole GPUs."""
    if not 0 <= value < float("inf") or (value > 1 and value != int(value)):
        raise ValueError
    return value


Size = Annotated[int, Field(ge=1)]
Number = Annotated[int, Field(ge=0)]
Numbers = Annotated[tuple[Number, ...], Field(strict=False, min_length=1)]
Text = Annotated[str, Field(min_length=1)]
GpuList = Annotated[str, Field(pattern=r"^ *[0-9]+ *(, *[0-9]+ *)*$")]
Ranks = Annotated[Size | Numbers, Words("a number of processes ≥ 1 or a list of ranks")]
VisibleDevices = Annotated[Number | GpuList | Numbers, Words("a device number, several, or text such as 0,1")]
DeviceType = Annotated[str, Rule(_device_type, "cpu, cuda or gpu (the server does not run on NPUs)")]
DeploymentName = Annotated[str, Rule(_deployment_name, "letters, digits and the characters _ . -")]
Dimension = Literal["dp", "fsdp", "tp", "pp", "cp", "ep", "ep_fsdp"]


class DeviceGroup(SparseSection):
    """The devices of an application. The embedded runtime uses one."""

    name: Text
    """Name of the group."""
    ranks: Ranks = 1
    """Number of processes, or a list with the number of each process's GPU. On Ray all listed GPUs are on one machine,
    and without a list Ray chooses them. Numbers count the GPUs that the machine's CUDA_VISIBLE_DEVICES leaves, from 0.
    With `device_type: cpu` a list only says how many processes there are."""
    device_type: DeviceType
    """Kind of device."""
    gpus_per_worker: Size = 1
    """Devices of one process. More than 1 are for vLLM with its own process on Ray."""
    visible_devices: VisibleDevices | None = None
    """Numbers of the GPUs to use, instead of those in `ranks`."""

    @property
    def processes(self) -> int:
        return len(self.ranks) if isinstance(self.ranks, tuple) else self.ranks

    @property
    def device(self) -> str:
        """Return the group's one or first device in torch's notation, such as ``cuda:1``.

        The index of a GPU is that of ``visible_devices``, else a rank that is listed; without either it has none.
        """
        chosen = self.visible_devices if self.visible_devices is not None else self.ranks
        named = self.visible_devices is not None or isinstance(self.ranks, tuple)
        index = str(chosen[0]) if isinstance(chosen, tuple) else str(chosen)
        return f"cuda:{index}" if named and self.device_type == "cuda" else self.device_type

    @property
    def visible_count(self) -> int:
        """Return how many devices ``visible_devices`` names; 1 if it is null."""
        named = self.visible_devices
        return len(named) if isinstance(named, tuple) else len(str(named).split(","))

    @property
    def named_gpus(self) -> tuple[int, ...]:
        """Return the numbers of the GPUs that the group names, in the order of its processes; () if it names none."""
        if self.device_type != "cuda":
            return ()
        if self.visible_devices is None:
            return self.ranks if isinstance(self.ranks, tuple) else ()
        named = self.visible_devices
        return named if isinstance(named, tuple) else tuple(int(part) for part in str(named).split(","))


class DeviceMesh(SparseSection):
    """How the devices are laid out: either sizes, or `mesh` with `mesh_dim_names`."""

    device_type: DeviceType | None = None
    """Kind of device; null: that of device_group."""
    world_size: Size | None = None
    """Total number of processes; null: the product of the sizes."""
    dp_size: Size | None = None
    """Data parallel size."""
    fsdp_size: Size | None = None
    """Sharded data parallel size."""
    tp_size: Size | None = None
    """Tensor parallel size."""
    pp_size: Size | None = None
    """Pipeline parallel size."""
    cp_size: Size | None = None
    """Context parallel size."""
    ulysses_size: Size | None = None
    """Sequence parallel size (Ulysses). Only 1: the server does not divide sequences."""
    ep_size: Size | None = None
    """Expert parallel size."""
    etp_size: Size | None = None
    """Tensor parallel size of the experts."""
    ep_fsdp_size: Size | None = None
    """Sharded data parallel size of the experts."""
    vpp_size: Size | None = None
    """Number of virtual pipeline stages."""
    sequence_parallel: bool = False
    """Split sequences between tensor parallel ranks."""
    mesh: Annotated[object, Rule(_mesh, "nested lists of ranks")] | None = None
    """The ranks, nested once for each dimension."""
    mesh_dim_names: Annotated[tuple[Dimension, ...], Field(strict=False)] | None = None
    """Names of the dimensions of `mesh`."""

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.mesh is None) != (self.mesh_dim_names is None):
            raise refusal("mesh together with mesh_dim_names, or sizes (dp_size, fsdp_size, …) alone")
        given = [name for name in _SIZES if getattr(self, name) is not None]
        if self.mesh is not None and given:
            raise refusal(f"either mesh with mesh_dim_names or {', '.join(given)}, not both")
        if self.mesh is None or self.mesh_dim_names is None:
            return self
        if _depth(self.mesh) != len(self.mesh_dim_names):
            raise refusal("as many mesh_dim_names as mesh has levels of lists, all of one depth")
        if _shape(self.mesh) is None:
            raise refusal("a mesh whose lists of one level all have the same length")
        if sorted(_ranks(self.mesh)) != list(range(_count(self.mesh))):
            last = _count(self.mesh) - 1
            raise refusal(f"a mesh with each number from 0 to {last} once: they are processes (ranks names GPUs)")
        if len(set(self.mesh_dim_names)) < len(self.mesh_dim_names):
            raise refusal("mesh_dim_names that are all different")
        return self

    @property
    def size(self) -> int:
        """Return the number of all processes: the ranks in ``mesh``, or the larger of world_size and the product."""
        if self.mesh is not None:
            return _count(self.mesh)
        given = [getattr(self, name) or 1 for name in _SIZES if name != "world_size"]
        return max(self.world_size or 1, prod(given))

    @property
    def dimensions(self) -> dict[str, int]:
        """Return the sizes of the dimensions of ``mesh`` by name; empty if there is no ``mesh``."""
        if self.mesh is None or self.mesh_dim_names is None:
            return {}
        return dict(zip(self.mesh_dim_names, _shape(self.mesh) or (), strict=True))

    def larger_than_one(self) -> list[str]:
        """Return the keys whose size is above 1, and ``mesh`` if it has several ranks."""
        sizes = [name for name in (*_SIZES, *_OTHER_SIZES) if (getattr(self, name) or 1) > 1]
        return sizes if self.mesh is None or _count(self.mesh) == 1 else ["mesh", *sizes]


def _depth(mesh: object) -> int:
    """Return the number of levels of lists; -1 if it is not the same everywhere."""
    if not isinstance(mesh, tuple):
        return 0
    depths = {_depth(part) for part in mesh}
    return -1 if len(depths) > 1 or -1 in depths else 1 + depths.pop()


def _shape(mesh: object) -> tuple[int, ...] | None:
    """Return the lengths of the lists at each level; None if they differ within a level."""
    if not isinstance(mesh, tuple):
        return ()
    shapes = {_shape(part) for part in mesh}
    inner = shapes.pop()
    return None if shapes or inner is None else (len(mesh), *inner)


def _ranks(mesh: object) -> list[int]:
    if isinstance(mesh, tuple):
        return [rank for part in mesh for rank in _ranks(part)]
    assert isinstance(mesh, int), "checked by the schema"
    return [mesh]


def _count(mesh: object) -> int:
    return len(_ranks(mesh))


# --- Ray Serve --------------------------------------------------------------------------------------------------------


Seconds = Annotated[float, Field(ge=0)]
Factor = Annotated[float, Field(gt=0)]
Texts = Annotated[tuple[str, ...], Field(strict=False)]


class AutoscalingConfig(SparseSection):
    """Autoscaling by Ray Serve."""

    min_replicas: Number | None = None
    """Minimum number of replicas."""
    max_replicas: Size | None = None
    """Maximum number of replicas."""
    initial_replicas: Number | None = None
    """Replicas at the start."""
    target_ongoing_requests: Factor | None = None
    """Target for the average number of requests in progress on a replica."""
    upscale_delay_s: Seconds | None = None
    """Seconds above the target before a replica is added."""
    downscale_delay_s: Seconds | None = None
    """Seconds below the target before a replica is removed."""
    downscale_to_zero_delay_s: Seconds | None = None
    """The same delay for the last replica."""
    upscaling_factor: Factor | None = None
    """How fast replicas are added."""
    downscaling_factor: Factor | None = None
    """How fast replicas are removed."""
    look_back_period_s: Factor | None = None
    """Seconds over which requests are averaged."""


class RuntimeEnv(SparseSection):
    """The environment of a replica's process."""

    env_vars: dict[str, str] = Field(default_factory=dict)
    """Environment variables, as text."""
    working_dir: str | None = None
    """A directory or archive that becomes the working directory of replicas."""
    py_modules: Texts | None = None
    """Python modules that replicas can import."""
    pip: Texts | None = None
    """Packages that are installed for replicas."""


class RayActorOptions(SparseSection):
    """Resources that Ray reserves for a replica.

    For a group of processes, num_cpus, num_gpus and env_vars are those of each.
    """

    num_cpus: Annotated[float, Field(ge=0)] | None = None
    """Number of CPUs."""
    num_gpus: Annotated[float, Rule(_gpus, "a number from 0 to 1, or a whole number above 1")] | None = None
    """Number of GPUs. If `device_group` names GPUs: the part of each GPU that a process takes."""
    memory: Annotated[float, Field(ge=0)] | None = None
    """Bytes of memory."""
    resources: dict[str, float] | None = None
    """Custom resources of the cluster."""
    accelerator_type: Text | None = None
    """Kind of GPU, as Ray names it."""
    runtime_env: RuntimeEnv | None = None
    """Environment of the replica."""


class DeploymentOptions(SparseSection):
    """Options of the application's Ray Serve deployment. They have no effect on the embedded runtime."""

    name: DeploymentName | None = None
    """Name of the deployment, as Ray Serve shows it. If a model or the processors have several
    replicas, -0, -1, … follows it."""
    num_replicas: Size | None = None
    """Number of replicas; no effect beside `autoscaling_config`."""
    max_ongoing_requests: Size | None = None
    """Most requests in progress on one replica. Each long poll counts as one. null: 4096."""
    max_queued_requests: Annotated[int, Rule(_queue, "-1 (no limit) or an integer ≥ 1")] | None = None
    """Most requests that wait for a replica, in each calling process. Further requests are answered with 503."""
    autoscaling_config: AutoscalingConfig | None = None
    """Autoscaling."""
    ray_actor_options: RayActorOptions | None = None
    """Resources and environment of a replica."""
    health_check_period_s: Factor | None = None
    """Seconds between two health checks of a replica."""
    health_check_timeout_s: Factor | None = None
    """Seconds that a replica may take to answer a health check."""
    graceful_shutdown_wait_loop_s: Seconds | None = None
    """While a replica shuts down: seconds between two checks whether it has finished."""
    graceful_shutdown_timeout_s: Seconds | None = None
    """Seconds that a replica may take to finish its work before it is killed; null: 300."""

    @property
    def replicas(self) -> int | None:
        """Return the number of replicas, with autoscaling the largest; None: the deployment does not give one."""
        most = None if self.autoscaling_config is None else self.autoscaling_config.max_replicas
        return self.num_replicas if most is None else most
