# SPDX-License-Identifier: MIT
"""Training in JAX from first principles: an MLP on Fashion-MNIST, with pytrees, jax.jit and optax.

    python minijax_train.py              train, evaluate, print the confusion matrix (--help: flags)

Read it from the top; `run` is the program made of the pieces. Step and loop fit any model whose
parameters are a pytree; loss and evaluation are this MLP's. Only `run` needs other files.

Axes: B batch, I and O inputs and outputs of a layer, C classes. A batch is {"image": float [B, I],
"label": integer [B], "mask": bool [B]}, where mask is False on rows that only fill it up.
"""
import argparse
import itertools
import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

# ---------------------------------------------------------------- model and loss
def init_mlp(key, layer_sizes):
    """Parameters of a multilayer perceptron: per layer {"w": [I, O], "b": [O]}, float32, in a list.

    key: a `jax.random.key`. layer_sizes: two or more widths, input first. Weights have variance
    2 / I, which keeps the size of activations through ReLUs (He et al. 2015, arXiv:1502.01852).
    """
    if len(layer_sizes) < 2 or min(layer_sizes) < 1:
        raise ValueError(f"layer_sizes must be two or more positive widths, got {layer_sizes}")
    keys = jax.random.split(key, len(layer_sizes) - 1)  # the same key would draw the same numbers
    he_normal = jax.nn.initializers.he_normal(dtype=jnp.float32)
    return [{"w": he_normal(k, (i, o)), "b": jnp.zeros(o, jnp.float32)}
            for k, i, o in zip(keys, layer_sizes, layer_sizes[1:])]


def mlp(params, x):
    """Logits [B, C] of float images x [B, I]: linear layers with ReLU between them."""
    width = params[0]["w"].shape[0]
    if x.ndim != 2 or x.shape[1] != width or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"expected float images [B, {width}], got {x.dtype} {list(x.shape)}")
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"][None])  # [B, O]
    return x @ params[-1]["w"] + params[-1]["b"][None]  # [B, C]


def check_classes(name, values, num_classes, mask):
    """(values as int32 [B], bool [B]: which of those that `mask` counts are no class 0..C-1).

    ValueError names the first, where there are values to look at: compiled code cannot raise.
    """
    values, mask = jnp.asarray(values), jnp.asarray(mask)
    if not (values.ndim == 1 and values.shape == mask.shape and mask.dtype == bool
            and jnp.issubdtype(values.dtype, jnp.integer)):
        raise ValueError(f"expected integer {name} and a bool mask, both [B], got {values.dtype} "
                         f"{list(values.shape)} and {mask.dtype} {list(mask.shape)}")
    values = values.astype(jnp.int32)  # uint8 could not count to 256
    wrong = mask & ((values < 0) | (values >= num_classes))
    if not isinstance(wrong, jax.core.Tracer) and wrong.any():
        row = wrong.argmax()
        raise ValueError(f"{name} must lie in 0..{num_classes - 1}, got {values[row]} in row {row}")
    return values, wrong


def masked_losses(params, batch, label_smoothing=0.0):
    """(losses [B], 0 on padding; logits [B, C], both float32; bool [B]: is the label no class?)."""
    image, mask, num_classes = jnp.asarray(batch["image"]), batch["mask"], params[-1]["b"].shape[0]
    label, wrong = check_classes("labels", batch["label"], num_classes, mask)
    if image.shape[:1] != label.shape:
        raise ValueError(f"expected as many images as labels, got {image.shape} and {label.shape}")
    # The model never sees what padding rows hold: a NaN would come back in the gradient as 0 * NaN.
    image = jnp.where(jnp.expand_dims(mask, range(1, image.ndim)), image, 0)
    logits = mlp(params, image).astype(jnp.float32)  # [B, C]
    targets = jax.nn.one_hot(label, num_classes, dtype=logits.dtype)  # [B, C]
    targets = optax.smooth_labels(targets, label_smoothing)
    losses = jnp.where(wrong, jnp.nan, optax.softmax_cross_entropy(logits, targets))  # [B]
    return jnp.where(mask, losses, 0), logits, wrong


