"""Cycles of the TPU kernels by the compiler's schedule, on a machine without a TPU.

libtpu compiles for a chip that is only described, and can write down its schedule: one line per
cycle, with the units in use, by region (a branch of a kernel). Regions of straight code are
scheduled statically, so that their lines are their cycles, but for waits on memory. This
program compiles the kernels for some rules, prints the cycles of their tiles, and compares them
with the numbers in tpu_static.json. It exits with 1 if a number is 5 % worse, and with 2 if
there was nothing to compare with or the compiler's files could not be read.

    pip install "jax[tpu]"
    python -m tests.makers kernels_tpu_static        compile and compare
    ... kernels_tpu_static --write                   and write the numbers down, for this libtpu
    ... kernels_tpu_static --chips v6e --cases "none;t5"

Trip counts, waits on memory, and the programs of XLA around the kernels are left out.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import re
import sys
import tempfile
import time
from collections.abc import Iterable
from importlib.metadata import version

DUMP = pathlib.Path(tempfile.mkdtemp(prefix="tpu-static-"))
PASSES = "packed-bundles-post-ra|pre-delay|post-delay-converter"
os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # Else one process at a time.
    "LIBTPU_INIT_ARGS": (
        f"--xla_jf_dump_to={DUMP} --xla_jf_dump_llo_text=true "
        f"--xla_jf_dump_llo_pass_label_regex={PASSES}"
    ),
}

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    SingleDeviceSharding,
)

import posenc_jax as pe
from posenc_jax.engine.blocks import Blocks
from posenc_jax.engine.rules import DenseBias, SeparableBias
from posenc_jax.engine.splash import Splash
from posenc_jax.kernels.tpu.implementation import PallasTPU

COMMITTED = pathlib.Path(__file__).parents[1] / "kernels" / "tpu_static.json"
CHIPS = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v5p": "v5p:2x2x1", "7x": "tpu7x:2x2x1"}
KERNELS = {
    "forward": "attention_forward|splash_mha_fwd",
    "backward": "attention_backward(?!_)|splash_mha_dkv",
    "pairs": "attention_backward_pairs",
    "dq": "splash_mha_dq",
    "decode": "attention_decode",
}
ARRAYS = {"separable": SeparableBias, "pairs": DenseBias}
WORSE = 1.05
READ = {"v5e": 819 / 1.5, "v6e": 1640 / 1.75, "v5p": 2765 / 2 / 1.75}
"""Bytes that a core reads from HBM in a cycle.

Bandwidths are those of cloud.google.com/tpu/docs/v5e, v6e and v5p (per chip; a v5p has two cores).
Clocks in GHz follow from the rates of bfloat16 products given there, 197, 918 and 459 TFLOP/s, and
the 65,536, 262,144 and 2 x 65,536 products per cycle of the matrix units.
"""


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem: T = S, causal; or a decode step of batch 8.

    Attributes:
      rule: "none", "separable", the name of a scheme, "splash": JAX's own kernels, "default
        splash": these as `implementation="splash"` runs them, or "pairs": a `DenseBias`
        [1, N, T, T], not causal.
      batch, length: B and T.
      heads, kv_heads, dim, dtype: N, K, H and the dtype of q, k and v.
      tile: queries and keys per tile; keys per block of a decode step.
      queries: of a decode step with a cache of `length` slots, else 0.
      segments, positions: whether these are given, as data.
      options: more arguments of `attention`.
      pairs: dtype of the array of all pairs.
      precision: the setting `jax_default_matmul_precision`.
    """

    rule: str = "none"
    batch: int = 2
    length: int = 8192
    heads: int = 8
    kv_heads: int = 8
    dim: int = 128
    dtype: str = "bfloat16"
    tile: int = 512
    queries: int = 0
    segments: bool = False
    positions: bool = False
    options: tuple = ()
    pairs: str = "bfloat16"
    precision: str | None = None


