"""Images with the unmodified SDK: training and sampling on a tiny model that sees, with the trainer's own numbers."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tinker
from tinker import types

from tests.support.models.reference import assert_logprobs_close
from tests.support.models.sdk_images import (
    SEES,
    Part,
    chunk,
    computed_and_reused,
    jpeg,
    model_input,
    plain_datum,
    png,
    processing,
    sdk_datum,
    targets_of,
    tokens_of,
    trainer,
)
from tests.support.servers.running import BACKEND
from tests.support.servers.serving import SAMPLER, SdkServer, close_clients, logprobs_of
from twinkle.images import EncodedImage
from twinkle.model import AdamParams, LoraSpec, TrainItem, TrainResult

pytestmark = pytest.mark.skipif(
    BACKEND == "megatron" or SAMPLER != "torch", reason="images are for Transformers' models and the torch sampler"
)

ADAM = types.AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=0.1)
OURS = AdamParams(1e-2, 0.9, 0.95, 0.1)

BATCH: list[list[Part]] = [
    [[5, 6, 259], png(100, 70, 1), [260, 7, 8, 9]],
    [[5, 259], jpeg(64, 130, 2), jpeg(64, 130, 3), [260, 7]],  # two images in a row
    [jpeg(33, 40, 4), [1, 2, 3], png(57, 57, 5), [4]],  # an image first
    [[11, 12, 13, 14]],
]


@pytest.fixture
def server(seeing_server: SdkServer) -> SdkServer:
    """The server whose model sees, instead of the one that other tests share."""
    return seeing_server


def result_of(results: Sequence[object]) -> TrainResult:
    assert isinstance(results[0], TrainResult), results[0]
    return results[0]


def test_training_gives_the_trainers_numbers(service: tinker.ServiceClient) -> None:
    training = service.create_lora_training_client(base_model=SEES, rank=4, seed=3)
    trainer().create_adapter("alone", LoraSpec(4, seed=3, train_unembed=True))
    data = [sdk_datum(parts, seed) for seed, parts in enumerate(BATCH)]
    plain = [plain_datum(parts, seed) for seed, parts in enumerate(BATCH)]
    for _ in range(2):
        passed = training.forward_backward(data, "cross_entropy")
        stepped = training.optim_step(ADAM)
        expected = result_of(trainer().forward_backward([TrainItem("alone", plain)]))
        assert_logprobs_close(logprobs_of(passed.result()), expected.logprobs)
        stepped.result()
        trainer().optim_step("alone", OURS)
    after = training.forward(data, "cross_entropy").result()
    expected = result_of(trainer().forward([TrainItem("alone", plain)]))
    assert_logprobs_close(logprobs_of(after), expected.logprobs)
    assert [len(each) for each in logprobs_of(after)] == [len(tokens_of(parts)) for parts in BATCH]


def test_features_are_computed_once_and_never_shared(server: SdkServer, service: tinker.ServiceClient) -> None:
    """Three epochs see an image once; the same image of another tenant is not taken from the first one's."""
    data = [sdk_datum([[1, 2], png(60, 60, 71), jpeg(60, 60, 72), [3]]), sdk_datum([png(60, 60, 71), [4, 5]])]
    training = service.create_lora_training_client(base_model=SEES, rank=4)
    before = computed_and_reused(server.url)
    for _ in range(3):
        training.forward_backward(data, "cross_entropy").result()
        training.optim_step(ADAM).result()
    computed, reused = computed_and_reused(server.url)
    assert computed - before[0] == 2
    assert reused > before[1]
    other = server.service("another tenant").create_lora_training_client(base_model=SEES, rank=4)
    other.forward(data, "cross_entropy").result()
    assert computed_and_reused(server.url)[0] - computed == 2


@pytest.mark.complaint("non-retryable error")
def test_the_number_of_tokens_is_checked(service: tinker.ServiceClient) -> None:
    training = service.create_lora_training_client(base_model=SEES, rank=4)
    wrong = types.ModelInput(
        chunks=[
            types.EncodedTextChunk(tokens=[1]),
            chunk(png(56, 84), expected_tokens=7),
            types.EncodedTextChunk(tokens=[2]),
        ]
    )
    datum = types.Datum(model_input=wrong, loss_fn_inputs={"target_tokens": [0] * 9})
    with pytest.raises(
        tinker.RequestFailedError, match=r"data\[0\]\.model_input\[1\]\.expected_tokens: got 7, allowed: 6"
    ):
        training.forward_backward([datum], "cross_entropy").result()
    sampler = service.create_sampling_client(base_model=SEES)
    with pytest.raises(tinker.BadRequestError, match=r"prompt\.chunks\[1\]\.expected_tokens: got 7, allowed: 6"):
        sampler.sample(wrong, 1, types.SamplingParams(max_tokens=2)).result()


