"""vLLM's asynchronous engine on a thread of its own, for use from one other thread.

vLLM computes in further processes. They ignore Ctrl-C, which a terminal sends to all processes of a server, because the
server ends them itself when it has shut down. If they die, all active requests fail.
"""

import asyncio
import signal
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import count
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

import numpy as np
from vllm import AsyncEngineArgs, SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.lora.request import LoRARequest
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from twinkle.errors import TwinkleServerError
from twinkle.model.types import FloatArray, IntArray
from twinkle.sampler.types import TopLogprobs
from twinkle.sampler.vllm.prompts import Prompt

T = TypeVar("T")

_LOOK_SECONDS = 0.5  # how often a waiting call checks that the engine is alive
_CLOSE_SECONDS = 30.0


@dataclass(frozen=True)
class NewTokens:
    """New tokens of a generation. ``finish``: vLLM's finish reason, set on the last piece.

    ``logprobs``: NaN where the model's logits were not finite. ``tops``: for each token, the likeliest tokens with
    their log-probabilities, likeliest first, if the generation reports any.
    """

    number: int
    tokens: IntArray
    logprobs: FloatArray
    tops: TopLogprobs | None
    finish: str | None
    cached_prompt_tokens: int

    def first(self, count: int) -> "NewTokens":
        """Return the piece with its first ``count`` tokens only."""
        if count == len(self.tokens):
            return self
        tops = self.tops and TopLogprobs(self.tops.token_ids[:count], self.tops.logprobs[:count])
        return replace(self, tokens=self.tokens[:count], logprobs=self.logprobs[:count], tops=tops)


@dataclass(frozen=True)
class Failed:
    """The failure of a generation; :class:`Ended` still follows."""

    number: int
    error: TwinkleServerError


@dataclass(frozen=True)
class Ended:
    """The end of a generation, however it ended: vLLM no longer uses its adapter's files."""

    number: int


Arrival = NewTokens | Failed | Ended


