// Order, groups, selections, counts and scans of arrays, behind the functions of expressions.
//
// One part of this file is compiled at a time, for certain types, which `primitives.py` writes before it:
// In, Out, Acc and others are classes that load and store elements, or their values.

#ifdef STAND_IN
#define SHARED
#define SYNC()
enum { WIDTH = 1 };
#else
#define SHARED __shared__
#define SYNC() __syncthreads()
enum { WIDTH = 256 };
#endif

// In steps of the grid.
#define EACH(index, count) \
    for (i64 index = (i64)blockIdx.x * blockDim.x + threadIdx.x; index < (count); index += (i64)gridDim.x * blockDim.x)

#ifdef SCANS
// Lines of `count` elements, `inner` apart. A line is scanned in parts of `length` elements by a block each. Each
// part begins with what `totals` has for it, if there are several.
struct Arguments {
    const char *x;
    char *out, *totals;
    i64 lines, count, inner, parts, length, initial;
};

FUNCTION Acc combine(Acc a, Acc b) { return COMBINE(a, b); }
#ifdef GROUPS
FUNCTION Acc taken(const Arguments &arguments, i64 place)
{
    const char *const at = arguments.x + place * IN_SIZE;
    return place == 0 || !f_equal(In::load(at), In::load(at - IN_SIZE));
}
#else
FUNCTION Acc taken(const Arguments &arguments, i64 place) { return TAKE(In::load(arguments.x + place * IN_SIZE)); }
#endif
FUNCTION void put(const Arguments &arguments, i64 place, Acc value)
{
    Out::store(arguments.out + place * OUT_SIZE, GIVE(value));
}

// Odd, so that threads that read so far apart find different banks of shared memory.
enum { ITEMS = 7, TILE = WIDTH * ITEMS };

// Scans the values of a tile; returns all combined, with what was carried here, if anything was: no number may stand
// for nothing. 1 + 0i changes an infinite product, and 0 a sum of -0.
FUNCTION Acc scan_tile(Acc *values, Acc *sums, Acc carry, bool is_carried)
{
    const int thread = BLOCK_THREAD;
    Acc own = values[thread * ITEMS];
    for (int k = 1; k < ITEMS; k++)
        own = combine(own, values[thread * ITEMS + k]);
    sums[thread] = own;
    SYNC();
    for (int distance = 1; distance < WIDTH; distance *= 2) {
        const Acc before = thread >= distance ? combine(sums[thread - distance], sums[thread]) : sums[thread];
        SYNC();
        sums[thread] = before;
        SYNC();
    }
    if (thread)
        carry = is_carried ? combine(carry, sums[thread - 1]) : sums[thread - 1];
    for (int k = 0; k < ITEMS; k++) {
        Acc &value = values[thread * ITEMS + k];
        value = carry = is_carried || thread || k ? combine(carry, value) : value;
    }
    SYNC();
    return values[TILE - 1];
}

KERNEL(total, Arguments)
{
    if (IS_IDLE)
        return;
    SHARED Acc sums[WIDTH];
    const int thread = BLOCK_THREAD;
    for (i64 item = blockIdx.x; item < arguments.lines * arguments.parts; item += gridDim.x) {
        const i64 line = item / arguments.parts, first = item % arguments.parts * arguments.length;
        const i64 end = first + arguments.length, last = end < arguments.count ? end : arguments.count;
        const i64 start = line * arguments.count;
        // All parts have an element for each thread, but the last one, whose total nothing is combined with.
        Acc found = first + thread < last ? taken(arguments, start + first + thread) : IDENTITY;
        for (i64 i = first + thread + WIDTH; i < last; i += WIDTH)
            found = combine(found, taken(arguments, start + i));
        sums[thread] = found;
        SYNC();
        for (int half = WIDTH / 2; half; half /= 2) {
            if (thread < half)
                sums[thread] = combine(sums[thread], sums[thread + half]);
            SYNC();
        }
        if (thread == 0)
            ((Acc *)arguments.totals)[item] = sums[0];
        SYNC();
    }
}

// What is before each part.
KERNEL(carry, Arguments)
{
    if (IS_IDLE)
        return;
    SHARED Acc values[TILE], sums[WIDTH];
    const int thread = BLOCK_THREAD;
    for (i64 line = blockIdx.x; line < arguments.lines; line += gridDim.x) {
        Acc *const totals = (Acc *)arguments.totals + line * arguments.parts;
        Acc carried = IDENTITY;
        for (i64 tile = 0; tile < arguments.parts; tile += TILE) {
            for (int k = thread; k < TILE; k += WIDTH)
                values[k] = tile + k < arguments.parts ? totals[tile + k] : IDENTITY;
            SYNC();
            const Acc before = carried;
            carried = scan_tile(values, sums, carried, tile > 0);
            for (int k = thread; k < TILE && tile + k < arguments.parts; k += WIDTH)
                totals[tile + k] = k ? values[k - 1] : before;
            SYNC();
        }
    }
}

