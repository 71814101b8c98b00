"""Many clients of one model under asyncio: their requests share steps, and each reads its own stream."""

import asyncio

import pagedkv as pk


async def client(llm: pk.AsyncLLM, prompt: str, params: pk.SamplingParams) -> str:
    """Text of one request, put together from what each step brought."""
    parts = []
    async for output in llm.generate(prompt, params, delta=True):
        parts.append(output.outputs[0].text)
    return "".join(parts)


async def serve(model: pk.LlamaModel | str, prompts: list[str], max_tokens: int = 16) -> list[str]:
    """All clients at once; the answers in the order of `prompts`."""
    params = pk.SamplingParams(temperature=0, max_tokens=max_tokens)
    async with pk.AsyncLLM(model) as llm:
        return list(await asyncio.gather(*(client(llm, prompt, params) for prompt in prompts)))


if __name__ == "__main__":
    countries = ["France", "Spain", "Italy", "Japan"]
    answers = asyncio.run(serve("smollm2-135m", [f"The capital of {country} is" for country in countries]))
    for country, answer in zip(countries, answers):
        print(f"{country}:{answer!r}")
