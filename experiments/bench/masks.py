"""Masks by positions, windows and block masks, against other ways to the same masks.

Each pattern is one function of two tokens. "here" is the way that docs/masks.md gives it: positions
and `visible_until`, a `SlidingWindow` or a `block_mask`. The others are a block mask of the same
function, a rule that adds -inf, and an array of all pairs, alone and with causality; with torch
installed also FlexAttention and SDPA with an array, on the same processor. The backward pass has
the gradients of q, k and v.
Times are ratios to attention of all pairs without a mask; "tiles" is the share of tiles of
256 x 256 with a visible pair. All patterns at 8,192 tokens take a quarter of an hour.
"""

import argparse
import dataclasses
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import posenc_jax as pe
from experiments.bench.cases import positive
from experiments.bench.peers import Case, agreeing, jax_case
from experiments.bench.timing import show, side_by_side
from experiments.errors import ConfigError
from experiments.settings.config_io import names
from posenc_jax import positions as at

_ALWAYS = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A mask.

    Attributes:
      function: `function(b, h, q_idx, kv_idx, *arrays)`, of NumPy, JAX and torch alike.
      arrays: NumPy arrays that it reads, of integers [T].
      options: of `attention`, for the same mask; None: a block mask is the way.
    """

    function: Callable
    arrays: tuple = ()
    options: dict[str, Any] | None = None


def _in_order(b, h, q, k, order, until):
    return (order[k] <= order[q]) & (order[q] < until[k])


def _by_order(order: Any, until: Any = None) -> Pattern:
    """A mask by positions, and ends of branches."""
    order = np.asarray(order, np.int32)
    options: dict[str, Any] = {"q_positions": order, "k_positions": order, "is_causal": True}
    if until is not None:
        until = np.asarray(until, np.int32)
        options["k_visible_until"] = until
    until = np.full(len(order), _ALWAYS, np.int32) if until is None else until
    return Pattern(_in_order, (order, until), options)


def _of_documents(b, h, q, k, order, document):
    return (document[q] == document[k]) & (order[k] <= order[q])


def patterns(length: int) -> dict[str, Pattern]:
    """Returns the patterns of T tokens by name."""
    index, half = np.arange(length), length // 2
    random = np.random.default_rng(0)
    parents, path = [-1], [0]  # In the order of positions, depth first: then few tiles are live.
    for token in range(1, length):
        path = path[: max(1, len(path) - random.geometric(0.5) + 1)]
        parents.append(path[-1])
        path.append(token)
    shared = np.where((index - length // 4) % (3 * length // 32) == 0, length // 4 - 1, index - 1)
    shared = np.where(index < length // 4, index - 1, shared)
    trees = [at.from_tree(jnp.asarray(x)) for x in (parents, shared)]
    noisy, block = index < half, index % half // 32
    document = index // (length // 8)
    prefix = np.where(index % (length // 8) < length // 16, 0, index % (length // 8))
    window, side = length // 16, 2 ** (length.bit_length() // 2 - 1)

    def sinks(b, h, q, k):
        return (k <= q) & ((q - k < window) | (k < 4))

    def dilated(b, h, q, k):
        return (k <= q) & (q - k < 4 * window) & ((q - k) % 4 == 0)

    def neighbours(b, h, q, k):
        return (abs(q // side - k // side) <= 6) & (abs(q % side - k % side) <= 6)

    return {
        "block diffusion": _by_order(index // 32),
        "prefixes of documents": Pattern(
            _of_documents,
            (prefix, document),
            dict(
                q_positions=prefix, k_positions=prefix, q_segment_ids=document[None], is_causal=True
            ),
        ),
        "shared prompt": _by_order(trees[1].positions, trees[1].visible_until),
        "random tree": _by_order(trees[0].positions, trees[0].visible_until),
        "bd3-lm": _by_order(2 * block + ~noisy, np.where(noisy, 2 * block + 1, _ALWAYS)),
        "sinks and window": Pattern(
            sinks, (), dict(is_causal=True, window=pe.SlidingWindow(window, num_sink_tokens=4))
        ),
        "dilated window": Pattern(dilated),
        "neighbours in an image": Pattern(neighbours),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's settings."""
    add, known = parser.add_argument, ",".join(patterns(1024))
    add("--length", type=positive, default=8192, help="T, a power of two (default: 8192)")
    for name, size in (("--heads", 8), ("--head-dim", 64)):
        add(name, type=positive, default=size, help=f"(default: {size})")
    add("--patterns", type=names, default=names(known), help=f"(default: {known})")
    add("--forward", action="store_true", help="without the backward pass")
    add("--rounds", type=positive, default=5, help="(default: 5)")
    add("--seconds", type=float, default=10.0, help="beyond the rounds (default: 10)")


