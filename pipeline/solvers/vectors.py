"""The hot loops of cd_cpu.py as explicit vectors of 16 floats (LLVM, through Numba's `intrinsic`).

Written as Python loops they lose most of their time to checks that LLVM adds because two arrays might overlap
(`combine` of 33 rows took 3.4 times as long), or stay scalar (the maximum of floats, 6 times). Any processor
takes such vectors: LLVM splits them to the width it has. Bounds are checked only if NUMBA_BOUNDSCHECK is 1.

All arrays are contiguous; floats are float32, row numbers int32. `width` and the length of a gradient are
multiples of LANES, `count` is a multiple of the rows that are taken at once, filled up with weights of zero.
"""

import functools
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import config
from numba.core import cgutils, types
from numba.extending import intrinsic

LANES = 16
CACHE_LINE = 64  # bytes
COMBINED_ROWS = 2  # rows of `combine` at once: two sums, so that additions need not wait for each other
MULTIPLIED_ROWS = 4  # rows of `row_products` at once: four sums
SUBTRACTED_ROWS = 8  # rows of `subtract_rows` at once: the gradient is read and written an eighth as often

FAST = ("reassoc", "contract", "nsz", "nnan", "ninf")
I32, I64, FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
VECTOR = ir.VectorType(FLOAT, LANES)
Typing = tuple[types.Type, Callable]  # what an intrinsic answers: its signature, and what generates its code


@intrinsic
def combine(
    typingctx: Any,
    out: types.Array,
    weights: types.Array,
    rows_mw: types.Array,
    count: types.Integer,
    width: types.Integer,
) -> Typing:
    """out[:width] = weights[:count] @ rows_mw[:count, :width]."""

    def generate(context, builder, signature, args):
        out, weights, rows = _Array(context, builder, signature, args).first(3)
        with _loop(builder, _number(0), args[4], LANES) as column:
            sums = [cgutils.alloca_once(builder, VECTOR) for _ in range(COMBINED_ROWS)]
            for total in sums:
                builder.store(ir.Constant(VECTOR, None), total)
            with _loop(builder, _number(0), args[3], COMBINED_ROWS) as row:
                for i, total in enumerate(sums):
                    entry = builder.add(row, _number(i))
                    product = _product(builder, weights.load(entry, 1), rows.load(rows.place(entry, column)))
                    builder.store(builder.fadd(builder.load(total), product, flags=FAST), total)
            out.store(builder.fadd(*map(builder.load, sums), flags=FAST), column)
        return context.get_dummy_value()

    return types.void(out, weights, rows_mw, count, width), generate


@intrinsic
def subtract_rows(
    typingctx: Any,
    out: types.Array,
    weights: types.Array,
    matrix_KK: types.Array,
    rows: types.Array,
    count: types.Integer,
) -> Typing:
    """out -= weights[:count] @ matrix_KK[rows[:count]]; the matrix of float32 or int16."""

    def generate(context, builder, signature, args):
        out, weights, matrix, rows = _Array(context, builder, signature, args).first(4)
        with _loop(builder, _number(0), args[4], SUBTRACTED_ROWS) as first:
            entries = [builder.add(first, _number(i)) for i in range(SUBTRACTED_ROWS)]
            terms = [(weights.load(entry, 1), builder.sext(rows.load(entry, 1), I64)) for entry in entries]
            with _loop(builder, _number(0), matrix.length, LANES) as column:
                total = out.load(column)
                for weight, row in terms:
                    product = _product(builder, weight, matrix.load(matrix.place(row, column)))
                    total = builder.fsub(total, product, flags=FAST)
                out.store(total, column)
        return context.get_dummy_value()

    return types.void(out, weights, matrix_KK, rows, count), generate


