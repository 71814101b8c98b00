"""The seed's pool, sequence and batched step in Python, line by line, faults included.

A scenario of the tests runs on this and on pagedkv: the property it checks must fail here and hold there.
Names, order of checks and statuses are those of nx_kvcache.nx and nx_f32_llama_v4b.nx. Memory is as mmap
gives it: whole pages of zeros, so that an index a little out of range reads and writes a neighbour.
"""

import numpy as np

from pagedkv import BlockPool, Flv4Status, PagedKVError, PkvStatus, Sequence, Stk4Status

OK, NULL, BAD_DIM, EXHAUST, BOUNDS = range(5)


def mmap(n, dtype=np.int64):
    return np.zeros(-(-max(n, 1) // 512) * 512, dtype)


def div(a, b):
    """C's division: towards zero."""
    return abs(a) // b * (1 if a >= 0 else -1)


def check(status):
    if status != OK:
        raise PagedKVError("seed", (PkvStatus(status),))


class SeedPool:
    def __init__(self, n_blocks, n_layers, kv_dim, block_size=16):
        self.n_blocks, self.n_layers, self.kv_dim, self.block_size = n_blocks, n_layers, kv_dim, block_size
        size = n_blocks * n_layers * block_size * kv_dim
        self.K_pool, self.V_pool = mmap(size, np.float32), mmap(size, np.float32)
        self.refcnt, self.free_st = mmap(n_blocks), mmap(n_blocks)
        self.free_st[:n_blocks] = range(n_blocks - 1, -1, -1)
        self.n_free = n_blocks

    def ref_count(self, block_id):
        return int(self.refcnt[block_id])

    def _alloc(self):
        if self.n_free <= 0:
            return -1
        self.n_free -= 1
        block_id = int(self.free_st[self.n_free])
        self.refcnt[block_id] = 1
        return block_id

    def alloc_block(self):
        block_id = self._alloc()
        check(EXHAUST if block_id < 0 else OK)
        return block_id

    def ref_block(self, block_id):
        self.refcnt[block_id] += 1

    def unref_block(self, block_id):
        self.refcnt[block_id] -= 1
        if self.refcnt[block_id] <= 0:
            self.refcnt[block_id] = 0
            self.free_st[self.n_free] = block_id
            self.n_free += 1

    def base(self, block_id, layer, row):
        return ((int(block_id) * self.n_layers + layer) * self.block_size + row) * self.kv_dim


class SeedSequence:
    def __init__(self, pool, max_tokens):
        self.pool = pool
        self.max_pt = (max_tokens + pool.block_size - 1) // pool.block_size + 1
        self.pt = mmap(self.max_pt)
        self.n_pt = self.seq_len = 0

    def __len__(self):
        return self.seq_len

    @property
    def block_table(self):
        return self.pt[: self.n_pt].astype(np.int32)

    def fork(self):
        child = SeedSequence(self.pool, 0)
        child.pt, child.max_pt, child.n_pt, child.seq_len = mmap(self.max_pt), self.max_pt, self.n_pt, self.seq_len
        for i in range(self.n_pt):
            child.pt[i] = self.pt[i]
            self.pool.ref_block(self.pt[i])
        return child

    def free(self):
        for i in range(self.n_pt):
            self.pool.unref_block(self.pt[i])
        self.n_pt = self.seq_len = 0

    def truncate(self, new_len):
        check(BOUNDS if new_len > self.seq_len else OK)
        need_pt = div(new_len + self.pool.block_size - 1, self.pool.block_size)
        while self.n_pt > need_pt:
            self.n_pt -= 1
            self.pool.unref_block(self.pt[self.n_pt])
        self.seq_len = new_len

    def ensure_append(self, n_new):
        check(BAD_DIM if n_new <= 0 else OK)
        pool, size = self.pool, self.pool.block_size
        tail_off = self.seq_len - div(self.seq_len, size) * size
        if tail_off > 0:
            tail = self.pt[self.n_pt - 1]
            if pool.refcnt[tail] > 1:
                new = pool._alloc()
                check(EXHAUST if new < 0 else OK)
                for layer in range(pool.n_layers):
                    n, src, dst = tail_off * pool.kv_dim, pool.base(tail, layer, 0), pool.base(new, layer, 0)
                    pool.K_pool[dst : dst + n] = pool.K_pool[src : src + n]
                    pool.V_pool[dst : dst + n] = pool.V_pool[src : src + n]
                pool.unref_block(tail)
                self.pt[self.n_pt - 1] = new
        need_pt = div(self.seq_len + n_new + size - 1, size)
        check(BOUNDS if need_pt > self.max_pt else OK)
        while self.n_pt < need_pt:
            new = pool._alloc()
            check(EXHAUST if new < 0 else OK)
            self.pt[self.n_pt] = new
            self.n_pt += 1

    def append_layer(self, layer, k, v):
        pool, K_new, V_new = self.pool, mmap(k.size, np.float32), mmap(v.size, np.float32)
        K_new[: k.size], V_new[: v.size] = k.ravel(), v.ravel()
        for t in range(len(k)):
            row, new = self.seq_len + t, slice(t * pool.kv_dim, (t + 1) * pool.kv_dim)
            at = pool.base(self.pt[row // pool.block_size], layer, row % pool.block_size)
            pool.K_pool[at : at + pool.kv_dim] = K_new[new]
            pool.V_pool[at : at + pool.kv_dim] = V_new[new]

    def advance(self, n_new):
        self.seq_len += n_new

    def gather_head(self, layer, kv_head, head_dim, total_k=None):
        pool, total_k = self.pool, self.seq_len if total_k is None else total_k
        k, v = np.zeros((total_k, head_dim), np.float32), np.zeros((total_k, head_dim), np.float32)
        for t in range(total_k):
            at = pool.base(self.pt[t // pool.block_size], layer, t % pool.block_size) + kv_head * head_dim
            k[t], v[t] = pool.K_pool[at : at + head_dim], pool.V_pool[at : at + head_dim]
        return k, v


class SeedModel:
    """The batched step as far as pool and sequences see it: rows of the token's id for K and V, no logits."""

    def __init__(self, n_layers, hidden_dim, n_heads, n_kv_heads, head_dim, vocab_size):
        self.n_layers, self.hidden_dim, self.n_heads, self.head_dim = n_layers, hidden_dim, n_heads, head_dim
        self.kv_dim, self.vocab_size = n_kv_heads * head_dim, vocab_size
        self.n_mapped = 0  # buffers that were mapped and not unmapped

    def decode_step(self, token_ids, seqs):
        if not seqs:
            raise PagedKVError("seed", (Flv4Status.FLV4_ERR_BAD_DIM,))
        self.n_mapped += 3  # x_embed, x_stacked, x_normed
        for token in token_ids:
            if token < 0 or token >= self.vocab_size:
                raise PagedKVError("seed", (Flv4Status.FLV4_ERR_TOKEN,))
        self._stack(token_ids, seqs)
        self.n_mapped -= 3

    def _stack(self, token_ids, seqs):
        failed = PagedKVError("seed", (Flv4Status.FLV4_ERR_STACK, Stk4Status.STK4_ERR_LAYER))
        for seq in seqs:
            try:
                seq.ensure_append(1)
            except PagedKVError:
                raise failed from None
        self.n_mapped += 2  # buf_a, buf_b
        for layer in range(self.n_layers):
            if self.n_heads * self.head_dim != self.hidden_dim:  # the block's BAD_DIM
                raise failed
            for token, seq in zip(token_ids, seqs):
                rows = np.full((1, self.kv_dim), token, np.float32)
                seq.append_layer(layer, rows, rows)
        for seq in seqs:
            seq.advance(1)
        self.n_mapped -= 2


SEED = (SeedPool, SeedSequence)
PAGEDKV = (BlockPool, Sequence)


def rows_of(value, n, kv_dim):
    """n rows that all hold `value`."""
    return np.full((n, kv_dim), value, np.float32)


def append(seq, value, n=1):
    """Reserve, write and count n rows of `value` (K) and `-value` (V) in every layer."""
    pool = seq.pool
    seq.ensure_append(n)
    for layer in range(pool.n_layers):
        seq.append_layer(layer, rows_of(value, n, pool.kv_dim), rows_of(-value, n, pool.kv_dim))
    seq.advance(n)


def values(seq, layer=0):
    """What K's rows of `seq` hold, as a list; V's must be the opposite."""
    k, v = seq.gather_head(layer, 0, seq.pool.kv_dim)
    assert np.array_equal(k, -v)
    return k[:, 0].tolist()


def snapshot(pool, *seqs):
    """Everything a failed call must leave alone: counts, tables, lengths, live rows."""
    counts = [pool.ref_count(b) for b in range(pool.n_blocks)]
    rows = [[h.tobytes() for layer in range(pool.n_layers) for h in seq.gather_head(layer, 0, pool.kv_dim)] for seq in seqs]
    return pool.n_free, counts, [seq.block_table.tolist() for seq in seqs], [len(seq) for seq in seqs], rows


def refused(call, *args):
    """The status a call fails with, or None where it passes."""
    try:
        call(*args)
    except PagedKVError as error:
        return error.status
    return None


def accounts(pool, seqs):
    """Free + distinct used = total, and each count is the number of tables that name the block."""
    owners = np.bincount(np.concatenate([[], *(seq.block_table for seq in seqs)]).astype(int), minlength=pool.n_blocks)
    return pool.n_free + np.count_nonzero(owners) == pool.n_blocks and all(
        pool.ref_count(b) == n for b, n in enumerate(owners)
    )
