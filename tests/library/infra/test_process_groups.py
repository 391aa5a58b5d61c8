"""Groups of torch.distributed along the dimensions of a mesh, in four processes."""

import os
import subprocess
import sys

from twinkle import find_free_port

SCRIPT = """
import os
import torch
import torch.distributed as dist
from twinkle import DeviceMesh

def total(group):
    value = torch.tensor(10 ** dist.get_rank())
    dist.all_reduce(value, group=group)
    return value.item()

def run(rank):
    os.environ["RANK"] = str(rank)
    dist.init_process_group("gloo")
    mesh = DeviceMesh.from_sizes(dp_size=2, tp_size=2, device_type="cpu")
    dp, tp = mesh.get_dim_group("dp"), mesh.get_dim_group("tp")
    both = mesh.create_process_group(["dp", "tp"])
    assert mesh.get_dim_group("dp") is dp
    torch_mesh = mesh.to_torch_device_mesh()
    found = rank, total(dp), total(tp), total(both), torch_mesh.get_local_rank("dp"), torch_mesh["tp"].size()
    os.write(1, (" ".join(map(str, found)) + "\\n").encode())  # at once: four processes write to one pipe
    dist.destroy_process_group()

children = []
for rank in range(4):  # torch is imported once for all
    child = os.fork()
    if child == 0:
        run(rank)
        os._exit(0)
    children.append(child)
assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0, 0]
"""


def test_groups_of_four_processes():
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port("127.0.0.1")), "WORLD_SIZE": "4"}
    environment = {**os.environ, **environment, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300, check=True
    )
    assert sorted(done.stdout.splitlines()) == [
        "0 101 11 1111 0 2",
        "1 1010 11 1111 0 2",
        "2 101 1100 1111 1 2",
        "3 1010 1100 1111 1 2",
    ]
