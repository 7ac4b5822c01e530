"""`implementation="jax"`: exact where it does not refuse."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import qkv

import posenc_jax as pe

Q, K, V = qkv(batch=2, length=12, heads=4, kv_heads=2)


def _blind():
    """Query 3 of row 1 sees nothing, and nobody sees key 5."""
    mask = np.random.default_rng(4).random((2, 1, 12, 12)) < 0.5
    mask[1, 0, 3] = mask[:, 0, :, 5] = False
    return mask


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"window": (3, 1), "scale": 0.2}, {"is_causal": True, "window": 4}],
)
@pytest.mark.parametrize("masked", [False, True])
def test_equals_the_reference(options, masked):
    options = options | ({"mask": _blind()} if masked else {})
    k, v = K.copy(), V.copy()
    if masked:
        k[:, 5] = v[:, 5] = np.nan

    def run(implementation):
        def loss(q, k, v):
            out, lse = pe.attention(
                q, k, v, **options, return_lse=True, implementation=implementation
            )
            return jnp.sum(out**2), (out, lse)

        return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(Q, k, v)

    chex.assert_trees_all_close(run("jax"), run("reference"), atol=5e-6)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rules": pe.ALiBi(num_heads=4).rules({})}, "rules"),
        ({"sinks": jnp.zeros(4)}, "sinks"),
        ({"softcap": 2.0}, "softcap"),
        ({"q_segment_ids": np.zeros((2, 12), np.int32)}, "segments"),
        ({"is_causal": True, "q_positions": np.arange(12), "k_positions": np.arange(12)}, "posi"),
    ],
)
def test_refuses_what_it_cannot_do(options, said):
    with pytest.raises(NotImplementedError, match=said):
        pe.attention(Q, K, V, **options, implementation="jax")
