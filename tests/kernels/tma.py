"""The rules of `cuTensorMapEncodeTiled` for descriptors of copies (CUDA driver API, Tensor Map).

Mosaic encodes descriptors when a kernel is first launched, and ends the process where the driver
refuses one: no compiler sees it. Here they are checked while a kernel is lowered.
"""

import contextlib
from collections.abc import Iterator, Sequence

BYTES = {"bf16": 2, "f16": 2, "f32": 4, "i32": 4}


def faults(
    sizes: Sequence[int], strides: Sequence[int], box: Sequence[int], item: int, swizzle: int
) -> list[str]:
    """Returns the rules that a descriptor breaks.

    Args:
      sizes, strides: of the array in numbers, the last axis is contiguous.
      box: the sizes of one copy.
      item: bytes of a number.
      swizzle: its bytes, 16 for none.
    """
    outer, inner = [x * item for x in strides[:-1]], box[-1] * item
    rules = {
        "1 to 5 axes": 1 <= len(sizes) <= 5 and len(sizes) == len(strides) == len(box),
        "the last axis is contiguous": strides[-1] == 1,
        "strides are multiples of 16 bytes below 2^40": all(
            0 < x < 2**40 and x % 16 == 0 for x in outer
        ),
        "an axis has 1 to 2^32 numbers": all(1 <= x <= 2**32 for x in sizes),
        "a box has 1 to 256 numbers": all(1 <= x <= 256 for x in box),
        "a box is inside of the array": all(x <= y for x, y in zip(box, sizes, strict=False)),
        "a row of a box is a multiple of 16 bytes": inner % 16 == 0,
        "a row of a box is at most the swizzle": swizzle == 16 or inner <= swizzle,
    }
    return [rule for rule, holds in rules.items() if not holds]


@contextlib.contextmanager
def audited() -> Iterator[list[str]]:
    """Yields a list of the descriptors of what is lowered, as text; raises at a wrong one."""
    from jax._src.lib.mlir import ir
    from jax.experimental.mosaic.gpu import launch_context
    from jaxlib.mlir.dialects import builtin

    seen: list[str] = []
    encode = launch_context.LaunchContext._get_tma_desc

    def checked(context, ref, transforms, peer, box, swizzle, *more, **options):
        with ir.InsertionPoint(ir.Module.create().body):
            argument = launch_context._find_kernel_argument_for_gmem_ref(ref)
            array = builtin.UnrealizedConversionCastOp([argument.type], []).result
            for transform in transforms:
                array = transform.apply(array)
            kind = ir.MemRefType(array.type)
            strides, _ = kind.get_strides_and_offset()
        sizes = list(kind.shape), list(strides), list(box)
        broken = faults(*sizes, BYTES[str(kind.element_type)], int(swizzle or 16))
        seen.append(f"{kind.element_type} {sizes}, swizzle {swizzle}")
        if broken:
            raise AssertionError(f"{seen[-1]}: {'; '.join(broken)}")
        return encode(context, ref, transforms, peer, box, swizzle, *more, **options)

    launch_context.LaunchContext._get_tma_desc = checked
    try:
        yield seen
    finally:
        launch_context.LaunchContext._get_tma_desc = encode
