#include "order.cuh"

#include <cub/block/block_radix_sort.cuh>
#include <cub/device/device_radix_sort.cuh>
#include <math_constants.h>

/* The largest sets that one block sorts. */
enum { BLOCK_ROWS = 4096, KEY_DIMS = 8, RANK_BITS = 16, TILE_WARPS = 4 };

/* How a curve position is written: `bits` for each of `dims` coordinates, and one more bit for rows that go to the
 * end. */
struct curve {
    int                     dims, bits;
    __host__ __device__ int length() const
    {
        return dims * bits + 1;
    }
    __host__ __device__ uint32_t nan() const
    {
        return 1u << dims * bits;
    }
    __host__ __device__ uint32_t masked() const
    {
        return nan() + 1;
    }
};

static curve curve_of(int64_t d, int most_bits)
{
    curve c;

    c.dims = d < KEY_DIMS ? (int)d : KEY_DIMS;
    c.bits = most_bits / c.dims;
    if (c.bits > RANK_BITS) c.bits = RANK_BITS;
    if (c.bits < 1) c.bits = 1;
    return c;
}

/* Sorts one value of each lane, ascending. */
static __device__ float sort_lanes(float x)
{
    for (unsigned size = 2; size <= WARP; size *= 2)
        for (unsigned step = size / 2; step; step /= 2) {
            const float other = __shfl_xor_sync(ALL_LANES, x, step);
            const bool  lower = (lane_id() & step) == 0, up = (lane_id() & size) == 0;

            x = lower == up ? fminf(x, other) : fmaxf(x, other);
        }
    return x;
}

/* The sorted values of one coordinate at 32 rows spread over a set; rows with NaN and masked ones count as +inf. */
static __device__ float sorted_sample(const muvox_sets &sets, const muvox_matrix &coords, const muvox_matrix &mask,
                                      int64_t s, int64_t begin, int64_t rows, int column)
{
    const int64_t row = lane_id() * rows / WARP;
    const float   x = load<float>(coords.data, coords.dtype, row_at(coords, sets, begin, s, row) + column);

    return sort_lanes(isnan(x) || !row_valid(mask, sets, begin, s, row) ? CUDART_INF_F : x);
}

/* Rank of x among 32 sorted values: 5 bits, and if more are wanted 11 of where x lies between two of them. */
static __device__ uint32_t rank_among(const float *sorted, float x, int bits)
{
    int low = 0; /* the last value that is not above x, the first if there is none */

#pragma unroll
    for (int step = WARP / 2; step; step /= 2)
        if (sorted[low + step] <= x) low += step;
    if (bits <= 5) return (uint32_t)low >> (5 - bits);
    const float below = sorted[low], above = sorted[low < WARP - 1 ? low + 1 : low];
    const float part = (x - below) / (above - below) * 2048.f;

    return ((uint32_t)low << 11 | (part > 0.f ? part < 2047.f ? (uint32_t)part : 2047u : 0u)) >> (RANK_BITS - bits);
}

/* Position along a Hilbert curve through the cells whose indices are the ranks, after J. Skilling, Programming the
 * Hilbert curve, AIP Conference Proceedings 707 (2004) 381. */
static __device__ uint32_t hilbert_position(const curve &c, uint32_t (&ranks)[KEY_DIMS])
{
    uint32_t position = 0, turn = 0;

    for (uint32_t bit = 1u << (c.bits - 1); bit > 1; bit >>= 1) {
#pragma unroll
        for (int i = 0; i < KEY_DIMS; i++) {
            if (i >= c.dims) break;
            const uint32_t exchanged = (ranks[0] ^ ranks[i]) & (bit - 1);

            ranks[0] ^= ranks[i] & bit ? bit - 1 : exchanged;
            if (!(ranks[i] & bit) && i > 0) ranks[i] ^= exchanged;
        }
    }
#pragma unroll
    for (int i = 1; i < KEY_DIMS; i++)
        if (i < c.dims) ranks[i] ^= ranks[i - 1];
#pragma unroll
    for (int i = 0; i < KEY_DIMS; i++)
        if (i == c.dims - 1)
            for (uint32_t bit = 1u << (c.bits - 1); bit > 1; bit >>= 1)
                if (ranks[i] & bit) turn ^= bit - 1;
    for (int bit = c.bits - 1; bit >= 0; bit--)
#pragma unroll
        for (int i = 0; i < KEY_DIMS; i++)
            if (i < c.dims) position = position << 1 | ((ranks[i] ^ turn) >> bit & 1u);
    return position;
}

