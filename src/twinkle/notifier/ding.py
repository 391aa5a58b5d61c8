"""Messages to a DingTalk group, through its custom robot."""

import base64
import hashlib
import hmac
import json
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode, urlsplit

from twinkle.errors import InvalidInputError
from twinkle.notifier.interface import Notifier

__all__ = ["DingNotifier"]

_LONGEST_TITLE = 64


class DingNotifier(Notifier):
    """Sends messages to a DingTalk robot.

    ``ding_url`` is the robot's webhook. ``secret`` is needed if the robot requires signed messages.
    """

    def __init__(self, ding_url: str, secret: str | None = None, timeout: float = 5.0) -> None:
        if urlsplit(ding_url).scheme not in ("http", "https"):
            raise InvalidInputError("ding_url", ding_url, "the http or https address of a robot")
        self._url = ding_url
        self._secret = secret
        self._timeout = timeout

    def __call__(self, message: str) -> dict[str, Any]:
        """Send the message and return DingTalk's answer. Raise RuntimeError if DingTalk refuses the message."""
        from urllib.request import Request, urlopen  # slow to import, and rarely needed

        content = {"msgtype": "markdown", "markdown": {"title": _title(message), "text": message}}
        request = Request(self._signed_url(), json.dumps(content).encode(), {"Content-Type": "application/json"})
        with urlopen(request, timeout=self._timeout) as response:
            answer: dict[str, Any] = json.loads(response.read())
        if answer.get("errcode", 0) != 0:
            raise RuntimeError(f"DingTalk refused the message: {answer.get('errcode')} {answer.get('errmsg', '')}")
        return answer

    def to_dict(self) -> dict[str, Any]:
        return {"class": "DingNotifier", "ding_url": self._url, "secret": self._secret, "timeout": self._timeout}

    @classmethod
    def _from_dict_impl(cls, data: Mapping[str, Any]) -> "DingNotifier":
        return cls(data["ding_url"], data.get("secret"), data.get("timeout", 5.0))

    def _signed_url(self) -> str:
        if self._secret is None:
            return self._url
        timestamp = str(round(time.time() * 1000))
        digest = hmac.new(self._secret.encode(), f"{timestamp}\n{self._secret}".encode(), hashlib.sha256).digest()
        query = urlencode({"timestamp": timestamp, "sign": base64.b64encode(digest).decode()})
        return f"{self._url}{'&' if urlsplit(self._url).query else '?'}{query}"


def _title(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    heading = next((line for line in lines if line.startswith("#")), lines[0] if lines else "Twinkle")
    return heading.lstrip("# ")[:_LONGEST_TITLE]
