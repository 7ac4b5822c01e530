"""Position encodings and attention as Flax Linen modules, for any scheme."""

from flax import linen as nn

from posenc_jax.modules.attention_fn import attention_fn, check_fits_flax, check_mask
from posenc_jax.modules.linen_attention import Attention
from posenc_jax.modules.linen_encoding import HeadNorm, PositionEncoding
from posenc_jax.schemes.scheme import Scheme

__all__ = ["Attention", "AttentionFn", "HeadNorm", "PositionEncoding"]


class AttentionFn(nn.Module):
    """A scheme inside the stock `linen.MultiHeadDotProductAttention`, as its `attention_fn`.

    A decoded query's position is read from its mask, since the layer does not give it, and
    the keys of the whole cache are transformed at each step, since the layer caches them as
    projected. `Attention` avoids both.

    Layers that are given one object share its parameters, such as one table of T5; for tables of
    their own, give each a new object.

    Attributes:
      scheme: any scheme whose `features` does not read the layer's input.
      scale: the factor on q . k, such as 1.0 for the weights of T5. Default: 1/sqrt(H).

    Raises:
      ValueError: for schemes that act on the token embedding alone or read the layer's input.

    >>> import posenc_jax as pe
    >>> layer = nn.MultiHeadDotProductAttention(
    ...     num_heads=4, attention_fn=AttentionFn(pe.RoPE(head_dim=4))
    ... )
    >>> x = jnp.ones((2, 5, 16))
    >>> layer.init_with_output(jax.random.key(0), x)[0].shape
    (2, 5, 16)
    """

    scheme: Scheme
    scale: float | None = None

    def __post_init__(self):
        check_fits_flax("AttentionFn", self.scheme, self.scale)
        super().__post_init__()

    @nn.compact
    def __call__(
        self,
        query,
        key,
        value,
        mask=None,
        dropout_rng=None,
        dropout_rate=0.0,
        broadcast_dropout=True,
        deterministic=True,
        dtype=None,
        precision=None,
        module=None,
        force_fp32_for_softmax=False,
        qk_attn_weights_einsum=None,
        attn_weights_value_einsum=None,
    ):
        """Attends as `linen.dot_product_attention` does, with the scheme."""
        options = locals()  # The layer gives only options that the signature names.
        del options["self"]
        options["scale"] = self.scale
        if not self.is_initializing():  # Decoding layers are initialised without a mask.
            check_mask("AttentionFn", self.scheme, query, mask)
        params = PositionEncoding(self.scheme, name="encoding").values()
        return attention_fn(self.scheme, params, **options)
