"""Trees of tokens by `visible_until`: every branch equals its sequence alone, in caches too.

Expected are calls of each path from a root, by "reference", without a tree; and for masks of pairs
float64 attention with the mask of its authors.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import posenc_jax as pe
import posenc_jax.linen as pl
import posenc_jax.nnx as pn
from posenc_jax.positions import Tree, from_tree
from tests import oracle
from tests.support import (
    SIZES,
    build,
    empty_cache,
    forward,
    layer_of,
    make_batch,
    output,
    parameters,
    run,
    slow,
    slow_but,
)

T = 63
CHAIN = 5
H, N, D = SIZES["head_dim"], SIZES["num_heads"], SIZES["model_dim"]


def _parents(seed):
    """A chain of tokens, then parents among the eight tokens before each one."""
    random = np.random.default_rng(seed)
    later = [random.integers(max(0, t - 8), t) for t in range(CHAIN, T)]
    return np.array([*range(-1, CHAIN - 1), *later], np.int32)


def _path(parents, token):
    """The tokens from a root to a token."""
    path = []
    while token >= 0:
        path.append(int(token))
        token = parents[token]
    return np.array(path[::-1])


def _depth_first(parents):
    """The same tree with its tokens in the order of their positions, as a ring needs them."""
    at = run(from_tree, (), parents).positions
    order = np.argsort(at)
    return np.where(parents[order] < 0, -1, at[np.maximum(parents[order], 0)])


def _leaves(parents):
    return [t for t in range(len(parents)) if t not in parents]


PARENTS = np.stack([_parents(0), _parents(1)])
TOKENS = make_batch(2, T)
T5 = pe.T5(N, num_buckets=8, max_distance=20)
DRAFTS = {  # The scheme, and whether the cache is a ring.
    "t5 in a ring": (T5, True),
    "chain": (pe.chain(pe.RoPE(H), T5), False),
    "stick breaking": (pe.StickBreaking(), False),
    "learned": (pe.LearnedAbsolute(64, D), False),
}


def _tree_and_later(parents, start):
    tree = from_tree(parents)
    return tree, tree.after(start)


@pytest.mark.parametrize("rows", [1, 2])
def test_positions_of_a_tree(rows):
    """Positions and ends give the ancestors of each token, and depths their number."""
    parents = PARENTS[0] if rows == 1 else PARENTS
    start = 7 if rows == 1 else np.array([7, 8])
    tree, later = run(_tree_and_later, (), parents, start)
    tree = Tree(*(np.atleast_2d(x) for x in tree))
    for n, row in enumerate(np.atleast_2d(parents)):
        at, until = tree.positions[n], tree.visible_until[n]
        seen = (at[None] <= at[:, None]) & (at[:, None] < until[None])
        for token in range(T):
            path = _path(row, token)
            np.testing.assert_array_equal(np.flatnonzero(seen[token]), np.sort(path))
            assert tree.coordinates[n, token] == len(path) - 1
        assert sorted(at) == list(range(T))
    start = np.array([[7], [8]])[:rows]
    np.testing.assert_array_equal(np.atleast_2d(later.visible_until), tree.visible_until + start)


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_a_tree_of_no_tokens_is_one(shape):
    tree = from_tree(np.zeros(shape, np.int32))
    assert {(x.shape, x.dtype.name) for x in tree} == {(shape, "int32")}


def test_parents_that_come_late_are_refused():
    with pytest.raises(ValueError, match=r"parents must come before their children, got \[2\]"):
        from_tree(np.array([-1, 2, 0]))
    with pytest.raises(ValueError, match=r"parents must be \[T\] or \[B, T\], got \(\)"):
        from_tree(np.array(3))


def _forward(scheme, word, params, tokens, tree):
    return forward(scheme, params, tokens, implementation=word, **tree._asdict())[0]


@pytest.mark.parametrize("kind", slow_but(pe.SCHEMES, "fox", "t5"))
def test_every_scheme_is_right_or_refuses(kind):
    """Schemes with a running state refuse: it belongs to one sequence."""
    scheme = build(pe.SCHEMES[kind])
    tokens, parents = TOKENS[:1, :19], PARENTS[0, :19]
    params, tree = parameters(scheme), run(from_tree, (), parents)
    if jax.tree.leaves(jax.eval_shape(lambda: empty_cache(scheme, 1)).state):
        with pytest.raises(NotImplementedError, match="has a running state of one sequence"):
            jax.eval_shape(functools.partial(_forward, scheme, None), params, tokens, tree)
        return
    out = run(_forward, (scheme, None), params, tokens, tree)
    for leaf in _leaves(parents):
        path = _path(parents, leaf)
        expected, _ = forward(scheme, params, tokens[:, path], implementation="reference")
        np.testing.assert_allclose(out[:, path], expected, atol=1e-5)


@slow
def test_rows_of_block_diffusion_equal_the_mask_of_their_authors():
    """BD3-LM: noisy blocks and clean ones side by side; three integers per token, no mask.

    The mask is block_diff_mask of kuleshov-group/bd3lms, models/dit.py.
    """
    half, size = 32, 8
    index = np.arange(2 * half)
    noisy, block = index < half, index % half // size
    same = block[:, None] == block
    later = block[:, None] > block
    seen = same & (noisy[:, None] == noisy)
    seen |= later & ~noisy & noisy[:, None]
    seen |= (same | later) & ~noisy & ~noisy[:, None]
    random = np.random.default_rng(0)
    arrays = [random.normal(size=(1, 2 * half, n, 8)).astype("f4") for n in (N, 3, 3)]
    options = {"q_positions": 2 * block + ~noisy, "is_causal": True, "implementation": "xla"}
    options["k_visible_until"] = np.where(noisy, 2 * block + 1, 2**31 - 1)
    out = jax.jit(lambda *qkv: pe.attention(*qkv, **options))(*arrays)
    expected = oracle.softmax_attention(
        *arrays, lambda q, k, *_: q @ k / 8**0.5, sees=lambda i, j: seen[i, j]
    )
    np.testing.assert_allclose(out, expected, atol=1e-5)


def _draft(scheme, ring, params, tokens, more, tree, keep):
    """A prompt of ten tokens, a tree of drafts, a branch that stays, and two more tokens."""
    options = {"coordinates": np.zeros(1, np.int32), "visible_until": True, "ring": ring}
    cache = empty_cache(scheme, 2, 59, **options)
    options = {"window": 40} if ring else {}
    start = np.array([10, 7], np.int32)
    ids = np.where(np.arange(10) < start[:, None], 0, -1)
    at = np.arange(10, dtype=np.int32)
    _, cache = forward(
        scheme, params, tokens[:, :10], cache=cache, segment_ids=ids, coordinates=at, **options
    )
    tree = tree.after(cache.next_positions)
    drafts, cache = forward(
        scheme, params, tokens[:, 10:30], cache=cache, **tree._asdict(), **options
    )
    cache = cache.keep(keep, 20)
    at = cache.next_positions[:, None] + jnp.arange(2, dtype=jnp.int32)[None]
    out, cache = forward(scheme, params, more, cache=cache, coordinates=at, **options)
    return drafts, out, cache.length, cache.next_positions


@pytest.mark.parametrize("name", slow_but(DRAFTS, "t5 in a ring"))
def test_a_branch_of_drafts_is_kept(name):
    """The drafts equal their sequences, and so do the tokens after a branch was kept."""
    (scheme, ring), more = DRAFTS[name], make_batch(2, 2, seed=5)
    parents = PARENTS[:, CHAIN - 1 : CHAIN + 19] - CHAIN + 1
    parents = np.stack([_depth_first(row) for row in parents]) if ring else parents
    branches = [_path(row, _leaves(row)[2])[:4] for row in parents]
    keep = np.full((2, 5), -1)
    for n, branch in enumerate(branches):
        keep[n, : len(branch)] = branch
    params, tree = parameters(scheme), run(from_tree, (), parents)
    drafts, out, lengths, after = run(_draft, (scheme, ring), params, TOKENS, more, tree, keep)
    for n, (start, branch) in enumerate(zip((10, 7), branches, strict=True)):
        path = np.r_[np.arange(start), 10 + branch]
        alone = TOKENS.map(lambda x, n=n, path=path: x[n : n + 1, path])
        last = more.map(lambda x, n=n: x[n : n + 1])
        count = len(path) + 2  # Later tokens have no influence: one program for all.
        whole = jax.tree.map(lambda a, b: np.concatenate([a, b, a], 1)[:, :18], alone, last)
        expected = output(scheme, params, whole)
        np.testing.assert_allclose(drafts[n, branch], expected[0, start : count - 2], atol=1e-5)
        np.testing.assert_allclose(out[n], expected[0, count - 2 : count], atol=1e-5)
        assert lengths[n] == after[n] == count


@slow
def test_what_cannot_be_kept_is_refused():
    @jax.jit
    def filled(tokens):
        cache = empty_cache(pe.RoPE(H), 2, 8)
        return forward(pe.RoPE(H), {}, tokens, cache=cache)[1]

    cache, keep = filled(make_batch(2, 4)), np.array([[0, 1], [0, -1]])
    kept = jax.jit(lambda cache, count: cache.keep(keep, count))
    assert kept(cache, 3).length.tolist() == [3, 2]
    with pytest.raises(ValueError, match=r"keep: row 0 has tokens \[0 1\] of the last 1"):
        cache.keep(keep, 1)
    with pytest.raises(ValueError, match=r"keep: tokens must be \[2, n\], got \(1, 2\)"):
        cache.keep(keep[:1], 3)
    assert kept(cache, 1).lost.tolist() == [True, False]
    with pytest.raises(NotImplementedError, match="keep: the scheme has a running state"):
        jax.eval_shape(lambda: empty_cache(pe.FoX(N, D)).keep(keep, 1))


def test_what_has_no_trees_says_so():
    q = make_batch(1, 9)
    arrays, until = (q.q, q.k, q.v), np.arange(1, 10)
    options = {"visible_until": until, "is_causal": True}
    cache = jax.eval_shape(lambda: empty_cache(pe.RoPE(H), 1))

    def attend(scheme, cache=None, **more):
        return jax.eval_shape(
            lambda arrays, cache: pe.scheme_attention(
                scheme, {}, *arrays, cache=cache, **options | more
            ),
            arrays,
            cache,
        )

    with pytest.raises(ValueError, match=r"needs a cache made with new_cache\(\.\.\., visible_un"):
        attend(pe.RoPE(H), cache)
    with pytest.raises(NotImplementedError, match="streaming: visible_until"):
        attend(pe.streaming(pe.RoPE(H)), window=(2, 0))
    with pytest.raises(NotImplementedError, match="Self-Extend and dual chunks: visible_until"):
        attend(pe.ReRoPE(H, window=3))
    with pytest.raises(ValueError, match=r"visible_until must be \[9\] or .*got \(3,\)"):
        attend(pe.RoPE(H), visible_until=until[:3], is_causal=False)
    with pytest.raises(TypeError, match="k_visible_until must be integers, got float32"):
        pe.attention(*arrays, k_visible_until=until.astype("f4"))
    with pytest.raises(ValueError, match="3 queries and 9 keys need q_positions and k_positions"):
        pe.attention(q.q[:, :3], q.k, q.v, k_visible_until=until)
    layer = nnx.eval_shape(
        lambda: pn.Attention(
            *(16, 2),
            position=pe.LayerSpec(pe.NoPE(), chunk_size=4),
            is_causal=True,
            rngs=nnx.Rngs(0),
        )
    )
    with pytest.raises(NotImplementedError, match="visible_until in a layer with chunks"):
        layer(np.zeros((1, 9, 16), "f4"), visible_until=until)


def _every_other(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx) % 2 == 0


@slow
def test_block_masks_in_layers_and_caches():
    """A step gives the numbers of its queries; the slots of a full cache are those of the keys."""
    options = {"position": pe.T5(2), "is_causal": True}
    layer = layer_of(lambda rngs: pn.Attention(16, 2, rngs=rngs, **options))

    @jax.jit
    def outputs(x):
        cache, steps = layer.new_cache(2, 20), []
        for index in np.split(np.arange(12), [7]):
            mask = pe.block_mask(_every_other, len(index), 20, q_idx=index)
            y, cache = layer(x[:, index], mask=mask, cache=cache)
            steps.append(y)
        every_other = layer(x[:, ::2], positions=2 * np.arange(6))
        return jnp.concatenate(steps, 1)[:, ::2], every_other

    outs = outputs(np.random.default_rng(0).normal(size=(2, 12, 16)))
    np.testing.assert_allclose(*outs, atol=1e-5)


@slow
def test_layers_of_both_libraries():
    """Trees in calls, and with `decode=True` in the caches of both."""
    settings = {"num_heads": 2, "is_causal": True, "position": pe.RoPE(8)}
    layer = layer_of(lambda rngs: pn.Attention(model_dim=16, **settings, rngs=rngs))
    module = pl.Attention(**settings, decode=True)
    x = np.random.default_rng(0).normal(size=(2, 30, 16)).astype("f4")
    parents = PARENTS[:, :30]
    tree = run(from_tree, (), parents)
    path = _path(parents[0], _leaves(parents[0])[3])

    @jax.jit
    def outputs(x):
        cache, steps = layer.new_cache(2, 30, visible_until=True), []
        variables = module.init(jax.random.key(0), x, **tree._asdict())
        variables = variables | {"params": nnx.to_pure_dict(nnx.state(layer, nnx.Param))}
        for part in slice(0, 13), slice(13, 30):
            places = {name: x[:, part] for name, x in tree._asdict().items()}
            y, cache = layer(x[:, part], cache=cache, **places)
            y_of_linen, new = module.apply(variables, x[:, part], mutable=["cache"], **places)
            variables = variables | new
            steps.append((y, y_of_linen))
        steps = [jnp.concatenate(y, 1) for y in zip(*steps, strict=True)]
        return layer(x[:1, path]), layer(x, **tree._asdict()), *steps

    alone, *outs = outputs(x)
    for out in outs:
        np.testing.assert_allclose(out, outs[0], atol=1e-5)
    np.testing.assert_allclose(np.asarray(outs[0])[:1, path], alone, atol=1e-5)
