"""ScoreFilter: numbers of a tiny model against the plain formula, rules about rounds, traces, and the scorers alone."""

import json
import math

import pytest
import torch

from tests.support.models.plain_training import MODEL, plain_model
from twinkle.data_format import SampledSequence, SampleResponse, SamplingParams, pack_value, user_data_get
from twinkle.errors import InvalidInputError, UnsupportedError
from twinkle.model import MultiLoraTransformersModel
from twinkle.sampler import LocalSampler
from twinkle_agentic.preprocessor import (
    ChrMinScorer,
    LLMBackend,
    OpenAIBackend,
    ParaphraseScorer,
    PassNScorer,
    SamplerBackend,
    ScoreFilter,
    SIFDScorer,
)
from twinkle_agentic.preprocessor.scoring.scorers import Round, Score, Scorer


def talk(*contents, **data):
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]
    return {"messages": messages, "user_data": [(key, pack_value(value)) for key, value in data.items()]}


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sampler():
    return LocalSampler(MultiLoraTransformersModel(model_id=MODEL, mixed_precision="fp32", device="cpu", max_loras=1))


def plain_deltas(model, prompt, reply):
    """Return log p(token | prompt, reply so far) − log p(token | reply so far), from the second token on."""

    def logprobs(ids):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].double()
        return torch.log_softmax(logits, -1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]

    return (logprobs(prompt + reply)[len(prompt) :] - logprobs(reply)).tolist()


def test_scores_are_those_of_the_plain_formula(sampler, tmp_path):
    rows = [
        talk("What do two and two make?", "They make four, they make four.", id="short"),
        talk("A story! " * 40, "Once there was a cat, and the cat was the king.", "More!", "No more.", id="long"),
    ]
    # a scorer that passes everything, so that both are asked about every round
    step = ScoreFilter(
        sampler.template,
        SamplerBackend(sampler),
        [ChrMinScorer(threshold=1.1), SIFDScorer()],
        max_prompt_tokens=40,
        trace_dir=tmp_path / "traces",
    )
    kept, dropped = step(rows)
    assert (len(kept), dropped) == (2, [])
    model, template = plain_model(), sampler.template
    for row in rows:
        trace = json.loads((tmp_path / "traces" / f"ok-{user_data_get(row['user_data'], 'id')}.json").read_text())
        places = [place for place, message in enumerate(row["messages"]) if message["role"] == "assistant"]
        assert [each["round"] for each in trace["rounds"]] == places
        for each in trace["rounds"]:
            prompt = template.encode({"messages": row["messages"][: each["round"]]}, add_generation_prompt=True)
            ids = [int(token) for token in prompt["input_ids"]][-40:]
            reply = template.tokenizer.encode(row["messages"][each["round"]]["content"], add_special_tokens=False)
            deltas = plain_deltas(model, ids, reply)
            smallest = {}
            for token, delta in zip(reply[1:], deltas, strict=True):
                smallest[token] = min(delta, smallest.get(token, delta))
            assert len(smallest) < len(deltas) or len(deltas) < 10  # tokens repeat
            expected = sum(delta > 0 for delta in smallest.values()) / len(smallest)
            assert each["scores"]["ChrMinScorer"] == pytest.approx(expected)
            sifd = math.exp(-sum(deltas) / len(deltas))
            assert each["scores"]["SIFDScorer"] == pytest.approx(sifd, rel=1e-5)


def test_sampler_backend(sampler):
    backend = SamplerBackend(sampler)
    ids = sampler.template.tokenizer.encode("two and two", add_special_tokens=False)
    by_text, by_ids = backend.prompt_logprobs(["two and two"])[0], backend.prompt_logprobs_ids([ids])[0]
    assert by_text == by_ids
    assert (len(by_ids), by_ids[0]) == (len(ids), None)
    params = SamplingParams(max_tokens=4, temperature=0)
    questions = [[{"role": "user", "content": text}] for text in ("one", "two")]
    assert backend.chat_batch(questions, params) == [backend.chat(question, params) for question in questions]
    assert backend.chat_batch([]) == backend.prompt_logprobs_ids([]) == []
    with pytest.raises(UnsupportedError, match="embed_endpoint"):
        backend.embeddings(["a"])
    with pytest.raises(InvalidInputError, match="a method sample"):
        SamplerBackend(3)


