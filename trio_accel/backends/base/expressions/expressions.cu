// What the kernels of expressions are made of: NumPy's functions, for the types that they are computed in.
//
// float16 and bfloat16 are computed as NumPy computes them: in float32, rounded after each step. A value of theirs
// is a float that has been rounded.

#ifdef STAND_IN
// Threads of a block run one after another: the first one does the work of all.
#define BLOCK_THREAD 0
#define BLOCK_THREADS 1
#define IS_IDLE (threadIdx.x != 0)
#else
#define KERNEL(name, Arguments) extern "C" __global__ void name(const Arguments arguments)
#define BLOCK_THREAD ((int)threadIdx.x)
#define BLOCK_THREADS ((int)blockDim.x)
#define IS_IDLE false
#endif
#define FUNCTION __device__ static inline

typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef int i32;
typedef unsigned u32;
typedef long long i64;
typedef unsigned long long u64;

template <class T> struct cx {
    T re, im;
};
typedef cx<float> c64;
typedef cx<double> c128;

template <class To, class From> FUNCTION To bits_as(From from)
{
    static_assert(sizeof(To) == sizeof(From), "of one size");
    union { From from; To to; } both;
    both.from = from;
    return both.to;
}

FUNCTION double constant_f64(u64 bits) { return bits_as<double>(bits); }
FUNCTION float constant_f32(u32 bits) { return bits_as<float>(bits); }

// ---- float16 and bfloat16

// The nearest float16, of two equally near ones the even one.
FUNCTION float to_f16(double value)
{
    const double size = fabs(value);
    if (!(size < 65520.0))
        return size != size ? (float)value : bits_as<float>(value < 0 ? 0xff800000u : 0x7f800000u);
    int exponent = (int)(bits_as<u64>(size) >> 52) - 1023;
    if (exponent < -14)
        exponent = -14;
    const double step = bits_as<double>((u64)(exponent - 10 + 1023) << 52);
    return (float)copysign(rint(size / step) * step, value);
}

#if defined(PROCESSOR) && defined(__FLT16_MAX__)
FUNCTION float from_f16(u16 code) { return (float)bits_as<_Float16>(code); }
FUNCTION u16 f16_code(float value) { return bits_as<u16>((_Float16)value); }
FUNCTION float to_f16(float value) { return (float)(_Float16)value; }
#elif defined(STAND_IN) || defined(__HIP__)
FUNCTION float from_f16(u16 code)
{
    const u32 sign = (u32)(code & 0x8000) << 16, exponent = code >> 10 & 31, fraction = code & 1023;
    if (exponent == 31)
        return bits_as<float>(sign | 0x7f800000u | fraction << 13);
    if (exponent)
        return bits_as<float>(sign | (exponent + 112) << 23 | fraction << 13);
    const float small = (float)fraction * 5.9604644775390625e-08f;
    return sign ? -small : small;
}

FUNCTION float to_f16(float value) { return to_f16((double)value); }

// Of a value that is one.
FUNCTION u16 f16_code(float value)
{
    const u32 bits = bits_as<u32>(value), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
    if (size >= 0x7f800000u)
        return (u16)(sign | 0x7c00u | (size > 0x7f800000u ? 0x200u : 0u));
    if (size < 0x38800000u)
        return (u16)(sign | (u32)(fabsf(value) * 16777216.0f));
    return (u16)(sign | ((size >> 13) - (112u << 10)));
}
#else
// In one instruction: elements of two bytes would take longer than those of four.
FUNCTION float from_f16(u16 code)
{
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(code));
    return value;
}

FUNCTION u16 f16_code(float value)
{
    u16 code;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(code) : "f"(value));
    return code;
}

FUNCTION float to_f16(float value) { return from_f16(f16_code(value)); }
#endif

FUNCTION float from_bf16(u16 code) { return bits_as<float>((u32)code << 16); }

