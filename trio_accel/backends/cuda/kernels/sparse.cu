// What is done with a matrix whose structure nobody has checked yet: what it says of itself is not believed.

#include "values.cuh"

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

__device__ void check_ends(const ProductArguments &arguments)
{
    const i64 last = index_at(arguments, arguments.indptr, arguments.rows);
    if (index_at(arguments, arguments.indptr, 0) != 0 || last < 0 || last > arguments.stored)
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

__device__ bool is_inside(const ProductArguments &arguments, i64 column)
{
    const bool is_right = column >= 0 && column < arguments.columns;
    if (!is_right)
        arguments.words[0] = COLUMNS;
    return is_right;
}

// A row for a warp. Whatever is wrong is told, and not read.
__device__ void multiply(const ProductArguments &arguments)
{
    const i64 thread = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    const i64 warps = (i64)gridDim.x * blockDim.x / LANES;
    const int lane = (int)(thread % LANES);
    for (i64 row = thread / LANES; row < arguments.rows; row += warps) {
        const i64 begin = index_at(arguments, arguments.indptr, row);
        const i64 end = index_at(arguments, arguments.indptr, row + 1);
        Value sum = {0, 0};
        if (is_right(arguments, begin, end))
            for (i64 item = begin + lane; item < end; item += LANES) {
                const i64 column = index_at(arguments, arguments.indices, item);
                if (is_inside(arguments, column))
                    sum = sum + value_at(arguments, arguments.data, item) * value_at(arguments, arguments.x, column);
            }
        OVER_LANES(sum.real, sum.real + other)
        OVER_LANES(sum.imaginary, sum.imaginary + other)
        if (lane == 0)
            put_value(arguments, arguments.out, row, sum);
    }
}

// A row for a thread: elements that are stored twice are added up. The matrix is all zeros before.
__device__ void scatter(const ProductArguments &arguments)
{
    EACH(row, arguments.rows) {
        const i64 begin = index_at(arguments, arguments.indptr, row);
        const i64 end = index_at(arguments, arguments.indptr, row + 1);
        if (is_right(arguments, begin, end))
            for (i64 item = begin; item < end; item++) {
                const i64 column = index_at(arguments, arguments.indices, item);
                const i64 place = row * arguments.columns + column;
                if (is_inside(arguments, column))
                    put_value(arguments, arguments.out, place,
                              value_at(arguments, arguments.out, place) + value_at(arguments, arguments.data, item));
            }
    }
}

KERNEL(multiply_unchecked, ProductArguments)
{
    if (blockIdx.x == 0 && threadIdx.x == 0)
        check_ends(arguments);
    if (arguments.is_dense)
        scatter(arguments);
    else
        multiply(arguments);
}

// A structure is checked in the first phase, and copied in the second: if it is wrong, as one that leads nowhere
// outside.
KERNEL(guard, GuardArguments)
{
    const i64 rows = arguments.rows, stored = arguments.stored;
    const bool is_wrong = arguments.phase && arguments.words[0];
    EACH(place, rows < stored ? stored : rows + 1) {
        if (place <= rows) {
            const i64 value = index_at(arguments, arguments.indptr, place);
            if (arguments.phase)
                put_index(arguments, arguments.safe_indptr, place, !is_wrong ? value : place == rows ? stored : 0);
            else if (value < 0 || value > stored || (place == 0 && value))
                arguments.words[0] = ENDS;
            else if (place && index_at(arguments, arguments.indptr, place - 1) > value)
                arguments.words[0] = ORDER;
            else if (place == rows && value < stored)
                arguments.words[0] = STORED;
        }
        if (place < stored) {
            const i64 column = index_at(arguments, arguments.indices, place);
            if (arguments.phase)
                put_index(arguments, arguments.safe_indices, place, is_wrong ? 0 : column);
            else if (column < 0 || column >= arguments.columns)
                arguments.words[0] = COLUMNS;
        }
    }
}

// All elements by a factor; where it is 0, whatever they are.
KERNEL(scale, ScaleArguments)
{
    Value factor = {arguments.real, arguments.imaginary};
    if (is_single(arguments.type))
        factor = {(float)factor.real, (float)factor.imaginary};
    const bool is_none = arguments.real == 0 && arguments.imaginary == 0;
    EACH(place, arguments.count)
        put_value(arguments, arguments.out, place,
                  is_none ? Value{0, 0} : value_at(arguments, arguments.out, place) * factor);
}
