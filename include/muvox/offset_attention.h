/* muvox: offset attention over the rows of each set (LUMIN's OffsetSelfAttention, after PCT, arXiv 2012.09688).
 *
 *     S_ij = scale q_i·k_j     A_ij = exp(S_ij − L_j), L_j = log Σ_i exp(S_ij)     r_i = Σ_j A_ij + eps
 *     out_i = 1/r_i Σ_j A_ij v_j
 *
 * The softmax runs over the queries i of each key j; each row is then divided by its sum. Exchanging q and k gives another
 * result. Widths A (of q, k) and C (of v) are free. Float inside (double for double). A row whose every A_ij underflows gives
 * 0. A masked row is neither query nor key: out 0, gradients 0, and NaN in it has no effect.
 *
 * Two streaming passes; the M × M matrix never exists. Memory: out, column_lse and log_sum. Workspace: O(threads · (A + C)),
 * 4 M bytes a thread for a mask, and N numbers in backward. Time: O(Σ M² (A + C)).
 */
#ifndef MUVOX_OFFSET_ATTENTION_H
#define MUVOX_OFFSET_ATTENTION_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    size_t       struct_size;
    muvox_sets   sets;       /* S sets, N rows in all, M in one */
    double       scale;      /* finite; LUMIN uses 1 */
    double       eps;        /* ≥ 0; LUMIN uses 1e-17 */
    muvox_matrix q, k;       /* (N, A), half, bfloat16, float or double, one dtype for q, k and v */
    muvox_matrix v;          /* (N, C) */
    muvox_matrix mask;       /* (N, 1) uint8, 0 = the row takes no part; data NULL = all do */
    muvox_output out;        /* (N, C), dtype of v; read by backward */
    muvox_output column_lse; /* (N, 1) L, float (double for double), −inf for a masked row; read by backward */
    muvox_output log_sum;    /* (N, 1) log r, float (double for double), −inf for a masked row; read by backward */
    muvox_matrix grad_out;   /* (N, C), dtype of v; into backward */
    muvox_output grad_q, grad_k, grad_v; /* out of backward, each only if wanted; dtype of q */
} muvox_offset_attention;

/* Errors: MUVOX_BAD_ARGUMENT (scale, eps, splits, an output missing), MUVOX_BAD_SHAPE, MUVOX_BAD_DTYPE. */
MUVOX_API muvox_status muvox_offset_attention_forward(muvox_context *ctx, const muvox_offset_attention *op);

/* B_ij = A_ij / r_i;  D_i = g_i·out_i;  X_ij = B_ij (g_i·v_j − D_i);  T_j = Σ_i X_ij;  dS_ij = X_ij − A_ij T_j;
 * grad_v_j = Σ_i B_ij g_i;  grad_q_i = scale Σ_j dS_ij k_j;  grad_k_j = scale Σ_i dS_ij q_i. Bitwise the same every run. */
MUVOX_API muvox_status muvox_offset_attention_backward(muvox_context *ctx, const muvox_offset_attention *op);

#ifdef __cplusplus
}
#endif
#endif
