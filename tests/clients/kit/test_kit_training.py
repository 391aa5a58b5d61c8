"""The client of twinkle-kit, unmodified, trains, saves, samples and resumes on our server (``make test-kit``)."""

from statistics import fmean
from typing import Any

import pytest

from tests.clients.kit.recording import run_kit
from tests.support.servers.running import Server

pytestmark = pytest.mark.kit

MODEL = "org/tiny"
RANK = 8
STEPS = 20  # steps of train.py, with two rows each


@pytest.fixture(scope="module")
def trained(server: Server) -> dict[str, Any]:
    return run_kit("train.py", server.url, MODEL)[-1]


def test_every_call_of_the_client(server: Server) -> None:
    """Calls that are refused raise an error that the client can show; the client can read every other answer."""
    steps = run_kit("drive.py", server.url, MODEL)
    raised = {step["step"]: step["raised"] for step in steps if "raised" in step}
    hub = "needs the package 'modelscope'"
    assert raised.keys() == {"apply_patch", "upload_to_hub", "upload_to_hub whole answer", "Dataset of slices"}
    assert raised["apply_patch"].startswith("HTTPError: 400")
    assert hub in raised["upload_to_hub"]
    assert hub in raised["Dataset of slices"]
    assert [step["returned"] for step in steps if "returned" in step and step["step"] == "health_check"] == [True]


@pytest.fixture(scope="module")
def resumed(server: Server, trained: dict[str, Any]) -> dict[str, Any]:
    return run_kit("resume.py", server.url, MODEL, trained["saved"])[-1]


def test_the_model_is_offered(trained: dict[str, Any]) -> None:
    assert MODEL in trained["names"]
    assert trained["configs"]


def test_loss_falls(trained: dict[str, Any]) -> None:
    losses = trained["losses"]
    assert len(losses) == STEPS
    assert fmean(losses[-3:]) < losses[0] - 0.9  # embeddings this small cannot separate the tokens much further
    assert [float(metrics["loss"]) for metrics in trained["metrics"]] == pytest.approx(losses, abs=1e-3)


def test_the_base_model_stays_as_it_was(trained: dict[str, Any]) -> None:
    """At the first step the adapter changes nothing, so its loss is that of the base model."""
    (row,) = trained["without"]
    # "blue" and the end token; the last has no label
    assert -fmean(row[-6:-1]) == pytest.approx(trained["losses"][0], rel=1e-4)


def test_samples_come_from_what_was_saved(trained: dict[str, Any]) -> None:
    learned = trained["learned"]
    assert learned["decoded"] == "blue"
    assert learned["stop_reason"] == "length"
    assert learned["tokens"] == trained["resumable"] != trained["untaught"]
    assert [top[0][0] for top in learned["logprobs"]] == learned["tokens"]
    feature = learned["new_input_feature"]
    assert feature["messages"][-1] == {"role": "assistant", "content": "blue"}
    assert feature["user_data"] == [["k", 1]]
    assert feature["input_ids"][-4:] == learned["tokens"]
    assert len([label for label in feature["labels"] if label != -100]) == 4


def test_the_run_is_listed(trained: dict[str, Any]) -> None:
    run = trained["run"]
    assert trained["runs_before"] == 0
    assert run["is_lora"]
    assert run["lora_rank"] == RANK
    assert trained["checkpoints"] == [trained["saved"], trained["published"]]
    assert trained["used_loras"] == 1


def test_another_session_resumes(trained: dict[str, Any], resumed: dict[str, Any]) -> None:
    assert resumed["info"]["lora_rank"] == RANK
    assert resumed["progress"]["cur_step"] == STEPS
    assert resumed["progress"]["consumed_train_samples"] == 2 * STEPS
    # The same as without stopping: weights and Adam's moments were restored. A step changes the loss by some 1e-3,
    # rounding by at most 1e-5.
    assert resumed["losses"] == pytest.approx(trained["went_on"], rel=1e-5)


def test_data_on_the_server(resumed: dict[str, Any]) -> None:
    assert (resumed["rows"], resumed["batches"]) == (4, 2)
    assert len(resumed["row"]["input_ids"]) == len(resumed["row"]["labels"])
    assert len(resumed["losses"]) == 4  # two epochs
