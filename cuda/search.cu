#include "search.cuh"

#include "itinerary.cuh"
#include "shortlist.cuh"

#include <math.h>
#include <string.h>

/* How a search goes: a warp takes a tile of 32 queries, one for each lane, which the order has put near each other.
 * It looks at its own tile, then at those beside it, then at every tile whose box is nearer than the farthest place
 * in the list of any lane. Tiles come in batches: each lane first marks the rows that are near enough, in a loop
 * without branches, then all lanes insert what they marked, each its own. */

/* What a warp keeps in shared memory of the tiles it looks at. D > 0: columns known to the compiler; 0: any, and
 * rows and queries are read where they lie. */
template <typename R, int D> struct stage {
    R        points[BATCH * WARP * (D > 0 ? D : 1)];
    int32_t  rows[BATCH * WARP];
    unsigned marks[BATCH * WARP];
    int32_t  batch[BATCH]; /* numbers of the tiles */
};

/* Looks at the `waiting` tiles of the batch. */
template <typename R, int D, typename L>
__device__ __forceinline__ void look(const query<R, D> &q, const int32_t *numbers, stage<R, D> &staged, int waiting,
                                     L &list)
{
    const R  limit = list.farthest().distance2(); /* NaN while there is room */
    unsigned marks = 0;
    int      u = -1;

    __syncwarp();
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
        if (b >= waiting) break;
        const int64_t i = (int64_t)staged.batch[b] * WARP + lane_id();
        const bool    there = i < q.count;

        staged.rows[b * WARP + lane_id()] = there ? numbers[i] : -1;
        if constexpr (D > 0)
#pragma unroll
            for (int c = 0; c < D; c++)
                staged.points[(b * WARP + lane_id()) * D + c] = there ? q.rows[i * D + c] : (R)INFINITY;
    }
    __syncwarp();
    const auto row_at_place = [&](int b, int j) {
        if constexpr (D > 0)
            return (const R *)staged.points + (b * WARP + j) * D;
        else {
            const int64_t i = (int64_t)staged.batch[b] * WARP + j;

            return q.rows + (i < q.count ? i : q.count - 1) * q.width;
        }
    };
    for (int b = 0; b < waiting; b++) {
        unsigned near = 0;

#pragma unroll
        for (int j = 0; j < WARP; j++)
            if (!(q.distance2(row_at_place(b, j)) > limit)) near |= 1u << j;
        staged.marks[b * WARP + lane_id()] = near;
    }
    /* Each lane takes the next rows that it marked, a group at a time; empty places where it has no more. */
    for (;;) {
        place<R> found[L::GROUP];

        while (!marks && u + 1 < waiting) marks = staged.marks[++u * WARP + lane_id()];
        if (!__any_sync(ALL_LANES, marks)) return;
#pragma unroll
        for (int g = 0; g < L::GROUP; g++) {
            const int     j = marks ? __ffs(marks) - 1 : 0;
            const int32_t row = marks ? staged.rows[u * WARP + j] : -1;
            const R       distance = marks ? q.distance2(row_at_place(u, j)) : (R)0;

            found[g] = row < 0 || row == q.self ? place<R>::empty() : place<R>::of(distance, row);
            marks &= marks - 1;
            if (g + 1 < L::GROUP)
                while (!marks && u + 1 < waiting) marks = staged.marks[++u * WARP + lane_id()];
        }
        list.insert(found);
    }
}

/* The corners of the box around the queries of a warp. */
template <typename R, int D> __device__ __forceinline__ void bound_queries(const query<R, D> &q, bool looks, R *around)
{
    if constexpr (D > 0)
#pragma unroll
        for (int c = 0; c < D; c++) {
            R low = looks ? q.x[c] : (R)NAN, high = low; /* fmin and fmax pass over NaN */

            for (int lanes = WARP / 2; lanes; lanes /= 2) {
                low = fmin(low, __shfl_xor_sync(ALL_LANES, low, lanes));
                high = fmax(high, __shfl_xor_sync(ALL_LANES, high, lanes));
            }
            around[c] = low;
            around[D + c] = high;
        }
}

