/* muvox::gravnet: see muvox/gravnet.h. */
#include "box.h"

static void gravnet(StableIValue *stack, uint64_t arguments, uint64_t results)
{
    muvox_box     box = box_open("gravnet", stack, 5);
    muvox_gravnet op = {.struct_size = sizeof op,
                        .k = box_int(stack[5]),
                        .scale = box_float(stack[6]),
                        .aggregates = box_aggregates(stack[7]),
                        .max_radius = box_float(stack[10])};
    const bool    save = box_bool(stack[11]);
    const int     blocks = box_blocks(op.aggregates), winners = box_winners(op.aggregates);
    (void)arguments;
    (void)results;

    op.options =
        box_option(stack[8], MUVOX_MEAN_BY_K) | box_option(stack[9], MUVOX_EXCLUDE_SELF) | box_radius(op.max_radius);
    op.sets = box_sets(&box, 2, "splits", 0, "coords");
    op.coords = box_rows(&box, 0, "coords");
    op.feats = box_rows(&box, 1, "feats");
    op.mask = box_mask(&box, 3);
    op.row_weights = box_optional_column(&box, 4, "row_weights");
    op.out = box_new_rows(&box, "out", true, op.feats.dtype, blocks * op.feats.cols);
    op.neighbours = box_new_rows(&box, "neighbours", save, MUVOX_I32, box_places(op.k));
    op.winners =
        box_new_rows(&box, "winners", save && winners, op.k <= 254 ? MUVOX_U8 : MUVOX_I32, winners * op.feats.cols);
    box_close(&box, BOX_RUN(&box, gravnet_forward, &op));
}

static void gravnet_backward(StableIValue *stack, uint64_t arguments, uint64_t results)
{
    muvox_box     box = box_open("gravnet", stack, 7);
    muvox_gravnet op = {.struct_size = sizeof op, .scale = box_float(stack[7]), .aggregates = box_aggregates(stack[8])};
    const int64_t wanted = box_int(stack[10]);
    (void)arguments;
    (void)results;

    op.options = box_option(stack[9], MUVOX_MEAN_BY_K);
    op.sets = box_sets(&box, 3, "splits", 1, "coords");
    op.grad_out = box_rows(&box, 0, "grad_out");
    op.coords = box_rows(&box, 1, "coords");
    op.feats = box_rows(&box, 2, "feats");
    op.row_weights = box_optional_column(&box, 4, "row_weights");
    if (box_has(&box, 5)) op.neighbours = box_saved(box_rows(&box, 5, "neighbours"));
    if (box_has(&box, 6)) op.winners = box_saved(box_rows(&box, 6, "winners"));
    op.k = op.neighbours.data ? op.neighbours.cols : 1; /* without neighbours the operator asks for them, not for k */
    op.grad_coords = box_new_rows(&box, "grad_coords", wanted & 1, op.coords.dtype, op.coords.cols);
    op.grad_feats = box_new_rows(&box, "grad_feats", wanted & 2, op.feats.dtype, op.feats.cols);
    op.grad_row_weights = box_new_column(&box, "grad_row_weights", wanted & 4, box_wide(op.feats.dtype));
    box_close(&box, BOX_RUN(&box, gravnet_backward, &op));
}

const box_operator gravnet_operators[2] = {
    BOX_OPERATOR(gravnet,
                 "(Tensor coords, Tensor feats, Tensor splits, Tensor mask, Tensor row_weights, int k,"
                 " float scale, int aggregates, bool mean_by_k, bool exclude_self, float max_radius, bool save)"
                 " -> (Tensor out, Tensor neighbours, Tensor winners)"),
    BOX_OPERATOR(gravnet_backward,
                 "(Tensor grad_out, Tensor coords, Tensor feats, Tensor splits, Tensor row_weights, Tensor neighbours,"
                 " Tensor winners, float scale, int aggregates, bool mean_by_k, int wanted)"
                 " -> (Tensor grad_coords, Tensor grad_feats, Tensor grad_row_weights)"),
};
