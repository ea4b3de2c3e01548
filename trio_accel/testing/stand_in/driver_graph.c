/* Graphs: what a stream captures instead of running it, and launches of that.
 *
 * Work is captured that can run again as it is: kernels, copies and fills of device memory, host functions. Anything
 * else on a capturing stream is refused, and ends the capture without a graph.
 *
 * Nodes of a graph run one after the other. Those with a condition have a graph of their own, which runs if a kernel
 * has set the condition, or as long as it is set.
 */
#include "driver.h"

#include <stdlib.h>

enum { NODE_MAGIC = 0x5eed40de, GRAPH_MAGIC = 0x5eed96a9, EXEC_MAGIC = 0x5eedecec, CONDITION_MAGIC = 0x5eedc0de };
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
    bool is_part;           /* of a node with a condition, which has it */
    size_t unused;          /* conditions without a node */
    size_t count;
    struct node *first;
    struct node *last;
};

/* A handle is the address of its value, which kernels write to. Never freed. */
struct condition {
    unsigned value;
    unsigned magic;
    struct graph *graph;
    bool is_used;
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

/* The lock is held. */
static struct node *append_node(struct graph *graph, struct work *work) {
    struct node *node = calloc(1, sizeof *node);
    *node = (struct node){.magic = NODE_MAGIC, .work = work};
    if (graph->last)
        graph->last->next = node;
    else
        graph->first = node;
    graph->last = node;
    graph->count++;
    return node;
}

CUresult capture(struct stream *stream, struct work *work) {
    if (stream->is_capture_broken)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (!work || !work->node || (stream->capture->is_part && work->node == NODE_HOST + 1)) {
        stream->is_capture_broken = true;
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    work->is_captured = true;
    append_node(stream->capture, work);
    return CUDA_SUCCESS;
}

/* Into a graph of its own, if none is given. */
static CUresult begin_capture(void *handle, int mode, struct graph *graph) {
    struct stream *stream;
    CHECK(get_stream(handle, &stream));
    if (mode < 0 || mode > MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&stand_in_lock);
    CUresult code = stream == stream->context->legacy ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
                    : stream->capture                 ? CUDA_ERROR_ILLEGAL_STATE
                                                      : CUDA_SUCCESS;
    if (code == CUDA_SUCCESS) {
        stream->capture = graph ? graph : new_graph(stream->context);
        stream->is_capture_lent = graph != NULL;
        stream->is_capture_relaxed = mode == MODE_RELAXED;
        stream->is_capture_broken = false;
        stream->capturer = pthread_self();
        stand_in_captures += !stream->is_capture_relaxed;
    }
    pthread_mutex_unlock(&stand_in_lock);
    return code;
}

CUDA(cuStreamBeginCapture, 10010, cuStreamBeginCapture_v2, void *stream, int mode) {
    ENTER(cuStreamBeginCapture_v2);
    return begin_capture(stream, mode, NULL);
}

/* What is new follows the last node of a graph, and nothing else. */
static bool follows(struct graph *graph, struct node **nodes, size_t count) {
    return graph && graph->magic == GRAPH_MAGIC &&
           (graph->last ? count == 1 && nodes && nodes[0] == graph->last : count == 0);
}

CUDA(cuStreamBeginCaptureToGraph, 12030, cuStreamBeginCaptureToGraph, void *stream, struct graph *graph,
     struct node **nodes, const uint64_t *edges, size_t count, int mode) {
    ENTER(cuStreamBeginCaptureToGraph);
    if (!follows(graph, nodes, count) || (edges && count && edges[0]))
        return CUDA_ERROR_INVALID_VALUE;
    return begin_capture(stream, mode, graph);
}

/* The next node follows the last one; what is returned holds until the next call. */
CUDA(cuStreamGetCaptureInfo, 12030, cuStreamGetCaptureInfo_v3, void *handle, int *status, uint64_t *id,
     struct graph **graph, struct node ***nodes, const uint64_t **edges, size_t *count) {
    static const uint64_t plain;
    struct stream *stream;
    ENTER(cuStreamGetCaptureInfo_v3);
    CHECK(get_stream(handle, &stream));
    pthread_mutex_lock(&stand_in_lock);
    *status = !stream->capture ? 0 : stream->is_capture_broken ? INVALIDATED : ACTIVE;
    bool is_active = *status == ACTIVE;
    stream->captured_last = is_active ? stream->capture->last : NULL;
    if (id)
        *id = stream->id;
    if (graph)
        *graph = is_active ? stream->capture : NULL;
    if (nodes)
        *nodes = &stream->captured_last;
    if (edges)
        *edges = &plain;
    if (count)
        *count = stream->captured_last ? 1 : 0;
    pthread_mutex_unlock(&stand_in_lock);
    return CUDA_SUCCESS;
}

static CUresult end_capture(struct stream *stream, struct graph **graph) {
    *graph = NULL;
    if (!stream->capture)
        return CUDA_ERROR_ILLEGAL_STATE;
    if (!pthread_equal(stream->capturer, pthread_self()))
        return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    stand_in_captures -= !stream->is_capture_relaxed;
    struct graph *captured = stream->capture;
    stream->capture = NULL;
    if (stream->is_capture_broken) {
        if (!stream->is_capture_lent)
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

CUDA(cuGraphCreate, 10000, cuGraphCreate, struct graph **graph, unsigned flags) {
    struct context *context;
    ENTER(cuGraphCreate);
    CHECK(get_current(&context));
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    *graph = new_graph(context);
    return CUDA_SUCCESS;
}

CUDA(cuGraphDestroy, 10000, cuGraphDestroy, struct graph *graph) {
    ENTER(cuGraphDestroy);
    if (!graph || graph->magic != GRAPH_MAGIC || graph->is_part)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&stand_in_lock);
    drop_graph(graph);
    pthread_mutex_unlock(&stand_in_lock);
    return CUDA_SUCCESS;
}

CUDA(cuGraphConditionalHandleCreate, 12030, cuGraphConditionalHandleCreate, uint64_t *handle, struct graph *graph,
     struct context *context, unsigned value, unsigned flags) {
    ENTER(cuGraphConditionalHandleCreate);
    if (!graph || graph->magic != GRAPH_MAGIC || graph->context != context || value || flags)
        return CUDA_ERROR_INVALID_VALUE;
    struct condition *condition = calloc(1, sizeof *condition);
    *condition = (struct condition){.magic = CONDITION_MAGIC, .graph = graph};
    pthread_mutex_lock(&stand_in_lock);
    graph->unused++;
    pthread_mutex_unlock(&stand_in_lock);
    *handle = (uintptr_t)condition;
    return CUDA_SUCCESS;
}

struct part_work {
    struct work work;
    struct condition *condition;
    bool is_loop;
    struct graph *graph;
};

/* The lock is held. */
static void drop_part(struct stream *stream, struct work *work, CUresult code) {
    struct part_work *part = (struct part_work *)work;
    part->graph->is_part = false;
    drop_graph(part->graph);
}

static bool is_lost(struct stream *stream) {
    return __atomic_load_n(&stream->context->sticky, __ATOMIC_RELAXED) != CUDA_SUCCESS;
}

static void run_nodes(struct stream *stream, struct graph *graph) {
    for (struct node *node = graph->first; node; node = node->next)
        node->work->run(stream, node->work);
}

static void run_part(struct stream *stream, struct work *work) {
    struct part_work *part = (struct part_work *)work;
    unsigned *value = &part->condition->value;
    while (__atomic_load_n(value, __ATOMIC_ACQUIRE) && !is_lost(stream)) {
        run_nodes(stream, part->graph);
        if (!part->is_loop)
            return;
    }
}

/* The structure CUgraphNodeParams, of a node with a condition. */
struct node_params {
    int type;
    int reserved[3];
    struct condition *condition;
    int kind;
    unsigned size;
    struct graph **graphs;
    struct context *context;
};

/* Of all kinds of nodes, those with one graph that runs if, or as long as, a condition is set. */
CUDA(cuGraphAddNode, 12030, cuGraphAddNode_v2, struct node **handle, struct graph *graph, struct node **nodes,
     const uint64_t *edges, size_t count, struct node_params *params) {
    enum { KIND_IF = 0, KIND_WHILE = 1 };
    ENTER(cuGraphAddNode_v2);
    if (!follows(graph, nodes, count) || (edges && count && edges[0]) || !params)
        return CUDA_ERROR_INVALID_VALUE;
    if (params->type != NODE_CONDITIONAL)
        return CUDA_ERROR_NOT_SUPPORTED;
    struct condition *condition = params->condition;
    if (!condition || condition->magic != CONDITION_MAGIC || condition->graph != graph || condition->is_used ||
        params->size != 1 || params->kind < KIND_IF || params->kind > KIND_WHILE ||
        params->context != graph->context)
        return CUDA_ERROR_INVALID_VALUE;
    struct part_work *part = new_work(sizeof *part, run_part);
    part->work.drop = drop_part;
    part->work.node = NODE_CONDITIONAL + 1;
    part->work.is_captured = true;
    part->condition = condition;
    part->is_loop = params->kind == KIND_WHILE;
    pthread_mutex_lock(&stand_in_lock);
    condition->is_used = true;
    graph->unused--;
    part->graph = new_graph(graph->context);
    part->graph->is_part = true;
    *handle = append_node(graph, &part->work);
    pthread_mutex_unlock(&stand_in_lock);
    params->graphs = &part->graph;
    return CUDA_SUCCESS;
}

/* Whether each condition has its node. */
static bool is_whole(struct graph *graph) {
    if (graph->unused)
        return false;
    for (struct node *node = graph->first; node; node = node->next)
        if (node->work->node == NODE_CONDITIONAL + 1 && !is_whole(((struct part_work *)node->work)->graph))
            return false;
    return true;
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
    if (!graph || graph->magic != GRAPH_MAGIC || graph->is_part || flags || !is_whole(graph))
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
    run_nodes(stream, ((struct launch_work *)work)->executable->graph);
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