class Engine:
    """Starts generations, each under a number, and collects their tokens for :meth:`take`."""

    def __init__(self, args: AsyncEngineArgs) -> None:
        """Start the engine's processes and wait until they are ready."""
        self._arrived: SimpleQueue[Arrival] = SimpleQueue()
        self._numbers = count(1)
        self._loop = asyncio.new_event_loop()
        self._ending = asyncio.Event()
        self._tasks: dict[int, asyncio.Task[None]] = {}  # only used on the loop's thread
        ready: Future[AsyncLLM] = Future()
        self._thread = Thread(target=self._run, args=(args, ready), name="vllm", daemon=True)
        self._thread.start()
        try:
            self._llm = ready.result()
        except Exception as error:  # vLLM raises many types; callers get this one
            raise TwinkleServerError(f"vLLM did not start, its own messages say why: {error}") from error

    @property
    def max_model_len(self) -> int:
        return int(self._llm.model_config.max_model_len)

    @property
    def cache_tokens(self) -> int:
        cache = self._llm.vllm_config.cache_config
        return int(cache.num_gpu_blocks or 0) * int(cache.block_size)

    @property
    def max_images(self) -> int:
        """Return how many images a prompt may have; 0 for a model that reads text only."""
        limits = self._llm.model_config.multimodal_config
        return 0 if limits is None else int(limits.get_limit_per_prompt("image"))

    @property
    def dead(self) -> bool:
        return bool(self._llm.errored) or not self._thread.is_alive()

    # --- called from the sampler's thread -----------------------------------------------------------------------------

    def begin(self, prompt: Prompt, params: SamplingParams, lora: LoRARequest | None) -> int:
        """Start a generation and return the number of its arrivals. Cached prompts are shared only within a scope."""
        number = next(self._numbers)
        self._loop.call_soon_threadsafe(self._start, number, prompt, params, lora)
        return number

    def cancel(self, number: int) -> None:
        """Cancel a generation. Pieces that are already on their way and one :class:`Ended` still arrive."""
        self._loop.call_soon_threadsafe(self._stop, number)

    def take(self, timeout: float) -> list[Arrival]:
        """Return everything that has arrived. If nothing has, wait up to ``timeout`` seconds for the first arrival."""
        taken: list[Arrival] = []
        try:
            taken.append(self._arrived.get(timeout=timeout) if timeout > 0 else self._arrived.get_nowait())
            while True:
                taken.append(self._arrived.get_nowait())
        except Empty:
            return taken

    def generate(self, prompt: Prompt, params: SamplingParams, lora: LoRARequest | None) -> NewTokens:
        """Generate and wait for the end. ``params`` must ask for one final output, not for pieces."""
        number = next(self._numbers)
        return self._call(lambda: self._all_of(number, prompt, params, lora))

    def add_lora(self, lora: LoRARequest) -> None:
        self._call(lambda: self._llm.add_lora(lora))

    def remove_lora(self, lora_id: int) -> None:
        """Ask the engine to unload an adapter, without waiting for it."""
        if not self.dead:
            asyncio.run_coroutine_threadsafe(self._llm.remove_lora(lora_id), self._loop)

    def call_workers(self, method: str, *args: object) -> None:
        """Call a method of :class:`~twinkle.sampler.vllm.worker.BaseWeightsWorker` in every worker, and wait."""
        self._call(lambda: self._llm.collective_rpc(method, args=args))

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. Return False, and change nothing, if requests still use it."""
        return bool(self._call(lambda: self._llm.reset_prefix_cache()))

    def reset_mm_cache(self) -> None:
        """Drop preprocessed images."""
        self._call(lambda: self._llm.reset_mm_cache())

    def reset_encoder_cache(self) -> None:
        """Drop outputs of the image encoder."""
        self._call(lambda: self._llm.reset_encoder_cache())

    def sleep(self, level: int) -> None:
        """Free the cache's memory, and move the weights to host memory (level 1) or discard them (level 2)."""
        self._call(lambda: self._llm.sleep(level))

    def wake_up(self, tags: Sequence[str]) -> None:
        self._call(lambda: self._llm.wake_up(list(tags)))

    def close(self) -> None:
        """End the engine's processes. For generations that were active nothing more arrives."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ending.set)
            self._thread.join(_CLOSE_SECONDS)

    def _call(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        if self.dead:
            raise _died()
        future = asyncio.run_coroutine_threadsafe(make(), self._loop)
        while True:
            try:
                return future.result(_LOOK_SECONDS)
            except Exception as error:
                if future.done() or self.dead:
                    future.cancel()
                    raise _died() if self.dead else TwinkleServerError(f"vLLM failed: {error}") from error

    # --- on the loop's thread -----------------------------------------------------------------------------------------

    def _run(self, args: AsyncEngineArgs, ready: "Future[AsyncLLM]") -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited by the processes started from here
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve(args, ready))

    async def _serve(self, args: AsyncEngineArgs, ready: "Future[AsyncLLM]") -> None:
        try:
            # This context selects vLLM's defaults for throughput, that is, how many sequences and tokens a step has at
            # most. In the context of an engine alone they would be 128 sequences and 2048 tokens on any device.
            llm = AsyncLLM.from_engine_args(args, usage_context=UsageContext.LLM_CLASS)
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits for it
            ready.set_exception(error)
            return
        try:
            ready.set_result(llm)
            await self._ending.wait()
        finally:
            llm.shutdown()

    def _start(self, number: int, prompt: Prompt, params: SamplingParams, lora: LoRARequest | None) -> None:
        task = self._loop.create_task(self._follow(number, prompt, params, lora))
        self._tasks[number] = task
        task.add_done_callback(lambda _: self._end(number))  # also runs for a task that was cancelled before it began

    def _stop(self, number: int) -> None:
        task = self._tasks.get(number)
        if task is not None:
            task.cancel()  # vLLM aborts the request then

    def _end(self, number: int) -> None:
        del self._tasks[number]
        self._arrived.put(Ended(number))

    async def _follow(self, number: int, prompt: Prompt, params: SamplingParams, lora: LoRARequest | None) -> None:
        try:
            async for output in self._llm.generate(prompt.for_vllm(), params, str(number), lora_request=lora):
                _check_length(output, prompt)
                self._arrived.put(_piece(number, output, params.logprobs))
        except Exception as error:  # noqa: BLE001 - any error fails only its own request
            broken = _died() if self.dead else TwinkleServerError(f"vLLM failed: {error}")
            self._arrived.put(Failed(number, broken))

    async def _all_of(self, number: int, prompt: Prompt, params: SamplingParams, lora: LoRARequest | None) -> NewTokens:
        outputs = [out async for out in self._llm.generate(prompt.for_vllm(), params, str(number), lora_request=lora)]
        _check_length(outputs[-1], prompt)
        return _piece(number, outputs[-1], params.logprobs)


def _check_length(output: Any, prompt: Prompt) -> None:
    """Raise if vLLM makes more or fewer tokens of a prompt's images than the model's image processor does."""
    if prompt.images and len(output.prompt_token_ids) != len(prompt.tokens):
        raise ValueError(
            f"the prompt has {len(prompt.tokens)} tokens, and vLLM made {len(output.prompt_token_ids)} of it: "
            "engine_args.mm_processor_kwargs must not change the size of images"
        )


def _piece(number: int, output: Any, top: int) -> NewTokens:
    completion = output.outputs[0]
    reported: FlatLogprobs = completion.logprobs
    tokens = np.array(completion.token_ids, np.int64)
    assert len(tokens) == len(reported.start_indices), "vLLM reports log-probabilities for every position"
    # The first entry of each position is the drawn token.
    logprobs = np.array([reported.logprobs[start] for start in reported.start_indices], np.float32)
    tops = _tops(reported, top) if top else None
    return NewTokens(number, tokens, logprobs, tops, completion.finish_reason, output.num_cached_tokens or 0)


def _tops(reported: FlatLogprobs, top: int) -> TopLogprobs:
    """Return the likeliest tokens of each position.

    Where vLLM joins pieces that arrived before they were fetched, a drawn token that is among the likeliest ones is
    reported once, first; elsewhere it is reported twice.
    """
    ids = np.zeros((len(reported.start_indices), top), np.int64)
    logprobs = np.full(ids.shape, -np.inf, np.float32)
    for place, (start, end) in enumerate(zip(reported.start_indices, reported.end_indices, strict=True)):
        entries = dict(zip(reported.token_ids[start:end], reported.logprobs[start:end], strict=True))
        likeliest = sorted(entries.items(), key=lambda entry: -entry[1])[:top]
        ids[place] = [token for token, _ in likeliest]
        logprobs[place] = [value for _, value in likeliest]
    return TopLogprobs(ids, logprobs)


def _died() -> TwinkleServerError:
    return TwinkleServerError("the vLLM engine has died, its own messages say why; restart the server to sample again")
