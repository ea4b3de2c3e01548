// Random numbers: Philox-4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3; SC 2011), in the order
// and with the arithmetic of cuRAND's PHILOX4_32_10.

#include "philox.cuh"

// Between BITS and INTEGERS, odd ones are of single precision and even ones of double.
enum Kind {
    BITS, UNIFORM, UNIFORM_DOUBLE, NORMAL, NORMAL_DOUBLE,
    EXPONENTIAL, EXPONENTIAL_DOUBLE, LOGNORMAL, LOGNORMAL_DOUBLE, INTEGERS
};

struct PhiloxArguments {
    char *out;
    u64 seed, row;
    i64 count;
    double low, width;
    int kind, is_moved, is_aligned;
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

__device__ void normal_double(const Words &words, double *both)
{
    const double angle = unit_double(words.word[2], words.word[3]) * 6.283185307179586;
    const double radius = sqrt(-2.0 * log(unit_double(words.word[0], words.word[1])));
    both[0] = radius * sin(angle);
    both[1] = radius * cos(angle);
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

// Makes of uniform or normal numbers what is wanted.
template <typename Number> __device__ void finish(const PhiloxArguments &arguments, i64 counter, Four<Number> four)
{
    if (arguments.kind == EXPONENTIAL || arguments.kind == EXPONENTIAL_DOUBLE)
        for (Number &number : four.number)
            number = -logarithm(number);
    if (arguments.is_moved)
        for (Number &number : four.number) {
            number = number * (Number)arguments.width;
            number = number + (Number)arguments.low;
        }
    if (arguments.kind == LOGNORMAL || arguments.kind == LOGNORMAL_DOUBLE)
        for (Number &number : four.number)
            number = power_of_e(number);
    store(arguments, counter, four);
}

__device__ void draw(const PhiloxArguments &arguments, i64 counter)
{
    const Words words = philox(arguments.seed, arguments.row + (u64)(counter >> 16), (unsigned)counter & 0xffff, 0);
    if (arguments.kind == BITS) {
        store<unsigned>(arguments, counter, {words.word[0], words.word[1], words.word[2], words.word[3]});
        return;
    }
    Four<float> four;
    if (arguments.kind == UNIFORM || arguments.kind == EXPONENTIAL) {
        for (int place = 0; place < 4; place++)
            four.number[place] = unit(words.word[place]);
    } else {
        normal(words.word[0], words.word[1], four.number);
        normal(words.word[2], words.word[3], four.number + 2);
    }
    finish(arguments, counter, four);
}

// Of two words, the upper half of the product with a range of at most 2**32.
__device__ i64 integer(const PhiloxArguments &arguments, unsigned low, unsigned high)
{
    const u64 width = (u64)arguments.width;
    return (i64)arguments.low + (i64)((high * width + (low * width >> 32)) >> 32);
}

__device__ Words words_of(const PhiloxArguments &arguments, i64 counter, int half)
{
    return philox(arguments.seed, arguments.row + 2 * (u64)(counter >> 16) + half, (unsigned)counter & 0xffff, 0);
}

// A counter is two numbers of 64 bits: of four, two come from each of two rows.
__device__ void draw_integers(const PhiloxArguments &arguments, i64 counter)
{
    Four<i64> four;
    for (int half = 0; half < 2; half++) {
        const Words words = words_of(arguments, counter, half);
        four.number[2 * half] = integer(arguments, words.word[0], words.word[1]);
        four.number[2 * half + 1] = integer(arguments, words.word[2], words.word[3]);
    }
    store(arguments, counter, four);
}

__device__ void draw_doubles(const PhiloxArguments &arguments, i64 counter)
{
    Four<double> four;
    for (int half = 0; half < 2; half++) {
        const Words words = words_of(arguments, counter, half);
        if (arguments.kind == UNIFORM_DOUBLE || arguments.kind == EXPONENTIAL_DOUBLE) {
            four.number[2 * half] = unit_double(words.word[0], words.word[1]);
            four.number[2 * half + 1] = unit_double(words.word[2], words.word[3]);
        } else {
            normal_double(words, four.number + 2 * half);
        }
    }
    finish(arguments, counter, four);
}

// One thread for each four numbers.
KERNEL(philox_fill, PhiloxArguments)
{
    const bool has_doubles = arguments.kind != BITS && arguments.kind % 2 == 0;
    EACH(counter, (arguments.count + 3) / 4)
        if (arguments.kind == INTEGERS)
            draw_integers(arguments, counter);
        else if (has_doubles)
            draw_doubles(arguments, counter);
        else
            draw(arguments, counter);
}
