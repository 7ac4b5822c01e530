"""The model on which properties are measured: a scheme, parameters, tokens, compiled functions."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from posenc_jax.checks import require
from posenc_jax.engine.api import choose
from posenc_jax.engine.mask import LEAST_LOGIT
from posenc_jax.engine.problem import Implementation, LogSumExp, Problem, repeat_heads
from posenc_jax.engine.rule import added_logits
from posenc_jax.functional.attention import scheme_attention, scheme_embedding
from posenc_jax.functional.new_cache import new_cache
from posenc_jax.functional.pipeline import Pipeline, Projections
from posenc_jax.positions.packing import count_up
from posenc_jax.schemes.scheme import Scheme

BATCH, LENGTH = 2, 19  # 19 tokens are no multiple of a tile.
LONG = 130  # Tokens for tiles: no multiple of a block, and rules evaluated once per distance.
FIRST = 5  # Tokens of first calls; B, T, N, K, H and D differ by default.
PADDING = 4  # Padding tokens before the first row in checks of tiles.


@dataclasses.dataclass(frozen=True, eq=False)
class Recorder(Implementation):
    """What `implementation=None` chooses; keeps the functions of rules whenever it is traced.

    Attributes:
      traced: for each problem that was traced, the names and static functions of its rules.
    """

    traced: list[list[tuple[str, Callable]]] = dataclasses.field(default_factory=list)
    name = "recorder"

    def __call__(self, problem: Problem) -> tuple[jax.Array, Any]:
        """Computes a problem, and keeps the functions of its rules."""
        rules: tuple[Any, ...] = problem.rules
        static = (
            (f"{type(rule).__name__}.{field.name}", getattr(rule, field.name))
            for rule in rules
            for field in dataclasses.fields(rule)
            if field.metadata.get("static")
        )
        self.traced.append([(name, value) for name, value in static if callable(value)])
        return choose(problem)(problem)


class Measured(NamedTuple):
    """Numbers of one attention call.

    Attributes:
      deviation: standard deviation of the logits of a pair of tokens, over contents.
      below, above: the largest change of a rule at distances beyond its lower and upper bound.
    """

    deviation: float
    below: float
    above: float


@dataclasses.dataclass(frozen=True, eq=False)
class Probe(Implementation):
    """Measures the logits and rules of each call, and returns zeros.

    Attributes:
      measured: numbers of each call.
      rules: for each rule, whether it reads whole rows of logits and whether it adds to values.
    """

    measured: list[Measured] = dataclasses.field(default_factory=list)
    rules: list[tuple[bool, bool]] = dataclasses.field(default_factory=list)
    name = "probe"
    __eq__, __hash__ = object.__eq__, object.__hash__  # A program belongs to one list.

    def __call__(self, problem: Problem) -> tuple[jax.Array, Any]:
        """Returns zeros, and measures half of the squared difference of two rows' logits."""
        p = problem.per_query_head()
        heads = p.num_heads
        q, k = (repeat_heads(x, heads).astype(jnp.float32) for x in (p.q, p.k))
        logits = p.scale * jnp.einsum("btnh,bsnh->bnts", q, k)
        for rule in p.rules:
            self.rules.append((rule.whole_rows, rule.adds_values))
            if not rule.whole_rows:
                term = added_logits(rule, p.q_coordinates, p.k_coordinates)
                if term is not None:
                    logits += p.scale * term if rule.scaled else term
        seen = p.visible() & (logits > 0.5 * LEAST_LOGIT)
        squares = jnp.where(seen[0] & seen[1], (logits[0] - logits[1]) ** 2 / 2, 0.0)
        deviation = jnp.sqrt(squares.sum() / (seen[0] & seen[1]).sum(dtype=jnp.float32))
        beyond = [[_change_beyond(rule, side, heads) for rule in p.rules] for side in (0, 1)]
        below, above = (jnp.max(jnp.stack([jnp.float32(0), *changes])) for changes in beyond)
        jax.debug.callback(
            lambda *x: self.measured.append(Measured(*map(float, x))), deviation, below, above
        )
        rows = problem.q.shape[:3]
        lse = LogSumExp(jnp.zeros(rows, jnp.float32), jnp.ones(rows, jnp.float32))
        return jnp.zeros((*rows, problem.v.shape[3]), problem.q.dtype), lse


