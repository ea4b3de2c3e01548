// Pooling, convolutions by definition, and what an attention needs besides products of matrices.
//
// All computes in float or double: halves are converted before and after. A thread makes an element, but for rows of
// scores, which a warp shares.

#include "halves.cuh"

enum { AXES = 64, SPATIAL = 3 };

// Images with three spatial axes, of which the first ones may have one element.
struct Grid {
    i64 extent[SPATIAL], window[SPATIAL], counts[SPATIAL], stride[SPATIAL], padding[SPATIAL], dilation[SPATIAL];
};

struct ConvolutionArguments {
    const char *a, *b, *bias;
    char *out;
    i64 count, images, groups, inputs, outputs;
    Grid grid;
    i64 is_double;
};

struct PoolArguments {
    const char *x;
    char *out;
    i64 *indices;
    i64 count;
    Grid grid;
    i64 padding_after[SPATIAL];
    i64 divisor;
    int counts_padding, is_adaptive, kind, is_mean;
};

struct SpreadArguments {
    const char *grad;
    const char *indices;
    char *out;
    int *words;
    i64 count, windows, size;
    int is_wide, is_double;
};

// A kernel that computes in float or double, by a function of `Real`.
#define KERNEL_OF_REALS(name, Arguments, function) \
    KERNEL(name, Arguments)                        \
    {                                              \
        if (arguments.is_double) {                 \
            typedef double Real;                   \
            function(arguments);                   \
        } else {                                   \
            typedef float Real;                    \
            function(arguments);                   \
        }                                          \
    }

__device__ double infinity()
{
    return __longlong_as_double(0x7ff0000000000000ll);
}

// One for elements of each type. Halves are computed in float, and rounded once.
#define KERNEL_OF_FLOATS(name, Arguments, function)      \
    KERNEL(name, Arguments)                              \
    {                                                    \
        switch (arguments.kind) {                        \
        case 0: function<Half>(arguments); break;        \
        case 1: function<Bfloat>(arguments); break;      \
        case 2: function<float>(arguments); break;       \
        default: function<double>(arguments); break;     \
        }                                                \
    }

// Splits an index over the last three axes.
struct Place {
    i64 at[SPATIAL], rest;

    __device__ Place(i64 place, const i64 *extents)
    {
        for (int axis = SPATIAL - 1; axis >= 0; axis--) {
            rest = place / extents[axis];
            at[axis] = place - rest * extents[axis];
            place = rest;
        }
    }
};

__device__ i64 product(const i64 *extents)
{
    return extents[0] * extents[1] * extents[2];
}

// The element that a tap of a window looks at; -1 for none.
__device__ i64 tapped(const Grid &grid, const i64 *window, const i64 *tap)
{
    i64 index = 0;
    for (int axis = 0; axis < SPATIAL; axis++) {
        const i64 at = window[axis] * grid.stride[axis] - grid.padding[axis] + tap[axis] * grid.dilation[axis];
        if (at < 0 || at >= grid.extent[axis])
            return -1;
        index = index * grid.extent[axis] + at;
    }
    return index;
}

// The window that looks at an element by a tap; -1 for none.
__device__ i64 looking(const Grid &grid, const i64 *element, const i64 *tap)
{
    i64 index = 0;
    for (int axis = 0; axis < SPATIAL; axis++) {
        const i64 from = element[axis] + grid.padding[axis] - tap[axis] * grid.dilation[axis];
        const i64 window = from / grid.stride[axis];
        if (from < 0 || window * grid.stride[axis] != from || window >= grid.counts[axis])
            return -1;
        index = index * grid.counts[axis] + window;
    }
    return index;
}

