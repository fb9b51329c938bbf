# SPDX-License-Identifier: MIT
"""Training in JAX from first principles: an MLP on Fashion-MNIST, with nothing but pytrees and jax.jit.

    python minijax_train.py              train, evaluate, print the confusion matrix
    python minijax_train.py --habits     measure what each habit of the loop buys on this machine
    python minijax_train.py --help       everything else

Read it from the top: the model, the loss, the optimizer, the train step (a pure function), the loop in its
plain and in its fast form, evaluation, checkpoints, and `main`, which puts them together. Everything above
`main` stands alone: it works on any model whose parameters are a pytree and takes its batches as arguments.
"""
import argparse
import functools
import itertools
import json
import os
import re
import signal
import sys
import time
import zipfile
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

# ---------------------------------------------------------------- model and loss


def init_mlp(key, layer_sizes):
    """Parameters of a multilayer perceptron: a list with {"w": float32 [I, O], "b": float32 [O]} per layer.

    key: a `jax.random.key`. layer_sizes: at least two widths, input first. Weights are drawn with variance
    2 / I, which keeps the size of activations through ReLU layers (He et al. 2015, arXiv:1502.01852, eq. 10).
    """
    if len(layer_sizes) < 2 or min(layer_sizes) < 1:
        raise ValueError(f"layer_sizes must be two or more positive widths, got {layer_sizes}")
    keys = jax.random.split(key, len(layer_sizes) - 1)  # one each: the same key would draw the same numbers
    he_normal = jax.nn.initializers.he_normal()
    return [{"w": he_normal(k, (i, o)), "b": jnp.zeros(o)} for k, i, o in zip(keys, layer_sizes, layer_sizes[1:])]


def mlp(params, x):
    """Logits [B, C] of float images x [B, I]: linear layers with ReLU between them."""
    width = params[0]["w"].shape[0]
    if x.ndim != 2 or x.shape[1] != width or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"mlp expects float images [B, {width}], got {x.dtype} {list(x.shape)}")
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])  # [B, O]
    return x @ params[-1]["w"] + params[-1]["b"]  # [B, C]


def masked_losses(params, batch, label_smoothing=0.0):
    """(cross-entropy float32 [B], 0 on padding rows; logits float32 [B, C]) of a batch as `loss_fn` describes it."""
    mask, labels = batch["mask"], batch["label"]
    # Zeros replace what padding rows hold before the model runs. Masking the losses alone is not enough: a NaN
    # in a padding row would come back as 0 * NaN in the gradient.
    logits = mlp(params, jnp.where(mask[:, None], batch["image"], 0)).astype(jnp.float32)  # [B, C]
    classes = logits.shape[1]
    targets = optax.smooth_labels(jax.nn.one_hot(labels, classes), label_smoothing)  # [B, C]
    losses = optax.softmax_cross_entropy(logits, targets)  # [B]
    # Compiled code cannot raise on a label that is no class, so let NaN tell.
    losses = jnp.where((labels >= 0) & (labels < classes), losses, jnp.nan)
    return jnp.where(mask, losses, 0), logits


def loss_fn(params, batch, label_smoothing=0.0):
    """Mean cross-entropy in nats over the real examples of a batch, and metrics {"loss", "accuracy"}.

    batch: {"image": float [B, I], "label": integer [B], "mask": bool [B]}; rows where `mask` is False count
    for nothing, and where all are, loss and gradients are 0. A label outside 0..C-1 makes the loss NaN.
    label_smoothing spreads that share of the target evenly over all C classes (Szegedy et al. 2016,
    arXiv:1512.00567, section 7).
    """
    losses, logits = masked_losses(params, batch, label_smoothing)
    count = jnp.maximum(batch["mask"].sum(), 1)
    loss = losses.sum() / count
    correct = batch["mask"] & (logits.argmax(axis=1) == batch["label"])  # [B]
    return loss, {"loss": loss, "accuracy": correct.sum() / count}


# ---------------------------------------------------------------- optimizer and train step


