// What is done with a matrix whose structure nobody has checked yet: what it says of itself is not believed.

enum Type { FLOAT32, FLOAT64, COMPLEX64, COMPLEX128 };

// In the order of the messages.
enum Fault { ENDS = 1, ORDER, COLUMNS, STORED };

struct ProductArguments {
    const char *indptr, *indices, *data, *x;
    char *out;
    // Two: the fault, and whether more is stored than is used.
    int *words;
    i64 rows, columns, stored;
    int type, is_wide, is_dense;
};

struct GuardArguments {
    const char *indptr, *indices;
    char *safe_indptr, *safe_indices;
    int *words;
    i64 rows, columns, stored;
    int is_wide, phase;
};

struct ScaleArguments {
    char *out;
    i64 count;
    double real, imaginary;
    int type;
};

template <typename Number> struct Complex {
    Number real, imaginary;
};

template <typename Number> __device__ Complex<Number> operator+(Complex<Number> a, Complex<Number> b)
{
    return {a.real + b.real, a.imaginary + b.imaginary};
}

template <typename Number> __device__ Complex<Number> operator*(Complex<Number> a, Complex<Number> b)
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

template <typename Index> __device__ void check_ends(const ProductArguments &arguments)
{
    const Index *indptr = (const Index *)arguments.indptr;
    const i64 last = indptr[arguments.rows];
    if (indptr[0] != 0 || last < 0 || last > arguments.stored)
        arguments.words[0] = ENDS;
    else if (last < arguments.stored)
        arguments.words[1] = 1;
}

// Whether the elements of a row are some of those that are stored.
__device__ bool is_right(const ProductArguments &arguments, i64 begin, i64 end)
{
    if (begin < 0 || end > arguments.stored)
        arguments.words[0] = ENDS;
    else if (begin > end)
        arguments.words[0] = ORDER;
    else
        return true;
    return false;
}

// A row for a warp. Whatever is wrong is told, and not read.
template <typename Index, typename Number> __device__ void multiply(const ProductArguments &arguments)
{
    const Index *indptr = (const Index *)arguments.indptr, *indices = (const Index *)arguments.indices;
    const Number *data = (const Number *)arguments.data, *x = (const Number *)arguments.x;
    const i64 thread = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    const i64 warps = (i64)gridDim.x * blockDim.x / LANES;
    const int lane = (int)(thread % LANES);
    if (thread == 0)
        check_ends<Index>(arguments);
    for (i64 row = thread / LANES; row < arguments.rows; row += warps) {
        const i64 begin = indptr[row], end = indptr[row + 1];
        Number sum = Number();
        if (is_right(arguments, begin, end))
            for (i64 element = begin + lane; element < end; element += LANES) {
                const i64 column = indices[element];
                if (column < 0 || column >= arguments.columns)
                    arguments.words[0] = COLUMNS;
                else
                    sum = sum + data[element] * x[column];
            }
#if LANES > 1
        for (int distance = LANES / 2; distance; distance /= 2)
            sum = sum + from_lane(sum, distance);
#endif
        if (lane == 0)
            ((Number *)arguments.out)[row] = sum;
    }
}

// A row for a thread: elements that are stored twice are added up. The matrix is all zeros before.
template <typename Index, typename Number> __device__ void scatter(const ProductArguments &arguments)
{
    const Index *indptr = (const Index *)arguments.indptr, *indices = (const Index *)arguments.indices;
    if (blockIdx.x == 0 && threadIdx.x == 0)
        check_ends<Index>(arguments);
    EACH(row, arguments.rows) {
        const i64 begin = indptr[row], end = indptr[row + 1];
        if (is_right(arguments, begin, end))
            for (i64 element = begin; element < end; element++) {
                const i64 column = indices[element];
                if (column < 0 || column >= arguments.columns) {
                    arguments.words[0] = COLUMNS;
                } else {
                    Number *place = (Number *)arguments.out + row * arguments.columns + column;
                    *place = *place + ((const Number *)arguments.data)[element];
                }
            }
    }
}

template <typename Index, typename Number> __device__ void run(const ProductArguments &arguments)
{
    if (arguments.is_dense)
        scatter<Index, Number>(arguments);
    else
        multiply<Index, Number>(arguments);
}

template <typename Index> __device__ void run_type(const ProductArguments &arguments)
{
    switch (arguments.type) {
    case FLOAT32: run<Index, float>(arguments); break;
    case FLOAT64: run<Index, double>(arguments); break;
    case COMPLEX64: run<Index, Complex<float>>(arguments); break;
    default: run<Index, Complex<double>>(arguments); break;
    }
}

KERNEL(multiply_unchecked, ProductArguments)
{
    if (arguments.is_wide)
        run_type<i64>(arguments);
    else
        run_type<int>(arguments);
}

// A structure is checked in the first phase, and copied in the second: if it is wrong, as one that leads nowhere
// outside.
template <typename Index> __device__ void guard_type(const GuardArguments &arguments)
{
    const Index *indptr = (const Index *)arguments.indptr, *indices = (const Index *)arguments.indices;
    const i64 rows = arguments.rows, stored = arguments.stored;
    const bool is_wrong = arguments.phase && arguments.words[0];
    EACH(place, rows < stored ? stored : rows + 1) {
        if (place <= rows) {
            const i64 value = indptr[place];
            if (arguments.phase)
                ((Index *)arguments.safe_indptr)[place] = (Index)(!is_wrong ? value : place == rows ? stored : 0);
            else if (value < 0 || value > stored || (place == 0 && value))
                arguments.words[0] = ENDS;
            else if (place && indptr[place - 1] > value)
                arguments.words[0] = ORDER;
            else if (place == rows && value < stored)
                arguments.words[0] = STORED;
        }
        if (place < stored) {
            const i64 column = indices[place];
            if (arguments.phase)
                ((Index *)arguments.safe_indices)[place] = (Index)(is_wrong ? 0 : column);
            else if (column < 0 || column >= arguments.columns)
                arguments.words[0] = COLUMNS;
        }
    }
}

KERNEL(guard, GuardArguments)
{
    if (arguments.is_wide)
        guard_type<i64>(arguments);
    else
        guard_type<int>(arguments);
}

template <typename Number> __device__ void scale_type(const ScaleArguments &arguments, Number factor)
{
    Number *out = (Number *)arguments.out;
    const bool is_zero = arguments.real == 0 && arguments.imaginary == 0;
    EACH(place, arguments.count) out[place] = is_zero ? Number() : out[place] * factor;
}

// All elements by a factor; where it is 0, whatever they are.
KERNEL(scale, ScaleArguments)
{
    switch (arguments.type) {
    case FLOAT32: scale_type(arguments, (float)arguments.real); break;
    case FLOAT64: scale_type(arguments, arguments.real); break;
    case COMPLEX64:
        scale_type(arguments, Complex<float>{(float)arguments.real, (float)arguments.imaginary});
        break;
    default: scale_type(arguments, Complex<double>{arguments.real, arguments.imaginary}); break;
    }
}
