"""Properties that every scheme keeps."""

import copy
import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from posenc_jax.positions.packing import count_up, from_padding_mask, from_segment_ids
from posenc_jax.schemes.scheme import Acts, Scheme, param_axes, resembling_hooks
from posenc_jax.testing.case import BATCH, LENGTH, PADDING, Case

PROMPT = 12  # Tokens that decoding continues.


def _difference(a: Any, b: Any) -> float:
    """Returns the largest difference of leaves, relative to leaves of `b` that exceed one."""
    errors = [0.0]
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        if x.size:
            errors.append(np.abs(x - y).max() / max(1.0, np.abs(y).max()))
    return float(np.max(errors))  # Python's max would lose NaN.


def _finite(name: str, *trees: Any) -> None:
    for path, leaf in jax.tree.leaves_with_path(trees):
        entry = jax.tree_util.keystr(path[1:])
        assert np.isfinite(np.asarray(leaf)).all(), f"{name}{entry} is not finite"


class Violation(AssertionError):
    """A property that does not hold.

    Attributes:
      cause: the usual cause; None where the scheme raised an exception.
    """

    def __init__(self, text: str, cause: str | None = None):
        super().__init__(text)
        self.cause = cause


@dataclasses.dataclass(frozen=True)
class Property:
    """A property of every scheme.

    Attributes:
      name: the property, in a few words.
      measure: takes a `Case`; returns an error or several, or None where the property does not
        apply. Raises AssertionError for violations without a number.
      tolerance: the largest error that passes.
      cause: the usual cause of a violation.
    """

    name: str
    measure: Callable[[Case], float | list[float] | None]
    tolerance: float
    cause: str

    def check(self, case: Case) -> float | None:
        """Returns the largest error, or None where the property does not apply.

        Raises:
          AssertionError: names the scheme, the property, and the error with its usual cause. An
            exception of the scheme is its `__cause__`.
        """
        violation = self.violation(case)
        if isinstance(violation, Violation):
            text = f"{case.scheme!r}: {self.name}: {violation}."
            if violation.cause:
                text += f"\n    Usual cause: {violation.cause}"
            raise AssertionError(text) from violation.__cause__
        return violation

    def violation(self, case: Case) -> float | Violation | None:
        """Returns the largest error or None, as `check`, or the violation."""
        try:
            errors = self.measure(case)
        except Violation as violation:
            return violation
        except AssertionError as failed:
            return Violation(str(failed), self.cause)
        except Exception as error:
            violation = Violation(f"raised {type(error).__name__}: {error!s:.300}")
            violation.__cause__ = error
            return violation
        if errors is None or errors == []:
            return None
        error = float(np.max(errors))
        if not error <= self.tolerance:
            text = f"largest error {error:.2g}, tolerance {self.tolerance:.2g}"
            return Violation(text, self.cause)
        return error


PROPERTIES: dict[str, Property] = {}
"""Every property, by the name of the function that measures it."""

_STOP = {"hashable_and_equal_by_value", "jit_equals_eager"}
"""Those that all others need."""


def _holds(cause: str, tolerance: float = 2e-5):
    """Registers a function as the measure of the property that its docstring names."""
    cause = " ".join(cause.split())

    def register(measure):
        name = measure.__doc__.removesuffix(".")
        PROPERTIES[measure.__name__] = Property(name, measure, tolerance, cause)
        return measure

    return register


class Row(NamedTuple):
    """One line of a report."""

    name: str
    error: float | None
    tolerance: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Report:
    """The measurements of `check`; prints as a table."""

    scheme: Scheme
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        wide = max(len(row.name) for row in self.rows)
        lines = [repr(self.scheme), f"{'property':<{wide}}  {'error':>7}  allowed  seconds"]
        for row in self.rows:
            error = "-" if row.error is None else f"{row.error:.1e}"
            lines.append(
                f"{row.name:<{wide}}  {error:>7}  {row.tolerance:.1e}  {row.seconds:>7.1f}"
            )
        return "\n".join([*lines, "No property fails.", *self.notes])


