"""Answer multiple choice questions by the log-probability of each choice; contexts are computed once and shared."""

import pagedkv as pk

QUESTIONS = [
    ("The capital of France is", [" Paris", " Berlin", " Madrid"]),
    ("Water is made of hydrogen and", [" oxygen", " iron", " gold"]),
    ("The opposite of hot is", [" cold", " green", " seven"]),
]


def choose(model: pk.LlamaModel, questions: list[tuple[str, list[str]]]) -> list[int]:
    """Index of the likeliest choice of each (context, choices), by log-probability a character."""
    encode = model.tokenizer.encode
    pairs = [
        (encode(context), encode(choice, add_special_tokens=False))
        for context, choices in questions
        for choice in choices
    ]
    scores = iter(pk.score(model, pairs))  # all questions in few batches
    best = []
    for _, choices in questions:
        by_length = [next(scores).logprob / len(choice) for choice in choices]
        best.append(by_length.index(max(by_length)))
    return best


if __name__ == "__main__":
    for (context, choices), i in zip(QUESTIONS, choose(pk.LlamaModel.load("smollm2-135m"), QUESTIONS)):
        print(context + choices[i])
