/* The gradients of aggregation over the neighbours of each row, all from the side of the rows that are picked: dm of
 * a place is made once, and gives that place's part of the gradient of the features and, against the row's own
 * features, the gradient of the weight. */
#ifndef MUVOX_CUDA_AGGREGATE_BACKWARD_H
#define MUVOX_CUDA_AGGREGATE_BACKWARD_H

#include "aggregate.cuh"
#include "reverse.cuh"

/* Stands for the type of winners where each place has a word of bits: the features of whose maximum it is the
 * winner. A place is the winner of few features, or of none: only their gradients are read then. */
struct winner_bits {
};

/* Features and neighbours up to which there are such words, one for each lane. */
enum { MOST_BITS = WARP };

/* What a row knows about its places, one thread for each row. shares, unless null: 1 over what its mean divides by;
 * 0 where there is no neighbour, and no gradient either. bits (N, k), unless null: see winner_bits. Places without
 * neighbour get their gradient of weights here, as no row picks them up. */
template <typename R, typename W, typename S>
__global__ void prepare_rows(const aggregate_arguments<W> a, R *shares, uint32_t *bits, const S set_dw)
{
    __shared__ uint32_t words[MOST_BITS][THREADS + 1]; /* rank r of the block's row t at words[r][t] */
    const int           F = (int)a.feats.cols, thread = (int)threadIdx.x;
    const int64_t       first = (int64_t)blockIdx.x * THREADS;
    row_place           at;
    int                 count = 0;

    for (int r = 0; bits && r < a.k; r++) words[r][thread] = 0;
    if (group_row<1>(a.sets, nullptr, &at)) {
        const int32_t *const near = set_rows<const int32_t>(a.neighbours, a.sets, at.begin, at.set)[at.i];

        for (int r = 0; r < a.k; r++)
            if (outside(at, __ldg(near + r)))
                set_dw.without_neighbour(a, at, r);
            else
                count++;
        if (shares) shares[at.row] = count == 0 ? (R)0 : a.mean_by_k ? 1 / (R)a.k : 1 / (R)count;
        if (bits) {
            const uint8_t *const winners =
                set_rows<const uint8_t>(a.winners, a.sets, at.begin, at.set)[at.i] + a.columns.max_winner * F;

            for (int f = 0; f < F; f++) {
                const int r = __ldg(winners + f);

                if (r < a.k) words[r][thread] |= 1u << f; /* 255: none */
            }
        }
    }
    if (!bits) return;
    __syncthreads();
    const int rows = a.sets.rows - first < THREADS ? (int)(a.sets.rows - first) : (int)THREADS;
    for (int n = thread; n < rows * a.k; n += THREADS) bits[first * a.k + n] = words[n % a.k][n / a.k];
}

/* Lanes in groups of LANES add up COUNT numbers each: the result of a lane is the sum of number lane / SPACING %
 * COUNT. */
template <int COUNT, int SPACING, int LANES, typename R> __device__ __forceinline__ R sums_of_lanes(R (&x)[COUNT])
{
#pragma unroll
    for (int half = COUNT / 2; half; half /= 2) {
        const bool upper = lane_id() & (unsigned)(half * SPACING);

#pragma unroll
        for (int n = 0; n < half; n++) {
            const R kept = upper ? x[n + half] : x[n], sent = upper ? x[n] : x[n + half];

            x[n] = kept + __shfl_xor_sync(ALL_LANES, sent, half * SPACING);
        }
    }
#pragma unroll
    for (int step = LANES / 2; step; step /= 2)
        if (!(step & (COUNT - 1) * SPACING)) x[0] += __shfl_xor_sync(ALL_LANES, x[0], step);
    return x[0];
}

