/* Images and kernels: shared objects that the stand-in NVRTC has made, and the launch of their functions.
 *
 * For a kernel NAME an image exports the function `stand_in_NAME(parameters, shape)`, which runs all blocks
 * and threads and returns 0 or the error that ends the context, and the sizes `stand_in_NAME_params`, ended
 * by 0. Kernels with certain names fail by themselves; their code is not run, and an image need not have
 * them.
 */
#define _GNU_SOURCE
#include "driver.h"

#include <dlfcn.h>
#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MACHINE_CUDA = 190, MAXIMUM_PARAMETERS = 64, MAXIMUM_BLOCK = 1024, MAXIMUM_SHARED = 232448 };

enum { NEVER = -1 }; /* instead of an error: the kernel does not end */

static const struct {
    const char *name;
    CUresult code;
} faults[] = {
    {"fault_illegal_address", CUDA_ERROR_ILLEGAL_ADDRESS},
    {"fault_trap", CUDA_ERROR_LAUNCH_FAILED},
    {"fault_spin", NEVER},
};

struct kernel {
    struct kernel *next;
    struct image *image;
    char *name;
    int (*run)(void **parameters, const unsigned *shape);
    const size_t *sizes; /* ended by 0 */
    CUresult fault;
    int is_loaded; /* has been asked for as a function */
};

/* The descriptor stays open while the image is loaded: the loader knows a library by its path, which has the
 * descriptor's number in it. */
struct image {
    int references; /* one until it is unloaded, and one for each launch in a queue */
    int descriptor;
    void *library;
    struct kernel *kernels;
};

/* How large an ELF file is: the tables of headers and every section end within it. 0 if it is none of ours.
 */
static CUresult measure_image(const unsigned char *bytes, size_t *size) {
    const Elf64_Ehdr *header = (const Elf64_Ehdr *)bytes;
    if (memcmp(bytes, ELFMAG, SELFMAG) != 0 || bytes[EI_CLASS] != ELFCLASS64)
        return CUDA_ERROR_INVALID_IMAGE;
    if (header->e_machine == MACHINE_CUDA)
        return CUDA_ERROR_NO_BINARY_FOR_GPU;
    *size = header->e_shoff + (size_t)header->e_shnum * header->e_shentsize;
    const Elf64_Shdr *sections = (const Elf64_Shdr *)(bytes + header->e_shoff);
    for (int i = 0; i < header->e_shnum; i++)
        if (sections[i].sh_type != SHT_NOBITS && sections[i].sh_offset + sections[i].sh_size > *size)
            *size = sections[i].sh_offset + sections[i].sh_size;
    return CUDA_SUCCESS;
}

static bool write_all(int descriptor, const char *bytes, size_t size) {
    while (size > 0) {
        ssize_t written = write(descriptor, bytes, size);
        if (written <= 0)
            return false;
        bytes += written;
        size -= (size_t)written;
    }
    return true;
}

static CUresult load_image(struct image **loaded, const void *bytes) {
    size_t size;
    char path[64];
    CHECK(measure_image(bytes, &size));
    int descriptor = memfd_create("stand-in-image", MFD_CLOEXEC);
    if (descriptor < 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    snprintf(path, sizeof path, "/proc/self/fd/%d", descriptor);
    void *library = write_all(descriptor, bytes, size) ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    if (!library) {
        close(descriptor);
        return CUDA_ERROR_INVALID_IMAGE;
    }
    *loaded = calloc(1, sizeof **loaded);
    **loaded = (struct image){.references = 1, .descriptor = descriptor, .library = library};
    return CUDA_SUCCESS;
}

static CUresult load_file(struct image **loaded, const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file)
        return CUDA_ERROR_FILE_NOT_FOUND;
    fseek(file, 0, SEEK_END);
    size_t size = (size_t)ftell(file);
    rewind(file);
    char *bytes = calloc(1, size + sizeof(Elf64_Ehdr));
    CUresult code =
        fread(bytes, 1, size, file) == size ? load_image(loaded, bytes) : CUDA_ERROR_OPERATING_SYSTEM;
    free(bytes);
    fclose(file);
    return code;
}

