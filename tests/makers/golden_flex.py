"""Makes score_mod.json from FlexAttention, run by PyTorch 2.15 on CPU without its compiler.

python -m tests.makers golden_flex
"""

import torch
from torch.nn.attention.flex_attention import flex_attention

from tests.makers.golden_torch import waves
from tests.makers.sources import rounded, write

B, T, N, H = 2, 11, 3, 4


def alibi(captured):
    (slopes,) = captured
    return lambda score, b, h, q, k: score - slopes[h] * (q - k).abs()


def relative_table(captured):
    (table,) = captured
    return lambda score, b, h, q, k: score + table[h, q - k + T - 1]


def absolute_table(captured):
    queries, keys = captured
    return lambda score, b, h, q, k: queries[q] * keys[h, k] + score


def by_row(captured):
    (scale,) = captured
    return lambda score, b, h, q, k: score - scale[b, h] * (q - k)


def causal(captured):
    return lambda score, b, h, q, k: torch.where(q >= k, score, -float("inf"))


def softcap(captured):
    (cap,) = captured
    return lambda score, b, h, q, k: cap * torch.tanh(score / cap)


def times(captured):
    (factor,) = captured
    return lambda score, b, h, q, k: score * factor[h] - 0.1 * k


CASES = {
    alibi: [(N,)],
    relative_table: [(N, 2 * T - 1)],
    absolute_table: [(T,), (N, T)],
    by_row: [(B, N)],
    causal: [],
    softcap: [()],
    times: [(N,)],
}


def case(make, shapes):
    captured = [waves(*shape).requires_grad_() for shape in shapes]
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, N, T, H) for _ in range(3))
    out = flex_attention(q, k, v, score_mod=make(captured))
    (out * waves(B, N, T, H)).sum().backward() if captured else None
    named = {"q": q, "k": k, "v": v, "out": out.detach()}
    made = {name: rounded(x.transpose(1, 2)) for name, x in named.items()}
    grads = [rounded(x.grad) for x in captured]
    return made | {"captured": [rounded(x.detach()) for x in captured], "grads": grads}


def main(argv):
    cases = {make.__name__: case(make, shapes) for make, shapes in CASES.items()}
    first = next(iter(cases.values()))
    arrays = {name: first[name] for name in "qkv"}
    for made in cases.values():
        assert all(made.pop(name) == arrays[name] for name in "qkv")
    origin = f"torch {torch.__version__}, flex_attention"
    write("score_mod", {"origin": origin, **arrays, "cases": cases})
