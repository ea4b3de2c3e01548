/* Streams: a thread with a queue each, and the order between them. */
#include "driver.h"

#include <signal.h>
#include <stdlib.h>

enum { LEGACY_HANDLE = 1, PER_THREAD_HANDLE = 2, HIGHEST_PRIORITY = -5 };

static uint64_t stream_ids = 1; /* of created streams; they count from 2 */

void *new_work(size_t size, void (*run)(struct stream *, struct work *)) {
    struct work *work = calloc(1, size);
    work->run = run;
    return work;
}

/* Takes the first piece of work, or NULL when the stream is closing and has none left. The lock is held. */
static struct work *next_work(struct stream *stream) {
    while (!stream->first && !stream->closing)
        pthread_cond_wait(&stream->arrival, &stand_in_lock);
    struct work *work = stream->first;
    if (work) {
        stream->first = work->next;
        if (!stream->first)
            stream->last = NULL;
    }
    return work;
}

static void forget_stream(struct stream *stream) {
    struct stream **link = &stream->context->streams;
    while (*link != stream)
        link = &(*link)->next;
    *link = stream->next;
}

static void *run_stream(void *argument) {
    struct stream *stream = argument;
    struct work *work;
    pthread_mutex_lock(&stand_in_lock);
    while ((work = next_work(stream))) {
        CUresult code = stream->context->sticky;
        pthread_mutex_unlock(&stand_in_lock);
        if (code == CUDA_SUCCESS)
            work->run(stream, work);
        else if (work->drop)
            work->drop(stream, work, code);
        free(work);
        pthread_mutex_lock(&stand_in_lock);
        stream->finished++;
        pthread_cond_broadcast(&stand_in_progress);
    }
    forget_stream(stream);
    pthread_mutex_unlock(&stand_in_lock);
    return NULL;
}

/* Signals are for the application's threads: the worker blocks them all. The lock is held. */
static struct stream *start_stream(struct context *context, unsigned flags, int priority) {
    struct stream *stream = calloc(1, sizeof *stream);
    *stream =
        (struct stream){.magic = STREAM_MAGIC, .context = context, .flags = flags, .priority = priority};
    stream->id = ++stream_ids;
    pthread_cond_init(&stream->arrival, NULL);
    stream->next = context->streams;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    int error = pthread_create(&thread, NULL, run_stream, stream);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error) {
        free(stream);
        return NULL;
    }
    pthread_detach(thread);
    context->streams = stream;
    return stream;
}

