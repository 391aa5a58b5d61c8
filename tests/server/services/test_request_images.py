"""Images of requests are placed and decoded in a pool of threads, within the limits of their tenant."""

import asyncio
import math
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.server.backends.test_image_reader import PAD, PROCESSING, VISION, WIDE, Knows
from tests.support.servers.model_services import model_service
from twinkle.errors import InvalidInputError, LimitExceededError, ShuttingDownError
from twinkle.images import EncodedImage, ResizedImage, SentImage, SentImages
from twinkle.model.types import Datum, LoraSpec
from twinkle.sampler.types import SampleRequest, SamplingParams
from twinkle.server import ids
from twinkle.server.backends.compute_thread import Compute
from twinkle.server.backends.image_reader import ImageReader
from twinkle.server.backends.mock import mock_model
from twinkle.server.config.sections import LimitsConfig
from twinkle.server.services.images import RequestImages
from twinkle.server.state.store import Store
from twinkle.server.tenancy.work_pools import FairPool
from twinkle.server.types import (
    NUMBERED_HERE,
    CreateAdapter,
    Ending,
    Op,
    OpKind,
    Outcome,
    Refused,
    RunRecord,
    SessionRecord,
    TrainPass,
)

TOKENS = 3  # of WIDE
DATUM = Datum(np.array([1, 2]), np.zeros(2 + TOKENS, np.int64))


