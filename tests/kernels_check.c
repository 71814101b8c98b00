/* Compares every kernel table that runs on this CPU with the scalar one, bit for bit, over sizes around the lanes
 * and over awkward values. Arrays end (or begin) at a page that may not be touched, so a kernel that reads or
 * writes too far dies here. Prints a line for each ISA and operation, the running checksum of the scalar results,
 * which is the same on every machine and with every compiler, and the total. Exit status 1 on a difference.
 *   cc -O2 -ffp-contract=off -Iinclude tests/kernels_check.c -lm -o kernels_check && ./kernels_check
 * With names of operations as arguments it checks those only: an emulator of a whole processor is slow. */
#define _GNU_SOURCE /* MAP_ANONYMOUS, sigaction under -std=c11 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "pagedkv/dispatch.h"
#include "pagedkv/fpenv.h"
#include "pagedkv/step.h"

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

/* Every remainder of 16, below one set of lanes and after one. */
static const int64_t SIZES[] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13,  14,  15,
                                16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29,  30,  31,
                                32, 33, 39, 40, 47, 48, 56, 63, 64, 65, 76, 100, 127, 128, 129, 255, 576};
static const int64_t HEAD_DIMS[] = {1, 3, 8, 12, 16, 17, 32, 40, 46, 56, 60, 64, 80, 96, 100, 128, 256};

/* ---- random values: integer arithmetic only and one draw an expression (C leaves the order of operands and
 * arguments to the compiler), so that every machine draws the same ---- */

static uint64_t rng_state = 0x9E3779B97F4A7C15u;

/* splitmix64 (Steele, Lea and Flood 2014). */
static uint64_t rng_next(void) {
    uint64_t z = rng_state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static int64_t rng_below(int64_t n) { return (int64_t)((rng_next() >> 33) % (uint64_t)n); }

/* 0 half of the time, else up to most: what a stride has beyond its row. */
static int64_t rng_gap(int64_t most) {
    int64_t drawn = rng_below(2 * most);
    return drawn > most ? drawn - most : 0;
}

static float from_bits(uint32_t bits) { return pkv_bits_to_f32((int32_t)bits); }

/* A float with a random sign and mantissa and a biased exponent in [low, high]; 0 gives subnormals and zeros. */
static float rng_exponents(int64_t low, int64_t high) {
    uint32_t exponent = (uint32_t)(low + rng_below(high - low + 1));
    return from_bits(((uint32_t)rng_next() & 0x807FFFFFu) | exponent << 23);
}

enum { MODERATE, WIDE, TINY, EXP_RANGE, SPECIAL, N_MODES };

static const uint32_t SPECIALS[] = {
    0x00000000, 0x80000000, /* +-0 */
    0x7F800000, 0xFF800000, /* +-inf */
    0x7FC00000, 0xFFC00000, /* NaN */
    0x7F7FFFFF, 0xFF7FFFFF, /* +-largest */
    0x00000001, 0x80000001, /* +-smallest subnormal */
    0x00800000, 0x80800000, /* +-smallest normal */
    0xC2D00000, 0xC2CFFFFF, 0xC2D00001, /* -104, where exp becomes 0, and its neighbours */
    0x42B20000, 0x42B1FFFF, 0x42B20001, /* 89, the upper clamp, and its neighbours */
    0x42B17217, 0x42B17218, /* the last finite exp and the first infinite one */
    0xC2AEAC4F, 0xC2AEAC50, /* about -87.33: exp leaves the normal numbers */
    0xC2CFF1B5, 0xC2CE8ED0, /* about -103.97 and -103.28: the last subnormals */
};

static float rng_float(int mode) {
    switch (mode) {
    case MODERATE:
        return rng_exponents(120, 131);
    case WIDE:
        return rng_exponents(0, 254);
    case TINY: /* products of two fall below the subnormals, of which -0 is left */
        return rng_below(8) == 0 ? from_bits((uint32_t)rng_next() & 0x80000000u) : rng_exponents(0, 70);
    case EXP_RANGE: /* [-110, 95] in steps of 2^-10 */
        return (float)(rng_below(209921) - 112640) * 0x1p-10f;
    default:
        return rng_below(6) == 0 ? from_bits(SPECIALS[rng_below(COUNT(SPECIALS))]) : rng_exponents(120, 131);
    }
}

/* ---- arrays beside a forbidden page ---- */

#define ARENA_FLOATS ((int64_t)1 << 15)
#define BAND 64 /* floats of guard band on the side where no page forbids access */
#define CANARY 0x5CA1AB1Eu

enum { AT_START, AT_END, N_SIDES };
enum { IN_A, IN_B, IN_C, IN_D, WANT, GOT, N_SLOTS };

static float *arenas[N_SLOTS];
static int side;

static void map_arenas(void) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), n_bytes = (size_t)ARENA_FLOATS * sizeof(float);
    for (int slot = 0; slot < N_SLOTS; slot++) {
        char *p = mmap(NULL, n_bytes + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED || mprotect(p + page, n_bytes, PROT_READ | PROT_WRITE) != 0) {
            perror("kernels_check: mmap");
            exit(2);
        }
        arenas[slot] = (float *)(p + page);
    }
}

/* n floats whose end (or start) is the arena's; the band on the other side is filled with the canary. */
static float *place(int slot, int64_t n) {
    if (n + BAND > ARENA_FLOATS) {
        fprintf(stderr, "kernels_check: %lld floats do not fit the arena\n", (long long)n);
        exit(2);
    }
    float *p = side == AT_START ? arenas[slot] : arenas[slot] + ARENA_FLOATS - n;
    float *band = side == AT_START ? p + n : p - BAND;
    for (int i = 0; i < BAND; i++)
        band[i] = from_bits(CANARY);
    return p;
}

static float *place_random(int slot, int64_t n, int mode) {
    float *p = place(slot, n);
    for (int64_t i = 0; i < n; i++)
        p[i] = rng_float(mode);
    return p;
}

static float *place_copy(int slot, const float *from, int64_t n) {
    float *p = place(slot, n);
    memcpy(p, from, (size_t)n * sizeof *p);
    return p;
}

/* ---- comparing and counting ---- */

#define MAX_ISAS 4
static const pkv_kernels *scalar, *others[MAX_ISAS];
static int n_others;

static const char *op = "";
static int isa_now;
static int64_t n_checks[MAX_ISAS], n_differences[MAX_ISAS], total_checks, total_differences;
static char where[160]; /* sizes of the case at hand, for the message */
static uint64_t checksum = 0xCBF29CE484222325u;

#define CASE(...) snprintf(where, sizeof where, __VA_ARGS__)
#define FOR_EACH_ISA(kernels)                                                                                  \
    for (const pkv_kernels *kernels = others[isa_now = 0]; isa_now < n_others; kernels = others[++isa_now])

