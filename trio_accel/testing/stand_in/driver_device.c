/* Devices and their primary contexts. */
#include "driver.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

enum { COMPUTE_MODE_PROHIBITED = 2, COMPUTE_MODE_EXCLUSIVE = 3, STACK_DEPTH = 32 };

struct context stand_in_contexts[MAXIMUM_DEVICES];
int stand_in_device_count;

static __thread struct context *stack[STACK_DEPTH];
static __thread int depth;

size_t stand_in_memory_size(void) {
    return (size_t)stand_in_setting("STAND_IN_MEMORY", 8L << 30);
}

static void fill_uuid(unsigned char *bytes, int physical) {
    static const unsigned char pattern[16] = {0x57, 0xa4, 0xd1, 0x4e, 0x00, 0x00, 0x40, 0x00, 0x80};
    memcpy(bytes, pattern, sizeof pattern);
    bytes[15] = (unsigned char)physical;
}

/* The device that an item of CUDA_VISIBLE_DEVICES names: an index, or "GPU-" and the start of a UUID. */
static int parse_visible(const char *item, size_t length, int count) {
    if (length > 4 && !strncmp(item, "GPU-", 4)) {
        for (int physical = 0; physical < count; physical++) {
            unsigned char bytes[16];
            char text[40];
            fill_uuid(bytes, physical);
            int size = 0;
            for (int i = 0; i < 16; i++)
                size +=
                    sprintf(text + size, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", bytes[i]);
            if (length - 4 <= (size_t)size && !strncmp(item + 4, text, length - 4))
                return physical;
        }
        return -1;
    }
    char *end;
    long index = strtol(item, &end, 10);
    return end == item || index < 0 || index >= count ? -1 : (int)index;
}

static bool is_listed(int physical) {
    for (int i = 0; i < stand_in_device_count; i++)
        if (stand_in_contexts[i].physical == physical)
            return true;
    return false;
}

/* As the driver does it: the list ends at the first item that names no device, and naming one twice names
 * none. */
CUresult stand_in_find_devices(void) {
    int count = (int)stand_in_setting("STAND_IN_DEVICES", 2);
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    stand_in_device_count = 0;
    if (count > MAXIMUM_DEVICES)
        count = MAXIMUM_DEVICES;
    for (int i = 0; i < count; i++) {
        int physical = i;
        if (visible) {
            size_t length = strcspn(visible, ",");
            physical = parse_visible(visible, length, count);
            visible += length + (visible[length] == ',');
        }
        if (physical < 0)
            break;
        if (is_listed(physical)) {
            stand_in_device_count = 0;
            break;
        }
        struct context *context = &stand_in_contexts[stand_in_device_count];
        *context =
            (struct context){.ordinal = stand_in_device_count++, .physical = physical, .exclusive = -1};
    }
    return stand_in_device_count ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

CUresult get_device(CUdevice device, struct context **context) {
    if (device < 0 || device >= stand_in_device_count)
        return CUDA_ERROR_INVALID_DEVICE;
    *context = &stand_in_contexts[device];
    return CUDA_SUCCESS;
}

CUresult sticky_error(struct context *context) {
    return __atomic_load_n(&context->sticky, __ATOMIC_ACQUIRE);
}

CUresult get_current(struct context **context) {
    if (!depth || !stack[depth - 1])
        return CUDA_ERROR_INVALID_CONTEXT;
    *context = stack[depth - 1];
    if (__atomic_load_n(&(*context)->references, __ATOMIC_RELAXED) == 0)
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    return sticky_error(*context);
}

void poison(struct context *context, CUresult code) {
    if (context->sticky == CUDA_SUCCESS)
        __atomic_store_n(&context->sticky, code, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&stand_in_progress);
}

CUDA(cuDeviceGetCount, 2000, cuDeviceGetCount, int *count) {
    ENTER(cuDeviceGetCount);
    *count = stand_in_device_count;
    return CUDA_SUCCESS;
}

CUDA(cuDeviceGet, 2000, cuDeviceGet, CUdevice *device, int ordinal) {
    struct context *context;
    ENTER(cuDeviceGet);
    CHECK(get_device(ordinal, &context));
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUDA(cuDeviceGetName, 2000, cuDeviceGetName, char *name, int length, CUdevice device) {
    struct context *context;
    ENTER(cuDeviceGetName);
    CHECK(get_device(device, &context));
    snprintf(name, (size_t)length, "Stand-in H200");
    return CUDA_SUCCESS;
}

static CUresult get_uuid(unsigned char *uuid, CUdevice device) {
    struct context *context;
    CHECK(get_device(device, &context));
    fill_uuid(uuid, context->physical);
    return CUDA_SUCCESS;
}

CUDA(cuDeviceGetUuid, 9020, cuDeviceGetUuid, unsigned char *uuid, CUdevice device) {
    ENTER(cuDeviceGetUuid);
    return get_uuid(uuid, device);
}

CUDA(cuDeviceGetUuid, 11040, cuDeviceGetUuid_v2, unsigned char *uuid, CUdevice device) {
    ENTER(cuDeviceGetUuid_v2);
    return get_uuid(uuid, device);
}

CUDA(cuDeviceGetPCIBusId, 4010, cuDeviceGetPCIBusId, char *text, int length, CUdevice device) {
    struct context *context;
    ENTER(cuDeviceGetPCIBusId);
    CHECK(get_device(device, &context));
    snprintf(text, (size_t)length, "0000:%02X:00.0", 0x10 + context->physical);
    return CUDA_SUCCESS;
}

CUDA(cuDeviceTotalMem, 3020, cuDeviceTotalMem_v2, size_t *size, CUdevice device) {
    struct context *context;
    ENTER(cuDeviceTotalMem_v2);
    CHECK(get_device(device, &context));
    *size = stand_in_memory_size();
    return CUDA_SUCCESS;
}

/* The values of an H200, by the numbers of CUdevice_attribute. What is not listed is 0: the device lacks it.
 */
static const int attributes[][2] = {
    {1, 1024},        /* threads per block */
    {2, 1024},        /* block, x */
    {3, 1024},        /* block, y */
    {4, 64},          /* block, z */
    {5, 2147483647},  /* grid, x */
    {6, 65535},       /* grid, y */
    {7, 65535},       /* grid, z */
    {8, 49152},       /* shared memory per block */
    {9, 65536},       /* constant memory */
    {10, 32},         /* warp */
    {11, 2147483647}, /* pitch */
    {12, 65536},      /* registers per block */
    {13, 1980000},    /* clock, kHz */
    {14, 512},        /* texture alignment */
    {15, 1},          /* copies overlap kernels */
    {16, 132},        /* multiprocessors */
    {19, 1},          /* maps host memory */
    {31, 1},          /* concurrent kernels */
    {32, 1},          /* ECC */
    {36, 3201000},    /* memory clock, kHz */
    {37, 6144},       /* memory bus, bits */
    {38, 62914560},   /* L2 cache */
    {39, 2048},       /* threads per multiprocessor */
    {40, 3},          /* copy engines */
    {41, 1},          /* unified addressing */
    {75, 9},          /* compute capability, major */
    {76, 0},          /* compute capability, minor */
    {78, 1},          /* stream priorities */
    {79, 1},          /* global memory in L1 */
    {80, 1},          /* local memory in L1 */
    {81, 233472},     /* shared memory per multiprocessor */
    {82, 65536},      /* registers per multiprocessor */
    {83, 1},          /* managed memory */
    {87, 2},          /* ratio of single to double precision */
    {89, 1},          /* concurrent managed access */
    {90, 1},          /* compute preemption */
    {91, 1},          /* host pointers of registered memory are device pointers */
    {92, 1},          /* stream memory operations (first form) */
    {93, 1},          /* the same in 64 bits */
    {94, 1},          /* the same with NOR */
    {95, 1},          /* cooperative launch */
    {97, 232448},     /* shared memory per block, opted in */
    {98, 1},          /* flushes remote writes */
    {99, 1},          /* registers host memory */
    {102, 1},         /* virtual memory management */
    {103, 1},         /* handles that are POSIX descriptors */
    {106, 32},        /* blocks per multiprocessor */
    {108, 41943040},  /* persisting L2 cache */
    {111, 1024},      /* reserved shared memory per block */
    {113, 1},         /* registers read-only host memory */
    {115, 1},         /* memory pools */
    {119, 1},         /* handle types of pools: POSIX descriptors */
    {120, 1},         /* clusters */
    {122, 1},         /* stream memory operations in 64 bits */
    {123, 1},         /* the same with NOR */
    {125, 1},         /* interprocess events */
    {127, 1},         /* tensor maps */
    {129, 1},         /* unified function pointers */
    {144, 1},         /* pools of host memory */
};

CUDA(cuDeviceGetAttribute, 2000, cuDeviceGetAttribute, int *value, int attribute, CUdevice device) {
    struct context *context;
    ENTER(cuDeviceGetAttribute);
    CHECK(get_device(device, &context));
    if (attribute < 1)
        return CUDA_ERROR_INVALID_VALUE;
    *value = 0;
    if (attribute == 20)
        *value = (int)stand_in_setting("STAND_IN_COMPUTE_MODE", 0);
    else if (attribute == 33)
        *value = 0x10 + context->physical;
    for (size_t i = 0; i < sizeof attributes / sizeof *attributes; i++)
        if (attributes[i][0] == attribute)
            *value = attributes[i][1];
    return CUDA_SUCCESS;
}

enum { PEER_RANK = 1, PEER_ACCESS = 2, PEER_ATOMICS = 3, PEER_ARRAYS = 4 };

/* The performance rank of a link by STAND_IN_PEERS, or -1: the row of the first device, the column of the
 * second, as the machine counts. */
static CUresult get_rank(int *rank, CUdevice device, CUdevice peer) {
    struct context *first, *second;
    CHECK(get_device(device, &first));
    CHECK(get_device(peer, &second));
    const char *row = getenv("STAND_IN_PEERS");
    for (int i = 0; row && i < first->physical; i++) {
        row = strchr(row, '/');
        row += row != NULL;
    }
    bool is_there = row && second->physical < (int)strcspn(row, "/") && first != second;
    char cell = is_there ? row[second->physical] : '-';
    *rank = cell >= '0' && cell <= '9' ? cell - '0' : -1;
    return CUDA_SUCCESS;
}

CUDA(cuDeviceCanAccessPeer, 4000, cuDeviceCanAccessPeer, int *value, CUdevice device, CUdevice peer) {
    int rank;
    ENTER(cuDeviceCanAccessPeer);
    CHECK(get_rank(&rank, device, peer));
    *value = rank >= 0;
    return CUDA_SUCCESS;
}

/* Links of rank 0 are those with native atomics. */
CUDA(cuDeviceGetP2PAttribute, 8000, cuDeviceGetP2PAttribute, int *value, int attribute, CUdevice device,
     CUdevice peer) {
    int rank;
    ENTER(cuDeviceGetP2PAttribute);
    CHECK(get_rank(&rank, device, peer));
    if (device == peer)
        return CUDA_ERROR_INVALID_DEVICE;
    if (attribute < PEER_RANK || attribute > PEER_ARRAYS)
        return CUDA_ERROR_INVALID_VALUE;
    *value = attribute == PEER_RANK     ? rank < 0 ? 0 : rank
             : attribute == PEER_ACCESS ? rank >= 0
             : attribute == PEER_ATOMICS ? rank == 0
                                         : 0;
    return CUDA_SUCCESS;
}

/* In exclusive mode a file lock stands for the one context that the device grants; it ends with the process.
 */
static CUresult claim_device(struct context *context) {
    long mode = stand_in_setting("STAND_IN_COMPUTE_MODE", 0);
    if (mode == COMPUTE_MODE_PROHIBITED)
        return CUDA_ERROR_DEVICE_UNAVAILABLE;
    if (mode != COMPUTE_MODE_EXCLUSIVE || context->exclusive >= 0)
        return CUDA_SUCCESS;
    const char *folder = getenv("STAND_IN_DIR");
    char path[4096];
    snprintf(path, sizeof path, "%s/stand-in-device-%d.lock", folder ? folder : "/tmp", context->physical);
    int descriptor = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (descriptor < 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    if (flock(descriptor, LOCK_EX | LOCK_NB) != 0) {
        close(descriptor);
        return CUDA_ERROR_DEVICE_UNAVAILABLE;
    }
    context->exclusive = descriptor;
    return CUDA_SUCCESS;
}

static void yield_device(struct context *context) {
    if (context->exclusive >= 0)
        close(context->exclusive);
    context->exclusive = -1;
}

/* As on the hardware, a lost context is handed out again while somebody has it, and never made anew. */
CUDA(cuDevicePrimaryCtxRetain, 7000, cuDevicePrimaryCtxRetain, void **handle, CUdevice device) {
    struct context *context;
    ENTER(cuDevicePrimaryCtxRetain);
    CHECK(get_device(device, &context));
    CUresult sticky = sticky_error(context);
    pthread_mutex_lock(&stand_in_lock);
    CUresult code = CUDA_SUCCESS;
    if (context->references == 0)
        code = sticky == CUDA_SUCCESS ? claim_device(context) : sticky;
    const char *lost = getenv("STAND_IN_LOST"); /* a file: the next context that is made is lost, and it is gone */
    if (code == CUDA_SUCCESS && context->references == 0 && lost && unlink(lost) == 0)
        poison(context, CUDA_ERROR_UNKNOWN);
    if (code == CUDA_SUCCESS) {
        context->references++;
        *handle = context;
    }
    pthread_mutex_unlock(&stand_in_lock);
    return code;
}

CUDA(cuDevicePrimaryCtxRelease, 7000, cuDevicePrimaryCtxRelease_v2, CUdevice device) {
    struct context *context;
    ENTER(cuDevicePrimaryCtxRelease_v2);
    CHECK(get_device(device, &context));
    pthread_mutex_lock(&stand_in_lock);
    CUresult code = context->references ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
    if (code == CUDA_SUCCESS && --context->references == 0)
        yield_device(context);
    pthread_mutex_unlock(&stand_in_lock);
    return code;
}

/* Heals nothing after a sticky error, as on the hardware: the process keeps the error until its end. */
CUDA(cuDevicePrimaryCtxReset, 7000, cuDevicePrimaryCtxReset_v2, CUdevice device) {
    struct context *context;
    ENTER(cuDevicePrimaryCtxReset_v2);
    CHECK(get_device(device, &context));
    CHECK(sticky_error(context));
    return drain(context);
}

CUDA(cuDevicePrimaryCtxGetState, 7000, cuDevicePrimaryCtxGetState, CUdevice device, unsigned *flags,
     int *active) {
    struct context *context;
    ENTER(cuDevicePrimaryCtxGetState);
    CHECK(get_device(device, &context));
    pthread_mutex_lock(&stand_in_lock);
    *flags = context->flags;
    *active = context->references > 0;
    pthread_mutex_unlock(&stand_in_lock);
    return CUDA_SUCCESS;
}

CUDA(cuDevicePrimaryCtxSetFlags, 7000, cuDevicePrimaryCtxSetFlags_v2, CUdevice device, unsigned flags) {
    struct context *context;
    ENTER(cuDevicePrimaryCtxSetFlags_v2);
    CHECK(get_device(device, &context));
    pthread_mutex_lock(&stand_in_lock);
    context->flags = flags;
    pthread_mutex_unlock(&stand_in_lock);
    return CUDA_SUCCESS;
}

static CUresult check_handle(void *handle) {
    struct context *context = handle;
    bool known = context >= stand_in_contexts && context < stand_in_contexts + stand_in_device_count;
    return known && context->references > 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

CUDA(cuCtxGetCurrent, 4000, cuCtxGetCurrent, void **handle) {
    ENTER(cuCtxGetCurrent);
    *handle = depth ? stack[depth - 1] : NULL;
    return CUDA_SUCCESS;
}

CUDA(cuCtxSetCurrent, 4000, cuCtxSetCurrent, void *handle) {
    ENTER(cuCtxSetCurrent);
    if (!handle) {
        depth -= depth > 0;
        return CUDA_SUCCESS;
    }
    CHECK(check_handle(handle));
    depth += depth == 0;
    stack[depth - 1] = handle;
    return CUDA_SUCCESS;
}

CUDA(cuCtxPushCurrent, 4000, cuCtxPushCurrent_v2, void *handle) {
    ENTER(cuCtxPushCurrent_v2);
    CHECK(check_handle(handle));
    if (depth == STACK_DEPTH)
        return CUDA_ERROR_INVALID_VALUE;
    stack[depth++] = handle;
    return CUDA_SUCCESS;
}

CUDA(cuCtxPopCurrent, 4000, cuCtxPopCurrent_v2, void **handle) {
    ENTER(cuCtxPopCurrent_v2);
    if (!depth)
        return CUDA_ERROR_INVALID_CONTEXT;
    depth--;
    if (handle)
        *handle = stack[depth];
    return CUDA_SUCCESS;
}

static CUresult get_ordinal(CUdevice *device, struct context *context) {
    if (!context)
        return CUDA_ERROR_INVALID_CONTEXT;
    CHECK(check_handle(context));
    *device = context->ordinal;
    return CUDA_SUCCESS;
}

CUDA(cuCtxGetDevice, 2000, cuCtxGetDevice, CUdevice *device) {
    ENTER(cuCtxGetDevice);
    return get_ordinal(device, depth ? stack[depth - 1] : NULL);
}

CUDA(cuCtxGetDevice, 13000, cuCtxGetDevice_v2, CUdevice *device, struct context *context) {
    ENTER(cuCtxGetDevice_v2);
    return get_ordinal(device, context || !depth ? context : stack[depth - 1]);
}

CUDA(cuCtxGetApiVersion, 3020, cuCtxGetApiVersion, void *handle, unsigned *version) {
    ENTER(cuCtxGetApiVersion);
    *version = 3020;
    return CUDA_SUCCESS;
}

CUDA(cuCtxGetFlags, 7000, cuCtxGetFlags, unsigned *flags) {
    struct context *context;
    ENTER(cuCtxGetFlags);
    CHECK(get_current(&context));
    *flags = context->flags;
    return CUDA_SUCCESS;
}

CUDA(cuCtxGetId, 12000, cuCtxGetId, void *handle, unsigned long long *id) {
    struct context *context = handle;
    ENTER(cuCtxGetId);
    if (!context)
        CHECK(get_current(&context));
    *id = (unsigned long long)context->ordinal + 1;
    return CUDA_SUCCESS;
}

CUDA(cuCtxGetStreamPriorityRange, 5050, cuCtxGetStreamPriorityRange, int *least, int *greatest) {
    struct context *context;
    ENTER(cuCtxGetStreamPriorityRange);
    CHECK(get_current(&context));
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5;
    return CUDA_SUCCESS;
}

CUDA(cuCtxSynchronize, 2000, cuCtxSynchronize, void) {
    struct context *context;
    ENTER(cuCtxSynchronize);
    CHECK(get_current(&context));
    return drain(context);
}

CUDA(cuCtxSynchronize, 13000, cuCtxSynchronize_v2, struct context *context) {
    ENTER(cuCtxSynchronize_v2);
    if (!context)
        CHECK(get_current(&context));
    CHECK(check_handle(context));
    CHECK(sticky_error(context));
    return drain(context);
}

/* For the stand-in math libraries: the error that a call with the current context would end with. */
API int stand_in_check(void) {
    struct context *context;
    return get_current(&context);
}

/* For the stand-in math libraries: wait for everything, as NVIDIA's do when they load what they need first. */
API int stand_in_drain(void) {
    struct context *context;
    CHECK(get_current(&context));
    return drain(context);
}

/* Ends the context of a device at once, whatever its streams are doing. */
API int stand_in_poison(int device, int code) {
    struct context *context;
    CHECK(get_device(device, &context));
    pthread_mutex_lock(&stand_in_lock);
    poison(context, code);
    pthread_mutex_unlock(&stand_in_lock);
    return CUDA_SUCCESS;
}
