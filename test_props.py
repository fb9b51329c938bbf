# SPDX-License-Identifier: MIT
"""Properties of minijax: what the docstrings promise, shown by Hypothesis and by plain examples.

    pytest                                   the whole suite
    HYPOTHESIS_PROFILE=thorough pytest       ten times the examples
    MINIJAX_REQUIRE_GPU=1 pytest             a missing GPU is a failure, not a skip

Every property says what it promises and which mistake it would catch. Expected values come from
NumPy in float64 or from arithmetic done by hand, never from the function under test.
"""
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st

import data
import minijax_train as train

# Compilation makes the first example slow, so no deadline (it would time the compiler).
settings.register_profile("default", deadline=None, max_examples=20)
settings.register_profile("thorough", deadline=None, max_examples=200)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# float32 matmuls on a GPU's tensor cores round like tensorfloat32: pin them, so that tolerances hold there too.
jax.config.update("jax_default_matmul_precision", "highest")


# ---------------------------------------------------------------- helpers

HERE = os.path.dirname(os.path.abspath(__file__))
SIZES = [(3, 4), (5, 4, 3), (7, 6, 6, 2)]  # few, so that the number of compilations stays bounded
seeds = st.integers(0, 2**31 - 1)


def make_batch(seed, sizes, count, kept=None):
    """A random batch of float images for an MLP of the given sizes, and which rows are real."""
    rng = np.random.default_rng(seed)
    mask = np.ones(count, bool) if kept is None else np.resize(np.array(kept, bool), count)
    return {"image": rng.normal(size=(count, sizes[0])).astype(np.float32),
            "label": rng.integers(0, sizes[-1], count).astype(np.int32), "mask": mask}


def mlp_oracle(params, batch, smoothing=0.0):
    """(loss, gradients, logits of the real rows) of the MLP in float64, by the chain rule written out."""
    x = batch["image"][batch["mask"]].astype(np.float64)
    labels = batch["label"][batch["mask"]]
    inputs = []
    for number, layer in enumerate(params):
        inputs.append(x)
        x = x @ np.asarray(layer["w"], np.float64) + np.asarray(layer["b"], np.float64)
        if number < len(params) - 1:
            x = np.maximum(x, 0)
    logits, count, classes = x, max(len(labels), 1), x.shape[1]
    target = np.full(x.shape, smoothing / classes)
    target[np.arange(len(labels)), labels] += 1 - smoothing
    log_p = x - x.max(axis=1, keepdims=True)
    log_p -= np.log(np.exp(log_p).sum(axis=1, keepdims=True))
    loss, d, grads = -(target * log_p).sum() / count, (np.exp(log_p) - target) / count, []
    for layer, x in zip(reversed(params), reversed(inputs)):
        grads.insert(0, {"w": x.T @ d, "b": d.sum(axis=0)})
        d = (d @ np.asarray(layer["w"], np.float64).T) * (x > 0)
    return loss, grads, logits


def assert_trees_close(actual, expected, **tolerance):
    """Same structure, and every leaf close (exactly equal without a tolerance); a NaN on one side alone fails."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
        np.testing.assert_allclose(np.asarray(a), np.asarray(e), **({"rtol": 0, "atol": 0} | tolerance))


def spoil(batch):
    """The batch with NaN images and impossible labels in its padding rows."""
    image = np.where(batch["mask"][:, None], batch["image"], np.nan).astype(np.float32)
    return {**batch, "image": image, "label": np.where(batch["mask"], batch["label"], 255).astype(np.int32)}


def start(*argv, **environment):
    """Starts one of our programs in a process of its own."""
    return subprocess.Popen([sys.executable, *argv], cwd=HERE, env={**os.environ, **environment}, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process):
    """(exit code, stdout, stderr) of such a process."""
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


# ---------------------------------------------------------------- minijax_train: model and loss


@given(sizes=st.sampled_from(SIZES), wrap=st.sampled_from(["list", "dict", "deep"]), seed=seeds)
def test_gradient_tree_matches_parameter_tree(sizes, wrap, seed):
    """Gradients have the structure, shapes and dtypes of the parameters, whatever the tree around them.

    Catches a loss that closes over its parameters, casts them, or a step that differentiates the batch.
    """
    layers = train.init_mlp(jax.random.key(seed), sizes)
    nest = {"list": lambda p: p, "dict": lambda p: {"net": p, "unused": jnp.ones(2)},
            "deep": lambda p: ({"a": [p[:1]], "b": {"rest": p[1:]}}, jnp.zeros(()))}[wrap]
    unnest = {"list": lambda t: t, "dict": lambda t: t["net"],
              "deep": lambda t: t[0]["a"][0] + t[0]["b"]["rest"]}[wrap]
    params, batch = nest(layers), make_batch(seed, sizes, 4)
    grads = jax.grad(lambda p: train.loss_fn(unnest(p), batch)[0])(params)
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    for g, p in zip(jax.tree.leaves(grads), jax.tree.leaves(params)):
        assert (g.shape, g.dtype) == (p.shape, p.dtype)
    assert_trees_close(unnest(grads), mlp_oracle(layers, batch)[1], atol=1e-5)


@given(sizes=st.sampled_from(SIZES), kept=st.lists(st.booleans(), min_size=6, max_size=6), seed=seeds,
       smoothing=st.sampled_from([0.0, 0.1]))
def test_loss_and_gradients_are_exact_means_over_real_examples(sizes, kept, seed, smoothing):
    """Loss, accuracy and gradients equal the float64 chain rule over the real rows, NaN in the others or not.

    Catches a mean over all rows, a NaN that leaks through 0 * NaN, smoothing by another formula, and the
    all-padding batch (0, not NaN).
    """
    params, batch = train.init_mlp(jax.random.key(seed), sizes), make_batch(seed, sizes, 6, kept)
    (loss, metrics), grads = jax.value_and_grad(train.loss_fn, has_aux=True)(params, spoil(batch), smoothing)
    expected, expected_grads, logits = mlp_oracle(params, batch, smoothing)
    np.testing.assert_allclose(loss, expected, atol=1e-5)
    assert metrics["loss"] == loss and loss.dtype == jnp.float32
    assert_trees_close(grads, expected_grads, atol=1e-5)
    hits = (logits.argmax(axis=1) == batch["label"][batch["mask"]]).sum()
    np.testing.assert_allclose(metrics["accuracy"], hits / max(sum(batch["mask"]), 1), atol=1e-6)
    if not any(kept):
        assert loss == 0 and all(not np.any(g) for g in jax.tree.leaves(grads))


def test_loss_of_a_worked_example():
    """Three rows by hand, through a layer that passes them on; the masked row's gradient is exactly zero."""
    params = [{"w": jnp.eye(3), "b": jnp.zeros(3)}]
    batch = {"image": np.array([[1, 2, 3], [3, 1, 0], [0, 0, 0]], np.float32), "label": np.array([2, 0, 1]),
             "mask": np.array([True, False, True])}
    loss, grads = jax.value_and_grad(lambda image: train.loss_fn(params, {**batch, "image": image})[0])(batch["image"])
    np.testing.assert_allclose(loss, 0.7531091, atol=1e-6)
    expected = [[0.04502, 0.12236, -0.16738], [0, 0, 0], [0.16667, -0.33333, 0.16667]]
    np.testing.assert_allclose(grads, expected, atol=1e-5)
    assert not np.any(grads[1])


