"""The processes of a Megatron model, and the groups of this process.

Ranks are ordered as Megatron orders them: tensor parallel ranks are neighbours, then data parallel ranks, then pipeline
stages. Experts are spread over the ranks of one stage (tp × dp), ``ep`` neighbours at a time.

megatron-core keeps its process groups in variables of its module. So all Megatron models of one process have the same
mesh; :func:`join_mesh` refuses another one.
"""

from dataclasses import dataclass
from math import ceil, lcm

import torch
import torch.distributed as dist

from twinkle.environment import read_environment
from twinkle.errors import UnsupportedError
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.model.megatron.mcore import ProcessGroupCollection, parallel_state
from twinkle.model.megatron.sizes import ONE_PROCESS, MeshSizes, read_sizes
from twinkle.model.parallel import ALONE, ProcessRanks, Ranks, join_processes, when_groups_end

__all__ = ["MegatronMesh", "join_mesh", "leave_mesh"]


@dataclass(frozen=True)
class MegatronMesh:
    """The sizes of a mesh and the groups of this process. Each group has this process in it.

    ``tp``: the ranks that hold the cuts of the same layers. ``pp``: one rank of each stage, in their order. ``dp``: the
    ranks that hold the same cut. ``model``: the ranks of one replica (tp × pp). ``ep``: the ranks among which the
    experts of a layer are divided. ``same_experts``: the ranks that hold the same experts as this one. ``ends``: the
    ranks of the first and the last stage that hold the same part of a tied embedding. ``world``: all.
    """

    sizes: MeshSizes = ONE_PROCESS
    sequence_parallel: bool = False
    world: Ranks = ALONE
    tp: Ranks = ALONE
    pp: Ranks = ALONE
    dp: Ranks = ALONE
    model: Ranks = ALONE
    ep: Ranks = ALONE
    same_experts: Ranks = ALONE
    ends: Ranks = ALONE

    @property
    def is_first(self) -> bool:
        """Return whether this process runs the first pipeline stage, which has the embedding."""
        return self.pp.number == 0

    @property
    def is_last(self) -> bool:
        """Return whether this process runs the last pipeline stage, which has the head."""
        return self.pp.number == self.pp.size - 1

    @property
    def spreads_experts(self) -> bool:
        """Return whether the experts of a layer are divided among ranks with different data."""
        return self.sizes.tp % self.sizes.ep > 0

    @property
    def data_block(self) -> int:
        """Return how many neighbours of ``dp`` compute each other's experts: those whose groups of experts overlap."""
        return lcm(self.sizes.tp, self.sizes.ep) // self.sizes.tp

    def process_groups(self) -> ProcessGroupCollection:
        """Return the groups that megatron-core's modules ask for."""
        groups = ProcessGroupCollection()
        groups.tp, groups.pp, groups.cp, groups.embd = self.tp.group, self.pp.group, None, None
        return groups


def join_mesh(device_mesh: DeviceMesh | None, device: torch.device) -> MegatronMesh:
    """Return the groups of this process. With several processes all must call it: groups are made together.

    Without a mesh, or for a mesh of one process, there are none.
    """
    sizes = ONE_PROCESS if device_mesh is None else read_sizes(device_mesh)
    if device_mesh is None or sizes.world == 1:
        return MegatronMesh()
    join_processes(device, sizes.world)
    if parallel_state.model_parallel_is_initialized():
        _check_same(sizes)
    else:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=sizes.tp,
            pipeline_model_parallel_size=sizes.pp,
            expert_model_parallel_size=sizes.ep,
            expert_tensor_parallel_size=1,
            create_gloo_process_groups=False,  # its groups accept host tensors already
            distributed_timeout_minutes=ceil(read_environment().dist_timeout_seconds / 60),
        )
        when_groups_end(parallel_state.destroy_model_parallel)
    whole = dist.group.WORLD
    assert whole is not None
    return MegatronMesh(
        sizes,
        device_mesh.sequence_parallel and sizes.tp > 1,
        ProcessRanks(whole),
        _ranks(parallel_state.get_tensor_model_parallel_group()),
        _ranks(parallel_state.get_pipeline_model_parallel_group()),
        _ranks(parallel_state.get_data_parallel_group()),
        _ranks(parallel_state.get_model_parallel_group()),
        _ranks(parallel_state.get_expert_model_parallel_group()),
        _ranks(parallel_state.get_expert_data_parallel_group()),
        _ranks(parallel_state.get_embedding_group(check_initialized=False)),
    )


def leave_mesh() -> None:
    """Forget the process groups of this process's mesh, so that a model with another mesh can be built.

    All processes call it. Models that use the old mesh must not be used any more.
    """
    if not parallel_state.model_parallel_is_initialized():
        return
    dist.barrier()  # a group must not be closed while another process still receives from it
    groups = [group for group in parallel_state._global_process_group_list or [] if group is not None]
    parallel_state.destroy_model_parallel()
    for group in groups:  # megatron-core forgets them, but each has threads and connections, which would stay
        dist.destroy_process_group(group)


def _check_same(sizes: MeshSizes) -> None:
    tp = parallel_state.get_tensor_model_parallel_world_size()
    pp = parallel_state.get_pipeline_model_parallel_world_size()
    ep = parallel_state.get_expert_model_parallel_world_size()
    present = MeshSizes(dist.get_world_size() // (tp * pp), tp, pp, ep)
    if sizes != present:
        raise UnsupportedError(
            f"device_mesh: got {sizes}, but this process has a Megatron model with {present}; megatron-core has one "
            "mesh in a process: use the same sizes, or other processes"
        )


def _ranks(group: dist.ProcessGroup | None) -> Ranks:
    """Return the ranks of a group; a group of one process communicates nothing. None: this process is in none."""
    return ALONE if group is None or dist.get_world_size(group) == 1 else ProcessRanks(group)
