/* pool on the device: see muvox/pool.h. A block takes up to 512 rows of a set: lanes with a vector of features each,
 * as many walkers over the rows as there is room for, whose parts are joined pair by pair. Larger sets take several
 * blocks, whose parts are joined in order. */
#include "muvox/pool.h"

#include "../ops/checks.h"
#include "aggregate.cuh"
#include "vectors.cuh"

enum { TILE_ROWS = 512, POOLERS = 128, AHEAD = 4, WALKERS = 8 };

/* What is known of one feature after some rows. */
template <typename R> struct part {
    R                               sum, total; /* Σ u x, Σ u */
    best<R>                         largest, largest_size;
    int                             first; /* the first row, −1 before any */
    __device__ __forceinline__ void settle()
    {
        largest.settle(first);
        largest_size.settle(first);
    }
    /* Takes in rows that may lie before or after; both are settled. */
    __device__ __forceinline__ void join(const part &other)
    {
        sum += other.sum;
        total += other.total;
        if (other.first < 0) return;
        join(&largest, other.largest);
        join(&largest_size, other.largest_size);
        first = first < 0 || other.first < first ? other.first : first;
    }

  private:
    /* The larger, the first of equals; NaN is larger than anything. */
    __device__ __forceinline__ void join(best<R> *mine, const best<R> &other) const
    {
        const bool mine_nan = mine->value != mine->value, other_nan = other.value != other.value;
        const bool larger = other_nan ? !mine_nan : !mine_nan && other.value > mine->value;
        const bool equal = other_nan ? mine_nan : other.value == mine->value;

        if (first < 0 || larger || (equal && other.index < mine->index)) *mine = other;
    }
};

template <typename R>
__device__ __forceinline__ R weight_of_row(const muvox_matrix &weights, const muvox_sets &sets, const tile &t,
                                           int64_t i)
{
    if (!weights.data) return 1;
    return static_cast<const R *>(weights.data)[row_at(weights, sets, t.begin, t.set, i)];
}

template <typename R> struct pool_arguments {
    muvox_sets        sets;
    aggregate_columns columns;
    muvox_matrix      x, mask, row_weights;
    muvox_output      out, winners; /* out in its own dtype, or in R where sums are for backward */
    part<R>          *parts;        /* (2 N / TILE_ROWS, F) of sets larger than a tile, from 2 begin / TILE_ROWS on */
    R                *totals;       /* (S) Σ u, if wanted */
};

template <typename R> __device__ void write_pooled(const pool_arguments<R> &a, int64_t s, int64_t f, const part<R> &all)
{
    const int64_t F = a.x.cols;
    const int64_t out = s * a.out.row_stride + f, won = s * a.winners.row_stride + f;
    const auto    c = a.columns;
    const auto    put = [&](int block, R x) {
        if (block >= 0) store<R>(a.out.data, a.out.dtype, out + block * F, x);
    };
    const auto win = [&](int block, int row) {
        if (block >= 0) static_cast<int32_t *>(a.winners.data)[won + block * F] = row;
    };

    if (a.totals && f == 0) a.totals[s] = all.total;
    if (a.out.data) {
        put(c.mean, all.total == 0 ? (R)0 : all.sum / all.total);
        put(c.max, all.largest.value);
        put(c.absmax, all.largest_size.value);
        put(c.sum, all.sum);
    }
    if (a.winners.data) {
        win(c.max_winner, all.largest.index);
        win(c.absmax_winner, all.largest_size.index);
    }
}

/* How the threads of a block stand: `lanes` side by side, `walkers` of these over the rows. A tile takes `chunks`
 * blocks. */
struct pool_shape {
    int lanes, walkers, chunks;
};

/* The features that a lane takes where rows are aligned. */
template <typename T> constexpr int WIDTH = sizeof(T) == sizeof(double) ? 2 : 4;

/* For V features a lane. As many walkers in any case, so that sums have the same order. */
template <typename T, int V> pool_shape shape_of(int64_t F)
{
    const int64_t vectors = (F + WIDTH<T> - 1) / WIDTH<T>, chunks = (vectors + WARP - 1) / WARP;
    const int64_t each = (vectors + chunks - 1) / chunks;

    return {(int)(each * WIDTH<T> / V), (int)(POOLERS / each), (int)chunks};
}

