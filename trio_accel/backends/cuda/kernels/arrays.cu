// Element-wise work on arrays of any strides: conversions as NumPy's astype makes them, and fills.
//
// One kernel for all pairs of types: the types are the same for all threads, and what is computed is little
// beside what is read and written.

// In the order of the table of element types.
enum Type {
    FLOAT64, FLOAT32, FLOAT16, BFLOAT16, FLOAT8_E4M3FN, FLOAT8_E5M2, COMPLEX64, COMPLEX128,
    INT8, INT16, INT32, INT64, UINT8, UINT16, UINT32, UINT64, BOOL
};

enum Flag { SCALE = 1, CONJUGATE = 2, SINGLE = 4, BITS = 8 };

enum { AXES = 64 };

struct ConvertArguments {
    const char *source;
    char *out;
    i64 count;
    double scale;
    int source_type, out_type, flags, ndim;
    i64 shape[AXES], source_strides[AXES], out_strides[AXES];
};

// A copy to another order of axes: elements follow one another along the rows of the source, and along the columns
// of the result. The other axes are in the arrays. `count` is the number of squares, each of which is a block's, and of
// threads where one of both axes is short.
struct TransposeArguments {
    const char *source;
    char *out;
    i64 count, rows, columns, source_step, out_step;
    int itemsize, side, ndim;
    i64 shape[AXES], source_strides[AXES], out_strides[AXES];
};

struct FillArguments {
    char *out;
    i64 count;
    int itemsize, ndim;
    unsigned char value[16];
    i64 shape[AXES], strides[AXES];
};

// An element of any type: whole numbers are exact to 64 bits, and everything else is in a double.
struct Value {
    enum Kind { SIGNED, UNSIGNED, REAL } kind;
    i64 whole;
    double real, imaginary;
};

__device__ u64 bits_of(double value)
{
    union { double value; u64 bits; } both;
    both.value = value;
    return both.bits;
}

__device__ double from_bits(u64 bits)
{
    union { double value; u64 bits; } both;
    both.bits = bits;
    return both.value;
}

__device__ double power_of_two(int exponent)
{
    return from_bits((u64)(exponent + 1023) << 52);
}

// Of a small floating type: its bits of mantissa, its smallest exponent, its largest finite code, the code of what
// is larger, and the code of a number that is none.
struct Small {
    int mantissa, least, largest, overflow, nan;
};

__device__ Small small_of(int type)
{
    switch (type) {
    case FLOAT16: return {10, -14, 0x7bff, 0x7c00, 0x7e00};
    case BFLOAT16: return {7, -126, 0x7f7f, 0x7f80, 0x7fc0};
    case FLOAT8_E4M3FN: return {3, -6, 0x7e, 0x7f, 0x7f};
    default: return {2, -14, 0x7b, 0x7c, 0x7e};
    }
}

// Rounded once, to the nearest and then to the even one.
__device__ unsigned to_small(double value, int type)
{
    const Small small = small_of(type);
    const u64 bits = bits_of(value);
    const int width = type == FLOAT16 || type == BFLOAT16 ? 15 : 7;
    const unsigned sign = (unsigned)(bits >> 63) << width;
    const double size = from_bits(bits & 0x7fffffffffffffffull);
    if (size != size) {
        if (type == FLOAT16) {
            // The payload's upper bits stay, as far as there are any.
            const unsigned payload = (unsigned)(bits >> 42) & 0x3ff;
            return sign | 0x7c00 | (payload ? payload : 1);
        }
        return sign | small.nan;
    }
#ifndef STAND_IN
    if (type == FLOAT16) {
        // The processor rounds in the same way, in a fifth of the time.
        unsigned short code;
        asm("cvt.rn.f16.f64 %0, %1;" : "=h"(code) : "d"(value));
        return code;
    }
#endif
    int exponent = (int)((bits >> 52) & 0x7ff) - 1023;
    if (exponent > 300)
        return sign | small.overflow;
    if (exponent < small.least)
        exponent = small.least;
    const double steps = rint(size * power_of_two(small.mantissa - exponent));
    const i64 code = (i64)steps + ((i64)(exponent - small.least) << small.mantissa);
    return sign | (unsigned)(code > small.largest ? small.overflow : code);
}

