"""The operations that a loss graph may use: the arguments of each, and the rule that bounds its result. Without torch.

No operation here draws random numbers, exposes uninitialised memory, changes a value in place, reads or writes anything
outside the graph, or turns a tensor's value into Python's control flow. An unknown name is an error that lists similar
names, if there are any. The functions behind the names are in :mod:`twinkle.loss.graph.operations`.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from twinkle.errors import UserError

__all__ = ["ATTRIBUTES", "CATALOG", "DTYPES", "INERT", "Rule", "rule_of"]


@dataclass(frozen=True)
class Rule:
    """What one operation accepts, and how its result is bounded.

    ``bound``: a key of ``bounds.BOUNDS``, the function that bounds the result beforehand. ``arguments``: how many
    arguments may be given by position. ``keywords``: the names of arguments that may be given by keyword.
    """

    bound: str
    arguments: int
    keywords: frozenset[str]


DTYPES = ("bfloat16", "bool", "float16", "float32", "float64", "int32", "int64")
ATTRIBUTES = ("T", "device", "dtype", "indices", "mT", "ndim", "shape", "values")

# Keywords that tracing records with their default values and that have no effect here, with the values they may have.
INERT: Mapping[str, tuple[object, ...]] = {
    "_stacklevel": (3,),
    "copy": (False, True),
    "generator": (None,),
    "inplace": (False,),
    "layout": (None, "strided"),
    "memory_format": (None, "contiguous_format", "preserve_format"),
    "non_blocking": (False, True),
    "out": (None,),
    "pin_memory": (None, False),
    "pos_weight": (None,),
    "reduce": (None,),
    "requires_grad": (False,),
    "size_average": (None,),
    "weight": (None,),
}

_PLACE = "dtype device"
_UNARY = (
    "abs absolute neg negative exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal sigmoid tanh sin cos "
    "atan relu sign sgn floor ceil trunc frac isfinite isnan isinf logical_not bitwise_not erf"
)
_BINARY = (
    "add sub subtract mul multiply true_divide pow float_power maximum minimum fmax fmin eq ne lt le gt ge greater "
    "greater_equal less less_equal not_equal logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor "
    "logaddexp logaddexp2 xlogy atan2 hypot"
)
_REDUCTIONS = (
    "sum mean std var prod amax amin argmax argmin logsumexp all any nansum nanmean count_nonzero softmax log_softmax"
)
_VIEWS = (
    "reshape flatten squeeze unsqueeze transpose swapaxes swapdims t permute narrow select flip tril triu diagonal "
    "detach clone"
)

# In the tables below: bound, names, number of arguments by position, keywords. Each name in this first table is both a
# function of torch and a method of tensors.
_BOTH: tuple[tuple[str, str, int, str], ...] = (
    ("broadcast", _UNARY, 1, "input"),
    ("broadcast", _BINARY, 2, "input other exponent alpha"),
    ("quotient", "div divide", 2, "input other rounding_mode"),
    ("divided", "floor_divide remainder fmod", 2, "input other"),
    ("broadcast", "round nan_to_num logit", 4, "input decimals nan posinf neginf eps"),
    ("where", "where", 3, "input condition other"),
    (
        "broadcast",
        "clamp clip clamp_min clamp_max lerp masked_fill",
        3,
        "input min max other mask value end",
    ),
    ("broadcast", "addcmul addcdiv", 3, "input tensor1 tensor2 value"),
    ("broadcast", "max min", 3, "input dim keepdim other"),
    ("same", _REDUCTIONS, 4, "input dim keepdim unbiased correction dtype exponent"),
    ("scanned", "cumsum cumprod logcumsumexp", 3, "input dim dtype"),
    ("sorted", "sort argsort topk", 4, "input dim descending stable k largest sorted"),
    ("sorted", "median", 3, "input dim keepdim"),
    ("same", _VIEWS, 9, "input dim dim0 dim1 dims shape start length start_dim end_dim diagonal offset index"),
    ("diff", "diff", 5, "input n dim"),
    ("roll", "roll", 9, "input shifts dims"),
    ("norm", "norm", 4, "p dim keepdim dtype input"),
    ("quantile", "quantile", 4, "input q dim keepdim interpolation"),
    ("measured", "gather index_select take take_along_dim", 3, "input dim index indices"),
    ("measured", "broadcast_to tile outer", 9, "input size dims vec2"),
    ("broadcast", "masked_select", 2, "input mask"),
    ("unbind", "unbind", 2, "input dim"),
    ("chunk", "chunk", 3, "input chunks dim"),
    ("matmul", "matmul mm bmm mv dot", 2, "input other mat2 vec tensor"),
)
_FUNCTIONS: tuple[tuple[str, str, int, str], ...] = (
    ("broadcast", "torch.zeros_like torch.ones_like", 1, f"input {_PLACE}"),
    ("broadcast", "torch.full_like", 2, f"input fill_value {_PLACE}"),
    ("sizes", "torch.zeros torch.ones", 9, f"size {_PLACE}"),
    ("sizes", "torch.full", 2, f"size fill_value {_PLACE}"),
    ("arange", "torch.arange", 3, f"start end step {_PLACE}"),
    ("join", "torch.cat torch.concat torch.concatenate torch.stack torch.hstack torch.vstack", 2, "tensors dim"),
    ("join", "torch.tensor torch.as_tensor", 1, f"data {_PLACE}"),
    ("einsum", "torch.functional.einsum torch.einsum", 4, ""),
    ("norm", "torch.functional.norm", 4, "p dim keepdim dtype input"),
    ("linalg_norm", "torch._C._linalg.linalg_norm torch.linalg.norm", 4, "ord dim keepdim dtype A"),
    ("same", "torch._C._linalg.linalg_vector_norm torch.linalg.vector_norm", 4, "x ord dim keepdim dtype"),
    ("broadcast", "torch._C._special.special_expm1 torch._C._special.special_log1p", 1, "input"),
    ("broadcast", "torch._C._special.special_expit torch._C._special.special_entr", 1, "input"),
    ("broadcast", "torch._C._special.special_xlogy", 2, "input other"),
    ("same", "torch._C._special.special_logsumexp", 3, "input dim keepdim"),
    ("same", "torch._C._special.special_log_softmax torch._C._special.special_softmax", 3, "input dim dtype"),
    ("broadcast", "torch.nn.functional.relu torch.nn.functional.sigmoid torch.nn.functional.tanh", 1, "input"),
    ("broadcast", "torch.nn.functional.silu", 1, "input"),
    ("broadcast", "torch.nn.functional.elu torch.nn.functional.leaky_relu", 2, "input alpha negative_slope"),
    ("broadcast", "torch.nn.functional.hardtanh", 3, "input min_val max_val"),
    ("broadcast", "torch._C._nn.gelu", 1, "input approximate"),
    ("broadcast", "torch._C._nn.softplus torch.nn.functional.softplus", 3, "input beta threshold"),
    ("broadcast", "torch._C._nn.log_sigmoid torch.nn.functional.logsigmoid", 1, "input"),
    ("same", "torch.nn.functional.softmax torch.nn.functional.log_softmax", 2, "input dim dtype"),
    ("broadcast", "torch.nn.functional.mse_loss torch.nn.functional.l1_loss", 2, "input target reduction"),
    ("broadcast", "torch.nn.functional.smooth_l1_loss", 2, "input target reduction beta"),
    ("broadcast", "torch.nn.functional.huber_loss", 2, "input target reduction delta"),
    ("broadcast", "torch.nn.functional.kl_div", 2, "input target reduction log_target"),
    ("broadcast", "torch.nn.functional.binary_cross_entropy", 2, "input target reduction"),
    ("broadcast", "torch.nn.functional.binary_cross_entropy_with_logits", 2, "input target reduction"),
    ("measured", "torch.nn.functional.pad", 4, "input pad mode value"),
    ("norm", "torch.nn.functional.normalize", 4, "input p dim eps"),
    ("broadcast", "torch.cosine_similarity", 4, "x1 x2 dim eps"),
    ("split", "torch.functional.split", 3, "tensor split_size_or_sections dim"),
    ("attribute", "getattr", 2, ""),
)
_METHODS: tuple[tuple[str, str, int, str], ...] = (
    ("broadcast", "expand_as view_as reshape_as type_as", 2, "other"),
    ("view", "view", 9, ""),
    ("same", "contiguous", 1, ""),
    ("cast", "float double half bfloat16 int long bool cpu", 1, ""),
    ("cast", "to type", 4, f"other {_PLACE}"),
    ("split", "split", 3, "split_size dim"),
    ("measured", "expand repeat", 9, "size repeats"),
    ("new_sizes", "new_zeros new_ones", 9, f"size {_PLACE}"),
    ("new_sizes", "new_full", 3, f"size fill_value {_PLACE}"),
    ("join", "new_tensor", 2, f"data {_PLACE}"),
    ("number", "size dim ndimension numel nelement", 2, "dim"),
)
_OPERATORS = "abs add and_ eq floordiv ge getitem gt invert le lt matmul mod mul ne neg or_ pos pow sub truediv xor"
_MATH = "ceil cos exp expm1 fabs floor isfinite isinf isnan log log10 log1p log2 pow sin sqrt tanh trunc"


def _catalog() -> dict[str, Rule]:
    rules: dict[str, Rule] = {}
    for bound, names, arguments, keywords in _BOTH:
        for name in names.split():
            rules[f"torch.{name}"] = rules[f".{name}"] = Rule(bound, arguments, frozenset(keywords.split()))
    for bound, names, arguments, keywords in _FUNCTIONS:
        rules |= {name: Rule(bound, arguments, frozenset(keywords.split())) for name in names.split()}
    for bound, names, arguments, keywords in _METHODS:
        rules |= {f".{name}": Rule(bound, arguments, frozenset(keywords.split())) for name in names.split()}
    rules |= {f"operator.{name}": Rule("operator", 2, frozenset()) for name in _OPERATORS.split()}
    rules |= {f"operator.{name}": Rule("divided", 2, frozenset()) for name in ("floordiv", "mod")}
    rules |= {"operator.getitem": Rule("index", 2, frozenset()), "operator.matmul": Rule("matmul", 2, frozenset())}
    rules |= {f"math.{name}": Rule("number", 2, frozenset()) for name in _MATH.split()}
    return rules


CATALOG: Mapping[str, Rule] = _catalog()


def rule_of(target: str, where: str) -> Rule:
    """Return the rule of an operation. Raise UserError for a name that is not in the catalog."""
    rule = CATALOG.get(target)
    if rule is None:
        near = _near(target, CATALOG)
        hint = f"; near it: {', '.join(near)}" if near else ""
        raise UserError(f"{where}: unknown operation {target!r}; losses on the server know {len(CATALOG)}{hint}")
    return rule


def _near(target: str, known: Iterable[str]) -> list[str]:
    last = target.rpartition(".")[2]
    return difflib.get_close_matches(target, [name for name in known if last[:3] in name], 4)
