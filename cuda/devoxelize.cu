/* devoxelize on the device: see muvox/devoxelize.h. A group of lanes takes a point or a voxel, each lane a vector of
 * channels, and reads several places at a time, so that their loads wait together. */
#include "muvox/devoxelize.h"

#include "../ops/checks.h"
#include "table.cuh"
#include "vectors.cuh"

enum { BLOCK = 256, AHEAD = 4 };

/* The voxels of AHEAD places of point n from k on; below 0: none. */
static __device__ __forceinline__ void voxels_of(const muvox_devoxelize &op, int64_t n, int64_t k,
                                                 int64_t (&row)[AHEAD])
{
    int64_t at[AHEAD];

#pragma unroll
    for (int j = 0; j < AHEAD; j++) at[j] = k + j < op.index.cols ? n * op.index.row_stride + k + j : -1;
    integers_at(op.index, at, row);
#pragma unroll
    for (int j = 0; j < AHEAD; j++) row[j] = row[j] < op.feats.rows ? row[j] : -1;
}

/* Weights as they lie in memory: made numbers of only when they are needed, so that nothing waits for them before. */
template <typename R> struct raw_weight {
    uint32_t                        bits;
    __device__ __forceinline__ void read(const muvox_matrix &weights, int64_t at)
    {
        bits = weights.dtype == MUVOX_F32 ? static_cast<const uint32_t *>(weights.data)[at]
                                          : static_cast<const uint16_t *>(weights.data)[at];
    }
    __device__ __forceinline__ float number(const muvox_matrix &weights) const
    {
        if (weights.dtype == MUVOX_F16) return __half2float(__ushort_as_half((uint16_t)bits));
        return __uint_as_float(weights.dtype == MUVOX_F32 ? bits : bits << 16);
    }
};

template <> struct raw_weight<double> {
    double                          value;
    __device__ __forceinline__ void read(const muvox_matrix &weights, int64_t at)
    {
        value = static_cast<const double *>(weights.data)[at];
    }
    __device__ __forceinline__ double number(const muvox_matrix &) const
    {
        return value;
    }
};

/* sum += Σ weight · row, V channels from c on; `at`: where the weights stand. A place without a row adds 0 · 0. */
template <int V, typename T>
static __device__ __forceinline__ void add_rows(const muvox_matrix &table, const muvox_matrix &weights, int64_t c,
                                                const int64_t (&row)[AHEAD], const int64_t (&at)[AHEAD],
                                                wide_t<T> (&sum)[V])
{
    elements<T, V>        x[AHEAD];
    raw_weight<wide_t<T>> raw[AHEAD];

#pragma unroll
    for (int j = 0; j < AHEAD; j++) raw[j].read(weights, at[j]);
    read_rows<V>(table, row, c, x);
#pragma unroll
    for (int j = 0; j < AHEAD; j++) {
        const wide_t<T> weight = row[j] < 0 ? (wide_t<T>)0 : raw[j].number(weights);

#pragma unroll
        for (int v = 0; v < V; v++) sum[v] += weight * widen(x[j].at[v]);
    }
}

template <typename T, int V>
static __global__ void __launch_bounds__(BLOCK, 4) read_voxels(muvox_devoxelize op, int bits)
{
    using R = wide_t<T>;
    const lane_group group(bits);
    const int64_t    n = group.number, C = op.feats.cols;

    if (n >= op.index.rows) return;
    for (int64_t c = group.lane * V; c < C; c += group.lanes * V) {
        R sum[V] = {};

        for (int64_t k = 0; k < op.index.cols; k += AHEAD) {
            int64_t row[AHEAD], at[AHEAD];

            voxels_of(op, n, k, row);
#pragma unroll
            for (int j = 0; j < AHEAD; j++) at[j] = n * op.weights.row_stride + (k + j < op.index.cols ? k + j : k);
            add_rows<V, T>(op.feats, op.weights, c, row, at, sum);
        }
        write<V>(static_cast<T *>(op.out.data) + n * op.out.row_stride + c, sum);
    }
}

extern "C" muvox_status muvox_devoxelize_forward_cuda(muvox_context *ctx, const muvox_devoxelize *op)
{
    const char *const op_name = "devoxelize";
    const int64_t     N = op->index.rows, C = op->feats.cols;

    FORWARD(check_devoxelize_forward(ctx, op));
    const device_call call(ctx, op_name);
    FORWARD(call.status);
    if (!N || !op->out.data) return MUVOX_OK;
    return with_dtype(op->feats.dtype, [&](auto element) {
        using T = decltype(element);
        return with_vectors<T>(
            [&](auto width) -> muvox_status {
                constexpr int V = decltype(width)::value;
                const int     bits = lane_bits(C / V);

                FORWARD(check_grid(ctx, op_name, (N << bits) / BLOCK + 1));
                read_voxels<T, V><<<blocks_for(N << bits, BLOCK), BLOCK, 0, stream_of(ctx)>>>(*op, bits);
                LAUNCHED();
                return MUVOX_OK;
            },
            op->feats, op->out);
    });
}

