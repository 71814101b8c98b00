"""Offline batches: a file of prompts in, a file of rows out, one JSON object a line (the formats: docs/formats.md).

Rows are written as their requests finish, each whole, so that whatever ends the run - Ctrl-C, kill -9, a full disk -
the file holds finished rows and at most the beginning of one more. The same command then goes on. Writing in the order
of the input instead would hold finished rows back behind a slow one, and lose them; ``line`` in each row gives the
order.

A row depends on its line, the model and the parameters alone: the engine's tokens do not depend on what runs beside
them, and a line's seed is its own or the command's, never one of arrival. So pieces of a run add up to the whole run,
byte for byte. Each row carries a digest of these three, and rows of another line, model or parameters are refused
rather than mixed. What depends on the run, such as a pool too small for a request, gives no row.
"""

from pagedkv.batch.job import Outcome, Plan, Progress, check_model, make_plan, run, stop_signals
from pagedkv.batch.lines import Input, Line, LineError, changed_params, check_params, read_request
from pagedkv.batch.rows import BatchError, RowFile, RowStream, Stamp, open_output

__all__ = ["BatchError", "Input", "Line", "LineError", "Outcome", "Plan", "Progress", "RowFile", "RowStream", "Stamp",
           "changed_params", "check_model", "check_params", "make_plan", "open_output", "read_request", "run",
           "stop_signals"]
