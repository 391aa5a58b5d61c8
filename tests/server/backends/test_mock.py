"""The mock computes exact results, so that tests built on it notice every op that is lost, repeated or reordered."""

import subprocess
import sys

import numpy as np
import pytest

from twinkle.errors import (
    AdapterExistsError,
    AdapterNotFoundError,
    CheckpointError,
    InvalidInputError,
    UserError,
)
from twinkle.loss import TOKEN_LOSSES
from twinkle.model.types import AdamParams, Datum, LoraSpec, TrainFailure, TrainItem, TrainResult
from twinkle.sampler.types import SampleRequest, SampleResult, SamplingParams
from twinkle.server.backends.mock import MockSampler, MockTrainer, mock_model
from twinkle.server.backends.mock.trainer import LOSSES

SPEC = LoraSpec(rank=8, seed=1)
PARAMS = AdamParams(learning_rate=1e-2)


def _datum(seed=0, length=6, k=None, **extras):
    random = np.random.default_rng(seed)
    shape = (length,) if k is None else (length, k)
    weights = None if extras else random.normal(size=shape).astype(np.float32)
    return Datum(random.integers(0, 1000, length), random.integers(0, 1000, shape), weights, extras)


def _trainer(*adapter_ids, **options):
    trainer = MockTrainer(**options)
    for adapter_id in adapter_ids or ("a",):
        trainer.create_adapter(adapter_id, SPEC)
    return trainer


def _logprobs(trainer, adapter_id="a"):
    (result,) = trainer.forward([TrainItem(adapter_id, [_datum(99)])])
    return result.logprobs[0]


def _train(trainer, adapter_id="a", seed=0):
    (result,) = trainer.forward_backward([TrainItem(adapter_id, [_datum(seed)])])
    assert isinstance(result, TrainResult)
    trainer.optim_step(adapter_id, PARAMS)


def test_no_torch():
    code = "import sys, twinkle.server.backends.mock; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_losses_are_the_real_ones():
    assert set(LOSSES) == set(TOKEN_LOSSES)
    for name, loss in TOKEN_LOSSES.items():
        mine = LOSSES[name]
        assert (mine.inputs, mine.optional_inputs, set(mine.config)) == (
            loss.inputs,
            loss.optional_inputs,
            set(loss.config),
        )


def test_served_model():
    model = mock_model("m", ("alias",))
    assert (model.name, model.aliases, model.trainer.adapter_ids(), model.sampler.version_ids()) == (
        "m",
        ("alias",),
        [],
        [],
    )


