"""Conversations with tools: sampled tokens are kept unchanged, and the labels cover exactly what the model said."""

import json
import re
from dataclasses import replace

import numpy as np
import peft
import pytest
import torch

from tests.support.models.plain_training import LORA, MODEL
from tests.support.texts import counting_rollout
from tests.support.texts.conversations import save_tokenizer
from tests.support.texts.layouts import QWEN3_SOURCE
from twinkle.data_format import SampledSequence, SampleResponse, SamplingParams, pack_value
from twinkle.errors import InvalidInputError
from twinkle.infra import DeviceMesh
from twinkle.model import MultiLoraTransformersModel
from twinkle.sampler import LocalSampler
from twinkle.template import Qwen3Template
from twinkle_agentic.rollout import MultiTurnRollout, extend_with_bridge
from twinkle_agentic.tools import Tool, ToolManager

END = "<|im_end|>"


class Named(Tool):
    """A tool that answers with a function of its arguments."""

    def __init__(self, name, answer):
        self.name, self.answer = name, answer

    def __call__(self, tool_name, arguments):
        return self.answer(**arguments)

    def tool_info(self):
        return {"type": "function", "function": {"name": self.name, "description": "", "parameters": {}}}


TOOLS = ToolManager([Named("add", lambda a, b: str(a + b)), Named("find", lambda what: f"{what}\n\nis here")])


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    special = ("<|im_start|>", END, "<|endoftext|>")
    folder = save_tokenizer(tmp_path_factory.mktemp("qwen") / "model", special, QWEN3_SOURCE, None, END)
    return Qwen3Template(str(folder), enable_thinking=False)


