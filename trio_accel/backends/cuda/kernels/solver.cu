// What the dense solvers need around the routines of cuSOLVER: status words, triangles, pivots and pointers.

// Of matrices: rows and columns as they lie in memory, by rows. What the rest means, each kernel says.
struct SolverArguments {
    char *a;
    char *b;
    char *c;
    int *status;
    i64 count, step, rows, columns;
    int type, mode;
};

enum Type { FLOAT32, FLOAT64, COMPLEX64, COMPLEX128 };
enum Triangle { ALL, LOWER, UPPER };

struct Place {
    i64 matrix, row, column;
};

__device__ Place place_of(const SolverArguments &arguments, i64 index)
{
    const i64 line = index / arguments.columns, matrix = line / arguments.rows;
    return {matrix, line - matrix * arguments.rows, index - line * arguments.columns};
}

// An element is one real number, or two if it is complex; a double holds all of them as they are.
__device__ int parts_of(const SolverArguments &arguments)
{
    return arguments.type == COMPLEX64 || arguments.type == COMPLEX128 ? 2 : 1;
}

__device__ bool is_single(const SolverArguments &arguments)
{
    return arguments.type == FLOAT32 || arguments.type == COMPLEX64;
}

__device__ double part_of(const SolverArguments &arguments, i64 index, int part)
{
    const i64 place = parts_of(arguments) * index + part;
    return is_single(arguments) ? ((const float *)arguments.a)[place] : ((const double *)arguments.a)[place];
}

__device__ bool is_finite(const SolverArguments &arguments, i64 index)
{
    bool is_finite = true;
    for (int part = 0; part < parts_of(arguments); part++)
        is_finite &= part_of(arguments, index, part) - part_of(arguments, index, part) == 0;
    return is_finite;
}

// From a part on: the second one is the imaginary part, if there is any.
__device__ void clear(const SolverArguments &arguments, i64 index, int first = 0)
{
    const int parts = parts_of(arguments);
    for (i64 place = parts * index + first; place < parts * (index + 1); place++)
        if (is_single(arguments))
            ((float *)arguments.a)[place] = 0;
        else
            ((double *)arguments.a)[place] = 0;
}

// The smallest number that is not zero stays.
__device__ void keep_first(int *status, int number)
{
    int old = *status;
    while (old == 0 || old > number) {
        const int seen = atomicCAS(status, old, number);
        if (seen == old)
            return;
        old = seen;
    }
}

// mode: the triangle that is looked at. Its matrix's status is -1 where an element is no finite number.
KERNEL(screen, SolverArguments)
{
    EACH(index, arguments.count) {
        const Place place = place_of(arguments, index);
        const bool is_seen = arguments.mode == ALL || place.row == place.column
            || (arguments.mode == LOWER) == (place.row > place.column);
        if (is_seen && !is_finite(arguments, index))
            arguments.status[place.matrix] = -1;
    }
}

// Matrices with a status become zero: the iterations may never end with what is no number. With a triangle, the
// diagonal is made real.
KERNEL(blank, SolverArguments)
{
    EACH(index, arguments.count) {
        const Place place = place_of(arguments, index);
        if (arguments.status[place.matrix])
            clear(arguments, index);
        else if (arguments.mode != ALL && place.row == place.column)
            clear(arguments, index, 1);
    }
}

// mode: the triangle that is cleared, without the diagonal. With status words: of a matrix the first place on the
// diagonal that is no finite number, from 1, unless the routine has found one before it.
KERNEL(finish_triangle, SolverArguments)
{
    EACH(index, arguments.count) {
        const Place place = place_of(arguments, index);
        if (place.row == place.column) {
            if (arguments.status && !is_finite(arguments, index))
                keep_first(arguments.status + place.matrix, (int)place.row + 1);
        } else if ((arguments.mode == LOWER) == (place.row > place.column)) {
            clear(arguments, index);
        }
    }
}

// b: what a routine says of each matrix; it counts where there is no status yet.
KERNEL(merge, SolverArguments)
{
    EACH(index, arguments.count)
        if (!arguments.status[index])
            arguments.status[index] = ((const int *)arguments.b)[index];
}

__device__ bool is_zero(const SolverArguments &arguments, i64 index)
{
    return part_of(arguments, index, 0) == 0 && (parts_of(arguments) == 1 || part_of(arguments, index, 1) == 0);
}

