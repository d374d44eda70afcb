#include "shortlist.cuh"

#include "desk.cuh"

/* How this search goes. A warp takes a tile of 32 queries, one for each lane, and keeps for each the L nearest rows
 * by key (see keys.cuh), some more than k. Keys never put a row before one that is nearer, except among distances
 * that differ only in the bits left out; so the k nearest rows are in the list, unless the k-th and the last are
 * alike in the bits that are there. Whole distances of what is in the list give the result, and say whether that was
 * so; if not, all rows are looked at again, or, if that is too much, the query is left to the other search.
 *
 * All rows of the own tile and of those beside it are taken; for a query far from the others of its warp all rows
 * there are, by all lanes together, as it would mark most of them. Of the others each lane finds the balls of 8 rows
 * that reach into its own limit; rows of balls that some lane needs are gathered, each lane marks those within its
 * limit (see marks.cuh) and takes what it marked. */
/* Puts the rows of a tile on the desk as they are. */
template <int D, int L> __device__ __forceinline__ void put_tile(int32_t tile, desk<D, L> &on)
{
    const int32_t i = tile * WARP + (int32_t)lane_id(), here = min(i, on.count - 1);
    float         p[D];

    load_point(on.set_rows + here * D, p);
    const int32_t number = on.set_numbers[here];
    __syncwarp();
    store_point(on.rows + lane_id() * D, p);
    on.numbers[lane_id()] = i < on.count && number < on.count ? max(number, -1) : -1;
    __syncwarp();
}

/* Candidates from 16 rows of such a tile. */
template <int D, int L>
__device__ __forceinline__ void take_all(const seeker<D> &s, int first, const desk<D, L> &on, const shortlist<L> &list,
                                         uint32_t (&keys)[GROUP])
{
#pragma unroll
    for (int g = 0; g < GROUP; g += 4) {
        const int4 numbers = *reinterpret_cast<const int4 *>(on.numbers + first + g);
        const int  number[4] = {numbers.x, numbers.y, numbers.z, numbers.w};

#pragma unroll
        for (int n = 0; n < 4; n++) {
            float row[D];

            load_point(on.rows + (first + g + n) * D, row);
            keys[g + n] = list.key(s.q.distance2(row), (uint32_t)number[n]); /* NO_KEY of −1 */
        }
    }
    if (s.self_out)
#pragma unroll
        for (int g = 0; g < GROUP; g++)
            if (on.numbers[first + g] == s.self) keys[g] = NO_KEY;
}

/* Which of the 32 balls from `first` on some lane needs, the first at bit 0. */
template <int D, int L>
__device__ __forceinline__ unsigned needed_balls(const seeker<D> &s, int32_t first, desk<D, L> &on,
                                                 const shortlist<L> &list)
{
    const int32_t mine = first + (int32_t)lane_id();
    const bool    there = mine < (on.count + BALL_ROWS - 1) / BALL_ROWS;

    if (!on.centres) return __ballot_sync(ALL_LANES, there);
    const float radius = there ? on.radii[mine] : -1.f;
    float       centre[D];

    load_point(on.centres + (there ? mine : 0) * D, centre);
    __syncwarp();
    on.points[0].put(centre, on.middle, !(radius < 0), radius < 0 ? 0.f : radius);
    __syncwarp();
    const unsigned near = __brev(marking<true, D>(on.queries, list.limit()).within(on.points[0]));
    return __reduce_or_sync(ALL_LANES, s.marks ? near : 0) & __ballot_sync(ALL_LANES, there); /* NaN limits mark all */
}

/* Of these balls from `first` on, those whose rows lie in one place have one distance, and come in by their lowest
 * number or not at all: without those that do not. */
template <int D, int L>
__device__ __forceinline__ unsigned without_ties(const seeker<D> &s, int32_t first, unsigned balls,
                                                 const desk<D, L> &on, const shortlist<L> &list)
{
    const int32_t mine = first + (int32_t)lane_id();
    const bool    one_place = (balls >> lane_id() & 1) && on.radii[mine] == 0;

    for (unsigned left = __ballot_sync(ALL_LANES, one_place); left; left &= left - 1) {
        const int b = __ffs((int)left) - 1;
        float     centre[D];

        load_point(on.centres + (first + b) * D, centre);
        const uint32_t best = list.key(s.q.distance2(centre), (uint32_t)on.lowest_in_ball[first + b]);
        if (!__any_sync(ALL_LANES, s.marks && best < list.keys[L - 1])) balls &= ~(1u << b);
    }
    return balls;
}

/* Puts the rows of `waiting` balls on the desk and marks those that may be near enough. Returns in which words this
 * lane has some. */
