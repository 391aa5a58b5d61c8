"""The functions behind the catalog: they make the objects of a session, call their methods and iterate over them."""

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from operator import methodcaller
from typing import TYPE_CHECKING, Any

from twinkle.dataset import Dataset
from twinkle.errors import InvalidInputError
from twinkle.hub.construction import check_options
from twinkle.server.processors.arguments import Context
from twinkle.server.processors.live import Live, NoRoomError
from twinkle.server.processors.messages import to_json
from twinkle.server.processors.sources import check_images
from twinkle.server.wire.image_files import NOTHING_OUTSIDE

if TYPE_CHECKING:
    from twinkle.template import Template

Make = Callable[[type, dict[str, Any], Context], Any]
Run = Callable[[Live, dict[str, Any], Context], object]

_LOAD_OPTIONS = ("revision", "token")


@dataclass(frozen=True)
class JsonText:
    """The result of a function as JSON text, which is sent as it is."""

    text: str


# --- making -----------------------------------------------------------------------------------------------------------


def make(made: type, options: dict[str, Any], _: Context) -> Any:
    check_options(made, options)
    return made(**options)


def make_dataset(made: type[Dataset], options: dict[str, Any], context: Context) -> Dataset:
    own = {name: value for name, value in options.items() if name not in ("dataset_meta", *_LOAD_OPTIONS)}
    dataset = made(**own)
    if options.get("dataset_meta") is not None:
        _add(dataset, options, context)
    return dataset


def make_template(made: "type[Template]", options: dict[str, Any], context: Context) -> "Template":
    check_options(made, options)
    name = options["model_id"]
    template = made(**{**options, "model_id": context.sources.model_folder(name)})
    template.model_id = name  # error messages show the client's name of the model, not its folder
    # Rows have the files of their images, which are much smaller than patches. The model's process decodes them.
    template.image_source, template.decodes_images = NOTHING_OUTSIDE, False
    return template


# --- calling ----------------------------------------------------------------------------------------------------------


def method(name: str) -> Run:
    """Return a function that calls the object's method of this name."""

    def run(live: Live, arguments: dict[str, Any], _: Context) -> object:
        try:
            inspect.signature(getattr(live.thing, name)).bind(**arguments)
        except TypeError as error:
            raise InvalidInputError(f"arguments of {name}", sorted(arguments), f"others ({error})") from None
        return methodcaller(name, **arguments)(live.thing)

    return run


def changing(name: str) -> Run:
    """Return a function that calls a method which changes the object, so that the next item begins a new pass."""
    run_method = method(name)

    def run(live: Live, arguments: dict[str, Any], context: Context) -> object:
        result = run_method(live, arguments, context)
        live.course.forget()
        return result

    return run


def add_dataset(live: Live, arguments: dict[str, Any], context: Context) -> None:
    if arguments.get("dataset_meta") is None:
        raise InvalidInputError("dataset_meta", None, "a DatasetMeta")
    _add(live.thing, arguments, context)


def _add(dataset: Dataset, arguments: dict[str, Any], context: Context) -> None:
    options = {name: arguments[name] for name in _LOAD_OPTIONS if name in arguments}
    context.sources.add(dataset, arguments["dataset_meta"], **options)


def cast_column(live: Live, arguments: dict[str, Any], _: Context) -> None:
    """Check that a column can hold images. They stay files here, whatever ``decode`` says: templates read them."""
    if "column" not in arguments:
        raise InvalidInputError("arguments of cast_column", sorted(arguments), "also column")
    for rows in live.thing.datasets.values():
        check_images(rows, arguments["column"])


def set_template(live: Live, arguments: dict[str, Any], context: Context) -> None:
    """Set a dataset's template: ``template_cls`` for an IterablePackingDataset, else ``template_func``.

    It is an object, or a class that is made with the other arguments.
    """
    name = "template_cls" if live.class_name == "IterablePackingDataset" else "template_func"
    if name not in arguments:
        raise InvalidInputError(f"arguments of {live.class_name}.set_template", sorted(arguments), f"also {name}")
    options = {key: value for key, value in arguments.items() if key != name}
    template = arguments[name]
    if isinstance(template, type):
        template, options = make_template(template, options, context), {}
    live.thing.set_template(template, **options)


def begin(live: Live, _arguments: dict[str, Any], _: Context) -> str:
    live.course.begin(live.thing)
    return "ok"


def next_row(live: Live, _arguments: dict[str, Any], _: Context) -> object:
    return live.course.next(live.thing)


def next_batch(live: Live, arguments: dict[str, Any], context: Context) -> JsonText:
    """Return the next batch, or with ``by_reference`` a reference to its rows. Either way it is numbered and kept.

    A batch that a processor has collated is not a list of rows: it has no reference and is returned itself.
    """
    batch = live.course.next(live.thing)
    text = to_json(batch)
    try:
        number = context.objects.batches.add(live.processor_id, text)
    except NoRoomError:
        live.course.put_back(batch)  # the client asks again when there is room, and gets this batch
        raise
    if not arguments.get("by_reference", False) or not isinstance(batch, list):
        return JsonText(text)
    reference = {"_TWINKLE_TYPE_": "Batch", "processor_id": live.processor_id, "number": number, "length": len(batch)}
    return JsonText(json.dumps(reference))


def get_batch(live: Live, arguments: dict[str, Any], context: Context) -> JsonText:
    if "number" not in arguments:
        raise InvalidInputError("arguments of get_batch", sorted(arguments), "also number")
    return JsonText(context.objects.batches.get(live.processor_id, arguments["number"]))


def close(live: Live, _arguments: dict[str, Any], context: Context) -> str:
    """Remove an object from the session. Other objects that were made with it can still use it."""
    context.objects.remove(live)
    return "ok"
