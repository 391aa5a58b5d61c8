"""Streams of completions are kept only for clients that have something to fetch, not for every number in a request."""

import asyncio
from collections.abc import Callable

import httpx
import pytest

from tests.support.servers.running import MODEL, Server, Tenant, sample_body
from twinkle.server.gateway.sampling_clients import SamplingClients
from twinkle.server.ids import SEQ_IDS_PER_CLIENT
from twinkle.server.services.sampling.completions import Completions

SESSION = "s:sample:0"


class Records:
    """A stand-in for the table of sequence numbers on record."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[str, int], range] = {}

    async def numbers_in_use(self, sampling_session_id: str, client: int) -> range:
        await asyncio.sleep(0)
        return self.numbers.get((sampling_session_id, client), range(0))

    async def set_numbers_in_use(self, sampling_session_id: str, client: int, numbers: range) -> None:
        await asyncio.sleep(0.01)
        self.numbers[sampling_session_id, client] = numbers


class Sampling:
    """The part of a sampling service that the clients' records use."""

    def __init__(self) -> None:
        self.completions = Completions()

    def lowest_number(self, _session: str, seq_id: int) -> int:
        return seq_id

    def report_lost(self, session: str, numbers: range) -> None:
        for number in numbers:
            self.completions.add(f"{session}:{number}", None, 0.0)


class Client:
    def __init__(self, number: int = 0) -> None:
        self.records, self.sampling = Records(), Sampling()
        self.book = SamplingClients(self.records)  # type: ignore[arg-type]
        self.number = number

    async def poll(self, place: int = 0, timeout: float = 0.0, number: int | None = None) -> list[str]:
        client = SESSION, self.number if number is None else number
        streams = self.sampling.completions
        found = await self.book.completions(self.sampling, streams, client, place, timeout)  # type: ignore[arg-type]
        self.place = found[-1].place if found else place
        return [one.request_id for one in found]

    async def use(self, seq_id: int) -> None:
        await self.book.use(self.sampling, SESSION, seq_id)  # type: ignore[arg-type]

    def has_stream(self, number: int | None = None) -> bool:
        return self.sampling.completions.has_stream(SESSION, self.number if number is None else number)


def runs(scenario: Callable[[Client], object]) -> None:
    async def main() -> None:
        await scenario(Client())  # type: ignore[misc]

    asyncio.run(main())


def test_numbers_that_mean_nobody_leave_nothing() -> None:
    async def scenario(client: Client) -> None:
        for number in (0, 1, 7, 2**40):
            assert await client.poll(number=number) == []
            assert not client.has_stream(number)
        polls = [asyncio.create_task(client.poll(timeout=0.05, number=number)) for number in range(100)]
        polls += [asyncio.create_task(client.poll(timeout=0.05, number=5)) for _ in range(3)]
        await asyncio.sleep(0.01)
        assert client.has_stream(5)  # kept while a poll waits
        await asyncio.gather(*polls)
        assert not any(map(client.has_stream, range(100)))

    runs(scenario)


def test_one_who_waits_before_its_first_sample_hears_of_it() -> None:
    async def scenario(client: Client) -> None:
        poll = asyncio.create_task(client.poll(timeout=30))
        await asyncio.sleep(0.01)
        await client.use(3)
        client.sampling.completions.add(f"{SESSION}:3", 10, 0.0)
        assert await poll == [f"{SESSION}:3"]
        assert await client.poll(client.place) == []
        assert client.has_stream()  # its numbers are on record, and without a stream they would count as lost

    runs(scenario)


def test_a_first_sample_that_is_just_being_written_down_is_not_lost() -> None:
    async def scenario(client: Client) -> None:
        poll = asyncio.create_task(client.poll(timeout=0.005))
        await asyncio.sleep(0)
        using = asyncio.create_task(client.use(3))
        assert await poll == []
        await using
        assert await client.poll() == []  # no number of its block is reported as lost

    runs(scenario)


def test_what_got_lost_with_a_server_is_told_once() -> None:
    async def scenario(client: Client) -> None:
        client.records.numbers[SESSION, 0] = range(3)
        assert await client.poll() == [f"{SESSION}:{number}" for number in range(3)]
        for _ in range(3):
            assert await client.poll(client.place) == []

    runs(scenario)


# --- over HTTP --------------------------------------------------------------------------------------------------------


def poll(tenant: Tenant, sampler: str, client: int) -> httpx.Response:
    target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": client}
    return tenant.post("retrieve_futures", {"target": target, "prev_cursor": 0, "timeout": 0.0})


@pytest.mark.parametrize("joined", [True, False])
def test_copies_of_a_client_are_told_whether_they_joined_or_not(server: Server, tenant: Tenant, joined: bool) -> None:
    body = {"session_id": tenant.session(), "sampling_session_seq_id": 0, "base_model": MODEL}
    sampler = tenant.post("create_sampling_session", body).json()["sampling_session_id"]
    client = 5
    if joined:
        client = tenant.post("join_sampling_session", {"sampling_session_id": sampler}).json()["client_counter"]
    assert poll(tenant, sampler, client).json() == {"completions": [], "cursor": 0}
    request_id = tenant.submit("asample", sample_body(sampler, client * SEQ_IDS_PER_CLIENT + 1))
    tenant.result(request_id)
    (told,) = poll(tenant, sampler, client).json()["completions"]
    assert told["request_id"] == request_id
