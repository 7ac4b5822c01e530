"""Attention of other libraries, compared with ours before it is timed."""

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import posenc_jax as pe
from experiments.bench.compile import compile_program, with_gradients
from experiments.runs.environment import usable_cores

FOREIGN = ("jax.nn", "torch", "tokamax")
"""Prefixes of the names of other libraries' cases."""


class Case(NamedTuple):
    """A function to time.

    Attributes:
      call: returns the output [B, T, N, H], or the output and the gradients of q, k, v and table.
      facts: figures of the compiled program.
      like: the scheme whose numbers the results must equal.
      arrays: converts the result to a list of arrays in our layout.
    """

    call: Callable[[], Any]
    facts: Mapping[str, float] = MappingProxyType({})
    like: str = ""
    arrays: Callable[[Any], list] = jax.tree.leaves


def jax_case(f: Callable, arguments: tuple, backward: bool, like: str = "") -> Case:
    """Returns a compiled call of f, or of f and its gradients."""
    program, facts = compile_program(with_gradients(f) if backward else f, arguments)
    return Case(lambda: program(*arguments), facts, like)


def difference(case: Case, ours: Case, tolerance: float = 2e-4) -> str:
    """Returns the difference between a case and ours in words; empty if they agree.

    Args:
      case: of another library.
      ours: the case with the expected numbers.
      tolerance: the greatest accepted error, relative to the largest value.
    """
    arrays, expected = case.arrays(case.call()), ours.arrays(ours.call())
    if len(arrays) != len(expected):
        return f"it gives {len(arrays)} arrays, wanted {len(expected)}"
    coarse = expected[0].dtype == jnp.bfloat16
    names = ["the output", *(f"the gradient of {x}" for x in ("q", "k", "v", "the table"))]
    for name, a, b in zip(names, arrays, expected, strict=False):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        if a.shape != b.shape:
            return f"{name} has shape {a.shape}, wanted {b.shape}"
        error = np.abs(a - b).max() / np.abs(b).max()
        if not error <= (4e-2 if coarse else tolerance):
            return f"{name} differs by {error:.1e} of its largest value"
    return ""


def agreeing(
    cases: Mapping[str, Case], ours: Callable[[str], Case], tolerance: float = 2e-4
) -> dict[str, Case]:
    """Returns the cases with our numbers; prints the reason for leaving others out.

    Args:
      cases: of other libraries, by name.
      ours: returns our case for `Case.like`.
      tolerance: as in `difference`.
    """
    out = {}
    for name, case in cases.items():
        differs = difference(case, ours(case.like), tolerance)
        if differs:
            print(f"  {name} is left out: {differs}")
        else:
            out[name] = case
    return out


def without_bias(q, k, v):
    """Attention by `jax.nn`."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def with_matrix(q, k, v, table):
    """Attention by `jax.nn` with T5's bias as a matrix of all queries and keys."""
    bias = t5_matrix(table, q.shape[1]).astype(q.dtype)
    return jax.nn.dot_product_attention(q, k, v, bias=bias, is_causal=True)


def t5_matrix(table: jax.Array, length: int) -> jax.Array:
    """Returns T5's bias of all queries and keys, [1, N, T, T], from its table [N, buckets]."""
    positions = jnp.arange(length, dtype=jnp.int32)
    bucket = pe.t5_bucket(positions[:, None] - positions[None])
    return jnp.moveaxis(table.T[bucket], -1, 0)[None]


NAIVE = {"jax.nn without bias": without_bias, "jax.nn with T5 matrix": with_matrix}


def naive(inputs: Sequence[jax.Array], table: jax.Array, backward: bool) -> dict[str, Case]:
    """Returns the cases of `jax.nn`: without a bias, and with T5's as a matrix."""
    without, matrix = NAIVE
    return {
        without: jax_case(without_bias, tuple(inputs), backward, "none"),
        matrix: jax_case(with_matrix, (*inputs, table), backward, "t5"),
    }


def installed(library: str) -> bool:
    """Returns whether a library is installed; prints a line if not."""
    present = importlib.util.find_spec(library) is not None
    if not present:
        print(f"  {library} is left out: not installed")
    return present


def attention_peers(
    inputs: Sequence[jax.Array], table: jax.Array, backward: bool
) -> dict[str, Case]:
    """Returns the cases of the installed libraries."""
    makers = {"torch SDPA": _sdpa, "torch FlexAttention": _flex, "tokamax": _tokamax}
    return working(makers, inputs, table, backward)