def check(scheme: Scheme, **sizes: int) -> Report:
    """Checks that a scheme works everywhere; takes a minute or less.

    Small calls are traced first. Their exceptions are not caught; notes describe the call. A scheme
    gets x only with traits.reads_x.

    Args:
      scheme: the scheme, an instance.
      **sizes: sizes of the model and a `max_length` that are no fields of the scheme; see `Case`.

    Returns:
      A report with the measured error of each property, and notes on attention without
      causality: whether past and future are alike, or why the scheme is for causal attention.

    Raises:
      AssertionError: names each property that fails, with the measured error and the usual cause.
      TypeError: for anything but a scheme.
      ValueError: for a `max_length` below 40.

    >>> import posenc_jax as pe
    >>> report = check(pe.RoPE(head_dim=8))  # doctest: +SKIP
    """
    case = Case(scheme, **sizes)
    rows, violations = [], {}
    for key, prop in PROPERTIES.items():
        start = time.perf_counter()
        error = prop.violation(case)
        if isinstance(error, Violation):
            violations[key] = error
        else:
            rows.append(Row(prop.name, error, prop.tolerance, time.perf_counter() - start))
        if violations.keys() & _STOP:
            break
        if key == "hashable_and_equal_by_value":
            _first_calls(case)
    if violations:
        errors = (violation.__cause__ for violation in violations.values())
        raise AssertionError(_summary(case, violations)) from next(filter(None, errors), None)
    notes, change = _hints(case), mirrored_change(case)
    if reason := scheme.traits.causal_only:
        notes.append(f"For causal attention alone: {reason}.")
    elif change is not None and change < 2e-5:
        declare = "" if scheme.traits.mirrored else "; declare mirrored=True"
        notes.append(f"Without causality, past and future are alike (traits.mirrored){declare}.")
    return Report(scheme, tuple(rows), tuple(notes))


def _first_calls(case: Case) -> None:
    """Traces small calls; an exception of one gets notes."""
    for call, trace in case.first_calls().items():
        try:
            trace()
        except Exception as error:
            error.add_note(f"testing.check: in a first call{call} of {case.scheme!r:.200}")
            for hint in _hints(case):
                error.add_note(hint)
            raise


def _summary(case: Case, violations: dict[str, Violation]) -> str:
    """Returns the violations, grouped by their usual cause."""
    count = f"{len(violations)} of {len(PROPERTIES)} properties fail"
    note = "; the others need it and were not measured" if violations.keys() & _STOP else ""
    lines = [f"{count}{note}.", f"{case.scheme!r:.200}", *_hints(case)]
    groups: dict[str | None, list[str]] = {}
    for key, violation in violations.items():
        text = f"- {PROPERTIES[key].name}: {violation}."
        groups.setdefault(violation.cause, []).append(text)
    for cause, texts in groups.items():
        lines += [*texts, *([f"  Usual cause: {cause}"] if cause else [])]
    return "\n".join(lines)


def _hints(case: Case) -> list[str]:
    names = resembling_hooks(type(case.scheme))
    return [f"`{name}` is no hook; is it a misspelt `{hook}`?" for name, hook in names.items()]


# Settings and calls.


_UNHASHABLE = (
    "fields are settings, static under `jit`: numbers, strings, tuples and frozen dataclasses. "
    "Return arrays that are learned from `init`, and compute others from settings in a hook."
)
_OWN_INIT = (
    "the class has an `__init__` of its own, and a dataclass needs one that takes its fields. "
    "Leave it out, declare the settings as fields, and check them in `__post_init__`."
)


@_holds("""a subclass without @dataclasses.dataclass(frozen=True), or an `__eq__` or `__hash__` that
    go by identity.""")
def hashable_and_equal_by_value(case: Case) -> None:
    """Hashable and equal by value."""
    scheme = case.scheme
    for field in dataclasses.fields(scheme):
        value = getattr(scheme, field.name)
        try:
            hash(value)
        except TypeError:
            text = f"the field `{field.name}` holds {value!r:.60}, which has no hash"
            raise Violation(text, _UNHASHABLE) from None
    try:
        twin = dataclasses.replace(scheme)
    except TypeError as error:
        raise Violation(f"no copy can be made from the fields: {error}", _OWN_INIT) from None
    assert twin == scheme, "a copy with the same settings is not equal"
    assert hash(twin) == hash(scheme), "a copy with the same settings has another hash"


@_holds("""`init` names another dtype (`param_dtype` of the layers casts parameters) or none
    (float64 under x64), or uses another source of random numbers than its key.""")
