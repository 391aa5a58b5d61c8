"""Samplers on a server, and conversations with tools around them."""

import asyncio
import threading

import numpy as np
import pytest

from tests.clients.twinkle.stub_server import Drop
from twinkle_client import InvalidRequestError, LoraConfig
from twinkle_client.data_format import SamplingParams
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.rollout import ClientMultiTurnRollout, extend_with_bridge
from twinkle_client.sampler import LocalSampler, Sampler, vLLMSampler
from twinkle_client.types import SampledSequenceModel, SampleResponseModel

S = "/sampler/Qwen/Qwen3.5-4B/twinkle"
SEQUENCE = {
    "stop_reason": "stop",
    "tokens": [5, 6],
    "logprobs": [[[5, -0.1]], [[6, -0.2]]],
    "decoded": "hi",
    "new_input_feature": {"input_ids": [1, 2, 5, 6], "user_data": [["ground_truth", "18"]]},
}


@pytest.fixture
def sampler(stub, client):
    stub.answer(f"{S}/create", {"status": "ok"})
    stub.answer(f"{S}/set_template", {"status": "ok"})
    stub.answer(f"{S}/sample", lambda body: {"samples": [{"sequences": [SEQUENCE]} for _ in body["inputs"]]})
    return vLLMSampler("ms://Qwen/Qwen3.5-4B", client=client)


def test_the_recorded_bodies(stub, sampler):
    assert stub.bodies(f"{S}/create") == [{}]
    assert sampler.set_template("Qwen3_5Template").status == "ok"
    assert stub.bodies(f"{S}/set_template") == [
        {"template_cls": "Qwen3_5Template", "adapter_name": "", "model_id": "Qwen/Qwen3.5-4B"}
    ]
    inputs = [{"input_ids": np.array([1, 2])}]
    (response,) = sampler.sample(inputs, {"max_tokens": 4}, adapter_uri="twinkle://x/weights/y", num_samples=1)
    assert stub.bodies(f"{S}/sample") == [
        {
            "inputs": [{"input_ids": [1, 2]}],
            "sampling_params": {"max_tokens": 4},
            "adapter_name": "",
            "num_samples": 1,
            "adapter_uri": "twinkle://x/weights/y",
        }
    ]
    (sequence,) = response.sequences
    assert (sequence.tokens, sequence.stop_reason, sequence.decoded) == ([5, 6], "stop", "hi")
    assert sequence.logprobs[0][0][1] == -0.1
    assert sequence.new_input_feature["user_data"] == [["ground_truth", "18"]]


def test_sampling_params_in_all_forms(stub, sampler):
    from twinkle.data_format import SamplingParams as LibraryParams

    sampler.sample([{"input_ids": [1]}], SamplingParams(max_tokens=3, temperature=0.0))
    sampler.sample([{"input_ids": [1]}], LibraryParams(max_tokens=3, temperature=0.0), adapter_name=None)
    sampler.sample({"input_ids": [1]})
    ours, librarys, none = stub.bodies(f"{S}/sample")
    assert ours["sampling_params"] == librarys["sampling_params"]
    assert ours["sampling_params"]["max_tokens"] == 3
    assert librarys["adapter_name"] == ""
    assert none["sampling_params"] is None
    assert none["inputs"] == {"input_ids": [1]}
    with pytest.raises(InvalidRequestError, match="sampling_params: got 3"):
        sampler.sample([], 3)


def test_a_sampler_of_a_model_handle(stub, client, sampler):
    stub.answer("/model/Qwen/Qwen3.5-4B/twinkle/create", {})
    stub.answer("/model/Qwen/Qwen3.5-4B/twinkle/add_adapter_to_model", {"adapter_name": "x"})
    model = MultiLoraTransformersModel("Qwen/Qwen3.5-4B", client=client)
    model.add_adapter_to_model("mine", LoraConfig())
    assert LocalSampler is Sampler
    LocalSampler(model).sample([{"messages": []}], adapter_name="mine")
    assert stub.bodies(f"{S}/sample")[-1]["adapter_name"] == "mine"