def loss_fn(params, batch, label_smoothing=0.0):
    """(mean cross-entropy in nats over the real rows, {"loss", "accuracy"}).

    Rows where `mask` is False count for nothing, whatever they hold; without any other, loss and
    gradients are 0. ValueError for shapes and dtypes that do not fit and a label outside 0..C-1
    (NaN in compiled code, which cannot raise). label_smoothing: the share of the target spread over
    all classes (Szegedy et al. 2016, arXiv:1512.00567, section 7). Accumulated over batches
    (optax.MultiSteps), gradients are means of means: right if each batch has as many real rows.
    """
    losses, logits, _ = masked_losses(params, batch, label_smoothing)
    count = jnp.maximum(jnp.sum(batch["mask"], dtype=jnp.float32), 1)
    loss = losses.sum() / count
    right = logits.argmax(axis=1) == jnp.asarray(batch["label"], jnp.int32)  # [B]
    accuracy = jnp.sum(right & batch["mask"], dtype=jnp.float32) / count
    return loss, {"loss": loss, "accuracy": accuracy}


# ---------------------------------------------------------------- optimizer and train step
def make_optimizer(learning_rate, weight_decay, b1=0.9, b2=0.999, eps=1e-8):
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) with decay on weight matrices only.

    learning_rate: a number or an optax schedule. A leaf named b, bias, scale or norm, or anything_b
    and so on, is not decayed. Names decide, not ndim: stacked norm scales have two axes as well.
    """
    def is_decayed(path, leaf):
        name = jax.tree_util.keystr(path[-1:], simple=True)
        return name.split("_")[-1] not in ("b", "bias", "scale", "norm")

    return optax.adamw(learning_rate, b1, b2, eps, weight_decay=weight_decay,
                       mask=lambda params: jax.tree.map_with_path(is_decayed, params))


def init_state(params, optimizer):
    """The state of a fresh run, {"params", "opt_state", "step": 0}, in copies that may be donated.

    `params` stay the caller's, and an optimizer may keep the parameters in its own state as well.
    """
    copies = jax.tree.map(jnp.copy, {"params": params, "opt_state": optimizer.init(params)})
    return {**copies, "step": 0}


def make_train_step(loss_fn, optimizer):
    """The train step, a pure function: (params, opt_state, batch) -> (params, opt_state, metrics).

    loss_fn: any (params, batch) -> (scalar, metrics) without side effects; a dropout key, say,
    travels in the batch. optimizer: any of optax that takes gradients, parameters and the loss: not
    lbfgs and sophia (which call the loss), dpsgd (a gradient per example), lookahead (two models).

    Compile it with `jax.jit(train_step, donate_argnums=(0, 1))`: new parameters and optimizer state
    then take the memory of the old ones, which must not be read again.
    """
    optimizer = optax.with_extra_args_support(optimizer)

    def train_step(params, opt_state, batch):
        # has_aux: of what loss_fn returns only the first is differentiated. grads mirrors params.
        (loss, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, metrics

    return train_step


def make_train_steps(train_step):
    """Many train steps in one call: (params, opt_state, batches) -> (params, opt_state, metrics).

    batches: a batch with a leading axis of steps on every leaf; so have the metrics. Equal to one
    `train_step` per batch, compiled and donated alike, but the device never waits for the host.
    """
    def train_steps(params, opt_state, batches):
        def body(state, batch):
            *state, metrics = train_step(*state, batch)
            return state, metrics

        (params, opt_state), metrics = jax.lax.scan(body, [params, opt_state], batches)
        return params, opt_state, metrics

    return train_steps


# ---------------------------------------------------------------- the loop
def train_loop(train_steps, state, intervals, report, save=None):
    """Calls `train_steps` once per interval and returns the last state.

    train_steps: compiled, may donate params and opt_state. state: {"params", "opt_state", "step"},
    and whatever else the caller keeps. intervals: batches with a leading axis of steps. After each
    report(step, metrics, seconds) gets the number of its last step, its metrics as host arrays
    [steps] and the time since the last report, and save(state) is called. Metrics must hold "loss":
    FloatingPointError names a step where it is not finite, before that is reported or saved.
    """
    waiting, started = [], time.perf_counter()

    def read_oldest():
        nonlocal started
        step, metrics = waiting.pop(0)
        metrics = jax.device_get(jax.block_until_ready(metrics))  # the one intended wait
        bad = ~np.isfinite(metrics["loss"])  # [steps]
        if bad.any():
            at = step - len(bad) + 1 + bad.argmax()
            raise FloatingPointError(f"the loss is {metrics['loss'][bad][0]} at step {at}: a label "
                                     "that is no class, bad data, too high a learning rate?")
        now = time.perf_counter()
        report(step, metrics, now - started)
        started = now

    for batches in intervals:
        # This returns before the work is done. Only now are the last interval's numbers read: the
        # device has its next work already and does not wait while the host looks and prints.
        params, opt_state, metrics = train_steps(state["params"], state["opt_state"], batches)
        step = int(state["step"]) + len(metrics["loss"])
        state = {**state, "params": params, "opt_state": opt_state, "step": step}
        waiting.append((step, metrics))
        if save:  # before the next call, which donates this state
            read_oldest()
            save(state)
        elif len(waiting) > 1:
            read_oldest()
    while waiting:
        read_oldest()
    return state


# ---------------------------------------------------------------- evaluation
def confusion_matrix(labels, predictions, num_classes, mask=None):
    """Counts int32 [C, C]: row = true class, column = prediction. Pure, may be jitted.

    labels, predictions: integer [B]. mask: bool [B], False where a pair does not count. ValueError
    for what does not fit and for a value outside 0..C-1, which compiled code leaves out.
    """
    mask = jnp.ones(jnp.shape(labels), bool) if mask is None else mask
    labels, no_label = check_classes("labels", labels, num_classes, mask)
    predictions, no_prediction = check_classes("predictions", predictions, num_classes, mask)
    counts = (mask & ~no_label & ~no_prediction).astype(jnp.int32)  # 1 or 0 for each pair
    return jnp.zeros((num_classes, num_classes), jnp.int32).at[labels, predictions].add(counts)


@jax.jit
def evaluate_batch(params, batch):
    """Sums, which can be added up: (losses, confusion matrix, (is a label no class?, which))."""
    losses, logits, wrong = masked_losses(params, batch)
    label, predictions, num_classes = batch["label"], logits.argmax(axis=1), logits.shape[1]
    confusion = confusion_matrix(label, predictions, num_classes, batch["mask"])
    return losses.sum(), confusion, (wrong.any(), label[wrong.argmax()])


def evaluate(params, batches):
    """{"loss": float, "accuracy": float, "confusion": int64 [C, C]} over all real rows.

    The same (the loss but for rounding) however the rows are cut into batches. ValueError for a
    label that is no class and for no real row at all.
    """
    queued = [evaluate_batch(params, batch) for batch in batches]  # none of these calls waits
    loss, confusion = 0.0, np.int64(0)
    for batch_loss, batch_confusion, (wrong, label) in jax.device_get(queued):  # this one does
        if wrong:
            raise ValueError(f"labels must lie in 0..{len(batch_confusion) - 1}, got {label}")
        loss, confusion = loss + float(batch_loss), confusion + batch_confusion  # 64 bits each
    count = confusion.sum()
    if count == 0:
        raise ValueError("nothing to evaluate: the batches hold no real row")
    loss, accuracy = float(loss / count), float(confusion.trace() / count)
    return {"loss": loss, "accuracy": accuracy, "confusion": confusion}


# ---------------------------------------------------------------- the main job
def make_training(args, total_steps, preprocess):
    """(train_step, init) of the main job, both to be compiled; its numbers that are not flags."""
    warmup = total_steps // 10  # steps in which the rate rises; from there a cosine takes it to 0
    schedule = optax.warmup_cosine_decay_schedule(0.0, args.learning_rate, warmup, total_steps)
    optimizer = make_optimizer(schedule, args.weight_decay, b2=0.95)  # a memory of 20 steps

    def init():
        return init_state(init_mlp(jax.random.key(args.seed), [784, *args.hidden, 10]), optimizer)

    def training_loss(params, batch):  # bytes travel to the device, a quarter of what floats weigh
        batch = {**batch, "image": preprocess(batch["image"])}
        return loss_fn(params, batch, label_smoothing=0.1)

    return make_train_step(training_loss, optimizer), init


def run(args):
    """Trains and evaluates as `args` say; returns {"accuracy", "loss", "confusion"} of the test."""
    import checkpoint  # siblings are imported here and nowhere else
    import data

    devices = find_devices(args.distributed)
    replicated, by_row, by_step = shardings(devices, args.batch_size)
    if args.plot:  # an empty one: what cannot be drawn is known before the training
        plot_confusion(np.eye(10, dtype=int), data.CLASS_NAMES, args.plot)
    dataset = (data.load_fashion_mnist(args.data_dir) if args.dataset == "fashion_mnist"
               else data.synthetic(args.seed, 10_000, 2_000))
    say(dataset["origin"])
    steps_per_epoch = len(dataset["train"]["label"]) // args.batch_size
    if steps_per_epoch == 0:
        raise ValueError(f"--batch-size {args.batch_size} exceeds the number of training images")

    train_step, init = make_training(args, args.epochs * steps_per_epoch, data.preprocess)
    train_steps = jax.jit(make_train_steps(train_step), donate_argnums=(0, 1))
    options = {"xla_backend_optimization_level": 0}  # what runs once should compile fast
    # State that does not lie on all devices, as the rest does, would compile the step once more.
    init = jax.jit(init, out_shardings=replicated, compiler_options=options)
    state = {**init(), "step": 0}
    settings = {name: getattr(args, name) for name in
                ("dataset", "seed", "epochs", "batch_size", "learning_rate", "weight_decay")}
    state, save = checkpoint.start_or_resume(args.checkpoint_dir, state, settings, args.resume)

    def report(step, metrics, seconds):
        speed = len(metrics["loss"]) * args.batch_size / seconds  # of the first: with compilation
        say(f"step {step:6}  loss {metrics['loss'].mean():.4f}  "
            f"accuracy {metrics['accuracy'].mean():.4f}  {speed:9,.0f} examples/s")

    test = map(my_share, data.batches(dataset["test"], args.batch_size, remainder="pad"))
    test = ({**batch, "image": data.preprocess(batch["image"])} for batch in test)
    test = list(data.to_device(test, by_row))  # it stays there
    for epoch in range(state["step"] // steps_per_epoch, args.epochs):
        batches = data.batches(dataset["train"], args.batch_size, seed=args.seed, epoch=epoch)
        batches = itertools.islice(batches, state["step"] % steps_per_epoch, None)  # after a resume
        intervals = data.to_device(data.stack(map(my_share, batches), args.log_every), by_step)
        state = train_loop(train_steps, state, intervals, report, save)
        result = evaluate(state["params"], test)
        say(f"epoch {epoch + 1:3}  test accuracy {result['accuracy']:.4f}")
    result = evaluate(state["params"], test)
    if not np.isfinite(result["loss"]):
        raise FloatingPointError(f"the test loss is {result['loss']} after step {state['step']}")
    say(confusion_table(result["confusion"], data.CLASS_NAMES))
    say(f"test accuracy {result['accuracy']:.4f}")
    if args.plot:
        plot_confusion(result["confusion"], data.CLASS_NAMES, args.plot)
    return result


def say(text):
    """Prints; of several processes only the first does."""
    if jax.process_index() == 0:
        print(text, flush=True)


def confusion_table(confusion, names):
    """The confusion matrix as text."""
    table = zip(["", *names], [[name[:7] for name in names], *confusion])
    rows = [f"{name:<12}" + "".join(f"{cell:>8}" for cell in row) for name, row in table]
    return "\n".join(["rows: true class, columns: predicted", *rows])


def plot_confusion(confusion, names, path):
    """Draws the confusion matrix to an image file."""
    from matplotlib.figure import Figure
    axes = Figure(figsize=(8, 7), layout="constrained").subplots()
    axes.imshow(confusion, cmap="Blues", vmax=2 * confusion.max())
    axes.set_xticks(range(len(names)), names, rotation=45)
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="predicted class", ylabel="true class")
    for (true, predicted), count in np.ndenumerate(confusion):
        axes.text(predicted, true, count, ha="center", va="center")
    axes.figure.savefig(path, dpi=150)


# ---------------------------------------------------------------- devices and the command line
def find_devices(distributed=False):
    """All devices (of all processes, if distributed), named in a line."""
    # Where there is no NVIDIA GPU, the CUDA plugin would print a traceback.
    if not any(map(os.path.exists, ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg"))):
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    if distributed:  # JAX finds a coordinator and a cluster's own variables, but not these two
        number_of, which = os.environ.get("JAX_NUM_PROCESSES"), os.environ.get("JAX_PROCESS_ID")
        jax.distributed.initialize(None, number_of and int(number_of), which and int(which))
    devices = jax.devices()
    say(f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform}), jax {jax.__version__}")
    return devices


def shardings(devices, batch_size):
    """Where parameters, batches [B, ..] and stacks of batches [steps, B, ..] lie: data parallelism.

    Every device holds all parameters and a share of the rows. The train step does not change:
    the compiler sees the placement and adds up the gradients of all devices.
    """
    if batch_size % len(devices):
        raise ValueError(f"--batch-size {batch_size} does not divide by the {len(devices)} devices")
    mesh = jax.sharding.Mesh(np.array(devices), ("batch",))
    return [jax.NamedSharding(mesh, jax.P(*axes)) for axes in ((), ("batch",), (None, "batch"))]


def my_share(batch):
    """The rows of a batch that this process places on its own devices."""
    return jax.tree.map(lambda x: np.split(x, jax.process_count())[jax.process_index()], batch)


def number(kind, least, most):
    """An argparse type: an int or float from `least` to `most`."""
    def parse(text):
        if not least <= kind(text) <= most:
            raise ValueError
        return kind(text)
    parse.__name__ = f"{kind.__name__} in {least}..{most}"  # for argparse's "invalid ... value"
    return parse


def command_line(parser, run, argv):
    """Parses `argv`, returns run(args); a user's mistake and Ctrl-C end in one line."""
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message}\n")  # no usage
    args = parser.parse_args(argv)
    if args.resume and not args.checkpoint_dir:
        parser.error("--resume needs --checkpoint-dir")
    try:
        return run(args)
    except (ValueError, OSError, ImportError, ArithmeticError, MemoryError, RuntimeError) as error:
        sys.exit(f"{parser.prog}: {str(error) or type(error).__name__}")
    except KeyboardInterrupt:  # needs no care: a checkpoint is always whole, and resuming exact
        sys.exit(f"{parser.prog}: interrupted; --resume goes on from the last save, if any")


