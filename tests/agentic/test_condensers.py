"""Condensers: which chunks they replace, by what, and what they ask a model. Lengths are counted by hand."""

import pytest

from twinkle.data_format import SampledSequence, SampleResponse, SamplingParams
from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle_agentic.condenser import ModelCondenser
from twinkle_agentic.condenser.keyword import ParsedText, summary_lines
from twinkle_agentic.data_format import Chunks


class Answers:
    """A sampler that gives the same answer to everything."""

    def __init__(self, answer="short"):
        self.answer, self.calls = answer, []

    def sample(self, inputs, sampling_params=None, adapter_name="", adapter_path=None, *, use_base_model=False):
        self.calls.append((inputs, sampling_params, adapter_path, use_base_model))
        return [SampleResponse([SampledSequence("stop", [1], decoded=self.answer)]) for _ in inputs]


def text(content, role="user", turn=1, **raw):
    return {"type": "text", "content": content, "role": role, "round": turn, **({"raw": raw} if raw else {})}


LONG = "x" * 600


def asked(sampler):
    return [prompt["messages"][-1]["content"] for inputs, *_ in sampler.calls for prompt in inputs]


def test_a_long_chunk_is_replaced():
    sampler = Answers()
    before = Chunks([text(LONG), text("y" * 199), text("z" * 200)])
    after = ModelCondenser(sampler)(before)
    assert after.chunks == [
        text("short", condensed=True, original=LONG),
        text("y" * 199),  # below min_chars
        text("short", condensed=True, original="z" * 200),
    ]
    assert before[0] == text(LONG)
    ((inputs, params, path, base),) = sampler.calls
    # budgets: ceil(600 / 2) = 300, and 250 at least; the call's limit is 3 · 300 + 128 tokens
    assert params == SamplingParams(temperature=0.0, max_tokens=1028)
    assert (path, base) == (None, True)
    assert "at most 300 characters" in inputs[0]["messages"][1]["content"]
    assert inputs[0]["messages"][1]["content"].endswith(LONG)
    assert "at most 250 characters" in inputs[1]["messages"][1]["content"]
    assert [message["role"] for message in inputs[0]["messages"]] == ["system", "user"]


def test_the_least_limit_is_512_tokens():
    sampler = Answers()
    ModelCondenser(sampler, min_chars=1, min_budget_chars=10)(Chunks([text("x" * 21)]))
    assert sampler.calls[0][1].max_tokens == 512  # budget ceil(21 / 2) = 11, 3 · 11 + 128 = 161
    assert "at most 11 characters" in asked(sampler)[0]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("x" * 600, LONG),  # not strictly shorter
        ("x" * 599, "x" * 599),
        ("", LONG),
        ("<|im_end|>", LONG),
        ("  brief <|im_end|>", "brief"),
        ("```text\nbrief\n```", "brief"),
        ("```\nbrief\n```<|im_end|>\n", "brief"),
        ("<think>\nHm.\n</think>\n\nbrief", "brief"),
        ("Hm.\n</think>\n\nbrief", "brief"),  # the chat template has opened the block
        ("<think>\nHm. I was cut off", LONG),
        ("use `a` and ```b```", "use `a` and ```b```"),
    ],
)
def test_answers_are_cleaned_and_must_be_shorter(answer, expected):
    (chunk,) = ModelCondenser(Answers(answer))(Chunks([text(LONG)]))
    assert chunk["content"] == expected
    assert bool(chunk.get("raw", {}).get("condensed")) is (expected != LONG)


def test_what_is_never_replaced():
    chunks = [
        text(LONG, "system", 0),
        text(LONG, "assistant"),
        text(LONG, "tool"),
        text(LONG, condensed=True, original="o"),
        {"type": "image", "content": LONG, "role": "user", "round": 1},
    ]
    sampler = Answers()
    assert ModelCondenser(sampler)(Chunks(chunks)).chunks == chunks
    assert sampler.calls == []
    call = text(LONG, "assistant", kind="tool_call", tool_call={})
    after = ModelCondenser(sampler, skip_roles=())(Chunks([*chunks[:3], call]))
    assert [chunk["content"] for chunk in after] == ["short", "short", "short", LONG]


def test_rounds_and_patterns():
    chunks = Chunks([text(LONG), text(LONG, turn=2), text(f"KEEP {LONG}", turn=2)])
    found = ModelCondenser(Answers(), rounds=[2], skip_pattern="^KEEP")(chunks)
    assert [chunk["content"] for chunk in found] == [LONG, "short", f"KEEP {LONG}"]
    found = ModelCondenser(Answers(), rounds=[2])(chunks, rounds=[1])
    assert [chunk["content"] == "short" for chunk in found] == [True, False, False]


def test_several_conversations_in_one_call_or_in_batches():
    conversations = [Chunks([text(LONG), text("brief")]), Chunks([text(LONG), text(LONG)])]
    sampler = Answers()
    found = ModelCondenser(sampler)(conversations)
    assert [[chunk["content"] for chunk in each] for each in found] == [["short", "brief"], ["short", "short"]]
    assert [len(inputs) for inputs, *_ in sampler.calls] == [3]
    sampler = Answers()
    ModelCondenser(sampler, batch_size=2)(conversations)
    assert [len(inputs) for inputs, *_ in sampler.calls] == [2, 1]
    assert ModelCondenser(sampler)([]) == []


