"""A server that dies at any moment continues where it was: same ids, same results, every step applied once.

Each story below runs up to its ``yield``. There the server ends, once for all stories, and starts again: killed with
nothing but the journal on disk, killed with snapshots of everything, and stopped by SIGTERM. Then the rest of each
story checks the results. Stories that need a gap to time out yield ``GAP`` first, so that all wait together.
"""

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.servers.postgres_cluster import execute
from tests.support.servers.running import (
    Server,
    Tenant,
    environment,
    free_port,
    key_for,
    mock_config,
    sample_body,
    training_body,
)
from tests.support.servers.state_samples import change_rows

GAP = 3.0
PASS = 0.02  # duration of a batch of passes: time to end the server in the middle of work
STEPS = "fb os fb os fb os"

Story = Callable[[Tenant], Iterator[float | None]]
STORIES: dict[str, Story] = {}
LEAVES_WORK: list[str] = []


def story(tell: Story) -> Story:
    STORIES[tell.__name__] = tell
    return tell


def leaves_work(tell: Story) -> Story:
    """Mark a story that ends with unfinished work: it runs last before the restart and first after it."""
    LEAVES_WORK.append(tell.__name__)
    return tell


def train(tenant: Tenant, model: str, kinds: str, first: int = 1) -> list[str]:
    """Submit ops without waiting. ``bad`` is a forward_backward that fails; ``-`` skips a number."""
    requests = []
    for number, kind in enumerate(kinds.split(), first):
        if kind == "os":
            requests.append(tenant.optim_step(model, number))
        elif kind != "-":
            loss = "nonsense" if kind == "bad" else "cross_entropy"
            requests.append(tenant.forward_backward(model, number, loss=loss, forward_only=kind == "fwd"))
    return requests


def results(tenant: Tenant, requests: list[str]) -> list[bytes]:
    return [tenant.result(request) for request in requests]


def undisturbed(tenant: Tenant, kinds: str) -> list[bytes]:
    """Return the results of the same ops on a new model without any restart."""
    return results(tenant, train(tenant, tenant.model(), kinds))


# --- stories: unfinished work -----------------------------------------------------------------------------------------


