/* The tests on the CPU: see target.h. */
#include "problem.h"

#include <stdlib.h>

void *memory_make(size_t bytes, bool output)
{
    (void)output;
    return malloc(bytes ? bytes : 1);
}

void memory_freeze(void *block)
{
    (void)block;
}

void memory_free(void *block)
{
    free(block);
}

void *workspace_make(size_t bytes)
{
    return malloc(bytes);
}

void workspace_drop(void *block)
{
    free(block);
}

/* By the library's own word. */
int all_simds(muvox_simd simds[4])
{
    const float x = 1;
    float       y;
    int         n = 0;

    for (int simd = MUVOX_SIMD_REFERENCE; simd <= MUVOX_SIMD_AVX512; simd++) {
        muvox_context    ctx = context((muvox_simd)simd, 1);
        const muvox_pool op = {
            sizeof op, {NULL, 1, 1, 1}, MUVOX_SUM, {&x, MUVOX_F32, 1, 1, 1, 1}, .out = {&y, MUVOX_F32, 1, 1, 1, 1}};
        const muvox_status status = muvox_pool_forward(&ctx, &op);

        if (status != MUVOX_OK && status != MUVOX_UNSUPPORTED) ck_abort_msg("%s", ctx.message);
        if (status == MUVOX_OK) simds[n++] = (muvox_simd)simd;
    }
    ck_assert_int_ge(n, 2); /* reference and portable run everywhere */
    return n;
}

bool runs_here(const char *op)
{
    (void)op;
    return true;
}
