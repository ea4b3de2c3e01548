// The beginning of every source.

// Threads of a warp. In the stand-in they run one after another.
#ifndef STAND_IN
#define LANES 32
#define KERNEL(name, Arguments) extern "C" __global__ void name(const Arguments arguments)
#else
#define LANES 1
#endif

typedef long long i64;
typedef unsigned long long u64;

// In steps of the grid: no more blocks are launched than the device runs at once.
#define EACH(index, count) \
    for (i64 index = (i64)blockIdx.x * blockDim.x + threadIdx.x; index < (count); index += (i64)gridDim.x * blockDim.x)

// Whole numbers of 64 bits, or of 32.
__device__ i64 whole_at(const char *array, i64 place, bool is_wide)
{
    return is_wide ? ((const i64 *)array)[place] : (i64)((const int *)array)[place];
}

__device__ void put_whole(char *array, i64 place, i64 number, bool is_wide)
{
    if (is_wide)
        ((i64 *)array)[place] = number;
    else
        ((int *)array)[place] = (int)number;
}

// Combines a value of each thread of a warp with those of the others.
#if LANES > 1
#define OVER_LANES(value, expression)                                   \
    for (int step = LANES / 2; step; step /= 2) {                       \
        const auto other = __shfl_xor_sync(0xffffffffu, value, step);   \
        value = expression;                                             \
    }
#else
#define OVER_LANES(value, expression)
#endif
