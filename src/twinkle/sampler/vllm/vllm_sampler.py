"""A sampler on vLLM, beside a trainer that holds the same base model.

vLLM only generates. Prompt scores (log-probabilities, likeliest tokens, target tokens, alternatives) are computed by a
torch sampler on the trainer's own model, from the same frozen weights, because vLLM mixes up the adapters of prompts
that it scores in one batch as soon as one of them may have LoRA on the head. Every version is compared with the trainer
before it is used: one that vLLM applies only in part is refused, unless its effect is too small to measure.

vLLM has its own vision tower, and computes the features of images itself.

``step`` waits a moment for tokens when there is nothing else to do; between calls, training has the thread.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from twinkle.environment import set_variable_defaults
from twinkle.errors import (
    InvalidInputError,
    TwinkleError,
    TwinkleServerError,
    UnsupportedError,
)
from twinkle.extras import missing
from twinkle.model.adapters import checkpoint
from twinkle.model.adapters.expert_exports import VLLM_FORMS
from twinkle.model.trainer.trainer import Trainer
from twinkle.model.types import VisionSpec
from twinkle.sampler.torch_sampler.jobs import Tokenizer
from twinkle.sampler.torch_sampler.sampler import TorchSampler
from twinkle.sampler.types import Finished, Progress, SampleFailure, SampleRequest, SampleResult, SamplingParams
from twinkle.sampler.validation import CheckedRequest, Limits, check_request

try:
    import vllm
except ImportError as error:
    raise missing("vllm", "sampler_type: vllm") from error

from twinkle.sampler.vllm.base_folder import base_folder, require_served
from twinkle.sampler.vllm.engine import Arrival, Ended, Engine, Failed
from twinkle.sampler.vllm.engine_args import make_engine_args
from twinkle.sampler.vllm.engine_weights import EngineWeights
from twinkle.sampler.vllm.prompts import Pictures, Prompt
from twinkle.sampler.vllm.requests import Request
from twinkle.sampler.vllm.self_check import SelfCheck, kinds, made_up_adapters, probe, probe_with_image
from twinkle.sampler.vllm.versions import (
    EXPERTS,
    AdapterWeights,
    Version,
    VersionFiles,
    partners_of,
    read_adapter,
    require_rank,
)

MEMORY_DIR = Path("/dev/shm")
WAKE_TAGS = ("weights", "kv_cache")  # what sleep frees, by vLLM's names
_WAIT_SECONDS = 0.02
_SCORED_AT_ONCE = 16  # prompts
# "spawn", because a server has threads when vLLM starts its processes.
_VARIABLES = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


class VllmSampler:
    """The sampler on vLLM; implements :class:`~twinkle.sampler.types.Sampler`. :meth:`close` ends vLLM's processes."""

    def __init__(
        self,
        trainer: Trainer,
        tokenizer: Tokenizer | None,
        *,
        engine_args: Mapping[str, object] | None = None,
        memory_dir: Path = MEMORY_DIR,
        adapters: bool = True,
        publisher: Trainer | None = None,
    ) -> None:
        """Start vLLM with the trainer's base model, which takes about half a minute.

        tokenizer: see :class:`TorchSampler`. engine_args: see :mod:`twinkle.sampler.vllm.engine_args`.
        memory_dir: a directory in memory (a tmpfs) for the files of versions.
        adapters: False: only the base model can be sampled from, and versions of adapters are refused.
        publisher: see :class:`TorchSampler`.
        """
        require_served(trainer, adapters=adapters)
        set_variable_defaults(_VARIABLES)
        self._trainer = trainer
        self._publisher = trainer if publisher is None else publisher
        self._tokenizer = tokenizer
        own = None if tokenizer is None else tokenizer.eos_token_id
        self._end_tokens = trainer.end_tokens | (frozenset() if own is None else {own})
        self._scorer = TorchSampler(trainer, tokenizer, max_sequences=_SCORED_AT_ONCE, publisher=publisher)
        self._scored: list[Finished | Progress] = []  # events that arrived during _score_now
        self._versions: dict[str, Version] = {}
        self._requests: dict[str, Request] = {}
        self._by_number: dict[int, Request] = {}
        self._used: dict[int, Version] = {}  # versions by the number of a generation that vLLM has not ended yet
        # vLLM's products with LoRA on experts are kernels for GPUs.
        experts_form = None if trainer.device.type == "cpu" else VLLM_FORMS.get(trainer.architecture.family)
        alternating = any(each.alternating for each in trainer.architecture.experts)
        partners = partners_of(trainer.architecture.linear)
        self._files = VersionFiles(memory_dir, trainer.dtype, experts_form, alternating=alternating, partners=partners)
        tower = _has_tower(trainer)
        if tower:
            _require_torchvision(trainer)
        processing = trainer.image_processing
        with base_folder(trainer, self._files.root) as folder:
            args = make_engine_args(
                engine_args or {},
                str(folder),
                trainer.device,
                trainer.dtype,
                adapters=adapters,
                tower=tower,
                images=processing is not None,
            )
            self._max_rank = int(args.max_lora_rank) if adapters else 0
            self._engine = Engine(args)
        architecture, vision = trainer.architecture, trainer.vision
        self._pictures: Pictures | None = None  # None: images are refused
        probes = [probe(architecture.vocab_size)]
        if processing is not None and vision is not None and self._engine.max_images:
            self._pictures = Pictures(processing, vision, self._engine.max_images)
            probes.append(probe_with_image(processing, vision, architecture.vocab_size))
        context = min(architecture.max_length, self._engine.max_model_len)
        self._limits = Limits(
            architecture.vocab_size,
            context,
            self._engine.cache_tokens,
            tokenizer is not None,
            None if self._pictures is None else vision,
        )
        self._check = SelfCheck(self._engine, self._score_now, probes, architecture.vocab_size, trainer.dtype)
        self._unapplied: frozenset[str] = frozenset()
        self._asleep: frozenset[str] = frozenset()  # what has no memory now: the names of vLLM's tags
        self.base = EngineWeights(
            self._engine,
            trainer.base,
            self._files.root,
            changed=lambda: self._scorer.base_changed(moved=False),
            check=self._check_base,
        )
        try:
            self._check_base()
            if adapters:
                found = frozenset(kinds(architecture))
                never = found & ({EXPERTS} if experts_form is None else frozenset())
                tried = sorted(found - never)
                self._unapplied = never | {kind for kind in tried if not self._applies(kind)}
        except BaseException:
            self.close()
            raise

    @property
    def memory(self) -> str:
        """Describe the engine and its caches in one readable line, for logs."""
        left_out = f"; no LoRA on {', '.join(sorted(self._unapplied))}" if self._unapplied else ""
        return f"vLLM {vllm.__version__}: cache {self._limits.cache_tokens} tokens{left_out}; {self._scorer.memory}"

    @property
    def vision(self) -> VisionSpec | None:
        """Return what the model wants of images; None: prompts with images are refused."""
        return self._limits.vision

    # --- memory -------------------------------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> None:
        """Empty the prefix caches of vLLM and of the copy of the model, except for what active requests use."""
        self._engine.reset_prefix_cache()
        self._scorer.reset_prefix_cache()

    def reset_mm_cache(self) -> None:
        """Drop the preprocessed images that vLLM keeps."""
        self._engine.reset_mm_cache()

    def reset_encoder_cache(self) -> None:
        """Drop the outputs of vLLM's image encoder that it keeps."""
        self._engine.reset_encoder_cache()

    def sleep(self, level: int) -> None:
        """Free the GPU memory of vLLM's cache and weights; level 1 keeps the weights in host memory, level 2 does not.

        The copy of the model stays. After level 2 nothing is sampled until the base model is replaced.
        """
        self._require_idle("sleep")
        if self._asleep:
            return
        self._engine.sleep(level)
        self._asleep = frozenset(WAKE_TAGS)
        if level > 1:
            self.base.refuse(f"sleep(level={level}) has discarded the sampler's weights; call sync_weights")

    def wake_up(self, tags: Sequence[str]) -> None:
        """Take back the memory of what is named in ``tags`` and asleep: "weights", "kv_cache"."""
        wanted = [tag for tag in tags if tag in self._asleep]
        if wanted:
            self._engine.wake_up(wanted)
            self._asleep -= set(wanted)

    def require_idle_and_awake(self) -> None:
        """Raise if the weights cannot be replaced now."""
        self._require_idle("a replacement of weights")
        self._require_awake()

    def begin_base(self) -> None:
        """Begin to replace the weights of the base model; :attr:`base` receives them.

        All versions are retired, because they belong to the old weights.
        """
        self.require_idle_and_awake()
        for version_id in self.version_ids():
            self.retire(version_id)
        self.base.begin()

    def close(self) -> None:
        """End vLLM's processes and remove all files. The sampler cannot be used afterwards."""
        self._engine.close()
        self._files.close()

    # --- versions -----------------------------------------------------------------------------------------------------

    def publish(self, version_id: str, adapter_id: str) -> None:
        self._require_rank(self._publisher.spec(adapter_id).largest_rank)
        self._require_new(version_id)
        self._scorer.publish(version_id, adapter_id)
        # Ranks and scalings of single modules are made equal before weights are rounded.
        spec, dtype = self._publisher.spec(adapter_id), self._trainer.dtype
        precision = torch.float32 if spec.rank_pattern or spec.alpha_pattern else dtype
        self._install(version_id, lambda: AdapterWeights(*self._publisher.peft_adapter(adapter_id, precision)))

    def load_version(self, version_id: str, directory: str) -> None:
        source = Path(directory)
        self._require_rank(checkpoint.read_spec(source).largest_rank)
        self._require_new(version_id)
        self._scorer.load_version(version_id, directory)
        self._install(version_id, lambda: read_adapter(source))

    def receive_version(self, version_id: str, config: Mapping[str, object], weights: Mapping[str, Tensor]) -> None:
        """Add a version from weights of another process, named as PEFT does, and their adapter_config.json."""
        self.check_adapter(config)
        self._require_new(version_id)
        self._scorer.receive_version(version_id, config, weights)
        self._install(version_id, lambda: AdapterWeights(config, {name: each.cpu() for name, each in weights.items()}))

    def check_adapter(self, config: Mapping[str, object]) -> None:
        """Raise if vLLM was not started for an adapter with this adapter_config.json."""
        self._require_rank(checkpoint.spec_of(config).largest_rank)

    def retire(self, version_id: str) -> None:
        version = self._versions.pop(version_id, None)
        if version is not None:
            self._scorer.retire(version_id)
            self._discard(version)

    def version_ids(self) -> list[str]:
        return list(self._versions)

    # --- requests -----------------------------------------------------------------------------------------------------

    def submit(self, request: SampleRequest) -> None:
        if request.request_id in self._requests:
            raise InvalidInputError("request_id", request.request_id, "an id that no request under way has")
        if request.version_id is not None and request.version_id not in self._versions:
            raise InvalidInputError("version_id", request.version_id, "a published version, or None for the base model")
        if self._engine.dead:
            raise TwinkleServerError("the vLLM engine has died; restart the server to sample again")
        self._require_awake()
        self.base.require_whole()
        checked = check_request(request, self._limits)
        if self._pictures is not None:
            checked = replace(checked, images=self._pictures.resized(checked.prompt, checked.images))
        scores = _wants_scores(checked)
        if scores:
            self._scorer.submit(_scoring(checked, request.version_id))
        version = None if request.version_id is None else self._versions[request.version_id]
        ends = frozenset(checked.params.stop_tokens) | (self._end_tokens if checked.params.stop_at_eos else frozenset())
        self._begin(Request(checked, version, ends, self._tokenizer, unscored=scores))

    def cancel(self, request_id: str) -> None:
        if request_id in self._requests:
            self._remove(self._requests[request_id])

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    def step(self) -> list[Finished | Progress]:
        events: list[Finished | Progress] = []
        if self._scorer.busy:
            self._scored += self._scorer.step()
        scored, self._scored = self._scored, []
        for event in scored:
            events += self._absorb_scores(event)
        waiting = self._requests and not events and not self._scorer.busy
        for piece in self._engine.take(_WAIT_SECONDS if waiting else 0.0):
            events += self._absorb(piece)
        return events

    # --- versions, inside ---------------------------------------------------------------------------------------------

    def _require_rank(self, rank: int) -> None:
        if not self._max_rank:
            raise UnsupportedError("engine_args.enable_lora: got False, allowed: True to sample with an adapter")
        require_rank(rank, self._max_rank)

    def _require_idle(self, action: str) -> None:
        if self._requests:
            raise InvalidInputError("requests under way", len(self._requests), f"none: {action} would disturb them")

    def _require_awake(self) -> None:
        if self._asleep:
            raise InvalidInputError("sampler", "asleep", "a sampler that is awake: call wake_up() first")

    def _require_new(self, version_id: str) -> None:
        self._require_awake()
        self.base.require_whole()
        if version_id in self._versions:
            raise InvalidInputError("version_id", version_id, "an id that no version has: versions never change")

    def _install(self, version_id: str, read: Callable[[], AdapterWeights]) -> None:
        """Add a version that the scorer already has to vLLM, and compare the two."""
        with ExitStack() as undo:  # undo on any exception, including those of a full disk
            undo.callback(self._scorer.retire, version_id)
            version = self._files.write(read(), self._unapplied, self._max_rank)
            undo.callback(self._discard, version)
            if version.lora is not None:
                self._engine.add_lora(version.lora)
            difference = self._check.compare(version.lora, version_id)
            if not difference.is_small:
                modules = ", ".join(kinds(self._trainer.architecture))
                raise TwinkleServerError(
                    f"vLLM does not compute this adapter as the trainer does ({difference}), although it applies "
                    f"LoRA on each of {modules} alone; use sampler_type torch"
                )
            undo.pop_all()
        self._versions[version_id] = version

    def _discard(self, version: Version) -> None:
        version.retired = True
        self._remove_unused(version)

    def _remove_unused(self, version: Version) -> None:
        if version.retired and not version.users:
            if version.lora is not None:
                self._engine.remove_lora(version.lora.lora_int_id)
            self._files.remove(version)

    def _check_base(self) -> None:
        for difference in self._check.compare_base():
            if not difference.is_small:
                raise TwinkleServerError(f"vLLM does not compute the base model as the trainer does: {difference}")

    def _applies(self, kind: str) -> bool:
        """Return whether vLLM applies LoRA on the modules of this name.

        False also if it refuses to load such an adapter, or if no made-up weights have an effect that can be measured.
        """
        name = f"self-check {kind}"
        for adapter in made_up_adapters(self._trainer.architecture, kind):
            version = self._files.write(adapter, frozenset())
            self._scorer.load_version(name, str(version.directory))
            try:
                assert version.lora is not None, "it has weights"
                self._engine.add_lora(version.lora)
                difference = self._check.compare(version.lora, name, trial=True)
            except TwinkleServerError:
                if self._engine.dead:
                    raise
                return False
            finally:
                self._scorer.retire(name)
                self._discard(version)
            if difference.shows:
                return difference.is_applied
        return False

    def _score_now(self, request: SampleRequest) -> SampleResult:
        self._scorer.submit(request)
        try:
            outcome: SampleResult | SampleFailure | None = None
            while outcome is None:
                for event in self._scorer.step():
                    if event.request_id != request.request_id:
                        self._scored.append(event)
                    elif isinstance(event, Finished):
                        outcome = event.outcome
        finally:
            self._scorer.cancel(request.request_id)
        if isinstance(outcome, SampleFailure):
            raise outcome.error
        return outcome

    # --- requests, inside ---------------------------------------------------------------------------------------------

    def _begin(self, request: Request) -> None:
        self._requests[request.checked.request_id] = request
        version = request.version
        lora = None if version is None else version.lora
        prompt = Prompt(request.checked.prompt, request.checked.images, request.checked.scope)
        for sample in request.samples:
            number = self._engine.begin(prompt, request.engine_params(sample), lora)
            request.numbers[number] = sample
            self._by_number[number] = request
            if version is not None:
                self._used[number] = version
                version.users += 1

    def _absorb(self, piece: Arrival) -> list[Finished | Progress]:
        if isinstance(piece, Ended | Failed) or piece.finish is not None:
            self._release(piece.number)
        request = self._by_number.get(piece.number)
        if request is None or isinstance(piece, Ended):  # cancelled, or finished with an earlier piece
            return []
        if isinstance(piece, Failed):
            return [self._finish(request, SampleFailure(piece.error))]
        try:
            events: list[Finished | Progress] = [*request.absorb(piece)]
        except TwinkleError as error:
            return [self._finish(request, SampleFailure(error))]
        if piece.number not in request.numbers:
            del self._by_number[piece.number]
            if piece.finish is None:  # ended by a stop string, which vLLM does not see
                self._engine.cancel(piece.number)
        if request.done:
            events.append(self._finish(request, request.result()))
        return events

    def _absorb_scores(self, event: Finished | Progress) -> list[Finished | Progress]:
        request = self._requests.get(event.request_id)
        if request is None or not isinstance(event, Finished):
            return []
        if isinstance(event.outcome, SampleFailure):
            return [self._finish(request, event.outcome)]
        request.scores, request.unscored = event.outcome, False
        return [self._finish(request, request.result())] if request.done else []

    def _finish(self, request: Request, outcome: SampleResult | SampleFailure) -> Finished:
        self._remove(request)
        return Finished(request.checked.request_id, outcome)

    def _remove(self, request: Request) -> None:
        if request.unscored:
            self._scorer.cancel(request.checked.request_id)
        for number in request.numbers:
            del self._by_number[number]
            self._engine.cancel(number)
        del self._requests[request.checked.request_id]

    def _release(self, number: int) -> None:
        version = self._used.pop(number, None)
        if version is not None:
            version.users -= 1
            self._remove_unused(version)