def parameters_are_deterministic_and_float32(case: Case) -> None:
    """Parameters are deterministic and float32."""
    for path, leaf in jax.tree.leaves_with_path(case.params):
        assert leaf.dtype == jnp.float32, f"params{jax.tree_util.keystr(path)} is {leaf.dtype}"
    # A program holds random numbers from another source than `key` as constants.
    first, second = case.lowered_init, case.lower_init()
    text = "`init` of one key is another program when it is traced again"
    assert first.as_text() == second.as_text(), text


@_holds("`param_axes` with the word of another size, or not one word per axis.")
def declared_axes_have_their_sizes(case: Case) -> None:
    """Axes of parameters have the sizes that `param_axes` names."""
    sizes = ("num_heads", "num_kv_heads", "head_dim", "model_dim")
    sizes = {name: getattr(case, name) for name in sizes}
    params = jax.tree.leaves_with_path(case.params)
    for (path, param), words in zip(params, param_axes(case.scheme), strict=True):
        for word, length in zip(words, param.shape, strict=True):
            text = f"params{jax.tree_util.keystr(path)} has {length} on its axis {word}"
            assert length == sizes.get(word, length), text


_NOT_FINITE = (
    "log(0), a root of zero or a division by zero, for instance at q == k: put jnp.where or "
    "jnp.maximum around its argument."
)


@_holds(
    """`query` or `key` that scale q or k, or a rule whose new parameters are large. Layers
    multiply q . k by 1/sqrt(H): a softmax of larger logits is saturated, and hardly trains.""",
    tolerance=4.0,
)
def first_logits_deviate_by_one(case: Case) -> list[float] | None:
    """The logits of a new layer have a standard deviation near one."""
    if not case.scheme.acts_in_attention:
        return None
    deviations = [x.deviation for x in case.probe.measured]
    return [max(x, 1 / x) for x in deviations if x == x]  # NaN of calls in which no key is seen.


@_holds("traits or `acts` that do not tell of a rule; chains rely on them.")
def kinds_of_rules_are_declared(case: Case) -> None:
    """Rules on rows and on values are declared (traits.transforms_rows, acts)."""
    if not case.scheme.acts_in_attention or Acts.ATTENTION in case.scheme.acts:
        return
    traits, rules = case.scheme.traits, case.probe.rules
    declared = traits.transforms_rows or not any(whole_rows for whole_rows, _ in rules)
    assert declared, "a rule is a LogitsTransform; set transforms_rows=True"
    declared = Acts.VALUES in case.scheme.acts or not any(adds_values for _, adds_values in rules)
    assert declared, "a rule is a ValueBias; set acts = pe.Acts.LOGITS | pe.Acts.VALUES"


@_holds("`bounds` beyond which the rule still varies.")
def rules_are_constant_beyond_bounds(case: Case) -> list[float] | None:
    """Rules are constant beyond their `bounds`."""
    if not case.scheme.acts_in_attention:
        return None
    below = [] if case.scheme.traits.causal_only else [x.below for x in case.probe.measured]
    return [*below, *(x.above for x in case.probe.measured)]


@_holds(
    """`query` or `key` that scale q or k by their position, which norms after them would undo;
    set norm_after=False.""",
    tolerance=1e-3,
)
def coordinates_do_not_scale_q_and_k(case: Case) -> list[float] | None:
    """Far tokens have no longer or shorter q and k than near ones (traits.norm_after)."""
    if Acts.QK not in case.scheme.acts or not case.scheme.traits.norm_after:
        return None
    starts = 1, min(20_000, case.max_length - LENGTH)
    lengths = zip(*(case.lengths(count_up(BATCH, LENGTH, n)) for n in starts), strict=True)
    ratios = (np.log(far / near).reshape(BATCH * LENGTH, -1) for near, far in lengths)
    # A map that is no rotation has longer vectors of some contents, and shorter ones of others.
    return [np.maximum(0.0, np.maximum(x.min(0), -x.max(0))).max() for x in ratios]


@_holds("a hook that reads a value while it is traced, or keeps state outside its arguments.")
def jit_equals_eager(case: Case) -> float:
    """`jit` equals eager."""
    out = case.eager()
    if not np.isfinite(out).all():
        raise Violation("the output is not finite", _NOT_FINITE)
    return _difference(case.run(case.x)[0], out)


