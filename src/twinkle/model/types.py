"""The types of training requests and results: what goes into the :class:`~twinkle.model.Trainer` and what comes out.

Plain frozen dataclasses over numpy; this file imports neither torch nor transformers, so that services and codecs can
build requests without them.
"""

import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from twinkle.errors import InvalidInputError, TwinkleError
from twinkle.images.decoding import EncodedImage
from twinkle.images.processing import ResizedImage
from twinkle.model.csr import Csr

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]
RouteArray = NDArray[np.int16]  # experts of tokens, (T, layers, K)
LARGE_ROUTE = 64 * 8  # experts of one token in all layers; that many have the largest models

OutputKind = Literal["logps", "logits", "embeddings"]
MAX_LOGITS = 2**26  # numbers of a request's logits: 256 MiB

EMPTY: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True)
class LoraSpec:
    """The shape of one adapter, and its options, which have the meaning of PEFT's.

    ``target_modules`` overrides the ``train_*`` switches: names matched as PEFT matches them (a module's last path
    components), a regular expression for full names, or ``"all-linear"`` for the linear layers of attention and
    feed-forward blocks. With ``seed=None`` a seed is drawn at random, and recorded in the adapter's spec.

    ``dropout`` is the probability with which training drops an element of the adapter's input. ``rank_pattern`` and
    ``alpha_pattern`` give modules another rank or alpha; their keys are regular expressions for the end of a module's
    name, of which the first that matches counts. ``exclude_modules`` (names or a regular expression, like
    ``target_modules``) and ``layers_to_transform`` (numbers of layers; ``layers_pattern`` names the list of layers)
    choose fewer modules. ``init_weights``: one of ``INIT_WEIGHTS``.

    ``experts``: how ``train_mlp`` trains the experts of a layer, one of ``EXPERT_FORMS``. ``target_parameters`` names
    parameters as PEFT's field does: all experts' ``mlp.experts.gate_up_proj`` or ``mlp.experts.down_proj``, or the
    weight of a linear layer. Like ``target_modules``, beside which it may stand, it overrides the switches.
    """

    rank: int
    alpha: float = 32.0
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = False
    target_modules: Sequence[str] | str | None = None
    dropout: float = 0.0
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    exclude_modules: Sequence[str] | str | None = None
    layers_to_transform: Sequence[int] | int | None = None
    layers_pattern: Sequence[str] | str | None = None
    init_weights: bool | str = True
    experts: str = "shared_outer"
    target_parameters: Sequence[str] | None = None

    @property
    def scaling(self) -> float:
        """Return the scaling of modules that no pattern matches: alpha / rank, with rsLoRA alpha / √rank."""
        return self._scaling(self.rank, self.alpha)

    @property
    def largest_rank(self) -> int:
        """Return the largest rank that a module of the adapter may have."""
        return max((self.rank, *self.rank_pattern.values()))

    def module_ranks(self, names: Sequence[str]) -> list[int]:
        """Return the rank of each module, by its name in the base model."""
        return first_matches(self.rank_pattern, names, self.rank)

    def module_scalings(self, names: Sequence[str]) -> list[float]:
        """Return the scaling of each module, by its name in the base model."""
        alphas = first_matches(self.alpha_pattern, names, self.alpha)
        return [self._scaling(rank, alpha) for rank, alpha in zip(self.module_ranks(names), alphas, strict=True)]

    def _scaling(self, rank: int, alpha: float) -> float:
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


@dataclass(frozen=True)
class FullSpec:
    """What a run trains that trains all parameters of the base model, instead of an adapter. It has no options."""


TrainingSpec = LoraSpec | FullSpec


# How the weights of a new adapter are initialized. True: A kaiming-uniform, B zero. False: A and B kaiming-uniform, so
# that the adapter has an effect from the start. "gaussian": A normal with deviation 1 / rank, B zero. "orthogonal":
# A and B random with B A = 0, for even ranks.
INIT_WEIGHTS: tuple[bool | str, ...] = (True, False, "gaussian", "orthogonal")

# How the experts of a layer are trained. "shared_outer", as Tinker does it: all experts share the factor that has the
# hidden size. "independent", as PEFT does it: each expert has both factors, and gate and up have one A together.
EXPERT_FORMS: tuple[str, ...] = ("shared_outer", "independent")
# The forms in which adapters leave for other programs (see adapters/expert_exports.py).
ADAPTER_FORMATS = ("tinker", "peft", "vllm", "vllm-3d")
EXPERT_PARAMETERS = (".experts.gate_up_proj", ".experts.down_proj")  # the ends of the names of all experts' weights


N = TypeVar("N", int, float)


def text_name(module: str) -> str:
    """Return a module's name without the part that names the decoder of a vision model.

    ``model.language_model.layers.0.…`` is ``model.layers.0.…`` in the text model of the same family, and in Tinker's
    files. Rows, snapshots and files that were made with either name fit together.
    """
    return module.replace("language_model.", "", 1)


