/* Prototypes, for C, of libtorch's stable C interface: torch's own headers are C++ only. */
#ifndef MUVOX_BINDINGS_SHIM_H
#define MUVOX_BINDINGS_SHIM_H

#include <stdbool.h>
#include <stdint.h>

typedef int32_t                    AOTITorchError; /* 0 = done */
typedef uint64_t                   StableIValue;   /* an argument or result: a handle, or the bits of a number */
typedef struct AtenTensorOpaque   *AtenTensorHandle;
typedef struct TorchLibraryOpaque *TorchLibraryHandle;

/* The oldest torch that this binding runs on, 2.10, as torch_library_impl wants it. */
#define TORCH_FLOOR (UINT64_C(2) << 56 | UINT64_C(10) << 48)

#define SHIM(result, name, parameters) result name parameters;
#include "shim.def"
#include "shim_cuda.def"
#undef SHIM

#endif
