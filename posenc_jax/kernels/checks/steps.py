"""Steps that check kernels on a device, from their parts to whole problems.

    from posenc_jax.kernels.checks.steps import steps

    for step in steps():
        print(step.name, step.run() or "right")

Each takes seconds, mostly to compile. NumPy computes the expected numbers, in float64 or as
integers that name their place; tiles of the default size are compared with "xla" on the device.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax

from posenc_jax.engine.blocks import Blocks
from posenc_jax.kernels.checks import cases, places
from posenc_jax.kernels.checks.cases import Case

FAMILIES = ("primitives", "forward", "backward", "decode", "tiles")
"""In the order in which they are to be run."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One check.

    Attributes:
      name: unique among `steps`, such as "forward: segments".
      family: of `FAMILIES`.
      dtype: of q, k and v, or of a primitive's array.
      run: checks. It returns None if all is right, else the first wrong place in words, and raises
        NotImplementedError if the implementation refuses the problem.
      compile: compiles what `run` needs, which it does itself otherwise; or None.
    """

    name: str
    family: str
    dtype: str
    run: Callable[[], str | None]
    compile: Callable[[], object] | None = None


def steps(
    implementation: Any = "pallas",
    *,
    family: str | None = None,
    interpret: Any = False,
    small: bool = False,
) -> list[Step]:
    """Returns the steps that check an implementation, in the order in which they are to be run.

    Args:
      implementation: a word or an object, as for `posenc_jax.attention`. "pallas" stands for the
        kernels of the platform with tiles of 128 x 128 on TPU, of the default size in "tiles".
      family: only this one of `FAMILIES`. Default: all.
      interpret: as for `PallasTPU` and `PallasGPU`, which "pallas" stands for.
      small: fewer tokens and repetitions, for interpreters.

    Returns:
      Steps; nothing is computed or compiled yet.

    >>> from posenc_jax.kernels.checks.steps import steps
    >>> [step.name for step in steps(family="forward")][:2]
    ['forward: no rule', 'forward: not causal']
    """
    families = FAMILIES if family is None else (family,)
    return [step for name in families for step in _MAKERS[name](implementation, interpret, small)]


TRAINING = (
    Case("no rule"),
    Case("not causal", causal=False),
    Case("window", window=20),
    Case("window of two sides", causal=False, window=(130, 3)),
    Case("segments", segments=True),
    Case("table by distance", "table"),
    Case("table, window, grouped heads", "table", heads=6, window=150),
    Case("table, segments, softcap", "table", segments=True, softcap=3.0),
    Case("slopes", "slopes"),
    Case("separable", "separable"),
    Case("separable, segments, grouped heads", "separable", heads=4, segments=True),
    Case("grouped heads", heads=6),
    Case("one head of keys", heads=4, kv_heads=1),
    Case("table, 3 heads", "table", heads=3, kv_heads=3),
    Case("softcap", softcap=3.0),
    Case("product", "product", dim=64),
    Case("product of keys, window", "product of keys", dim=64, window=150),
    Case("product of vectors of the head dim", "product of head dim", dim=64, length=300),
    Case("pair", "pair"),
    Case("pair, not causal, softcap", "pair", causal=False, softcap=3.0),
    Case("array of all pairs", "array"),
    Case("array of all pairs, 300 tokens, not causal", "array", causal=False, length=300),
    Case("array that heads share", "array of rows", heads=4),
    Case("sinks", sinks=True),
    Case("last queries", later=60),
    Case("shuffled positions", shuffled=True, window=100),
    Case("slopes, shuffled positions", "slopes", shuffled=True),
    Case("300 tokens", length=300),
    Case("dropout", dropout=0.3),
    Case("head dim 64", dim=64),
    Case("head dim 80", dim=80),
    Case("head dim 256", dim=256),
    Case("table, head dim 256", "table", dim=256),
    Case("float32", dtype="float32"),
    Case("table, float32", "table", dtype="float32"),
    Case("product, float32", "product", dim=64, dtype="float32"),
    Case("array of all pairs, head dim 64", "array", dim=64),
)
"""Problems of the forward and the backward pass, the simplest first."""

_decode = functools.partial(
    Case, batch=3, length=1, heads=8, kv_heads=2, filled=(0, 100, 512), keys=512
)
DECODE = (
    _decode("2 heads of keys"),
    _decode("one head of keys", kv_heads=1),
    _decode("8 heads of keys", kv_heads=8),
    _decode("16 heads of keys", heads=16, kv_heads=16),
    _decode("head dim 64", dim=64),
    _decode("head dim 64, 8 heads of keys", kv_heads=8, dim=64),
    _decode("table, window", "table", window=150),
    _decode("table, 4 queries", "table", length=4, kv_heads=4),
    _decode("separable", "separable"),
    _decode("pair", "pair"),
    _decode("product", "product", dim=64),
    _decode("softcap, sinks", softcap=3.0, sinks=True),
    _decode("blocks of the default size", filled=(0, 5000, 9000), keys=9000, block=2048),
    _decode("float32", dtype="float32"),
)
"""Decode steps; the caches of the rows are empty, filled in part, and full."""

TILES = (
    Case("no rule", length=3072, block=512),
    Case("table by distance", "table", length=3072, block=512),
    Case("separable", "separable", length=3072, block=512),
    Case("product", "product", dim=64, length=3072, block=512),
    Case("pair", "pair", length=2560, block=512),
    Case("array of all pairs", "array", length=2560, block=512),
    Case("table, segments, grouped heads", "table", heads=8, length=3072, block=512, segments=True),
)
"""Problems with three to five tiles of the default size per side on TPU, and more on GPU."""

_WITHOUT_LSE = ("splash", "jax", "cudnn")


def _case(case: Case, small: bool) -> Case:
    """Returns a problem, with `small` of fewer tokens; decode steps are small."""
    if not small or case.filled:
        return case
    return dataclasses.replace(case, length=min(case.length, 300), block=128)


def _kernels(implementation: Any, interpret: Any, default_tiles: bool) -> Any:
    """Returns the implementation to check."""
    if implementation != "pallas":
        return implementation
    if jax.default_backend() == "gpu":
        from posenc_jax.kernels.gpu.implementation import PallasGPU

        return PallasGPU(interpret=interpret)
    from posenc_jax.kernels.tpu.implementation import PallasTPU

    if default_tiles:
        return PallasTPU(interpret=interpret)
    blocks = Blocks(128, 128)
    return PallasTPU(blocks, blocks, decode=128, interpret=interpret)


def _against_float64(family: str, problems: tuple[Case, ...], gradients: bool) -> Callable:
    def make(implementation, interpret, small):
        lse = implementation not in _WITHOUT_LSE
        for case in problems:
            case = _case(case, small)

            def run(check, case=case):
                chosen = _kernels(
                    implementation, interpret, bool(case.filled) and case.block != 128
                )
                return check(case, chosen, gradients=gradients, lse=lse)

            yield _step(family, case, run, _check, cases.executable)

    return make


def _step(family: str, case: Case, run: Callable, check: Callable, compile: Callable) -> Step:
    do = functools.partial
    return Step(f"{family}: {case.name}", family, case.dtype, do(run, check), do(run, compile))


def _check(case: Case, implementation: Any, *, gradients: bool, lse: bool) -> str | None:
    """Returns the first wrong place of a case, with zeros and with random numbers."""
    for zero in (True, False):
        if zero and (gradients or not lse):
            continue
        x = cases.inputs(case, zero)
        want = cases.expected(case, x, gradients=gradients, lse=lse)
        got = cases.run(case, implementation, x, gradients=gradients, lse=lse)
        place = places.first_wrong(case, got, want)
        count = places.wrong_counts(case, got, want) if zero else None
        if place or count:
            return "; ".join(filter(None, (place, count)))
    return None


def _tiles(implementation, interpret, small):
    """Yields steps with tiles of the default size, against "xla" and themselves."""
    if implementation == "xla":
        return
    for case in TILES:
        case = _case(case, small)
        repeats = 2 if small or case.rule != "table" else 20

        def run(check, case=case):
            chosen = _kernels(implementation, interpret, default_tiles=True)
            lse = implementation not in _WITHOUT_LSE
            return check(case, chosen, gradients=True, lse=lse)

        check = functools.partial(_check_tiles, repeats)
        yield _step("tiles", case, run, check, _compile_tiles)


def _compile_tiles(case: Case, implementation: Any, **options: bool) -> None:
    for one in (implementation, "xla"):
        cases.executable(case, one, **options)


def _check_tiles(repeats: int, case: Case, implementation: Any, **options: bool) -> str | None:
    x = jax.device_put(cases.inputs(case))
    function = cases.executable(case, implementation, **options)
    first = jax.device_get(function(x))
    want = cases.run(case, "xla", x, **options)
    place = places.first_wrong(case, first, want)
    for n in range(1, repeats if place is None else 1):
        # Other work in between, so that copies and products meet at other times.
        busy = jax.numpy.einsum("btnh,btnk->hk", x["q"], x["q"])
        again = jax.device_get((function(x), busy))[0]
        place = places.other_bits(case, again, first)
        if place is not None:
            return f"run {n + 1} of {repeats}: {place}"
    return place


def _primitives(implementation, interpret, small):
    """Yields the steps of the kernels' parts."""
    if implementation != "pallas":
        return
    if jax.default_backend() == "gpu":
        from posenc_jax.kernels.checks.gpu_primitives import primitives
    else:
        from posenc_jax.kernels.checks.tpu_primitives import primitives
    for x in primitives(interpret, small):
        yield Step(f"primitives: {x.name}", "primitives", str(x.want.dtype), x.run)


_MAKERS: dict[str, Callable[..., Iterator[Step]]] = {
    "primitives": _primitives,
    "forward": _against_float64("forward", TRAINING, gradients=False),
    "backward": _against_float64("backward", TRAINING, gradients=True),
    "decode": _against_float64("decode", DECODE, gradients=False),
    "tiles": _tiles,
}