def call_text(name, **arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


class Scripted:
    """A sampler that says one scripted line after another.

    With ``letters`` its tokens are not those the tokenizer would choose.
    """

    def __init__(self, template, lines, letters=False):
        self.template, self.lines, self.letters = template, [list(each) for each in lines], letters
        self.said = [[] for _ in lines]
        self.rounds = []
        self.stop_reason, self.changes, self.repeat = "stop", {}, False

    def sample(self, inputs, sampling_params=None, adapter_name=""):
        self.rounds.append((len(inputs), sampling_params, adapter_name))
        said = {}  # a copy of an input gets the same line
        for feature in inputs:
            if not self.repeat or feature["number"] not in said:
                said[feature["number"]] = SampleResponse([replace(self._say(feature), **self.changes)])
        return [said[feature["number"]] for feature in inputs]

    def _say(self, feature):
        number = feature["number"]
        text = self.lines[number].pop(0)
        encode = self.template.tokenizer.encode
        pieces = list(text) if self.letters else [text]
        tokens = [token for piece in pieces for token in encode(piece, add_special_tokens=False)]
        tokens += encode(END, add_special_tokens=False)
        self.said[number].append(tokens)
        return SampledSequence(
            self.stop_reason,
            tokens,
            [[(token, -0.25)] for token in tokens],
            self.template.decode(tokens),
            self.template.concat_input_feature(feature, tokens),
        )


def question(number, text="What is 2 + 3, and where is the cat?"):
    return {"messages": [{"role": "user", "content": text}], "tools": TOOLS.tool_infos(), "number": number}


LINES = [
    [
        call_text("add", a=2, b=3) + "\n" + call_text("find", what="the cat"),  # two calls in one turn
        call_text("find", what="Paris"),
        "5, and it is here.",
    ],
    ["I know: 5."],
]


@pytest.mark.parametrize("letters", [False, True])
def test_two_tools_over_three_turns(template, letters):
    sampler = Scripted(template, LINES, letters)
    rollout = MultiTurnRollout(sampler, template, TOOLS, SamplingParams(max_tokens=50, logprobs=1), adapter_name="a")
    first, second = rollout([question(0), question(1)])
    assert [(count, name) for count, _, name in sampler.rounds] == [(2, "a"), (1, "a"), (1, "a")]
    assert sampler.rounds[0][1] == SamplingParams(max_tokens=50, logprobs=1)
    _assert_what_was_said_is_learnt(first, sampler.said[0])
    _assert_what_was_said_is_learnt(second, sampler.said[1])
    answers = [message["content"] for message in first["messages"] if message["role"] == "tool"]
    assert answers == ["5", "the cat\n\nis here", "Paris\n\nis here"]
    roles = [message["role"] for message in first["messages"]]
    assert roles == ["user", "assistant", "tool", "tool", "assistant", "tool", "assistant"]
    assert (first["turns"], first["stop_reason"], first["truncated"]) == (3, "stop", False)
    assert (second["turns"], second["number"]) == (1, 1)
    assert len(first["logprobs"]) == sum(len(tokens) for tokens in sampler.said[0])
    # the model has read exactly the text that the chat template makes of the whole conversation
    whole = template.encode({**question(0), "messages": first["messages"]}, tokenize=False)["prompt"]
    assert template.decode(first["input_ids"]) + "\n" == whole


def _assert_what_was_said_is_learnt(trajectory, said):
    ids, labels = list(trajectory["input_ids"]), list(trajectory["labels"])
    assert len(ids) == len(labels) == trajectory["length"]
    assert list(trajectory["position_ids"]) == list(range(len(ids)))
    learnt = [place + 1 for place, label in enumerate(labels) if label != -100]
    assert [ids[place] for place in learnt] == [labels[place - 1] for place in learnt]  # labels are shifted by one
    assert [ids[place] for place in learnt] == [token for tokens in said for token in tokens]
    start = 0
    for tokens in said:  # each turn is there in one piece, as it was sampled
        start = next(place for place in learnt if place >= start)
        assert ids[start : start + len(tokens)] == tokens
        start += len(tokens)


def test_a_bridge_begins_with_what_the_model_was_not_asked_for(template):
    """The line break after the end of a turn comes from the chat template, not from the model."""
    feature = template.encode(question(0), add_generation_prompt=True)
    tokens = template.tokenizer.encode(call_text("add", a=1, b=2) + END, add_special_tokens=False)
    said = template.concat_input_feature(feature, tokens)
    grown = extend_with_bridge(said, [{"role": "tool", "content": "3"}], template)
    bridge = template.decode(grown["input_ids"][len(said["input_ids"]) :])
    assert bridge.startswith(
        "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert grown["input_ids"][: len(said["input_ids"])] == said["input_ids"].tolist()


def saved(folder):
    return {path.name: json.loads(path.read_text()) for path in sorted(folder.iterdir())}


def marked(number, **data):
    return {**question(number), "user_data": [(name, pack_value(value)) for name, value in data.items()]}


def test_traces(template, tmp_path):
    def success(trajectory):
        if trajectory["number"] == 3:
            raise KeyError("reward")
        return "5" in trajectory["messages"][-1]["content"]

    rollout = MultiTurnRollout(
        Scripted(template, [LINES[0], ["no"], ["5"], ["5"], ["5"]]),
        template,
        TOOLS,
        trace_dir=tmp_path / "traces",
        trace_callback=lambda trajectory: trajectory["skip"] if trajectory["number"] == 4 else True,  # KeyError: 'skip'
        success_callback=success,
    )
    given = [
        marked(0, id="a/b c", ground_truth="5"),
        marked(1, prompt_id="x" * 70),
        marked(2, id="a/b c"),
        marked(3, id="q"),
        marked(4, id="left out"),
    ]
    done = rollout(given, global_step=7)
    assert "success" not in done[0]
    traces = saved(tmp_path / "traces")
    names = ["fail-q", f"fail-{'x' * 64}", "ok-a_b_c", "ok-a_b_c-2"]
    assert sorted(traces) == sorted(f"step000007-{name}.json" for name in names)
    first = traces["step000007-ok-a_b_c.json"]
    assert {**first, "trajectory": None} == {
        "trajectory": None,
        "ground_truth": "5",
        "stop_reason": "stop",
        "truncated": False,
        "success": True,
    }
    assert first["trajectory"]["messages"] == done[0]["messages"]
    assert first["trajectory"]["turns"] == 3
    left = {"input_ids", "labels", "attention_mask", "position_ids", "logprobs"}
    assert left <= done[0].keys()
    assert not left & first["trajectory"].keys()
    assert traces["step000007-ok-a_b_c-2.json"]["ground_truth"] == ""
    assert (tmp_path / "traces" / "step000007-ok-a_b_c.json").read_text().startswith('{\n  "trajectory": {\n')


def test_traces_without_callbacks(template, tmp_path):
    for _ in range(2):  # the second call overwrites nothing
        rollout = MultiTurnRollout(Scripted(template, [["a"], ["b"]]), template, TOOLS, trace_dir=tmp_path)
        rollout([marked(0, id="a"), question(1)])
    traces = saved(tmp_path)
    assert len(traces) == 4
    assert {"unjudged-a.json", "unjudged-a-2.json"} <= traces.keys()
    assert all(trace["success"] is None for trace in traces.values())
    by_time = sorted(traces.keys() - {"unjudged-a.json", "unjudged-a-2.json"})
    assert all(re.fullmatch(r"unjudged-\d{13}-1\.json", name) for name in by_time)


def test_the_last_turn(template):
    lines = [[call_text("add", a=1, b=2), call_text("add", a=3, b=4), "never said"]]
    (done,) = MultiTurnRollout(Scripted(template, lines), template, TOOLS, max_turns=2)([question(0)])
    assert (done["turns"], done["stop_reason"], done["truncated"]) == (2, "max_turns", True)
    assert [message["role"] for message in done["messages"]] == ["user", "assistant", "tool", "assistant"]
    (done,) = MultiTurnRollout(Scripted(template, [["done"]]), template, TOOLS, max_turns=1)([question(0)])
    assert (done["turns"], done["stop_reason"], done["truncated"]) == (1, "stop", False)


def test_other_ends(template):
    def run(sampler, **options):
        (done,) = MultiTurnRollout(sampler, template, TOOLS, **options)([question(0)])
        return done["turns"], done["stop_reason"], done["truncated"]

    lines = [[call_text("add", a=1, b=2), "3"]]
    prompt = len(template.encode(question(0), add_generation_prompt=True)["input_ids"])
    cut = Scripted(template, lines)
    cut.stop_reason = "length"
    assert run(cut) == (1, "length", False)
    assert run(Scripted(template, lines), max_trajectory_tokens=prompt + 2) == (1, "stop", True)
    said = len(template.tokenizer.encode(lines[0][0] + END, add_special_tokens=False))
    template.max_length, template.truncation_strategy = prompt + said + 5, "delete"
    try:  # the call fits, the tool's answer does not
        assert run(Scripted(template, lines)) == (1, "stop", True)
    finally:
        template.max_length, template.truncation_strategy = None, "raise"


def test_tool_messages_carry_the_id_of_their_call(template):
    lines = [[call_text("add", a=2, b=3) + "\n" + call_text("find", what="it"), "done"]]
    (done,) = MultiTurnRollout(Scripted(template, lines), template, TOOLS)([question(0)])
    asked, *answers, _ = done["messages"][1:]
    ids = [call["id"] for call in asked["tool_calls"]]
    assert ids == ["call00100", "call00101"]
    assert [(answer["tool_call_id"], answer["content"]) for answer in answers] == [
        ("call00100", "5"),
        ("call00101", "it\n\nis here"),
    ]


def test_short_batches_are_filled_for_all_data_ranks(template):
    sampler = Scripted(template, LINES)
    sampler.device_mesh = DeviceMesh.from_sizes(dp_size=4)
    sampler.repeat = True
    done = MultiTurnRollout(sampler, template, TOOLS)([question(0), question(1)])
    assert [count for count, *_ in sampler.rounds] == [4, 4, 4]
    assert [each["turns"] for each in done] == [3, 1]


def test_a_manager_for_each_trajectory(template):
    managers = [ToolManager({"add": lambda name, given, own=own: own}) for own in ("first", "second")]
    lines = [[call_text("add"), "end"], [call_text("add"), "end"]]
    done = MultiTurnRollout(Scripted(template, lines), template)([question(0), question(1)], tool_manager=managers)
    assert [each["messages"][2]["content"] for each in done] == ["first", "second"]
    with pytest.raises(ValueError, match="one for each of 1 trajectories"):
        MultiTurnRollout(Scripted(template, lines), template)([question(0)], tool_manager=managers)


def test_mistakes(template):
    sampler = Scripted(template, [LINES[0]])
    for wrong, text in (
        ({"template": None}, "template"),
        ({"max_turns": 0}, "max_turns"),
        ({"max_trajectory_tokens": 0}, "max_trajectory_tokens"),
        ({"sampling_params": SamplingParams(num_samples=2)}, "num_samples"),
    ):
        with pytest.raises(ValueError, match=text):
            MultiTurnRollout(sampler, **{"template": template, **wrong})
    with pytest.raises(ValueError, match="tool_manager: got None"):  # also if the model calls no tool
        MultiTurnRollout(sampler, template)([question(0)])
    with pytest.raises(TypeError, match="got a dict, allowed: a list"):
        MultiTurnRollout(sampler, template, TOOLS)(question(0))
    assert MultiTurnRollout(sampler, template, TOOLS)([]) == []
    template.truncation_strategy = "split"
    try:
        with pytest.raises(InvalidInputError, match="a conversation must stay one row"):
            MultiTurnRollout(sampler, template)
    finally:
        template.truncation_strategy = "raise"


def test_samplers_that_answer_badly(template):
    def run(**changes):
        sampler = Scripted(template, [["a"]])
        sampler.changes = changes
        return MultiTurnRollout(sampler, template, TOOLS)([question(0)])

    with pytest.raises(
        RuntimeError, match=r"batch index 0 \(trajectory 0\): the sampler returned no new_input_feature"
    ):
        run(new_input_feature=None)
    with pytest.raises(RuntimeError, match="0 log-probabilities for 2 tokens"):
        run(logprobs=[])
    with pytest.raises(RuntimeError, match="3 log-probabilities for 2 sampled tokens"):
        run(tokens=[1, 2, 3], logprobs=[[(1, -0.5)]] * 3)
    assert run(logprobs=None)[0]["logprobs"] is None


def test_with_a_model_of_this_process():
    """A small random model says anything. Here each of its turns counts as a call of a tool."""
    model = MultiLoraTransformersModel(model_id=MODEL, mixed_precision="fp32", device="cpu", max_loras=1)
    model.add_adapter_to_model("a", peft.LoraConfig(**LORA))
    sampler = LocalSampler(model)
    template = counting_rollout.calls_every_turn(sampler.template)
    tool, tools = counting_rollout.environment_tool()
    params = counting_rollout.until_an_even_token()
    rollout = MultiTurnRollout(sampler, template, tools, params, max_turns=3, adapter_name="a")
    (done,) = rollout([counting_rollout.QUESTION])
    counting_rollout.check(done, tool)
    row = model.forward_only(inputs=[done], adapter_name="a")["logps"][0]  # logps of exactly the trained tokens
    trained = row[torch.tensor(done["labels"]) != -100]
    np.testing.assert_allclose(trained.numpy(), [pairs[0][1] for pairs in done["logprobs"]], atol=1e-5)
