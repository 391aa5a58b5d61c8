"""What a launch on Ray waits for, as lines for people. Nothing here calls Ray."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from twinkle.server.config.demand import Demand, described, total_cpus, total_gpus

Report = Callable[[str], None]
_TAIL_BYTES = 4096


def shortages(demands: Sequence[Demand], total: Mapping[str, float], waiting: Collection[str]) -> list[str]:
    """Return what the cluster has too little of, such as "2 GPUs: the cluster has 0 (needed by application m)".

    ``total``: what the whole cluster has. ``waiting``: the applications that do not run yet.
    """
    lines = []
    for resource, needed in (("GPU", total_gpus(demands)), ("CPU", total_cpus(demands))):
        there = total.get(resource, 0.0)
        if needed > there:
            users = [
                one for one in demands if one.application in waiting and (one.gpus if resource == "GPU" else one.cpus)
            ]
            names = ", ".join(dict.fromkeys(one.application for one in users))
            parts = described(demands, resource)
            lines.append(
                f"{needed:g} {resource}s: the cluster has {there:g} (needed by application {names}; in all {parts})"
            )
    return lines


@dataclass(frozen=True)
class Waiting:
    """An application that does not run yet, although the cluster is large enough for it.

    ``replicas``: how many replicas of each of its deployments are in which state, such as {"m-0": {"STARTING": 1}}.
    ``reason``: what Serve says about it; None: nothing. ``last_lines``: the last log line of its replicas, by name.
    """

    name: str
    replicas: Mapping[str, Mapping[str, int]]
    reason: str | None
    last_lines: Mapping[str, str]

    def line(self, demands: Sequence[Demand], free: Mapping[str, float]) -> str:
        """Return what is known about it. ``free``: what nobody in the cluster uses now."""
        own = [one for one in demands if one.application == self.name]
        counts = {
            deployment: ", ".join(f"{number} {state.lower()}" for state, number in states.items())
            for deployment, states in self.replicas.items()
        }
        parts = [f"{deployment}: {count or 'no replica'}" for deployment, count in counts.items()]
        parts = parts or ["Serve has not begun with it"]
        parts += [f"{replica} logged last: {line}" for replica, line in self.last_lines.items()]
        parts += [] if self.reason is None else [f"Serve says: {self.reason}"]
        if not self.last_lines:  # no process of it has begun
            needed = f"{total_cpus(own):g} CPUs and {total_gpus(own):g} GPUs"
            free_now = f"{free.get('CPU', 0.0):g} CPUs and {free.get('GPU', 0.0):g} GPUs"
            parts.append(f"it needs {needed}, and {free_now} of the cluster are free")
        return f"{self.name} does not run yet. {'; '.join(parts)}"


def reason_in(messages: Iterable[str]) -> str | None:
    """Return the line of Serve's messages that says most: the last one with an error, else the last one."""
    lines = [line.strip() for message in messages for line in message.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else None)


def last_log_lines(data_dir: Path, replicas: Iterable[str], since: float) -> dict[str, str]:
    """Return the last line of each replica's log, if it was written after ``since``, a time of the clock."""
    found = {}
    for name in replicas:
        file = data_dir / "logs" / f"{name}.log"
        try:
            if file.stat().st_mtime < since:
                continue
            with file.open("rb") as log:
                log.seek(max(0, file.stat().st_size - _TAIL_BYTES))
                lines = log.read().decode(errors="replace").strip().splitlines()
        except OSError:  # the replica has not begun, or logs on a machine whose disk this one does not see
            continue
        if lines:
            found[name] = lines[-1]
    return found


class ThrottledReport:
    """Reports a line when it changes, and the same line again after 30, 60, 120, … seconds, at most 10 minutes."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._line = ""
        self._at = 0.0
        self._pause = 0.0

    def __call__(self, line: str) -> None:
        now = time.monotonic()
        if line != self._line:
            self._pause = 30.0
        elif now < self._at + self._pause:
            return
        else:
            self._pause = min(600.0, 2 * self._pause)
        self._line, self._at = line, now
        self._report(line)
