"""Run one life of a real client in its own process, which may be killed: ``soak_client.py KIND NUMBER URL``.

KIND is ``sdk`` (Tinker's) or ``native`` (ours). The last printed line is its report, as JSON. As in soak_tenants.py,
the number determines what the life does.
"""

import json
import os
import random
import sys
import time

import numpy as np

MODEL = "random://llama-tiny"


def sdk(number: int, url: str) -> tuple[int, str]:
    import tinker
    from tinker import types

    chance = random.Random(number)
    service = tinker.ServiceClient(base_url=url, api_key=f"tml-soak-sdk-{number}")
    training = service.create_lora_training_client(base_model=MODEL, rank=8, seed=number)
    steps = chance.randint(6, 16)
    for step in range(steps):
        rows = [
            types.Datum(
                model_input=types.ModelInput.from_ints(row[:-1].tolist()),
                loss_fn_inputs={"target_tokens": row[1:].tolist(), "weights": [1.0] * (len(row) - 1)},
            )
            for row in _rows(number, step)
        ]
        passed = training.forward_backward(rows, "cross_entropy")
        stepped = training.optim_step(types.AdamParams(learning_rate=1e-3, eps=1e-8))
        passed.result()
        stepped.result()
        if chance.random() < 0.3:
            sampler = training.save_weights_and_get_sampling_client()
            params = types.SamplingParams(max_tokens=8, seed=number)
            sampler.sample(types.ModelInput.from_ints([5, 6, 7]), num_samples=2, sampling_params=params).result()
    return steps, training.save_state("final").result().path


def native(number: int, url: str) -> tuple[int, str]:
    from twinkle_client import LoraConfig, TwinkleClient
    from twinkle_client.model import MultiLoraTransformersModel
    from twinkle_client.reward import GSM8KAccuracyReward
    from twinkle_client.sampler import Sampler

    chance = random.Random(number)
    client = TwinkleClient(url, f"tml-soak-native-{number}", 3.0)
    model = MultiLoraTransformersModel(MODEL, client=client)
    model.add_adapter_to_model("default", LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"), seed=number)
    model.set_optimizer("AdamW", lr=1e-3, eps=1e-8)
    if chance.random() < 0.2:
        GSM8KAccuracyReward(client=client)  # has its own process on the server while the session lives
    sampler = Sampler(model)
    steps = chance.randint(6, 16)
    for step in range(steps):
        rows = [{"input_ids": row, "labels": np.append(row[1:], -100)} for row in _rows(number, step)]
        model.forward_backward(inputs=rows)
        model.clip_grad_and_step()
        if chance.random() < 0.3:
            sampler.sample([{"input_ids": [5, 6, 7]}], {"max_tokens": 8}, adapter_name="default")
    final = str(model.save("final", save_optimizer=True))
    if chance.random() < 0.5:
        client.close()  # the other clients do not close their session, which must expire
    return steps, final


def _rows(number: int, step: int) -> list[np.ndarray]:
    generator = np.random.default_rng([number, step])
    return [generator.integers(1, 200, generator.integers(8, 24)) for _ in range(2)]


if __name__ == "__main__":
    kind, number, url = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    started = time.monotonic()
    steps, final = {"sdk": sdk, "native": native}[kind](number, url)
    seconds = round(time.monotonic() - started, 1)
    print(json.dumps({"kind": kind, "number": number, "steps": steps, "final": final, "seconds": seconds}), flush=True)
    os._exit(0)  # skip exit handlers, which would close the session
