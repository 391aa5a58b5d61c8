"""The input processor, which makes a batch of rows on the server."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from twinkle_client.client.log_lines import left_to_server
from twinkle_client.client.session import TwinkleClient
from twinkle_client.remote import RemoteObject

__all__ = ["InputProcessor"]


class InputProcessor(RemoteObject):
    """The library's InputProcessor. A model does not need this object: ``model.set_processor("InputProcessor", …)`` is
    enough."""

    processor_type: ClassVar[str] = "processor"

    def __init__(
        self,
        device_mesh: object = None,
        padding_free: bool = False,
        framework: str = "transformers",
        padding_side: str = "right",
        *,
        client: TwinkleClient | None = None,
    ) -> None:
        left_to_server("InputProcessor", device_mesh=device_mesh)
        super().__init__(client=client, padding_free=padding_free, framework=framework, padding_side=padding_side)

    def __call__(self, inputs: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Any:
        return self.call("__call__", inputs=inputs)
