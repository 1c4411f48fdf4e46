"""SIMD vectors as a Numba type: a Vector is one LLVM vector value, held in vector registers.

LLVM's loop vectoriser does badly on loops as short as a head is wide: it adds checks for overlapping arrays and
unrolls past the end. Kernels written with vectors need no loop vectoriser and read like the equations. The number of
lanes is part of the type, so it is passed as a tuple of that many zeros: `lanes`.

    total = fma(q[i], load(W, (n, i, 0), lanes), total)
"""
# pyright: standard, reportCallIssue=false

import operator

from llvmlite import ir
from numba import njit
from numba.core import cgutils, types
from numba.extending import intrinsic, models, overload, register_model

FAST = ("reassoc", "contract", "nsz", "arcp")  # sums may be reordered and fused; infinities and NaN keep their meaning


class Vector(types.Type):
    def __init__(self, dtype, width):
        self.dtype, self.width = dtype, width
        super().__init__(name=f"Vector({dtype}, {width})")


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    def __init__(self, dmm, kind):
        number = ir.FloatType() if kind.dtype == types.float32 else ir.DoubleType()
        super().__init__(dmm, kind, ir.VectorType(number, kind.width))


def _suffix(vector):
    return f"v{vector.count}f{32 if isinstance(vector.element, ir.FloatType) else 64}"


def _call(builder, name, result, *args):
    """Call an LLVM vector intrinsic."""
    signature = ir.FunctionType(result, [a.type for a in args])
    function = cgutils.get_or_insert_function(builder.module, signature, name)
    return builder.call(function, args, fastmath=FAST)


def _broadcast(builder, number, vector):
    """A vector with the same number in every lane."""
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), number, ir.Constant(ir.IntType(32), 0))
    zero_mask = ir.Constant(ir.VectorType(ir.IntType(32), vector.count), [0] * vector.count)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), zero_mask)


def _constant(vector, value):
    return ir.Constant(vector, [value] * vector.count)


def _address(context, builder, signature, args):
    """Pointer to the vector that begins at array[index], its type and its alignment."""
    array = context.make_array(signature.args[0])(context, builder, args[0])
    index = cgutils.unpack_tuple(builder, args[1], len(signature.args[1]))
    start = cgutils.get_item_pointer(context, builder, signature.args[0], array, index, wraparound=False)
    vector = ir.VectorType(context.get_data_type(signature.args[0].dtype), len(signature.args[2]))
    return builder.bitcast(start, vector.as_pointer()), vector, context.get_abi_sizeof(vector.element)


@intrinsic
def load(typing, array, index, lanes):
    """The vector that begins at array[index]."""

    def generate(context, builder, signature, args):
        start, vector, align = _address(context, builder, signature, args)
        return builder.load(start, align=align, typ=vector)

    return Vector(array.dtype, len(lanes))(array, index, lanes), generate


@intrinsic
def store(typing, array, index, lanes, vector):
    """Write the vector to array[index] and the entries after it."""

    def generate(context, builder, signature, args):
        start, _, align = _address(context, builder, signature, args)
        builder.store(args[3], start, align=align)
        return context.get_dummy_value()

    return types.none(array, index, lanes, vector), generate


@intrinsic
def zeros(typing, array, lanes):
    """A vector of zeros with the dtype of the array."""

    def generate(context, builder, signature, args):
        return ir.Constant(context.get_value_type(signature.return_type), None)

    return Vector(array.dtype, len(lanes))(array, lanes), generate


@intrinsic
def fma(typing, a, x, y):
    """a x + y for a scalar a and vectors x, y."""

    def generate(context, builder, signature, args):
        number = context.cast(builder, args[0], signature.args[0], x.dtype)
        product = builder.fmul(_broadcast(builder, number, args[1].type), args[1], flags=FAST)
        return builder.fadd(product, args[2], flags=FAST)

    return x(a, x, y), generate