class TestTrainer:
    def test_shapes_and_loss(self):
        trainer = _trainer()
        data = [_datum(0, 5), _datum(1, 3, k=4)]
        (result,) = trainer.forward([TrainItem("a", data)])
        assert [lp.shape for lp in result.logprobs] == [(5,), (3, 4)]
        assert all(lp.dtype == np.float32 and (lp < 0).all() for lp in result.logprobs)
        expected = -sum(float((d.weights * lp).sum()) for d, lp in zip(data, result.logprobs, strict=True))
        assert result.metrics["loss:sum"] == pytest.approx(expected, abs=1e-5)

    @pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling"])
    def test_gradient(self, loss):
        """Compared with finite differences in the weights, which a snapshot can set."""
        extras = {"logprobs": np.full(6, -0.7, np.float32), "advantages": np.linspace(-1, 2, 6).astype(np.float32)}
        item = TrainItem("a", [_datum(3, 6, **({} if loss == "cross_entropy" else extras))], loss)
        trainer = _trainer()
        trainer.forward_backward([item])
        snapshot = trainer.snapshot("a")

        def loss_at(weights):
            probe = MockTrainer()
            probe.restore("a", type(snapshot)(**{**vars(snapshot), "weights": weights.astype(np.float32)}))
            return probe.forward([item])[0].metrics["loss:sum"]

        h = 2**-7
        for index in range(8):
            shift = h * np.eye(8)[index]
            slope = (loss_at(snapshot.weights + shift) - loss_at(snapshot.weights - shift)) / (2 * h)
            assert snapshot.gradient[index] == pytest.approx(slope, rel=1e-2, abs=1e-3)

    def test_forward_leaves_no_trace(self):
        trainer = _trainer()
        before = trainer.vector("a")
        trainer.forward([TrainItem("a", [_datum()])])
        assert trainer.optim_step("a", PARAMS) == {"unclipped_grad_l2:mean": 0.0, "no_gradient:max": 1.0}
        np.testing.assert_array_equal(trainer.vector("a"), before)
        assert trainer.snapshot("a").step == 0

    def test_everything_counts_once(self):
        """A lost, repeated or moved op changes later results."""
        runs = {
            "once": [(0, True), (1, True)],
            "lost": [(1, True)],
            "repeated": [(0, True), (0, True), (1, True)],
            "counted twice": [(0, False), (0, True), (1, True)],
            "swapped": [(1, True), (0, True)],
            "one window": [(0, False), (1, True)],
        }
        seen = {}
        for name, ops in runs.items():
            trainer = _trainer()
            for seed, step in ops:
                trainer.forward_backward([TrainItem("a", [_datum(seed)])])
                if step:
                    trainer.optim_step("a", PARAMS)
            seen[name] = _logprobs(trainer).tobytes()
        assert len(set(seen.values())) == len(runs)

    def test_deterministic_and_alone(self):
        alone, company = _trainer(), _trainer("a", "b")
        bad = TrainItem("b", [_datum()], "no such loss")
        for seed in range(3):
            item = TrainItem("a", [_datum(seed)])
            (one,) = alone.forward_backward([item])
            results = company.forward_backward([bad, item, TrainItem("b", [_datum(seed + 7)])])
            np.testing.assert_array_equal(results[1].logprobs[0], one.logprobs[0])
            alone.optim_step("a", PARAMS)
            company.optim_step("a", PARAMS)
        np.testing.assert_array_equal(alone.vector("a"), company.vector("a"))

    def test_training_lowers_the_loss(self):
        trainer = _trainer()
        data = [Datum(np.arange(8), np.arange(8) + 1)]
        losses = []
        for _ in range(20):
            losses.append(trainer.forward_backward([TrainItem("a", data)])[0].metrics["loss:sum"])
            trainer.optim_step("a", PARAMS)
        assert losses[-1] < losses[0]

    def test_clipping_and_zero_grad(self):
        trainer = _trainer()
        trainer.forward_backward([TrainItem("a", [_datum()])])
        trainer.zero_grad("a")
        assert trainer.snapshot("a").gradient is None
        trainer.forward_backward([TrainItem("a", [_datum()])])
        before = trainer.vector("a")
        norm = trainer.optim_step("a", AdamParams(learning_rate=1.0, grad_clip_norm=0.5))["unclipped_grad_l2:mean"]
        assert norm > 0.5
        assert np.linalg.norm((trainer.vector("a") - before)[1:]) <= 0.5

    @pytest.mark.parametrize(
        ("item", "complaint"),
        [
            (TrainItem("x", [_datum()]), "no adapter 'x'"),
            (TrainItem("a", []), "at least one datum"),
            (TrainItem("a", [_datum()], "custom"), "unknown loss 'custom'"),
            (TrainItem("a", [_datum()], "ppo", {"beta": 1.0}), "unknown config key"),
            (TrainItem("a", [_datum()], "dro", {"beta": float("nan")}), "loss_config.beta"),
            (TrainItem("a", [_datum()], "ppo"), "data[0].logprobs"),
            (TrainItem("a", [_datum(length=0)]), "data[0].tokens"),
            (TrainItem("a", [_datum(length=101)]), "data[0].tokens"),
            (TrainItem("a", [_datum(), Datum(np.arange(3), np.arange(4))]), "data[1].targets"),
            (TrainItem("a", [Datum(np.arange(3), np.zeros((3, 0), np.int64))]), "data[0].targets"),
            (TrainItem("a", [Datum(np.arange(3), np.array([0, 1, 1000]))]), "data[0].targets"),
            (TrainItem("a", [Datum(np.array([-1]), np.array([1]))]), "data[0].tokens"),
            (TrainItem("a", [Datum(np.arange(3), np.arange(3), np.ones(2, np.float32))]), "data[0].weights"),
            (TrainItem("a", [Datum(np.arange(1), np.arange(1), np.array([np.nan], np.float32))]), "finite"),
        ],
    )
    def test_bad_requests_fail_alone(self, item, complaint):
        trainer = _trainer(vocab_size=1000, max_length=100)
        good = TrainItem("a", [_datum(5)])
        failure, result = trainer.forward_backward([item, good])
        assert isinstance(failure, TrainFailure)
        assert complaint in str(failure.error)
        assert isinstance(failure.error, UserError)
        assert isinstance(result, TrainResult)
        clean = _trainer(vocab_size=1000, max_length=100)
        clean.forward_backward([good])
        np.testing.assert_array_equal(trainer.snapshot("a").gradient, clean.snapshot("a").gradient)

    def test_adapters(self):
        trainer = _trainer()
        with pytest.raises(AdapterExistsError):
            trainer.create_adapter("a", SPEC)
        with pytest.raises(InvalidInputError):
            trainer.create_adapter("b", LoraSpec(rank=0))
        assert trainer.create_adapter("b", LoraSpec(rank=4)).seed is not None
        assert trainer.create_adapter("c", LoraSpec(rank=4, seed=-1)).seed == -1
        assert trainer.adapter_ids() == ["a", "b", "c"]
        trainer.remove_adapter("b")
        for call in (trainer.remove_adapter, trainer.zero_grad, trainer.snapshot):
            with pytest.raises(AdapterNotFoundError):
                call("b")
        with pytest.raises(InvalidInputError, match="beta1"):
            trainer.optim_step("a", AdamParams(beta1=-1))