// Each window adds up elements of images; or, for the transposed map, each element those of the windows that look at it.
template <typename Real, bool IS_BACK> __device__ void convolve_images(const ConvolutionArguments &arguments)
{
    const Grid &grid = arguments.grid;
    const Real *x = (const Real *)arguments.a, *weight = (const Real *)arguments.b, *bias = (const Real *)arguments.bias;
    const i64 inputs = arguments.inputs, outputs = arguments.outputs, taps = product(grid.window);
    const i64 made = IS_BACK ? inputs : outputs, added = IS_BACK ? outputs : inputs;
    const i64 size = product(IS_BACK ? grid.counts : grid.extent);
    EACH(place, arguments.count)
    {
        const Place target(place, IS_BACK ? grid.extent : grid.counts);
        const i64 channels = arguments.groups * made, image = target.rest / channels;
        const i64 channel = target.rest - image * channels, group = channel / made;
        Real sum = 0;
        for (i64 tap = 0; tap < taps; tap++) {
            const Place window(tap, grid.window);
            const i64 source = IS_BACK ? looking(grid, target.at, window.at) : tapped(grid, target.at, window.at);
            if (source >= 0)
                for (i64 other = 0; other < added; other++) {
                    const i64 o = IS_BACK ? group * outputs + other : channel;
                    const i64 c = IS_BACK ? channel - group * inputs : other;
                    sum += x[((image * arguments.groups + group) * added + other) * size + source] *
                           weight[(o * inputs + c) * taps + tap];
                }
        }
        ((Real *)arguments.out)[place] = bias ? sum + bias[channel] : sum;
    }
}

// A warp adds up the windows of all images for one weight.
template <typename Real> __device__ void convolve_weight(const ConvolutionArguments &arguments)
{
    const Grid &grid = arguments.grid;
    const Real *x = (const Real *)arguments.a, *grad = (const Real *)arguments.b;
    const i64 size = product(grid.extent), windows = product(grid.counts), lane = threadIdx.x % LANES;
    EACH(thread, arguments.count * LANES)
    {
        const i64 place = thread / LANES;
        const Place tap(place, grid.window);
        const i64 o = tap.rest / arguments.inputs, c = tap.rest - o * arguments.inputs;
        const i64 channel = o / arguments.outputs * arguments.inputs + c;
        Real sum = 0;
        for (i64 number = lane; number < arguments.images * windows; number += LANES) {
            const Place window(number, grid.counts);
            const i64 element = tapped(grid, window.at, tap.at), image = window.rest;
            if (element >= 0)
                sum += x[(image * arguments.groups * arguments.inputs + channel) * size + element] *
                       grad[(image * arguments.groups * arguments.outputs + o) * windows + number - image * windows];
        }
        OVER_LANES(sum, sum + other)
        if (lane == 0)
            ((Real *)arguments.out)[place] = sum;
    }
}

KERNEL_OF_REALS(convolution, ConvolutionArguments, (convolve_images<Real, false>))
KERNEL_OF_REALS(convolution_input_grad, ConvolutionArguments, (convolve_images<Real, true>))
KERNEL_OF_REALS(convolution_weight_grad, ConvolutionArguments, convolve_weight<Real>)

// Where a window of a pooling begins and ends.
struct Span {
    i64 start, stop, step;

    __device__ Span(const PoolArguments &arguments, int axis, i64 window)
    {
        const Grid &grid = arguments.grid;
        if (arguments.is_adaptive) {
            start = window * grid.extent[axis] / grid.counts[axis];
            stop = ((window + 1) * grid.extent[axis] + grid.counts[axis] - 1) / grid.counts[axis];
            step = 1;
            return;
        }
        step = grid.dilation[axis];
        start = window * grid.stride[axis] - grid.padding[axis];
        stop = start + step * (grid.window[axis] - 1) + 1;
    }

    // The same without what is outside of an axis.
    __device__ void clip(i64 extent)
    {
        if (start < 0)
            start += (-start + step - 1) / step * step;
        if (stop > extent)
            stop = extent;
    }
};

// How many elements the mean of a window has.
__device__ i64 divisor_of(const PoolArguments &arguments, const i64 *window)
{
    i64 count = 1;
    if (arguments.divisor)
        return arguments.divisor;
    for (int axis = 0; axis < SPATIAL; axis++) {
        Span span(arguments, axis, window[axis]);
        if (arguments.counts_padding) {
            const i64 end = arguments.grid.extent[axis] + arguments.padding_after[axis];
            count *= (span.stop < end ? span.stop : end) - span.start;
        } else {
            span.clip(arguments.grid.extent[axis]);
            count *= span.stop - span.start;
        }
    }
    return count;
}