/* The sign and payload of a NaN are the CPU's business; that it is one is ours. */
static int same_float(float got, float want) {
    return (got != got && want != want) || pkv_f32_to_bits(got) == pkv_f32_to_bits(want);
}

/* FNV-1a over the bits of the scalar results, all NaN alike. */
static void digest(const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = x[i] != x[i] ? 0x7FC00000u : (uint32_t)pkv_f32_to_bits(x[i]);
        for (int shift = 0; shift < 32; shift += 8)
            checksum = (checksum ^ ((bits >> shift) & 0xFF)) * 0x100000001B3u;
    }
}

static void count_check(const float *got, const float *want, int64_t n) {
    n_checks[isa_now]++;
    for (int64_t i = 0; i < n; i++)
        if (!same_float(got[i], want[i])) {
            if (n_differences[isa_now]++ < 3)
                printf("  %s %s, %s, %s: element %lld is %08x, scalar gives %08x\n", others[isa_now]->isa, op, where,
                       side == AT_START ? "at page start" : "at page end", (long long)i,
                       (unsigned)pkv_f32_to_bits(got[i]), (unsigned)pkv_f32_to_bits(want[i]));
            return;
        }
}

/* Compare n floats in GOT with WANT, and with them their guard bands. */
static void check_arrays(const float *got, const float *want, int64_t n) {
    int64_t shift = side == AT_START ? 0 : BAND;
    count_check(got - shift, want - shift, n + BAND);
}

/* The same for n bytes in GOT and n in WANT or elsewhere, where every bit counts. */
static void check_bytes(const void *got, const void *want, int64_t n) {
    const uint8_t *a = got, *b = want;
    int64_t words = (n + 3) / 4;
    const float *band = side == AT_START ? (const float *)got + words : (const float *)got - BAND;
    n_checks[isa_now]++;
    int same = 1;
    for (int64_t i = 0; i < BAND; i++)
        same = same && (uint32_t)pkv_f32_to_bits(band[i]) == CANARY;
    for (int64_t i = 0; i < n; i++)
        same = same && a[i] == b[i];
    if (!same && n_differences[isa_now]++ < 3)
        printf("  %s %s, %s, %s: bytes differ\n", others[isa_now]->isa, op, where,
               side == AT_START ? "at page start" : "at page end");
}

static void digest_bytes(const void *bytes, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        checksum = (checksum ^ ((const uint8_t *)bytes)[i]) * 0x100000001B3u;
}

static void begin(const char *name) {
    op = name;
    memset(n_checks, 0, sizeof n_checks);
    memset(n_differences, 0, sizeof n_differences);
}

static void end(void) {
    printf("scalar  %-14s checksum %016llx\n", op, (unsigned long long)checksum);
    for (int i = 0; i < n_others; i++) {
        printf("%-7s %-14s %6lld checks, %lld differences\n", others[i]->isa, op, (long long)n_checks[i],
               (long long)n_differences[i]);
        total_checks += n_checks[i];
        total_differences += n_differences[i];
    }
    fflush(stdout);
}

static void on_fault(int signal_number) {
    char text[320];
    int n = snprintf(text, sizeof text, "%s %s, %s: touched memory outside its arrays (signal %d)\n",
                     isa_now < n_others ? others[isa_now]->isa : "scalar", op, where, signal_number);
    _exit(write(STDOUT_FILENO, text, (size_t)n) == n ? 1 : 2);
}

/* ---- one function an operation ---- */

static void check_dot(void) {
    for (int i = 0; i < COUNT(SIZES); i++)
        for (int mode = 0; mode < N_MODES; mode++) {
            int64_t n = SIZES[i];
            CASE("n=%lld mode=%d", (long long)n, mode);
            float *a = place_random(IN_A, n, mode), *b = place_random(IN_B, n, mode);
            float want = scalar->dot(a, b, n);
            digest(&want, 1);
            FOR_EACH_ISA(kernels) {
                float got = kernels->dot(a, b, n);
                count_check(&got, &want, 1);
            }
        }
}

/* Lanes that end at -0: a tail that adds +0 to them shows here. */
static void check_dot_negative_zero(void) {
    for (int64_t n = 16; n <= 40; n++) {
        CASE("n=%lld", (long long)n);
        float *a = place(IN_A, n), *b = place(IN_B, n);
        for (int64_t i = 0; i < n; i++) {
            a[i] = -0x1p-100f;
            b[i] = 0x1p-100f;
        }
        float want = scalar->dot(a, b, n);
        digest(&want, 1);
        FOR_EACH_ISA(kernels) {
            float got = kernels->dot(a, b, n);
            count_check(&got, &want, 1);
        }
    }
}

static void check_exp_row(void) {
    for (int i = 0; i < COUNT(SIZES); i++)
        for (int mode = 0; mode < N_MODES; mode++) {
            int64_t n = SIZES[i];
            CASE("n=%lld mode=%d", (long long)n, mode);
            float *x = place_random(IN_A, n, mode), *want = place(WANT, n);
            scalar->exp_row(x, want, n);
            digest(want, n);
            FOR_EACH_ISA(kernels) {
                float *got = place(GOT, n);
                kernels->exp_row(x, got, n);
                check_arrays(got, want, n);
                got = place_copy(GOT, x, n); /* in place */
                kernels->exp_row(got, got, n);
                check_arrays(got, want, n);
            }
        }
}

/* All the special values, and 2^16 evenly spread bit patterns of each sign. */
static void check_exp_values(void) {
    int64_t n = COUNT(SPECIALS), n_spread = 1 << 14;
    float *x = place(IN_A, n), *want = place(WANT, n);
    CASE("special values");
    for (int64_t i = 0; i < n; i++)
        x[i] = from_bits(SPECIALS[i]);
    scalar->exp_row(x, want, n);
    digest(want, n);
    FOR_EACH_ISA(kernels) {
        float *got = place(GOT, n);
        kernels->exp_row(x, got, n);
        check_arrays(got, want, n);
    }
    for (uint32_t part = 0; part < 8; part++) {
        CASE("spread, part %u", part);
        x = place(IN_A, n_spread);
        want = place(WANT, n_spread);
        for (uint32_t i = 0; i < (uint32_t)n_spread; i++)
            x[i] = from_bits((part << 29) + (i << 15) + ((uint32_t)rng_next() & 0x7FFF));
        scalar->exp_row(x, want, n_spread);
        digest(want, n_spread);
        FOR_EACH_ISA(kernels) {
            float *got = place(GOT, n_spread);
            kernels->exp_row(x, got, n_spread);
            check_arrays(got, want, n_spread);
        }
    }
}

