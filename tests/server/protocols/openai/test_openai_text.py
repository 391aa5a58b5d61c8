"""From tokens to final text: characters in pieces, stop strings across pieces, tool calls."""

import itertools
import json
import random

import numpy as np
import pytest

from twinkle import hub
from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.sampler.types import Progress, SampledSequence, TopLogprobs
from twinkle.server.backends.text_codec import HubTextCodec
from twinkle.server.protocols.openai.choices import Choice, Detokenizer, StopFilter, ToolCallFilter

MODEL = "random://llama-tiny"  # one token per byte


@pytest.fixture(scope="module")
def codec() -> HubTextCodec:
    return HubTextCodec(hub.load_tokenizer(MODEL))


def tool_codec() -> HubTextCodec:
    """The same codec with a template that handles tools and tool calls."""
    tokenizer = hub.load_tokenizer(MODEL)
    tokenizer.chat_template = (
        "{% if tools %}{% for tool in tools %}[{{ tool | tojson }}]{% endfor %}{% endif %}"
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments.city }}>{% endfor %};"
        "{% endfor %}{% if messages[0].role == 'tool' %}{{ raise_exception('a tool cannot begin') }}{% endif %}"
    )
    return HubTextCodec(tokenizer)


# --- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["plain", "naïve — 你好 🙂🙂!", "🙂", "a\ufffdb", "", "  spaces  \n\n"])
def test_detokenizer_holds_back_incomplete_characters(codec: HubTextCodec, text: str) -> None:
    detokenizer = Detokenizer(codec)
    pieces = [detokenizer.push(token) for token in codec.encode(text)]
    assert "".join(pieces) + detokenizer.close() == text
    assert not any(piece.endswith("\ufffd") for piece in pieces)
    whole = [len(piece) for piece in pieces if piece]
    assert all(size == 1 for size in whole) or "\ufffd" in text  # no piece waits longer than needed


def test_detokenizer_agrees_with_decoding_at_once(codec: HubTextCodec) -> None:
    """Holds for any input: broken characters, special tokens, and tokens that the tokenizer does not know."""
    generator = random.Random(0)
    for _ in range(200):
        tokens = [generator.choice([generator.randrange(256), generator.randrange(512)]) for _ in range(40)]
        detokenizer = Detokenizer(codec)
        text = "".join(detokenizer.push(token) for token in tokens) + detokenizer.close()
        assert text == codec.decode(tokens)


def test_detokenizer_decodes_few_tokens_at_a_time(codec: HubTextCodec) -> None:
    """This holds however long a text goes on that never forms complete characters."""
    longest = 0

    class Watched:
        def decode(self, tokens: list[int]) -> str:
            nonlocal longest
            longest = max(longest, len(tokens))
            return codec.decode(tokens)

    detokenizer = Detokenizer(Watched())
    text = "\ufffd" * 200
    assert "".join(detokenizer.push(token) for token in codec.encode(text)) + detokenizer.close() == text
    assert longest <= 32


def test_detokenizer_with_a_tokenizer_that_looks_back() -> None:
    """SentencePiece drops the space of the first word in its input."""

    class Words:
        words = ("▁one", "▁two", "th", "ree")

        def decode(self, tokens: list[int]) -> str:
            return "".join(self.words[token] for token in tokens).replace("▁", " ").removeprefix(" ")

    detokenizer = Detokenizer(Words())
    assert [detokenizer.push(token) for token in (0, 1, 2, 3, 1)] == ["one", " two", "th", "ree", " two"]


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one two three", ["two"], "one "),
        ("one two three", ["three", "two"], "one "),
        ("aab", ["ab"], "a"),
        ("ababac", ["abac"], "ab"),
        ("one tw", ["two"], "one tw"),
        ("one", [], "one"),
        ("stop", ["stop"], ""),
        ("x\n\ny", ["\n\n", "\n"], "x"),
    ],
)
def test_stop_strings(text: str, stops: list[str], expected: str) -> None:
    for size in range(1, len(text) + 1):
        filtered, passed = StopFilter(stops), ""
        for start in range(0, len(text), size):
            passed += filtered.push(text[start : start + size])
            assert expected.startswith(passed)  # no text is ever taken back
        assert passed + filtered.close() == expected
        assert filtered.stopped == any(stop in text for stop in stops)


