"""The 23 tutorials of tinker-cookbook 0.5.8, as they are or with other numbers (``make test-cookbook``).

16 of them call the server. docs/compatibility.md lists how each of them runs.
"""

import json
from collections.abc import Iterator
from math import exp, isfinite
from pathlib import Path

import pytest
import tinker
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.cookbook.recipes.recipe_runs import Bench
from tests.cookbook.recipes.tutorial_runs import OLDER_SDK, SOURCES, Change, TutorialRunner

pytestmark = pytest.mark.cookbook

LENGTH = "on a CPU the demo model writes a few tokens a second"
STEPS = "a few steps show that training works"
TOKENS = "the first tokens of an answer are enough to learn from"
BATCH = "the stand-ins for the datasets are small"
CHANGES = [
    Change("102_first_sft", "conv, renderer, max_length=512", "conv, renderer, max_length=150", TOKENS),
    Change("102_first_sft", "conv, big_renderer, max_length=512", "conv, big_renderer, max_length=150", TOKENS),
    Change("102_first_sft", "for _step in range(15)", "for _step in range(2)", STEPS),
    Change("102_first_sft", "for _step in range(10)", "for _step in range(1)", STEPS),
    Change(
        "102_first_sft",
        "    params = tinker.SamplingParams(max_tokens=200",
        "    params = tinker.SamplingParams(max_tokens=8",
        LENGTH,
    ),
    Change(
        "102_first_sft",
        "big_params = tinker.SamplingParams(max_tokens=200",
        "big_params = tinker.SamplingParams(max_tokens=8",
        LENGTH,
    ),
    Change("103_async_patterns", "max_tokens=150", "max_tokens=8", LENGTH),
    Change("104_first_rl", "max_tokens=256", "max_tokens=12", LENGTH),
    Change("104_first_rl", "n_steps = 10", "n_steps = 1", STEPS),
    Change("104_first_rl", "batch_size = 16", "batch_size = 4", BATCH),
    Change("104_first_rl", "group_size = 8", "group_size = 6", BATCH),
    Change("301_cookbook_abstractions", "MAX_TOKENS = 512", "MAX_TOKENS = 16", LENGTH),
    Change("301_cookbook_abstractions", "N_STEPS = 4", "N_STEPS = 1", STEPS),
    Change("302_custom_environment", "MAX_TOKENS = 256", "MAX_TOKENS = 32", LENGTH),
    Change("302_custom_environment", "N_STEPS = 4", "N_STEPS = 2", STEPS),
    Change("304_rl_with_config", "max_tokens=64", "max_tokens=8", LENGTH),
    Change("304_rl_with_config", "max_steps=10", "max_steps=2", STEPS),
    Change("407_rlhf_pipeline", "BATCH_SIZE = 256", "BATCH_SIZE = 4", BATCH),
    Change(
        "407_rlhf_pipeline",
        'learning_rate=3e-4,\n        lr_schedule="linear",\n        save_every=100,\n        eval_every=20',
        'learning_rate=3e-4,\n        lr_schedule="linear",\n        save_every=100,\n        eval_every=0',
        "an evaluation would read 1024 comparisons",
    ),
    Change("407_rlhf_pipeline", "eval_every=10", "eval_every=0", "an answer in the evaluation may have 1024 tokens"),
    Change("407_rlhf_pipeline", "max_tokens=1024", "max_tokens=12", LENGTH),
    Change("407_rlhf_pipeline", "        max_steps=40,", "        max_steps=1,", STEPS),
    Change("407_rlhf_pipeline", "max_tokens=200", "max_tokens=8", LENGTH),
]


@pytest.fixture(scope="module")
def runner(bench: Bench) -> Iterator[TutorialRunner]:
    running = TutorialRunner(bench)
    yield running
    running.close()


@pytest.fixture(scope="module")
def older_sdk(bench: Bench) -> Iterator[TutorialRunner]:
    """Return a runner with tinker 0.35: version 0.36 cannot download archives, which the cookbook still does."""
    running = TutorialRunner(bench, OLDER_SDK)
    yield running
    running.close()


def test_every_tutorial_has_a_test() -> None:
    assert SOURCES.exists(), "the tutorials are not there; `make test-cookbook` downloads them"
    tested = {name.removeprefix("test_") for name in globals() if name[5:8].isdecimal()}
    assert tested == {file.stem for file in SOURCES.glob("*.py")}


