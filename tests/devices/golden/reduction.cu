typedef u32 Index;
enum { THREADS = 256 };
struct Arguments {
    i64 outputs, count, parts;
    i64 partial_step, output_step;
    char *out, *partial;
    const char *in[2];
    Scalar scalars[1];
    i64 kept_shape[1], reduced_shape[1];
    i64 kept_strides[2][1], reduced_strides[2][1];
};
struct Partial { double value; };
FUNCTION Partial nothing() { return {constant_f64(0x0ull)}; }
FUNCTION Partial element(double value, i64) { return {value}; }
FUNCTION Partial combine(const Partial &a, const Partial &b)
{
    return {f_add(a.value, b.value)};
}
FUNCTION void finish(const Arguments &arguments, i64 output, const Partial &found)
{
    const float result = Cast<float>::of(found.value);
    Element<float>::store(arguments.out + output * 4, result);
}
enum { EACH = 4 };
struct Loaded { float x0; float x1; };
FUNCTION Partial mapped(const Arguments &arguments, const Loaded &loaded, Index i)
{
    const float t0 = loaded.x0;
    const float t1 = loaded.x1;
    const float t2 = Cast<float>::of(t1);
    const float t3 = f_multiply(t0, t2);
    return element(Cast<double>::of(t3), (i64)i);
}
#define BASES const char *const base0 = arguments.in[0] + offset_of<1>(output, arguments.kept_shape, arguments.kept_strides[0]); const char *const base1 = arguments.in[1] + offset_of<1>(output, arguments.kept_shape, arguments.kept_strides[1]);
#define LOAD {Element<float>::load(base0 + (i64)i * 4), F16::load(base1 + (i64)i * 2)}

FUNCTION Partial accumulate(const Arguments &arguments, Index output, Index first, Index step)
{
    BASES
    const Index count = (Index)arguments.count;
    Partial found = nothing();
    Index next = first;
    for (; next + (EACH - 1) * step < count; next += EACH * step) {
        Loaded loaded[EACH];
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            const Index i = next + k * step;
            loaded[k] = LOAD;
        }
#pragma unroll
        for (int k = 0; k < EACH; k++)
            found = combine(found, mapped(arguments, loaded[k], next + k * step));
    }
    for (Index i = next; i < count; i += step) {
        const Loaded loaded = LOAD;
        found = combine(found, mapped(arguments, loaded, i));
    }
    return found;
}


FUNCTION Partial in_block(Partial found)
{
#ifndef STAND_IN
    __shared__ Partial shared[THREADS];
    const int thread = BLOCK_THREAD;
    shared[thread] = found;
    __syncthreads();
#pragma unroll
    for (int half = THREADS / 2; half; half /= 2) {
        if (thread < half)
            shared[thread] = combine(shared[thread], shared[thread + half]);
        __syncthreads();
    }
    found = shared[0];
    __syncthreads();
#endif
    return found;
}


KERNEL(reduce, Arguments)
{
    const i64 items = arguments.outputs * arguments.parts, step = (i64)gridDim.x * blockDim.x;
    for (i64 item = (i64)blockIdx.x * blockDim.x + threadIdx.x; item < items; item += step) {
        const i64 output = item % arguments.outputs, part = item / arguments.outputs;
        const Partial found = accumulate(arguments, (Index)output, (Index)part, (Index)arguments.parts);
        if (arguments.parts == 1)
            finish(arguments, output, found);
        else
            ((Partial *)arguments.partial)[item] = found;
    }
}


FUNCTION Partial combined(const Arguments &arguments, i64 output, i64 first, i64 step)
{
    const Partial *const partial = (const Partial *)arguments.partial + output * arguments.output_step;
    Partial found = nothing();
    for (i64 part = first; part < arguments.parts; part += step)
        found = combine(found, partial[part * arguments.partial_step]);
    return found;
}

KERNEL(finish_block, Arguments)
{
    if (IS_IDLE)
        return;
    for (i64 output = blockIdx.x; output < arguments.outputs; output += gridDim.x) {
        const Partial found = in_block(combined(arguments, output, BLOCK_THREAD, BLOCK_THREADS));
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