@story
@leaves_work
def a_session_that_ends_during_the_replay(tenant):
    """The checkpoint that the session leaves behind contains all acknowledged steps."""
    session = tenant.session()
    model = tenant.model(session)
    results(tenant, train(tenant, model, "fb os " * 15))
    yield
    assert tenant.post(f"sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None}).is_success
    again = tenant.model()
    tenant.json(tenant.load(again, 1, f"tinker://{model}/weights/parked"))
    after = results(tenant, train(tenant, again, "fwd " * 29 + "fb", first=2))[-1]
    assert after == undisturbed(tenant, "fb os " * 15 + "fb")[-1]


@story
@leaves_work
def accepted_and_not_run(tenant):
    model = tenant.model()
    requests = train(tenant, model, STEPS)
    yield
    assert results(tenant, requests) == undisturbed(tenant, STEPS)


@story
@leaves_work
def between_two_ops(tenant):
    requests = train(tenant, tenant.model(), STEPS)
    delivered = results(tenant, requests[:2])
    yield
    assert results(tenant, requests)[:2] == delivered
    assert results(tenant, requests) == undisturbed(tenant, STEPS)


@story
def all_delivered(tenant):
    model = tenant.model()
    requests = train(tenant, model, STEPS)
    delivered = results(tenant, requests)
    yield
    assert results(tenant, requests) == delivered
    more = train(tenant, model, "fb os fb", first=7)
    assert results(tenant, more) == undisturbed(tenant, f"{STEPS} fb os fb")[6:]


@story
def an_open_window(tenant):
    """Gradients that wait for their optim_step are neither lost nor counted twice."""
    model = tenant.model()
    results(tenant, train(tenant, model, "fb os fb fb"))
    yield
    assert results(tenant, train(tenant, model, "fb os fb", first=5)) == undisturbed(tenant, "fb os fb fb fb os fb")[4:]


@story
@leaves_work
def waiting_behind_a_gap(tenant):
    model = tenant.model()
    late = train(tenant, model, "- os fb os")
    yield
    first = train(tenant, model, "fb")
    assert results(tenant, first + late) == undisturbed(tenant, "fb os fb os")


@story
def a_spoilt_window_stays_spoilt(tenant):
    kinds = "fb os fb bad"
    model = tenant.model()
    requests = train(tenant, model, kinds)
    delivered = results(tenant, requests)
    yield
    assert results(tenant, requests) == delivered
    more = train(tenant, model, "os fb os fb", first=5)
    assert "forward_backward 4" in tenant.error(more[0])
    assert results(tenant, more) == undisturbed(tenant, f"{kinds} os fb os fb")[4:]


@story
def a_refused_step_drops_its_gradient(tenant):
    kinds = "fb bad os"
    model = tenant.model()
    delivered = results(tenant, train(tenant, model, kinds))
    assert b"forward_backward 2" in delivered[2]
    yield
    assert results(tenant, train(tenant, model, "fb os fb", first=4)) == undisturbed(tenant, f"{kinds} fb os fb")[3:]


@story
def a_step_with_wrong_parameters_keeps_its_gradient(tenant):
    """Some wrong steps come before the restart, and one after it."""
    model = tenant.model()
    results(tenant, train(tenant, model, "fb"))
    for seq, wrong in enumerate([{"learning_rate": -1.0}, {"beta1": 1.5}, {"eps": -1.0}, {"grad_clip_norm": -1.0}], 2):
        assert next(iter(wrong)) in tenant.error(tenant.optim_step(model, seq, **wrong))
    yield
    assert "beta2" in tenant.error(tenant.optim_step(model, 6, beta2=-1.0))
    again = results(tenant, train(tenant, model, "os fb", first=7))
    assert again == undisturbed(tenant, "fb fwd fwd fwd fwd fwd os fb")[6:]


@story
def many_forward_passes(tenant):
    """They are not run again, and their numbers are not a gap."""
    kinds = "fb os " + "fwd " * 20 + "fb " + "fwd " * 20
    model = tenant.model()
    requests = train(tenant, model, kinds)
    delivered = results(tenant, requests)
    yield
    more = train(tenant, model, "fwd os fb", first=44)
    assert results(tenant, requests) == delivered
    assert results(tenant, more) == undisturbed(tenant, f"{kinds} fwd os fb")[43:]


@story
def a_gap_among_forward_passes(tenant):
    """A missing number is distinguished from numbers that were answered."""
    model = tenant.model()
    requests = train(tenant, model, "fb fwd - fwd fwd")
    yield GAP
    assert b"number 3 did not arrive" in results(tenant, requests)[2]
    yield
    assert "forward_backward 3 " in tenant.error(train(tenant, model, "os", first=6)[0])
    again = results(tenant, train(tenant, model, "fb os", first=7))
    assert tenant.json(f"{model}:8")["metrics"]["unclipped_grad_l2:mean"] > 0
    assert len(again) == 2


@story
def a_failed_forward_spoils_nothing(tenant):
    model = tenant.model()
    requests = [*train(tenant, model, "fb"), tenant.forward_backward(model, 2, loss="nonsense", forward_only=True)]
    assert b'"category":"user"' in results(tenant, requests)[1]
    yield
    assert "metrics" in tenant.json(tenant.optim_step(model, 3))


@story
def a_refused_gap(tenant):
    """Number 2 never came: 3 and 4 failed, and the adapter continues."""
    model, twin = tenant.model(), tenant.model()
    requests, of_twin = (train(tenant, one, "fb - os fb") for one in (model, twin))
    yield GAP
    delivered = results(tenant, requests)
    assert b"number 2 did not arrive" in delivered[1]
    assert results(tenant, of_twin) == delivered
    expected = results(tenant, train(tenant, twin, "os fb os fb", first=5))
    yield
    assert results(tenant, requests) == delivered
    assert results(tenant, train(tenant, model, "os fb os fb", first=5)) == expected


@story
def a_refused_gap_that_was_filled_too_late(tenant):
    """A missing number that arrives too late changes nothing, before or after the restart."""
    model, twin = tenant.model(), tenant.model()
    requests, of_twin = (train(tenant, one, "fb - os") for one in (model, twin))
    yield GAP
    assert b"number 2 did not arrive" in results(tenant, requests)[1]
    assert results(tenant, of_twin) == results(tenant, requests)
    expected = results(tenant, train(tenant, twin, "fb os fb", first=4))
    assert "too late" in tenant.error(tenant.forward_backward(model, 2, forward_only=True))
    yield
    assert "too late" in tenant.error(tenant.forward_backward(model, 2, forward_only=True))
    assert results(tenant, train(tenant, model, "fb os fb", first=4)) == expected


@story
def a_number_from_far_away(tenant):
    """A number far ahead of all others does not slow down a start."""
    model = tenant.model()
    assert tenant.error(tenant.optim_step(model, 2**62))
    never_made = tenant.session()
    body = {"session_id": never_made, "model_seq_id": 0, "base_model": "mock", "lora_config": {"rank": 0}}
    failed = tenant.submit("create_model", body)
    assert "rank" in tenant.error(failed)
    assert f"{never_made}:train:0" in tenant.error(tenant.optim_step(f"{never_made}:train:0", 2**61))
    yield
    assert "rank" in tenant.error(failed)
    assert results(tenant, train(tenant, tenant.model(), "fb")) == undisturbed(tenant, "fb")


@story
@leaves_work
def many_models(tenant):
    session = tenant.session()
    models = [tenant.model(session, number) for number in range(5)]
    requests = [train(tenant, model, STEPS) for model in models]
    yield
    expected = undisturbed(tenant, STEPS)
    assert all(results(tenant, of_model) == expected for of_model in requests)


# --- stories: checkpoints and sampling --------------------------------------------------------------------------------


def checkpoints(tenant: Tenant) -> list[str]:
    return sorted(one["tinker_path"] for one in tenant.get("checkpoints").json()["checkpoints"])


@story
def a_save_that_was_delivered(tenant):
    model = tenant.model()
    train(tenant, model, "fb os")
    request = tenant.save(model, 3, "ck")
    path = tenant.json(request)["path"]
    listed = tenant.get("checkpoints").json()
    yield
    assert tenant.get("checkpoints").json() == listed
    assert checkpoints(tenant) == [path]
    assert tenant.json(request) == {"path": path, "type": "save_weights"}
    assert "a new name" in tenant.error(tenant.save(model, 4, "ck"))
    again = tenant.model()
    tenant.json(tenant.load(again, 1, path))
    assert results(tenant, train(tenant, again, "fwd fb", first=2))[1] == undisturbed(tenant, "fb os fb")[2]


@story
@leaves_work
def a_save_that_was_not_delivered(tenant):
    model = tenant.model()
    train(tenant, model, "fb os")
    requests = [tenant.save(model, 3, "ck"), tenant.save(model, 4, "ck", overwrite=True)]
    requests += train(tenant, model, "fb os", first=5)
    yield
    assert tenant.json(requests[0]) == tenant.json(requests[1])
    assert results(tenant, requests[2:]) == undisturbed(tenant, "fb os fwd fwd fb os")[4:]
    assert checkpoints(tenant) == [tenant.json(requests[0])["path"]]


@story
def a_deleted_checkpoint_stays_deleted(tenant):
    model = tenant.model()
    path = tenant.json(tenant.save(model, 1, "ck"))["path"]
    assert tenant.http.delete(f"training_runs/{model}/checkpoints/weights/ck").status_code == 200
    yield
    assert checkpoints(tenant) == []
    assert "unknown checkpoint" in tenant.error(tenant.load(model, 2, path))


@story
def a_load(tenant):
    """The loaded weights stay, even if their source is replaced afterwards."""
    model = tenant.model()
    train(tenant, model, "fb os")
    path = tenant.json(tenant.save(model, 3, "ck"))["path"]
    train(tenant, model, "fb os", first=4)
    tenant.json(tenant.load(model, 6, path))
    train(tenant, model, "fb os", first=7)
    tenant.json(tenant.save(model, 9, "ck", overwrite=True))
    yield
    loss = results(tenant, train(tenant, model, "fb", first=10))
    again = tenant.model()
    train(tenant, again, "fb os fwd fwd fwd fwd fb os")
    assert loss == results(tenant, train(tenant, again, "fwd fb", first=9))[1:]


def begin_from(tenant: Tenant, path: str) -> tuple[str, str]:
    """Create a model from a checkpoint in a new session; return its id and the request id."""
    session = tenant.session()
    body = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": True}
    return f"{session}:train:0", tenant.submit("load_weights", body)


def two_checkpoints(tenant: Tenant) -> tuple[str, str]:
    """Save two checkpoints of the same weights."""
    model = tenant.model()
    train(tenant, model, "fb os")
    return tuple(tenant.json(tenant.save(model, seq, name))["path"] for seq, name in ((3, "gone"), (4, "kept")))


def begun_undisturbed(tenant: Tenant, path: str, kinds: str) -> list[bytes]:
    model, request = begin_from(tenant, path)
    tenant.json(request)
    return results(tenant, train(tenant, model, kinds))


@story
def a_model_that_began_as_a_checkpoint(tenant):
    """The checkpoint is no longer needed once the client has the answer."""
    gone, kept = two_checkpoints(tenant)
    model, request = begin_from(tenant, gone)
    begun = tenant.result(request)
    place = gone.removeprefix("tinker://").replace("/", "/checkpoints/", 1)
    assert tenant.http.delete(f"training_runs/{place}").is_success
    first = results(tenant, train(tenant, model, "fb os"))
    yield
    assert tenant.result(request) == begun
    more = results(tenant, train(tenant, model, "fb os fb", first=3))
    assert first + more == begun_undisturbed(tenant, kept, "fb os fb os fb")


@story
@leaves_work
def a_model_that_was_to_begin_as_a_checkpoint(tenant):
    path, _ = two_checkpoints(tenant)
    model, request = begin_from(tenant, path)
    requests = train(tenant, model, "fb os fb")
    yield
    assert tenant.json(request)["model_id"] == model
    assert results(tenant, requests) == begun_undisturbed(tenant, path, "fb os fb")


@story
@leaves_work
def an_export(tenant):
    """It is written once, even if the server died before it was written."""
    model = tenant.model()
    train(tenant, model, "fb os")
    done = tenant.submit("save_weights_external", {"model_id": model, "seq_id": 3, "path": "done"})
    outcome = tenant.result(done)
    asked = tenant.submit("save_weights_external", {"model_id": model, "seq_id": 4, "path": "asked"})
    later = train(tenant, model, "fb os", first=5)
    yield
    assert tenant.result(done) == outcome
    results(tenant, later)
    contents = []
    for path in (tenant.json(done)["path"], tenant.json(asked)["path"]):
        place = path.removeprefix("tinker://").replace("/", "/checkpoints/", 1)
        urls = tenant.get(f"training_runs/{place}/external_weights_urls").json()["urls"]
        contents.append([tenant.http.get(urls[name]).content for name in sorted(urls)])
    assert contents[0] == contents[1]


@story
def an_unnamed_sampler(tenant):
    """Once published, it always samples the same, whatever is trained afterwards."""
    model = tenant.model()
    train(tenant, model, "fb os")
    request = tenant.publish(model, 3)
    sampler = tenant.json(request)["sampling_session_id"]
    sample = tenant.result(tenant.sample(sampler, 0))
    train(tenant, model, "fb os", first=4)
    yield
    assert tenant.json(request)["sampling_session_id"] == sampler
    assert tenant.result(tenant.sample(sampler, 1)) == sample
    assert tenant.get(f"samplers/{sampler}").json()["sampler_id"] == sampler
    newer = tenant.json(tenant.publish(model, 6, 1))["sampling_session_id"]
    assert newer != sampler
    assert tenant.result(tenant.sample(newer, 0)) != sample


@story
@leaves_work
def an_unnamed_sampler_that_was_not_delivered(tenant):
    model = tenant.model()
    requests = [*train(tenant, model, "fb os"), tenant.publish(model, 3), *train(tenant, model, "fb os", first=4)]
    yield
    sampler = tenant.json(requests[2])["sampling_session_id"]
    again = tenant.model()
    train(tenant, again, "fb os")
    expected = tenant.json(tenant.publish(again, 3))["sampling_session_id"]
    assert tenant.result(tenant.sample(sampler)) == tenant.result(tenant.sample(expected))


@story
def named_samplers_and_the_base_model(tenant):
    session = tenant.session()
    model = tenant.model(session)
    train(tenant, model, "fb os")
    named = {"model_id": model, "seq_id": 3, "path": "s1"}
    path = tenant.json(tenant.submit("save_weights_for_sampler", named))["path"]
    wanted = [{"model_path": path}, {"base_model": "mock"}]
    bodies = [{"session_id": session, "sampling_session_seq_id": n, **source} for n, source in enumerate(wanted)]
    samplers = [tenant.post("create_sampling_session", body).json()["sampling_session_id"] for body in bodies]
    before = [tenant.result(tenant.sample(sampler)) for sampler in samplers]
    assert before[0] != before[1]
    yield
    assert [tenant.post("create_sampling_session", body).json()["sampling_session_id"] for body in bodies] == samplers
    assert [tenant.result(tenant.sample(sampler, 1)) for sampler in samplers] == before


@story
def a_sampler_whose_checkpoint_was_replaced(tenant):
    """It continues to sample from the weights that it was made with."""
    session = tenant.session()
    model = tenant.model(session)
    path = tenant.json(tenant.save(model, 1, "ck"))["path"]
    body = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
    sampler = tenant.post("create_sampling_session", body).json()["sampling_session_id"]
    sample = tenant.result(tenant.sample(sampler))
    train(tenant, model, "fb os", first=2)
    tenant.json(tenant.save(model, 4, "ck", overwrite=True))
    assert tenant.result(tenant.sample(sampler, 1)) == sample
    yield
    assert tenant.result(tenant.sample(sampler, 2)) == sample
    newer = tenant.post("create_sampling_session", {**body, "sampling_session_seq_id": 1}).json()["sampling_session_id"]
    assert tenant.result(tenant.sample(newer)) != sample


@story
@leaves_work
def a_lost_sample(tenant):
    """Samples do not survive a restart: 410 makes the SDK send them again."""
    body = {"session_id": tenant.session(), "sampling_session_seq_id": 0, "base_model": "mock"}
    sampler = tenant.post("create_sampling_session", body).json()["sampling_session_id"]
    request = tenant.sample(sampler)
    yield
    assert tenant.poll(request).status_code == 410


# --- stories: sessions and repeated requests --------------------------------------------------------------------------


@story
def requests_that_come_again(tenant):
    """The same POST is the same future before and after a restart; another body under a used number is refused."""
    session = tenant.post("create_session", {}, **{"X-Idempotency-Key": "k1"}).json()["session_id"]
    create = {"session_id": session, "model_seq_id": 0, "base_model": "mock", "lora_config": {"rank": 8, "seed": 1}}
    model = f"{session}:train:0"
    step = {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 0.1}}
    posts = [
        ("create_model", create),
        ("forward_backward", training_body(model, 1)),
        ("optim_step", step),
        ("save_weights", {"model_id": model, "seq_id": 3, "path": "ck"}),
        ("save_weights_for_sampler", {"model_id": model, "seq_id": 4, "sampling_session_seq_id": 0}),
        ("forward_backward", training_body(model, 5, loss="nonsense")),
    ]
    requests = [tenant.submit(*post) for post in posts]
    delivered = results(tenant, requests)
    yield
    assert tenant.post("create_session", {}, **{"X-Idempotency-Key": "k1"}).json()["session_id"] == session
    assert [tenant.submit(*post) for post in posts] == requests
    assert results(tenant, requests) == delivered
    other_rank = {**create, "lora_config": {"rank": 4, "seed": 1}}
    for path, body in [
        ("create_model", other_rank),
        ("optim_step", {**step, "adam_params": {"learning_rate": 0.2}}),
        ("forward_backward", training_body(model, 1, loss="ppo")),
    ]:
        refused = tenant.submit(path, body)
        assert refused not in requests
        assert "used before" in tenant.error(refused)
    assert results(tenant, train(tenant, model, "fb os", first=6))[1] != b""