static void check_softmax(void) {
    for (int i = 0; i < COUNT(SIZES); i++)
        for (int mode = 0; mode < N_MODES; mode++) {
            int64_t n = SIZES[i];
            CASE("n=%lld mode=%d", (long long)n, mode);
            float *x = place_random(IN_A, n, mode), *want = place(WANT, n);
            scalar->softmax(x, want, n);
            digest(want, n);
            FOR_EACH_ISA(kernels) {
                float *got = place(GOT, n);
                kernels->softmax(x, got, n);
                check_arrays(got, want, n);
                got = place_copy(GOT, x, n); /* in place */
                kernels->softmax(got, got, n);
                check_arrays(got, want, n);
            }
        }
}

static void check_softmax_chunk(void) {
    for (int i = 0; i < COUNT(SIZES); i++)
        for (int mode = 0; mode <= N_MODES; mode++) {
            int64_t n = SIZES[i];
            CASE("n=%lld mode=%d", (long long)n, mode);
            float *x = place_random(IN_A, n, mode), want_two[2], got_two[2];
            if (mode == N_MODES) /* a wholly masked row */
                for (int64_t j = 0; j < n; j++)
                    x[j] = -INFINITY;
            float *want = place_copy(WANT, x, n);
            scalar->softmax_chunk(want, n, &want_two[0], &want_two[1]);
            digest(want, n);
            digest(want_two, 2);
            FOR_EACH_ISA(kernels) {
                float *got = place_copy(GOT, x, n);
                kernels->softmax_chunk(got, n, &got_two[0], &got_two[1]);
                check_arrays(got, want, n);
                /* Which of +0 and -0 is "the" largest depends on the order of search; nothing computed from
                 * the maximum (a difference fed to exp, a comparison) can tell them apart. */
                if (got_two[0] == 0.0f && want_two[0] == 0.0f)
                    got_two[0] = want_two[0];
                count_check(got_two, want_two, 2);
            }
        }
}

static void check_rmsnorm(void) {
    for (int i = 0; i < COUNT(SIZES); i++)
        for (int mode = 0; mode < N_MODES; mode++) {
            int64_t n = SIZES[i];
            float eps = mode == TINY ? 0.0f : 1e-5f;
            CASE("n=%lld mode=%d", (long long)n, mode);
            float *x = place_random(IN_A, n, mode), *gamma = place_random(IN_B, n, mode), *want = place(WANT, n);
            scalar->rmsnorm(x, gamma, eps, want, n);
            digest(want, n);
            FOR_EACH_ISA(kernels) {
                float *got = place(GOT, n);
                kernels->rmsnorm(x, gamma, eps, got, n);
                check_arrays(got, want, n);
                got = place_copy(GOT, x, n); /* in place */
                kernels->rmsnorm(got, gamma, eps, got, n);
                check_arrays(got, want, n);
            }
        }
}

static void check_rope(void) {
    for (int i = 0; i < COUNT(SIZES); i++)
        for (int mode = 0; mode < N_MODES; mode++)
            for (int64_t rest = 0; rest <= 5; rest += 5) { /* elements of the head that do not rotate */
                int64_t half = SIZES[i], n = 2 * half + rest;
                CASE("half=%lld rest=%lld mode=%d", (long long)half, (long long)rest, mode);
                float *cos = place_random(IN_A, half, mode), *sin = place_random(IN_B, half, mode);
                float *head = place_random(IN_C, n, mode), *want = place_copy(WANT, head, n);
                scalar->rope(want, cos, sin, half);
                digest(want, n);
                FOR_EACH_ISA(kernels) {
                    float *got = place_copy(GOT, head, n);
                    kernels->rope(got, cos, sin, half);
                    check_arrays(got, want, n);
                }
            }
}

static void check_swiglu(void) {
    for (int i = 0; i < COUNT(SIZES); i++)
        for (int mode = 0; mode < N_MODES; mode++) {
            int64_t n = SIZES[i];
            CASE("n=%lld mode=%d", (long long)n, mode);
            float *gate = place_random(IN_A, n, mode), *up = place_random(IN_B, n, mode), *want = place(WANT, n);
            scalar->swiglu(gate, up, want, n);
            digest(want, n);
            FOR_EACH_ISA(kernels) {
                float *got = place(GOT, n);
                kernels->swiglu(gate, up, got, n);
                check_arrays(got, want, n);
                got = place_copy(GOT, gate, n); /* in place */
                kernels->swiglu(got, up, got, n);
                check_arrays(got, want, n);
            }
        }
}

static void check_add(void) {
    for (int i = 0; i < COUNT(SIZES); i++)
        for (int mode = 0; mode < N_MODES; mode++) {
            int64_t n = SIZES[i];
            CASE("n=%lld mode=%d", (long long)n, mode);
            float *x = place_random(IN_A, n, mode), *y = place_random(IN_B, n, mode), *want = place_copy(WANT, y, n);
            scalar->add(want, x, n);
            digest(want, n);
            FOR_EACH_ISA(kernels) {
                float *got = place_copy(GOT, y, n);
                kernels->add(got, x, n);
                check_arrays(got, want, n);
            }
        }
}

/* Columns beyond n_cols hold NaN here: nobody may let them into y. */
static void check_matmul_case(int64_t n_rows, int64_t n_cols, int64_t n_k, int accumulate, int mode) {
    int64_t ldx = n_k + rng_gap(9), ldy = n_cols + rng_gap(9);
    CASE("rows=%lld cols=%lld k=%lld ldx=%lld ldy=%lld accumulate=%d mode=%d", (long long)n_rows, (long long)n_cols,
         (long long)n_k, (long long)ldx, (long long)ldy, accumulate, mode);
    int64_t n_x = n_rows ? (n_rows - 1) * ldx + n_k : 0, n_y = n_rows ? (n_rows - 1) * ldy + n_cols : 0;
    float *x = place_random(IN_A, n_x, mode), *panel = place_random(IN_B, n_k * PKV_PANEL, mode);
    float *before = place_random(IN_C, n_y, mode), *want = place_copy(WANT, before, n_y);
    for (int64_t k = 0; k < n_k; k++)
        for (int64_t j = n_cols; j < PKV_PANEL; j++)
            panel[k * PKV_PANEL + j] = NAN;
    scalar->matmul_f32(x, ldx, n_rows, panel, n_k, want, ldy, n_cols, accumulate, (pkv_ahead){NULL, 0});
    digest(want, n_y);
    /* Drawn outside the loop: the draws must not depend on how many ISAs there are. */
    int64_t k_1 = rng_below(n_k + 1), k_2 = k_1 + rng_below(n_k - k_1 + 1), m_1 = rng_below(n_rows + 1);
    FOR_EACH_ISA(kernels) {
        float *got = place_copy(GOT, before, n_y);
        kernels->matmul_f32(x, ldx, n_rows, panel, n_k, got, ldy, n_cols, accumulate, (pkv_ahead){NULL, 0});
        check_arrays(got, want, n_y);
        /* k split in three, rows in two: the same bits. What is asked of memory ahead may be anywhere. */
        got = place_copy(GOT, before, n_y);
        for (int half = 0; half < 2; half++) {
            int64_t m = half ? m_1 : 0, rows = half ? n_rows - m_1 : m_1;
            const float *x_m = x + m * ldx, *end = panel + n_k * PKV_PANEL;
            pkv_ahead ahead = {(const uint8_t *)end, half * 4 * n_k * PKV_PANEL};
            float *y_m = got + m * ldy;
            kernels->matmul_f32(x_m, ldx, rows, panel, k_1, y_m, ldy, n_cols, accumulate, ahead);
            kernels->matmul_f32(x_m + k_1, ldx, rows, panel + k_1 * PKV_PANEL, k_2 - k_1, y_m, ldy, n_cols, 1, ahead);
            kernels->matmul_f32(x_m + k_2, ldx, rows, panel + k_2 * PKV_PANEL, n_k - k_2, y_m, ldy, n_cols, 1, ahead);
        }
        check_arrays(got, want, n_y);
    }
}

