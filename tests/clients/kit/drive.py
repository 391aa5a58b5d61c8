"""Make every call of twinkle-kit's client once, against any server: ``python drive.py URL MODEL``.

Runs in the kit's environment and uses only its public interface. Prints one line of JSON for each step: its name, and
what the client returned or raised.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

from peft import LoraConfig
from requests import HTTPError

from twinkle.dataset import DatasetMeta
from twinkle_client import init_twinkle_client
from twinkle_client.dataloader import DataLoader
from twinkle_client.dataset import Dataset
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.processor import InputProcessor
from twinkle_client.sampler import vLLMSampler

sys.tracebacklimit = 0
URL, MODEL = sys.argv[1:]


def row(tokens: list[int], labels: list[int], **more: Any) -> dict[str, Any]:
    """Return a row as the library's datasets make them: encoded, and with the fields it was encoded from."""
    length = len(tokens)
    masks = {"attention_mask": [1] * length, "position_ids": list(range(length)), "length": length}
    return {"input_ids": tokens, "labels": labels, **masks, **more}


CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
ROWS = [row([1, 2, 3], [2, 3, -100], messages=CHAT), row([4, 5], [5, -100], messages=CHAT)]
SAMPLING = {"max_tokens": 2, "temperature": 1.0, "top_p": 0.95, "num_samples": 1, "logprobs": 1, "seed": 1}


def plain(value: Any) -> Any:
    """Return an answer as JSON: a pydantic model, a list of them, or a value that is JSON already."""
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    return value if isinstance(value, dict | str | int | float | bool | None) else type(value).__name__


def step(name: str, call: Callable[[], Any]) -> Any:
    print(json.dumps({"step": name}), flush=True)
    try:
        value = call()
    except (HTTPError, RuntimeError, StopIteration, TypeError, ValueError) as error:
        print(json.dumps({"step": name, "raised": f"{type(error).__name__}: {error}"}), flush=True)
        return None
    print(json.dumps({"step": name, "returned": plain(value)}), flush=True)
    return value


# --- the gateway ------------------------------------------------------------------------------------------------------
client = init_twinkle_client(base_url=URL, api_key="kit-token", session_metadata={"purpose": "recording"})
step("health_check", client.health_check)
step("get_server_capabilities", client.get_server_capabilities)
step("get_capacity_info", client.get_capacity_info)
step("list_training_runs", client.list_training_runs)
step("list_training_runs all_users", lambda: client.list_training_runs(limit=5, offset=0, all_users=True))

# --- training ---------------------------------------------------------------------------------------------------------
model = MultiLoraTransformersModel(f"ms://{MODEL}")
config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
step("add_adapter", lambda: model.add_adapter_to_model("default", config, gradient_accumulation_steps=1))
step("set_template", lambda: model.set_template("Template", max_length=64))
step("set_processor", lambda: model.set_processor("InputProcessor", padding_side="right"))
step("set_loss", lambda: model.set_loss("CrossEntropyLoss"))
step("set_optimizer", lambda: model.set_optimizer("Adam", lr=1e-2))
step("set_lr_scheduler", lambda: model.set_lr_scheduler("LinearLR", total_iters=4))
step("add_metric", lambda: model.add_metric("Accuracy", is_training=True))
step("get_train_configs", model.get_train_configs)
step("forward_backward", lambda: model.forward_backward(inputs=ROWS))
step("clip_grad_norm", model.clip_grad_norm)
step("step", model.step)
step("zero_grad", model.zero_grad)
step("lr_step", model.lr_step)
reference = step("forward_only", lambda: model.forward_only(inputs=ROWS, disable_lora=True))
step("forward", lambda: model.forward(inputs=ROWS))
step("calculate_loss", model.calculate_loss)
step("backward", model.backward)
step("clip_grad_and_step", model.clip_grad_and_step)
step("calculate_metric", model.calculate_metric)
step("set_loss GRPO", lambda: model.set_loss("GRPOLoss", epsilon=0.2, beta=0.0))
signals = {"advantages": [0.5, -0.5], "old_logps": [[-0.1, -0.2], [-0.3]]}
step("forward_backward GRPO", lambda: model.forward_backward(inputs=ROWS, **signals))
step("clip_grad_and_step GRPO", lambda: model.clip_grad_and_step(max_grad_norm=0.5))
step("set_loss DPO", lambda: model.set_loss("DPOLoss", beta=0.1, loss_type="sigmoid", reference_free=False))
step("add_metric DPO", lambda: model.add_metric("DPOMetric", beta=0.1))
ref_outputs = reference.result if reference else None
step("forward_backward DPO", lambda: model.forward_backward(inputs=ROWS, ref_outputs=ref_outputs))
step("clip_grad_and_step DPO", model.clip_grad_and_step)
step("calculate_metric DPO", model.calculate_metric)
saved = step("save", lambda: model.save("first", save_optimizer=True, consumed_train_samples=4))
published = step("save sampler", lambda: model.save("second", is_sampler=True))
path = saved.twinkle_path if saved else "twinkle://missing/weights/first"
step("load", lambda: model.load(path, load_optimizer=True))
step("resume_from_checkpoint", lambda: model.resume_from_checkpoint(path))
step("resume_from_checkpoint model only", lambda: model.resume_from_checkpoint(path, resume_only_model=True))
step("get_state_dict", model.get_state_dict)
step("apply_patch", lambda: model.apply_patch("NoSuchPatch"))
step("upload_to_hub", lambda: model.upload_to_hub(path, "owner/name", hub_token="hub-token", poll_interval=0.1))
step("upload_to_hub whole answer", lambda: model.upload_to_hub(saved, "owner/name", "hub-token", async_upload=False))

