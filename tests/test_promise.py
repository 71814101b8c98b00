"""The promise on the real model: a row's logits, K and V depend on the model and on its own tokens only, to the last bit.

Everything is compared with rows computed alone: one token at a time, one sequence, one thread, a fresh pool.
"""

from contextlib import ExitStack, contextmanager

import numpy as np
import pagedkv as pk
import promise_rows
import pytest
import tiny
from pagedkv import hub
from pagedkv.formats import open_model
from promise_rows import assert_same_bits, assert_same_kv, kv_rows, rows_alone, rows_in_chunks, run_child, token_stream

N_STREAMS = 6
STREAM_LEN = 34  # over two blocks of 16
LONG_LEN = 530  # over the 512 rows of one internal pass and two attention chunks of 256
BRANCH = 20  # where the branch leaves stream 0: inside its second block
ISAS = ("scalar", "avx2", "avx512", "neon")


@pytest.fixture(scope="session")
def model():
    return promise_rows.real_model()


@pytest.fixture(scope="module")
def streams(model):
    """(tokens, Rows) of N_STREAMS different sequences."""
    tokens = [token_stream(100 + i, STREAM_LEN, model.config.vocab_size) for i in range(N_STREAMS)]
    return [(t, rows_alone(model, t)) for t in tokens]


@pytest.fixture(scope="module")
def branch(model, streams):
    """(tokens, Rows): BRANCH tokens of stream 0, then those of stream 1."""
    tokens = np.concatenate([streams[0][0][:BRANCH], streams[1][0][BRANCH:]])
    return tokens, rows_alone(model, tokens)


@pytest.fixture(scope="module")
def long(model):
    """(tokens, Rows) of LONG_LEN tokens, in chunks that end at no edge; tests below go over the edges in single steps."""
    tokens = token_stream(99, LONG_LEN, model.config.vocab_size)
    return tokens, rows_alone(model, tokens, chunk=37)


@pytest.fixture(scope="module")
def long_parent(model, long):
    """A sequence that holds all long rows but the last; room for forks."""
    pool = model.new_pool(n_tokens=3 * LONG_LEN)
    with model.new_sequence(pool, 2 * LONG_LEN) as seq:
        model.prefill(long[0][:-1], seq)
        yield seq


@pytest.fixture(autouse=True)
def same_thread_count_after():
    n_threads = pk.get_num_threads()
    yield
    pk.set_num_threads(n_threads)


def decode_and_compare(model, seq, tokens, want, stop=None):
    """The next tokens of `seq`, one a step, to position `stop`."""
    for position in range(len(seq), len(tokens) if stop is None else stop):
        logits = model.decode_step(tokens[position : position + 1], [seq])
        assert_same_bits(logits[0], want.logits[position], f"logits at {position}")
    assert_same_kv(model, seq, want)


def prefill_and_compare(model, seq, tokens, want, chunk=None):
    """The tokens that `seq` does not hold yet."""
    begin = len(seq)
    logits = model.prefill(tokens[begin:], seq, chunk=chunk, all_logits=True)
    assert_same_bits(logits, want.logits[begin : len(tokens)], "logits")
    assert_same_kv(model, seq, want)


def step_and_compare(model, parts):
    """One step of [(seq, stop, tokens, rows alone)], each sequence up to `stop`; every row of it."""
    begins = [len(seq) for seq, _, _, _ in parts]
    logits = model.step([(seq, tokens[begin:stop]) for begin, (seq, stop, tokens, _) in zip(begins, parts)], all_logits=True)
    row = 0
    for begin, (seq, stop, _, want) in zip(begins, parts):
        assert_same_bits(logits[row : row + stop - begin], want.logits[begin:stop], f"logits from {begin}")
        assert_same_kv(model, seq, want)
        row += stop - begin
    assert row == len(logits)


def poison(pool):
    """Fill every block with NaN rows, and give all back."""
    n = pool.n_blocks * pool.block_size
    nan = np.full((n, pool.kv_dim), np.nan, np.float32)
    with pk.Sequence(pool, n) as seq:
        seq.ensure_append(n)
        for layer in range(pool.n_layers):
            seq.append_layer(layer, nan, nan)
        seq.advance(n)
    assert np.isnan(pool.k).all() and np.isnan(pool.v).all() and pool.n_free == pool.n_blocks


