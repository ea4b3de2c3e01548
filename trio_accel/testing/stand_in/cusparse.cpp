/* A stand-in cuSPARSE: products of CSR matrices and dense vectors by the generic interface, on the stand-in driver.
 *
 * Descriptors are objects of the host, and their pointers are taken when a product is enqueued. A matrix is believed,
 * as the real library believes it, but what would read outside of its arrays ends the context with an illegal address:
 * row pointers that do not begin at 0, decrease, or end elsewhere than at the number of elements of the descriptor,
 * and columns that are not there. The buffer is written to all over.
 */
#include <atomic>
#include <complex>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <type_traits>

#pragma GCC optimize("O3")

#define API extern "C" __attribute__((visibility("default")))

extern "C" int stand_in_call(void *stream, void (*work)(void *), const void *argument, size_t size);
extern "C" void stand_in_fault(int code);
extern "C" int stand_in_check(void);
extern "C" int stand_in_drain(void);

enum Status {
    SUCCESS = 0,
    NOT_INITIALIZED = 1,
    INVALID_VALUE = 3,
    EXECUTION_FAILED = 6,
    NOT_SUPPORTED = 10,
};

enum { ILLEGAL_ADDRESS = 700 };
enum Type { R_32F = 0, R_64F = 1, C_32F = 4, C_64F = 5 };
enum IndexType { INDEX_32I = 2, INDEX_64I = 3 };
enum { NON_TRANSPOSE = 0, BASE_ZERO = 0, POINTER_MODE_HOST = 0 };
enum Algorithm { DEFAULT = 0, CSR_ALG1 = 2, CSR_ALG2 = 3 };

struct Handle {
    void *stream;
    int pointer_mode;
};

struct Matrix {
    int64_t rows, columns, stored;
    const void *offsets, *indices, *values;
    int index_type, type;
};

struct Vector {
    int64_t size;
    void *values;
    int type;
};

/* Whatever is alive: a descriptor that was destroyed is refused, and not read. */
static std::mutex lock;
static std::set<const void *> alive;

API unsigned long stand_in_cusparse_objects(void) {
    std::lock_guard<std::mutex> guard(lock);
    return alive.size();
}

template <typename Object> static Object *keep(Object *object) {
    std::lock_guard<std::mutex> guard(lock);
    alive.insert(object);
    return object;
}

static bool is_alive(const void *object) {
    std::lock_guard<std::mutex> guard(lock);
    return alive.count(object) != 0;
}

template <typename Object> static int drop(const void *object) {
    std::lock_guard<std::mutex> guard(lock);
    if (!alive.erase(object))
        return INVALID_VALUE;
    delete (Object *)object;
    return SUCCESS;
}

static bool is_type(int type) { return type == R_32F || type == R_64F || type == C_32F || type == C_64F; }

API int cusparseCreate(void **handle) {
    if (!handle)
        return INVALID_VALUE;
    /* Seen with cuSPARSE 12.6 on an H200: the first waits until nothing runs. */
    static std::atomic<bool> is_loaded{false};
    if (stand_in_check() || (!is_loaded.exchange(true) && stand_in_drain()))
        return NOT_INITIALIZED;
    *handle = keep(new Handle{nullptr, POINTER_MODE_HOST});
    return SUCCESS;
}

API int cusparseDestroy(void *handle) { return drop<Handle>(handle) ? NOT_INITIALIZED : SUCCESS; }

API int cusparseSetStream(void *handle, void *stream) {
    if (!is_alive(handle))
        return NOT_INITIALIZED;
    ((Handle *)handle)->stream = stream;
    return SUCCESS;
}

API int cusparseSetPointerMode(void *handle, int mode) {
    if (!is_alive(handle))
        return NOT_INITIALIZED;
    if (mode != POINTER_MODE_HOST)
        return NOT_SUPPORTED; /* nothing here asks for it */
    ((Handle *)handle)->pointer_mode = mode;
    return SUCCESS;
}

static const int VERSION[] = {12, 6, 3};

