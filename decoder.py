# SPDX-License-Identifier: MIT
"""A decoder-only transformer made from attention.py: the Llama family's arithmetic, as functions.

    python decoder.py    train on Python's documentation, byte by byte, and let it write (--help)

Axes: B batch, T query length, S cache length, N query heads, K key/value heads, H head dimension,
D model dimension, F hidden width of the MLP, V vocabulary, L layers; [B T, D] has B and T in one.
A token or length out of range is a ValueError; compiled code can neither look nor raise: there what
depends on it becomes NaN. attention.py must lie beside this file.
"""
import argparse
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

import attention

# ---------------------------------------------------------------- model
def init_decoder(key, *, vocab_size, num_layers, model_dim, num_heads, num_kv_heads=None,
                 head_dim=None, mlp_dim=None):
    """Parameters of a decoder, all float32:

        {"embedding": [V, D], "final_norm": [D], "output": [D, V],
         "layers": {"attention": {"wq": [L, D, N, H], "wk": [L, D, K, H], "wv": [L, D, K, H],
                                  "wo": [L, N, H, D]},
                    "mlp": {"w_gate": [L, D, F], "w_up": [L, D, F], "w_down": [L, F, D]},
                    "attention_norm": [L, D], "mlp_norm": [L, D]}}

    Defaults: num_kv_heads = num_heads, head_dim = D / N, mlp_dim = 8/3 D, rounded up to a multiple
    of 32. Without "output" the embedding serves in its place (tied). ValueError for wrong sizes.
    """
    V, D, F = vocab_size, model_dim, math.ceil(model_dim / 12) * 32 if mlp_dim is None else mlp_dim
    if min(V, num_layers, D, F) < 1:
        raise ValueError(f"not positive: {vocab_size=}, {num_layers=}, {model_dim=} or {mlp_dim=}")
    normal = jax.nn.initializers.lecun_normal(dtype=jnp.float32)  # variance 1 / fan-in
    branch_scale = (2 * num_layers) ** -0.5  # the sum of 2 L branches keeps its size, as in GPT-2

    def init_layer(key):
        heads_key, gate, up, down = jax.random.split(key, 4)
        heads = attention.init_attention(heads_key, D, num_heads, num_kv_heads, head_dim)
        if heads["wq"].shape[-1] % 2:
            raise ValueError(f"head_dim must be even to rotate, got {heads['wq'].shape[-1]}")
        return {"attention": {**heads, "wo": heads["wo"] * branch_scale},
                "mlp": {"w_gate": normal(gate, (D, F)), "w_up": normal(up, (D, F)),
                        "w_down": normal(down, (F, D)) * branch_scale},
                "attention_norm": jnp.ones(D, jnp.float32), "mlp_norm": jnp.ones(D, jnp.float32)}

    embedding_key, output_key, layers_key = jax.random.split(key, 3)
    # One layer is written down; vmap over L keys makes L, stacked as `decoder` scans over them.
    return {"embedding": jax.random.normal(embedding_key, (V, D), jnp.float32),
            "layers": jax.vmap(init_layer)(jax.random.split(layers_key, num_layers)),
            "final_norm": jnp.ones(D, jnp.float32), "output": normal(output_key, (D, V))}