# --- scorers, with a backend whose numbers are written here -----------------------------------------------------------


class Written(LLMBackend):
    """Log-probabilities by token list, answers by the last message, vectors by text."""

    def __init__(self, logprobs=(), answers=(), vectors=()):
        self.logprobs, self.answers, self.vectors = dict(logprobs), dict(answers), dict(vectors)
        self.asked = []

    def chat_batch(self, batch, sampling_params=None):
        self.asked += [(messages, sampling_params) for messages in batch]
        return [self._answer(messages[-1]["content"]) for messages in batch]

    def _answer(self, text):
        answer = next(value for part, value in self.answers.items() if part in text)
        return answer.pop(0) if isinstance(answer, list) else answer

    def prompt_logprobs(self, texts):
        raise NotImplementedError

    def prompt_logprobs_ids(self, batch):
        return [self.logprobs[tuple(ids)] for ids in batch]

    def embeddings(self, texts):
        return [self.vectors[text] for text in texts]


# tokens 5 6 5 7 after the prompt 1 2: Δ of the last three is 0.5, -0.25, 1.0
ROUND = Round([{"role": "user", "content": "q"}], "reply", [1, 2], [5, 6, 5, 7])
LOGPROBS = {
    (1, 2, 5, 6, 5, 7): [None, -9.0, -9.0, -1.0, -1.25, -0.5],
    (5, 6, 5, 7): [None, -1.5, -1.0, -1.5],
}


def test_chr_min_by_hand():
    repeated = Round(ROUND.context, "reply", [1], [5, 6, 6, 7])  # Δ: 6 → 0.5 and −0.5, 7 → 1.0
    logprobs = {(1, 5, 6, 6, 7): [None, -9.0, -1.0, -2.0, -0.5], (5, 6, 6, 7): [None, -1.5, -1.5, -1.5]}
    backend = Written({**LOGPROBS, **logprobs})
    assert ChrMinScorer()([ROUND, repeated], backend) == [Score(pytest.approx(2 / 3), False), Score(0.5, False)]
    assert [score.passed for score in ChrMinScorer(0.6)([ROUND, repeated], backend)] == [False, True]
    assert ChrMinScorer().threshold == 0.47


def test_sifd_by_hand():
    value = math.exp(-(0.5 - 0.25 + 1.0) / 3)
    for threshold, passed in ((None, True), (value - 0.01, True), (value + 0.01, False)):
        assert SIFDScorer(threshold)([ROUND], Written(LOGPROBS)) == [Score(pytest.approx(value), passed)]


def test_pass_n():
    other = Round([{"role": "user", "content": "other"}], "7", [1], [7, 7])
    backend = Written(answers={"Other answer\nright": "Yes.", "Other answer\nwrong": "No, they differ.",
                               "other": "wrong", "q": ["right", "wrong", "right"]})  # fmt: skip
    assert PassNScorer(n=3)([ROUND, other], backend) == [Score(pytest.approx(2 / 3), True), Score(0.0, False)]
    assert [params.temperature for _, params in backend.asked] == [1.0] * 6 + [0.0] * 6
    judged = []

    def judge(context, reply, answer):
        judged.append((context[0]["content"], reply, answer))
        return answer == reply

    backend = Written(answers={"q": ["reply", "no", "reply"]})
    (score,) = PassNScorer(n=3, judge=judge, min_passed=2, max_passed=2)([ROUND], backend)
    assert score == Score(pytest.approx(2 / 3), True)
    assert judged == [("q", "reply", text) for text in ("reply", "no", "reply")]
    for bounds in ({"min_passed": 3}, {"max_passed": 1}):
        (score,) = PassNScorer(3, judge, **bounds)([ROUND], Written(answers={"q": ["reply", "no", "reply"]}))
        assert not score.passed
    with pytest.raises(InvalidInputError, match="n: got 0"):
        PassNScorer(n=0)


def test_paraphrase():
    backend = Written(
        answers={"in other words": "q2", "q2": "answer"}, vectors={"reply": [1.0, 0.0], "answer": [3.0, 4.0]}
    )
    assert ParaphraseScorer()([ROUND], backend) == [Score(pytest.approx(0.6), False)]  # cos = 3/5
    assert ParaphraseScorer(threshold=0.59)([ROUND], backend)[0].passed


# --- rules of the filter ----------------------------------------------------------------------------------------------