API int cusparseGetVersion(void *handle, int *version) {
    if (!is_alive(handle))
        return NOT_INITIALIZED;
    *version = 1000 * VERSION[0] + 100 * VERSION[1] + VERSION[2];
    return SUCCESS;
}

API int cusparseGetProperty(int part, int *value) {
    if (part < 0 || part > 2 || !value)
        return INVALID_VALUE;
    *value = VERSION[part];
    return SUCCESS;
}

API int cusparseCreateCsr(void **matrix, int64_t rows, int64_t columns, int64_t stored, void *offsets, void *indices,
                          void *values, int offset_type, int index_type, int base, int type) {
    if (!matrix || rows < 0 || columns < 0 || stored < 0 || (rows && columns && stored > rows * columns))
        return INVALID_VALUE;
    if (!offsets || (stored && (!indices || !values)) || !is_type(type))
        return INVALID_VALUE;
    if (index_type != INDEX_32I && index_type != INDEX_64I)
        return INVALID_VALUE;
    if (offset_type != index_type || base != BASE_ZERO)
        return NOT_SUPPORTED;
    *matrix = keep(new Matrix{rows, columns, stored, offsets, indices, values, index_type, type});
    return SUCCESS;
}

API int cusparseCsrSetPointers(void *matrix, void *offsets, void *indices, void *values) {
    if (!is_alive(matrix) || !offsets || !indices || !values)
        return INVALID_VALUE;
    Matrix *of = (Matrix *)matrix;
    of->offsets = offsets;
    of->indices = indices;
    of->values = values;
    return SUCCESS;
}

API int cusparseDestroySpMat(const void *matrix) { return drop<Matrix>(matrix); }

API int cusparseCreateDnVec(void **vector, int64_t size, void *values, int type) {
    if (!vector || size < 0 || (size && !values) || !is_type(type))
        return INVALID_VALUE;
    *vector = keep(new Vector{size, values, type});
    return SUCCESS;
}

API int cusparseDnVecSetValues(void *vector, void *values) {
    if (!is_alive(vector) || !values)
        return INVALID_VALUE;
    ((Vector *)vector)->values = values;
    return SUCCESS;
}

API int cusparseDestroyDnVec(const void *vector) { return drop<Vector>(vector); }

struct Product {
    Handle handle;
    Matrix matrix;
    Vector x, y;
    unsigned char alpha[16], beta[16];
    void *buffer;
    size_t size;
};

static size_t buffer_size(const Matrix &matrix) { return matrix.rows > 4 ? 8 * (size_t)(matrix.rows / 4) : 0; }

template <typename Index> static bool is_sound(const Matrix &matrix) {
    const Index *offsets = (const Index *)matrix.offsets, *indices = (const Index *)matrix.indices;
    if (offsets[0] != 0 || offsets[matrix.rows] != matrix.stored)
        return false;
    for (int64_t row = 0; row < matrix.rows; row++)
        if (offsets[row] > offsets[row + 1])
            return false;
    for (int64_t element = 0; element < matrix.stored; element++)
        if (indices[element] < 0 || indices[element] >= matrix.columns)
            return false;
    return true;
}

template <typename Number> static Number times(Number a, Number b) { return a * b; }
template <typename Number> static std::complex<Number> times(std::complex<Number> a, std::complex<Number> b) {
    return {a.real() * b.real() - a.imag() * b.imag(), a.real() * b.imag() + a.imag() * b.real()};
}

