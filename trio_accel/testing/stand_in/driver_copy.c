/* Copies and fills.
 *
 * An asynchronous copy with ordinary memory of the host holds the calling thread until the stream has done
 * it, as it may on hardware: only pinned and registered memory is copied behind the caller's back.
 */
#include "driver.h"

#include <string.h>

enum { HOST_TYPE = 1, DEVICE_TYPE = 2, ARRAY_TYPE = 3, UNIFIED_TYPE = 4 };

/* One side of a copy: rows of a pitch, planes of a slice, in bytes. */
struct side {
    char *start;
    size_t pitch;
    size_t slice;
};

struct copy_work {
    struct work work;
    struct side from;
    struct side to;
    size_t width;
    size_t height;
    size_t depth;
};

static void run_copy(struct stream *stream, struct work *work) {
    struct copy_work *copy = (struct copy_work *)work;
    for (size_t plane = 0; plane < copy->depth; plane++)
        for (size_t row = 0; row < copy->height; row++)
            memmove(copy->to.start + plane * copy->to.slice + row * copy->to.pitch,
                    copy->from.start + plane * copy->from.slice + row * copy->from.pitch, copy->width);
}

static size_t extent(const struct side *side, const struct copy_work *shape) {
    return (shape->depth - 1) * side->slice + (shape->height - 1) * side->pitch + shape->width;
}

/* Whether a side is as its type says; `pageable` is set where it is ordinary memory of the host. */
static CUresult check_side(const struct side *side, int type, const struct copy_work *shape, bool *pageable) {
    bool ordinary = type != DEVICE_TYPE && is_pageable(side->start);
    if (type == ARRAY_TYPE)
        return CUDA_ERROR_NOT_SUPPORTED;
    *pageable |= ordinary;
    return ordinary ? CUDA_SUCCESS : check_device_access((uintptr_t)side->start, extent(side, shape));
}

static CUresult copy(void *handle, struct copy_work shape, int from, int to, bool synchronous) {
    struct stream *stream;
    bool pageable = false;
    CHECK(get_stream(handle, &stream));
    if (shape.width == 0 || shape.height == 0 || shape.depth == 0)
        return CUDA_SUCCESS;
    CHECK(check_side(&shape.from, from, &shape, &pageable));
    CHECK(check_side(&shape.to, to, &shape, &pageable));
    struct copy_work *work = new_work(sizeof *work, run_copy);
    shape.work = work->work;
    *work = shape;
    work->work.node = pageable ? 0 : NODE_COPY + 1;
    return synchronous || pageable ? submit_and_wait(stream, &work->work) : submit(stream, &work->work);
}

static struct copy_work line(uintptr_t to, uintptr_t from, size_t size) {
    return (struct copy_work){
        .from = {(char *)from, 0, 0}, .to = {(char *)to, 0, 0}, .width = size, .height = 1, .depth = 1};
}

CUDA(cuMemcpyAsync, 4000, cuMemcpyAsync, CUdeviceptr to, CUdeviceptr from, size_t size, void *stream) {
    ENTER(cuMemcpyAsync);
    return copy(stream, line(to, from, size), UNIFIED_TYPE, UNIFIED_TYPE, false);
}

CUDA(cuMemcpyHtoDAsync, 3020, cuMemcpyHtoDAsync_v2, CUdeviceptr to, const void *from, size_t size,
     void *stream) {
    ENTER(cuMemcpyHtoDAsync_v2);
    return copy(stream, line(to, (uintptr_t)from, size), HOST_TYPE, DEVICE_TYPE, false);
}

CUDA(cuMemcpyDtoHAsync, 3020, cuMemcpyDtoHAsync_v2, void *to, CUdeviceptr from, size_t size, void *stream) {
    ENTER(cuMemcpyDtoHAsync_v2);
    return copy(stream, line((uintptr_t)to, from, size), DEVICE_TYPE, HOST_TYPE, false);
}