template <int D, int L>
__device__ __forceinline__ unsigned mark_rows(const seeker<D> &s, int waiting, desk<D, L> &on, const shortlist<L> &list)
{
    const int lane = (int)lane_id();
    unsigned  words = 0;

    __syncwarp();
#pragma unroll 2
    for (int w = 0; w * BALLS < waiting; w++) {
        const int     ball = w * BALLS + lane / BALL_ROWS;
        const int32_t i = ball < waiting ? on.balls[ball] * BALL_ROWS + lane % BALL_ROWS : on.count;
        const int32_t number = i < on.count ? on.set_numbers[i] : -1;
        const bool    there = number >= 0 && number < on.count;
        float         p[D];

        load_point(on.set_rows + (there ? i : 0) * D, p);
        store_point(on.rows + (w * WARP + lane) * D, p);
        on.points[w].put(p, on.middle, there, 0.f);
        on.numbers[w * WARP + lane] = number;
        const unsigned present = __brev(__ballot_sync(ALL_LANES, there));
        if (lane == 0) on.present[w] = present;
    }
    __syncwarp();
    const marking<false, D> marking(on.queries, list.limit());
#pragma unroll 1
    for (int w = 0; w * BALLS < waiting; w++) {
        const unsigned within = marking.within(on.points[w]) & on.present[w], near = s.marks ? within : 0;

        on.marks[w * WARP + lane] = near;
        words |= near ? 1u << w : 0;
    }
    return words;
}

/* What remains of a search: the groups of 32 balls, the own one and then from the first on, the balls of the present
 * group that are needed, and the marks of what lies on the desk. */
struct remains {
    int32_t  first_tile, last_tile, groups, middle, step;
    unsigned balls, words, marks;
    int      last_row; /* of the marked word */

    __device__ __forceinline__ int32_t group() const
    {
        return group_of_step(step, middle);
    }

    /* Puts the next balls on the desk's list; returns how many, 0 after the last. */
    template <int D, int L>
    __device__ __forceinline__ int next_balls(const seeker<D> &s, desk<D, L> &on, const shortlist<L> &list)
    {
        for (;;) {
            if (balls && on.centres) balls = without_ties(s, group() * WARP, balls, on, list);
            if (balls) break;
            if (++step >= groups) return 0;
            const int32_t mine = group() * WARP + (int32_t)lane_id(), tile = mine / BALLS;

            balls = needed_balls(s, group() * WARP, on, list) &
                    ~__ballot_sync(ALL_LANES, tile >= first_tile && tile <= last_tile);
        }
        const int  rank = __popc(balls & ((1u << lane_id()) - 1));
        const bool taken = (balls >> lane_id() & 1) && rank < BALLS_AT_ONCE;

        __syncwarp();
        if (taken) on.balls[rank] = group() * WARP + (int32_t)lane_id();
        const unsigned all = __ballot_sync(ALL_LANES, taken);
        balls &= ~all;
        return __popc(all);
    }

    /* The key of the next row that this lane marked, NO_KEY if there is none. */
    template <int D, int L>
    __device__ __forceinline__ uint32_t next_key(const seeker<D> &s, const desk<D, L> &on, const shortlist<L> &list)
    {
        if (!marks && words) {
            const int word = __ffs((int)words) - 1;

            words &= words - 1;
            marks = on.marks[word * WARP + lane_id()];
            last_row = word * WARP + WARP - 1;
        }
        const int bit = marks ? 31 - __clz((int)marks) : 0, row = last_row - bit;
        float     x[D];

        load_point(on.rows + row * D, x);
        const uint32_t number = (uint32_t)on.numbers[row];
        const bool     takes = marks && !(s.self_out && number == (uint32_t)s.self);
        marks &= ~(1u << bit);
        return takes ? list.key(s.q.distance2(x), number) : NO_KEY;
    }
};

/* Candidates from the marks, until some lane has a group of them or the desk is empty. Returns false when nothing is
 * left at all. Short lists take everything here. */
template <int D, int L>
__device__ __forceinline__ bool take_marked(const seeker<D> &s, remains &rest, desk<D, L> &on, shortlist<L> &list,
                                            uint32_t (&keys)[GROUP])
{
    int count = 0;

    for (;;) {
        if (!__any_sync(ALL_LANES, rest.marks | rest.words)) {
            if (desk<D, L>::WAITS && __any_sync(ALL_LANES, count)) break;
            const int waiting = rest.next_balls(s, on, list);

            if (!waiting) return false;
            rest.words = mark_rows(s, waiting, on, list);
            continue;
        }
        const uint32_t key = rest.next_key(s, on, list);
        if constexpr (desk<D, L>::WAITS) {
            if (key < list.keys[L - 1]) on.candidates[count++ * WARP + lane_id()] = key;
            if (__any_sync(ALL_LANES, count == GROUP)) break;
        } else
            list.insert(key);
    }
    if constexpr (desk<D, L>::WAITS)
#pragma unroll
        for (int g = 0; g < GROUP; g++) keys[g] = g < count ? on.candidates[g * WARP + lane_id()] : NO_KEY;
    return true;
}

