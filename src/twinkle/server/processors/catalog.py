"""The tables of classes that clients may create and of functions that they may call, with all options and arguments.

No request can reach a class, function or argument that is not in these tables.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.server.processors import arguments as a
from twinkle.server.processors import operations as do
from twinkle.server.processors.arguments import Readers

PREPROCESSORS = {
    "AlpacaProcessor": "twinkle.preprocessor",
    "CLEVRProcessor": "twinkle.preprocessor",
    "CompetitionMathGRPOProcessor": "twinkle.preprocessor",
    "CompetitionMathProcessor": "twinkle.preprocessor",
    "CountdownProcessor": "twinkle.preprocessor",
    "EmojiDPOProcessor": "twinkle.preprocessor",
    "GSM8KProcessor": "twinkle.preprocessor",
    "OlympiadBenchProcessor": "twinkle.preprocessor",
    "SelfCognitionProcessor": "twinkle.preprocessor",
}
FILTERS: dict[str, str] = {}  # the library has none of its own
REWARDS = {
    "FormatReward": "twinkle.reward",
    "GSM8KAccuracyReward": "twinkle.reward",
    "GSM8KFormatReward": "twinkle.reward",
    "MathReward": "twinkle.reward",
    "MultiModalAccuracyReward": "twinkle.reward",
    "OlympiadBenchAccuracyReward": "twinkle.reward",
    "OlympiadBenchFormatReward": "twinkle.reward",
    "OlympiadBenchQualityReward": "twinkle.reward",
}
TEMPLATES = {
    "DeepseekV4Template": "twinkle.template",
    "Qwen2_5VLTemplate": "twinkle.template",
    "Qwen3Template": "twinkle.template",
    "Qwen3_5Template": "twinkle.template",
    "Template": "twinkle.template",
}
PROCESSORS = {"InputProcessor": "twinkle.processor"}


@dataclass(frozen=True)
class Function:
    run: do.Run
    arguments: Readers


@dataclass(frozen=True)
class ClassEntry:
    """A class that clients may create: its module, the options of its constructor, and the functions of its objects."""

    home: str
    options: Readers
    functions: Mapping[str, Function]
    make: Any = do.make  # a do.Make; not typed as one, because some accept fewer classes as their first argument


def entry(processor_type: object, class_type: object) -> ClassEntry:
    if processor_type == "weight_loader":
        raise UnsupportedError("processor_type: 'weight_loader' is not offered; weights are loaded by model requests")
    if not isinstance(processor_type, str) or processor_type not in CATALOG:
        raise InvalidInputError("processor_type", processor_type, ", ".join(CATALOG))
    return a.named(f"class_type of {processor_type}", class_type, CATALOG[processor_type])


def function(processor_type: str, class_name: str, name: object) -> Function:
    return a.named(f"function of {class_name}", name, CATALOG[processor_type][class_name].functions)


def _method(name: str, **arguments: a.Reader) -> Function:
    return Function(do.method(name), arguments)


def _changing(name: str, **arguments: a.Reader) -> Function:
    return Function(do.changing(name), arguments)


_ONE_PROCESS: Readers = {"remote_group": a.only(None), "device_mesh": a.only(None)}
_CLOSE = {"close": Function(do.close, {})}

# --- datasets ---------------------------------------------------------------------------------------------------------

_LOAD: Readers = {
    "dataset_meta": a.optional(a.dataset_meta),
    "revision": a.optional(a.revision),
    "token": a.optional(a.text),
}
_MAP: Readers = {
    "batch_size": a.count,
    "batched": a.boolean,
    "desc": a.text,
    "keep_in_memory": a.boolean,
    "load_from_cache_file": a.only(False),  # each worker has its own cache and maps a dataset once: nothing to reuse
    "num_proc": a.only(None, 1),
    "remove_columns": a.names,
    "writer_batch_size": a.count,
}
_FILTER: Readers = {key: _MAP[key] for key in _MAP if key not in ("batch_size", "remove_columns")}
_TEMPLATE: Readers = {
    "model_id": a.text,
    "use_chat_template": a.boolean,
    "max_length": a.optional(a.integer),
    "truncation_strategy": a.text,
    "default_system": a.optional(a.text),
    "enable_thinking": a.boolean,
}
_PREPROCESSOR_CLASS = a.class_or_object("preprocessor", PREPROCESSORS)
_TEMPLATE_CLASS = a.class_or_object("template", TEMPLATES)
_FUNCTION: Readers = {"dataset_meta": a.optional(a.dataset_meta), "init_args": a.optional(a.mapping)}
_SAVE: Readers = {
    "output_path": a.output_path,
    "format": a.optional(a.text),
    "batch_size": a.count,
    "mode": a.text,
}
_DATASET: dict[str, Function] = {
    **_CLOSE,
    "add_dataset": Function(do.add_dataset, _LOAD),
    "cast_column": Function(do.cast_column, {"column": a.text, "decode": a.boolean}),
    "check": _changing("check", **_FILTER),
    "encode": _changing("encode", add_generation_prompt=a.boolean, **_MAP),
    "filter": _changing("filter", filter_func=a.class_of(FILTERS), **_FUNCTION, **_FILTER),
    "flush_save": _method("flush_save"),
    "map": _changing("map", preprocess_func=_PREPROCESSOR_CLASS, **_FUNCTION, **_MAP),
    "mix_dataset": _changing("mix_dataset", interleave=a.boolean),
    "save_as": _method("save_as", **_SAVE),
    "set_template": Function(do.set_template, {"template_func": _TEMPLATE_CLASS, **_TEMPLATE}),
}
_TABLE = {**_DATASET, "__len__": _method("__len__"), "__getitem__": _method("__getitem__", idx=a.integer)}
_STREAM = {"__iter__": Function(do.begin, {}), "__next__": Function(do.next_row, {})}
_PACK = {"pack_dataset": _changing("pack_dataset")}


def _dataset(functions: Mapping[str, Function], **options: a.Reader) -> ClassEntry:
    return ClassEntry("twinkle.dataset", {**_ONE_PROCESS, **_LOAD, **options}, functions, do.make_dataset)


# --- loaders, templates, preprocessors, rewards and processors --------------------------------------------------------

_ENCODE: Readers = {
    "add_generation_prompt": a.boolean,
    "tokenize": a.boolean,
    "chat_template_kwargs": a.optional(a.mapping),
}
_TEMPLATE_FUNCTIONS = {
    **_CLOSE,
    "batch_check": _method("batch_check", trajectories=a.objects),
    "batch_decode": _method("batch_decode", token_ids=a.lists_of_token_ids, skip_special_tokens=a.boolean),
    "batch_encode": _method("batch_encode", trajectories=a.objects, **_ENCODE),
    "check": _method("check", trajectory=a.objects),
    "clean_tool_call": _method("clean_tool_call", text=a.text),
    "concat_input_feature": _method("concat_input_feature", feature=a.objects, new_tokens=a.token_ids),
    "decode": _method("decode", token_ids=a.token_ids, skip_special_tokens=a.boolean),
    "encode": _method("encode", trajectory=a.objects, **_ENCODE),
    "format_trajectory": _method("format_trajectory", trajectory=a.objects, add_default_system=a.boolean),
    "parse_tool_call": _method("parse_tool_call", text=a.text),
}
# The options of all preprocessors together; each constructor refuses those that it does not have.
_TEXT_OPTIONS = ("chosen_key", "language", "model_author", "model_name", "prompt_key", "rejected_key", "system")
_PREPROCESSOR_OPTIONS: Readers = {"add_assistant": a.boolean, **dict.fromkeys(_TEXT_OPTIONS, a.optional(a.text))}
_PROCESSOR_OPTIONS: Readers = {
    **_ONE_PROCESS,
    "padding_free": a.boolean,
    "framework": a.text,
    "padding_side": a.text,
}
_PROCESSOR_CLASS = a.class_or_object("processor", PROCESSORS)
_LOADER_OPTIONS: Readers = {
    **_ONE_PROCESS,
    "dataset": a.live_object("dataset"),
    "batch_size": a.count,
    "min_batch_size": a.optional(a.count),
    "max_retries": a.count,
    "shuffle": a.boolean,
    "seed": a.optional(a.integer),
    "drop_last": a.boolean,
    "collate_fn": a.only(None),
    "num_workers": a.only(0),
    "prefetch_factor": a.only(None),
    "persistent_workers": a.only(False),
    "pin_memory": a.only(False),
    "timeout": a.only(0),
    "multiprocessing_context": a.only(None),
}
_LOADER_FUNCTIONS = {
    **_CLOSE,
    "__iter__": Function(do.begin, {}),
    "__len__": _method("__len__"),
    "__next__": Function(do.next_batch, {"by_reference": a.boolean}),
    "get_batch": Function(do.get_batch, {"number": a.integer}),
    "get_state": _method("get_state"),
    "resume_from_checkpoint": _changing("resume_from_checkpoint", consumed_train_samples=a.integer),
    "set_processor": _method("set_processor", processor_cls=_PROCESSOR_CLASS, **_PROCESSOR_OPTIONS),
    "skip_consumed_samples": _changing("skip_consumed_samples", consumed_train_samples=a.integer),
}


def _called(**arguments: a.Reader) -> dict[str, Function]:
    return {**_CLOSE, "__call__": _method("__call__", **arguments)}


def _each(
    homes: Mapping[str, str], options: Readers, functions: Mapping[str, Function], make: Any = do.make
) -> dict[str, ClassEntry]:
    """Return the entries of classes that share their options and functions."""
    return {name: ClassEntry(home, options, functions, make) for name, home in homes.items()}


CATALOG: dict[str, dict[str, ClassEntry]] = {
    "dataset": {
        "Dataset": _dataset(_TABLE),
        "LazyDataset": _dataset(_TABLE),
        "PackingDataset": _dataset(
            {**_TABLE, **_PACK, "__getitem__": _method("__getitem__", index=a.integer)}, packing_num_proc=a.only(1)
        ),
        "IterableDataset": _dataset({**_TABLE, **_STREAM}),
        "IterablePackingDataset": _dataset(
            {
                **_DATASET,
                **_STREAM,
                **_PACK,
                "set_template": Function(do.set_template, {"template_cls": _TEMPLATE_CLASS, **_TEMPLATE}),
            },
            packing_interval=a.count,
            packing_num_proc=a.threads,
            cyclic=a.boolean,
        ),
    },
    "dataloader": {"DataLoader": ClassEntry("twinkle.dataloader", _LOADER_OPTIONS, _LOADER_FUNCTIONS)},
    "template": _each(TEMPLATES, {**_ONE_PROCESS, **_TEMPLATE}, _TEMPLATE_FUNCTIONS, do.make_template),
    "preprocessor": _each(PREPROCESSORS, {**_ONE_PROCESS, **_PREPROCESSOR_OPTIONS}, _called(columns=a.objects)),
    "reward": _each(
        REWARDS,
        {**_ONE_PROCESS, "ground_truth_key": a.text},
        _called(trajectories=a.objects, ground_truths=a.optional(a.objects)),
    ),
    "processor": _each(PROCESSORS, _PROCESSOR_OPTIONS, _called(inputs=a.objects)),
}
