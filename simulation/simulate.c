/* simulate: argument check, and the muons of all volumes on all threads. */
#include "muvox/simulate.h"

#include "ops/check.h"
#include "ops/context.h"
#include "ops/sets.h"
#include "tracks.h"

#include <math.h>

#define AIMS 100000 /* at a muon that is not recorded, before giving up */

static bool positive(double value)
{
    return value > 0 && isfinite(value);
}

static muvox_status check_grid(muvox_context *ctx, const muvox_simulate *op)
{
    int64_t voxels = 1;

    for (int a = 0; a < 3; a++) {
        const char axis = "xyz"[a];

        REQUIRE(op->shape[a] >= 1 && op->shape[a] <= INT32_MAX && voxels <= INT64_MAX / 8 / op->shape[a],
                MUVOX_BAD_ARGUMENT, "simulate: %lld voxels along %c, expected 1 or more that can be addressed",
                (long long)op->shape[a], axis);
        REQUIRE(isfinite(op->origin[a]), MUVOX_BAD_ARGUMENT,
                "simulate: origin is %g along %c, expected a finite number", op->origin[a], axis);
        REQUIRE(positive(op->voxel_size[a]), MUVOX_BAD_ARGUMENT,
                "simulate: voxel_size is %g along %c, expected above 0", op->voxel_size[a], axis);
        voxels *= op->shape[a];
    }
    REQUIRE(op->x0.dtype == MUVOX_F32, MUVOX_BAD_DTYPE, "simulate: x0 is %s, expected float", dtype_name(op->x0.dtype));
    FORWARD(check_matrix(ctx, "simulate", "x0", &op->x0, op->sets.count, voxels));
    for (int64_t s = 0; s < op->sets.count; s++) {
        const float *x0 = (const float *)op->x0.data + s * op->x0.row_stride;

        for (int64_t v = 0; v < voxels; v++)
            REQUIRE(x0[v] > 0, MUVOX_BAD_ARGUMENT, "simulate: x0 is %g in voxel %lld of volume %lld, expected above 0",
                    (double)x0[v], (long long)v, (long long)s);
        if (op->x0.row_stride == 0) break;
    }
    return MUVOX_OK;
}

static muvox_status check_source(muvox_context *ctx, const muvox_simulate *op)
{
    const muvox_matrix *const p = &op->momentum, *const t = &op->zenith;

    REQUIRE(p->dtype == MUVOX_F64 && t->dtype == MUVOX_F64, MUVOX_BAD_DTYPE,
            "simulate: momentum is %s and zenith is %s, expected double", dtype_name(p->dtype), dtype_name(t->dtype));
    REQUIRE(p->rows >= 1, MUVOX_BAD_SHAPE, "simulate: momentum has no rows, expected one or more quantiles");
    FORWARD(check_matrix(ctx, "simulate", "momentum", p, p->rows, 1));
    FORWARD(check_matrix(ctx, "simulate", "zenith", t, p->rows, -1));
    for (int64_t i = 0; i < p->rows; i++) {
        const double  value = ((const double *)p->data)[i * p->row_stride];
        const double *angle = (const double *)t->data + i * t->row_stride;

        REQUIRE(positive(value) && value >= ((const double *)p->data)[(i ? i - 1 : 0) * p->row_stride],
                MUVOX_BAD_ARGUMENT, "simulate: momentum has %g in row %lld, expected rising values above 0", value,
                (long long)i);
        for (int64_t j = 0; j < t->cols; j++)
            REQUIRE(angle[j] >= 0 && angle[j] <= 1.57 && angle[j] >= angle[j ? j - 1 : 0], MUVOX_BAD_ARGUMENT,
                    "simulate: zenith has %g in row %lld, expected rising angles from 0 to below a right angle",
                    angle[j], (long long)i);
    }
    return MUVOX_OK;
}

static muvox_status check_detector(muvox_context *ctx, const muvox_simulate *op)
{
    const double bottom = op->origin[2], top = bottom + (double)op->shape[2] * op->voxel_size[2];
    int64_t      above = 0, below = 0;

    REQUIRE(op->panels.dtype == MUVOX_F64, MUVOX_BAD_DTYPE, "simulate: panels is %s, expected double",
            dtype_name(op->panels.dtype));
    FORWARD(check_matrix(ctx, "simulate", "panels", &op->panels, op->panels.rows, 1));
    for (int64_t i = 0; i < op->panels.rows; i++) {
        const double *const all = op->panels.data, z = all[i * op->panels.row_stride];

        REQUIRE(isfinite(z) && !(z > bottom && z < top), MUVOX_BAD_ARGUMENT,
                "simulate: panel %lld is at z = %g, expected above or below the volume, which is from %g to %g",
                (long long)i, z, bottom, top);
        for (int64_t j = 0; j < i; j++)
            REQUIRE(all[j * op->panels.row_stride] != z, MUVOX_BAD_ARGUMENT,
                    "simulate: panels %lld and %lld are both at z = %g", (long long)j, (long long)i, z);
        above += z >= top;
        below += z <= bottom;
    }
    REQUIRE(above >= 2 && below >= 2, MUVOX_BAD_ARGUMENT,
            "simulate: %lld panels above and %lld below the volume, expected two or more", (long long)above,
            (long long)below);
    REQUIRE(isfinite(op->panel_x[0]) && isfinite(op->panel_x[1]) && op->panel_x[0] < op->panel_x[1] &&
                isfinite(op->panel_y[0]) && isfinite(op->panel_y[1]) && op->panel_y[0] < op->panel_y[1],
            MUVOX_BAD_ARGUMENT, "simulate: panels reach from %g to %g and %g to %g, expected a rectangle",
            op->panel_x[0], op->panel_x[1], op->panel_y[0], op->panel_y[1]);
    REQUIRE(op->resolution >= 0 && isfinite(op->resolution), MUVOX_BAD_ARGUMENT,
            "simulate: resolution is %g, expected 0 or more", op->resolution);
    REQUIRE(op->efficiency > 0 && op->efficiency <= 1, MUVOX_BAD_ARGUMENT,
            "simulate: efficiency is %g, expected above 0 and up to 1", op->efficiency);
    return MUVOX_OK;
}

