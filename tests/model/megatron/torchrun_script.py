"""A script as users write it, which torchrun starts in each process: the mesh of ``initialize`` is that of all parts.

python -m torch.distributed.run --nproc-per-node 2 torchrun_script.py MODEL OUTPUT
"""

import sys

import torch

import twinkle
from tests.model.megatron.library_programs import rows
from twinkle import DeviceMesh
from twinkle.dataloader import DataLoader
from twinkle.model import MegatronModel

if __name__ == "__main__":
    torch.set_num_threads(1)
    model_id, output = sys.argv[1:]
    twinkle.initialize(global_device_mesh=DeviceMesh.from_sizes(tp_size=2, device_type="cpu"), seed=3)
    dataloader = DataLoader(dataset=rows(0, 8), batch_size=4, shuffle=False)
    model = MegatronModel(model_id=model_id, mixed_precision="no", device="cpu")
    model.add_adapter_to_model("default", {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"})
    model.set_optimizer(optimizer_cls="default", lr=1e-3, adam_eps=1e-5)
    model.set_lr_scheduler(scheduler_cls="default", lr_warmup_steps=1, lr_decay_steps=len(dataloader) + 1)
    print(twinkle.get_device_placement(), model.get_train_configs())
    for batch in dataloader:
        model.forward_backward(inputs=batch)
        model.clip_grad_and_step()
        print(model.calculate_metric(is_training=True))
    model.save("last", output, save_optimizer=True, consumed_train_samples=8)
    model.save("merged", output, merge_lora=True)
