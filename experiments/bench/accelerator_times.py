"""Times of attention on the device: a part of `accelerator`.

Programs are compiled in groups, our kernels before other libraries, four at once. Those of a
group are then timed in rounds, each by 20 ms of calls that end when the last one is ready; the
median of the rounds is written at once. If the file has groups of a process that was lost, this one
goes on after them.

Causal attention has B T = 16384, N = 16, H = 128; "forward+backward" has gradients of everything
learned. The work counted is 2 B N T^2 H FLOP forward, and 3.5 times as much with the backward
pass. A bias per pair is as in AlphaFold: B = 128, T = 2048, N = 4, H = 32, not causal. A step of
decoding has one token and a full cache; the prefill and one of the caches have the shape of a
released model, 9 heads with 3 heads of keys of 64. All is bfloat16. On a CPU sizes are tiny.
"""

import argparse
import dataclasses
import faulthandler
import functools
import itertools
import json
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
from experiments.bench.cases import attend_with, positives, sizes_of
from experiments.bench.decode import jax_nn_case, our_case
from experiments.bench.peers import compile_program, t5_matrix, with_gradients
from experiments.runs.files import to_json, write_whole

FORWARD, BOTH = "forward", "forward+backward"
SCHEMES = "none", "t5", "fox", "inkling", "alibi"
TIMED = (*pe.SCHEMES, "shaw_keys")
NO_ANSWER = 20.0
"""Seconds after which calls end the process."""
Call = Callable[[], Any]


class Sizes(NamedTuple):
    """Sizes of all problems: B T, N and H of causal attention; B, T, N and H with a bias per pair;
    B, S, N, K and H of caches; rows of a matrix; rounds and their seconds."""

    causal: tuple[int, ...] = (16384, 16, 128)
    pair: tuple[int, ...] = (128, 2048, 4, 32)
    released: tuple[int, ...] = (8, 8192, 9, 3, 64)
    cache: tuple[int, ...] = (4, 32768, 16, 16, 128)
    matmul: int = 8192
    rounds: int = 20
    seconds: float = 0.02


DRY = Sizes((256, 2, 16), (2, 64, 2, 16), (1, 128, 3, 1, 16), (1, 256, 2, 2, 16), 256, 2, 1e-3)
"""Sizes on a CPU, where no time is of use."""


class Job(NamedTuple):
    """A program to time; `prepare` compiles it, and returns a call of it and figures."""

    row: dict[str, Any]
    prepare: Callable[[], tuple[Call, dict[str, Any]]]


class Times:
    """Rows of a file, which are measured for some seconds; `groups` of jobs were begun."""

    def __init__(self, path: Path, seconds: float, sizes: Sizes, threads: int):
        self.path, self.end, self.sizes = path, time.monotonic() + seconds, sizes
        before = json.loads(path.read_text("utf-8")) if path.exists() else {}
        self.threads, self.rows = threads, before.get("times", [])
        self.groups = before.get("groups", 0)
        for row in self.rows:
            if not row.keys() & {"ms", "error", "unsupported"}:
                row.setdefault("skipped", "the process ended")
        self.failed = {_key(row) for row in self.rows if "error" in row}

    def measure(self, jobs: list[Job]) -> None:
        """Compiles and times a group, without programs that failed at a smaller T."""
        jobs = [job for job in jobs if _key(job.row) not in self.failed]
        self.rows += [job.row for job in jobs]
        self.groups += 1
        self.save()
        with ThreadPoolExecutor(self.threads) as pool:
            prepared = list(pool.map(self._prepared, jobs))
        calls = [(job.row, call, []) for job, call in zip(jobs, prepared, strict=True) if call]
        calls = [x for x in calls if self._runs(*x[:2])]
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

    def _prepared(self, job: Job) -> Call | None:
        if time.monotonic() > self.end:
            job.row["skipped"] = "out of time"
            return None
        try:
            call, figures = job.prepare()
        except Exception as error:
            return self._fail(job.row, error)
        job.row.update(figures)
        return call

    def _runs(self, row: dict[str, Any], call: Call) -> bool:
        row["error"] = "its process ended"  # A crash leaves this.
        self.save()
        try:
            _seconds(call, 1)
            del row["error"]
            _finish(row, [_seconds(call, 1)])
        except Exception as error:
            self._fail(row, error)
            self.save()
            if "CUDA_ERROR" in str(error):
                raise  # The GPU answers no further call of this process.
        return "ms" in row

    def _fail(self, row: dict[str, Any], error: Exception) -> None:
        text = " ".join(f"{error}".split())[:400]
        self.failed.add(_key(row))
        if isinstance(error, NotImplementedError) and text.startswith("attention: "):
            row["unsupported"] = text
        else:
            row["error"] = f"{type(error).__name__}: {text}"
            print(line(row), flush=True)

    def save(self) -> None:
        """Writes all rows."""
        content = {"groups": self.groups, "times": self.rows}
        write_whole(self.path, to_json(content, indent=1) + "\n")


