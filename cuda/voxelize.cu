/* voxelize on the device: see muvox/voxelize.h. Points are sorted by voxel, then every voxel sums its own in order.
 * A group of lanes takes a voxel or some points, each lane a vector of channels, and reads several rows at a time. */
#include "muvox/voxelize.h"

#include "../ops/checks.h"
#include "table.cuh"
#include "vectors.cuh"

enum { BLOCK = 256, AHEAD = 4 };

template <typename T, int V, typename P>
static __global__ void __launch_bounds__(BLOCK, 4) average(muvox_voxelize op, reverse_list<P> list, int bits)
{
    using R = wide_t<T>;
    const lane_group group(bits);
    const int64_t    s = group.number, C = op.feats.cols;

    if (s >= op.counts.rows) return;
    const int64_t begin = list.begins[s], found = list.begins[s + 1] - begin;
    const int64_t count = op.histogram.data ? found : integer_at(op.counts, s * op.counts.row_stride);
    const int64_t end = count > 0 ? begin + found : begin;
    const R       divisor = count > 0 ? (R)count : (R)1;

    if (op.histogram.data && group.lane == 0)
        static_cast<int64_t *>(op.histogram.data)[s * op.histogram.row_stride] = count;
    for (int64_t c = group.lane * V; op.out.data && c < C; c += group.lanes * V) {
        R sum[V] = {};

        for (int64_t e = begin; e < end; e += AHEAD) {
            elements<T, V> x[AHEAD];
            int64_t        row[AHEAD];

#pragma unroll
            for (int j = 0; j < AHEAD; j++) row[j] = e + j < end ? list.row(e + j) : -1;
            read_rows<V>(op.feats, row, c, x);
#pragma unroll
            for (int j = 0; j < AHEAD; j++)
#pragma unroll
                for (int v = 0; v < V; v++) sum[v] += widen(x[j].at[v]);
        }
#pragma unroll
        for (int v = 0; v < V; v++) sum[v] /= divisor;
        write<V>(static_cast<T *>(op.out.data) + s * op.out.row_stride + c, sum);
    }
}

extern "C" muvox_status muvox_voxelize_forward_cuda(muvox_context *ctx, const muvox_voxelize *op)
{
    const char *const op_name = "voxelize";
    const int64_t     N = op->feats.rows, S = op->counts.rows, C = op->feats.cols;

    FORWARD(check_voxelize_forward(ctx, op));
    const device_call call(ctx, op_name);
    FORWARD(call.status);
    if (!S || (!op->out.data && !op->histogram.data)) return MUVOX_OK;
    return with_places(N, 1, [&](auto place) {
        using P = decltype(place);
        reverse_list<P> list = {};
        workspace       hold(ctx);

        FORWARD(reverse_index<P>(ctx, op_name, S, op->index, &hold, &list));
        return with_dtype(op->feats.dtype, [&](auto element) {
            using T = decltype(element);
            return with_vectors<T>(
                [&](auto width) -> muvox_status {
                    constexpr int V = decltype(width)::value;
                    const int     bits = lane_bits(C / V);

                    FORWARD(check_grid(ctx, op_name, (S << bits) / BLOCK + 1));
                    average<T, V><<<blocks_for(S << bits, BLOCK), BLOCK, 0, stream_of(ctx)>>>(*op, list, bits);
                    LAUNCHED();
                    return MUVOX_OK;
                },
                op->feats, op->out);
        });
    });
}

/* A group takes AHEAD points of its block, one of each round, so that a block writes its rows in turn. */
template <typename T, int V> static __global__ void __launch_bounds__(BLOCK, 4) spread(muvox_voxelize op, int bits)
{
    using R = wide_t<T>;
    constexpr bool   SHORT = sizeof(T) == 2; /* what a product with 1 / count loses is far below its last digit */
    const lane_group group(bits);
    const int64_t    C = op.feats.cols, groups = BLOCK >> bits;
    const int64_t    first = blockIdx.x * groups * AHEAD + (threadIdx.x >> bits);
    int64_t          at[AHEAD], voxel[AHEAD], count[AHEAD];
    R                factor[AHEAD]; /* 0: the point is skipped */

#pragma unroll
    for (int j = 0; j < AHEAD; j++)
        at[j] = first + j * groups < op.feats.rows ? (first + j * groups) * op.index.row_stride : -1;
    integers_at(op.index, at, voxel);
#pragma unroll
    for (int j = 0; j < AHEAD; j++) {
        if (voxel[j] >= op.counts.rows) voxel[j] = -1;
        at[j] = voxel[j] < 0 ? -1 : voxel[j] * op.counts.row_stride;
    }
    integers_at(op.counts, at, count);
#pragma unroll
    for (int j = 0; j < AHEAD; j++) factor[j] = count[j] <= 0 ? (R)0 : SHORT ? (R)1 / (R)count[j] : (R)count[j];
    for (int64_t c = group.lane * V; c < C; c += group.lanes * V) {
        elements<T, V> g[AHEAD];

        read_rows<V>(op.grad_out, voxel, c, g);
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            const int64_t n = first + j * groups;
            R             dx[V];

            if (n >= op.feats.rows) break;
#pragma unroll
            for (int v = 0; v < V; v++) {
                const R x = widen(g[j].at[v]);

                dx[v] = factor[j] == 0 ? (R)0 : SHORT ? x * factor[j] : x / factor[j];
            }
            write<V>(static_cast<T *>(op.grad_feats.data) + n * op.grad_feats.row_stride + c, dx);
        }
    }
}

extern "C" muvox_status muvox_voxelize_backward_cuda(muvox_context *ctx, const muvox_voxelize *op)
{
    const char *const op_name = "voxelize";
    const int64_t     N = op->feats.rows, C = op->feats.cols;

    FORWARD(check_voxelize_backward(ctx, op));
    const device_call call(ctx, op_name);
    FORWARD(call.status);
    if (!N || !op->grad_feats.data) return MUVOX_OK;
    return with_dtype(op->feats.dtype, [&](auto element) {
        using T = decltype(element);
        return with_vectors<T>(
            [&](auto width) -> muvox_status {
                constexpr int V = decltype(width)::value;
                const int     bits = lane_bits(C / V);

                FORWARD(check_grid(ctx, op_name, (N << bits) / (BLOCK * AHEAD) + 1));
                spread<T, V><<<blocks_for(N << bits, BLOCK * AHEAD), BLOCK, 0, stream_of(ctx)>>>(*op, bits);
                LAUNCHED();
                return MUVOX_OK;
            },
            op->grad_out, op->grad_feats);
    });
}