@_holds("a hook that makes positions from the length of an array instead of reading `coordinates`.")
def positions_default_to_counting(case: Case) -> float:
    """Positions default to 0 .. T - 1."""
    return _difference(case.placed(case.x), case.run(case.x)[0])


@_holds(
    """a lambda, or a function that is defined in a hook: another one in each call, for `jax.jit`
    too. Use a function of the module or a frozen dataclass with `__call__`; a rule gets arrays
    from heads=, shared= and features.""",
    tolerance=0,
)
def second_eager_call_does_not_compile(case: Case) -> int:
    """A second call outside of `jit`, or layer, does not trace attention again."""
    before, after = (case.traced_functions(copy.deepcopy(case.scheme)) for _ in range(2))
    for name, function in itertools.chain(*after):
        text = f"{name} is another function in each call: {function}"
        assert any((name, function) in functions for functions in before), text
    return len(after)


@_holds(
    """coordinates or angles computed in the dtype of q or x: bfloat16 holds integers to 256
    only. Compute in float32 and cast the result.""",
    tolerance=0.1,
)
def bfloat16_is_near_float32(case: Case) -> float:
    """Bfloat16 in, bfloat16 out, near float32."""
    positions = count_up(BATCH, LENGTH, min(1000, case.max_length - LENGTH))
    x = case.x.astype(jnp.bfloat16)
    out = case.placed(x, positions)
    assert out.dtype == jnp.bfloat16, f"the output is {out.dtype}"
    # The same rounded projections, so that only the scheme computes in another dtype.
    weights = [w.astype(jnp.bfloat16).astype(np.float32) for w in case.weights]
    return _difference(out, case.placed(x.astype(np.float32), positions, weights=weights))


# Gradients and tiles.


@_holds("""a parameter that no hook reads, an integer conversion on its way to the output, or
    stop_gradient; NaN where a masked branch divides by zero or takes log(0).""")
def every_parameter_has_a_gradient(case: Case) -> None:
    """Every parameter has a finite gradient that is not zero."""
    for n, implementation in enumerate(case.implementations):
        _, gradient, _ = case.gradients()[n]
        _finite("gradient of params", gradient)
        # A parameter that starts at zero may hide another.
        if any(np.abs(leaf).max() <= 1e-4 for leaf in jax.tree.leaves(gradient)):
            _, gradient, _ = case.gradients(params=case.noisy_params)[n]
        for path, leaf in jax.tree.leaves_with_path(gradient):
            largest = float(np.abs(leaf).max())
            name = f"params{jax.tree_util.keystr(path)}"
            assert largest > 1e-4, f"gradient of {name} is {largest:.1e} ({implementation})"


@_holds(
    """`features` that mix tokens in both directions, or a `LogitsTransform` that reads the
    logits of keys which are not seen.""",
    tolerance=0,
)
def later_tokens_have_no_influence(case: Case) -> list[float]:
    """Later tokens have no influence."""
    errors = []
    half = case.long // 2
    for *_, slopes in case.gradients(weighted=half):
        _finite("gradient of x", slopes)
        assert np.abs(slopes[:, :half]).max() > 0, "earlier tokens have none either"
        errors.append(np.abs(slopes[:, half:]).max())
    return errors


def _tiles(case: Case, segment_ids: np.ndarray | None = None) -> float:
    expected, tiled = case.gradients(segment_ids)
    return _difference(tiled, expected)


_TILES = """`relative=True` on a rule that depends on more than q - k, `bounds` beyond which the
    rule still varies, or a rule that sees other numbers than one query's and one key's."""


@_holds(_TILES, tolerance=1e-4)
def tiles_equal_the_reference(case: Case) -> float:
    """Tiles equal the reference, with gradients."""
    return _tiles(case)


@_holds(_TILES, tolerance=1e-4)
def tiles_equal_the_reference_padded(case: Case) -> float:
    """Tiles equal the reference for padded rows, with gradients."""
    return _tiles(case, case.padded)


@_holds(_TILES, tolerance=1e-4)
def tiles_equal_the_reference_packed(case: Case) -> float:
    """Tiles equal the reference for packed rows, with gradients."""
    return _tiles(case, case.packed)