CASES = {
    "none": Case(),
    "splash attention": Case("splash"),
    'implementation="splash"': Case("default splash", tile=1024),
    'implementation="splash", T 16384': Case("default splash", length=16384, tile=1024),
    "t5": Case("t5"),
    "alibi": Case("alibi"),
    "kerple": Case("kerple"),
    "t5, window": Case("t5", options=(("window", 1024),)),
    "none, segments": Case(segments=True),
    "t5, segments": Case("t5", segments=True),
    "none, softcap": Case(options=(("softcap", 30.0),)),
    "t5, softcap": Case("t5", options=(("softcap", 30.0),)),
    "none, dropout": Case(options=(("dropout_rate", 0.1),)),
    "t5, dropout": Case("t5", options=(("dropout_rate", 0.1),)),
    "t5, groups of 4": Case("t5", kv_heads=2),
    "fox": Case("separable"),
    "alibi, positions": Case("alibi", positions=True),
    "kerple, positions": Case("kerple", positions=True),
    "none, H 64": Case(dim=64),
    "t5, H 64": Case("t5", dim=64),
    "none, H 256": Case(dim=256),
    "t5, H 256": Case("t5", dim=256),
    "none, float32": Case(dtype="float32", tile=256),
    "t5, float32": Case("t5", dtype="float32", tile=256),
    "none, 1024": Case(tile=1024),
    "t5, 1024": Case("t5", tile=1024),
    "shaw": Case("shaw"),
    "inkling": Case("inkling"),
    "transformer_xl": Case("transformer_xl"),
    "deberta": Case("deberta"),
    "inkling, 1024": Case("inkling", tile=1024),
    "t5, precision high": Case("t5", precision="high"),
    "t5, precision highest": Case("t5", precision="highest"),
    "inkling, precision highest": Case("inkling", precision="highest"),
    "kerple, T 32768": Case("kerple", length=32768),
    "kerple, T 32768, groups of 4": Case("kerple", length=32768, kv_heads=2),
    "pairs": Case("pairs", length=2048),
    "pairs, float32": Case("pairs", length=2048, pairs="float32"),
    "pairs, causal": Case("pairs", length=2048, options=(("is_causal", True),)),
    "pairs, B 128, N 4, H 32": Case("pairs", 128, 2048, 4, 4, 32),
    "pairs, B 128, N 4, H 32, float32": Case("pairs", 128, 2048, 4, 4, 32, pairs="float32"),
    "pairs, B 128, N 4, H 32, 1024": Case("pairs", 128, 2048, 4, 4, 32, tile=1024),
    "pairs, B 1, N 16, H 48": Case("pairs", 1, 2048, 16, 16, 48),
    "pairs, B 1, N 16, H 24": Case("pairs", 1, 2048, 16, 16, 24),
    "decode": Case(queries=1, heads=32),
    "decode, t5": Case("t5", queries=1, heads=32),
    "decode, fire": Case("fire", queries=1, heads=32),
    "decode, 16 queries": Case(queries=16, heads=32),
    "decode, 16 heads": Case(queries=1, heads=16, kv_heads=16, tile=256),
    "decode, t5, 16 heads": Case("t5", queries=1, heads=16, kv_heads=16, tile=256),
    "decode, fire, 16 heads": Case("fire", queries=1, heads=16, kv_heads=16, tile=256),
    "decode, 1 key head": Case(queries=1, heads=8, kv_heads=1, tile=2048),
    "decode, 2 key heads": Case(queries=1, heads=8, kv_heads=2, tile=2048),
    "decode, H 64": Case(queries=1, heads=32, dim=64, tile=1024),
    "decode, H 256": Case(queries=1, heads=32, dim=256, tile=256),
    "decode, float32": Case(queries=1, heads=32, dtype="float32", tile=256),
    "decode, precision highest": Case(queries=1, heads=32, precision="highest"),
}
"""Cases by name; ratios are to the first case with "none" and the same rest."""


