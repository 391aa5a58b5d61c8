"""The servers of cookbook/client/server/megatron on CPU processes: every file trains, samples and stops.

REPLACEMENTS are the only changes of the files. Port and data directory are options of the command line. All servers run
one after another on one Ray cluster, which has as many CPUs in its books as the largest file asks for.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
import tinker
from tinker import types

from tests.cookbook.client.client_cookbook import CLIENT
from tests.on_ray.placement.started_clusters import ray_start
from tests.support.servers.running import PATIENT_RAY, free_port
from twinkle_client import LoraConfig, init_twinkle_client
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.sampler import Sampler

pytestmark = pytest.mark.megatron

FOLDER = CLIENT / "server" / "megatron"
# What the tests change in a file, and nothing else: a tiny model, CPU processes, and the sampler that needs no vLLM.
REPLACEMENTS = (
    (r"model_id: Qwen/Qwen2\.\S+", "model_id: random://llama-tiny"),
    (r"model_id: Qwen/Qwen3\.[56]-\S+", "model_id: random://qwen3.5-tiny"),
    ("device_type: cuda", "device_type: cpu"),
    ("sampler_type: vllm", "sampler_type: torch"),
)
_START_SECONDS = 600.0
_ROWS = [{"input_ids": [1, 2, 3, 4], "labels": [-100, 3, 4, 5]}] * 2


def replaced(file: Path) -> str:
    text = file.read_text()
    found = []
    for pattern, ours in REPLACEMENTS:
        text, count = re.subn(pattern, ours, text)
        found += [pattern] * (count > 0)
    assert len(found) == len(REPLACEMENTS) - 1, f"{file.name} has one kind of model, and the other values: {found}"
    return text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the folder with the replacements."""
    if find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed; `make test-megatron` does that")
    copy = tmp_path_factory.mktemp("c") / "megatron"
    shutil.copytree(FOLDER, copy)
    for file in FOLDER.glob("*.yaml"):
        (copy / file.name).write_text(replaced(file))
    return copy


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[dict[str, str]]:
    with ray_start(tmp_path_factory.mktemp("r"), "--num-cpus=8", **PATIENT_RAY) as environment:
        environment |= PATIENT_RAY
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        yield environment


