/* muvox::knn: see muvox/knn.h. */
#include "box.h"

/* coords, queries, splits and query_splits from argument `first` on */
static muvox_knn inputs(muvox_box *box, int first, bool cross)
{
    muvox_knn op = {.struct_size = sizeof op, .options = cross ? MUVOX_QUERIES : 0};

    if (cross) {
        op.query_sets = box_sets(box, first + 3, "query_splits", first + 1, "queries");
        op.queries = box_rows(box, first + 1, "queries");
    }
    op.sets = box_sets(box, first + 2, "splits", first, "coords");
    op.coords = box_rows(box, first, "coords");
    return op;
}

/* What follows has one row for each that looks for neighbours. */
static void at_queries(muvox_box *box, const muvox_knn *op)
{
    box->sets = op->options & MUVOX_QUERIES ? op->query_sets : op->sets;
}

static void knn(StableIValue *stack, uint64_t arguments, uint64_t results)
{
    muvox_box    box = box_open("knn", stack, 5);
    muvox_knn    op = inputs(&box, 0, box_bool(stack[8]));
    const double max_radius = box_float(stack[7]);
    (void)arguments;
    (void)results;

    op.k = box_int(stack[5]);
    op.options |= box_option(stack[6], MUVOX_EXCLUDE_SELF) | box_radius(max_radius);
    op.max_radius = max_radius;
    op.mask = box_mask(&box, 4);
    at_queries(&box, &op);
    op.distance2 = box_new_rows(&box, "distance2", true, box_wide(op.coords.dtype), box_places(op.k));
    op.neighbours = box_new_rows(&box, "neighbours", true, MUVOX_I32, box_places(op.k));
    op.counts = box_new_column(&box, "counts", true, MUVOX_I32);
    box_close(&box, BOX_RUN(&box, knn_forward, &op));
}

static void knn_backward(StableIValue *stack, uint64_t arguments, uint64_t results)
{
    muvox_box     box = box_open("knn", stack, 6);
    const bool    cross = box_bool(stack[6]);
    muvox_knn     op = inputs(&box, 1, cross);
    const int64_t wanted = box_int(stack[7]);
    (void)arguments;
    (void)results;

    op.grad_coords = box_new_rows(&box, "grad_coords", wanted & 1, op.coords.dtype, op.coords.cols);
    at_queries(&box, &op);
    op.grad_queries = box_new_rows(&box, "grad_queries", cross && wanted & 2, op.coords.dtype, op.coords.cols);
    op.grad_distance2 = box_rows(&box, 0, "grad_distance2");
    op.neighbours = box_saved(box_rows(&box, 5, "neighbours"));
    op.k = op.neighbours.cols;
    box_close(&box, BOX_RUN(&box, knn_backward, &op));
}

/* distance2 comes first because it can be differentiated: torch's opcheck adds all results up in the first one. */
const box_operator knn_operators[2] = {
    BOX_OPERATOR(knn, "(Tensor coords, Tensor queries, Tensor splits, Tensor query_splits, Tensor mask, int k,"
                      " bool exclude_self, float max_radius, bool cross)"
                      " -> (Tensor distance2, Tensor neighbours, Tensor counts)"),
    BOX_OPERATOR(knn_backward, "(Tensor grad_distance2, Tensor coords, Tensor queries, Tensor splits,"
                               " Tensor query_splits, Tensor neighbours, bool cross, int wanted)"
                               " -> (Tensor grad_coords, Tensor grad_queries)"),
};