static void check_matmul(void) {
    static const int64_t depths[] = {0, 1, 2, 3, 7, 16, 33, 64};
    for (int64_t n_rows = 1; n_rows <= 40; n_rows++)
        for (int repeat = 0; repeat < 4; repeat++) {
            int64_t n_cols = 1 + rng_below(PKV_PANEL), n_k = depths[rng_below(COUNT(depths))];
            int mode = repeat == 0 ? MODERATE : (int)rng_below(N_MODES);
            check_matmul_case(n_rows, n_cols, n_k, repeat & 1, mode);
        }
    for (int64_t n_cols = 1; n_cols <= PKV_PANEL; n_cols++)
        for (int64_t n_rows = 1; n_rows <= 4; n_rows++)
            check_matmul_case(n_rows, n_cols, 20, n_cols & 1, (int)rng_below(N_MODES));
    check_matmul_case(0, 32, 5, 0, MODERATE);
    check_matmul_case(3, 0, 5, 0, MODERATE);
    /* Longer than any kernel's own split of k. */
    for (int64_t n_rows = 1; n_rows <= 13; n_rows += 4)
        check_matmul_case(n_rows, 20, 700, (int)(n_rows & 1), MODERATE);
}

/* ---- weights as a file has them ---- */

static const char *const DTYPE_NAMES[PKV_N_DTYPES] = {"f32",  "f16",  "bf16", "q8_0", "q4_0", "q4_1",
                                                      "q5_0", "q5_1", "q4_k", "q5_k", "q6_k"};

/* Bits of a float16: any sign; subnormals and zeros in TINY and WIDE; infinities and NaN in SPECIAL only. */
static uint16_t rng_half(int mode) {
    static const uint16_t specials[] = {0x0000, 0x8000, 0x7C00, 0xFC00, 0x7E00, 0xFE01,
                                        0x7C01, 0x7BFF, 0xFBFF, 0x0001, 0x83FF, 0x0400};
    uint16_t low = (uint16_t)(rng_next() & 0x83FF);
    if (mode == SPECIAL && rng_below(4) == 0)
        return specials[rng_below(COUNT(specials))];
    if (mode == WIDE)
        return low | (uint16_t)(rng_below(31) << 10);
    if (mode == TINY)
        return rng_below(4) == 0 ? low & 0x8000 : low | (uint16_t)(rng_below(3) << 10);
    return low | (uint16_t)((5 + rng_below(15)) << 10);
}

static void store_u16(uint8_t *to, uint16_t x) { memcpy(to, &x, sizeof x); }

/* One stored row of k values: every byte random, but for what is a float. */
static void random_row(int dtype, int64_t k, int mode, uint8_t *row) {
    pkv_form f = pkv_form_of(dtype);
    for (int64_t i = 0; i < k / f.unit; i++, row += f.block_nbytes) {
        if (dtype == PKV_F32 || dtype == PKV_BF16) {
            float x = rng_float(mode);
            memcpy(row, (const uint8_t *)&x + 4 - f.block_nbytes, (size_t)f.block_nbytes); /* upper half: bfloat16 */
            continue;
        }
        for (int32_t j = 0; j < f.block_nbytes; j++)
            row[j] = (uint8_t)rng_next();
        store_u16(row + (dtype == PKV_Q6_K ? 208 : 0), rng_half(mode));
        if (f.has_min)
            store_u16(row + 2, rng_half(mode));
    }
}

/* A panel of random rows; about one column in 8 is absent. Rows and panel lie at the forbidden page. */
static const uint8_t *place_panel(int dtype, int64_t k, int mode) {
    pkv_form f = pkv_form_of(dtype);
    int64_t row_nbytes = k / f.unit * f.block_nbytes, n = pkv_panel_nbytes(dtype, k) / 4;
    uint8_t *stored = (uint8_t *)place(IN_C, PKV_PANEL * row_nbytes / 4), *panel = (uint8_t *)place(IN_B, n);
    const uint8_t *rows[PKV_PANEL];
    for (int64_t col = 0; col < PKV_PANEL; col++) {
        random_row(dtype, k, mode, stored + col * row_nbytes);
        rows[col] = rng_below(8) == 0 ? NULL : stored + col * row_nbytes;
    }
    memset(panel, 0, (size_t)n * 4);
    pkv_pack_panel(dtype, rows, k, panel);
    return panel;
}

static void check_expand_case(int dtype, const uint8_t *panel, int64_t k_0, int64_t n_k, int mode) {
    int64_t n = n_k * PKV_PANEL;
    CASE("%s k_0=%lld n_k=%lld mode=%d", DTYPE_NAMES[dtype], (long long)k_0, (long long)n_k, mode);
    float *want = place(WANT, n);
    scalar->expand(dtype, panel, k_0, n_k, want);
    digest(want, n);
    FOR_EACH_ISA(kernels) {
        float *got = place(GOT, n);
        kernels->expand(dtype, panel, k_0, n_k, got);
        check_arrays(got, want, n);
    }
}

/* Every legal part of a panel of each type. */
static void check_expand(void) {
    for (int dtype = 0; dtype < PKV_N_DTYPES; dtype++) {
        pkv_form f = pkv_form_of(dtype);
        int64_t k = f.is_k ? 512 : f.unit == 1 ? 7 : 128;
        for (int mode = 0; mode < N_MODES; mode++) {
            const uint8_t *panel = place_panel(dtype, k, mode);
            for (int64_t k_0 = 0; k_0 <= k; k_0 += f.group)
                for (int64_t n_k = 0; k_0 + n_k <= k; n_k += f.group) /* in the K types all of them only once */
                    if (!f.is_k || mode == SPECIAL || n_k == f.group || k_0 + n_k == k)
                        check_expand_case(dtype, panel, k_0, n_k, mode);
        }
    }
}

