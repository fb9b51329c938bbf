# SPDX-License-Identifier: MIT
"""What the docstrings promise, as properties of pure functions.

    pytest test_props.py                                the usual number of examples
    HYPOTHESIS_PROFILE=thorough pytest test_props.py    ten times as many

Four properties carry the project and come first. Expected values come from loops in NumPy float64
or from arithmetic by hand, never from the function under test, save where two ways must agree.
"""
import contextlib
import functools
import importlib.metadata
import importlib.util
import inspect
import json
import math
import os
import tempfile

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
SCALE = 10 if THOROUGH else 1
FLAGS = ["--xla_force_host_platform_device_count=2"]
if not THOROUGH:  # the suite's time is compile time
    FLAGS += ["--xla_backend_optimization_level=0"]
    if importlib.metadata.version("jax").startswith("0.10."):  # later ones do not know these
        FLAGS += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
os.environ["XLA_FLAGS"] = " ".join(FLAGS)

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import optax
import optax.contrib
import pytest
from hypothesis import assume, example, given, settings, strategies as st
from hypothesis.extra import numpy as hnp
from jax.extend.mlir import ir
from jax.sharding import NamedSharding, PartitionSpec as P

import attention
import checkpoint
import data
import decoder
import minijax_train as train

settings.register_profile("default", deadline=None, max_examples=20 * SCALE)
settings.load_profile("default")
# float32 products on a GPU round like tensorfloat32: pinned, so that tolerances hold there too.
jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_traceback_in_locations_limit", 0)  # programs that know no lines: faster

IMPLEMENTATIONS = ("naive", "xla", "blockwise")
attend = attention.dot_product_attention


# ---------- what is drawn, and how it is compared
eighths = st.integers(-8, 8).map(lambda n: n / 8)  # exact in float32: no rounding flips a ReLU
reals = st.floats(-2, 2, width=32, allow_subnormal=False)
# 61 numbers, read round and round: a prime, so that no axis of an array repeats them.
pools = hnp.arrays(np.float32, 61, elements=reals, fill=st.nothing())
FIXED = np.sin(np.arange(61, dtype=np.float32))  # where the numbers do not matter


def eighths_of(*shape):
    return hnp.arrays(np.float32, shape, elements=eighths)


def reals_of(*shape):
    return pools.map(lambda pool: np.resize(pool, shape))


def lengths_of(batch, longest):
    """One length per example, from 0 to beyond the end."""
    return hnp.arrays(np.int32, batch, elements=st.integers(0, longest + 1))


def cut(pool, *shapes):
    """Arrays of these shapes, filled one after the other from the pool."""
    sizes = [int(np.prod(shape)) for shape in shapes]
    pieces = np.split(np.resize(pool, sum(sizes)), np.cumsum(sizes)[:-1])
    return [piece.reshape(shape) for piece, shape in zip(pieces, shapes)]


def abstract(*shape, dtype=jnp.bfloat16):
    """An array without content."""
    return jax.ShapeDtypeStruct(shape, dtype)


def close(got, want, tolerance=2e-5):
    """Equal within the tolerance, leaf by leaf; NaN only where it is wanted."""
    def check(got, want):
        if checkpoint.is_key(want):
            got, want = jax.random.key_data(got), jax.random.key_data(want)
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)

    jax.tree.map(check, got, want)


equal = functools.partial(close, tolerance=0)


def fetched(f, **options):
    """`f` under jit; its results come as NumPy arrays, so that to look at them compiles nothing."""
    run = jax.jit(f, **options)
    return lambda *args, **kwargs: jax.device_get(run(*args, **kwargs))


# ---------- the four properties that carry the project
# The loss's gradients are the parameters; the optimizer's state keeps them.
halve = jax.jit(train.make_train_step(
    lambda params, _: (optax.tree.norm(params, squared=True) / 2, {}), optax.sgd(0.5, 0.9)))


@given(scalar=eighths_of(), matrix=eighths_of(2, 3))
def test_gradient_tree_matches_parameter_tree(scalar, matrix):
    """Any tree's gradients (here the leaves themselves) have its structure, shapes and dtypes.
    Catches gradients cast or flattened, leaves confused."""
    params = {"pair": (scalar, np.zeros((0, 4), np.float32)), "list": [
        matrix.astype(jnp.bfloat16), {"half": matrix[0].astype(np.float16)}, None, {}]}
    zeros = optax.TraceState(jax.tree.map(np.zeros_like, params))
    after, (state, _), _ = halve(params, (zeros, optax.EmptyState()), ())
    describe = functools.partial(jax.tree.map, lambda leaf: (leaf.shape, leaf.dtype))
    assert describe(state.trace) == describe(after) == describe(params)
    equal((after, state.trace), (jax.tree.map(lambda leaf: leaf / 2, params), params))


@given(pool=pools, later=pools, i=st.integers(0, 10))
def test_causal_outputs_ignore_future_tokens(pool, later, i):
    """Tokens after i change no bit of outputs up to i, whose gradient by them is 0, by others not.
    Catches a diagonal off by one to either side, a mask that is a small score, a future maximum."""
    future = np.arange(12)[:, None, None] > i
    *now, ones = cut(pool, *shapes("causal"))
    other = [np.where(future, 100 * y, x) for x, y in zip(now, cut(later, *shapes("causal")))]
    cotangent = np.where(future, 0, np.ones_like(ones))
    for implementation in (*IMPLEMENTATIONS, None):
        run = compiled("causal", implementation)
        (out, gradients), (other_out, _) = jax.device_get(
            [run(*now, cotangent, {}), run(*other, cotangent, {})])
        equal(out[:, :i + 1], other_out[:, :i + 1])
        assert not any(gradient[:, i + 1:].any() for gradient in gradients.values())
        assert (gradients["value"][:, :i + 1] > 0).all()


@pytest.mark.parametrize("K", [8, 2, 1])
@pytest.mark.parametrize("B, T, dtype", [(1, 6, jnp.float32), (3, 1, jnp.bfloat16)])
def test_mha_gqa_mqa_output_shapes_agree(B, T, K, dtype):
    """For any number of key/value heads, outputs have the query's (or x's) shape and dtype.
    Catches heads of the output counted from the keys, an output in the dtype of the sums."""
    query, key, x = (abstract(B, T, *axes, dtype=dtype) for axes in ((8, 16), (K, 16), (24,)))
    for implementation in (*IMPLEMENTATIONS, None):
        call = functools.partial(attend, implementation=implementation)
        assert jax.eval_shape(call, query, key, key) == query
    params = jax.eval_shape(
        lambda: attention.init_attention(jax.random.key(0), 24, 8, K, 16, dtype))
    assert {name: weight.shape for name, weight in params.items()} == {
        "wq": (24, 8, 16), "wk": (24, K, 16), "wv": (24, K, 16), "wo": (8, 16, 24)}
    assert jax.eval_shape(attention.attention, params, x) == x


def need(reason):
    """Skip, or fail under MINIJAX_REQUIRE_GPU=1, if there is a reason why cuDNN cannot run."""
    if reason is not None:
        (pytest.fail if os.environ.get("MINIJAX_REQUIRE_GPU") == "1" else pytest.skip)(reason)


def has_gpu():
    return any(device.platform == "gpu" for device in jax.devices())


@given(pool=pools, K=st.sampled_from([4, 2, 1]), is_causal=st.booleans(), lengths=lengths_of(2, 64),
       which=st.sampled_from([None, "key_value_seq_lengths", "query_seq_lengths", "mask"]))
def test_cudnn_matches_naive_within_bf16_tolerance(pool, K, is_causal, lengths, which):
    """The fused kernel is as close to the float64 oracle as "naive" in bfloat16, gradients too.
    Catches a mask type, a scale or a head mapping that the kernel takes otherwise."""
    arrays = cut(pool, (2, 64, 4, 64), (2, 64, K, 64), (2, 64, K, 64), (2, 64, 4, 64))
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in arrays]
    need(attention.cudnn_refusal(*arrays[:3]) or (None if has_gpu() else "no NVIDIA GPU here"))
    options = {"is_causal": is_causal} | ({which: lengths} if which else {})
    if which == "mask":  # a log-sum-exp below -88.7 has overflowed in half-filled tiles
        arrays[0], arrays[1] = jnp.full_like(arrays[0], 4), jnp.full_like(arrays[1], -4)
        options["mask"] = np.ones((1, 1, 64, 64), bool)
    want, gradients, _ = oracle(*arrays, **options)
    errors = {}
    for implementation in ("naive", "cudnn"):
        call = functools.partial(attend, **options, implementation=implementation)
        out, pull = jax.vjp(jax.jit(call), *arrays[:3])
        got = zip((out, *pull(arrays[3])), (want, *list(gradients.values())[:3]))
        errors[implementation] = [np.abs(np.asarray(g, np.float64) - w).max() for g, w in got]
    for naive, fused in zip(errors["naive"], errors["cudnn"]):
        assert fused <= 2 * naive + 1e-3


# ---------- training: what is drawn, the oracle
def layers_of(sizes):
    return st.tuples(*[st.fixed_dictionaries({"w": eighths_of(i, o), "b": eighths_of(o)})
                       for i, o in zip(sizes, sizes[1:])]).map(list)


def batches_of(sizes, *shape):
    """Batches for an MLP of these sizes: the last axis of `shape` is the rows."""
    labels = hnp.arrays(np.int32, shape, elements=st.integers(0, sizes[-1] - 1))
    return st.fixed_dictionaries({"image": eighths_of(*shape, sizes[0]), "label": labels,
                                  "mask": hnp.arrays(bool, shape)})


models = st.sampled_from([(3, 4), (5, 4, 3), (7, 6, 6, 2)]).flatmap(
    lambda sizes: st.tuples(layers_of(sizes), batches_of(sizes, 6)))


def spoiled(batch, pixel, label):
    """The batch with these in its padding rows."""
    image = np.where(batch["mask"][:, None], batch["image"], np.float32(pixel))
    return {**batch, "image": image, "label": np.where(batch["mask"], batch["label"], label)}


def mlp_oracle(params, batch, smoothing=0.0):
    """(loss, gradients, logits of each real row) by the chain rule in float64, row after row."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    grads, loss, all_logits = jax.tree.map(np.zeros_like, params), 0.0, []
    rows = np.flatnonzero(batch["mask"])
    for row in rows:
        inputs = [batch["image"][row].astype(np.float64)]
        for layer in params:
            logits = inputs[-1] @ layer["w"] + layer["b"]
            inputs.append(np.maximum(logits, 0))
        target = np.full(len(logits), smoothing / len(logits))
        target[batch["label"][row]] += 1 - smoothing
        log_p = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        loss -= target @ log_p / len(rows)
        d = (np.exp(log_p) - target) / len(rows)
        for layer, grad, x in zip(params[::-1], grads[::-1], inputs[-2::-1]):
            grad["w"] += np.outer(x, d)
            grad["b"] += d
            d = layer["w"] @ d * (x > 0)
        all_logits.append(logits)
    return loss, grads, all_logits


# ---------- model and loss
loss_and_gradients = fetched(jax.value_and_grad(train.loss_fn, has_aux=True))


@given(model=models, smoothing=st.sampled_from([0.0, 0.1]), label=st.sampled_from([0, 255, -1]),
       pixel=st.sampled_from([np.nan, np.inf, 0, 1e30]), padding=st.booleans())
def test_loss_and_gradients_are_exact_means_over_real_rows(model, smoothing, label, pixel, padding):
    """Loss, accuracy, gradients are float64's, whatever padding holds; of padding alone 0 (T08).
    Catches means over all rows, a NaN that leaks as 0 * NaN, padding counted, 0 / 0."""
    params, batch = model
    batch["mask"] &= not padding
    (loss, metrics), grads = loss_and_gradients(params, spoiled(batch, pixel, label), smoothing)
    expected, expected_grads, logits = mlp_oracle(params, batch, smoothing)
    hits = [z.argmax() == y for z, y in zip(logits, batch["label"][batch["mask"]])]
    tolerance = 1e-5 if hits else 0
    np.testing.assert_allclose([loss, metrics["loss"]], expected, rtol=0, atol=tolerance)
    np.testing.assert_allclose(metrics["accuracy"], sum(hits) / max(len(hits), 1), rtol=1e-6)
    close(grads, expected_grads, tolerance)


def test_narrow_dtypes_limit_nothing():
    """512 rows of bfloat16, 300 classes, labels uint8: loss ln 300, 512 pairs (case T18).
    Catches bfloat16 sums (which stop at 256), labels that wrap round, counts that saturate."""
    params = [{"w": jnp.zeros((2, 300), jnp.bfloat16), "b": jnp.zeros(300, jnp.bfloat16)}]
    image, label = np.zeros((512, 2), jnp.bfloat16), np.full(512, 100, np.uint8)
    batch = {"image": image, "label": label, "mask": np.ones(512, bool)}
    loss, _ = loss_and_gradients(params, batch)[0]
    np.testing.assert_allclose(loss, np.log(300), rtol=1e-6)
    assert train.confusion_matrix(label, label, 300)[100, 100] == 512


FOUR = [{"w": jnp.eye(4), "b": jnp.zeros(4)}]  # the identity
STEP = {"image": np.eye(4, dtype=np.float32), "label": np.arange(4), "mask": np.ones(4, bool)}
FLAT = np.zeros(4, int)


@pytest.mark.parametrize("label, value, row", [
    ([0, 4, 1, 0], 4, 1), ([0, 1, -1, -2], -1, 2), (np.array([0, 0, 0, 255], np.uint8), 255, 3)])
def test_a_label_that_is_no_class_is_named_or_nan(label, value, row):
    """A ValueError where it can be seen; in compiled code NaN, no pair counted (cases L06, L09).
    Catches labels that wrap round or cost nothing, and a check that padding trips."""
    batch = {**STEP, "label": np.array(label)}
    words = f"must lie in 0..3, got {value}"
    for call in (lambda: train.loss_fn(FOUR, batch),
                 lambda: jax.grad(train.loss_fn, has_aux=True)(FOUR, batch),
                 lambda: train.confusion_matrix(batch["label"], FLAT, 4),
                 lambda: train.confusion_matrix(FLAT, batch["label"], 4)):
        with pytest.raises(ValueError, match=f"{words} in row {row}"):
            call()
    with pytest.raises(ValueError, match=words):
        train.evaluate(FOUR, [STEP, batch])
    assert np.isnan(loss_and_gradients(FOUR, batch)[0][0])
    real = (0 <= batch["label"]) & (batch["label"] < 4)
    count = jax.jit(functools.partial(train.confusion_matrix, num_classes=4))
    assert count(batch["label"], FLAT).sum() == count(FLAT, batch["label"]).sum() == real.sum()
    assert train.evaluate(FOUR, [batch | {"mask": real}])["confusion"].sum() == real.sum()


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=3 * SCALE)
def test_initial_weights_have_their_variance_and_differ(seed):
    """Variance 2 / I in the MLP (T19), 1 / fan-in in attention and decoder, 1 / 2 L of it where a
    branch ends, 1 in the embedding; biases are 0, norms 1; the key decides.
    Catches another initializer, a fan-in of the wrong axes, one key for two matrices or layers."""
    keys = jax.random.split(jax.random.key(seed), 6)
    weights = []
    for a, b, c in keys.reshape(2, 3):
        layers = train.init_mlp(a, [64, 64, 64, 300])
        weights += [layer.pop("w") for layer in layers]
        equal(layers, [{"b": np.zeros(size)} for size in (64, 64, 300)])
        weights += attention.init_attention(b, 64, 8, 8, 32).values()  # wq, wk, wv, wo
        params = decoder.init_decoder(c, vocab_size=64, num_layers=2, model_dim=64, num_heads=8)
        layers = params.pop("layers")
        heads, mlp = layers.pop("attention"), layers.pop("mlp")  # mlp_dim is 192 by default
        equal([params.pop("final_norm"), *layers.values()], [np.ones(64), *np.ones((2, 2, 64))])
        for leaf in (heads["wq"], heads["wk"], heads["wv"], mlp["w_gate"], mlp["w_up"],
                     heads["wo"], mlp["w_down"]):
            weights += list(leaf)  # by layer
        weights += [params["embedding"], params["output"]]
    variances = [2 / 64] * 3 + [1 / 64] * 3 + [1 / 256] + [1 / 64] * 10 + [1 / 64 / 4] * 2
    variances += [1 / 192 / 4] * 2 + [1, 1 / 64]
    weights = jax.device_get(weights)
    np.testing.assert_allclose([np.var(weight) for weight in weights], variances * 2, rtol=0.1)
    drawn = [weight.ravel()[0] for weight in weights] / np.sqrt(variances * 2)
    assert np.diff(np.sort(drawn)).min() > 1e-6


# ---------- optimizer and step
@pytest.mark.parametrize("options", [{}, {"b2": 0.95}, {"b1": 0.5, "b2": 0.5, "eps": 0.3}])
@given(grads=st.lists(eighths, min_size=4, max_size=4), decay=st.sampled_from([0.0, 0.01, 0.5]))
@example(grads=[0.5], decay=0.01)  # case T15: 0.899
@example(grads=[2e-8, 1e-8], decay=0.0)  # so small that eps is seen
def test_adamw_steps_equal_float64(options, grads, decay):
    """Steps on a falling rate equal AdamW written out; the defaults are Adam's 0.9, 0.999, 1e-8.
    Catches decay through the gradient, betas swapped, no bias correction, a late schedule."""
    optimizer = train.make_optimizer(lambda n: 0.1 / (1 + n), decay, **options)
    b1, b2, eps = ({"b1": 0.9, "b2": 0.999, "eps": 1e-8} | options).values()
    params, (p, m, v) = {"w": jnp.ones(())}, (1.0, 0.0, 0.0)
    state = optimizer.init(params)
    for n, g in enumerate(grads):
        updates, state = optimizer.update({"w": jnp.float32(g)}, state, params)
        params = optax.apply_updates(params, updates)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        ratio = m / (1 - b1 ** (n + 1)) / (np.sqrt(v / (1 - b2 ** (n + 1))) + eps)
        p -= 0.1 / (1 + n) * (ratio + decay * p)
        np.testing.assert_allclose(params["w"], p, atol=3e-5)


def test_names_decide_what_is_decayed():
    """With gradients 0 weights move by rate * decay; biases and norms, stacked too, stay (T14).
    Catches decay by the number of axes, and names that merely contain one of the words."""
    kept = dict.fromkeys(["b", "bias", "scale", "norm", "attention_norm", "up_b"], jnp.ones((2, 3)))
    moved = dict.fromkeys(["w", "wq", "embedding", "w_up", "normal"], jnp.ones(2))
    params, optimizer = [kept, moved], train.make_optimizer(0.1, 0.01)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    close(updates, [zeros[0], dict.fromkeys(moved, np.full(2, -0.001))], 1e-6)


def sgd_loop(params, batches):
    """(parameters, losses) of plain steps of size 0.5, with float64's gradients."""
    losses = []
    for batch in batches:
        loss, grads, _ = mlp_oracle(params, batch)
        params = jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)
        losses.append(loss)
    return params, losses


