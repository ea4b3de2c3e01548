typedef u32 Index;
constexpr int THREADS = 256;
constexpr bool IS_ACROSS = false;
#ifdef STAND_IN
// Threads of a block run one after another: each makes rows alone.
constexpr int GROUP = 1;
#else
constexpr int GROUP = 1;
#endif
constexpr int ROWS = THREADS / GROUP;
struct Arguments {
    i64 outputs, count;
    char *out[1];
    const char *in[1];
    Scalar scalars[1];
    i64 kept_shape[1], reduced_shape[1];
    i64 kept_strides[2][1], reduced_strides[2][1];
};
constexpr int EACH = 4;
struct Loaded { float x0; };
struct Row { float t1; float t6; };
struct Bases { const char *in0; };
FUNCTION Bases bases_at(const Arguments &arguments, Index output)
{
    return {arguments.in[0] + offset_of<1>(output, arguments.kept_shape, arguments.kept_strides[0])};
}
FUNCTION Loaded load_at(const Arguments &arguments, const Bases &bases, Index i)
{
    return {Element<float>::load(bases.in0 + (i64)i * 4)};
}
struct Stage0 {
    struct Partial { float value; };
    FUNCTION Partial nothing() { return {constant_f32(0xff800000u)}; }
    FUNCTION Partial element(float value, i64) { return {value}; }
    FUNCTION Partial combine(const Partial &a, const Partial &b)
    {
        return {f_maximum(a.value, b.value)};
    }
    FUNCTION Partial mapped(const Arguments &arguments, const Row &row, const Loaded &loaded, Index i)
    {
        const float t0 = loaded.x0;
        return element(t0, (i64)i);
    }
    FUNCTION float value(const Partial &found) { return found.value; }
};
struct Stage1 {
    struct Partial { double value; };
    FUNCTION Partial nothing() { return {constant_f64(0x0ull)}; }
    FUNCTION Partial element(double value, i64) { return {value}; }
    FUNCTION Partial combine(const Partial &a, const Partial &b)
    {
        return {f_add(a.value, b.value)};
    }
    FUNCTION Partial mapped(const Arguments &arguments, const Row &row, const Loaded &loaded, Index i)
    {
        const float t0 = loaded.x0;
        const float t1 = row.t1;
        const float t2 = f_subtract(t0, t1);
        const float t3 = f_exp(t2);
        const double t4 = Cast<double>::of(t3);
        return element(t4, (i64)i);
    }
    FUNCTION double value(const Partial &found) { return found.value; }
};

#define EACH_OF_ROW(first, step, statement)                                                          \
    Index next = first;                                                                              \
    for (; next + (EACH - 1) * (step) < count; next += EACH * (step)) {                              \
        Loaded several[EACH];                                                                        \
        _Pragma("unroll") for (int k = 0; k < EACH; k++)                                             \
            several[k] = load_at(arguments, bases, next + k * (step));                               \
        _Pragma("unroll") for (int k = 0; k < EACH; k++) {                                           \
            const Loaded &loaded = several[k];                                                       \
            const Index i = next + k * (step);                                                       \
            statement;                                                                               \
        }                                                                                            \
    }                                                                                                \
    for (Index i = next; i < count; i += step) {                                                     \
        const Loaded loaded = load_at(arguments, bases, i);                                          \
        statement;                                                                                   \
    }

template <class Stage>
FUNCTION typename Stage::Partial accumulate(const Arguments &arguments, const Bases &bases, const Row &row,
    Index first, Index step, Index count)
{
    typename Stage::Partial found = Stage::nothing();
    EACH_OF_ROW(first, step, found = Stage::combine(found, Stage::mapped(arguments, row, loaded, i)));
    return found;
}

template <class Stage, int MANY> FUNCTION typename Stage::Partial in_group(typename Stage::Partial found)
{
#ifndef STAND_IN
    if (MANY == 1)
        return found;
    __shared__ typename Stage::Partial shared[THREADS];
    const int thread = BLOCK_THREAD, step = IS_ACROSS ? ROWS : 1;
    const int lane = IS_ACROSS ? thread / ROWS : thread % MANY;
    shared[thread] = found;
    __syncthreads();
#pragma unroll
    for (int half = MANY / 2; half; half /= 2) {
        if (lane < half)
            shared[thread] = Stage::combine(shared[thread], shared[thread + half * step]);
        __syncthreads();
    }
    found = shared[thread - lane * step];
    __syncthreads();
#endif
    return found;
}

struct Begins { char *out0; };
FUNCTION void store_at(const Arguments &arguments, const Row &row, const Loaded &loaded,
    const Begins &begins, Index i)
{
    const float t0 = loaded.x0;
    const float t1 = row.t1;
    const float t2 = f_subtract(t0, t1);
    const float t3 = f_exp(t2);
    const float t6 = row.t6;
    const float t7 = f_divide(t3, t6);
    Element<float>::store(begins.out0 + (i64)i * 4, t7);
}
FUNCTION void finish(const Arguments &arguments, const Bases &bases, const Row &row,
    Index output, Index lane, Index count)
{
    const Begins begins = {arguments.out[0] + offset_of<1>(output, arguments.kept_shape, arguments.kept_strides[1])};
    EACH_OF_ROW(lane, GROUP, store_at(arguments, row, loaded, begins, i));
}

KERNEL(rows, Arguments)
{
    const int thread = (int)threadIdx.x;
    const Index lane = IS_ACROSS ? thread / ROWS : thread % GROUP;
    for (i64 first = (i64)blockIdx.x * ROWS; first < arguments.outputs; first += (i64)gridDim.x * ROWS) {
        const i64 output = first + (IS_ACROSS ? thread % ROWS : thread / GROUP);
        const bool is_there = output < arguments.outputs;
        const Index count = is_there ? (Index)arguments.count : 0;
        const Bases bases = bases_at(arguments, (Index)(is_there ? output : 0));
        Row row;
        const float t1 = Stage0::value(in_group<Stage0, GROUP>(accumulate<Stage0>(arguments, bases, row, lane, GROUP, count)));
        row.t1 = t1;
        const double t5 = Stage1::value(in_group<Stage1, GROUP>(accumulate<Stage1>(arguments, bases, row, lane, GROUP, count)));
        const float t6 = Cast<float>::of(t5);
        row.t6 = t6;
        if (is_there)
            finish(arguments, bases, row, (Index)output, lane, count);
    }
}
