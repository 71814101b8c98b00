/* The two ceilings of a machine: how fast all threads read memory, and how fast they multiply and add.
 * Built on demand by ceilings.py for the machine it runs on, so unlike the library it may use every instruction.
 * Chunks are dealt out dynamically: cores of unequal speed, or one that is busy, do not hold the others up. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#ifdef __unix__
#include <sys/mman.h>
#endif

/* The widest registers there are. Chains: enough independent FMAs to hide latency times issue width (8 on x86,
 * 16 on the widest AArch64 cores), few enough to stay in registers (16 without AVX-512, 32 elsewhere). */
#if defined(__AVX512F__)
#define WIDTH 64
#define CHAINS 12
#elif defined(__AVX__)
#define WIDTH 32
#define CHAINS 12
#elif defined(__aarch64__)
#define WIDTH 16
#define CHAINS 24
#else
#define WIDTH 16
#define CHAINS 12
#endif
#define LANES (WIDTH / 4)
typedef float vec __attribute__((vector_size(WIDTH)));

#define CHUNK_NBYTES ((int64_t)1 << 20)
#define CHUNK_VECS (CHUNK_NBYTES / WIDTH)
#define FMA_CHUNK 10000 /* FMAs of each chain in a chunk: tens of microseconds, far over the cost of dealing it */

static float sum_lanes(vec x) {
    float sum = 0;
    for (int i = 0; i < LANES; i++)
        sum += x[i];
    return sum;
}

/* Sum of one chunk, read as n_streams (1 or 4) streams side by side: which is faster depends on the machine. */
static float read_chunk(const vec *p, int n_streams) {
    vec acc[8] = {0};
    if (n_streams == 1)
        for (int64_t i = 0; i < CHUNK_VECS; i += 8)
            for (int j = 0; j < 8; j++)
                acc[j] += p[i + j];
    else
        for (int64_t i = 0; i < CHUNK_VECS / 4; i += 2)
            for (int j = 0; j < 8; j++)
                acc[j] += p[j / 2 * (CHUNK_VECS / 4) + i + j % 2];
    for (int j = 1; j < 8; j++)
        acc[0] += acc[j];
    return sum_lanes(acc[0]);
}

/* n_chunks MiB of ones, or NULL. In huge pages where the system gives them, as the library's weights are, and
 * never given back: the process ends soon. */
float *ceilings_alloc(int64_t n_chunks, int n_threads) {
    size_t n_bytes = (size_t)(n_chunks * CHUNK_NBYTES);
#ifdef __unix__
    void *memory = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return NULL;
#ifdef MADV_HUGEPAGE
    madvise(memory, n_bytes, MADV_HUGEPAGE);
#endif
#else
    void *memory = aligned_alloc(4096, n_bytes);
    if (!memory)
        return NULL;
#endif
    float *a = memory;
#pragma omp parallel for num_threads(n_threads) schedule(static)
    for (int64_t i = 0; i < n_chunks * (CHUNK_NBYTES / 4); i++)
        a[i] = 1.0f;
    return a;
}

/* Read n_chunks MiB once. Returns their sum, so that no compiler leaves the loads out. */
float ceilings_read(const float *a, int64_t n_chunks, int n_streams, int n_threads) {
    float total = 0;
#pragma omp parallel for num_threads(n_threads) schedule(dynamic) reduction(+ : total)
    for (int64_t i = 0; i < n_chunks; i++)
        total += read_chunk((const vec *)a + i * CHUNK_VECS, n_streams);
    return total;
}

/* n_chunks times FMA_CHUNK FMAs of every lane of every chain; factor and summand come from outside so that
 * nothing is folded. */
float ceilings_fma(int64_t n_chunks, float factor, float summand, int n_threads) {
    float total = 0;
#pragma omp parallel for num_threads(n_threads) schedule(dynamic) reduction(+ : total)
    for (int64_t i = 0; i < n_chunks; i++) {
        vec acc[CHAINS], by = {0}, plus = {0};
        by += factor;
        plus += summand;
        for (int j = 0; j < CHAINS; j++)
            acc[j] = plus * (float)j;
        for (int n = 0; n < FMA_CHUNK; n++)
            for (int j = 0; j < CHAINS; j++)
                acc[j] = acc[j] * by + plus;
        for (int j = 1; j < CHAINS; j++)
            acc[0] += acc[j];
        total += sum_lanes(acc[0]);
    }
    return total;
}

/* Operations in one chunk of ceilings_fma, a multiplication and an addition counted apart. */
int64_t ceilings_fma_operations(void) { return (int64_t)FMA_CHUNK * CHAINS * LANES * 2; }
