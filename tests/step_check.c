/* Steps of a small model on several threads, over one pool, in C alone, so that ThreadSanitizer can watch them: it sees
 * every access of every thread, and a task that reads what another writes without a barrier between is a report. Logits, K and V must be those of one thread, and a step
 * that is stopped at any of its polls must leave the pool as it was. Exit status 1 on a difference.
 *   cc -O1 -ffp-contract=off -fopenmp -Iinclude tests/step_check.c -lm -o step_check && ./step_check
 * .ci/sanitize runs it under each sanitizer. With a number as argument it runs so many decode steps of one row on one
 * thread instead, for counting instructions. */
#define _GNU_SOURCE /* MAP_ANONYMOUS under -std=c11 */
#include <stdio.h>
#include <stdlib.h>

#include "pagedkv/team.h"

enum { N_LAYERS = 3, HIDDEN = 128, N_HEADS = 8, N_KV_HEADS = 2, HEAD_DIM = 16, FFN = 352, VOCAB = 320, HALF = 8 };
enum { N_SEQS = 4, MOST_ROWS = 400, N_BLOCKS = 128, BLOCK_SIZE = 16 };

static uint64_t rng_state = 1;

static uint32_t rng_next(void) { /* Knuth's MMIX constants; the high bits are good */
    rng_state = rng_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(rng_state >> 33);
}

static float rng_float(float scale) { return scale * ((float)(rng_next() % 2001) - 1000) / 1000; }

static void *need(void *p) {
    if (!p) {
        puts("no memory");
        exit(2);
    }
    return p;
}

/* A random matrix, in float32 or q8_0. */
static pkv_weight new_weight(int dtype, int64_t n, int64_t k) {
    int64_t n_panels = pkv_panels_for(n), nbytes = pkv_panel_nbytes(dtype, k);
    pkv_panel *panels = need(calloc((size_t)n_panels, sizeof *panels));
    uint8_t *rows = need(malloc((size_t)(PKV_PANEL * k * 4)));
    for (int64_t p = 0; p < n_panels; p++) {
        const uint8_t *of[PKV_PANEL];
        uint8_t *data = need(aligned_alloc(64, (size_t)(nbytes + 63) / 64 * 64));
        for (int64_t i = 0; i < PKV_PANEL; i++) {
            int64_t row_nbytes = dtype == PKV_F32 ? 4 * k : k / 32 * 34;
            uint8_t *row = rows + i * row_nbytes;
            for (int64_t j = 0; dtype == PKV_F32 && j < k; j++)
                ((float *)row)[j] = rng_float(0.15f);
            for (int64_t j = 0; dtype != PKV_F32 && j < row_nbytes; j++)
                row[j] = j % 34 == 0 ? 0 : j % 34 == 1 ? 0x14 : (uint8_t)rng_next(); /* a scale of 2^-10 */
            of[i] = p * PKV_PANEL + i < n ? row : NULL;
        }
        memset(data, 0, (size_t)nbytes);
        pkv_pack_panel(dtype, of, k, data);
        panels[p] = (pkv_panel){data, dtype};
    }
    free(rows);
    return (pkv_weight){panels, n, k};
}

static void free_weight(pkv_weight w) {
    for (int64_t p = 0; p < pkv_panels_for(w.n); p++)
        free((void *)w.panels[p].data);
    free((void *)w.panels);
}

static float ones[HIDDEN];
static double inv_freq[HALF];
static pkv_layer layers[N_LAYERS];

static pkv_model new_model(int dtype, int int8) {
    pkv_model m = {.n_layers = N_LAYERS, .hidden_dim = HIDDEN, .ffn_dim = FFN, .vocab_size = VOCAB, .rope_half = HALF,
                   .norm_eps = 1e-5f, .inv_freq = inv_freq, .layers = layers, .out_norm = ones, .int8 = int8};
    m.attn = (pkv_attn_shape){.n_heads = N_HEADS, .n_kv_heads = N_KV_HEADS, .head_dim = HEAD_DIM, .scale = 0.25};
    for (int i = 0; i < HIDDEN; i++)
        ones[i] = 1;
    for (int i = 0; i < HALF; i++)
        inv_freq[i] = 1.0 / (1 << i);
    for (int i = 0; i < N_LAYERS; i++)
        layers[i] = (pkv_layer){.attn_norm = ones, .ffn_norm = ones, .qkv = new_weight(dtype, pkv_qkv_len(&m), HIDDEN),
                                .o = new_weight(dtype, HIDDEN, pkv_q_dim(&m)),
                                .gate_up = new_weight(dtype, 2 * pkv_pad(FFN), HIDDEN),
                                .down = new_weight(dtype, HIDDEN, FFN)};
    m.embedding = m.head = new_weight(dtype, VOCAB, HIDDEN);
    return m;
}