@pytest.mark.parametrize("label", [-1, 3])
def test_a_label_that_is_no_class_makes_the_loss_nan(label):
    """Compiled code cannot raise, so NaN tells: a label must not silently wrap round or count as no loss."""
    params, batch = train.init_mlp(jax.random.key(0), (4, 3)), make_batch(0, (4, 3), 2)
    assert np.isnan(train.loss_fn(params, {**batch, "label": np.array([0, label])})[0])


def test_loss_is_float32_for_bfloat16_parameters():
    """bfloat16 logits are widened before the softmax: the loss of 512 equal rows keeps float32's precision."""
    params = [{"w": jnp.zeros((2, 10), jnp.bfloat16), "b": jnp.zeros(10, jnp.bfloat16)}]
    batch = {"image": np.zeros((512, 2), jnp.bfloat16), "label": np.zeros(512, np.int32), "mask": np.ones(512, bool)}
    loss, _ = train.loss_fn(params, batch)
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, np.log(10), rtol=1e-6)


def test_init_mlp_draws_every_layer_anew():
    """Weights have variance 2 / I and differ between layers of one shape; biases are 0; the key decides alone."""
    params = train.init_mlp(jax.random.key(0), [64, 64, 64, 300])
    assert [layer["w"].shape for layer in params] == [(64, 64), (64, 64), (64, 300)]
    assert not np.array_equal(params[0]["w"], params[1]["w"])
    for layer in params:
        assert layer["w"].dtype == layer["b"].dtype == jnp.float32 and not np.any(layer["b"])
        assert layer["b"].shape == layer["w"].shape[1:]
        np.testing.assert_allclose(np.std(layer["w"]), np.sqrt(2 / 64), rtol=0.05)
    assert_trees_close(train.init_mlp(jax.random.key(0), [64, 64, 64, 300]), params)
    assert not np.array_equal(train.init_mlp(jax.random.key(1), [64, 64])[0]["w"], params[0]["w"])


@pytest.mark.parametrize("call, words", [
    (lambda: train.init_mlp(jax.random.key(0), [5]), "two or more"),
    (lambda: train.init_mlp(jax.random.key(0), [5, 0]), "positive"),
    (lambda: train.mlp([{"w": jnp.ones((4, 2)), "b": jnp.ones(2)}], jnp.ones((3, 5))), r"\[B, 4\], got float32 \[3, 5\]"),
    (lambda: train.mlp([{"w": jnp.ones((4, 2)), "b": jnp.ones(2)}], jnp.ones(4)), r"\[B, 4\], got float32 \[4\]"),
    (lambda: train.mlp([{"w": jnp.ones((4, 2)), "b": jnp.ones(2)}], jnp.ones((3, 4), jnp.uint8)), "uint8"),
    (lambda: train.confusion_matrix(np.zeros(3, int), np.zeros(2, int), 2), r"\[3\], \[2\]"),
    (lambda: train.confusion_matrix(np.zeros((3, 1), int), np.zeros((3, 1), int), 2), r"\[3, 1\]"),
    (lambda: train.confusion_matrix(np.zeros(3), np.zeros(3, int), 2), "labels must be integers, got float32"),
    (lambda: train.confusion_matrix(np.zeros(3, int), np.zeros(3), 2), "predictions must be integers"),
    (lambda: train.confusion_matrix(np.zeros(3, int), np.zeros(3, int), 2, np.ones(2, bool)), r"\[2\]"),
    (lambda: train.evaluate(train.init_mlp(jax.random.key(0), (2, 3)), []), "no real example"),
])
def test_wrong_arguments_are_named(call, words):
    """Each mistake is a ValueError that says what was given and what was expected."""
    with pytest.raises(ValueError, match=words):
        call()


# ---------------------------------------------------------------- minijax_train: optimizer and step