def working(makers: Mapping[str, Callable], *arguments: Any) -> dict[str, Case]:
    """Returns the cases of all makers; prints the errors of makers that fail.

    Args:
      makers: functions of `arguments`, by a name that begins with the module of the library.
      *arguments: of the makers.
    """
    out = {}
    for name, make in makers.items():
        if not installed(name.partition(" ")[0]):
            continue
        try:
            out |= make(*arguments)
        except Exception as error:  # Of any library.
            says = f"{error}".strip().partition("\n")[0][:200]
            print(f"  {name} is left out: {type(error).__name__}: {says}")
    return out


class _Torch(NamedTuple):
    """Inputs [B, N, T, H] of torch's cases, and T5's table by distance."""

    inputs: list
    table: Any
    buckets: Any

    def by_distance(self):
        """Returns [N, T], the bias of each distance."""
        return self.table[:, self.buckets].contiguous()


def torch_inputs(inputs: Sequence[jax.Array], table: jax.Array, backward: bool) -> _Torch:
    import torch

    torch.set_num_threads(usable_cores())

    def tensor(x):
        return torch.from_numpy(np.array(x, np.float32))

    kind = torch.bfloat16 if inputs[0].dtype == jnp.bfloat16 else torch.float32
    ours = [tensor(x).transpose(1, 2).contiguous().to(kind) for x in inputs]
    for x in (*ours, learned := tensor(table)):
        x.requires_grad_(backward)
    distances = jnp.arange(inputs[0].shape[1], dtype=jnp.int32)
    buckets = torch.from_numpy(np.array(pe.t5_bucket(distances))).long()
    return _Torch(ours, learned, buckets)


def from_torch(result: Any) -> list:
    """Converts torch's results to our layout; the gradient of a table has two axes."""
    result = result if isinstance(result, tuple) else (result,)
    arrays = [x.detach().float().numpy() for x in result]
    return [x.swapaxes(1, 2) if x.ndim == 4 else x for x in arrays]


def _sdpa(inputs: Sequence[jax.Array], table: jax.Array, backward: bool) -> dict[str, Case]:
    import torch

    copied = torch_inputs(inputs, table, backward)
    length = inputs[0].shape[1]
    positions = torch.arange(length)
    bucket = copied.buckets[(positions[:, None] - positions[None]).clamp(min=0)]
    later = torch.ones(length, length, dtype=torch.bool).triu(1)

    def attend(biased):
        mask = None
        with torch.set_grad_enabled(backward):
            if biased:
                mask = copied.table[:, bucket].masked_fill(later, -torch.inf)[None]
                mask = mask.to(copied.inputs[0].dtype)
            out = torch.nn.functional.scaled_dot_product_attention(
                *copied.inputs, attn_mask=mask, is_causal=not biased
            )
        if not backward:
            return out
        learned = [*copied.inputs, copied.table] if biased else copied.inputs
        return (out, *torch.autograd.grad(out, learned, out.detach()))

    return {
        "torch SDPA without bias": Case(lambda: attend(False), like="none", arrays=from_torch),
        "torch SDPA with T5 matrix": Case(lambda: attend(True), like="t5", arrays=from_torch),
    }


def _flex(inputs: Sequence[jax.Array], table: jax.Array, backward: bool) -> dict[str, Case]:
    if backward:
        raise NotImplementedError("it has no backward pass on CPU (see --forward)")
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    copied = torch_inputs(inputs, table, backward)
    by_distance, length = copied.by_distance(), inputs[0].shape[1]
    causal = create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device="cpu")
    torch.compiler.reset()  # Otherwise it stops compiling after some shapes.
    call = torch.compile(flex_attention, dynamic=False)

    def t5(score, b, h, q, k):
        return score + by_distance[h, (q - k).clamp(min=0)]

    def attend(rule):
        with torch.no_grad():
            return call(*copied.inputs, score_mod=rule, block_mask=causal)

    cases = {
        "torch Flex without bias": Case(lambda: attend(None), like="none", arrays=from_torch),
        "torch Flex with T5 lookup": Case(lambda: attend(t5), like="t5", arrays=from_torch),
    }
    for case in cases.values():
        case.call()  # Compiles, or raises.
    return cases


def _tokamax(inputs: Sequence[jax.Array], table: jax.Array, backward: bool) -> dict[str, Case]:
    import tokamax
    from absl import flags

    flags.FLAGS(sys.argv[:1])  # It parses sys.argv.

    def without(q, k, v):
        return tokamax.dot_product_attention(q, k, v, is_causal=True, implementation="xla_chunked")

    return {"tokamax without bias": jax_case(without, tuple(inputs), backward, "none")}
