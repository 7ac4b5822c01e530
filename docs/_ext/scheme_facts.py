"""The facts on the page of a scheme: from the code, its test file, and pages with numbers."""

import csv
import functools
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from PIL import Image
from scheme_use import CHAINED

import posenc_jax as pe
from experiments.models.schemes import with_sizes
from posenc_jax.engine.blocks import Blocks
from posenc_jax.kernels.tpu.implementation import PallasTPU
from posenc_jax.schemes.scheme import param_axes

ROOT = Path(__file__).resolve().parents[2]
ALWAYS = ("reference", "dense", "xla")
KERNELS = PallasTPU(Blocks(128, 128), Blocks(128, 128), interpret=True)
SIZES = {
    **dict.fromkeys(("num_heads", "num_kv_heads"), 4),
    **{"head_dim": 16, "model_dim": 64, "max_length": 32, "trained_length": 32},
}
Fact = tuple[str, str]


def is_scheme(thing: Any) -> bool:
    """Returns whether a thing is a scheme of `SCHEMES`."""
    return thing in pe.SCHEMES.values() if inspect.isclass(thing) else False


def is_map(thing: Any) -> bool:
    """Returns whether a thing is a frequency map of RoPE, other than the identity."""
    return inspect.isclass(thing) and issubclass(thing, pe.FrequencyMap) and thing in _maps()


def picture(cls: type) -> list[str]:
    """Returns the picture of the gallery and its caption, as Markdown."""
    file = f"{cls.name if is_scheme(cls) else cls.__name__}.png"
    with Image.open(ROOT / "docs" / "gallery" / file) as image:
        caption = image.info["Description"]
    return [
        f"```{{figure}} ../gallery/{file}",
        f":alt: {caption}",
        ":class: dark-light",
        caption,
        "```",
        "",
    ]


def facts(cls: type) -> list[Fact]:
    """Returns labels and texts in Markdown for a scheme or a frequency map."""
    rows = _of_scheme(cls) if is_scheme(cls) else []
    test = _test_file(cls)
    rows.append(("Numbers from outside", f"{_first_line(test)} [{test.name}]({_relative(test)})"))
    doc = sys.modules[cls.__module__].__doc__ or ""
    if link := re.search(r"https://arxiv\.org/abs/([\d.]+\d)", doc):
        rows.append(("Paper", f"[arXiv {link[1]}]({link[0]})"))
    return rows


def _of_scheme(cls: type[pe.Scheme]) -> list[Fact]:
    scheme = with_sizes(cls, SIZES)
    traits = scheme.traits
    relative = "yes: a constant added to all positions changes nothing" if traits.relative else "no"
    rows = [
        ("Name", f"`pe.SCHEMES[{cls.name!r}]`"),
        ("Acts on", str(scheme.acts)),
        ("Learned", _learned(scheme)),
        ("Relative", relative),
    ]
    if traits.causal_only:
        rows.append(("In an encoder", f"refused by layers: {traits.causal_only}"))
    elif cls.__name__ not in CHAINED:
        tells = "does not tell" if traits.mirrored else "tells"
        rows.append(("In an encoder", f"{tells} past from future"))
    if traits.num_axes > 1:
        rows.append(("Axes of coordinates", str(traits.num_axes)))
    if traits.reads_x:
        rows.append(("Reads", "the activations `x` that q and k were projected from"))
    rows.append(("Cached", _cached(scheme)))
    rows.append(("Implementations", _implementations(scheme)))
    full, ring, sinks = _decoding()[cls.name]
    text = f"{full} in a full cache, {ring} in a ring, {sinks} with attention sinks"
    text = text.replace("raises with attention sinks", "refused with attention sinks")
    link = "[how](../serving.md#every-scheme-in-every-cache)"
    rows.append(("Decoding against one pass", f"{text} (largest difference, {link})"))
    return rows


def _learned(scheme: pe.Scheme) -> str:
    """Returns the parameters by name with their axes, or "nothing"."""
    params = jax.eval_shape(scheme.init, jax.random.key(0))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(params)]
    names = [".".join(re.findall(r"[\w]+", path)) for path in paths]
    words = [
        "" if set(axes) <= {"-"} else f" [{', '.join(axes)}]"
        for axes in (param_axes(scheme) if names else [])
    ]
    return ", ".join(f"`{n}{w}`" for n, w in zip(names, words, strict=True)) or "nothing"


def _implementations(scheme: pe.Scheme) -> str:
    """Returns the words for `implementation=`, as far as the scheme decides."""
    if not scheme.acts_in_attention:
        return "all: it acts on the embedding only" if scheme.acts else "all"
    words = [*ALWAYS, *(["jax", "cudnn"] if _runs(scheme, "jax") else [])]
    text = ", ".join(f"`{word}`" for word in words)
    return text + (", [`pallas`](../kernels.md)" if _runs(scheme, KERNELS) else "")


def _cached(scheme: pe.Scheme) -> str:
    """Returns the entries of a cache: keys as used or raw, values, and arrays of the scheme."""
    if not scheme.acts_in_attention:
        return "k, v"
    heads, dim, model = (SIZES[n] for n in ("num_heads", "head_dim", "model_dim"))
    cache = jax.eval_shape(
        lambda: pe.new_cache(scheme, 1, 2, num_heads=heads, head_dim=dim, model_dim=model)
    )
    keys = "k" if scheme.traits.cache_transformed_keys else "raw k"
    more = [n for n in ("k_features", "state") if jax.tree.leaves(getattr(cache, n))]
    words = {"k_features": "more per key", "state": "running sums"}
    return ", ".join([keys, "v", *(words[n] for n in more)])


def _runs(scheme: pe.Scheme, implementation: Any) -> bool:
    """Returns whether an implementation of attention runs a scheme of SIZES."""
    q = jnp.zeros((1, 32, SIZES["num_heads"], SIZES["head_dim"]))
    x = jnp.zeros((1, 32, SIZES["model_dim"]))
    params = jax.eval_shape(scheme.init, jax.random.key(0))

    def attend(params, q):
        return pe.scheme_attention(
            scheme, params, q, q, q, x=x, is_causal=True, implementation=implementation
        )[0]

    try:
        jax.eval_shape(attend, params, q)
    except NotImplementedError:
        return False
    return True


@functools.cache
def _maps() -> frozenset[type]:
    from experiments.gallery.probe import frequency_maps

    return frozenset(frequency_maps())


@functools.cache
def _decoding() -> dict[str, list[str]]:
    """Returns docs/decoding.csv: differences in full caches, rings and with sinks."""
    with (ROOT / "docs" / "decoding.csv").open(newline="") as file:
        return {name: cells for name, *cells in csv.reader(file)}


def _test_file(cls: type) -> Path:
    *folders, module = cls.__module__.split(".")[1:]
    folder = ROOT.joinpath("tests", *folders)
    same = folder / f"test_{module}.py"
    others = sorted((ROOT / "tests" / "schemes").rglob("test_*.py"))
    setting = f".{cls.__name__}: {{"
    return same if same.exists() else next(f for f in others if setting in f.read_text())


def _first_line(test: Path) -> str:
    """Returns the first sentence of the docstring of a test file, with a full stop."""
    line = test.read_text().split('"""')[1].split("\n")[0]
    return line.rstrip(".") + "."


def _relative(path: Path) -> str:
    return f"../../{path.relative_to(ROOT)}"
