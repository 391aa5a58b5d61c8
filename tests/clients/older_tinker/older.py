"""Use what older tinker SDKs offer beyond train.py: ``python older.py URL KEY MODEL``, in such an SDK's environment.

DPO against the model without its adapter, the address of an archive, and unloading the model. Prints one line of JSON.
"""

import json
import sys
import time

import tinker
from tinker import types
from tinker.lib.api_future_impl import _APIFuture
from tinker.lib.client_connection_pool_type import ClientConnectionPoolType

PAIRS = [([5, 9, 13, 21], [0.0, 1.0, 1.0]), ([5, 9, 40], [0.0, 1.0])]
STEPS = 3


def datum(tokens: list[int], weights: list[float], ref_logps: list[float] | None = None) -> types.Datum:
    def floats(values: list[float]) -> types.TensorData:
        return types.TensorData(data=values, dtype="float32", shape=[len(values)])

    targets = types.TensorData(data=tokens[1:], dtype="int64", shape=[len(tokens) - 1])
    inputs = {"target_tokens": targets, "weights": floats(weights)}
    if ref_logps is not None:
        inputs["ref_logps"] = floats(ref_logps)
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def reference(training: tinker.TrainingClient) -> types.ForwardBackwardOutput:
    data = [datum(*pair) for pair in PAIRS]
    return training.forward(data, "cross_entropy", {"disable_lora": 1.0}).result()


url, key, model = sys.argv[1:]
service = tinker.ServiceClient(base_url=url, api_key=key)
training = service.create_lora_training_client(base_model=model, rank=4, seed=3)
first = reference(training)
ref_logps = [output["logprobs"].tolist() for output in first.loss_fn_outputs]
data = [datum(*pair, ref) for pair, ref in zip(PAIRS, ref_logps, strict=True)]
metrics = []
for _ in range(STEPS):
    config = {"dpo_beta": 0.5, "dpo_sft_weight": 0.1}
    passed = training.forward_backward(data, "importance_sampling", config)
    stepped = training.optim_step(types.AdamParams(learning_rate=1e-3))
    metrics.append(passed.result().metrics)
    stepped.result()
last = [output["logprobs"].tolist() for output in reference(training).loss_fn_outputs]
path = training.save_state("older").result().path
archive = service.create_rest_client().get_checkpoint_archive_url_from_tinker_path(path).result()


async def unload(model_id: str) -> types.UntypedAPIFuture:
    with service.holder.aclient(ClientConnectionPoolType.TRAIN) as client:
        return await client.models.unload(request=types.UnloadModelRequest(model_id=model_id))


# These SDKs know the request but have no method for it. This is how their other methods wait.
asked = service.holder.run_coroutine_threadsafe(unload(training.model_id)).result()
unloaded = _APIFuture(types.UnloadModelResponse, service.holder, asked, time.time(), "UnloadModel").result()
try:
    training.forward([datum(*pair) for pair in PAIRS], "cross_entropy").result()
    said = ""
except tinker.RequestFailedError as error:
    said = str(error)
print(
    json.dumps(
        {
            "outputs": [{name: each.tolist() for name, each in one.items()} for one in first.loss_fn_outputs],
            "reference": [ref_logps, last],
            "metrics": metrics,
            "path": path,
            "archive": archive.url,
            "expires": archive.expires.isoformat(),
            "model_id": training.model_id,
            "unloaded": unloaded.model_dump(),
            "said": said,
        }
    )
)
