/* Matrices that belong to no set, and the reverse list of an index into them. */
#ifndef MUVOX_CUDA_TABLE_H
#define MUVOX_CUDA_TABLE_H

#include "reverse.cuh"

/* Number n of an int32 or int64 column, or of a matrix (N, K) row by row. */
__device__ __forceinline__ int64_t integer(const muvox_matrix &m, int64_t n)
{
    const int64_t at =
        m.cols == 1 ? n * m.row_stride : quotient(n, m.cols) * m.row_stride + (n - quotient(n, m.cols) * m.cols);

    return m.dtype == MUVOX_I64 ? static_cast<const int64_t *>(m.data)[at] : static_cast<const int32_t *>(m.data)[at];
}

template <typename P>
static __global__ void read_index(muvox_matrix index, int64_t count, int64_t N, int bits, uint32_t *picks, P *places)
{
    const int64_t number = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, n = quotient(number, index.cols);

    if (number >= count) return;
    const int64_t row = integer(index, number);

    picks[number] = row >= 0 && row < N ? (uint32_t)row : ~0u;
    places[number] = (P)n << bits | (P)(number - n * index.cols);
}

/* Which places of an index hold each of N rows; what is below 0 or past the last row holds none. */
template <typename P>
muvox_status reverse_index(muvox_context *ctx, const char *op_name, int64_t N, const muvox_matrix &index,
                           workspace *hold, reverse_list<P> *list)
{
    const int64_t count = index.rows * index.cols, picks_bytes = rounded_bytes(count * 4);
    workspace     block(ctx);

    REQUIRE(N < INT64_C(0xffffffff), MUVOX_UNSUPPORTED, "%s: an index into %lld rows, at most 2^32 - 2 are supported",
            op_name, (long long)N);
    FORWARD(check_grid(ctx, op_name, count / 256 + 1));
    FORWARD(block.take(op_name, picks_bytes + count * (int64_t)sizeof(P)));
    uint32_t *const picks = block.as<uint32_t>();
    P *const        places = (P *)(block.as<char>() + picks_bytes);
    list->bits = bits_below(index.cols);
    if (count) {
        read_index<P><<<blocks_for(count, 256), 256, 0, stream_of(ctx)>>>(index, count, N, list->bits, picks, places);
        LAUNCHED();
    }
    return reverse_picks<P>(ctx, op_name, N, count, picks, places, hold, list);
}

#endif
