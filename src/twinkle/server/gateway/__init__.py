"""Everything between HTTP and the services: identify the caller, check ownership, and choose the service.

May import: services and the rooms below them.
"""

from twinkle.compatibility import find_name


def __getattr__(name: str) -> object:
    return find_name(__name__, name)
