"""vLLM's processes: their arguments, their death, and that they end with the server."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.sampler.vllm.vllm_model import ENGINE_ARGS, events, prompt, request, run
from tests.support.servers.running import Server
from twinkle import hub
from twinkle.errors import InvalidInputError, TwinkleServerError, UnsupportedError
from twinkle.model import LoraSpec, Trainer
from twinkle.sampler import Finished, SampleFailure

pytestmark = pytest.mark.vllm


def test_engine_args() -> None:
    pytest.importorskip("vllm")
    from twinkle.sampler.vllm.engine_args import check_engine_args, make_engine_args

    check_engine_args({"max_model_len": 512, "enable_lora": True, "logprobs_mode": "processed_logprobs"})
    with pytest.raises(InvalidInputError, match=r"engine_args.max_model_length: .*max_model_len"):
        check_engine_args({"max_model_length": 512})
    for name, value in {"model": "x", "enable_lora": False, "logprobs_mode": "raw_logprobs", "tokenizer": "x"}.items():
        with pytest.raises(InvalidInputError, match=f"engine_args.{name}: .*nothing: "):
            check_engine_args({name: value})
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    made = make_engine_args({"max_loras": 3}, "folder", cpu, torch.bfloat16)
    assert (made.max_loras, made.dtype, made.kv_cache_memory_bytes) == (3, "bfloat16", 2**30)
    assert made.enable_lora
    assert not make_engine_args({}, "folder", cpu, torch.bfloat16, adapters=False).enable_lora
    with pytest.raises(UnsupportedError, match=r"engine_args.enable_sleep_mode: vLLM has no sleep mode on a CPU"):
        make_engine_args({"enable_sleep_mode": True}, "folder", cpu, torch.bfloat16)
    with pytest.raises(InvalidInputError, match="gpu_memory_utilization"):
        make_engine_args({}, "folder", cuda, torch.bfloat16)


def test_an_engine_that_is_killed(model_dir: Path) -> None:
    """Running and later requests fail with a message that says so, and no process or file is left."""
    from twinkle.sampler.vllm import VllmSampler

    trainer = Trainer.from_pretrained(str(model_dir), device="cpu", dtype="fp32", memory_budget_bytes=2**30)
    trainer.create_adapter("a", LoraSpec(rank=4, seed=1))
    others = {child.pid for child in multiprocessing.active_children()}
    sampler = VllmSampler(trainer, hub.load_tokenizer(str(model_dir)), engine_args=ENGINE_ARGS)
    try:
        (core,) = [child for child in multiprocessing.active_children() if child.pid not in others]
        run(sampler, [request("before", None, prompt(5), max_tokens=3)])
        sampler.submit(request("under way", None, prompt(5), 8, max_tokens=200))
        os.kill(core.pid, signal.SIGKILL)
        (finished,) = events(sampler)
        assert isinstance(finished, Finished)
        assert isinstance(finished.outcome, SampleFailure)
        assert isinstance(finished.outcome.error, TwinkleServerError)
        assert "vLLM engine has died" in str(finished.outcome.error)
        with pytest.raises(TwinkleServerError, match="vLLM engine has died"):
            sampler.submit(request("later", None, prompt(5), max_tokens=3))
        with pytest.raises(TwinkleServerError, match="vLLM engine has died"):
            sampler.publish("later", "a")
    finally:
        sampler.close()
    assert not sampler._files.root.exists()
    assert core.pid not in {child.pid for child in multiprocessing.active_children()}


def vllm_server(directory: Path, memory_dir: Path) -> Server:
    model_id = "random://llama-tiny-wide"
    model = {"model_id": model_id, "backend": "transformers", "device": "cpu", "dtype": "fp32"}
    sampler = {"model_id": model_id, "sampler_type": "vllm", "memory_dir": str(memory_dir)}
    engine_args = {"engine_args": {"kv_cache_memory_bytes": 2**26}}
    applications = [
        {"name": "server", "import_path": "server"},
        {"name": "model", "import_path": "model", "args": model},
        {"name": "sampler", "import_path": "sampler", "args": sampler | engine_args},
    ]
    return Server(directory, {"applications": applications})


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_the_server(number: signal.Signals, model_dir: Path, tmp_path: Path) -> None:
    """SIGINT reaches every process, as from a terminal; SIGKILL reaches only the server."""
    import psutil  # installed with vLLM

    memory_dir = tmp_path / "memory"
    memory_dir.mkdir()
    server = vllm_server(tmp_path, memory_dir).start()
    processes = [child.pid for child in psutil.Process(server.process.pid).children(recursive=True)]
    assert len(processes) >= 2
    assert len(list(memory_dir.iterdir())) == 1
    server.process.send_signal(number)
    if number == signal.SIGINT:
        for pid in processes:
            os.kill(pid, number)
        assert server.process.wait(60) == 0, server.log()
        assert list(memory_dir.iterdir()) == []
    server.process.wait()
    end = time.monotonic() + 60
    while any(_lives(pid) for pid in processes):
        assert time.monotonic() < end, "vLLM's processes end with the server"
        time.sleep(0.2)


def _lives(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
