r"""StreamingLLM: the first tokens of a sequence stay visible outside the window.

A model that was trained without a sliding window fails with one once its first tokens leave the
cache: heads use them as attention sinks. StreamingLLM keeps them, and counts positions within the
cache. For a query at i, a window of w tokens before it and s first tokens:

    key at j >= i - w        is i - j tokens before the query, as without streaming
    key at j < s, older      is min(i, s + w) - j tokens before it
    other keys               are hidden

The authors renumber the cache at each step. For schemes that depend on the distance alone
the rule above is equivalent, and keys are cached as the scheme transforms them: a second query,
rotated by another angle, attends to the first tokens outside the window, and the two parts are
merged by their log-sum-exp. A ring cache keeps the first s slots, so s + w + 1 slots suffice to
decode without end, one token at a time.

Paper: Xiao et al. Efficient Streaming Language Models with Attention Sinks. 2023.
https://arxiv.org/abs/2309.17453
Reference code: mit-han-lab/streaming-llm, streaming_llm/kv_cache.py, pos_shift/modify_llama.py,
examples/eval_long_ppl.py.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from posenc_jax.checks import positive_integers, require
from posenc_jax.engine.mask import add_saturated, window_sides
from posenc_jax.ops.lse import merge_partial_softmax
from posenc_jax.schemes.combinators.chain import reads_order
from posenc_jax.schemes.combinators.wrapper import Wrapper
from posenc_jax.schemes.scheme import Acts, Scheme, check_scheme


@dataclasses.dataclass(frozen=True)
class _Streaming(Wrapper):
    """See `streaming`."""

    first: int
    acts: ClassVar = Acts.ATTENTION

    @property
    def traits(self):
        # Coordinates of queries are clipped, so that they must begin at 0 with each sequence.
        changes = {"num_sink_tokens": self.first, "reads_segments": True, "relative": False}
        return dataclasses.replace(self.scheme.traits, **changes)

    def query(self, params, q, coordinates, features=None, tables=None):
        return q  # Transformed in `attend`, at two coordinates.

    def attend(
        self, params, q, k, v, q_coordinates, k_coordinates, q_features, k_features, attention
    ):
        """Attends to the window and to older first tokens, and merges the two."""
        past, _ = window_sides(attention.window) or (-1, -1)
        require(
            past >= 0 and attention.is_causal,
            f"streaming: needs is_causal=True and a window, got window {attention.window}.",
        )
        require(not attention.return_lse, "streaming: return_lse is used internally.")
        if attention.prefix_length is not None:
            raise NotImplementedError("streaming: prefix_length; it would show keys twice.")
        attention.refuse_branches("streaming")

        q_positions, k_positions = attention.positions(q, k)
        segments = attention.k_segment_ids
        segments = jnp.zeros_like(k_positions) if segments is None else segments
        clipped = jnp.minimum(q_coordinates, min(self.first + past, 2**31 - 1))
        near = attention.replace(return_lse=True)
        older = near.replace(
            window=None,
            contiguous=False,
            sinks=None,
            # Causal from past + 1 tokens back, so that no key is in both parts.
            q_positions=add_saturated(q_positions, -(past + 1)),
            k_positions=k_positions,
            q_coordinates=clipped,
            k_coordinates=k_coordinates,
            q_segment_ids=jnp.zeros_like(q_positions)
            if attention.q_segment_ids is None
            else attention.q_segment_ids,
            k_segment_ids=jnp.where(k_positions < self.first, segments, -1),
        )

        def part(coordinates, attention):
            transformed = self.scheme.query(params, q, coordinates, q_features)
            arrays = transformed, k, v, coordinates, k_coordinates, q_features, k_features
            return self.scheme.attend(params, *arrays, attention)

        outs, lses = zip(part(q_coordinates, near), part(clipped, older), strict=True)
        return merge_partial_softmax([x.astype(jnp.float32) for x in outs], lses).astype(q.dtype)


def streaming(scheme: Scheme, first: int = 4) -> Scheme:
    """Returns `scheme` for decoding without end: first tokens stay visible outside the window.

    Attention must have the window, `window=(w, 0)` with `is_causal=True`. Coordinates, where calls
    give them, must begin at 0 with each sequence, as positions do.

    Args:
      scheme: a scheme that depends on the distance alone: RoPE, ALiBi.
      first: s; the tokens of a sequence at positions below s stay.

    Raises:
      TypeError: if `scheme` is not a `Scheme`.
      ValueError: for a scheme that does not depend on the distance alone, scales q and k, replaces
        attention or changes its output, and `first` below one.

    >>> import posenc_jax as pe
    >>> q = k = v = jnp.ones((1, 9, 2, 8))
    >>> scheme = streaming(pe.RoPE(head_dim=8), first=2)
    >>> out, _ = pe.scheme_attention(scheme, {}, q, k, v, is_causal=True, window=(3, 0))
    >>> out.shape
    (1, 9, 2, 8)
    """
    check_scheme("streaming", scheme)
    require(
        bool(scheme.acts) and Acts.ATTENTION not in scheme.acts,
        f"streaming: {scheme!r} must read positions and not replace attention.",
    )
    require(
        Acts.OUTPUT not in scheme.acts,
        f"streaming: {scheme!r} changes the output by the query's position, and first tokens are "
        "attended to from another.",
    )
    traits = scheme.traits
    require(
        traits.relative and not traits.order_only and Acts.EMBEDDING not in scheme.acts,
        f"streaming: {scheme!r} must depend on the distance of tokens alone.",
    )
    require(
        traits.norm_after,
        f"streaming: {scheme!r} scales q and k by powers of their distance to an origin, which is "
        "too far from first tokens.",
    )
    require(
        not reads_order(scheme),
        f"streaming: {scheme!r} reads all keys between two tokens, and those between first tokens "
        "and the window are missing.",
    )
    positive_integers("streaming", first=first)
    return _Streaming(scheme, first)
