"""The oracle: every operation and the whole model in float64 NumPy, as the papers write them.

Independent of the package under test. Nothing is blocked, cached or batched: one sequence, one pass.
"""

import numpy as np


def f64(x):
    return np.asarray(x, np.float64)


def exp(x):
    return np.exp(f64(x))


def softmax(x):
    """Over the last axis."""
    x = f64(x)
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def rmsnorm(x, gamma, eps):
    """Over the last axis. Zhang and Sennrich 2019, equation 4, with epsilon inside the root."""
    x = f64(x)
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * f64(gamma)


def swiglu(gate, up):
    """silu(gate) * up. Shazeer 2020."""
    gate = f64(gate)
    with np.errstate(over="ignore"):  # exp(-gate) may be inf: silu is then -0
        return gate / (1 + np.exp(-gate)) * f64(up)


def matmul(x, w):
    """x [m, k] times the transpose of w [n, k]."""
    return f64(x) @ f64(w).T


def inv_freq(theta, rope_dim, scaling="none", factor=1.0, low_freq_factor=1.0, high_freq_factor=4.0,
             original_context_len=8192, freq_factors=None):  # fmt: skip
    """Radians a position for each pair [rope_dim / 2].

    Su et al. 2021, section 3.2.2; "linear" is Chen et al. 2023 (position interpolation); "llama3" follows the
    Llama 3.1 release, in wavelengths: pairs whose wave is shorter than context / high_freq_factor stay, longer
    than context / low_freq_factor are slowed by factor, those between are blended.
    """
    out = theta ** (-np.arange(0, rope_dim, 2, dtype=np.float64) / rope_dim)
    if scaling == "linear":
        out = out / factor
    elif scaling == "llama3":
        for i, freq in enumerate(out):
            wavelength = 2 * np.pi / freq
            if wavelength > original_context_len / low_freq_factor:
                out[i] = freq / factor
            elif wavelength >= original_context_len / high_freq_factor:
                smooth = (original_context_len / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
                out[i] = (1 - smooth) * freq / factor + smooth * freq
    elif scaling != "none":
        raise ValueError(scaling)
    return out if freq_factors is None else out / f64(freq_factors)


def rope(x, positions, frequencies):
    """Rotate heads x [n, n_heads, head_dim], NeoX order: dimension i turns with i + len(frequencies).

    Dimensions beyond 2 * len(frequencies) stay.
    """
    x, half = f64(x), len(frequencies)
    angle = f64(positions)[:, None, None] * frequencies  # [n, 1, half]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle), rest], axis=-1)


def attention(q, k, v, n_heads, n_kv_heads, head_dim, causal=True, scale=None, window=None):
    """Rows of q are the last n of k's total_k positions; query head h reads KV head h // (n_heads // n_kv_heads).

    Position i sees positions j with i - window < j <= i (Jiang et al. 2023, section 2; transformers' masking_utils).

    q [n, n_heads * head_dim];  k, v [total_k, n_kv_heads * head_dim];  result as q.
    """
    n, total_k, group = len(q), len(k), n_heads // n_kv_heads
    q = f64(q).reshape(n, n_heads, head_dim)
    k, v = (f64(a).reshape(total_k, n_kv_heads, head_dim) for a in (k, v))
    scale = 1 / np.sqrt(head_dim) if scale is None else scale
    hidden = np.arange(total_k) > total_k - n + np.arange(n)[:, None] if causal else np.zeros((n, total_k), bool)
    if window is not None:
        hidden |= np.arange(total_k) <= total_k - n + np.arange(n)[:, None] - window
    out = np.empty_like(q)
    for h in range(n_heads):
        scores = q[:, h] @ k[:, h // group].T * scale
        out[:, h] = softmax(np.where(hidden, -np.inf, scores)) @ v[:, h // group]
    return out.reshape(n, n_heads * head_dim)


def config_inv_freq(config):
    """The frequencies of a LlamaConfig."""
    return inv_freq(
        config.rope_theta, config.rope_dim, config.rope_scaling, config.rope_factor, config.rope_low_freq_factor,
        config.rope_high_freq_factor, config.rope_original_context_len, config.rope_freq_factors,
    )  # fmt: skip


def forward(config, tensors, tokens):
    """Logits of a Llama, Mistral, Qwen2 or Qwen3 model for every position of one sequence.

    Parameters
    ----------
    config : pagedkv.LlamaConfig
    tensors : dict of str to array
        By Hugging Face name (``model.layers.0.self_attn.q_proj.weight``), matrices ``[out, in]``.
    tokens : sequence of int
        ``[n]``, positions 0 to n - 1.

    Returns
    -------
    numpy.ndarray
        float64 ``[n, vocab_size]``.
    """
    n, frequencies = len(tokens), config_inv_freq(config)
    positions = np.arange(n)

    def linear(x, name):
        y = matmul(x, tensors[f"{name}.weight"])
        return y + f64(tensors[f"{name}.bias"]) if f"{name}.bias" in tensors else y

    def rotated(x, n_heads, norm):
        heads = x.reshape(n, n_heads, config.head_dim)
        if config.qk_norm:
            heads = rmsnorm(heads, tensors[norm], config.norm_eps)
        return rope(heads, positions, frequencies).reshape(n, -1)

    embedding = f64(tensors["model.embed_tokens.weight"])
    hidden = embedding[np.asarray(tokens)]
    for i in range(config.n_layers):
        layer = f"model.layers.{i}"
        x = rmsnorm(hidden, tensors[f"{layer}.input_layernorm.weight"], config.norm_eps)
        q = rotated(linear(x, f"{layer}.self_attn.q_proj"), config.n_heads, f"{layer}.self_attn.q_norm.weight")
        k = rotated(linear(x, f"{layer}.self_attn.k_proj"), config.n_kv_heads, f"{layer}.self_attn.k_norm.weight")
        v = linear(x, f"{layer}.self_attn.v_proj")
        window = None if i in config.full_layers else config.sliding_window
        x = attention(q, k, v, config.n_heads, config.n_kv_heads, config.head_dim, window=window)
        hidden = hidden + linear(x, f"{layer}.self_attn.o_proj")
        x = rmsnorm(hidden, tensors[f"{layer}.post_attention_layernorm.weight"], config.norm_eps)
        x = swiglu(linear(x, f"{layer}.mlp.gate_proj"), linear(x, f"{layer}.mlp.up_proj"))
        hidden = hidden + linear(x, f"{layer}.mlp.down_proj")
    hidden = rmsnorm(hidden, tensors["model.norm.weight"], config.norm_eps)
    return hidden @ f64(tensors.get("lm_head.weight", embedding)).T
