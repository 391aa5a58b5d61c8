"""Replies in harmony's form, that of gpt-oss: the answer is the text, and the thoughts stand apart."""

import numpy as np
import pytest

from twinkle import hub
from twinkle.sampler.types import Progress, SampledSequence
from twinkle.server.backends.text_codec import HubTextCodec
from twinkle.server.protocols.openai.channels import ChannelFilter, channel_tokens
from twinkle.server.protocols.openai.choices import Choice, Delta

MODEL = "random://gpt-oss-tiny"
QUESTION = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def codec() -> HubTextCodec:
    return HubTextCodec(hub.load_tokenizer(MODEL))


def choice(codec: HubTextCodec) -> Choice:
    known = channel_tokens(codec)
    assert known is not None
    return Choice(codec, (), tools=False, channels=ChannelFilter(codec, known))


def read(codec: HubTextCodec, reply: str, pieces: int = 1) -> tuple[str, str]:
    """Return text and thoughts of a reply whose tokens come in so many pieces."""
    one, tokens = choice(codec), np.array(codec.encode(reply), np.int64)
    deltas: list[Delta] = []
    for part in np.array_split(tokens, pieces)[:-1]:
        deltas.append(one.push(Progress("r", 0, part, np.zeros(len(part)))))
    last = np.array_split(tokens, pieces)[-1]
    deltas.append(one.push(SampledSequence(last, np.zeros(len(last)), "stop")))
    assert one.completion_tokens == len(tokens) == sum(len(delta.tokens) for delta in deltas)
    return "".join(delta.text for delta in deltas), "".join(delta.thoughts for delta in deltas)


@pytest.mark.parametrize("pieces", [1, 2, 20])
@pytest.mark.parametrize(
    ("reply", "text", "thoughts"),
    [
        (
            "<|channel|>analysis<|message|>Hm, é?<|end|>"
            "<|start|>assistant<|channel|>final<|message|>So € it is.<|return|>",
            "So € it is.",
            "Hm, é?",
        ),
        ("<|channel|>final<|message|>Yes.<|return|>", "Yes.", ""),
        ("<|message|>Yes.<|end|>", "Yes.", ""),
        ("No form at all.", "No form at all.", ""),
        ("<|channel|>analysis<|message|>It ends in the mid", "", "It ends in the mid"),
        ("<|channel|>commentary <|constrain|>json<|message|>{}<|call|>", "{}", ""),
        ("<|channel|>analysis to=me", "", ""),
    ],
)
def test_replies(codec: HubTextCodec, reply: str, text: str, thoughts: str, pieces: int) -> None:
    assert read(codec, reply, pieces) == (text, thoughts)


def test_what_was_read_renders_to_what_was_said(codec: HubTextCodec) -> None:
    tokenizer = hub.load_tokenizer(MODEL)
    reply = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
    text, thoughts = read(codec, reply)
    said = {"role": "assistant", "content": text, "thinking": thoughts}
    prompt = tokenizer.apply_chat_template([QUESTION], add_generation_prompt=True, tokenize=False)
    whole = tokenizer.apply_chat_template([QUESTION, said], tokenize=False)
    assert whole == prompt + reply


def test_other_models_have_no_channels() -> None:
    assert channel_tokens(HubTextCodec(hub.load_tokenizer("random://llama-tiny"))) is None