@_holds(_TILES)
def tiles_equal_the_reference_in_an_encoder(case: Case) -> float | None:
    """Tiles equal the reference without causality."""
    if case.scheme.traits.causal_only:
        return None
    expected, tiled = (
        case.run(case.long_x, is_causal=False, implementation=i)[0] for i in case.implementations
    )
    return _difference(tiled, expected)


@_holds("a hook that divides by a sum over visible keys or tokens, which may be zero.", tolerance=0)
def queries_without_keys_give_zeros(case: Case) -> list[float]:
    """Queries that see no key give zeros and finite gradients."""
    errors = []
    for out, params, x in case.gradients(case.padded):
        _finite("gradient", params, x)
        errors.append(np.abs(out[0, :PADDING]).max())
    return errors


@_holds("""sums over tokens in `features` that multiply padding by zero (NaN * 0 is NaN): replace
    it by jnp.where(segment_ids >= 0, ..., 0) before it is summed.""")
def nan_in_padding_stays_there(case: Case) -> list[float]:
    """NaN in padding stays there, in gradients too."""
    real = case.padded >= 0
    bad = np.where(real[..., None], case.long_x, np.float32(np.nan))
    pairs = zip(case.gradients(case.padded, x=bad), case.gradients(case.padded), strict=True)
    return [
        _difference(*((out[real], params, x[real]) for out, params, x in pair)) for pair in pairs
    ]


@_holds("a sum over rows, or a function applied to [B, ...] that takes B for another axis.")
def nan_in_a_row_stays_in_that_row(case: Case) -> float:
    """NaN in a row stays in that row."""
    bad = np.array(case.long_x)
    bad[0] = np.nan
    out, _, _ = case.gradients(x=bad)[-1]
    assert np.isnan(out[0]).any(), "the output of a row of NaN holds none"
    return _difference(out[1], case.gradients()[-1][0][1])


# Packing, padding, order.


@_holds("positions counted by slot, or a sum in `features` that is not taken per segment.")
def packed_sequences_equal_each_alone(case: Case) -> float:
    """Packed sequences equal each sequence alone."""
    segment_ids = np.array([[0] * 6 + [1] * 13] * BATCH, np.int32)
    positions = from_segment_ids(jnp.asarray(segment_ids))
    out = case.placed(case.x, positions, segment_ids)[0]
    expected = [case.alone(case.x[0, :6]), case.alone(case.x[0, 6:])]
    return _difference(out, np.concatenate(expected))


@_holds("positions counted by slot, or a sum in `features` that is not taken per segment.")
def segment_ids_alone_are_packed_rows(case: Case) -> list[float]:
    """Packed rows with segment_ids alone equal each sequence alone."""
    first = int((case.packed[0] == 0).sum())
    rows = zip(case.gradients(case.packed), case.gradients(), strict=True)
    errors = [_difference(out[:, :first], alone[:, :first]) for (out, *_), (alone, *_) in rows]
    later = np.roll(case.long_x, -first, 1)
    rows = zip(case.gradients(case.packed), case.gradients(x=later), strict=True)
    return errors + [_difference(out[:, first:], y[:, :-first]) for (out, *_), (y, *_) in rows]


def _padded(case: Case, mask: Any) -> list[float]:
    positions, segment_ids = from_padding_mask(jnp.asarray(mask))
    out = case.placed(case.x, positions, segment_ids)
    rows = zip(out, case.x, mask, strict=True)
    return [_difference(row[real], case.alone(x[real])) for row, x, real in rows]


@_holds("positions counted by slot, or a running sum in `features` that includes padding.")
def left_padded_rows_equal_rows_alone(case: Case) -> list[float]:
    """Rows padded on the left equal rows alone."""
    return _padded(case, np.arange(LENGTH)[None] >= np.array([[0], [6]]))


@_holds("`features` that read tokens behind the last one of a sequence.")
def right_padded_rows_equal_rows_alone(case: Case) -> list[float]:
    """Rows padded on the right equal rows alone."""
    return _padded(case, np.arange(LENGTH)[None] < np.array([[LENGTH], [13]]))


@_holds(
    """a hook or rule that reads the index of a slot instead of coordinates. Caches store keys
    in any order.""",
)
def storage_order_does_not_matter(case: Case) -> float | None:
    """The order in which tokens are stored does not matter."""
    positions = count_up(BATCH, LENGTH)
    if jax.tree.leaves(jax.eval_shape(case.cache).state):
        return None  # States follow the order of tokens; a ring stores keys in another.
    order = np.random.default_rng(0).permutation(LENGTH)
    shuffled = case.placed(case.x[:, order], positions[:, order])
    return _difference(shuffled, case.placed(case.x)[:, order])