def rms_norm(x, scale, epsilon=1e-5):
    """x / sqrt(mean(x^2) + epsilon) * scale, [.., D] (Zhang & Sennrich 2019, arXiv:1910.07467)."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mean_square = (wide**2).mean(axis=-1, keepdims=True)
    scale = jnp.broadcast_to(scale, x.shape).astype(wide.dtype)
    return (wide * jax.lax.rsqrt(mean_square + epsilon) * scale).astype(x.dtype)


def rotate(x, positions, *, base=10000.0, scaling=None):
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864, eq. 34).

    x: [B, T, n, H] with H even, positions: integer [B, T] -> as x, computed in float32 or wider.
    Pair i, made of x[..., i] and x[..., i + H/2] (the paper pairs neighbours), is turned by the
    angle positions * base^(-2i / H): products of queries and keys then depend on the difference of
    positions only. scaling, for texts longer than those trained on: (factor,) divides the angles;
    Llama 3's is (factor, low_freq_factor, high_freq_factor, original length). Tuples can be hashed.
    """
    H, dtype = x.shape[-1], jnp.promote_types(x.dtype, jnp.float32)
    # Exponent, power and reciprocal are rounded one by one, as where the weights come from: a last
    # bit of a frequency, times position 1000, shows in the logits. XLA would round only the result.
    exponents = (np.arange(0, H, 2) / H).astype(dtype)
    frequencies = 1 / (base ** exponents.astype(np.float64)).astype(dtype)  # [H/2]
    factor, *llama3 = scaling or (1.0,)
    kept = 0.0
    if llama3:  # pairs that turn often within the original length tell neighbours apart: they stay
        low, high, length = llama3
        kept = np.clip((length * frequencies / (2 * math.pi) - low) / (high - low), 0, 1)
    frequencies = ((1 - kept) * frequencies / factor + kept * frequencies).astype(dtype)
    angles = positions[:, :, None, None].astype(dtype) * frequencies[None, None, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)  # [B, T, 1, H/2]
    first, second = jnp.split(x.astype(dtype), 2, axis=-1)  # [B, T, n, H/2] each
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def mlp(weights, x):
    """SwiGLU: silu(x w_gate) * (x w_up), times w_down, as x (Shazeer 2020, arXiv:2002.05202)."""
    # B and T become one axis: the gradient of a weight sums over both, and to sum over two axes XLA
    # transposes a [B, T, F] array first, for each weight.
    rows = x.reshape(-1, x.shape[-1])  # [B T, D]
    gate, up = rows @ weights["w_gate"], rows @ weights["w_up"]  # [B T, F] each
    return ((jax.nn.silu(gate) * up) @ weights["w_down"]).reshape(x.shape)


def decoder_layer(layer, x, attend, epsilon):
    """x + attend(norm(x)), then x + mlp(norm(x)): ([B, T, D], what `attend` returns besides).

    attend(weights, x [B, T, D]) -> (out [B, T, D], anything): attention with or without a cache.
    """
    # Matrices in x's dtype, where they are used; the norms' scales stay as they are.
    layer = jax.tree.map(lambda w: w.astype(x.dtype) if w.ndim > 1 else w, layer)
    out, more = attend(layer["attention"], rms_norm(x, layer["attention_norm"], epsilon))
    x = x + out
    return x + mlp(layer["mlp"], rms_norm(x, layer["mlp_norm"], epsilon)), more


def check_range(name, values, shape, least, most):
    """values as int32 (float32 if `least` is a float), once it is seen that all are in least..most.

    ValueError if not, and for other dtypes or shapes (a letter stands for any size). Compiled code
    cannot raise: there an integer that is not in least..most becomes most + 1, a float NaN.
    """
    word, kinds, dtype, wrong_one = "integers", "integral", np.int32, most + 1
    if isinstance(least, float):
        word, kinds, dtype, wrong_one = "numbers", ("integral", "real floating"), np.float32, np.nan
    values = values if isinstance(values, jax.Array) else np.asarray(values)
    sizes = tuple(n if isinstance(want, str) else want for want, n in zip(shape, values.shape))
    if (len(shape), sizes) != (values.ndim, values.shape) or not jnp.isdtype(values.dtype, kinds):
        raise ValueError(f"{name} must be {word} {shape}, got {values.dtype} {values.shape}")
    if values.dtype.itemsize < 4:  # uint8 cannot be compared with 256
        values = values.astype(dtype)
    wrong = ~((values >= least) & (values <= most))  # so is NaN
    if not isinstance(wrong, jax.core.Tracer) and wrong.any():
        at = tuple(np.argwhere(wrong)[0].tolist())
        raise ValueError(f"{name} must lie in {least}..{most}, got {values[at]} at {list(at)}")
    return jnp.where(wrong, wrong_one, values.astype(dtype))


