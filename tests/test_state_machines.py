"""Random sequences of operations, checked against plain models: the pool with its sequences, and the engine.

An hour of it, with new random seeds, and how many examples and steps it ran::

    PAGEDKV_STATE_MACHINE_S=3600 pytest -s -m slow tests/test_state_machines.py

Half of the time goes to each machine. By default each runs a fixed set of examples.
"""

import os
import tempfile
import time

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from test_engine import alone, ids, model  # noqa: F401  (model is a fixture)

import pagedkv as pk
from pagedkv import SamplingParams
from pagedkv.engine.core import Engine
from pagedkv.engine.speculation import NgramDrafter

BAD_DIM, EXHAUST, BOUNDS = pk.PkvStatus.PKV_ERR_BAD_DIM, pk.PkvStatus.PKV_ERR_EXHAUST, pk.PkvStatus.PKV_ERR_BOUNDS
HEAD_DIM = 16


@pytest.fixture(autouse=True)
def one_thread(threads):
    threads(1)


def status_of(call, *args):
    """What the call gives, and the status that it is refused with (None: it is not)."""
    try:
        return call(*args), None
    except pk.PagedKVError as error:
        return None, error.status


class Counted(RuleBasedStateMachine):
    """Counts what was run, over all examples."""

    n_examples = n_steps = 0
    model = None

    def __init__(self):
        super().__init__()
        type(self).n_examples += 1

    def ran(self):
        type(self).n_steps += 1


# ---- The pool and its sequences -----------------------------------------------------------------


class Block:
    """A block as the model has it: no more than who owns it."""

    def __init__(self):
        self.n_owners = 1


class Twin:
    """A sequence as the model has it: rows as bytes, and blocks."""

    def __init__(self, real, max_blocks):
        self.real, self.max_blocks = real, max_blocks
        self.rows, self.blocks = [], []  # a row: float32 [n_layers, 2, n_kv_heads, head_dim]


SIZE, N_BLOCKS = 4, 16


