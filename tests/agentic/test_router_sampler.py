"""The sampler that asks another model where its own is not sure. Entropies and means are worked out by hand."""

import math

import pytest

from tests.support.agents.chat_endpoint import ChatEndpoint
from twinkle.data_format import SampledSequence, SampleResponse, SamplingParams
from twinkle.errors import InvalidInputError, UnknownNameError
from twinkle.utils.logger import get_logger
from twinkle_agentic.sampler import RoutedSequence, RouterSampler

HALVES = [(1, math.log(0.5)), (2, math.log(0.5))]  # entropy ln 2 = 0.693
QUARTERS = [(token, math.log(0.25)) for token in range(4)]  # ln 4 = 1.386
CERTAIN = [(1, 0.0)]  # 0
ASK = {"messages": [{"role": "user", "content": "Who?"}]}


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


class Local:
    """A sampler that answers all prompts with the same tokens and their likeliest tokens."""

    def __init__(self, *sequences):
        self.sequences, self.calls, self.template = sequences, [], "plain"

    def set_template(self, template_cls, **options):
        self.template = (template_cls, options)

    def sample(self, inputs, sampling_params=None, adapter_name="", **options):
        rows = [inputs] if isinstance(inputs, dict) else inputs
        self.calls.append((rows, sampling_params, adapter_name, options))
        if sampling_params.max_tokens == 0:
            return [self._scored(row) for row in rows]
        return [SampleResponse([self._drawn(tops, sampling_params.logprobs) for tops in self.sequences]) for _ in rows]

    def _drawn(self, tops, logprobs):
        tokens = [9] * len(tops)
        pairs = [[(9, -1.5)] for _ in tops] if logprobs in (0, 1) else [pairs[:logprobs] for pairs in tops]
        feature = {"input_ids": [7, 8, *tokens], "tops": tops}
        return SampledSequence("stop", tokens, pairs, "local", feature)

    def _scored(self, row):
        nothing = [None] * 2
        return SampleResponse(
            [SampledSequence("length", [])],
            prompt_logprobs=[*nothing, *(-1.5 for _ in row["tops"])],
            topk_prompt_logprobs=[*nothing, *row["tops"]],
        )


@pytest.fixture(scope="module")
def running():
    with ChatEndpoint({"content": "remote"}) as stub:
        yield stub


@pytest.fixture
def endpoint(running):
    running.script({"content": "remote"})
    return running


def texts(responses):
    return [[sequence.decoded for sequence in response.sequences] for response in responses]


def test_an_unsure_answer_is_replaced(endpoint):
    # mean entropies: (ln 4 + ln 2) / 2 = 1.0397, and (ln 2 + 0) / 2 = 0.3466
    router = RouterSampler(Local([QUARTERS, HALVES], [HALVES, CERTAIN]), endpoint.url, "big", "secret", threshold=1.03)
    (response,) = router.sample(ASK, {"temperature": 0.5})
    routed, local = response.sequences
    assert isinstance(routed, RoutedSequence)
    assert routed.routed
    assert (routed.decoded, routed.tokens, routed.logprobs, routed.new_input_feature) == ("remote", [], None, None)
    assert (routed.stop_reason, routed.fallback_model) == ("stop", "big")
    assert routed.uncertainty == pytest.approx(1.5 * math.log(2))
    assert routed.message["content"] == "remote"
    assert (local.decoded, local.tokens, local.logprobs) == ("local", [9, 9], None)
    assert not isinstance(local, RoutedSequence)
    ((path, headers, body),) = endpoint.requests
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer secret"
    assert body == {"model": "big", "messages": ASK["messages"], "temperature": 0.7, "max_tokens": 4096}


def test_a_value_at_the_threshold_stays(endpoint):
    router = RouterSampler(Local([HALVES]), endpoint.url, threshold=math.log(2))
    assert texts(router.sample([ASK, ASK])) == [["local"], ["local"]]
    assert texts(RouterSampler(Local([HALVES]), endpoint.url, threshold=0.69).sample([ASK])) == [["remote"]]


def test_entropy_is_that_of_the_likeliest_tokens_alone(endpoint):
    """Four tokens with 1 % each: scaled to sum 1 they have the entropy ln 4, and two of them ln 2."""
    flat = [(token, math.log(0.01)) for token in range(4)]
    assert texts(RouterSampler(Local([flat]), endpoint.url, threshold=1.38).sample([ASK])) == [["remote"]]
    router = RouterSampler(Local([flat]), endpoint.url, threshold=1.38, top_k_logprobs=2)
    assert texts(router.sample([ASK])) == [["local"]]


