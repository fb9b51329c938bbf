# SPDX-License-Identifier: MIT
"""A decoder-only transformer assembled from attention.py: the Llama family's arithmetic in plain functions.

    python decoder.py           train a byte-level model on Python's documentation, measure it, let it write
    python decoder.py --help    everything else

    logits = decoder(params, tokens)                       # training: all positions at once
    tokens = generate(params, prompt, num_tokens=100)      # writing: one position at a time, with a KV cache

Axes: B batch, T query length, S cache length, N query heads, K key/value heads, H head dimension, D model
dimension, F hidden width of the MLP, V vocabulary, L layers. [B T, D] is an array whose first axis is B and T in
one. This file needs attention.py beside it; only `main` also needs minijax_train.py, whose train step and loop it
shares.
"""
import argparse
import bz2
import functools
import lzma
import math
import numbers
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

import attention

# ---------------------------------------------------------------- parameters


def init_decoder(key, *, vocab_size, num_layers, model_dim, num_heads, num_kv_heads=None, head_dim=None,
                 mlp_dim=None):
    """Parameters of a decoder, all float32:

        {"embedding": [V, D], "final_norm": [D], "output": [D, V],
         "layers": {"attention": {"wq": [L, D, N, H], "wk": [L, D, K, H], "wv": [L, D, K, H],
                                  "wo": [L, N, H, D]},
                    "mlp": {"w_gate": [L, D, F], "w_up": [L, D, F], "w_down": [L, F, D]},
                    "attention_norm": [L, D], "mlp_norm": [L, D]}}

    The layers are stacked along a leading axis L, which `decoder` scans over. Defaults: num_kv_heads =
    num_heads, head_dim = model_dim / num_heads, mlp_dim = 8/3 model_dim rounded up to a multiple of 32 (three
    matrices then weigh as much as the two of a classic MLP of width 4 D; Shazeer 2020, arXiv:2002.05202). As
    in Llama, the output is a matrix of its own and not the embedding, transposed.
    """
    if min(vocab_size, num_layers, model_dim) < 1 or (mlp_dim is not None and mlp_dim < 1):
        raise ValueError(f"sizes must be positive, got vocab_size {vocab_size}, num_layers {num_layers}, "
                         f"model_dim {model_dim}, mlp_dim {mlp_dim}")
    V, D, F = vocab_size, model_dim, mlp_dim or math.ceil(model_dim / 12) * 32
    normal = jax.nn.initializers.lecun_normal(dtype=jnp.float32)  # variance 1 / fan-in
    # What a layer adds to the residual stream is scaled down: the sum over 2 L branches then keeps its size
    # (Radford et al. 2019, "Language models are unsupervised multitask learners", section 2.3).
    residual_scale = (2 * num_layers) ** -0.5

    def init_layer(key):
        attention_key, gate, up, down = jax.random.split(key, 4)
        heads = attention.init_attention(attention_key, D, num_heads, num_kv_heads, head_dim)
        if heads["wq"].shape[-1] % 2:
            raise ValueError(f"rotary embeddings: head_dim must be even, got {heads['wq'].shape[-1]}")
        return {"attention": {**heads, "wo": heads["wo"] * residual_scale},
                "mlp": {"w_gate": normal(gate, (D, F)), "w_up": normal(up, (D, F)),
                        "w_down": normal(down, (F, D)) * residual_scale},
                "attention_norm": jnp.ones(D, jnp.float32), "mlp_norm": jnp.ones(D, jnp.float32)}

    embedding_key, output_key, layers_key = jax.random.split(key, 3)
    return {"embedding": jax.random.normal(embedding_key, (V, D), jnp.float32),
            "layers": jax.vmap(init_layer)(jax.random.split(layers_key, num_layers)),
            "final_norm": jnp.ones(D, jnp.float32), "output": normal(output_key, (D, V))}


# ---------------------------------------------------------------- one layer


def rms_norm(x, scale):
    """x / sqrt(mean(x^2) + 1e-5) * scale over the last axis (Zhang & Sennrich 2019, arXiv:1910.07467).

    x: [..., D], scale: [D]. Computed in float32 (or wider), returned in the dtype of x.
    """
    wide_x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (wide_x * jax.lax.rsqrt((wide_x**2).mean(axis=-1, keepdims=True) + 1e-5) * scale).astype(x.dtype)


