# SPDX-License-Identifier: MIT
"""Attention in plain JAX: four implementations that agree, grouped heads, and a key/value cache.

    out = dot_product_attention(query, key, value, is_causal=True)   # [B, T, N, H]

Axes, as in the JAX documentation: B batch, T query length, S key/value length, N query heads, K key/value
heads, G = N // K query heads per key/value head, H head dimension, D model dimension. Query head n reads
key/value head n // G: multi-head attention (MHA) is K = N, multi-query (MQA, Shazeer 2019, arXiv:1911.02150)
is K = 1, grouped-query (GQA, Ainslie et al. 2023, arXiv:2305.13245) is everything between.

`python attention.py` measures the implementations on the machine at hand.
"""
import argparse
import functools
import importlib.util
import math
import numbers
import os
import time

import jax
import jax.numpy as jnp
import numpy as np

IMPLEMENTATIONS = ("naive", "xla", "cudnn", "blockwise")
BLOCK = 256         # queries and keys per block of "blockwise": measured best of 128 to 512 on a CPU
HEADS_IN_CACHE = 8  # so many heads' blocks of scores (256 kB each in float32) stay in a CPU's cache


def dot_product_attention(query, key, value, bias=None, mask=None, *, scale=None, is_causal=False,
                          query_seq_lengths=None, key_value_seq_lengths=None, local_window_size=None,
                          implementation=None):
    """softmax(query key^T * scale + bias) value: the arguments and meaning of `jax.nn.dot_product_attention`.

    Args:
      query: [B, T, N, H], or [T, N, H] for a single example. Any floating dtype.
      key, value: [B, S, K, H] (or [S, K, H]) in the query's dtype. K divides N.
      bias: added to the scaled scores, broadcasts to [B, N, T, S]. An entry of -inf masks.
      mask: boolean, True means "may attend", broadcasts to [B, N, T, S].
      scale: factor on the scores, 1 / sqrt(H) by default.
      is_causal: query i sees keys 0..i, both counted from their start (top-left aligned, also when T != S).
      query_seq_lengths, key_value_seq_lengths: integers [B] (for a single example [1] or a scalar); whatever
        lies at or beyond them is padding. Either may be given alone.
      local_window_size: (left, right), or one int for both: query i sees keys i - left .. i + right.
      implementation: "naive" (the one to read), "xla" (that of jax.nn), "blockwise" (online softmax, memory
        linear in T and S, takes no bias), "cudnn" (the fused GPU kernel, see `cudnn_refusal`), or None: cuDNN
        on a GPU where it can run the call and there is no bias or mask, else "blockwise", or "xla" if there
        is a bias.

    Returns [B, T, N, H] (or [T, N, H]) in the query's dtype. The softmax is computed in float32, for float64
    inputs in float64 ("xla": always float32).

    A query with no allowed key returns exactly 0 and passes no gradient (jax.nn returns the mean of all
    values). Queries that see no key, and keys and values that no query sees, may hold anything, NaN included;
    keys and values that only some queries see must be finite. Forward-mode differentiation (jvp, jacfwd,
    hessian) needs "naive" or "xla"; the gradient of a gradient any but "cudnn". The `return_residual` of
    jax.nn is left out.

    Raises ValueError for shapes, dtypes or names that do not fit, and for what a named implementation cannot
    do. """
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    _check_qkv(query, key, value)
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation {implementation!r} must be None or one of {IMPLEMENTATIONS}")
    output_shape = query.shape
    if query.ndim == 3:
        query, key, value = query[None], key[None], value[None]
    (B, T, N, H), (_, S, K, _) = query.shape, key.shape
    bias = _check_scores_like("bias", bias, (B, N, T, S))
    mask = _check_scores_like("mask", mask, (B, N, T, S))
    lengths = (_check_lengths("query_seq_lengths", query_seq_lengths, B),
               _check_lengths("key_value_seq_lengths", key_value_seq_lengths, B))
    left, right = window = _window(local_window_size, is_causal)
    scale = 1 / math.sqrt(max(H, 1)) if scale is None else scale
    if jnp.ndim(scale) != 0:
        raise ValueError(f"scale must be a scalar: got shape {jnp.shape(scale)}")
    if implementation == "blockwise" and bias is not None:
        raise ValueError("implementation 'blockwise' takes no bias (it is [T, S], as its gradient is): "
                         "use 'naive', 'xla' or None")
    if implementation == "cudnn":
        reason = cudnn_refusal(query, key, value, bias, mask, scale=scale, is_causal=is_causal,
                               local_window_size=local_window_size)
        if reason is None and not isinstance(query, jax.core.Tracer) and not _cuda_devices():
            reason = "there is no NVIDIA GPU"
        if reason is not None:
            raise ValueError(f"'cudnn' cannot run this: {reason}; use None, 'blockwise' or 'xla' instead")
    if query.size == 0 or S == 0:
        return jnp.zeros(output_shape, query.dtype)

    if right is not None and 0 < T + right < S:   # keys that even the last query does not see
        S = T + right
        key, value = key[:, :S], value[:, :S]
        bias, mask = (x if x is None else x[..., :S] for x in (bias, mask))
    if bias is not None:
        finite = bias != -jnp.inf
        bias, mask = jnp.where(finite, bias, 0), finite if mask is None else mask & finite

    # Rows and keys that take part in nothing are zeroed here, once for every implementation: 0 * NaN is NaN,
    # so a weight of zero, or a zero cotangent, would not keep their content out.
    all_take_part = mask is None and lengths == (None, None) and left is None
    if not all_take_part:
        visible = _visible(jnp.arange(T), jnp.arange(S), window, mask, lengths)   # [B, N, T, S] (B, N or 1)
        alive = visible.any(axis=3).swapaxes(1, 2)[..., None]   # [B, T, N, 1]
        seen = _by_group(visible, K).any(axis=(2, 3))           # [B, K, S]
        seen = seen.swapaxes(1, 2)[..., None]                   # [B, S, K, 1]
        query, key, value = jnp.where(alive, query, 0), jnp.where(seen, key, 0), jnp.where(seen, value, 0)

    def run(implementation, query, key, value, bias, mask, lengths):
        if implementation == "naive":
            return _naive(query, key, value, bias, mask, lengths, window, scale)
        if implementation == "blockwise":
            score_dtype = jnp.promote_types(query.dtype, jnp.float32)
            return _blockwise_batch(window, query, key, value, jnp.asarray(scale, score_dtype), mask, lengths)
        return _jax_nn(implementation, query, key, value, bias, mask, lengths, window, scale)

    arrays = query, key, value, bias, mask, lengths
    if implementation is not None:
        out = run(implementation, *arrays)
    else:
        other = functools.partial(run, "xla" if bias is not None else "blockwise")
        fits_cudnn = bias is None and mask is None and cudnn_refusal(
            query, key, value, scale=scale, is_causal=is_causal, local_window_size=local_window_size) is None
        if fits_cudnn:   # which of the two branches is compiled is settled by the platform
            out = jax.lax.platform_dependent(*arrays, cuda=functools.partial(run, "cudnn"), default=other)
        else:
            out = other(*arrays)
    if not all_take_part:
        out = jnp.where(alive, out, 0)
    return out.reshape(output_shape)


