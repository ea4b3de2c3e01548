/* Memory: what the driver knows of addresses, allocations of the device and of the host, and their
 * accounting. */
#define _GNU_SOURCE
#include "driver.h"

#include <search.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    DEVICE_ALIGNMENT = 512,
    HOST_ALIGNMENT = 4096,
    MARKED_SIZE = 65536,
    MEMORY_MARK = 0xA5,
    HOST_DEVICE_MAP = 2,
};

/* A search tree of disjoint ranges: those that overlap compare as equal, so an address finds its range. */
static void *ranges;
static uint64_t range_ids;

static int compare(const void *left, const void *right) {
    const struct range *a = left, *b = right;
    if (a->start + a->size <= b->start)
        return -1;
    return a->start >= b->start + b->size;
}

static struct range *find_overlap(uintptr_t start, size_t size) {
    struct range key = {.start = start, .size = size};
    struct range **found = tfind(&key, &ranges, compare);
    return found ? *found : NULL;
}

struct range *find_range(uintptr_t address) {
    return find_overlap(address, 1);
}

bool overlaps_range(uintptr_t start, size_t size) {
    return find_overlap(start, size) != NULL;
}

struct range *add_range(uintptr_t start, size_t size, enum kind kind, struct context *context) {
    struct range *range = calloc(1, sizeof *range);
    *range =
        (struct range){.start = start, .size = size, .kind = kind, .context = context, .id = ++range_ids};
    tsearch(range, &ranges, compare);
    return range;
}

void remove_range(struct range *range) {
    tdelete(range, &ranges, compare);
    free(range);
}

bool is_host_kind(enum kind kind) {
    return kind == PINNED_MEMORY || kind == REGISTERED_MEMORY;
}

CUresult charge(struct context *context, size_t size) {
    size_t total = stand_in_memory_size();
    if (size > total || context->used > total - size)
        return CUDA_ERROR_OUT_OF_MEMORY;
    context->used += size;
    return CUDA_SUCCESS;
}

void discharge(struct context *context, size_t size) {
    context->used -= size;
}

static bool is_accessible(uintptr_t address, size_t size) {
    struct range *range = find_range(address);
    if (!range || size > range->start + range->size - address)
        return false;
    if (range->kind != RESERVED_ADDRESSES)
        return true;
    for (uintptr_t end = address + size; address < end;) {
        struct mapping *mapping = find_mapping(address);
        if (!mapping || !mapping->access)
            return false;
        address = mapping->start + mapping->size;
    }
    return true;
}

