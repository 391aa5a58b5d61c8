"""tinker-cookbook's recipe for image classifiers, unmodified, trains a tiny vision model (``make test-cookbook``)."""

from dataclasses import replace
from math import isfinite

import pytest

from tests.cookbook.recipes.offline_pictures import CLASSES, TEST, TRAIN, VISION_MODEL
from tests.cookbook.recipes.recipe_runs import Bench, Run
from tests.support.servers.exposition import scrape, value

pytestmark = pytest.mark.cookbook

EPOCHS = 8
OPTIONS = {
    "model_name": VISION_MODEL,
    "renderer_name": "qwen3_5_disable_thinking",
    "batch_size": 8,
    "num_epochs": EPOCHS,
    "learning_rate": 5e-3,
    "lora_rank": 16,
    "eval_every": 6,
    "save_every": 6,
    "max_tokens": 24,
    "n_eval": len(CLASSES) * TEST,
}


def test_vlm_classifier(seeing_bench: Bench) -> None:
    """Both evaluators are on: one computes log-probabilities of prompts with images, the other samples from them."""
    started = seeing_bench.start("vlm_classifier.train", "vlm", log_option="experiment_dir", **OPTIONS).finish()
    run = replace(started, folder=next(started.folder.iterdir()))  # the recipe adds a directory with the date
    losses = run.metric("test/nll")
    assert len(losses) >= EPOCHS // 2
    assert losses[max(losses)] < losses[min(losses)] / 4
    assert accuracies(run)
    assert all(0 <= each <= 1 for each in accuracies(run).values())
    assert all(isfinite(number) for row in run.metrics for number in row.values())
    assert run.complaints == []
    # Half of the pictures are flipped in each epoch, so that a picture of the training set is at most two images.
    told = scrape(seeing_bench.url)
    computed = value(told, "twinkle_images_total", features="computed")
    assert 0 < computed <= len(CLASSES) * (2 * TRAIN + TEST)
    assert value(told, "twinkle_images_total", features="reused") > computed


def accuracies(run: Run) -> dict[int, float]:
    return {int(row["step"]): each for row in run.metrics for name, each in row.items() if name.endswith("accuracy")}
