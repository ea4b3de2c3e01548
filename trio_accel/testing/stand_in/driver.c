/* Entry points of the stand-in driver: initialisation, names of errors, and the table that cuGetProcAddress
 * reads. */
#include "driver.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

pthread_mutex_t stand_in_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t stand_in_progress;
__thread bool stand_in_host_function;
bool stand_in_ready;

static bool forked;
static bool logging;

/* Bounds of the section `entries`, which the linker provides. */
extern struct driver_entry __start_entries[] __attribute__((visibility("hidden")));
extern struct driver_entry __stop_entries[] __attribute__((visibility("hidden")));

long stand_in_setting(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text && *text ? strtol(text, NULL, 0) : otherwise;
}

void stand_in_count(struct driver_entry *entry) {
    __atomic_add_fetch(&entry->calls, 1, __ATOMIC_RELAXED);
    if (logging)
        fprintf(stderr, "[stand-in] %s\n", entry->symbol);
}

CUresult stand_in_enter(struct driver_entry *entry) {
    stand_in_count(entry);
    if (stand_in_host_function)
        return CUDA_ERROR_NOT_PERMITTED;
    return __atomic_load_n(&stand_in_ready, __ATOMIC_ACQUIRE) ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

int64_t stand_in_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

void stand_in_wait(long microseconds) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += microseconds % 1000000 * 1000;
    until.tv_sec += microseconds / 1000000 + until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_cond_timedwait(&stand_in_progress, &stand_in_lock, &until);
}

/* How often a function was called, by the name that cuGetProcAddress knows or with its suffix. */
API unsigned long stand_in_calls(const char *name) {
    unsigned long calls = 0;
    for (struct driver_entry *entry = __start_entries; entry < __stop_entries; entry++)
        if (!strcmp(entry->name, name) || !strcmp(entry->symbol, name))
            calls += __atomic_load_n(&entry->calls, __ATOMIC_RELAXED);
    return calls;
}

/* A forked child has no stream threads: the driver is unusable there, as the real one is. */
static void after_fork(void) {
    pthread_mutex_init(&stand_in_lock, NULL);
    forked = stand_in_ready;
    stand_in_ready = false;
}

__attribute__((constructor)) static void prepare(void) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&stand_in_progress, &attributes);
    pthread_condattr_destroy(&attributes);
    pthread_atfork(NULL, NULL, after_fork);
    logging = stand_in_setting("STAND_IN_LOG", 0) != 0;
}

