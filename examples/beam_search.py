"""Beam search: all beams in one step, each new beam a fork that copies nothing."""

import numpy as np
import pagedkv as pk


def beam_search(
    model: pk.LlamaModel, prompt: list[int], width: int = 4, n_tokens: int = 16
) -> list[tuple[float, list[int]]]:
    """The `width` likeliest continuations found: (log-probability, tokens), best first."""
    pool = model.new_pool(n_tokens=len(prompt) + 2 * width * (n_tokens + 16))  # 16: partly filled blocks
    first = model.new_sequence(pool)
    logits = model.prefill(prompt, first)[None]  # [n_beams, vocab_size]
    beams: list[tuple[float, list[int], pk.Sequence]] = [(0.0, [], first)]
    for step in range(n_tokens):
        candidates = []
        for i, (score, _, _) in enumerate(beams):
            row = logits[i].astype(np.float64)
            logprobs = row - row.max() - np.log(np.exp(row - row.max()).sum())
            best = np.argsort(-logprobs, kind="stable")[:width]
            candidates += [(score + float(logprobs[token]), i, int(token)) for token in best]
        candidates.sort(key=lambda candidate: -candidate[0])
        grown = [(score, beams[i][1] + [token], beams[i][2].fork()) for score, i, token in candidates[:width]]
        for _, _, seq in beams:
            seq.free()  # blocks that a fork holds stay
        beams = grown
        if step + 1 < n_tokens:
            logits = model.decode_step([tokens[-1] for _, tokens, _ in beams], [seq for _, _, seq in beams])
    return [(score, tokens) for score, tokens, _ in beams]


if __name__ == "__main__":
    model = pk.LlamaModel.load("smollm2-135m")
    for score, tokens in beam_search(model, model.tokenizer.encode("The capital of France is")):
        print(f"{score:8.3f}  {model.tokenizer.decode(tokens)!r}")
