"""Curves of runs: what the server measures in both protocols, what clients log, and what survives a restart."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers.native_running import NativeTenant
from tests.support.servers.running import MODEL, Server, Tenant, datum, key_for, tensor
from twinkle.server.services.training import measurements as run_measurements
from twinkle.server.services.training.measurements import RunMeasurements
from twinkle.server.state.errors import DatabaseUnavailableError
from twinkle.server.types import MeasuredStep

RUN = "s1:train:1"
ROWS = [{"input_ids": [1, 2, 3, 4], "labels": [-100, 3, 4, 5]}]


def address(run_id: str) -> str:
    return f"twinkle/training_runs/{run_id}/metrics"


def points(tenant: Tenant, run_id: str, count: int, source: str = "server") -> list[dict[str, Any]]:
    """Return the points as soon as there are this many: they are written a moment after the step."""
    for _ in range(200):
        found = [point for point in tenant.get(address(run_id)).json()["points"] if point["source"] == source]
        if len(found) >= count:
            return found
        time.sleep(0.05)
    raise AssertionError(f"{len(found)} of {count} points came: {found}")


def step(tenant: Tenant, model: str, first: int, rows: list[Any], **fields: Any) -> tuple[float, float]:
    """Run a pass and a step; return the pass's loss and the gradient norm that the step reports."""
    loss = tenant.loss(tenant.forward_backward(model, first, rows, **fields))
    told = tenant.json(tenant.optim_step(model, first + 1, learning_rate=0.05))
    return loss, told["metrics"]["unclipped_grad_l2:mean"]


# --- what the server measures -----------------------------------------------------------------------------------------


def test_cross_entropy_is_a_mean_over_weights(tenant: Tenant) -> None:
    model = tenant.model()
    row = datum([1, 2, 3, 4, 5], weights=tensor([0.0, 0.5, 1.0, 1.0]))
    loss, norm = step(tenant, model, 1, [row, row])
    (point,) = points(tenant, model, 1)
    assert point["step"] == 1
    assert point["values"]["loss"] == pytest.approx(loss / 5, rel=1e-6)
    assert point["values"]["tokens"] == 8
    assert point["values"]["learning_rate"] == 0.05
    assert point["values"]["grad_norm"] == pytest.approx(norm)


def test_a_window_is_all_passes_before_its_step(tenant: Tenant) -> None:
    model = tenant.model()
    first = tenant.loss(tenant.forward_backward(model, 1, [datum([1, 2, 3])]))
    second = tenant.loss(tenant.forward_backward(model, 2, [datum([4, 5, 6, 7])]))
    tenant.result(tenant.forward_backward(model, 3, [datum([9, 9, 9])], forward_only=True))
    tenant.json(tenant.optim_step(model, 4))
    third, _ = step(tenant, model, 5, [datum([1, 2, 3])])
    found = points(tenant, model, 2)
    assert [point["step"] for point in found] == [1, 2]
    assert found[0]["values"]["loss"] == pytest.approx((first + second) / 5, rel=1e-6)
    assert found[0]["values"]["tokens"] == 5
    assert found[1]["values"]["loss"] == pytest.approx(third / 2, rel=1e-6)


def test_policy_losses_count_what_was_acted_on(tenant: Tenant) -> None:
    model = tenant.model()
    inputs = {"advantages": tensor([0.0, 0.0, 1.0, -1.0]), "logprobs": tensor([0.0, 0.0, -1.0, -1.0])}
    loss, _ = step(tenant, model, 1, [datum([1, 2, 3, 4, 5], **inputs)], loss="importance_sampling")
    (point,) = points(tenant, model, 1)
    assert point["values"]["loss"] == pytest.approx(loss / 2, rel=1e-5)


def test_a_window_that_failed_leaves_no_point_and_no_loss(tenant: Tenant) -> None:
    model = tenant.model()
    tenant.result(tenant.forward_backward(model, 1, [datum([1, 2, 3])]))
    tenant.error(tenant.forward_backward(model, 2, loss="nonsense"))
    tenant.error(tenant.optim_step(model, 3))
    loss, _ = step(tenant, model, 4, [datum([4, 5, 6])])
    (point,) = points(tenant, model, 1)
    assert point["step"] == 1
    assert point["values"]["loss"] == pytest.approx(loss / 2, rel=1e-6)


def test_a_load_forgets_the_open_window(tenant: Tenant) -> None:
    model = tenant.model()
    path = tenant.json(tenant.save(model, 1, "ck"))["path"]
    tenant.result(tenant.forward_backward(model, 2))
    tenant.json(tenant.load(model, 3, path))
    loss, _ = step(tenant, model, 4, [datum([4, 5, 6])])
    (point,) = points(tenant, model, 1)
    assert point["values"]["loss"] == pytest.approx(loss / 2, rel=1e-6)


def test_the_librarys_verbs(server: Server, request: pytest.FixtureRequest) -> None:
    key = key_for(request.node.nodeid)
    native = NativeTenant(server.url, key, MODEL)
    run_id = native.add_adapter("a", gradient_accumulation_steps=2)
    native.verb("set_optimizer", adapter_name="a", optimizer_cls="AdamW", lr=0.05)
    losses, norms = [], []
    for number in range(4):
        outputs = native.verb("forward_backward", adapter_name="a", inputs=ROWS)
        losses.append((outputs["loss"], outputs["num_tokens"]))
        if number < 2:
            norms.append(native.verb("clip_grad_and_step", adapter_name="a"))
        else:
            native.verb("step", adapter_name="a")
            native.verb("zero_grad", adapter_name="a")
    first, second = points(Tenant(server.url, key), run_id, 2)
    for point, window in ((first, losses[:2]), (second, losses[2:])):
        mean = sum(loss for loss, _ in window) / sum(count for _, count in window)
        assert point["values"]["loss"] == pytest.approx(mean, rel=1e-6)
        assert point["values"]["tokens"] == 8
        assert point["values"]["learning_rate"] == 0.05
    assert first["values"]["grad_norm"] == pytest.approx(float(norms[1]), rel=1e-3)
    assert "grad_norm" not in second["values"]  # it was not requested


