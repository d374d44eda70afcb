/* knn on the device: see muvox/knn.h. The search itself is in search.cu. */
#include "muvox/knn.h"

#include "../ops/checks.h"
#include "pull.cuh"
#include "search.cuh"

/* Rows that look for neighbours. */
static void queries_of(const muvox_knn *op, muvox_sets *sets, muvox_matrix *queries)
{
    const bool cross = op->options & MUVOX_QUERIES;

    *sets = cross ? op->query_sets : op->sets;
    *queries = cross ? op->queries : op->coords;
}

extern "C" muvox_status muvox_knn_forward_cuda(muvox_context *ctx, const muvox_knn *op)
{
    search_request request = {
        op->sets,      {},        op->coords, {}, op->mask, op->k, op->options, op->max_radius, op->neighbours,
        op->distance2, op->counts};

    FORWARD(check_knn_forward(ctx, op));
    const device_call call(ctx, "knn");
    workspace         hold(ctx);
    FORWARD(call.status);
    FORWARD(check_splits_on_device(ctx, "knn", "splits", &op->sets));
    if (op->options & MUVOX_QUERIES) FORWARD(check_splits_on_device(ctx, "knn", "query_splits", &op->query_sets));
    queries_of(op, &request.query_sets, &request.queries);
    return search_neighbours(ctx, "knn", request, &hold, nullptr);
}

template <typename R> static muvox_status backward(muvox_context *ctx, const muvox_knn *op)
{
    const bool   cross = op->options & MUVOX_QUERIES;
    muvox_sets   query_sets;
    muvox_matrix queries;

    queries_of(op, &query_sets, &queries);
    return with_places(query_sets.rows, op->k, [&](auto place) {
        using P = decltype(place);
        pull_arguments<P> a = {op->sets, query_sets, op->coords, queries,         op->neighbours, op->grad_distance2,
                               2,        nullptr,    {},         op->grad_coords, !cross,         true};
        workspace         hold(ctx);

        if (op->grad_coords.data) {
            FORWARD(reverse_neighbours<P>(ctx, "knn", op->sets, query_sets, op->neighbours, op->k, &hold, &a.list));
            FORWARD(launch_pull<R>(ctx, "knn", a));
        }
        a.grad = op->grad_queries;
        a.own = true;
        a.others = false;
        return cross ? launch_pull<R>(ctx, "knn", a) : MUVOX_OK;
    });
}

extern "C" muvox_status muvox_knn_backward_cuda(muvox_context *ctx, const muvox_knn *op)
{
    FORWARD(check_knn_backward(ctx, op));
    const device_call call(ctx, "knn");
    FORWARD(call.status);
    FORWARD(check_splits_on_device(ctx, "knn", "splits", &op->sets));
    if (op->options & MUVOX_QUERIES) FORWARD(check_splits_on_device(ctx, "knn", "query_splits", &op->query_sets));
    return op->coords.dtype == MUVOX_F64 ? backward<double>(ctx, op) : backward<float>(ctx, op);
}
