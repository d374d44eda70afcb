/* gravnet on the device: see muvox/gravnet.h. */
#include "muvox/gravnet.h"

#include "../ops/checks.h"
#include "aggregate_backward.cuh"
#include "aggregate_forward.cuh"
#include "order.cuh"
#include "pull.cuh"
#include "search.cuh"

template <typename R> static __global__ void pack_rows(muvox_sets sets, muvox_matrix m, int64_t width, R *to)
{
    const int64_t number = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, row = quotient(number, width);
    const int64_t column = number - row * width;
    row_place     at = {};

    if (row >= sets.rows) return;
    at.set = set_of_row(sets, row);
    at.begin = set_begin(sets, at.set);
    const int64_t from = row_at(m, sets, at.begin, at.set, row - at.begin) + column;
    to[number] = column < m.cols ? load<R>(m.data, m.dtype, from) : (R)0;
}

/* coords in the arithmetic of the features, each row a number of `four`: themselves, or a copy in hold. */
template <typename R>
static muvox_status pack_coords(muvox_context *ctx, const muvox_sets &sets, workspace *hold, muvox_matrix *coords)
{
    const char *const op_name = "gravnet";
    const int64_t     width = (coords->cols + 3) / 4 * 4, count = sets.rows * width;
    const bool        packed = coords->dtype == DTYPE<R> && !(coords->cols % 4) && !(coords->row_stride % 4) &&
                        !(coords->set_stride % 4) && !((uintptr_t)coords->data % 16);

    FORWARD(check_row_stride(ctx, op_name, "coords", coords->row_stride));
    FORWARD(check_row_stride(ctx, op_name, "coords", width));
    if (packed || !count) return MUVOX_OK;
    FORWARD(check_grid(ctx, op_name, count / 256 + 1));
    FORWARD(hold->take(op_name, count * (int64_t)sizeof(R)));
    pack_rows<R><<<blocks_for(count, 256), 256, 0, stream_of(ctx)>>>(sets, *coords, width, hold->as<R>());
    LAUNCHED();
    *coords = {hold->as<R>(), DTYPE<R>, sets.rows, coords->cols, width, sets.size * width};
    return MUVOX_OK;
}

/* coords are packed. */
template <typename R>
static aggregate_arguments<gravnet_weights<R>> arguments_of(const muvox_gravnet *op, const muvox_output &neighbours,
                                                            const muvox_matrix &coords, const int32_t *order)
{
    return {op->sets,
            order,
            columns_of(op->aggregates),
            (op->options & MUVOX_MEAN_BY_K) != 0,
            (int)op->k,
            op->feats,
            op->grad_out,
            neighbours,
            op->out,
            op->winners,
            op->grad_feats,
            {coords, op->row_weights, op->sets, (R)op->scale}};
}

/* Everything that needs memory comes before the search writes, so that a call that gets none has written nothing. */
template <typename R> static muvox_status forward(muvox_context *ctx, const muvox_gravnet *op)
{
    const char *const op_name = "gravnet";
    const bool        aggregates = op->out.data || op->winners.data;
    search_request    request = {op->sets,    op->sets,       op->coords,     op->coords, op->mask, op->k,
                                 op->options, op->max_radius, op->neighbours, {},         {}};
    muvox_matrix      coords = op->coords;
    const int32_t    *order;
    workspace         packed(ctx), neighbours(ctx), rows(ctx);

    if (aggregates) FORWARD(pack_coords<R>(ctx, op->sets, &packed, &coords));
    if (!op->neighbours.data) {
        FORWARD(neighbours.take(op_name, op->sets.rows * op->k * 4));
        request.neighbours = {neighbours.as<void>(), MUVOX_I32, op->sets.rows, op->k, op->k, op->sets.size * op->k};
    }
    FORWARD(search_neighbours(ctx, op_name, request, &rows, &order));
    if (!aggregates) return MUVOX_OK;
    return aggregate_forward(ctx, op_name, arguments_of<R>(op, request.neighbours, coords, order));
}

