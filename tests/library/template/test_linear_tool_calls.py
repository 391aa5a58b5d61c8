"""Tool calls are found in linear time, and they are the same calls that plain regular expressions find."""

import json
import random
import re
import time

import pytest

from twinkle.template import ClineParser, HermesQwenParser, ReActParser, Template, VCPParser
from twinkle.template.dsml import DSML_END, DSML_START, clean_dsml, parse_dsml
from twinkle.template.template import _MOST_CHARACTERS
from twinkle.template.tools.cline import _NO_TOOLS
from twinkle.template.tools.hermes_qwen import _BLOCK as HERMES_BLOCK

# --- the formats as regular expressions, which need quadratic time ----------------------------------------------------

OUTER = re.compile(r"<([a-z][a-z0-9_]*)>(.*?)</\1>", re.DOTALL)
INNER = re.compile(r"<([A-Za-z_]\w*)>(.*?)</\1>", re.DOTALL)
FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\s]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
VCP_BLOCK = re.compile(r"<<<\[TOOL_REQUEST\]>>>(.*?)<<<\[END_TOOL_REQUEST\]>>>", re.DOTALL)
VCP_FIELD = re.compile(r"([\w-]+)\s*[:：]\s*(?:「始ESCAPE」(.*?)「末ESCAPE」|「始」(.*?)「末」)", re.DOTALL)
DSML_BLOCK = re.compile(rf"\s*{DSML_START}(.*?){DSML_END}", re.DOTALL)
DSML_INVOKE = re.compile(r'<｜DSML｜invoke name="([^"]*)">(.*?)</｜DSML｜invoke>', re.DOTALL)
DSML_PARAMETER = re.compile(
    r'<｜DSML｜parameter name="([^"]*)" string="(true|false)">((?:(?!</?｜DSML｜).)*)</｜DSML｜parameter>', re.DOTALL
)


def pairs(calls):
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def json_or_text(text):
    try:
        return json.loads(text)
    except ValueError:
        return text


def cline(text):
    found = [match for match in OUTER.finditer(text) if match[1] not in _NO_TOOLS and INNER.search(match[2])]
    calls = [(match[1], {key: value.strip() for key, value in INNER.findall(match[2])}) for match in found]
    for match in reversed(found):
        text = text[: match.start()] + text[match.end() :]
    return calls, text.rstrip()


def qwen(text):
    calls = [
        (name, {key: json_or_text(value.strip("\n")) for key, value in PARAMETER.findall(body)})
        for block in HERMES_BLOCK.findall(text)
        for name, body in FUNCTION.findall(block)
    ]
    return calls, HERMES_BLOCK.sub("", text).rstrip()


def vcp(text):
    calls = []
    for block in VCP_BLOCK.findall(text):
        fields = {key: (escaped or plain).strip() for key, escaped, plain in VCP_FIELD.findall(block)}
        name = fields.pop("tool_name", "")
        if name:
            calls.append((name, fields))
    return calls, VCP_BLOCK.sub("", text).rstrip()


def dsml(text):
    calls = []
    for block in DSML_BLOCK.findall(text):
        for name, body in DSML_INVOKE.findall(block):
            try:
                found = DSML_PARAMETER.findall(body)
                arguments = {key: value if is_text == "true" else json.loads(value) for key, is_text, value in found}
            except ValueError:
                return [], DSML_BLOCK.sub("", text).rstrip()
            if DSML_PARAMETER.sub("", body).strip():
                return [], DSML_BLOCK.sub("", text).rstrip()
            calls.append((name, arguments))
        if DSML_INVOKE.sub("", block).strip():
            return [], DSML_BLOCK.sub("", text).rstrip()
    return calls, DSML_BLOCK.sub("", text).rstrip()


def parsed(parser):
    return lambda text: (pairs(parser.parse(text)), parser.clean(text))


FORMATS = {
    "cline": (
        cline,
        parsed(ClineParser()),
        ["<a>", "</a>", "<f>", "</f>", "<F>", "</F>", "<think>", "</think>", "<é>", "<", ">", "/", "f", "x", "\n"],
    ),
    "qwen": (
        qwen,
        parsed(HermesQwenParser()),
        [
            "<tool_call>",
            "</tool_call>",
            "<function=",
            "</function>",
            "<parameter=",
            "</parameter>",
            ">",
            "x",
            "\n",
            "1",
        ],
    ),
    "vcp": (
        vcp,
        parsed(VCPParser()),
        [
            *("<<<[TOOL_REQUEST]>>>", "<<<[END_TOOL_REQUEST]>>>", "「始」", "「末」", "「始ESCAPE」", "「末ESCAPE」"),
            *("「始", ":", "：", "tool_name", "k", "-", "é", "」", " ", "\n"),
        ],
    ),
    "dsml": (
        dsml,
        lambda text: (pairs(parse_dsml(text)), clean_dsml(text)),
        [
            DSML_START,
            DSML_END,
            '<｜DSML｜invoke name="',
            "</｜DSML｜invoke>",
            '<｜DSML｜parameter name="',
            "</｜DSML｜parameter>",
            '" string="true">',
            '" string="false">',
            '">',
            "f",
            "1",
            " ",
        ],
    ),
}

