"""Every scheme by every implementation on the device, against "reference": a part of `accelerator`.

Outputs and gradients of q, k, v, x and the parameters, at small sizes, in bfloat16 and in float32
with exact products; then decode steps after a prompt, against the same tokens at once. The error is
the norm of the difference over the norm of the expected array, the largest of all arrays. Each
comparison is a line of the file at once; --part I/N is for several processes.
"""

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import posenc_jax as pe
from experiments.bench.cases import sizes_of
from posenc_jax.kernels.checks.runner import write

BATCH, LENGTH, HEADS, DIM, STEPS = 2, 128, 2, 64, 8
SIZES = sizes_of(HEADS, DIM, LENGTH) | {"num_kv_heads": HEADS}
IMAGE: dict[str, dict[str, Any]] = {"swin": {"window": (16, 16)}}
IMAGE["swin_v2"] = {"window": (16, 16), "width": 16}
WORDS = ("pallas", "xla", "dense", None, "cudnn", "splash", "jax")
CASES = [*((x, "bfloat16") for x in WORDS), ("xla", "float32"), ("dense", "float32")]
CASES += [("decode", "float32")]
LIMITS = {"float32": 1e-4, "bfloat16": 0.2}


def scheme_of(name: str) -> pe.Scheme:
    """Returns a scheme with small sizes."""
    fields, none = dataclasses.fields(pe.SCHEMES[name]), dataclasses.MISSING
    required = [x.name for x in fields if x.default is none and x.default_factory is none]
    return pe.SCHEMES[name](**{x: SIZES[x] for x in required if x in SIZES}, **IMAGE.get(name, {}))


def error(got: Any, want: Any) -> float:
    """Returns the largest relative error of two pytrees; NaN if a number is not finite."""
    errors = []
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        errors.append(np.linalg.norm(a - b) / (np.linalg.norm(b) or 1.0))
    return float(np.max(errors))


def comparison(name: str) -> Callable[[str | None, str], float]:
    """Returns a function of an implementation, or "decode", and a dtype: the error of a scheme."""
    scheme, random = scheme_of(name), np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return random.normal(size=shape).astype(np.float32)

    tokens = [normal(BATCH, LENGTH, HEADS, DIM) for _ in range(4)]
    *qkv, weights = tokens
    x = normal(BATCH, LENGTH, HEADS * DIM)
    params = jax.tree.map(lambda y: y + 0.1 * normal(*y.shape), scheme.init(jax.random.key(1)))

    def attend(word, params, q, k, v, x, **cache):
        return pe.scheme_attention(
            scheme, params, q, k, v, x=x, is_causal=True, implementation=word, **cache
        )

    @functools.cache
    def outcome(word: str | None, dtype: str) -> Any:
        @jax.jit
        def both(weights, *arguments):
            out, pull = jax.vjp(lambda *y: attend(word, *y)[0], *arguments)
            return out, pull(weights)

        arrays = [jnp.asarray(y, dtype) for y in (weights, *qkv, x)]
        return jax.device_get(both(arrays[0], params, *arrays[1:]))

    def decoded() -> jax.Array:
        sizes: dict[str, Any] = {"num_heads": HEADS, "head_dim": DIM, "model_dim": HEADS * DIM}
        cache, first = pe.new_cache(scheme, BATCH, LENGTH, **sizes), LENGTH - STEPS
        step = jax.jit(lambda cache, *y: attend(None, params, *y, cache=cache))
        _, cache = step(cache, *(y[:, :first] for y in (*qkv, x)))
        outs = []
        for t in range(first, LENGTH):
            out, cache = step(cache, *(y[:, t : t + 1] for y in (*qkv, x)))
            outs.append(out)
        return jnp.concatenate(outs, 1)

    def run(word: str | None, dtype: str) -> float:
        want = outcome("reference", "float32")
        if word == "decode":
            return error(decoded(), want[0][:, -STEPS:])
        return error(outcome(word, dtype), want)

    return run


def main(arguments: list[str]) -> int:
    """Compares until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--log", type=Path, required=True, metavar="FILE", help="lines of JSON")
    add("--seconds", type=float, default=60.0, help="(default: 60)")
    add("--schemes", nargs="+", choices=pe.SCHEMES, default=[*pe.SCHEMES], metavar="NAME")
    add("--part", default="1/1", help="I/N: every N-th scheme, from the I-th on")
    options = parser.parse_args(arguments)
    part, parts = map(int, options.part.split("/"))
    end = time.monotonic() + options.seconds
    for name in options.schemes[part - 1 :: parts]:
        run = comparison(name) if time.monotonic() < end else None
        for word, dtype in CASES:
            row = {"scheme": name, "implementation": word or "default", "dtype": dtype}
            began = time.monotonic()
            try:
                with jax.default_matmul_precision("highest"):
                    x = run(word, dtype) if run and began < end else None
                right = "right" if x is not None and x < LIMITS[dtype] else "wrong"
                row |= {"outcome": "skipped"} if x is None else {"outcome": right, "error": x}
            except NotImplementedError:
                row["outcome"] = "refused"
            except Exception as failure:
                row |= {"outcome": "error", "error": f"{type(failure).__name__}: {failure}"[:300]}
            write(options.log, row | {"seconds": round(time.monotonic() - began, 1)})
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
