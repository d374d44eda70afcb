/* muvox::aggregate: see muvox/aggregate.h. */
#include "box.h"

static void aggregate(StableIValue *stack, uint64_t arguments, uint64_t results)
{
    muvox_box       box = box_open("aggregate", stack, 4);
    muvox_aggregate op = {.struct_size = sizeof op, .aggregates = box_aggregates(stack[4])};
    const bool      save = box_bool(stack[5]);
    const int       blocks = box_blocks(op.aggregates), winners = box_winners(op.aggregates);
    (void)arguments;
    (void)results;

    op.sets = box_sets(&box, 3, "splits", 0, "feats");
    op.feats = box_rows(&box, 0, "feats");
    op.neighbours = box_rows(&box, 1, "neighbours");
    op.weights = box_rows(&box, 2, "weights");
    op.out = box_new_rows(&box, "out", true, op.feats.dtype, blocks * op.feats.cols);
    op.winners = box_new_rows(&box, "winners", save && winners, op.neighbours.cols <= 254 ? MUVOX_U8 : MUVOX_I32,
                              winners * op.feats.cols);
    box_close(&box, BOX_RUN(&box, aggregate_forward, &op));
}

static void aggregate_backward(StableIValue *stack, uint64_t arguments, uint64_t results)
{
    muvox_box       box = box_open("aggregate", stack, 6);
    muvox_aggregate op = {.struct_size = sizeof op, .aggregates = box_aggregates(stack[6])};
    const int64_t   wanted = box_int(stack[7]);
    (void)arguments;
    (void)results;

    op.sets = box_sets(&box, 4, "splits", 1, "feats");
    op.grad_out = box_rows(&box, 0, "grad_out");
    op.feats = box_rows(&box, 1, "feats");
    op.neighbours = box_rows(&box, 2, "neighbours");
    op.weights = box_rows(&box, 3, "weights");
    if (box_has(&box, 5)) op.winners = box_saved(box_rows(&box, 5, "winners"));
    op.grad_feats = box_new_rows(&box, "grad_feats", wanted & 1, op.feats.dtype, op.feats.cols);
    op.grad_weights = box_new_rows(&box, "grad_weights", wanted & 2, op.weights.dtype, op.weights.cols);
    box_close(&box, BOX_RUN(&box, aggregate_backward, &op));
}

const box_operator aggregate_operators[2] = {
    BOX_OPERATOR(aggregate,
                 "(Tensor feats, Tensor neighbours, Tensor weights, Tensor splits, int aggregates, bool save)"
                 " -> (Tensor out, Tensor winners)"),
    BOX_OPERATOR(aggregate_backward,
                 "(Tensor grad_out, Tensor feats, Tensor neighbours, Tensor weights, Tensor splits, Tensor winners,"
                 " int aggregates, int wanted) -> (Tensor grad_feats, Tensor grad_weights)"),
};
