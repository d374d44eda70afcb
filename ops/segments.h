/* Entries grouped by the voxel that they name: a stable counting sort, so that sums over a voxel have a fixed order. */
#ifndef MUVOX_OPS_SEGMENTS_H
#define MUVOX_OPS_SEGMENTS_H

#include "muvox/types.h"

typedef struct {
    int64_t *starts; /* (S + 1): the entries of voxel s are order[starts[s]] … order[starts[s + 1] − 1] */
    int64_t *order;  /* (entries in range): row · cols + column of index, ascending within a voxel */
} muvox_segments;

/* Groups the entries of index (rows, cols), int32 or int64; those below 0 or at voxels and above are left out.
 * Free with segments_free. */
muvox_status segments_make(muvox_context *ctx, const char *op, const muvox_matrix *index, int64_t voxels,
                           muvox_segments *segments);
void         segments_free(muvox_context *ctx, muvox_segments *segments);

#endif