@intrinsic
def dot(typing, x, y):
    def generate(context, builder, signature, args):
        product = builder.fmul(*args, flags=FAST)
        start = ir.Constant(product.type.element, 0.0)
        return _call(builder, f"llvm.vector.reduce.fadd.{_suffix(product.type)}", start.type, start, product)

    return x.dtype(x, y), generate


@intrinsic
def reduce_max(typing, x):
    def generate(context, builder, signature, args):
        kind = args[0].type
        return _call(builder, f"llvm.vector.reduce.fmax.{_suffix(kind)}", kind.element, args[0])

    return x.dtype(x), generate


@intrinsic
def broadcast(typing, a, x):
    """The scalar a in every lane of a vector like x."""

    def generate(context, builder, signature, args):
        return _broadcast(builder, context.cast(builder, args[0], signature.args[0], x.dtype), args[1].type)

    return x(a, x), generate


@intrinsic
def where_positive(typing, x, yes, no):
    def generate(context, builder, signature, args):
        return builder.select(builder.fcmp_ordered(">", args[0], _constant(args[0].type, 0.0)), args[1], args[2])

    return x(x, yes, no), generate


@intrinsic
def exp(typing, x):
    """2^n e^r with an integer n and |r| <= ln(2)/2; e^r by its Taylor series to the precision of the type."""

    def generate(context, builder, signature, args):
        vector, single = args[0].type, isinstance(args[0].type.element, ir.FloatType)
        bits, bias, mantissa, terms = (32, 127, 23, 7) if single else (64, 1023, 52, 13)
        low, high = (-87.0, 88.0) if single else (-708.0, 709.0)
        log2_high, log2_low = (0.693359375, -2.12194440e-4) if single else (6.93145751953125e-1, 1.42860682030941723e-6)

        def number(value):
            return _constant(vector, value)

        def mul_add(a, b, c):
            return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))

        x = args[0]
        # an unordered comparison keeps NaN, so that divergence shows
        x = builder.select(builder.fcmp_ordered("<", x, number(low)), number(low), x)
        x = builder.select(builder.fcmp_ordered(">", x, number(high)), number(high), x)
        halves = mul_add(x, number(1.4426950408889634), number(0.5))
        n = _call(builder, f"llvm.floor.{_suffix(vector)}", vector, halves)
        r = mul_add(n, number(-log2_high), x)
        r = mul_add(n, number(-log2_low), r)
        factorial, series = 1.0, []
        for k in range(terms + 1):
            factorial *= max(k, 1)
            series.append(1 / factorial)
        result = number(series[-1])
        for coefficient in reversed(series[:-1]):
            result = mul_add(result, r, number(coefficient))
        whole = ir.VectorType(ir.IntType(bits), vector.count)
        power = builder.add(builder.fptosi(n, whole), ir.Constant(whole, [bias] * vector.count))
        power = builder.shl(power, ir.Constant(whole, [mantissa] * vector.count))
        return builder.fmul(result, builder.bitcast(power, vector))

    return x(x), generate


def _operator(name):
    @intrinsic
    def apply(typing, x, y):
        def generate(context, builder, signature, args):
            return getattr(builder, name)(*args, flags=FAST)

        return x(x, y), generate

    return apply


_add, _subtract, _multiply, _divide = (_operator(name) for name in ("fadd", "fsub", "fmul", "fdiv"))


def _overload_operator(operation, apply):
    @overload(operation)
    def choose(x, y):
        both = isinstance(x, Vector) and isinstance(y, Vector)
        return (lambda x, y: apply(x, y)) if both else None


_overload_operator(operator.add, _add)
_overload_operator(operator.sub, _subtract)
_overload_operator(operator.mul, _multiply)
_overload_operator(operator.truediv, _divide)


@njit(nogil=True, error_model="numpy", forceinline=True)
def sigmoid(x):
    one = broadcast(1, x)
    return one / (one + exp(x - x - x))


@njit(nogil=True, error_model="numpy", forceinline=True)
def tanh(x):
    one = broadcast(1, x)
    return one - broadcast(2, x) / (one + exp(x + x))