static void drop_image(struct image *image) {
    if (__atomic_sub_fetch(&image->references, 1, __ATOMIC_ACQ_REL) > 0)
        return;
    while (image->kernels) {
        struct kernel *kernel = image->kernels;
        image->kernels = kernel->next;
        free(kernel->name);
        free(kernel);
    }
    dlclose(image->library);
    close(image->descriptor);
    free(image);
}

static CUresult unload(struct image *image) {
    if (!image)
        return CUDA_ERROR_INVALID_HANDLE;
    drop_image(image);
    return CUDA_SUCCESS;
}

static CUresult find_fault(const char *name) {
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
        if (!strcmp(faults[i].name, name))
            return faults[i].code;
    return CUDA_SUCCESS;
}

static struct kernel *add_kernel(struct image *image, const char *name) {
    static const size_t none[] = {0};
    char symbol[512];
    struct kernel *kernel = calloc(1, sizeof *kernel);
    kernel->fault = find_fault(name);
    snprintf(symbol, sizeof symbol, "stand_in_%s", name);
    *(void **)&kernel->run = dlsym(image->library, symbol);
    strncat(symbol, "_params", sizeof symbol - strlen(symbol) - 1);
    kernel->sizes = dlsym(image->library, symbol);
    if (!kernel->sizes)
        kernel->sizes = none;
    if (!kernel->run && !kernel->fault) {
        free(kernel);
        return NULL;
    }
    kernel->image = image;
    kernel->name = strdup(name);
    kernel->next = image->kernels;
    image->kernels = kernel;
    return kernel;
}

static CUresult get_kernel(void **handle, struct image *image, const char *name) {
    if (!image)
        return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&stand_in_lock);
    struct kernel *kernel = image->kernels;
    while (kernel && strcmp(kernel->name, name))
        kernel = kernel->next;
    if (!kernel)
        kernel = add_kernel(image, name);
    pthread_mutex_unlock(&stand_in_lock);
    *handle = kernel;
    return kernel ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

/* A library needs no context, a module does. Options of the linker mean nothing here. */
CUDA(cuLibraryLoadData, 12000, cuLibraryLoadData, void **library, const void *code, void *jit_options,
     void **jit_values, unsigned jit_count, void *options, void **values, unsigned count) {
    ENTER(cuLibraryLoadData);
    return load_image((struct image **)library, code);
}

CUDA(cuLibraryLoadFromFile, 12000, cuLibraryLoadFromFile, void **library, const char *path, void *jit_options,
     void **jit_values, unsigned jit_count, void *options, void **values, unsigned count) {
    ENTER(cuLibraryLoadFromFile);
    return load_file((struct image **)library, path);
}

CUDA(cuLibraryUnload, 12000, cuLibraryUnload, struct image *library) {
    ENTER(cuLibraryUnload);
    return unload(library);
}

CUDA(cuLibraryGetKernel, 12000, cuLibraryGetKernel, void **kernel, struct image *library, const char *name) {
    ENTER(cuLibraryGetKernel);
    return get_kernel(kernel, library, name);
}

CUDA(cuLibraryGetModule, 12000, cuLibraryGetModule, void **module, void *library) {
    struct context *context;
    ENTER(cuLibraryGetModule);
    CHECK(get_current(&context));
    *module = library;
    return CUDA_SUCCESS;
}

static CUresult load_module(void **module, const void *code) {
    struct context *context;
    CHECK(get_current(&context));
    return load_image((struct image **)module, code);
}

CUDA(cuModuleLoadData, 2000, cuModuleLoadData, void **module, const void *code) {
    ENTER(cuModuleLoadData);
    return load_module(module, code);
}

CUDA(cuModuleLoadDataEx, 2010, cuModuleLoadDataEx, void **module, const void *code, unsigned count,
     void *options, void **values) {
    ENTER(cuModuleLoadDataEx);
    return load_module(module, code);
}

CUDA(cuModuleLoad, 2000, cuModuleLoad, void **module, const char *path) {
    struct context *context;
    ENTER(cuModuleLoad);
    CHECK(get_current(&context));
    return load_file((struct image **)module, path);
}