@dataclasses.dataclass
class Kernel:
    """The schedule of a kernel.

    Attributes:
      tiles: cycles of each kind of tile, in the order of `schedule.kinds`.
      rest: cycles of all other regions.
      step: cycles of a step of the grid whose tile is skipped; part of `rest`.
      mxu: share of the matrix unit in the first kind of tile.
      vmem: bytes.
    """

    tiles: list[int]
    rest: int
    step: int
    mxu: float
    vmem: int


class UnreadableError(Exception):
    """The compiler wrote no schedule, or one that this program does not understand."""


@functools.cache  # Devices of two descriptions of one topology differ.
def device(chip: str):
    return topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip]).devices[0]


def abstract_device(chip: str) -> AbstractDevice:
    about = {"device_kind": device(chip).device_kind, "num_cores": 1}
    with contextlib.suppress(TypeError):  # jax 0.10 has no platform there.
        return AbstractDevice(**about, platform="tpu")
    return AbstractDevice(**about)


def program(case: Case):
    """Returns forward and backward of a case, and the shapes of its arguments."""
    if case.rule == "splash":
        return splash(case)
    if case.queries:
        return decode_step(case, PallasTPU(decode=case.tile, cross_compile=True))
    tile = Blocks(case.tile, case.tile)
    implementation = PallasTPU(tile, tile, cross_compile=True)
    if case.rule == "default splash":
        case, implementation = dataclasses.replace(case, rule="none"), Splash(cross_compile=True)
    tokens = case.batch, case.length
    q = jax.ShapeDtypeStruct((*tokens, case.heads, case.dim), case.dtype)
    k = jax.ShapeDtypeStruct((*tokens, case.kv_heads, case.dim), case.dtype)
    number = jax.ShapeDtypeStruct((*tokens, case.heads), jnp.float32)
    integer = jax.ShapeDtypeStruct(tokens, jnp.int32)
    scheme, params = None, {}
    if case.rule == "separable":
        params = {"q_features": number, "k_features": number}
    elif case.rule == "pairs":
        shape = 1, case.heads, case.length, case.length
        params = {"pairs": jax.ShapeDtypeStruct(shape, case.pairs)}
    elif case.rule != "none":
        width = 128
        sizes = {"num_heads": case.heads, "head_dim": case.dim, "model_dim": width}
        sizes |= {"values": False, "projected": True}
        known = {field.name for field in dataclasses.fields(pe.SCHEMES[case.rule])}
        scheme = pe.SCHEMES[case.rule](**{n: x for n, x in sizes.items() if n in known})
        params = jax.eval_shape(scheme.init, jax.random.key(0))
        params = {"x": jax.ShapeDtypeStruct((*tokens, width), case.dtype)} | params

    def attend(q, k, v, params, integers):
        rules = ()
        if case.rule in ARRAYS:
            rules = ARRAYS[case.rule](**params)
        if scheme:
            positions = integers if case.positions else jnp.arange(case.length)[None]
            weights, features = {n: x for n, x in params.items() if n != "x"}, params["x"]
            features = scheme.features(weights, features, q, k, positions, None, None)[:2]
            rules = scheme.rules(weights, *features)
        options = {"is_causal": case.rule != "pairs"} | dict(case.options)
        if case.segments:
            options |= {"q_segment_ids": integers, "contiguous": True}
        if "dropout_rate" in options:
            options["dropout_key"] = jax.random.key(0)
        if case.positions:
            options |= {"q_positions": integers, "k_positions": integers}
        return pe.attention(q, k, v, rules=rules, implementation=implementation, **options)

    def step(q, k, v, params, integers, d_out):
        _, pull = jax.vjp(lambda *x: attend(*x, integers), q, k, v, params)
        return pull(d_out)

    return step, (q, k, k, params, integer, q)


