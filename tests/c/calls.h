/* One small valid call of every operator in both directions, for the tests that treat all alike. */
#ifndef MUVOX_TESTS_CALLS_H
#define MUVOX_TESTS_CALLS_H

#include "problem.h"

/* Descriptors all begin with struct_size and sets. */
typedef union {
    struct {
        size_t     struct_size;
        muvox_sets sets;
    } any;
    muvox_knn              knn;
    muvox_aggregate        aggregate;
    muvox_gravnet          gravnet;
    muvox_attention        attention;
    muvox_offset_attention offset_attention;
    muvox_pool             pool;
} descriptor;

typedef struct {
    const char *op, *direction;
    muvox_status (*run)(muvox_context *ctx, const descriptor *op);
    /* A descriptor whose outputs of this direction hold the sentinel; a backward's forward has run. Always the same. */
    descriptor (*make)(problem *p, layout layout, int64_t rows);
} operator_call;

#define CALLS 12
extern const operator_call calls[CALLS];

#endif