@_holds("""a scheme that depends on more than differences of coordinates: set relative=False; or
    angles that are float32 products of coordinate and frequency: use pe.cos_sin.""")
def adding_a_constant_changes_nothing(case: Case) -> list[float] | None:
    """Adding a constant to all coordinates changes nothing (traits.relative)."""
    if not case.scheme.traits.relative:
        return None
    positions, out = count_up(BATCH, LENGTH), case.placed(case.x)
    return [_difference(case.placed(case.x, positions + n), out) for n in (1, 257, 1_000_000)]


def mirrored_change(case: Case) -> float | None:
    """Returns how outputs without causality change if the sequence is reversed, and they too.

    Parameters have noise. None for schemes that act on the embedding alone, of several axes, or for
    causal attention.
    """
    traits = case.scheme.traits
    if not case.scheme.acts_in_attention or traits.causal_only or traits.num_axes > 1:
        return None
    options: dict[str, Any] = {"params": case.noisy_params, "is_causal": False}
    out, back = (np.asarray(case.run(case.long_x[:, ::n], **options)[0]) for n in (1, -1))
    return _difference(back[:, ::-1], out)


@_holds("a scheme that tells past from future; set mirrored=False.")
def reversed_sequences_have_reversed_outputs(case: Case) -> float | None:
    """Without causality, the reversed sequence has reversed outputs (traits.mirrored)."""
    return mirrored_change(case) if case.scheme.traits.mirrored else None


@_holds("""a hook that makes positions itself instead of reading `coordinates`; or a scheme that
    reads their order alone, which has to set order_only=True.""")
def coordinates_change_the_output(case: Case) -> float | None:
    """Coordinates, not positions or slots, change the output (or traits.order_only)."""
    if not case.scheme.acts:
        return None
    out, change = case.placed(case.x), 0.0
    for factor in (2, 1_000_000):  # Some temperatures change after thousands of tokens.
        moved = case.placed(case.x, coordinates=factor * count_up(BATCH, LENGTH))
        change = _difference(moved, out)
        if case.scheme.traits.order_only:
            return change
        if change > 1e-4:
            return None
    raise AssertionError(f"a million times the coordinates change the output by {change:.1e}")


@_holds("""`astype` or `round` on coordinates, which may be float32. A scheme of integers refuses
    others by a TypeError.""")
def fractions_of_coordinates_change_the_output(case: Case) -> None:
    """Fractions of coordinates change the output, or are refused."""
    if not case.scheme.acts or case.scheme.traits.order_only:
        return
    whole = count_up(BATCH, LENGTH).astype(jnp.float32)
    places = whole, 2 * whole, whole + jnp.arange(LENGTH)[None] % 2 / 4
    options = {"params": case.noisy_params}
    try:
        out, doubled, moved = (case.placed(case.x, coordinates=x, **options) for x in places)
    except (TypeError, ValueError):
        return
    changes = (moved != out).any() or _difference(doubled, out) < 1e-4  # Or far tokens alone do.
    assert changes, "a quarter that is added to every second coordinate changes nothing"


# Caches. One program takes 6 tokens and one takes a single token: coordinates are data.

_STATE = """a state that `features` returns but does not continue from, or arrays in `k_features`
    that depend on tokens of the same call."""


def _decoded(case: Case, x: Any, chunks: list[int], coordinates: Any = None, **places: Any):
    """Returns the output of chunks of tokens through a cache that stores coordinates."""
    positions = count_up(BATCH, x.shape[1])
    places = {"positions": positions, "segment_ids": jnp.zeros_like(positions)} | places
    coordinates = places["positions"] if coordinates is None else coordinates
    cache = case.cache(coordinates=coordinates)
    return case.decode(x, chunks, cache, coordinates=coordinates, **places)[0]


@_holds(_STATE)
def prompt_then_steps_equal_the_whole(case: Case) -> float:
    """Prompt in chunks, then steps, equal the whole."""
    return _difference(_decoded(case, case.x, [6, 6, 6, 1]), case.placed(case.x))


