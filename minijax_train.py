# SPDX-License-Identifier: MIT
"""Training in JAX from first principles: an MLP on Fashion-MNIST, with pytrees, jax.jit and optax.

    python minijax_train.py              train, evaluate, print the confusion matrix
    python minijax_train.py --habits     measure how much each of the loop's habits gains on this machine
    python minijax_train.py --help       everything else

Read it from the top: the model, the loss, the optimizer, the train step (a pure function), the loop in its
plain and in its fast form, evaluation, checkpoints, `run`, which puts them together, and as an appendix what
the habits of the loop buy. The step, the loops and the checkpoints work for any model whose parameters are a
pytree; the loss and the evaluation are this MLP's. Only `run` imports a sibling file, data.py.
"""
import argparse
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
#
# A batch is {"image": float [B, I], "label": integer [B], "mask": bool [B]}, mask False on padding rows. B counts
# its rows, I and O a layer's inputs and outputs, C the classes, K the steps of one call.


def init_mlp(key, layer_sizes):
    """Parameters of a multilayer perceptron: a list with {"w": float32 [I, O], "b": float32 [O]} per layer.

    key: a `jax.random.key`. layer_sizes: at least two widths, input first. Weights are drawn with variance
    2 / I, which keeps the size of activations through ReLU layers (He et al. 2015, arXiv:1502.01852, eq. 10).
    """
    if len(layer_sizes) < 2 or min(layer_sizes) < 1:
        raise ValueError(f"layer_sizes must be two or more positive widths, got {layer_sizes}")
    keys = jax.random.split(key, len(layer_sizes) - 1)  # one each: the same key would draw the same numbers
    he_normal = jax.nn.initializers.he_normal(dtype=jnp.float32)
    return [{"w": he_normal(k, (i, o)), "b": jnp.zeros(o, jnp.float32)}
            for k, i, o in zip(keys, layer_sizes, layer_sizes[1:])]


def mlp(params, x):
    """Logits [B, C] of float images x [B, I]: linear layers with ReLU between them."""
    width = params[0]["w"].shape[0]
    if x.ndim != 2 or x.shape[1] != width or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"mlp expects float images [B, {width}], got {x.dtype} {list(x.shape)}")
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])  # [B, O]
    return x @ params[-1]["w"] + params[-1]["b"]  # [B, C]


def masked_losses(params, batch, label_smoothing=0.0):
    """(cross-entropy float32 [B], 0 on padding rows; logits float32 [B, C]) of a batch; see `loss_fn`."""
    mask, labels, rows = batch["mask"], batch["label"], batch["image"].shape[:1]
    if not (labels.shape == mask.shape == rows and jnp.issubdtype(labels.dtype, jnp.integer) and mask.dtype == bool):
        raise ValueError(f"expected integer labels and a bool mask, both {list(rows)}, got {labels.dtype} "
                         f"{list(labels.shape)} and {mask.dtype} {list(mask.shape)}")
    labels = labels.astype(jnp.int32)  # one_hot counts in the labels' dtype, where uint8 would wrap at 256
    # Zeros replace what padding rows hold before the model runs. Masking the losses alone is not enough: a NaN
    # in a padding row would come back as 0 * NaN in the gradient.
    logits = mlp(params, jnp.where(mask[:, None], batch["image"], 0)).astype(jnp.float32)  # [B, C]
    classes = logits.shape[1]
    targets = optax.smooth_labels(jax.nn.one_hot(labels, classes, dtype=jnp.float32), label_smoothing)  # [B, C]
    losses = optax.softmax_cross_entropy(logits, targets)  # [B]
    # Compiled code cannot raise an exception, so a label that is no class makes the loss NaN.
    losses = jnp.where((labels >= 0) & (labels < classes), losses, jnp.nan)
    return jnp.where(mask, losses, 0), logits