@pytest.mark.parametrize(("threshold", "expected"), [(-1.5, "local"), (-1.4, "remote")])
def test_mean_log_probabilities(endpoint, threshold, expected):
    local = Local([CERTAIN, CERTAIN])  # the tokens that were drawn have −1.5 each
    router = RouterSampler(local, endpoint.url, method="logp", threshold=threshold)
    for logprobs in (None, 1, 5):
        assert texts(router.sample([ASK], SamplingParams(logprobs=logprobs))) == [[expected]]


def test_the_caller_gets_the_log_probabilities_that_it_asked_for(endpoint):
    local = Local([QUARTERS])
    router = RouterSampler(local, endpoint.url, threshold=9.0)
    found = {
        count: router.sample([ASK], SamplingParams(logprobs=count))[0].sequences[0].logprobs
        for count in (None, 0, 1, 2)
    }
    assert found == {None: None, 0: [[(9, -1.5)]], 1: [[(9, -1.5)]], 2: [QUARTERS[:2]]}
    # 0 and 1 need a second pass, because the likeliest tokens may lack the drawn one
    assert [params.max_tokens for _, params, *_ in local.calls] == [None, None, 0, None, 0, None]
    router = RouterSampler(local, endpoint.url, threshold=1.3)
    assert texts(router.sample([ASK], SamplingParams(logprobs=1))) == [["remote"]]


def test_encoded_rows_are_never_routed(endpoint):
    router = RouterSampler(Local([QUARTERS]), endpoint.url, threshold=0.0)
    rows = [{"input_ids": [1]}, {"input_ids": [1], **ASK}, ASK]
    assert texts(router.sample(rows)) == [["local"], ["local"], ["remote"]]


def test_scoring_a_prompt_passes_through(endpoint):
    local = Local([QUARTERS])
    params = SamplingParams(max_tokens=0, prompt_logprobs=1)
    (response,) = RouterSampler(local, endpoint.url, threshold=0.0).sample([{**ASK, "tops": [HALVES]}], params)
    assert response.prompt_logprobs == [None, None, -1.5]
    assert endpoint.requests == []


@pytest.mark.parametrize("answer", [500, "no JSON", '{"choices": []}', '{"choices": [{"message": null}]}', "[]"])
def test_the_local_answer_stays_if_the_other_fails(endpoint, answer, caplog):
    logger = get_logger()
    logger.addHandler(caplog.handler)
    try:
        endpoint.script(answer)
        found = texts(RouterSampler(Local([QUARTERS]), endpoint.url, threshold=0.0).sample([ASK]))
    finally:
        logger.removeHandler(caplog.handler)
    assert found == [["local"]]
    assert "gave no answer" in caplog.text


def test_the_local_answer_stays_if_the_other_server_is_down():
    router = RouterSampler(Local([QUARTERS]), "http://127.0.0.1:9", threshold=0.0, timeout=5.0)
    assert texts(router.sample([ASK])) == [["local"]]


def test_calls_and_tools_are_sent_to_the_other_model(endpoint):
    tools = [{"type": "function", "function": {"name": "add"}}]
    calls = [{"function": {"name": "add", "arguments": {"a": 1}}}]
    messages = [*ASK["messages"], {"role": "assistant", "content": "", "tool_calls": calls}]
    RouterSampler(Local([HALVES]), f"{endpoint.url}/v1/", threshold=0.0).sample(
        [{"messages": messages, "tools": tools}]
    )
    ((path, headers, body),) = endpoint.requests
    assert path == "/v1/chat/completions"
    assert "Authorization" not in headers
    assert body["tools"] == tools
    assert body["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


def test_a_router_is_used_like_its_sampler(endpoint):
    local = Local([CERTAIN])
    router = RouterSampler(local, endpoint.url)
    router.set_template("Qwen3Template", enable_thinking=False)
    assert router.template == ("Qwen3Template", {"enable_thinking": False})
    router.sample([ASK], None, "mine", adapter_path=None)
    assert local.calls[0][2:] == ("mine", {"adapter_path": None})
    assert local.calls[0][1] == SamplingParams(logprobs=10)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"method": "margin"}, UnknownNameError, "unknown method 'margin'; known: entropy, logp"),
        ({"top_k_logprobs": 1}, InvalidInputError, "top_k_logprobs: got 1"),
        ({"fallback_endpoint": "localhost:1"}, InvalidInputError, "fallback_endpoint: got 'localhost:1'"),
        ({"fallback_endpoint": "http://host:port"}, InvalidInputError, "fallback_endpoint: .*Invalid port"),
        ({"fallback_endpoint": None}, InvalidInputError, "fallback_endpoint: got None"),
        (
            {"fallback_api_key": "clé"},
            InvalidInputError,
            "fallback_api_key: got .*a secret.*, allowed: a text of ASCII",
        ),
    ],
)
def test_wrong_options_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        RouterSampler(Local(), **{"fallback_endpoint": "http://127.0.0.1:9", **options})
