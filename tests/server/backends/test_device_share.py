"""Whose turn it is on the compute thread: training or sampling. The times are made up."""

import pytest

from twinkle.server.backends.device_share import DeviceShare


class Device:
    """A device on which both always have work, in turns of the given seconds."""

    def __init__(self, sampling_share: float) -> None:
        self.share = DeviceShare(sampling_share)
        self.now = self.trained = self.sampled = 0.0

    def run(self, training: float, sampling: float) -> str:
        """Run one turn of the side whose turn it is, and return which one that was."""
        began = self.now
        if self.share.sampling_is_due:
            self.now += sampling
            self.sampled += sampling
            self.share.count_sampling(began, self.now, 0.0)
            return "sample"
        self.now += training
        self.trained += training
        self.share.count_training(began, self.now, 0.0)
        return "train"


@pytest.mark.parametrize("sampling_share", [0.05, 0.4, 0.5, 0.95])
@pytest.mark.parametrize(("training", "sampling"), [(0.4, 0.065), (28.0, 0.065), (0.01, 0.05), (0.1, 5.0)])
def test_each_gets_its_share_however_long_its_turns_are(
    sampling_share: float, training: float, sampling: float
) -> None:
    device = Device(sampling_share)
    for _ in range(20_000):
        device.run(training, sampling)
    longest = max(training, sampling) / min(sampling_share, 1 - sampling_share)
    assert abs(device.sampled - sampling_share * device.now) <= longest


def test_sampling_that_begins_goes_first_and_pays_later() -> None:
    device = Device(0.5)
    assert [device.run(1.0, 2.0) for _ in range(7)] == [
        "sample",
        "train",
        "train",
        "sample",
        "train",
        "train",
        "sample",
    ]


def test_time_alone_gives_the_other_no_claim() -> None:
    """Training ran alone for an hour, then sampling alone for an hour. Neither has to make up for it."""
    device = Device(0.5)
    device.share.count_training(0.0, 3600.0, None)
    device.now = 3600.0
    assert [device.run(1.0, 1.0) for _ in range(4)] == ["sample", "train", "sample", "train"]
    device.share.count_sampling(device.now, 7200.0, None)
    device.now = 7200.0
    assert [device.run(1.0, 1.0) for _ in range(4)] == ["sample", "train", "sample", "train"]


def test_only_the_time_since_the_other_came_counts() -> None:
    share = DeviceShare(0.5)
    share.count_training(0.0, 10.0, 9.0)  # sampling came after 9 s
    share.count_sampling(10.0, 11.5, 0.0)
    assert not share.sampling_is_due, "it had waited for one second, and has used more"
    share.count_training(11.5, 12.0, 11.5)
    assert share.sampling_is_due


def test_a_claim_ends_when_there_is_no_more_work() -> None:
    """Sampling waited through a long pass, and was then cancelled. The next sample starts afresh."""
    share = DeviceShare(0.5)
    share.count_training(0.0, 100.0, 0.0)
    share.count_training(100.0, 101.0, None)
    share.count_sampling(101.0, 101.5, 101.0)
    assert not share.sampling_is_due


def test_debt_is_repaid_while_the_other_works_alone() -> None:
    share = DeviceShare(0.5)
    share.count_sampling(0.0, 60.0, 0.0)
    assert not share.sampling_is_due
    share.count_training(60.0, 121.0, None)
    assert share.sampling_is_due


@pytest.mark.parametrize("patience", [0.0, 0.3, 2.0])
def test_patience_makes_turns_longer_and_leaves_the_shares(patience: float) -> None:
    device = Device(0.4)
    device.share.patience = patience
    turns = "".join(device.run(0.06, 0.04)[0] for _ in range(5000))
    assert abs(device.sampled - 0.4 * device.now) <= 2 * patience + 0.2
    bursts = [len(burst) for burst in turns.replace("s", " ").split()]
    assert max(bursts) * 0.04 >= patience, (
        "sampling waits until so much is due: 0.04 seconds with each 0.06 of training"
    )


def test_sampling_is_put_off_until_enough_is_due_and_then_gets_it_at_once() -> None:
    device = Device(0.5)
    device.share.patience = 2.0
    assert [device.run(1.0, 1.0)[0] for _ in range(10)] == ["t", "t", "s", "s", "s", "t", "t", "t", "s", "s"]
    device.share.patience = 0.0
    assert device.run(1.0, 1.0) == "sample", "what was due is still due"


def test_what_would_be_due_later_is_not_counted() -> None:
    share = DeviceShare(0.5)
    share.count_training(0.0, 3.0, 0.0)
    assert share.is_due_after(3.0, 5.0, 0.0)
    assert not share.is_due_after(3.0, 6.5, 0.0)
    assert share.is_due_after(3.0, 5.0, None)
    assert not share.is_due_after(3.0, 7.0, 6.9), "it computed alone until training came"
    share.count_sampling(3.0, 5.0, 0.0)
    assert share.sampling_is_due
