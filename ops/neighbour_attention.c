/* neighbour_attention: argument check, plain reference, entry points. The tuned kernels are in neighbour_attention_kernel.inc. */
#include "muvox/neighbour_attention.h"

#include "checks.h"
#include "context.h"
#include "reference.h"

#include <math.h>

#define OP "neighbour_attention"

/* feats, q, k, v, o, and their biases and gradients, have one dtype each. */
static muvox_status check_rows(muvox_context *ctx, const char *name, const muvox_matrix *m,
                               const muvox_neighbour_attention *op, int64_t cols)
{
    FORWARD(check_same_dtype(ctx, OP, name, m->dtype, "feats", op->feats.dtype));
    return check_matrix(ctx, OP, name, m, op->sets.rows, cols);
}

static muvox_status check_bias(muvox_context *ctx, const char *name, const muvox_matrix *m,
                               const muvox_neighbour_attention *op, int64_t cols)
{
    REQUIRE(m->dtype == wide_dtype(op->feats.dtype), MUVOX_BAD_DTYPE, OP ": %s is %s, expected %s beside %s feats",
            name, dtype_name(m->dtype), dtype_name(wide_dtype(op->feats.dtype)), dtype_name(op->feats.dtype));
    return check_matrix(ctx, OP, name, m, 1, cols);
}

static muvox_status check_options(muvox_context *ctx, const muvox_neighbour_attention *op)
{
    FORWARD(check_neighbour_count(ctx, OP, op->neighbours_k));
    REQUIRE(isfinite(op->scale), MUVOX_BAD_ARGUMENT, OP ": scale is %g, expected a finite number", op->scale);
    REQUIRE((unsigned)op->activation <= MUVOX_MISH, MUVOX_BAD_ARGUMENT,
            OP ": activation has unknown number %d, expected linear, relu, selu, sigmoid, swish or mish",
            (int)op->activation);
    REQUIRE(op->offset == 0 || op->offset == 1, MUVOX_BAD_ARGUMENT, OP ": offset is %d, expected 0 or 1", op->offset);
    REQUIRE(op->offset || !op->o.data, MUVOX_BAD_ARGUMENT, OP ": o is given without offset, which alone reads it");
    return check_aggregates(ctx, OP, op->aggregates);
}

static muvox_status check(muvox_context *ctx, const muvox_neighbour_attention *op)
{
    const int64_t N = op->sets.rows, F = op->feats.cols, A = op->q.cols;

    FORWARD(check_call(ctx, OP, op->struct_size, sizeof *op));
    FORWARD(check_floating(ctx, OP, "coords", op->coords.dtype));
    FORWARD(check_floating(ctx, OP, "feats", op->feats.dtype));
    FORWARD(check_same_arithmetic(ctx, OP, "coords", op->coords.dtype, "feats", op->feats.dtype));
    FORWARD(check_options(ctx, op));
    FORWARD(check_matrix(ctx, OP, "coords", &op->coords, N, -1));
    FORWARD(check_matrix(ctx, OP, "feats", &op->feats, N, -1));
    FORWARD(check_rows(ctx, "q", &op->q, op, -1));
    FORWARD(check_rows(ctx, "k", &op->k, op, A));
    FORWARD(check_rows(ctx, "v", &op->v, op, F));
    if (op->offset) FORWARD(check_rows(ctx, "o", &op->o, op, F));
    FORWARD(check_bias(ctx, "bias_q", &op->bias_q, op, A));
    FORWARD(check_bias(ctx, "bias_k", &op->bias_k, op, A));
    FORWARD(check_bias(ctx, "bias_v", &op->bias_v, op, F));
    FORWARD(check_bias(ctx, "bias_out", &op->bias_out, op, F));
    FORWARD(check_mask(ctx, OP, &op->mask, N));
    return check_sets(ctx, OP, &op->sets);
}

muvox_status check_neighbour_attention_forward(muvox_context *ctx, const muvox_neighbour_attention *op)
{
    const int64_t F = op->feats.cols;

    FORWARD(check(ctx, op));
    FORWARD(
        check_row_output(ctx, OP, "out", &op->out, &op->sets, aggregate_count(op->aggregates) * F, op->feats.dtype));
    FORWARD(check_row_output(ctx, OP, "neighbours", &op->neighbours, &op->sets, op->neighbours_k, MUVOX_I32));
    return check_row_output(ctx, OP, "winners", &op->winners, &op->sets, winner_count(op->aggregates) * F,
                            rank_dtype(op->neighbours_k));
}

