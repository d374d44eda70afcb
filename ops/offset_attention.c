/* offset_attention: argument check, plain reference, entry points. The tuned kernels are in offset_attention_kernel.inc. */
#include "muvox/offset_attention.h"

#include "checks.h"
#include "context.h"
#include "reference.h"

#include <math.h>

#define OP "offset_attention"

static muvox_status check(muvox_context *ctx, const muvox_offset_attention *op)
{
    const int64_t N = op->sets.rows;

    FORWARD(check_call(ctx, OP, op->struct_size, sizeof *op));
    FORWARD(check_floating(ctx, OP, "q", op->q.dtype));
    FORWARD(check_same_dtype(ctx, OP, "k", op->k.dtype, "q", op->q.dtype));
    FORWARD(check_same_dtype(ctx, OP, "v", op->v.dtype, "q", op->q.dtype));
    FORWARD(check_matrix(ctx, OP, "q", &op->q, N, -1));
    FORWARD(check_matrix(ctx, OP, "k", &op->k, N, op->q.cols));
    FORWARD(check_matrix(ctx, OP, "v", &op->v, N, -1));
    FORWARD(check_mask(ctx, OP, &op->mask, N));
    REQUIRE(isfinite(op->scale), MUVOX_BAD_ARGUMENT, OP ": scale is %g, expected a finite number", op->scale);
    REQUIRE(isfinite(op->eps) && op->eps >= 0, MUVOX_BAD_ARGUMENT, OP ": eps is %g, expected 0 or more", op->eps);
    return check_sets(ctx, OP, &op->sets);
}

muvox_status check_offset_attention_forward(muvox_context *ctx, const muvox_offset_attention *op)
{
    FORWARD(check(ctx, op));
    REQUIRE(op->sets.rows == 0 || (op->out.data && op->column_lse.data && op->log_sum.data), MUVOX_BAD_ARGUMENT,
            OP ": out, column_lse or log_sum is missing, all three are needed");
    FORWARD(check_row_output(ctx, OP, "out", &op->out, &op->sets, op->v.cols, op->q.dtype));
    FORWARD(check_row_output(ctx, OP, "column_lse", &op->column_lse, &op->sets, 1, wide_dtype(op->q.dtype)));
    return check_row_output(ctx, OP, "log_sum", &op->log_sum, &op->sets, 1, wide_dtype(op->q.dtype));
}

muvox_status check_offset_attention_backward(muvox_context *ctx, const muvox_offset_attention *op)
{
    const int64_t N = op->sets.rows, A = op->q.cols, C = op->v.cols;

    FORWARD(check(ctx, op));
    FORWARD(check_saved(ctx, OP, "out", &op->out, N, C, op->q.dtype));
    FORWARD(check_saved(ctx, OP, "column_lse", &op->column_lse, N, 1, wide_dtype(op->q.dtype)));
    FORWARD(check_saved(ctx, OP, "log_sum", &op->log_sum, N, 1, wide_dtype(op->q.dtype)));
    FORWARD(check_matrix(ctx, OP, "grad_out", &op->grad_out, N, C));
    FORWARD(check_same_dtype(ctx, OP, "grad_out", op->grad_out.dtype, "v", op->v.dtype));
    FORWARD(check_row_output(ctx, OP, "grad_q", &op->grad_q, &op->sets, A, op->q.dtype));
    FORWARD(check_row_output(ctx, OP, "grad_k", &op->grad_k, &op->sets, A, op->q.dtype));
    return check_row_output(ctx, OP, "grad_v", &op->grad_v, &op->sets, C, op->q.dtype);
}

static bool valid(const muvox_offset_attention *op, int64_t s, int64_t i)
{
    return row_valid(&op->mask, &op->sets, s, i);
}

/* S_ij = scale q_i·k_j, −inf where a row is masked */
static double score(const muvox_offset_attention *op, int64_t s, int64_t i, int64_t j)
{
    double sum = 0;

    if (!valid(op, s, i) || !valid(op, s, j)) return -INFINITY;
    for (int64_t a = 0; a < op->q.cols; a++) sum += IN(q, s, i, a) * IN(k, s, j, a);
    return op->scale * sum;
}

/* L_j = log Σ_i exp(S_ij) */
static double column_lse(const muvox_offset_attention *op, int64_t s, int64_t j)
{
    const int64_t M = set_rows(&op->sets, s);
    double        max = -INFINITY, sum = 0;

    for (int64_t i = 0; i < M; i++) {
        const double S = score(op, s, i, j);

        if (S > max || isnan(S)) max = S;
    }
    if (max == -INFINITY) return max;
    for (int64_t i = 0; i < M; i++) sum += exp(score(op, s, i, j) - max);
    return max + log(sum);
}

