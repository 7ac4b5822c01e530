"""Training: many optimiser steps per compiled call.

Seed s has the same initial parameters and the same batches for every scheme, so that schemes
can be compared pair by pair.
"""

import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.models.model import (
    Position,
    count_parameters,
    initialize,
    of_scheme,
    seed_key,
    structure,
)
from experiments.settings.common import Train
from experiments.tasks import Task
from experiments.training.layout import Layout, gathered


def make_optimizer(
    train: Train,
    learning_rate: jax.typing.ArrayLike,
    scheme_rate: jax.typing.ArrayLike,
    steps: jax.typing.ArrayLike,
) -> optax.GradientTransformation:
    """Returns clipped AdamW with linear warm-up and cosine decay.

    Args:
      train: all other settings.
      learning_rate: the highest; may be traced.
      scheme_rate: factor of steps of the scheme's parameters; may be traced.
      steps: where the decay ends; may be traced.
    """
    warm_up = optax.linear_schedule(0.0, 1.0, train.warmup)

    def rate(count: Any) -> Any:
        # Optax's cosine decay, whose number of steps may not be traced.
        end = steps - train.warmup
        done = jnp.minimum(jnp.float32(count - train.warmup), end)
        cosine = 0.5 * (1 + jnp.cos(jnp.pi * done * (1.0 / end)))
        decayed = (1 - train.final_rate) * cosine + train.final_rate
        return learning_rate * jnp.where(count < train.warmup, warm_up(count), decayed)

    return optax.chain(
        optax.clip_by_global_norm(train.clip),
        optax.adamw(rate, b2=train.b2, weight_decay=train.weight_decay),
        optax.masked(optax.scale(scheme_rate), of_scheme),
    )


def of_program(task: Task) -> Task:
    """Returns the task that tasks with equal training programs share.

    Rates and the number of steps are constant in it, and so are settings of the evaluation.
    """
    train = dataclasses.replace(task.train, learning_rate=1.0, scheme_rate=1.0, steps=1)
    changes = {
        f.name: f.default for f in dataclasses.fields(task) if f.name in task.measure_settings
    }
    if task.coordinates == "positions":  # Others are drawn up to the longest length.
        changes["test_lengths"] = (task.train_length,)
    return dataclasses.replace(task, train=train, **changes)


def mean_loss(
    params: nnx.State,
    graphdef: Any,
    tokens: jax.Array,
    mask: jax.Array,
    coordinates: jax.Array | None = None,
) -> jax.Array:
    """Returns the mean loss of the tokens [B, T + 1] under the mask.

    Coordinates are of the T tokens that the model reads; default: the positions.
    """
    model = nnx.merge(graphdef, params)
    inputs, targets = model.inputs_and_targets(tokens, mask)
    logits = model(inputs, coordinates)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return (losses * mask[:, 1:]).sum() / jnp.maximum(mask[:, 1:].sum(), 1.0)


# On a CPU the lower level compiles a quarter faster to code of the same speed, and XLA's own loops
# are a fifth faster than YNNPACK, to which the empty option gives no operations (jaxlib 0.10.2).
_COMPILER_OPTIONS: dict[str, dict[str, str | bool]] = {
    "cpu": {"xla_backend_optimization_level": "1", "xla_cpu_experimental_ynn_fusion_type": ""}
}


@functools.partial(jax.jit, static_argnames=("graphdef", "task", "layout"), donate_argnames="state")
def advance(
    state: Any,
    key: jax.Array,
    rates: jax.Array,
    first: jax.Array,
    data: Any,
    *,
    graphdef: Any,
    task: Task,
    layout: Layout | None = None,
) -> tuple[Any, jax.Array]:
    """Makes `task.train.steps_per_call` optimiser steps; donates the memory of `state`.

    Args:
      state: parameters and optimiser state.
      key: of the data.
      rates: [3], the learning rate, the relative rate of the scheme and the steps in all.
      first: the number of the first batch, int32.
      data: `Data.train` of the task.
      graphdef: structure of the model.
      task: the task; its rates and steps are not used.
      layout: of a model on several devices.

    Returns:
      The new state, and losses [steps].
    """

    optimizer = make_optimizer(task.train, *rates)

    def step(state, number):
        params, moments = state
        drawn = jax.random.fold_in(key, number)
        tokens, mask = task.sample(drawn, task.train.batch, task.train_length, data)
        coordinates = task.draw_coordinates(drawn, tokens, training=True)
        if layout:
            tokens, mask = layout.divide((tokens, mask))
        loss, gradient = jax.value_and_grad(mean_loss)(params, graphdef, tokens, mask, coordinates)
        updates, moments = optimizer.update(gradient, moments, params)
        state = optax.apply_updates(params, updates), moments
        return layout.constrain(state) if layout else state, loss

    return jax.lax.scan(step, state, first + jnp.arange(task.train.steps_per_call))


def new_state(params: nnx.State, task: Task) -> tuple[nnx.State, Any]:
    """Returns what `advance` takes at first."""
    optimizer = make_optimizer(task.train, 1.0, 1.0, 1.0)
    return params, optimizer.init(params)


