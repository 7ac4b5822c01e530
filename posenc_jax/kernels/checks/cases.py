"""Problems of attention and their results in float64.

NumPy computes the expected numbers, with no code of the engine but that of the seeds of dropout.
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
from posenc_jax.engine.dropout import make_dropout_seeds
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
      filled: for a decode step of `length` tokens: the tokens in the cache of `keys` slots, by
        row; k and v are NaN in other slots.
      keys: S of a decode step.
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
    filled: tuple[int, ...] = ()
    keys: int = 0

    @property
    def key_count(self) -> int:
        """S."""
        return self.keys or self.length + self.later


class RuleCase(NamedTuple):
    """A rule, in JAX and in NumPy.

    Attributes:
      make: `make(random, case)` returns the parameters.
      rules: of the parameters.
      added: `added(params, distance)` returns logits [B, N, T, S]; distances are [B, T, S].
      pull: `pull(params, distance, ds)` returns the cotangents of the parameters.
    """

    make: Callable[[np.random.Generator, Case], Arrays]
    rules: Callable[[Arrays], tuple]
    added: Callable[[Arrays, np.ndarray], Any]
    pull: Callable[[Arrays, np.ndarray, np.ndarray], Arrays]


def _entry(distance):
    return distance.clip(_LOW, _HIGH) - _LOW


def _of_table(shared, head, q, k):
    return head[jnp.clip(q - k, _LOW, _HIGH) - _LOW]


def _by_entry(distance: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Returns sums of [B, T, S] by entry of a table."""
    return np.bincount(_entry(distance).ravel(), x.ravel(), _HIGH - _LOW + 1)


def _table() -> RuleCase:
    """A learned number per head and distance, bounded: T5."""
    make = functools.partial(LogitBias, _of_table, relative=True, bounds=(_LOW, _HIGH))
    return RuleCase(
        lambda random, c: {"table": random.normal(size=(c.heads, _HIGH - _LOW + 1))},
        lambda p: (make(heads=p["table"]),),
        lambda p, d: np.moveaxis(p["table"][:, _entry(d)], 0, 1),
        lambda p, d, ds: {"table": np.stack([_by_entry(d, x) for x in np.moveaxis(ds, 1, 0)])},
    )


def _slope(shared, head, q, k):
    return head * (-1 / 64) * jnp.abs(q - k).astype(jnp.float32)


def _slopes() -> RuleCase:
    """A number per head, times the distance: ALiBi."""
    return RuleCase(
        lambda random, c: {"slopes": np.linspace(0.5, 2.0, c.heads)},
        lambda p: (LogitBias(_slope, heads=p["slopes"], relative=True),),
        lambda p, d: -p["slopes"][:, None, None] * np.abs(d)[:, None] / 64,
        lambda p, d, ds: {"slopes": -(ds * np.abs(d)[:, None]).sum((0, 2, 3)) / 64},
    )


def _rows_and_columns(random: np.random.Generator, c: Case) -> Arrays:
    return {
        "rows": random.normal(size=(c.batch, c.length, c.heads)),
        "columns": random.normal(size=(c.batch, c.key_count, c.heads)),
    }


