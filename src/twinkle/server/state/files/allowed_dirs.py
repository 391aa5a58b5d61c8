"""Directories of this machine that tenants may name."""

from collections.abc import Sequence
from pathlib import Path

from twinkle.errors import InvalidInputError


def allowed_path(field: str, text: str, allowed: Sequence[Path]) -> Path:
    """``text`` as a path, without links; raises unless it lies in one of the directories that the server's owner named.

    Whether it exists is not told for any other place.
    """
    path = Path(text)
    if path.is_absolute() and "\x00" not in text:
        resolved = path.resolve()
        if any(resolved.is_relative_to(directory.resolve()) for directory in allowed):
            return resolved
    where = "an absolute path in one of the server's allowed_dirs" if allowed else "nothing: allowed_dirs is empty"
    raise InvalidInputError(field, text, where)