def _key(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["name"], row["by"], row["what"]


def _seconds(call: Call, inner: int) -> float:
    faulthandler.dump_traceback_later(NO_ANSWER, exit=True)
    began = time.perf_counter()
    for _ in range(inner):
        result = call()
    jax.block_until_ready(result)
    faulthandler.cancel_dump_traceback_later()
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


@functools.cache
def random(shape: tuple[int, ...], seed: int = 0) -> jax.Array:
    """Returns a bfloat16 array, which all programs share."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


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

    def shape_of(length: int) -> tuple[int, ...]:
        tokens, heads, dim = sizes.causal
        return max(1, tokens // length), length, heads, heads, dim

    n, row = sizes.matmul, {"name": "matmul", "by": "jnp.dot", "T": sizes.matmul}
    yield passes(row, 2.0 * n**3, jnp.dot, lambda: (random((n, n)),) * 2)[:1]
    library = "splash" if jax.default_backend() == "tpu" else "cudnn"
    for by in ("pallas", library):
        for length in lengths:
            yield causal(by, length)
    yield causal("xla", lengths[0])
    yield jax_nn_jobs(shape_of(lengths[0]))
    _, length, heads, _ = sizes.pair
    words = "pallas", "jax.nn cudnn", "xla", "jax.nn"
    bias = functools.partial(random, (1, heads, length, length))
    yield bias_jobs("pair", words, sizes.pair, False, bias, lambda x: x)
    prefill = [scheme_jobs("rope", by, sizes.released)[0] for by in ("default", "pallas", "xla")]
    yield [job._replace(row=job.row | {"what": "prefill"}) for job in prefill]
    for cache in (sizes.released, sizes.cache):
        yield decode_jobs(cache, list(dict.fromkeys(["none", *schemes])))
    for length in lengths[1:]:
        yield causal("xla", length)
        yield jax_nn_jobs(shape_of(length))


def arrays_of(scheme: pe.Scheme, shape: tuple[int, ...]) -> tuple:
    """Returns q, k, v, parameters, and x if the scheme reads it, for B, T, N, K and H."""
    batch, length, heads, kv_heads, dim = shape
    x = (random((batch, length, heads * dim)),) if scheme.traits.reads_x else ()
    qkv = [random((batch, length, n, dim), i) for i, n in enumerate((heads, kv_heads, kv_heads))]
    return *qkv, params_of(scheme), *x


def scheme_of(name: str, shape: tuple[int, ...]) -> pe.Scheme:
    """Returns a scheme for these sizes; "shaw_keys" is Shaw's without vectors of values."""
    cls, settings = (pe.Shaw, {"values": False}) if name == "shaw_keys" else (pe.SCHEMES[name], {})
    known = {field.name for field in dataclasses.fields(cls)}
    sizes = sizes_of(shape[2], shape[4], shape[1])
    return cls(**{n: size for n, size in sizes.items() if n in known}, **settings)


@functools.cache
def params_of(scheme: pe.Scheme) -> Any:
    """Returns parameters; some begin at zero, where no error of a gradient would show."""
    leaves, tree = jax.tree.flatten(scheme.init(jax.random.key(1)))
    noise = [0.1 * jax.random.normal(jax.random.key(2 + i), x.shape) for i, x in enumerate(leaves)]
    return jax.tree.unflatten(tree, [x + y for x, y in zip(leaves, noise, strict=True)])


def scheme_jobs(name: str, by: str, shape: tuple[int, ...]) -> list[Job]:
    """Returns causal attention with a scheme by one of our implementations."""
    batch, length, heads, _, dim = shape
    scheme = scheme_of(name, shape)
    attend = attend_with(scheme, None if by == "default" else by)
    row, flop = {"name": name, "by": by, "T": length}, 2.0 * batch * heads * length**2 * dim
    return passes(row, flop, attend, lambda: arrays_of(scheme, shape))


def jax_nn_jobs(shape: tuple[int, ...]) -> list[Job]:
    """Returns `jax.nn`: no bias, any matrix [1, N, T, T], and T5's made from its table."""
    batch, length, heads, _, dim = shape
    words, sizes = ("jax.nn cudnn", "jax.nn"), (batch, length, heads, dim)

    def table() -> jax.Array:
        return params_of(pe.T5(num_heads=heads))["table"]

    def t5(table: jax.Array) -> jax.Array:
        return t5_matrix(table, length).astype(jnp.bfloat16)

    jobs = bias_jobs("none", words, sizes, True, None, lambda: None)
    if length <= 8192:  # Twice in the memory of a GPU, with its cotangent.
        matrix = functools.partial(random, (1, heads, length, length))
        jobs += bias_jobs("matrix", words, sizes, True, matrix, lambda x: x)
    return jobs + bias_jobs("t5", words, sizes, True, table, t5)


def bias_jobs(
    name: str,
    words: tuple[str, ...],
    shape: tuple[int, ...],
    causal: bool,
    learned: Callable[[], Any] | None,
    bias_of: Callable,
) -> list[Job]:
    """Returns attention with a bias that `bias_of` makes from an array, by some words."""
    batch, length, heads, dim = shape
    words = tuple(x for x in words if jax.default_backend() == "gpu" or x != "jax.nn cudnn")

    def attend(q, k, v, *more, word):
        bias = bias_of(*more)
        if not word.startswith("jax.nn"):
            rules = pe.DenseBias(bias)
            return pe.attention(q, k, v, rules=rules, is_causal=causal, implementation=word)
        library = "cudnn" if word.endswith("cudnn") else None
        return jax.nn.dot_product_attention(
            q, k, v, bias=bias, is_causal=causal, implementation=library
        )

    def arrays() -> tuple:
        return *(random(shape, n) for n in range(3)), *((learned(),) if learned else ())

    flop = (2.0 if causal else 4.0) * batch * heads * length**2 * dim
    rows = [{"name": name, "by": word, "T": length} for word in words]
    return [
        job
        for row in rows
        for job in passes(row, flop, functools.partial(attend, word=row["by"]), arrays)
    ]


def decode_jobs(shape: tuple[int, ...], schemes: list[str]) -> list[Job]:
    """Returns one token against a cache, by the default implementation and `jax.nn`."""
    batch, slots, heads, kv_heads, dim = shape
    row = {"what": f"decode, {heads} heads", "T": slots}
    row["bytes"] = 2 * 2 * math.prod((batch, slots, kv_heads, dim))  # bfloat16, k and v.

    def prepare(name: str, by: str) -> tuple[Call, dict[str, Any]]:
        scheme = scheme_of(name, shape)
        arrays = arrays_of(scheme, shape)
        if by == "jax.nn":
            case = jax_nn_case(*arrays[:3])
        else:
            case = our_case(scheme, arrays)
        return case.call, dict(case.facts)

    cases = [("none", "jax.nn"), *((x, "default") for x in schemes)]
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
    add("--schemes", nargs="+", choices=TIMED, default=SCHEMES, metavar="NAME")
    add("--without", nargs="*", default=(), help="implementations to leave out")
    options = parser.parse_args(arguments)
    sizes = DRY if jax.default_backend() == "cpu" else Sizes()
    times = Times(options.json, options.seconds, sizes, threads=4)
    every = groups(sizes, options.lengths, options.schemes)
    for jobs in itertools.islice(every, times.groups, None):
        times.measure([job for job in jobs if job.row["by"] not in options.without])
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