CUDA(cuModuleUnload, 2000, cuModuleUnload, struct image *module) {
    struct context *context;
    ENTER(cuModuleUnload);
    CHECK(get_current(&context));
    return unload(module);
}

CUDA(cuModuleGetFunction, 2000, cuModuleGetFunction, void **function, struct image *module,
     const char *name) {
    struct context *context;
    ENTER(cuModuleGetFunction);
    CHECK(get_current(&context));
    return get_kernel(function, module, name);
}

/* As where modules are loaded lazily: the first time waits for everything that runs. */
CUDA(cuKernelGetFunction, 12000, cuKernelGetFunction, void **function, struct kernel *kernel) {
    struct context *context;
    ENTER(cuKernelGetFunction);
    CHECK(get_current(&context));
    *function = kernel;
    return __atomic_exchange_n(&kernel->is_loaded, 1, __ATOMIC_ACQ_REL) ? CUDA_SUCCESS : drain(context);
}

/* Everything is loaded as soon as it is there. */
CUDA(cuFuncLoad, 12040, cuFuncLoad, struct kernel *function) {
    struct context *context;
    ENTER(cuFuncLoad);
    return get_current(&context);
}

CUDA(cuKernelGetLibrary, 12050, cuKernelGetLibrary, void **library, struct kernel *kernel) {
    ENTER(cuKernelGetLibrary);
    *library = kernel->image;
    return CUDA_SUCCESS;
}

CUDA(cuFuncGetModule, 11000, cuFuncGetModule, void **module, struct kernel *function) {
    ENTER(cuFuncGetModule);
    *module = function->image;
    return CUDA_SUCCESS;
}

CUDA(cuKernelGetName, 12030, cuKernelGetName, const char **name, struct kernel *kernel) {
    ENTER(cuKernelGetName);
    *name = kernel->name;
    return CUDA_SUCCESS;
}

CUDA(cuFuncGetName, 12030, cuFuncGetName, const char **name, struct kernel *function) {
    ENTER(cuFuncGetName);
    *name = function->name;
    return CUDA_SUCCESS;
}

