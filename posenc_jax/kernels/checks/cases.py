"""Problems of attention and their results.

implementation="reference" computes the expected numbers on the CPU, in float32: it has neither
tiles nor lowered rules, and the tests compare it with NumPy in float64.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from posenc_jax.engine.api import attention
from posenc_jax.engine.block_mask import block_mask
from posenc_jax.engine.mask import SlidingWindow
from posenc_jax.engine.rules import ContentBias, DenseBias, DotBias, LogitBias, SeparableBias

Arrays = dict[str, Any]
_LOW, _HIGH = -20, 99  # Bounds of the tables by distance; tiles beyond have no rule.
_SEED = 8  # Of dropout.


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem.

    Attributes:
      name: of the case.
      rule: of `RULES`.
      batch, length, heads, kv_heads, dim: B, T, N, K and H.
      dtype: of q, k and v.
      default_tiles: whether tiles have the default size of the kernels, not 128 x 128.
      causal, window, softcap, dropout: options of `attention`.
      segments: whether rows hold two segments and padding, where q, k and v are NaN.
      sinks: whether there is a sink per head.
      shuffled: whether the positions are a permutation.
      later: queries are the last T of S = T + `later` tokens.
      branches: the most positions for which a key is visible; 0: for all.
      images: eight tokens share a position, and the window counts coordinates.
      blocks: a block mask hides some tiles, some distances in others, and none in a third kind.
    """

    name: str
    rule: str = "none"
    batch: int = 2
    length: int = 384
    heads: int = 2
    kv_heads: int = 2
    dim: int = 128
    dtype: str = "bfloat16"
    default_tiles: bool = False
    causal: bool = True
    window: Any = None
    softcap: float | None = None
    dropout: float = 0.0
    segments: bool = False
    sinks: bool = False
    shuffled: bool = False
    later: int = 0
    branches: int = 0
    images: bool = False
    blocks: bool = False

    @property
    def key_count(self) -> int:
        """S."""
        return self.length + self.later


class RuleCase(NamedTuple):
    """A rule.

    Attributes:
      make: `make(random, case)` returns the parameters.
      rules: of the parameters.
    """

    make: Callable[[np.random.Generator, Case], Arrays]
    rules: Callable[[Arrays], tuple]


