"""A client of our own protocol for tests: plain HTTP, so that a test sees what a server says.

caller = Caller(server.url, "any token")          # a tenant of its own
caller.begin()                                    # a session, named in a header from now on
caller.sample(MODEL, {"inputs": {"input_ids": [5, 6, 7]}})
"""

from typing import Any

import httpx


class Caller:
    def __init__(self, url: str, token: str) -> None:
        self.token = token
        self.http = httpx.Client(
            base_url=f"{url}/api/v1/",
            headers={"Twinkle-Authorization": f"Bearer {token}"},
            timeout=60,
            trust_env=False,
            verify=False,  # there is no TLS here, and reading all certificates takes longer than most tests
        )

    def get(self, path: str, **query: Any) -> httpx.Response:
        return self.http.get(f"twinkle/{path}", params=query)

    def post(self, path: str, body: Any = None, **headers: str) -> httpx.Response:
        return self.http.post(f"twinkle/{path}", json={} if body is None else body, headers=headers)

    def session(self, **metadata: Any) -> str:
        answer = self.post("create_session", {"metadata": metadata or None})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["session_id"])

    def begin(self) -> str:
        """A new session, in which all later requests are."""
        session_id = self.session()
        self.http.headers["X-Twinkle-Session-Id"] = session_id
        return session_id

    def sampler(self, model: str, verb: str, body: Any = None) -> httpx.Response:
        return self.http.post(f"sampler/{model}/twinkle/{verb}", json={} if body is None else body)

    def samples(self, model: str, body: Any) -> list[dict[str, Any]]:
        answer = self.sampler(model, "sample", body)
        assert answer.status_code == 200, answer.text
        samples: list[dict[str, Any]] = answer.json()["samples"]
        return samples

    def refusal(self, model: str, body: Any, verb: str = "sample") -> str:
        """Why the server did not do it."""
        answer = self.sampler(model, verb, body)
        assert answer.status_code == 400, answer.text
        return str(answer.json()["detail"])
