// Elements of the types that solvers and sparse matrices have: a double holds each of their parts as it is. And whole
// numbers of 32 or 64 bits. `Arguments` are those of a kernel, which say the type of its elements and the width of its
// indices.

enum Type { FLOAT32, FLOAT64, COMPLEX64, COMPLEX128 };

// Real numbers have no imaginary part. Sums and products are those of doubles.
struct Value {
    double real, imaginary;
};

__device__ Value operator+(Value a, Value b) { return {a.real + b.real, a.imaginary + b.imaginary}; }

__device__ Value operator*(Value a, Value b)
{
    return {a.real * b.real - a.imaginary * b.imaginary, a.real * b.imaginary + a.imaginary * b.real};
}

__device__ bool is_zero(Value value) { return value.real == 0 && value.imaginary == 0; }

__device__ bool is_finite(Value value)
{
    return value.real - value.real == 0 && value.imaginary - value.imaginary == 0;
}

__device__ bool is_single(int type) { return type == FLOAT32 || type == COMPLEX64; }

__device__ bool is_complex(int type) { return type == COMPLEX64 || type == COMPLEX128; }

// A part of an element.
__device__ double number_at(const char *array, i64 place, int type)
{
    return is_single(type) ? ((const float *)array)[place] : ((const double *)array)[place];
}

__device__ void put_number(char *array, i64 place, double number, int type)
{
    if (is_single(type))
        ((float *)array)[place] = (float)number;
    else
        ((double *)array)[place] = number;
}

template <typename Arguments> __device__ Value value_at(const Arguments &arguments, const char *array, i64 place)
{
    const int type = arguments.type;
    if (is_complex(type))
        return {number_at(array, 2 * place, type), number_at(array, 2 * place + 1, type)};
    return {number_at(array, place, type), 0};
}

template <typename Arguments>
__device__ void put_value(const Arguments &arguments, char *array, i64 place, Value value)
{
    const int type = arguments.type, parts = 1 + is_complex(type);
    put_number(array, parts * place, value.real, type);
    if (parts > 1)
        put_number(array, parts * place + 1, value.imaginary, type);
}

template <typename Arguments> __device__ i64 index_at(const Arguments &arguments, const char *array, i64 place)
{
    return whole_at(array, place, arguments.is_wide);
}

template <typename Arguments>
__device__ void put_index(const Arguments &arguments, char *array, i64 place, i64 index)
{
    put_whole(array, place, index, arguments.is_wide);
}

// The smallest number that is not zero stays.
__device__ void keep_first(int *word, i64 number)
{
    int old = *word;
    while (old == 0 || old > number) {
        const int seen = atomicCAS(word, old, (int)number);
        if (seen == old)
            return;
        old = seen;
    }
}
