/* A call of any operator with its results by name, and what is asked of every operator: all kernels agree with the plain
 * one, threads and NaN in masked rows change no bit, gradients are those of finite differences. */
#ifndef MUVOX_TESTS_TRIAL_H
#define MUVOX_TESTS_TRIAL_H

#include "problem.h"

typedef union {
    muvox_knn               knn;
    muvox_gravnet           gravnet;
    muvox_attention         attention;
    muvox_offset_attention  offset_attention;
    muvox_pool              pool;
    muvox_voxelize          voxelize;
    muvox_devoxelize        devoxelize;
    muvox_trilinear_weights trilinear_weights;
} any_descriptor;

enum { EXCLUDE_SELF = 1, RADIUS = 2, QUERIES = 4, MASK = 8, WEIGHTS = 16, BY_K = 32, BIAS = 64, INT64 = 128 };

typedef struct {
    layout      layout;
    muvox_dtype dtype;
    int64_t     M;        /* rows of a set */
    unsigned    options;  /* of the above, as the operator takes them */
    bool        poison;   /* NaN in the inputs' masked rows */
    bool        positive; /* row weights are far from 0, so that a step does not make them negative */
} trial_case;

typedef struct {
    const char         *name;
    muvox_sets          sets;
    const muvox_output *m;     /* in the descriptor */
    bool                exact; /* the same bits in every kernel */
    muvox_dtype         rounding;
    const muvox_matrix *x; /* what this is the gradient of; NULL: it is forward's */
    const muvox_matrix *g; /* the gradient that enters here; NULL: not differentiable */
} result;

typedef struct {
    problem        p;
    any_descriptor op;
    muvox_status (*forward)(muvox_context *ctx, const any_descriptor *op);
    muvox_status (*backward)(muvox_context *ctx, const any_descriptor *op);
    result results[12];
    int    count;
} trial;

/* Makes the same trial for the same case, each time it is called. */
typedef void (*trial_maker)(trial *t, const trial_case *c);

/* An operator and the combinations of options that are tried. */
typedef struct {
    const char *name;
    trial_maker make;
    int         count;
    unsigned    options[8];
} subject;

#define OPTION_SUBJECTS 5
#define VOXEL_SUBJECTS  3
extern const subject option_subjects[OPTION_SUBJECTS]; /* test_options.c */
extern const subject voxel_subjects[VOXEL_SUBJECTS];   /* test_voxels.c */

/* For makers: forward's results, and gradients of inputs, both with the rounding of their dtype. */
void forward_result(trial *t, const char *name, const muvox_sets *sets, const muvox_output *m, bool exact,
                    const muvox_matrix *g);
void gradient_result(trial *t, const char *name, const muvox_sets *sets, const muvox_output *m, const muvox_matrix *x);

/* Weights of the problem's rows in the dtype of statistics: between 0 and 2, a quarter of them 0 unless positive. */
muvox_matrix row_weights(problem *p, const trial_case *c);

void try_all_kernels(const char *op, trial_maker make, const trial_case *c);
void try_gradients(const char *op, trial_maker make, const trial_case *c);

#define TRIAL(name)                                                                                                    \
    static muvox_status forward_##name(muvox_context *ctx, const any_descriptor *op)                                   \
    {                                                                                                                  \
        return muvox_##name##_forward(ctx, &op->name);                                                                 \
    }                                                                                                                  \
    static muvox_status backward_##name(muvox_context *ctx, const any_descriptor *op)                                  \
    {                                                                                                                  \
        return muvox_##name##_backward(ctx, &op->name);                                                                \
    }

#endif