__device__ double from_small(unsigned code, int type)
{
    const Small small = small_of(type);
    const int width = type == FLOAT16 || type == BFLOAT16 ? 15 : 7;
    const u64 sign = (u64)(code >> width & 1) << 63;
    const int magnitude = (int)(code & ((1u << width) - 1));
    if (magnitude > small.largest) {
        const bool is_infinite = magnitude == small.overflow && small.overflow != small.nan;
        u64 bits = 0x7ff0000000000000ull;
        if (!is_infinite)
            bits |= type == FLOAT16 ? (u64)(magnitude & 0x3ff) << 42 : 0x0008000000000000ull;
        return from_bits(sign | bits);
    }
#ifndef STAND_IN
    if (type == FLOAT16) {
        double exact;
        asm("cvt.f64.f16 %0, %1;" : "=d"(exact) : "h"((unsigned short)code));
        return exact;
    }
#endif
    const int fraction = magnitude & ((1 << small.mantissa) - 1);
    const int exponent = magnitude >> small.mantissa;
    const double value = exponent
        ? (double)(fraction + (1 << small.mantissa)) * power_of_two(exponent - 1 + small.least - small.mantissa)
        : (double)fraction * power_of_two(small.least - small.mantissa);
    return from_bits(sign | bits_of(value));
}

// Whole numbers: a step for each type, of the type in C++ and what an element is taken for.
#define WHOLE_TYPES(STEP) \
    STEP(INT8, signed char, SIGNED) STEP(INT16, short, SIGNED) STEP(INT32, int, SIGNED) STEP(INT64, i64, SIGNED) \
    STEP(UINT8, unsigned char, SIGNED) STEP(UINT16, unsigned short, SIGNED) STEP(UINT32, unsigned, SIGNED) \
    STEP(UINT64, u64, UNSIGNED)
#define LOAD(type, Type, KIND) \
    case type: value.kind = Value::KIND; value.whole = (i64) * (const Type *)at; return value;
#define STORE(type, Type, KIND) \
    case type: *(Type *)at = (Type)((Type)-1 < (Type)0 ? (u64)as_signed(value) : as_unsigned(value)); break;

__device__ Value load(const char *at, int type)
{
    Value value = {Value::SIGNED, 0, 0.0, 0.0};
    switch (type) {
        WHOLE_TYPES(LOAD)
    case BOOL: value.whole = *(const unsigned char *)at != 0; return value;
    }
    value.kind = Value::REAL;
    switch (type) {
    case FLOAT64: value.real = *(const double *)at; break;
    case FLOAT32: value.real = *(const float *)at; break;
    case COMPLEX64: value.real = ((const float *)at)[0]; value.imaginary = ((const float *)at)[1]; break;
    case COMPLEX128: value.real = ((const double *)at)[0]; value.imaginary = ((const double *)at)[1]; break;
    case FLOAT16: case BFLOAT16: value.real = from_small(*(const unsigned short *)at, type); break;
    default: value.real = from_small(*(const unsigned char *)at, type); break;
    }
    return value;
}

__device__ double as_double(const Value &value)
{
    if (value.kind == Value::REAL)
        return value.real;
    return value.kind == Value::SIGNED ? (double)value.whole : (double)(u64)value.whole;
}

// A whole number is rounded once.
__device__ float as_float(const Value &value)
{
    if (value.kind == Value::REAL)
        return (float)value.real;
    return value.kind == Value::SIGNED ? (float)value.whole : (float)(u64)value.whole;
}

__device__ i64 as_signed(const Value &value)
{
    return value.kind == Value::REAL ? (i64)value.real : value.whole;
}

__device__ u64 as_unsigned(const Value &value)
{
    if (value.kind != Value::REAL)
        return (u64)value.whole;
    return value.real < 0 ? (u64)(i64)value.real : (u64)value.real;
}

