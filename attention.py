# SPDX-License-Identifier: MIT
"""Attention in plain JAX: four implementations that agree, grouped heads, and a key/value cache.

    out = dot_product_attention(query, key, value, is_causal=True)  # [B, T, N, H]

Axes, as in JAX's documentation: B batch, T query length, S key/value length, N query heads, K
key/value heads, G = N // K, H head dimension, D model dimension. Query head n reads key/value head
n // G: multi-head attention (MHA) is K = N, multi-query (MQA, Shazeer 2019, arXiv:1911.02150) is
K = 1, grouped-query (GQA, Ainslie et al. 2023, arXiv:2305.13245) is everything between.
"""
import functools
import importlib.util
import math

import jax
import jax.numpy as jnp
import numpy as np

HIDDEN = -1e30  # the score of a key that may not be seen: finite, since inf - inf is NaN
positions = functools.partial(jnp.arange, dtype=jnp.int32)  # also where JAX counts in 64 bits


# ---------------------------------------------------------------- on paper
def visible(rows, cols, mask, lengths, window):
    """Which queries `rows` [t] see which keys `cols` [s]: bool [b, n, t, s], b B or 1, n N or 1.

    mask: for these rows and columns. lengths: of queries, of keys, int32 [B]. window: (left,
    right), query i sees keys i - left .. i + right. Each of these may be None, which hides nothing.
    """
    (query_lengths, key_lengths), (left, right) = lengths, window
    rows, cols = rows[None, None, :, None], cols[None, None, None, :]
    seen = jnp.ones((1, 1, rows.size, cols.size), bool) & (True if mask is None else mask)
    if query_lengths is not None:
        seen &= rows < query_lengths[:, None, None, None]
    if key_lengths is not None:
        seen &= cols < key_lengths[:, None, None, None]
    if left is not None:
        seen &= cols >= rows - left
    if right is not None:
        seen &= cols <= rows + right
    return seen