/* A query is far from the others if its limit is so many times theirs, and they are few. */
static constexpr float FAR = 256;
enum { MOST_FAR = 4 };

/* Takes, for each query that is far from the others, the rows of all tiles but the first ones. */
template <int D, int L>
__device__ __forceinline__ void take_far(seeker<D> &s, int32_t first_tile, int32_t last_tile, const desk<D, L> &on,
                                         shortlist<L> &list)
{
    const float limit = s.looks ? list.limit() : NAN;
    const bool  beyond = limit > FAR * middle_of_lanes(limit),
               far = __popc(__ballot_sync(ALL_LANES, beyond)) <= MOST_FAR && beyond;

    s.marks = s.looks && !far;
#pragma unroll 1
    for (unsigned lanes = __ballot_sync(ALL_LANES, far); lanes; lanes &= lanes - 1) {
        const int       of = __ffs((int)lanes) - 1;
        const int32_t   self = __shfl_sync(ALL_LANES, s.self, of);
        query<float, D> q;

#pragma unroll
        for (int c = 0; c < D; c++) q.x[c] = __shfl_sync(ALL_LANES, s.q.x[c], of);
#pragma unroll 1
        for (int32_t tile = 0; tile * WARP < on.count; tile++) {
            const int32_t i = tile * WARP + (int32_t)lane_id(), here = min(i, on.count - 1);
            const int32_t number = on.set_numbers[here];
            float         row[D];

            if (tile >= first_tile && tile <= last_tile) continue;
            load_point(on.set_rows + here * D, row);
            const bool     takes = i < on.count && number >= 0 && number < on.count && !(s.self_out && number == self);
            const uint32_t key = takes ? list.key(q.distance2(row), (uint32_t)number) : NO_KEY;

            for (unsigned near = __ballot_sync(ALL_LANES, key < __shfl_sync(ALL_LANES, list.keys[L - 1], of)); near;
                 near &= near - 1) {
                const uint32_t next = __shfl_sync(ALL_LANES, key, __ffs((int)near) - 1);

                list.insert((int)lane_id() == of ? next : NO_KEY);
            }
        }
    }
}

/* The tile whose ball is nearest to the middle of the queries. */
template <int D, int L> __device__ __forceinline__ int32_t nearest_tile(const desk<D, L> &on)
{
    const int32_t balls = (on.count + BALL_ROWS - 1) / BALL_ROWS;
    float         nearest = INFINITY;
    int32_t       tile = 0;

    for (int32_t b = (int32_t)lane_id(); on.centres && b < balls; b += WARP) {
        float centre[D], distance = 0;

        load_point(on.centres + b * D, centre);
#pragma unroll
        for (int c = 0; c < D; c++) {
            const float x = centre[c] - on.middle[c];

            distance = fused(x, x, distance);
        }
        if (!(on.radii[b] < 0) && distance < nearest) {
            nearest = distance;
            tile = b / BALLS;
        }
    }
    for (int lanes = WARP / 2; lanes; lanes /= 2) {
        const float   other = __shfl_xor_sync(ALL_LANES, nearest, lanes);
        const int32_t other_tile = __shfl_xor_sync(ALL_LANES, tile, lanes);

        if (other < nearest || (other == nearest && other_tile < tile)) {
            nearest = other;
            tile = other_tile;
        }
    }
    return tile;
}

/* Rows, for all lanes of a warp together, beyond which the other search is as fast. */
enum { LOOKED_AT_AGAIN = 16384 };

/* Blocks on a multiprocessor: the registers that a list leaves. */
static constexpr int resident_blocks(int D, int L)
{
    return L <= 12 ? (D <= 4 ? 7 : 6) : L <= 20 ? (D <= 4 ? 6 : 5) : D <= 4 ? 5 : 4;
}

