"""Schemes made of schemes: several at once."""

import dataclasses

import jax

from posenc_jax.checks import require
from posenc_jax.scheme import (
    Scheme,
    as_tuple,
    side_arrays,
)


@dataclasses.dataclass(frozen=True)
class _Chain(Scheme):
    """Several schemes at once; see `chain`. Its parameters are a tuple, one entry each."""

    schemes: tuple[Scheme, ...]

    def __post_init__(self):
        require(len(self.schemes) > 0, "chain: needs at least one scheme, got none.")
        values = [s for s in self.schemes if "output" in s.acts_on]
        require(
            len(values) < 2,
            f"chain: only one scheme may add to the values, got {values}.",
        )
        axes = {s.num_axes for s in self.schemes if s.acts_on}
        require(
            len(axes) < 2,
            f"chain: all must read coordinates of as many axes, got {self.schemes}.",
        )
        own = [s for s in self.schemes if "attention" in s.acts_on]
        others = [s for s in self.schemes if not {*s.acts_on} <= {"embedding", "q, k"}]
        require(
            not own or len(others) == 1,
            f"chain: {own} replace attention; beside one of them others may act on the embedding, "
            f"q and k alone, got {others}.",
        )

    @property
    def acts_on(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(place for s in self.schemes for place in s.acts_on))

    @property
    def num_axes(self) -> int:
        return max(s.num_axes for s in self.schemes)

    @property
    def relative(self) -> bool:
        return all(s.relative for s in self.schemes)

    @property
    def by_order(self) -> bool:
        return all(s.by_order for s in self.schemes)

    @property
    def shared_over_layers(self) -> bool:
        return all(s.shared_over_layers for s in self.schemes)

    @property
    def scale_embedding(self) -> bool:
        return any(s.scale_embedding for s in self.schemes)

    @property
    def reads_segments(self) -> bool:
        return any(s.reads_segments for s in self.schemes)

    @property
    def reads_x(self) -> bool:
        return any(s.reads_x for s in self.schemes)

    @property
    def caches_mapped_keys(self) -> bool:
        return all(s.caches_mapped_keys for s in self.schemes)

    @property
    def kept_tokens(self) -> int:
        return max(s.kept_tokens for s in self.schemes)

    def init(self, key):
        keys = jax.random.split(key, len(self.schemes))
        return tuple(s.init(k) for s, k in zip(self.schemes, keys, strict=True))

    def embed(self, params, x, coordinates):
        for s, p in zip(self.schemes, params, strict=True):
            x = s.embed(p, x, coordinates)
        return x

    def side(self, params, x, q, k, coordinates, state, segment_ids=None):
        states = (None,) * len(self.schemes) if state is None else state
        made = [
            side_arrays(s, p, x, q, k, coordinates, old, segment_ids)
            for s, p, old in zip(self.schemes, params, states, strict=True)
        ]
        return tuple(zip(*made, strict=True))

    def query(self, params, q, coordinates, rows=None):
        rows = (None,) * len(self.schemes) if rows is None else rows
        for s, p, r in zip(self.schemes, params, rows, strict=True):
            q = s.query(p, q, coordinates, r)
        return q

    def key(self, params, k, coordinates, cols=None):
        cols = (None,) * len(self.schemes) if cols is None else cols
        for s, p, c in zip(self.schemes, params, cols, strict=True):
            k = s.key(p, k, coordinates, c)
        return k

    def bias(self, params):
        return sum((as_tuple(s.bias(p)) for s, p in zip(self.schemes, params, strict=True)), ())

    def content(self, params, rows, cols):
        parts = zip(self.schemes, params, rows, cols, strict=True)
        return sum((as_tuple(s.content(p, r, c)) for s, p, r, c in parts), ())

    def row_rule(self, params, rows):
        parts = zip(self.schemes, params, rows, strict=True)
        made = [(s, s.row_rule(p, r)) for s, p, r in parts]
        found = [(s, r) for s, r in made if r is not None]
        require(
            len(found) < 2,
            "chain: only one scheme may have a rule on whole rows of logits, got "
            f"{[s for s, _ in found]}.",
        )
        return found[0][1] if found else None

    def value(self, params):
        made = [s.value(p) for s, p in zip(self.schemes, params, strict=True)]
        return next((v for v in made if v is not None), None)

    def attend(self, params, q, k, v, at, rows, cols, attention):
        """Returns the output of the scheme that replaces attention, or of one with all rules."""
        for s, p, r, c in zip(self.schemes, params, rows, cols, strict=True):
            if "attention" in s.acts_on:
                return s.attend(p, q, k, v, at, r, c, attention)
        return super().attend(params, q, k, v, at, rows, cols, attention)

    def logit_scale(self, head_dim):
        scales = {s.logit_scale(head_dim) for s in self.schemes}
        require(
            len(scales) == 1,
            f"chain: the schemes were published with different logit scales {scales}; "
            "chain schemes that agree, or give attention a scale of your own.",
        )
        return scales.pop()


def chain(*schemes: Scheme) -> Scheme:
    """Returns a scheme that does what all of `schemes` do, in their order.

    Raises:
      ValueError: if there are none, more than one of them adds to the values, or one of
        them replaces attention while another acts elsewhere than on the embedding, q and
        k. Using it raises one if more than one has a rule on whole
        rows of logits.

    >>> import posenc_jax as pe
    >>> both = pe.chain(pe.RoPE(head_dim=64), pe.ALiBi(num_heads=8))
    >>> len(both.bias(both.init(jax.random.key(0))))
    1
    """
    return _Chain(schemes)