def loss_fn(params, batch, label_smoothing=0.0):
    """Mean cross-entropy in nats over the real examples of a batch, and metrics {"loss", "accuracy"}.

    Rows where `mask` is False count for nothing, whatever they hold; without any other, loss and gradients are 0.
    A label outside 0..C-1 makes the loss NaN, and adds nothing to the gradients. ValueError for labels or a mask of
    another shape or dtype.
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

    learning_rate: a number or an optax schedule. A leaf whose name is, or ends in _ and, b, bias, scale or norm is
    not decayed; every other leaf is. Names decide, not ndim: the norm scales of stacked layers have two axes too.
    """
    def is_decayed(path, _):
        name = jax.tree_util.keystr(path[-1:], simple=True)
        return name.split("_")[-1] not in ("b", "bias", "scale", "norm")

    return optax.adamw(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay,
                       mask=lambda params: jax.tree.map_with_path(is_decayed, params))  # a tree like the parameters


def make_train_step(loss_fn, optimizer):
    """The train step, a pure function: (params, opt_state, batch) -> (params, opt_state, metrics).

    loss_fn: any function (params, batch) -> (scalar, metrics); the one above is an example. optimizer: any
    optax.GradientTransformation.

    Compile it with `jax.jit(train_step, donate_argnums=(0, 1))`: the new parameters and optimizer state then
    reuse the memory of the old ones, which must not be read again.
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


def stacked(metrics):
    """A list of K metrics trees on the device as one tree of host arrays [K]."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *jax.device_get(metrics))


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
            report(step, stacked(waiting))
            waiting = []
    if waiting:
        report(step, stacked(waiting))
    return params, opt_state


def interval_loop(train_steps, state, intervals, report, save=None):
    """The same loop, faster: one compiled call an interval, and no gap between two. Returns the last state.

    train_steps: compiled, may donate its first two arguments. state: {"params", "opt_state", "step": int}.
    intervals: batches with a leading axis of steps. report(step, metrics, seconds) is given the number of an
    interval's last step, its metrics as host arrays [K], and the time since the interval before. save(state),
    where given, is called after every interval; it must wait for the state, so the overlap is lost. The metrics must
    hold "loss" [K].
    FloatingPointError, before either is called, if metrics["loss"] is not finite at some step.
    """
    started, pending = time.perf_counter(), []

    def read_and_report(step, metrics):
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
        pending.append((step, metrics))
        if save or len(pending) > 1:  # an interval is read only when the device already has its next work
            read_and_report(*pending.pop(0))
        if save:
            save(state)
    for last in pending:
        read_and_report(*last)
    return state


# ---------------------------------------------------------------- evaluation


def confusion_matrix(labels, predictions, num_classes, mask=None):
    """Counts int32 [C, C]: row = true class, column = prediction. Pure, may be jitted.

    labels, predictions: integer [B]. mask: bool [B]. A pair is not counted where mask is False, or if one of its
    numbers lies outside 0..num_classes - 1.
    """
    labels, predictions = jnp.asarray(labels), jnp.asarray(predictions)
    mask = jnp.ones(labels.shape, bool) if mask is None else jnp.asarray(mask)
    if labels.ndim != 1 or not labels.shape == predictions.shape == mask.shape:
        raise ValueError(f"labels, predictions and mask must have one shape [B], got {list(labels.shape)}, "
                         f"{list(predictions.shape)} and {list(mask.shape)}")
    for name, array in ("labels", labels), ("predictions", predictions):
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f"{name} must be integers, got {array.dtype}")
    if mask.dtype != bool:
        raise ValueError(f"mask must be bool, got {mask.dtype}")
    pairs = jnp.stack([labels.astype(jnp.int32), predictions.astype(jnp.int32)])  # [2, B]; uint8 would overflow
    pairs = jnp.where(mask & (pairs >= 0).all(axis=0), pairs, num_classes)  # -1 would count from the end
    return jnp.zeros((num_classes, num_classes), jnp.int32).at[tuple(pairs)].add(1, mode="drop")  # [C, C]


@jax.jit
def evaluate_batch(params, batch):
    """(sum of losses, confusion matrix) of one batch. Sums, since means over batches of different sizes do not add."""
    losses, logits = masked_losses(params, batch)
    confusion = confusion_matrix(batch["label"], logits.argmax(axis=1), logits.shape[1], batch["mask"])
    return losses.sum(), confusion


