"""Divides the time of the compute thread between training and sampling while both have work.

Sampling gets the configured share of that time, training the rest. Time in which only one of the two has work is not
shared: it gives the other no claim for later, and the one that used it owes nothing. With a ``patience``, sampling is
put off until so many seconds are due, and then gets them at once: the shares are the same, but the turns are longer.
Plain Python; the caller gives the times, all in seconds of one clock.
"""


class DeviceShare:
    """Counts what training and sampling have used, and says which of them is to compute next."""

    def __init__(self, sampling_share: float) -> None:
        """``sampling_share``: sampling's part of the time while both have work, above 0 and below 1."""
        assert 0 < sampling_share < 1, "the configuration checks it"
        self._sampling_per_training = sampling_share / (1 - sampling_share)
        self._due = 0.0  # seconds that sampling may still use; below 0, training is to compute first
        self.patience = 0.0  # seconds that are to be due before sampling goes first; any thread may set it
        self._catches_up = False  # sampling was put off long enough: it goes first until nothing is due

    @property
    def sampling_is_due(self) -> bool:
        """Return whether sampling goes first, if it has work. Without patience, it does when neither has used more than
        its share.
        """
        return self._is_due(self._due)

    def is_due_after(self, began: float, ended: float, training_since: float | None) -> bool:
        """Return whether sampling would go first after it has computed for this time. Nothing is counted."""
        return self._is_due(self._due_after(began, ended, training_since))

    def count_training(self, began: float, ended: float, sampling_since: float | None) -> None:
        """Note that training computed. ``sampling_since``: since when sampling has had work; None: it has none."""
        alone, both = _divided(began, ended, sampling_since)
        if alone > 0:  # repays what sampling has used too much; a claim that was not used ends
            self._due = min(0.0, self._due + alone * self._sampling_per_training)
            self._catches_up = False
        self._due += both * self._sampling_per_training
        self._catches_up = self.sampling_is_due

    def count_sampling(self, began: float, ended: float, training_since: float | None) -> None:
        """Note that sampling computed. ``training_since``: since when training has had work; None: it has none."""
        self._due = self._due_after(began, ended, training_since)
        self._catches_up = self.sampling_is_due and training_since is not None

    def _is_due(self, seconds: float) -> bool:
        return seconds >= (0.0 if self._catches_up else self.patience)

    def _due_after(self, began: float, ended: float, training_since: float | None) -> float:
        alone, both = _divided(began, ended, training_since)
        return (max(0.0, self._due - alone) if alone > 0 else self._due) - both


def _divided(began: float, ended: float, other_since: float | None) -> tuple[float, float]:
    """Return for how long one side computed while the other had no work, and then while it had some."""
    joined = ended if other_since is None else min(max(began, other_since), ended)
    return joined - began, ended - joined
