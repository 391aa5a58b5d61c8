"""Train an adapter and sample from it with twinkle-kit's client: ``python train.py URL MODEL``.

Runs in the kit's environment. The last line printed is the result, as JSON.
"""

import json
import sys

from peft import LoraConfig

from twinkle_client import init_twinkle_client
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.sampler import vLLMSampler

sys.tracebacklimit = 0
URL, MODEL = sys.argv[1:]
QUESTION = [{"role": "user", "content": "Which colour?"}]
LESSON = {"messages": [*QUESTION, {"role": "assistant", "content": "blue"}]}
STEPS = 20
FURTHER_STEPS = 4

client = init_twinkle_client(base_url=URL, api_key="kit-trainer")
names = [model.model_name for model in client.get_server_capabilities().supported_models]
runs_before = len(client.list_training_runs())

model = MultiLoraTransformersModel(f"hf://{MODEL}")
model.add_adapter_to_model("default", LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
model.set_template("Template")
model.set_processor("InputProcessor", padding_side="right")
model.set_loss("CrossEntropyLoss")
model.set_optimizer("Adam", lr=1e-2)
configs = model.get_train_configs().result

losses, metrics = [], []
for _ in range(STEPS):
    losses.append(model.forward_backward(inputs=[LESSON, LESSON]).result["loss"])
    model.clip_grad_and_step()
    metrics.append(model.calculate_metric(is_training=True).result)
without = model.forward_only(inputs=[LESSON], disable_lora=True).result["logps"]
saved = model.save("lesson", save_optimizer=True, consumed_train_samples=2 * STEPS)
published = model.save("lesson", is_sampler=True)
went_on = []  # trained without stopping; resume.py does the same steps from the checkpoint
for _ in range(FURTHER_STEPS):
    went_on.append(model.forward_backward(inputs=[LESSON, LESSON]).result["loss"])
    model.clip_grad_and_step()

sampler = vLLMSampler(f"hf://{MODEL}")
sampler.set_template("Template", model_id=MODEL)
params = {"max_tokens": 4, "temperature": 0.0, "logprobs": 1, "num_samples": 1}
(learned,) = sampler.sample(
    [{"messages": QUESTION, "user_data": [["k", 1]]}], params, adapter_uri=published.twinkle_path
)
(resumable,) = sampler.sample([{"messages": QUESTION}], params, adapter_uri=saved.twinkle_path)
(untaught,) = sampler.sample([{"messages": QUESTION}], params)

(run,) = [
    run for run in client.list_training_runs() if saved.twinkle_path.startswith(f"twinkle://{run.training_run_id}/")
]
checkpoints = [checkpoint.twinkle_path for checkpoint in client.list_checkpoints(run.training_run_id)]
capacity = client.get_capacity_info()
client.close()

print(
    json.dumps(
        {
            "names": names,
            "runs_before": runs_before,
            "configs": configs,
            "losses": losses,
            "went_on": went_on,
            "metrics": metrics,
            "without": without,
            "saved": saved.twinkle_path,
            "published": published.twinkle_path,
            "learned": learned.sequences[0].model_dump(),
            "resumable": resumable.sequences[0].tokens,
            "untaught": untaught.sequences[0].tokens,
            "run": run.model_dump(mode="json"),
            "checkpoints": checkpoints,
            "used_loras": capacity.used_loras,
        }
    )
)