# --- with a server ----------------------------------------------------------------------------------------------------


def test_101_hello_tinker(runner: TutorialRunner) -> None:
    run = runner.run("101_hello_tinker", CHANGES)
    assert "  - Qwen/Qwen3.5-9B-Base\n" in run.printed
    assert 1 <= len(run.definitions["completion_tokens"]) <= 50
    assert run.numbers(r"\nSample (\d): The three largest") == [0, 1, 2]


def test_102_first_sft(runner: TutorialRunner) -> None:
    run = runner.run("102_first_sft", CHANGES)
    before, after = run.definitions["losses"]
    assert 0 < after < before < 10
    assert len(run.definitions["big_losses"]) == 1
    assert 0 < run.definitions["big_losses"][0] < 10
    assert run.printed.count("\nA: ") == 4 + 2


def test_103_async_patterns(runner: TutorialRunner) -> None:
    run = runner.run("103_async_patterns", CHANGES)
    assert run.definitions["total_completions"] == 8 * 4
    assert len(run.definitions["sequential_results"]) == len(run.definitions["concurrent_results"]) == 8


def test_104_first_rl(runner: TutorialRunner) -> None:
    (only,) = runner.run("104_first_rl", CHANGES).definitions["metrics_history"]
    assert 0 < only["reward"] < 1


def test_202_loss_functions(runner: TutorialRunner) -> None:
    """Losses must equal their formulas. The fake samples have log-probability -0.7 and advantage 1."""
    run = runner.run("202_loss_functions", CHANGES)
    logprobs = run.definitions["ce_logprobs"][-2:]
    assert run.definitions["is_logprobs"] == run.definitions["ce_logprobs"]
    ratios = [exp(logprob + 0.7) for logprob in logprobs]
    clipped = [[min(ratio, limit) for ratio in ratios] for limit in (1.2, 1.1, 1.5)]
    expected = {
        "cross_entropy": -sum(logprobs),
        "importance_sampling": -sum(ratios),
        "ppo": -sum(clipped[0]),
        "PPO (tight clip)": -sum(clipped[1]),
        "PPO (wide clip)": -sum(clipped[2]),
    }
    for line, loss in expected.items():
        pattern = line.replace("(", r"\(").replace(")", r"\)") + r" +loss:sum = (\S+)"
        assert run.numbers(pattern) == [pytest.approx(loss, abs=1e-4)]
    assert all(map(isfinite, run.numbers(r"cispo +loss:sum = (\S+)")))
    squares = sum(logprob**2 for logprob in run.definitions["ce_logprobs"])
    assert run.numbers(r"'logprob_sq': ([\d.]+)") == [pytest.approx(squares, rel=1e-4)]


def test_203_completers(runner: TutorialRunner) -> None:
    run = runner.run("203_completers", CHANGES)
    assert run.numbers(r"Generated (\d+) tokens")[0] >= 1
    assert "Role: assistant\n" in run.printed
    assert "Parsed score: " in run.printed


def test_204_weights(older_sdk: TutorialRunner) -> None:
    run = older_sdk.run("204_weights", CHANGES)
    assert run.definitions["tinker_version"].startswith("0.35.")
    assert "Found 3 checkpoints:" in run.printed
    adapter = Path(run.definitions["adapter_dir"])
    assert json.loads((adapter / "adapter_config.json").read_text())["r"] == 16
    assert (adapter / "adapter_model.safetensors").exists()


def test_205_evaluations(runner: TutorialRunner) -> None:
    run = runner.run("205_evaluations", CHANGES)
    assert 0 < run.definitions["nll_metrics"]["held_out/nll"] < 10
    assert 0 <= run.definitions["acc_metrics"]["eval/accuracy"] <= 1


def test_301_cookbook_abstractions(runner: TutorialRunner) -> None:
    run = runner.run("301_cookbook_abstractions", CHANGES)
    assert run.numbers(r"Generated (\d+) datums") == [4]
    assert run.numbers(r"Step (\d): mean_reward=\S+, datums=[1-9]") == [0]


def test_302_custom_environment(runner: TutorialRunner) -> None:
    run = runner.run("302_custom_environment", CHANGES)
    assert [row["step"] for row in run.definitions["metrics_history"]] == [0, 1]
    assert run.printed.count("] Format: ") == 3


