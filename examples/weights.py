"""State dicts of transformers as the parameters of NNX modules."""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

import posenc_jax as pe


class State:
    """A state dict that tracks which names were used."""

    def __init__(self, arrays: Mapping[str, Any]):
        self.arrays, self.used = arrays, set()

    def take(self, name: str) -> Any:
        """The array of a name.

        Raises:
          ValueError: if there is none.
        """
        if name not in self.arrays:
            raise ValueError(f"load: the state dict lacks {name!r}.")
        self.used.add(name)
        return np.asarray(self.arrays[name])


class Config(dict[str, Any]):
    """A config of a model of some types, whose keys are required.

    Raises:
      ValueError: if it is of another type; and from `config[key]`, for a missing key.
    """

    def __init__(self, config: Mapping[str, Any], *kinds: str):
        if (got := config.get("model_type")) not in kinds:
            expected = " or ".join(map(repr, kinds))
            raise ValueError(f"load: model_type must be {expected}, got {got!r}.")
        super().__init__(config)

    def __missing__(self, key: str) -> Any:
        raise ValueError(f"load: the {self['model_type']} config must have {key!r}.")


def fill(make: Callable[[nnx.Rngs], Any], weights: "Weights") -> Any:
    """A module with the weights of a state dict.

    Args:
      make: makes the module; no parameters are drawn.
      weights: the array of a path.

    Raises:
      ValueError: for weights that are missing, of another shape, or left.
    """
    graph, parameters = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    leaves = []
    for path, variable in nnx.to_flat_state(parameters):
        array = weights(path)
        if array.shape != variable.shape:
            raise ValueError(f"load: {path} must be {variable.shape}, got {array.shape}.")
        dtype = jnp.float32 if weights.offset(path) else variable.dtype  # 1 + w has few bits left.
        leaves.append((path, variable.replace(jnp.asarray(array, dtype))))
    unused = sorted(set(weights.state.arrays) - weights.state.used)
    if unused:
        more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
        raise ValueError(f"load: the model has no place for {unused[:5]}{more}.")
    return nnx.merge(graph, nnx.from_flat_state(leaves))


class Weights:
    """The arrays of a state dict by paths of our modules.

    Attributes:
      state: the state dict.
      names: {our name: name in transformers} of modules, where they differ.
      num_heads, num_kv_heads: of attention.
      norm_offset: number that the norms over D add to their scale.
      qkv: how one projection holds queries, keys and values; see `posenc_jax.split_qkv`.
      inputs_first: whether the weights of projections have their inputs first.
      unbiased: names of projections that have no bias where others of their module have one.
    """

    norm_offset = 0.0

    def __init__(
        self,
        state: State,
        names: Mapping[str, str],
        num_heads: int,
        num_kv_heads: int,
        *,
        norm_offset: float = 0.0,
        qkv: str | None = None,
        inputs_first: bool = False,
        unbiased: tuple[str, ...] = (),
    ):
        self.state, self.names = state, names
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.norm_offset, self.qkv, self.inputs_first = norm_offset, qkv, inputs_first
        self.unbiased = unbiased

    def name(self, *path: Any) -> str:
        """The name of a module in transformers."""
        return ".".join(self.names.get(part, str(part)) for part in path if part != "parameters")

    def __call__(self, path: tuple[Any, ...]) -> Any:
        """The array for a parameter."""
        *modules, leaf = path
        name = self.name(*modules)
        if modules[-1] in ("query", "key", "value"):
            heads = self.num_heads if modules[-1] == "query" else self.num_kv_heads
            return pe.heads_from_linear(self._projection(modules, leaf), heads)
        if modules[-1] in ("gate", "up") and "gate_up" in self.names:
            both = self._linear(self.name(*modules[:-1], "gate_up") + ".weight")
            return np.split(both, 2)[modules[-1] == "up"].T
        if leaf == "kernel":
            if modules[-1] == "output":  # GPT-2's has its outputs first, unlike its others.
                return self.state.take(f"{name}.weight").T
            x, is_out = self._linear(f"{name}.weight"), modules[-1] == "out"
            return pe.heads_from_linear(x, self.num_heads, output=True) if is_out else x.T
        if leaf == "bias" and modules[-1] in self.unbiased:
            return np.zeros(len(self.state.take(f"{name}.weight")))
        if leaf not in ("bias", "scale", "embedding", "table"):
            return self.state.take(f"{name}.{leaf}")  # A parameter of its own, as sinks.
        x = self.state.take(f"{name}.{'bias' if leaf == 'bias' else 'weight'}")
        return x + self.offset(path)

    def offset(self, path: tuple[Any, ...]) -> float:
        """The number that a parameter has added."""
        over_model = path[-1] == "scale" and path[-2] not in ("query_norm", "key_norm")
        return self.norm_offset if over_model else 0.0

    def _linear(self, name):
        """The weight of a projection, [outputs, inputs]; inputs of a patch are one axis."""
        x = self.state.take(name)
        return x.T if self.inputs_first else x.reshape(len(x), -1)

    def _projection(self, modules, leaf):
        """The weight or bias of queries, keys or values, outputs first."""
        *block, which = modules
        name = self.name(*block, which if self.qkv is None else "qkv")
        x = self.state.take(f"{name}.bias") if leaf == "bias" else self._linear(f"{name}.weight")
        if self.qkv is None:
            return x
        parts = pe.split_qkv(x, self.num_heads, self.num_kv_heads, order=self.qkv)
        return parts[("query", "key", "value").index(which)]
