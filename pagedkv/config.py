"""The shape of a model: what a file's header says, in one vocabulary for all formats."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LlamaConfig:
    """Dimensions and constants of a Llama-family model.

    Every count is positive. ``n_heads`` is a multiple of ``n_kv_heads``; ``hidden_dim``
    need not equal ``n_heads * head_dim``.

    Attributes
    ----------
    family : str
        ``"llama"``, ``"mistral"``, ``"qwen2"`` or ``"qwen3"``; a Mistral model in GGUF is a ``"llama"``.
    norm_eps : float
        RMSNorm's epsilon.
    rope_theta : float
        Base of the rotary frequencies.
    rope_dim : int
        Dimensions of a head that rotate; even, at most ``head_dim``.
    rope_scaling : str
        ``"none"``, ``"linear"`` or ``"llama3"``.
    rope_factor, rope_low_freq_factor, rope_high_freq_factor : float
        Parameters of the scaling; ``rope_factor`` alone for ``"linear"``.
    rope_original_context_len : int
        Context length, in tokens, before Llama-3 scaling.
    rope_freq_factors : tuple of float or None
        Divisors of the ``rope_dim // 2`` frequencies, as a GGUF file stores Llama-3
        scaling (tensor ``rope_freqs.weight``).
    context_len : int
        Tokens the model was trained for.
    tied_embeddings : bool
        The output head is the embedding.
    qkv_bias : bool
        Q, K and V projections add a bias.
    qk_norm : bool
        Each head of Q and K goes through an RMSNorm of its own before it is rotated.
    sliding_window : int or None
        Positions that a row of a layer with a window sees, its own the last of them; None: no layer has one.
    full_layers : tuple of int
        Layers without a window in spite of `sliding_window`, ascending.
    bos_token_id : int or None
    eos_token_ids : tuple of int
        Every id that ends a text; generation stops on each.
    """

    family: str
    n_layers: int
    hidden_dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    norm_eps: float
    rope_theta: float
    rope_dim: int
    context_len: int
    rope_scaling: str = "none"
    rope_factor: float = 1.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_context_len: int = 8192
    rope_freq_factors: tuple[float, ...] | None = None
    tied_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    full_layers: tuple[int, ...] = ()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def kv_dim(self) -> int:
        """Floats of K (or V) a token and layer: ``n_kv_heads * head_dim``."""
        return self.n_kv_heads * self.head_dim

    def window(self, layer: int) -> int | None:
        """Positions that a row of this layer sees at most, or None."""
        return None if layer in self.full_layers else self.sliding_window

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.n_heads // self.n_kv_heads
