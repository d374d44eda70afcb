/* What the CUDA kernels were built for. */
#include <muvox/muvox.h>

#include <cuda_runtime_api.h>

#define TEXT(x)  TEXT_(x)
#define TEXT_(x) #x

const char *muvox_cuda_build_info(void)
{
    return "muvox " MUVOX_VERSION "; architectures " MUVOX_GPU_ARCH
           "; CUDA " TEXT(__CUDACC_VER_MAJOR__) "." TEXT(__CUDACC_VER_MINOR__);
}
