/* Between torch's boxed calls and muvox's descriptors: unpacks arguments, allocates results, raises errors.
 *
 * A boxed function opens a box, fills a descriptor from it, runs, closes. The first failure sticks and turns all that
 * follows into nothing, so only box_close needs to look. It frees every handle and then raises: nothing may be raised
 * before, as the exception passes through C frames.
 *
 * Sets are uniform, tensors (S, M, width), or ragged, tensors (N, width) and splits; an empty splits means uniform.
 * Arguments are named by their place in the schema; tensors come before numbers in all of them. */
#ifndef MUVOX_BINDINGS_BOX_H
#define MUVOX_BINDINGS_BOX_H

#include "shim.h"

#include "muvox/muvox.h"

#include <math.h>
#include <string.h>

enum { BOX_MAX_ARGUMENTS = 14, BOX_MAX_RESULTS = 10 };

typedef struct {
    const char      *op; /* names the operator in messages */
    StableIValue    *stack;
    int              arguments, copies, results;
    AtenTensorHandle argument[BOX_MAX_ARGUMENTS], copy[BOX_MAX_ARGUMENTS], result[BOX_MAX_RESULTS];
    bool             failed; /* ctx.message says why */
    muvox_sets       sets;
    muvox_context    ctx;
} muvox_box;

typedef void box_function(StableIValue *stack, uint64_t arguments, uint64_t results);

/* One operator as torch knows it. */
typedef struct {
    const char   *name, *schema;
    box_function *function;
} box_operator;

#define BOX_OPERATOR(name, schema)                                                                                     \
    {                                                                                                                  \
#name, #name schema, name                                                                                      \
    }

/* Takes the tensors among the arguments; they are the box's to free from now on. The first one's device is that of the call. */
muvox_box box_open(const char *op, StableIValue *stack, int tensors);

/* Frees all handles, then raises the error or puts the results on the stack. */
void box_close(muvox_box *box, muvox_status status);

/* Reads the sets from splits, whose name is that of the argument, and from a tensor of rows. What follows is in these sets,
 * until the next call. */
muvox_sets box_sets(muvox_box *box, int splits, const char *splits_name, int rows, const char *rows_name);

/* A tensor that is there: not the empty one that stands for none. */
bool box_has(const muvox_box *box, int argument);

/* (S, M, width) or (N, width); (S, M) or (N), or none; (S, width). Copied if the columns are not next to each other. */
muvox_matrix box_rows(muvox_box *box, int argument, const char *name);
muvox_matrix box_column(muvox_box *box, int argument, const char *name);
muvox_matrix box_optional_column(muvox_box *box, int argument, const char *name);
muvox_matrix box_mask(muvox_box *box, int argument); /* bool (S, M) or (N), or none */
muvox_matrix box_per_set(muvox_box *box, int argument, const char *name);

/* What is in no set: (rows, width), and (rows). */
muvox_matrix box_table(muvox_box *box, int argument, const char *name);
muvox_matrix box_list(muvox_box *box, int argument, const char *name);

/* New tensors of these shapes, in the order of the schema's results. Not wanted: an empty tensor, data NULL. */
muvox_output box_new_rows(muvox_box *box, const char *name, bool wanted, muvox_dtype dtype, int64_t width);
muvox_output box_new_column(muvox_box *box, const char *name, bool wanted, muvox_dtype dtype);
muvox_output box_new_per_set(muvox_box *box, const char *name, bool wanted, muvox_dtype dtype, int64_t width);
muvox_output box_new_list(muvox_box *box, const char *name, muvox_dtype dtype, int64_t rows);
muvox_output box_new_table(muvox_box *box, const char *name, bool wanted, muvox_dtype dtype, int64_t rows,
                           int64_t width);

/* The same sources make the binding of the CPU and, with MUVOX_CUDA, that of CUDA. */
#ifdef MUVOX_CUDA
#define BOX_FUNCTION(name) muvox_##name##_cuda
#else
#define BOX_FUNCTION(name) muvox_##name
#endif

/* Runs muvox_`name` on the descriptor, unless something failed before. */
#define BOX_RUN(box, name, op) ((box)->failed ? MUVOX_BAD_ARGUMENT : BOX_FUNCTION(name)(&(box)->ctx, op))

static inline int64_t box_int(StableIValue value)
{
    return (int64_t)value;
}

/* k as the width of a result; none where every operator refuses k, which is better than failing to allocate before. */
static inline int64_t box_places(int64_t k)
{
    return k < 0 || k > INT32_MAX ? 0 : k;
}

static inline double box_float(StableIValue value)
{
    double x;

    memcpy(&x, &value, sizeof x);
    return x;
}

static inline bool box_bool(StableIValue value)
{
    return (value & 0xff) != 0;
}

/* dtype of distances, statistics and row weights beside data of this dtype. */
static inline muvox_dtype box_wide(muvox_dtype dtype)
{
    return dtype == MUVOX_F64 ? MUVOX_F64 : MUVOX_F32;
}

/* The option if the value is true; a radius is in force unless it is +inf, also a bad one, which is then refused. */
static inline unsigned box_option(StableIValue value, unsigned option)
{
    return box_bool(value) ? option : 0;
}

static inline unsigned box_radius(double max_radius)
{
    return max_radius == INFINITY ? 0 : MUVOX_WITHIN_RADIUS;
}

/* Aggregates that do not fit become none, which every operator refuses. */
static inline muvox_aggregates box_aggregates(StableIValue value)
{
    return value > UINT32_MAX ? 0 : (muvox_aggregates)value;
}

/* Blocks of columns in the output, and in the winners. */
static inline int box_blocks(muvox_aggregates aggregates)
{
    int n = 0;

    for (; aggregates & 15; aggregates >>= 4) n++;
    return n;
}

static inline int box_winners(muvox_aggregates aggregates)
{
    int n = 0;

    for (; aggregates & 15; aggregates >>= 4) n += (aggregates & 15) == MUVOX_MAX || (aggregates & 15) == MUVOX_ABSMAX;
    return n;
}

/* What forward saved is an output of the descriptor that backward only reads. */
static inline muvox_output box_saved(muvox_matrix matrix)
{
    const muvox_output saved = {
        (void *)(uintptr_t)matrix.data, matrix.dtype, matrix.rows, matrix.cols, matrix.row_stride, matrix.set_stride};

    return saved;
}

#endif
