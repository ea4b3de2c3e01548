// What a kernel of CUDA finds when a C++ compiler makes it for a processor: on the CPU backend, and on the stand-in.
//
// Blocks and threads of a launch run one after another, so there is neither shared memory nor
// `__syncthreads`: a kernel that uses them does not compile here, instead of computing something else. The
// refusals at the end of this file say so.
#pragma once

#include <math.h>

#include "special.h"

#define STAND_IN 1
#define __CUDACC_RTC__ 1
#define __CUDA_ARCH__ 900

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(size) __attribute__((aligned(size)))
#define __ldg(pointer) (*(pointer))

typedef __SIZE_TYPE__ size_t;

#define STAND_IN_VECTORS(type, name)                                       \
    struct name##2 {                                                       \
        type x, y;                                                         \
    };                                                                     \
    struct name##3 {                                                       \
        type x, y, z;                                                      \
    };                                                                     \
    struct name##4 {                                                       \
        type x, y, z, w;                                                   \
    };                                                                     \
    static inline name##2 make_##name##2(type x, type y) {                 \
        return {x, y};                                                     \
    }                                                                      \
    static inline name##3 make_##name##3(type x, type y, type z) {         \
        return {x, y, z};                                                  \
    }                                                                      \
    static inline name##4 make_##name##4(type x, type y, type z, type w) { \
        return {x, y, z, w};                                               \
    }

STAND_IN_VECTORS(int, int)
STAND_IN_VECTORS(unsigned, uint)
STAND_IN_VECTORS(long long, longlong)
STAND_IN_VECTORS(unsigned long long, ulonglong)
STAND_IN_VECTORS(float, float)
STAND_IN_VECTORS(double, double)

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

static thread_local uint3 threadIdx;
static thread_local uint3 blockIdx;
static thread_local dim3 blockDim;
static thread_local dim3 gridDim;
static const int warpSize = 32;

namespace stand_in {

// Thrown by a kernel: the launch ends with this error.
struct failure {
    int code;
};

template <unsigned... Numbers> struct indices {};

// The sizes of a kernel's parameters, ended by 0.
template <typename Function> struct sizes;

template <typename... Parameters> struct sizes<void (*)(Parameters...)> {
    size_t values[sizeof...(Parameters) + 1] = {sizeof(Parameters)..., 0};
};

template <auto function, typename... Parameters, unsigned... Numbers>
int run(void (*)(Parameters...), indices<Numbers...>, [[maybe_unused]] void **parameters,
        const unsigned *shape) {
    gridDim = dim3(shape[0], shape[1], shape[2]);
    blockDim = dim3(shape[3], shape[4], shape[5]);
    try {
        for (unsigned z = 0; z < shape[2]; z++)
            for (unsigned y = 0; y < shape[1]; y++)
                for (unsigned x = 0; x < shape[0]; x++) {
                    blockIdx = {x, y, z};
                    for (unsigned k = 0; k < shape[5]; k++)
                        for (unsigned j = 0; j < shape[4]; j++)
                            for (unsigned i = 0; i < shape[3]; i++) {
                                threadIdx = {i, j, k};
                                function(*static_cast<Parameters *>(parameters[Numbers])...);
                            }
                }
    } catch (const failure &error) {
        return error.code;
    }
    return 0;
}

template <auto function, typename... Parameters>
int run(void (*pointer)(Parameters...), void **parameters, const unsigned *shape) {
    return run<function>(pointer, indices<__integer_pack(sizeof...(Parameters))...>(), parameters, shape);
}

template <typename To, typename From> static inline To bits(From from) {
    To to;
    static_assert(sizeof to == sizeof from);
    __builtin_memcpy(&to, &from, sizeof to);
    return to;
}

} // namespace stand_in

// Lets the driver launch a function under a name.
#define STAND_IN_EXPORT(name, ...)                                             \
    extern "C" {                                                               \
    int stand_in_##name(void **parameters, const unsigned *shape) {            \
        return stand_in::run<(__VA_ARGS__)>((__VA_ARGS__), parameters, shape); \
    }                                                                          \
    stand_in::sizes<decltype(__VA_ARGS__)> stand_in_##name##_params;           \
    }

