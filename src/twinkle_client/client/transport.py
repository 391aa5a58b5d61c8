"""HTTP to one server: a connection pool, retries, and the translation of error answers into exceptions."""

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

import httpx

from twinkle_client.client.retries import Backoff, RetryPolicy, retry_after_seconds
from twinkle_client.environment import has_tls_proxy
from twinkle_client.errors import (
    AuthenticationError,
    ConnectionLostError,
    GoneError,
    InvalidRequestError,
    LimitError,
    NotFoundError,
    ServerError,
    TwinkleClientError,
)
from twinkle_client.protocol.base import LIMIT_REACHED, NUMBER_HEADER

__all__ = ["HttpCall", "Transport", "error_of", "needs_certificates", "with_api"]

logger = logging.getLogger(__name__)

_API = "/api/v1"
_LIMITS = httpx.Limits(max_connections=256, max_keepalive_connections=64, keepalive_expiry=30.0)
_CONNECT_SECONDS = 10.0
_LINE_SECONDS = 10.0  # between two log lines about a request that waits for the server
# Failures of the connection; the next attempt may succeed.
_RETRIED_ERRORS = (httpx.TimeoutException, httpx.NetworkError, httpx.RemoteProtocolError)
_REFUSED = (400, 405, 409, 411, 413, 415, 422)


@dataclass(frozen=True)
class HttpCall:
    """One request, which may be sent several times. ``path`` is appended to …/api/v1; ``body`` is JSON."""

    method: str
    path: str
    body: bytes | None = None
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


class Transport:
    """The HTTP connections to ``base_url``, with ``api_key`` in each request. Threads may share it."""

    def __init__(
        self,
        base_url: str,
        api_key: str,
        retries: RetryPolicy,
        timeout: float,
        http_transport: httpx.BaseTransport | None = None,
    ) -> None:
        """timeout: seconds without a byte of the answer; http_transport: replaces the network in tests."""
        self.base_url = with_api(base_url)
        self.retries = retries
        self._was_reached = False  # whether a request has got an answer
        # Until then: a server that accepts connections and never answers is given up as soon as one that is not there.
        self._first_timeout = httpx.Timeout(min(_CONNECT_SECONDS, timeout))
        bearer = f"Bearer {api_key}"
        self._http = httpx.Client(
            headers={"Authorization": bearer, "Twinkle-Authorization": bearer, "User-Agent": "twinkle-client"},
            timeout=httpx.Timeout(timeout, connect=min(_CONNECT_SECONDS, timeout)),
            limits=_LIMITS,
            verify=needs_certificates(self.base_url),
            transport=http_transport,
        )

    def send(self, call: HttpCall, retries: RetryPolicy | None = None) -> Any:
        """Send a request, with retries, and return the answer's JSON; None for an empty answer."""
        return _content(self._answered(call, retries or self.retries, self._once))

    def download(self, call: HttpCall, target: BinaryIO) -> None:
        """Send a request, with retries, and write the answer's body to ``target`` as it arrives."""

        def once(call: HttpCall) -> httpx.Response:
            target.seek(0)
            target.truncate()
            with self._http.stream(call.method, self._url(call), params=call.query or None) as response:
                if not response.is_success:
                    response.read()
                    return response
                for piece in response.iter_bytes():
                    target.write(piece)
            return response

        response = self._answered(call, self.retries, once)
        if not response.is_success:
            raise error_of(response)

    def _answered(
        self, call: HttpCall, retries: RetryPolicy, once: Callable[[HttpCall], httpx.Response]
    ) -> httpx.Response:
        """Return the answer to a request, which is sent again as long as the policy says."""
        passing, at_limit = Backoff(retries), Backoff(replace(retries, deadline=retries.wait_for_limits))
        lines = _WaitingLines()
        while True:
            server_asked: float | None = None
            backoff, seconds = passing, retries.deadline
            try:
                response = once(call)
            except _RETRIED_ERRORS as error:
                failure: TwinkleClientError = _connection_lost(error, self._url(call), backoff.failures)
            except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
                raise InvalidRequestError(f"base_url: {error}", url=self._url(call)) from None
            except httpx.HTTPError as error:
                raise _connection_lost(error, self._url(call), backoff.failures) from error
            else:
                self._was_reached = True
                if response.status_code not in retries.statuses:
                    return response
                server_asked = retry_after_seconds(response.headers)
                failure = error_of(response)
                if failure.code == LIMIT_REACHED:
                    backoff, seconds = at_limit, retries.wait_for_limits
            wait = backoff.next_wait(server_asked)
            if not self._was_reached and retries.deadline > 0:
                seconds = min(seconds, retries.connect_deadline)
                left = seconds - lines.waited
                if wait is None or left <= 0:
                    raise _never_reached(failure, self.base_url, lines.waited)
                wait = min(wait, left)  # so that the last attempt begins at the deadline, not long before it
            if wait is None:
                raise failure
            lines.report(failure, seconds)
            time.sleep(wait)

    def close(self) -> None:
        self._http.close()

    def _once(self, call: HttpCall) -> httpx.Response:
        headers = dict(call.headers)
        if call.body is not None:
            headers["Content-Type"] = "application/json"
        return self._http.request(
            call.method,
            self._url(call),
            content=call.body,
            params=call.query or None,
            headers=headers,
            timeout=httpx.USE_CLIENT_DEFAULT if self._was_reached else self._first_timeout,
        )

    def _url(self, call: HttpCall) -> str:
        return self.base_url + call.path