WHOLE = {
    "cline": ["<f>", "<F>", "x", "</F>", "</f>"],
    "qwen": ["<tool_call>", "<function=f>", "<parameter=x>", "1", "</parameter>", "</function>", "</tool_call>"],
    "vcp": [
        "<<<[TOOL_REQUEST]>>>",
        "tool_name: 「始」x「末」",
        "k : 「始ESCAPE」y「末ESCAPE」",
        "<<<[END_TOOL_REQUEST]>>>",
    ],
    "dsml": [
        DSML_START,
        '<｜DSML｜invoke name="f">',
        '<｜DSML｜parameter name="x" string="false">1</｜DSML｜parameter>',
        "</｜DSML｜invoke>",
        DSML_END,
    ],
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_same_calls_as_regular_expressions(name):
    reference, parser, alphabet = FORMATS[name]
    chance = random.Random(name)
    found = 0
    for _ in range(4000):
        pieces = chance.choices(alphabet, k=chance.randrange(14))
        if chance.random() < 0.5:  # a complete call, with a few pieces inserted or removed
            pieces = list(WHOLE[name])
            for _ in range(chance.randrange(4)):
                pieces.insert(chance.randrange(len(pieces) + 1), chance.choice(alphabet))
            if chance.random() < 0.3:
                pieces.pop(chance.randrange(len(pieces)))
        text = "".join(pieces)
        assert parser(text) == reference(text), text
        found += bool(reference(text)[0])
    assert found > 100


LONG = {
    "unclosed tags": lambda n: "<a>" * (n // 3),
    "unclosed tags of many names": lambda n: "".join(f"<f{number}>" for number in range(n // 8)),
    "unclosed tags in a tool": lambda n: "<f>" + "<a>" * (n // 3) + "</f>",
    "many calls": lambda n: "<f><x>1</x></f>" * (n // 15),
    "opened tags": lambda n: "<" * n,
    "a long name": lambda n: "<" + "a" * n,
    "nested calls": lambda n: "<tool_call>" * (n // 11),
    "functions without an end": lambda n: "<tool_call>" + "<function=" * (n // 10),
    "parameters without an end": lambda n: "<tool_call><function=f>" + "<parameter=" * (n // 11),
    "parameters": lambda n: "<tool_call><function=f>" + "<parameter=x>" * (n // 13),
    "lists in lists": lambda n: "<tool_call>" + "[" * n,
    "digits": lambda n: "<tool_call>" + "1" * n,
    "requests without an end": lambda n: "<<<[TOOL_REQUEST]>>>" * (n // 20),
    "a long key": lambda n: "<<<[TOOL_REQUEST]>>>" + "a" * n + "<<<[END_TOOL_REQUEST]>>>",
    "blanks after a key": lambda n: "<<<[TOOL_REQUEST]>>>a" + " " * n + "<<<[END_TOOL_REQUEST]>>>",
    "values without an end": lambda n: "<<<[TOOL_REQUEST]>>>" + "a:「始」" * (n // 5) + "<<<[END_TOOL_REQUEST]>>>",
    "blanks": lambda n: " " * n,
    "actions": lambda n: "Action: a[" * (n // 10),
    "an action that is no call": lambda n: "Action: a[" + "]" * n + "x",
    "blanks before an action": lambda n: "\n" + " " * n + "Action",
    "a long action": lambda n: "Action: " + "a" * n,
    "blocks without an end": lambda n: DSML_START * (n // len(DSML_START)),
    "invokes without an end": lambda n: DSML_START + '<｜DSML｜invoke name="f">' * (n // 24) + DSML_END,
    "names without an end": lambda n: DSML_START + '<｜DSML｜invoke name="' * (n // 21) + DSML_END,
    "values with tags": lambda n: (
        f'{DSML_START}<｜DSML｜invoke name="f">'
        + '<｜DSML｜parameter name="x" string="true">' * (n // 42)
        + f"</｜DSML｜invoke>{DSML_END}"
    ),
}


@pytest.mark.parametrize("what", LONG)
def test_long_texts_take_no_time(what):
    """In quadratic time they would take minutes: 40,000 characters took 13 to 30 seconds."""
    began = time.monotonic()
    for size in (2**17, 2**18):
        text = LONG[what](size)
        for parser in (ClineParser(), HermesQwenParser(), VCPParser(), ReActParser()):
            parser.detect(text)
            parser.parse(text)
            parser.clean(text)
        parse_dsml(text)
        clean_dsml(text)
    assert time.monotonic() - began < 60


@pytest.fixture(scope="module")
def template():
    return Template("random://llama-tiny", max_length=None)


def sampled_turn(template, tokens):
    """Return the message that a template makes of generated tokens."""
    prompt = {"input_ids": [1], "labels": [-100], "messages": [{"role": "user", "content": "hi"}]}
    return template.concat_input_feature(prompt, tokens)["messages"][-1]


def test_a_long_sampled_turn_takes_no_time(template):
    """The server parses every sampled text: 150,000 characters took minutes, twice."""
    text = "<a>" * 50_000
    tokens = template.tokenizer.encode(text, add_special_tokens=False)
    began = time.monotonic()
    assert sampled_turn(template, tokens) == {"role": "assistant", "content": text}
    assert time.monotonic() - began < 10


def test_calls_are_looked_for_up_to_a_length(template):
    call = "<tool_call>" + json.dumps({"name": "f", "arguments": {"x": 1}}) + "</tool_call>"
    filled = "x" * (_MOST_CHARACTERS - len(call)) + call
    tokens = template.tokenizer.encode(filled, add_special_tokens=False)
    assert pairs(sampled_turn(template, tokens)["tool_calls"]) == [("f", {"x": 1})]
    assert sampled_turn(template, [tokens[0], *tokens]) == {"role": "assistant", "content": "x" + filled}
