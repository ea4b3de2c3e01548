/* A stand-in cuFFT: plans of up to three axes with the advanced data layout, on the stand-in driver.
 *
 * What it insists on is what the real one's documentation says: the order create, set auto allocation, make plan, set
 * work area, execute; the types of what is executed; alignment of complex data. The transform of real input to its
 * half spectrum, and back, leaves out what a half spectrum cannot say, as the real one does. Back to real numbers, it
 * destroys its input. The work area is written to all over, so that nobody keeps anything in it.
 *
 * A callback by LTO is a shared object, as the stand-in NVRTC makes it in place of LTO-IR. It is called once for each
 * element. Where there is one to load by, nothing is read from the source.
 *
 * Lengths that are powers of two are transformed by halving, others by way of a convolution (Bluestein), all in double
 * precision.
 */
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <complex>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#pragma GCC optimize("O3")

#define API extern "C" __attribute__((visibility("default")))

extern "C" int stand_in_enqueue(void *stream, void (*work)(void *), void *argument);
extern "C" int stand_in_check(void);
extern "C" int stand_in_drain(void);
extern "C" void stand_in_fault(int code);

enum { ILLEGAL_ADDRESS = 700 };

enum Result {
    SUCCESS = 0,
    INVALID_PLAN = 1,
    ALLOC_FAILED = 2,
    INVALID_TYPE = 3,
    INVALID_VALUE = 4,
    EXEC_FAILED = 6,
    SETUP_FAILED = 7,
    INVALID_SIZE = 8,
    NO_WORKSPACE = 13,
};

enum Type { C2C = 0x29, R2C = 0x2a, C2R = 0x2c, Z2Z = 0x69, D2Z = 0x6a, Z2D = 0x6c };

typedef long long Size;
typedef std::complex<double> Complex;

/* One side of a plan: where the element of a batch and of indices lies, counted in elements. */
struct Side {
    Size embed[3];
    Size stride;
    Size distance;

    Size at(int rank, Size batch, const Size *index) const {
        Size place = index[0];
        for (int axis = 1; axis < rank; axis++)
            place = place * embed[axis] + index[axis];
        return batch * distance + place * stride;
    }
};

/* What is called for the elements of one side. */
struct Callback {
    int type = -1;
    std::shared_ptr<void> library;
    void *function = nullptr;
    void *info = nullptr;
};

struct Plan {
    int type = 0; /* 0: not made yet */
    Callback load, store;
    int rank = 0;
    Size lengths[3] = {1, 1, 1};
    Side in, out;
    Size batch = 0;
    bool allocates = true;
    void *area = nullptr;
    size_t area_size = 0;
    void *stream = nullptr;
    std::shared_ptr<std::atomic<bool>> has_tables = std::make_shared<std::atomic<bool>>(false);
};

static std::mutex lock;
static std::map<int, std::shared_ptr<Plan>> plans;
static int next_plan = 1;
static unsigned long made;

/* Plans that exist, and that were ever made. */
API unsigned long stand_in_cufft_plans(void) {
    std::lock_guard<std::mutex> guard(lock);
    return plans.size();
}

API unsigned long stand_in_cufft_made(void) {
    std::lock_guard<std::mutex> guard(lock);
    return made;
}

static std::shared_ptr<Plan> find(int number) {
    std::lock_guard<std::mutex> guard(lock);
    auto found = plans.find(number);
    return found == plans.end() ? nullptr : found->second;
}

static bool is_single(int type) { return type == C2C || type == R2C || type == C2R; }
static bool is_real_input(int type) { return type == R2C || type == D2Z; }
static bool is_real_output(int type) { return type == C2R || type == Z2D; }

/* One axis. The tables of a length are made once for all its transforms of a call. */
class Line {
  public:
    explicit Line(Size length, int sign) : length_(length), sign_(sign) {
        if (length & (length - 1)) {
            padded_ = 1;
            while (padded_ < 2 * length - 1)
                padded_ *= 2;
            chirp_.resize(length);
            for (Size i = 0; i < length; i++)
                chirp_[i] = turn((double)((i * i) % (2 * length)) / (2.0 * length) * sign);
            make_roots(padded_);
            filter_.assign(padded_, 0.0);
            filter_[0] = std::conj(chirp_[0]);
            for (Size i = 1; i < length; i++)
                filter_[i] = filter_[padded_ - i] = std::conj(chirp_[i]);
            halve(filter_, -1);
        } else {
            padded_ = length;
            make_roots(length);
        }
    }

