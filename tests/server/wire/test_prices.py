"""The price of an op is known from its shapes, before anything is expanded; limits and shares use it."""

import json
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np

from tests.support.servers.exposition import scrape, value
from tests.support.servers.running import Server, Tenant, datum, tensor
from tests.support.servers.scheduled_ops import op_of
from twinkle.images import EncodedImage, ResizedImage
from twinkle.model.csr import Csr
from twinkle.model.types import Datum, Image
from twinkle.sampler.types import SampleRequest, SamplingParams
from twinkle.server.scheduling.scheduler import Batch, Scheduler
from twinkle.server.services.sampling.jobs import price_of
from twinkle.server.types import CustomLossUse, NativePass, Op, OpKind, Price, Refused, TrainPass
from twinkle.server.wire import tinker_pb2 as pb
from twinkle.server.wire.training import Allowance, decode_forward_backward
from twinkle.server.wire.training_json import decode_json_pass

BACKWARD = OpKind.FORWARD_BACKWARD


def empty_sparse(rows: int, columns: int) -> pb.Tensor:
    """Return a sparse tensor without values: a few bytes per row, whatever its columns."""
    csr = pb.SparseCsr(crow_indices=np.zeros(rows + 1, "<i8").tobytes())
    return pb.Tensor(sparse_csr=csr, dtype=pb.DTYPE_INT64, shape=[rows, columns])


def chunk(tokens: int) -> pb.Chunk:
    return pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=np.ones(tokens, "<i4").tobytes()))


def body(*data: pb.Datum, **fields: Any) -> bytes:
    return pb.ForwardBackwardRequest(
        model_id="s:train:0", seq_id=1, loss_fn="cross_entropy", data=data, **fields
    ).SerializeToString()


def wide(columns: int, tokens: int = 1) -> pb.Datum:
    inputs = {"target_tokens": empty_sparse(tokens, columns)}
    return pb.Datum(model_input=[chunk(tokens)], loss_fn_inputs=inputs)


def narrow(tokens: int) -> pb.Datum:
    return pb.Datum(model_input=[chunk(tokens)], loss_fn_inputs={"target_tokens": tensor(np.ones(tokens), "i8")})


def decoded(sent: bytes, **limits: int) -> Op:
    """Decode, and check that this takes almost no memory."""
    tracemalloc.start()
    op = decode_forward_backward(sent, Allowance(**limits))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 * len(sent) + 262_144, peak
    return op


# --- decoding ---------------------------------------------------------------------------------------------------------