@story
def a_finished_session(tenant):
    """Its models say how to continue, and the checkpoint that they name exists."""
    session = tenant.session()
    model = tenant.model(session)
    requests = train(tenant, model, "fb os")
    delivered = results(tenant, requests)
    assert tenant.post(f"sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None}).is_success
    path = f"tinker://{model}/weights/parked"
    assert path in tenant.error(tenant.optim_step(model, 3))
    yield
    assert results(tenant, requests) == delivered
    assert path in tenant.error(tenant.optim_step(model, 3))
    assert tenant.post("session_heartbeat", {"session_id": session}).status_code == 410
    again = tenant.model()
    tenant.json(tenant.load(again, 1, path))
    assert results(tenant, train(tenant, again, "fwd fb", first=2))[1:] == undisturbed(tenant, "fb os fb")[2:]


# --- the restart ------------------------------------------------------------------------------------------------------


class Told:
    """Runs all stories up to the end of the server, and restarts it."""

    def __init__(self, server: Server, by_signal: bool) -> None:
        self.server = server
        self.stories = {name: tell(Tenant(server.url, key_for(name))) for name, tell in STORIES.items()}
        self.broken: dict[str, Exception] = {}
        waiting = [name for name in STORIES if name not in LEAVES_WORK and self.tell(name) == GAP]
        for name in waiting:
            self.tell(name)
        for name in LEAVES_WORK:
            self.tell(name)
        if by_signal:
            assert server.stop() == 0
        else:
            server.kill()
        server.tuning["gap"] = 60.0  # ops behind a gap may wait until their story continues
        server.start()

    def tell(self, name: str) -> float | None:
        try:
            return next(self.stories[name])
        except Exception as error:  # noqa: BLE001 - reported by the story's own test
            self.broken[name] = error
            return None


@pytest.fixture(scope="module", params=["killed with journals", "killed with snapshots", "ended by SIGTERM"])
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    tuning = {"pass": PASS, "gap": GAP, "snapshot": 0.0 if "snapshots" in request.param else 60.0}
    server = Server(tmp_path_factory.mktemp("told"), **tuning)
    try:
        yield Told(server.start(), "SIGTERM" in request.param)
    finally:
        server.close()


@pytest.mark.parametrize("name", sorted(STORIES, key=lambda name: name not in LEAVES_WORK))
def test_goes_on(told: Told, name: str) -> None:
    if name in told.broken:
        raise told.broken[name]
    with pytest.raises(StopIteration):
        next(told.stories[name])


def test_nothing_unexpected_is_logged(told: Told) -> None:
    log = told.server.log()
    for text in ("Traceback", "ERROR", "CRITICAL", "never retrieved"):
        assert text not in log, log


# --- how servers end and begin ----------------------------------------------------------------------------------------


def test_sigterm_drains(own_server: Callable[..., Server]) -> None:
    """Running ops are finished, every adapter is on disk, and the next server has nothing to replay."""
    server = own_server(**{"pass": 0.5, "snapshot": 60.0})
    tenant = Tenant(server.url, "tml-drain")
    model = tenant.model()
    requests = train(tenant, model, "fb os")
    delivered = results(tenant, requests)
    running = train(tenant, model, "fb", first=3)
    with ThreadPoolExecutor() as pool:
        poll = pool.submit(Tenant(server.url, "tml-drain").poll, running[0])
        time.sleep(0.2)
        started = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - started < 20
        assert poll.result().status_code in (200, 408)  # a long poll does not delay the end
    server.tuning["pass"] = 0.0
    server.start()
    assert "replaying" not in server.log()
    assert results(tenant, requests) == delivered
    assert results(tenant, running) == undisturbed(tenant, "fb os fb")[2:]


def test_half_written_directories_of_a_crash_are_removed(own_server: Callable[..., Server]) -> None:
    server = own_server()
    tenant = Tenant(server.url, "tml-half")
    model = tenant.model()
    tenant.json(tenant.save(model, 1, "ck"))
    tenant.json(tenant.publish(model, 2))
    written = [*server.data_dir.glob("checkpoints/*/*/*/1"), *server.data_dir.glob("samplers/*")]
    assert len(written) == 2
    server.kill()
    halves = [path.with_name(f".{path.name}.0123456789abcdef.tmp") for path in written]
    for half in halves:
        half.mkdir()
        (half / "adapter.npz").write_bytes(b"half")
    server.start()
    assert [path.exists() for path in (*written, *halves)] == [True, True, False, False]


def launched(server: Server) -> subprocess.CompletedProcess[str]:
    """Start a second process with the configuration of ``server``."""
    command = server.command("launch", "-c", str(server.directory / "config.yaml"))
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment())


