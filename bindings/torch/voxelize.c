/* muvox::voxelize: see muvox/voxelize.h. */
#include "box.h"

static void voxelize(StableIValue *stack, uint64_t arguments, uint64_t results)
{
    muvox_box      box = box_open("voxelize", stack, 3);
    muvox_voxelize op = {.struct_size = sizeof op};
    (void)arguments;
    (void)results;

    op.feats = box_table(&box, 0, "feats");
    op.index = box_list(&box, 1, "index");
    op.counts = box_list(&box, 2, "counts");
    op.out = box_new_table(&box, "out", true, op.feats.dtype, op.counts.rows, op.feats.cols);
    box_close(&box, BOX_RUN(&box, voxelize_forward, &op));
}

/* For so many voxels, whose counts are made on the way and given back for backward. */
static void voxelize_by_size(StableIValue *stack, uint64_t arguments, uint64_t results)
{
    muvox_box      box = box_open("voxelize", stack, 2);
    muvox_voxelize op = {.struct_size = sizeof op};
    const int64_t  size = box_int(stack[2]);
    (void)arguments;
    (void)results;

    op.feats = box_table(&box, 0, "feats");
    op.index = box_list(&box, 1, "index");
    op.counts = (muvox_matrix){.dtype = MUVOX_I64, .rows = size, .cols = 1};
    op.out = box_new_table(&box, "out", true, op.feats.dtype, size, op.feats.cols);
    op.histogram = box_new_list(&box, "counts", MUVOX_I64, size);
    box_close(&box, BOX_RUN(&box, voxelize_forward, &op));
}

static void voxelize_backward(StableIValue *stack, uint64_t arguments, uint64_t results)
{
    muvox_box      box = box_open("voxelize", stack, 3);
    muvox_voxelize op = {.struct_size = sizeof op};
    (void)arguments;
    (void)results;

    op.grad_out = box_table(&box, 0, "grad_out");
    op.index = box_list(&box, 1, "index");
    op.counts = box_list(&box, 2, "counts");
    op.feats = (muvox_matrix){.dtype = op.grad_out.dtype, .rows = op.index.rows, .cols = op.grad_out.cols};
    op.grad_feats = box_new_table(&box, "grad_feats", true, op.feats.dtype, op.feats.rows, op.feats.cols);
    box_close(&box, BOX_RUN(&box, voxelize_backward, &op));
}

const box_operator voxelize_by_size_operator =
    BOX_OPERATOR(voxelize_by_size, "(Tensor feats, Tensor index, SymInt size) -> (Tensor, Tensor)");

const box_operator voxelize_operators[2] = {
    BOX_OPERATOR(voxelize, "(Tensor feats, Tensor index, Tensor counts) -> Tensor"),
    BOX_OPERATOR(voxelize_backward, "(Tensor grad_out, Tensor index, Tensor counts) -> Tensor"),
};