sgd = optax.sgd(0.5)
sgd_step = jax.jit(train.make_train_step(train.loss_fn, sgd))
sgd_steps = jax.jit(train.make_train_steps(sgd_step))


@given(params=layers_of((3, 4)), batches=batches_of((3, 4), 3, 4))
def test_steps_are_pure_and_equal_float64(params, batches):
    """K steps in one call and K calls equal the float64 loop; the arguments stay as they are.
    Catches hidden state, a batch fed twice, only the last metrics, the old parameters returned."""
    start = params, sgd.init(params)
    before = jax.tree.map(np.copy, (start, batches))
    items = [jax.tree.map(lambda leaf: leaf[n], batches) for n in range(3)]
    after, _, metrics = sgd_steps(*start, batches)
    state, losses = start, []
    for item in items:
        *state, item_metrics = sgd_step(*state, item)
        losses.append(item_metrics["loss"])
    equal((start, batches), before)
    expected = sgd_loop(params, items)
    close((after, list(metrics["loss"])), expected, 1e-5)
    close((state[0], losses), expected, 1e-5)


MODEL = {"w": jnp.array([[0.5, -0.25], [1.0, 0.75], [-0.5, 0.125]]), "b": jnp.array([0.5, -1.0])}
INPUTS = np.array([[1, 2, 3], [-1, 0.5, 1], [2, 0, -1]], np.float32)  # of three steps
ADAM, SGD = optax.adam(0.1), optax.sgd(0.1)
# What those of optax that need arguments are given, by the names of these: else 0.5.
WRAPPED = dict.fromkeys(["tx", "inner", "optimizer", "base_optimizer", "fast_optimizer"], ADAM)
INTEGERS = ["sync_period", "seed", "max_consecutive_errors", "max_backtracking_steps",
            "max_linesearch_steps"]
GIVEN = WRAPPED | dict.fromkeys(INTEGERS, 2) | {
    "transforms": {"m": ADAM, "n": SGD}, "param_labels": {"w": "m", "b": "n"},
    "mask": {"w": True, "b": False}, "freeze_mask": {"w": True, "b": False}, "measure_name": "m",
    "f": lambda update, params: update, "should_transform_fn": lambda *_, **__: True,
    "measure": lambda update, *_, **__: update, "inner_factory": optax.adam,
    "adv_optimizer": SGD, "step_size_fn": lambda n: 0.1}


def made(make):
    """An optimizer by one of optax's functions, with no more arguments than it needs."""
    needed = [name for name, p in inspect.signature(make).parameters.items()
              if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    optimizer = make(**{name: GIVEN.get(name, 0.5) for name in needed})
    return optimizer(0.1) if inspect.isfunction(optimizer) else optimizer


OPTIMIZERS = {  # all of optax and optax.contrib
    name: functools.partial(made, make) for name, make in
    (vars(optax) | vars(optax.contrib)).items() if name[0] != "_" and inspect.isfunction(make)
    and "Transformation" in str(inspect.signature(make).return_annotation)}
OPTIMIZERS |= {
    "chain": lambda: optax.chain(ADAM, optax.contrib.reduce_on_plateau()),  # case P04
    "MultiSteps": lambda: optax.MultiSteps(ADAM, 2),
    # Its type says that it takes the loss, but it does not.
    "sam": lambda: optax.GradientTransformation(*optax.contrib.sam(ADAM, SGD))}
REFUSED = {  # a loss function, a matrix, gradients of each example, parameters of a kind of its own
    "lbfgs": "value_fn", "scale_by_backtracking_linesearch": "value_fn",
    "scale_by_zoom_linesearch": "value_fn", "sophia": "obj_fn", "scale_by_muon": "structure",
    "dpsgd": "batch dimension", "differentially_private_aggregate": "batch dimension",
    "lookahead": "fast"}


def half_square(params, x):
    loss = jnp.sum((x @ params["w"] + params["b"] - 1) ** 2) / 2
    return loss, {"loss": loss}


@pytest.mark.filterwarnings("ignore")  # of optax, about its own
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optax_optimizer(name, tmp_path):
    """Donated, K steps in one call equal K calls, and the state comes back from a checkpoint.
    Catches a buffer donated twice, a missing `value`, a state that changes its type, half a fit."""
    optimizer = OPTIMIZERS[name]()
    train_step = train.make_train_step(half_square, optimizer)
    one = jax.jit(train_step, donate_argnums=(0, 1))
    many = jax.jit(train.make_train_steps(train_step), donate_argnums=(0, 1))
    if name in REFUSED:
        with pytest.raises((TypeError, ValueError, AttributeError), match=REFUSED[name]):
            many(MODEL, optimizer.init(MODEL), INPUTS)
        return
    start, state = train.init_state(MODEL, optimizer), train.init_state(MODEL, optimizer)
    params, opt_state, _ = many(start["params"], start["opt_state"], INPUTS)
    for n, x in enumerate(INPUTS, start=1):
        after = one(state["params"], state["opt_state"], x)
        state = {"params": after[0], "opt_state": after[1], "step": n}
    close((params, opt_state), after[:2], 1e-4)
    checkpoint.save_checkpoint(tmp_path / "c.npz", state)
    loaded = checkpoint.load_checkpoint(tmp_path / "c.npz", train.init_state(MODEL, optimizer))
    equal(loaded, state)


def test_an_optimizer_is_told_the_loss():
    """Polyak's step is loss / |g|^2 times g: for (3w - 1)^2 / 2 at w = 1, 1 - 2/36 * 6 (case P04).
    Catches a value left out, or that of other parameters."""
    optimizer, w = optax.polyak_sgd(max_learning_rate=9.0), jnp.array(1.0)
    step = train.make_train_step(lambda w, x: ((x * w - 1) ** 2 / 2, {}), optimizer)
    np.testing.assert_allclose(step(w, optimizer.init(w), 3.0)[0], 1 - 2 / 6, rtol=1e-6)


# ---------- loop and evaluation
@pytest.mark.parametrize("losses, saves, order", [
    ([[1, 2], [3, 4], [5]], False, "call_0 call_2 read 2:3_1s call_4 read 4:7_2s read 5:5_4s"),
    ([[1, 2], [3]], True, "call_0 read 2:3_1s save_2_2 call_2 read 3:3_2s save_3_3"),
    ([[1, 1], [1, np.nan], [1]], False, "call_0 call_2 read 2:2_1s call_4 read nan at step 4"),
    ([[1, 1], [-np.inf, 1]], True, "call_0 read 2:2_1s save_2_2 call_2 read -inf at step 3"),
    ([], True, "")])
def test_the_loop_keeps_the_device_busy_and_loses_nothing(losses, saves, order, monkeypatch):
    """Each interval is sent before the last is read, reported once, and then saved (case T22).
    Catches an idle device, a time from the start, a bad state saved, an interval lost or late."""
    events, clock, get = [], iter([100.0, 101.0, 103.0, 107.0]), jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda tree: events.append("read") or get(tree))
    monkeypatch.setattr(train.time, "perf_counter", lambda: next(clock))

    def steps(params, opt_state, batches):
        events.append(f"call_{params}")
        return params + len(batches), opt_state, {"loss": batches}

    def report(step, metrics, seconds):
        events.append(f"{step}:{metrics['loss'].sum():.0f}_{seconds:.0f}s")

    save = (lambda state: events.append("save_{step}_{params}".format(**state))) if saves else None
    state = {"params": 0, "opt_state": 0, "step": 0, "key": "mine"}
    try:
        last = train.train_loop(steps, state, map(np.float32, losses), report, save)
        assert last == state | dict.fromkeys(["params", "step"], sum(map(len, losses)))
    except FloatingPointError as error:
        events.append(str(error).partition(":")[0].removeprefix("the loss is "))
    assert " ".join(events) == order


@given(params=layers_of((5, 4, 3)), whole=batches_of((5, 4, 3), 10),
       order=st.permutations(range(10)), size=st.sampled_from([3, 10, 16]),
       padding=st.sampled_from([(0, 0), (np.nan, 9)]))
def test_evaluation_does_not_depend_on_batches(params, whole, order, size, padding):
    """Loss, accuracy, confusion matrix are float64's, however the rows are cut and ordered (T03).
    Catches means of batch means, a lost remainder, padding counted as right or wrong."""
    whole["mask"][0] = True  # to evaluate nothing is an error
    loss, _, logits = mlp_oracle(params, whole)
    confusion = np.zeros((3, 3), int)
    for label, z in zip(whole["label"][whole["mask"]], logits):
        confusion[label, z.argmax()] += 1
    rows = np.array([*order, *[0] * (-10 % size)])
    padded = jax.tree.map(lambda leaf: leaf[rows], whole)
    padded["mask"][10:] = False
    padded = spoiled(padded, *padding)
    result = train.evaluate(params, (jax.tree.map(lambda leaf: leaf[start:start + size], padded)
                                     for start in range(0, len(rows), size)))
    np.testing.assert_array_equal(result["confusion"], confusion)


