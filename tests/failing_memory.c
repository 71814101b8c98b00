/* Preloaded into a Python process: lets the n-th allocation that code of certain libraries asks for fail. glibc on Linux;
 * the processes under test are the ones that are shipped, as nothing in them knows of this. */
#define _GNU_SOURCE
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);

static uintptr_t begins[64], ends[64];
static int n_ranges;
static long fail_at = -1, n_seen;

/* Code that lies in [begin, end) is looked at. */
void failing_memory_watch(uintptr_t begin, uintptr_t end) {
    if (n_ranges < 64) {
        begins[n_ranges] = begin;
        ends[n_ranges++] = end;
    }
}

/* The n-th allocation from now on fails, counted from 0; none for n < 0. Returns how many there were since the last call. */
long failing_memory_arm(long n) {
    long seen = n_seen;
    n_seen = 0;
    fail_at = n;
    return seen;
}

static int fails(const void *caller) {
    for (int i = 0; i < n_ranges; i++)
        if ((uintptr_t)caller >= begins[i] && (uintptr_t)caller < ends[i] && fail_at >= 0 && n_seen++ == fail_at) {
            errno = ENOMEM;
            return 1;
        }
    return 0;
}

void *malloc(size_t n) { return fails(__builtin_return_address(0)) ? NULL : __libc_malloc(n); }

void *calloc(size_t n, size_t width) { return fails(__builtin_return_address(0)) ? NULL : __libc_calloc(n, width); }

void *realloc(void *p, size_t n) { return fails(__builtin_return_address(0)) ? NULL : __libc_realloc(p, n); }

void *mmap(void *p, size_t n, int protection, int flags, int file, off_t offset) {
    if (fails(__builtin_return_address(0)))
        return MAP_FAILED;
    return (void *)syscall(SYS_mmap, p, n, protection, flags, file, offset);
}
