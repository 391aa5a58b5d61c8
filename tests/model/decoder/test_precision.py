"""The number format of a model where nobody chose one."""

import logging
from pathlib import Path

import pytest
import torch

from tests.support.paths import ROOT
from twinkle.errors import InvalidInputError
from twinkle.model import MultiLoraTransformersModel, Trainer
from twinkle.model.decoder import precision
from twinkle.sampler import LocalSampler

MODEL = "random://llama-tiny"
CPU, CUDA = torch.device("cpu"), torch.device("cuda")

X86 = "processor\t: 0\nmodel name\t: a CPU\nflags\t\t: fpu sse avx512f {}\n\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd aes {}\nCPU part\t: 0xd40\n\n"


@pytest.fixture
def cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """``cpu(facts, slow)`` makes the machine look like one with these facts in /proc/cpuinfo."""

    def install(facts: str | None, slow: bool = False) -> None:
        if facts is not None:
            (tmp_path / "cpuinfo").write_text(facts * 2)
        monkeypatch.setattr(precision, "_CPU_FACTS", tmp_path / "cpuinfo")
        monkeypatch.setattr(precision, "bf16_is_slow", lambda device_type: slow)

    return install


@pytest.mark.parametrize(
    ("facts", "instructions"),
    [
        (X86.format("avx512_bf16 amx_bf16"), "amx_bf16"),
        (X86.format("avx512_bf16"), "avx512_bf16"),
        (X86.format("avx512_vnni"), None),
        (ARM.format("bf16 i8mm"), "bf16"),
        (ARM.format("ebf16x svebf16"), None),  # whole words only
        (ARM.format("asimddp"), None),
        (None, None),  # no such file: not Linux
    ],
)
def test_instructions_decide_on_a_cpu(cpu, facts: str | None, instructions: str | None) -> None:
    cpu(facts)
    assert precision.cpu_instructions() == instructions
    default = precision.default_dtype(CPU)
    assert default.dtype == (torch.float32 if instructions is None else torch.bfloat16)
    assert instructions is None or instructions in default.why


def test_instructions_that_torch_does_not_use(cpu) -> None:
    cpu(ARM.format("bf16"), slow=True)
    assert precision.default_dtype(CPU).name == "fp32"


def test_a_gpu_has_bf16(cpu) -> None:
    cpu(None, slow=True)
    assert precision.default_dtype(CUDA) == precision.DefaultDtype("bf16", "the default on cuda")


def test_a_choice_is_obeyed(cpu, caplog: pytest.LogCaptureFixture) -> None:
    cpu(None, slow=True)
    with caplog.at_level(logging.INFO, precision.logger.name):
        for name in ("bf16", "bfloat16", torch.bfloat16):
            assert precision.read_dtype(name, CPU) == torch.bfloat16
        assert precision.read_dtype("fp32", CUDA) == torch.float32
    assert caplog.records == []
    with pytest.raises(InvalidInputError, match="dtype"):
        precision.read_dtype("fp16", CPU)


@pytest.mark.parametrize("instructions", [None, "amx_bf16"])
def test_library_and_server_choose_alike(instructions: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server loads a Trainer without a dtype; a LocalSampler has its model's."""
    said: list[str] = []
    monkeypatch.setattr(precision, "cpu_instructions", lambda: instructions)
    monkeypatch.setattr(precision.logger, "info", lambda text, *values: said.append(text % values))
    trainer = Trainer.from_pretrained(MODEL, device="cpu")
    model = MultiLoraTransformersModel(model_id=MODEL, device="cpu")
    expected = torch.float32 if instructions is None else torch.bfloat16
    assert trainer.dtype == model.trainer.dtype == model.base_model().dtype == expected
    assert LocalSampler(model).engine is not None
    (line,) = said  # the server's line; a model of the library logs the name of its own option
    assert line == f"dtype: {precision.default_dtype(CPU).name}, {precision.default_dtype(CPU).why}"


def test_bf16_of_a_multi_lora_model_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "cpu_instructions", lambda: None)
    model = MultiLoraTransformersModel(model_id=MODEL, device="cpu", mixed_precision="bf16")
    assert model.trainer.dtype == torch.bfloat16


def test_cookbook_scripts_leave_the_choice_to_the_hardware() -> None:
    scripts = [path for path in (ROOT / "cookbook").rglob("*.py") if "--precision" in path.read_text()]
    assert len(scripts) > 2
    assert [path.name for path in scripts if 'default="bf16"' in path.read_text()] == []
