/* The gradient of distances: row i is pulled from each of its neighbours j, and j the other way.
 *
 *     grad_queries[i] = Σ_r p[i,r] (x_i − x_j)      grad_coords[j] = −Σ p[i,r] (x_i − x_j) over the places that hold j
 *
 * and, where queries and coords are the same rows, the sum of both. Own places first, then the others, each ascending. */
#ifndef MUVOX_CUDA_PULL_H
#define MUVOX_CUDA_PULL_H

#include "reverse.cuh"

/* What `pulls` needs to know: rows, and where p comes from: p(i, r, at) for rank r of row i of all, whose set and number
 * within it are at hand. */
template <typename P, typename F> struct pull_arguments {
    muvox_sets      sets, query_sets;
    muvox_matrix    coords, queries;
    muvox_output    neighbours;
    reverse_list<P> list;
    muvox_output    grad;  /* of queries if `own`, of coords if `others`, of both in one */
    bool            own, others;
    F               p;
};

/* One thread for each number of the gradient. */
template <typename R, typename P, typename F> __global__ void pull_rows(const pull_arguments<P, F> a)
{
    const int64_t     index = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, d = a.coords.cols, row = index / d, c = index % d;
    const muvox_sets &sets = a.others ? a.sets : a.query_sets; /* the gradient's */
    R                 sum = 0;

    if (row >= sets.rows) return;
    const int64_t s = set_of_row(sets, row), begin = set_begin(sets, s), i = row - begin;
    const int64_t others_begin = set_begin(a.sets, s), queries_begin = set_begin(a.query_sets, s);

    if (i < 0 || row >= set_end(sets, s)) return; /* splits leave it out */
    if (a.own) {
        const int32_t *const near = static_cast<const int32_t *>(a.neighbours.data) +
                                    row_at(a.neighbours, a.query_sets, queries_begin, s, i);
        const R              x = load<R>(a.queries.data, a.queries.dtype, row_at(a.queries, a.query_sets, queries_begin, s, i) + c);
        const int64_t        M = set_end(a.sets, s) - others_begin;

        for (int64_t r = 0; r < a.list.k; r++) {
            const int64_t j = near[r];

            if (j < 0 || j >= M) continue;
            const R other = load<R>(a.coords.data, a.coords.dtype, row_at(a.coords, a.sets, others_begin, s, j) + c);

            sum += a.p(row, s, i, r, j) * (x - other);
        }
    }
    if (a.others) {
        const R x = load<R>(a.coords.data, a.coords.dtype, row_at(a.coords, a.sets, others_begin, s, i) + c);

        for (int64_t e = a.list.begins[row]; e < a.list.begins[row + 1]; e++) {
            const int64_t place = (int64_t)a.list.places[e], by = place / a.list.k, r = place - by * a.list.k;
            const R       other = load<R>(a.queries.data, a.queries.dtype, row_at(a.queries, a.query_sets, queries_begin, s, by - queries_begin) + c);

            sum -= a.p(by, s, by - queries_begin, r, i) * (other - x);
        }
    }
    store<R>(a.grad.data, a.grad.dtype, row_at(a.grad, sets, begin, s, i) + c, sum);
}

template <typename R, typename P, typename F>
muvox_status launch_pull(muvox_context *ctx, const char *op_name, const pull_arguments<P, F> &a)
{
    const int64_t count = (a.others ? a.sets.rows : a.query_sets.rows) * a.coords.cols;

    if (!a.grad.data || !count) return MUVOX_OK;
    FORWARD(check_grid(ctx, op_name, (count + 255) / 256));
    pull_rows<R><<<blocks_for(count, 256), 256, 0, stream_of(ctx)>>>(a);
    LAUNCHED();
    return MUVOX_OK;
}

#endif
