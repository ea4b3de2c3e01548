/* Events: handles of moments in the work of streams. */
#include "driver.h"

#include <stdlib.h>

enum { DISABLE_TIMING = 2, KNOWN_FLAGS = 7 };

struct event {
    unsigned magic;
    unsigned flags;
    struct context *context;
    struct moment *recorded; /* of the last record, or NULL before the first */
};

static CUresult get_event(void *handle, struct event **event) {
    *event = handle;
    if (!*event || __atomic_load_n(&(*event)->magic, __ATOMIC_RELAXED) != EVENT_MAGIC)
        return CUDA_ERROR_INVALID_HANDLE;
    return sticky_error((*event)->context);
}

CUDA(cuEventCreate, 2000, cuEventCreate, void **handle, unsigned flags) {
    struct context *context;
    ENTER(cuEventCreate);
    CHECK(get_current(&context));
    if (flags & ~(unsigned)KNOWN_FLAGS)
        return CUDA_ERROR_INVALID_VALUE;
    struct event *event = calloc(1, sizeof *event);
    *event = (struct event){.magic = EVENT_MAGIC, .flags = flags, .context = context};
    *handle = event;
    return CUDA_SUCCESS;
}

CUDA(cuEventDestroy, 4000, cuEventDestroy_v2, void *handle) {
    struct event *event;
    ENTER(cuEventDestroy_v2);
    CUresult code = get_event(handle, &event);
    if (code == CUDA_ERROR_INVALID_HANDLE)
        return code;
    pthread_mutex_lock(&stand_in_lock);
    __atomic_store_n(&event->magic, 0, __ATOMIC_RELAXED);
    drop_moment(event->recorded);
    event->recorded = NULL;
    pthread_mutex_unlock(&stand_in_lock);
    return code;
}

static CUresult record(void *handle, void *where) {
    struct event *event;
    struct stream *stream;
    CHECK(get_event(handle, &event));
    CHECK(get_stream(where, &stream));
    if (event->context != stream->context)
        return CUDA_ERROR_INVALID_HANDLE;
    struct moment *moment = new_moment(stream->context);
    CUresult code = submit_marker(stream, moment);
    pthread_mutex_lock(&stand_in_lock);
    if (code == CUDA_SUCCESS) {
        struct moment *before = event->recorded;
        event->recorded = moment;
        moment = before;
    }
    drop_moment(moment);
    pthread_mutex_unlock(&stand_in_lock);
    return code;
}

CUDA(cuEventRecord, 2000, cuEventRecord, void *handle, void *where) {
    ENTER(cuEventRecord);
    return record(handle, where);
}

CUDA(cuEventRecordWithFlags, 11010, cuEventRecordWithFlags, void *handle, void *where, unsigned flags) {
    ENTER(cuEventRecordWithFlags);
    return record(handle, where);
}

/* Waits for the last record before this call, also when the event is recorded anew meanwhile. */
CUDA(cuStreamWaitEvent, 3020, cuStreamWaitEvent, void *where, void *handle, unsigned flags) {
    struct event *event;
    struct stream *stream;
    ENTER(cuStreamWaitEvent);
    CHECK(get_stream(where, &stream));
    CHECK(get_event(handle, &event));
    pthread_mutex_lock(&stand_in_lock);
    struct moment *moment = event->recorded;
    if (moment)
        moment->references++;
    pthread_mutex_unlock(&stand_in_lock);
    if (!moment)
        return CUDA_SUCCESS;
    CUresult code = submit_wait(stream, moment);
    pthread_mutex_lock(&stand_in_lock);
    drop_moment(moment);
    pthread_mutex_unlock(&stand_in_lock);
    return code;
}

CUDA(cuEventQuery, 2000, cuEventQuery, void *handle) {
    struct event *event;
    ENTER(cuEventQuery);
    CHECK(get_event(handle, &event));
    pthread_mutex_lock(&stand_in_lock);
    bool passed = !event->recorded || event->recorded->passed;
    pthread_mutex_unlock(&stand_in_lock);
    return passed ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUDA(cuEventSynchronize, 2000, cuEventSynchronize, void *handle) {
    struct event *event;
    ENTER(cuEventSynchronize);
    CHECK(get_event(handle, &event));
    pthread_mutex_lock(&stand_in_lock);
    struct moment *moment = event->recorded;
    if (moment) {
        moment->references++;
        while (!moment->passed && !event->context->sticky)
            pthread_cond_wait(&stand_in_progress, &stand_in_lock);
        drop_moment(moment);
    }
    CUresult code = event->context->sticky;
    pthread_mutex_unlock(&stand_in_lock);
    return code;
}

static CUresult measure(struct event *start, struct event *end, float *milliseconds) {
    if (!start->recorded || !end->recorded || (start->flags | end->flags) & DISABLE_TIMING)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!start->recorded->passed || !end->recorded->passed)
        return CUDA_ERROR_NOT_READY;
    struct timespec from = start->recorded->at, to = end->recorded->at;
    *milliseconds =
        (float)((double)(to.tv_sec - from.tv_sec) * 1e3 + (double)(to.tv_nsec - from.tv_nsec) / 1e6);
    return CUDA_SUCCESS;
}

CUDA(cuEventElapsedTime, 2000, cuEventElapsedTime_v2, float *milliseconds, void *start, void *end) {
    struct event *first, *second;
    ENTER(cuEventElapsedTime_v2);
    CHECK(get_event(start, &first));
    CHECK(get_event(end, &second));
    pthread_mutex_lock(&stand_in_lock);
    CUresult code = measure(first, second, milliseconds);
    pthread_mutex_unlock(&stand_in_lock);
    return code;
}
