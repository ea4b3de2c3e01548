/* What the parts of the stand-in CUDA driver share.
 *
 * The stand-in is a `libcuda.so.1` for machines without a GPU: device memory is host memory, a stream is a
 * thread with a queue, and a kernel is a function of a shared object. It declares the few types of the
 * driver's interface that it needs by itself, so that it builds where no CUDA header is installed.
 *
 * One lock guards every table and queue. It is never held while work runs (copies, kernels, host functions).
 */
#pragma once

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;

enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_DEVICE_UNAVAILABLE = 46,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_IMAGE = 200,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209,
    CUDA_ERROR_OPERATING_SYSTEM = 304,
    CUDA_ERROR_FILE_NOT_FOUND = 301,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_ILLEGAL_STATE = 401,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_ILLEGAL_ADDRESS = 700,
    CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE = 708,
    CUDA_ERROR_CONTEXT_IS_DESTROYED = 709,
    CUDA_ERROR_ASSERT = 710,
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713,
    CUDA_ERROR_LAUNCH_FAILED = 719,
    CUDA_ERROR_NOT_PERMITTED = 800,
    CUDA_ERROR_NOT_SUPPORTED = 801,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901,
    CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD = 908,
    CUDA_ERROR_UNKNOWN = 999,
};

/* Types of a graph's nodes. */
enum { NODE_KERNEL = 0, NODE_COPY = 1, NODE_FILL = 2, NODE_HOST = 4, NODE_CONDITIONAL = 13 };

enum { CU_LOCATION_DEVICE = 1, CU_LOCATION_HOST = 2 };

struct location {
    int type;
    int id;
};

#define API __attribute__((visibility("default")))

/* A function that cuGetProcAddress finds: by its name without suffix, from a version of CUDA on. */
struct driver_entry {
    const char *name;
    const char *symbol;
    int version;
    void *address;
    unsigned long calls;
};

/* Defines a function of the driver. The linker gathers the entries of all parts in the section `entries`. */
#define CUDA(name, since, symbol, ...)                                                                  \
    API CUresult symbol(__VA_ARGS__);                                                                   \
    __attribute__((used, section("entries"), aligned(8))) static struct driver_entry entry_##symbol = { \
        #name, #symbol, since, (void *)symbol, 0};                                                      \
    CUresult symbol(__VA_ARGS__)

/* Counts the call. */
#define COUNT(symbol) stand_in_count(&entry_##symbol)