    void transform(std::vector<Complex> &line) const {
        if (padded_ == length_) {
            halve(line, sign_);
            return;
        }
        std::vector<Complex> work(padded_, 0.0);
        for (Size i = 0; i < length_; i++)
            work[i] = times(line[i], chirp_[i]);
        halve(work, -1);
        for (Size i = 0; i < padded_; i++)
            work[i] = times(work[i], filter_[i]);
        halve(work, 1);
        for (Size i = 0; i < length_; i++)
            line[i] = times(work[i], chirp_[i]) / (double)padded_;
    }

  private:
    static Complex turn(double part) { return std::polar(1.0, 2 * M_PI * part); }

    /* Without the rules for infinities, which cost more than the product. */
    static Complex times(Complex a, Complex b) {
        return {a.real() * b.real() - a.imag() * b.imag(), a.real() * b.imag() + a.imag() * b.real()};
    }

    void make_roots(Size length) {
        roots_.resize(length / 2 + 1);
        for (Size i = 0; i <= length / 2; i++)
            roots_[i] = turn((double)i / length);
    }

    void halve(std::vector<Complex> &line, int sign) const {
        const Size length = (Size)line.size();
        for (Size i = 1, j = 0; i < length; i++) {
            Size bit = length >> 1;
            for (; j & bit; bit >>= 1)
                j ^= bit;
            j ^= bit;
            if (i < j)
                std::swap(line[i], line[j]);
        }
        for (Size half = 1; half < length; half *= 2) {
            const Size step = length / (2 * half);
            for (Size start = 0; start < length; start += 2 * half)
                for (Size i = 0; i < half; i++) {
                    const Complex root = sign < 0 ? std::conj(roots_[i * step]) : roots_[i * step];
                    const Complex odd = times(line[start + half + i], root), even = line[start + i];
                    line[start + i] = even + odd;
                    line[start + half + i] = even - odd;
                }
        }
    }

    Size length_;
    int sign_;
    Size padded_;
    std::vector<Complex> chirp_, filter_, roots_;
};

struct Work {
    Plan plan;
    void *input, *output;
    int sign;
};

/* Extent of the last axis on a side that may be halved. */
static Size last_extent(const Plan &plan, bool is_halved) {
    const Size length = plan.lengths[plan.rank - 1];
    return is_halved ? length / 2 + 1 : length;
}

/* Calls `visit(number, index)` for all elements of a block of `lengths`, the last axis cut to `last`. */
template <typename Visit> static void for_each(const Plan &plan, Size last, Visit visit) {
    Size extents[3] = {1, 1, 1};
    for (int axis = 0; axis < plan.rank; axis++)
        extents[axis] = axis == plan.rank - 1 ? last : plan.lengths[axis];
    Size index[3];
    for (index[0] = 0; index[0] < extents[0]; index[0]++)
        for (index[1] = 0; index[1] < extents[1]; index[1]++)
            for (index[2] = 0; index[2] < extents[2]; index[2]++) {
                Size number = 0;
                for (int axis = 0; axis < plan.rank; axis++)
                    number = number * plan.lengths[axis] + index[axis];
                visit(number, index);
            }
}

/* The vector types of kernels, as functions return and take them. */
template <typename Real> struct Pair {
    Real x, y;
};

template <typename Element> static Element element(const Work &work, Size place) {
    const Callback &callback = work.plan.load;
    if (!callback.function)
        return ((const Element *)work.input)[place];
    return ((Element(*)(void *, unsigned long long, void *, void *))callback.function)(
        work.input, (unsigned long long)place, callback.info, nullptr);
}

template <typename Element> static void put(const Work &work, Size place, Element value) {
    const Callback &callback = work.plan.store;
    if (callback.function)
        ((void (*)(void *, unsigned long long, Element, void *, void *))callback.function)(
            work.output, (unsigned long long)place, value, callback.info, nullptr);
    else
        ((Element *)work.output)[place] = value;
}

