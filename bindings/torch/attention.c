/* muvox::attention: see muvox/attention.h. */
#include "box.h"

/* q, k, v, splits, bias, mask and row_weights from argument `first` on */
static muvox_attention inputs(muvox_box *box, int first, double scale)
{
    muvox_attention op = {.struct_size = sizeof op, .scale = scale};

    op.sets = box_sets(box, first + 3, "splits", first, "q");
    op.q = box_rows(box, first, "q");
    op.k = box_rows(box, first + 1, "k");
    op.v = box_rows(box, first + 2, "v");
    op.bias = box_optional_column(box, first + 4, "bias");
    op.mask = box_mask(box, first + 5);
    op.row_weights = box_optional_column(box, first + 6, "row_weights");
    return op;
}

static void attention(StableIValue *stack, uint64_t arguments, uint64_t results)
{
    muvox_box       box = box_open("attention", stack, 7);
    muvox_attention op = inputs(&box, 0, box_float(stack[7]));
    (void)arguments;
    (void)results;

    op.out = box_new_rows(&box, "out", true, op.v.dtype, op.v.cols);
    op.lse = box_new_column(&box, "lse", true, box_wide(op.q.dtype));
    box_close(&box, BOX_RUN(&box, attention_forward, &op));
}

static void attention_backward(StableIValue *stack, uint64_t arguments, uint64_t results)
{
    muvox_box         box = box_open("attention", stack, 11);
    muvox_attention   op = inputs(&box, 2, box_float(stack[11]));
    const int64_t     wanted = box_int(stack[12]);
    const muvox_dtype wide = box_wide(op.q.dtype);
    (void)arguments;
    (void)results;

    op.grad_out = box_rows(&box, 0, "grad_out");
    op.grad_lse = box_optional_column(&box, 1, "grad_lse");
    op.out = box_saved(box_rows(&box, 9, "out"));
    op.lse = box_saved(box_column(&box, 10, "lse"));
    op.grad_q = box_new_rows(&box, "grad_q", wanted & 1, op.q.dtype, op.q.cols);
    op.grad_k = box_new_rows(&box, "grad_k", wanted & 2, op.k.dtype, op.k.cols);
    op.grad_v = box_new_rows(&box, "grad_v", wanted & 4, op.v.dtype, op.v.cols);
    op.grad_bias = box_new_column(&box, "grad_bias", wanted & 8, wide);
    op.grad_row_weights = box_new_column(&box, "grad_row_weights", wanted & 16, wide);
    box_close(&box, BOX_RUN(&box, attention_backward, &op));
}

const box_operator attention_operators[2] = {
    BOX_OPERATOR(attention,
                 "(Tensor q, Tensor k, Tensor v, Tensor splits, Tensor bias, Tensor mask, Tensor row_weights,"
                 " float scale) -> (Tensor out, Tensor lse)"),
    BOX_OPERATOR(
        attention_backward,
        "(Tensor grad_out, Tensor grad_lse, Tensor q, Tensor k, Tensor v, Tensor splits, Tensor bias, Tensor mask,"
        " Tensor row_weights, Tensor out, Tensor lse, float scale, int wanted)"
        " -> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_bias, Tensor grad_row_weights)"),
};