def embed(params, tokens, dtype=None):
    """Rows of the embedding matrix, [B, T, D]; NaN for a token out of range."""
    table = jnp.asarray(params["embedding"])
    tokens = check_range("tokens", tokens, ("B", "T"), 0, len(table) - 1)
    return table.at[tokens].get(mode="fill", fill_value=jnp.nan).astype(dtype or table.dtype)


def project(params, x, epsilon):
    """Logits [B, T, V] of the last layer's x [B, T, D], in float32 or wider, whatever x is."""
    rows = rms_norm(x, params["final_norm"], epsilon).reshape(-1, x.shape[-1])  # [B T, D]
    output = params["output"] if "output" in params else params["embedding"].T  # [D, V]
    wide = jnp.promote_types(x.dtype, jnp.float32)
    logits = jnp.matmul(rows, output.astype(x.dtype), preferred_element_type=wide)  # [B T, V]
    return logits.reshape(*x.shape[:2], logits.shape[-1])


def decoder(params, tokens, *, rotate=rotate, epsilon=1e-5, implementation=None, remat=False,
            unroll=1, dtype=None):
    """Logits [B, T, V], float32 or wider: at [:, t] those of the token after tokens[:, :t + 1].

    tokens: integer [B, T] in 0..V-1. rotate, implementation: as in attention.py. remat: keep only
    each layer's input for the backward pass and compute the rest again (a third more arithmetic).
    unroll: layers per iteration of the scan; all L run fastest and compile longest. dtype: of the
    computation, say jnp.bfloat16 (None: the parameters'). A mesh wants Auto axes: under Explicit
    ones JAX refuses the embedding's gather.
    """
    def attend(weights, x):
        return attention.attention(weights, x, rotate=rotate, implementation=implementation), None

    def body(x, layer):
        return decoder_layer(layer, x, attend, epsilon)

    body = jax.checkpoint(body) if remat else body
    # One iteration of the scan is compiled, whatever L is.
    x, _ = jax.lax.scan(body, embed(params, tokens, dtype), params["layers"], unroll=unroll)
    return project(params, x, epsilon)


def loss_fn(params, batch, **options):
    """(mean cross-entropy in nats per predicted token, {"loss": the same, "tokens": how many}).

    batch: {"tokens": integer [B, T + 1], "mask": bool [B, T]}; mask[:, t]: does the prediction of
    tokens[:, t + 1] count? Without any, loss and gradients are 0. After a row's last one comes
    padding, which may hold anything. options: those of `decoder`.
    """
    tokens, mask = jnp.asarray(batch["tokens"]), jnp.asarray(batch["mask"])
    if tokens.ndim != 2 or tokens.dtype.kind not in "iu" or (
            mask.shape != tokens[:, 1:].shape or mask.dtype != bool):
        raise ValueError("expected integer tokens [B, T + 1] and a bool mask [B, T], got "
                         f"{tokens.dtype} {tokens.shape} and {mask.dtype} {mask.shape}")
    counted = mask[:, ::-1].cumsum(axis=1)[:, ::-1] > 0  # [B, T], True up to a row's last True
    logits = decoder(params, jnp.where(counted, tokens[:, :-1], 0), **options)  # [B, T, V]
    V, labels = logits.shape[-1], jnp.where(mask, tokens[:, 1:], 0)
    labels = check_range("labels", labels, ("B", "T"), 0, V - 1)
    # A sum of one term picks a logit without a scatter in the backward pass or a one-hot array.
    hit = jnp.arange(V, dtype=jnp.int32)[None, None] == labels[:, :, None]  # [B, T, V]
    losses = jax.nn.logsumexp(logits, axis=-1) - jnp.where(hit, logits, 0).sum(axis=-1)  # [B, T]
    losses = jnp.where(labels < V, losses, jnp.nan)
    count = mask.sum()
    loss = jnp.where(mask, losses, 0).sum() / jnp.maximum(count, 1).astype(losses.dtype)
    return loss, {"loss": loss, "tokens": count}