# ---------- the oracle: loops in NumPy float64
def oracle(query, key, value, cotangent=0, bias=0, mask=True, *, scale=None, is_causal=False,
           query_seq_lengths=None, key_value_seq_lengths=None, local_window_size=10**9):
    """Attention row by row over the keys it may see -> output, gradients, visible [B, N, T, S]."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    (B, T, N, H), (_, S, K, _) = query.shape, key.shape
    scale = 1 / np.sqrt(H) if scale is None else float(scale)
    cotangent = np.broadcast_to(np.asarray(cotangent, np.float64), query.shape)
    bias = np.broadcast_to(np.float64(bias), (B, N, T, S))
    i, j = np.ogrid[:T, :S]
    left, right = np.broadcast_to(local_window_size, 2)
    visible = mask & (bias > -np.inf) & (j >= i - left) & (j <= i + right)
    if is_causal:
        visible &= j <= i
    if query_seq_lengths is not None:
        visible &= i < np.reshape(query_seq_lengths, (B, 1, 1, 1))
    if key_value_seq_lengths is not None:
        visible &= j < np.reshape(key_value_seq_lengths, (B, 1, 1, 1))
    out, d = np.zeros(query.shape), {"query": np.zeros(query.shape), "key": np.zeros(key.shape)}
    d |= {"value": np.zeros(key.shape), "bias": np.zeros(visible.shape), "scale": 0.0}
    for b, n, i in np.argwhere(visible.any(axis=3)):
        j, k = np.flatnonzero(visible[b, n, i]), n // (N // K)
        dots = key[b, j, k] @ query[b, i, n]
        scores = scale * dots + bias[b, n, i, j]
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        out[b, i, n] = weights @ value[b, j, k]
        dweights = value[b, j, k] @ cotangent[b, i, n]
        dscores = weights * (dweights - weights @ dweights)
        d["query"][b, i, n] = scale * dscores @ key[b, j, k]
        d["key"][b, j, k] += scale * np.outer(dscores, query[b, i, n])
        d["value"][b, j, k] += np.outer(weights, cotangent[b, i, n])
        d["bias"][b, n, i, j] = dscores
        d["scale"] += dscores @ dots
    return out, d, visible


# ---------- the cases
def case(B, T, S, N, K, H, lengths="", mask=None, bias=None, **static):
    """Sizes, strategies for the arrays (lengths of "q" and "k", shapes of others), static rest."""
    drawn = {"query_seq_lengths": lengths_of(B, T)} if "q" in lengths else {}
    drawn |= {"key_value_seq_lengths": lengths_of(B, S)} if "k" in lengths else {}
    drawn |= {"mask": reals_of(*mask).map(lambda x: x >= 0)} if mask else {}
    if bias:
        drawn["bias"] = reals_of(*bias).map(lambda x: np.where(x < -1, np.float32(-np.inf), x))
    drawn |= {"scale": reals.map(np.float32)} if mask else {}
    return {"sizes": (B, T, S, N, K, H), "drawn": drawn, "static": static}


# Every argument alone or where another may hide nothing; T = S, T < S, T > S, K = 1, K = N, odd
# sizes. Then more than one tile of 256 x 256: what "blockwise" does between tiles, at their edges;
# windows of 6 and 178 see but one pair of a corner tile.
CASES = {
    "odd sizes": case(2, 7, 13, 6, 3, 5),
    "causal": case(2, 12, 12, 4, 2, 4, is_causal=True),
    "causal cuts the window": case(1, 13, 5, 4, 1, 4, is_causal=True, local_window_size=(5, 3)),
    "causal, lengths": case(3, 7, 11, 4, 2, 4, "qk", is_causal=True),
    "lengths, window": case(2, 9, 10, 2, 2, 4, "qk", local_window_size=2),
    "mask, window to the right": case(
        2, 9, 12, 4, 2, 4, mask=(2, 1, 1, 12), local_window_size=(-1, 3)),
    "mask": case(2, 6, 7, 4, 2, 4, mask=(1, 4, 6, 7)),
    "bias, mask": case(2, 5, 6, 4, 2, 4, bias=(1, 4, 5, 6), mask=(2, 1, 5, 6)),
    "bias": case(2, 5, 6, 2, 2, 4, bias=(2, 1, 1, 6), is_causal=True),
    "tiles, causal": case(1, 532, 261, 2, 1, 4, is_causal=True),
    "tiles, window from the query": case(1, 301, 311, 4, 2, 4, local_window_size=(0, 6)),
    "tiles, window": case(1, 531, 531, 2, 1, 4, is_causal=True, local_window_size=(178, 3)),
    "tiles, lengths, many heads": case(3, 261, 271, 3, 1, 4, "qk"),
    "tiles, mask": case(1, 301, 311, 2, 1, 4, mask=(1, 2, 301, 311)),
    "tiles, mask per key": case(2, 10, 521, 2, 2, 4, "k", mask=(2, 1, 1, 521)),
    "tiles, mask per query": case(1, 301, 20, 2, 1, 4, mask=(1, 1, 301, 1), local_window_size=290),
}


def shapes(name):
    """Of query, key, value and cotangent."""
    B, T, S, N, K, H = CASES[name]["sizes"]
    return (B, T, N, H), (B, S, K, H), (B, S, K, H), (B, T, N, H)


@st.composite
def inputs(draw, name):
    """(query, key, value, cotangent) and the other arrays of a case."""
    arrays = cut(draw(pools), *shapes(name))
    arrays[1] *= np.linspace(0.5, 2, arrays[1].shape[1], dtype=np.float32)[:, None, None]
    return arrays, {what: draw(values) for what, values in CASES[name]["drawn"].items()}


@functools.cache
def compiled(name, implementation):
    """(query, key, value, cotangent, extra) -> output, gradients; one program for all values."""
    def run(query, key, value, cotangent, extra):
        floats = {"query": query, "key": key, "value": value}
        floats |= {what: extra[what] for what in ("bias", "scale") if what in extra}
        call = functools.partial(attend, **CASES[name]["static"], implementation=implementation)
        out, pull = jax.vjp(lambda floats: call(**extra | floats), floats)
        return out, pull(cotangent)[0]

    return jax.jit(run)


# ---------- values and gradients
@pytest.mark.parametrize("name", CASES)
@settings(max_examples=3 * SCALE)
@given(draws=st.data(), garbage=st.sampled_from([0, np.nan, np.inf, -np.inf, 1e30]))
def test_values_and_gradients_match_the_float64_oracle(name, draws, garbage):
    """Results are the oracle's for every argument, 0 without keys; what takes no part may be NaN.
    Catches a lost condition, a wrong corner, head, tile or backward term, 0 * NaN."""
    arrays, extra = draws.draw(inputs(name))
    B, T, S, N, K, H = CASES[name]["sizes"]
    out, gradients, visible = oracle(*arrays, **extra, **CASES[name]["static"])
    blind = ~visible.any(axis=3).swapaxes(1, 2)  # [B, T, N]
    unseen = ~visible.reshape(B, K, -1, S).any(axis=2).swapaxes(1, 2)  # [B, S, K]
    dirty = [np.where(idle[..., None], np.float32(garbage), x)
             for idle, x in zip((blind, unseen, unseen, blind), arrays)]
    if "bias" in extra:  # the gradient of what was broadcast: summed over these axes
        axes = tuple(np.flatnonzero(np.array(extra["bias"].shape) == 1))
        gradients["bias"] = gradients["bias"].sum(axis=axes, keepdims=True)
    special = {"tiles": ["blockwise"], "bias": ["naive", "xla"]}
    for implementation in special.get(name.split(",")[0], IMPLEMENTATIONS):
        got, got_gradients = jax.device_get(compiled(name, implementation)(*dirty, extra))
        close(got, out)
        for what, gradient in got_gradients.items():  # that of the scale: a long sum, which cancels
            close(gradient, gradients[what], 5e-4 if what == "scale" else 5e-5)
        assert not got[blind].any() and not got_gradients["query"][blind].any()


@pytest.mark.parametrize("options, bad, good", [
    ({"is_causal": True}, slice(512, 768), slice(0, 256)),
    ({"local_window_size": 3}, slice(0, 256), slice(512, 768))])
def test_tiles_that_nobody_sees_are_not_computed(options, bad, good):
    """NaN in keys a tile or more above the diagonal or outside the window reaches no query.
    Catches hidden tiles that are computed all the same."""
    query, key = cut(FIXED, (1, 768, 1, 2), (1, 768, 1, 2))
    key[:, bad] = np.nan
    call = functools.partial(attend, **options, implementation="blockwise")
    out, pull = jax.vjp(jax.jit(lambda query: call(query, key, key)), query)
    assert np.isfinite(out[:, good]).all() and np.isfinite(pull(out)[0][:, good]).all()


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@settings(max_examples=5 * SCALE)
@given(pool=pools, factor=st.sampled_from([1, 4, 30]))
def test_any_precision_and_huge_scores_stay_finite_and_accurate(dtype, pool, factor):
    """For any width of input, and scores far beyond the range of exp, results are the oracle's.
    Catches exp without the maximum subtracted, sums kept in two bytes, float64 that is not."""
    eps, slack = float(jnp.finfo(dtype).eps), 1e-13 if dtype == "float64" else 1e-5
    query, key, *others = cut(pool, *shapes("causal"))
    for implementation in ("naive", "blockwise") if dtype == "float64" else IMPLEMENTATIONS:
        with jax.enable_x64(dtype == "float64"):
            arrays = [x.astype(dtype) for x in (factor * query, factor * key, *others)]
            out, got = compiled("causal", implementation)(*arrays, {})
        want, gradients, _ = oracle(*arrays, is_causal=True)
        assert {x.dtype for x in (out, *got.values())} == {jnp.dtype(dtype)}
        close(out, want, 4 * eps + slack / 10 * factor**2)  # scores of factor**2 are rounded
        for what, gradient in got.items():
            largest = max(1, np.abs(gradients[what]).max())
            close(gradient, gradients[what], (8 * eps + slack) * factor * largest)


@pytest.mark.parametrize("queries, values, options, want", [
    (2, [1, 2, 3, 4], {"is_causal": True}, [1, 1.5]),
    (2, [1, 2, 6], {"mask": np.array([[False] * 3, [True, False, True]])}, [0, 3.5]),
    (4, [1, 2, 3, 4], {"local_window_size": (1, 0)}, [1, 1.5, 2.5, 3.5]),
    (1, [1] * 4096, {}, [1]),
    (2, [], {}, [0, 0])])
def test_examples_worked_out_by_hand(queries, values, options, want):
    """Scores of 0 give the mean of the values that are seen, without a batch axis, in bfloat16 too.
    Catches a causal corner at the bottom right, an inverted mask, a sum that stops at 256."""
    value = np.tile(np.array(values, jnp.bfloat16)[:, None, None], 8)  # [S, K, H] = [S, 1, 8]
    for implementation in IMPLEMENTATIONS:
        call = fetched(functools.partial(attend, **options, implementation=implementation))
        got = call(np.zeros((queries, 1, 8), jnp.bfloat16), 0 * value, value)
        assert got[:, 0, 0].tolist() == want


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@settings(max_examples=2 * SCALE)
@given(draws=st.data())
def test_second_derivatives_match_differences_of_the_gradient(implementation, draws):
    """The gradient's derivative, forward over reverse and reverse over reverse, is its slope.
    Catches a backward pass without a derivative, or that forgets what its residuals depend on."""
    (*arrays, cotangent), extra = draws.draw(inputs("causal, lengths"))

    def gradient(*arrays):
        return compiled("causal, lengths", implementation)(*arrays, cotangent, extra)[1]

    jax.test_util.check_grads(gradient, arrays, order=1, atol=5e-3, rtol=5e-3, eps=1e-2)


@pytest.mark.parametrize("B, names, options", [
    (1, (), {}), (4, ("query_seq_lengths", "key_value_seq_lengths"),
                  {"is_causal": True, "local_window_size": (300, 0)})])
def test_blockwise_memory_doubles_with_length(B, names, options):
    """Twice the length takes twice the temporary memory, gradient included, whatever hides keys.
    Catches a visibility that is computed for all pairs at once: it takes four times."""
    def value_and_gradient(x, lengths):
        everything = options | dict.fromkeys(names, lengths) | {"implementation": "blockwise"}
        out, pull = jax.vjp(functools.partial(attend, **everything), x, x, x)
        return out, pull(out)

    def temporary(T):
        args = abstract(B, T, 1, 4, dtype=jnp.float32), abstract(B, dtype=jnp.int32)
        program = jax.jit(value_and_gradient).lower(*args).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert temporary(4096) <= 2.2 * temporary(2048)


# ---------- cuDNN, lowered without a GPU
def fused_calls(f, *args):
    """The cuDNN calls of `f` lowered for CUDA: (name, mask type, window, operand types)."""
    calls = []

    def visit(op):
        target = op.attributes["call_target_name"].value if "custom_call" in op.name else ""
        if target.startswith("__cudnn$"):
            config = json.loads(op.attributes["backend_config"].value)["cudnn_fmha_backend_config"]
            operands = [str(operand.type)[len("tensor<"):-1] for operand in op.operands]
            kind, window = config["mask_type"], config["sliding_window_length"]
            calls.append((target.removeprefix("__cudnn$"), kind, window, operands))
        return ir.WalkResult.ADVANCE

    lowered = jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",))
    lowered.compiler_ir().operation.walk(visit)
    return calls


QUERY, KEY, LENGTHS = abstract(2, 8, 4, 16), abstract(2, 6, 2, 16), np.int32([5, 3])


@pytest.mark.parametrize("options, mask_type, window, extra", [
    ({}, "NO_MASK", 0, []),
    ({"is_causal": True}, "CAUSAL", 0, []),
    ({"query_seq_lengths": LENGTHS}, "PADDING", 0, ["2xi32"] * 2),
    ({"key_value_seq_lengths": LENGTHS, "is_causal": True}, "PADDING_CAUSAL", 0, ["2xi32"] * 2),
    ({"local_window_size": (3, 0)}, "CAUSAL", 4, []),
    ({"local_window_size": (3, 5), "is_causal": True}, "CAUSAL", 4, []),
    ({"mask": np.ones((2, 1, 1, 6), bool)}, "NO_MASK", 0, ["2x4x8x6xbf16"]),
    ({"bias": np.ones((1, 4, 8, 6), jnp.bfloat16)}, "NO_MASK", 0, ["2x4x8x6xbf16"]),
])
def test_cuda_lowering_is_the_fused_kernel(options, mask_type, window, extra):
    """"cudnn", and None but for a mask or bias, are one call on keys as they are, two in a grad.
    Catches a fallback that nobody asked for, a lost condition, a window off by one."""
    need(attention.cudnn_refusal(QUERY, KEY, KEY))
    operands = ["2x8x4x16xbf16", "2x6x2x16xbf16", "2x6x2x16xbf16", *extra]
    for implementation in ("cudnn", None):
        call = functools.partial(attend, **options, implementation=implementation)
        gradient = jax.grad(lambda *args: call(*args).astype(jnp.float32).sum(), (0, 1, 2))
        forward = fused_calls(call, QUERY, KEY, KEY)
        names = [name for name, *_ in fused_calls(gradient, QUERY, KEY, KEY)]
        if implementation is None and ("mask" in options or "bias" in options):
            assert forward == names == []
            continue
        [(name, *rest)] = forward
        assert rest == [mask_type, window, operands] and names == [name, f"{name}Backward"]


def test_vmap_lowers_for_cuda_as_a_larger_batch():
    """vmap over queries alone, on an axis that is not the first, folds into the kernel's batch.
    Catches a rule of the kernel that wants all operands mapped, or none."""
    need(attention.cudnn_refusal(QUERY, KEY, KEY))
    call = jax.vmap(functools.partial(attend, key_value_seq_lengths=[5]), in_axes=(1, None, None))
    [(_, _, _, operands)] = fused_calls(call, abstract(8, 3, 4, 16), *[abstract(8, 2, 16)] * 2)
    assert operands[:2] == ["3x8x4x16xbf16", "3x8x2x16xbf16"]


@pytest.mark.parametrize("word, T, S, H, dtype, window", [
    ("float32", 8, 8, 16, jnp.float32, None), ("multiple of 8", 8, 8, 20, jnp.bfloat16, None),
    ("512", 8, 8, 512, jnp.bfloat16, None), ("even", 7, 8, 16, jnp.bfloat16, None),
    ("even", 8, 7, 16, jnp.bfloat16, None), ("window", 8, 8, 16, jnp.bfloat16, 2),
    ("window", 8, 8, 16, jnp.bfloat16, (-1, 0)), ("GPU", 8, 8, 16, jnp.bfloat16, None)])
def test_what_cudnn_cannot_run_is_refused(word, T, S, H, dtype, window):
    """Naming "cudnn" for what it cannot run, or without plugin or GPU, says so; None takes it all.
    Catches an exception from inside JAX, a silent other answer."""
    if word == "GPU" and has_gpu():
        pytest.skip("cuDNN can run here")
    arrays = [jnp.zeros((1, n, heads, H), dtype) for n, heads in ((T, 4), (S, 2), (S, 2))]
    reason = attention.cudnn_refusal(*arrays, local_window_size=window) or "no NVIDIA GPU"
    word = "plugin" if "plugin" in reason else word
    call = functools.partial(attend, *arrays, local_window_size=window)
    with pytest.raises(ValueError, match=word):
        call(implementation="cudnn")
    assert word in reason and jax.eval_shape(call).shape == arrays[0].shape


# ---------- the layer and its cache
D, N, K, H, SLOTS = 10, 6, 3, 2, 8
WEIGHTS = {"wq": (D, N, H), "wk": (D, K, H), "wv": (D, K, H), "wo": (N, H, D)}


def weights(pool):
    return dict(zip(WEIGHTS, cut(pool / 2, *WEIGHTS.values())))


PARAMS = weights(FIXED)


def rotate(x, positions):
    """Stands in for rotary embeddings: a function of positions, for JAX and NumPy alike."""
    return x * (1 + positions[..., None, None].astype(x.dtype) / 4)


def layer_oracle(params, x, lengths=None, rotate=rotate):
    """The whole layer in float64: [B, T, D] -> [B, T, D]."""
    query, key, value = (np.einsum("btd,dnh->btnh", np.float64(x), np.float64(params[name]))
                         for name in ("wq", "wk", "wv"))
    if rotate is not None:
        positions = np.broadcast_to(np.arange(x.shape[1]), x.shape[:2])
        query, key = rotate(query, positions), rotate(key, positions)
    out = oracle(query, key, value, is_causal=True, key_value_seq_lengths=lengths)[0]
    return np.einsum("btnh,nhd->btd", out, np.float64(params["wo"]))


cached = jax.jit(functools.partial(attention.cached_attention, rotate=rotate))
LAYERS = {rotation: fetched(functools.partial(attention.attention, rotate=rotation))
          for rotation in (None, rotate)}


@pytest.mark.parametrize("rotation", LAYERS)
@given(pool=pools, x=reals_of(2, 5, D), lengths=lengths_of(2, 5))
def test_attention_layer_matches_the_oracle(rotation, pool, x, lengths):
    """Projections, positions, heads, key lengths and output projection are those of the oracle.
    Catches a transposed weight, a rotation of one of query and key only."""
    got = LAYERS[rotation](weights(pool), x, key_value_seq_lengths=lengths)
    close(got, layer_oracle(weights(pool), x, lengths, rotation), 1e-4)


counts = st.integers(-1, 4)


@given(steps=st.lists(st.tuples(st.sampled_from([1, 3]), counts, counts), min_size=1, max_size=6),
       pool=pools, garbage=st.sampled_from([0, np.nan, 1e30]), layer=st.integers(0, 2))
@example([(3, 3, 3), (3, 3, 2), (3, 2, 2), (1, 1, 1)], FIXED, 0, 1)  # full to the last slot
def test_rows_of_different_lengths_and_the_bound_check(steps, pool, garbage, layer):
    """However cut, rows get the full pass's outputs; one that does not fit gets NaN, is untouched.
    Catches one index for all rows, a clamped write, padding that counts, another layer's cache."""
    rows = [np.zeros((0, D), np.float32)] * 2
    stack = {name: np.full((3, 2, SLOTS, K, H), garbage, np.float32) for name in ("k", "v")}
    stack["length"] = np.int32([[5, 7]] * 3)
    stack["length"][layer] = 0
    for (T, *counts), x in zip(steps, cut(pool, *[(2, T, D) for T, *_ in steps])):
        counted = np.arange(T)[:, None] < np.reshape(counts, (2, 1, 1))
        x, old = np.where(counted, x, np.float32(garbage)), stack
        out, stack = jax.device_get(cached(
            PARAMS, x, stack, layer=np.int32(layer), seq_lengths=np.array(counts)))
        untouched = np.ones((3, 2), bool)
        for b, count in enumerate(counts):
            if not 0 <= count <= T or len(rows[b]) + count > SLOTS:
                assert np.isnan(out[b]).all()
                continue
            untouched[layer, b] = False
            rows[b] = np.concatenate([rows[b], x[b, :count]])
            end = len(rows[b])
            assert stack["length"][layer, b] == end and not out[b, count:].any()
            equal(stack["k"][layer, b, end:], old["k"][layer, b, end:])
            close(out[b, :count], layer_oracle(PARAMS, rows[b][None])[0, end - count:], 1e-4)
        equal(*({name: leaf[untouched] for name, leaf in c.items()} for c in (stack, old)))


