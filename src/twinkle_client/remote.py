"""Objects of the library's classes that live on the server: created by class name, called by method name.

An object is created on the server when it is first needed. As an argument of a request it is sent as its id. Code is
never sent.

The functions of this module are shared by all client classes that mirror a class of the library: they check names of
classes, models and checkpoints.
"""

import os
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

from twinkle_client.client.current import default_client
from twinkle_client.client.json_body import encode
from twinkle_client.client.session import TwinkleClient, parsed
from twinkle_client.errors import GoneError, InvalidRequestError, invalid
from twinkle_client.protocol.sessions import ProcessorCallResponse, ProcessorCreateResponse
from twinkle_client.protocol.verbs import SaveResponse

__all__ = [
    "RemoteObject",
    "address_of",
    "class_name",
    "component",
    "function_argument",
    "is_folder",
    "is_own_code",
    "model_name",
    "next_of",
    "service_path",
]

_PATH = "/processor/twinkle"
# Every server knows the classes of these packages by name.
_KNOWN_PACKAGES = frozenset({"torch", "twinkle", "twinkle_client"})
_EXHAUSTED = "iterator exhausted"
_VERSION = re.compile(r"[@?].*|==.*")  # of a model id: a revision, an option of random://, or a version of a package


class RemoteObject:
    """An object of the class ``class_type`` on the server; ``options`` are the arguments of its constructor.

    ``parameters`` are the names of the constructor's positional arguments. ``class_type`` is by default the name of the
    Python class.
    """

    processor_type: ClassVar[str]
    parameters: ClassVar[tuple[str, ...]] = ()

    def __init__(self, *arguments: Any, client: TwinkleClient | None = None, **options: Any) -> None:
        self.class_type = type(self).__name__
        self.options = _named(self.class_type, self.parameters, arguments, options)
        self._given_client = client
        self._client: TwinkleClient | None = None
        self._processor_id: str | None = None
        self._lock = threading.Lock()

    @property
    def client(self) -> TwinkleClient:
        if self._client is None:
            self._client = default_client() if self._given_client is None else self._given_client
        return self._client

    @property
    def processor_id(self) -> str:
        """Return the object's id, ``pid:…``. The first access creates the object on the server."""
        with self._lock:
            if self._processor_id is None:
                fields = {"processor_type": self.processor_type, "class_type": self.class_type, **self.options}
                answer = self.client.post(f"{_PATH}/create", encode(fields), once=True)
                self._processor_id = parsed(ProcessorCreateResponse, answer, self.client.base_url).processor_id
            return self._processor_id

    def call(self, function: str, **arguments: Any) -> Any:
        """Call a method of the object on the server and return its result."""
        fields = {"processor_id": self.processor_id, "function": function, **arguments}
        answer = self.client.post(f"{_PATH}/call", encode(fields), once=True)
        return parsed(ProcessorCallResponse, answer, self.client.base_url).result

    def close(self) -> None:
        """Delete the object on the server. The end of the session deletes it as well."""
        with self._lock:
            made = self._processor_id is not None
        if made:
            self.call("close")
            with self._lock:
                self._processor_id = None

    def recreate(self, options: Mapping[str, Any], prepare: Callable[[], None]) -> None:
        """Replace the object on the server by one with other options, on which ``prepare`` has been called.

        If that fails, the object is what it was.
        """
        before, self.options = self.options, dict(options)
        with self._lock:
            old, self._processor_id = self._processor_id, None
        try:
            _ = self.processor_id
            prepare()
        except BaseException:
            self.options, self._processor_id = before, old
            raise
        if old is not None:
            self.client.post(f"{_PATH}/call", encode({"processor_id": old, "function": "close"}), once=True)

    def to_wire(self) -> str:
        return self.processor_id

    def __repr__(self) -> str:
        return f"{self.class_type}({self._processor_id or 'not made yet'})"


