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
    list->ends = begins + 1;
    return MUVOX_OK;
}

/* AHEAD: turns whose neighbours are read before the first is dealt with. */
enum { MOST_WARPS = 32, AHEAD = 4 };

/* The places of one set by the row that they hold, one block a set. Each warp takes a run of the places, 32 in a
 * turn, and has a counter for each row: of its places that hold the row first, then, after the scan over rows and
 * warps, of where the next of them goes. Lists ascend, as warps, turns and lanes do. STAGED: they are made in shared
 * memory, in 16 bits a place, as they go to the device's memory all over it. */
template <typename P, bool STAGED>
static __global__ void __launch_bounds__(MOST_WARPS *WARP)
    count_places(muvox_sets sets, muvox_sets query_sets, muvox_output neighbours, int k, int bits, P *places,
                 int64_t *begins, int64_t *ends)
{
    extern __shared__ uint32_t    counters[]; /* (warps, M), then what is staged */
    __shared__ uint32_t           sums[MOST_WARPS];
    const int                     M = (int)sets.size, warps = blockDim.x / WARP, warp = threadIdx.x / WARP;
    const int64_t                 s = blockIdx.x, queries = s * query_sets.size;
    const uint32_t                total = (uint32_t)(query_sets.size * k);
    const uint32_t                each = (total + blockDim.x - 1) / blockDim.x * WARP;
    const uint32_t                first = min(warp * each, total), last = min(first + each, total);
    const int                     rows_on = WARP / k, ranks_on = WARP % k; /* from one turn to the next */
    const set_rows<const int32_t> near(neighbours, query_sets, queries, s);
    uint32_t *const               mine = counters + warp * M;
    uint16_t *const               staged = (uint16_t *)(counters + warps * M);

    /* f(place, row) for each turn of the warp: i · 2^bits + r of the lane, and what stands there, −1 for no row. */
    const auto each_turn = [&](auto f) {
        int i = (int)((first + lane_id()) / k), r = (int)((first + lane_id()) % k);

        for (uint32_t n = first; n < last; n += AHEAD * WARP) {
            int32_t  row[AHEAD];
            uint32_t place[AHEAD];

#pragma unroll
            for (int ahead = 0; ahead < AHEAD; ahead++) {
                row[ahead] = n + ahead * WARP + lane_id() < last ? __ldg(near[i] + r) : -1;
                if (row[ahead] >= M) row[ahead] = -1;
                place[ahead] = (uint32_t)i << bits | (uint32_t)r;
                i += rows_on;
                r += ranks_on;
                if (r >= k) {
                    r -= k;
                    i++;
                }
            }
#pragma unroll
            for (int ahead = 0; ahead < AHEAD; ahead++) f(place[ahead], row[ahead]);
        }
    };

    for (int n = threadIdx.x; n < warps * M; n += blockDim.x) counters[n] = 0;
    __syncthreads();
    each_turn([&](uint32_t, int32_t row) {
        if (row >= 0) atomicAdd(mine + row, 1u);
    });
    uint32_t before = 0; /* places that hold rows of the turns so far */
    for (int row = threadIdx.x; row - (int)threadIdx.x < M; row += blockDim.x) {
        uint32_t count = 0, scan, at = before;

        __syncthreads(); /* the counters are there, and nobody reads sums any more */
        for (int w = 0; w < warps && row < M; w++) count += counters[w * M + row];
        scan = count;
        for (int step = 1; step < WARP; step *= 2) {
            const uint32_t below = __shfl_up_sync(ALL_LANES, scan, step);

            if ((int)lane_id() >= step) scan += below;
        }
        if (lane_id() == WARP - 1) sums[warp] = scan;
        __syncthreads();
        for (int w = 0; w < warps; w++) {
            at += w < warp ? sums[w] : 0;
            before += sums[w];
        }
        if (row >= M) continue;
        at += scan - count;
        begins[s * M + row] = s * total + at;
        ends[s * M + row] = s * total + at + count;
        for (int w = 0; w < warps; w++) {
            const uint32_t of_warp = counters[w * M + row];

            counters[w * M + row] = at;
            at += of_warp;
        }
    }
    __syncthreads();
    each_turn([&](uint32_t place, int32_t row) {
        uint32_t at = row < 0 ? 0 : atomicAdd(mine + row, 1u);

        /* Lanes of one row came in any order: by their numbers then. Seldom, and so what is slow here is seldom run. */
        __syncwarp();
        if (__any_sync(ALL_LANES, row >= 0 && mine[row] != at + 1)) {
            const unsigned same = __match_any_sync(ALL_LANES, row);

            if (row >= 0) at = mine[row] - __popc(same >> lane_id());
        }
        __syncwarp();
        if (row >= 0 && STAGED) staged[at] = (uint16_t)place;
        if (row >= 0 && !STAGED) places[s * total + at] = ((P)queries << bits) + place;
    });
    if (!STAGED) return;
    __syncthreads();
    for (uint32_t e = threadIdx.x; e < before; e += blockDim.x)
        places[s * total + e] = ((P)queries << bits) + staged[e];
}

