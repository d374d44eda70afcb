/* All suites on a device, in one process: CUDA does not survive a fork. */
#include "problem.h"

#include <cuda_runtime_api.h>
#include <stdio.h>

enum { SKIPPED = 77 };

Suite *context_suite(void);
Suite *cuda_suite(void);
Suite *knn_suite(void);
Suite *aggregate_suite(void);
Suite *gravnet_suite(void);
Suite *pool_suite(void);
Suite *options_suite(void);
Suite *voxels_suite(void);

int main(void)
{
    int               devices = 0, failed;
    const cudaError_t error = cudaGetDeviceCount(&devices);
    SRunner          *runner;

    if (error != cudaSuccess || !devices) {
        printf("no CUDA device: %s\n", cudaGetErrorString(error));
        return SKIPPED;
    }
    runner = srunner_create(context_suite());
    srunner_add_suite(runner, cuda_suite());
    srunner_add_suite(runner, knn_suite());
    srunner_add_suite(runner, aggregate_suite());
    srunner_add_suite(runner, gravnet_suite());
    srunner_add_suite(runner, pool_suite());
    srunner_add_suite(runner, options_suite());
    srunner_add_suite(runner, voxels_suite());
    srunner_set_fork_status(runner, CK_NOFORK);
    srunner_run_all(runner, CK_ENV);
    failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    target_end();
    return failed != 0;
}