static muvox_status check(muvox_context *ctx, const muvox_simulate *op)
{
    FORWARD(check_call(ctx, "simulate", op->struct_size, sizeof *op));
    FORWARD(check_sets(ctx, "simulate", &op->sets));
    FORWARD(check_splits(ctx, "simulate", "splits", &op->sets));
    REQUIRE(!(op->options & ~(unsigned)MUVOX_LOG_PER_STEP), MUVOX_BAD_ARGUMENT,
            "simulate: options is 0x%x, expected a combination of 0x%x", op->options, MUVOX_LOG_PER_STEP);
    REQUIRE(positive(op->step) && op->step >= 1e-6, MUVOX_BAD_ARGUMENT, "simulate: step is %g, expected 1e-6 m or more",
            op->step);
    FORWARD(check_grid(ctx, op));
    FORWARD(check_source(ctx, op));
    FORWARD(check_detector(ctx, op));
    REQUIRE(op->out.data || op->sets.rows == 0, MUVOX_BAD_ARGUMENT, "simulate: out is missing");
    FORWARD(check_output(ctx, "simulate", "out", &op->out, op->sets.rows, MUVOX_MUON_COLUMNS,
                         op->out.dtype == MUVOX_F64 ? MUVOX_F64 : MUVOX_F32));
    return check_output(ctx, "simulate", "aimed", &op->aimed, op->sets.count, 1, MUVOX_I64);
}

static double highest(const muvox_simulate *op)
{
    double z = -INFINITY;

    for (int64_t i = 0; i < op->panels.rows; i++)
        z = fmax(z, ((const double *)op->panels.data)[i * op->panels.row_stride]);
    return z;
}

/* One recorded muon; returns how many crossed the panels above and the volume until then, 0 if none is recorded. */
static int64_t record(const muvox_simulate *op, const float *x0, random_stream random,
                      double column[MUVOX_MUON_COLUMNS])
{
    const double bottom = op->origin[2], top = bottom + (double)op->shape[2] * op->voxel_size[2], z = highest(op);
    int64_t      aimed = 0;

    for (int64_t n = 0; n < AIMS; n++) {
        muon  before = aim(op, &random, z), after;
        track in, out;

        if (!crosses(op, &before, 1)) continue;
        after = before;
        if (!enter(op, &after)) continue;
        aimed++;
        pass(op, &random, x0, &after);
        if (crosses(op, &after, -1) && fit(op, &random, &before, 1, top, &in) &&
            fit(op, &random, &after, -1, bottom, &out) && columns(op, &in, &out, before.p, column))
            return aimed;
    }
    return 0;
}

/* The volume that a row belongs to. */
static int64_t volume_of(const muvox_sets *sets, int64_t row)
{
    int64_t low = 0, high = sets->count;

    if (!sets->splits) return row / sets->size;
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;

        if (sets->splits[middle] <= row)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static void store(const muvox_output *out, int64_t row, const double column[MUVOX_MUON_COLUMNS])
{
    const int64_t first = row * out->row_stride;

    for (int c = 0; c < MUVOX_MUON_COLUMNS; c++)
        if (out->dtype == MUVOX_F64)
            ((double *)out->data)[first + c] = column[c];
        else
            ((float *)out->data)[first + c] = (float)column[c];
}

muvox_status muvox_simulate_scans(muvox_context *ctx, const muvox_simulate *op)
{
    int64_t *const aimed = op->aimed.data, N = op->sets.rows, stride = op->aimed.row_stride;
    int64_t        failed = INT64_MAX; /* the first volume of which no muon is recorded */
    int            threads;

    FORWARD(check(ctx, op));
    threads = threads_for(ctx, N, (double)N * 1e4);
    for (int64_t s = 0; aimed && s < op->sets.count; s++) aimed[s * stride] = 0;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 64)
    for (int64_t i = 0; i < N; i++) {
        const int64_t s = volume_of(&op->sets, i);
        int64_t       tries, stop;
        double        column[MUVOX_MUON_COLUMNS];

#pragma omp atomic read
        stop = failed;
        if (s >= stop) continue;
        tries =
            record(op, (const float *)op->x0.data + s * op->x0.row_stride,
                   random_open(op->seed, (uint64_t)(op->ids ? op->ids[s] : s), (uint32_t)(i - set_begin(&op->sets, s))),
                   column);
        if (tries) {
            store(&op->out, i, column);
            if (aimed) {
#pragma omp atomic
                aimed[s * stride] += tries;
            }
        } else {
#pragma omp critical(muvox_simulate_failed)
            {
                if (s < failed) failed = s;
            }
        }
    }
    REQUIRE(
        failed == INT64_MAX, MUVOX_BAD_ARGUMENT,
        "simulate: of %d muons aimed at volume %lld none is recorded: the panels are too small or too far away for the "
        "momenta and angles, or nothing scatters",
        AIMS, (long long)failed);
    return MUVOX_OK;
}
