/* attention: argument check, plain reference, entry points. The tuned kernels are in attention_kernel.inc. */
#include "muvox/attention.h"

#include "checks.h"
#include "context.h"
#include "convert.h"
#include "reference.h"
#include "sets.h"

#include <math.h>

static muvox_status check(muvox_context *ctx, const muvox_attention *op)
{
    const int64_t     N = op->sets.rows;
    const muvox_dtype statistics = wide_dtype(op->q.dtype);

    FORWARD(check_call(ctx, "attention", op->struct_size, sizeof *op));
    FORWARD(check_floating(ctx, "attention", "q", op->q.dtype));
    FORWARD(check_same_dtype(ctx, "attention", "k", op->k.dtype, "q", op->q.dtype));
    FORWARD(check_same_dtype(ctx, "attention", "v", op->v.dtype, "q", op->q.dtype));
    FORWARD(check_matrix(ctx, "attention", "q", &op->q, N, -1));
    FORWARD(check_matrix(ctx, "attention", "k", &op->k, N, op->q.cols));
    FORWARD(check_matrix(ctx, "attention", "v", &op->v, N, -1));
    REQUIRE(!isinf(op->scale), MUVOX_BAD_ARGUMENT, "attention: scale is %g, expected a finite number", op->scale);
    FORWARD(check_mask(ctx, "attention", &op->mask, N));
    if (op->bias.data) {
        FORWARD(check_matrix(ctx, "attention", "bias", &op->bias, N, 1));
        REQUIRE(op->bias.dtype == statistics, MUVOX_BAD_DTYPE, "attention: bias is %s, expected %s",
                dtype_name(op->bias.dtype), dtype_name(statistics));
    }
    FORWARD(check_sets(ctx, "attention", &op->sets));
    return check_row_weights(ctx, "attention", &op->row_weights, statistics, op->sets.rows);
}

/* What the checks before do not read. */
static muvox_status check_data(muvox_context *ctx, const muvox_attention *op)
{
    FORWARD(check_splits(ctx, "attention", "splits", &op->sets));
    return check_weight_values(ctx, "attention", &op->row_weights, &op->sets);
}

muvox_status check_attention_forward(muvox_context *ctx, const muvox_attention *op)
{
    FORWARD(check(ctx, op));
    FORWARD(check_row_output(ctx, "attention", "out", &op->out, &op->sets, op->v.cols, op->q.dtype));
    return check_row_output(ctx, "attention", "lse", &op->lse, &op->sets, 1, wide_dtype(op->q.dtype));
}

muvox_status check_attention_backward(muvox_context *ctx, const muvox_attention *op)
{
    const int64_t N = op->sets.rows, A = op->q.cols, C = op->v.cols;

    FORWARD(check(ctx, op));
    FORWARD(check_saved(ctx, "attention", "out", &op->out, N, C, op->q.dtype));
    FORWARD(check_saved(ctx, "attention", "lse", &op->lse, N, 1, wide_dtype(op->q.dtype)));
    FORWARD(check_matrix(ctx, "attention", "grad_out", &op->grad_out, N, C));
    FORWARD(check_same_dtype(ctx, "attention", "grad_out", op->grad_out.dtype, "v", op->v.dtype));
    if (op->grad_lse.data) {
        FORWARD(check_matrix(ctx, "attention", "grad_lse", &op->grad_lse, N, 1));
        FORWARD(check_same_dtype(ctx, "attention", "grad_lse", op->grad_lse.dtype, "lse", op->lse.dtype));
    }
    FORWARD(check_row_output(ctx, "attention", "grad_q", &op->grad_q, &op->sets, A, op->q.dtype));
    FORWARD(check_row_output(ctx, "attention", "grad_k", &op->grad_k, &op->sets, A, op->q.dtype));
    FORWARD(check_row_output(ctx, "attention", "grad_v", &op->grad_v, &op->sets, C, op->q.dtype));
    FORWARD(check_row_output(ctx, "attention", "grad_bias", &op->grad_bias, &op->sets, 1, op->lse.dtype));
    REQUIRE(op->row_weights.data || !op->grad_row_weights.data, MUVOX_BAD_ARGUMENT,
            "attention: grad_row_weights is asked for without row_weights");
    return check_row_output(ctx, "attention", "grad_row_weights", &op->grad_row_weights, &op->sets, 1, op->lse.dtype);
}

static double scale_of(const muvox_attention *op)
{
    return isnan(op->scale) ? 1 / sqrt((double)op->q.cols) : op->scale;
}

static double weight_of(const muvox_attention *op, int64_t s, int64_t j)
{
    return op->row_weights.data ? IN(row_weights, s, j, 0) : 1;
}

/* Row j is a key: not masked, and not of weight 0. */
static bool is_key(const muvox_attention *op, int64_t s, int64_t j)
{
    return row_valid(&op->mask, &op->sets, s, j) && weight_of(op, s, j) != 0;
}

/* S_ij = scale q_i·k_j + b_j */
static double score(const muvox_attention *op, int64_t s, int64_t i, int64_t j)
{
    double sum = 0;

    for (int64_t a = 0; a < op->q.cols; a++) sum += IN(q, s, i, a) * IN(k, s, j, a);
    return scale_of(op) * sum + (op->bias.data ? IN(bias, s, j, 0) : 0);
}

