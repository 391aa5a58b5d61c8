"""Train and sample on images with an older tinker SDK: ``python see.py URL KEY MODEL IMAGES`` in its environment.

IMAGES: a file of JSON, a list of images with their base64 (data), format and expected_tokens. Prints one line of JSON:
the loss of each step, and samples and scores of a prompt with all images.
"""

import base64
import json
import sys
from pathlib import Path

import tinker
from tinker import types

STEPS = 3


def text(*tokens: int) -> types.EncodedTextChunk:
    return types.EncodedTextChunk(tokens=list(tokens))


def datum(*chunks: types.ModelInputChunk) -> types.Datum:
    """Return a datum that is trained on the tokens behind its images."""
    given = types.ModelInput(chunks=list(chunks))
    seen = given.length
    targets = types.TensorData(data=[0] * (seen - 2) + [7, 8], dtype="int64", shape=[seen])
    weights = types.TensorData(data=[0.0] * (seen - 2) + [1.0, 1.0], dtype="float32", shape=[seen])
    return types.Datum(model_input=given, loss_fn_inputs={"target_tokens": targets, "weights": weights})


url, key, model, file = sys.argv[1:]
images = [
    types.ImageChunk(**{**each, "data": base64.b64decode(each["data"])}) for each in json.loads(Path(file).read_text())
]
service = tinker.ServiceClient(base_url=url, api_key=key)
training = service.create_lora_training_client(base_model=model, rank=4, seed=3)
data = [datum(text(5, 6), *images, text(9, 10)), *(datum(image, text(11, 12)) for image in images)]
losses = []
for _ in range(STEPS):
    passed = training.forward_backward(data, "cross_entropy")
    stepped = training.optim_step(types.AdamParams(learning_rate=1e-2))
    losses.append(passed.result().metrics["loss:sum"])
    stepped.result()
losses.append(training.forward(data, "cross_entropy").result().metrics["loss:sum"])
sampling = training.save_weights_and_get_sampling_client("sees")
prompt = types.ModelInput(chunks=[text(5, 6), *images, text(9)])
drawn = sampling.sample(prompt, 2, types.SamplingParams(max_tokens=3, temperature=0.0)).result()
scores = sampling.compute_logprobs(prompt).result()
print(json.dumps({"losses": losses, "tokens": [each.tokens for each in drawn.sequences], "scores": scores}))