def naive(query, key, value, bias, mask, lengths, window, scale):
    """softmax(query key^T * scale + bias) value; holds all the scores, [B, N, T, S].

    (Vaswani et al. 2017, arXiv:1706.03762, eq. 1.) A query without keys gets the values' mean.
    """
    (B, T, N, H), (_, S, K, _) = query.shape, key.shape
    wide = jnp.promote_types(query.dtype, jnp.float32)
    query = query.reshape(B, T, K, N // K, H).transpose(0, 2, 4, 3, 1)  # [B, K, H, G, T]
    key, value = key.swapaxes(1, 2), value.swapaxes(1, 2)  # [B, K, S, H]
    # The keys first, and all queries of a group in one product: the fastest order for one query.
    scores = jnp.matmul(key, query.reshape(B, K, H, -1), preferred_element_type=wide)
    scores = scores.swapaxes(2, 3).reshape(B, K, N // K, T, S).reshape(B, N, T, S)
    scores = scores * jnp.asarray(scale, wide) + (0 if bias is None else bias.astype(wide))
    seen = visible(positions(T), positions(S), mask, lengths, window)
    weights = jax.nn.softmax(jnp.where(seen, scores, HIDDEN), axis=-1).astype(value.dtype)
    weights = weights.reshape(B, K, N // K, T, S).reshape(B, K, -1, S)  # [B, K, G T, S]
    out = (weights @ value).reshape(B, K, N // K, T, H).reshape(B, N, T, H)
    return out.swapaxes(1, 2)


# ---------------------------------------------------------------- one function for all
def dot_product_attention(query, key, value, bias=None, mask=None, *, scale=None, is_causal=False,
                          query_seq_lengths=None, key_value_seq_lengths=None,
                          local_window_size=None, implementation=None):
    """softmax(query key^T * scale + bias) value: [B, T, N, H] in the query's dtype.

    It replaces `jax.nn.dot_product_attention` (but has no return_residual). query [B, T, N, H], key
    and value [B, S, K, H] have one floating dtype and may all lack B; K divides N. The softmax is
    float32, for float64 it is float64 (but by "xla"). bias: numbers added to the scaled scores,
    -inf hides a key. mask: bool, True means "may attend". Both broadcast to [B, N, T, S]. scale:
    1 / sqrt(H) by default. is_causal: query i sees keys 0..i, both counted from their start
    (top-left), also if T != S. query_seq_lengths, key_value_seq_lengths: integers [B]; what lies at
    or beyond is padding. local_window_size: (left, right), or one int for both: query i sees keys
    i - left .. i + right.

    implementation: "naive", the one to read; "xla", that of jax.nn; "blockwise", fused, in plain
    JAX, memory linear in T and S, takes no bias; "cudnn", the fused GPU kernel; None: cuDNN on a
    GPU where it can run this and there is no bias or mask, else blockwise, or xla for a bias.

    A query that sees no key gets exactly 0 and passes no gradient (jax.nn: the mean of all values).
    It, and keys and values that no query sees, may hold anything, NaN included. Second derivatives,
    in both orders, want "naive", "xla" or "blockwise", jvp "naive" or "xla". ValueError for what
    does not fit, and for what a named implementation cannot do.
    """
    implementations = {"naive": naive, "xla": xla, "blockwise": blockwise, "cudnn": cudnn}
    shape = jnp.shape(query)
    query, key, value = _check_qkv(query, key, value)
    (B, T, N, H), S = query.shape, key.shape[1]
    bias = _check_scores("bias", bias, jnp.floating, (B, N, T, S))
    mask = _check_scores("mask", mask, jnp.bool_, (B, N, T, S))
    lengths = (_check_lengths("query_seq_lengths", query_seq_lengths, B),
               _check_lengths("key_value_seq_lengths", key_value_seq_lengths, B))
    window = _check_window(local_window_size, is_causal)
    scale = 1 / math.sqrt(max(H, 1)) if scale is None else scale
    if jnp.ndim(scale) != 0:
        raise ValueError(f"scale must be a scalar: got shape {jnp.shape(scale)}")
    if implementation not in (None, *implementations):
        raise ValueError(f"implementation {implementation!r} is none of {[*implementations]}")
    refusal = cudnn_refusal(query, key, value, bias, mask, scale=scale, is_causal=is_causal,
                            local_window_size=local_window_size)
    # Code that is being traced may be meant for another machine; what runs right now is not.
    if not _cuda_devices() and not isinstance(jnp.zeros(()), jax.core.Tracer):
        refusal = refusal or "there is no NVIDIA GPU"
    if implementation == "cudnn" and refusal is not None:
        raise ValueError(f"'cudnn' cannot run this: {refusal}; use None, 'blockwise' or 'xla'")
    if query.size == 0 or S == 0:
        return jnp.zeros(shape, query.dtype)

    if bias is not None:  # an infinite score would turn into NaN on its way
        hidden = bias == -jnp.inf
        bias, mask = jnp.where(hidden, 0, bias), ~hidden if mask is None else mask & ~hidden
    alive, seen = _taking_part(query, key, mask, lengths, window)
    # Zeros now, for every implementation: a weight of 0 is not enough, since 0 * NaN is NaN.
    query = jnp.where(alive, query, 0)
    key, value = jnp.where(seen, key, 0), jnp.where(seen, value, 0)

    arguments = query, key, value, bias, mask, lengths, window, scale
    if implementation is None and bias is None and mask is None and refusal is None:
        # Decided where the program is compiled for a device, and not by the default device.
        out = jax.lax.platform_dependent(
            cuda=lambda: cudnn(*arguments), default=lambda: blockwise(*arguments))
    else:
        name = implementation or ("blockwise" if bias is None else "xla")
        out = implementations[name](*arguments)
    return jnp.where(alive, out, 0).reshape(shape)


def _taking_part(query, key, mask, lengths, window):
    """bool [b, T, n, 1]: queries that see a key; bool [b, S, k, 1]: keys that a query sees."""
    T, (_, S, K, _) = query.shape[1], key.shape
    (query_lengths, key_lengths), (left, right) = lengths, window
    if mask is None:  # then without any [T, S] array, so that memory stays linear
        return (_sees_any(T, query_lengths, S, key_lengths, left, right),
                _sees_any(S, key_lengths, T, query_lengths, right, left))
    pairs = visible(positions(T), positions(S), mask, lengths, window)  # [b, n, T, S]
    by_group = pairs.reshape(pairs.shape[0], min(K, pairs.shape[1]), -1, T, S)  # [b, k, g, T, S]
    alive, seen = pairs.any(axis=3), by_group.any(axis=(2, 3))  # [b, n, T], [b, k, S]
    return alive.swapaxes(1, 2)[..., None], seen.swapaxes(1, 2)[..., None]


def _sees_any(size, length, others, other_length, before, after):
    """bool [b, size, 1, 1]: places p that see one of p - before .. p + after `others`."""
    p = positions(size)[None, :, None, None]  # [1, size, 1, 1]
    length, others = (n if x is None else jnp.minimum(x[:, None, None, None], n)
                      for x, n in ((length, size), (other_length, others)))  # [b, 1, 1, 1]
    first = jnp.zeros_like(p) if before is None else jnp.maximum(p - before, 0)
    last = others - 1 if after is None else jnp.minimum(p + after, others - 1)
    return (p < length) & (first <= last)


def xla(query, key, value, bias, mask, lengths, window, scale):
    """`jax.nn.dot_product_attention` as XLA compiles it."""
    # Of float16 it asks for products with float32 sums, which CPUs lack.
    wide = jnp.float32 if query.dtype == jnp.float16 else query.dtype
    arrays = (x.astype(wide) for x in (query, key, value))
    return _jax_nn("xla", *arrays, bias, mask, lengths, window, scale).astype(query.dtype)


def _jax_nn(name, query, key, value, bias, mask, lengths, window, scale):
    return jax.nn.dot_product_attention(
        query, key, value, bias, mask, scale=scale, is_causal=window[1] == 0,
        query_seq_lengths=lengths[0], key_value_seq_lengths=lengths[1],
        local_window_size=None if window[0] is None else window, implementation=name)


# ---------------------------------------------------------------- fused, in plain JAX
BLOCK = 256  # queries and keys per tile, at most: measured best of 128 to 512 on a CPU


def blockwise(query, key, value, bias, mask, lengths, window, scale):
    """Attention tile by tile: never more than one tile of scores per head is held.

    A softmax needs the largest score m of a row and the sum l of its exponentials. Both can be kept
    up to date while tiles of keys pass by (online softmax: Milakov & Gimelshein 2018,
    arXiv:1805.02867), and so can the weighted sum a of the values (Rabe & Staats 2021,
    arXiv:2112.05682). A tile with scores s = q k^T (q comes scaled) and values v makes

        m' = max(m, max(s))    p = exp(s - m')    c = exp(m - m')
        l' = c l + sum(p)      a' = c a + p v               and in the end   out = a / l

    The backward pass stores no scores either: from L = m + log(l), one number a row, it makes the
    weights again (FlashAttention: Dao et al. 2022, arXiv:2205.14135; Dao 2023, arXiv:2307.08691):

        p = exp(s - L)    ds = p (dout v^T - sum(dout out))
        dq += ds k        dk += ds^T q        dv += p^T dout
    """
    if bias is not None:
        raise ValueError("'blockwise' takes no bias (it is [T, S], as its gradient is): use None")
    (B, T, N, H), (S, K) = query.shape, key.shape[1:3]
    block, heads = BLOCK, N * B if isinstance(B, int) else N  # B may be symbolic, for jax.export
    while heads * block**2 > 2**19 and block > 64:  # larger tiles of scores leave a CPU's cache
        block //= 2
    bq, bk = (math.ceil(n / math.ceil(n / block)) for n in (T, S))  # 300 is two tiles of 150
    wide = jnp.promote_types(query.dtype, jnp.float32)
    q = _tiles(query.astype(wide) * jnp.asarray(scale, wide), K, bq)  # [T / bq, B, K, R, H]
    k, v = (_tiles(x.astype(wide), K, bk) for x in (key, value))  # [S / bk, B, K, s, H]
    out = _blockwise((S, bq, window), *alike((q, k, v, mask, lengths)))
    out = out.reshape(-1, B, K, N // K, bq, H).reshape(-1, B, N, bq, H).transpose(1, 0, 3, 2, 4)
    return out.reshape(B, -1, N, H)[:, :T].astype(query.dtype)


def _tiles(x, K, block):
    """[B, T, n, H] -> [tiles, B, K, R, H], R = n / K * block: the heads of a group in turn.

    So a tile's products are plain matrix products, one for each example and key/value head.
    """
    B, T, n, H = x.shape
    x = jnp.pad(x, ((0, 0), (0, -T % block), (0, 0), (0, 0)))
    x = x.reshape(B, -1, block, n, H).transpose(1, 0, 3, 2, 4)  # [tiles, B, n, block, H]
    return x.reshape(-1, B, K, n // K, block, H).reshape(-1, B, K, n // K * block, H)


def _forward(sizes, q, k, v, mask, lengths):
    pairs, seen = _pairs(sizes, q, k, mask, lengths)

    def visit(carry, pair, is_cut):
        (a, m, l), (i, j) = carry, pair
        s = q[i] @ k[j].swapaxes(2, 3)  # [B, K, R, s]
        s = jnp.where(seen(i, j), s, HIDDEN) if is_cut else s
        m_new = jnp.maximum(m[i], s.max(axis=3, keepdims=True))  # [B, K, R, 1]
        p, c = jnp.exp(s - m_new), jnp.exp(m[i] - m_new)
        l_new = c * l[i] + p.sum(axis=3, keepdims=True)
        return (put(a, c * a[i] + p @ v[j], i), put(m, m_new, i), put(l, l_new, i)), None

    zero = jnp.zeros_like(q[..., :1])
    a, m, l = _scan(visit, (jnp.zeros_like(q), zero + HIDDEN / 2, zero), pairs)
    l = jnp.where(l == 0, 1, l)  # a row that sees no key: 0 / 1
    return a / l, (q, k, v, mask, lengths, a / l, m + jnp.log(l))


def _backward(sizes, residuals, do):
    q, k, v, mask, lengths, out, L = residuals
    pairs, seen = _pairs(sizes, q, k, mask, lengths)
    delta = (do * out).sum(axis=4, keepdims=True)  # [T / bq, B, K, R, 1]
    # Keys in rows and queries in columns: so no product transposes a tile of weights first.
    qT, doT, kT, LT, deltaT = (x.swapaxes(3, 4) for x in (q, do, k, L, delta))

    def visit(carry, pair, is_cut):
        (dqT, dk, dv), (i, j) = carry, pair
        s = k[j] @ qT[i]  # [B, K, s, R]
        s = jnp.where(seen(i, j).swapaxes(2, 3), s, HIDDEN) if is_cut else s
        p = jnp.exp(s - LT[i])
        ds = p * (v[j] @ doT[i] - deltaT[i])
        dqT = put(dqT, dqT[i] + kT[j] @ ds, i)
        return (dqT, put(dk, dk[j] + ds @ q[i], j), put(dv, dv[j] + p @ do[i], j)), None

    dqT, dk, dv = _scan(visit, (jnp.zeros_like(qT), jnp.zeros_like(k), jnp.zeros_like(v)), pairs)
    return dqT.swapaxes(3, 4), dk, dv, None, None


_blockwise = jax.custom_vjp(lambda *args: _forward(*args)[0], nondiff_argnums=(0,))
_blockwise.defvjp(_forward, _backward)
put = functools.partial(jax.lax.dynamic_update_index_in_dim, axis=0)  # (array, its tile i, i)


def _scan(visit, carry, pairs):
    for is_cut, some in enumerate(pairs):
        if len(some):
            carry, _ = jax.lax.scan(functools.partial(visit, is_cut=is_cut), carry, some)
    return carry


def _pairs(sizes, q, k, mask, lengths):
    """Pairs (query tile i, key tile j), int32 [n, 2], seen whole and seen in part; and `seen`.

    Others are not visited. seen(i, j): which keys of a pair its queries see, bool [b, k, R, s].
    """
    (S, bq, window), (K, R), bk = sizes, q.shape[2:4], k.shape[3]
    left, right = (np.inf if side is None else side for side in window)
    i, j = np.meshgrid(np.arange(len(q)) * bq, np.arange(len(k)) * bk, indexing="ij")
    low, high = j - (i + bq - 1), (j + bk - 1) - i  # the smallest and the largest key - query
    visited = (low <= right) & (high >= -left)
    whole = visited & (high <= right) & (low >= -left) & (j + bk <= S)
    whole &= mask is None and lengths == (None, None)  # what these hide the shapes do not tell

    def seen(i, j):
        rows, cols, part = i * bq + positions(bq), j * bk + positions(bk), mask
        if mask is not None:  # "clip" reads an axis of 1 as one of any size
            part = jnp.take(jnp.take(mask, rows, 2, mode="clip"), cols, 3, mode="clip")
        both = visible(rows, cols, part, lengths, window) & (cols < S)[None, None, None]
        both = both.reshape(both.shape[0], min(K, both.shape[1]), -1, bq, bk)  # [b, k, g, bq, s]
        both = jnp.broadcast_to(both, (*both.shape[:2], R // bq, bq, bk))
        return both.reshape(*both.shape[:2], R, bk)

    return [np.argwhere(x).astype(np.int32) for x in (whole, visited & ~whole)], seen


def alike(arrays):
    """A pytree of arrays as it is, but each made from all (which the compiler finds needless).

    So all are mapped if jax.vmap maps one, and all vary over the devices of a jax.shard_map if one
    does, as the carry of a loop must from its start.
    """
    never = [(x != x).any() & False for x in jax.tree.leaves(arrays)]
    never = functools.reduce(jnp.logical_or, never)
    return jax.tree.map(lambda x: jnp.where(never, x, x), arrays)


# ---------------------------------------------------------------- the layer
def init_attention(key, model_dim, num_heads, num_kv_heads=None, head_dim=None, dtype=jnp.float32):
    """Weights of a layer: {"wq": [D, N, H], "wk": [D, K, H], "wv": [D, K, H], "wo": [N, H, D]}.

    key: a `jax.random.key`. Variance 1 / fan-in (LeCun). K = N without num_kv_heads, H = D / N
    without head_dim. ValueError if the counts do not divide each other or a size is less than 1.
    """
    D, N, K = model_dim, num_heads, num_heads if num_kv_heads is None else num_kv_heads
    H = D // max(N, 1) if head_dim is None else head_dim
    if min(D, N, K, H) < 1 or N % K or (head_dim is None and D % N):
        raise ValueError("sizes must be positive, K divide N, and without head_dim N divide D: got "
                         f"{model_dim=}, {num_heads=}, {num_kv_heads=}, {head_dim=}")
    to_heads = jax.nn.initializers.lecun_normal(in_axis=0, out_axis=(1, 2))
    from_heads = jax.nn.initializers.lecun_normal(in_axis=(0, 1), out_axis=2)
    q, k, v, o = jax.random.split(key, 4)
    return {"wq": to_heads(q, (D, N, H), dtype), "wk": to_heads(k, (D, K, H), dtype),
            "wv": to_heads(v, (D, K, H), dtype), "wo": from_heads(o, (N, H, D), dtype)}


def attention(params, x, *, is_causal=True, key_value_seq_lengths=None, rotate=None,
              implementation=None):
    """Self-attention over x [B, T, D] -> [B, T, D]; MHA, GQA or MQA as the weights' shapes have it.

    `rotate(x [B, T, n, H], positions int32 [B, T]) -> x` is applied to queries and keys (rotary
    embeddings). The other arguments are those of `dot_product_attention`, but causal by default.
    """
    at = jnp.broadcast_to(positions(x.shape[-2]), x.shape[:-1])  # [B, T]
    query, key, value = _project(params, x, at, rotate)
    out = dot_product_attention(
        query, key, value, is_causal=is_causal, key_value_seq_lengths=key_value_seq_lengths,
        implementation=implementation)  # [B, T, N, H]
    return jnp.einsum("BTNH,NHD->BTD", out, params["wo"])


def _project(params, x, at, rotate):
    """Queries [B, T, N, H], keys and values [B, T, K, H] of x, at the positions `at` [B, T]."""
    D = len(params["wq"])
    if x.ndim != 3 or x.shape[-1] != D:
        raise ValueError(f"x must be [B, T, {D}] to fit the weights: got {x.shape}")
    query, key, value = (jnp.einsum("BTD,DnH->BTnH", x, params[w]) for w in ("wq", "wk", "wv"))
    if rotate is not None:
        query, key = rotate(query, at), rotate(key, at)
    return query, key, value


# ---------------------------------------------------------------- the cache
def init_kv_cache(batch_size, max_length, num_kv_heads, head_dim, dtype=jnp.float32):
    """An empty cache, {"k": [B, S, K, H], "v": [B, S, K, H], "length": int32 [B]} of zeros."""
    shape = batch_size, max_length, num_kv_heads, head_dim
    return {"k": jnp.zeros(shape, dtype), "v": jnp.zeros(shape, dtype),
            "length": jnp.zeros(batch_size, jnp.int32)}


def kv_cache_bytes(batch_size, max_length, num_kv_heads, head_dim, dtype=jnp.float32):
    """Bytes of the keys and values of a layer's cache, 2 B S K H times the width of the dtype."""
    return 2 * batch_size * max_length * num_kv_heads * head_dim * jnp.dtype(dtype).itemsize


def cached_attention(params, x, cache, *, layer=None, seq_lengths=None, rotate=None):
    """Causal self-attention of new tokens to all before them: ([B, T, D], the cache with them).

    For prefill (T > 1), at once or in chunks, and decoding (T = 1): however a sequence is cut, the
    outputs are those of `attention` on all of it, up to rounding. Rows may stand at different
    positions; that takes a mask, which cuDNN does not serve. It compiles once per shape.

    x: [B, T, D], tokens that continue each row. seq_lengths, int [B]: how many of them count (all);
    the rest is padding on the right. cache: may be donated; unused slots may hold anything. layer:
    which one, if the cache has a leading axis of layers; a loop over them then writes in place.
    rotate: as in `attention`. A row that would run past the last slot, or whose seq_lengths entry
    is not in 0..T, keeps its cache and length and gets NaN (XLA by itself would shift the write
    over older entries). ValueError for shapes that do not fit, T > S too, and a layer that is none.
    """
    if layer is None:  # a stack of one
        stack = jax.tree.map(lambda leaf: leaf[None], cache)
        out, stack = cached_attention(
            params, x, stack, layer=0, seq_lengths=seq_lengths, rotate=rotate)
        return out, jax.tree.map(lambda leaf: leaf[0], stack)
    (B, T), (L, *shape), (_, K, H) = x.shape[:2], cache["k"].shape, params["wk"].shape
    S = shape[1] if len(shape) == 4 else 0
    if shape != [B, S, K, H] or T > S:
        raise ValueError(f"to fit x, the cache must be [{B}, S >= {T}, {K}, {H}]: got {shape}")
    if isinstance(layer, int) and not 0 <= layer < L:
        raise ValueError(f"layer must lie in 0..{L - 1}, got {layer}")
    new = jnp.full(B, T) if seq_lengths is None else seq_lengths
    new, start = _check_lengths("seq_lengths", new, B), cache["length"][layer]  # [B] each
    fits = (new >= 0) & (new <= T) & (start + new <= S)  # [B]
    at = start[:, None] + positions(T)[None, :]  # [B, T]
    query, key, value = _project(params, x, at, rotate)
    valid = fits[:, None] & (positions(T)[None, :] < new[:, None])  # [B, T]
    slots = jnp.where(valid, at, S)  # there is no slot S, and mode="drop" drops what goes there

    def write(stack, x):
        return stack.at[layer, positions(B)[:, None], slots].set(
            x.astype(stack.dtype), mode="drop", out_sharding=jax.typeof(stack).sharding)

    cache = {"k": write(cache["k"], key), "v": write(cache["v"], value),
             "length": cache["length"].at[layer].add(jnp.where(fits, new, 0))}
    key, value = (cache[name][layer].astype(query.dtype) for name in ("k", "v"))  # [B, S, K, H]
    mask = valid[:, :, None] & (positions(S)[None, None, :] <= at[:, :, None])  # [B, T, S]
    out = dot_product_attention(query, key, value, mask=mask[:, None],  # [B, T, N, H]
                                implementation="naive" if T == 1 else None)  # T = 1: T S is small
    out = jnp.einsum("BTNH,NHD->BTD", out, params["wo"])
    return jnp.where(fits[:, None, None], out, jnp.nan), cache


# ---------------------------------------------------------------- what cuDNN asks for
def cudnn_refusal(query, key, value, bias=None, mask=None, **options):
    """Why cuDNN cannot run `dot_product_attention` on these arguments (a str), or None if it can.

    options: those of that function. Without a GPU the call can be lowered for CUDA all the same.
    """
    (T, _, H), S, dtype = query.shape[-3:], key.shape[-3], query.dtype
    window = options.get("local_window_size")
    left, right = _check_window(window, options.get("is_causal", False))
    plugins = [importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)]
    oldest = min((float(d.compute_capability) for d in _cuda_devices()), default=8.0)
    largest = 256 if oldest >= 9 else 128
    rules = [
        (any(plugins), "the CUDA plugin is not installed (pip install 'jax[cuda12]')"),
        (oldest >= 8, f"it needs compute capability 8.0, this GPU has {oldest}"),
        (dtype in (jnp.float16, jnp.bfloat16), f"it takes float16 and bfloat16, not {dtype}"),
        (0 < H <= largest and H % 8 == 0,
         f"the head dimension must be a multiple of 8 up to {largest}, not {H}"),
        (T % 2 == S % 2 == 0, f"both lengths must be even (for the gradient), not {T} and {S}"),
        (window is None or (right == 0 and left >= 0),
         f"a window must end at the query itself, (left, 0), or be causal, not {window}"),
        (not isinstance(options.get("scale"), jax.core.Tracer),
         "the scale must be a number known when the call is traced")]
    return next((reason for is_kept, reason in rules if not is_kept), None)


def _cuda_devices():
    try:
        return jax.devices("cuda")
    except RuntimeError:
        return []


def cudnn(query, key, value, bias, mask, lengths, window, scale):
    """The fused kernel, through `jax.nn.dot_product_attention`."""
    (B, T, N, _), S = query.shape, key.shape[1]
    # The kernel reads a mask and a bias entry by entry.
    bias, mask = (None if x is None else jnp.broadcast_to(x, (B, N, T, S)) for x in (bias, mask))
    if lengths != (None, None):
        # It wants both, and makes 0 / 0 of a length 0; such rows are zeroed later, so 1 will do.
        lengths = tuple(jnp.full(B, n, jnp.int32) if x is None else jnp.maximum(x, 1)
                        for x, n in zip(lengths, (T, S)))
    # Its rule for vmap wants all operands mapped, along axis 0: there a reshape moves that axis.
    arrays = jax.tree.map(lambda x: x.reshape(-1).reshape(x.shape),
                          alike((query, key, value, bias, mask, lengths)))
    return _jax_nn("cudnn", *arrays, window, float(scale))


# ---------------------------------------------------------------- what is refused
def _check_qkv(query, key, value):
    """The three as arrays with an axis B."""
    arrays = query, key, value = [jnp.asarray(x) for x in (query, key, value)]
    if not (query.ndim in (3, 4) and query.ndim == key.ndim and key.shape == value.shape
            and query.shape[:-3] == key.shape[:-3] and query.shape[-1] == key.shape[-1]
            and query.dtype == key.dtype == value.dtype
            and jnp.issubdtype(query.dtype, jnp.floating)):
        got = ", ".join(f"{x.dtype} {x.shape}" for x in arrays)
        raise ValueError("query [B, T, N, H] and key, value [B, S, K, H] must agree in B, S, K, H "
                         f"(or all lack B) and have one floating dtype: got {got}")
    N, K = query.shape[-2], key.shape[-2]
    if K < 1 or N % K:
        raise ValueError(f"query heads must be a multiple of key/value heads: got {N} and {K}")
    return [x if x.ndim == 4 else x[None] for x in arrays]


def _check_scores(name, x, kind, shape):
    """x as [b, n, t, s], each of them that of `shape`, [B, N, T, S], or 1."""
    if x is None:
        return None
    x = jnp.asarray(x)
    fits = x.ndim <= 4 and all(n in (1, want) for n, want in zip(x.shape[::-1], shape[::-1]))
    if not fits or not jnp.issubdtype(x.dtype, kind):
        raise ValueError(f"{name} must be {kind.__name__} and broadcast to [B, N, T, S], {shape}: "
                         f"got {x.dtype} {x.shape}")
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def _check_lengths(name, lengths, B):
    if lengths is None:
        return None
    lengths = jnp.asarray(lengths)
    if lengths.size != B or lengths.ndim > 1 or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(f"{name} must be {B} integers: got {lengths.dtype} {lengths.shape}")
    return lengths.reshape(B).astype(jnp.int32)


def _check_window(window, is_causal):
    """How far a query sees to both sides, None without end: keys i - left .. i + right."""
    if window is None:
        return None, 0 if is_causal else None
    if np.shape(window) not in [(), (2,)] or np.asarray(window).dtype.kind not in "iu":
        raise ValueError(f"local_window_size must be an int or (left, right): got {window!r}")
    left, right = np.broadcast_to(window, 2).tolist()
    return left, min(right, 0) if is_causal else right
