/* A stand-in cuDSS 0.8: direct solutions of general CSR matrices, by dense factors in the memory of the host.
 *
 * By default the diagonal is all that pivots are taken from, where the real library looks in its blocks: so a matrix
 * that it cannot factor well needs no thousand rows. With COLAMD they are the largest of their columns. A pivot that is
 * smaller than the epsilon is replaced by it, and counted. Each call waits for the stream, and computes at once.
 */
#include <cmath>
#include <complex>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <set>
#include <vector>

#pragma GCC optimize("O3")

#define API extern "C" __attribute__((visibility("default")))

extern "C" void stand_in_fault(int code);
extern "C" int stand_in_check(void);
extern "C" int cuStreamSynchronize(void *stream);

enum Status { SUCCESS, NOT_INITIALIZED, ALLOC_FAILED, INVALID_VALUE, NOT_SUPPORTED, EXECUTION_FAILED };

enum { ILLEGAL_ADDRESS = 700 };
enum Type { R_32F = 0, R_64F = 1, C_32F = 4, C_64F = 5, R_32I = 10, R_64I = 24 };
enum Parameter { REORDERING_ALG = 0, MATCHING_ALG = 3, PIVOT_EPSILON = 9 };
enum Found { INFO = 0, NPIVOTS = 2 };
enum Phase { ANALYSIS = 3, FACTORIZATION = 4, SOLVE = 1008 };
enum { REORDERING_DEFAULT = 0, COLAMD = 2, GENERAL = 0, FULL = 0, BASE_ZERO = 0, COL_MAJOR = 0 };

typedef std::complex<double> Number;

struct Memory {
    void *context;
    int (*allocate)(void *context, void **place, size_t size, void *stream);
    int (*free)(void *context, void *place, size_t size, void *stream);
    char name[64];
};

struct Handle {
    void *stream;
    Memory memory;
};

struct Config {
    int reordering;
    double epsilon;
};

struct Matrix {
    int64_t rows, columns, stored, leading;
    const void *offsets, *indices;
    void *values;
    int index_type, type;
};

struct Data {
    int phase, index_type;
    int64_t rows, pivots;
    void *room;
    size_t size;
    std::vector<Number> factors;
    std::vector<int64_t> order;
};

static std::mutex lock;
static std::set<const void *> alive;

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

API int cudssGetProperty(int part, int *value) {
    static const int VERSION[] = {0, 8, 0};
    if (part < 0 || part > 2 || !value)
        return INVALID_VALUE;
    *value = VERSION[part];
    return SUCCESS;
}

API int cudssCreate(void **handle) {
    if (stand_in_check())
        return NOT_INITIALIZED;
    *handle = keep(new Handle{});
    return SUCCESS;
}

API int cudssDestroy(void *handle) { return drop<Handle>(handle); }

API int cudssSetStream(void *handle, void *stream) {
    if (!is_alive(handle))
        return INVALID_VALUE;
    ((Handle *)handle)->stream = stream;
    return SUCCESS;
}

API int cudssSetDeviceMemHandler(void *handle, const Memory *memory) {
    if (!is_alive(handle) || !memory)
        return INVALID_VALUE;
    ((Handle *)handle)->memory = *memory;
    return SUCCESS;
}

API int cudssConfigCreate(void **config) {
    *config = keep(new Config{REORDERING_DEFAULT, 1e-13});
    return SUCCESS;
}

API int cudssConfigDestroy(void *config) { return drop<Config>(config); }

API int cudssConfigSet(void *config, int parameter, const void *value, size_t size) {
    if (!is_alive(config) || !value)
        return INVALID_VALUE;
    if (parameter == REORDERING_ALG && size == sizeof(int)) {
        memcpy(&((Config *)config)->reordering, value, size);
        const int given = ((Config *)config)->reordering;
        return given == REORDERING_DEFAULT || given == COLAMD ? SUCCESS : NOT_SUPPORTED;
    }
    if (parameter == MATCHING_ALG && size == sizeof(int))
        return SUCCESS; /* the diagonal stays as it is: a solver need not find a larger one */
    if (parameter == PIVOT_EPSILON && size == sizeof(double)) {
        memcpy(&((Config *)config)->epsilon, value, size);
        return SUCCESS;
    }
    return NOT_SUPPORTED; /* nothing here asks for it */
}