template <typename Real> static void load(const Work &work, Size batch, std::vector<Complex> &block) {
    const Plan &plan = work.plan;
    if (is_real_input(plan.type)) {
        for_each(plan, last_extent(plan, false), [&](Size number, const Size *index) {
            block[number] = (double)element<Real>(work, plan.in.at(plan.rank, batch, index));
        });
        return;
    }
    const bool is_halved = is_real_output(plan.type);
    for_each(plan, last_extent(plan, is_halved), [&](Size number, const Size *index) {
        const Pair<Real> value = element<Pair<Real>>(work, plan.in.at(plan.rank, batch, index));
        block[number] = Complex(value.x, value.y);
    });
    if (is_halved && work.input != work.output)
        for_each(plan, last_extent(plan, true), [&](Size, const Size *index) {
            ((Pair<Real> *)work.input)[plan.in.at(plan.rank, batch, index)] = {NAN, NAN};
        });
}

template <typename Real> static void store(const Work &work, Size batch, const std::vector<Complex> &block) {
    const Plan &plan = work.plan;
    if (is_real_output(plan.type)) {
        for_each(plan, last_extent(plan, false), [&](Size number, const Size *index) {
            put(work, plan.out.at(plan.rank, batch, index), (Real)block[number].real());
        });
        return;
    }
    for_each(plan, last_extent(plan, is_real_input(plan.type)), [&](Size number, const Size *index) {
        const Pair<Real> value = {(Real)block[number].real(), (Real)block[number].imag()};
        put(work, plan.out.at(plan.rank, batch, index), value);
    });
}

/* Transforms a block along one axis; along the last, the other half of a half spectrum is made first. */
static void along(const Plan &plan, std::vector<Complex> &block, int axis, const Line &line, bool is_halved) {
    const Size length = plan.lengths[axis];
    Size inner = 1, outer = 1;
    for (int other = axis + 1; other < plan.rank; other++)
        inner *= plan.lengths[other];
    for (int other = 0; other < axis; other++)
        outer *= plan.lengths[other];
    std::vector<Complex> values(length);
    for (Size i = 0; i < outer; i++)
        for (Size j = 0; j < inner; j++) {
            Complex *first = block.data() + i * length * inner + j;
            for (Size k = 0; k < length; k++)
                values[k] = first[k * inner];
            if (is_halved) {
                values[0] = values[0].real();
                for (Size k = 1; k <= length / 2; k++)
                    values[length - k] = std::conj(values[k]);
                if (length % 2 == 0)
                    values[length / 2] = values[length / 2].real();
            }
            line.transform(values);
            for (Size k = 0; k < length; k++)
                first[k * inner] = values[k];
        }
}

template <typename Real> static void run(const Work &work) {
    const Plan &plan = work.plan;
    std::vector<Line> lines;
    Size size = 1;
    for (int axis = 0; axis < plan.rank; axis++) {
        lines.emplace_back(plan.lengths[axis], work.sign);
        size *= plan.lengths[axis];
    }
    /* In place, or onto what a later batch reads: everything is read first. */
    std::vector<std::vector<Complex>> blocks(work.input == work.output ? plan.batch : 0);
    for (Size batch = 0; batch < (Size)blocks.size(); batch++) {
        blocks[batch].assign(size, 0.0);
        load<Real>(work, batch, blocks[batch]);
    }
    std::vector<Complex> single(size);
    for (Size batch = 0; batch < plan.batch; batch++) {
        std::vector<Complex> &block = blocks.empty() ? single : blocks[batch];
        if (blocks.empty())
            load<Real>(work, batch, block);
        for (int axis = 0; axis < plan.rank; axis++)
            along(plan, block, axis, lines[axis], is_real_output(plan.type) && axis == plan.rank - 1);
        store<Real>(work, batch, block);
    }
    if (plan.area_size)
        memset(plan.area, 0xff, plan.area_size);
}

/* The driver frees the holder where this is not called. */
static void run_work(void *holder) {
    Work *work = *(Work **)holder;
    free(holder);
    if (!*work->plan.has_tables)
        stand_in_fault(ILLEGAL_ADDRESS);
    else if (is_single(work->plan.type))
        run<float>(*work);
    else
        run<double>(*work);
    delete work;
}

typedef std::shared_ptr<std::atomic<bool>> Tables;

static const int UPLOAD = 2000; /* in microseconds: the engine that copies has others to serve as well */

static void upload(void *holder) {
    Tables *tables = *(Tables **)holder;
    free(holder);
    usleep(UPLOAD);
    **tables = true;
    delete tables;
}

