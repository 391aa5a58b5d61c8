"""What the parts of one model service share: its model, the state, and the objects that all of them call."""

from dataclasses import dataclass, field

from twinkle.server.backends.backend import ServedModel
from twinkle.server.backends.compute_thread import Compute
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
    """Made where services are assembled, and handed to each part. What a part alone owns is not here."""

    model: ServedModel
    store: Store
    compute: Compute  # the thread that the trainer belongs to
    files: DataDir
    tenants: Tenants
    kinds: RunKinds
    futures: Futures  # what clients wait for
    recorder: TrainingRecorder
    scheduler: Scheduler  # which op runs next
    measurements: RunMeasurements
    running: RunningOps  # on disk, what runs
    background: BackgroundTasks = field(default_factory=BackgroundTasks)  # they end before the service does
