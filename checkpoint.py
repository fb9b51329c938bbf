# SPDX-License-Identifier: MIT
"""A pytree to disk and back: atomic, checked, no pickle; and going on after a stop.

A checkpoint is a NumPy archive of the leaves, named after their paths in the tree: also without
this file `np.load("step_3.npz")["params/0/w"]` is a weight matrix. npz keeps neither bfloat16,
float8 nor PRNG keys: it gets their bytes, and the name says of what ("params/0/w:bfloat16").
It gets its name only when it is whole, so that a run may be stopped at any moment.
"""
import os
import sys
import uuid
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils


def save_checkpoint(path, tree):
    """Writes a pytree to `path`, all of it or nothing: what stood there stays until it is done.

    Leaves: arrays of numbers or bools, PRNG keys, Python scalars, strings. ValueError for others
    and for names that two leaves share or no archive can hold; an OSError names the path.
    """
    path, arrays = expand_home(path), {}
    for name, (leaf, dtype, _) in named_leaves(tree).items():
        leaf = jax.random.key_data(leaf) if is_key(leaf) else leaf
        arrays[name] = np.asarray(leaf).view(dtype)
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")  # of this call alone
    try:
        with open(temporary, "xb") as file:
            np.savez(file, **arrays)
            os.fsync(file.fileno())  # the bytes must be on the disk before the name is
        os.replace(temporary, path)
    except OSError as error:  # that of a full disk names no file
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def load_checkpoint(path, like, *, partial=False):
    """The pytree in `path`, with the structure, kinds, dtypes and shardings of `like`.

    `like` holds arrays or jax.ShapeDtypeStructs: `jax.eval_shape(init, key)` will do. JAX leaves
    come back where those of `like` are (a step compiled for them serves), NumPy ones as NumPy
    arrays, Python scalars as such. `partial`: what `like` does not name (an optimizer) is skipped.
    ValueError if the file is damaged, or if a path, dtype or shape differs; OSError if unreadable.
    """
    path, wanted = expand_home(path), named_leaves(like)
    saved = read_arrays(path, wanted.keys() if partial else None)
    if differing := sorted(wanted.keys() ^ saved.keys()):
        where = "missing" if differing[0] in wanted else "only there"
        raise ValueError(f"{path} does not fit: {differing[0]} is {where}")
    leaves = []
    for name, (leaf, dtype, shape) in wanted.items():
        array = saved[name]
        if type(leaf) is str and array.dtype.kind == "U":
            dtype = array.dtype  # any length of text
        if (array.dtype.name, array.shape) != (dtype.name, shape):
            raise ValueError(f"{path} does not fit: {name} is {array.dtype}{list(array.shape)} "
                             f"there, expected {dtype}{list(shape)}")
        leaves.append(place_like(array.astype(dtype, copy=False), leaf))  # native order of bytes
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def latest_checkpoint(directory):
    """The newest whole step_N.npz of a folder, by N, or None; damaged ones are named on stderr."""
    for path in reversed(numbered(expand_home(directory)).values()):
        try:
            read_arrays(path)
            return path
        except (OSError, ValueError) as error:
            print(f"{error}: looking for an older checkpoint", file=sys.stderr)
    return None