/* Straight from codes: scalar's bits, which are those of the expanded panel in the float32 matmul. */
static void check_coded_case(int dtype, int64_t n_rows, int64_t n_cols, int64_t k, int mode) {
    int64_t ldx = k + rng_gap(9), ldy = n_cols + rng_gap(9);
    int64_t n_x = (n_rows - 1) * ldx + k, n_y = (n_rows - 1) * ldy + n_cols;
    CASE("%s rows=%lld cols=%lld k=%lld ldx=%lld ldy=%lld mode=%d", DTYPE_NAMES[dtype], (long long)n_rows,
         (long long)n_cols, (long long)k, (long long)ldx, (long long)ldy, mode);
    const uint8_t *panel = place_panel(dtype, k, mode);
    float *x = place_random(IN_A, n_x, mode), *before = place_random(IN_C, n_y, MODERATE);
    float *want = place_copy(WANT, before, n_y), *values = place(IN_D, k * PKV_PANEL);
    scalar->matmul_coded(dtype, x, ldx, n_rows, panel, k, want, ldy, n_cols);
    digest(want, n_y);
    scalar->expand(dtype, panel, 0, k, values);
    float *got = place_copy(GOT, before, n_y);
    scalar->matmul_f32(x, ldx, n_rows, values, k, got, ldy, n_cols, 0, (pkv_ahead){NULL, 0});
    if (n_others) {
        isa_now = 0;
        check_arrays(got, want, n_y);
    }
    FOR_EACH_ISA(kernels) {
        if (n_rows > kernels->coded_rows)
            continue;
        got = place_copy(GOT, before, n_y);
        kernels->matmul_coded(dtype, x, ldx, n_rows, panel, k, got, ldy, n_cols);
        check_arrays(got, want, n_y);
        got = place_copy(GOT, before, n_y);
        kernels->expand(dtype, panel, 0, k, values);
        kernels->matmul_f32(x, ldx, n_rows, values, k, got, ldy, n_cols, 0, (pkv_ahead){NULL, 0});
        check_arrays(got, want, n_y);
    }
}

/* As many as the kernel table that takes most. */
#define MOST_CODED_ROWS 8

static void check_coded(void) {
    static const int64_t k_units[] = {256, 512, 768}, k_groups[] = {32, 64, 96, 288, 576}, k_floats[] = {1, 2, 31, 300};
    for (int dtype = 0; dtype < PKV_N_DTYPES; dtype++) {
        pkv_form f = pkv_form_of(dtype);
        for (int64_t n_cols = 1; n_cols <= PKV_PANEL; n_cols++)
            for (int64_t n_rows = 1; n_rows <= (n_cols % 8 < 2 ? MOST_CODED_ROWS : 4); n_rows++) {
                int64_t i = rng_below(8), k = f.is_k        ? k_units[i % COUNT(k_units)]
                                              : f.unit == 1 ? k_floats[i % COUNT(k_floats)]
                                                            : k_groups[i % COUNT(k_groups)];
                if (f.is_k && (n_rows + n_cols) % 4 != 0)
                    k = 256;
                check_coded_case(dtype, n_rows, n_cols, k, (int)rng_below(N_MODES));
            }
    }
}

/* Rows rounded to each type and read back, the whole head and beside other heads. */
static void check_kv(void) {
    static const int dtypes[] = {PKV_F32, PKV_F16, PKV_BF16, PKV_Q8_0};
    static const int64_t rows[] = {1, 2, 3, 16};
    for (int d = 0; d < COUNT(dtypes); d++)
        for (int i = 0; i < COUNT(HEAD_DIMS); i++)
            for (int mode = 0; mode < N_MODES; mode++) {
                int dtype = dtypes[d];
                int64_t n = dtype == PKV_Q8_0 ? (HEAD_DIMS[i] + 31) / 32 * 32 : HEAD_DIMS[i];
                int64_t n_rows = rows[rng_below(COUNT(rows))], values_nbytes = n * pkv_kv_value_nbytes(dtype);
                int64_t scales_nbytes = pkv_kv_scales_nbytes(dtype, n);
                CASE("dtype=%d rows=%lld n=%lld mode=%d", dtype, (long long)n_rows, (long long)n, mode);
                float *x = place_random(IN_A, n_rows * n, mode);
                for (int64_t r = 0; r < n_rows; r++) /* rows of zeros, and of values too small for a scale */
                    for (int64_t e = 0, kind = rng_below(6); e < n && kind < 2; e++)
                        x[r * n + e] = kind ? rng_exponents(0, 105) : 0.0f;
                uint8_t *values = (uint8_t *)place(IN_B, (n_rows * values_nbytes + 3) / 4);
                uint8_t *scales = (uint8_t *)place(IN_C, (n_rows * scales_nbytes + 3) / 4);
                for (int64_t r = 0; r < n_rows; r++)
                    scalar->kv_round(dtype, x + r * n, n, values + r * values_nbytes, scales + r * scales_nbytes);
                digest_bytes(values, n_rows * values_nbytes);
                digest_bytes(scales, n_rows * scales_nbytes);
                FOR_EACH_ISA(kernels) {
                    uint8_t *got = (uint8_t *)place(GOT, (n_rows * values_nbytes + 3) / 4);
                    uint8_t *got_scales = (uint8_t *)place(WANT, (n_rows * scales_nbytes + 3) / 4);
                    for (int64_t r = 0; r < n_rows; r++)
                        kernels->kv_round(dtype, x + r * n, n, got + r * values_nbytes,
                                          got_scales + r * scales_nbytes);
                    check_bytes(got, values, n_rows * values_nbytes);
                    check_bytes(got_scales, scales, n_rows * scales_nbytes);
                }
                pkv_kv_rows stored = {values, scales, values_nbytes, scales_nbytes};
                float *want = place(WANT, n_rows * n);
                scalar->kv_expand(dtype, &stored, n_rows, n, want, values, values_nbytes);
                digest(want, n_rows * n);
                FOR_EACH_ISA(kernels) {
                    float *got = place(GOT, n_rows * n);
                    kernels->kv_expand(dtype, &stored, n_rows, n, got, values, values_nbytes);
                    check_arrays(got, want, n_rows * n);
                }
            }
}

/* ---- compute="int8" ---- */

#define GROUP_FLOATS ((int64_t)(sizeof(pkv_int8_group) / sizeof(float)))

