"""The samples that a client may still be waiting for after the server has restarted.

A client learns from its stream of completions which samples are done (see ``services.sampling.completions``). Samples
are not journalled: one that is lost in a restart would never appear in the stream, and its client would wait for ever.
Therefore the sequence numbers that a client uses are written to the database before they are used, a block at a time.
After a restart the server reports those of them that it does not know as done. The client fetches such a sample, gets
the answer that it is gone, and sends it again.
"""

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence

from twinkle.server.ids import SEQ_IDS_PER_CLIENT, RequestId
from twinkle.server.services.sampling.completions import Completion, Completions
from twinkle.server.services.sampling.sampler_service import SamplerService
from twinkle.server.state.records.sampling import SamplingSessions

# Sequence numbers that one write covers. The block before it is covered, too, because requests overtake each other.
_BLOCK = 1024
# The most numbers on record for a client. If its samples under way lie further apart, only the highest are reported.
_MOST = 16 * _BLOCK
_Client = tuple[str, int]  # sampling session id, number of the client


class SamplingClients:
    """The sampling clients of one gateway, with the sequence numbers on record. Belongs to one event loop."""

    def __init__(self, records: SamplingSessions) -> None:
        self._records = records
        self._covered: dict[_Client, range] = {}  # sequence numbers that are on record
        self._writing: dict[_Client, asyncio.Lock] = {}  # one write at a time for each client
        self._unnumbered: dict[str, Iterator[int]] = {}  # by sampling session: numbers for requests that have none

    async def use(self, sampling: SamplerService, sampling_session_id: str, seq_id: int) -> None:
        """Return once the database says that this sequence number may be in use."""
        client = RequestId(sampling_session_id, seq_id).client
        if seq_id in self._covered.get(client, ()):
            return
        async with self._writing.setdefault(client, asyncio.Lock()):
            if seq_id not in self._covered.get(client, ()):
                await self._report_lost(sampling, client)  # before the numbers of an earlier process are overwritten
                numbers = self._numbers_to_cover(client, seq_id, sampling.lowest_number(sampling_session_id, seq_id))
                await self._records.set_numbers_in_use(*client, numbers)
                self._covered[client] = numbers

    async def unused_number(self, sampling_session_id: str) -> int:
        """Return a number for a sample whose client sent none.

        The server joins the sampling session for this, as a copy of its client does, so that it has numbers of its own.
        """
        if sampling_session_id not in self._unnumbered:
            client = await self._records.join(sampling_session_id)
            self._unnumbered.setdefault(sampling_session_id, itertools.count(client * SEQ_IDS_PER_CLIENT))
        return next(self._unnumbered[sampling_session_id])

    async def completions(
        self, sampling: SamplerService, streams: Completions, client: _Client, place: int, timeout: float
    ) -> Sequence[Completion]:
        """Return the completions after ``place`` in the client's stream; wait up to ``timeout`` seconds for one."""
        await self._report_lost(sampling, client)
        try:
            return await streams.after(*client, place, timeout, time.time())
        finally:
            # A client in _writing has numbers on record, or is about to: its stream must stay for their completions.
            if client not in self._writing:
                streams.close_passing(*client)

    def forget(self, sampling_session_id: str) -> None:
        """Forget the clients of a sampling session that has ended."""
        self._unnumbered.pop(sampling_session_id, None)
        for client in [client for client in self._covered if client[0] == sampling_session_id]:
            del self._covered[client]
            self._writing.pop(client, None)

    def _numbers_to_cover(self, client: _Client, seq_id: int, lowest: int) -> range:
        """Return the numbers to put on record for a client that uses ``seq_id``.

        The range ends with the block of the highest number used so far. It begins one block before that, or at
        ``lowest``, the lowest number that the client may wait for, if that is earlier. It never has more than
        ``_MOST`` numbers, so a ``seq_id`` far below the highest is left out, and never leaves the client's own.
        """
        own = range(client[1] * SEQ_IDS_PER_CLIENT, (client[1] + 1) * SEQ_IDS_PER_CLIENT)
        highest = max(seq_id, self._covered.get(client, range(0)).stop - 1)
        stop = min((highest // _BLOCK + 1) * _BLOCK, own.stop)
        return range(max(min(lowest, stop - 2 * _BLOCK), stop - _MOST, own.start), stop)

    async def _report_lost(self, sampling: SamplerService, client: _Client) -> None:
        """Report the samples that were lost in a restart, once for each client, before its stream has other entries."""
        if sampling.completions is None or sampling.completions.has_stream(*client):
            return
        numbers = await self._records.numbers_in_use(*client)
        if not sampling.completions.has_stream(*client):
            sampling.completions.open_stream(*client, time.time(), passing=not numbers)
            for start in range(0, len(numbers), _BLOCK):
                sampling.report_lost(client[0], numbers[start : start + _BLOCK])
                await asyncio.sleep(0)  # let the event loop serve other requests