def make_optimizer(learning_rate, weight_decay, b1=0.9, b2=0.999, eps=1e-8):
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) with decay on weight matrices only.

    learning_rate: a number or an optax schedule. A leaf named b, bias, scale or norm (or ..._norm and so on)
    is not decayed. Names decide, not ndim: the norm scales of stacked layers have two axes too.
    """
    def is_decayed(path, _):
        name = str(getattr(path[-1], "key", "")) if path else ""
        return name.split("_")[-1] not in ("b", "bias", "scale", "norm")

    return optax.adamw(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay,
                       mask=functools.partial(jax.tree.map_with_path, is_decayed))


def make_train_step(loss_fn, optimizer):
    """The train step, a pure function: (params, opt_state, batch) -> (params, opt_state, metrics).

    loss_fn: any (params, batch) -> (scalar, metrics). optimizer: any optax.GradientTransformation.
    Compile it with `jax.jit(train_step, donate_argnums=(0, 1))`: the new parameters and optimizer state then
    take the memory of the old, and the old ones must not be used again.
    """
    def train_step(params, opt_state, batch):
        (_, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)  # grads: the tree of params
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, metrics

    return train_step


def make_train_steps(train_step):
    """Many train steps in one call: (params, opt_state, batches [K, ...]) -> (params, opt_state, metrics [K]).

    Equal to K calls of `train_step`, a batch each. Compile and donate it in the same way. Inside one compiled
    call the state is updated in place and the host is not asked between the steps.
    """
    def train_steps(params, opt_state, batches):
        def body(state, batch):
            params, opt_state, metrics = train_step(*state, batch)
            return (params, opt_state), metrics

        (params, opt_state), metrics = jax.lax.scan(body, (params, opt_state), batches)
        return params, opt_state, metrics

    return train_steps


# ---------------------------------------------------------------- the loop, twice


def plain_loop(train_step, params, opt_state, batches, log_every, report):
    """The loop to read first: one compiled step a batch. Returns the last (params, opt_state).

    train_step: compiled, may donate its first two arguments. report(step, metrics) is given the step's number
    and host arrays [log_every], once per interval (the last may be shorter).
    """
    waiting = []
    for step, batch in enumerate(batches, start=1):
        # This returns before the step is done. Metrics stay on the device: float(metrics["loss"]) here would
        # make the host wait for every single step, and the device for the host.
        params, opt_state, metrics = train_step(params, opt_state, batch)
        waiting.append(metrics)
        if len(waiting) == log_every:
            jax.block_until_ready(waiting)  # the one intended wait
            report(step, jax.tree.map(lambda *leaves: np.stack(leaves), *jax.device_get(waiting)))
            waiting = []
    if waiting:
        report(step, jax.tree.map(lambda *leaves: np.stack(leaves), *jax.device_get(waiting)))
    return params, opt_state


def interval_loop(train_steps, state, intervals, report, save=None):
    """The same loop, faster: one compiled call an interval, and no gap between two. Returns the last state.

    train_steps: compiled, may donate its first two arguments. state: {"params", "opt_state", "step": int}.
    intervals: batches with a leading axis of steps. report(step, metrics, seconds) is given the number of the
    interval's last step, its metrics as host arrays [K], and the time since the interval before. save(state)
    is called after every interval, where it is given. FloatingPointError, before either, if metrics["loss"]
    is not finite at some step.
    """
    started, running = time.perf_counter(), None

    def read(step, metrics):
        nonlocal started
        metrics = jax.device_get(metrics)  # waits until the interval is done
        if (bad := ~np.isfinite(metrics["loss"])).any():
            raise FloatingPointError(f"the loss is {metrics['loss'][bad][0]} at step "
                                     f"{step - len(bad) + 1 + bad.argmax()}")
        finished = time.perf_counter()
        report(step, metrics, finished - started)
        started = finished

    for batches in intervals:
        params, opt_state, metrics = train_steps(state["params"], state["opt_state"], batches)
        step = state["step"] + len(metrics["loss"])
        state = {**state, "params": params, "opt_state": opt_state, "step": step}
        if running:  # read the last interval's numbers only now, when the device already has its next work
            read(*running)
        running = step, metrics
        if save:  # needs the state, so here the device must wait
            read(*running)
            running = None
            save(state)
    if running:
        read(*running)
    return state


# ---------------------------------------------------------------- evaluation


def confusion_matrix(labels, predictions, num_classes, mask=None):
    """Counts int32 [C, C]: row = true class, column = prediction. Pure, may be jitted.

    labels, predictions: integer [B]. mask: bool [B], where False a pair is not counted; nor is one in which
    either number lies outside 0..num_classes - 1.
    """
    labels, predictions = jnp.asarray(labels), jnp.asarray(predictions)
    mask = jnp.ones(labels.shape, bool) if mask is None else jnp.asarray(mask)
    if labels.ndim != 1 or not labels.shape == predictions.shape == mask.shape:
        raise ValueError(f"labels, predictions and mask must have one shape [B], got {list(labels.shape)}, "
                         f"{list(predictions.shape)} and {list(mask.shape)}")
    for name, array in ("labels", labels), ("predictions", predictions):
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f"{name} must be integers, got {array.dtype}")
    pairs = jnp.stack([labels.astype(jnp.int32), predictions.astype(jnp.int32)])  # [2, B]; uint8 would overflow
    pairs = jnp.where(mask & (pairs >= 0).all(axis=0), pairs, num_classes)  # -1 would count from the end
    return jnp.zeros((num_classes, num_classes), jnp.int32).at[tuple(pairs)].add(1, mode="drop")  # [C, C]


@jax.jit
def evaluate_batch(params, batch):
    """(sum of losses, confusion matrix) of one batch: sums, because they add up exactly over ragged batches."""
    losses, logits = masked_losses(params, batch)
    confusion = confusion_matrix(batch["label"], logits.argmax(axis=1), logits.shape[1], batch["mask"])
    return losses.sum(), confusion


def evaluate(params, batches):
    """{"loss": float, "accuracy": float, "confusion": int64 [C, C]} over all real examples of `batches`.

    The batches are those of `loss_fn`. The result does not depend on how the examples are cut into batches.
    ValueError if there is no real example at all.
    """
    loss, confusion, running = 0.0, 0, None
    for batch in itertools.chain(batches, [None]):
        following = evaluate_batch(params, batch) if batch is not None else None
        if running is not None:  # one batch behind, like the training loop; added up in float64 and int64
            batch_loss, batch_confusion = jax.device_get(running)
            loss, confusion = loss + float(batch_loss), confusion + batch_confusion.astype(np.int64)
        running = following
    if not np.sum(confusion):
        raise ValueError("nothing to evaluate: the batches hold no real example")
    count = confusion.sum()
    return {"loss": float(loss / count), "accuracy": float(confusion.trace() / count), "confusion": confusion}


# ---------------------------------------------------------------- checkpoints

# What numpy, json, zipfile and zlib raise on a damaged archive.
DAMAGE = (ValueError, KeyError, TypeError, AttributeError, EOFError, NotImplementedError, RuntimeError,
          zipfile.BadZipFile, zlib.error)


def save_checkpoint(path, tree):
    """Writes a pytree of arrays to `path`, a NumPy archive (.npz, no pickle). Atomic: a kill leaves the old file.

    Leaves may be JAX or NumPy arrays, scalars, PRNG keys, of any dtype JAX knows. The archive holds the leaves
    as "0", "1", ... and "leaves": per leaf its path in the tree and its dtype, since npz itself keeps neither
    bfloat16, float8 nor keys. The parent folder must exist.
    """
    arrays, leaves = {}, []
    for number, (leaf_path, leaf) in enumerate(jax.tree.leaves_with_path(tree)):
        name, array = leaf_to_array(leaf)
        arrays[str(number)] = array if array.dtype.isbuiltin == 1 else array.view(f"u{array.itemsize}")
        leaves.append([jax.tree_util.keystr(leaf_path), name])
    temporary = Path(f"{path}.tmp")
    try:
        with open(temporary, "wb") as file:
            np.savez(file, leaves=np.array(json.dumps(leaves)), **arrays)
            file.flush()
            os.fsync(file.fileno())  # the bytes must be on the disk before the name is
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def leaf_to_array(leaf):
    """(dtype name, NumPy array) of a checkpoint leaf; for a PRNG key the name of its kind and its data."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return str(leaf.dtype), np.asarray(jax.random.key_data(leaf))
    array = np.asarray(leaf)
    if array.dtype.hasobject:
        raise ValueError(f"checkpoint leaves must be arrays or numbers, got {type(leaf).__name__}")
    return array.dtype.name, array


