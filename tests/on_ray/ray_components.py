"""Small remote classes. They have their own module because workers import it."""

import os
import signal
import time

from twinkle.errors import InvalidInputError
from twinkle.infra import DeviceGroup, remote_class, remote_function

GROUPS = [
    DeviceGroup("work", 2, "CPU"),
    DeviceGroup("cards", 4, "GPU", gpus_per_worker=2),
    DeviceGroup("data", 1, "CPU"),
]


def crossed(n_workers, i, args, kwargs, device_mesh):
    return (f"{args[0]} for {i} of {n_workers}", device_mesh.world_size), {}


def biggest(results, device_mesh):
    return max(results), device_mesh.world_size


class RefusalError(Exception):
    def __init__(self, reason, code):
        super().__init__(reason, code)
        self.code = code


@remote_class()
class Rows:
    """Returns what its workers received."""

    def __init__(self, start=0, device_mesh=None):
        if start < 0:
            raise InvalidInputError("start", start, "a number ≥ 0")
        self.start = start
        self.device_mesh = device_mesh
        self.seen = []

    @remote_function(dispatch="slice", collect="none", lazy_collect=False)
    def sliced(self, rows, word="w"):
        return self.rank(), rows, word

    @remote_function(dispatch="slice_dp", collect="none", lazy_collect=False)
    def by_data(self, batch, scale=None):
        return [self.rank(), batch, scale]

    @remote_function(dispatch="slice_dp", collect="flatten")
    def doubled(self, rows):
        self.seen.append(list(rows))
        return [2 * row for row in rows]

    @remote_function(dispatch=crossed, collect="none", lazy_collect=False)
    def dispatched_by_function(self, text, size):
        return [text, size]

    @remote_function(dispatch="all", collect=biggest, lazy_collect=False)
    def collected_by_function(self):
        return 10 + self.rank()

    @remote_function(dispatch="all", collect="mean", lazy_collect=False)
    def mean(self, scale=1.0):
        return {"loss": scale * self.rank(), "name": f"rank {self.rank()}"}

    @remote_function(dispatch="all", collect="sum", lazy_collect=False)
    def total(self):
        return self.rank() + 1

    @remote_function(execute="first", collect="first", lazy_collect=False)
    def first_only(self, rows):
        return self.rank(), rows

    @remote_function(execute="peer", collect="none", lazy_collect=False)
    def peers(self):
        return self.rank()

    @remote_function(dispatch="all", collect="none", lazy_collect=False)
    def ask_peers(self, other):
        return other.peers()

    @remote_function(dispatch="all", collect="last_pp_first", lazy_collect=False)
    def of_last_stage(self):
        return self.rank()

    @remote_function(dispatch="all", collect="none", lazy_collect=False)
    def variables(self, names):
        return [{name: os.environ.get(name) for name in names}]

    @remote_function(dispatch="all", collect="none", lazy_collect=False)
    def seen_rows(self):
        return self.seen

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def data_rank(self):
        return self.device_mesh.data_rank, self.device_mesh.world_size

    @remote_function(dispatch="all", lazy_collect=False)
    def refuse(self, rank, code):
        if self.rank() == rank:
            raise RefusalError("no", code)
        return "fine"

    @remote_function(dispatch="all")
    def refuse_later(self, value):
        raise InvalidInputError("value", value, "nothing")

    @remote_function(dispatch="all", lazy_collect=False)
    def die(self, rank):
        if self.rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)  # like a worker that waits for the others in a collective

    @remote_function(dispatch="all", lazy_collect=False, timeout=0.5)
    def hang(self):
        time.sleep(600)

    @remote_function(dispatch="all", sync=True)
    def remember(self, rows):
        self.seen.append(rows)

    @remote_function(dispatch="all", collect="mean", lazy_collect=False)
    def reduced(self):
        import torch
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo")
        value = torch.tensor(float(self.rank() + 1))
        dist.all_reduce(value, group=self.device_mesh.get_dim_group("dp"))
        return value.item()

    def rank(self):
        return int(os.environ["RANK"]) + self.start


class Sealed:
    """Rows that only worker processes can unpickle."""

    def __init__(self, rows):
        self.rows = rows

    def __reduce__(self):
        return _opened, (self.rows,)


def _opened(rows):
    assert "RANK" in os.environ, "the driver has looked at the rows"
    return Sealed(rows)


@remote_class(execute="first")
class Source:
    """Yields batches like a data loader."""

    def __init__(self, batches):
        self.batches = batches

    @remote_function()
    def __iter__(self):
        return iter(self.batches)

    @remote_function()
    def __len__(self):
        return len(self.batches)

    @remote_function()
    def sealed(self):
        return Sealed([row for batch in self.batches for row in batch])

    @remote_function()
    def opened(self, sealed, offset):
        return [row + offset for row in sealed.rows]

    @remote_function(lazy_collect=False)
    def doubled_elsewhere(self, other, rows):
        """A worker that calls another component's workers gets results, not promises."""
        answer = other.doubled(rows)
        return type(answer).__name__, answer