def test_decode_steps_are_one_program():
    """Prefill and ten steps of one compiled program equal the full pass, with 64-bit types on.
    Catches a length that is a static argument, a cache that grows, int64 beside int32 positions."""
    [x] = cut(FIXED, (2, 12, D))
    with jax.enable_x64(True):
        lengths = {"seq_lengths": np.array([1, 1])}
        out, cache = cached(PARAMS, x[:, :2], attention.init_kv_cache(2, 12, K, H))
        step, outs = cached.lower(PARAMS, x[:, :1], cache, **lengths).compile(), [out]
        for t in range(2, 12):
            out, cache = step(PARAMS, x[:, t:t + 1], cache, **lengths)
            outs.append(out)
    close(np.concatenate(outs, axis=1), layer_oracle(PARAMS, x), 1e-4)


@pytest.mark.parametrize("T", [1, 3])
def test_unused_slots_of_a_cache_stay_out_of_outputs_and_gradients(T):
    """NaN beyond the rows' lengths changes neither what comes out nor its gradients.
    Catches a weight of 0 that meets a NaN value, a cotangent of 0 that meets a NaN key."""
    def loss(params, x, cache):
        return (attention.cached_attention(params, x, cache)[0] ** 2).sum()

    cache = attention.init_kv_cache(2, SLOTS, K, H) | {"length": np.int32([0, 2])}
    unused = np.arange(SLOTS)[:, None, None] >= np.reshape([0, 2], (2, 1, 1, 1))
    dirty = cache | {name: np.where(unused, np.nan, cache[name]) for name in ("k", "v")}
    gradient, [x] = jax.jit(jax.value_and_grad(loss, (0, 1))), cut(FIXED, (2, T, D))
    equal(gradient(PARAMS, x, dirty), gradient(PARAMS, x, cache))
    assert gradient(PARAMS, x, cache)[0] > 0


@pytest.mark.parametrize("B, K, H, dtype", [(1, 1, 2, jnp.float32), (3, 4, 16, jnp.bfloat16)])
def test_cache_bytes_and_dtypes(B, K, H, dtype):
    """`kv_cache_bytes` is what keys and values take; a cache starts as 0; a write keeps dtypes.
    Catches a factor of two, a dtype that is widened by a write."""
    cache = attention.init_kv_cache(B, 8, K, H, dtype)
    assert attention.kv_cache_bytes(B, 8, K, H, dtype) == cache["k"].nbytes + cache["v"].nbytes
    assert not any(leaf.any() for leaf in cache.values())
    kv = abstract(B, 8, K, H, dtype=dtype)
    types = {"k": kv, "v": kv, "length": abstract(B, dtype=jnp.int32)}
    params, x = attention.init_attention(jax.random.key(0), 6, K, K, H), jnp.zeros((B, 2, 6))
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    assert jax.eval_shape(attention.cached_attention, params, x, cache) == (out, types)


# ---------- checkpoint.py: there and back
SHAPES = st.sampled_from([(), (1,), (3,), (0, 4), (2, 3)])
DTYPES = st.sampled_from(
    ["float32", "float16", "float64", "uint8", "int32", "bool", "complex64", ">f8", ">i2",
     jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2]).map(np.dtype)
LEAVES = (DTYPES.flatmap(lambda dtype: hnp.arrays(f"u{dtype.itemsize}", SHAPES).map(
              lambda bits: bits.view(dtype)))
          | hnp.arrays("float32", SHAPES).map(jax.device_put) | st.none() | st.booleans()
          | st.integers(-2**63, 2**63 - 1) | st.floats() | st.text("aé/", max_size=3)
          | st.builds(lambda seed, impl: jax.random.split(jax.random.key(seed, impl=impl)),
                      st.integers(0, 99), st.sampled_from(["threefry2x32", "rbg"])))
NAMES = st.sampled_from(["a", "b/c", "..", "w:bfloat16", "é", "x.npz", ""])
TREES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner)
                     | st.dictionaries(NAMES, inner, max_size=3), max_leaves=6)


