"""All parameters through twinkle_client: the numbers of a plain loop, and a new run that has nothing of the last."""

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.clients.all_parameters.conftest import TOLERANCE, PlainLoop, files_of, rows_of
from tests.support.servers.running import Server
from twinkle_client import InvalidRequestError, TwinkleClient
from twinkle_client.errors import TwinkleClientError
from twinkle_client.model import MultiLoraTransformersModel, TransformersModel

Native = Callable[[str], TwinkleClient]

MODEL = "tiny-full"
CHAT = [{"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]}]
ADAMW = {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-6}


def features(rows: list[list[int]]) -> list[dict[str, list[int]]]:
    return [{"input_ids": row[:-1], "labels": row[1:]} for row in rows]


def begin(client: TwinkleClient, **options: int) -> MultiLoraTransformersModel:
    model = MultiLoraTransformersModel(MODEL, client=client)
    model.add_adapter_to_model("policy", None, **options)
    return model


def targets(rows: list[list[int]]) -> int:
    return sum(len(row) - 1 for row in rows)


def adamw(parameters: Iterable[torch.nn.Parameter], **options: float) -> torch.optim.Optimizer:
    """Return an AdamW that does not decay norms, which are the parameters of one dimension here."""
    weights: list[torch.nn.Parameter] = list(parameters)
    norms = {"params": [each for each in weights if each.ndim == 1], "weight_decay": 0.0}
    return torch.optim.AdamW([{"params": [each for each in weights if each.ndim > 1]}, norms], **options)


class PlainWindows(PlainLoop):
    """The plain loop with the mean of each pass, windows of two passes, clipping and a schedule."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, adamw, **ADAMW)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, start_factor=0.25, total_iters=4)

    def window(self, *batches: list[list[int]]) -> tuple[list[float], float]:
        """Return the loss of each pass, the mean of its targets, and the norm of the gradient before clipping."""
        losses = []
        for rows in batches:
            share = 1 / targets(rows) / len(batches)
            losses.append(self.add_gradient(rows, share) / targets(rows))
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5))
        self.step()
        self.schedule.step()
        return losses, norm


def window(model: MultiLoraTransformersModel, *batches: list[list[int]]) -> tuple[list[float], float]:
    losses = []
    norms = []
    for rows in batches:
        losses.append(float(model.forward_backward(features(rows))["loss"]))
        norms.append(model.clip_grad_and_step(max_grad_norm=0.5))
    assert norms[:-1] == [None] * (len(batches) - 1)  # gradient_accumulation_steps: no step before the window's end
    assert norms[-1] is not None
    return losses, float(str(norms[-1]))


def set_up(model: MultiLoraTransformersModel) -> None:
    model.set_optimizer("AdamW", **ADAMW)
    model.set_lr_scheduler("LinearLR", start_factor=0.25, total_iters=4)
    model.set_loss("CrossEntropyLoss", reduction="mean")


def assert_same(found: tuple[list[float], float], expected: tuple[list[float], float]) -> None:
    assert found[0] == pytest.approx(expected[0], abs=TOLERANCE)
    assert found[1] == pytest.approx(expected[1], rel=1e-3)  # the server answers with few digits


def test_a_run_is_a_plain_loop(server: Server, native: Native, folder: Path) -> None:
    """Losses, windows of two passes, clipping, a schedule; resuming restores weights, optimizer and schedule."""
    plain, client = PlainWindows(folder), native("numbers")
    model = begin(client, gradient_accumulation_steps=2)
    set_up(model)
    for seed in range(3):
        batches = rows_of(seed), rows_of(50 + seed)
        assert_same(window(model, *batches), plain.window(*batches))
    saved = model.save("middle", save_optimizer=True, consumed_train_samples=12)
    assert saved is not None
    plain.assert_same_weights(files_of(server, saved.twinkle_path))
    batches = rows_of(8), rows_of(58)
    before = plain_state(plain)
    expected = plain.window(*batches)
    assert_same(window(model, *batches), expected)
    progress = model.resume_from_checkpoint(saved)
    assert (progress["cur_step"], progress["consumed_train_samples"]) == (6, 12)
    assert_same(window(model, *batches), expected)
    # Weights only: the moments and the schedule stay those of the last window.
    model.load(saved)
    plain.model.load_state_dict(before)
    assert_same(window(model, *batches), plain.window(*batches))
    model.remove_adapter("policy")

    # A new run of another session goes on from the checkpoint.
    plain = PlainWindows(folder)
    for seed in range(3):
        plain.window(rows_of(seed), rows_of(50 + seed))
    again = begin(native("numbers"), gradient_accumulation_steps=2)
    set_up(again)
    again.resume_from_checkpoint(saved)
    assert_same(window(again, *batches), expected)
    plain.window(*batches)
    end = again.save("end")
    assert end is not None
    plain.assert_same_weights(files_of(server, end.twinkle_path))


def plain_state(plain: PlainLoop) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in plain.model.state_dict().items()}


def test_nothing_of_a_run_is_left_for_the_next(native: Native) -> None:
    first = begin(native("before"), gradient_accumulation_steps=2)
    described = str(first.get_train_configs())
    fresh = first.forward_only(features(rows_of(0)))["logps"], first.forward_only(CHAT)["logps"]
    set_up(first)
    first.set_template("Template", default_system="Be brief.")
    assert first.forward_only(CHAT)["logps"] != fresh[1]
    first.add_metric("Accuracy", is_training=True)
    window(first, rows_of(0), rows_of(1))
    first.forward_backward(features(rows_of(2)))  # a gradient, and metrics that nobody has read
    other = MultiLoraTransformersModel(MODEL, client=native("after"))
    with pytest.raises(TwinkleClientError, match="it has been held since") as caught:
        other.add_adapter_to_model("policy", None, gradient_accumulation_steps=2)
    assert getattr(caught.value, "status", None) == 409
    assert first.client.session_id not in str(caught.value)
    first.remove_adapter("policy")
    other.add_adapter_to_model("policy", None, gradient_accumulation_steps=2)
    assert str(other.get_train_configs()) == described
    assert (other.forward_only(features(rows_of(0)))["logps"], other.forward_only(CHAT)["logps"]) == fresh
    with pytest.raises(InvalidRequestError, match="set_optimizer"):
        other.step()
    other.zero_grad()
    metrics = other.calculate_metric(is_training=True)
    assert "accuracy" not in metrics


def test_transformers_model_begins_a_run_by_itself(native: Native, folder: Path) -> None:
    plain = PlainLoop(folder, adamw, **ADAMW)
    model = TransformersModel(model_id=MODEL, client=native("transformers"))
    with torch.no_grad():
        base = [plain.logprobs(row).tolist() for row in rows_of(0)]
    for found, expected in zip(model.forward_only(features(rows_of(0)))["logps"], base, strict=True):
        assert found[: len(expected)] == pytest.approx(expected, abs=TOLERANCE)
    assert model.adapter_name == "default"
    model.set_optimizer("AdamW", **ADAMW)
    model.set_loss("CrossEntropyLoss", reduction="sum")
    for seed in range(3):
        loss = float(model.forward_backward(features(rows_of(seed)))["loss"])
        model.clip_grad_and_step(max_grad_norm=1e9)
        # The gradient of a sum is divided by the number of targets, as in the library.
        assert loss == pytest.approx(plain.add_gradient(rows_of(seed), 1 / targets(rows_of(seed))), rel=TOLERANCE)
        plain.step()
    model.remove_adapter()


def test_what_needs_the_base_model_is_refused(native: Native) -> None:
    client = native("refused")
    model = MultiLoraTransformersModel(MODEL, client=client)
    assert model.train_mode == "full"
    with pytest.raises(InvalidRequestError, match="served with train_mode: full"):
        model.forward_only(features(rows_of(0)))
    with pytest.raises(InvalidRequestError, match="config: got a LoRA configuration, allowed: null"):
        model.add_adapter_to_model("policy", {"r": 4, "target_modules": "all-linear"})
    model.add_adapter_to_model("policy", None)
    with pytest.raises(InvalidRequestError, match="disable_lora"):
        model.forward_only(features(rows_of(0)), disable_lora=True)


def test_a_session_that_ends_frees_the_model(native: Native) -> None:
    client = native("leaves")
    begin(client)
    client.close()
    begin(native("comes"))


def test_all_parameters_are_described_and_read(native: Native, folder: Path) -> None:
    model = begin(native("state"))
    weights, expected = model.get_state_dict(), load_file(folder / "model.safetensors")
    count = sum(tensor.numel() for tensor in expected.values())
    assert f"trained: {count:,} parameters in {len(expected)} tensors" in str(model.get_train_configs())
    assert {name: torch.tensor(weights[name]).shape for name in expected} == {
        name: tensor.shape for name, tensor in expected.items()
    }
    assert torch.equal(torch.tensor(weights["model.norm.weight"]), expected["model.norm.weight"])
