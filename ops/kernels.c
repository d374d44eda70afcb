/* The tuned CPU kernels of one instruction set, in float and in double. The build compiles this file once for each set,
 * with its compiler flags and -DMUVOX_ISA=<name>; the table it exports is kernels_<name>. */
#include "kernels.h"

#include "check.h"
#include "context.h"
#include "convert.h"
#include "segments.h"
#include "sets.h"

#include <math.h>
#include <omp.h>
#include <stdbool.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#define PRODUCT_VECS 4 /* 4 × 4 sums of 32 registers */
#elif defined(__AVX2__)
#define VECTOR_BYTES 32
#define PRODUCT_VECS 2 /* 4 × 2 sums of 16 registers */
#else
#define VECTOR_BYTES 16
#define PRODUCT_VECS 2
#endif

/* Rows of one work item of a search, and the tiles of attention: rows of queries, and keys across the vector lanes. */
enum { SEARCH_ROWS = 256, QUERIES = 64, KEYS = 64 };

#define REAL      float
#define INT       int32_t
#define FMA       fmaf
#define NEXTAFTER nextafterf
#define FLOOR     floorf
#define NAME(f)   f##_f32
#include "kernels.inc"
#undef REAL
#undef INT
#undef FMA
#undef NEXTAFTER
#undef FLOOR
#undef NAME

#define REAL      double
#define INT       int64_t
#define FMA       fma
#define NEXTAFTER nextafter
#define FLOOR     floor
#define NAME(f)   f##_f64
#include "kernels.inc"
#undef REAL
#undef INT
#undef FMA
#undef NEXTAFTER
#undef FLOOR
#undef NAME

#define TABLE(suffix)                                                                                                  \
    {                                                                                                                  \
        knn_forward_##suffix, knn_backward_##suffix, aggregate_forward_##suffix, aggregate_backward_##suffix,          \
            gravnet_forward_##suffix, gravnet_backward_##suffix, attention_forward_##suffix,                           \
            attention_backward_##suffix, offset_attention_forward_##suffix, offset_attention_backward_##suffix,        \
            neighbour_attention_forward_##suffix, neighbour_attention_backward_##suffix, pool_forward_##suffix,        \
            pool_backward_##suffix, voxelize_forward_##suffix, voxelize_backward_##suffix,                             \
            devoxelize_forward_##suffix, devoxelize_backward_##suffix, trilinear_weights_forward_##suffix,             \
            trilinear_weights_backward_##suffix                                                                        \
    }
#define JOIN_(a, b) a##b
#define JOIN(a, b)  JOIN_(a, b)

const muvox_kernel_set JOIN(kernels_, MUVOX_ISA) = {TABLE(f32), TABLE(f64)};
