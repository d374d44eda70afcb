/* The search that knn and gravnet share: the k nearest rows of each query, in the order that muvox/knn.h defines. */
#ifndef MUVOX_CUDA_SEARCH_H
#define MUVOX_CUDA_SEARCH_H

#include "device.cuh"
#include "launch.cuh"

struct search_request {
    muvox_sets   sets, query_sets; /* the same unless MUVOX_QUERIES is set */
    muvox_matrix coords, queries, mask;
    int64_t      k;
    unsigned     options;
    double       max_radius;
    muvox_output neighbours, distance2, counts; /* by query_sets; each only if wanted */
};

/* order, unless it is null: the rows of coords as they were searched, see ordered_rows::rows, in what `hold` has;
 * NULL where they were not sorted. */
muvox_status search_neighbours(muvox_context *ctx, const char *op, const search_request &request, workspace *hold,
                               const int32_t **order);

#endif
