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