/* The blocks of count_places. */
struct counting {
    int  warps; /* 0 where sorting is better */
    bool staged;
};

/* Sorting is better for ragged sets, whose sizes are not known here, sets whose counters do not fit, and few sets
 * that would take long. Places are staged where they fit beside the counters of 8 warps, if possible in half of a
 * multiprocessor's memory. */
static muvox_status plan_counting(muvox_context *ctx, const char *op_name, const muvox_sets &sets,
                                  const muvox_sets &query_sets, int64_t k, counting *plan)
{
    const int64_t places = sets.splits || query_sets.splits ? INT64_MAX / 2 : query_sets.size * k;
    const int64_t wanted = places / (8 * WARP) + 1, least = wanted < 8 ? wanted : 8; /* some turns for each */
    const int64_t staged = 2 * places;
    int           bytes = 0;

    *plan = {};
    if (!sets.count || places > (sets.count < MANY_SETS ? 1 << 16 : 1 << 28) || sets.count > INT32_MAX) return MUVOX_OK;
    CUDA(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, ctx->device));
    const auto fitting = [&](int64_t room) { return sets.size ? room / 4 / sets.size : (int64_t)MOST_WARPS; };
    int64_t    warps = fitting(bytes / 2 - 1024 - staged);
    plan->staged = query_sets.size << bits_below(k) <= 1 << 16;
    if (plan->staged && warps < least) warps = fitting(bytes - 1024 - staged);
    if (!plan->staged || warps < least) {
        plan->staged = false;
        warps = fitting(bytes - 1024);
    }
    if (warps < least) return MUVOX_OK;
    if (warps > wanted) warps = wanted;
    plan->warps = (int)(warps < MOST_WARPS ? warps : (int64_t)MOST_WARPS);
    return MUVOX_OK;
}

muvox_status places_are_counted(muvox_context *ctx, const char *op_name, const muvox_sets &sets,
                                const muvox_sets &query_sets, int64_t k, bool *counted)
{
    counting plan;

    FORWARD(plan_counting(ctx, op_name, sets, query_sets, k, &plan));
    *counted = plan.warps;
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
    counting      plan;

    REQUIRE(N < INT64_C(0xffffffff), MUVOX_UNSUPPORTED, "%s: backward of %lld rows, at most 2^32 - 2 are supported",
            op_name, (long long)N);
    FORWARD(check_row_stride(ctx, op_name, "neighbours", neighbours.row_stride));
    list->bits = bits_below(k);
    FORWARD(plan_counting(ctx, op_name, sets, query_sets, k, &plan));
    if (plan.warps) {
        const int64_t places_bytes = rounded_bytes(count * (int64_t)sizeof(P));
        const int64_t bytes = plan.warps * sets.size * 4 + (plan.staged ? query_sets.size * k * 2 : 0);
        const auto    kernel = plan.staged ? count_places<P, true> : count_places<P, false>;

        FORWARD(hold->take(op_name, places_bytes + 2 * N * 8));
        P *const       places = hold->as<P>();
        int64_t *const begins = (int64_t *)(hold->as<char>() + places_bytes);
        CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
        kernel<<<(unsigned)sets.count, plan.warps * WARP, (size_t)bytes, stream_of(ctx)>>>(
            sets, query_sets, neighbours, (int)k, list->bits, places, begins, begins + N);
        LAUNCHED();
        list->places = places;
        list->begins = begins;
        list->ends = begins + N;
        return MUVOX_OK;
    }
    FORWARD(check_grid(ctx, op_name, (tiles + WARPS - 1) / WARPS));
    FORWARD(block.take(op_name, picks_bytes + count * (int64_t)sizeof(P)));
    uint32_t *const picks = block.as<uint32_t>();
    P *const        places = (P *)(block.as<char>() + picks_bytes);
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