/* Where a parameter lies in a packed buffer: at the next multiple of its size, or of 16 for large ones. */
static CUresult get_parameter(struct kernel *kernel, size_t index, size_t *offset, size_t *size) {
    size_t end = 0;
    for (size_t i = 0; kernel->sizes[i]; i++) {
        size_t alignment = kernel->sizes[i] & -kernel->sizes[i];
        alignment = alignment > 16 ? 16 : alignment;
        size_t start = (end + alignment - 1) & ~(alignment - 1);
        end = start + kernel->sizes[i];
        if (i < index)
            continue;
        *offset = start;
        if (size)
            *size = kernel->sizes[i];
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_VALUE;
}

CUDA(cuKernelGetParamInfo, 12040, cuKernelGetParamInfo, struct kernel *kernel, size_t index, size_t *offset,
     size_t *size) {
    ENTER(cuKernelGetParamInfo);
    return get_parameter(kernel, index, offset, size);
}

CUDA(cuFuncGetParamInfo, 12040, cuFuncGetParamInfo, struct kernel *function, size_t index, size_t *offset,
     size_t *size) {
    ENTER(cuFuncGetParamInfo);
    return get_parameter(function, index, offset, size);
}

static CUresult get_kernel_attribute(int *value, int attribute) {
    enum { THREADS = 0, REGISTERS = 4, PTX = 5, BINARY = 6, DYNAMIC_SHARED = 8 };
    const int values[] = {[THREADS] = MAXIMUM_BLOCK, [REGISTERS] = 32, [PTX] = 90, [BINARY] = 90,
                          [DYNAMIC_SHARED] = 49152,  [15] = 0};
    if (attribute < 0 || attribute > 15)
        return CUDA_ERROR_INVALID_VALUE;
    *value = values[attribute];
    return CUDA_SUCCESS;
}

CUDA(cuKernelGetAttribute, 12000, cuKernelGetAttribute, int *value, int attribute, struct kernel *kernel,
     CUdevice device) {
    ENTER(cuKernelGetAttribute);
    return get_kernel_attribute(value, attribute);
}

CUDA(cuFuncGetAttribute, 2020, cuFuncGetAttribute, int *value, int attribute, struct kernel *function) {
    ENTER(cuFuncGetAttribute);
    return get_kernel_attribute(value, attribute);
}

CUDA(cuKernelSetAttribute, 12000, cuKernelSetAttribute, int attribute, int value, struct kernel *kernel,
     CUdevice device) {
    ENTER(cuKernelSetAttribute);
    return CUDA_SUCCESS;
}

CUDA(cuFuncSetAttribute, 9000, cuFuncSetAttribute, struct kernel *function, int attribute, int value) {
    ENTER(cuFuncSetAttribute);
    return CUDA_SUCCESS;
}

/* As many blocks as the threads of a multiprocessor allow; registers and shared memory are no limit here. */
CUDA(cuOccupancyMaxActiveBlocksPerMultiprocessor, 6050, cuOccupancyMaxActiveBlocksPerMultiprocessor,
     int *blocks, void *function, int threads, size_t shared) {
    ENTER(cuOccupancyMaxActiveBlocksPerMultiprocessor);
    if (threads < 1 || threads > MAXIMUM_BLOCK)
        return CUDA_ERROR_INVALID_VALUE;
    *blocks = 2048 / threads < 32 ? 2048 / threads : 32;
    return CUDA_SUCCESS;
}

CUDA(cuOccupancyMaxPotentialBlockSize, 6050, cuOccupancyMaxPotentialBlockSize, int *grid, int *threads,
     void *function, void *shared_of_block, size_t shared, int limit) {
    ENTER(cuOccupancyMaxPotentialBlockSize);
    *threads = limit > 0 && limit < MAXIMUM_BLOCK ? limit : MAXIMUM_BLOCK;
    *grid = 264;
    return CUDA_SUCCESS;
}

struct launch_work {
    struct work work;
    struct kernel *kernel; /* its image is held */
    unsigned shape[6];
    void *parameters[MAXIMUM_PARAMETERS];
    char values[]; /* copies: the caller's are its own again after the launch */
};

/* The hardware reports an error some time after the instruction that caused it. */
static void fail(struct stream *stream, CUresult code) {
    int64_t until = stand_in_now() + stand_in_setting("STAND_IN_FAULT_DELAY", 5) * 1000000;
    pthread_mutex_lock(&stand_in_lock);
    while (!stream->context->sticky && stand_in_now() < until)
        stand_in_wait(1000);
    poison(stream->context, code);
    pthread_mutex_unlock(&stand_in_lock);
}

static void spin(struct stream *stream) {
    pthread_mutex_lock(&stand_in_lock);
    while (!stream->context->sticky)
        pthread_cond_wait(&stand_in_progress, &stand_in_lock);
    pthread_mutex_unlock(&stand_in_lock);
}

static void run_launch(struct stream *stream, struct work *work) {
    struct launch_work *launch = (struct launch_work *)work;
    CUresult code = launch->kernel->fault;
    if (code == CUDA_SUCCESS)
        code = launch->kernel->run(launch->parameters, launch->shape);
    if (code == NEVER)
        spin(stream);
    else if (code != CUDA_SUCCESS)
        fail(stream, code);
    if (!work->is_captured)
        drop_image(launch->kernel->image);
}

static void drop_launch(struct stream *stream, struct work *work, CUresult code) {
    drop_image(((struct launch_work *)work)->kernel->image);
}

static CUresult check_shape(const unsigned *shape, unsigned shared) {
    for (int i = 0; i < 6; i++)
        if (shape[i] == 0)
            return CUDA_ERROR_INVALID_VALUE;
    if (shape[0] > INT32_MAX || shape[1] > UINT16_MAX || shape[2] > UINT16_MAX)
        return CUDA_ERROR_INVALID_VALUE;
    bool fits = (uint64_t)shape[3] * shape[4] * shape[5] <= MAXIMUM_BLOCK && shape[5] <= 64;
    return fits && shared <= MAXIMUM_SHARED ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult launch(struct kernel *kernel, const unsigned *shape, unsigned shared, void *handle,
                       void **parameters, void **extra) {
    struct stream *stream;
    size_t count = 0, total = 0;
    if (!kernel)
        return CUDA_ERROR_INVALID_HANDLE;
    CHECK(get_stream(handle, &stream));
    CHECK(check_shape(shape, shared));
    for (; kernel->sizes[count]; count++)
        total += (kernel->sizes[count] + 63) & ~(size_t)63;
    if (extra)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (count > MAXIMUM_PARAMETERS || (count && !parameters))
        return CUDA_ERROR_INVALID_VALUE;
    struct launch_work *work = new_work(sizeof *work + total + 63, run_launch);
    char *value = (char *)(((uintptr_t)work->values + 63) & ~(uintptr_t)63); /* as a tensor map wants it */
    work->work.drop = drop_launch;
    work->work.node = NODE_KERNEL + 1;
    work->kernel = kernel;
    memcpy(work->shape, shape, sizeof work->shape);
    for (size_t i = 0; i < count; i++) {
        work->parameters[i] = memcpy(value, parameters[i], kernel->sizes[i]);
        value += (kernel->sizes[i] + 63) & ~(size_t)63;
    }
    __atomic_add_fetch(&kernel->image->references, 1, __ATOMIC_RELAXED);
    CUresult code = submit(stream, &work->work);
    if (code != CUDA_SUCCESS)
        drop_image(kernel->image);
    return code;
}

CUDA(cuLaunchKernel, 4000, cuLaunchKernel, void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
     unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared, void *stream, void **parameters,
     void **extra) {
    const unsigned shape[] = {grid_x, grid_y, grid_z, block_x, block_y, block_z};
    ENTER(cuLaunchKernel);
    return launch(function, shape, shared, stream, parameters, extra);
}

/* CUlaunchConfig. Its attributes (clusters, priorities) change no result. */
struct launch_config {
    unsigned shape[6];
    unsigned shared;
    void *stream;
    void *attributes;
    unsigned attribute_count;
};

CUDA(cuLaunchKernelEx, 11060, cuLaunchKernelEx, const struct launch_config *config, void *function,
     void **parameters, void **extra) {
    ENTER(cuLaunchKernelEx);
    return launch(function, config->shape, config->shared, config->stream, parameters, extra);
}

/* A tensor map: what was asked for, in an order of its own, since the GPUs' is no one else's to know. Kernels
 * may read it, and compute addresses by it; there are no instructions that do. */
struct tensor_map {
    uint64_t address, extents[5], strides[4];
    uint8_t box[5], steps[5], type, rank, interleave, swizzle, promotion, fill; /* a box of 256 is 0 */
};

CUDA(cuTensorMapEncodeTiled, 12000, cuTensorMapEncodeTiled, struct tensor_map *map, int type, unsigned rank,
     uint64_t address, const uint64_t *extents, const uint64_t *strides, const unsigned *box,
     const unsigned *steps, int interleave, int swizzle, int promotion, int fill) {
    ENTER(cuTensorMapEncodeTiled);
    uint64_t multiple = interleave == 2 ? 32 : 16;
    if ((uintptr_t)map % 64 || rank < 1 || rank > 5 || address % multiple)
        return CUDA_ERROR_INVALID_VALUE;
    memset(map, 0, 128);
    *map = (struct tensor_map){.address = address, .type = type, .rank = rank, .interleave = interleave,
                               .swizzle = swizzle, .promotion = promotion, .fill = fill};
    for (unsigned i = 0; i < rank; i++) {
        if (extents[i] < 1 || box[i] < 1 || box[i] > 256 || steps[i] < 1 || steps[i] > 8)
            return CUDA_ERROR_INVALID_VALUE;
        map->extents[i] = extents[i];
        map->box[i] = (uint8_t)box[i];
        map->steps[i] = (uint8_t)steps[i];
        if (i + 1 < rank && strides[i] % multiple)
            return CUDA_ERROR_INVALID_VALUE;
        if (i + 1 < rank)
            map->strides[i] = strides[i];
    }
    return CUDA_SUCCESS;
}
