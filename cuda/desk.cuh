/* What a warp of shortlist.cu keeps in shared memory, and what becomes of it in the end. */
#ifndef MUVOX_CUDA_DESK_H
#define MUVOX_CUDA_DESK_H

#include "itinerary.cuh"
#include "keys.cuh"
#include "marks.cuh"
#include "shortlist.cuh"

enum { WORDS = 2, BALLS_AT_ONCE = WORDS * BALLS };

/* What a warp keeps in shared memory: what it looks at, 32 rows or balls for a word of marks, and in the end its
 * results. */
template <int D, int L> struct __align__(16) desk
{
    static constexpr bool WAITS = L > 12; /* short lists take candidates one by one, others a group at a time */
    static constexpr int  STRIDE = L | 1; /* odd: no two lanes meet in a bank */
    union {
        struct {
            float            rows[WORDS * WARP * D]; /* as they are */
            marked_points<D> points[WORDS];
            int32_t          numbers[WORDS * WARP];                /* of the rows, −1 for those that take no part */
            uint32_t         marks[WORDS * WARP];                  /* of each lane, the first row at the top */
            uint32_t         present[WORDS];                       /* which rows take part */
            uint32_t         candidates[WAITS ? GROUP * WARP : 1]; /* number g of each lane at g · WARP */
        };
        struct {
            uint32_t keys[WARP * STRIDE]; /* then numbers; rank r of each lane at lane · STRIDE + r */
            uint32_t distances[WARP * STRIDE];
        };
    };
    int32_t            balls[BALLS_AT_ONCE];
    float              middle[D]; /* of the queries */
    marking_queries<D> queries;
    /* The set. Here, as registers are few. */
    const float   *set_rows, *centres, *radii; /* centres NULL: every row is looked at */
    const int32_t *set_numbers, *lowest_in_ball;
    int32_t        count;
};

/* The query of a lane. */
template <int D> struct seeker {
    query<float, D> q;
    int32_t         self;        /* number of the own row */
    bool self_out, looks, marks; /* whether that is left out; whether this lane has a query, and marks rows for it */
};

/* Lays the list on the desk, in the order of whole distances. */
template <int D, int L>
__device__ __forceinline__ void settle(const seeker<D> &s, const muvox_matrix &coords, int64_t first,
                                       const shortlist<L> &list, desk<D, L> &on)
{
    uint32_t *const numbers = on.keys + lane_id() * desk<D, L>::STRIDE;
    uint32_t *const distances = on.distances + lane_id() * desk<D, L>::STRIDE;
    uint32_t        farthest = 0, farthest_number = 0;

    __syncwarp();
#pragma unroll
    for (int r = 0; r < L; r++) numbers[r] = s.looks ? list.keys[r] : NO_KEY;
#pragma unroll 1
    for (int r = 0; r < L; r++) {
        const bool     full = numbers[r] != NO_KEY;
        const uint32_t number = full ? numbers[r] & list.number_mask : NO_KEY;
        const int64_t  at = first + (int64_t)number * coords.row_stride;
        float          p[D];

#pragma unroll
        for (int c = 0; c < D; c++)
            p[c] = full && c < coords.cols ? load<float>(coords.data, coords.dtype, at + c) : 0.f;
        const uint32_t distance = full ? __float_as_uint(s.q.distance2(p)) : NO_KEY;
        int            to = r;

        if (distance < farthest || (distance == farthest && number < farthest_number)) /* seldom */
            for (; to > 0; to--) {
                const uint32_t other = distances[to - 1], other_number = numbers[to - 1];

                if (other < distance || (other == distance && other_number < number)) break;
                distances[to] = other;
                numbers[to] = other_number;
            }
        else {
            farthest = distance;
            farthest_number = number;
        }
        distances[to] = distance;
        numbers[to] = number;
    }
    __syncwarp();
}

