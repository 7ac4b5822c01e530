"""Verdicts: whether the kernels of this package were right on the chip that is there.

`python -m posenc_jax.prove` makes them, and `implementation=None` reads them on TPUs and GPUs. Each
is a file, named after a digest of its `Key`: another chip, compiler or version of the kernels has
other files.
"""

import functools
import hashlib
import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jaxlib

from posenc_jax.engine.pallas import Pallas
from posenc_jax.engine.problem import Problem
from posenc_jax.engine.rules import ContentBias, DenseBias, DotBias, LogitBias, Rule, SeparableBias

FOLDER = "POSENC_JAX_CACHE_DIR"
"""The environment variable with the folder of the verdicts."""

DECODE = "decode"
"""The rule class of decode steps, whose kernel gets the logits of any rule as an array."""

_DRIVER = Path("/proc/driver/nvidia/version")  # On Linux, with the driver's version on line 1.
_STARTED = time.time()
_log = logging.getLogger(__name__)


class Subject(NamedTuple):
    """The problems that a verdict is about.

    Attributes:
      rule_class: see `rule_class`, "none" without a rule, or `DECODE`.
      dtype: of q, k and v, such as "bfloat16".
      head_dim: H, of queries, keys and values.
    """

    rule_class: str
    dtype: str
    head_dim: int

    def __str__(self):
        return f"rule class {self.rule_class}, {self.dtype}, head dim {self.head_dim}"


class Key(NamedTuple):
    """A subject, and all else that a verdict depends on.

    Attributes:
      device_kind: of the chip.
      platform_version: of the compiler and the runtime, as JAX's compilation cache has it, and of
        the driver of an NVIDIA GPU.
      jax: the versions of jax and jaxlib.
      implementation: the word, and a digest of its sources.
      subject: the problems.
    """

    device_kind: str
    platform_version: str
    jax: str
    implementation: str
    subject: Subject


class Verdict(NamedTuple):
    """The result of the correctness steps of a subject.

    Attributes:
      fault: the first wrong place in words; None: the kernels are right.
      steps: the number of steps that ran.
      time: of the last step, in seconds since 1970.
    """

    fault: str | None
    steps: int
    time: float


check: Callable[[Subject], Verdict | None] | None = None
"""Makes a verdict where there is none, while something is traced. `posenc_jax.prove` sets it."""


def rule_class(rule: Rule, by_slot: bool) -> str | None:
    """Returns the part of the kernels that computes a rule; None for a rule that has none.

    Args:
      rule: the rule.
      by_slot: whether slots and coordinates of two tokens have the same distance.
    """
    if isinstance(rule, LogitBias) and rule.relative and by_slot:
        return "distance"
    classes = {LogitBias: "pair", ContentBias: "pair", SeparableBias: "separable"}
    return (classes | {DotBias: "product", DenseBias: "array"}).get(type(rule))


def subjects(problem: Problem) -> tuple[Subject, ...]:
    """Returns the subjects whose verdicts a problem needs; none where no verdict is about it.

    They are "none", for masks and all else that problems without a rule have too, and the classes
    of its rules; for a decode step of a TPU they are `DECODE`.
    """
    p = problem
    by_slot = p.contiguous and p.q_coordinates.ndim == 2
    classes: list[Any] = ["none", *(rule_class(rule, by_slot) for rule in p.rules)]
    if jax.default_backend() == "tpu":
        from posenc_jax.engine.tpu.decode import decodes

        classes = [DECODE] if decodes(p) else classes
    if p.v.shape[3] != p.q.shape[3] or None in classes:
        return ()
    return tuple(Subject(x, p.q.dtype.name, p.q.shape[3]) for x in dict.fromkeys(classes))


def all_right(problem: Problem) -> bool:
    """Returns whether verdicts say that the kernels are right for a problem on the chip here.

    Where they do not, a line says so, once per process and set of subjects.
    """
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None and described.device_kind != jax.local_devices()[0].device_kind:
        return False
    keys = tuple(map(key_of, subjects(problem)))
    return bool(keys) and _are_right(keys)


