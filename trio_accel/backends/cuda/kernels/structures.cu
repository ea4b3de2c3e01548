// Sparse matrices that are made of others, by keys: a key is the place of a value, row by row. Keys are sorted by
// the vendor; what is before and behind that is here. No index leads outside: `guard` has looked at them.

#include "values.cuh"

// What a key is made of, and what is kept; as in `_sparse_makers.py`.
enum Kind { ROWS, COORDINATES, COLUMNS, FROM_BLOCKS, TO_BLOCKS, NOT_ZERO, BELOW, ABOVE };

struct MakeArguments {
    // Of the matrix that is read, and of a second one: of that come the values from number `first` on.
    const char *indptr, *indices, *data, *other_data;
    char *out_indptr, *out_indices, *out_data;
    // Keys, in order once they are sorted; those of groups of equal ones; and the numbers of the values by keys.
    u64 *keys, *kept;
    unsigned *order;
    // Of each item a count, and the sums of those before it: one more, which is that of all.
    unsigned *flags;
    u64 *places;
    // Rows that are taken.
    const i64 *list;
    // What was found wrong, or two for the number of values.
    int *words;
    // `count` items; `limit`: for how many values the result has room; `step`: keys of a row.
    i64 count, rows, columns, height, width, first, limit, step;
    int type, is_wide, kind;
};