class Counting(Knows):
    """A trainer that notes in which threads it is asked about images."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[str] = []

    def wants_pixels(self, image: Any) -> bool:
        self.threads.append(threading.current_thread().name)
        return True


def sent(file: EncodedImage = WIDE, index: int = 0) -> SentImages:
    return SentImages((SentImage(1, file, None, f"data[{index}].model_input[1]"),))


def op_of(*images: SentImages) -> Op:
    data = tuple(DATUM for _ in images)
    return Op("m", 1, OpKind.FORWARD, TrainPass(data, "cross_entropy", {}, images=images), b"as it came")


def read(op: Op, limits: LimitsConfig | None = None, trainer: Knows | None = None, *, sees: bool = True) -> Op:
    """Place and decode the images of an op."""

    async def both() -> Op:
        reader = ImageReader("model", VISION, PROCESSING, trainer or Knows()) if sees else None
        model: Any = SimpleNamespace(name="model", images=reader)
        images = RequestImages(model, FairPool("images", threads=2, at_once=1))
        placed = await images.place(op, "tenant", limits)
        assert isinstance(placed.payload, Refused) or placed.price.tokens == 5 * len(placed.payload.data)  # type: ignore[union-attr]
        return await images.decode(placed, "tenant", limits)

    return asyncio.run(both())


def test_an_image_of_several_sequences_is_decoded_once() -> None:
    trainer = Counting()
    done = read(op_of(sent(), sent(index=1)), LimitsConfig(), trainer)
    assert isinstance(done.payload, TrainPass)
    assert (done.body, done.payload.images, done.payload.pixels) == (b"as it came", (), 2 * 32 * 96)
    first, second = (datum.images[0] for datum in done.payload.data)
    assert isinstance(first.pixels, ResizedImage)
    assert first.pixels is second.pixels
    assert done.payload.data[0].tokens.tolist() == [1, *[PAD] * TOKENS, 2]
    assert all(name.startswith("images") for name in trainer.threads)


def test_an_image_whose_features_were_dropped_is_decoded_in_the_pool() -> None:
    """It was known when its op was accepted, so it is a file still; the op is about to run."""

    class Forgets(Counting):
        def wants_pixels(self, image: Any) -> bool:
            return super().wants_pixels(image) and self.forgot

        forgot = False

    async def later() -> tuple[Op, Op, Op]:
        reader = ImageReader("model", VISION, PROCESSING, trainer)
        images = RequestImages(SimpleNamespace(name="model", images=reader), FairPool("images", threads=2, at_once=1))  # type: ignore[arg-type]
        op = op_of(sent(), sent(index=1))
        accepted = await images.decode(await images.place(op, "tenant", None), "tenant", None)
        known = await images.decode_lost(accepted, "tenant")
        trainer.forgot = True
        return accepted, known, await images.decode_lost(accepted, "tenant")

    trainer = Forgets()
    accepted, known, lost = asyncio.run(later())
    assert known is accepted
    for op, pixels in ((accepted, EncodedImage), (lost, ResizedImage)):
        assert isinstance(op.payload, TrainPass)
        first, second = (datum.images[0].pixels for datum in op.payload.data)
        assert isinstance(first, pixels)
        assert first is second, "one file is decoded once"
    assert lost.digest == accepted.digest
    assert trainer.threads[-1].startswith("images")


async def sent_again(root: Path) -> tuple[list[str], list[Outcome]]:
    """Run a pass with an image, send it again, and send another one with its number.

    Return what was done with images, and the outcomes of all three.
    """
    store, compute, now = await Store.open(root), Compute(), time.time()
    model = replace(mock_model(), images=ImageReader("mock", VISION, PROCESSING, Knows()))
    service = model_service(model, store, compute, root)
    done: list[str] = []

    class Noted(RequestImages):
        async def place(self, *args: Any) -> Op:
            done.append("place")
            return await super().place(*args)

        async def decode(self, *args: Any) -> Op:
            done.append("decode")
            return await super().decode(*args)

    service._images = Noted(model, FairPool("images", threads=2, at_once=1))
    await service.start()
    try:
        await store.sessions.create(SessionRecord("s-1", "tenant", now, now))
        spec = LoraSpec(8, seed=1)
        run = RunRecord(ids.run_id("s-1", 0), "s-1", 0, "tenant", "mock", "mock", spec, now, now)
        created = await service.create(run, Op(run.run_id, 0, OpKind.CREATE, CreateAdapter(spec), b"create"))
        assert await service.wait(ids.RequestId.parse(created), run, 30) is not None
        first = replace(op_of(sent()), adapter_id=run.run_id)
        outcomes = []
        for op in (first, first, replace(first, body=b"another one")):
            outcome = await service.wait(ids.RequestId.parse(await service.submit(op)), run, 30)
            assert outcome is not None
            outcomes.append(outcome)
        await service.stop()
        return done, outcomes
    finally:
        compute.close()
        await store.close()


def test_the_images_of_a_pass_that_is_sent_again_are_not_read_again(tmp_path: Path) -> None:
    """The mock fails such a pass, because it sees nothing; what counts is that it ran once."""
    done, (first, again, other) = asyncio.run(sent_again(tmp_path))
    assert done == ["place", "decode"]
    assert (first.ending, again) == (Ending.RAN, first)
    assert b"with another request" in other.body


async def in_one_batch(root: Path, error: Exception | None) -> list[Outcome | None]:
    """Run passes of two tenants in one batch, where decoding the lost images of the second one raises ``error``.

    None: it takes until the first one has its outcome. Return the outcomes; None: the op has not ended.
    """
    store, compute, now = await Store.open(root), Compute(), time.time()
    model = replace(mock_model(), images=ImageReader("mock", VISION, PROCESSING, Knows()))
    service = model_service(model, store, compute, root)
    runner, held, others_ended = service._runner, False, asyncio.Event()

    class Failing(RequestImages):
        def lacks_pixels(self, op: Op) -> bool:
            return op.kind.is_pass and op.adapter_id == ids.run_id("s-second", 0)

        async def decode_lost(self, op: Op, tenant_id: str) -> Op:
            if tenant_id == "second" and op.kind.is_pass:
                if error is not None:
                    raise error
                await others_ended.wait()
            return op

    runner._images = Failing(model, FairPool("images", threads=2, at_once=1))
    runner._held_until = lambda: math.inf if held else None  # type: ignore[method-assign]
    await service.start()
    try:
        runs, requests, spec = [], [], LoraSpec(8, seed=1)
        for tenant in ("first", "second"):
            await store.sessions.create(SessionRecord(f"s-{tenant}", tenant, now, now))
            run = RunRecord(ids.run_id(f"s-{tenant}", 0), f"s-{tenant}", 0, tenant, "mock", "mock", spec, now, now)
            created = await service.create(run, Op(run.run_id, 0, OpKind.CREATE, CreateAdapter(spec), b"create"))
            assert await service.wait(ids.RequestId.parse(created), run, 30) is not None
            runs.append(run)
        held = True
        data = (Datum(np.array([1, 2]), np.zeros(2, np.int64)),)
        for run in runs:
            op = Op(run.run_id, 1, OpKind.FORWARD, TrainPass(data, "cross_entropy", {}), b"a pass")
            requests.append(ids.RequestId.parse(await service.submit(op)))
        held = False
        runner._wake.set()
        first = await service.wait(requests[0], runs[0], 10)
        others_ended.set()
        second = await service.wait(requests[1], runs[1], 0 if isinstance(error, ShuttingDownError) else 10)
        await service.stop()
        return [first, second]
    finally:
        compute.close()
        await store.close()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("a bug"), b"internal error"),
        (InvalidInputError("images", "a file", "a whole image"), b"a whole image"),
        (ShuttingDownError(), None),
    ],
    ids=["a bug", "a damaged image", "a shutdown"],
)
def test_lost_images_that_cannot_be_decoded_fail_their_own_op(
    tmp_path: Path, error: Exception, said: bytes | None
) -> None:
    """At a shutdown not even that: the op stays in the journal, and the next process runs it."""
    first, second = asyncio.run(in_one_batch(tmp_path, error))
    assert first is not None
    assert not first.failed, first.body
    assert second is None if said is None else second is not None and second.failed and said in second.body


def test_nobody_waits_for_the_lost_images_of_another_tenant(tmp_path: Path) -> None:
    """They may wait long for their turn in the pool of threads, behind other images of their tenant."""
    first, second = asyncio.run(in_one_batch(tmp_path, None))
    assert first is not None
    assert second is not None
    assert not first.failed, first.body
    assert not second.failed, second.body


def test_the_digest_of_the_request_stays() -> None:
    op = op_of(sent())
    assert read(op).digest == op.digest
    assert read(replace(op, sent_digest=NUMBERED_HERE)).digest == NUMBERED_HERE


def test_text_does_not_wait_for_images() -> None:
    op = Op("m", 1, OpKind.FORWARD, TrainPass((DATUM,), "cross_entropy", {}), b"")
    assert not op.waits_for_images
    assert not Op("m", 1, OpKind.FORWARD, Refused("no"), b"").waits_for_images


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (
            {"max_pixels_per_request": 4000},
            r"data[1].model_input[1]: got 'images of 6144 pixels up to here', allowed: at most 4000",
        ),
        ({"max_tokens_per_request": 8}, "data[1].model_input[1]: got 'an image of 3 tokens', allowed: 1 tokens"),
        ({"max_image_pixels": 3000}, "data[0].model_input[1].data: got '96 × 32 pixels', allowed: at most 3000 pixels"),
        ({"max_image_bytes": 50}, "data[0].model_input[1].data"),
    ],
)
def test_limits_of_the_tenant(limits: dict[str, int], said: str) -> None:
    """A replay has no limits: what was accepted once must not be refused then."""
    op = op_of(sent(), sent(index=1))
    refused = read(op, LimitsConfig(**limits)).payload
    assert isinstance(refused, Refused)
    assert said in refused.message
    assert isinstance(read(op).payload, TrainPass)


def test_damaged_images_and_models_that_read_text() -> None:
    damaged = read(op_of(sent(), sent(EncodedImage(WIDE.data[:-40], "png"), 1))).payload
    assert isinstance(damaged, Refused)
    assert "data[1].model_input[1].data" in damaged.message
    text = read(op_of(sent()), sees=False).payload
    assert isinstance(text, Refused)
    assert (
        "data[0].model_input[1]: got 'an image', allowed: text: model, as it is served here, reads text only"
        in text.message
    )


def test_prompts() -> None:
    """Their images are decoded even if their features are known: these may be dropped while a prompt waits."""

    class KnowsAll(Knows):
        def wants_pixels(self, image: Any) -> bool:
            return False

    async def both(count: int = 1, sees: bool = True, **limits: int) -> tuple[list[SampleRequest], list[int]]:
        reader = ImageReader("model", VISION, PROCESSING, KnowsAll()) if sees else None
        model: Any = SimpleNamespace(name="model", images=reader)
        images = RequestImages(model, FairPool("images", threads=1, at_once=1))
        prompts = [SampleRequest("r", None, np.array([1, 2]), SamplingParams())] * (count + 1)
        given = [*(sent(index=index) for index in range(count)), SentImages()]
        placed, pixels = await images.place_in_prompts(prompts, given, "t", LimitsConfig(**limits))
        return await images.decode_prompts(placed, given, "t", LimitsConfig(**limits)), pixels

    (first, second, text), pixels = asyncio.run(both(2))
    for request in (first, second):
        assert request.prompt.tolist() == [1, *[PAD] * TOKENS, 2]
        assert isinstance(request.images[0].pixels, ResizedImage)
    assert first.images[0].pixels is second.images[0].pixels, "one file is decoded once"
    assert (text.prompt.tolist(), text.images, pixels) == ([1, 2], (), [32 * 96, 32 * 96, 0])
    with pytest.raises(InvalidInputError, match="reads text only"):
        asyncio.run(both(sees=False))
    # The limits are those of a request, so of all its prompts together.
    for limits, said in (
        ({"max_pixels_per_request": 32 * 96}, r"data\[1\].*images of 6144 pixels"),
        ({"max_tokens_per_request": 3 * 2 + TOKENS}, r"data\[1\].*an image of 3 tokens"),
    ):
        asyncio.run(both(1, **limits))
        with pytest.raises(LimitExceededError, match=said):
            asyncio.run(both(2, **limits))
