"""Weights of the projections of attention, from PyTorch's layout to the layout of `Attention`."""

import jax
import jax.numpy as jnp

from posenc_jax.checks import divides, one_of, require


def heads_from_linear(weight: jax.Array, num_heads: int, *, output: bool = False) -> jax.Array:
    """Returns a weight or bias of `torch.nn.Linear` as the kernel or bias of a projection.

    The weights of GPT-2's `Conv1D` have their inputs first: transpose them.

    Args:
      weight: [N*H, D] or [N*H] of a projection to queries, keys or values; [D, N*H] of the
        projection from the heads to the output, whose bias stays as it is.
      num_heads: N; K for keys and values.
      output: whether it is the projection to the output.

    Returns:
      [D, N, H] or [N, H]; [N, H, D] for the output. The kernels of `query`, `key`, `value` and
      `out` of `Attention`.

    Raises:
      ValueError: for a rank other than 1 or 2, a bias of the output, and heads that do not divide.

    >>> heads_from_linear(jnp.zeros((12, 5)), num_heads=3).shape
    (5, 3, 4)
    """
    name = "heads_from_linear"
    shape = jnp.shape(weight)
    require(
        len(shape) in ((2,) if output else (1, 2)),
        f"{name}: weight must be {'[D, N*H]' if output else '[N*H, D] or [N*H]'}, got {shape}.",
    )
    kernel = weight.T if len(shape) == 2 else weight
    if output:
        divides(name, inputs=kernel.shape[0], num_heads=num_heads)
        return kernel.reshape(num_heads, -1, kernel.shape[-1])
    divides(name, outputs=kernel.shape[-1], num_heads=num_heads)
    return kernel.reshape(*kernel.shape[:-1], num_heads, -1)


def split_qkv(
    weight: jax.Array,
    num_heads: int,
    num_kv_heads: int | None = None,
    *,
    order: str = "concatenated",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Splits the weight or bias of one projection to queries, keys and values into three.

    Args:
      weight: [(N + 2 K) H, D] or [(N + 2 K) H].
      num_heads: the number of query heads, N.
      num_kv_heads: the number of key/value heads, K. Default: N.
      order: "concatenated": all queries, all keys, all values (GPT-2, Phi-3, MPT). "by_group":
        for each key head its queries, then the key, then the value (GPT-NeoX, BLOOM, Falcon).

    Returns:
      The weights or biases of q, k and v, [N*H, D] and twice [K*H, D], for `heads_from_linear`.

    Raises:
      ValueError: for sizes that do not divide, and an unknown order.

    >>> [w.shape for w in split_qkv(jnp.zeros((16, 5)), num_heads=4, num_kv_heads=2)]
    [(8, 5), (4, 5), (4, 5)]
    """
    one_of("split_qkv", ("concatenated", "by_group"), order=order)
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    divides("split_qkv", num_heads=num_heads, num_kv_heads=kv_heads)
    divides("split_qkv", outputs=weight.shape[0], heads=num_heads + 2 * kv_heads)
    columns = weight.shape[1:]
    if order == "concatenated":
        size = weight.shape[0] // (num_heads + 2 * kv_heads)
        cuts = num_heads * size, (num_heads + kv_heads) * size
        return weight[: cuts[0]], weight[cuts[0] : cuts[1]], weight[cuts[1] :]
    group = weight.reshape(kv_heads, num_heads // kv_heads + 2, -1, *columns)
    q, k, v = group[:, :-2], group[:, -2], group[:, -1]
    return q.reshape(-1, *columns), k.reshape(-1, *columns), v.reshape(-1, *columns)
