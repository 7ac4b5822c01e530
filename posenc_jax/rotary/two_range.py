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
from posenc_jax.engine.api import AttentionCall
from posenc_jax.rotary.frequencies import rope_frequencies
from posenc_jax.rotary.layouts import rotary_dims
from posenc_jax.rotary.rope import RoPE
from posenc_jax.rotary.rotate import apply_rotation
from posenc_jax.rules import LogitBias
from posenc_jax.scheme import Scheme


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
    attention: AttentionCall,
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
    if attention.softcap is not None:
        raise NotImplementedError(
            f"{name}: softcap bounds what hides the keys of other views; leave it out."
        )
    require(not attention.return_lse, f"{name}: return_lse is used inside.")
    heads = jnp.zeros((views[0][0].shape[2],), jnp.float32)
    outs, sums = [], []
    for own, (q, k) in enumerate(views):
        bias = LogitBias(OtherViews(view_of, own), heads=heads, relative=relative)
        sinks = attention.sinks if own == 0 else None
        out, lse = attention.replace(sinks=sinks, return_lse=True)(q, k, v, bias)
        outs.append(out.astype(jnp.float32))
        sums.append(lse)
    return merge_views(outs, sums).astype(views[0][0].dtype)


def merge_views(outs: Sequence[jax.Array], sums: Sequence[jax.Array]) -> jax.Array:
    """Returns one softmax attention from those over parts of its keys.

    Args:
      outs: float32 [B, T, N, V] of every part.
      sums: the log-sum-exp of its logits, [B, T, N].
    """
    lse = jnp.stack(sums)
    top = jax.lax.stop_gradient(lse.max(0))
    weights = jnp.exp(lse - jnp.where(jnp.isneginf(top), 0.0, top)[None])
    total = weights.sum(0)  # Zero where a query sees nothing.
    weights = weights / jnp.where(total == 0, 1.0, total)[None]
    return (jnp.stack(outs) * weights[..., None]).sum(0)


def rope_of(scheme: Scheme) -> RoPE:
    """Returns RoPE with those of its settings that `scheme` has.

    Raises:
      ValueError: as `RoPE`.
    """
    names = [f.name for f in dataclasses.fields(RoPE) if hasattr(scheme, f.name)]
    return RoPE(**{name: getattr(scheme, name) for name in names})


def turn(
    scheme: Scheme, x: jax.Array, coordinates: jax.Array, *, slow: float = 1.0, ahead: float = 0.0
) -> jax.Array:
    """Returns x turned to the positions `slow * coordinates + ahead`, exact at any of them.

    Args:
      scheme: one with the settings of RoPE.
      x: queries or keys [B, T, N, H].
      coordinates: int32 or float32 [B, T].
      slow: how much one coordinate counts.
      ahead: how far all of x are ahead.

    Raises:
      ValueError: for another head dim than the scheme's.
    """
    rope = rope_of(scheme)
    require(
        x.shape[-1] == rope.head_dim,
        f"{scheme.name}: the scheme is for head_dim {rope.head_dim}, got q or k of shape "
        f"{x.shape}.",
    )
    dim = rotary_dims(scheme.name, rope.head_dim, rope.rotary_dim, rope.rotary_start)
    frequencies, factor = rope_frequencies(dim, rope.theta, rope.scaling)
    cos, sin = cos_sin(coordinates, slow * frequencies)
    if ahead != 0.0:
        angle = ahead * frequencies
        c, s = (f(angle).astype(np.float32)[None, None] for f in (np.cos, np.sin))
        cos, sin = cos * c - sin * s, sin * c + cos * s
    if factor != 1.0:
        cos, sin = factor * cos, factor * sin
    return apply_rotation(x, cos, sin, layout=rope.layout, start=rope.rotary_start)