def _spread(p: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows [B, N, T, 1] and columns [B, N, 1, S]."""
    rows, columns = (np.moveaxis(p[name], 2, 1) for name in ("rows", "columns"))
    return rows[..., None], columns[:, :, None]


def _gathered(d_rows: np.ndarray, d_columns: np.ndarray) -> Arrays:
    """Returns sums of [B, N, T, S] by query and by key."""
    return {
        "rows": np.moveaxis(d_rows.sum(3), 1, 2),
        "columns": np.moveaxis(d_columns.sum(2), 1, 2),
    }


def _separable() -> RuleCase:
    """A number per query plus a number per key: FoX."""
    return RuleCase(
        _rows_and_columns,
        lambda p: (SeparableBias(q_features=p["rows"], k_features=p["columns"]),),
        lambda p, d: sum(_spread(p)),
        lambda p, d, ds: _gathered(ds, ds),
    )


def _gate(shared, head, row, column, q, k):
    return head * jnp.tanh(row - column)


def _pair() -> RuleCase:
    """A function of two tokens."""

    def bounded(p):
        rows, columns = _spread(p)
        return np.tanh(rows - columns)

    def pull(p, d, ds):
        gate = bounded(p)
        slope = ds * p["gates"][:, None, None] * (1 - gate**2)
        return {"gates": (ds * gate).sum((0, 2, 3))} | _gathered(slope, -slope)

    return RuleCase(
        lambda random, c: {"gates": np.linspace(1.0, 2.0, c.heads)} | _rows_and_columns(random, c),
        lambda p: (
            ContentBias(_gate, heads=p["gates"], q_features=p["rows"], k_features=p["columns"]),
        ),
        lambda p, d: p["gates"][:, None, None] * bounded(p),
        pull,
    )


def _vector(shared, head, distance):
    return shared[jnp.clip(distance, _LOW, _HIGH) - _LOW]


def _product(of_keys: bool, size: int | None = 16) -> RuleCase:
    """A vector per token dot a vector per distance: Inkling, Shaw, Transformer-XL, DeBERTa.

    Vectors have `size` numbers, or H.
    """
    name = "k_features" if of_keys else "q_features"
    axes = "bskf" if of_keys else "btkf"

    def make(random, c):
        features = size or c.dim
        shape = (c.batch, c.key_count if of_keys else c.length, c.heads, features)
        vectors = random.normal(size=(_HIGH - _LOW + 1, features)) * 2 / math.sqrt(features)
        return {"features": random.normal(size=shape), "vectors": vectors}

    def pull(p, d, ds):
        vectors = p["vectors"][_entry(d)]
        d_vectors = np.einsum(f"bkts,{axes}->btsf", ds, p["features"])
        by_entry = [_by_entry(d, one) for one in np.moveaxis(d_vectors, -1, 0)]
        return {
            "features": np.einsum(f"bkts,btsf->{axes}", ds, vectors),
            "vectors": np.stack(by_entry, 1),
        }

    return RuleCase(
        make,
        lambda p: (
            DotBias(_vector, shared=p["vectors"], bounds=(_LOW, _HIGH), **{name: p["features"]}),
        ),
        lambda p, d: np.einsum(f"{axes},btsf->bkts", p["features"], p["vectors"][_entry(d)]),
        pull,
    )


def _array(shared: int) -> RuleCase:
    """An array of all pairs, with one entry along the axis `shared`.

    It is float32 if rows of the batch share it (axis 0), and in q's dtype if heads do (1).
    """

    def make(random, c):
        shape = [c.batch, c.heads, c.length, c.key_count]
        shape[shared] = 1
        pairs = random.normal(size=shape)
        return {"pairs": pairs.astype(jnp.dtype(c.dtype)) if shared == 1 else pairs}

    return RuleCase(
        make,
        lambda p: (DenseBias(p["pairs"]),),
        lambda p, d: p["pairs"],
        lambda p, d, ds: {"pairs": ds.sum(shared, keepdims=True)},
    )


RULES = {
    "none": RuleCase(lambda random, c: {}, lambda p: (), lambda p, d: 0.0, lambda p, d, ds: {}),
    "table": _table(),
    "slopes": _slopes(),
    "separable": _separable(),
    "pair": _pair(),
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
        k_ids = x.get("k_segment_ids", x["q_segment_ids"])
        x["q"][x["q_segment_ids"] < 0] = np.nan
        x["k"][k_ids < 0], x["v"][k_ids < 0] = np.nan, np.nan

    def typed(name, y):
        if name in ("q", "k", "v", "d_out"):
            return y.astype(jnp.dtype(c.dtype))
        return y.astype(np.float32) if y.dtype == np.float64 else y

    return {name: jax.tree.map(functools.partial(typed, name), y) for name, y in x.items()}


def _places(c: Case, random: np.random.Generator) -> Arrays:
    """Returns positions and segments, int32, by the names of `attention`'s arguments."""
    at = np.arange(c.key_count, dtype=np.int32)
    if c.filled:
        filled = np.array(c.filled, np.int32)[:, None]
        q_at = filled - c.length + np.arange(c.length, dtype=np.int32)
        k_ids = np.where(at < filled, 0, -1).astype(np.int32)
        places = {"q_positions": q_at, "k_positions": np.repeat(at[None], c.batch, 0)}
        return places | {"q_segment_ids": np.zeros_like(q_at), "k_segment_ids": k_ids}
    if c.later:
        return {"q_positions": at[c.later :], "k_positions": at}
    places = {}
    if c.shuffled:
        order = random.permutation(at)
        places |= {"q_positions": order, "k_positions": order}
    if c.segments:
        # Segments begin and end inside tiles, and padding is on both sides.
        ids, length = np.zeros((c.batch, c.length), np.int32), c.length
        ids[0, length // 4 + 1 :], ids[0, length * 5 // 6 :] = 1, -1
        ids[1:, : length // 12], ids[1:, length // 3 + 1 :] = -1, 1
        places["q_segment_ids"] = ids
    return places


def run(case: Case, implementation: Any, x: Arrays, *, gradients: bool, lse: bool) -> Arrays:
    """Returns the outcome of an implementation, as `expected` does in float64.

    Args:
      case: the problem.
      implementation: as for `attention`.
      x: the arrays of `inputs`.
      gradients: whether to return gradients of everything.
      lse: whether to return the log-sum-exp; some implementations have none.
    """
    return jax.device_get(executable(case, implementation, gradients=gradients, lse=lse)(x))


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

    def attend(learned, x):
        dropout: Arrays = {}
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


def expected(case: Case, x: Arrays, *, gradients: bool, lse: bool = True) -> Arrays:
    """Returns the outcome of a case in float64, by the arguments of `run`.

    "output", "dq", "dk" and "dv" are [B, N or K, T or S, H], "lse" is [B, N, T]; gradients of
    parameters have their shapes.
    """
    c, rule = case, RULES[case.rule]

    def wide(y):
        return np.nan_to_num(np.asarray(y, np.float64))

    q, k, v, d_out = (np.moveaxis(wide(x[name]), 2, 1) for name in ("q", "k", "v", "d_out"))
    k, v = (np.repeat(y, c.heads // c.kv_heads, 1) for y in (k, v))
    params, scale = jax.tree.map(wide, x["params"]), 1 / math.sqrt(c.dim)
    distance, seen = _visible(c, x)
    s = scale * (q @ np.swapaxes(k, 2, 3)) + rule.added(params, distance)
    slope = 1.0
    if c.softcap is not None:
        bounded = np.tanh(s / c.softcap)
        s, slope = c.softcap * bounded, 1 - bounded**2
    s = np.where(seen[:, None], s, -np.inf)
    top = np.maximum(s.max(3), -1e30)
    total = np.exp(s - top[..., None]).sum(3)
    with np.errstate(divide="ignore"):
        log_sum = top + np.log(total)
        sinks = wide(x["sinks"])[None, :, None] if c.sinks else -np.inf
        log_sum = np.logaddexp(log_sum, sinks)
    p = np.where(seen[:, None], np.exp(s - np.maximum(log_sum, -1e30)[..., None]), 0.0)
    keep = _keep(c) / (1 - c.dropout) if c.dropout else 1.0
    out = (p * keep) @ v
    results = {"output": out, "lse": log_sum}
    if not gradients:
        return results
    d_lse = np.moveaxis(wide(x["d_lse"]), 2, 1) if lse else 0.0
    d_p = keep * (d_out @ np.swapaxes(v, 2, 3))
    delta = (d_out * out).sum(3) - d_lse
    ds = p * (d_p - delta[..., None]) * slope

    def of_key_heads(y):
        return y.reshape(c.batch, c.kv_heads, -1, *y.shape[2:]).sum(2)

    results["dq"] = scale * (ds @ k)
    results["dk"] = of_key_heads(scale * (np.swapaxes(ds, 2, 3) @ q))
    results["dv"] = of_key_heads(np.swapaxes(p * keep, 2, 3) @ d_out)
    for name, y in rule.pull(params, distance, ds).items():
        results[f"gradient of {name}"] = y
    if c.sinks:
        share = np.exp(sinks - log_sum)
        results["gradient of sinks"] = -(share * delta).sum((0, 2))
    return results


def _visible(c: Case, x: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """Returns query minus key, and which pairs are visible, [B, T, S]."""
    at = np.arange(c.key_count, dtype=np.int32)
    q_at, k_at = x.get("q_positions", at), x.get("k_positions", at)
    shape = c.batch, c.length, c.key_count
    distance = np.broadcast_to(q_at[..., :, None] - k_at[..., None, :], shape)
    seen = distance >= 0 if c.causal else np.full(shape, True)
    if c.window is not None:
        before, after = c.window if isinstance(c.window, tuple) else (c.window - 1,) * 2
        seen = seen & (distance <= before) & (distance >= -after)
    if "q_segment_ids" in x:
        q_ids = x["q_segment_ids"]
        k_ids = x.get("k_segment_ids", q_ids)
        seen = seen & (q_ids[:, :, None] == k_ids[:, None]) & (q_ids >= 0)[:, :, None]
    return distance, seen


def _keep(c: Case) -> np.ndarray:
    """Returns the pairs that dropout keeps, [B, N, T, S], by the hash of MurmurHash3."""
    seeds = np.asarray(make_dropout_seeds(jax.random.key(_SEED), c.batch, c.heads))

    def mixed(h):
        h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        return h ^ (h >> np.uint32(16))

    q, k = (np.arange(count, dtype=np.uint32) for count in (c.length, c.key_count))
    rows = mixed(seeds[..., :1] + q) ^ seeds[..., 1:]
    return mixed(rows[..., None] + k) >= np.uint32(int(c.dropout * 2**32))