class TestState:
    def test_snapshot_in_an_open_window(self):
        trainer, other = _trainer(), MockTrainer()
        _train(trainer)
        trainer.forward_backward([TrainItem("a", [_datum(1)])])
        snapshot = trainer.snapshot("a")
        _train(trainer, seed=2)
        other.restore("a", snapshot)
        _train(other, seed=2)
        np.testing.assert_array_equal(_logprobs(other), _logprobs(trainer))
        trainer.restore("a", snapshot)
        assert trainer.snapshot("a").step == 1
        with pytest.raises(InvalidInputError, match="layout"):
            other.restore("a", type(snapshot)(**{**vars(snapshot), "layout": "other"}))

    def test_save_and_load(self, tmp_path):
        trainer, other = _trainer(), _trainer()
        _train(trainer)
        trainer.prepare_save("a")(tmp_path / "new" / "ck")
        assert [path.name for path in (tmp_path / "new").iterdir()] == ["ck"]
        other.forward_backward([TrainItem("a", [_datum(5)])])
        other.load("a", tmp_path / "new" / "ck")
        for one in (trainer, other):
            _train(one, seed=1)
        np.testing.assert_array_equal(_logprobs(other), _logprobs(trainer))
        assert other.snapshot("a").step == 2

    def test_load_without_optimizer(self, tmp_path):
        trainer, other = _trainer(), _trainer()
        _train(trainer)
        trainer.prepare_save("a", optimizer=False)(tmp_path / "ck")
        with pytest.raises(CheckpointError, match="optimizer=False"):
            other.load("a", tmp_path / "ck")
        other.load("a", tmp_path / "ck", optimizer=False)
        np.testing.assert_array_equal(_logprobs(other), _logprobs(trainer))
        assert other.snapshot("a").step == 0
        for one in (trainer, other):
            _train(one, seed=1)
        assert (_logprobs(other) != _logprobs(trainer)).any()  # the momentum was not loaded

    def test_directories(self, tmp_path):
        trainer = _trainer()
        before = trainer.prepare_save("a")
        _train(trainer)
        trainer.prepare_save("a")(tmp_path / "ck")
        before(tmp_path / "ck")  # writes the state from when it was prepared over the current files
        trainer.load("a", tmp_path / "ck")
        assert trainer.snapshot("a").step == 0
        trainer.create_adapter("b", LoraSpec(rank=16, seed=1))
        with pytest.raises(CheckpointError, match="rank"):
            trainer.load("b", tmp_path / "ck")
        (tmp_path / "ck" / "state.json").write_text("{")
        for directory in (tmp_path / "ck", tmp_path / "none"):
            with pytest.raises(CheckpointError, match="could not read"):
                trainer.load("a", directory)


