"""The command: ``pagedkv generate`` and ``pagedkv info``."""

import argparse
import os
import sys
import time

import pagedkv as pk
from pagedkv import hub
from pagedkv.chat import ChatError
from pagedkv.formats import open_model
from pagedkv.generate import generate
from pagedkv.sampling import Sampling

BLOCK_SIZE = 16


class UsageError(Exception):
    """Something in what the user typed cannot be done; the message is one sentence."""


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UsageError(f"{message} (see {self.prog} --help)")


def _count(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


_count.__name__ = "count"  # argparse names the type in "invalid count value"


def _parser():
    parser = _Parser(prog="pagedkv", description="Batched Llama decoding on CPUs over a paged KV cache.")
    parser.add_argument("--version", action="version", version=f"pagedkv {pk.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)

    command = commands.add_parser(
        "generate", help="continue a prompt",
        description="Continue a prompt, one or several times from one prefill. Text goes to standard output as it "
        "comes, one sample after the other; the last line says how fast it was and what sharing saved.")  # fmt: skip
    command.add_argument("prompt", nargs="?", help="text to continue; standard input where missing or '-'")
    command.add_argument("-n", type=_count, default=1, metavar="N", help="samples (default: 1)")
    command.add_argument("--model", default="smollm2-135m", help="a .gguf file, a Hugging Face directory or a known "
                         "name (default: smollm2-135m)")  # fmt: skip
    command.add_argument("--chat", action="store_true", help="take the prompt as a user's message, through the "
                         "model's chat template")  # fmt: skip
    command.add_argument("--max-tokens", type=_count, default=128, metavar="N", help="tokens a sample (default: 128)")
    command.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0 is greedy (default: 0.8)")
    command.add_argument("--top-k", type=int, default=0, metavar="K", help="choose among the K likeliest tokens "
                         "(default: 0, all)")  # fmt: skip
    command.add_argument("--top-p", type=float, default=0.95, metavar="P", help="choose among the likeliest tokens "
                         "that make up probability P (default: 0.95)")  # fmt: skip
    command.add_argument("--seed", type=int, default=0, help="same seed, same text, on every machine (default: 0)")
    command.add_argument("--threads", type=_count, metavar="N", help="threads (default: the physical cores)")
    command.set_defaults(run=_generate)

    command = commands.add_parser("info", help="print a model's configuration",
                                  description="Print a model's configuration.")  # fmt: skip
    command.add_argument("model", help="a .gguf file, a Hugging Face directory or a known name")
    command.set_defaults(run=_info)
    return parser


def _read_prompt(args):
    if args.prompt not in (None, "-"):
        return args.prompt
    if args.prompt is None and sys.stdin.isatty():
        raise UsageError("give a prompt as an argument or on standard input")
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not UTF-8: {error.reason} at byte {error.start}") from None


class _Samples:
    """Prints n interleaved texts one after the other: the first that has not ended streams, the others wait."""

    def __init__(self, n, tokenizer):
        self.streams = [tokenizer.stream(continuing=True) for _ in range(n)]
        self.waiting = [""] * n
        self.ended = [False] * n
        self.shown = -1

    def push(self, sample, token, ends, stops):
        stream = self.streams[sample]
        self.waiting[sample] += "" if stops else stream.push(token)
        if ends:
            self.waiting[sample] += stream.finish()
            self.ended[sample] = True

    def show(self):
        n = len(self.streams)
        while self.shown < n:
            if self.shown >= 0:
                sys.stdout.write(self.waiting[self.shown])
                self.waiting[self.shown] = ""
                if not self.ended[self.shown]:
                    break
                sys.stdout.write("\n")
            self.shown += 1
            if n > 1 and self.shown < n:
                sys.stdout.write(f"--- sample {self.shown + 1} of {n} ---\n")
        sys.stdout.flush()


def _generate(args):
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    if args.threads:
        pk.set_num_threads(args.threads)
    prompt = _read_prompt(args)
    if not prompt:
        raise UsageError("the prompt is empty")
    model = pk.LlamaModel.load(args.model)
    tokenizer, config = model.tokenizer, model.config
    if args.chat:
        ids = tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
    else:
        ids = tokenizer.encode(prompt)
    if not ids:
        raise UsageError("the prompt has no tokens")
    if len(ids) >= config.context_len:
        raise UsageError(f"the prompt has {len(ids)} tokens, the model's context holds {config.context_len}")
    max_tokens = min(args.max_tokens, config.context_len - len(ids))
    stop_ids = frozenset(config.eos_token_ids) | frozenset(tokenizer.eos_token_ids)
    if args.n > 1 and args.temperature == 0:
        print("pagedkv: at temperature 0 all samples are the same", file=sys.stderr)

    # The full blocks of the prompt once, then every sample's own.
    n_shared = len(ids) // BLOCK_SIZE
    n_own = -(-(len(ids) + max_tokens) // BLOCK_SIZE) - n_shared
    pool = model.new_pool(n_blocks=n_shared + args.n * n_own + 1, block_size=BLOCK_SIZE)

    samples = _Samples(args.n, tokenizer)
    n_tokens = n_decoded = used = saved = 0
    started = first = time.perf_counter()
    for events in generate(model, pool, ids, args.n, max_tokens, sampling, stop_ids):
        if not n_tokens:
            first = time.perf_counter()
        else:
            n_decoded += len(events)
        n_tokens += len(events)
        used, saved = pool.n_blocks - pool.n_free, pool.n_saved
        for sample, token, ends in events:
            samples.push(sample, token, ends, token in stop_ids)
        samples.show()
    ended = time.perf_counter()
    rate = f"{n_decoded / (ended - first):.1f} tokens/s" if n_decoded else "no token decoded after the prompt's"
    print(f"[{n_tokens} tokens in {args.n} sample{'s' if args.n > 1 else ''}, {rate} on {pk.get_num_threads()} "
          f"threads; prompt of {len(ids)} tokens in {first - started:.2f} s; {used} blocks used, "
          f"{saved} saved by sharing]")  # fmt: skip


def _info(args):
    path = hub.find_model(args.model)
    with open_model(path) as file:
        config = file.config
        types, n_params, n_bytes = {}, 0, 0
        for name in file.names():
            tensor = file.tensor(name)
            types[tensor.dtype] = types.get(tensor.dtype, 0) + 1
            size = 1
            for dim in tensor.shape:
                size *= dim
            n_params += size
            n_bytes += tensor.raw.nbytes
        rows = [("file", path), ("parameters", f"{n_params:,}"), ("weight bytes", f"{n_bytes:,}"),
                ("weight types", ", ".join(f"{dtype} x {count}" for dtype, count in sorted(types.items())))]
        rows += [(name, getattr(config, name)) for name in config.__dataclass_fields__]
        rows.append(("KV bytes a token", f"{2 * 4 * config.n_layers * config.kv_dim:,}"))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        if isinstance(value, tuple):
            value = ", ".join(map(str, value)) if len(value) <= 8 else f"{len(value)} values"
        print(f"{name:<{width}}  {value}")


def main(argv=None):
    """Run the command; returns the exit status: 0, 2 for bad input, 130 for Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="replace")
    try:
        args = _parser().parse_args(argv)
        args.run(args)
        return 0
    except (UsageError, pk.PagedKVError, ChatError, OSError, MemoryError, ValueError) as error:
        if isinstance(error, BrokenPipeError):
            # The reader went away: no text is owed any more, and the interpreter must not flush again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        sentence = " ".join(str(error).split()) or type(error).__name__
        print(f"pagedkv: error: {sentence}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
