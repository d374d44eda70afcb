/* muvox::devoxelize: see muvox/devoxelize.h. */
#include "box.h"

static void devoxelize(StableIValue *stack, uint64_t arguments, uint64_t results)
{
    muvox_box        box = box_open("devoxelize", stack, 3);
    muvox_devoxelize op = {.struct_size = sizeof op};
    (void)arguments;
    (void)results;

    op.feats = box_table(&box, 0, "feats");
    op.index = box_table(&box, 1, "index");
    op.weights = box_table(&box, 2, "weights");
    op.out = box_new_table(&box, "out", true, op.feats.dtype, op.index.rows, op.feats.cols);
    box_close(&box, BOX_RUN(&box, devoxelize_forward, &op));
}

static void devoxelize_backward(StableIValue *stack, uint64_t arguments, uint64_t results)
{
    muvox_box        box = box_open("devoxelize", stack, 4);
    muvox_devoxelize op = {.struct_size = sizeof op};
    const int64_t    wanted = box_int(stack[4]);
    (void)arguments;
    (void)results;

    op.grad_out = box_table(&box, 0, "grad_out");
    op.feats = box_table(&box, 1, "feats");
    op.index = box_table(&box, 2, "index");
    op.weights = box_table(&box, 3, "weights");
    op.grad_feats = box_new_table(&box, "grad_feats", wanted & 1, op.feats.dtype, op.feats.rows, op.feats.cols);
    op.grad_weights =
        box_new_table(&box, "grad_weights", wanted & 2, op.weights.dtype, op.weights.rows, op.weights.cols);
    box_close(&box, BOX_RUN(&box, devoxelize_backward, &op));
}

const box_operator devoxelize_operators[2] = {
    BOX_OPERATOR(devoxelize, "(Tensor feats, Tensor index, Tensor weights) -> Tensor"),
    BOX_OPERATOR(devoxelize_backward, "(Tensor grad_out, Tensor feats, Tensor index, Tensor weights, int wanted)"
                                      " -> (Tensor grad_feats, Tensor grad_weights)"),
};
