"""`implementation="jax"`: exact where it does not refuse."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe

KEYS = jax.random.split(jax.random.key(0), 3)
Q = jax.random.normal(KEYS[0], (2, 12, 4, 8))
K, V = (jax.random.normal(key, (2, 12, 2, 8)) for key in KEYS[1:])


def _blind():
    """Query 3 of row 1 sees nothing, and nobody sees key 5."""
    mask = jax.random.bernoulli(jax.random.key(4), 0.5, (2, 1, 12, 12))
    return mask.at[1, 0, 3].set(False).at[:, 0, :, 5].set(False)


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"window": (3, 1), "scale": 0.2}, {"is_causal": True, "window": 4}],
)
@pytest.mark.parametrize("masked", [False, True])
def test_equals_the_reference(options, masked):
    options = options | ({"mask": _blind()} if masked else {})
    k, v = (x.at[:, 5].set(jnp.nan) if masked else x for x in (K, V))

    def run(implementation):
        def loss(q, k, v):
            out, lse = pe.attention(
                q, k, v, **options, return_lse=True, implementation=implementation
            )
            return jnp.sum(out**2), (out, lse)

        return jax.grad(loss, (0, 1, 2), has_aux=True)(Q, k, v)

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
