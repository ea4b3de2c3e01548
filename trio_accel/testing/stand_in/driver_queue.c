/* What is queued on streams besides copies and kernels: host functions, callbacks, and words in memory. */
#include "driver.h"

#include <stdlib.h>
#include <string.h>

enum { WAIT_GEQ = 0, WAIT_EQ = 1, WAIT_AND = 2, WAIT_NOR = 3, WAIT_FLUSH = 1 << 30, WRITE_NO_BARRIER = 1 };

enum { SHORTEST_POLL = 20, LONGEST_POLL = 500 }; /* microseconds */

struct host_work {
    struct work work;
    void (*function)(void *argument);
    void *argument;
};

static void run_host(struct stream *stream, struct work *work) {
    struct host_work *host = (struct host_work *)work;
    stand_in_host_function = true;
    host->function(host->argument);
    stand_in_host_function = false;
}

/* Not called at all when the context has died: the error is all that the application gets. */
CUDA(cuLaunchHostFunc, 10000, cuLaunchHostFunc, void *handle, void (*function)(void *), void *argument) {
    struct stream *stream;
    ENTER(cuLaunchHostFunc);
    CHECK(get_stream(handle, &stream));
    if (!function)
        return CUDA_ERROR_INVALID_VALUE;
    struct host_work *work = new_work(sizeof *work, run_host);
    work->work.node = NODE_HOST + 1;
    work->function = function;
    work->argument = argument;
    return submit(stream, &work->work);
}

typedef void (*callback)(void *handle, CUresult code, void *argument);

struct callback_work {
    struct work work;
    void *handle;
    callback function;
    void *argument;
};

static void drop_callback(struct stream *stream, struct work *work, CUresult code) {
    struct callback_work *call = (struct callback_work *)work;
    stand_in_host_function = true;
    call->function(call->handle, code, call->argument);
    stand_in_host_function = false;
}

static void run_callback(struct stream *stream, struct work *work) {
    drop_callback(stream, work, CUDA_SUCCESS);
}

CUDA(cuStreamAddCallback, 5000, cuStreamAddCallback, void *handle, callback function, void *argument,
     unsigned flags) {
    struct stream *stream;
    ENTER(cuStreamAddCallback);
    CHECK(get_stream(handle, &stream));
    if (!function || flags)
        return CUDA_ERROR_INVALID_VALUE;
    struct callback_work *work = new_work(sizeof *work, run_callback);
    work->work.drop = drop_callback;
    work->handle = handle;
    work->function = function;
    work->argument = argument;
    return submit(stream, &work->work);
}

struct word_work {
    struct work work;
    void *address;
    uint64_t value;
    unsigned condition;
    bool wide;
};

static uint64_t read_word(struct word_work *word) {
    if (word->wide)
        return __atomic_load_n((uint64_t *)word->address, __ATOMIC_ACQUIRE);
    return __atomic_load_n((uint32_t *)word->address, __ATOMIC_ACQUIRE);
}

static bool is_met(struct word_work *word) {
    uint64_t found = read_word(word);
    uint64_t mask = word->wide ? UINT64_MAX : UINT32_MAX;
    switch (word->condition) {
    case WAIT_GEQ: /* cyclic: the difference, as a signed number, is not negative */
        return ((found - word->value) & mask) <= mask >> 1;
    case WAIT_EQ:
        return found == word->value;
    case WAIT_AND:
        return (found & word->value) != 0;
    default:
        return (~(found | word->value) & mask) != 0;
    }
}

/* Anyone may write the word, so the wait polls, and sleeps between: longer each time, unless work ends
 * meanwhile. */
static void await_word(struct stream *stream, struct work *work) {
    struct word_work *word = (struct word_work *)work;
    long pause = SHORTEST_POLL;
    pthread_mutex_lock(&stand_in_lock);
    while (!stream->context->sticky && !is_met(word)) {
        stand_in_wait(pause);
        pause = pause * 3 / 2 < LONGEST_POLL ? pause * 3 / 2 : LONGEST_POLL;
    }
    pthread_mutex_unlock(&stand_in_lock);
}

static void write_word(struct stream *stream, struct work *work) {
    struct word_work *word = (struct word_work *)work;
    if (word->wide)
        __atomic_store_n((uint64_t *)word->address, word->value, __ATOMIC_RELEASE);
    else
        __atomic_store_n((uint32_t *)word->address, (uint32_t)word->value, __ATOMIC_RELEASE);
}

static CUresult submit_word(void *handle, CUdeviceptr address, uint64_t value, unsigned flags, bool wide,
                            void (*run)(struct stream *, struct work *)) {
    struct stream *stream;
    CHECK(get_stream(handle, &stream));
    unsigned known = run == await_word ? 3u | WAIT_FLUSH : WRITE_NO_BARRIER;
    size_t size = wide ? 8 : 4;
    if (flags & ~known || address % size)
        return CUDA_ERROR_INVALID_VALUE;
    CHECK(check_device_access(address, size));
    struct word_work *work = new_work(sizeof *work, run);
    work->address = (void *)address;
    work->value = value;
    work->condition = flags & 3u;
    work->wide = wide;
    return submit(stream, &work->work);
}

