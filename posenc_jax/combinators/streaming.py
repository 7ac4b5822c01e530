r"""StreamingLLM: the first tokens stay visible, next to the window.

A model with a window, trained without one, breaks down when its first tokens leave the cache: heads
park their attention there. So the first tokens stay, and positions are counted in the cache. For a
query at i, w tokens back in its window and s first ones:

    key at j >= i - w        stands i - j before the query, as always
    key at j < s, further    stands min(i, s + w) - j before the query
    others                   are gone

For schemes that depend on the distance alone this is the authors' rule, who number what is in the
cache anew at each step: so keys can be cached as they are seen. The first tokens meet a query of
their own, and the two parts are merged by their log-sum-exp. A cache that is a ring keeps the first
s slots: s + w + 1 are enough to decode without end, one token at a time.

Paper: Xiao et al. Efficient Streaming Language Models with Attention Sinks. 2023.
https://arxiv.org/abs/2309.17453
Reference code: mit-han-lab/streaming-llm, streaming_llm/kv_cache.py, pos_shift/modify_llama.py,
examples/eval_long_ppl.py.
"""

import dataclasses

import jax.numpy as jnp

from posenc_jax.checks import require
from posenc_jax.combinators.wrapper import Wrapper
from posenc_jax.mask import MASK_VALUE, window_sides
from posenc_jax.ops.lse import merge_partial_softmax
from posenc_jax.rules import LogitBias
from posenc_jax.scheme import Acts, Scheme


@dataclasses.dataclass(frozen=True)
class _FirstOnly:
    """A rule that hides all but first tokens beyond the window."""

    first: int
    left: int

    def __call__(self, shared, head, q, k):
        seen = (k < self.first) & (q - k > self.left)
        return jnp.where(seen, 0.0, MASK_VALUE).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class _Streaming(Wrapper):
    """See `streaming`."""

    first: int

    @property
    def traits(self):
        return dataclasses.replace(self.scheme.traits, num_sink_tokens=self.first)

    @property
    def acts(self):
        return Acts.ATTENTION

    def query(self, params, q, coordinates, features=None, tables=None):
        return q  # Rotated in `attend`, at two positions.

    def attend(
        self, params, q, k, v, q_coordinates, k_coordinates, q_features, k_features, attention
    ):
        """Attends to the window and to the first tokens, and merges the two."""
        left, _ = window_sides(attention.window) or (-1, -1)
        require(
            left >= 0 and attention.is_causal,
            f"streaming: needs is_causal=True and a window, got window {attention.window}.",
        )
        if attention.softcap is not None:
            raise NotImplementedError(
                "streaming: softcap bounds the mask values of other keys; leave it out."
            )
        require(not attention.return_lse, "streaming: return_lse is used internally.")
        attention = attention.replace(return_lse=True)

        def part(q_at, attention):
            rotated = self.scheme.query(params, q, q_at, q_features)
            return self.scheme.attend(
                params, rotated, k, v, q_at, k_coordinates, q_features, k_features, attention
            )

        far_at = jnp.minimum(q_coordinates, self.first + left)
        first = LogitBias(_FirstOnly(self.first, left), heads=jnp.zeros((q.shape[2],), jnp.float32))
        far = attention.replace(
            window=None,
            contiguous=False,
            sinks=None,
            q_coordinates=far_at,
            k_coordinates=k_coordinates,
            extra_rules=(*attention.extra_rules, first),
        )
        parts = part(q_coordinates, attention), part(far_at, far)
        outs, lses = zip(*parts, strict=True)
        return merge_partial_softmax([x.astype(jnp.float32) for x in outs], lses).astype(q.dtype)


def streaming(scheme: Scheme, first: int = 4) -> Scheme:
    """Returns `scheme` for decoding without end: the first tokens stay beside the window.

    The window is that of attention, `window=(w, 0)` with `is_causal=True`.

    Args:
      scheme: one that depends on the distance of tokens alone: RoPE, ALiBi.
      first: s, the number of first tokens of each sequence that stay.

    Raises:
      ValueError: for a scheme that reads positions themselves or replaces attention, or `first`
        below one.

    >>> import posenc_jax as pe
    >>> q = k = v = jnp.ones((1, 9, 2, 8))
    >>> scheme = streaming(pe.RoPE(head_dim=8), first=2)
    >>> out, _ = pe.scheme_attention(scheme, {}, q, k, v, is_causal=True, window=(3, 0))
    >>> out.shape
    (1, 9, 2, 8)
    """
    require(
        bool(scheme.acts) and Acts.ATTENTION not in scheme.acts,
        f"streaming: {scheme!r} must read positions and not replace attention.",
    )
    require(
        scheme.traits.relative and Acts.EMBEDDING not in scheme.acts,
        f"streaming: {scheme!r} must depend on the distance of tokens alone.",
    )
    require(first >= 1, f"streaming: first must be at least 1 token, got {first}.")
    return _Streaming(scheme, first)