/* Position on the curve of row i of a set; samples: the sorted sample of each of the curve's coordinates. */
static __device__ uint32_t curve_position(const curve &c, const muvox_sets &sets, const muvox_matrix &coords,
                                          const muvox_matrix &mask, int64_t s, int64_t begin, int64_t i,
                                          const float (*samples)[WARP])
{
    const int64_t at = row_at(coords, sets, begin, s, i);
    uint32_t      ranks[KEY_DIMS];
    bool          nan = false;

#pragma unroll
    for (int column = 0; column < KEY_DIMS; column++) {
        if (column >= c.dims) break;
        const float x = load<float>(coords.data, coords.dtype, at + column);

        nan |= isnan(x);
        ranks[column] = rank_among(samples[column], x, c.bits);
    }
    for (int64_t column = c.dims; column < coords.cols; column++)
        nan |= isnan(load<float>(coords.data, coords.dtype, at + column));
    if (!row_valid(mask, sets, begin, s, i)) return c.masked();
    return nan ? c.nan() : hilbert_position(c, ranks);
}

/* Uniform sets of up to THREADS · ITEMS rows, one block each: order[s · M + p] is the row at position p of set s. */
template <int THREADS, int ITEMS>
static __global__ void __launch_bounds__(THREADS)
    sort_in_block(curve c, muvox_sets sets, muvox_matrix coords, muvox_matrix mask, int32_t *order)
{
    using sort = cub::BlockRadixSort<uint32_t, THREADS, ITEMS, int32_t>;
    __shared__ union {
        typename sort::TempStorage sort;
        uint32_t                   keys[THREADS * ITEMS];
    } shared;
    __shared__ float samples[KEY_DIMS][WARP];
    const int64_t    s = blockIdx.x, M = sets.size, begin = s * M;
    uint32_t         key[ITEMS];
    int32_t          row[ITEMS];

    for (int column = (int)threadIdx.x / WARP; column < c.dims; column += THREADS / WARP)
        samples[column][lane_id()] = sorted_sample(sets, coords, mask, s, begin, M, column);
    __syncthreads();
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < THREADS * ITEMS; i += THREADS)
        shared.keys[i] = i < M ? curve_position(c, sets, coords, mask, s, begin, i, samples) : ~0u;
    __syncthreads();
#pragma unroll
    for (int a = 0; a < ITEMS; a++) {
        row[a] = (int)threadIdx.x * ITEMS + a;
        key[a] = shared.keys[row[a]];
    }
    __syncthreads();
    /* The sort is stable: equal keys stay in the order of their rows, so that of tied rows the lower come first. */
    sort(shared.sort).SortBlockedToStriped(key, row, 0, c.length() + 1);
#pragma unroll
    for (int a = 0; a < ITEMS; a++) {
        const int p = a * THREADS + (int)threadIdx.x;

        if (p < M) order[begin + p] = row[a];
    }
}

/* Keys that sort all rows by set and, in larger sets, along the curve; one warp for each tile. */
template <typename K>
static __global__ void write_keys(curve c, muvox_sets sets, muvox_matrix coords, muvox_matrix mask, int64_t tiles,
                                  K *keys, int32_t *rows)
{
    __shared__ float samples[TILE_WARPS][KEY_DIMS][WARP];
    const int        warp = (int)threadIdx.x / WARP;
    const int64_t    number = (int64_t)blockIdx.x * TILE_WARPS + warp;

    if (number >= tiles) return;
    const tile t = tile_of(sets, WARP, number);
    if (t.first >= t.rows) return;
    const int64_t i = t.first + lane_id();
    uint32_t      position = (uint32_t)i;

    if (t.rows > UNSORTED_ROWS) {
        for (int column = 0; column < c.dims; column++)
            samples[warp][column][lane_id()] = sorted_sample(sets, coords, mask, t.set, t.begin, t.rows, column);
        __syncwarp();
        if (i < t.rows) position = curve_position(c, sets, coords, mask, t.set, t.begin, i, samples[warp]);
    }
    if (i >= t.rows) return;
    keys[t.begin + i] = (K)t.set << c.length() | (K)position;
    rows[t.begin + i] = (int32_t)i;
}

/* What rounding may take from the radius of a ball, squares that underflow included. */
static constexpr float SLACK = 1e-5f, SLACK_UNDERFLOW = 2e-22f;

