"""The table of docs/kernels.md that says which implementation computes what.

Each implementation is asked (`refusal`) about each kind of rule with each feature.

    python -m tests.makers kernels_support      write the table into the page
"""

import dataclasses
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np

import posenc_jax as pe
from posenc_jax.engine.api import IMPLEMENTATIONS, AttentionCall, make_problem
from posenc_jax.engine.splash import Splash
from posenc_jax.kernels.base import Kernels
from posenc_jax.kernels.gpu.implementation import PallasGPU
from posenc_jax.kernels.tpu.implementation import PallasTPU
from tests.engine.rules import KINDS

PAGE = pathlib.Path(pe.__file__).parents[1] / "docs" / "kernels.md"
RULES = {
    "no rule": "none",
    "`LogitBias` of the distance, elementwise: ALiBi, KERPLE": "alibi",
    "`LogitBias` of the distance with tables: T5, Sandwich": "t5",
    "`LogitBias` of two tokens with a network: FIRE": "fire",
    "`LogitBias` of several coordinates: Swin": "two_axes",
    "`SeparableBias`: FoX": "separable",
    "`ContentBias`, elementwise": "fox",
    "`DotBias`, bounded: Inkling, DeBERTa": "narrow",
    "`DotBias`, unbounded: Transformer-XL": "unbounded",
    "`DenseBias`, one array: pair biases": "one_array",
    "`ValueBias` with a `DotBias`: Shaw": "shaw",
    "`LogitsTransform`: CoPE, DAPE, stick-breaking, PaTH": "whole",
}


def _even(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx) % 2 == 0


class OfAnyVersion(PallasGPU):
    """The kernels for GPUs, as if this were a jax that has them."""

    refusal = Kernels.refusal


COLUMNS = {f'"{name}"': implementation for name, implementation in IMPLEMENTATIONS.items()}
del COLUMNS['"reference"']  # It computes everything.
for word in ("pallas", "splash", "cudnn"):  # Their answers depend on the platform.
    del COLUMNS[f'"{word}"']
COLUMNS |= {
    '"splash"': Splash(cross_compile=True),
    '"pallas" on TPU': PallasTPU(cross_compile=True),
    '"pallas" on GPU': OfAnyVersion(cross_compile=True),
}
EVERYTHING = ('"dense"', '"xla"')
B, T, N, K, H = 2, 32, 4, 2, 8


def features():
    """Returns q, k and v, and the options of each feature, which may replace q, k and v."""
    positions, ids = jnp.arange(T), jnp.zeros((B, T), jnp.int32)
    shapes = {"q": (B, T, N, H), "k": (B, T, K, H), "v": (B, T, K, H)}
    arrays = {name: jnp.zeros(shape) for name, shape in shapes.items()}

    def of_dtype(dtype):
        return {name: x.astype(dtype) for name, x in arrays.items()}

    def later(queries):
        options = {"q_positions": positions[-queries:], "k_positions": positions, "is_causal": True}
        return {"q": arrays["q"][:, -queries:]} | options

    return arrays, {
        "causality": {"is_causal": True},
        "a window": {"window": (3, 2)},
        "`prefix_length`": {"is_causal": True, "prefix_length": jnp.zeros(B, jnp.int32)},
        "`k_visible_until`": {"is_causal": True, "k_visible_until": positions + 9},
        "a `block_mask`": {"mask": pe.block_mask(_even, T, T)},
        "packed rows": {"q_segment_ids": ids, "is_causal": True, "contiguous": True},
        "padding": {"q_segment_ids": ids, "contiguous": True},
        "given positions": {"q_positions": positions, "k_positions": positions, "is_causal": True},
        "T < S": later(20),
        "a decode step": later(1),
        "as many key heads": {name: jnp.zeros((B, T, N, H)) for name in "kv"},
        "softcap": {"softcap": 30.0},
        "sinks": {"sinks": jnp.zeros(N)},
        "dropout": {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)},
        "a given `mask`": {"mask": jnp.ones((1, 1, T, T), bool)},
        "log-sum-exp": {},
        "float32": {},
        "bfloat16": of_dtype(jnp.bfloat16),
        "float16": of_dtype(jnp.float16),
    }


def refused(kind: str) -> dict[str, list[str]]:
    """Returns the features that each implementation refuses for a kind of rule."""
    rule_kind = KINDS["all_pairs" if kind == "one_array" else kind]
    out = {name: [] for name in COLUMNS}

    def ask():
        arrays, by_feature = features()
        for feature, options in ({"": {}} | by_feature).items():
            q, k, v = (options.get(name, arrays[name]) for name in "qkv")
            options = {name: x for name, x in options.items() if name not in arrays}
            if rule_kind.axes:
                for name, x in (("q_coordinates", q), ("k_coordinates", k)):
                    zeros = jnp.zeros((rule_kind.axes, B, x.shape[1]), jnp.int32)
                    options = {name: zeros} | options
            rules = rule_kind.rules(rule_kind.make(np.random.default_rng(0), N, H), q, k)
            rules = rules[:1] if kind == "one_array" else rules
            problem = make_problem(q, k, v, rules, AttentionCall(**options))
            problem = dataclasses.replace(problem, needs_lse=feature == "log-sum-exp")
            for name, implementation in COLUMNS.items():
                asked = problem
                if name == '"pallas" on GPU' and q.dtype == jnp.float32 and feature != "float32":
                    halves = {n: getattr(problem, n).astype(jnp.bfloat16) for n in "qkv"}
                    asked = dataclasses.replace(problem, **halves)
                if implementation.refusal(asked) is not None:
                    out[name].append(feature)

    jax.eval_shape(ask)
    return out


def table() -> str:
    """Returns the table, in Markdown, without the implementations that compute everything."""
    names = [name for name in COLUMNS if name not in EVERYTHING]
    lines = [f"| rule | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    without_rule = {}
    for label, kind in RULES.items():
        by_implementation = refused(kind)
        assert not any(by_implementation[name] for name in EVERYTHING)
        cells = {}
        for name in names:
            without = by_implementation[name]
            cells[name] = f"all but {', '.join(without)}" if without else "yes"
            cells[name] = "no" if "" in without else cells[name]
        same = {name for name in names if cells[name] == without_rule.get(name)}
        without_rule = without_rule or cells
        texts = ("as without a rule" if name in same else cells[name] for name in names)
        lines.append(f"| {label} | {' | '.join(texts)} |")
    return "\n".join(lines) + "\n"


def replaced(page: str) -> str:
    """Returns the page with a new table in place of its own."""
    return re.sub(r"(?m)^\| rule \| .*\n(\|.*\n)+", lambda _: table(), page)


def main(argv: list[str]) -> None:
    PAGE.write_text(replaced(PAGE.read_text()))
