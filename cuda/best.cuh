/* The largest value met, and where: the first of equals; NaN is larger than anything, and the first NaN stays. */
#ifndef MUVOX_CUDA_BEST_H
#define MUVOX_CUDA_BEST_H

#include <math.h>

/* Values that are met are never −0, and NaN has one form: arithmetic made them. */
template <typename R> struct best;

template <> struct best<float> {
    float value = -HUGE_VALF;
    int   index = -1;

    __device__ __forceinline__ void meet(float x, int at)
    {
        float larger;

        asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(value), "f"(x));
        index = __float_as_int(larger) != __float_as_int(value) ? at : index;
        value = larger;
    }
    /* After the last: nothing but −inf was met, first where `first` says, or nothing at all. */
    __device__ __forceinline__ void settle(int first)
    {
        if (index < 0) index = first;
        if (first < 0) value = 0;
    }
};

template <> struct best<double> {
    double value = -HUGE_VAL;
    int    index = -1;

    __device__ __forceinline__ void meet(double x, int at)
    {
        if (x > value || (x != x && value == value)) {
            value = x;
            index = at;
        }
    }
    __device__ __forceinline__ void settle(int first)
    {
        if (index < 0) index = first;
        if (first < 0) value = 0;
    }
};

#endif
