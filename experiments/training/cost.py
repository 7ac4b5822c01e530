"""The cost of a training step on a GPU, counted from its program without compiling it.

Matrix products have FLOPs. Products, reductions, gathers, scatters, sorts and the loop over steps
read and write bytes, and are counted as operations; elementwise ones are taken to be fused into
them. Attention without rules is taken to be a kernel that keeps arrays of T x T on the chip; with
rules it is counted as the reference computes it.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import posenc_jax as pe
from experiments.models.model import LanguageModel, Position
from experiments.tasks import Task
from experiments.training.train import advance, arguments_of, of_program

_OPERATIONS = (
    "reduce_",
    "arg",
    "cum",
    "gather",
    "scatter",
    "sort",
    "dynamic_update_slice",
    "random_",
)


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of a step of one model.

    Attributes:
      flops: of matrix products.
      traffic: bytes that are read and written.
      operations: the number of operations that are not elementwise.
      parameters: of the model.
    """

    flops: float
    traffic: float
    operations: float
    parameters: int


@functools.lru_cache(maxsize=256)
def of_step(task: Task, position: Position) -> Cost:
    """Returns the cost of an optimiser step.

    Args:
      task: the model and the batch.
      position: the scheme, or one layer each.
    """
    try:
        whole = _count(task, position, _WithoutRules())
    except NotImplementedError:  # It has rules.
        return _count(task, position, "reference")
    # Half of the length and twice the batch have the same tokens, and half of the pairs.
    train = dataclasses.replace(task.train, batch=2 * task.train.batch)
    halves = dataclasses.replace(task, train=train, train_length=task.train_length // 2)
    of_pairs = 2 * (whole.traffic - _count(halves, position, _WithoutRules()).traffic)
    return dataclasses.replace(whole, traffic=whole.traffic - max(of_pairs, 0.0))


class _WithoutRules(pe.Implementation):
    """`jax.nn.dot_product_attention`, for the calls that a kernel without rules computes."""

    name = "without-rules"

    def supports(self, problem: pe.Problem) -> str | None:
        p = problem
        others = p.mask, p.softcap, p.sinks, p.dropout_seeds, p.q_segment_ids, p.prefix_length
        plain = not p.rules and p.contiguous and all(each is None for each in others)
        if plain and p.q.shape[3] == p.v.shape[3]:
            return None
        return "it has a causal mask and a window alone, and one head dim"

    def __call__(self, problem: pe.Problem) -> tuple[jax.Array, jax.Array]:
        p = problem
        left, right = (side if side >= 0 else p.k.shape[1] for side in p.window or (-1, -1))
        out = jax.nn.dot_product_attention(
            p.q, p.k, p.v, is_causal=p.is_causal, scale=p.scale, local_window_size=(left, right)
        )
        return out, jnp.full(out.shape[:3], jnp.nan)


def _count(task: Task, position: Position, attention: str | pe.Implementation) -> Cost:
    task = of_program(task)
    task = dataclasses.replace(task, train=dataclasses.replace(task.train, steps_per_call=1))
    model = nnx.eval_shape(
        lambda key: LanguageModel(task.model, position, task.vocab_size, key), jax.random.key(0)
    )
    for block in model.blocks:
        block.attention.implementation = attention
    text = jax.ShapeDtypeStruct((2**16,), jnp.uint8) if hasattr(task, "corpus") else None
    arguments = arguments_of(task, position, 1, text)
    traced = advance.trace(*arguments, graphdef=nnx.graphdef(model), task=task)
    flops, traffic, operations = map(float, _of(traced.jaxpr.jaxpr))
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(arguments[0][0]))
    return Cost(flops, traffic, operations, parameters)


def _of(jaxpr: Any) -> np.ndarray:
    """Returns FLOPs, bytes and operations of a jaxpr."""
    total = np.zeros(3)
    for equation in jaxpr.eqns:
        name, cost = equation.primitive.name, np.zeros(3)
        inner = [_of(each) for each in _jaxprs(equation.params)]
        if name == "cond":
            cost = max(inner, key=lambda each: tuple(each))
        elif inner:
            times = equation.params.get("length", 1) if name == "scan" else 1
            cost = times * np.sum(inner, axis=0)
            if name == "scan":
                cost[1] += times * _bytes(equation)
        elif name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            inputs = math.prod(shape[axis] for axis in contracted)
            flops = 2.0 * inputs * math.prod(equation.outvars[0].aval.shape)
            cost = np.array([flops, _bytes(equation), 1.0])
        elif name.startswith(_OPERATIONS):
            cost = np.array([0.0, _bytes(equation), 1.0])
        total += cost
    return total


def _jaxprs(params: dict[str, Any]) -> Iterator[Any]:
    """Yields the jaxprs among the parameters of an equation, without rules of differentiation."""
    for name, value in params.items():
        for each in value if isinstance(value, tuple | list) else (value,):
            if hasattr(each, "eqns"):
                yield each
            elif hasattr(each, "jaxpr") and name != "transpose_jaxpr":
                yield each.jaxpr


def _bytes(equation: Any) -> float:
    variables = [*equation.invars, *equation.outvars]
    return float(sum(math.prod(v.aval.shape) * _itemsize(v.aval) for v in variables))


def _itemsize(aval: Any) -> int:
    return getattr(aval.dtype, "itemsize", 4)