def test_the_template_decodes(stub, sampler):
    stub.answer("/processor/twinkle/create", {"processor_id": "pid:1"})
    stub.answer("/processor/twinkle/call", {"result": "hello"})
    sampler.set_template("Qwen3_5Template", max_length=64)
    assert sampler.template.decode([1, 2]) == "hello"
    assert stub.bodies("/processor/twinkle/create") == [
        {
            "processor_type": "template",
            "class_type": "Qwen3_5Template",
            "model_id": "Qwen/Qwen3.5-4B",
            "max_length": 64,
        }
    ]


def test_a_sample_is_asked_for_again_when_it_gets_lost(stub, sampler):
    stub.fail(f"{S}/sample", Drop())
    assert len(sampler.sample([{"input_ids": [1]}])) == 1
    assert len(stub.asked(f"{S}/sample")) == 2


def test_many_at_once(stub, sampler):
    together = threading.Barrier(12)

    def answer(body):
        together.wait(120)  # no request is answered before all have arrived
        return {"samples": [{"sequences": [{**SEQUENCE, "tokens": body["inputs"][0]["input_ids"]}]}]}

    stub.answer(f"{S}/sample", answer)

    async def rollouts():
        return await asyncio.gather(*(sampler.asample([{"input_ids": [number]}]) for number in range(12)))

    responses = asyncio.run(rollouts())
    assert [response[0].sequences[0].tokens for response in responses] == [[number] for number in range(12)]


# --- conversations with tools -----------------------------------------------------------------------------------------


class Letters:
    """A tokenizer with one token for each character."""

    def apply_chat_template(self, messages, tools=None, tokenize=False, add_generation_prompt=False, **variables):
        text = "".join(f"<{message['role'][0]}>{message['content']}" for message in messages)
        return text + ("<a>" if add_generation_prompt else "")

    def encode(self, text, add_special_tokens=True):
        return [ord(letter) for letter in text]

    def decode(self, tokens):
        return "".join(chr(token) for token in tokens)


class LettersTemplate:
    """The small part of the library's template that these tests use. A tool call is written ``!name``."""

    def __init__(self, max_length=None):
        self.tokenizer = Letters()
        self.enable_thinking = True
        self.max_length = max_length

    def encode(self, trajectory, add_generation_prompt=False):
        ids = self.tokenizer.encode(self.tokenizer.apply_chat_template(trajectory["messages"], None, False, True))
        return {**trajectory, "input_ids": ids, "labels": [-100] * len(ids)}

    def _invoke_post_pipeline(self, features):
        (feature,) = features
        if self.max_length is not None and len(feature["input_ids"]) > self.max_length:
            return []
        return [{**feature, "labels": np.roll(feature["labels"], -1), "length": len(feature["input_ids"])}]

    def parse_tool_call(self, text):
        return [{"function": {"name": text[1:]}}] if text.startswith("!") else []


class Scripted:
    """A sampler that returns scripted lines, trajectory by trajectory."""

    def __init__(self, *lines, stop_reason="stop"):
        self.lines = [list(each) for each in lines]
        self.stop_reason = stop_reason
        self.rounds = []

    def sample(self, inputs, sampling_params=None):
        self.rounds.append((len(inputs), sampling_params))
        return [SampleResponseModel(sequences=[self._say(feature)]) for feature in inputs]

    def _say(self, feature):
        text = self.lines[feature["number"]].pop(0)
        tokens = [ord(letter) for letter in text]
        grown = {
            **feature,
            "input_ids": [*feature["input_ids"], *tokens],
            "labels": np.roll([*np.roll(feature["labels"], 1), *tokens], -1).tolist(),
            "messages": [*feature["messages"], {"role": "assistant", "content": text}],
        }
        return SampledSequenceModel(
            stop_reason=self.stop_reason,
            tokens=tokens,
            logprobs=[[(token, -0.5)] for token in tokens],
            decoded=text,
            new_input_feature=grown,
        )


def trajectory(number):
    return {"messages": [{"role": "user", "content": "go"}], "number": number}


