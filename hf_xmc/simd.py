"""
Vector operations on *lanes*: sixteen sibling nodes whose weights are adjacent in memory.

One row has the weights of one feature for sixteen siblings: one cache line in float32, one load in int8. The features
of a document are read once for sixteen classifiers. LLVM does not vectorise plain loops in this way, so the loops that
determine the speed of training and prediction are written here with explicit vector types.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba import extending
from numba.core import cgutils, types

# Typed loosely: numba passes the typing context to an intrinsic, its caller does not.
intrinsic: Any = extending.intrinsic

LANES = 16

# Bytes before the weights of a stored row: the feature (int32) and the scale of the weights (float32).
HEADER = 8

_CACHE_LINE = 64  # bytes
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_BYTES = ir.VectorType(ir.IntType(8), LANES)
_INDEX = ir.IntType(64)


def _data(context: Any, builder: ir.IRBuilder, array_type: types.Array, array: ir.Value) -> ir.Value:
    """Pointer to the first element of a C-contiguous array argument."""
    return context.make_array(array_type)(context, builder, array).data


def _splat(builder: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    """A vector with `scalar` in every lane."""
    vector = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(vector, ir.Constant(_FLOATS, ir.Undefined), lanes)


def _row(builder: ir.IRBuilder, base: ir.Value, row: ir.Value, vector_type: ir.VectorType) -> ir.Value:
    """Pointer to row `row` of a (rows, LANES) array, as a vector."""
    first = builder.gep(base, [builder.mul(row, ir.Constant(_INDEX, LANES))])
    return builder.bitcast(first, vector_type.as_pointer())


def _element(builder: ir.IRBuilder, base: ir.Value, position: ir.Value) -> ir.Value:
    return builder.load(builder.gep(base, [position]))


def _as_index(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    return value if value.type == _INDEX else builder.zext(value, _INDEX)


def _multiply_add(builder: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    """`x * y + z`; `contract` lets LLVM fuse the two. No other rewriting is allowed: results repeat exactly."""
    return builder.fadd(builder.fmul(x, y, flags=("contract",)), z, flags=("contract",))


def _add_into(builder: ir.IRBuilder, accumulator: ir.Value, vector: ir.Value) -> None:
    total = builder.fadd(builder.load(accumulator, align=4), vector)
    builder.store(total, accumulator, align=4)


def _accumulate(builder: ir.IRBuilder, begin: ir.Value, end: ir.Value, term: Any) -> ir.Value:
    """Sum over `begin <= p < end` of `term(p) = (factor, row)`, in two chains that hide the addition's latency."""
    zero = ir.Constant(_FLOATS, [0.0] * LANES)
    chains = [cgutils.alloca_once_value(builder, zero), cgutils.alloca_once_value(builder, zero)]
    one, two = ir.Constant(_INDEX, 1), ir.Constant(_INDEX, 2)
    count = builder.sub(end, begin)
    pairs_end = builder.add(begin, builder.and_(count, ir.Constant(_INDEX, -2)))
    with cgutils.for_range_slice(builder, begin, pairs_end, two, intp=_INDEX) as (position, _):
        for chain, offset in zip(chains, (ir.Constant(_INDEX, 0), one)):
            factor, row = term(builder.add(position, offset))
            builder.store(_multiply_add(builder, factor, row, builder.load(chain)), chain)
    with cgutils.for_range_slice(builder, pairs_end, end, one, intp=_INDEX) as (position, _):
        factor, row = term(position)
        builder.store(_multiply_add(builder, factor, row, builder.load(chains[0])), chains[0])
    return builder.fadd(builder.load(chains[0]), builder.load(chains[1]))


