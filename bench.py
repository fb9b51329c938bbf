# SPDX-License-Identifier: MIT
"""Every figure of the README by a command, on your machine, beside what else is installed.

    python bench.py train | habits | attention | decoder    one table each; --help says more

Peers (pip install torch flax keras transformers) run in processes of their own. Each round measures
all in turn, so that a busy moment hits all alike. A row: the median of n rounds, quartiles, and the
ratio, round by round, to the figure's first row, if further from 1 than its quartiles lie apart.
"""
import argparse
import bz2
import contextlib
import inspect
import itertools
import lzma
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import metadata, util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import attention  # all siblings: this file measures them and does nothing without
import data
import decoder
import minijax_train

PEER = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))  # starts when it is asked
LEAST = 0.2  # seconds that a task is repeated for in each round
QUARTILES = 0.25, 0.5, 0.75
LENGTHS = 128, 512, 1024, 2048, 4096  # of attention
progress = partial(print, file=sys.stderr, flush=True)  # stdout is for the table


# ---------------------------------------------------------------- measuring and showing
def timed(work):
    """Milliseconds of work(), which waits for its results, repeated for a while."""
    work()
    seconds, end = [], time.perf_counter() + LEAST
    while not seconds or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return 1e3 * np.median(seconds[len(seconds) // 2:])  # cores at rest come to speed first


def in_turn(tasks, rounds, warm_up=True):
    """{name: [what task() returned, once a round]}, A B C A B C ...; the warm-up is thrown away."""
    results = {name: [] for name in tasks}
    for number in range(1 - warm_up, rounds + 1):
        for name, task in tasks.items():
            progress(f"round {number} of {rounds}:", *name)
            results[name].append(task())
    return {name: values[warm_up:] for name, values in results.items()}


def to_rows(values):
    """The table, a list of dicts, from {(figure, name): values, one a round}.

    "ratio" is None where it is not larger than its spread, and for one round, which shows none.
    """
    rows, first = [], {}
    for (figure, name), numbers in values.items():
        ratios = np.divide(numbers, first.setdefault(figure, numbers))
        low, ratio, high = np.quantile(ratios, QUARTILES).tolist()
        is_clear = len(numbers) > 1 and abs(ratio - 1) > high - low
        rows.append({"figure": figure, "name": name, "n": len(numbers),
                     "quartiles": np.quantile(numbers, QUARTILES).tolist(),
                     "ratio": ratio if is_clear else None})
    return rows


def show(rows):
    """Prints the table."""
    print(f"{'n':>58}{'median':>10}{'quartiles':>22}{'ratio':>7}")
    for row in rows:
        low, median, high = row["quartiles"]
        spread = f"{low:.4g} .. {high:.4g}" if row["n"] > 1 else ""
        ratio = f"{row['ratio']:.2f}" if row["ratio"] else ""
        print(f"{row['figure']:30} {row['name']:24}{row['n']:3}{median:10.4g}"
              f"{spread:>22}{ratio:>7}")


def plot(rows, path):
    """Draws the table to an image file: a panel for each figure, a bar and quartiles for a row."""
    from matplotlib.figure import Figure
    figures = list(dict.fromkeys(row["figure"] for row in rows))
    picture = Figure(figsize=(8, 2 * len(figures)), layout="constrained")
    for axes, figure in zip(picture.subplots(len(figures), squeeze=False).flat, figures):
        axes.set_title(figure)
        for row in (row for row in rows if row["figure"] == figure):
            low, median, high = row["quartiles"]
            axes.barh(row["name"], median, xerr=[[median - low], [high - median]])
    picture.savefig(path)


# ---------------------------------------------------------------- peers
def installed(*packages):
    """Which of these are there; a line names them and the missing."""
    found = [name for name in packages if util.find_spec(name)]
    versions = [f"{name} {metadata.version(name)}" for name in found]
    missing = [f"no {name} (pip install {name})" for name in packages if name not in found]
    print("peers:", ", ".join(versions + missing), flush=True)
    return found


def ask_peer(measure, *arguments):
    """measure(*arguments) in the peers' process, which rests between its tasks."""
    return PEER.submit(measure, *arguments).result()


# ---------------------------------------------------------------- train
def measure_train(args):
    """The whole main job, from its start as a process, beside the peers'."""
    dataset = (data.load_fashion_mnist(args.data_dir) if args.dataset == "fashion_mnist" else
               data.synthetic(args.seed, 10_000, 2_000))
    peers = installed(*MAIN_JOBS)
    progress(f"about {args.rounds * (len(peers) + 1) * (6 + 1.5 * args.epochs) / 60:.1f} minutes")
    recipe = {**vars(args), "plot": None}
    call = f"import minijax_train\nminijax_train.run(argparse.Namespace(**{recipe}))"
    tasks = {("main job", "minijax"): partial(watch, program(call))}
    with tempfile.TemporaryDirectory() as folder:
        (x, y), (test_x, test_y) = (dataset[part].values() for part in ("train", "test"))
        np.savez(path := folder + "/images.npz", x=x, y=y, test_x=test_x, test_y=test_y)
        for name in peers:
            call = f"main_job({MAIN_JOBS[name].__name__}, {path!r}, {recipe})"
            tasks["main job", name] = partial(watch, program(call, main_job, MAIN_JOBS[name]))
        runs = in_turn(tasks, args.rounds, warm_up=False)
    values = {(figure, name): [run[figure] for run in rounds]
              for figure in runs["main job", "minijax"][0] for (_, name), rounds in runs.items()}
    return to_rows({key: numbers for key, numbers in values.items() if max(numbers) < np.inf})


def program(call, *functions):
    """The command that runs `call` with these functions' sources: a peer does not import JAX."""
    head = ("import argparse, os, sys; import numpy as np; "
            f"sys.path.insert(0, {os.path.dirname(os.path.abspath(__file__))!r})")
    return [sys.executable, "-c", "\n".join([head, *map(inspect.getsource, functions), call])]


def watch(command):
    """{figure: value} of a main job, by the lines with its test accuracy; inf: not reached."""
    marks, start = [], time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        for line in child.stdout:
            if "test accuracy" in line:
                marks.append((time.perf_counter() - start, float(line.split()[-1])))
    if child.returncode or not marks:
        raise RuntimeError(f"a job stopped with exit code {child.returncode}: see above")
    epochs = np.diff([seconds for seconds, _ in marks[:-1]])  # all but the first, which compiles
    good = [seconds for seconds, accuracy in marks if accuracy >= 0.9]
    return {"an epoch and its test, s": np.median(epochs) if len(epochs) else np.inf,
            "to 90 % test accuracy, s": min(good, default=np.inf),
            "the whole command, s": marks[-1][0], "test accuracy": marks[-1][1]}


def main_job(make, path, recipe):
    """In a peer's process: the main job by make's (train_epoch, predict); prints as ours does.

    Two liberties: images come unpacked and verified from a file, and biases decay as well.
    """
    arrays, size, widths = np.load(path), recipe["batch_size"], [784, *recipe["hidden"], 10]
    x, test_x = (arrays[name].reshape(-1, 784) / np.float32(255) for name in ("x", "test_x"))
    y, steps = arrays["y"].astype(int), len(x) // size  # of an epoch
    layers, all_steps = list(zip(widths, widths[1:])), recipe["epochs"] * steps
    train_epoch, predict = make(layers, x, y, all_steps, recipe)
    for epoch in range(recipe["epochs"]):
        order = np.random.default_rng([recipe["seed"], epoch]).permutation(len(x))
        train_epoch(order[:steps * size].reshape(steps, size))
        accuracy = (np.asarray(predict(test_x)) == arrays["test_y"]).mean()
        print("epoch", epoch + 1, "test accuracy", accuracy, flush=True)
    print("test accuracy", accuracy)


def flax_nnx(layers, x, y, steps, recipe):
    """The main job in Flax NNX, for `main_job`."""
    import jax
    import optax
    from flax import nnx
    rngs = nnx.Rngs(recipe["seed"])
    parts = [part for i, o in layers for part in (nnx.Linear(i, o, rngs=rngs), nnx.relu)]
    model = nnx.Sequential(*parts[:-1])
    rate = optax.warmup_cosine_decay_schedule(0.0, recipe["learning_rate"], steps // 10, steps)
    adamw = optax.adamw(rate, b2=0.95, weight_decay=recipe["weight_decay"])
    optimizer = nnx.Optimizer(model, adamw, wrt=nnx.Param)

    def loss_fn(model, x, y):
        targets = optax.smooth_labels(jax.nn.one_hot(y, 10), 0.1)
        return optax.softmax_cross_entropy(model(x), targets).mean()

    @nnx.jit
    def train_step(model, optimizer, x, y):
        optimizer.update(model, nnx.grad(loss_fn)(model, x, y))

    step = nnx.cached_partial(train_step, model, optimizer)  # its guide's way to be fast
    return lambda rows: [step(x[r], y[r]) for r in rows], lambda x: model(x).argmax(axis=1)


def keras_fit(layers, x, y, steps, recipe):
    """The main job in Keras on JAX, for `main_job`."""
    os.environ["KERAS_BACKEND"] = "jax"
    import keras
    warmup, targets = steps // 10, keras.utils.to_categorical(y, 10)
    hidden = [keras.layers.Dense(width, "relu") for _, width in layers[:-1]]
    model = keras.Sequential([*hidden, keras.layers.Dense(10)])
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, steps - warmup, warmup_target=recipe["learning_rate"], warmup_steps=warmup)
    model.compile(  # 3 to 117 steps_per_execution took 1.2 to 2 times as long
        keras.optimizers.AdamW(rate, recipe["weight_decay"], beta_2=0.95, epsilon=1e-8),
        keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1))

    def train_epoch(rows):  # fit shuffles and cuts by itself
        model.fit(x[:rows.size], targets[:rows.size], batch_size=rows.shape[1], verbose=0)

    return train_epoch, lambda x: model.predict_on_batch(x).argmax(axis=1)


def pytorch(layers, x, y, steps, recipe):
    """The main job in PyTorch, for `main_job`."""
    import torch
    torch.manual_seed(recipe["seed"])
    torch.set_default_device(recipe["device"])
    x, y, warmup = torch.tensor(x), torch.tensor(y), max(steps // 10, 1)
    parts = [part for i, o in layers for part in (torch.nn.Linear(i, o), torch.nn.ReLU())]
    model = torch.nn.Sequential(*parts[:-1])
    optimizer = torch.optim.AdamW(model.parameters(), recipe["learning_rate"], betas=(0.9, 0.95),
                                  weight_decay=recipe["weight_decay"], fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(
        step / warmup, 0.5 + 0.5 * np.cos(np.pi * (step - warmup) / (steps - warmup))))
    loss_fn = torch.nn.CrossEntropyLoss(label_smoothing=0.1)

    def train_epoch(rows):
        for r in torch.tensor(rows):
            optimizer.zero_grad()
            loss_fn(model(x[r]), y[r]).backward()
            optimizer.step()
            schedule.step()

    return train_epoch, torch.no_grad()(lambda x: model(torch.tensor(x)).argmax(dim=1).cpu())


# ---------------------------------------------------------------- habits
def measure_habits(args):
    """Loops over the main job's step, each with one habit more than the one above it."""
    every, B = args.log_every, args.batch_size
    progress(f"about {(args.rounds + 2) / 6:.1f} minutes")
    train = data.synthetic(args.seed, 60_000, 1)["train"]  # as large as Fashion-MNIST
    floats = {**train, "image": data.preprocess(train["image"])}
    steps = min(6 * every, len(train["label"]) // B)  # of one pass
    float_step, init = minijax_train.make_training(args, 1000, lambda images: images)
    byte_step, _ = minijax_train.make_training(args, 1000, data.preprocess)
    plain, kept, init = jax.jit(float_step), jax.jit(byte_step), jax.jit(init)
    given = jax.jit(byte_step, donate_argnums=(0, 1))
    many = jax.jit(minijax_train.make_train_steps(byte_step), donate_argnums=(0, 1))

    def batches(dataset):
        return itertools.islice(data.batches(dataset, B, seed=0), steps)

    def by_interval(state):
        intervals = data.to_device(data.stack(batches(train), every))
        return minijax_train.train_loop(many, {**state, "step": 0}, intervals, lambda *_: None)

    @jax.jit
    def products(params):  # those of one train step and nothing else: no step can be faster
        x, results = floats["image"][:B], []
        for layer in params:
            y = x @ layer["w"]
            results += [y @ layer["w"].T, x.T @ y]  # as large as the gradients' of x and w
            x = y
        return x, results[1:]  # the images need no gradient

    def ms(loop):
        state = jax.block_until_ready(init())
        start = time.perf_counter()
        jax.block_until_ready(loop(state))
        return 1e3 / steps * (time.perf_counter() - start)

    loops = {
        "reads every step": lambda state: call_each(state, plain, batches(floats), 1),
        "reads every interval": lambda state: call_each(state, plain, batches(floats), every),
        "sends bytes, not floats": lambda state: call_each(state, kept, batches(train), every),
        "donates its state": lambda state: call_each(state, given, batches(train), every),
        "one call an interval": by_interval,
        "matrix products alone": lambda state: [products(state["params"]) for _ in range(steps)]}
    tasks = {("a step, ms", name): partial(ms, loop) for name, loop in loops.items()}
    return to_rows(in_turn(tasks, args.rounds))


def call_each(state, step, batches, every):
    """The plain loop, which keeps `state` up to date: one call a batch, few losses read."""
    losses = []
    for number, batch in enumerate(batches, start=1):
        state["params"], state["opt_state"], metrics = step(
            state["params"], state["opt_state"], jax.device_put(batch))
        losses.append(metrics["loss"])
        if number % every == 0:
            float(losses[-1])
    return losses


# ---------------------------------------------------------------- attention
def torch_attention(device, dtype, T, with_gradient):
    """Milliseconds of PyTorch's kernel; item() waits for a GPU."""
    import torch
    q, k, v, weight = (torch.randn(1, heads, T, 64, dtype=getattr(torch, dtype), device=device,
                                   requires_grad=with_gradient) for heads in (8, 2, 2, 8))

    def task():
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True)
        if with_gradient:
            out, _, _ = torch.autograd.grad((out * weight).sum(), (q, k, v))
        out[0, 0, 0, 0].item()

    return timed(task)


def measure_attention(args):
    """Time and temporary memory by length, causal; the bytes of KV caches."""
    progress(f"about {max(LENGTHS)**2 * (args.rounds + 1) * 4e-8 + 0.5:.0f} minutes")
    ours, dtype = ("cudnn", "bfloat16") if args.device == "cuda" else ("blockwise", "float32")
    print(f"queries [1, T, 8, 64], 2 key/value heads, {dtype}; MiB: of temporary arrays")
    peers, times, sizes = installed("torch"), {}, {}
    for T, with_gradient in itertools.product(LENGTHS, (False, True)):
        figure, tasks = f"{'with gradient' if with_gradient else 'forward'}, T={T}, ", {}
        arrays = [jax.random.normal(jax.random.key(n), (1, T, n, 64), dtype) for n in (8, 2, 2)]
        for name in dict.fromkeys((ours, "blockwise", "xla", "naive")):
            f = partial(attention.dot_product_attention, is_causal=True, implementation=name)
            if with_gradient:
                f = jax.grad(lambda *qkv, f=f: jnp.vdot(qkv[0], f(*qkv)), (0, 1, 2))
            f = jax.jit(f).lower(*arrays).compile()
            sizes[figure + "MiB", name] = [f.memory_analysis().temp_size_in_bytes / 2**20]
            work = partial(lambda f, x: jax.block_until_ready(f(*x)), f, arrays)
            tasks[figure + "ms", name] = partial(timed, work)
        if peers:
            tasks[figure + "ms", "PyTorch"] = partial(
                ask_peer, torch_attention, args.device, dtype, T, with_gradient)
        times |= in_turn(tasks, args.rounds)
    for name, K in ("MHA", 32), ("GQA", 8), ("MQA", 1):
        size = 32 * attention.kv_cache_bytes(1, 8192, K, 128, jnp.bfloat16)
        sizes["cache, 8192 tokens, GiB", f"{name}, 32 x {K} x 128"] = [size / 2**30]
    return to_rows(times | sizes)


# ---------------------------------------------------------------- decoder
def llama(device, config, task, rows, length):
    """Milliseconds of transformers' Llama with random weights, which the time does not see."""
    import torch
    import transformers
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).to(device)
    tokens = torch.randint(256, (rows, length), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)

    def train():
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        loss.item()

    def generate():
        model.generate(tokens, do_sample=False, max_new_tokens=128)[0, 0].item()

    return timed({"train": train, "generate": generate}[task])


def measure_decoder(args):
    """Training and generation beside transformers; bits per byte beside compressors; bfloat16."""
    progress("about 6 minutes at the default sizes, on 2 cores")
    vars(args).update(decoder.RECIPE)
    text = data.documentation()
    start = len(text) - len(text) // 10  # where the held-out part begins
    tokens, figure = np.frombuffer(text, np.uint8), "held-out bits per byte"
    init = partial(
        decoder.init_decoder, jax.random.key(args.seed), vocab_size=256, num_layers=args.layers,
        model_dim=args.model_dim, num_heads=args.heads, num_kv_heads=args.kv_heads)
    batches = [data.training_windows(tokens[:start], args.batch_size, args.length, args.seed, step)
               for step in range(200)]
    params, optimizer = jax.jit(init)(), minijax_train.make_optimizer(1e-3, 0.1, b2=0.95)
    values = {}
    for dtype in "bfloat16", "float32":
        progress("200 steps in", dtype)
        loss_fn = partial(decoder.loss_fn, dtype=dtype, unroll=args.layers)
        step = jax.jit(minijax_train.make_train_step(loss_fn, optimizer), donate_argnums=(0, 1))
        state = minijax_train.init_state(params, optimizer)
        losses = call_each(state, step, batches, every=200)
        values["loss after 200 steps, nats", dtype] = [np.mean(losses[-20:])]
    values |= measure_speed(args, state, step, batches[0])  # in float32
    with contextlib.redirect_stdout(sys.stderr):  # its lines are progress here
        params = decoder.train(args, init, tokens[:start], jax.devices())
    windows = decoder.evaluation_windows(tokens, start, args.length)
    values[figure, "minijax"] = [decoder.held_out_bits(params, windows)]
    values[figure, "learning as it reads"] = [adaptive_bits(params, windows)]
    for name, compress in ("xz", partial(lzma.compress, preset=9)), ("bz2", bz2.compress):
        size = len(compress(text)) - len(compress(text[:start]))
        values[figure, name + " -9"] = [8 * size / (len(text) - start)]
    return to_rows(values)


def measure_speed(args, state, step, batch):
    """{(figure, name): ms, once a round} of a train step and of 128 new tokens."""
    peers, up = installed("torch", "transformers"), state["params"]["layers"]["mlp"]["w_up"]
    config = {"vocab_size": 256, "hidden_size": args.model_dim, "num_hidden_layers": args.layers,
              "num_attention_heads": args.heads, "num_key_value_heads": args.kv_heads,
              "intermediate_size": up.shape[-1], "eos_token_id": None}

    def train(rows):
        call_each(state, step, [batch], every=1)

    def generate(rows):
        prompt = np.zeros((rows, 32), np.int32)
        jax.block_until_ready(decoder.generate(state["params"], prompt, 128))

    tasks = {}
    for figure, ours, rows, length in [("train step, ms", train, *batch["tokens"].shape),
                                       ("128 tokens in 1 row, ms", generate, 1, 32),
                                       ("128 tokens in 8 rows, ms", generate, 8, 32)]:
        tasks[figure, "minijax"] = partial(timed, partial(ours, rows))
        if len(peers) == 2:
            tasks[figure, "transformers"] = partial(
                ask_peer, llama, args.device, config, ours.__name__, rows, length)
    return in_turn(tasks, args.rounds)


def adaptive_bits(params, windows, learning_rate=0.05):
    """Bits per byte that SGD learns from as it reads (Krause et al. 2018, arXiv:1709.07432)."""
    def body(params, window):
        _, metrics = decoder.loss_fn(params, window)  # first predict
        window = {**window, "mask": jnp.ones_like(window["mask"])}  # then learn from all of it
        grads = jax.grad(decoder.loss_fn, has_aux=True)(params, window)[0]
        return jax.tree.map(lambda w, g: w - learning_rate * g, params, grads), metrics

    _, metrics = jax.lax.scan(body, params, windows)
    return np.average(np.float64(metrics["loss"]), weights=metrics["tokens"]) / np.log(2)


# ---------------------------------------------------------------- command line
MAIN_JOBS = {"flax": flax_nnx, "keras": keras_fit, "torch": pytorch}
TABLES = {"train": measure_train, "habits": measure_habits, "attention": measure_attention,
          "decoder": measure_decoder}


def run(args):
    """Measures and prints a table; returns its rows."""
    args.device = "cuda" if minijax_train.find_devices()[0].platform == "gpu" else "cpu"
    cpuinfo = Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
    processor = cpuinfo.partition("model name\t: ")[2].partition("\n")[0] or "an unknown processor"
    print(f"{os.cpu_count()} cores of {processor}, Python {sys.version.split()[0]}, "
          f"optax {optax.__version__}", flush=True)
    rows = TABLES[args.table](args)
    show(rows)
    if args.plot:
        plot(rows, args.plot)
    return rows


def main(argv=None):
    """The command line, see --help. Returns the rows of the table."""
    parser = argparse.ArgumentParser(
        prog="bench.py", description="Measures what README.md states.", conflict_handler="resolve",
        parents=[minijax_train.make_parser()], epilog="A recipe's flags are for train and habits.")
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--rounds", type=minijax_train.number(int, 1, 1000), default=5)
    parser.add_argument("--plot", metavar="FILE.png", help="draw the table (needs matplotlib)")
    return minijax_train.command_line(parser, run, argv)


if __name__ == "__main__":
    main()