API int cudssDataCreate(void *handle, void **data) {
    if (!is_alive(handle))
        return INVALID_VALUE;
    *data = keep(new Data{});
    return SUCCESS;
}

API int cudssDataDestroy(void *handle, void *data) {
    if (!is_alive(handle) || !is_alive(data))
        return INVALID_VALUE;
    const Handle *of = (const Handle *)handle;
    const Data *given = (const Data *)data;
    if (given->room)
        of->memory.free(of->memory.context, given->room, given->size, of->stream);
    return drop<Data>(data);
}

API int cudssDataGet(void *handle, void *data, int parameter, void *value, size_t size, size_t *written) {
    if (!is_alive(handle) || !is_alive(data) || !value)
        return INVALID_VALUE;
    const Data *of = (const Data *)data;
    if (of->phase < FACTORIZATION)
        return INVALID_VALUE;
    if (parameter != INFO && parameter != NPIVOTS)
        return NOT_SUPPORTED;
    const int64_t wide = parameter == INFO ? 0 : of->pivots;
    const int narrow = (int)wide;
    *written = parameter == NPIVOTS && of->index_type == R_64I ? 8 : 4;
    if (size != *written)
        return INVALID_VALUE;
    memcpy(value, size == 8 ? (const void *)&wide : (const void *)&narrow, size);
    return SUCCESS;
}

static bool is_type(int type) { return type == R_32F || type == R_64F || type == C_32F || type == C_64F; }

API int cudssMatrixCreateCsr(void **matrix, int64_t rows, int64_t columns, int64_t stored, const void *offsets,
                             const void *ends, const void *indices, const void *values, int offset_type, int index_type,
                             int type, int kind, int view, int base) {
    if (rows < 1 || columns != rows || stored < 1 || !offsets || !indices || !values || !is_type(type))
        return INVALID_VALUE;
    if (ends || offset_type != index_type || kind != GENERAL || view != FULL || base != BASE_ZERO)
        return NOT_SUPPORTED;
    if (index_type != R_32I && index_type != R_64I)
        return INVALID_VALUE;
    *matrix = keep(new Matrix{rows, columns, stored, rows, offsets, indices, (void *)values, index_type, type});
    return SUCCESS;
}

API int cudssMatrixCreateDn(void **matrix, int64_t rows, int64_t columns, int64_t leading, const void *values, int type,
                            int layout) {
    if (rows < 1 || columns < 1 || leading < rows || !values || !is_type(type))
        return INVALID_VALUE;
    if (layout != COL_MAJOR)
        return NOT_SUPPORTED;
    *matrix = keep(new Matrix{rows, columns, 0, leading, nullptr, nullptr, (void *)values, 0, type});
    return SUCCESS;
}

API int cudssMatrixDestroy(void *matrix) { return drop<Matrix>(matrix); }

static int64_t index_at(const void *array, int type, int64_t place) {
    return type == R_64I ? ((const int64_t *)array)[place] : ((const int32_t *)array)[place];
}

static Number value_at(const Matrix &matrix, int64_t place) {
    switch (matrix.type) {
    case R_32F: return ((const float *)matrix.values)[place];
    case R_64F: return ((const double *)matrix.values)[place];
    case C_32F: return Number(((const std::complex<float> *)matrix.values)[place]);
    default: return ((const Number *)matrix.values)[place];
    }
}

static void put_value(const Matrix &matrix, int64_t place, Number value) {
    switch (matrix.type) {
    case R_32F: ((float *)matrix.values)[place] = (float)value.real(); break;
    case R_64F: ((double *)matrix.values)[place] = value.real(); break;
    case C_32F: ((std::complex<float> *)matrix.values)[place] = std::complex<float>(value); break;
    default: ((Number *)matrix.values)[place] = value;
    }
}

