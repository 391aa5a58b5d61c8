"""What the answers of a group's ranks mean: a group is one thing, and a rank that fails alone ends it."""

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from twinkle.server.runtime.ray.replica import Failure, end_process

_GRACE_SECONDS = 60.0  # after a failure of one rank, for the others to fail too


def answers_of(calls: Sequence[Any]) -> list[Any]:
    """Return the answers of the ranks to ``calls``, one for each rank that is asked.

    If all failed, raise the error of one. If a rank died or only some failed, the ranks are no longer in the same
    state: then this process ends.
    """
    answers: dict[Any, Any] = {}
    failed = False
    while len(answers) < len(calls):
        waiting = [call for call in calls if call not in answers]
        done, _ = ray.wait(waiting, num_returns=1, timeout=_GRACE_SECONDS if failed else None)
        if not done:
            end_process("a process of the model's group failed and the others hang")
        try:
            answers[done[0]] = ray.get(done[0])
        except RayError as error:
            end_process(f"a process of the model's group died: {error}")
        failed = failed or isinstance(answers[done[0]], Failure)
    failures = [answer for answer in answers.values() if isinstance(answer, Failure)]
    if failures and len(failures) < len(calls):
        end_process(f"one process of the model's group failed and another did not: {failures[0].error}")
    if failures:
        raise failures[0].error
    return [answers[call] for call in calls]