# ---------------------------------------------------------------- cache and generation
def init_decoder_cache(params, batch_size, max_length, dtype=None):
    """An empty {"k": [L, B, S, K, H], "v": as "k", "length": int32 [L, B]}, S = max_length."""
    L, _, K, H = params["layers"]["attention"]["wk"].shape
    dtype = dtype or params["embedding"].dtype  # of k and v
    cache = attention.init_kv_cache(batch_size, max_length, K, H, dtype)
    return jax.tree.map(lambda leaf: jnp.repeat(leaf[None], L, axis=0), cache)


def cached_decoder(params, tokens, cache, *, seq_lengths=None, rotate=rotate, epsilon=1e-5,
                   dtype=None):
    """(logits [B, T, V], float32 or wider, cache): `decoder` for the next T tokens of each row.

    tokens: integer [B, T], a whole prompt, a chunk of it, or one token. seq_lengths: integer [B] in
    0..T, how many of them are real (padding is on the right; its logits mean nothing). Rows may be
    at different positions. One that would run past the cache's end is a ValueError; compiled, it
    gets NaN and keeps its cache. T > S is a ValueError always. cache may be donated.
    """
    tokens, (L, B, S) = jnp.asarray(tokens), cache["k"].shape[:3]
    if tokens.ndim != 2 or len(tokens) != B or tokens.shape[1] > S:
        raise ValueError(f"the cache holds {B} rows of {S} tokens, got tokens {tokens.shape}")
    T = tokens.shape[1]
    lengths = jnp.full(B, T) if seq_lengths is None else seq_lengths
    lengths = check_range("seq_lengths", lengths, (B,), 0, T)
    check_range("lengths in the cache", cache["length"][0] + lengths, (B,), 0, S)
    real = jnp.arange(T, dtype=jnp.int32)[None] < lengths[:, None]  # [B, T]
    x = embed(params, jnp.where(real, tokens, 0), dtype)  # padding may hold anything

    def body(carry, layer_and_number):  # carries the whole cache; each layer writes to it in place
        (x, cache), (layer, number) = carry, layer_and_number
        attend = functools.partial(attention.cached_attention, cache=cache, layer=number,
                                   seq_lengths=lengths, rotate=rotate)
        return decoder_layer(layer, x, attend, epsilon), None

    layers = params["layers"], jnp.arange(L, dtype=jnp.int32)
    unroll = 4 if T == 1 else 1  # an iteration's own work is not small beside one token's layer
    (x, cache), _ = jax.lax.scan(body, attention.alike((x, cache)), layers, unroll=unroll)
    return project(params, x, epsilon), cache


def sample(logits, key=None, temperature=1.0, top_k=None, top_p=None):
    """Tokens int32 [B] for logits [B, V]: without a key the likeliest, else drawn.

    Drawn from softmax(logits / temperature), among the top_k likeliest, and of these among the
    fewest that have a share of top_p together (Holtzman et al. 2020, arXiv:1904.09751). Where the
    largest logit is not finite, or temperature or top_p make no sense, the token is -1.
    """
    largest = logits.max(axis=-1, keepdims=True)  # [B, 1]
    if key is None:
        finite = jnp.isfinite(largest[:, 0])
        return jnp.where(finite, logits.argmax(axis=-1), -1).astype(jnp.int32)
    temperature = jnp.asarray(temperature, logits.dtype)
    divisor = jnp.maximum(temperature, jnp.finfo(logits.dtype).tiny)
    # Measured from the largest, which becomes 0: next to 0 a temperature then makes no inf - inf.
    scaled, choices = jax.lax.top_k((logits - largest) / divisor, top_k or logits.shape[-1])
    if top_p is not None:
        shares = jax.nn.softmax(scaled)  # [B, k], largest first
        likelier = shares.cumsum(axis=-1) - shares  # what all before have together
        scaled = jnp.where(likelier < jnp.asarray(top_p, scaled.dtype), scaled, -jnp.inf)
    chosen = jax.random.categorical(key, scaled)  # [B]
    tokens = jnp.take_along_axis(choices, chosen[:, None], axis=1)[:, 0]
    return jnp.where((scaled[:, 0] == 0) & (temperature >= 0), tokens, -1).astype(jnp.int32)