def with_api(base_url: str) -> str:
    """Return ``base_url``, given with or without a final slash or /api/v1, with /api/v1 and without a final slash."""
    address = base_url.rstrip("/")
    return address if address.endswith(_API) else address + _API


def needs_certificates(address: str) -> bool:
    """Return whether httpx must load the CA certificates, which takes longer than most requests: False without TLS."""
    return not address.lower().startswith("http:") or has_tls_proxy()


def error_of(response: httpx.Response) -> TwinkleClientError:
    """Return the exception for an error answer, with the server's text, its code, and the sequence number."""
    detail, code = _said(response)
    error = _error_of(response.status_code, detail, str(response.url))
    number = response.headers.get(NUMBER_HEADER, "")
    error.seq_id = int(number) if number.isascii() and number.isdigit() else None
    error.code = code
    return error


def _error_of(status: int, detail: str, url: str) -> TwinkleClientError:
    if status in (401, 403):
        return AuthenticationError(status, detail, url)
    if status == 404:
        return NotFoundError(status, detail, url)
    if status == 410:
        return GoneError(status, detail, url)
    if status == 429:
        return LimitError(status, detail, url)
    if status in _REFUSED:
        return InvalidRequestError(detail, status, url)
    return ServerError(status, detail, url)


def _content(response: httpx.Response) -> Any:
    if not response.is_success:
        raise error_of(response)
    if not response.content:
        return None
    try:
        return json.loads(response.content)
    except ValueError:
        text = response.text[:200]
        raise ServerError(response.status_code, f"the answer is not JSON: {text!r}", str(response.url)) from None


def _said(response: httpx.Response) -> tuple[str, str | None]:
    """Return text and code of an error answer: the fields ``detail`` and ``code``, else the body, as of a proxy."""
    try:
        content = json.loads(response.content)
    except ValueError:
        content = None
    if not isinstance(content, dict) or "detail" not in content:
        return response.text.strip()[:500], None
    detail, code = content["detail"], content.get("code")
    return detail if isinstance(detail, str) else json.dumps(detail), code if isinstance(code, str) else None


def _connection_lost(error: httpx.HTTPError, url: str, failures: int) -> ConnectionLostError:
    what = "no answer in time from" if isinstance(error, httpx.TimeoutException) else "lost the connection to"
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        what = "cannot connect to"
    tries = f" in {failures + 1} tries" if failures else ""
    return ConnectionLostError(f"{what} {url}{tries}: {error or type(error).__name__}", url)


class _WaitingLines:
    """The log lines about one request that is sent again: one at its first failure, then one every ten seconds."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._last: float | None = None  # when the last line was logged

    @property
    def waited(self) -> float:
        return time.monotonic() - self._began

    def report(self, failure: TwinkleClientError, seconds: float) -> None:
        """Log a line if one is due. ``seconds``: for how long the request is sent again."""
        waited = self.waited
        if self._last is None:
            logger.warning("%s; trying again for up to %g s", failure, seconds)
        elif waited - self._last >= _LINE_SECONDS:
            left = max(0.0, seconds - waited)
            logger.warning("still waiting, %.0f s so far, at most %.0f s more: %s", waited, left, failure)
        else:
            return
        self._last = waited


def _never_reached(failure: TwinkleClientError, address: str, seconds: float) -> ConnectionLostError:
    return ConnectionLostError(
        f"no server answers at {address}: tried for {seconds:.0f} s ({failure}). Check that the server runs "
        "(twinkle-server status) and that the address is right: base_url, TWINKLE_SERVER_URL or, for the tinker SDK, "
        "TINKER_BASE_URL. If it needs longer to start, set TWINKLE_CONNECT_DEADLINE to a number of seconds",
        address,
    )