/* A group for each voxel, over the places that read it. */
template <typename T, int V, typename P>
static __global__ void __launch_bounds__(BLOCK, 4) voxel_gradients(muvox_devoxelize op, reverse_list<P> list, int bits)
{
    using R = wide_t<T>;
    const lane_group group(bits);
    const int64_t    s = group.number, C = op.feats.cols;

    if (s >= op.feats.rows) return;
    const int64_t begin = list.begins[s], end = list.begins[s + 1];
    for (int64_t c = group.lane * V; c < C; c += group.lanes * V) {
        R sum[V] = {};

        for (int64_t e = begin; e < end; e += AHEAD) {
            int64_t row[AHEAD], at[AHEAD];

#pragma unroll
            for (int j = 0; j < AHEAD; j++) {
                const int64_t place = e + j < end ? e + j : e, n = list.row(place);

                at[j] = n * op.weights.row_stride + list.rank(place);
                row[j] = e + j < end ? n : -1;
            }
            add_rows<V, T>(op.grad_out, op.weights, c, row, at, sum);
        }
        write<V>(static_cast<T *>(op.grad_feats.data) + s * op.grad_feats.row_stride + c, sum);
    }
}

/* A group of AHEAD lanes or more for each point; lane j writes the gradient of place j of a batch. */
template <typename T, int V>
static __global__ void __launch_bounds__(BLOCK, 4) weight_gradients(muvox_devoxelize op, int bits)
{
    using R = wide_t<T>;
    const lane_group group(bits);
    const int64_t    n = group.number, C = op.feats.cols, K = op.index.cols;
    const bool       there = n < op.index.rows; /* all lanes of a warp take part in its sums */

    for (int64_t k = 0; k < K; k += AHEAD) {
        int64_t row[AHEAD] = {-1, -1, -1, -1};
        R       sum[AHEAD] = {}, mine = 0;

        if (there) voxels_of(op, n, k, row);
        for (int64_t c = group.lane * V; there && c < C; c += group.lanes * V) {
            const elements<T, V> g = read<V>(static_cast<const T *>(op.grad_out.data) + n * op.grad_out.row_stride + c);
            elements<T, V>       x[AHEAD];

            read_rows<V>(op.feats, row, c, x);
#pragma unroll
            for (int j = 0; j < AHEAD; j++)
#pragma unroll
                for (int v = 0; v < V; v++) sum[j] += widen(g.at[v]) * widen(x[j].at[v]);
        }
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            for (int step = group.lanes / 2; step; step /= 2) sum[j] += __shfl_xor_sync(ALL_LANES, sum[j], step);
            if (group.lane == j && row[j] >= 0) mine = sum[j]; /* a NaN in grad_out does not reach skipped places */
        }
        if (there && group.lane < AHEAD && k + group.lane < K)
            store<R>(op.grad_weights.data, op.grad_weights.dtype, n * op.grad_weights.row_stride + k + group.lane,
                     mine);
    }
}

template <typename T> static muvox_status launch_weight_gradients(muvox_context *ctx, const muvox_devoxelize *op)
{
    const char *const op_name = "devoxelize";

    return with_vectors<T>(
        [&](auto width) -> muvox_status {
            constexpr int V = decltype(width)::value;
            const int     bits = lane_bits(op->feats.cols / V, AHEAD);
            const int64_t threads = op->index.rows << bits;

            FORWARD(check_grid(ctx, op_name, threads / BLOCK + 1));
            weight_gradients<T, V><<<blocks_for(threads, BLOCK), BLOCK, 0, stream_of(ctx)>>>(*op, bits);
            LAUNCHED();
            return MUVOX_OK;
        },
        op->feats, op->grad_out);
}

template <typename T> static muvox_status launch_voxel_gradients(muvox_context *ctx, const muvox_devoxelize *op)
{
    const char *const op_name = "devoxelize";

    return with_places(op->index.rows, op->index.cols, [&](auto place) {
        using P = decltype(place);
        return with_vectors<T>(
            [&](auto width) -> muvox_status {
                constexpr int   V = decltype(width)::value;
                const int       bits = lane_bits(op->feats.cols / V);
                const int64_t   threads = op->feats.rows << bits;
                reverse_list<P> list = {};
                workspace       hold(ctx);

                FORWARD(check_grid(ctx, op_name, threads / BLOCK + 1));
                FORWARD(reverse_index(ctx, op_name, op->feats.rows, op->index, &hold, &list));
                voxel_gradients<T, V><<<blocks_for(threads, BLOCK), BLOCK, 0, stream_of(ctx)>>>(*op, list, bits);
                LAUNCHED();
                return MUVOX_OK;
            },
            op->grad_out, op->grad_feats);
    });
}

extern "C" muvox_status muvox_devoxelize_backward_cuda(muvox_context *ctx, const muvox_devoxelize *op)
{
    FORWARD(check_devoxelize_backward(ctx, op));
    const device_call call(ctx, "devoxelize");
    FORWARD(call.status);
    return with_dtype(op->feats.dtype, [&](auto element) -> muvox_status {
        using T = decltype(element);

        if (op->index.rows && op->grad_weights.data) FORWARD(launch_weight_gradients<T>(ctx, op));
        if (op->feats.rows && op->grad_feats.data) FORWARD(launch_voxel_gradients<T>(ctx, op));
        return MUVOX_OK;
    });
}
