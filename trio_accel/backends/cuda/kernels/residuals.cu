// How well the solutions of a sparse system solve it.

enum Type { FLOAT32, FLOAT64, COMPLEX64, COMPLEX128 };

struct ResidualArguments {
    const char *indptr, *indices, *data;
    // Right-hand sides and solutions, one column behind the other.
    const char *b, *x;
    // For each side four: the largest size in b - A x, in x and in b, and the largest sum of sizes of a row of A. They
    // are the bits of doubles, which are in the order of the numbers; those of a NaN come last.
    u64 *sizes;
    i64 rows, sides;
    int type, is_wide;
};

struct Value {
    double real, imaginary;
};

__device__ Value value_at(const ResidualArguments &arguments, const char *array, i64 place)
{
    switch (arguments.type) {
    case FLOAT32: return {((const float *)array)[place], 0};
    case FLOAT64: return {((const double *)array)[place], 0};
    case COMPLEX64: return {((const float *)array)[2 * place], ((const float *)array)[2 * place + 1]};
    default: return {((const double *)array)[2 * place], ((const double *)array)[2 * place + 1]};
    }
}

__device__ i64 index_at(const ResidualArguments &arguments, const char *array, i64 place)
{
    return arguments.is_wide ? ((const i64 *)array)[place] : (i64)((const int *)array)[place];
}

__device__ double size_of(Value value) { return fabs(hypot(value.real, value.imaginary)); }

__device__ void keep_largest(u64 *word, double size)
{
    const u64 bits = (u64)__double_as_longlong(size);
    // Nearly all are smaller than one that was there before: they need no turn at the word.
    if (bits > *(volatile u64 *)word)
        atomicMax(word, bits);
}

KERNEL(measure_residuals, ResidualArguments)
{
    EACH(item, arguments.rows * arguments.sides) {
        const i64 row = item % arguments.rows, side = item / arguments.rows, begin = side * arguments.rows;
        const Value b = value_at(arguments, arguments.b, item);
        Value left = b;
        double sum = 0;
        const i64 end = index_at(arguments, arguments.indptr, row + 1);
        for (i64 place = index_at(arguments, arguments.indptr, row); place < end; place++) {
            const Value a = value_at(arguments, arguments.data, place);
            const Value x = value_at(arguments, arguments.x, begin + index_at(arguments, arguments.indices, place));
            left.real -= a.real * x.real - a.imaginary * x.imaginary;
            left.imaginary -= a.real * x.imaginary + a.imaginary * x.real;
            sum += size_of(a);
        }
        u64 *const sizes = arguments.sizes + 4 * side;
        keep_largest(sizes, size_of(left));
        keep_largest(sizes + 1, size_of(value_at(arguments, arguments.x, item)));
        keep_largest(sizes + 2, size_of(b));
        keep_largest(sizes + 3, sum);
    }
}