def rotate(x, positions):
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864, eq. 34), base 10000.

    x: [B, T, n, H] with H even (n heads: N or K), positions: integer [B, T] -> [B, T, n, H] in the dtype of x,
    computed in float32 (or wider). Pair i, made of x[..., i] and x[..., i + H/2] (the paper pairs neighbours),
    is turned by the angle positions * 10000^(-2i / H). A query and a key turned in this way have a dot product
    that depends on the difference of positions only.
    """
    wide, H = jnp.promote_types(x.dtype, jnp.float32), x.shape[-1]
    # Exponent, power and reciprocal are rounded one by one, as in the implementations whose weights we want to run: a
    # last bit of a frequency, times position 1000, shows in the logits. NumPy, since XLA would round only the result.
    exponents = (np.arange(0, H, 2) / H).astype(wide)
    frequencies = 1 / (10000.0 ** exponents.astype(np.float64)).astype(wide)  # [H/2]
    angles = positions[..., None] * frequencies  # [B, T, H/2]
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]  # [B, T, 1, H/2]
    first, second = jnp.split(x.astype(wide), 2, axis=-1)  # [B, T, n, H/2] each
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def layer_fn(layer, x, attend):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x)). Returns (x, whatever else `attend` returned).

    layer: the parameters of one layer. x: [B, T, D]. attend(attention parameters, [B, T, D]) -> ([B, T, D],
    more). Matrices are cast to x's dtype here, where they are used (scales of norms are not, since norms are computed
    in float32): float32 parameters and a bfloat16 x make mixed precision.
    """
    weights, mlp = jax.tree.map(lambda w: w.astype(x.dtype), (layer["attention"], layer["mlp"]))
    out, more = attend(weights, rms_norm(x, layer["attention_norm"]))
    x = x + out
    # B and T become one axis: the gradient of a weight sums over both, and to sum over two axes XLA transposes
    # a [B, T, F] array first, for each weight.
    h = rms_norm(x, layer["mlp_norm"]).reshape(-1, x.shape[-1])  # [B T, D]
    # One product instead of two: the weights are copied out of the stack anyway, and side by side costs no more.
    h = swiglu(h @ jnp.concatenate([mlp["w_gate"], mlp["w_up"]], axis=1))  # [B T, F]
    return x + (h @ mlp["w_down"]).reshape(x.shape), more


@jax.checkpoint  # stores only x for the backward pass and computes the rest again: cheaper than storing that too
def swiglu(x):
    """silu(gate) * up, [.., F], of x = gate and up side by side, [.., 2 F] (Shazeer 2020, arXiv:2002.05202)."""
    gate, up = jnp.split(x, 2, axis=-1)
    return jax.nn.silu(gate) * up


# ---------------------------------------------------------------- the whole, for training


def check_tokens(params, tokens):
    """tokens as int32 [B, T]. One outside 0..V-1 is a ValueError; under jit it becomes V, read as NaN later."""
    V, tokens = params["embedding"].shape[0], jnp.asarray(tokens)
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens must be integers [B, T], got {tokens.dtype} {list(tokens.shape)}")
    tokens = tokens.astype(jnp.int32)  # uint8 has no room for V = 256
    valid = (tokens >= 0) & (tokens < V)
    if not isinstance(tokens, jax.core.Tracer) and not valid.all():
        raise ValueError(f"tokens must lie in 0..{V - 1}, got {tokens[~valid][0]}")
    return jnp.where(valid, tokens, V)  # for mode="fill", to which -1 is the last row


def embed(params, tokens, dtype):
    """Rows of the embedding matrix [B, T, D]; NaN for a token that is out of range."""
    x = jnp.asarray(params["embedding"]).at[check_tokens(params, tokens)].get(mode="fill", fill_value=jnp.nan)
    return x.astype(dtype or x.dtype)