# --- sampling ---------------------------------------------------------------------------------------------------------
sampler = vLLMSampler(f"ms://{MODEL}")
step("sampler set_template", lambda: sampler.set_template("Template", model_id=MODEL))
step("sample", lambda: sampler.sample(ROWS[:1], sampling_params=SAMPLING))
step(
    "sample adapter_uri",
    lambda: sampler.sample(ROWS[1:], SAMPLING, adapter_uri=published.twinkle_path if published else None),
)
step("sample adapter_name", lambda: sampler.sample(ROWS[:1], SAMPLING, adapter_name="default", num_samples=1))

# --- data on the server -----------------------------------------------------------------------------------------------
dataset = step("Dataset", lambda: Dataset(DatasetMeta("", data=[{"messages": CHAT}] * 2)))
if dataset is not None:
    step("Dataset.set_template", lambda: dataset.set_template("Template", model_id=MODEL, max_length=64))
    step("Dataset.encode", dataset.encode)
    step("Dataset.__len__", lambda: len(dataset))
    step("Dataset.__getitem__", lambda: dataset[0])
    step("Dataset.check", dataset.check)
    loader = step("DataLoader", lambda: DataLoader(dataset=dataset, batch_size=2))
    step("DataLoader.__len__", lambda: len(loader))
    step("DataLoader iterated", lambda: list(loader))
    step("DataLoader.set_processor", lambda: loader.set_processor("InputProcessor"))
    step("DataLoader.get_state", loader.get_state)
    step("DataLoader.skip_consumed_samples", lambda: loader.skip_consumed_samples(1))
    step("DataLoader.resume_from_checkpoint", lambda: loader.resume_from_checkpoint(1))
step("Dataset of slices", lambda: Dataset(DatasetMeta("ms://swift/self-cognition", data_slice=range(500))))
processor = step("InputProcessor", InputProcessor)
if processor is not None:
    step("InputProcessor.__call__", lambda: processor(ROWS[:1]))

# --- what exists now --------------------------------------------------------------------------------------------------
run = path.removeprefix("twinkle://").partition("/")[0]
step("get_training_run", lambda: client.get_training_run(run))
step("list_checkpoints", lambda: client.list_checkpoints(run))
step("get_checkpoint_path", lambda: client.get_checkpoint_path(run, "weights/first"))
step("get_weights_info", lambda: client.get_weights_info(path))
step("get_latest_checkpoint_path", lambda: client.get_latest_checkpoint_path(run))
step("find_training_run_by_model", lambda: client.find_training_run_by_model(MODEL))
step("delete_checkpoint", lambda: client.delete_checkpoint(run, "weights/first"))
client.close()
