/* The floating-point environment every kernel runs in: round to nearest, subnormals kept.
 * Another library of the process may have set flush-to-zero or another rounding in this thread, which would
 * change bits. A thread enters before its first kernel and leaves after its last one. */
#ifndef PAGEDKV_FPENV_H
#define PAGEDKV_FPENV_H

#include <stdint.h>

#if defined(__x86_64__) || defined(_M_X64)
#include <xmmintrin.h>
static inline uint64_t pkv_fpenv_enter(void) {
    uint64_t saved = _mm_getcsr();
    _mm_setcsr(0x1F80); /* the reset value: all exceptions masked, nearest, no FTZ, no DAZ */
    return saved;
}
static inline void pkv_fpenv_leave(uint64_t saved) { _mm_setcsr((unsigned)saved); }
#elif defined(__aarch64__)
static inline uint64_t pkv_fpenv_enter(void) {
    uint64_t saved;
    __asm__ __volatile__("mrs %0, fpcr" : "=r"(saved));
    __asm__ __volatile__("msr fpcr, %0" : : "r"((uint64_t)0) : "memory");
    return saved;
}
static inline void pkv_fpenv_leave(uint64_t saved) {
    __asm__ __volatile__("msr fpcr, %0" : : "r"(saved) : "memory");
}
#else
static inline uint64_t pkv_fpenv_enter(void) { return 0; }
static inline void pkv_fpenv_leave(uint64_t saved) { (void)saved; }
#endif

#endif