CUDA(cuMemcpyDtoDAsync, 3020, cuMemcpyDtoDAsync_v2, CUdeviceptr to, CUdeviceptr from, size_t size,
     void *stream) {
    ENTER(cuMemcpyDtoDAsync_v2);
    return copy(stream, line(to, from, size), DEVICE_TYPE, DEVICE_TYPE, false);
}

CUDA(cuMemcpyPeerAsync, 4000, cuMemcpyPeerAsync, CUdeviceptr to, void *to_context, CUdeviceptr from,
     void *from_context, size_t size, void *stream) {
    ENTER(cuMemcpyPeerAsync);
    return copy(stream, line(to, from, size), DEVICE_TYPE, DEVICE_TYPE, false);
}

CUDA(cuMemcpy, 4000, cuMemcpy, CUdeviceptr to, CUdeviceptr from, size_t size) {
    ENTER(cuMemcpy);
    return copy(NULL, line(to, from, size), UNIFIED_TYPE, UNIFIED_TYPE, true);
}

CUDA(cuMemcpyHtoD, 3020, cuMemcpyHtoD_v2, CUdeviceptr to, const void *from, size_t size) {
    ENTER(cuMemcpyHtoD_v2);
    return copy(NULL, line(to, (uintptr_t)from, size), HOST_TYPE, DEVICE_TYPE, true);
}

CUDA(cuMemcpyDtoH, 3020, cuMemcpyDtoH_v2, void *to, CUdeviceptr from, size_t size) {
    ENTER(cuMemcpyDtoH_v2);
    return copy(NULL, line((uintptr_t)to, from, size), DEVICE_TYPE, HOST_TYPE, true);
}

CUDA(cuMemcpyDtoD, 3020, cuMemcpyDtoD_v2, CUdeviceptr to, CUdeviceptr from, size_t size) {
    ENTER(cuMemcpyDtoD_v2);
    return copy(NULL, line(to, from, size), DEVICE_TYPE, DEVICE_TYPE, true);
}

/* CUDA_MEMCPY2D_v2 and CUDA_MEMCPY3D_v2 describe each side by a place in it. */
struct place_2d {
    size_t x;
    size_t y;
    int type;
    char *host;
    char *device;
    void *array;
    size_t pitch;
};

struct copy_2d {
    struct place_2d from;
    struct place_2d to;
    size_t width;
    size_t height;
};

static struct side side_2d(const struct place_2d *place) {
    char *base = place->type == HOST_TYPE ? place->host : place->device;
    return (struct side){base + place->y * place->pitch + place->x, place->pitch, 0};
}

static CUresult copy_2d(const struct copy_2d *copied, void *stream, bool synchronous) {
    struct copy_work shape = {.from = side_2d(&copied->from),
                              .to = side_2d(&copied->to),
                              .width = copied->width,
                              .height = copied->height,
                              .depth = 1};
    bool narrow = shape.height > 1 && (shape.width > shape.from.pitch || shape.width > shape.to.pitch);
    if (narrow)
        return CUDA_ERROR_INVALID_VALUE;
    return copy(stream, shape, copied->from.type, copied->to.type, synchronous);
}

CUDA(cuMemcpy2D, 3020, cuMemcpy2D_v2, const struct copy_2d *copied) {
    ENTER(cuMemcpy2D_v2);
    return copy_2d(copied, NULL, true);
}

CUDA(cuMemcpy2DUnaligned, 3020, cuMemcpy2DUnaligned_v2, const struct copy_2d *copied) {
    ENTER(cuMemcpy2DUnaligned_v2);
    return copy_2d(copied, NULL, true);
}

CUDA(cuMemcpy2DAsync, 3020, cuMemcpy2DAsync_v2, const struct copy_2d *copied, void *stream) {
    ENTER(cuMemcpy2DAsync_v2);
    return copy_2d(copied, stream, false);
}

struct place_3d {
    size_t x;
    size_t y;
    size_t z;
    size_t level;
    int type;
    char *host;
    char *device;
    void *array;
    void *reserved;
    size_t pitch;
    size_t height;
};

struct copy_3d {
    struct place_3d from;
    struct place_3d to;
    size_t width;
    size_t height;
    size_t depth;
};

