"""A run's metrics through the client: log values, and read all points of the curves back."""

from pathlib import Path

import pytest

from tests.clients.twinkle.stub_server import SESSION, StubServer
from tests.support.servers.running import Server, Tenant
from twinkle_client import InvalidRequestError, LoraConfig, NotFoundError, TwinkleClient
from twinkle_client.model import MultiLoraTransformersModel

POINT = {"number": 1, "time": 5.0, "source": "client", "step": 3, "values": {"reward": 0.5}}


def test_a_model_logs_to_the_run_of_its_adapter(stub: StubServer, client: TwinkleClient) -> None:
    run = f"{SESSION}-default"
    stub.answer("/model/m/twinkle/create", {})
    stub.answer("/model/m/twinkle/add_adapter_to_model", {"status": "ok", "adapter_name": run})
    stub.answer(f"/twinkle/training_runs/{run}/metrics", POINT)
    model = MultiLoraTransformersModel("m", client=client)
    with pytest.raises(InvalidRequestError, match="no adapter yet"):
        model.log_metrics({"reward": 0.5})
    model.add_adapter_to_model("default", LoraConfig(r=4))
    model.log_metrics({"reward": 0.5}, step=3)
    assert stub.bodies(f"/twinkle/training_runs/{run}/metrics") == [{"step": 3, "values": {"reward": 0.5}}]


def test_a_run_of_the_other_protocol(tmp_path: Path) -> None:
    server = Server(tmp_path).start()
    try:
        tenant = Tenant(server.url, "tml-client-metrics")
        run = tenant.model()
        tenant.result(tenant.forward_backward(run, 1))
        tenant.json(tenant.optim_step(run, 2))
        with TwinkleClient(server.url, tenant.key) as client:
            logged = client.log_metrics(run, {"reward": 0.5, "solved": True})
            assert (logged.step, logged.source) == (1, "client")
            points = client.get_metrics(run)
            assert [point.source for point in points] == ["server", "client"]
            assert points[1].values == {"reward": 0.5, "solved": 1.0}
            assert client.get_metrics(run, since=points[0].number) == [logged]
            with pytest.raises(NotFoundError):
                client.log_metrics("s-nobody:train:0", {"reward": 0.5})
            with pytest.raises(InvalidRequestError, match="values"):
                client.log_metrics(run, {"a\nb": 0.5})
    finally:
        server.close()
