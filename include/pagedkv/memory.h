/* Large zeroed arrays: page-aligned (so 64-byte aligned), given lazily by the operating system.
 * Huge pages are asked for where the system offers them: streaming weights and scattered blocks through
 * 4 KiB pages costs a quarter of the read bandwidth (measured, docs/performance.md). */
#ifndef PAGEDKV_MEMORY_H
#define PAGEDKV_MEMORY_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#define PKV_HAVE_MMAP 1
#if defined(__linux__) && !defined(MAP_ANONYMOUS) /* glibc hides it under -std=c11, and madvise with it */
#include <asm/mman.h>
#undef MADV_HUGEPAGE
#endif
#endif

/* n_bytes of zeros, or NULL. A request of 0 bytes gets one byte's worth. */
static inline void *pkv_mem_alloc(size_t n_bytes) {
    if (n_bytes == 0)
        n_bytes = 1;
#ifdef PKV_HAVE_MMAP
    void *p = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return NULL;
#ifdef MADV_HUGEPAGE
    if (n_bytes >= (size_t)4 << 20)
        madvise(p, n_bytes, MADV_HUGEPAGE); /* advice only: failure costs speed, never correctness */
#endif
    return p;
#else
    /* The pointer that free() wants is kept just below the aligned one. */
    char *raw = n_bytes > SIZE_MAX - 128 ? NULL : (char *)calloc(1, n_bytes + 128);
    if (!raw)
        return NULL;
    char *p = (char *)(((uintptr_t)raw + 64 + sizeof(void *)) & ~(uintptr_t)63);
    memcpy(p - sizeof(void *), &raw, sizeof(void *));
    return p;
#endif
}

/* Give back what pkv_mem_alloc(n_bytes) gave; NULL is allowed. */
static inline void pkv_mem_free(void *p, size_t n_bytes) {
    if (!p)
        return;
#ifdef PKV_HAVE_MMAP
    munmap(p, n_bytes ? n_bytes : 1);
#else
    void *raw;
    (void)n_bytes;
    memcpy(&raw, (char *)p - sizeof(void *), sizeof(void *));
    free(raw);
#endif
}

/* a * b for sizes; returns 0 and leaves *out alone when the product does not fit. */
static inline int pkv_mul_size(int64_t a, int64_t b, int64_t *out) {
    if (a < 0 || b < 0 || (b != 0 && a > INT64_MAX / b))
        return 0;
    *out = a * b;
    return 1;
}

#endif