def test_one_server_a_data_directory_and_port(own_server: Callable[..., Server]) -> None:
    server = own_server()
    same_port = launched(server)
    assert same_port.returncode == 1
    assert f"cannot listen on 127.0.0.1:{server.port}" in same_port.stderr
    port, server.port = server.port, free_port()
    server.configure(mock_config())
    same_directory = launched(server)
    assert same_directory.returncode == 1
    assert f"data directory {server.data_dir} is in use by another server" in same_directory.stderr
    for ended in (same_port, same_directory):
        assert "Traceback" not in ended.stderr
        assert len(ended.stderr.splitlines()) <= 2
    server.port = port
    assert server.is_healthy()


def test_a_model_that_is_served_no_more(own_server: Callable[..., Server]) -> None:
    """Its runs and samplers report that, everything else works, and they return when the model does."""
    server = own_server(mock_config(), housekeeping=0.1)
    tenant = Tenant(server.url, "tml-model")
    model = tenant.model()
    requests = train(tenant, model, "fb os")
    sampler = tenant.json(tenant.publish(model, 3))["sampling_session_id"]
    delivered = results(tenant, requests)
    assert server.stop() == 0
    other = json.loads(json.dumps(mock_config()).replace('"model_id": "mock"', '"model_id": "other"'))
    server.configure(other)
    server.start()
    answers = [
        tenant.post("get_info", {"model_id": model}),
        tenant.post("optim_step", {"model_id": model, "seq_id": 4, "adam_params": {}}),
        tenant.poll(requests[0]),
        tenant.post("asample", sample_body(sampler)),
    ]
    assert [answer.status_code for answer in answers] == [400] * 4
    assert all("'mock'" in answer.json()["detail"] for answer in answers)
    assert tenant.post(f"sessions/{model.split(':')[0]}/finish", {"reason": {"type": "success"}}).is_success
    time.sleep(0.3)
    assert server.stop() == 0
    assert "maintenance failed" not in server.log()
    server.configure(mock_config())
    server.start()
    assert results(tenant, requests) == delivered
    again = tenant.model()
    wait_until(lambda: f"tinker://{model}/weights/parked" in checkpoints(tenant))
    tenant.json(tenant.load(again, 1, f"tinker://{model}/weights/parked"))


def wait_until(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_session_that_was_ending(own_server: Callable[..., Server]) -> None:
    """A server that died between ending a session and evicting its adapters evicts them at the next start."""
    server = own_server(snapshot=60.0)
    tenant = Tenant(server.url, "tml-ending")
    session = tenant.session()
    model = tenant.model(session)
    results(tenant, train(tenant, model, "fb os"))
    server.kill()
    statement = f"UPDATE sessions SET state = 'finished' WHERE session_id = '{session}'"
    if server.database is not None:
        execute(server.database, statement)
    else:
        change_rows(server.data_dir / "state.db", "sessions", statement)
    server.start()
    path = f"tinker://{model}/weights/parked"
    wait_until(lambda: checkpoints(tenant) == [path])
    wait_until(lambda: path in tenant.error(tenant.optim_step(model, 3)))  # the note follows the checkpoint