def test_forward_calculate_loss_backward(server: Server, request: pytest.FixtureRequest) -> None:
    key = key_for(request.node.nodeid)
    native = NativeTenant(server.url, key, MODEL)
    run_id = native.add_adapter("a")
    native.verb("set_optimizer", adapter_name="a", optimizer_cls="AdamW", lr=0.05)
    native.verb("forward", adapter_name="a", inputs=ROWS)
    loss = native.verb("calculate_loss", adapter_name="a")
    native.verb("backward", adapter_name="a")
    native.verb("step", adapter_name="a")
    (point,) = points(Tenant(server.url, key), run_id, 1)
    assert point["values"]["loss"] == pytest.approx(loss / 3, rel=1e-6)
    assert point["values"]["tokens"] == 4


def test_steps_are_counted_on_after_a_crash_and_none_twice(own_server) -> None:
    server = own_server(snapshot=3600.0)  # everything is replayed
    tenant = Tenant(server.url, "tml-crash")
    model = tenant.model()
    step(tenant, model, 1, [datum([1, 2, 3])])
    before = points(tenant, model, 1)
    server.kill()
    server.start()
    step(tenant, model, 3, [datum([1, 2, 3])])
    after = points(tenant, model, 2)
    assert after[:1] == before
    assert [point["step"] for point in after] == [1, 2]
    step(tenant, model, 5, [datum([1, 2, 3])])
    assert server.stop() == 0  # stops right after the step, and loses nothing
    server.start()
    assert len(tenant.get(address(model)).json()["points"]) == 3


# --- what clients log -------------------------------------------------------------------------------------------------


def test_logged_values_belong_to_the_newest_step(tenant: Tenant) -> None:
    model = tenant.model()
    assert tenant.post(address(model), {"values": {"reward": 0.25}}).json()["step"] == 0
    step(tenant, model, 1, [datum([1, 2, 3])])
    logged = tenant.post(address(model), {"values": {"reward": 1, "eval/accuracy": 0.5}})
    assert logged.status_code == 200
    assert logged.json()["step"] == 1
    tenant.post(address(model), {"step": 700, "values": {"<b>": -1e300}})
    found = tenant.get(address(model)).json()
    assert [(each["source"], each["step"]) for each in found["points"]] == [
        ("client", 0),
        ("server", 1),
        ("client", 1),
        ("client", 700),
    ]
    assert found["points"][2]["values"] == {"reward": 1.0, "eval/accuracy": 0.5}
    assert found["next"] == 4
    assert not found["more"]


def test_points_come_in_pages(tenant: Tenant) -> None:
    model = tenant.model()
    for number in range(5):
        tenant.post(address(model), {"step": number, "values": {"reward": number}})
    first = tenant.get(address(model), limit=3).json()
    assert [point["step"] for point in first["points"]] == [0, 1, 2]
    assert first["more"]
    second = tenant.get(address(model), limit=3, since=first["next"]).json()
    assert [point["step"] for point in second["points"]] == [3, 4]
    assert not second["more"]
    assert tenant.get(address(model), since=second["next"]).json() == {"points": [], "next": 5, "more": False}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"values": {}}',
        b'{"values": {"a": NaN}}',
        b'{"values": {"a": 1e999}}',
        b'{"values": {"a": "1"}}',
        b'{"values": {"a": true}}',
        b'{"values": {"": 1}}',
        b'{"values": {"a\\u0000": 1}}',
        b'{"values": {"a\\n": 1}}',
        b'{"values": {"a": 1}, "step": -1}',
        b'{"values": {"a": 1}, "step": 1.5}',
        b'{"values": {"a": 1}, "step": 9223372036854775808}',
        b'{"values": {"%s": 1}}' % (b"x" * 65),
        b'{"values": {%s}}' % b",".join(b'"v%d": 1' % n for n in range(33)),
    ],
)
def test_what_cannot_be_a_point(tenant: Tenant, body: bytes) -> None:
    model = tenant.model()
    answer = tenant.http.post(address(model), content=body)
    assert answer.status_code == 400, answer.text
    assert tenant.get(address(model)).json()["points"] == []


@pytest.mark.parametrize("query", [{"since": -1}, {"since": "x"}, {"limit": 0}, {"limit": 5000}])
def test_what_cannot_be_asked(tenant: Tenant, query: dict[str, Any]) -> None:
    assert tenant.get(address(tenant.model()), **query).status_code == 400


# --- an unavailable database ------------------------------------------------------------------------------------------


def test_what_cannot_be_written_now_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_measurements, "_MOST_PENDING", 3)

    class Away:
        def __init__(self) -> None:
            self.steps: list[MeasuredStep] = []
            self.is_away = True

        async def add_steps(self, steps: list[MeasuredStep]) -> None:
            if self.is_away:
                raise DatabaseUnavailableError
            self.steps += steps

    async def main() -> None:
        away = Away()
        measurements = RunMeasurements(away)  # type: ignore[arg-type]
        for seq in range(5):
            measurements.stepped(RUN, seq, 0.1)
        await measurements.write()
        away.is_away = False
        measurements.stepped(RUN, 5, float("inf"), float("nan"))
        await measurements.stop()
        assert [each.seq for each in away.steps] == [2, 3, 4, 5]  # the oldest were dropped
        assert away.steps[-1].values == {"tokens": 0.0}

    asyncio.run(main())