def hand_out_next(pool, block_ids):
    """Order the free blocks so that the pool gives `block_ids` first."""
    free = [pool.alloc_block() for _ in range(pool.n_free)]
    for block_id in [b for b in free if b not in block_ids] + list(reversed(block_ids)):
        pool.unref_block(block_id)


@contextmanager
def fresh_sequences(model, n, block_size=16):
    pool = model.new_pool(n_tokens=n * (STREAM_LEN + block_size), block_size=block_size)
    with ExitStack() as stack:
        yield [stack.enter_context(model.new_sequence(pool, STREAM_LEN)) for _ in range(n)]


# -- alone, or with others ------------------------------------------------------------------------


@pytest.mark.parametrize("m", range(1, 33))
def test_rows_of_a_ragged_mixture_equal_rows_alone(model, streams, m):
    rng = np.random.default_rng(m)
    begins = rng.integers(0, 18, m)
    stops = begins + rng.integers(1, 7, m)
    with fresh_sequences(model, m) as seqs:
        parts = [(seq, *streams[i]) for seq, i in zip(seqs, rng.integers(N_STREAMS, size=m))]
        begun = [(seq, tokens, want, begin) for (seq, tokens, want), begin in zip(parts, begins) if begin]
        if begun:
            logits = model.step([(seq, tokens[:begin]) for seq, tokens, _, begin in begun])
            assert_same_bits(logits, np.stack([want.logits[begin - 1] for _, _, want, begin in begun]), "last logits")
        step_and_compare(model, [(seq, stop, tokens, want) for (seq, tokens, want), stop in zip(parts, stops)])


def test_decode_steps_of_32_sequences_equal_rows_alone(model, streams):
    with fresh_sequences(model, 32) as seqs:
        parts = [(seq, *streams[i % N_STREAMS]) for i, seq in enumerate(seqs)]
        model.step([(seq, tokens[: i + 1]) for i, (seq, tokens, _) in enumerate(parts)])
        for _ in range(2):
            positions = [len(seq) for seq in seqs]
            logits = model.decode_step([tokens[at] for (_, tokens, _), at in zip(parts, positions)], seqs)
            assert_same_bits(logits, np.stack([want.logits[at] for (_, _, want), at in zip(parts, positions)]), "logits")
        for seq, _, want in parts:
            assert_same_kv(model, seq, want)


def test_place_in_the_batch_does_not_show(model, streams):
    with fresh_sequences(model, 4) as seqs:  # four equal prompts, then one token each, in another order
        tokens, want = streams[2]
        assert_same_bits(model.step([(seq, tokens[:9]) for seq in seqs]), np.tile(want.logits[8], (4, 1)))
        assert_same_bits(model.decode_step([tokens[9]] * 4, seqs[::-1]), np.tile(want.logits[9], (4, 1)))


# -- chunks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 3, 15, 16, 17, None])
def test_prefill_in_chunks_equals_rows_alone(model, streams, chunk):
    with fresh_sequences(model, 1) as (seq,):
        prefill_and_compare(model, seq, *streams[0], chunk)


@pytest.mark.parametrize("chunk", [256, 513, None])
def test_long_prefill_in_chunks_gives_the_same_rows(model, long, chunk):
    with model.new_sequence(model.new_pool(n_tokens=LONG_LEN)) as seq:
        prefill_and_compare(model, seq, *long, chunk)


@pytest.mark.parametrize("begin", [253, 509])
def test_single_steps_over_a_chunk_or_pass_edge_equal_the_prefill(model, long, long_parent, begin):
    with long_parent.fork() as seq:
        seq.truncate(begin)
        decode_and_compare(model, seq, *long, stop=begin + 6)


