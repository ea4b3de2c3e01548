// The functions of expressions, for loops that a C++ compiler makes vectors of: no branches, no tables, and each fma
// written out, so that an element has the same bits in vectors of any width and alone, wherever there is fma (D188).
// The polynomials are from benchmarks/function_coefficients.py. The ways are old: constants in parts (Cody and Waite),
// sums and products with their errors (Dekker, Knuth). Those of float32 are computed in float64, and rounded once.
#pragma once
#define OWN static inline __attribute__((always_inline))
namespace own {
typedef long long i64;
typedef unsigned long long u64;
OWN double real_of(u64 bits) { double x; __builtin_memcpy(&x, &bits, 8); return x; }
OWN u64 bits_of(double x) { u64 bits; __builtin_memcpy(&bits, &x, 8); return bits; }
OWN double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
OWN double size(double x) { return __builtin_fabs(x); }
OWN double signed_as(double size, double x) { return __builtin_copysign(size, x); }
OWN double within(double x, double low, double high) { return x > high ? high : x < low ? low : x; }
OWN double poly(double, double last) { return last; }  // c0 + x * (c1 + x * (c2 + ...
template <class... More> OWN double poly(double x, double c, More... more) { return fma(x, poly(x, more...), c); }
struct Two { double hi, lo; };  // a number, and what it lacks
// The first one is the larger, or zero.
OWN Two sum_ordered(double a, double b) { const double hi = a + b; return {hi, (a - hi) + b}; }
OWN Two sum(double a, double b) { const double hi = a + b, c = hi - a; return {hi, (a - (hi - c)) + (b - c)}; }
OWN Two product(double a, double b) { const double hi = a * b; return {hi, fma(a, b, -hi)}; }
OWN Two product(Two a, Two b) { const Two c = product(a.hi, b.hi); return {c.hi, c.lo + fma(a.lo, b.hi, a.hi * b.lo)}; }
const double inf = __builtin_inf(), nan = __builtin_nan("");
const double ln2 = 0x1.62e42fefa39efp-1, ln2_lo = 0x1.abc9e3b39803fp-56;
const Two per_ln2 = {0x1.71547652b82fep+0, 0x1.777d0ffda0d24p-56};
const double shift = 0x1.8p52;  // the sum of a number and this one has the nearest whole number in its last bits
// ---- exponential functions
OWN double power_of_two(i64 n) { return real_of((u64)(n + 1023) << 52); }
// e * 2**n with one rounding, where that alone is too large or too small.
OWN double scaled(double e, i64 n)
{
    const i64 half = (i64)((u64)(n + 4096) >> 1) - 2048;
    return e * power_of_two(half) * power_of_two(n - half);
}
OWN i64 whole_of(double shifted) { return (i64)(bits_of(shifted) - bits_of(shift)); }
struct Reduced { double r, r_lo; i64 n; };  // x = n * step + r + r_lo
OWN Reduced by_ln2(double x)
{
    const double shifted = fma(x, per_ln2.hi, shift), k = shifted - shift, near = fma(k, -ln2, x);
    const double r = fma(k, -ln2_lo, near);
    return {r, fma(k, -ln2_lo, near - r), whole_of(shifted)};
}
// exp(r + r_lo) - 1
OWN Two expm1_near(double r, double r_lo)
{
    const double q = poly(r, 0.5, 0x1.5555555555557p-3, 0x1.5555555555556p-5, 0x1.11111111100dcp-7,
                          0x1.6c16c16c162ep-10, 0x1.a01a01abe8p-13, 0x1.a01a01a6d8p-16, 0x1.71de02318p-19,
                          0x1.27e4db68p-22, 0x1.af4deap-26, 0x1.1f73p-29);
    return sum_ordered(r, fma(r * r, q, r_lo));
}
OWN double exp(double x)
{
    const Reduced at = by_ln2(within(x, -746.0, 710.0));
    return scaled(1.0 + expm1_near(at.r, at.r_lo).hi, at.n);
}
// 2**(x + rest)
OWN double exp2_of(double x, double rest)
{
    const double shifted = x + shift, part = x - (shifted - shift);
    const Two all = product(part, ln2), r = sum_ordered(all.hi, fma(part, ln2_lo, fma(rest, ln2, all.lo)));
    return scaled(1.0 + expm1_near(r.hi, r.lo).hi, whole_of(shifted));
}
OWN double exp2(double x) { return exp2_of(within(x, -1080.0, 1025.0), 0.0); }
// A quarter of exp(x) - 1: it is not too large before sinh and cosh are.
OWN Two quarter_expm1(double x)
{
    const Reduced at = by_ln2(x);
    const double a = power_of_two(at.n - 2);
    const Two p = expm1_near(at.r, at.r_lo), made = sum_ordered(a - 0.25, a * p.hi);
    return {made.hi, fma(a, p.lo, made.lo)};
}
OWN double expm1(double x)
{
    const Two e = quarter_expm1(within(x, -40.0, 710.0));
    return size(x) < 0x1p-54 ? x : 4.0 * (e.hi + e.lo);
}
OWN double sinh(double x)
{
    const Two e = quarter_expm1(within(size(x), 0.0, 710.5));
    const double whole = 2.0 * (e.hi + (e.lo + e.hi / (4.0 * e.hi + 1.0)));
    return size(x) < 0x1p-28 ? x : signed_as(whole, x);
}
OWN double cosh(double x)
{
    const Two e = quarter_expm1(within(size(x), 0.0, 710.5));
    return 2.0 * ((e.hi + 0.25) + (e.lo + 0.25 / (4.0 * e.hi + 1.0)));
}
OWN double tanh(double x)
{
    // e / (e + 2), and what is left of that division.
    const Two e = quarter_expm1(within(2.0 * size(x), 0.0, 44.0)), below = sum_ordered(0.5, e.hi);
    const double inverse = 1.0 / below.hi, q = e.hi * inverse;
    const double rest = fma(-q, below.hi, e.hi) + fma(-q, below.lo + e.lo, e.lo);
    return size(x) < 0x1p-28 ? x : signed_as(fma(rest, inverse, q), x);
}
// ---- error functions: (1 + 2 * x) * exp(x * x) * erfc(x) is a polynomial of (x - 3.5) / (x + 3.5)
OWN double erfc_of(double x)
{
    const double a = within(x, 0.0, 27.5), t = (a - 3.5) / (a + 3.5);
    const double p = poly(t, -0x1.1ebd220ea593bp-3, -0x1.59e2c284b118cp-7, 0x1.8f702ec6b328bp-4, -0x1.d76830c353594p-4,
                          0x1.6861060470c52p-4, -0x1.8ff5ef76c441dp-5, 0x1.38ec66706fb14p-6, -0x1.143c4cad7929cp-8,
                          -0x1.3cf3676d3bc24p-12, 0x1.27e66694fe8b6p-11, -0x1.fda9495c0662p-14, -0x1.66e2c090bb43ep-15,
                          0x1.970d9568f0eecp-16, 0x1.38a518f3ece4p-19, -0x1.003d9fd02a45p-18, -0x1.92c5039a5ep-25,
                          0x1.4643beb38a98p-21, -0x1.fee3f40208p-29, -0x1.b72e47df0d8p-24, -0x1.ee43895818p-29,
                          0x1.215a71f774p-26, 0x1.40849f50c8p-29, -0x1.0cc789d088p-29, -0x1.346c195dp-31);
    const double q = (0x1.3e0a99a0ee914p+0 + fma(t, p, -0x1.902cb7976c65ep-57)) / fma(2.0, a, 1.0);
    const Two square = product(a, a);
    const Reduced at = by_ln2(-square.hi);
    const double e = 1.0 + expm1_near(at.r, at.r_lo).hi;
    return scaled(q * fma(e, -square.lo, e), at.n);
}
OWN double erf_near(double x)
{
    const double z = x * x;
    const double p = poly(z, -0x1.812746b0379e7p-2, 0x1.ce2f21a042bcfp-4, -0x1.b82ce31286cbcp-6, 0x1.565bcd0d2ff7p-8,
                          -0x1.c02db335c07p-11, 0x1.f9a2dd9e25p-14, -0x1.f4c2b861cp-17, 0x1.b7f36af4p-20,
                          -0x1.3d8e83p-23);
    return fma(x, 0x1.20dd750429b6dp+0, x * fma(z, p, 0x1.1ae3a914fed8p-56));
}
OWN double erf(double x) { return size(x) < 0.5 ? erf_near(x) : signed_as(1.0 - erfc_of(size(x)), x); }
OWN double erfc(double x)
{
    const double far = erfc_of(size(x));
    return size(x) < 0.5 ? 1.0 - erf_near(x) : x < 0 ? 2.0 - far : far;
}
// ---- logarithms: x = 2**k * m, with m from sqrt(1 / 2) to sqrt(2)
struct Parts { double m, k; u64 biased; };
OWN Parts parts(double x)
{
    const bool is_small = x < 0x1p-1022;
    const u64 root = 0x3fe6a09e667f3bcdull, bit = 1ull << 52;
    const u64 at = bits_of(is_small ? x * 0x1p54 : x) + (1023 * bit - root), biased = at >> 52;
    const double k = real_of(biased | 0x433 * bit) - (is_small ? 0x1p52 + 1077 : 0x1p52 + 1023);
    return {real_of((at & (bit - 1)) + root), k, biased};
}
// log(1 + f) = f - f * f / 2 + s * (f * f / 2 + rest), with s = f / (2 + f).
OWN Two log_near(double f)
{
    const double s = f / (2.0 + f), z = s * s;
    const double rest = z * poly(z, 0x1.5555555555555p-1, 0x1.9999999999a38p-2, 0x1.2492492476c4p-2, 0x1.c71c7201684p-3,
                                 0x1.745cf8fe3p-3, 0x1.3b1c36b4p-3, 0x1.0fbe71ap-3, 0x1.0c0518p-3);
    const Two square = product(0.5 * f, f), made = sum_ordered(f, -square.hi);
    return {made.hi, made.lo + fma(s, square.hi + rest, -square.lo)};
}
OWN double log_or(double x, double made) { return x > 0 && x < inf ? made : x == 0 ? -inf : x > 0 ? x : nan; }
// k * (step.hi + step.lo) + near; k * step.hi has no error.
OWN double log_sum(double k, Two step, Two near)
{
    const Two made = sum_ordered(k * step.hi, near.hi);
    return made.hi + (made.lo + fma(k, step.lo, near.lo));
}
OWN double log_of(double x, Two step, Two scale)
{
    const Parts at = parts(x);
    const Two near = log_near(at.m - 1.0);
    return log_or(x, log_sum(at.k, step, scale.hi == 1.0 ? near : product(near, scale)));
}
const Two log_step = {0x1.62e42fefa3800p-1, 0x1.ef35793c76730p-45}, one = {1.0, 0.0};
const Two step_10 = {0x1.34413509f7p-2, 0x1.3fde623e2566bp-43}, per_ln10 = {0x1.bcb7b1526e50ep-2, 0x1.95355baabp-57};
OWN double log(double x) { return log_of(x, log_step, one); }
OWN double log2(double x) { return log_of(x, one, per_ln2); }
OWN double log10(double x) { return log_of(x, step_10, per_ln10); }
OWN double log1p(double x)
{
    const double u = 1.0 + x, lost = x < 1.0 ? x - (u - 1.0) : 1.0 - (u - x);
    const Parts at = parts(u);
    const Two f = sum_ordered(at.m - 1.0, lost * real_of((2047 - at.biased) << 52) * 0.5);
    const Two near = log_near(f.hi);
    const double lower = near.lo + f.lo * (1.0 - f.hi * (1.0 - f.hi * (1.0 - f.hi)));
    return signed_as(log_or(u, log_sum(at.k, log_step, {near.hi, lower})), x);
}
// ---- powers, as C99 has them: `made` is that of the size of x
OWN double power_or(double x, double y, double made)
{
    const double half = 0.5 * y, known = size(x) == 1.0 ? 1.0 : made;
    const bool is_whole = __builtin_floor(y) == y, is_odd = is_whole && __builtin_floor(half) != half;
    const double found = x < 0 && x > -inf && !is_whole ? nan : signed_as(known, is_odd ? x : 1.0);
    return x == 1.0 || y == 0 ? 1.0 : x != x || y != y ? nan : found;
}
OWN double pow(double x, double y)
{
    // log2(m) = s * (2 + 2 / 3 * z + ...) / ln(2), with z = s * s, has some 65 right bits; the exponent takes ten.
    const Parts at = parts(size(x));
    const Two below = sum(at.m, 1.0);
    const double inverse = 1.0 / below.hi, f = at.m - 1.0, q = f * inverse;
    const Two s = {q, (fma(-q, below.hi, f) - q * below.lo) * inverse}, z = product(s, s);
    const double more = poly(z.hi, 0x1.2776c50ef9bfep-1, 0x1.a61762a7adfap-2, 0x1.484b13d79c4p-2, 0x1.0c9a84bf54p-2,
                             0x1.c68f2efep-3, 0x1.89fed34p-3, 0x1.59e07p-3, 0x1.5a62p-3);
    Two third = sum_ordered(0x1.ec709dc3a03fdp-1, z.hi * more);
    third.lo += 0x1.d27f05548af0cp-55;
    const Two square = product(z, third), all = sum_ordered(2.0 * per_ln2.hi, square.hi);
    const Two near = product(s, {all.hi, all.lo + (square.lo + 2.0 * per_ln2.lo)}), whole = sum_ordered(at.k, near.hi);
    const double log = log_or(size(x), whole.hi), exponent = log * y;
    // Where the product is too large, what it lacks does not count.
    const double rest = size(exponent) < 1100.0 ? fma(log, y, -exponent) + (whole.lo + near.lo) * y : 0.0;
    return y == 2.0 ? x * x : power_or(x, y, exp2_of(within(exponent, -1100.0, 1100.0), rest));
}
// ---- sine, cosine and tangent by quarters of a turn, right as far as `far`
const double far = 0x1p30, per_pi = 0x1.45f306dc9c883p-2, pi = 0x1.921fb54442d18p+1, pi_lo = 0x1.1a62633145c07p-53;
OWN Reduced by_half_pi(double x)
{
    const double shifted = fma(x, 2.0 * per_pi, shift), k = shifted - shift;
    const Two second = product(k, 0.5 * pi_lo), made = sum(fma(k, -0.5 * pi, x), -second.hi);
    const Two r = sum_ordered(made.hi, fma(k, 0x1.f1976b7ed8fbcp-110, made.lo - second.lo));
    return {r.hi, r.lo, whole_of(shifted)};
}
OWN double sin_near(double r, double r_lo)
{
    const double z = r * r;
    const double p = poly(z, -0x1.5555555555555p-3, 0x1.111111111111p-7, -0x1.a01a01a019914p-13, 0x1.71de3a545c48p-19,
                          -0x1.ae64540b5p-26, 0x1.61217924p-33, -0x1.ab1458p-41);
    return r + fma(r * z, p, fma(-0.5 * z, r_lo, r_lo));
}
OWN double cos_near(double r, double r_lo)
{
    const double z = r * r, half = 0.5 * z, w = 1.0 - half;
    const double p = poly(z, 0x1.5555555555555p-5, -0x1.6c16c16c16959p-10, 0x1.a01a019f4b6bp-16, -0x1.27e4fa139e4p-22,
                          0x1.1eeb6482p-29, -0x1.907a79p-37);
    return w + (((1.0 - w) - half) + fma(z * z, p, -(r * r_lo)));
}
OWN double turned(double x, i64 quarters)
{
    const Reduced at = by_half_pi(x);
    const i64 n = at.n + quarters;
    return real_of(bits_of(n & 1 ? cos_near(at.r, at.r_lo) : sin_near(at.r, at.r_lo)) ^ (u64)(n & 2) << 62);
}
OWN double sin_fast(double x) { return size(x) < 0x1p-27 ? x : turned(x, 0); }
OWN double cos_fast(double x) { return turned(x, 1); }
// In float32 the sine alone does, from -pi / 2 to pi / 2.
OWN float turned(double x, double offset)
{
    const double shifted = fma(x, per_pi, -offset) + shift, k = (shifted - shift) + offset;
    const double r = fma(k, -pi_lo, fma(k, -pi, x)), z = r * r;
    const double p = poly(z, -0x1.555555545b68p-3, 0x1.11110fd5b8cp-7, -0x1.a01902b7d4p-13, 0x1.71960029p-19,
                          -0x1.9da1023p-26);
    return (float)real_of(bits_of(fma(r * z, p, r)) ^ bits_of(shifted) << 63);
}
OWN float sin_fast(float x) { return x == 0 ? x : turned(x, 0.0); }
OWN float cos_fast(float x) { return -turned(x, 0.5); }
// What is farther, the C library computes.
#define AS_FAR(name)                                                                                              \
    OWN double name(double x) { return size(x) >= far ? __builtin_##name(x) : name##_fast(x); }                   \
    OWN float name(float x) { return size(x) >= far ? (float)__builtin_##name((double)x) : name##_fast(x); }
AS_FAR(sin) AS_FAR(cos)
// ---- angles: a quotient of at most 1, and by that one of at most tan(pi / 8)
OWN double angle(double low, double high, double quarters, double turn)
{
    const bool is_wide = low > 0x1.a827999fcef32p-2 * high;
    const double above = is_wide ? low - high : low, below = is_wide ? low + high : high;
    const double t = turn * (high == 0 ? 0.0 : above / below), z = t * t, count = quarters + (is_wide ? turn : 0.0);
    const double p = poly(z, -0x1.5555555555555p-2, 0x1.999999999934cp-3, -0x1.2492492436201p-3, 0x1.c71c71853d7fap-4,
                          -0x1.745d0b28a7e38p-4, 0x1.3b1263064f6cp-4, -0x1.10fa77b1a6dp-4, 0x1.dfe6497e96p-5,
                          -0x1.a0999c632ap-5, 0x1.4162c02b2p-5, -0x1.3a31b1c1p-6);
    return fma(count, 0.25 * pi, t + fma(t * z, p, count * (0.25 * pi_lo)));
}
OWN double atan(double x)
{
    const double a = size(x);
    const bool is_steep = a > 1.0;
    return signed_as(angle(is_steep ? 1.0 : a, is_steep ? a : 1.0, is_steep ? 2.0 : 0.0, is_steep ? -1.0 : 1.0), x);
}
OWN double atan2(double y, double x)
{
    const double a = size(y), b = size(x), most = a > b ? a : b;
    // Neither infinite, nor too large or too small for a sum or quotient.
    const double scale = most > 0x1p1000 ? 0x1p-100 : most < 0x1p-900 ? 0x1p100 : 1.0;
    const bool is_steep = a > b, is_left = signed_as(1.0, x) < 0, are_infinite = a == inf && b == inf;
    const double low = (is_steep ? b : a) * scale, high = (is_steep ? a : b) * scale;
    const double quarters = is_steep ? 2.0 : is_left ? 4.0 : 0.0, turn = is_steep != is_left ? -1.0 : 1.0;
    const double made = angle(are_infinite ? 1.0 : low, are_infinite ? 1.0 : high, quarters, turn);
    return a != a || b != b ? nan : signed_as(made, y);
}
OWN double hypot(double x, double y)
{
    const double a = size(x), b = size(y), most = a > b ? a : b, least = a > b ? b : a;
    const double scale = most > 0x1p500 ? 0x1p-600 : most < 0x1p-450 ? 0x1p600 : 1.0;
    const double c = most * scale, d = least * scale;
    return a == inf || b == inf ? inf : __builtin_sqrt(fma(c, c, d * d)) / scale;
}
// ---- float32
struct Short { double p, a; };  // exp(x) = a * (1 + p)
OWN Short exp_short(double x)
{
    const Reduced at = by_ln2(within(x, -105.0, 95.0));
    const double q = poly(at.r, 0x1.0000000b914p-1, 0x1.5555555a78p-3, 0x1.5554e9064p-5, 0x1.1110e0f2p-7,
                          0x1.6d43246p-10, 0x1.a124fp-13);
    return {fma(at.r * at.r, q, at.r), power_of_two(at.n)};
}
OWN double log_short(double x)
{
    const Parts at = parts(x);
    const double s = (at.m - 1.0) / (at.m + 1.0), z = s * s;
    const double p = poly(z, 0x1.000000000498p+1, 0x1.555554db54p-1, 0x1.999a9be88p-2, 0x1.2432e29p-2, 0x1.e3ab44p-3);
    return log_or(x, fma(at.k, ln2, s * p));
}
OWN double whole_of(Short e) { return fma(e.a, e.p, e.a); }
OWN double tanh_of(Short e) { const double less = fma(e.a, e.p, e.a - 1.0); return less / (less + 2.0); }
OWN float exp(float x) { return (float)whole_of(exp_short(x)); }
OWN float log(float x) { return (float)log_short(x); }
OWN float pow_of(float x, float y) { return (float)power_or(x, y, whole_of(exp_short(log_short(size(x)) * y))); }
OWN float pow(float x, float y) { return y == 2.0f ? x * x : pow_of(x, y); }
OWN float tanh(float x) { return (float)signed_as(tanh_of(exp_short(2.0 * size(x))), x); }
#define WIDENED(name) OWN float name(float x) { return (float)name((double)x); }
WIDENED(atan) WIDENED(exp2) WIDENED(expm1) WIDENED(log2) WIDENED(log10) WIDENED(log1p) WIDENED(sinh) WIDENED(cosh)
WIDENED(erf) WIDENED(erfc)
OWN float atan2(float y, float x) { return (float)atan2((double)y, (double)x); }
OWN float hypot(float x, float y) { return (float)hypot((double)x, (double)y); }
}
// No loop with a branch is made vectors of. So where numbers may be far, loops call a function of vectors, by the name
// that the compiler has for it: LOOPED(sin, float, f, 8, 16) declares own_sinf, and defines what these loops call.
#if defined(__AVX2__) && !defined(__clang__)
template <class T, int N> struct Lanes { typedef T Wide __attribute__((vector_size(N * sizeof(T)))); };
#define OF_LANES(name, T, N, symbol)                                                                               \
    extern "C" Lanes<T, N>::Wide symbol(Lanes<T, N>::Wide x)                                                       \
    {                                                                                                              \
        Lanes<T, N>::Wide made;                                                                                    \
        bool is_far = false;                                                                                       \
        for (int k = 0; k < N; k++) made[k] = own::name##_fast(x[k]);                                              \
        for (int k = 0; k < N; k++) is_far |= own::size(x[k]) >= own::far;                                         \
        for (int k = 0; is_far && k < N; k++) made[k] = own::name(x[k]);                                           \
        return made;                                                                                               \
    }
#define LOOPED(name, T, suffix, SHORT, LONG)                                                                       \
    extern "C" __attribute__((simd("notinbranch"), const, nothrow)) T own_##name##suffix(T);                       \
    extern "C" T alone_##name##suffix(T x) asm("own_" #name #suffix);                                              \
    extern "C" T alone_##name##suffix(T x) { return own::name(x); }                                                \
    OF_LANES(name, T, SHORT, _ZGVdN##SHORT##v_own_##name##suffix)                                                  \
    OF_LANES(name, T, LONG, _ZGVeN##LONG##v_own_##name##suffix)
#else
#define LOOPED(name, T, suffix, SHORT, LONG) OWN T own_##name##suffix(T x) { return own::name(x); }
#endif
