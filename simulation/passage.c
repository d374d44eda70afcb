#include "passage.h"

#include <math.h>

#define MUON_MASS 0.1056583755 /* GeV */
#define COULOMB   0.0136       /* GeV */
#define SHORTEST  1e-7         /* m: a step at least, so that rounding at a voxel's border does not hold a muon up */
#define NUDGE     1e-9         /* m: which voxel a point on the border belongs to is decided this far ahead */
#define SQRT_12   3.4641016151377544
#define TWO_PI    6.283185307179586

/* A quantile function given at equal distances, n values `stride` apart and linear between them, at 0 ≤ u ≤ 1. */
static double quantile(const double *table, int64_t n, int64_t stride, double u)
{
    const double  place = u * (double)(n - 1);
    const int64_t i = (int64_t)place < n - 2 ? (int64_t)place : n - 2;

    if (n == 1) return table[0];
    return table[i * stride] + (place - (double)i) * (table[(i + 1) * stride] - table[i * stride]);
}

muon aim(const muvox_simulate *op, random_stream *random, double z)
{
    const muvox_matrix *const p = &op->momentum, *const t = &op->zenith;
    uint32_t w[4], v[4];
    double   theta, phi, u, row;
    int64_t  i;
    muon     m;

    random_words(random, w);
    random_words(random, v);
    u = random_uniform(w[0]);
    m.p = quantile(p->data, p->rows, p->row_stride, u);
    row = u * (double)(t->rows - 1);
    i = (int64_t)row < t->rows - 2 ? (int64_t)row : t->rows - 2;
    if (i < 0) i = 0;
    theta = quantile((const double *)t->data + i * t->row_stride, t->cols, 1, random_uniform(w[1]));
    if (t->rows > 1)
        theta +=
            (row - (double)i) *
            (quantile((const double *)t->data + (i + 1) * t->row_stride, t->cols, 1, random_uniform(w[1])) - theta);
    phi = TWO_PI * random_uniform(w[2]);
    m.at[0] = op->panel_x[0] + (op->panel_x[1] - op->panel_x[0]) * random_uniform(w[3]);
    m.at[1] = op->panel_y[0] + (op->panel_y[1] - op->panel_y[0]) * random_uniform(v[0]);
    m.at[2] = z;
    m.along[0] = sin(theta) * cos(phi);
    m.along[1] = sin(theta) * sin(phi);
    m.along[2] = -cos(theta);
    return m;
}

bool enter(const muvox_simulate *op, muon *m)
{
    double first = 0, last = INFINITY;

    for (int a = 0; a < 3; a++) {
        const double low = op->origin[a], high = low + (double)op->shape[a] * op->voxel_size[a];
        const double s = (low - m->at[a]) / m->along[a], t = (high - m->at[a]) / m->along[a];

        if (m->along[a] == 0) {
            if (m->at[a] < low || m->at[a] >= high) return false;
            continue;
        }
        first = fmax(first, fmin(s, t));
        last = fmin(last, fmax(s, t));
    }
    if (!(first < last)) return false;
    for (int a = 0; a < 3; a++) m->at[a] += first * m->along[a];
    return true;
}

/* fmin and fmax without their care for NaN, which the checks keep out: their calls cost as much as all the rest. */
static inline double smaller(double a, double b)
{
    return a < b ? a : b;
}

static inline double larger(double a, double b)
{
    return a > b ? a : b;
}

/* The voxel at a point, and the way to its border, `longest` at most; −1 outside. */
static int64_t voxel_at(const muvox_simulate *op, const muon *m, double longest, double *way)
{
    int64_t voxel = 0;

    *way = longest;
    for (int a = 0; a < 3; a++) {
        const double along = m->along[a], size = op->voxel_size[a];
        const double from = m->at[a] + NUDGE * along - op->origin[a];
        int64_t      place;

        if (!(from >= 0 && from < (double)op->shape[a] * size)) return -1;
        place = (int64_t)(from / size);
        if (place >= op->shape[a]) return -1; /* rounding */
        voxel = voxel * op->shape[a] + place;
        if (along != 0) *way = smaller(*way, (op->origin[a] + (double)(place + (along > 0)) * size - m->at[a]) / along);
    }
    *way = larger(*way, SHORTEST);
    return voxel;
}

/* 1 + 0.038 ln n, but never below 0 (n < 4e-12). */
static double log_term(double n)
{
    return n > 0 ? larger(0, 1 + 0.038 * log(n)) : 0;
}

/* Thickness in radiation lengths along the straight line that the muon is on. */
static double thickness(const muvox_simulate *op, const float *x0, muon m)
{
    double  way, n = 0;
    int64_t voxel;

    while ((voxel = voxel_at(op, &m, INFINITY, &way)) >= 0) {
        n += way / (double)x0[voxel];
        for (int a = 0; a < 3; a++) m.at[a] += way * m.along[a];
    }
    return n;
}

/* One step: displacement and deflection in the planes of two directions across the muon's. */
static void scatter(random_stream *random, muon *m, double way, double theta0)
{
    const double s = copysign(1, m->along[2]), c = -1 / (s + m->along[2]), b = m->along[0] * m->along[1] * c;
    const double across[2][3] = {{1 + s * m->along[0] * m->along[0] * c, s * b, -s * m->along[0]},
                                 {b, s + m->along[1] * m->along[1] * c, -m->along[1]}};
    double       z[4], turned[3], length = 0;

    random_gauss(random, z);
    for (int a = 0; a < 3; a++) {
        m->at[a] += way * (m->along[a] + theta0 * (across[0][a] * (z[0] / SQRT_12 + z[1] / 2) +
                                                   across[1][a] * (z[2] / SQRT_12 + z[3] / 2)));
        turned[a] = m->along[a];
    }
    /* A deflection beyond π/2 has no meaning in a formula for small angles: 1.5 at most. */
    for (int plane = 0; plane < 2; plane++) {
        const double t = tan(smaller(1.5, larger(-1.5, theta0 * z[2 * plane + 1])));

        for (int a = 0; a < 3; a++) turned[a] += t * across[plane][a];
    }
    for (int a = 0; a < 3; a++) length += turned[a] * turned[a];
    for (int a = 0; a < 3; a++) m->along[a] = turned[a] / sqrt(length);
}

void pass(const muvox_simulate *op, random_stream *random, const float *x0, muon *m)
{
    const bool   each = op->options & MUVOX_LOG_PER_STEP;
    const double coulomb = COULOMB * sqrt(m->p * m->p + MUON_MASS * MUON_MASS) / (m->p * m->p); /* 13.6 MeV / (β c p) */
    const double whole = each ? 0 : log_term(thickness(op, x0, *m));
    double       way;
    int64_t      voxel;

    while ((voxel = voxel_at(op, m, op->step, &way)) >= 0) {
        const double length = (double)x0[voxel], theta0 = coulomb * sqrt(way / length);

        if (theta0 > 0)
            scatter(random, m, way, theta0 * (each ? log_term(op->step / length) : whole));
        else
            for (int a = 0; a < 3; a++) m->at[a] += way * m->along[a];
    }
}