CUresult check_device_access(uintptr_t address, size_t size) {
    pthread_mutex_lock(&stand_in_lock);
    bool accessible = size == 0 || is_accessible(address, size);
    pthread_mutex_unlock(&stand_in_lock);
    return accessible ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

bool is_pageable(const void *address) {
    pthread_mutex_lock(&stand_in_lock);
    bool known = find_range((uintptr_t)address) != NULL;
    pthread_mutex_unlock(&stand_in_lock);
    return !known;
}

/* Memory of the device comes with old contents: the mark shows a program that counts on zeros. */
static void *allocate(size_t size, size_t alignment) {
    void *memory = aligned_alloc(alignment, (size + alignment - 1) & ~(alignment - 1));
    if (memory)
        memset(memory, MEMORY_MARK, size < MARKED_SIZE ? size : MARKED_SIZE);
    return memory;
}

static size_t round_device_size(size_t size) {
    return (size + DEVICE_ALIGNMENT - 1) & ~(size_t)(DEVICE_ALIGNMENT - 1);
}

/* Allocates memory of a kind and enters its range; a pool charges the device by itself. The lock is held. */
CUresult allocate_range(struct context *context, enum kind kind, size_t size, struct range **range) {
    size_t alignment = is_host_kind(kind) ? HOST_ALIGNMENT : DEVICE_ALIGNMENT;
    if (size > SIZE_MAX / 2)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (kind == DEVICE_MEMORY || kind == MANAGED_MEMORY)
        CHECK(charge(context, round_device_size(size)));
    void *memory = allocate(size, alignment);
    if (!memory) {
        if (kind == DEVICE_MEMORY || kind == MANAGED_MEMORY)
            discharge(context, round_device_size(size));
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *range = add_range((uintptr_t)memory, size, kind, context);
    return CUDA_SUCCESS;
}

static CUresult allocate_current(enum kind kind, size_t size, unsigned flags, void **memory) {
    struct context *context;
    struct range *range = NULL;
    CHECK(get_current(&context));
    if (size == 0)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&stand_in_lock);
    CUresult code = allocate_range(context, kind, size, &range);
    if (code == CUDA_SUCCESS) {
        range->flags = flags;
        *memory = (void *)range->start;
    }
    pthread_mutex_unlock(&stand_in_lock);
    return code;
}

/* Frees what begins at an address, after the work of the context, as the driver does. */
static CUresult release(uintptr_t address, bool host) {
    struct context *context;
    CHECK(get_current(&context));
    if (!address)
        return host ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    pthread_mutex_lock(&stand_in_lock);
    struct range *range = find_range(address);
    bool fits = range && range->start == address && range->kind != RESERVED_ADDRESSES;
    if (fits && range->pool)
        fits = !range->flags; /* else it was freed in the order of a stream */
    else if (fits)
        fits = range->kind != REGISTERED_MEMORY && host == (range->kind == PINNED_MEMORY);
    context = fits ? range->context : context;
    pthread_mutex_unlock(&stand_in_lock);
    if (!fits)
        return CUDA_ERROR_INVALID_VALUE;
    CHECK(drain(context));
    pthread_mutex_lock(&stand_in_lock);
    if (range->pool)
        discharge_pool(range);
    else if (!host)
        discharge(context, round_device_size(range->size));
    remove_range(range);
    pthread_mutex_unlock(&stand_in_lock);
    free((void *)address);
    return CUDA_SUCCESS;
}

CUDA(cuMemAlloc, 3020, cuMemAlloc_v2, CUdeviceptr *address, size_t size) {
    ENTER(cuMemAlloc_v2);
    return allocate_current(DEVICE_MEMORY, size, 0, (void **)address);
}

CUDA(cuMemAllocManaged, 6000, cuMemAllocManaged, CUdeviceptr *address, size_t size, unsigned flags) {
    ENTER(cuMemAllocManaged);
    return allocate_current(MANAGED_MEMORY, size, flags, (void **)address);
}

CUDA(cuMemAllocPitch, 3020, cuMemAllocPitch_v2, CUdeviceptr *address, size_t *pitch, size_t width,
     size_t height, unsigned element) {
    ENTER(cuMemAllocPitch_v2);
    *pitch = round_device_size(width);
    return allocate_current(DEVICE_MEMORY, *pitch * height, 0, (void **)address);
}

CUDA(cuMemFree, 3020, cuMemFree_v2, CUdeviceptr address) {
    ENTER(cuMemFree_v2);
    return release(address, false);
}

CUDA(cuMemGetInfo, 3020, cuMemGetInfo_v2, size_t *available, size_t *total) {
    struct context *context;
    ENTER(cuMemGetInfo_v2);
    CHECK(get_current(&context));
    pthread_mutex_lock(&stand_in_lock);
    *total = stand_in_memory_size();
    *available = *total > context->used ? *total - context->used : 0;
    pthread_mutex_unlock(&stand_in_lock);
    return CUDA_SUCCESS;
}

CUDA(cuMemGetAddressRange, 3020, cuMemGetAddressRange_v2, CUdeviceptr *start, size_t *size,
     CUdeviceptr address) {
    struct context *context;
    ENTER(cuMemGetAddressRange_v2);
    CHECK(get_current(&context));
    pthread_mutex_lock(&stand_in_lock);
    struct range *range = find_range(address);
    struct mapping *mapping = range && range->kind == RESERVED_ADDRESSES ? find_mapping(address) : NULL;
    bool found = range && (mapping || range->kind != RESERVED_ADDRESSES);
    if (found && start)
        *start = mapping ? mapping->start : range->start;
    if (found && size)
        *size = mapping ? mapping->size : range->size;
    pthread_mutex_unlock(&stand_in_lock);
    return found ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUDA(cuMemHostAlloc, 2020, cuMemHostAlloc, void **memory, size_t size, unsigned flags) {
    ENTER(cuMemHostAlloc);
    if (flags & ~7u)
        return CUDA_ERROR_INVALID_VALUE;
    return allocate_current(PINNED_MEMORY, size, flags, memory);
}

CUDA(cuMemAllocHost, 3020, cuMemAllocHost_v2, void **memory, size_t size) {
    ENTER(cuMemAllocHost_v2);
    return allocate_current(PINNED_MEMORY, size, 0, memory);
}

CUDA(cuMemFreeHost, 2000, cuMemFreeHost, void *memory) {
    ENTER(cuMemFreeHost);
    return release((uintptr_t)memory, true);
}

CUDA(cuMemHostGetDevicePointer, 3020, cuMemHostGetDevicePointer_v2, CUdeviceptr *address, void *memory,
     unsigned flags) {
    struct context *context;
    ENTER(cuMemHostGetDevicePointer_v2);
    CHECK(get_current(&context));
    pthread_mutex_lock(&stand_in_lock);
    struct range *range = find_range((uintptr_t)memory);
    bool host = range && is_host_kind(range->kind);
    pthread_mutex_unlock(&stand_in_lock);
    if (!host || flags)
        return CUDA_ERROR_INVALID_VALUE;
    *address = (CUdeviceptr)memory;
    return CUDA_SUCCESS;
}

CUDA(cuMemHostGetFlags, 2030, cuMemHostGetFlags, unsigned *flags, void *memory) {
    struct context *context;
    ENTER(cuMemHostGetFlags);
    CHECK(get_current(&context));
    pthread_mutex_lock(&stand_in_lock);
    struct range *range = find_range((uintptr_t)memory);
    bool host = range && is_host_kind(range->kind);
    if (host)
        *flags = range->flags | HOST_DEVICE_MAP;
    pthread_mutex_unlock(&stand_in_lock);
    return host ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUDA(cuMemHostRegister, 6050, cuMemHostRegister_v2, void *memory, size_t size, unsigned flags) {
    struct context *context;
    ENTER(cuMemHostRegister_v2);
    CHECK(get_current(&context));
    if (!memory || !size || flags & ~15u)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&stand_in_lock);
    bool overlaps = overlaps_range((uintptr_t)memory, size);
    if (!overlaps)
        add_range((uintptr_t)memory, size, REGISTERED_MEMORY, context)->flags = flags;
    pthread_mutex_unlock(&stand_in_lock);
    return overlaps ? CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED : CUDA_SUCCESS;
}

CUDA(cuMemHostUnregister, 4000, cuMemHostUnregister, void *memory) {
    struct context *context;
    ENTER(cuMemHostUnregister);
    CHECK(get_current(&context));
    pthread_mutex_lock(&stand_in_lock);
    struct range *range = find_range((uintptr_t)memory);
    bool known = range && range->kind == REGISTERED_MEMORY && range->start == (uintptr_t)memory;
    if (known)
        remove_range(range);
    pthread_mutex_unlock(&stand_in_lock);
    return known ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}
