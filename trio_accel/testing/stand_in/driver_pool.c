/* Memory pools and allocation in the order of a stream.
 *
 * A pool keeps what was freed up to its release threshold. Which memory that is does not matter here: only
 * the amount is kept, and charged to the device. An allocation counts as freed when cuMemFreeAsync is called;
 * its memory is given back when the stream gets there.
 */
#include "driver.h"

#include <stdlib.h>

enum { GRANULARITY = 2 << 20 };

enum {
    RELEASE_THRESHOLD = 4,
    RESERVED_CURRENT = 5,
    RESERVED_HIGH = 6,
    USED_CURRENT = 7,
    USED_HIGH = 8,
    ALLOCATION_TYPE = 9,
    HANDLE_TYPES = 10,
    LOCATION_ID = 11,
    LOCATION_TYPE = 12,
    MAXIMUM_SIZE = 13,
};

/* CUmemPoolProps */
struct pool_properties {
    int type;
    int handle_types;
    struct location location;
    void *security;
    size_t maximum;
    unsigned short usage;
    unsigned char reserved[54];
};

struct pool {
    struct context *context;
    struct pool_properties properties;
    uint64_t threshold;
    uint64_t reserved;
    uint64_t reserved_high;
    uint64_t used;
    uint64_t used_high;
    unsigned reuse[4]; /* the three reuse policies, which change nothing here */
};

static struct pool *host_pool;

static bool is_host(struct pool *pool) {
    return pool->properties.location.type != CU_LOCATION_DEVICE;
}

static struct pool *make_pool(struct context *context, const struct pool_properties *properties) {
    struct pool *pool = calloc(1, sizeof *pool);
    pool->context = context;
    pool->properties = *properties;
    for (int i = 1; i < 4; i++)
        pool->reuse[i] = 1;
    return pool;
}

static struct pool *get_default_pool(struct context *context) {
    if (!context->default_pool) {
        struct pool_properties properties = {.type = 1, .location = {CU_LOCATION_DEVICE, context->ordinal}};
        context->default_pool = make_pool(context, &properties);
    }
    return context->default_pool;
}

static struct pool *get_host_pool(void) {
    if (!host_pool) {
        struct pool_properties properties = {.type = 1, .location = {CU_LOCATION_HOST, 0}};
        host_pool = make_pool(&stand_in_contexts[0], &properties);
    }
    return host_pool;
}

/* Gives back to the device what the pool holds beyond a number of bytes, and beyond what is in use. */
static void trim(struct pool *pool, uint64_t keep) {
    uint64_t least = (pool->used + GRANULARITY - 1) & ~(uint64_t)(GRANULARITY - 1);
    if (keep < least)
        keep = least;
    if (pool->reserved <= keep)
        return;
    if (!is_host(pool))
        discharge(pool->context, pool->reserved - keep);
    pool->reserved = keep;
}

static CUresult charge_pool(struct pool *pool, size_t size) {
    uint64_t used = pool->used + size;
    uint64_t reserved = (used + GRANULARITY - 1) & ~(uint64_t)(GRANULARITY - 1);
    if (pool->properties.maximum && reserved > pool->properties.maximum)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (reserved > pool->reserved) {
        if (!is_host(pool))
            CHECK(charge(pool->context, reserved - pool->reserved));
        pool->reserved = reserved;
    }
    pool->used = used;
    if (pool->used > pool->used_high)
        pool->used_high = pool->used;
    if (pool->reserved > pool->reserved_high)
        pool->reserved_high = pool->reserved;
    return CUDA_SUCCESS;
}

void discharge_pool(struct range *range) {
    range->pool->used -= range->size;
    trim(range->pool, range->pool->threshold);
}

static CUresult allocate_from(struct pool *pool, size_t size, CUdeviceptr *address) {
    struct range *range;
    CHECK(charge_pool(pool, size));
    CUresult code = allocate_range(pool->context, is_host(pool) ? PINNED_MEMORY : POOL_MEMORY, size, &range);
    if (code != CUDA_SUCCESS) {
        pool->used -= size;
        trim(pool, pool->threshold);
        return code;
    }
    range->pool = pool;
    *address = range->start;
    return CUDA_SUCCESS;
}

