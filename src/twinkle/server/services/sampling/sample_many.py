"""The prompts of one HTTP request are sampled together; whoever leaves early cancels all of them."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from twinkle.sampler.types import Progress, SampleRequest, SampleResult
from twinkle.server.services.sampling.sampler_service import SamplerService
from twinkle.server.types import SamplingSessionRecord


async def generate_together(
    sampling: SamplerService, session: SamplingSessionRecord, requests: Sequence[SampleRequest]
) -> AsyncGenerator[tuple[int, Progress | SampleResult], None]:
    """What the sampler says of each request, by its place in ``requests``, as it comes. The first error is raised."""
    queue: asyncio.Queue[tuple[int, Progress | SampleResult | BaseException | None]] = asyncio.Queue()

    async def drain(number: int, request: SampleRequest) -> None:
        try:
            async with aclosing(sampling.generate(session, request)) as items:
                async for item in items:
                    queue.put_nowait((number, item))
            queue.put_nowait((number, None))
        except Exception as error:  # noqa: BLE001 - handed over: it is raised below
            queue.put_nowait((number, error))

    tasks = [asyncio.create_task(drain(number, request)) for number, request in enumerate(requests)]
    try:
        running = len(tasks)
        while running:
            number, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def results_of(
    sampling: SamplerService, session: SamplingSessionRecord, requests: Sequence[SampleRequest]
) -> list[SampleResult]:
    """All results, in the order of the requests, none of which may be streamed."""
    results: dict[int, SampleResult] = {}
    async with aclosing(generate_together(sampling, session, requests)) as items:
        async for number, item in items:
            assert isinstance(item, SampleResult), "nothing is streamed that was not asked for"
            results[number] = item
    return [results[number] for number in range(len(requests))]