def next_of(iterator: RemoteObject, **arguments: Any) -> Any:
    """Return the next item of an iterator on the server; raise StopIteration at its end.

    The server answers 410 at the end, but also for a session or a batch that is gone. The text of the answer tells
    them apart; in the latter cases the error is raised.
    """
    try:
        return iterator.call("__next__", **arguments)
    except GoneError as error:
        if _EXHAUSTED not in error.detail.lower():
            raise
    raise StopIteration


# --- names of classes -------------------------------------------------------------------------------------------------


def component(field: str, what: object, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return class name and constructor arguments of ``what``: a name, a class of the library, or a remote object."""
    if isinstance(what, RemoteObject):
        return what.class_type, {**what.options, **options}
    return class_name(field, what), dict(options)


def function_argument(field: str, what: object) -> "str | RemoteObject":
    """Return the argument of a dataset's map or filter: a remote object, or the name of a class of the library."""
    return what if isinstance(what, RemoteObject) else class_name(field, what)


def is_own_code(what: object) -> bool:
    """Return whether ``what`` is a function, class or object of the script, which only the client can call.

    Everything else is known to the server by name: the library's classes, and objects of the client's own classes. A
    script's class that inherits from one of them is the script's code.
    """
    if isinstance(what, type):
        return what.__module__.split(".")[0] not in _KNOWN_PACKAGES
    if isinstance(what, RemoteObject):
        return type(what).__module__.split(".")[0] != "twinkle_client"
    return callable(what)


def class_name(field: str, what: object) -> str:
    if isinstance(what, str):
        return what
    if isinstance(what, type) and what.__module__.split(".")[0] in _KNOWN_PACKAGES:
        return what.__name__
    if callable(what):
        raise InvalidRequestError(
            f"{field}: {what!r} is code of this program, which is never shipped to the server. Give the name of one of "
            "the library's classes, or apply it here and send the rows: DatasetMeta(data=[…])"
        )
    raise invalid(field, what, "the name of one of the library's classes")


def _named(
    class_type: str, parameters: tuple[str, ...], arguments: tuple[Any, ...], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return all arguments by name, as requests carry them."""
    if len(arguments) > len(parameters):
        raise TypeError(f"{class_type}: {len(arguments)} positional arguments, at most {len(parameters)} are known")
    named = dict(zip(parameters, arguments, strict=False))
    for name in options:
        if name in named:
            raise TypeError(f"{class_type}: {name} is given twice")
    return {**named, **options}


# --- models and samplers ----------------------------------------------------------------------------------------------


def id_text(model_id: str | os.PathLike[str]) -> str:
    """Return a model id as text. A path object is a folder of this machine, and its text is absolute."""
    if isinstance(model_id, os.PathLike):
        return str(Path(model_id).expanduser().absolute())
    return model_id


def model_name(model_id: str | os.PathLike[str]) -> str:
    """Return the name under which a server has a model.

    It is the id without scheme and version, ``ms://Qwen/Qwen3-4B`` is served as ``Qwen/Qwen3-4B``; a folder is served
    under its last name.
    """
    model_id = id_text(model_id)
    name = model_id.split("://", 1)[-1] if isinstance(model_id, str) else ""
    name = name.rstrip("/").rpartition("/")[2] if is_folder(name) else _VERSION.sub("", name)
    if not name:
        raise invalid("model_id", model_id, "the id of a model that the server has")
    return name


def address_of(checkpoint: object) -> str:
    """Return a checkpoint's address: that of an answer to ``save``, or the text of anything else, such as a path."""
    return checkpoint.twinkle_path if isinstance(checkpoint, SaveResponse) else str(checkpoint)


def is_folder(model_id: str) -> bool:
    """Return whether a model id is a path; the server tells paths from names in the same way."""
    return model_id.startswith(("/", "~", "."))


def service_path(service: str, name: str) -> str:
    """Return the path of a model's routes; ``service`` is model or sampler. The name may contain slashes."""
    return f"/{service}/{quote(name.strip('/'))}/twinkle"
