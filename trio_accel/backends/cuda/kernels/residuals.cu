// Residuals of sparse systems: how well solutions solve them, and the step that makes one least.

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

struct LeastArguments {
    // Row by row, the parts of each product along the vectors before; what was left of it; the norm of the residual,
    // and how many steps were made before.
    const char *h, *sizes, *size, *step_count;
    char *y, *count;
    // Room for the columns of the triangle, the target, and the rotations.
    char *room;
    double tolerance;
    i64 steps;
    int type;
};

struct Value {
    double real, imaginary;
};

__device__ Value value_of(int type, const char *array, i64 place)
{
    switch (type) {
    case FLOAT32: return {((const float *)array)[place], 0};
    case FLOAT64: return {((const double *)array)[place], 0};
    case COMPLEX64: return {((const float *)array)[2 * place], ((const float *)array)[2 * place + 1]};
    default: return {((const double *)array)[2 * place], ((const double *)array)[2 * place + 1]};
    }
}

__device__ Value value_at(const ResidualArguments &arguments, const char *array, i64 place)
{
    return value_of(arguments.type, array, place);
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

__device__ void put_value(int type, char *array, i64 place, Value value)
{
    switch (type) {
    case FLOAT32: ((float *)array)[place] = (float)value.real; break;
    case FLOAT64: ((double *)array)[place] = value.real; break;
    case COMPLEX64:
        ((float *)array)[2 * place] = (float)value.real;
        ((float *)array)[2 * place + 1] = (float)value.imaginary;
        break;
    default:
        ((double *)array)[2 * place] = value.real;
        ((double *)array)[2 * place + 1] = value.imaginary;
    }
}

__device__ Value plus(Value a, Value b) { return {a.real + b.real, a.imaginary + b.imaginary}; }
__device__ Value times(double a, Value b) { return {a * b.real, a * b.imaginary}; }
__device__ Value times(Value a, Value b)
{
    return {a.real * b.real - a.imaginary * b.imaginary, a.real * b.imaginary + a.imaginary * b.real};
}

// A rotation of two rows: (cosine, sine; -conj(sine), cosine).
__device__ void rotate(Value *first, Value *second, double cosine, Value sine)
{
    const Value a = *first, b = *second;
    *first = plus(times(cosine, a), times(sine, b));
    *second = plus(times(Value{-sine.real, sine.imaginary}, a), times(cosine, b));
}

// Givens' rotations bring the matrix of Arnoldi's steps to triangular form, column by column, until what is left of the
// target is half of the tolerance, or nothing was left of a product. One thread does it: each rotation needs those
// before, and there are few.
KERNEL(least_residual, LeastArguments)
{
    if (blockIdx.x || threadIdx.x)
        return;
    const i64 steps = arguments.steps;
    const int type = arguments.type, real = type == FLOAT32 || type == COMPLEX64 ? FLOAT32 : FLOAT64;
    // Column by column.
    Value *const triangle = (Value *)arguments.room, *const target = triangle + steps * steps;
    Value *const sines = target + steps + 1;
    double *const cosines = (double *)(sines + steps);
    double largest = 0;
    bool is_finite = true;
    for (i64 step = 0; step < steps; step++)
        for (i64 place = 0; place <= step + 1; place++) {
            const double size = place > step ? value_of(real, arguments.sizes, step).real
                                             : size_of(value_of(type, arguments.h, step * steps + place));
            is_finite = is_finite && size - size == 0;
            largest = size > largest ? size : largest;
        }
    const double limit = largest * ldexp(1.0, real == FLOAT32 ? -23 : -52);
    i64 count = steps;
    target[0] = {value_of(real, arguments.size, 0).real, 0};
    for (i64 step = 0; is_finite && step < steps; step++) {
        Value *const column = triangle + step * steps;
        const double size = value_of(real, arguments.sizes, step).real;
        Value below = {size, 0};
        for (i64 place = 0; place <= step; place++)
            column[place] = value_of(type, arguments.h, step * steps + place);
        for (i64 place = 0; place < step; place++)
            rotate(column + place, column + place + 1, cosines[place], sines[place]);
        const double own = size_of(column[step]), both = hypot(own, size);
        cosines[step] = both == 0 ? 1 : own / both;
        sines[step] = {own == 0 ? double(both != 0) : column[step].real / own * (size / both),
                       own == 0 ? 0 : column[step].imaginary / own * (size / both)};
        rotate(column + step, &below, cosines[step], sines[step]);
        target[step + 1] = {0, 0};
        rotate(target + step, target + step + 1, cosines[step], sines[step]);
        if (size_of(target[step + 1]) <= arguments.tolerance / 2 || size <= limit) {
            count = step + 1;
            break;
        }
    }
    for (i64 step = steps - 1; step >= 0; step--) {
        Value y = {0, 0};
        if (!is_finite)
            y.real = nan("");
        else if (step < count) {
            // The triangle is used up from its end: the target holds what is left.
            const Value own = triangle[step * steps + step];
            const double size = size_of(own);
            // A direction in which nothing changes does not count.
            if (size > limit)
                y = times(1 / size, times(times(1 / size, Value{own.real, -own.imaginary}), target[step]));
            for (i64 place = 0; place < step; place++)
                target[place] = plus(target[place], times(Value{-y.real, -y.imaginary}, triangle[step * steps + place]));
        }
        put_value(type, arguments.y, step, y);
    }
    put_value(real, arguments.count, 0, {value_of(real, arguments.step_count, 0).real + (double)count, 0});
}
