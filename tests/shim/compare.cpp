/* The binding declares torch's stable C functions itself, as torch's headers are not C. This compiles only if each of these
 * declarations is what torch's headers say, for the oldest torch that the binding is for. */
#define USE_CUDA             /* shows what shim_cuda.def lists */
#define TORCH_TARGET_VERSION ((2ULL << 56) | (10ULL << 48))
#include <torch/csrc/stable/c/shim.h>

#include <type_traits>

#define SHIM(result, name, parameters) static_assert(std::is_same_v<decltype(name), result parameters>, #name);
#include "shim.def"
#include "shim_cuda.def"
