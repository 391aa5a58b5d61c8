"""Waiting for many samples, cancelling some, and copies of clients, with the unmodified SDK and both ways to wait.

The mock samples as slowly as each test needs.
"""

import asyncio
import multiprocessing
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker
from tinker import types

from tests.support.servers.serving import MODEL, SdkServer, eventually, waiting_samples

PROMPT = types.ModelInput.from_ints([10, 20, 30, 40])
ENDLESS = types.SamplingParams(max_tokens=4000, seed=1, stop=[])


@pytest.fixture(scope="module", params=[True, False], ids=["batched", "single"])
def mock_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SdkServer]:
    sections = {"clients": {"batched_sample_polls": request.param}}
    server = SdkServer(tmp_path_factory.mktemp("server"), "mock", sections, sample=0.002).start()
    yield server
    assert server.stop() == 0


@pytest.fixture
def sampler(mock_server: SdkServer, request: pytest.FixtureRequest) -> Iterator[tinker.SamplingClient]:
    service = mock_server.service(request.node.name)
    yield service.create_sampling_client(base_model=MODEL)
    service.close("success").result()  # otherwise it would complain that the server is gone


def params(seed: int) -> types.SamplingParams:
    return types.SamplingParams(max_tokens=8, seed=seed, stop=[])


def tokens(future: object) -> list[int]:
    return list(future.result(timeout=120).sequences[0].tokens)


def test_many_at_once(sampler: tinker.SamplingClient) -> None:
    futures = [sampler.sample(PROMPT, 1, params(seed)) for seed in range(600)]
    found = [tokens(future) for future in futures]
    assert found[::100] == [tokens(sampler.sample(PROMPT, 1, params(seed))) for seed in range(0, 600, 100)]


def test_back_pressure(tmp_path: Path) -> None:
    """A client sends more samples than a tenant may have waiting: the SDK is told to wait and sends the rest later."""
    sections = {"limits": {"max_waiting_samples_per_tenant": 5}}
    server = SdkServer(tmp_path, "mock", sections, sample=0.1).start()
    service = server.service("hasty")
    sampler = service.create_sampling_client(base_model=MODEL)
    futures = [sampler.sample(PROMPT, 1, params(seed)) for seed in range(12)]
    assert len({tuple(tokens(future)) for future in futures}) == 12
    assert sampler.holder._sample_backoff_until is not None
    service.close("success").result()
    assert server.stop() == 0


def test_sequences_have_ids(sampler: tinker.SamplingClient) -> None:
    ids = [sequence.sequence_id for sequence in sampler.sample(PROMPT, 3, params(1)).result().sequences]
    assert len(set(ids)) == 3


@pytest.mark.complaint("non-retryable error")
def test_a_failure_is_the_users(sampler: tinker.SamplingClient) -> None:
    good = sampler.sample(PROMPT, 1, params(1))
    with pytest.raises(tinker.RequestFailedError, match="max_tokens") as error:
        sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=10**6)).result()
    assert error.value.category == types.RequestErrorCategory.User
    assert len(tokens(good)) == 8


def test_giving_up_stops_the_work(mock_server: SdkServer, sampler: tinker.SamplingClient) -> None:
    async def give_up() -> None:
        await asyncio.wait_for(sampler.sample_async(PROMPT, 4, ENDLESS), timeout=0.3)

    # The mock needs 250 turns for these samples: without a cancel the server would still compute them.
    slow = [sampler.sample(PROMPT, 4, ENDLESS) for _ in range(20)]
    eventually(lambda: waiting_samples(mock_server) == 20)
    with pytest.raises(TimeoutError):
        asyncio.run(give_up())
    for future in slow:
        future.cancel()
    eventually(lambda: waiting_samples(mock_server) == 0)
    assert len(tokens(sampler.sample(PROMPT, 1, params(1)))) == 8


def test_copies_sample_beside_the_original(sampler: tinker.SamplingClient) -> None:
    expected = [tokens(sampler.sample(PROMPT, 1, params(seed))) for seed in range(5)]
    copies = [pickle.loads(pickle.dumps(sampler)) for _ in range(2)]
    for client in copies:
        assert [tokens(client.sample(PROMPT, 1, params(seed))) for seed in range(5)] == expected
    assert [client._cloned_sampler_id for client in copies] == [1, 2]
    for client in copies:
        client.holder.close()


def _in_another_process(pickled: bytes, results: "multiprocessing.Queue[list[int]]") -> None:
    client = pickle.loads(pickled)
    results.put(tokens(client.sample(PROMPT, 1, params(3))))


def test_a_copy_in_another_process(sampler: tinker.SamplingClient) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    worker = context.Process(target=_in_another_process, args=(pickle.dumps(sampler), results))
    worker.start()
    assert results.get(timeout=60) == tokens(sampler.sample(PROMPT, 1, params(3)))
    worker.join(30)  # the SDK decides how it ends: its background threads may abort the process
    assert worker.exitcode is not None


@pytest.mark.complaint("Failed to send telemetry batch")  # while the server is down
@pytest.mark.parametrize("batched", [True, False])
def test_samples_survive_a_killed_server(tmp_path: Path, batched: bool) -> None:
    """Samples are lost with the server; the next server reports that, and the SDK sends them again."""
    sections = {"clients": {"batched_sample_polls": batched}}
    server = SdkServer(tmp_path, "mock", sections, sample=0.02).start()
    service = server.service("survivor")
    sampler = service.create_sampling_client(base_model=MODEL)
    assert len(tokens(sampler.sample(PROMPT, 1, params(0)))) == 8
    futures = [sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=800, seed=s, stop=[])) for s in range(30)]
    eventually(lambda: waiting_samples(server) == 30)
    server.kill()
    server.start()
    assert [len(tokens(future)) for future in futures] == [800] * 30
    service.close("success").result()
    assert server.stop() == 0
