"""Makes docs/pool.png: the server's page over the real model, a few requests into it. `python tests/pool_picture.py OUT.png`

The engine is held after a fixed number of steps and all seeds are fixed, so the page shows the same blocks and texts each time;
only tokens/s is the machine's.
"""

import argparse
import shutil

import test_page
from promise_rows import REAL_MODEL
from test_page import FLAGS, Served, Shown, asked, until

import pagedkv as pk

test_page.SECONDS = 900  # of the real model on a busy machine

RULES = ("You are the guide of a small museum by the sea. Answer in two or three sentences, in plain words, and say only what you "
         "know. The museum has three rooms: the first shows fishing boats and nets, the second the storms of the last two "
         "hundred years, the third what children of the town have painted. It is open from ten to five, closed on Mondays, "
         "and free for everybody under sixteen. The lighthouse beside it may be climbed when the wind is weak.\n\n")
OTHERS = (("What can I see in the second room?", 4, 130), ("May my daughter climb the lighthouse?", 3, 130))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--width", type=int, default=1280)
    args = parser.parse_args()
    from playwright.sync_api import sync_playwright  # here, as pytest imports this file to look for doctests

    pk.set_num_threads(1)
    served = Served(pk.LlamaModel.load(REAL_MODEL), REAL_MODEL, gated=True, n_blocks=168)
    served.llm._engine._end_ids = frozenset(served.llm.model.config.eos_token_ids)
    try:
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
            shown = Shown(browser, served, color_scheme="dark" if args.dark else "light")
            shown.page.set_viewport_size({"width": args.width, "height": 900})
            shown.until("pool && model")
            answers, threads = [], []

            def ask(prompt, n, max_tokens):
                n_before = len(served.map().samples)
                threads.append(asked(served, answers, model=REAL_MODEL, prompt=prompt, n=n, max_tokens=max_tokens, seed=7,
                                     ignore_eos=False))  # fmt: skip
                until(lambda: len(served.map().samples) > n_before)

            ask("The old harbour of the town is known for", 5, 24)  # ends, and leaves its blocks to the cache
            served.gate.let(30)
            for other in OTHERS:
                ask(f"{RULES}Visitor: {other[0]}\nGuide:", *other[1:])
                served.gate.let(8)
            n_before = len(served.map().samples)
            shown.send(f"{RULES}Visitor: When are you open, and what does it cost?\nGuide:", n=8, max_tokens=130, seed=7)
            until(lambda: len(served.map().samples) > n_before)
            served.gate.let(45)
            shown.catch_up()
            shown.until("answers[0].number !== undefined && answers[0].samples.every((sample) => sample.text.textContent)")
            shown.page.evaluate("document.activeElement.blur(); flashes.clear(); redrawMarks(); $('prompt').scrollTop = 1e6;"
                                "document.querySelectorAll('#news time').forEach((each) => each.remove())")  # fmt: skip
            shown.page.wait_for_timeout(300)
            shown.page.screenshot(path=args.out)
            browser.close()
    finally:
        served.llm.shutdown()
        served.end()


if __name__ == "__main__":
    main()