def _in_blocks(b, h, q_idx, kv_idx):
    is_far = (q_idx - kv_idx) % 40 == 3
    return (q_idx // 128 + kv_idx // 128) % 3 != jnp.where(is_far, 0, 1)


def _of_table(shared, head, q, k):
    return head[jnp.clip(q - k, _LOW, _HIGH) - _LOW]


def _slope(shared, head, q, k):
    return head * (-1 / 64) * jnp.abs(q - k).astype(jnp.float32)


def _rows_and_columns(random: np.random.Generator, c: Case) -> Arrays:
    return {
        "q_features": random.normal(size=(c.batch, c.length, c.heads)),
        "k_features": random.normal(size=(c.batch, c.key_count, c.heads)),
    }


def _gate(shared, head, row, column, q, k):
    return head * jnp.tanh(row - column)


def _vector(shared, head, distance):
    return shared[jnp.clip(distance, _LOW, _HIGH) - _LOW]


def _product(of_keys: bool, size: int | None = 16) -> RuleCase:
    """A vector per token dot a vector per distance: Inkling, Shaw, Transformer-XL, DeBERTa.

    Vectors have `size` numbers, or H.
    """

    def make(random, c):
        features = size or c.dim
        shape = (c.batch, c.key_count if of_keys else c.length, c.heads, features)
        vectors = random.normal(size=(_HIGH - _LOW + 1, features)) * 2 / math.sqrt(features)
        name = "k_features" if of_keys else "q_features"
        return {name: random.normal(size=shape), "shared": vectors}

    return RuleCase(make, lambda p: (DotBias(_vector, bounds=(_LOW, _HIGH), **p),))


def _array(shared: int) -> RuleCase:
    """An array of all pairs, with one entry along the axis `shared`.

    It is float32 if rows of the batch share it (axis 0), and in q's dtype if heads do (1).
    """

    def make(random, c):
        shape = [c.batch, c.heads, c.length, c.key_count]
        shape[shared] = 1
        pairs = random.normal(size=shape)
        return {"pairs": pairs.astype(jnp.dtype(c.dtype)) if shared == 1 else pairs}

    return RuleCase(make, lambda p: (DenseBias(p["pairs"]),))


RULES = {
    "none": RuleCase(lambda random, c: {}, lambda p: ()),
    # A learned number per head and distance, bounded: T5.
    "table": RuleCase(
        lambda random, c: {"heads": random.normal(size=(c.heads, _HIGH - _LOW + 1))},
        lambda p: (LogitBias(_of_table, relative=True, bounds=(_LOW, _HIGH), **p),),
    ),
    # A number per head, times the distance: ALiBi.
    "slopes": RuleCase(
        lambda random, c: {"heads": np.linspace(0.5, 2.0, c.heads)},
        lambda p: (LogitBias(_slope, relative=True, **p),),
    ),
    # A number per query plus a number per key: FoX.
    "separable": RuleCase(_rows_and_columns, lambda p: (SeparableBias(**p),)),
    # A function of two tokens.
    "pair": RuleCase(
        lambda random, c: {"heads": np.linspace(1.0, 2.0, c.heads)} | _rows_and_columns(random, c),
        lambda p: (ContentBias(_gate, **p),),
    ),
    "product": _product(of_keys=False),
    "product of keys": _product(of_keys=True),
    "product of head dim": _product(of_keys=False, size=None),
    "array": _array(shared=0),
    "array of rows": _array(shared=1),
}


@functools.cache
def inputs(case: Case, zero: bool = False) -> Arrays:
    """Returns the arrays of a case, as NumPy arrays.

    With `zero`, q, k and all parameters are zero: the log-sum-exp is the logarithm of the number
    of visible keys.
    """
    c, random = case, np.random.default_rng(0)

    def tokens(count, heads):
        return random.normal(size=(c.batch, count, heads, c.dim))

    x: Arrays = {
        "q": tokens(c.length, c.heads),
        "k": tokens(c.key_count, c.kv_heads),
        "v": tokens(c.key_count, c.kv_heads),
        "d_out": tokens(c.length, c.heads),
        "d_lse": random.normal(size=(c.batch, c.length, c.heads)),
        "params": RULES[c.rule].make(random, c),
    }
    if c.sinks:
        x["sinks"] = np.linspace(-1.0, 2.0, c.heads)
    if zero:
        blank = {name: x[name] for name in ("q", "k", "params", "sinks") if name in x}
        x |= jax.tree.map(np.zeros_like, blank)
    x |= _places(c, random)
    if "q_segment_ids" in x:
        for name in "qkv":
            x[name][x["q_segment_ids"] < 0] = np.nan

    def typed(name, y):
        if name in ("q", "k", "v", "d_out"):
            return y.astype(jnp.dtype(c.dtype))
        return y.astype(np.float32) if y.dtype == np.float64 else y

    return {name: jax.tree.map(functools.partial(typed, name), y) for name, y in x.items()}


def _places(c: Case, random: np.random.Generator) -> Arrays:
    """Returns positions and segments, int32, by the names of `attention`'s arguments."""
    at = np.arange(c.key_count, dtype=np.int32)
    if c.later:
        return {"q_positions": at[c.later :], "k_positions": at}
    places = {}
    if c.shuffled:
        order = random.permutation(at)
        places |= {"q_positions": order, "k_positions": order}
    if c.branches:
        reach = random.integers(1, c.branches + 1, (c.batch, c.key_count))
        places["k_visible_until"] = (places.get("k_positions", at) + reach).astype(np.int32)
    if c.images:
        places |= dict.fromkeys(("q_positions", "k_positions"), at // 8) | {"q_coordinates": at}
    if c.segments:
        # Segments begin and end inside tiles, and padding is on both sides.
        ids, length = np.zeros((c.batch, c.length), np.int32), c.length
        ids[0, length // 4 + 1 :], ids[0, length * 5 // 6 :] = 1, -1
        ids[1:, : length // 12], ids[1:, length // 3 + 1 :] = -1, 1
        places["q_segment_ids"] = ids
    return places


def run(case: Case, implementation: Any, x: Arrays, *, gradients: bool, lse: bool) -> Arrays:
    """Returns the outcome of an implementation, arrays by name.

    "output", "dq", "dk" and "dv" are [B, N or K, T or S, H], "lse" is [B, N, T]; gradients of
    parameters have their shapes.

    Args:
      case: the problem.
      implementation: as for `attention`.
      x: the arrays of `inputs`.
      gradients: whether to return gradients of everything.
      lse: whether to return the log-sum-exp; some implementations have none.
    """
    return jax.device_get(executable(case, implementation, gradients=gradients, lse=lse)(x))


def expected(case: Case, x: Arrays, *, gradients: bool, lse: bool = True) -> Arrays:
    """Returns the expected outcome of a case, by the arguments of `run`."""
    x = jax.tree.map(lambda y: y if y.dtype == np.int32 else y.astype(np.float32), x)
    return jax.device_get(reference(case, gradients=gradients, lse=lse)(x))


def reference(case: Case, **options: bool) -> Callable:
    """Returns the function of `expected`, compiled for the CPU; `options` are as for `run`."""
    with jax.default_device(jax.devices("cpu")[0]):
        return executable(dataclasses.replace(case, dtype="float32"), "reference", **options)


@functools.lru_cache(128)
def executable(case: Case, implementation: Any, *, gradients: bool, lse: bool) -> Callable:
    """Returns the function of `run`, compiled; products of float32 are exact."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs(case))
    function = program(case, implementation, gradients=gradients, lse=lse)
    with jax.default_matmul_precision("highest" if case.dtype == "float32" else "default"):
        return function.lower(shapes).compile()


def program(case: Case, implementation: Any, *, gradients: bool, lse: bool) -> Any:
    """Returns the function of `run`, to be compiled.

    Arrays of `x` that `inputs` does not have are more arguments of `attention`.
    """
    c = case
    options: dict[str, Any] = {"is_causal": c.causal, "window": c.window, "softcap": c.softcap}
    if c.images:
        options["window"] = SlidingWindow(c.window, by="coordinates")

    def attend(learned, x):
        dropout: Arrays = {}
        if c.blocks:
            options["mask"] = block_mask(_in_blocks, c.length, c.key_count, block_size=64)
        if c.dropout:
            dropout = {"dropout_rate": c.dropout, "dropout_key": jax.random.key(_SEED)}
        others = {n: y for n, y in x.items() if n not in (*learned, "d_out", "d_lse")}
        result: Any = attention(
            **{name: y for name, y in learned.items() if name != "params"},
            rules=RULES[c.rule].rules(learned["params"]),
            return_lse=lse,
            implementation=implementation,
            **options,
            **dropout,
            **others,
        )
        return result if lse else (result,)

    @jax.jit
    def outcome(x):
        learned = {name: x[name] for name in ("q", "k", "v", "params", "sinks") if name in x}
        if not gradients:
            return _named(attend(learned, x), {})
        results, pull = jax.vjp(lambda y: attend(y, x), learned)
        return _named(results, pull((x["d_out"], x["d_lse"])[: len(results)])[0])

    return outcome


def _named(results: tuple, grads: Arrays) -> Arrays:
    """Returns arrays by name, with heads before tokens."""
    named = dict(zip(("output", "lse"), results, strict=False))
    named |= {f"d{name}": grads[name] for name in "qkv" if name in grads}
    named = {name: jnp.swapaxes(y, 1, 2) for name, y in named.items()}
    named |= {f"gradient of {name}": y for name, y in grads.get("params", {}).items()}
    if "sinks" in grads:
        named["gradient of sinks"] = grads["sinks"]
    return named
