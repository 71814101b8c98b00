"""An OpenAI-compatible server over AsyncLLM: routes translate, the engine works. It is the extra ``pagedkv[server]``."""