KERNEL(scan, Arguments)
{
    if (IS_IDLE)
        return;
    SHARED Acc values[TILE], sums[WIDTH];
    const int thread = BLOCK_THREAD;
    for (i64 item = blockIdx.x; item < arguments.lines * arguments.parts; item += gridDim.x) {
        const i64 line = item / arguments.parts, first = item % arguments.parts * arguments.length;
        const i64 end = first + arguments.length, last = end < arguments.count ? end : arguments.count;
        const i64 in = line * arguments.count, out = line * (arguments.count + arguments.initial);
        if (arguments.initial && first == 0 && thread == 0)
            put(arguments, out, IDENTITY);
        Acc carried = arguments.parts > 1 ? ((const Acc *)arguments.totals)[item] : IDENTITY;
        for (i64 tile = first; tile < last; tile += TILE) {
            for (int k = thread; k < TILE; k += WIDTH)
                values[k] = tile + k < last ? taken(arguments, in + tile + k) : IDENTITY;
            SYNC();
            carried = scan_tile(values, sums, carried, tile > 0);
            for (int k = thread; k < TILE && tile + k < last; k += WIDTH)
                put(arguments, out + arguments.initial + tile + k, values[k]);
            SYNC();
        }
    }
}

// A line for a thread.
KERNEL(scan_lines, Arguments)
{
    EACH(line, arguments.lines) {
        const i64 outer = line / arguments.inner, at = line % arguments.inner;
        i64 in = outer * arguments.count * arguments.inner + at;
        i64 out = outer * (arguments.count + arguments.initial) * arguments.inner + at;
        Acc running = IDENTITY;
        if (arguments.initial) {
            put(arguments, out, running);
            out += arguments.inner;
        }
        for (i64 i = 0; i < arguments.count; i++, in += arguments.inner, out += arguments.inner) {
            running = i ? combine(running, taken(arguments, in)) : taken(arguments, in);
            put(arguments, out, running);
        }
    }
}
#endif

#ifdef SORTS
// Rows of `count` elements. Key is an unsigned number in the order of the elements, with the number of the row
// above it where both fit.
struct Arguments {
    const char *x;
    char *keys, *order, *values, *indices;
    // Of each row, `kept` elements are in order: all, or so many as its parts give with `lead`.
    i64 rows, count, wanted, kept, parts;
};

FUNCTION Key key_of(Bits bits)
{
    const Bits sign = (Bits)((Bits)1 << (sizeof(Bits) * 8 - 1));
    Key key = bits;
#if IS_FLOAT
    const Bits size = (Bits)(bits & (Bits)~sign);
    if (size > INFINITE)
        key = (Bits)~(Bits)0;
    else if (!size)
        key = sign;
    else
        key = bits & sign ? (Bits)~bits : (Bits)(bits | sign);
#elif IS_SIGNED
    key = (Bits)(bits ^ sign);
#endif
#if DESCENDS
    key = (Bits)~(Bits)key;
#endif
    return key;
}

KERNEL(encode, Arguments)
{
    EACH(i, arguments.rows * arguments.count) {
        Key key = key_of(((const Bits *)arguments.x)[i]);
#if HAS_ROW
        key |= (Key)(i / arguments.count) << (sizeof(Bits) * 8);
#endif
        ((Key *)arguments.keys)[i] = key;
        ((Number *)arguments.order)[i] = (Number)i;
    }
}

