"""Steps that check kernels on a device: problems of both passes.

    from posenc_jax.kernels.checks.steps import steps

    for step in steps():
        print(step.name, step.run() or "right")

Each takes seconds, mostly to compile. Expected numbers are those of "reference" on the CPU; tiles
of the default size are compared with "xla" on the device, and with themselves.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from posenc_jax.engine.blocks import Blocks
from posenc_jax.kernels.checks import cases
from posenc_jax.kernels.checks.cases import Arrays, Case

FAMILIES = ("forward", "backward", "tiles")
"""In the order in which they are to be run."""

_ELEMENT = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 3e-2}
"""Greatest error of a number, as a part of the largest of its array."""
_FACTOR = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 5e-3}
"""Greatest error of an array as a whole: rounding errors cancel in its projection."""
_FEW = 100
"""Arrays of fewer numbers are allowed three times as much: their errors do not cancel."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One check: a problem of a family by an implementation.

    Attributes:
      family: of `FAMILIES`.
      case: the problem.
      implementation: a word or an object, as for `steps`.
      interpret: as for `steps`.
      repeats: how many runs are compared with each other and with "xla", or 0.
    """

    family: str
    case: Case
    implementation: Any
    interpret: Any
    repeats: int = 0

    @property
    def name(self) -> str:
        """A unique name, such as "forward: segments"."""
        return f"{self.family}: {self.case.name}"

    @property
    def options(self) -> dict[str, bool]:
        """Which results there are, for `cases.run`."""
        gradients = self.family in ("backward", "tiles")
        return {"gradients": gradients, "lse": self.implementation not in _WITHOUT_LSE}

    @property
    def checked(self) -> Any:
        """The implementation; the kernels of the platform for "pallas"."""
        if self.implementation != "pallas":
            return self.implementation
        if jax.default_backend() == "gpu":
            from posenc_jax.kernels.gpu.implementation import PallasGPU

            return PallasGPU(interpret=self.interpret, any_version=True)
        from posenc_jax.kernels.tpu.implementation import PallasTPU

        if self.case.default_tiles:
            return PallasTPU(interpret=self.interpret)
        blocks = Blocks(128, 128)
        return PallasTPU(blocks, blocks, interpret=self.interpret)

    def compile(self) -> None:
        """Compiles what `run` needs, which it does itself otherwise."""
        cases.executable(self.case, self.checked, **self.options)
        if self.repeats:
            cases.executable(self.case, "xla", **self.options)
        else:
            cases.reference(self.case, **self.options)

    def run(self) -> str | None:
        """Checks. Returns None if all is right, else the first wrong place.

        Raises:
          NotImplementedError: if the implementation refuses the problem.
        """
        if self.repeats:
            return self._repeat()
        if self.family == "forward" and self.options["lse"]:
            if place := wrong_count(*self._outcomes(zero=True)):
                return place
        return first_wrong(self.case, *self._outcomes())

    def _outcomes(self, zero: bool = False) -> tuple[Arrays, Arrays]:
        """Returns the outcome and the expected arrays."""
        x = cases.inputs(self.case, zero)
        got = cases.run(self.case, self.checked, x, **self.options)
        return got, cases.expected(self.case, x, **self.options)

    def _repeat(self) -> str | None:
        x = jax.device_put(cases.inputs(self.case))
        function = cases.executable(self.case, self.checked, **self.options)
        first = jax.device_get(function(x))
        place = first_wrong(self.case, first, cases.run(self.case, "xla", x, **self.options))
        for n in range(1, self.repeats if place is None else 1):
            # Other work in between, so that copies and products meet at other times.
            busy = jax.numpy.einsum("btnh,btnk->hk", x["q"], x["q"])
            again = jax.device_get((function(x), busy))[0]
            for name, y in again.items():
                if count := (_bits(y) != _bits(first[name])).sum():
                    other = f"other bits, {count} of {y.size} numbers"
                    return f"run {n + 1} of {self.repeats}: {name}: {other}"
        return place


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
    out = []
    for name in FAMILIES if family is None else (family,):
        if name == "tiles" and implementation == "xla":
            continue
        for case in _PROBLEMS[name]:
            if small:
                case = dataclasses.replace(case, length=min(case.length, 300), default_tiles=False)
            repeats = 0
            if name == "tiles":
                repeats = 2 if small or case.rule != "table" else 20
            out.append(Step(name, case, implementation, interpret, repeats))
    return out


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
    Case("branches", branches=200),
    Case("table, branches, segments", "table", branches=200, segments=True),
    Case("shuffled branches, not causal", branches=200, shuffled=True, causal=False),
    Case("images in a window", images=True, window=(100, -1)),
    Case("block mask", blocks=True),
    Case("table, block mask, segments", "table", blocks=True, segments=True),
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

_tiles = functools.partial(Case, length=3072, default_tiles=True)
TILES = (
    _tiles("no rule"),
    _tiles("table by distance", "table"),
    _tiles("separable", "separable"),
    _tiles("product", "product", dim=64),
    _tiles("pair", "pair", length=2560),
    _tiles("array of all pairs", "array", length=2560),
    _tiles("table, segments, grouped heads", "table", heads=8, segments=True),
)
"""Problems with three to five tiles of the default size per side on TPU, and more on GPU."""

_WITHOUT_LSE = ("splash", "jax", "cudnn")


def _bits(x: Any) -> np.ndarray:
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


def first_wrong(case: Case, got: Arrays, want: Arrays) -> str | None:
    """Returns the first wrong number of the outcome of a case, or None.

    Args:
      case: the problem.
      got: an outcome, as `cases.run` returns it.
      want: the expected outcome.
    """
    for name, x in got.items():
        if place := _wrong_number(case, name, np.asarray(x, np.float64), want[name]):
            return f"{name}: {place}"
    return None


def _wrong_number(case: Case, name: str, got: np.ndarray, want: np.ndarray) -> str | None:
    """Returns the first wrong number of an array, or None."""
    want = np.asarray(want, np.float64)
    finite = np.isfinite(want)
    size = np.abs(want[finite]).max(initial=0.0)
    per_parameter = name.startswith("gradient")
    # Gradients of parameters are sums over all pairs, which cancel.
    limit = _ELEMENT[case.dtype] * (2 if per_parameter else 1) * max(size, 1e-30)
    with np.errstate(invalid="ignore"):
        right = np.where(finite, np.abs(got - want) <= limit, got == want)
    if not right.all():
        index = tuple(int(n) for n in np.argwhere(~right)[0])
        counts = f"{(~right).sum()} of {right.size} numbers are wrong"
        return f"{_place(name, index)}: {got[index]:.4g}, expected {want[index]:.4g}; {counts}"
    if not size:
        return None
    got, want = np.where(finite, got, 0.0), np.where(finite, want, 0.0)
    axes = tuple(range(0 if per_parameter else 2, got.ndim))
    square = (want * want).sum(axes)
    factor = (got * want).sum(axes) / np.where(square, square, 1.0)
    few = per_parameter and want.size < _FEW
    wrong = (np.abs(factor - 1) > _FACTOR[case.dtype] * (3 if few else 1)) & (square > 0)
    if not wrong.any():
        return None
    index = tuple(int(n) for n in np.argwhere(wrong)[0])
    return f"{_place(name, index)}: {factor[index]:.4f} times what is expected"


def _place(name: str, index: tuple[int, ...]) -> str:
    """Returns the place of a number: arrays but gradients of parameters are [B, N, T, H]."""
    if name.startswith("gradient"):
        return f"{list(index)}"
    axes = "batch", "head", "token"
    return ", ".join(f"{axis} {n}" for axis, n in zip(axes, index, strict=False))


def wrong_count(got: Arrays, want: Arrays) -> str | None:
    """Returns the first query that sees a wrong number of keys, or None.

    Args:
      got, want: as for `first_wrong`, of inputs of zeros, where "lse" is the logarithm of a count.
    """
    a, b = np.exp(np.asarray(got["lse"], np.float64)), np.exp(want["lse"])
    wrong = ~(np.abs(a - b) <= 0.25)
    if not wrong.any():
        return None
    index = tuple(int(n) for n in np.argwhere(wrong)[0])
    return f"lse: {_place('lse', index)} sees {a[index]:.4g} keys, expected {b[index]:.4g}"


_PROBLEMS = {"forward": TRAINING, "backward": TRAINING, "tiles": TILES}
