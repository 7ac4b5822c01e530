"""Measures the effect of a scheme on attention through its interface.

All tokens have the same q, k and x, so without positions all logits of a query are equal. Values
are unit vectors, one per key, so the output is the attention weights. The effect of positions on a
logit is the logarithm of its weight, minus the logarithm at the query's own key.

Schemes that scale, mix or select by content do nothing to equal tokens. For them, every sixteenth
key has a logit of 4 without positions, and the others -4; the effect is the difference to these.
"""

import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import posenc_jax as pe
from experiments.models.schemes import with_sizes
from posenc_jax import positions

LENGTH = 128
"""T of the pictures."""
EVERY, MATCH = 16, 4.0
"""Distance between tokens that match the queries, and their logit; that of others is -MATCH."""
GRID = 11
"""Side of the image for schemes with two axes or more."""
SIZES = {
    "num_heads": 8,
    "num_kv_heads": 8,
    "head_dim": 64,
    "model_dim": 512,
    "max_length": 640,
    "trained_length": 640,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "dual_chunk": {"chunk": 40, "local": 16},
    "rerope": {"window": 32},
    "repo": {"init_std": 0.15},
    "rope_by_length": {"scaling": pe.DynamicNTK(1.0, 16, None)},
    "self_extend": {"window": 32, "group": 8},
    "temperature": {"length": LENGTH},
    "xpos": {"scale_base": 64.0},
}
"""Settings with which a scheme differs from others within `LENGTH` tokens."""
DRAWS = 4


@dataclasses.dataclass(frozen=True)
class Probe:
    """The numbers in the pictures of one scheme; None for a picture that it does not have.

    Attributes:
      family: its folder.
      encoding: [T, D], the vector added to the embedding at each position.
      picture: [T, T], the effect on logits, mean over heads; NaN for masked keys.
      marked: whether the picture is of tokens that differ.
      image: [rows, columns], the effect on the logits of the query in the middle of an image.
      heads: [N, T], the effect on logits at distances 0 .. T - 1, by head.
      wavelengths: tokens per turn of every pair, without and with a frequency map.
    """

    name: str
    family: str
    encoding: np.ndarray | None = None
    picture: np.ndarray | None = None
    marked: bool = False
    image: np.ndarray | None = None
    heads: np.ndarray | None = None
    wavelengths: tuple[np.ndarray, np.ndarray] | None = None


def probe(name: str) -> Probe:
    cls = pe.SCHEMES[name]
    scheme = with_sizes(cls, SIZES | SETTINGS.get(name, {}))
    params = scheme.init(jax.random.key(0))
    about = Probe(name, cls.__module__.split(".")[-2])
    if scheme.acts == pe.Acts.EMBEDDING:
        encoding, alike = _embedding(scheme, params)
        return dataclasses.replace(about, encoding=encoding, heads=alike)
    short = log_weights(scheme, LENGTH, params)
    beyond_edge = short[:, EVERY:, EVERY:]
    if cls is not pe.NoPE and np.nanmax(np.abs(beyond_edge - np.nanmean(beyond_edge))) < 1e-4:
        return dataclasses.replace(about, picture=_marked(scheme, params), marked=True)
    return dataclasses.replace(
        about,
        image=_image(scheme, params) if scheme.traits.num_axes > 1 else None,
        picture=short.mean(0),
        heads=short[:, -1, ::-1],
    )


def probe_map(cls: type[pe.FrequencyMap]) -> Probe:
    """Returns the numbers of a frequency map of RoPE: 4096 tokens extended by a factor of 8."""
    pairs = SIZES["head_dim"] // 2
    ramp = tuple(float(x) for x in np.linspace(1.0, 8.0, pairs))
    settings = {
        "factor": 8.0,
        "original_max_position": 4096,
        "length": 8 * 4096,
        "short_factor": (1.0,) * pairs,
        "long_factor": ramp,
        "long": True,
    }
    fields = {f.name for f in dataclasses.fields(cls)}
    mapped = cls(**{n: x for n, x in settings.items() if n in fields})
    plain, _ = pe.rope_frequencies(SIZES["head_dim"])
    scaled, _ = pe.rope_frequencies(SIZES["head_dim"], scaling=mapped)
    family = cls.__module__.split(".")[-2]
    return Probe(cls.__name__, family, wavelengths=(_turns(plain), _turns(scaled)))


def _turns(frequencies) -> np.ndarray:
    """Returns tokens per turn, infinite for a pair of frequency zero."""
    with np.errstate(divide="ignore"):
        return 2 * np.pi / np.asarray(frequencies, np.float64)


def frequency_maps() -> list[type[pe.FrequencyMap]]:
    """Returns the exported maps except the identity."""
    things = [x for x in vars(pe).values() if inspect.isclass(x)]
    return [x for x in things if issubclass(x, pe.FrequencyMap) and x is not pe.FrequencyMap]