def generate(params, prompt, num_tokens, *, prompt_lengths=None, key=None, temperature=0.0,
             top_k=None, top_p=None, stop_token=None, rotate=rotate, epsilon=1e-5):
    """Continues each row of `prompt` by `num_tokens` tokens -> int32 [B, T + num_tokens].

    prompt: integer [B, T], padded on the right, never on the left; prompt_lengths, integer [B] in
    1..T: how many are real. New tokens stand directly after a row's own prompt, zeros after them.
    temperature 0 takes the likeliest token; above, they are drawn with `key` as `sample` says.
    stop_token: an integer or several; a row that has produced one is filled up with it (which saves
    no time). One compiled call, made anew for other shapes, num_tokens, top_k, rotate, epsilon, and
    for greedy or drawn. Wrong arguments are a ValueError at once; those that compiled code cannot
    see, and logits not finite, make the row go on with -1. The cache has the parameters' dtype.
    """
    prompt, V = jnp.asarray(prompt), params["embedding"].shape[0]
    if prompt.ndim != 2 or 0 in prompt.shape:
        raise ValueError(f"prompt must be [B, T] with at least one token each, got {prompt.shape}")
    B, T = prompt.shape
    check_range("num_tokens", num_tokens, (), 1, 2**31 - 2 - T)
    check_range("top_k", V if top_k is None else top_k, (), 1, V)
    drawn_at = check_range("temperature", temperature, (), 0.0, 1e30)
    top_p = None if top_p is None else check_range("top_p", top_p, (), 1e-9, 1.0)
    if not isinstance(temperature, jax.core.Tracer) and temperature == 0:
        key = drawn_at = top_k = top_p = None  # not used, and no reason to compile anew
    elif key is None:
        raise ValueError(f"temperature {temperature} draws: give key=jax.random.key(seed)")
    lengths = jnp.full(B, T) if prompt_lengths is None else prompt_lengths
    lengths = check_range("prompt_lengths", lengths, (B,), 1, T)
    real = jnp.arange(T, dtype=jnp.int32)[None] < lengths[:, None]  # [B, T]
    prompt = check_range("prompt", jnp.where(real, prompt, 0), (B, T), 0, V - 1)
    stop = np.zeros(0, int) if stop_token is None else jnp.ravel(jnp.asarray(stop_token))
    stop = check_range("stop_token", stop, ("n",), 0, V - 1)
    return generate_compiled(params, prompt, lengths, key, drawn_at, top_p, stop, top_k=top_k,
                             num_tokens=int(num_tokens), rotate=rotate, epsilon=epsilon)


@functools.partial(jax.jit, static_argnames=("num_tokens", "top_k", "rotate", "epsilon"))
def generate_compiled(params, prompt, lengths, key, temperature, top_p, stop, *, num_tokens, top_k,
                      rotate, epsilon):
    """What `generate` does once its arguments are checked."""
    (B, T), rows = prompt.shape, jnp.arange(len(prompt), dtype=jnp.int32)
    forward = functools.partial(cached_decoder, params, rotate=rotate, epsilon=epsilon)

    def step(carry, key):
        token, stopped, cache = carry
        logits, cache = forward(token[:, None], cache)  # [B, 1, V]
        token = jnp.where(stopped, token, sample(logits[:, 0], key, temperature, top_k, top_p))
        stopped = stopped | (token[:, None] == stop[None]).any(axis=1)
        return (token, stopped, cache), token

    # First the prompt but for its last token, with which the loop begins. The last new token is
    # not read, so the cache has no slot for it.
    cache = init_decoder_cache(params, B, T + num_tokens - 1)
    _, cache = forward(prompt, cache, seq_lengths=lengths - 1)
    last = prompt.at[rows, lengths - 1].get(mode="fill", fill_value=-1)
    sources = params["embedding"], prompt, key, temperature, top_p
    *_, carry = attention.alike((*sources, (last, jnp.zeros(B, bool), cache)))
    keys = None if key is None else jax.random.split(key, num_tokens)
    _, new = jax.lax.scan(step, carry, keys, num_tokens)  # [num_tokens, B]
    out = jnp.pad(prompt, ((0, 0), (0, num_tokens)))  # [B, T + num_tokens]
    places = lengths[:, None] + jnp.arange(num_tokens, dtype=jnp.int32)[None]  # [B, num_tokens]
    return out.at[rows[:, None], places].set(new.T)


