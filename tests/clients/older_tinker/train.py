"""Train and sample with an older tinker SDK: ``python train.py URL KEY MODEL`` in the environment of that SDK.

Prints one line of JSON: the loss of each step, and samples from the trained weights.
"""

import json
import sys

import tinker
from tinker import types

ROWS = [[5, 9, 13, 21, 34], [7, 11, 18, 29, 47]]
STEPS = 4


def datum(row: list[int]) -> types.Datum:
    targets = types.TensorData(data=row[1:], dtype="int64", shape=[len(row) - 1])
    weights = types.TensorData(data=[1.0] * (len(row) - 1), dtype="float32", shape=[len(row) - 1])
    inputs = {"target_tokens": targets, "weights": weights}
    return types.Datum(model_input=types.ModelInput.from_ints(row[:-1]), loss_fn_inputs=inputs)


url, key, model = sys.argv[1:]
service = tinker.ServiceClient(base_url=url, api_key=key)
assert model in [each.model_name for each in service.get_server_capabilities().supported_models]
training = service.create_lora_training_client(base_model=model, rank=4, seed=3)
data = [datum(row) for row in ROWS]
losses = [training.forward(data, "cross_entropy").result().metrics["loss:sum"]]
for _ in range(STEPS):
    passed = training.forward_backward(data, "cross_entropy")
    stepped = training.optim_step(types.AdamParams(learning_rate=1e-3))
    losses.append(passed.result().metrics["loss:sum"])
    stepped.result()
path = training.save_state("old").result().path
resumed = service.create_training_client_from_state_with_optimizer(path)
losses.append(resumed.forward(data, "cross_entropy").result().metrics["loss:sum"])
sampling = training.save_weights_and_get_sampling_client("sampler")
prompt = types.ModelInput.from_ints(ROWS[0][:3])
drawn = sampling.sample(prompt, 2, types.SamplingParams(max_tokens=3, temperature=0.0)).result()
scores = sampling.compute_logprobs(types.ModelInput.from_ints(ROWS[0])).result()
print(json.dumps({"losses": losses, "tokens": [each.tokens for each in drawn.sequences], "scores": scores}))