def project(params, x):
    """Logits [B, T, V] of the last layer's x [B, T, D]: float32 (or wider) also where x is bfloat16."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    rows = rms_norm(x, params["final_norm"]).reshape(-1, x.shape[-1])  # [B T, D], as in `layer_fn`
    logits = jnp.matmul(rows, params["output"].astype(x.dtype), preferred_element_type=wide)  # [B T, V]
    return logits.reshape(*x.shape[:2], logits.shape[-1])


def decoder(params, tokens, *, implementation=None, remat=False, unroll=1, dtype=None):
    """Logits [B, T, V], float32 (or wider): those at [:, t] are for the token after tokens[:, :t + 1].

    tokens: integer [B, T] in 0..V-1; others are a ValueError, but compiled code cannot raise: there the logits
    of that row are NaN from that token on, and may be before it. implementation: as in attention.py. remat: keep only
    the input of each layer for the backward pass and compute the rest of it again (memory for one layer instead
    of L, about a third more arithmetic). unroll: layers per iteration of the scan; L of them run fastest, since
    nothing is stacked for the backward pass, but compile time then grows with L. dtype: of the computation, say
    jnp.bfloat16; None is that of the parameters, which stay as they are in any case.
    """
    def attend(weights, x):
        out = attention.attention(weights, x, is_causal=True, rotate=rotate, implementation=implementation)
        return out, None

    def body(x, layer):
        return layer_fn(layer, x, attend)

    body = jax.checkpoint(body) if remat else body
    # One iteration of the scan is compiled, whatever L is.
    x, _ = jax.lax.scan(body, embed(params, tokens, dtype), params["layers"], unroll=unroll)
    return project(params, x)  # [B, T, V]


def loss_fn(params, batch, **options):
    """Mean cross-entropy in nats per predicted token, and metrics {"loss", "tokens": their number}.

    batch: {"tokens": integer [B, T + 1], "mask": bool [B, T]}. mask[:, t] says whether the prediction of
    tokens[:, t + 1] counts; where none does, loss and gradients are 0. What follows a row's last counted
    token is padding and may hold anything. options: those of `decoder`. Log-probabilities and the mean are
    float32 (or wider).
    """
    tokens, mask = jnp.asarray(batch["tokens"]), jnp.asarray(batch["mask"])
    if (tokens.ndim != 2 or mask.shape != (tokens.shape[0], tokens.shape[1] - 1) or mask.dtype != bool
            or not jnp.issubdtype(tokens.dtype, jnp.integer)):
        raise ValueError(f"expected integer tokens [B, T + 1] and a bool mask [B, T], got {tokens.dtype} "
                         f"{list(tokens.shape)} and {mask.dtype} {list(mask.shape)}")
    counted = mask[:, ::-1].cumsum(axis=1)[:, ::-1] > 0  # [B, T], True up to the last True of a row
    inputs, targets = jnp.where(counted, tokens[:, :-1], 0), jnp.where(mask, tokens[:, 1:], 0)
    logits = decoder(params, inputs, **options)  # [B, T, V]
    targets, V = check_tokens(params, targets), logits.shape[-1]
    losses = optax.softmax_cross_entropy(logits, jax.nn.one_hot(targets, V, dtype=logits.dtype))  # [B, T]
    losses = jnp.where(targets < V, losses, jnp.nan)
    count = mask.sum()
    loss = jnp.where(mask, losses, 0).sum() / jnp.maximum(count, 1)
    return loss, {"loss": loss, "tokens": count}


# ---------------------------------------------------------------- the whole, for generation


def init_decoder_cache(params, batch_size, max_length, dtype=None):
    """An empty cache for `cached_decoder`: attention.init_kv_cache with a leading axis L on every leaf.

    {"k": [L, B, S, K, H], "v": as "k", "length": int32 [L, B]}, S = max_length. dtype: that of params by default.
    """
    L, _, K, H = params["layers"]["attention"]["wk"].shape
    cache = attention.init_kv_cache(batch_size, max_length, K, H, dtype or params["embedding"].dtype)
    return jax.tree.map(lambda leaf: jnp.repeat(leaf[None], L, axis=0), cache)


def cached_layers(params, tokens, cache, seq_lengths=None, dtype=None):
    """(x [B, T, D] before the final norm, cache): the layers of `cached_decoder`."""
    (B, S), T = cache["k"].shape[1:3], tokens.shape[-1]
    lengths = jnp.full(B, T) if seq_lengths is None else jnp.asarray(seq_lengths)
    if tokens.shape != (B, T) or lengths.shape != (B,) or not all(
            jnp.issubdtype(x.dtype, jnp.integer) for x in (tokens, lengths)):
        raise ValueError(f"expected integer tokens [{B}, T] and seq_lengths [{B}], to fit the cache, got "
                         f"{tokens.dtype} {list(tokens.shape)} and {lengths.dtype} {list(lengths.shape)}")
    lengths = lengths.astype(jnp.int32)  # a uint8 cannot be compared with T = 300
    new_lengths = cache["length"][0] + lengths  # [B]; the lengths of all layers are alike
    if not isinstance(new_lengths, jax.core.Tracer):
        if ((lengths < 0) | (lengths > T)).any():
            raise ValueError(f"seq_lengths must lie in 0..{T}, got {lengths.tolist()}")
        if (new_lengths > S).any():
            raise ValueError(f"the cache holds {S} tokens a row, these would make it {new_lengths.max()}")
    tokens = jnp.where(jnp.arange(T) < lengths[:, None], tokens, 0)  # padding may hold anything

    def body(carry, layer_and_number):  # carries the whole cache, which each layer writes to in place
        (x, cache), (layer, number) = carry, layer_and_number
        return layer_fn(layer, x, lambda weights, h: attention.cached_attention(
            weights, h, cache, layer=number, seq_lengths=lengths, rotate=rotate)), None

    layers_and_numbers = params["layers"], jnp.arange(cache["length"].shape[0])
    # Four layers per iteration: for a single token an iteration's own work is not small beside a layer's.
    (x, cache), _ = jax.lax.scan(body, (embed(params, tokens, dtype), cache), layers_and_numbers, unroll=4)
    return x, cache


def cached_decoder(params, tokens, cache, *, seq_lengths=None, dtype=None):
    """(logits [B, T, V], float32 or wider, cache): `decoder` for the next T tokens of rows that begin in `cache`.

    tokens: integer [B, T]; a whole prompt, a chunk of it, or one token. seq_lengths: integer [B], how many of
    the T are real (right-padded rows; logits of padding mean nothing). Rows may stand at different positions. A row
    that would run past the cache's end, or a length outside 0..T, is a ValueError; compiled code cannot raise: there
    that row's logits are NaN and its cache stays as it was. A T that exceeds the cache is a ValueError always. dtype:
    as in `decoder`. cache may be donated.
    """
    x, cache = cached_layers(params, jnp.asarray(tokens), cache, seq_lengths, dtype)
    return project(params, x), cache


def sample(logits, key, temperature, top_k):
    """Tokens int32 [B] drawn from softmax(logits [B, V] / temperature), among the top_k likeliest if given."""
    logits, choices = jax.lax.top_k(logits, top_k or logits.shape[-1])  # [B, k], largest first
    chosen = jax.random.categorical(key, logits / temperature)  # [B]; of infinities it takes the first
    return jnp.take_along_axis(choices, chosen[:, None], axis=1)[:, 0]


def generate(params, prompt, num_tokens, *, prompt_lengths=None, key=None, temperature=0.0, top_k=None):
    """Continues each row of `prompt` by `num_tokens` tokens -> int32 [B, T + num_tokens].

    prompt: integer [B, T], right-padded; prompt_lengths: integer [B], at least 1 (None: all T). A row's new
    tokens stand directly after its own prompt, zeros after them. temperature 0 takes the most likely token;
    above, tokens are drawn with `key`, among the `top_k` most likely if given. The cache has the dtype of the
    parameters. One compiled call, compiled anew for another shape of prompt, num_tokens, top_k, and for greedy or
    drawn. Wrong arguments are a ValueError before anything is computed; under jit the values of prompt and
    prompt_lengths cannot be checked, and a row with wrong ones means nothing.
    """
    prompt, V = jnp.asarray(prompt), params["embedding"].shape[0]
    if prompt.ndim != 2 or 0 in prompt.shape or not jnp.issubdtype(prompt.dtype, jnp.integer):
        raise ValueError(f"prompt must be integers [B, T] with at least one token a row, got {prompt.dtype} "
                         f"{list(prompt.shape)}")
    B, T = prompt.shape
    if not isinstance(num_tokens, numbers.Integral) or num_tokens < 1:
        raise ValueError(f"num_tokens must be a whole number of at least 1, got {num_tokens}")
    temperature = float(temperature)
    greedy = temperature == 0
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be 0 (greedy) or a positive number, got {temperature}")
    if temperature > 0 and key is None:
        raise ValueError(f"temperature {temperature} draws at random: give key=jax.random.key(seed)")
    if top_k is not None and (not isinstance(top_k, numbers.Integral) or not 1 <= top_k <= V):
        raise ValueError(f"top_k must be a whole number in 1..{V}, got {top_k}")
    lengths = jnp.full(B, T) if prompt_lengths is None else jnp.asarray(prompt_lengths)
    if lengths.shape != (B,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(f"prompt_lengths must be integers [{B}], got {lengths.dtype} {list(lengths.shape)}")
    lengths = lengths.astype(jnp.int32)  # as in `cached_layers`
    if not isinstance(lengths, jax.core.Tracer) and not ((lengths >= 1) & (lengths <= T)).all():
        raise ValueError(f"prompt_lengths must lie in 1..{T}, got {lengths.tolist()}")
    tokens = check_tokens(params, jnp.where(jnp.arange(T) < lengths[:, None], prompt, 0))
    key, top_k = (None, None) if greedy else (key, top_k)  # not used, and no reason to compile anew
    return generate_compiled(params, tokens, lengths, key, temperature, num_tokens=int(num_tokens),
                             top_k=top_k and int(top_k), greedy=greedy)


@functools.partial(jax.jit, static_argnames=("num_tokens", "top_k", "greedy"))
def generate_compiled(params, prompt, lengths, key, temperature, *, num_tokens, top_k, greedy):
    """What `generate` does once its arguments are checked."""
    B, T = prompt.shape
    rows = jnp.arange(B)

    def choose(x, key):  # [B, D] -> [B]
        logits = project(params, x[:, None])[:, 0]  # [B, V]
        return logits.argmax(axis=-1).astype(jnp.int32) if greedy else sample(logits, key, temperature, top_k)

    def step(carry, key):
        token, cache = carry
        x, cache = cached_layers(params, token[:, None], cache)
        token = choose(x[:, 0], key)
        return (token, cache), token

    # Greedy reads no key: then they only give the scan its length.
    keys = jnp.zeros(num_tokens) if greedy else jax.random.split(key, num_tokens)
    # The last token is written out but never read, so the cache has no slot for it.
    cache = init_decoder_cache(params, B, T + num_tokens - 1)
    x, cache = cached_layers(params, prompt, cache, lengths)  # prefill: [B, T, D]
    first = choose(x[rows, lengths - 1], keys[0])  # logits of one position a row, not of all T
    _, rest = jax.lax.scan(step, (first, cache), keys[1:])  # [num_tokens - 1, B]
    new = jnp.concatenate([first[None], rest]).T  # [B, num_tokens]
    out = jnp.pad(prompt, ((0, 0), (0, num_tokens)))  # [B, T + num_tokens]
    return out.at[rows[:, None], lengths[:, None] + jnp.arange(num_tokens)].set(new)


# ---------------------------------------------------------------- weights from elsewhere

LLAMA_LAYER_NAMES = {
    "wq": "self_attn.q_proj", "wk": "self_attn.k_proj", "wv": "self_attn.v_proj", "wo": "self_attn.o_proj",
    "w_gate": "mlp.gate_proj", "w_up": "mlp.up_proj", "w_down": "mlp.down_proj",
    "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


def from_llama(state, num_heads):
    """Our parameters from a Llama state dict of Hugging Face's `transformers`, its values as NumPy arrays.

    Right for configurations with rms_norm_eps 1e-5, rope_theta 10000 without scaling, and silu, none of which a state
    dict records; nor does it record the number of query heads, hence num_heads. Where there is no
    lm_head.weight the output is tied to the embedding, and gets a copy. ValueError if a name is missing or
    left over.
    """
    state = {name: value for name, value in state.items() if not name.endswith("rotary_emb.inv_freq")}
    state.setdefault("lm_head.weight", state.get("model.embed_tokens.weight"))
    layers = len({name.split(".")[2] for name in state if name.startswith("model.layers.")})

    def take(name):
        if (array := state.pop(name, None)) is None:
            raise ValueError(f"the state dict has no {name}")
        return array.T  # a linear layer there is [out, in]

    def stack(name):
        return jnp.stack([take(f"model.layers.{i}.{name}.weight") for i in range(layers)])

    params = {"embedding": jnp.asarray(take("model.embed_tokens.weight").T),
              "output": jnp.asarray(take("lm_head.weight")),
              "final_norm": jnp.asarray(take("model.norm.weight"))}
    flat = {ours: stack(theirs) for ours, theirs in LLAMA_LAYER_NAMES.items()}
    if state:
        raise ValueError(f"the state dict has {min(state)}, for which there is no place here")
    L, D, width = flat["wq"].shape
    kv_width, H = flat["wk"].shape[2], width // max(num_heads, 1)
    if num_heads < 1 or width != num_heads * H or H % 2 or kv_width % H or width % kv_width:
        raise ValueError(f"{num_heads} heads do not fit projections of width {width} and {kv_width}")
    heads = {name: flat.pop(name).reshape(L, D, -1, H) for name in ("wq", "wk", "wv")}
    heads["wo"] = flat.pop("wo").reshape(L, num_heads, H, D)
    mlp = {name: flat.pop(name) for name in ("w_gate", "w_up", "w_down")}
    return {**params, "layers": {"attention": heads, "mlp": mlp, **flat}}


def to_llama(params):
    """The inverse of `from_llama`: a state dict of NumPy arrays."""
    params = jax.tree.map(np.asarray, params)
    layers = params["layers"]
    flat = {**layers["attention"], **layers["mlp"], **layers}
    D = params["final_norm"].shape[0]
    state = {"model.embed_tokens.weight": params["embedding"], "model.norm.weight": params["final_norm"],
             "lm_head.weight": params["output"].T}
    for ours, theirs in LLAMA_LAYER_NAMES.items():
        for i, array in enumerate(flat[ours]):
            if array.ndim == 3:
                array = array.reshape((-1, D) if ours == "wo" else (D, -1))  # [N H, D] or [D, N H]
            state[f"model.layers.{i}.{theirs}.weight"] = array.T
    return state


# ---------------------------------------------------------------- the main job


def make_muon(learning_rate, weight_decay):
    """Muon for the matrices of the layers, Adam for the embedding, the output and the norms' scales.

    Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) makes each matrix's averaged gradient
    orthogonal before it takes a step, so that all directions are learned at one pace. It wants to know which
    axes are a matrix's input and which its output; the leading L counts matrices. learning_rate: a schedule;
    Adam gets a fifth of it. Only what Muon updates is decayed.
    """
    sides = optax.contrib.MuonDimensionNumbers  # (input axes, output axes)
    to_heads = sides(1, (2, 3))
    axes = {"embedding": None, "output": None, "final_norm": None,
            "layers": {"attention": {"wq": to_heads, "wk": to_heads, "wv": to_heads, "wo": sides((1, 2), 3)},
                       "mlp": sides(1, 2), "attention_norm": None, "mlp_norm": None}}
    return optax.contrib.muon(learning_rate, weight_decay=weight_decay, muon_weight_dimension_numbers=axes,
                              adam_learning_rate=lambda step: learning_rate(step) / 5, adam_b2=0.95)


def documentation():
    """The text to train on, uint8 [bytes]: Python's help() topics in alphabetical order, newlines between."""
    from pydoc_data.topics import topics
    return np.frombuffer("\n".join(topics[name] for name in sorted(topics)).encode(), np.uint8)


