"""A model name that the server does not serve: every client is told the names that it serves."""

from collections.abc import Callable

import openai
import pytest
import tinker

import twinkle_client
from tests.support.servers.running import MODEL, Server, Tenant
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.sampler import Sampler

WRONG = "Qwen/Qwen3-4B-Instruct-2507"


@pytest.fixture
def native(server: Server, tenant: Tenant) -> twinkle_client.TwinkleClient:
    client = twinkle_client.init_twinkle_client(server.url, tenant.key)
    yield client
    client.close()


@pytest.mark.parametrize("kind", [MultiLoraTransformersModel, Sampler])
def test_twinkle_client(kind: Callable[[str], object], native: twinkle_client.TwinkleClient) -> None:
    with pytest.raises(twinkle_client.NotFoundError) as caught:
        kind(WRONG)
    assert f"unknown model '{WRONG}' (served: {MODEL})" in str(caught.value)


@pytest.mark.complaint("unknown base_model")
def test_tinker_sdk(server: Server, tenant: Tenant) -> None:
    service = tinker.ServiceClient(base_url=server.url, api_key=tenant.key)
    for create in (service.create_lora_training_client, service.create_sampling_client):
        with pytest.raises(tinker.BadRequestError, match=f"unknown base_model '{WRONG}'; known: {MODEL}"):
            create(base_model=WRONG)
    service.close("success").result()


def test_openai(server: Server, tenant: Tenant) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=tenant.key)
    expected = f"unknown model '{WRONG}'; served: {MODEL}; GET /v1/models also lists your runs and checkpoints"
    with pytest.raises(openai.NotFoundError, match=expected):
        client.chat.completions.create(model=WRONG, messages=[{"role": "user", "content": "Hello"}])
    with pytest.raises(openai.NotFoundError, match=expected):
        client.models.retrieve(WRONG)
