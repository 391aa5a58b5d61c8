"""A session with a server, over HTTP: connections, retries, heartbeats, the order of an adapter's requests, JSON.

May import: ``protocol``, ``errors``, ``environment``. All other parts of the client use this package.
"""

from twinkle_client.client.session import TwinkleClient

__all__ = ["TwinkleClient"]
