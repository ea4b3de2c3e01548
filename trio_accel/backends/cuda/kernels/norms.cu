// What vectors' routines of cuBLAS leave to do: the index of the largest element, which they count from 1; and
// the norm of a vector, once more where cuBLAS's is so small that it may be wrong: denormal numbers are zeros to it.

#include "halves.cuh"

#ifndef STAND_IN
#define THREADS 1024
#undef KERNEL
#define KERNEL(name, Arguments) extern "C" __global__ void __launch_bounds__(THREADS) name(const Arguments arguments)
#else
// Threads run one after another there, and the first one does it all.
#define THREADS 1
#endif

enum Type { BFLOAT16, FLOAT32, FLOAT64, COMPLEX64, COMPLEX128 };

struct NormArguments {
    const char *x;
    char *out;
    i64 count, step;
    int type;
};

// About the root of the smallest normal number over the rounding error: what is lost of a longer vector's squares
// does not count.
__device__ double least_of(Bfloat) { return 0x1p-51; }
__device__ double least_of(float) { return 0x1p-51; }
__device__ double least_of(double) { return 0x1p-484; }

// A double holds the squares of all smaller types. Doubles are multiplied by this; below, they are in range.
__device__ double scale_of(Bfloat) { return 1; }
__device__ double scale_of(float) { return 1; }
__device__ double scale_of(double) { return 0x1p600; }

// The sum over all threads, in the same order every time; the first thread has it.
__device__ double summed(double sum)
{
#if THREADS > 1
    __shared__ double sums[THREADS];
    sums[threadIdx.x] = sum;
    for (int half = THREADS / 2; half; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half)
            sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    sum = sums[0];
#endif
    return sum;
}

template <typename Real, int PARTS> __device__ void compute(const NormArguments &arguments)
{
    Real *out = (Real *)arguments.out;
    if (!(wide(*out) < least_of(Real())))
        return;
    const Real *x = (const Real *)arguments.x;
    const double scale = scale_of(Real());
    double sum = 0;
    for (i64 place = threadIdx.x; place < arguments.count; place += THREADS)
        for (int part = 0; part < PARTS; part++) {
            const double number = wide(x[PARTS * place * arguments.step + part]) * scale;
            sum += number * number;
        }
    sum = summed(sum);
    if (threadIdx.x == 0)
        narrow(sqrt(sum) / scale, *out);
}

// One block, behind cuBLAS's routine: nearly always it looks at the result and is done. A vector of zeros is read
// from end to end by one multiprocessor, at a small part of the device's speed.
KERNEL(norm_again, NormArguments)
{
    if (threadIdx.x >= THREADS)
        return;
    switch (arguments.type) {
    case BFLOAT16: compute<Bfloat, 1>(arguments); break;
    case FLOAT32: compute<float, 1>(arguments); break;
    case FLOAT64: compute<double, 1>(arguments); break;
    case COMPLEX64: compute<float, 2>(arguments); break;
    default: compute<double, 2>(arguments); break;
    }
}

struct IndexArguments {
    const i64 *found;
    i64 *out;
    i64 count;
};

// Of a vector with NaNs, what was found may be no index.
KERNEL(index_from_zero, IndexArguments)
{
    if (blockIdx.x || threadIdx.x)
        return;
    const i64 index = *arguments.found - 1;
    *arguments.out = index < 0 ? 0 : index < arguments.count ? index : arguments.count - 1;
}
