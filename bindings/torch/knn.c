/* muvox::knn: see muvox/knn.h. */
#include "box.h"

static void knn(StableIValue *stack, uint64_t arguments, uint64_t results)
{
    muvox_box box = box_open("knn", stack, 2);
    muvox_knn op = {.struct_size = sizeof op, .k = box_int(stack[2])};
    (void)arguments;
    (void)results;

    box_sets(&box, 1, 0, "coords");
    op.sets = box.sets;
    op.coords = box_rows(&box, 0, "coords");
    op.distance2 =
        box_new_rows(&box, "distance2", true, op.coords.dtype == MUVOX_F64 ? MUVOX_F64 : MUVOX_F32, box_places(op.k));
    op.neighbours = box_new_rows(&box, "neighbours", true, MUVOX_I32, box_places(op.k));
    op.counts = box_new_column(&box, "counts", true, MUVOX_I32);
    box_close(&box, BOX_RUN(&box, muvox_knn_forward(&box.ctx, &op)));
}

static void knn_backward(StableIValue *stack, uint64_t arguments, uint64_t results)
{
    muvox_box box = box_open("knn", stack, 4);
    muvox_knn op = {.struct_size = sizeof op};
    (void)arguments;
    (void)results;

    box_sets(&box, 2, 1, "coords");
    op.sets = box.sets;
    op.grad_distance2 = box_rows(&box, 0, "grad_distance2");
    op.coords = box_rows(&box, 1, "coords");
    op.neighbours = box_saved(box_rows(&box, 3, "neighbours"));
    op.k = op.neighbours.cols;
    op.grad_coords = box_new_rows(&box, "grad_coords", true, op.coords.dtype, op.coords.cols);
    box_close(&box, BOX_RUN(&box, muvox_knn_backward(&box.ctx, &op)));
}

/* distance2 comes first because it can be differentiated: torch's opcheck adds all results up in the first one. */
const box_operator knn_operators[2] = {
    BOX_OPERATOR(knn, "(Tensor coords, Tensor splits, int k) -> (Tensor distance2, Tensor neighbours, Tensor counts)"),
    BOX_OPERATOR(knn_backward, "(Tensor grad_distance2, Tensor coords, Tensor splits, Tensor neighbours) -> Tensor"),
};
