"""Answers of verbs: the documented types, usable as the values that the library's model returns."""

import copy
import json
import math
import os
import pickle
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from tests.clients.twinkle.stub_server import SESSION
from twinkle_client import LoraConfig, types
from twinkle_client.client.json_body import encode
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.sampler import Sampler

M, S = "/model/m/twinkle", "/sampler/m/twinkle"
ADDRESS = "twinkle://r/weights/n"


@pytest.fixture
def model(stub, client):
    stub.answer(f"{M}/create", {"status": "ok"})
    stub.answer(f"{M}/add_adapter_to_model", {"status": "ok", "adapter_name": f"{SESSION}-a"})
    model = MultiLoraTransformersModel("m", client=client)
    added = model.add_adapter_to_model("a", LoraConfig())
    assert isinstance(added, types.AddAdapterResponse)
    assert added.model_dump() == {"status": "ok", "adapter_name": f"{SESSION}-a"}
    return model


def test_every_verb_returns_its_documented_type(stub, model):
    stub.answer(f"{M}/remove_adapter", None)
    outputs = {"result": {"loss": 1.5, "logps": [[-0.5]]}}
    progress = {"cur_step": 10, "consumed_train_samples": 40, "gradient_accumulation_steps": 2}
    for verb, answer, call, kind in (
        ("forward", outputs, lambda: model.forward(inputs=[]), types.ForwardResponse),
        ("forward_only", outputs, lambda: model.forward_only(inputs=[]), types.ForwardResponse),
        ("forward_backward", outputs, lambda: model.forward_backward(inputs=[]), types.ForwardBackwardResponse),
        ("calculate_loss", {"result": 0.25}, model.calculate_loss, types.CalculateLossResponse),
        ("clip_grad_norm", {"result": "0.51"}, model.clip_grad_norm, types.ClipGradNormResponse),
        ("calculate_metric", {"result": {"loss": "1.5"}}, model.calculate_metric, types.CalculateMetricResponse),
        ("get_train_configs", {"result": "LoRA"}, model.get_train_configs, types.GetTrainConfigsResponse),
        ("get_state_dict", {"result": {"w": [1.0]}}, model.get_state_dict, types.GetStateDictResponse),
        ("save", {"twinkle_path": ADDRESS, "checkpoint_dir": ADDRESS}, model.save, types.SaveResponse),
        (
            "resume_from_checkpoint",
            {"result": progress},
            lambda: model.resume_from_checkpoint(ADDRESS),
            types.TrainingProgressResponse,
        ),
    ):
        stub.answer(f"{M}/{verb}", answer)
        answered = call()
        assert type(answered) is kind, verb
        assert kind.__name__ in types.__all__
        assert answered.model_dump() == json.loads(answered.model_dump_json()) == answer
        assert kind.model_validate(answered.model_dump()) == answered
    stub.answer(f"{M}/clip_grad_and_step", {"result": 0.5})
    step = model.clip_grad_and_step()
    assert isinstance(step, types.ClipGradAndStepResponse)
    assert isinstance(step, types.OkResponse)
    assert step.model_dump() == {"status": "ok", "result": 0.5}
    assert step == 0.5
    assert isinstance(model.remove_adapter("a"), types.RemoveAdapterResponse)


def test_metrics_are_a_dict_for_scripts(stub, model):
    values = {"loss": "1.5", "iters": 3}
    metrics = types.CalculateMetricResponse(result=dict(values))
    assert metrics["loss"] == metrics.get("loss") == metrics.result["loss"] == "1.5"
    assert metrics.get("none", 7) == 7
    assert metrics == values == dict(metrics) == {**metrics} == metrics.copy()
    assert metrics != {"loss": "2"}
    assert list(metrics) == list(metrics.keys()) == ["loss", "iters"]
    assert list(metrics.items()) == list(values.items())
    assert list(metrics.values()) == list(values.values())
    assert "loss" in metrics
    assert "result" not in metrics
    assert (len(metrics), bool(metrics), isinstance(metrics, Mapping)) == (2, True, True)
    assert not types.CalculateMetricResponse(result={})
    assert f"{metrics}" == str(metrics) == str(values)
    assert repr(metrics) == f"CalculateMetricResponse(result={values})"
    assert metrics | {"x": 1} == {**values, "x": 1}
    assert {"loss": 0, "y": 2} | metrics == {"y": 2, **values}
    metrics["reward"] = 0.5
    metrics.update(kl=0.1)
    assert (metrics.pop("reward"), metrics.result["kl"]) == (0.5, 0.1)
    del metrics["kl"]
    assert metrics == values
    with pytest.raises(KeyError):
        metrics["kl"]
    for twin in (copy.deepcopy(metrics), pickle.loads(pickle.dumps(metrics)), metrics.model_copy()):
        assert isinstance(twin, types.CalculateMetricResponse)
        assert twin == metrics
    assert encode({"m": metrics}) == encode({"m": values})
    assert encode({"m": [metrics, np.ones(1)]}) == encode({"m": [values, [1.0]]})


def test_progress_goes_into_a_loader_as_keywords():
    progress = types.TrainingProgressResponse(result={"cur_step": 1, "consumed_train_samples": 4})
    assert (lambda cur_step, consumed_train_samples: (cur_step, consumed_train_samples))(**progress) == (1, 4)


