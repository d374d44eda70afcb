#include "reverse.cuh"

#include <cub/device/device_radix_sort.cuh>

enum { WARPS = 4 };

/* One warp for each tile of 32 rows: which row of all each of their places holds, ~0 for no row. */
template <typename P>
static __global__ void write_picks(muvox_sets sets, muvox_sets query_sets, muvox_output neighbours, int64_t k, int bits,
                                   int64_t tiles, uint32_t *picks, P *places)
{
    const int64_t number = (int64_t)blockIdx.x * WARPS + threadIdx.x / WARP;

    if (number >= tiles) return;
    const tile    t = tile_of(query_sets, WARP, number);
    const int64_t begin = set_begin(sets, t.set), M = set_end(sets, t.set) - begin;
    const int64_t rows = t.rows - t.first < WARP ? t.rows - t.first : WARP;
    int64_t       i = 0, r = lane_id(); /* of place i · k + r among those of the tile */

    for (; i < rows; r += WARP) {
        while (r >= k && i < rows) {
            r -= k;
            i++;
        }
        if (i >= rows) break;
        const int64_t at = row_at(neighbours, query_sets, t.begin, t.set, t.first + i) + r;
        const int64_t j = static_cast<const int32_t *>(neighbours.data)[at];

        picks[(t.begin + t.first + i) * k + r] = j >= 0 && j < M ? (uint32_t)(begin + j) : ~0u;
        places[(t.begin + t.first + i) * k + r] = (P)(t.begin + t.first + i) << bits | (P)r;
    }
}

/* begins[j]: the first place whose pick is not below j. */
static __global__ void find_begins(const uint32_t *picks, int64_t count, int64_t N, int64_t *begins)
{
    const int64_t j = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    int64_t       low = 0, high = count;

    if (j > N) return;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;

        if (picks[middle] < (uint64_t)j)
            low = middle + 1;
        else
            high = middle;
    }
    begins[j] = low;
}

template <typename P>
muvox_status reverse_picks(muvox_context *ctx, const char *op_name, int64_t N, int64_t count, const uint32_t *picks,
                           const P *places, workspace *hold, reverse_list<P> *list)
{
    const int64_t places_bytes = rounded_bytes(count * (int64_t)sizeof(P)), picks_bytes = rounded_bytes(count * 4);
    const int     bits = N ? bits_below(N + 1) : 1; /* N itself stands for no row */
    size_t        scratch = 0;
    workspace     block(ctx);

    FORWARD(check_grid(ctx, op_name, count / 256 + 1));
    CUDA(cub::DeviceRadixSort::SortPairs(nullptr, scratch, (const uint32_t *)nullptr, (uint32_t *)nullptr,
                                         (const P *)nullptr, (P *)nullptr, count, 0, bits, stream_of(ctx)));
    FORWARD(hold->take(op_name, places_bytes + (N + 1) * 8));
    FORWARD(block.take(op_name, picks_bytes + (int64_t)scratch));
    P *const        sorted_places = hold->as<P>();
    int64_t *const  begins = (int64_t *)(hold->as<char>() + places_bytes);
    uint32_t *const sorted = block.as<uint32_t>();

    if (count)
        CUDA(cub::DeviceRadixSort::SortPairs(block.as<char>() + picks_bytes, scratch, picks, sorted, places,
                                             sorted_places, count, 0, bits, stream_of(ctx)));
    find_begins<<<blocks_for(N + 1, 256), 256, 0, stream_of(ctx)>>>(sorted, count, N, begins);
    LAUNCHED();
    list->places = sorted_places;
    list->begins = begins;
    return MUVOX_OK;
}

template <typename P>
muvox_status reverse_neighbours(muvox_context *ctx, const char *op_name, const muvox_sets &sets,
                                const muvox_sets &query_sets, const muvox_output &neighbours, int64_t k,
                                workspace *hold, reverse_list<P> *list)
{
    const int64_t N = sets.rows, count = query_sets.rows * k, tiles = tile_count(query_sets, WARP);
    const int64_t picks_bytes = rounded_bytes(count * 4);
    workspace     block(ctx);

    REQUIRE(N < INT64_C(0xffffffff), MUVOX_UNSUPPORTED, "%s: backward of %lld rows, at most 2^32 - 2 are supported",
            op_name, (long long)N);
    FORWARD(check_grid(ctx, op_name, (tiles + WARPS - 1) / WARPS));
    FORWARD(block.take(op_name, picks_bytes + count * (int64_t)sizeof(P)));
    uint32_t *const picks = block.as<uint32_t>();
    P *const        places = (P *)(block.as<char>() + picks_bytes);
    list->bits = bits_below(k);
    /* Splits that are wrong leave places of no set: they pick no row. */
    if (query_sets.splits && count) CUDA(cudaMemsetAsync(picks, 0xff, (size_t)count * 4, stream_of(ctx)));
    if (count) {
        write_picks<P><<<blocks_for(tiles, WARPS), WARPS * WARP, 0, stream_of(ctx)>>>(sets, query_sets, neighbours, k,
                                                                                      list->bits, tiles, picks, places);
        LAUNCHED();
    }
    return reverse_picks<P>(ctx, op_name, N, count, picks, places, hold, list);
}

template muvox_status reverse_picks<uint32_t>(muvox_context *, const char *, int64_t, int64_t, const uint32_t *,
                                              const uint32_t *, workspace *, reverse_list<uint32_t> *);
template muvox_status reverse_picks<uint64_t>(muvox_context *, const char *, int64_t, int64_t, const uint32_t *,
                                              const uint64_t *, workspace *, reverse_list<uint64_t> *);
template muvox_status reverse_neighbours<uint32_t>(muvox_context *, const char *, const muvox_sets &,
                                                   const muvox_sets &, const muvox_output &, int64_t, workspace *,
                                                   reverse_list<uint32_t> *);
template muvox_status reverse_neighbours<uint64_t>(muvox_context *, const char *, const muvox_sets &,
                                                   const muvox_sets &, const muvox_output &, int64_t, workspace *,
                                                   reverse_list<uint64_t> *);
