"""What each stored code stands for: exact float32 values of every weight format read.

Values are those of ggml's reference dequantisation (``gguf.quants.dequantize``,
``dequantize_row_*`` in ggml-quants.c), to the last bit: each product and each sum
below is rounded to float32 once, in the order written. (All products but the last of q6_k
are exact: 11 bits of a float16, at most 6 + 5 of the codes. So a kernel may fuse them with the sum.)
Block layouts: ggml-common.h, ``block_q4_0`` to ``block_q6_K``.
"""

import numpy as np

from pagedkv.errors import FormatError

# name: (values a block, bytes a block). A scale or minimum is a float16 (2 bytes).
BLOCKS = {
    "f32": (1, 4),
    "f16": (1, 2),
    "bf16": (1, 2),
    "q8_0": (32, 2 + 32),  # scale, 32 int8
    "q4_0": (32, 2 + 16),  # scale, 32 nibbles
    "q4_1": (32, 2 + 2 + 16),  # scale, minimum, nibbles
    "q5_0": (32, 2 + 4 + 16),  # scale, fifth bits, nibbles
    "q5_1": (32, 2 + 2 + 4 + 16),  # scale, minimum, fifth bits, nibbles
    "q4_k": (256, 2 + 2 + 12 + 128),  # scale, minimum, 8 + 8 six-bit factors, nibbles
    "q5_k": (256, 2 + 2 + 12 + 32 + 128),  # the same, with fifth bits before the nibbles
    "q6_k": (256, 128 + 64 + 16 + 2),  # nibbles, upper two bits, 16 int8 factors, scale
}

# Floats expanded at once. 2**16 keep a chunk (256 KiB) and its codes inside a 1 MiB L2.
CHUNK_LEN = 1 << 16


def row_nbytes(dtype, k):
    """Bytes of one stored row of ``k`` values.

    Raises
    ------
    FormatError
        ``dtype`` is not read here, or ``k`` is not a multiple of its block.
    """
    if dtype not in BLOCKS:
        raise FormatError(f"type {dtype!r} is not read here; known are {', '.join(BLOCKS)}")
    block_len, block_nbytes = BLOCKS[dtype]
    if k % block_len:
        raise FormatError(f"a row of {k} values is no whole number of {dtype} blocks of {block_len}")
    return k // block_len * block_nbytes


def dequantize(raw, dtype, shape, row_order=None):
    """Expand stored rows to float32.

    Parameters
    ----------
    raw : uint8 array, C-contiguous
        The stored rows, ``shape[0] * row_nbytes(dtype, shape[1])`` bytes.
    dtype : str
        A key of ``BLOCKS``.
    shape : (n, k)
    row_order : int array [m], optional
        Result row ``i`` is stored row ``row_order[i]``; all rows in stored order by default.

    Returns
    -------
    float32 array [m, k], new and C-contiguous
        Temporary memory is at most that of two chunks of ``CHUNK_LEN`` floats (or of one row,
        where a row is longer).

    Examples
    --------
    >>> block = np.frombuffer(np.float16(0.5).tobytes() + bytes(range(32)), np.uint8)
    >>> dequantize(block, "q8_0", (1, 32))[0, :4].tolist()
    [0.0, 0.5, 1.0, 1.5]
    """
    n, k = shape
    nbytes = row_nbytes(dtype, k)
    if raw.size != n * nbytes:
        raise FormatError(f"{n} rows of {k} {dtype} values take {n * nbytes} bytes, not {raw.size}")
    rows = raw.reshape(n, nbytes)
    out = np.empty((n if row_order is None else len(row_order), k), np.float32)
    block_len, block_nbytes = BLOCKS[dtype]
    expand = _EXPAND[dtype]
    step = max(1, CHUNK_LEN // max(1, k))
    # Damaged scales (infinite, NaN) are values like any other: 0 * inf is NaN, without a warning.
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, len(out), step):
            stop = min(start + step, len(out))
            chosen = slice(start, stop) if row_order is None else row_order[start:stop]
            expand(rows[chosen].reshape(-1, block_nbytes), out[start:stop].reshape(-1, block_len))
    return out


# Each function below: blocks uint8 [b, block_nbytes] -> out float32 [b, block_len], filled.


def _halfs(blocks, at):
    """The float16 at byte ``at`` of each block, as float32 [b, 1]."""
    return blocks[:, at : at + 2].copy().view("<f2").astype(np.float32)


