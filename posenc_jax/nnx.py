"""Position encodings and attention as Flax NNX modules, for any scheme."""

import jax
from flax import nnx

from posenc_jax.modules.attention_fn import attention_fn, check_fits_flax, check_mask
from posenc_jax.modules.nnx_attention import Attention
from posenc_jax.modules.nnx_encoding import HeadNorm, PositionEncoding
from posenc_jax.modules.shared import layer_spec
from posenc_jax.schemes.layer_spec import LayerSpec
from posenc_jax.schemes.scheme import Scheme

__all__ = ["Attention", "AttentionFn", "HeadNorm", "PositionEncoding"]


class AttentionFn(nnx.Module):
    """A scheme inside the stock `nnx.MultiHeadAttention`, as its `attention_fn`.

    A decoded query's position is read from its mask, since the layer does not give it, and
    the keys of the whole cache are transformed at each step, since the layer caches them as
    projected. `Attention` avoids both.

    Layers that are given one object share its parameters, such as one table of T5; for tables of
    their own, give each a new object.

    >>> import posenc_jax as pe
    >>> rngs = nnx.Rngs(0)
    >>> rope = AttentionFn(pe.RoPE(head_dim=4), rngs=rngs)
    >>> layer = nnx.MultiHeadAttention(4, 16, decode=False, attention_fn=rope, rngs=rngs)
    >>> layer(jnp.ones((2, 5, 16)), is_causal=True).shape
    (2, 5, 16)
    """

    position = property(lambda self: self.encoding.scheme)
    shared_encoding = property(doc="An argument only. Assign `encoding` to share parameters later.")

    def __init__(
        self,
        position: Scheme | None = None,
        *,
        shared_encoding: PositionEncoding | None = None,
        scale: float | None = None,
        rngs: nnx.Rngs | None = None,
    ):
        """Makes the scheme's parameters, unless layers share them.

        Args:
          position: a scheme, unless there is a `shared_encoding`.
          shared_encoding: a scheme with parameters that layers share.
          scale: the factor on q . k, such as 1.0 for the weights of T5. Default: 1/sqrt(H).
          rngs: for the parameters of `position`, if it has any.

        Raises:
          TypeError: for a `LayerSpec`.
          ValueError: for schemes that act on the token embedding alone or read the layer's input;
            with parameters, without `rngs`.
        """
        if isinstance(position, LayerSpec):
            raise TypeError(
                "AttentionFn: position must be a Scheme, got a LayerSpec, whose window, scale and "
                "other settings are of Attention; give its scheme."
            )
        scheme = layer_spec("AttentionFn", position, shared_encoding).scheme
        check_fits_flax("AttentionFn", scheme, scale)
        self.scale = None if scale is None else float(scale)
        if shared_encoding is None:
            shapes = jax.eval_shape(scheme.init, jax.random.key(0))
            if rngs is None and jax.tree.leaves(shapes):
                raise ValueError(f"AttentionFn: {scheme!r} has parameters, so it needs rngs.")
            shared_encoding = PositionEncoding(scheme, rngs=nnx.Rngs(0) if rngs is None else rngs)
        self.encoding = shared_encoding

    def __call__(self, query, key, value, **options):
        """Attends as `nnx.dot_product_attention` does, with the scheme."""
        encoding = self.encoding
        if not options.get("is_causal"):
            check_mask("AttentionFn", encoding.scheme, query, options.get("mask"))
        options["scale"] = self.scale
        return attention_fn(encoding.scheme, encoding.values(), query, key, value, **options)