def decode_step(case: Case, implementation):
    """Returns a decode step of a case, and the shapes of its arguments."""
    scheme = None if case.rule == "none" else pe.SCHEMES[case.rule](num_heads=case.heads)
    params = jax.eval_shape(scheme.init, jax.random.key(0)) if scheme else {}
    q = jax.ShapeDtypeStruct((8, case.queries, case.heads, case.dim), case.dtype)
    k = jax.ShapeDtypeStruct((8, case.length, case.kv_heads, case.dim), case.dtype)
    q_tokens, k_tokens = (jax.ShapeDtypeStruct(x.shape[:2], jnp.int32) for x in (q, k))

    def step(q, k, v, params, q_positions, k_positions, k_segment_ids):
        return pe.attention(
            q,
            k,
            v,
            rules=scheme.rules(params) if scheme else (),
            q_positions=q_positions,
            k_positions=k_positions,
            q_segment_ids=jnp.zeros_like(q_positions),
            k_segment_ids=k_segment_ids,
            is_causal=True,
            implementation=implementation,
        )

    return step, (q, k, k, params, q_tokens, k_tokens, k_tokens)


def read_cycles(case: Case, chip: str) -> int:
    """Returns the cycles that reading a block of keys and values takes, 0 if unknown."""
    if chip not in READ:
        return 0
    block = case.tile * case.kv_heads * case.dim * 2 * jnp.dtype(case.dtype).itemsize
    return round(block / READ[chip])


