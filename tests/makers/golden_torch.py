"""Makes more golden files from the authors' own classes and layers, run by PyTorch.

    python -m tests.makers golden_torch FOLDER [NAME ...]

FOLDER holds clones of the repositories in `sources.py`. PyTorch 2.13 made the committed numbers,
PyTorch 2.15 those of attention layers of 2025, from short_conv on.
"""

import ast
import itertools
import math
import types
import warnings
from typing import Optional

import numpy as np
import torch
import torch.nn.functional as F

from tests.makers.sources import SOURCES, make_files, origin, rounded, source_text


def authors(folder, source, name, functions=None, **stand_ins):
    """A class or function of a file, as it stands, with all functions beside it or those named."""
    tree = ast.parse(source_text(folder, source))
    functions = [
        n
        for n in tree.body
        if isinstance(n, ast.FunctionDef) and (functions is None or n.name in functions)
    ]
    tree.body = functions + [n for n in tree.body if getattr(n, "name", None) == name]
    space = {"torch": torch, "nn": torch.nn, "F": torch.nn.functional, "np": np, "math": math}
    space |= {"trunc_normal_": torch.nn.init.trunc_normal_, "Optional": Optional, "Tuple": tuple}
    space |= {"Tensor": torch.Tensor}
    space |= stand_ins
    exec(compile(tree, SOURCES[source][2], "exec"), space)
    return space[name]


def waves(*shape):
    """Numbers that the tests can make again: sin(1), sin(2), ..."""
    return torch.tensor(np.sin(1 + np.arange(math.prod(shape))).reshape(shape), dtype=torch.float32)


def attention(module, x):
    """q, k, v and the output of a window attention, its last projection left out: [T, N, H]."""
    module.proj = torch.nn.Identity()
    caught = []
    module.qkv.register_forward_hook(lambda _, __, y: caught.append(y))
    out = module(x)
    y = caught[0] if caught else torch.nn.functional.linear(x, module.qkv.weight)
    heads = module.num_heads
    q, k, v = y.reshape(x.shape[1], 3, heads, -1).unbind(1)
    arrays = {"q": q, "k": k, "v": v, "out": out.reshape(x.shape[1], heads, -1)}
    return {name: rounded(a) for name, a in arrays.items()}


def swin(folder):
    cls = authors(folder, "swin", "WindowAttention")
    torch.manual_seed(0)
    module = cls(24, (2, 3), 6, qkv_bias=False)
    module.relative_position_bias_table.data = waves(15, 6)
    case = attention(module, torch.randn(1, 6, 24))
    index = cls(24, (3, 4), 6).relative_position_index
    return {"origin": origin("swin"), "window": [2, 3], "index_3_4": index.tolist(), **case}


def swin_v2(folder):
    cls = authors(folder, "swin_v2", "WindowAttention")
    cases = []
    for window, pretrained in [((2, 3), (0, 0)), ((3, 2), (4, 5))]:
        torch.manual_seed(0)
        module = cls(24, window, 6, qkv_bias=False, pretrained_window_size=pretrained)
        module.logit_scale.data = torch.tensor([0.5, 1.0, 2.0, 3.0, 4.0, 5.0]).reshape(6, 1, 1)
        first, _, last = module.cpb_mlp
        first.weight.data, first.bias.data = waves(512, 2), waves(512)
        last.weight.data = waves(6, 512) / 16
        case = {"window": window, "pretrained": pretrained}
        case["log_offsets"] = rounded(module.relative_coords_table.reshape(-1, 2))
        cases.append(case | attention(module, torch.randn(1, 6, 24)))
    return {"origin": origin("swin_v2"), "cases": cases}


class Layer(torch.nn.Module):
    """A layer that keeps the bias that it is given."""

    def __init__(self, **_):
        super().__init__()

    def forward(self, x, self_attn_bias=None, **_):
        self.bias = self_attn_bias
        return x


def tupe(folder):
    cls = authors(
        folder,
        "tupe",
        "TransformerSentenceEncoder",
        LayerNorm=lambda size, export: torch.nn.LayerNorm(size),
        TransformerSentenceEncoderLayer=Layer,
        MultiheadAttention=type("MultiheadAttention", (), {}),
    )
    cases = []
    for relative in (False, True):
        sizes = {"embedding_dim": 24, "num_attention_heads": 6, "max_seq_len": 12}
        buckets = {"rel_pos": relative, "rel_pos_bins": 8, "max_rel_pos": 10}
        module = cls(0, 5, 1, **sizes, **buckets)
        module.pos.weight.data = waves(13, 24)
        weights, biases = waves(2, 24, 24) / 4, waves(2, 24) / 4
        for n, linear in enumerate((module.pos_q_linear, module.pos_k_linear)):
            linear.weight.data, linear.bias.data = weights[n], biases[n]
        module.pos_ln.weight.data, module.pos_ln.bias.data = 1 + waves(24) / 2, waves(24) / 2
        if relative:
            module.relative_attention_bias.weight.data = waves(9, 6)
        module(torch.ones(1, 12, dtype=torch.long))
        bias = module.layers[0].bias
        cases.append({"relative": relative, "bias": np.asarray(bias).round(7).tolist()})
    return {"origin": origin("tupe"), "cases": cases}