template <typename T, int V>
static __global__ void __launch_bounds__(POOLERS *WIDTH<T> / V)
    pool_tiles(const pool_arguments<wide_t<T>> a, pool_shape shape)
{
    using R = wide_t<T>;
    constexpr int MOST = POOLERS * WIDTH<T> / V; /* threads */
    __shared__ __align__(16) char space[sizeof(part<R>) * MOST * V];
    part<R>(*const walked)[MOST] = reinterpret_cast<part<R>(*)[MOST]>(space);
    const int64_t F = a.x.cols, number = quotient(blockIdx.x, shape.chunks);
    const int     walker = (int)threadIdx.x / shape.lanes, lane = (int)threadIdx.x % shape.lanes;
    const int64_t f = ((blockIdx.x - number * shape.chunks) * shape.lanes + lane) * V;
    const tile    t = tile_of(a.sets, TILE_ROWS, number);
    part<R>       mine[V];

    if (t.first >= t.rows && !(t.rows == 0 && t.first == 0)) return;
    const bool     wants_max = a.columns.max >= 0, wants_absmax = a.columns.absmax >= 0;
    const int      begin = (int)t.first, apart = shape.walkers;
    const int      count = (int)(t.rows - t.first < TILE_ROWS ? t.rows - t.first : TILE_ROWS);
    const T *const x = static_cast<const T *>(a.x.data) + row_at(a.x, a.sets, t.begin, t.set, t.first) + f;
    const int64_t  step = apart * a.x.row_stride;
    R              sum[V] = {}, total = 0;
    best<R>        largest[V], largest_size[V];
    int            first = -1;

    /* Several rows of the tile at a time, so that their loads wait together. */
    for (int i = walker; f < F && i < count; i += AHEAD * apart) {
        elements<T, V> rows[AHEAD];
        R              u[AHEAD];
        bool           there[AHEAD];
        const T *const from = x + i * a.x.row_stride;

#pragma unroll
        for (int n = 0; n < AHEAD; n++) there[n] = i + n * apart < count;
        if (a.mask.data)
#pragma unroll
            for (int n = 0; n < AHEAD; n++)
                there[n] = there[n] && row_valid(a.mask, a.sets, t.begin, t.set, t.first + i + n * apart);
#pragma unroll
        for (int n = 0; n < AHEAD; n++) {
            u[n] = there[n] ? (R)1 : (R)0;
            if (there[n]) rows[n] = read<V>(from + n * step);
        }
        if (a.row_weights.data)
#pragma unroll
            for (int n = 0; n < AHEAD; n++)
                if (there[n]) u[n] = weight_of_row<R>(a.row_weights, a.sets, t, t.first + i + n * apart);
#pragma unroll
        for (int n = 0; n < AHEAD; n++) {
            if (!there[n]) continue;
            total += u[n];
            first = first < 0 ? begin + i + n * apart : first;
#pragma unroll
            for (int v = 0; v < V; v++) sum[v] += u[n] * widen(rows[n].at[v]);
        }
        /* Added to 0, −0 becomes 0, and every NaN the same. */
        if (wants_max)
#pragma unroll
            for (int n = 0; n < AHEAD; n++)
#pragma unroll
                for (int v = 0; v < V; v++)
                    if (there[n]) largest[v].meet(widen(rows[n].at[v]) + (R)0, begin + i + n * apart);
        if (wants_absmax)
#pragma unroll
            for (int n = 0; n < AHEAD; n++)
#pragma unroll
                for (int v = 0; v < V; v++)
                    if (there[n]) largest_size[v].meet(fabs(widen(rows[n].at[v]) + (R)0), begin + i + n * apart);
    }
#pragma unroll
    for (int v = 0; v < V; v++) {
        mine[v] = {sum[v], total, largest[v], largest_size[v], first};
        mine[v].settle();
    }
    /* The later half of the walkers left goes to the earlier one, until one has all. */
    for (int left = shape.walkers; left > 1; left = (left + 1) / 2) {
        const int half = (left + 1) / 2;

#pragma unroll
        for (int v = 0; v < V; v++)
            if (walker >= half && walker < left) walked[v][threadIdx.x] = mine[v];
        __syncthreads();
#pragma unroll
        for (int v = 0; v < V; v++)
            if (walker + half < left) mine[v].join(walked[v][threadIdx.x + half * shape.lanes]);
        __syncthreads();
    }
    if (walker || f >= F) return;
#pragma unroll
    for (int v = 0; v < V; v++)
        if (t.rows <= TILE_ROWS)
            write_pooled(a, t.set, f + v, mine[v]);
        else
            a.parts[(2 * t.begin / TILE_ROWS + t.first / TILE_ROWS) * F + f + v] = mine[v];
}

/* Joins the parts of the sets larger than a tile. */
template <typename R> static __global__ void pool_parts(const pool_arguments<R> a)
{
    const int64_t index = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, F = a.x.cols, s = index / F, f = index % F;

    if (s >= a.sets.count) return;
    const int64_t begin = set_begin(a.sets, s), rows = set_end(a.sets, s) - begin;
    if (rows <= TILE_ROWS) return;
    const part<R> *parts = a.parts + 2 * begin / TILE_ROWS * F + f;
    part<R>        all = *parts;

    for (int64_t t = 1; t * TILE_ROWS < rows; t++) all.join(parts[t * F]);
    write_pooled(a, s, f, all);
}