def _change_beyond(rule: Any, side: int, num_heads: int) -> jax.Array:
    """Returns the largest change of a rule's numbers beyond its lower or upper bound."""
    if (bound := rule.bounds[side]) is None:
        return jnp.float32(0)
    steps = jnp.asarray([0, *3 ** np.arange(13)], jnp.int32)
    q, k = bound + (steps if side else -steps), jnp.zeros(1, jnp.int32)
    rule = rule.on(_itself)  # Without bounds.
    if rule.adds_values:
        numbers = rule.added_values(jnp.ones((num_heads, len(q), 1)), q, k)
    else:
        features = rule.q_features, rule.k_features
        q_features, k_features = jax.tree.map(lambda x: x[:1, :1], features)
        q_features = jax.tree.map(lambda x: jnp.repeat(x, len(q), 1), q_features)
        rule = rule.with_features(q_features, k_features)
        added: Any = added_logits(rule, q[None], k[None])
        numbers = jnp.moveaxis(added, 2, 0)
    changed = numbers != numbers[:1]  # Not where both are -inf.
    return jnp.abs(jnp.where(changed, numbers - numbers[:1], 0)).max()


def _itself(coordinates: jax.Array) -> jax.Array:
    return coordinates


class Case:
    """A scheme with parameters, random tokens and compiled functions to measure it with.

    Coordinates go up to 129, below `max_length`, and beyond a million for a relative scheme.

    Args:
      scheme: the scheme, an instance.
      num_heads, num_kv_heads, head_dim, model_dim: sizes N, K, H and D. Default: the fields of
        these names of the scheme or of schemes inside it; else 6, N divided by its smallest
        prime factor, 8 and 20.
      max_length: a limit of coordinates. Default: the least field of this name, if there are any.

    Attributes:
      params, noisy_params: new parameters, and these with noise, as after training.
      weights: projections to queries, keys and values, [D, N or K, H].
      x, long_x: token embeddings, float32 [B, 19, D] and [B, 130, D].
      padded, packed: segments of 130 tokens: padding at the left of the first row, and two
        sequences in each row.
      implementations: of attention, which have to agree.
      recorder: the implementation of `eager` and of first calls.

    Raises:
      TypeError: for anything but a scheme.
      ValueError: for a `max_length` below 40.
    """

    def __init__(
        self,
        scheme: Scheme,
        *,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        model_dim: int | None = None,
        max_length: int | None = None,
    ):
        if not isinstance(scheme, Scheme):
            raise TypeError(f"testing: scheme must be a Scheme instance, got {scheme!r}.")
        fields = list(_sizes(scheme))
        sizes = dict(fields)
        self.scheme = scheme
        self.num_heads = num_heads or sizes.get("num_heads", 6)
        self.num_kv_heads = num_kv_heads or sizes.get("num_kv_heads") or _grouped(self.num_heads)
        self.head_dim = head_dim or sizes.get("head_dim", 8)
        self.model_dim = model_dim or sizes.get("model_dim", 20)
        least = min([n for name, n in fields if name == "max_length"], default=2**20)
        self.max_length = least if max_length is None else max_length
        require(
            self.max_length >= 40,
            f"testing: max_length must be at least 40 to check a scheme, got {self.max_length}.",
        )
        self.long = min(LONG, self.max_length)
        self.x = _normal(3, BATCH, LENGTH, self.model_dim)
        self.long_x = _normal(4, BATCH, self.long, self.model_dim)
        self.padded, self.packed = np.zeros((2, BATCH, self.long), np.int32)
        self.padded[0, :PADDING] = -1
        self.packed[:, self.long // 3 :] = 1
        heads = self.num_heads, self.num_kv_heads, self.num_kv_heads
        self.weights = [
            _normal(i, self.model_dim, n, self.head_dim) / np.float32(self.model_dim**0.5)
            for i, n in enumerate(heads)
        ]
        self.implementations = "reference", "xla"
        self.recorder = Recorder()
        static = ("scheme", "is_causal", "window", "implementation")
        self._model = jit_fast(self.model, static_argnames=static)
        self._slopes = jit_fast(self._all_slopes, static_argnums=0)
        self._lengths = jit_fast(self._all_lengths)
        self._plain: dict[Any, Any] = {}

    @functools.cached_property
    def params(self) -> Any:
        """New parameters."""
        return self.lowered_init.compile()(jax.random.key(7))

    @functools.cached_property
    def noisy_params(self) -> Any:
        """New parameters with noise, as after training."""
        numbers = np.random.default_rng(0)
        noise = jax.tree.map(lambda a: numbers.normal(0, 0.1, a.shape).astype("f4"), self.params)
        return jax.tree.map(lambda a, b: np.asarray(a) + b, self.params, noise)

    @functools.cached_property
    def lowered_init(self) -> Any:
        """The program of `init` that makes `params`."""
        return self.lower_init()

    def lower_init(self) -> Any:
        """Returns the program of `init`, traced anew."""
        return jit_fast(lambda key: self.scheme.init(key)).lower(jax.random.key(7))

    def model(
        self,
        scheme: Scheme,
        params: Any,
        weights: Any,
        x: Any,
        *,
        cache: Any = None,
        **options: Any,
    ) -> tuple[jax.Array, Any]:
        """Returns the output [B, T, N, H] of embedding, projections and attention; the cache."""
        names = "positions", "coordinates", "segment_ids"
        places = {name: options.get(name) for name in names}
        x = scheme_embedding(scheme, params, x, cache=cache, **places)
        q, k, v = (jnp.einsum("btd,dnh->btnh", x, w) for w in weights)
        options = {"is_causal": True} | options
        x = x if scheme.traits.reads_x else None  # A hook that reads None is named.
        return scheme_attention(scheme, params, q, k, v, x=x, cache=cache, **options)

    def run(
        self,
        x: Any,
        *,
        scheme: Scheme | None = None,
        params: Any = None,
        weights: Any = None,
        **options: Any,
    ) -> tuple[jax.Array, Any]:
        """Returns `model` of tokens x, compiled, by default with `weights` in x's dtype."""
        params = self.params if params is None else params
        weights = [w.astype(x.dtype) for w in self.weights] if weights is None else weights
        options = {"implementation": "reference"} | options
        return self._model(scheme or self.scheme, params, weights, x, **options)

    def eager(self) -> np.ndarray:
        """Returns the output of a call outside of `jit`, computed by `recorder`."""
        arrays = self.params, self.weights, self.x
        return np.asarray(self.model(self.scheme, *arrays, implementation=self.recorder)[0])

    @functools.cached_property
    def probe(self) -> Probe:
        """Measurements of a new layer, with heads as wide as usual.

        Heads have 64 dimensions unless the scheme sets their width: a factor that is missing
        shows there.
        """
        head_dim = dict(_sizes(self.scheme)).get("head_dim", 64)
        heads = self.num_heads, self.num_kv_heads, self.num_kv_heads
        weights = [
            _normal(10 + i, self.model_dim, n, head_dim) / np.float32(self.model_dim**0.5)
            for i, n in enumerate(heads)
        ]
        probe = Probe()
        jax.block_until_ready(self.run(self.x, weights=weights, implementation=probe)[0])
        jax.effects_barrier()
        return probe

    def lengths(self, coordinates: Any) -> list[np.ndarray]:
        """Returns the Euclidean lengths of q [B, T, N] and k [B, T, K] with positions encoded."""
        return [np.asarray(x) for x in self._lengths(self.noisy_params, self.x, coordinates)]

    def _all_lengths(self, params, x, coordinates):
        q, k, v = (jnp.einsum("btd,dnh->btnh", x, w) for w in self.weights)
        pipeline = Pipeline(self.scheme, params)
        tokens = pipeline.encode(pipeline.read(Projections(q, k, v, x, coordinates)))
        return [jnp.linalg.norm(x.astype(jnp.float32), axis=-1) for x in (tokens.q, tokens.k)]

    def first_calls(self) -> dict[str, Callable[[], Any]]:
        """Returns small calls, by description, that trace a scheme and compile nothing.

        Those with coordinates of several axes come first.
        """
        axes, positions = self.scheme.traits.num_axes, count_up(BATCH, FIRST)
        calls: dict[str, Callable[[], Any]] = {}
        if axes > 1:
            grid = jnp.broadcast_to(positions, (axes, *positions.shape))
            call = f" with coordinates [{axes}, B, T]"
            calls[call] = functools.partial(self._trace, coordinates=grid)
            calls[" with coordinates [B, T], as text has them"] = self._trace
        else:
            calls[""] = self._trace
        calls[" with segment_ids"] = functools.partial(
            self._trace, positions=positions, segment_ids=jnp.zeros_like(positions)
        )
        calls[" in bfloat16"] = functools.partial(self._trace, jnp.bfloat16)
        calls[" with a cache, and one more token"] = functools.partial(self._trace, cached=True)
        return calls

    def traced_functions(self, scheme: Scheme) -> list[list[tuple[str, Callable]]]:
        """Returns the functions that the recorder adds for a small call, if it is traced anew."""
        count = len(self.recorder.traced)
        self._trace(scheme=scheme)
        return self.recorder.traced[count:]

    def _trace(
        self,
        dtype: Any = jnp.float32,
        cached: bool = False,
        scheme: Scheme | None = None,
        **options: Any,
    ) -> None:
        options["implementation"] = self.recorder
        model = functools.partial(self.model, scheme or self.scheme)

        def run(params, weights, x):
            cache = self.cache(FIRST + 1) if cached else None
            out, cache = model(params, weights, x, cache=cache, **options)
            if cached:
                out, cache = model(params, weights, x[:, :1], cache=cache, **options)
            return out

        params = jax.eval_shape(self.scheme.init, jax.random.key(7))
        weights = [w.astype(dtype) for w in self.weights]
        jax.eval_shape(run, params, weights, self.x[:, :FIRST].astype(dtype))

    def placed(
        self,
        x: Any,
        positions: Any = None,
        segment_ids: Any = None,
        coordinates: Any = None,
        **options: Any,
    ) -> np.ndarray:
        """Returns the output; positions, segments and coordinates are data of one program."""
        positions = count_up(*x.shape[:2]) if positions is None else positions
        segment_ids = jnp.zeros_like(positions) if segment_ids is None else segment_ids
        coordinates = positions if coordinates is None else coordinates
        options |= {"positions": positions, "segment_ids": segment_ids, "coordinates": coordinates}
        return np.asarray(self.run(x, **options)[0])

    def alone(self, row: np.ndarray) -> np.ndarray:
        """Returns the output [T, N, H] of one sequence [T, D], T at most 19, by itself.

        Other tokens fill the row behind it, where causal attention cannot see them.
        """
        x = np.array(self.x)
        x[0, : len(row)] = row
        return self.placed(x)[0, : len(row)]

    def _all_slopes(self, implementations, params, x, out_weights, segment_ids):
        def loss(params, x, implementation):
            options = {"segment_ids": segment_ids, "contiguous": True}
            options["implementation"] = implementation
            out, _ = self.model(self.scheme, params, self.weights, x, **options)
            return (out * out_weights).sum(), out

        slopes = jax.grad(loss, (0, 1), has_aux=True)
        return [slopes(params, x, implementation) for implementation in implementations]

    def gradients(
        self,
        segment_ids: np.ndarray | None = None,
        *,
        x: np.ndarray | None = None,
        params: Any = None,
        weighted: int | None = None,
    ) -> list[tuple[np.ndarray, Any, np.ndarray]]:
        """Returns the output for 130 tokens, and gradients of its weighted sum to params and x.

        One program computes them for all `implementations`.

        Args:
          segment_ids: `padded` or `packed`. Default: one segment.
          x: tokens [B, 130, D]. Default: `long_x`.
          params: parameters. Default: `params`.
          weighted: the number of first tokens in the sum. Default: all.
        """
        if x is None and params is None:
            ids = None if segment_ids is None else segment_ids.tobytes()
            key = self.implementations, weighted, ids
            if key not in self._plain:
                self._plain[key] = self.gradients(segment_ids, x=self.long_x, weighted=weighted)
            return self._plain[key]
        x = self.long_x if x is None else x
        params = self.params if params is None else params
        segment_ids = np.zeros_like(self.padded) if segment_ids is None else segment_ids
        out_weights = _normal(5, BATCH, self.long, self.num_heads, self.head_dim)
        out_weights[:, weighted or self.long :] = 0
        results = self._slopes(self.implementations, params, x, out_weights, segment_ids)
        return [(np.asarray(out), params, np.asarray(x)) for (params, x), out in results]

    def cache(self, capacity: int = LENGTH + 5, **options: Any):
        """Returns an empty cache."""
        return new_cache(
            self.scheme,
            BATCH,
            capacity,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            model_dim=self.model_dim,
            **options,
        )

    def decode(
        self, x: Any, chunks: list[int], cache: Any, **options: Any
    ) -> tuple[np.ndarray, Any]:
        """Returns the output of chunks of tokens that pass through a cache, and the cache.

        Chunks of several tokens run in tiles. Positions, coordinates and segments are split
        with the tokens; the cache counts the positions of single ones.
        """
        outs, start = [], 0
        for size in chunks:
            part = slice(start, start + size)
            split = ("positions", "segment_ids", "coordinates")
            options_of_part = {n: a[..., part] if n in split else a for n, a in options.items()}
            if size == 1:
                options_of_part |= {"positions": None, "segment_ids": None}
            options_of_part |= {"implementation": "xla" if size > 1 else None}
            out, cache = self.run(x[:, part], cache=cache, **options_of_part)
            outs.append(np.asarray(out))
            start += size
        return np.concatenate(outs, 1), cache


def jit_fast(function: Callable, **options: Any) -> Any:
    """Returns `jax.jit(function)` that compiles fast, for programs that run a few times."""
    if jax.default_backend() == "cpu":
        level = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
        options |= {"compiler_options": level}
    return jax.jit(function, **options)


def _sizes(value: Any) -> Iterator[tuple[str, int]]:
    """Yields the sizes among the fields of a scheme and of the schemes inside it."""
    if isinstance(value, tuple | list):
        for item in value:
            yield from _sizes(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            inner = getattr(value, field.name)
            if isinstance(inner, int):
                yield field.name, inner
            else:
                yield from _sizes(inner)


def _grouped(num_heads: int) -> int:
    """Returns a number of key heads that divides the query heads, and is smaller if possible."""
    return next((num_heads // n for n in (2, 3, 5, 7) if num_heads % n == 0), 1)


def _normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)
