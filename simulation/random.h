/* Philox 4×32-10 (Salmon and others, Parallel random numbers: as easy as 1, 2, 3, 2011): block n of a stream is a
 * function of key and counter alone. */
#ifndef MUVOX_SIMULATION_RANDOM_H
#define MUVOX_SIMULATION_RANDOM_H

#include <math.h>
#include <stdint.h>

typedef struct {
    uint32_t key[2];
    uint32_t counter[4]; /* block, row, volume (two words) */
} random_stream;

static inline random_stream random_open(uint64_t seed, uint64_t volume, uint32_t row)
{
    return (random_stream){{(uint32_t)seed, (uint32_t)(seed >> 32)},
                           {0, row, (uint32_t)volume, (uint32_t)(volume >> 32)}};
}

/* The next block: four words of 32 random bits. */
static inline void random_words(random_stream *stream, uint32_t word[4])
{
    uint32_t k0 = stream->key[0], k1 = stream->key[1];
    uint32_t a = stream->counter[0]++, b = stream->counter[1], c = stream->counter[2], d = stream->counter[3];

    for (int round = 0; round < 10; round++) {
        const uint64_t p = (uint64_t)0xD2511F53 * a, q = (uint64_t)0xCD9E8D57 * c;

        a = (uint32_t)(q >> 32) ^ b ^ k0;
        c = (uint32_t)(p >> 32) ^ d ^ k1;
        b = (uint32_t)q;
        d = (uint32_t)p;
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    word[0] = a;
    word[1] = b;
    word[2] = c;
    word[3] = d;
}

/* Within (0, 1). */
static inline double random_uniform(uint32_t word)
{
    return ((double)word + 0.5) * 0x1p-32;
}

/* Four independent standard Gaussian numbers (Box and Muller), up to 6.8 in size. */
static inline void random_gauss(random_stream *stream, double z[4])
{
    uint32_t word[4];

    random_words(stream, word);
    for (int pair = 0; pair < 4; pair += 2) {
        const float radius = sqrtf(-2 * (float)log(random_uniform(word[pair])));
        const float angle = (float)(6.283185307179586 * random_uniform(word[pair + 1]));

        z[pair] = (double)(radius * cosf(angle));
        z[pair + 1] = (double)(radius * sinf(angle));
    }
}

#endif
