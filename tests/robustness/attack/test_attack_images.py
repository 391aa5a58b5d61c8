"""Small image files that become large when they are decoded: many at once neither kill the server nor block it."""

import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image as Pillow

from tests.robustness.attack.confined import ConfinedServer
from tests.robustness.attack.test_attack_memory import worst_healthz
from tests.support.models.sdk_images import SEES
from tests.support.servers.running import MODEL, Tenant, tensor, torch_config, training_body
from twinkle.server.wire import tinker_pb2 as pb

pytestmark = pytest.mark.attack

SIDE = 5792  # its square is just below limits.max_image_pixels
TENANTS, IMAGES = 4, 7
TOKENS = 64  # the most of an image of this model


def one_colour(mode: str) -> bytes:
    written = io.BytesIO()
    Pillow.new(mode, (SIDE, SIDE), 3 if mode == "P" else None).save(written, "PNG")
    return written.getvalue()


def body(model: str, images: list[bytes]) -> bytes:
    chunks = [pb.Chunk(image=pb.ImageChunk(data=data, format="png")) for data in images]
    text = pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=np.array([1], "<i4").tobytes()))
    targets = {"target_tokens": tensor([0] * (TOKENS * len(images) + 1), "i8")}
    return training_body(model, 1, [pb.Datum(model_input=[*chunks, text], loss_fn_inputs=targets)], forward_only=True)


def test_images_that_become_large(confined_server: Callable[..., ConfinedServer]) -> None:
    """The pixels of all requests together are more than the server's memory."""
    server = confined_server(torch_config(SEES, aliases=[MODEL]))
    files = [one_colour("RGBA"), one_colour("P")]
    assert max(map(len, files)) < 2**20
    assert TENANTS * IMAGES * 4 * SIDE**2 > 3 * 2**30
    tenants = [Tenant(server.url, f"tml-greedy{number}") for number in range(TENANTS)]
    models = [tenant.model() for tenant in tenants]
    with worst_healthz(server) as worst, ThreadPoolExecutor(TENANTS) as pool:
        asked = [
            pool.submit(tenant.submit, "forward_backward", body(model, (files * IMAGES)[:IMAGES]))
            for tenant, model in zip(tenants, models, strict=True)
        ]
        results = [tenant.result(each.result()) for tenant, each in zip(tenants, asked, strict=True)]
    print(f"worst healthz {worst[0]:.2f} s")
    assert not [result for result in results if b'"category"' in result]
    assert worst[0] < 5