def test_pass_edge_inside_a_batch_does_not_show(model, streams, long):
    """1 + 521 + 20 rows: the 512-row pass ends inside the second sequence."""
    pool = model.new_pool(n_tokens=LONG_LEN + 128)
    with ExitStack() as stack:
        seqs = [stack.enter_context(model.new_sequence(pool)) for _ in range(3)]
        step_and_compare(model, [(seqs[0], 1, *streams[0]), (seqs[1], 521, *long), (seqs[2], 20, *streams[1])])


# -- fork, truncate -------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 15, 16, 17, 32])
def test_fork_and_its_parent_go_on_as_if_alone(model, streams, at):
    tokens, want = streams[0]
    with fresh_sequences(model, 2) as (parent, _):
        model.prefill(tokens[:at], parent)
        with parent.fork() as child:
            decode_and_compare(model, child, tokens, want, stop=at + 1)
            decode_and_compare(model, parent, tokens, want, stop=at + 2)
            decode_and_compare(model, child, tokens, want, stop=at + 2)


@pytest.mark.parametrize("together", [False, True])
def test_diverging_forks_equal_their_own_tokens_alone(model, streams, branch, together):
    with fresh_sequences(model, 2) as (parent, _):
        model.prefill(streams[0][0][:BRANCH], parent)
        with parent.fork() as child:
            parts = [(parent, STREAM_LEN, *streams[0]), (child, STREAM_LEN, *branch)]
            for step in [parts] if together else [parts[:1], parts[1:]]:
                step_and_compare(model, step)
            assert_same_kv(model, parent, streams[0][1])


def test_fork_of_a_fork_outlives_both(model, streams):
    tokens, want = streams[3]
    with fresh_sequences(model, 3) as (parent, other, _):
        model.prefill(tokens[:18], parent)
        child = parent.fork()
        parent.free()
        grandchild = child.fork()
        child.free()
        model.prefill(streams[4][0], other)  # takes the blocks that came free
        prefill_and_compare(model, grandchild, tokens, want)


@pytest.mark.parametrize("keep", [0, 1, 15, 16, 17, 33])
def test_truncate_and_redo_equals_rows_alone(model, streams, keep):
    tokens, want = streams[0]
    with fresh_sequences(model, 1) as (seq,):
        model.prefill(np.concatenate([tokens[:keep], streams[1][0][keep:]]), seq)
        seq.truncate(keep)
        prefill_and_compare(model, seq, tokens, want)


def test_refused_draft_leaves_no_trace(model, streams):
    """Speculation: wrong tokens verified in one step beside another sequence, taken back, then the right ones."""
    tokens, want = streams[0]
    with fresh_sequences(model, 2) as (seq, other):
        model.prefill(tokens[:14], seq)
        model.step([(seq, streams[1][0][14:19]), (other, streams[2][0][:3])])
        seq.truncate(14)
        step_and_compare(model, [(other, 5, *streams[2]), (seq, 20, tokens, want)])


# -- placement ------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_ids", [[0, 1, 2], [7, 3, 9], [9, 8, 0]])
def test_blocks_that_held_nan_and_their_order_do_not_show(model, streams, block_ids):
    pool = model.new_pool(n_blocks=10)
    poison(pool)
    hand_out_next(pool, block_ids)
    with model.new_sequence(pool) as seq:
        prefill_and_compare(model, seq, *streams[0], chunk=7)
        assert seq.block_table.tolist() == block_ids


def test_fragmented_pool_of_recycled_blocks_does_not_show(model, streams):
    pool = model.new_pool(n_blocks=11)
    poison(pool)
    hand_out_next(pool, np.random.default_rng(0).permutation(11).tolist())
    held = [pool.alloc_block(), pool.alloc_block()]
    seqs = [model.new_sequence(pool, STREAM_LEN) for _ in range(4)]
    with ExitStack() as stack:
        for seq in seqs:
            stack.enter_context(seq)
        for stop in (7, 15, 16):  # the sequences take their blocks in turn
            step_and_compare(model, [(seq, stop, *streams[i]) for i, seq in enumerate(seqs)])
        step_and_compare(model, [(seq, 25, *streams[i]) for i, seq in enumerate(seqs)])
        seqs[0].free()
        seqs[2].free()
        pool.unref_block(held[0])
        step_and_compare(model, [(seqs[3], STREAM_LEN, *streams[3]), (seqs[1], STREAM_LEN, *streams[1])])
        assert any(np.diff(seqs[1].block_table) != 1)


