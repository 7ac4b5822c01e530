"""Every setting with a default changes what comes out, of every scheme and frequency map.

A new setting fails here until the table has another value for it. `on` says which other settings
it needs beside it.
"""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import SIZES, build

import posenc_jax as pe


@dataclasses.dataclass(frozen=True)
class on:
    """Another value of a setting, and what both sides of the comparison have."""

    value: object
    given: dict = dataclasses.field(default_factory=dict)
    sinks: bool = False  # Without them softmax does not see a constant.
    initial: bool = False  # Whether only new parameters change.


initial = functools.partial(on, initial=True)
_SCALING = {"scaling": pe.PI(factor=2.0)}
_ROPE = {"theta": 100.0, "layout": "interleaved"} | _SCALING
_PART = {"rotary_dim": 4, "rotary_start": 2}
_LONG = {"window": 6}
_CHUNK = {"chunk": 9, "local": 3}
_GATE = {"gate": "fixed", "min_time": 2.0, "max_time": 8.0}

SCHEMES = {
    "fourier": {"axes": 3, "features": 6, "width": 5, "gamma": initial(1.0)},
    "learned": {"offset": 2, "stddev": initial(0.1)},
    "none": {},
    "sinusoidal": {"theta": 100.0, "layout": "concat"},
    "sinusoidal_2d": {"theta": 100.0, "layout": "interleaved", "axes": (0, 1)},
    "alibi": {"sides": "learned", "alibi_heads": 3, "past_bonus": 0.5, "scaled": True},
    "dape": {"base": "alibi", "width": 5},
    "fire": {"width": 5, "init_c": initial(0.5), "init_length": 8.0, "eps": 0.1},
    "kerple": {},
    "kerple_power": {},
    "sandwich": {"dim": 8, "centred": on(False, sinks=True)},
    "swin": {"window": (5, 6), "stddev": initial(0.1)},
    "swin_v2": {"window": (5, 6), "pretrained_window": (5, 5), "width": 5},
    "t5": {"num_buckets": 8, "max_distance": 32, "bidirectional": True, "stddev": initial(0.1)},
    "tupe": {
        "untie_cls": False,
        "num_buckets": 8,
        "max_distance": on(16, {"num_buckets": 16}),
        "stddev": initial(0.1),
    },
    "cope": {"num_positions": 4, "scaled": False},
    "deberta": {
        "span": on(8, {"max_distance": 512}),
        "max_distance": on(20, {"span": 8}),
        "content_to_position": False,
        "position_to_content": False,
        "projected": True,
        "stddev": initial(0.1),
    },
    "fox": {
        "gate": on("bias", _GATE),
        "init_bias": initial(1.0),
        "min_time": on(3.0, _GATE),
        "max_time": on(9.0, _GATE),
    },
    "grape_a": {"gate": "query", "init_omega": initial(2.0)},
    "inkling": {
        "rank": 4,
        "extent": 8,
        "floor": on(8, {"slope": 0.1}),
        "slope": on(0.5, {"floor": 8}),
        "stddev": initial(0.1),
    },
    "path": {"num_kv_heads": 2, "rank": 4, "short_conv": False, "forget_gate": True},
    "shaw": {"clip": 3, "keys": False, "values": False, "per_head": True, "zero_beyond": True},
    "stick_breaking": {"remainder": False, "attend_current": True},
    "transformer_xl": {"clamp": 4, "stddev": initial(0.1)},
    "axial_rope": {
        "theta": 10.0,
        "axes": (1, 0),
        "frequencies": "dealt",
        "layout": "half_per_axis",
        "rotary_dim": 4,
    },
    "rope_by_length": _ROPE
    | _PART
    | {"scaling": pe.DynamicNTK(factor=4.0, original_max_position=8, length=None)},
    "comrope": {"size": 2, "axes": "by_block", "groups": 2, "init_std": initial(0.1)},
    "dual_chunk": {n: on(v, _CHUNK) for n, v in (_ROPE | _PART | {"chunk": 7, "local": 2}).items()},
    "fope": {"groups": 2, "gain": 0.6, "theta": 100.0, "still": True, "learned": True, "seed": 1},
    "learned_rope": _ROPE | _PART | {"groups": 2, "alpha_scale": 4.0},
    "liere": {"size": 4, "groups": 2},
    "rope_mixed": {"groups": 2, "theta": initial(100.0), "layout": "half"},
    "mrope": _ROPE | _PART | {"rotary_dim": 6, "sections": (1, 2, 1), "order": "alternating"},
    "pope": {"theta": 100.0, "rotary_dim": 4, "uniform": initial(True)},
    "repo": {
        "groups": 2,
        "width": 3,
        "theta": 100.0,
        "layout": "interleaved",
        "init_std": initial(0.5),
    },
    "rerope": {n: on(v, _LONG) for n, v in (_ROPE | _PART | {"window": 9, "leak": 0.5}).items()}
    | {"restart": on(9, {"window": 6, "leak": 0.5})},
    "rope": _ROPE | _PART,
    "rope_pp": _ROPE | {"heads": "odd"},
    "selective_rope": {
        "groups": 2,
        "rank": 4,
        "width": 2,
        "theta": 100.0,
        "temp_max": 0.5,
        "learn_temperature": True,
    },
    "self_extend": {
        n: on(v, _LONG) for n, v in (_ROPE | _PART | {"window": 9, "group": 3}).items()
    },
    "ssmax": {"scale": initial(1.0), "offset": 0.5},
    "temperature": {"form": "log_n_clipped", "length": 8, "strength": on(0.5, {"form": "beam"})},
    "xpos": {"theta": 100.0, "scale_base": 64.0, "gamma": 0.8, "layout": "half"},
}