def training_batch(text, batch_size, length, seed, step):
    """The batch of a step, the same whenever (seed, step) is: windows of length + 1 bytes from anywhere."""
    starts = np.random.default_rng([seed, step]).integers(0, len(text) - length, batch_size)
    tokens = text[starts[:, None] + np.arange(length + 1)]  # [B, T + 1]
    return {"tokens": tokens, "mask": np.ones((batch_size, length), bool)}


def evaluation_windows(text, start, length):
    """W windows, each a batch of one, that together predict every byte of text[start:] once, in order.

    {"tokens": [W, 1, length + 1], "mask": [W, 1, length]}. Windows slide by length / 4, and only their last quarter
    counts: each byte is predicted from at least the 3/4 length bytes before it, at first from before `start`.
    ValueError if there are less than `length` of those, or nothing to predict.
    """
    if not 1 <= length <= start < len(text):
        raise ValueError(f"expected 1 <= length <= start < {len(text)}, got length {length}, start {start}")
    stride = math.ceil(length / 4)
    number = np.arange(math.ceil((len(text) - start) / stride))[:, None, None]  # [W, 1, 1]
    index = start + number * stride + np.arange(stride - length - 1, stride)  # [W, 1, length + 1]
    mask = (np.arange(length) >= length - stride) & (index[..., 1:] < len(text))  # [W, 1, length]
    return {"tokens": text[np.minimum(index, len(text) - 1)], "mask": mask}


