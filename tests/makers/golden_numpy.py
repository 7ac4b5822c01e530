"""Makes the golden files from the authors' own code, run over NumPy.

    python -m tests.makers golden_numpy FOLDER [NAME ...]

FOLDER holds clones of the repositories in `sources.py`. Functions are taken out of their files as
they stand and run with stand-ins for TensorFlow, Mesh TensorFlow and PyTorch: each stand-in
is the NumPy function of the same meaning, in float32 where theirs is. So the numbers are
those of the authors' text, not of a second reading of the paper. The commits that were read
are in the files.
"""

import ast
import math
import textwrap
from types import SimpleNamespace

import numpy as np

from tests.makers.sources import make_files, origin, rounded, source_text

T5_SIZES = [(32, 128), (64, 256), (32, 512), (16, 20), (20, 100), (6, 33)]


def authors(folder, source, *names, **stand_ins):
    """Functions of a file, run in a namespace of stand-ins."""
    text = source_text(folder, source)
    definitions = {n.name: n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)}
    space = dict(stand_ins, math=math, np=np)
    for name in names:
        start, end = definitions[name].lineno - 1, definitions[name].end_lineno
        exec(textwrap.dedent("\n".join(text.splitlines()[start:end])), space)
    return SimpleNamespace(**{name: space[name] for name in names})


def alibi(folder):
    get_slopes = authors(folder, "alibi", "get_slopes").get_slopes
    heads = [1, 2, 3, 4, 5, 6, 7, 8, 12, 20, 25, 40, 64]
    return {"origin": origin("alibi"), "slopes": {n: get_slopes(n) for n in heads}}


def t5(folder):
    """The bucket of every distance: [first distance, bucket] wherever the bucket changes."""
    mtf = SimpleNamespace(
        less=np.less,
        maximum=np.maximum,
        minimum=np.minimum,
        abs=np.abs,
        where=np.where,
        to_int32=lambda x: np.asarray(x).astype(np.int32),
        to_float=lambda x: np.asarray(x).astype(np.float32),
        log=lambda x: np.log(x.astype(np.float32)),
    )
    bucket = authors(folder, "t5", "_relative_position_bucket", mtf=mtf)._relative_position_bucket
    distance = np.arange(-600, 601, dtype=np.int32)  # Query minus key; the authors' negative.
    cases = []
    for num_buckets, max_distance in T5_SIZES:
        for bidirectional in (False, True):
            with np.errstate(divide="ignore", invalid="ignore"):  # log 0, which is not used.
                got = bucket(-distance, bidirectional, num_buckets, max_distance)
            changes = [0, *(np.flatnonzero(np.diff(got)) + 1)]
            case = {
                "num_buckets": num_buckets,
                "max_distance": max_distance,
                "bidirectional": bidirectional,
                "runs": [[int(distance[i]), int(got[i])] for i in changes],
            }
            cases.append(case)
    return {"origin": origin("t5"), "first": -600, "last": 600, "cases": cases}


def tensorflow():
    return SimpleNamespace(
        to_float=lambda x: np.asarray(x, np.float32),
        range=lambda *a: np.arange(*a, dtype=np.int32),
        maximum=np.maximum,
        exp=np.exp,
        sin=np.sin,
        cos=np.cos,
        mod=np.mod,
        pad=np.pad,
        reshape=np.reshape,
        expand_dims=np.expand_dims,
        concat=lambda xs, axis: np.concatenate(xs, axis),
        clip_by_value=np.clip,
        shape=lambda x: x.shape,
        transpose=np.transpose,
        matmul=lambda x, y, transpose_b=False: x @ (np.swapaxes(y, -1, -2) if transpose_b else y),
    )


def sinusoidal(folder):
    name = "get_timing_signal_1d"
    signal = authors(folder, "t2t", name, tf=tensorflow()).get_timing_signal_1d
    cases = [
        {"dim": dim, "start": start, "values": rounded(signal(4, dim, start_index=start)[0])}
        for dim, start in [(4, 0), (6, 1), (7, 62), (12, 255)]
    ]
    return {"origin": origin("t2t"), "cases": cases}


