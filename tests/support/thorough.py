"""Choosing which values of a parametrised test run by default; the others run with ``make test-thorough``."""

from collections.abc import Iterable
from typing import Any

import pytest


def by_default(*chosen: Any, of: Iterable[Any]) -> list[Any]:
    """Return the values of ``of``, with the mark ``thorough`` on all that are not among ``chosen``."""
    values = list(of)
    unknown = [value for value in chosen if value not in values]
    assert not unknown, f"not among the values: {unknown}"
    return [value if value in chosen else pytest.param(value, marks=pytest.mark.thorough) for value in values]
