typedef u32 Index;
struct Arguments {
    i64 count;
    char *out[2];
    const char *in[2];
    Scalar scalars[1];
    i64 shape[1];
    i64 strides[4][1];
};
enum { EACH = 4 };
struct Loaded { float x0; float x1; };
struct Made { float x0; float x1; };
FUNCTION Loaded load_at(const Arguments &arguments, Index i)
{
    return {Element<float>::load(arguments.in[0] + (i64)i * 4), F16::load(arguments.in[1] + (i64)i * 2)};
}
FUNCTION Made compute(const Arguments &arguments, Index i, const Loaded &loaded)
{
    const float t0 = loaded.x0;
    const double t1 = Element<double>::load(at_scalar(arguments.scalars[0]));
    const float t2 = loaded.x1;
    const float t3 = constant_f32(0x0u);
    const bool t4 = f_greater(t0, t3);
    const float t5 = Cast<float>::of(t1);
    const float t6 = f_multiply(t0, t5);
    const float t7 = f_exp(t0);
    const float t8 = constant_f32(0x3f800000u);
    const float t9 = f_subtract(t7, t8);
    const float t10 = f_where(t4, t6, t9);
    const float t11 = Cast<float>::of(t2);
    const float t12 = f_floor_divide(t10, t11);
    return {t10, t12};
}
FUNCTION void store_at(const Arguments &arguments, Index i, const Made &made)
{
    Element<float>::store(arguments.out[0] + (i64)i * 4, made.x0);
    Element<float>::store(arguments.out[1] + (i64)i * 4, made.x1);
}

KERNEL(elementwise, Arguments)
{
    const Index count = (Index)arguments.count, tile = (Index)blockDim.x * EACH;
    for (Index first = blockIdx.x * tile + threadIdx.x; first < count; first += gridDim.x * tile) {
        if (first + (EACH - 1) * blockDim.x < count) {
            Loaded loaded[EACH];
            Made made[EACH];
#pragma unroll
            for (int k = 0; k < EACH; k++)
                loaded[k] = load_at(arguments, first + k * blockDim.x);
#pragma unroll
            for (int k = 0; k < EACH; k++)
                made[k] = compute(arguments, first + k * blockDim.x, loaded[k]);
#pragma unroll
            for (int k = 0; k < EACH; k++)
                store_at(arguments, first + k * blockDim.x, made[k]);
        } else {
            for (Index i = first; i < count; i += blockDim.x)
                store_at(arguments, i, compute(arguments, i, load_at(arguments, i)));
        }
    }
}
