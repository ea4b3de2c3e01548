/* Virtual memory management: physical memory as memory files, mapped at reserved addresses.
 *
 * A memory file lives as long as a descriptor or a mapping of it does, in any process: just as physical
 * memory of the device whose handle was exported. What a process holds is charged to the device as that
 * process sees it.
 */
#define _GNU_SOURCE
#include "driver.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

enum { GRANULARITY = 2 << 20, POSIX_DESCRIPTOR = 1, PINNED = 1, ACCESS_READ = 1, ACCESS_READ_WRITE = 3 };

#define FILE_NAME "stand-in-device-" /* and the device, as the machine counts: an import finds it by this */

/* CUmemAllocationProp */
struct properties {
    int type;
    int handle_types;
    struct location location;
    void *metadata;
    unsigned char compression;
    unsigned char rdma;
    unsigned short usage;
    unsigned char reserved[4];
};

/* CUmemAccessDesc */
struct access {
    struct location location;
    int flags;
};

/* Physical memory. It is referred to by each handle and each mapping. */
struct chunk {
    struct chunk *next;
    int handles;
    int mappings;
    int descriptor;
    size_t size;
    struct context *context;
    struct properties properties;
    dev_t device;
    ino_t inode;
};

static struct chunk *chunks;
static struct mapping *mappings; /* sorted by address */
static size_t mapping_count;

static bool is_granular(size_t size) {
    return size > 0 && size % GRANULARITY == 0;
}

