"""A relative bias that reads its distances from a table."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from posenc_jax.checks import array_of_rank, coordinate_values, require
from posenc_jax.engine.rules import LogitBias


@dataclasses.dataclass(frozen=True)
class _OfDistances:
    """A relative rule that looks its distance up in a table."""

    rule: Callable

    def __call__(self, shared, head, q, k):
        shared, past, future = shared
        n = q - k
        entry = jnp.abs(n) - 1
        far = jnp.where(n > 0, past.shape[0], future.shape[0])
        read = jnp.where(n > 0, past.at[entry].get(mode="clip"), -future.at[entry].get(mode="clip"))
        read = jnp.where(n == 0, jnp.zeros_like(read), read)
        term = self.rule(shared, head, read, jnp.zeros_like(read))
        return jnp.where(entry < far, term, jnp.nan)


def on_distances(bias: LogitBias, past: jax.Array, future: jax.Array | None = None) -> LogitBias:
    """Returns a relative bias that reads the distance `past[n - 1]` for a key n tokens back.

    Ruoss et al. randomize distances rather than positions for ALiBi and Transformer-XL:
    such distances do not add up along the sequence. `positions.randomized_distances` draws
    them. The bias is NaN for pairs more than L tokens apart.

    Args:
      bias: a bias that depends on q - k alone.
      past: increasing distances [L], int32 or float32.
      future: distances [L] for later keys. Default: `past`.

    Raises:
      ValueError: for a bias that is not relative, or arrays of another rank.

    >>> import posenc_jax as pe
    >>> alibi = pe.on_distances(pe.ALiBi(num_heads=1).rules({}), jnp.array([2, 5]))
    >>> alibi.dense(jnp.array([7]), jnp.array([5, 6, 7])) * 256
    Array([[[-5., -2., -0.]]], dtype=float32)
    """
    require(bias.relative, f"on_distances: {bias.rule} does not depend on the distance alone.")
    named = {"past": past, "future": past if future is None else future}
    for name, x in named.items():
        array_of_rank("on_distances", name, x, 1, "[L]")
        require(x.size > 0, f"on_distances: {name} must have at least one distance, got {x.shape}.")
    shared = bias.shared, *(coordinate_values("on_distances", x, n) for n, x in named.items())
    return dataclasses.replace(
        bias, rule=_OfDistances(bias.rule), shared=shared, bounds=(None, None)
    )
