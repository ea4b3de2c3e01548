/* A stand-in cuBLAS: the functions that the backend calls, on the stand-in driver.
 *
 * Column-major as the real one, with its checks of arguments and its table of types. Scalars that lie on the host
 * are read at the call, all else when the stream gets there. Products are plain loops over packed operands, in the
 * precision that the compute type asks for, rounded once.
 */
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

#pragma GCC optimize("O3")

#define API extern "C" __attribute__((visibility("default")))

extern "C" int stand_in_call(void *stream, void (*work)(void *), const void *argument, size_t size);
extern "C" int stand_in_check(void);
extern "C" int stand_in_drain(void);

enum Status {
    SUCCESS = 0,
    NOT_INITIALIZED = 1,
    ALLOC_FAILED = 3,
    INVALID_VALUE = 7,
    EXECUTION_FAILED = 13,
    NOT_SUPPORTED = 15,
};

enum Type { R_32F = 0, R_64F = 1, R_16F = 2, C_32F = 4, C_64F = 5, R_16BF = 14 };
enum Compute { COMPUTE_32F = 68, COMPUTE_64F = 70 };
enum Operation { OP_N = 0, OP_T = 1, OP_C = 2 };
enum PointerMode { HOST = 0, DEVICE = 1 };

/* What a user's workspace must be aligned to. */
static const uintptr_t WORKSPACE_ALIGNMENT = 256;
static const uint64_t MAGIC = 0x626c61735f6f6b21;

struct Handle {
    uint64_t magic;
    void *stream;
    int pointer_mode;
    int math_mode;
    char *workspace; /* the user's; null where the library would take one of its own */
    size_t workspace_size;
};

/* Products that ran without a workspace of the user. */
static std::atomic<unsigned long> without_workspace{0};

API unsigned long stand_in_cublas_without_workspace(void) { return without_workspace; }

/* Numbers. Half types are held as their bits; complex ones are multiplied without the rules for infinities. */

struct half {
    uint16_t bits;
};

struct bfloat {
    uint16_t bits;
};

template <typename Real> struct complex {
    Real real, imaginary;
};

template <typename To, typename From> static To bits_as(From from) {
    To to;
    static_assert(sizeof(to) == sizeof(from), "sizes");
    memcpy(&to, &from, sizeof(to));
    return to;
}

static float widen(half number) {
    uint32_t sign = (uint32_t)(number.bits & 0x8000) << 16;
    int exponent = number.bits >> 10 & 31;
    uint32_t fraction = number.bits & 1023;
    if (exponent == 31)
        return bits_as<float>(sign | 0x7f800000u | fraction << 13);
    float size = exponent ? ldexpf((float)(fraction | 1024), exponent - 25) : ldexpf((float)fraction, -24);
    return sign ? -size : size;
}

static float widen(bfloat number) { return bits_as<float>((uint32_t)number.bits << 16); }
static float widen(float number) { return number; }
static double widen(double number) { return number; }
static complex<float> widen(complex<float> number) { return number; }
static complex<double> widen(complex<double> number) { return number; }

/* To the nearest, and of two to the even one. */
static void narrow(float from, half &to) {
    uint16_t sign = bits_as<uint32_t>(from) >> 16 & 0x8000;
    float size = fabsf(from);
    if (size != size)
        to.bits = sign | 0x7e00;
    else if (size >= 65520.0f)
        to.bits = sign | 0x7c00;
    else {
        int exponent = std::max(size > 0 ? ilogbf(size) : -14, -14);
        uint32_t steps = (uint32_t)nearbyintf(ldexpf(size, 10 - exponent));
        to.bits = (uint16_t)(sign | (steps + ((uint32_t)(exponent + 14) << 10)));
    }
}

