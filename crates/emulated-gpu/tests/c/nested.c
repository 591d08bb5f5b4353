/* A graph within a graph: read back, changed, copied, and gone with its node. */
#include "call.h"

typedef unsigned long long ptr;
struct set { ptr to; size_t pitch; unsigned value, element; size_t width, height; };

static void *context;
static int launched(void *exec, ptr p) {
    int got = 0; CHECK(cuGraphLaunch, exec, NULL); CHECK(cuStreamSynchronize, NULL); CHECK(cuMemcpyDtoH_v2, &got, p, (size_t)4); return got;
}
static void *first_node(void *graph) {
    void *node = NULL; size_t n = 1; CHECK(cuGraphGetNodes, graph, &node, &n); EXPECT(n == 1); return node;
}

int main(void) {
    void *outer, *inner, *other, *copy, *node, *set, *early, *late, *got, *again; ptr p; int kind; size_t n;
    load("libcuda.so.1"); CHECK(cuInit, 0); CHECK(cuDevicePrimaryCtxRetain, &context, 0); CHECK(cuCtxSetCurrent, context);
    CHECK(cuMemAlloc_v2, &p, (size_t)512); struct set params = {p, 0, 1, 4, 1, 1}, back;
    CHECK(cuGraphCreate, &inner, 0); CHECK(cuGraphAddMemsetNode, &set, inner, NULL, (size_t)0, &params, context);
    CHECK(cuGraphCreate, &outer, 0); CHECK(cuGraphAddChildGraphNode, &node, outer, NULL, (size_t)0, inner);
    /* It is a copy: what it was made of may change and go. */
    params.value = 9; CHECK(cuGraphMemsetNodeSetParams, set, &params); CHECK(cuGraphDestroy, inner);
    CHECK(cuGraphChildGraphNodeGetGraph, node, &got); EXPECT(got != inner && got != outer);
    CHECK(cuGraphChildGraphNodeGetGraph, node, &again); EXPECT(again == got);
    void *within = first_node(got); CHECK(cuGraphNodeGetType, within, &kind); EXPECT(kind == 2);
    CHECK(cuGraphMemsetNodeGetParams, within, &back); EXPECT(back.to == p && back.value == 1);
    CHECK(cuGraphNodeGetContainingGraph, within, &again); EXPECT(again == got);
    GIVES(1, cuGraphChildGraphNodeGetGraph, within, &again); GIVES(1, cuGraphChildGraphNodeGetGraph, node, NULL);
    /* A change reaches what is made of the graph later, and nothing that was made before. */
    CHECK(cuGraphInstantiateWithFlags, &early, outer, 0ULL); CHECK(cuGraphClone, &copy, outer);
    params.value = 2; CHECK(cuGraphMemsetNodeSetParams, within, &params); CHECK(cuGraphInstantiateWithFlags, &late, outer, 0ULL);
    EXPECT(launched(early, p) == 1); EXPECT(launched(late, p) == 2); CHECK(cuGraphExecDestroy, late);
    CHECK(cuGraphInstantiateWithFlags, &late, copy, 0ULL); EXPECT(launched(late, p) == 1);
    /* Two levels, and another graph in a place that is there. */
    CHECK(cuGraphCreate, &other, 0); CHECK(cuGraphAddChildGraphNode, &set, other, NULL, (size_t)0, outer);
    CHECK(cuGraphChildGraphNodeGetGraph, set, &again); CHECK(cuGraphChildGraphNodeGetGraph, first_node(again), &again);
    CHECK(cuGraphMemsetNodeGetParams, first_node(again), &back); EXPECT(back.value == 2);
    CHECK(cuGraphExecChildGraphNodeSetParams, early, node, outer); EXPECT(launched(early, p) == 2);
    CHECK(cuGraphExecUpdate, early, copy, NULL, NULL); EXPECT(launched(early, p) == 1);
    /* It goes with its node, at whatever depth; what was made of it stays. */
    CHECK(cuGraphDestroy, other); n = 0; GIVES(400, cuGraphGetNodes, again, NULL, &n);
    CHECK(cuGraphDestroyNode, node); GIVES(400, cuGraphGetNodes, got, NULL, &n); GIVES(400, cuGraphNodeGetType, within, &kind);
    CHECK(cuGraphDestroy, outer); CHECK(cuGraphDestroy, copy); EXPECT(launched(late, p) == 1);
    puts("ok");
    return 0;
}