static CUresult get_default(struct stream **slot, struct context *context, struct stream **stream) {
    pthread_mutex_lock(&stand_in_lock);
    if (!*slot)
        *slot = start_stream(context, 0, 0);
    *stream = *slot;
    pthread_mutex_unlock(&stand_in_lock);
    return *stream ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

/* The stream of a handle, and the sticky error of its context. The handles 0, 1 and 2 mean the default
 * streams of the current context; here all threads of a context share one "per thread" stream. */
CUresult get_stream(void *handle, struct stream **stream) {
    if ((uintptr_t)handle <= PER_THREAD_HANDLE) {
        struct context *context;
        CHECK(get_current(&context));
        bool legacy = (uintptr_t)handle <= LEGACY_HANDLE;
        return get_default(legacy ? &context->legacy : &context->per_thread, context, stream);
    }
    *stream = handle;
    if ((*stream)->magic != STREAM_MAGIC || __atomic_load_n(&(*stream)->closing, __ATOMIC_RELAXED))
        return CUDA_ERROR_INVALID_HANDLE;
    return sticky_error((*stream)->context);
}

static void append(struct stream *stream, struct work *work) {
    if (stream->last)
        stream->last->next = work;
    else
        stream->first = work;
    stream->last = work;
    stream->queued++;
    pthread_cond_signal(&stream->arrival);
}

struct moment *new_moment(struct context *context) {
    struct moment *moment = calloc(1, sizeof *moment);
    moment->references = 1;
    moment->context = context;
    return moment;
}

void drop_moment(struct moment *moment) {
    if (moment && --moment->references == 0)
        free(moment);
}

struct moment_work {
    struct work work;
    struct moment *moment;
};

static void pass_moment(struct stream *stream, struct work *work) {
    struct moment *moment = ((struct moment_work *)work)->moment;
    pthread_mutex_lock(&stand_in_lock);
    moment->passed = true;
    clock_gettime(CLOCK_MONOTONIC, &moment->at);
    drop_moment(moment);
    pthread_mutex_unlock(&stand_in_lock);
}

/* In a poisoned context the moment never passes. */
static void miss_moment(struct stream *stream, struct work *work, CUresult code) {
    pthread_mutex_lock(&stand_in_lock);
    drop_moment(((struct moment_work *)work)->moment);
    pthread_mutex_unlock(&stand_in_lock);
}

/* A context that dies frees its own streams, and those of others that wait for one of its moments. */
static void await_moment(struct stream *stream, struct work *work) {
    struct moment *moment = ((struct moment_work *)work)->moment;
    pthread_mutex_lock(&stand_in_lock);
    while (!moment->passed && !moment->context->sticky && !stream->context->sticky)
        pthread_cond_wait(&stand_in_progress, &stand_in_lock);
    drop_moment(moment);
    pthread_mutex_unlock(&stand_in_lock);
}

static struct work *moment_work(struct moment *moment, void (*run)(struct stream *, struct work *)) {
    struct moment_work *work = new_work(sizeof *work, run);
    work->work.drop = miss_moment;
    work->moment = moment;
    moment->references++;
    return &work->work;
}

static void order_after(struct stream *later, struct stream *earlier) {
    if (earlier->queued == earlier->finished)
        return;
    struct moment *moment = new_moment(earlier->context);
    append(earlier, moment_work(moment, pass_moment));
    append(later, moment_work(moment, await_moment));
    drop_moment(moment);
}

/* Work of the legacy default stream follows what the blocking streams of its context have, and theirs follows
 * it. */
static void order_by_default_stream(struct stream *stream) {
    struct context *context = stream->context;
    if (stream == context->legacy) {
        for (struct stream *other = context->streams; other; other = other->next)
            if (other != stream && !(other->flags & STREAM_NON_BLOCKING))
                order_after(stream, other);
    } else if (context->legacy && !(stream->flags & STREAM_NON_BLOCKING)) {
        order_after(stream, context->legacy);
    }
}

/* Queues work and says where in the stream it is. */
static CUresult submit_at(struct stream *stream, struct work *work, uint64_t *place) {
    pthread_mutex_lock(&stand_in_lock);
    CUresult code = stream->context->sticky;
    if (code == CUDA_SUCCESS) {
        if (stream->capture) {
            code = capture(stream, work);
        } else {
            order_by_default_stream(stream);
            append(stream, work);
        }
        *place = stream->queued;
    }
    pthread_mutex_unlock(&stand_in_lock);
    if (code != CUDA_SUCCESS)
        free(work);
    return code;
}

CUresult submit(struct stream *stream, struct work *work) {
    uint64_t place;
    return submit_at(stream, work, &place);
}

static CUresult submit_moment(struct stream *stream, struct moment *moment,
                              void (*run)(struct stream *, struct work *)) {
    pthread_mutex_lock(&stand_in_lock);
    CUresult code = stream->context->sticky;
    if (code == CUDA_SUCCESS && stream->capture)
        code = capture(stream, NULL);
    if (code == CUDA_SUCCESS) {
        order_by_default_stream(stream);
        append(stream, moment_work(moment, run));
    }
    pthread_mutex_unlock(&stand_in_lock);
    return code;
}

CUresult submit_marker(struct stream *stream, struct moment *moment) {
    return submit_moment(stream, moment, pass_moment);
}

CUresult submit_wait(struct stream *stream, struct moment *moment) {
    return submit_moment(stream, moment, await_moment);
}

static CUresult wait_for(struct stream *stream, uint64_t place) {
    pthread_mutex_lock(&stand_in_lock);
    while (stream->finished < place && !stream->context->sticky)
        pthread_cond_wait(&stand_in_progress, &stand_in_lock);
    CUresult code = stream->context->sticky;
    pthread_mutex_unlock(&stand_in_lock);
    return code;
}

CUresult submit_and_wait(struct stream *stream, struct work *work) {
    uint64_t place;
    CHECK(submit_at(stream, work, &place));
    return wait_for(stream, place);
}

static bool is_idle(struct context *context) {
    for (struct stream *stream = context->streams; stream; stream = stream->next)
        if (stream->queued != stream->finished)
            return false;
    return true;
}

CUresult drain(struct context *context) {
    pthread_mutex_lock(&stand_in_lock);
    while (!is_idle(context) && !context->sticky)
        pthread_cond_wait(&stand_in_progress, &stand_in_lock);
    CUresult code = context->sticky;
    pthread_mutex_unlock(&stand_in_lock);
    return code;
}

static CUresult create_stream(void **handle, unsigned flags, int priority) {
    struct context *context;
    CHECK(get_current(&context));
    if (flags & ~(unsigned)STREAM_NON_BLOCKING)
        return CUDA_ERROR_INVALID_VALUE;
    if (priority > 0)
        priority = 0;
    if (priority < HIGHEST_PRIORITY)
        priority = HIGHEST_PRIORITY;
    pthread_mutex_lock(&stand_in_lock);
    *handle = start_stream(context, flags, priority);
    pthread_mutex_unlock(&stand_in_lock);
    return *handle ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

CUDA(cuStreamCreateWithPriority, 5050, cuStreamCreateWithPriority, void **handle, unsigned flags,
     int priority) {
    ENTER(cuStreamCreateWithPriority);
    return create_stream(handle, flags, priority);
}

CUDA(cuStreamCreate, 2000, cuStreamCreate, void **handle, unsigned flags) {
    ENTER(cuStreamCreate);
    return create_stream(handle, flags, 0);
}

/* Returns at once; the thread ends after the work that is queued. */
CUDA(cuStreamDestroy, 4000, cuStreamDestroy_v2, void *handle) {
    struct stream *stream;
    ENTER(cuStreamDestroy_v2);
    if ((uintptr_t)handle <= PER_THREAD_HANDLE)
        return CUDA_ERROR_INVALID_HANDLE;
    CUresult code = get_stream(handle, &stream);
    if (code == CUDA_ERROR_INVALID_HANDLE)
        return code;
    pthread_mutex_lock(&stand_in_lock);
    __atomic_store_n(&stream->closing, true, __ATOMIC_RELAXED);
    pthread_cond_signal(&stream->arrival);
    pthread_mutex_unlock(&stand_in_lock);
    return code;
}

CUDA(cuStreamQuery, 2000, cuStreamQuery, void *handle) {
    struct stream *stream;
    ENTER(cuStreamQuery);
    CHECK(get_stream(handle, &stream));
    pthread_mutex_lock(&stand_in_lock);
    CUresult code = stream->queued == stream->finished ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
    if (stream->capture)
        code = capture(stream, NULL);
    pthread_mutex_unlock(&stand_in_lock);
    return code;
}

CUDA(cuStreamSynchronize, 2000, cuStreamSynchronize, void *handle) {
    struct stream *stream;
    ENTER(cuStreamSynchronize);
    CHECK(get_stream(handle, &stream));
    pthread_mutex_lock(&stand_in_lock);
    CUresult code = stream->capture ? capture(stream, NULL) : CUDA_SUCCESS;
    /* What blocking streams have is waited for with the default one. */
    order_by_default_stream(stream);
    uint64_t place = stream->queued;
    pthread_mutex_unlock(&stand_in_lock);
    return code == CUDA_SUCCESS ? wait_for(stream, place) : code;
}

static CUresult get_context(void *handle, void **context) {
    struct stream *stream;
    CHECK(get_stream(handle, &stream));
    *context = stream->context;
    return CUDA_SUCCESS;
}

CUDA(cuStreamGetCtx, 9020, cuStreamGetCtx, void *handle, void **context) {
    ENTER(cuStreamGetCtx);
    return get_context(handle, context);
}

CUDA(cuStreamGetCtx, 12050, cuStreamGetCtx_v2, void *handle, void **context, void **green) {
    ENTER(cuStreamGetCtx_v2);
    if (green)
        *green = NULL;
    return get_context(handle, context);
}

CUDA(cuStreamGetDevice, 12080, cuStreamGetDevice, void *handle, CUdevice *device) {
    struct stream *stream;
    ENTER(cuStreamGetDevice);
    CHECK(get_stream(handle, &stream));
    *device = stream->context->ordinal;
    return CUDA_SUCCESS;
}

CUDA(cuStreamGetFlags, 5050, cuStreamGetFlags, void *handle, unsigned *flags) {
    struct stream *stream;
    ENTER(cuStreamGetFlags);
    CHECK(get_stream(handle, &stream));
    *flags = stream->flags;
    return CUDA_SUCCESS;
}

CUDA(cuStreamGetPriority, 5050, cuStreamGetPriority, void *handle, int *priority) {
    struct stream *stream;
    ENTER(cuStreamGetPriority);
    CHECK(get_stream(handle, &stream));
    *priority = stream->priority;
    return CUDA_SUCCESS;
}

CUDA(cuStreamGetId, 12000, cuStreamGetId, void *handle, unsigned long long *id) {
    struct stream *stream;
    ENTER(cuStreamGetId);
    CHECK(get_stream(handle, &stream));
    *id = stream->id;
    return CUDA_SUCCESS;
}
