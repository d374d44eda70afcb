/* muvox::offset_attention: see muvox/offset_attention.h. */
#include "box.h"

/* q, k, v, splits and mask from argument `first` on */
static muvox_offset_attention inputs(muvox_box *box, int first, double scale, double eps)
{
    muvox_offset_attention op = {.struct_size = sizeof op, .scale = scale, .eps = eps};

    op.sets = box_sets(box, first + 3, "splits", first, "q");
    op.q = box_rows(box, first, "q");
    op.k = box_rows(box, first + 1, "k");
    op.v = box_rows(box, first + 2, "v");
    op.mask = box_mask(box, first + 4);
    return op;
}

static void offset_attention(StableIValue *stack, uint64_t arguments, uint64_t results)
{
    muvox_box              box = box_open("offset_attention", stack, 5);
    muvox_offset_attention op = inputs(&box, 0, box_float(stack[5]), box_float(stack[6]));
    (void)arguments;
    (void)results;

    op.out = box_new_rows(&box, "out", true, op.v.dtype, op.v.cols);
    op.column_lse = box_new_column(&box, "column_lse", true, box_wide(op.q.dtype));
    op.log_sum = box_new_column(&box, "log_sum", true, box_wide(op.q.dtype));
    box_close(&box, BOX_RUN(&box, offset_attention_forward, &op));
}

static void offset_attention_backward(StableIValue *stack, uint64_t arguments, uint64_t results)
{
    muvox_box              box = box_open("offset_attention", stack, 9);
    muvox_offset_attention op = inputs(&box, 1, box_float(stack[9]), box_float(stack[10]));
    const int64_t          wanted = box_int(stack[11]);
    (void)arguments;
    (void)results;

    op.grad_out = box_rows(&box, 0, "grad_out");
    op.out = box_saved(box_rows(&box, 6, "out"));
    op.column_lse = box_saved(box_column(&box, 7, "column_lse"));
    op.log_sum = box_saved(box_column(&box, 8, "log_sum"));
    op.grad_q = box_new_rows(&box, "grad_q", wanted & 1, op.q.dtype, op.q.cols);
    op.grad_k = box_new_rows(&box, "grad_k", wanted & 2, op.k.dtype, op.k.cols);
    op.grad_v = box_new_rows(&box, "grad_v", wanted & 4, op.v.dtype, op.v.cols);
    box_close(&box, BOX_RUN(&box, offset_attention_backward, &op));
}

const box_operator offset_attention_operators[2] = {
    BOX_OPERATOR(offset_attention, "(Tensor q, Tensor k, Tensor v, Tensor splits, Tensor mask, float scale, float eps)"
                                   " -> (Tensor out, Tensor column_lse, Tensor log_sum)"),
    BOX_OPERATOR(offset_attention_backward,
                 "(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor splits, Tensor mask, Tensor out,"
                 " Tensor column_lse, Tensor log_sum, float scale, float eps, int wanted)"
                 " -> (Tensor grad_q, Tensor grad_k, Tensor grad_v)"),
};
