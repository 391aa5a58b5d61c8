"""The versions in a sampler's memory: which are loaded, kept and dropped. Used in the compute thread.

A saved version is also on disk, so that one that was dropped is read again with the next request for it. A version that
running requests use is pinned. Others are dropped when they are released, when they were not used for a while, when
there are too many (least recently used first), and when memory is short (all of them).

The files of an unnamed version that is used are marked from time to time, because the gateway deletes old ones that are
not.
"""

from collections import Counter
from pathlib import Path

from twinkle.errors import CheckpointError, GoneError, TwinkleError
from twinkle.sampler.types import Sampler
from twinkle.server.services.checkpoints.access import without_server_paths
from twinkle.server.state.files.data_dir import DataDir
from twinkle.server.state.files.file_checksums import check_files
from twinkle.server.types import SamplingSessionRecord


class SamplerVersions:
    """The versions of one sampler. :meth:`drop_unused` keeps at most ``most`` of them, unless more are in use, and
    drops a version that was not used for ``idle_seconds``.
    """

    def __init__(
        self, sampler: Sampler, files: DataDir, *, most: int, idle_seconds: float, mark_seconds: float
    ) -> None:
        """``mark_seconds``: the least time between marks of a version's files."""
        self._sampler = sampler
        self._files = files
        self._most = most
        self._idle_seconds = idle_seconds
        self._pins: Counter[str] = Counter()  # running requests, by version
        self._last_used: dict[str, float] = {}
        self._mark_seconds = mark_seconds
        self._marked: dict[str, float] = {}
        self._unwanted: set[str] = set()  # versions whose sampling sessions have ended

    def pin(self, session: SamplingSessionRecord, now: float) -> None:
        """Keep the session's version in the sampler until :meth:`unpin`; read it from disk if it is not loaded.

        GoneError: it was dropped and was never saved. CheckpointError: its files are gone or damaged.
        """
        version_id = session.version_id
        if version_id is None:
            return
        if version_id not in self._sampler.version_ids():
            self._load(session, version_id)
        self._pins[version_id] += 1
        self._note_use(session, version_id, now)

    def unpin(self, session: SamplingSessionRecord, now: float) -> None:
        version_id = session.version_id
        if version_id is not None:
            self._pins[version_id] -= 1
            self._note_use(session, version_id, now)

    def shown(self, session: SamplingSessionRecord, error: TwinkleError) -> TwinkleError:
        """Return the error of a session's request with the session's name in the place of the server's directory."""
        if session.directory is None or str(self._files.root / session.directory) not in str(error):
            return error
        name = session.model_path or session.sampling_session_id
        return CheckpointError(str(error).replace(str(self._files.root / session.directory), name))

    def release(self, version_id: str) -> None:
        """Note that no session needs the version any more, so that it is dropped when no request uses it."""
        self._unwanted.add(version_id)

    def drop_unused(self, now: float, *, memory_is_short: bool = False) -> None:
        """Drop unpinned versions that are released, idle for too long or too many.

        ``memory_is_short``: drop all versions that no request uses.
        """
        loaded = self._sampler.version_ids()
        for version_id in loaded:  # a version that was just published has not been used yet
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
        self._marked = {version_id: at for version_id, at in self._marked.items() if version_id in held}
        self._pins = +self._pins

    def _note_use(self, session: SamplingSessionRecord, version_id: str, now: float) -> None:
        self._last_used[version_id] = now
        if session.directory is None or version_id != session.sampling_session_id:
            return  # only unnamed versions have files of their own
        marked = self._marked.get(version_id)
        if marked is None or now - marked >= self._mark_seconds:
            self._marked[version_id] = now
            self._files.mark_used(session.directory)

    def _load(self, session: SamplingSessionRecord, version_id: str) -> None:
        name = session.model_path or session.sampling_session_id
        if session.directory is None:  # a version of a live adapter is not on disk: once dropped, it cannot be loaded
            raise GoneError(f"{name} was trained further, and its weights from before are gone: send the request again")
        directory: Path = self._files.root / session.directory
        if not directory.exists():
            raise CheckpointError(f"the weights of {name} are gone: they were deleted or replaced")

        def load() -> None:
            check_files(directory)
            self._sampler.load_version(version_id, str(directory))

        without_server_paths(load, directory, name)
