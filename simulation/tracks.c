#include "tracks.h"

#include <math.h>

#define PI      3.141592653589793
#define COULOMB 0.0136 /* GeV */

static double panel_z(const muvox_simulate *op, int64_t panel)
{
    return ((const double *)op->panels.data)[panel * op->panels.row_stride];
}

static bool on_side(const muvox_simulate *op, double z, int side)
{
    return (z > op->origin[2]) == (side > 0);
}

static double at_height(const muon *m, int axis, double z)
{
    return m->at[axis] + (z - m->at[2]) * m->along[axis] / m->along[2];
}

bool crosses(const muvox_simulate *op, const muon *m, int side)
{
    if (!(m->along[2] < -1e-3)) return false; /* as good as horizontal, or upwards */
    for (int64_t panel = 0; panel < op->panels.rows; panel++) {
        const double z = panel_z(op, panel), x = at_height(m, 0, z), y = at_height(m, 1, z);

        if (on_side(op, z, side) &&
            !(x >= op->panel_x[0] && x <= op->panel_x[1] && y >= op->panel_y[0] && y <= op->panel_y[1]))
            return false;
    }
    return true;
}

bool fit(const muvox_simulate *op, random_stream *random, const muon *m, int side, double z, track *t)
{
    double  s[3] = {0}, sx[2] = {0}, sxz[2] = {0}; /* sums of 1, z, z²; of x and xz, heights counted from z */
    double  determinant, error[4];
    int64_t hits = 0;

    for (int64_t panel = 0; panel < op->panels.rows; panel++) {
        const double height = panel_z(op, panel) - z;
        uint32_t     word[4];

        if (!on_side(op, height + z, side)) continue;
        if (op->efficiency < 1) {
            random_words(random, word);
            if (random_uniform(word[0]) > op->efficiency) continue;
        }
        random_gauss(random, error);
        hits++;
        s[0] += 1;
        s[1] += height;
        s[2] += height * height;
        for (int a = 0; a < 2; a++) {
            const double hit = at_height(m, a, height + z) + op->resolution * error[a];

            sx[a] += hit;
            sxz[a] += hit * height;
        }
    }
    if (hits < 2) return false;
    determinant = s[0] * s[2] - s[1] * s[1];
    t->z = z;
    for (int a = 0; a < 2; a++) {
        t->at[a] = (s[2] * sx[a] - s[1] * sxz[a]) / determinant;
        t->tangent[a] = -(s[0] * sxz[a] - s[1] * sx[a]) / determinant;
    }
    return determinant > 0;
}

/* Closest points of both lines and the sine and cosine of the angle between them. With directions u and v, n = u × v
 * and w = out − in, the points are in + u (w × v)·n / n² and out + v (w × u)·n / n². */
static bool closest(const track *in, const track *out, double near[2][3], double *sine, double *cosine)
{
    const double u[3] = {in->tangent[0], in->tangent[1], -1}, v[3] = {out->tangent[0], out->tangent[1], -1};
    const double w[3] = {out->at[0] - in->at[0], out->at[1] - in->at[1], out->z - in->z};
    double       n[3], square = 0, length[2] = {0}, way[2] = {0};

    for (int a = 0; a < 3; a++) {
        const int b = (a + 1) % 3, c = (a + 2) % 3;

        /* u − v has no z, so that nearly parallel tracks lose no digits */
        n[a] = u[b] * (v[c] - u[c]) - u[c] * (v[b] - u[b]);
        square += n[a] * n[a];
        length[0] += u[a] * u[a];
        length[1] += v[a] * v[a];
    }
    for (int a = 0; a < 3; a++) {
        const int b = (a + 1) % 3, c = (a + 2) % 3;

        way[0] += (w[b] * v[c] - w[c] * v[b]) * n[a] / square;
        way[1] += (w[b] * u[c] - w[c] * u[b]) * n[a] / square;
    }
    for (int a = 0; a < 3; a++) {
        near[0][a] = (a < 2 ? in->at[a] : in->z) + way[0] * u[a];
        near[1][a] = (a < 2 ? out->at[a] : out->z) + way[1] * v[a];
    }
    *sine = sqrt(square / (length[0] * length[1]));
    *cosine = (u[0] * v[0] + u[1] * v[1] + 1) / sqrt(length[0] * length[1]);
    return square > 0;
}

bool columns(const muvox_simulate *op, const track *in, const track *out, double p, double column[MUVOX_MUON_COLUMNS])
{
    const double theta_in = atan(hypot(in->tangent[0], in->tangent[1]));
    const double theta_out = atan(hypot(out->tangent[0], out->tangent[1]));
    const double turn =
        fabs(remainder(atan2(out->tangent[1], out->tangent[0]) - atan2(in->tangent[1], in->tangent[0]), 2 * PI));
    const bool opposite = turn > PI / 2;
    double     near[2][3], sine, cosine, scatter;

    if (!closest(in, out, near, &sine, &cosine)) return false;
    scatter = atan2(sine, cosine);
    column[0] = COULOMB / p * (COULOMB / p) * op->voxel_size[2] /
                (0.5 * scatter * scatter * (cos(theta_in) + cos(theta_out)) / 2);
    column[1] = opposite ? theta_in + theta_out : fabs(theta_in - theta_out);
    column[2] = opposite ? PI - turn : turn;
    column[3] = scatter;
    for (int a = 0; a < 2; a++) {
        column[4 + a] = atan(in->tangent[a]);
        column[6 + a] = atan(out->tangent[a]);
        column[8 + a] = in->at[a];
        column[10 + a] = out->at[a];
        column[15 + a] = near[1][a] - near[0][a];
    }
    for (int a = 0; a < 3; a++) column[12 + a] = (near[0][a] + near[1][a]) / 2;
    column[17] = p;
    for (int c = 0; c < MUVOX_MUON_COLUMNS; c++)
        if (!(fabs(column[c]) <= 3e38)) return false; /* float holds it */
    return true;
}