template <typename R, typename L>
__device__ __forceinline__ void write_list(const search_arguments<R> &a, const tile &t, int32_t row, L &list)
{
    int32_t *const neighbours = (int32_t *)a.neighbours.data, *const counts = (int32_t *)a.counts.data;
    R *const      distances = (R *)a.distance2.data;
    const int64_t to = row_at(a.neighbours, a.query_sets, t.begin, t.set, row);
    const int64_t distance_to = row_at(a.distance2, a.query_sets, t.begin, t.set, row);
    int32_t       count = 0;

    list.sort();
    list.each(a.k, [&](int64_t r, place<R> found) {
        const bool there = found.row() >= 0;

        count += there;
        if (neighbours) neighbours[to + r] = found.row();
        if (distances) distances[distance_to + r] = there ? found.distance2() : (R)INFINITY;
    });
    if (counts) counts[row_at(a.counts, a.query_sets, t.begin, t.set, row)] = count;
}

template <typename R, int D, typename L>
__device__ __forceinline__ void search_tile(const search_arguments<R> &a, int64_t item, stage<R, D> &staged, L &list)
{
    if (a.redo && !a.redo[item]) return;
    const tile t = tile_of(a.query_sets, WARP, item);

    if (t.first >= t.rows) return;
    const int64_t i = t.first + lane_id(), at = t.begin + (i < t.rows ? i : t.rows - 1);
    const int64_t begin = set_begin(a.sets, t.set), first = first_tile(a.sets, WARP, t.set);
    const int32_t number = row_number(a.queries.rows[at], t.rows);
    const bool    asked = !a.redo || a.redo[item] >> lane_id() & 1, looks = i < t.rows && number >= 0 && asked;
    query<R, D>   q;
    R             around[2 * (D > 0 ? D : 1)];

    q.width = a.rows.width;
    q.rows = a.rows.points + begin * q.width;
    q.boxes = a.rows.boxes + 2 * first * q.width;
    q.where = a.queries.points + at * q.width;
    q.count = set_end(a.sets, t.set) - begin;
    q.self = a.exclude_self ? number : -1;
    if constexpr (D > 0)
#pragma unroll
        for (int c = 0; c < D; c++) q.x[c] = q.where[c];
    list.clear(a.k, looks ? a.empty : place<R>::least()); /* least: nothing comes before, nothing is looked for */
    bound_queries(q, looks, around);
    itinerary<R, D> tiles(a, q, t, around);

    while (const int waiting = tiles.next(q, list, staged.batch)) look(q, a.rows.rows + begin, staged, waiting, list);
    if (i >= t.rows || !asked) return;
    if (!looks) list.clear(a.k, place<R>::empty());
    write_list(a, t, number >= 0 ? number : ~number, list);
}

template <typename R, int D, int K>
static __global__ void __launch_bounds__(SEARCH_WARPS *WARP) search_in_registers(const search_arguments<R> a)
{
    __shared__ stage<R, D> staged[SEARCH_WARPS];
    const int              warp = (int)threadIdx.x / WARP;
    const int64_t          item = (int64_t)blockIdx.x * SEARCH_WARPS + warp;
    register_list<R, K>    list;

    if (item < a.items) search_tile(a, item, staged[warp], list);
}

template <typename R>
static __global__ void __launch_bounds__(SEARCH_WARPS *WARP) search_in_heaps(const search_arguments<R> a)
{
    __shared__ stage<R, 0> staged[SEARCH_WARPS];
    const int              warp = (int)threadIdx.x / WARP;
    const int64_t          first = (int64_t)blockIdx.x * SEARCH_WARPS + warp;
    heap_list<R>           list = {a.heaps + first * a.k * WARP + lane_id(), 0};

    for (int64_t item = first; item < a.items; item += (int64_t)gridDim.x * SEARCH_WARPS)
        search_tile(a, item, staged[warp], list);
}

template <typename R, int D, int K>
static muvox_status launch(muvox_context *ctx, const char *op_name, const search_arguments<R> &a)
{
    search_in_registers<R, D, K><<<blocks_for(a.items, SEARCH_WARPS), SEARCH_WARPS * WARP, 0, stream_of(ctx)>>>(a);
    LAUNCHED();
    return MUVOX_OK;
}

template <int D> static muvox_status launch_list(muvox_context *ctx, const char *op, const search_arguments<float> &a)
{
    if (a.k <= 8) return launch<float, D, 8>(ctx, op, a);
    if (a.k <= 16) return launch<float, D, 16>(ctx, op, a);
    if (a.k <= 32) return launch<float, D, 32>(ctx, op, a);
    return launch<float, D, 64>(ctx, op, a);
}

