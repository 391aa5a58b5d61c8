"""/metrics of a real server: its content after some work, and who may read it."""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from tests.support.servers.exposition import parse, scrape, value
from tests.support.servers.running import Server, Tenant, datum, mock_config, tensor
from twinkle.errors import ConfigError
from twinkle.server.app import make_app
from twinkle.server.cli import command_line as cli
from twinkle.server.config import ServerConfig, TelemetryConfig
from twinkle.server.gateway.reporting import Telemetry
from twinkle.server.telemetry import instruments
from twinkle.server.telemetry.instruments import INSTRUMENTS
from twinkle.server.telemetry.metrics import Metrics, Reading, of_all_replicas, render

TOKEN = "t" * 20


def test_work_is_counted(own_server: Callable[..., Server]) -> None:
    server = own_server()
    tenant = Tenant(server.url, "tml-worker")
    model = tenant.model()
    lp = [-0.5, -0.25, 0.0]  # the last token was not sampled
    row = datum([1, 2, 3, 4], logprobs=tensor(lp), advantages=tensor([1.0, 1.0, 0.0]))
    tenant.training(tenant.forward_backward(model, 1, [row, row], loss="importance_sampling"))
    tenant.result(tenant.forward_backward(model, 2, loss="no such loss"))
    assert "forward_backward" in tenant.error(tenant.optim_step(model, 3))
    sampler = tenant.json(tenant.publish(model, 4))["sampling_session_id"]
    tokens = tenant.tokens(tenant.sample(sampler))
    httpx.get(f"{server.url}/no/such/page", trust_env=False)

    seen = scrape(server.url)
    assert value(seen, "twinkle_ops_total", model="mock", kind="forward_backward", outcome="succeeded") == 1
    assert value(seen, "twinkle_ops_total", kind="forward_backward", outcome="user_error") == 1
    assert value(seen, "twinkle_ops_total", kind="optim_step", outcome="user_error") == 1
    assert value(seen, "twinkle_ops_total", kind="publish", outcome="succeeded") == 1
    assert value(seen, "twinkle_ops_total") == 5
    assert value(seen, "twinkle_op_duration_seconds_count") == 5
    assert value(seen, "twinkle_op_wait_seconds_count") == 4  # the step was refused without running
    assert value(seen, "twinkle_journal_duration_seconds_count") == 5
    assert value(seen, "twinkle_batch_duration_seconds_count", kind="forward_backward") == 2
    assert value(seen, "twinkle_batch_tokens_sum", kind="forward_backward") == 6 + 5
    assert value(seen, "twinkle_trained_tokens_total", kind="forward_backward") == 6 + 5
    assert value(seen, "twinkle_samples_total", outcome="succeeded") == 1
    assert value(seen, "twinkle_sampled_tokens_total") == len(tokens)
    assert value(seen, "twinkle_prompt_tokens_total") == 3
    assert value(seen, "twinkle_sample_wait_seconds_count") == 1
    assert value(seen, "twinkle_adapters", place="device") == 1
    assert value(seen, "twinkle_sessions_active") == 1
    assert value(seen, "twinkle_sampling_sessions_active") == 1
    assert value(seen, "twinkle_state_up") == 1
    assert value(seen, "twinkle_merge_ratio") == 1
    assert value(seen, "twinkle_compute_seconds_total", lane="training") > 0
    assert value(seen, "twinkle_host_memory_bytes", kind="total") > value(
        seen, "twinkle_host_memory_bytes", kind="available"
    )
    assert value(seen, "twinkle_disk_free_bytes") > 0
    assert value(seen, "twinkle_journal_bytes", kind="bodies") > 0
    assert value(seen, "process_resident_memory_bytes") > 2**20
    assert value(seen, "twinkle_http_requests_total", route="/api/v1/forward_backward", status="200") == 2
    assert value(seen, "twinkle_http_requests_total", route="unmatched", status="404") == 1

    assert value(seen, "twinkle_logprob_gap_count") == 1
    assert 0 < value(seen, "twinkle_logprob_gap_sum") < 1
    assert not any("tenant" in dict(labels) for series in seen.values() for labels in series)


def test_every_name_is_one_of_ours(server: Server, tenant: Tenant) -> None:
    tenant.result(tenant.forward_backward(tenant.model(), 1))
    seen = scrape(server.url)
    declared = {one.name: one for one in INSTRUMENTS}
    for name, series in seen.items():
        if name.startswith("process_"):
            continue
        stem = name if name in declared else name.rpartition("_")[0]
        for labels in series:
            assert set(dict(labels)) - {"le"} == set(declared[stem].labels), name
            assert "tenant" not in dict(labels), "nobody asked for that"


