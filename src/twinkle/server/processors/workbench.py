"""One session's objects, and the requests about them: bodies as clients sent them in, JSON out."""

import json
from typing import Any

from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.server.processors import catalog
from twinkle.server.processors.arguments import Context, class_named, read_arguments
from twinkle.server.processors.live import BatchRoom, LiveObjects
from twinkle.server.processors.operations import JsonText
from twinkle.server.processors.plain import to_json
from twinkle.server.processors.sources import Sources
from twinkle.server.verbs.features import FIELDS, UNSUPPORTED

__all__ = ["Workbench"]


class Workbench:
    def __init__(self, sources: Sources, most_of_one_batch: int) -> None:
        self.objects = LiveObjects(BatchRoom(most_of_one_batch))
        self._context = Context(self.objects, sources)

    def create(self, body: bytes) -> str:
        """The id of a new object."""
        request = _parsed(body)
        kind, name = _taken(request, "processor_type"), _taken(request, "class_type")
        entry = catalog.entry(kind, name)
        options = read_arguments(name, entry.options, request, self._context)
        made = entry.make(class_named("class_type", name, {name: entry.home}), options, self._context)
        return self.objects.add(kind, name, made).processor_id

    def call(self, body: bytes) -> str:
        """The result of a function, as JSON."""
        request = _parsed(body)
        live = self.objects.get("processor_id", _taken(request, "processor_id"))
        name = _taken(request, "function")
        function = catalog.function(live.processor_type, live.class_name, name)
        arguments = read_arguments(f"{live.class_name}.{name}", function.arguments, request, self._context)
        result = function.run(live, arguments, self._context)
        return result.text if isinstance(result, JsonText) else to_json(result)

    def batch(self, processor_id: str, number: int) -> str:
        """Return the rows of a loader's batch: a line of JSON each, so that the server can read them one by one.

        Of rows that have tokens only the columns that training reads.
        """
        live = self.objects.get("processor_id", processor_id)
        if live.processor_type != "dataloader":
            raise InvalidInputError("processor_id", f"a {live.processor_type}", "a dataloader")
        text = live.batches.get(number)
        if not text.startswith("["):
            raise UnsupportedError("inputs: batches of set_processor are no rows; fetch the rows, or leave it out")
        return "\n".join(json.dumps(_for_training(row)) for row in json.loads(text))


def _for_training(row: Any) -> Any:
    if not isinstance(row, dict) or row.get("input_ids") is None:
        return row
    return {name: row[name] for name in (*FIELDS, *UNSUPPORTED) if row.get(name) is not None}


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        request = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError("body", body[:60], f"JSON ({str(error)[:120]})") from None
    if not isinstance(request, dict):
        raise InvalidInputError("body", request, "a JSON object")
    return request


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _taken(request: dict[str, Any], key: str) -> str:
    value = request.pop(key, None)
    if not isinstance(value, str):
        raise InvalidInputError(key, value, "text")
    return value
