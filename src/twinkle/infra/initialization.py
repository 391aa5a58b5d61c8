"""``twinkle.initialize``: the settings that a program makes once, before it constructs components."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from twinkle.environment import Mode, read_environment, read_launch
from twinkle.errors import InvalidInputError
from twinkle.extras import require
from twinkle.framework_util import seed_everything
from twinkle.infra.components import forget_components
from twinkle.infra.device_group import DeviceGroup, GroupPlan, plan_groups
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.notifier import Notifier, report_uncaught
from twinkle.utils.logger import get_logger

__all__ = [
    "Settings",
    "adapter_seed",
    "current_seed",
    "current_settings",
    "initialize",
    "process_lock",
    "restore_settings",
    "shutdown",
]

_DEFAULT_SEED = 42


@dataclass(frozen=True)
class Settings:
    """The settings of :func:`initialize`. ``seed`` None: nothing was seeded. ``plans``: the groups, if any."""

    mode: Mode = "local"
    seed: int | None = None
    full_determinism: bool = False
    name: str | None = None
    plans: tuple[GroupPlan, ...] = ()
    mesh: DeviceMesh | None = None
    lazy_collect: bool = True


# One program has one mode and one seed; everything that reads them is made after initialize().
_settings = Settings()


def initialize(
    mode: Mode | None = None,
    nproc_per_node: int = 8,
    ncpu_proc_per_node: int = 8,
    seed: int | None = _DEFAULT_SEED,
    full_determinism: bool = False,
    groups: Sequence[DeviceGroup] | None = None,
    global_device_mesh: DeviceMesh | None = None,
    lazy_collect: bool = True,
    name: str | None = None,
    notifier: Notifier | None = None,
) -> None:
    """Seed Python, numpy and torch (unless ``seed`` is None), set up logging, and choose where components run.

    ``mode``, ``name``, ``notifier`` and ``full_determinism``, if they are not given, are taken from the environment
    (TWINKLE_MODE, TWINKLE_NAME, TWINKLE_NOTIFIER, TWINKLE_FULL_DETERMINISM); the default ``mode`` is local.

    ``mode`` local: components run in this process, or in each process that torchrun started. ``ray``: components that
    are constructed with ``remote_group=`` run on the workers of that group of ``groups``. The Ray cluster is the one
    that this process is connected to already, else the one that RAY_ADDRESS names, else one that runs on this machine,
    else one that is started here.

    ``nproc_per_node`` is the number of devices, ``ncpu_proc_per_node`` the number of processes of a CPU group, on one
    machine. ``global_device_mesh`` is the mesh of components that are given none; by default the processes divide the
    rows of a batch. ``lazy_collect``: calls through proxies return promises (:class:`LazyResult`) unless the method
    says otherwise; promises can be passed to other components without copying the data to this process. ``name`` is the
    program's name in the first log line and in notifications; ``notifier`` is notified of an uncaught exception.
    """
    global _settings
    told = read_environment()
    mode = told.mode if mode is None else mode
    if mode not in ("local", "ray"):
        raise InvalidInputError("mode", mode, "'local' or 'ray'")
    logger = get_logger()
    plans = () if groups is None else plan_groups(groups, nproc_per_node, ncpu_proc_per_node)
    if mode == "local":
        global_device_mesh = _local_mesh(plans, global_device_mesh)
    else:
        _prepare_ray(plans)
    full_determinism = full_determinism or told.full_determinism
    if seed is not None:
        seed_everything(seed, full_determinism)
    name = told.name if name is None else name
    if notifier is None and told.notifier is not None:
        notifier = Notifier.from_dict(told.notifier)
    report_uncaught(notifier, name)
    _settings = Settings(mode, seed, full_determinism, name, plans, global_device_mesh, lazy_collect)
    logger.info(f"{name or 'twinkle'}: mode {mode}, seed {seed}")


def shutdown() -> None:
    """End the workers, release their resources, and reset the settings of :func:`initialize`."""
    global _settings
    if _settings.mode == "ray":
        from twinkle.infra.ray_resources import release

        release()
    forget_components()
    report_uncaught(None, None)
    _settings = Settings()


def current_settings() -> Settings:
    """Return the settings of :func:`initialize`; before it is called, the defaults with the mode of TWINKLE_MODE."""
    return _settings if _settings != Settings() else replace(_settings, mode=read_environment().mode)


def restore_settings(settings: Settings) -> None:
    """Take over the driver's settings in a worker process."""
    global _settings
    _settings = settings


def current_seed() -> int:
    """Return the seed for components that are given none: TWINKLE_SEED, else that of :func:`initialize`, else 42."""
    for seed in (read_environment().seed, _settings.seed):
        if seed is not None:
            return seed
    return _DEFAULT_SEED


def adapter_seed(adapter_name: str, seed: int | None = None) -> int | None:
    """Return the seed of a new adapter's weights, made of the seed of :func:`initialize` and the adapter's name.

    seed: that of a model, which replaces the one of ``initialize``. The result is None without both: ``initialize`` was
    not called, or with ``seed=None``. The client of a server makes the same seed, so the adapters of a script begin
    with the same weights on a server.
    """
    seed = _settings.seed if seed is None else seed
    if seed is None:
        return None
    return int.from_bytes(hashlib.sha256(f"{seed}\n{adapter_name}".encode()).digest()[:4])


def _local_mesh(plans: tuple[GroupPlan, ...], mesh: DeviceMesh | None) -> DeviceMesh:
    """Return the mesh for mode local, where each group and the mesh must contain all processes of the launch."""
    world_size = read_launch().world_size
    processes = f"{world_size}, the number of processes of this program (start more with torchrun, or use mode='ray')"
    for plan in plans:
        if len(plan.ranks) != world_size:
            raise InvalidInputError(f"ranks of group {plan.name!r}", list(plan.ranks), processes)
    if mesh is None:
        return DeviceMesh.from_sizes(dp_size=world_size, device_type=plans[0].platform.prefix if plans else None)
    if mesh.world_size != world_size:
        raise InvalidInputError("global_device_mesh", f"{mesh.world_size} ranks", processes)
    return mesh


def _prepare_ray(plans: tuple[GroupPlan, ...]) -> None:
    require("ray", "initialize(mode='ray')")
    if not plans:
        raise InvalidInputError("groups", None, "one or more DeviceGroups where mode is 'ray'")
    from twinkle.infra.ray_resources import acquire

    acquire(plans)


@contextmanager
def process_lock(name: str) -> Iterator[None]:
    """Run the body in one process at a time, for each ``name``. The kernel frees the file lock if its process dies."""
    from filelock import FileLock

    folder = read_environment().cache_dir / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    safe = "".join(c if c.isalnum() or c in "-_" else "_" for c in name)
    with FileLock(folder / f"{safe}.lock"):
        yield