_BASE = {"factor": 4.0, "original_max_position": 64}
_LISTS = {"short_factor": (1.0,) * 32, "long_factor": (2.0,) * 32}
MAPS = {
    "FrequencyMap": {},
    "PI": {"factor": 2.0},
    "NTK": {"factor": 2.0},
    "Resonance": {},
    "Proportional": {"fraction": 0.5},
    "HighFrequenciesOnly": {"original_max_position": 64},
    "ClippedFrequencies": {"pairs": 10, "hard": True},
    "DynamicNTK": {
        "factor": on(2.0, _BASE | {"length": 256}),
        "original_max_position": on(32, _BASE | {"length": 256}),
        "length": on(128, _BASE | {"length": 256}),
    },
    "Llama3": {
        "factor": 4.0,
        "original_max_position": 256,
        "low_freq_factor": on(2.0, {"original_max_position": 256}),
        "high_freq_factor": on(30.0, {"original_max_position": 256}),
    },
    "NTKByParts": {
        name: on(value, _BASE)
        for name, value in {
            "factor": 2.0,
            "original_max_position": 128,
            "beta": (1.5, 0.25),
            "gamma": (8.0, 0.5),
        }.items()
    },
    "YaRN": {
        name: on(value, _BASE)
        for name, value in {
            "factor": 2.0,
            "original_max_position": 512,
            "beta_fast": 5.0,
            "beta_slow": 0.05,
            "ramp": "rotations",
            "truncate": False,
            "attention_factor": 1.5,
            "mscale": 0.5,
            "mscale_all_dim": 0.5,
        }.items()
    },
    "LongRoPE": {
        name: on(value, _BASE | _LISTS | given)
        for name, value, given in (
            ("short_factor", (1.5,) * 32, {}),
            ("long_factor", (3.0,) * 32, {"long": True}),
            ("factor", 2.0, {}),
            ("original_max_position", 128, {}),
            ("long", True, {}),
            ("magnitude", "yarn", {}),
            ("attention_factor", 1.5, {}),
        )
    },
}

KEY = jax.random.key(0, impl="unsafe_rbg")  # It compiles in no time.
POSITIONS = jnp.array([[0, 1, 2, 3, 5, 8, 13, 21, 30, 40, 50, 63]], jnp.int32)
AXES = jnp.stack([POSITIONS * 0 + jnp.arange(12, dtype=jnp.int32) * n % 4 for n in (1, 2, 3)])


def cases(table):
    return [
        pytest.param(
            name, field, option if isinstance(option, on) else on(option), id=f"{name}-{field}"
        )
        for name, fields in table.items()
        for field, option in fields.items()
    ]


def both(make, option, field):
    """One thing as it is, and with another value of one setting."""
    return make(**option.given), make(**(option.given | {field: option.value}))


@functools.cache
def output(scheme, sinks):
    """Embedding and attention of a few tokens, with parameters of any values."""
    numbers = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(numbers.normal(size=shape), jnp.float32)

    length, dim = POSITIONS.shape[1], SIZES["head_dim"]
    x = normal(1, length, SIZES["model_dim"])
    q, k, v = (normal(1, length, heads, dim) for heads in (6, 2, 2))
    params = jax.tree.map(lambda a: normal(*a.shape), jax.eval_shape(scheme.init, KEY))
    at = AXES[: scheme.traits.num_axes] if scheme.traits.num_axes > 1 else None
    where = {"positions": POSITIONS, "coordinates": at}
    x = pe.scheme_embedding(scheme, params, x, **where)
    options = {"sinks": jnp.zeros(6, jnp.float32)} if sinks else {}
    out, _ = pe.scheme_attention(scheme, params, q, k, v, x=x, is_causal=True, **where, **options)
    return [np.asarray(x), np.asarray(out)]


@pytest.mark.parametrize("name, field, option", cases(SCHEMES))
def test_a_setting_of_a_scheme_changes_the_output(name, field, option):
    schemes = both(functools.partial(build, pe.SCHEMES[name]), option, field)
    if option.initial:
        a, b = (jax.tree.leaves(scheme.init(KEY)) for scheme in schemes)
    else:
        a, b = (output(scheme, option.sinks) for scheme in schemes)
    assert max(np.abs(x - y).max() for x, y in zip(a, b, strict=True)) > 1e-3


@pytest.mark.parametrize("name, field, option", cases(MAPS))
def test_a_setting_of_a_frequency_map_changes_the_frequencies(name, field, option):
    maps = both(getattr(pe, name), option, field)
    (a, factor), (b, other_factor) = (pe.rope_frequencies(64, scaling=m) for m in maps)
    assert np.abs(a - b).max() + abs(factor - other_factor) > 1e-4


def test_no_setting_is_left_out():
    maps = {
        name: cls
        for name, cls in vars(pe).items()
        if inspect.isclass(cls) and issubclass(cls, pe.FrequencyMap)
    }
    for table, classes in ((SCHEMES, pe.SCHEMES), (MAPS, maps)):
        assert set(table) == set(classes)
        for name, cls in classes.items():
            fields = dataclasses.fields(cls)
            wanted = {f.name for f in fields if f.default is not dataclasses.MISSING}
            assert set(table[name]) == wanted, name
