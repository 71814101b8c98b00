"""The pool: blocks, counts, the free stack, views, addresses.

Tags in comments name users' public reports of other systems: V vLLM, SG SGLang, HF transformers, LC llama.cpp,
LCP llama-cpp-python, ORG ONNX Runtime GenAI, OV OpenVINO; others in full.
"""

import gc
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

import pagedkv as pk
from seed_model import PAGEDKV, SEED, append, refused, rows_of, values

BOUNDS, EXHAUST, BAD_DIM = pk.PkvStatus.PKV_ERR_BOUNDS, pk.PkvStatus.PKV_ERR_EXHAUST, pk.PkvStatus.PKV_ERR_BAD_DIM


def rss_pages():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])


needs_statm = pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc/self/statm (Linux)")


def test_attributes_say_the_shape():
    pool = pk.BlockPool(5, 2, 12, block_size=4)
    assert (pool.n_blocks, pool.n_layers, pool.kv_dim, pool.block_size, pool.n_free) == (5, 2, 12, 4, 5)
    assert pool.k.shape == pool.v.shape == (5, 2, 4, 12) and pool.k.dtype == pool.v.dtype == np.float32
    assert pk.BlockPool(1, 1, 1).block_size == 16


@pytest.mark.parametrize("shape", [(0, 1, 1), (-1, 1, 1), (1, 0, 1), (1, -1, 1), (1, 1, 0), (1, 1, -1), (2**31, 1, 1),
                                   (2**31 - 1, 2**20, 2**20), (2**31 - 1, 2**62, 4)])  # fmt: skip
def test_impossible_shapes_are_refused(shape):
    with pytest.raises(pk.BadDimError) as caught:
        pk.BlockPool(*shape)
    assert caught.value.status is BAD_DIM and str(shape[0]) in str(caught.value)


@pytest.mark.parametrize("block_size", [0, -16, 3, 17, 24, 512, 2**40])
def test_a_block_size_that_does_not_divide_the_chunk_is_refused(block_size):
    with pytest.raises(pk.BadDimError, match="256"):
        pk.BlockPool(2, 1, 1, block_size=block_size)


def test_a_new_pool_gives_0_1_2_and_then_the_block_freed_last():
    pool = pk.BlockPool(4, 1, 1)
    assert [pool.alloc_block() for _ in range(4)] == [0, 1, 2, 3]
    for block_id in (2, 0, 3):
        pool.unref_block(block_id)
    assert [pool.alloc_block() for _ in range(3)] == [3, 0, 2]


def test_an_empty_pool_says_so_and_stays_as_it_is():
    pool = pk.BlockPool(1, 1, 1)
    pool.alloc_block()
    with pytest.raises(pk.PoolExhausted, match="needs 1 block, 0 of 1 are free") as caught:
        pool.alloc_block()
    assert caught.value.status is EXHAUST and (pool.n_free, pool.ref_count(0)) == (0, 1)


def test_a_block_is_free_again_when_its_last_owner_goes():
    pool = pk.BlockPool(2, 1, 1)
    block_id = pool.alloc_block()
    pool.ref_block(block_id)
    assert pool.ref_count(block_id) == 2
    pool.unref_block(block_id)
    assert (pool.ref_count(block_id), pool.n_free) == (1, 1)
    pool.unref_block(block_id)
    assert (pool.ref_count(block_id), pool.n_free) == (0, 2)


@pytest.mark.parametrize("method", ["ref_block", "unref_block", "ref_count"])
@pytest.mark.parametrize("block_id", [-1, 3, 2**31, -(2**40)])
def test_a_block_outside_the_pool_is_refused(method, block_id):
    pool = pk.BlockPool(3, 1, 1)
    with pytest.raises(pk.BoundsError) as caught:
        getattr(pool, method)(block_id)
    assert caught.value.status is BOUNDS and pool.n_free == 3


def double_free(Pool, _):
    """Fault 5. (n_free, the next two blocks) after a block was given back twice."""
    pool = Pool(3, 1, 1)
    block_id = pool.alloc_block()
    pool.unref_block(block_id)
    status = refused(pool.unref_block, block_id)
    return status, pool.n_free, pool.alloc_block() != pool.alloc_block()


def test_a_free_block_cannot_be_freed_again():
    assert double_free(*PAGEDKV) == (BOUNDS, 3, True)
    assert double_free(*SEED) == (None, 4, False)  # one block now has two owners that do not know each other


