"""Everything between HTTP and the services: identify the caller, check ownership, and choose the service.

May import: services and the rooms below them.
"""

from twinkle.compatibility import missing


def __getattr__(name: str) -> object:
    raise missing(__name__, name)
