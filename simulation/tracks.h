/* From the hits of a muon to its columns. */
#ifndef MUVOX_SIMULATION_TRACKS_H
#define MUVOX_SIMULATION_TRACKS_H

#include "passage.h"

/* A fitted line: x and y at a height z, and tan θ = −dx/dz. */
typedef struct {
    double at[2], z, tangent[2];
} track;

/* Panels above (side 1) or below the volume (−1): false if the muon leaves one of them out. */
bool crosses(const muvox_simulate *op, const muon *m, int side);

/* Hits of those panels and the line through them, given at height z; false with fewer than two hits. */
bool fit(const muvox_simulate *op, random_stream *random, const muon *m, int side, double z, track *t);

/* The 18 columns; false for parallel tracks. */
bool columns(const muvox_simulate *op, const track *in, const track *out, double p, double column[MUVOX_MUON_COLUMNS]);

#endif