def _f32(blocks, out):
    out[...] = blocks.view("<f4")


def _f16(blocks, out):
    out[...] = blocks.view("<f2")


def _bf16(blocks, out):
    # A bfloat16 is the upper half of the float32 with the same value.
    np.left_shift(blocks.view("<u2"), np.uint32(16), out=out.view(np.uint32))


def _q8_0(blocks, out):
    np.multiply(blocks[:, 2:].view(np.int8), _halfs(blocks, 0), out=out)


def _nibbles(packed):
    """Codes [b, 2 * w] of packed [b, w]: all low nibbles, then all high ones."""
    width = packed.shape[1]
    codes = np.empty((len(packed), 2 * width), np.uint8)
    np.bitwise_and(packed, 15, out=codes[:, :width])
    np.right_shift(packed, 4, out=codes[:, width:])
    return codes


def _q4_0(blocks, out):
    np.subtract(_nibbles(blocks[:, 2:]), np.float32(8), out=out)
    out *= _halfs(blocks, 0)


def _q4_1(blocks, out):
    np.multiply(_nibbles(blocks[:, 4:]), _halfs(blocks, 0), out=out)
    out += _halfs(blocks, 2)


def _five_bits(high, low):
    """Codes [b, 32]: bit ``i`` of ``high`` [b, 4] (little-endian) is the fifth bit of code ``i``."""
    codes = np.unpackbits(high, axis=1, bitorder="little")
    codes <<= 4
    codes |= _nibbles(low)
    return codes


def _q5_0(blocks, out):
    np.subtract(_five_bits(blocks[:, 2:6], blocks[:, 6:]), np.float32(16), out=out)
    out *= _halfs(blocks, 0)


def _q5_1(blocks, out):
    np.multiply(_five_bits(blocks[:, 4:8], blocks[:, 8:]), _halfs(blocks, 0), out=out)
    out += _halfs(blocks, 2)


def _six_bit_factors(packed):
    """Scales and minima, uint8 [b, 8] each, from the 12 bytes of a Q4_K or Q5_K block.

    Bytes 0-3 and 4-7 hold scales and minima 0-3 in their low six bits, and the upper two
    bits of scales and minima 4-7; bytes 8-11 hold the low nibbles of the latter two.
    """
    first, second, last = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (last & 15) | (first >> 6 << 4)], axis=1)
    minima = np.concatenate([second & 63, (last >> 4) | (second >> 6 << 4)], axis=1)
    return scales, minima


def _scale_minus_minimum(blocks, codes, out):
    """out = (d * scale) * code - (dmin * minimum), for codes [b, 8, 32]."""
    scales, minima = _six_bit_factors(blocks[:, 4:16])
    scales = _halfs(blocks, 0) * scales
    minima = _halfs(blocks, 2) * minima
    values = out.reshape(-1, 8, 32)
    np.multiply(codes, scales[:, :, None], out=values)
    values -= minima[:, :, None]


def _q4_k(blocks, out):
    # Each 32 bytes hold sub-blocks 2i (low nibbles) and 2i + 1 (high nibbles).
    codes = _nibbles(blocks[:, 16:].reshape(-1, 32))
    _scale_minus_minimum(blocks, codes.reshape(-1, 8, 32), out)


def _q5_k(blocks, out):
    codes = _nibbles(blocks[:, 48:].reshape(-1, 32)).reshape(-1, 8, 32)
    high = blocks[:, 16:48]
    for i in range(8):  # bit i of each byte belongs to sub-block i
        codes[:, i] |= (high >> i & 1) << 4
    _scale_minus_minimum(blocks, codes, out)


def _q6_k(blocks, out):
    # Two halves of 128 values, each four quarters of 32: the low nibbles of 32 + 32 bytes,
    # then their high nibbles; two bits of each upper byte belong to each quarter in turn.
    codes = _nibbles(blocks[:, :128].reshape(-1, 64)).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 32)
    for i in range(4):
        codes[:, :, i] |= (high >> 2 * i & 3) << 4
    scales = _halfs(blocks, 208) * blocks[:, 192:208].view(np.int8)
    values = out.reshape(-1, 16, 16)
    np.subtract(codes.reshape(-1, 16, 16), np.float32(32), out=values)
    values *= scales[:, :, None]


_EXPAND = {
    "f32": _f32,
    "f16": _f16,
    "bf16": _bf16,
    "q8_0": _q8_0,
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
}
