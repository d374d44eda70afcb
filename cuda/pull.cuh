/* The gradient of distances: row i is pulled from each of its neighbours j, and j the other way.
 *
 *     grad_queries[i] = Σ_r p[i,r] (x_i − x_j)      grad_coords[j] = −Σ p[i,r] (x_i − x_j) over the places that hold j
 *
 * and, where queries and coords are the same rows, the sum of both. Own places first, then the others, each ascending. */
#ifndef MUVOX_CUDA_PULL_H
#define MUVOX_CUDA_PULL_H

#include "reverse.cuh"

template <typename P> struct pull_arguments {
    muvox_sets      sets, query_sets;
    muvox_matrix    coords, queries;
    muvox_output    neighbours;
    muvox_matrix    pulls; /* (Q, k), p = factor · pulls; rows by query_sets */
    double          factor;
    reverse_list<P> list;
    muvox_output    grad;        /* of queries if only `own`, else of coords */
    bool            own, others; /* which of the sums */
};

/* One thread for each number of the gradient. */
template <typename R, typename P> __global__ void pull_rows(const pull_arguments<P> a)
{
    const int64_t     index = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, d = a.coords.cols;
    const int64_t     row = quotient(index, d), c = index - row * d;
    const muvox_sets &sets = a.others ? a.sets : a.query_sets; /* the gradient's */
    R                 sum = 0;

    if (row >= sets.rows) return;
    const int64_t s = set_of_row(sets, row), begin = set_begin(sets, s), i = row - begin;
    const int64_t begin_coords = set_begin(a.sets, s), begin_queries = set_begin(a.query_sets, s);

    if (i < 0 || row >= set_end(sets, s)) return; /* wrong splits leave it out */
    const int64_t  coords = row_at(a.coords, a.sets, begin_coords, s, 0) + c;
    const int64_t  queries = row_at(a.queries, a.query_sets, begin_queries, s, 0) + c;
    const R *const pulls = static_cast<const R *>(a.pulls.data) + row_at(a.pulls, a.query_sets, begin_queries, s, 0);
    if (a.own) {
        const R              x = load<R>(a.queries.data, a.queries.dtype, queries + i * a.queries.row_stride);
        const int64_t        M = set_end(a.sets, s) - begin_coords;
        const int32_t *const near = static_cast<const int32_t *>(a.neighbours.data) +
                                    row_at(a.neighbours, a.query_sets, begin_queries, s, i);

        for (int64_t r = 0; r < a.pulls.cols; r++) {
            const int64_t j = near[r];

            if (j < 0 || j >= M) continue;
            sum += pulls[i * a.pulls.row_stride + r] *
                   (x - load<R>(a.coords.data, a.coords.dtype, coords + j * a.coords.row_stride));
        }
    }
    if (a.others) {
        const R       x = load<R>(a.coords.data, a.coords.dtype, coords + i * a.coords.row_stride);
        const int64_t end = a.list.begins[row + 1];

        for (int64_t e = a.list.begins[row]; e < end; e++) {
            const int64_t by = a.list.row(e) - begin_queries;

            sum -= pulls[by * a.pulls.row_stride + a.list.rank(e)] *
                   (load<R>(a.queries.data, a.queries.dtype, queries + by * a.queries.row_stride) - x);
        }
    }
    store<R>(a.grad.data, a.grad.dtype, row_at(a.grad, sets, begin, s, i) + c, (R)a.factor * sum);
}

template <typename R, typename P>
muvox_status launch_pull(muvox_context *ctx, const char *op_name, const pull_arguments<P> &a)
{
    const int64_t count = (a.others ? a.sets.rows : a.query_sets.rows) * a.coords.cols;

    if (!a.grad.data || !count) return MUVOX_OK;
    FORWARD(check_grid(ctx, op_name, (count + 255) / 256));
    pull_rows<R, P><<<blocks_for(count, 256), 256, 0, stream_of(ctx)>>>(a);
    LAUNCHED();
    return MUVOX_OK;
}

#endif
