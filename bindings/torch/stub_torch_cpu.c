/* Stands in for libtorch_cpu.so when the binding is linked, so that building needs no torch; never installed, never run. */
#define SHIM(result, name, parameters)                                                                                 \
    void name(void);                                                                                                   \
    void name(void)                                                                                                    \
    {                                                                                                                  \
    }
#include "shim.def"
