"""A device runs out of memory, or its versions move: no result changes, and a failed turn leaves nothing behind."""

import torch

from tests.support.models.sampling import (
    SPECS,
    assert_same_samples,
    drain,
    prompt,
    request,
    run,
    toy_sampler,
    toy_trainer,
)
from twinkle.errors import CapacityError
from twinkle.model import LoraSpec
from twinkle.sampler import SampleFailure, SampleRequest, TorchSampler
from twinkle.sampler.torch_sampler.model_pass import PendingPass, Piece

# So many versions that a pass gathers their weights instead of multiplying with all versions at once.
MANY = {f"m{n}": LoraSpec(rank=32, seed=n) for n in range(9)}


def gathered(sampler: TorchSampler) -> int:
    return len(sampler._pass._binder._gathered)


def crowd(names: object) -> list[SampleRequest]:
    return [request(f"{name}", name, prompt(9 + n, n), 2, max_tokens=12, seed=n) for n, name in enumerate(names)]


def test_a_pass_that_runs_out_of_memory_is_cut() -> None:
    sampler = toy_sampler(toy_trainer())
    expected = run(sampler, crowd((None, *SPECS)))
    run_pass, sizes = sampler._pass.start, []

    def limited(pieces: list[Piece]) -> PendingPass:
        if len(pieces) > 2:
            raise torch.OutOfMemoryError("no more")
        sizes.append(len(pieces))
        return run_pass(pieces)

    sampler._pass.start = limited
    for name, result in run(sampler, crowd((None, *SPECS))).items():
        assert_same_samples(result, expected[name])
    assert 2 in sizes


def test_a_sequence_that_never_fits_fails_alone() -> None:
    sampler = toy_sampler(toy_trainer())
    run_pass = sampler._pass.start

    def limited(pieces: list[Piece]) -> PendingPass:
        if any(piece.version is sampler._versions["b"] for piece in pieces):
            raise torch.OutOfMemoryError("no more")
        return run_pass(pieces)

    sampler._pass.start = limited
    for each in crowd((None, *SPECS)):
        sampler.submit(each)
    failed = {name: outcome for name, outcome in drain(sampler).items() if isinstance(outcome, SampleFailure)}
    assert failed.keys() == {"b"}
    assert isinstance(failed["b"].error, CapacityError)


def test_copies_of_versions_make_room_for_a_pass() -> None:
    sampler = toy_sampler(toy_trainer(MANY))
    expected = run(sampler, crowd(MANY))
    run_pass, refused = sampler._pass.start, []

    def limited(pieces: list[Piece]) -> PendingPass:
        if gathered(sampler):  # gathered by an earlier pass
            refused.append(len(pieces))
            raise torch.OutOfMemoryError("no more")
        return run_pass(pieces)

    sampler._pass.start = limited
    for name, result in run(sampler, crowd(MANY)).items():
        assert_same_samples(result, expected[name])
    assert refused


def test_between_turns_training_has_the_memory() -> None:
    sampler = toy_sampler(toy_trainer(MANY))
    used, run_pass = [], sampler._pass.start

    def watching(pieces: list[Piece]) -> PendingPass:
        computed = run_pass(pieces)
        used.append(gathered(sampler))
        return computed

    sampler._pass.start = watching
    for each in crowd(MANY):
        sampler.submit(each)
    while sampler.busy:
        sampler.step()
        assert gathered(sampler) == 0
    assert max(used) > 0