/* Whether every row of x is whole vectors of V elements, aligned. */
template <typename T, int V> static bool whole_vectors_of_sets(const muvox_matrix &x, const muvox_sets &sets)
{
    return whole_vectors<T, V>(x) && (sets.splits || x.set_stride % V == 0);
}

template <typename T> static muvox_status forward(muvox_context *ctx, pool_arguments<wide_t<T>> a)
{
    using R = wide_t<T>;
    const char *const op_name = "pool";
    const int64_t     F = a.x.cols, tiles = tile_count(a.sets, TILE_ROWS);
    const bool        vectors = whole_vectors_of_sets<T, WIDTH<T>>(a.x, a.sets);
    const pool_shape  shape = vectors ? shape_of<T, WIDTH<T>>(F) : shape_of<T, 1>(F);
    const bool        split = a.sets.splits || a.sets.size > TILE_ROWS;
    workspace         parts(ctx);

    if (!a.sets.count) return MUVOX_OK;
    if (split) FORWARD(parts.take(op_name, (2 * a.sets.rows / TILE_ROWS + 2) * F * (int64_t)sizeof(part<R>)));
    a.parts = parts.as<part<R>>();
    FORWARD(check_grid(ctx, op_name, tiles * shape.chunks));
    FORWARD(check_grid(ctx, op_name, a.sets.count * F / 256 + 1));
    const auto kernel = vectors ? pool_tiles<T, WIDTH<T>> : pool_tiles<T, 1>;
    kernel<<<(unsigned)(tiles * shape.chunks), (unsigned)(shape.lanes * shape.walkers), 0, stream_of(ctx)>>>(a, shape);
    LAUNCHED();
    if (split) {
        pool_parts<R><<<blocks_for(a.sets.count * F, 256), 256, 0, stream_of(ctx)>>>(a);
        LAUNCHED();
    }
    return MUVOX_OK;
}

extern "C" muvox_status muvox_pool_forward_cuda(muvox_context *ctx, const muvox_pool *op)
{
    FORWARD(check_pool_forward(ctx, op));
    const device_call call(ctx, "pool");
    FORWARD(call.status);
    FORWARD(check_splits_on_device(ctx, "pool", "splits", &op->sets));
    return with_dtype(op->x.dtype, [&](auto element) {
        return forward<decltype(element)>(ctx, {op->sets, columns_of(op->aggregates), op->x, op->mask, op->row_weights,
                                                op->out, op->winners, nullptr, nullptr});
    });
}

template <typename R> struct pool_gradients {
    muvox_sets        sets;
    aggregate_columns columns;
    muvox_matrix      x, mask, row_weights, grad_out;
    muvox_output      winners, grad_x, grad_row_weights;
    const R          *totals, *means; /* (S) Σ u, NULL: it is the number of rows; (S, F) for grad_row_weights */
};

/* A tile of rows and 32 features a block, as forward: what a set gives to all its rows is read once. */
template <typename R>
static __global__ void __launch_bounds__(WARP *WALKERS) spread_tiles(const pool_gradients<R> a, int64_t chunks)
{
    const int64_t F = a.x.cols, number = quotient(blockIdx.x, chunks),
                  f = (blockIdx.x - number * chunks) * WARP + threadIdx.x;
    const tile t = tile_of(a.sets, TILE_ROWS, number);

    if (t.first >= t.rows || f >= F) return;
    const int64_t end = t.first + TILE_ROWS < t.rows ? t.first + TILE_ROWS : t.rows;
    const int64_t from = t.set * a.grad_out.row_stride + f, won = t.set * a.winners.row_stride + f;
    const R       total = a.totals ? a.totals[t.set] : (R)t.rows;
    const auto    gradient = [&](int block) {
        return block < 0 ? (R)0 : load<R>(a.grad_out.data, a.grad_out.dtype, from + block * F);
    };
    const auto winner = [&](int block) {
        return block < 0 ? -1 : static_cast<const int32_t *>(a.winners.data)[won + block * F];
    };
    const auto c = a.columns;
    const R    even = (c.mean >= 0 && total != 0 ? gradient(c.mean) / total : (R)0) + gradient(c.sum);
    const R    largest = gradient(c.max), largest_size = gradient(c.absmax);
    const int  first = winner(c.max_winner), first_size = winner(c.absmax_winner);

    for (int64_t i = t.first + threadIdx.y; i < end; i += WALKERS) {
        R dx = 0;

        if (row_valid(a.mask, a.sets, t.begin, t.set, i)) {
            dx = even * weight_of_row<R>(a.row_weights, a.sets, t, i);
            if (first == i) dx += largest;
            if (first_size == i) {
                const R x = load<R>(a.x.data, a.x.dtype, row_at(a.x, a.sets, t.begin, t.set, i) + f);

                dx += largest_size * (R)((x > 0) - (x < 0));
            }
        }
        store<R>(a.grad_x.data, a.grad_x.dtype, row_at(a.grad_x, a.sets, t.begin, t.set, i) + f, dx);
    }
}