// Each row is cut into parts, and each part gives its first elements, in the order of their places: a block finds the
// key of the last one that is wanted, eight bits at a time.
KERNEL(lead, Arguments)
{
    if (IS_IDLE)
        return;
    SHARED unsigned counts[256];
    SHARED int below[WIDTH], equal[WIDTH];
    const int thread = BLOCK_THREAD;
    for (i64 item = blockIdx.x; item < arguments.rows * arguments.parts; item += gridDim.x) {
        const i64 row = item / arguments.parts, part = item % arguments.parts;
        const i64 first = part * arguments.count / arguments.parts, last = (part + 1) * arguments.count / arguments.parts;
        const Bits *const x = (const Bits *)arguments.x + row * arguments.count;
        Bits found = 0;
        // How many of those are wanted that have the bits of it that are known.
        int rest = (int)arguments.wanted;
        for (int shift = (int)sizeof(Bits) * 8 - 8; shift >= 0; shift -= 8) {
            for (int k = thread; k < 256; k += WIDTH)
                counts[k] = 0;
            SYNC();
            const Bits known = shift + 8 < (int)sizeof(Bits) * 8 ? (Bits)((Bits)~(Bits)0 << (shift + 8)) : 0;
            for (i64 i = first + thread; i < last; i += WIDTH) {
                const Bits key = (Bits)key_of(x[i]);
                if (!((key ^ found) & known))
                    atomicAdd(counts + (key >> shift & 255), 1u);
            }
            SYNC();
            int digit = 0;
            while ((int)counts[digit] < rest)
                rest -= (int)counts[digit++];
            found |= (Bits)((Bits)digit << shift);
            SYNC();
        }
        // A thread takes neighbours, and begins behind what the threads before it have.
        const i64 span = (last - first + WIDTH - 1) / WIDTH, begin = first + thread * span;
        const i64 end = begin + span < last ? begin + span : last;
        int less = 0, same = 0;
        for (i64 i = begin; i < end; i++) {
            const Bits key = (Bits)key_of(x[i]);
            less += key < found;
            same += key == found;
        }
        below[thread] = less;
        equal[thread] = same;
        SYNC();
        for (int distance = 1; distance < WIDTH; distance *= 2) {
            const int more_below = thread >= distance ? below[thread - distance] : 0;
            const int more_equal = thread >= distance ? equal[thread - distance] : 0;
            SYNC();
            below[thread] += more_below;
            equal[thread] += more_equal;
            SYNC();
        }
        less = below[thread] - less;
        same = equal[thread] - same;
        for (i64 i = begin; i < end; i++) {
            const Bits bits = (Bits)key_of(x[i]);
            if (bits > found || (bits == found && same >= rest)) {
                same += bits == found;
                continue;
            }
            const i64 at = item * arguments.wanted + less + (same < rest ? same : rest);
            Key key = bits;
#if HAS_ROW
            key |= (Key)row << (sizeof(Bits) * 8);
#endif
            ((Key *)arguments.keys)[at] = key;
            ((Number *)arguments.order)[at] = (Number)(row * arguments.count + i);
            less += bits < found;
            same += bits == found;
        }
        SYNC();
    }
}

// Of elements in order, the rows as keys.
KERNEL(rows, Arguments)
{
    EACH(i, arguments.rows * arguments.kept)
        ((Key *)arguments.keys)[i] = (Key)(((const Number *)arguments.order)[i] / arguments.count);
}

KERNEL(gather, Arguments)
{
    EACH(i, arguments.rows * arguments.wanted) {
        const i64 row = i / arguments.wanted;
        const i64 found = ((const Number *)arguments.order)[row * arguments.kept + i % arguments.wanted];
        if (arguments.values)
            ((Bits *)arguments.values)[i] = ((const Bits *)arguments.x)[found];
        if (arguments.indices)
            ((i64 *)arguments.indices)[i] = found - row * arguments.count;
    }
}

// All that are not a number as one, which is larger than every number by its bits.
KERNEL(unify, Arguments)
{
    EACH(i, arguments.count) {
        Bits bits = ((const Bits *)arguments.x)[i];
#if IS_FLOAT
        if ((bits & (Bits)((Bits)~(Bits)0 >> 1)) > INFINITE)
            bits = (Bits)~(Bits)0 >> 1;
#endif
        ((Bits *)arguments.values)[i] = bits;
    }
}
#endif

#ifdef GROUPS_PUT
struct Arguments {
    const char *x, *order, *places;
    char *values, *starts, *indices, *inverse, *counts;
    i64 *count;
    i64 items;
};

KERNEL(group, Arguments)
{
    const Number *const places = (const Number *)arguments.places;
    EACH(i, arguments.items) {
        const i64 place = (i64)places[i] - 1;
        const i64 from = arguments.order ? (i64)((const Number *)arguments.order)[i] : i;
        if (place >= 0 && (i == 0 || places[i - 1] != places[i])) {
            In::store(arguments.values + place * IN_SIZE, In::load(arguments.x + i * IN_SIZE));
            ((i64 *)arguments.starts)[place] = i;
            if (arguments.indices)
                ((i64 *)arguments.indices)[place] = from;
        }
        if (arguments.inverse)
            ((i64 *)arguments.inverse)[from] = place;
        if (i == arguments.items - 1)
            *arguments.count = place + 1;
    }
}

