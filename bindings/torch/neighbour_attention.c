/* muvox::neighbour_attention: see muvox/neighbour_attention.h. Biases are (1, width). */
#include "box.h"

/* The tensors that forward and backward both take, from coords at place `first` to bias_out nine places later. */
static void read_inputs(muvox_box *box, muvox_neighbour_attention *op, int first, int splits)
{
    op->sets = box_sets(box, splits, "splits", first, "coords");
    op->coords = box_rows(box, first, "coords");
    op->feats = box_rows(box, first + 1, "feats");
    op->q = box_rows(box, first + 2, "q");
    op->k = box_rows(box, first + 3, "k");
    op->v = box_rows(box, first + 4, "v");
    if (op->offset || box_has(box, first + 5)) op->o = box_rows(box, first + 5, "o");
    op->bias_q = box_table(box, first + 6, "bias_q");
    op->bias_k = box_table(box, first + 7, "bias_k");
    op->bias_v = box_table(box, first + 8, "bias_v");
    op->bias_out = box_table(box, first + 9, "bias_out");
}

/* A number that the operator refuses, if it does not fit. */
static muvox_activation activation_of(StableIValue value)
{
    return (muvox_activation)(value > MUVOX_MISH ? MUVOX_MISH + 1 : (int)value);
}

static void neighbour_attention(StableIValue *stack, uint64_t arguments, uint64_t results)
{
    muvox_box                 box = box_open("neighbour_attention", stack, 12);
    muvox_neighbour_attention op = {.struct_size = sizeof op,
                                    .neighbours_k = box_int(stack[12]),
                                    .scale = box_float(stack[13]),
                                    .aggregates = box_aggregates(stack[14]),
                                    .activation = activation_of(stack[15]),
                                    .offset = box_bool(stack[16])};
    const bool                save = box_bool(stack[17]);
    const int                 blocks = box_blocks(op.aggregates), winners = box_winners(op.aggregates);
    (void)arguments;
    (void)results;

    read_inputs(&box, &op, 0, 10);
    op.mask = box_mask(&box, 11);
    op.out = box_new_rows(&box, "out", true, op.feats.dtype, blocks * op.feats.cols);
    op.neighbours = box_new_rows(&box, "neighbours", save, MUVOX_I32, box_places(op.neighbours_k));
    op.winners = box_new_rows(&box, "winners", save && winners, op.neighbours_k <= 254 ? MUVOX_U8 : MUVOX_I32,
                              winners * op.feats.cols);
    box_close(&box, BOX_RUN(&box, neighbour_attention_forward, &op));
}

static void neighbour_attention_backward(StableIValue *stack, uint64_t arguments, uint64_t results)
{
    muvox_box                 box = box_open("neighbour_attention", stack, 14);
    muvox_neighbour_attention op = {.struct_size = sizeof op,
                                    .scale = box_float(stack[14]),
                                    .aggregates = box_aggregates(stack[15]),
                                    .activation = activation_of(stack[16]),
                                    .offset = box_bool(stack[17])};
    const int64_t             wanted = box_int(stack[18]);
    (void)arguments;
    (void)results;

    read_inputs(&box, &op, 1, 11);
    op.grad_out = box_rows(&box, 0, "grad_out");
    if (box_has(&box, 12)) op.neighbours = box_saved(box_rows(&box, 12, "neighbours"));
    if (box_has(&box, 13)) op.winners = box_saved(box_rows(&box, 13, "winners"));
    op.neighbours_k =
        op.neighbours.data ? op.neighbours.cols : 1; /* without them the operator asks for them, not for k */
    const int64_t     A = op.q.cols, F = op.feats.cols;
    const muvox_dtype dtype = op.feats.dtype, wide = box_wide(dtype);

    op.grad_coords = box_new_rows(&box, "grad_coords", wanted & 1, op.coords.dtype, op.coords.cols);
    op.grad_feats = box_new_rows(&box, "grad_feats", wanted & 1 << 1, dtype, F);
    op.grad_q = box_new_rows(&box, "grad_q", wanted & 1 << 2, dtype, A);
    op.grad_k = box_new_rows(&box, "grad_k", wanted & 1 << 3, dtype, A);
    op.grad_v = box_new_rows(&box, "grad_v", wanted & 1 << 4, dtype, F);
    op.grad_o = box_new_rows(&box, "grad_o", wanted & 1 << 5, dtype, F);
    op.grad_bias_q = box_new_table(&box, "grad_bias_q", wanted & 1 << 6, wide, 1, A);
    op.grad_bias_k = box_new_table(&box, "grad_bias_k", wanted & 1 << 7, wide, 1, A);
    op.grad_bias_v = box_new_table(&box, "grad_bias_v", wanted & 1 << 8, wide, 1, F);
    op.grad_bias_out = box_new_table(&box, "grad_bias_out", wanted & 1 << 9, wide, 1, F);
    box_close(&box, BOX_RUN(&box, neighbour_attention_backward, &op));
}

const box_operator neighbour_attention_operators[2] = {
    BOX_OPERATOR(neighbour_attention,
                 "(Tensor coords, Tensor feats, Tensor q, Tensor k, Tensor v, Tensor o, Tensor bias_q, Tensor bias_k,"
                 " Tensor bias_v, Tensor bias_out, Tensor splits, Tensor mask, int neighbours_k, float scale,"
                 " int aggregates, int activation, bool offset, bool save)"
                 " -> (Tensor out, Tensor neighbours, Tensor winners)"),
    BOX_OPERATOR(neighbour_attention_backward,
                 "(Tensor grad_out, Tensor coords, Tensor feats, Tensor q, Tensor k, Tensor v, Tensor o, Tensor bias_q,"
                 " Tensor bias_k, Tensor bias_v, Tensor bias_out, Tensor splits, Tensor neighbours, Tensor winners,"
                 " float scale, int aggregates, int activation, bool offset, int wanted)"
                 " -> (Tensor grad_coords, Tensor grad_feats, Tensor grad_q, Tensor grad_k, Tensor grad_v,"
                 " Tensor grad_o, Tensor grad_bias_q, Tensor grad_bias_k, Tensor grad_bias_v, Tensor grad_bias_out)"),
};
