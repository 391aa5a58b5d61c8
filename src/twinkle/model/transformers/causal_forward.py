"""The forward pass of a causal language model with autograd, from sequences to outputs for a loss.

The outputs are log-probabilities and what else is asked for; or embeddings, or the values of a critic.

For families that the tests cover, sequences run packed if their layers allow it, and the head computes
log-probabilities chunk by chunk and recomputes them in the backward pass, so that all logits exist only if they are
asked for. Log-probabilities of any other family, and of a model that outputs router logits, come from its own forward,
padded, with all logits.

Sequences with images run padded: the vision tower sees the images, and its features take the places of embeddings.

With sequence parallelism each rank of a sequence group computes a slice of the packed row, and gets the outputs of all
sequences (:mod:`twinkle.model.transformers.sequence_parallel`). Otherwise the slice is the whole row.

Shapes: B sequences, L tokens of the longest, T tokens of all, S tokens of this rank's slice of them, C rows of a chunk,
H hidden features, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from twinkle.errors import UnsupportedError
from twinkle.images import position_axes
from twinkle.model.decoder.architecture import TESTED_FAMILIES, find_layers, logit_shape, mixes_by_attention_alone
from twinkle.model.decoder.attention import PACKED
from twinkle.model.decoder.attention import register as register_packed
from twinkle.model.decoder.experts.replay import PassRoutes, WatchedRouters, watch_routers
from twinkle.model.decoder.image_rows import ImageRows
from twinkle.model.library.router_replay import routes_of
from twinkle.model.library.sequences import ROUTES, SequenceBatch
from twinkle.model.parallel import ALONE, Parallelism, Ranks
from twinkle.model.trainer.memory import head_chunk_rows
from twinkle.model.transformers.sequence_parallel import ADDED_TOKEN, SLICED, RowSlice, check_model
from twinkle.model.transformers.sequence_parallel import register as register_sliced
from twinkle.model.types import RouteArray, VisionSpec
from twinkle.model.vision.tower import deepstack_features


@dataclass(frozen=True)
class Asked:
    """Options of a forward pass: the temperature, and what to return beside log-probabilities."""

    temperature: float = 1.0
    entropies: bool = False
    predictions: bool = False
    logits: bool = False
    embeddings: bool = False  # returned instead of log-probabilities
    values: bool = False  # outputs of a head with one output, returned instead of log-probabilities
    records_routes: bool = False


class CausalForward(nn.Module):
    """Runs a model, with or without PEFT adapters. FSDP gathers shards around calls of this module.

    If it runs packed, the model's attention is replaced: direct calls of the model (such as ``generate``) raise errors.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sequence: Ranks = ALONE,
        vision: VisionSpec | None = None,
        routers: WatchedRouters | None = None,
        *,
        tower_always: bool = False,
    ) -> None:
        """sequence: the ranks that have the same rows, and share their computation. vision: see TwinkleModel.

        routers: those whose routes passes record and replay.

        tower_always: a trained vision tower is a part of every pass, also of one without images, because other ranks
        may have images, and the gradients of shards are exchanged for all parameters or none.
        """
        super().__init__()
        self._vision = vision
        self._routers = routers
        self._tower_always = tower_always
        if sequence.size > 1:
            check_model(model, sequence.size)
        config = model.config.get_text_config()
        values = config.to_dict()
        self._model = model
        self._sequence = sequence
        self._known = config.model_type in TESTED_FAMILIES and not values.get("output_router_logits")
        self.packed = self._known and mixes_by_attention_alone(model) and not values.get("attention_dropout")
        self._scale, self._softcap = logit_shape(config)
        if self.packed and sequence.size > 1:
            register_sliced()
            model.set_attn_implementation(SLICED)
        elif self.packed:
            register_packed()
            model.set_attn_implementation(PACKED)

    def forward(self, batch: SequenceBatch, asked: Asked) -> dict[str, Tensor]:
        """Return (B, L) "logps" and, as asked, "entropies", "predictions" and (B, L, V) "logits".

        With ``asked.embeddings``, only (B, H) "embeddings" is returned; with ``asked.values``, only (B, L) "values". An
        auxiliary loss of the model's own forward is returned as "aux_loss". With ``asked.records_routes``, (B, L,
        layers, K) "routed_experts" is returned, too.

        A packed row is computed with its sequences in the order of their lengths: attention without a kernel for
        packed rows (fp32 on a GPU, and everything on a CPU) takes one call for neighbours of equal length.
        """
        packed = self.packed and not batch.images
        if self._tower_always and not batch.images:
            return self._with_tower(self._outputs(batch, asked))
        order = [] if asked.logits or not packed or self._sequence.size > 1 else _order_by_length(batch.lengths)
        if not order:
            return self._outputs(batch, asked)
        outputs = self._outputs(batch.reordered(order), asked)
        places_B = torch.tensor(order).argsort()
        return {name: value_B[places_B.to(value_B.device)] for name, value_B in outputs.items()}

    def _with_tower(self, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return outputs that depend on the weights of the vision tower, which they would change by 0."""
        tower = [each for each in self._model.base_model.visual.parameters() if each.requires_grad]
        if not tower or not torch.is_grad_enabled():
            return outputs
        nothing = torch.stack([each.sum() for each in tower]).sum() * 0.0
        return {name: value + nothing if value.is_floating_point() else value for name, value in outputs.items()}

    def _outputs(self, batch: SequenceBatch, asked: Asked) -> dict[str, Tensor]:
        given = routes_of(batch)
        if self._routers is None or not (asked.records_routes or any(each is not None for each in given)):
            return self._without_routes(batch, asked)
        padded = not self.packed or bool(batch.images)
        routes = self._pass_routes(batch, given, padded=padded, records=asked.records_routes)
        with self._routers.use(routes):
            outputs = self._without_routes(batch, asked)
        if asked.records_routes:
            recorded_TLK = routes.recorded(self._routers.spec.layers)
            mask_BL = batch.mask.to(recorded_TLK.device)
            routes_BLLK = recorded_TLK.new_zeros(*mask_BL.shape, *recorded_TLK.shape[1:])
            routes_BLLK[mask_BL] = recorded_TLK[mask_BL.flatten()] if padded else recorded_TLK
            outputs[ROUTES] = routes_BLLK
        return outputs

    def _pass_routes(
        self, batch: SequenceBatch, given: Sequence[RouteArray | None], *, padded: bool, records: bool
    ) -> PassRoutes:
        """Return the routes of a pass, whose rows are the tokens of all sequences, ``padded`` or one after another."""
        assert self._routers is not None
        spec = self._routers.spec
        if all(each is None for each in given):
            return PassRoutes(None, records)
        lengths = [max(batch.lengths)] * len(given) if padded else batch.lengths
        given_TLK, start = np.full((sum(lengths), spec.layers, spec.chosen), -1, np.int16), 0
        for routes, length in zip(given, lengths, strict=True):
            if routes is not None:
                given_TLK[start : start + len(routes)] = routes
            start += length
        return PassRoutes(torch.from_numpy(given_TLK).to(self._model.device), records)

    def _without_routes(self, batch: SequenceBatch, asked: Asked) -> dict[str, Tensor]:
        if asked.embeddings:
            return {"embeddings": self._embeddings(batch)}
        if not self._known and not batch.images:
            return self._through_its_own_forward(batch, asked)
        row = self._cut(batch)
        hidden_SH = self._hidden(batch, row)
        if asked.values:
            return {"values": _padded_column(batch, row.gather(self._values(hidden_SH))[:, 0])}
        targets_T = torch.cat([torch.from_numpy(targets) for targets in batch.targets])
        targets_S = row.take_slice(targets_T, 0).to(hidden_SH.device)
        if not asked.logits:
            return _named(batch, row.gather(self._chunked(hidden_SH, targets_S, asked)), asked)
        logits_SV = self._logits(hidden_SH, asked.temperature)
        values_SM = _values(logits_SV, targets_S, asked)
        return {
            **_named(batch, row.gather(values_SM), asked),
            "logits": _padded_logits(batch, row.gather(logits_SV)),
        }

    def _cut(self, batch: SequenceBatch) -> RowSlice:
        return RowSlice.cut(batch.lengths, self._sequence, self._model.device)

    def _hidden(self, batch: SequenceBatch, row: RowSlice) -> Tensor:
        """Return hidden states (S, H), sequence after sequence."""
        device = self._model.device
        if batch.images:
            return self._hidden_with_images(batch)
        if self.packed:
            ids_T = torch.cat([each["input_ids"] for each in batch.rows])
            bounds = {"packing": row.packing} if self._sequence.size == 1 else {"row_slice": row}
            output = self._model.base_model(
                input_ids=row.take_slice(ids_T, ADDED_TOKEN)[None].to(device),
                position_ids=row.positions()[None].to(device),
                use_cache=False,
                **bounds,
            )
            return output.last_hidden_state[0]
        inputs = batch.loss_inputs
        output = self._model.base_model(
            input_ids=inputs["input_ids"].to(device),
            attention_mask=inputs["attention_mask"].to(device),
            use_cache=False,
        )
        return output.last_hidden_state[batch.mask.to(device)]

    def _hidden_with_images(self, batch: SequenceBatch) -> Tensor:
        """Return hidden states (T, H) of sequences of which some have images."""
        device, mask_BL = self._model.device, batch.mask
        rows = self._image_rows(batch, mask_BL.shape[1])
        positions = np.zeros((4, *mask_BL.shape), np.int64)
        positions[0] = np.arange(mask_BL.shape[1])
        seen_BL = torch.zeros_like(mask_BL)
        for number, (images, length) in enumerate(zip(batch.images, batch.lengths, strict=True)):
            placed = [(image.first, image.rows, image.columns) for image in images]
            positions[1:, number, :length] = position_axes(length, placed)
            for image in images:
                seen_BL[number, image.first : image.first + image.tokens] = True
        embeddings = self._model.get_input_embeddings()(batch.loss_inputs["input_ids"].to(device))
        # only a decoder with DeepStack has these arguments
        added = {"visual_pos_masks": seen_BL.to(device), "deepstack_visual_embeds": list(rows.added)}
        output = self._model.get_decoder()(
            inputs_embeds=rows.put(embeddings),
            attention_mask=mask_BL.long().to(device),
            position_ids=torch.from_numpy(positions).to(device),
            use_cache=False,
            **(added if rows.added else {}),
        )
        return output.last_hidden_state[mask_BL.to(device)]

    def _image_rows(self, batch: SequenceBatch, longest: int) -> ImageRows:
        """Run the vision tower, with autograd if it is trained, on all images of a batch."""
        assert self._vision is not None, "the batch has images"
        merge, tower = self._vision.merge, self._model.base_model
        images = [(number * longest, image) for number, own in enumerate(batch.images) for image in own]
        rows = np.concatenate([np.arange(image.tokens) + start + image.first for start, image in images])
        patches = torch.from_numpy(np.concatenate([image.pixels for _, image in images])).to(self._model.device)
        grids = torch.tensor([(1, image.rows * merge, image.columns * merge) for _, image in images])
        seen = tower.get_image_features(patches, grids.to(self._model.device), return_dict=True)
        layers = deepstack_features(seen, [image.tokens for _, image in images])
        rows_n = torch.from_numpy(rows).to(self._model.device)
        return ImageRows(rows_n, torch.cat(list(seen.pooler_output)), tuple(torch.cat(list(each)) for each in layers))

    def _embeddings(self, batch: SequenceBatch) -> Tensor:
        """Return the hidden state of each sequence's last token, normalised to length 1."""
        row = self._cut(batch)
        hidden_SH = self._hidden(batch, row)
        last_B = torch.tensor(batch.lengths).cumsum(0) - 1
        return F.normalize(row.gather_tokens(hidden_SH, last_B.to(hidden_SH.device)).float(), dim=-1)

    def _values(self, hidden_SH: Tensor) -> Tensor:
        """Return the outputs (S, 1) of a value head in fp32, also under autocast; a scale or cap of logits is left out.

        One number per token costs nothing in fp32, and bf16 would round a critic's values to three digits.
        """
        head = self._model.get_output_embeddings()
        with torch.autocast(hidden_SH.device.type, enabled=False):
            return F.linear(hidden_SH.float(), head.weight.float(), head.bias.float())

    def _logits(self, hidden_CH: Tensor, temperature: float) -> Tensor:
        logits_CV = self._model.get_output_embeddings()(hidden_CH).float()
        if self._scale != 1.0:
            logits_CV = logits_CV * self._scale
        if self._softcap is not None:
            logits_CV = self._softcap * torch.tanh(logits_CV / self._softcap)
        return logits_CV if temperature == 1.0 else logits_CV / temperature

    def _chunked(self, hidden_SH: Tensor, targets_S: Tensor, asked: Asked) -> Tensor:
        rows = head_chunk_rows(hidden_SH.device, self._model.config.get_text_config().vocab_size)

        def values(hidden_CH: Tensor, targets_C: Tensor) -> Tensor:
            return _values(self._logits(hidden_CH, asked.temperature), targets_C, asked)

        run: Callable[[Tensor, Tensor], Tensor] = values
        if torch.is_grad_enabled():
            run = partial(checkpoint, values, use_reentrant=False)
        return torch.cat([run(*chunk) for chunk in zip(hidden_SH.split(rows), targets_S.split(rows), strict=True)])

    def _through_its_own_forward(self, batch: SequenceBatch, asked: Asked) -> dict[str, Tensor]:
        device, inputs = self._model.device, batch.loss_inputs
        output = self._model(
            input_ids=inputs["input_ids"].to(device),
            attention_mask=inputs["attention_mask"].to(device),
            use_cache=False,
        )
        logits_TV = output.logits[batch.mask.to(device)].float() / asked.temperature
        if asked.values:
            outputs = {"values": _padded_column(batch, logits_TV[:, 0])}
        else:
            targets_T = torch.cat([torch.from_numpy(targets) for targets in batch.targets]).to(device)
            outputs = _named(batch, _values(logits_TV, targets_T, asked), asked)
        if asked.logits:
            outputs["logits"] = _padded_logits(batch, logits_TV)
        aux_loss = output.get("aux_loss")
        return outputs if aux_loss is None else {**outputs, "aux_loss": aux_loss}


def watched_routers(model: PreTrainedModel, parallel: Parallelism) -> WatchedRouters:
    """Return the routers of a model, whose routes passes can record and replay from now on."""
    if parallel.sequence.size > 1:
        raise UnsupportedError(
            "enable_router_replay: ranks that divide sequences cannot replay routes; ulysses_size: 1"
        )
    routers = watch_routers(list(model.get_submodule(find_layers(model)).children()))
    if routers is None:
        raise UnsupportedError(
            f"enable_router_replay: {model.config.model_type} has no routers to experts whose choice can be recorded"
        )
    return routers


def _order_by_length(lengths: Sequence[int]) -> list[int]:
    """Return the places of sequences, shortest first; empty if equal lengths are neighbours already."""
    if len(list(groupby(lengths))) == len(set(lengths)):
        return []
    return sorted(range(len(lengths)), key=lambda i: lengths[i])


def _values(logits_CV: Tensor, targets_C: Tensor, asked: Asked) -> Tensor:
    """Return log p(target) and, as asked, entropy and the most likely token: (C, 1 to 3)."""
    norm_C = logits_CV.logsumexp(-1)
    columns = [logits_CV.gather(1, targets_C[:, None])[:, 0] - norm_C]
    if asked.entropies:
        columns.append(norm_C - (logits_CV.softmax(-1) * logits_CV).sum(-1))
    if asked.predictions:
        columns.append(logits_CV.detach().argmax(-1).float())
    return torch.stack(columns, 1)


def _padded_logits(batch: SequenceBatch, logits_TV: Tensor) -> Tensor:
    mask_BL = batch.mask.to(logits_TV.device)
    logits_BLV = logits_TV.new_zeros(*mask_BL.shape, logits_TV.shape[-1])
    return logits_BLV.masked_scatter(mask_BL[..., None], logits_TV)


def _named(batch: SequenceBatch, values_TM: Tensor, asked: Asked) -> dict[str, Tensor]:
    names = ["logps", *(["entropies"] if asked.entropies else []), *(["predictions"] if asked.predictions else [])]
    columns = {name: _padded_column(batch, values_TM[:, i]) for i, name in enumerate(names)}
    if asked.predictions:
        columns["predictions"] = columns["predictions"].detach().long()
    return columns


def _padded_column(batch: SequenceBatch, values_T: Tensor) -> Tensor:
    """Return one value per token as (B, L), with 0 in the padding."""
    mask_BL = batch.mask.to(values_T.device)
    return values_T.new_zeros(mask_BL.shape).masked_scatter(mask_BL, values_T)
