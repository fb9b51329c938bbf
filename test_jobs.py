# SPDX-License-Identifier: MIT
"""What the docstrings and the README promise of commands, files, faults, kills and processes."""
import collections
import contextlib
import functools
import gzip
import hashlib
import importlib.metadata
import math
import os
import random
import re
import resource
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from pathlib import Path
from unittest import mock

# As in test_props.py, which pytest imports after this file and before the first test of either.
FLAGS = "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count="
if importlib.metadata.version("jax").startswith("0.10."):  # later ones do not know these
    FLAGS = f"--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1 {FLAGS}"
os.environ["XLA_FLAGS"] = f"{FLAGS}2"
COMPILED = tempfile.TemporaryDirectory()  # what one run has compiled, others and children load
os.environ |= {"JAX_COMPILATION_CACHE_DIR": COMPILED.name,
               "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
               "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import bench
import checkpoint
import data
import decoder
import minijax_train as train

HERE = os.path.dirname(os.path.abspath(__file__))


TINY = "--dataset synthetic --hidden 8 --epochs 2 --log-every 5 --batch-size 1000".split()


def start(*argv, devices=1, **environment):
    """Starts Python in a process of its own, on so many CPU devices."""
    environment = {
        **os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{FLAGS}{devices}", **environment}
    streams = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen([sys.executable, *argv], cwd=HERE, env=environment, **streams)


def result_of(process):
    """(stdout, stderr, exit status) of such a process."""
    try:
        return *process.communicate(timeout=150), process.returncode
    finally:
        process.kill()


def last_state(folder):
    """The arrays of the newest checkpoint, by name."""
    with np.load(checkpoint.latest_checkpoint(folder)) as archive:
        return {name: archive[name] for name in archive.files}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """(folder, result) of runs that nothing stopped, by their flags."""
    @functools.cache
    def run(*flags):
        folder = tmp_path_factory.mktemp("unbroken")
        return folder, train.main([*flags, "--checkpoint-dir", str(folder)])
    return run


def test_main_learns_and_says_what_it_does(capsys):
    """The result is that of all 2,000 test images; devices, version and origin are printed first.
    Catches a silent run on a CPU (case T25), a result of one batch."""
    result = train.main("--dataset synthetic --hidden 64 --epochs 3 --batch-size 96".split())
    first, origin, *_ = capsys.readouterr().out.splitlines()
    assert jax.devices()[0].device_kind in first and jax.__version__ in first
    assert "synthetic" in origin and result["confusion"].sum() == 2000
    assert 0.8 < result["accuracy"] == np.trace(result["confusion"]) / 2000


@pytest.mark.parametrize("every, times", [(5, 1), (3, 2)])
def test_a_run_compiles_the_step_and_the_evaluation_once(every, times):
    """JAX tells of each compilation; a shorter last interval costs one more in the whole run (T02).
    Catches ragged batches, a state that is not placed at first, or comes back changed."""
    compiled = collections.Counter()

    def hear(event, _, fun_name=None, **_about):
        compiled[fun_name] += event.endswith("backend_compile_duration")

    train.evaluate_batch.clear_cache()
    jax.monitoring.register_event_duration_secs_listener(hear)
    try:
        train.main([*TINY, "--log-every", str(every)])
    finally:
        jax.monitoring.unregister_event_duration_listener(hear)
    assert compiled["jit(train_steps)"] == times and compiled["jit(evaluate_batch)"] == 1


def test_main_is_a_plain_loop_with_the_documented_recipe(unbroken):
    """AdamW (b2 0.95, decay on weights), warmup of a tenth, cosine to 0, smoothing 0.1, order by
    (seed, epoch): written out as a loop, it ends in main's parameters. Catches another recipe."""
    folder, _ = unbroken(*TINY, "--log-every", "4", "--seed", "3", "--weight-decay", "0.3")
    optimizer = optax.adamw(
        lambda n: 2e-3 * jnp.where(n < 2, n / 2, (1 + jnp.cos(jnp.pi * (n - 2) / 18)) / 2),
        b2=0.95, weight_decay=0.3, mask=[{"w": True, "b": False}] * 2)
    params = train.init_mlp(jax.random.key(3), [784, 8, 10])
    opt_state, dataset = optimizer.init(params), data.synthetic(3, 10_000, 2_000)

    @jax.jit
    def step(params, opt_state, batch):
        def smooth_loss(params):
            logits = train.mlp(params, batch["image"])
            targets = 0.9 * jax.nn.one_hot(batch["label"], 10) + 0.01
            return -(targets * jax.nn.log_softmax(logits)).sum(axis=1).mean()

        updates, opt_state = optimizer.update(jax.grad(smooth_loss)(params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for epoch in range(2):
        for batch in data.batches(dataset["train"], 1000, seed=3, epoch=epoch):
            batch["image"] = batch["image"].reshape(-1, 784) / np.float32(255)
            params, opt_state = step(params, opt_state, batch)
    saved = checkpoint.load_checkpoint(folder / "step_20.npz", {"params": params}, partial=True)
    for a, e in zip(jax.tree.leaves(saved["params"]), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(a, e, atol=1e-5)


@pytest.mark.parametrize("saves, written", [(1, True), (2, True), (2, False), (4, True)])
def test_resumed_equals_unbroken(saves, written, unbroken, tmp_path, monkeypatch):
    """Ctrl-C at a save, amid or at the end of an epoch, is one line; resumed, the run ends in the
    same bits (C01, C02). Catches lost moments, counts or steps, an epoch that starts over."""
    whole, result = unbroken(*TINY)
    save, seen = checkpoint.save_checkpoint, []

    def interrupted(path, tree):
        seen.append(path)
        if written or len(seen) < saves:
            save(path, tree)
        if len(seen) == saves:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_checkpoint", interrupted)
        with pytest.raises(SystemExit, match="^minijax_train.py: interrupted; --resume goes on.*$"):
            train.main([*TINY, "--checkpoint-dir", str(tmp_path)])
    again = train.main([*TINY, "--checkpoint-dir", str(tmp_path), "--resume"])
    np.testing.assert_equal(last_state(tmp_path), last_state(whole))
    np.testing.assert_equal(again, result)


def test_a_killed_process_resumes_to_the_same_bits(unbroken, tmp_path, capsys):
    """A real process, killed in the middle; its newest checkpoint is then cut short, and named.
    Catches whatever only a clean exit would have written, damage that is not passed over."""
    flags = [*TINY, "--epochs", "8", "--log-every", "2"]  # 40 saves for 4
    process = start("minijax_train.py", *flags, "--checkpoint-dir", str(tmp_path),
                    devices=jax.device_count())
    while not list(tmp_path.glob("step_*.npz")) and process.poll() is None:
        time.sleep(0.02)
    process.kill()
    assert result_of(process)[2] == -signal.SIGKILL
    newest = checkpoint.latest_checkpoint(tmp_path)
    newest.write_bytes(newest.read_bytes()[:-9])
    train.main([*flags, "--checkpoint-dir", str(tmp_path), "--resume"])
    assert f"{newest.name} is damaged" in capsys.readouterr().err
    np.testing.assert_equal(last_state(tmp_path), last_state(unbroken(*flags)[0]))


@pytest.mark.parametrize("flags, words", [
    ([], "holds checkpoints: add --resume"), (["--resume", "--seed", "1"], "seed 0, expected 1"),
    (["--resume", "--epochs", "3"], "epochs 2, expected 3"),
    (["--resume", "--batch-size", "500"], "batch_size 1000, expected 500"),
    (["--resume", "--learning-rate", "0.5"], "learning_rate 0.002, expected 0.5"),
    (["--resume", "--weight-decay", "0"], "weight_decay 0.1, expected 0.0"),
    (["--resume", "--hidden", "9"], r"0/b is float32\[8\] there, expected float32\[9\]")])
def test_a_resumed_run_is_the_same_run(flags, words, unbroken):
    """What schedule, order or shapes depend on is compared. Catches a setting that is not."""
    with pytest.raises(SystemExit, match=words):
        train.main([*TINY, "--checkpoint-dir", str(unbroken(*TINY)[0]), *flags])


@pytest.mark.parametrize("flags, words", [
    (["--batch-size", "0"], "--batch-size: invalid int in 1..2147483647 value: '0'"),
    (["--learning-rate", "nan"], "--learning-rate: invalid float in 0..1e+30 value: 'nan'"),
    (["--epochs", "x"], "--epochs"), (["--seed", "4294967296"], "--seed"), (["--frob"], "--frob"),
    (["--hidden"], "--hidden"), (["--resume"], "--resume needs --checkpoint-dir"),
    (["--dataset", "mnist"], "--dataset"), (["--data-dir", "/nowhere"], "/nowhere"),
    (["--data-dir", "/nowhere", "--plot", "x.png"], "matplotlib"),  # before anything is loaded
    ([*TINY, "--batch-size", "20000"], "--batch-size 20000"),
    ([*TINY, "--checkpoint-dir", "/dev/null/x"], "/dev/null/x"),
    ([*TINY, "--learning-rate", "1e30"], "at step"),
    ([*TINY, "--learning-rate", "1e30", "--batch-size", "10000", "--epochs", "1"], "the test loss"),
    ([*TINY, "--hidden", "2000000000"], "emory"), ([*TINY, "--distributed"], "istributed")])
def test_a_users_mistake_is_one_line(flags, words, capsys, monkeypatch):
    """A status other than 0 and one line on stderr that names what was given.
    Catches tracebacks, usage, a result that is no number, a picture that cannot be drawn later."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit) as exit_:
        train.main(flags)
    message = capsys.readouterr().err or str(exit_.value.code)
    assert exit_.value.code not in (0, None) and words in message
    assert message.startswith("minijax_train.py: ") and len(message.strip().splitlines()) == 1


def test_the_table_and_the_picture_show_the_matrix():
    """Rows are true classes, columns predictions, in both. Catches a transposed one."""
    confusion, names = np.array([[50, 7, 0], [1, 40, 2], [0, 9, 30]]), ["ant", "bee", "cat"]
    said, *lines = train.confusion_table(confusion, names).splitlines()
    rows = [[name, *map(str, row)] for name, row in zip(names, confusion)]
    assert said.startswith("rows: true") and [line.split() for line in lines] == [names, *rows]
    figure = mock.MagicMock()
    axes = figure.Figure.return_value.subplots.return_value
    with mock.patch.dict(sys.modules, {"matplotlib": figure, "matplotlib.figure": figure}):
        train.plot_confusion(confusion, names, "x.png")
    np.testing.assert_array_equal(axes.imshow.call_args.args[0], confusion)  # row 0 on top
    drawn = {call.args[:2]: call.args[2] for call in axes.text.call_args_list}
    assert drawn == {(x, y): confusion[y, x] for x in range(3) for y in range(3)}
    assert axes.set.call_args.kwargs == {"xlabel": "predicted class", "ylabel": "true class"}
    axes.figure.savefig.assert_called_once()


def assert_equals_one_run(folder, printed, whole, alone):
    """The newest checkpoint and the result, as printed, are those of that run, but for rounding."""
    accuracy, count = map(float, printed.split())
    assert count == 2000 and abs(accuracy - alone["accuracy"]) < 0.005
    a, e = last_state(folder), last_state(whole)
    assert a.keys() == e.keys()
    for name in a.keys() - {"settings/dataset"}:
        np.testing.assert_allclose(a[name], e[name], atol=1e-5)


PRINT_RESULT = """
result = minijax_train.main()
print(result["accuracy"], result["confusion"].sum())
"""
SHARDED = """
import data, minijax_train
spread, to_device = set(), data.to_device
def look(iterator, sharding):
    for batch in to_device(iterator, sharding):
        image = batch["image"]
        spread.add((len(image.sharding.device_set), image.sharding.shard_shape(image.shape)))
        yield batch
data.to_device = look
""" + PRINT_RESULT + """
assert spread == {(4, (26, 784)), (4, (5, 26, 28, 28)), (4, (1, 26, 28, 28))}, spread
"""


def test_a_run_on_four_devices_equals_one_on_fewer(unbroken, tmp_path):
    """Each device has its quarter of the rows, and the run the same end.
    Catches means of the shards' means, gradients that are reduced twice, replicated work."""
    flags = [*TINY, "--batch-size", "104", "--epochs", "1"]
    process = start("-c", SHARDED, *flags, "--checkpoint-dir", str(tmp_path), devices=4)
    out, err, code = result_of(process)
    assert code == 0 and not err, err
    assert_equals_one_run(tmp_path, out.splitlines()[-1], *unbroken(*flags))


def test_two_processes_equal_one(unbroken, tmp_path):
    """Two real processes, gone on from one's checkpoint, end in that one's parameters and result.
    Catches overlapping shares, two that print or write."""
    shutil.copy(unbroken(*TINY)[0] / "step_10.npz", tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    both = [start("-c", "import minijax_train" + PRINT_RESULT, *TINY, "--checkpoint-dir",
                  str(tmp_path), "--resume", "--distributed", JAX_COORDINATOR_ADDRESS=address,
                  JAX_NUM_PROCESSES="2", JAX_PROCESS_ID=str(k)) for k in range(2)]
    (out, err, code), (out_1, err_1, code_1) = map(result_of, both)
    assert code == code_1 == 0, err + err_1
    lines, other = ([line for line in text.splitlines() if line[:6] != "[Gloo]"]  # that is from C++
                    for text in (out, out_1))
    assert lines[0].startswith("2 x cpu") and other == lines[-1:]  # the same result
    assert_equals_one_run(tmp_path, other[0], *unbroken(*TINY))


ALONE = """
import sys
from jax._src import xla_bridge
names = ["attention", "checkpoint", "data", "minijax_train", "decoder"]
for name in names:
    sys.modules.update(dict.fromkeys(names))  # None: must not be imported
    for allowed in {name, "attention" if name == "decoder" else name}:
        del sys.modules[allowed]
    __import__(name)
    assert not xla_bridge._backends, name + " touched a device"
"""


def test_files_work_alone_and_importing_touches_no_device():
    """Each imports with nothing beside it (decoder.py with attention.py), and wakes no device.
    Catches a sibling imported at the top, an array made there."""
    _, err, code = result_of(start("-c", ALONE))
    assert code == 0 and not err, err


def test_the_real_data_trains():
    """An epoch passes 80 % of 10,000 test images, 1,000 of each class. Catches labels shuffled."""
    try:
        data.load_fashion_mnist(download=False)
    except OSError:
        pytest.skip("no Fashion-MNIST: apt install dataset-fashion-mnist, or python data.py")
    result = train.main(["--epochs", "1", "--hidden", "64"])
    assert 0.8 < result["accuracy"] < 0.95
    assert result["confusion"].sum(axis=1).tolist() == [1000] * 10


BATCH = {"w": np.arange(3.0), "n": 4}


def test_damage_is_refused_or_harmless_never_garbage(tmp_path, capsys):
    """Each truncation, one bit flipped in each byte, other files: a ValueError or the same tree.
    Catches garbage read as parameters, a damaged file taken for the latest, zipfile's errors."""
    path, refused = tmp_path / "step_1.npz", 0
    checkpoint.save_checkpoint(path, BATCH)
    whole = path.read_bytes()
    flipped = [whole[:at] + bytes([byte ^ 1 << at % 8]) + whole[at + 1:]
               for at, byte in enumerate(whole)]
    for content in [b"no archive", *(whole[:cut] for cut in range(len(whole))), *flipped]:
        path.write_bytes(content)
        try:
            loaded = checkpoint.load_checkpoint(path, BATCH)
            assert loaded["w"].tolist() == [0, 1, 2] and loaded["n"] == 4
        except ValueError as error:
            refused += 1
            assert "step_1.npz is damaged" in str(error)
            assert checkpoint.latest_checkpoint(tmp_path) is None
            assert "step_1.npz is damaged" in capsys.readouterr().err
    assert refused > len(whole) * 1.5


def test_latest_is_the_newest_whole_one_by_number(tmp_path, capsys):
    """step_10 beats step_9; damage is named and passed over (C06). Catches order as text, and
    other names taken."""
    assert checkpoint.latest_checkpoint(tmp_path / "absent") is None
    with pytest.raises(OSError, match="absent"):
        checkpoint.load_checkpoint(tmp_path / "absent", BATCH)
    for step in (9, 10, 12):
        checkpoint.save_checkpoint(tmp_path / f"step_{step}.npz", BATCH)
    (tmp_path / "step_12.npz").write_bytes((tmp_path / "step_12.npz").read_bytes()[:100])
    whole = (tmp_path / "step_9.npz").read_bytes()
    for name in ("step_99.npz.5.tmp", "step_98_best.npz", "step_.npz", "xstep_97.npz"):
        (tmp_path / name).write_bytes(whole)
    assert checkpoint.latest_checkpoint(tmp_path) == tmp_path / "step_10.npz"
    assert "step_12.npz is damaged" in capsys.readouterr().err


def test_bytes_are_on_the_disk_before_the_name(tmp_path, monkeypatch):
    """fsync sees the whole file, under a name of this save's own.
    Catches a missing flush, a rename before it, a temporary name that two savers share."""
    seen, path = [], tmp_path / "c.npz"
    monkeypatch.setattr(os, "fsync", lambda fd: seen.append(
        (os.fstat(fd).st_size, path.exists(), [*tmp_path.iterdir()])))
    for _ in range(2):
        checkpoint.save_checkpoint(path, BATCH)
        size = path.stat().st_size
        path.unlink()
    assert [now[:2] for now in seen] == [(size, False)] * 2 and seen[0][2] != seen[1][2]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space"), OSError("odd"), KeyboardInterrupt()])
def test_a_save_that_fails_leaves_the_old_file_alone(failing, error, tmp_path, monkeypatch):
    """The old checkpoint stays, and an OSError names the path (case P12).
    Catches writing in place, a temporary file left."""
    path = tmp_path / "c.npz"
    checkpoint.save_checkpoint(path, BATCH)

    def fail(*_):
        raise error

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(type(error)) as caught:
        checkpoint.save_checkpoint(path, {**BATCH, "n": 5})
    assert isinstance(error, KeyboardInterrupt) or str(path) in str(caught.value)
    assert checkpoint.load_checkpoint(path, BATCH)["n"] == 4
    assert [file.name for file in tmp_path.iterdir()] == ["c.npz"]


def test_a_tilde_is_a_home_or_an_error(tmp_path, monkeypatch):
    """A home that is not known is named. Catches a file or folder called ~ (case P11)."""
    monkeypatch.chdir(tmp_path)
    for take in (checkpoint.latest_checkpoint, lambda path: checkpoint.save_checkpoint(path, BATCH),
                 lambda path: checkpoint.start_or_resume(path, STATE, SETTINGS, False)):
        with pytest.raises(ValueError, match="no home folder is known for ~nobody-here"):
            take("~nobody-here/c.npz")
    assert not [*tmp_path.iterdir()]
    monkeypatch.setenv("HOME", str(tmp_path))
    checkpoint.save_checkpoint("~/c.npz", BATCH)
    assert checkpoint.load_checkpoint(tmp_path / "c.npz", BATCH)["n"] == 4


STATE = {"params": {"w": np.ones(2)}, "step": 4, "ema": 0.5}
SETTINGS = {"seed": 3, "learning_rate": 0.002, "data": "books"}


def test_everything_in_the_state_comes_back(tmp_path):
    """Keys, averages and the step as an int (case L03); without a folder nothing is saved.
    Catches what else the state holds lost."""
    assert checkpoint.start_or_resume(None, STATE, SETTINGS, True) == (STATE, None)
    fresh = {**STATE, "key": jax.random.key(7)}
    state, save = checkpoint.start_or_resume(tmp_path / "a" / "b", fresh, SETTINGS, True)
    assert state is fresh
    save({**STATE, "step": 9, "ema": 0.25, "key": jax.random.key(8)})
    state, _ = checkpoint.start_or_resume(tmp_path / "a" / "b", fresh, SETTINGS, True)
    assert state.keys() == fresh.keys() and type(state["step"]) is int and state["step"] == 9
    assert state["ema"] == 0.25 and jax.random.key_data(state["key"])[1] == 8
    with pytest.raises(TypeError, match="settings"):
        checkpoint.start_or_resume(tmp_path, {**STATE, "settings": 1}, SETTINGS, True)


def test_the_newest_three_are_kept_and_damaged_newer_ones_do_no_harm(tmp_path):
    """Old ones and leftovers of kills go. Catches pruning from the end, and foreign files lost."""
    _, save = checkpoint.start_or_resume(tmp_path, STATE, {}, False)
    for name in ("step_7.npz", "step_8.npz", "step_9.npz", "step_3.npz.9.tmp", "step_1_best.npz"):
        (tmp_path / name).write_bytes(b"damaged")
    for step in (1, 2, 3, 4):
        save({**STATE, "step": step})
    numbers = [2, 3, 4, 7, 8, 9]
    assert {file.name for file in tmp_path.iterdir()} == {
        "step_1_best.npz", *(f"step_{number}.npz" for number in numbers)}
    assert checkpoint.latest_checkpoint(tmp_path) == tmp_path / "step_4.npz"


def test_parameters_that_are_not_finite_are_not_saved(tmp_path):
    """Before anything is written. Catches a diverged run that replaces its last good checkpoint."""
    _, save = checkpoint.start_or_resume(tmp_path, STATE, {}, False)
    with pytest.raises(FloatingPointError, match="not finite after step 4"):
        save({**STATE, "params": [jax.random.key(0), jax.numpy.array([1, np.inf], "bfloat16")]})
    assert not [*tmp_path.iterdir()]


def test_processes_see_the_same_and_the_first_writes(tmp_path, monkeypatch):
    """A folder that is not shared is an error everywhere. Catches a wait, a second writer."""
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    other = np.array(-1)
    gather = lambda mine: np.array([mine, other])  # noqa: E731
    monkeypatch.setattr(checkpoint.multihost_utils, "process_allgather", gather)
    checkpoint.start_or_resume(tmp_path, STATE, {}, True)[1](STATE)
    assert not [*tmp_path.iterdir()]
    other = np.array(7)
    with pytest.raises(ValueError, match="processes see different checkpoints"):
        checkpoint.start_or_resume(tmp_path, STATE, {}, True)


# ---- data.py: files, mirrors, processes ----

NAMES = list(data.FILES)
RNG = np.random.RandomState(0)
SMALL = {name: RNG.randint(0, 256 if len(shape) == 3 else 10, shape).astype(np.uint8)
         for name, shape in zip(NAMES, [(12, 28, 28), (12,), (7, 28, 28), (7,)])}
RAW = {name: bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
       + array.tobytes() for name, array in SMALL.items()}
PACKED = {name: gzip.compress(raw) for name, raw in RAW.items()}
HASHES = {name: hashlib.sha256(raw).hexdigest() for name, raw in RAW.items()}
LONGEST = len(RAW[NAMES[0]])


@pytest.fixture
def small(monkeypatch, tmp_path):
    """data.py with four small files to look for, none of them anywhere; gives an empty folder."""
    constants = {"FILES": HASHES, "LONGEST": LONGEST, "DEBIAN_FOLDER": tmp_path / "debian",
                 "SILENT_SECONDS": 0.3, "SLOW_SECONDS": 0.2, "SLOW_BYTES_PER_SECOND": 1000}
    variables = {"XDG_CACHE_HOME": "", "HOME": str(tmp_path), "MINIJAX_DATA": "", "no_proxy": "*"}
    for name, value in constants.items():
        monkeypatch.setattr(data, name, value)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fill(folder, names=NAMES):
    folder.mkdir(parents=True)
    for name in names:
        (folder / f"{name}.gz").write_bytes(PACKED[name])
    return folder


def load(data_dir=None, mirrors=()):
    """Loads the small files, checks every array, dtype included, and gives the origin."""
    dataset = data.load_fashion_mnist(data_dir, mirrors=mirrors)
    arrays = [dataset[part][key] for part in ("train", "test") for key in ("image", "label")]
    for array, right in zip(arrays, SMALL.values(), strict=True):
        np.testing.assert_array_equal(array, right, strict=True)
    assert set(dataset) == {"train", "test", "origin"}
    return dataset["origin"].removeprefix("Fashion-MNIST from ")


def good(name, connection):
    body = PACKED[name.removesuffix(".gz")]
    connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


@contextlib.contextmanager
def serve(reply=good):
    """A web server whose reply(name, socket) sends all: its address, the list of requests."""
    heads = []

    def handle(connection, address, server):
        heads.append(connection.recv(4096).decode())
        reply(heads[-1].split()[1].rpartition("/")[2], connection)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handle) as server:
        server.daemon_threads, server.handle_error = True, lambda *args: None  # clients that leave
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/some/folder/", heads
        server.shutdown()


def child(code, *arguments, **environment):
    """Starts `code` in a Python of its own, where `data` looks for the small files."""
    start = (f"import hashlib, os, random, runpy, signal, sys, time\nfrom pathlib import Path\n"
             f"import data\ndata.FILES, data.LONGEST = {HASHES!r}, {LONGEST}\n"
             f"data.DEBIAN_FOLDER = Path('nowhere')\n")
    path = os.pathsep.join([str(Path(data.__file__).parent), *sys.path])
    return subprocess.Popen([sys.executable, "-c", start + code, *map(str, arguments)], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            env={**os.environ, "PYTHONPATH": path, **environment})


@pytest.mark.parametrize("content", [PACKED, RAW])
@pytest.mark.parametrize("end", ["", ".gz"])
@pytest.mark.parametrize("dot", ["-idx", ".idx"])
def test_files_are_told_apart_by_their_first_bytes(small, content, end, dot):
    """gzip or raw, under a name with or without .gz, with a dash or a dot, all load.
    Catches trust in the name's ending, a dotted name that is not looked for."""
    for name in NAMES:
        (small / (name.replace("-idx", dot) + end)).write_bytes(content[name])
    assert load(small) == str(small)


def test_search_order(small, monkeypatch):
    """$MINIJAX_DATA, else the user's cache; Debian's folder; mirrors in order; file by file.
    Catches another order, a variable or ~ ignored, a download although there was a copy."""
    with serve() as (first, heads), serve() as (second, second_heads):
        mirrors = first, second
        home = fill(small / ".cache/minijax")
        for folder in "debian", "xdg/minijax", "mine":
            fill(small / folder)
        for variable, value, origin in [
                ("MINIJAX_DATA", "mine", "mine"), ("MINIJAX_DATA", "~/mine", f"{small}/mine"),
                ("MINIJAX_DATA", "", str(home)), ("XDG_CACHE_HOME", "xdg", str(home)),
                ("XDG_CACHE_HOME", f"{small}/xdg", f"{small}/xdg/minijax")]:
            monkeypatch.setenv(variable, value)
            assert load(None, mirrors) == origin
        (small / f"xdg/minijax/{NAMES[0]}.gz").unlink()
        assert load(None, mirrors) == f"{small}/debian, {small}/xdg/minijax"
        assert load("~/mine", mirrors) == f"{small}/mine"
        given = fill(small / "given", [])
        with pytest.raises(OSError):
            data.load_fashion_mnist(given, download=False, mirrors=mirrors)
        assert not heads
        assert load(given, mirrors) == f"{first[:-1]} (now in {given})"  # and not Debian's
        assert load(str(given), mirrors) == str(given) and len(heads) == 4 and not second_heads
        assert not any("user-agent: python-urllib" in head.lower() for head in heads)
        monkeypatch.setenv("MINIJAX_DATA", "~/new/and/deep")
        shutil.rmtree(small / "debian")
        load(None, first.rstrip("/"))  # a string is one mirror; slash or no slash
        assert sorted(os.listdir(small / "new/and/deep")) == sorted(NAMES)


@pytest.mark.parametrize("data_dir, variable, reason", [
    *[(bad, "", f"a folder that exists, got '{bad}'") for bad in ("absent", "file", "", "~/x")],
    (None, "~nobody-of-this-name/x", "MINIJAX_DATA or --data-dir"),
    ("~nobody-of-this-name/x", "", "MINIJAX_DATA or --data-dir")])
def test_the_folder_must_exist_or_have_a_home(small, monkeypatch, data_dir, variable, reason):
    """A data_dir that is no folder, or a ~ without a home folder, is an OSError that names it.
    Catches a typing mistake that becomes a new folder, a folder named ~, a fall back."""
    fill(small / "debian")
    (small / "file").write_bytes(b"")
    monkeypatch.setenv("MINIJAX_DATA", variable)
    with serve() as (mirror, heads), pytest.raises(OSError, match=reason):
        load(data_dir, [mirror])
    assert not heads and sorted(os.listdir(small)) == ["debian", "file"]


FIRST, FIRST_RAW = PACKED[NAMES[0]], RAW[NAMES[0]]
IMPOSTOR = FIRST_RAW[:-1] + bytes([FIRST_RAW[-1] ^ 1])  # one wrong pixel: only the hash can tell
DAMAGED = {  # kind: (bytes, words of the reason)
    "impostor": (gzip.compress(IMPOSTOR), "9424 bytes .gzip., expected [0-9a-f]{64}"),
    "impostor, raw": (IMPOSTOR, "9424 bytes .not gzip"),
    "no trailer": (FIRST[:-8], "gzip: cut"), "three bytes": (FIRST[:3], "gzip: cut"),
    "rubbish behind": (FIRST + b"more", "behind its end"),
    "bad checksum": (FIRST[:-8] + bytes(8), "incorrect data check"),
    "empty": (b"", "0 bytes .not gzip"), "page": (b"<!DOCTYPE", "not gzip, .*<!DOCTYPE")}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_copy_is_reported_and_passed_over(small, kind):
    """Wrong bytes are never used: a warning names the file, the next place serves, or an error.
    Catches trust in a name, size or header, half a download trusted for ever, a zlib.error."""
    raw, reason = DAMAGED[kind]
    cache = fill(small / "cache", NAMES[1:])
    (bad := cache / f"{NAMES[0]}.gz").write_bytes(raw)
    with pytest.warns(UserWarning, match=f"{bad}: .*({reason}).*delete it"), \
            pytest.raises(OSError, match=f"{bad}: .*({reason})") as caught:
        load(cache)
    assert "holds none" not in str(caught.value) and bad.read_bytes() == raw
    with serve() as (mirror, heads), pytest.warns(UserWarning, match=f"{bad}: "):
        load(cache, [mirror])
    assert len(heads) == 1
    assert load(cache) == str(cache)  # no warning now


def test_a_gzip_bomb_is_not_unpacked(small):
    """No more than the longest file's size plus one byte is unpacked.
    Catches gzip.decompress of anything."""
    (small / NAMES[0]).write_bytes(gzip.compress(bytes(1 << 26), 1))
    tracemalloc.start()
    with pytest.warns(UserWarning, match="too long"), pytest.raises(OSError):
        load(small)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


def send(*parts, pause=0.0):
    """A reply of these bytes, a pause after each; None: of nothing, until the client leaves."""
    def reply(name, connection):
        for part in parts:
            connection.recv(1) if part is None else connection.sendall(part)
            time.sleep(pause)
    return reply


OK = b"HTTP/1.0 200 OK\r\n\r\n"
FAULTS = {  # what mirrors do: (reply or address, words of the reason)
    "absent": (send(b"HTTP/1.0 404 No\r\n\r\n"), "HTTPError: .* 404"),
    "another dataset": (send(OK + gzip.compress(IMPOSTOR)), "wrong content"),
    "cut": (send(b"HTTP/1.0 200 OK\r\nContent-Length: 99999\r\n\r\n" + FIRST[:-9]), "gzip: cut"),
    "hangs up": (send(), "without response|closed|reset"),
    "no HTTP": (send(b"SSH-2.0-x\r\n"), "SSH-2.0"),
    "bad chunks": (send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nz\r\n"), "Incompl"),
    "silent": (send(None), "timed out"), "silent half-way": (send(OK + b"x", None), "timed out"),
    "fast, then slow": (send(OK + b"x" * 9000, *[b"x"] * 50, pause=0.1), "slower than 1000 bytes"),
    "endless": (send(OK, *[b"x" * 999] * 5000), "sends more than 18848 bytes"),
    "nobody": ("http://127.0.0.1:{port}/", "refused"), "no scheme": ("x", "unknown url type"),
    "no host": ("http://[/", "."), "port too large": ("http://127.0.0.1:99999999/", "."),
    "blank": ("http://a b/", "."), "long name": (f"http://{300 * 'x'}/", ".")}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_mirror_is_left_for_the_next(small, fault, capsys):
    """A bad mirror is asked once, then the next; the error lists every place, reasons, remedies.
    Catches no time limit, a mean rate since the start, an unexpected exception, rubbish kept."""
    reply, reason = FAULTS[fault]
    with socket.socket() as nobody, serve() as (mirror, heads), serve(reply) as (bad, asked):
        nobody.bind(("127.0.0.1", 0))  # bound, but it does not listen
        if isinstance(reply, str):
            bad = reply.format(port=nobody.getsockname()[1])
        with pytest.raises(OSError, match=rf"{NAMES[0]}\.gz: .*({reason})") as caught:
            load(None, [bad, "y"])
        for part in (f"{small}/.cache/minijax: holds none of {NAMES[0]}", f"{small}/debian: holds",
                     f"{bad.rstrip('/')}/{NAMES[0]}.gz: ", f"y/{NAMES[0]}.gz: ", "--data-dir",
                     "apt install dataset-fashion-mnist", "--dataset synthetic"):
            assert part in str(caught.value)
        assert os.listdir(small / ".cache/minijax") == []
        mirrors = [bad, mirror]
        assert load(None, mirrors).startswith(mirror[:-1])
        assert mirrors == [bad, mirror] and len(heads) == 4
        assert not any(name in head for name in NAMES[1:] for head in asked)
    assert sorted(os.listdir(small / ".cache/minijax")) == sorted(NAMES)
    assert capsys.readouterr().out == ""


def test_a_slow_mirror_that_is_fast_enough_is_waited_for(small):
    """Only silence and less than the named rate end a download, not its length.
    Catches a limit on the whole download, a rate counted from the wrong start."""
    parts = [FIRST[start:start + 1000] for start in range(0, len(FIRST), 1000)]
    cache = fill(small / "cache", NAMES[1:])
    with serve(send(OK, *parts, pause=0.06)) as (mirror, heads):
        load(cache, [mirror])


def test_limits_and_places_are_the_documented_ones():
    """The time limits, Debian's folder, and GitHub, Keras's copy, the dataset's own site, in order.
    Catches a limit shortened for a test and kept, a wrong address, another order."""
    assert (data.SILENT_SECONDS, data.SLOW_SECONDS, data.SLOW_BYTES_PER_SECOND) == (15, 30, 10_000)
    assert str(data.DEBIAN_FOLDER) == "/usr/share/datasets/fashion-mnist"
    assert data.MIRRORS == (
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        "https://storage.googleapis.com/tensorflow/tf-keras-datasets/",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/")


def test_a_failed_write_leaves_nothing_and_says_where(small, monkeypatch):
    """A full disk is an OSError that names the folder, and leaves no temporary file.
    Catches cleaning up only after success, a partial file under the final name."""
    def full(path, raw):
        path.open("wb").write(raw[:10])
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_bytes", full)
    with serve() as (mirror, heads), pytest.raises(OSError, match=f"No space .*{small}/.cache"):
        load(None, [mirror])
    assert os.listdir(small / ".cache/minijax") == []


def test_four_processes_at_once_and_kills_at_any_moment(small):
    """Four that fill one empty cache at once all succeed; one killed leaves nothing half written.
    Catches a shared temporary name, mkdir without exist_ok, writing under the final name."""
    code = """
write = Path.write_bytes
def slowly(path, raw):  # in halves, so that kills and meetings fall between them
    write(path, raw[:len(raw) // 2]), time.sleep(0.02)
    write(path, raw), time.sleep(0.02)
Path.write_bytes = slowly

def start(folder):
    pid = os.fork()
    if pid == 0:
        os.environ["MINIJAX_DATA"] = folder
        try:
            data.load_fashion_mnist(mirrors=[sys.argv[1]])
            os._exit(0)
        finally:  # with an error
            os._exit(1)
    return pid

for trial in range(6):
    pid = start("killed")
    time.sleep(random.Random(trial).uniform(0, 0.25))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    for file in Path("killed").glob("*-ubyte"):
        assert hashlib.sha256(file.read_bytes()).hexdigest() == data.FILES[file.name]
        file.unlink()
assert [os.waitpid(pid, 0)[1] for pid in [start("shared") for _ in range(4)]] == [0, 0, 0, 0]
"""
    with serve() as (mirror, heads):
        process = child(code, mirror)
        out, error = process.communicate(timeout=100)
        assert process.returncode == 0, error
    assert load("shared") == "shared" and sorted(os.listdir("shared")) == sorted(NAMES)


def test_the_real_files():
    """The real data loads and is what the world knows.
    Catches a wrong hash in the table, swapped files or axes."""
    if not data.DEBIAN_FOLDER.is_dir():
        pytest.skip("needs Debian's and Ubuntu's package dataset-fashion-mnist")
    dataset = data.load_fashion_mnist(data.DEBIAN_FOLDER, download=False)
    image, label = dataset["train"]["image"], dataset["train"]["label"]
    assert image.size + 16 == data.LONGEST
    assert [data.CLASS_NAMES[i] for i in label[:3]] == ["Ankle boot", "T-shirt/top", "T-shirt/top"]
    assert np.mean(image) / 255 == pytest.approx(0.2860, abs=5e-5)  # as everybody quotes


def test_data_main(small, capsys):
    """`python data.py` shows origin, counts and images.
    Catches a count of the wrong part, an image upside down."""
    data.main(["--data-dir", str(fill(small / "cache"))])
    lines = [f"Fashion-MNIST from {small}/cache", "", f"{'class':12}   train    test"]
    for label, name in enumerate(data.CLASS_NAMES):
        train, test = (SMALL[labels].tolist().count(label) for labels in NAMES[1::2])
        lines += [f"{name:12}{train:8}{test:8}"]
    for image, label in zip(SMALL[NAMES[0]][:4].tolist(), SMALL[NAMES[1]]):
        lines += ["", f"{data.CLASS_NAMES[label]}:"]
        lines += ["".join(" .:-=+*%#@"[pixel * 10 // 260] for pixel in row).rstrip()
                  for row in image[::2]]
    assert capsys.readouterr().out.splitlines() == lines


def test_data_works_alone_without_a_device(monkeypatch):
    """An ordinary user needs this file, no device, a read-only folder; a mistake is one line.
    Catches imports of siblings, arrays at import, writes, a download that cannot be kept."""
    code = """
if os.getuid() == 0:  # to whom modes mean nothing
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
train = data.load_fashion_mnist("whole", mirrors=sys.argv[1])["train"]
print(*[stacked["image"].shape for stacked in data.stack(data.batches(train, 4), 2)])
try:
    data.load_fashion_mnist("part", mirrors=sys.argv[1])
except OSError as error:
    print(error)
sys.argv[1:] = ["--data-dir", "absent"]
runpy.run_path("data.py", run_name="__main__")
"""
    with tempfile.TemporaryDirectory() as top, serve() as (mirror, heads):  # not pytest's: 0700
        monkeypatch.chdir(top)
        shutil.copy(data.__file__, "data.py")
        fill(Path("whole")), fill(Path("part"), NAMES[1:])
        for folder, mode in (".", 0o755), ("whole", 0o555), ("part", 0o555):
            os.chmod(folder, mode)
        process = child(code, mirror, PYTHONPATH="", JAX_PLATFORMS="none_such")
        out, error = process.communicate(timeout=100)
        os.chmod("whole", 0o755), os.chmod("part", 0o755), monkeypatch.undo()
    assert out.startswith("(2, 4, 28, 28) (1, 4, 28, 28)\n") and not heads
    assert "Permission denied: 'part" in out and process.returncode == 1
    assert error.splitlines()[1:] == [
        "data.py: data_dir must be a folder that exists, got 'absent'"]  # after "fetching"


def test_to_device_over_several_devices_and_processes():
    """Leaves lie where shardings, one for all or one each, say; each process brings its share.
    Catches a sharding ignored, data that each process has to hold whole, an uneven split."""
    code = """
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
rank = int(sys.argv[2])
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 2, rank)
mesh = jax.sharding.Mesh(jax.devices(), ("data",))
whole, keys = np.arange(120).reshape(2, 20, 3), jax.random.split(jax.random.key(0), 2)
rows, steps, same = (NamedSharding(mesh, P(*spec)) for spec in (["data"], [None, "data"], []))
batch = {"a": whole[0, 10 * rank:][:10], "b": whole[:, 10 * rank:][:, :10], "key": keys}
item, = data.to_device([batch], {"a": rows, "b": steps, "key": same})
for name, right, sharding in ("a", whole[0], rows), ("b", whole, steps):
    assert (item[name].shape, item[name].sharding) == (right.shape, sharding)
    assert len(item[name].addressable_shards) == 2
    for shard in item[name].addressable_shards:
        assert (shard.data == right[shard.index]).all()
assert item["key"].is_fully_replicated
assert all((shard.data == keys).all() for shard in item["key"].addressable_shards)
one, = data.to_device([{"a": whole[0, 10 * rank:][:10]}], rows)  # one for all leaves
assert (one["a"].sharding, one["a"].shape) == (rows, (20, 3))
try:
    list(data.to_device([{"a": np.zeros((19, 19))}], rows))
except ValueError as error:
    print(error)
"""
    with serve() as (address, _):  # a port that is free afterwards
        port = address.split(":")[2].split("/")[0]
    flag = "--xla_force_host_platform_device_count=2"
    for process in [child(code, port, rank, XLA_FLAGS=flag) for rank in (0, 1)]:
        out, error = process.communicate(timeout=100)
        assert process.returncode == 0 and "19" in out and "4" in out, error


# ---------------------------------------------------------------- python decoder.py

TINY_DECODER = ("--steps 4 --log-every 2 --layers 1 --model-dim 16 --heads 2 --kv-heads 1 "
                "--length 16 --batch-size 4 --tokens 5").split()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(a folder with text and checkpoints of a finished run, what the run returned)."""
    folder = tmp_path_factory.mktemp("decoder")
    (folder / "text").write_bytes(b"How much wood would a woodchuck chuck? " * 40)
    flags = [*TINY_DECODER, "--text", str(folder / "text"), "--checkpoint-dir", str(folder / "ck")]
    return folder, decoder.main(flags)


def test_command_trains_measures_and_writes(trained):
    """It returns the held-out bits per byte of the last tenth, by the model that it saved, and as
    many bytes as were asked for. Catches a measure of the training text, or of other parameters."""
    folder, result = trained
    text = np.fromfile(folder / "text", np.uint8)
    like = {"params": jax.eval_shape(lambda: decoder.init_decoder(
        jax.random.key(0), vocab_size=256, num_layers=1, model_dim=16, num_heads=2,
        num_kv_heads=1))}
    params = checkpoint.load_checkpoint(folder / "ck" / "step_4.npz", like, partial=True)["params"]
    windows = decoder.evaluation_windows(text, 1404, 16)
    bits = decoder.held_out_bits(params, windows)
    np.testing.assert_allclose(result["bits_per_byte"], bits, rtol=1e-6)
    assert 2 < result["bits_per_byte"] < 12 and len(result["written"]) == 5


def test_command_resumes_exactly(trained, tmp_path):
    """Resumed halfway, with no flag repeated, it ends with the same numbers and the same bytes.
    Catches a resume that loses the optimizer's state, its place in the text, or the sizes."""
    folder, result = trained
    shutil.copy(folder / "ck" / "step_2.npz", tmp_path)
    flags = ["--log-every", "2", "--tokens", "5", "--checkpoint-dir", str(tmp_path), "--resume"]
    assert decoder.main(flags) == result


def test_finished_run_only_writes(trained, monkeypatch):
    """With a finished folder it trains nothing, and goes on from the prompt as it is told to.
    Catches sizes asked for again, a prompt that is dropped, sampling flags without effect."""
    folder, result = trained
    monkeypatch.setattr(decoder, "train", None)
    flags = ["--checkpoint-dir", str(folder / "ck"), "--resume", "--tokens", "5"]
    assert decoder.main(flags) == {"written": result["written"]}
    asked, generate = [], decoder.generate
    monkeypatch.setattr(
        decoder, "generate", lambda *a, **k: asked.append((a, k)) or generate(*a, **k))
    more = "--prompt wood --temperature 0.5 --top-k 9 --top-p 0.8 --seed 3".split()
    written = decoder.main([*flags, *more])["written"]
    (params, prompt, count), options = asked[0]
    assert bytes(prompt[0]) == b"wood" and count == len(written) == 5
    assert (options["temperature"], options["top_k"], options["top_p"]) == (0.5, 9, 0.8)
    assert options["key"] != jax.random.key(3)  # with which parameters are drawn


@pytest.mark.parametrize("message, flags", [
    ("--resume needs", ["--resume"]), ("steps", ["--steps", "0"]), ("steps", ["--steps", "many"]),
    ("learning-rate", ["--learning-rate", "-1"]), ("learning-rate", ["--learning-rate", "nan"]),
    ("top-k", ["--top-k", "257"]), ("top-p", ["--top-p", "0"]), ("3", ["--kv-heads", "3"]),
    ("too few", ["--length", "100000000"]), ("30", ["--model-dim", "30", "--heads", "4"]),
    ("nonsense", ["--nonsense"]), ("nowhere", ["--text", "/nowhere"]),
    ("too few", ["--text", os.devnull])])
def test_command_mistakes_are_one_line(message, flags, capsys):
    """A user's mistake ends with one line and a failure, before training. Catches a traceback."""
    with pytest.raises(SystemExit) as error:
        decoder.main(flags)
    line = error.value.code if isinstance(error.value.code, str) else capsys.readouterr().err
    assert error.value.code not in (0, None) and line.strip().count("\n") == 0
    assert message in line and "decoder.py: " in line


def test_command_refuses_another_run(trained):
    """Settings that differ from the checkpoint's, and a folder in use, are named. Catches a resumed
    run that goes on with another recipe."""
    folder, _ = trained
    flags = ["--checkpoint-dir", str(folder / "ck"), "--tokens", "5"]
    with pytest.raises(SystemExit, match="steps"):
        decoder.main([*flags, "--resume", "--steps", "6"])
    with pytest.raises(SystemExit, match="--resume"):
        decoder.main([*flags, *TINY_DECODER])


def test_documentation_is_the_help_topics():
    """All topics in alphabetical order, the same in every process. Catches an order by hash."""
    from pydoc_data.topics import topics
    want = [line for name in sorted(topics) for line in topics[name].split("\n")]
    assert data.documentation().decode().split("\n") == want


def test_muon_makes_the_updates_of_matrices_orthogonal():
    """The first step of a layer's matrix, heads merged, has singular values near the learning rate
    (times sqrt(out / in) above 1); all else takes Adam's at a fifth of it; only matrices decay.
    Catches axes taken for others, layers or heads mixed, a rate or decay gone astray."""
    params = decoder.init_decoder(jax.random.key(0), vocab_size=23, num_layers=2, model_dim=16,
                                  num_heads=4, num_kv_heads=2, mlp_dim=20)
    optimizer = decoder.make_muon(lambda step: 0.1, 0.5)
    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda w: np.float32(rng.normal(size=w.shape)), params)
    updates, _ = jax.jit(lambda g: optimizer.update(g, optimizer.init(params), params))(grads)
    for (path, update), weight, grad in zip(
            jax.tree.leaves_with_path(updates), *map(jax.tree.leaves, (params, grads))):
        name = path[-1].key
        if name.startswith("w"):
            step = np.asarray(update + 0.05 * weight)[1]
            step = step.reshape((-1, 16) if name == "wo" else (len(step), -1))
            singular = np.linalg.svd(step, compute_uv=False)
            scale = max(1, step.shape[1] / step.shape[0]) ** 0.5
            assert 0.03 < singular.min() / scale and singular.max() / scale < 0.13
        else:
            want = -0.02 * (1 + 0.9 * 0.1 / 0.19) * np.sign(grad)  # Nesterov looks ahead
            np.testing.assert_allclose(update, want, rtol=1e-3)


TINY_BENCH = ("--rounds 1 --dataset synthetic --epochs 2 --batch-size 500 --hidden 8 "
              "--log-every 2").split()
TABLES = {  # names that its rows must hold, under one figure or another
    "train": {"minijax"}, "attention": {"blockwise", "xla", "naive", "MQA, 32 x 1 x 128"},
    "habits": {"reads every step", "donates its state", "matrix products alone"},
    "decoder": {"minijax", "bfloat16", "xz -9", "bz2 -9", "learning as it reads"}}


def frequencies(params, batch, **options):
    """The loss of a model that knows no more than how often a byte comes, for the decoder's."""
    losses = -jax.nn.log_softmax(params["output"].sum(axis=0))[batch["tokens"][:, 1:]]
    loss = losses.mean(where=batch["mask"])
    return loss, {"loss": loss, "tokens": batch["mask"].sum()}


@pytest.fixture
def bare(monkeypatch):
    """No peers, short lengths, a small decoder that has a short text and costs little."""
    small = {"steps": 2, "length": 8, "layers": 1, "model_dim": 8}
    monkeypatch.setattr(bench.util, "find_spec", lambda name: None)
    monkeypatch.setattr(bench, "LENGTHS", (8,))
    monkeypatch.setattr(bench, "LEAST", 0)
    monkeypatch.setattr(data, "documentation", lambda: b"ab" * 300)
    monkeypatch.setattr(decoder, "train", lambda args, init, text, devices: jax.jit(init)())
    monkeypatch.setattr(decoder, "generate", lambda params, prompt, count: prompt)
    monkeypatch.setattr(decoder, "loss_fn", frequencies)
    for name, value in small.items():
        monkeypatch.setitem(decoder.RECIPE, name, value)


@pytest.mark.parametrize("table", TABLES)
def test_a_table_is_measured_printed_and_returned(table, bare, capsys):
    """Every command returns the rows promised, prints each, and names the peers that are missing.

    Of bits per byte: to learn as it reads gains. Catches a row that is measured but not shown, a
    peer that is left out without a word.
    """
    rows, printed = bench.main([table, *TINY_BENCH]), capsys.readouterr().out
    assert TABLES[table] <= {row["name"] for row in rows}
    assert all(0 <= row["quartiles"][0] and np.isfinite(row["quartiles"]).all() for row in rows)
    assert all(f"{row['figure']:30} {row['name']} " in printed for row in rows)
    bits = {row["name"]: row["quartiles"][1] for row in rows if "bits" in row["figure"]}
    assert table != "decoder" or bits["learning as it reads"] < bits["minijax"]
    assert table == "habits" or "no torch (pip install torch)" in printed


def test_a_ratio_is_given_only_where_it_is_larger_than_its_spread():
    """Twice as slow in each round gives 2; now faster and now slower, or one round, gives None.
    Catches a ratio of medians, which does not know its spread, and one of a row to itself.
    """
    values = {("w", "a"): [1, 1, 2, 1], ("w", "b"): [2, 2, 4, 2], ("w", "c"): [3, 3, 6, 3],
              ("w", "d"): [0.5, 3, 1, 2], ("v", "a"): [1], ("v", "b"): [9]}
    assert [row["ratio"] for row in bench.to_rows(values)] == [None, 2, 3, None, None, None]


def test_tasks_run_in_turn_after_a_warm_up():
    """A B, then A B again for each round; the first two results are thrown away.
    Catches all rounds of A before those of B, and a warm-up that counts.
    """
    calls = []
    tasks = {name: lambda name=name: calls.append(name) or len(calls) for name in "AB"}
    assert bench.in_turn(tasks, 2) == {"A": [3, 5], "B": [4, 6]} and "".join(calls) == "ABABAB"


def constant_job(layers, x, y, steps, recipe):
    """A peer that has learnt all from the first epoch, which must hold whole batches of `x`."""
    return lambda rows: x[rows], lambda x: np.full(len(x), y[0])


@pytest.mark.parametrize("labels", [np.zeros(7, int), np.arange(7)], ids=["good", "poor"])
def test_a_peers_main_job_is_watched_by_what_it_prints(labels, tmp_path):
    """Accuracy, the time of an epoch, and to 90 % (inf: never), of a process without JAX.
    Catches a final line that counts as an epoch, and a 90 % that was not reached.
    """
    images, recipe = np.zeros((7, 28, 28)), {"batch_size": 3, "hidden": [], "epochs": 2, "seed": 0}
    np.savez(tmp_path / "a.npz", x=images, y=labels, test_x=images, test_y=labels)
    call = f"main_job(constant_job, {str(tmp_path / 'a.npz')!r}, {recipe})"
    call += "; sys.exit('jax' in sys.modules)"
    figures = bench.watch(bench.program(call, bench.main_job, constant_job))
    epoch, good, whole, accuracy = figures.values()
    assert accuracy == pytest.approx(1 if not labels.any() else 1 / 7) and 0 < epoch < whole
    assert (good < whole) if accuracy == 1 else good == np.inf


def test_a_peer_that_fails_is_an_error_not_a_row():
    """Catches a job that stopped, or said nothing, taken for one that was fast."""
    for call in "print('test accuracy', 0.5); sys.exit(3)", "pass":
        with pytest.raises(RuntimeError, match="exit code"):
            bench.watch(bench.program(call))


@pytest.mark.parametrize("argv", [[], ["habits", "--rounds", "0"], ["train", "--data-dir", "no"]],
                         ids=" ".join)
def test_a_users_mistake_with_bench_is_one_line(argv, capsys):
    """What cannot be done ends in one line that names the program.
    Catches a traceback or a page of usage.
    """
    with pytest.raises(SystemExit) as stop:
        bench.main(argv)
    line = stop.value.code if isinstance(stop.value.code, str) else capsys.readouterr().err
    assert line.startswith("bench.py: ") and line.strip().count("\n") == 0


# ---------------------------------------------------------------- README.md

SMALL_README = {  # what makes a block quick to run: fewer images, the same code
    "data.load_fashion_mnist()": "data.synthetic(0, 1000, 300)"}


def test_every_python_block_of_the_readme_runs(tmp_path, monkeypatch):
    """The blocks run one after the other, as they stand but for the number of images.
    Catches a name that was changed in a module and not in the README.
    """
    monkeypatch.chdir(tmp_path)
    readme = (Path(HERE) / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    names = {}
    for block in blocks:
        for text, smaller in SMALL_README.items():
            block = block.replace(text, smaller)
        exec(compile(block.replace("/tmp/", f"{tmp_path}/"), "README.md", "exec"), names)
    assert len(blocks) >= 4 and names["tokens"].shape == (1, 23)


def test_budgets_and_house_rules():
    """No class, no bare except, no assert outside the tests, and at most 100 columns.
    Catches what slips in when a line is added in a hurry.
    """
    for name in ("minijax_train", "checkpoint", "data", "attention", "decoder", "bench"):
        lines = (Path(HERE) / f"{name}.py").read_text().splitlines()
        assert lines[0] == "# SPDX-License-Identifier: MIT"
        assert all(len(line) <= 100 for line in lines)
        assert not [line for line in lines if re.match(r"\s*(class |assert |except:)", line)]
