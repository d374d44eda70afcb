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
        if (op->name.data) set_element(op->name.data, op->name.dtype, ROW(&op->name, &op->sets, s, i) + (c), value);   \
    } while (0)

/* |a − b|² of a row of each, in float (double for double), as knn.h defines it. */
double squared_distance_reference(const muvox_matrix *a, int64_t at_a, const muvox_matrix *b, int64_t at_b);

/* One query and the set it searches. */
typedef struct {
    unsigned            options;
    double              max_radius;
    const muvox_matrix *coords, *queries, *mask;
    const muvox_sets   *sets;
    int64_t             set, query_at; /* where the query's row begins */
    int64_t             self;          /* the row to leave out, or −1 */
} muvox_search_reference;

/* The row that comes after `last` (−1: before all) among the neighbours of the query, −1 after the last one. */
int64_t next_nearest_reference(const muvox_search_reference *search, int64_t last);

/* The neighbours of one row and their weights; rows[r] = −1 is no neighbour. */
typedef struct {
    int64_t        k;
    const int64_t *rows;
    const double  *weights;
    bool           mean_by_k; /* the mean divides by k, not by their number */
} muvox_neighbourhood;

/* One output of aggregate.h: feature f of the aggregate `kind` for a row of set s, and the rank that won it, or −1. */
double aggregate_reference(muvox_aggregate_kind kind, const muvox_matrix *feats, const muvox_sets *sets, int64_t s,
                           int64_t f, const muvox_neighbourhood *around, int64_t *winner);

/* All outputs of aggregate.h for row i of set s, and their winners, each if it is wanted. */
void store_aggregates_reference(muvox_aggregates aggregates, const muvox_matrix *feats, const muvox_output *out,
                                const muvox_output *winners, const muvox_sets *sets, int64_t s, int64_t i,
                                const muvox_neighbourhood *around);

/* dm[r,f] of aggregate.h for row i of set s. */
double dm_reference(muvox_aggregates aggregates, const muvox_matrix *grad_out, const muvox_output *winners,
                    const muvox_matrix *feats, const muvox_sets *sets, int64_t s, int64_t i, int64_t f, int64_t r,
                    const muvox_neighbourhood *around);

/* A saved rank, whose "none" is 255 in a byte and −1 in 32 bits. */
int64_t rank_element(const muvox_output *winners, int64_t at);
void    set_rank(const muvox_output *winners, int64_t at, int64_t rank);

/* The same for outputs that lie by other sets than op->sets. */
#define OUT_AT(name, at, value)                                                                                        \
    do {                                                                                                               \
        if (op->name.data) set_element(op->name.data, op->name.dtype, at, value);                                      \
    } while (0)

muvox_status knn_forward_reference(muvox_context *ctx, const muvox_knn *op);
muvox_status knn_backward_reference(muvox_context *ctx, const muvox_knn *op);
muvox_status aggregate_forward_reference(muvox_context *ctx, const muvox_aggregate *op);
muvox_status aggregate_backward_reference(muvox_context *ctx, const muvox_aggregate *op);
muvox_status gravnet_forward_reference(muvox_context *ctx, const muvox_gravnet *op);
muvox_status gravnet_backward_reference(muvox_context *ctx, const muvox_gravnet *op);
muvox_status attention_forward_reference(muvox_context *ctx, const muvox_attention *op);
muvox_status attention_backward_reference(muvox_context *ctx, const muvox_attention *op);
muvox_status offset_attention_forward_reference(muvox_context *ctx, const muvox_offset_attention *op);
muvox_status offset_attention_backward_reference(muvox_context *ctx, const muvox_offset_attention *op);
muvox_status neighbour_attention_forward_reference(muvox_context *ctx, const muvox_neighbour_attention *op);
muvox_status neighbour_attention_backward_reference(muvox_context *ctx, const muvox_neighbour_attention *op);
muvox_status pool_forward_reference(muvox_context *ctx, const muvox_pool *op);
muvox_status pool_backward_reference(muvox_context *ctx, const muvox_pool *op);
muvox_status voxelize_forward_reference(muvox_context *ctx, const muvox_voxelize *op);
muvox_status voxelize_backward_reference(muvox_context *ctx, const muvox_voxelize *op);
muvox_status devoxelize_forward_reference(muvox_context *ctx, const muvox_devoxelize *op);
muvox_status devoxelize_backward_reference(muvox_context *ctx, const muvox_devoxelize *op);
muvox_status trilinear_weights_forward_reference(muvox_context *ctx, const muvox_trilinear_weights *op);
muvox_status trilinear_weights_backward_reference(muvox_context *ctx, const muvox_trilinear_weights *op);

#endif
