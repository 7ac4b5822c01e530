"""Wrong calls: the message names the function, the argument, and what was given."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from posenc_jax.engine.dense import Dense
from posenc_jax.engine.xla import XLA
from tests.oracle import qkv
from tests.support import parameters

Q, K, V = qkv(batch=2, length=7)
ALIBI, ROPE, NOPE = pe.ALiBi(num_heads=6), pe.RoPE(head_dim=8), pe.NoPE()
SHAW, T5, WAVES = pe.Shaw(num_heads=6, head_dim=8), pe.T5(num_heads=6), pe.Sinusoidal(4)
AT, REAL, X = np.arange(7), np.zeros(7, np.float32), np.zeros((2, 7, 4), np.float32)
RULES, KEY = {"rules": ALIBI.rules({})}, jax.random.key(0)


def content(heads=6, q_features=Q, k_features=None):
    shaw = SHAW.replace(per_head=True)
    bias, _ = shaw.rules(parameters(shaw), q_features, None)
    return {"rules": dataclasses.replace(bias, heads=bias.heads[:heads], k_features=k_features)}


def values(bucket=lambda q, k: q - k, heads=6):
    return {"rules": pe.ValueBias(bucket, np.zeros((heads, 1, 8), np.float32))}


def bounds(relative, *limits):
    changes = {"relative": relative, "bounds": limits}
    return {"rules": dataclasses.replace(RULES["rules"], **changes)}


def cache(scheme=ALIBI, batch=2, **options):
    sizes = {"num_heads": 6, "num_kv_heads": 3, "head_dim": 8}
    return pe.new_cache(scheme, batch, 9, **sizes | options)


def cross(scheme=NOPE, k=K, **options):
    return pe.scheme_cross_attention(scheme, {}, Q, k, V, **options)


def stacked():
    return jax.tree.map(lambda a: np.stack([a] * 3), cache())


MANY = {"coordinates": np.zeros((3, 2, 7), np.float32)}
ATTENTION = {
    "q must be [B, T, N, H], got shape (7, 6, 8)": {"q": Q[0]},
    "v must be [B, S, K, V], got shape (7, 3, 8)": {"v": V[0]},
    "q must be floating, got int32": {"q": Q.astype("i4")},
    "q must be an array, got list": {"q": [[[[0.0] * 8] * 6] * 7] * 2},
    "q and k differ in head dim": {"k": K[..., :4]},
    "the head dim of q and k must be at least 1": {"q": Q[..., :0], "k": K[..., :0]},
    "q and k differ in batch size": {"k": K[:1], "v": V[:1]},
    "k and v differ in B, S or K": {"v": V[:, :5]},
    "4 query heads are no multiple of 3 key heads": {"q": Q[:, :, :4]},
    "LogitBias.heads must be .*(6, .*got (4,": {"rules": pe.ALiBi(num_heads=4).rules({})},
    "rules must be rules .*, got ALiBi": {"rules": ALIBI},
    "a DotBias has either q_features or k_features, got neither": lambda: content(q_features=None),
    "a DotBias has either q_features or k_features, got both": lambda: content(k_features=K),
    "DotBias.q_features must be .*(2, 7, 6), got (2, 5": lambda: content(q_features=Q[:, :5]),
    "DotBias.k_features must be .*got (2, 7)": lambda: content(k_features=X[..., 0]),
    "the vectors of a DotBias have shape (8,) per dis": lambda: content(q_features=Q[..., :4]),
    "DotBias.heads must be .*6, .*got (4, ": lambda: content(heads=4),
    "ValueBias.table must be [N, R, V] = (6, 1, 8), got (4, 1, 8)": values(heads=4),
    "ValueBias.bucket must return an integer, got float32": values(lambda q, k: q.astype("f4")),
    "LogitBias.bounds must be integers (low, high) with low <= high, got (3, 0)": bounds(
        True, 3, 0
    ),
    "LogitBias.bounds must be integers .*, got (0.5, 3)": bounds(True, 0.5, 3),
    "LogitBias.bounds .* need relative=True, got [3]": bounds(False, None, 3),
    "LogitBias.rule .* must return one number for coordinates of 3 axes, got shape (3,": RULES
    | {"q_coordinates": MANY["coordinates"]},
    "mask must be bool, got float32": {"mask": np.ones((2, 1, 7, 7), "f4")},
    "mask must be .*(2, 6, 7, 7), got (7, 7": {"mask": np.ones((7, 7), bool)},
    "mask must be .*; one row for all queries is no mask": {"mask": np.ones((2, 1, 1, 7), bool)},
    "mask must be bool, got a function; of a function of indices": {
        "mask": lambda b, h, q, k: q >= k
    },
    "rules must be rules .*, got a function; of a score_mod": {
        "rules": lambda score, b, h, q, k: score
    },
    "rules must be rules .*, got the class ALiBi; of a scheme, give": {"rules": pe.ALiBi},
    "mask must be bool, got list": {"mask": [[[[True] * 7] * 7]]},
    "window must be at least 1 token, got 0": {"window": 0},
    "is_causal must be True or False, got 'no'.": {"is_causal": "no"},
    "softcap must be positive, got 0.0": {"softcap": 0.0},
    "softcap must be a number, got True": {"softcap": True},
    "scale must be finite, got nan": {"scale": float("nan")},
    "scale must be a Python number; multiply q by": {"scale": jnp.float32(1)},
    "sinks .*(6,) or .*(2, 7, 6), got (4,)": {"sinks": REAL[:4]},
    "dropout_rate must be in [0, 1), got 1.0": {"dropout_rate": 1.0},
    ".*together, got dropout_rate=0.1 and no dropout_key": {"dropout_rate": 0.1},
    ".*together, got dropout_rate=0.0 and a dropout_key": {"dropout_key": KEY},
    "dropout_key must be one random key, got int of shape ()": {"dropout_key": 0}
    | {"dropout_rate": 0.1},
    "dropout_key must be one random key, got PRNGKeyArray of shape (2,)": {"dropout_rate": 0.1}
    | {"dropout_key": jax.random.split(KEY)},
    "prefix_length must be [B], got shape ()": {"prefix_length": 3},
    "prefix_length must be integers, got float32": {"prefix_length": REAL[:2]},
    "prefix_length .*(2,), got (3,)": {"prefix_length": AT[:3]},
    "q_positions must be integers, got float32": {"q_positions": REAL},
    "q_positions must be [7].*got (5,)": {"q_positions": AT[:5]},
    "k_coordinates must be [A, B, 7] or [A, 1, 7] with B = 2, got (2, 2, 5)": {
        "k_coordinates": np.zeros((2, 2, 5), "f4")
    },
    "q_segment_ids must be integers, got float32": {"q_segment_ids": REAL},
    "contiguous=True needs positions that grow by one": {"contiguous": True}
    | {"q_positions": 2 * AT, "k_positions": 2 * AT},
    "contiguous=True needs positions .* the same of": {"contiguous": True}
    | {"q_positions": AT + 5, "k_positions": AT},
    "contiguous=True needs coordinates that": RULES | {"contiguous": True, "q_coordinates": 2 * AT},
}
SHORT = "3 queries and 7 keys need q_positions and k_positions"
SHORTER = {
    "positions were given for q only": {"q_positions": AT[:3]},
    "coordinates were given for k only": {"k_coordinates": AT},
    SHORT: {"is_causal": True},
    SHORT + ".*": {"window": 3},
    SHORT + ": ": RULES,
    "q_segment_ids and k_segment_ids go together": {"q_segment_ids": AT[:3]},
    "contiguous=True needs as many queries as keys, got 3 and 7": {"contiguous": True}
    | {"q_positions": AT[:3], "k_positions": AT, "is_causal": True},
}
SCHEME = {
    "k must be [B, T, K, H], got shape (7, 3, 8)": {"k": K[0]},
    "v must be [B, T, K, V] with the B and T of q .*got (2, 5, 3, 8)": {"v": V[:, :5]},
    # It would be broadcast: all rows would get the coordinates of one.
    "x must be [B, T, D] with the B and T .*got (1, 7, 4)": {"x": X[:1]},
    "positions must be integers, got float32; give real numbers as coord": {"positions": REAL},
    "positions must be [7] or .*B = 2, got (6,)": {"positions": AT[:6]},
    "positions must be .*got (3, 7)": {"positions": np.zeros((3, 7), int)},
    "positions must be .*got ()": {"positions": AT[3]},
    "coordinates must be integers, got bool": {"coordinates": REAL.astype(bool)},
    "coordinates must be .*got (6,)": {"coordinates": AT[:6]},
    ".*ALiBi.* reads coordinates of [B, T] = (2, 7), .*got (": MANY,
    "segment_ids must be .*got (3,)": {"segment_ids": AT[:3]},
    "segment_ids must be [7] or .*got (3,)": {"segment_ids": AT[:3], "positions": AT},
    "StickBreaking needs is_causal=True: keys": {"scheme": pe.StickBreaking(), "window": (3, 1)},
    "prefix_length shows keys after the query, and for StickB": {"scheme": pe.StickBreaking()}
    | {"is_causal": True, "prefix_length": AT[:2]},
    "scheme must be a Scheme, got <class .*RoPE": {"scheme": pe.RoPE},
    "scheme must be a Scheme, got 'rope'": {"scheme": "rope"},
    "scheme must be a Scheme, got LayerSpec(.*give its scheme": {"scheme": pe.LayerSpec(ROPE)},
    "num_heads is 6, and ALiBi(num_heads=4.* was made for 4": {
        "scheme": pe.chain(ROPE, pe.streaming(pe.ALiBi(4), 2)),
        "params": ({}, {}),
    },
    "num_heads is 6, and ALiBi(num_heads=np.int64(4)": {"scheme": pe.ALiBi(np.int64(4))},
    "the fields of T5 are static .*unhashable.*numpy": {"scheme": pe.T5(6, stddev=np.ones(1))},
    "params lack ['table'] of T5(num.*make them with": {"scheme": T5},
    "params lack ['table'] of T5(.*, got ['params']['table']; make": {"scheme": T5}
    | {"params": {"params": {"table": REAL}}},
    "params have ['table'], and ALiBi(num.* has no such": {"params": {"table": REAL}},
    "params lack [1]['keys'], [1]['val": {"scheme": pe.chain(ROPE, SHAW), "params": ({}, {})},
    "params['table'] must be (6, 32) for T5(num_heads=6.*, got (6, 16)": {"scheme": T5}
    | {"params": {"table": np.zeros((6, 16), "f4")}},
    "tables must be .* of coord.*(2, 7).*float32[2, 7, 4], got float32[1, 6, 4], float": {
        "scheme": ROPE,
        "tables": pe.scheme_tables(ROPE, {}, AT[:6]),
    },
    "tables must be of RoPE(.*theta=10000.*got those of RoPE(.*theta=500": {
        "scheme": ROPE,
        "tables": pe.scheme_tables(ROPE.replace(theta=500.0), {}, AT),
    },
    "tables must be scheme_tables of RoPE(.*got tuple": {"scheme": ROPE}
    | {"tables": ROPE.tables({}, AT[None])},
    "norms must be two functions, (of q, of k), got (": {"norms": (np.asarray,) * 3},
    "the cache must be that of one layer with 2 rows, got (5,)": lambda: {"cache": cache(batch=5)},
    "the cache must be that of one layer with 2 rows, got (3, 2)": lambda: {"cache": stacked()},
    "contiguous has no meaning with a cache, got .*True": lambda: (
        {"cache": cache()} | {"contiguous": True}
    ),
    "the cache was made for RoPE.*and the scheme is ALiBi": lambda: {"cache": cache(ROPE)},
    ".*make it with new_cache(..., coo": lambda: {"cache": cache(), "coordinates": 2 * AT},
    "rows of a cache are a batch; give q, k and v as [1, T": lambda: (
        {"cache": cache()} | {"q": Q[0], "k": K[0], "v": V[0]}
    ),
}
EMBEDDING = {
    "x must be floating, got int32": {"x": X.astype("i4")},
    "x must be [B, T, D].*(4,)": {"x": X[0, 0]},
    "positions must be .*got (6,)": {"positions": AT[:6], "coordinates": AT},
    "positions must be integers, got float": {"positions": REAL},
    "coordinates must be .*got (6,)": {"coordinates": AT[:6]},
    ".*reads coordinates of [B, T]": MANY,
    "scheme must be a Scheme, got 'rope'": {"scheme": "rope"},
    "params lack ['table'] of Learned": {"scheme": pe.LearnedAbsolute(9, 4)},
    "the cache must be that of one layer with 2 rows, got (5,)": lambda: {"cache": cache(batch=5)},
}
CALLS = {
    "new_cache: num_heads must be >= 1, got 0": lambda: cache(num_heads=0),
    "new_cache: batch must be an integer, got True": lambda: cache(batch=True),
    "new_cache: max_rewind must be >= 0, got -1": lambda: cache(max_rewind=-1),
    "new_cache: value_dim must be an integer, got True": lambda: cache(value_dim=True),
    "new_cache: coordinates must be [T], .* got shape ()": lambda: cache(coordinates=AT[0]),
    "new_cache: coordinates must be an array .* got (1, 4)": lambda: cache(coordinates=(1, 4)),
    "new_cache: dtype must be a floating type, got <class": lambda: cache(dtype=jnp.int8),
    "new_cache: dtype must be a floating type, got None": lambda: cache(dtype=None),
    "new_cache: FoX(.*reads the input .*model_dim=.": lambda: cache(pe.FoX(6, model_dim=4)),
    "new_cache: num_heads is 3, and FoX(num_heads=6": lambda: cache(pe.FoX(6, 8), num_heads=3),
    "new_cache: num_heads=4 must be a multiple of num_kv_heads=3": lambda: cache(num_heads=4),
    "new_cache: num_sink_tokens needs ring=True": lambda: cache(num_sink_tokens=2),
    "KVCache: capacity must be >= 1, got 0": lambda: pe.KVCache.empty(Q, V, 0),
    "KVCache: max_rewind must be >= 0, got -1": lambda: pe.KVCache.empty(Q, V, 9, max_rewind=-1),
    "KVCache.take: rows must be [any], got shape (1, 2)": lambda: cache().take([[0, 1]]),
    "cos_sin: frequencies must be an array [..., P], got array(1.": lambda: pe.cos_sin(
        AT, np.array(1.0)
    ),
    "scheme_cross_attention: k must be [B, S, K, H], got shape (7, ": lambda: cross(k=K[0]),
    "scheme_cross_attention: positions and k_positions go": lambda: cross(k_positions=AT),
    "scheme_cross_attention: .*is_causal, window and k_visible_until need them": lambda: cross(
        ROPE, coordinates=AT, k_coordinates=AT, window=3
    ),
    "QKNorm: x must be floating, got int32": lambda: pe.QKNorm(scale="none")({}, Q.astype("i4")),
    "resize_grid: grid must be floating, got uint8": lambda: pe.resize_grid(X.astype("u1"), 2, 2),
    "short_convolution: x must be floating, got int32": lambda: pe.short_convolution(
        X.astype("i4"), X[0]
    ),
    "short_convolution: state must have the last 6 tokens, .*, got 2": lambda: pe.short_convolution(
        X, X[0], state=pe.short_convolution(X, X[0, :3])[1]
    ),
    "DenseBias: pairs must be an array": lambda: pe.DenseBias([[1.0]]),
    "score_mod: arrays must be arrays, got 'x'": lambda: pe.score_mod(max, Q, "x"),
    "XLA: forward must be Blocks(q, k) or None, got (32, 32)": lambda: XLA((32, 32)),
    "XLA: row_block must be >= 1, got 0": lambda: XLA(row_block=0),
    "Dense: block must be an integer, got 'x'": lambda: Dense("x"),
    "on_axis: axis must be one .*, got axis 'x' of 2": lambda: pe.on_axis(ROPE, "x"),
}


ALL = {
    "attention: ": (pe.attention, {"q": Q, "k": K, "v": V}, ATTENTION),
    "attention:  ": (pe.attention, {"q": Q[:, :3], "k": K, "v": V}, SHORTER),
    "scheme_attention: ": (
        pe.scheme_attention,
        {"scheme": ALIBI, "params": {}, "q": Q, "k": K, "v": V},
        SCHEME,
    ),
    "scheme_embedding: ": (pe.scheme_embedding, {"scheme": WAVES, "params": {}, "x": X}, EMBEDDING),
    "": (lambda call: call(), {}, {m: {"call": call} for m, call in CALLS.items()}),
}


@pytest.mark.parametrize("prefix, message", [(p, m) for p, x in ALL.items() for m in x[-1]])
def test_a_wrong_call_is_named(prefix, message):
    function, defaults, entries = ALL[prefix]
    options = entries[message]
    options = options() if callable(options) else options
    pattern = "^" + ".*".join(map(re.escape, f"{prefix.strip()} {message}".strip().split(".*")))
    with pytest.raises((TypeError, ValueError), match=pattern):
        function(**defaults | options)


def test_schemes_without_parameters_take_any_empty_tree():
    scheme = pe.streaming(pe.chain(pe.chain(ROPE), ALIBI), 2)
    options = {"is_causal": True, "window": (3, 0)}

    def outputs(params):
        out, _ = pe.scheme_attention(scheme, params, Q, K, V, **options)
        state = cache(scheme, params=params)
        step, _ = pe.scheme_attention(scheme, params, Q, K, V, cache=state, **options)
        others = pe.scheme_tables(scheme, params, AT), scheme.rules(params or {})
        return out, step, pe.scheme_embedding(scheme, params, X), jax.tree.leaves(others)

    shapes = [jax.eval_shape(lambda p=p: outputs(p)) for p in ({}, (), None, scheme.init(KEY))]
    assert all(x == shapes[0] for x in shapes)


def test_parameters_may_have_another_structure_with_the_same_names():
    """As lists, or dicts with numbers as keys, and without empty members."""
    scheme = pe.chain(ROPE, T5)
    params = scheme.init(KEY)
    run = jax.jit(lambda p: pe.scheme_attention(scheme, p, Q, K, V, is_causal=True)[0])
    expected = run(params)
    for other in ([{}, params[1]], {1: params[1]}, ((), params[1], {})):
        np.testing.assert_array_equal(run(other), expected)


def test_a_traced_flag_is_told_from_a_wrong_one():
    with pytest.raises(TypeError, match=r"is_causal must be .*under jax.jit name it in static_arg"):
        jax.jit(functools.partial(pe.attention, Q, K, V))(is_causal=True)
