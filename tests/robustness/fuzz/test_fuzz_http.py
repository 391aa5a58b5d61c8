"""Valid and invalid requests made from our OpenAPI document: none of them may cause a server error."""

import contextlib
import json
import os
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.support.servers.running import Server, Tenant, key_for

_ALLOWED = (503, 507)  # 503: not available now; 507: the disk is full
_SECONDS = 60.0  # longest time for an answer; the longest poll takes 25
# These would contact a hub, start a process with torch for each request, or are protobuf (see test_fuzz_decoders.py).
_LEFT_OUT = ("/upload_to_hub", "/processor/", "/forward_backward")


@dataclass(frozen=True)
class Ids:
    """Ids of existing objects, which replace made-up ones in half of the requests."""

    values: dict[str, str]

    @classmethod
    def of(cls, tenant: Tenant) -> "Ids":
        session = tenant.session()
        model = tenant.model(session)
        request = tenant.forward_backward(model, 1)
        sampler = tenant.json(tenant.publish(model, 2))["sampling_session_id"]
        return cls(
            {
                "session_id": session,
                "model_id": model,
                "run_id": model,
                "request_id": request,
                "sampling_session_id": sampler,
                "sampler_id": sampler,
                "base_model": "mock",
                "model": "mock",
                "name": "mock",
            }
        )

    def put_into(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self.values.get(key, self.put_into(each)) for key, each in value.items()}
        if isinstance(value, list):
            return [self.put_into(each) for each in value]
        return value


def test_bodies_are_described(target: Server) -> None:
    document = httpx.get(f"{target.url}/openapi.json", trust_env=False).json()
    bodies = [path for path, operations in document["paths"].items() if "requestBody" in operations.get("post", {})]
    assert len(bodies) > 20
    body = document["paths"]["/api/v1/optim_step"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    name = body["$ref"].rpartition("/")[2]
    described = document["components"]["schemas"][name]
    assert {"model_id", "seq_id"} <= described["properties"].keys()
    assert "model_id" in described["required"]


@pytest.mark.fuzz
def test_made_from_the_document(target: Server) -> None:
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, seed, settings
    from hypothesis.errors import Unsatisfiable

    schema = schemathesis.openapi.from_url(f"{target.url}/openapi.json")
    number = int(os.environ.get("FUZZ_SEED") or time.time_ns())
    examples = int(os.environ.get("FUZZ_EXAMPLES") or 40)
    print(f"\nFUZZ_SEED={number}")
    tenant = Tenant(target.url, key_for("schemathesis"))
    ids, counts = Ids.of(tenant), Counter[int]()
    slowest = (0.0, "")
    for result in schema.get_all_operations():
        operation = result.ok()
        if any(part in operation.path for part in _LEFT_OUT):
            continue
        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
            started = time.perf_counter()

            @seed(number)
            @settings(
                max_examples=examples,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def attempt(case: Any) -> None:
                if len(counts) and sum(counts.values()) % 2:
                    case.body = ids.put_into(case.body)
                    case.path_parameters = ids.put_into(case.path_parameters)
                if isinstance(case.body, dict) and "target" in case.body:
                    case.body["timeout"] = 0.01  # shortens a poll that will get no result
                headers = {"X-API-Key": tenant.key, "X-Twinkle-Session-Id": ids.values["session_id"]}
                answer = case.call(headers=headers, timeout=_SECONDS)
                counts[answer.status_code] += 1
                assert answer.status_code < 500 or answer.status_code in _ALLOWED, (
                    f"{case.method} {case.formatted_path}: {answer.status_code} {answer.text[:300]}\n"
                    f"{json.dumps(case.body, default=repr)[:2000]}"
                )

            with contextlib.suppress(Unsatisfiable):  # a route without parameters has no invalid requests
                attempt()
            slowest = max(slowest, (time.perf_counter() - started, f"{operation.method} {operation.path}"))
    print(f"{sum(counts.values())} requests: {dict(sorted(counts.items()))}; longest {slowest[1]} {slowest[0]:.1f} s")