def test_a_question_is_for_the_chunks_after_it():
    sampler = Answers()
    condenser = ModelCondenser(
        sampler,
        user_prompt_template="{budget}|{query}|{text}",
        related_query=lambda chunk: chunk["content"] if chunk["content"].endswith("?") else None,
    )
    condenser([Chunks([text("a" * 200), text("Who?"), text("b" * 200)]), Chunks([text("c" * 200)])])
    assert asked(sampler) == [f"250||{'a' * 200}", f"250|Who?|{'b' * 200}", f"250||{'c' * 200}"]
    ModelCondenser(sampler, related_query=lambda chunk: "Who?")(Chunks([text("hi"), text(LONG)]))
    assert "answer this question: Who?" in asked(sampler)[-1]


def test_own_prompts_and_parameters():
    sampler = Answers()
    condenser = ModelCondenser(
        sampler, system_prompt="Be brief.", user_prompt_template="{{{budget}}} {text}", sampling_params={"top_p": 0.5}
    )
    condenser(Chunks([text(LONG)]), lora_path="/adapters/brief")
    ((inputs, params, path, base),) = sampler.calls
    assert [message["content"] for message in inputs[0]["messages"]] == ["Be brief.", f"{{300}} {LONG}"]
    assert params == SamplingParams(top_p=0.5, max_tokens=1028)
    assert (path, base) == ("/adapters/brief", False)
    condenser(Chunks([text(LONG)]), sampling_params=SamplingParams(max_tokens=7))
    assert sampler.calls[-1][1:] == (SamplingParams(max_tokens=7), None, True)


def test_samplers_with_other_keywords():
    """Those of the client name an adapter by its address, and a sampler of one's own may have no adapters."""

    class OfTheClient(Answers):
        def sample(self, inputs, sampling_params=None, adapter_name="", adapter_uri=None, num_samples=None):
            return super().sample(inputs, sampling_params, adapter_path=adapter_uri)

    class Plain(Answers):
        def sample(self, inputs, sampling_params=None):
            return super().sample(inputs, sampling_params)

    sampler = OfTheClient()
    ModelCondenser(sampler, lora_path="twinkle://a/weights/b")(Chunks([text(LONG)]))
    assert sampler.calls[0][2:] == ("twinkle://a/weights/b", False)
    assert ModelCondenser(Plain())(Chunks([text(LONG)]))[0]["content"] == "short"
    with pytest.raises(UnsupportedError, match=r"lora_path: Plain\.sample has neither adapter_path nor adapter_uri"):
        ModelCondenser(Plain(), lora_path="a")(Chunks([text(LONG)]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compression_ratio": 1.0}, "compression_ratio: got 1.0, allowed: a number > 1"),
        ({"compression_ratio": float("nan")}, "compression_ratio"),
        ({"batch_size": 0}, "batch_size: got 0"),
        ({"user_prompt_template": "{text}"}, "user_prompt_template: got .*with {budget} and {text}"),
        ({"user_prompt_template": "{budget} {text} {tone}"}, "user_prompt_template: got"),
        ({"user_prompt_template": "{budget} {text"}, "user_prompt_template: got"),
        ({"user_prompt_template": "{budget} {text}", "related_query": str}, "which related_query fills"),
        ({"sampling_params": {"num_samples": 2}}, "num_samples: got 2"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message) as raised:
        ModelCondenser(Answers(), **options)
    assert isinstance(raised.value, InvalidInputError)


# --- the lines of KeywordCondenser; test_keyword_condenser.py has spaCy's part ----------------------------------------

PARSED = ParsedText(
    "Marie Curie discovered radium in Paris.",
    ["Marie Curie discovered radium", "Curie won prize", "she taught students", "Curie died 1934"],
    ["Curie", "radium", "prize", "Warsaw", "physics"],
)


def test_a_summary_has_three_lines():
    assert summary_lines(PARSED, 1000, 160, 3, 8) == (
        "Open: Marie Curie discovered radium in Paris.\n"
        "Rel: Marie Curie discovered radium; Curie won prize; she taught students\n"
        "More: Warsaw, physics"  # the other words are in the lines above
    )
    assert summary_lines(PARSED, 1000, 12, 1, 1) == (
        "Open: Marie Curie…\nRel: Marie Curie discovered radium\nMore: prize"
    )


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (45, "Open: Marie Curie discovered radium in Paris."),  # 6 + 39 characters
        (44, "Open: Marie Curie discovered radium in Pari…"),
        (79, "Open: Marie Curie discovered radium in Paris."),
        (80, "Open: Marie Curie discovered radium in Paris.\nRel: Marie Curie discovered radium"),  # + 6 + 29
        (97, "Open: Marie Curie discovered radium in Paris.\nRel: Marie Curie discovered radium; Curie won prize"),
    ],
)
def test_what_does_not_fit_is_left_out(budget, expected):
    found = summary_lines(PARSED, budget, 160, 3, 0)
    assert found == expected
    assert len(found) <= budget


def test_lines_without_content_are_left_out():
    assert summary_lines(ParsedText("A.", [], []), 100, 160, 3, 8) == "Open: A."
