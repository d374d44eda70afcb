/* The plain kernels: loops that read like the formulas of the headers, in double, one thread, no workspace. */
#ifndef MUVOX_OPS_REFERENCE_H
#define MUVOX_OPS_REFERENCE_H

#include "convert.h"
#include "sets.h"

#include "muvox/muvox.h"

/* Column c of row i of set s: read from an input or from what forward saved, and written if it is wanted. */
#define IN(name, s, i, c) element(op->name.data, op->name.dtype, ROW(&op->name, &op->sets, s, i) + (c))
#define OUT(name, s, i, c, value)                                                                                      \
    do {                                                                                                               \
        if (op->name.data)                                                                                             \
            set_element(op->name.data, op->name.dtype, ROW(&op->name, &op->sets, s, i) + (c), value);                  \
    } while (0)

muvox_status knn_forward_reference(muvox_context *ctx, const muvox_knn *op);
muvox_status knn_backward_reference(muvox_context *ctx, const muvox_knn *op);
muvox_status aggregate_forward_reference(muvox_context *ctx, const muvox_aggregate *op);
muvox_status aggregate_backward_reference(muvox_context *ctx, const muvox_aggregate *op);
muvox_status gravnet_forward_reference(muvox_context *ctx, const muvox_gravnet *op);
muvox_status gravnet_backward_reference(muvox_context *ctx, const muvox_gravnet *op);
muvox_status attention_forward_reference(muvox_context *ctx, const muvox_attention *op);
muvox_status attention_backward_reference(muvox_context *ctx, const muvox_attention *op);
muvox_status pool_forward_reference(muvox_context *ctx, const muvox_pool *op);
muvox_status pool_backward_reference(muvox_context *ctx, const muvox_pool *op);

#endif
