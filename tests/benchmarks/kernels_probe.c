/* What bounds an operator: reading memory, and multiply-adds without memory. Built and timed by kernels_cpu.py. */
#include <stddef.h>
#include <stdint.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
#define CHAINS 12 /* enough to hide the latency of a multiply-add */

typedef float vec __attribute__((vector_size(LANES * 4)));

uint64_t read_all(const uint64_t *words, int64_t count) {
    uint64_t sum = 0;
#pragma omp parallel for schedule(static) reduction(+ : sum)
    for (int64_t i = 0; i < count; i++) sum += words[i];
    return sum;
}

/* Returns the multiply-adds that each thread did. */
int64_t multiply_add(int64_t steps, float *sink) {
    float total = 0;
#pragma omp parallel reduction(+ : total)
    {
        vec acc[CHAINS], factor = (vec){} + 0.999999f, step = (vec){} + 1e-6f;
        for (int c = 0; c < CHAINS; c++) acc[c] = (vec){} + (float)c; /* unlike each other, or they would be made one */
        for (int64_t i = 0; i < steps; i++)
            for (int c = 0; c < CHAINS; c++) acc[c] = acc[c] * factor + step;
        for (int c = 0; c < CHAINS; c++) total += acc[c][0];
    }
    *sink = total;
    return steps * LANES * CHAINS;
}
