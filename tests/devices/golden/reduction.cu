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
    i64 outputs, count, parts;
    i64 partial_step, output_step;
    char *out, *partial;
    const char *in[2];
    Scalar scalars[1];
    i64 kept_shape[1], reduced_shape[1];
    i64 kept_strides[2][1], reduced_strides[2][1];
};
constexpr int EACH = 4;
struct Loaded { float x0; float x1; };
struct Row { };
struct Bases { const char *in0; const char *in1; };
FUNCTION Bases bases_at(const Arguments &arguments, Index output)
{
    return {arguments.in[0] + offset_of<1>(output, arguments.kept_shape, arguments.kept_strides[0]), arguments.in[1] + offset_of<1>(output, arguments.kept_shape, arguments.kept_strides[1])};
}
FUNCTION Loaded load_at(const Arguments &arguments, const Bases &bases, Index i)
{
    return {Element<float>::load(bases.in0 + (i64)i * 4), F16::load(bases.in1 + (i64)i * 2)};
}
struct Stage0 {
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
        const float t1 = loaded.x1;
        const float t2 = Cast<float>::of(t1);
        const float t3 = f_multiply(t0, t2);
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


typedef Stage0::Partial Partial;

FUNCTION void finish(const Arguments &arguments, i64 output, const Partial &found)
{
    const double t5 = Stage0::value(found);
    const float t6 = Cast<float>::of(t5);
    Element<float>::store(arguments.out + output * 4, t6);
}

KERNEL(reduce, Arguments)
{
    const int thread = (int)threadIdx.x, lane = thread % GROUP;
    const i64 outputs = arguments.outputs, parts = arguments.parts, items = outputs * parts;
    Partial *const partial = (Partial *)arguments.partial;
    for (i64 item = (i64)blockIdx.x * ROWS + thread / GROUP; item < items; item += (i64)gridDim.x * ROWS) {
        // Blocks lay the parts of a result side by side; threads lay results side by side.
        const i64 output = GROUP > 1 ? item / parts : item % outputs;
        const i64 part = GROUP > 1 ? item % parts : item / outputs;
        const Partial found = in_group<Stage0, GROUP>(
            accumulate<Stage0>(arguments, bases_at(arguments, (Index)output), Row(),
                (Index)(part * GROUP + lane), (Index)(parts * GROUP), (Index)arguments.count));
        if (lane)
            continue;
        if (parts == 1)
            finish(arguments, output, found);
        else
            partial[output * arguments.output_step + part * arguments.partial_step] = found;
    }
}

FUNCTION Partial combined(const Arguments &arguments, i64 output, i64 first, i64 step)
{
    const Partial *const partial = (const Partial *)arguments.partial + output * arguments.output_step;
    Partial found = Stage0::nothing();
    for (i64 part = first; part < arguments.parts; part += step)
        found = Stage0::combine(found, partial[part * arguments.partial_step]);
    return found;
}

KERNEL(finish_block, Arguments)
{
    if (IS_IDLE)
        return;
    for (i64 output = blockIdx.x; output < arguments.outputs; output += gridDim.x) {
        const Partial mine = combined(arguments, output, BLOCK_THREAD, BLOCK_THREADS);
        const Partial found = in_group<Stage0, THREADS>(mine);
        if (BLOCK_THREAD == 0)
            finish(arguments, output, found);
    }
}

KERNEL(finish_serial, Arguments)
{
    const i64 step = (i64)gridDim.x * blockDim.x;
    for (i64 output = (i64)blockIdx.x * blockDim.x + threadIdx.x; output < arguments.outputs; output += step)
        finish(arguments, output, combined(arguments, output, 0, 1));
}