// Our own kernels are defined by this macro, whose usual definition makes them plain CUDA kernels.
#define KERNEL(name, Arguments)                      \
    extern "C" void name(const Arguments arguments); \
    STAND_IN_EXPORT(name, &name)                     \
    extern "C" void name(const Arguments arguments)

[[noreturn]] static inline void __trap() {
    throw stand_in::failure{719};
}

#define assert(condition) ((condition) ? (void)0 : throw stand_in::failure{710})

extern "C" int printf(const char *, ...);

// A handle is the address of the condition's value.
static inline void cudaGraphSetConditional(unsigned long long handle, unsigned value) {
    __atomic_store_n((unsigned *)handle, value, __ATOMIC_RELEASE);
}

static inline int atomicCAS(int *place, int old, int number) {
    __atomic_compare_exchange_n(place, &old, number, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return old;
}

static inline void __threadfence() {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
static inline void __threadfence_block() {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
static inline void __threadfence_system() {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

template <typename T> static inline T min(T a, T b) {
    return b < a ? b : a;
}
template <typename T> static inline T max(T a, T b) {
    return a < b ? b : a;
}
static inline float min(float a, float b) {
    return fminf(a, b);
}
static inline float max(float a, float b) {
    return fmaxf(a, b);
}
static inline double min(double a, double b) {
    return fmin(a, b);
}
static inline double max(double a, double b) {
    return fmax(a, b);
}

// Macros, and functions behind them, since newer C libraries have functions of these names too.
#define __expf(x) expf(x)
#define __logf(x) logf(x)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __powf(x, y) powf(x, y)
#define rsqrtf(x) stand_in::reciprocal_root((float)(x))
#define rsqrt(x) stand_in::reciprocal_root(x)
#define sinpif(x) ((float)stand_in::sine_of_pi(x))
#define cospif(x) ((float)stand_in::cosine_of_pi(x))
#define sinpi(x) stand_in::sine_of_pi(x)
#define cospi(x) stand_in::cosine_of_pi(x)
#define sincospif(x, sine, cosine) ((void)(*(sine) = sinpif(x), *(cosine) = cospif(x)))
#define sincospi(x, sine, cosine) ((void)(*(sine) = sinpi(x), *(cosine) = cospi(x)))

namespace stand_in {
static inline float reciprocal_root(float x) {
    return 1.0f / sqrtf(x);
}
static inline double reciprocal_root(double x) {
    return 1.0 / sqrt(x);
}
static inline double sine_of_pi(double x) {
    return sin(M_PI * remainder(x, 2.0));
}
static inline double cosine_of_pi(double x) {
    return cos(M_PI * remainder(x, 2.0));
}
} // namespace stand_in

static inline float __fdividef(float x, float y) {
    return x / y;
}
static inline float __fadd_rn(float x, float y) {
    return x + y;
}
static inline float __fsub_rn(float x, float y) {
    return x - y;
}
static inline float __fmul_rn(float x, float y) {
    return x * y;
}
static inline float __fdiv_rn(float x, float y) {
    return x / y;
}
static inline float __fsqrt_rn(float x) {
    return sqrtf(x);
}
static inline float __fmaf_rn(float x, float y, float z) {
    return fmaf(x, y, z);
}
static inline double __dadd_rn(double x, double y) {
    return x + y;
}
static inline double __dsub_rn(double x, double y) {
    return x - y;
}
static inline double __dmul_rn(double x, double y) {
    return x * y;
}
static inline double __ddiv_rn(double x, double y) {
    return x / y;
}
static inline double __dsqrt_rn(double x) {
    return sqrt(x);
}
static inline double __fma_rn(double x, double y, double z) {
    return fma(x, y, z);
}

static inline unsigned __float_as_uint(float x) {
    return stand_in::bits<unsigned>(x);
}
static inline int __float_as_int(float x) {
    return stand_in::bits<int>(x);
}
static inline float __uint_as_float(unsigned x) {
    return stand_in::bits<float>(x);
}
static inline float __int_as_float(int x) {
    return stand_in::bits<float>(x);
}
static inline long long __double_as_longlong(double x) {
    return stand_in::bits<long long>(x);
}
static inline double __longlong_as_double(long long x) {
    return stand_in::bits<double>(x);
}
static inline float __int2float_rn(int x) {
    return (float)x;
}
static inline float __uint2float_rn(unsigned x) {
    return (float)x;
}
static inline float __double2float_rn(double x) {
    return (float)x;
}
static inline int __float2int_rn(float x) {
    return (int)rintf(x);
}
static inline long long __double2ll_rn(double x) {
    return (long long)rint(x);
}

static inline int __popc(unsigned x) {
    return __builtin_popcount(x);
}
static inline int __popcll(unsigned long long x) {
    return __builtin_popcountll(x);
}
static inline int __clz(int x) {
    return x ? __builtin_clz((unsigned)x) : 32;
}
static inline int __clzll(long long x) {
    return x ? __builtin_clzll((unsigned long long)x) : 64;
}
static inline int __ffs(int x) {
    return __builtin_ffs(x);
}
static inline int __ffsll(long long x) {
    return __builtin_ffsll(x);
}
static inline unsigned __umulhi(unsigned x, unsigned y) {
    return (unsigned)((unsigned long long)x * y >> 32);
}
static inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
    return (unsigned long long)((unsigned __int128)x * y >> 64);
}

// Launches on different streams run at once, so atomics are atomic.
template <typename T, typename Operation> static inline T stand_in_update(T *address, Operation operation) {
    T before, after;
    __atomic_load(address, &before, __ATOMIC_SEQ_CST);
    do
        after = operation(before);
    while (!__atomic_compare_exchange(address, &before, &after, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    return before;
}

template <typename T> struct stand_in_same {
    typedef T type;
};

#define STAND_IN_ATOMIC(name, expression)                                                           \
    template <typename T> static inline T name(T *address, typename stand_in_same<T>::type value) { \
        return stand_in_update(address, [value](T old) -> T { return expression; });                \
    }

STAND_IN_ATOMIC(atomicAdd, old + value)
STAND_IN_ATOMIC(atomicSub, old - value)
STAND_IN_ATOMIC(atomicMax, old < value ? value : old)
STAND_IN_ATOMIC(atomicMin, value < old ? value : old)
STAND_IN_ATOMIC(atomicAnd, old &value)
STAND_IN_ATOMIC(atomicOr, old | value)
STAND_IN_ATOMIC(atomicXor, old ^ value)
STAND_IN_ATOMIC(atomicExch, value)

template <typename T>
static inline T atomicCAS(T *address, typename stand_in_same<T>::type compare,
                          typename stand_in_same<T>::type value) {
    return stand_in_update(address, [compare, value](T old) -> T { return old == compare ? value : old; });
}

// What is not there says so in one sentence, at the line of the kernel.
#define STAND_IN_PRAGMA(text) _Pragma(#text)
#define STAND_IN_REFUSES(text) STAND_IN_PRAGMA(GCC error text)
#define STAND_IN_NO_WARP STAND_IN_REFUSES("the stand-in driver runs threads one by one, and has no such call of a warp")

#define __shared__ STAND_IN_REFUSES("the stand-in driver runs threads one by one, and has no shared memory")
#define __syncthreads() STAND_IN_REFUSES("the stand-in driver runs threads one by one, and has no __syncthreads")
#define __syncwarp(...) STAND_IN_NO_WARP
#define __shfl_sync(...) STAND_IN_NO_WARP 0
#define __shfl_up_sync(...) STAND_IN_NO_WARP 0
#define __shfl_down_sync(...) STAND_IN_NO_WARP 0
#define __shfl_xor_sync(...) STAND_IN_NO_WARP 0
#define __ballot_sync(...) STAND_IN_NO_WARP 0
#define __any_sync(...) STAND_IN_NO_WARP 0
#define __all_sync(...) STAND_IN_NO_WARP 0

// The headers of half precision are full of PTX: they count as read.
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define __half STAND_IN_REFUSES("the stand-in driver has no half precision in kernels") float
#define __nv_bfloat16 STAND_IN_REFUSES("the stand-in driver has no half precision in kernels") float
