"""Images in chats: the ``openai`` and ``anthropic`` packages against a tiny model that sees."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest
from tinker import types

from tests.support.models.sdk_images import SEES, jpeg, model_input, png, processing
from tests.support.servers.running import BACKEND
from tests.support.servers.serving import SAMPLER, SdkServer, close_clients
from twinkle import hub
from twinkle.images import EncodedImage
from twinkle.server.backends.text_codec import HubTextCodec
from twinkle.server.protocols.openai.requests import TEXT_BYTES, ChatRequest, read_chat
from twinkle.server.wire.errors import BodyTooLargeError
from twinkle.server.wire.fields import parse

pytestmark = pytest.mark.skipif(
    BACKEND == "megatron" or SAMPLER != "torch", reason="images are for Transformers' models and the torch sampler"
)
CAT, DOG = png(100, 70, 1), jpeg(64, 130, 2)
ELSEWHERE = "https://example.org/cat.png"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SdkServer]:
    running = SdkServer(tmp_path_factory.mktemp("chats"), model=SEES).start()
    yield running
    close_clients(running.url)
    assert running.stop() == 0


@pytest.fixture(scope="module")
def client(server: SdkServer) -> openai.OpenAI:
    http = openai.DefaultHttpxClient(trust_env=False)
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="tml-chat", max_retries=0, http_client=http)


def data_uri(image: EncodedImage) -> str:
    return f"data:image/{image.format};base64,{base64.b64encode(image.data).decode()}"


def part(image: EncodedImage | str, **more: Any) -> dict[str, Any]:
    url = image if isinstance(image, str) else data_uri(image)
    return {"type": "image_url", "image_url": {"url": url, **more}}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [part(CAT), text("Which is older, this or "), part(DOG, detail="high"), text("?")]},
]


def chat_prompt() -> types.ModelInput:
    """Return the prompt of ``CHAT`` as the tinker SDK sends it: images as chunks between tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(hub.resolve(SEES).path)
    block = {"type": "image"}
    said = [block, text("Which is older, this or "), block, text("?")]
    tokens = HubTextCodec(tokenizer).encode_chat([CHAT[0], {"role": "user", "content": said}], [])
    pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    first, second = (index for index, token in enumerate(tokens) if token == pad)
    return model_input([tokens[:first], CAT, tokens[first + 1 : second], DOG, tokens[second + 1 :]])


def test_answers_are_those_of_the_sdk(server: SdkServer, client: openai.OpenAI) -> None:
    """The same conversation by tinker's SDK has the same tokens, and the same log-probabilities."""
    sampler = server.service("chat").create_sampling_client(base_model=SEES)
    prompt = chat_prompt()
    expected = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=6, temperature=0.0)).result().sequences[0]
    asked = {"model": SEES, "messages": CHAT, "max_tokens": 6, "temperature": 0.0, "logprobs": True}
    answer = client.chat.completions.create(**asked)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == prompt.length
    logprobs = [each.logprob for each in answer.choices[0].logprobs.content]  # type: ignore[union-attr]
    np.testing.assert_allclose(logprobs, expected.logprobs[: len(logprobs)], atol=1e-5)
    shouted = json.loads(json.dumps(asked).replace("data:image", "DATA:image"))  # names of schemes have no case
    assert client.chat.completions.create(**shouted).choices[0].message == answer.choices[0].message
    streamed = list(client.chat.completions.create(**asked, stream=True))
    said = "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
    assert said == answer.choices[0].message.content
    without = client.chat.completions.create(**{**asked, "messages": [{"role": "user", "content": "Which is older?"}]})
    assert without.usage is not None
    assert without.usage.prompt_tokens < prompt.length - sum(processing().size(each).tokens for each in (CAT, DOG))


def test_messages_of_anthropic(server: SdkServer, client: openai.OpenAI) -> None:
    def block(image: EncodedImage) -> dict[str, Any]:
        data = base64.b64encode(image.data).decode()
        return {"type": "image", "source": {"type": "base64", "media_type": f"image/{image.format}", "data": data}}

    asked = anthropic.Anthropic(
        base_url=f"{server.url}/anthropic",
        api_key="tml-chat",
        max_retries=0,
        http_client=anthropic.DefaultHttpxClient(trust_env=False),
    )
    content = [block(CAT), text("Which is older, this or "), block(DOG), text("?")]
    messages: Any = [{"role": "user", "content": content}]
    greedy = {"temperature": 0.0}
    answer = asked.messages.create(model=SEES, max_tokens=6, system="be brief", messages=messages, extra_body=greedy)
    assert answer.usage.input_tokens == chat_prompt().length
    same = client.chat.completions.create(model=SEES, messages=CHAT, max_tokens=6, temperature=0.0)  # type: ignore[arg-type]
    assert answer.content[0].text == same.choices[0].message.content  # type: ignore[union-attr]
    counted = asked.messages.count_tokens(model=SEES, system="be brief", messages=messages)
    assert counted.input_tokens == answer.usage.input_tokens
    elsewhere: Any = [{"type": "image", "source": {"type": "url", "url": ELSEWHERE}}]
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\]\.source: got .*opens no URL"):
        asked.messages.create(model=SEES, max_tokens=6, messages=[{"role": "user", "content": elsewhere}])


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


@pytest.mark.parametrize(
    ("messages", "param", "said"),
    [
        (user(text("x"), part(ELSEWHERE)), "messages[0].content[1].image_url", "opens no URL"),
        (user(part("/etc/passwd")), "messages[0].content[0].image_url", "opens no URL"),
        (user(part("data:image/png;base64,AAAA")), "messages[0].content[0].image_url", "png or jpeg"),
        (user(part("data:image/png;base64,%%%")), "messages[0].content[0].image_url", "data:image/png;base64"),
        (user(part(EncodedImage(CAT.data[:-40], "png"))), "messages[0].content[0].image_url.data", "a whole png file"),
        (user(part(CAT, detail="low")), "messages[0].content[0].image_url.detail", "auto"),
        (user({"type": "video_url", "video_url": {"url": "x"}}), "messages[0].content", "'video_url'"),
        ([{"role": "system", "content": [part(CAT)]}, *user(text("x"))], "messages[0].content[0].type", "system"),
        (user(text("<|image_pad|>"), part(CAT)), "messages[0].content[1].image_url", "2 image tokens"),
    ],
    ids=["a URL", "a path", "no image", "no base64", "damaged", "low detail", "a video", "of the system", "a token"],
)
def test_refused(client: openai.OpenAI, messages: Any, param: str, said: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=SEES, messages=messages, max_tokens=3)
    assert caught.value.param == param
    assert said in caught.value.message


def test_only_images_may_be_large(client: openai.OpenAI) -> None:
    """A file of more than 4 MiB passes; as much text does not."""
    large = png(1100, 1300, 9)
    assert len(large.data) > TEXT_BYTES
    answer = client.chat.completions.create(model=SEES, messages=user(part(large)), max_tokens=1)  # type: ignore[arg-type]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > processing().size(large).tokens
    long = {"model": SEES, "messages": user(part("data:,"), text("x" * TEXT_BYTES))}
    with pytest.raises(BodyTooLargeError, match="without its images"):
        read_chat(lambda body: parse(ChatRequest, body), httpx.Request("POST", "http://a", json=long).content)
    with pytest.raises(BodyTooLargeError, match="commas"):
        read_chat(lambda body: parse(ChatRequest, body), b"," * (TEXT_BYTES + 1))
