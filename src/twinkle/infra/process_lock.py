"""A lock between the processes of one machine (and of all machines that share its cache directory)."""

from collections.abc import Iterator
from contextlib import contextmanager

from twinkle.environment import read_environment

__all__ = ["process_lock"]


@contextmanager
def process_lock(name: str) -> Iterator[None]:
    """Run the body in one process at a time. The lock is the kernel's: a process that dies gives it back."""
    from filelock import FileLock

    folder = read_environment().cache_dir / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    safe = "".join(c if c.isalnum() or c in "-_" else "_" for c in name)
    with FileLock(folder / f"{safe}.lock"):
        yield