/* What a row became, as 36 floats a group that can be compared and digested. */
static float *place_groups_as_floats(int slot, const pkv_int8_group *groups, int64_t n_groups) {
    float *p = place(slot, 36 * n_groups), *to = p;
    for (int64_t i = 0; i < n_groups; i++) {
        for (int j = 0; j < PKV_INT8_GROUP; j++)
            *to++ = (float)groups[i].code[j];
        *to++ = groups[i].scale;
        *to++ = groups[i].scaled_sum;
        *to++ = (float)groups[i].sum;
        *to++ = (float)groups[i].first_sum;
    }
    return p;
}

static void check_quantize_row(void) {
    for (int64_t n_groups = 0; n_groups <= 9; n_groups++)
        for (int repeat = 0; repeat < 4 * N_MODES; repeat++) {
            int mode = repeat % N_MODES;
            int64_t n = n_groups * PKV_INT8_GROUP;
            CASE("groups=%lld mode=%d", (long long)n_groups, mode);
            float *x = place_random(IN_A, n, mode);
            if (repeat / N_MODES == 1) /* halves between two codes: 127 is the largest, so a code is the value */
                for (int64_t i = 0; i < n; i++)
                    x[i] = i % PKV_INT8_GROUP ? (float)(rng_below(507) - 253) * 0.5f : 127.0f;
            pkv_int8_group *groups = (pkv_int8_group *)(void *)place(IN_B, n_groups * GROUP_FLOATS);
            scalar->quantize_row(x, n, groups);
            float *want = place_groups_as_floats(WANT, groups, n_groups);
            digest(want, 36 * n_groups);
            FOR_EACH_ISA(kernels) {
                memset(groups, 0xA5, (size_t)n_groups * sizeof *groups);
                kernels->quantize_row(x, n, groups);
                check_arrays(place_groups_as_floats(GOT, groups, n_groups), want, 36 * n_groups);
            }
        }
}

/* Codes at the ends of their range, all bytes of a row alike: where sums saturate, if anywhere. */
static void make_extreme(int dtype, int64_t k, uint8_t *row) {
    static const uint8_t bytes[] = {0x00, 0x7F, 0x80, 0x81, 0xFF};
    pkv_form f = pkv_form_of(dtype);
    int first = dtype == PKV_Q6_K ? 0 : 2 + 2 * f.has_min;
    int end = dtype == PKV_Q6_K ? 208 : f.block_nbytes;
    uint8_t byte = bytes[rng_below(COUNT(bytes))];
    for (int64_t i = 0; i < k / f.unit; i++)
        memset(row + i * f.block_nbytes + first, byte, (size_t)(end - first));
}

/* One panel, several rows: scalar's bits in one call, in slices of k and in parts of the rows. */
static void check_int8_case(int dtype, int64_t n_rows, int64_t n_cols, int64_t k, int accumulate, int extreme, int mode) {
    pkv_form f = pkv_form_of(dtype);
    int64_t n_groups = k / PKV_INT8_GROUP, ldx = n_groups + rng_gap(3), ldy = n_cols + rng_gap(9);
    int64_t n_y = (n_rows - 1) * ldy + n_cols, n_x = (n_rows - 1) * ldx + n_groups;
    CASE("%s rows=%lld cols=%lld k=%lld ldx=%lld ldy=%lld accumulate=%d extreme=%d mode=%d", DTYPE_NAMES[dtype],
         (long long)n_rows, (long long)n_cols, (long long)k, (long long)ldx, (long long)ldy, accumulate, extreme, mode);
    int64_t row_nbytes = k / f.unit * f.block_nbytes, panel_len = pkv_panel_nbytes(dtype, k) / 4;
    const uint8_t *rows[PKV_PANEL];
    uint8_t *stored = (uint8_t *)place(IN_C, (PKV_PANEL * row_nbytes + 3) / 4), *panel = (uint8_t *)place(IN_B, panel_len);
    for (int64_t col = 0; col < PKV_PANEL; col++) {
        random_row(dtype, k, mode, stored + col * row_nbytes);
        if (extreme)
            make_extreme(dtype, k, stored + col * row_nbytes);
        rows[col] = stored + col * row_nbytes;
    }
    memset(panel, 0, (size_t)panel_len * 4);
    pkv_pack_panel(dtype, rows, k, panel);
    pkv_int8_group *x = (pkv_int8_group *)(void *)place(IN_A, n_x * GROUP_FLOATS);
    memset(x, 0, (size_t)n_x * sizeof *x);
    for (int64_t m = 0; m < n_rows; m++)
        for (int64_t i = 0; i < n_groups; i++) {
            float values[PKV_INT8_GROUP];
            float alike = rng_below(2) ? 1.0f : -1.0f;
            for (int j = 0; j < PKV_INT8_GROUP; j++)
                values[j] = extreme ? alike : rng_float(mode);
            scalar->quantize_row(values, PKV_INT8_GROUP, x + m * ldx + i);
        }
    float *before = place_random(IN_C, n_y, MODERATE), *want = place_copy(WANT, before, n_y);
    uint8_t *slice = (uint8_t *)place(IN_D, PKV_INT8_SLICE_NBYTES / 4);
    for (int64_t k_0 = 0; k_0 < k; k_0 += PKV_INT8_K) {
        int64_t n_k = pkv_min(PKV_INT8_K, k - k_0);
        scalar->expand_int8(dtype, panel, k_0, n_k, slice);
        scalar->matmul_int8(dtype, x + k_0 / PKV_INT8_GROUP, ldx, n_rows, slice, n_k, want, ldy, n_cols,
                            accumulate || k_0);
    }
    digest(want, n_y);
    int64_t tile = (1 + rng_below(8)) * PKV_INT8_GROUP, m_1 = rng_below(n_rows + 1);
    FOR_EACH_ISA(kernels) {
        for (int split = 0; split < 2; split++) {
            float *got = place_copy(GOT, before, n_y);
            int64_t most = split ? tile : PKV_INT8_K, cut = split ? m_1 : n_rows;
            for (int64_t k_0 = 0; k_0 < k; k_0 += most) {
                int64_t n_k = pkv_min(most, k - k_0);
                const pkv_int8_group *x_k = x + k_0 / PKV_INT8_GROUP;
                kernels->expand_int8(dtype, panel, k_0, n_k, slice);
                kernels->matmul_int8(dtype, x_k, ldx, cut, slice, n_k, got, ldy, n_cols, accumulate || k_0);
                kernels->matmul_int8(dtype, x_k + cut * ldx, ldx, n_rows - cut, slice, n_k, got + cut * ldy, ldy, n_cols,
                                     accumulate || k_0);
            }
            check_arrays(got, want, n_y);
        }
    }
}

