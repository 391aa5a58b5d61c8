"""Loading a model gets further with each of its weights, as others who wait for it can see."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from tests.support.models.reference import toy_llama
from twinkle import hub
from twinkle.model.decoder.loading import load_model
from twinkle.model.transformers.loading import load_for_training
from twinkle.utils.progress import Activity

CPU = torch.device("cpu")
needs_hook = pytest.mark.skipif(
    not hasattr(transformers_logging, "set_tqdm_hook"), reason="this release of transformers does not say how far it is"
)


@needs_hook
@pytest.mark.parametrize("bars", [True, False])
@pytest.mark.parametrize(
    "load",
    [
        lambda folder: load_model(hub.resolve(folder), torch.float32, CPU),
        lambda folder: load_for_training(folder, None, None, CPU, {}),
    ],
    ids=["frozen", "library"],
)
def test_each_weight_is_a_step_forward(
    tmp_path: Path, bars: bool, load: Callable[[Path], PreTrainedModel], capfd: pytest.CaptureFixture[str]
) -> None:
    model = toy_llama()
    model.save_pretrained(tmp_path)
    capfd.readouterr()
    before = transformers_logging.is_progress_bar_enabled()
    (transformers_logging.enable_progress_bar if bars else transformers_logging.disable_progress_bar)()
    try:
        with Activity() as activity:
            loaded = load(tmp_path)
    finally:
        (transformers_logging.enable_progress_bar if before else transformers_logging.disable_progress_bar)()
    weights = dict(model.named_parameters())
    assert activity.changes >= len(weights)
    assert all(torch.equal(found, weights[name]) for name, found in loaded.named_parameters())
    assert ("100%" in capfd.readouterr().err) is bars  # a bar of Transformers knows how many weights there are
    assert transformers_logging.set_tqdm_hook(None) is None
