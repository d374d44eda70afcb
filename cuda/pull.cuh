/* The gradient of distances: row i is pulled from each of its neighbours j, and j the other way.
 *
 *     grad_queries[i] = Σ_r p[i,r] (x_i − x_j)      grad_coords[j] = −Σ p[i,r] (x_i − x_j) over the places that hold j
 *
 * and, where queries and coords are the same rows, the sum of both. Own places first, then the others, each
 * ascending. Pulls of places without neighbour are not read. */
#ifndef MUVOX_CUDA_PULL_H
#define MUVOX_CUDA_PULL_H

#include "reverse.cuh"

#include <type_traits>

template <typename P> struct pull_arguments {
    muvox_sets      sets, query_sets;
    muvox_matrix    coords, queries;
    muvox_output    neighbours;
    muvox_matrix    pulls; /* (Q, k), p = factor · pulls; rows by query_sets */
    double          factor;
    const int32_t  *order; /* of the gradient's rows, as in aggregate.cuh */
    reverse_list<P> list;
    muvox_output    grad;            /* of queries if only `own`, else of coords */
    bool            own, others;     /* which of the sums */
    const void     *added = nullptr; /* (rows, d) in R, rows as of the gradient: added to the sums */
};

/* One thread for each number of the gradient. T: of coords and queries. */
template <typename R, typename T, typename P> __global__ void pull_rows(const pull_arguments<P> a)
{
    const int         d = (int)a.coords.cols;
    const int64_t     index = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, place = quotient(index, d);
    const int         c = (int)(index - place * d), k = (int)a.pulls.cols;
    const muvox_sets &sets = a.others ? a.sets : a.query_sets; /* the gradient's */
    R                 sum = 0;

    if (place >= sets.rows) return;
    const int64_t s = set_of_row(sets, place), begin = set_begin(sets, s);
    const int64_t begin_coords = set_begin(a.sets, s), begin_queries = set_begin(a.query_sets, s);
    const int     M = (int)(set_end(a.sets, s) - begin_coords);

    if (place < begin || place >= set_end(sets, s)) return; /* wrong splits leave it out */
    const int               i = ordered_row(a.order, place, begin, set_end(sets, s) - begin);
    const set_rows<const T> coords(a.coords, a.sets, begin_coords, s),
        queries(a.queries, a.query_sets, begin_queries, s);
    const set_rows<const R> pulls(a.pulls, a.query_sets, begin_queries, s);
    if (a.own) {
        const R              x = widen(queries[i][c]);
        const R *const       p = pulls[i];
        const int32_t *const near = set_rows<const int32_t>(a.neighbours, a.query_sets, begin_queries, s)[i];

#pragma unroll 4
        for (int r = 0; r < k; r++) {
            const int j = __ldg(near + r);

            if ((unsigned)j < (unsigned)M) sum += __ldg(p + r) * (x - widen(__ldg(coords[j] + c)));
        }
    }
    if (a.others) {
        const R       x = widen(coords[i][c]);
        const int64_t end = a.list.ends[begin + i];

        for (int64_t e = a.list.begins[begin + i]; e < end; e++) {
            const int by = (int)(a.list.row(e) - begin_queries);

            sum -= pulls[by][a.list.rank(e)] * (widen(queries[by][c]) - x);
        }
    }
    if (a.added) sum += static_cast<const R *>(a.added)[(begin + i) * d + c];
    store<R>(a.grad.data, a.grad.dtype, row_at(a.grad, sets, begin, s, i) + c, (R)a.factor * sum);
}

template <typename R, typename P>
muvox_status launch_pull(muvox_context *ctx, const char *op_name, const pull_arguments<P> &a)
{
    const int64_t count = (a.others ? a.sets.rows : a.query_sets.rows) * a.coords.cols;

    if (!a.grad.data || !count) return MUVOX_OK;
    FORWARD(check_grid(ctx, op_name, (count + 255) / 256));
    FORWARD(check_row_stride(ctx, op_name, "coords", a.coords.row_stride));
    FORWARD(check_row_stride(ctx, op_name, "queries", a.queries.row_stride));
    FORWARD(check_row_stride(ctx, op_name, "neighbours", a.neighbours.row_stride));
    FORWARD(check_row_stride(ctx, op_name, "the gradient of distances", a.pulls.row_stride));
    return with_dtype(a.coords.dtype, [&](auto element) -> muvox_status {
        using T = decltype(element);

        if constexpr (std::is_same<wide_t<T>, R>::value) {
            pull_rows<R, T><<<blocks_for(count, 256), 256, 0, stream_of(ctx)>>>(a);
            LAUNCHED();
        }
        return MUVOX_OK;
    });
}

#endif