def test_a_free_block_cannot_gain_an_owner():
    pool = pk.BlockPool(3, 1, 1)
    assert refused(pool.ref_block, 0) is BOUNDS and (pool.ref_count(0), pool.n_free) == (0, 3)


# Views


def test_views_show_what_append_wrote_without_a_copy():
    pool = pk.BlockPool(3, 2, 4, block_size=2)
    k, v = pool.k, pool.v
    seq = pk.Sequence(pool, 8)
    for value in (1, 2, 3):
        append(seq, value)
    assert k[0, :, :, 0].tolist() == [[1, 2], [1, 2]] and k[1, :, 0, 3].tolist() == [3, 3]
    assert np.array_equal(v, -k) and np.shares_memory(k, pool.k) and not np.shares_memory(k, v)


@pytest.mark.parametrize("name", ["k", "v"])
def test_views_cannot_be_written_nor_made_writable(name):
    view = getattr(pk.BlockPool(2, 1, 4), name)
    for array in (view, view[0], view.reshape(-1), view.view()):
        assert not array.flags.writeable
        with pytest.raises(ValueError):
            array[...] = 1
        with pytest.raises(ValueError):
            array.flags.writeable = True
    with pytest.raises(AttributeError):
        setattr(pk.BlockPool(2, 1, 4), name, view)


@pytest.mark.parametrize("kv_dim", [1, 3, 5, 64])
def test_views_are_aligned_and_contiguous(kv_dim):
    pool = pk.BlockPool(3, 1, kv_dim, block_size=1)
    for view in (pool.k, pool.v):
        assert view.ctypes.data % 64 == 0 and view.flags.c_contiguous and not view.any()


def test_a_view_outlives_the_pool():
    pool = pk.BlockPool(2, 1, 4)
    seq = pk.Sequence(pool, 16)
    append(seq, 7, n=16)
    view = pool.k[0, 0]
    del pool, seq
    gc.collect()
    pk.BlockPool(2, 1, 4)  # would get the memory, had it been given back
    assert (view == 7).all()


# Memory


@needs_statm
def test_memory_is_given_when_a_block_is_first_written():
    before = rss_pages()
    pool = pk.BlockPool(2**14, 4, 256)  # 2 GiB
    assert (rss_pages() - before) * os.sysconf("SC_PAGE_SIZE") < 64 << 20
    assert pool.n_free == 2**14


@needs_statm
def test_rss_is_flat_at_capacity():  # OV 4481
    pool = pk.BlockPool(64, 2, 64)

    def fill():
        seqs = [pk.Sequence(pool, 64) for _ in range(16)]
        for seq in seqs:
            append(seq, 1, n=64)
        assert pool.n_free == 0 and refused(seqs[0].fork().ensure_append, 1) is EXHAUST
        for seq in seqs[::2]:
            seq.free()  # the others go when they are dropped

    for _ in range(20):
        fill()
    before = rss_pages()
    for _ in range(200):
        fill()
    assert (rss_pages() - before) * os.sysconf("SC_PAGE_SIZE") < 4 << 20 and pool.n_free == 64


@needs_statm
def test_dropped_pools_give_their_memory_back():
    def use():
        pool = pk.BlockPool(16, 1, 4096)  # 4 MiB of K
        for value in range(16):
            append(pk.Sequence(pool, 16), value, n=16)

    use()
    before = rss_pages()
    for _ in range(30):
        use()
    assert (rss_pages() - before) * os.sysconf("SC_PAGE_SIZE") < 32 << 20


# Addresses


def test_offsets_are_exact_in_64_bits(run_c):  # V 1514, V 50427
    status, output = run_c(r"""
        #include <stdio.h>
        #include "pagedkv/layout.h"
        int main(void) {
            int64_t ids[] = {0, 1, 7, 31, 32, 2047, 65535, 1 << 20, INT32_MAX}, n_wide = 0;
            int64_t shapes[][3] = {{30, 16, 192}, {80, 16, 1024}, {128, 256, 1024}, {1, 1, 1}, {126, 1, 8192}};
            for (unsigned i = 0; i < sizeof ids / sizeof *ids; i++)
                for (unsigned j = 0; j < sizeof shapes / sizeof *shapes; j++) {
                    int64_t layers = shapes[j][0], size = shapes[j][1], dim = shapes[j][2];
                    for (int64_t layer = 0; layer < layers; layer += layers - 1 ? layers - 1 : 1)
                        for (int64_t row = 0; row < size; row += size - 1 ? size - 1 : 1) {
                            __int128 exact = (((__int128)ids[i] * layers + layer) * size + row) * dim;
                            if (exact > INT64_MAX) continue;
                            n_wide += exact > INT32_MAX;
                            if (exact != pkv_row_offset(ids[i], layer, row, layers, size, dim)) return 1;
                            if (row == 0 && exact != pkv_block_offset(ids[i], layer, layers, size, dim)) return 2;
                        }
                }
            if (pkv_blocks_for(0, 16) != 0 || pkv_blocks_for(16, 16) != 1 || pkv_blocks_for(17, 16) != 2) return 3;
            if (pkv_blocks_for(INT64_MAX, 16) != INT64_MAX / 16 + 1) return 4;
            printf("%d", (int)n_wide);
            return 0;
        }""")
    assert status == 0 and int(output) > 20, (status, output)