/* The most memory for heaps, unless one warp's take more. */
static const int64_t HEAP_BYTES = INT64_C(64) << 20;

template <typename R> static muvox_status launch_heaps(muvox_context *ctx, const char *op_name, search_arguments<R> &a)
{
    const int64_t block_bytes = SEARCH_WARPS * WARP * a.k * (int64_t)sizeof(place<R>);
    const int64_t most = HEAP_BYTES / block_bytes < 1 ? 1 : HEAP_BYTES / block_bytes;
    const int64_t needed = blocks_for(a.items, SEARCH_WARPS), blocks = needed < most ? needed : most;
    workspace     heaps(ctx);

    FORWARD(heaps.take(op_name, blocks * block_bytes));
    a.heaps = heaps.as<place<R>>();
    search_in_heaps<R><<<(unsigned)blocks, SEARCH_WARPS * WARP, 0, stream_of(ctx)>>>(a);
    LAUNCHED();
    return MUVOX_OK;
}

/* The largest distance in R that is not beyond the radius. */
static place<float> beyond(double radius2, float)
{
    float    limit = (float)radius2;
    uint32_t bits;

    if ((double)limit > radius2) limit = nextafterf(limit, 0.f);
    memcpy(&bits, &limit, sizeof bits);
    return place<float>::of(bits, ~0u);
}

static place<double> beyond(double radius2, double)
{
    uint64_t bits;

    memcpy(&bits, &radius2, sizeof bits);
    return place<double>::of(bits, ~0u);
}

template <typename R>
static muvox_status search(muvox_context *ctx, const char *op_name, const search_request &request, workspace *hold,
                           const int32_t **order)
{
    const int64_t d = request.coords.cols;
    const bool    fast = sizeof(R) == sizeof(float) && d <= 8 && request.k <= 64;
    const bool    shortlists =
        sizeof(R) == sizeof(float) && shortlist_suits(request.sets, tile_count(request.query_sets, WARP), d, request.k);
    const int           width = !fast ? (int)d : d <= 4 ? 4 : 8;
    const muvox_matrix  none = {};
    workspace           queries_hold(ctx), redo(ctx);
    search_arguments<R> a = {};

    a.sets = request.sets;
    a.query_sets = request.query_sets;
    a.k = request.k;
    a.items = tile_count(a.query_sets, WARP);
    a.cross = request.options & MUVOX_QUERIES;
    a.exclude_self = request.options & MUVOX_EXCLUDE_SELF;
    a.sorted = rows_sorted(a.sets);
    a.empty = request.options & MUVOX_WITHIN_RADIUS ? beyond(request.max_radius * request.max_radius, R())
                                                    : place<R>::empty();
    a.neighbours = request.neighbours;
    a.distance2 = request.distance2;
    a.counts = request.counts;
    if (a.query_sets.rows == 0) return MUVOX_OK;
    FORWARD(order_rows<R>(ctx, op_name, a.sets, request.coords, request.mask, width, shortlists && a.sorted, hold,
                          &a.rows));
    if (order) *order = a.sorted ? a.rows.rows : nullptr;
    a.queries = a.rows;
    if (a.cross)
        FORWARD(
            order_rows<R>(ctx, op_name, a.query_sets, request.queries, none, width, false, &queries_hold, &a.queries));
    FORWARD(check_grid(ctx, op_name, (a.items + SEARCH_WARPS - 1) / SEARCH_WARPS));
    if constexpr (sizeof(R) == sizeof(float)) {
        if (shortlists) {
            FORWARD(redo.take(op_name, a.items * 4));
            FORWARD(search_by_shortlist(ctx, op_name, a, request.coords, redo.as<uint32_t>()));
            a.redo = redo.as<uint32_t>();
        }
        if (fast && width == 4) return launch_list<4>(ctx, op_name, a);
        if (fast) return launch_list<8>(ctx, op_name, a);
    }
    if (a.k <= 8) return launch<R, 0, 8>(ctx, op_name, a);
    if (a.k <= 32) return launch<R, 0, 32>(ctx, op_name, a);
    return launch_heaps(ctx, op_name, a);
}

muvox_status search_neighbours(muvox_context *ctx, const char *op_name, const search_request &request, workspace *hold,
                               const int32_t **order)
{
    if (request.coords.dtype == MUVOX_F64) return search<double>(ctx, op_name, request, hold, order);
    return search<float>(ctx, op_name, request, hold, order);
}
