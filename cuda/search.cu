#include "search.cuh"

#include "bound.cuh"
#include "nearest.cuh"
#include "order.cuh"

#include <math.h>
#include <string.h>

/* How a search goes: a warp takes a tile of 32 queries, one for each lane, which the order has put near each other, and
 * walks over the tiles of their set twice: own tile first, then those beside it, then the others, but for those whose box is
 * too far away for all lanes. The first walk finds how far the k-th neighbour of each query is, by distances alone; the second
 * collects the rows that are no farther, with their numbers, and sorts them. In each tile it marks the rows that may be
 * near enough, without branches (float: by bounds from tensor cores, see bound.cuh); then each lane takes what it marked.
 *
 * The distance to a box is computed with the same operations in the same order as a distance, each of which is monotonic in
 * floating point too, so it is never larger than the distance to a row inside: nothing is lost by skipping. */

enum { WARPS = 4, PENDING = 16 };

template <typename R> struct search_arguments {
    muvox_sets      sets, query_sets;
    ordered_rows<R> rows, queries;
    int64_t         k, items; /* items: tiles of queries */
    place<R>        empty;    /* what a list is filled with: nothing beyond the radius comes before it */
    bool            cross, exclude_self, sorted;
    muvox_output    neighbours, distance2, counts;
    place<R>       *heaps; /* (warps, heap_size, 32), for lists that do not fit registers */
    int64_t         heap_size;
};

/* What a warp keeps in shared memory: the tile it looks at, and what lanes have taken from it and not yet put into their
 * lists. D > 0: columns known to the compiler; 0: any, and rows and queries are read where they lie. */
template <typename R, int D> struct stage {
    R                        points[WARP][D];
    int32_t                  rows[WARP];
    typename bound<D>::right right;
    place<R>                 pending[PENDING][WARP];
};

template <typename R> struct stage<R, 0> {
    int32_t  rows[WARP];
    place<R> pending[PENDING][WARP];
};

/* The query of a lane, and the set that its warp searches. */
template <typename R, int D> struct query {
    const R *rows, *boxes; /* of the set */
    const int32_t *numbers, *lowest;
    const R *where;        /* the query's own coordinates */
    R        x[D > 0 ? D : 1];
    int64_t  count; /* rows of the set */
    int      width;
    int32_t  self; /* number of the row to leave out, or −1 */

    __device__ __forceinline__ int columns() const { return D > 0 ? D : width; }
    __device__ __forceinline__ R   column(int c) const
    {
        if constexpr (D > 0)
            return x[c];
        else
            return where[c];
    }

    /* distance² to a row */
    __device__ __forceinline__ R distance2(const R *row) const
    {
        R sum = 0;

#pragma unroll
        for (int c = 0; c < columns(); c++) {
            const R difference = column(c) - row[c];

            sum = fused(difference, difference, sum);
        }
        return sum;
    }
};

/* distance² of two boxes, each (2, columns) lower and upper corner. NaN corners, of boxes of infinite rows, count as near. */
template <typename R> __device__ __forceinline__ R box_gap(const R *low, const R *high, const R *box, int columns)
{
    R sum = 0;

#pragma unroll
    for (int c = 0; c < columns; c++) {
        const R below = box[c] - high[c], above = low[c] - box[columns + c];
        const R gap = fmax(fmax(below, above), (R)0);

        sum = fused(gap, gap, sum);
    }
    return sum;
}

/* The rows of a tile that are not surely beyond the limit (NaN: none is); the tile is staged then. */
template <typename R, int D>
__device__ __forceinline__ unsigned mark(const query<R, D> &q, const bound<D> &bounds, stage<R, D> &staged, int tile,
                                         R limit)
{
    const int64_t i = (int64_t)tile * WARP + lane_id();
    const int32_t row = i < q.count ? q.numbers[i] : -1;
    unsigned      near = 0;

    __syncwarp();
    staged.rows[lane_id()] = row;
    if constexpr (D > 0) {
        R point[D];

#pragma unroll
        for (int c = 0; c < D; c++) point[c] = row >= 0 ? q.rows[i * D + c] : (R)0;
#pragma unroll
        for (int c = 0; c < D; c++) staged.points[lane_id()][c] = point[c];
        bounds.put(staged.right, point, row >= 0);
    }
    __syncwarp();
    if constexpr (D > 0)
        near = bounds.marks(staged.right, limit);
    else
        for (int j = 0; j < WARP; j++) {
            const int64_t other = (int64_t)tile * WARP + j;

            if (other < q.count && !(q.distance2(q.rows + other * q.width) > limit)) near |= 1u << j;
        }
    return near;
}