def test_a_block_past_2_to_the_31_elements_holds_its_rows():  # V 1514, V 50427
    try:
        pool = pk.BlockPool(40, 1, 2**18, block_size=256)  # 2**26 elements a block; only two rows are touched
    except MemoryError:
        pytest.skip("the system does not promise 20 GiB of address space")
    near, far = pk.Sequence(pool, 256), pk.Sequence(pool, 256)
    near_id = 7  # where block 39 would land, were element offsets cut to 31 bits
    for _ in range(near_id):
        pool.alloc_block()
    append(near, 1)
    while pool.n_free > 1:
        pool.alloc_block()
    append(far, 2)
    assert near.block_table.tolist() == [near_id] and far.block_table.tolist() == [39]
    q = np.ones((1, 256), np.float32)
    for seq, value in ((near, 1), (far, 2)):
        k, v = seq.gather_head(0, 1023, 256)
        assert (k == value).all() and (v == -value).all() and (pool.k[seq.block_table[0], 0, 0] == value).all()
    seq = far
    seq.ensure_append(1)
    q = np.ones((1, 2**18), np.float32)
    rows = rows_of(2, 1, 2**18)
    out = pk.paged_attention(q, rows, -rows, seq, 0, n_heads=1024, n_kv_heads=1024, head_dim=256)
    assert (out == -2).all()