// NaN counts as greater than every number; of several the first.
template <typename Element> __device__ void pool_all(const PoolArguments &arguments)
{
    typedef decltype(wide(Element())) Real;
    const Grid &grid = arguments.grid;
    const i64 size = product(grid.extent);
    EACH(place, arguments.count)
    {
        const Place window(place, grid.counts);
        Span z(arguments, 0, window.at[0]), y(arguments, 1, window.at[1]), x(arguments, 2, window.at[2]);
        z.clip(grid.extent[0]), y.clip(grid.extent[1]), x.clip(grid.extent[2]);
        const Element *image = (const Element *)arguments.x + window.rest * size;
        i64 found = -1;
        Real value = 0;
        for (i64 i = z.start; i < z.stop; i += z.step)
            for (i64 j = y.start; j < y.stop; j += y.step)
                for (i64 k = x.start; k < x.stop; k += x.step) {
                    const i64 at = (i * grid.extent[1] + j) * grid.extent[2] + k;
                    const Real one = wide(image[at]);
                    if (arguments.is_mean)
                        value += one;
                    else if (found < 0 || one > value || (one != one && value == value))
                        found = at, value = one;
                }
        narrow(arguments.is_mean ? value / (Real)divisor_of(arguments, window.at) : value,
               ((Element *)arguments.out)[place]);
        if (arguments.indices)
            arguments.indices[place] = found;
    }
}

KERNEL_OF_FLOATS(pool, PoolArguments, pool_all)

// The windows that an element may be in.
struct Windows {
    i64 first, last;

    __device__ Windows(const PoolArguments &arguments, int axis, i64 element)
    {
        const Grid &grid = arguments.grid;
        const i64 extent = grid.extent[axis], counts = grid.counts[axis];
        if (arguments.is_adaptive) {
            first = element * counts / extent - 1, last = ((element + 1) * counts - 1) / extent + 1;
        } else {
            const i64 from = element + grid.padding[axis], least = from - grid.window[axis] + 1;
            first = least > 0 ? (least + grid.stride[axis] - 1) / grid.stride[axis] : 0;
            last = from / grid.stride[axis];
        }
        first = first > 0 ? first : 0;
        last = last < counts ? last : counts - 1;
    }
};

__device__ bool has(const PoolArguments &arguments, int axis, i64 window, i64 element)
{
    const Span span(arguments, axis, window);
    return span.start <= element && element < span.stop;
}

// The gradient of means, for one element: of all windows that it is in.
template <typename Element> __device__ void pool_back(const PoolArguments &arguments)
{
    typedef decltype(wide(Element())) Real;
    const Grid &grid = arguments.grid;
    const i64 windows = product(grid.counts);
    EACH(place, arguments.count)
    {
        const Place element(place, grid.extent);
        const Windows z(arguments, 0, element.at[0]), y(arguments, 1, element.at[1]), x(arguments, 2, element.at[2]);
        const Element *grad = (const Element *)arguments.x + element.rest * windows;
        Real sum = 0;
        for (i64 i = z.first; i <= z.last; i++)
            for (i64 j = y.first; j <= y.last; j++)
                for (i64 k = x.first; k <= x.last; k++) {
                    const i64 window[SPATIAL] = {i, j, k};
                    if (has(arguments, 0, i, element.at[0]) && has(arguments, 1, j, element.at[1]) &&
                        has(arguments, 2, k, element.at[2]))
                        sum += wide(grad[(i * grid.counts[1] + j) * grid.counts[2] + k]) /
                               (Real)divisor_of(arguments, window);
                }
        narrow(sum, ((Element *)arguments.out)[place]);
    }
}

KERNEL_OF_FLOATS(mean_pool_grad, PoolArguments, pool_back)

// Notes the first number that is wrong: which argument has it, and both halves of it.
__device__ void refuse(int *words, int argument, i64 number)
{
    if (atomicCAS(words, 0, argument) == 0) {
        words[1] = (int)(unsigned)number;
        words[2] = (int)(number >> 32);
    }
}

// The gradient of maxima: the results are zeros at first. Who adds first is left to chance.
template <typename Real> __device__ void spread_all(const SpreadArguments &arguments)
{
    EACH(place, arguments.count)
    {
        const i64 index = whole_at(arguments.indices, place, arguments.is_wide);
        if (index < 0 || index >= arguments.size)
            refuse(arguments.words, 1, index);
        else
            atomicAdd((Real *)arguments.out + place / arguments.windows * arguments.size + index,
                      ((const Real *)arguments.grad)[place]);
    }
}

KERNEL_OF_REALS(max_pool_grad, SpreadArguments, spread_all<Real>)

struct LengthsArguments {
    const char *lengths;
    int *out, *words;
    i64 count, most;
    int is_wide, argument;
};

