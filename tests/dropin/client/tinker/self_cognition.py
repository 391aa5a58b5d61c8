"""SFT with the tinker SDK: the call sequence of the existing script client/tinker/…/self_cognition.py."""

import os

import dotenv

dotenv.load_dotenv(".env")

import numpy as np  # noqa: E402
from tqdm import tqdm  # noqa: E402

from twinkle import init_tinker_client  # noqa: E402
from twinkle.data_format import Message, Trajectory  # noqa: E402
from twinkle.dataloader import DataLoader  # noqa: E402
from twinkle.dataset import Dataset, DatasetMeta  # noqa: E402
from twinkle.preprocessor import SelfCognitionProcessor  # noqa: E402
from twinkle.server.common import input_feature_to_datum  # noqa: E402
from twinkle.template import Template  # noqa: E402

init_tinker_client()

from tinker import ServiceClient, types  # noqa: E402

MODEL_ID = os.environ.get("TWINKLE_MODEL_ID", "Qwen/Qwen3.5-4B")
BASE_URL = os.environ.get("TWINKLE_SERVER_URL", "http://localhost:8000")
API_KEY = os.environ.get("TWINKLE_SERVER_TOKEN", "EMPTY_TOKEN")
ROWS = 500


def train() -> None:
    dataset = Dataset(dataset_meta=DatasetMeta("ms://swift/self-cognition", data_slice=range(ROWS)))
    dataset.set_template("Qwen3_5Template", model_id=f"ms://{MODEL_ID}", max_length=256)
    dataset.map(SelfCognitionProcessor("twinkle model", "twinkle team"), load_from_cache_file=False)
    dataset.encode(batched=True, load_from_cache_file=False)
    dataloader = DataLoader(dataset=dataset, batch_size=8)

    service_client = ServiceClient(base_url=BASE_URL, api_key=API_KEY)
    training_client = service_client.create_lora_training_client(base_model=MODEL_ID, rank=16)
    for epoch in range(3):
        print(f"Epoch {epoch}")
        for batch in tqdm(dataloader):
            input_datum = [input_feature_to_datum(input_feature) for input_feature in batch]
            fwdbwd_future = training_client.forward_backward(input_datum, "cross_entropy")
            optim_future = training_client.optim_step(types.AdamParams(learning_rate=1e-4))
            fwdbwd_result = fwdbwd_future.result()
            optim_result = optim_future.result()
            logprobs = np.concatenate([output["logprobs"].tolist() for output in fwdbwd_result.loss_fn_outputs])
            weights = np.concatenate([datum.loss_fn_inputs["weights"].tolist() for datum in input_datum])
            print(f"Loss per token: {-np.dot(logprobs, weights) / weights.sum():.4f}")
            print(f"Optimizer: {optim_result}")
        save_result = training_client.save_state(f"twinkle-lora-{epoch}").result()
        print(f"Saved checkpoint to {save_result.path}")


def evaluate(weight_path: str) -> None:
    service_client = ServiceClient(base_url=BASE_URL, api_key=API_KEY)
    sampling_client = service_client.create_sampling_client(model_path=weight_path, base_model=MODEL_ID)
    trajectory = Trajectory(
        messages=[
            Message(role="system", content="You are a helpful assistant."),
            Message(role="user", content="Who are you?"),
        ]
    )
    template = Template(model_id=f"ms://{MODEL_ID}")
    input_feature = template.encode(trajectory, add_generation_prompt=True)
    prompt = types.ModelInput.from_ints(input_feature["input_ids"].tolist())
    params = types.SamplingParams(max_tokens=50, temperature=0.2, stop=["\n"])
    result = sampling_client.sample(prompt=prompt, sampling_params=params, num_samples=8).result()
    for number, sequence in enumerate(result.sequences):
        print(f"{number}: {template.decode(sequence.tokens)!r}")


if __name__ == "__main__":
    train()