API int cufftCreate(int *handle) {
    if (!handle)
        return INVALID_VALUE;
    if (stand_in_check())
        return SETUP_FAILED;
    std::lock_guard<std::mutex> guard(lock);
    *handle = next_plan++;
    plans[*handle] = std::make_shared<Plan>();
    return SUCCESS;
}

API int cufftDestroy(int handle) {
    std::lock_guard<std::mutex> guard(lock);
    return plans.erase(handle) ? SUCCESS : INVALID_PLAN;
}

API int cufftSetAutoAllocation(int handle, int allocates) {
    auto plan = find(handle);
    if (!plan)
        return INVALID_PLAN;
    if (plan->type)
        return INVALID_PLAN; /* too late */
    plan->allocates = allocates != 0;
    return SUCCESS;
}

/* The functions of callbacks, in the order of their types: to load by, then to store by. */
static const char *const CALLBACKS[] = {
    "_Z27cufftJITCallbackLoadComplexPvyS_S_",
    "_Z33cufftJITCallbackLoadDoubleComplexPvyS_S_",
    "_Z24cufftJITCallbackLoadRealPvyS_S_",
    "_Z30cufftJITCallbackLoadDoubleRealPvyS_S_",
    "_Z28cufftJITCallbackStoreComplexPvy6float2S_S_",
    "_Z34cufftJITCallbackStoreDoubleComplexPvy7double2S_S_",
    "_Z25cufftJITCallbackStoreRealPvyfS_S_",
    "_Z31cufftJITCallbackStoreDoubleRealPvydS_S_",
};

API int cufftXtSetJITCallback(int handle, const char *name, const void *image, size_t size, int type, void **info) {
    auto plan = find(handle);
    if (!plan || plan->type)
        return INVALID_PLAN; /* too late */
    if (type < 0 || type > 7 || !image || !info)
        return INVALID_VALUE;
    char path[64];
    const int descriptor = memfd_create("stand-in-callback", MFD_CLOEXEC);
    snprintf(path, sizeof path, "/proc/self/fd/%d", descriptor);
    const bool is_written = descriptor >= 0 && write(descriptor, image, size) == (ssize_t)size;
    std::shared_ptr<void> library(is_written ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : nullptr, [=](void *opened) {
        if (opened)
            dlclose(opened);
        close(descriptor);
    });
    void *function = library ? dlsym(library.get(), name ? name : CALLBACKS[type]) : nullptr;
    if (!function)
        return INVALID_VALUE;
    (type < 4 ? plan->load : plan->store) = {type, library, function, *info};
    return SUCCESS;
}

/* The type that a callback has for one side of a plan; -1 is none. */
static bool fits(const Callback &callback, int first, bool is_real, int type) {
    return callback.type < 0 || callback.type == first + 2 * is_real + !is_single(type);
}

/* Whether the extents of the other axes fit between one index of an axis and the next. */
static bool is_embedding(int rank, const Size *extents, const Size *embed) {
    for (int axis = 1; axis < rank; axis++)
        if (embed[axis] < extents[axis])
            return false;
    return true;
}

static int take_side(Side &side, int rank, const Size *extents, const Size *embed, Size stride, Size distance,
                     Size batch) {
    Size whole = 1;
    for (int axis = 0; axis < rank; axis++) {
        side.embed[axis] = embed ? embed[axis] : extents[axis];
        whole *= extents[axis];
    }
    side.stride = embed ? stride : 1;
    side.distance = embed ? distance : whole;
    if (side.stride < 1 || (batch > 1 && side.distance < 1))
        return INVALID_VALUE;
    return is_embedding(rank, extents, side.embed) ? SUCCESS : INVALID_SIZE;
}