static void free_model(pkv_model *m) {
    for (int i = 0; i < N_LAYERS; i++) {
        free_weight(layers[i].qkv);
        free_weight(layers[i].o);
        free_weight(layers[i].gate_up);
        free_weight(layers[i].down);
    }
    free_weight(m->head);
}

#ifdef PKV_POLL_ROWS
static int64_t n_polls, stop_at; /* 0: never */

static int poll(pkv_stop *stop) {
    (void)stop;
    return ++n_polls == stop_at;
}
#endif

/* n_new[i] further tokens for each sequence; logits [n_seqs, VOCAB] of the last ones. 0 where the step was stopped, and
 * all is as before. */
static int step(const pkv_model *m, pkv_seq **seqs, const int64_t *n_new, int n_seqs, int n_threads, float *logits) {
    static int32_t tokens[MOST_ROWS], tails[N_SEQS][N_BLOCKS];
    static int64_t positions[MOST_ROWS], out_row[N_SEQS], n_blocks[N_SEQS];
    static pkv_seq *row_seqs[MOST_ROWS];
    static pkv_attn_segment segments[N_SEQS];
    int64_t n = 0, failed, needed;
    pkv_step s = {.model = m, .kernels = pkv_kernels_for(NULL), .tokens = tokens, .positions = positions,
                  .row_seqs = row_seqs, .n_out = n_seqs, .out_row = out_row, .logits = logits};
#ifdef PKV_POLL_ROWS
    pkv_stop stop = {.poll = poll};
    s.stop = &stop;
    n_polls = 0;
#endif
    for (int i = 0; i < n_seqs; i++) {
        const pkv_pool *pool = seqs[i]->pool;
        n_blocks[i] = seqs[i]->n_blocks;
        for (int64_t j = seqs[i]->seq_len / BLOCK_SIZE, at = 0; j < n_blocks[i]; j++, at++)
            tails[i][at] = seqs[i]->block_table[j];
        segments[i] = (pkv_attn_segment){
            .kv = {.k = pool->k, .v = pool->v, .block_table = seqs[i]->block_table, .block_size = BLOCK_SIZE,
                   .kv_dim = pool->kv_dim, .dtype = pool->dtype,
                   .layer_stride = BLOCK_SIZE * pkv_kv_row_nbytes(pool->dtype, pool->kv_dim),
                   .block_stride = N_LAYERS * BLOCK_SIZE * pkv_kv_row_nbytes(pool->dtype, pool->kv_dim)},
            .row = n, .n_rows = n_new[i], .visible = seqs[i]->seq_len + 1, .visible_step = 1};
        for (int64_t j = 0; j < n_new[i]; j++, n++) {
            positions[n] = seqs[i]->seq_len + j;
            tokens[n] = (int32_t)((positions[n] * 7 + i * (positions[n] > 40)) % VOCAB);
            row_seqs[n] = seqs[i];
        }
        out_row[i] = n - 1;
    }
    s.n_rows = n;
    if (!pkv_attn_make_plan(&s.plan, &m->attn, segments, n_seqs, n_threads) ||
        pkv_ensure_append_batch(seqs, n_new, n_seqs, &failed, &needed) != PKV_OK) {
        puts("the step does not fit");
        exit(2);
    }
    int64_t n_floats = pkv_step_lay_out(&s, m, n, n_threads, NULL);
    float *block = need(aligned_alloc(64, (size_t)(n_floats + s.plan.partials_len + 16) / 16 * 64));
    pkv_step_lay_out(&s, m, n, n_threads, block);
    s.partials = block + n_floats;
    pkv_team_step(&s, n_threads);
    free(block);
    pkv_attn_free_plan(&s.plan);
#ifdef PKV_POLL_ROWS
    if (pkv_stop_is_set(&stop)) {
        for (int i = n_seqs - 1; i >= 0; i--)
            pkv_undo_append(seqs[i], n_blocks[i], tails[i]);
        return 0;
    }
#endif
    for (int i = 0; i < n_seqs; i++)
        seqs[i]->seq_len += n_new[i];
    return 1;
}

static int64_t n_checks, n_differences;

static void same(const void *a, const void *b, size_t n_bytes, const char *what) {
    n_checks++;
    if (memcmp(a, b, n_bytes) != 0) {
        n_differences++;
        printf("%s differ\n", what);
    }
}

/* The state of the pool that a stopped step must not change: counts, and the stack of free blocks. */
static void take_state(pkv_pool *pool, int32_t *state) {
    int64_t n = 0;
    for (int64_t i = 0; i < N_BLOCKS; i++)
        state[n++] = pool->ref_count[i];
    for (int32_t id; pkv_alloc_block(pool, &id) == PKV_OK;)
        state[n++] = id;
    for (int64_t i = n - 1; i >= N_BLOCKS; i--)
        pkv_unref_block(pool, state[i]);
    for (; n < 2 * N_BLOCKS; n++)
        state[n] = -1;
}