# ---------------------------------------------------------------- weights from elsewhere
LLAMA_NAMES = {
    "embedding": "model.embed_tokens", "final_norm": "model.norm", "output": "lm_head",
    "attention_norm": "input_layernorm", "wq": "self_attn.q_proj", "wk": "self_attn.k_proj",
    "wv": "self_attn.v_proj", "wo": "self_attn.o_proj", "mlp_norm": "post_attention_layernorm",
    "w_gate": "mlp.gate_proj", "w_up": "mlp.up_proj", "w_down": "mlp.down_proj"}
LLAMA_VALUES = {  # of all that would change the numbers: what is supported, beside null
    "model_type": ["llama", "mistral"], "hidden_act": ["silu"], "attention_bias": [False],
    "mlp_bias": [False], "partial_rotary_factor": [1], "sliding_window": [], "num_experts": [],
    "num_local_experts": [], "quantization_config": []}
ROPE_NUMBERS = {"default": [], "linear": ["factor"], "llama3": [
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]}


def from_llama(state_dict, config):
    """(params, options) of a Llama: its state dict {name: array} and the dict in its config.json.

    Arrays as NumPy has them (say, from safetensors.numpy.load_file) keep their dtypes. options, for
    `decoder`, `cached_decoder`, `generate`: rotate and epsilon. Tied embeddings stay one array. A
    ValueError, before anything is computed, names what is missing, left over or not supported.
    """
    for name, values in LLAMA_VALUES.items():
        if config.get(name) not in [None, *values]:
            raise ValueError(f"config: {name} may be one of {values}, got {config[name]!r}")
    names = ["vocab_size", "num_hidden_layers", "hidden_size", "intermediate_size",
             "num_attention_heads"]
    if missing := [name for name in names if config.get(name) is None]:
        raise ValueError(f"config: no {', '.join(missing)}")
    V, L, D, F, N = (config[name] for name in names)
    like = jax.eval_shape(lambda: init_decoder(
        jax.random.key(0), vocab_size=V, num_layers=L, model_dim=D, mlp_dim=F, num_heads=N,
        num_kv_heads=config.get("num_key_value_heads"), head_dim=config.get("head_dim")))
    options = {"rotate": rope_from(config), "epsilon": config.get("rms_norm_eps", 1e-6)}
    state = {name: value for name, value in state_dict.items() if "rotary_emb" not in name}
    if config.get("tie_word_embeddings"):
        del like["output"]
        state.pop("lm_head.weight", None)
    wanted = jax.eval_shape(to_llama, like)
    for name in sorted(wanted | state):
        got, want = (np.shape(side[name]) if name in side else None for side in (state, wanted))
        if got != want:
            raise ValueError(f"state dict: {name} has shape {got}, expected {want}")

    def take(path, leaf):
        arrays = [np.asarray(state[name]) for name in llama_names(path, leaf)]
        arrays = arrays if path[-1].key == "embedding" else [array.T for array in arrays]
        return jnp.asarray(np.stack(arrays).reshape(leaf.shape))

    return jax.tree.map_with_path(take, like), options


def rope_from(config):
    """`rotate` with the base and scaling of a config, which has them in one of two spellings."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    unknown = rope.keys() - {"rope_type", "type", "rope_theta", *ROPE_NUMBERS["llama3"]}
    rope = {"original_max_position_embeddings": config.get("max_position_embeddings"), **rope}
    scaling = tuple(rope.get(name) for name in ROPE_NUMBERS.get(kind, [None]))
    if unknown or None in scaling:
        raise ValueError(f"config: rope may be one of {ROPE_NUMBERS}, got {rope}")
    base = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    return functools.partial(rotate, base=float(base), scaling=scaling or None)


def llama_names(path, leaf):
    """Llama's names of the leaf at a path of our tree: one for each layer, which it keeps apart."""
    name = LLAMA_NAMES[path[-1].key] + ".weight"
    return [f"model.layers.{i}.{name}" for i in range(len(leaf))] if len(path) > 1 else [name]


