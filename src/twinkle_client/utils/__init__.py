"""The import path under which scripts look for :mod:`twinkle_client.utils.patch_tinker`; nothing else."""