def load_checkpoint(path, like):
    """The pytree in `path`, with the structure, dtypes and shardings of `like`, a tree of concrete arrays.

    JAX leaves of `like` come back as JAX arrays with its sharding (so the next step compiles nothing anew),
    others as NumPy arrays. ValueError if the file is damaged, or if its leaves and those of `like` differ in
    path, shape or dtype (it names the first difference); OSError if it cannot be read.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            leaves = json.loads(archive["leaves"].item())
            arrays = [archive[str(number)] for number in range(len(leaves))]
    except DAMAGE as error:
        raise ValueError(f"{path} is damaged or no checkpoint: {error}") from error
    saved = {leaf_path: (dtype, array) for (leaf_path, dtype), array in zip(leaves, arrays)}
    wanted = {jax.tree_util.keystr(leaf_path): leaf for leaf_path, leaf in jax.tree.leaves_with_path(like)}
    result = []
    for leaf_path in {**wanted, **saved}:
        if leaf_path not in saved or leaf_path not in wanted:
            where = "only in the checkpoint" if leaf_path in saved else "missing from the checkpoint"
            raise ValueError(f"{path} does not fit: {leaf_path} is {where}")
        (dtype, array), leaf = saved[leaf_path], wanted[leaf_path]
        like_dtype, like_array = leaf_to_array(leaf)
        if (dtype, array.shape) != (like_dtype, like_array.shape):
            raise ValueError(f"{path} does not fit: {leaf_path} is {dtype}{list(array.shape)} there, "
                             f"expected {like_dtype}{list(like_array.shape)}")
        array = array.view(like_array.dtype)
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            array = jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf))
        result.append(jax.device_put(array, leaf.sharding) if isinstance(leaf, jax.Array) else array)
    return jax.tree.unflatten(jax.tree.structure(like), result)


def list_checkpoints(directory):
    """The files step_N.npz of a folder, by N: step_10 comes after step_9. Empty if there is no such folder."""
    found = [(int(m[1]), path) for path in Path(directory).glob("step_*.npz")
             if (m := re.fullmatch(r"step_(\d+)\.npz", path.name))]
    return [path for _, path in sorted(found)]


def latest_checkpoint(directory):
    """The newest undamaged checkpoint (by number) of a folder, or None; damaged ones are named on stderr."""
    for path in reversed(list_checkpoints(directory)):
        try:
            with zipfile.ZipFile(path) as archive:
                if (damaged := archive.testzip()) is None:  # reads everything, compares every checksum
                    return path
        except (OSError, *DAMAGE) as error:
            damaged = error
        print(f"{path} is damaged ({damaged}): looking for an older checkpoint", file=sys.stderr)
    return None


def checkpointing(directory, settings, state, resume):
    """(state to start from, save function for `interval_loop`); keeps the newest three checkpoints.

    settings: a dict of the numbers that a resumed run must share with the one that it continues. Every process
    reads, only process 0 writes. From here on the first Ctrl-C waits for the end of the interval: `save` then
    raises KeyboardInterrupt after it has saved. ValueError if `directory` holds checkpoints and `resume` is
    False, or if the newest was made with other settings or shapes.
    """
    directory, found = Path(directory), latest_checkpoint(directory)
    directory.mkdir(parents=True, exist_ok=True)
    settings = {name: np.asarray(value) for name, value in settings.items()}
    if found and not resume:
        raise ValueError(f"{found} exists: add --resume to go on from it, or give another folder")
    if found:
        loaded = load_checkpoint(found, {**state, "step": np.asarray(0), "settings": settings})
        for name, value in loaded.pop("settings").items():
            if value != settings[name]:
                raise ValueError(f"{found} was made with {name} {value}, expected {settings[name]}")
        state = {**loaded, "step": int(loaded["step"])}
    interrupted = []

    def on_interrupt(*_):
        interrupted.append(True)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C stops at once

    signal.signal(signal.SIGINT, on_interrupt)

    def save(state):
        stop = bool(interrupted)
        if jax.process_count() > 1:  # stop together, or the others would wait for this one for ever
            stop = multihost_utils.process_allgather(np.array(stop)).any()
        host = jax.device_get({name: state[name] for name in ("params", "opt_state")})
        if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(host["params"])):
            raise FloatingPointError(f"parameters are not finite after step {state['step']}")
        path = directory / f"step_{state['step']}.npz"
        if jax.process_index() == 0:
            save_checkpoint(path, {**host, "step": np.asarray(state["step"]), "settings": settings})
            paths = list_checkpoints(directory)
            for old in paths[:max(0, paths.index(path) - 2)]:
                old.unlink()
        if stop:
            raise KeyboardInterrupt(path)

    return state, save


# ---------------------------------------------------------------- what the habits buy


def matrix_products(params, batch_size, steps):
    """Nothing but the matrix products of `steps` train steps of an MLP: the floor under the step's time."""
    layers = [(jnp.ones((batch_size, layer["w"].shape[0])), layer["w"], jnp.ones((batch_size, layer["w"].shape[1])))
              for layer in params]

    def body(total, _):
        # The barriers keep the compiler from moving a product out of the loop or dropping it.
        operands, total = jax.lax.optimization_barrier((layers, total))
        products = [x @ w for x, w, _ in operands]  # forward
        products += [x.T @ d for x, _, d in operands]  # gradients of the weights
        products += [d @ w.T for _, w, d in operands[1:]]  # gradients of the activations
        products = jax.lax.optimization_barrier(products)
        return total + sum(product[0, 0] for product in products), None

    return jax.lax.scan(body, 0.0, length=steps)[0]


