"""The generated protobuf module matches tinker.proto and the SDK."""

import re
from importlib.resources import files

from google.protobuf.descriptor import FieldDescriptor
from tinker.proto import tinker_public_pb2 as sdk

from twinkle.server.wire import tinker_pb2 as ours

_TYPE_NAMES = {
    value: name.removeprefix("TYPE_").lower() for name, value in vars(FieldDescriptor).items() if "TYPE_" in name[:5]
}
_FIELD = re.compile(r"(repeated|optional)?\s*(map<\w+,\s*\w+>|\w+)\s+(\w+)\s*=\s*(\d+);")


def _type_of(field):
    if field.message_type is None:
        return field.enum_type.name if field.enum_type else _TYPE_NAMES[field.type]
    if field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
        return f"map<{_type_of(key)}, {_type_of(value)}>"
    return field.message_type.name


def _described(module):
    return {
        (message.name, field.name): (field.number, _type_of(field), field.is_repeated, field.has_presence)
        for message in module.DESCRIPTOR.message_types_by_name.values()
        for field in message.fields
    }


def _in_text():
    text = re.sub(r"//.*", "", (files("twinkle.server.wire") / "tinker.proto").read_text())
    found = {}
    for name, body in re.findall(r"message (\w+) \{((?:[^{}]|\{[^{}]*\})*)\}", text):
        for label, kind, field, number in _FIELD.findall(body):
            repeated = label == "repeated" or kind.startswith("map<")
            found[name, field] = (int(number), re.sub(r",\s*", ", ", kind), repeated)
    return found


def test_module_matches_the_text():
    assert {key: value[:3] for key, value in _described(ours).items()} == _in_text()


def test_enums_match_the_text():
    text = (files("twinkle.server.wire") / "tinker.proto").read_text()
    for name, enum in ours.DESCRIPTOR.enum_types_by_name.items():
        (body,) = re.findall(rf"enum {name} \{{(.*?)\}}", text)
        assert re.findall(r"(\w+) = (\d+);", body) == [(value.name, str(value.number)) for value in enum.values]


def test_same_messages_as_the_sdk_in_one_process():
    """Compares numbers, types and presence. The packages differ; otherwise the import above would have failed."""
    assert ours.DESCRIPTOR.package == "twinkle_tinker" != sdk.DESCRIPTOR.package
    assert _described(ours) == _described(sdk)


def test_generated_code_loads_on_the_oldest_runtime_we_allow():
    source = (files("twinkle.server.wire") / "tinker_pb2.py").read_text()
    (version,) = re.findall(r"# Protobuf Python Version: (\d+)\.(\d+)\.(\d+)", source)
    assert tuple(map(int, version)) <= (5, 29, 6)