@functools.cache
def _are_right(keys: tuple[Key, ...]) -> bool:
    if Pallas().unfit() is not None:
        return False
    by_subject = {key.subject: _verdict(key) for key in keys}
    faults = [x.fault for x in by_subject.values() if x is not None and x.fault is not None]
    unproved = [s for s, x in by_subject.items() if x is None or x.fault is not None]
    if not unproved:
        return True
    (_, dtype, head_dim), classes = unproved[0], [subject.rule_class for subject in unproved]
    reason = f"its kernels are wrong ({faults[0]})" if faults else "there is no verdict"
    shared = f", before the processes start, with {FOLDER} naming a folder that they share"
    _log.warning(
        f'attention: implementation=None leaves out "pallas" for rule class {", ".join(classes)}, '
        f"{dtype}, head dim {head_dim} on {keys[0].device_kind}: {reason}; to check its kernels "
        f"there: python -m posenc_jax.prove --rule-class {' '.join(classes)} --dtype {dtype} "
        f"--head-dim {head_dim}{shared if jax.process_count() > 1 else ''}"
    )
    return False


@functools.cache  # A verdict that is made later changes no choice of this process.
def _verdict(key: Key) -> Verdict | None:
    verdict = read(key)
    if jax.process_count() > 1:
        shared = bool(os.environ.get(FOLDER))
        return verdict if shared and verdict and verdict.time < _STARTED else None
    if verdict is None and check is not None:
        verdict = check(key.subject)
        if verdict is not None:
            try:
                write(key, verdict)
            except OSError as error:
                _log.warning("attention: a verdict on kernels cannot be written: %s", error)
    return verdict


def key_of(subject: Subject) -> Key:
    """Returns the key of a subject on the chip that is there."""
    device = jax.local_devices()[0]
    return Key(
        device_kind=device.device_kind,
        platform_version=device.client.platform_version + _driver(device.platform),
        jax=f"{jax.__version__}, jaxlib {jaxlib.__version__}",
        implementation=f"pallas {_digest()}",
        subject=subject,
    )


def _driver(platform: str) -> str:
    """Returns the version of a GPU's driver, with a comma before it; "" if no file tells."""
    try:
        return f", {_DRIVER.read_text().splitlines()[0]}" if platform == "gpu" else ""
    except (OSError, IndexError):
        return ""


@functools.cache
def _digest() -> str:
    """Returns a digest of the sources of the kernels, and of the steps that check them."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(
        file for name in ("engine", "ops", "prove") for file in package.glob(f"{name}/**/*.py")
    ):
        digest.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def folder() -> Path:
    """Returns the folder of the verdicts; it need not be there.

    Raises:
      OSError: if no variable names one, and the user has no home.
    """
    if named := os.environ.get(FOLDER):
        return Path(named)
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    except RuntimeError:
        raise OSError(f"there is no home folder for verdicts; set {FOLDER}") from None
    return Path(cache) / "posenc_jax"


def _path(key: Key) -> Path:
    s, name = key.subject, hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    return folder() / f"verdict-{s.rule_class}-{s.dtype}-{s.head_dim}-{name}.json"


def read(key: Key) -> Verdict | None:
    """Returns the verdict of a key, or None; a damaged file is logged and is no verdict."""
    try:
        return _parsed(_path(key))[1]
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _log.warning("attention: a verdict on kernels cannot be read: %s", error)
        return None


def here() -> Iterator[tuple[Subject, Verdict]]:
    """Yields the verdicts on the chip that is there; damaged files are left out."""
    for path in sorted(folder().glob("verdict-*.json")):
        try:
            key, verdict = _parsed(path)
        except (OSError, ValueError):
            continue
        if key == key_of(key.subject):
            yield key.subject, verdict


def _parsed(path: Path) -> tuple[Key, Verdict]:
    """Reads a file; raises `ValueError` unless it holds a verdict under its own name."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        key = Key(**content["key"])
        key = key._replace(subject=Subject(*key.subject))
        verdict = Verdict(**content["verdict"])
        whole = path == _path(key) and isinstance(verdict.time, float)
        whole = whole and (verdict.fault is None or isinstance(verdict.fault, str))
    except (ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise ValueError(f"{path} is damaged")
    return key, verdict


def write(key: Key, verdict: Verdict) -> None:
    """Writes a verdict in one step, over an earlier one.

    Raises:
      OSError: if it cannot be written.
    """
    path = _path(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{uuid.uuid4().hex}.part")
    try:
        part.write_text(json.dumps({"key": key._asdict(), "verdict": verdict._asdict()}, indent=1))
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
