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
from typing import Any

import jax.numpy as jnp

from posenc_jax.checks import require
from posenc_jax.mask import window_sides
from posenc_jax.rotary.multi_view import merge_views
from posenc_jax.scheme import LogitBias, Scheme, argument_of, as_tuple, side_arrays


@dataclasses.dataclass(frozen=True)
class _FirstOnly:
    """A rule that hides all but first tokens beyond the window."""

    first: int
    left: int

    def __call__(self, shared, head, q, k):
        seen = (k < self.first) & (q - k > self.left)
        return jnp.where(seen, 0.0, -1e30).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class _Streaming(Scheme):
    """A scheme whose first tokens stay visible; see `streaming`."""

    scheme: Scheme
    first: int

    @property
    def acts_on(self) -> tuple[str, ...]:
        return ("attention",)

    @property
    def shared_over_layers(self) -> bool:
        return self.scheme.shared_over_layers

    @property
    def reads_segments(self) -> bool:
        return self.scheme.reads_segments

    @property
    def reads_x(self) -> bool:
        return self.scheme.reads_x

    @property
    def caches_mapped_keys(self) -> bool:
        return self.scheme.caches_mapped_keys

    @property
    def kept_tokens(self) -> int:
        return self.first

    def init(self, key):
        return self.scheme.init(key)

    def side(self, params, x, q, k, coordinates, state, segment_ids=None):
        return side_arrays(self.scheme, params, x, q, k, coordinates, state, segment_ids)

    def key(self, params, k, coordinates, cols=None):
        return self.scheme.key(params, k, coordinates, cols)

    def attend(self, params, q, k, v, at, rows, cols, attention):
        """Returns the output [B, T, N, V] of the window and the first tokens."""
        window = argument_of(attention, "window")
        left, _ = window_sides(window) or (-1, -1)
        require(
            left >= 0 and argument_of(attention, "is_causal"),
            f"streaming: it needs is_causal=True and a window, got window {window}.",
        )
        if argument_of(attention, "softcap") is not None:
            raise NotImplementedError(
                "streaming: softcap bounds what hides other keys; leave it out."
            )
        require(not argument_of(attention, "return_lse"), "streaming: return_lse is used inside.")
        q_at, k_at = at
        far_at = jnp.minimum(q_at, self.first + left)
        zeros = jnp.zeros((q.shape[2],), jnp.float32)
        first = LogitBias(_FirstOnly(self.first, left), heads=zeros)
        far: dict[str, Any] = {"window": None, "contiguous": False, "sinks": None}
        far |= {"q_coordinates": far_at, "k_coordinates": k_at}

        def part(q_at, also, **options):
            def with_sum(*arrays, bias=None, **rules):
                bias = (*as_tuple(bias), *also)
                return attention(*arrays, bias=bias, return_lse=True, **rules, **options)

            turned = self.scheme.query(params, q, q_at, rows)
            return self.scheme.attend(params, turned, k, v, (q_at, k_at), rows, cols, with_sum)

        parts = [part(q_at, ()), part(far_at, (first,), **far)]
        outs, sums = zip(*parts, strict=True)
        return merge_views([x.astype(jnp.float32) for x in outs], sums).astype(q.dtype)

    def logit_scale(self, head_dim):
        return self.scheme.logit_scale(head_dim)


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
        bool(scheme.acts_on) and "attention" not in scheme.acts_on,
        f"streaming: {scheme!r} must read positions and not replace attention.",
    )
    require(
        scheme.relative and "embedding" not in scheme.acts_on,
        f"streaming: {scheme!r} must depend on the distance of tokens alone.",
    )
    require(first >= 1, f"streaming: first must be at least 1 token, got {first}.")
    return _Streaming(scheme, first)
