"""Streams of events whose first body takes long: comments come first, and errors keep their status code if they can."""

import asyncio
from collections.abc import AsyncGenerator

import pytest
from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.types import Message

from twinkle.errors import CapacityError
from twinkle.server.http import streams

Json = dict[str, object]


class Client:
    """A client that reads a stream, and leaves when ``leaves`` is set."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.leaves = asyncio.Event()

    @property
    def request(self) -> Request:
        return Request({"type": "http", "method": "POST", "path": "/", "headers": []}, self.receive)

    async def receive(self) -> Message:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    async def read(self, bodies: AsyncGenerator[Json, None]) -> str:
        """Read a stream of these bodies to its end, and return its text."""
        response = await streams.begun_or_commented(
            self.request, bodies, streams.EVENTS, lambda error: {"error": str(error)}, comment
        )
        await response(self.request.scope, self.receive, self.send)
        return b"".join(message.get("body", b"") for message in self.sent).decode()


def comment() -> str:
    return "queued"


def test_no_comment_without_a_wait() -> None:
    async def bodies() -> AsyncGenerator[Json, None]:
        yield {"number": 1}
        yield {"number": 2}

    async def main() -> str:
        return await Client().read(bodies())

    assert asyncio.run(main()) == 'data: {"number": 1}\n\ndata: {"number": 2}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("fails", [False, True])
def test_comments_until_the_first_body(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error then is the last body, because the status code is sent."""
    monkeypatch.setattr(streams, "_QUIET_SECONDS", 0.01)

    async def main() -> str:
        client = Client()

        async def bodies() -> AsyncGenerator[Json, None]:
            while sum(message.get("body", b"").count(b"queued") for message in client.sent) < 3:
                await asyncio.sleep(0.005)
            if fails:
                raise CapacityError("the device is full")
            yield {"number": 1}

        return await client.read(bodies())

    *comments, last, done, end = asyncio.run(main()).split("\n\n")
    assert len(comments) >= 3
    assert set(comments) == {": queued"}
    assert last == ('data: {"error": "the device is full"}' if fails else 'data: {"number": 1}')
    assert (done, end) == ("data: [DONE]", "")


def test_an_error_before_the_first_comment_is_raised() -> None:
    async def bodies() -> AsyncGenerator[Json, None]:
        raise CapacityError("the device is full")
        yield {}

    async def main() -> None:
        with pytest.raises(CapacityError):
            await Client().read(bodies())

    asyncio.run(main())


@pytest.mark.parametrize("quiet", [60.0, 0.01], ids=["before the first comment", "after it"])
def test_a_client_that_leaves_ends_the_work(quiet: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_QUIET_SECONDS", quiet)

    async def main() -> None:
        client, ended = Client(), asyncio.Event()

        async def bodies() -> AsyncGenerator[Json, None]:
            try:
                await asyncio.sleep(60)
                yield {}
            finally:
                ended.set()

        reading = asyncio.create_task(client.read(bodies()))
        while quiet < 1 and len(client.sent) < 3:  # the headers and two comments
            await asyncio.sleep(0.005)
        await asyncio.sleep(0)
        client.leaves.set()
        if quiet > 1:
            with pytest.raises(ClientDisconnect):
                await reading
        else:
            await reading
        await asyncio.wait_for(ended.wait(), 10)

    asyncio.run(main())
