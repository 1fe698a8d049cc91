"""The data types of activations and of stored tensors, with their sizes."""

from __future__ import annotations

STORED_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I64": 8, "I32": 4, "I16": 2,
    "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of one element, by the name that safetensors headers use."""

STORED_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""The activation types that stages can compute in, and the name of each in safetensors headers."""

DTYPE_BYTES = {name: STORED_BYTES[stored] for name, stored in STORED_NAMES.items()}
"""Bytes of one element of each activation type."""
