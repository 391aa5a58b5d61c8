"""nginx and Caddy in front of a server. If nginx is installed, our configuration runs in front of a real server."""

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.deploy.deployment_files import DEPLOY, PORT
from tests.support.servers.running import Server, Tenant, free_port, mock_config
from twinkle.server.config import ClientsConfig, LimitsConfig

NGINX = (DEPLOY / "nginx" / "twinkle.conf").read_text()
CADDY = (DEPLOY / "caddy" / "Caddyfile").read_text()


def value(name: str) -> str:
    """Return the value of an nginx directive that occurs once."""
    (found,) = re.findall(rf"^\s*{name}\s+([^;]+);", NGINX, re.MULTILINE)
    return str(found)


def test_both_lead_to_the_server() -> None:
    assert re.search(rf"server 127\.0\.0\.1:{PORT};", NGINX)
    assert f"reverse_proxy 127.0.0.1:{PORT} " in CADDY


def test_bodies_that_the_server_takes_pass() -> None:
    megabytes = LimitsConfig().max_request_bytes / 2**20
    assert int(value("client_max_body_size").removesuffix("m")) >= megabytes
    caddy = re.search(r"max_size (\d+)MB", CADDY)
    assert caddy
    assert int(caddy[1]) * 10**6 >= LimitsConfig().max_request_bytes


def test_nothing_is_cut_off_held_back_or_repeated() -> None:
    assert int(value("proxy_read_timeout").removesuffix("s")) > 10 * ClientsConfig.LONGEST_POLL
    assert value("proxy_buffering") == value("proxy_request_buffering") == value("proxy_next_upstream") == "off"
    assert "flush_interval -1" in CADDY
    assert re.search(r"proxy_set_header X-Forwarded-For +\$remote_addr;", NGINX), "clients must not look local"


# --- with a real nginx ------------------------------------------------------------------------------------------------


@contextmanager
def nginx_before(server: Server, directory: Path) -> Iterator[str]:
    """Run nginx with our configuration, but on another port and without TLS; yield its URL."""
    port = free_port()
    plain = re.sub(r"(?s)server \{\s+listen 80;.*?\n\}\n", "", NGINX).replace("listen 443 ssl http2", f"listen {port}")
    plain = re.sub(r"(?m)^\s*ssl_.*\n", "", plain).replace(f"127.0.0.1:{PORT}", f"127.0.0.1:{server.port}")
    temporary = "".join(
        f"{kind}_temp_path {directory}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    main = f"daemon off; pid {directory}/pid; error_log {directory}/error.log; events {{}} "
    (directory / "nginx.conf").write_text(f"{main} http {{ access_log off; {temporary}\n{plain} }}")
    program = shutil.which("nginx")
    assert program is not None
    process = subprocess.Popen([program, "-p", str(directory), "-c", str(directory / "nginx.conf")])
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                httpx.get(f"{url}/api/v1/healthz", trust_env=False)
                break
            except httpx.TransportError:
                assert time.monotonic() < deadline, (directory / "error.log").read_text()
                time.sleep(0.05)
        yield url
    finally:
        process.terminate()
        process.wait(20)


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
def test_training_and_streams_pass_nginx(tmp_path: Path) -> None:
    (tmp_path / "server").mkdir()
    (tmp_path / "nginx").mkdir()
    config = mock_config(public_url="https://twinkle.example.org")
    server = Server(tmp_path / "server", config, sample=0.05).start()  # duration of a turn of the sampler
    try:
        with nginx_before(server, tmp_path / "nginx") as url:
            tenant = Tenant(url, "tml-behind-nginx")
            model = tenant.model()
            large = tenant.post("telemetry", {"padding": "x" * 3_000_000})  # nginx's default limit is 1 MB
            assert large.status_code == 200, large.text
            assert tenant.loss(tenant.forward_backward(model, 1)) > 0
            body = {"model": "mock", "prompt": "one two", "max_tokens": 200, "stream": True}
            body["seed"] = 3  # 69 tokens, over several turns of the sampler
            key = {"Authorization": f"Bearer {tenant.key}"}
            answers = httpx.stream("POST", f"{url}/v1/completions", json=body, trust_env=False, timeout=60, headers=key)
            with answers as answer:
                assert answer.status_code == 200
                arrivals = [part for part in answer.iter_raw() if part]
            assert len(arrivals) > 3, "it was collected before it was sent on"
    finally:
        server.close()
