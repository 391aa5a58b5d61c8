"""Operators of data_juicer, made when they are first used."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from twinkle.extras import require

__all__ = ["Operator"]


class Operator:
    """One operator of data_juicer, for texts instead of its datasets.

    It is made on first use in each process: data_juicer takes seconds to import, and worker processes of a dataset get
    a copy of the step without it. ``needs``: modules that the operator uses. They are required here because data_juicer
    would try to install what is missing.
    """

    def __init__(self, purpose: str, module: str, name: str, needs: Sequence[str] = (), **arguments: Any) -> None:
        # file_utils of data_juicer imports aiohttp, which its distribution does not require
        for needed in ("data_juicer", "aiohttp", *needs):
            require(needed, purpose)
        self._module = module
        self._name = name
        self._arguments = arguments
        self._made: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_made": None}

    def rewrite(self, text: str) -> str:
        """Return the text as a mapper rewrites it."""
        return str(self._operator.process_batched({"text": [text]})["text"][0]) if text else text

    def keeps(self, text: str) -> bool:
        """Return whether a filter keeps the text."""
        from data_juicer.utils.constant import Fields

        samples = self._operator.compute_stats_batched({"text": [text], Fields.stats: [{}]})
        return bool(next(iter(self._operator.process_batched(samples))))

    @property
    def _operator(self) -> Any:
        if self._made is None:
            self._made = getattr(import_module(f"data_juicer.ops.{self._module}"), self._name)(**self._arguments)
        return self._made