def held_out_bits(params, windows, learning_rate=0.0):
    """Bits per byte on `evaluation_windows`, predicted one after the other and each then learned from.

    A compressor too learns from what it has read. Here one step of plain SGD does: dynamic evaluation (Krause
    et al. 2018, arXiv:1709.07432). With learning rate 0 the parameters stay as they are; the caller's do in any
    case. Returns a float.
    """
    def body(params, window):
        _, metrics = loss_fn(params, window)  # first predict: the counted bytes have not been learned from
        if learning_rate:  # then learn from the whole window, so from its context once more
            everything = {**window, "mask": jnp.ones_like(window["mask"])}
            grads = jax.grad(loss_fn, has_aux=True)(params, everything)[0]
            params = jax.tree.map(lambda w, g: w - learning_rate * g, params, grads)
        return params, metrics

    _, metrics = jax.lax.scan(body, params, windows)
    loss, tokens = np.asarray(metrics["loss"], np.float64), np.asarray(metrics["tokens"])  # [W]
    return float(np.average(loss, weights=tokens) / math.log(2))


def compressed_bits(text, start):
    """Bits per byte two compressors need for text[start:] after the rest: size(all) - size(before)."""
    sizes = {"xz -9": lambda data: len(lzma.compress(data, preset=9)),
             "bz2 -9": lambda data: len(bz2.compress(data, 9))}
    return {name: 8 * (size(text) - size(text[:start])) / (len(text) - start) for name, size in sizes.items()}