__device__ void store(char *at, int type, const Value &value)
{
    switch (type) {
    case FLOAT64: *(double *)at = as_double(value); break;
    case FLOAT32: *(float *)at = as_float(value); break;
    // By way of a float, as the host's types do it from whole numbers and, bfloat16 alone, from doubles.
    case FLOAT16:
        *(unsigned short *)at = (unsigned short)to_small(value.kind == Value::REAL ? value.real : as_float(value), type);
        break;
    case BFLOAT16: *(unsigned short *)at = (unsigned short)to_small(as_float(value), type); break;
    case FLOAT8_E4M3FN: case FLOAT8_E5M2:
        *(unsigned char *)at = (unsigned char)to_small(value.kind == Value::REAL ? value.real : as_float(value), type);
        break;
    case COMPLEX64: ((float *)at)[0] = as_float(value); ((float *)at)[1] = (float)value.imaginary; break;
    case COMPLEX128: ((double *)at)[0] = as_double(value); ((double *)at)[1] = value.imaginary; break;
        WHOLE_TYPES(STORE)
    default:
        *(unsigned char *)at = value.kind == Value::REAL ? value.real != 0 || value.imaginary != 0 : value.whole != 0;
        break;
    }
}

__device__ void apply(Value &value, const ConvertArguments &arguments)
{
    if (arguments.flags & SCALE) {
        const double scale = arguments.scale;
        value.real = as_double(value);
        value.kind = Value::REAL;
        if (arguments.flags & SINGLE) {
            value.real = (float)value.real * (float)scale;
            value.imaginary = (float)value.imaginary * (float)scale;
        } else {
            value.real = value.real * scale;
            value.imaginary = value.imaginary * scale;
        }
    }
    if (arguments.flags & CONJUGATE)
        value.imaginary = -value.imaginary;
}

__device__ int size_of(int type)
{
    switch (type) {
    case COMPLEX128: return 16;
    case FLOAT64: case COMPLEX64: case INT64: case UINT64: return 8;
    case FLOAT32: case INT32: case UINT32: return 4;
    case FLOAT16: case BFLOAT16: case INT16: case UINT16: return 2;
    default: return 1;
    }
}

__device__ void copy_bits(char *out, const char *source, int size)
{
    switch (size) {
    case 1: *out = *source; break;
    case 2: *(short *)out = *(const short *)source; break;
    case 4: *(int *)out = *(const int *)source; break;
    case 8: *(i64 *)out = *(const i64 *)source; break;
    default: ((i64 *)out)[0] = ((const i64 *)source)[0]; ((i64 *)out)[1] = ((const i64 *)source)[1]; break;
    }
}

// Divisions of 32 bits are several times as fast.
template <typename Index>
__device__ void convert_element(const ConvertArguments &arguments, Index index)
{
    const char *source = arguments.source;
    char *out = arguments.out;
    for (int axis = arguments.ndim - 1; axis > 0; axis--) {
        const Index extent = (Index)arguments.shape[axis];
        const Index rest = index / extent;
        const i64 within = (i64)(index - rest * extent);
        source += within * arguments.source_strides[axis];
        out += within * arguments.out_strides[axis];
        index = rest;
    }
    if (arguments.ndim) {
        source += (i64)index * arguments.source_strides[0];
        out += (i64)index * arguments.out_strides[0];
    }
    if (arguments.flags & BITS) {
        copy_bits(out, source, size_of(arguments.out_type));
        return;
    }
    Value value = load(source, arguments.source_type);
    apply(value, arguments);
    store(out, arguments.out_type, value);
}

// Elements that are read and written at once.
template <typename Element, int COUNT> struct alignas(sizeof(Element) * COUNT) Run {
    Element of[COUNT];
};

// Half precision to single, or back: what networks convert. Elements follow one another, and a thread has four.
template <typename From, typename To> __device__ void convert_runs(const ConvertArguments &arguments)
{
    const int source_type = arguments.source_type, out_type = arguments.out_type;
    EACH(index, (arguments.count + 3) / 4) {
        const i64 first = index * 4;
        const int most = arguments.count - first < 4 ? (int)(arguments.count - first) : 4;
        const From *const from = (const From *)arguments.source + first;
        To *const to = (To *)arguments.out + first;
        Run<From, 4> values;
        Run<To, 4> made;
        if (most == 4)
            values = *(const Run<From, 4> *)from;
        else
            for (int k = 0; k < most; k++)
                values.of[k] = from[k];
        for (int k = 0; k < most; k++) {
            const Value value = load((const char *)&values.of[k], source_type);
            store((char *)&made.of[k], out_type, value);
        }
        if (most == 4)
            *(Run<To, 4> *)to = made;
        else
            for (int k = 0; k < most; k++)
                to[k] = made.of[k];
    }
}