static int analyse(const Handle &handle, const Matrix &a, Data &data) {
    if (data.room)
        return NOT_SUPPORTED; /* nothing here does it twice */
    data.size = (size_t)a.rows * (size_t)a.rows * 8;
    if (handle.memory.allocate && handle.memory.allocate(handle.memory.context, &data.room, data.size, handle.stream)) {
        data.room = nullptr;
        return ALLOC_FAILED;
    }
    data.rows = a.rows;
    data.index_type = a.index_type;
    return SUCCESS;
}

static int factor(const Config &config, const Matrix &a, Data &data) {
    const int64_t n = data.rows;
    data.factors.assign(n * n, 0);
    data.order.resize(n);
    data.pivots = 0;
    Number *const f = data.factors.data();
    for (int64_t row = 0; row < n; row++) {
        int64_t before = -1;
        for (int64_t at = index_at(a.offsets, a.index_type, row); at < index_at(a.offsets, a.index_type, row + 1); at++) {
            const int64_t column = index_at(a.indices, a.index_type, at);
            if (column <= before || column >= n || at < 0 || at >= a.stored) {
                stand_in_fault(ILLEGAL_ADDRESS);
                return EXECUTION_FAILED;
            }
            f[row * n + column] = value_at(a, at);
            before = column;
        }
    }
    for (int64_t step = 0; step < n; step++) {
        int64_t best = step;
        for (int64_t row = step + 1; config.reordering == COLAMD && row < n; row++)
            if (std::abs(f[row * n + step]) > std::abs(f[best * n + step]))
                best = row;
        data.order[step] = best;
        for (int64_t column = 0; best != step && column < n; column++)
            std::swap(f[step * n + column], f[best * n + column]);
        if (!(std::abs(f[step * n + step]) >= config.epsilon)) {
            f[step * n + step] = config.epsilon;
            data.pivots++;
        }
        for (int64_t row = step + 1; row < n; row++) {
            if (f[row * n + step] == 0.0)
                continue;
            const Number part = f[row * n + step] /= f[step * n + step];
            for (int64_t column = step + 1; column < n; column++)
                f[row * n + column] -= part * f[step * n + column];
        }
    }
    return SUCCESS;
}

static void solve(const Data &data, const Matrix &x, const Matrix &b) {
    const int64_t n = data.rows;
    const Number *const f = data.factors.data();
    std::vector<Number> v(n);
    for (int64_t side = 0; side < b.columns; side++) {
        for (int64_t row = 0; row < n; row++)
            v[row] = value_at(b, side * b.leading + row);
        for (int64_t row = 0; row < n; row++)
            std::swap(v[row], v[data.order[row]]);
        for (int64_t row = 0; row < n; row++)
            for (int64_t column = 0; column < row; column++)
                v[row] -= f[row * n + column] * v[column];
        for (int64_t row = n - 1; row >= 0; row--) {
            for (int64_t column = row + 1; column < n; column++)
                v[row] -= f[row * n + column] * v[column];
            v[row] /= f[row * n + row];
        }
        for (int64_t row = 0; row < n; row++)
            put_value(x, side * x.leading + row, v[row]);
    }
}

API int cudssExecute(void *handle, int phase, void *config, void *data, void *a, void *x, void *b) {
    for (const void *object : {(const void *)handle, (const void *)config, (const void *)data, (const void *)a,
                               (const void *)x, (const void *)b})
        if (!is_alive(object))
            return INVALID_VALUE;
    const Handle &of = *(const Handle *)handle;
    if (stand_in_check() || cuStreamSynchronize(of.stream))
        return EXECUTION_FAILED;
    const Matrix &matrix = *(const Matrix *)a, &solution = *(const Matrix *)x, &side = *(const Matrix *)b;
    Data &given = *(Data *)data;
    if (matrix.type != side.type || side.type != solution.type || matrix.rows != side.rows || side.rows != solution.rows)
        return INVALID_VALUE;
    int status = SUCCESS;
    if (phase == ANALYSIS)
        status = analyse(of, matrix, given);
    else if (phase == FACTORIZATION && given.phase == ANALYSIS)
        status = factor(*(const Config *)config, matrix, given);
    else if (phase == SOLVE && given.phase == FACTORIZATION)
        solve(given, solution, side);
    else
        return NOT_SUPPORTED;
    if (status == SUCCESS && phase != SOLVE)
        given.phase = phase;
    return status;
}
