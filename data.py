# SPDX-License-Identifier: MIT
"""Fashion-MNIST, checked byte for byte, as NumPy arrays, as batches of one fixed shape, and on the device.

    python data.py                       fetch the files, verify them, show what is in them
    python data.py --data-dir FOLDER     the same, with FOLDER as the place to look and to keep downloads

    dataset = load_fashion_mnist()
    for batch in to_device(batches(dataset["train"], 256, seed=0, epoch=0)):
        x = preprocess(batch["image"])   # [256, 784]

Images stay uint8 until `preprocess`, which can run on the device: a quarter of float32's bytes to gather and
to copy. Importing this file touches no device.
"""
import argparse
import contextlib
import gzip
import hashlib
import io
import itertools
import math
import os
import queue
import sys
import threading
import time
import urllib.request
import uuid
import warnings
import zlib
from pathlib import Path

import jax
import numpy as np

CLASS_NAMES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
               "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
FILES = {  # name: (size, SHA-256), both of the decompressed bytes, since archives of the same file differ
    "train-images-idx3-ubyte": (47040016, "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888"),
    "train-labels-idx1-ubyte": (60008, "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"),
    "t10k-images-idx3-ubyte": (7840016, "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b"),
    "t10k-labels-idx1-ubyte": (10008, "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"),
}
DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")  # where its package dataset-fashion-mnist puts them
MIRRORS = ("https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
           "https://storage.googleapis.com/tensorflow/tf-keras-datasets/",
           "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/")  # no TLS: the hash makes it safe
SILENT_SECONDS = 15  # a mirror that sends nothing for so long is left for the next one,
SLOW_SECONDS, SLOW_BYTES_PER_SECOND = 30, 10_000  # and so is one that is slower than this over so long
LEFTOVER_SECONDS = 300  # a temporary file this much older than a finished one is a killed process's


def load_fashion_mnist(data_dir=None, *, download=True, mirrors=MIRRORS):
    """All of Fashion-MNIST, every file from the first place that has a good copy of it.

    The places: the cache folder (`data_dir`, which must exist; else `$MINIJAX_DATA`; else minijax in the
    user's cache folder); the folder of Debian's package, unless `data_dir` is given; each of `mirrors` (base
    addresses, to which `NAME.gz` is appended), unless `download` is False. The cache folder keeps downloads.

    Returns {"train": {"image": uint8 [60000, 28, 28], "label": uint8 [60000]}, "test": {"image": uint8
    [10000, 28, 28], "label": uint8 [10000]}, "origin": str, where the bytes came from}.
    Raises OSError that lists every place tried, with its reason, and the remedies; warns of damaged copies.
    """
    if data_dir is not None:
        folders = [Path(data_dir)]
        if not os.path.isdir(data_dir):
            raise FileNotFoundError(f"data_dir must be a folder that exists, got {str(data_dir)!r}")
    else:
        cache = os.environ.get("XDG_CACHE_HOME", "")
        cache = cache if os.path.isabs(cache) else "~/.cache"  # its specification: ignore it unless absolute
        cache = os.environ.get("MINIJAX_DATA") or os.path.join(cache, "minijax")
        folders = [Path(os.path.expanduser(cache)), DEBIAN_FOLDER]
    mirrors = ([mirrors] if isinstance(mirrors, str) else list(mirrors)) if download else []
    arrays, origins = {}, {}
    for name in FILES:
        data, origin = _fetch(name, folders, mirrors)
        arrays[name], origins[origin] = parse_idx(data), None
    dataset = {"origin": "Fashion-MNIST from " + ", ".join(origins)}
    for part, prefix in ("train", "train"), ("test", "t10k"):
        image, label = arrays[f"{prefix}-images-idx3-ubyte"], arrays[f"{prefix}-labels-idx1-ubyte"]
        dataset[part] = {"image": image, "label": label}
        _check_pairs(dataset[part])
    return dataset


def parse_idx(raw):
    """The array in a (decompressed) IDX file of unsigned bytes: uint8 of the shape in the header, a copy.

    Format (yann.lecun.com/exdb/mnist): bytes 0, 0, 8 (the type), number of axes; the length of each axis as a
    big-endian uint32; the data, row-major. ValueError unless `raw` is exactly that, to the last byte.
    """
    if len(raw) < 4 or bytes(raw[:3]) != b"\0\0\x08" or len(raw) < 4 + 4 * raw[3]:
        raise ValueError(f"expected an IDX file of unsigned bytes (00 00 08, number of axes, their lengths), "
                         f"got {len(raw)} bytes: {bytes(raw[:8]).hex(' ')}")
    start = 4 + 4 * raw[3]
    shape = tuple(np.frombuffer(raw, ">u4", count=raw[3], offset=4).tolist())
    if len(raw) - start != math.prod(shape):
        raise ValueError(f"expected {math.prod(shape)} bytes of data for IDX shape {shape}, "
                         f"got {len(raw) - start}")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape).copy()