class Pool(Counted):
    """Blocks, sequences and steps of a tiny model, against lists."""

    def __init__(self):
        super().__init__()
        self.pool = self.model.new_pool(n_blocks=N_BLOCKS, block_size=SIZE)
        self.twins, self.single, self.stamp = [], [], 0  # single: (id, Block) that nobody's table names
        self.big = self.model.new_pool(n_blocks=64, block_size=16)
        for _ in range(2):
            self.new(40)
            self.append(-1, 6, True, True)
        self.fork(0)

    @property
    def n_free(self):
        return N_BLOCKS - len({id(b) for twin in self.twins for b in twin.blocks} | {id(b) for _, b in self.single})

    def pick(self, i):
        return self.twins[i % len(self.twins)]

    def release(self, blocks):
        for block in blocks:
            block.n_owners -= 1

    def plan(self, wanted):
        """The status that reserving rows for (twin, n) pairs meets, as the header of the C code says; None: it goes."""
        n_free, planned, taken = self.n_free, 0, {}
        for twin, n in wanted:
            need = -(-(len(twin.rows) + n) // SIZE)
            for block in twin.blocks[len(twin.rows) // SIZE:need]:
                if block.n_owners - taken.get(block, 0) > 1:
                    taken[block] = taken.get(block, 0) + 1
                    planned += 1
            if need > twin.max_blocks:
                return EXHAUST if planned > n_free else BOUNDS
            planned += max(0, need - len(twin.blocks))
            if planned > n_free:
                return EXHAUST
        return None

    def reserve_in_model(self, twin, n):
        need = -(-(len(twin.rows) + n) // SIZE)
        for i in range(len(twin.rows) // SIZE, min(need, len(twin.blocks))):
            if twin.blocks[i].n_owners > 1:
                twin.blocks[i].n_owners -= 1
                twin.blocks[i] = Block()
        while len(twin.blocks) < need:
            twin.blocks.append(Block())

    def stamped(self, n):
        """New rows, each unlike all others."""
        out = []
        for _ in range(n):
            self.stamp += 1
            out.append(np.full((2, 2, 2, HEAD_DIM), self.stamp, np.float32) + np.arange(4, dtype=np.float32).reshape(2, 2, 1, 1) / 8)
        return out

    # -- rules

    @precondition(lambda self: len(self.twins) < 6)
    @rule(max_tokens=st.sampled_from([40, 40, 40, 16, 5, 0]))
    def new(self, max_tokens):
        self.ran()
        self.twins.append(Twin(self.model.new_sequence(self.pool, max_tokens), -(-max_tokens // SIZE) + 1))

    @rule()
    def alloc(self):
        self.ran()
        block_id, status = status_of(self.pool.alloc_block)
        assert status is (EXHAUST if self.n_free == 0 else None)
        if status is None:
            self.single.append((block_id, Block()))

    @rule(i=st.integers(0, 9), up=st.booleans())
    def count(self, i, up):
        """One owner more or less of a block that was taken by itself, or of none."""
        self.ran()
        if not self.single:
            return
        block_id, block = self.single[i % len(self.single)]
        if up:
            self.pool.ref_block(block_id)
            self.single.append((block_id, block))
            block.n_owners += 1
        else:
            self.pool.unref_block(block_id)
            self.single.remove((block_id, block))
            block.n_owners -= 1

    @rule(block_id=st.integers(-2, N_BLOCKS + 1), up=st.booleans())
    def count_of_none(self, block_id, up):
        self.ran()
        used = {int(b) for twin in self.twins for b in twin.real.block_table} | {each for each, _ in self.single}
        if block_id not in used:
            assert status_of(self.pool.ref_block if up else self.pool.unref_block, block_id)[1] is BOUNDS

    @precondition(lambda self: self.twins)
    @rule(i=st.integers(0, 5), n=st.sampled_from([-1, 0, 1, 2, 5, 9, 17]))
    def reserve(self, i, n):
        self.ran()
        twin = self.pick(i)
        want = BAD_DIM if n <= 0 else self.plan([(twin, n)])
        assert status_of(twin.real.ensure_append, n)[1] is want
        if want is None:
            self.reserve_in_model(twin, n)

    @precondition(lambda self: self.twins)
    @rule(i=st.integers(0, 5), n=st.sampled_from([1, 2, 3, 4, 5, 9]), reserves=st.sampled_from([True, True, True, False]),
          advances=st.sampled_from([True, True, False]))
    def append(self, i, n, reserves, advances):
        self.ran()
        twin = self.pick(i)
        if reserves:
            self.reserve(i, n)
        covered = twin.blocks[len(twin.rows) // SIZE:-(-(len(twin.rows) + n) // SIZE)]
        writable = (len(twin.rows) + n <= SIZE * len(twin.blocks) and all(b.n_owners == 1 for b in covered))
        rows = self.stamped(n)
        array = np.stack(rows)  # [n, n_layers, 2, n_kv_heads, head_dim]
        for layer in range(2):
            k, v = (np.ascontiguousarray(array[:, layer, part]).reshape(n, -1) for part in range(2))
            assert status_of(twin.real.append_layer, layer, k, v)[1] is (None if writable else BOUNDS)
        if advances:
            assert status_of(twin.real.advance, n)[1] is (None if writable else BOUNDS)
            if writable:
                twin.rows += rows

    @precondition(lambda self: self.twins)
    @rule(picks=st.lists(st.integers(0, 5), min_size=1, max_size=4), n=st.lists(st.integers(1, 5), min_size=4, max_size=4),
          seed=st.integers(0, 3), bad=st.sampled_from(["", "", "", "", "token", "twice"]))  # fmt: skip
    def step(self, picks, n, seed, bad):
        self.ran()
        chosen = list({i % len(self.twins): None for i in picks})
        wanted = [(self.twins[i], count) for i, count in zip(chosen, n)]
        tokens = [ids(seed + place, count) for place, (_, count) in enumerate(wanted)]
        batch = [(twin.real, each) for (twin, _), each in zip(wanted, tokens)]
        want = self.plan(wanted)
        if bad == "token":
            batch[-1] = batch[-1][0], [*batch[-1][1], 10**6]
            want = pk.Flv4Status.FLV4_ERR_TOKEN
        elif bad == "twice":
            batch.append(batch[0])
            want = pk.Flv4Status.FLV4_ERR_BAD_DIM
        logits, status = status_of(lambda: self.model.step(batch, all_logits=True))
        assert status is want
        if status is not None:
            return
        for twin, count in wanted:
            self.reserve_in_model(twin, count)
        begin = 0
        for (twin, count), each in zip(wanted, tokens):
            with self.alone(twin) as seq:  # the same rows in another pool, and one token at a time
                rows = [self.model.decode_step([token], [seq])[0] for token in each]
                assert np.stack(rows).tobytes() == logits[begin:begin + count].tobytes()
                twin.rows += list(seq.export(HEAD_DIM).transpose(3, 0, 1, 2, 4)[-count:])
            begin += count

    def alone(self, twin):
        rows = np.stack(twin.rows).transpose(1, 2, 3, 0, 4) if twin.rows else np.empty((2, 2, 2, 0, HEAD_DIM), np.float32)
        return pk.Sequence.import_(rows, self.big)

    @precondition(lambda self: 0 < len(self.twins) < 6)
    @rule(i=st.integers(0, 5))
    def fork(self, i):
        self.ran()
        twin = self.pick(i)
        self.twins.append(Twin(twin.real.fork(), twin.max_blocks))
        self.twins[-1].rows = list(twin.rows)
        self.twins[-1].blocks = twin.blocks[:-(-len(twin.rows) // SIZE)]
        for block in self.twins[-1].blocks:
            block.n_owners += 1

    @precondition(lambda self: 0 < len(self.twins) < 6)
    @rule(i=st.integers(0, 5), n=st.integers(0, 3), max_tokens=st.sampled_from([0, 40]))
    def from_blocks(self, i, n, max_tokens):
        self.ran()
        twin, max_blocks = self.pick(i), -(-max_tokens // SIZE) + 1
        n = min(n, len(twin.rows) // SIZE)
        call = lambda: pk.Sequence.from_blocks(self.pool, twin.real.block_table[:n], max_tokens)  # noqa: E731
        real, status = status_of(call)
        assert status is (BOUNDS if n > max_blocks else None)
        if status is None:
            self.twins.append(Twin(real, max_blocks))
            self.twins[-1].rows, self.twins[-1].blocks = twin.rows[:n * SIZE], twin.blocks[:n]
            for block in twin.blocks[:n]:
                block.n_owners += 1

    @precondition(lambda self: self.twins)
    @rule(i=st.integers(0, 5), less=st.sampled_from([1, 2, 3, 4, 5, 8, 0, -1, 100]))
    def truncate(self, i, less):
        self.ran()
        twin = self.pick(i)
        n = len(twin.rows) - less
        inside = 0 <= n <= len(twin.rows)
        assert status_of(twin.real.truncate, n)[1] is (None if inside else BOUNDS)
        if inside:
            self.release(twin.blocks[-(-n // SIZE):])
            del twin.rows[n:], twin.blocks[-(-n // SIZE):]

    @precondition(lambda self: self.twins)
    @rule(i=st.integers(0, 5), drop=st.booleans())
    def free(self, i, drop):
        self.ran()
        twin = self.pick(i)
        self.twins.remove(twin)
        self.release(twin.blocks)
        if not drop:
            twin.real.free()
            assert status_of(twin.real.fork)[1] is pk.PkvStatus.PKV_ERR_NULL

    @precondition(lambda self: 0 < len(self.twins) < 6)
    @rule(i=st.integers(0, 5), by_file=st.booleans())
    def copy(self, i, by_file):
        """A sequence out of a file, or out of an array: own blocks, the same rows."""
        self.ran()
        twin = self.pick(i)
        need = -(-len(twin.rows) // SIZE)
        want = EXHAUST if need > self.n_free else None
        if by_file:
            with tempfile.TemporaryDirectory() as folder:
                twin.real.save(f"{folder}/kv", model=self.model)
                real, status = status_of(lambda: pk.Sequence.load(f"{folder}/kv", self.pool, model=self.model))
        else:
            real, status = status_of(lambda: pk.Sequence.import_(twin.real.export(HEAD_DIM), self.pool))
        assert status is want
        if status is None:
            self.twins.append(Twin(real, N_BLOCKS + 1))
            self.twins[-1].rows, self.twins[-1].blocks = list(twin.rows), [Block() for _ in range(need)]

    # -- what always holds

    @invariant()
    def all_is_as_in_the_model(self):
        assert self.pool.n_free == self.n_free
        names = {}  # Block -> id, and back: one of each
        for twin in self.twins:
            table = twin.real.block_table.tolist()
            assert len(twin.real) == len(twin.rows) and len(table) == len(twin.blocks)
            for block, block_id in zip(twin.blocks, table):
                assert names.setdefault(block, block_id) == block_id
            rows = twin.real.export(HEAD_DIM).transpose(3, 0, 1, 2, 4)
            assert rows.tobytes() == b"".join(row.tobytes() for row in twin.rows)
        for block_id, block in self.single:
            assert names.setdefault(block, block_id) == block_id
        assert len(set(names.values())) == len(names)
        for block, block_id in names.items():
            assert self.pool.ref_count(block_id) == block.n_owners
        assert self.pool.n_saved == sum(block.n_owners - 1 for block in names)

    def teardown(self):
        for twin in self.twins:
            twin.real.free()
        for block_id, _ in self.single:
            self.pool.unref_block(block_id)
        assert self.pool.n_free == N_BLOCKS


# ---- The engine ---------------------------------------------------------------------------------

ALONE = {}  # what a request gives when it runs by itself

PARAMS = st.builds(
    SamplingParams, n=st.sampled_from([1, 1, 2, 3]), temperature=st.sampled_from([0, 0.7, 1.5]), seed=st.integers(0, 2),
    top_p=st.sampled_from([1.0, 0.9]), max_tokens=st.integers(1, 14), logprobs=st.sampled_from([None, 0, 2]),
    prompt_logprobs=st.sampled_from([None, None, None, 1]), ignore_eos=st.booleans(),
    stop=st.sampled_from([None, None, ["a"], ["e", "t"]]), repetition_penalty=st.sampled_from([1.0, 1.0, 1.2]))  # fmt: skip


class Requests(Counted):
    """An engine over a small pool which others use too, against each request by itself."""

    @initialize(n_blocks=st.integers(7, 14), batched=st.sampled_from([3, 16, 512]), seqs=st.sampled_from([1, 2, 3, 64]),
                caching=st.sampled_from([True, True, False]), speculation=st.booleans(),
                block_size=st.sampled_from([4, 8, 8]))  # fmt: skip
    def begin(self, n_blocks, batched, seqs, caching, speculation, block_size):
        self.pool = self.model.new_pool(n_blocks=n_blocks, block_size=block_size)
        self.engine = Engine(self.model, self.pool, seqs, batched, caching, 0, NgramDrafter(4, 3, 1) if speculation else None)
        self.going, self.single, self.outside, self.n_done = [], [], [], 0

    @precondition(lambda self: len(self.going) < 6)
    @rule(prompt=st.tuples(st.integers(0, 2), st.sampled_from([0, 3, 7, 8, 9, 16]), st.integers(0, 1), st.sampled_from([1, 1, 5, 8])), params=PARAMS)
    def add(self, prompt, params):
        self.ran()
        family, n_shared, tail, n_tail = prompt
        tokens = [7, 8, 9] * 5 if family == 2 else ids(family, n_shared) + ids(10 + tail, n_tail)
        n_rows = len(tokens) + params.max_tokens - 1
        fits = -(-n_rows // self.pool.block_size) <= self.pool.n_blocks
        try:
            self.going.append((self.engine.add(None, tokens, params), tokens, params))
            assert fits
        except pk.PoolExhausted:
            assert not fits

    @rule(n=st.integers(1, 4))
    def step(self, n):
        for _ in range(n):
            self.ran()
            self.engine.step()
            self.look()

    @precondition(lambda self: self.going)
    @rule(i=st.integers(0, 5))
    def abort(self, i):
        self.ran()
        request = self.going[i % len(self.going)][0]
        self.engine.abort(request)
        assert request.finished and all(sample.seq is None for sample in request.samples)
        self.going = [each for each in self.going if each[0] is not request]

    @rule(where=st.sampled_from(["step", "draw", "extend", "propose"]))
    def fail(self, where):
        """A step that ends in an exception."""
        self.ran()
        owner, name = {"step": (self.model, "step"), "draw": (self.engine.sampler, "draw"), "extend": (self.engine.cache, "extend"),
                       "propose": (self.engine.scheduler.drafter or self.engine.sampler, "propose")}[where]  # fmt: skip

        def raising(*_, **__):
            raise RuntimeError("on purpose")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, raising, raising=False)
            try:
                self.engine.step()
            except RuntimeError:
                pass
        self.look()

    @rule()
    def hold(self):
        self.ran()
        if self.pool.n_free > 1:
            self.single.append(self.pool.alloc_block())

    @rule()
    def let_go(self):
        self.ran()
        if self.single:
            self.pool.unref_block(self.single.pop())

    @rule(n=st.integers(1, 20), by_file=st.booleans())
    def outside_sequence(self, n, by_file):
        """Somebody else's sequence in the same pool; or what its file gives."""
        self.ran()
        if by_file and self.outside:
            seq, tokens = self.outside[-1]
            with tempfile.TemporaryDirectory() as folder:
                seq.save(f"{folder}/kv", tokens, self.model)
                again, status = status_of(lambda: pk.Sequence.load(f"{folder}/kv", self.pool, model=self.model))
            if status is None:
                seq.free()
                self.outside[-1] = again, tokens
        elif -(-n // self.pool.block_size) < self.pool.n_free:
            seq = self.model.new_sequence(self.pool)
            self.model.prefill(ids(n, n), seq)
            self.outside.append((seq, ids(n, n)))

    @rule()
    def outside_ends(self):
        self.ran()
        if self.outside:
            seq, tokens = self.outside.pop()
            with self.model.new_sequence(self.model.new_pool(n_tokens=64)) as twin:
                self.model.prefill(tokens, twin)
                assert seq.export(HEAD_DIM).tobytes() == twin.export(HEAD_DIM).tobytes()
            seq.free()

    def look(self):
        """Take what has ended: it is what it is alone."""
        for request, tokens, params in list(self.going):
            if not request.finished:
                continue
            self.going.remove((request, tokens, params))
            if request.error is not None:  # only where others hold the blocks
                assert isinstance(request.error, pk.PoolExhausted) and (self.single or self.outside)
                continue
            type(self).n_done += 1
            output = request.output()
            assert (output.outputs, output.prompt_logprobs) == by_itself(self.model, tokens, params)

    @invariant()
    def every_owner_is_known(self):
        if not hasattr(self, "engine"):
            return
        counts = np.zeros(self.pool.n_blocks, int)
        for sample in self.engine.scheduler.running:
            counts[sample.seq.block_table] += 1
        n_shared = (counts > 1).sum()
        for seq, _ in self.outside:
            counts[seq.block_table] += 1
        for block_id in self.single:
            counts[block_id] += 1
        nodes = list(self.engine.cache._root.children.values())
        for node in nodes:
            nodes += node.children.values()
            counts[node.block_id] += 1
        assert [self.pool.ref_count(b) for b in range(self.pool.n_blocks)] == counts.tolist()
        stats = self.engine.stats()
        assert stats["blocks_free"] == (counts == 0).sum() and stats["blocks_cached"] == len(self.engine.cache._idle)
        assert stats["blocks_free"] + stats["blocks_used"] + stats["blocks_cached"] == self.pool.n_blocks
        assert stats["blocks_shared"] == n_shared
        paths = [node for sample in self.engine.scheduler.running for node in sample.path]
        assert all(node.n_users == paths.count(node) for node in nodes)
        assert all((node.n_users == 0) == (node in self.engine.cache._idle) for node in nodes)
        waiting = self.engine.scheduler.waiting
        assert all(sample.seq is None for sample in waiting) and len(self.engine.scheduler.running) <= self.engine.scheduler.max_num_seqs
        assert len(self.engine.scheduler.running) + len(waiting) >= len(self.going)  # none is forgotten

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for block_id in self.single:
            self.pool.unref_block(block_id)
        for seq, _ in self.outside:
            seq.free()
        self.single, self.outside = [], []
        for _ in range(3000):
            if not self.engine.has_work:
                break
            self.engine.step()
            self.look()
            self.every_owner_is_known()
        assert not self.going and not self.engine._live
        self.engine.cache.evict(10**6)
        assert self.pool.n_free == self.pool.n_blocks


def by_itself(model, tokens, params):  # noqa: F811
    """Outputs of a request alone in a large fresh pool, its tokens compared with a plain loop's."""
    key = (tuple(tokens), repr(params))
    if key not in ALONE:
        llm = pk.LLM(model, n_blocks=200, enable_prefix_caching=False)
        out, = llm.generate([tokens], params, use_tqdm=False)
        if not params.stop:
            for sample in out.outputs:
                assert sample.token_ids == alone(model, tokens, params, sample.index).tokens
        ALONE[key] = out.outputs, out.prompt_logprobs
    return ALONE[key]


Requests.n_done = 0


def run(machine, model, n_examples, n_steps, **options):  # noqa: F811
    machine.model = model
    run_state_machine_as_test(machine, settings=settings(
        max_examples=n_examples, stateful_step_count=n_steps, deadline=None, database=None, **options))  # fmt: skip


def test_the_pool_and_its_sequences(model):  # noqa: F811
    run(Pool, model, 80, 50, derandomize=True)


def test_the_engine(model):  # noqa: F811
    run(Requests, model, 120, 30, derandomize=True)
    assert Requests.n_done > 60


@pytest.mark.slow
@pytest.mark.parametrize("machine", [Pool, Requests], ids=lambda each: each.__name__)
def test_for_long(model, machine):  # noqa: F811
    seconds = float(os.environ.get("PAGEDKV_STATE_MACHINE_S", 120)) / 2
    machine.n_examples = machine.n_steps = 0
    begin = time.time()
    while time.time() < begin + seconds:
        run(machine, model, 100, 60)
        ALONE.clear()
    done = f", {machine.n_done} requests ended" if machine is Requests else ""
    print(f"\n{machine.__name__}: {machine.n_examples} examples, {machine.n_steps} steps{done} in {time.time() - begin:.0f} s")
