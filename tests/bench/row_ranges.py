"""The numbers of rows between which products and row operations have one arithmetic, on the device of MLX.

    python -m tests.bench.row_ranges --inputs 5120 --outputs 17408

Each line has groups of sizes. Calls of the sizes of one group give a row the same bits. These groups are the source of
the table in `mtp/exact/row_range.py`. On CUDA the first run of a quantized product compiles for up to a minute.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import mlx.core as mx

from mtp.device import Arithmetic
from mtp.layers.exact import SIZES, same_bits

Rows = Callable[[mx.array], mx.array]

FORMATS = {
    "4 bit": (4, 64, "affine"),
    "8 bit": (8, 64, "affine"),
    "mxfp4": (4, 32, "mxfp4"),
    "nvfp4": (4, 16, "nvfp4"),
    "mxfp8": (8, 32, "mxfp8"),
}
"""Bits, group and mode of the quantized products."""


def size_groups(function: Rows, x: mx.array, sizes: Sequence[int]) -> list[list[int]]:
    """Return the sizes in groups whose calls give the rows of `x` the same bits."""
    found: list[tuple[list[int], mx.array]] = []
    for size in sizes:
        y = function(x[:size])
        mx.eval(y)
        for group, largest in found:
            shared = min(size, largest.shape[0])
            if same_bits(y[:shared], largest[:shared]):
                group.append(size)
                break
        else:
            found.append(([size], y))
            continue
        found = [(g, y if g is group else kept) for g, kept in found]
    return [group for group, _ in found]


def group_text(groups: Sequence[Sequence[int]], sizes: Sequence[int]) -> str:
    """Return text such as `1 | 2 to 512`: the ends of each group of neighbouring sizes, or a list of sizes."""
    texts = []
    for group in groups:
        first, last = sizes.index(group[0]), sizes.index(group[-1])
        neighbours = last - first + 1 == len(group)
        between = f"{group[0]} to {group[-1]}" if neighbours else ", ".join(map(str, group))
        texts.append(str(group[0]) if len(group) == 1 else between)
    return " | ".join(texts)


def quantized(weight: mx.array, bits: int, group: int, mode: str) -> Rows:
    """Return the product with a quantized weight."""
    packed, scales, *biases = mx.quantize(weight, group_size=group, bits=bits, mode=mode)
    return lambda x: mx.quantized_matmul(
        x, packed, scales, biases[0] if biases else None, group_size=group, bits=bits, mode=mode
    )


def main() -> None:
    """Print the groups of every product and row operation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Help)
    parser.add_argument("--inputs", type=int, default=5120)
    parser.add_argument("--outputs", type=int, default=17408)
    parser.add_argument("--rows", type=int, default=512, help="of the largest call")
    options = parser.parse_args()
    sizes = [size for size in SIZES if size <= options.rows]
    mx.random.seed(1)
    print(f"{Arithmetic.here()}; {options.inputs} inputs, {options.outputs} outputs")
    weight = mx.random.normal((options.outputs, options.inputs)) / options.inputs**0.5
    x = mx.random.normal((sizes[-1], options.inputs)).astype(mx.bfloat16)
    half = weight.astype(mx.bfloat16)
    operations: dict[str, Rows] = {"bfloat16": lambda rows: rows @ half.T}
    operations |= {name: quantized(half, *settings) for name, settings in FORMATS.items()}
    operations |= {
        "RMS norm": lambda rows: mx.fast.rms_norm(rows, None, 1e-6),
        "softmax": lambda rows: mx.softmax(rows, axis=-1),
        "logsumexp": lambda rows: mx.logsumexp(rows.astype(mx.float32), axis=-1, keepdims=True),
        "sort": lambda rows: mx.sort(rows, axis=-1),
    }
    for name, operation in operations.items():
        print(f"{name:12} {group_text(size_groups(operation, x, sizes), sizes)}", flush=True)


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The docstring as it is, and the defaults of the flags."""


if __name__ == "__main__":
    main()
