"""GET, POST and DELETE with the headers that servers of the native protocol read."""

from collections.abc import Mapping
from typing import Any

import httpx

from twinkle_client.client.json_body import encode
from twinkle_client.client.transport import error_of, needs_certificates
from twinkle_client.errors import ConnectionLostError, InvalidRequestError
from twinkle_client.http.settings import get_api_key, get_request_id, get_session_id
from twinkle_client.protocol.base import SESSION_HEADER

__all__ = ["http_delete", "http_get", "http_post"]

_SECONDS = 600.0
_ROUTING = ("x-request-id", "X-Ray-Serve-Request-Id", "serve_multiplexed_model_id", "Serve-Multiplexed-Model-Id")

Headers = Mapping[str, str] | None


def http_get(
    url: str,
    params: Mapping[str, str | int | bool] | None = None,
    additional_headers: Headers = None,
    timeout: float | None = _SECONDS,
) -> httpx.Response:
    return _request("GET", url, additional_headers, timeout, params=params)


def http_post(
    url: str,
    json_data: Mapping[str, Any] | None = None,
    data: bytes | None = None,
    additional_headers: Headers = None,
    timeout: float | None = _SECONDS,
) -> httpx.Response:
    """Send a POST request. ``data`` replaces the JSON body; without both the body is an empty object."""
    return _request("POST", url, additional_headers, timeout, body=encode(json_data or {}) if data is None else data)


def http_delete(
    url: str,
    params: Mapping[str, str | int | bool] | None = None,
    additional_headers: Headers = None,
    timeout: float | None = _SECONDS,
) -> httpx.Response:
    return _request("DELETE", url, additional_headers, timeout, params=params)


def _request(
    method: str,
    url: str,
    more: Headers,
    timeout: float | None,
    *,
    params: Mapping[str, str | int | bool] | None = None,
    body: bytes | None = None,
) -> httpx.Response:
    headers = {**_headers(), **(more or {})}
    try:
        with httpx.Client(verify=needs_certificates(url), timeout=timeout) as client:
            response = client.request(method, url, params=params, content=body, headers=headers)
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise InvalidRequestError(f"url: {error}", url=url) from None
    except httpx.HTTPError as error:
        raise ConnectionLostError(f"no answer from {url}: {error or type(error).__name__}", url) from error
    if not response.is_success:
        raise error_of(response)
    return response


def _headers() -> dict[str, str]:
    bearer, session = f"Bearer {get_api_key()}", get_session_id()
    named = {"Authorization": bearer, "Twinkle-Authorization": bearer, "Content-Type": "application/json"}
    if session is not None:
        named[SESSION_HEADER] = session
    return {**dict.fromkeys(_ROUTING, get_request_id()), **named}
