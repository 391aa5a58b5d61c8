"""Sampling with the tinker SDK: the call sequence of the existing script client/tinker/…/sample.py."""

import os

import dotenv

dotenv.load_dotenv(".env")

from twinkle import init_tinker_client  # noqa: E402
from twinkle.data_format import Message, Trajectory  # noqa: E402
from twinkle.template import Qwen3_5Template  # noqa: E402

init_tinker_client()

from tinker import ServiceClient, types  # noqa: E402

MODEL_ID = os.environ.get("TWINKLE_MODEL_ID", "Qwen/Qwen3.5-4B")
BASE_URL = os.environ.get("TWINKLE_SERVER_URL", "http://localhost:8000")
API_KEY = os.environ.get("TWINKLE_SERVER_TOKEN", "EMPTY_TOKEN")
WEIGHT_PATH = "twinkle://20260409_202355-Qwen_Qwen3_5-4B-d0360fdb/sampler_weights/20260409_202639"

service_client = ServiceClient(base_url=BASE_URL, api_key=API_KEY)
sampling_client = service_client.create_sampling_client(model_path=WEIGHT_PATH, base_model=MODEL_ID)

template = Qwen3_5Template(model_id=f"ms://{MODEL_ID}")
trajectory = Trajectory(
    messages=[
        Message(role="system", content="You are a helpful assistant."),
        Message(role="user", content="Who are you?"),
    ]
)
input_feature = template.encode(trajectory, add_generation_prompt=True)
prompt = types.ModelInput.from_ints(input_feature["input_ids"].tolist())
params = types.SamplingParams(max_tokens=128, temperature=0.7, stop=["\n"])

print("Sampling...")
result = sampling_client.sample(prompt=prompt, sampling_params=params, num_samples=1).result()
print("Responses:")
for number, sequence in enumerate(result.sequences):
    print(f"{number}: {template.decode(sequence.tokens)!r}")
