"""Correctness and times of attention on a GPU or a TPU: `make gpu`, `make tpu`.

    python3 -m experiments.bench.accelerator --json results/gpu.json

It needs jax and numpy alone. Every result is written to the JSON file at once; a measurement
beyond --minutes is recorded as skipped. A program that fails to compile or to run is recorded with
its error, and not tried at a larger T. One that does not answer in two minutes is recorded, and
ends the measurements.

1. Device, versions, and the steps of `posenc_jax.prove.contact`, each family in a process of its
   own: parts of the kernels, both passes and decoding against float64, and tiles of the default
   size. A failure is one line, with its first wrong row, head and tile. The lines are in FILE with
   the suffix .jsonl, what the processes print is in .txt.
2. The rate of a bfloat16 matmul; `share` is relative to it.
3. Times of causal attention, forward and forward+backward (gradients of everything learned; a
   scheme's projections are included), and of other libraries. Programs of one T are timed in
   rounds, each once per round, by --inner-ms of calls that end when the last one is ready. The
   median of the rounds is reported. The work counted is 2 B N T^2 H FLOP forward, and 3.5 times
   as much with the backward pass. `/none` is the ratio to the time without a scheme. `compile s`
   is tracing and compiling, while --threads programs are compiled at once. Then attention with a
   bias per pair, as in AlphaFold: B = 128, T = 2048, N = 4, H = 32, not causal.
4. One token against a cache of --slots, one program after the other, by default and by "pallas";
   its rate counts the bytes of keys and values. All times are of bfloat16.
5. The times of tokamax on an H100 beside these, and whether the goals were reached.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp

import posenc_jax as pe
from experiments.bench import anchors, decode_peers
from experiments.bench.accelerator_peers import Case, peers
from experiments.bench.anchors import BOTH, FORWARD
from experiments.bench.cases import attend_with, positive, positives, sizes_of
from experiments.bench.compile import compile_program, with_gradients
from experiments.bench.decode import our_case
from experiments.errors import ConfigError, ExperimentError
from experiments.runs.environment import processor, usable_cores, versions
from experiments.runs.files import to_json, write_whole
from posenc_jax.engine.api import IMPLEMENTATIONS
from posenc_jax.prove import contact

SCHEMES = (
    *("none", "t5", "fox", "alibi", "inkling", "shaw_keys", "rope", "kerple", "fire"),
    *("transformer_xl", "deberta", "shaw", "stick_breaking", "cope", "path"),
)
"""In the order in which they are measured: the last are left out when time is short."""
NO_ANSWER = 120.0
"""Seconds after which calls of a program are given up."""
LIBRARIES = ("numpy", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "tokamax")


class Job(NamedTuple):
    """A program to compile; arguments are arrays, or shapes of arrays."""

    row: dict
    case: Case
    f: Callable
    arguments: tuple


class Report:
    """The measurements, kept in a file."""

    def __init__(self, path: Path | None, minutes: float):
        self.path, self.began, self.seconds = path, time.monotonic(), 60 * minutes
        self.numbers: dict[str, Any] = {"steps": [], "times": []}
        self.log = path.with_suffix(".jsonl") if path else None

    def until(self, share: float) -> float:
        """Returns the time at which a share of the minutes is over."""
        return self.began + share * self.seconds

    @contextlib.contextmanager
    def running(self, row: dict, *, first: bool) -> Generator[None]:
        """Ends this process if calls of a row's program do not end in time.

        A crash of the process leaves its name: before the first call it is written to the log.
        """
        if first and self.log:
            contact.write(self.log, {"running": " ".join(map(str, (*_key(row), row["T"])))})
        clock = threading.Timer(NO_ANSWER, self._give_up, [row])
        clock.daemon = True
        clock.start()
        try:
            yield
        finally:
            clock.cancel()

    def _give_up(self, row: dict) -> None:
        row["error"] = f"no answer in {NO_ANSWER:g} s"
        if not any(other is row for other in self.numbers["times"]):
            self.numbers["times"].append(row)
        self.save()
        try:
            show(self)
            print(line(row), "Other programs are not timed.", sep="\n", flush=True)
        finally:
            os._exit(1)  # A thread that waits for the device cannot be stopped.

    def add(self, row: dict) -> None:
        """Keeps the row of a time, and prints it."""
        self.numbers["times"].append(row)
        if "unsupported" not in row:
            print(line(row), flush=True)
        self.save()

    def save(self) -> None:
        self.numbers["seconds"] = time.monotonic() - self.began
        if self.path:
            write_whole(self.path, to_json(self.numbers, indent=1) + "\n")


def main(arguments: list[str]) -> int:
    """Runs the program; returns 2 for errors of the user, 1 if a step failed."""
    try:
        options = _parser().parse_args(arguments)
        if options.replot:
            draw(_read(options.replot), options.plot)
            return 0
        return run(options)
    except (ExperimentError, contact.DeviceError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 130


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m experiments.bench.accelerator",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--minutes", type=float, default=8.0, help="time in all (default: 8)")
    add("--on", choices=("cpu", "gpu", "tpu"), help="an error where JAX runs on another platform")
    lengths = 2048, 4096, 8192, 16384
    add("--lengths", type=positives, default=lengths, help=f"T (default: {lengths})")
    add("--steps-seconds", type=float, default=240.0, help="for all steps (default: 240); 0: none")
    add("--batch", type=positive, help="default: 16384 tokens, at most 8 rows; 4 for decoding")
    sizes = {"heads": 16, "head-dim": 128, "slots": 32768, "pair-batch": anchors.PAIR["batch"]}
    sizes |= {"pair-length": anchors.PAIR["length"], "rounds": 20, "inner-ms": 20}
    sizes |= {"threads": min(8, usable_cores())}
    for name, size in sizes.items():
        add(f"--{name}", type=positive, default=size, help=f"default: {size}")
    add("--schemes", nargs="+", choices=SCHEMES, default=SCHEMES, metavar="NAME")
    add("--json", type=Path, metavar="FILE", help="write the numbers there")
    add("--plot", type=Path, metavar="FILE", help="draw them there as SVG, with matplotlib")
    add("--replot", type=Path, metavar="JSON", help="measure nothing, draw the numbers of a file")
    return parser


def _read(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def run(options: argparse.Namespace) -> int:
    """Measures everything that the time allows."""
    report = Report(options.json, options.minutes)
    with tempfile.TemporaryDirectory() as folder:
        log = report.log or Path(folder, "steps.jsonl")
        chip = contact.Contact(log, min(options.steps_seconds, report.seconds))
        report.numbers["machine"] = chip.machine() | versions(LIBRARIES)
        report.numbers["machine"] |= {"processor": processor(), "cores": usable_cores()}
        platform = report.numbers["machine"]["device"].partition(":")[0]
        if options.on not in (None, platform):
            raise ConfigError(f"--on {options.on}: JAX runs on {platform} here")
        for name, value in report.numbers["machine"].items():
            print(f"{name}: {value}")
        report.numbers["options"] = {name: str(value) for name, value in vars(options).items()}
        report.save()
        steps = report.numbers["steps"] = chip.run(platform)
    report.save()
    ended = {row["implementation"] for row in steps if _lost_the_chip(row)}
    for word in sorted(ended):
        print(f"{word} is not timed: a step of it did not end; --steps-seconds 0 times it anyway")
    schemes = {name: _scheme(name, options) for name in options.schemes}
    cases = [case for case in cases_of(schemes) if case.by not in ended]
    measure_peak(report, options)
    for i, length in enumerate(options.lengths):
        now, end = time.monotonic(), report.until(0.8)
        measure(report, options, cases, length, now + (end - now) / (len(options.lengths) - i))
    measure_pair(report, options, ended, report.until(0.88))
    decode(report, options, cases, report.until(0.97))
    show(report)
    if options.plot:
        draw(report.numbers, options.plot)
    return int(any(row["outcome"] in contact.FAILED for row in steps))


def _lost_the_chip(row: dict[str, Any]) -> bool:
    """Returns whether a step ended in a way that may lose the numbers of this process too."""
    return row["outcome"] in ("hang", "died") or "CUDA_ERROR" in row.get("place", "")


def _scheme(name: str, options: argparse.Namespace) -> pe.Scheme:
    cls, settings = (pe.Shaw, {"values": False}) if name == "shaw_keys" else (pe.SCHEMES[name], {})
    sizes = sizes_of(options.heads, options.head_dim, max(options.lengths))
    fields = {field.name for field in dataclasses.fields(cls)}
    return cls(**{n: size for n, size in sizes.items() if n in fields}, **settings)


def cases_of(schemes: dict[str, pe.Scheme]) -> list[Case]:
    """Returns the cases of schemes by every implementation, kernels first."""

    @functools.partial(jax.jit, static_argnums=0)
    def params_of(scheme: pe.Scheme) -> Any:
        # Some begin at zero, where no error of a gradient would show.
        leaves, tree = jax.tree.flatten(scheme.init(jax.random.key(1)))
        keys = jax.random.split(jax.random.key(2), len(leaves) or 1)
        noise = (0.1 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=False))
        return jax.tree.unflatten(tree, [x + y for x, y in zip(leaves, noise, strict=True)])

    words = sorted(IMPLEMENTATIONS, key=lambda word: word not in ("pallas", "xla"))
    return [
        Case(name, by, attend_with(scheme, by), params, scheme)
        for name, scheme in schemes.items()
        for params in [params_of(scheme)]
        for by in words
    ]


def inputs(shape: tuple[int, int, int, int], dtype: Any) -> tuple:
    """Returns q, k, v [B, T, N, H] and x [B, T, N * H]."""
    shapes = *(shape,) * 3, (*shape[:2], shape[2] * shape[3])
    keys = jax.random.split(jax.random.key(0), 4)
    return tuple(jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True))


def _arguments(case: Case, arrays: tuple) -> tuple:
    return (*arrays[:3], case.params, *(arrays[3:] if case.scheme.traits.reads_x else ()))


def compiled(jobs: Sequence[Job], threads: int, end: float) -> Iterator[tuple[Job, Any]]:
    """Yields each job with its program, or None; figures and reasons are put into its row."""

    def one(job: Job) -> tuple[Job, Any]:
        if time.monotonic() > end:
            job.row["skipped"] = "out of time"
            return job, None
        try:
            program, facts = compile_program(job.f, job.arguments)
        except Exception as error:
            job.row.update(reason(error))
            return job, None
        job.row.update(facts)
        return job, program

    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(one, jobs)


def reason(error: Exception) -> dict[str, str]:
    """Returns an error as text; what `supports` says is no failure."""
    text = " ".join(f"{error}".split())[:400]
    if isinstance(error, NotImplementedError) and text.startswith("attention: implementation="):
        return {"unsupported": text}
    return {"error": f"{type(error).__name__}: {text}"}


def time_rounds(
    report: Report, running: list[tuple[dict, Callable]], options: argparse.Namespace, end: float
) -> None:
    """Times programs in rounds, and puts the medians into their rows.

    Args:
      report: saved after every round.
      running: rows, and functions that make the arguments and return a call of the program.
      options: of the command line.
      end: when to stop; a call that is not expected to end before it is skipped.
    """
    calls = []
    for row, prepare in running:
        if time.monotonic() + 2 * row.get("expected ms", 0) / 1e3 > end:
            row["skipped"] = "out of time"
            continue
        try:
            with report.running(row, first=True):
                call = prepare()
                jax.block_until_ready(call())
                once = _seconds(call, 1)
        except Exception as error:
            row |= reason(error)
            continue
        _finish(report, row, [once])
        calls.append((row, call, max(1, min(200, int(options.inner_ms / 1e3 / once))), []))
    for i in range(options.rounds if calls else 0):
        first = i % len(calls)
        for row, call, inner, took in calls[first:] + calls[:first]:
            if time.monotonic() + inner * row["ms"] / 1e3 > end:
                continue
            with report.running(row, first=False):
                took.append(_seconds(call, inner))
            _finish(report, row, took)
        report.save()


def _seconds(call: Callable, inner: int) -> float:
    began = time.perf_counter()
    for _ in range(inner):
        result = call()
    jax.block_until_ready(result)
    return (time.perf_counter() - began) / inner


def _finish(report: Report, row: dict, took: list[float]) -> None:
    seconds = statistics.median(took)
    row |= {"ms": seconds * 1e3, "rounds": len(took)}
    if "bytes" in row:
        row["GB/s"] = row["bytes"] / seconds / 1e9
    else:
        row["TFLOP/s"] = row["flop"] / seconds / 1e12
        row["share"] = row["TFLOP/s"] / report.numbers.get("peak TFLOP/s", row["TFLOP/s"])


def measure_peak(report: Report, options: argparse.Namespace) -> None:
    """Measures the rate of a bfloat16 matmul."""
    n = 1024 if jax.default_backend() == "cpu" else 8192
    row = {"name": "matmul", "by": "jnp.dot", "what": FORWARD, "T": n, "flop": 2 * n**3}
    x = jax.random.normal(jax.random.key(0), (n, n), jnp.bfloat16)
    multiply = jax.jit(jnp.dot)
    end = time.monotonic() + 0.05 * report.seconds
    time_rounds(report, [(row, lambda: lambda: multiply(x, x))], options, end)
    report.numbers["peak TFLOP/s"] = row.get("TFLOP/s", float("nan"))
    report.add(row)


def batch_of(options: argparse.Namespace, length: int) -> int:
    """Returns B: the tokens of the times of others, where --batch does not say otherwise."""
    return options.batch or max(1, min(8, anchors.TOKENS // length))


def measure(
    report: Report, options: argparse.Namespace, cases: list[Case], length: int, end: float
) -> None:
    """Times everything at one length."""
    shape = batch_of(options, length), length, options.heads, options.head_dim
    make_inputs = functools.partial(inputs, shape, jnp.bfloat16)
    table = pe.T5(num_heads=options.heads).init(jax.random.key(1))["table"]
    cases = cases + peers(length, options.heads, table, jax.default_backend())
    early = {"none", "t5", "matrix"}
    cases.sort(key=lambda case: (case.by == "dense", case.name not in early))
    forward = 2 * shape[0] * options.heads * length**2 * options.head_dim
    _time_cases(report, options, cases, (length, forward), make_inputs, end)


def measure_pair(
    report: Report, options: argparse.Namespace, without: set[str], end: float
) -> None:
    """Times attention with a bias [1, N, T, T], not causal, and its gradient."""
    batch, length = options.pair_batch, options.pair_length
    heads, dim = anchors.PAIR["heads"], anchors.PAIR["dim"]
    make_inputs = functools.partial(inputs, (batch, length, heads, dim), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((1, heads, length, length), jnp.bfloat16)
    words = [word for word in ("pallas", "xla") if word not in without]
    libraries = ["jax.nn"] + ["jax.nn cudnn"] * (jax.default_backend() == "gpu")

    def ours(word):
        def attend(q, k, v, bias):
            return pe.attention(q, k, v, rules=pe.DenseBias(bias), implementation=word)

        return attend

    cases = [Case("pair", word, ours(word), bias) for word in words]
    for word in libraries:
        library = "cudnn" if word.endswith("cudnn") else None
        f = functools.partial(jax.nn.dot_product_attention, implementation=library)
        cases.append(Case("pair", word, f, bias))
    forward = 4.0 * batch * heads * length**2 * dim
    _time_cases(report, options, cases, (length, forward), make_inputs, end)


def _time_cases(
    report: Report,
    options: argparse.Namespace,
    cases: list[Case],
    work: tuple[int, float],
    make_inputs: Callable[[], tuple],
    end: float,
) -> None:
    """Compiles and times the two passes of cases.

    Args:
      report, options: as for `measure`.
      cases: parameters that are shapes become zeros.
      work: T and the FLOP forward.
      make_inputs: returns the arrays.
      end: when to stop.
    """
    length, forward = work
    arrays = functools.cache(make_inputs)
    zeros = functools.cache(jnp.zeros)  # All programs share a matrix.
    earlier = {_key(row): row for row in report.numbers["times"] if "skipped" not in row}
    jobs = []
    for case in cases:
        for what, flop in ((FORWARD, forward), (BOTH, 3.5 * forward)):
            row = {"name": case.name, "by": case.by, "what": what, "T": length, "flop": flop}
            before = earlier.get(_key(row), {})
            if case.by == "reference" or {"error", "unsupported"} & {*before}:
                continue
            if "ms" in before:
                row["expected ms"] = before["ms"] * flop / before["flop"]
            f = with_gradients(case.attend) if what == BOTH else case.attend
            jobs.append(Job(row, case, f, _arguments(case, jax.eval_shape(make_inputs))))

    def real(x: Any) -> jax.Array:
        return zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x

    def prepare(program: Any, case: Case) -> Callable:
        arguments = jax.tree.map(real, _arguments(case, arrays()))
        return lambda: program(*arguments)

    share, running = end - time.monotonic(), []
    for job, program in compiled(jobs, options.threads, end - 0.4 * share):
        report.add(job.row)
        if program is not None:
            running.append((job.row, functools.partial(prepare, program, job.case)))
    # The last programs can take long to compile; compiled programs are timed all the same.
    end = max(end, min(time.monotonic() + 0.4 * share, report.until(0.9)))
    time_rounds(report, running, options, end)
    for row, _ in running:
        print(line(row), flush=True)


def _key(row: dict) -> tuple:
    return row["name"], row["by"], row["what"]


def decode(report: Report, options: argparse.Namespace, cases: list[Case], end: float) -> None:
    """Times one token against a cache, by the default implementation and by "pallas"."""
    shape = options.batch or 4, options.slots, options.heads, options.head_dim
    arrays = functools.cache(functools.partial(inputs, shape, jnp.bfloat16))
    t5 = pe.T5(num_heads=options.heads).init(jax.random.key(1))

    def ours(case: Case) -> dict:
        word = None if case.by == "xla" else case.by
        arguments = _arguments(case, arrays())
        return {case.name: our_case(case.scheme, arguments, tokens=1, implementation=word)}

    makers: list[tuple[str, str, Callable[[], dict]]] = [
        (case.name, by, functools.partial(ours, case))
        for word, by in (("xla", "default"), ("pallas", "pallas"))
        for case in cases
        if case.by == word
    ]
    makers.insert(1, ("none", "jax.nn", lambda: decode_peers.jax_nn((*arrays()[:3], t5), tokens=1)))
    for name, by, make in makers:
        row = {"name": name, "by": by, "what": "decode", "T": options.slots}
        row["bytes"] = 2 * 2 * math.prod(shape)  # bfloat16, k and v.
        if time.monotonic() > end:
            report.add(row | {"skipped": "out of time"})
            continue
        try:
            steps = make().values()
        except Exception as error:
            report.add(row | reason(error))
            continue
        for case in steps:
            timed = row | {"name": case.like or name, **case.facts}
            time_rounds(report, [(timed, lambda call=case.call: call)], options, end)
            report.add(timed)


def line(row: dict) -> str:
    """Returns a row of the table."""
    start = f"{row['name']:15s} {row['by']:13s} {row['what']:17s} {row['T']:6d}"
    for reason in ("error", "unsupported", "skipped"):
        if reason in row:
            return f"{start}  {reason}: {row[reason][:120]}"
    start += f" {row.get('compile_seconds', 0):9.1f} {row.get('megabytes', 0):9.1f}"
    if "ms" not in row:
        return start
    rate = f"{row['TFLOP/s']:8.2f} {row['share']:6.1%}" if "flop" in row else f"{row['GB/s']:8.1f}"
    return f"{start} {row['ms']:9.3f} {rate:15s} {row.get('/none', 0) or '':.4}"


def show(report: Report) -> None:
    """Prints all measurements, and the number of skipped ones."""
    rows = report.numbers["times"]
    none = {(row["by"], row["what"], row["T"]): row for row in rows if row["name"] == "none"}
    for row in rows:
        same = none.get((row["by"], row["what"], row["T"]), {})
        if "ms" in row and "ms" in same and row["name"] != "pair":  # Of other sizes.
            row["/none"] = row["ms"] / same["ms"]
    report.save()
    start = f"{'scheme':15s} {'by':13s} {'what':17s} {'T':>6s} {'compile s':>9s} {'temp MB':>9s}"
    print(f"\n{start} {'ms':>9s} {'TFLOP/s':>8s} {'share':>6s} /none (decode: GB/s, /none)")
    for row in rows:
        if not {"unsupported", "skipped"} & {*row}:
            print(line(row))
    print(f"{sum('skipped' in row for row in rows)} skipped: out of time")
    device = report.numbers["machine"]["device"]
    if device.startswith("gpu"):
        print(*anchors.show(rows, device), sep="\n")
    print(f"\n{report.numbers['seconds']:.0f} s in all. Steps:")
    print(*contact.table(report.numbers["steps"]), sep="\n")
    if report.log:
        files = (report.path, report.log, report.log.with_suffix(".txt"))
        print(f"To report a failure, send {', '.join(map(str, files))}.")


def draw(numbers: dict, path: Path | None) -> None:
    """Draws times and memory against T, each scheme by its fastest implementation."""
    if path is None:
        raise ConfigError("--replot needs --plot FILE")
    try:
        from experiments.bench.growth_plot import Panel, growth_plot
    except ModuleNotFoundError as error:
        print(f"no plot: {error}")
        return
    times: dict[str, dict[int, float]] = {"none": {}}
    memory: dict[str, dict[int, float]] = {"none": {}}
    rows = [row for row in numbers["times"] if row["what"] == BOTH and "ms" in row]
    for row in sorted(rows, key=lambda row: (row["T"], -row["ms"])):
        ours = row["by"] in IMPLEMENTATIONS
        label = row["name"] if ours else f"{row['by']}, {row['name']}"
        times.setdefault(label, {})[row["T"]] = row["ms"]
        memory.setdefault(label, {})[row["T"]] = max(row["megabytes"], 1e-3)
    if not rows:
        raise ConfigError("there is no time to draw")
    title = f"Causal attention, {BOTH}, on {numbers['machine']['device']}"
    panels = [Panel("time in ms", times), Panel("temporary memory in MB", memory)]
    dashed = [label for label in times if "," in label]
    write_whole(path, growth_plot(panels, against="length T", title=title, dashed=dashed))
    print(f"written: {path}")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
