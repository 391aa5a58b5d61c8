"""The HTTP client of a Twinkle server. It needs httpx, pydantic and numpy; neither torch nor ``twinkle``."""

__all__: list[str] = []

__version__ = "0.1.0"
