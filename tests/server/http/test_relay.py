"""Requests and responses as values: whole answers, streams, errors, and readers that disconnect."""

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from twinkle.server.http.asgi_relay import HttpHead, HttpRequest, answer, shielded, stream

REQUEST = HttpRequest("POST", "/a b", b"q=1", ((b"x-name", b"value"),), b"body", ("10.0.0.1", 5))


def app(parts: list[bytes], error: Exception | None = None, whole: bool = True) -> Any:
    async def run(scope: Any, receive: Any, send: Any) -> None:
        assert (scope["path"], scope["query_string"], scope["client"]) == ("/a b", b"q=1", ("10.0.0.1", 5))
        assert (await receive())["body"] == b"body"
        await send({"type": "http.response.start", "status": 500 if error else 200, "headers": [(b"a", b"b")]})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        if whole:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        if error is not None:
            raise error

    return run


def test_whole_answers() -> None:
    reply = asyncio.run(answer(app([b"one", b"two"]), REQUEST))
    assert (reply.head, reply.body) == (HttpHead(200, ((b"a", b"b"),)), b"onetwo")


def test_an_error_that_was_answered_is_an_answer() -> None:
    assert asyncio.run(answer(app([b"sorry"], ArithmeticError()), REQUEST)).body == b"sorry"
    with pytest.raises(ArithmeticError):
        asyncio.run(answer(app([b"so"], ArithmeticError(), whole=False), REQUEST))


async def collected(of: Any) -> list[Any]:
    async with aclosing(stream(of, REQUEST)) as parts:
        return [part async for part in parts]


def test_streams() -> None:
    assert asyncio.run(collected(app([b"1", b"2"])))[1:] == [b"1", b"2"]
    assert asyncio.run(collected(app([b"sorry"], ArithmeticError())))[1:] == [b"sorry"]
    with pytest.raises(ArithmeticError):
        asyncio.run(collected(app([b"so"], ArithmeticError(), whole=False)))


def test_a_reader_who_leaves_ends_the_work_however_much_is_ready() -> None:
    async def leave() -> HttpHead | bytes:
        async with aclosing(stream(app([b"x"] * 1000), REQUEST)) as parts:
            first = await anext(parts)
            await asyncio.sleep(0.05)  # the application waits until the reader takes more
        return first

    assert isinstance(asyncio.run(asyncio.wait_for(leave(), 10)), HttpHead)


def test_what_was_begun_is_finished_without_whoever_asked() -> None:
    async def leave() -> list[str]:
        done: list[str] = []
        begun, go_on, finished = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def work() -> None:
            done.append("begun")
            begun.set()
            await go_on.wait()
            done.append("finished")
            finished.set()

        asking = asyncio.create_task(shielded(work()))
        await begun.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert done == ["begun"]
        go_on.set()
        await asyncio.wait_for(finished.wait(), 60)
        return done

    assert asyncio.run(leave()) == ["begun", "finished"]