class Wrapped(np.ndarray):
    """An array with the method of TensorFlow that `_relative_attention_inner` asks for."""

    def get_shape(self):
        return SimpleNamespace(as_list=lambda: list(self.shape))


def shaw(folder):
    """Self-attention as `dot_product_attention_relative` puts its parts together."""
    names = "_generate_relative_positions_matrix", "_relative_attention_inner"
    t2t = authors(folder, "t2t", *names, tf=tensorflow())
    random = np.random.default_rng(0)
    cases = []
    for heads, length, dim, clip, causal in [(2, 5, 4, 2, False), (3, 7, 2, 3, True)]:
        q, k, v = (random.normal(size=(1, heads, length, dim)).round(3) for _ in range(3))
        keys, values = (random.normal(size=(2 * clip + 1, dim)).round(3) for _ in range(2))
        rows = t2t._generate_relative_positions_matrix(length, length, clip)
        scaled = (q * dim**-0.5).view(Wrapped)  # As multihead_attention does before the call.
        logits = t2t._relative_attention_inner(scaled, k, keys[rows], True)
        if causal:  # The additive mask of attention_bias_lower_triangle.
            logits = logits - 1e9 * np.triu(np.ones((length, length)), 1)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights = (weights / weights.sum(-1, keepdims=True)).view(Wrapped)
        out = t2t._relative_attention_inner(weights, v, values[rows], False)
        arrays = {"q": q, "k": k, "v": v, "keys": keys, "values": values, "out": out}
        case = {name: rounded(a) for name, a in arrays.items()}
        cases.append({"clip": clip, "is_causal": causal} | case)
    return {"origin": origin("t2t"), "layout": "q, k, v, out [B, N, T, H]", "cases": cases}


def rope(folder):
    """Both layouts, at positions 0 .. 6 of one sequence; the authors count from 0."""
    torch = SimpleNamespace(cat=lambda xs, dim: np.concatenate(xs, dim))
    neox = authors(folder, "neox", "rotate_half", "apply_rotary_pos_emb_torch", torch=torch)
    einops = dict(
        rearrange=lambda x, _: x.reshape(*x.shape[:-2], -1),  # ... d j -> ... (d j)
        repeat=lambda t, _, j: np.repeat(t, j, -1),  # b n -> b (n j)
    )
    names = "fixed_pos_embedding", "rotate_every_two", "apply_rotary_pos_emb"
    gptj = authors(folder, "gptj", *names, jnp=np, **einops)
    random = np.random.default_rng(1)
    x = random.normal(size=(7, 2, 12)).round(3)  # [T, N, H]
    rotary = x[..., :8]  # The first 8 of 12 dimensions, as GPT-J's 64 of 256.
    sin, cos = gptj.fixed_pos_embedding(rotary)
    emb = np.arange(7)[:, None] / 10000 ** (np.arange(0, 8, 2) / 8)  # RotaryEmbedding, float64.
    emb = np.concatenate([emb, emb], -1)[:, None]
    half, _ = neox.apply_rotary_pos_emb_torch(rotary, rotary, np.cos(emb), np.sin(emb))
    interleaved = gptj.apply_rotary_pos_emb(rotary, (sin, cos))
    rotations = {"half": half, "interleaved": interleaved}
    rotations = {name: np.concatenate([y, x[..., 8:]], -1) for name, y in rotations.items()}
    return {
        "origin": {"half": origin("neox"), "interleaved": origin("gptj")},
        "layout": "[T, N, H]",
        "rotary_dim": 8,
        "x": rounded(x),
    } | {name: rounded(y) for name, y in rotations.items()}


def main(argv):
    make_files(argv, alibi, t5, sinusoidal, shaw, rope)
