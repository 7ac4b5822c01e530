"""Position encodings and norms of heads as Flax NNX modules."""

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from posenc_jax.modules.shared import AxisNames, EncodingLayer, check_axis_names, names, new_params
from posenc_jax.qk_norm import QKNorm
from posenc_jax.schemes.scheme import Params, Scheme, check_scheme, param_axes


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def metadata_of(axis_names: AxisNames | None, sizes: Sequence[str]) -> dict[str, Any]:
    """Returns the metadata of a parameter whose axes have these sizes."""
    return {} if axis_names is None else {"out_sharding": names(axis_names, sizes)}


class PositionEncoding(EncodingLayer, nnx.Module):
    """A scheme with its parameters; called, it encodes positions into token embeddings.

    Attributes:
      scheme: the scheme; static.
      parameters: its parameters, a pytree of `nnx.Param`, float32.

    >>> import posenc_jax as pe
    >>> encoding = PositionEncoding(pe.LearnedAbsolute(max_length=8, model_dim=4), rngs=nnx.Rngs(0))
    >>> encoding(jnp.zeros((1, 3, 4))).shape
    (1, 3, 4)
    """

    def __init__(self, scheme: Scheme, *, axis_names: AxisNames | None = None, rngs: nnx.Rngs):
        """Makes new parameters.

        Args:
          scheme: any scheme.
          axis_names: as in `Attention`.
          rngs: for the key of the parameters.

        Raises:
          TypeError: if `scheme` is not a `Scheme`.
        """
        check_scheme("PositionEncoding", scheme)
        check_axis_names("PositionEncoding", axis_names)
        self.scheme = scheme
        leaves, structure = jax.tree.flatten(new_params(scheme, rngs.params()))
        axes = [()] * len(leaves) if axis_names is None else param_axes(scheme)
        leaves = [
            nnx.Param(x, **metadata_of(axis_names, words))
            for x, words in zip(leaves, axes, strict=True)
        ]
        self.parameters = nnx.data(jax.tree.unflatten(structure, leaves))

    def values(self) -> Params:
        """Returns the parameters as arrays."""
        return jax.tree.map(lambda p: p.get_value(), self.parameters, is_leaf=_is_variable)


class HeadNorm(nnx.Module):
    """The norm of the queries or the keys of a layer; see `posenc_jax.QKNorm`.

    Attributes:
      settings: the norm; static.
      scale, bias: its parameters as `nnx.Param`, or None.
    """

    def __init__(
        self,
        settings: QKNorm,
        num_heads: int,
        head_dim: int,
        sizes: tuple[str, str] = ("num_heads", "head_dim"),
        axis_names: AxisNames | None = None,
    ):
        """Makes new parameters; `sizes` names their sizes [N, H] for `axis_names`."""
        self.settings = settings
        params = {
            name: nnx.Param(p, **metadata_of(axis_names, sizes[-p.ndim :]))
            for name, p in settings.init(num_heads, head_dim).items()
        }
        self.scale, self.bias = (nnx.data(params.get(name)) for name in ("scale", "bias"))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns x [B, T, N, H] normalised."""
        params = {"scale": self.scale, "bias": self.bias}
        return self.settings({n: p[...] for n, p in params.items() if p is not None}, x)