muvox_status check_neighbour_attention_backward(muvox_context *ctx, const muvox_neighbour_attention *op)
{
    const int64_t     N = op->sets.rows, F = op->feats.cols, A = op->q.cols;
    const muvox_dtype dtype = op->feats.dtype, wide = wide_dtype(dtype);

    FORWARD(check(ctx, op));
    FORWARD(check_saved(ctx, OP, "neighbours", &op->neighbours, N, op->neighbours_k, MUVOX_I32));
    if (winner_count(op->aggregates))
        FORWARD(check_saved(ctx, OP, "winners", &op->winners, N, winner_count(op->aggregates) * F,
                            rank_dtype(op->neighbours_k)));
    FORWARD(check_matrix(ctx, OP, "grad_out", &op->grad_out, N, aggregate_count(op->aggregates) * F));
    FORWARD(check_same_dtype(ctx, OP, "grad_out", op->grad_out.dtype, "feats", dtype));
    FORWARD(check_row_output(ctx, OP, "grad_coords", &op->grad_coords, &op->sets, op->coords.cols, op->coords.dtype));
    FORWARD(check_row_output(ctx, OP, "grad_feats", &op->grad_feats, &op->sets, F, dtype));
    FORWARD(check_row_output(ctx, OP, "grad_q", &op->grad_q, &op->sets, A, dtype));
    FORWARD(check_row_output(ctx, OP, "grad_k", &op->grad_k, &op->sets, A, dtype));
    FORWARD(check_row_output(ctx, OP, "grad_v", &op->grad_v, &op->sets, F, dtype));
    REQUIRE(op->offset || !op->grad_o.data, MUVOX_BAD_ARGUMENT, OP ": grad_o is asked for without offset");
    FORWARD(check_row_output(ctx, OP, "grad_o", &op->grad_o, &op->sets, F, dtype));
    FORWARD(check_output(ctx, OP, "grad_bias_q", &op->grad_bias_q, 1, A, wide));
    FORWARD(check_output(ctx, OP, "grad_bias_k", &op->grad_bias_k, 1, A, wide));
    FORWARD(check_output(ctx, OP, "grad_bias_v", &op->grad_bias_v, 1, F, wide));
    return check_output(ctx, OP, "grad_bias_out", &op->grad_bias_out, 1, F, wide);
}

static double activate(muvox_activation activation, double z)
{
    const double scale = 1.0507009873554805, alpha = 1.6732632423543773; /* SELU's constants, arXiv 1706.02515 */

    switch (activation) {
    case MUVOX_LINEAR: return z;
    case MUVOX_RELU: return z <= 0 ? 0 : z;
    case MUVOX_SELU: return scale * (z > 0 ? z : alpha * expm1(z));
    case MUVOX_SIGMOID: return 1 / (1 + exp(-z));
    case MUVOX_SWISH: return z / (1 + exp(-z));
    case MUVOX_MISH: return z * tanh(log1p(exp(z)));
    }
    return NAN;
}

/* The derivative. */
static double slope(muvox_activation activation, double z)
{
    const double scale = 1.0507009873554805, alpha = 1.6732632423543773;
    const double sigmoid = 1 / (1 + exp(-z)), t = tanh(log1p(exp(z)));

    switch (activation) {
    case MUVOX_LINEAR: return 1;
    case MUVOX_RELU: return z <= 0 ? 0 : 1;
    case MUVOX_SELU: return scale * (z > 0 ? 1 : alpha * exp(z));
    case MUVOX_SIGMOID: return sigmoid * (1 - sigmoid);
    case MUVOX_SWISH: return sigmoid * (1 + z * (1 - sigmoid));
    case MUVOX_MISH: return t + z * (1 - t * t) * sigmoid;
    }
    return NAN;
}

/* The neighbours of one row: n of them, and the tensors of the header with r and t counting them. */
typedef struct {
    int64_t  n;
    int64_t *place, *row;        /* (k) which of them a rank is, −1 = no neighbour; (n) the rows they are */
    double  *one, *w;            /* (k) ones; (n) */
    double  *Q, *K, *V, *P, *B;  /* (n, A) (n, A) (n, F) (n, n) (n, n) */
    double  *z, *y, *dy, *g, *X; /* (n, F) (n, F), and in backward (n, F) (n, F) (n, n), X becomes dS */
} attended;

