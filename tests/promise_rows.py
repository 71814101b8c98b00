"""Rows of a model as bits: what the promise's tests compare, here and in child processes.

As a script it runs one fixed workload and prints a JSON object whose ``sha256`` covers all logits, K and V::

    python promise_rows.py MODEL [--compute KIND] [--tokens N] [--kv-dtype TYPE] [--fpenv KIND] [--fork]
"""

import argparse
import ctypes
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pagedkv as pk

REAL_MODEL = "smollm2-135m"
RUN_SECONDS = 600  # of a child process; the limit only ends a hang
FORK_SECONDS = 60  # of a forked one, which takes less than one


class Rows(NamedTuple):
    """Consecutive rows of one sequence, from position 0."""

    logits: np.ndarray  # [n, vocab_size]
    k: np.ndarray  # [n_layers, n, kv_dim]
    v: np.ndarray


@cache
def _load_real_model(compute):
    try:
        return pk.LlamaModel.load(REAL_MODEL, compute=compute)
    except pk.ModelNotFound as error:
        return error


def real_model(compute="float32"):
    """The real model, loaded once; a skip that says why where it cannot be had (PAGEDKV_REQUIRE_MODEL=1: a failure)."""
    import pytest

    model = _load_real_model(compute)
    if isinstance(model, pk.LlamaModel):
        return model
    if os.environ.get("PAGEDKV_REQUIRE_MODEL") == "1":
        pytest.fail(str(model))
    pytest.skip(str(model))


def token_stream(seed, n, vocab_size):
    return np.random.default_rng(seed).integers(0, vocab_size, n)


def kv_rows(model, seq):
    """K and V of all layers, each [n_layers, len(seq), kv_dim], read back head by head."""
    config = model.config
    heads = [[seq.gather_head(layer, head, config.head_dim) for head in range(config.n_kv_heads)] for layer in range(config.n_layers)]
    return tuple(np.stack([np.concatenate([head[i] for head in layer], axis=1) for layer in heads]) for i in (0, 1))


def rows_in_chunks(model, tokens, chunk, kv_dtype="float32"):
    """Rows of `tokens` on a fresh sequence of a fresh pool."""
    pool = model.new_pool(n_tokens=len(tokens), dtype=kv_dtype)
    with model.new_sequence(pool, len(tokens)) as seq:
        logits = model.prefill(tokens, seq, chunk=chunk, all_logits=True)
        return Rows(logits, *kv_rows(model, seq))


def rows_alone(model, tokens, chunk=1, kv_dtype="float32"):
    """The measure of all tests: one token at a time, nothing beside it, on one thread."""
    n_threads = pk.get_num_threads()
    pk.set_num_threads(1)
    try:
        return rows_in_chunks(model, tokens, chunk, kv_dtype)
    finally:
        pk.set_num_threads(n_threads)


def assert_same_bits(got, want, what="rows"):
    """`==` on bytes: NaN equals itself, 0.0 and -0.0 differ."""
    assert got.shape == want.shape and got.dtype == want.dtype == np.float32, what
    differs = np.ascontiguousarray(got).view(np.uint32) != np.ascontiguousarray(want).view(np.uint32)
    if differs.any():
        at = tuple(int(i) for i in np.argwhere(differs)[0])
        raise AssertionError(f"{what}: {differs.sum()} of {differs.size} differ, first at {at}: {got[at]!r}, alone {want[at]!r}")


def assert_same_kv(model, seq, want):
    """K and V of every row of `seq` are those of `want`'s first rows."""
    k, v = kv_rows(model, seq)
    assert_same_bits(k, want.k[:, : len(seq)], "K [layer, position, kv_dim]")
    assert_same_bits(v, want.v[:, : len(seq)], "V [layer, position, kv_dim]")