def _visible(rows, cols, window, mask, lengths):
    """Which of the queries `rows` may see which of the keys `cols`: the one place where all conditions meet.

    `mask` is None or already cut to those rows and columns. Returns bool [B or 1, N or 1, rows, cols].
    """
    (left, right), (query_lengths, key_lengths) = window, lengths
    rows, cols = rows[:, None], cols[None, :]
    visible = jnp.ones((1, 1, rows.shape[0], cols.shape[1]), bool)
    if mask is not None:
        visible &= mask
    if right is not None:
        visible &= cols <= rows + right
    if left is not None:
        visible &= cols >= rows - left
    if query_lengths is not None:
        visible &= rows < query_lengths[:, None, None, None]
    if key_lengths is not None:
        visible &= cols < key_lengths[:, None, None, None]
    return visible


def _by_group(x, K):
    """[b, n, t, s] with n in (1, N) -> [b, K, t, G, s] or [b, 1, t, 1, s], the layout of grouped scores."""
    b, n, t, s = x.shape
    return x.reshape(b, K if n > 1 else 1, -1, t, s).swapaxes(2, 3)


def _naive(query, key, value, bias, mask, lengths, window, scale):
    """Attention as it is written on paper; holds all N x T x S scores at once."""
    (B, T, N, H), (_, S, K, _) = query.shape, key.shape
    score_dtype = jnp.promote_types(query.dtype, jnp.float32)
    query = query.reshape(B, T, K, N // K, H)                                     # [B, T, K, G, H]
    scores = jnp.einsum("BTKGH,BSKH->BKTGS", query, key, preferred_element_type=score_dtype)
    scores *= jnp.asarray(scale, score_dtype)
    if bias is not None:
        scores += _by_group(bias, K)
    visible = _by_group(_visible(jnp.arange(T), jnp.arange(S), window, mask, lengths), K)
    # The softmax over `where` gives 0 to what is masked, and nothing but 0 to a row in which all is.
    weights = jax.nn.softmax(scores, axis=-1, where=visible).astype(value.dtype)
    out = jnp.einsum("BKTGS,BSKH->BTKGH", weights, value)                         # [B, T, K, G, H]
    return out.reshape(B, T, N, H)


def _jax_nn(implementation, query, key, value, bias, mask, lengths, window, scale):
    """JAX's own implementations, with the arguments as they want them."""
    (B, T, N, _), S = query.shape, key.shape[1]
    (left, right), (query_lengths, key_lengths) = window, lengths
    if implementation == "cudnn":
        scale = float(scale)
        # The kernel reads a mask or bias entry by entry.
        bias, mask = (None if x is None else jnp.broadcast_to(x, (B, N, T, S)) for x in (bias, mask))
        if lengths != (None, None):
            # An empty row would be 0 / 0 in the kernel; our caller zeroes such rows, so any length will do.
            query_lengths, key_lengths = (jnp.full(B, n, jnp.int32) if x is None else jnp.maximum(x, 1)
                                          for x, n in zip(lengths, (T, S)))
        # JAX's batching rule for the kernel wants all operands mapped by vmap, along axis 0, or none: a zero
        # made from all of them is mapped if any is, and a reshape moves the mapped axis to the front.
        operands = query, key, value, bias, mask, query_lengths, key_lengths
        zero = sum(jnp.where(x.reshape(-1)[0] > 0, 0, 0) for x in operands if x is not None)
        query, key, value, bias, mask, query_lengths, key_lengths = (
            None if x is None else (x.reshape(-1) + zero.astype(x.dtype)).reshape(x.shape) for x in operands)
    local_window_size = None if left is None else window
    dtype = query.dtype
    if implementation == "xla" and dtype == jnp.float16:
        # Under jit jax.nn asks for a float16 dot with float32 sums, which XLA does not have on a CPU.
        query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    out = jax.nn.dot_product_attention(
        query, key, value, bias, mask, scale=scale, is_causal=right == 0, query_seq_lengths=query_lengths,
        key_value_seq_lengths=key_lengths, local_window_size=local_window_size, implementation=implementation)
    return out.astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blockwise(window, query, key, value, scale, mask, lengths):
    """Attention block by block: never more than one block of scores per head is held.

    A softmax needs the largest score m of a row and the sum l of its exponentials. Both can be kept up to
    date while blocks of keys pass by (online softmax: Milakov & Gimelshein 2018, arXiv:1805.02867), and so
    can the weighted sum a of the values (Rabe & Staats 2021, arXiv:2112.05682). A block with scores
    s = scale q k^T and values v makes

        m' = max(m, max(s))    p = exp(s - m')    c = exp(m - m')
        l' = c l + sum(p)      a' = c a + p v                          and in the end   out = a / l

    (p v is a matrix product, the rest goes by entries or rows), in whatever order the blocks come. The
    backward pass needs no stored scores either: from L = m + log(l), one number per row, it makes the weights
    again (FlashAttention: Dao et al. 2022, arXiv:2205.14135; with L alone: Dao 2023, arXiv:2307.08691):

        p = exp(s - L)                          dv += p^T dout
        ds = p (dout v^T - sum(dout out))       dq += scale ds k       dk += scale ds^T q

    Pairs of a query block and a key block in which nothing is visible, above the causal diagonal or outside the
    window, are skipped.

    Returns out [B, T, N, H] and L [B, K, T', G], T' being T rounded up to whole blocks.
    """
    (B, T, N, H), (_, S, K, _) = query.shape, key.shape
    (bq, bk), whole, cut, hide = _blocks(window, T, S, K, mask, lengths)
    query = _heads_first(query.reshape(B, T, K, N // K, H), bq)                           # [B, K, T, G, H]
    key, value = _heads_first(key, bk), _heads_first(value, bk)                           # [B, K, S, H]
    dot = functools.partial(jnp.einsum, preferred_element_type=scale.dtype)

    def step(masked, carry, block):
        (a, m, l), (i, j) = carry, block
        s = scale * dot("BKTGH,BKSH->BKTGS", _take(query, i, bq), _take(key, j, bk))     # [B, K, bq, G, bk]
        if masked:
            s = hide(s, i, j)
        m_i = _take(m, i, bq)                                                             # [B, K, bq, G]
        m_new = jnp.maximum(m_i, s.max(axis=-1))
        p = jnp.exp(s - m_new[..., None])
        c = jnp.exp(m_i - m_new)
        l_new = c * _take(l, i, bq) + p.sum(axis=-1)
        pv = dot("BKTGS,BKSH->BKTGH", p.astype(value.dtype), _take(value, j, bk))        # [B, K, bq, G, H]
        a_new = c[..., None] * _take(a, i, bq) + pv
        return (_put(a, a_new, i, bq), _put(m, m_new, i, bq), _put(l, l_new, i, bq)), None

    a = jnp.zeros(query.shape, scale.dtype)
    # Not -inf, whose difference is NaN, but half of what `hide` writes: a hidden score is then far below m even
    # in a row that has seen nothing yet.
    m = jnp.full(query.shape[:-1], jnp.finfo(scale.dtype).min / 2)
    l = jnp.zeros(query.shape[:-1], scale.dtype)
    a, m, l = _visit(step, (a, m, l), whole, cut)
    l = jnp.where(l == 0, 1, l)                      # rows that see no key: 0 / 1
    out = _heads_last(a / l[..., None], T).reshape(B, T, N, H)
    return out.astype(query.dtype), m + jnp.log(l)


def _blockwise_batch(window, query, key, value, scale, mask, lengths):
    """`_blockwise` for a batch, one example at a time where that is faster. Returns out alone."""
    def all_at_once(query, key, value, scale, mask, lengths):
        return _blockwise(window, query, key, value, scale, mask, lengths)[0]

    def one_by_one(query, key, value, scale, mask, lengths):
        shared = mask is not None and mask.shape[0] == 1
        def one(row):
            query, key, value, row_mask, lengths = jax.tree.map(lambda x: x[None], row)
            return all_at_once(query, key, value, scale, mask if shared else row_mask, lengths)[0]
        return jax.lax.map(one, (query, key, value, None if shared else mask, lengths))

    args = query, key, value, scale, mask, lengths
    (B, T, N, _), S = query.shape, key.shape[1]
    if B == 1 or B * N <= HEADS_IN_CACHE or T * S <= BLOCK**2 / 4:
        return all_at_once(*args)
    # On a CPU, 64 heads (B N) at once leave the cache and take 3 times as long.
    return jax.lax.platform_dependent(*args, cpu=one_by_one, default=all_at_once)


def _blockwise_forward(window, query, key, value, scale, mask, lengths):
    # The function itself is called, not its body: so the forward pass can be differentiated a second time.
    out, lse = _blockwise(window, query, key, value, scale, mask, lengths)
    # Times 1, since second derivatives under lax.scan mix up residuals that are inputs themselves (jax 0.10).
    query, key, value, scale = (x * 1 for x in (query, key, value, scale))
    return (out, lse), (query, key, value, scale, mask, lengths, out, lse)


def _blockwise_backward(window, residuals, cotangents):
    query, key, value, scale, mask, lengths, out, lse = residuals
    dout, dlse = cotangents
    (B, T, N, H), (_, S, K, _) = query.shape, key.shape
    (bq, bk), whole, cut, hide = _blocks(window, T, S, K, mask, lengths)
    # The cotangent of L is 0, save when the forward pass is differentiated a second time.
    delta = jnp.sum(dout.astype(scale.dtype) * out, axis=-1)                              # [B, T, N]
    delta = _heads_first(delta.reshape(B, T, K, N // K), bq) - dlse                       # [B, K, T, G]
    query, dout = (_heads_first(x.reshape(B, T, K, N // K, H), bq) for x in (query, dout))
    key, value = _heads_first(key, bk), _heads_first(value, bk)
    dot = functools.partial(jnp.einsum, preferred_element_type=scale.dtype)

    def step(masked, carry, block):
        (dq, dk, dv), (i, j) = carry, block
        q, do, k, v = _take(query, i, bq), _take(dout, i, bq), _take(key, j, bk), _take(value, j, bk)
        s = scale * dot("BKTGH,BKSH->BKTGS", q, k)                                       # [B, K, bq, G, bk]
        if masked:
            s = hide(s, i, j)
        p = jnp.exp(s - _take(lse, i, bq)[..., None])
        ds = p * (dot("BKTGH,BKSH->BKTGS", do, v) - _take(delta, i, bq)[..., None])
        p, ds = p.astype(query.dtype), ds.astype(query.dtype)
        dq = _put(dq, _take(dq, i, bq) + dot("BKTGS,BKSH->BKTGH", ds, k), i, bq)
        # A sum over two axes would make XLA transpose the weights first: fold T and G into one axis R.
        p, ds, q, do = (x.reshape(B, K, -1, x.shape[-1]) for x in (p, ds, q, do))        # [B, K, R, bk or H]
        dk = _put(dk, _take(dk, j, bk) + dot("BKRS,BKRH->BKSH", ds, q), j, bk)
        dv = _put(dv, _take(dv, j, bk) + dot("BKRS,BKRH->BKSH", p, do), j, bk)
        return (dq, dk, dv), None

    dq, dk, dv = _visit(step, tuple(jnp.zeros(x.shape, scale.dtype) for x in (query, key, value)), whole, cut)
    dscale = jnp.sum(dq * query)   # = sum(ds * q k^T): dq is not scaled yet
    dq = _heads_last(scale * dq, T).reshape(B, T, N, H)
    dk, dv = _heads_last(scale * dk, S), _heads_last(dv, S)
    return *(x.astype(query.dtype) for x in (dq, dk, dv)), dscale, None, None


_blockwise.defvjp(_blockwise_forward, _blockwise_backward)


def _blocks(window, T, S, K, mask, lengths):
    """Cut T x S into blocks of at most BLOCK x BLOCK -> sizes, blocks seen whole, blocks seen in part,
    `hide`.

    T and S are divided evenly (300 is two blocks of 150), so that little is padded. The blocks to visit, two
    arrays of (query block, key block), are known from the shapes; `hide(s, i, j)` masks the scores of one.
    """
    (left, right), (bq, bk) = window, (math.ceil(n / math.ceil(n / BLOCK)) for n in (T, S))
    i, j = np.meshgrid(np.arange(math.ceil(T / bq)), np.arange(math.ceil(S / bk)), indexing="ij")
    low, high = (j * bk - i * bq) - (bq - 1), (j * bk - i * bq) + (bk - 1)     # smallest, largest key - query
    right_, left_ = (S if right is None else right), (T if left is None else left)
    visited = (low <= right_) & (high >= -left_)
    whole = visited & (high <= right_) & (low >= -left_) & ((j + 1) * bk <= S)
    if mask is not None or lengths != (None, None):
        whole &= False   # what they hide is not known while tracing
    whole, cut = (np.argwhere(x).astype(np.int32) for x in (whole, visited & ~whole))
    if mask is not None:
        full = [n > 1 for n in mask.shape]
        mask = jnp.pad(mask, ((0, 0), (0, 0), (0, -T % bq * full[2]), (0, -S % bk * full[3])))

    def hide(s, i, j):
        m = mask
        if m is not None:
            m = _take(m, i, bq) if full[2] else m
            m = _take(m, j, bk, axis=3) if full[3] else m
        rows, cols = i * bq + jnp.arange(bq), j * bk + jnp.arange(bk)
        visible = _visible(rows, cols, window, m, lengths) & (cols < S)
        return jnp.where(_by_group(visible, K), s, jnp.finfo(s.dtype).min)

    return (bq, bk), whole, cut, hide


def _visit(step, carry, whole, cut):
    for masked, blocks in ((False, whole), (True, cut)):
        if len(blocks):
            carry, _ = jax.lax.scan(functools.partial(step, masked), carry, blocks)
    return carry


def _heads_first(x, block):
    """[B, T, K, ..] -> [B, K, T, ..], with T padded to a multiple of the block."""
    return jnp.pad(x, [(0, -n % block if axis == 1 else 0) for axis, n in enumerate(x.shape)]).swapaxes(1, 2)


def _heads_last(x, length):
    return x[:, :, :length].swapaxes(1, 2)


def _take(x, index, size, axis=2):
    return jax.lax.dynamic_slice_in_dim(x, index * size, size, axis)


def _put(x, block, index, size):
    return jax.lax.dynamic_update_slice_in_dim(x, block, index * size, 2)


def cudnn_refusal(query, key, value, bias=None, mask=None, **options):
    """Why cuDNN cannot run `dot_product_attention` on these arguments (a str), or None if it can.

    `options` are that function's. Whether a GPU is there is another question: without one the call can still
    be lowered for CUDA and read. (jax.nn has the same rules, but finds out later and raises errors of many
    kinds.) """
    T, S, H = query.shape[-3], key.shape[-3], query.shape[-1]
    window = options.get("local_window_size")
    left, right = _window(window, options.get("is_causal", False))
    capabilities = [tuple(map(int, d.compute_capability.split("."))) for d in _cuda_devices()]
    largest = 256 if capabilities and min(capabilities) >= (9, 0) else 128
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        return "the CUDA plugin is not installed (pip install 'jax[cuda12]')"
    if capabilities and min(capabilities) < (8, 0):
        return f"it needs compute capability 8.0, this GPU has {'.'.join(map(str, min(capabilities)))}"
    if query.dtype not in (jnp.float16, jnp.bfloat16):
        return f"it takes float16 and bfloat16, not {query.dtype}"
    if H % 8 or H > largest or H == 0:
        return f"the head dimension must be a multiple of 8 up to {largest}, not {H}"
    if 0 in query.shape or S == 0:
        return f"an array is empty: query {query.shape}, key {key.shape}"
    if T % 2 or S % 2:
        return f"both lengths must be even (for the gradient), not {T} and {S}"
    if window is not None and (right != 0 or left < 0):
        return f"a window must end at the query itself, (left, 0), or be causal, not {window}"
    if isinstance(options.get("scale"), jax.core.Tracer):
        return "the scale must be a number known when the call is traced"
    return None


def _cuda_devices():
    try:
        return jax.devices("cuda")
    except RuntimeError:
        return []


def _window(local_window_size, is_causal):
    """The reach of a query to both sides, None where it has no bound: keys i - left .. i + right."""
    if local_window_size is None:
        return None, 0 if is_causal else None
    window = local_window_size if np.ndim(local_window_size) else (local_window_size, local_window_size)
    if np.shape(window) != (2,) or not all(isinstance(side, numbers.Integral) for side in window):
        raise ValueError(f"local_window_size must be an int or (left, right): got {local_window_size!r}")
    left, right = map(int, window)
    return left, min(right, 0) if is_causal else right


def _check_qkv(query, key, value):
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if query.ndim not in (3, 4) or key.ndim != query.ndim or value.ndim != query.ndim:
        raise ValueError(f"expected query [B,T,N,H], key, value [B, S, K, H] or all without B: got {shapes}")
    if key.shape != value.shape or query.shape[-1] != key.shape[-1] or query.shape[:-3] != key.shape[:-3]:
        raise ValueError(f"query [B,T,N,H] and key, value [B,S,K,H] must agree in B, S, K, H: got {shapes}")
    if not query.dtype == key.dtype == value.dtype or not jnp.issubdtype(query.dtype, jnp.floating):
        raise ValueError("query, key and value must have one floating dtype: got "
                         f"{query.dtype}, {key.dtype}, {value.dtype}")
    N, K = query.shape[-2], key.shape[-2]
    if K == 0 or N % K:
        raise ValueError(f"query heads must be a multiple of key/value heads: got {N} and {K}")


def _check_scores_like(name, x, shape):
    if x is None:
        return None
    x = jnp.asarray(x)
    if name == "mask" and x.dtype != bool:
        raise ValueError(f"mask must be boolean (True: may attend): got {x.dtype} (additive: use bias)")
    if x.ndim > 4 or any(have not in (1, want) for have, want in zip(x.shape[::-1], shape[::-1])):
        raise ValueError(f"{name} must broadcast to [B, N, T, S] = {list(shape)}: got {list(x.shape)}")
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def _check_lengths(name, lengths, B):
    if lengths is None:
        return None
    lengths = jnp.asarray(lengths)
    if lengths.ndim == 0 and B == 1:
        lengths = lengths[None]
    if lengths.shape != (B,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(f"{name} must be {B} integers, one per example: got {lengths.dtype} {lengths.shape}")
    return lengths.astype(jnp.int32)


def init_attention(key, model_dim, num_heads, num_kv_heads=None, head_dim=None, dtype=jnp.float32):
    """Weights of one attention layer: {"wq": [D, N, H], "wk": [D, K, H], "wv": [D, K, H], "wo": [N, H, D]}.

    key: a `jax.random.key`. Variance 1 / fan-in (LeCun). K = N without num_kv_heads, H = D / N without
    head_dim. Raises ValueError if num_kv_heads does not divide num_heads, or num_heads not model_dim where
    head_dim is not given, or if a size is less than 1.
    """
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"num_heads must be a multiple of num_kv_heads: got {num_heads} and {num_kv_heads}")
    if head_dim is None and model_dim % num_heads:
        raise ValueError(f"model_dim must be a multiple of num_heads: got {model_dim}, {num_heads}")
    head_dim = model_dim // num_heads if head_dim is None else head_dim
    if model_dim < 1 or head_dim < 1:
        raise ValueError(f"model_dim and head_dim must be positive: got {model_dim} and {head_dim}")
    to_heads = jax.nn.initializers.lecun_normal(in_axis=0, out_axis=(1, 2))
    from_heads = jax.nn.initializers.lecun_normal(in_axis=(0, 1), out_axis=2)
    q, k, v, o = jax.random.split(key, 4)
    return {
        "wq": to_heads(q, (model_dim, num_heads, head_dim), dtype),
        "wk": to_heads(k, (model_dim, num_kv_heads, head_dim), dtype),
        "wv": to_heads(v, (model_dim, num_kv_heads, head_dim), dtype),
        "wo": from_heads(o, (num_heads, head_dim, model_dim), dtype),
    }


def attention(params, x, *, is_causal=True, key_value_seq_lengths=None, rotate=None, implementation=None):
    """Self-attention over x [B, T, D] -> [B, T, D]; MHA, GQA or MQA, as the shapes of the weights have it.

    `rotate(x [B, T, n, H], positions int32 [B, T]) -> x` is applied to queries and keys (rotary embeddings).
    The other arguments are those of `dot_product_attention`; is_causal is True by default here.
    """
    _check_input(params, x)
    positions = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
    query, key, value = _project(params, x, positions, rotate)
    out = dot_product_attention(query, key, value, is_causal=is_causal,
                                key_value_seq_lengths=key_value_seq_lengths, implementation=implementation)
    return jnp.einsum("BTNH,NHD->BTD", out, params["wo"])


def _check_input(params, x):
    N, K = params["wq"].shape[1], params["wk"].shape[1]
    if N % K:
        raise ValueError(f"query heads must be a multiple of key/value heads: got {N} and {K}")
    if x.ndim != 3 or x.shape[-1] != params["wq"].shape[0]:
        raise ValueError(f"x must be [B, T, {params['wq'].shape[0]}] to fit the weights: got {x.shape}")


def _project(params, x, positions, rotate):
    N, K = params["wq"].shape[1], params["wk"].shape[1]
    weights = [params["wq"], params["wk"], params["wv"]]
    if x.shape[1] > 1:   # one product is faster than three; for a single token, copying the weights costs more
        weights = [jnp.concatenate(weights, axis=1)]                                        # [D, N + 2 K, H]
    heads = jnp.concatenate([jnp.einsum("BTD,DnH->BTnH", x, w) for w in weights], axis=2)   # [B, T, N + 2 K, H]
    query, key, value = jnp.split(heads, [N, N + K], axis=2)
    if rotate is not None:
        query, key = rotate(query, positions), rotate(key, positions)
    return query, key, value


def init_kv_cache(batch_size, max_length, num_kv_heads, head_dim, dtype=jnp.float32):
    """An empty cache {"k": [B, S, K, H], "v": [B, S, K, H], "length": int32 [B]} of zeros, S = max_length."""
    # Two arrays, since one buffer cannot be donated twice.
    k, v = (jnp.zeros((batch_size, max_length, num_kv_heads, head_dim), dtype) for _ in range(2))
    return {"k": k, "v": v, "length": jnp.zeros(batch_size, jnp.int32)}


def kv_cache_bytes(batch_size, max_length, num_kv_heads, head_dim, dtype=jnp.float32):
    """Bytes of the keys and values of a cache, 2 B S K H times the width of the dtype (per layer)."""
    return 2 * batch_size * max_length * num_kv_heads * head_dim * jnp.dtype(dtype).itemsize


def cached_attention(params, x, cache, *, layer=None, seq_lengths=None, rotate=None):
    """Causal self-attention of new tokens to themselves and to all before them -> ([B, T, D], new cache).

    One function for prefill (the prompt at once, T > 1), prefill in chunks and decoding (T = 1): however a
    sequence is cut, the outputs are those of `attention` on all of it (up to rounding, also to the cache's
    dtype). Under jit it compiles once per shape of x and cache, whatever the lengths are.

    Args:
      x: [B, T, D], tokens that continue each row. ValueError if T exceeds S, the slots of the cache.
      cache: from `init_kv_cache` or an earlier call; may be donated. Slots beyond a row's length may hold
        anything.
      layer: for a cache whose leaves have a leading axis of layers, which of them to use (ValueError for an int
        that is none); the others are left as they are. A loop over the layers can then hand on one cache, and
        XLA write into it in place.
      seq_lengths: int [B], how many tokens of each row count (the rest is padding on the right, whose outputs
        are 0); all T by default.
      rotate: as in `attention`; positions count from the start of the row, not of x.

    A row that would run past the last slot keeps its cache and length and gets NaN outputs, as does one whose
    entry in seq_lengths is not in 0..T. (lax.dynamic_update_slice would clamp the write, and silently overwrite older
    entries.)
    """
    _check_input(params, x)
    if isinstance(layer, int) and not 0 <= layer < cache["k"].shape[0]:
        raise ValueError(f"layer must lie in 0..{cache['k'].shape[0] - 1}, got {layer}")
    at = () if layer is None else (layer,)
    (B, T, _), (_, K, H), shape = x.shape, params["wk"].shape, cache["k"].shape[len(at):]
    if shape[:1] + shape[2:] != (B, K, H):
        raise ValueError(f"the cache must be [{B}, S, {K}, {H}], to fit x and wk: got {list(shape)}")
    S = shape[1]
    if T > S:
        raise ValueError(f"x brings {T} tokens, more than the {S} that the cache can hold")
    new_tokens = _check_lengths("seq_lengths", seq_lengths, B)
    new_tokens = jnp.full(B, T, jnp.int32) if new_tokens is None else new_tokens
    start = cache["length"][at]                                                             # [B]
    fits = (0 <= new_tokens) & (new_tokens <= T) & (start + new_tokens <= S)                # [B]
    positions = start[:, None] + jnp.arange(T, dtype=jnp.int32)                             # [B, T]
    query, key, value = _project(params, x, positions, rotate)
    valid = fits[:, None] & (jnp.arange(T) < new_tokens[:, None])                           # [B, T]
    slots = jnp.where(valid, positions, S)    # there is no slot S: mode="drop" drops the write
    rows = jnp.arange(B)[:, None]
    cache = {
        "k": cache["k"].at[(*at, rows, slots)].set(key.astype(cache["k"].dtype), mode="drop"),
        "v": cache["v"].at[(*at, rows, slots)].set(value.astype(cache["v"].dtype), mode="drop"),
        "length": cache["length"].at[at].add(jnp.where(fits, new_tokens, 0)),
    }
    key, value = (cache[name][at].astype(query.dtype) for name in ("k", "v"))               # [B, S, K, H]
    mask = valid[:, :, None] & (jnp.arange(S) <= positions[:, :, None])                     # [B, T, S]
    if T == 1:
        out = _one_query(query, key, value, mask[:, 0])
    else:
        out = dot_product_attention(query, key, value, mask=mask[:, None])
    out = jnp.einsum("BTNH,NHD->BTD", out, params["wo"])
    return jnp.where(fits[:, None, None], out, jnp.nan), cache


def _one_query(query, key, value, mask):
    """Attention of one query a row: [B, 1, N, H], [B, S, K, H] twice, bool [B, S] -> [B, 1, N, H].

    `_naive` for a single row of scores. The products are so written that XLA reads keys and values in the layout of
    the cache (the swapaxes move nothing); an einsum would copy both first, which costs more than the rest.
    """
    (B, _, N, H), (_, S, K, _) = query.shape, key.shape
    # Masked slots may hold NaN, and 0 * NaN is NaN: a value would reach the output, a key the gradient.
    key, value = (jnp.where(mask[:, :, None, None], x, 0).swapaxes(1, 2) for x in (key, value))   # [B, K, S, H]
    query = query.reshape(B, K, N // K, H)                                                  # [B, K, G, H]
    wide = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.matmul(key, query.swapaxes(2, 3), preferred_element_type=wide)             # [B, K, S, G]
    # With B, K and G as one axis a row of scores lies side by side in memory, where its sums are faster.
    scores = scores.swapaxes(2, 3).reshape(B * N, S) / math.sqrt(H)                         # [B N, S]
    weights = jax.nn.softmax(scores, where=mask.repeat(N, axis=0)).astype(value.dtype)
    return (weights.reshape(B, K, N // K, S) @ value).reshape(B, 1, N, H)


def _measure(lengths=(128, 512, 1024, 2048, 4096), budget_s=70.0):
    """Time and temporary memory per length and implementation, interleaved -> list of dicts."""
    results, started = [], time.perf_counter()
    on_gpu = jax.default_backend() == "gpu"
    dtype = jnp.bfloat16 if on_gpu else jnp.float32
    names = ("naive", "xla", "blockwise", *(("cudnn",) if on_gpu else ()), None)
    for T in lengths:
        keys = jax.random.split(jax.random.key(0), 4)
        query, weight = (jax.random.normal(k, (1, T, 8, 64), dtype) for k in keys[:2])
        key, value = (jax.random.normal(k, (1, T, 2, 64), dtype) for k in keys[2:])
        compiled = {}
        for name in names:
            if name == "cudnn" and cudnn_refusal(query, key, value, is_causal=True) is not None:
                continue
            forward = functools.partial(dot_product_attention, is_causal=True, implementation=name)
            loss = lambda *qkv, forward=forward: jnp.vdot(weight, forward(*qkv))
            both = jax.value_and_grad(loss, (0, 1, 2))
            for direction, f in (("forward", forward), ("forward+backward", both)):
                compiled[name, direction] = jax.jit(f).lower(query, key, value).compile()
        seconds = {what: [] for what in compiled}
        for _ in range(5):
            for what, f in compiled.items():          # interleaved: a busy moment hits all alike
                warm = time.perf_counter() + 0.2   # not timed: cores at rest take their time to come to speed
                while time.perf_counter() < warm:
                    jax.block_until_ready(f(query, key, value))
                start = time.perf_counter()
                jax.block_until_ready(f(query, key, value))
                seconds[what].append(time.perf_counter() - start)
            if time.perf_counter() - started > budget_s:
                break
        for (name, direction), f in compiled.items():
            results.append({"T": T, "name": str(name), "direction": direction,
                            "ms": 1e3 * float(np.median(seconds[name, direction])),
                            "MiB": f.memory_analysis().temp_size_in_bytes / 2**20})
    return results


def _plot(results, path):
    from matplotlib.figure import Figure
    axes = Figure(figsize=(11, 4)).subplots(1, 3)
    panels = ("forward", "ms", "ms forward"), ("forward+backward", "ms", "ms forward+backward"), (
        "forward+backward", "MiB", "MiB temporary, forward+backward")
    for axis, (direction, what, title) in zip(axes, panels):
        for name in dict.fromkeys(r["name"] for r in results):
            points = [(r["T"], r[what]) for r in results if (r["name"], r["direction"]) == (name, direction)]
            axis.loglog(*zip(*points), marker="o", label=name)
        axis.set(title=title, xlabel="sequence length T")
    axes[0].legend()
    axes[0].figure.savefig(path, bbox_inches="tight")


def main(argv=None):
    """Print what attention costs on this machine: time and memory by length, and the bytes of KV caches."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--plot", metavar="FILE.png", help="draw the table as well (needs matplotlib)")
    plot = parser.parse_args(argv).plot
    if plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    # The CUDA plugin prints a traceback on a machine without a GPU, unless told not to look.
    if not any(map(os.path.exists, ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg"))):
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    devices = ", ".join(d.device_kind for d in jax.devices())
    print(f"jax {jax.__version__} on {devices}, {os.cpu_count()} CPU cores")
    results = _measure()
    print("causal, B=1 N=8 K=2 H=64; times naive in brackets; memory is XLA's temporary buffers\n")
    print(f"{'T':>5} {'':10} {'forward':>19} {'':>9}  {'forward+backward':>19}")
    for forward, both in zip(results[::2], results[1::2]):
        naive = {r["direction"]: r["ms"] for r in results if (r["T"], r["name"]) == (forward["T"], "naive")}
        cells = [f"{r['ms']:9.2f} ms ({naive[r['direction']] / r['ms']:4.1f}x) {r['MiB']:7.1f} MiB"
                 for r in (forward, both)]
        print(f"{forward['T']:>5} {forward['name']:10}", "  ".join(cells))
    B, S, L, N, H = 1, 8192, 32, 32, 128
    print(f"\nKV cache for {S} tokens, {L} layers, {N} query heads of {H}, bfloat16: 2 B S K H x bytes x L")
    for name, K in (("MHA", N), ("GQA", 8), ("MQA", 1)):
        size = L * kv_cache_bytes(B, S, K, H, jnp.bfloat16)
        print(f"  {name} K={K:<2}  2*{B}*{S}*{K}*{H}*2*{L} = {size:,} bytes, {size / 2**30:.3f} GiB")
    if plot:
        try:
            _plot(results, plot)
        except OSError as error:
            parser.error(f"cannot write {plot}: {error}")
        print(f"\ndrawn to {plot}")


if __name__ == "__main__":
    main()