/* The largest n there can be. */
static int64_t most_neighbours(const muvox_neighbour_attention *op)
{
    const int64_t M = largest_set(&op->sets);

    return op->neighbours_k < M ? op->neighbours_k : M;
}

/* Numbers of 8 bytes in a workspace for one row. */
static int64_t attended_size(const muvox_neighbour_attention *op)
{
    const int64_t n = most_neighbours(op);

    return 4 * op->neighbours_k + n * (2 * op->q.cols + 5 * op->feats.cols + 3 * n);
}

static attended attended_at(void *at, const muvox_neighbour_attention *op)
{
    const int64_t n = most_neighbours(op), k = op->neighbours_k, A = op->q.cols, F = op->feats.cols;
    attended      a = {.place = at};

    a.row = a.place + k;
    a.one = (double *)(a.row + k);
    a.w = a.one + k;
    a.Q = a.w + k;
    a.K = a.Q + n * A;
    a.V = a.K + n * A;
    a.z = a.V + n * F;
    a.y = a.z + n * F;
    a.dy = a.y + n * F;
    a.g = a.dy + n * F;
    a.P = a.g + n * F;
    a.B = a.P + n * n;
    a.X = a.B + n * n;
    for (int64_t r = 0; r < k; r++) a.one[r] = 1;
    return a;
}

/* P of the header from S, which it holds, n × n. */
static void softmax_over_keys(int64_t n, double *P)
{
    for (int64_t r = 0; r < n; r++) {
        double max = -INFINITY, sum = 0;

        for (int64_t t = 0; t < n; t++)
            if (P[r * n + t] > max || isnan(P[r * n + t])) max = P[r * n + t];
        for (int64_t t = 0; t < n; t++) sum += exp(P[r * n + t] - max);
        for (int64_t t = 0; t < n; t++) P[r * n + t] = exp(P[r * n + t] - max) / sum;
    }
}

/* B and P of offset, from S that P holds. */
static void softmax_over_queries(int64_t n, double *P, double *B)
{
    for (int64_t t = 0; t < n; t++) {
        double max = -INFINITY, sum = 0;

        for (int64_t r = 0; r < n; r++)
            if (P[r * n + t] > max || isnan(P[r * n + t])) max = P[r * n + t];
        for (int64_t r = 0; r < n; r++) sum += exp(P[r * n + t] - max);
        for (int64_t r = 0; r < n; r++) B[r * n + t] = exp(P[r * n + t] - max) / sum;
    }
    for (int64_t r = 0; r < n; r++) {
        double sum = 1e-17;

        for (int64_t t = 0; t < n; t++) sum += B[r * n + t];
        for (int64_t t = 0; t < n; t++) P[r * n + t] = B[r * n + t] / sum;
    }
}

/* Σ_c a[c] b[c] */
static double dot(int64_t n, const double *a, const double *b)
{
    double sum = 0;

    for (int64_t c = 0; c < n; c++) sum += a[c] * b[c];
    return sum;
}

/* One bias: row 0 of a (1, …) matrix. */
#define BIAS(name, c) element(op->name.data, op->name.dtype, c)

/* Everything up to y for row i of set s, whose neighbours are known by rank. */
static void attend(const muvox_neighbour_attention *op, int64_t s, int64_t i, const int64_t *neighbours, attended *a)
{
    const int64_t A = op->q.cols, F = op->feats.cols;

    a->n = 0;
    for (int64_t r = 0; r < op->neighbours_k; r++) {
        a->place[r] = neighbours[r] < 0 ? -1 : a->n;
        if (neighbours[r] >= 0) a->row[a->n++] = neighbours[r];
    }
    const int64_t n = a->n;

    for (int64_t r = 0; r < n; r++) {
        const int64_t j = a->row[r];

        a->w[r] = exp(-op->scale * squared_distance_reference(&op->coords, ROW(&op->coords, &op->sets, s, i),
                                                              &op->coords, ROW(&op->coords, &op->sets, s, j)));
        for (int64_t c = 0; c < A; c++) a->Q[r * A + c] = a->w[r] * IN(q, s, j, c) + BIAS(bias_q, c);
        for (int64_t c = 0; c < A; c++) a->K[r * A + c] = a->w[r] * IN(k, s, j, c) + BIAS(bias_k, c);
        for (int64_t f = 0; f < F; f++) a->V[r * F + f] = a->w[r] * IN(v, s, j, f) + BIAS(bias_v, f);
    }
    for (int64_t r = 0; r < n; r++)
        for (int64_t t = 0; t < n; t++)
            a->P[r * n + t] = dot(A, a->Q + r * A, a->K + t * A) / (op->offset ? 1 : sqrt((double)A));
    if (op->offset)
        softmax_over_queries(n, a->P, a->B);
    else
        softmax_over_keys(n, a->P);
    for (int64_t r = 0; r < n; r++)
        for (int64_t f = 0; f < F; f++) {
            double sum = 0;

            for (int64_t t = 0; t < n; t++) sum += a->P[r * n + t] * a->V[t * F + f];
            a->z[r * F + f] = (op->offset ? a->w[r] * IN(o, s, a->row[r], f) - sum : sum) + BIAS(bias_out, f);
            a->y[r * F + f] = a->w[r] * IN(feats, s, a->row[r], f) + activate(op->activation, a->z[r * F + f]);
        }
}