def evaluate(params, batches):
    """{"loss": float, "accuracy": float, "confusion": int64 [C, C]} over all real examples of `batches`.

    However the examples are cut into batches, the counts are the same, and the loss is but for float32 rounding.
    ValueError if there is no real example at all.
    """
    loss, confusion, pending = 0.0, 0, None
    for batch in itertools.chain(batches, [None]):  # reads one batch behind: the device has its next work by then
        following = evaluate_batch(params, batch) if batch is not None else None
        if pending is not None:
            batch_loss, batch_confusion = jax.device_get(pending)
            loss += float(batch_loss)  # in float64
            confusion = confusion + batch_confusion.astype(np.int64)
        pending = following
    if not np.sum(confusion):
        raise ValueError("nothing to evaluate: the batches hold no real example")
    count = confusion.sum()
    return {"loss": float(loss / count), "accuracy": float(confusion.trace() / count), "confusion": confusion}


# ---------------------------------------------------------------- checkpoints


def save_checkpoint(path, tree):
    """Writes a pytree of arrays to `path`, a NumPy archive (.npz, no pickle). Atomic: a kill leaves the old file.

    Leaves may be JAX or NumPy arrays, scalars, PRNG keys, of any dtype JAX knows. The archive holds the leaves
    as "0", "1", ... and "leaves": per leaf its path in the tree and its dtype, since npz itself keeps neither
    bfloat16, float8 nor keys. The parent folder must exist.
    """
    arrays, leaves = {}, []
    for number, (leaf_path, leaf) in enumerate(jax.tree.leaves_with_path(tree)):
        name, array = leaf_to_array(leaf)
        arrays[str(number)] = array
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
    if array.dtype.hasobject:  # npz would pickle it
        raise ValueError(f"checkpoint leaves must be arrays or numbers, got {type(leaf).__name__}")
    return array.dtype.name, array.astype(array.dtype.newbyteorder("="), copy=False)  # JAX reads native bytes only


def read_archive(path):
    """{path in the tree: (dtype name, array)} of a checkpoint file, every checksum compared."""
    with open(path, "rb") as file:  # an OSError here is the disk's; every later error means damage
        try:
            with zipfile.ZipFile(file) as archive:
                if damaged := archive.testzip():
                    raise ValueError(f"bad checksum of {damaged}")
            file.seek(0)
            with np.load(file, allow_pickle=False) as archive:
                leaves = json.loads(archive["leaves"].item())
                return {leaf_path: (dtype, archive[str(n)]) for n, (leaf_path, dtype) in enumerate(leaves)}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, NotImplementedError, RuntimeError,
                zipfile.BadZipFile, zlib.error) as error:  # what numpy, json, zipfile and zlib raise on damage
            raise ValueError(f"{path} is damaged or no checkpoint: {error}") from error


def load_checkpoint(path, like):
    """The pytree in `path`, with the structure, dtypes and shardings of `like`, a tree of concrete arrays.

    JAX leaves of `like` come back as JAX arrays with its sharding (so the next step compiles nothing anew),
    others as NumPy arrays. ValueError if the file is damaged, or if its leaves and those of `like` differ in
    path, shape or dtype (it names the first difference); OSError if it cannot be read.
    """
    saved = read_archive(path)
    wanted = {jax.tree_util.keystr(leaf_path): leaf for leaf_path, leaf in jax.tree.leaves_with_path(like)}
    result = []
    for leaf_path in wanted | saved:
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
            read_archive(path)
            return path
        except (OSError, ValueError) as error:
            print(f"{error}: looking for an older checkpoint", file=sys.stderr)
    return None


