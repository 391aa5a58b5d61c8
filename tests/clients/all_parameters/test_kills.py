"""SIGKILL in the middle of training all parameters: every step is applied once. ``make chaos`` kills twenty times."""

import json
from pathlib import Path

import pytest
import tinker
import torch
from tinker import types

from tests.clients.all_parameters.conftest import TOLERANCE, PlainLoop, files_of, rows_of
from tests.clients.all_parameters.test_sdk import ADAM, MODEL, STEP, data
from tests.support.servers.running import Server, torch_config
from tests.support.servers.serving import close_clients
from twinkle_client import init_tinker_client

STEPS = 6  # between kills


def test_every_step_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TINKER_BASE_URL", "TINKER_API_KEY"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    config = torch_config(str(folder), train_mode="full", max_replayed_steps=4)
    del config["applications"][2:]  # no sampler, no processors
    server = Server(tmp_path, config, snapshot=0.3).start()
    try:
        init_tinker_client(server.url, "tml-killed")
        training = tinker.ServiceClient().create_full_training_client(MODEL)
        under_way = []
        for kill in range(3):
            for seed in range(STEPS * kill, STEPS * (kill + 1)):
                passed = training.forward_backward(data(rows_of(seed)), "cross_entropy")
                under_way.append((passed, training.optim_step(STEP)))
            if kill < 2:
                under_way[STEPS * kill + kill][1].result()  # some steps are done, others wait or run
                server.kill()
                server.start()
        results: list[types.ForwardBackwardOutput] = []
        for passed, stepped in under_way:
            results.append(passed.result())
            stepped.result()
        saved = files_of(server, training.save_state("end").result().path)
        plain = PlainLoop(folder, torch.optim.Adam, **ADAM)
        for seed, result in enumerate(results):
            expected = plain.train(rows_of(seed))
            assert abs(result.metrics["loss:sum"] - expected) <= TOLERANCE * expected
        assert json.loads((saved / "trainer_state.json").read_text())["step"] == 3 * STEPS
        plain.assert_same_weights(saved)
        assert "Traceback" not in server.log()
    finally:
        close_clients(server.url)
        server.close()