def upper(call):
    return call["function"]["name"].upper()


def test_tools_answer_and_tokens_stay_as_they_were_sampled():
    sampler = Scripted(["!up", "done"], ["at once"])
    rollout = ClientMultiTurnRollout(sampler, LettersTemplate(), upper, SamplingParams(max_tokens=9, logprobs=1))
    first, second = rollout([trajectory(0), trajectory(1)])
    assert [count for count, _ in sampler.rounds] == [2, 1]  # one request a round, with the trajectories that continue
    assert sampler.rounds[0][1]["max_tokens"] == 9
    assert "".join(map(chr, first["input_ids"])) == "<u>go<a>!up<t>UP<a>done"
    learnt = "".join(chr(label) for label in first["labels"] if label != -100)
    assert learnt == "!updone"
    assert [message["role"] for message in first["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert len(first["logprobs"]) == len(learnt)
    assert (first["turns"], first["stop_reason"], first["truncated"]) == (2, "stop", False)
    assert second["turns"] == 1
    for place, label in enumerate(first["labels"][:-1]):  # shifted: each label is the next token
        assert label in (-100, first["input_ids"][place + 1])


def test_limits():
    def run(sampler, template=None, **options):
        rollout = ClientMultiTurnRollout(sampler, template or LettersTemplate(), upper, **options)
        (result,) = rollout.rollout([trajectory(0)])
        return result["turns"], result["stop_reason"], result["truncated"]

    assert run(Scripted(["!a", "!b"]), max_turns=2) == (2, "max_turns", True)
    assert run(Scripted(["!a"], stop_reason="length")) == (1, "length", False)
    assert run(Scripted(["!a"]), max_trajectory_tokens=9) == (1, "stop", True)
    assert run(Scripted(["!a"]), LettersTemplate(max_length=12)) == (1, "stop", True)
    assert ClientMultiTurnRollout(Scripted(), LettersTemplate())([]) == []


def test_mistakes():
    template = LettersTemplate()
    for wrong, message in (
        ({"template": None}, "template"),
        ({"max_turns": 0}, "max_turns"),
        ({"max_trajectory_tokens": 0}, "max_trajectory_tokens"),
        ({"sampling_params": {"num_samples": 2}}, "num_samples"),
    ):
        with pytest.raises(ValueError, match=message):
            ClientMultiTurnRollout(Scripted(), **{"template": template, **wrong})
    rollout = ClientMultiTurnRollout(Scripted(["!a"]), template)
    with pytest.raises(TypeError, match="a list"):
        rollout({"messages": []})
    with pytest.raises(ValueError, match="trajectory 0 produced tool_calls but no tool_manager"):
        rollout([trajectory(0)])
    with pytest.raises(ValueError, match="one for each of 1"):
        rollout([trajectory(0)], tool_manager=[upper, upper])


def test_samplers_that_say_too_little():
    class Silent(Scripted):
        def _say(self, feature):
            return super()._say(feature).model_copy(update={"new_input_feature": None})

    class Short(Scripted):
        def _say(self, feature):
            return super()._say(feature).model_copy(update={"logprobs": []})

    for sampler, message in ((Silent(["a"]), r"batch index 0 \(trajectory 0\)"), (Short(["a"]), "0 log-prob")):
        with pytest.raises(RuntimeError, match=message):
            ClientMultiTurnRollout(sampler, LettersTemplate())([trajectory(0)])


def test_a_bridge_needs_a_template_that_only_appends():
    feature = LettersTemplate().encode(trajectory(0))
    answer = [{"role": "tool", "content": "x"}]

    class Rewriting(Letters):
        def apply_chat_template(self, messages, **variables):
            return f"{len(messages)} messages"

    template = LettersTemplate()
    template.tokenizer = Rewriting()
    with pytest.raises(RuntimeError, match="differently"):
        extend_with_bridge(feature, answer, template)
    with pytest.raises(RuntimeError, match="aligned"):
        extend_with_bridge({**feature, "labels": []}, answer, LettersTemplate())
