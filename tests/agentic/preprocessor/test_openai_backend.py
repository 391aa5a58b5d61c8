"""OpenAIBackend against a local HTTP server that answers in OpenAI's forms."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from twinkle.data_format import SamplingParams
from twinkle_agentic.preprocessor import OpenAIBackend, SamplerBackend
from twinkle_agentic.preprocessor.scoring.backend import BackendError


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, self.headers.get("Authorization"), body))
        status, answer = self.server.answers(self.path, body)
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


def answers(path, body):
    if path == "/v1/chat/completions":
        return 200, {"choices": [{"message": {"content": body["messages"][-1]["content"].upper()}}]}
    if path == "/v1/completions":  # tokens are the list's entries or the letters; one more is generated
        count = len(body["prompt"])
        values = [None, *(-float(place) for place in range(1, count)), -99.0]
        return 200, {"choices": [{"logprobs": {"token_logprobs": values}}], "usage": {"prompt_tokens": count}}
    if path == "/v1/embeddings":
        data = [{"index": n, "embedding": [len(text), 1]} for n, text in enumerate(body["input"])]
        return 200, {"data": data[::-1]}
    return 404, {"error": "no such path"}


@pytest.fixture
def server():
    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.seen, running.answers = [], answers
    thread = threading.Thread(target=running.serve_forever, args=(0.01,))
    thread.start()
    yield running
    running.shutdown()
    thread.join()
    running.server_close()


def backend(server, **options):
    return OpenAIBackend(f"http://127.0.0.1:{server.server_port}", **options)


def test_chat(server):
    questions = [[{"role": "user", "content": f"q{number}"}] for number in range(20)]
    model = backend(server, model="m", api_key="secret")
    params = SamplingParams(max_tokens=5, temperature=0.5, stop=["x"], seed=1)
    assert model.chat_batch(questions, params) == [f"Q{number}" for number in range(20)]
    assert {(path, key) for path, key, _ in server.seen} == {("/v1/chat/completions", "Bearer secret")}
    sent = server.seen[0][2]
    assert {key: sent[key] for key in sent if key != "messages"} == {
        "model": "m",
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 1.0,
        "stop": ["x"],
        "seed": 1,
    }
    assert model.chat(questions[0]) == "Q0"
    model.chat(questions[0], SamplingParams(top_k=5, presence_penalty=0.5, stop=[2]))
    sent = server.seen[-1][2]
    assert (sent["top_k"], sent["presence_penalty"], sent["stop_token_ids"]) == (5, 0.5, [2])


def test_messages_of_a_table(server):
    # Arrow fills fields that a message does not have with None, and stores the arguments of calls as objects.
    call = {"id": None, "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "q", "tool_calls": None, "tool_call_id": None},
        {"role": "assistant", "content": None, "tool_calls": [call], "tool_call_id": None},
        {"role": "tool", "content": "1", "tool_calls": None, "tool_call_id": None},
    ]
    backend(server).chat(messages)
    first, second, third = server.seen[0][2]["messages"]
    assert first == {"role": "user", "content": "q"}
    assert second["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert third["tool_call_id"] == second["tool_calls"][0]["id"]


def test_prompt_logprobs(server):
    assert backend(server).prompt_logprobs(["abc"]) == [[None, -1.0, -2.0]]
    assert backend(server).prompt_logprobs_ids([[7, 8], [9]]) == [[None, -1.0], [None]]
    (_, key, body) = server.seen[0]
    assert key is None
    assert body == {"model": "default", "prompt": "abc", "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 0}


def test_embeddings(server):
    assert backend(server).embeddings(["a", "bcd"]) == [[1.0, 1.0], [3.0, 1.0]]

    class Sampler:
        def sample(self, inputs, params):
            raise AssertionError

    address = f"http://127.0.0.1:{server.server_port}/v1"
    assert SamplerBackend(Sampler(), embed_endpoint=address).embeddings(["ab"]) == [[2.0, 1.0]]
    assert server.seen[-1][2]["model"] == "bge-m3"


def test_errors_name_the_address_and_what_is_missing(server):
    server.answers = lambda path, body: (429, {"error": "slow down"})
    with pytest.raises(BackendError, match=r"/v1/chat/completions answered 429: .*slow down"):
        backend(server).chat([{"role": "user", "content": "q"}])
    server.answers = lambda path, body: (200, {"choices": [{"text": "x"}]})
    with pytest.raises(BackendError, match=r"has no choices\.0\.logprobs\.token_logprobs"):
        backend(server).prompt_logprobs(["a"])
    with pytest.raises(BackendError, match=r"127\.0\.0\.1:1/v1"):
        OpenAIBackend("http://127.0.0.1:1", timeout=5).chat([{"role": "user", "content": "q"}])