static void check_int8(void) {
    static const int64_t k_units[] = {256, 512}, k_groups[] = {32, 64, 96, 288, 576};
    for (int dtype = PKV_Q8_0; dtype < PKV_N_DTYPES; dtype++) {
        pkv_form f = pkv_form_of(dtype);
        for (int64_t n_rows = 1; n_rows <= 33; n_rows += n_rows < 9 ? 1 : 8)
            for (int repeat = 0; repeat < 3; repeat++) {
                int64_t n_cols = repeat ? 1 + rng_below(PKV_PANEL) : PKV_PANEL, i = rng_below(5);
                int64_t k = n_rows > 9 ? k_units[0] : f.is_k ? k_units[i % COUNT(k_units)] : k_groups[i];
                int extreme = repeat == 2, accumulate = (int)rng_below(2), mode = (int)rng_below(N_MODES);
                check_int8_case(dtype, n_rows, n_cols, k, accumulate, extreme, extreme ? MODERATE : mode);
            }
        for (int64_t n_cols = 1; n_cols <= PKV_PANEL; n_cols++)
            check_int8_case(dtype, 1 + n_cols % 3, n_cols, f.unit, 0, n_cols & 1, MODERATE);
    }
}

#define MOST_PANELS 9

/* A matrix whose panels are of several types, as files mix them, in float32 and in int8: each group of panels has the bits
 * of its panels one by one, and writes no other columns. */
static void check_panels(void) {
    static const int64_t n_rows_of[] = {1, 2, 4, 8, 9, 12, 30}, ks[] = {256, 512, 768};
    float *scratch = NULL;
    void *data[MOST_PANELS] = {NULL};
    if (posix_memalign((void **)&scratch, 64, PKV_MATMUL_SCRATCH * sizeof *scratch) != 0)
        exit(2);
    for (int repeat = 0; repeat < 140; repeat++) {
        int64_t n_rows = n_rows_of[repeat % COUNT(n_rows_of)], k = ks[rng_below(COUNT(ks))];
        int64_t n_panels = 1 + rng_below(MOST_PANELS), n = n_panels * PKV_PANEL - rng_below(PKV_PANEL), ldy = n + rng_gap(9);
        int64_t begin = rng_below(n_panels), end = begin + 1 + rng_below(n_panels - begin);
        int is_int8 = (int)rng_below(2);
        CASE("rows=%lld k=%lld n=%lld panels=[%lld, %lld) int8=%d", (long long)n_rows, (long long)k, (long long)n,
             (long long)begin, (long long)end, is_int8);
        pkv_panel panels[MOST_PANELS];
        for (int64_t p = 0; p < n_panels; p++) {
            int dtype = p && rng_below(2) ? panels[p - 1].dtype : (int)rng_below(PKV_N_DTYPES);
            size_t nbytes = (size_t)pkv_panel_nbytes(dtype, k);
            if (posix_memalign(&data[p], 64, nbytes) != 0)
                exit(2);
            memcpy(data[p], place_panel(dtype, k, MODERATE), nbytes);
            panels[p] = (pkv_panel){data[p], dtype};
        }
        pkv_weight w = {panels, n, k};
        float *x = place_random(IN_A, n_rows * k, MODERATE);
        pkv_int8_group *codes = (pkv_int8_group *)(void *)place(IN_D, n_rows * k / PKV_INT8_GROUP * GROUP_FLOATS);
        scalar->quantize_row(x, n_rows * k, codes);
        pkv_rows in = {x, is_int8 ? codes : NULL, n_rows};
        int64_t n_y = (n_rows - 1) * ldy + n;
        float *before = place_random(IN_C, n_y, MODERATE), *want = place_copy(WANT, before, n_y);
        for (int64_t p = begin; p < end; p++)
            pkv_matmul_panels(scalar, in, &w, p, p + 1, want + p * PKV_PANEL, ldy, scratch);
        digest(want, n_y);
        FOR_EACH_ISA(kernels) {
            float *got = place_copy(GOT, before, n_y);
            pkv_matmul_panels(kernels, in, &w, begin, end, got + begin * PKV_PANEL, ldy, scratch);
            check_arrays(got, want, n_y);
        }
        for (int64_t p = 0; p < n_panels; p++)
            free(data[p]);
    }
    free(scratch);
}

static void check_attn_scores(void) {
    static const int64_t keys[] = {0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 20, 33};
    for (int i = 0; i < COUNT(HEAD_DIMS); i++)
        for (int j = 0; j < 9 * COUNT(keys); j++) {
            int64_t head_dim = HEAD_DIMS[i], n_k = keys[j / 9], n_q = 1 + j % 9;
            int64_t ldk = head_dim + rng_below(3) * 8, lds = n_k + rng_below(4);
            int64_t n_s = (n_q - 1) * lds + n_k, n_keys = n_k ? (n_k - 1) * ldk + head_dim : 0;
            int mode = (int)rng_below(N_MODES);
            CASE("heads=%lld keys=%lld head_dim=%lld ldk=%lld lds=%lld mode=%d", (long long)n_q, (long long)n_k,
                 (long long)head_dim, (long long)ldk, (long long)lds, mode);
            float *q = place_random(IN_A, n_q * head_dim, mode), *k = place_random(IN_B, n_keys, mode);
            float *before = place_random(IN_C, n_s, MODERATE), *want = place_copy(WANT, before, n_s);
            scalar->attn_scores(q, n_q, k, ldk, n_k, head_dim, 0.1337f, want, lds, k, ldk);
            digest(want, n_s);
            FOR_EACH_ISA(kernels) {
                float *got = place_copy(GOT, before, n_s);
                kernels->attn_scores(q, n_q, k, ldk, n_k, head_dim, 0.1337f, got, lds, k, ldk);
                check_arrays(got, want, n_s);
            }
        }
}

static void check_attn_values(void) {
    static const int64_t keys[] = {0, 1, 2, 5, 16, 33};
    for (int i = 0; i < COUNT(HEAD_DIMS); i++)
        for (int64_t n_q = 1; n_q <= 9; n_q++) {
            int64_t head_dim = HEAD_DIMS[i], n_k = keys[rng_below(COUNT(keys))];
            int64_t ldv = head_dim + rng_below(3) * 8, ldp = n_k + rng_below(4);
            int64_t n_p = (n_q - 1) * ldp + n_k, n_values = n_k ? (n_k - 1) * ldv + head_dim : 0;
            int mode = (int)rng_below(N_MODES);
            CASE("heads=%lld keys=%lld head_dim=%lld ldv=%lld ldp=%lld mode=%d", (long long)n_q, (long long)n_k,
                 (long long)head_dim, (long long)ldv, (long long)ldp, mode);
            float *p = place_random(IN_A, n_p, mode), *v = place_random(IN_B, n_values, mode);
            float *before = place_random(IN_C, n_q * head_dim, mode), *want = place_copy(WANT, before, n_q * head_dim);
            scalar->attn_values(p, ldp, n_q, v, ldv, n_k, head_dim, want, v, ldv);
            digest(want, n_q * head_dim);
            FOR_EACH_ISA(kernels) {
                float *got = place_copy(GOT, before, n_q * head_dim);
                kernels->attn_values(p, ldp, n_q, v, ldv, n_k, head_dim, got, v, ldv);
                check_arrays(got, want, n_q * head_dim);
            }
        }
}