/* y as rows 0 … n − 1 of one set, which the aggregation of aggregate.c reads by `place`. */
static muvox_matrix matrix_of_y(const attended *a, int64_t F)
{
    const muvox_matrix y = {a->y, MUVOX_F64, a->n, F, F, 0};

    return y;
}

static const muvox_sets one_set = {.count = 1};

/* The neighbours of row i of set s by rank, −1 = none: found, or saved. */
static void find(const muvox_neighbour_attention *op, int64_t s, int64_t i, int64_t *neighbours)
{
    const muvox_search_reference search = {.coords = &op->coords,
                                           .queries = &op->coords,
                                           .mask = &op->mask,
                                           .sets = &op->sets,
                                           .set = s,
                                           .query_at = ROW(&op->coords, &op->sets, s, i),
                                           .self = -1};
    bool                         more = row_valid(&op->mask, &op->sets, s, i);

    for (int64_t r = 0; r < op->neighbours_k; r++) {
        neighbours[r] = more ? next_nearest_reference(&search, r ? neighbours[r - 1] : -1) : -1;
        more = neighbours[r] >= 0;
        OUT(neighbours, s, i, r, (double)neighbours[r]);
    }
}

static void store_aggregates(const muvox_neighbour_attention *op, int64_t s, int64_t i, const attended *a)
{
    const int64_t             F = op->feats.cols;
    const muvox_matrix        y = matrix_of_y(a, F);
    const muvox_neighbourhood around = {op->neighbours_k, a->place, a->one, false};

    for (int at = 0, w = 0; at < aggregate_count(op->aggregates); at++) {
        const muvox_aggregate_kind kind = aggregate_at(op->aggregates, at);
        const bool                 wins = kind == MUVOX_MAX || kind == MUVOX_ABSMAX;

        for (int64_t f = 0; f < F; f++) {
            int64_t winner = -1;

            OUT(out, s, i, at * F + f, aggregate_reference(kind, &y, &one_set, 0, f, &around, &winner));
            if (wins && op->winners.data)
                set_rank(&op->winners, ROW(&op->winners, &op->sets, s, i) + w * F + f, winner);
        }
        w += wins;
    }
}

muvox_status neighbour_attention_forward_reference(muvox_context *ctx, const muvox_neighbour_attention *op)
{
    const int64_t k = op->neighbours_k;
    void         *workspace;

    FORWARD(workspace_alloc(ctx, OP, (size_t)(k + attended_size(op)) * sizeof(int64_t), 1, &workspace));
    int64_t *const neighbours = workspace;
    attended       a = attended_at(neighbours + k, op);

    for (int64_t s = 0; s < op->sets.count; s++)
        for (int64_t i = 0; i < set_rows(&op->sets, s); i++) {
            find(op, s, i, neighbours);
            attend(op, s, i, neighbours, &a);
            store_aggregates(op, s, i, &a);
        }
    workspace_free(ctx, workspace);
    return MUVOX_OK;
}

/* Sums over the rows of a set, (M, width) each, and over all rows. */
typedef struct {
    double *coords, *feats, *q, *k, *v, *o;
    double *bias_q, *bias_k, *bias_v, *bias_out;
} gradients;

