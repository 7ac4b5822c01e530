"""Times of attention on the device: a part of `accelerator`.

Programs are compiled in groups, our kernels before other libraries, --threads at once. Those of a
group are then timed in rounds, each by 20 ms of calls that end when the last one is ready; the
median of the rounds is written at once.

Causal attention has B T = 16384, N = 16, H = 128; "forward+backward" has gradients of everything
learned. The work counted is 2 B N T^2 H FLOP forward, and 3.5 times as much with the backward
pass. A bias per pair is as in AlphaFold: B = 128, T = 2048, N = 4, H = 32, not causal. A step of
decoding has one token and a full cache. All is bfloat16.
"""

import argparse
import dataclasses
import functools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import posenc_jax as pe
from experiments.bench import peers
from experiments.bench.cases import attend_with, make_arguments, positives, sizes_of
from experiments.bench.decode import our_case
from experiments.bench.peers import compile_program, t5_matrix, with_gradients
from experiments.runs.files import to_json, write_whole

FORWARD, BOTH = "forward", "forward+backward"
SCHEMES = "none", "t5", "fox", "inkling", "alibi"
Call = Callable[[], Any]
Shape = tuple[int, int, int, int]


class Sizes(NamedTuple):
    """Sizes of all problems: B T, N and H of causal attention; B, T, N and H with a bias per pair;
    B, S, N and H of the cache; rounds and their seconds."""

    causal: tuple[int, int, int] = (16384, 16, 128)
    pair: Shape = (128, 2048, 4, 32)
    cache: Shape = (4, 32768, 16, 128)
    rounds: int = 20
    seconds: float = 0.02


class Job(NamedTuple):
    """A program to time; `prepare` compiles it, and returns a call of it and figures."""

    row: dict[str, Any]
    prepare: Callable[[], tuple[Call, dict[str, Any]]]


class Times:
    """Rows of a file, which are measured for some seconds."""

    def __init__(self, path: Path, seconds: float, sizes: Sizes, threads: int):
        self.path, self.end, self.sizes = path, time.monotonic() + seconds, sizes
        self.threads, self.rows, self.failed = threads, [], set()

    def measure(self, jobs: list[Job]) -> None:
        """Compiles and times a group, without programs that failed at a smaller T."""
        jobs = [job for job in jobs if _key(job.row) not in self.failed]
        self.rows += [job.row for job in jobs]
        with ThreadPoolExecutor(self.threads) as pool:
            prepared = list(pool.map(lambda job: self._attempt(job.row, job.prepare), jobs))
        calls = []
        for row, ready in ((job.row, x) for job, x in zip(jobs, prepared, strict=True) if x):
            call, figures = ready
            row.update(figures)
            print("running", *_key(row), row["T"], flush=True)  # A crash leaves this line.
            times = self._attempt(row, lambda call=call: [_seconds(call, 1) for _ in range(2)])
            if times:
                _finish(row, times[1:])
                calls.append((row, call, []))
        for i in range(self.sizes.rounds if calls else 0):
            for row, call, took in calls[i % len(calls) :] + calls[: i % len(calls)]:
                inner = max(1, min(200, int(1e3 * self.sizes.seconds / row["ms"])))
                if time.monotonic() + inner * row["ms"] / 1e3 < self.end:
                    took.append(_seconds(call, inner))
                    _finish(row, took)
            self.save()
        for row, _, _ in calls:
            print(line(row), flush=True)
        self.save()

    def _attempt(self, row: dict[str, Any], function: Callable) -> Any:
        """Returns `function()`; None where it raises or the time is over, which the row says."""
        if time.monotonic() > self.end:
            row["skipped"] = "out of time"
            return None
        try:
            return function()
        except Exception as error:
            text = " ".join(f"{error}".split())[:400]
            refused = isinstance(error, NotImplementedError) and text.startswith("attention: ")
            row |= (
                {"unsupported": text} if refused else {"error": f"{type(error).__name__}: {text}"}
            )
            self.failed.add(_key(row))
            print(line(row), flush=True)

    def save(self) -> None:
        """Writes all rows."""
        write_whole(self.path, to_json({"times": self.rows}, indent=1) + "\n")


