/* The way of one muon through the volume. */
#ifndef MUVOX_SIMULATION_PASSAGE_H
#define MUVOX_SIMULATION_PASSAGE_H

#include "muvox/simulate.h"
#include "random.h"

#include <stdbool.h>

/* A muon at a point, flying in a direction (a unit vector). */
typedef struct {
    double at[3], along[3], p;
} muon;

/* Point and direction of a muon before it meets anything, at height z. */
muon aim(const muvox_simulate *op, random_stream *random, double z);

/* Moves it to where it enters the volume, on a straight line; false if it passes by. */
bool enter(const muvox_simulate *op, muon *m);

/* Carries it through the voxels, x0 (nx · ny · nz), until it leaves the volume. */
void pass(const muvox_simulate *op, random_stream *random, const float *x0, muon *m);

#endif