static void forward_row(const muvox_attention *op, int64_t s, int64_t i)
{
    const int64_t M = set_rows(&op->sets, s);
    const bool    valid = row_valid(&op->mask, &op->sets, s, i);
    double        max = -INFINITY, sum = 0;

    for (int64_t j = 0; j < M && valid; j++) {
        const double S = is_key(op, s, j) ? score(op, s, i, j) : -INFINITY;

        if (S > max || isnan(S)) max = S;
    }
    if (max == -INFINITY) max = 0; /* no key, or every score −inf: exp gives 0, not exp(−inf + inf) */
    for (int64_t j = 0; j < M && valid; j++)
        if (is_key(op, s, j)) sum += weight_of(op, s, j) * exp(score(op, s, i, j) - max);
    for (int64_t c = 0; c < op->v.cols; c++) {
        double out = 0;

        for (int64_t j = 0; j < M && valid; j++)
            if (is_key(op, s, j)) out += weight_of(op, s, j) * exp(score(op, s, i, j) - max) * IN(v, s, j, c);
        OUT(out, s, i, c, sum == 0 ? 0 : out / sum);
    }
    OUT(lse, s, i, 0, max + log(sum));
}

muvox_status attention_forward_reference(muvox_context *ctx, const muvox_attention *op)
{
    (void)ctx;
    for (int64_t s = 0; s < op->sets.count; s++)
        for (int64_t i = 0; i < set_rows(&op->sets, s); i++) forward_row(op, s, i);
    return MUVOX_OK;
}

/* exp(S_ij − lse_i), which times u_j is P_ij; 0 where either row is masked or the query has no key. */
static double ratio(const muvox_attention *op, int64_t s, int64_t i, int64_t j)
{
    const bool   valid = row_valid(&op->mask, &op->sets, s, i) && row_valid(&op->mask, &op->sets, s, j);
    const double lse = IN(lse, s, i, 0);

    return !valid || lse == -INFINITY ? 0 : exp(score(op, s, i, j) - lse);
}

static double probability(const muvox_attention *op, int64_t s, int64_t i, int64_t j)
{
    return is_key(op, s, j) ? weight_of(op, s, j) * ratio(op, s, i, j) : 0;
}

/* g_i·v_j − D_i, D_i = g_i·out_i − g_lse,i, times `factor`; 0 where that is 0, whatever else the rows hold */
static double pull(const muvox_attention *op, int64_t s, int64_t i, int64_t j, double factor)
{
    double dp = op->grad_lse.data ? IN(grad_lse, s, i, 0) : 0;

    if (factor == 0) return 0;
    for (int64_t c = 0; c < op->v.cols; c++) dp += IN(grad_out, s, i, c) * (IN(v, s, j, c) - IN(out, s, i, c));
    return factor * dp;
}

static double dscore(const muvox_attention *op, int64_t s, int64_t i, int64_t j)
{
    return pull(op, s, i, j, probability(op, s, i, j));
}

/* a · b, 0 where a is */
static double product(double a, double b)
{
    return a == 0 ? 0 : a * b;
}

static void backward_row(const muvox_attention *op, int64_t s, int64_t i)
{
    const double  scale = scale_of(op);
    const int64_t M = set_rows(&op->sets, s);
    double        db = 0, du = 0;

    for (int64_t a = 0; a < op->q.cols; a++) {
        double dq = 0, dk = 0;

        for (int64_t j = 0; j < M; j++) {
            if (op->grad_q.data) dq += product(scale * dscore(op, s, i, j), IN(k, s, j, a));
            if (op->grad_k.data) dk += product(scale * dscore(op, s, j, i), IN(q, s, j, a));
        }
        OUT(grad_q, s, i, a, dq);
        OUT(grad_k, s, i, a, dk);
    }
    for (int64_t c = 0; c < op->v.cols && op->grad_v.data; c++) {
        double dv = 0;

        for (int64_t j = 0; j < M; j++) dv += product(probability(op, s, j, i), IN(grad_out, s, j, c));
        OUT(grad_v, s, i, c, dv);
    }
    for (int64_t j = 0; j < M; j++) {
        if (op->grad_bias.data) db += dscore(op, s, j, i);
        if (op->grad_row_weights.data) du += pull(op, s, j, i, ratio(op, s, j, i));
    }
    OUT(grad_bias, s, i, 0, db);
    OUT(grad_row_weights, s, i, 0, du);
}

muvox_status attention_backward_reference(muvox_context *ctx, const muvox_attention *op)
{
    (void)ctx;
    for (int64_t s = 0; s < op->sets.count; s++)
        for (int64_t i = 0; i < set_rows(&op->sets, s); i++) backward_row(op, s, i);
    return MUVOX_OK;
}

muvox_status muvox_attention_forward(muvox_context *ctx, const muvox_attention *op)
{
    const muvox_kernels *kernels;

    FORWARD(check_attention_forward(ctx, op));
    FORWARD(check_data(ctx, op));
    FORWARD(kernels_for(ctx, "attention", op->q.dtype, &kernels));
    return kernels->attention_forward(ctx, op);
}

muvox_status muvox_attention_backward(muvox_context *ctx, const muvox_attention *op)
{
    const muvox_kernels *kernels;

    FORWARD(check_attention_backward(ctx, op));
    FORWARD(check_data(ctx, op));
    FORWARD(kernels_for(ctx, "attention", op->q.dtype, &kernels));
    return kernels->attention_backward(ctx, op);
}
