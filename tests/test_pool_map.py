"""The map of the pool against the pool's own counts, the sequences themselves, and what steps were seen to change."""

import asyncio
import random
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cli import gguf, run  # noqa: F401  (fixtures)
from test_engine import ids, model, requests  # noqa: F401  (model is a fixture)

import pagedkv as pk
from pagedkv import LLM, AsyncLLM, SamplingParams
from pagedkv.engine.request import Request


@pytest.fixture(autouse=True)
def one_thread(threads):
    threads(1)


def started(llm, seed, n):
    """Requests that wait for their turn, some of which begin alike."""
    return [llm._engine.add(None, prompt, params) for prompt, params in zip(*requests(seed, n))]


def nodes(cache):
    found = list(cache._root.children.values())
    for node in found:
        found += node.children.values()
    return found


class Watched:
    """What each sample's blocks were after each step, and the copies that this shows."""

    def __init__(self):
        self.tables, self.copies, self.preempted, self.seqs = {}, {}, set(), {}

    def note(self, samples):
        for sample in samples:
            name = (sample.request.number, sample.index)
            if sample.seq is None:
                if self.tables.pop(name, None) is not None:
                    self.preempted.add(name)
                self.copies.pop(name, None)
                continue
            self.preempted.discard(name)
            if self.seqs.get(name) is not sample.seq:  # begun, perhaps in the step that took its blocks: computed, not copied
                self.tables.pop(name, None)
                self.copies.pop(name, None)
            self.seqs[name] = sample.seq
            table = sample.seq.block_table.tolist()
            for old, new in zip(self.tables.get(name, ()), table):
                if old != new:
                    self.copies[name] = (new, old)
            self.tables[name] = table


