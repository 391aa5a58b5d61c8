"""Single requests to a server, for scripts that call routes for which the client has no method.

    from twinkle_client.http import get_base_url, http_get

    http_get(f"{get_base_url()}/twinkle/healthz").json()

Address, key and session are those that a script sets here, else those of the default client
(:func:`~twinkle_client.init_twinkle_client`), else address and key of the environment variables. Errors are those of
:mod:`twinkle_client.errors`; nothing is retried.
"""

from twinkle_client.http.requests import http_delete, http_get, http_post
from twinkle_client.http.settings import (
    get_api_key,
    get_base_url,
    get_request_id,
    get_session_id,
    set_api_key,
    set_base_url,
    set_request_id,
    set_session_id,
)

__all__ = [
    "get_api_key",
    "get_base_url",
    "get_request_id",
    "get_session_id",
    "http_delete",
    "http_get",
    "http_post",
    "set_api_key",
    "set_base_url",
    "set_request_id",
    "set_session_id",
]