struct TableArguments {
    const char *table;
    const int *lengths;
    int *out, *words;
    i64 count, most, block, blocks;
    int is_wide, argument;
};

struct GatherArguments {
    const char *source;
    char *out;
    const int *lengths, *table;
    i64 count, heads, rows, width, block, most;
    i64 strides[4];
    i64 itemsize;
};

// Lengths that nothing reaches out of an axis by: 0 for what is no length.
KERNEL(check_lengths, LengthsArguments)
{
    EACH(place, arguments.count)
    {
        const i64 length = whole_at(arguments.lengths, place, arguments.is_wide);
        const bool is_right = length >= 0 && length <= arguments.most;
        arguments.out[place] = is_right ? (int)length : 0;
        if (!is_right)
            refuse(arguments.words, arguments.argument, length);
    }
}

// Blocks that there are: 0 for others, of which only those within a length are wrong.
KERNEL(check_blocks, TableArguments)
{
    EACH(place, arguments.count)
    {
        const i64 row = place / arguments.most, block = whole_at(arguments.table, place, arguments.is_wide);
        const bool is_used = (place - row * arguments.most) * arguments.block < arguments.lengths[row];
        const bool is_right = block >= 0 && block < arguments.blocks;
        arguments.out[place] = is_used && is_right ? (int)block : 0;
        if (is_used && !is_right)
            refuse(arguments.words, arguments.argument, block);
    }
}

template <typename Element> __device__ void gather_all(const GatherArguments &arguments)
{
    EACH(place, arguments.count)
    {
        const i64 line = place / arguments.width, column = place - line * arguments.width;
        i64 rest = line / arguments.rows, row = line - rest * arguments.rows;
        i64 n = rest / arguments.heads;
        const i64 head = rest - n * arguments.heads;
        Element value = 0;
        if (!arguments.lengths || row < arguments.lengths[n]) {
            if (arguments.table) {
                n = arguments.table[n * arguments.most + row / arguments.block];
                row %= arguments.block;
            }
            value = *(const Element *)(arguments.source + n * arguments.strides[0] + head * arguments.strides[1] +
                                       row * arguments.strides[2] + column * arguments.strides[3]);
        }
        ((Element *)arguments.out)[place] = value;
    }
}

// Rows without gaps, out of blocks if need be, and zeros behind their lengths.
KERNEL(gather, GatherArguments)
{
    switch (arguments.itemsize) {
    case 2: gather_all<unsigned short>(arguments); break;
    case 4: gather_all<unsigned>(arguments); break;
    default: gather_all<u64>(arguments); break;
    }
}

struct BiasArguments {
    const char *bias;
    char *out;
    i64 count, channels, size;
    int kind;
};

template <typename Element> __device__ void add_all(const BiasArguments &arguments)
{
    EACH(place, arguments.count)
    {
        Element &out = ((Element *)arguments.out)[place];
        narrow(wide(out) + wide(((const Element *)arguments.bias)[place / arguments.size % arguments.channels]), out);
    }
}

// Adds a number to all elements of each channel.
KERNEL_OF_FLOATS(add_bias, BiasArguments, add_all)

struct MeansArguments {
    const char *grad, *out;
    char *means;
    i64 count, width, is_double;
};

template <typename Real> __device__ void means_all(const MeansArguments &arguments)
{
    const i64 lane = threadIdx.x % LANES;
    EACH(thread, arguments.count * LANES)
    {
        const i64 row = thread / LANES;
        const Real *grad = (const Real *)arguments.grad + row * arguments.width;
        const Real *out = (const Real *)arguments.out + row * arguments.width;
        Real sum = 0;
        for (i64 column = lane; column < arguments.width; column += LANES)
            sum += grad[column] * out[column];
        OVER_LANES(sum, sum + other)
        if (lane == 0)
            ((Real *)arguments.means)[row] = sum;
    }
}

// Of each query, the sum of products of its gradient and its result.
KERNEL_OF_REALS(attention_means, MeansArguments, means_all<Real>)

enum Mask { NONE, TRUTH, ADDED };

// Scores of some rows of each head of keys, with those of all queries that it serves.
struct ScoresArguments {
    char *scores, *slopes;
    const char *means;
    char *logs;
    const char *mask;
    const int *query_lengths, *key_lengths;
    i64 count, piece, first, rows, columns, shared, served, window_left, window_right, mask_row, mask_column;
    double scale;
    int is_double, is_lower, mask_kind, ndim;
    i64 shape[AXES], mask_strides[AXES];
};

