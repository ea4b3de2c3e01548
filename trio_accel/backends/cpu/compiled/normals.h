// Box and Muller's normal numbers, in place of two uniform ones; behind functions.h.
struct Arguments {
    double *units, *angles;
};

extern "C" __attribute__((visibility("default"))) long long run(const char *packed, long long first, long long end)
{
    Arguments arguments;
    __builtin_memcpy(&arguments, packed, sizeof arguments);
    double *const units = arguments.units, *const angles = arguments.angles;
#pragma GCC ivdep
    for (long long i = first; i < end; i++) {
        const double radius = __builtin_sqrt(-2.0 * own::log(units[i])), angle = angles[i];
        units[i] = radius * own::sin_fast(angle);
        angles[i] = radius * own::cos_fast(angle);
    }
    return 0;
}
