"""A sampling engine whose results depend only on its requests. It has its own module because workers import it."""

import os
import signal

import numpy as np

from twinkle.errors import CheckpointError
from twinkle.sampler.types import Finished, Progress, SampledSequence, SampleResult
from twinkle.server.runtime.ray.replica import Failure

DEADLY = 666  # first token of a prompt that kills any engine


class ScriptedEngine:
    """Draws one token for each request at each step: seed plus position.

    A version's directory can be read only once.
    """

    def __init__(self, read):
        self._read = read  # a file that lists the directories that were read
        self._versions = {}
        self._requests = {}

    def receive_version(self, version_id, weights):
        self._versions[version_id] = weights.arrays["a"]

    def load_version(self, version_id, directory):
        if directory in self._read.read_text().split():
            return Failure(CheckpointError(f"{directory} is gone"))
        self._read.write_text(self._read.read_text() + f"{directory}\n")
        self._versions[version_id] = np.zeros(1)
        return None

    def retire(self, version_id):
        self._versions.pop(version_id, None)

    def submit(self, request):
        if request.version_id is not None and request.version_id not in self._versions:
            return Failure(CheckpointError(f"no version {request.version_id}"))
        self._requests[request.request_id] = (request, [])
        return None

    def cancel(self, request_id):
        self._requests.pop(request_id, None)

    def step(self):
        events = []
        for request, tokens in list(self._requests.values()):
            if request.prompt[0] == DEADLY:
                os.kill(os.getpid(), signal.SIGKILL)
            tokens.append(request.params.seed + len(tokens))
            done = len(tokens) == request.params.max_tokens
            new = np.array(tokens[-1:])
            if request.stream:
                events.append(Progress(request.request_id, 0, new, new / 2, stop_reason="length" if done else None))
            if done:
                drawn = np.array(tokens)
                events.append(Finished(request.request_id, SampleResult([SampledSequence(drawn, drawn / 2, "length")])))
                del self._requests[request.request_id]
        return events

    def versions(self):
        return sorted(self._versions)

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)
