/* The program of one suite, whose function the build names. */
#include "problem.h"

Suite *SUITE(void);

int main(void)
{
    return run_suite(SUITE());
}