/* Row j of the staged tile: its number if it counts for this query, else −1, and its distance. */
template <typename R, int D>
__device__ __forceinline__ int32_t meet(const query<R, D> &q, const stage<R, D> &staged, int tile, int j, R *distance2)
{
    const int32_t row = staged.rows[j];

    if constexpr (D > 0)
        *distance2 = q.distance2(staged.points[j]);
    else
        *distance2 = q.distance2(q.rows + ((int64_t)tile * WARP + j) * q.width);
    return row == q.self ? -1 : row;
}

/* Puts what is pending into a list; afterwards nothing is. */
template <typename L, typename X> __device__ __forceinline__ void flush(L &list, X *pending, int &count, X none)
{
    X group[L::GROUP];

#pragma unroll
    for (int g = 0; g < L::GROUP; g++) group[g] = g < count ? pending[g * WARP + lane_id()] : none;
    list.insert(group);
    count = 0;
}

/* First walk: a tile's part in the distances. */
template <typename R, int D, int K>
__device__ __forceinline__ void measure(const query<R, D> &q, const bound<D> &bounds, stage<R, D> &staged, int tile,
                                        distance_list<R, K> &list, int &count)
{
    constexpr int GROUP = distance_list<R, K>::GROUP;
    unsigned      marks = mark(q, bounds, staged, tile, list.farthest());
    R *const      pending = reinterpret_cast<R *>(staged.pending);

    while (__any_sync(ALL_LANES, marks)) {
        R x[1] = {(R)INFINITY};

        if (marks) {
            R distance;

            if (meet(q, staged, tile, __ffs(marks) - 1, &distance) >= 0) x[0] = fmin(distance, (R)INFINITY); /* no NaN */
            marks &= marks - 1;
        }
        if constexpr (GROUP == 1)
            list.insert(x);
        else {
            if (x[0] < list.farthest()) pending[count++ * WARP + lane_id()] = x[0];
            if (__any_sync(ALL_LANES, count == GROUP)) flush(list, pending, count, (R)INFINITY);
        }
    }
}

/* Second walk: a tile's rows within the limit. */
template <typename R, int D, typename L>
__device__ __forceinline__ void collect(const query<R, D> &q, const bound<D> &bounds, stage<R, D> &staged, int tile,
                                        R limit, L &list, int &count)
{
    unsigned        marks = mark(q, bounds, staged, tile, limit);
    place<R> *const pending = staged.pending[0];

    while (__any_sync(ALL_LANES, marks)) {
        if (marks) {
            R             distance;
            const int32_t row = meet(q, staged, tile, __ffs(marks) - 1, &distance);
            const auto    found = place<R>::of(distance, row);

            marks &= marks - 1;
            if (row >= 0 && !(distance > limit) && found.before(list.farthest())) pending[count++ * WARP + lane_id()] = found;
        }
        if (__any_sync(ALL_LANES, count == L::GROUP)) flush(list, pending, count, place<R>::empty());
    }
}

/* Calls look for the tiles of the set in turn: the own one (−1: the queries are other rows), those beside it, then groups of
 * 32 tiles outwards from there. From 32 tiles on each lane first asks about one tile of a group for the whole warp (its gap to
 * the box around all queries), then all lanes about those that remain: near(gap, tile) for the gap to this lane's query. */
