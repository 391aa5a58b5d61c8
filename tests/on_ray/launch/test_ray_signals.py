"""A signal that arrives while a launch waits for Ray."""

import os
import signal
import time

import pytest

from twinkle.server.runtime.ray.running import StopSignals

pytestmark = pytest.mark.ray


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_call_of_ray(cluster, sent: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    """Ray's calls let KeyboardInterrupt through, but make a SystemError of anything else that a handler raises."""
    import ray

    def strike(pid: int) -> None:
        os.kill(pid, sent)
        time.sleep(20)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(KeyboardInterrupt), StopSignals().raising():
            ray.get(ray.remote(num_cpus=0, max_retries=0)(strike).remote(os.getpid()))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert f"{sent.name}: taking down what is deployed" in capfd.readouterr().err