__device__ bool is_half(int type)
{
    return type == FLOAT16 || type == BFLOAT16;
}

KERNEL(convert, ConvertArguments)
{
    const bool is_aligned = (((u64)arguments.source | (u64)arguments.out) & 15) == 0;
    if (arguments.ndim == 1 && arguments.flags == SINGLE && is_aligned) {
        const i64 step = arguments.source_strides[0], out_step = arguments.out_strides[0];
        if (arguments.source_type == FLOAT32 && is_half(arguments.out_type) && step == 4 && out_step == 2)
            return convert_runs<float, unsigned short>(arguments);
        if (is_half(arguments.source_type) && arguments.out_type == FLOAT32 && step == 2 && out_step == 4)
            return convert_runs<unsigned short, float>(arguments);
    }
    if (arguments.count <= 0x7fffffff)
        EACH(index, arguments.count) convert_element<unsigned>(arguments, (unsigned)index);
    else
        EACH(index, arguments.count) convert_element<u64>(arguments, (u64)index);
}

// Moves to an element along the other axes, by its number there.
__device__ void move_along_others(const TransposeArguments &arguments, unsigned index, const char *&source, char *&out)
{
    for (int axis = arguments.ndim - 1; axis >= 0; axis--) {
        const unsigned extent = (unsigned)arguments.shape[axis], rest = index / extent;
        source += (i64)(index - rest * extent) * arguments.source_strides[axis];
        out += (i64)(index - rest * extent) * arguments.out_strides[axis];
        index = rest;
    }
}

// Side of a square that is copied by lines, in elements, and threads of a block.
enum { SIDE = 32, SQUARE_THREADS = 256 };

// Where a square begins, in elements along both axes, and its first element in both arrays.
struct Square {
    i64 row, column;
    const char *source;
    char *out;
};

__device__ Square square_of(const TransposeArguments &arguments, unsigned number)
{
    const unsigned wide = (unsigned)((arguments.columns + arguments.side - 1) / arguments.side);
    const unsigned high = (unsigned)((arguments.rows + arguments.side - 1) / arguments.side);
    const unsigned rest = number / wide, index = rest / high;
    Square square;
    square.row = (i64)(rest - index * high) * arguments.side;
    square.column = (i64)(number - rest * wide) * arguments.side;
    square.source = arguments.source + square.column * arguments.source_step + square.row * arguments.itemsize;
    square.out = arguments.out + square.row * arguments.out_step + square.column * arguments.itemsize;
    move_along_others(arguments, index, square.source, square.out);
    return square;
}

// A warp writes one line after another. Each line of the source that it reads from stays in the cache for the next warps,
// which read the elements behind its own.
template <typename Element> __device__ void transpose_lines(const TransposeArguments &arguments, const Square &square)
{
    const i64 across = threadIdx.x % SIDE;
    if (square.column + across >= arguments.columns)
        return;
    const char *source = square.source + across * arguments.source_step;
    for (i64 down = threadIdx.x / SIDE; down < SIDE && square.row + down < arguments.rows; down += SQUARE_THREADS / SIDE)
        *((Element *)(square.out + down * arguments.out_step) + across) = *((const Element *)source + down);
}

// A thread turns COUNT by COUNT elements in its registers. It reads runs of the source and writes runs of the result, of
// which a warp reads 8 and writes 4 that follow one another.
template <typename Element, int COUNT>
__device__ void transpose_runs(const TransposeArguments &arguments, const Square &square)
{
    typedef Run<Element, COUNT> Line;
    const unsigned within = threadIdx.x;
    const i64 down = (within / 32 % 2 * 8 + within % 8) * COUNT, across = (within / 64 * 4 + within / 8 % 4) * COUNT;
    const i64 rows = arguments.rows - square.row - down, columns = arguments.columns - square.column - across;
    const char *source = square.source + across * arguments.source_step + down * (i64)sizeof(Element);
    char *out = square.out + down * arguments.out_step + across * (i64)sizeof(Element);
    Line lines[COUNT];
    if (rows >= COUNT && columns >= COUNT) {
        for (int line = 0; line < COUNT; line++)
            lines[line] = *(const Line *)(source + line * arguments.source_step);
        for (int place = 0; place < COUNT; place++) {
            Line turned;
            for (int line = 0; line < COUNT; line++)
                turned.of[line] = lines[line].of[place];
            *(Line *)(out + place * arguments.out_step) = turned;
        }
    } else {
        // The edge of the array.
        for (int line = 0; line < COUNT && line < columns; line++)
            for (int place = 0; place < COUNT && place < rows; place++)
                *((Element *)(out + place * arguments.out_step) + line) =
                    *((const Element *)(source + line * arguments.source_step) + place);
    }
}

