"""tinker-cookbook's renderers of gpt-oss and Qwen3.5 against our server: train conversations, sample and parse them.

The SDK and the renderers are unmodified. The models and their tokenizers are folders below the current directory, with
the names of real models, so that the SDK finds the tokenizers without a network.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from tests.cookbook.recipes.builder_runs import require_cookbook, run_in_cookbook
from tests.support.models.chat_folders import CHAT_FAMILIES, write_chat_folder
from tests.support.servers.running import Server
from tests.support.servers.serving import key_of

pytestmark = pytest.mark.cookbook

KEY = key_of("renderers")
NAMES = {"gpt_oss": "openai/gpt-oss-20b", "qwen3_5": "Qwen/Qwen3.5-4B"}
RENDERERS = {"gpt_oss": "gpt_oss_no_sysprompt", "qwen3_5": "qwen3_5"}
PROGRAM = Path(__file__).with_name("run_renderers.py")


def thinking(thoughts: str, text: str) -> list[dict[str, str]]:
    return [{"type": "thinking", "thinking": thoughts}, {"type": "text", "text": text}]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


CALL = {"name": "weather", "arguments": {"city": "Paris"}}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [user("What is 2 + 2?"), {"role": "assistant", "content": thinking("Two and two…", "It is 4.")}],
    [
        {"role": "system", "content": "Be brief."},
        user("Hello!"),
        {"role": "assistant", "content": "Hi."},
        user("And now?"),
        {"role": "assistant", "content": thinking("Hm, é?\nWell.", "So € it is.\n\nBye.")},
    ],
    [
        user("What is the weather?"),
        {"role": "assistant", "content": thinking("Look it up.", "")[:1], "tool_calls": [CALL]},
    ],
]
ANSWERS: list[dict[str, Any]] = [
    {"role": "assistant", "content": "It is 4.", "reasoning_content": "Two and two…"},
    {"role": "assistant", "content": "So € it is.\n\nBye.", "reasoning_content": "Hm, é?\nWell."},
    {"role": "assistant", "content": "", "reasoning_content": "Look it up.", "tool_calls": [CALL]},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    require_cookbook()
    directory = tmp_path_factory.mktemp("renderers")
    applications: list[dict[str, Any]] = [{"name": "server", "import_path": "server"}]
    for family, name in NAMES.items():
        folder = str(write_chat_folder(directory / "hub" / name, family))
        args = {"model_id": folder, "backend": "transformers", "device": "cpu", "dtype": "fp32", "aliases": [name]}
        applications.append({"name": family, "import_path": "model", "args": args})
        sampler = {"model_id": folder, "sampler_type": "torch"}
        applications.append({"name": f"{family}-sampler", "import_path": "sampler", "args": sampler})
    running = Server(directory, {"applications": applications}).start()
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def told(server: Server) -> dict[str, Any]:
    """Run the program once; return what it says about each family."""
    models = {name: {"name": RENDERERS[family], "conversations": CONVERSATIONS} for family, name in NAMES.items()}
    given = {"url": server.url, "key": KEY, "models": models}
    said = json.loads(run_in_cookbook(PROGRAM.read_text(), given, server.directory / "hub"))
    return {family: said[name] for family, name in NAMES.items()}


@pytest.fixture(params=NAMES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def tokenizer_of(server: Server, family: str) -> Tokenizer:
    return Tokenizer.from_file(str(server.directory / "hub" / NAMES[family] / "tokenizer.json"))


def test_an_example_is_the_prompt_and_what_is_trained(told: Mapping[str, Any], family: str) -> None:
    """It ends with a stop token. The SDK's clients for training and for sampling load the same tokenizer."""
    assert told[family]["same_tokenizer"]
    for row in told[family]["rows"]:
        prompt, example = row["prompt"], row["example"]
        assert example[: len(prompt)] == prompt
        assert row["trained"] == [place >= len(prompt) for place in range(1, len(example))]
        assert example[-1] in told[family]["ends"]


def test_a_trained_reply_is_sampled_and_parsed(told: Mapping[str, Any], family: str) -> None:
    losses = told[family]["losses"]
    assert losses[0] > 3
    assert losses[-1] < 0.1
    for row, answer in zip(told[family]["rows"], ANSWERS, strict=True):
        assert row["sampled"] == row["example"][len(row["prompt"]) :]
        assert row["from_sample"] == row["from_example"]
        assert row["from_sample"]["termination"] == "stop_sequence"
        assert simplified(row["from_sample"]["message"]) == answer


def simplified(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message of OpenAI's form whose tool calls have only names and arguments, as objects."""
    calls = [dict(call["function"]) for call in message.get("tool_calls", [])]
    for call in calls:
        if isinstance(call["arguments"], str):
            call["arguments"] = json.loads(call["arguments"])
    return {**message, **({"tool_calls": calls} if calls else {})}


def test_the_chat_endpoint_agrees_about_the_same_tokens(server: Server, told: Mapping[str, Any], family: str) -> None:
    """Its prompt is the renderer's, its greedy reply is that of the SDK, and harmony's channels are the same parts."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
    tokenizer = tokenizer_of(server, family)
    for conversation, row, answer in zip(CONVERSATIONS, told[family]["rows"], ANSWERS, strict=True):
        completion = client.chat.completions.create(
            model=told[family]["path"], messages=conversation[:-1], max_tokens=96, temperature=0
        )
        (choice,) = completion.choices
        assert completion.usage.prompt_tokens == len(row["prompt"])
        assert completion.usage.completion_tokens == len(row["sampled"])
        assert choice.finish_reason == "stop"
        if family == "gpt_oss":  # a call of a tool is text for the user, as docs/trainer.md says
            calls = [json.dumps(call["arguments"]) for call in answer.get("tool_calls", [])]
            assert choice.message.content == "".join([answer["content"], *calls])
            assert choice.message.reasoning_content == answer["reasoning_content"]
        else:  # the thoughts are a part of the text
            assert choice.message.content == tokenizer.decode(row["sampled"])
            assert choice.message.content.startswith(f"{answer['reasoning_content']}\n</think>\n\n{answer['content']}")


def test_the_tokenizers_have_what_the_renderers_look_up(server: Server, family: str) -> None:
    """Each is one token, and the special ones are passed over in texts."""
    tokenizer, texts = tokenizer_of(server, family), CHAT_FAMILIES[family]
    ids = [tokenizer.encode(token, add_special_tokens=False).ids for token in (*texts.special, *texts.plain)]
    assert all(len(each) == 1 for each in ids)
    assert tokenizer.decode([token for (token,) in ids]) == "".join(texts.plain)
    assert len(tokenizer.encode("What is the weather?").ids) < len("What is the weather?")
