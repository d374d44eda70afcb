/* muvox::pool: see muvox/pool.h. */
#include "box.h"

static void pool(StableIValue *stack, uint64_t arguments, uint64_t results)
{
    muvox_box  box = box_open("pool", stack, 4);
    muvox_pool op = {.struct_size = sizeof op, .aggregates = box_aggregates(stack[4])};
    const bool save = box_bool(stack[5]);
    const int  blocks = box_blocks(op.aggregates), winners = box_winners(op.aggregates);
    (void)arguments;
    (void)results;

    op.sets = box_sets(&box, 1, "splits", 0, "x");
    op.x = box_rows(&box, 0, "x");
    op.mask = box_mask(&box, 2);
    op.row_weights = box_optional_column(&box, 3, "row_weights");
    op.out = box_new_per_set(&box, "out", true, op.x.dtype, blocks * op.x.cols);
    op.winners = box_new_per_set(&box, "winners", save && winners, MUVOX_I32, winners * op.x.cols);
    box_close(&box, BOX_RUN(&box, pool_forward, &op));
}

static void pool_backward(StableIValue *stack, uint64_t arguments, uint64_t results)
{
    muvox_box     box = box_open("pool", stack, 6);
    muvox_pool    op = {.struct_size = sizeof op, .aggregates = box_aggregates(stack[6])};
    const int64_t wanted = box_int(stack[7]);
    (void)arguments;
    (void)results;

    op.sets = box_sets(&box, 2, "splits", 1, "x");
    op.grad_out = box_per_set(&box, 0, "grad_out");
    op.x = box_rows(&box, 1, "x");
    op.mask = box_mask(&box, 3);
    op.row_weights = box_optional_column(&box, 4, "row_weights");
    if (box_has(&box, 5)) op.winners = box_saved(box_per_set(&box, 5, "winners"));
    op.grad_x = box_new_rows(&box, "grad_x", wanted & 1, op.x.dtype, op.x.cols);
    op.grad_row_weights = box_new_column(&box, "grad_row_weights", wanted & 2, box_wide(op.x.dtype));
    box_close(&box, BOX_RUN(&box, pool_backward, &op));
}

const box_operator pool_operators[2] = {
    BOX_OPERATOR(pool, "(Tensor x, Tensor splits, Tensor mask, Tensor row_weights, int aggregates, bool save)"
                       " -> (Tensor out, Tensor winners)"),
    BOX_OPERATOR(pool_backward, "(Tensor grad_out, Tensor x, Tensor splits, Tensor mask, Tensor row_weights,"
                                " Tensor winners, int aggregates, int wanted)"
                                " -> (Tensor grad_x, Tensor grad_row_weights)"),
};