// The keys that a query sees, by its band and by lengths.
struct Band {
    i64 first, stop;

    template <typename Arguments> __device__ Band(const Arguments &given, i64 n, i64 row, bool is_lower)
    {
        const i64 rows = given.query_lengths ? given.query_lengths[n] : given.rows;
        const i64 columns = given.key_lengths ? given.key_lengths[n] : given.columns;
        const i64 own = row + (is_lower ? columns - rows : 0);
        first = given.window_left < 0 || own < given.window_left ? 0 : own - given.window_left;
        stop = given.window_right < 0 || own + given.window_right >= columns ? columns : own + given.window_right + 1;
        if (row >= rows)
            stop = 0;
    }
};

// A row of scores: which of them count, and what is added to them.
struct Row {
    const ScoresArguments &arguments;
    const char *mask;
    i64 number, first, stop;

    __device__ Row(const ScoresArguments &given, i64 line) : arguments(given), mask(given.mask)
    {
        const i64 batch = line / given.piece, query = given.first + line - batch * given.piece;
        const i64 above = query / given.rows, row = query - above * given.rows;
        const Band band(given, batch / given.served, row, given.is_lower);
        number = batch * given.shared * given.rows + query;
        first = band.first, stop = band.stop;
        if (given.mask_kind == NONE)
            return;
        mask += row * given.mask_row;
        i64 head = batch * given.shared + above;
        for (int axis = given.ndim - 1; axis >= 0; axis--) {
            const i64 rest = head / given.shape[axis];
            mask += (head - rest * given.shape[axis]) * given.mask_strides[axis];
            head = rest;
        }
    }

    template <typename Real> __device__ Real masked(Real score, i64 column) const
    {
        if (column < first || column >= stop)
            return -(Real)infinity();
        const char *at = mask + column * arguments.mask_column;
        if (arguments.mask_kind == TRUTH)
            return *(const unsigned char *)at ? score : -(Real)infinity();
        if (arguments.mask_kind != ADDED)
            return score;
        // A hidden key may be infinite or NaN: its score is none, whatever the product was.
        const Real added = *(const Real *)at;
        return added == -(Real)infinity() ? added : score + added;
    }
};

template <typename Real> __device__ void weigh_all(const ScoresArguments &arguments)
{
    const i64 lane = threadIdx.x % LANES;
    EACH(thread, arguments.count * LANES)
    {
        const i64 line = thread / LANES;
        const Row row(arguments, line);
        Real *scores = (Real *)arguments.scores + line * arguments.columns;
        Real most = -(Real)infinity(), total = 0;
        for (i64 column = lane; column < arguments.columns; column += LANES) {
            const Real score = row.masked(scores[column], column);
            scores[column] = score;
            most = max(most, score);
        }
        OVER_LANES(most, max(most, other))
        if (most == -(Real)infinity())
            most = 0;
        for (i64 column = lane; column < arguments.columns; column += LANES) {
            scores[column] = exp(scores[column] - most);
            total += scores[column];
        }
        OVER_LANES(total, total + other)
        const Real divisor = total == 0 ? (Real)1 : total;
        for (i64 column = lane; column < arguments.columns; column += LANES)
            scores[column] /= divisor;
        if (arguments.logs && lane == 0)
            ((Real *)arguments.logs)[row.number] = most + log(total);
    }
}

// Weights of the values in place of scores, and logarithms of sums.
KERNEL_OF_REALS(attention_weights, ScoresArguments, weigh_all<Real>)

struct TruthArguments {
    const unsigned char *mask;
    unsigned short *out;
    i64 count, code;
};

// Truth values as what is added to scores: zero, or the code of minus infinity.
KERNEL(mask_to_bias, TruthArguments)
{
    EACH(place, arguments.count)
        arguments.out[place] = arguments.mask[place] ? 0 : (unsigned short)arguments.code;
}