CUDA(cuInit, 2000, cuInit, unsigned flags) {
    COUNT(cuInit);
    if (flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (forked)
        return CUDA_ERROR_NOT_INITIALIZED;
    CUresult code = (CUresult)stand_in_setting("STAND_IN_INIT_ERROR", CUDA_SUCCESS);
    if (code != CUDA_SUCCESS)
        return code;
    pthread_mutex_lock(&stand_in_lock);
    code = stand_in_ready ? CUDA_SUCCESS : stand_in_find_devices();
    if (code == CUDA_SUCCESS)
        __atomic_store_n(&stand_in_ready, true, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&stand_in_lock);
    return code;
}

CUDA(cuDriverGetVersion, 2020, cuDriverGetVersion, int *version) {
    COUNT(cuDriverGetVersion);
    *version = (int)stand_in_setting("STAND_IN_VERSION", 13000);
    return CUDA_SUCCESS;
}

/* The newest form of a function that is no newer than what was asked for, nor than the driver. */
static struct driver_entry *find_entry(const char *name, int version) {
    struct driver_entry *found = NULL;
    int newest = (int)stand_in_setting("STAND_IN_VERSION", 13000);
    for (struct driver_entry *entry = __start_entries; entry < __stop_entries; entry++) {
        bool fits = entry->version <= version && entry->version <= newest && !strcmp(entry->name, name);
        if (fits && (!found || entry->version > found->version))
            found = entry;
    }
    return found;
}

static CUresult give_address(const char *name, void **address, int version) {
    struct driver_entry *entry = find_entry(name, version);
    *address = entry ? entry->address : NULL;
    return entry ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUDA(cuGetProcAddress, 12000, cuGetProcAddress_v2, const char *name, void **address, int version,
     uint64_t flags, int *status) {
    COUNT(cuGetProcAddress_v2);
    CUresult code = give_address(name, address, version);
    if (status)
        *status = code == CUDA_SUCCESS ? 0 : 1; /* CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND */
    return code;
}

CUDA(cuGetProcAddress, 11030, cuGetProcAddress, const char *name, void **address, int version,
     uint64_t flags) {
    COUNT(cuGetProcAddress);
    return give_address(name, address, version);
}

static const struct {
    CUresult code;
    const char *name;
} names[] = {
    {0, "CUDA_SUCCESS"},
    {1, "CUDA_ERROR_INVALID_VALUE"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY"},
    {3, "CUDA_ERROR_NOT_INITIALIZED"},
    {4, "CUDA_ERROR_DEINITIALIZED"},
    {34, "CUDA_ERROR_STUB_LIBRARY"},
    {46, "CUDA_ERROR_DEVICE_UNAVAILABLE"},
    {100, "CUDA_ERROR_NO_DEVICE"},
    {101, "CUDA_ERROR_INVALID_DEVICE"},
    {200, "CUDA_ERROR_INVALID_IMAGE"},
    {201, "CUDA_ERROR_INVALID_CONTEXT"},
    {205, "CUDA_ERROR_MAP_FAILED"},
    {206, "CUDA_ERROR_UNMAP_FAILED"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
    {214, "CUDA_ERROR_ECC_UNCORRECTABLE"},
    {218, "CUDA_ERROR_INVALID_PTX"},
    {220, "CUDA_ERROR_NVLINK_UNCORRECTABLE"},
    {222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"},
    {226, "CUDA_ERROR_CONTAINED"},
    {301, "CUDA_ERROR_FILE_NOT_FOUND"},
    {302, "CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND"},
    {304, "CUDA_ERROR_OPERATING_SYSTEM"},
    {400, "CUDA_ERROR_INVALID_HANDLE"},
    {401, "CUDA_ERROR_ILLEGAL_STATE"},
    {500, "CUDA_ERROR_NOT_FOUND"},
    {600, "CUDA_ERROR_NOT_READY"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
    {701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"},
    {702, "CUDA_ERROR_LAUNCH_TIMEOUT"},
    {708, "CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE"},
    {709, "CUDA_ERROR_CONTEXT_IS_DESTROYED"},
    {710, "CUDA_ERROR_ASSERT"},
    {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
    {713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"},
    {714, "CUDA_ERROR_HARDWARE_STACK_ERROR"},
    {715, "CUDA_ERROR_ILLEGAL_INSTRUCTION"},
    {716, "CUDA_ERROR_MISALIGNED_ADDRESS"},
    {717, "CUDA_ERROR_INVALID_ADDRESS_SPACE"},
    {718, "CUDA_ERROR_INVALID_PC"},
    {719, "CUDA_ERROR_LAUNCH_FAILED"},
    {800, "CUDA_ERROR_NOT_PERMITTED"},
    {801, "CUDA_ERROR_NOT_SUPPORTED"},
    {802, "CUDA_ERROR_SYSTEM_NOT_READY"},
    {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"},
    {804, "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
    {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"},
    {908, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD"},
    {999, "CUDA_ERROR_UNKNOWN"},
};

static const char *error_name(CUresult code) {
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].code == code)
            return names[i].name;
    return NULL;
}

CUDA(cuGetErrorName, 6000, cuGetErrorName, CUresult code, const char **name) {
    COUNT(cuGetErrorName);
    *name = error_name(code);
    return *name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUDA(cuGetErrorString, 6000, cuGetErrorString, CUresult code, const char **text) {
    COUNT(cuGetErrorString);
    *text = error_name(code) ? "as the stand-in driver reports it" : NULL;
    if (code == CUDA_ERROR_INVALID_IMAGE || code == CUDA_ERROR_NO_BINARY_FOR_GPU)
        *text = "the stand-in driver takes what its own compiler made of CUDA C++, and no PTX or cubin";
    return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
