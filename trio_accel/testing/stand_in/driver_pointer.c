/* What the driver says about an address. */
#include "driver.h"

enum {
    CONTEXT = 1,
    MEMORY_TYPE = 2,
    DEVICE_POINTER = 3,
    HOST_POINTER = 4,
    SYNC_MEMOPS = 6,
    BUFFER_ID = 7,
    IS_MANAGED = 8,
    DEVICE_ORDINAL = 9,
    RANGE_START = 11,
    RANGE_SIZE = 12,
    IS_MAPPED = 13,
    ALLOWED_HANDLE_TYPES = 14,
    ACCESS_FLAGS = 16,
    POOL = 17,
};

enum { HOST_TYPE = 1, DEVICE_TYPE = 2, ACCESS_READ_WRITE = 3, NO_DEVICE_ORDINAL = -2 };

/* Answers for an address that the driver does not know. */
static void describe_unknown(int attribute, void *value) {
    switch (attribute) {
    case DEVICE_ORDINAL:
        *(int *)value = NO_DEVICE_ORDINAL;
        break;
    case MEMORY_TYPE:
    case ACCESS_FLAGS:
        *(unsigned *)value = 0;
        break;
    case SYNC_MEMOPS:
    case IS_MANAGED:
    case IS_MAPPED:
        *(bool *)value = false;
        break;
    default:
        *(uint64_t *)value = 0;
    }
}

static CUresult describe(int attribute, void *value, struct range *range, uintptr_t address) {
    bool host = is_host_kind(range->kind);
    struct mapping *mapping = range->kind == RESERVED_ADDRESSES ? find_mapping(address) : NULL;
    struct context *context = mapping ? mapping->context : range->context;
    switch (attribute) {
    case CONTEXT:
    case POOL:
        *(void **)value = attribute == POOL ? (void *)range->pool : (void *)context;
        break;
    case MEMORY_TYPE:
        *(unsigned *)value = host ? HOST_TYPE : DEVICE_TYPE;
        break;
    case DEVICE_POINTER:
        *(uintptr_t *)value = address;
        break;
    case HOST_POINTER:
        if (!host && range->kind != MANAGED_MEMORY)
            return CUDA_ERROR_INVALID_VALUE;
        *(uintptr_t *)value = address;
        break;
    case BUFFER_ID:
        *(uint64_t *)value = range->id;
        break;
    case IS_MANAGED:
        *(bool *)value = range->kind == MANAGED_MEMORY;
        break;
    case DEVICE_ORDINAL:
        *(int *)value = context->ordinal;
        break;
    case RANGE_START:
        *(uintptr_t *)value = range->start;
        break;
    case RANGE_SIZE:
        *(size_t *)value = range->size;
        break;
    case IS_MAPPED:
        *(bool *)value = range->kind != RESERVED_ADDRESSES || mapping;
        break;
    case ALLOWED_HANDLE_TYPES:
        *(uint64_t *)value = 0;
        break;
    case ACCESS_FLAGS:
        *(unsigned *)value = ACCESS_READ_WRITE;
        break;
    default:
        describe_unknown(attribute, value);
    }
    return CUDA_SUCCESS;
}

CUDA(cuPointerGetAttribute, 4000, cuPointerGetAttribute, void *value, int attribute, CUdeviceptr address) {
    struct context *context;
    ENTER(cuPointerGetAttribute);
    CHECK(get_current(&context));
    pthread_mutex_lock(&stand_in_lock);
    struct range *range = find_range(address);
    CUresult code = range ? describe(attribute, value, range, address) : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_unlock(&stand_in_lock);
    return code;
}

/* Succeeds also for an address that the driver does not know: ordinary memory of the host. */
CUDA(cuPointerGetAttributes, 7000, cuPointerGetAttributes, unsigned count, int *attributes, void **values,
     CUdeviceptr address) {
    struct context *context;
    ENTER(cuPointerGetAttributes);
    CHECK(get_current(&context));
    pthread_mutex_lock(&stand_in_lock);
    struct range *range = find_range(address);
    for (unsigned i = 0; i < count; i++)
        if (!range || describe(attributes[i], values[i], range, address) != CUDA_SUCCESS)
            describe_unknown(attributes[i], values[i]);
    pthread_mutex_unlock(&stand_in_lock);
    return CUDA_SUCCESS;
}
