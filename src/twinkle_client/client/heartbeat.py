"""Heartbeats: tell the server every few seconds that the client is alive, and notice when the session is gone."""

import logging
import threading
from collections.abc import Callable

from twinkle_client.errors import GoneError, InvalidRequestError, NotFoundError, TwinkleClientError

__all__ = ["Heartbeat"]

logger = logging.getLogger(__name__)


class Heartbeat:
    """The daemon thread that sends heartbeats. ``beat`` sends one heartbeat and raises the server's error, if any.

    If the server no longer knows the session, the session is lost: that is logged once, the reason is stored in
    ``lost``, and the thread ends. If the server cannot be reached, it may come back, and the thread goes on.
    """

    def __init__(self, session_id: str, interval: float, beat: Callable[[], object]) -> None:
        self.lost: str | None = None
        self._session_id = session_id
        self._interval = interval
        self._beat = beat
        self._stop = threading.Event()
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="TwinkleSessionHeartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(2.0)

    def mark_lost(self, reason: str) -> None:
        """Record that the session is lost and stop. Called by this thread or by a request, whichever notices first."""
        if self.lost is None:
            self.lost = reason
            logger.warning("session %s is gone: %s", self._session_id, reason)
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._once()
            self._stop.wait(self._interval)

    def _once(self) -> None:
        try:
            self._beat()
        except (NotFoundError, GoneError, InvalidRequestError) as error:
            self.mark_lost(error.detail)
        except TwinkleClientError as error:
            if not self._failing and not self._stop.is_set():
                logger.warning("a heartbeat of session %s failed: %s", self._session_id, error)
            self._failing = True
        except RuntimeError:  # the transport was closed while a heartbeat was being sent
            if not self._stop.is_set():
                raise
        else:
            if self._failing:
                logger.info("the heartbeat of session %s is back", self._session_id)
            self._failing = False