def to_llama(params):
    """The inverse of `from_llama`: a state dict of NumPy arrays; linear layers are [out, in]."""
    state = {}
    for path, leaf in jax.tree.leaves_with_path(params):
        ours = path[-1].key
        leaf = leaf if isinstance(leaf, jax.core.Tracer) else np.asarray(leaf)  # for eval_shape
        for name, array in zip(llama_names(path, leaf), leaf if len(path) > 1 else leaf[None]):
            if array.ndim == 3:  # heads and head dimension become one axis
                array = array.reshape((-1, array.shape[2]) if ours == "wo" else (len(array), -1))
            state[name] = array if ours == "embedding" else array.T
    return state


# ---------------------------------------------------------------- the main job
RECIPE = {  # the flags and their defaults, chosen on the last tenth of the training text
    "steps": 1500, "batch_size": 4, "length": 512,  # of windows, in bytes
    "layers": 4, "model_dim": 128, "heads": 2, "kv_heads": 1, "learning_rate": 0.02,  # Muon's peak
    "weight_decay": 0.3, "seed": 0, "text": ""}  # a file; without: Python's manual


def make_muon(learning_rate, weight_decay):
    """Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) for the layers' matrices.

    Adam, at a fifth of the rate, a schedule, for the rest. AdamW alone: 6 % more bits per byte.
    """
    sides = optax.contrib.MuonDimensionNumbers  # axes in, axes out; the leading L counts matrices
    heads = sides(1, (2, 3))
    axes = {"embedding": None, "output": None, "final_norm": None, "layers": {
        "attention": {"wq": heads, "wk": heads, "wv": heads, "wo": sides((1, 2), 3)},
        "mlp": sides(1, 2), "attention_norm": None, "mlp_norm": None}}
    return optax.contrib.muon(
        learning_rate, weight_decay=weight_decay, muon_weight_dimension_numbers=axes,
        adam_learning_rate=lambda step: learning_rate(step) / 5, adam_b2=0.95)


def evaluation_windows(text, start, length):
    """W batches of one that predict each byte of text[start:] once, in order; length < start.

    {"tokens": [W, 1, length + 1], "mask"}. They slide by a quarter, and only what is new counts.
    """
    edges = np.append(np.arange(start, len(text), math.ceil(length / 4)), len(text))
    tokens = text[edges[1:, None] + np.arange(-length - 1, 0)]  # [W, length + 1]
    mask = np.arange(length) >= length - np.diff(edges)[:, None]  # [W, length]
    return {"tokens": tokens[:, None], "mask": mask[:, None]}


def held_out_bits(params, windows):
    """Bits per byte on `evaluation_windows`, a float."""
    metrics = jax.lax.map(lambda window: loss_fn(params, window)[1], windows)
    nats = np.average(np.asarray(metrics["loss"], float), weights=metrics["tokens"])
    return float(nats / math.log(2))