CUDA(cuStreamWaitValue32, 8000, cuStreamWaitValue32_v2, void *stream, CUdeviceptr address, uint32_t value,
     unsigned flags) {
    ENTER(cuStreamWaitValue32_v2);
    return submit_word(stream, address, value, flags, false, await_word);
}

CUDA(cuStreamWaitValue64, 9000, cuStreamWaitValue64_v2, void *stream, CUdeviceptr address, uint64_t value,
     unsigned flags) {
    ENTER(cuStreamWaitValue64_v2);
    return submit_word(stream, address, value, flags, true, await_word);
}

CUDA(cuStreamWriteValue32, 8000, cuStreamWriteValue32_v2, void *stream, CUdeviceptr address, uint32_t value,
     unsigned flags) {
    ENTER(cuStreamWriteValue32_v2);
    return submit_word(stream, address, value, flags, false, write_word);
}

CUDA(cuStreamWriteValue64, 9000, cuStreamWriteValue64_v2, void *stream, CUdeviceptr address, uint64_t value,
     unsigned flags) {
    ENTER(cuStreamWriteValue64_v2);
    return submit_word(stream, address, value, flags, true, write_word);
}

/* The union CUstreamBatchMemOpParams: 48 bytes, and the members of its waits and writes. */
struct batch_operation {
    int operation;
    CUdeviceptr address;
    uint64_t value;
    unsigned flags;
    CUdeviceptr alias;
    uint64_t padding;
};

CUDA(cuStreamBatchMemOp, 8000, cuStreamBatchMemOp_v2, void *stream, unsigned count,
     struct batch_operation *operations, unsigned flags) {
    enum { WAIT_32 = 1, WRITE_32 = 2, FLUSH = 3, WAIT_64 = 4, WRITE_64 = 5, BARRIER = 6 };
    ENTER(cuStreamBatchMemOp_v2);
    if (!operations || flags || count > 256)
        return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < count; i++) {
        struct batch_operation *each = &operations[i];
        if (each->operation == FLUSH || each->operation == BARRIER)
            continue;
        if (each->operation < WAIT_32 || each->operation > BARRIER)
            return CUDA_ERROR_INVALID_VALUE;
        bool wide = each->operation == WAIT_64 || each->operation == WRITE_64;
        bool waits = each->operation == WAIT_32 || each->operation == WAIT_64;
        uint64_t value = wide ? each->value : (uint32_t)each->value;
        CHECK(submit_word(stream, each->address, value, each->flags, wide, waits ? await_word : write_word));
    }
    return CUDA_SUCCESS;
}

struct failure_work {
    struct work work;
    CUresult code;
};

static void run_failure(struct stream *stream, struct work *work) {
    pthread_mutex_lock(&stand_in_lock);
    poison(stream->context, ((struct failure_work *)work)->code);
    pthread_mutex_unlock(&stand_in_lock);
}

/* Ends the context with an error when the stream gets there. */
API int stand_in_fail(void *handle, int code) {
    struct stream *stream;
    CHECK(get_stream(handle, &stream));
    struct failure_work *work = new_work(sizeof *work, run_failure);
    work->code = code;
    return submit(stream, &work->work);
}

struct library_work {
    struct work work;
    void (*function)(void *argument);
    void *argument;
};

/* Whose work a library's function is that runs in this thread. */
static __thread struct stream *runs_for;

static void run_library(struct stream *stream, struct work *work) {
    struct library_work *call = (struct library_work *)work;
    runs_for = stream;
    call->function(call->argument);
}

/* For such a function: ends the context with an error, before the function's stream counts it as done. */
API void stand_in_fault(int code) {
    pthread_mutex_lock(&stand_in_lock);
    poison(runs_for->context, code);
    pthread_mutex_unlock(&stand_in_lock);
}

static void drop_library(struct stream *stream, struct work *work, CUresult code) {
    free(((struct library_work *)work)->argument);
}

/* For the stand-in math libraries: runs `function(argument)` in the order of a stream. The function owns the
 * argument; where it is not called, the argument is freed. */
API int stand_in_enqueue(void *handle, void (*function)(void *), void *argument) {
    struct stream *stream;
    CUresult code = get_stream(handle, &stream);
    if (code == CUDA_SUCCESS) {
        struct library_work *work = new_work(sizeof *work, run_library);
        work->work.drop = drop_library;
        work->function = function;
        work->argument = argument;
        code = submit(stream, &work->work);
    }
    if (code != CUDA_SUCCESS)
        free(argument);
    return code;
}

struct call_work {
    struct work work;
    void (*function)(void *argument);
    _Alignas(16) char argument[];
};

static void run_call(struct stream *stream, struct work *work) {
    struct call_work *call = (struct call_work *)work;
    runs_for = stream;
    call->function(call->argument);
}

/* The same with a copy of the argument, which the function leaves as it is: so it can be captured, as a kernel. */
API int stand_in_call(void *handle, void (*function)(void *), const void *argument, size_t size) {
    struct stream *stream;
    CHECK(get_stream(handle, &stream));
    struct call_work *work = new_work(sizeof *work + size, run_call);
    work->work.node = NODE_KERNEL + 1;
    work->function = function;
    memcpy(work->argument, argument, size);
    return submit(stream, &work->work);
}