def _embedding(scheme: pe.Scheme, params) -> tuple[np.ndarray, np.ndarray]:
    """Returns the table, and the mean cosine similarity of its rows by distance."""
    x = jnp.zeros((1, LENGTH, SIZES["model_dim"]))
    table = np.asarray(pe.scheme_embedding(scheme, params, x)[0])
    unit = table / np.maximum(np.linalg.norm(table, axis=-1, keepdims=True), 1e-9)
    alike = unit @ unit.T
    place = np.arange(LENGTH)
    means = [alike[place[:, None] - place[None] == d].mean() for d in place]
    return table, np.asarray(means)[None]


def _marked(scheme: pe.Scheme, params) -> np.ndarray:
    """Returns the effect on the logits of tokens that differ, [T, T], mean over heads.

    Parameters that are all zero, and so without any effect, are drawn anew.
    """

    def drawn(p):
        return p if p.any() else jax.random.normal(jax.random.key(2), p.shape)

    is_match = np.arange(LENGTH) % EVERY == EVERY // 2
    without = np.where(is_match, MATCH, -MATCH)
    effect = log_weights(scheme, LENGTH, jax.tree.map(drawn, params), is_match=is_match)
    effect = (effect - without).mean(0)
    return effect - np.nanmedian(effect, 1, keepdims=True)


def _image(scheme: pe.Scheme, params) -> np.ndarray:
    row, column = np.divmod(np.arange(GRID * GRID), GRID)
    coordinates = np.zeros((scheme.traits.num_axes, DRAWS, GRID * GRID), np.int32)
    coordinates[-2], coordinates[-1] = row, column
    effect = log_weights(scheme, GRID * GRID, params, coordinates, is_causal=False)
    return effect.mean(0)[GRID * GRID // 2].reshape(GRID, GRID)


def log_weights(
    scheme: pe.Scheme,
    length: int,
    params,
    coordinates=None,
    *,
    is_causal: bool = True,
    is_match: np.ndarray | None = None,
) -> np.ndarray:
    """Returns the effect of positions on logits [N, T, T], relative to each query's own key.

    Args:
      coordinates: of the tokens. Default: their positions.
      is_causal: whether later keys are masked, NaN.
      is_match: keys with the logit `MATCH`, [T]; others have -MATCH. Default: all are alike.
    """
    keys = jax.random.split(jax.random.key(1), 2)
    heads, dim, model_dim = (SIZES[n] for n in ("num_heads", "head_dim", "model_dim"))
    content = jax.random.normal(keys[0], (DRAWS, 1, heads, dim))
    q = k = np.broadcast_to(content, (DRAWS, length, heads, dim))
    different = 1 if is_match is None else length
    x = jax.random.normal(keys[1], (DRAWS, different, model_dim))
    x = np.broadcast_to(x, (DRAWS, length, model_dim))
    if is_match is not None:
        unit = content / jnp.sum(content**2, -1, keepdims=True) * dim**0.5
        k = np.where(is_match[:, None, None], MATCH, -MATCH) * unit
    v = np.eye(length, dtype=np.float32)[None, :, None]
    v = np.broadcast_to(v, (DRAWS, length, heads, length))
    weights = _attend(scheme, is_causal, params, q, k, v, x, coordinates)
    weights = np.moveaxis(np.asarray(weights, np.float64), 2, 1)
    seen = np.tri(length, dtype=bool) if is_causal else np.ones((length, length), bool)
    with np.errstate(divide="ignore"):
        logs = np.where(seen, np.log(np.maximum(weights, 1e-30)), np.nan)
    own_key = np.diagonal(logs, axis1=-2, axis2=-1)[..., None]
    return (logs - own_key).mean(0)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _attend(scheme, is_causal, params, q, k, v, x, coordinates):
    batch, length = q.shape[:2]
    places = positions.count_up(batch, length) if coordinates is None else coordinates
    q, k, _, _ = scheme.mix(params, q, k, k, None, None)
    rows, cols, _ = scheme.features(params, x, q, k, places, None, None)

    call = _LogitsOnly(is_causal=is_causal, scale=q.shape[-1] ** -0.5)
    if coordinates is not None:
        call = call.replace(q_coordinates=places, k_coordinates=places)
    q, k = scheme.query(params, q, places, rows), scheme.key(params, k, places, cols)
    return scheme.attend(params, q, k, v, places, places, rows, cols, call)


class _LogitsOnly(pe.AttentionCall):
    """Leaves out rules on values, since values here are no vectors of a model."""

    def __call__(self, q, k, v, rules=()):
        rules = rules if isinstance(rules, tuple) else (rules,)
        return super().__call__(q, k, v, tuple(r for r in rules if not isinstance(r, pe.ValueBias)))
