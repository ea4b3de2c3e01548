// Random numbers: Philox-4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3; SC 2011), in the order
// and with the arithmetic of cuRAND's PHILOX4_32_10.

#include "philox.cuh"

enum Kind { BITS, UNIFORM, NORMAL, EXPONENTIAL, LOGNORMAL, INTEGERS };

struct PhiloxArguments {
    char *out;
    u64 seed, row;
    i64 count;
    double low, width;
    // Twice a kind: of double precision; one less: of single precision, or whole numbers.
    int code, is_moved, is_aligned;
};

// What comes of one counter, or of two with doubles; stored 16 bytes at a time.
template <typename Number> struct __align__(16) Four {
    Number number[4];
};

// Numbers above 0 up to 1.
__device__ float unit(unsigned word)
{
    return (float)word * 2.3283064365386963e-10f + 1.1641532182693481e-10f;
}

// Box and Muller.
__device__ void normal(unsigned first, unsigned second, float *both)
{
    const float circle = 2.3283064365386963e-10f * 6.2831855f;
    const float angle = (float)second * circle + circle / 2;
    const float radius = sqrtf(-2.0f * logf(unit(first)));
    both[0] = radius * sinf(angle);
    both[1] = radius * cosf(angle);
}

template <typename Number>
__device__ void store(const PhiloxArguments &arguments, i64 counter, const Four<Number> &four)
{
    Number *out = (Number *)arguments.out + 4 * counter;
    const i64 left = arguments.count - 4 * counter;
    if (arguments.is_aligned && left >= 4)
        *(Four<Number> *)out = four;
    else
        for (int place = 0; place < 4 && place < left; place++)
            out[place] = four.number[place];
}

__device__ float logarithm(float number) { return logf(number); }
__device__ double logarithm(double number) { return log(number); }
__device__ float power_of_e(float number) { return expf(number); }
__device__ double power_of_e(double number) { return exp(number); }

// Makes of a uniform or a normal number what is wanted.
template <typename Number> __device__ void finish(const PhiloxArguments &arguments, int kind, Number &number)
{
    if (kind == EXPONENTIAL)
        number = -logarithm(number);
    if (arguments.is_moved) {
        number = number * (Number)arguments.width;
        number = number + (Number)arguments.low;
    }
    if (kind == LOGNORMAL)
        number = power_of_e(number);
}

// The numbers of one counter: four of 32 bits, or two of 64.
__device__ void make(const PhiloxArguments &, int, const Words &words, unsigned *out)
{
    for (int place = 0; place < 4; place++)
        out[place] = words.word[place];
}

__device__ void make(const PhiloxArguments &arguments, int kind, const Words &words, float *out)
{
    if (kind == UNIFORM || kind == EXPONENTIAL) {
        for (int place = 0; place < 4; place++)
            out[place] = unit(words.word[place]);
    } else {
        normal(words.word[0], words.word[1], out);
        normal(words.word[2], words.word[3], out + 2);
    }
    for (int place = 0; place < 4; place++)
        finish(arguments, kind, out[place]);
}

__device__ void make(const PhiloxArguments &arguments, int kind, const Words &words, double *out)
{
    out[0] = unit_double(words.word[0], words.word[1]);
    out[1] = unit_double(words.word[2], words.word[3]);
    if (kind == NORMAL || kind == LOGNORMAL) {
        const double angle = out[1] * 6.283185307179586, radius = sqrt(-2.0 * log(out[0]));
        out[0] = radius * sin(angle);
        out[1] = radius * cos(angle);
    }
    for (int place = 0; place < 2; place++)
        finish(arguments, kind, out[place]);
}

// Of two words, the upper half of the product with a range of at most 2**32.
__device__ void make(const PhiloxArguments &arguments, int, const Words &words, i64 *out)
{
    const u64 width = (u64)arguments.width;
    for (int place = 0; place < 2; place++) {
        const u64 low = words.word[2 * place], high = words.word[2 * place + 1];
        out[place] = (i64)arguments.low + (i64)((high * width + (low * width >> 32)) >> 32);
    }
}

// Of four numbers of 64 bits, two come from each of two rows.
template <typename Number> __device__ void draw(const PhiloxArguments &arguments, int kind, i64 counter)
{
    const int rows = sizeof(Number) / 4;
    const u64 first = arguments.row + rows * (u64)(counter >> 16);
    Four<Number> four;
    for (int row = 0; row < rows; row++) {
        const Words words = philox(arguments.seed, first + row, (unsigned)counter & 0xffff, 0);
        make(arguments, kind, words, four.number + 4 / rows * row);
    }
    store(arguments, counter, four);
}

// One thread for each four numbers.
KERNEL(philox_fill, PhiloxArguments)
{
    const int kind = (arguments.code + 1) / 2;
    EACH(counter, (arguments.count + 3) / 4)
        if (kind == BITS)
            draw<unsigned>(arguments, kind, counter);
        else if (kind == INTEGERS)
            draw<i64>(arguments, kind, counter);
        else if (arguments.code % 2)
            draw<float>(arguments, kind, counter);
        else
            draw<double>(arguments, kind, counter);
}
