r"""Rotary schemes in which near and far keys meet a query at different angles.

Every view turns q and k in its own way and attends to the keys that are its own. Views are
merged exactly by the log-sum-exp of their logits:

    out = sum_v exp(lse_v - lse) out_v,     lse = log sum_v exp(lse_v)

so that no logits are ever put side by side. Memory stays linear; each view costs one
attention. In released code the weights of the merge are detached, which is no gradient.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from posenc_jax.angles import cos_sin
from posenc_jax.checks import require
from posenc_jax.rotary.rotate import rotate
from posenc_jax.scheme import LogitBias, argument_of


@dataclasses.dataclass(frozen=True)
class OtherViews:
    """A rule that hides the keys of all views but one.

    Attributes:
      view_of: `view_of(q, k) -> int32 scalar`, a function of a module or a frozen dataclass.
      own: the view whose keys stay.
    """

    view_of: Callable
    own: int

    def __call__(self, shared, head, q, k):
        """Returns 0 or a logit that no weight is left of."""
        # Finite: a query may have no key of its own in a view.
        return jnp.where(self.view_of(q, k) == self.own, 0.0, -1e30).astype(jnp.float32)


def attend_views(
    name: str,
    views: Sequence[tuple[jax.Array, jax.Array]],
    v: jax.Array,
    view_of: Callable,
    attention: Callable,
    *,
    relative: bool = False,
) -> jax.Array:
    """Returns one softmax attention, [B, T, N, V], over keys that are seen in several ways.

    Args:
      name: the scheme, for errors.
      views: q [B, T, N, H] and k [B, S, K, H] of every view.
      v: [B, S, K, V].
      view_of: which view a query and a key meet in, by their coordinates.
      attention: as `Scheme.attend` gets it.
      relative: whether `view_of` depends on the distance alone.

    Raises:
      NotImplementedError: with softcap, which would let hidden keys through.
      ValueError: if a log-sum-exp is asked for.
    """
    if argument_of(attention, "softcap") is not None:
        raise NotImplementedError(
            f"{name}: softcap bounds what hides the keys of other views; leave it out."
        )
    require(not argument_of(attention, "return_lse"), f"{name}: return_lse is used inside.")
    heads = jnp.zeros((views[0][0].shape[2],), jnp.float32)
    outs, sums = [], []
    for own, (q, k) in enumerate(views):
        bias = LogitBias(OtherViews(view_of, own), heads=heads, relative=relative)
        once = {} if own == 0 else {"sinks": None}
        out, lse = attention(q, k, v, bias=bias, return_lse=True, **once)
        outs.append(out.astype(jnp.float32))
        sums.append(lse)
    lse = jnp.stack(sums)
    top = jax.lax.stop_gradient(lse.max(0))
    weights = jnp.exp(lse - jnp.where(jnp.isneginf(top), 0.0, top)[None])
    total = weights.sum(0)  # Zero where a query sees nothing.
    weights = weights / jnp.where(total == 0, 1.0, total)[None]
    return (jnp.stack(outs) * weights[..., None]).sum(0).astype(views[0][0].dtype)


def turn(
    x: jax.Array,
    coordinates: jax.Array,
    frequencies: np.ndarray,
    factor: float,
    *,
    interleaved: bool = False,
    ahead: float = 0.0,
    ahead_frequencies: np.ndarray | None = None,
) -> jax.Array:
    """Returns x turned by `coordinates * frequencies + ahead * ahead_frequencies`.

    Args:
      x: queries or keys [B, T, N, H].
      coordinates: int32 or float32 [B, T].
      frequencies: radians per position, float64 [P].
      factor: what x is multiplied by where it turns.
      interleaved: whether a pair is (2p, 2p + 1).
      ahead: how far all of them are ahead; any number, exact at any size.
      ahead_frequencies: of that distance. Default: `frequencies`.
    """
    cos, sin = cos_sin(coordinates, frequencies)
    if ahead != 0.0:
        angle = ahead * (frequencies if ahead_frequencies is None else ahead_frequencies)
        c, s = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        c, s = c[None, None], s[None, None]
        cos, sin = cos * c - sin * s, sin * c + cos * s
    if factor != 1.0:
        cos, sin = factor * cos, factor * sin
    return rotate(x, cos, sin, interleaved=interleaved)