def synthetic(seed, num_train, num_test):
    """Made-up data in the structure of `load_fashion_mnist`; its "origin" says so. A pure function of `seed`.

    Each class has a pattern of 7 x 7 blocks; an image is its class's pattern, mixed with at most as much of
    a random class's, under noise: easy to learn, but not without doubtful cases. Classes are balanced.
    """
    seed, counts = _integer("seed", seed, 0), {"train": num_train, "test": num_test}
    patterns = np.random.default_rng([seed, 0]).integers(0, 256, (10, 7, 7), np.uint16)
    patterns = patterns.repeat(4, axis=1).repeat(4, axis=2)  # [10, 28, 28]
    result = {"origin": f"synthetic, made up from seed {seed} (not Fashion-MNIST)"}
    for stream, part in enumerate(counts, start=1):  # streams apart: num_train does not change the test
        count, rng = _integer(f"num_{part}", counts[part], 1), np.random.default_rng([seed, stream])
        label = rng.permutation(np.arange(count) % 10).astype(np.uint8)
        share = rng.integers(4, 9, (count, 1, 1), np.uint16)  # eighths
        image = (share * patterns[label] + (8 - share) * patterns[rng.integers(0, 10, count)]) // 8
        image = (image + rng.integers(0, 256, image.shape, np.uint16)) // 2  # integers: the same everywhere
        result[part] = {"image": image.astype(np.uint8), "label": label}
    return result


def preprocess(images):
    """uint8 [..., 28, 28] (NumPy, JAX, under jit and vmap) to float32 [..., 784] in [0, 1]: pixel / 255.

    ValueError for any other dtype or shape, so that nothing is scaled twice.
    """
    if getattr(images, "dtype", None) != np.uint8 or images.shape[-2:] != (28, 28):
        got = f"{getattr(images, 'dtype', type(images).__name__)} {getattr(images, 'shape', '')}"
        raise ValueError(f"images must be uint8 [..., 28, 28], got {got}")
    flat = images.reshape(*images.shape[:-2], 784)  # [..., 784]
    return flat.astype(np.float32) / np.float32(255)  # in this order: NumPy's uint8 / 255 would be float64


def batches(dataset, batch_size, *, seed=None, epoch=0, remainder="drop"):
    """Iterator over {"image": [B, ...], "label": [B], "mask": bool [B]}, all of one shape whatever the number
    n of examples.

    dataset: {"image": [n, ...], "label": integers in 0..9, [n]}; dtypes are kept. Each example comes once: in
    the dataset's order, or, if `seed` is given, in one that is a pure function of (seed, epoch, n), so that a
    resumed run sees the batches of the unbroken one. What is left after the last full batch is dropped
    ("drop", for training) or filled up with zeros where `mask` is False ("pad", for evaluation). Batches are
    copies. ValueError, at the call, for bad arguments or labels, and if "drop" would leave no batch at all.
    """
    image, label = _check_pairs(dataset)
    count, batch_size, epoch = len(label), _integer("batch_size", batch_size, 1), _integer("epoch", epoch, 0)
    if remainder not in ("drop", "pad"):
        raise ValueError(f"remainder must be 'drop' or 'pad', got {remainder!r}")
    if remainder == "drop" and count < batch_size:
        raise ValueError(f"batch_size {batch_size} exceeds the {count} examples, and remainder='drop' would "
                         f"leave no batch: lower it or choose remainder='pad'")
    order = np.arange(count)
    if seed is not None:
        # Sort by random bits: NumPy keeps those for ever, but may change `permutation` in any release.
        bits = np.random.Philox([_integer("seed", seed, 0), epoch]).random_raw(count)
        order = np.argsort(bits)  # ties, whose order is open: once in ten billion epochs of Fashion-MNIST
    if remainder == "drop":
        order = order[:count - count % batch_size]

    def generate():  # a generator of its own, so that the checks above run at the call
        for start in range(0, len(order), batch_size):
            rows = order[start:start + batch_size]
            batch = {"image": image.take(rows, axis=0), "label": label[rows], "mask": np.ones(len(rows), bool)}
            if missing := batch_size - len(rows):
                batch = {k: np.pad(v, [(0, missing)] + [(0, 0)] * (v.ndim - 1)) for k, v in batch.items()}
            yield batch

    return generate()