def check(llm, going, watched):
    pool, found, pool_map = llm.pool, llm._engine.scheduler, llm.pool_map()
    assert pool_map.ref_counts.tolist() == [pool.ref_count(b) for b in range(pool.n_blocks)]
    assert (pool_map.n_owners + pool_map.cached).tolist() == pool_map.ref_counts.tolist()
    assert sorted(np.flatnonzero(pool_map.cached)) == sorted(node.block_id for node in nodes(llm._engine.cache))
    assert np.count_nonzero(pool_map.ref_counts == 0) == pool.n_free
    assert pool_map.n_saved == sum(n - 1 for n in pool_map.n_owners if n)
    assert pool_map.stats == llm.stats()

    samples = [sample for request in going for sample in request.samples if sample.finish_reason is None]
    assert [(each.number, each.index) for each in pool_map.samples] == [(s.request.number, s.index) for s in samples]
    filled = np.where(pool_map.cached, pool.block_size, 0)
    for told, sample in zip(pool_map.samples, samples):
        name = (told.number, told.index)
        assert (told.n_prompt, told.n_tokens) == (len(sample.request.prompt_ids), len(sample.tokens))
        assert (told.state == "running") == (sample in found.running) == (sample.seq is not None)
        assert sample in found.waiting or told.state == "running" or not sample.request.forked
        if told.state != "running":
            assert not told.n_rows and not len(told.block_table) and told.copied is None
            continue
        assert told.block_table.tolist() == sample.seq.block_table.tolist() and told.n_rows == len(sample.seq)
        if name in watched.copies:
            assert told.copied == watched.copies[name]
        elif told.copied is not None:  # on admission: the last token of a prompt that the cache has whole
            assert told.copied[0] in told.block_table
        for row in range(told.n_rows):
            block_id = told.block_table[row // pool.block_size]
            filled[block_id] = max(filled[block_id], row % pool.block_size + 1)
    assert pool_map.n_filled.tolist() == filled.tolist()
    return pool_map


def run_and_check(llm, seed, n):
    """Run requests, checking the map after each step; the states and copies that were seen."""
    going, watched, states, copies = started(llm, seed, n), Watched(), set(), set()
    while going:
        llm._engine.step()
        going = [request for request in going if not request.finished]
        samples = [sample for request in going for sample in request.samples if sample.finish_reason is None]
        watched.note(samples)
        pool_map = check(llm, going, watched)
        for told in pool_map.samples:
            states.add(told.state)
            copies |= {told.copied} - {None}
            if (told.number, told.index) in watched.preempted:
                assert told.state == "preempted"
    return states, copies


@settings(max_examples=15)
@given(st.integers(0, 2**20), st.sampled_from([(24, 16), (64, 16), (60, 4), (9, 32)]), st.booleans())
def test_the_map_is_the_pool(model, seed, blocks, caching):  # noqa: F811
    llm = LLM(model, n_blocks=blocks[0], block_size=blocks[1], max_num_seqs=6, enable_prefix_caching=caching)
    check(llm, [], Watched())
    run_and_check(llm, seed, 8)
    check(llm, [], Watched())


def test_everything_is_seen(model):  # noqa: F811
    """The property above would hold of runs in which nothing happens."""
    llm = LLM(model, n_blocks=24, max_num_seqs=6)
    states, copies = run_and_check(llm, 5, 14)
    stats = llm.stats()
    assert states == {"running", "waiting", "preempted"} and copies
    assert stats["preemptions"] and stats["evicted"] and stats["prefix_hits"] and llm.pool_map().cached.any()


def test_a_prompt_shared_by_its_forks_and_a_tail_copied(model):  # noqa: F811
    """Step by step: 37 tokens are 2 full blocks and 5 rows of a third."""
    llm = LLM(model, n_blocks=24)
    request = llm._engine.add(None, ids(1, 37), SamplingParams(n=4, max_tokens=20, ignore_eos=True))
    waiting = llm.pool_map()
    assert [sample.state for sample in waiting.samples] == ["waiting"] * 4 and not waiting.ref_counts.any()
    llm._engine.step()
    forked = llm.pool_map()
    assert forked.ref_counts[:4].tolist() == [5, 5, 4, 0] and forked.cached[:3].tolist() == [True, True, False]
    assert forked.n_owners[:3].tolist() == [4, 4, 4] and forked.n_filled[:3].tolist() == [16, 16, 5]
    assert forked.n_saved == 9 and [sample.copied for sample in forked.samples] == [None] * 4
    llm._engine.step()
    appended = llm.pool_map()
    assert appended.ref_counts[:7].tolist() == [5, 5, 1, 1, 1, 1, 0] and appended.n_saved == 6
    assert sorted(sample.copied or (2, 2) for sample in appended.samples) == [(2, 2), (3, 2), (4, 2), (5, 2)]
    assert not forked.ref_counts[3:].any()  # a map does not change
    llm._engine.abort(request)
    ended = llm.pool_map()
    assert ended.samples == () and ended.ref_counts[:3].tolist() == [1, 1, 0] == ended.cached[:3].astype(int).tolist()


def test_blocks_held_outside_the_engine(model):  # noqa: F811
    llm = LLM(model, n_blocks=8)
    block_id = llm.pool.alloc_block()
    pool_map = llm.pool_map()
    assert pool_map.ref_counts[block_id] == 1 and pool_map.n_owners[block_id] == 0 and not pool_map.cached[block_id]
    llm.pool.unref_block(block_id)


def test_the_map_of_a_cut_off_step(model, monkeypatch):  # noqa: F811
    """Who ran waits again, with no block."""
    llm = LLM(model, n_blocks=24)
    llm._engine.add(None, ids(1, 37), SamplingParams(n=2, max_tokens=20))
    llm._engine.step()
    monkeypatch.setattr(llm._engine, "_draw", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        llm._engine.step()
    pool_map = llm.pool_map()
    assert [sample.state for sample in pool_map.samples] == ["waiting"] * 2
    assert pool_map.ref_counts.tolist() == pool_map.cached.astype(int).tolist()


def test_a_record_has_the_fullest_step(model):  # noqa: F811
    llm = LLM(model, n_blocks=64, enable_prefix_caching=False)
    params = SamplingParams(n=5, max_tokens=30, ignore_eos=True, seed=1)
    with llm.record_pool() as record:
        out, = llm.generate([ids(1, 37)], params, use_tqdm=False)
    stats, pool_map = llm.stats(), record.fullest
    assert [len(sample.token_ids) for sample in out.outputs] == [30] * 5
    assert np.count_nonzero(pool_map.ref_counts) == stats["blocks_used_most"] == 2 + 5 * 3
    assert pool_map.n_saved == stats["blocks_unshared_most"] - 17 == 8
    # The last step of all: the token that it drew has no row.
    assert [(sample.n_rows, sample.n_tokens) for sample in pool_map.samples] == [(37 + 29, 37 + 29)] * 5
    llm.generate([ids(2, 100)], params, use_tqdm=False)
    assert record.fullest is pool_map and not llm._engine.records
    with llm.record_pool() as record:
        pass
    assert record.fullest is None and record._repr_png_() is None


def test_nothing_is_asked_of_the_pool_when_nobody_watches(model, monkeypatch):  # noqa: F811
    llm = LLM(model, n_blocks=64)
    monkeypatch.setattr("pagedkv.engine.core.PoolMap", None)
    llm.generate([ids(1, 37)], SamplingParams(n=3, max_tokens=5), use_tqdm=False)


def test_async_maps_between_steps(model):  # noqa: F811
    """While requests come and go; none of them changes by being watched."""
    prompts, params = requests(4, 10)
    want = LLM(model, n_blocks=64).generate(prompts, params, use_tqdm=False)
    llm = AsyncLLM(model, n_blocks=24)

    async def last(*request):
        async for output in llm.generate(*request):
            pass
        return output.outputs

    async def both():
        runs = [asyncio.ensure_future(last(*request)) for request in zip(prompts, params)]
        await asyncio.sleep(0)  # so all are there before the first map is asked for
        maps = []
        while not all(run.done() for run in runs):
            maps.append(await llm.pool_map())
        return [await run for run in runs], maps

    outputs, maps = asyncio.run(both())
    assert outputs == [each.outputs for each in want]
    for pool_map in maps:
        assert (pool_map.n_owners + pool_map.cached).tolist() == pool_map.ref_counts.tolist()
    assert max(len(pool_map.samples) for pool_map in maps) > 3
    llm.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        asyncio.run(llm.pool_map())


def test_an_error_of_a_map_is_its_callers_alone(model, monkeypatch):  # noqa: F811
    async def run():
        stream = llm.generate(ids(1, 20), SamplingParams(max_tokens=30, ignore_eos=True))
        await anext(stream)
        monkeypatch.setattr(llm._engine, "pool_map", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await llm.pool_map()
        cancelled = asyncio.ensure_future(llm.pool_map())
        await asyncio.sleep(0)
        cancelled.cancel()
        return [output async for output in stream][-1]

    llm = AsyncLLM(model, n_blocks=24)
    assert len(asyncio.run(run()).outputs[0].token_ids) == 30
    llm.shutdown()


# ---- The picture --------------------------------------------------------------------------------


def recorded(model):  # noqa: F811
    llm = LLM(model, n_blocks=64)
    with llm.record_pool() as record:
        llm.generate([ids(1, 37), ids(1, 20)], SamplingParams(n=3, max_tokens=9, ignore_eos=True), use_tqdm=False)
    return record


def test_the_picture_says_what_sharing_saved(model):  # noqa: F811
    pytest.importorskip("matplotlib")
    record = recorded(model)
    pool_map = record.fullest
    n_held = np.count_nonzero(pool_map.n_owners)
    for dark in (False, True):
        figure = pool_map.figure(dark)
        words = [text.get_text() for text in figure.texts]
        assert f"{n_held} blocks hold what would take {n_held + pool_map.n_saved} without sharing: {pool_map.n_saved} saved" in words
        assert sum(text.startswith("request ") for text in words) == 2
        # A number in each block that several hold.
        assert [int(text.get_text()) for text in figure.axes[0].texts] == [n for n in pool_map.n_owners if n > 1]
    assert record._repr_png_() == pool_map._repr_png_() and pool_map._repr_png_().startswith(b"\x89PNG")


@pytest.mark.parametrize("n_blocks", [1, 33, 1500])
def test_pictures_of_all_sizes(n_blocks):
    pytest.importorskip("matplotlib")
    from pagedkv.engine.pool_map import SampleBlocks

    rng = random.Random(n_blocks)
    samples = [SampleBlocks(i // 3, "", i % 3, "running", 5, 9, 9, np.array([rng.randrange(n_blocks)], np.int32), None)
               for i in range(45)]  # fmt: skip
    counts = np.bincount([sample.block_table[0] for sample in samples], minlength=n_blocks).astype(np.int32)
    counts[-1] += 1  # held outside
    pool_map = pk.PoolMap(16, counts, np.zeros(n_blocks, bool), tuple(samples), {})
    assert pool_map._repr_png_().startswith(b"\x89PNG")
    assert "and 3 requests more" in [text.get_text() for text in pool_map.figure().texts]


def test_without_matplotlib(model, monkeypatch):  # noqa: F811
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r'needs matplotlib, which is not installed: pip install "pagedkv\[plot\]"'):
        recorded(model).fullest.figure()


def test_the_page_and_the_picture_have_the_same_colours():
    from pathlib import Path

    from pagedkv import plot

    html = (Path(plot.__file__).parent / "server" / "page.html").read_text()
    for values in (plot.HUES, plot.CHROMA, *plot.LIGHTNESS.values()):
        assert f"[{', '.join(f'{value:g}' for value in values)}]" in html
    assert plot._colour(0, 0, False, empty=True)[0] > plot._colour(0, 4, False)[0]
    for hue in plot.HUES:
        assert all(0 <= value <= 1 for value in plot._colour(hue, 2, True))


def test_no_text_of_a_request_is_in_a_map(model):  # noqa: F811
    """Numbers and ids only: its fields are of these types."""
    llm = LLM(model, n_blocks=24)
    llm._engine.add("a secret", ids(1, 37), SamplingParams(n=2, max_tokens=20))
    llm._engine.step()
    assert "secret" not in repr(llm.pool_map().samples) + repr(llm.pool_map())
    assert not any(isinstance(getattr(sample, name), (Request, list)) for sample in llm.pool_map().samples
                   for name in sample.__slots__)  # fmt: skip


# ---- pagedkv generate --show --------------------------------------------------------------------


@pytest.fixture
def drawn(monkeypatch):
    """The maps that were drawn."""
    from pagedkv import plot

    pytest.importorskip("matplotlib")
    maps, draw = [], plot.draw_pool
    monkeypatch.setattr(plot, "draw_pool", lambda pool_map, dark=False: maps.append(pool_map) or draw(pool_map, dark))
    return maps


@pytest.mark.parametrize("args, name", [
    (["--show", "hello you"], "pool.png"), (["hello you", "--show"], "pool.png"), (["--show=my.SVG", "hello you"], "my.SVG"),
    (["--show", "my.pdf", "hello you"], "my.pdf")])  # fmt: skip
def test_generate_draws_its_blocks(run, gguf, drawn, tmp_path, monkeypatch, args, name):  # noqa: F811
    """What the statistics say was used and saved is what is in the picture; the text is the same without it."""
    monkeypatch.chdir(tmp_path)
    command = ["generate", "--model", gguf, "-n", "3", "--max-tokens", "40", "--ignore-eos"]
    plain = run(*command, "hello you")
    status, out, err = run(*command, *args)
    assert (status, out.split("[")[0], err) == (0, plain[1].split("[")[0], f"pagedkv: the pool at its fullest is in {name}\n")
    (pool_map,) = drawn
    n_used = np.count_nonzero(pool_map.ref_counts)
    assert f"{n_used} blocks used, {pool_map.n_saved} saved by sharing]" in out
    begins = {"png": b"\x89PNG", "pdf": b"%PDF", "SVG": b"<?xml"}[name.split(".")[1]]
    assert (tmp_path / name).read_bytes().startswith(begins)


def test_a_batch_draws_its_blocks(run, gguf, drawn, tmp_path):  # noqa: F811
    (tmp_path / "in.jsonl").write_text('{"prompt": "hello you", "n": 4}\n{"prompt": "hello"}\n')
    command = ["generate", "--model", gguf, "--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl", "--quiet",
               "--max-tokens", "30", "--n-blocks", "50", "--show", tmp_path / "blocks.png"]  # fmt: skip
    assert run(*command)[0] == 0 and (tmp_path / "blocks.png").exists()
    assert {sample.number for sample in drawn[0].samples} == {0, 1} and drawn[0].n_blocks == 50
    assert run(*command) == (0, "", "") and len(drawn) == 1  # all rows are there: nothing ran


@pytest.mark.parametrize("args, why", [
    (["x", "--show", "pool.gif"], "--show's file must end in .png, .svg or .pdf, not 'pool.gif'"),
    (["--show", "nowhere/pool.png", "x"], "--show nowhere/pool.png: there is no folder nowhere")])  # fmt: skip
def test_refusals_of_show(run, gguf, args, why):  # noqa: F811
    pytest.importorskip("matplotlib")
    assert run("generate", "--model", gguf, *args) == (2, "", f"pagedkv: error: {why}\n")


def test_show_without_matplotlib(run, gguf, monkeypatch):  # noqa: F811
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, out, err = run("generate", "--model", gguf, "--show", "x")
    assert (status, out) == (2, "") and 'not installed: pip install "pagedkv[plot]"' in err