template <typename R, int D, typename N, typename F>
__device__ __forceinline__ void walk(const query<R, D> &q, const R *around, int own, bool sorted, N near, F look)
{
    const int  tiles = (int)((q.count + WARP - 1) / WARP), groups = (tiles + WARP - 1) / WARP, middle = max(own, 0) / WARP;
    const bool asks = sorted && tiles > WARP;

    if (own >= 0) {
        look(own);
        if (sorted && own > 0) look(own - 1);
        if (sorted && own + 1 < tiles) look(own + 1);
    }
    for (int step = 0; step < 2 * groups; step++) {
        const int group = step & 1 ? middle - (step + 1) / 2 : middle + step / 2, mine = group * WARP + (int)lane_id();
        const int beside = sorted ? 1 : 0;
        bool      candidate = mine < tiles && (own < 0 || mine < own - beside || mine > own + beside);

        if (group < 0 || group >= groups) continue;
        if constexpr (D > 0)
            if (asks) {
                const R *const box = q.boxes + (int64_t)min(mine, tiles - 1) * 2 * D;
                const bool     reached = near(box_gap(around, around + D, box, D), mine, true);

                candidate = candidate && reached;
            }
        for (unsigned left = __ballot_sync(ALL_LANES, candidate); left; left &= left - 1) {
            const int      tile = group * WARP + __ffs(left) - 1;
            const R *const point = D > 0 ? q.x : q.where;

            if (!asks || __any_sync(ALL_LANES, near(box_gap(point, point, q.boxes + (int64_t)tile * 2 * q.columns(), q.columns()), tile, false)))
                look(tile);
        }
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
    R *const       distances = (R *)a.distance2.data;
    const int64_t  to = row_at(a.neighbours, a.query_sets, t.begin, t.set, row);
    const int64_t  distance_to = row_at(a.distance2, a.query_sets, t.begin, t.set, row);
    int32_t        count = 0;

    list.sort();
    list.each(a.k, [&](int64_t r, place<R> found) {
        const bool there = found.row() >= 0;

        count += there;
        if (neighbours) neighbours[to + r] = found.row();
        if (distances) distances[distance_to + r] = there ? found.distance2() : (R)INFINITY;
    });
    if (counts) counts[row_at(a.counts, a.query_sets, t.begin, t.set, row)] = count;
}

/* The largest value of any lane, for distances; NaN, which is no limit, counts as +inf. */
template <typename R> __device__ __forceinline__ R largest_of_warp(R x)
{
    x = x == x ? x : (R)INFINITY;
    for (int lanes = WARP / 2; lanes; lanes /= 2) x = fmax(x, __shfl_xor_sync(ALL_LANES, x, lanes));
    return x;
}

/* How far the k-th neighbour is; NaN where all rows, or all within the radius, are to be taken. */
template <int K, typename R, int D>
__device__ __forceinline__ R find_limit(const search_arguments<R> &a, const query<R, D> &q, const bound<D> &bounds,
                                        const R *around, int own, bool looks, stage<R, D> &staged)
{
    distance_list<R, K> list;
    int                 count = 0;

    list.clear(a.k, looks ? fmin(a.empty.distance2(), (R)INFINITY) : (R)-1);
    walk(
        q, around, own, a.sorted,
        [&](R gap, int, bool whole_warp) {
            return gap < (whole_warp ? largest_of_warp(list.farthest()) : list.farthest());
        },
        [&](int tile) { measure(q, bounds, staged, tile, list, count); });
    if constexpr (distance_list<R, K>::GROUP > 1)
        if (__any_sync(ALL_LANES, count)) flush(list, reinterpret_cast<R *>(staged.pending), count, (R)INFINITY);
    return list.farthest() < (R)INFINITY ? list.farthest() : (R)NAN;
}

template <int K, typename R, int D, typename L>
__device__ __forceinline__ void search_tile(const search_arguments<R> &a, int64_t item, stage<R, D> &staged, L &list)
{
    const tile t = tile_of(a.query_sets, WARP, item);

    if (t.first >= t.rows) return;
    const int64_t i = t.first + lane_id(), at = t.begin + (i < t.rows ? i : t.rows - 1);
    const int64_t begin = set_begin(a.sets, t.set), first = first_tile(a.sets, WARP, t.set);
    const int32_t number = a.queries.rows[at];
    const bool    looks = i < t.rows && number >= 0;
    const int     own = a.cross ? -1 : (int)(t.first / WARP);
    query<R, D>   q;
    bound<D>      bounds;
    R             around[2 * (D > 0 ? D : 1)], limit = NAN;
    int           count = 0;

    q.width = a.rows.width;
    q.rows = a.rows.points + begin * q.width;
    q.numbers = a.rows.rows + begin;
    q.boxes = a.rows.boxes + 2 * first * q.width;
    q.lowest = a.rows.lowest + first;
    q.where = a.queries.points + at * q.width;
    q.count = set_end(a.sets, t.set) - begin;
    q.self = a.exclude_self ? number : -1;
    if constexpr (D > 0) {
#pragma unroll
        for (int c = 0; c < D; c++) q.x[c] = q.where[c];
        bound_queries(q, looks, around);
        bounds.prepare(around, q.x);
    }
    if constexpr (K > 0) limit = find_limit<K>(a, q, bounds, around, own, looks, staged);
    list.clear(a.k, looks ? a.empty : place<R>::least()); /* least: nothing comes before */
    const R farthest = largest_of_warp(limit);
    walk(
        q, around, own, a.sorted,
        [&](R gap, int tile, bool whole_warp) {
            if (whole_warp) return !(gap > farthest);
            return !(gap > limit) && place<R>::of(gap, q.lowest[tile]).before(list.farthest());
        },
        [&](int tile) { collect(q, bounds, staged, tile, limit, list, count); });
    if (__any_sync(ALL_LANES, count)) flush(list, staged.pending[0], count, place<R>::empty());
    if (i >= t.rows) return;
    if (!looks) list.clear(a.k, place<R>::empty());
    write_list(a, t, number >= 0 ? number : ~number, list);
}

/* Blocks that a multiprocessor shall hold: more hide more latency, fewer leave more registers to the lists. */
constexpr int resident(int D, int K)
{
    return K <= 8 ? 5 : K <= 16 ? 4 : K <= 32 && D <= 4 ? 3 : 2;
}

template <typename R, int D, int K>
static __global__ void __launch_bounds__(WARPS *WARP, resident(D, K)) search_in_registers(const search_arguments<R> a)
{
    __shared__ stage<R, D> staged[WARPS];
    const int              warp = (int)threadIdx.x / WARP;
    const int64_t          item = (int64_t)blockIdx.x * WARPS + warp;
    register_list<R, K>    list;

    if (item < a.items) search_tile<K>(a, item, staged[warp], list);
}

template <typename R> static __global__ void __launch_bounds__(WARPS *WARP) search_in_heaps(const search_arguments<R> a)
{
    __shared__ stage<R, 0> staged[WARPS];
    const int              warp = (int)threadIdx.x / WARP;
    const int64_t          first = (int64_t)blockIdx.x * WARPS + warp;
    heap_list<R>           list = {a.heaps + first * a.heap_size * WARP + lane_id(), 0};

    for (int64_t item = first; item < a.items; item += (int64_t)gridDim.x * WARPS)
        search_tile<0>(a, item, staged[warp], list);
}

template <typename R, int D, int K>
static muvox_status launch(muvox_context *ctx, const char *op_name, const search_arguments<R> &a)
{
    search_in_registers<R, D, K><<<blocks_for(a.items, WARPS), WARPS * WARP, 0, stream_of(ctx)>>>(a);
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

template <typename R>
static muvox_status launch_heaps(muvox_context *ctx, const char *op_name, search_arguments<R> &a)
{
    const int64_t block_bytes = WARPS * WARP * a.k * (int64_t)sizeof(place<R>);
    const int64_t most = HEAP_BYTES / block_bytes < 1 ? 1 : HEAP_BYTES / block_bytes;
    const int64_t needed = blocks_for(a.items, WARPS), blocks = needed < most ? needed : most;
    workspace     heaps(ctx);

    FORWARD(heaps.take(op_name, blocks * block_bytes));
    a.heaps = heaps.as<place<R>>();
    a.heap_size = a.k;
    search_in_heaps<R><<<(unsigned)blocks, WARPS * WARP, 0, stream_of(ctx)>>>(a);
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
    const int64_t      d = request.coords.cols;
    const bool         fast = sizeof(R) == sizeof(float) && d <= 8 && request.k <= 64;
    const int          width = !fast ? (int)d : d <= 4 ? 4 : 8;
    const muvox_matrix none = {};
    workspace          queries_hold(ctx);
    search_arguments<R> a = {};

    a.sets = request.sets;
    a.query_sets = request.query_sets;
    a.k = request.k;
    a.items = tile_count(a.query_sets, WARP);
    a.cross = request.options & MUVOX_QUERIES;
    a.exclude_self = request.options & MUVOX_EXCLUDE_SELF;
    a.sorted = a.sets.splits || a.sets.size > UNSORTED_ROWS;
    a.empty = request.options & MUVOX_WITHIN_RADIUS ? beyond(request.max_radius * request.max_radius, R())
                                                    : place<R>::empty();
    a.neighbours = request.neighbours;
    a.distance2 = request.distance2;
    a.counts = request.counts;
    if (a.query_sets.rows == 0) return MUVOX_OK;
    FORWARD(order_rows<R>(ctx, op_name, a.sets, request.coords, request.mask, width, hold, &a.rows));
    if (order) *order = a.sorted ? a.rows.rows : nullptr;
    a.queries = a.rows;
    if (a.cross)
        FORWARD(order_rows<R>(ctx, op_name, a.query_sets, request.queries, none, width, &queries_hold, &a.queries));
    FORWARD(check_grid(ctx, op_name, (a.items + WARPS - 1) / WARPS));
    if constexpr (sizeof(R) == sizeof(float)) {
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
