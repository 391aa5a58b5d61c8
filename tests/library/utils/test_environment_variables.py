"""Every environment variable of the existing library is read here, or docs/compatibility.md says why not."""

import pytest

from tests.support.paths import ROOT

READ_BY_SCRIPTS = [
    "TWINKLE_TRUST_REMOTE_CODE",
    "TWINKLE_FULL_DETERMINISM",
    "TWINKLE_SEED",
    "TWINKLE_MODE",
    "TWINKLE_NAME",
    "TWINKLE_SESSION_ID",
    "TWINKLE_NOTIFIER",
    "TWINKLE_FAIL_FAST",
    "TWINKLE_FORBID_HF",
    "TWINKLE_DIST_TIMEOUT_SECONDS",
    "TWINKLE_CPU_PG_CPUS_PER_PROC",
    "TWINKLE_MODEL_ID_ALIASES",
    "TWINKLE_SERVER_URL",
    "TWINKLE_SERVER_TOKEN",
    "TWINKLE_SERVER_CONFIG",
    "TWINKLE_RAY_NAMESPACE",
    "TWINKLE_PRINT_FORMAT",
    "TWINKLE_DEFAULT_SAVE_DIR",
    "TWINKLE_PER_USER_PROCESSOR_LIMIT",
    "TWINKLE_LONG_POLL_TIMEOUT",
    "LOG_LEVEL",
    "LOCAL_RANK",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "NNODES",
    "NODE_RANK",
]
DECLARED = [
    "TWINKLE_VLLM_BUCKET_SIZE_MB",
    "TWINKLE_VLLM_IPC_TIMEOUT_S",
    "TWINKLE_CKPT_HCCL_META_TIMEOUT_S",
    "TWINKLE_NPU_FLA",
    "TWINKLE_NPU_GATED_RMSNorm_FP32",
    "TWINKLE_TOKEN_SALT",
    "TWINKLE_PERSISTENCE_KEY_PREFIX",
    "TWINKLE_POLL_INTERVAL",
    "TWINKLE_TELEMETRY_",
    "TWINKLE_AUTO_VISIBLE_DEVICES_FROM_ENV",
]


@pytest.mark.parametrize("name", READ_BY_SCRIPTS)
def test_variables_that_are_read(name):
    sources = [ROOT / "src" / package / "environment.py" for package in ("twinkle", "twinkle_client")]
    assert any(f'"{name}"' in source.read_text() for source in sources)


def test_variables_that_are_not_read_are_on_the_page():
    page = (ROOT / "docs" / "compatibility.md").read_text()
    section = page.split("## Library: environment variables")[1].split("\n## ")[0]
    assert not [name for name in DECLARED if name not in section]
