"""Training that stops in the middle of an epoch and resumes gives the same results as without the stop."""

import peft
import pytest
import torch

from tests.support.models.plain_training import MODEL
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import MultiLoraTransformersModel, TransformersModel, TwinkleModel

ADAPTER = "default"


def loader() -> DataLoader:
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{i}+{i}?"},
                {"role": "assistant", "content": f"{2 * i}" * (1 + i % 3)},
            ]
        }
        for i in range(20)
    ]
    dataset = Dataset(DatasetMeta(data=rows))
    dataset.set_template("Template", model_id=MODEL, max_length=64)
    dataset.encode()
    return DataLoader(dataset=dataset, batch_size=4)


def make(model_cls: type[TwinkleModel]) -> TwinkleModel:
    model = model_cls(model_id=MODEL, mixed_precision="fp32", device="cpu")
    torch.manual_seed(0)
    model.add_adapter_to_model(ADAPTER, peft.LoraConfig(r=4, target_modules="all-linear"))
    model.set_optimizer("AdamW", lr=1e-2, adapter_name=ADAPTER)
    model.set_lr_scheduler("CosineWarmupScheduler", num_warmup_steps=1, num_training_steps=5, adapter_name=ADAPTER)
    return model


def step(model: TwinkleModel, batch: object) -> float:
    loss = model.forward_backward(inputs=batch, adapter_name=ADAPTER)["loss"]
    model.clip_grad_and_step(adapter_name=ADAPTER)
    return loss


@pytest.mark.parametrize("model_cls", [MultiLoraTransformersModel, TransformersModel])
def test_the_rest_of_the_epoch_has_the_same_losses(model_cls, tmp_path):
    model, batches, losses = make(model_cls), loader(), []
    for number, batch in enumerate(batches):
        losses.append(step(model, batch))
        if number == 1:
            seen = batches.get_state()["consumed_train_samples"]
            where = model.save(
                "mid", str(tmp_path), adapter_name=ADAPTER, save_optimizer=True, consumed_train_samples=seen
            )
    other, rest = make(model_cls), loader()
    progress = other.resume_from_checkpoint(where, adapter_name=ADAPTER)
    assert progress["consumed_train_samples"] == 8
    rest.resume_from_checkpoint(progress["consumed_train_samples"])
    assert [step(other, batch) for batch in rest] == losses[2:]
    assert len(losses) == 5
