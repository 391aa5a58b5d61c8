"""API keys, and the tokens that clients exchange them for."""

import base64
import json
import time
from collections.abc import Callable

import httpx
import pytest

from tests.support.servers.running import Server, Tenant, mock_config
from twinkle.server.cli import command_line as cli
from twinkle.server.gateway.identity import read_token, write_token

Keys = Callable[..., str]


@pytest.fixture(scope="module")
def keyed_server(tmp_path_factory: pytest.TempPathFactory):
    """A server with keys and tokens, which caches accepted keys only briefly."""
    config = mock_config(auth={"mode": "keys", "jwt": True})
    server = Server(tmp_path_factory.mktemp("keyed"), config, key_cache=0.2).start()
    yield server
    server.close()


@pytest.fixture
def keys(keyed_server: Server, capsys: pytest.CaptureFixture[str]) -> Keys:
    """``keys(*arguments)`` runs ``twinkle-server keys`` while the server runs, and returns its output."""

    def run(*arguments: str) -> str:
        capsys.readouterr()
        assert cli.main(["keys", *arguments, "-c", str(keyed_server.directory / "config.yaml")]) == 0
        return capsys.readouterr().out.strip()

    return run


def token_of(tenant: Tenant) -> str:
    answer = tenant.post("auth/token", {})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["jwt"])


def claims_of(token: str) -> dict[str, object]:
    payload = token.split(".")[1]
    return json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))


def changed(token: str, **claims: object) -> str:
    """Return the token with other claims but the old signature."""
    header, _, signature = token.split(".")
    payload = base64.urlsafe_b64encode(json.dumps({**claims_of(token), **claims}).encode()).rstrip(b"=").decode()
    return f"{header}.{payload}.{signature}"


def refused(server: Server, key: str) -> str:
    answer = Tenant(server.url, key).get("get_server_capabilities")
    assert answer.status_code == 401
    return str(answer.json()["detail"])


def test_a_token_is_its_tenant(keyed_server: Server, keys: Keys) -> None:
    tenant = Tenant(keyed_server.url, keys("create", "--name", "laptop"))
    assert tenant.post("client/config", {}).json()["pjwt_auth_enabled"] is True
    token = token_of(tenant)
    claims = claims_of(token)
    assert token.startswith("eyJ")
    assert claims["sub"] == claims["org_id"]
    assert 3500 < claims["exp"] - time.time() <= 3600
    holder = Tenant(keyed_server.url, token)
    session = tenant.session()
    assert holder.get(f"sessions/{session}").status_code == 200
    assert holder.get("audit").status_code == 200
    stranger = Tenant(keyed_server.url, token_of(Tenant(keyed_server.url, keys("create"))))
    assert stranger.get(f"sessions/{session}").status_code == 404
    for headers in ({"Authorization": f"Bearer {token}"}, {"Twinkle-Authorization": f"Bearer {token}"}):
        answer = httpx.get(f"{keyed_server.url}/api/v1/sessions/{session}", headers=headers, trust_env=False)
        assert answer.status_code == 200
    native = httpx.post(
        f"{keyed_server.url}/api/v1/twinkle/create_session",
        json={},
        headers={"Twinkle-Authorization": f"Bearer {token}"},
        trust_env=False,
    )
    assert native.status_code == 200


def test_tokens_that_are_not_ours(keyed_server: Server, keys: Keys) -> None:
    token = token_of(Tenant(keyed_server.url, keys("create")))
    header, payload, signature = token.split(".")
    none = base64.urlsafe_b64encode(b'{"alg":"none","typ":"JWT"}').rstrip(b"=").decode()
    for wrong in (
        changed(token, sub="tenant-of-somebody-else"),
        changed(token, exp=time.time() + 10**6),
        f"{none}.{payload}.",
        f"{none}.{payload}.{signature}",
        f"{header}.{payload}.",
        f"{header}.{payload}",
        "eyJ",
        "eyJ..",
        write_token(claims_of(token), b"another secret".ljust(32)),
    ):
        assert "token" in refused(keyed_server, wrong), wrong


