/* A stand-in cuRAND: its Philox-4x32-10 generator, on the stand-in driver.
 *
 * Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011). The order of the numbers, what an offset
 * means, and the arithmetic of the distributions were read off the real library's host generator. A state that a
 * program leaves to chance (numbers after numbers without an offset in between, double numbers from within a row) is
 * refused: nobody here relies on it.
 */
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))

int stand_in_enqueue(void *stream, void (*work)(void *), void *argument);
int stand_in_check(void);

enum {
    SUCCESS = 0,
    NOT_INITIALIZED = 101,
    ALLOCATION_FAILED = 102,
    TYPE_ERROR = 103,
    OUT_OF_RANGE = 104,
    LENGTH_NOT_MULTIPLE = 105,
    LAUNCH_FAILURE = 201,
    INITIALIZATION_FAILED = 203,
    INTERNAL_ERROR = 999,
};

enum { PSEUDO_PHILOX4_32_10 = 161 };
enum { ORDERING_BEST = 100, ORDERING_DEFAULT = 101, ORDERING_LEGACY = 103 };
enum { SUBSEQUENCES = 1 << 16, WORDS_OF_A_ROW = 4 * SUBSEQUENCES };

#define MAGIC 0x63757268706f6c78u
/* Four words are stored at once. */
#define ALIGNMENT 16

struct generator {
    uint64_t magic;
    void *stream;
    uint64_t seed;
    uint64_t offset;
    bool is_placed; /* the offset was set since the last numbers */
};

enum kind { BITS, UNIFORM, UNIFORM_DOUBLE, NORMAL, NORMAL_DOUBLE };

struct draw {
    enum kind kind;
    uint64_t seed;
    uint64_t offset;
    void *out;
    size_t count;
    double mean;
    double deviation;
};

static void philox(uint64_t seed, uint64_t row, uint32_t column, uint32_t words[4]) {
    uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    uint32_t counter[4] = {(uint32_t)row, (uint32_t)(row >> 32), column, 0};
    for (int round = 0; round < 10; round++) {
        uint64_t first = (uint64_t)0xD2511F53u * counter[0], second = (uint64_t)0xCD9E8D57u * counter[2];
        uint32_t next[4] = {
            (uint32_t)(second >> 32) ^ counter[1] ^ key[0],
            (uint32_t)second,
            (uint32_t)(first >> 32) ^ counter[3] ^ key[1],
            (uint32_t)first,
        };
        memcpy(counter, next, sizeof(next));
        key[0] += 0x9E3779B9u;
        key[1] += 0xBB67AE85u;
    }
    memcpy(words, counter, sizeof(counter));
}

/* Word number `index` of the sequence; four lie together. */
static uint32_t word_at(uint64_t seed, uint64_t index) {
    uint32_t words[4];
    uint64_t number = index / 4;
    philox(seed, number / SUBSEQUENCES, (uint32_t)(number % SUBSEQUENCES), words);
    return words[index % 4];
}

static float unit(uint32_t word) { return (float)word * 0x1p-32f + 0x1p-33f; }

/* Of four double numbers the first two are made of one counter, the others of the next row's. */
static double unit_double(uint64_t seed, uint64_t first_row, uint64_t index) {
    uint32_t words[4];
    uint64_t number = index / 4, within = index % 4;
    uint64_t row = first_row + 2 * (number / SUBSEQUENCES) + within / 2;
    philox(seed, row, (uint32_t)(number % SUBSEQUENCES), words);
    uint64_t low = words[2 * (within % 2)], high = words[2 * (within % 2) + 1];
    return (double)(low ^ high << 21) * 0x1p-53 + 0x1p-54;
}

static void draw_normal(const struct draw *draw, size_t pair) {
    const float circle = 0x1p-32f * 6.2831855f;
    uint64_t index = draw->offset + 2 * pair;
    float angle = (float)word_at(draw->seed, index + 1) * circle + circle / 2;
    float radius = sqrtf(-2.0f * logf(unit(word_at(draw->seed, index))));
    float *out = (float *)draw->out + 2 * pair;
    out[0] = (float)draw->mean + (float)draw->deviation * (radius * sinf(angle));
    out[1] = (float)draw->mean + (float)draw->deviation * (radius * cosf(angle));
}

static void draw_normal_double(const struct draw *draw, size_t pair) {
    uint64_t row = draw->offset / WORDS_OF_A_ROW;
    double angle = unit_double(draw->seed, row, 2 * pair + 1) * 6.283185307179586;
    double radius = sqrt(-2.0 * log(unit_double(draw->seed, row, 2 * pair)));
    double *out = (double *)draw->out + 2 * pair;
    out[0] = draw->mean + draw->deviation * (radius * sin(angle));
    out[1] = draw->mean + draw->deviation * (radius * cos(angle));
}

