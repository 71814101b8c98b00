"""A job: which lines are left, and their way through the engine."""

import signal
import threading
import time
from contextlib import closing, contextmanager
from dataclasses import dataclass

from pagedkv.batch.lines import LineError, key_of, read_request, short
from pagedkv.batch.rows import BatchError, answer_row, error_row
from pagedkv.errors import BoundsError, PagedKVError, PoolExhausted
from pagedkv.progress import progress_bar

BAR_S, REPORT_S = 0.5, 30.0  # between what is shown on a terminal, and elsewhere


# ---- Which lines are left -----------------------------------------------------------------------


@dataclass
class Plan:
    """What a run has to do.

    Attributes
    ----------
    is_done : bytearray
        One byte a line of the input that is not blank: whether its row is there.
    n_errors : int
        Of the rows that are there, those with an error.
    model : str or None
        Part of the rows' digests: the model that they were made with. None where there is no row.
    """

    is_done: bytearray
    n_errors: int
    model: str | None = None

    @property
    def n_rows(self):
        return len(self.is_done)

    @property
    def n_done(self):
        return self.is_done.count(1)


def make_plan(lines, output, stamp):
    """Compare the input with the rows that are there, in all but the model, which may not be loaded yet.

    Parameters
    ----------
    lines : Input
    output : RowFile or RowStream
    stamp : Stamp

    Returns
    -------
    Plan

    Raises
    ------
    BatchError
        Two lines, or two rows, have one id; a row is of another line, tokenizer or parameters; rows are of two models.
    """
    anew = _anew(output)
    done, n_errors, models = {}, 0, set()
    for row in output.rows():
        key = key_of(row["id"], row["line"])
        line, model, tokenizer, settings = row["digest"].split("-")
        if key in done:
            raise BatchError(f"{output.name} has two rows for {_name_of(key)}; {anew}")
        if tokenizer != stamp.tokenizer:
            raise BatchError(f"{output.name} was made with another tokenizer, chat template or context length than this "
                             f"model's; use that one, or {anew}")
        if settings != stamp.settings:
            raise BatchError(f"{output.name} was made with other parameters; use those, or {anew}")
        models.add(model)
        if len(models) > 1:
            raise BatchError(f"{output.name} has rows of two models; {anew}")
        done[key] = line
        n_errors += "error" in row
    seen, is_done = {}, bytearray()
    for line in lines:
        other = seen.setdefault(line.key, line.number)
        if other != line.number:
            raise BatchError(f"lines {other} and {line.number} of {lines.name} have the same id, {short(line.id)}")
        digest = done.pop(line.key, None)
        if digest not in (None, line.digest):
            raise BatchError(f"the row for {_name_of(line.key)} in {output.name} was made from another line than line "
                             f"{line.number} of {lines.name}; {anew}")
        is_done.append(digest is not None)
    for key in done:
        raise BatchError(f"{output.name} has a row for {_name_of(key)}, {lines.name} has no such line; {anew}")
    return Plan(is_done, n_errors, *models)


def check_model(plan, output, stamp):
    """Compare the model, which is loaded by now, with that of the rows that are there; another is a BatchError."""
    if plan.model not in (None, stamp.model):
        raise BatchError(f"{output.name} was made with another model, or by a version of pagedkv that computes or names "
                         f"it differently; use that one, or {_anew(output)}")


def _anew(output):
    return f"give another --output, or --overwrite to lose what {output.name} holds"


def _name_of(key):
    return f"line {key[1]}" if isinstance(key, tuple) else f"id {short(key)}"


# ---- The run ------------------------------------------------------------------------------------


class _StepStopped(BaseException):
    """A signal came during a step, which is given up: the rows to come are those of any later run."""


class _Signals(list):
    """Numbers of the signals that came; `in_step` says whether a step runs."""

    in_step = False


@contextmanager
def stop_signals():
    """Collect SIGINT and SIGTERM in a list for :func:`run`; a second one raises KeyboardInterrupt."""
    received = _Signals()

    def receive(number, _):
        received.append(number)
        if len(received) > 1:
            raise KeyboardInterrupt
        if received.in_step:
            raise _StepStopped

    before = {}
    if threading.current_thread() is threading.main_thread():  # Python lets no other set them
        before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class Progress:
    """Rows, tokens a second, blocks and the time to go: a bar on a terminal, else a line now and then.

    Parameters
    ----------
    plan : Plan
    engine : Engine
    stream : text file or None
        None: show nothing.
    """

    def __init__(self, plan, engine, stream):
        self._engine, self._stream, self._bar = engine, stream, None
        self._n_rows, self._n_done, self._n_before = plan.n_rows, plan.n_done, plan.n_done
        self._started_s = self._shown_s = time.monotonic()
        if stream is not None and stream.isatty():
            try:
                self._bar = progress_bar(total=plan.n_rows, initial=plan.n_done, file=stream, dynamic_ncols=True,
                                         bar_format="{percentage:3.0f}%|{bar}| {n:,}/{total:,} rows{postfix}")  # fmt: skip
            except OSError:
                self._stream = None

    def _figures(self, now):
        stats, n_blocks = self._engine.stats(), self._engine.pool.n_blocks
        rate = stats["tokens"] / max(1e-9, now - self._started_s)
        # Rows that are half there count half, or the first ones would seem to take for ever.
        n_new = self._n_done - self._n_before + self._n_begun()
        n_left = self._n_rows - self._n_before - n_new
        left = _duration((now - self._started_s) * max(0.0, n_left / n_new)) if n_new else "?"
        return f"{rate:,.1f} tokens/s, {stats['blocks_used']:,}/{n_blocks:,} blocks, {left} to go"

    def _n_begun(self):
        """Of the requests that run, the parts that are there, each of its longest possible text."""
        scheduler = self._engine.scheduler
        requests = {sample.request.number: sample.request for sample in (*scheduler.running, *scheduler.waiting)}
        return sum((1.0 if sample.finish_reason else sample.n_generated / request.max_tokens) / request.params.n
                   for request in requests.values() for sample in request.samples)  # fmt: skip

    def show(self, n_new):
        """Called with each row that is written, and after each step."""
        if self._stream is None:
            return
        self._n_done += n_new
        now = time.monotonic()
        if now - self._shown_s < (REPORT_S if self._bar is None else BAR_S):
            return
        self._shown_s = now
        try:
            if self._bar is not None:
                self._bar.n = self._n_done
                self._bar.set_postfix_str(self._figures(now))
            else:
                self._stream.write(f"pagedkv: {self._n_done:,} of {self._n_rows:,} rows, {self._figures(now)}\n")
                self._stream.flush()
        except OSError:  # nobody reads it any more; the rows matter
            self._stream = self._bar = None

    def close(self):
        try:
            if self._bar is not None:
                self._bar.n = self._n_done
                self._bar.set_postfix_str(self._figures(time.monotonic()))
                self._bar.close()
        except OSError:
            pass