/* reverse_list of either width of places, as the kernel below is large and reads a place once. */
struct any_reverse_list {
    const void    *places;
    const int64_t *begins, *ends;
    int            bits;
    bool           wide;
    template <typename P>
    any_reverse_list(const reverse_list<P> &list)
        : places(list.places), begins(list.begins), ends(list.ends), bits(list.bits), wide(sizeof(P) == 8)
    {
    }
    __device__ __forceinline__ uint64_t place(int64_t e) const
    {
        return wide ? __ldg(static_cast<const uint64_t *>(places) + e)
                    : __ldg(static_cast<const uint32_t *>(places) + e);
    }
};

/* What all lanes of a group need of a place: its row i, its rank or winner_bits, its weight, and that row's share of
 * the mean. */
template <typename R> struct alignas(sizeof(R) == sizeof(float) ? 16 : 8) place_data {
    int      i;
    unsigned rank_or_bits;
    R        weight, share;
};

/* How many bytes rows lie apart. */
struct bytes_apart {
    int feats, grads, winners, grad_feats;
};

/* Places that a group deals with in one batch. */
enum { PLACES = 8 };

/* What the lanes of a warp say to each other, and where the set of its row lies. Lane l adds the parts of place l %
 * PLACES that the 8 lanes around it left in parts[l % PLACES], padded so that neither side waits for banks. */
template <typename T, typename RANK, typename W, typename S> struct warp_data {
    using R = wide_t<T>;
    static constexpr int PART = WARP + 16 / (int)sizeof(R);
    place_data<R>        places[WARP];
    alignas(16) R parts[PLACES][PART];
    typename W::in_set weight;
    typename S::in_set set_dw;
    const T           *feats, *grads, *mean, *max; /* mean, max: their columns of grads */
    const RANK        *winners, *max_winners;
    T                 *grad_feats;
    const R           *shares;
    const uint32_t    *bits;
    __device__ void    move_to(const aggregate_arguments<W> &a, const S &set_dw_of_all, const R *shares_of_all,
                               const uint32_t *bits_of_all, const row_place &at)
    {
        const int F = (int)a.feats.cols;

        weight = a.weight.of(at);
        set_dw = set_dw_of_all.of(a, at);
        feats = set_rows<const T>(a.feats, a.sets, at.begin, at.set).first;
        grads = set_rows<const T>(a.grad_out, a.sets, at.begin, at.set).first;
        mean = grads + a.columns.mean * F;
        max = grads + a.columns.max * F;
        winners = set_rows<const RANK>(a.winners, a.sets, at.begin, at.set).first;
        max_winners = winners + a.columns.max_winner * F;
        grad_feats = set_rows<T>(a.grad_feats, a.sets, at.begin, at.set).first;
        shares = shares_of_all + at.begin;
        bits = bits_of_all + at.begin * a.k;
    }
};

/* One warp for each row j. The places that hold it are dealt out to the groups of lanes in turn, so the sums over
 * them are
 *
 *     grad_feats[j,f] = Σ_group Σ w[i,r] dm[i,r,f]      dw[i,r] = Σ_f dm[i,r,f] feats[j,f]
 *
 * RANK is the type of the winners, or winner_bits. set_dw takes dw, and adds up what else is wanted. MEAN_MAX: these
 * two, and no other aggregate. */