@intrinsic
def row_products(
    typingctx: Any,
    out: types.Array,
    vector: types.Array,
    matrix_Kd: types.Array,
    rows: types.Array,
    count: types.Integer,
) -> Typing:
    """out[:count] = matrix_Kd[rows[:count]] @ vector."""

    def generate(context, builder, signature, args):
        out, vector, matrix, rows = _Array(context, builder, signature, args).first(4)
        sums = [cgutils.alloca_once(builder, VECTOR) for _ in range(MULTIPLIED_ROWS)]
        with _loop(builder, _number(0), args[4], MULTIPLIED_ROWS) as first:
            entries = [builder.add(first, _number(i)) for i in range(MULTIPLIED_ROWS)]
            places = [builder.sext(rows.load(entry, 1), I64) for entry in entries]
            for total in sums:
                builder.store(ir.Constant(VECTOR, None), total)
            with _loop(builder, _number(0), matrix.length, LANES) as column:
                factor = vector.load(column)
                for total, row in zip(sums, places, strict=True):
                    product = builder.fmul(factor, matrix.load(matrix.place(row, column)), flags=FAST)
                    builder.store(builder.fadd(builder.load(total), product, flags=FAST), total)
            for total, entry in zip(sums, entries, strict=True):
                out.store(_sum(builder, builder.load(total)), entry)
        return context.get_dummy_value()

    return types.void(out, vector, matrix_Kd, rows, count), generate


@intrinsic
def lanes_above(
    typingctx: Any,
    grad_K: types.Array,
    factor: types.Float,
    sizes_K: types.Array,
    place: types.Integer,
    cut: types.Float,
) -> Typing:
    """Bits of the 16 lanes from `place` on in which grad_K + factor * abs(sizes_K) is above the cut."""

    def generate(context, builder, signature, args):
        (grad,) = _Array(context, builder, signature, args).first(1)
        sizes = _Array(context, builder, signature, args, 2)
        values = sizes.load(args[3])
        zero = ir.Constant(VECTOR, None)
        absolute = _maximum(builder, values, builder.fsub(zero, values, flags=FAST))
        bound = builder.fadd(grad.load(args[3]), _product(builder, args[1], absolute), flags=FAST)
        above = builder.fcmp_ordered(">", bound, _splat(builder, args[4]), flags=FAST)
        return builder.zext(builder.bitcast(above, ir.IntType(LANES)), I64)

    return types.int64(grad_K, types.float32, sizes_K, place, types.float32), generate


@intrinsic
def widen(typingctx: Any, out: types.Array, matrix_nK: types.Array, row: types.Integer) -> Typing:
    """out[:K] = matrix_nK[row], of float32 or the bits of bfloat16 as int16."""

    def generate(context, builder, signature, args):
        out, matrix = _Array(context, builder, signature, args).first(2)
        whole = builder.and_(matrix.length, _number(-LANES))
        for start, stop, lanes in ((_number(0), whole, LANES), (whole, matrix.length, 1)):
            with _loop(builder, start, stop, lanes) as column:
                values = matrix.load_bits(matrix.place(args[2], column), lanes)
                if matrix.bytes == 2:
                    kind = I32 if lanes == 1 else ir.VectorType(I32, LANES)
                    sixteen = ir.Constant(I32, 16) if lanes == 1 else ir.Constant(kind, [16] * LANES)
                    values = builder.shl(builder.zext(values, kind), sixteen)
                    values = builder.bitcast(values, FLOAT if lanes == 1 else VECTOR)
                out.store(values, column)
        return context.get_dummy_value()

    return types.void(out, matrix_nK, row), generate


@intrinsic
def prefetch_row(typingctx: Any, matrix_Kd: types.Array, row: types.Integer) -> Typing:
    """Ask for a row that will be read soon."""

    def generate(context, builder, signature, args):
        (matrix,) = _Array(context, builder, signature, args).first(1)
        pointer = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        read, keep, data = (ir.Constant(I32, number) for number in (0, 3, 1))
        with _loop(builder, _number(0), matrix.length, CACHE_LINE // matrix.bytes) as column:
            place = builder.gep(matrix.data, [matrix.place(args[1], column)])
            builder.call(prefetch, [builder.bitcast(place, pointer), read, keep, data])
        return context.get_dummy_value()

    return types.void(matrix_Kd, types.int64), generate


@intrinsic
def lowest_bit(typingctx: Any, bits: types.Integer) -> Typing:
    """The number of the lowest bit that is set."""

    def generate(context, builder, signature, args):
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.int64), generate