def test_a_token_is_exchanged_for_nothing(keyed_server: Server, keys: Keys) -> None:
    """A token can neither get a newer token nor revoke its key."""
    holder = Tenant(keyed_server.url, token_of(Tenant(keyed_server.url, keys("create"))))
    for answer in (
        holder.post("auth/token", {}),
        holder.get("auth/apikey/me"),
        holder.http.delete("auth/apikey/me"),
    ):
        assert answer.status_code == 401
        assert "not a token" in answer.json()["detail"]
    assert holder.get("get_server_capabilities").status_code == 200


def test_a_revoked_key_takes_its_tokens_along(keyed_server: Server, keys: Keys) -> None:
    key = keys("create", "--name", "lost")
    tenant = Tenant(keyed_server.url, key)
    described = tenant.get("auth/apikey/me").json()
    assert (described["name"], type(described["key_id"])) == ("lost", int)
    holder = Tenant(keyed_server.url, token_of(tenant))
    assert holder.get("get_server_capabilities").status_code == 200
    keys("revoke", described["note"])  # in another process: the server notices when it checks again
    deadline = time.monotonic() + 120
    while holder.get("get_server_capabilities").status_code != 401:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    refused(keyed_server, key)


def test_a_revoked_key_takes_its_addresses_along(keyed_server: Server, keys: Keys) -> None:
    """Addresses of archives, exported files and traces end with their key.

    This holds even if a token requested them; addresses of other keys stay valid.
    """
    key = keys("create")
    tenant = Tenant(keyed_server.url, key)
    owner = tenant.get("auth/apikey/me").json()["details"]["org_details"]["name"]
    second = Tenant(keyed_server.url, keys("create", "--tenant", owner))
    model = tenant.model()
    body = {"model_id": model, "seq_id": 1, "path": "ck"}
    tenant.json(tenant.submit("save_weights_external", body))
    place = f"training_runs/{model}/checkpoints/external_weights/ck"

    def addresses(asking: Tenant) -> list[str]:
        files = asking.get(f"{place}/external_weights_urls").json()["urls"]
        trace = asking.get(f"sessions/{model.partition(':')[0]}/trace_export").json()["url"]
        return [asking.get(f"{place}/archive").headers["location"], next(iter(files.values())), trace]

    def fetched(urls: list[str]) -> list[httpx.Response]:
        return [httpx.get(url, trust_env=False) for url in urls]

    revoked = [*addresses(tenant), *addresses(Tenant(keyed_server.url, token_of(tenant)))]
    others = addresses(second)
    assert [answer.status_code for answer in fetched(revoked + others)] == [200] * 9
    assert tenant.http.delete("auth/apikey/me").is_success
    answers = fetched(revoked)
    assert [answer.status_code for answer in answers] == [403] * 6
    assert all("a key that was revoked" in answer.json()["detail"] for answer in answers)
    assert [answer.status_code for answer in fetched(others)] == [200] * 3


def test_a_key_gives_itself_up(keyed_server: Server, keys: Keys) -> None:
    tenant = Tenant(keyed_server.url, keys("create"))
    holder = Tenant(keyed_server.url, token_of(tenant))
    session = tenant.session()
    assert tenant.http.delete("auth/apikey/me").status_code == 200
    assert tenant.http.delete("auth/apikey/me").status_code == 401
    assert holder.get(f"sessions/{session}").status_code == 401
    assert "revoked" in keys("list")


def test_the_audit_log_tells_of_keys(keyed_server: Server, keys: Keys) -> None:
    tenant = Tenant(keyed_server.url, keys("create", "--name", "first"))
    owner = tenant.get("auth/apikey/me").json()["details"]["org_details"]["name"]
    second = Tenant(keyed_server.url, keys("create", "--name", "second", "--tenant", owner))
    assert second.http.delete("auth/apikey/me").is_success
    told = tenant.get("audit", event_type="organizations").json()["entries"]
    assert [entry["event"] for entry in told] == ["key_create", "key_create", "key_revoke"]
    assert [entry["event_details"]["name"] for entry in told] == ["first", "second", "second"]