/* dy, g and dS for row i of set s, and what of dw does not pass through q, k and v. */
static void differentiate(const muvox_neighbour_attention *op, int64_t s, int64_t i, attended *a)
{
    const int64_t             n = a->n, F = op->feats.cols;
    const muvox_matrix        y = matrix_of_y(a, F);
    const muvox_neighbourhood around = {op->neighbours_k, a->place, a->one, false};
    muvox_matrix              grad_out = op->grad_out;
    muvox_output              winners = op->winners;

    grad_out.data = (const char *)grad_out.data + (size_t)ROW(&grad_out, &op->sets, s, i) * dtype_size(grad_out.dtype);
    if (winners.data)
        winners.data = (char *)winners.data + (size_t)ROW(&winners, &op->sets, s, i) * dtype_size(winners.dtype);
    for (int64_t r = 0; r < op->neighbours_k; r++)
        for (int64_t f = 0; f < F && a->place[r] >= 0; f++) {
            const int64_t at = a->place[r] * F + f;

            a->dy[at] = dm_reference(op->aggregates, &grad_out, &winners, &y, &one_set, 0, 0, f, r, &around);
            a->g[at] = (op->offset ? -1 : 1) * slope(op->activation, a->z[at]) * a->dy[at];
        }
    for (int64_t r = 0; r < n; r++) {
        double D = 0;

        for (int64_t t = 0; t < n; t++) D += a->P[r * n + t] * dot(F, a->g + r * F, a->V + t * F);
        for (int64_t t = 0; t < n; t++) a->X[r * n + t] = a->P[r * n + t] * (dot(F, a->g + r * F, a->V + t * F) - D);
    }
    for (int64_t t = 0; t < n && op->offset; t++) {
        double T = 0;

        for (int64_t r = 0; r < n; r++) T += a->X[r * n + t];
        for (int64_t r = 0; r < n; r++) a->X[r * n + t] -= a->B[r * n + t] * T;
    }
}

/* One element of a projection: gradient `d` of w x + bias, x column c of row j of `from`; returns its share of dw. */
static double project(const muvox_neighbour_attention *op, const muvox_matrix *from, int64_t s, int64_t j, int64_t c,
                      double w, double d, double *rows, double *bias)
{
    rows[j * from->cols + c] += w * d;
    if (bias) bias[c] += d;
    return d * element(from->data, from->dtype, ROW(from, &op->sets, s, j) + c);
}

/* Row i's share of all sums. */
static void add_gradients(const muvox_neighbour_attention *op, int64_t s, int64_t i, attended *a, gradients *sum)
{
    const int64_t n = a->n, A = op->q.cols, F = op->feats.cols, d = op->coords.cols;
    const double  root = op->offset ? 1 : sqrt((double)A);

    for (int64_t r = 0; r < n; r++) {
        const int64_t j = a->row[r];
        const double  w = a->w[r];
        double        dw = 0;

        for (int64_t c = 0; c < A; c++) {
            double dQ = 0, dK = 0;

            for (int64_t t = 0; t < n; t++) {
                dQ += a->X[r * n + t] * a->K[t * A + c] / root;
                dK += a->X[t * n + r] * a->Q[t * A + c] / root;
            }
            dw += project(op, &op->q, s, j, c, w, dQ, sum->q, sum->bias_q);
            dw += project(op, &op->k, s, j, c, w, dK, sum->k, sum->bias_k);
        }
        for (int64_t f = 0; f < F; f++) {
            const double dz = op->offset ? -a->g[r * F + f] : a->g[r * F + f];
            double       dV = 0;

            for (int64_t t = 0; t < n; t++) dV += a->P[t * n + r] * a->g[t * F + f];
            dw += project(op, &op->v, s, j, f, w, dV, sum->v, sum->bias_v);
            dw += project(op, &op->feats, s, j, f, w, a->dy[r * F + f], sum->feats, NULL);
            if (op->offset) dw += project(op, &op->o, s, j, f, w, dz, sum->o, NULL);
            sum->bias_out[f] += dz;
        }
        for (int64_t c = 0; c < d; c++) {
            const double step = -2 * op->scale * w * dw * (IN(coords, s, i, c) - IN(coords, s, j, c));

            sum->coords[i * d + c] += step;
            sum->coords[j * d + c] -= step;
        }
    }
}

