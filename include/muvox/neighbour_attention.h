/* muvox: self-attention over the k nearest rows of each row, then aggregation: GravNet's layer with LUMIN's use_sa.
 *
 * For row i, j = j(r) the r-th nearest row of its set (see knn.h) and w_r = exp(−scale · |x_i − x_j|²), r, t = 0 … n − 1 over
 * the n ≤ k neighbours found, LUMIN's attention of the weighted features w_r feats_j reads, with layers q, k, v and out:
 *
 *     Q_r = w_r q_j + bias_q          K_r = w_r k_j + bias_k          V_r = w_r v_j + bias_v          S_rt = Q_r·K_t
 *     z_r = Σ_t P_rt V_t + bias_out,             P_rt = exp(S_rt / √A) / Σ_t exp(S_rt / √A)          (SelfAttention)
 *     z_r = w_r o_j − Σ_t P_rt V_t + bias_out,   P_rt = B_rt / (Σ_t B_rt + 1e-17),
 *                                                B_rt = exp(S_rt) / Σ_r exp(S_rt)                    (offset: OffsetSelfAttention)
 *     y_r = w_r feats_j + act(z_r)
 *
 * and y is aggregated over r as in aggregate.h. Layers are linear, so they are applied to each row once, before the call, and
 * not to each pair of row and neighbour; with weights W_q (A, F), …, W_out (F, F) and biases b_q (A), …, b_out (F):
 *
 *     q = feats W_qᵀ, k = feats W_kᵀ, v = feats (W_out W_v)ᵀ, o = feats W_outᵀ;
 *     bias_q = b_q, bias_k = b_k, bias_v = W_out b_v, bias_out = b_out.
 *
 * A row without neighbours (masked) gives 0 and takes no gradient; NaN in a masked row has no effect. Float inside (double
 * for double).
 *
 * Memory beside inputs and output: neighbours N · k · 4 bytes and winners (aggregate.h). With K = min(k, largest M), workspace
 * a thread: knn's forward and O(K² + K (A + F)); backward the same without knn's and O(M (A + F)), and 256 · (A + F) doubles in
 * all for biases. Nothing of size Σ M² or N · k · F. Time: knn's, and O(N k² (A + F)).
 */
#ifndef MUVOX_NEIGHBOUR_ATTENTION_H
#define MUVOX_NEIGHBOUR_ATTENTION_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* act; selu, swish = z · sigmoid(z) and mish = z · tanh(log(1 + exp z)) as in torch. */
typedef enum {
    MUVOX_LINEAR = 0,
    MUVOX_RELU = 1,
    MUVOX_SELU = 2,
    MUVOX_SIGMOID = 3,
    MUVOX_SWISH = 4,
    MUVOX_MISH = 5
} muvox_activation;

typedef struct {
    size_t           struct_size;
    muvox_sets       sets;         /* S sets, N rows in all, M in one */
    int64_t          neighbours_k; /* k ≥ 1; may exceed M */
    double           scale;        /* finite; LUMIN uses 10 */
    muvox_aggregates aggregates;   /* n of them */
    muvox_activation activation;
    int              offset;           /* 0: softmax over the neighbours t of each r; 1: over r for each t, see above */
    muvox_matrix     coords;           /* (N, d), half, bfloat16 or float; double exactly if feats is double */
    muvox_matrix     feats;            /* (N, F), half, bfloat16, float or double, one dtype for feats, q, k, v and o */
    muvox_matrix     q, k;             /* (N, A) */
    muvox_matrix     v;                /* (N, F) */
    muvox_matrix     o;                /* (N, F) with offset; data NULL without */
    muvox_matrix     bias_q, bias_k;   /* (1, A), float (double for double), like the next two */
    muvox_matrix     bias_v, bias_out; /* (1, F) */
    muvox_matrix     mask;             /* (N, 1) uint8, 0 = the row takes no part; data NULL = all do; forward only */
    muvox_output     out;              /* (N, n · F), dtype of feats */
    muvox_output     neighbours;       /* (N, k) int32; needed by backward */
    muvox_output     winners;          /* (N, n_max · F) as in aggregate.h; needed by backward of max and absmax */
    muvox_matrix     grad_out;         /* (N, n · F), dtype of feats; into backward */
    muvox_output grad_coords; /* out of backward, each only if wanted, shape and dtype of what it is the gradient of */
    muvox_output grad_feats, grad_q, grad_k, grad_v, grad_o;
    muvox_output grad_bias_q, grad_bias_k, grad_bias_v, grad_bias_out;
} muvox_neighbour_attention;

/* Errors: MUVOX_BAD_ARGUMENT (neighbours_k < 1, scale not finite, activation, offset, splits, aggregates, o given without
 * offset or missing with it), MUVOX_BAD_SHAPE, MUVOX_BAD_DTYPE. */
MUVOX_API muvox_status muvox_neighbour_attention_forward(muvox_context *ctx, const muvox_neighbour_attention *op);

/* With dy the dm of aggregate.h, dz_r = act'(z_r) dy_r and g = dz (offset: −dz):
 *     dV_t = Σ_r P_rt g_r;   D_r = Σ_t P_rt (g_r·V_t);   X_rt = P_rt (g_r·V_t − D_r);
 *     dS_rt = X_rt (offset: X_rt − B_rt Σ_r X_rt);   dQ_r = s Σ_t dS_rt K_t;   dK_t = s Σ_r dS_rt Q_r,   s = 1/√A (offset: 1);
 *     grad_q[j] = Σ w_r dQ_r, grad_bias_q = Σ dQ_r, and so on for k and v; grad_feats[j] = Σ w_r dy_r; grad_o[j] = Σ w_r dz_r;
 *     grad_bias_out = Σ dz_r;   dw_r = dQ_r·q_j + dK_r·k_j + dV_r·v_j + dy_r·feats_j (offset: + dz_r·o_j);
 *     grad_coords[i] = Σ_r −2 scale w_r dw_r (x_i − x_j), and the opposite to x_j.
 * All is made again from what was saved. Bitwise the same every run, whatever the number of threads. */
MUVOX_API muvox_status muvox_neighbour_attention_backward(muvox_context *ctx, const muvox_neighbour_attention *op);

#ifdef __cplusplus
}
#endif
#endif
