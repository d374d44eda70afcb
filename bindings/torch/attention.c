/* muvox::attention: see muvox/attention.h. */
#include "box.h"

static void attention(StableIValue *stack, uint64_t arguments, uint64_t results)
{
    muvox_box       box = box_open("attention", stack, 4);
    muvox_attention op = {.struct_size = sizeof op, .scale = box_float(stack[4])};
    (void)arguments;
    (void)results;

    box_sets(&box, 3, 0, "q");
    op.sets = box.sets;
    op.q = box_rows(&box, 0, "q");
    op.k = box_rows(&box, 1, "k");
    op.v = box_rows(&box, 2, "v");
    op.out = box_new_rows(&box, "out", true, op.v.dtype, op.v.cols);
    op.lse = box_new_column(&box, "lse", true, op.q.dtype == MUVOX_F64 ? MUVOX_F64 : MUVOX_F32);
    box_close(&box, BOX_RUN(&box, muvox_attention_forward(&box.ctx, &op)));
}

static void attention_backward(StableIValue *stack, uint64_t arguments, uint64_t results)
{
    muvox_box       box = box_open("attention", stack, 8);
    muvox_attention op = {.struct_size = sizeof op, .scale = box_float(stack[8])};
    const int64_t   wanted = box_int(stack[9]);
    (void)arguments;
    (void)results;

    box_sets(&box, 5, 2, "q");
    op.sets = box.sets;
    op.grad_out = box_rows(&box, 0, "grad_out");
    if (box_has(&box, 1)) op.grad_lse = box_column(&box, 1, "grad_lse");
    op.q = box_rows(&box, 2, "q");
    op.k = box_rows(&box, 3, "k");
    op.v = box_rows(&box, 4, "v");
    op.out = box_saved(box_rows(&box, 6, "out"));
    op.lse = box_saved(box_column(&box, 7, "lse"));
    op.grad_q = box_new_rows(&box, "grad_q", wanted & 1, op.q.dtype, op.q.cols);
    op.grad_k = box_new_rows(&box, "grad_k", wanted & 2, op.k.dtype, op.k.cols);
    op.grad_v = box_new_rows(&box, "grad_v", wanted & 4, op.v.dtype, op.v.cols);
    box_close(&box, BOX_RUN(&box, muvox_attention_backward(&box.ctx, &op)));
}

const box_operator attention_operators[2] = {
    BOX_OPERATOR(attention, "(Tensor q, Tensor k, Tensor v, Tensor splits, float scale) -> (Tensor out, Tensor lse)"),
    BOX_OPERATOR(
        attention_backward,
        "(Tensor grad_out, Tensor grad_lse, Tensor q, Tensor k, Tensor v, Tensor splits, Tensor out, Tensor lse,"
        " float scale, int wanted) -> (Tensor grad_q, Tensor grad_k, Tensor grad_v)"),
};
