"""Resume from a checkpoint in a new session with twinkle-kit's client: ``python resume.py URL MODEL PATH``.

Runs in the kit's environment. The data are on the server. The last line printed is the result, as JSON.
"""

import json
import sys

from peft import LoraConfig

from twinkle.dataset import DatasetMeta
from twinkle_client import init_twinkle_client
from twinkle_client.dataloader import DataLoader
from twinkle_client.dataset import Dataset
from twinkle_client.model import MultiLoraTransformersModel

sys.tracebacklimit = 0
URL, MODEL, PATH = sys.argv[1:]
LESSON = {"messages": [{"role": "user", "content": "Which colour?"}, {"role": "assistant", "content": "blue"}]}

client = init_twinkle_client(base_url=URL, api_key="kit-trainer")
info = client.get_weights_info(PATH)

dataset = Dataset(DatasetMeta("", data=[LESSON] * 4))
dataset.set_template("Template", model_id=MODEL, max_length=64)
dataset.encode()
loader = DataLoader(dataset=dataset, batch_size=2)

model = MultiLoraTransformersModel(f"hf://{MODEL}")
model.add_adapter_to_model("default", LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
model.set_loss("CrossEntropyLoss")
model.set_optimizer("Adam", lr=1e-2)
progress = model.resume_from_checkpoint(PATH)

losses = []
for _ in range(2):
    for batch in loader:
        losses.append(model.forward_backward(inputs=batch).result["loss"])
        model.clip_grad_and_step()
model.save("further", save_optimizer=True, consumed_train_samples=progress["consumed_train_samples"] + 2 * len(losses))
client.close()

print(
    json.dumps(
        {
            "info": info.model_dump(),
            "rows": len(dataset),
            "batches": len(loader),
            "row": dataset[0],
            "progress": progress,
            "losses": losses,
        }
    )
)