def _request(request_id="r", version_id=None, prompt=(5, 6, 7), num_samples=1, logprobs=False, top=0, **params):
    return SampleRequest(
        request_id,
        version_id,
        np.array(prompt, np.int64),
        SamplingParams(**params),
        num_samples,
        prompt_logprobs=logprobs,
        topk_prompt_logprobs=top,
    )


def _sample(sampler, request):
    sampler.submit(request)
    finished = []
    while sampler.busy:
        finished += sampler.step()
    (done,) = finished
    assert done.request_id == request.request_id
    assert isinstance(done.outcome, SampleResult)
    return done.outcome


class TestSampler:
    def test_samples(self):
        sampler = MockSampler(_trainer())
        result = _sample(sampler, _request(num_samples=3, max_tokens=40, seed=1, stop_at_eos=False))
        assert len({tuple(s.tokens) for s in result.sequences}) == 3
        for sequence in result.sequences:
            assert len(sequence.tokens) == len(sequence.logprobs) == 40
            assert sequence.stop_reason == "length"
        again = _sample(sampler, _request(num_samples=3, max_tokens=40, seed=1, stop_at_eos=False))
        for one, other in zip(result.sequences, again.sequences, strict=True):
            np.testing.assert_array_equal(one.tokens, other.tokens)
        other = _sample(sampler, _request(num_samples=3, max_tokens=40, seed=2**64 - 1, stop_at_eos=False))
        assert other.sequences[0].tokens.tolist() != result.sequences[0].tokens.tolist()

    def test_greedy(self):
        sampler = MockSampler(_trainer())
        sampler.publish("v", "a")
        results = [_sample(sampler, _request("r", "v", temperature=0.0, max_tokens=9)) for _ in range(2)]
        assert results[0].sequences[0].tokens.tolist() == results[1].sequences[0].tokens.tolist()

    def test_stops(self):
        sampler = MockSampler(_trainer())
        free = _sample(sampler, _request(seed=4, max_tokens=30, stop_at_eos=False)).sequences[0].tokens.tolist()
        token = free[5]
        stopped = _sample(sampler, _request(seed=4, max_tokens=30, stop_at_eos=False, stop_tokens=(token,)))
        assert stopped.sequences[0].tokens.tolist() == free[: free.index(token) + 1]
        assert stopped.sequences[0].stop_reason == "stop"
        text = _sample(
            sampler, _request(seed=4, max_tokens=30, stop_at_eos=False, stop_strings=(f"{free[2]} {free[3]} ",))
        )
        assert text.sequences[0].tokens.tolist() == free[:4]
        ended = _sample(MockSampler(_trainer(), end_token=free[0]), _request(seed=4, max_tokens=30))
        assert ended.sequences[0].stop_reason in ("stop", "length")
        many = _sample(sampler, _request(num_samples=50, max_tokens=30, seed=9))
        finished = [s for s in many.sequences if s.stop_reason == "stop"]
        assert finished
        assert all(s.tokens[-1] == sampler.end_token for s in finished)

    def test_prompt_logprobs_are_the_trainers(self):
        trainer = _trainer()
        _train(trainer)
        sampler = MockSampler(trainer)
        sampler.publish("v", "a")
        prompt = np.array([5, 6, 7, 8])
        result = _sample(sampler, _request("r", "v", prompt, logprobs=True, top=3, max_tokens=1))
        (trained,) = trainer.forward([TrainItem("a", [Datum(prompt[:-1], prompt[1:])])])
        assert np.isnan(result.prompt_logprobs[0])
        np.testing.assert_array_equal(result.prompt_logprobs[1:], trained.logprobs[0])
        top = result.topk_prompt_logprobs
        assert top.token_ids.shape == top.logprobs.shape == (4, 3)
        assert np.isneginf(top.logprobs[0]).all()
        assert (np.diff(top.logprobs[1:], axis=1) <= 0).all()

    def test_versions_never_change(self, tmp_path):
        trainer = _trainer()
        sampler = MockSampler(trainer)
        sampler.publish("v1", "a")
        trainer.prepare_save("a", optimizer=False)(tmp_path / "ck")
        asked = {"seed": 3, "max_tokens": 20, "stop_at_eos": False}
        before = _sample(sampler, _request("r", "v1", **asked))
        for seed in range(5):
            _train(trainer, seed=seed)
        sampler.publish("v2", "a")
        sampler.load_version("v3", str(tmp_path / "ck"))
        for version_id in ("v1", "v3"):
            after = _sample(sampler, _request("r", version_id, **asked))
            np.testing.assert_array_equal(after.sequences[0].logprobs, before.sequences[0].logprobs)
        newer = _sample(sampler, _request("r", "v2", **asked))
        assert newer.sequences[0].logprobs.tolist() != before.sequences[0].logprobs.tolist()
        with pytest.raises(InvalidInputError, match="version_id"):
            sampler.publish("v1", "a")
        with pytest.raises(CheckpointError):
            sampler.load_version("v4", str(tmp_path / "none"))

    def test_retire_waits_for_requests(self):
        sampler = MockSampler(_trainer())
        for version_id in ("v1", "v2"):
            sampler.publish(version_id, "a")
        sampler.submit(_request("r", "v1", max_tokens=100, stop_at_eos=False))
        sampler.step()
        sampler.retire("v1")
        sampler.retire("v1")
        sampler.retire("unknown")
        assert sampler.version_ids() == ["v2"]
        with pytest.raises(InvalidInputError, match="v1"):
            sampler.submit(_request("s", "v1"))
        finished = []
        while sampler.busy:
            finished += sampler.step()
        assert len(finished[0].outcome.sequences[0].tokens) == 100
        sampler.publish("v1", "a")  # the name is free again

    def test_cancel(self):
        sampler = MockSampler(_trainer())
        sampler.submit(_request("r", max_tokens=1000, stop_at_eos=False))
        sampler.step()
        sampler.cancel("r")
        sampler.cancel("unknown")
        assert not sampler.busy
        assert sampler.step() == []

    @pytest.mark.parametrize(
        ("request_", "complaint"),
        [
            (_request(version_id="x"), "version_id: got 'x'"),
            (_request(prompt=()), "prompt: got 'shape (0,)'"),
            (_request(prompt=[1] * 100), "prompt: got '100 tokens'"),
            (_request(prompt=[70_000]), "token ids in [0, 65536)"),
            (_request(max_tokens=98), "max_tokens: got 98, allowed: an integer in [1, 97]"),
        ],
    )
    def test_what_can_never_be_done(self, request_, complaint):
        sampler = MockSampler(_trainer(), max_length=100)
        with pytest.raises(UserError) as caught:
            sampler.submit(request_)
        assert complaint in str(caught.value)
        assert not sampler.busy

    def test_context_is_filled(self):
        sampler = MockSampler(_trainer(), max_length=40)
        assert len(_sample(sampler, _request(stop_at_eos=False)).sequences[0].tokens) == 37
