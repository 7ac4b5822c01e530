"""dk and dv on GPUs. Tiles are transposed, so that weights enter the products as they are."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from posenc_jax.kernels.elements import Element
from posenc_jax.kernels.gpu.bands import Bands
from posenc_jax.kernels.gpu.pairs import Pairs
from posenc_jax.kernels.gpu.pipe import (
    Warpgroup,
    launch,
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
    bias_line,
    column_of,
    direct_operands,
    kind_of,
)
from posenc_jax.kernels.gpu.tile import (
    Tile,
    columns_to_tile,
    d_logits,
    row_scalar_count,
    zeros,
)
from posenc_jax.kernels.operands import Operands, out_struct


def key_grads(
    spec: GPUSpec, x: Operands, cotangents: Cotangents
) -> tuple[jax.Array, jax.Array, list[list[jax.Array]], list[jax.Array]]:
    """Returns dk, dv, sums of the elements' cotangents over queries, and cotangents of features.

    The sums are float32 [B, N, S], a list for each element.
    """
    of_keys = any(product.of_keys for product in x.products)
    kernels = [KeyGrads(spec, x, k=True, v=True)]
    if spec.wide or of_keys:  # All sums take more registers than there are.
        kernels = [KeyGrads(spec, x, k=True), KeyGrads(spec, x, v=True)]
    grads = {}
    for kernel in kernels:
        grads |= kernel.run(cotangents)
    features = []
    if of_keys:
        features = KeyGrads(spec, x, features=True).run(cotangents)["features"]
    return grads["k"], grads["v"], grads["sums"], features


@dataclasses.dataclass(frozen=True)
class KeyGrads:
    """A kernel of sums over queries: a block of keys goes through tiles of queries.

    Attributes:
      spec: the static part.
      x: the operands.
      k: whether it computes dk, and the sums of the elements' cotangents.
      v: whether it computes dv.
      features: whether it computes the cotangents of features of keys, alone.
    """

    spec: GPUSpec
    x: Operands
    k: bool = False
    v: bool = False
    features: bool = False

    def run(self, cotangents: Cotangents) -> dict[str, Any]:
        """Returns the results by name: "k" with "sums", "v", or "features"."""
        spec, x, blocks = self.spec, self.x, self.spec.by_key
        entries, counts = x.schedules[2]
        inputs: dict[str, Any] = {"x": direct_operands(x), "cotangents": cotangents}
        inputs |= {"entries": entries, "counts": counts, "distances": self.bands.inputs}
        if x.bias is not None:
            inputs["line"] = bias_line(spec, x.bias, x.first, blocks)
        return launch(
            "attention_backward_" + ("f" if self.features else "k" * self.k + "v" * self.v),
            self.compute,
            self.copy,
            grid={"b": spec.batch, "head": spec.kv_heads, "j": spec.keys // blocks.k},
            inputs=inputs,
            out_types=self.out_types,
            scratch_types=self.scratch_types,
            interpret=spec.interpret,
        )

    @property
    def bands(self) -> Bands:
        """The products of vectors."""
        return Bands(self.spec, self.x, self.spec.by_key, q_axis=1)

    @property
    def pairs(self) -> Pairs:
        """The array of all pairs."""
        return Pairs(self.spec, self.x, self.spec.by_key, q_axis=1)

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
        """The scratch types of the kernel, by name."""
        spec, dtype = self.spec, self.x.q.dtype
        bq, bk = spec.by_key.q, spec.by_key.k
        types = {
            "k": matrix(spec, 2, ROWS, spec.dim, dtype=dtype),
            "v": matrix(spec, 2, ROWS, spec.value_dim, dtype=dtype),
            "ready": plgpu.Barrier(num_arrivals=2 + len(self.bands.resident), num_barriers=2),
            "sums": vector(2, ROWS),
        }
        if spec.interpret:
            types["operand"] = operand(bq, dtype)
        queries = {"q": (bq, spec.dim), "lse": (bq,)}
        if self.x.bias is not None:
            queries["bias"] = (bq + bk,)

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
        """Computes 64 keys."""
        spec, b, kv_head = self.spec, wg.grid["b"], wg.grid["head"]
        count, entry = self._tiles(wg)
        k0 = wg.grid["j"] * spec.by_key.k + wg.number * ROWS
        of_kv_head = b, pl.ds(k0, ROWS), kv_head
        k, v, ready = (wg.part(name) for name in ("k", "v", "ready"))
        plgpu.copy_gmem_to_smem(wg.refs["x"].k.at[of_kv_head], k, ready)
        plgpu.copy_gmem_to_smem(wg.refs["x"].v.at[of_kv_head], v, ready)
        self.bands.copy_rows(wg, b, kv_head * spec.group, k0)
        plgpu.barrier_wait(ready)
        bias = pl.ds(pl.multiple_of((1 - wg.number) * ROWS, ROWS), ROWS + spec.by_key.q)

        def over_tiles(*accs):
            def of_query_head(g, ruled):
                head = kv_head * spec.group + g

                def step(n, carry):
                    t = g * count + n
                    tile = functools.partial(self._tile, wg, head, k0, lambda: entry(n), bias)
                    return self._add_tile(wg, t, tile, accs, *carry)

                start = [[zeros((ROWS,), ROW)] * row_scalar_count(e, 1) for e in self.elements]
                ruled, sums = jax.lax.fori_loop(jnp.int32(0), count, step, (ruled, start))
                wg.write_rows(sums, wg.out_refs.get("sums", []), "sums", b, head, k0)
                return ruled

            jax.lax.fori_loop(jnp.int32(0), jnp.int32(spec.group), of_query_head, jnp.int32(0))
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

    def _tile(
        self,
        wg: Warpgroup,
        head: Int,
        k0: Int,
        entry: Callable[[], jax.Array],
        bias: Any,
        queries: dict[str, Ref],
    ) -> Tile:
        """Returns a warpgroup's part of a tile.

        Args:
          wg: the warpgroup.
          head: the query head.
          k0: the first key.
          entry: reads the tile's entry of `tiles`.
          bias: the warpgroup's slice of the bias.
          queries: the blocks of the pipe.
        """
        return Tile(
            spec=self.spec,
            x=wg.refs["x"],
            shape=(ROWS, self.spec.by_key.q),
            q_axis=1,
            b=wg.grid["b"],
            head=head,
            q=column_of(entry()) * self.spec.by_key.q,
            k=k0,
            kind=kind_of(entry()),
            bias=queries["bias"].at[bias] if self.x.bias is not None else None,
            origin=ROWS,
            band_logits=self.bands.logits(wg),
            pairs=self.pairs.reader(wg, queries),
        )

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

    def copy(self, wg: Warpgroup) -> None:
        """Copies the queries and rules of all tiles."""
        spec, refs, b = self.spec, wg.refs, wg.grid["b"]
        bq, bk = spec.by_key.q, spec.by_key.k
        low, high = spec.reach(spec.by_key)
        count, entry = self._tiles(wg)
        k0 = wg.grid["j"] * bk

        def of_query_head(g, ruled):
            head = wg.grid["head"] * spec.group + g

            def fill(n, ruled):
                q0, t = column_of(entry(n)) * bq, g * count + n
                tokens, rules = pl.ds(q0, bq), self.pairs.source(wg, b, head, q0, k0)
                start = pl.multiple_of(jnp.clip(q0 - k0, low, high) - low, bq)
                if self.x.bias is not None:
                    line = spec.line_of(refs["line"], head)
                    rules["bias"] = line.at[pl.ds(start, bq + bk)]
                cotangents = refs["cotangents"]
                lse, delta = (y.at[b, head, tokens] for y in (cotangents.lse, cotangents.delta))
                q, d_out = (y.at[b, tokens, head] for y in (refs["x"].q, cotangents.d_out))
                wg.scratch["queries"].fill(t, q=q, lse=lse, **rules)
                wg.scratch["d_outs"].fill(t, d_out=d_out, delta=delta)
                return self.bands.fill(wg, ruled, kind_of(entry(n)), b, head, start, (q0, k0))

            return jax.lax.fori_loop(jnp.int32(0), count, fill, ruled)

        jax.lax.fori_loop(jnp.int32(0), jnp.int32(spec.group), of_query_head, jnp.int32(0))