def splash(case: Case):
    """Returns the same for the kernels that come with JAX, with tiles of the same size."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute")
    sizes = {f"block_{name}": case.tile for name in names}
    attend = kernels.make_splash_mha(
        masks.MultiHeadMask([masks.CausalMask((case.length,) * 2)] * case.heads),
        block_sizes=kernels.BlockSizes(**sizes, use_fused_bwd_kernel=True),
        head_shards=1,
        q_seq_shards=1,
    )
    q = jax.ShapeDtypeStruct((2, case.heads, case.length, case.dim), case.dtype)

    def step(q, k, v, d_out):
        _, pull = jax.vjp(jax.vmap(attend), q, k, v)
        return pull(d_out)

    return step, (q,) * 4


def compile_case(case: Case, chip: str):
    """Returns the kernels by name, the seconds of compilation, and bytes of temporary memory."""
    sharding = SingleDeviceSharding(device(chip))
    for path in DUMP.iterdir():
        path.unlink()
    # Some operations ask which chip they are lowered for.
    mesh = AbstractMesh((1,), ("x",), abstract_device=abstract_device(chip))
    start = time.monotonic()
    with jax.default_matmul_precision(case.precision), jax.sharding.use_abstract_mesh(mesh):
        step, arguments = program(case)
        arguments = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
        )
        compiled = jax.jit(step).lower(*arguments).compile()
    kernels = ["decode"] if case.queries else ["forward", "backward"]
    kernels += ["pairs"] * (case.rule == "pairs")
    kernels += ["dq"] * (case.rule == "default splash" and case.length > 8192)
    seconds = time.monotonic() - start
    return read_kernels(kernels), seconds, compiled.memory_analysis().temp_size_in_bytes


def read_kernels(names: Iterable[str]) -> dict[str, Kernel]:
    """Returns the kernels that the compiler just wrote down."""
    files = collections.defaultdict(dict)
    for path in DUMP.iterdir():
        match = re.fullmatch(r"\d+-(.*?)(?:\.\d+)?-\d+-(.*)\.txt", path.name)
        for which in names:
            if match and re.search(KERNELS[which], match[1]):
                files[which][match[2]] = path
    if sorted(files) != sorted(names):
        raise UnreadableError(f"schedules of {sorted(files)} in place of {sorted(names)}")
    return {name: read_kernel(name, files[name]) for name in names}


def read_kernel(name: str, files: dict[str, pathlib.Path]) -> Kernel:
    try:
        schedule = files["packed-bundles-post-ra"].read_text()
        use = next(path for label, path in files.items() if label.startswith("pre-delay"))
        allocations = files["post-delay-converter"].read_text()
    except (KeyError, StopIteration) as error:
        raise UnreadableError(f"{name}: no file for {error}; there are {sorted(files)}") from None
    units, capacity, rows = read_use(use.read_text())
    regions = read_regions(schedule)
    if "MXU" not in units or sum(map(len, regions.values())) > len(rows):
        raise UnreadableError(f"{name}: units {units}, {len(rows)} rows of units")
    mxu = units.index("MXU")
    busy = {n: sum(rows[line][mxu] for line in lines) for n, lines in regions.items()}
    tiles = [n for n in regions if busy[n]]
    if not tiles:
        raise UnreadableError(f"{name}: no region uses the matrix unit")
    first = tiles[0]
    vmem = re.findall(r"space=vmem, size = (0x[0-9a-f]+), offset = (0x[0-9a-f]+|0)", allocations)
    return Kernel(
        tiles=[len(regions[n]) for n in tiles],
        rest=sum(len(lines) for n, lines in regions.items() if n not in tiles),
        step=read_step(schedule, regions, tiles[0]),
        mxu=busy[first] / len(regions[first]) / capacity[mxu],
        vmem=max((int(size, 16) + int(offset, 16) for size, offset in vmem), default=0),
    )


def read_use(text: str) -> tuple[list[str], list[int], list[list[int]]]:
    """Returns the units, how many slots each has, and the slots in use by cycle."""
    units, capacity, rows = [], [], []
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith("MXU,"):
            units = [unit.strip() for unit in line.split(",")]
            capacity = [int(x) for x in next(lines).split()]
        elif units and re.fullmatch(r"[\d ]+", line):
            rows.append([int(x) for x in line.split()])
    return units, capacity, rows


def read_regions(text: str) -> dict[int, list[int]]:
    """Returns the cycles of each region, without regions inside it."""
    regions, open_, closing, cycle = collections.defaultdict(list), [0], [], -1
    for line in text.splitlines():
        bundle = re.match(r"\s*(0x[0-9a-f]+|\d+)\s+(?:[A-Z]{2})?:", line)
        if bundle:
            # The mark of an end stands after the last bundle of its region.
            open_ = [n for n in open_ if n not in closing]
            closing, cycle = [], int(bundle[1], 0)
        for mark, number in re.findall(r"(Start|End) region (\d+)", line):
            (open_ if mark == "Start" else closing).append(int(number))
        if bundle:
            regions[open_[-1] if open_ else 0].append(cycle)
    return dict(regions)


def read_step(text: str, regions: dict[int, list[int]], tile: int) -> int:
    """Returns the cycles of a turn of the loop over the grid in which no branch is entered.

    A branch to a later line jumps over the region before the one that it names; one of these
    regions holds the tiles and all else.
    """
    branch = r"(0x[0-9a-f]+) .*sbr\.rel \(.*target bundleno = (\d+) .*region = (\d+)"
    branches = [(int(i, 0), int(j), int(n)) for i, j, n in re.findall(branch, text)]
    start, end = next(((j, i) for i, j, _ in branches if j < i), (0, 0))
    inside = [n - 1 for i, j, n in branches if i < j and not i < regions[tile][0] < j]
    skipped = {tile, *inside}
    return sum(start <= cycle <= end for n, x in regions.items() if n not in skipped for cycle in x)


def base_of(name: str) -> str | None:
    """Returns the case without a rule that a case is compared with, or None."""
    case = dataclasses.replace(CASES[name], length=CASES["none"].length)
    softcap = tuple(x for x in case.options if x[0] == "softcap" and case.rule != "none")
    plain = dataclasses.replace(case, rule="none", segments=False, positions=False, options=softcap)
    plain = dataclasses.replace(plain, precision=None, pairs=Case.pairs)
    if not case.queries:
        plain = dataclasses.replace(plain, kv_heads=plain.heads)
    return next((other for other, x in CASES.items() if x == plain), None)


def describe(name: str, kernels: dict, base: dict | None) -> str:
    parts = []
    for which in kernels:
        tiles = kernels[which]["tiles"]
        of_base = base and base.get(which)
        ratio = f" x{max(tiles) / of_base['tiles'][0]:.2f}" if of_base else ""
        extra = kernels[which]["rest"] - of_base["rest"] if of_base else 0
        parts.append(
            f"{'/'.join(map(str, tiles)):>15}{ratio:7} MXU {kernels[which]['mxu']:3.0%} "
            f"and {max(extra, 0):+6d} VMEM {kernels[which]['vmem'] / 2**20:5.1f}"
        )
    return f"{name:18} {'  |  '.join(parts)}"


def compare(committed: dict, kernels: dict) -> list[str]:
    """Returns the numbers that grew by more than 5 %."""
    worse = []
    for which in kernels:
        for region in ("tiles", "rest"):
            old, new = committed[which][region], kernels[which][region]
            old, new = (sum(x) if isinstance(x, list) else x for x in (old, new))
            if new > WORSE * old:
                worse.append(f"{which} {region}: {new} cycles, {old} committed")
    return worse


def known_case(known: dict, text: str) -> bool:
    chip, name = text.split(", ", 1)
    return name in known.get(chip, {})


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chips", default=",".join(CHIPS), help=f"some of {', '.join(CHIPS)}")
    parser.add_argument("--cases", default="", help="names of cases, separated by ';' (all)")
    parser.add_argument("--write", action="store_true", help="write the numbers down")
    arguments = parser.parse_args(argv)
    names = [x.strip() for x in arguments.cases.split(";") if x.strip()] or list(CASES)
    chips = arguments.chips.split(",")
    for unknown in [x for x in names if x not in CASES] + [x for x in chips if x not in CHIPS]:
        parser.error(f"{unknown!r} is not known; cases are {list(CASES)}, chips {list(CHIPS)}")
    libtpu = version("libtpu")
    committed = json.loads(COMMITTED.read_text()) if COMMITTED.exists() else {}
    known = committed.setdefault(libtpu, {})
    failed, skipped, refused, compared = [], [], [], 0
    print(f"jax {jax.__version__}, libtpu {libtpu}; T = 8192, causal, B = 2")
    print("cycles by kind of tile, ratio of the worst to no rule, cycles elsewhere, VMEM in MiB")
    for chip in chips:
        print(f"\n{chip}")
        results = {}
        for name in names:
            try:
                kernels, seconds, temp = compile_case(CASES[name], chip)
            except UnreadableError as error:
                skipped.append(f"{chip}, {name}: {error}")
                print(f"{name:18} skipped: {error}")
                continue
            except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
                refusal = re.search(r"Ran out of memory.*?\.\s", str(error))
                refused.append(f"{chip}, {name}")
                print(f"{name:18} does not compile: {refusal[0] if refusal else error}")
                continue
            cycles = {which: vars(kernel) for which, kernel in kernels.items()}
            results[name] = cycles
            base = results.get(base_of(name)) if name != base_of(name) else None
            bound = CASES[name].queries and read_cycles(CASES[name], chip)
            read = f" of {bound} to read" if bound else ""
            print(
                f"{describe(name, cycles, base)}{read} | {seconds:4.0f} s, "
                f"{temp / 2**20:4.0f} MiB HBM"
            )
            sys.stdout.flush()
            if name in known.get(chip, {}):
                compared += 1
                worse = compare(known[chip][name], cycles)
                failed += [f"{chip}, {name}: {x}" for x in worse]
            if arguments.write:
                known.setdefault(chip, {})[name] = cycles
    if arguments.write:
        COMMITTED.write_text(json.dumps(committed, indent=1, sort_keys=True) + "\n")
        print(f"\nwrote {COMMITTED.name}")
        return 0
    failed += [f"{x}: no longer compiles" for x in refused if known_case(known, x)]
    for line in failed:
        print(f"WORSE {line}")
    if skipped or not compared:
        print(f"SKIPPED: {len(skipped)} unreadable; {compared} compared with committed numbers")
        return 2
    print(f"\n{compared} cases compared, {len(failed)} numbers more than 5 % worse")
    return 1 if failed else 0