@contextmanager
def serving(command: list[str], config: Path, data_dir: Path, environment: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Run a server, and give its address and a key. At the end it is stopped as Ctrl-C would stop it."""
    port, log = free_port(), data_dir.with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen([*command, "--port", str(port)], stdout=output, stderr=output, env=environment)
    try:
        deadline = time.monotonic() + _START_SECONDS
        while "listening on" not in log.read_text():
            assert process.poll() is None, log.read_text()[-5000:]
            assert time.monotonic() < deadline, log.read_text()[-5000:]
            time.sleep(0.2)
        keys = [
            sys.executable,
            "-m",
            "twinkle.server",
            "keys",
            "create",
            "-c",
            str(config),
            "--data-dir",
            str(data_dir),
        ]
        created = subprocess.run(keys, env=environment, capture_output=True, text=True, timeout=120)
        (key,) = re.findall(r"\btml-\S+", created.stdout)
        yield f"http://127.0.0.1:{port}", key
        process.terminate()
        assert process.wait(180) == 0, log.read_text()[-5000:]
    finally:
        process.kill()
        process.wait()


def train_with_tinker(url: str, key: str, name: str) -> None:
    """Train with the tinker SDK, and sample from what was trained."""
    service = tinker.ServiceClient(base_url=url, api_key=key)
    training = service.create_lora_training_client(base_model=name, rank=8)
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
    )
    losses = []
    for _ in range(3):
        result = training.forward_backward([datum] * 2, "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=0.01)).result()
        losses.append(result.result().metrics["loss:sum"])
    assert losses[-1] < losses[0]
    sampler = training.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=4, seed=1)
    drawn = sampler.sample(types.ModelInput.from_ints([1, 2]), 1, params).result()
    assert len(drawn.sequences[0].tokens) == 4
    service.close("success").result()


def train_with_twinkle(url: str, key: str, name: str, config: LoraConfig | None) -> None:
    """Train with twinkle_client, then with GRPO on samples of the newest weights. config: None for all parameters."""
    client = init_twinkle_client(url, key)
    model, sampler = MultiLoraTransformersModel(name, client=client), Sampler(name, client=client)
    model.add_adapter_to_model("a", config)
    model.set_optimizer("AdamW", lr=0.001)
    losses = []
    for _ in range(3):
        losses.append(model.forward_backward(inputs=_ROWS)["loss"])
        model.clip_grad_and_step()
    assert losses[-1] < losses[0]
    model.set_loss("GRPOLoss", epsilon=0.2)
    model.add_metric("GRPOMetric", is_training=True)
    for step in range(2):
        address = model.save("grpo", is_sampler=True)
        params = {"max_tokens": 5, "num_samples": 4, "seed": 100 * step, "logprobs": 1}
        (response,) = sampler.sample([{"input_ids": [5, 17, 40]}], params, adapter_uri=address)
        rewards = [sum(token % 2 for token in sequence.tokens) for sequence in response.sequences]
        mean = sum(rewards) / len(rewards)
        assert any(reward != mean for reward in rewards)
        model.forward_backward(
            inputs=[sequence.new_input_feature for sequence in response.sequences],
            old_logps=[[pairs[0][1] for pairs in sequence.logprobs] for sequence in response.sequences],
            advantages=[reward - mean for reward in rewards],
        )
        model.clip_grad_and_step()
        # The sampler had the trainer's weights: log-probabilities differ by rounding only.
        assert abs(float(model.calculate_metric(is_training=True)["train/approx_kl"])) < 1e-5
    client.close()


def test_server_script_runs_the_4b_file(folder: Path, cluster: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, str(folder / "server.py"), "--data-dir", str(tmp_path / "data")]
    with serving(command, folder / "server_config_4b.yaml", tmp_path / "data", cluster) as (url, key):
        train_with_twinkle(url, key, "Qwen/Qwen3.5-4B", LoraConfig(r=8))


def test_run_script_runs_the_27b_file(folder: Path, cluster: dict[str, str], tmp_path: Path) -> None:
    """The script joins the cluster that it finds, here the one of these tests."""
    address = (Path(cluster["RAY_TMPDIR"]) / "ray" / "ray_current_cluster").read_text().strip()
    variables = {**cluster, "RAY_PORT": address.rpartition(":")[2]}
    command = [str(folder / "run.sh"), "--save-dir", str(tmp_path / "data")]
    with serving(command, folder / "server_config.yaml", tmp_path / "data", variables) as (url, key):
        train_with_tinker(url, key, "Qwen/Qwen3.6-27B")


@pytest.mark.parametrize(
    ("file", "name"),
    [("server_config_7b.yaml", "Qwen/Qwen2.5-7B-Instruct"), ("server_config_older.yaml", "Qwen/Qwen3.5-4B")],
)
def test_other_files(folder: Path, cluster: dict[str, str], tmp_path: Path, file: str, name: str) -> None:
    command = [sys.executable, "-m", "twinkle.server", "launch", "-c", str(folder / file)]
    command += ["--data-dir", str(tmp_path / "data")]
    with serving(command, folder / file, tmp_path / "data", cluster) as (url, key):
        train_with_tinker(url, key, name)


def test_grpo_of_all_parameters(folder: Path, cluster: dict[str, str], tmp_path: Path) -> None:
    """The 7B file with one more line."""
    file = tmp_path / "full.yaml"
    text = (folder / "server_config_7b.yaml").read_text()
    file.write_text(text.replace("backend: megatron\n", "backend: megatron\n      train_mode: full\n"))
    command = [sys.executable, "-m", "twinkle.server", "launch", "-c", str(file), "--data-dir", str(tmp_path / "data")]
    with serving(command, file, tmp_path / "data", cluster) as (url, key):
        train_with_twinkle(url, key, "Qwen/Qwen2.5-7B-Instruct", None)


def test_every_file_is_run() -> None:
    run = {"server_config.yaml", "server_config_4b.yaml", "server_config_7b.yaml", "server_config_older.yaml"}
    assert {file.name for file in FOLDER.glob("*.yaml")} == run
