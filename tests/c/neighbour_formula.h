/* neighbour_attention as its header says it, computed in no other way: what the plain kernel is tested against; and its
 * inputs and gradients by number. */
#ifndef MUVOX_TESTS_NEIGHBOUR_FORMULA_H
#define MUVOX_TESTS_NEIGHBOUR_FORMULA_H

#include "problem.h"

#include <math.h>

typedef muvox_neighbour_attention descriptor;

static const muvox_sets one_row = {NULL, 1, 1, 1}; /* of a bias */

static double act(muvox_activation activation, double z)
{
    const double sigmoid = 1 / (1 + exp(-z));

    switch (activation) {
    case MUVOX_LINEAR: return z;
    case MUVOX_RELU: return fmax(z, 0);
    case MUVOX_SELU: return 1.0507009873554805 * (z > 0 ? z : 1.6732632423543773 * (exp(z) - 1));
    case MUVOX_SIGMOID: return sigmoid;
    case MUVOX_SWISH: return z * sigmoid;
    case MUVOX_MISH: return z * tanh(log(1 + exp(z)));
    }
    return NAN;
}

static double bias(const muvox_matrix *m, int64_t c)
{
    return value_at(m, &one_row, 0, 0, c);
}

/* exp(Q_r·K_t / √A), offset: exp(Q_r·K_t), for rows of weights w, computed as the header says and in no other way. */
static double likeness(const descriptor *op, int64_t s, const int64_t *j, const double *w, int64_t r, int64_t t)
{
    double sum = 0;

    for (int64_t c = 0; c < op->q.cols; c++)
        sum += (w[r] * value_at(&op->q, &op->sets, s, j[r], c) + bias(&op->bias_q, c)) *
               (w[t] * value_at(&op->k, &op->sets, s, j[t], c) + bias(&op->bias_k, c));
    return exp(op->offset ? sum : sum / sqrt((double)op->q.cols));
}

/* P_rt */
static double share(const descriptor *op, int64_t s, const int64_t *j, const double *w, int64_t n, int64_t r, int64_t t)
{
    double sum = 0, all = 1e-17;

    if (!op->offset) {
        for (int64_t other = 0; other < n; other++) sum += likeness(op, s, j, w, r, other);
        return likeness(op, s, j, w, r, t) / sum;
    }
    for (int64_t other = 0; other < n; other++) {
        double column = 0;

        for (int64_t query = 0; query < n; query++) column += likeness(op, s, j, w, query, other);
        all += likeness(op, s, j, w, r, other) / column;
        if (other == t) sum = likeness(op, s, j, w, r, t) / column;
    }
    return sum / all;
}

/* y of row i's neighbour r, from the neighbours that were found. */
static double message(const void *any, int64_t s, int64_t i, int64_t r, int64_t f)
{
    const descriptor *op = any;
    int64_t           j[512], n = 0;
    double            w[512], z = bias(&op->bias_out, f), x;

    for (; n < op->neighbours_k; n++) {
        double distance2 = 0;

        j[n] = (int64_t)result_at(&op->neighbours, &op->sets, s, i, n);
        if (j[n] < 0) break;
        for (int64_t c = 0; c < op->coords.cols; c++)
            distance2 +=
                pow(value_at(&op->coords, &op->sets, s, i, c) - value_at(&op->coords, &op->sets, s, j[n], c), 2);
        w[n] = exp(-op->scale * distance2);
    }
    for (int64_t t = 0; t < n; t++)
        z += (op->offset ? -1 : 1) * share(op, s, j, w, n, r, t) *
             (w[t] * value_at(&op->v, &op->sets, s, j[t], f) + bias(&op->bias_v, f));
    if (op->offset) z += w[r] * value_at(&op->o, &op->sets, s, j[r], f);
    x = w[r] * value_at(&op->feats, &op->sets, s, j[r], f);
    return x + act(op->activation, z);
}

/* The gradients by number: rows first, then biases, which have one row. */
enum { ROW_GRADIENTS = 6, GRADIENTS = 10 };
static const char *const gradient_names[] = {"grad_coords", "grad_feats",   "grad_q",      "grad_k",
                                             "grad_v",      "grad_o",       "grad_bias_q", "grad_bias_k",
                                             "grad_bias_v", "grad_bias_out"};

static muvox_output *gradient(descriptor *op, int g)
{
    muvox_output *const all[] = {&op->grad_coords, &op->grad_feats,   &op->grad_q,      &op->grad_k,
                                 &op->grad_v,      &op->grad_o,       &op->grad_bias_q, &op->grad_bias_k,
                                 &op->grad_bias_v, &op->grad_bias_out};

    return all[g];
}

static muvox_matrix *input(descriptor *op, int g)
{
    muvox_matrix *const all[] = {&op->coords, &op->feats,  &op->q,      &op->k,      &op->v,
                                 &op->o,      &op->bias_q, &op->bias_k, &op->bias_v, &op->bias_out};

    return all[g];
}

static const muvox_sets *sets_of(const descriptor *op, int g)
{
    return g < ROW_GRADIENTS ? &op->sets : &one_row;
}

static bool exists(const descriptor *op, int g)
{
    return g != 5 || op->offset;
}

#endif
