"""A chain of schemes, applied in order."""

import dataclasses

import jax

from posenc_jax.checks import require
from posenc_jax.engine.rule import Rule, as_tuple
from posenc_jax.schemes.combinators.wrapper import Wrapper
from posenc_jax.schemes.scheme import Acts, Scheme, Traits


@dataclasses.dataclass(frozen=True)
class Chain(Scheme):
    """See `chain`. Parameters, features, tables and states are tuples, one entry per scheme."""

    schemes: tuple[Scheme, ...]

    def __post_init__(self):
        require(len(self.schemes) > 0, "chain: needs at least one scheme, got none.")
        for scheme in self.schemes:
            if not isinstance(scheme, Scheme):
                raise TypeError(
                    f"chain: takes schemes one by one, chain(RoPE(...), T5(...)), got {scheme!r}."
                )
        values = [s for s in self.schemes if Acts.VALUES in s.acts]
        require(
            len(values) < 2,
            f"chain: only one scheme may add to the values, got {values}.",
        )
        turning = [s for s in self.schemes if Acts.OUTPUT in s.acts]
        require(
            not (values and turning),
            f"chain: {turning} would also change at the output what {values} add to the values.",
        )
        rows = [s for s in self.schemes if s.traits.transforms_rows]
        require(len(rows) < 2, f"chain: only one scheme may transform rows of logits, got {rows}.")
        axes = {s.traits.num_axes for s in self.schemes if s.acts}
        require(
            len(axes) < 2,
            f"chain: all schemes must read the same number of axes, got {self.schemes}.",
        )
        replacing = [s for s in self.schemes if Acts.ATTENTION in s.acts]
        around = Acts.EMBEDDING | Acts.QK | Acts.V | Acts.OUTPUT
        others = [s for s in self.schemes if s.acts & ~around]
        require(
            not replacing or len(others) == 1,
            f"chain: {replacing} replace attention; one of them combines with schemes that act on "
            f"the embedding, q, k, v and the output only, got {others}.",
        )
        after = self.schemes[self.schemes.index(replacing[0]) + 1 :] if replacing else ()
        turned = [s for s in after if Acts.QK in s.acts]
        require(
            not turned,
            f"chain: {replacing} may change q within attention, after all others; put {turned} "
            "before it.",
        )

    def _each(self, params, *values):
        """Yields (scheme, params, *entries); a value of None is None for all schemes.

        Schemes without parameters may be given {} in place of a tuple.
        """
        params = params if jax.tree.leaves(params) else ({},) * len(self.schemes)
        values = ((None,) * len(self.schemes) if v is None else v for v in values)
        return zip(self.schemes, params, *values, strict=True)

    @property
    def traits(self):
        return Traits.join(*(s.traits for s in self.schemes))

    @property
    def acts(self):
        acts = Acts(0)
        for s in self.schemes:
            acts |= s.acts
        return acts

    @property
    def param_axes(self):
        return tuple(s.param_axes for s in self.schemes)

    def init(self, key):
        keys = jax.random.split(key, len(self.schemes))
        return tuple(s.init(k) for s, k in zip(self.schemes, keys, strict=True))

    def embed(self, params, x, coordinates):
        for s, p in self._each(params):
            x = s.embed(p, x, coordinates)
        return x

    def tables(self, params, coordinates):
        return tuple(s.tables(p, coordinates) for s, p in self._each(params))

    def mix(self, params, q, k, v, segment_ids, state):
        states = []
        for s, p, old in self._each(params, state):
            q, k, v, new = s.mix(p, q, k, v, segment_ids, old)
            states.append(new)
        return q, k, v, tuple(states)

    def features(self, params, x, q, k, coordinates, segment_ids, state):
        features = [
            s.features(p, x, q, k, coordinates, segment_ids, old)
            for s, p, old in self._each(params, state)
        ]
        return tuple(zip(*features, strict=True))

    def query(self, params, q, coordinates, features=None, tables=None):
        for s, p, f, t in self._each(params, features, tables):
            q = s.query(p, q, coordinates, f, t)
        return q

    def key(self, params, k, coordinates, features=None, tables=None):
        for s, p, f, t in self._each(params, features, tables):
            k = s.key(p, k, coordinates, f, t)
        return k

    def value(self, params, v, coordinates, features=None, tables=None):
        for s, p, f, t in self._each(params, features, tables):
            v = s.value(p, v, coordinates, f, t)
        return v

    def output(self, params, out, coordinates, features=None, tables=None):
        """Applies the schemes in reverse order, to undo `value`."""
        for s, p, f, t in reversed(list(self._each(params, features, tables))):
            out = s.output(p, out, coordinates, f, t)
        return out

    def rules(self, params, q_features=None, k_features=None) -> tuple[Rule, ...]:
        rules: list[Rule] = []
        for s, p, q, k in self._each(params, q_features, k_features):
            of_scheme = as_tuple(s.rules(p, q, k))
            if any(rule.adds_values for rule in of_scheme) and Acts.VALUES not in s.acts:
                raise TypeError(
                    f"chain: {type(s).__name__} has a rule that adds to the values, and must say "
                    "so: acts = pe.Acts.LOGITS | pe.Acts.VALUES."
                )
            rules += of_scheme
        return tuple(rules)

    def attend(
        self, params, q, k, v, q_coordinates, k_coordinates, q_features, k_features, attention
    ):
        """Calls the scheme that replaces attention, or attention with all rules."""
        coordinates = q_coordinates, k_coordinates
        for s, p, f, g in self._each(params, q_features, k_features):
            if Acts.ATTENTION in s.acts:
                return s.attend(p, q, k, v, *coordinates, f, g, attention)
        return attention(q, k, v, self.rules(params, q_features, k_features))


def chain(*schemes: Scheme) -> Scheme:
    """Returns a scheme that applies all of `schemes`, in this order.

    Raises:
      ValueError: if there are none, more than one adds to the values or transforms rows of
        logits, one adds to the values while another changes the output, or one replaces
        attention while another acts on logits, values or attention, or on q and k after it.
      TypeError: for an argument that is not a scheme.

    >>> import posenc_jax as pe
    >>> both = pe.chain(pe.RoPE(head_dim=64), pe.ALiBi(num_heads=8))
    >>> len(both.rules(both.init(jax.random.key(0))))
    1
    """
    return Chain(schemes)


def reads_order(scheme: Scheme | None) -> bool:
    """Returns whether a scheme reads the keys between two tokens, in the order of positions."""
    return any(
        x.traits.order_only and (x.traits.transforms_rows or Acts.ATTENTION in x.acts)
        for x in (() if scheme is None else parts(scheme))
    )


def parts(scheme: Scheme) -> tuple[Scheme, ...]:
    """Returns a scheme and all schemes within its chains and wrappers."""
    inner: tuple[Scheme, ...] = ()
    if isinstance(scheme, Chain):
        inner = scheme.schemes
    elif isinstance(scheme, Wrapper):
        inner = (scheme.scheme,)
    return (scheme, *(part for x in inner for part in parts(x)))