def test_images_as_patches(service: tinker.ServiceClient) -> None:
    """Clients of the existing Twinkle send tokens with image tokens, and what their image processor made."""
    parts: list[Part] = [[5, 6], png(100, 70, 1), jpeg(64, 130, 2), [7, 8]]
    made = [processing().patches(part) for part in parts if isinstance(part, EncodedImage)]
    grids = [[1, 2 * size.rows, 2 * size.columns] for _, size in made]
    targets, weights = targets_of(parts, 0)
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens_of(parts).tolist()),
        loss_fn_inputs={
            "target_tokens": targets,
            "weights": weights,
            "pixel_values": types.TensorData.from_numpy(np.concatenate([patches for patches, _ in made])),
            "image_grid_thw": types.TensorData.from_numpy(np.array(grids)),
        },
    )
    training = service.create_lora_training_client(base_model=SEES, rank=4)
    as_patches = training.forward([datum], "cross_entropy").result()
    as_chunks = training.forward([sdk_datum(parts, 0)], "cross_entropy").result()
    assert_logprobs_close(logprobs_of(as_patches), logprobs_of(as_chunks))


@pytest.mark.complaint("Failed to send telemetry batch")  # while the server is down
def test_nothing_is_lost_by_a_kill(tmp_path: Path) -> None:
    """SIGKILL in an epoch: the journal has the images as they came, and every step is applied once."""
    server = SdkServer(tmp_path, model=SEES, snapshot=0.3).start()
    try:
        training = server.service("killed").create_lora_training_client(base_model=SEES, rank=4, seed=9)
        trainer().create_adapter("killed", LoraSpec(4, seed=9, train_unembed=True))
        epoch = [[sdk_datum(parts, seed)] for seed, parts in enumerate(BATCH)]
        under_way = []
        for number, data in enumerate([*epoch, *epoch]):
            under_way.append((training.forward_backward(data, "cross_entropy"), training.optim_step(ADAM)))
            if number == 5:
                under_way[1][1].result()  # some steps are done, others wait or run
                server.kill()
                server.start()
        for number, (passed, stepped) in enumerate(under_way):
            plain = [plain_datum(BATCH[number % 4], number % 4)]
            expected = result_of(trainer().forward_backward([TrainItem("killed", plain)]))
            assert_logprobs_close(logprobs_of(passed.result()), expected.logprobs)
            stepped.result()
            trainer().optim_step("killed", OURS)
        assert "Traceback" not in server.log()
    finally:
        close_clients(server.url)
        server.close()


# --- sampling ---------------------------------------------------------------------------------------------------------


def test_samples_agree_with_training(service: tinker.ServiceClient) -> None:
    """Log-probabilities of a prompt and of its samples are those of a training pass over the same tokens."""
    training = service.create_lora_training_client(base_model=SEES, rank=4, seed=5)
    training.forward_backward([sdk_datum(parts, seed) for seed, parts in enumerate(BATCH)], "cross_entropy")
    training.optim_step(ADAM).result()
    sampler = training.save_weights_and_get_sampling_client()
    prompt: list[Part] = [[5, 259], jpeg(64, 130, 2), jpeg(64, 130, 3), [260, 7], png(57, 57, 5), [8, 9]]
    answer = sampler.sample(
        model_input(prompt), 3, types.SamplingParams(max_tokens=5, seed=1, stop=[]), include_prompt_logprobs=True
    ).result()
    assert answer.prompt_logprobs is not None
    assert answer.prompt_logprobs[0] is None
    length = len(tokens_of(prompt))
    assert len(answer.prompt_logprobs) == length
    for sequence in answer.sequences:
        whole: list[Part] = [*prompt[:-1], [8, 9, *sequence.tokens]]
        tokens = tokens_of(whole)
        datum = types.Datum(
            model_input=model_input([*whole[:-1], [8, 9, *sequence.tokens[:-1]]]),
            loss_fn_inputs={"target_tokens": tokens[1:].tolist()},
        )
        (trained,) = logprobs_of(training.forward([datum], "cross_entropy").result())
        assert_logprobs_close([np.array(sequence.logprobs, np.float32)], [trained[length - 1 :]])
        assert_logprobs_close([np.array(answer.prompt_logprobs[1:], np.float32)], [trained[: length - 1]])


def test_large_prompts_and_repeated_images(server: SdkServer, service: tinker.ServiceClient) -> None:
    """A body of more than 4 MiB passes, and the samples of one prompt share its image."""
    large = png(1100, 1300, 9)
    assert len(large.data) > 4 * 2**20
    sampler = service.create_sampling_client(base_model=SEES)
    before = computed_and_reused(server.url)[0]
    answer = sampler.sample(model_input([[1, 2], large, [3]]), 4, types.SamplingParams(max_tokens=2)).result()
    assert len(answer.sequences) == 4
    assert computed_and_reused(server.url)[0] - before == 1
    service.create_lora_training_client(base_model=SEES, rank=4).forward(
        [sdk_datum([[1], large, [2]])], "cross_entropy"
    ).result()
    assert computed_and_reused(server.url)[0] - before == 1


@pytest.mark.complaint("non-retryable error")
def test_locations_are_never_opened(server: SdkServer, service: tinker.ServiceClient, files: Path) -> None:
    secret = files / "secret.png"
    secret.write_bytes(png(56, 56).data)
    sampler = service.create_sampling_client(base_model=SEES)
    for location in (str(secret), f"file://{secret}", f"{server.url}/metrics"):
        pointer = types.ImageAssetPointerChunk(location=location, format="png", expected_tokens=4)
        with pytest.raises(tinker.BadRequestError, match=r"image_asset_pointer.*never opens a location"):
            sampler.sample(types.ModelInput(chunks=[pointer]), 1, types.SamplingParams(max_tokens=1)).result()
