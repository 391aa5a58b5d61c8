"""Conversations whose long texts are condensed first. Chunker and condenser are small ones of these tests."""

import json
from dataclasses import dataclass

import pytest

from tests.support.texts.conversations import save_tokenizer
from tests.support.texts.layouts import QWEN3_SOURCE
from twinkle.data_format import SampledSequence, SampleResponse
from twinkle.template import Qwen3Template
from twinkle_agentic.chunker import NativeChunker
from twinkle_agentic.condenser import ModelCondenser
from twinkle_agentic.rollout import MultiTurnCondenseRollout, multi_turn_condense
from twinkle_agentic.rollout.multi_turn_condense import MultiTurnCondenseRollout as SameRollout
from twinkle_agentic.tools import ExtractCondensed, ToolManager

END = "<|im_end|>"


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    special = ("<|im_start|>", END, "<|endoftext|>")
    folder = save_tokenizer(tmp_path_factory.mktemp("qwen") / "model", special, QWEN3_SOURCE, None, END)
    return Qwen3Template(str(folder), enable_thinking=False)


@dataclass
class Pieces:
    """What ``Chunks`` of twinkle_agentic.data_format does, for user messages alone."""

    chunks: list

    def __iter__(self):
        return iter(self.chunks)

    def to_trajectory(self):
        texts, number = [], 0
        for chunk in self.chunks:
            condensed = chunk.get("raw", {}).get("condensed")
            number += bool(condensed)
            texts.append(f"<block_{number}>{chunk['content']}</block_{number}>" if condensed else chunk["content"])
        return {"messages": [{"role": "user", "content": "\n\n".join(texts)}]}


def by_paragraph(trajectory):
    texts = trajectory["messages"][0]["content"].split("\n\n")
    return Pieces([{"type": "text", "content": text, "role": "user", "round": 1} for text in texts])


class FirstWord:
    """Condenses texts of more than ten letters to their first word, and counts its calls."""

    def __init__(self):
        self.calls = []

    def __call__(self, chunks_list, **kwargs):
        self.calls.append((len(chunks_list), kwargs))
        return [Pieces([self._shorter(chunk) for chunk in chunks]) for chunks in chunks_list]

    def _shorter(self, chunk):
        if len(chunk["content"]) <= 10:
            return chunk
        raw = {"condensed": True, "original": chunk["content"]}
        return {**chunk, "content": chunk["content"].split()[0], "raw": raw}


class Sampler:
    """Says the same lines in every conversation."""

    def __init__(self, template, *lines):
        self.template, self.lines, self.prompts = template, lines, []

    def sample(self, inputs, sampling_params=None):
        return [SampleResponse([self._say(feature)]) for feature in inputs]

    def _say(self, feature):
        said = sum(message["role"] == "assistant" for message in feature["messages"])
        if not said:
            self.prompts.append(self.template.decode(feature["input_ids"]))
        tokens = self.template.tokenizer.encode(self.lines[said] + END, add_special_tokens=False)
        grown = self.template.concat_input_feature(feature, tokens)
        return SampledSequence("stop", tokens, None, self.template.decode(tokens), grown)


EXTRACT = '<tool_call>\n{"name": "extract_condensed", "arguments": {"blocks": 1}}\n</tool_call>'
LONG = "Winter is cold in the north.\n\nWhy?\n\nSummer is warm in the south."


def row(text, name):
    return {"messages": [{"role": "user", "content": text}], "user_data": [("id", name)]}


def test_a_model_reads_condensed_texts_and_asks_for_an_original(template, tmp_path):
    sampler, condenser = Sampler(template, EXTRACT, "Because."), FirstWord()
    rollout = MultiTurnCondenseRollout(
        sampler, template, None, by_paragraph, condenser, condenser_kwargs={"ratio": 3}, trace_dir=tmp_path
    )
    done = rollout([row(LONG, "a"), row("Short.", "b"), row(LONG, "c")], tool_manager=ToolManager(), global_step=1)
    assert SameRollout is MultiTurnCondenseRollout
    assert condenser.calls == [(2, {"ratio": 3})]  # equal conversations are condensed once, in one call for all
    condensed = "<block_1>Winter</block_1>\n\nWhy?\n\n<block_2>Summer</block_2>"
    assert [each["messages"][0]["content"] for each in done] == [condensed, "Short.", condensed]
    assert condensed in sampler.prompts[0]
    assert "extract_condensed" in sampler.prompts[0]
    # each trajectory has its own tool: a block can be read once in each of them
    assert [each["messages"][2]["content"] for each in done] == [
        "Winter is cold in the north.",
        "Error: there is no block 1; available: (none)",
        "Winter is cold in the north.",
    ]
    trace = json.loads((tmp_path / "step000001-unjudged-a.json").read_text())
    assert trace["blocks"] == {
        "block_1": {"original": "Winter is cold in the north.", "compressed": "Winter"},
        "block_2": {"original": "Summer is warm in the south.", "compressed": "Summer"},
    }
    assert trace["passages"] == {"passage_1": {"content": "Why?"}}