def checkpointing(directory, settings, state, resume, interrupted):
    """(state to start from, save function for `interval_loop`); keeps the newest three checkpoints.

    settings: a dict of the numbers that a resumed run must share with the one that it continues. interrupted:
    a list that is no longer empty once the user pressed Ctrl-C; `save` then raises KeyboardInterrupt, after it
    has saved. With several processes all read the same folder and only process 0 writes. ValueError if the
    folder holds checkpoints and `resume` is False, or if the newest was made with other settings or shapes.
    """
    directory, found = Path(directory), latest_checkpoint(directory)
    directory.mkdir(parents=True, exist_ok=True)
    if jax.process_count() > 1:
        newest = np.array(int(found.stem.removeprefix("step_")) if found else -1)
        if len(set(multihost_utils.process_allgather(newest).tolist())) > 1:
            raise ValueError(f"the processes do not see the same checkpoints in {directory} (this one: {found})")
    if found and not resume:
        raise ValueError(f"{found} exists: add --resume to go on from it, or give another folder")
    settings = {name: np.asarray(value) for name, value in settings.items()}
    if found:
        loaded = load_checkpoint(found, {**state, "step": np.asarray(0), "settings": settings})
        for name, value in loaded.pop("settings").items():
            if value != settings[name]:
                raise ValueError(f"{found} was made with {name} {value}, expected {settings[name]}")
        state = {**loaded, "step": int(loaded["step"])}

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
            for old in paths[:max(0, paths.index(path) - 2)]:  # counted from this one: newer ones are damaged
                old.unlink()
        if stop:
            raise KeyboardInterrupt(path)  # `command_line` tells the user

    return state, save


# ---------------------------------------------------------------- the main job