static void store_gradients(const muvox_neighbour_attention *op, int64_t s, const gradients *sum)
{
    const int64_t A = op->q.cols, F = op->feats.cols, d = op->coords.cols;

    for (int64_t i = 0; i < set_rows(&op->sets, s); i++) {
        for (int64_t c = 0; c < d; c++) OUT(grad_coords, s, i, c, sum->coords[i * d + c]);
        for (int64_t c = 0; c < A; c++) OUT(grad_q, s, i, c, sum->q[i * A + c]);
        for (int64_t c = 0; c < A; c++) OUT(grad_k, s, i, c, sum->k[i * A + c]);
        for (int64_t f = 0; f < F; f++) OUT(grad_feats, s, i, f, sum->feats[i * F + f]);
        for (int64_t f = 0; f < F; f++) OUT(grad_v, s, i, f, sum->v[i * F + f]);
        for (int64_t f = 0; f < F; f++) OUT(grad_o, s, i, f, sum->o[i * F + f]);
    }
}

muvox_status neighbour_attention_backward_reference(muvox_context *ctx, const muvox_neighbour_attention *op)
{
    const int64_t A = op->q.cols, F = op->feats.cols, d = op->coords.cols, k = op->neighbours_k;
    const int64_t M = largest_set(&op->sets), row = d + 2 * A + 3 * F;
    const int64_t sums = M * row + 2 * (A + F);
    void         *workspace;

    FORWARD(workspace_alloc(ctx, OP, (size_t)(k + sums + attended_size(op)) * sizeof(double), 1, &workspace));
    int64_t *const neighbours = workspace;
    double *const  at = (double *)(neighbours + k);
    attended       a = attended_at(at + sums, op);
    gradients      sum = {.coords = at,
                          .q = at + M * d,
                          .k = at + M * (d + A),
                          .feats = at + M * (d + 2 * A),
                          .v = at + M * (d + 2 * A + F),
                          .o = at + M * (d + 2 * A + 2 * F),
                          .bias_q = at + M * row};

    sum.bias_k = sum.bias_q + A;
    sum.bias_v = sum.bias_k + A;
    sum.bias_out = sum.bias_v + F;
    for (int64_t c = 0; c < 2 * (A + F); c++) sum.bias_q[c] = 0;
    for (int64_t s = 0; s < op->sets.count; s++) {
        for (int64_t c = 0; c < M * row; c++) at[c] = 0;
        for (int64_t i = 0; i < set_rows(&op->sets, s); i++) {
            for (int64_t r = 0; r < k; r++) neighbours[r] = (int64_t)IN(neighbours, s, i, r);
            attend(op, s, i, neighbours, &a);
            differentiate(op, s, i, &a);
            add_gradients(op, s, i, &a, &sum);
        }
        store_gradients(op, s, &sum);
    }
    for (int64_t c = 0; c < A; c++) OUT_AT(grad_bias_q, c, sum.bias_q[c]);
    for (int64_t c = 0; c < A; c++) OUT_AT(grad_bias_k, c, sum.bias_k[c]);
    for (int64_t f = 0; f < F; f++) OUT_AT(grad_bias_v, f, sum.bias_v[f]);
    for (int64_t f = 0; f < F; f++) OUT_AT(grad_bias_out, f, sum.bias_out[f]);
    workspace_free(ctx, workspace);
    return MUVOX_OK;
}

muvox_status muvox_neighbour_attention_forward(muvox_context *ctx, const muvox_neighbour_attention *op)
{
    const muvox_kernels *kernels;

    FORWARD(check_neighbour_attention_forward(ctx, op));
    FORWARD(check_splits(ctx, OP, "splits", &op->sets));
    FORWARD(kernels_for(ctx, OP, op->feats.dtype, &kernels));
    return kernels->neighbour_attention_forward(ctx, op);
}

muvox_status muvox_neighbour_attention_backward(muvox_context *ctx, const muvox_neighbour_attention *op)
{
    const muvox_kernels *kernels;

    FORWARD(check_neighbour_attention_backward(ctx, op));
    FORWARD(check_splits(ctx, OP, "splits", &op->sets));
    FORWARD(check_neighbours(ctx, OP, op->neighbours.data, op->neighbours.row_stride, op->neighbours.set_stride,
                             op->neighbours_k, &op->sets, &op->sets));
    FORWARD(kernels_for(ctx, OP, op->feats.dtype, &kernels));
    return kernels->neighbour_attention_backward(ctx, op);
}
