"""What LoRA's kernels add to a decoder layer of a decode step, in microseconds, each kernel timed alone on CUDA.

Each kernel is launched once for each of 32 layers in one captured graph. Layers have different weights, so that these
come from the GPU's memory, as in a step. The kernel of gate and up and the one that rotates queries and keys also run
without adapters: the table has the difference. Shapes are those of Llama 8B.

    python benchmarks/lora_kernels.py --rows 1 32 256 512 --json build/bench/lora_kernels.json
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from one_gpu import machine, write_json
from torch import Tensor

from twinkle.sampler.torch_sampler.cache import BLOCK
from twinkle.sampler.torch_sampler.layer_kernels import gated, rotate_and_store
from twinkle.sampler.torch_sampler.lora.slot_lora_kernels import (
    MAX_RANK,
    TILE_ROWS_OF_A,
    Projected,
    Tiles,
    Tiling,
    add_projected,
    new_counters,
    project,
    tile_rows_of_b,
    usual_tiles,
)

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, WIDTH = 32, 4096, 14336, 32, 8, 128
# Linear layers with the same input: the inputs, and the outputs of each layer.
SETS = {
    "qkv": (HIDDEN, (HEADS * WIDTH, KV_HEADS * WIDTH, KV_HEADS * WIDTH)),
    "o": (HIDDEN, (HIDDEN,)),
    "gate and up": (HIDDEN, (INNER, INNER)),
    "down": (INNER, (HIDDEN,)),
}
BLOCKS = 8  # of a sequence
WARM_UP = 2

Launch = Callable[[int], object]  # of the kernel of one layer


def main() -> None:
    args = parse_arguments()
    report = []
    for rows in args.rows:
        case = Case(rows, 1 if rows == 1 else args.adapters, args.rank)
        base = {name: microseconds(launch, args) for name, launch in case.without_adapters().items()}
        found = {name: microseconds(launch, args) - base.get(name, 0.0) for name, launch in case.kernels().items()}
        total = sum(found.values()) * LAYERS / 1000
        report.append({"rows": rows, "microseconds": found, "without_adapters": base, "milliseconds_of_all": total})
        print(f"{rows} rows: {total:.2f} ms in {LAYERS} layers")
        for name, taken in found.items():
            print(f"    {taken:6.2f} µs  {name}", flush=True)
    write_json(args.json, {"machine": machine("cuda"), "cases": report})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256, 512])
    parser.add_argument("--adapters", type=int, default=4, help="whose rows follow each other; one row has one adapter")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it needs a CUDA device")
    if args.rank % 8 or not 8 <= args.rank <= MAX_RANK:
        parser.error(f"--rank: got {args.rank}, allowed: a multiple of 8 up to {MAX_RANK}")
    return args


class Case:
    """Activations of some rows, and adapters on all linear layers of all decoder layers."""

    def __init__(self, rows: int, adapters: int, rank: int, device: str = "cuda") -> None:
        self._rows, self._device = rows, device
        per_adapter = sum(rank * (inputs * len(outputs) + sum(outputs)) for inputs, outputs in SETS.values())
        self._weights = torch.empty(LAYERS * adapters * per_adapter, device=device, dtype=torch.bfloat16).normal_()
        of_a, places_a = self._tiles(adapters, rank, TILE_ROWS_OF_A)
        of_b, places_b = self._tiles(adapters, rank, tile_rows_of_b(rows))
        self._tiling = Tiling(of_a, of_b, new_counters(rows).to(device))
        self._addresses = {name: self._place(name, adapters, rank, places_a, places_b) for name in SETS}
        self._x = {name: self._normal(inputs) for name, (inputs, _) in SETS.items()}
        self._y = {name: self._normal(sum(outputs)) for name, (_, outputs) in SETS.items()}
        self._h = {name: self._normal(len(outputs), MAX_RANK) for name, (_, outputs) in SETS.items()}
        blocks = torch.arange(rows * BLOCKS, dtype=torch.int32, device=device)
        self._table = blocks.view(rows, BLOCKS)
        self._cache = [torch.zeros(len(blocks), BLOCK, KV_HEADS, WIDTH, device=device).bfloat16() for _ in range(2)]
        self._rotation = [self._normal(WIDTH) for _ in range(2)]
        self._positions = torch.zeros(rows, dtype=torch.int64, device=device)

    def kernels(self) -> dict[str, Launch]:
        def projecting(name: str) -> Launch:
            return lambda layer: project(self._x[name], self._addresses[name][layer], self._tiling)

        def adding(name: str) -> Launch:
            return lambda layer: add_projected(self._y[name], self._projected(name, layer))

        return {
            **{f"x A.T of {name}": projecting(name) for name in SETS},
            "h B.T of o": adding("o"),
            "h B.T of down": adding("down"),
            "gate and up": lambda layer: gated(self._y["gate and up"], self._projected("gate and up", layer)),
            "rotating": lambda layer: self._rotate(self._projected("qkv", layer)),
        }

    def without_adapters(self) -> dict[str, Launch]:
        """Return the kernels that run without adapters, too, by the same names."""
        return {
            "gate and up": lambda _: gated(self._y["gate and up"], None),
            "rotating": lambda _: self._rotate(None),
        }

    def _rotate(self, projected: Projected | None) -> Tensor:
        qkv, (keys, values) = self._y["qkv"], self._cache
        return rotate_and_store(qkv, *self._rotation, keys, values, self._positions, self._table, None, projected)

    def _projected(self, name: str, layer: int) -> Projected:
        return Projected(self._h[name], self._addresses[name][layer], self._tiling.of_b)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(self._rows, *shape, device=self._device).bfloat16()

    def _tiles(self, adapters: int, rank: int, size: int) -> tuple[Tiles, list[int]]:
        """Return tiles of at most ``size`` rows, and the adapter of each."""
        share, table, places = -(-self._rows // adapters), [], []
        for adapter in range(adapters):
            begin, end = adapter * share, min(self._rows, (adapter + 1) * share)
            own = [[first, end, rank, 0] for first in range(begin, end, size)]
            table += own
            places += [adapter] * len(own)
        unused = self._rows - len(table)
        tensor = torch.tensor(table + [[0, 0, 0, 0]] * unused, dtype=torch.int32, device=self._device)
        count = torch.tensor([len(table)], dtype=torch.int32, device=self._device)
        return Tiles(size, tensor, count, usual_tiles(self._rows, size)), places + [0] * unused

    def _place(self, name: str, adapters: int, rank: int, places_a: list[int], places_b: list[int]) -> Tensor:
        """Return the addresses of a set's A and B by tile, (layers, S, 2, N)."""
        before = list(SETS)[: list(SETS).index(name)]
        skipped = sum(rank * (SETS[each][0] * len(SETS[each][1]) + sum(SETS[each][1])) for each in before)
        at = self._weights.data_ptr() + skipped * LAYERS * adapters * self._weights.itemsize
        inputs, outputs = SETS[name]
        addresses = torch.zeros(LAYERS, len(outputs), 2, adapters, dtype=torch.int64)
        for layer in range(LAYERS):
            for number, size in enumerate(outputs):
                for adapter in range(adapters):
                    for kind, width in enumerate((inputs, size)):
                        addresses[layer, number, kind, adapter] = at
                        at += rank * width * self._weights.itemsize
        assert at <= self._weights.data_ptr() + self._weights.nbytes
        return torch.stack([addresses[:, :, 0, places_a], addresses[:, :, 1, places_b]], 2).to(self._device)


def microseconds(launch: Launch, args: argparse.Namespace) -> float:
    """Return the median time of one launch in a captured graph that has one for each layer."""
    launch(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(LAYERS):
            launch(layer)
    taken = []
    for _ in range(WARM_UP + args.repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(1000 * begin.elapsed_time(end) / LAYERS)
    return statistics.median(taken[WARM_UP:])


if __name__ == "__main__":
    main()
