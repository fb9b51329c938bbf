# SPDX-License-Identifier: MIT
"""Batches of one fixed shape from any arrays, and onto the device; then Fashion-MNIST.

    for batch in to_device(batches({"image": images, "label": labels}, 256, seed=0, epoch=0)):
        params, opt_state, metrics = train_step(params, opt_state, batch)

`jax.jit` compiles for each new shape: a last batch of 96 examples, not 256, would compile the step
a second time. So all batches have one shape: what is left over is dropped, or filled up and marked
in "mask". Importing this file touches no device; `python data.py` finds or fetches Fashion-MNIST.
"""
import argparse
import hashlib
import itertools
import math
import os
import sys
import time
import urllib.request
import warnings
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np


def batches(dataset, batch_size, *, seed=None, epoch=0, remainder="drop"):
    """Iterator over dicts of NumPy arrays [B, ...] of one shape, with "mask", bool [B], added.

    dataset: a dict of arrays [n, ...], n > 0, none called "mask"; all keys travel, dtypes are kept.
    Each example comes once: in the dataset's order or, if `seed` is given, in one that depends on
    (seed, epoch, n) alone, so that a resumed run sees the batches of the unbroken one. The examples
    after the last full batch are dropped ("drop", for training) or filled up with zeros where
    "mask" is False ("pad", for evaluation). Copies. What does not fit is a ValueError at the call.
    """
    arrays, count = _checked(dataset)  # "mask" among them, all True
    batch_size, epoch = _integer("batch_size", batch_size, 1), _integer("epoch", epoch, 0)
    if remainder not in ("drop", "pad"):
        raise ValueError(f"remainder must be 'drop' or 'pad', got {remainder!r}")
    if remainder == "drop" and count < batch_size:
        raise ValueError(f"batch_size {batch_size} exceeds the {count} examples: choose 'pad'")
    order = np.arange(count)
    if seed is not None:  # sort by random numbers, raw ones: NumPy promises never to change those
        key = np.array([_integer("seed", seed, 0), epoch], np.uint64)
        order = np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")
    stop = count - batch_size + 1 if remainder == "drop" else count  # where none starts

    def batch_from(start):
        rows = order[start:start + batch_size]
        batch = {name: array[rows] for name, array in arrays.items()}
        if missing := batch_size - len(rows):
            for name, part in batch.items():
                batch[name] = np.pad(part, [(0, missing)] + [(0, 0)] * (part.ndim - 1))
        return batch  # each [B, ...]

    return map(batch_from, range(0, stop, batch_size))


def stack(iterator, steps):
    """Iterator over stacks of `steps` batches, leaves [steps, ...]; the last one may be shorter."""
    steps, source = _integer("steps", steps, 1), iter(iterator)

    def stack_leaves(*leaves):  # JAX arrays by JAX: NumPy cannot hold PRNG keys
        return (jnp if isinstance(leaves[0], jax.Array) else np).stack(leaves)  # [steps, ...]

    groups = iter(lambda: list(itertools.islice(source, steps)), [])  # until one is empty
    return (jax.tree.map(stack_leaves, *group) for group in groups)


def to_device(iterator, sharding=None, size=2):
    """Iterator over the same batches as JAX arrays, `size` batches ahead of their use.

    No thread is involved: JAX dispatches asynchronously. A step returns before it has run, and
    while the device works on it, this loop reads and copies the batches to come.
    sharding: None (the default device), a `jax.sharding.Sharding`, or a pytree of them, a prefix of
    the batch's. If it spans several processes, each gives its own share of the global batch. Host
    arrays are copied: the source may refill its buffers. Errors are raised when met, `size` ahead:
    the source's; ValueError for an axis that does not divide, or integers beyond JAX's 32 bits.
    """
    size, source = _integer("size", size, 0), iter(iterator)

    def place(leaf, sharding):
        if not isinstance(leaf, jax.Array):
            leaf = np.array(leaf)  # a copy of our own: JAX may read it later, or alias it for ever
            dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)  # int32 for int64, unless x64 is on
            if dtype != leaf.dtype and dtype.kind in "iu" and (leaf.astype(dtype) != leaf).any():
                raise ValueError(f"{leaf.min()} to {leaf.max()} do not fit JAX's {dtype}")
        if sharding is None:
            return jax.device_put(leaf)
        return jax.make_array_from_process_local_data(sharding, leaf)  # one process: it has all

    def generate():
        ready = []
        for batch in source:
            shardings = jax.tree.broadcast(sharding, batch, is_leaf=lambda s: s is None)
            ready.append(jax.tree.map(place, batch, shardings))
            if len(ready) > size:
                yield ready.pop(0)
        yield from ready

    return generate()