/* Counts the call and refuses it before cuInit and in a host function, which may not call the driver. */
#define ENTER(symbol)                                        \
    do {                                                     \
        CUresult refusal_ = stand_in_enter(&entry_##symbol); \
        if (refusal_ != CUDA_SUCCESS)                        \
            return refusal_;                                 \
    } while (0)

#define CHECK(expression)              \
    do {                               \
        CUresult code_ = (expression); \
        if (code_ != CUDA_SUCCESS)     \
            return code_;              \
    } while (0)

void stand_in_count(struct driver_entry *entry);
CUresult stand_in_enter(struct driver_entry *entry);
long stand_in_setting(const char *name, long otherwise);

/* Guards everything below. `stand_in_progress` is broadcast when work ends, an event completes or a context
 * dies. */
extern pthread_mutex_t stand_in_lock;
extern pthread_cond_t stand_in_progress;
extern __thread bool stand_in_host_function; /* this thread is in a function that cuLaunchHostFunc queued */
extern bool stand_in_ready;                  /* cuInit has succeeded in this process */

int64_t stand_in_now(void);            /* monotonic, in nanoseconds */
void stand_in_wait(long microseconds); /* waits for progress, at most that long; the lock is held */

/* A device, and with it its one context: the primary one. */
struct context {
    int ordinal;    /* as the application counts */
    int physical;   /* as the machine counts */
    int references; /* retains that are not released */
    unsigned flags;
    CUresult sticky; /* the error that ended the context; nothing heals it in this process */
    int exclusive;   /* descriptor of the lock file in exclusive mode, or -1 */
    size_t used;     /* bytes of device memory */
    size_t graph_nodes; /* of executable graphs that are not destroyed, or in flight */
    size_t graph_room;  /* as many nodes as there is memory for: it is never given back */
    struct stream *streams;
    struct stream *legacy;
    struct stream *per_thread;
    struct pool *default_pool;
    struct pool *pool;
};

enum { MAXIMUM_DEVICES = 16 };

extern struct context stand_in_contexts[MAXIMUM_DEVICES];
extern int stand_in_device_count;

CUresult stand_in_find_devices(void);
size_t stand_in_memory_size(void);
CUresult get_device(CUdevice device, struct context **context);
CUresult
get_current(struct context **context); /* fails without a current context, and with its sticky error */
CUresult sticky_error(struct context *context);
void poison(struct context *context, CUresult code); /* the lock is held */

/* A point in the work of a stream. Waiters and events share it, hence the count of references. */
struct moment {
    int references;
    bool passed;
    struct timespec at;
    struct context *context;
};

/* How many streams of this thread capture: it takes no memory meanwhile, as seen on an H200 with driver 580. */
extern __thread int stand_in_captures;

struct stream;

/* Work in a queue: the first member of what each kind of work needs. Allocated with calloc, freed by the
 * worker. */
struct work {
    struct work *next;
    void (*run)(struct stream *stream, struct work *work); /* without the lock */
    void (*drop)(struct stream *stream, struct work *work,
                 CUresult code); /* instead, in a poisoned context */
    int node; /* of what type it is in a graph, and 1 more; 0 where it cannot be captured, as what runs once */
    bool is_captured; /* it runs as often as its graph, and is dropped with that */
};

enum { STREAM_NON_BLOCKING = 1, STREAM_MAGIC = 0x5eed5712, EVENT_MAGIC = 0x5eede7e7 };

/* Neither streams nor events are ever freed, so that a handle used after its end is an error and no crash. */
struct stream {
    unsigned magic;
    struct context *context;
    struct stream *next; /* in the context's list */
    unsigned flags;
    int priority;
    uint64_t id;
    bool closing;
    uint64_t queued;
    uint64_t finished;
    struct work *first;
    struct work *last;
    pthread_cond_t arrival;
    struct graph *capture; /* what is queued goes there instead */
    bool is_capture_broken;
    bool is_capture_lent;    /* the graph is another's */
    bool is_capture_relaxed; /* the thread may take memory meanwhile */
    struct node *captured_last;
    pthread_t capturer;
};

CUresult get_stream(void *handle, struct stream **stream);
CUresult submit(struct stream *stream, struct work *work); /* takes the work, also when it fails */
CUresult submit_and_wait(struct stream *stream, struct work *work);
CUresult capture(struct stream *stream, struct work *work); /* into its graph; NULL is refused; the lock is held */
CUresult drain(struct context *context); /* waits for all streams; without the lock */
void *new_work(size_t size, void (*run)(struct stream *, struct work *));
struct moment *new_moment(struct context *context);
void drop_moment(struct moment *moment); /* the lock is held */
CUresult submit_marker(struct stream *stream,
                       struct moment *moment); /* the stream gets there: the moment passes */
CUresult submit_wait(struct stream *stream, struct moment *moment);

/* Memory that the driver knows. */
enum kind {
    DEVICE_MEMORY,
    POOL_MEMORY,
    PINNED_MEMORY,
    REGISTERED_MEMORY,
    MANAGED_MEMORY,
    RESERVED_ADDRESSES
};

struct range {
    uintptr_t start;
    size_t size;
    enum kind kind;
    struct context *context;
    struct pool *pool;
    unsigned flags;
    uint64_t id;
};

struct range *find_range(uintptr_t address); /* the lock is held for these */
struct range *add_range(uintptr_t start, size_t size, enum kind kind, struct context *context);
bool overlaps_range(uintptr_t start, size_t size);
void remove_range(struct range *range);
bool is_host_kind(enum kind kind);
CUresult charge(struct context *context, size_t size); /* out of memory beyond the device's size */
void discharge(struct context *context, size_t size);
CUresult allocate_range(struct context *context, enum kind kind, size_t size, struct range **range);
void discharge_pool(struct range *range);                     /* an allocation of a pool is free */
CUresult check_device_access(uintptr_t address, size_t size); /* takes the lock */
bool is_pageable(const void *address);                        /* takes the lock */

/* A mapping of physical memory at reserved addresses; NULL where there is none. The lock is held. */
struct mapping {
    uintptr_t start;
    size_t size;
    struct chunk *chunk;
    struct context *context; /* of the chunk */
    int access;              /* of mprotect */
};

struct mapping *find_mapping(uintptr_t address);