@pytest.mark.parametrize("decay, expected", [(0.01, 0.899), (0.0, 0.9)])
def test_first_adamw_step_by_hand(decay, expected):
    """p=1, g=0.5, rate 0.1: Adam moves by the rate, decay by rate * decay * p. Catches L2 decay and unscaled decay."""
    optimizer = train.make_optimizer(0.1, decay)
    params = jnp.array(1.0)
    updates, _ = optimizer.update(jnp.array(0.5), optimizer.init(params), params)
    np.testing.assert_allclose(optax.apply_updates(params, updates), expected, atol=2e-6)


def test_adamw_decays_weight_matrices_only_by_name():
    """With zero gradients only decayed leaves move, to 1 - rate * decay; stacked scales have two axes and stay."""
    ones = jnp.ones((2, 3))
    params = {"layers": [{"w": ones, "b": jnp.ones(3)}], "wq": jnp.ones((2, 2, 2)), "bias": ones, "scale": ones,
              "attention_norm": ones, "embedding": ones, "w_up": jnp.ones(1)}
    optimizer = train.make_optimizer(0.1, 0.01)
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    after = optax.apply_updates(params, updates)
    moved = {jax.tree_util.keystr(path): bool(np.all(leaf != 1)) for path, leaf in jax.tree.leaves_with_path(after)}
    assert moved == {"['layers'][0]['w']": True, "['layers'][0]['b']": False, "['wq']": True, "['bias']": False,
                     "['scale']": False, "['attention_norm']": False, "['embedding']": True, "['w_up']": True}
    np.testing.assert_allclose(after["wq"], 0.999, atol=1e-6)


@given(grads=st.lists(st.floats(-2, 2, width=32), min_size=4, max_size=4), decay=st.sampled_from([0.0, 0.5]),
       b2=st.sampled_from([0.95, 0.999]))
def test_adamw_steps_equal_float64(grads, decay, b2):
    """Four steps on a decaying schedule equal AdamW written out in float64, through make_train_step.

    Catches a missing bias correction, swapped betas, a schedule read one step late.
    """
    step = train.make_train_step(lambda p, b: (p["w"] * b, {}), train.make_optimizer(lambda n: 0.1 / (1 + n), decay, b2=b2))
    params = {"w": jnp.array(1.0)}
    state = train.make_optimizer(lambda n: 0.1 / (1 + n), decay, b2=b2).init(params)
    p, m, v = 1.0, 0.0, 0.0
    for n, g in enumerate(grads):
        params, state, _ = step(params, state, jnp.float32(g))
        m, v = 0.9 * m + 0.1 * g, b2 * v + (1 - b2) * g * g
        m_hat, v_hat = m / (1 - 0.9 ** (n + 1)), v / (1 - b2 ** (n + 1))
        p -= 0.1 / (1 + n) * (m_hat / (np.sqrt(v_hat) + 1e-8) + decay * p)
        np.testing.assert_allclose(params["w"], p, atol=2e-4 if abs(g) < 1e-3 else 1e-5)


def test_train_step_keeps_moments_and_count_over_a_checkpoint(tmp_path):
    """Gradients 1,1,1,-1,-1,-1, saved after three: bit-equal to the unbroken run. Catches lost moments or count."""
    optimizer = train.make_optimizer(0.1, 0.0)
    step = jax.jit(train.make_train_step(lambda p, sign: (p * sign, {}), optimizer))
    params, results = jnp.array(1.0), []
    for breaks in (False, True):
        state = {"params": params, "opt_state": optimizer.init(params)}
        for n, sign in enumerate([1.0, 1.0, 1.0, -1.0, -1.0, -1.0]):
            if breaks and n == 3:
                train.save_checkpoint(tmp_path / "c.npz", state)
                state = train.load_checkpoint(tmp_path / "c.npz", {"params": params, "opt_state": optimizer.init(params)})
            p, s, _ = step(state["params"], state["opt_state"], sign)
            state = {"params": p, "opt_state": s}
        results.append(state)
    assert_trees_close(results[1], results[0])
    np.testing.assert_allclose(results[1]["params"], 0.66662407, atol=1e-5)


@functools.cache
def compiled_steps():
    """(optimizer, train_step, train_steps), jitted once for all examples."""
    optimizer = train.make_optimizer(1e-2, 0.1)
    train_step = train.make_train_step(train.loss_fn, optimizer)
    return optimizer, jax.jit(train_step), jax.jit(train.make_train_steps(train_step))


@given(sizes=st.sampled_from(SIZES[:2]), seed=seeds)
def test_train_step_is_pure_and_train_steps_repeats_it(sizes, seed):
    """A step changes none of its arguments and repeats bit for bit; train_steps over K batches equals K steps.

    Catches hidden state, in-place updates, and a scan that feeds a batch twice or returns only the last metrics.
    """
    optimizer, step, steps = compiled_steps()
    params = train.init_mlp(jax.random.key(seed), sizes)
    before = jax.device_get((params, optimizer.init(params)))
    items = [make_batch(seed + k, sizes, 4, [True, True, k != 1, True]) for k in range(3)]
    first, again = (step(params, optimizer.init(params), items[0]) for _ in range(2))
    assert_trees_close(again, first)
    assert_trees_close((params, optimizer.init(params)), before)
    state, metrics = (params, optimizer.init(params)), []
    for batch in items:
        *state, m = step(*state, batch)
        metrics.append(m)
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *items)
    *many, many_metrics = steps(params, optimizer.init(params), stacked)
    assert_trees_close(tuple(many), tuple(state), atol=1e-6)
    assert_trees_close(many_metrics, jax.tree.map(lambda *leaves: np.stack(leaves), *metrics), atol=1e-6)