/* A_ij = exp(S_ij − L_j), from the L that forward wrote */
static double share(const muvox_offset_attention *op, int64_t s, int64_t i, int64_t j)
{
    const double L = IN(column_lse, s, j, 0);

    return L == -INFINITY ? 0 : exp(score(op, s, i, j) - L);
}

muvox_status offset_attention_forward_reference(muvox_context *ctx, const muvox_offset_attention *op)
{
    (void)ctx;
    for (int64_t s = 0; s < op->sets.count; s++) {
        const int64_t M = set_rows(&op->sets, s);

        for (int64_t j = 0; j < M; j++) OUT(column_lse, s, j, 0, column_lse(op, s, j));
        for (int64_t i = 0; i < M; i++) {
            double r = op->eps;

            for (int64_t j = 0; j < M; j++) r += share(op, s, i, j);
            for (int64_t c = 0; c < op->v.cols; c++) {
                double out = 0;

                for (int64_t j = 0; j < M; j++)
                    if (valid(op, s, j)) out += share(op, s, i, j) * IN(v, s, j, c);
                OUT(out, s, i, c, valid(op, s, i) && r != 0 ? out / r : 0);
            }
            OUT(log_sum, s, i, 0, valid(op, s, i) ? log(r) : -INFINITY);
        }
    }
    return MUVOX_OK;
}

/* B_ij = A_ij / r_i */
static double normalised(const muvox_offset_attention *op, int64_t s, int64_t i, int64_t j)
{
    const double A = share(op, s, i, j);

    return A == 0 ? 0 : A * exp(-IN(log_sum, s, i, 0));
}

/* X_ij = B_ij (g_i·v_j − g_i·out_i) */
static double pull(const muvox_offset_attention *op, int64_t s, int64_t i, int64_t j)
{
    const double B = normalised(op, s, i, j);
    double       dp = 0;

    for (int64_t c = 0; c < op->v.cols && B != 0; c++)
        dp += IN(grad_out, s, i, c) * (IN(v, s, j, c) - IN(out, s, i, c));
    return B == 0 ? 0 : B * dp;
}

/* dS_ij = X_ij − A_ij T_j, T_j = Σ_i X_ij */
static double dscore(const muvox_offset_attention *op, int64_t s, int64_t i, int64_t j)
{
    const double A = share(op, s, i, j);
    double       T = 0;

    if (A == 0) return 0;
    for (int64_t row = 0; row < set_rows(&op->sets, s); row++) T += pull(op, s, row, j);
    return pull(op, s, i, j) - A * T;
}

muvox_status offset_attention_backward_reference(muvox_context *ctx, const muvox_offset_attention *op)
{
    (void)ctx;
    for (int64_t s = 0; s < op->sets.count; s++) {
        const int64_t M = set_rows(&op->sets, s);

        for (int64_t i = 0; i < M; i++) {
            for (int64_t a = 0; a < op->q.cols; a++) {
                double dq = 0, dk = 0;

                for (int64_t j = 0; j < M; j++) {
                    if (!valid(op, s, i) || !valid(op, s, j)) continue;
                    if (op->grad_q.data) dq += op->scale * dscore(op, s, i, j) * IN(k, s, j, a);
                    if (op->grad_k.data) dk += op->scale * dscore(op, s, j, i) * IN(q, s, j, a);
                }
                OUT(grad_q, s, i, a, dq);
                OUT(grad_k, s, i, a, dk);
            }
            for (int64_t c = 0; c < op->v.cols && op->grad_v.data; c++) {
                double dv = 0;

                for (int64_t j = 0; j < M; j++)
                    if (normalised(op, s, j, i) != 0) dv += normalised(op, s, j, i) * IN(grad_out, s, j, c);
                OUT(grad_v, s, i, c, dv);
            }
        }
    }
    return MUVOX_OK;
}

muvox_status muvox_offset_attention_forward(muvox_context *ctx, const muvox_offset_attention *op)
{
    const muvox_kernels *kernels;

    FORWARD(check_offset_attention_forward(ctx, op));
    FORWARD(check_splits(ctx, OP, "splits", &op->sets));
    FORWARD(kernels_for(ctx, OP, op->q.dtype, &kernels));
    return kernels->offset_attention_forward(ctx, op);
}

muvox_status muvox_offset_attention_backward(muvox_context *ctx, const muvox_offset_attention *op)
{
    const muvox_kernels *kernels;

    FORWARD(check_offset_attention_backward(ctx, op));
    FORWARD(check_splits(ctx, OP, "splits", &op->sets));
    FORWARD(kernels_for(ctx, OP, op->q.dtype, &kernels));
    return kernels->offset_attention_backward(ctx, op);
}