/* Sums in Wide. */
template <typename Index, typename Number, typename Wide> static void run(const Product &product) {
    const Matrix &matrix = product.matrix;
    if (!is_sound<Index>(matrix)) {
        stand_in_fault(ILLEGAL_ADDRESS);
        return;
    }
    const Index *offsets = (const Index *)matrix.offsets, *indices = (const Index *)matrix.indices;
    const Number *values = (const Number *)matrix.values, *x = (const Number *)product.x.values;
    Number *y = (Number *)product.y.values, alpha, beta;
    memcpy(&alpha, product.alpha, sizeof(alpha));
    memcpy(&beta, product.beta, sizeof(beta));
    for (int64_t row = 0; row < matrix.rows; row++) {
        Wide sum = 0;
        for (Index element = offsets[row]; element < offsets[row + 1]; element++)
            sum += times(Wide(values[element]), Wide(x[indices[element]]));
        sum = times(Wide(alpha), sum);
        if (beta != Number(0)) /* else y is not read */
            sum += times(Wide(beta), Wide(y[row]));
        y[row] = Number(sum);
    }
    if (product.size)
        memset(product.buffer, 0xff, product.size);
}

template <typename Index> static void run_type(const Product &product) {
    switch (product.matrix.type) {
    case R_32F: run<Index, float, double>(product); break;
    case R_64F: run<Index, double, double>(product); break;
    case C_32F: run<Index, std::complex<float>, std::complex<double>>(product); break;
    default: run<Index, std::complex<double>, std::complex<double>>(product); break;
    }
}

static void run_product(void *argument) {
    const Product &product = *(const Product *)argument;
    if (product.matrix.index_type == INDEX_64I)
        run_type<int64_t>(product);
    else
        run_type<int32_t>(product);
}

static int check(void *handle, int operation, const void *alpha, const void *matrix, const void *x, const void *beta,
                 const void *y, int type, int algorithm) {
    if (!is_alive(handle))
        return NOT_INITIALIZED;
    if (!alpha || !beta || !is_alive(matrix) || !is_alive(x) || !is_alive(y))
        return INVALID_VALUE;
    if (operation != NON_TRANSPOSE)
        return NOT_SUPPORTED; /* nothing here asks for it */
    if (algorithm != DEFAULT && algorithm != CSR_ALG1 && algorithm != CSR_ALG2)
        return NOT_SUPPORTED;
    const Matrix *of = (const Matrix *)matrix;
    const Vector *from = (const Vector *)x, *to = (const Vector *)y;
    if (from->size != of->columns || to->size != of->rows)
        return INVALID_VALUE;
    if (of->type != type || from->type != type || to->type != type)
        return NOT_SUPPORTED;
    return SUCCESS;
}

API int cusparseSpMV_bufferSize(void *handle, int operation, const void *alpha, const void *matrix, const void *x,
                                const void *beta, void *y, int type, int algorithm, size_t *size) {
    int status = check(handle, operation, alpha, matrix, x, beta, y, type, algorithm);
    if (status == SUCCESS)
        *size = buffer_size(*(const Matrix *)matrix);
    return status;
}

API int cusparseSpMV(void *handle, int operation, const void *alpha, const void *matrix, const void *x,
                     const void *beta, void *y, int type, int algorithm, void *buffer) {
    int status = check(handle, operation, alpha, matrix, x, beta, y, type, algorithm);
    if (status != SUCCESS)
        return status;
    if (stand_in_check())
        return EXECUTION_FAILED;
    const Handle *of = (const Handle *)handle;
    const size_t size = buffer_size(*(const Matrix *)matrix);
    if (size && !buffer)
        return INVALID_VALUE;
    Product product = {};
    product.handle = *of;
    product.matrix = *(const Matrix *)matrix;
    product.x = *(const Vector *)x;
    product.y = *(const Vector *)y;
    const size_t itemsize = type == R_32F ? 4 : type == C_64F ? 16 : 8;
    memcpy(product.alpha, alpha, itemsize);
    memcpy(product.beta, beta, itemsize);
    product.buffer = buffer;
    product.size = size;
    /* Seen with cuSPARSE 12.6 on an H100: it can be captured. */
    return stand_in_call(of->stream, run_product, &product, sizeof product) ? EXECUTION_FAILED : SUCCESS;
}

API const char *cusparseGetErrorName(int status) { return status ? "an error" : "CUSPARSE_STATUS_SUCCESS"; }
API const char *cusparseGetErrorString(int status) { return cusparseGetErrorName(status); }
