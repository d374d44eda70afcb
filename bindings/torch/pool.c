/* muvox::pool: see muvox/pool.h. */
#include "box.h"

static void pool(StableIValue *stack, uint64_t arguments, uint64_t results)
{
    muvox_box  box = box_open("pool", stack, 2);
    muvox_pool op = {.struct_size = sizeof op, .aggregates = box_aggregates(stack[2])};
    const bool save = box_bool(stack[3]);
    const int  blocks = box_blocks(op.aggregates), winners = box_winners(op.aggregates);
    (void)arguments;
    (void)results;

    box_sets(&box, 1, 0, "x");
    op.sets = box.sets;
    op.x = box_rows(&box, 0, "x");
    op.out = box_new_per_set(&box, "out", true, op.x.dtype, blocks * op.x.cols);
    op.winners = box_new_per_set(&box, "winners", save && winners, MUVOX_I32, winners * op.x.cols);
    box_close(&box, BOX_RUN(&box, muvox_pool_forward(&box.ctx, &op)));
}

static void pool_backward(StableIValue *stack, uint64_t arguments, uint64_t results)
{
    muvox_box     box = box_open("pool", stack, 4);
    muvox_pool    op = {.struct_size = sizeof op, .aggregates = box_aggregates(stack[4])};
    const int64_t wanted = box_int(stack[5]);
    (void)arguments;
    (void)results;

    box_sets(&box, 2, 1, "x");
    op.sets = box.sets;
    op.grad_out = box_per_set(&box, 0, "grad_out");
    op.x = box_rows(&box, 1, "x");
    if (box_has(&box, 3)) op.winners = box_saved(box_per_set(&box, 3, "winners"));
    op.grad_x = box_new_rows(&box, "grad_x", wanted & 1, op.x.dtype, op.x.cols);
    box_close(&box, BOX_RUN(&box, muvox_pool_backward(&box.ctx, &op)));
}

const box_operator pool_operators[2] = {
    BOX_OPERATOR(pool, "(Tensor x, Tensor splits, int aggregates, bool save) -> (Tensor out, Tensor winners)"),
    BOX_OPERATOR(pool_backward, "(Tensor grad_out, Tensor x, Tensor splits, Tensor winners, int aggregates, int wanted)"
                                " -> Tensor"),
};
