/* muvox: self-attention over the rows of each set, without the M × M matrix.
 *
 *     S_ij = scale q_i·k_j + b_j     P_ij = u_j exp(S_ij) / Σ_j u_j exp(S_ij)
 *     out_i = Σ_j P_ij v_j           lse_i = log Σ_j u_j exp(S_ij)
 *
 * over the rows j of i's set; b is an optional key bias, u an optional weight of the rows. Widths A (of q, k) and C (of v)
 * are free of each other and of any multiple. Float inside (double for double); the softmax is computed online, block by
 * block. A row with no key (all masked, or of weight 0) gives 0 and lse −inf. A masked row is neither query nor key: out 0,
 * lse −inf, gradients 0, and NaN in it has no effect.
 *
 * Memory: out and lse. Workspace: O(threads · (A + C)) forward, O(threads · M · A) backward, and 4 M bytes a thread for a
 * mask. Time: O(Σ M² (A + C)).
 */
#ifndef MUVOX_ATTENTION_H
#define MUVOX_ATTENTION_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    size_t       struct_size;
    muvox_sets   sets;                   /* S sets, N rows in all, M in one */
    double       scale;                  /* finite, or NaN for 1/√A */
    muvox_matrix q, k;                   /* (N, A), half, bfloat16, float or double, one dtype for q, k and v */
    muvox_matrix v;                      /* (N, C) */
    muvox_matrix bias;                   /* (N, 1) b, dtype of lse; data NULL = 0 */
    muvox_matrix mask;                   /* (N, 1) uint8, 0 = the row takes no part; data NULL = all do */
    muvox_matrix row_weights;            /* (N, 1) u ≥ 0, dtype of lse; data NULL = 1 */
    muvox_output out;                    /* (N, C), dtype of v; read by backward */
    muvox_output lse;                    /* (N, 1), float (double for double), natural logarithm; read by backward */
    muvox_matrix grad_out;               /* (N, C), dtype of v; into backward */
    muvox_matrix grad_lse;               /* (N, 1), dtype of lse; into backward, data NULL = zero */
    muvox_output grad_q, grad_k, grad_v; /* out of backward, each only if wanted; dtype of q */
    muvox_output grad_bias, grad_row_weights; /* (N, 1), dtype of lse; out of backward, each only if wanted */
} muvox_attention;

/* Errors: MUVOX_BAD_ARGUMENT (scale infinite, splits), MUVOX_BAD_SHAPE, MUVOX_BAD_DTYPE (q, k and v differ). */
MUVOX_API muvox_status muvox_attention_forward(muvox_context *ctx, const muvox_attention *op);

/* D_i = g_i·out_i − g_lse,i;  P_ij = u_j exp(S_ij − lse_i);  dS_ij = P_ij (g_i·v_j − D_i);
 * grad_v_j = Σ_i P_ij g_i;  grad_q_i = scale Σ_j dS_ij k_j;  grad_k_j = scale Σ_i dS_ij q_i;  grad_bias_j = Σ_i dS_ij;
 * grad_row_weights_j = Σ_i exp(S_ij − lse_i) (g_i·v_j − D_i). Bitwise the same every run. */
MUVOX_API muvox_status muvox_attention_backward(muvox_context *ctx, const muvox_attention *op);

#ifdef __cplusplus
}
#endif
#endif