@_holds(_STATE)
def steps_from_an_empty_cache_equal_the_whole(case: Case) -> float:
    """Steps from an empty cache equal the whole."""
    return _difference(_decoded(case, case.x, [1] * LENGTH), case.placed(case.x))


def _continued(case: Case, mask: Any, garbage: float) -> list[float]:
    """Returns errors of one step after a prompt whose padding is multiplied by `garbage`."""
    x = np.array(case.x[:, : PROMPT + 1])
    x[:, :PROMPT][~mask] *= garbage
    real = np.pad(mask, ((0, 0), (0, 1)), constant_values=True)
    positions, segment_ids = from_padding_mask(jnp.asarray(real))
    out = _decoded(case, x, [6, 6, 1], positions=positions, segment_ids=segment_ids)
    rows = zip(out, x, real, strict=True)
    return [_difference(out[-1], case.alone(row[seen])[-1]) for out, row, seen in rows]


_SUMS = """a running sum in `features` that includes padding: tokens with segment_ids < 0 must
    not change the state (jnp.where(segment_ids >= 0, ..., 0); segment_ids may be None)."""
_LEFT = np.arange(PROMPT)[None] >= np.array([[0], [7]])
_RIGHT = np.arange(PROMPT)[None] < np.array([[PROMPT], [5]])


@_holds(_SUMS)
def steps_after_left_padding_equal_rows_alone(case: Case) -> list[float]:
    """Steps after a prompt padded on the left equal rows alone."""
    return _continued(case, _LEFT, 3.0)


@_holds(_SUMS)
def steps_after_right_padding_equal_rows_alone(case: Case) -> list[float]:
    """Steps after a prompt padded on the right equal rows alone."""
    return _continued(case, _RIGHT, 3.0)


@_holds(_SUMS)
def nan_in_the_padding_of_a_prompt_stays_there(case: Case) -> list[float]:
    """NaN in the padding of a prompt stays there."""
    return _continued(case, _LEFT, np.nan) + _continued(case, _RIGHT, np.nan)


@_holds(
    "a hook that makes the coordinates of cached keys itself instead of reading them.",
)
def coordinates_travel_with_the_cache(case: Case) -> float:
    """Coordinates travel with the cache."""
    axes = case.scheme.traits.num_axes
    coordinates = 2 * count_up(BATCH, LENGTH)
    if axes > 1:
        others = [coordinates % (n + 2) for n in range(1, axes)]
        coordinates = jnp.stack([coordinates // 6, *others])
    out = _decoded(case, case.x, [1] * LENGTH, coordinates)
    return _difference(out, case.placed(case.x, coordinates=coordinates))


@_holds(
    """`rules` or `attend` that read keys outside the window, or the slot of a key. First
    tokens that stay visible are declared by num_sink_tokens.""",
)
def ring_cache_equals_the_whole(case: Case) -> float:
    """A ring cache of a window equals the whole."""
    window, chunks = 4, [3] * 3 + [1] * 4 + [3] * 2
    sinks = case.scheme.traits.num_sink_tokens
    cache = case.cache(sinks + window - 1 + max(chunks), ring=True)
    out, _ = case.decode(case.x, chunks, cache, window=window)
    return _difference(out, case.run(case.x, window=window)[0])


@_holds(
    """a state that padding changes: the states without drafts are computed with drafts as padding
    (segment_ids < 0).""",
)
def rejected_drafts_leave_no_trace(case: Case) -> float:
    """Drafts that `rewind` takes back, one to three, leave no trace."""
    rows, counts = np.arange(BATCH), np.array([1, 3])
    lengths, positions = PROMPT - counts, count_up(BATCH, PROMPT)
    drafted = np.where((positions < lengths[:, None])[..., None], case.x[:, :PROMPT], 1.0)
    places = {"positions": positions, "segment_ids": jnp.zeros_like(positions)}
    cache = case.cache(coordinates=positions, max_rewind=3)
    _, cache = case.decode(drafted, [6, 6], cache, coordinates=positions, **places)
    cache, coordinates = cache.rewind(counts), lengths[:, None] + np.arange(2)
    _, cache = case.decode(drafted, [1, 1], cache, coordinates=coordinates)
    x = case.x[rows, lengths][:, None]
    out, _ = case.decode(x, [1], cache.rewind(2), coordinates=coordinates)
    return _difference(out[:, 0], case.placed(case.x)[rows, lengths])
