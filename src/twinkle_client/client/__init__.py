"""A session with a server, over HTTP: connections, retries, heartbeats, the order of an adapter's requests, JSON.

May import: ``protocol``, ``errors``, ``environment``. Everything else of the client stands on this.
"""

from twinkle_client.client.session import TwinkleClient

__all__ = ["TwinkleClient"]