def test_303_sft_with_config(runner: TutorialRunner) -> None:
    run = runner.run("303_sft_with_config", CHANGES)
    losses = [row["train_mean_nll"] for row in run.metrics("sft-config")]
    assert len(losses) == 7  # 30 examples in batches of 4
    assert all(map(isfinite, losses))
    assert losses[-1] < losses[0]


def test_304_rl_with_config(runner: TutorialRunner) -> None:
    rows = runner.run("304_rl_with_config", CHANGES).metrics("rl-config")
    assert [row["step"] for row in rows] == [0, 1]
    assert all_finite(rows)


def test_406_prompt_distillation(runner: TutorialRunner) -> None:
    run = runner.run("406_prompt_distillation", CHANGES)
    losses = run.numbers(r"Step +\d+: loss = (\S+)")
    assert len(losses) == 10
    assert 0 < losses[-1] < losses[0]
    assert len(run.numbers(r"Student accuracy \(no system prompt\): (\d+)/12")) == 1


def test_407_rlhf_pipeline(runner: TutorialRunner) -> None:
    run = runner.run("407_rlhf_pipeline", CHANGES)
    for stage, metric in (("sft", "train_mean_nll"), ("rm", "train_mean_nll"), ("rl", "env/all/reward/total")):
        rows = run.metrics("rlhf", stage)
        assert all_finite(rows)
        assert any(metric in row for row in rows)
    assert "Stage 3 (RL) complete." in run.printed
    assert "=== RLHF Model ===" in run.printed


def test_501_export_hf(bench: Bench, older_sdk: TutorialRunner) -> None:
    """The merged model computes about what the sampler computes: its weights are bf16, too coarse for a single step."""
    run = older_sdk.run("501_export_hf", CHANGES)
    merged = Path(run.definitions["OUTPUT_PATH"])
    text = "What is Tinker? Tinker is a cloud training API for LLM fine-tuning."
    tokens = AutoTokenizer.from_pretrained(merged)(text)["input_ids"]
    service = tinker.ServiceClient(base_url=bench.url, api_key=bench.environment["TINKER_API_KEY"])
    sampler = service.create_sampling_client(model_path=run.definitions["sampler_path"])
    served = sampler.compute_logprobs(tinker.ModelInput.from_ints(tokens)).result()
    model = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    ids = torch.tensor([tokens])
    with torch.no_grad():
        logprobs = model(ids).logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
    assert logprobs.tolist() == pytest.approx(served[1:], abs=0.5)


def test_502_lora_adapter(older_sdk: TutorialRunner) -> None:
    run = older_sdk.run("502_lora_adapter", CHANGES)
    assert "lm_head" in run.definitions["config"]["target_modules"]
    with safe_open(Path(run.definitions["PEFT_OUTPUT"]) / "adapter_model.safetensors", "pt") as file:
        heads = [name for name in file.keys() if "lm_head" in name]  # noqa: SIM118 — no container
    assert len(heads) == 2


def all_finite(rows: list[dict[str, float]]) -> bool:
    return all(isfinite(value) for row in rows for value in row.values() if not isinstance(value, str))


# --- without a server -------------------------------------------------------------------------------------------------


def test_201_rendering(runner: TutorialRunner) -> None:
    run = runner.run("201_rendering", CHANGES)
    assert run.definitions["termination"] == "stop_sequence"
    assert "--- moonshotai/Kimi-K2.6 (kimi_k26) ---\n<|im_system|>" in run.printed


def test_401_sl_hyperparams(runner: TutorialRunner) -> None:
    assert len(runner.run("401_sl_hyperparams", CHANGES).definitions["configs"]) == 6


def test_402_rl_hyperparams(runner: TutorialRunner) -> None:
    assert "After filtering:  1 groups" in runner.run("402_rl_hyperparams", CHANGES).printed


def test_403_dpo_preferences(runner: TutorialRunner) -> None:
    assert runner.run("403_dpo_preferences", CHANGES).definitions["metrics"]["accuracy"] == 1


def test_404_sequence_extension(runner: TutorialRunner) -> None:
    assert sum(runner.run("404_sequence_extension", CHANGES).definitions["mask"]) == 7


def test_405_multi_agent(runner: TutorialRunner) -> None:
    assert "NamingGameGroupBuilder defined" in runner.run("405_multi_agent", CHANGES).printed


def test_503_publish_hub(runner: TutorialRunner) -> None:
    assert "# my-org/my-finetuned-qwen3" in runner.run("503_publish_hub", CHANGES).printed
