"""LoRA with the tinker SDK: the call sequence of the existing script client/tinker/…/lora.py."""

import os

import dotenv

dotenv.load_dotenv(".env")

import numpy as np  # noqa: E402
from modelscope import AutoTokenizer  # noqa: E402

from twinkle import init_tinker_client  # noqa: E402

init_tinker_client()

from tinker import ServiceClient, types  # noqa: E402

MODEL_ID = os.environ.get("TWINKLE_MODEL_ID", "Qwen/Qwen3.5-4B")
BASE_URL = os.environ.get("TWINKLE_SERVER_URL", "http://localhost:8000")
API_KEY = os.environ.get("TWINKLE_SERVER_TOKEN", "EMPTY_TOKEN")
RESUME_PATH = ""
EXAMPLES = [
    {"input": "banana split", "output": "anana-bay plit-say"},
    {"input": "quantum physics", "output": "uantum-qay ysics-phay"},
    {"input": "donut shop", "output": "onut-day op-shay"},
    {"input": "coding wizard", "output": "oding-cay izard-way"},
]

service_client = ServiceClient(base_url=BASE_URL, api_key=API_KEY)
print("Available models:")
for item in service_client.get_server_capabilities().supported_models:
    print("- " + item.model_name)

rest_client = service_client.create_rest_client()
runs = rest_client.list_training_runs(limit=50).result()
for run in runs.training_runs:
    print(run)
    for checkpoint in rest_client.list_checkpoints(run.training_run_id).result().checkpoints:
        print(checkpoint)

if RESUME_PATH:
    training_client = service_client.create_training_client_from_state_with_optimizer(path=RESUME_PATH)
else:
    training_client = service_client.create_lora_training_client(base_model=MODEL_ID)

tokenizer = AutoTokenizer.from_pretrained(MODEL_ID, trust_remote_code=True)


def process_example(example: dict[str, str], tokenizer: AutoTokenizer) -> types.Datum:
    prompt_tokens = tokenizer.encode(f"English: {example['input']}\nPig Latin:", add_special_tokens=True)
    completion_tokens = tokenizer.encode(f" {example['output']}\n\n", add_special_tokens=False)
    tokens = prompt_tokens + completion_tokens
    weights = [0] * len(prompt_tokens) + [1] * len(completion_tokens)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens=tokens[:-1]),
        loss_fn_inputs={"weights": weights[1:], "target_tokens": tokens[1:]},
    )


processed_examples = [process_example(example, tokenizer) for example in EXAMPLES]

for epoch in range(2):
    for batch in range(5):
        fwdbwd_future = training_client.forward_backward(processed_examples, "cross_entropy")
        optim_future = training_client.optim_step(types.AdamParams(learning_rate=1e-4))
        fwdbwd_result = fwdbwd_future.result()
        optim_result = optim_future.result()
        print(f"Epoch {epoch}, Batch {batch}: ", end="")
        logprobs = np.concatenate([output["logprobs"].tolist() for output in fwdbwd_result.loss_fn_outputs])
        weights = np.concatenate([example.loss_fn_inputs["weights"].tolist() for example in processed_examples])
        print(f"Loss per token: {-np.dot(logprobs, weights) / weights.sum():.4f}")
    save_future = training_client.save_state(f"pig-latin-lora-epoch-{epoch}")
    save_result = save_future.result()
    print(f"Saved checkpoint for epoch {epoch} to {save_result.path}")

rest_client.publish_checkpoint_from_tinker_path(save_result.path).result()
print("Published checkpoint")
