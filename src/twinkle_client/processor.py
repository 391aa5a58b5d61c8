"""What makes a batch of rows, on the server."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from twinkle_client.client import TwinkleClient
from twinkle_client.remote import RemoteObject

__all__ = ["InputProcessor"]


class InputProcessor(RemoteObject):
    """The library's processor. Models on a server need none: ``model.set_processor("InputProcessor", …)`` is enough."""

    processor_type: ClassVar[str] = "processor"

    def __init__(
        self,
        device_mesh: None = None,
        padding_free: bool = False,
        framework: str = "transformers",
        padding_side: str = "right",
        *,
        client: TwinkleClient | None = None,
    ) -> None:
        super().__init__(client=client, padding_free=padding_free, framework=framework, padding_side=padding_side)
        if device_mesh is not None:
            raise TypeError("device_mesh: allowed is None; the server has its own")

    def __call__(self, inputs: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Any:
        return self.call("__call__", inputs=inputs)
