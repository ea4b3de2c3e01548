// The product of a matrix whose structure nobody has checked yet: what it says of itself is not believed.

#ifndef STAND_IN
#define KERNEL(name, Arguments) extern "C" __global__ void name(const Arguments arguments)
#define LANES 32
#else
#define LANES 1
#endif

typedef long long i64;

enum Type { FLOAT32, FLOAT64, COMPLEX64, COMPLEX128 };

// In the order of the messages.
enum Fault { ENDS = 1, ORDER, COLUMNS };

struct ProductArguments {
    const char *indptr, *indices, *data, *x;
    char *out;
    // Two: the fault, and whether more is stored than is used.
    int *words;
    i64 rows, columns, stored;
    int type, is_wide;
};

template <typename Number> struct Complex {
    Number real, imaginary;
};

__device__ float zero_of(float) { return 0; }
__device__ double zero_of(double) { return 0; }
template <typename Number> __device__ Complex<Number> zero_of(Complex<Number>) { return {0, 0}; }

template <typename Number> __device__ Number plus(Number a, Number b) { return a + b; }
template <typename Number> __device__ Complex<Number> plus(Complex<Number> a, Complex<Number> b)
{
    return {a.real + b.real, a.imaginary + b.imaginary};
}

template <typename Number> __device__ Number times(Number a, Number b) { return a * b; }
template <typename Number> __device__ Complex<Number> times(Complex<Number> a, Complex<Number> b)
{
    return {a.real * b.real - a.imaginary * b.imaginary, a.real * b.imaginary + a.imaginary * b.real};
}

#if LANES > 1
template <typename Number> __device__ Number from_lane(Number value, int distance)
{
    return __shfl_down_sync(0xffffffffu, value, distance);
}
template <typename Number> __device__ Complex<Number> from_lane(Complex<Number> value, int distance)
{
    return {from_lane(value.real, distance), from_lane(value.imaginary, distance)};
}
#endif

// A row for a warp. Whatever is wrong is told, and not read.
template <typename Index, typename Number> __device__ void multiply(const ProductArguments &arguments)
{
    const Index *indptr = (const Index *)arguments.indptr, *indices = (const Index *)arguments.indices;
    const Number *data = (const Number *)arguments.data, *x = (const Number *)arguments.x;
    const i64 thread = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    const i64 warps = (i64)gridDim.x * blockDim.x / LANES;
    const int lane = (int)(thread % LANES);
    if (thread == 0) {
        const i64 last = indptr[arguments.rows];
        if (indptr[0] != 0 || last < 0 || last > arguments.stored)
            arguments.words[0] = ENDS;
        else if (last < arguments.stored)
            arguments.words[1] = 1;
    }
    for (i64 row = thread / LANES; row < arguments.rows; row += warps) {
        const i64 begin = indptr[row], end = indptr[row + 1];
        Number sum = zero_of(Number());
        if (begin < 0 || end > arguments.stored)
            arguments.words[0] = ENDS;
        else if (begin > end)
            arguments.words[0] = ORDER;
        else
            for (i64 element = begin + lane; element < end; element += LANES) {
                const i64 column = indices[element];
                if (column < 0 || column >= arguments.columns)
                    arguments.words[0] = COLUMNS;
                else
                    sum = plus(sum, times(data[element], x[column]));
            }
#if LANES > 1
        for (int distance = LANES / 2; distance; distance /= 2)
            sum = plus(sum, from_lane(sum, distance));
#endif
        if (lane == 0)
            ((Number *)arguments.out)[row] = sum;
    }
}

template <typename Index> __device__ void multiply_type(const ProductArguments &arguments)
{
    switch (arguments.type) {
    case FLOAT32: multiply<Index, float>(arguments); break;
    case FLOAT64: multiply<Index, double>(arguments); break;
    case COMPLEX64: multiply<Index, Complex<float>>(arguments); break;
    default: multiply<Index, Complex<double>>(arguments); break;
    }
}

KERNEL(multiply_unchecked, ProductArguments)
{
    if (arguments.is_wide)
        multiply_type<i64>(arguments);
    else
        multiply_type<int>(arguments);
}
