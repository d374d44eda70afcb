/* muvox: types shared by every operator.
 *
 * An operator works on sets of rows: in muon tomography a set is a voxel and its rows are the muons seen from it.
 * One descriptor per operator says what to compute, forward and backward; a context says how to run.
 */
#ifndef MUVOX_TYPES_H
#define MUVOX_TYPES_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define MUVOX_API __attribute__((visibility("default")))
#else
#define MUVOX_API
#endif

/* Every function that can fail returns one of these, and says why in the context's message. Nothing is written then. */
typedef enum {
    MUVOX_OK = 0,
    MUVOX_BAD_ARGUMENT,
    MUVOX_BAD_SHAPE,
    MUVOX_BAD_DTYPE,
    MUVOX_OUT_OF_MEMORY,
    MUVOX_DEVICE_ERROR,
    MUVOX_UNSUPPORTED
} muvox_status;

/* Half is IEEE binary16, bfloat16 the upper half of a float. */
typedef enum { MUVOX_F16, MUVOX_BF16, MUVOX_F32, MUVOX_F64, MUVOX_I32, MUVOX_U8, MUVOX_I64 } muvox_dtype;

/* A row-major matrix with unit column stride; strides count elements. Row i of set s of a uniform matrix begins at
 * s · set_stride + i · row_stride (a set stride of 0 shares one set between all), row i of set s of a ragged one at
 * (splits[s] + i) · row_stride. A matrix with one row per set has its row s at s · row_stride. */
typedef struct {
    const void *data;
    muvox_dtype dtype;
    int64_t     rows, cols, row_stride, set_stride;
} muvox_matrix;

/* The same, to be written; rows must not overlap. data == NULL: not wanted. */
typedef struct {
    void       *data;
    muvox_dtype dtype;
    int64_t     rows, cols, row_stride, set_stride;
} muvox_output;

/* Which rows belong together. Ragged: rows splits[s] .. splits[s + 1] - 1 are set s (count + 1 values, from 0 to rows,
 * none smaller than the one before). splits == NULL: count sets of size rows each, rows = count · size. */
typedef struct {
    const int64_t *splits;
    int64_t        count, rows, size;
} muvox_sets;

/* What to make of the neighbours of a row, or of the rows of a set. absmax is the largest |x|. */
typedef enum { MUVOX_MEAN = 1, MUVOX_MAX = 2, MUVOX_ABSMAX = 3, MUVOX_SUM = 4 } muvox_aggregate_kind;

/* Several, in the order they stand in the output: the first in the lowest four bits. Up to 8. */
typedef uint32_t muvox_aggregates;
#define MUVOX_AGGREGATES_2(first, second) ((muvox_aggregates)(first) | (muvox_aggregates)(second) << 4)

/* How knn and gravnet look for neighbours; none of them by default. */
typedef enum {
    MUVOX_EXCLUDE_SELF = 1,  /* a row is not its own neighbour: left out by row number, never by distance */
    MUVOX_WITHIN_RADIUS = 2, /* only rows with distance² ≤ max_radius² */
    MUVOX_QUERIES = 4,       /* knn: the rows of `queries` look for neighbours among those of `coords` */
    MUVOX_MEAN_BY_K = 8      /* gravnet: the mean divides by k, not by the number of neighbours found */
} muvox_search_option;

/* Which kernels run. Every choice gives the same neighbours bit for bit. */
typedef enum {
    MUVOX_SIMD_AUTO = 0,  /* what the environment variable MUVOX_SIMD names, else the best this processor runs */
    MUVOX_SIMD_REFERENCE, /* plain loops, one thread: what the others are tested against */
    MUVOX_SIMD_PORTABLE,
    MUVOX_SIMD_AVX2,
    MUVOX_SIMD_AVX512
} muvox_simd;

/* How to run, never what to compute. Zero-initialise, then set struct_size. One context per thread that calls. */
typedef struct {
    size_t struct_size;                       /* sizeof(muvox_context); so the structure can grow */
    void *(*alloc)(void *user, size_t bytes); /* every byte of workspace comes through here; NULL = built in */
    void (*free)(void *user, void *block);    /* stream-ordered on CUDA: called while kernels may still run */
    void      *user;
    int        threads;      /* CPU; 0 = all */
    muvox_simd simd;         /* CPU */
    int        device;       /* CUDA */
    void      *stream;       /* CUDA */
    char       message[256]; /* says what was wrong whenever a call does not return MUVOX_OK */
} muvox_context;

#ifdef __cplusplus
}
#endif
#endif
