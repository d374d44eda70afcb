/* What both searches share (search.cu keeps lists of whole distances, shortlist.cu of abbreviated ones): the query
 * of a lane, and which tiles its warp looks at.
 *
 * The distance to a box is computed with the same operations in the same order as a distance, each of which is
 * monotonic in floating point too, so it is never larger than the distance to a row inside: nothing is lost by
 * skipping. */
#ifndef MUVOX_CUDA_ITINERARY_H
#define MUVOX_CUDA_ITINERARY_H

#include "nearest.cuh"
#include "order.cuh"

enum { SEARCH_WARPS = 4, BATCH = 4 };

template <typename R> struct search_arguments {
    muvox_sets      sets, query_sets;
    ordered_rows<R> rows, queries;
    int64_t         k, items; /* items: tiles of queries */
    place<R>        empty;    /* what a list is filled with: nothing beyond the radius comes before it */
    bool            cross, exclude_self, sorted;
    muvox_output    neighbours, distance2, counts;
    place<R>       *heaps; /* (warps, k, 32), for lists that do not fit registers */
    const uint32_t *redo;  /* (items) the lanes of each tile of queries that look for neighbours; NULL: all do */
};

/* The query of a lane, and the set that its warp searches. */
template <typename R, int D> struct query {
    const R *rows, *boxes; /* of the set */
    const R *where;        /* the query's own coordinates */
    R        x[D > 0 ? D : 1];
    int64_t  count; /* rows of the set */
    int      width;
    int32_t  self; /* number of the row to leave out, or −1 */

    __device__ __forceinline__ int columns() const
    {
        return D > 0 ? D : width;
    }
    __device__ __forceinline__ R column(int c) const
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

/* distance² of two boxes, each (2, columns) lower and upper corner. NaN corners, of boxes of infinite rows, count as
 * near. */
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

/* Groups of 32 tiles or balls: the own one, then all others from the first on, because rows in one place are in the
 * order of their numbers, and of those the lower ones count. */
__device__ __forceinline__ int32_t group_of_step(int32_t step, int32_t own)
{
    return step == 0 ? own : step <= own ? step - 1 : step;
}

/* Which tiles to look at next: the own one, those beside it, then groups of 32 tiles. In a group each lane asks for the
 * whole warp about one tile, then all lanes, each for itself, about those that remain. */
template <typename R, int D> struct itinerary {
    enum { OWN = -3, BESIDE = -2, FAR = -1 }; /* steps before the groups, which count from 0 */
    const int32_t *lowest;
    const R       *around; /* box of the queries */
    int32_t        own;    /* −1: the queries are other rows */
    int32_t        tiles;
    bool           sorted;
    int32_t        step, middle; /* middle: the own group */
    unsigned       left;         /* tiles of the present group that have not been asked about */

    __device__ __forceinline__ itinerary(const search_arguments<R> &a, const query<R, D> &q, const tile &t,
                                         const R *around)
        : lowest(a.rows.lowest + first_tile(a.sets, WARP, t.set)), around(around),
          own(a.cross ? -1 : (int32_t)(t.first / WARP)), tiles((int32_t)((q.count + WARP - 1) / WARP)),
          sorted(a.sorted), step(a.cross ? FAR : OWN), middle(a.cross ? 0 : (int32_t)(t.first / WARP / WARP)), left(0)
    {
    }
    __device__ __forceinline__ bool near_own(int32_t tile) const
    {
        return own >= 0 && tile >= own - 1 && tile <= own + 1;
    }

    __device__ __forceinline__ int32_t group() const
    {
        return group_of_step(step, middle);
    }

    template <typename L> __device__ __forceinline__ unsigned candidates(const query<R, D> &q, const L &list) const
    {
        place<R> last = list.farthest();

        for (int lanes = WARP / 2; lanes; lanes /= 2) {
            const place<R> other = other_place(last, lanes);

            last = last.before(other) ? other : last;
        }
        const int32_t mine = group() * WARP + lane_id();
        bool          candidate = mine < tiles && !near_own(mine);

        if constexpr (D > 0)
            if (sorted && candidate) {
                const R gap = box_gap(around, around + D, q.boxes + (int64_t)2 * mine * D, D);

                candidate = place<R>::of(gap, lowest[mine]).before(last);
            }
        return __ballot_sync(ALL_LANES, candidate);
    }

    template <typename L> __device__ __forceinline__ bool worth(const query<R, D> &q, int32_t tile, const L &list) const
    {
        const R *const point = D > 0 ? q.x : q.where;
        const R        gap = box_gap(point, point, q.boxes + (int64_t)2 * tile * q.columns(), q.columns());

        return __any_sync(ALL_LANES, place<R>::of(gap, lowest[tile]).before(list.farthest()));
    }

    /* Fills the batch, which lies in shared memory (every lane writes the same); returns how many, 0 after the last. */
    template <typename L> __device__ __forceinline__ int next(const query<R, D> &q, const L &list, int32_t *batch)
    {
        const int32_t groups = (tiles + WARP - 1) / WARP;
        int           waiting = 0;

        __syncwarp();
        if (step == OWN) {
            step = BESIDE;
            batch[waiting++] = own;
        } else if (step == BESIDE) {
            step = FAR;
            if (own > 0) batch[waiting++] = own - 1;
            if (own + 1 < tiles) batch[waiting++] = own + 1;
        }
        if (!waiting)
            while (waiting < BATCH) {
                if (!left) {
                    if (++step >= groups) break;
                    left = candidates(q, list);
                    continue;
                }
                const int32_t tile = group() * WARP + __ffs(left) - 1;

                left &= left - 1;
                if (!sorted || worth(q, tile, list)) batch[waiting++] = tile;
            }
        __syncwarp();
        return waiting;
    }
};

#endif
