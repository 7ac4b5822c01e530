"""The base of schemes that wrap another and change its coordinates or hooks."""

import dataclasses
from collections.abc import Callable

import jax

from posenc_jax.checks import require
from posenc_jax.engine.mask import by_coordinates
from posenc_jax.engine.rule import Rule, as_tuple
from posenc_jax.schemes.scheme import Acts, Scheme


@dataclasses.dataclass(frozen=True)
class Wrapper(Scheme):
    """Delegates every hook to `scheme`.

    A subclass overrides the hooks that it changes, or returns from `transform` a function of
    one token's coordinates (a scalar or [A]) that all hooks and rules read instead.
    """

    scheme: Scheme

    @property
    def transform(self) -> Callable[[jax.Array], jax.Array] | None:
        """The function of coordinates, hashable; None: coordinates are not transformed."""
        return None

    def transformed(self, coordinates: jax.Array) -> jax.Array:
        """Returns the coordinates [B, T] or [A, B, T] that the scheme reads."""
        return coordinates if self.transform is None else self.transform(coordinates)

    @property
    def traits(self):
        return self.scheme.traits

    @property
    def acts(self):
        return self.scheme.acts

    @property
    def param_axes(self):
        return self.scheme.param_axes

    def init(self, key):
        return self.scheme.init(key)

    def embed(self, params, x, coordinates):
        return self.scheme.embed(params, x, self.transformed(coordinates))

    def tables(self, params, coordinates):
        return self.scheme.tables(params, self.transformed(coordinates))

    def mix(self, params, q, k, v, segment_ids, state):
        return self.scheme.mix(params, q, k, v, segment_ids, state)

    def features(self, params, x, q, k, coordinates, segment_ids, state):
        coordinates = self.transformed(coordinates)
        return self.scheme.features(params, x, q, k, coordinates, segment_ids, state)

    def query(self, params, q, coordinates, features=None, tables=None):
        return self.scheme.query(params, q, self.transformed(coordinates), features, tables)

    def key(self, params, k, coordinates, features=None, tables=None):
        return self.scheme.key(params, k, self.transformed(coordinates), features, tables)

    def value(self, params, v, coordinates, features=None, tables=None):
        return self.scheme.value(params, v, self.transformed(coordinates), features, tables)

    def output(self, params, out, coordinates, features=None, tables=None):
        return self.scheme.output(params, out, self.transformed(coordinates), features, tables)

    def rules(self, params, q_features=None, k_features=None) -> tuple[Rule, ...]:
        rules = as_tuple(self.scheme.rules(params, q_features, k_features))
        if self.transform is None:
            return rules
        return tuple(rule.on(self.transform) for rule in rules)

    def attend(
        self, params, q, k, v, q_coordinates, k_coordinates, q_features, k_features, attention
    ):
        if Acts.ATTENTION not in self.scheme.acts:
            return attention(q, k, v, self.rules(params, q_features, k_features))
        if by_coordinates(attention.window):
            raise NotImplementedError(
                f"{type(self).__name__}: a window by coordinates, of which it makes others."
            )
        both = self.transformed(q_coordinates), self.transformed(k_coordinates)
        attention = attention.replace(q_coordinates=both[0], k_coordinates=both[1])
        if self.transform is not None:  # It was for coordinates before the transform.
            attention = attention.replace(contiguous=False)
        return self.scheme.attend(params, q, k, v, *both, q_features, k_features, attention)


def refuse_streaming(caller: str, scheme: Scheme) -> None:
    """Raises for `streaming`, whose coordinates must be positions."""
    require(
        not scheme.traits.num_sink_tokens,
        f"{caller}: streaming compares coordinates with its window, so that they must be "
        "positions; a frequency map such as PI scales those of the scheme in it.",
    )