@intrinsic
def block_maxima(typingctx: Any, grad_K: types.Array, block_max: types.Array) -> Typing:
    """Fill block_max with the maximum of every block: of B blocks, block b is atoms b, b + B, b + 2 B ..."""

    def generate(context, builder, signature, args):
        grad, block_max = _Array(context, builder, signature, args).first(2)
        with _loop(builder, _number(0), block_max.length, LANES) as block:
            top = cgutils.alloca_once(builder, VECTOR)
            builder.store(grad.load(block), top)
            with _loop(builder, builder.add(block, block_max.length), grad.length, block_max.length) as atom:
                builder.store(_maximum(builder, builder.load(top), grad.load(atom)), top)
            block_max.store(builder.load(top), block)
        return context.get_dummy_value()

    return types.void(grad_K, block_max), generate


@intrinsic
def largest(typingctx: Any, vector: types.Array) -> Typing:
    """The largest entry."""

    def generate(context, builder, signature, args):
        (vector,) = _Array(context, builder, signature, args).first(1)
        top = cgutils.alloca_once(builder, VECTOR)
        builder.store(vector.load(_number(0)), top)
        with _loop(builder, _number(LANES), vector.length, LANES) as place:
            builder.store(_maximum(builder, builder.load(top), vector.load(place)), top)
        return _reduced(builder, "fmax", builder.load(top))

    return types.float32(vector), generate


@intrinsic
def dot(typingctx: Any, left: types.Array, right: types.Array, width: types.Integer) -> Typing:
    """left[:width] @ right[:width]."""

    def generate(context, builder, signature, args):
        left, right = _Array(context, builder, signature, args).first(2)
        total = cgutils.alloca_once(builder, VECTOR)
        builder.store(ir.Constant(VECTOR, None), total)
        with _loop(builder, _number(0), args[2], LANES) as place:
            product = builder.fmul(left.load(place), right.load(place), flags=FAST)
            builder.store(builder.fadd(builder.load(total), product, flags=FAST), total)
        return _sum(builder, builder.load(total))

    return types.float32(left, right, width), generate


@intrinsic
def add_scaled(
    typingctx: Any, out: types.Array, left: types.Array, factor: types.Float, right: types.Array, width: types.Integer
) -> Typing:
    """out[:width] = left[:width] + factor * right[:width]; out may be either of them."""

    def generate(context, builder, signature, args):
        out, left = _Array(context, builder, signature, args).first(2)
        right = _Array(context, builder, signature, args, 3)
        with _loop(builder, _number(0), args[4], LANES) as place:
            product = _product(builder, args[2], right.load(place))
            out.store(builder.fadd(left.load(place), product, flags=FAST), place)
        return context.get_dummy_value()

    return types.void(out, left, types.float32, right, width), generate


@intrinsic
def residual_on_support(
    typingctx: Any, residual: types.Array, excess: types.Array, code: types.Array, width: types.Integer
) -> Typing:
    """residual = excess where code > 0, else 0. Returns its squared norm."""

    def generate(context, builder, signature, args):
        residual, excess, code = _Array(context, builder, signature, args).first(3)
        zero = ir.Constant(VECTOR, None)
        total = cgutils.alloca_once(builder, VECTOR)
        builder.store(zero, total)
        with _loop(builder, _number(0), args[3], LANES) as place:
            active = builder.fcmp_ordered(">", code.load(place), zero, flags=FAST)
            values = builder.select(active, excess.load(place), zero)
            residual.store(values, place)
            square = builder.fmul(values, values, flags=FAST)
            builder.store(builder.fadd(builder.load(total), square, flags=FAST), total)
        return _sum(builder, builder.load(total))

    return types.float32(residual, excess, code, width), generate


@intrinsic
def step_to_zero(typingctx: Any, code: types.Array, direction: types.Array, width: types.Integer) -> Typing:
    """The shortest step along direction that brings a coefficient to zero; 1e30 if none falls."""

    def generate(context, builder, signature, args):
        code, direction = _Array(context, builder, signature, args).first(2)
        zero, far = ir.Constant(VECTOR, None), ir.Constant(VECTOR, [ir.Constant(FLOAT, 1e30)] * LANES)
        least = cgutils.alloca_once(builder, VECTOR)
        builder.store(far, least)
        with _loop(builder, _number(0), args[2], LANES) as place:
            slope = direction.load(place)
            falls = builder.fcmp_ordered("<", slope, zero, flags=FAST)
            divisor = builder.select(falls, builder.fneg(slope), ir.Constant(VECTOR, [ir.Constant(FLOAT, 1)] * LANES))
            step = builder.select(falls, builder.fdiv(code.load(place), divisor), far)
            before = builder.load(least)
            builder.store(builder.select(builder.fcmp_ordered("<", step, before, flags=FAST), step, before), least)
        return _reduced(builder, "fmin", builder.load(least))

    return types.float32(code, direction, width), generate


