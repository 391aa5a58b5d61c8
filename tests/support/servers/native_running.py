"""A tenant that calls the verbs of a model in the native protocol, over plain HTTP."""

import json
from typing import Any

import httpx
import peft


class NativeTenant:
    """A tenant with a session on the server. ``model`` is the model's name in URLs.

    tenant = NativeTenant(server.url, "any token", "mock")
    tenant.add_adapter("a")
    tenant.verb("step", adapter_name="a")
    """

    def __init__(self, url: str, token: str, model: str) -> None:
        self.http = httpx.Client(
            base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=120, trust_env=False
        )
        self.model = model
        created = self.http.post("/api/v1/twinkle/create_session", json={"metadata": None})
        assert created.status_code == 200, created.text
        self.session_id = created.json()["session_id"]
        self.http.headers["X-Twinkle-Session-Id"] = self.session_id

    def post(self, verb: str, **body: Any) -> httpx.Response:
        """Call a verb and return the response, whatever its status."""
        return self.http.post(f"/api/v1/model/{self.model}/twinkle/{verb}", json=body)

    def verb(self, verb: str, **body: Any) -> Any:
        """Call a verb that must succeed, and return its result."""
        answer = self.post(verb, **body)
        assert answer.status_code == 200, answer.text
        content = answer.json()
        return content.get("result") if isinstance(content, dict) and "result" in content else content

    def refusal(self, verb: str, status: int = 400, **body: Any) -> str:
        """Call a verb that must be refused with ``status``, and return the reason."""
        answer = self.post(verb, **body)
        assert answer.status_code == status, f"{answer.status_code} {answer.text}"
        return str(answer.json()["detail"])

    def add_adapter(self, name: str = "a", rank: int = 4, **options: Any) -> str:
        """Add a LoRA adapter on all linear layers and return its name."""
        config = peft.LoraConfig(r=rank, lora_alpha=8, target_modules="all-linear")
        text = json.dumps({**config.to_dict(), "_TWINKLE_TYPE_": "LoraConfig"}, default=list)
        return str(self.verb("add_adapter_to_model", adapter_name=name, config=text, **options)["adapter_name"])