@pytest.mark.parametrize(
    "loss",
    [types.CalculateLossResponse(result=0.25), types.ClipGradNormResponse(result="0.25")],
    ids=["number", "text"],
)
def test_losses_and_norms_count_as_numbers(loss):
    assert float(loss) == loss == 0.25
    assert 0.25 == loss  # noqa: SIM300 - from the other side
    assert (loss != 0.25, loss < 1, loss <= 0.25, loss > 1, loss >= 0.25) == (False, True, True, False, True)
    assert (f"{loss:.3f}", f"{loss}", str(loss), f"{float(loss)!r}") == ("0.250", "0.25", "0.25", "0.25")
    assert "%.2f" % loss == "0.25"  # noqa: UP031 - older scripts format like this
    assert (loss + 1, 1 + loss, loss - 1, 1 - loss, loss * 4, 4 * loss) == (1.25, 1.25, -0.75, 0.75, 1.0, 1.0)
    assert (loss / 2, 1 / loss, 1 // loss, loss // 1, 1 % loss, loss % 1) == (0.125, 4.0, 4.0, 0.0, 0.0, 0.25)
    assert (loss**2, 2**loss, -loss, +loss, abs(-loss)) == (0.0625, 2**0.25, -0.25, 0.25, 0.25)
    assert (round(loss), round(loss, 1), int(loss), math.floor(loss), math.ceil(loss)) == (0, 0.2, 0, 0, 1)
    assert sum([loss, loss]) == loss + loss == 0.5
    assert (max(loss, 0.5), min([loss, 0.5]), math.isfinite(loss), bool(loss)) == (0.5, loss, True, True)
    assert np.mean([loss, loss]) == 0.25
    assert np.float64(1) + loss == 1.25
    assert loss == pytest.approx(0.2500001)
    assert hash(loss) == hash(0.25)
    assert encode({"advantages": [loss]}) == b'{"advantages":[0.25]}'
    with pytest.raises(TypeError):
        loss + "x"


def test_configs_print_as_their_text(capsys):
    configs = types.GetTrainConfigsResponse(result="LoRA\nrank 4")
    print(configs)
    assert capsys.readouterr().out == "LoRA\nrank 4\n"
    assert configs == configs.result == "LoRA\nrank 4"
    assert (configs.splitlines(), "rank" in configs, len(configs)) == (["LoRA", "rank 4"], True, 11)
    assert (configs != "other", configs + "!", "> " + configs) == (True, "LoRA\nrank 4!", "> LoRA\nrank 4")
    assert configs != 3


def test_a_saved_checkpoint_is_taken_wherever_an_address_is(stub, client, model):
    for verb in ("save", "load", "resume_from_checkpoint", "upload_to_hub"):
        stub.answer(f"{M}/{verb}", None)
    stub.answer(f"{M}/save", {"twinkle_path": ADDRESS, "checkpoint_dir": ADDRESS})
    stub.answer(f"{M}/resume_from_checkpoint", {"result": {"cur_step": 1}})
    stub.answer(f"{M}/upload_to_hub", {"request_id": "u"})
    stub.answer(f"{M}/upload_status/u", {"request_id": "u", "status": "completed"})
    stub.answer(f"{S}/create", {"status": "ok"})
    stub.answer(f"{S}/sample", {"samples": []})
    weights = {"training_run_id": "r", "base_model": "m", "model_owner": "o"}
    stub.answer("/twinkle/weights_info", weights)
    saved = model.save("n")
    assert saved == str(saved) == f"{saved}" == os.fspath(saved) == saved.twinkle_path == ADDRESS
    assert saved.startswith("twinkle://")
    assert saved.rsplit("/", 1)[-1] == "n"
    assert {saved: 1}[ADDRESS] == 1
    assert os.path.join(saved, "x") == ADDRESS + "/x" == saved + "/x"
    # A copy on this machine is the path; requests still carry the address.
    copied = saved.model_copy(update={"output_dir": "out/n"})
    assert (str(copied), Path(copied) / "x") == ("out/n", Path("out/n/x"))
    assert copied.model_dump() == saved.model_dump() == {"twinkle_path": ADDRESS, "checkpoint_dir": ADDRESS}
    sampler = Sampler("m", client=client)
    for checkpoint in (saved, copied):
        model.load(checkpoint)
        model.resume_from_checkpoint(checkpoint)
        model.upload_to_hub(checkpoint, "me/mine", "token")
        sampler.sample([], adapter_uri=checkpoint)
        client.get_weights_info(checkpoint)
    assert [body["name"] for body in stub.bodies(f"{M}/load")] == [ADDRESS] * 2
    assert [body["name"] for body in stub.bodies(f"{M}/resume_from_checkpoint")] == [ADDRESS] * 2
    assert [body["checkpoint_dir"] for body in stub.bodies(f"{M}/upload_to_hub")] == [ADDRESS] * 2
    assert [body["adapter_uri"] for body in stub.bodies(f"{S}/sample")] == [ADDRESS] * 2
    assert [body["twinkle_path"] for body in stub.bodies("/twinkle/weights_info")] == [ADDRESS] * 2


def test_outputs_that_are_no_dict_are_an_error_of_the_server(stub, model):
    from twinkle_client import ServerError

    stub.answer(f"{M}/forward", {"result": [1]})
    with pytest.raises(ServerError, match="not a ForwardResponse: result"):
        model.forward(inputs=[])