def reload(tree, like, **options):
    """A tree, saved in a folder of its own and loaded again."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save_checkpoint(f"{folder}/c.npz", tree)
        assert os.listdir(folder) == ["c.npz"]
        return checkpoint.load_checkpoint(f"{folder}/c.npz", like, **options)


def leaf_bits(leaf):
    """(kind, dtype, shape, bytes) of a leaf: what two equal leaves share."""
    array = np.asarray(jax.random.key_data(leaf) if checkpoint.is_key(leaf) else leaf)
    return type(leaf), getattr(leaf, "dtype", None), array.shape, array.tobytes()


@given(tree=TREES)
@example(tree={"a": {"b": np.ones(2, jnp.bfloat16)}, "t": np.arange(12.).reshape(4, 3)[::2].T,
               "c": [jax.random.key(3), 7, True, "text", None, {}]})
def test_decode_inverts_encode(tree):
    """Any tree of arrays, keys and scalars comes back leaf for leaf, to kind, dtype, shape and bit.
    Catches bfloat16 as void, keys as integers, () as (1,), 1 as int64, swapped bytes."""
    assert jax.tree.map(leaf_bits, reload(tree, tree)) == jax.tree.map(leaf_bits, tree)


def test_a_leaf_comes_back_as_like_describes_it():
    """In its order of bytes; a part, of which `like` holds descriptions, suffices (case L04).
    Catches bytes read the wrong way round, text of one length, `partial` that is never on."""
    big, little = np.arange(3, dtype=">i4"), np.arange(3, dtype="<i4")
    want = {"params": [jax.random.key(1), jnp.ones(3)], "n": np.array(4), "s": "text",
            "x": [little, big]}
    like = {"params": jax.eval_shape(lambda: want["params"]), "n": np.int64(0), "s": "",
            "x": [little, big]}
    loaded = reload({**want, "x": [big, little], "ema": 0.5}, like, partial=True)
    assert jax.tree.map(leaf_bits, loaded) == jax.tree.map(leaf_bits, want)


@pytest.mark.parametrize("place", [
    None, jax.devices()[-1], NamedSharding(jax.make_mesh((1,), ("batch",)), P())])
def test_a_loaded_state_compiles_nothing_anew(place):
    """Free, committed or on a mesh, leaves return to their place.
    Catches leaves that are always committed, which compile a step anew."""
    tree = jax.device_put({"w": jnp.ones(3), "key": jax.random.key(0)}, place)
    step = jax.jit(lambda tree: {**tree, "w": tree["w"] + 1})
    assert step(reload(step(tree), tree))["w"].tolist() == [3, 3, 3] and step._cache_size() == 1


# ---------- data.py: batches, onto the device, images
def examples(number):
    """Examples that show these numbers under every key; padding shows 0."""
    number = np.array(number, np.int32)
    return {"image": number.astype(np.uint8).repeat(6).reshape(-1, 2, 3), "number": number,
            "target": number.astype(jnp.bfloat16)[:, None]}


@given(st.integers(1, 40), st.integers(1, 45), st.sampled_from([None, 0, 2**63 + 1]),
       st.sampled_from(["drop", "pad"]), st.sampled_from([np.asarray, jax.device_put]))
@settings(max_examples=100 * SCALE)
def test_batches_hold_each_example_once(count, batch_size, seed, remainder, convert):
    """Copies of all examples, once and whole, in one shape; "drop" loses less than a batch.
    Catches a ragged last batch, mismatched keys, padding that counts as data, a reused buffer."""
    kept = count - count % batch_size if remainder == "drop" else count
    assume(kept > 0)
    original = examples(range(1, count + 1))
    dataset = jax.tree.map(convert, original)
    items = list(data.batches(dataset, batch_size, seed=seed, remainder=remainder))
    shown = np.concatenate([batch["number"] for batch in items])
    assert len({*shown[:kept]} - {0}) == np.count_nonzero(shown) == kept > len(shown) - batch_size
    assert seed is not None or (shown[:kept] == original["number"][:kept]).all()
    right = functools.partial(np.testing.assert_array_equal, strict=True)
    for batch, number in zip(items, shown.reshape(-1, batch_size), strict=True):
        jax.tree.map(right, batch, {**examples(number), "mask": number > 0})
        jax.tree.map(lambda part: part.fill(0), batch)  # this must change nothing else
    equal(dataset, original)


@pytest.mark.parametrize("seed, options, order", [
    (0, {}, [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]), (0, {"epoch": 1}, [5, 3, 7, 8, 2, 4, 1, 0, 6, 9]),
    (2**63 + 7, {"epoch": np.int64(5)}, [3, 2, 1, 6, 8, 5, 9, 0, 7, 4])])
def test_order_is_a_function_of_seed_and_epoch(seed, options, order):
    """This very order on every machine, in batches of any size: a checkpoint resumes anywhere.
    Catches epoch 0 replayed, seed + epoch or half a seed used, global state, a biased shuffle."""
    for batch_size in 2, 10:
        items = data.batches({"x": np.arange(10)}, batch_size, seed=seed, **options)
        assert [x for batch in items for x in batch["x"]] == order


def item(i):
    return {"a": np.full((2, 3), i, np.uint8), "b": [np.float32(i), jax.random.key(i)],
            "ids": np.array([2**31 - 1, -i])}  # int64 that fits into int32


@given(st.integers(0, 9), st.integers(1, 4))
def test_stack_puts_steps_in_front(count, steps):
    """Stacks of `steps` items, PRNG keys among them, the last one shorter; no item is read ahead.
    Catches a dropped last stack, a wrong axis or dtype, a source drained at once."""
    source = iter([item(i) for i in range(count)])
    for start, stacked in zip(range(0, count, steps), data.stack(source, steps), strict=True):
        stop = min(count, start + steps)
        assert len(stacked["a"]) == stop - start and source.__length_hint__() == count - stop
        assert (stacked["a"].dtype, stacked["ids"].dtype) == (np.uint8, np.int64)  # still NumPy's
        for i in range(start, stop):
            equal(jax.tree.map(lambda leaf: leaf[i - start], stacked), item(i))


@given(st.integers(0, 6), st.sampled_from([{}, {"size": 0}, {"size": 1}, {"size": 4}]))
def test_to_device_works_ahead(count, options):
    """The same items as JAX arrays; while one is in use just `size` (2) more have been read.
    Catches no prefetch, a source drained or read before the first is asked for, a lost item."""
    source = iter([item(i) for i in range(count)])
    placed = data.to_device(source, **options)
    assert source.__length_hint__() == count
    for i, got in zip(range(count), placed, strict=True):
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(got))
        assert source.__length_hint__() == max(0, count - i - 1 - options.get("size", 2))
        assert (got["a"].dtype, got["ids"].dtype) == (jnp.uint8, jnp.int32)
        equal(got, item(i))


@pytest.mark.parametrize("offset", [0, 4, 8, 12])  # one of them is aligned to 64 bytes
def test_to_device_yields_what_never_changes(offset):
    """A source may refill its buffer as soon as it is asked for the next item.
    Catches NumPy memory that JAX aliases (on a CPU, where it is aligned)."""
    buffer = np.zeros(offset + 2**12, np.float32)[offset:]

    def refilled(i):
        buffer.fill(i)
        return buffer

    equal(list(data.to_device(map(refilled, range(5)))), [np.full(2**12, i) for i in range(5)])


@given(hnp.arrays(np.uint8, st.sampled_from([(28, 28), (5, 28, 28), (0, 28, 28), (3, 2, 28, 28)])))
@example(np.arange(784).astype(np.uint8).reshape(1, 28, 28))
def test_preprocess_is_pixel_over_255_in_float32(images):
    """The float32 nearest to pixel / 255, row-major; with JAX within the last bit.
    Catches uint8 arithmetic, divisor 256, float64, merged axes, NumPy on tracers."""
    right = (images.astype(np.float64) / 255).astype(np.float32).reshape(*images.shape[:-2], 784)
    np.testing.assert_array_equal(data.preprocess(images), right, strict=True)
    np.testing.assert_array_max_ulp(np.asarray(jax.jit(data.preprocess)(images)), right, maxulp=1)


@given(st.integers(0, 2**64 - 2), st.integers(1, 60), st.integers(1, 60))
@example(3, 50, 50)
def test_synthetic_is_a_function_of_its_seed(seed, num_train, num_test):
    """The seed alone decides; neither part depends on the other's size; classes are balanced.
    Catches global random state, one stream for both parts, labels in a row, images twice."""
    made, other = (data.synthetic(n, num_train, num_test) for n in (seed, seed + 1))
    equal(made["test"], data.synthetic(seed, num_train + 1, num_test)["test"])
    equal(made["train"], data.synthetic(seed, num_train, 1)["train"])
    assert f"made up from seed {seed}" in made["origin"] and len(made) == 3
    images = []
    for part, count in ("train", num_train), ("test", num_test):
        image, label = made[part]["image"], made[part]["label"]
        assert image.shape == (count, 28, 28) and image.dtype == label.dtype == np.uint8
        assert np.ptp(np.bincount(label, minlength=10)) <= 1 and max(label) < 10
        assert count < 20 or label.tolist() != (np.arange(count) % 10).tolist()
        images += [one.tobytes() for one in (*image, *other[part]["image"])]
    assert len(set(images)) == 2 * (num_train + num_test)


def test_synthetic_is_learnable_but_not_trivial():
    """The nearest class mean gets most of it right, and not all.
    Catches labels without relation to the images, noise that drowns them, other test patterns."""
    image, label = data.synthetic(0, 2000, 1)["train"].values()
    means = [image[label == k].mean(0) for k in range(10)]
    for seed, least, most in (0, 0.75, 0.99), (2, 0, 0.4):
        test = data.synthetic(seed, 1, 1000)["test"]
        errors = [((test["image"] - mean) ** 2).sum((1, 2)) for mean in means]  # [10, n]
        assert least < np.mean(np.argmin(errors, axis=0) == test["label"]) < most


@given(hnp.arrays(np.uint8, st.lists(st.integers(0, 4), max_size=4).map(tuple)))
@example(np.zeros((2**32 - 2**24 + 3, 0), np.uint8))
def test_parse_idx_inverts_an_encoder(array):
    """Any uint8 array comes back; a byte too few, too many or of another type is a ValueError.
    Catches a dropped axis, lengths cut or little-endian, a short read, trailing bytes ignored."""
    raw = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()
    np.testing.assert_array_equal(data.parse_idx(raw), array, strict=True)
    for bad in [*(raw[:length] for length in range(len(raw))), raw + b"\0",
                b"\1" + raw[1:], b"\0\1" + raw[2:], b"\0\0\x0d" + raw[3:]]:
        with pytest.raises(ValueError, match=f"got {len(bad)} bytes"):
            data.parse_idx(bad)


# ---------- decoder: its oracle
V, DIM, L = 23, 16, 2
LLAMA3 = (8.0, 1.0, 4.0, 16)
TOKENS = np.random.default_rng(0).integers(0, V, (2, 7))
DECODER_BATCH = {"tokens": TOKENS, "mask": np.ones((2, 6), bool)}


def tokens_of(*shape):
    return hnp.arrays(np.int32, shape, elements=st.integers(0, V - 1))


@functools.cache
def small_decoder(N=4, K=2, head_dim=4, scale=1.0, num_layers=L):
    """A decoder drawn by NumPy. Norm scales are not 1, so that a forgotten one shows; a tiny scale
    of the embedding makes the first norm's epsilon matter."""
    shapes = jax.eval_shape(lambda: decoder.init_decoder(
        jax.random.key(0), vocab_size=V, num_layers=num_layers, model_dim=DIM, num_heads=N,
        num_kv_heads=K, head_dim=head_dim, mlp_dim=20))
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        size = scale if path[-1].key == "embedding" else 0.25
        norm = "norm" in path[-1].key
        values = rng.uniform(0.5, 1.5, leaf.shape) if norm else size * rng.normal(size=leaf.shape)
        return jax.device_put(values.astype(np.float32))

    return jax.tree.map_with_path(draw, shapes)


ONE = small_decoder(num_layers=1)  # where one layer shows it


def oracle_rotate(x, positions, base=1e4, scaling=None):
    """x [T, H] at positions [T]: pair (i, i + H/2) as a complex number; Llama 3's rule by wave
    length."""
    half, turned = x.shape[1] // 2, []
    for i in range(half):
        frequency = base ** (-i / half)
        if scaling and len(scaling) == 1:
            frequency /= scaling[0]
        elif scaling:
            factor, low, high, context = scaling
            wave = 2 * math.pi / frequency
            mix = (context / wave - low) / (high - low)
            if wave > context / low:
                frequency /= factor
            elif wave >= context / high:
                frequency = (1 - mix) * frequency / factor + mix * frequency
        turned.append((x[:, i] + 1j * x[:, i + half]) * np.exp(1j * frequency * positions))
    return np.concatenate([np.real(turned), np.imag(turned)]).T


def oracle_decoder(params, tokens, epsilon=1e-5, **rope):
    """Logits [T, V] of one row of tokens [T], in float64 and with loops, from the formulas."""
    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * scale

    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    x, layers, positions = params["embedding"][tokens], params["layers"], np.arange(len(tokens))
    for i in range(len(layers["mlp_norm"])):
        wq, wk, wv, wo = (layers["attention"][name][i] for name in ("wq", "wk", "wv", "wo"))
        h, out = norm(x, layers["attention_norm"][i]), np.zeros_like(x)
        for n in range(wq.shape[1]):
            k = n // (wq.shape[1] // wk.shape[1])
            query, key = (oracle_rotate(h @ w, positions, **rope) for w in (wq[:, n], wk[:, k]))
            for t in positions:
                probs = np.exp(key[:t + 1] @ query[t] / np.sqrt(wq.shape[2]))
                out[t] += probs / probs.sum() @ (h @ wv[:, k])[:t + 1] @ wo[n]
        x = x + out
        h = norm(x, layers["mlp_norm"][i])
        gate, up = h @ layers["mlp"]["w_gate"][i], h @ layers["mlp"]["w_up"][i]
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layers["mlp"]["w_down"][i]
    return norm(x, params["final_norm"]) @ params.get("output", params["embedding"].T)


def oracle_logits(params, rows, **options):
    return np.stack([oracle_decoder(params, row, **options) for row in rows])


def oracle_losses(params, batch):
    """-log p, in nats, of every True position."""
    losses = []
    for row, mask in zip(np.asarray(batch["tokens"], int), batch["mask"]):
        logits = oracle_decoder(params, np.clip(row[:-1], 0, V - 1))
        log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        losses += [-log_probs[t, row[t + 1]] for t in np.flatnonzero(mask)]
    return losses


run_decoder = fetched(decoder.decoder, static_argnames=("implementation", "dtype"))
run_cached = fetched(decoder.cached_decoder, static_argnames="dtype")
value_and_grads = jax.value_and_grad(decoder.loss_fn, has_aux=True)
loss_and_grads = fetched(value_and_grads, static_argnames=("remat", "dtype"))


# ---------- decoder: the arithmetic
@given(tokens=tokens_of(2, 7), heads=st.sampled_from([(4, 4), (4, 2), (4, 1)]),
       scale=st.sampled_from([1.0, 1e-3]))
def test_decoder_matches_the_formulas(tokens, heads, scale):
    """The logits are Llama's, for MHA, GQA and MQA. Catches a wrong epsilon, pairing, sign, scale,
    head or residual, pieces or layers in another order, gate and up exchanged."""
    params = small_decoder(*heads, scale=scale)
    want = oracle_logits(params, tokens)
    np.testing.assert_allclose(run_decoder(params, tokens), want, atol=2e-5 * abs(want).max())


def test_decoder_in_float64_is_exact():
    """With 64-bit numbers nothing is rounded to 32 bits. Catches a cast that tolerances hide."""
    with jax.enable_x64(True):
        params = jax.tree.map(lambda leaf: leaf.astype(np.float64), ONE)
        logits = run_decoder(params, TOKENS[:1], implementation="naive")
    close(logits, oracle_logits(ONE, TOKENS[:1]), 1e-11)


rotated = fetched(decoder.rotate, static_argnames=("base", "scaling"))


@pytest.mark.parametrize("scaling", [None, (4.0,), LLAMA3])
@given(x=hnp.arrays(np.float64, (1, 8), elements=st.floats(-2, 2)),
       position=st.integers(0, 99_999), base=st.sampled_from([1e4, 5e5]))
@example(x=np.ones((1, 8)), position=1001, base=1e4)
def test_rotary_embedding_is_the_oracles(scaling, x, position, base):
    """Pairs turn as the formulas say, far beyond the original context; bfloat16 by float32 angles.
    Catches another base, frequencies scaled where they should stay, positions in bfloat16."""
    for dtype, tolerance in (np.float64, 1e-8), (jnp.bfloat16, 0.1):
        x = x.astype(dtype)
        with jax.enable_x64(True):
            got = rotated(x.reshape(1, 1, 1, 8), np.array([[position]]), base=base, scaling=scaling)
        want = oracle_rotate(x.astype(np.float64), np.array([position]), base, scaling)
        assert got.dtype == dtype
        np.testing.assert_allclose(np.float64(got).ravel(), want[0], rtol=0, atol=tolerance)


def test_remat_and_unroll_change_the_program_only(monkeypatch):
    """remat keeps less, the numbers stay; unroll reaches the scan; one layer is traced for all.
    Catches an argument that is accepted and ignored, a Python loop over layers."""
    def kept(remat):
        batch = {"tokens": np.zeros((4, 65), int), "mask": np.ones((4, 64), bool)}
        loss = functools.partial(decoder.loss_fn, batch=batch, remat=remat)
        _, pull, _ = jax.eval_shape(lambda p: jax.vjp(loss, p, has_aux=True), eight)
        return sum(leaf.size for leaf in jax.tree.leaves(pull))

    eight, layer, calls = small_decoder(num_layers=8), decoder.decoder_layer, []
    assert kept(True) < kept(False) / 2
    close(loss_and_grads(ONE, DECODER_BATCH, remat=True), loss_and_grads(ONE, DECODER_BATCH))
    monkeypatch.setattr(decoder, "decoder_layer", lambda *args: calls.append(1) or layer(*args))
    assert "unroll=2" in str(jax.make_jaxpr(lambda p: decoder.decoder(p, TOKENS, unroll=2))(eight))
    assert len(calls) == 1


def test_bfloat16_costs_precision_only():
    """Computed in bfloat16, or with a cache of it, logits, loss and gradients are float32.
    Catches a dtype that is ignored or dictated by the cache, logits or gradients rounded."""
    want, low = oracle_logits(ONE, TOKENS), jnp.bfloat16
    all_logits = [run_decoder(ONE, TOKENS, dtype=low)]
    for dtype, cache_dtype in (low, None), (None, low):
        cache = decoder.init_decoder_cache(ONE, 2, 8, cache_dtype)
        logits, cache = run_cached(ONE, TOKENS[:, :3], cache, dtype=dtype)
        assert cache["k"].dtype == (cache_dtype or jnp.float32)
        all_logits.append(logits)
    for logits in all_logits:
        error = abs(logits - want[:, :logits.shape[1]]).max() / abs(want).max()
        assert logits.dtype == jnp.float32 and 1e-4 < error < 0.03
        assert (logits != logits.astype(low).astype(np.float32)).any()
    values = jax.eval_shape(functools.partial(value_and_grads, dtype=low), ONE, DECODER_BATCH)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(values)} == {"float32", "int32"}
    half = jax.tree.map(lambda leaf: leaf.astype(low), ONE)
    assert decoder.init_decoder_cache(half, 1, 6)["v"].dtype == low