def test_all_padding_batch_changes_nothing_but_decay():
    """A step on padding alone moves weights by the decay only, biases not at all."""
    optimizer, params = train.make_optimizer(0.1, 0.5), [{"w": jnp.ones((2, 3)), "b": jnp.ones(3)}]
    step = train.make_train_step(train.loss_fn, optimizer)
    after, _, metrics = step(params, optimizer.init(params), spoil(make_batch(0, (2, 3), 4, [False])))
    np.testing.assert_allclose(after[0]["w"], 0.95, atol=1e-6)
    assert np.all(after[0]["b"] == 1) and metrics["loss"] == 0 and metrics["accuracy"] == 0


# ---------------------------------------------------------------- minijax_train: the loops


def counting_step(params, opt_state, batch):
    """A train step whose loss is the number of the step."""
    return params + 1, opt_state, {"loss": params + 1.0}


@pytest.mark.parametrize("steps, every, ends", [(100, 25, [25, 50, 75, 100]), (7, 3, [3, 6, 7]), (2, 5, [2])])
def test_both_loops_report_each_interval_once_and_read_nothing_between(steps, every, ends, monkeypatch):
    """Losses 1..n land beside their own step labels, with one host read an interval, in both loops.

    Catches a read per step, numbers reported an interval late under the wrong label, a lost last interval.
    """
    reads = []
    get = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda tree: reads.append(1) or get(tree))
    seen = []
    last, _ = train.plain_loop(jax.jit(counting_step), jnp.zeros(()), (), np.zeros(steps), every,
                               lambda step, metrics: seen.append((step, metrics["loss"].tolist())))
    groups = [list(range(low + 1, high + 1)) for low, high in zip([0, *ends], ends)]
    assert seen == list(zip(ends, groups)) and len(reads) == len(ends) and last == steps
    reads.clear(), seen.clear()
    many = jax.jit(train.make_train_steps(counting_step), donate_argnums=(0, 1))
    saved = []
    for save in (None, lambda state: saved.append((state["step"], float(state["params"])))):
        reads.clear(), seen.clear()
        state = train.interval_loop(many, {"params": jnp.zeros(()), "opt_state": (), "step": 10}, (np.zeros(len(g)) for g in groups),
                                    lambda step, metrics, seconds: seen.append((step, metrics["loss"].tolist(), seconds > 0)), save)
        assert seen == [(10 + end, group, True) for end, group in zip(ends, groups)]
        assert len(reads) == len(ends) and state["step"] == 10 + steps and state["params"] == steps
    assert saved == [(10 + end, end) for end in ends]


def test_interval_loop_dispatches_the_next_interval_before_it_reads():
    """The order of events is call 1, call 2, report 1, call 3, report 2, report 3. Catches a gap between intervals."""
    events = []

    def steps(params, opt_state, batches):
        events.append("call")
        return params, opt_state, {"loss": np.zeros(2)}

    train.interval_loop(steps, {"params": 0, "opt_state": 0, "step": 0}, [np.zeros(2)] * 3, lambda *_: events.append("report"))
    assert events == ["call", "call", "report", "call", "report", "report"]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_stops_the_run_before_it_is_saved(bad):
    """The error names the very step; neither report nor save sees the interval, so good checkpoints stay."""
    losses, seen = [np.ones(4), np.array([1, 1, bad, 1])], []
    with pytest.raises(FloatingPointError, match=rf"{bad} at step 7"):
        train.interval_loop(lambda p, o, b: (p, o, {"loss": b}), {"params": 0, "opt_state": 0, "step": 0}, losses,
                            lambda step, *_: seen.append(step), lambda state: seen.append(-state["step"]))
    assert seen == [4, -4]


# ---------------------------------------------------------------- minijax_train: evaluation


@given(pairs=st.lists(st.tuples(st.integers(-1, 4), st.integers(-1, 4), st.booleans()), min_size=8, max_size=8),
       dtype=st.sampled_from([np.int32, np.int8]))
def test_confusion_matrix_equals_a_loop(pairs, dtype):
    """Rows true, columns predicted, repeats counted, masked and impossible pairs not. Catches transposing, `+= 1`."""
    labels, predictions, mask = (np.array(column) for column in zip(*pairs))
    expected = np.zeros((4, 4), int)
    for true, predicted, kept in pairs:
        if kept and 0 <= true < 4 and 0 <= predicted < 4:
            expected[true, predicted] += 1
    counted = train.confusion_matrix(labels.astype(dtype), predictions.astype(dtype), 4, mask)
    np.testing.assert_array_equal(counted, expected)
    assert counted.dtype == jnp.int32


def test_confusion_matrix_of_many_uint8_labels():
    """uint8 labels with many classes neither overflow nor saturate: 1828 of one pair are 1828."""
    labels = np.full(1828, 200, np.uint8)
    counted = np.asarray(train.confusion_matrix(labels, labels - 1, 201))
    assert counted[200, 199] == 1828 and counted.sum() == 1828


@pytest.mark.parametrize("size", [1, 3, 4, 10, 16])
def test_evaluation_does_not_depend_on_batch_size_or_order(size):
    """Loss, accuracy and confusion matrix of ten examples are those of float64, however they are cut and ordered.

    Catches means of batch means, dropped remainders, padding counted right or wrong.
    """
    sizes = (5, 4, 3)
    params, whole = train.init_mlp(jax.random.key(3), sizes), make_batch(3, sizes, 10)
    loss, _, logits = mlp_oracle(params, whole)
    confusion = np.zeros((3, 3), int)
    np.add.at(confusion, (whole["label"], logits.argmax(axis=1)), 1)
    order = np.random.default_rng(size).permutation(10)
    padded = {k: np.concatenate([v[order], np.zeros_like(v, shape=(-10 % size, *v.shape[1:]))]) for k, v in whole.items()}
    result = train.evaluate(params, ({k: v[low:low + size] for k, v in spoil(padded).items()} for low in range(0, 10, size)))
    np.testing.assert_array_equal(result["confusion"], confusion)
    assert result["accuracy"] == np.trace(confusion) / 10 and isinstance(result["accuracy"], float)
    np.testing.assert_allclose(result["loss"], loss, rtol=1e-6)
    assert isinstance(result["loss"], float) and np.issubdtype(result["confusion"].dtype, np.integer)