def separate_forward(config, tensor, tokens, stored=lambda rows: rows, product=None):
    """Rows of one sequence out of single operations over contiguous buffers: nothing paged, batched or fused.

    `tensor(name)` gives float32 weights by Hugging Face name; `stored(rows)` what is left of K or V in a cache;
    `product(x, name)` multiplies by one of the weights, in float32 by default.
    """
    if product is None:
        def product(x, name):
            return pk.matmul(x, pk.pack(tensor(name)))

    n, positions = len(tokens), np.arange(len(tokens))
    inv_freq = pk.rope_inv_freq(
        config.rope_theta, config.rope_dim, config.rope_scaling, config.rope_factor, config.rope_low_freq_factor,
        config.rope_high_freq_factor, config.rope_original_context_len, config.rope_freq_factors,
    )  # fmt: skip

    def linear(x, name):
        y = product(x, f"{name}.weight")
        return y + tensor(f"{name}.bias") if config.qkv_bias and name[-6:] in ("q_proj", "k_proj", "v_proj") else y

    def rotated(x, n_heads, norm):
        heads = x.reshape(n, n_heads, config.head_dim)
        if config.qk_norm:
            heads = pk.rmsnorm(heads, tensor(norm), config.norm_eps)
        return pk.rope(heads, positions, inv_freq=inv_freq).reshape(n, -1)

    embedding = tensor("model.embed_tokens.weight")
    hidden, keys, values = embedding[tokens], [], []
    for i in range(config.n_layers):
        layer = f"model.layers.{i}"
        x = pk.rmsnorm(hidden, tensor(f"{layer}.input_layernorm.weight"), config.norm_eps)
        q = rotated(linear(x, f"{layer}.self_attn.q_proj"), config.n_heads, f"{layer}.self_attn.q_norm.weight")
        k = rotated(linear(x, f"{layer}.self_attn.k_proj"), config.n_kv_heads, f"{layer}.self_attn.k_norm.weight")
        keys.append(stored(k))
        values.append(stored(linear(x, f"{layer}.self_attn.v_proj")))
        x = pk.attention(
            q, keys[-1], values[-1], n_heads=config.n_heads, n_kv_heads=config.n_kv_heads, head_dim=config.head_dim, window=config.window(i)
        )
        hidden = hidden + linear(x, f"{layer}.self_attn.o_proj")
        x = pk.rmsnorm(hidden, tensor(f"{layer}.post_attention_layernorm.weight"), config.norm_eps)
        x = pk.swiglu(linear(x, f"{layer}.mlp.gate_proj"), linear(x, f"{layer}.mlp.up_proj"))
        hidden = hidden + linear(x, f"{layer}.mlp.down_proj")
    hidden = pk.rmsnorm(hidden, tensor("model.norm.weight"), config.norm_eps)
    head = "model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"
    return Rows(product(hidden, head), np.stack(keys), np.stack(values))


# -- the fixed workload --------------------------------------------------------------------------


def workload_sha256(model, n_tokens, kv_dtype="float32"):
    """A prompt in chunks, a fork of it half way, then one ragged step of the two and a third: all bits hashed."""
    vocab_size = model.config.vocab_size
    tokens, other = token_stream(1, n_tokens + 1, vocab_size), token_stream(2, 4, vocab_size)
    pool = model.new_pool(n_tokens=2 * n_tokens + 64, dtype=kv_dtype)
    first, third = (model.new_sequence(pool, n_tokens + 16) for _ in range(2))
    parts = [model.prefill(tokens[:-1], first, chunk=max(5, n_tokens // 2), all_logits=True)]
    second = first.fork()
    second.truncate(n_tokens // 2)
    parts.append(model.step([(first, tokens[-1:]), (second, other[:2]), (third, other[2:])], all_logits=True))
    for seq in (first, second, third):
        parts += kv_rows(model, seq)
    digest = hashlib.sha256()
    for part in parts:
        digest.update(np.ascontiguousarray(part))
    return digest.hexdigest()


def can_set_fpenv():
    return platform.machine() in ("x86_64", "AMD64") and platform.libc_ver()[0] == "glibc"


# Bits of MXCSR: flush-to-zero and denormals-are-zero; rounding down, up, to zero (Intel SDM volume 1, 10.2.3).
FPENV_BITS = {"ftz": 0x8040, "down": 0x2000, "up": 0x4000, "zero": 0x6000}


def _mxcsr(bits=None):
    """MXCSR of this thread, after setting its mode bits where `bits` is given."""
    libm = ctypes.CDLL("libm.so.6")
    env = (ctypes.c_uint32 * 8)()  # glibc's fenv_t: 28 bytes of the x87's, then MXCSR
    libm.fegetenv(env)
    if bits is not None:
        env[7] = env[7] & ~0xE040 | bits
        libm.fesetenv(env)
        libm.fegetenv(env)
    return env[7] & 0xE040


def _in_fork(work):
    """`work()` in a forked child; empty where it failed or hung."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(FORK_SECONDS)
        try:
            os.write(write_end, work().encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        result = pipe.read()
    os.waitpid(child, 0)
    return result


def child_env(**env):
    """This process's environment and `env`, in which a child finds the same package."""
    path = [str(Path(pk.__file__).parents[1]), os.environ.get("PYTHONPATH")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))} | env


def run_child(model, *options, **env):
    """Run this file as a script, with further environment variables; its JSON object."""
    done = subprocess.run(
        [sys.executable, __file__, str(model), *map(str, options)],
        env=child_env(**env), capture_output=True, text=True, timeout=RUN_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--compute", default="float32")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--kv-dtype", default="float32")
    parser.add_argument("--fpenv", choices=FPENV_BITS)
    parser.add_argument("--fork", action="store_true")
    args = parser.parse_args()
    model = pk.LlamaModel.load(args.model, compute=args.compute)
    result = {"isa": pk.isa(), "num_threads": pk.get_num_threads()}
    if args.fpenv:
        assert _mxcsr(FPENV_BITS[args.fpenv]) == FPENV_BITS[args.fpenv]
    result["sha256"] = workload_sha256(model, args.tokens, args.kv_dtype)
    if args.fpenv:
        result["fpenv_kept"] = _mxcsr() == FPENV_BITS[args.fpenv]
    if args.fork:
        result["sha256_in_fork"] = _in_fork(lambda: workload_sha256(model, args.tokens, args.kv_dtype))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