KERNEL(lengths, Arguments)
{
    const i64 *const starts = (const i64 *)arguments.starts;
    const i64 count = *arguments.count;
    EACH(i, count)
        ((i64 *)arguments.counts)[i] = (i + 1 < count ? starts[i + 1] : arguments.items) - starts[i];
}
#endif

#ifdef SELECTS
struct Arguments {
    const char *x, *places;
    i64 *count;
    // Of an item, in words.
    i64 items, size, is_whole;
    i64 shape[AXES];
    char *out[AXES];
};

FUNCTION bool is_selected(const Arguments &arguments, i64 item)
{
    const Number *const places = (const Number *)arguments.places;
    return places[item] != (item ? places[item - 1] : 0);
}

KERNEL(move, Arguments)
{
    const Number *const places = (const Number *)arguments.places;
    const i64 all = places[arguments.items - 1];
    EACH(i, arguments.items * arguments.size) {
        const i64 item = i / arguments.size, word = i % arguments.size;
        i64 place = places[item];
        if (is_selected(arguments, item))
            place -= 1;
        else if (arguments.is_whole)
            place = all + item - place;
        else
            continue;
        ((Word *)arguments.out[0])[place * arguments.size + word] = ((const Word *)arguments.x)[i];
    }
    if (blockIdx.x == 0 && threadIdx.x == 0)
        *arguments.count = all;
}

KERNEL(find, Arguments)
{
    const Number *const places = (const Number *)arguments.places;
    EACH(i, arguments.items) {
        if (is_selected(arguments, i)) {
            i64 rest = i;
            for (int axis = AXES - 1; axis >= 0; axis--) {
                ((i64 *)arguments.out[axis])[places[i] - 1] = rest % arguments.shape[axis];
                rest /= arguments.shape[axis];
            }
        }
        if (i == arguments.items - 1)
            *arguments.count = places[i];
    }
}
#endif

#if defined(SEARCHES) || defined(COUNTS)
// Between integers of 64 bits and floating-point numbers, exactly. NaN is neither less nor greater.
template <class T> FUNCTION int order_of(T a, double b)
{
    const double least = (T)-1 < (T)0 ? -9223372036854775808.0 : 0.0;
    const double beyond = (T)-1 < (T)0 ? 9223372036854775808.0 : 18446744073709551616.0;
    if (b != b || b >= beyond)
        return b != b ? 0 : -1;
    if (b < least)
        return 1;
    const T whole = (T)b;
    const double rest = b - (double)whole;
    return a != whole ? (a < whole ? -1 : 1) : rest > 0 ? -1 : rest < 0;
}
FUNCTION bool f_less(i64 a, double b) { return order_of(a, b) < 0; }
FUNCTION bool f_less(u64 a, double b) { return order_of(a, b) < 0; }
FUNCTION bool f_less(double a, i64 b) { return order_of(b, a) > 0; }
FUNCTION bool f_less(double a, u64 b) { return order_of(b, a) > 0; }

// Not a number is larger than every number.
template <class A, class B> FUNCTION bool precedes(A a, B b) { return f_less(a, b) || (b != b && a == a); }
#endif

#ifdef SEARCHES
struct Arguments {
    const char *edges, *x, *sorter;
    char *out;
    int *fault;
    i64 size, count, is_right;
};

KERNEL(search, Arguments)
{
    if (arguments.sorter)
        EACH(i, arguments.size) {
            const i64 from = (i64)Sorter::load(arguments.sorter + i * SORTER_SIZE);
            if (from < 0 || from >= arguments.size)
                *arguments.fault = 1;
        }
    EACH(i, arguments.count) {
        const auto value = FROM_X(X::load(arguments.x + i * X_SIZE));
        i64 low = 0, high = arguments.size;
        while (low < high) {
            const i64 middle = low + (high - low) / 2;
            i64 from = middle;
            if (arguments.sorter) {
                from = (i64)Sorter::load(arguments.sorter + middle * SORTER_SIZE);
                from = from < 0 || from >= arguments.size ? 0 : from;
            }
            const auto edge = FROM_EDGE(Edge::load(arguments.edges + from * EDGE_SIZE));
            if (arguments.is_right ? !precedes(value, edge) : precedes(edge, value))
                low = middle + 1;
            else
                high = middle;
        }
        ((i64 *)arguments.out)[i] = low;
    }
}
#endif