template <typename Real> __device__ void slopes_all(const ScoresArguments &arguments)
{
    const i64 lane = threadIdx.x % LANES;
    EACH(thread, arguments.count * LANES)
    {
        const i64 line = thread / LANES;
        const Row row(arguments, line);
        Real *scores = (Real *)arguments.scores + line * arguments.columns;
        Real *slopes = (Real *)arguments.slopes + line * arguments.columns;
        const Real mean = ((const Real *)arguments.means)[row.number];
        Real sum = ((const Real *)arguments.logs)[row.number];
        if (sum == -(Real)infinity())
            sum = 0;
        for (i64 column = lane; column < arguments.columns; column += LANES) {
            const Real score = row.masked(scores[column], column);
            const Real weight = score == -(Real)infinity() ? (Real)0 : exp(score - sum);
            scores[column] = weight;
            slopes[column] = weight == 0 ? (Real)0 : weight * (slopes[column] - mean) * (Real)arguments.scale;
        }
    }
}

// Weights in place of scores, and gradients of scores in place of those of weights.
KERNEL_OF_REALS(attention_slopes, ScoresArguments, slopes_all<Real>)

struct MendArguments {
    const char *weights, *values, *made;
    char *out;
    i64 count, rows, width, terms, row_step, term_step, weights_step, values_step, made_step, out_step;
    i64 is_added, is_double;
};

template <typename Real> __device__ void mend_all(const MendArguments &arguments)
{
    EACH(thread, arguments.count)
    {
        const i64 size = arguments.rows * arguments.width, batch = thread / size, place = thread - batch * size;
        const i64 row = place / arguments.width, column = place - row * arguments.width;
        Real sum = ((const Real *)arguments.made)[batch * arguments.made_step + place];
        if (sum != sum) {
            const Real *weights =
                (const Real *)arguments.weights + batch * arguments.weights_step + row * arguments.row_step;
            const Real *values = (const Real *)arguments.values + batch * arguments.values_step + column;
            sum = 0;
            for (i64 term = 0; term < arguments.terms; term++) {
                const Real weight = weights[term * arguments.term_step];
                if (weight != 0)
                    sum += weight * values[term * arguments.width];
            }
        }
        Real &out = ((Real *)arguments.out)[batch * arguments.out_step + place];
        out = arguments.is_added ? out + sum : sum;
    }
}

// Products of weights and values in which a weight of zero takes nothing: sums that are NaN are made anew.
KERNEL_OF_REALS(attention_mend, MendArguments, mend_all<Real>)

// Arrays of an attention by cuDNN, with four axes each: elements of a row lie side by side.
enum Fused { QUERY, KEY, VALUE, GRAD, RESULT, BIAS, TO_QUERY, TO_KEY, TO_VALUE, FUSED };

struct FusedArguments {
    char *arrays[FUSED];
    float *logs;
    const int *query_lengths, *key_lengths;
    i64 strides[FUSED][3];
    i64 count, queries, keys, heads, shared, rows, columns, e, f, window_left, window_right;
    i64 is_lower, is_grad, infinite;
    double scale;
};