/* With no pool, from the current one of the stream's device. */
static CUresult allocate_async(CUdeviceptr *address, size_t size, struct pool *pool, void *handle) {
    struct stream *stream;
    CHECK(get_stream(handle, &stream));
    if (size == 0)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&stand_in_lock);
    if (!pool)
        pool = stream->context->pool ? stream->context->pool : get_default_pool(stream->context);
    CUresult code = allocate_from(pool, size, address);
    pthread_mutex_unlock(&stand_in_lock);
    return code;
}

CUDA(cuMemAllocAsync, 11020, cuMemAllocAsync, CUdeviceptr *address, size_t size, void *stream) {
    ENTER(cuMemAllocAsync);
    if (stand_in_captures)
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    return allocate_async(address, size, NULL, stream);
}

CUDA(cuMemAllocFromPoolAsync, 11020, cuMemAllocFromPoolAsync, CUdeviceptr *address, size_t size, void *pool,
     void *stream) {
    ENTER(cuMemAllocFromPoolAsync);
    return pool ? allocate_async(address, size, pool, stream) : CUDA_ERROR_INVALID_VALUE;
}

struct free_work {
    struct work work;
    uintptr_t address;
};

static void run_free(struct stream *stream, struct work *work) {
    uintptr_t address = ((struct free_work *)work)->address;
    pthread_mutex_lock(&stand_in_lock);
    remove_range(find_range(address));
    pthread_mutex_unlock(&stand_in_lock);
    free((void *)address);
}

CUDA(cuMemFreeAsync, 11020, cuMemFreeAsync, CUdeviceptr address, void *handle) {
    struct stream *stream;
    ENTER(cuMemFreeAsync);
    CHECK(get_stream(handle, &stream));
    pthread_mutex_lock(&stand_in_lock);
    struct range *range = find_range(address);
    bool fits = range && range->start == address && range->pool && !range->flags;
    if (fits) {
        range->flags = 1; /* a second call is an error */
        discharge_pool(range);
    }
    pthread_mutex_unlock(&stand_in_lock);
    if (!fits)
        return CUDA_ERROR_INVALID_VALUE;
    struct free_work *work = new_work(sizeof *work, run_free);
    work->address = address;
    return submit(stream, &work->work);
}

static CUresult give_default_pool(void **handle, CUdevice device) {
    struct context *context;
    CHECK(get_device(device, &context));
    pthread_mutex_lock(&stand_in_lock);
    *handle = get_default_pool(context);
    pthread_mutex_unlock(&stand_in_lock);
    return CUDA_SUCCESS;
}

CUDA(cuDeviceGetDefaultMemPool, 11020, cuDeviceGetDefaultMemPool, void **handle, CUdevice device) {
    ENTER(cuDeviceGetDefaultMemPool);
    return give_default_pool(handle, device);
}

CUDA(cuDeviceGetMemPool, 11020, cuDeviceGetMemPool, void **handle, CUdevice device) {
    struct context *context;
    ENTER(cuDeviceGetMemPool);
    CHECK(get_device(device, &context));
    if (!context->pool)
        return give_default_pool(handle, device);
    *handle = context->pool;
    return CUDA_SUCCESS;
}

CUDA(cuDeviceSetMemPool, 11020, cuDeviceSetMemPool, CUdevice device, void *pool) {
    struct context *context;
    ENTER(cuDeviceSetMemPool);
    CHECK(get_device(device, &context));
    context->pool = pool;
    return CUDA_SUCCESS;
}

static CUresult give_located_pool(void **handle, const struct location *location) {
    if (location->type == CU_LOCATION_DEVICE)
        return give_default_pool(handle, location->id);
    pthread_mutex_lock(&stand_in_lock);
    *handle = get_host_pool();
    pthread_mutex_unlock(&stand_in_lock);
    return CUDA_SUCCESS;
}

CUDA(cuMemGetDefaultMemPool, 13000, cuMemGetDefaultMemPool, void **handle, const struct location *location,
     int type) {
    ENTER(cuMemGetDefaultMemPool);
    return give_located_pool(handle, location);
}

CUDA(cuMemGetMemPool, 13000, cuMemGetMemPool, void **handle, const struct location *location, int type) {
    ENTER(cuMemGetMemPool);
    return give_located_pool(handle, location);
}

