"""From the configuration to the processor service."""

from collections.abc import Mapping

from twinkle.server.config import ServerConfig
from twinkle.server.processors.frames import Settings
from twinkle.server.processors.service import ProcessorLimits, ProcessorService

__all__ = ["configured_processors"]


def configured_processors(
    config: ServerConfig, tokenizers: Mapping[str, str | None], place: str = ""
) -> ProcessorService | None:
    """None where the configuration has no application for it.

    ``tokenizers``: folders by the name of the served model. ``place``: of one among several in their directory.
    """
    if config.processor is None:
        return None
    limits = config.limits
    settings = Settings(
        allowed_dirs=tuple(str(directory) for directory in config.allowed_dirs),
        tokenizers=dict(tokenizers),
        cache_dir="",  # each worker has its own
        memory_bytes=int(limits.processor_memory_gib * 2**30),
        answer_bytes=limits.max_request_bytes,
        hub_bytes=limits.max_hub_download_bytes,
        disk_bytes=int(limits.processor_disk_gib * 2**30),
    )
    processor_limits = ProcessorLimits(
        processors_per_tenant=limits.max_processors_per_tenant,
        workers_per_tenant=limits.max_processor_sessions_per_tenant,
        workers=config.processor.max_workers,
        call_seconds=limits.processor_call_seconds,
        batch_bytes_per_tenant=limits.max_referenced_batch_bytes_per_tenant,
        batch_bytes=limits.max_referenced_batch_bytes,
    )
    return ProcessorService(config.data_dir / "processors" / place, settings, processor_limits)