/* A warp for each row, lanes over features. */
template <typename R> static __global__ void weight_gradients(const pool_gradients<R> a)
{
    const int64_t F = a.x.cols;
    row_place     at;
    R             du = 0;

    if (!group_row<WARP>(a.sets, nullptr, &at)) return;
    const R       total = a.totals ? a.totals[at.set] : (R)at.rows;
    const int64_t from = at.set * a.grad_out.row_stride, x_at = row_at(a.x, a.sets, at.begin, at.set, at.i);

    if (row_valid(a.mask, a.sets, at.begin, at.set, at.i))
        for (int64_t f = lane_id(); f < F; f += WARP) {
            const R    x = load<R>(a.x.data, a.x.dtype, x_at + f);
            const auto gradient = [&](int block) {
                return load<R>(a.grad_out.data, a.grad_out.dtype, from + block * F + f);
            };

            if (a.columns.mean >= 0 && total != 0)
                du += gradient(a.columns.mean) * (x - a.means[at.set * F + f]) / total;
            if (a.columns.sum >= 0) du += gradient(a.columns.sum) * x;
        }
    du = sum_of_lanes(du);
    if (lane_id() == 0)
        static_cast<R *>(a.grad_row_weights.data)[row_at(a.grad_row_weights, a.sets, at.begin, at.set, at.i)] = du;
}

template <typename R> static muvox_status backward(muvox_context *ctx, const muvox_pool *op)
{
    const char *const op_name = "pool";
    const int64_t     S = op->sets.count, F = op->x.cols, chunks = (F + WARP - 1) / WARP;
    const bool        mean = columns_of(op->aggregates).mean >= 0, means = op->grad_row_weights.data && mean;
    pool_gradients<R> a = {
        op->sets,   columns_of(op->aggregates), op->x,   op->mask, op->row_weights, op->grad_out, op->winners,
        op->grad_x, op->grad_row_weights,       nullptr, nullptr};
    workspace hold(ctx);

    if (!op->sets.rows || (!op->grad_x.data && !op->grad_row_weights.data)) return MUVOX_OK;
    if (mean && (op->mask.data || op->row_weights.data)) {
        FORWARD(hold.take(op_name, S * (1 + (means ? F : 0)) * (int64_t)sizeof(R)));
        R *const           totals = hold.as<R>();
        muvox_matrix       x = op->x;
        const muvox_output kept = {means ? totals + S : nullptr, DTYPE<R>, S, F, F, 0};

        if (!means) x.cols = 1; /* for the sum of the weights one column is enough */
        FORWARD(with_dtype(x.dtype, [&](auto element) -> muvox_status {
            if constexpr (std::is_same<wide_t<decltype(element)>, R>::value)
                return forward<decltype(element)>(
                    ctx, {op->sets, columns_of(MUVOX_MEAN), x, op->mask, op->row_weights, kept, {}, nullptr, totals});
            return MUVOX_OK;
        }));
        a.totals = totals;
        a.means = totals + S;
    }
    if (op->grad_x.data) {
        const int64_t blocks = tile_count(op->sets, TILE_ROWS) * chunks;

        FORWARD(check_grid(ctx, op_name, blocks));
        spread_tiles<R><<<(unsigned)blocks, dim3(WARP, WALKERS), 0, stream_of(ctx)>>>(a, chunks);
        LAUNCHED();
    }
    if (op->grad_row_weights.data) {
        FORWARD(check_grid(ctx, op_name, op->sets.rows / (THREADS / WARP) + 1));
        weight_gradients<R><<<group_blocks<WARP>(op->sets), THREADS, 0, stream_of(ctx)>>>(a);
        LAUNCHED();
    }
    return MUVOX_OK;
}

extern "C" muvox_status muvox_pool_backward_cuda(muvox_context *ctx, const muvox_pool *op)
{
    FORWARD(check_pool_backward(ctx, op));
    const device_call call(ctx, "pool");
    FORWARD(call.status);
    FORWARD(check_splits_on_device(ctx, "pool", "splits", &op->sets));
    return op->x.dtype == MUVOX_F64 ? backward<double>(ctx, op) : backward<float>(ctx, op);
}