# --- tool calls -------------------------------------------------------------------------------------------------------

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        (CALL, "", ["weather"]),
        (f"Let me see.\n{CALL}\n{CALL}\n", "Let me see.", ["weather", "weather"]),
        ("no call at all ", "no call at all ", []),
        ("a < b <tool_ca", "a < b <tool_ca", []),
        ("<tool_call>not JSON</tool_call>", "<tool_call>not JSON</tool_call>", []),
        ('<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
        ('<tool_call>{"name": "now"}</tool_call>', "", ["now"]),
        ('<tool_call>{"name": "weather", "argu', '<tool_call>{"name": "weather", "argu', []),
    ],
)
def test_tool_calls(text: str, content: str, names: list[str]) -> None:
    for size in (1, 3, 7, len(text)):
        reader, passed, calls = ToolCallFilter(), "", []
        for start in range(0, len(text), size):
            piece, more = reader.push(text[start : start + size])
            passed, calls = passed + piece, calls + more
        assert passed + reader.close() == content
        assert [call.name for call in calls] == names
        for call in calls:
            assert isinstance(json.loads(call.arguments), dict)
        assert len({call.id for call in calls}) == len(calls)


# --- a choice ---------------------------------------------------------------------------------------------------------


def sample(tokens: list[int], stop_reason: str) -> SampledSequence:
    values = np.arange(len(tokens), dtype=np.float32)
    top = TopLogprobs(np.array([[t, t + 1] for t in tokens]), np.array([[-v, -np.inf] for v in values]))
    return SampledSequence(np.array(tokens), -values, stop_reason, top)


def in_pieces(whole: SampledSequence, size: int) -> list[Progress]:
    places = [slice(start, start + size) for start in range(0, len(whole.tokens), size)]
    return [
        Progress(
            "r",
            0,
            whole.tokens[place],
            whole.logprobs[place],
            TopLogprobs(whole.topk_logprobs.token_ids[place], whole.topk_logprobs.logprobs[place]),
            whole.stop_reason if place is places[-1] else None,
        )
        for place in places
    ]


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize(
    ("text", "stops", "tools", "reason", "expected"),
    [
        ("héllo 🙂 there", [], False, "stop", ("héllo 🙂 there", "stop")),
        ("héllo 🙂 there", [], False, "length", ("héllo 🙂 there", "length")),
        ("héllo 🙂 there", ["🙂 t"], False, "stop", ("héllo ", "stop")),
        (f"so: {CALL}", [], True, "stop", ("so:", "tool_calls")),
        (f"so: {CALL}", [], False, "stop", (f"so: {CALL}", "stop")),
        (f"{CALL} and on", [], True, "length", (" and on", "length")),
    ],
)
def test_a_choice_in_pieces_is_the_whole_one(codec, size, text, stops, tools, reason, expected) -> None:
    tokens = [*codec.encode(text), 257]  # ends with the end token of the turn
    whole = Choice(codec, stops, tools=tools).push(sample(tokens, reason))
    assert (whole.text, whole.finish_reason) == expected
    streamed = Choice(codec, stops, tools=tools)
    deltas = [streamed.push(piece) for piece in in_pieces(sample(tokens, reason), size)]
    assert "".join(delta.text for delta in deltas) == whole.text
    assert tuple(itertools.chain.from_iterable(delta.tokens for delta in deltas)) == whole.tokens
    assert [c.name for d in deltas for c in d.calls] == [c.name for c in whole.calls]
    assert [delta.finish_reason for delta in deltas][:-1] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == whole.finish_reason
    assert streamed.completion_tokens == len(tokens)
    assert [token.token for token in whole.tokens] == tokens
    assert whole.tokens[3].top == ((tokens[3], -3.0),)  # an empty cell of the table is left out


def test_offsets(codec: HubTextCodec) -> None:
    whole = Choice(codec, [], tools=False).push(sample(codec.encode("aé b"), "length"))
    assert [token.offset for token in whole.tokens] == [0, 1, 1, 2, 3]


# --- chat -------------------------------------------------------------------------------------------------------------


def test_chat_template(codec: HubTextCodec) -> None:
    tokens = codec.encode_chat([{"role": "user", "content": "hi"}], [])
    expected = "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
    assert "".join(map(codec.token_text, tokens)) == f"{expected}<|start_header_id|>assistant<|end_header_id|>\n\n"
    with pytest.raises(UnsupportedError, match="does not know tools"):
        codec.encode_chat([{"role": "user", "content": "hi"}], [{"type": "function"}])


def test_chat_template_with_tools() -> None:
    codec = tool_codec()
    tool = {"type": "function", "function": {"name": "weather"}}
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_call_id": "1"},
    ]
    text = codec.decode(codec.encode_chat(messages, [tool]))
    assert text == f"[{json.dumps(tool)}]user:hi;assistant:<weather Köln>;tool:sunny;"
    with pytest.raises(InvalidInputError, match="messages: got 'a tool cannot begin'"):
        codec.encode_chat(messages[2:], [])


def test_no_chat_template() -> None:
    tokenizer = hub.load_tokenizer(MODEL)
    tokenizer.chat_template = None
    with pytest.raises(UnsupportedError, match="no chat template"):
        HubTextCodec(tokenizer).encode_chat([{"role": "user", "content": "hi"}], [])
