#include "segments.h"

#include "check.h"
#include "context.h"
#include "convert.h"

#include <string.h>

muvox_status segments_make(muvox_context *ctx, const char *op, const muvox_matrix *index, int64_t voxels,
                           muvox_segments *segments)
{
    const int64_t rows = index->rows, cols = index->cols;
    void         *block;

    FORWARD(workspace_alloc(ctx, op, (size_t)(voxels + 1 + rows * cols) * sizeof(int64_t), 1, &block));
    segments->starts = block;
    segments->order = segments->starts + voxels + 1;
    memset(segments->starts, 0, (size_t)(voxels + 1) * sizeof(int64_t));
    for (int64_t n = 0; n < rows; n++)
        for (int64_t c = 0; c < cols; c++) {
            const int64_t s = integer(index, n * index->row_stride + c);

            if (s >= 0 && s < voxels) segments->starts[s + 1]++;
        }
    for (int64_t s = 0; s < voxels; s++) segments->starts[s + 1] += segments->starts[s];
    for (int64_t n = 0; n < rows; n++)
        for (int64_t c = 0; c < cols; c++) {
            const int64_t s = integer(index, n * index->row_stride + c);

            if (s >= 0 && s < voxels) segments->order[segments->starts[s]++] = n * cols + c;
        }
    /* Filling moved every start to its end, which is the next one's start. */
    memmove(segments->starts + 1, segments->starts, (size_t)voxels * sizeof(int64_t));
    segments->starts[0] = 0;
    return MUVOX_OK;
}

void segments_free(muvox_context *ctx, muvox_segments *segments)
{
    workspace_free(ctx, segments->starts);
}
