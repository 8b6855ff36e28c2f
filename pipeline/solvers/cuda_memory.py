"""Rows of float16 or float32 in the memory of a GPU, read and written as float32: single numbers, or eight at once.

Eight numbers of float16 are one instruction of 16 bytes, of float32 two. Numba itself reads one number with one
instruction, and knows no arithmetic of float16 on all that it compiles for; hence the intrinsics. A row begins at a
multiple of 16 bytes, and what is read at once at a multiple of eight numbers. Numba's simulator runs plain NumPy.
"""

from typing import Any, TypeAlias

import numpy as np
import torch

from pipeline.solvers.cuda_block import SIMULATED, cuda, inlined

Eight: TypeAlias = tuple[np.float32, ...]


def as_array(tensor: torch.Tensor) -> Any:
    """The same memory as an array that a kernel takes; torch's stream orders all work, so nothing waits."""
    return tensor.numpy() if SIMULATED else cuda.as_cuda_array(tensor, sync=False)


if SIMULATED:

    @inlined
    def get(row: np.ndarray, place: int) -> Any:
        """One number; an integer from a row of integers."""
        return row[place] if row.dtype == np.int32 else np.float32(row[place])

    @inlined
    def put(row: np.ndarray, place: int, value: np.float32) -> None:
        """Write one number, rounded to the type of the row."""
        row[place] = value

    @inlined
    def get_four(row: np.ndarray, place: int) -> tuple[np.float32, ...]:
        """Numbers `place` to place + 3."""
        return tuple(row[place : place + 4].astype(np.float32))

    @inlined
    def get_eight(row: np.ndarray, place: int) -> Eight:
        """Numbers `place` to place + 7."""
        return tuple(row[place : place + 8].astype(np.float32))

    @inlined
    def put_eight(row: np.ndarray, place: int, values: Eight) -> None:
        """Write eight numbers, rounded to the type of the row."""
        row[place : place + 8] = values

    @inlined
    def round_eight(row: np.ndarray, values: Eight) -> Eight:
        """The values as the row would hold them."""
        return tuple(np.array(values, row.dtype).astype(np.float32))

else:
    from llvmlite import ir
    from numba.cuda.extending import intrinsic
    from numba.cuda.types import UniTuple, float16, float32, intp, void

    FLOAT, HALF, BITS, PLACE = ir.FloatType(), ir.HalfType(), ir.IntType(16), ir.IntType(32)

    def _pointer(context, builder, row_type, row, place, count):
        """Where `count` numbers begin, as a pointer to a vector of what is in memory (float16 as its bits)."""
        element = BITS if row_type.dtype == float16 else context.get_data_type(row_type.dtype)
        first = builder.gep(context.make_array(row_type)(context, builder, row).data, [place])
        return builder.bitcast(first, ir.VectorType(element, count).as_pointer())

    def _load(context, builder, row_type, arguments, count):
        """`count` values from a place of a row, the arguments; as float32 if they are float16."""
        row, place = arguments
        half = row_type.dtype == float16
        wide = min(count, 8 if half else 4)  # 16 bytes
        values = []
        for start in range(0, count, wide):
            at = builder.add(place, ir.Constant(place.type, start))
            pointer = _pointer(context, builder, row_type, row, at, wide)
            vector = builder.load(pointer, align=wide * (2 if half else 4))
            for i in range(wide):
                value = builder.extract_element(vector, ir.Constant(PLACE, i))
                values.append(builder.fpext(builder.bitcast(value, HALF), FLOAT) if half else value)
        return values

    def _store(context, builder, row_type, arguments, values):
        row, place = arguments[:2]
        half = row_type.dtype == float16
        wide = min(len(values), 8 if half else 4)
        for start in range(0, len(values), wide):
            at = builder.add(place, ir.Constant(place.type, start))
            vector = ir.Constant(ir.VectorType(BITS if half else FLOAT, wide), ir.Undefined)
            for i, value in enumerate(values[start : start + wide]):
                value = builder.bitcast(builder.fptrunc(value, HALF), BITS) if half else value
                vector = builder.insert_element(vector, value, ir.Constant(PLACE, i))
            pointer = _pointer(context, builder, row_type, row, at, wide)
            builder.store(vector, pointer, align=wide * (2 if half else 4))

    @intrinsic
    def get(typing: Any, row: Any, place: Any) -> Any:
        """One number; an integer from a row of integers."""

        def generate(context, builder, signature, arguments):
            return _load(context, builder, row, arguments, 1)[0]

        return (float32 if row.dtype == float16 else row.dtype)(row, intp), generate

    @intrinsic
    def get_four(typing: Any, row: Any, place: Any) -> Any:
        """Numbers `place` to place + 3."""
        four = UniTuple(float32, 4)

        def generate(context, builder, signature, arguments):
            return context.make_tuple(builder, four, _load(context, builder, row, arguments, 4))

        return four(row, intp), generate

    @intrinsic
    def put(typing: Any, row: Any, place: Any, value: Any) -> Any:
        """Write one number, rounded to the type of the row."""

        def generate(context, builder, signature, arguments):
            _store(context, builder, row, arguments, [arguments[2]])

        return void(row, intp, float32), generate

    @intrinsic
    def get_eight(typing: Any, row: Any, place: Any) -> Any:
        """Numbers `place` to place + 7."""
        eight = UniTuple(float32, 8)

        def generate(context, builder, signature, arguments):
            return context.make_tuple(builder, eight, _load(context, builder, row, arguments, 8))

        return eight(row, intp), generate

    @intrinsic
    def put_eight(typing: Any, row: Any, place: Any, values: Any) -> Any:
        """Write eight numbers, rounded to the type of the row."""
        eight = UniTuple(float32, 8)

        def generate(context, builder, signature, arguments):
            numbers = [builder.extract_value(arguments[2], i) for i in range(8)]
            _store(context, builder, row, arguments, numbers)

        return void(row, intp, eight), generate

    @intrinsic
    def round_eight(typing: Any, row: Any, values: Any) -> Any:
        """The values as the row would hold them."""
        eight = UniTuple(float32, 8)

        def generate(context, builder, signature, arguments):
            numbers = [builder.extract_value(arguments[1], i) for i in range(8)]
            if row.dtype == float16:
                numbers = [builder.fpext(builder.fptrunc(number, HALF), FLOAT) for number in numbers]
            return context.make_tuple(builder, eight, numbers)

        return eight(row, eight), generate
