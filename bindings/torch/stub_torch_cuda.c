/* Stands in for libtorch_cuda.so when the binding is linked, so that building needs no torch; never installed, never run. */
#define SHIM(result, name, parameters)                                                                                 \
    void name(void);                                                                                                   \
    void name(void)                                                                                                    \
    {                                                                                                                  \
    }
#include "shim_cuda.def"