def test_a_poll_that_waits_and_a_queue_are_seen(own_server: Callable[..., Server]) -> None:
    server = own_server(**{"pass": 1.0})
    tenant = Tenant(server.url, "tml-waiting")
    model = tenant.model()
    for seq in (1, 2, 3):
        tenant.optim_step(model, 2 * seq)
        request_id = tenant.forward_backward(model, 2 * seq - 1)
    body = json.dumps({"request_id": request_id})
    head = ["POST /api/v1/retrieve_future HTTP/1.1", "Host: 127.0.0.1", f"X-API-Key: {tenant.key}"]
    with socket.create_connection(("127.0.0.1", server.port)) as poll:
        poll.sendall("\r\n".join([*head, f"Content-Length: {len(body)}", "", body]).encode())
        while value(seen := scrape(server.url), "twinkle_long_polls", queue="training") != 1:
            assert value(seen, "twinkle_queue_depth", queue="training") > 0, "it is done already"
    assert value(seen, "twinkle_queue_depth", queue="training") > 0
    assert value(seen, "twinkle_compute_step_seconds", model="mock") >= 0


# --- who may read -----------------------------------------------------------------------------------------------------


def _get(server: Server, **headers: str | bytes) -> int:
    return httpx.get(f"{server.url}/metrics", headers=headers, trust_env=False).status_code


def test_local_callers_may_read_others_not(server: Server) -> None:
    assert _get(server) == 200
    assert _get(server, Accept="application/openmetrics-text") == 200
    for name in ("X-Forwarded-For", "Forwarded", "Via", "X-Real-IP"):  # a request forwarded for somebody else
        assert _get(server, **{name: "10.0.0.1"}) == 401
    assert _get(server, Host="metrics.example.com") == 401
    assert _get(server, Host="metrics.example.com", Authorization="Bearer tml-tenant") == 401


def test_a_token_opens_it_and_keys_of_tenants_do_not(
    own_server: Callable[..., Server], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    telemetry = {"metrics": "token", "metrics_token_file": str(file), "tenants_in_metrics": 1}
    server = own_server(mock_config(auth={"mode": "keys"}, telemetry=telemetry))
    assert cli.main(["keys", "create", "--json", "-c", str(server.directory / "config.yaml")]) == 0
    made = json.loads(capsys.readouterr().out)
    key, tenant_id = made["key"], made["tenant_id"]
    tenant = Tenant(server.url, key)
    tenant.model()
    assert _get(server) == 401
    for headers in ({"X-API-Key": key}, {"Authorization": f"Bearer {key}"}, {"Twinkle-Authorization": f"Bearer {key}"}):
        assert _get(server, **headers) == 401
    for wrong in (f"{TOKEN}x", TOKEN[:-1], "x", "tökens of many characters"):
        assert _get(server, Authorization=f"Bearer {wrong}".encode("latin-1")) == 401
    assert _get(server, Authorization=f"Bearer {TOKEN}", Host="a.example.com", Via="proxy") == 200
    seen = scrape(server.url, Authorization=f"Bearer {TOKEN}")
    assert set(seen["twinkle_tenant_queue_depth"]) == {frozenset({("tenant", tenant_id)})}
    assert TOKEN not in server.log()


@pytest.mark.parametrize(
    ("config", "status"),
    [
        ({"telemetry": {"metrics": "off"}}, 404),
        ({"telemetry": {"metrics": "token"}}, 401),
        # then there is a proxy in front, which calls from this machine
        ({"public_url": "https://tune.example.com"}, 401),
    ],
)
def test_nobody_may_read(config: dict[str, Any], status: int) -> None:
    settings = ServerConfig(**config)
    app = make_app(lambda _app: None, Telemetry(settings.telemetry))  # type: ignore[arg-type,return-value]
    app.state.gateway = SimpleNamespace(config=settings)
    caller = TestClient(app, base_url="http://127.0.0.1", client=("127.0.0.1", 50_000))
    assert caller.get("/metrics").status_code == status


@pytest.mark.parametrize("content", [None, "short\n"])
def test_a_token_file_that_is_no_good(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match="metrics_token_file") as error:
        Telemetry(TelemetryConfig(metrics_token_file=file))
    assert "short" not in str(error.value)


def test_readings_with_the_same_labels_add_up() -> None:
    (depth,) = [one for one in INSTRUMENTS if one.name == "twinkle_queue_depth"]
    readings = [Reading(depth, 2, ("m", "training")), Reading(depth, 3, ("m", "training"))]
    text, _ = render(Metrics().families(readings), "")
    assert value(parse(text.decode()), "twinkle_queue_depth") == 5


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
def test_several_processes_are_told_apart(accept: str) -> None:
    processes = {"model-0": Metrics(), "model-1": Metrics()}
    for number, metrics in enumerate(processes.values(), 1):
        metrics.counter(instruments.OPS, "m", "forward", "succeeded").inc(number)
        metrics.histogram(instruments.OP_SECONDS, "m", "forward").observe(number)
    readings = [Reading(instruments.MERGE_RATIO, 0.5, ("m",))]
    families = of_all_replicas({name: metrics.families(readings) for name, metrics in processes.items()})
    text, _ = render(families, accept)
    seen = parse(text.decode())
    for number, name in enumerate(processes, 1):
        assert value(seen, "twinkle_ops_total", model="m", replica=name) == number
        assert value(seen, "twinkle_op_duration_seconds_sum", replica=name) == number
        assert value(seen, "twinkle_merge_ratio", replica=name) == 0.5
    assert text.decode().count("# TYPE twinkle_op_duration_seconds histogram") == 1
