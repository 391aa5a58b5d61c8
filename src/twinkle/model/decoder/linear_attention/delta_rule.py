"""The gated delta rule over packed sequences in plain torch, chunk by chunk, in fp32, with autograd.

Each value head has a state S (D, E), which is 0 at the beginning of every sequence. Row t does

    S ← exp(g_t) S;  S ← S + k_t u_tᵀ with u_t = β_t (v_t − Sᵀ k_t);  o_t = Sᵀ q_t / √D

with q and k of length 1. A key head serves neighbouring value heads. Within a chunk, with c the running sum of g and S
the state before the chunk, the corrections u solve a triangular system:

    (1 + A) u = β v − β exp(c) (k S),   A_ij = β_i exp(c_i − c_j) k_i·k_j for j < i

They are linear in S, so the systems of all chunks of all sequences are solved at once. Only the products with S follow
the sequence, and each step computes all sequences that are long enough.

Shapes: T rows, K key heads, V value heads, G value heads of a key head, D and E dimensions of keys and values, n
chunks, C rows of a chunk, N sequences.
"""

import torch
from torch import Tensor

from twinkle.model.decoder.linear_attention.bounds import Bounds

_EPS = 1e-6


def gated_delta_rule(
    q_TKD: Tensor,
    k_TKD: Tensor,
    v_TVE: Tensor,
    g_TV: Tensor,
    beta_TV: Tensor,
    bounds: Bounds,
    states_NVDE: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs (T, V, E) in the dtype of v, and the states after the last rows (N, V, D, E) in fp32.

    ``states_NVDE``: the states before the first rows; None: they are 0.
    """
    key_heads, size = q_TKD.shape[1:]
    q = _in_chunks(_unit(q_TKD) * size**-0.5, bounds).unsqueeze(2)  # (n, K, 1, C, D)
    k = _in_chunks(_unit(k_TKD), bounds).unsqueeze(2)
    v = _in_chunks(v_TVE.float(), bounds).unflatten(1, (key_heads, -1))  # (n, K, G, C, E)
    # In fp32, differences of sums in the hundreds would be off by 1e-5, and more in long chunks than in short ones.
    sums = _in_chunks(g_TV.double().unsqueeze(2), bounds).unflatten(1, (key_heads, -1)).cumsum(3)  # (n, K, G, C, 1)
    beta = _in_chunks(beta_TV.float().unsqueeze(2), bounds).unflatten(1, (key_heads, -1))
    later = torch.ones(bounds.chunk, bounds.chunk, dtype=torch.bool, device=v.device).triu(1)
    decay = (sums - sums.transpose(3, 4)).float().masked_fill(later, float("-inf")).exp()  # (n, K, G, C, C)
    grown = sums.float().exp()
    system = (k @ k.transpose(3, 4)) * decay * beta
    known = torch.cat([v * beta, k * (grown * beta)], 4)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    own, of_state = solved.split([v.shape[4], size], 4)
    end = sums[:, :, :, -1:]
    out, states = _scan(
        own.flatten(1, 2),
        torch.cat([of_state, q * grown], 3).flatten(1, 2),
        ((q @ k.transpose(3, 4)) * decay).flatten(1, 2),
        (k * (end - sums).float().exp()).flatten(1, 2),
        end.float().exp().flatten(1, 2),
        bounds,
        None if states_NVDE is None else states_NVDE[list(bounds.order)].float(),
    )
    out_TVE = out.transpose(1, 2).flatten(0, 1).index_select(0, bounds.places_T)
    ranks = sorted(range(len(bounds.order)), key=bounds.order.__getitem__)
    return out_TVE.to(v_TVE.dtype), states[ranks]


def one_step(
    q_NKD: Tensor, k_NKD: Tensor, v_NVE: Tensor, g_NV: Tensor, beta_NV: Tensor, states_NVDE: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute one row of each sequence. Return its outputs (N, V, E) in the dtype of v, and the new states in fp32."""
    groups, size = v_NVE.shape[1] // q_NKD.shape[1], q_NKD.shape[2]
    q_NVD, k_NVD = (_unit(each).repeat_interleave(groups, 1) for each in (q_NKD, k_NKD))
    states_NVDE = states_NVDE * g_NV.float().exp()[:, :, None, None]
    known_NVE = torch.einsum("nvde,nvd->nve", states_NVDE, k_NVD)
    correction_NVE = (v_NVE.float() - known_NVE) * beta_NV.float().unsqueeze(2)
    states_NVDE = states_NVDE + k_NVD.unsqueeze(3) * correction_NVE.unsqueeze(2)
    out_NVE = torch.einsum("nvde,nvd->nve", states_NVDE, q_NVD * size**-0.5)
    return out_NVE.to(v_NVE.dtype), states_NVDE


def _scan(
    own_nVCE: Tensor,
    readers_nVBD: Tensor,
    within_nVCC: Tensor,
    writers_nVCD: Tensor,
    decay_nV11: Tensor,
    bounds: Bounds,
    states_NVDE: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Follow the sequences from chunk to chunk. Return the outputs (n, V, C, E), and the last states (N, V, D, E).

    ``readers_nVBD``: what is multiplied with the state before a chunk, B = 2 C rows: first what the state takes from
    the corrections, then the queries. Sequences are in the order of ``bounds.order``.
    """
    sizes, outputs, ended = list(bounds.active), [], []
    parts = (each.split(sizes) for each in (own_nVCE, readers_nVBD, within_nVCC, writers_nVCD, decay_nV11))
    steps = zip(*parts, strict=True)
    for step, (own, readers, within, writers, decay) in enumerate(steps):
        if states_NVDE is None:
            read, corrections = None, own
        else:
            taken, read = (readers @ states_NVDE).chunk(2, 2)
            corrections = own - taken
        output = within @ corrections
        outputs.append(output if read is None else output + read)
        written = writers.transpose(2, 3) @ corrections
        states_NVDE = written if states_NVDE is None else states_NVDE * decay + written
        following = sizes[step + 1] if step + 1 < len(sizes) else 0
        if following < sizes[step]:
            ended.append(states_NVDE[following:])
            states_NVDE = states_NVDE[:following]
    return torch.cat(outputs), torch.cat(ended[::-1])


def _unit(x: Tensor) -> Tensor:
    """Return vectors of length 1, in fp32."""
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _EPS)


def _in_chunks(x_TVF: Tensor, bounds: Bounds) -> Tensor:
    """Return rows as chunks (n, V, C, F). The rows that fill up chunks are 0, which changes no state."""
    rows = x_TVF.new_zeros(bounds.chunks * bounds.chunk, *x_TVF.shape[1:])
    rows = rows.index_copy(0, bounds.places_T, x_TVF)
    return rows.unflatten(0, (-1, bounds.chunk)).transpose(1, 2).contiguous()