API int cufftMakePlanMany64(int handle, int rank, Size *lengths, Size *inembed, Size istride, Size idist,
                            Size *onembed, Size ostride, Size odist, int type, Size batch, size_t *size) {
    auto plan = find(handle);
    if (!plan || plan->type)
        return INVALID_PLAN;
    /* Seen with cuFFT 12.0 on an H200: a plan is made when nothing runs. */
    if (stand_in_check() || stand_in_drain())
        return SETUP_FAILED;
    if (type != C2C && type != R2C && type != C2R && type != Z2Z && type != D2Z && type != Z2D)
        return INVALID_TYPE;
    if (!fits(plan->load, 0, is_real_input(type), type) || !fits(plan->store, 4, is_real_output(type), type))
        return INVALID_TYPE;
    if (rank < 1 || rank > 3 || !lengths || !size || !inembed != !onembed)
        return INVALID_VALUE;
    if (batch < 1)
        return INVALID_SIZE;
    Size inputs[3], outputs[3];
    size_t whole = 1;
    for (int axis = 0; axis < rank; axis++) {
        if (lengths[axis] < 1)
            return INVALID_SIZE;
        plan->lengths[axis] = inputs[axis] = outputs[axis] = lengths[axis];
        whole *= (size_t)lengths[axis];
    }
    plan->rank = rank;
    const Size half = lengths[rank - 1] / 2 + 1;
    if (is_real_input(type))
        outputs[rank - 1] = half;
    if (is_real_output(type))
        inputs[rank - 1] = half;
    int status = take_side(plan->in, rank, inputs, inembed, istride, idist, batch);
    if (status == SUCCESS)
        status = take_side(plan->out, rank, outputs, onembed, ostride, odist, batch);
    if (status != SUCCESS)
        return status;
    plan->batch = batch;
    plan->type = type;
    /* Small powers of two need none. */
    *size = whole <= 64 && !(whole & (whole - 1)) ? 0 : whole * (is_single(type) ? 8 : 16);
    plan->area_size = *size;
    /* Seen with cuFFT 12.0 on an H200 whose copy engines were busy: the plan's tables are still on their way when
     * this returns, by the default stream, which others that do not block do not wait for. */
    Tables **holder = (Tables **)malloc(sizeof(Tables *));
    *holder = new Tables(plan->has_tables);
    if (stand_in_enqueue(nullptr, upload, holder))
        return SETUP_FAILED;
    std::lock_guard<std::mutex> guard(lock);
    made++;
    return SUCCESS;
}

API int cufftGetSize(int handle, size_t *size) {
    auto plan = find(handle);
    if (!plan || !plan->type)
        return INVALID_PLAN;
    *size = plan->area_size;
    return SUCCESS;
}

API int cufftSetWorkArea(int handle, void *area) {
    auto plan = find(handle);
    if (!plan || !plan->type)
        return INVALID_PLAN;
    plan->area = area;
    return SUCCESS;
}

API int cufftSetStream(int handle, void *stream) {
    auto plan = find(handle);
    if (!plan)
        return INVALID_PLAN;
    plan->stream = stream;
    return SUCCESS;
}

static int execute(int handle, int type, void *input, void *output, int sign) {
    auto plan = find(handle);
    if (!plan || !plan->type)
        return INVALID_PLAN;
    if (plan->type != type)
        return INVALID_TYPE;
    const size_t alignment = is_single(type) ? 8 : 16;
    if (!input || !output || (uintptr_t)input % alignment || (uintptr_t)output % alignment)
        return INVALID_VALUE;
    if (sign != -1 && sign != 1)
        return INVALID_VALUE;
    if (plan->allocates)
        return EXEC_FAILED; /* nothing here relies on it */
    if (plan->area_size && !plan->area)
        return NO_WORKSPACE;
    if (stand_in_check())
        return EXEC_FAILED;
    Work **holder = (Work **)malloc(sizeof(Work *));
    *holder = new Work{*plan, input, output, sign};
    return stand_in_enqueue(plan->stream, run_work, holder) ? EXEC_FAILED : SUCCESS;
}

API int cufftExecC2C(int handle, void *input, void *output, int sign) { return execute(handle, C2C, input, output, sign); }
API int cufftExecZ2Z(int handle, void *input, void *output, int sign) { return execute(handle, Z2Z, input, output, sign); }
API int cufftExecR2C(int handle, void *input, void *output) { return execute(handle, R2C, input, output, -1); }
API int cufftExecD2Z(int handle, void *input, void *output) { return execute(handle, D2Z, input, output, -1); }
API int cufftExecC2R(int handle, void *input, void *output) { return execute(handle, C2R, input, output, 1); }
API int cufftExecZ2D(int handle, void *input, void *output) { return execute(handle, Z2D, input, output, 1); }

static const int VERSION[] = {12, 0, 0};

API int cufftGetVersion(int *version) {
    *version = 1000 * VERSION[0] + 100 * VERSION[1] + VERSION[2];
    return SUCCESS;
}

API int cufftGetProperty(int part, int *value) {
    if (part < 0 || part > 2 || !value)
        return INVALID_VALUE;
    *value = VERSION[part];
    return SUCCESS;
}