def test_constant_predictor_fills_one_column():
    """A model that always says 3 gives the class counts in column 3, and their share as its accuracy."""
    params = [{"w": jnp.zeros((2, 5)), "b": jnp.zeros(5).at[3].set(1.0)}]
    batch = {"image": np.zeros((6, 2), np.float32), "label": np.array([0, 3, 3, 4, 4, 4]), "mask": np.ones(6, bool)}
    result = train.evaluate(params, [batch])
    np.testing.assert_array_equal(result["confusion"][:, 3], [1, 0, 0, 2, 3])
    assert result["confusion"].sum() == 6 and result["accuracy"] == 2 / 6


# ---------------------------------------------------------------- minijax_train: checkpoints

LEAVES = st.sampled_from([
    lambda r: jnp.asarray(r.normal(size=(2, 3)), jnp.float32), lambda r: jnp.asarray(r.normal(size=3), jnp.bfloat16),
    lambda r: jnp.asarray(r.normal(size=2), jnp.float8_e4m3fn), lambda r: jnp.asarray(r.normal(), jnp.float16),
    lambda r: jnp.zeros((0, 4)), lambda r: jnp.asarray(r.integers(0, 9, 3), jnp.uint8), lambda r: jnp.array(True),
    lambda r: np.asarray(r.integers(0, 2**60)), lambda r: r.normal(size=(1, 2)), lambda r: jax.random.key(int(r.integers(99))),
    lambda r: jax.random.split(jax.random.key(int(r.integers(99)), impl="rbg"), 2), lambda r: np.float32(r.normal()),
    lambda r: r.normal(size=(3, 2)).T,
])
TREES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner)
                     | st.dictionaries(st.sampled_from(["a", "b/c", "leaves", "0"]), inner, max_size=3), max_leaves=6)


def grow(tree, rng):
    """The drawn tree of makers as a tree of arrays."""
    return jax.tree.map(lambda make: make(rng), tree, is_leaf=callable)


@given(makers=TREES, seed=seeds)
def test_checkpoint_round_trip(makers, seed, tmp_path_factory):
    """Any pytree comes back leaf for leaf: kind, dtype, shape and bits. Catches bfloat16 as void, keys as integers."""
    path = tmp_path_factory.mktemp("round") / "c.npz"
    tree, like = grow(makers, np.random.default_rng(seed)), grow(makers, np.random.default_rng(seed + 1))
    train.save_checkpoint(path, tree)
    loaded = train.load_checkpoint(path, like)
    assert jax.tree.structure(loaded) == jax.tree.structure(tree)
    for a, e in zip(jax.tree.leaves(loaded), jax.tree.leaves(tree)):
        assert isinstance(a, jax.Array) == isinstance(e, jax.Array) and a.dtype == e.dtype and a.shape == e.shape
        if isinstance(e, jax.Array) and jnp.issubdtype(e.dtype, jax.dtypes.prng_key):
            a, e = jax.random.key_data(a), jax.random.key_data(e)
        assert np.asarray(a).tobytes() == np.asarray(e).tobytes()
    assert [p.name for p in path.parent.iterdir()] == ["c.npz"]


@pytest.mark.parametrize("like, words", [
    ({"w": jnp.ones((2, 3)), "n": jnp.ones((), jnp.int32)}, r"\['k'\] is only in the checkpoint"),
    ({"w": jnp.ones((2, 3)), "n": jnp.ones((), jnp.int32), "k": jax.random.key(0), "x": jnp.ones(1)}, r"\['x'\] is missing"),
    ({"w": jnp.ones((3, 2)), "n": jnp.ones((), jnp.int32), "k": jax.random.key(0)}, r"\['w'\] is float32\[2, 3\] there, expected float32\[3, 2\]"),
    ({"w": jnp.ones((2, 3)), "n": jnp.ones(()), "k": jax.random.key(0)}, r"\['n'\] is int32\[\] there, expected float32\[\]"),
    ({"w": jnp.ones((2, 3), jnp.bfloat16), "n": jnp.ones((), jnp.int32), "k": jax.random.key(0)}, "expected bfloat16"),
    ({"w": jnp.ones((2, 3)), "n": jnp.ones((), jnp.int32), "k": jax.random.key(0, impl="rbg")}, "key<fry>.* expected key<rbg>"),
    ([jnp.ones((2, 3)), jnp.ones((), jnp.int32), jax.random.key(0)], "missing"),
])
def test_checkpoint_of_another_architecture_is_refused(like, words, tmp_path):
    """The error names the first leaf that differs, with what the file holds and what was expected."""
    train.save_checkpoint(tmp_path / "c.npz", {"w": jnp.ones((2, 3)), "n": jnp.ones((), jnp.int32), "k": jax.random.key(0)})
    with pytest.raises(ValueError, match=words):
        train.load_checkpoint(tmp_path / "c.npz", like)