def run(args):
    """Trains and evaluates as `args` say; returns {"accuracy", "loss", "confusion"} of the test set."""
    import data  # here and nowhere else, so that this file works alone

    if args.habits and (args.checkpoint_dir or args.distributed):
        raise ValueError("--habits trains nothing: it goes with neither --checkpoint-dir nor --distributed")
    if args.distributed:
        join_processes()
    devices = find_devices()
    say = print if jax.process_index() == 0 else lambda *_, **__: None
    plt = import_pyplot(args.plot) if args.plot else None
    dataset = (data.load_fashion_mnist(args.data_dir) if args.dataset == "fashion_mnist"
               else data.synthetic(args.seed, 10_000, 2_000))
    say(f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform}), jax {jax.__version__}, "
        f"{dataset['origin']}")
    count = len(dataset["train"]["label"])
    if args.batch_size % len(devices):
        raise ValueError(f"--batch-size {args.batch_size} cannot be shared evenly by {len(devices)} devices")
    if args.batch_size > count:
        raise ValueError(f"--batch-size {args.batch_size} is more than the {count} training images")
    if args.habits:
        return run_habits(args, data, dataset["train"], plt)
    interrupted = note_interrupts()

    # Data parallelism: every device holds all parameters and a share of each batch. The compiler adds the
    # all-reduce of the gradients; the train step does not change.
    mesh = jax.sharding.Mesh(np.array(devices), ("batch",))
    replicated, by_row, by_step_and_row = (
        NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("batch",), (None, "batch")))
    # Of several processes, process p keeps the p-th share of each batch; JAX joins the shares to one array.
    share = args.batch_size // jax.process_count()
    rows = slice(jax.process_index() * share, (jax.process_index() + 1) * share)

    def my_rows(batches):
        return ({name: values[rows] for name, values in batch.items()} for batch in batches)

    steps_per_epoch = count // args.batch_size
    total = steps_per_epoch * args.epochs
    schedule = optax.warmup_cosine_decay_schedule(0.0, args.learning_rate, total // 10, total)
    rates = np.asarray(jax.jit(schedule)(np.arange(total)))  # for the log
    optimizer = make_optimizer(schedule, args.weight_decay, b2=0.95)
    traced = []  # filled where the step is compiled, emptied by `report`

    def training_loss(params, batch):  # uint8 travels to the device, a quarter of the bytes; evaluation smooths nothing
        traced.append(True)  # Python runs only while JAX traces, which it does before it compiles
        return loss_fn(params, {**batch, "image": data.preprocess(batch["image"])}, label_smoothing=0.1)

    train_steps = jax.jit(make_train_steps(make_train_step(training_loss, optimizer)), donate_argnums=(0, 1))

    @jax.jit(out_shardings=replicated)  # a counter of the optimizer left on one device would compile the step twice
    def init():
        params = init_mlp(jax.random.key(args.seed), [784, *args.hidden, 10])
        return {"params": params, "opt_state": optimizer.init(params)}

    state, save = {**init(), "step": 0}, None
    if args.checkpoint_dir:
        settings = {name: getattr(args, name)
                    for name in ("seed", "epochs", "batch_size", "learning_rate", "weight_decay")}
        settings["examples"] = count
        state, save = checkpointing(args.checkpoint_dir, settings, state, args.resume, interrupted)
        if args.resume:
            say(f"going on from step {state['step']}" if state["step"] else "nothing to resume: starting afresh")

    padded = my_rows(data.batches(dataset["test"], args.batch_size, remainder="pad"))
    images = ({**batch, "image": data.preprocess(batch["image"])} for batch in padded)
    test = list(data.to_device(images, by_row))  # stays on the device

    def report(step, metrics, seconds):
        speed = len(metrics["loss"]) * args.batch_size / seconds
        say(f"epoch {(step - 1) // steps_per_epoch + 1:3}  step {step:6}  loss {metrics['loss'].mean():.4f}  "
            f"accuracy {metrics['accuracy'].mean():.4f}  learning rate {rates[step - 1]:.2e}  "
            f"{speed:9,.0f} examples/s{' (with compilation)' if traced else ''}", flush=True)
        traced.clear()
        if interrupted and not save:
            raise KeyboardInterrupt

    result = None
    for epoch in range(state["step"] // steps_per_epoch, args.epochs):
        batches = my_rows(data.batches(dataset["train"], args.batch_size, seed=args.seed, epoch=epoch))
        batches = itertools.islice(batches, state["step"] % steps_per_epoch, None)  # where a resumed run stands
        intervals = data.to_device(data.stack(batches, args.log_every), by_step_and_row)
        state = interval_loop(train_steps, state, intervals, report, save)
        result = evaluate(state["params"], test)
        say(f"epoch {epoch + 1:3}  test accuracy {result['accuracy']:.4f}  test loss {result['loss']:.4f}", flush=True)
    result = result or evaluate(state["params"], test)
    if not np.isfinite(result["loss"]):
        raise FloatingPointError(f"the test loss is {result['loss']} after step {state['step']}")
    say(confusion_table(result["confusion"], data.CLASS_NAMES))
    say(f"test accuracy {result['accuracy']:.4f}")
    if plt and jax.process_index() == 0:
        plot_confusion(plt, result["confusion"], data.CLASS_NAMES, args.plot)
    return result


def find_devices():
    """`jax.devices()`, without the traceback that the plugin of jax[cuda12] prints where there is no NVIDIA GPU."""
    if not any(map(os.path.exists, ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg"))):
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"no device for JAX_PLATFORMS={jax.config.jax_platforms}: {error or type(error)}") from error


def join_processes():
    """`jax.distributed.initialize` with what the environment says; the rest it finds itself (Slurm, Open MPI, ...)."""
    given = {}
    for name, pattern in ("coordinator_address", r".+:\d+"), ("num_processes", r"\d+"), ("process_id", r"\d+"):
        if (value := os.environ.get(f"JAX_{name.upper()}")) is not None:
            if not re.fullmatch(pattern, value):
                raise ValueError(f"JAX_{name.upper()} must look like {pattern}, got {value!r}")
            given[name] = int(value) if value.isdigit() else value
    jax.distributed.initialize(**given)


def note_interrupts():
    """From here on the first Ctrl-C only fills the list that is returned, the second ends the process.

    An exception raised wherever the program happens to be could land inside JAX, which swallows it or crashes.
    """
    interrupted = []

    def on_interrupt(*_):
        interrupted.append(True)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.write(2, b"\nstopping at the end of this interval; Ctrl-C again to stop at once\n")

    signal.signal(signal.SIGINT, on_interrupt)
    return interrupted


def command_line(parser, run, argv):
    """Parses `argv`, calls run(args); a user's mistake or Ctrl-C ends in SystemExit with one line."""
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message}\n")  # without the usage
    args = parser.parse_args(argv)
    if args.resume and not args.checkpoint_dir:
        parser.error("--resume needs --checkpoint-dir")
    handler = signal.getsignal(signal.SIGINT)
    try:
        return run(args)
    except (ValueError, OSError, FloatingPointError, MemoryError, jax.errors.JaxRuntimeError) as error:
        sys.exit(f"{parser.prog}: {str(error) or type(error).__name__}")
    except KeyboardInterrupt as interrupt:
        saved = f"saved {interrupt}, the same command with --resume goes on from there"
        print(f"interrupted: {saved if str(interrupt) else 'nothing was saved'}", file=sys.stderr)
        sys.exit(130)
    finally:
        if signal.getsignal(signal.SIGINT) is not handler:
            signal.signal(signal.SIGINT, handler)


def number(kind, least, most=sys.float_info.max):
    """An argparse type: an int or float between `least` and `most`."""
    def parse(text):
        try:
            if least <= (value := kind(text)) <= most:
                return value
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"expected {kind.__name__} of at least {least}"
                                         f"{f' and at most {most}' if most < 2**63 else ''}, got {text!r}")

    return parse


def main(argv=None):
    """The command line: see --help. Returns what `run` returns (with --habits {"seconds", "facts"})."""
    parser = argparse.ArgumentParser(
        prog="minijax_train.py", description="Train a multilayer perceptron on Fashion-MNIST and evaluate it.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add, count = parser.add_argument, number(int, 1, 2**31 - 1)
    add("--epochs", type=count, default=14, help="passes over the training images")
    add("--batch-size", type=count, default=512, help="images per step, over all devices")
    add("--learning-rate", type=number(float, 0), default=2e-3,
        help="peak of the schedule: linear warm-up over a tenth of the steps, then cosine decay to 0")
    add("--weight-decay", type=number(float, 0), default=0.1,
        help="AdamW's decay of weight matrices, times the learning rate")
    add("--hidden", type=count, nargs="+", default=[512, 512], metavar="W", help="widths of the hidden layers")
    add("--seed", type=number(int, 0, 2**32 - 1), default=0,
        help="of the initial parameters, the order of the images and --dataset synthetic")
    add("--log-every", type=count, default=39, metavar="STEPS",
        help="steps per interval: per line, compiled call and checkpoint")
    add("--data-dir", metavar="DIR", help="folder with the four files, which must exist; without it $MINIJAX_DATA "
        "or the user's cache folder, Debian's package, then a download")
    add("--dataset", choices=["fashion_mnist", "synthetic"], default="fashion_mnist",
        help="synthetic: made-up images, nothing to fetch")
    add("--checkpoint-dir", metavar="DIR", help="save the state here after every interval; the newest three are kept")
    add("--resume", action="store_true", help="go on from the newest checkpoint in --checkpoint-dir")
    add("--plot", metavar="FILE.png", help="draw the confusion matrix, or the table of --habits (needs matplotlib)")
    add("--habits", action="store_true", help="measure what each habit of the loop buys here, instead of training")
    add("--distributed", action="store_true", help="be one of several processes: see README.md")
    return command_line(parser, run, argv)


def confusion_table(confusion, names):
    """The matrix as text, rows = true classes, and the three (or fewer) most frequent confusions in words."""
    lines = ["\nrows: true class, columns: predicted", " " * 12 + "".join(f"{name[:7]:>8}" for name in names)]
    lines += [f"{name:<12}" + "".join(f"{count:8}" for count in row) for name, row in zip(names, confusion)]
    wrong = np.where(np.eye(len(names), dtype=bool), 0, confusion)
    for index in np.argsort(-wrong, axis=None, kind="stable")[:3]:
        true, predicted = np.unravel_index(index, wrong.shape)
        if count := wrong[true, predicted]:
            lines.append(f"{count:4} x {names[true]} taken for {names[predicted]}")
    return "\n".join(lines)


def import_pyplot(path):
    """matplotlib's pyplot, drawing to files. ValueError where it is not installed or could not write `path`."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    if not Path(path).absolute().parent.is_dir():
        raise ValueError(f"--plot {path}: there is no such folder")
    if Path(path).suffix[1:].lower() not in pyplot.figure().canvas.get_supported_filetypes():
        raise ValueError(f"--plot {path}: expected a name that ends in .png (or .pdf, .svg)")
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


# ---------------------------------------------------------------- appendix: what the habits buy


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
    a dict of the other figures that `habits_table` prints.

    The first five loops form a ladder, each with one habit more than the one before; the last two are bounds. A
    pass is up to six intervals of real batches, the host's work included.
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
    facts = {"float bytes": first["image"].nbytes, "uint8 bytes": train["image"][:batch_size].nbytes}
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
            *state, _ = step(*state, batch)
        jax.block_until_ready(state)
        facts[f"{name} seconds"], facts[f"{name} compilations"] = time.perf_counter() - start, len(traced)
    # How long does a step take? Stopping the clock when the call returns tells when the work was queued. Ten calls,
    # since a CPU's queue holds 32: then each waits for an earlier one to end, and a long loop hides the mistake.
    state = jax.block_until_ready(init())
    start = time.perf_counter()
    for _ in range(10):
        *state, _ = floats_step(*state, first)
    facts["dispatch seconds"] = (time.perf_counter() - start) / 10
    jax.block_until_ready(state)
    facts["true seconds"] = (time.perf_counter() - start) / 10
    return seconds, facts


HABITS = [  # (name, loop without it, loop with it, why)
    ("read metrics once an interval", "reads every step", "reads every interval",
     "a read waits for the device, and the device then waits for the host"),
    ("send uint8, normalise in the step", "reads every interval", "bytes to the device",
     "{float bytes:,} -> {uint8 bytes:,} bytes of images a step"),
    ("donate params and opt_state", "bytes to the device", "donates",
     "the step needs {kept bytes:,} -> {donated bytes:,} bytes: new values take the old ones' place"),
    ("one call an interval (lax.scan)", "donates", "one call per interval",
     "the host queues one call, places the next batches, and reads an interval when the next one runs"),
    ("all four", "reads every step", "one call per interval", "the product of the gains above"),
    ("the last three", "reads every interval", "one call per interval", "one call an interval against plain_loop"),
]


def habits_table(seconds, facts, batch_size):
    """The figures of `measure_habits` as text: a row a habit, with the reason in the line."""
    lines = [f"{'habit':<34}{'without':>11}{'with':>11}{'gain':>7}   why (speeds in examples/s)"]
    for name, without, with_it, why in HABITS:
        a, b = seconds[without], seconds[with_it]
        lines.append(f"{name:<34}{batch_size / a:11,.0f}{batch_size / b:11,.0f}{a / b:7.3f}   {why.format(**facts)}")
    lines.append(f"{'fixed shapes':<34}{facts['ragged seconds']:10.2f}s{facts['fixed seconds']:10.2f}s"
                 f"{facts['ragged seconds'] / facts['fixed seconds']:7.3f}   two first steps: a ragged second batch "
                 f"means {facts['ragged compilations']} compilations instead of {facts['fixed compilations']}")
    lines.append(f"{'block_until_ready before the clock':<34}{facts['dispatch seconds'] * 1e3:9.3f}ms"
                 f"{facts['true seconds'] * 1e3:9.3f}ms{facts['true seconds'] / facts['dispatch seconds']:7.3f}   "
                 "time of a step, measured without and with it: a call returns when its work is queued")
    floor = seconds["matrix products alone"]
    lines.append(f"With one call an interval a step takes {seconds['one call per interval'] / floor:.3f} times its "
                 f"matrix products alone ({floor * 1e3:.3f} ms), and "
                 f"{seconds['the same, batches already there'] / floor:.3f} times without the host's work.")
    return "\n".join(lines)


def plot_habits(plt, seconds, batch_size, path):
    """Draws the speed of each loop of the ladder to an image file."""
    names = list(seconds)[:5]  # the ladder
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    axes.barh(names, [batch_size / seconds[name] for name in names])
    axes.set_xlabel("examples/s; each loop has one habit more than the one above")
    axes.invert_yaxis()
    figure.savefig(path, dpi=150)


def run_habits(args, data, train, plt):
    """What --habits does: measures, prints the table and returns what it was made of."""
    seconds, facts = measure_habits(train, data.preprocess, data.batches, data.stack, data.to_device,
                                    batch_size=args.batch_size, log_every=args.log_every, hidden=args.hidden)
    print(f"layers {[784, *args.hidden, 10]}, batch {args.batch_size}, intervals of {args.log_every} steps")
    print(habits_table(seconds, facts, args.batch_size))
    if plt:
        plot_habits(plt, seconds, args.batch_size, args.plot)
    return {"seconds": seconds, "facts": facts}


if __name__ == "__main__":
    main()
