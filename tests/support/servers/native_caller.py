"""A client of the native protocol's gateway and sampler routes, over plain HTTP so that tests see the raw responses.

    caller = Caller(server.url, "any token")          # each token is its own tenant
    caller.begin()                                    # create a session; later requests name it in a header
    caller.samples(MODEL, {"inputs": {"input_ids": [5, 6, 7]}})

For the verbs of a model there is native_running.py.
"""

from typing import Any

import httpx


class Caller:
    """One tenant of the native protocol."""

    def __init__(self, url: str, token: str) -> None:
        self.token = token
        self.http = httpx.Client(
            base_url=f"{url}/api/v1/",
            headers={"Twinkle-Authorization": f"Bearer {token}"},
            timeout=60,
            trust_env=False,
            verify=False,  # there is no TLS here, and loading all certificates takes longer than most tests
        )

    def get(self, path: str, **query: Any) -> httpx.Response:
        return self.http.get(f"twinkle/{path}", params=query)

    def post(self, path: str, body: Any = None, **headers: str) -> httpx.Response:
        return self.http.post(f"twinkle/{path}", json={} if body is None else body, headers=headers)

    def session(self, **metadata: Any) -> str:
        """Create a session and return its id. Later requests do not name it."""
        answer = self.post("create_session", {"metadata": metadata or None})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["session_id"])

    def begin(self) -> str:
        """Create a session, name it in all later requests, and return its id."""
        session_id = self.session()
        self.http.headers["X-Twinkle-Session-Id"] = session_id
        return session_id

    def sampler(self, model: str, verb: str, body: Any = None) -> httpx.Response:
        """Send a request to a verb of the model's sampler."""
        return self.http.post(f"sampler/{model}/twinkle/{verb}", json={} if body is None else body)

    def samples(self, model: str, body: Any) -> list[dict[str, Any]]:
        """Return the samples of a request that must succeed."""
        answer = self.sampler(model, "sample", body)
        assert answer.status_code == 200, answer.text
        samples: list[dict[str, Any]] = answer.json()["samples"]
        return samples

    def refusal(self, model: str, body: Any, verb: str = "sample") -> str:
        """Return the reason why the server refused the request with status 400."""
        answer = self.sampler(model, verb, body)
        assert answer.status_code == 400, answer.text
        return str(answer.json()["detail"])
