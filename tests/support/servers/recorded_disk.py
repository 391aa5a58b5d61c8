"""Record the order of fsync and rename calls in this process, for tests of what survives a power failure."""

import os
from pathlib import Path

import pytest


class Disk:
    """Records which paths were flushed, and when a path got its final name by a rename."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, Path]] = []
        fsync, replace, rename = os.fsync, os.replace, os.rename

        def record_flush(descriptor: int) -> None:
            self.events.append(("flush", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))
            fsync(descriptor)

        def record_replace(source: Path, target: Path) -> None:
            self.events.append(("name", Path(target)))
            replace(source, target)

        def record_rename(source: Path, target: Path) -> None:
            self.events.append(("name", Path(target)))
            rename(source, target)

        patch.setattr(os, "fsync", record_flush)
        patch.setattr(os, "replace", record_replace)
        patch.setattr(os, "rename", record_rename)

    def flushed(self, *, before: bool, name: Path | None = None) -> list[Path]:
        """Return the paths flushed before or after ``name`` got its name.

        Without ``name`` there must be exactly one rename.
        """
        (named,) = [place for place, (what, path) in enumerate(self.events) if what == "name" and name in (None, path)]
        events = self.events[:named] if before else self.events[named:]
        return [path for what, path in events if what == "flush"]
