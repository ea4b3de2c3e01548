// What the dense solvers need around the routines of cuSOLVER: status words, triangles, pivots and pointers.

#include "values.cuh"

// Of matrices: rows and columns as they lie in memory, by rows. What the rest means, each kernel says.
struct SolverArguments {
    char *a;
    char *b;
    char *c;
    int *status;
    i64 count, step, rows, columns;
    int type, mode;
};

enum Triangle { ALL, LOWER, UPPER };

struct Place {
    i64 matrix, row, column;
};

__device__ Place place_of(const SolverArguments &arguments, i64 index)
{
    const i64 line = index / arguments.columns, matrix = line / arguments.rows;
    return {matrix, line - matrix * arguments.rows, index - line * arguments.columns};
}

__device__ Value element(const SolverArguments &arguments, i64 index)
{
    return value_at(arguments, arguments.a, index);
}

// mode: the triangle that is looked at. Its matrix's status is -1 where an element is no finite number.
KERNEL(screen, SolverArguments)
{
    EACH(index, arguments.count) {
        const Place place = place_of(arguments, index);
        const bool is_seen = arguments.mode == ALL || place.row == place.column
            || (arguments.mode == LOWER) == (place.row > place.column);
        if (is_seen && !is_finite(element(arguments, index)))
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
            put_value(arguments, arguments.a, index, {0, 0});
        else if (arguments.mode != ALL && place.row == place.column)
            put_value(arguments, arguments.a, index, {element(arguments, index).real, 0});
    }
}

// mode: the triangle that is cleared, without the diagonal. With status words: of a matrix the first place on the
// diagonal that is no finite number, from 1, unless the routine has found one before it.
KERNEL(finish_triangle, SolverArguments)
{
    EACH(index, arguments.count) {
        const Place place = place_of(arguments, index);
        if (place.row == place.column) {
            if (arguments.status && !is_finite(element(arguments, index)))
                keep_first(arguments.status + place.matrix, (int)place.row + 1);
        } else if ((arguments.mode == LOWER) == (place.row > place.column)) {
            put_value(arguments, arguments.a, index, {0, 0});
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
               && !is_zero(element(arguments, (matrix * arguments.rows + pivot) * arguments.columns + pivot)))
            pivot++;
        *status = pivot < most ? (int)pivot + 1 : 0;
    }
}

// LU factors with their pivots in c, from 1, of `mode` bytes: of each matrix the determinant, its sign and the
// logarithm of its absolute value, as complex numbers of b. A status above 0 says that a pivot is zero.
KERNEL(determinants, SolverArguments)
{
    EACH(matrix, arguments.count) {
        Value sign = {1, 0};
        double size = 0;
        for (i64 row = 0; row < arguments.rows; row++) {
            const i64 place = matrix * arguments.rows + row;
            Value unit = element(arguments, place * arguments.columns + row);
            const double length = hypot(unit.real, unit.imaginary);
            if (is_complex(arguments.type))
                unit = {unit.real / length, unit.imaginary / length};
            else
                unit.real = unit.real < 0 ? -1 : 1;
            if (whole_at(arguments.c, place, arguments.mode == 8) != row + 1)
                unit = {-unit.real, -unit.imaginary};
            sign = sign * unit;
            size += log(length);
        }
        if (arguments.status[matrix] > 0) {
            sign = {0, 0};
            size = log(0.0);
        }
        double *out = (double *)arguments.b + 6 * matrix;
        const double whole = exp(size);
        out[0] = sign.real * whole;
        out[1] = sign.imaginary * whole;
        out[2] = sign.real;
        out[3] = sign.imaginary;
        out[4] = size;
    }
}

// Pivots of a as numbers of b, with `step` added. type: bytes of one in a, and 16 times those of one in b.
// With status words: of each row of `columns` the first pivot that is not below `rows`, from 1; it becomes the first.
KERNEL(move_pivots, SolverArguments)
{
    EACH(index, arguments.count) {
        i64 pivot = whole_at(arguments.a, index, (arguments.type & 15) == 8);
        if (arguments.status && (pivot < 0 || pivot >= arguments.rows)) {
            keep_first(arguments.status + index / arguments.columns, (int)(index % arguments.columns) + 1);
            pivot = 0;
        }
        put_whole(arguments.b, index, pivot + arguments.step, arguments.type >> 4 == 8);
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
        const double value = number_at(arguments.c, 2 * column + 1, arguments.type);
        Value joined = element(arguments, index);
        if (value > 0)
            joined.imaginary = element(arguments, index + step).real;
        else if (value < 0)
            joined = {element(arguments, index - step).real, -joined.real};
        put_number(arguments.b, 2 * index, joined.real, arguments.type);
        put_number(arguments.b, 2 * index + 1, joined.imaginary, arguments.type);
    }
}