@dataclasses.dataclass
class Trained:
    """Results of training.

    Attributes:
      params: of the model.
      parameters: how many.
      memory: bytes that the compiled call needs on a device, with parameters and data; None where
        it is not known.
      curve: "step" and "loss" [points], means over the steps between points; the last is not finite
        where training diverged.
      compile_seconds, train_seconds, cpu_seconds: wall time of both, CPU time of training.
    """

    params: nnx.State
    parameters: int
    memory: int | None
    curve: dict[str, list]
    compile_seconds: float
    train_seconds: float
    cpu_seconds: float

    @property
    def diverged(self) -> int | None:
        """The step of the curve at which the loss is not finite, None if it always is."""
        pairs = zip(self.curve["step"], self.curve["loss"], strict=True)
        return next((step for step, loss in pairs if not np.isfinite(loss)), None)


def rates_of(task: Task) -> jax.Array:
    """Returns the rates of a task, as `advance` takes them."""
    return jnp.float32([task.train.learning_rate, task.train.scheme_rate, task.train.steps])


def compiled(task: Task, position: Position, data: Any, layout: Layout | None = None) -> Any:
    """Returns `advance` compiled, of an earlier call if there was one."""
    leaves, tree = jax.tree.flatten(data)
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
    return _compiled(of_program(task), position, tree, shapes, layout)


def arguments_of(task: Task, position: Position, data: Any) -> tuple[Any, ...]:
    """Returns the shapes of the arguments of `advance`; `data` has shapes too."""
    key = jax.eval_shape(lambda: seed_key(0, "parameters"))
    params = jax.eval_shape(lambda k: initialize(task.model, position, task.vocab_size, k), key)
    state = jax.eval_shape(lambda p: new_state(p, task), params)
    rates = jax.ShapeDtypeStruct((3,), jnp.float32)
    return state, key, rates, jax.ShapeDtypeStruct((), jnp.int32), data


@functools.lru_cache(maxsize=64)
def _compiled(task: Task, position: Position, tree: Any, shapes: Any, layout: Layout | None) -> Any:
    graphdef = structure(task.model, position, task.vocab_size)
    arguments = arguments_of(task, position, jax.tree.unflatten(tree, shapes))
    if layout:
        arguments = layout.shapes(*arguments)
    lowered = advance.lower(*arguments, graphdef=graphdef, task=task, layout=layout)
    if jax.config.read("jax_disable_most_optimizations"):  # The options would raise its level.
        return lowered.compile()
    return lowered.compile(_COMPILER_OPTIONS.get(jax.default_backend()))


def _memory(call: Any) -> int | None:
    """Returns the bytes of a compiled call: arguments, results and temporaries."""
    if (analysis := call.memory_analysis()) is None:  # Not all of JAX's backends say.
        return None
    size = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes
    return size + analysis.output_size_in_bytes - analysis.alias_size_in_bytes


def train(
    task: Task,
    position: Position,
    seed: int,
    data: Any,
    *,
    checkpoint: Any = None,
    layout: Layout | None = None,
) -> Trained:
    """Trains a model, until all steps are made or the loss is not finite.

    Args:
      task: the data, the model and the settings of training.
      position: the scheme, or one layer each.
      seed: of parameters and data.
      data: `Data.train` of what `task.load` returned.
      checkpoint: stores the state, and returns the one of an interrupted call (`runs.checkpoints`).
      layout: of a model on several devices; default: on the first.
    """
    started = time.perf_counter()

    def begin(key: jax.Array) -> Any:
        return new_state(initialize(task.model, position, task.vocab_size, key), task)

    drawn, key, rates = seed_key(seed, "parameters"), seed_key(seed, "data"), rates_of(task)
    places = layout.of_state(jax.eval_shape(begin, drawn)) if layout else None
    if layout:  # No device has all of it at any time.
        state = jax.jit(begin, out_shardings=places)(drawn)
    else:
        state = begin(drawn)
    call = compiled(task, position, data, layout)
    begun, cpu = time.perf_counter(), time.process_time()
    curve: dict[str, list] = {"step": [], "loss": []}
    before = 0.0, 0.0
    if checkpoint and (stored := checkpoint.load(state)):
        state, curve, before = stored
        state = layout.put(state, places) if layout else state
    if layout:
        key, rates, data = layout.put((key, rates, data))

    def times() -> tuple[float, float]:
        wall, processors = time.perf_counter() - begun, time.process_time() - cpu
        return before[0] + wall, before[1] + processors

    done = curve["step"][-1] if curve["step"] else 0
    for first in range(done, task.train.steps, task.train.steps_per_call):
        state, losses = call(state, key, rates, np.int32(first), data)
        curve["step"].append(first + task.train.steps_per_call)
        curve["loss"].append(round(float(np.asarray(losses).mean()), 5))
        if not np.isfinite(curve["loss"][-1]):
            break
        if checkpoint:
            checkpoint.save(state, curve, times(), task.train.steps)
    train_seconds, cpu_seconds = times()
    params = gathered(state[0]) if layout else state[0]
    return Trained(
        params=params,
        parameters=count_parameters(params),
        memory=_memory(call),
        curve=curve,
        compile_seconds=begun - started,
        train_seconds=train_seconds,
        cpu_seconds=cpu_seconds,
    )