template <int D, int L>
static __global__ void __launch_bounds__(SEARCH_WARPS *WARP, resident_blocks(D, L))
    search_shortlists(const search_arguments<float> a, const muvox_matrix coords, uint32_t *redo)
{
    __shared__ __align__(16) desk<D, L> desks[SEARCH_WARPS];
    desk<D, L>                         &on = desks[threadIdx.x / WARP];
    const int64_t                       item = (int64_t)blockIdx.x * SEARCH_WARPS + threadIdx.x / WARP;

    if (item >= a.items) return;
    const tile t = tile_of(a.query_sets, WARP, item);
    if (t.first >= t.rows) {
        if (lane_id() == 0) redo[item] = 0;
        return;
    }
    const int64_t i = t.first + lane_id(), at = t.begin + (i < t.rows ? i : t.rows - 1);
    const int64_t begin = set_begin(a.sets, t.set), first = first_tile(a.sets, WARP, t.set);
    const int64_t count = set_end(a.sets, t.set) - begin;
    const int32_t number = row_number(a.queries.rows[at], t.rows);
    const int     bits = count > 1 ? 64 - __clzll(count - 1) : 1;
    seeker<D>     s;
    shortlist<L>  list;
    remains       rest = {};

    if (bits > SHORTLIST_BITS) {
        if (lane_id() == 0) redo[item] = ~0u;
        return;
    }
    on.set_rows = a.rows.points + begin * D;
    on.set_numbers = a.rows.rows + begin;
    on.centres = a.rows.centres ? a.rows.centres + first * BALLS * D : nullptr;
    on.radii = a.rows.radii + first * BALLS;
    on.lowest_in_ball = a.rows.lowest_in_ball + first * BALLS;
    on.count = (int32_t)count;
    s.self = number;
    s.self_out = a.exclude_self;
    s.looks = i < t.rows && number >= 0;
    load_point(a.queries.points + at * D, s.q.x);
    list.number_mask = (1u << bits) - 1;
    list.radius = (uint32_t)(a.empty.bits >> 32);
#pragma unroll
    for (int r = 0; r < L; r++) list.keys[r] = s.looks ? NO_KEY : 0;
    float from_middle[D];
#pragma unroll
    for (int c = 0; c < D; c++) {
        on.middle[c] = middle_of_lanes(s.looks ? s.q.x[c] : (float)NAN);
        from_middle[c] = s.q.x[c] - on.middle[c];
    }
    on.queries.put(from_middle);
    __syncwarp();

    const int32_t tiles = (on.count + WARP - 1) / WARP, own = a.cross ? nearest_tile(on) : (int32_t)(t.first / WARP);
    rest.first_tile = max(own - 1, 0);
    rest.last_tile = min(own + 1, tiles - 1);
    rest.groups = (tiles * BALLS + WARP - 1) / WARP;
    rest.middle = own * BALLS / WARP;
    rest.step = -1;
    for (int32_t next = rest.first_tile * WARP, end = min((rest.last_tile + 1) * WARP, on.count);;) {
        uint32_t keys[GROUP];

        if (next < end) {
            if (next % WARP == 0) put_tile(next / WARP, on);
            take_all(s, next % WARP, on, list, keys);
            next += GROUP;
        } else {
            if (rest.step < 0) take_far(s, rest.first_tile, rest.last_tile, on, list);
            if (!take_marked(s, rest, on, list, keys)) break;
        }
        list.merge(keys);
    }

    settle(s, coords, row_at(coords, a.sets, begin, t.set, 0), list, on);
    /* Rows that were left out have no lesser key than the last; of equal bits, a distance whose other bits are 0 is
     * the least, and the numbers of its ties are in order. */
    const uint32_t mask = list.number_mask, last = list.keys[L - 1];
    const uint32_t kth = on.distances[lane_id() * desk<D, L>::STRIDE + (int)a.k - 1];
    const bool known = !s.looks || last == NO_KEY || (kth & ~mask) < (last & ~mask) || !(kth & mask) || kth == NAN_BITS;
    unsigned   unknown = __ballot_sync(ALL_LANES, !known);
    if (__popc(unknown) * on.count <= LOOKED_AT_AGAIN) unknown &= ~complete(s, unknown, (int)a.k, on);
    write_nearest(a, t, number >= 0 ? number : ~number, i < t.rows, list.radius, on);
    if (lane_id() == 0) redo[item] = unknown;
}

template <int D, int L>
static muvox_status launch(muvox_context *ctx, const char *op_name, const search_arguments<float> &a,
                           const muvox_matrix &coords, uint32_t *redo)
{
    search_shortlists<D, L>
        <<<blocks_for(a.items, SEARCH_WARPS), SEARCH_WARPS * WARP, 0, stream_of(ctx)>>>(a, coords, redo);
    LAUNCHED();
    return MUVOX_OK;
}

template <int D>
static muvox_status launch_list(muvox_context *ctx, const char *op, const search_arguments<float> &a,
                                const muvox_matrix &coords, uint32_t *redo)
{
    if (a.k <= 8) return launch<D, 10>(ctx, op, a, coords, redo);
    if (a.k <= 16) return launch<D, 19>(ctx, op, a, coords, redo);
    if (a.k <= 25) return launch<D, 28>(ctx, op, a, coords, redo);
    return launch<D, SHORTLIST_K + 3>(ctx, op, a, coords, redo);
}

muvox_status search_by_shortlist(muvox_context *ctx, const char *op, const search_arguments<float> &a,
                                 const muvox_matrix &coords, uint32_t *redo)
{
    if (a.rows.width == 4) return launch_list<4>(ctx, op, a, coords, redo);
    return launch_list<8>(ctx, op, a, coords, redo);
}