def _float_rows(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
    """`term(p)` of `lane_dot` and the address of its row, with the row number read from an array."""
    row_of, value_of, base = (_data(context, builder, signature.args[i], args[i]) for i in (0, 1, 4))

    def locate(position: ir.Value) -> tuple[ir.Value, ir.Value]:
        row = _as_index(builder, _element(builder, row_of, position))
        return _splat(builder, _element(builder, value_of, position)), _row(builder, base, row, _FLOATS)

    return locate


def _float_run(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
    """The same for consecutive rows that start at `first_row`."""
    value_of, base = (_data(context, builder, signature.args[i], args[i]) for i in (0, 3))
    shift = builder.sub(args[4], args[1])

    def locate(position: ir.Value) -> tuple[ir.Value, ir.Value]:
        row = builder.add(position, shift)
        return _splat(builder, _element(builder, value_of, position)), _row(builder, base, row, _FLOATS)

    return locate


def _dot(context: Any, builder: ir.IRBuilder, locate: Any, begin: ir.Value, end: ir.Value, out: ir.Value) -> Any:
    def term(position: ir.Value) -> tuple[ir.Value, ir.Value]:
        factor, pointer = locate(position)
        return factor, builder.load(pointer, align=4)

    total = _accumulate(builder, begin, end, term)
    _add_into(builder, builder.bitcast(out, _FLOATS.as_pointer()), total)
    return context.get_dummy_value()


def _add(context: Any, builder: ir.IRBuilder, locate: Any, begin: ir.Value, end: ir.Value, delta: ir.Value) -> Any:
    step = builder.load(builder.bitcast(delta, _FLOATS.as_pointer()), align=4)
    with cgutils.for_range_slice(builder, begin, end, ir.Constant(_INDEX, 1), intp=_INDEX) as (position, _):
        factor, pointer = locate(position)
        builder.store(_multiply_add(builder, factor, step, builder.load(pointer, align=4)), pointer, align=4)
    return context.get_dummy_value()


def _with_rows(act: Any) -> Any:
    """Intrinsic for float32 (rows, LANES) weights; `lanes` is the output of `_dot` or the input of `_add`."""

    def typing(typingctx, rows, values, begin, end, weights, lanes):
        def codegen(context, builder, signature, args):
            lanes = _data(context, builder, signature.args[5], args[5])
            return act(context, builder, _float_rows(context, builder, signature, args), args[2], args[3], lanes)

        return types.void(rows, values, types.int64, types.int64, weights, lanes), codegen

    return intrinsic(typing)


def _with_run(act: Any) -> Any:
    """The same for the consecutive rows `first_row, first_row + 1, …`: the dense part of the features."""

    def typing(typingctx, values, begin, end, weights, first_row, lanes):
        def codegen(context, builder, signature, args):
            lanes = _data(context, builder, signature.args[5], args[5])
            return act(context, builder, _float_run(context, builder, signature, args), args[1], args[2], lanes)

        return types.void(values, types.int64, types.int64, weights, types.int64, lanes), codegen

    return intrinsic(typing)


# `out[:LANES] += sum(values[p] * weights[rows[p]] for p in range(begin, end))`
lane_dot, lane_dot_run = _with_rows(_dot), _with_run(_dot)
# `weights[rows[p]] += values[p] * delta[:LANES]` for every `begin <= p < end`
lane_add, lane_add_run = _with_rows(_add), _with_run(_add)


def _packed_dot(vector_type: ir.VectorType, convert: Any) -> Any:
    """Intrinsic for the dot product with records of [`HEADER`] bytes followed by sixteen weights of one type."""

    def typing(typingctx, rows, values, begin, end, records, out):
        def codegen(context, builder, signature, args):
            row_of, value_of, out = (_data(context, builder, signature.args[i], args[i]) for i in (0, 1, 5))
            array = context.make_array(signature.args[4])(context, builder, args[4])
            stride = builder.extract_value(array.strides, 0)

            def term(position: ir.Value) -> tuple[ir.Value, ir.Value]:
                row = _as_index(builder, _element(builder, row_of, position))
                offset = builder.add(builder.mul(row, stride), ir.Constant(_INDEX, HEADER))
                pointer = builder.bitcast(builder.gep(array.data, [offset]), vector_type.as_pointer())
                vector = convert(builder, builder.load(pointer, align=1))
                return _splat(builder, _element(builder, value_of, position)), vector

            total = _accumulate(builder, args[2], args[3], term)
            _add_into(builder, builder.bitcast(out, _FLOATS.as_pointer()), total)
            return context.get_dummy_value()

        return types.void(rows, values, types.int64, types.int64, records, out), codegen

    return intrinsic(typing)


def _int8_to_float(builder: ir.IRBuilder, codes: ir.Value) -> ir.Value:
    return builder.sitofp(builder.sext(codes, ir.VectorType(ir.IntType(32), LANES)), _FLOATS)


# `out[:LANES] += sum(values[p] * weights of records[rows[p]])`; `records` is int8 (rows, bytes), see `RankerWeights`.
lane_dot_int8 = _packed_dot(_BYTES, _int8_to_float)
lane_dot_float = _packed_dot(_FLOATS, lambda builder, vector: vector)


def _prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    flag = ir.IntType(32)
    address = builder.bitcast(address, ir.IntType(8).as_pointer())
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), [address.type, flag, flag, flag]), "llvm.prefetch.p0"
    )
    read, keep, data_cache = flag(0), flag(3), flag(1)
    builder.call(function, [address, read, keep, data_cache])


@intrinsic
def prefetch(typingctx, records, row):
    """Prefetches a row of a two-dimensional array into the cache."""

    def codegen(context, builder, signature, args):
        array = context.make_array(signature.args[0])(context, builder, args[0])
        offset = builder.mul(args[1], builder.extract_value(array.strides, 0))
        base = builder.bitcast(array.data, ir.IntType(8).as_pointer())
        _prefetch(builder, builder.gep(base, [offset]))
        return context.get_dummy_value()

    return types.void(records, types.int64), codegen


@intrinsic
def prefetch_span(typingctx, array, begin, end):
    """Prefetches the elements `begin .. end` of a one-dimensional array."""

    def codegen(context, builder, signature, args):
        data = _data(context, builder, signature.args[0], args[0])
        step = ir.Constant(_INDEX, _CACHE_LINE * 8 // signature.args[0].dtype.bitwidth)
        with cgutils.for_range_slice(builder, args[1], args[2], step, intp=_INDEX) as (position, _):
            _prefetch(builder, builder.gep(data, [position]))
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64), codegen


@intrinsic
def prefetch_rows(typingctx, rows, begin, end, weights):
    """Prefetches the rows `rows[begin:end]` of (rows, LANES) weights."""

    def codegen(context, builder, signature, args):
        row_of, base = (_data(context, builder, signature.args[i], args[i]) for i in (0, 3))
        with cgutils.for_range_slice(builder, args[1], args[2], ir.Constant(_INDEX, 1), intp=_INDEX) as (position, _):
            _prefetch(builder, _row(builder, base, _as_index(builder, _element(builder, row_of, position)), _FLOATS))
        return context.get_dummy_value()

    return types.void(rows, types.int64, types.int64, weights), codegen


compiled = numba.njit(cache=True, nogil=True)