def _duration(seconds):
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


@dataclass
class Outcome:
    """How a run ended.

    Attributes
    ----------
    n_rows, n_done : int
        Lines, and those whose rows are there now.
    n_errors : int
        Rows with an error.
    n_tokens : int
        Of this run's rows.
    n_too_large, n_blocks_needed : int
        Lines that got no row because the pool has fewer blocks than they need, and what the largest of them needs.
    signal : int or None
        What stopped it.
    """

    n_rows: int
    n_done: int
    n_errors: int
    n_tokens: int = 0
    n_too_large: int = 0
    n_blocks_needed: int = 0
    signal: int | None = None


def run(engine, lines, plan, output, stamp, defaults, chat, outcome, progress, received=()):
    """Run the lines that are left, and write their rows.

    Parameters
    ----------
    engine : Engine
    lines : Input
        As many of its lines as fill the engine are in memory at a time, and as many again wait.
    plan : Plan
    output : RowFile or RowStream
        Open.
    stamp : Stamp
    defaults, chat
        As of :func:`read_request`.
    outcome : Outcome
        Counted up as rows are written, so that it holds whatever is raised.
    progress : Progress
    received : list of int
        The run stops when a signal is in it: before the next step, or, with what :func:`stop_signals` gives, inside one.

    Raises
    ------
    OSError, BatchError
        A row could not be written; the input has lost lines. The rows before are there.
    """
    def finish(line, row):
        output.write({"id": line.id, "line": line.number, **row, "digest": stamp.row_digest(line)})
        outcome.n_done += 1
        outcome.n_errors += "error" in row
        progress.show(1)

    def coming():
        """The requests of the lines that are left. Lines that fail get their rows here, and cost no step."""
        for line, is_done in zip(lines, plan.is_done):
            if received:
                return
            if is_done:
                continue
            try:
                ids, params = read_request(line, engine.tokenizer, defaults, chat, engine.model.config.context_len)
                if _fits_pool(engine, ids, params, outcome):
                    yield line, ids, params
            except LineError as error:
                finish(line, error_row(error))

    def step():
        if not isinstance(received, _Signals):
            return engine.step()
        try:
            received.in_step = True
            return engine.step()
        except _StepStopped:
            return []
        finally:
            received.in_step = False

    with closing(engine.run(coming(), step)) as steps:
        for ended in steps:
            for line, request in ended:
                if isinstance(request.error, PoolExhausted):
                    raise request.error
                if request.error is not None:
                    finish(line, error_row(LineError("failed", str(request.error))))
                    continue
                row = answer_row(request)
                outcome.n_tokens += row["usage"]["completion_tokens"]
                finish(line, row)
            progress.show(0)
            if received:
                break
    if received:
        outcome.signal = received[0]
    elif outcome.n_done + outcome.n_too_large < outcome.n_rows:
        raise BatchError(f"{lines.name} was changed while it was read")


def check_fits(engine, ids, params):
    """Raise what keeps a request from running: a :class:`LineError`, or PoolExhausted, which is no fault of the line."""
    try:
        engine.check(ids, params)
    except PoolExhausted:
        raise
    except BoundsError as error:
        raise LineError("too_long", f"the prompt is too long: {error.message}") from None
    except (PagedKVError, ValueError) as error:
        raise LineError("bad_request", f"the prompt: {getattr(error, 'message', error)}") from None


def _fits_pool(engine, ids, params, outcome):
    """Whether the engine can run it; a pool that is too small is counted."""
    try:
        check_fits(engine, ids, params)
        return True
    except PoolExhausted:
        n_rows = len(ids) + min(params.max_tokens, engine.model.config.context_len - len(ids)) - 1
        outcome.n_too_large += 1
        outcome.n_blocks_needed = max(outcome.n_blocks_needed, -(-n_rows // engine.pool.block_size))
        return False
