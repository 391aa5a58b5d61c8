"""vLLM's asynchronous engine on a thread of its own, for use from one other thread.

The engine computes in further processes. They ignore Ctrl-C, which a terminal sends to all processes of a server: the
server ends them when it is done. When they die, whatever is under way fails.
"""

import asyncio
import signal
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from vllm import AsyncEngineArgs, SamplingParams, TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM

from twinkle.errors import TwinkleServerError

T = TypeVar("T")

_LOOK_SECONDS = 0.5  # how often somebody who waits looks whether the engine lives
_CLOSE_SECONDS = 30.0


@dataclass(frozen=True)
class Reported:
    """One token as vLLM reports it: log-probabilities by token id, infinite ones left out."""

    token: int
    logprobs: dict[int, float]


@dataclass(frozen=True)
class Piece:
    """New tokens of a generation. ``finish``: vLLM's reason, with the last of them."""

    number: int
    tokens: tuple[Reported, ...]
    finish: str | None
    cached_prompt_tokens: int


@dataclass(frozen=True)
class Broken:
    """A generation that came to nothing."""

    number: int
    error: TwinkleServerError


@dataclass(frozen=True)
class Ended:
    """vLLM has nothing more to do with a generation, in whatever way it ended."""

    number: int


Arrival = Piece | Broken | Ended


class Engine:
    """Numbers what it generates; tokens are collected with :meth:`take`."""

    def __init__(self, args: AsyncEngineArgs) -> None:
        """Starts the engine's processes and waits until they are ready."""
        self._arrived: SimpleQueue[Arrival] = SimpleQueue()
        self._numbers = count(1)
        self._loop = asyncio.new_event_loop()
        self._ending = asyncio.Event()
        self._tasks: dict[int, asyncio.Task[None]] = {}  # of the loop's thread
        ready: Future[AsyncLLM] = Future()
        self._thread = Thread(target=self._run, args=(args, ready), name="vllm", daemon=True)
        self._thread.start()
        try:
            self._llm = ready.result()
        except Exception as error:  # vLLM raises what it likes, and this is our error for all of it
            raise TwinkleServerError(f"vLLM did not start, its own messages say why: {error}") from error

    @property
    def max_model_len(self) -> int:
        return int(self._llm.model_config.max_model_len)

    @property
    def cache_tokens(self) -> int:
        cache = self._llm.vllm_config.cache_config
        return int(cache.num_gpu_blocks or 0) * int(cache.block_size)

    @property
    def dead(self) -> bool:
        return bool(self._llm.errored) or not self._thread.is_alive()

    # --- from the other thread ----------------------------------------------------------------------------------------

    def begin(self, prompt: Sequence[int], params: SamplingParams, lora: LoRARequest | None, scope: str) -> int:
        """Generate; returns the number under which tokens arrive. Other scopes share nothing of the prompt."""
        number = next(self._numbers)
        self._loop.call_soon_threadsafe(self._start, number, _prompt(prompt, scope), params, lora)
        return number

    def cancel(self, number: int) -> None:
        """Nothing arrives any more, except what is on its way and the word that it has ended."""
        self._loop.call_soon_threadsafe(self._stop, number)

    def take(self, timeout: float) -> list[Arrival]:
        """All that has arrived; waits for the first of it."""
        taken: list[Arrival] = []
        try:
            taken.append(self._arrived.get(timeout=timeout) if timeout > 0 else self._arrived.get_nowait())
            while True:
                taken.append(self._arrived.get_nowait())
        except Empty:
            return taken

    def generate(self, prompt: Sequence[int], params: SamplingParams, lora: LoRARequest | None) -> Piece:
        """Generate and wait for the end; ``params`` ask for everything at once."""
        number = next(self._numbers)
        return self._call(lambda: self._all_of(number, _prompt(prompt, ""), params, lora))

    def add_lora(self, lora: LoRARequest) -> None:
        self._call(lambda: self._llm.add_lora(lora))

    def remove_lora(self, lora_id: int) -> None:
        """Whenever it suits the engine."""
        if not self.dead:
            asyncio.run_coroutine_threadsafe(self._llm.remove_lora(lora_id), self._loop)

    def reset_prefix_cache(self) -> None:
        self._call(lambda: self._llm.reset_prefix_cache())

    def close(self) -> None:
        """End the engine's processes. What was under way never arrives."""
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

    # --- in the loop's thread -----------------------------------------------------------------------------------------

    def _run(self, args: AsyncEngineArgs, ready: "Future[AsyncLLM]") -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # processes that are started from here inherit it
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve(args, ready))

    async def _serve(self, args: AsyncEngineArgs, ready: "Future[AsyncLLM]") -> None:
        try:
            llm = AsyncLLM.from_engine_args(args)
        except BaseException as error:  # noqa: BLE001 - it is raised again where it is waited for
            ready.set_exception(error)
            return
        try:
            ready.set_result(llm)
            await self._ending.wait()
        finally:
            llm.shutdown()

    def _start(self, number: int, prompt: TokensPrompt, params: SamplingParams, lora: LoRARequest | None) -> None:
        task = self._loop.create_task(self._follow(number, prompt, params, lora))
        self._tasks[number] = task
        task.add_done_callback(lambda _: self._end(number))  # also of one that was cancelled before it began

    def _stop(self, number: int) -> None:
        task = self._tasks.get(number)
        if task is not None:
            task.cancel()  # vLLM aborts the request then

    def _end(self, number: int) -> None:
        del self._tasks[number]
        self._arrived.put(Ended(number))

    async def _follow(
        self, number: int, prompt: TokensPrompt, params: SamplingParams, lora: LoRARequest | None
    ) -> None:
        try:
            async for output in self._llm.generate(prompt, params, str(number), lora_request=lora):
                self._arrived.put(_piece(number, output))
        except Exception as error:  # noqa: BLE001 - it fails its own request alone, whatever it is
            broken = _died() if self.dead else TwinkleServerError(f"vLLM failed: {error}")
            self._arrived.put(Broken(number, broken))

    async def _all_of(
        self, number: int, prompt: TokensPrompt, params: SamplingParams, lora: LoRARequest | None
    ) -> Piece:
        outputs = [out async for out in self._llm.generate(prompt, params, str(number), lora_request=lora)]
        return _piece(number, outputs[-1])


def _prompt(tokens: Sequence[int], scope: str) -> TokensPrompt:
    prompt = TokensPrompt(prompt_token_ids=list(tokens))
    return TokensPrompt(**prompt, cache_salt=scope) if scope else prompt  # an empty salt is refused


def _piece(number: int, output: Any) -> Piece:
    completion = output.outputs[0]
    tokens = tuple(
        Reported(token, {other: entry.logprob for other, entry in entries.items() if entry.logprob > -float("inf")})
        for token, entries in zip(completion.token_ids, completion.logprobs or (), strict=True)
    )
    return Piece(number, tokens, completion.finish_reason, output.num_cached_tokens or 0)


def _died() -> TwinkleServerError:
    return TwinkleServerError("the vLLM engine has died, its own messages say why; restart the server to sample again")