template <typename T, int G, int NF, typename RANK, bool MEAN_MAX, typename W, typename S>
__global__ void __launch_bounds__(BLOCK, BLOCKS_AT_ONCE<wide_t<T>>)
    row_gradients(const aggregate_arguments<W> a, const wide_t<T> *shares, const uint32_t *bits,
                  const any_reverse_list list, const S set_dw, const bytes_apart bytes, int run)
{
    using R = wide_t<T>;
    constexpr int  GROUPS = WARP / G;
    constexpr bool BITS = std::is_same<RANK, winner_bits>::value;
    __shared__ warp_data<T, RANK, W, S> shared[BLOCK / WARP];
    warp_data<T, RANK, W, S>           &own = shared[threadIdx.x / WARP];
    const int                           lane = (int)(lane_id() % G), group = (int)(lane_id() / G);
    const int                           F = (int)a.feats.cols;
    const bool                          mean = MEAN_MAX || a.columns.mean >= 0, max = MEAN_MAX || a.columns.max >= 0;
    const bool                          others = !MEAN_MAX && (a.columns.sum >= 0 || a.columns.absmax >= 0);
    const bool                          wants_dw = set_dw.wanted();
    const int64_t                       first_place = (int64_t)blockIdx.x * run + threadIdx.x / WARP;
    row_place                           to = {};

    for (int turn = 0; turn < run; turn += BLOCK / WARP) {
        const int64_t before = to.rows ? to.begin : -1;

        if (!find_row(a.sets, a.order, first_place + turn, &to)) continue; /* the whole warp */
        if (to.begin != before) {
            __syncwarp();
            if (lane_id() == 0) own.move_to(a, set_dw, shares, bits, to);
            __syncwarp();
        }
        const int64_t    end = list.ends[to.row];
        const R          row_weight = own.weight.row_weight(to.i);
        const T *const   feats = row_of(own.feats + lane, to.i, bytes.feats);
        typename S::sums sums = {};
        bool             there; /* whether this lane has a place of the batch, and which */
        int              i = 0, r = 0, count;
        R                decay = 0;
        four<R>          first_four = {};

        /* The batch from place e0 on: what its places are, and how many are this group's. */
        const auto find_places = [&](int64_t e0) {
            const int left = (int)(end - e0 < GROUPS * PLACES ? end - e0 : GROUPS * PLACES);
            const int n = GROUPS * (lane % PLACES) + group;
            R         share = 0;
            unsigned  rank_or_bits = 0;

            there = n < left;
            count = (left + GROUPS - 1 - group) / GROUPS;
            if (there) {
                const uint64_t place = list.place(e0 + n);

                i = (int)((int64_t)(place >> list.bits) - to.begin);
                r = (int)(place & ((UINT64_C(1) << list.bits) - 1));
                /* A plain load: set_dw may put something else there, when the bits are read. */
                rank_or_bits = BITS ? own.bits[(int64_t)i * a.k + r] : (unsigned)r;
                decay = own.weight.decay(i, r, to.i, &first_four);
                if (mean) share = __ldg(own.shares + i);
            }
            __syncwarp(); /* nobody reads the last batch any more */
            own.places[lane_id()] = {i, rank_or_bits, decay * row_weight, share};
            __syncwarp();
        };
        const auto load_feats = [&](int first, R(&x)[NF]) {
#pragma unroll
            for (int u = 0; u < NF; u++)
                x[u] = has_feature<G, NF>(u, first, F) ? widen(__ldg(feats + first + u * G)) : (R)0;
        };
        /* Adds the batch's part of the sums of the features from `first` on. */
        const auto add_places = [&](int first, const R(&x)[NF], R(&of_feats)[NF], bool again) {
            const T *const mean_of_lane = own.mean + first + lane, *const max_of_lane = own.max + first + lane;
            const RANK *const    winner_of_lane = own.max_winners + first + lane;
            const place_data<R> *place = own.places + group * G;
            R                   *part = own.parts[0] + lane_id();

#pragma unroll BITS ? 2 : 1
            for (int n = 0; n < count; n++, place++, part += own.PART) {
                const place_data<R> at = *place;
                R                   even[NF] = {}, dm[NF] = {}, of_weight = again ? *part : (R)0;

                if (mean) {
                    const T *const grad = row_of(mean_of_lane, at.i, bytes.grads);

#pragma unroll
                    for (int u = 0; u < NF; u++)
                        if (has_feature<G, NF>(u, first, F)) even[u] = widen(__ldg(grad + u * G));
                }
                if constexpr (BITS) {
                    const T *const grad = row_of(max_of_lane, at.i, bytes.grads);
                    const unsigned won = at.rank_or_bits >> lane;

#pragma unroll
                    for (int u = 0; u < NF; u++)
                        if (won >> u * G & 1) dm[u] = widen(__ldg(grad + u * G));
                } else if (max) {
                    const RANK *const winner = row_of(winner_of_lane, at.i, bytes.winners);
                    const T *const    grad = row_of(max_of_lane, at.i, bytes.grads);
                    int               won[NF];
                    R                 largest[NF] = {};

                    /* All of them, though few are wanted: waiting for the winners first takes longer. */
#pragma unroll
                    for (int u = 0; u < NF; u++) {
                        won[u] = has_feature<G, NF>(u, first, F) ? (int)__ldg(winner + u * G) : -1;
                        if (has_feature<G, NF>(u, first, F)) largest[u] = widen(__ldg(grad + u * G));
                    }
#pragma unroll
                    for (int u = 0; u < NF; u++)
                        if (won[u] == (int)at.rank_or_bits) dm[u] = largest[u];
                }
#pragma unroll
                for (int u = 0; u < NF; u++) dm[u] = fused(at.share, even[u], dm[u]);
                if constexpr (!BITS)
                    if (others) {
                        const T *const    grad = row_of(own.grads + first + lane, at.i, bytes.grads);
                        const RANK *const winner = row_of(own.winners + first + lane, at.i, bytes.winners);

#pragma unroll
                        for (int u = 0; u < NF; u++) {
                            if (!has_feature<G, NF>(u, first, F)) break;
                            if (a.columns.sum >= 0) dm[u] += widen(__ldg(grad + a.columns.sum * F + u * G));
                            if (a.columns.absmax >= 0 &&
                                (int)__ldg(winner + a.columns.absmax_winner * F + u * G) == (int)at.rank_or_bits) {
                                const R m = at.weight * x[u];

                                dm[u] += (R)((m > 0) - (m < 0)) * widen(__ldg(grad + a.columns.absmax * F + u * G));
                            }
                        }
                    }
#pragma unroll
                for (int u = 0; u < NF; u++) of_feats[u] = fused(at.weight, dm[u], of_feats[u]);
#pragma unroll
                for (int u = 0; u < NF; u++) of_weight = fused(dm[u], x[u], of_weight);
                *part = of_weight;
            }
        };
        const auto finish_places = [&] {
            const R *const parts = own.parts[lane_id() % PLACES] + lane_id() / 8 * 8;
            R              dw = 0;

            __syncwarp();
#pragma unroll
            for (int n = 0; n < 8; n++) dw += parts[n];
#pragma unroll
            for (int step = 8; step < G; step *= 2) dw += __shfl_xor_sync(ALL_LANES, dw, step);
            set_dw.add(a, own.weight, own.set_dw, to, i, r, there && lane < PLACES, decay, first_four, row_weight, dw,
                       &sums);
        };

        const bool at_once = G < WARP || F <= G * NF; /* all features are in the sums of one pass */
        int        first = 0;
        do { /* once without any feature */
            R x[NF], of_feats[NF] = {};

            load_feats(first, x);
            for (int64_t e0 = list.begins[to.row]; e0 < end; e0 += GROUPS * PLACES) {
                find_places(e0);
                add_places(first, x, of_feats, false);
                if (wants_dw && at_once) finish_places();
            }
#pragma unroll
            for (int u = 0; u < NF; u++) {
#pragma unroll
                for (int step = G; step < WARP; step *= 2) of_feats[u] += __shfl_xor_sync(ALL_LANES, of_feats[u], step);
            }
            if (a.grad_feats.data && group == 0) {
                T *const result = row_of(own.grad_feats + lane + first, to.i, bytes.grad_feats);
                __builtin_assume(__isGlobal(result));
#pragma unroll
                for (int u = 0; u < NF; u++)
                    if (has_feature<G, NF>(u, first, F)) result[u * G] = narrow<T>(of_feats[u]);
            }
        } while ((first += G * NF) < F);
        if constexpr (G == WARP)
            if (wants_dw && !at_once)
                for (int64_t e0 = list.begins[to.row]; e0 < end; e0 += GROUPS * PLACES) {
                    find_places(e0);
                    for (first = 0; first < F; first += G * NF) {
                        R x[NF], of_feats[NF] = {};

                        load_feats(first, x);
                        add_places(first, x, of_feats, first > 0);
                    }
                    finish_places();
                }
        set_dw.store_sums(a, to, sums);
    }
}

