"""The objects that all parts of one training service share: its model, the stored state, the scheduler and others."""

from dataclasses import dataclass, field

from twinkle.server.backends.backend import ServedModel
from twinkle.server.backends.compute_thread import Compute
from twinkle.server.config.timings import Timings
from twinkle.server.scheduling.gathering import Gathering
from twinkle.server.scheduling.scheduler import Scheduler
from twinkle.server.services.futures import Futures
from twinkle.server.services.running_ops import RunningOps
from twinkle.server.services.service_loop import BackgroundTasks
from twinkle.server.services.training.measurements import RunMeasurements
from twinkle.server.services.training.run_kind import RunKinds
from twinkle.server.state.files.data_dir import DataDir
from twinkle.server.state.store import Store
from twinkle.server.telemetry.recording import TrainingRecorder
from twinkle.server.tenancy.tenants import Tenants


@dataclass(frozen=True, eq=False)
class TrainingContext:
    """The shared objects of one training service. It is made where services are assembled and passed to each part.

    An object that only one part owns is not here.
    """

    model: ServedModel
    store: Store
    compute: Compute  # the compute thread, to which the trainer belongs
    files: DataDir
    tenants: Tenants
    kinds: RunKinds
    futures: Futures  # what clients wait for
    recorder: TrainingRecorder
    scheduler: Scheduler  # which op runs next
    measurements: RunMeasurements
    running: RunningOps  # the file that says which ops run
    snapshot_seconds: float = Timings.snapshot  # from an op to the next snapshot of its adapter
    gathering: Gathering = field(default_factory=Gathering)  # decides whether a batch waits for more passes
    background: BackgroundTasks = field(default_factory=BackgroundTasks)  # finished before the service ends
