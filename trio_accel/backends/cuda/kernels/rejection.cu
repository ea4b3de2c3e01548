// Numbers that are proposed until one is accepted. Each has counters of a Philox sequence of its own, which the fourth
// word counts: see `RejectionSpec`. The arithmetic is that of the CPU backend, step by step.

#include "philox.cuh"

enum Distribution { GAMMA, LOG_GAMMA, POISSON, BINOMIAL };

struct RejectionArguments {
    char *out;
    const double *a, *b;
    int *fault;
    u64 seed, row;
    i64 count, a_step, b_step;
    int distribution, is_single;
};

#define MOST_ATTEMPTS 128
#define INVERTED 10.0
#define LARGEST 4503599627370496.0
#define HALF_LOG_2PI 0.9189385332046727
#define TWO_PI 6.283185307179586

struct Pair {
    double first, second;
};

// The uniform numbers of one number of a draw.
struct Number {
    u64 seed, half;
    unsigned column;

    __device__ Pair uniform(unsigned block) const
    {
        const Words words = philox(seed, half, column, block);
        return {unit_double(words.word[0], words.word[1]), unit_double(words.word[2], words.word[3])};
    }
};

// Marsaglia and Tsang.
__device__ double gamma_number(const Number &number, double a, bool has_log)
{
    const double d = (a < 1 ? a + 1 : a) - 1.0 / 3, c = 1 / sqrt(9 * d);
    double v = 1;
    for (int attempt = 0; attempt < MOST_ATTEMPTS; attempt++) {
        const Pair pair = number.uniform(2 * attempt + 1);
        const double x = sqrt(-2 * log(pair.first)) * cos(pair.second * TWO_PI);
        const double root = 1 + c * x, cube = root * root * root;
        if (cube > 0 && log(number.uniform(2 * attempt + 2).first) < 0.5 * x * x + d * (1 - cube + log(cube))) {
            v = cube;
            break;
        }
    }
    double less = 0;
    if (a == 0)
        less = log(0.0);
    else if (a < 1)
        less = log(number.uniform(0).first) / a;
    return has_log ? log(d * v) + less : d * v * exp(less);
}

// The error of Stirling's formula for log(k!), above 0: from 1 to 15 rounded from 60 digits.
__device__ double stirling(double k)
{
    const double near[] = {
        0.0, 0.08106146679532726, 0.0413406959554093, 0.02767792568499834, 0.020790672103765093,
        0.016644691189821193, 0.013876128823070748, 0.01189670994589177, 0.010411265261972096,
        0.009255462182712733, 0.00833056343336287, 0.007573675487951841, 0.00694284010720953,
        0.006408994188004207, 0.0059513701127588475, 0.005554733551962801,
    };
    if (k < 16)
        return near[(int)k];
    const double square = 1 / (k * k);
    return (1.0 / 12 - (1.0 / 360 - (1.0 / 1260 - 1.0 / 1680 * square) * square) * square) / k;
}

// k log(k / mean) + mean - k.
__device__ double deviance(double k, double mean)
{
    const double apart = (k - mean) / mean;
    return mean * ((1 + apart) * log1p(apart) - apart);
}

__device__ double log_poisson(double k, double mean)
{
    if (k < 1)
        return -mean;
    return -stirling(k) - deviance(k, mean) - (HALF_LOG_2PI + 0.5 * log(k));
}

__device__ double log_binomial(double k, double n, double p)
{
    if (k < 1)
        return n * log1p(-p);
    if (k >= n)
        return n * log(p);
    const double others = n - k, errors = stirling(n) - stirling(k) - stirling(others);
    const double sum = errors - deviance(k, n * p) - deviance(others, n * (1 - p));
    return sum + (0.5 * log(n / (k * others)) - HALF_LOG_2PI);
}