def test_checkpoint_keeps_the_sharding_and_compiles_nothing_anew(tmp_path):
    """A state loaded `like` the running one goes into the same compiled step. Catches uncommitted leaves."""
    sharding = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(jax.devices()), ("batch",)), jax.sharding.PartitionSpec())
    tree, traces = jax.device_put({"w": jnp.ones(3)}, sharding), []
    step = jax.jit(lambda tree: traces.append(1) or jax.tree.map(lambda x: x + 1, tree), out_shardings=sharding)
    train.save_checkpoint(tmp_path / "c.npz", step(tree))
    loaded = train.load_checkpoint(tmp_path / "c.npz", tree)
    assert loaded["w"].sharding == sharding and step(loaded)["w"].tolist() == [3, 3, 3]
    assert len(traces) == 1 and step._cache_size() == 1


@given(cut=st.integers(0, 10**6), flip=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_damaged_checkpoint_is_a_value_error(cut, flip, bit, tmp_path_factory):
    """A truncation anywhere is refused, a flipped bit is refused or harmless. Catches garbage read as parameters."""
    path = tmp_path_factory.mktemp("damage") / "c.npz"
    tree = {"w": np.arange(6.0), "n": np.array(3)}
    train.save_checkpoint(path, tree)
    whole = path.read_bytes()
    path.write_bytes(whole[:cut % len(whole)])
    with pytest.raises(ValueError, match="c.npz is damaged"):
        train.load_checkpoint(path, tree)
    flipped = bytearray(whole)
    flipped[flip % len(whole)] ^= 1 << bit
    path.write_bytes(flipped)
    try:
        assert_trees_close(train.load_checkpoint(path, tree), tree)
    except ValueError:
        pass


def test_checkpoints_that_cannot_be_written_or_read(tmp_path, monkeypatch):
    """Objects are refused (no pickle), a missing file is an OSError, a failed save keeps the old file and no other."""
    path = tmp_path / "c.npz"
    with pytest.raises(FileNotFoundError):
        train.load_checkpoint(path, {})
    train.save_checkpoint(path, [np.ones(2)])
    with pytest.raises(ValueError, match="must be arrays or numbers, got object"):
        train.save_checkpoint(path, [object()])
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        train.save_checkpoint(path, [np.zeros(2)])
    assert train.load_checkpoint(path, [np.zeros(2)])[0].tolist() == [1, 1]
    assert [p.name for p in tmp_path.iterdir()] == ["c.npz"]


def test_latest_checkpoint_is_the_newest_good_one_by_number(tmp_path, capsys):
    """step_10 beats step_9; a truncated or bit-flipped file is named and passed over, a temporary one never taken."""
    assert train.latest_checkpoint(tmp_path / "absent") is None
    for step in (9, 10, 11, 12):
        train.save_checkpoint(tmp_path / f"step_{step}.npz", {"w": np.full(64, step)})
    (tmp_path / "step_12.npz").write_bytes((tmp_path / "step_12.npz").read_bytes()[:100])
    flipped = bytearray((tmp_path / "step_11.npz").read_bytes())
    flipped[len(flipped) // 3] ^= 1
    (tmp_path / "step_11.npz").write_bytes(flipped)
    for name in ("step_99.npz.tmp", "step_98.npz.bak", "step_x.npz", "astep_97.npz"):
        (tmp_path / name).write_bytes(b"no")
    assert train.latest_checkpoint(tmp_path) == tmp_path / "step_10.npz"
    assert [f"step_{n}.npz is damaged" in capsys_err for capsys_err in [capsys.readouterr().err] for n in (12, 11)] == [True, True]


# ---------------------------------------------------------------- minijax_train: the main job

TINY = ["--dataset", "synthetic", "--hidden", "8", "--epochs", "2", "--log-every", "5", "--batch-size", "1000"]


def final_state(folder):
    """The arrays of the newest checkpoint, as bytes."""
    with np.load(train.latest_checkpoint(folder)) as archive:
        return {name: archive[name].tobytes() for name in archive.files}


def test_main_trains_evaluates_and_prints(capsys):
    """main learns the made-up data, and prints devices, versions and origin first, then a line an interval.

    The confusion matrix holds every test example once, and its trace is the accuracy that is printed.
    """
    result = train.main(TINY[:-4] + ["--hidden", "64", "--epochs", "5", "--batch-size", "100", "--learning-rate", "3e-3"])
    out = capsys.readouterr().out
    first, *lines = out.splitlines()
    assert jax.devices()[0].device_kind in first and jax.__version__ in first and "synthetic" in first
    assert result["confusion"].sum() == 2000 and result["accuracy"] == np.trace(result["confusion"]) / 2000
    assert result["accuracy"] > 0.8 and lines[-1] == f"test accuracy {result['accuracy']:.4f}"
    assert sum("examples/s" in line for line in lines) == 5 * 3 and sum("test loss" in line for line in lines) == 5
    assert any("step     39" in line and "epoch   1" in line for line in lines)
    assert all(name[:7] in out for name in data.CLASS_NAMES) and "rows: true class" in out


@pytest.mark.parametrize("every, compilations", [(5, 2), (3, 3)])
def test_a_whole_run_compiles_the_step_and_the_evaluation_once(every, compilations, monkeypatch):
    """Traces of the model over two epochs: one for training, one for evaluation, one more for a shorter last interval."""
    traces, mlp = [], train.mlp
    monkeypatch.setattr(train, "mlp", lambda params, x: traces.append(x.shape) or mlp(params, x))
    train.evaluate_batch.clear_cache()
    train.main([*TINY, "--log-every", str(every), "--hidden", "9", "7"])
    assert len(traces) == compilations


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_resumed_run_equals_the_unbroken_one(stop, tmp_path, monkeypatch, capsys):
    """Stopped after any interval, in the middle or at the end of an epoch, a resumed run ends in the same bits.

    Catches lost moments, counts or steps, and an epoch whose order starts over. Only three checkpoints are kept.
    """
    flags = [*TINY, "--seed", "3", "--checkpoint-dir"]
    whole = train.main([*flags, str(tmp_path / "whole")])
    assert len(list((tmp_path / "whole").iterdir())) == 3
    save, saves = train.save_checkpoint, []

    def save_then_interrupt(path, tree):
        save(path, tree)
        saves.append(path)
        if len(saves) == stop:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(train, "save_checkpoint", save_then_interrupt)
    with pytest.raises(SystemExit) as exit_:
        train.main([*flags, str(tmp_path / "broken")])
    assert exit_.value.code == 130 and "--resume" in capsys.readouterr().err
    assert len(saves) == stop + 1  # the interval in which Ctrl-C came was finished and saved
    again = train.main([*flags, str(tmp_path / "broken"), "--resume"])
    assert f"going on from step {5 * (stop + 1)}" in capsys.readouterr().out
    assert final_state(tmp_path / "broken") == final_state(tmp_path / "whole")
    assert again["accuracy"] == whole["accuracy"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_killed_run_resumes_to_the_same_bits(tmp_path):
    """kill -9 at a random moment, a damaged newest checkpoint: the resumed run still ends as the unbroken one."""
    flags = ["minijax_train.py", *TINY, "--epochs", "6", "--log-every", "2", "--checkpoint-dir"]
    train.main([*flags[1:], str(tmp_path / "whole")])
    process = start(*flags, str(tmp_path / "broken"))
    while not list(tmp_path.glob("broken/step_*.npz")) and process.poll() is None:
        time.sleep(0.01)
    time.sleep(np.random.default_rng().uniform(0, 0.2))
    process.kill()
    finish(process)
    newest = train.list_checkpoints(tmp_path / "broken")[-1]
    newest.write_bytes(newest.read_bytes()[:-9])
    code, out, err = finish(start(*flags, str(tmp_path / "broken"), "--resume"))
    assert code == 0 and err.splitlines() == [line for line in err.splitlines() if f"{newest.name} is damaged" in line]
    assert final_state(tmp_path / "broken") == final_state(tmp_path / "whole")


@pytest.mark.parametrize("flags, words", [
    (["--batch-size", "0"], "argument --batch-size: invalid int of at least 1 value: '0'"),
    (["--learning-rate", "nan"], "argument --learning-rate"), (["--learning-rate", "inf"], "argument --learning-rate"),
    (["--hidden"], "argument --hidden"), (["--epochs", "x"], "argument --epochs"), (["--dataset", "mnist"], "argument --dataset"),
    (["--resume"], "--resume needs --checkpoint-dir"), (["--frob"], "unrecognized arguments: --frob"),
    (["--data-dir", "/nowhere"], "'/nowhere'"), ([*TINY, "--batch-size", "20000"], "20000 is more than the 10000 training images"),
    ([*TINY, "--checkpoint-dir", "/dev/null/x"], "/dev/null"), ([*TINY, "--learning-rate", "1e38"], "at step"),
])
def test_a_users_mistake_is_one_line(flags, words, capsys):
    """Every wrong flag ends the program with a non-zero status and one line that names what was given."""
    with pytest.raises(SystemExit) as exit_:
        train.main(flags)
    message = capsys.readouterr().err or str(exit_.value.code)
    assert exit_.value.code not in (0, None) and words in message and len(message.strip().splitlines()) == 1
    assert message.startswith("minijax_train.py: ")


def test_checkpoint_folders_are_not_mixed_up(tmp_path, capsys):
    """A new run does not write into an old run's folder, and other settings are not resumed silently."""
    flags = [*TINY, "--checkpoint-dir", str(tmp_path)]
    train.main([*flags, "--resume"])
    assert "nothing to resume: starting afresh" in capsys.readouterr().out
    for extra, words in ([[], "exists: add --resume"], [["--resume", "--seed", "1"], "seed 0, expected 1"],
                         [["--resume", "--epochs", "3"], "epochs 2, expected 3"], [["--resume", "--hidden", "9"], "does not fit"]):
        with pytest.raises(SystemExit, match=words):
            train.main([*flags, *extra])
    before = final_state(tmp_path)
    train.main([*flags, "--resume"])  # nothing left to do: evaluates only
    assert final_state(tmp_path) == before and "going on from step 20" in capsys.readouterr().out


def test_plot_needs_matplotlib_and_says_so(monkeypatch):
    """Without matplotlib, --plot fails before any work with the way to get it."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="pip install matplotlib"):
        train.main([*TINY, "--plot", "x.png"])


def test_parameters_that_are_not_finite_are_not_saved(tmp_path):
    """A finite loss can leave infinite parameters behind: they never reach a checkpoint."""
    state = {"params": {"w": np.array([1.0, np.inf])}, "opt_state": (), "step": 4}
    handler = signal.getsignal(signal.SIGINT)
    _, save = train.checkpointing(tmp_path, {}, state, False)
    signal.signal(signal.SIGINT, handler)
    with pytest.raises(FloatingPointError, match="after step 4"):
        save(state)
    assert not list(tmp_path.iterdir())


def test_habits_table_adds_up(capsys):
    """On tiny data every row is there, gains are quotients of the speeds beside them, and the rows' product is the sum row."""
    result = train.main([*TINY, "--habits", "--batch-size", "200", "--log-every", "2"])
    out, seconds, facts = capsys.readouterr().out, result["seconds"], result["facts"]
    gains = [seconds[without] / seconds[with_it] for _, without, with_it, _ in train.HABITS]
    np.testing.assert_allclose(np.prod(gains[:4]), gains[4])
    np.testing.assert_allclose(np.prod(gains[1:4]), gains[5])
    for (name, *_), gain in zip(train.HABITS, gains):
        row = next(line for line in out.splitlines() if line.startswith(name))
        without, with_it, shown = (float(word.replace(",", "")) for word in row[34:].split()[:3])
        np.testing.assert_allclose([with_it / without, shown], gain, rtol=0.02)
    assert facts["float bytes"] == 200 * 784 * 4 and facts["uint8 bytes"] == 200 * 784
    assert facts["fixed compilations"] == 1 and facts["ragged compilations"] == 2
    assert facts["donated bytes"] < facts["kept bytes"] and facts["dispatch seconds"] <= facts["true seconds"]


# ---------------------------------------------------------------- many devices

SHARDED = """
import jax, numpy as np, optax, sys
import minijax_train as train
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
assert jax.device_count() == 8
mesh = Mesh(np.array(jax.devices()), ("batch",))
optimizer = train.make_optimizer(1e-2, 0.1)
step = train.make_train_step(train.loss_fn, optimizer)
for rows in (8, 24, 64):
    rng = np.random.default_rng(rows)
    batch = {"image": rng.normal(size=(rows, 5)).astype("f"), "label": rng.integers(0, 3, rows), "mask": rng.random(rows) < 0.8}
    params = train.init_mlp(jax.random.key(0), (5, 4, 3))
    state = params, optimizer.init(params)
    whole = jax.jit(step)(*state, batch)
    sharded = jax.jit(step)(*jax.device_put(state, NamedSharding(mesh, P())), jax.device_put(batch, NamedSharding(mesh, P("batch"))))
    for a, e in zip(jax.tree.leaves(sharded), jax.tree.leaves(whole)):
        assert a.sharding.is_fully_replicated
        np.testing.assert_allclose(a, e, atol=1e-5)
try:
    train.main("--dataset synthetic --batch-size 19".split())
except SystemExit as error:
    assert "19" in str(error) and "8" in str(error)
result = train.main(sys.argv[1:])
print(result["loss"], result["accuracy"], result["confusion"].sum())
"""


def test_sharded_run_equals_the_unsharded_one():
    """On 8 forced host devices the same step gives the same update, and the whole run the same result.

    Catches a mean of shard means under a mask, padding counted on some shard, a batch that does not divide.
    """
    flags = [*TINY, "--batch-size", "104"]
    code, out, err = finish(start("-c", SHARDED, *flags, XLA_FLAGS="--xla_force_host_platform_device_count=8", JAX_PLATFORMS="cpu"))
    assert code == 0, err
    loss, accuracy, count = map(float, out.splitlines()[-1].split())
    alone = train.main(flags)
    assert count == 2000 and abs(accuracy - alone["accuracy"]) < 0.005 and abs(loss - alone["loss"]) < 1e-3


def test_two_processes_equal_one(tmp_path):
    """Two real processes on the loopback interface end in one process's parameters; only process 0 prints and saves.

    A third pair resumes from the checkpoint that the first wrote. Catches shares that overlap, double printing.
    """
    flags = [*TINY, "--checkpoint-dir"]
    train.main([*flags, str(tmp_path / "one")])

    def pair(*more):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        both = [start("minijax_train.py", *flags, str(tmp_path / "two"), "--distributed", *more, JAX_PLATFORMS="cpu",
                      JAX_COORDINATOR_ADDRESS=address, JAX_NUM_PROCESSES="2", JAX_PROCESS_ID=str(k)) for k in range(2)]
        return [finish(process) for process in both]

    (code, out, err), (code_1, out_1, err_1) = pair()
    assert code == code_1 == 0, err + err_1
    assert "2 x cpu" in out and "test accuracy" in out
    assert all(line.startswith("[Gloo]") for line in out_1.splitlines())  # the transport's own line, from C++
    a, e = (np.load(train.latest_checkpoint(tmp_path / name)) for name in ("two", "one"))
    for name in set(e.files) - {"leaves"}:
        np.testing.assert_allclose(a[name], e[name], atol=1e-5)
    train.list_checkpoints(tmp_path / "two")[-1].unlink()  # as if killed before the last save
    (code, out, err), (code_1, _, err_1) = pair("--resume")
    assert code == code_1 == 0, err + err_1
    assert "going on from step 15" in out
    b = np.load(train.latest_checkpoint(tmp_path / "two"))
    assert all(np.array_equal(a[name], b[name]) for name in a.files)


# ---------------------------------------------------------------- the files themselves


@pytest.mark.parametrize("files", [["attention.py"], ["data.py"], ["minijax_train.py"], ["decoder.py", "attention.py"]])
def test_files_work_alone_and_importing_touches_no_device(files, tmp_path):
    """Each file imports from a folder that holds nothing else (decoder.py needs attention.py), and starts no backend."""
    for name in files:
        shutil.copy(os.path.join(HERE, name), tmp_path)
    code = (f"import {files[0][:-3]}; from jax._src import xla_bridge; assert not xla_bridge._backends; "
            "import sys; assert not {'attention', 'data', 'decoder', 'minijax_train'} & set(sys.modules) - set(sys.argv[1:])")
    done = subprocess.run([sys.executable, "-c", code, *(name[:-3] for name in files)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_the_real_data_trains():
    """One epoch on the real images passes 80 % on all 10,000 test images, each class counted 1,000 times."""
    try:
        data.load_fashion_mnist(download=False)
    except OSError:
        pytest.skip("Fashion-MNIST is not installed: apt install dataset-fashion-mnist, or run `python data.py` once")
    result = train.main(["--epochs", "1", "--hidden", "128"])
    assert 0.8 < result["accuracy"] < 0.95
    assert result["confusion"].sum(axis=1).tolist() == [1000] * 10