/* The first mapping that ends behind an address, or the count of mappings. */
static size_t find_place(uintptr_t address) {
    size_t low = 0, high = mapping_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (mappings[middle].start + mappings[middle].size <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

struct mapping *find_mapping(uintptr_t address) {
    size_t place = find_place(address);
    return place < mapping_count && mappings[place].start <= address ? &mappings[place] : NULL;
}

static struct chunk *find_chunk(void *handle) {
    struct chunk *chunk = chunks;
    while (chunk && (chunk != handle || chunk->handles == 0))
        chunk = chunk->next;
    return chunk;
}

static void drop_chunk(struct chunk *chunk) {
    if (chunk->handles || chunk->mappings)
        return;
    struct chunk **link = &chunks;
    while (*link != chunk)
        link = &(*link)->next;
    *link = chunk->next;
    discharge(chunk->context, chunk->size);
    close(chunk->descriptor);
    free(chunk);
}

/* Enters a memory file, whose descriptor the chunk owns from here on. */
static struct chunk *add_chunk(int descriptor, size_t size, const struct properties *properties,
                               struct context *context) {
    struct stat status;
    struct chunk *chunk = calloc(1, sizeof *chunk);
    fstat(descriptor, &status);
    *chunk = (struct chunk){.next = chunks,
                            .handles = 1,
                            .descriptor = descriptor,
                            .size = size,
                            .context = context,
                            .properties = *properties,
                            .device = status.st_dev,
                            .inode = status.st_ino};
    chunks = chunk;
    return chunk;
}

CUDA(cuMemGetAllocationGranularity, 10020, cuMemGetAllocationGranularity, size_t *granularity,
     const struct properties *properties, int option) {
    ENTER(cuMemGetAllocationGranularity);
    *granularity = GRANULARITY;
    return CUDA_SUCCESS;
}

static CUresult check_properties(const struct properties *properties, struct context **context) {
    if (properties->type != PINNED || properties->location.type != CU_LOCATION_DEVICE)
        return CUDA_ERROR_INVALID_VALUE;
    if (properties->handle_types & ~POSIX_DESCRIPTOR)
        return CUDA_ERROR_NOT_SUPPORTED;
    CHECK(get_device(properties->location.id, context));
    return sticky_error(*context);
}

static int make_file(struct context *context, size_t size) {
    char name[64];
    snprintf(name, sizeof name, FILE_NAME "%d", context->physical);
    int descriptor = memfd_create(name, MFD_CLOEXEC);
    if (descriptor >= 0 && ftruncate(descriptor, (off_t)size) != 0) {
        close(descriptor);
        descriptor = -1;
    }
    return descriptor;
}

CUDA(cuMemCreate, 10020, cuMemCreate, uint64_t *handle, size_t size, const struct properties *properties,
     uint64_t flags) {
    struct context *context;
    ENTER(cuMemCreate);
    if (flags || !is_granular(size))
        return CUDA_ERROR_INVALID_VALUE;
    CHECK(check_properties(properties, &context));
    pthread_mutex_lock(&stand_in_lock);
    CUresult code = charge(context, size);
    int descriptor = code == CUDA_SUCCESS ? make_file(context, size) : -1;
    if (descriptor >= 0) {
        *handle = (uintptr_t)add_chunk(descriptor, size, properties, context);
    } else if (code == CUDA_SUCCESS) {
        discharge(context, size);
        code = CUDA_ERROR_OPERATING_SYSTEM;
    }
    pthread_mutex_unlock(&stand_in_lock);
    return code;
}

CUDA(cuMemRelease, 10020, cuMemRelease, uint64_t handle) {
    ENTER(cuMemRelease);
    pthread_mutex_lock(&stand_in_lock);
    struct chunk *chunk = find_chunk((void *)handle);
    CUresult code = chunk ? sticky_error(chunk->context) : CUDA_ERROR_INVALID_VALUE;
    if (code == CUDA_SUCCESS) {
        chunk->handles--;
        drop_chunk(chunk);
    }
    pthread_mutex_unlock(&stand_in_lock);
    return code;
}

CUDA(cuMemGetAllocationPropertiesFromHandle, 10020, cuMemGetAllocationPropertiesFromHandle,
     struct properties *properties, uint64_t handle) {
    ENTER(cuMemGetAllocationPropertiesFromHandle);
    pthread_mutex_lock(&stand_in_lock);
    struct chunk *chunk = find_chunk((void *)handle);
    if (chunk)
        *properties = chunk->properties;
    pthread_mutex_unlock(&stand_in_lock);
    return chunk ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUDA(cuMemRetainAllocationHandle, 11000, cuMemRetainAllocationHandle, uint64_t *handle, void *address) {
    ENTER(cuMemRetainAllocationHandle);
    pthread_mutex_lock(&stand_in_lock);
    struct mapping *mapping = find_mapping((uintptr_t)address);
    if (mapping) {
        mapping->chunk->handles++;
        *handle = (uintptr_t)mapping->chunk;
    }
    pthread_mutex_unlock(&stand_in_lock);
    return mapping ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUDA(cuMemExportToShareableHandle, 10020, cuMemExportToShareableHandle, int *descriptor, uint64_t handle,
     int type, uint64_t flags) {
    ENTER(cuMemExportToShareableHandle);
    pthread_mutex_lock(&stand_in_lock);
    struct chunk *chunk = find_chunk((void *)handle);
    CUresult code = chunk ? sticky_error(chunk->context) : CUDA_ERROR_INVALID_VALUE;
    if (chunk && (flags || type != POSIX_DESCRIPTOR || !(chunk->properties.handle_types & POSIX_DESCRIPTOR)))
        code = CUDA_ERROR_INVALID_VALUE;
    if (code == CUDA_SUCCESS) {
        *descriptor = fcntl(chunk->descriptor, F_DUPFD_CLOEXEC, 0);
        code = *descriptor >= 0 ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
    }
    pthread_mutex_unlock(&stand_in_lock);
    return code;
}

/* The device whose memory a descriptor stands for, by the name of the memory file. */
static struct context *find_owner(int descriptor) {
    char path[64], target[128];
    int physical;
    snprintf(path, sizeof path, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(path, target, sizeof target - 1);
    if (length < 0)
        return NULL;
    target[length] = 0;
    if (sscanf(target, "/memfd:" FILE_NAME "%d", &physical) != 1)
        return NULL;
    for (int i = 0; i < stand_in_device_count; i++)
        if (stand_in_contexts[i].physical == physical)
            return &stand_in_contexts[i];
    return NULL;
}

static struct chunk *find_file(const struct stat *status) {
    struct chunk *chunk = chunks;
    while (chunk && (chunk->device != status->st_dev || chunk->inode != status->st_ino))
        chunk = chunk->next;
    return chunk;
}

/* Memory that this process has already is the same chunk again: it is charged once. The descriptor stays the
 * caller's. */
static CUresult import_file(int descriptor, struct chunk **imported) {
    struct stat status;
    struct context *context = find_owner(descriptor);
    if (!context || fstat(descriptor, &status) != 0)
        return CUDA_ERROR_INVALID_VALUE;
    CHECK(sticky_error(context));
    *imported = find_file(&status);
    if (*imported) {
        (*imported)->handles++;
        return CUDA_SUCCESS;
    }
    int own = fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
    if (own < 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    struct properties properties = {
        .type = PINNED, .handle_types = POSIX_DESCRIPTOR, .location = {CU_LOCATION_DEVICE, context->ordinal}};
    *imported = add_chunk(own, (size_t)status.st_size, &properties, context);
    context->used += (size_t)status.st_size; /* it exists: no limit stops it */
    return CUDA_SUCCESS;
}

CUDA(cuMemImportFromShareableHandle, 10020, cuMemImportFromShareableHandle, uint64_t *handle,
     void *descriptor, int type) {
    struct chunk *chunk = NULL;
    ENTER(cuMemImportFromShareableHandle);
    if (type != POSIX_DESCRIPTOR)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&stand_in_lock);
    CUresult code = import_file((int)(intptr_t)descriptor, &chunk);
    pthread_mutex_unlock(&stand_in_lock);
    if (code == CUDA_SUCCESS)
        *handle = (uintptr_t)chunk;
    return code;
}

/* Maps nothing at addresses of the alignment; a hint is taken when it is free. */
static void *reserve(size_t size, size_t alignment, void *hint) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    if (hint && (uintptr_t)hint % alignment == 0) {
        void *taken = mmap(hint, size, PROT_NONE, flags | MAP_FIXED_NOREPLACE, -1, 0);
        if (taken == hint)
            return taken;
        if (taken != MAP_FAILED) /* a kernel without MAP_FIXED_NOREPLACE went elsewhere */
            munmap(taken, size);
    }
    char *start = mmap(NULL, size + alignment, PROT_NONE, flags, -1, 0);
    if (start == MAP_FAILED)
        return NULL;
    size_t head = (alignment - (uintptr_t)start % alignment) % alignment;
    if (head)
        munmap(start, head);
    if (alignment > head)
        munmap(start + head + size, alignment - head);
    return start + head;
}

CUDA(cuMemAddressReserve, 10020, cuMemAddressReserve, CUdeviceptr *address, size_t size, size_t alignment,
     CUdeviceptr hint, uint64_t flags) {
    ENTER(cuMemAddressReserve);
    if (flags || !is_granular(size) || alignment & (alignment - 1))
        return CUDA_ERROR_INVALID_VALUE;
    if (alignment < GRANULARITY)
        alignment = GRANULARITY;
    pthread_mutex_lock(&stand_in_lock);
    void *start = reserve(size, alignment, (void *)hint);
    if (start) {
        add_range((uintptr_t)start, size, RESERVED_ADDRESSES, &stand_in_contexts[0]);
        *address = (CUdeviceptr)start;
    }
    pthread_mutex_unlock(&stand_in_lock);
    return start ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUDA(cuMemAddressFree, 10020, cuMemAddressFree, CUdeviceptr address, size_t size) {
    ENTER(cuMemAddressFree);
    pthread_mutex_lock(&stand_in_lock);
    struct range *range = find_range(address);
    bool fits = range && range->kind == RESERVED_ADDRESSES && range->start == address && range->size == size;
    size_t place = find_place(address);
    fits = fits && (place == mapping_count || mappings[place].start >= address + size);
    if (fits) {
        remove_range(range);
        munmap((void *)address, size);
    }
    pthread_mutex_unlock(&stand_in_lock);
    return fits ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult map_chunk(uintptr_t address, size_t size, struct chunk *chunk) {
    struct range *range = find_range(address);
    size_t place = find_place(address);
    if (!chunk || size > chunk->size || !range || range->kind != RESERVED_ADDRESSES)
        return CUDA_ERROR_INVALID_VALUE;
    if (size > range->start + range->size - address)
        return CUDA_ERROR_INVALID_VALUE;
    if (place < mapping_count && mappings[place].start < address + size)
        return CUDA_ERROR_INVALID_VALUE;
    CHECK(sticky_error(chunk->context));
    if (mmap((void *)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, chunk->descriptor, 0) == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    mappings = realloc(mappings, (mapping_count + 1) * sizeof *mappings);
    memmove(mappings + place + 1, mappings + place, (mapping_count++ - place) * sizeof *mappings);
    mappings[place] = (struct mapping){address, size, chunk, chunk->context, PROT_NONE};
    chunk->mappings++;
    return CUDA_SUCCESS;
}

CUDA(cuMemMap, 10020, cuMemMap, CUdeviceptr address, size_t size, size_t offset, uint64_t handle,
     uint64_t flags) {
    ENTER(cuMemMap);
    if (offset || flags || !is_granular(size) || address % GRANULARITY)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&stand_in_lock);
    CUresult code = map_chunk(address, size, find_chunk((void *)handle));
    pthread_mutex_unlock(&stand_in_lock);
    return code;
}

/* The mappings that make up a range of addresses exactly: from `*first`, as many as are returned. */
static size_t find_mappings(uintptr_t address, size_t size, size_t *first) {
    size_t place = *first = find_place(address);
    uintptr_t end = address + size;
    while (address < end) {
        if (place == mapping_count || mappings[place].start != address)
            return 0;
        address += mappings[place++].size;
    }
    return address == end ? place - *first : 0;
}

static CUresult unmap(uintptr_t address, size_t size) {
    size_t first, count = find_mappings(address, size, &first);
    if (!count)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = first; i < first + count; i++)
        CHECK(sticky_error(mappings[i].chunk->context));
    mmap((void *)address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    for (size_t i = first; i < first + count; i++) {
        mappings[i].chunk->mappings--;
        drop_chunk(mappings[i].chunk);
    }
    mapping_count -= count;
    memmove(mappings + first, mappings + first + count, (mapping_count - first) * sizeof *mappings);
    return CUDA_SUCCESS;
}

CUDA(cuMemUnmap, 10020, cuMemUnmap, CUdeviceptr address, size_t size) {
    ENTER(cuMemUnmap);
    pthread_mutex_lock(&stand_in_lock);
    CUresult code = unmap(address, size);
    pthread_mutex_unlock(&stand_in_lock);
    return code;
}

static CUresult set_access(uintptr_t address, size_t size, const struct access *access) {
    struct context *context;
    size_t first, count = find_mappings(address, size, &first);
    if (!count || access->location.type != CU_LOCATION_DEVICE)
        return CUDA_ERROR_INVALID_VALUE;
    CHECK(get_device(access->location.id, &context));
    CHECK(sticky_error(context));
    bool known = access->flags == 0 || access->flags == ACCESS_READ || access->flags == ACCESS_READ_WRITE;
    if (!known)
        return CUDA_ERROR_INVALID_VALUE;
    int protection = access->flags == 0 ? PROT_NONE : PROT_READ;
    if (access->flags == ACCESS_READ_WRITE)
        protection |= PROT_WRITE;
    if (mprotect((void *)address, size, protection) != 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    for (size_t i = first; i < first + count; i++)
        mappings[i].access = protection;
    return CUDA_SUCCESS;
}

CUDA(cuMemSetAccess, 10020, cuMemSetAccess, CUdeviceptr address, size_t size, const struct access *accesses,
     size_t count) {
    CUresult code = CUDA_SUCCESS;
    ENTER(cuMemSetAccess);
    pthread_mutex_lock(&stand_in_lock);
    for (size_t i = 0; i < count && code == CUDA_SUCCESS; i++)
        code = set_access(address, size, &accesses[i]);
    pthread_mutex_unlock(&stand_in_lock);
    return code;
}

CUDA(cuMemGetAccess, 10020, cuMemGetAccess, unsigned long long *flags, const struct location *location,
     CUdeviceptr address) {
    ENTER(cuMemGetAccess);
    pthread_mutex_lock(&stand_in_lock);
    struct mapping *mapping = find_mapping(address);
    bool own =
        mapping && location->type == CU_LOCATION_DEVICE && location->id == mapping->chunk->context->ordinal;
    *flags = !own || !mapping->access ? 0 : mapping->access & PROT_WRITE ? ACCESS_READ_WRITE : ACCESS_READ;
    pthread_mutex_unlock(&stand_in_lock);
    return mapping ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