/* Writes what lies on the desk: lanes write what lies together. */
template <int D, int L>
__device__ __forceinline__ void write_nearest(const search_arguments<float> &a, const tile &t, int32_t row, bool there,
                                              uint32_t radius, const desk<D, L> &on)
{
    const int     k = (int)a.k, places = t.rows - t.first < WARP ? (int)(t.rows - t.first) * k : WARP * k;
    const int     i_step = WARP / k, r_step = WARP % k;
    const int64_t neighbours_at = row_at(a.neighbours, a.query_sets, t.begin, t.set, row);
    const int64_t distances_at = row_at(a.distance2, a.query_sets, t.begin, t.set, row);
    uint32_t     *neighbours = static_cast<uint32_t *>(a.neighbours.data), *distances = (uint32_t *)a.distance2.data;
    int           i = (int)lane_id() / k, r = (int)lane_id() - i * k;

#pragma unroll 1
    for (int n = (int)lane_id(); n - (int)lane_id() < places; n += WARP) {
        const int      at = (n < places ? i : 0) * desk<D, L>::STRIDE + r;
        const uint32_t number = on.keys[at], distance = on.distances[at];
        const bool     near = distance <= radius && number != NO_KEY;

        if (neighbours) {
            const int64_t to = __shfl_sync(ALL_LANES, neighbours_at, i) + r;

            if (n < places) neighbours[to] = near ? number : NO_KEY;
        }
        if (distances) {
            const int64_t to = __shfl_sync(ALL_LANES, distances_at, i) + r;

            if (n < places) distances[to] = near ? distance : INFINITY_BITS;
        }
        r += r_step;
        i += i_step;
        if (r >= k) {
            r -= k;
            i++;
        }
    }
    if (a.counts.data && there) {
        int32_t count = 0;

        for (int rank = 0; rank < k; rank++) {
            const int at = (int)lane_id() * desk<D, L>::STRIDE + rank;

            count += on.distances[at] <= radius && on.keys[at] != NO_KEY;
        }
        static_cast<int32_t *>(a.counts.data)[row_at(a.counts, a.query_sets, t.begin, t.set, row)] = count;
    }
}

/* Looks at all rows again for each of these lanes, all lanes together, as keys may have left something out, and puts
 * right what lies on the desk for it. Returns for which of them it could: those with no more than 32 rows up to the
 * place of their k-th. */
template <int D, int L>
__device__ __forceinline__ unsigned complete(const seeker<D> &s, unsigned lanes, int k, desk<D, L> &on)
{
    uint32_t *const distances = on.queries.high[0], *const numbers = on.queries.low[0]; /* nobody marks any more */
    unsigned complete = 0;

#pragma unroll 1
    for (; lanes; lanes &= lanes - 1) {
        const int       of = __ffs((int)lanes) - 1, first = of * desk<D, L>::STRIDE;
        const uint32_t  distance = on.distances[first + k - 1], number = on.keys[first + k - 1];
        const int32_t   self = __shfl_sync(ALL_LANES, s.self, of);
        query<float, D> q;
        int             count = 0;

#pragma unroll
        for (int c = 0; c < D; c++) q.x[c] = __shfl_sync(ALL_LANES, s.q.x[c], of);
        for (int32_t i = (int32_t)lane_id(); i - (int32_t)lane_id() < on.count; i += WARP) {
            const int32_t at = min(i, on.count - 1), here = i < on.count ? on.set_numbers[at] : -1;
            float         row[D];

            load_point(on.set_rows + at * D, row);
            const uint32_t bits = __float_as_uint(q.distance2(row));
            const bool     near = here >= 0 && !(s.self_out && here == self) &&
                              (bits < distance || (bits == distance && (uint32_t)here <= number));
            const unsigned all = __ballot_sync(ALL_LANES, near);
            const int      to = count + __popc(all & ((1u << lane_id()) - 1));

            if (near && to < WARP) {
                distances[to] = bits;
                numbers[to] = (uint32_t)here;
            }
            count += __popc(all);
        }
        __syncwarp();
        if (count >= k && count <= WARP) {
            const bool     mine = (int)lane_id() < count;
            const uint32_t bits = distances[lane_id()], here = numbers[lane_id()];
            int            rank = 0;

            for (int n = 0; n < count; n++) rank += distances[n] < bits || (distances[n] == bits && numbers[n] < here);
            if (mine && rank < k) {
                on.distances[first + rank] = bits;
                on.keys[first + rank] = here;
            }
            complete |= 1u << of;
        }
        __syncwarp();
    }
    return complete;
}

#endif