@pytest.mark.parametrize("block_size", [1, 8, 32, 256])
def test_block_size_does_not_show(model, streams, block_size):
    with fresh_sequences(model, 2, block_size) as (seq, other):
        prefill_and_compare(model, seq, *streams[0], chunk=17)
        with seq.fork() as child:
            child.truncate(31)
            step_and_compare(model, [(other, 9, *streams[1]), (child, STREAM_LEN, *streams[0])])


@pytest.mark.parametrize("block_size", [8, 32, 256])
def test_block_size_does_not_show_in_long_rows(model, long, block_size):
    pool = model.new_pool(n_tokens=LONG_LEN, block_size=block_size)
    with model.new_sequence(pool) as seq:
        logits = model.prefill(long[0][:515], seq)
        assert_same_bits(logits, long[1].logits[514], "logits")
        decode_and_compare(model, seq, *long, stop=516)


# -- paged, or contiguous -------------------------------------------------------------------------


def test_step_equals_single_operations_over_contiguous_buffers(model, streams):
    tokens, want = streams[0]
    with open_model(hub.find_model(promise_rows.REAL_MODEL)) as file:
        got = promise_rows.separate_forward(model.config, lambda name: file.tensor(name).float32(), tokens[:20])
    assert_same_bits(got.logits, want.logits[:20], "logits")
    assert_same_bits(got.k, want.k[:, :20], "K")
    assert_same_bits(got.v, want.v[:, :20], "V")


@pytest.mark.parametrize("n, at", [(1, 34), (1, 256), (17, 250), (9, 520)])
def test_paged_attention_equals_attention_over_gathered_rows(model, long_parent, n, at):
    config, rng = model.config, np.random.default_rng(at)
    heads = {"n_heads": config.n_heads, "n_kv_heads": config.n_kv_heads, "head_dim": config.head_dim}
    q, k_new, v_new = (rng.standard_normal((n, width), np.float32) for width in (config.n_heads * config.head_dim, config.kv_dim, config.kv_dim))
    with long_parent.fork() as seq:
        seq.truncate(at)
        k, v = (rows[7] for rows in kv_rows(model, seq))
        seq.ensure_append(n)
        got = pk.paged_attention(q, k_new, v_new, seq, 7, **heads)
    want = pk.attention(q, np.concatenate([k, k_new]), np.concatenate([v, v_new]), **heads)
    assert_same_bits(got, want, "attention")


# -- threads, instruction sets, the process -------------------------------------------------------


@pytest.mark.parametrize("n_threads", [1, 2, 3, 4])
def test_thread_count_does_not_show(model, streams, long, long_parent, n_threads):
    pk.set_num_threads(n_threads)
    with fresh_sequences(model, 3) as seqs, long_parent.fork() as seq, long_parent.fork() as other:
        prefill_and_compare(model, seqs[0], *streams[0])
        decode_and_compare(model, seq, *long)  # one row over three attention chunks: threads share the chunks
        other.truncate(250)
        step_and_compare(model, [(other, 270, *long), (seqs[1], 3, *streams[1]), (seqs[2], 1, *streams[2])])


def test_quantised_weights_equal_the_float32_weights_they_stand_for(model, streams):
    expanded = pk.LlamaModel.load(promise_rows.REAL_MODEL, weights="float32")
    with fresh_sequences(expanded, 1) as (seq,):
        prefill_and_compare(expanded, seq, *streams[0])


@pytest.fixture(scope="module")
def tiny_directory(tmp_path_factory):
    """A small model of odd sizes (3 query heads on one KV head of 24, 96 + 8 feed-forward columns) whose V rows are subnormal."""
    config = tiny.tiny_config(hidden_dim=72, n_heads=3, n_kv_heads=1, head_dim=24, ffn_dim=104, vocab_size=130)
    tensors = tiny.tiny_tensors(config, seed=5)
    tensors["model.layers.0.self_attn.v_proj.weight"] *= np.float32(1e-39)
    return tiny.write_hf(tmp_path_factory.mktemp("promise") / "tiny", config, tensors)