def test_sparse_stays_sparse_and_its_price_is_what_it_takes() -> None:
    op = decoded(body(wide(2**23)))
    assert isinstance(op.payload, TrainPass)
    assert isinstance(op.payload.data[0].targets, Csr)
    price = op.price
    assert (price.tokens, price.work) == (1, 1 + (2**23 - 1) // 128)
    assert price.held_bytes < 10_000
    assert price.result_bytes >= 4 * 2**23


def test_a_width_beyond_the_limit_is_refused_by_name() -> None:
    for sent, shape in ((body(wide(2**22), narrow(299)), (1, 2**22)), (body(wide(1025)), (1, 1025))):
        op = decoded(sent, width=1024)
        assert op.payload == Refused(
            f"data[0].loss_fn_inputs['target_tokens'].shape: got {shape}, "
            "allowed: at most 1024 numbers a token (max_targets_per_token)",
            "max_targets_per_token",
        )
        assert op.price == Price(held_bytes=op.price.held_bytes)
    assert isinstance(decoded(body(wide(1024)), width=1024).payload, TrainPass)


def test_the_width_of_dense_tensors_and_of_json_is_limited_too() -> None:
    dense = pb.Datum(model_input=[chunk(1)], loss_fn_inputs={"target_tokens": tensor(np.ones(20), "i8", [1, 20])})
    op = decoded(body(dense), width=10)
    assert isinstance(op.payload, Refused)
    assert op.payload.limit == "max_targets_per_token"
    inputs = {"target_tokens": {"data": [1] * 20, "dtype": "int64", "shape": [1, 20]}}
    row = {"model_input": {"chunks": [{"type": "encoded_text", "tokens": [1]}]}, "loss_fn_inputs": inputs}
    asked = {"data": [row], "loss_fn": "cross_entropy"}
    sent = json.dumps({"model_id": "m", "seq_id": 1, "forward_backward_input": asked}).encode()
    refused = decode_json_pass(sent, BACKWARD, Allowance(width=10)).payload
    assert isinstance(refused, Refused)
    assert refused.limit == "max_targets_per_token"
    assert isinstance(decode_json_pass(sent, BACKWARD).payload, TrainPass)


def test_the_targets_of_a_whole_request_are_limited() -> None:
    op = decoded(body(wide(1000, 100), wide(1000, 100)), targets=150_000)
    assert isinstance(op.payload, Refused)
    assert "data[1].loss_fn_inputs['target_tokens']: got '100000 targets', allowed: 50000" in op.payload.message
    assert op.payload.limit == "max_targets_per_request"


def test_prices_of_plain_native_and_custom_passes() -> None:
    plain = decode_forward_backward(body(narrow(100)))
    assert (plain.price.tokens, plain.price.work) == (100, 100)
    assert plain.price.held_bytes > len(plain.body) + 100 * 16
    rows = tuple({"input_ids": np.arange(1000), "labels": np.arange(1000)} for _ in range(3))
    native = Op("m", 1, BACKWARD, NativePass("forward_backward", rows, {}, {}), b"x")
    assert (native.price.tokens, native.price.work) == (3000, 3000)
    assert native.price.held_bytes >= 6000 * 8
    assert isinstance(plain.payload, TrainPass)
    custom = CustomLossUse("l", ({},), work=2**30)
    heavy = Op("m", 1, BACKWARD, TrainPass(plain.payload.data, "custom", {}, custom), b"x")
    assert heavy.price.work == 100 + 33 + 2**15


def test_the_price_of_a_sample() -> None:
    prompt = np.arange(1000)
    plain = SampleRequest("r", None, prompt, SamplingParams(max_tokens=50), num_samples=4)
    price = price_of(plain, 4096)
    assert (price.tokens, price.work) == (1200, 1200)
    wide = replace(plain, topk_prompt_logprobs=128, topk_sample_logprobs=64)
    assert price_of(wide, 4096).work == 1200 + 1000 + 100
    assert price_of(wide, 4096).result_bytes > 12 * 128 * 1000
    endless = replace(plain, params=SamplingParams(max_tokens=2**31 - 1))
    assert price_of(endless, 4096).result_bytes == 8 * 4 * 3096, "no more than the context holds"


def test_images_cost_tokens_and_pixels() -> None:
    """A thumbnail costs a little more than its tokens. An image that is shrunk costs what decoding it takes."""
    image = Image(0, 4, 5, "digest", EncodedImage(bytes(1000), "png"))
    seen = Datum(np.zeros(30, np.int64), np.zeros(30, np.int64), images=(image,))
    small, shrunk = (
        Op("m", 1, BACKWARD, TrainPass((seen,), "cross_entropy", {}, pixels=pixels), b"").price
        for pixels in (20 * 1024, 2**25)
    )
    assert (small.tokens, small.work) == (30, 30 + 5)
    assert (shrunk.tokens, shrunk.work) == (30, 30 + 2**13)
    assert small.held_bytes >= 1000 + 3 * 20 * 32**2
    prompt = SampleRequest("r", None, np.arange(1000), SamplingParams(max_tokens=50), images=(image,))
    assert price_of(prompt, 4096, pixels=2**20).work == 1000 + 50 + 256
    assert price_of(prompt, 4096).held_bytes >= 1000 + 3 * 20 * 32**2


def test_images_take_the_memory_that_they_have_and_will_have() -> None:
    """A file is decoded once, for all sequences that have it. A decoded image is not decoded again."""
    pixels = 3 * 20 * 32**2
    first, second = (Image(0, 4, 5, "digest", EncodedImage(bytes(1000), "png")) for _ in range(2))
    resized = replace(first, pixels=ResizedImage(np.zeros((4 * 32, 5 * 32, 3), np.uint8)))
    patches = replace(first, pixels=np.zeros((80, 1536), np.float32))
    cases: list[tuple[tuple[Image, ...], int]] = [
        ((first,), 1000 + pixels),
        ((first, second), 2000 + pixels),
        ((first, replace(second, digest="another")), 2000 + 2 * pixels),
        ((resized,), pixels),
        ((resized, replace(resized, first=7)), pixels),
        ((patches,), 4 * 80 * 1536),
    ]
    for images, held in cases:
        plain = Datum(np.zeros(30, np.int64), np.zeros(30, np.int64))
        data = tuple(replace(plain, images=(image,)) for image in images)
        seen, text = (TrainPass(each, "cross_entropy", {}).price for each in (data, (plain,) * len(images)))
        assert seen.held_bytes - text.held_bytes == held
        prompt = SampleRequest("r", None, np.arange(1000), SamplingParams(max_tokens=50))
        assert price_of(replace(prompt, images=images), 4096).held_bytes - price_of(prompt, 4096).held_bytes == held


# --- limits -----------------------------------------------------------------------------------------------------------


def test_refusals_by_a_limit_of_a_request_are_counted(server: Server, tenant: Tenant) -> None:
    model = tenant.model()
    sent = datum((1, 2))
    sent.loss_fn_inputs["target_tokens"].CopyFrom(empty_sparse(1, 2**22))

    def counted() -> float:
        return value(scrape(server.url), "twinkle_refusals_total", limit="max_targets_per_token")

    before = counted()
    assert "max_targets_per_token" in tenant.error(tenant.forward_backward(model, 1, [sent]))
    assert counted() == before + 1
    tenant.result(tenant.forward_backward(model, 2))  # the sequence continues


# --- the scheduler ----------------------------------------------------------------------------------------------------


def ticket(adapter: str, seq: int, tokens: int = 128, work: int = 0) -> Op:
    return op_of(adapter, seq, BACKWARD, tokens, b"", work)


def adapters_in(batch: Batch | None) -> list[str]:
    assert batch is not None
    return [each.adapter_id for each in batch.ops]


def test_work_counts_in_batches_and_in_shares() -> None:
    """Eight requests of one token have expensive losses: a neighbour's op does not wait for all of them."""
    scheduler = Scheduler(4096, contended_tokens=0)
    scheduler.add_adapter("greedy", "greedy")
    scheduler.add_adapter("honest", "honest")
    for seq in range(8):
        scheduler.submit(ticket("greedy", seq, tokens=1, work=30_000), 0.0)
    first = scheduler.next_batch()
    assert adapters_in(first) == ["greedy"], "one such op is more than a batch"
    scheduler.submit(ticket("honest", 0), 0.0)
    assert first is not None
    for each in first.ops:
        scheduler.finish(each, failed=False)
    turns: list[str] = []
    for _ in range(19):
        batch = scheduler.next_batch()
        assert batch is not None
        turns += adapters_in(batch)
        for each in batch.ops:
            scheduler.finish(each, failed=False)
            if each.adapter_id == "honest":
                scheduler.submit(ticket("honest", each.seq + 1), 0.0)
    # 30 000 tokens of work are worth many honest steps; max_skips gives the greedy tenant a turn now and then.
    assert turns[0] == "honest"
    assert turns.count("greedy") <= 3


def test_numbers_count_tokens_and_not_work() -> None:
    scheduler = Scheduler(4096)
    scheduler.add_adapter("a", "a")
    scheduler.submit(ticket("a", 0, tokens=3, work=500), 0.0)
    scheduler.next_batch()
    assert scheduler.numbers().all_tokens == 3


def test_a_long_pass_goes_alone_in_steps_and_others_go_on_meanwhile() -> None:
    scheduler = Scheduler(4096, contended_tokens=0)
    for name in ("greedy", "honest"):
        scheduler.add_adapter(name, name)
    scheduler.submit(ticket("honest", 0), 0.0)
    scheduler.submit(ticket("greedy", 0, tokens=4000), 0.0)
    assert scheduler.step_tokens("greedy") is None, "nobody else has had work yet"
    batches = [scheduler.next_batch(), scheduler.next_batch()]
    by_name = {tuple(adapters_in(batch)): batch for batch in batches}
    long, short = by_name["greedy",], by_name["honest",]
    assert long is not None
    assert short is not None
    assert long.long
    assert not short.long
    assert scheduler.step_tokens("greedy") == 128
    scheduler.finish(short.ops[0], failed=False)
    scheduler.submit(ticket("honest", 1), 0.0)
    assert adapters_in(scheduler.next_batch()) == ["honest"], "the long one still runs"
    scheduler.finish(long.ops[0], failed=False)


def test_a_long_pass_is_its_tenants_turn_while_others_have_work() -> None:
    """The tenant's other passes wait for it; otherwise they would take the turns that others have in between."""
    scheduler = Scheduler(4096, contended_tokens=0)
    for name, tenant in (("large", "greedy"), ("small", "greedy"), ("honest", "honest")):
        scheduler.add_adapter(name, tenant)
    scheduler.submit(ticket("honest", 0), 0.0)
    scheduler.submit(ticket("large", 0, tokens=4000), 0.0)
    honest, large = scheduler.next_batch(), scheduler.next_batch()
    assert honest is not None
    assert large is not None
    assert large.long
    scheduler.submit(ticket("small", 0), 0.0)
    assert scheduler.next_batch() is None
    scheduler.finish(honest.ops[0], failed=False)
    scheduler.submit(ticket("honest", 1), 0.0)
    assert adapters_in(scheduler.next_batch()) == ["honest"]
    assert scheduler.next_batch() is None
    scheduler.finish(large.ops[0], failed=False)
    assert adapters_in(scheduler.next_batch()) == ["small"]


def test_alone_a_tenants_small_passes_do_not_wait_for_its_large_one() -> None:
    scheduler = Scheduler(4096, contended_tokens=0)
    for name in ("large", "small"):
        scheduler.add_adapter(name, "alone")
    scheduler.submit(ticket("large", 0, tokens=5000), 0.0)
    assert adapters_in(scheduler.next_batch()) == ["large"]
    scheduler.submit(ticket("small", 0), 0.0)
    assert adapters_in(scheduler.next_batch()) == ["small"]


def test_nobody_waits_for_a_larger_pass_in_the_same_batch() -> None:
    """On a CPU, a pass of up to twice the others' size is not run in steps.

    It gets its own batch, whichever pass comes first.
    """
    for first, second in (("greedy", "honest"), ("honest", "greedy")):
        scheduler = Scheduler(4096, contended_tokens=0)
        for name in (first, second):
            scheduler.add_adapter(name, name)
            scheduler.submit(ticket(name, 0, tokens=200 if name == "greedy" else 128), 0.0)
        batches = [scheduler.next_batch(), scheduler.next_batch()]
        assert [adapters_in(batch) for batch in batches] == [[first], [second]]
        assert not any(batch.long for batch in batches if batch is not None)


def test_passes_of_about_the_same_size_share_a_batch_where_tokens_are_cheap() -> None:
    scheduler = Scheduler(4096, contended_tokens=64)
    for name, tokens in (("one", 200), ("other", 128)):
        scheduler.add_adapter(name, name)
        scheduler.submit(ticket(name, 0, tokens=tokens), 0.0)
    assert sorted(adapters_in(scheduler.next_batch())) == ["one", "other"]


def test_an_op_larger_than_a_batch_is_run_in_steps() -> None:
    """Another op may arrive while it runs."""
    scheduler = Scheduler(4096, contended_tokens=0)
    scheduler.add_adapter("a", "a")
    scheduler.submit(ticket("a", 0, tokens=5000), 0.0)
    batch = scheduler.next_batch()
    assert batch is not None
    assert batch.long
