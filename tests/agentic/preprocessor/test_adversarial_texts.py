"""Every step finishes on 100 kB of text made to slow down searches, and on messages of wrong types."""

import pytest

from twinkle_agentic.preprocessor import (
    DeadLoopFilter,
    DedupFilter,
    HardFilter,
    IntentClassifier,
    MessageNormalizer,
    MessageSanityFilter,
    ModelFilter,
    RefuseFilter,
    TokenSoupFilter,
)

SIZE = 100_000
PIECES = {
    "letters": "a",
    "Chinese": "不",
    "line ends": "\n",
    "openings of thoughts": "<think>",
    "Hermes openings": "<tool_call>",
    "Hermes answers": "<tool_response>",
    "VCP fields": "<<<[TOOL_REQUEST]>>>a:「始」",
    "Cline openings": "<read_file></write_to_file>",
    "Cline results": "[read_file for ",
    "ReAct actions": "Action:\nAction Input: {",
    "objects": '{"a":[',
    "special tokens": "<|a",
    "greetings": "hello ",
    "refusals": "I am very ",
    "corrections": "wait, no, that hmm",
    "heartbeats": "heartbeat ",
}
STEPS = [
    HardFilter(),
    DeadLoopFilter(),
    DedupFilter(),
    IntentClassifier(),
    MessageNormalizer(),
    MessageSanityFilter(max_msg_chars=2 * SIZE, extra_sensitive_words=["aaaaaaaaaaaaaaaaaaaab", "不不不不对"]),
    ModelFilter(),
    RefuseFilter(check_window=SIZE),
    TokenSoupFilter(),
]


@pytest.mark.parametrize("name", PIECES)
def test_steps_finish(name):
    text = (PIECES[name] * SIZE)[:SIZE]
    messages = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": [{"type": "text", "text": text}]},
    ]
    rows = [{"messages": messages, "model_id": text}]
    for step in STEPS:
        kept, dropped = step(rows)
        assert len(kept) + len(dropped) == 1


USER = {"role": "user", "content": "A question that is long enough"}


@pytest.mark.parametrize(
    "messages",
    [
        [None],
        [{}],
        [{"role": ["user"], "content": "x"}],
        [USER, {"role": "assistant"}],
        [USER, {"role": "assistant", "content": None, "tool_calls": "no JSON"}],
        [USER, {"role": "assistant", "content": ["part", {"type": "text"}, {"text": None}], "reasoning_content": 5}],
        [USER, {"role": "assistant", "content": "x", "tool_calls": [None, {"function": None}, 3]}],
        [USER, {"role": "assistant", "content": "x", "tool_calls": {"id": 1}}, {"role": "tool", "tool_call_id": ["x"]}],
        [USER, {"role": "assistant", "content": "\ud800\x00" * 30}],
    ],
)
def test_messages_of_wrong_types_do_not_stop_a_step(messages):
    for step in STEPS:
        for rows in ([{"messages": messages}], {"messages": [messages]}):
            kept, dropped = step(rows)
            assert len(kept) + len(dropped) == 1
