"""Makes golden files from attention layers of 2025 as their authors wrote them, run by PyTorch.

    python -m tests.makers golden_layers FOLDER [NAME ...]

FOLDER holds clones of the repositories in `sources.py`. PyTorch 2.15 made the committed numbers.
"""

import itertools
import types
import warnings

import torch
import torch.nn.functional as F

from tests.makers.golden_torch import authors, waves
from tests.makers.sources import make_files, origin, rounded


def short_conv(folder):
    """Two sequences through one Canon layer, whole and in steps, and a packed row."""

    def rearrange(x, how):
        return x[:, 0] if how == "d 1 w -> d w" else x.transpose(1, 2)

    wanted = {"rearrange": rearrange, "causal_conv1d_fn": None, "ACT2FN": {"silu": F.silu}}
    wanted |= {"warnings": warnings}
    cases = []
    for width, silu, residual in [(4, False, True), (3, True, False), (1, False, True)]:
        layer = authors(folder, "canon", "ShortConvolution", (), **wanted)(
            10, width, activation="silu" if silu else None, use_fast_conv1d=False
        )
        layer._zeyuan_residual = residual
        apply = authors(folder, "canon", "apply_canon", ())
        torch.manual_seed(0)
        layer.weight.data, x = torch.randn(10, 1, width), torch.randn(2, 9, 10)
        case = {"width": width, "silu": silu, "residual": residual}
        case |= {"kernel": rounded(layer.weight[:, 0].T), "x": rounded(x)}
        cache = types.SimpleNamespace()
        case["out"] = rounded(apply("c", layer, x, None, 0, None))
        prompt = apply("c", layer, x[:, :6], cache, 0, None)
        steps = [apply("c", layer, x[:, t : t + 1], cache, 0, None) for t in range(6, 9)]
        assert (torch.cat([prompt, *steps], 1) - torch.tensor(case["out"])).abs().max() < 1e-5
        cases.append(case)
    return {"origin": origin("canon"), "cases": cases}


def partial_key_offset(folder):
    """Attention of modded-nanogpt, with plain attention for its kernel, one document and two."""
    heads, dim, length = 3, 8, 16

    def plain(q, k, v, cu_seqlens_q, softmax_scale, **_):
        out = torch.zeros_like(v)
        for a, b in itertools.pairwise(cu_seqlens_q.tolist()):
            q1, k1, v1 = (x[a:b].transpose(0, 1) for x in (q, k, v))
            out[a:b] = F.scaled_dot_product_attention(
                q1, k1, v1, is_causal=True, scale=softmax_scale
            ).transpose(0, 1)
        return out

    wanted = {
        "AttnArgs": types.SimpleNamespace,
        "flash_attn_interface": types.SimpleNamespace(flash_attn_varlen_func=plain),
        "device": "cpu",
    }
    yarn = authors(folder, "modded_nanogpt", "Yarn", (), **wanted)(dim, length)
    # The tables are in bfloat16 there.
    angles = torch.outer(torch.arange(2.0 * length), yarn.angular_freq)
    yarn.factor1, yarn.factor2 = angles.cos(), angles.sin()
    yarn.factor2[:, 1::2] *= -1
    made = authors(folder, "modded_nanogpt", "CausalSelfAttention", ("norm",), **wanted)
    module = made(heads * dim, dim, heads).train()
    torch.manual_seed(0)
    x, weights = torch.randn(1, length, heads * dim), torch.eye(heads * dim).repeat(4, 1)
    weights[: 3 * heads * dim] = torch.randn(3 * heads * dim, heads * dim) / 4
    q, k, v = F.linear(x, weights[: 3 * heads * dim]).view(1, length, 3 * heads, dim).chunk(3, 2)
    norm = module.forward.__globals__["norm"]
    # They compile the model. Run line by line on CPU, the shift would overwrite what it reads.
    run = torch.compile(module, backend="aot_eager")
    case = {"q": rounded(norm(q)[0]), "k": rounded(norm(k)[0]), "v": rounded(v[0])}
    for name, ends in [("out", [0, length]), ("packed", [0, 7, length])]:
        args = types.SimpleNamespace(
            sa_lambdas=torch.ones(2),
            seqlens=torch.tensor(ends),
            bm_size=length,
            yarn=yarn,
            key_offset=True,
            attn_gate_w=None,
            aux_v=None,
            xsa_alpha=None,
            train_max_seq_len=length,
        )
        case[name] = rounded(run(x, args, weights).view(length, heads, dim))
    return {"origin": origin("modded_nanogpt"), "scale": yarn.attn_scale, **case}


def cable(folder):
    """The attention layer, its projection of the output left out."""
    heads, dim, length = 6, 24, 13
    config = types.SimpleNamespace(n_embd=dim, n_head=heads, block_size=length)
    module = authors(folder, "cable", "CausalSelfAttention")(config)
    module.c_proj = torch.nn.Identity()
    torch.manual_seed(0)
    module.h_attn.weight.data, module.h_attn.bias.data = torch.randn(heads, dim), waves(heads)
    x = torch.randn(1, length, dim)
    q, k, v = module.c_attn(x).view(length, 3, heads, dim // heads).unbind(1)
    out = module(x).view(length, heads, dim // heads)
    arrays = {"x": x[0], "w": module.h_attn.weight.T, "b": module.h_attn.bias}
    arrays |= {"q": q, "k": k, "v": v, "out": out}
    return {"origin": origin("cable")} | {name: rounded(a) for name, a in arrays.items()}


def bam(folder):
    """The bias of distances, by the file that trains and by the one that evaluates."""
    arguments = types.SimpleNamespace(
        n_heads=6, max_seq_len=9, scale_init="slope", shape_init=1, loc_init=0
    )
    arguments.train_shape = arguments.train_scale = arguments.train_loc = True
    out = {}
    for name in ("bam", "bam_inference"):
        wanted = {"BATModelArgs": None, "print0": print}
        module = authors(folder, name, "AttentionPrior", ("get_slopes",), **wanted)(arguments)
        case = {"origin": origin(name), "initial": rounded(module(9)[0, :, -1])}
        module.shape.data = torch.tensor([0.0, 0.2, 0.5, 1.0, 1.5, -0.3]).view(1, 6, 1, 1)
        module.scale.data = waves(1, 6, 1, 1)
        module.loc.data = torch.tensor([0.0, 0.3, -0.4, 1.0, -1.0, 0.1]).view(1, 6, 1, 1)
        learned = {n: rounded(getattr(module, n).flatten()) for n in ("shape", "scale", "loc")}
        out[name] = case | learned | {"bias": rounded(module(9)[0])}
    return out


def main(argv):
    with torch.no_grad():
        make_files(argv, short_conv, partial_key_offset, cable, bam)