def _key(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["name"], row["by"], row["what"]


def _seconds(call: Call, inner: int) -> float:
    began = time.perf_counter()
    for _ in range(inner):
        result = call()
    jax.block_until_ready(result)
    return (time.perf_counter() - began) / inner


def _finish(row: dict[str, Any], took: list[float]) -> None:
    seconds = statistics.median(took)
    row |= {"ms": seconds * 1e3, "rounds": len(took)}
    if "bytes" in row:
        row["GB/s"] = row["bytes"] / seconds / 1e9
    else:
        row["TFLOP/s"] = row["flop"] / seconds / 1e12


def line(row: dict[str, Any]) -> str:
    """Returns a row as text, for the log."""
    start = f"{row['name']:15s} {row['by']:13s} {row['what']:17s} {row['T']:6d}"
    for reason in ("error", "unsupported", "skipped"):
        if reason in row:
            return f"{start}  {reason}: {row[reason][:120]}"
    rate = f"{row['TFLOP/s']:7.1f} TFLOP/s" if "TFLOP/s" in row else f"{row['GB/s']:7.0f} GB/s"
    figures = f"{row.get('compile_seconds', 0):6.1f} s, {row.get('megabytes', 0):8.1f} MB"
    return f"{start}  compiled in {figures} {row['ms']:9.3f} ms {rate}"


def passes(row: dict[str, Any], flop: float, f: Callable, arrays: Callable) -> list[Job]:
    """Returns jobs of f and of f with its gradients; `arrays` makes the arguments."""

    def prepare(f: Callable) -> tuple[Call, dict[str, Any]]:
        arguments = arrays()
        program, figures = compile_program(f, arguments)
        return lambda: program(*arguments), figures

    return [
        Job(row | {"what": what, "flop": times * flop}, functools.partial(prepare, f))
        for what, times, f in ((FORWARD, 1.0, f), (BOTH, 3.5, with_gradients(f)))
    ]


def groups(sizes: Sizes, lengths: tuple[int, ...], schemes: list[str]) -> Iterator[list[Job]]:
    """Yields groups of programs, the most important first."""

    def causal(by: str, length: int) -> list[Job]:
        return [job for name in schemes for job in scheme_jobs(name, by, shape_of(length))]

    def shape_of(length: int) -> Shape:
        tokens, heads, dim = sizes.causal
        return max(1, tokens // length), length, heads, dim

    library = "splash" if jax.default_backend() == "tpu" else "cudnn"
    for by in ("pallas", library):
        for length in lengths:
            yield causal(by, length)
    yield causal("xla", lengths[0])
    yield jax_nn_jobs(shape_of(lengths[0]))
    words = "pallas", "jax.nn cudnn", "xla", "jax.nn"
    yield [job for word in words for job in bias_jobs("pair", word, sizes.pair, False, per_pair)]
    yield decode_jobs(sizes.cache, list(dict.fromkeys(["none", *schemes])))
    for length in lengths[1:]:
        yield causal("xla", length)
        yield jax_nn_jobs(shape_of(length))


def scheme_of(name: str, shape: Shape) -> pe.Scheme:
    """Returns a scheme for a shape [B, T, N, H]."""
    known = {field.name for field in dataclasses.fields(pe.SCHEMES[name])}
    sizes = sizes_of(shape[2], shape[3], shape[1])
    return pe.SCHEMES[name](**{n: size for n, size in sizes.items() if n in known})


def scheme_jobs(name: str, by: str, shape: Shape) -> list[Job]:
    """Returns causal attention with a scheme by one of our implementations."""
    scheme, row = scheme_of(name, shape), {"name": name, "by": by, "T": shape[1]}
    arrays = functools.partial(make_arguments, scheme, shape, jnp.bfloat16)
    return passes(row, _flop(shape), attend_with(scheme, by), arrays)


def _flop(shape: Shape) -> float:
    """Returns the FLOP of causal attention."""
    batch, length, heads, dim = shape
    return 2.0 * batch * heads * length**2 * dim


def per_pair(heads: int, length: int) -> jax.Array:
    """Returns numbers [1, N, T, T]."""
    return jax.random.normal(jax.random.key(3), (1, heads, length, length), jnp.bfloat16)


def _table(heads: int, length: int) -> jax.Array:
    return pe.T5(num_heads=heads).init(jax.random.key(1))["table"]


def jax_nn_jobs(shape: Shape) -> list[Job]:
    """Returns `jax.nn`: no bias, any matrix [1, N, T, T], and T5's made from its table."""
    cases: dict[str, Any] = {"none": None, "matrix": per_pair, "t5": _table}
    if shape[1] > 8192:  # It would be twice in the memory of a GPU, with its cotangent.
        del cases["matrix"]
    words = [(name, by) for name in cases for by in ("jax.nn cudnn", "jax.nn")]
    return [job for name, by in words for job in bias_jobs(name, by, shape, True, cases[name])]


def bias_jobs(
    name: str, by: str, shape: Shape, causal: bool, learned: Callable | None
) -> list[Job]:
    """Returns attention with a bias that is `learned(N, T)`, or T5's from its table."""
    _, length, heads, _ = shape
    if by == "jax.nn cudnn" and jax.default_backend() != "gpu":
        return []

    def attend(q, k, v, *more):
        bias: Any = more[0] if more else None
        if name == "t5":
            bias = t5_matrix(bias, length).astype(jnp.bfloat16)
        if not by.startswith("jax.nn"):
            rules = pe.DenseBias(bias)
            return pe.attention(q, k, v, rules=rules, is_causal=causal, implementation=by)
        library = "cudnn" if by.endswith("cudnn") else None
        return jax.nn.dot_product_attention(
            q, k, v, bias=bias, is_causal=causal, implementation=library
        )

    def arrays() -> tuple:
        *qkv, _ = make_arguments(pe.NoPE(), shape, jnp.bfloat16)
        return *qkv, *((learned(heads, length),) if learned else ())

    row = {"name": name, "by": by, "T": length}
    return passes(row, _flop(shape) * (1 if causal else 2), attend, arrays)


def decode_jobs(shape: Shape, schemes: list[str]) -> list[Job]:
    """Returns one token against a cache, by the default implementation, "pallas" and `jax.nn`."""
    row = {"what": "decode", "T": shape[1], "bytes": 2 * 2 * math.prod(shape)}  # Of k and v.

    def prepare(name: str, by: str) -> tuple[Call, dict[str, Any]]:
        scheme = scheme_of("t5" if by == "jax.nn" else name, shape)
        arrays = make_arguments(scheme, shape, jnp.bfloat16)
        if by == "jax.nn":
            case = peers.with_cache(arrays, tokens=1)["jax.nn without bias"]
        else:
            word = None if by == "default" else by
            case = our_case(scheme, arrays, tokens=1, implementation=word)
        return case.call, dict(case.facts)

    cases = [("none", "jax.nn"), *((x, by) for by in ("default", "pallas") for x in schemes)]
    return [
        Job(row | {"name": name, "by": by}, functools.partial(prepare, name, by))
        for name, by in cases
    ]


def main(arguments: list[str]) -> int:
    """Measures everything that the time allows."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--json", type=Path, required=True, metavar="FILE", help="the rows")
    add("--seconds", type=float, default=140.0, help="(default: 140)")
    add("--lengths", type=positives, default=(4096, 16384), help="T (default: 4096,16384)")
    add("--schemes", nargs="+", choices=pe.SCHEMES, default=SCHEMES, metavar="NAME")
    add("--threads", type=int, default=4, help="programs that are compiled at once (default: 4)")
    options = parser.parse_args(arguments)
    sizes = Sizes()
    times = Times(options.json, options.seconds, sizes, options.threads)
    for jobs in groups(sizes, options.lengths, options.schemes):
        times.measure(jobs)
    times.save()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
