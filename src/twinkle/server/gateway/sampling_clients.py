"""Which samples a client may be waiting for when a server starts again.

A client that is told by its stream what is done (see ``services.sampling.completions``) would wait for ever for a
sample that was lost with a server: no list of them survives. So the sequence numbers that a client uses are on record
ahead of their use, a block at a time, and the next server reports those that it does not know as done. Asking for one,
the client hears that it is gone and sends it again.
"""

import asyncio
import time
from collections.abc import Sequence

from twinkle.server.ids import SEQ_IDS_PER_CLIENT, RequestId
from twinkle.server.services.sampling.completions import Completion, Completions
from twinkle.server.services.sampling.sampler_service import SamplerService
from twinkle.server.state.records.sampling import SamplingSessions

_BLOCK = 1024  # numbers that one write covers, and as many before them: requests overtake each other
_MOST = 16 * _BLOCK  # a client that has numbers under way which lie further apart is told of the highest ones
_Client = tuple[str, int]  # sampling session, number


class SamplingClients:
    """Of one gateway. Belongs to one event loop."""

    def __init__(self, records: SamplingSessions) -> None:
        self._records = records
        self._covered: dict[_Client, range] = {}  # numbers that are on record
        self._writing: dict[_Client, asyncio.Lock] = {}

    async def use(self, sampling: SamplerService, sampling_session_id: str, seq_id: int) -> None:
        """Returns once the number is on record as one that may be in use."""
        client = RequestId(sampling_session_id, seq_id).client
        if seq_id in self._covered.get(client, ()):
            return
        async with self._writing.setdefault(client, asyncio.Lock()):
            if seq_id not in self._covered.get(client, ()):
                await self._report_lost(sampling, client)  # what is on record is of an earlier server until here
                numbers = self._numbers_to_cover(client, seq_id, sampling.lowest_number(sampling_session_id, seq_id))
                await self._records.set_numbers_in_use(*client, numbers)
                self._covered[client] = numbers

    async def completions(
        self, sampling: SamplerService, streams: Completions, client: _Client, place: int, timeout: float
    ) -> Sequence[Completion]:
        """What is done after ``place`` of the client's stream."""
        await self._report_lost(sampling, client)
        try:
            return await streams.after(*client, place, timeout, time.time())
        finally:
            if client not in self._writing:  # or it is about to have a number on record, and will be told of that
                streams.close_passing(*client)

    def forget(self, sampling_session_id: str) -> None:
        """The sampling session is no more."""
        for client in [client for client in self._covered if client[0] == sampling_session_id]:
            del self._covered[client]
            self._writing.pop(client, None)

    def _numbers_to_cover(self, client: _Client, seq_id: int, lowest: int) -> range:
        own = range(client[1] * SEQ_IDS_PER_CLIENT, (client[1] + 1) * SEQ_IDS_PER_CLIENT)
        highest = max(seq_id, self._covered.get(client, range(0)).stop - 1)
        stop = min((highest // _BLOCK + 1) * _BLOCK, own.stop)
        return range(max(min(lowest, stop - 2 * _BLOCK), stop - _MOST, own.start), stop)

    async def _report_lost(self, sampling: SamplerService, client: _Client) -> None:
        """Once for each client, before this server tells it anything else."""
        if sampling.completions is None or sampling.completions.has_stream(*client):
            return
        numbers = await self._records.numbers_in_use(*client)
        if not sampling.completions.has_stream(*client):
            sampling.completions.open_stream(*client, time.time(), passing=not numbers)
            for start in range(0, len(numbers), _BLOCK):
                sampling.report_lost(client[0], numbers[start : start + _BLOCK])
                await asyncio.sleep(0)  # others get their turn