GUARDED = r"""
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
/* In place of memory.h: each array ends at a page that may not be touched, and begins behind canaries. */
#define PAGEDKV_MEMORY_H
#include <stdint.h>
#include <stddef.h>
static int pkv_mul_size(int64_t a, int64_t b, int64_t *out) { *out = a * b; return 1; }
static size_t span(size_t n) { size_t page = sysconf(_SC_PAGESIZE); return (n + page - 1) / page * page; }
static int n_broken;
static void *pkv_mem_alloc(size_t n) {
    size_t page = sysconf(_SC_PAGESIZE);
    char *base = mmap(NULL, span(n) + 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mprotect(base, page, PROT_NONE);
    mprotect(base + page + span(n), page, PROT_NONE);
    memset(base + page, 0xA5, span(n) - n);
    return base + page + span(n) - n;
}
static void pkv_mem_free(void *p, size_t n) {
    if (!p) return;
    for (unsigned char *c = (unsigned char *)p - (span(n) - n); c < (unsigned char *)p; c++) n_broken += *c != 0xA5;
    munmap((char *)p - (span(n) - n) - sysconf(_SC_PAGESIZE), span(n) + 2 * sysconf(_SC_PAGESIZE));
}
#include <math.h>
#include "pagedkv/pool.h"
#include "pagedkv/attention.h"

/* Two sequences in turn fill every block of the pool to its last row, one token a step. */
static int decode(const pkv_kernels *kernels, int dtype, int64_t block_size, int64_t n_tokens, int64_t head_dim) {
    pkv_attn_shape shape = {3, 1, head_dim, 1.0f};
    int64_t n_blocks = 2 * (n_tokens / block_size), needed;
    size_t row = head_dim * sizeof(float), wide = 3 * row, scratch_len = pkv_attn_scratch_len(&shape) * sizeof(float);
    pkv_pool *pool;
    pkv_seq *seqs[2];
    if (pkv_pool_new_of(dtype, n_blocks, 2, head_dim, block_size, &pool)) return 1;
    int64_t layer_nbytes = block_size * pkv_kv_row_nbytes(dtype, head_dim);
    float *x = pkv_mem_alloc(wide), *out = pkv_mem_alloc(wide), *scratch = pkv_mem_alloc(scratch_len);
    for (int64_t d = 0; d < 3 * head_dim; d++) x[d] = 1.0f / (1 + d);
    for (int i = 0; i < 2; i++) if (pkv_seq_new(pool, n_tokens, &seqs[i])) return 2;
    for (int64_t t = 0; t < n_tokens; t++)
        for (int i = 0; i < 2; i++) {
            if (pkv_ensure_append(seqs[i], 1, &needed)) return 3;
            for (int64_t layer = 0; layer < 2; layer++) {
                if (pkv_append_layer(seqs[i], layer, x, x, 1)) return 4;
                pkv_attn_segment segment = {{pool->k, pool->v, seqs[i]->block_table, 2 * layer_nbytes, layer_nbytes,
                                             head_dim, block_size, dtype}, 0, 1, t + 1, 1};
                pkv_attn_plan plan = {0};
                if (!pkv_attn_make_plan(&plan, &shape, &segment, 1, 1)) return 2;
                if (plan.n_run > 4 || plan.n_join) return 5;
                for (int64_t j = 0; j < plan.n_run; j++)
                    pkv_attn_run(kernels, &shape, &plan, &plan.run[j], layer, x, 3 * head_dim, out, 3 * head_dim, NULL,
                                 scratch);
                pkv_attn_free_plan(&plan);
                for (int64_t d = 0; d < 3 * head_dim; d++) /* the mean of equal values */
                    if (!(fabsf(out[d] - x[d % head_dim]) < (dtype == PKV_F32 ? 0.001f * x[d % head_dim] : 0.005f))) return 6;
            }
            if (pkv_advance(seqs[i], 1)) return 7;
        }
    if (pool->n_free != 0 || pkv_ensure_append(seqs[0], 1, &needed) != PKV_ERR_EXHAUST) return 8;
    float *k_out = pkv_mem_alloc(n_tokens * row), *v_out = pkv_mem_alloc(n_tokens * row);
    if (pkv_gather_head(seqs[1], 1, 0, head_dim, n_tokens, k_out, v_out) || (dtype == PKV_F32 && memcmp(k_out + (n_tokens - 1) * head_dim, x, row))) return 9;
    for (int i = 0; i < 2; i++) pkv_seq_free(seqs[i]);
    if (pool->n_free != n_blocks) return 10;
    pkv_pool_free(pool);
    pkv_mem_free(k_out, n_tokens * row), pkv_mem_free(v_out, n_tokens * row);
    pkv_mem_free(x, wide), pkv_mem_free(out, wide), pkv_mem_free(scratch, scratch_len);
    return n_broken ? 11 : 0;
}

int main(void) {
    for (int i = 0; i < pkv_n_kernel_tables(); i++) {
        if (!pkv_isa_runs(i)) continue;
        int64_t shapes[][3] = {{16, 48, 64}, {16, 32, 5}, {1, 19, 16}, {4, 20, 80}, {256, 256, 8}, {128, 512, 40}};
        int dtypes[] = {PKV_F32, PKV_F16, PKV_BF16, PKV_Q8_0};
        for (int j = 0; j < 6; j++) for (int d = 0; d < 4; d++) {
            if (shapes[j][2] % pkv_kv_group(dtypes[d])) continue;
            int failed = decode(&pkv_kernel_tables[i], dtypes[d], shapes[j][0], shapes[j][1], shapes[j][2]);
            if (failed) { printf("%s shape %d type %d: %d", pkv_kernel_tables[i].isa, j, d, failed); return 1; }
        }
    }
    return 0;
}
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs mprotect as on Linux")
def test_nothing_is_touched_outside_the_buffers(run_c):  # mistral.rs 552
    assert run_c(GUARDED) == (0, "")


# Python threads


def test_threads_that_share_a_pool_are_serialised():  # LCP 471
    pool = pk.BlockPool(64, 2, 64)
    failed = []

    def work(value):
        try:
            for i in range(60):
                with pk.Sequence(pool, 64) as seq:
                    append(seq, value, n=17 + i % 8)
                    child = seq.fork()
                    append(child, value + 0.5)
                    assert values(child) == [value] * len(seq) + [value + 0.5]
                    del child
        except BaseException as error:
            failed.append(error)

    workers = [threading.Thread(target=work, args=(value,)) for value in (1, 2, 3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failed and pool.n_free == 64


def test_a_pool_that_was_not_initialised_does_not_crash():
    code = "import pagedkv as pk; pk.BlockPool.__new__(pk.BlockPool).n_blocks"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode in (0, 1)