def train(args, init, text, devices):
    """The parameters after args.steps steps on text, from init() or the newest checkpoint on."""
    import checkpoint, data, minijax_train
    rate = optax.warmup_cosine_decay_schedule(0.0, args.learning_rate, args.steps // 10, args.steps)
    optimizer = make_muon(rate, args.weight_decay)
    step = minijax_train.make_train_step(functools.partial(loss_fn, unroll=4), optimizer)
    train_steps = jax.jit(minijax_train.make_train_steps(step), donate_argnums=(0, 1))
    replicated, _, by_step = minijax_train.shardings(devices, args.batch_size)
    state = jax.jit(lambda: minijax_train.init_state(init(), optimizer), out_shardings=replicated)()
    settings = {name: getattr(args, name) for name in RECIPE}
    state, save = checkpoint.start_or_resume(
        args.checkpoint_dir, {**state, "step": 0}, settings, args.resume)
    batches = (data.training_windows(text, args.batch_size, args.length, args.seed, step)
               for step in range(state["step"], args.steps))
    intervals = data.to_device(data.stack(batches, args.log_every), by_step)

    def report(step, metrics, seconds):
        bits, speed = metrics["loss"].mean() / math.log(2), metrics["tokens"].sum() / seconds
        print(f"step {step:6}  {bits:.4f} bits per byte  {speed:9,.0f} tokens/s", flush=True)

    return minijax_train.train_loop(train_steps, state, intervals, report, save)["params"]


def run(args):
    """Trains, unless that is done, and writes: {"bits_per_byte" if trained, "written": bytes}."""
    import checkpoint, data, minijax_train
    devices, result = minijax_train.find_devices(), {}
    saved = {"settings": RECIPE, "step": -1}
    newest = checkpoint.latest_checkpoint(args.checkpoint_dir) if args.resume else None
    if newest:
        saved = checkpoint.load_checkpoint(newest, saved, partial=True)
    args = argparse.Namespace(**{**saved["settings"], **vars(args)})  # flags that are given win
    text = checkpoint.expand_home(args.text).read_bytes() if args.text else data.documentation()
    start = len(text) - len(text) // 10  # a tenth is held out
    if not args.length < start < len(text):
        raise ValueError(f"{len(text)} bytes of text are too few for --length {args.length}")
    prompt = args.prompt.encode() or text[start:start + args.length // 4 + 1]
    prompt, text = np.frombuffer(prompt, np.uint8), np.frombuffer(text, np.uint8)
    init = functools.partial(
        init_decoder, jax.random.key(args.seed), vocab_size=256, num_layers=args.layers,
        model_dim=args.model_dim, num_heads=args.heads, num_kv_heads=args.kv_heads)
    if saved["step"] == args.steps:  # the model is there, so its optimizer is not asked for
        like = {"params": jax.eval_shape(init)}
        params = checkpoint.load_checkpoint(newest, like, partial=True)["params"]
    else:
        params = train(args, init, text[:start], devices)
        windows = evaluation_windows(text, start, args.length)
        result["bits_per_byte"] = held_out_bits(params, windows)
        print(f"held-out bits per byte: {result['bits_per_byte']:.4f}")
    key = jax.random.fold_in(jax.random.key(args.seed), 1)  # not that of the parameters
    tokens = generate(params, prompt[None], args.tokens, key=key, temperature=args.temperature,
                      top_k=args.top_k, top_p=args.top_p)
    result["written"] = np.asarray(tokens[0, len(prompt):]).astype(np.uint8).tobytes()
    for name, part in ("given", prompt.tobytes()), ("written", result["written"]):
        print(f"--- {name}:\n{part.decode(errors='replace')}")
    return result


def main(argv=None):
    """The command line, see --help. Returns what `run` returns."""
    from minijax_train import command_line, number
    parser = argparse.ArgumentParser(prog="decoder.py", description="A language model of bytes.")
    add, count = parser.add_argument, number(int, 1, 2**31 - 1)
    for name, default in RECIPE.items():
        least = 0 if name in ("learning_rate", "weight_decay", "seed") else 1
        kind = str if name == "text" else number(type(default), least, 2**31 - 1)
        add("--" + name.replace("_", "-"), type=kind, default=argparse.SUPPRESS, metavar="X",
            help=f"({default})" if name != "text" else "file to train on, for Python's manual")
    add("--log-every", type=count, default=50, metavar="X", help="steps per line and save (50)")
    add("--prompt", default="", metavar="TEXT", help="go on from this, not from held-out text")
    add("--tokens", type=count, default=384, metavar="N", help="bytes to write (384)")
    add("--temperature", type=number(float, 0, 1e30), default=0.7, metavar="X", help="(0.7)")
    add("--top-k", type=number(int, 1, 256), metavar="K", help="draw among the K likeliest bytes")
    add("--top-p", type=number(float, 1e-9, 1), metavar="P", help="among the likeliest, together P")
    add("--checkpoint-dir", metavar="DIR", help="save here after every interval; newest 3 are kept")
    add("--resume", action="store_true", help="go on from the newest checkpoint; if done, write")
    return command_line(parser, run, argv)


if __name__ == "__main__":
    main()
