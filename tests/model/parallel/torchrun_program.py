"""The program that torchrun starts in each process: two passes of two models. The first process writes their weights.

python -m torch.distributed.run --nproc-per-node 2 torchrun_program.py MODEL FILE
"""

import sys

import torch

from tests.model.parallel.full_programs import train_full, train_multi_lora

if __name__ == "__main__":
    torch.set_num_threads(1)
    sizes = {"dp_size": 1, "fsdp_size": 2}
    full = train_full(sizes, sys.argv[1])["weights"]
    lora = train_multi_lora(sizes, sys.argv[1])["a"]["weights"]
    if torch.distributed.get_rank() == 0:
        torch.save({name: torch.from_numpy(array) for name, array in {**full, **lora}.items()}, sys.argv[2])
    torch.distributed.destroy_process_group()