class Wanted(Scorer):
    """Passes replies that contain a word, and notes what it was asked."""

    def __init__(self, word):
        self.word, self.asked = word, []

    def __call__(self, rounds, backend):
        self.asked += [each.reply for each in rounds]
        return [Score(float(self.word in each.reply), self.word in each.reply) for each in rounds]


class Letters:
    """A template and tokenizer whose tokens are characters."""

    tokenizer = property(lambda self: self)

    def encode(self, given, add_generation_prompt=False, add_special_tokens=True):
        if isinstance(given, str):
            return [ord(letter) for letter in given]
        text = "".join(f"{message['role'][0]}:{message.get('content') or ''};" for message in given["messages"])
        return {"input_ids": [ord(letter) for letter in text + "a:"]}


def filtered(row, *scorers, **options):
    kept, dropped = ScoreFilter(Letters(), Written(), scorers or [Wanted("good")], **options)([row])
    assert len(kept) + len(dropped) == 1
    if dropped:
        return dropped[0]["drop_reason"]
    return user_data_get(kept[0]["user_data"], "key_rounds")


def test_all_assistant_turns_are_scored_without_key_rounds():
    assert filtered(talk("q", "good one", "q", "good two")) == [1, 3]
    assert filtered(talk("q", "good one", "q", "bad")) == "score_round_failed"
    assert filtered(talk("q", "good one", "q", "bad"), drop_row_on_any_fail=False) == [1]
    assert filtered(talk("q", "bad", "q", "bad")) == "score_all_rounds_failed"
    assert filtered(talk("q", "bad", "q", "bad"), drop_row_on_any_fail=False) == "score_all_rounds_failed"


def test_key_rounds_and_intents():
    row = talk("q", "bad", "q", "good", "q", "bad", key_rounds=[1, 3], intents=["code", "math"])
    assert filtered(row) == "score_round_failed"
    assert filtered(row, intents=["math"]) == [1, 3]
    assert filtered(row, intents=["code"]) == "score_round_failed"
    assert filtered(row, intents=["code"], drop_row_on_any_fail=False) == [3]
    assert filtered(row, intents=["poetry"]) is not None
    (kept,), _ = ScoreFilter(Letters(), Written(), [Wanted("good")], drop_row_on_any_fail=False)([row])
    assert user_data_get(kept["user_data"], "intents") == ["math"]
    assert user_data_get(row["user_data"], "key_rounds") == [1, 3]
    with pytest.raises(InvalidInputError, match="numbers of assistant messages"):
        filtered(talk("q", "good", key_rounds=[0]))


def test_nothing_to_score():
    empty = talk("q", "good", key_rounds=[])
    only_reply = {"messages": [{"role": "assistant", "content": "good"}], "user_data": []}
    for row in (empty, only_reply, talk("q"), talk("q", "x"), talk("q", ""), {"user_data": []}):
        assert filtered(row) == "score_no_context"
        kept, dropped = ScoreFilter(Letters(), Written(), [Wanted("good")], keep_if_no_key_rounds=True)([row])
        assert (kept, dropped) == ([row], [])


def test_scorers_are_asked_in_order_and_for_all_rows_at_once():
    first, second = Wanted("good"), Wanted("very")
    rows = [talk("q", "very good", "q", "bad"), talk("q", "good")]
    kept, dropped = ScoreFilter(Letters(), Written(), [first, second], drop_row_on_any_fail=False)(
        {key: [row[key] for row in rows] for key in rows[0]}
    )
    assert (first.asked, second.asked) == (["very good", "bad", "good"], ["very good", "good"])
    assert [len(kept), [row["drop_reason"] for row in dropped]] == [1, ["score_all_rounds_failed"]]


def test_the_reply_has_thoughts_and_calls_and_the_prompt_is_cut_on_the_left():
    seen = []

    class Look(Wanted):
        def __call__(self, rounds, backend):
            seen.extend(rounds)
            return super().__call__(rounds, backend)

    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    row = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "question"}]},
            {"role": "assistant", "content": "good", "reasoning_content": "hm", "tool_calls": [call]},
        ]
    }
    filtered(row, Look("good"), max_prompt_tokens=3)
    assert seen[0].reply == "<think>\nhm\n</think>\ngood\n" + json.dumps([call])
    assert seen[0].question == "question"
    assert "".join(map(chr, seen[0].prompt_ids)) == ";a:"