def _wants_scores(checked: CheckedRequest) -> bool:
    named = checked.target_prompt_logprobs is not None
    return bool(checked.prompt_logprobs or checked.topk_prompt_logprobs or named or checked.prompt_alt_tokens)


def _scoring(checked: CheckedRequest, version_id: str | None) -> SampleRequest:
    """Return the request for the scorer: the same prompt scores, and one generated token, which is discarded."""
    return SampleRequest(
        checked.request_id,
        version_id,
        checked.prompt,
        SamplingParams(max_tokens=1, temperature=checked.params.temperature, seed=checked.seed),
        prompt_logprobs=checked.prompt_logprobs,
        prompt_logprobs_last_n=checked.prompt_logprobs_last_n,
        topk_prompt_logprobs=checked.topk_prompt_logprobs,
        target_prompt_logprobs=checked.target_prompt_logprobs,
        prompt_alt_tokens=checked.prompt_alt_tokens,
        scope=checked.scope,
        images=checked.images,
    )


def _has_tower(trainer: Trainer) -> bool:
    """Return whether vLLM's model has a vision tower, with which the trainer may have loaded no part of it."""
    return getattr(trainer.base.config, "vision_config", None) is not None


def _require_torchvision(trainer: Trainer) -> None:
    """Raise if vLLM cannot import the model's family, because torchvision is missing or is not made for this torch."""
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError) as error:  # RuntimeError: an operator of torchvision does not exist
        raise UnsupportedError(
            f"sampler_type vllm: vLLM needs torchvision for {trainer.base.config.model_type}, which cannot be imported "
            f"({error}); install the torchvision that was made for torch {torch.__version__}, or use sampler_type torch"
        ) from error
