"""How a model is called in addresses."""

from urllib.parse import quote

from twinkle_client.errors import invalid

__all__ = ["model_name", "service_path"]


def model_name(model_id: str) -> str:
    """Without the scheme: ``ms://Qwen/Qwen3-4B`` is served as ``Qwen/Qwen3-4B``."""
    name = model_id.split("://", 1)[-1] if isinstance(model_id, str) else ""
    if not name:
        raise invalid("model_id", model_id, "the id of a model that the server has")
    return name


def service_path(service: str, name: str) -> str:
    """service: model or sampler. The name may hold slashes."""
    return f"/{service}/{quote(name.strip('/'))}/twinkle"