def run(options: argparse.Namespace) -> dict:
    """Measures every pattern; returns the numbers."""
    known, results = patterns(options.length), []
    for name in options.patterns:
        if name not in known:
            raise ConfigError(
                f"bench masks: unknown pattern {name!r}; use some of {', '.join(known)}"
            )
    shape = (1, options.length, options.heads, options.head_dim)
    keys = jax.random.split(jax.random.key(0), 3)
    qkv = tuple(jax.random.normal(key, shape, jnp.float32) for key in keys)
    backward = not options.forward
    whole = jax_case(_attention(), qkv, backward)
    for name in options.patterns:
        print(f"\ncompiling {name} ...", flush=True)
        pattern = known[name]
        mask = _block_mask(pattern, options.length)
        live, _ = mask.tiles(256, 256, *(-(-options.length // 256) * 256,) * 2)
        ways = _cases(pattern, mask, qkv, backward)
        cases = {"all pairs": whole, **dict(ways)}
        timings = side_by_side(
            {way: case.call for way, case in cases.items()},
            rounds=options.rounds,
            seconds=options.seconds,
            warm=1,
        )
        share = float(live.mean())
        show(f"{name} {shape}, tiles {share:.2f}", timings)
        print(f"\n  {'':34s} {'memory MB':>10s}")
        for way, case in cases.items():
            if "megabytes" in case.facts:
                print(f"  {way:34s} {case.facts['megabytes']:10.1f}", flush=True)
        rows = [dataclasses.asdict(t) | dict(cases[t.name].facts) for t in timings]
        results.append({"pattern": name, "shape": shape, "tiles": share, "rows": rows})
    return {"results": results, "backward": backward}


def _attention(**options: Any) -> Callable:
    return lambda q, k, v: pe.attention(q, k, v, implementation="xla", **options)


def _block_mask(pattern: Pattern, length: int) -> pe.BlockMask:
    return jax.jit(lambda *arrays: pe.block_mask(pattern.function, length, length, *arrays))(
        *pattern.arrays
    )


def _cases(
    pattern: Pattern, mask: pe.BlockMask, qkv: tuple, backward: bool
) -> Iterator[tuple[str, Case]]:
    """Yields the ways to a mask by name, with equal numbers."""

    def added(score, b, h, q, k, *arrays):
        return jnp.where(pattern.function(b, h, q, k, *arrays), score, -jnp.inf)

    def by_rule(q, k, v):
        arrays = [jnp.asarray(x) for x in pattern.arrays]
        return _attention(rules=pe.score_mod(added, q, *arrays, adds=True))(q, k, v)

    pairs = np.asarray(mask.pairs())
    ours = jax_case(_attention(**pattern.options or {"mask": mask}), qkv, backward)
    ways = {"rule": by_rule, "array of pairs": _attention(mask=jnp.asarray(pairs))}
    if pattern.options is not None:
        order = {n: pattern.options.get(n) for n in ("is_causal", "q_positions", "k_positions")}
        ways["array of pairs, in order"] = _attention(mask=jnp.asarray(pairs), **order)
        ways = {"block mask": _attention(mask=mask), **ways}
    yield "here", ours
    others = {way: jax_case(f, qkv, backward, "here") for way, f in ways.items()}
    if importlib.util.find_spec("torch") is not None:
        from experiments.bench.masks_torch import torch_cases

        others |= torch_cases(pattern.function, pattern.arrays, pairs, qkv, backward)
    yield from agreeing(others, {"here": ours}).items()