static void check_attn_merge(void) {
    static const int64_t no_state = 0, no_chunk = 1; /* one side is still empty: max -inf, sum 0 */
    for (int i = 0; i < COUNT(HEAD_DIMS); i++)
        for (int mode = 0; mode < N_MODES; mode++)
            for (int64_t repeat = 0; repeat < 4; repeat++) {
                int64_t head_dim = HEAD_DIMS[i];
                CASE("head_dim=%lld mode=%d repeat=%lld", (long long)head_dim, mode, (long long)repeat);
                float state[2], chunk[2];
                for (int j = 0; j < 2; j++) {
                    state[j] = rng_float(mode);
                    chunk[j] = rng_float(mode);
                }
                float *empty = repeat == no_state ? state : chunk;
                if (repeat == no_state || repeat == no_chunk) {
                    empty[0] = -INFINITY;
                    empty[1] = 0.0f;
                }
                float *acc_c = place_random(IN_A, head_dim, mode), *acc = place_random(IN_B, head_dim, mode);
                float *want = place_copy(WANT, acc, head_dim), want_two[2] = {state[0], state[1]};
                scalar->attn_merge(&want_two[0], &want_two[1], want, chunk[0], chunk[1], acc_c, head_dim);
                digest(want, head_dim);
                digest(want_two, 2);
                FOR_EACH_ISA(kernels) {
                    float *got = place_copy(GOT, acc, head_dim), got_two[2] = {state[0], state[1]};
                    kernels->attn_merge(&got_two[0], &got_two[1], got, chunk[0], chunk[1], acc_c, head_dim);
                    check_arrays(got, want, head_dim);
                    count_check(got_two, want_two, 2);
                }
            }
}

static void check_attn_finish(void) {
    for (int i = 0; i < COUNT(SIZES); i++)
        for (int mode = 0; mode < N_MODES; mode++) {
            int64_t n = SIZES[i];
            float sum = rng_float(mode);
            CASE("head_dim=%lld mode=%d", (long long)n, mode);
            float *acc = place_random(IN_A, n, mode), *want = place(WANT, n);
            scalar->attn_finish(acc, sum, want, n);
            digest(want, n);
            FOR_EACH_ISA(kernels) {
                float *got = place(GOT, n);
                kernels->attn_finish(acc, sum, got, n);
                check_arrays(got, want, n);
            }
        }
}

/* ---- what only the scalar file has ---- */

/* The largest error of exp in ulp of the float32 result, against the C library's float64, over all of
 * [-104, 88.72]; below the normal numbers an ulp is 2^-149. */
static double exp_worst_ulp(void) {
    double worst = 0.0;
    for (int64_t i = 0; i <= 1 << 18; i++) {
        float x = (float)(-104.0 + 192.72 * (double)i / (double)(1 << 18));
        double exact = exp((double)x), got = (double)pkv_exp_f32_scalar(x);
        int exponent;
        frexp(exact, &exponent);
        double ulp = ldexp(1.0, exponent - 24 < -149 ? -149 : exponent - 24), error = fabs(got - exact) / ulp;
        if (error > worst)
            worst = error;
    }
    return worst;
}

/* The rotary table takes no ISA's path, but its bits belong to the promise as well. */
static void digest_rope_table(void) {
    static const int64_t positions[] = {0, 1, 2, 17, 1000, 8192, 80000, 1048575};
    double inv_freq[32];
    float cos[32], sin[32];
    for (int i = 0; i < 32; i++)
        inv_freq[i] = 1.0 / (double)(1 + i * i * i);
    for (int i = 0; i < COUNT(positions); i++) {
        pkv_rope_table(positions[i], inv_freq, 32, cos, sin);
        digest(cos, 32);
        digest(sin, 32);
    }
}

static int is_asked(const char *name, int n_names, char **names) {
    for (int i = 0; i < n_names; i++)
        if (strcmp(name, names[i]) == 0)
            return 1;
    return n_names == 0;
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*check)(void);
    } ops[] = {
        {"dot", check_dot},
        {"dot, -0", check_dot_negative_zero},
        {"exp_row", check_exp_row},
        {"exp, values", check_exp_values},
        {"softmax", check_softmax},
        {"softmax_chunk", check_softmax_chunk},
        {"rmsnorm", check_rmsnorm},
        {"rope", check_rope},
        {"swiglu", check_swiglu},
        {"add", check_add},
        {"matmul_f32", check_matmul},
        {"expand", check_expand},
        {"matmul_coded", check_coded},
        {"kv rows", check_kv},
        {"quantize_row", check_quantize_row},
        {"matmul_int8", check_int8},
        {"panels", check_panels},
        {"attn_scores", check_attn_scores},
        {"attn_values", check_attn_values},
        {"attn_merge", check_attn_merge},
        {"attn_finish", check_attn_finish},
    };
    struct sigaction fault = {0};
    fault.sa_handler = on_fault;
    sigaction(SIGSEGV, &fault, NULL);
    sigaction(SIGBUS, &fault, NULL);
    map_arenas();
    for (int i = 0; i < pkv_n_kernel_tables(); i++) {
        const pkv_kernels *table = &pkv_kernel_tables[i];
        if (strcmp(table->isa, "scalar") == 0)
            scalar = table;
        else if (pkv_isa_runs(i))
            others[n_others++] = table;
        else
            printf("%-7s not on this CPU\n", table->isa);
        if (table->coded_rows > MOST_CODED_ROWS) {
            fprintf(stderr, "kernels_check: MOST_CODED_ROWS is below the %s table's\n", table->isa);
            return 2;
        }
    }
    uint64_t saved = pkv_fpenv_enter();
    for (int i = 0; i < COUNT(ops); i++) {
        if (!is_asked(ops[i].name, argc - 1, argv + 1))
            continue;
        begin(ops[i].name);
        for (side = 0; side < N_SIDES; side++)
            ops[i].check();
        end();
    }
    digest_rope_table();
    pkv_fpenv_leave(saved);
    double worst = exp_worst_ulp();
    printf("exp within %.3f ulp of float64\n", worst);
    printf("scalar checksum %016llx\n", (unsigned long long)checksum);
    printf("%lld checks, %lld differences\n", (long long)total_checks, (long long)total_differences);
    return total_differences != 0 || !(worst <= 2.0);
}
