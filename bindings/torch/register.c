/* Makes the operators known to torch when the shared object is loaded, and unknown when it goes. */
#include "box.h"

#include <stdio.h>

/* One line per operator: what X_operators of X.c holds. The binding of the CPU defines them all, that of CUDA adds kernels. */
#define ON_BOTH(X)                                                                                                     \
    X(knn)                                                                                                             \
    X(gravnet)                                                                                                         \
    X(aggregate)                                                                                                       \
    X(pool)                                                                                                            \
    X(voxelize)                                                                                                        \
    X(devoxelize)                                                                                                      \
    X(trilinear_weights)
#ifdef MUVOX_CUDA
#define KEY          "CUDA"
#define OPERATORS(X) ON_BOTH(X)
#else
#define KEY "CPU"
#define OPERATORS(X)                                                                                                   \
    ON_BOTH(X)                                                                                                         \
    X(attention)                                                                                                       \
    X(offset_attention)                                                                                                \
    X(neighbour_attention)
#endif

#define DECLARE(op) extern const box_operator op##_operators[2]; /* forward and backward */
#define LIST(op)    op##_operators,

OPERATORS(DECLARE)
extern const box_operator voxelize_by_size_operator; /* its backward is that of voxelize */

static const box_operator *const operators[] = {OPERATORS(LIST)};
static TorchLibraryHandle        definitions, kernels;

/* torch prints the cause of a failure; the Python package then finds the operator missing. */
static void add(const box_operator *op)
{
    if ((definitions && aoti_torch_library_def(definitions, op->schema)) ||
        torch_library_impl(kernels, op->name, op->function, TORCH_FLOOR))
        fprintf(stderr, "muvox: torch refuses to register %s\n", op->name);
}

__attribute__((constructor)) static void load(void)
{
#ifndef MUVOX_CUDA
    if (aoti_torch_library_init_def("muvox", __FILE__, __LINE__, &definitions)) {
        fputs("muvox: torch refuses to define the operators\n", stderr);
        return;
    }
#endif
    if (aoti_torch_library_init_impl("muvox", KEY, __FILE__, __LINE__, &kernels)) {
        fputs("muvox: torch refuses to register the operators\n", stderr);
        return;
    }
    for (size_t i = 0; i < sizeof operators / sizeof *operators; i++)
        for (int direction = 0; direction < 2; direction++) add(&operators[i][direction]);
    add(&voxelize_by_size_operator);
}

__attribute__((destructor)) static void unload(void)
{
    if (kernels) aoti_torch_delete_library_object(kernels);
    if (definitions) aoti_torch_delete_library_object(definitions);
}