static void narrow(float from, bfloat &to) {
    uint32_t bits = bits_as<uint32_t>(from);
    if (from != from)
        to.bits = (uint16_t)(bits >> 16 | 0x40);
    else
        to.bits = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static void narrow(float from, float &to) { to = from; }
static void narrow(double from, float &to) { to = (float)from; }
static void narrow(double from, double &to) { to = from; }
static void narrow(double from, half &to) { narrow((float)from, to); }
static void narrow(double from, bfloat &to) { narrow((float)from, to); }
static void narrow(complex<float> from, complex<float> &to) { to = from; }
static void narrow(complex<double> from, complex<double> &to) { to = from; }
static void narrow(complex<double> from, complex<float> &to) { to = {(float)from.real, (float)from.imaginary}; }

static float multiply(float a, float b) { return a * b; }
static double multiply(double a, double b) { return a * b; }
template <typename Real> static complex<Real> multiply(complex<Real> a, complex<Real> b) {
    return {a.real * b.real - a.imaginary * b.imaginary, a.real * b.imaginary + a.imaginary * b.real};
}

static float add(float a, float b) { return a + b; }
static double add(double a, double b) { return a + b; }
template <typename Real> static complex<Real> add(complex<Real> a, complex<Real> b) {
    return {a.real + b.real, a.imaginary + b.imaginary};
}

static bool is_zero(float a) { return a == 0; }
static bool is_zero(double a) { return a == 0; }
template <typename Real> static bool is_zero(complex<Real> a) { return a.real == 0 && a.imaginary == 0; }

static float conjugate(float a) { return a; }
static double conjugate(double a) { return a; }
template <typename Real> static complex<Real> conjugate(complex<Real> a) { return {a.real, -a.imaginary}; }

/* As the real norm has it: a number that is denormal in the type of the sum is nothing. */
static float without_denormal(float a) { return fabsf(a) < std::numeric_limits<float>::min() ? 0 : a; }
static double without_denormal(double a) { return fabs(a) < std::numeric_limits<double>::min() ? 0 : a; }
template <typename Real> static complex<Real> without_denormal(complex<Real> a) {
    return {without_denormal(a.real), without_denormal(a.imaginary)};
}

static double to_double(float a) { return a; }
static double to_double(double a) { return a; }
template <typename Real> static complex<double> to_double(complex<Real> a) { return {a.real, a.imaginary}; }

/* The type that a type is computed in; also that of its scalars. */
template <typename T> struct Wide { typedef decltype(widen(T())) type; };

/* Call a template with the element type of a code; false where there is none. */
template <typename Body> static bool with_type(int type, Body body) {
    switch (type) {
    case R_16F: body(half()); return true;
    case R_16BF: body(bfloat()); return true;
    case R_32F: body(float()); return true;
    case R_64F: body(double()); return true;
    case C_32F: body(complex<float>()); return true;
    case C_64F: body(complex<double>()); return true;
    }
    return false;
}

static size_t size_of(int type) {
    size_t size = 0;
    with_type(type, [&](auto element) { size = sizeof(element); });
    return size;
}

static size_t part_of(int type) { return type == C_32F ? 4 : type == C_64F ? 8 : size_of(type); }

/* The type of scalars and of the execution, for elements of a type. */
static int scalar_type(int type) { return type == R_16F || type == R_16BF ? (int)R_32F : type; }

static int real_type(int type) { return type == C_32F ? (int)R_32F : type == C_64F ? (int)R_64F : type; }

static bool is_aligned(const void *address, int type) {
    return address && (uintptr_t)address % part_of(type) == 0;
}

/* A scalar: read at the call, or when the stream gets there. */
struct Scalar {
    const void *device;
    char host[16];

    template <typename T> T read() const {
        T value;
        memcpy(&value, device ? device : host, sizeof(value));
        return value;
    }
};

static Scalar take(const Handle *handle, const void *address, int type) {
    Scalar scalar = {};
    if (handle->pointer_mode == DEVICE)
        scalar.device = address;
    else
        memcpy(scalar.host, address, size_of(type));
    return scalar;
}

static Handle *find(void *handle) {
    Handle *found = (Handle *)handle;
    return found && found->magic == MAGIC ? found : nullptr;
}

/* What this process has loaded: a bit for products of each type, and one for the vectors' routines. Seen with cuBLAS 13.1
   on an H200: what is needed first is loaded when nothing runs. */
static std::atomic<uint32_t> loaded{0};

/* Enqueue a copy of the work on the handle's stream. */
template <typename Work> static int enqueue(const Handle *handle, const Work &work, int loads = 31) {
    if (!(loaded & 1u << loads) && stand_in_drain())
        return EXECUTION_FAILED;
    loaded |= 1u << loads;
    int code = stand_in_call(handle->stream, [](void *argument) { ((Work *)argument)->run(); }, &work, sizeof(Work));
    return code ? EXECUTION_FAILED : SUCCESS;
}

/* Handles. */

API int cublasCreate_v2(void **handle) {
    if (!handle)
        return INVALID_VALUE;
    if (stand_in_check())
        return NOT_INITIALIZED;
    Handle *made = (Handle *)calloc(1, sizeof(Handle));
    if (!made)
        return ALLOC_FAILED;
    made->magic = MAGIC;
    *handle = made;
    return SUCCESS;
}

API int cublasDestroy_v2(void *handle) {
    Handle *found = find(handle);
    if (!found)
        return NOT_INITIALIZED;
    found->magic = 0; /* never freed, so that its use afterwards is an error and no crash */
    /* As documented: it waits for the device. A lost one has nothing more to wait for. */
    stand_in_drain();
    return SUCCESS;
}

API int cublasSetStream_v2(void *handle, void *stream) {
    Handle *found = find(handle);
    if (!found)
        return NOT_INITIALIZED;
    found->stream = stream;
    /* As documented: the workspace is the library's own again. */
    found->workspace = nullptr;
    found->workspace_size = 0;
    return SUCCESS;
}

API int cublasSetWorkspace_v2(void *handle, void *workspace, size_t size) {
    Handle *found = find(handle);
    if (!found)
        return NOT_INITIALIZED;
    if ((uintptr_t)workspace % WORKSPACE_ALIGNMENT)
        return INVALID_VALUE;
    found->workspace = (char *)workspace;
    found->workspace_size = size;
    return SUCCESS;
}

API int cublasSetPointerMode_v2(void *handle, int mode) {
    Handle *found = find(handle);
    if (!found)
        return NOT_INITIALIZED;
    if (mode != HOST && mode != DEVICE)
        return INVALID_VALUE;
    found->pointer_mode = mode;
    return SUCCESS;
}

API int cublasSetMathMode(void *handle, int mode) {
    Handle *found = find(handle);
    if (!found)
        return NOT_INITIALIZED;
    if (mode & ~31)
        return INVALID_VALUE;
    found->math_mode = mode;
    return SUCCESS;
}

API const char *cublasGetStatusName(int status) {
    switch (status) {
    case SUCCESS: return "CUBLAS_STATUS_SUCCESS";
    case NOT_INITIALIZED: return "CUBLAS_STATUS_NOT_INITIALIZED";
    case ALLOC_FAILED: return "CUBLAS_STATUS_ALLOC_FAILED";
    case INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
    case EXECUTION_FAILED: return "CUBLAS_STATUS_EXECUTION_FAILED";
    case NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
    }
    return "CUBLAS_STATUS_UNKNOWN";
}

API const char *cublasGetStatusString(int status) {
    switch (status) {
    case SUCCESS: return "success";
    case NOT_INITIALIZED: return "the library was not initialized";
    case ALLOC_FAILED: return "the resource allocation failed";
    case INVALID_VALUE: return "an unsupported value or parameter was passed to the function";
    case EXECUTION_FAILED: return "the function failed to launch on the GPU";
    case NOT_SUPPORTED: return "the functionality requested is not supported";
    }
    return "unknown status";
}

/* Products. */

struct Product {
    int transposes[2];
    int64_t m, n, k;
    Scalar alpha, beta;
    const void *a, *b;
    void *c;
    int64_t lda, ldb, ldc;
    long long stride_a, stride_b, stride_c;
    int64_t batches;
    int type;
    char *workspace;
    size_t workspace_size;

    void run() const {
        /* A real product may use all of it: a caller that keeps something there loses it. */
        if (workspace_size) {
            size_t size = std::min(workspace_size, (size_t)4096);
            memset(workspace, 0xa5, size);
            memset(workspace + workspace_size - size, 0xa5, size);
        }
        with_type(type, [this](auto element) { this->multiply_all<decltype(element)>(); });
    }

    template <typename T> void multiply_all() const {
        typedef typename Wide<T>::type W;
        W alpha_value = alpha.read<W>(), beta_value = beta.read<W>();
        for (int64_t batch = 0; batch < batches; batch++)
            multiply_one<T, W>((const T *)a + batch * stride_a, (const T *)b + batch * stride_b,
                               (T *)c + batch * stride_c, alpha_value, beta_value);
    }

    /* Columns of op(A) and of op(B), packed in the type of the sums. */
    template <typename T, typename W>
    static std::vector<W> packed(const T *matrix, int64_t leading, int operation, int64_t rows, int64_t columns) {
        std::vector<W> result((size_t)(rows * columns));
        for (int64_t column = 0; column < columns; column++)
            for (int64_t row = 0; row < rows; row++) {
                W value = widen(operation == OP_N ? matrix[row + column * leading] : matrix[column + row * leading]);
                result[(size_t)(row + column * rows)] = operation == OP_C ? conjugate(value) : value;
            }
        return result;
    }

    template <typename T, typename W>
    void multiply_one(const T *a_matrix, const T *b_matrix, T *c_matrix, W alpha_value, W beta_value) const {
        std::vector<W> left, right, sums((size_t)m);
        bool has_product = !is_zero(alpha_value) && k > 0;
        if (has_product) {
            left = packed<T, W>(a_matrix, lda, transposes[0], m, k);
            right = packed<T, W>(b_matrix, ldb, transposes[1], k, n);
        }
        for (int64_t column = 0; column < n; column++) {
            std::fill(sums.begin(), sums.end(), W());
            for (int64_t inner = 0; has_product && inner < k; inner++) {
                W factor = right[(size_t)(inner + column * k)];
                const W *from = &left[(size_t)(inner * m)];
                for (int64_t row = 0; row < m; row++)
                    sums[(size_t)row] = add(sums[(size_t)row], multiply(from[row], factor));
            }
            for (int64_t row = 0; row < m; row++) {
                T &out = c_matrix[row + column * ldc];
                W value = has_product ? multiply(alpha_value, sums[(size_t)row]) : W();
                if (!is_zero(beta_value))
                    value = add(value, multiply(beta_value, widen(out)));
                narrow(value, out);
            }
        }
    }
};

static bool is_operation(int operation) { return operation >= OP_N && operation <= OP_C; }

static int check_product(const Product &product, int a_type, int b_type, int c_type, int compute) {
    const Product &p = product;
    if (!is_operation(p.transposes[0]) || !is_operation(p.transposes[1]))
        return INVALID_VALUE;
    if (p.m < 0 || p.n < 0 || p.k < 0 || p.batches < 0)
        return INVALID_VALUE;
    if (p.lda < std::max<int64_t>(1, p.transposes[0] == OP_N ? p.m : p.k) ||
        p.ldb < std::max<int64_t>(1, p.transposes[1] == OP_N ? p.k : p.n) || p.ldc < std::max<int64_t>(1, p.m))
        return INVALID_VALUE;
    bool is_double = c_type == R_64F || c_type == C_64F;
    if (a_type != b_type || b_type != c_type || !size_of(c_type) || compute != (is_double ? COMPUTE_64F : COMPUTE_32F))
        return NOT_SUPPORTED;
    return SUCCESS;
}

API int cublasGemmStridedBatchedEx_64(void *handle, int transpose_a, int transpose_b, int64_t m, int64_t n, int64_t k,
                                      const void *alpha, const void *a, int a_type, int64_t lda, long long stride_a,
                                      const void *b, int b_type, int64_t ldb, long long stride_b, const void *beta,
                                      void *c, int c_type, int64_t ldc, long long stride_c, int64_t batches,
                                      int compute, int algorithm) {
    Handle *found = find(handle);
    if (!found)
        return NOT_INITIALIZED;
    (void)algorithm;
    Product product = {};
    product.transposes[0] = transpose_a, product.transposes[1] = transpose_b;
    product.m = m, product.n = n, product.k = k, product.batches = batches;
    product.a = a, product.lda = lda, product.stride_a = stride_a;
    product.b = b, product.ldb = ldb, product.stride_b = stride_b;
    product.c = c, product.ldc = ldc, product.stride_c = stride_c;
    product.type = c_type;
    int status = check_product(product, a_type, b_type, c_type, compute);
    if (status)
        return status;
    if (!alpha || !beta)
        return INVALID_VALUE;
    if (m == 0 || n == 0 || batches == 0)
        return SUCCESS;
    if (!is_aligned(c, c_type) || (k > 0 && (!is_aligned(a, a_type) || !is_aligned(b, b_type))))
        return INVALID_VALUE;
    product.alpha = take(found, alpha, scalar_type(c_type));
    product.beta = take(found, beta, scalar_type(c_type));
    product.workspace = found->workspace, product.workspace_size = found->workspace_size;
    if (!found->workspace)
        without_workspace++;
    return enqueue(found, product, c_type);
}

API int cublasGemmEx_64(void *handle, int transpose_a, int transpose_b, int64_t m, int64_t n, int64_t k,
                        const void *alpha, const void *a, int a_type, int64_t lda, const void *b, int b_type,
                        int64_t ldb, const void *beta, void *c, int c_type, int64_t ldc, int compute, int algorithm) {
    return cublasGemmStridedBatchedEx_64(handle, transpose_a, transpose_b, m, n, k, alpha, a, a_type, lda, 0, b,
                                         b_type, ldb, 0, beta, c, c_type, ldc, 0, 1, compute, algorithm);
}

/* Vectors. */

/* Where a vector begins: with a negative increment it runs backwards, and its last element is at the address. */
template <typename T> static T *first_of(T *address, int64_t n, int64_t increment) {
    return increment < 0 ? address + (1 - n) * increment : address;
}

struct Axpy {
    int64_t n;
    Scalar alpha;
    const void *x;
    void *y;
    int64_t x_step, y_step;
    int type;

    void run() const {
        with_type(type, [this](auto element) {
            typedef decltype(element) T;
            typedef typename Wide<T>::type W;
            W factor = alpha.read<W>();
            const T *from = first_of((const T *)x, n, x_step);
            T *to = first_of((T *)y, n, y_step);
            for (int64_t i = 0; i < n && !is_zero(factor); i++)
                narrow(add(multiply(factor, widen(from[i * x_step])), widen(to[i * y_step])), to[i * y_step]);
        });
    }
};

API int cublasAxpyEx_64(void *handle, int64_t n, const void *alpha, int alpha_type, const void *x, int x_type,
                        int64_t x_step, void *y, int y_type, int64_t y_step, int execution) {
    Handle *found = find(handle);
    if (!found)
        return NOT_INITIALIZED;
    if (x_type != y_type || !size_of(x_type) || alpha_type != scalar_type(x_type) || execution != alpha_type)
        return NOT_SUPPORTED;
    if (n <= 0)
        return SUCCESS;
    if (!alpha || !is_aligned(x, x_type) || !is_aligned(y, y_type))
        return INVALID_VALUE;
    Axpy work = {n, take(found, alpha, alpha_type), x, y, x_step, y_step, x_type};
    return enqueue(found, work);
}

struct Scal {
    int64_t n;
    Scalar alpha;
    void *x;
    int64_t step;
    int type;

    void run() const {
        with_type(type, [this](auto element) {
            typedef decltype(element) T;
            typedef typename Wide<T>::type W;
            W factor = alpha.read<W>();
            for (int64_t i = 0; i < n; i++) {
                T &out = ((T *)x)[i * step];
                narrow(multiply(factor, widen(out)), out);
            }
        });
    }
};

API int cublasScalEx_64(void *handle, int64_t n, const void *alpha, int alpha_type, void *x, int x_type, int64_t step,
                        int execution) {
    Handle *found = find(handle);
    if (!found)
        return NOT_INITIALIZED;
    if (!size_of(x_type) || alpha_type != scalar_type(x_type) || execution != alpha_type)
        return NOT_SUPPORTED;
    if (n <= 0 || step <= 0)
        return SUCCESS;
    if (!alpha || !is_aligned(x, x_type))
        return INVALID_VALUE;
    Scal work = {n, take(found, alpha, alpha_type), x, step, x_type};
    return enqueue(found, work);
}

struct Dot {
    int64_t n;
    const void *x, *y;
    int64_t x_step, y_step;
    void *result;
    int type;

    void run() const {
        with_type(type, [this](auto element) {
            typedef decltype(element) T;
            typedef decltype(to_double(widen(element))) W;
            const T *left = first_of((const T *)x, n, x_step), *right = first_of((const T *)y, n, y_step);
            W sum = W();
            for (int64_t i = 0; i < n; i++)
                sum = add(sum, multiply(to_double(widen(left[i * x_step])), to_double(widen(right[i * y_step]))));
            narrow(sum, *(T *)result);
        });
    }
};

API int cublasDotEx_64(void *handle, int64_t n, const void *x, int x_type, int64_t x_step, const void *y, int y_type,
                       int64_t y_step, void *result, int result_type, int execution) {
    Handle *found = find(handle);
    if (!found)
        return NOT_INITIALIZED;
    if (!size_of(x_type) || y_type != x_type || result_type != x_type || execution != scalar_type(x_type))
        return NOT_SUPPORTED;
    /* A result on the host would need a wait: nobody here asks for it. */
    if (found->pointer_mode != DEVICE)
        return NOT_SUPPORTED;
    if (!is_aligned(result, x_type) || (n > 0 && (!is_aligned(x, x_type) || !is_aligned(y, y_type))))
        return INVALID_VALUE;
    Dot work = {std::max<int64_t>(n, 0), x, y, x_step, y_step, result, x_type};
    return enqueue(found, work);
}

struct Norm {
    int64_t n;
    const void *x;
    int64_t step;
    void *result;
    int type;

    /* Lawson et al.: the largest one so far is the unit of the sum. */
    static void include(double part, double &scale, double &sum) {
        double size = fabs(part);
        if (size == 0)
            return;
        if (size > scale) {
            sum = 1 + sum * (scale / size) * (scale / size);
            scale = size;
        } else
            sum += (size / scale) * (size / scale);
    }

    static void include(complex<double> number, double &scale, double &sum) {
        include(number.real, scale, sum);
        include(number.imaginary, scale, sum);
    }

    static bool is_kind(double part, bool (*test)(double)) { return test(part); }
    static bool is_kind(complex<double> number, bool (*test)(double)) {
        return test(number.real) || test(number.imaginary);
    }

    template <typename T> double norm() const {
        double scale = 0, sum = 1;
        bool has_nan = false, has_infinity = false;
        for (int64_t i = 0; i < n; i++) {
            auto value = to_double(without_denormal(widen(((const T *)x)[i * step])));
            has_nan |= is_kind(value, [](double part) { return part != part; });
            has_infinity |= is_kind(value, [](double part) { return std::isinf(part); });
            include(value, scale, sum);
        }
        if (has_nan)
            return std::numeric_limits<double>::quiet_NaN();
        return has_infinity ? HUGE_VAL : scale * sqrt(sum);
    }

    void run() const {
        with_type(type, [this](auto element) {
            double value = this->norm<decltype(element)>();
            switch (real_type(type)) {
            case R_16F: narrow(value, *(half *)result); break;
            case R_16BF: narrow(value, *(bfloat *)result); break;
            case R_32F: narrow(value, *(float *)result); break;
            default: narrow(value, *(double *)result); break;
            }
        });
    }
};

API int cublasNrm2Ex_64(void *handle, int64_t n, const void *x, int x_type, int64_t step, void *result,
                        int result_type, int execution) {
    Handle *found = find(handle);
    if (!found)
        return NOT_INITIALIZED;
    if (!size_of(x_type) || result_type != real_type(x_type) || execution != scalar_type(result_type))
        return NOT_SUPPORTED;
    if (found->pointer_mode != DEVICE)
        return NOT_SUPPORTED;
    if (!is_aligned(result, result_type) || (n > 0 && !is_aligned(x, x_type)))
        return INVALID_VALUE;
    Norm work = {n > 0 && step > 0 ? n : 0, x, step, result, x_type};
    return enqueue(found, work);
}
