"""An OpenAI-compatible server over AsyncLLM: routes translate, the engine works. Needs ``pip install "pagedkv[server]"``."""
