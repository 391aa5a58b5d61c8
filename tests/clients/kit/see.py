"""Train on rows and conversations with images with twinkle-kit's client: ``python see.py URL MODEL FILE``.

Runs in the kit's environment. FILE has the rows, made by a template beforehand, the same as conversations, and prompts
for sampling, as JSON. The last line printed is the result, as JSON.
"""

import json
import sys
from pathlib import Path

from peft import LoraConfig

from twinkle_client import init_twinkle_client
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.sampler import vLLMSampler

sys.tracebacklimit = 0
URL, MODEL, FILE = sys.argv[1:]
given = json.loads(Path(FILE).read_text())

init_twinkle_client(base_url=URL, api_key="kit-sees")
model = MultiLoraTransformersModel(f"hf://{MODEL}")
model.add_adapter_to_model("default", LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
model.set_template("Template")
model.set_processor("InputProcessor", padding_side="right")
model.set_loss("CrossEntropyLoss")
model.set_optimizer("Adam", lr=1e-2)
of_rows = model.forward_only(inputs=given["rows"]).result["logps"]
of_messages = model.forward_only(inputs=given["messages"]).result["logps"]
losses = []
for _ in range(6):
    losses.append(model.forward_backward(inputs=given["rows"]).result["loss"])
    model.clip_grad_and_step()
saved = model.save("seen", is_sampler=True)
sampler = vLLMSampler(f"hf://{MODEL}")
sampler.set_template("Template", model_id=MODEL)
params = {"max_tokens": 3, "temperature": 0.0, "num_samples": 1}
samples = [sampler.sample([each], params, adapter_uri=saved.twinkle_path)[0] for each in given["prompts"]]
tokens = [sample.sequences[0].tokens for sample in samples]
print(json.dumps({"rows": of_rows, "messages": of_messages, "losses": losses, "tokens": tokens}))