// A row of the result or of a gradient, which a warp can make anew.
template <typename Element> struct FusedRow {
    // Sums that a thread has at a time.
    enum { SPAN = 8 };
    const FusedArguments &given;
    int made = RESULT, source = VALUE;
    i64 n, head, row, width, first, stop;
    const i64 lane = threadIdx.x % LANES;

    __device__ FusedRow(const FusedArguments &arguments, i64 number) : given(arguments), width(arguments.f)
    {
        if (given.is_grad && number < given.queries)
            made = TO_QUERY, source = KEY, width = given.e;
        else if (given.is_grad && (number -= given.queries) < given.keys)
            made = TO_KEY, source = QUERY, width = given.e;
        else if (given.is_grad)
            made = TO_VALUE, source = GRAD, number -= given.keys;
        const i64 heads = by_key() ? given.heads / given.shared : given.heads;
        const i64 extent = by_key() ? given.columns : given.rows, above = number / extent;
        row = number - above * extent, n = above / heads, head = above - n * heads;
        const Band band(given, n, row, given.is_lower);
        first = by_key() ? 0 : band.first, stop = by_key() ? given.shared * given.rows : band.stop;
    }

    __device__ bool by_key() const { return made == TO_KEY || made == TO_VALUE; }

    __device__ Element *at(int array, i64 own_head, i64 own_row) const
    {
        const i64 *strides = given.strides[array];
        return (Element *)given.arrays[array] + n * strides[0] + own_head * strides[1] + own_row * strides[2];
    }

    __device__ float dot(const Element *a, const Element *b, i64 count) const
    {
        float sum = 0;
        for (i64 place = lane; place < count; place += LANES)
            sum += wide(a[place]) * wide(b[place]);
        OVER_LANES(sum, sum + other)
        return sum;
    }

    // Minus infinity for a key that the query does not see.
    __device__ float score(i64 own_head, i64 query, i64 key) const
    {
        const Band band(given, n, query, given.is_lower);
        const float added = given.arrays[BIAS] ? wide(at(BIAS, own_head, query)[key]) : 0;
        if (key < band.first || key >= band.stop || added == -(float)infinity())
            return -(float)infinity();
        const Element *keys = at(KEY, own_head / given.shared, key);
        return dot(at(QUERY, own_head, query), keys, given.e) * (float)given.scale + added;
    }

    __device__ float log_of_sum() const
    {
        float most = -(float)infinity(), total = 0;
        for (i64 key = first; key < stop; key++) {
            const float own = score(head, row, key), above = max(most, own);
            if (own != -(float)infinity())
                total = total * exp(most - above) + exp(own - above), most = above;
        }
        return most + log(total);
    }

    // What a row of the source is multiplied by: zero takes nothing, not of infinity or NaN, either.
    __device__ float factor(i64 own_head, i64 query, i64 key, float sum) const
    {
        const float own = score(own_head, query, key), weight = own == -(float)infinity() ? 0 : exp(own - sum);
        if (weight == 0 || source == VALUE || source == GRAD)
            return weight;
        const Element *grad = at(GRAD, own_head, query), *values = at(VALUE, own_head / given.shared, key);
        const float mean = dot(grad, at(RESULT, own_head, query), given.f);
        return weight * (dot(grad, values, given.f) - mean) * (float)given.scale;
    }

    __device__ void make() const
    {
        const float own = made == RESULT ? log_of_sum() : 0;
        for (i64 block = 0; block < width; block += SPAN * LANES) {
            float sums[SPAN] = {};
            for (i64 place = first; place < stop; place++) {
                const i64 above = by_key() ? place / given.rows : 0, query = by_key() ? place - above * given.rows : row;
                const i64 own_head = by_key() ? head * given.shared + above : head, key = by_key() ? row : place;
                const i64 line = (n * given.heads + own_head) * given.rows + query;
                const float weight = factor(own_head, query, key, made == RESULT ? own : given.logs[line]);
                const Element *from = by_key() ? at(source, own_head, query) : at(source, head / given.shared, key);
                for (i64 k = 0, column = block + lane; k < SPAN && column < width && weight != 0; k++, column += LANES)
                    sums[k] += weight * wide(from[column]);
            }
            for (i64 k = 0, column = block + lane; k < SPAN && column < width; k++, column += LANES)
                narrow(sums[k], at(made, head, row)[column]);
        }
        if (made == RESULT && given.logs && lane == 0)
            given.logs[(n * given.heads + head) * given.rows + row] = own;
    }
};

struct __align__(16) Eight {
    unsigned short bits[8];
};

template <typename Element> __device__ void make_fused(const FusedArguments &arguments)
{
    const i64 lane = threadIdx.x % LANES;
    EACH(thread, (arguments.count + LANES - 1) / LANES * LANES)
    {
        // A thread looks at a row, eight elements at once where rows are multiples of these: then they begin well.
        const FusedRow<Element> own(arguments, min(thread, arguments.count - 1));
        const Element *row = own.at(own.made, own.head, own.row);
        const bool is_even = own.width % 8 == 0;
        unsigned wrong = own.first >= own.stop;
        for (i64 column = 0; column < own.width; column += is_even ? 8 : 1) {
            Eight some = {};
            if (is_even)
                some = *(const Eight *)(row + column);
            else
                some.bits[0] = row[column].bits;
            for (int k = 0; k < 8; k++)
                wrong |= (some.bits[k] | 0x8000) > arguments.infinite;
        }
        wrong <<= lane;
        OVER_LANES(wrong, wrong | other)
        // All threads of a warp make one row after the other.
        for (int number = 0; number < LANES; number++)
            if (wrong >> number & 1 && thread - lane + number < arguments.count)
                FusedRow<Element>(arguments, thread - lane + number).make();
    }
}

// cuDNN multiplies weights of zero by what hidden keys have, which may be infinity or NaN, and what it makes of queries
// that see no key is not told. Such rows are made anew; NaN stays where it is right.
KERNEL(attention_fused, FusedArguments)
{
    if (arguments.infinite == 0xfc00)
        make_fused<Half>(arguments);
    else
        make_fused<Bfloat>(arguments);
}
