"""Methods that let a trained model with RoPE read beyond its trained length, without training.

Each is a scheme or a window for a layer, from its RoPE, its trained length L and the target length
N, with f = N / L, at least 1. Parameters have the values that the authors recommend or use
themselves, in proportion to L:

    pi, ntk, ntk_by_parts, yarn, llama3   the factor f; all else as published
    dynamic_ntk       the factor f for a text of N tokens, as transformers' "dynamic" computes it
    rope_by_length    dynamic NTK with the factor 1, as in the YaRN paper: in a pass over N tokens
                      it is NTK with the factor N / L
    rerope            w = L / 4, as in its repository (1024 of 4096)
    self_extend       W = L / 4, as in its repository (1024 of 4096); the smallest power of two as G
                      whose longest distance is trained, (L - W) G + W >= N
    dual_chunk        C = 3 L / 4 with L / 8 of it local, as its authors take them
    nope              no positions, as in DroPE, but without its training
    window_W          the last W tokens
    sinks_S_window_W  these and the first S; of a trained length of 4096, StreamingLLM's Table 1 has
                      window_1024 and sinks_4_window_1020

rope, rerope, dual_chunk, nope and windows do not depend on N.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import posenc_jax as pe
from experiments.models.model import Position

_MAPS: dict[str, Callable[[float, int, int], pe.FrequencyMap]] = {
    "pi": lambda factor, trained, target: pe.PI(factor),
    "ntk": lambda factor, trained, target: pe.NTK(factor),
    "ntk_by_parts": lambda factor, trained, target: pe.NTKByParts(factor, trained),
    "yarn": lambda factor, trained, target: pe.YaRN(factor, trained),
    "dynamic_ntk": pe.DynamicNTK,
    "llama3": lambda factor, trained, target: pe.Llama3(factor, trained),
}
_SCHEMES: dict[str, Callable[[Mapping[str, Any], int, int], pe.Scheme]] = {
    "rerope": lambda rope, trained, target: pe.ReRoPE(**rope, window=trained // 4),
    "self_extend": lambda rope, trained, target: pe.SelfExtend(
        **rope, window=trained // 4, group=_group(trained, target)
    ),
    "dual_chunk": lambda rope, trained, target: pe.DualChunk(
        **rope, chunk=3 * trained // 4, local=trained // 8
    ),
    "rope_by_length": lambda rope, trained, target: pe.RoPEByLength(
        **rope, scaling=pe.DynamicNTK(1.0, trained, None)
    ),
    "nope": lambda rope, trained, target: pe.NoPE(),
}
METHODS = ("rope", *_MAPS, *_SCHEMES)
"""Names of methods without a size."""
VARIANTS = (*METHODS[1:], "window_64", "sinks_4_window_60")
"""Names of methods that change a model, some of them with examples of their sizes."""
_WINDOW = re.compile(r"(?:sinks_([1-9]\d{0,5})_)?window_([1-9]\d{0,5})")


def window_of(name: str) -> tuple[int, int] | None:
    """Returns how many first and last tokens a window of this name shows; None for other methods.

    >>> window_of("sinks_4_window_60"), window_of("window_64"), window_of("ntk")
    ((4, 60), (0, 64), None)
    """
    match = _WINDOW.fullmatch(name)
    return match and (int(match[1] or 0), int(match[2]))


def is_variant(name: str) -> bool:
    """Returns whether `varied` knows a name."""
    return name in VARIANTS or window_of(sized(name, 128)) is not None


def sized(name: str, trained: int) -> str:
    """Returns a name with its sizes, of results that have "window" and "sinks" for L tokens.

    >>> sized("window", 128), sized("sinks", 128), sized("window_64", 128)
    ('window_128', 'sinks_4_window_124', 'window_64')
    """
    whole = {"window": window(trained), "sinks": window(trained, 4)}
    return whole.get(name, name)


def window(seen: int, sinks: int = 0) -> str:
    """Returns the name of a window of `seen` tokens, `sinks` of them the first of the text."""
    return (f"sinks_{sinks}_" if sinks else "") + f"window_{seen - sinks}"


def seen(layer: pe.LayerSpec) -> int:
    """Returns the number of tokens that a token sees, itself included, without sinks."""
    window = layer.window.sides if isinstance(layer.window, pe.SlidingWindow) else layer.window
    if window is None:
        return 2**31
    return window[0] + 1 if isinstance(window, tuple) else window


def words(name: str) -> str:
    """Returns a name for tables.

    >>> words("ntk"), words("window_64"), words("sinks_4_window_60")
    ('NTK', 'window of 64', 'window of 60 and 4 sinks')
    """
    if parts := window_of(name):
        sinks, seen = parts
        return f"window of {seen}" + (f" and {sinks} sinks" if sinks else "")
    names = {"ntk": "NTK", "pi": "PI", "yarn": "YaRN", "rerope": "ReRoPE"}
    return names.get(name, name)


def changed(layer: pe.LayerSpec, name: str, trained: int, target: int) -> pe.LayerSpec:
    """Returns a layer as a method has it.

    Args:
      layer: as it was trained.
      name: of the method.
      trained: L, the trained length.
      target: N, the length to which the model shall read.

    Raises:
      ValueError: unless the scheme is one that the method changes; windows take any.

    >>> layer = pe.LayerSpec(pe.RoPE(head_dim=64))
    >>> changed(layer, "ntk", 8192, 12288).scheme.scaling
    NTK(factor=1.5)
    >>> changed(layer, "window_2048", 8192, 12288).window
    (2047, 0)
    """
    scheme: Any = layer.scheme
    if name == "rope":
        return layer
    if parts := window_of(name):
        sinks, seen = parts
        scheme = pe.streaming(scheme, sinks) if sinks else scheme
        return dataclasses.replace(layer, scheme=scheme, window=(seen - 1, 0))
    if getattr(scheme, "scaling", None) != pe.FrequencyMap():
        scaling = getattr(scheme, "scaling", None)
        words = type(scheme).__name__ + (f" with {type(scaling).__name__}" if scaling else "")
        raise ValueError(f"{name} changes RoPE without scaling, and a layer has {words}")
    if name in _MAPS:
        scaling = _MAPS[name](max(target / trained, 1.0), trained, target)
        return dataclasses.replace(layer, scheme=scheme.replace(scaling=scaling))
    if type(scheme) is not pe.RoPE:
        raise ValueError(f"{name} replaces RoPE, and a layer has {type(scheme).__name__}")
    names = "head_dim", "theta", "layout", "rotary_dim", "rotary_start"
    settings = {n: getattr(scheme, n) for n in names}
    return dataclasses.replace(layer, scheme=_SCHEMES[name](settings, trained, target))


def changed_if_whole(layer: pe.LayerSpec, name: str, trained: int, target: int) -> pe.LayerSpec:
    """Returns a layer of a mixture as `changed` does; one with a window or chunks stays.

    NoPE stays, too, but in windows.
    """
    if layer.window is not None or layer.chunk_size is not None:
        return layer
    if isinstance(layer.scheme, pe.NoPE) and window_of(name) is None:
        return layer
    return changed(layer, name, trained, target)


def _group(trained: int, target: int) -> int:
    """Returns the smallest power of two G with (L - W) G + W >= N, for W = L / 4.

    >>> [_group(8192, n) for n in (8192, 12288, 16384, 24576)]
    [1, 2, 4, 4]
    """
    window, group = trained // 4, 1
    while (trained - window) * group + window < target:
        group *= 2
    return group


def varied(position: Position, name: str, trained: int, length: int) -> Position | None:
    """Returns a trained scheme with RoPE, or its layers, changed by a method.

    Layers stay that the method does not change, and windows where a layer has its own.

    Args:
      position: as it was trained.
      name: of the method; `window` and `sinks` are as in `sized`.
      trained, length: in training, and in evaluation.

    Returns:
      None if no layer changes: always for frequency maps at the trained length.

    >>> varied(pe.RoPE(head_dim=8), "pi", 128, 256)[0].scheme.scaling
    PI(factor=2.0)
    """
    name = sized(name, trained)
    layers = position if isinstance(position, tuple) else (pe.LayerSpec(position),)
    if name in _MAPS and length == trained:
        return None
    new = tuple(_varied(layer, name, trained, length) for layer in layers)
    return None if new == layers else new


def _varied(layer: pe.LayerSpec, name: str, trained: int, length: int) -> pe.LayerSpec:
    has_window = window_of(name) is not None and layer.window is not None
    if has_window or getattr(layer.scheme, "scaling", None) != pe.FrequencyMap():
        return layer
    if name in _SCHEMES and type(layer.scheme) is not pe.RoPE:
        return layer
    return changed(layer, name, trained, length)
