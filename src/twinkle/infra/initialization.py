"""``twinkle.initialize``: what a program decides once, before it makes anything."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from twinkle.environment import Mode, read_environment, read_launch
from twinkle.errors import InvalidInputError
from twinkle.framework_util import seed_everything
from twinkle.infra.components import forget_components
from twinkle.infra.device_group import DeviceGroup, GroupPlan, plan_groups
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.notifier import Notifier, report_uncaught
from twinkle.utils.logger import get_logger
from twinkle.utils.requirements import requires

__all__ = ["Settings", "current_seed", "current_settings", "initialize", "process_lock", "restore_settings", "shutdown"]

_DEFAULT_SEED = 42


@dataclass(frozen=True)
class Settings:
    """What :func:`initialize` was told. ``seed`` None: nothing was seeded. ``plans``: the groups, if any were given."""

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
    """Seed everything, set up logging, and say where components run.

    What is not given here is taken from the environment (TWINKLE_MODE, TWINKLE_NAME, TWINKLE_NOTIFIER,
    TWINKLE_FULL_DETERMINISM), else ``mode`` is local.

    ``mode`` local: in this process, or in each of those that torchrun started. ``ray``: what is constructed with
    ``remote_group=`` runs on workers of that one of ``groups``, on a cluster that this process is connected to already,
    that RAY_ADDRESS names, or that is started here.

    ``nproc_per_node`` and ``ncpu_proc_per_node`` are how many devices, or processes of a CPU group, one machine has.
    ``global_device_mesh`` is for components that are given none; by default the processes share the rows of a batch.
    ``lazy_collect``: calls through proxies return promises, which cost nothing to hand on. ``name`` is the program's,
    for its log lines; ``notifier`` is told of an exception that nobody caught.
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
    """End the workers, give their resources back, and forget what :func:`initialize` was told."""
    global _settings
    if _settings.mode == "ray":
        from twinkle.infra.ray_resources import release

        release()
    forget_components()
    report_uncaught(None, None)
    _settings = Settings()


def current_settings() -> Settings:
    """Those of :func:`initialize`; before it, the mode that the environment says."""
    return _settings if _settings != Settings() else replace(_settings, mode=read_environment().mode)


def restore_settings(settings: Settings) -> None:
    """Make a worker process what its driver says."""
    global _settings
    _settings = settings


def current_seed() -> int:
    """The seed of what was given none: TWINKLE_SEED, else that of :func:`initialize`, else 42."""
    for seed in (read_environment().seed, _settings.seed):
        if seed is not None:
            return seed
    return _DEFAULT_SEED


def _local_mesh(plans: tuple[GroupPlan, ...], mesh: DeviceMesh | None) -> DeviceMesh:
    """Every group, and the mesh, is all processes that were launched together."""
    world_size = read_launch().world_size
    processes = f"{world_size}: this program has so many processes (torchrun starts more, mode='ray' other ones)"
    for plan in plans:
        if len(plan.ranks) != world_size:
            raise InvalidInputError(f"ranks of group {plan.name!r}", list(plan.ranks), processes)
    if mesh is None:
        return DeviceMesh.from_sizes(dp_size=world_size, device_type=plans[0].platform.prefix if plans else None)
    if mesh.world_size != world_size:
        raise InvalidInputError("global_device_mesh", f"{mesh.world_size} ranks", processes)
    return mesh


def _prepare_ray(plans: tuple[GroupPlan, ...]) -> None:
    requires("ray")
    if not plans:
        raise InvalidInputError("groups", None, "one or more DeviceGroups where mode is 'ray'")
    from twinkle.infra.ray_resources import acquire

    acquire(plans)


@contextmanager
def process_lock(name: str) -> Iterator[None]:
    """Run the body in one process at a time. The lock is the kernel's: a process that dies gives it back."""
    from filelock import FileLock

    folder = read_environment().cache_dir / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    safe = "".join(c if c.isalnum() or c in "-_" else "_" for c in name)
    with FileLock(folder / f"{safe}.lock"):
        yield
