/* Matrices that belong to no set, and the reverse list of an index into them. */
#ifndef MUVOX_CUDA_TABLE_H
#define MUVOX_CUDA_TABLE_H

#include "reverse.cuh"

/* Number n of an int32 or int64 column, or of a matrix (N, K) row by row. */
__device__ __forceinline__ int64_t integer(const muvox_matrix &m, int64_t n)
{
    const int64_t at = m.cols == 1 ? n * m.row_stride : n / m.cols * m.row_stride + n % m.cols;

    return m.dtype == MUVOX_I64 ? static_cast<const int64_t *>(m.data)[at] : static_cast<const int32_t *>(m.data)[at];
}

static __global__ void read_index(muvox_matrix index, int64_t count, int64_t N, uint32_t *picks)
{
    const int64_t place = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;

    if (place >= count) return;
    const int64_t row = integer(index, place);

    picks[place] = row >= 0 && row < N ? (uint32_t)row : ~0u;
}

/* Which places of an index hold each of N rows; what is below 0 or past the last row holds none. */
template <typename P>
muvox_status reverse_index(muvox_context *ctx, const char *op_name, int64_t N, const muvox_matrix &index,
                           workspace *hold, reverse_list<P> *list)
{
    const int64_t count = index.rows * index.cols;
    workspace     picks(ctx);

    REQUIRE(N < INT64_C(0xffffffff), MUVOX_UNSUPPORTED, "%s: an index into %lld rows, at most 2^32 - 2 are supported",
            op_name, (long long)N);
    FORWARD(check_grid(ctx, op_name, count / 256 + 1));
    FORWARD(picks.take(op_name, count * 4));
    if (count) {
        read_index<<<blocks_for(count, 256), 256, 0, stream_of(ctx)>>>(index, count, N, picks.as<uint32_t>());
        LAUNCHED();
    }
    list->k = index.cols;
    return reverse_picks(ctx, op_name, N, count, picks.as<uint32_t>(), hold, list);
}

#endif