// The first number from `low` to below `high` for which something is not so any more; or `high`.
template <typename Test> __device__ i64 search(i64 low, i64 high, const Test &is_before)
{
    while (low < high) {
        const i64 middle = (low + high) / 2;
        if (is_before(middle))
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

// The line of a matrix, of so many, that a value belongs to.
__device__ i64 line_of(const MakeArguments &arguments, const char *indptr, i64 lines, i64 place)
{
    return search(0, lines - 1, [&](i64 line) { return index_at(arguments, indptr, line + 1) <= place; });
}

__device__ bool is_outside(const MakeArguments &arguments, i64 index, i64 limit, i64 item, int word)
{
    if (index >= 0 && index < limit)
        return false;
    keep_first(arguments.words + word, item + 1);
    return true;
}

__device__ i64 key_of(const MakeArguments &arguments, i64 item)
{
    const i64 columns = arguments.columns, height = arguments.height, width = arguments.width;
    if (arguments.kind == FROM_BLOCKS) {
        const i64 block = item / (height * width), within = item % (height * width);
        const i64 row = line_of(arguments, arguments.indptr, arguments.rows / height, block) * height;
        return (row + within / width) * columns + index_at(arguments, arguments.indices, block) * width
            + within % width;
    }
    const i64 column = index_at(arguments, arguments.indices, item);
    if (arguments.kind == COLUMNS)
        return column;
    if (arguments.kind == COORDINATES) {
        const i64 row = index_at(arguments, arguments.indptr, item);
        if (is_outside(arguments, row, arguments.rows, item, 0) | is_outside(arguments, column, columns, item, 1))
            return 0;
        return row * columns + column;
    }
    const i64 row = line_of(arguments, arguments.indptr, arguments.rows, item);
    if (arguments.kind == TO_BLOCKS)
        return row / height * (columns / width) + column / width;
    return row * columns + column;
}

KERNEL(make_keys, MakeArguments)
{
    EACH(item, arguments.count) {
        arguments.keys[arguments.first + item] = (u64)key_of(arguments, item);
        arguments.order[arguments.first + item] = (unsigned)(arguments.first + item);
    }
}

// The indices that were found wrong, as 64-bit numbers behind two words that tell where they are.
KERNEL(tell_outside, MakeArguments)
{
    i64 *const told = (i64 *)(arguments.words + 2);
    EACH(word, 2) {
        const i64 item = arguments.words[word] - 1;
        if (item >= 0)
            told[word] = arguments.list ? arguments.list[item]
                                        : index_at(arguments, word ? arguments.indices : arguments.indptr, item);
    }
}

// The first of equal keys.
KERNEL(mark_heads, MakeArguments)
{
    EACH(item, arguments.count)
        arguments.flags[item] = item == 0 || arguments.keys[item] != arguments.keys[item - 1];
}

__device__ Value nth_value(const MakeArguments &arguments, i64 number)
{
    return number < arguments.first ? value_at(arguments, arguments.data, number)
                                    : value_at(arguments, arguments.other_data, number - arguments.first);
}

// Values of one key are added up, in their order.
KERNEL(sum_groups, MakeArguments)
{
    EACH(item, arguments.count) {
        const i64 group = (i64)arguments.places[item];
        if (!arguments.flags[item] || group >= arguments.limit)
            continue;
        Value sum = nth_value(arguments, arguments.order[item]);
        for (i64 other = item + 1; other < arguments.count && !arguments.flags[other]; other++)
            sum = sum + nth_value(arguments, arguments.order[other]);
        put_value(arguments, arguments.out_data, group, sum);
        arguments.kept[group] = arguments.keys[item];
        put_index(arguments, arguments.out_indices, group, (i64)(arguments.keys[item] % (u64)arguments.step));
    }
}

// The values of a block are added to it: it is all zeros before.
KERNEL(fill_blocks, MakeArguments)
{
    const i64 height = arguments.height, width = arguments.width;
    EACH(item, arguments.count) {
        const i64 block = (i64)arguments.places[item];
        if (!arguments.flags[item] || block >= arguments.limit)
            continue;
        arguments.kept[block] = arguments.keys[item];
        put_index(arguments, arguments.out_indices, block, (i64)(arguments.keys[item] % (u64)arguments.step));
        for (i64 other = item; other < arguments.count && (other == item || !arguments.flags[other]); other++) {
            const i64 number = arguments.order[other];
            const i64 row = line_of(arguments, arguments.indptr, arguments.rows, number);
            const i64 column = index_at(arguments, arguments.indices, number);
            const i64 place = (block * height + row % height) * width + column % width;
            const Value old = value_at(arguments, arguments.out_data, place);
            put_value(arguments, arguments.out_data, place, old + value_at(arguments, arguments.data, number));
        }
    }
}

// Values brought into the order of the columns, with their rows.
KERNEL(move_columns, MakeArguments)
{
    EACH(item, arguments.count) {
        const i64 number = arguments.order[item];
        put_index(arguments, arguments.out_indices, item,
                  line_of(arguments, arguments.indptr, arguments.rows, number));
        put_value(arguments, arguments.out_data, item, value_at(arguments, arguments.data, number));
    }
}

__device__ void put_count(const MakeArguments &arguments, i64 count)
{
    if (blockIdx.x == 0 && threadIdx.x == 0 && arguments.words)
        *(i64 *)arguments.words = count;
}

// Where each of `rows` lines begins among the keys in order.
KERNEL(point_keys, MakeArguments)
{
    i64 all = arguments.places ? (i64)arguments.places[arguments.count] : arguments.count;
    // Where there is no room for all, the operation fails.
    put_count(arguments, all);
    all = all < arguments.limit ? all : arguments.limit;
    EACH(line, arguments.rows + 1) {
        const u64 wanted = (u64)(line * arguments.step);
        const i64 first = search(0, all, [&](i64 item) { return arguments.kept[item] < wanted; });
        put_index(arguments, arguments.out_indptr, line, line == arguments.rows ? all : first);
    }
}

KERNEL(put_total, MakeArguments) { put_count(arguments, (i64)arguments.places[arguments.count]); }

KERNEL(mark_values, MakeArguments)
{
    EACH(item, arguments.count) {
        bool is_kept;
        if (arguments.kind == NOT_ZERO) {
            is_kept = !is_zero(value_at(arguments, arguments.data, item));
        } else {
            const i64 row = line_of(arguments, arguments.indptr, arguments.rows, item);
            const i64 diagonal = index_at(arguments, arguments.indices, item) - row;
            is_kept = arguments.kind == BELOW ? diagonal <= arguments.first : diagonal >= arguments.first;
        }
        arguments.flags[item] = is_kept;
    }
}

KERNEL(move_values, MakeArguments)
{
    put_count(arguments, (i64)arguments.places[arguments.count]);
    EACH(item, arguments.count) {
        const i64 place = (i64)arguments.places[item];
        if (!arguments.flags[item] || place >= arguments.limit)
            continue;
        put_index(arguments, arguments.out_indices, place, index_at(arguments, arguments.indices, item));
        put_value(arguments, arguments.out_data, place, value_at(arguments, arguments.data, item));
    }
    EACH(line, arguments.rows + 1) {
        const i64 begin = index_at(arguments, arguments.indptr, line);
        put_index(arguments, arguments.out_indptr, line, (i64)arguments.places[begin]);
    }
}

// How many values each row of a list has.
KERNEL(count_rows, MakeArguments)
{
    EACH(item, arguments.count) {
        const i64 row = arguments.list[item];
        unsigned length = 0;
        if (!is_outside(arguments, row, arguments.rows, item, 0))
            length = (unsigned)(index_at(arguments, arguments.indptr, row + 1)
                                - index_at(arguments, arguments.indptr, row));
        arguments.flags[item] = length;
    }
}

KERNEL(take_values, MakeArguments)
{
    i64 all = (i64)arguments.places[arguments.count];
    // Where there is no room for all, the operation fails.
    put_count(arguments, all);
    all = all < arguments.limit ? all : arguments.limit;
    EACH(place, all) {
        const i64 item =
            search(0, arguments.count - 1, [&](i64 one) { return (i64)arguments.places[one + 1] <= place; });
        const i64 source = index_at(arguments, arguments.indptr, arguments.list[item]) + place
            - (i64)arguments.places[item];
        put_index(arguments, arguments.out_indices, place, index_at(arguments, arguments.indices, source));
        put_value(arguments, arguments.out_data, place, value_at(arguments, arguments.data, source));
    }
    EACH(line, arguments.count + 1) {
        const i64 begin = (i64)arguments.places[line];
        put_index(arguments, arguments.out_indptr, line, begin < all ? begin : all);
    }
}

// Before a matrix is solved with, of six words: the first row whose columns do not ascend; that whose diagonal is not
// stored, zero, or of factors (`kind`) no finite number, and with 2 that no factor of Cholesky's has; whether a value is
// no finite number; and, behind two words of `measure` and `compare`, whether an element of the diagonal is stored twice.
// The vendor takes the root of a pivot below zero as if it was above. So the squares of a row of the factor are compared
// with the diagonal of the matrix, of which `out_data` has the values: they add up to it.
KERNEL(inspect, MakeArguments)
{
    const double few = ldexp(1.0, 2 - (is_single(arguments.type) ? 23 : 52));
    EACH(row, arguments.rows) {
        i64 before = -1;
        int found = 0;
        Value diagonal = {0, 0};
        double squares = 0, original = 0;
        const i64 begin = index_at(arguments, arguments.indptr, row);
        const i64 end = index_at(arguments, arguments.indptr, row + 1);
        for (i64 item = begin; item < end; item++) {
            const i64 column = index_at(arguments, arguments.indices, item);
            const Value value = value_at(arguments, arguments.data, item);
            if (column <= before)
                keep_first(arguments.words, row + 1);
            if (column == row) {
                diagonal = diagonal + value;
                if (++found > 1)
                    arguments.words[5] = 1;
                if (arguments.kind > 1)
                    original = value_at(arguments, arguments.out_data, item).real;
            }
            if (column <= row)
                squares += value.real * value.real + value.imaginary * value.imaginary;
            if (!is_finite(value))
                arguments.words[2] = 1;
            before = column;
        }
        if (is_zero(diagonal) || (arguments.kind && !is_finite(diagonal))
            || (arguments.kind > 1 && !(diagonal.real > 0 && fabs(squares - original) <= few * (end - begin + 8) * original)))
            keep_first(arguments.words + 1, row + 1);
    }
}

// Where the value of a row and a column is stored, whose columns ascend; -1 if it is not.
__device__ i64 find_value(const MakeArguments &arguments, i64 row, i64 column)
{
    const i64 begin = index_at(arguments, arguments.indptr, row), end = index_at(arguments, arguments.indptr, row + 1);
    const i64 place = search(begin, end, [&](i64 item) {
        return index_at(arguments, arguments.indices, item) < column;
    });
    return place < end && index_at(arguments, arguments.indices, place) == column ? place : -1;
}

enum { EXPONENTS = 4096 };

// The largest exponent of two of all values goes to the fourth word.
KERNEL(measure, MakeArguments)
{
    EACH(item, arguments.count) {
        const Value value = value_at(arguments, arguments.data, item);
        const double size = hypot(value.real, value.imaginary);
        if (size == 0)
            continue;
        const int number = ilogb(size) + EXPONENTS;
        int old = arguments.words[3];
        while (old < number) {
            const int seen = atomicCAS(arguments.words + 3, old, number);
            if (seen == old)
                break;
            old = seen;
        }
    }
}

// Whether a value differs from that of the conjugate transpose by more than roundings: the fifth word.
KERNEL(compare, MakeArguments)
{
    const double most = ldexp(1.0, arguments.words[3] - EXPONENTS + 5 - (is_single(arguments.type) ? 23 : 52));
    EACH(item, arguments.count) {
        const i64 row = line_of(arguments, arguments.indptr, arguments.rows, item);
        const i64 other = find_value(arguments, index_at(arguments, arguments.indices, item), row);
        const Value a = value_at(arguments, arguments.data, item);
        Value b = {0, 0};
        if (other >= 0)
            b = value_at(arguments, arguments.data, other);
        if (!(hypot(a.real - b.real, a.imaginary + b.imaginary) <= most))
            arguments.words[4] = 1;
    }
}

// The upper triangle of factors becomes the conjugate transpose of the lower one.
KERNEL(mirror, MakeArguments)
{
    EACH(item, arguments.count) {
        const i64 row = line_of(arguments, arguments.indptr, arguments.rows, item);
        const i64 column = index_at(arguments, arguments.indices, item);
        const i64 other = column > row ? find_value(arguments, column, row) : -1;
        if (other < 0)
            continue;
        const Value value = value_at(arguments, arguments.out_data, other);
        put_value(arguments, arguments.out_data, item, {value.real, -value.imaginary});
    }
}
