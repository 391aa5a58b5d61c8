"""Which versions a sampler holds. Each is on disk as well: dropping one costs a read when it is wanted again.

A version in use is pinned. Others are dropped when their session has ended, when nobody sampled from them for a while,
and when there are too many, least recently used first. Used in the compute thread.
"""

from collections import Counter
from pathlib import Path

from twinkle.errors import CheckpointError, GoneError
from twinkle.sampler.types import Sampler
from twinkle.server.services.checkpoints.access import without_server_paths
from twinkle.server.state.files.data_dir import DataDir
from twinkle.server.state.files.file_checksums import check_files
from twinkle.server.types import SamplingSessionRecord


class SamplerVersions:
    def __init__(self, sampler: Sampler, files: DataDir, *, most: int, idle_seconds: float) -> None:
        self._sampler = sampler
        self._files = files
        self._most = most
        self._idle_seconds = idle_seconds
        self._pins: Counter[str] = Counter()  # requests under way
        self._last_used: dict[str, float] = {}
        self._unwanted: set[str] = set()  # their session has ended

    def pin(self, session: SamplingSessionRecord, now: float) -> None:
        """Keep the session's version in the sampler until :meth:`unpin`; reads it from disk where it must."""
        version_id = session.version_id
        if version_id is None:
            return
        if version_id not in self._sampler.version_ids():
            self._load(session, version_id)
        self._pins[version_id] += 1
        self._last_used[version_id] = now

    def unpin(self, session: SamplingSessionRecord, now: float) -> None:
        version_id = session.version_id
        if version_id is not None:
            self._pins[version_id] -= 1
            self._last_used[version_id] = now

    def release(self, version_id: str) -> None:
        """Note that no session will ask for the version again."""
        self._unwanted.add(version_id)

    def drop_unused(self, now: float, *, memory_is_short: bool = False) -> None:
        """Drop versions that are released, long idle or too many; all that no request uses, when memory is short."""
        loaded = self._sampler.version_ids()
        for version_id in loaded:  # one that was just published was not asked for yet
            self._last_used.setdefault(version_id, now)
        idle = sorted((one for one in loaded if not self._pins[one]), key=self._last_used.__getitem__)
        too_many = max(0, len(loaded) - (0 if memory_is_short else self._most))
        for place, version_id in enumerate(idle):
            old = now - self._last_used[version_id] > self._idle_seconds
            if place < too_many or old or version_id in self._unwanted:
                self._sampler.retire(version_id)
        held = set(self._sampler.version_ids())
        self._unwanted &= held
        self._last_used = {version_id: at for version_id, at in self._last_used.items() if version_id in held}
        self._pins = +self._pins

    def _load(self, session: SamplingSessionRecord, version_id: str) -> None:
        name = session.model_path or session.sampling_session_id
        if session.directory is None:  # of a live adapter: the weights it had lately are nowhere else
            raise GoneError(f"{name} has trained on since this request came: send it again")
        directory: Path = self._files.root / session.directory
        if not directory.exists():
            raise CheckpointError(f"the weights of {name} are gone: they were deleted or replaced")

        def load() -> None:
            check_files(directory)
            self._sampler.load_version(version_id, str(directory))

        without_server_paths(load, directory, name)
