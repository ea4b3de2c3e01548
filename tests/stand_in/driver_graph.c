/* Graphs: what a stream captures instead of running it, and launches of that.
 *
 * Work is captured that can run again as it is: kernels, copies and fills of device memory, host functions. Anything
 * else on a capturing stream is refused, and ends the capture without a graph.
 */
#include "driver.h"

#include <stdlib.h>

enum { NODE_MAGIC = 0x5eed40de, GRAPH_MAGIC = 0x5eed96a9, EXEC_MAGIC = 0x5eedecec };
enum { MODE_RELAXED = 2 };
enum { ACTIVE = 1, INVALIDATED = 2 };

/* What each kernel of an executable graph takes of the device's memory: half of what one with two kernels took on
 * an H200. */
enum { NODE_BYTES = 57 << 10 };

__thread int stand_in_captures;

struct node {
    unsigned magic;
    struct node *next;
    struct work *work;
};

struct graph {
    unsigned magic;
    int references; /* of the application, its executable graphs, and their launches */
    struct context *context;
    size_t count;
    struct node *first;
    struct node *last;
};

/* Never freed, so that a handle used after its end is an error and no crash. */
struct executable {
    unsigned magic;
    int references; /* of the application and of launches in flight */
    struct graph *graph;
};

static struct graph *new_graph(struct context *context) {
    struct graph *graph = calloc(1, sizeof *graph);
    *graph = (struct graph){.magic = GRAPH_MAGIC, .references = 1, .context = context};
    return graph;
}

/* The lock is held. */
static void drop_graph(struct graph *graph) {
    if (--graph->references)
        return;
    for (struct node *node = graph->first, *next; node; node = next) {
        next = node->next;
        if (node->work->drop)
            node->work->drop(NULL, node->work, CUDA_SUCCESS);
        free(node->work);
        free(node);
    }
    free(graph);
}

/* Memory of a graph in flight is free for others when that has ended. The lock is held. */
static void drop_executable(struct executable *executable) {
    if (--executable->references)
        return;
    executable->graph->context->graph_nodes -= executable->graph->count;
    drop_graph(executable->graph);
}

CUresult capture(struct stream *stream, struct work *work) {
    if (stream->is_capture_broken)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (!work || !work->node) {
        stream->is_capture_broken = true;
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    work->is_captured = true;
    struct graph *graph = stream->capture;
    struct node *node = calloc(1, sizeof *node);
    *node = (struct node){.magic = NODE_MAGIC, .work = work};
    if (graph->last)
        graph->last->next = node;
    else
        graph->first = node;
    graph->last = node;
    graph->count++;
    return CUDA_SUCCESS;
}

static CUresult begin_capture(void *handle, int mode) {
    struct stream *stream;
    CHECK(get_stream(handle, &stream));
    if (mode < 0 || mode > MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&stand_in_lock);
    CUresult code = stream == stream->context->legacy ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
                    : stream->capture                 ? CUDA_ERROR_ILLEGAL_STATE
                                                      : CUDA_SUCCESS;
    if (code == CUDA_SUCCESS) {
        stream->capture = new_graph(stream->context);
        stream->is_capture_broken = false;
        stream->capturer = pthread_self();
        stand_in_captures++;
    }
    pthread_mutex_unlock(&stand_in_lock);
    return code;
}

CUDA(cuStreamBeginCapture, 10010, cuStreamBeginCapture_v2, void *stream, int mode) {
    ENTER(cuStreamBeginCapture_v2);
    return begin_capture(stream, mode);
}

static CUresult end_capture(struct stream *stream, struct graph **graph) {
    *graph = NULL;
    if (!stream->capture)
        return CUDA_ERROR_ILLEGAL_STATE;
    if (!pthread_equal(stream->capturer, pthread_self()))
        return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    stand_in_captures--;
    struct graph *captured = stream->capture;
    stream->capture = NULL;
    if (stream->is_capture_broken) {
        drop_graph(captured);
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    }
    *graph = captured;
    return CUDA_SUCCESS;
}

CUDA(cuStreamEndCapture, 10000, cuStreamEndCapture, void *handle, struct graph **graph) {
    struct stream *stream;
    ENTER(cuStreamEndCapture);
    CHECK(get_stream(handle, &stream));
    pthread_mutex_lock(&stand_in_lock);
    CUresult code = end_capture(stream, graph);
    pthread_mutex_unlock(&stand_in_lock);
    return code;
}

CUDA(cuStreamIsCapturing, 10000, cuStreamIsCapturing, void *handle, int *status) {
    struct stream *stream;
    ENTER(cuStreamIsCapturing);
    CHECK(get_stream(handle, &stream));
    pthread_mutex_lock(&stand_in_lock);
    *status = !stream->capture ? 0 : stream->is_capture_broken ? INVALIDATED : ACTIVE;
    pthread_mutex_unlock(&stand_in_lock);
    return CUDA_SUCCESS;
}

/* Without room for nodes, how many there are. Room that is left over is filled with NULL. */
CUDA(cuGraphGetNodes, 10000, cuGraphGetNodes, struct graph *graph, struct node **nodes, size_t *count) {
    ENTER(cuGraphGetNodes);
    if (!graph || graph->magic != GRAPH_MAGIC || !count)
        return CUDA_ERROR_INVALID_VALUE;
    size_t written = 0;
    struct node *node = graph->first;
    for (; nodes && written < *count; written++) {
        nodes[written] = node;
        node = node ? node->next : NULL;
    }
    if (!nodes || *count > graph->count)
        *count = graph->count;
    return CUDA_SUCCESS;
}

CUDA(cuGraphNodeGetType, 10000, cuGraphNodeGetType, struct node *node, int *type) {
    ENTER(cuGraphNodeGetType);
    if (!node || node->magic != NODE_MAGIC)
        return CUDA_ERROR_INVALID_VALUE;
    *type = node->work->node - 1;
    return CUDA_SUCCESS;
}

CUDA(cuGraphDestroy, 10000, cuGraphDestroy, struct graph *graph) {
    ENTER(cuGraphDestroy);
    if (!graph || graph->magic != GRAPH_MAGIC)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&stand_in_lock);
    drop_graph(graph);
    pthread_mutex_unlock(&stand_in_lock);
    return CUDA_SUCCESS;
}

