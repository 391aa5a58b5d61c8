"""What all wire types share."""

from pydantic import BaseModel, ConfigDict


class Wire(BaseModel):
    """A JSON object. Keys that it does not name are dropped: client and server may be of different versions."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())


class OpenWire(Wire):
    """Keys that it does not name are arguments of the method that is called; see :meth:`arguments`."""

    model_config = ConfigDict(frozen=True, extra="allow", protected_namespaces=())

    @property
    def arguments(self) -> dict[str, object]:
        return dict(self.__pydantic_extra__ or {})