def documentation():
    """Python's help() topics in alphabetical order, newlines between: bytes."""
    from pydoc_data.topics import topics
    return "\n".join(topics[name] for name in sorted(topics)).encode()


def training_windows(text, batch_size, length, seed, step):
    """The batch of a step, a function of (seed, step): windows of length + 1 bytes anywhere."""
    starts = np.random.default_rng([seed, step]).integers(0, len(text) - length, batch_size)
    tokens = text[starts[:, None] + np.arange(length + 1)]  # [B, length + 1]
    return {"tokens": tokens, "mask": np.ones((batch_size, length), bool)}


def _checked(dataset):
    if not isinstance(dataset, dict) or "mask" in dataset:
        raise ValueError(f"expected a dict of arrays, none called 'mask', got {str(dataset)!r:.80}")
    arrays = {name: np.asarray(value) for name, value in dataset.items()}
    lengths = {array.shape[:1] for array in arrays.values()}  # one: {(n,)}
    kinds = {array.dtype.kind for array in arrays.values()}  # "O", "S", "U": objects and strings
    if len(lengths) != 1 or lengths & {(), (0,)} or kinds & {"O", "S", "U"}:
        got = {name: f"{array.dtype} {array.shape}" for name, array in arrays.items()}
        raise ValueError(f"expected arrays of numbers [n, ...] with one length n > 0, got {got}")
    count = max(lengths)[0]
    return {**arrays, "mask": np.ones(count, bool)}, count


def _integer(name, value, least):
    if type(value) is bool or not isinstance(value, int | np.integer) or not least <= value < 2**64:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    return int(value)


CLASS_NAMES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
               "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
