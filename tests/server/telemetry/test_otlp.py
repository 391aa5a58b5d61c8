"""OTLP export: what a collector gets from a real server, and what happens without a collector."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.support.servers.otlp_collector import Collector, attributes, eventually
from tests.support.servers.running import Server, Tenant, free_port, mock_config
from twinkle.errors import MissingDependencyError
from twinkle.server.config import TelemetryConfig
from twinkle.server.gateway.reporting import Telemetry
from twinkle.server.telemetry.instruments import INSTRUMENTS

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def exporting(url: str, **more: object) -> dict[str, object]:
    return mock_config(telemetry={"enabled": True, "otlp_endpoint": url, "export_interval_ms": 200, **more})


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="module")
def exporter(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Server]:
    """A server that sends to the collector."""
    config = exporting(collector.url, service_name="ours", resource_attributes={"team": "a"})
    server = Server(tmp_path_factory.mktemp("exporter"), config).start()
    yield server
    server.close()


def test_a_request_is_followed_to_its_batch_and_result(exporter: Server, collector: Collector) -> None:
    tenant = Tenant(exporter.url, "tml-traced")
    model = tenant.model()
    tenant.http.headers["traceparent"] = f"00-{TRACE}-{SPAN}-01"  # the client's own trace
    request_id = tenant.forward_backward(model, 1)
    del tenant.http.headers["traceparent"]
    tenant.result(request_id)
    eventually(lambda: collector.named("POST /api/v1/retrieve_future")[1:])
    (submit,) = collector.named("POST /api/v1/forward_backward")
    assert (submit.trace_id.hex(), submit.parent_span_id.hex()) == (TRACE, SPAN)
    assert attributes(submit)["twinkle.request_id"] == request_id
    assert attributes(submit)["http.response.status_code"] == 200

    # The op belongs to the trace of its request, though it ran later and in another thread.
    (op,) = collector.named("op forward_backward")
    assert op.trace_id.hex() == TRACE
    assert op.parent_span_id == submit.span_id
    assert attributes(op) == {
        "twinkle.request_id": request_id,
        "twinkle.run_id": model,
        "twinkle.model": "mock",
        "twinkle.kind": "forward_backward",
        "twinkle.outcome": "succeeded",
    }
    below = {span.name: span for span in collector.spans if span.parent_span_id == op.span_id}
    assert set(below) == {"wait", "run"}
    assert any(s.parent_span_id == submit.span_id for s in collector.named("journal"))

    # The batch has its own trace, with links in both directions.
    (batch,) = [span for span in collector.named("batch") if request_id in attributes(span)["twinkle.request_ids"]]
    assert batch.trace_id != op.trace_id
    assert [link.span_id for link in batch.links] == [op.span_id]
    assert [link.span_id for link in below["run"].links] == [batch.span_id]

    # So has the poll that fetched the result.
    polls = [
        s
        for s in collector.named("POST /api/v1/retrieve_future")
        if attributes(s).get("twinkle.request_id") == request_id
    ]
    assert [link.span_id for link in polls[0].links] == [op.span_id]
    assert {"service.name": "ours", "team": "a"}.items() <= collector.resources[0].items()


def test_samples_are_traced_and_watchers_are_not(exporter: Server, collector: Collector) -> None:
    tenant = Tenant(exporter.url, "tml-traced")
    sampler = tenant.json(tenant.publish(tenant.model(), 1))["sampling_session_id"]
    request_id = tenant.sample(sampler)
    tenant.tokens(request_id)
    for path in ("/metrics", "/api/v1/healthz", "/api/v1/status"):
        httpx.get(exporter.url + path, trust_env=False)
    (op,) = eventually(lambda: collector.named("op sample"))
    assert attributes(op)["twinkle.request_id"] == request_id
    assert attributes(op)["twinkle.outcome"] == "succeeded"
    names = {span.name for span in collector.spans}
    assert "GET /metrics" not in names
    assert not any("healthz" in name or "status" in name for name in names)


def test_metrics_have_the_names_that_prometheus_reads(exporter: Server, collector: Collector) -> None:
    tenant = Tenant(exporter.url, "tml-measured")
    model = tenant.model()
    for seq in (1, 2, 3):
        tenant.result(tenant.forward_backward(model, seq, loss="no such loss"))
    eventually(lambda: _sum(collector, "twinkle_ops_total", outcome="user_error") == 3)
    metrics = collector.metrics
    known = {one.name: one for one in INSTRUMENTS}
    ours = {name: metric for name, metric in metrics.items() if name.startswith("twinkle_")}
    assert set(ours) <= set(known)
    assert len(ours) > 25
    for name, metric in ours.items():
        data = metric.WhichOneof("data")
        assert data == {"counter": "sum", "gauge": "gauge", "histogram": "histogram"}[known[name].kind]
        assert metric.unit == known[name].unit
    assert metrics["twinkle_ops_total"].sum.is_monotonic
    (point,) = _points(metrics["twinkle_batch_duration_seconds"].histogram, kind="forward_backward")
    assert point.count == sum(point.bucket_counts) >= 3
    assert len(point.bucket_counts) == len(point.explicit_bounds) + 1
    assert tuple(point.explicit_bounds) == known["twinkle_batch_duration_seconds"].buckets


def _points(data: Any, **labels: str) -> list[Any]:
    return [p for p in data.data_points if labels.items() <= attributes(p).items()]


def _sum(collector: Collector, name: str, **labels: str) -> float:
    metric = collector.metrics.get(name)
    return 0.0 if metric is None else sum(point.as_double for point in _points(metric.sum, **labels))


def test_no_collector(own_server: Callable[..., Server]) -> None:
    """Nothing waits or fails, the log says it once, and a collector that starts later gets data."""
    port = free_port()
    server = own_server(exporting(f"http://127.0.0.1:{port}"), otlp=0.5)
    tenant = Tenant(server.url, "tml-alone")
    model = tenant.model()
    eventually(lambda: "traces cannot be exported" in server.log() and "metrics cannot be exported" in server.log())
    for seq in range(1, 5):
        tenant.result(tenant.forward_backward(model, seq))
    collector = Collector(port)
    try:
        eventually(lambda: "traces are exported to" in server.log() and "metrics are exported to" in server.log(), 60)
        tenant.result(tenant.forward_backward(model, 5))
        eventually(lambda: collector.named("op forward_backward"))
    finally:
        collector.close()
    tenant.result(tenant.forward_backward(model, 6))
    assert server.stop() == 0
    log = server.log()
    # once for each signal, and once more after the collector went away
    assert 2 <= log.count("cannot be exported") <= 4
    assert "opentelemetry" not in log
    assert "Traceback" not in log


def test_debug_writes_to_the_log(own_server: Callable[..., Server]) -> None:
    server = own_server(exporting("http://127.0.0.1:1", debug=True))
    tenant = Tenant(server.url, "tml-debug")
    request_id = tenant.forward_backward(tenant.model(), 1)
    tenant.result(request_id)
    eventually(lambda: "span op forward_backward" in server.log() and "metric twinkle_ops_total" in server.log())
    (line,) = [line for line in server.log().splitlines() if "span op forward_backward" in line]
    assert request_id in line
    assert "cannot be exported" not in server.log()
    assert "tml-debug" not in server.log()


def test_without_the_packages_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = "opentelemetry.sdk", "twinkle.server.telemetry.otlp"
    for name in [name for name in sys.modules if name.startswith(hidden)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    Telemetry(TelemetryConfig())  # needs none of these packages
    with pytest.raises(MissingDependencyError, match=r"telemetry\.enabled: true needs .* extra 'telemetry'"):
        Telemetry(TelemetryConfig(enabled=True))