def test_tokens_survive_a_restart(keyed_server: Server, keys: Keys) -> None:
    token = token_of(Tenant(keyed_server.url, keys("create")))
    keyed_server.kill()
    keyed_server.start()
    assert Tenant(keyed_server.url, token).get("get_server_capabilities").status_code == 200
    assert token not in keyed_server.log()
    assert (keyed_server.data_dir / "secret").stat().st_mode & 0o077 == 0


def test_an_open_server(own_server: Callable[..., Server]) -> None:
    server = own_server(mock_config(auth={"jwt": True}))
    tenant = Tenant(server.url, "tml-mine")
    session = tenant.session()
    holder = Tenant(server.url, token_of(tenant))
    assert holder.get(f"sessions/{session}").status_code == 200
    answer = tenant.http.delete("auth/apikey/me")
    assert (answer.status_code, "auth.mode is open" in answer.json()["detail"]) == (400, True)
    assert "token" in refused(server, "eyJwrong")


def test_without_tokens(tenant: Tenant, server: Server) -> None:
    assert tenant.post("client/config", {}).json()["pjwt_auth_enabled"] is False
    answer = tenant.post("auth/token", {})
    assert (answer.status_code, "auth.jwt is off" in answer.json()["detail"]) == (400, True)
    assert "tml-" in refused(server, "eyJhbGciOiJIUzI1NiJ9.e30.x")
    described = tenant.get("auth/apikey/me").json()
    assert (described["name"], described["details"]["org_details"]["name"][:7]) == ("any key", "tenant-")


def test_signed_text() -> None:
    secret = b"s" * 32
    token = write_token({"a": 1, "b": "ü"}, secret)
    assert read_token(token, secret) == {"a": 1, "b": "ü"}
    assert read_token(token, b"t" * 32) is None
    for position in range(len(token)):
        other = "A" if token[position] != "A" else "B"
        damaged = token[:position] + other + token[position + 1 :]
        # The last characters of each part have unused bits; if a change hits only those, the signed content is read.
        assert read_token(damaged, secret) in (None, {"a": 1, "b": "ü"})
    assert read_token(token[:-5], secret) is None
    for text in ("", ".", "..", "a.b.c", "é.é.é", token + ".x", token.replace(".", "")):
        assert read_token(text, secret) is None


def test_tokens_of_earlier_versions_are_read_and_new_ones_look_the_same() -> None:
    """Before PyJWT was used, tokens were written by our own code, as this one was."""
    claims = {"iss": "twinkle", "sub": "tenant-1", "key_id": None, "iat": 1700000000, "exp": 4102444800.0}
    written = ".".join(
        (
            "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9",
            "eyJpc3MiOiJ0d2lua2xlIiwic3ViIjoidGVuYW50LTEiLCJrZXlfaWQiOm51bGwsImlhdCI6MTcwMDAwMDAwMCwiZX"
            "hwIjo0MTAyNDQ0ODAwLjB9",
            "ZAkAkzjO-od2NU-xOT_-JbIDgCI6jKPL6fCKN26Lbvw",
        )
    )
    assert read_token(written, b"s" * 32) == claims
    assert write_token(claims, b"s" * 32) == written


def test_odd_headers_are_none_of_ours() -> None:
    secret = b"s" * 32
    _, payload, signature = write_token({"a": 1}, secret).split(".")
    for header in (
        {"alg": ["HS256"]},
        {"alg": "HS256", "kid": 1},
        {"alg": "HS512"},
        {"alg": "HS256", "crit": ["x"]},
        [],
    ):
        text = base64.urlsafe_b64encode(json.dumps(header).encode()).rstrip(b"=").decode()
        assert read_token(f"{text}.{payload}.{signature}", secret) is None
    deep = base64.urlsafe_b64encode(b"[" * 30_000).rstrip(b"=").decode()
    assert read_token(f"{deep}.{payload}.{signature}", secret) is None
    assert read_token(f"\ud800.{payload}.{signature}", secret) is None