def make_parser():
    """The flags; their defaults are the recipe."""
    parser = argparse.ArgumentParser("minijax_train.py", description="An MLP on Fashion-MNIST.",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add, count, rate = parser.add_argument, number(int, 1, 2**31 - 1), number(float, 0, 1e30)
    add("--epochs", type=count, default=14, help="passes over the training images")
    add("--batch-size", type=count, default=512, help="images per step, over all devices")
    add("--learning-rate", type=rate, default=2e-3, help="the highest of the schedule")
    add("--weight-decay", type=rate, default=0.1, help="of weight matrices, times the rate")
    add("--hidden", type=count, nargs="+", default=[512, 512], metavar="W", help="hidden widths")
    add("--seed", type=number(int, 0, 2**32 - 1), default=0, help="of parameters and order")
    add("--log-every", type=count, default=39, help="steps per line, compiled call and checkpoint")
    add("--data-dir", help="where the four files are, instead of the places README.md names")
    add("--dataset", choices=["fashion_mnist", "synthetic"], default="fashion_mnist")
    add("--checkpoint-dir", help="where to save after every interval; the newest three are kept")
    add("--resume", action="store_true", help="go on from the newest checkpoint")
    add("--plot", metavar="FILE.png", help="draw the confusion matrix (needs matplotlib)")
    add("--distributed", action="store_true", help="be one of several processes: see README.md")
    return parser


def main(argv=None):
    """The command line, see --help; returns what `run` returns."""
    return command_line(make_parser(), run, argv)


if __name__ == "__main__":
    main()
