// What a source for GPUs finds when a C++ compiler makes it for processors. There is no header of the C library, so
// that it is compiled in a third of the time, and by no version of one.
#ifdef __AVX512FP16__
// With these instructions g++ 12 drops the conversions of neighbours to float16 and back, so that a step is not rounded.
#pragma GCC target("no-avx512fp16")
#endif
#define PROCESSOR 1
#define STAND_IN 1
#define __device__ __attribute__((always_inline))

#define OF_ONE(name)                      \
    extern "C" double name(double) noexcept; \
    extern "C" float name##f(float) noexcept;
#define OF_TWO(name)                              \
    extern "C" double name(double, double) noexcept; \
    extern "C" float name##f(float, float) noexcept;
OF_ONE(fabs) OF_ONE(floor) OF_ONE(ceil) OF_ONE(trunc) OF_ONE(rint) OF_ONE(sqrt) OF_ONE(cbrt) OF_ONE(exp) OF_ONE(exp2)
OF_ONE(expm1) OF_ONE(log) OF_ONE(log2) OF_ONE(log10) OF_ONE(log1p) OF_ONE(sin) OF_ONE(cos) OF_ONE(tan) OF_ONE(asin)
OF_ONE(acos) OF_ONE(atan) OF_ONE(sinh) OF_ONE(cosh) OF_ONE(tanh) OF_ONE(asinh) OF_ONE(acosh) OF_ONE(atanh) OF_ONE(erf)
OF_ONE(erfc) OF_ONE(erfcx) OF_ONE(erfinv) OF_ONE(erfcinv) OF_ONE(tgamma) OF_ONE(lgamma) OF_ONE(cyl_bessel_i0)
OF_ONE(cyl_bessel_i1)
OF_TWO(fmod) OF_TWO(pow) OF_TWO(atan2) OF_TWO(hypot) OF_TWO(copysign) OF_TWO(nextafter)
extern "C" double fma(double, double, double) noexcept;
extern "C" float fmaf(float, float, float) noexcept;
static inline float fmod(float a, float b) { return fmodf(a, b); }
static inline float copysign(float a, float b) { return copysignf(a, b); }
static inline float floor(float a) { return floorf(a); }

static inline int atomicCAS(int *place, int old, int number)
{
    __atomic_compare_exchange_n(place, &old, number, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return old;
}
//PRELUDE

static inline i64 least(i64 a, i64 b) { return a < b ? a : b; }
static inline i64 most(i64 a, i64 b) { return a > b ? a : b; }
// Whether an index is outside of an array, where those below zero count from the end.
static inline bool is_outside(i64 index, i64 extent) { return (u64)index + (u64)extent >= 2 * (u64)extent; }

#ifdef __x86_64__
// What is no number of the other type comes out as NumPy's: by the instruction that its C compiler takes, which makes
// the least integer of all that it does not hold. C leaves this undefined, and a compiler that knows the number, as it
// does a constant, makes another one. So the least integer is put in its place first.
template <class Whole, class T> FUNCTION Whole whole_of(T x)
{
    const T end = (T)(1ull << (8 * sizeof(Whole) - 1));
    return (Whole)f_where(x >= -end && x < end, x, -end);
}
#define BY_WAY_OF(To, Way)                                                        \
    template <> struct Cast<To> {                                                 \
        template <class From> FUNCTION To of(From x) { return (To)x; }            \
        FUNCTION To of(double x) { return (To)whole_of<Way>(x); }                 \
        FUNCTION To of(float x) { return (To)whole_of<Way>(x); }                  \
    };
BY_WAY_OF(i8, i32) BY_WAY_OF(u8, i32) BY_WAY_OF(i16, i32) BY_WAY_OF(u16, i32) BY_WAY_OF(u32, i64)
BY_WAY_OF(i32, i32) BY_WAY_OF(i64, i64)
template <class T> FUNCTION u64 wide_of(T x)
{
    const T half = (T)9223372036854775808.0;
    return x >= half ? (u64)whole_of<i64>(x - half) ^ 1ull << 63 : (u64)whole_of<i64>(x);
}
template <> struct Cast<u64> {
    template <class From> FUNCTION u64 of(From x) { return (u64)x; }
    FUNCTION u64 of(double x) { return wide_of(x); }
    FUNCTION u64 of(float x) { return wide_of(x); }
};
#endif