# ---------- decoder: the loss
@given(tokens=tokens_of(2, 7), mask=hnp.arrays(bool, (2, 6)),
       garbage=st.sampled_from([0, -1, V, -100, 2**31 - 1]))
@example(tokens=TOKENS, mask=np.zeros((2, 6), bool), garbage=-1)
def test_loss_is_the_exact_masked_mean(tokens, mask, garbage):
    """The mean over the True positions, or 0, whatever follows a row's last one; gradients flow.
    Catches a mean of row means, targets off by one, padding that is attended to or looked up."""
    last = np.where(mask.any(axis=1), 6 - mask[:, ::-1].argmax(axis=1), 0)
    batch = {"tokens": np.where(np.arange(7) > last[:, None], garbage, tokens), "mask": mask}
    (loss, metrics), grads = loss_and_grads(ONE, batch)
    np.testing.assert_allclose(loss, np.mean(oracle_losses(ONE, batch) or [0.0]), rtol=1e-5)
    assert metrics["tokens"] == mask.sum() and metrics["loss"] == loss
    for grad in jax.tree.leaves(grads):
        assert np.isfinite(grad).all()
        assert np.any(grad) if mask.all(axis=1).any() else mask.any() or not np.any(grad)
    nothing = {"tokens": tokens[:, :1], "mask": mask[:, :0]}
    assert loss_and_grads(ONE, nothing)[0][0] == 0


def test_loss_needs_two_arrays_of_logits():
    """Loss and gradient hold at most 2.1 times the logits. Catches a one-hot array (3 times)."""
    params = jax.eval_shape(lambda: decoder.init_decoder(
        jax.random.key(0), vocab_size=32768, num_layers=1, model_dim=8, num_heads=1))
    batch = {"tokens": np.zeros((2, 129), int), "mask": np.ones((2, 128), bool)}
    memory = jax.jit(value_and_grads).lower(params, batch).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 2.1 * 2 * 128 * 32768 * 4


@pytest.mark.parametrize("bad", [-1, V, 10**6])
def test_tokens_out_of_range(bad, monkeypatch):
    """What is no token is an error where it can be seen, and NaN in compiled code, as an input and
    as a label. Catches -1 read from the end, large numbers clamped."""
    tokens, words = TOKENS.copy(), rf"0..{V - 1}, got {bad} at \[0, "
    tokens[0, 2] = bad
    logits = run_decoder(ONE, tokens)
    assert np.isnan(logits[0, 2:]).all() and np.isfinite(logits[1]).all()
    for cut in 7, 3:  # an input and a label; a label only
        batch = {"tokens": tokens, "mask": np.arange(1, 7) * np.ones((2, 1)) < cut}
        assert np.isnan(loss_and_grads(ONE, batch)[0][0])
    with pytest.raises(ValueError, match=words + "2]"):
        decoder.decoder(ONE, tokens)
    monkeypatch.setattr(decoder, "decoder", lambda params, tokens: jnp.zeros((2, 6, V)))
    with pytest.raises(ValueError, match=words + "1]"):
        decoder.loss_fn(ONE, batch)


embedded = fetched(decoder.embed)


@given(value=st.integers(0, 300), dtype=st.sampled_from([np.uint8, np.int8, np.uint32, np.int64]))
def test_narrow_integers_count_as_far_as_wide_ones(value, dtype):
    """Tokens of any integer dtype find their rows. Catches a comparison in uint8 (256 is 0)."""
    table, tokens = np.arange(256, dtype=np.float32)[:, None], np.array([[value]]).astype(dtype)
    equal(embedded({"embedding": table}, tokens)[0, 0, 0], np.append(table, np.nan)[
        tokens[0, 0] if 0 <= tokens[0, 0] < 256 else 256])


# ---------- decoder: the cache and generation
@given(tokens=tokens_of(2, 7), lengths=st.tuples(st.integers(1, 7), st.integers(1, 7)),
       cuts=st.sampled_from([(3, 1, 3), (1, 3, 3)]), garbage=st.sampled_from([0, -1]))
def test_chunked_prefill_is_one_pass(tokens, lengths, cuts, garbage):
    """A row fed in chunks has the logits of the full pass, also where rows differ in length.
    Catches a chunk masked as if it began at 0, a shared position, padding in the cache."""
    params, lengths = small_decoder(), np.array(lengths)
    want = run_decoder(params, tokens)
    padded = np.where(np.arange(7) < lengths[:, None], tokens, garbage)
    cache, start = decoder.init_decoder_cache(params, 2, 8), 0
    for size in cuts:
        real, cut = np.clip(lengths - start, 0, size), slice(start, start + size)
        got, cache = run_cached(params, padded[:, cut], cache, seq_lengths=real)
        for row in range(2):
            close(got[row, :real[row]], want[row, cut][:real[row]], 1e-5)
        start += size
    equal(cache["length"], np.broadcast_to(lengths, (L, 2)))


def test_cache_end():
    """Compiled, a row that would run past the cache's end, or has a length outside 0..T, gets NaN
    and keeps its cache. Catches a write that is clamped to the last slot."""
    params, three = small_decoder(), TOKENS[:, :3]
    cache = decoder.init_decoder_cache(params, 2, 8)
    for _ in range(2):
        _, cache = run_cached(params, three, cache, seq_lengths=np.array([3, 2]))
    for row, lengths in (0, [3, 3]), (1, [1, 4]), (1, [1, -1]):
        logits, after = run_cached(params, three, cache, seq_lengths=np.array(lengths))
        equal(np.isnan(logits).all(axis=(1, 2)), np.arange(2) == row)
        equal(*(jax.tree.map(lambda leaf: leaf[:, row], c) for c in (after, cache)))


@given(prompt=tokens_of(2, 4), lengths=st.tuples(st.integers(1, 4), st.integers(1, 4)))
def test_greedy_generation_is_argmax_over_full_passes(prompt, lengths):
    """New tokens are the argmax of full passes and stand after a row's own prompt; zeros follow.
    Catches positions that begin anew, a stale cache, rows that see each other, padding read."""
    padded = np.where(np.arange(4) < np.array(lengths)[:, None], prompt, -1)
    got = np.asarray(decoder.generate(ONE, padded, 3, prompt_lengths=np.array(lengths)))
    logits = run_decoder(ONE, got)
    for row, n in enumerate(lengths):
        equal(got[row, :n], prompt[row, :n])
        rows = logits[row, n - 1:n + 2]
        close(rows[np.arange(3), got[row, n:n + 3]], rows.max(axis=1), 1e-5)
        equal(got[row, n + 3:], np.zeros(4 - n))


@given(prompt=tokens_of(2, 4), places=st.tuples(st.integers(0, 6), st.integers(0, 6)))
def test_stop_tokens_fill_the_row(prompt, places):
    """A row that has produced one of the stop tokens is filled up with it; the others go on.
    Catches a stop that spreads to other rows, one read from the prompt, one off by a token."""
    want = np.array(decoder.generate(ONE, prompt, 3))
    stops = want[[0, 1], places]
    for row in want:
        for t in 4, 5:
            row[t + 1] = row[t] if row[t] in stops else row[t + 1]
    equal(decoder.generate(ONE, prompt, 3, stop_token=stops), want)


LOGITS = np.log([[0.1, 0.4, 0.3, 0.2], [0.25, 0.25, 0.4, 0.1]]).astype(np.float32)
draw_many = fetched(jax.vmap(decoder.sample, (None, 0, None, None, None)), static_argnums=3)


@pytest.mark.parametrize("temperature, top_k, top_p", [
    (2.0, None, None), (0.5, 2, None), (1.0, 3, 0.6), (0.5, None, 0.75), (1.0, 3, 0.05)])
def test_sampling_follows_the_cut_softmax(temperature, top_k, top_p):
    """Frequencies: softmax(logits / temperature), cut to top_k, then to the fewest reaching top_p.
    Catches temperature after the cut, the last token needed left out, rows that draw alike."""
    keys = jax.random.split(jax.random.key(0), 20_000)
    tokens = draw_many(LOGITS, keys, temperature, top_k, top_p)
    for row in range(2):
        shares = np.exp(LOGITS[row].astype(float)) ** (1 / temperature)
        order = np.argsort(-shares, kind="stable")
        shares[order[top_k or 4:]] = 0
        reached = np.cumsum(shares[order]) / shares.sum()
        shares[order[np.searchsorted(reached, top_p or 2) + 1:]] = 0
        found = np.bincount(tokens[:, row], minlength=4) / len(tokens)
        np.testing.assert_allclose(found, shares / shares.sum(), atol=0.02)
    first, second = tokens[:, 0] == 1, tokens[:, 1] == 2
    np.testing.assert_allclose(np.mean(first & second), np.mean(first) * np.mean(second), atol=0.02)
    tiny = draw_many(LOGITS * 1e5, keys, 1e-38, top_k, top_p)
    assert (tiny == [[1, 2]]).all()  # greedy, and not inf - inf


def test_generation_is_one_compiled_program(monkeypatch):
    """Prefill and step are traced once; new temperatures, and what greedy ignores, compile nothing.
    Catches a loop in Python over tokens, a temperature that is static, one key for all steps."""
    def forward(params, tokens, cache, **options):  # all tokens are equally likely
        calls.append(1)
        return jnp.zeros((*tokens.shape, V)), cache

    monkeypatch.setattr(decoder, "cached_decoder", forward)
    calls, prompt, key = [], np.array([[1, 2]] * 4), jax.random.key(0)
    for count, options in [
            (2, {}), (0, {"temperature": np.float32(0)}), (0, {"top_k": 3, "key": key}),
            (2, {"temperature": 0.5, "key": key, "top_p": 0.99}),
            (0, {"temperature": np.float32(0.7), "key": key, "top_p": jnp.float32(0.9)})]:
        calls.clear()
        new = np.asarray(decoder.generate(ONE, prompt, 11, **options))[:, 2:].tolist()
        assert len(calls) == count
    assert all(len(set(row)) > 3 for row in new) and len(set(map(tuple, new))) == 4


def test_what_generation_cannot_see():
    """Traced values work; wrong ones, and logits not finite, let that row alone go on with -1.
    Catches float() of a tracer, NaN read as token 0, lengths and tokens that are clamped."""
    def run(prompt, lengths, temperature, scale):
        params = {**ONE, "final_norm": ONE["final_norm"] * scale}
        return decoder.generate(params, prompt, 3, prompt_lengths=lengths, temperature=temperature,
                                key=jax.random.key(0))

    good = TOKENS[:, :4]
    bad = np.where(np.arange(8).reshape(2, 4) == 1, V, good)
    cases = [(good, [2, 4], 0.0, 1.0), (good, [2, 4], 0.5, 1.0), (bad, [2, 4], 0.5, 1.0),
             (good, [5, 4], 0.5, 1.0), (good, [0, 4], 0.5, 1.0), (good, [2, 4], -1.0, 1.0),
             (good, [2, 4], math.nan, 1.0), (good, [2, 4], 0.5, math.inf)]
    got = np.asarray(jax.jit(jax.vmap(run))(*map(np.array, zip(*cases))))
    for case in 0, 1:
        equal(got[case], run(*cases[case]))
    assert (got[2:5, 0] == -1).any(axis=1).all() and (got[2:5, 1] == got[1, 1]).all()
    assert (got[5:, 1, 4:] == -1).all() and (run(good, [2, 4], 0.0, math.inf)[1, 4:] == -1).all()


# ---------- decoder: weights from elsewhere
CONFIG = {"model_type": "llama", "hidden_act": "silu", "vocab_size": V, "hidden_size": DIM,
          "num_hidden_layers": L, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
          "intermediate_size": 20, "rms_norm_eps": 1e-5, "max_position_embeddings": 16}
LLAMA3_CONFIG = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                 "high_freq_factor": 4.0}
STATE = decoder.to_llama(small_decoder(head_dim=6))


@given(place=st.tuples(*(st.integers(0, size - 1) for size in (L, DIM, 20, V, 4, 2, 6))))
def test_llama_weights_stand_where_llama_keeps_them(place):
    """Linear layers are [out, in], heads are blocks of rows, every layer has arrays of its own.
    Catches a transpose missing in both directions, heads and head dimension exchanged."""
    i, d, f, v, n, k, h = place
    params, at = jax.tree.map(np.asarray, small_decoder(head_dim=6)), f"model.layers.{i}."
    layer = jax.tree.map(lambda leaf: leaf[i], params["layers"])
    heads, mlp = layer["attention"], layer["mlp"]
    for name, index, want in [
            (at + "self_attn.q_proj", (n * 6 + h, d), heads["wq"][d, n, h]),
            (at + "self_attn.k_proj", (k * 6 + h, d), heads["wk"][d, k, h]),
            (at + "self_attn.v_proj", (k * 6 + h, d), heads["wv"][d, k, h]),
            (at + "self_attn.o_proj", (d, n * 6 + h), heads["wo"][n, h, d]),
            (at + "mlp.gate_proj", (f, d), mlp["w_gate"][d, f]),
            (at + "mlp.up_proj", (f, d), mlp["w_up"][d, f]),
            (at + "mlp.down_proj", (d, f), mlp["w_down"][f, d]),
            (at + "input_layernorm", d, layer["attention_norm"][d]),
            (at + "post_attention_layernorm", d, layer["mlp_norm"][d]),
            ("model.embed_tokens", (v, d), params["embedding"][v, d]),
            ("model.norm", d, params["final_norm"][d]),
            ("lm_head", (v, d), params["output"][d, v])]:
        array = STATE[name + ".weight"]
        assert isinstance(array, np.ndarray) and array[index] == want, name


def test_llama_weights_come_back():
    """from_llama inverts to_llama, in the weights' dtype; frequencies that old files hold are left.
    Catches layers mixed up, a dtype that is widened."""
    state = {name: array.astype(jnp.bfloat16) for name, array in STATE.items()}
    back, _ = decoder.from_llama({**state, "model.rotary_emb.inv_freq": np.ones(2)}, CONFIG)
    equal(back, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), small_decoder(head_dim=6)))
    assert {leaf.dtype for leaf in jax.tree.leaves(back)} == {np.dtype(jnp.bfloat16)}


TIED = {"tie_word_embeddings": True, "rms_norm_eps": 0.1, "rope_parameters": {
    **LLAMA3_CONFIG, "original_max_position_embeddings": 4, "rope_theta": 100.0}}


