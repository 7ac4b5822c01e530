"""`segment_ids` alone: rows equal their sequences alone, wherever the tokens lie, in caches too.

One program serves all layouts of a scheme: the ids are data. Expected are calls of each sequence.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import posenc_jax as pe
import posenc_jax.nnx as pn
from posenc_jax.engine.api import make_problem
from tests.support import SIZES, forward, layer_of, make_batch, parameters, run, slow

T = 41
TOKENS = make_batch(1, T)
LAYOUTS = {
    "packed": np.r_[[0] * 17, [1] * 24],
    "padded": np.r_[[-1] * 5, [0] * 30, [-1] * 6],
    "padding between tokens": np.r_[[4] * 9, [-1] * 3, [4] * 5, [7] * 20, [-1] * 4],
    "descending": np.r_[[2] * 20, [1] * 9, [0] * 12],
    "in turns": np.arange(T) % 2,
    "back": np.r_[[0] * 9, [1] * 3, [0] * 29],
}
H, N = SIZES["head_dim"], SIZES["num_heads"]
SCHEMES = {
    "t5": (pe.T5(N, num_buckets=8, max_distance=20), {}),
    "rope, window": (pe.RoPE(H), {"window": 5}),
    "alibi, prefix": (pe.ALiBi(N), {"prefix_length": (3,)}),
    "shaw": (pe.Shaw(N, H, clip=4), {}),
    "tupe": (pe.TUPE(N, H, SIZES["model_dim"], 64), {}),
    "learned": (pe.LearnedAbsolute(64, SIZES["model_dim"]), {}),
    "ssmax": (pe.SSMax(N), {}),
    "temperature": (pe.QueryTemperature("llama4", 2, 1.0), {}),
    "dual chunks": (pe.DualChunk(H, chunk=3, local=1), {}),  # Ids of chunks repeat after 32 tokens.
    "streaming": (pe.streaming(pe.RoPE(H), 2), {"window": (6, 0)}),
    "stick breaking": (pe.StickBreaking(), {}),
}


def _loss(scheme, word, options, params, tokens, weights, ids, positions):
    options = {n: jnp.asarray(x) if n == "prefix_length" else x for n, x in options}
    options |= {"implementation": word, "segment_ids": ids, "positions": positions}
    out, _ = forward(scheme, params, tokens, **options)
    return (out * weights).sum(), out


def _slopes(scheme, word, options, gradients, *arrays):
    loss = functools.partial(_loss, scheme, word, options)
    return (jax.value_and_grad(loss, (0, 1), has_aux=True) if gradients else loss)(*arrays)


def attend(name, word, ids, positions=None, gradients=True):
    """The output, and with `gradients` those to parameters and tokens."""
    scheme, options = SCHEMES[name]
    weights = np.sin(np.arange(T, dtype=np.float32))[None, :, None, None]
    weights = np.where((ids >= 0)[..., None, None], weights, np.float32(0))
    arrays = parameters(scheme), TOKENS, weights, ids, positions
    first, second = run(_slopes, (scheme, word, (*options.items(),), gradients), *arrays)
    return (first[1], second) if gradients else (second, ())


@pytest.mark.parametrize(
    ("name", "gradients"),
    [
        *(("t5", True), ("dual chunks", False)),
        pytest.param("tupe", False, marks=slow),
        *(pytest.param(name, True, marks=slow) for name in SCHEMES if name != "t5"),
    ],
)
def test_rows_equal_their_sequences(name, gradients):
    """In tiles, all layouts by one program; expected is "reference" with positions."""
    for layout in LAYOUTS.values():
        ids = layout[None].astype(np.int32)
        out, slopes = attend(name, "xla", ids, gradients=gradients)
        positions = np.zeros_like(ids)
        for segment in set(layout) - {-1}:
            index = np.flatnonzero(layout == segment)
            positions[0, index] = np.arange(len(index))
        how = {"positions": positions, "gradients": gradients}
        expected, others = attend(name, "reference", ids, **how)
        real = ids[0] >= 0
        np.testing.assert_allclose(out[:, real], expected[:, real], atol=2e-5)
        for a, b in zip(jax.tree.leaves(slopes), jax.tree.leaves(others), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-4 * max(1, np.abs(b).max()))


@slow
def test_the_reference_of_the_test_above_is_each_sequence_alone():
    (scheme, _), ids = SCHEMES["tupe"], LAYOUTS["in turns"][None].astype(np.int32)
    how = {"positions": np.arange(T)[None] // 2, "gradients": False}
    out, _ = attend("tupe", "reference", ids, **how)
    for segment in (0, 1):
        index = np.flatnonzero(ids[0] == segment)
        part = TOKENS.map(lambda x, index=index: x[:, index])
        alone = jax.jit(lambda params, tokens: forward(scheme, params, tokens)[0])
        np.testing.assert_allclose(out[:, index], alone(parameters(scheme), part), atol=2e-5)


def test_chunks_of_a_layer_count_in_each_segment():
    options = {"position": pe.LayerSpec(pe.NoPE(), chunk_size=4), "is_causal": True}
    layer = layer_of(lambda rngs: pn.Attention(16, 2, rngs=rngs, **options))
    x = np.random.default_rng(0).normal(size=(1, 15, 16)).astype(np.float32)
    ids = np.r_[[0] * 6, [1] * 9][None].astype(np.int32)

    @jax.jit
    def run(x, ids):
        first, cache = layer(x[:, :12], segment_ids=ids[:, :12], cache=layer.new_cache(1, 20))
        steps = [first]
        for t in range(12, 15):  # By default, in the last segment.
            options = {"segment_ids": ids[:, t : t + 1]} if t % 2 else {}
            y, cache = layer(x[:, t : t + 1], cache=cache, **options)
            steps.append(y)
        alone = [layer(x[:, part]) for part in (slice(0, 6), slice(6, 15))]
        return layer(x, segment_ids=ids), jnp.concatenate(steps, 1), jnp.concatenate(alone, 1)

    whole, steps, alone = run(x, ids)
    np.testing.assert_allclose(whole, alone, atol=1e-5)
    np.testing.assert_allclose(steps, alone, atol=1e-5)


@pytest.mark.parametrize("name", ["learned", pytest.param("tupe", marks=slow)])
def test_a_cache_counts_in_each_segment(name):
    """Chunks go on with the last segment, begin others, and go back to an earlier one."""
    scheme, _ = SCHEMES[name]
    params, sizes = parameters(scheme), {n: SIZES[n] for n in ("head_dim", "num_heads")}
    ids = np.r_[[5] * 7, [6] * 4, [6] * 3, [5] * 6, [9] * 5][None].astype(np.int32)
    positions = np.r_[range(7), range(4), range(4, 7), range(7, 13), range(5)][None]
    chunks = 7, 4, 3, 6, 5

    @jax.jit
    def run(params, tokens):
        cache = pe.new_cache(scheme, 1, 32, num_kv_heads=3, model_dim=SIZES["model_dim"], **sizes)
        outs, start = [], 0
        for size in chunks:
            part = slice(start, start + size)
            segments = {} if start == 11 else {"segment_ids": ids[:, part]}
            out, cache = forward(scheme, params, tokens[:, part], cache=cache, **segments)
            outs.append(out)
            start += size
        whole, _ = forward(scheme, params, tokens[:, :25], positions=positions, segment_ids=ids)
        back = [cache.rewind(count) for count in (5, 12)]
        tokens = [(x.next_positions[0], x.next_segment_ids[0]) for x in back]
        return jnp.concatenate(outs, 1), whole, tokens

    out, whole, tokens = run(params, TOKENS)
    np.testing.assert_allclose(out, whole, atol=2e-5)
    assert tokens == [(13, 5), (6, 6)]  # Segment 5 holds position 6.


def _embedded(scheme, params, x, ids):
    return pe.scheme_embedding(scheme, params, x, segment_ids=ids)


def test_embeddings_count_in_each_segment():
    scheme, ids = SCHEMES["learned"][0], LAYOUTS["in turns"]
    params, x = parameters(scheme), np.zeros((1, T, SIZES["model_dim"]), np.float32)
    out = run(_embedded, (scheme,), params, x, ids)
    rows = [int(np.sum(ids[:t] == ids[t])) for t in range(T)]
    np.testing.assert_array_equal(out[0], params["table"][np.array(rows)])


def test_positions_that_are_known_to_restart():
    """Those of the helpers while they are traced, and known ones by their values."""
    q, rules = jnp.ones((1, 8, 1, 4)), (pe.ALiBi(1).rules({}),)
    known = np.array([[0, 0, 0, 1, 1, 1, 1, -1]], np.int32)

    def contiguous(positions, ids=None):
        call = pe.AttentionCall(is_causal=True, q_positions=positions, q_segment_ids=ids)
        return make_problem(q, q, q, rules, call).contiguous

    def of_traced(ids):
        restarting, mask = pe.positions.from_segment_ids(ids), ids >= 0
        words.append([contiguous(None, ids), contiguous(restarting, ids)])
        words.append([contiguous(*pe.positions.from_padding_mask(mask))])
        words.append([contiguous(restarting + 0, ids), contiguous(restarting, ids + 0)])
        return ids

    words = []
    jax.eval_shape(of_traced, known)
    assert words == [[True, True], [True], [False, False]]
    assert contiguous(np.arange(8) + 100) and not contiguous(2 * np.arange(8))
    assert contiguous(np.array([[4, 5, 6, 0, 1, 2, 3, 0]]), known)
    assert not contiguous(np.array([[0, 1, 3, 0, 1, 2, 3, 0]]), known)
    assert not contiguous(None, np.array([[0, 1, 0, 1, 1, 1, 1, 1]], np.int32))


@slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_rows_that_are_moved_on_a_mesh(kind):
    scheme, _ = SCHEMES["t5"]
    ids = np.stack([LAYOUTS["in turns"], LAYOUTS["padding between tokens"]]).astype(np.int32)
    tokens = make_batch(2, T)
    qkv = tokens.q, tokens.k[:, :, :2], tokens.v[:, :, :2]

    @jax.jit
    def attend(ids, *qkv):
        options = {"segment_ids": ids, "is_causal": True}
        return pe.scheme_attention(scheme, parameters(scheme), *qkv, **options)[0]

    with jax.set_mesh(jax.make_mesh((2, 2), ("data", "heads"), axis_types=(kind,) * 2)):
        expected = attend(ids, *qkv)
        sharded = [jax.device_put(x, P("data", None, "heads")) for x in qkv]
        out = attend(jax.device_put(ids, P("data")), *sharded)
    np.testing.assert_allclose(out, expected, atol=1e-5)