class _Array:
    """An argument array in generated code."""

    def __init__(self, context, builder, signature, args, number=0):
        self._arguments = context, builder, signature, args
        array = context.make_array(signature.args[number])(context, builder, args[number])
        self.builder, self.data = builder, array.data
        self.bytes = signature.args[number].dtype.bitwidth // 8
        shape = cgutils.unpack_tuple(builder, array.shape)
        self.length, self.size = shape[-1], functools.reduce(builder.mul, shape)

    def first(self, count):
        """The first arguments, all of them arrays."""
        return [_Array(*self._arguments, number) for number in range(count)]

    def place(self, row, column):
        """Where an entry of a matrix lies."""
        return self.builder.add(self.builder.mul(row, self.length), column)

    def _pointer(self, place, lanes):
        if config.BOUNDSCHECK:
            end = self.builder.add(place, _number(lanes))
            outside = [self.builder.icmp_signed("<", place, _number(0)), self.builder.icmp_signed(">", end, self.size)]
            with self.builder.if_then(self.builder.or_(*outside), likely=False):
                message = (f"a vector of {lanes} entries ends outside of its array",)
                self._arguments[0].call_conv.return_user_exc(self.builder, IndexError, message)
        return self.builder.gep(self.data, [place])

    def load(self, place, lanes=LANES):
        """The vector of floats that begins at an entry, or with one lane the entry as it is."""
        values = self.load_bits(place, lanes)
        return self.builder.sitofp(values, VECTOR) if lanes > 1 and values.type != VECTOR else values

    def load_bits(self, place, lanes):
        """The same, unconverted."""
        pointer = self._pointer(place, lanes)
        if lanes > 1:
            kind = ir.VectorType(pointer.type.pointee, LANES)
            pointer = self.builder.bitcast(pointer, kind.as_pointer())
        return self.builder.load(pointer, align=self.bytes)

    def store(self, value, place):
        pointer = self._pointer(place, value.type.count if isinstance(value.type, ir.VectorType) else 1)
        self.builder.store(value, self.builder.bitcast(pointer, value.type.as_pointer()), align=4)


def _number(value):
    return ir.Constant(I64, value)


def _loop(builder, start, stop, step):
    """`for i in range(start, stop, step)`; step a Python number or a value."""
    step = _number(step) if isinstance(step, int) else step
    ranged = cgutils.for_range_slice(builder, start, stop, step, I64)
    return _FirstOf(ranged)


class _FirstOf:
    """for_range_slice gives (index, count); only the index is wanted."""

    def __init__(self, context_manager):
        self._inner = context_manager

    def __enter__(self):
        return self._inner.__enter__()[0]

    def __exit__(self, *error):
        return self._inner.__exit__(*error)


def _product(builder, scalar, values):
    """A scalar times a vector."""
    return builder.fmul(_splat(builder, scalar), values, flags=FAST)


def _splat(builder, scalar):
    """A vector of one number."""
    nowhere = ir.Constant(VECTOR, ir.Undefined)
    single = builder.insert_element(nowhere, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(single, nowhere, ir.Constant(ir.VectorType(I32, LANES), None))


def _reduced(builder, operation, vector, *start):
    kind = ir.FunctionType(FLOAT, [*(FLOAT for _ in start), VECTOR])
    name = f"llvm.vector.reduce.{operation}.v{LANES}f32"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [*start, vector], fastmath=FAST)


def _sum(builder, vector):
    return _reduced(builder, "fadd", vector, ir.Constant(FLOAT, 0))


def _maximum(builder, left, right):
    return builder.select(builder.fcmp_ordered(">", left, right, flags=FAST), left, right)