@pytest.mark.parametrize("change, rope", [
    ({}, {}), ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, {"base": 1e6}),
    ({"rope_scaling": {"type": "linear", "factor": 4.0}}, {"scaling": (4.0,)}),
    ({"rope_theta": 5e5, "rope_scaling": LLAMA3_CONFIG}, {"base": 5e5, "scaling": LLAMA3}),
    (TIED, {"base": 100.0, "scaling": (*LLAMA3[:3], 4)})])
def test_llama_configs_say_how_to_rotate(change, rope):
    """Base and scaling come from the config, in either spelling.
    Catches an option that is not read, and a Llama 3 that loads without a word."""
    options, x = decoder.from_llama(STATE, {**CONFIG, **change})[1], np.float32(np.eye(6))
    got = jax.jit(options["rotate"])(x[None, :, None], np.arange(6)[None])
    close(got[0, :, 0], oracle_rotate(x, np.arange(6), **rope), 1e-6)


def test_llama_options_reach_the_formulas():
    """Rotation and epsilon are used in the full pass, with the cache, and in generation; tied
    embeddings stay one array. Catches an option that is read and not handed on."""
    params, options = decoder.from_llama(STATE, {**CONFIG, **TIED})
    assert "output" not in params
    want = oracle_logits(params, TOKENS, epsilon=0.1, base=100.0, scaling=(*LLAMA3[:3], 4))
    cache = decoder.init_decoder_cache(params, 2, 7)
    full = jax.jit(functools.partial(decoder.decoder, **options))(params, TOKENS)
    cached, _ = jax.jit(functools.partial(decoder.cached_decoder, **options))(params, TOKENS, cache)
    for got in full, cached:
        np.testing.assert_allclose(got, want, atol=2e-5 * abs(want).max())
    equal(decoder.generate(params, TOKENS, 1, **options)[:, 7], want[:, -1].argmax(axis=1))


# ---------- decoder: pieces of the main job
@given(size=st.integers(1, 40), length=st.sampled_from([4, 5, 8, 16]))
def test_evaluation_predicts_every_held_out_byte_once(size, length):
    """Each held-out byte is the target of one True position, after 3/4 length bytes at least.
    Catches bytes dropped at the ragged end or counted twice, the first byte left out."""
    text = np.random.default_rng(size).permutation(200)[:60 + size].astype(np.uint8)  # each once
    windows, seen = decoder.evaluation_windows(text, 60, length), []
    for (row,), (mask,) in zip(windows["tokens"], windows["mask"]):
        for t in np.flatnonzero(mask):
            where = np.flatnonzero(text == row[t + 1])[0]
            equal(row[:t + 1], text[where - t - 1:where])
            assert t + 1 >= 0.75 * length - 1
            seen.append(where)
    assert seen == list(range(60, 60 + size))


def test_held_out_bits():
    """The mean of -log2 p over the counted bytes. Catches nats, and a mean of means."""
    text = np.resize(TOKENS, 60).astype(np.uint8)
    windows = decoder.evaluation_windows(text, 43, 12)  # 17 bytes by threes: the last is ragged
    nats = oracle_losses(ONE, jax.tree.map(lambda x: x[:, 0], windows))
    assert len(nats) == 17
    bits = decoder.held_out_bits(ONE, windows)
    np.testing.assert_allclose(bits, np.mean(nats) / np.log(2), rtol=1e-5)


@given(seed=st.integers(0, 9), step=st.integers(0, 999))
def test_training_windows_are_a_function_of_seed_and_step(seed, step):
    """Windows are cut from anywhere in the text, both ends included; another step or seed gives
    others. Catches an order that a resumed run could not find again, a last byte left out."""
    tokens, again, later, other = (
        data.training_windows(np.arange(12, dtype=np.uint8), 300, 8, *at)["tokens"]
        for at in ((seed, step), (seed, step), (seed, step + 1), (seed + 1, step)))
    equal(tokens, tokens[:, :1] + np.arange(9))
    assert set(tokens[:, 0].tolist()) == {0, 1, 2, 3}
    assert (again == tokens).all() and (later != tokens).any() and (other != tokens).any()


# ---------- wherever JAX code runs
# A function here takes (shared, batch): what all examples share, and a dict of arrays whose first
# axis is the batch, as is that of each leaf of its value. Differentiated, it takes `wrap` besides:
# a way that is applied to what is differentiated.
BATCH = 4


