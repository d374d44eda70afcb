/* muvox::trilinear_weights: see muvox/trilinear_weights.h. */
#include "box.h"

/* The grid is nine numbers from `first` on: a list would cost the binding an owner for each of its elements. */
static muvox_trilinear_weights grid(const StableIValue *stack, int first)
{
    muvox_trilinear_weights op = {.struct_size = sizeof op};

    for (int axis = 0; axis < 3; axis++) {
        op.origin[axis] = box_float(stack[first + axis]);
        op.voxel_size[axis] = box_float(stack[first + 3 + axis]);
        op.shape[axis] = box_int(stack[first + 6 + axis]);
    }
    return op;
}

#define GRID "float x, float y, float z, float dx, float dy, float dz, int nx, int ny, int nz"

static void trilinear_weights(StableIValue *stack, uint64_t arguments, uint64_t results)
{
    muvox_box               box = box_open("trilinear_weights", stack, 1);
    muvox_trilinear_weights op = grid(stack, 1);
    (void)arguments;
    (void)results;

    op.points = box_table(&box, 0, "points");
    op.weights = box_new_table(&box, "weights", true, box_wide(op.points.dtype), op.points.rows, 8);
    op.index = box_new_table(&box, "index", true, MUVOX_I32, op.points.rows, 8);
    box_close(&box, BOX_RUN(&box, trilinear_weights_forward, &op));
}

static void trilinear_weights_backward(StableIValue *stack, uint64_t arguments, uint64_t results)
{
    muvox_box               box = box_open("trilinear_weights", stack, 2);
    muvox_trilinear_weights op = grid(stack, 2);
    (void)arguments;
    (void)results;

    op.grad_weights = box_table(&box, 0, "grad_weights");
    op.points = box_table(&box, 1, "points");
    op.grad_points = box_new_table(&box, "grad_points", true, op.points.dtype, op.points.rows, op.points.cols);
    box_close(&box, BOX_RUN(&box, trilinear_weights_backward, &op));
}

const box_operator trilinear_weights_operators[2] = {
    BOX_OPERATOR(trilinear_weights, "(Tensor points, " GRID ") -> (Tensor weights, Tensor index)"),
    BOX_OPERATOR(trilinear_weights_backward, "(Tensor grad_weights, Tensor points, " GRID ") -> Tensor"),
};
