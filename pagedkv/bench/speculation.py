"""Speculation beside plain decoding: tokens/s of both, and how many drafts were accepted.

    python -m pagedkv.bench.speculation [--model PATH_OR_NAME] [--weights float32] [--draft PATH_OR_NAME] [--kinds again,edit] ...

Four texts of each kind, one after the other (M = 1) and together (M = 4). again: a method of this package written
twice, and begun a third time. edit: written once, and begun under another name. summary: "Summarize the following text"
and "Repeat the most important sentences" of a short report, through the chat template. stories: four beginnings, with
nothing to look up. Both ways take turns, outputs are compared, and a first round, not counted, leaves the prompts in the
prefix cache, so that decoding is what is timed. Drafts come from the text itself, or, with --draft, from a model.
"""

import argparse
import inspect
import textwrap
import time
from statistics import median

import pagedkv as pk
from pagedkv.engine.prefix_cache import PrefixCache
from pagedkv.engine.request import Sample
from pagedkv.engine.sampler import Sampler
from pagedkv.engine.scheduler import Scheduler


REPORTS = (
    "The town library reopened on Monday after a renovation that took two years. The new reading room has large windows "
    "facing the river, and the children's section has doubled in size. The mayor said that the library had cost 3.2 million "
    "euros, of which half came from the regional government. Visitors can borrow up to ten books at a time, and the library "
    "is open every day except Sunday.",
    "Heavy rain caused floods in the valley on Thursday night. About 300 people had to leave their homes and spend the night "
    "in a school. The bridge over the river was closed, and trains were stopped between the two largest towns. Firefighters "
    "pumped water out of more than 100 cellars. No one was hurt, and most of the people returned home on Friday evening.",
)
ORDERS = "Summarize the following text.", "Repeat the most important sentences of this text, word for word."


def texts(tokenizer):
    """Kind -> four prompts."""
    codes = [textwrap.dedent(inspect.getsource(method))
             for method in (PrefixCache.extend, Sample.append, Sampler.logprobs, Scheduler._admit)]  # fmt: skip
    firsts = [code.splitlines()[0] for code in codes]
    return {
        "again": [f"{code}\n\n{code}\n\n{first}" for code, first in zip(codes, firsts)],
        "edit": [f"{code}\n\n{first.replace('def ', 'def new_')}" for code, first in zip(codes, firsts)],
        "summary": [tokenizer.apply_chat_template([{"role": "user", "content": f"{order}\n\n{report}"}], tokenize=False)
                    for order in ORDERS for report in REPORTS],
        "stories": ["The fox who learned to swim\n\n", "The history of Paris, in short:", "My first day in a new city",
                    "How a computer works"],
    }  # fmt: skip


def run(llm, calls, params):
    """The outputs, and what of stats() went up, with the time as ``s``."""
    before, started = llm.stats(), time.perf_counter()
    outs = [[out.outputs for out in llm.generate(prompts, params, use_tqdm=False)] for prompts in calls]
    spent, after = time.perf_counter() - started, llm.stats()
    names = "tokens", "steps", "drafted", "accepted"
    return outs, {name: after[name] - before[name] for name in names} | {"s": spent}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--kinds", default="again,edit,summary,stories")
    parser.add_argument("--draft", help="a model of the same vocabulary instead of prompt lookup")
    parser.add_argument("--temperature", type=float, default=0)
    parser.add_argument("--tokens", type=int, default=64, help="of each text")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    model = pk.LlamaModel.load(args.model, weights=args.weights)
    prompts = texts(model.tokenizer)
    llms = [pk.LLM(model, n_blocks=512, speculative=each) for each in (None, args.draft and {"model": args.draft} or "ngram")]
    params = pk.SamplingParams(temperature=args.temperature, seed=1, max_tokens=args.tokens, ignore_eos=True)
    for kind in args.kinds.split(","):
        for m, calls in ((1, [[text] for text in prompts[kind]]), (4, [prompts[kind]])):
            rounds = [[run(llm, calls, params) for llm in llms] for _ in range(1 + args.rounds)]
            (want, _), (got, counts) = rounds[-1]
            if want != got:
                raise AssertionError("outputs differ")
            plain, fast = ([each[i][1]["tokens"] / each[i][1]["s"] for each in rounds[1:]] for i in (0, 1))
            print(f"{kind:8} M = {m}  plain {median(plain):4.0f} tokens/s (best {max(plain):.0f})  "
                  f"speculative {median(fast):4.0f} (best {max(fast):.0f})  ratio {median(fast) / median(plain):.2f} "
                  f"(bests {max(fast) / max(plain):.2f})  accepted {counts['accepted']} of {counts['drafted']}, "
                  f"{counts['tokens']} tokens in {counts['steps']} steps", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