def by_floats(f, shared, batch):
    """`f` as a function of its floats, and these."""
    floats = {name: x for name, x in batch.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    return lambda shared, floats: f(shared, batch | floats), (shared, floats)


def differentiated(call):
    """`call` and its gradients by all floats, the value itself as the cotangent."""
    def f(shared, batch, wrap=lambda call: call):
        through, floats = by_floats(wrap(call), shared, batch)
        value, pull = jax.vjp(through, *floats)
        return value, pull(value)

    return f


def vmapped(f):
    """Example by example, the mapped axis not in front."""
    def mapped(shared, batch):
        batch = jax.tree.map(lambda x: x[None], batch)  # [1, B, ...]
        value = jax.vmap(f, in_axes=(None, 1))(shared, batch)  # [B, 1, ...]
        return jax.tree.map(lambda x: x[:, 0], value)

    return mapped


def scanned(f):
    """Example by example in a loop, everything computed again in the backward pass."""
    def mapped(shared, batch):
        batch = jax.tree.map(lambda x: x[:, None], batch)  # [B, 1, ...]
        value = jax.lax.map(lambda example: jax.checkpoint(f)(shared, example), batch)
        return jax.tree.map(lambda x: x[:, 0], value)

    return mapped


def mesh_of_two(kind=jax.sharding.AxisType.Auto):
    return jax.make_mesh((2,), ("data",), (kind,), devices=jax.devices("cpu")[:2])


def sharded(f):
    """Half of the batch on each of two devices, the rest on both."""
    return jax.shard_map(
        f, mesh=mesh_of_two(), in_specs=(P(), P("data")), out_specs=P("data"))


def sharded_queries(f):
    """All of the batch on each of two devices: only the queries are a device's own."""
    def mapped(shared, batch):
        [name] = {"query", "x"} & {*batch}
        value = jax.shard_map(
            lambda own: f(shared, batch | {name: own}), mesh=mesh_of_two(), in_specs=P("data"),
            out_specs=P("data"))(jnp.concatenate([batch[name], batch[name]]))  # [2 B, ...]
        return jax.tree.map(lambda x: x[:BATCH], value)

    return mapped


def jitted(f, **options):
    """`f` under jit, as a function that JAX has not seen: it is traced anew."""
    return jax.jit(functools.wraps(f)(lambda *args: f(*args)), **options)


def under(run=jitted, **settings):
    """Under all these settings of JAX at once."""
    def way(f, args):
        with contextlib.ExitStack() as stack:
            for setting, value in settings.items():
                stack.enter_context(getattr(jax, setting)(value))
            return jax.block_until_ready(run(f)(*args))

    return way


def vmap_over(name):
    """One argument mapped, all others shared; example i of run i is what the plain call returns."""
    def way(f, args):
        shared, batch = args

        def one(example):
            return f(shared, batch | {name: jnp.broadcast_to(example, batch[name].shape)})

        values = jax.jit(jax.vmap(one))(batch[name][:, None])
        return jax.tree.map(lambda x: x[np.arange(BATCH), np.arange(BATCH)], values)

    return way


def exported_for_any_batch(f, args):
    shapes = args[0], jax.export.symbolic_args_specs(args[1], "size, ...")
    program = jax.export.export(jitted(f))(*shapes)
    if importlib.util.find_spec("flatbuffers"):  # what JAX writes programs with
        program = jax.export.deserialize(program.serialize())
    return jax.jit(program.call)(*args)


def placed(f, args, kind=jax.sharding.AxisType.Auto):
    with jax.set_mesh(mesh_of_two(kind)):
        return jitted(f)(*(jax.device_put(x, spec) for x, spec in zip(args, (P(), P("data")))))


def under_a_forward_derivative(f, args):
    """The value that a forward derivative returns beside its own."""
    def value(*args):
        through, floats = by_floats(f, *args)
        return jax.jvp(through, floats, floats)[0]

    return jax.jit(value)(*args)


CHECKS = {"numpy_rank_promotion": "raise", "numpy_dtype_promotion": "strict", "debug_nans": True,
          "transfer_guard": "disallow"}
ARGUMENTS = ("query", "key", "value", "bias", "mask", "query_seq_lengths", "key_value_seq_lengths")
WAYS = {
    "jit, the batch closed over": lambda f, args: jitted(
        lambda shared: f(shared, args[1]))(args[0]),
    "export for any batch size": exported_for_any_batch,
    "vmap": lambda f, args: jitted(functools.partial(f, wrap=vmapped))(*args),
    "scan of remat": lambda f, args: jitted(functools.partial(f, wrap=scanned))(*args),
    "shard_map": lambda f, args: jitted(functools.partial(f, wrap=sharded))(*args),
    "shard_map of queries": lambda f, args: jitted(
        functools.partial(f, wrap=sharded_queries))(*args),
    "forward over the derivative": under_a_forward_derivative,
    "auto mesh": placed,
    "explicit mesh": functools.partial(placed, kind=jax.sharding.AxisType.Explicit),
    "64 bits": under(enable_x64=True), "all checks": under(**CHECKS),
    "64 bits and all checks": under(enable_x64=True, **CHECKS),
    "no jit": under(run=lambda f: f, disable_jit=True, debug_infs=True),
} | {f"vmap over {name}": vmap_over(name) for name in ARGUMENTS}


def everything(*implementations):
    """`dot_product_attention` with all its arguments; all arrays come with the batch."""
    options = {"is_causal": True, "local_window_size": (3, 1)}
    return differentiated(lambda _, batch: [
        attend(**batch, **options, implementation=name) for name in implementations])


def layers(params, batch):
    """The whole layer, and ragged rows of new tokens into a cache that is partly full."""
    cache = {name: batch[name] for name in ("k", "v", "length")}
    full = attention.attention(params, batch["x"], key_value_seq_lengths=batch["length"])
    out, cache = attention.cached_attention(
        params, batch["x"], cache, seq_lengths=batch["seq_lengths"], rotate=rotate)
    return full, out, cache["k"], cache["v"]


def decoder_pieces(params, batch, wrap=lambda call: call):
    """Of each row: the loss, with gradients, and two tokens more."""
    def loss(params, batch):
        tokens = batch["tokens"][:, None]  # [B, 1, T]
        rows = {"tokens": tokens, "mask": jnp.ones_like(tokens[..., 1:], bool)}
        return jax.vmap(lambda row: decoder.loss_fn(params, row)[0])(rows)

    def more(params, batch):
        return decoder.generate(
            params, batch["tokens"], 2, key=jax.random.key(0), temperature=0.7, top_k=1, top_p=0.9,
            stop_token=3, prompt_lengths=batch["lengths"])

    return differentiated(loss)(params, batch, wrap), wrap(more)(params, batch)


def mlp_rows(params, batch):
    """Of each row: its loss, and its confusion matrix."""
    losses, logits, _ = train.masked_losses(params, batch)
    pairs = batch["label"][:, None], logits.argmax(axis=1)[:, None]  # [B, 1] each
    matrices = jax.vmap(functools.partial(train.confusion_matrix, num_classes=3))(*pairs)
    return losses, matrices.astype(jnp.float32)


def function_inputs():
    query, key, value, bias, x, k, v, w = cut(
        FIXED, (4, 5, N, H), (4, 7, K, H), (4, 7, K, H), (4, N, 5, 7), (4, 5, D),
        (4, 9, K, H), (4, 9, K, H), (D, 3))
    arrays = {"query": query, "key": key, "value": value, "mask": bias[:, :1] > -0.5,
              "query_seq_lengths": np.int32([5, 4, 5, 3]),
              "key_value_seq_lengths": np.int32([7, 3, 0, 5])}
    cache = {"x": x, "k": k, "v": v, "length": np.int32([0, 2, 4, 3]),
             "seq_lengths": np.int32([5, 2, 3, 0])}
    prompts = {"tokens": np.resize(np.int32(TOKENS), (4, 3)), "lengths": np.int32([1, 2, 3, 3])}
    images = {"image": x[:, 0], "label": np.int32([0, 2, 1, 2]), "mask": np.arange(4) != 1}
    layers = [{"w": w, "b": w[0]}, {"w": w[:3], "b": w[1]}]
    return jax.device_put({
        "blockwise": ((), arrays), "naive, xla": ((), arrays | {"bias": bias}),
        "layers": (PARAMS, cache), "decoder": (ONE, prompts), "mlp": (layers, images)})


FUNCTIONS = {"blockwise": everything("blockwise"), "naive, xla": everything("naive", "xla"),
             "layers": differentiated(layers), "decoder": decoder_pieces,
             "mlp": differentiated(mlp_rows)}
# "naive" and "xla" have no loops to stumble over, and of jax.nn not all is for 64 bits; of layers
# the decoder's ways are the others; jax.nn's log_softmax has infinities on its way.
APPLY = {
    "blockwise": {*WAYS} - {"vmap over bias", "64 bits", "all checks"},
    "naive, xla": {"vmap over bias", "export for any batch size", "explicit mesh", "64 bits",
                   "all checks"},
    "layers": {"export for any batch size", "explicit mesh", "scan of remat",
               "shard_map of queries", "forward over the derivative"},
    "decoder": {"jit, the batch closed over", "vmap", "shard_map", "auto mesh",
                "64 bits and all checks"},
    "mlp": {way for way in WAYS if "vmap over" not in way} - {"shard_map of queries", "no jit"}}


@functools.cache
def plain(name):
    args = function_inputs()[name]
    return args, jitted(FUNCTIONS[name])(*args)


@pytest.mark.parametrize("name, way", [
    (name, way) for name in FUNCTIONS for way in WAYS if way in APPLY[name]])
def test_every_way_to_trace_and_place_returns_what_the_plain_call_does(name, way):
    """Values and gradients are those of the plain call, wherever JAX code may run (WAYS, APPLY).
    Catches a Python branch on a value or a symbolic size, a carry of fresh zeros that varies over
    no device, an ambiguous sharding, implicit promotion, a derivative that has none."""
    args, want = plain(name)
    got = WAYS[way](FUNCTIONS[name], args)
    assert jax.tree.map(lambda x: x.dtype, got) == jax.tree.map(lambda x: x.dtype, want)
    close(got, want)


def test_generation_without_jit():
    """One token, each operation by itself. Catches a loop that only a trace can run."""
    with jax.disable_jit():
        got = decoder.generate(ONE, np.array([[1]]), 1)
    assert got[0, 1] == oracle_decoder(ONE, [1])[0].argmax()


@pytest.mark.parametrize("varies", ["params", "prompt", "key", "temperature", "top_p"])
def test_loops_accept_what_varies_over_devices(varies):
    """Inside shard_map any argument of generation may differ by device.
    Catches a loop that begins with fresh zeros, alike on all devices."""
    arguments = {"params": ONE, "prompt": TOKENS[:, :3], "key": jax.random.key(0),
                 "temperature": np.float32(0.5), "top_p": np.float32(0.9)}
    specs = {name: P("data") if name == varies else P() for name in arguments}

    def share(arguments):
        mine = jax.tree.map(lambda x: x[0], arguments)
        return decoder.generate(num_tokens=2, **mine)[None]

    run = jax.shard_map(share, mesh=mesh_of_two(), in_specs=(specs,), out_specs=P("data"))
    pairs = jax.tree.map(lambda x: jnp.stack([x, x]), arguments)
    assert jax.eval_shape(run, pairs).shape == (2, 2, 5)  # what would fail fails while tracing


# ---------- what is refused
def changed(function, **arguments):
    """`function` of these arguments but for what a dict says."""
    return lambda change: function(**arguments | change)


def ring(B, S, K, H):
    return {"k": np.zeros((B, S, K, H)), "v": np.zeros((B, S, K, H)), "length": np.full(B, 6)}


SAVED = {"w": jnp.ones((2, 3)), "n": np.int32(1), "k": jax.random.key(0), "s": [3, True, "text"]}
QUAD = {"image": np.zeros((4, 2, 2)), "label": np.zeros(4, np.uint8)}
ZEROS = dict.fromkeys(["query", "key", "value"], np.zeros((2, 4, 2, 8)))
ONES, X, ROOT = np.ones((1, 1, 4, 4)), np.zeros((1, 2, D)), jax.random.key(0)
UNEVEN = PARAMS | {"wq": PARAMS["wq"][:, :4], "wo": PARAMS["wo"][:4]}
batches = functools.partial(data.batches, batch_size=2)
save = functools.partial(reload, like={})
generate = changed(decoder.generate, params=ONE, prompt=np.array([[1, 2]]), num_tokens=3)
cached_decoder = changed(decoder.cached_decoder, params=ONE, tokens=TOKENS[:, :3], cache={
    name: leaf[None] for name, leaf in ring(2, 8, 2, 4).items()})
UP_PROJ = "model.layers.1.mlp.up_proj.weight"
REFUSED_CALLS = {  # function: [(its argument, the error)]
    functools.partial(train.init_mlp, ROOT): [
        ([5], r"two or more positive widths, got \[5\]"), ([5, 0], r"got \[5, 0\]")],
    functools.partial(train.mlp, FOUR): [
        (jnp.ones((3, 4), jnp.uint8), r"float images .* got uint8 \[3, 4\]")],
    lambda change: train.loss_fn(FOUR, STEP | change): [
        ({"image": np.ones((4, 28, 28))}, r"\[B, 4\], got float32 \[4, 28, 28\]"),  # case L05
        ({"image": np.ones((3, 4))}, r"as many images as labels, got \(3, 4\)"),
        ({"label": np.zeros((4, 1), int)}, r"labels .* got int32 \[4, 1\] and bool \[4\]"),
        ({"label": np.zeros(4)}, r"integer labels .* got float32 \[4\]"),
        ({"mask": np.ones(4, int)}, r"bool mask, .* and int32 \[4\]")],
    lambda bad: train.confusion_matrix(FLAT, bad, 4): [
        (FLAT[:2], r"predictions .*\[2\] and bool \[4\]")],
    functools.partial(train.shardings, range(4)): [
        (19, "--batch-size 19 does not divide by the 4 devices")],
    functools.partial(train.evaluate, FOUR): [
        ([], "nothing to evaluate"), ([STEP | {"mask": np.zeros(4, bool)}], "nothing to evaluate")],
    changed(attend, **ZEROS): [
        ({"query": np.zeros((2, 4, 3, 8))}, "heads: got 3 and 2"),
        ({"key": np.zeros((2, 4, 0, 8)), "value": np.zeros((2, 4, 0, 8))}, "heads: got 2 and 0"),
        *[({"key": np.zeros(bad), "value": np.zeros(bad)}, "agree in B, S, K, H .*got float32")
          for bad in [(1, 4, 2, 8), (4, 2, 8), (2, 4, 2, 7)]],
        ({"value": np.zeros((2, 5, 2, 8))}, r"got .*\(2, 4, 2, 8\), float32 \(2, 5, 2, 8\)"),
        ({name: np.zeros((2, 4, 2, 8), int) for name in ZEROS}, "floating dtype: got int32"),
        ({"implementation": "flash"}, "'flash' is none of .*naive.*xla.*blockwise.*cudnn"),
        ({"implementation": "blockwise", "bias": ONES}, "'blockwise' takes no bias"),
        ({"mask": ONES}, "mask must be bool .*got float32"),
        ({"mask": ONES[..., :3] > 0}, r"mask .*\(2, 2, 4, 4\): got bool \(1, 1, 4, 3\)"),
        ({"bias": ONES[None]}, r"bias must be floating .* got float32 \(1, 1, 1, 4, 4\)"),
        ({"query_seq_lengths": [1]}, r"query_seq_lengths must be 2 integers: got int32 \(1,\)"),
        ({"key_value_seq_lengths": [1.0, 1.0]}, "key_value_seq_lengths .*got float32"),
        *[({"local_window_size": bad}, "local_window_size must .*got .?1") for bad in (
            (1, 2, 3), 1.5)],
        ({"scale": np.ones(2)}, r"scale must be a scalar: got shape \(2,\)")],
    changed(attention.init_attention, key=ROOT, model_dim=8, num_heads=4): [
        ({"num_kv_heads": 3}, "num_heads=4, num_kv_heads=3"), ({"model_dim": 10}, "model_dim=10"),
        ({"head_dim": 0}, "head_dim=0")],
    changed(attention.attention, params=PARAMS, x=X): [
        ({"params": UNEVEN}, "heads: got 4 and 3"), ({"implementation": "flash"}, "flash"),
        ({"x": X[..., 1:]}, r"x must be \[B, T, 10\] .* got \(1, 2, 9\)")],
    changed(attention.cached_attention, params=PARAMS, x=X, cache=ring(1, 4, K, H)): [
        ({"x": X[0]}, r"to fit x, the cache must be \[2, S >= 10, 3, 2\]"),
        *[({"cache": ring(*bad)}, r"\[1, S >= 2, 3, 2\]: got ") for bad in (
            (1, 1, K, H), (2, 4, K, H), (1, 4, H, K))],
        ({"layer": 0}, "the cache must be"), ({"seq_lengths": [1, 2]}, "seq_lengths must be 1 "),
        ({"layer": 3, "cache": jax.tree.map(lambda leaf: np.stack([leaf] * 3), ring(1, 4, K, H))},
         "layer must lie in 0..2, got 3")],
    functools.partial(reload, SAVED): [
        (SAVED | {"n": None}, "n is only there"), (SAVED | {"x": 1}, "x is missing"),
        (SAVED | {"w": jnp.ones((3, 2))}, r"w is float32\[2, 3\] .* expected float32\[3, 2\]"),
        (SAVED | {"s": [True, True, "text"]}, "s/0 is int64.* expected bool"),
        (SAVED | {"s": [3, True, 1]}, "s/2 is <U4.* expected int64"),
        (SAVED | {"s": ["3", True, "text"]}, "s/0 is int64.* expected <U1"),
        (SAVED | {"w": jnp.ones((2, 3), jnp.bfloat16)}, "w is only there|w:bfloat16 is missing"),
        (SAVED | {"k": jax.random.key(0, impl="rbg")}, "k:key<(fry|rbg)> is"),
        (SAVED | {"k": jax.random.split(SAVED["k"])}, r"k:.*uint32\[2\] .*uint32\[2, 2\]")],
    save: [
        *[({"x": bad}, "x must be numbers") for bad in (
            object(), 2**70, np.array(["a"]), np.zeros(1, "M8[s]"), np.zeros(1, [("a", "f4")]))],
        *[(bad, "names no array or two") for bad in (
            {"a/b": 1, "a": {"b": 2}}, {"file": 1}, {"allow_pickle": 1}, {"x.npy": 1, "x": 2},
            {"x\0y": 1}, {"x" * 70_000: 1}, {"w:bfloat16": 1, "w": np.ones(1, jnp.bfloat16)})]],
    **{function: [(bad, f"{name} must be an integer of at least {least}, got {bad!r}")
                  for bad in (least - 1, 1.0, "2", True, 2**64)]
       for function, name, least in [
           (lambda size: data.batches(QUAD, size), "batch_size", 1),
           (lambda seed: batches(QUAD, seed=seed), "seed", 0),
           (lambda epoch: batches(QUAD, epoch=epoch), "epoch", 0),
           (lambda steps: data.stack([], steps), "steps", 1),
           (lambda size: data.to_device([], size=size), "size", 0),
           (lambda seed: data.synthetic(seed, 5, 5), "seed", 0),
           (lambda count: data.synthetic(0, count, 5), "num_train", 1)]},
    functools.partial(data.batches, QUAD): [(5, "batch_size 5 exceeds the 4 examples")],
    lambda bad: batches(QUAD, remainder=bad): [("keep", "'drop' or 'pad', got 'keep'")],
    batches: [
        ({**QUAD, "mask": np.ones(4, bool)}, "none called 'mask', got .{'image'"),
        ({**QUAD, "label": np.zeros(3)}, r"one length .*\(4, 2, 2\).*'float64 \(3,\)'"),
        ({**QUAD, "label": list("abcd")}, "<U1"), ({"x": 3}, r"'x': 'int64 \(\)'"),
        ({"train": [QUAD]}, "object"), (np.zeros(4), r"a dict of arrays, .*got '\[0"),
        ({"x": np.zeros((0, 2))}, r"n > 0, got .*\(0, 2\)"), ({}, "n > 0, got {}")],
    lambda bad: list(data.to_device([bad])): [
        (np.array(bad), "do not fit JAX's u?int32")
        for bad in ([3, 2**40], [-2**31 - 1], np.uint64([2**32]))],
    lambda bad: list(data.to_device(map(int, bad))): [(["row 3"], "row 3")],  # the source's own
    data.preprocess: [
        *[(abstract(2, 28, 28, dtype=dtype), rf"uint8 \[..., 28, 28\], got {dtype}") for dtype in (
            "float32", "int8", "bool")],
        *[(np.zeros(bad, "u1"), "got uint8") for bad in [(28,), (784,), (28, 28, 1)]],
        ([[1, 2]], "got .*list"), (None, "got .*NoneType")],
    data.parse_idx: [(b"\0\0\x08\x41" + 65 * b"\0\0\0\1" + b"\5", "dimension")],
    changed(
        decoder.init_decoder, key=ROOT, vocab_size=5, num_layers=1, model_dim=16, num_heads=4): [
        ({"vocab_size": 0}, "vocab_size=0"), ({"num_layers": 0}, "num_layers=0"),
        ({"mlp_dim": 0}, "mlp_dim=0"), ({"head_dim": 3}, "even to rotate, got 3"),
        ({"num_kv_heads": 3}, "num_heads=4, num_kv_heads=3"), ({"model_dim": 17}, "17")],
    generate: [
        ({"prompt": np.zeros((1, 0), int)}, "at least one"),
        ({"prompt": np.array([1, 2])}, "at least one"), ({"prompt": np.array([[1.0]])}, "integers"),
        ({"prompt": np.array([[1, 23]])}, "0..22, got 23"), ({"temperature": 1.0}, "give key"),
        *[({name: bad}, name) for name, values in {
            "num_tokens": (0, 2.5), "temperature": (-1.0, math.nan, np.ones(2)),
            "top_k": (0, 24, 1.5), "top_p": (0.0, 1.1), "stop_token": ([1, 23], 1.0),
            "prompt_lengths": ([0], [3], [1, 2], [1.0])}.items() for bad in values]],
    cached_decoder: [
        *[({"tokens": bad}, "2 rows of 8") for bad in (
            TOKENS[:1], TOKENS[0], np.resize(TOKENS, (2, 9)))],
        ({}, "0..8, got 9"), ({"seq_lengths": [2, 4]}, "0..3, got 4"),
        ({"seq_lengths": [-1, 2]}, "0..3, got -1"),
        *[({"seq_lengths": bad}, "seq_lengths") for bad in ([1, 1, 1], [1.0, 1.0])]],
    changed(decoder.decoder, params=ONE, tokens=TOKENS): [
        *[({"tokens": bad}, "integers") for bad in (TOKENS[0], TOKENS * 1.0, TOKENS > 0)],
        ({"implementation": "fastest"}, "implementation")],
    lambda change: decoder.loss_fn(ONE, DECODER_BATCH | change): [
        (change, "integer tokens .* bool mask") for change in (
            {"mask": np.ones((2, 7), bool)}, {"mask": np.ones((2, 6))}, {"tokens": TOKENS > 0})],
    lambda change: decoder.from_llama(STATE, CONFIG | change): [
        *[({name: bad}, name) for name, bad in {
            "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu", "sliding_window": 4096,
            "partial_rotary_factor": 0.5, "model_type": "gemma", "num_local_experts": 8}.items()],
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "yarn"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"hidden_size": None}, "no hidden_size"), ({"num_hidden_layers": 3}, "layers.2"),
        ({"num_hidden_layers": 1}, "layers.1"), ({"intermediate_size": 24}, "mlp.down_proj"),
        *[({name: bad}, "shape") for name, bad in {
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4,
            "vocab_size": 24}.items()]],
    lambda change: decoder.from_llama(
        {name: x for name, x in (STATE | change).items() if x is not None}, CONFIG): [
        ({name: bad}, name) for name, bad in [
            (UP_PROJ, None), (UP_PROJ, np.ones((DIM, 20))), ("lm_head.weight", None),
            ("model.layers.0.self_attn.q_proj.bias", np.zeros(24))]],
}


@pytest.mark.parametrize("function, bad, words", [
    (function, *row) for function, rows in REFUSED_CALLS.items() for row in rows])
def test_what_does_not_fit_is_refused(function, bad, words, monkeypatch):
    """A ValueError of one line names what was given and expected: at once, before any work.
    Catches what would broadcast, be cast, clamped, wrapped round or lost, True taken for 1."""
    monkeypatch.setattr(decoder, "generate_compiled", None)
    with pytest.raises(ValueError, match=words) as error:
        function(bad)
    assert "\n" not in str(error.value)