def test_mistakes():
    for wrong in ({"scorers": []}, {"max_prompt_tokens": 0}, {"intents": "code"}):
        with pytest.raises(InvalidInputError, match=next(iter(wrong))):
            ScoreFilter(**{"template": Letters(), "backend": Written(), "scorers": [Wanted("x")], **wrong})


# --- traces -----------------------------------------------------------------------------------------------------------


def test_traces(tmp_path):
    folder = tmp_path / "traces"
    rows = [
        {**talk("q", "good", id="a/b", ground_truth="4"), "input_ids": [1, 2], "logprobs": [0.5]},
        talk("q", "bad", prompt_id="p1"),
        talk("q", "good", id="a/b"),
        talk("q", "good"),
        talk("q"),
    ]
    ScoreFilter(Letters(), Written(), [Wanted("good")], trace_dir=folder)(rows)
    names = sorted(path.name for path in folder.iterdir())
    assert names[0:2] == ["fail-p1.json", names[1]]
    assert {"ok-a_b.json", "ok-a_b-2.json"} < set(names)
    assert len(names) == 4
    trace = json.loads((folder / "ok-a_b.json").read_text())
    assert set(trace) == {"trajectory", "ground_truth", "stop_reason", "truncated", "success", "rounds"}
    assert (trace["ground_truth"], trace["success"], trace["truncated"]) == ("4", True, False)
    assert set(trace["trajectory"]) == {"messages", "user_data"}
    assert trace["rounds"] == [{"round": 1, "scores": {"Wanted": 1.0}, "passed": True}]
    failed = json.loads((folder / "fail-p1.json").read_text())
    assert failed["trajectory"]["drop_reason"] == "score_all_rounds_failed"
    assert (folder / "fail-p1.json").read_text().startswith('{\n  "trajectory"')


def test_callbacks_choose_what_is_stored_and_what_is_a_success(tmp_path):
    rows = [talk("q", "good", id="a"), talk("q", "good", id="b"), talk("q", "bad", id="c")]

    def only_ac(row):
        if user_data_get(row["user_data"], "id") == "b":
            raise RuntimeError("a callback that fails")
        return True

    step = ScoreFilter(
        Letters(),
        Written(),
        [Wanted("good")],
        trace_dir=tmp_path / "t",
        trace_callback=only_ac,
        success_callback=lambda row: row["drop_reason"] == "score_all_rounds_failed",  # raises for a kept row
    )
    step(rows)
    assert sorted(path.name for path in (tmp_path / "t").iterdir()) == ["fail-a.json", "ok-c.json"]


def test_an_existing_folder_is_never_deleted(tmp_path):
    folder = tmp_path / "traces"
    for _ in range(2):
        ScoreFilter(Letters(), Written(), [Wanted("good")], trace_dir=folder)([talk("q", "good", id="a")])
    assert [path.name for path in (tmp_path / "traces.1").iterdir()] == ["ok-a.json"]
    assert [path.name for path in folder.iterdir()] == ["ok-a.json"]
    (folder / "ok-a.json").rename(folder / "step000001-unjudged-a.json")  # a rollout's trace
    ScoreFilter(Letters(), Written(), [Wanted("good")], trace_dir=folder)
    assert [path.name for path in (tmp_path / "traces.2").iterdir()] == ["step000001-unjudged-a.json"]
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(InvalidInputError, match=r"traces only; this one has thesis\.tex"):
        ScoreFilter(Letters(), Written(), [Wanted("good")], trace_dir=folder)
    assert (folder / "thesis.tex").read_text() == "years of work"
    with pytest.raises(InvalidInputError, match="this is a file"):
        ScoreFilter(Letters(), Written(), [Wanted("good")], trace_dir=folder / "thesis.tex")


# --- backends ---------------------------------------------------------------------------------------------------------


def test_a_sampler_without_a_template_gives_its_own_text():
    class Bare:
        def sample(self, inputs, params):
            return [SampleResponse([SampledSequence("stop", [1], decoded="hello")]) for _ in inputs]

    assert SamplerBackend(Bare()).chat([{"role": "user", "content": "q"}]) == "hello"


def test_an_address_is_required():
    with pytest.raises(InvalidInputError, match="http"):
        OpenAIBackend("localhost:8000")
    assert OpenAIBackend("http://localhost:8000/v1/").endpoint == "http://localhost:8000"
