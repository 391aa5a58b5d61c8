"""Samples over HTTP: streams of completions, cancelling, copies of clients, and how long weights are kept."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.servers.running import Server, Tenant, key_for, mock_config, sample_body
from twinkle.server.wire import tinker_pb2 as pb

COPY = 10**9  # the first sequence number of copy number 1
LONG = {"max_tokens": 4000, "seed": 1, "stop": []}


def sampler_of(tenant: Tenant, session: str | None = None, number: int = 0, **source: str) -> str:
    body = {"session_id": session or tenant.session(), "sampling_session_seq_id": number}
    answer = tenant.post("create_sampling_session", {**body, **(source or {"base_model": "mock"})})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["sampling_session_id"])


def poll(tenant: Tenant, sampler: str, cursor: int = 0, client: int = 0, **more: Any) -> dict[str, Any]:
    target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": client}
    answer = tenant.post("retrieve_futures", {"target": target, "prev_cursor": cursor, "timeout": 5.0, **more})
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content


def poll_until(
    tenant: Tenant, sampler: str, count: int, client: int = 0, cursor: int = 0
) -> tuple[dict[str, Any], int]:
    """Poll until ``count`` samples are done. Return them by request id, and the new position in the stream."""
    done: dict[str, Any] = {}
    while len(done) < count:
        answer = poll(tenant, sampler, cursor, client)
        assert answer["cursor"] > cursor
        cursor = answer["cursor"]
        done |= {one["request_id"]: one for one in answer["completions"]}
    return done, cursor


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_stream_of_completions(tenant: Tenant) -> None:
    sampler = sampler_of(tenant)
    requests = [tenant.sample(sampler, number, number) for number in range(20)]
    wrong = tenant.submit("asample", sample_body(sampler, 20, sampling_params={"max_tokens": 10**6}))
    done, cursor = poll_until(tenant, sampler, 21)
    assert set(done) == {*requests, wrong}
    assert done[wrong]["state"] == "failed"
    for request in requests:
        assert done[request]["state"] == "finished"
        assert done[request]["response_payload_uncompressed_size"] == len(tenant.result(request))
    assert "max_tokens" in tenant.error(wrong)
    nothing = poll(tenant, sampler, cursor, timeout=0.01)
    assert nothing == {"completions": [], "cursor": cursor}
    # Acknowledged samples are freed, and no others.
    assert poll(tenant, sampler, cursor, timeout=0.0, retrieved_request_ids=requests[:5])["completions"] == []
    assert {tenant.poll(request).status_code for request in requests[:5]} == {410}
    assert {tenant.poll(request).status_code for request in requests[5:]} == {200}


def test_copies_of_a_client_have_numbers_and_streams_of_their_own(tenant: Tenant) -> None:
    sampler = sampler_of(tenant)
    body = {"sampling_session_id": sampler, "type": "join_sampling_session"}
    numbers = [tenant.post("join_sampling_session", body).json()["client_counter"] for _ in range(3)]
    assert numbers == [1, 2, 3]
    own = tenant.sample(sampler, 4)
    copied = tenant.sample(sampler, 3 * COPY + 4)
    farthest = tenant.sample(sampler, 10**18)  # a copy with a randomly drawn number
    assert set(poll_until(tenant, sampler, 1)[0]) == {own}
    assert set(poll_until(tenant, sampler, 1, client=3)[0]) == {copied}
    assert set(poll_until(tenant, sampler, 1, client=10**9)[0]) == {farthest}
    assert tenant.post("join_sampling_session", body).json()["client_counter"] == 10**9 + 1


def test_what_was_lost_with_a_server_is_reported_as_done(own_server: Callable[..., Server]) -> None:
    """Otherwise a client would wait forever for its stream. It polls, gets 410 and sends the sample again."""
    server = own_server(sample=0.02)
    tenant = Tenant(server.url, key_for("t"))
    sampler = sampler_of(tenant)
    body = {"sampling_session_id": sampler}
    assert tenant.post("join_sampling_session", body).json()["client_counter"] == 1
    tenant.sample(sampler, 0)
    _, cursor = poll_until(tenant, sampler, 1)
    lost = [tenant.submit("asample", sample_body(sampler, n, sampling_params=LONG)) for n in (1, 2, 1500, COPY)]
    server.kill()
    server.start()
    reported, cursor = poll_until(tenant, sampler, 2048, cursor=cursor)
    assert set(lost[:3]) <= set(reported)
    assert {one["state"] for one in reported.values()} == {"failed"}
    assert next(one["request_id"] for one in poll(tenant, sampler, 0, client=1)["completions"]) == lost[3]
    assert {tenant.poll(request).status_code for request in lost} == {410}
    again = tenant.sample(sampler, 3)
    following = poll(tenant, sampler, cursor)
    assert again in {one["request_id"] for one in following["completions"]}
    assert tenant.post("join_sampling_session", body).json()["client_counter"] == 2


def test_numbers_far_apart_or_in_any_order_are_reported_within_reason(own_server: Callable[..., Server]) -> None:
    """The highest number may arrive before the first, and clients choose how far numbers are apart."""
    server = own_server(sample=0.02)
    tenant = Tenant(server.url, key_for("t"))
    far, early = sampler_of(tenant), sampler_of(tenant)
    for number in (0, COPY - 1):
        tenant.submit("asample", sample_body(far, number, sampling_params=LONG))
    lost = [tenant.submit("asample", sample_body(early, n, sampling_params=LONG)) for n in (3, 0, 1024, 1023)]
    server.kill()
    server.start()
    reported, cursor = poll_until(tenant, early, 2048)
    assert set(lost) <= set(reported)
    reported, cursor = poll_until(tenant, far, 16 * 1024)
    assert f"{far}:{COPY - 1}" in reported
    assert poll(tenant, far, cursor, timeout=0.0)["completions"] == []


def test_a_number_with_another_body(tenant: Tenant) -> None:
    sampler = sampler_of(tenant)
    first = tenant.sample(sampler, 3, seed=1)
    result = tenant.result(first)
    assert tenant.sample(sampler, 3, seed=1) == first
    refused = tenant.post("asample", sample_body(sampler, 3, seed=2))
    assert refused.status_code == 400
    assert "seq_id: got 3" in refused.json()["detail"]
    assert tenant.result(first) == result


def test_cancelling(own_server: Callable[..., Server]) -> None:
    server = own_server(sample=0.02)
    tenant, other = (Tenant(server.url, key_for(name)) for name in ("t", "other"))
    sampler = sampler_of(tenant)
    waiting = tenant.submit("asample", sample_body(sampler, 0, sampling_params=LONG))
    assert other.post("cancel_future", {"request_id": waiting}).status_code == 404
    assert tenant.post("cancel_future", {"request_id": waiting}).status_code == 200
    assert tenant.error(waiting) == "cancelled by its client"
    eventually(lambda: tenant.get("status").json()["models"]["mock"]["waiting_samples"] == 0)
    for again in (waiting, f"{sampler}:77"):
        assert tenant.post("cancel_future", {"request_id": again}).status_code == 200
    model = tenant.model()
    refused = tenant.post("cancel_future", {"request_id": tenant.forward_backward(model, 1)})
    assert refused.status_code == 400
    assert "cannot be cancelled" in refused.json()["detail"]


def test_large_results_are_announced_first(tenant: Tenant) -> None:
    sampler = sampler_of(tenant)
    body = sample_body(sampler, 0, prompt={"chunks": [{"tokens": list(range(300))}]}, topk_prompt_logprobs=600)
    request = tenant.submit("asample", body)
    result = tenant.result(request)
    as_stored = {"Accept": "application/x-protobuf"}
    answer = tenant.post("retrieve_future", {"request_id": request, "allow_metadata_only": True}, **as_stored).json()
    assert answer == {"status": "complete_metadata", "response_payload_size": len(result)}
    small = tenant.sample(sampler, 1)
    whole = tenant.post("retrieve_future", {"request_id": small, "allow_metadata_only": True}, **as_stored)
    assert whole.content == tenant.result(small)


def test_every_option_at_once(tenant: Tenant) -> None:
    sampler = sampler_of(tenant)
    crow, col = [0, 1, 1, 3], [2, 0, 3]
    targets = {"data": [9, 5, 0], "dtype": "int64", "shape": [3, 4]}
    sparse = {**targets, "sparse_crow_indices": crow, "sparse_col_indices": col}
    options = {"prompt_logprobs": True, "prompt_logprobs_last_n": 2, "topk_prompt_logprobs": 2}
    more = {"topk_sample_logprobs": 3, "prompt_alt_tokens_k": 5, "record_stability_info": True}
    prompt = {"chunks": [{"tokens": [5, 6, 7, 8]}]}
    body = sample_body(sampler, prompt=prompt, num_samples=2, target_prompt_logprobs=sparse, **options, **more)
    found = pb.SampleResponse.FromString(tenant.result(tenant.submit("asample", body)))
    assert [sequence.topk_sampled_logprobs.k for sequence in found.sequences] == [3, 3]
    assert np.isnan(np.frombuffer(found.prompt_logprobs, "<f4")).tolist() == [True, True, False, False]
    top = np.frombuffer(found.topk_prompt_logprobs.logprobs, "<f4").reshape(4, 2)
    assert (top[:2] == -99999.0).all()
    assert (top[2:] <= 0).all()
    csr = found.target_prompt_logprobs.sparse_csr
    assert np.frombuffer(csr.crow_indices, "<i8").tolist() == crow
    assert np.frombuffer(csr.col_indices, "<i8").tolist() == col
    values = np.frombuffer(csr.values, "<f4")
    assert (values < 0).all()
    assert list(found.prompt_alt_tokens.tokens.shape) == [3, 5]
    dense = {"data": [9, -1, -1, -1, 5, 0], "dtype": "int64", "shape": [3, 2]}
    body = sample_body(sampler, 1, prompt=prompt, target_prompt_logprobs=dense)
    found = pb.SampleResponse.FromString(tenant.result(tenant.submit("asample", body)))
    assert np.frombuffer(found.target_prompt_logprobs.dense, "<f4").tolist() == [values[0], 0, 0, 0, *values[1:]]


def test_switched_off(own_server: Callable[..., Server]) -> None:
    server = own_server(mock_config(clients={"batched_sample_polls": False}))
    tenant = Tenant(server.url, key_for("t"))
    assert tenant.post("client/config", {}).json()["sample_use_retrieve_futures"] is False
    sampler = sampler_of(tenant)
    tenant.result(tenant.sample(sampler))
    refused = tenant.post("retrieve_futures", {"target": {"sampling_session_id": sampler}})
    assert refused.status_code == 400
    assert "retrieve_future" in refused.json()["detail"]


# --- weights ----------------------------------------------------------------------------------------------------------


def directories(server: Server, kind: str) -> list[Path]:
    return sorted(path for path in (server.data_dir / "checkpoints").glob(f"*/{kind}/*/*") if path.is_dir())


def test_weights_of_samplers_stay_until_their_sessions_end(own_server: Callable[..., Server]) -> None:
    """The checkpoint is replaced, deleted or expires: a sampler keeps its weights until its session ends."""
    server = own_server(housekeeping=0.1)
    tenant = Tenant(server.url, key_for("t"))
    training = tenant.session()
    model = tenant.model(training)
    path = tenant.json(tenant.save(model, 1, "ck"))["path"]
    named = tenant.submit("save_weights_for_sampler", {"model_id": model, "seq_id": 2, "path": "named"})
    published = tenant.json(named)["path"]
    first, second = tenant.session(), tenant.session()
    samplers = [
        sampler_of(tenant, first, 0, model_path=path),
        sampler_of(tenant, first, 1, model_path=published),
        sampler_of(tenant, second, 0, model_path=path),
    ]
    before = [tenant.result(tenant.sample(sampler)) for sampler in samplers]
    tenant.forward_backward(model, 3)
    tenant.optim_step(model, 4)
    tenant.json(tenant.save(model, 5, "ck", overwrite=True))
    assert tenant.http.delete(f"training_runs/{model}/checkpoints/sampler_weights/named").status_code == 200
    server.kill()  # clears everything from memory
    server.start()
    assert [tenant.result(tenant.sample(sampler, 1)) for sampler in samplers] == before
    assert len(directories(server, "weights")) == 2
    assert len(directories(server, "sampler_weights")) == 1
    finished = {"reason": {"type": "success"}, "detail": None}
    assert tenant.post(f"sessions/{first}/finish", finished).status_code == 200
    eventually(lambda: directories(server, "sampler_weights") == [])
    assert tenant.result(tenant.sample(samplers[2], 2)) == before[2]  # its session is still active
    eventually(lambda: tenant.post("asample", sample_body(samplers[1], 3)).status_code == 404)
    assert tenant.post(f"sessions/{second}/finish", finished).status_code == 200
    eventually(lambda: len(directories(server, "weights")) == 1)
    tenant.json(tenant.load(tenant.model(), 1, path))  # the checkpoint that replaced it still exists


def test_a_sampler_of_a_run_that_ended(tenant: Tenant) -> None:
    session = tenant.session()
    model = tenant.model(session)
    tenant.forward_backward(model, 1)
    tenant.optim_step(model, 2)
    path = tenant.json(tenant.save(model, 3, "ck"))["path"]
    unnamed = tenant.json(tenant.publish(model, 4))["sampling_session_id"]
    expected = tenant.result(tenant.sample(unnamed))
    assert tenant.post(f"sessions/{session}/finish", {"reason": {"type": "success"}}).status_code == 200
    assert tenant.result(tenant.sample(unnamed, 1)) == expected  # for a while it is loaded from disk again
    for source in (path, f"tinker://{model}/weights/parked"):
        assert tenant.result(tenant.sample(sampler_of(tenant, model_path=source))) == expected


def test_a_sampling_session_has_the_weights_of_one_publish(tenant: Tenant) -> None:
    """Its number cannot be used again: not later by the same run, not by another run, not at the same time."""
    session = tenant.session()
    one, two = tenant.model(session, 0, seed=1), tenant.model(session, 1, seed=2)
    first = tenant.json(tenant.publish(one, 1, number=0))["sampling_session_id"]
    expected = tenant.result(tenant.sample(first))
    tenant.forward_backward(one, 2)
    tenant.optim_step(one, 3)
    sampler_of(tenant, session, 5)
    for refused in (tenant.publish(one, 4, number=0), tenant.publish(two, 1, number=0), tenant.publish(two, 2, 5)):
        assert "sampling_session_seq_id" in tenant.error(refused)
    assert tenant.result(tenant.sample(first, 1)) == expected
    for number in range(10, 20):
        results = [tenant.publish(one, number - 5, number), tenant.publish(two, number - 7, number)]
        answers = [json.loads(tenant.result(result)) for result in results]
        assert sorted("error" in answer for answer in answers) == [False, True]


def test_a_publish_that_failed_leaves_nothing_behind(own_server: Callable[..., Server]) -> None:
    """Its number may be used again, and then stands for the weights of the successful publish."""
    server = own_server()
    tenant = Tenant(server.url, key_for("t"))
    model = tenant.model()
    samplers = server.data_dir / "samplers"
    samplers.write_text("no directory can be made here")
    assert json.loads(tenant.result(tenant.publish(model, 1)))["category"] == "server"
    samplers.unlink()
    tenant.forward_backward(model, 2)
    tenant.optim_step(model, 3)
    again = tenant.json(tenant.publish(model, 4))["sampling_session_id"]
    other = tenant.json(tenant.publish(model, 5, number=1))["sampling_session_id"]
    assert tenant.result(tenant.sample(again)) == tenant.result(tenant.sample(other))


def test_status_has_both_rates(tenant: Tenant) -> None:
    tenant.result(tenant.forward_backward(tenant.model(), 1))
    tenant.result(tenant.sample(sampler_of(tenant)))
    numbers = tenant.get("status").json()["models"]["mock"]
    for total, rate in (
        ("trained_tokens", "training_tokens_per_second"),
        ("sampled_tokens", "sampling_tokens_per_second"),
    ):
        assert numbers[total] > 0
        assert numbers[rate] > 0