/* Packs the rows in their order, one warp for each tile. */
template <typename R>
static __global__ void pack_rows(muvox_sets sets, muvox_matrix coords, muvox_matrix mask, int64_t tiles,
                                 const int32_t *order, ordered_rows<R> out)
{
    const int64_t number = (int64_t)blockIdx.x * TILE_WARPS + threadIdx.x / WARP;

    if (number >= tiles) return;
    const tile    t = tile_of(sets, WARP, number);
    const int64_t p = t.begin + t.first + lane_id();
    const bool    there = t.first + lane_id() < t.rows;
    const int64_t i = there ? ordered_row(order, p, t.begin, t.rows) : 0;
    const bool    valid = there && row_valid(mask, sets, t.begin, t.set, i);
    const int64_t at = row_at(coords, sets, t.begin, t.set, i);
    const R       infinity = (R)CUDART_INF;
    int32_t       lowest = valid ? (int32_t)i : INT32_MAX;

    if (t.first >= t.rows) return;
    if (there) out.rows[p] = valid ? (int32_t)i : ~(int32_t)i;
    const int64_t ball = number * BALLS + lane_id() / BALL_ROWS;
    R             far2 = 0; /* from the centre of the ball; NaN if that is infinite */
    bool          nan = false, one_place = true;
    for (int c = 0; c < out.width; c++) {
        const R x = valid ? (c < coords.cols ? load<R>(coords.data, coords.dtype, at + c) : (R)0) : infinity;
        R       low = valid && !isnan(x) ? x : infinity, high = valid && !isnan(x) ? x : -infinity;

        if (there) out.points[p * out.width + c] = x;
        nan |= isnan(x);
        for (int step = 1; step < WARP; step *= 2) {
            if (step == BALL_ROWS && out.centres) {
                const R centre = low == high ? low : low < high ? (R)0.5 * low + (R)0.5 * high : (R)0;

                one_place &= low == high;

                far2 = fused(x - centre, x - centre, far2);
                if (lane_id() % BALL_ROWS == 0) out.centres[ball * out.width + c] = centre;
            }
            const R other_low = __shfl_xor_sync(ALL_LANES, low, step),
                    other_high = __shfl_xor_sync(ALL_LANES, high, step);

            low = fmin(low, other_low);
            high = fmax(high, other_high);
        }
        if (lane_id() == 0) {
            out.boxes[(2 * number) * out.width + c] = low;
            out.boxes[(2 * number + 1) * out.width + c] = high;
        }
    }
    if (out.centres) {
        R       radius = !valid || nan ? (R)-1 : one_place ? (R)0 : sqrt(far2) * (1 + SLACK) + SLACK_UNDERFLOW;
        int32_t lowest_in_ball = lowest;

        for (int step = 1; step < BALL_ROWS; step *= 2) {
            const R other = __shfl_xor_sync(ALL_LANES, radius, step);

            radius = isnan(other) || other > radius ? other : radius;
            lowest_in_ball = min(lowest_in_ball, __shfl_xor_sync(ALL_LANES, lowest_in_ball, step));
        }
        if (lane_id() % BALL_ROWS == 0) {
            out.radii[ball] = radius;
            out.lowest_in_ball[ball] = lowest_in_ball;
        }
    }
    lowest = __reduce_min_sync(ALL_LANES, lowest);
    if (lane_id() == 0) out.lowest[number] = lowest;
}

/* Sorts all rows of all sets at once. */
template <typename K>
static muvox_status sort_on_device(muvox_context *ctx, const char *op_name, const curve &c, const muvox_sets &sets,
                                   const muvox_matrix &coords, const muvox_matrix &mask, int32_t *order)
{
    const int64_t N = sets.rows, tiles = tile_count(sets, WARP);
    const int     bits = c.length() + bits_below(sets.count);
    size_t        scratch = 0;
    workspace     block(ctx);

    CUDA(cub::DeviceRadixSort::SortPairs(nullptr, scratch, (const K *)nullptr, (K *)nullptr, (const int32_t *)nullptr,
                                         (int32_t *)nullptr, N, 0, bits, stream_of(ctx)));
    const int64_t keys_bytes = rounded_bytes(N * (int64_t)sizeof(K)), rows_bytes = rounded_bytes(N * 4);
    FORWARD(block.take(op_name, 2 * keys_bytes + rows_bytes + (int64_t)scratch));
    K *const keys = block.as<K>(), *const sorted = keys + keys_bytes / sizeof(K);
    int32_t *const rows = (int32_t *)(block.as<char>() + 2 * keys_bytes);
    void *const    temporary = block.as<char>() + 2 * keys_bytes + rows_bytes;

    if (sets.splits) CUDA(cudaMemsetAsync(keys, 0xff, (size_t)(2 * keys_bytes + rows_bytes), stream_of(ctx)));
    write_keys<K><<<blocks_for(tiles, TILE_WARPS), TILE_WARPS * WARP, 0, stream_of(ctx)>>>(c, sets, coords, mask, tiles,
                                                                                           keys, rows);
    LAUNCHED();
    CUDA(cub::DeviceRadixSort::SortPairs(temporary, scratch, keys, sorted, rows, order, N, 0, bits, stream_of(ctx)));
    return MUVOX_OK;
}

