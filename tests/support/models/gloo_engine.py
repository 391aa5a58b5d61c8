"""The checkpoint engine for NCCL, with gloo in its place: it runs on machines without GPUs."""

import torch
import torch.distributed as dist

from twinkle.model.weights.engines import NCCLCheckpointEngine


class GlooCheckpointEngine(NCCLCheckpointEngine):
    def _device(self) -> torch.device:
        return torch.device("cpu")

    def _make_group(self, store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup:
        return dist.ProcessGroupGloo(store, rank, world_size)