extern "C" muvox_status muvox_gravnet_forward_cuda(muvox_context *ctx, const muvox_gravnet *op)
{
    FORWARD(check_gravnet_forward(ctx, op));
    const device_call call(ctx, "gravnet");
    FORWARD(call.status);
    FORWARD(check_splits_on_device(ctx, "gravnet", "splits", &op->sets));
    if (!op->sets.rows) return MUVOX_OK;
    return op->feats.dtype == MUVOX_F64 ? forward<double>(ctx, op) : forward<float>(ctx, op);
}

/* Coordinates whose gradient is summed up where dw is found; of more, launch_pull sums both halves. */
enum { PULLED_COLUMNS = WARP };

/* What the gradients of coordinates and row weights need, from exp(−scale d²) dw of each place: that times u_j is
 * kept at i · k + r for row i, and pulls at row j. */
template <typename R> struct distance_gradients {
    static constexpr bool every_place = false;
    struct sums {
        R row_weight, pull; /* pull: of column 4 (lane % 8) + lane / 8 */
    };
    struct in_set {
        R *pulls;
    };
    R  *pulls;  /* (N, k) */
    R  *pulled; /* (N, d) −Σ pulls (x_i − x_j) over the places that hold j; null: not wanted, or d is too large */
    int d;
    muvox_output                             grad_row_weights;
    __host__ __device__ __forceinline__ bool wanted() const
    {
        return pulls || grad_row_weights.data;
    }
    template <typename A> __device__ __forceinline__ in_set of(const A &a, const row_place &at) const
    {
        return {pulls + at.begin * a.k};
    }
    template <typename A> __device__ __forceinline__ void without_neighbour(const A &, const row_place &, int) const
    {
    }
    template <typename A, typename W>
    __device__ __forceinline__ void add(const A &a, const W &weight, const in_set &set, const row_place &to, int i,
                                        int r, bool there, R decay, const four<R> &first, R row_weight, R dw,
                                        sums *of) const
    {
        const R kept = decay * dw, pull = kept * row_weight;

        if (there) of->row_weight += kept;
        if (there && pulls) {
            __builtin_assume(__isGlobal(set.pulls));
            set.pulls[(int64_t)i * a.k + r] = pull;
        }
        if (!pulled) return;
#pragma unroll 1
        for (int q = 0; q < weight.fours; q++) {
            const four<R> difference = q == 0 ? first : weight.differences(i, to.i, q);
            R             x[4];

#pragma unroll
            for (int c = 0; c < 4; c++) x[c] = there ? -pull * difference.x[c] : (R)0;
            const R pull_of_lane = sums_of_lanes<4, WARP / 4, WARP>(x);
            if (lane_id() % (WARP / 4) == q) of->pull += pull_of_lane;
        }
    }
    template <typename A>
    __device__ __forceinline__ void store_sums(const A &a, const row_place &to, const sums &of) const
    {
        const int column = (int)(lane_id() % (WARP / 4) * 4 + lane_id() / (WARP / 4));

        if (pulled && column < d) pulled[to.row * d + column] = of.pull;
        if (!grad_row_weights.data) return;
        const R sum = sum_of_lanes(of.row_weight);
        if (lane_id() == 0)
            static_cast<R *>(grad_row_weights.data)[row_at(grad_row_weights, a.sets, to.begin, to.set, to.i)] = sum;
    }
};

/* About what backward keeps of the places of the sets that it takes at a time. */
static const int64_t CHUNK_BYTES = INT64_C(32) << 20;

/* What one part of backward after the other uses. */
struct gravnet_memory : backward_memory {
    workspace list, pulls, pulled, packed;
    explicit gravnet_memory(muvox_context *ctx) : backward_memory(ctx), list(ctx), pulls(ctx), pulled(ctx), packed(ctx)
    {
    }
};