def stack(iterator, steps):
    """Iterator over stacks of `steps` batches, each leaf [steps, ...] (NumPy); the last may be shorter.

    It is what `jax.lax.scan` runs over. ValueError, at the call, unless `steps` is at least 1.
    """
    steps, source = _integer("steps", steps, 1), iter(iterator)

    def generate():
        while group := list(itertools.islice(source, steps)):
            yield jax.tree.map(lambda *leaves: np.stack(leaves), *group)

    return generate()


def to_device(iterator, sharding=None, size=2):
    """Iterator over the same batches as JAX arrays; while one is worked on, the next `size` are on their way.

    sharding: None (the default device), or a `jax.sharding.Sharding` for every leaf; ValueError if an axis
    does not divide. If it spans several processes, each gives its own share of the global batch. Host arrays
    are copied first, so that the source may refill its buffers. An error of the source is raised in its turn.
    """
    size, source = _integer("size", size, 0), iter(iterator)

    def place(leaf):
        if not isinstance(leaf, jax.Array):
            leaf = np.array(leaf)  # a copy of our own, since JAX may read it later, or alias it for ever
        if sharding is None:
            return jax.device_put(leaf)
        return jax.make_array_from_process_local_data(sharding, leaf)  # one process: it has all

    def generate():
        ready = []
        while True:
            while len(ready) <= size:
                try:
                    ready.append(jax.tree.map(place, next(source)))
                except Exception as error:  # StopIteration too; kept until its turn, behind the good batches
                    ready.append(error)
            batch = ready.pop(0)
            if isinstance(batch, StopIteration):
                return
            if isinstance(batch, Exception):
                raise batch
            yield batch

    return generate()


def _integer(name, value, least):
    if not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    return int(value)


def _check_pairs(dataset):
    """(image, label) of a dataset as arrays; ValueError unless there is one label in 0..9 for each image."""
    if not {"image", "label"} <= set(dataset):
        raise ValueError(f"a dataset must hold 'image' and 'label', got {sorted(dataset)}")
    image, label = np.asarray(dataset["image"]), np.asarray(dataset["label"])
    if label.ndim != 1 or label.shape != image.shape[:1] or len(label) == 0:
        raise ValueError(f"expected n > 0 images and labels [n], got shapes {image.shape} and {label.shape}")
    if not np.issubdtype(label.dtype, np.integer) or label.min() < 0 or label.max() >= len(CLASS_NAMES):
        raise ValueError(f"labels must be integers in 0..9, got {label.dtype}, "
                         f"least and greatest {np.unique(label)[[0, -1]]}")
    return image, label


# What follows gets the files, and nothing of it is particular to training.


def _fetch(name, folders, mirrors):
    """(decompressed bytes, origin) of file `name` from the first good copy; one from a mirror is kept.

    The mirror that served moves to the front of `mirrors`: a dead one costs its wait once, not per file.
    """
    tried, sources, cache = [], [], folders[0]
    names = [stem + end for stem in (name, name.replace("-idx", ".idx")) for end in (".gz", "")]
    for folder in folders:
        found = [folder / n for n in names if os.path.exists(folder / n)]
        sources += found
        if not found:
            tried.append(f"{folder}: holds none of {', '.join(names)}")
    for source in sources + [mirror.rstrip("/") + f"/{name}.gz" for mirror in mirrors]:
        try:
            if isinstance(source, Path):
                return _verify(name, source.read_bytes()), str(source.parent)
            cache.mkdir(parents=True, exist_ok=True)
            if not os.access(cache, os.W_OK):  # better known before the download than after it
                raise PermissionError(f"not asked, since {cache}, which would keep the file, is not writable")
            raw = _read_url(source, longest=2 * FILES[name][0] + 1024)  # no copy, packed or not, is longer
            data = _verify(name, raw)
            _write_atomically(cache / f"{name}.gz", raw)
            mirrors.sort(key=lambda mirror: not source.startswith(mirror))
            return data, f"{source.rpartition('/')[0]} (now in {cache})"
        except (OSError, ValueError) as error:
            tried.append(f"{source}: {error}")
            if isinstance(source, Path):
                warnings.warn(f"{tried[-1]}; ignored, delete it unless a download replaces it", stacklevel=3)
    if not mirrors:
        tried.append("mirrors: none to ask (download=False, or an empty list)")
    raise OSError("\n  ".join([f"no good copy of {name} found:", *tried]) + "\nWhat helps: apt install "
                  "dataset-fashion-mnist (Debian, Ubuntu); --data-dir FOLDER that has the four files; "
                  "minijax_train.py --dataset synthetic (made-up data)")