static void run(void *argument) {
    const struct draw *draw = argument;
    uint64_t row = draw->offset / WORDS_OF_A_ROW;
    for (size_t i = 0; draw->kind == BITS && i < draw->count; i++)
        ((uint32_t *)draw->out)[i] = word_at(draw->seed, draw->offset + i);
    for (size_t i = 0; draw->kind == UNIFORM && i < draw->count; i++)
        ((float *)draw->out)[i] = unit(word_at(draw->seed, draw->offset + i));
    for (size_t i = 0; draw->kind == UNIFORM_DOUBLE && i < draw->count; i++)
        ((double *)draw->out)[i] = unit_double(draw->seed, row, i);
    for (size_t pair = 0; draw->kind == NORMAL && pair < draw->count / 2; pair++)
        draw_normal(draw, pair);
    for (size_t pair = 0; draw->kind == NORMAL_DOUBLE && pair < draw->count / 2; pair++)
        draw_normal_double(draw, pair);
}

static struct generator *find(void *handle) {
    struct generator *generator = handle;
    return generator && generator->magic == MAGIC ? generator : NULL;
}

static int generate(void *handle, enum kind kind, void *out, size_t count, double mean, double deviation) {
    struct generator *generator = find(handle);
    if (!generator)
        return NOT_INITIALIZED;
    bool is_normal = kind == NORMAL || kind == NORMAL_DOUBLE;
    bool is_double = kind == UNIFORM_DOUBLE || kind == NORMAL_DOUBLE;
    if (is_normal && count % 2)
        return LENGTH_NOT_MULTIPLE;
    if (count == 0)
        return SUCCESS;
    if (!out || (uintptr_t)out % ALIGNMENT)
        return LAUNCH_FAILURE;
    if (!generator->is_placed || (is_double && generator->offset % WORDS_OF_A_ROW))
        return INTERNAL_ERROR;
    struct draw *draw = malloc(sizeof(*draw));
    if (!draw)
        return ALLOCATION_FAILED;
    *draw = (struct draw){kind, generator->seed, generator->offset, out, count, mean, deviation};
    generator->is_placed = false;
    return stand_in_enqueue(generator->stream, run, draw) ? LAUNCH_FAILURE : SUCCESS;
}

API int curandCreateGenerator(void **handle, int type) {
    if (type != PSEUDO_PHILOX4_32_10)
        return TYPE_ERROR;
    if (stand_in_check())
        return INITIALIZATION_FAILED;
    struct generator *generator = calloc(1, sizeof(*generator));
    if (!generator)
        return ALLOCATION_FAILED;
    generator->magic = MAGIC;
    generator->is_placed = true;
    *handle = generator;
    return SUCCESS;
}

API int curandDestroyGenerator(void *handle) {
    struct generator *generator = find(handle);
    if (!generator)
        return NOT_INITIALIZED;
    generator->magic = 0; /* never freed, so that its use afterwards is an error and no crash */
    return SUCCESS;
}

API int curandSetStream(void *handle, void *stream) {
    struct generator *generator = find(handle);
    if (!generator)
        return NOT_INITIALIZED;
    generator->stream = stream;
    return SUCCESS;
}

API int curandSetPseudoRandomGeneratorSeed(void *handle, unsigned long long seed) {
    struct generator *generator = find(handle);
    if (!generator)
        return NOT_INITIALIZED;
    generator->seed = seed;
    return SUCCESS;
}

API int curandSetGeneratorOffset(void *handle, unsigned long long offset) {
    struct generator *generator = find(handle);
    if (!generator)
        return NOT_INITIALIZED;
    generator->offset = offset;
    generator->is_placed = true;
    return SUCCESS;
}

API int curandSetGeneratorOrdering(void *handle, int ordering) {
    if (!find(handle))
        return NOT_INITIALIZED;
    bool is_known = ordering == ORDERING_BEST || ordering == ORDERING_DEFAULT || ordering == ORDERING_LEGACY;
    return is_known ? SUCCESS : OUT_OF_RANGE;
}

API int curandGenerate(void *handle, unsigned *out, size_t count) {
    return generate(handle, BITS, out, count, 0, 1);
}

API int curandGenerateUniform(void *handle, float *out, size_t count) {
    return generate(handle, UNIFORM, out, count, 0, 1);
}

API int curandGenerateUniformDouble(void *handle, double *out, size_t count) {
    return generate(handle, UNIFORM_DOUBLE, out, count, 0, 1);
}

API int curandGenerateNormal(void *handle, float *out, size_t count, float mean, float deviation) {
    return generate(handle, NORMAL, out, count, mean, deviation);
}

API int curandGenerateNormalDouble(void *handle, double *out, size_t count, double mean, double deviation) {
    return generate(handle, NORMAL_DOUBLE, out, count, mean, deviation);
}
