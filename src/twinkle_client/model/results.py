"""The results of verbs: values as the library's model returns them, with the attributes that scripts for a server use.

model.calculate_metric(is_training=True)["loss"]          # as on a local model
model.calculate_metric(is_training=True).result["loss"]   # as on a server
"""

import json
from typing import Any

__all__ = ["Number", "Result", "SaveResult", "Text"]


class Result(dict[str, Any]):
    """A dict whose attribute ``result`` is the dict itself."""

    @property
    def result(self) -> dict[str, Any]:
        return self

    def model_dump(self) -> dict[str, Any]:
        return {"result": dict(self)}

    def model_dump_json(self, indent: int | None = None) -> str:
        return json.dumps(self.model_dump(), indent=indent)


class Text(str):
    __slots__ = ()

    @property
    def result(self) -> str:
        return str(self)


class Number(float):
    __slots__ = ()

    @property
    def result(self) -> float:
        return float(self)


class SaveResult(str):
    """A checkpoint's address."""

    __slots__ = ()

    @property
    def twinkle_path(self) -> str:
        return str(self)

    @property
    def checkpoint_dir(self) -> str:
        """Return the address, because the server's directories are not visible to clients."""
        return str(self)

    def model_dump(self) -> dict[str, str]:
        return {"twinkle_path": str(self), "checkpoint_dir": str(self)}

    def model_dump_json(self, indent: int | None = None) -> str:
        return json.dumps(self.model_dump(), indent=indent)
