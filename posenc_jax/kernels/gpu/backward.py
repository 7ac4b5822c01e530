"""The backward pass for GPUs: dq, dk and dv, and the cotangents of position rules.

The three kernels sum over tiles in one fixed order and add to nothing in memory, so that results
are bitwise reproducible: dq over the keys of a block of queries, dk and dv over the queries of a
block of keys, the bias over the tiles at one distance from the diagonal. Each computes the weights
of its tiles again, the last one only of tiles with rules. Tiles of dk and dv are
transposed, so that weights enter the products as they are.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from posenc_jax.kernels.elements import Element
from posenc_jax.kernels.gpu.backward_logits import bias_grads, pair_grads, vector_grads
from posenc_jax.kernels.gpu.bands import d_logits_scale, feature_grads
from posenc_jax.kernels.gpu.forward import ByQuery, Refilled
from posenc_jax.kernels.gpu.pipe import (
    Warpgroup,
    matrix,
    most_slots,
    operand,
    pipe,
    vector,
)
from posenc_jax.kernels.gpu.spec import (
    ROW,
    ROWS,
    Cotangents,
    GPUSpec,
    Int,
    Ref,
    column_of,
    kind_of,
)
from posenc_jax.kernels.gpu.tile import (
    Tile,
    columns_to_tile,
    d_logits,
    row_scalar_count,
    rows_to_tile,
    zeros,
)
from posenc_jax.kernels.operands import Grads, Operands, Product, out_struct


def backward(
    spec: GPUSpec, x: Operands, d_out: jax.Array, lse: jax.Array, delta: jax.Array
) -> Grads:
    """Returns the cotangents of the operands; see `Kernels.run_backward`."""
    scale: Any = d_logits_scale(x, d_out, delta) if x.products else None
    cotangents = Cotangents(d_out, lse, delta, scale)
    d_q, sums_of_q, q_features = _query_grads(spec, x, cotangents)
    d_k, d_v, sums_of_k, k_features = key_grads(spec, x, cotangents)
    d_bias = None
    if x.bias is not None:
        d_bias = jnp.zeros_like(x.bias)
        # A bias of masks alone is constant.
        if spec.rules_in_bias:
            d_bias = bias_grads(spec, x, x.bias, cotangents)
    elements = map(_element, x.elements, sums_of_q, sums_of_k)
    d_features = {False: iter(q_features), True: iter(k_features)}
    products = tuple(
        Product(
            feature_grads(spec, product, next(d_features[product.of_keys]), scale),
            vector_grads(spec, x, n, cotangents),
            product.of_keys,
        )
        for n, product in enumerate(x.products)
    )
    pairs = pair_grads(spec, x, cotangents)
    return Grads(d_q, d_k, d_v, d_bias, tuple(elements), products, pairs)


def _element(element: Element, of_q: list[jax.Array], of_k: list[jax.Array]) -> Element:
    """Returns the cotangents of an element, from sums over keys, [B, N, T], and over queries."""
    count = len(element.scalars)

    def by_key_head(d, like):
        # Query heads that share a scalar are neighbours.
        return d.reshape(d.shape[0], like.shape[1], -1, 1, d.shape[2]).sum(2)

    return dataclasses.replace(
        element,
        scalars=tuple(d.sum((0, 2)) for d in of_q[:count]),
        q_scalars=tuple(d[:, :, None] for d in of_q[count:]),
        k_scalars=tuple(map(by_key_head, of_k, element.k_scalars)),
    )


def _query_grads(
    spec: GPUSpec, x: Operands, cotangents: Cotangents
) -> tuple[jax.Array, list[list[jax.Array]], list[jax.Array]]:
    """Returns dq, for each element sums of its cotangents over keys, [B, N, T], and of features."""
    kernel = QueryGrads(spec, x, spec.backward, x.schedules[1])
    per_query = out_struct(x.q, (spec.batch, spec.heads, spec.length))
    out_types = {
        "q": out_struct(x.q, x.q.shape, x.q.dtype),
        "sums": [[per_query] * row_scalar_count(e, 0) for e in x.elements],
        "features": kernel.bands.out_types,
    }
    grads = kernel.launch("backward_q", out_types, cotangents=cotangents)
    return grads["q"], grads["sums"], grads["features"]


class QueryGrads(ByQuery):
    """The kernel of dq and of sums over keys."""

    @property
    def scratch_types(self) -> dict[str, Any]:
        spec, dtype = self.spec, self.x.q.dtype
        types = {
            "q": matrix(spec, 2, ROWS, spec.dim, dtype=dtype),
            "d_out": matrix(spec, 2, ROWS, spec.value_dim, dtype=dtype),
            "ready": plgpu.Barrier(num_arrivals=2 + len(self.bands.resident), num_barriers=2),
            "sums": vector(2, ROWS),
        }
        if spec.interpret:
            types["operand"] = operand(spec.backward.k, dtype)
        return most_slots(lambda *slots: types | self.pipes(*slots))

    def compute(self, wg: Warpgroup) -> None:
        q0, count = self.queries(wg)
        b, head = wg.grid["b"], wg.grid["head"]
        of_head = b, pl.ds(q0, ROWS), head
        q, ready = wg.part("q"), wg.part("ready")
        plgpu.copy_gmem_to_smem(wg.refs["x"].q.at[of_head], q, ready)
        d_out = wg.refs["cotangents"].d_out.at[of_head]
        plgpu.copy_gmem_to_smem(d_out, wg.part("d_out"), ready)
        self.bands.copy_rows(wg, b, head, q0)
        rows = wg.refs["cotangents"].rows(b, head, q0)
        filled = self.start(wg)
        plgpu.barrier_wait(ready)

        def over_tiles(d_q, *d_features):
            def step(n, carry):
                carry, filled = carry
                carry = self._add_tile(wg, n, rows, d_q, d_features, *carry)
                return carry, self.refill(wg, n, filled)

            zero = [[zeros((ROWS,), ROW)] * row_scalar_count(e, 0) for e in self.x.elements]
            start = (jnp.int32(0), zero), filled
            (_, sums), _ = jax.lax.fori_loop(jnp.int32(0), count, step, start)
            return sums, d_q[...], [d[...] for d in d_features]

        acc = plgpu.ACC((ROWS, self.spec.dim), jnp.float32)
        sums, d_q, d_features = pl.run_scoped(over_tiles, acc, *self.bands.accumulators)
        for d, out_ref in zip(d_features, wg.out_refs["features"], strict=True):
            out_ref.at[b, head, pl.ds(q0, ROWS)][...] = d
        # Through the memory of the queries, which are not read any more.
        q[...] = (d_q * self.spec.scale).astype(self.x.q.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q, wg.out_refs["q"].at[of_head])
        plgpu.wait_smem_to_gmem(0)
        wg.write_rows(sums, wg.out_refs["sums"], "sums", b, head, q0)

    def _add_tile(
        self,
        wg: Warpgroup,
        n: Int,
        rows: list[jax.Array],
        d_q: Ref,
        d_features: tuple[Ref, ...],
        ruled: Int,
        sums: list[list[jax.Array]],
    ) -> tuple[Int, list[list[jax.Array]]]:
        """Adds the cotangents of tile n.

        Args:
          wg: the warpgroup.
          n: the tile.
          rows: lse and delta of the queries.
          d_q, d_features: accumulators.
          ruled: the number of tiles with rules before it.
          sums: over keys, of the cotangents of elements.

        Returns:
          `ruled` and `sums` with this tile.
        """
        tile = self.tile(wg, n)
        self.bands.prepare(wg, tile, ruled)
        keys, values = wg.scratch["keys"].wait(n), wg.scratch["values"].wait(n)
        lse, delta = (rows_to_tile(y, tile.shape) for y in rows)
        pairs = (wg.part("q"), keys["k"]), (wg.part("d_out"), values["v"])
        p, slope, (d_p,) = tile.weights(lse, *pairs)
        wg.scratch["values"].release(n)
        ds = d_logits(p, d_p, delta, slope)
        sums = tile.add_element_grads(ds, sums)
        wg.product(d_q, ds.astype(self.x.q.dtype), keys["k"])
        # Until here the tensor cores read the keys.
        plgpu.wgmma_wait(0)
        wg.scratch["keys"].release(n)
        self.release_bias(wg, n)
        # The next products are of float16: see `d_logits_scale`.
        if d_features:
            ds = ds * wg.refs["cotangents"].scale[0]
        self.bands.add_feature_grads(wg, d_features, ds, tile, ruled)
        return self.bands.release(wg, tile, ruled), sums


def key_grads(
    spec: GPUSpec, x: Operands, cotangents: Cotangents
) -> tuple[jax.Array, jax.Array, list[list[jax.Array]], list[jax.Array]]:
    """Returns dk, dv, sums of the elements' cotangents over queries, and cotangents of features.

    The sums are float32 [B, N, S], a list for each element.
    """
    of_keys = any(product.of_keys for product in x.products)
    make = functools.partial(KeyGrads, spec, x, spec.by_key, x.schedules[2])
    kernels = [make(k=True, v=True)]
    if spec.wide or of_keys:  # All sums take more registers than there are.
        kernels = [make(k=True), make(v=True)]
    grads = {}
    for kernel in kernels:
        grads |= kernel.run(cotangents)
    features = []
    if of_keys:
        features = make(features=True).run(cotangents)["features"]
    return grads["k"], grads["v"], grads["sums"], features


@dataclasses.dataclass(frozen=True)
class KeyGrads(Refilled):
    """A kernel of sums over queries: a block of keys goes through tiles of queries.

    Attributes:
      k: whether it computes dk, and the sums of the elements' cotangents.
      v: whether it computes dv.
      features: whether it computes the cotangents of features of keys, alone.
    """

    k: bool = False
    v: bool = False
    features: bool = False
    q_axis = 1

    def run(self, cotangents: Cotangents) -> dict[str, Any]:
        """Returns the results by name: "k" with "sums", "v", or "features"."""
        name = "f" if self.features else "k" * self.k + "v" * self.v
        return self.launch(f"backward_{name}", self.out_types, cotangents=cotangents)

    @property
    def grid(self) -> dict[str, int]:
        spec = self.spec
        return {"b": spec.batch, "head": spec.kv_heads, "j": spec.keys // self.blocks.k}

    @property
    def elements(self) -> tuple[Element, ...]:
        """The elements whose cotangents are summed here."""
        return self.x.elements if self.k else ()

    @property
    def out_types(self) -> dict[str, Any]:
        """The types of the results, by name."""
        x, spec = self.x, self.spec
        if self.features:
            return {"features": self.bands.out_types}
        types: dict[str, Any] = {}
        if self.k:
            per_key = out_struct(x.q, (spec.batch, spec.heads, spec.keys))
            types["k"] = out_struct(x.q, x.k.shape, x.q.dtype)
            types["sums"] = [[per_key] * row_scalar_count(e, 1) for e in self.elements]
        if self.v:
            types["v"] = out_struct(x.q, x.v.shape, x.q.dtype)
        return types

    @property
    def accumulators(self) -> list[Any]:
        """The types of the accumulators: of features, or of dk and dv."""
        if self.features:
            return self.bands.accumulators
        dims = [self.spec.dim] * self.k + [self.spec.value_dim] * self.v
        return [plgpu.ACC((ROWS, dim), jnp.float32) for dim in dims]

    @property
    def scratch_types(self) -> dict[str, Any]:
        spec, dtype = self.spec, self.x.q.dtype
        bq = self.blocks.q
        types = {
            "k": matrix(spec, 2, ROWS, spec.dim, dtype=dtype),
            "v": matrix(spec, 2, ROWS, spec.value_dim, dtype=dtype),
            "ready": plgpu.Barrier(num_arrivals=2 + len(self.bands.resident), num_barriers=2),
            "sums": vector(2, ROWS),
        }
        if spec.interpret:
            types["operand"] = operand(bq, dtype)
        queries = {"q": (bq, spec.dim), "lse": (bq,), **self.bias_block}

        def with_pipes(slots, band_slots):
            pipes = {
                "queries": pipe(spec, slots, dtype, self.pairs.type, **queries),
                "d_outs": pipe(spec, slots, dtype, d_out=(bq, spec.value_dim), delta=(bq,)),
            }
            return types | pipes | self.bands.scratch_types(band_slots)

        return most_slots(with_pipes)

    def _tiles(self, wg: Warpgroup) -> tuple[Int, Callable[[Int], jax.Array]]:
        """Returns the number of tiles of a block of keys, and their entries."""
        entries, j = wg.refs["entries"], wg.grid["j"]
        row = wg.grid["b"] if entries.shape[0] > 1 else 0
        return wg.refs["counts"][row, j], lambda n: entries[row, j, n]

    def compute(self, wg: Warpgroup) -> None:
        spec, b, kv_head = self.spec, wg.grid["b"], wg.grid["head"]
        count, entry = self._tiles(wg)
        k0 = wg.grid["j"] * self.blocks.k + wg.number * ROWS
        of_kv_head = b, pl.ds(k0, ROWS), kv_head
        k, v, ready = (wg.part(name) for name in ("k", "v", "ready"))
        plgpu.copy_gmem_to_smem(wg.refs["x"].k.at[of_kv_head], k, ready)
        plgpu.copy_gmem_to_smem(wg.refs["x"].v.at[of_kv_head], v, ready)
        self.bands.copy_rows(wg, b, kv_head * spec.group, k0)
        filled = self.start(wg)
        plgpu.barrier_wait(ready)
        # The second warpgroup has the later keys, at lesser distances.
        bias = pl.ds(pl.multiple_of((1 - wg.number) * ROWS, ROWS), ROWS + self.blocks.q)

        def over_tiles(*accs):
            def of_query_head(g, carry):
                head = kv_head * spec.group + g
                ruled, filled = carry

                def step(n, carry):
                    # Pipes go on from one query head to the next.
                    t = g * count + n
                    carry, filled = carry

                    def tile(queries):
                        q = column_of(entry(n)) * self.blocks.q
                        return self.part(wg, b, head, q, k0, kind_of(entry(n)), queries, bias)

                    carry = self._add_tile(wg, t, tile, accs, *carry)
                    return carry, self.refill(wg, t, filled)

                start = [[zeros((ROWS,), ROW)] * row_scalar_count(e, 1) for e in self.elements]
                (ruled, sums), filled = jax.lax.fori_loop(
                    jnp.int32(0), count, step, ((ruled, start), filled)
                )
                # Scalars may be of a query head; dk and dv are sums over all that share the keys.
                wg.write_rows(sums, wg.out_refs.get("sums", []), "sums", b, head, k0)
                return ruled, filled

            start = jnp.int32(0), filled
            jax.lax.fori_loop(jnp.int32(0), jnp.int32(spec.group), of_query_head, start)
            return [acc[...] for acc in accs]

        sums = pl.run_scoped(over_tiles, *self.accumulators)
        if self.features:
            for d, out_ref in zip(sums, wg.out_refs["features"], strict=True):
                out_ref.at[b, kv_head, pl.ds(k0, ROWS)][...] = d
            return
        if self.k:
            self._write(wg, "k", sums[0] * spec.scale, of_kv_head)
        if self.v:
            self._write(wg, "v", sums[-1], of_kv_head)
        plgpu.wait_smem_to_gmem(0)

    def _write(self, wg: Warpgroup, name: str, d: jax.Array, index: Any) -> None:
        """Writes dk or dv, through the shared memory of k or v."""
        staged = wg.part(name)
        staged[...] = d.astype(self.x.q.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, wg.out_refs[name].at[index])

    def _add_tile(
        self,
        wg: Warpgroup,
        t: Int,
        make_tile: Callable[[dict[str, Ref]], Tile],
        accs: tuple[Ref, ...],
        ruled: Int,
        sums: list[list[jax.Array]],
    ) -> tuple[Int, list[list[jax.Array]]]:
        """Adds the cotangents of a tile.

        Args:
          wg: the warpgroup.
          t: the number of tiles before it, of all query heads.
          make_tile: returns the tile, from the blocks of queries.
          accs: accumulators.
          ruled: the number of tiles with rules before it.
          sums: over queries, of the cotangents of elements.

        Returns:
          `ruled` and `sums` with this tile.
        """
        dtype = self.x.q.dtype
        queries, d_outs = wg.scratch["queries"].wait(t), wg.scratch["d_outs"].wait(t)
        tile = make_tile(queries)
        self.bands.prepare(wg, tile, ruled)
        pairs = [(wg.part("k"), queries["q"]), (wg.part("v"), d_outs["d_out"])]
        lse = columns_to_tile(queries["lse"], tile.shape)
        p, slope, d_p = tile.weights(lse, *pairs[: 2 if self.k or self.features else 1])
        # Tiles are [keys, queries]: weights are the left operand without a transposition.
        if self.v:
            wg.product(accs[-1], p.astype(dtype), d_outs["d_out"])
        ds = p  # Without dk and features, there is no cotangent of the logits.
        if self.k or self.features:
            delta = columns_to_tile(d_outs["delta"], tile.shape)
            ds = d_logits(p, d_p[0], delta, slope)
        if self.k:
            sums = tile.add_element_grads(ds, sums)
            wg.product(accs[0], ds.astype(dtype), queries["q"])
        plgpu.wgmma_wait(0)
        wg.scratch["queries"].release(t)
        wg.scratch["d_outs"].release(t)
        if self.features:
            ds = ds * wg.refs["cotangents"].scale[0]
            self.bands.add_feature_grads(wg, accs, ds, tile, ruled)
        return self.bands.release(wg, tile, ruled), sums

    def count(self, wg: Warpgroup) -> Int:
        return self._tiles(wg)[0] * self.spec.group

    def entry(self, wg: Warpgroup, t: Int) -> jax.Array:
        return self._tiles(wg)[1](self._split(wg, t)[1])

    def fill(self, wg: Warpgroup, t: Int, ruled: Int | None) -> None:
        count, entry = self._tiles(wg)
        g, n = self._split(wg, t)
        k0 = wg.grid["j"] * self.blocks.k
        self._filler(wg, count, entry, k0, g)(n, ruled)

    def _split(self, wg: Warpgroup, t: Int) -> tuple[Int, Int]:
        """Returns the numbers of a query head and of a tile of it."""
        if self.spec.group == 1:
            return 0, t
        count = jnp.maximum(self._tiles(wg)[0], 1)  # Without tiles `entry` reads the first one.
        return jax.lax.div(t, count), jax.lax.rem(t, count)

    def copy(self, wg: Warpgroup) -> None:
        count, entry = self._tiles(wg)
        k0 = wg.grid["j"] * self.blocks.k

        def of_query_head(g, ruled):
            fill = self._filler(wg, count, entry, k0, g)
            return jax.lax.fori_loop(jnp.int32(0), count, fill, ruled)

        jax.lax.fori_loop(jnp.int32(0), jnp.int32(self.spec.group), of_query_head, jnp.int32(0))

    def _filler(
        self, wg: Warpgroup, count: Int, entry: Callable[[Int], jax.Array], k0: Int, g: Int
    ) -> Callable[[Int, Any], Any]:
        """Returns a function that copies tile n of query head g, and counts tiles with rules."""
        refs, b, bq = wg.refs, wg.grid["b"], self.blocks.q
        head = wg.grid["head"] * self.spec.group + g

        def fill(n, ruled):
            q0, t = column_of(entry(n)) * bq, g * count + n
            tokens, start = pl.ds(q0, bq), self.distance(q0, k0)
            cotangents = refs["cotangents"]
            lse, delta = (y.at[b, head, tokens] for y in (cotangents.lse, cotangents.delta))
            q, d_out = (y.at[b, tokens, head] for y in (refs["x"].q, cotangents.d_out))
            rules = self.rules(wg, b, head, q0, k0, start)
            wg.scratch["queries"].fill(t, q=q, lse=lse, **rules)
            wg.scratch["d_outs"].fill(t, d_out=d_out, delta=delta)
            return self.bands.fill(wg, ruled, kind_of(entry(n)), b, head, start, (q0, k0))

        return fill