static struct side side_3d(const struct place_3d *place) {
    char *base = place->type == HOST_TYPE ? place->host : place->device;
    size_t slice = place->pitch * place->height;
    return (struct side){base + place->z * slice + place->y * place->pitch + place->x, place->pitch, slice};
}

static CUresult copy_3d(const struct copy_3d *copied, void *stream, bool synchronous) {
    struct copy_work shape = {.from = side_3d(&copied->from),
                              .to = side_3d(&copied->to),
                              .width = copied->width,
                              .height = copied->height,
                              .depth = copied->depth};
    return copy(stream, shape, copied->from.type, copied->to.type, synchronous);
}

CUDA(cuMemcpy3D, 3020, cuMemcpy3D_v2, const struct copy_3d *copied) {
    ENTER(cuMemcpy3D_v2);
    return copy_3d(copied, NULL, true);
}

CUDA(cuMemcpy3DAsync, 3020, cuMemcpy3DAsync_v2, const struct copy_3d *copied, void *stream) {
    ENTER(cuMemcpy3DAsync_v2);
    return copy_3d(copied, stream, false);
}

struct fill_work {
    struct work work;
    char *start;
    size_t pitch;
    uint32_t value;
    size_t element;
    size_t width; /* elements */
    size_t height;
};

static void run_fill(struct stream *stream, struct work *work) {
    struct fill_work *fill = (struct fill_work *)work;
    for (size_t row = 0; row < fill->height; row++) {
        char *start = fill->start + row * fill->pitch;
        if (fill->element == 1)
            memset(start, (int)fill->value, fill->width);
        else
            for (size_t i = 0; i < fill->width; i++)
                memcpy(start + i * fill->element, &fill->value, fill->element);
    }
}

/* A fill of device memory is asynchronous in either form; the form without a stream uses the default one. */
static CUresult fill(void *handle, CUdeviceptr start, size_t pitch, uint32_t value, size_t element,
                     size_t width, size_t height) {
    struct stream *stream;
    CHECK(get_stream(handle, &stream));
    if (width == 0 || height == 0)
        return CUDA_SUCCESS;
    if (start % element || pitch % element)
        return CUDA_ERROR_INVALID_VALUE;
    CHECK(check_device_access(start, (height - 1) * pitch + width * element));
    struct fill_work *work = new_work(sizeof *work, run_fill);
    work->work.node = NODE_FILL + 1;
    work->start = (char *)start;
    work->pitch = pitch;
    work->value = value;
    work->element = element;
    work->width = width;
    work->height = height;
    return submit(stream, &work->work);
}

#define FILLS(name, pitched, suffix, type, size)                                                          \
    CUDA(name, 3020, name##suffix, CUdeviceptr start, type value, size_t count) {                         \
        ENTER(name##suffix);                                                                              \
        return fill(NULL, start, 0, value, size, count, 1);                                               \
    }                                                                                                     \
    CUDA(name##Async, 3020, name##Async, CUdeviceptr start, type value, size_t count, void *stream) {     \
        ENTER(name##Async);                                                                               \
        return fill(stream, start, 0, value, size, count, 1);                                             \
    }                                                                                                     \
    CUDA(pitched, 3020, pitched##suffix, CUdeviceptr start, size_t pitch, type value, size_t width,       \
         size_t height) {                                                                                 \
        ENTER(pitched##suffix);                                                                           \
        return fill(NULL, start, pitch, value, size, width, height);                                      \
    }                                                                                                     \
    CUDA(pitched##Async, 3020, pitched##Async, CUdeviceptr start, size_t pitch, type value, size_t width, \
         size_t height, void *stream) {                                                                   \
        ENTER(pitched##Async);                                                                            \
        return fill(stream, start, pitch, value, size, width, height);                                    \
    }

FILLS(cuMemsetD8, cuMemsetD2D8, _v2, unsigned char, 1)
FILLS(cuMemsetD16, cuMemsetD2D16, _v2, unsigned short, 2)
FILLS(cuMemsetD32, cuMemsetD2D32, _v2, unsigned, 4)