static muvox_status sort_rows(muvox_context *ctx, const char *op_name, const muvox_sets &sets,
                              const muvox_matrix &coords, const muvox_matrix &mask, int32_t *order)
{
    const int set_bits = bits_below(sets.count);
    int       bits = 28;

    if (!sets.splits && sets.size <= BLOCK_ROWS) {
        const curve    c = curve_of(coords.cols, coords.cols <= 4 ? 12 : 16); /* cells enough for the rows of a block */
        const unsigned blocks = (unsigned)sets.count;

        if (sets.size <= 512)
            sort_in_block<128, 4><<<blocks, 128, 0, stream_of(ctx)>>>(c, sets, coords, mask, order);
        else if (sets.size <= 1024)
            sort_in_block<256, 4><<<blocks, 256, 0, stream_of(ctx)>>>(c, sets, coords, mask, order);
        else if (sets.size <= 2048)
            sort_in_block<256, 8><<<blocks, 256, 0, stream_of(ctx)>>>(c, sets, coords, mask, order);
        else
            sort_in_block<512, 8><<<blocks, 512, 0, stream_of(ctx)>>>(c, sets, coords, mask, order);
        LAUNCHED();
        return MUVOX_OK;
    }
    /* Keys of 32 bits sort in half the time; a curve of 16 bits is fine enough for sets that need sorting by it. */
    if (31 - set_bits >= 16 && bits > 31 - set_bits) bits = 31 - set_bits;
    const curve c = curve_of(coords.cols, bits);
    if (c.length() + set_bits <= 32) return sort_on_device<uint32_t>(ctx, op_name, c, sets, coords, mask, order);
    return sort_on_device<uint64_t>(ctx, op_name, c, sets, coords, mask, order);
}

muvox_status order_only(muvox_context *ctx, const char *op_name, const muvox_sets &sets, const muvox_matrix &coords,
                        workspace *hold, const int32_t **order)
{
    const muvox_matrix none = {};

    *order = nullptr;
    if (!sets.rows || !rows_sorted(sets)) return MUVOX_OK;
    FORWARD(check_grid(ctx, op_name, (tile_count(sets, WARP) + TILE_WARPS - 1) / TILE_WARPS));
    FORWARD(hold->take(op_name, sets.rows * 4));
    *order = hold->as<int32_t>();
    return sort_rows(ctx, op_name, sets, coords, none, hold->as<int32_t>());
}

template <typename R>
muvox_status order_rows(muvox_context *ctx, const char *op_name, const muvox_sets &sets, const muvox_matrix &coords,
                        const muvox_matrix &mask, int width, bool balls, workspace *hold, ordered_rows<R> *rows)
{
    const int64_t N = sets.rows, tiles = tile_count(sets, WARP), ball_count = balls ? BALLS * tiles : 0;
    workspace     order(ctx);

    rows->width = width;
    if (N == 0) return MUVOX_OK;
    FORWARD(check_grid(ctx, op_name, (tiles + TILE_WARPS - 1) / TILE_WARPS));
    if (rows_sorted(sets)) {
        FORWARD(order.take(op_name, N * 4));
        FORWARD(sort_rows(ctx, op_name, sets, coords, mask, order.as<int32_t>()));
    }
    const int64_t bytes =
        ((N + 2 * tiles + ball_count) * width + ball_count) * (int64_t)sizeof(R) + (N + tiles + ball_count) * 4;
    FORWARD(hold->take(op_name, bytes));
    /* Splits that are wrong leave places and tiles of no set: their rows take no part. */
    if (sets.splits) CUDA(cudaMemsetAsync(hold->as<void>(), 0xff, (size_t)bytes, stream_of(ctx)));
    rows->points = hold->as<R>();
    rows->boxes = rows->points + N * width;
    rows->centres = balls ? rows->boxes + 2 * tiles * width : nullptr;
    rows->radii = rows->boxes + (2 * tiles + ball_count) * width;
    rows->rows = (int32_t *)(rows->radii + ball_count);
    rows->lowest = rows->rows + N;
    rows->lowest_in_ball = rows->lowest + tiles;
    pack_rows<R><<<blocks_for(tiles, TILE_WARPS), TILE_WARPS * WARP, 0, stream_of(ctx)>>>(sets, coords, mask, tiles,
                                                                                          order.as<int32_t>(), *rows);
    LAUNCHED();
    return MUVOX_OK;
}

template muvox_status order_rows<float>(muvox_context *, const char *, const muvox_sets &, const muvox_matrix &,
                                        const muvox_matrix &, int, bool, workspace *, ordered_rows<float> *);
template muvox_status order_rows<double>(muvox_context *, const char *, const muvox_sets &, const muvox_matrix &,
                                         const muvox_matrix &, int, bool, workspace *, ordered_rows<double> *);