def measure_habits(train, preprocess, batches, stack, to_device, *, batch_size, log_every, hidden, rounds=7):
    """Measures what each habit of the loop buys on this machine.

    train: {"image": uint8 [n, 28, 28], "label"}; preprocess, batches, stack, to_device: those of data.py. Returns
    (seconds, facts): seconds per step (medians of `rounds` passes after a warm-up, taken in turn) by loop, and
    a dict of everything else that the table of `habits_table` tells.

    The loops form a ladder, each with one habit more than the one before. A pass is up to six intervals of
    real batches, the host's work included.
    """
    available = len(train["label"]) // batch_size
    log_every = min(log_every, available)
    steps = log_every * min(6, available // log_every)
    floats = {**train, "image": preprocess(train["image"])}  # [n, 784], normalised once, before any clock runs
    optimizer = make_optimizer(1e-3, 0.1, b2=0.95)
    traced = []

    def float_loss(params, batch):
        traced.append(batch["label"].shape)  # Python runs only while JAX traces: once per compilation
        return loss_fn(params, batch)

    def byte_loss(params, batch):
        return loss_fn(params, {**batch, "image": preprocess(batch["image"])})

    @jax.jit
    def init():
        params = init_mlp(jax.random.key(0), [784, *hidden, 10])
        return params, optimizer.init(params)

    float_step, byte_step = (make_train_step(loss, optimizer) for loss in (float_loss, byte_loss))

    def one_by_one(step, dataset, every):
        def run_pass(params, opt_state):
            source = itertools.islice(batches(dataset, batch_size, seed=0), steps)
            return plain_loop(step, params, opt_state, map(jax.device_put, source), every, lambda *_: None)
        return run_pass

    many = jax.jit(make_train_steps(byte_step), donate_argnums=(0, 1))

    def by_interval(params, opt_state):
        source = itertools.islice(batches(train, batch_size, seed=0), steps)
        state = {"params": params, "opt_state": opt_state, "step": 0}
        return interval_loop(many, state, to_device(stack(source, log_every)), lambda *_: None)["params"]

    staged = jax.device_put(next(stack(batches(train, batch_size), log_every)))

    def steps_alone(params, opt_state):
        for _ in range(steps // log_every):
            params, opt_state, _ = many(params, opt_state, staged)
        return params

    floats_step, kept, donated = jax.jit(float_step), jax.jit(byte_step), jax.jit(byte_step, donate_argnums=(0, 1))
    products = jax.jit(lambda params, _: matrix_products(params, batch_size, steps))
    passes = {"reads every step": one_by_one(floats_step, floats, 1),
              "reads every interval": one_by_one(floats_step, floats, log_every),
              "bytes to the device": one_by_one(kept, train, log_every),
              "donates": one_by_one(donated, train, log_every),
              "one call per interval": by_interval,
              "the same, batches already there": steps_alone,
              "matrix products alone": products}
    times = {name: [] for name in passes}
    for _ in range(rounds + 1):
        for name, run_pass in passes.items():
            state = jax.block_until_ready(init())
            start = time.perf_counter()
            jax.block_until_ready(run_pass(*state))
            times[name].append((time.perf_counter() - start) / steps)
    seconds = {name: float(np.median(values[1:])) for name, values in times.items()}

    first = next(batches(floats, batch_size))
    facts = {"float bytes": first["image"].nbytes, "uint8 bytes": first["image"].nbytes // 4}
    for name, compiled in ("kept", kept), ("donated", donated):
        memory = compiled.lower(*init(), {**first, "image": train["image"][:batch_size]}).compile().memory_analysis()
        facts[f"{name} bytes"] = (memory.argument_size_in_bytes + memory.output_size_in_bytes
                                  + memory.temp_size_in_bytes - memory.alias_size_in_bytes)
    # A ragged last batch: the same step, two shapes. Timed from the first call on, so with its compilations.
    ragged = {name: values[:batch_size // 2] for name, values in first.items()}
    for name, last in ("fixed", first), ("ragged", ragged):
        traced.clear()
        step, state = jax.jit(make_train_step(float_loss, optimizer)), init()  # a new function: compiled anew
        start = time.perf_counter()
        for batch in (first, last):
            *state, metrics = step(*state, batch)
        jax.block_until_ready((state, metrics))
        facts[f"{name} seconds"], facts[f"{name} compilations"] = time.perf_counter() - start, len(traced)
    # How long does a step take? Stopping the clock when the call returns tells when the work was queued.
    state = jax.block_until_ready(init())
    start = time.perf_counter()
    for _ in range(steps):
        *state, metrics = floats_step(*state, first)
    facts["dispatch seconds"] = (time.perf_counter() - start) / steps
    jax.block_until_ready((state, metrics))
    facts["true seconds"] = (time.perf_counter() - start) / steps
    return seconds, facts


HABITS = [  # (name, loop without it, loop with it, why)
    ("read metrics once an interval", "reads every step", "reads every interval",
     "a read waits for the device, and the device then waits for the host"),
    ("send uint8, normalise in the step", "reads every interval", "bytes to the device",
     "{float bytes:,} -> {uint8 bytes:,} bytes of images a step"),
    ("donate params and opt_state", "bytes to the device", "donates",
     "the step needs {kept bytes:,} -> {donated bytes:,} bytes: new values take the old ones' place"),
    ("one call an interval (lax.scan)", "donates", "one call per interval",
     "the host queues one call, and the next interval before it reads this one"),
    ("all four", "reads every step", "one call per interval", "the product of the gains above"),
    ("the last three", "reads every interval", "one call per interval", "train_steps against the tutorial's loop"),
]


def habits_table(seconds, facts, batch_size):
    """The figures of `measure_habits` as text: a row a habit, with the reason in the line."""
    lines = [f"{'habit':<34}{'without':>11}{'with':>11}{'gain':>7}   why (speeds in examples/s)"]
    for name, without, with_it, why in HABITS:
        a, b = seconds[without], seconds[with_it]
        lines.append(f"{name:<34}{batch_size / a:11,.0f}{batch_size / b:11,.0f}{a / b:7.3f}   {why.format(**facts)}")
    lines.append(f"{'fixed shapes':<34}{facts['ragged seconds']:10.2f}s{facts['fixed seconds']:10.2f}s"
                 f"{facts['ragged seconds'] / facts['fixed seconds']:7.3f}   two first steps: a ragged second batch "
                 f"makes {facts['ragged compilations']} compilations of {facts['fixed compilations']}")
    lines.append(f"{'block_until_ready before the clock':<34}{facts['dispatch seconds'] * 1e3:9.3f}ms"
                 f"{facts['true seconds'] * 1e3:9.3f}ms{facts['true seconds'] / facts['dispatch seconds']:7.3f}   "
                 "time of a step, measured without and with it: a call returns when its work is queued")
    floor = seconds["matrix products alone"]
    return "\n".join([*lines, f"A step of the last loop takes {seconds['one call per interval'] / floor:.3f} times its matrix "
                      f"products alone ({floor * 1e3:.3f} ms), and {seconds['the same, batches already there'] / floor:.3f} "
                      "times without the host's work."])


def plot_habits(plt, seconds, batch_size, path):
    """Draws the speed of each loop of the ladder to an image file."""
    names = list(seconds)[:5]  # the ladder
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    axes.barh(names, [batch_size / seconds[name] for name in names])
    axes.set_xlabel("examples/s; each loop has one habit more than the one above")
    axes.invert_yaxis()
    figure.savefig(path, dpi=150)


# ---------------------------------------------------------------- the main job


def number(kind, least):
    """An argparse type: a finite number of at least `least`."""
    def parse(text):
        value = kind(text)
        if not least <= value < float("inf"):
            raise ValueError
        return value

    parse.__name__ = f"{kind.__name__} of at least {least}"  # argparse puts it into its message
    return parse


def make_parser():
    """The command line of `main`."""
    parser = argparse.ArgumentParser(
        prog="minijax_train.py", description="Train a multilayer perceptron on Fashion-MNIST and evaluate it.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message}\n")  # one line, without the usage
    add = parser.add_argument
    add("--epochs", type=number(int, 1), default=14, help="passes over the training images")
    add("--batch-size", type=number(int, 1), default=512, help="images per step, over all devices")
    add("--learning-rate", type=number(float, 0), default=2e-3,
        help="peak of the schedule: linear warm-up over a tenth of the steps, then cosine decay to 0")
    add("--weight-decay", type=number(float, 0), default=0.1,
        help="AdamW's decay of weight matrices, times the learning rate")
    add("--hidden", type=number(int, 1), nargs="+", default=[512, 512], metavar="W",
        help="widths of the hidden layers")
    add("--seed", type=number(int, 0), default=0, help="of the initial parameters and the order of the images")
    add("--log-every", type=number(int, 1), default=39, metavar="STEPS",
        help="steps per interval: per line, compiled call and checkpoint")
    add("--data-dir", metavar="DIR", help="folder with the four files, which must exist; without it the user's "
        "cache folder, Debian's package, then a download")
    add("--dataset", choices=["fashion_mnist", "synthetic"], default="fashion_mnist",
        help="synthetic: made-up images, nothing to fetch")
    add("--checkpoint-dir", metavar="DIR", help="save the state here after every interval; the newest three are kept")
    add("--resume", action="store_true", help="go on from the newest checkpoint in --checkpoint-dir")
    add("--plot", metavar="FILE.png", help="draw the confusion matrix, or the table of --habits (needs matplotlib)")
    add("--habits", action="store_true", help="measure what each habit of the loop buys here, instead of training")
    add("--distributed", action="store_true", help="be one of several processes: see README.md")
    return parser


def main(argv=None):
    """Trains and evaluates as the flags say (see --help); returns {"accuracy", "loss", "confusion"} of the test set.

    A user's mistake ends in SystemExit with one line.
    """
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.resume and not args.checkpoint_dir:
        parser.error("--resume needs --checkpoint-dir")
    handler = signal.getsignal(signal.SIGINT)
    try:
        return run(args)
    except (ValueError, OSError, FloatingPointError) as error:
        sys.exit(f"{parser.prog}: {error}")
    except KeyboardInterrupt as interrupt:
        saved = f"saved {interrupt}; go on with the same command and --resume" if str(interrupt) else "nothing saved"
        print(f"\ninterrupted: {saved}", file=sys.stderr)
        sys.exit(130)
    finally:
        signal.signal(signal.SIGINT, handler)


def run(args):
    """What `main` does once the command line is read."""
    import data  # here and nowhere else, so that this file works alone

    # Without an NVIDIA GPU the CUDA plugin of jax[cuda12] would print a traceback before JAX takes the CPU.
    if not any(map(os.path.exists, ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg"))):
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    if args.distributed:
        given = [("coordinator_address", str), ("num_processes", int), ("process_id", int)]
        jax.distributed.initialize(**{name: kind(os.environ[f"JAX_{name.upper()}"]) for name, kind in given
                                      if f"JAX_{name.upper()}" in os.environ})
    say = print if jax.process_index() == 0 else lambda *_, **__: None
    plt = import_pyplot() if args.plot else None
    dataset = (data.load_fashion_mnist(args.data_dir) if args.dataset == "fashion_mnist"
               else data.synthetic(args.seed, 10_000, 2_000))
    devices = jax.devices()
    say(f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform}), jax {jax.__version__}, "
        f"{dataset['origin']}")
    if args.batch_size % len(devices):
        raise ValueError(f"--batch-size {args.batch_size} cannot be shared evenly by {len(devices)} devices")
    if args.batch_size > len(dataset["train"]["label"]):
        raise ValueError(f"--batch-size {args.batch_size} is more than the {len(dataset['train']['label'])} "
                         "training images")
    if args.habits:
        seconds, facts = measure_habits(
            dataset["train"], data.preprocess, data.batches, data.stack, data.to_device,
            batch_size=args.batch_size, log_every=args.log_every, hidden=args.hidden)
        say(f"layers {[784, *args.hidden, 10]}, batch {args.batch_size}, intervals of {args.log_every} steps")
        say(habits_table(seconds, facts, args.batch_size))
        if plt:
            plot_habits(plt, seconds, args.batch_size, args.plot)
        return {"seconds": seconds, "facts": facts}

    # Data parallelism: every device holds all parameters and a share of each batch. The compiler adds the
    # all-reduce of the gradients; the train step does not change.
    mesh = jax.sharding.Mesh(np.array(devices), ("batch",))
    replicated, by_row, by_step_and_row = (
        NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("batch",), (None, "batch")))
    share = args.batch_size // jax.process_count()  # this process's rows of each batch
    rows = slice(jax.process_index() * share, (jax.process_index() + 1) * share)

    def my_rows(batches):
        return ({name: values[rows] for name, values in batch.items()} for batch in batches)

    steps_per_epoch = len(dataset["train"]["label"]) // args.batch_size
    total = steps_per_epoch * args.epochs
    schedule = optax.warmup_cosine_decay_schedule(0.0, args.learning_rate, total // 10, total)
    optimizer = make_optimizer(schedule, args.weight_decay, b2=0.95)
    rates = np.asarray(jax.jit(jax.vmap(schedule))(np.arange(total)))

    def training_loss(params, batch):  # uint8 travels to the device, a quarter of the bytes
        return loss_fn(params, {**batch, "image": data.preprocess(batch["image"])}, label_smoothing=0.1)

    train_steps = jax.jit(make_train_steps(make_train_step(training_loss, optimizer)), donate_argnums=(0, 1))

    @functools.partial(jax.jit, out_shardings=replicated)
    def init():
        params = init_mlp(jax.random.key(args.seed), [784, *args.hidden, 10])
        return {"params": params, "opt_state": optimizer.init(params)}

    state, save = {**init(), "step": 0}, None
    if args.checkpoint_dir:
        settings = {name: getattr(args, name)
                    for name in ("seed", "epochs", "batch_size", "learning_rate", "weight_decay")}
        settings["examples"] = len(dataset["train"]["label"])
        state, save = checkpointing(args.checkpoint_dir, settings, state, args.resume)
        if args.resume:
            say(f"going on from step {state['step']}" if state["step"] else "nothing to resume: starting afresh")

    test = data.batches(dataset["test"], args.batch_size, remainder="pad")
    test = ({**batch, "image": data.preprocess(batch["image"])} for batch in my_rows(test))
    test = list(data.to_device(test, by_row))  # it stays on the device

    def report(step, metrics, seconds):
        say(f"epoch {(step - 1) // steps_per_epoch + 1:3}  step {step:6}  loss {metrics['loss'].mean():.4f}  "
            f"accuracy {metrics['accuracy'].mean():.4f}  learning rate {rates[step - 1]:.2e}  "
            f"{len(metrics['loss']) * args.batch_size / seconds:9,.0f} examples/s", flush=True)

    result = None
    for epoch in range(state["step"] // steps_per_epoch, args.epochs):
        batches = my_rows(data.batches(dataset["train"], args.batch_size, seed=args.seed, epoch=epoch))
        batches = itertools.islice(batches, state["step"] % steps_per_epoch, None)  # where a resumed run stands
        intervals = data.to_device(data.stack(batches, args.log_every), by_step_and_row)
        state = interval_loop(train_steps, state, intervals, report, save)
        result = evaluate(state["params"], test)
        say(f"epoch {epoch + 1:3}  test accuracy {result['accuracy']:.4f}  test loss {result['loss']:.4f}", flush=True)
    result = result or evaluate(state["params"], test)
    say(confusion_table(result["confusion"], data.CLASS_NAMES))
    say(f"test accuracy {result['accuracy']:.4f}")
    if plt and jax.process_index() == 0:
        plot_confusion(plt, result["confusion"], data.CLASS_NAMES, args.plot)
    return result


def confusion_table(confusion, names):
    """The matrix as text, rows = true classes, and the three most frequent confusions in words."""
    lines = ["\nrows: true class, columns: predicted", " " * 12 + "".join(f"{name[:7]:>8}" for name in names)]
    lines += [f"{name:<12}" + "".join(f"{count:8}" for count in row) for name, row in zip(names, confusion)]
    wrong = np.where(np.eye(len(names), dtype=bool), 0, confusion)
    for index in np.argsort(-wrong, axis=None, kind="stable")[:3]:
        true, predicted = np.unravel_index(index, wrong.shape)
        lines.append(f"{wrong[true, predicted]:4} x {names[true]} taken for {names[predicted]}")
    return "\n".join(lines)


def import_pyplot():
    """matplotlib's pyplot, drawing to files; ValueError that says how to get it where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    return pyplot


def plot_confusion(plt, confusion, names, path):
    """Draws a confusion matrix to an image file."""
    figure, axes = plt.subplots(figsize=(8, 7), layout="constrained")
    axes.imshow(confusion, cmap="Blues")
    axes.set(xticks=range(len(names)), yticks=range(len(names)), xlabel="predicted class", ylabel="true class")
    axes.set_xticklabels(names, rotation=45, ha="right")
    axes.set_yticklabels(names)
    for (true, predicted), count in np.ndenumerate(confusion):
        axes.text(predicted, true, count, ha="center", va="center",
                  color="white" if count > confusion.max() / 2 else "black")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