/* Where the memory for graphs has to grow, this waits for all that runs: seen on an H200 with driver 580. What was
 * made once stays, whatever is destroyed. The lock is held. */
static CUresult grow(struct context *context, size_t count) {
    while (context->graph_nodes + count > context->graph_room) {
        size_t more = context->graph_nodes + count - context->graph_room;
        CHECK(charge(context, more * NODE_BYTES));
        context->graph_room += more;
        pthread_mutex_unlock(&stand_in_lock);
        CUresult code = drain(context);
        pthread_mutex_lock(&stand_in_lock);
        CHECK(code);
    }
    return CUDA_SUCCESS;
}

CUDA(cuGraphInstantiateWithFlags, 11040, cuGraphInstantiateWithFlags, struct executable **handle, struct graph *graph,
     unsigned long long flags) {
    ENTER(cuGraphInstantiateWithFlags);
    if (!graph || graph->magic != GRAPH_MAGIC || flags)
        return CUDA_ERROR_INVALID_VALUE;
    CHECK(sticky_error(graph->context));
    pthread_mutex_lock(&stand_in_lock);
    CUresult code = grow(graph->context, graph->count);
    if (code == CUDA_SUCCESS) {
        struct executable *executable = calloc(1, sizeof *executable);
        *executable = (struct executable){.magic = EXEC_MAGIC, .references = 1, .graph = graph};
        graph->references++;
        graph->context->graph_nodes += graph->count;
        *handle = executable;
    }
    pthread_mutex_unlock(&stand_in_lock);
    return code;
}

struct launch_work {
    struct work work;
    struct executable *executable;
};

static void drop_launch(struct stream *stream, struct work *work, CUresult code) {
    pthread_mutex_lock(&stand_in_lock);
    drop_executable(((struct launch_work *)work)->executable);
    pthread_mutex_unlock(&stand_in_lock);
}

static void run_launch(struct stream *stream, struct work *work) {
    for (struct node *node = ((struct launch_work *)work)->executable->graph->first; node; node = node->next)
        node->work->run(stream, node->work);
    drop_launch(stream, work, CUDA_SUCCESS);
}

CUDA(cuGraphLaunch, 10000, cuGraphLaunch, struct executable *executable, void *handle) {
    struct stream *stream;
    ENTER(cuGraphLaunch);
    CHECK(get_stream(handle, &stream));
    pthread_mutex_lock(&stand_in_lock);
    bool fits = executable && executable->magic == EXEC_MAGIC && !stream->capture;
    if (fits)
        executable->references++;
    pthread_mutex_unlock(&stand_in_lock);
    if (!fits)
        return CUDA_ERROR_INVALID_VALUE;
    struct launch_work *work = new_work(sizeof *work, run_launch);
    work->work.drop = drop_launch;
    work->executable = executable;
    CUresult code = submit(stream, &work->work);
    if (code != CUDA_SUCCESS) {
        pthread_mutex_lock(&stand_in_lock);
        drop_executable(executable);
        pthread_mutex_unlock(&stand_in_lock);
    }
    return code;
}

/* One in flight runs to its end. */
CUDA(cuGraphExecDestroy, 10000, cuGraphExecDestroy, struct executable *executable) {
    ENTER(cuGraphExecDestroy);
    if (!executable || executable->magic != EXEC_MAGIC)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&stand_in_lock);
    executable->magic = 0;
    CUresult code = executable->graph->context->sticky;
    drop_executable(executable);
    pthread_mutex_unlock(&stand_in_lock);
    return code;
}