/* A prompt, forks of it that share its tail, ragged rows, decode steps: all logits, then all K and V of the sequences. */
static void scenario(const pkv_model *m, int n_threads, int with_stops, float *logits, float *kv) {
    pkv_pool *pool;
    pkv_seq *seqs[N_SEQS] = {0};
    if (pkv_pool_new(N_BLOCKS, N_LAYERS, N_KV_HEADS * HEAD_DIM, BLOCK_SIZE, &pool) != PKV_OK ||
        pkv_seq_new(pool, 1000, &seqs[0]) != PKV_OK)
        exit(2);
    static const int64_t prompt = 298, ragged[N_SEQS] = {1, 33, 2, 5}, one[N_SEQS] = {1, 1, 1, 1};
    step(m, seqs, &prompt, 1, n_threads, logits);
    for (int i = 1; i < N_SEQS; i++)
        if (pkv_seq_fork(seqs[0], &seqs[i]) != PKV_OK)
            exit(2);
    pkv_seq_truncate(seqs[3], 291); /* shorter, and the last to leave the shared tail */
#ifdef PKV_POLL_ROWS
    static int32_t before[2 * N_BLOCKS], after[2 * N_BLOCKS];
    take_state(pool, before);
    stop_at = 0;
    for (int64_t at = 1; with_stops; at += 5) {
        stop_at = at;
        if (step(m, seqs, ragged, N_SEQS, n_threads, logits))
            break; /* it had fewer polls */
        take_state(pool, after);
        same(before, after, sizeof before, "states of the pool around a step that was stopped");
    }
    stop_at = 0;
    if (!with_stops)
#endif
        step(m, seqs, ragged, N_SEQS, n_threads, logits);
    for (int i = 1; i < 4; i++)
        step(m, seqs, one, N_SEQS, n_threads, logits + i * N_SEQS * VOCAB);
    for (int i = 0; i < N_SEQS; i++) {
        for (int64_t layer = 0; layer < N_LAYERS; layer++)
            for (int64_t h = 0; h < N_KV_HEADS; h++, kv += 2 * MOST_ROWS * HEAD_DIM)
                pkv_gather_head(seqs[i], layer, h, HEAD_DIM, seqs[i]->seq_len, kv, kv + MOST_ROWS * HEAD_DIM);
        pkv_seq_free(seqs[i]);
    }
    if (pool->n_free != N_BLOCKS)
        n_differences++;
    pkv_pool_free(pool);
    (void)with_stops;
}

static void decode(const pkv_model *m, int n_steps) {
    static float logits[VOCAB];
    pkv_pool *pool;
    pkv_seq *seq;
    int64_t prompt = 16, one = 1;
    if (pkv_pool_new(N_BLOCKS, N_LAYERS, N_KV_HEADS * HEAD_DIM, BLOCK_SIZE, &pool) != PKV_OK ||
        pkv_seq_new(pool, 1000, &seq) != PKV_OK)
        exit(2);
    step(m, &seq, &prompt, 1, 1, logits);
    for (int i = 0; i < n_steps; i++) {
        step(m, &seq, &one, 1, 1, logits);
        pkv_seq_truncate(seq, prompt);
    }
    pkv_seq_free(seq);
    pkv_pool_free(pool);
}

int main(int argc, char **argv) {
    size_t n_logits = 4 * N_SEQS * VOCAB, n_kv = (size_t)N_SEQS * N_LAYERS * N_KV_HEADS * 2 * MOST_ROWS * HEAD_DIM;
    float *logits = need(malloc(2 * n_logits * sizeof *logits)), *kv = need(calloc(2 * n_kv, sizeof *kv));
    for (int kind = 0; kind < 3; kind++) {
        pkv_model m = new_model(kind == 0 ? PKV_F32 : PKV_Q8_0, kind == 2);
        if (argc > 1) {
            decode(&m, atoi(argv[1]));
            free_model(&m);
            break;
        }
        scenario(&m, 1, 0, logits, kv);
        for (int n_threads = 1; n_threads <= 4; n_threads++)
            for (int with_stops = 0; with_stops < 2; with_stops++) {
                scenario(&m, n_threads, with_stops, logits + n_logits, kv + n_kv);
                same(logits, logits + n_logits, n_logits * sizeof *logits, "logits");
                same(kv, kv + n_kv, n_kv * sizeof *kv, "K and V");
            }
        free_model(&m);
    }
    free(logits);
    free(kv);
    printf("%lld checks, %lld differences\n", (long long)n_checks, (long long)n_differences);
    return n_differences != 0;
}