struct Sixteen {
    i64 halves[2];
};

#define BY_SIZE(COPY)                \
    switch (arguments.itemsize) {    \
    case 1: COPY(char); break;       \
    case 2: COPY(short); break;      \
    case 4: COPY(int); break;        \
    case 8: COPY(i64); break;        \
    default: COPY(Sixteen); break;   \
    }

// Kernels of their own: in one, lines would have the registers of runs, and so fewer threads at once.
KERNEL(transpose_by_lines, TransposeArguments)
{
    for (unsigned number = blockIdx.x; number < (unsigned)arguments.count; number += gridDim.x) {
        const Square square = square_of(arguments, number);
#define COPY(Element) transpose_lines<Element>(arguments, square)
        BY_SIZE(COPY)
#undef COPY
    }
}

KERNEL(transpose_by_runs, TransposeArguments)
{
    for (unsigned number = blockIdx.x; number < (unsigned)arguments.count; number += gridDim.x) {
        const Square square = square_of(arguments, number);
        switch (arguments.itemsize) {
        case 1: transpose_runs<char, 8>(arguments, square); break;
        case 2: transpose_runs<short, 8>(arguments, square); break;
        case 4: transpose_runs<int, 4>(arguments, square); break;
        default: transpose_runs<i64, 2>(arguments, square); break;
        }
    }
}

// Where one of the axes is short, as that of an image's channels: a thread copies all along that, and neighbours are
// neighbours along the other one.
template <typename Element> __device__ void transpose_few(const TransposeArguments &arguments)
{
    const bool is_high = arguments.rows > arguments.columns;
    const unsigned wide = (unsigned)(is_high ? arguments.rows : arguments.columns);
    const int count = (int)(is_high ? arguments.columns : arguments.rows);
    const i64 source_step = is_high ? arguments.source_step : (i64)sizeof(Element);
    const i64 out_step = is_high ? (i64)sizeof(Element) : arguments.out_step;
    EACH(thread, arguments.count) {
        const unsigned index = (unsigned)thread / wide;
        const i64 place = (i64)((unsigned)thread - index * wide);
        const char *source = arguments.source + place * (is_high ? (i64)sizeof(Element) : arguments.source_step);
        char *out = arguments.out + place * (is_high ? arguments.out_step : (i64)sizeof(Element));
        move_along_others(arguments, index, source, out);
        for (int first = 0; first < count; first += 4) {
            // All are read before one is written: a read does not wait for a write then.
            Element values[4];
            for (int one = 0; one < 4; one++)
                if (first + one < count)
                    values[one] = *(const Element *)(source + (first + one) * source_step);
            for (int one = 0; one < 4; one++)
                if (first + one < count)
                    *(Element *)(out + (first + one) * out_step) = values[one];
        }
    }
}

KERNEL(transpose_narrow, TransposeArguments)
{
#define COPY(Element) transpose_few<Element>(arguments)
    BY_SIZE(COPY)
#undef COPY
}

KERNEL(fill, FillArguments)
{
    EACH(number, arguments.count) {
        char *out = arguments.out;
        i64 index = number;
        for (int axis = arguments.ndim - 1; axis > 0; axis--) {
            const i64 rest = index / arguments.shape[axis];
            out += (index - rest * arguments.shape[axis]) * arguments.strides[axis];
            index = rest;
        }
        if (arguments.ndim)
            out += index * arguments.strides[0];
        copy_bits(out, (const char *)arguments.value, arguments.itemsize);
    }
}