def _verify(name, raw):
    """The decompressed bytes of a copy of `name`, gzip or not; ValueError says what is wrong with it."""
    size, sha256 = FILES[name]
    data, kind = raw, f"not gzip, it starts with {raw[:20]!r}"
    if raw[:2] == b"\x1f\x8b":  # names tell nothing: browsers and proxies unpack on the way
        try:
            with gzip.open(io.BytesIO(raw)) as file:
                data, kind = file.read(size + 1), "gzip"  # no more: a few kilobytes can unpack to gigabytes
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"damaged gzip: {error}") from error
    if hashlib.sha256(data).hexdigest() != sha256:
        length = f"{len(data)}" if len(data) <= size else f"more than {size}"
        raise ValueError(f"wrong content, {length} bytes ({kind}), expected {size} with SHA-256 {sha256}")
    return data


def _read_url(url, longest):
    """The body at `url`; OSError if it fails, falls silent, is too slow, or is longer than `longest` bytes.

    A thread reads, because a socket's own time limit covers neither the name look-up nor a server that drips
    single bytes; this function waits for the thread's chunks and abandons it when they stay away.
    """
    chunks, left = queue.Queue(), threading.Event()

    def read():
        try:
            # Some hosts refuse urllib's default User-Agent.
            request = urllib.request.Request(url, headers={"User-Agent": "minijax (dataset download)"})
            with urllib.request.urlopen(request, timeout=2 * SILENT_SECONDS) as response:
                chunk = b"start"
                while chunk and not left.is_set():
                    chunk = response.read1(1 << 16)  # what there is: `read` would wait until all of it came
                    chunks.put(chunk)
        except Exception as error:  # any: the waiting side raises it
            chunks.put(error)

    threading.Thread(target=read, daemon=True).start()
    body, start, before = bytearray(), time.monotonic(), 0
    show = sys.stderr is not None and sys.stderr.isatty()
    try:
        while chunk := chunks.get(timeout=SILENT_SECONDS):
            if isinstance(chunk, Exception):
                raise OSError(f"{type(chunk).__name__}: {chunk}") from chunk
            body += chunk
            if len(body) > longest:
                raise OSError(f"sends more than {longest} bytes")
            seconds = time.monotonic() - start
            if seconds > SLOW_SECONDS:
                if len(body) - before < SLOW_BYTES_PER_SECOND * seconds:
                    raise TimeoutError(f"slower than {SLOW_BYTES_PER_SECOND} bytes/s over {SLOW_SECONDS} s")
                start, before = time.monotonic(), len(body)
            if show:
                print(f"\r{url}  {len(body) / 1e6:.1f} MB ", end="", file=sys.stderr, flush=True)
    except queue.Empty:
        raise TimeoutError(f"silent for {SILENT_SECONDS} s") from None
    finally:
        left.set()
        if show and body:
            print(file=sys.stderr)
    return bytes(body)


def _write_atomically(path, raw):
    """Writes under a name of its own, then renames: no kill or second process leaves half a file at `path`."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.write_bytes(raw)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    for leftover in path.parent.glob(f"{path.name}.*.tmp"):
        with contextlib.suppress(OSError):  # another process may be faster, or not allow it
            if path.stat().st_mtime - leftover.stat().st_mtime > LEFTOVER_SECONDS:  # both by the disk's clock
                leftover.unlink()


def main(argv=None):
    """Fetch and verify Fashion-MNIST, then show where it came from, its classes and a few images."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--data-dir", metavar="FOLDER", help="existing folder, searched first and given the "
                        "downloads (default: $MINIJAX_DATA, else minijax in your cache folder)")
    try:
        dataset = load_fashion_mnist(parser.parse_args(argv).data_dir)
    except (OSError, ValueError, KeyboardInterrupt) as error:
        sys.exit(f"data.py: {str(error) or 'interrupted'}")
    train, test = dataset["train"], dataset["test"]
    print(f"{dataset['origin']}\n\n{'class':12}{'train':>8}{'test':>8}")
    for label, name in enumerate(CLASS_NAMES):
        print(f"{name:12}{np.sum(train['label'] == label):8}{np.sum(test['label'] == label):8}")
    print(f"{'all':12}{len(train['label']):8}{len(test['label']):8}")
    for image, label in zip(train["image"][:4], train["label"]):
        print(f"\n{CLASS_NAMES[label]}:")
        for row in image[::2]:  # every other row, since a character is twice as high as wide
            print("".join(" .:-=+*%#@"[value // 26] for value in row).rstrip())


if __name__ == "__main__":
    main()