/* What backward takes beside the reverse list. */
struct backward_memory {
    workspace shares, bits;
    explicit backward_memory(muvox_context *ctx) : shares(ctx), bits(ctx)
    {
    }
};

/* grad_feats if it is wanted, and what set_dw makes of the gradients of the weights. words: (N, k) of the workspace
 * that set_dw alone writes to, for each place when it has its gradient; NULL: there are none. */
template <typename T, typename W, typename P, typename S>
muvox_status aggregate_backward(muvox_context *ctx, const char *op_name, const aggregate_arguments<W> &a,
                                const reverse_list<P> &list, const S &set_dw, uint32_t *words, backward_memory *memory)
{
    using R = wide_t<T>;
    const int64_t N = a.sets.rows;
    const bool    has_bits = a.columns.mean >= 0 && a.columns.max >= 0 && a.columns.sum < 0 && a.columns.absmax < 0 &&
                          a.winners.dtype == MUVOX_U8 && a.feats.cols <= MOST_BITS && a.k <= MOST_BITS;
    const int  run = rows_of_run(N, BLOCK / WARP);
    workspace &shares = memory->shares, &bits = memory->bits;

    FORWARD(check_launch(ctx, op_name, a));
    FORWARD(check_row_stride(ctx, op_name, "bytes of grad_out", row_bytes(a.grad_out)));
    FORWARD(check_row_stride(ctx, op_name, "bytes of winners", row_bytes(a.winners)));
    FORWARD(check_row_stride(ctx, op_name, "bytes of grad_feats", row_bytes(a.grad_feats)));
    const bytes_apart bytes = {(int)row_bytes(a.feats), (int)row_bytes(a.grad_out), (int)row_bytes(a.winners),
                               (int)row_bytes(a.grad_feats)};
    if (a.columns.mean >= 0) FORWARD(shares.take(op_name, N * (int64_t)sizeof(R)));
    if (has_bits && !words) {
        FORWARD(bits.take(op_name, N * a.k * 4));
        words = bits.as<uint32_t>();
    }
    if (a.columns.mean >= 0 || (S::every_place && set_dw.wanted())) {
        FORWARD(check_grid(ctx, op_name, N / THREADS + 1));
        prepare_rows<R><<<group_blocks<1>(a.sets), THREADS, 0, stream_of(ctx)>>>(a, shares.as<R>(),
                                                                                 has_bits ? words : nullptr, set_dw);
        LAUNCHED();
    }
    return with_group(a.feats.cols, [&](auto group, auto each) -> muvox_status {
        constexpr int  G = decltype(group)::value, NF = decltype(each)::value;
        const unsigned blocks = blocks_for(N, run);

        const auto launch = [&](auto rank, auto mean_max) {
            row_gradients<T, G, NF, decltype(rank), decltype(mean_max)::value>
                <<<blocks, BLOCK, 0, stream_of(ctx)>>>(a, shares.as<R>(), words, list, set_dw, bytes, run);
        };

        if (has_bits) {
            if constexpr (G * NF <= MOST_BITS) launch(winner_bits(), std::true_type());
        } else if (a.winners.dtype == MUVOX_U8) {
            if constexpr (G * NF <= MOST_BITS)
                launch(uint8_t(), std::false_type());
            else
                with_mean_max(a.columns, [&](auto mean_max) { launch(uint8_t(), mean_max); });
        } else
            launch(int32_t(), std::false_type());
        LAUNCHED();
        return MUVOX_OK;
    });
}

#endif
