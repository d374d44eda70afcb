/* muvox: simulated muon scans: cosmic muons through volumes of voxels, and what a detector makes of them.
 *
 * z points upwards and muons go down. Each row of the result is one muon that was recorded, found so:
 *   1. aimed   momentum p and zenith angle from quantiles (below), azimuth uniform, point uniform on the highest panel.
 *              On a straight line it has to pass all panels above and to cross the volume; no air scatters.
 *   2. passed  through the voxels in steps that end at voxel borders and are at most `step` long. A step of length x in
 *              a material of radiation length X0 deflects in two planes, each with two Gaussian numbers z1 and z2
 *              (PDG review, Passage of particles through matter, multiple scattering through small angles):
 *                  angle θ = z2 θ0, displacement y = x θ0 (z1 / √12 + z2 / 2), correlation √3/2,
 *                  θ0 = 13.6 MeV / (β c p) · √(x / X0) · L,   L = max(0, 1 + 0.038 ln n)
 *              with n the thickness, in X0, of all that lies on the muon's straight line: the angles of a whole slab
 *              have the width of the formula however it is cut into steps. MUVOX_LOG_PER_STEP: n = step / X0 instead,
 *              as codes do that apply the formula to each step alone. No energy is lost.
 *   3. hits    where it crosses the panels, in x and y with a Gaussian error of `resolution`; a muon that misses a
 *              panel's rectangle is not recorded. A panel sees it with probability `efficiency`.
 *   4. tracks  straight lines fitted by least squares to the hits above and to those below: two each, or the muon is
 *              not recorded, as it is not if the tracks are parallel and have no closest approach.
 * A muon that is not recorded is aimed anew, up to 100,000 times. Its random numbers are Philox 4×32-10 with the key
 * `seed`, counted within (volume id, row of the volume): they depend on nothing else, least of all on threads.
 *
 * Columns, metres and radians, of the tracks in and out with directions (tan θx, tan θy, −1):
 *   0 pred_x0 = (13.6 MeV / p)² Δz / (½ θ² · mean cosine of both zenith angles); Δz: height of a voxel, θ: column 3
 *   1 dtheta, 2 dphi: |change| of zenith and azimuth angle; with azimuths more than π/2 apart, π − their difference and
 *     the sum of the zenith angles
 *   3 total_scatter between the tracks     4 θx in, 5 θy in, 6 θx out, 7 θy out
 *   8 x in, 9 y in at the volume's top     10 x out, 11 y out at its bottom
 *   12–14 point of closest approach (PoCA): middle of the tracks' closest points     15 dx, 16 dy: of those, out − in
 *   17 p, true, GeV
 *
 * Memory: out; no workspace. Time: about 0.15 µs for each step of a muon, recorded or not.
 */
#ifndef MUVOX_SIMULATE_H
#define MUVOX_SIMULATE_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MUVOX_MUON_COLUMNS 18

typedef enum { MUVOX_LOG_PER_STEP = 1 } muvox_simulate_option;

typedef struct {
    size_t     struct_size;
    muvox_sets sets;          /* S volumes with N muons in all: how many to record of each */
    int64_t    shape[3];      /* voxels along x, y, z */
    double     origin[3];     /* lowest corner of the volume, m */
    double     voxel_size[3]; /* m */
    /* (S, nx · ny · nz) float, m, > 0, infinity for a void; z varies fastest. row_stride 0: all volumes share a row */
    muvox_matrix   x0;
    const int64_t *ids; /* (S) which random numbers; NULL = 0, 1, … */
    uint64_t       seed;
    unsigned       options;  /* muvox_simulate_option */
    double         step;     /* longest step, m */
    muvox_matrix   momentum; /* (K, 1) double, K ≥ 1: quantiles of p at 0, 1/(K−1), …, 1, GeV, rising */
    muvox_matrix   zenith;   /* (K, T) double, T ≥ 1: quantiles of the zenith angle at each of those, rad */
    muvox_matrix   panels;   /* (P, 1) double: z of the panels, m; none within the volume, two or more on each side */
    double         panel_x[2], panel_y[2]; /* rectangle that all of them cover, m */
    double         resolution;             /* standard deviation of a hit in x and in y, m */
    double         efficiency;             /* above 0, up to 1 */
    muvox_output   out;                    /* (N, 18) float or double */
    muvox_output   aimed; /* (S, 1) int64: muons that crossed panels above and volume; only if wanted */
} muvox_simulate;

/* Errors: MUVOX_BAD_ARGUMENT (a number out of range; a detector that records none of 100,000 muons: out is unfinished
 * then), MUVOX_BAD_SHAPE, MUVOX_BAD_DTYPE, MUVOX_UNSUPPORTED (a volume of 2^31 muons or more). */
MUVOX_API muvox_status muvox_simulate_scans(muvox_context *ctx, const muvox_simulate *op);

#ifdef __cplusplus
}
#endif
#endif