def main(argv=None):
    """Trains, evaluates and writes as the flags say (see --help).

    Returns the held-out bits per byte of {"model", "model, learning as it reads", "xz -9", "bz2 -9"}. A user's
    mistake ends in SystemExit with one line.
    """
    import minijax_train  # here and nowhere else: the model needs attention.py only

    parser = argparse.ArgumentParser(
        prog="decoder.py", description="Train a byte-level language model on Python's own documentation.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add, number = parser.add_argument, minijax_train.number
    count = number(int, 1, 2**31 - 1)
    add("--steps", type=count, default=1500)
    add("--batch-size", type=count, default=4, help="windows per step, over all devices")
    add("--length", type=number(int, 4, 2**31 - 1), default=512, help="bytes of text per window")
    add("--layers", type=count, default=4)
    add("--model-dim", type=count, default=128)
    add("--heads", type=count, default=2, help="query heads")
    add("--kv-heads", type=count, default=1, help="key/value heads")
    add("--learning-rate", type=number(float, 0), default=0.02,
        help="Muon's, peak of the schedule: linear warm-up over a tenth of the steps, then cosine decay to 0")
    add("--weight-decay", type=number(float, 0), default=0.3, help="of the layers' matrices, times the rate")
    add("--seed", type=number(int, 0, 2**32 - 1), default=0,
        help="of initial parameters, windows and the sample")
    add("--log-every", type=count, default=50, metavar="STEPS",
        help="steps per interval: per line, compiled call and checkpoint")
    add("--checkpoint-dir", metavar="DIR", help="save the state here after every interval; newest 3 kept")
    add("--resume", action="store_true", help="go on from the newest checkpoint in --checkpoint-dir")
    return minijax_train.command_line(parser, functools.partial(run, minijax_train), argv)


def run(minijax_train, args):
    """What `main` does once the command line is read. minijax_train: the module, since only `main` may import it."""
    devices = minijax_train.find_devices()
    print(f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform}), jax {jax.__version__}")
    if args.batch_size % len(devices):
        raise ValueError(f"--batch-size {args.batch_size} cannot be shared evenly by {len(devices)} devices")
    text = documentation()
    start = len(text) - len(text) // 10  # the last tenth is held out
    train = text[:start]
    if args.length >= start:
        raise ValueError(f"--length {args.length} is not less than the {start} bytes of training text")
    interrupted = minijax_train.note_interrupts()
    mesh = jax.sharding.Mesh(np.array(devices), ("batch",))
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())  # whole, on every device
    by_row = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "batch"))  # [steps, B, ...]

    schedule = optax.warmup_cosine_decay_schedule(0.0, args.learning_rate, args.steps // 10, args.steps)
    optimizer = make_muon(schedule, args.weight_decay)
    loss = functools.partial(loss_fn, unroll=4)
    train_step = minijax_train.make_train_step(loss, optimizer)  # the step that trains the classifier there
    train_steps = jax.jit(minijax_train.make_train_steps(train_step), donate_argnums=(0, 1))

    @functools.partial(jax.jit, out_shardings=replicated)
    def init():
        params = init_decoder(jax.random.key(args.seed), vocab_size=256, num_layers=args.layers,
                              model_dim=args.model_dim, num_heads=args.heads, num_kv_heads=args.kv_heads)
        return {"params": params, "opt_state": optimizer.init(params)}

    state, save = {**init(), "step": 0}, None
    if args.checkpoint_dir:
        names = "seed", "steps", "batch_size", "length", "learning_rate", "weight_decay"
        settings = {**{name: getattr(args, name) for name in names}, "text": zlib.crc32(text)}
        state, save = minijax_train.checkpointing(args.checkpoint_dir, settings, state, args.resume,
                                                  interrupted)
        if args.resume:
            step = state["step"]
            print(f"going on from step {step}" if step else "nothing to resume: starting afresh")
    count = sum(leaf.size for leaf in jax.tree.leaves(state["params"]))
    print(f"{count:,} parameters; {start:,} bytes to train on, {len(text) - start:,} held out")

    def intervals():
        for first in range(state["step"], args.steps, args.log_every):
            steps = range(first, min(first + args.log_every, args.steps))
            batches = [training_batch(train, args.batch_size, args.length, args.seed, s) for s in steps]
            yield jax.device_put(jax.tree.map(lambda *leaves: np.stack(leaves), *batches), by_row)

    def report(step, metrics, seconds):
        loss = metrics["loss"].mean()
        print(f"step {step:6}  loss {loss:.4f} nats = {loss / math.log(2):.4f} bits per byte  "
              f"{metrics['tokens'].sum() / seconds:9,.0f} tokens/s", flush=True)
        if interrupted and not save:  # with a checkpoint folder `save` raises it, once it has saved
            raise KeyboardInterrupt

    state = minijax_train.interval_loop(train_steps, state, intervals(), report, save)
    params = state["params"]

    windows = evaluation_windows(text, start, args.length)
    result = {"model": held_out_bits(params, windows),
              "model, learning as it reads": held_out_bits(params, windows, 0.05),
              **compressed_bits(text.tobytes(), start)}
    print("held-out bits per byte: " + ", ".join(f"{name} {bits:.4f}" for name, bits in result.items()))
    prompt = text[None, start:start + args.length // 4]
    room = args.length - prompt.shape[1]
    key = jax.random.fold_in(jax.random.key(args.seed), 1)  # not the key that the parameters were drawn with
    written = generate(params, prompt, room, key=key, temperature=0.7)
    prompt, written = prompt[0].tobytes(), np.asarray(written[0, prompt.shape[1]:]).astype(np.uint8).tobytes()
    print(f"--- given:\n{prompt.decode(errors='replace')}\n--- written:\n{written.decode(errors='replace')}")
    return result


if __name__ == "__main__":
    main()