FUNCTION float to_bf16(float value)
{
    const u32 bits = bits_as<u32>(value);
    if (value != value)
        return bits_as<float>((bits & 0x80000000u) | 0x7fc00000u);
    return bits_as<float>((bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u);
}

FUNCTION u16 bf16_code(float value) { return (u16)(bits_as<u32>(value) >> 16); }

// ---- conversions

template <class To> struct Cast {
    template <class From> FUNCTION To of(From x) { return (To)x; }
};
template <> struct Cast<bool> {
    template <class From> FUNCTION bool of(From x) { return x != (From)0; }
    template <class T> FUNCTION bool of(cx<T> x) { return x.re != 0 || x.im != 0; }
};
template <class To> struct Cast<cx<To>> {
    template <class From> FUNCTION cx<To> of(From x) { return {(To)x, (To)0}; }
    template <class From> FUNCTION cx<To> of(cx<From> x) { return {(To)x.re, (To)x.im}; }
};

// ---- whole numbers: what is too large wraps around

template <class T> FUNCTION T f_add(T a, T b) { return (T)((u64)a + (u64)b); }
template <class T> FUNCTION T f_subtract(T a, T b) { return (T)((u64)a - (u64)b); }
template <class T> FUNCTION T f_multiply(T a, T b) { return (T)((u64)a * (u64)b); }
template <class T> FUNCTION T f_negative(T a) { return (T)(0 - (u64)a); }
template <class T> FUNCTION T f_positive(T a) { return a; }
template <class T> FUNCTION T f_stop_gradient(T a) { return a; }
template <class T> FUNCTION T f_conjugate(T a) { return a; }
template <class T> FUNCTION T f_absolute(T a) { return a < (T)0 ? f_negative(a) : a; }
template <class T> FUNCTION T f_sign(T a) { return (T)((a > (T)0) - (a < (T)0)); }
template <class T> FUNCTION T f_square(T a) { return f_multiply(a, a); }
template <class T> FUNCTION T f_floor(T a) { return a; }
template <class T> FUNCTION T f_ceil(T a) { return a; }
template <class T> FUNCTION T f_trunc(T a) { return a; }
template <class T> FUNCTION T f_maximum(T a, T b) { return a > b ? a : b; }
template <class T> FUNCTION T f_minimum(T a, T b) { return a < b ? a : b; }
template <class T> FUNCTION T f_fmax(T a, T b) { return f_maximum(a, b); }
template <class T> FUNCTION T f_fmin(T a, T b) { return f_minimum(a, b); }
template <class T> FUNCTION T f_bitwise_and(T a, T b) { return (T)(a & b); }
template <class T> FUNCTION T f_bitwise_or(T a, T b) { return (T)(a | b); }
template <class T> FUNCTION T f_bitwise_xor(T a, T b) { return (T)(a ^ b); }
template <class T> FUNCTION T f_invert(T a) { return (T)~a; }
// The least number of a signed dtype has no size there, and comes out as NumPy's does.
template <class T> FUNCTION u64 size_of(T a) { return a < (T)0 ? 0 - (u64)a : (u64)a; }
FUNCTION u64 common_divisor(u64 a, u64 b)
{
    while (b) {
        const u64 rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}
template <class T> FUNCTION T f_gcd(T a, T b) { return (T)common_divisor(size_of(a), size_of(b)); }
template <class T> FUNCTION T f_lcm(T a, T b)
{
    const u64 divisor = common_divisor(size_of(a), size_of(b));
    return divisor ? (T)(size_of(a) / divisor * size_of(b)) : (T)0;
}
template <class T> FUNCTION bool f_isnan(T) { return false; }
template <class T> FUNCTION bool f_isinf(T) { return false; }
template <class T> FUNCTION bool f_isfinite(T) { return true; }
FUNCTION bool f_add(bool a, bool b) { return a || b; }
FUNCTION bool f_multiply(bool a, bool b) { return a && b; }
FUNCTION bool f_absolute(bool a) { return a; }
FUNCTION bool f_square(bool a) { return a; }
FUNCTION bool f_invert(bool a) { return !a; }

// By zero it is zero, and what is too large wraps around, as NumPy has them.
template <class T> FUNCTION T f_floor_divide(T a, T b)
{
    if (b == (T)0)
        return (T)0;
    if ((T)-1 < (T)0 && b == (T)-1)
        return f_negative(a);
    const T quotient = (T)(a / b);
    return (T)(quotient - ((a % b != 0) && ((a < (T)0) != (b < (T)0))));
}

template <class T> FUNCTION T f_remainder(T a, T b)
{
    if (b == (T)0 || ((T)-1 < (T)0 && b == (T)-1))
        return (T)0;
    const T rest = (T)(a % b);
    return rest != (T)0 && ((rest < (T)0) != (b < (T)0)) ? (T)(rest + b) : rest;
}

template <class T> FUNCTION T f_fmod(T a, T b)
{
    return b == (T)0 || ((T)-1 < (T)0 && b == (T)-1) ? (T)0 : (T)(a % b);
}

// With a negative exponent the power is rounded towards zero; of zero it is zero.
template <class T> FUNCTION T f_power(T base, T exponent)
{
    if (exponent < (T)0)
        return base == (T)1 || base == (T)-1 ? (exponent & 1 ? base : (T)1) : (T)0;
    T result = (T)1;
    for (u64 left = (u64)exponent; left; left >>= 1) {
        if (left & 1)
            result = f_multiply(result, base);
        base = f_multiply(base, base);
    }
    return result;
}

template <class T> FUNCTION T f_left_shift(T a, T b)
{
    return (u64)b < sizeof(T) * 8 ? (T)((u64)a << (u64)b) : (T)0;
}

template <class T> FUNCTION T f_right_shift(T a, T b)
{
    return (u64)b < sizeof(T) * 8 ? (T)(a >> (u64)b) : (T)(a < (T)0 ? -1 : 0);
}

// ---- comparisons and logic

template <class T> FUNCTION bool f_less(T a, T b) { return a < b; }
template <class T> FUNCTION bool f_less_equal(T a, T b) { return a <= b; }
template <class T> FUNCTION bool f_greater(T a, T b) { return a > b; }
template <class T> FUNCTION bool f_greater_equal(T a, T b) { return a >= b; }
template <class T> FUNCTION bool f_equal(T a, T b) { return a == b; }
template <class T> FUNCTION bool f_not_equal(T a, T b) { return a != b; }
template <class T> FUNCTION bool f_equal(cx<T> a, cx<T> b) { return a.re == b.re && a.im == b.im; }
template <class T> FUNCTION bool f_not_equal(cx<T> a, cx<T> b) { return a.re != b.re || a.im != b.im; }

// Between signed and unsigned 64 bits, exactly.
FUNCTION int order(i64 a, u64 b) { return a < 0 || (u64)a < b ? -1 : (u64)a > b; }
#define MIXED(name, sign)                                                  \
    FUNCTION bool name(i64 a, u64 b) { return order(a, b) sign 0; }        \
    FUNCTION bool name(u64 a, i64 b) { return 0 sign order(b, a); }
MIXED(f_less, <)
MIXED(f_less_equal, <=)
MIXED(f_greater, >)
MIXED(f_greater_equal, >=)
MIXED(f_equal, ==)
MIXED(f_not_equal, !=)

template <class T> FUNCTION bool f_logical_not(T a) { return !Cast<bool>::of(a); }
template <class T> FUNCTION bool f_logical_and(T a, T b) { return Cast<bool>::of(a) && Cast<bool>::of(b); }
template <class T> FUNCTION bool f_logical_or(T a, T b) { return Cast<bool>::of(a) || Cast<bool>::of(b); }
template <class T> FUNCTION bool f_logical_xor(T a, T b) { return Cast<bool>::of(a) != Cast<bool>::of(b); }
template <class T> FUNCTION T f_where(bool condition, T a, T b) { return condition ? a : b; }
#ifdef PROCESSOR
// Choose by bits, because g++ leaves the branches of some choices in a loop, and then makes no vectors of it.
template <class Bits, class T> FUNCTION T where_of(bool condition, T a, T b)
{
    const Bits mask = 0 - (Bits)condition;
    return bits_as<T>((Bits)((bits_as<Bits>(a) & mask) | (bits_as<Bits>(b) & ~mask)));
}
FUNCTION double f_where(bool condition, double a, double b) { return where_of<u64>(condition, a, b); }
FUNCTION float f_where(bool condition, float a, float b) { return where_of<u32>(condition, a, b); }
#endif

// ---- floating numbers

// NumPy's, which is exact where the quotient is nearly a whole number.
template <class T> FUNCTION T quotient_of(T a, T b, T *rest)
{
    T mod = fmod(a, b);
    T quotient = (a - mod) / b;
    if (mod != 0) {
        if ((b < 0) != (mod < 0)) {
            mod += b;
            quotient -= 1;
        }
    } else {
        mod = copysign((T)0, b);
    }
    *rest = mod;
    if (quotient == 0)
        return copysign((T)0, a / b);
    const T whole = floor(quotient);
    return quotient - whole > (T)0.5 ? whole + 1 : whole;
}

#define FLOATING(T, suffix)                                                                         \
    FUNCTION T f_add(T a, T b) { return a + b; }                                                    \
    FUNCTION T f_subtract(T a, T b) { return a - b; }                                               \
    FUNCTION T f_multiply(T a, T b) { return a * b; }                                               \
    FUNCTION T f_divide(T a, T b) { return a / b; }                                                 \
    FUNCTION T f_negative(T a) { return -a; }                                                       \
    FUNCTION T f_absolute(T a) { return fabs##suffix(a); }                                          \
    FUNCTION T f_fabs(T a) { return fabs##suffix(a); }                                              \
    FUNCTION T f_sign(T a) { return a > 0 ? (T)1 : a < 0 ? (T)-1 : a == 0 ? (T)0 : a; }             \
    FUNCTION T f_square(T a) { return a * a; }                                                      \
    FUNCTION T f_reciprocal(T a) { return (T)1 / a; }                                               \
    /* Of zeros with different signs it is the second one, as NumPy's. */                           \
    FUNCTION T f_maximum(T a, T b) { return f_where(a > b || a != a, a, b); }                       \
    FUNCTION T f_minimum(T a, T b) { return f_where(a < b || a != a, a, b); }                       \
    FUNCTION T f_fmax(T a, T b) { return f_where(a > b || b != b, a, b); }                          \
    FUNCTION T f_fmin(T a, T b) { return f_where(a < b || b != b, a, b); }                          \
    FUNCTION bool f_isnan(T a) { return a != a; }                                                   \
    FUNCTION bool f_isinf(T a) { return a == a && a - a != 0; }                                     \
    FUNCTION bool f_isfinite(T a) { return a - a == 0; }                                            \
    FUNCTION bool f_signbit(T a) { return copysign##suffix((T)1, a) < 0; }                          \
    FUNCTION T f_fmod(T a, T b) { return fmod##suffix(a, b); }                                      \
    FUNCTION T f_floor_divide(T a, T b)                                                             \
    {                                                                                               \
        T rest;                                                                                     \
        /* Of infinite numbers the standard has the quotient, and Python what the remainder says. */\
        return b == 0 || f_isinf(a) || f_isinf(b) ? a / b : quotient_of(a, b, &rest);               \
    }                                                                                               \
    FUNCTION T f_remainder(T a, T b)                                                                \
    {                                                                                               \
        T rest;                                                                                     \
        if (b == 0)                                                                                 \
            return fmod##suffix(a, b);                                                              \
        quotient_of(a, b, &rest);                                                                   \
        return rest;                                                                                \
    }                                                                                               \
    FUNCTION T f_power(T a, T b) { return pow##suffix(a, b); }                                      \
    FUNCTION T f_deg2rad(T a) { return a * (T)(3.14159265358979323846 / 180.0); }                   \
    FUNCTION T f_rad2deg(T a) { return a * (T)(180.0 / 3.14159265358979323846); }                   \
    FUNCTION T f_radians(T a) { return f_deg2rad(a); }                                              \
    FUNCTION T f_degrees(T a) { return f_rad2deg(a); }                                              \
    FUNCTION T f_logaddexp(T a, T b)                                                                \
    {                                                                                               \
        if (a == b)                                                                                 \
            return a + (T)0.69314718055994530942;                                                   \
        const T apart = a - b;                                                                      \
        return apart > 0 ? a + log1p##suffix(exp##suffix(-apart))                                   \
                         : apart <= 0 ? b + log1p##suffix(exp##suffix(apart)) : apart;              \
    }                                                                                               \
    FUNCTION T f_arctan2(T a, T b) { return atan2##suffix(a, b); }                                  \
    FUNCTION T f_hypot(T a, T b) { return hypot##suffix(a, b); }                                    \
    FUNCTION T f_copysign(T a, T b) { return copysign##suffix(a, b); }                              \
    FUNCTION T f_nextafter(T a, T b) { return nextafter##suffix(a, b); }                            \
    FUNCTION T fma_of(T a, T b, T c) { return fma##suffix(a, b, c); }                               \
    FUNCTION T f_floor(T a) { return floor##suffix(a); }                                            \
    FUNCTION T f_ceil(T a) { return ceil##suffix(a); }                                              \
    FUNCTION T f_trunc(T a) { return trunc##suffix(a); }                                            \
    FUNCTION T f_rint(T a) { return rint##suffix(a); }                                              \
    FUNCTION T f_sqrt(T a) { return sqrt##suffix(a); }                                              \
    FUNCTION T f_cbrt(T a) { return cbrt##suffix(a); }                                              \
    FUNCTION T f_exp(T a) { return exp##suffix(a); }                                                \
    FUNCTION T f_exp2(T a) { return exp2##suffix(a); }                                              \
    FUNCTION T f_expm1(T a) { return expm1##suffix(a); }                                            \
    FUNCTION T f_log(T a) { return log##suffix(a); }                                                \
    FUNCTION T f_log2(T a) { return log2##suffix(a); }                                              \
    FUNCTION T f_log10(T a) { return log10##suffix(a); }                                            \
    FUNCTION T f_log1p(T a) { return log1p##suffix(a); }                                            \
    FUNCTION T f_sin(T a) { return sin##suffix(a); }                                                \
    FUNCTION T f_cos(T a) { return cos##suffix(a); }                                                \
    FUNCTION T f_tan(T a) { return tan##suffix(a); }                                                \
    FUNCTION T f_arcsin(T a) { return asin##suffix(a); }                                            \
    FUNCTION T f_arccos(T a) { return acos##suffix(a); }                                            \
    FUNCTION T f_arctan(T a) { return atan##suffix(a); }                                            \
    FUNCTION T f_sinh(T a) { return sinh##suffix(a); }                                              \
    FUNCTION T f_cosh(T a) { return cosh##suffix(a); }                                              \
    FUNCTION T f_tanh(T a) { return tanh##suffix(a); }                                              \
    FUNCTION T f_arcsinh(T a) { return asinh##suffix(a); }                                          \
    FUNCTION T f_arccosh(T a) { return acosh##suffix(a); }                                          \
    FUNCTION T f_arctanh(T a) { return atanh##suffix(a); }                                          \
    FUNCTION T f_erf(T a) { return erf##suffix(a); }                                                \
    FUNCTION T f_erfc(T a) { return erfc##suffix(a); }                                              \
    FUNCTION T f_erfcx(T a) { return erfcx##suffix(a); }                                            \
    FUNCTION T f_erfinv(T a) { return erfinv##suffix(a); }                                          \
    FUNCTION T f_erfcinv(T a) { return erfcinv##suffix(a); }                                        \
    FUNCTION T f_tgamma(T a) { return tgamma##suffix(a); }                                          \
    FUNCTION T f_lgamma(T a) { return lgamma##suffix(a); }                                          \
    FUNCTION T f_bessel_i0(T a) { return cyl_bessel_i0##suffix(a); }                                \
    FUNCTION T f_bessel_i1(T a) { return cyl_bessel_i1##suffix(a); }

FLOATING(double, )
FLOATING(float, f)

// The same by the codes of short floating numbers, which are ordered as their sizes are.
FUNCTION u16 code_towards(u16 code, float a, float b)
{
    if (a == 0)
        return (u16)(b < 0 ? 0x8001 : 1);
    return (u16)((a < b) == (a > 0) ? code + 1 : code - 1);
}
FUNCTION float f_nextafter_f16(float a, float b)
{
    return a != a || b != b ? a + b : a == b ? b : from_f16(code_towards(f16_code(a), a, b));
}
FUNCTION float f_nextafter_bf16(float a, float b)
{
    return a != a || b != b ? a + b : a == b ? b : from_bf16(code_towards(bf16_code(a), a, b));
}

// ---- complex numbers

template <class T> FUNCTION T f_real(cx<T> a) { return a.re; }
template <class T> FUNCTION T f_imag(cx<T> a) { return a.im; }
template <class T> FUNCTION cx<T> f_add(cx<T> a, cx<T> b) { return {a.re + b.re, a.im + b.im}; }
template <class T> FUNCTION cx<T> f_subtract(cx<T> a, cx<T> b) { return {a.re - b.re, a.im - b.im}; }
template <class T> FUNCTION cx<T> f_multiply(cx<T> a, cx<T> b)
{
    return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}
template <class T> FUNCTION cx<T> f_negative(cx<T> a) { return {-a.re, -a.im}; }
template <class T> FUNCTION cx<T> f_positive(cx<T> a) { return a; }
template <class T> FUNCTION cx<T> f_conjugate(cx<T> a) { return {a.re, -a.im}; }
template <class T> FUNCTION T f_absolute(cx<T> a) { return f_hypot(a.re, a.im); }
template <class T> FUNCTION cx<T> f_square(cx<T> a) { return f_multiply(a, a); }
template <class T> FUNCTION bool f_isnan(cx<T> a) { return f_isnan(a.re) || f_isnan(a.im); }
template <class T> FUNCTION bool f_isinf(cx<T> a) { return f_isinf(a.re) || f_isinf(a.im); }
template <class T> FUNCTION bool f_isfinite(cx<T> a) { return f_isfinite(a.re) && f_isfinite(a.im); }

// Smith's algorithm, as NumPy has it.
template <class T> FUNCTION cx<T> f_divide(cx<T> a, cx<T> b)
{
    const T re = f_absolute(b.re), im = f_absolute(b.im);
    if (re >= im) {
        if (re == 0 && im == 0)
            return {a.re / re, a.im / re};
        const T ratio = b.im / b.re, scale = (T)1 / (b.re + b.im * ratio);
        return {(a.re + a.im * ratio) * scale, (a.im - a.re * ratio) * scale};
    }
    const T ratio = b.re / b.im, scale = (T)1 / (b.im + b.re * ratio);
    return {(a.re * ratio + a.im) * scale, (a.im * ratio - a.re) * scale};
}

template <class T> FUNCTION cx<T> f_reciprocal(cx<T> a)
{
    if (f_absolute(a.re) >= f_absolute(a.im)) {
        const T ratio = a.im / a.re, below = a.re + a.im * ratio;
        return {(T)1 / below, -ratio / below};
    }
    const T ratio = a.re / a.im, below = a.im + a.re * ratio;
    return {ratio / below, (T)-1 / below};
}
template <class T> FUNCTION cx<T> f_rint(cx<T> a) { return {f_rint(a.re), f_rint(a.im)}; }

template <class T> FUNCTION cx<T> f_sign(cx<T> a)
{
    const T size = f_absolute(a);
    if (size == 0)
        return {(T)0, (T)0};
    if (!f_isinf(size))
        return {a.re / size, a.im / size};
    const T re = f_isinf(a.re) ? f_sign(a.re) : (T)0, im = f_isinf(a.im) ? f_sign(a.im) : (T)0;
    return re != 0 && im != 0 ? cx<T>{size - size, size - size} : cx<T>{re, im};
}

template <class T> FUNCTION cx<T> scaled(cx<T> a, T scale) { return {a.re * scale, a.im * scale}; }
// Numbers whose squares, and these times four, neither are too large nor lose bits.
template <class T> FUNCTION T huge() { return sizeof(T) == 4 ? (T)1e18f : (T)1e153; }
template <class T> FUNCTION T tiny() { return sizeof(T) == 4 ? (T)1e-18f : (T)1e-153; }

// In two steps where the exponential function of the real part alone is too large.
template <class T> FUNCTION cx<T> f_exp(cx<T> a)
{
    const T size = f_exp(a.re);
    if (a.im == 0)
        return {size, a.im};
    const T c = f_cos(a.im), s = f_sin(a.im);
    // Without products of an infinite number, or of none, and zero.
    if (f_isinf(a.re) && f_isnan(c))
        return {size, size == 0 ? f_copysign(size, a.im) : c};
    if (!f_isinf(size) || f_isinf(a.re))
        return {size * c, size * s};
    const T half = f_exp((T)0.5 * a.re);
    return {half * c * half, half * s * half};
}
template <class T> FUNCTION cx<T> f_exp2(cx<T> a) { return f_exp(scaled(a, (T)0.69314718055994530942)); }

template <class T> FUNCTION cx<T> f_expm1(cx<T> a)
{
    // The standard has 0 of -0, too.
    if (a.im == 0)
        return {f_expm1(a.re) + (T)0, a.im};
    const cx<T> whole = f_exp(a);
    if (!f_isfinite(a) || f_absolute(a.re) > 1)
        return {whole.re - 1, whole.im};
    const T s = f_sin((T)0.5 * a.im);
    return {f_expm1(a.re) * f_cos(a.im) - 2 * s * s, whole.im};
}

// a * a + b * b + c where the first and the last nearly cancel: of squares, the bits that are lost are added last.
template <class T> FUNCTION T sum_of_squares(T a, T b, T c)
{
    const T first = fma_of(a, a, (T)0), second = fma_of(b, b, (T)0);
    return (first + c) + second + (fma_of(a, a, -first) + fma_of(b, b, -second));
}

template <class T> FUNCTION cx<T> f_log(cx<T> a)
{
    T big = f_absolute(a.re), small = f_absolute(a.im);
    if (big < small) {
        const T other = big;
        big = small;
        small = other;
    }
    T size;
    if (big > (T)0.5 && big < (T)2)
        // Near the unit circle the logarithm of the size is nearly zero: all bits of the squares count.
        size = (T)0.5 * f_log1p(sum_of_squares(big, small, (T)-1));
    else if (big < tiny<T>() && big > 0)
        size = f_log(f_hypot(big * huge<T>(), small * huge<T>())) - f_log(huge<T>());
    else if (big > huge<T>())
        size = f_log(f_hypot(big * tiny<T>(), small * tiny<T>())) - f_log(tiny<T>());
    else
        size = f_log(f_hypot(big, small));
    return {size, f_arctan2(a.im, a.re)};
}
template <class T> FUNCTION cx<T> f_log2(cx<T> a) { return scaled(f_log(a), (T)1.44269504088896340736); }
template <class T> FUNCTION cx<T> f_log10(cx<T> a) { return scaled(f_log(a), (T)0.43429448190325182765); }

// Of small numbers without the sum with one, which would lose them.
template <class T> FUNCTION cx<T> f_log1p(cx<T> a)
{
    const T more = a.re + 1;
    if (f_absolute(a.re) < (T)0.5 && f_absolute(a.im) < (T)0.5)
        return {(T)0.5 * f_log1p(sum_of_squares(a.im, a.re, 2 * a.re)), f_arctan2(a.im, more)};
    return f_log(cx<T>{more, a.im});
}

template <class T> FUNCTION cx<T> f_sqrt(cx<T> a)
{
    if (a.re == 0 && a.im == 0)
        return {(T)0, a.im};
    if (f_isinf(a.im))
        return {f_absolute(a.im), a.im};
    if (f_isinf(a.re))
        return a.re > 0 ? cx<T>{a.re, f_isnan(a.im) ? a.im : f_copysign((T)0, a.im)}
                        : cx<T>{f_isnan(a.im) ? a.im : (T)0, f_copysign(-a.re, a.im)};
    // By powers of four, whose roots are exact: so it stays finite, and keeps its bits.
    const T size = f_absolute(a.re) + f_absolute(a.im), one = sizeof(T) == 4 ? (T)4294967296.0 : (T)1.157920892373162e77;
    const T root = size > huge<T>() ? one : size < tiny<T>() ? 1 / one : (T)1;
    a = scaled(a, 1 / root / root);
    const T half = f_sqrt((f_absolute(a.re) + f_hypot(a.re, a.im)) * (T)0.5), rest = a.im / (2 * half);
    return scaled(a.re >= 0 ? cx<T>{half, rest} : cx<T>{f_absolute(rest), f_copysign(half, a.im)}, root);
}

// Hyperbolic sine and cosine are half of the exponential function far out, where it may be too large alone.
template <class T> FUNCTION T far() { return sizeof(T) == 4 ? (T)11 : (T)22; }
template <class T> FUNCTION cx<T> half_exp(cx<T> a)
{
    return scaled(f_exp(cx<T>{f_absolute(a.re) - 1, a.im}), (T)1.35914091422952261768);
}

// On the axes without products of an infinite number, or of none, and zero.
template <class T> FUNCTION cx<T> f_sinh(cx<T> a)
{
    if (a.im == 0)
        return {f_sinh(a.re), a.im};
    if (a.re == 0 || f_isinf(a.re)) {
        const T c = f_cos(a.im), s = f_sin(a.im);
        return {f_isnan(c) ? a.re : a.re * c, a.re == 0 ? s : f_absolute(a.re) * s};
    }
    if (f_absolute(a.re) < far<T>())
        return {f_sinh(a.re) * f_cos(a.im), f_cosh(a.re) * f_sin(a.im)};
    const cx<T> whole = half_exp(a);
    return {a.re < 0 ? -whole.re : whole.re, whole.im};
}
template <class T> FUNCTION cx<T> f_cosh(cx<T> a)
{
    if (a.im == 0)
        return {f_cosh(a.re), f_isnan(a.re) ? a.im : a.im * f_copysign((T)1, a.re)};
    if (a.re == 0 || f_isinf(a.re)) {
        const T c = f_cos(a.im), s = f_sin(a.im);
        if (a.re == 0)
            return {c, f_isnan(s) ? a.re : a.re * s};
        return {f_absolute(a.re) * (f_isnan(c) ? (T)1 : c), a.re * s};
    }
    if (f_absolute(a.re) < far<T>())
        return {f_cosh(a.re) * f_cos(a.im), f_sinh(a.re) * f_sin(a.im)};
    const cx<T> whole = half_exp(a);
    return {whole.re, a.re < 0 ? -whole.im : whole.im};
}
template <class T> FUNCTION cx<T> f_sin(cx<T> a)
{
    const cx<T> turned = f_sinh(cx<T>{-a.im, a.re});
    return {turned.im, -turned.re};
}
template <class T> FUNCTION cx<T> f_cos(cx<T> a) { return f_cosh(cx<T>{-a.im, a.re}); }

// Kahan's formula; far out it is one of the two signs.
template <class T> FUNCTION cx<T> f_tanh(cx<T> a)
{
    if (a.im == 0)
        return {f_tanh(a.re), a.im};
    const T t = f_tan(a.im);
    if (a.re == 0)
        return {a.re, t};
    if (f_absolute(a.re) >= far<T>()) {
        const T c = f_cos(a.im), s = f_sin(a.im), small = f_exp((T)-2 * f_absolute(a.re));
        if (f_isinf(a.re))
            return {f_copysign((T)1, a.re), f_copysign((T)0, a.im)};
        return {f_isnan(c) ? c : f_copysign((T)1, a.re), 4 * s * c * small};
    }
    const T beta = 1 + t * t, s = f_sinh(a.re), rho = f_sqrt(1 + s * s), below = 1 + beta * s * s;
    return {beta * rho * s / below, t / below};
}
template <class T> FUNCTION cx<T> f_tan(cx<T> a)
{
    const cx<T> turned = f_tanh(cx<T>{-a.im, a.re});
    return {turned.im, -turned.re};
}

// The inverse functions, after Hull, Fairgrieve and Tang (1997), "Implementing the complex arcsine and arccosine
// functions using exception handling": of a number in the first quadrant the real parts of arcsine and arccosine, and
// their imaginary part. complex64 is computed in double: what float would lose would cost more code than time.
struct Arcs {
    double sine, cosine, imaginary;
};

// The imaginary part without cancellation near the real axis, between the branch points and beyond.
FUNCTION double arc_height(double x, double y, double r, double s, double a)
{
    if (a > 1.5)
        return log(a + sqrt(a * a - 1));
    const double beside = x < 1 ? y * y / (s + (1 - x)) : s + (x - 1);
    const double more = 0.5 * (y * y / (r + (x + 1)) + beside);
    return log1p(more + sqrt(more * (a + 1)));
}

FUNCTION Arcs arcs_of(double x, double y)
{
    const double ln2 = 0.69314718055994530942, half_pi = 1.57079632679489661923, epsilon = 1.2e-16;
    if (f_isnan(x) || f_isnan(y)) {
        const double none = x + y;
        return {x == 0 ? 0 : none, x == 0 ? half_pi : none, f_isinf(x) || f_isinf(y) ? f_fmax(x, y) : none};
    }
    if (x > 1e150 || y > 1e150) {
        const double scale = x > y ? x : y;
        const double size = f_isinf(scale) ? scale : ln2 + log(scale) + log(hypot(x / scale, y / scale));
        return {atan2(x, y), atan2(y, x), size};
    }
    if (y <= epsilon * fabs(x - 1)) {
        // On the real axis, or so near that y does not count beside it.
        if (x < 1)
            return {asin(x), acos(x), y / sqrt((1 - x) * (1 + x))};
        const double beyond = sqrt((x - 1) * (x + 1));
        return {half_pi, y == 0 ? 0 : y / beyond, log1p((x - 1) + beyond)};
    }
    // Here x is 1: by the step from one number to the next, y would be too large otherwise.
    if (y < 1e-150)
        return {half_pi - sqrt(y), sqrt(y), sqrt(y)};
    const double r = hypot(x + 1, y), s = hypot(x - 1, y), a = 0.5 * (r + s), ratio = x / a;
    const double height = arc_height(x, y, r, s, a);
    if (ratio <= 0.6417)
        return {asin(ratio), acos(ratio), height};
    // The root of a * a - x * x.
    const double apart = x <= 1 ? sqrt(0.5 * (a + x) * (y * y / (r + (x + 1)) + (s + (1 - x))))
                                : y * sqrt(0.5 * ((a + x) / (r + (x + 1)) + (a + x) / (s + (x - 1))));
    return {atan2(x, apart), atan2(apart, x), height};
}

FUNCTION c128 f_arcsin(c128 a)
{
    const Arcs arcs = arcs_of(fabs(a.re), fabs(a.im));
    return {copysign(arcs.sine, a.re), copysign(arcs.imaginary, a.im)};
}
FUNCTION c128 f_arccos(c128 a)
{
    const Arcs arcs = arcs_of(fabs(a.re), fabs(a.im));
    const double re = f_signbit(a.re) ? 3.14159265358979323846 - arcs.cosine : arcs.cosine;
    return {re, copysign(arcs.imaginary, -copysign(1.0, a.im))};
}
FUNCTION c128 f_arcsinh(c128 a)
{
    const c128 turned = f_arcsin(c128{-a.im, a.re});
    return {turned.im, -turned.re};
}
FUNCTION c128 f_arccosh(c128 a)
{
    const c128 turned = f_arccos(a);
    return {fabs(turned.im), copysign(turned.re, a.im)};
}

FUNCTION c128 f_arctanh(c128 a)
{
    const double x = fabs(a.re), y = fabs(a.im), quarter = 0.78539816339744830962;
    double re, im;
    if (x > 1e16 || (y > 1e16 && x == x) || f_isinf(y)) {
        // Nearly the reciprocal.
        const double size = hypot(x, y);
        re = f_isinf(size) ? 0 : x / size / size;
        im = f_isnan(y) ? y : 2 * quarter;
    } else if (x == 1 && y < 1e-150) {
        re = y == 0 ? 1 / y : 0.5 * (0.69314718055994530942 - log(y));
        im = y == 0 ? 0 : quarter;
    } else {
        re = x == 0 ? 0 : 0.25 * log1p(4 * x / ((1 - x) * (1 - x) + y * y));
        im = 0.5 * atan2(2 * y, (1 - x) * (1 + x) - y * y);
    }
    return {copysign(re, a.re), copysign(im, a.im)};
}
FUNCTION c128 f_arctan(c128 a)
{
    const c128 turned = f_arctanh(c128{-a.im, a.re});
    return {turned.im, -turned.re};
}

#define IN_DOUBLE(name)                                                    \
    FUNCTION c64 name(c64 a)                                               \
    {                                                                      \
        const c128 made = name(c128{a.re, a.im});                          \
        return {(float)made.re, (float)made.im};                           \
    }
IN_DOUBLE(f_arcsin)
IN_DOUBLE(f_arccos)
IN_DOUBLE(f_arctan)
IN_DOUBLE(f_arcsinh)
IN_DOUBLE(f_arccosh)
IN_DOUBLE(f_arctanh)

// The product of C99, where an infinite number makes one whose parts are not both NaN.
template <class T> FUNCTION T box(T a, bool has_infinity)
{
    return has_infinity ? f_copysign((T)f_isinf(a), a) : f_isnan(a) ? f_copysign((T)0, a) : a;
}
template <class T> FUNCTION cx<T> product_of_c(cx<T> a, cx<T> b)
{
    const cx<T> made = f_multiply(a, b);
    const bool is_first = f_isinf(a.re) || f_isinf(a.im), is_second = f_isinf(b.re) || f_isinf(b.im);
    const bool is_large = f_isinf(a.re * b.re) || f_isinf(a.re * b.im);
    if (!(f_isnan(made.re) && f_isnan(made.im) && (is_first || is_second || is_large)))
        return made;
    const T infinity = bits_as<float>(0x7f800000u);
    const cx<T> turned = f_multiply(cx<T>{box(a.re, is_first), box(a.im, is_first)},
                                    cx<T>{box(b.re, is_second), box(b.im, is_second)});
    return {infinity * turned.re, infinity * turned.im};
}

template <class T> FUNCTION cx<T> f_power(cx<T> a, cx<T> b)
{
    if (b.re == 0 && b.im == 0)
        return {(T)1, (T)0};
    if (a.re == 0 && a.im == 0) {
        const T none = bits_as<float>(0x7fc00000u);
        return b.re > 0 ? cx<T>{(T)0, (T)0} : cx<T>{none, none};
    }
    // Small whole powers are products, as NumPy has them.
    if (b.im == 0 && f_absolute(b.re) < 100 && f_floor(b.re) == b.re) {
        // Others than the first three begin with one: of infinite numbers that makes NaN.
        bool is_begun = b.re < 0 || b.re > 3;
        cx<T> result = {(T)1, (T)0}, factor = a;
        for (int left = (int)f_absolute(b.re); left; left >>= 1) {
            if (left & 1) {
                result = is_begun ? f_multiply(result, factor) : factor;
                is_begun = true;
            }
            factor = f_multiply(factor, factor);
        }
        return b.re < 0 ? f_reciprocal(result) : result;
    }
    return f_exp(product_of_c(b, f_log(a)));
}

// ---- arrays

template <class T> struct Element {
    FUNCTION T load(const char *at) { return *(const T *)at; }
    FUNCTION void store(char *at, T value) { *(T *)at = value; }
};
template <> struct Element<bool> {
    FUNCTION bool load(const char *at) { return *(const u8 *)at != 0; }
    FUNCTION void store(char *at, bool value) { *(u8 *)at = value; }
};
struct F16 {
    FUNCTION float load(const char *at) { return from_f16(*(const u16 *)at); }
    FUNCTION void store(char *at, float value) { *(u16 *)at = f16_code(value); }
};
struct BF16 {
    FUNCTION float load(const char *at) { return from_bf16(*(const u16 *)at); }
    FUNCTION void store(char *at, float value) { *(u16 *)at = bf16_code(value); }
};

// A number that is handed over with a launch.
struct Scalar {
    u64 words[2];
};
FUNCTION const char *at_scalar(const Scalar &scalar) { return (const char *)scalar.words; }

// Bytes from the first element to the one of a number, along axes in C order.
template <int AXES, class Index> FUNCTION i64 offset_of(Index number, const i64 *shape, const i64 *strides)
{
    i64 offset = 0;
#pragma unroll
    for (int axis = AXES - 1; axis > 0; axis--) {
        const Index extent = (Index)shape[axis], rest = number / extent;
        offset += (i64)(number - rest * extent) * strides[axis];
        number = rest;
    }
    return offset + (i64)number * strides[0];
}

// The index of an element along an axis of so many elements, each of which has `inner` of later axes.
template <class Index> FUNCTION i64 index_of(Index number, i64 inner, i64 extent)
{
    return (i64)(number / (Index)inner % (Index)extent);
}

// Whether an index that was computed is inside of an array. Of those outside, the first that any thread finds is noted
// in three status words, which are zero at first.
FUNCTION bool is_inside(i64 index, i64 extent, i32 *status, i32 word)
{
    if (index >= -extent && index < extent)
        return true;
    if (atomicCAS(status, 0, word) == 0) {
        status[1] = (i32)index;
        status[2] = (i32)(index >> 32);
    }
    return false;
}

// Bytes to an index that was computed. A negative one counts from the end, and one outside of the array is the
// nearest that is inside, so that no other memory is ever read.
FUNCTION i64 reached(i64 index, i64 extent, i64 stride)
{
    const i64 from_start = index < 0 ? index + extent : index;
    return (from_start < 0 ? 0 : from_start < extent ? from_start : extent - 1) * stride;
}
