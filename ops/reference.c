#include "reference.h"

#include "kernels.h"

#define TABLE                                                                                                          \
    {                                                                                                                  \
        knn_forward_reference, knn_backward_reference, aggregate_forward_reference, aggregate_backward_reference,      \
            gravnet_forward_reference, gravnet_backward_reference, attention_forward_reference,                        \
            attention_backward_reference, offset_attention_forward_reference, offset_attention_backward_reference,     \
            neighbour_attention_forward_reference, neighbour_attention_backward_reference, pool_forward_reference,     \
            pool_backward_reference, voxelize_forward_reference, voxelize_backward_reference,                          \
            devoxelize_forward_reference, devoxelize_backward_reference, trilinear_weights_forward_reference,          \
            trilinear_weights_backward_reference                                                                       \
    }

const muvox_kernel_set kernels_reference = {TABLE, TABLE};
