"""Tests of Megatron on Ray. The default environment has no megatron-core, and some files here import it."""

import twinkle

collect_ignore_glob = [] if twinkle.exists("megatron-core") else ["test_*.py"]
