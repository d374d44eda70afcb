/* muvox: memory-efficient operators on sets of rows. All headers, and what describes the library itself. */
#ifndef MUVOX_MUVOX_H
#define MUVOX_MUVOX_H

#include "aggregate.h"
#include "attention.h"
#include "gravnet.h"
#include "knn.h"
#include "neighbour_attention.h"
#include "offset_attention.h"
#include "pool.h"
#include "simulate.h"
#include "voxelize.h"
#include "devoxelize.h"
#include "trilinear_weights.h"
#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* "major.minor.patch" of the library in the process. */
MUVOX_API const char *muvox_version(void);

/* "MUVOX_OK", "MUVOX_BAD_ARGUMENT", …; "unknown" for any other value. */
MUVOX_API const char *muvox_status_name(muvox_status status);

/* The kernels that a context with MUVOX_SIMD_AUTO runs now: "reference", "portable", "avx2" or "avx512". */
MUVOX_API const char *muvox_simd_name(void);

/* Compiler and the kernels that were built, on one line. */
MUVOX_API const char *muvox_build_info(void);

/* libmuvox_cuda: functions muvox_<operator>_<direction>_cuda do on a device what those without the ending do. They check
 * descriptors but no data, and do not wait for the device; with MUVOX_CHECK=1 in the environment they wait for splits and
 * check them. Rows and neighbours outside their set are passed over, so that wrong ones give wrong results and no more.
 * Workspace: a search packs its rows, 5 bytes for each of 4, 8 or d > 8 columns and 6 more (double: 8 for each of d), and
 * takes up to 24 bytes a row while it sorts them. A backward pass over neighbours takes 4 bytes a place and 16 a row for who
 * picked whom (8 a place from 2^32 places on), and where sets are ragged, too large for a block of threads or a few large
 * ones, 16 a place (24) while it sorts them; gravnet's takes 4 a place (double: 8) and 4 d + 8 a row (8 d + 16) more,
 * of uniform sets for some at a time only: about 32 MiB, or one set for each multiprocessor where that is more.
 * There the sums over all that picked a row are the sum of up to four, each of every fourth place. */

/* libmuvox_cuda only: "muvox 0.1.0; architectures 80 90; CUDA 13.0", where the last two say what the kernels were compiled
 * for (PTX is kept for the last architecture) and by which toolkit, whose major version the driver must have at least. */
MUVOX_API const char *muvox_cuda_build_info(void);

#ifdef __cplusplus
}
#endif
#endif
