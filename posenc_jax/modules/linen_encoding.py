"""Position encodings and norms of heads as Flax Linen modules."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import linen as nn
from flax import struct

from posenc_jax.modules.shared import AxisNames, EncodingLayer, check_axis_names, names, new_params
from posenc_jax.qk_norm import QKNorm
from posenc_jax.schemes.scheme import Params, Scheme, check_scheme, param_axes


@struct.dataclass
class AxisNamed(nn.LogicallyPartitioned):
    """An array with the names of its axes.

    `nn.DenseGeneral` initialises a kernel with two merged axes, unboxes it and splits the axes; its
    sharding is constrained after that only.
    """

    def unbox(self, apply_constraint: bool = True) -> Any:
        """Returns the array, sharded by its names where a mesh and rules are set."""
        return super().unbox(apply_constraint and self.value.ndim == len(self.names))


def boxed(x: Any, axis_names: AxisNames | None, sizes: Sequence[str]) -> Any:
    """Returns an array with the names of its axes; names that it has are kept."""
    if axis_names is None or isinstance(x, nn.meta.AxisMetadata):
        return x
    return AxisNamed(x, names(axis_names, sizes))


def named(
    init: Callable[..., Any], axis_names: AxisNames | None, sizes: Sequence[str]
) -> Callable[..., Any]:
    """Returns the initialiser with names for the axes of its arrays."""
    return lambda *args: boxed(init(*args), axis_names, sizes)


class PositionEncoding(EncodingLayer, nn.Module):
    """A scheme with its parameters; called, it encodes positions into token embeddings.

    Attributes:
      scheme: any scheme. Its parameters are the Linen parameter "parameters", float32.
      axis_names: as in `Attention`.

    >>> import posenc_jax as pe
    >>> encoding = PositionEncoding(pe.LearnedAbsolute(max_length=8, model_dim=4))
    >>> y, variables = encoding.init_with_output(jax.random.key(0), jnp.zeros((1, 3, 4)))
    >>> variables["params"]["parameters"]["table"].shape
    (8, 4)
    """

    scheme: Scheme
    axis_names: AxisNames | None = None

    def setup(self):
        """Declares the parameters, if the scheme has any."""
        check_scheme("PositionEncoding", self.scheme)
        check_axis_names("PositionEncoding", self.axis_names)
        self.shapes = jax.eval_shape(self.scheme.init, jax.random.key(0))
        has_params = jax.tree.leaves(self.shapes)
        self.learned = self.param("parameters", self._new) if has_params else None

    def _new(self, key: jax.Array) -> Params:
        leaves = jax.tree.leaves_with_path(new_params(self.scheme, key))
        if self.axis_names is not None:
            axes = param_axes(self.scheme)
            pairs = zip(leaves, axes, strict=True)
            leaves = [(path, boxed(x, self.axis_names, words)) for (path, x), words in pairs]
        return _nested(leaves)

    def values(self) -> Params:
        """Returns the parameters as arrays."""
        if self.learned is None:
            return self.scheme.init(jax.random.key(0))
        return jax.tree.map_with_path(lambda path, _: _item(self.learned, path), self.shapes)

    # Linen does not call `setup` before inherited methods.
    __call__ = EncodingLayer.__call__
    tables = EncodingLayer.tables


def _names(path: tuple) -> list[Any]:
    """Returns the keys and indices of a path."""
    return [getattr(key, "key", getattr(key, "idx", None)) for key in path]


def _nested(leaves: list[tuple[tuple, Any]]) -> Any:
    """Returns leaves as dicts, as files have them: items of tuples by number, nothing empty."""
    nested: dict[str, Any] = {}
    for path, leaf in leaves:
        if not path:
            return leaf
        *folders, name = map(str, _names(path))
        inner = nested
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[name] = leaf
    return nested


def _item(tree: Any, path: tuple) -> Any:
    """Returns the leaf at a path; NNX's dicts have numbers as keys."""
    for name in _names(path):
        tree = tree[str(name) if isinstance(tree, Mapping) and str(name) in tree else name]
    return tree


class HeadNorm(nn.Module):
    """The norm of the queries or the keys of a layer; see `posenc_jax.QKNorm`.

    Attributes:
      settings: the norm.
      sizes: names of the sizes [N, H] of its parameters, for `axis_names`.
      axis_names: as in `Attention`.
    """

    settings: QKNorm
    sizes: tuple[str, str] = ("num_heads", "head_dim")
    axis_names: AxisNames | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns x [B, T, N, H] normalised."""
        params = {
            name: self.param(name, lambda _, p=p: boxed(p, self.axis_names, self.sizes[-p.ndim :]))
            for name, p in self.settings.init(*x.shape[-2:]).items()
        }
        return self.settings(params, x)
