/* How fast this machine reads memory: prints GB/s over buffers of the sizes (bytes) given as arguments.
   cc -O3 -march=native -fopenmp read_bandwidth.c -o read_bandwidth */
#include <omp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static double gigabytes_per_second(size_t bytes, int passes) {
    size_t count = bytes / sizeof(uint64_t);
    uint64_t *words = aligned_alloc(64, count * sizeof(uint64_t));
    if (!words) return 0;
    /* Each thread touches what it will read, so that its pages are near it. */
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < count; i++) words[i] = i;
    double best = 0;
    volatile uint64_t keep = 0;
    for (int pass = 0; pass < passes; pass++) {
        uint64_t sum = 0;
        double start = omp_get_wtime();
#pragma omp parallel for schedule(static) reduction(+ : sum)
        for (size_t i = 0; i < count; i++) sum += words[i];
        double rate = (double)bytes / (omp_get_wtime() - start) / 1e9;
        keep += sum;
        if (rate > best) best = rate;
    }
    free(words);
    return best;
}

int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        size_t bytes = strtoull(argv[i], NULL, 10) & ~(size_t)63;
        printf("%.3f\n", gigabytes_per_second(bytes, bytes > 500000000 ? 8 : 20));
    }
    return 0;
}