CUDA(cuMemPoolCreate, 11020, cuMemPoolCreate, void **handle, const struct pool_properties *properties) {
    struct context *context = &stand_in_contexts[0];
    ENTER(cuMemPoolCreate);
    if (properties->location.type == CU_LOCATION_DEVICE)
        CHECK(get_device(properties->location.id, &context));
    CHECK(sticky_error(context));
    *handle = make_pool(context, properties);
    return CUDA_SUCCESS;
}

/* The structure stays: allocations that outlive the pool still refer to it. */
CUDA(cuMemPoolDestroy, 11020, cuMemPoolDestroy, struct pool *pool) {
    ENTER(cuMemPoolDestroy);
    CHECK(sticky_error(pool->context));
    pthread_mutex_lock(&stand_in_lock);
    pool->threshold = 0;
    trim(pool, 0);
    pthread_mutex_unlock(&stand_in_lock);
    return CUDA_SUCCESS;
}

CUDA(cuMemPoolTrimTo, 11020, cuMemPoolTrimTo, struct pool *pool, size_t keep) {
    ENTER(cuMemPoolTrimTo);
    CHECK(sticky_error(pool->context));
    pthread_mutex_lock(&stand_in_lock);
    trim(pool, keep);
    pthread_mutex_unlock(&stand_in_lock);
    return CUDA_SUCCESS;
}

static CUresult read_attribute(struct pool *pool, int attribute, void *value) {
    const struct pool_properties *properties = &pool->properties;
    const uint64_t amounts[] = {pool->threshold, pool->reserved, pool->reserved_high, pool->used,
                                pool->used_high};
    const int facts[] = {properties->type, properties->handle_types, properties->location.id,
                         properties->location.type};
    if (attribute < 1 || attribute > MAXIMUM_SIZE)
        return CUDA_ERROR_INVALID_VALUE;
    if (attribute < RELEASE_THRESHOLD)
        *(unsigned *)value = pool->reuse[attribute];
    else if (attribute <= USED_HIGH)
        *(uint64_t *)value = amounts[attribute - RELEASE_THRESHOLD];
    else if (attribute <= LOCATION_TYPE)
        *(int *)value = facts[attribute - ALLOCATION_TYPE];
    else
        *(uint64_t *)value = properties->maximum;
    return CUDA_SUCCESS;
}

CUDA(cuMemPoolGetAttribute, 11020, cuMemPoolGetAttribute, struct pool *pool, int attribute, void *value) {
    ENTER(cuMemPoolGetAttribute);
    CHECK(sticky_error(pool->context));
    pthread_mutex_lock(&stand_in_lock);
    CUresult code = read_attribute(pool, attribute, value);
    pthread_mutex_unlock(&stand_in_lock);
    return code;
}

static CUresult write_attribute(struct pool *pool, int attribute, const void *value) {
    if (attribute >= 1 && attribute < RELEASE_THRESHOLD)
        pool->reuse[attribute] = *(const unsigned *)value;
    else if (attribute == RELEASE_THRESHOLD)
        pool->threshold = *(const uint64_t *)value;
    else if (attribute == RESERVED_HIGH && *(const uint64_t *)value == 0)
        pool->reserved_high = pool->reserved;
    else if (attribute == USED_HIGH && *(const uint64_t *)value == 0)
        pool->used_high = pool->used;
    else
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

CUDA(cuMemPoolSetAttribute, 11020, cuMemPoolSetAttribute, struct pool *pool, int attribute, void *value) {
    ENTER(cuMemPoolSetAttribute);
    CHECK(sticky_error(pool->context));
    pthread_mutex_lock(&stand_in_lock);
    CUresult code = write_attribute(pool, attribute, value);
    pthread_mutex_unlock(&stand_in_lock);
    return code;
}

CUDA(cuMemPoolSetAccess, 11020, cuMemPoolSetAccess, struct pool *pool, const void *accesses, size_t count) {
    ENTER(cuMemPoolSetAccess);
    return sticky_error(pool->context);
}

CUDA(cuMemPoolGetAccess, 11020, cuMemPoolGetAccess, int *flags, struct pool *pool,
     const struct location *location) {
    enum { READ_WRITE = 3 };
    ENTER(cuMemPoolGetAccess);
    bool own = location->type == CU_LOCATION_DEVICE && location->id == pool->context->ordinal;
    *flags = own || is_host(pool) ? READ_WRITE : 0;
    return CUDA_SUCCESS;
}