def test_a_manager_of_the_call_has_no_effect_and_that_is_told(template, monkeypatch):
    told = []
    monkeypatch.setattr(multi_turn_condense, "note_once", told.append)
    rollout = MultiTurnCondenseRollout(Sampler(template, "ok"), template, None, by_paragraph, FirstWord())
    rollout([])
    assert told == []
    rollout([], tool_manager=ToolManager())
    assert [line.partition(" in a call")[0] for line in told] == ["tool_manager: no effect"]


def test_a_callback_changes_the_condensed_trajectory(template):
    seen = []

    def callback(compressed, chunks, **kwargs):
        seen.append((len(list(chunks)), kwargs))
        return {**compressed, "messages": [{"role": "system", "content": "Read."}, *compressed["messages"]]}

    find = ToolManager({})
    rollout = MultiTurnCondenseRollout(
        Sampler(template, "ok"), template, find, by_paragraph, FirstWord(), post_compress_callback=callback
    )
    (done,) = rollout([row(LONG, "a")], global_step=3, mode="train")
    assert seen == [(3, {"global_step": 3, "mode": "train"})]
    assert [message["role"] for message in done["messages"]] == ["system", "user", "assistant"]
    assert find.names() == []  # the manager that was given is not changed


class Shortener:
    """A sampler for ModelCondenser: it answers with the first sentence of the passage, and keeps the prompts."""

    def __init__(self):
        self.prompts = []

    def sample(self, inputs, sampling_params=None, **options):
        self.prompts += [each["messages"][-1]["content"] for each in inputs]
        return [self._answer(each["messages"][-1]["content"]) for each in inputs]

    def _answer(self, prompt):
        passage = prompt[prompt.index("Passage ") :]
        return SampleResponse([SampledSequence("stop", [1], None, f"<think>hm</think>{passage.split('.')[0]}.", None)])


def passages(*numbers):
    return "".join(f"Passage {n}: it is about {n}. {f'Detail {n} is long. ' * 20}\n\n" for n in numbers)


def test_with_this_packages_chunker_and_a_model_as_condenser(template, tmp_path):
    """Blocks have the numbers that the prompt shows, and the tool gives back exactly the text that was condensed."""
    shortener = Shortener()
    chunker = NativeChunker(chunk_size=600, passage_boundary_re=r"^(?:Passage \d+:|Question)")
    rollout = MultiTurnCondenseRollout(
        Sampler(template, EXTRACT.replace("1}", "2}"), EXTRACT.replace("1}", "9}"), "ok"),
        template,
        ToolManager({}),
        chunker,
        ModelCondenser(shortener, min_budget_chars=10),
        trace_dir=tmp_path,
    )
    text = f"{passages(1, 2)}Question: which?"
    done = rollout([row(text, "a"), row(passages(3), "b"), row(text, "c")])
    assert len(shortener.prompts) == 3  # equal conversations are condensed once
    first, second, third = done
    assert first["messages"][0]["content"] == (
        "<block_1>Passage 1: it is about 1.</block_1>\n\n<block_2>Passage 2: it is about 2.</block_2>\n\n"
        "Question: which?"
    )
    assert first["messages"][2]["content"] == passages(2)
    assert first["messages"][4]["content"] == "Error: there is no block 9; available: 1, 2"
    assert second["messages"][2]["content"] == "Error: there is no block 2; available: 1"
    assert third["messages"][2]["content"] == passages(2)  # each conversation has its own tool
    assert [len(each["input_ids"]) == len(each["labels"]) for each in done] == [True] * 3
    trace = json.loads((tmp_path / "unjudged-a.json").read_text())
    assert trace["blocks"]["block_2"] == {"original": passages(2), "compressed": "Passage 2: it is about 2."}
    assert trace["passages"] == {"passage_1": {"content": "Question: which?"}}


def test_a_system_prompt_and_earlier_turns_stay_when_texts_are_condensed(template):
    rollout = MultiTurnCondenseRollout(
        Sampler(template, "unused", "ok"), template, None, NativeChunker(chunk_size=600), ModelCondenser(Shortener())
    )
    before = [{"role": "assistant", "content": "It says so."}, {"role": "user", "content": "Sure?"}]
    given = [{"role": "system", "content": "s" * 300}, {"role": "user", "content": passages(1)}, *before]
    (done,) = rollout([{"messages": given, "user_data": [("id", "a")]}])
    assert [message["content"] for message in done["messages"]] == [
        "s" * 300,
        "<block_1>Passage 1: it is about 1.</block_1>",
        "It says so.",
        "Sure?",
        "ok",
    ]


def test_mistakes(template):
    taken = ToolManager([ExtractCondensed([])])
    with pytest.raises(ValueError, match="extract_condensed"):
        MultiTurnCondenseRollout(Sampler(template), template, taken, by_paragraph, FirstWord())
    rollout = MultiTurnCondenseRollout(Sampler(template), template, None, by_paragraph, lambda chunks: [])
    assert rollout([]) == []
    with pytest.raises(ValueError, match="condenser: got '0 results', allowed: one for each of 1 inputs"):
        rollout([row("x", "a")])
    with pytest.raises(TypeError, match="unknown arguments mode"):
        rollout([row("x", "a")], mode="train")
    with pytest.raises(TypeError, match="allowed: a list"):
        rollout(row("x", "a"))