def tinker_name(module: str, family: str) -> str:
    """Return a module's name in Tinker's files: that of the text model. gpt-oss's attention is ``attn`` there."""
    name = text_name(module)
    return name.replace(".self_attn.", ".attn.", 1) if family == "gpt_oss" else name


def name_in_decoder(module: str) -> str:
    """Return the end of a vision model's module name that is the same in the text model; other names are unchanged."""
    return module.rpartition("language_model.")[2]


def first_matches(patterns: Mapping[str, N], names: Sequence[str], default: N) -> list[N]:
    """Return the value of the first pattern that matches the end of each name, as PEFT's ``get_pattern_key`` does.

    A pattern may have either name of a vision model's module (see :func:`text_name`).
    """
    compiled = [(re.compile(rf"(.*\.)?({pattern})$"), value) for pattern, value in patterns.items()]
    both = [(name, text_name(name)) for name in names]
    return [next((value for pattern, value in compiled if any(map(pattern.match, each))), default) for each in both]


@dataclass(frozen=True)
class AdamParams:
    """Hyper-parameters of one AdamW step; all of them may change from step to step."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0  # 0 = no clipping


@dataclass(frozen=True)
class VisionSpec:
    """What a vision model wants of images.

    ``image_token``: the token that stands for a part of an image. ``patch_width``: how many numbers a patch has.
    ``merge``: a token stands for merge × merge patches.
    """

    image_token: int
    patch_width: int
    merge: int


@dataclass(frozen=True)
class RoutingSpec:
    """What routes of tokens to experts look like for a model: (T, ``layers``, ``chosen``), numbers below ``experts``.

    ``layers`` counts all decoder layers; ``routed`` are those with experts. Numbers of other layers are 0, and are not
    read.
    """

    layers: int
    chosen: int
    experts: int
    routed: tuple[int, ...]


@dataclass(frozen=True)
class Image:
    """An image in a sequence, of ``rows`` × ``columns`` tokens, which begin at index ``first``.

    ``pixels``: the image file, the image resized as the model's image processor does it, or the patches that the
    processor makes of it, (patches, patch width).
    ``digest`` names the image. A trainer computes the features of a digest once and keeps them for a while, so the
    digests of different tenants must differ even if their images do not.
    """

    first: int
    rows: int
    columns: int
    digest: str
    pixels: EncodedImage | ResizedImage | FloatArray

    @property
    def tokens(self) -> int:
        return self.rows * self.columns

    @property
    def nbytes(self) -> int:
        return len(self.pixels.data) if isinstance(self.pixels, EncodedImage) else self.pixels.nbytes


@dataclass(frozen=True)
class Datum:
    """One sequence: ``targets[i]`` is predicted from ``tokens[: i + 1]``.

    tokens (T,) · targets (T,) or (T, K) · weights like targets · extras: further loss inputs, each (T,) or like
    targets. Any (T, K) array may be sparse (:class:`~twinkle.model.csr.Csr`): the cells that it does not list are 0.
    ``images``: in their order; at their places ``tokens`` has the model's image token. ``routes``: the experts to use
    for the first tokens, see :class:`RoutingSpec`; None: the model's routers choose for all. They choose for tokens
    that the array lacks at its end, too, and where all K experts of a token are 0 (K > 1).
    """

    tokens: IntArray
    targets: IntArray | Csr
    weights: FloatArray | Csr | None = None
    extras: Mapping[str, FloatArray | Csr] = field(default_factory=dict)
    images: Sequence[Image] = ()
    routes: RouteArray | None = None

    @property
    def width(self) -> int:
        """Return how many targets each token has."""
        return self.targets.shape[1] if self.targets.ndim == 2 else 1

    @property
    def cells(self) -> int:
        """Return the number of targets of all tokens together."""
        return self.targets.size

    @property
    def nbytes(self) -> int:
        """Return the memory of the arrays without images, in bytes."""
        arrays = (self.tokens, self.targets, self.weights, self.routes, *self.extras.values())
        return sum(array.nbytes for array in arrays if array is not None)


@dataclass(frozen=True)
class Preference:
    """The settings of DPO for a request whose data are answers in pairs: chosen, rejected, chosen, rejected, …

    ``ref_logps``: the reference model's log-probabilities of the targets, one (T,) array per datum. ``beta``: how
    strongly the loss punishes moving away from the reference. ``sft_weight``: the weight of an additional cross-entropy
    term on the chosen answers.
    """

    ref_logps: Sequence[FloatArray]
    beta: float = 0.1
    sft_weight: float = 0.0


@dataclass(frozen=True)
class TokenValues:
    """The model's output for one sequence: logprobs have the shape of the targets, the other arrays are (T,).

    entropies and predictions (the most likely token) may be empty if the request did not ask for statistics.
    ``output`` is what the request asked for beside log-probabilities: logits (T, V), divided by the temperature, or the
    hidden state of the last token, (1, H); without log-probabilities then. None if it asked for neither.
    """

    logprobs: FloatArray
    entropies: FloatArray
    predictions: IntArray
    output: FloatArray | None = None


@dataclass(frozen=True)
class ObjectiveValue:
    """The result of an objective: its loss, and the derivative of the loss with respect to every value.

    ``logprobs`` and ``entropies`` hold these derivatives, one array per datum. Those of ``logprobs`` have the shapes of
    the targets; ``entropies`` and ``outputs`` are empty where the loss does not depend on them.
    ``metrics`` are named ``name:reduction``.
    """

    loss: float
    logprobs: Sequence[FloatArray]
    entropies: Sequence[FloatArray] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    outputs: Sequence[FloatArray] = ()


# A loss of a whole request, all its sequences together. It is called once, with one entry per datum in the order of the
# data. If it raises a TwinkleError, its own request fails and no other.
Objective = Callable[[Sequence[TokenValues]], ObjectiveValue]


@dataclass(frozen=True)
class TrainItem:
    """One request of one tenant: some sequences, one loss, one adapter.

    ``objective``, where given, is used instead of the named loss. ``temperature`` divides the logits. ``statistics``
    asks for entropies and predictions. ``base_model`` computes without the adapter; only ``forward`` accepts it.
    ``output`` asks for all logits of the sequences, at most ``max_logits`` numbers, or for the hidden state of each
    sequence's last token ("embeddings", without log-probabilities and without a named loss).

    ``training``: let ``forward`` drop the same elements of the adapter's inputs as the adapter's next
    ``forward_backward``; without it, ``forward`` uses no dropout. ``numbers``: if the data are only some of a request's
    sequences, the number of each within the request; the elements that are dropped depend on it. Empty: 0, 1, 2 …
    ``records_routes``: return the experts that were used.
    """

    adapter_id: str
    data: Sequence[Datum]
    loss: str = "cross_entropy"
    loss_config: Mapping[str, float] = field(default_factory=dict)
    objective: Objective | None = None
    temperature: float = 1.0
    statistics: bool = False
    base_model: bool = False
    output: OutputKind = "logps"
    max_logits: int = MAX_LOGITS
    training: bool = False
    numbers: Sequence[int] = ()
    records_routes: bool = False


@dataclass(frozen=True)
class TrainResult:
    """The result of one item: log-probabilities of the targets and metrics, which are named ``name:reduction``.

    ``logprobs`` has one array per datum, shaped like its targets; for embeddings they are empty. ``values`` has one
    entry per datum if the item asked for statistics, logits or embeddings, and is empty otherwise; ``routes`` has one,
    (T, layers, K), if it asked for routes.
    """

    logprobs: list[FloatArray]
    metrics: dict[str, float]
    values: tuple[TokenValues, ...] = ()
    routes: tuple[RouteArray, ...] = ()


@dataclass(frozen=True)
class TrainFailure:
    """The reason why one item failed. Its gradient was discarded, and other items of the call were not affected."""

    error: TwinkleError


@dataclass(frozen=True)
class AdapterSnapshot:
    """All state needed to continue training exactly: weights, optimizer state, step count, gradient of an open window.

    The arrays are flat float32 in the order of ``layout`` (see :mod:`twinkle.model.decoder.lora.stacks`); ``gradient``
    is None between windows. ``passes`` counts the adapter's training passes, which decide what its dropout drops.
    ``optimizer`` names the optimizer whose state this is; ``exp_avg`` and ``exp_avg_sq`` hold its rows (see
    :mod:`twinkle.model.adapters.optimizer`), and ``scalars`` its single numbers.
    """

    spec: TrainingSpec
    step: int
    layout: str
    weights: FloatArray
    exp_avg: FloatArray
    exp_avg_sq: FloatArray
    gradient: FloatArray | None
    optimizer: str = "Adam"
    scalars: Mapping[str, float] = field(default_factory=dict)
    passes: int = 0


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a device: used by tensors, reserved by torch's allocator, and in total."""

    allocated: int
    reserved: int
    total: int


@dataclass(frozen=True)
class TrainerNumbers:
    """Counters of a trainer. ``token_rows`` and ``padding_rows`` add up over all passes since the trainer was built."""

    resident_adapters: int
    paged_adapters: int  # in host memory
    token_rows: int
    padding_rows: int
    memory: DeviceMemory | None = None  # None: the trainer computes on the CPU
    images_seen: int = 0  # images whose features were computed
    images_reused: int = 0  # images whose features were still there


def check_adam_params(params: AdamParams) -> None:
    """Raise for values that would corrupt the optimizer state, such as NaN or a negative learning rate."""
    for name in ("learning_rate", "weight_decay", "grad_clip_norm"):
        _require(name, vars(params)[name], lambda x: x >= 0, "a finite number ≥ 0")
    for name in ("beta1", "beta2"):
        _require(name, vars(params)[name], lambda x: 0 <= x < 1, "a number in [0, 1)")
    _require("eps", params.eps, lambda x: x > 0, "a finite number > 0")


def _require(field: str, value: object, allowed: Callable[[float], bool], text: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidInputError(field, value, text)
    if not abs(value) <= sys.float_info.max or not allowed(value):  # also an int that no float holds
        raise InvalidInputError(field, value, text)
