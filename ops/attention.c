/* attention: argument check, plain reference, entry points. The tuned kernels are in attention_kernel.inc. */
#include "muvox/attention.h"

#include "check.h"
#include "context.h"
#include "convert.h"
#include "reference.h"
#include "sets.h"

#include <math.h>

static muvox_status check(muvox_context *ctx, const muvox_attention *op)
{
    const int64_t     N = op->sets.rows;
    const muvox_dtype statistics = op->q.dtype == MUVOX_F64 ? MUVOX_F64 : MUVOX_F32;

    FORWARD(check_call(ctx, "attention", op->struct_size, sizeof *op));
    FORWARD(check_floating(ctx, "attention", "q", op->q.dtype));
    FORWARD(check_same_dtype(ctx, "attention", "k", op->k.dtype, "q", op->q.dtype));
    FORWARD(check_same_dtype(ctx, "attention", "v", op->v.dtype, "q", op->q.dtype));
    FORWARD(check_matrix(ctx, "attention", "q", &op->q, N, -1));
    FORWARD(check_matrix(ctx, "attention", "k", &op->k, N, op->q.cols));
    FORWARD(check_matrix(ctx, "attention", "v", &op->v, N, -1));
    FORWARD(check_row_output(ctx, "attention", "out", &op->out, &op->sets, op->v.cols, op->q.dtype));
    FORWARD(check_row_output(ctx, "attention", "lse", &op->lse, &op->sets, 1, statistics));
    REQUIRE(!isinf(op->scale), MUVOX_BAD_ARGUMENT, "attention: scale is %g, expected a finite number", op->scale);
    return check_sets(ctx, "attention", &op->sets);
}

static muvox_status check_backward(muvox_context *ctx, const muvox_attention *op)
{
    const int64_t N = op->sets.rows, A = op->q.cols, C = op->v.cols;

    FORWARD(check(ctx, op));
    FORWARD(check_given(ctx, "attention", "out", &op->out, N));
    FORWARD(check_given(ctx, "attention", "lse", &op->lse, N));
    FORWARD(check_matrix(ctx, "attention", "grad_out", &op->grad_out, N, C));
    FORWARD(check_same_dtype(ctx, "attention", "grad_out", op->grad_out.dtype, "v", op->v.dtype));
    if (op->grad_lse.data) {
        FORWARD(check_matrix(ctx, "attention", "grad_lse", &op->grad_lse, N, 1));
        FORWARD(check_same_dtype(ctx, "attention", "grad_lse", op->grad_lse.dtype, "lse", op->lse.dtype));
    }
    FORWARD(check_row_output(ctx, "attention", "grad_q", &op->grad_q, &op->sets, A, op->q.dtype));
    FORWARD(check_row_output(ctx, "attention", "grad_k", &op->grad_k, &op->sets, A, op->q.dtype));
    return check_row_output(ctx, "attention", "grad_v", &op->grad_v, &op->sets, C, op->q.dtype);
}

static double scale_of(const muvox_attention *op)
{
    return isnan(op->scale) ? 1 / sqrt((double)op->q.cols) : op->scale;
}

/* S_ij = scale q_i·k_j */
static double score(const muvox_attention *op, int64_t s, int64_t i, int64_t j)
{
    double sum = 0;

    for (int64_t a = 0; a < op->q.cols; a++) sum += IN(q, s, i, a) * IN(k, s, j, a);
    return scale_of(op) * sum;
}

muvox_status attention_forward_reference(muvox_context *ctx, const muvox_attention *op)
{
    (void)ctx;
    for (int64_t s = 0; s < op->sets.count; s++) {
        const int64_t M = set_rows(&op->sets, s), C = op->v.cols;

        for (int64_t i = 0; i < M; i++) {
            double max = -INFINITY, sum = 0;

            for (int64_t j = 0; j < M; j++) {
                const double S = score(op, s, i, j);

                if (S > max || isnan(S)) max = S;
            }
            if (max == -INFINITY) max = 0; /* every score −inf: exp gives 0, not exp(−inf + inf) */
            for (int64_t j = 0; j < M; j++) sum += exp(score(op, s, i, j) - max);
            for (int64_t c = 0; c < C; c++) {
                double out = 0;

                for (int64_t j = 0; j < M; j++) out += exp(score(op, s, i, j) - max) * IN(v, s, j, c);
                OUT(out, s, i, c, sum == 0 ? 0 : out / sum);
            }
            OUT(lse, s, i, 0, max + log(sum));
        }
    }
    return MUVOX_OK;
}

/* P_ij = exp(S_ij − lse_i) and dS_ij = P_ij (g_i·v_j − D_i), D_i = g_i·out_i − g_lse,i */
static double probability(const muvox_attention *op, int64_t s, int64_t i, int64_t j)
{
    const double lse = IN(lse, s, i, 0);

    return lse == -INFINITY ? 0 : exp(score(op, s, i, j) - lse);
}

static double dscore(const muvox_attention *op, int64_t s, int64_t i, int64_t j)
{
    double dp = op->grad_lse.data ? IN(grad_lse, s, i, 0) : 0;

    for (int64_t c = 0; c < op->v.cols; c++) dp += IN(grad_out, s, i, c) * (IN(v, s, j, c) - IN(out, s, i, c));
    return probability(op, s, i, j) * dp;
}

muvox_status attention_backward_reference(muvox_context *ctx, const muvox_attention *op)
{
    const double scale = scale_of(op);

    (void)ctx;
    for (int64_t s = 0; s < op->sets.count; s++) {
        const int64_t M = set_rows(&op->sets, s), A = op->q.cols, C = op->v.cols;

        for (int64_t i = 0; i < M; i++) {
            for (int64_t a = 0; a < A; a++) {
                double dq = 0, dk = 0;

                for (int64_t j = 0; j < M; j++) {
                    if (op->grad_q.data) dq += scale * dscore(op, s, i, j) * IN(k, s, j, a);
                    if (op->grad_k.data) dk += scale * dscore(op, s, j, i) * IN(q, s, j, a);
                }
                OUT(grad_q, s, i, a, dq);
                OUT(grad_k, s, i, a, dk);
            }
            for (int64_t c = 0; c < C && op->grad_v.data; c++) {
                double dv = 0;

                for (int64_t j = 0; j < M; j++) dv += probability(op, s, j, i) * IN(grad_out, s, j, c);
                OUT(grad_v, s, i, c, dv);
            }
        }
    }
    return MUVOX_OK;
}

muvox_status muvox_attention_forward(muvox_context *ctx, const muvox_attention *op)
{
    const muvox_kernels *kernels;

    FORWARD(check(ctx, op));
    FORWARD(kernels_for(ctx, "attention", op->q.dtype, &kernels));
    return kernels->attention_forward(ctx, op);
}

muvox_status muvox_attention_backward(muvox_context *ctx, const muvox_attention *op)
{
    const muvox_kernels *kernels;

    FORWARD(check_backward(ctx, op));
    FORWARD(kernels_for(ctx, "attention", op->q.dtype, &kernels));
    return kernels->attention_backward(ctx, op);
}