@pytest.fixture(scope="module")
def real_sha256(model):
    return promise_rows.workload_sha256(model, 8)


@pytest.fixture(scope="module")
def tiny_sha256(tiny_directory):
    return promise_rows.workload_sha256(pk.LlamaModel.load(tiny_directory), 300)


def require_isa(isa):
    if isa not in pk.available_isas():
        pytest.skip(f"{isa} does not run on this machine")


@pytest.mark.parametrize("isa", ISAS)
def test_isa_does_not_show_on_the_real_model(real_sha256, isa):
    require_isa(isa)
    result = run_child(promise_rows.REAL_MODEL, "--tokens", 8, PAGEDKV_ISA=isa)
    assert (result["isa"], result["sha256"]) == (isa, real_sha256)


@pytest.mark.parametrize("isa", ISAS)
def test_isa_does_not_show_over_attention_chunks(tiny_directory, tiny_sha256, isa):
    require_isa(isa)
    result = run_child(tiny_directory, "--tokens", 300, PAGEDKV_ISA=isa)
    assert (result["isa"], result["sha256"]) == (isa, tiny_sha256)


def test_tiny_model_has_subnormal_rows(tiny_directory):
    """Without them flush-to-zero would have nothing to flush."""
    v = rows_in_chunks(pk.LlamaModel.load(tiny_directory), np.arange(5), None).v[0]
    assert ((v != 0) & (np.abs(v) < np.finfo(np.float32).tiny)).mean() > 0.5


@pytest.mark.parametrize("fpenv", promise_rows.FPENV_BITS)
def test_floating_point_mode_of_the_process_does_not_show(tiny_directory, tiny_sha256, fpenv):
    if not promise_rows.can_set_fpenv():
        pytest.skip("the floating-point mode is set through glibc on x86-64 only")
    result = run_child(tiny_directory, "--tokens", 300, "--fpenv", fpenv, PAGEDKV_NUM_THREADS="2")
    assert result["sha256"] == tiny_sha256
    assert result["fpenv_kept"], "the caller's mode was not put back"


# -- longer ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_long_rows_one_token_at_a_time(model, long):
    with model.new_sequence(model.new_pool(n_tokens=LONG_LEN)) as seq:
        decode_and_compare(model, seq, *long)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 3, 15, 16, 17, 256, 511, 512, 513])
def test_long_prefill_in_every_chunk_size(model, long, chunk):
    with model.new_sequence(model.new_pool(n_tokens=LONG_LEN)) as seq:
        prefill_and_compare(model, seq, *long, chunk)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_long_ragged_mixtures_on_one_fragmented_pool(model, long, seed):
    """32 forks of one stream at random lengths, decoded together while others end and begin."""
    rng = np.random.default_rng(seed)
    tokens, want = long
    pool = model.new_pool(n_tokens=40 * LONG_LEN)
    pk.set_num_threads(int(rng.integers(1, 5)))
    with ExitStack() as stack:
        parent = stack.enter_context(model.new_sequence(pool))
        model.prefill(tokens, parent)
        live = []
        for _ in range(4):
            while len(live) < 32:
                live.append(stack.enter_context(parent.fork()))
                live[-1].truncate(int(rng.integers(0, LONG_LEN - 60)))
            step_and_compare(model, [(seq, len(seq) + int(rng.integers(1, 9)), tokens, want) for seq in live])
            for seq in rng.permutation(np.array(live, object))[:8]:
                live.remove(seq)
                seq.free()


@pytest.mark.slow
@pytest.mark.parametrize("isa", ISAS)
def test_isa_does_not_show_over_a_longer_text(model, isa):
    require_isa(isa)
    want = promise_rows.workload_sha256(model, 40)
    assert run_child(promise_rows.REAL_MODEL, "--tokens", 40, PAGEDKV_ISA=isa)["sha256"] == want
