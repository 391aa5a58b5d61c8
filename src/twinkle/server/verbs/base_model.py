"""Passes of the base model: ``forward_only`` without an adapter.

Nothing changes the base model, so such a pass has no sequence number and is not journalled: a client that missed the
answer asks again and gets the same. Otherwise it is treated like an op: it is subject to the tenant's limits on queued
ops and on tokens per minute, runs in the compute thread and counts as usage.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from twinkle.errors import QuotaError, UnsupportedError
from twinkle.model.objectives.validation import in_terms_of_rows
from twinkle.model.types import TrainFailure
from twinkle.server.backends.backend import ServedModel, run_passes
from twinkle.server.backends.compute_thread import Compute
from twinkle.server.services.images import RequestImages
from twinkle.server.tenancy.tenants import Tenants
from twinkle.server.tenancy.work_pools import TenantTurns
from twinkle.server.types import NativePass, Outcome, Tally
from twinkle.server.usage import UsageCounts
from twinkle.server.verbs.codec import succeeded
from twinkle.server.verbs.features import Row, are_encoded, as_rows, checked_rows
from twinkle.server.verbs.verbs import NO_ADAPTER, parse, payload_of
from twinkle.server.wire.image_files import ImageAllowance

if TYPE_CHECKING:  # it needs torch
    from twinkle.server.verbs.adapters import NativeAdapters

_VERB = "forward_only"


class BaseModelPasses:
    """Runs the base-model passes of one served model. A tenant runs one at a time; its other base-model passes wait."""

    def __init__(
        self, model: ServedModel, adapters: "Callable[[], NativeAdapters]", compute: Compute, tenants: Tenants
    ) -> None:
        """Prepare without loading anything: ``adapters`` loads the library's verbs when it is first called."""
        self._model = model
        self._images = RequestImages(model, tenants.pools.images)
        self._adapters = adapters
        self._compute = compute
        self._tenants = tenants
        self._turns = TenantTurns(at_once=1)
        self._waiting = Tally()  # passes by tenant, those that wait and those that run

    async def forward(
        self, tenant_id: str, fields: Mapping[str, Any], max_tokens: int, left: ImageAllowance
    ) -> Outcome:
        """Compute one pass and return its outcome. ``fields``: those of the request's JSON. ``left``: the images that
        it may have.

        A mistake in the fields, a limit that is exceeded and a failure of the pass are raised as errors. With
        ``train_mode: full`` there is no base model to compute with: the weights are those of whoever trains them.
        """
        if self._model.train_mode == "full":
            raise UnsupportedError(
                f"adapter_name: got none, allowed: a run of this session ({self._model.name} is served with "
                "train_mode: full, and its weights are those of the run that trains them)"
            )
        limits = self._tenants.limits(tenant_id)
        limit = limits.max_training_tokens_per_minute
        with self._waits(tenant_id):
            self._tenants.training_rate.check(tenant_id, limit)
            async with self._turns.turn(tenant_id):
                rows = await self._rows(tenant_id, fields.get("inputs"), max_tokens, left)
                asked = payload_of(_VERB, parse(_VERB, {**fields, "inputs": rows}), rows)
                assert isinstance(asked, NativePass)
                if asked.sent:
                    seen = await self._images.read(asked, tenant_id, limits)
                    assert isinstance(seen, NativePass)
                    asked = seen
                self._tenants.training_rate.charge(tenant_id, asked.price.cost, limit)
                outcome = await self._compute.run(partial(self._computed, asked))
        self._tenants.usage.add(tenant_id, UsageCounts(trained_tokens=asked.tokens, requests=1))
        return outcome

    def _waits(self, tenant_id: str) -> AbstractContextManager[None]:
        most, waiting = self._tenants.limits(tenant_id).max_queued_ops_per_tenant, self._waiting[tenant_id]
        if waiting >= most:
            raise QuotaError("queued passes of the base model", waiting, most, "max_queued_ops_per_tenant")
        return self._waiting.counting(tenant_id)

    async def _rows(self, tenant_id: str, inputs: object, max_tokens: int, left: ImageAllowance) -> tuple[Row, ...]:
        """Return checked rows. Conversations are encoded with the plain template: only adapters have a chosen one."""
        rows, text = as_rows(inputs), self._tenants.pools.text
        if not are_encoded(rows):
            sent = rows  # in a thread, because the first call of ``_adapters`` imports torch
            rows = await text.in_thread(tenant_id, lambda: self._adapters().encode(NO_ADAPTER, sent, max_tokens))
        return await text.in_thread(tenant_id, partial(checked_rows, rows, max_tokens, left))

    def _computed(self, asked: NativePass) -> Outcome:
        """Compute the pass. Runs in the compute thread."""
        alone = replace(asked, options={**asked.options, "disable_lora": True})
        prepared = self._adapters().prepare_without_adapter(alone)
        trainer, let_sampling_run = self._model.trainer, self._compute.let_sampling_run
        (result,) = run_passes(trainer, [prepared.item], train=False, let_sampling_run=let_sampling_run)
        if isinstance(result, TrainFailure):
            raise in_terms_of_rows(result.error)
        lengths = [len(datum.tokens) for datum in prepared.item.data]
        rows = self._adapters().rows(prepared.absorb(result), lengths)
        return succeeded({"result": {"loss": None, "num_tokens": None, **rows}})
