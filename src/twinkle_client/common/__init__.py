"""The import path under which scripts and servers look for :mod:`twinkle_client.common.serialize`; nothing else."""
