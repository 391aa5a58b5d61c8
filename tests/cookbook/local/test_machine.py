"""The cookbook on slow machines: models have the chosen number format, and the demo says how long it takes."""

import ast
import runpy
from pathlib import Path

import pytest

from tests.support.paths import ROOT

COOKBOOK = ROOT / "cookbook"
DEMO = COOKBOOK / "client" / "tinker" / "self_host" / "demo.py"


def loads_of_weights(script: Path) -> list[ast.Call]:
    """Return the calls that read a model's weights with plain Transformers."""
    calls = [node for node in ast.walk(ast.parse(script.read_text())) if isinstance(node, ast.Call)]
    return [call for call in calls if ast.unparse(call.func).startswith("AutoModelForCausalLM.from_pretrained")]


def test_every_model_is_loaded_with_the_chosen_number_format() -> None:
    """Without dtype, Transformers takes that of the file, bf16, which crawls on a CPU without instructions for it."""
    loads = {script: loads_of_weights(script) for script in COOKBOOK.rglob("*.py")}
    assert sum(map(len, loads.values())) >= 6
    for script, calls in loads.items():
        for call in calls:
            assert "dtype" in {keyword.arg for keyword in call.keywords}, f"{script}:{call.lineno}"


@pytest.mark.parametrize(
    ("gflops", "said"), [(20.0, "about 11 minutes"), (100.0, "about 2 minutes"), (1000.0, "about 30 seconds")]
)
def test_the_demo_says_how_long_it_takes(gflops: float, said: str) -> None:
    assert runpy.run_path(str(DEMO))["expected_time"](gflops) == said


def test_the_demo_corrects_the_time_after_the_first_steps() -> None:
    remaining_time = runpy.run_path(str(DEMO))["remaining_time"]
    assert remaining_time(24.0, 2, 36) == "  The first 2 steps took 24.0 s, so the others take about 7 minutes."
    assert remaining_time(0.1, 2, 36) == "  The first 2 steps took 0.1 s, so the others take about 10 seconds."


def test_the_demo_measures_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    demo = runpy.run_path(str(DEMO))
    assert demo["measured_gflops"](0.01) > 0
    demo["announce_time"]()
    assert "  This takes about " in capsys.readouterr().out