def sinusoidal_2d(folder):
    """MAE's patches of a 3 x 3 grid; DETR's, [4 x 5, 16], as shipped by transformers 5.23."""
    from transformers.models.detr.modeling_detr import DetrSinePositionEmbedding

    np.float = float  # Gone from NumPy, and used by the authors.
    codes_of = authors(folder, "mae", "get_2d_sincos_pos_embed")
    detr = {}
    for normalize in (False, True):
        module = DetrSinePositionEmbedding(8, normalize=normalize)
        codes = module(torch.Size((1, 1, 4, 5)), "cpu", torch.float64)[0]
        detr[f"detr_{normalize}"] = rounded(codes.reshape(16, -1).T)
    return {"origin": origin("mae"), "mae": rounded(codes_of(12, 3)), **detr}


def fourier(folder):
    cls = authors(folder, "fourier", "LearnableFourierPositionalEncoding")
    module = cls(1, 2, 12, 5, 8, 10.0)
    module.Wr.weight.data = waves(6, 2)
    first, _, last = module.mlp
    first.weight.data, first.bias.data = waves(5, 12), waves(5)
    last.weight.data, last.bias.data = waves(8, 5), waves(8)
    at = torch.tensor([[0.0, 0.0], [1.0, 0.0], [3.0, -7.0], [0.25, 0.75], [62.0, 257.0]])
    values = module.double()(at[:, None].double())
    return {"origin": origin("fourier"), "at": at.tolist(), "values": rounded(values)}


def grids(_):
    """torch.nn.functional.interpolate, as ViT, MAE and Swin call it."""
    grid = waves(2, 5, 7)
    cases = []
    for method in ("bicubic", "bilinear"):
        for size in [(8, 3), (5, 14), (1, 1), (2, 12)]:
            for align, antialias in [(False, False), (True, False), (False, True)]:
                options = {"align_corners": align, "antialias": antialias}
                got = torch.nn.functional.interpolate(grid[None], size=size, mode=method, **options)
                case = {"method": method, "size": size, **options}
                cases.append(case | {"values": rounded(got[0])})
    return {"origin": f"torch {torch.__version__}, interpolate", "cases": cases}


def short_conv(folder):
    """Two sequences through one Canon layer, whole and in steps, and a packed row."""

    def rearrange(x, how):
        return x[:, 0] if how == "d 1 w -> d w" else x.transpose(1, 2)

    names = {"rearrange": rearrange, "causal_conv1d_fn": None, "ACT2FN": {"silu": F.silu}}
    names |= {"warnings": warnings}
    cases = []
    for width, silu, residual in [(4, False, True), (3, True, False), (1, False, True)]:
        layer = authors(folder, "canon", "ShortConvolution", (), **names)(
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

    names = {
        "AttnArgs": types.SimpleNamespace,
        "flash_attn_interface": types.SimpleNamespace(flash_attn_varlen_func=plain),
        "device": "cpu",
    }
    yarn = authors(folder, "modded_nanogpt", "Yarn", (), **names)(dim, length)
    # The tables are in bfloat16 there.
    angles = torch.outer(torch.arange(2.0 * length), yarn.angular_freq)
    yarn.factor1, yarn.factor2 = angles.cos(), angles.sin()
    yarn.factor2[:, 1::2] *= -1
    cls = authors(folder, "modded_nanogpt", "CausalSelfAttention", ("norm",), **names)
    module = cls(heads * dim, dim, heads).train()
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
        names = {"BATModelArgs": None, "print0": print}
        module = authors(folder, name, "AttentionPrior", ("get_slopes",), **names)(arguments)
        case = {"origin": origin(name), "initial": rounded(module(9)[0, :, -1])}
        module.shape.data = torch.tensor([0.0, 0.2, 0.5, 1.0, 1.5, -0.3]).view(1, 6, 1, 1)
        module.scale.data = waves(1, 6, 1, 1)
        module.loc.data = torch.tensor([0.0, 0.3, -0.4, 1.0, -1.0, 0.1]).view(1, 6, 1, 1)
        learned = {n: rounded(getattr(module, n).flatten()) for n in ("shape", "scale", "loc")}
        out[name] = case | learned | {"bias": rounded(module(9)[0])}
    return out


def main(argv):
    torch.set_grad_enabled(False)
    makers = swin, swin_v2, tupe, sinusoidal_2d, fourier, grids, short_conv, partial_key_offset
    make_files(argv, *makers, cable, bam)
