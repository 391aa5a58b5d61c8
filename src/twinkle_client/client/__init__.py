"""A session with a server, over HTTP: connections, retries, heartbeats, the order of an adapter's requests, JSON.

May import: ``protocol``, ``errors``, ``environment``. Models, samplers and remote objects use this package.
"""

from twinkle_client.client.session import TwinkleClient

__all__ = ["TwinkleClient"]