// One uniform number is looked up: of many trials n with these odds, or without a bound where the odds are negative.
__device__ double inverted(const Number &number, double probability, double n, double odds, double mean)
{
    const double sought = number.uniform(0).first;
    double total = probability, k = 0;
    while (sought > total) {
        probability *= odds < 0 ? mean / (k + 1) : (n - k) / (k + 1) * odds;
        const double more = total + probability;
        if (!(more > total))
            break;
        total = more;
        k++;
    }
    return k;
}

// Hoermann's PTRS.
__device__ double poisson(const Number &number, double mean)
{
    if (mean < INVERTED)
        return inverted(number, exp(-mean), 0, -1, mean);
    const double b = 0.931 + 2.53 * sqrt(mean), slope = -0.059 + 0.02483 * b;
    const double scale = 1.1239 + 1.1328 / (b - 3.4), sure = 0.9277 - 3.6224 / (b - 2);
    for (int attempt = 0; attempt < MOST_ATTEMPTS; attempt++) {
        const Pair pair = number.uniform(attempt + 1);
        const double u = pair.first - 0.5, v = pair.second, near = 0.5 - fabs(u);
        const double k = floor((2 * slope / near + b) * u + mean + 0.43);
        if (near >= 0.07 && v <= sure)
            return k;
        if (k < 0 || !isfinite(k) || (near < 0.013 && v > near))
            continue;
        if (log(v * scale / (slope / (near * near) + b)) <= log_poisson(k, mean))
            return k;
    }
    return floor(mean);
}

// Hoermann's BTRS, for the rarer of both outcomes.
__device__ double rarer(const Number &number, double n, double p)
{
    if (n * p < INVERTED)
        return inverted(number, exp(n * log1p(-p)), n, p / (1 - p), 0);
    const double spread = sqrt(n * p * (1 - p)), b = 1.15 + 2.53 * spread;
    const double slope = -0.0873 + 0.0248 * b + 0.01 * p, scale = (2.83 + 5.1 / b) * spread, sure = 0.92 - 4.2 / b;
    const double mode = floor((n + 1) * p), log_mode = log_binomial(mode, n, p);
    for (int attempt = 0; attempt < MOST_ATTEMPTS; attempt++) {
        const Pair pair = number.uniform(attempt + 1);
        const double u = pair.first - 0.5, v = pair.second, near = 0.5 - fabs(u);
        const double k = floor((2 * slope / near + b) * u + (n * p + 0.5));
        if (near >= 0.07 && v <= sure)
            return k;
        if (!(k >= 0 && k <= n))
            continue;
        if (log(v * scale / (slope / (near * near) + b)) <= log_binomial(k, n, p) - log_mode)
            return k;
    }
    return mode;
}

__device__ bool is_in_range(int distribution, double a, double b)
{
    if (distribution <= LOG_GAMMA)
        return a >= 0 && isfinite(a);
    if (!(a >= 0 && a <= LARGEST))
        return false;
    return distribution != BINOMIAL || (a == floor(a) && b >= 0 && b <= 1);
}

// One thread for each number.
KERNEL(reject, RejectionArguments)
{
    EACH(place, arguments.count)
    {
        const double a = arguments.a[place * arguments.a_step];
        const double b = arguments.b ? arguments.b[place * arguments.b_step] : 0;
        const Number number = {arguments.seed, arguments.row + (u64)(place >> 16), (unsigned)place & 0xffff};
        double made = 0;
        if (!is_in_range(arguments.distribution, a, b))
            *arguments.fault = 1;
        else if (arguments.distribution <= LOG_GAMMA)
            made = gamma_number(number, a, arguments.distribution == LOG_GAMMA);
        else if (arguments.distribution == POISSON)
            made = poisson(number, a);
        else
            made = b > 0.5 ? a - rarer(number, a, 1 - b) : rarer(number, a, b);
        if (arguments.distribution >= POISSON)
            ((i64 *)arguments.out)[place] = (i64)made;
        else if (arguments.is_single)
            ((float *)arguments.out)[place] = (float)made;
        else
            ((double *)arguments.out)[place] = made;
    }
}