FILES = {  # name: SHA-256 of the decompressed bytes, since archives of the same file differ
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"}
LONGEST = 47_040_016  # bytes of the longest of them: of what is longer the rest is not read
DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")  # of the package dataset-fashion-mnist
MIRRORS = ("https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
           "https://storage.googleapis.com/tensorflow/tf-keras-datasets/",
           "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/")  # no TLS: hashes do
SILENT_SECONDS, SLOW_SECONDS, SLOW_BYTES_PER_SECOND = 15, 30, 10_000  # then the next mirror's turn


def preprocess(images):
    """uint8 [..., 28, 28], NumPy or JAX, to float32 [..., 784] in [0, 1]: pixel / 255.

    On the device: uint8 is a quarter of the bytes to copy. Another dtype or shape: ValueError.
    """
    dtype, shape = getattr(images, "dtype", type(images)), getattr(images, "shape", ())
    if dtype != np.uint8 or shape[-2:] != (28, 28):
        raise ValueError(f"images must be uint8 [..., 28, 28], got {dtype} {shape}")
    flat = images.reshape(*shape[:-2], 784)  # [..., 784]
    return flat.astype(np.float32) / np.float32(255)  # NumPy's uint8 / 255 would be float64


def synthetic(seed, num_train, num_test):
    """Made-up data in the structure of `load_fashion_mnist`, said to be; a function of `seed`.

    An image is its class's pattern, mixed with at most as much of another's, under noise: easy to
    learn, with doubtful cases. Classes are balanced.
    """
    seed = _integer("seed", seed, 0)
    patterns = np.random.default_rng([seed, 0]).integers(0, 256, (10, 7, 7), np.uint16)
    patterns = patterns.repeat(4, axis=1).repeat(4, axis=2)  # [10, 28, 28]
    dataset = {"origin": f"synthetic, made up from seed {seed} (not Fashion-MNIST)"}
    for stream, part, count in (1, "train", num_train), (2, "test", num_test):
        count = _integer(f"num_{part}", count, 1)
        rng = np.random.default_rng([seed, stream])  # so num_train does not change the test images
        label = rng.permutation(np.arange(count) % 10).astype(np.uint8)  # [n]
        share = rng.integers(4, 9, (count, 1, 1), np.uint16)  # in eighths
        image = share * patterns[label] + (8 - share) * patterns[rng.integers(0, 10, count)]
        image = (image // 8 + rng.integers(0, 256, image.shape, np.uint16)) // 2  # [n, 28, 28]
        dataset[part] = {"image": image.astype(np.uint8), "label": label}
    return dataset


def load_fashion_mnist(data_dir=None, *, download=True, mirrors=MIRRORS):
    """All of Fashion-MNIST, every file from the first place that has a good copy of it.

    The places: the cache folder (`data_dir`, which must exist; else `$MINIJAX_DATA`; else minijax
    in the user's cache folder), which also keeps downloads; the folder of Debian's package, unless
    `data_dir` is given; `mirrors` (base addresses, to which `NAME.gz` is appended), if `download`.
    Returns {"train": {"image": uint8 [60000, 28, 28], "label": uint8 [60000]}, "test": the same of
    10000, "origin": str}, read-only. OSError lists the places tried and the remedies.
    """
    cache = os.environ.get("XDG_CACHE_HOME", "")
    cache = cache if os.path.isabs(cache) else "~/.cache"  # its specification: ignore it unless so
    cache = os.environ.get("MINIJAX_DATA") or os.path.join(cache, "minijax")
    cache = os.path.expanduser(cache if data_dir is None else data_dir)
    if str(cache).startswith("~"):  # no folder is ever named so
        raise OSError(f"no home folder for {cache}: name a folder by MINIJAX_DATA or --data-dir")
    if data_dir is not None and not os.path.isdir(cache):
        raise FileNotFoundError(f"data_dir must be a folder that exists, got {str(data_dir)!r}")
    folders = [Path(cache), DEBIAN_FOLDER] if data_dir is None else [Path(cache)]
    arrays, origins, tried = {}, {}, []
    mirrors = [mirrors] if isinstance(mirrors, str) else list(mirrors)  # ours, to strike off
    for name in FILES:
        raw, origin = _find(name, folders, mirrors if download else [], tried)
        arrays[name], origins[origin] = parse_idx(raw), None
    dataset = {"origin": "Fashion-MNIST from " + ", ".join(origins)}
    for part, (image, label) in ("train", list(FILES)[:2]), ("test", list(FILES)[2:]):
        dataset[part] = {"image": arrays[image], "label": arrays[label]}
    return dataset


def parse_idx(raw):
    """The array in a (decompressed) IDX file of unsigned bytes: uint8, a view of `raw`.

    Format (yann.lecun.com/exdb/mnist): 0, 0, 8 (the type), number of axes; the lengths as
    big-endian uint32; the data, row-major. ValueError unless `raw` is exactly that.
    """
    start = 4 + 4 * int.from_bytes(raw[3:4], "big")
    shape = tuple(int.from_bytes(raw[i:i + 4], "big") for i in range(4, start, 4))
    if raw[:3] != b"\0\0\x08" or len(raw) != start + math.prod(shape):
        raise ValueError(f"expected IDX (00 00 08 ...), got {len(raw)} bytes: {raw[:16].hex(' ')}")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def _find(name, folders, mirrors, tried):
    """(decompressed bytes, origin) of the first good copy; reasons against others go to `tried`."""
    names = [stem + end for end in ("", ".gz") for stem in (name, name.replace("-idx", ".idx"))]
    for folder in folders:
        copies = [folder / n for n in names if os.path.exists(folder / n)]
        tried += [] if copies else [f"{folder}: holds none of {', '.join(names)}"]
        for copy in copies:
            try:
                return _verified(name, copy.read_bytes()), str(folder)
            except (OSError, ValueError, zlib.error) as error:
                tried.append(f"{copy}: {error}")
                warnings.warn(f"{tried[-1]}; ignored, better delete it", stacklevel=3)
    for mirror in list(mirrors):
        url = f"{mirror.rstrip('/')}/{name}.gz"
        try:
            return _fetch(name, url, folders[0]), f"{mirror.rstrip('/')} (now in {folders[0]})"
        except Exception as error:  # of any kind: addresses and servers are wrong in many ways
            tried.append(f"{url}: {type(error).__name__}: {error}")
            mirrors.remove(mirror)  # a dead one costs its wait once, not for every file
    places = "\n  ".join([f"no good copy of {name}:", *tried, "mirrors: none left to ask"])
    raise OSError(f"{places}\nRemedies: apt install dataset-fashion-mnist (Debian, Ubuntu); "
                  "--data-dir FOLDER that has the four files; --dataset synthetic")


def _verified(name, raw):
    """The decompressed bytes of a copy of `name`; ValueError or zlib.error says what is wrong."""
    data, kind = raw, f"not gzip, it starts with {raw[:20]!r}"
    if raw[:2] == b"\x1f\x8b":  # names tell nothing: browsers and proxies decompress on the way
        unzip = zlib.decompressobj(wbits=31)  # 31: gzip, with header and checksum
        data, kind = unzip.decompress(raw, LONGEST + 1), "gzip"  # no more: it may be a bomb
        if not unzip.eof or unzip.unused_data:
            raise ValueError("damaged gzip: cut, too long, or with other bytes behind its end")
    if hashlib.sha256(data).hexdigest() != FILES[name]:
        raise ValueError(f"wrong content, {len(data)} bytes ({kind}), expected {FILES[name]}")
    return data


def _fetch(name, url, folder):
    """Downloads, verifies and keeps a file (decompressed, to start faster), or raises."""
    print(f"data.py: fetching {url}", file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"{name}.{os.getpid()}.{time.time_ns()}.tmp"  # nobody sees half a file
    temporary.touch()  # if the folder is not writable, better known before the download than after
    try:
        request = urllib.request.Request(url, headers={"User-Agent": "minijax"})  # not urllib's
        raw, start, before = bytearray(), time.monotonic(), 0
        with urllib.request.urlopen(request, timeout=SILENT_SECONDS) as response:
            while chunk := response.read1(1 << 16):  # what there is: `read` would wait for it all
                raw += chunk
                if len(raw) > 2 * LONGEST:  # no copy, packed or not, is longer
                    raise OSError(f"sends more than {2 * LONGEST} bytes")
                seconds = time.monotonic() - start
                if seconds > SLOW_SECONDS:
                    if len(raw) - before < SLOW_BYTES_PER_SECOND * seconds:
                        raise TimeoutError(f"slower than {SLOW_BYTES_PER_SECOND} bytes/s")
                    start, before = time.monotonic(), len(raw)
        data = _verified(name, bytes(raw))
        temporary.write_bytes(data)
        os.replace(temporary, folder / name)
        return data
    finally:
        temporary.unlink(missing_ok=True)


def main(argv=None):
    """Find or fetch Fashion-MNIST, verify it, show its classes and a few images."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--data-dir", help="where to look and to keep downloads; must exist")
    try:
        dataset = load_fashion_mnist(parser.parse_args(argv).data_dir)
    except OSError as error:
        sys.exit(f"data.py: {error}")
    print(f"{dataset['origin']}\n\n{'class':12}{'train':>8}{'test':>8}")
    counts = [np.bincount(dataset[part]["label"], minlength=10) for part in ("train", "test")]
    for name, train, test in zip(CLASS_NAMES, *counts):
        print(f"{name:12}{train:8}{test:8}")
    for image, label in zip(dataset["train"]["image"][:4], dataset["train"]["label"]):
        print(f"\n{CLASS_NAMES[label]}:")
        for row in image[::2]:  # every other row, since a character is twice as high as wide
            print("".join(" .:-=+*%#@"[value // 26] for value in row).rstrip())


if __name__ == "__main__":
    main()