#ifdef COUNTS
struct Arguments {
    const char *edges, *x, *weights;
    char *out;
    int *fault;
    i64 bins, count, low, high;
};

// The bin of an element; -1 for none.
FUNCTION i64 bin_of(const Arguments &arguments, i64 i)
{
#if HAS_EDGES
    const auto value = FROM_X(X::load(arguments.x + i * X_SIZE));
#if HAS_BOUNDS
    if (value < (decltype(value))arguments.low || value > (decltype(value))arguments.high)
        return -1;
#endif
    i64 low = 0, high = arguments.bins + 1;
    while (low < high) {
        const i64 middle = low + (high - low) / 2;
        if (!precedes(value, FROM_EDGE(Edge::load(arguments.edges + middle * EDGE_SIZE))))
            low = middle + 1;
        else
            high = middle;
    }
#if HAS_BOUNDS
    return low < 1 ? 0 : low > arguments.bins ? arguments.bins - 1 : low - 1;
#endif
    if (low <= arguments.bins)
        return low - 1;
    // It is at the last edge if neither is less than the other, and it is a number.
    const auto last = FROM_EDGE(Edge::load(arguments.edges + arguments.bins * EDGE_SIZE));
    return precedes(last, value) || value != value ? -1 : arguments.bins - 1;
#else
    const auto value = X::load(arguments.x + i * X_SIZE);
    if (value >= 0 && (u64)value < (u64)arguments.bins)
        return (i64)value;
    *arguments.fault = 1;
    return -1;
#endif
}

// The bins of few are counted by each block.
enum { FEW = 4096 };

KERNEL(count, Arguments)
{
#if !defined(STAND_IN) && !HAS_WEIGHTS
    __shared__ u32 counts[FEW];
    const bool is_few = arguments.bins <= FEW;
    if (is_few) {
        for (int bin = threadIdx.x; bin < arguments.bins; bin += blockDim.x)
            counts[bin] = 0;
        __syncthreads();
    }
#endif
    EACH(i, arguments.count) {
        const i64 bin = bin_of(arguments, i);
        if (bin < 0)
            continue;
#if HAS_WEIGHTS
        atomicAdd((double *)arguments.out + bin, ((const double *)arguments.weights)[i]);
#else
#ifndef STAND_IN
        if (is_few) {
            atomicAdd(counts + bin, 1u);
            continue;
        }
#endif
        atomicAdd((u64 *)arguments.out + bin, (u64)1);
#endif
    }
#if !defined(STAND_IN) && !HAS_WEIGHTS
    if (is_few) {
        __syncthreads();
        for (int bin = threadIdx.x; bin < arguments.bins; bin += blockDim.x)
            if (counts[bin])
                atomicAdd((u64 *)arguments.out + bin, (u64)counts[bin]);
    }
#endif
}
#endif

#ifdef SEGMENTS
struct Arguments {
    const char *x, *offsets;
    char *out;
    int *fault;
    i64 size, segments;
};

FUNCTION Acc combine(Acc a, Acc b) { return COMBINE(a, b); }

FUNCTION i64 offset_at(const Arguments &arguments, i64 place)
{
    return (i64)Offset::load(arguments.offsets + place * OFFSET_SIZE);
}

// A segment for a block.
KERNEL(segment, Arguments)
{
    if (IS_IDLE)
        return;
    SHARED Acc found[WIDTH];
    const int thread = BLOCK_THREAD;
    for (i64 item = blockIdx.x; item < arguments.segments; item += gridDim.x) {
        i64 first = offset_at(arguments, item), last = offset_at(arguments, item + 1);
        if (first < 0 || first > last || last > arguments.size) {
            *arguments.fault = 1;
            first = last = 0;
        } else if (first == last && HAS_NO_IDENTITY && thread == 0) {
            atomicCAS(arguments.fault, 0, 2);
        }
        Acc own = IDENTITY;
        for (i64 i = first + thread; i < last; i += WIDTH) {
            const Acc value = TAKE(In::load(arguments.x + i * IN_SIZE));
            own = i < first + WIDTH ? value : combine(own, value);
        }
        found[thread] = own;
        SYNC();
        // Nothing is combined with what stands for no element.
        for (int half = WIDTH / 2; half; half /= 2) {
            if (thread < half && thread + half < last - first)
                found[thread] = combine(found[thread], found[thread + half]);
            SYNC();
        }
        if (thread == 0)
            Out::store(arguments.out + item * OUT_SIZE, GIVE(found[0]));
        SYNC();
    }
}
#endif
