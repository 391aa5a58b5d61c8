"""The library's verbs on one served model, loaded when the first native adapter comes: they need torch."""

import threading
from typing import TYPE_CHECKING

from twinkle.server.backends.backend import ServedModel
from twinkle.server.verbs.templates import Templates

if TYPE_CHECKING:
    from twinkle.server.verbs.adapters import NativeAdapters


class NativeHost:
    def __init__(self, model: ServedModel, templates: Templates) -> None:
        self._model = model
        self._templates = templates
        self._adapters: NativeAdapters | None = None
        self._lock = threading.Lock()

    @property
    def adapters(self) -> "NativeAdapters":
        with self._lock:
            if self._adapters is None:
                from twinkle.server.verbs.adapters import NativeAdapters

                self._adapters = NativeAdapters(self._model, self._templates)
            return self._adapters

    # Of an adapter that may be of the other protocol, so that torch is not loaded for nothing:

    def is_settled(self, adapter_id: str) -> bool:
        return self._adapters is None or self._adapters.is_settled(adapter_id)

    def dump(self, adapter_id: str) -> bytes | None:
        return None if self._adapters is None else self._adapters.dump(adapter_id)

    def restore(self, adapter_id: str, state: bytes) -> None:
        """Bring back what :meth:`dump` returned."""
        self.adapters.restore(adapter_id, state)

    def drop_window(self, adapter_id: str) -> None:
        """Forget what was counted of a gradient that is dropped."""
        if self._adapters is not None:
            self._adapters.drop_window(adapter_id)

    def remove(self, adapter_id: str) -> None:
        if self._adapters is not None:
            self._adapters.remove(adapter_id)