// LU factors, one status word each: of the pivots from the one on that the routine has named, the first that is
// zero. The vendor takes some for zero that are no number.
KERNEL(confirm_pivots, SolverArguments)
{
    EACH(matrix, arguments.count) {
        int *status = arguments.status + matrix;
        if (*status <= 0)
            continue;
        const i64 most = arguments.rows < arguments.columns ? arguments.rows : arguments.columns;
        i64 pivot = *status - 1;
        while (pivot < most
               && !is_zero(arguments, (matrix * arguments.rows + pivot) * arguments.columns + pivot))
            pivot++;
        *status = pivot < most ? (int)pivot + 1 : 0;
    }
}

// LU factors with their pivots in c, from 1, of `mode` bytes: of each matrix the determinant, its sign and the
// logarithm of its absolute value, as complex numbers of b. A status above 0 says that a pivot is zero.
KERNEL(determinants, SolverArguments)
{
    EACH(matrix, arguments.count) {
        double real = 1, imaginary = 0, size = 0;
        for (i64 row = 0; row < arguments.rows; row++) {
            const i64 index = (matrix * arguments.rows + row) * arguments.columns + row;
            const i64 place = matrix * arguments.rows + row;
            const i64 pivot = arguments.mode == 8 ? ((const i64 *)arguments.c)[place] : ((const int *)arguments.c)[place];
            double x = part_of(arguments, index, 0), y = 0, length = fabs(x);
            if (parts_of(arguments) == 1) {
                x = x < 0 ? -1 : 1;
            } else {
                y = part_of(arguments, index, 1);
                length = hypot(x, y);
                x /= length;
                y /= length;
            }
            if (pivot != row + 1)
                x = -x, y = -y;
            const double old = real;
            real = old * x - imaginary * y;
            imaginary = old * y + imaginary * x;
            size += log(length);
        }
        if (arguments.status[matrix] > 0) {
            real = imaginary = 0;
            size = log(0.0);
        }
        double *out = (double *)arguments.b + 6 * matrix;
        const double whole = exp(size);
        out[0] = real * whole;
        out[1] = imaginary * whole;
        out[2] = real;
        out[3] = imaginary;
        out[4] = size;
    }
}

// Pivots of a as numbers of b, with `step` added. type: bytes of one in a, and 16 times those of one in b.
// With status words: of each row of `columns` the first pivot that is not below `rows`, from 1; it becomes the first.
KERNEL(move_pivots, SolverArguments)
{
    EACH(index, arguments.count) {
        i64 pivot = (arguments.type & 15) == 8 ? ((const i64 *)arguments.a)[index] : ((const int *)arguments.a)[index];
        if (arguments.status && (pivot < 0 || pivot >= arguments.rows)) {
            keep_first(arguments.status + index / arguments.columns, (int)(index % arguments.columns) + 1);
            pivot = 0;
        }
        pivot += arguments.step;
        if (arguments.type >> 4 == 8)
            ((i64 *)arguments.b)[index] = pivot;
        else
            ((int *)arguments.b)[index] = (int)pivot;
    }
}

// The addresses of matrices from a on, `step` bytes apart, in b.
KERNEL(list_matrices, SolverArguments)
{
    EACH(index, arguments.count) ((char **)arguments.b)[index] = arguments.a + index * arguments.step;
}

// Real vectors by columns, as LAPACK keeps those of complex eigenvalues: of two conjugate ones the first column is the
// real part of both vectors, and the second the imaginary part. c: the eigenvalues. b gets complex vectors.
KERNEL(join_pairs, SolverArguments)
{
    EACH(index, arguments.count) {
        const i64 column = index / arguments.columns, step = arguments.columns;
        const double value
            = is_single(arguments) ? ((const float *)arguments.c)[2 * column + 1] : ((const double *)arguments.c)[2 * column + 1];
        double real = part_of(arguments, index, 0), imaginary = 0;
        if (value > 0) {
            imaginary = part_of(arguments, index + step, 0);
        } else if (value < 0) {
            imaginary = -real;
            real = part_of(arguments, index - step, 0);
        }
        if (is_single(arguments)) {
            ((float *)arguments.b)[2 * index] = (float)real;
            ((float *)arguments.b)[2 * index + 1] = (float)imaginary;
        } else {
            ((double *)arguments.b)[2 * index] = real;
            ((double *)arguments.b)[2 * index + 1] = imaginary;
        }
    }
}