/* order: of the rows, as in aggregate_arguments. */
template <typename T, typename P>
static muvox_status backward(muvox_context *ctx, const muvox_gravnet *op, const int32_t *order, gravnet_memory *memory)
{
    using R = wide_t<T>;
    const char *const op_name = "gravnet";
    const int64_t     N = op->sets.rows, k = op->k, d = op->coords.cols;
    muvox_matrix      coords = op->coords;
    reverse_list<P>   list = {};
    workspace        &pulls = memory->pulls, &pulled = memory->pulled;

    FORWARD(pack_coords<R>(ctx, op->sets, &memory->packed, &coords));
    const auto a = arguments_of<R>(op, op->neighbours, coords, order);
    FORWARD(reverse_neighbours(ctx, op_name, a.sets, a.sets, a.neighbours, k, &memory->list, &list));
    if (op->grad_coords.data) FORWARD(pulls.take(op_name, N * k * (int64_t)sizeof(R)));
    if (op->grad_coords.data && d <= PULLED_COLUMNS) FORWARD(pulled.take(op_name, N * d * (int64_t)sizeof(R)));
    FORWARD(aggregate_backward<T>(ctx, op_name, a, list,
                                  distance_gradients<R>{pulls.as<R>(), pulled.as<R>(), (int)d, op->grad_row_weights},
                                  sizeof(R) == 4 ? pulls.as<uint32_t>() : nullptr, memory));
    const muvox_matrix kept = {pulls.as<R>(), DTYPE<R>, N, k, k, a.sets.size * k};
    return launch_pull<R>(ctx, op_name,
                          pull_arguments<P>{a.sets, a.sets, coords, coords, a.neighbours, kept, -2 * op->scale, order,
                                            list, op->grad_coords, true, !pulled.as<R>(), pulled.as<R>()});
}

/* Some sets of a uniform batch. */
template <typename M> static void move_to_set(M *m, int64_t set, int64_t rows)
{
    if (m->data) m->data = (char *)m->data + set * m->set_stride * dtype_size(m->dtype);
    m->rows = rows;
}

static muvox_gravnet some_sets(const muvox_gravnet *op, int64_t first, int64_t count)
{
    muvox_gravnet part = *op;
    const int64_t rows = count * op->sets.size;

    part.sets.count = count;
    part.sets.rows = rows;
    for (muvox_matrix *m : {&part.coords, &part.feats, &part.mask, &part.row_weights, &part.grad_out})
        move_to_set(m, first, rows);
    for (muvox_output *m :
         {&part.out, &part.neighbours, &part.winners, &part.grad_coords, &part.grad_feats, &part.grad_row_weights})
        move_to_set(m, first, rows);
    return part;
}

/* Backward takes a uniform batch in parts that are alike, as what it keeps of each place, 8 bytes and more, should take
 * little memory. No part asks for more than the first, so that nothing is written if there is not enough. */
static muvox_status parts_of(muvox_context *ctx, const muvox_gravnet *op, int64_t *parts)
{
    const int64_t bytes = op->sets.rows * op->k * 8, most = op->sets.count / MANY_SETS;
    muvox_sets    part = op->sets;
    bool          counted = false;

    *parts = op->sets.splits ? 1 : (bytes + CHUNK_BYTES - 1) / CHUNK_BYTES;
    if (*parts > most) *parts = most;
    if (*parts > 1) {
        part.count /= *parts;
        part.rows = part.count * part.size;
        FORWARD(places_are_counted(ctx, "gravnet", part, part, op->k, &counted));
    }
    if (!counted) *parts = 1;
    return MUVOX_OK;
}

extern "C" muvox_status muvox_gravnet_backward_cuda(muvox_context *ctx, const muvox_gravnet *op)
{
    const int64_t  count = op->sets.count;
    const int32_t *order;
    int64_t        parts;

    FORWARD(check_gravnet_backward(ctx, op));
    const device_call call(ctx, "gravnet");
    workspace         hold(ctx);
    gravnet_memory    memory(ctx);
    FORWARD(call.status);
    FORWARD(check_splits_on_device(ctx, "gravnet", "splits", &op->sets));
    if (!op->sets.rows) return MUVOX_OK;
    FORWARD(order_only(ctx, "gravnet", op->sets, op->coords, &hold, &order));
    FORWARD(parts_of(ctx, op, &parts));
    for (int64_t p = parts; p > 0; p--) { /* backwards: the last is the largest */
        const int64_t       first = count * (p - 1) / parts, last = count * p / parts;
        const muvox_gravnet part = parts == 1 ? *op : some_sets(op, first, last - first);
        const int32_t      *order_of_part = order ? order + first * op->sets.size : nullptr;

        FORWARD(with_dtype(op->feats.dtype, [&](auto element) {
            return with_places(part.sets.rows, op->k, [&](auto place) {
                return backward<decltype(element), decltype(place)>(ctx, &part, order_of_part, &memory);
            });
        }));
    }
    return MUVOX_OK;
}
