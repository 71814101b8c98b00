"""Self-consistency: sample one question n times from one prefill, and take the answer that most samples agree on."""

import re
from collections import Counter

import pagedkv as pk


def last_number(text: str) -> str | None:
    """The number that a text ends on; None where it has none."""
    found = re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))
    return found[-1] if found else None


def vote(llm: pk.LLM, question: str, n: int = 16, max_tokens: int = 96, seed: int = 1) -> list[tuple[str, int]]:
    """Answers and how many samples gave each, the most frequent first; samples without a number do not vote."""
    params = pk.SamplingParams(n=n, temperature=0.8, top_p=0.95, seed=seed, max_tokens=max_tokens)
    (out,) = llm.chat([{"role": "user", "content": question}], params, use_tqdm=False)
    answers = [last_number(sample.text) for sample in out.outputs]
    return Counter(answer for answer in answers if answer is not None).most_common()


if __name__ == "__main__":
    votes = vote(pk.LLM("smollm2-135m"), "Tom has 3 apples and buys 4 more. How many apples does he have?")
    for answer, count in votes:
        print(f"{count:3d} x {answer}")
