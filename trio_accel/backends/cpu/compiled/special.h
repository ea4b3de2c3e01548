// Functions of CUDA's that the C library has not, for kernels that are compiled for the host.
#pragma once

#include <cmath>

static inline double erfcx(double x) {
    const long double wide = x;
    // As long as the exponential is in the range of a long double.
    if (x < 100)
        return expl(wide * wide) * erfcl(wide);
    const long double u = 0.5L / wide / wide;
    return (1 - u * (1 - u * (3 - u * (15 - u * 105)))) / (wide * 1.7724538509055160273L);
}

// Halley's method, from Hastings' approximation: the error of a step is the third power of that before.
static inline double erfcinv(double y) {
    if (!(y > 0 && y < 2))
        return y == 0 ? INFINITY : y == 2 ? -INFINITY : NAN;
    const long double size = y < 1 ? y : 2 - (long double)y;
    const long double t = sqrtl(-2 * logl(size / 2));
    long double x = 0.70711L * (t - (2.30753L + t * 0.27061L) / (1 + t * (0.99229L + t * 0.04481L)));
    for (int round = 0; round < 4; round++) {
        const long double error = erfcl(x) - size;
        x += error / (1.1283791670955125739L * expl(-x * x) - x * error);
    }
    return y < 1 ? x : -x;
}

static inline double erfinv(double y) {
    if (!(fabs(y) <= 0.5))
        return y < 0 ? -erfcinv(1 + y) : erfcinv(1 - y);
    long double x = 0.8862L * y;
    for (int round = 0; round < 4; round++) {
        const long double error = erfl(x) - y;
        x -= error / (1.1283791670955125739L * expl(-x * x) + x * error);
    }
    return x;
}

// The library's throws for large arguments, where the results are infinite.
static inline double stand_in_bessel(double order, double x) {
    return fabs(x) < 714 ? std::cyl_bessel_i(order, fabs(x)) : x != x ? x : INFINITY;
}
static inline double cyl_bessel_i0(double x) { return stand_in_bessel(0, x); }
static inline double cyl_bessel_i1(double x) { return copysign(stand_in_bessel(1, x), x); }

static inline float erfcxf(float x) { return erfcx(x); }
static inline float erfcinvf(float x) { return erfcinv(x); }
static inline float erfinvf(float x) { return erfinv(x); }
static inline float cyl_bessel_i0f(float x) { return cyl_bessel_i0(x); }
static inline float cyl_bessel_i1f(float x) { return cyl_bessel_i1(x); }