def start_or_resume(directory, state, settings, resume):
    """(state to start from, save function): all that a program needs to go on after a stop.

    state: a dict with "params", "step" (an int) and whatever else changes; all of it is saved.
    settings: a dict of numbers and strings that a resumed run must share with the first one.
    `save(state)` writes step_N.npz and keeps the newest three (FloatingPointError if parameters are
    not finite); every process calls it, one writes. None without a directory. One run a folder.
    ValueError for checkpoints without `resume`, other settings or leaves, processes that disagree.
    """
    if directory is None:
        return state, None
    like = dict(settings=settings, **state)  # TypeError where the state has settings of its own
    directory = expand_home(directory)
    directory.mkdir(parents=True, exist_ok=True)
    newest = latest_checkpoint(directory)
    number = np.array(int(newest.stem[5:]) if newest else -1)
    if len(set(multihost_utils.process_allgather(number).flat)) > 1:
        raise ValueError(f"processes see different checkpoints in {directory}, this one {newest}")
    if numbered(directory) and not resume:
        raise ValueError(f"{directory} holds checkpoints: add --resume, or give another folder")
    if newest:
        made = load_checkpoint(newest, {"settings": settings}, partial=True)["settings"]
        for name, value in settings.items():
            if made[name] != value:
                raise ValueError(f"{newest} was made with {name} {made[name]}, expected {value}")
        state = load_checkpoint(newest, like)
        del state["settings"]

    def save(state):
        step, params = state["step"], jax.tree.leaves(state["params"])
        if not all(np.isfinite(np.asarray(leaf)).all() for leaf in params if not is_key(leaf)):
            raise FloatingPointError(f"parameters are not finite after step {step}: not saved")
        if jax.process_index() == 0:
            save_checkpoint(directory / f"step_{step}.npz", dict(settings=settings, **state))
            older = [file for number, file in numbered(directory).items() if number <= step]
            for file in [*older[:-3], *directory.glob("step_*.npz.*.tmp")]:  # these a kill left
                file.unlink(missing_ok=True)

    return state, save


def named_leaves(tree):
    """{name: (leaf, dtype, shape)} of a tree: what an archive is to hold for each leaf."""
    named = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        if is_key(leaf):
            name, array = f"{name}:{leaf.dtype}", jax.eval_shape(jax.random.key_data, leaf)
        dtype = array.dtype
        if dtype.isbuiltin == 2:  # one that a package brought to NumPy, such as bfloat16
            name, dtype = f"{name}:{dtype}", np.dtype(f"V{dtype.itemsize}")
        elif type(leaf) is not str and dtype.kind not in "biufc":
            raise ValueError(f"{name} must be numbers, got {type(leaf).__name__} of dtype {dtype}")
        taken = name in named or name in ("file", "allow_pickle")  # np.savez has such arguments
        if taken or name.endswith(".npy") or "\0" in name or len(name) > 9999:
            raise ValueError(f"{name[:80]!r} names no array or two in an archive: rename a key")
        named[name] = leaf, dtype, array.shape
    return named


def is_key(leaf):
    """Whether a leaf or its description is an array of PRNG keys."""
    return jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key)


def place_like(array, leaf):
    """An archive's array, made what `leaf` is: its kind, dtype and place."""
    if not hasattr(leaf, "dtype"):
        return array.item()
    if isinstance(leaf, (np.ndarray, np.generic)):
        return array.view(leaf.dtype)
    # None where JAX was free to choose, or a step compiled for `leaf` would compile anew
    sharding = leaf.sharding if getattr(leaf, "committed", True) else None
    if is_key(leaf):
        impl = jax.random.key_impl(jax.numpy.empty((), leaf.dtype))
        return jax.random.wrap_key_data(jax.device_put(array, sharding), impl=impl)
    return jax.device_put(array.view(leaf.dtype), sharding)


def expand_home(path):
    """A path with a leading ~ expanded; ValueError where no such home is known."""
    if os.path.expanduser(path).startswith("~"):
        raise ValueError(f"no home folder is known for {path}: give the whole path")
    return Path(os.path.expanduser(path))


def read_arrays(path, names=None):
    """{name: array} of an archive (those in `names`); np.load checks the sums of what it reads."""
    with open(path, "rb") as file:  # an OSError here says why; whatever comes later is damage
        try:
            with np.load(file, allow_pickle=False) as archive:
                if any(info.comment for info in archive.zip.infolist()):
                    raise ValueError("a comment hides names")  # one flipped bit can do that
                names = archive.files if names is None else names & set(archive.files)
                return {name: np.asarray(archive[name]) for name in names}
        except Exception as error:  # numpy, zipfile and zlib have no class of errors in common
            raise ValueError(f"{path} is damaged or no checkpoint: {error}") from error


def numbered(directory):
    """{N: path} of the files step_N.npz in a folder; 10 comes after 9."""
    found = {path.stem[5:]: path for path in directory.glob("step_*.npz")}
    return {int(text): found[text] for text in sorted(filter(str.isdecimal, found), key=int)}
