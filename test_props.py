# SPDX-License-Identifier: MIT
"""Properties of minijax: what the docstrings promise, shown by Hypothesis and by plain examples.

    pytest                                   the whole suite
    HYPOTHESIS_PROFILE=thorough pytest       ten times the examples
    MINIJAX_REQUIRE_GPU=1 pytest             a missing GPU is a failure, not a skip

Every property says what it promises and which mistake it would catch. Expected values come from
NumPy in float64 or from arithmetic done by hand, never from the function under test.
"""
import bz2
import contextlib
import functools
import gzip
import hashlib
import io
import itertools
import lzma
import os
import re
import shutil
import signal
import socket
import socketserver
import struct
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st

import attention
import data
import decoder
import minijax_train as train

# Compilation makes the first example slow, so no deadline (it would time the compiler).
SCALE = 10 if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else 1
settings.register_profile("default", deadline=None, max_examples=10)
settings.register_profile("thorough", deadline=None, max_examples=10 * SCALE)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# float32 matmuls on a GPU's tensor cores round like tensorfloat32: pinned, so that tolerances hold there too.
jax.config.update("jax_default_matmul_precision", "highest")


# ---------------------------------------------------------------------------------------------------------
# data.py: files
# ---------------------------------------------------------------------------------------------------------


def encode_idx(array):
    """An IDX file of unsigned bytes, written down from the format's description."""
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def small_arrays():
    rng = np.random.RandomState(0)
    return {"train-images-idx3-ubyte": rng.randint(0, 256, (12, 28, 28)).astype(np.uint8),
            "train-labels-idx1-ubyte": rng.randint(0, 10, 12).astype(np.uint8),
            "t10k-images-idx3-ubyte": rng.randint(0, 256, (7, 28, 28)).astype(np.uint8),
            "t10k-labels-idx1-ubyte": rng.randint(0, 10, 7).astype(np.uint8)}


SMALL = small_arrays()
RAW = {name: encode_idx(array) for name, array in SMALL.items()}
PACKED = {name: gzip.compress(raw) for name, raw in RAW.items()}
NAMES = list(RAW)
SMALL_FILES = {name: (len(raw), hashlib.sha256(raw).hexdigest()) for name, raw in RAW.items()}


@contextlib.contextmanager
def small_world(**constants):
    """data.py with four small files to look for, none of them anywhere; gives an empty folder."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(data, "FILES", SMALL_FILES)
        patch.setattr(data, "DEBIAN_FOLDER", Path(folder, "debian"))
        patch.setenv("XDG_CACHE_HOME", str(Path(folder, "xdg")))
        patch.setenv("HOME", str(Path(folder, "home")))
        patch.delenv("MINIJAX_DATA", raising=False)
        patch.setenv("no_proxy", "*")
        for name, value in constants.items():
            patch.setattr(data, name, value)
        yield Path(folder)


def fill(folder, *, names=NAMES, content=PACKED, end=".gz"):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / (name + end)).write_bytes(content[name])
    return folder


def check_small(dataset):
    """Every array is the one that was encoded, dtype included."""
    assert set(dataset) == {"train", "test", "origin"}
    for part, prefix in ("train", "train"), ("test", "t10k"):
        assert set(dataset[part]) == {"image", "label"}
        for key, kind in ("image", "images-idx3"), ("label", "labels-idx1"):
            got = dataset[part][key]
            assert got.dtype == np.uint8
            np.testing.assert_array_equal(got, SMALL[f"{prefix}-{kind}-ubyte"])


@contextlib.contextmanager
def serve(reply):
    """A web server on this machine: gives its base address and the list of the requests' heads.

    reply(name, socket) gives the body for status 200, or None if it has sent all that it wanted by itself.
    """
    heads = []

    def handle(connection, address, server):
        head = b""
        while b"\r\n\r\n" not in head:
            part = connection.recv(4096)
            if not part:
                return
            head += part
        heads.append(head.decode())
        body = reply(head.split()[1].decode().rpartition("/")[2], connection)
        if body is not None:
            connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), handle)
    server.daemon_threads, server.handle_error = True, lambda *args: None  # clients that leave are no news
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/some/folder/", heads
    finally:
        server.shutdown()
        server.server_close()


def good(name, connection):
    """What a mirror should reply."""
    return PACKED[name.removesuffix(".gz")]


def child(code, *arguments, **environment):
    """Starts `code` in a Python of its own, where `data` is the module under test with the small files."""
    path = os.pathsep.join([str(Path(data.__file__).parent), *sys.path])
    start = ("import gzip, hashlib, json, os, random, signal, sys, time\nfrom pathlib import Path\n"
             f"import data\ndata.FILES = {SMALL_FILES!r}\ndata.DEBIAN_FOLDER = Path('nowhere')\n")
    return subprocess.Popen([sys.executable, "-c", start + code, *map(str, arguments)], text=True,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            env={**os.environ, "PYTHONPATH": path, **environment})


def finish(process):
    """Its standard output, when it has ended well."""
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    return out


idx_arrays = st.lists(st.integers(0, 4), max_size=4).flatmap(
    lambda shape: st.binary(min_size=int(np.prod(shape)), max_size=int(np.prod(shape))).map(
        lambda raw: np.frombuffer(raw, np.uint8).reshape(shape)))


@given(idx_arrays, st.sampled_from([bytes, bytearray, memoryview]))
def test_parse_idx_inverts_an_encoder(array, kind):
    """Promise: any uint8 array comes back from its IDX bytes, as a copy. Catches: little-endian lengths, a
    transposed or dropped axis, a header taken for data, an array that changes with the buffer."""
    raw = bytearray(encode_idx(array))
    got = data.parse_idx(kind(raw))
    raw[:] = bytes(255 - byte for byte in raw)
    assert got.dtype == np.uint8 and got.shape == array.shape
    np.testing.assert_array_equal(got, array)
    got[...] = 0  # raises if it is read-only


@given(idx_arrays, st.binary(min_size=1, max_size=3))
def test_parse_idx_refuses_every_truncation_and_extension(array, more):
    """Promise: one byte too few or too many anywhere is a ValueError. Catches: a short read taken for a
    smaller file, trailing bytes ignored, struct.error or IndexError from a short header."""
    raw = encode_idx(array)
    for length in range(len(raw)):
        with pytest.raises(ValueError, match=f"got {length} bytes|got {length - 4 - 4 * array.ndim}"):
            data.parse_idx(raw[:length])
    with pytest.raises(ValueError, match=f"expected {array.size} bytes .* got {array.size + len(more)}"):
        data.parse_idx(raw + more)


def test_parse_idx_refuses_every_flipped_header_bit():
    """Promise: no bit of the header can be wrong unnoticed. Catches: an unchecked zero byte, type or
    length."""
    raw = encode_idx(np.arange(6, dtype=np.uint8).reshape(2, 3) + 200)
    for bit in range(8 * 12):
        bad = bytearray(raw)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError):
            data.parse_idx(bytes(bad))


def test_parse_idx_example():
    """Promise: the format's byte order and row order. Catches: the same mistake in encoder and parser."""
    got = data.parse_idx(bytes.fromhex("00000803 00000002 00000002 00000002 0001020304050607"))
    assert got.tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    with pytest.raises(ValueError, match="1f 8b 08"):  # packed: the message lets one see it
        data.parse_idx(gzip.compress(b"\0\0\x08\x01\0\0\0\x01\x05"))
    with pytest.raises(ValueError):  # an array of 65 axes, which NumPy cannot hold
        data.parse_idx(b"\0\0\x08\x41" + 65 * b"\0\0\0\x01" + b"\x05")


@given(st.permutations(NAMES), st.lists(st.tuples(st.booleans(), st.sampled_from([".gz", ""]), st.booleans()),
                                        min_size=4, max_size=4))
def test_files_are_told_apart_by_their_first_bytes(names, forms):
    """Promise: gzip or raw, under a name with or without .gz, with a dash or a dot, all load. Catches: trust
    in the name's ending, a dotted name that is not looked for."""
    with small_world() as folder:
        for name, (packed, end, dotted) in zip(names, forms):
            file = folder / ((name.replace("-idx", ".idx") if dotted else name) + end)
            file.write_bytes((PACKED if packed else RAW)[name])
        check_small(data.load_fashion_mnist(folder, download=False))


def test_search_order():
    """Promise: cache folder ($MINIJAX_DATA, else the user's), Debian's folder, the mirrors in their order;
    and nothing but data_dir and the mirrors if data_dir is given. Catches: any other order, a variable that
    is ignored, Debian's folder behind a given data_dir, a download although there was a copy."""
    with small_world() as folder, pytest.MonkeyPatch.context() as patch, \
            serve(good) as (first, first_heads), serve(good) as (second, second_heads):
        def origin(data_dir=None, **options):
            dataset = data.load_fashion_mnist(data_dir, mirrors=(first, second), **options)
            check_small(dataset)
            return dataset["origin"]

        fill(folder / "debian")
        fill(folder / "home/.cache/minijax")
        fill(folder / "xdg/minijax")
        fill(folder / "mine")
        patch.chdir(folder)
        patch.setenv("MINIJAX_DATA", "mine")  # relative to where we are
        assert origin() == "Fashion-MNIST from mine"
        patch.setenv("MINIJAX_DATA", "~/.cache/minijax")
        assert origin() == f"Fashion-MNIST from {folder}/home/.cache/minijax"
        patch.setenv("MINIJAX_DATA", "")
        assert origin() == f"Fashion-MNIST from {folder}/xdg/minijax"
        for ignored in "", "xdg":  # unset, or not absolute
            patch.setenv("XDG_CACHE_HOME", ignored)
            assert origin() == f"Fashion-MNIST from {folder}/home/.cache/minijax"
        patch.delenv("XDG_CACHE_HOME")
        assert origin() == f"Fashion-MNIST from {folder}/home/.cache/minijax"
        shutil.rmtree(folder / "home/.cache")
        assert origin() == f"Fashion-MNIST from {folder}/debian"
        (folder / "given").mkdir()
        patch.setenv("MINIJAX_DATA", "mine")
        with pytest.raises(OSError, match=f"{folder}/given: .*train-images-idx3-ubyte"):
            origin(str(folder / "given"), download=False)
        assert not first_heads and not second_heads
        assert origin(str(folder / "given")) == f"Fashion-MNIST from {first[:-1]} (now in {folder}/given)"
        assert len(first_heads) == 4 and not second_heads
        assert origin(folder / "given") == f"Fashion-MNIST from {folder}/given"  # found there from now on
        assert len(first_heads) == 4
        patch.setenv("MINIJAX_DATA", str(folder / "new/and/deep"))
        shutil.rmtree(folder / "debian")
        origin()
        assert sorted(os.listdir(folder / "new/and/deep")) == sorted(f"{name}.gz" for name in NAMES)


def test_each_file_comes_from_the_first_place_that_has_it():
    """Promise: the search is file by file, and the origin names every source. Catches: a folder taken or left
    as a whole, an origin that names one place only."""
    with small_world() as folder:
        fill(folder / "xdg/minijax", names=NAMES[:1])
        fill(folder / "debian", names=NAMES[1:])
        dataset = data.load_fashion_mnist(download=False)
        check_small(dataset)
        assert dataset["origin"] == f"Fashion-MNIST from {folder}/xdg/minijax, {folder}/debian"


@pytest.mark.parametrize("bad", ["absent", "file", ""])
def test_data_dir_must_exist(bad):
    """Promise: a data_dir that is no folder is an OSError that names it. Catches: a typing mistake that
    becomes a new folder with thirty megabytes in it, or that falls back to another place silently."""
    with small_world() as folder, serve(good) as (mirror, heads):
        fill(folder / "debian")
        (folder / "file").write_bytes(b"")
        given_dir = str(folder / bad) if bad else ""
        with pytest.raises(OSError, match=f"must be a folder that exists, got '{given_dir}'"):
            data.load_fashion_mnist(given_dir, mirrors=[mirror])
        assert not heads and not (folder / "absent").exists()


# A valid IDX archive of the right shape with one wrong pixel: only the hash can tell.
IMPOSTOR = RAW[NAMES[0]][:5000] + bytes([RAW[NAMES[0]][5000] ^ 1]) + RAW[NAMES[0]][5001:]
FIRST = PACKED[NAMES[0]]
DAMAGED = {  # kind: (bytes, words of the reason)
    "impostor": (gzip.compress(IMPOSTOR), r"content, 9424 bytes \(gzip\), expected 9424 with SHA-256"),
    "impostor, raw": (IMPOSTOR, "9424 bytes .not gzip, .* expected 9424 with SHA-256"),
    "longer": (gzip.compress(RAW[NAMES[0]] + bytes(9)), "more than 9424 bytes"),
    "cut": (FIRST[:-5], "damaged gzip"), "no trailer": (FIRST[:-8], "damaged gzip"),
    "half": (FIRST[:4000], "damaged gzip"), "rubbish behind": (FIRST + b"rubbish", "damaged gzip"),
    "three bytes": (b"\x1f\x8b\x08", "damaged gzip"), "ten bytes": (FIRST[:10], "damaged gzip"),
    "empty": (b"", "0 bytes .not gzip"), "page": (b"<!DOCTYPE html>", "not gzip, .*<!DOCTYPE html>"),
    "another file": (PACKED[NAMES[2]], "5504 bytes .* expected 9424")}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_copy_is_reported_and_replaced(kind):
    """Promise: what is not the right bytes is never used: a warning names it, the next place serves, and a
    download replaces it; without one, the error names the file to delete. Catches: trust in a name, a size or
    an IDX header; a half download that is trusted for ever; EOFError or zlib.error at the caller's."""
    with small_world() as folder, serve(good) as (mirror, heads):
        bad = fill(folder / "cache") / f"{NAMES[0]}.gz"
        raw, reason = DAMAGED[kind]
        bad.write_bytes(raw)
        with pytest.warns(UserWarning, match=f"{bad}: .*{reason}.*delete it"), \
                pytest.raises(OSError, match=f"{bad}: .*{reason}") as caught:
            data.load_fashion_mnist(folder / "cache", download=False)
        assert "holds none" not in str(caught.value) and bad.read_bytes() == raw
        with pytest.warns(UserWarning, match=f"{bad}: "):
            check_small(data.load_fashion_mnist(folder / "cache", mirrors=[mirror]))
        assert len(heads) == 1 and bad.read_bytes() == PACKED[NAMES[0]]
        check_small(data.load_fashion_mnist(folder / "cache", mirrors=[mirror]))  # now without a warning
        bad.write_bytes(raw)
        fill(folder / "cache", end="")  # a good copy under the other name
        with pytest.warns(UserWarning, match=f"{bad}: "):
            check_small(data.load_fashion_mnist(folder / "cache", download=False))


@given(st.integers(0, len(PACKED[NAMES[1]]) - 1), st.integers(0, 255), st.booleans())
@settings(max_examples=100 * SCALE)
@pytest.mark.filterwarnings("ignore:.*delete it")
def test_no_single_wrong_byte_gets_through(position, value, cut):
    """Promise: an archive changed or cut at any byte either still holds the right bytes or is an OSError.
    Catches: any exception of gzip, zlib or struct that is not converted, a checksum that is not compared."""
    archive = bytearray(PACKED[NAMES[1]])
    archive[position] = value
    with small_world() as folder:
        (fill(folder / "cache") / f"{NAMES[1]}.gz").write_bytes(archive[:position] if cut else archive)
        try:
            check_small(data.load_fashion_mnist(folder / "cache", download=False))
        except OSError as error:
            assert f"{NAMES[1]}.gz: " in str(error)


def test_a_gzip_bomb_is_not_unpacked():
    """Promise: no more than the expected size plus one byte is unpacked. Catches: gzip.decompress of
    anything."""
    member = gzip.compress(bytes(1 << 24), compresslevel=1)
    with small_world() as folder:
        (fill(folder / "cache") / f"{NAMES[0]}.gz").write_bytes(16 * member)  # 256 MiB in one MiB
        tracemalloc.start()
        with pytest.warns(UserWarning, match=f"more than {len(RAW[NAMES[0]])} bytes"), pytest.raises(OSError):
            data.load_fashion_mnist(folder / "cache", download=False)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 8 << 20


def test_wrongly_paired_files_are_refused():
    """Promise: images and labels that do not belong together are a ValueError even if a hash table vouched
    for them. Catches: a loader that trusts a changed table, labels outside the ten classes."""
    for array, reason in (np.zeros(11, np.uint8), "12.*11"), (np.full(12, 10, np.uint8), "0..9"):
        with small_world() as folder, pytest.MonkeyPatch.context() as patch:
            raw = encode_idx(array)
            patch.setitem(SMALL_FILES, NAMES[1], (len(raw), hashlib.sha256(raw).hexdigest()))
            (fill(folder / "cache") / f"{NAMES[1]}.gz").write_bytes(raw)
            with pytest.raises(ValueError, match=reason):
                data.load_fashion_mnist(folder / "cache", download=False)


def status(line, more=b""):
    def reply(name, connection):
        connection.sendall(b"HTTP/1.0 " + line + b"\r\n" + more + b"\r\n")
    return reply


def drip(part, pause, head=b"HTTP/1.0 200 OK\r\n\r\n"):
    """Sends `head`, then `part` again and again with a pause between, for as long as somebody listens."""
    def reply(name, connection):
        connection.sendall(head)
        with contextlib.suppress(OSError):
            for _ in range(int(60 / pause)):
                connection.sendall(part)
                time.sleep(pause)
    return reply


def half_then_silent(name, connection):
    body = PACKED[name.removesuffix(".gz")]
    connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: 99999\r\n\r\n" + body[:20])
    connection.recv(1)  # until the client leaves


def announced_more(name, connection):
    body = PACKED[name.removesuffix(".gz")]
    connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % (len(body)) + body[:-9])


def fast_then_slow(name, connection):
    connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + 9000 * b"x")
    drip(b"x" * 20, 0.05, b"")(name, connection)


FAULTS = {  # what mirrors do: (reply, words of the reason)
    "forbidden": (status(b"403 Forbidden"), "403"),
    "absent": (status(b"404 Not Found"), "404"),
    "server error": (status(b"500 Oops"), "500"),
    "redirected for ever": (status(b"302 Found", b"Location: /some/folder/again\r\n"), "redirect|302"),
    "a page": (lambda name, connection: b"<!DOCTYPE html><html></html>", "not gzip.*DOCTYPE"),
    "nothing": (lambda name, connection: b"", "0 bytes"),
    "another dataset": (lambda name, connection: gzip.compress(IMPOSTOR), "SHA-256"),
    "cut": (announced_more, "ended before"),
    "hangs up": (lambda name, connection: None, "without response|closed|reset"),
    "no HTTP": (lambda name, connection: connection.sendall(b"SSH-2.0-x\r\n"), "SSH-2.0"),
    "bad chunks": (lambda name, connection: connection.sendall(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzzz\r\n"), "zzz|Incomplete|0 bytes"),
    "silent": (lambda name, connection: connection.recv(1) and None, "silent for 0.5 s"),
    "silent half-way": (half_then_silent, "silent for 0.5 s"),
    "drips a header": (drip(b"X", 0.1, b"HTTP/1.0 200 OK\r\nX-Wait: "), "silent for 0.5 s"),
    "drips the body": (drip(b"x", 0.1), "slower than 10000 bytes/s"),
    "too slow": (drip(b"x" * 500, 0.1), "slower than 10000 bytes/s"),
    "fast, then slow": (fast_then_slow, "slower than 1000 bytes/s"),
    "endless": (drip(b"x" * 5000, 0.001), "sends more than"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_mirror_is_left_for_the_next(fault):
    """Promise: whatever a mirror does, the next one is asked within a bounded time, only whole files are
    kept, and, if no mirror is left, an OSError gives each address with its reason. Catches: a missing time
    limit on the connection, the headers or the body, an exception type that nobody expected, a page saved as
    .gz."""
    reply, reason = FAULTS[fault]
    limits = {"SILENT_SECONDS" if "silent" in reason else "SLOW_SECONDS": 0.5}
    if "1000 " in reason:  # so low that the mean since the start would stay above it for long
        limits["SLOW_BYTES_PER_SECOND"] = 1000
    with small_world(**limits) as folder, serve(reply) as (bad, bad_heads), serve(good) as (mirror, heads):
        start, others = time.monotonic(), set(threading.enumerate())
        check_small(data.load_fashion_mnist(mirrors=[bad, mirror]))
        assert time.monotonic() - start < 10
        assert sorted(os.listdir(folder / "xdg/minijax")) == sorted(f"{name}.gz" for name in NAMES)
        assert len(heads) == 4  # and the bad one was asked once only: the one that serves moved to the front
        assert sum(f"GET /some/folder/{NAMES[0]}.gz " in head for head in bad_heads) == 1
        assert not any(name in head for name in NAMES[1:] for head in bad_heads)
        with pytest.raises(OSError, match=rf"{bad}{NAMES[0]}\.gz: .*({reason})"):
            data.load_fashion_mnist(fill(folder / "other", names=NAMES[1:]), mirrors=[bad])
        assert not (folder / "other" / f"{NAMES[0]}.gz").exists() and len(os.listdir(folder / "other")) == 3
        while fault in ("silent", "endless") and any(
                "(read)" in thread.name for thread in set(threading.enumerate()) - others):
            assert time.monotonic() - start < 15, "the reading thread goes on and on"
            time.sleep(0.05)


def test_limits_and_places_are_the_documented_ones():
    """Promise: 15 s of silence, 10 kB/s over 30 s; GitHub, Keras's copy, the dataset's own site, in this
    order; the folder of Debian's package. Catches: a limit shortened for a test and kept, a wrong address."""
    assert (data.SILENT_SECONDS, data.SLOW_SECONDS, data.SLOW_BYTES_PER_SECOND) == (15, 30, 10_000)
    assert 60 <= data.LEFTOVER_SECONDS <= 3600  # longer than a write takes, short enough not to pile up
    assert str(data.DEBIAN_FOLDER) == "/usr/share/datasets/fashion-mnist"
    github, keras, own = data.MIRRORS
    assert github.startswith("https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/")
    assert github.endswith("/data/fashion/")
    assert keras == "https://storage.googleapis.com/tensorflow/tf-keras-datasets/"
    assert own == "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"


def test_an_abandoned_mirror_does_not_keep_the_process_alive():
    """Promise: after the error the program ends. Catches: a reading thread that is waited for at exit."""
    code = """
data.SILENT_SECONDS = 0.3
try:
    data.load_fashion_mnist(mirrors=sys.argv[1])
except OSError as error:
    print(error)
"""
    start = time.monotonic()
    with small_world(), serve(FAULTS["drips a header"][0]) as (mirror, heads):
        assert f"{mirror}{NAMES[0]}.gz: silent for 0.3 s" in finish(child(code, mirror))
        assert time.monotonic() - start < 30  # the drip goes on for a minute


@pytest.mark.parametrize("mirror, reason", [
    ("http://127.0.0.1:{port}/", "refused"), ("ftps://x/", "unknown url type"), ("x", "unknown url type"),
    ("http://[/", "."), ("http://127.0.0.1:port/", "port"), ("http://a b/", "."),
    (f"http://{300 * 'x'}/", ".")])
def test_a_mirror_that_is_no_address_is_left_for_the_next(mirror, reason):
    """Promise: nobody at the address, or no address at all, is a reason like others. Catches: InvalidURL,
    UnicodeError and the like at the caller's."""
    with socket.socket() as nobody, small_world() as folder, serve(good) as (working, heads):
        nobody.bind(("127.0.0.1", 0))  # bound, but it does not listen
        mirror = mirror.format(port=nobody.getsockname()[1])
        with pytest.raises(OSError, match=rf"{NAMES[0]}\.gz: .*{reason}"):
            data.load_fashion_mnist(mirrors=mirror)  # a string counts as one mirror
        check_small(data.load_fashion_mnist(mirrors=(mirror, working.rstrip("/"))))  # slash or no slash


def test_a_slow_mirror_that_is_fast_enough_is_waited_for():
    """Promise: only silence and less than the named rate end a download, not its length. Catches: a limit on
    the whole download, a rate counted from the wrong start."""
    def reply(name, connection):
        body = PACKED[name.removesuffix(".gz")]
        connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
        for start in range(0, len(body), 1000):
            connection.sendall(body[start:start + 1000])
            time.sleep(0.14 if name == f"{NAMES[0]}.gz" else 0)

    limits = {"SILENT_SECONDS": 1.0, "SLOW_SECONDS": 0.2, "SLOW_BYTES_PER_SECOND": 1000}
    with small_world(**limits), serve(reply) as (mirror, heads):
        check_small(data.load_fashion_mnist(mirrors=[mirror]))


def test_client_name_is_not_the_default_one():
    """Promise: hosts that refuse urllib's own name serve us. Catches: a request without a User-Agent."""
    with small_world(), serve(good) as (mirror, heads):
        data.load_fashion_mnist(mirrors=[mirror])
        for head in heads:
            name, = [line for line in head.lower().split("\r\n") if line.startswith("user-agent:")]
            assert "urllib" not in name
        assert len(heads) == 4


def test_progress_is_shown_on_a_terminal_only(capsys):
    """Promise: megabytes on a terminal, not a byte in a log file. Catches: a progress bar in every log."""
    with small_world() as folder, serve(good) as (mirror, heads):
        data.load_fashion_mnist(mirrors=[mirror])
        assert capsys.readouterr() == ("", "")
        terminal = io.StringIO()
        terminal.isatty = lambda: True
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stderr", terminal)
            shutil.rmtree(folder / "xdg")
            data.load_fashion_mnist(mirrors=[mirror])
        assert f"{mirror}{NAMES[0]}.gz" in terminal.getvalue() and " MB" in terminal.getvalue()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stderr", None)  # as in a program without a console
            shutil.rmtree(folder / "xdg")
            data.load_fashion_mnist(mirrors=[mirror])
        assert terminal.getvalue().endswith("\n") and capsys.readouterr() == ("", "")


def test_the_error_lists_every_place_and_the_remedies():
    """Promise: if nothing serves, the error names every place tried with its reason, and what helps. Catches:
    a place that is passed over silently, an error that leaves one alone."""
    forbidden, absent = serve(status(b"403 No")), serve(status(b"404 No"))
    with small_world() as folder, forbidden as (first, _), absent as (second, _):
        with pytest.raises(OSError) as caught:
            data.load_fashion_mnist(mirrors=[first, second])
        message = str(caught.value)
        for part in (f"{folder}/xdg/minijax: ", f"{folder}/debian: ",
                     f"{first}{NAMES[0]}.gz: HTTPError: HTTP Error 403",
                     f"{second}{NAMES[0]}.gz: HTTPError: HTTP Error 404", "apt install dataset-fashion-mnist",
                     "--data-dir", "--dataset synthetic"):
            assert part in message
        with pytest.raises(OSError, match="mirrors: none to ask"):
            data.load_fashion_mnist(download=False)


def test_a_failed_write_leaves_nothing_and_says_where():
    """Promise: a full disk is an OSError that names the folder, and leaves no temporary file. Catches:
    cleaning up only after success, a partial file under the final name."""
    def full(path, raw):
        with open(path, "wb") as file:
            file.write(raw[:10])
        raise OSError(28, "No space left on device", str(path))

    with small_world() as folder, serve(good) as (mirror, heads), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match=f"No space left on device.*{folder}/xdg/minijax"):
            data.load_fashion_mnist(mirrors=[mirror])
        assert os.listdir(folder / "xdg/minijax") == []


def test_leftovers_of_killed_processes_are_removed():
    """Promise: temporary files do not pile up: old ones go at the next download, young ones (another
    process's) stay. Catches: no cleaning, cleaning that destroys the download of a neighbour, or other
    files."""
    with small_world() as folder, serve(good) as (mirror, heads):
        cache = folder / "cache"
        cache.mkdir()
        code = ("os.replace = lambda *args: os.kill(os.getpid(), signal.SIGKILL)\n"
                "data.load_fashion_mnist(sys.argv[1], mirrors=[sys.argv[2]])")
        killed = child(code, cache, mirror)
        killed.communicate(timeout=100)
        assert killed.returncode == -signal.SIGKILL  # between write and rename
        left, = os.listdir(cache)
        assert left.startswith(f"{NAMES[0]}.gz.") and left.endswith(".tmp")
        stranger = cache / "notes.tmp"
        stranger.write_bytes(b"")
        os.utime(stranger, (1, 1))
        (cache / f"{NAMES[0]}.gz.gone.tmp").symlink_to("nowhere")  # as if a neighbour had just removed it
        with pytest.MonkeyPatch.context() as patch:
            later = time.time() + 1e6  # our clock is wrong against the disk's
            patch.setattr(time, "time", lambda: later)
            check_small(data.load_fashion_mnist(cache, mirrors=[mirror]))
        (cache / f"{NAMES[0]}.gz.gone.tmp").unlink()
        assert (cache / left).exists()  # young: its process may live
        (cache / f"{NAMES[0]}.gz").unlink()
        os.utime(cache / left, (time.time() - 400, time.time() - 400))
        check_small(data.load_fashion_mnist(cache, mirrors=[mirror]))
        assert sorted(os.listdir(cache)) == sorted([f"{name}.gz" for name in NAMES] + ["notes.tmp"])


def test_four_processes_at_once_and_kills_at_any_moment():
    """Promise: processes that fill the same empty cache at the same time all succeed and leave the four files
    alone; one killed at any moment leaves nothing wrong under a final name. Catches: a shared temporary name,
    mkdir without exist_ok, writing under the final name, a cleaning that stumbles over a neighbour."""
    def slow(name, connection):
        body = PACKED[name.removesuffix(".gz")]
        connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body))
        for start in range(0, len(body), 1500):
            connection.sendall(body[start:start + 1500])
            time.sleep(0.01)

    code = """
killed, shared, mirror = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]

def start(**options):
    pid = os.fork()
    if pid == 0:
        try:
            data.load_fashion_mnist(mirrors=[mirror], **options)
            os._exit(0)
        finally:  # with an error
            os._exit(1)
    return pid

for trial in range(20):
    pid = start(data_dir=killed)
    time.sleep(random.Random(trial).uniform(0, 0.25))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    for name, (size, sha256) in data.FILES.items():
        if (killed / f"{name}.gz").exists():
            raw = gzip.decompress((killed / f"{name}.gz").read_bytes())
            assert hashlib.sha256(raw).hexdigest() == sha256
            if trial % 3 == 0:
                (killed / f"{name}.gz").unlink()
data.load_fashion_mnist(killed, mirrors=[mirror])

os.environ["MINIJAX_DATA"] = str(shared)
replace = os.replace
os.replace = lambda *paths: (time.sleep(0.02), replace(*paths))  # so that they meet between write and rename
pids = [start() for _ in range(4)]
assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0, 0, 0]
"""
    with small_world() as folder, serve(slow) as (mirror, heads):
        (folder / "killed").mkdir()
        shared = folder / "not/yet/there"
        finish(child(code, folder / "killed", shared, mirror))
        for cache in folder / "killed", shared:
            check_small(data.load_fashion_mnist(cache, download=False))
        assert sorted(os.listdir(shared)) == sorted(f"{name}.gz" for name in NAMES)


def test_a_complete_read_only_cache_is_enough():
    """Promise: an ordinary user loads from a folder that only others can write, and where files are missing
    the error names the folder before anything is fetched. Catches: a mkdir, lock or write on the way, a
    download that is thrown away afterwards."""
    code = """
if os.getuid() == 0:  # to whom modes mean nothing
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
for folder in sys.argv[2:]:
    try:
        print(data.load_fashion_mnist(folder, mirrors=[sys.argv[1]])["train"]["image"].shape)
    except OSError as error:
        print(json.dumps(str(error)))
"""
    with small_world() as folder, serve(good) as (mirror, heads):
        folder.chmod(0o755)
        whole, part = fill(folder / "whole"), fill(folder / "part", names=NAMES[1:])
        for cache in whole, part:
            cache.chmod(0o555)
        try:
            first, second = finish(child(code, mirror, whole, part)).splitlines()
        finally:
            for cache in whole, part:
                cache.chmod(0o755)
        assert first == "(12, 28, 28)"
        assert f"{part}, which would keep the file, is not writable" in second and not heads


REAL = next((str(folder) for folder in (data.DEBIAN_FOLDER,) if folder.is_dir()), None)


@pytest.mark.skipif(REAL is None, reason="needs the Debian package dataset-fashion-mnist")
def test_the_real_files():
    """Promise: the real data loads, is balanced and is what the world knows. Catches: a wrong hash or size in
    the table, swapped files or axes."""
    assert [size for size, _ in data.FILES.values()] == [16 + 60000 * 784, 8 + 60000, 16 + 10000 * 784, 10008]
    dataset = data.load_fashion_mnist(REAL, download=False)
    for part, count in ("train", 6000), ("test", 1000):
        assert dataset[part]["image"].shape == (10 * count, 28, 28)
        assert np.bincount(dataset[part]["label"]).tolist() == 10 * [count]
    train = dataset["train"]
    assert [data.CLASS_NAMES[label] for label in train["label"][:4]] == [
        "Ankle boot", "T-shirt/top", "T-shirt/top", "Dress"]
    assert np.mean(train["image"] / 255.0) == pytest.approx(0.2860, abs=5e-5)  # as everybody quotes
    assert np.std(train["image"] / 255.0) == pytest.approx(0.3530, abs=5e-5)


def test_data_main(capsys):
    """Promise: `python data.py` shows origin, counts and images; a user's mistake is one line and exit status
    1. Catches: a traceback, a count of the wrong part, an image upside down."""
    with small_world() as folder:
        data.main(["--data-dir", str(fill(folder / "cache"))])
        out = capsys.readouterr().out
        assert f"Fashion-MNIST from {folder}/cache" in out
        for label, name in enumerate(data.CLASS_NAMES):
            train, test = (int(np.sum(SMALL[labels] == label)) for labels in NAMES[1::2])
            assert f"{name:12}{train:8}{test:8}\n" in out
        assert f"{'all':12}{12:8}{7:8}\n" in out
        pictures = out.split("all")[1].split("\n\n")[1:]
        assert [picture.splitlines()[0] for picture in pictures] == [
            f"{data.CLASS_NAMES[label]}:" for label in SMALL[NAMES[1]][:4]]
        for picture, image in zip(pictures, SMALL[NAMES[0]]):
            rows = picture.splitlines()[1:]
            assert len(rows) == 14
            for row, pixels in zip(rows, image[::2]):
                assert row == "".join(" .:-=+*%#@"[pixel * 10 // 260] for pixel in pixels.tolist()).rstrip()
        with pytest.raises(SystemExit) as caught:
            data.main(["--data-dir", str(folder / "absent")])
        assert caught.value.code == f"data.py: data_dir must be a folder that exists, got '{folder}/absent'"
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as caught:
            # Not the signal itself, which a shell makes its background jobs ignore.
            patch.setattr(data, "load_fashion_mnist", mock.Mock(side_effect=KeyboardInterrupt))
            data.main([])
        assert caught.value.code == "data.py: interrupted"


def test_data_works_alone_without_a_device():
    """Promise: the file imports and works in an empty folder, and neither importing it nor its main() touches
    a device. Catches: an import of a sibling, a module-level jnp array."""
    with small_world() as folder:
        shutil.copy(data.__file__, folder)
        code = ("import data; data.FILES = " + repr(SMALL_FILES) + "; data.main(['--data-dir', 'cache']);"
                "d = data.load_fashion_mnist('cache'); "
                "print(*[b['image'].shape for b in data.stack(data.batches(d['train'], 4, seed=0), 2)])")
        fill(folder / "cache")
        options = {"cwd": folder, "capture_output": True, "text": True, "timeout": 100,
                   "env": {**os.environ, "PYTHONPATH": "", "JAX_PLATFORMS": "none_such"}}
        result = subprocess.run([sys.executable, "-c", code], **options)
        assert result.returncode == 0, result.stderr
        assert result.stdout.endswith("(2, 4, 28, 28) (1, 4, 28, 28)\n")
        result = subprocess.run([sys.executable, "data.py", "--data-dir", "absent"], **options)
        assert (result.returncode, result.stdout) == (1, "")
        assert result.stderr == "data.py: data_dir must be a folder that exists, got 'absent'\n"


# ---------------------------------------------------------------------------------------------------------
# data.py: arrays and batches
# ---------------------------------------------------------------------------------------------------------


@given(st.sampled_from([(), (1,), (5,), (0,), (3, 2)]), st.integers(0, 2**32 - 1))
def test_preprocess_is_pixel_over_255_in_float32(leading, seed):
    """Promise: NumPy gives the float32 nearest to pixel / 255, whatever the leading axes, row-major, and
    leaves its input alone. Catches: uint8 arithmetic, divisor 256, float64, a transposed or merged axis."""
    images = np.random.default_rng(seed).integers(0, 256, (*leading, 28, 28)).astype(np.uint8)
    images.flags.writeable = False
    got = data.preprocess(images)
    assert isinstance(got, np.ndarray) and got.dtype == np.float32 and got.shape == (*leading, 784)
    right = (images.astype(np.float64) / 255).astype(np.float32)
    np.testing.assert_array_equal(got, right.reshape(*leading, 784))


def test_preprocess_under_jax():
    """Promise: the same numbers (within the last bit, since a compiler may divide differently) from a JAX
    array, under jit, under vmap and for a stack. Catches: NumPy calls on a tracer, float64 under x64, lost
    axes."""
    every = np.arange(4 * 784, dtype=np.int64).astype(np.uint8).reshape(2, 2, 28, 28)  # all 256 values
    right = (every.astype(np.float64) / 255).astype(np.float32).reshape(2, 2, 784)
    for function in (data.preprocess, jax.jit(data.preprocess), jax.vmap(data.preprocess),
                     jax.jit(jax.vmap(jax.vmap(data.preprocess)))):
        got = function(jnp.asarray(every))
        assert isinstance(got, jax.Array) and got.dtype == jnp.float32
        np.testing.assert_array_max_ulp(np.asarray(got), right, maxulp=1)
        assert got.min() == 0 and got.max() == 1
    with jax.enable_x64(True):
        assert jax.eval_shape(data.preprocess, every).dtype == jnp.float32
    np.testing.assert_allclose(data.preprocess(every)[0, 0, [0, 1, 128, 255]],
                               [0, 0.003921569, 0.50196081, 1], rtol=1e-7)


@pytest.mark.parametrize("images", [
    np.zeros((2, 28, 28), np.float32), np.zeros((2, 28, 28), np.int32), np.zeros((2, 28, 28), np.int8),
    np.zeros((2, 784), np.uint8), np.zeros((28, 28, 1), np.uint8), np.zeros(28, np.uint8), [[1, 2]], None])
def test_preprocess_refuses_what_is_not_images(images):
    """Promise: a ValueError that names what came, also while tracing. Catches: preprocessing twice, flat or
    channel-last images, int8 that has wrapped round."""
    name = str(getattr(images, "dtype", type(images).__name__))
    with pytest.raises(ValueError, match=rf"uint8 \[..., 28, 28\], got .*{name}"):
        data.preprocess(images)
    if isinstance(images, np.ndarray):
        with pytest.raises(ValueError, match=name):
            jax.eval_shape(data.preprocess, images)


def test_synthetic_is_a_pure_function_of_its_seed():
    """Promise: same seed, same arrays, whatever NumPy's global generator; another seed, other arrays; the
    test part does not depend on the size of the training part; structure, balance and origin as promised.
    Catches: global random state, one stream for all, a test set that is a copy of training images."""
    np.random.seed(1)
    first = data.synthetic(3, 205, 50)
    np.random.seed(2)
    again, other_size = data.synthetic(np.int64(3), 205, 50), data.synthetic(3, 31, 50)
    for key in "image", "label":
        np.testing.assert_array_equal(first["train"][key], again["train"][key])
        np.testing.assert_array_equal(first["test"][key], again["test"][key])
        np.testing.assert_array_equal(first["test"][key], other_size["test"][key])
    assert set(first) == {"train", "test", "origin"}
    assert "made up" in first["origin"] and "seed 3" in first["origin"]
    for part, count in ("train", 205), ("test", 50):
        assert set(first[part]) == {"image", "label"}
        assert first[part]["image"].shape == (count, 28, 28) and first[part]["image"].dtype == np.uint8
        assert first[part]["label"].shape == (count,) and first[part]["label"].dtype == np.uint8
        counts = np.bincount(first[part]["label"], minlength=10)
        assert len(counts) == 10 and counts.max() - counts.min() <= 1
        assert not np.array_equal(first[part]["label"], np.arange(count) % 10)  # shuffled
        assert not np.array_equal(first[part]["image"], data.synthetic(4, 205, 50)[part]["image"])
    twins = data.synthetic(3, 50, 50)
    assert len({image.tobytes() for part in ("train", "test") for image in twins[part]["image"]}) == 100
    for bad in (-1, 5, 5), (1.5, 5, 5), ("1", 5, 5), (1, 0, 5), (1, 5, 0), (1, 5, 2.0):
        with pytest.raises(ValueError, match="must be an integer of at least"):
            data.synthetic(*bad)


def test_synthetic_is_learnable_but_not_trivial():
    """Promise: a linear classifier, fitted by least squares, gets most of it right, and not all. Catches:
    labels that have nothing to do with the images, noise that drowns them, a test set from other patterns."""
    made_up = data.synthetic(0, 2000, 1000)
    other = data.synthetic(1, 10, 1000)["test"]

    def features(images):  # a mean per block, [n, 49]
        return images.reshape(-1, 7, 4, 7, 4).mean(axis=(2, 4)).reshape(-1, 49) / 255 - 0.5

    targets = np.eye(10)[made_up["train"]["label"]] - 0.1
    weights = np.linalg.lstsq(features(made_up["train"]["image"]), targets, rcond=None)[0]  # [49, 10]
    accuracy, accuracy_elsewhere = (
        np.mean(np.argmax(features(part["image"]) @ weights, axis=1) == part["label"])
        for part in (made_up["test"], other))
    assert accuracy_elsewhere < 0.4  # another seed has other patterns
    assert 0.75 < accuracy < 0.99


def numbered(count, dtype=np.uint8, side=2):
    """A dataset whose example i shows the number i + 1 everywhere, so that no row looks like padding."""
    image = np.broadcast_to(np.arange(1, count + 1, dtype=dtype)[:, None, None], (count, side, side)).copy()
    return {"image": image, "label": (np.arange(count) * 7 % 10).astype(np.uint8)}


def rows(items):
    """The numbers (as in `numbered`) of the real examples in batches, in order."""
    return np.concatenate([batch["image"][batch["mask"]][:, 0, 0] for batch in items] or [[]]).astype(int) - 1


@given(st.integers(1, 40), st.integers(1, 45), st.sampled_from([None, 0, 1, 2**40]), st.integers(0, 3),
       st.sampled_from(["drop", "pad"]), st.sampled_from([np.uint8, np.float32]))
@settings(max_examples=200 * SCALE)
def test_batches_cover_each_example_exactly_once(count, batch_size, seed, epoch, remainder, dtype):
    """Promise: all batches have one shape and the dataset's dtypes; together they hold each example once,
    with its own label; "drop" leaves out less than a batch, "pad" leaves out none and fills up with zeros
    under a False mask. Catches: a ragged last batch, sampling with replacement, images and labels shuffled
    apart, padding counted as data, an off-by-one at a multiple of the batch size."""
    dataset = numbered(count, dtype)
    options = {"seed": seed, "epoch": epoch, "remainder": remainder}
    for key, default in ("seed", None), ("epoch", 0), ("remainder", "drop"):
        if options[key] == default:  # then leave it out
            del options[key]
    if remainder == "drop" and batch_size > count:
        with pytest.raises(ValueError, match=f"{batch_size} .* {count} examples"):
            data.batches(dataset, batch_size, **options)
        return
    items = list(data.batches(dataset, batch_size, **options))
    assert len(items) == (count // batch_size if remainder == "drop" else -(-count // batch_size))
    for batch in items:
        assert set(batch) == {"image", "label", "mask"}
        assert batch["image"].shape == (batch_size, 2, 2) and batch["image"].dtype == dtype
        assert batch["label"].shape == (batch_size,) and batch["label"].dtype == np.uint8
        assert batch["mask"].shape == (batch_size,) and batch["mask"].dtype == bool
        assert not batch["image"][~batch["mask"]].any() and not batch["label"][~batch["mask"]].any()
        np.testing.assert_array_equal(batch["mask"], np.sort(batch["mask"])[::-1])  # padding comes last
        np.testing.assert_array_equal(batch["label"][batch["mask"]], rows([batch]) * 7 % 10)
    assert all(batch["mask"].all() for batch in items[:-1]) and items[-1]["mask"].any()
    order = rows(items)
    left_out = count % batch_size if remainder == "drop" else 0
    assert len(set(order)) == len(order) == count - left_out
    if seed is None:
        np.testing.assert_array_equal(order, np.arange(len(order)))


@given(st.integers(0, 2**70), st.integers(0, 1000))
def test_order_is_a_pure_function_of_seed_and_epoch(seed, epoch):
    """Promise: the order depends on seed and epoch and on nothing else, and on both of them. Catches: epoch
    0's order replayed after a resume, seed + epoch for a seed, global random state, an order that changes
    with the batch size or the remainder."""
    dataset = numbered(60)
    order = rows(data.batches(dataset, 7, seed=seed, epoch=epoch, remainder="pad"))
    np.random.seed(epoch)
    np.testing.assert_array_equal(order, rows(data.batches(dataset, 60, seed=seed, epoch=epoch)))
    np.testing.assert_array_equal(order[:56], rows(data.batches(dataset, 7, seed=seed, epoch=epoch)))
    resumed = itertools.islice(data.batches(dataset, 7, seed=np.uint64(seed % 2**64), epoch=epoch), 3, None)
    if seed < 2**64:
        np.testing.assert_array_equal(order[21:56], rows(resumed))
    for other in (seed + 1, epoch), (seed, epoch + 1), (seed + 1, max(epoch - 1, 0)), (epoch, seed):
        if other != (seed, epoch):
            assert not np.array_equal(order, rows(data.batches(dataset, 60, seed=other[0], epoch=other[1])))


def test_order_on_every_platform():
    """Promise: this very order, on any machine and with any NumPy, so that a checkpoint resumes elsewhere.
    Catches: a generator whose stream NumPy does not keep, an unstable sort, a change without notice."""
    for (seed, epoch), order in {(0, 0): [0, 8, 9, 3, 7, 5, 1, 2, 6, 4],
                                 (0, 1): [3, 7, 4, 2, 9, 8, 1, 6, 5, 0],
                                 (1, 0): [2, 0, 1, 4, 5, 6, 7, 8, 3, 9],
                                 (2**40, 7): [2, 7, 4, 1, 6, 8, 5, 9, 0, 3]}.items():
        assert rows(data.batches(numbered(10), 10, seed=seed, epoch=epoch)).tolist() == order
    assert rows(data.batches(numbered(10), 10, seed=0)).tolist()[:3] == [0, 8, 9]  # epoch 0 by default


def test_order_is_uniform():
    """Promise: every example is as likely at every place. Catches: a biased shuffle (chance of a false alarm,
    were the seeds not fixed: below 1e-5)."""
    orders = np.array([rows(data.batches(numbered(5), 5, seed=1, epoch=epoch)) for epoch in range(2000)])
    counts = np.array([np.bincount(orders[:, place], minlength=5) for place in range(5)])
    assert np.abs(counts - 400).max() < 5 * np.sqrt(2000 * 0.2 * 0.8)
    before = [order[np.argmax(order == 2) - 1] for order in orders if order[0] != 2]  # neighbours too
    assert abs(np.mean(np.equal(before, 1)) - 0.25) < 0.05


GOOD_LABELS = np.zeros(4, np.uint8)


@pytest.mark.parametrize("change, reason", [
    ({"batch_size": 0}, "batch_size.*at least 1, got 0"), ({"batch_size": -1}, "batch_size"),
    ({"batch_size": 2.0}, "batch_size.*got 2.0"), ({"batch_size": None}, "batch_size"),
    ({"seed": -1}, "seed.*at least 0"), ({"seed": 0.5}, "seed"), ({"seed": "x"}, "seed"),
    ({"epoch": -1}, "epoch"), ({"epoch": 1.0}, "epoch"), ({"epoch": None}, "epoch"),
    ({"remainder": "keep"}, "'drop' or 'pad', got 'keep'"), ({"remainder": None}, "remainder"),
    ({"batch_size": 5}, "batch_size 5 .* 4 examples"),
    ({"label": GOOD_LABELS[:3]}, r"\(4, 2, 2\) and \(3,\)"), ({"label": GOOD_LABELS[:, None]}, r"\(4, 1\)"),
    ({"label": np.uint8(3)}, r"\(\)"), ({"label": np.zeros(4)}, "integers in 0..9, got float64"),
    ({"label": np.zeros(4, bool)}, "integers in 0..9, got bool"), ({"label": list("abcd")}, "'a' 'd'"),
    ({"label": [0, 9, 10, 0]}, r"in 0..9, got int64, .*0 10\]"),
    ({"label": [0, -1, 9, 0]}, r"in 0..9, got int64, .*-1 +9\]"),
    ({"label": GOOD_LABELS[:0], "image": np.zeros((0, 2, 2))}, "n > 0"),
    ({"image": np.uint8(0)}, "n > 0"), ({"image": np.uint8(0), "label": np.uint8(0)}, "n > 0"),
    ({"whole": True}, "hold 'image' and 'label', got .*'origin'")])
def test_batches_refuses_bad_arguments_at_the_call(change, reason):
    """Promise: a ValueError that names what was given, at the call, before any item is asked for. Catches:
    checks inside the generator, labels outside 0..9, no batch at all where one is expected."""
    dataset = {"image": np.zeros((4, 2, 2)), "label": GOOD_LABELS}
    dataset.update({key: change[key] for key in ("image", "label") if key in change})
    options = {"batch_size": 2, "seed": 0, "epoch": 0, "remainder": "drop"}
    options.update({key: change[key] for key in options if key in change})
    with pytest.raises(ValueError, match=reason):
        data.batches({"train": dataset, "origin": "x"} if "whole" in change else dataset, **options)
    greatest = {"image": np.zeros((4, 2, 2)), "label": GOOD_LABELS + 9}
    assert len(list(data.batches(greatest, np.uint8(4), seed=np.int32(1), epoch=np.int64(2)))) == 1  # is good


@pytest.mark.parametrize("options", [{}, {"seed": 0}, {"remainder": "pad"}])
def test_batches_are_copies(options):
    """Promise: a batch can be kept, and changed, without touching another batch or the dataset; read-only and
    JAX arrays serve as datasets. Catches: views of the dataset, one buffer that is filled again."""
    dataset = numbered(10)
    kept = list(data.batches(dataset, 4, **options))
    before = [{key: value.copy() for key, value in batch.items()} for batch in kept]
    for key in "image", "label":
        kept[0][key][...] = 99
    for batch, old in zip(kept[1:], before[1:]):
        for key in batch:
            np.testing.assert_array_equal(batch[key], old[key])
    for key, value in numbered(10).items():
        np.testing.assert_array_equal(dataset[key], value)
        dataset[key].flags.writeable = False
    for form in dataset, {key: jnp.asarray(value) for key, value in dataset.items()}:
        for batch, old in zip(data.batches(form, 4, **options), before, strict=True):
            for key in batch:
                assert type(batch[key]) is np.ndarray
                np.testing.assert_array_equal(batch[key], old[key])


@given(st.integers(0, 12), st.integers(1, 5))
def test_stack_puts_steps_in_front(count, steps):
    """Promise: stacks of `steps` items, the last one shorter, nothing lost, nothing read ahead, any pytree.
    Catches: a dropped last stack, an endless empty one, a wrong axis, a source drained at once."""
    pulled = []

    def source():
        for i in range(count):
            pulled.append(i)
            yield {"a": np.full((2, 3), i, np.uint8), "b": (np.float32(i), [np.array([i % 2 == 0])])}

    assert len(list(data.stack([np.zeros(3)] * count, steps))) == -(-count // steps)  # a list will do
    items = []
    for stacked in data.stack(source(), steps):
        items.append(stacked)
        assert len(pulled) == min(count, steps * len(items))
    assert [len(item["a"]) for item in items] == [min(steps, count - i) for i in range(0, count, steps)]
    for item, start in zip(items, range(0, count, steps)):
        numbers = np.arange(start, start + len(item["a"]))
        np.testing.assert_array_equal(item["a"], numbers[:, None, None] + np.zeros((1, 2, 3)))
        assert [leaf.dtype for leaf in jax.tree.leaves(item)] == [np.uint8, np.float32, bool]
        np.testing.assert_array_equal(item["b"][0], numbers)
        np.testing.assert_array_equal(item["b"][1][0], numbers[:, None] % 2 == 0)


def test_stack_and_to_device_refuse_bad_arguments_at_the_call():
    """Promise: ValueError, or TypeError for what is no iterable, at the call. Catches: checks in the
    generator."""
    for steps in 0, -1, 1.0, None, "2":
        with pytest.raises(ValueError, match="steps must be an integer of at least 1"):
            data.stack([], steps)
    for size in -1, 1.5, None:
        with pytest.raises(ValueError, match="size must be an integer of at least 0"):
            data.to_device([], size=size)
    for function in lambda: data.stack(3, 1), lambda: data.to_device(3):
        with pytest.raises(TypeError):
            function()


@given(st.integers(0, 6), st.integers(0, 4))
def test_to_device_works_ahead(count, size):
    """Promise: the same pytrees as JAX arrays, in order; while item i is in use, items i+1 .. i+size have
    been read and placed, and no more. Catches: no prefetch, a source drained at once, an item lost at either
    end."""
    pulled = []

    def source():
        for i in range(count):
            pulled.append(i)
            yield {"a": np.full((2, 3), i, np.uint8), "b": (np.array([i]) > 2, jnp.float32(i)),
                   "key": jax.random.key(i)}  # JAX arrays pass through, even one that NumPy cannot hold

    items = data.to_device(source(), size=size)
    assert not pulled
    for i, item in enumerate(items):
        assert len(pulled) == min(count, i + 1 + size)
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(item))
        assert item["a"].dtype == jnp.uint8 and item["b"][0].dtype == bool
        np.testing.assert_array_equal(item["a"], np.full((2, 3), i))
        assert item["b"][0].item() == (i > 2) and item["b"][1] == i and item["key"] == jax.random.key(i)
    assert len(pulled) == count and next(items, "end") == "end"
    pulled.clear()
    next(data.to_device(source()), None)
    assert len(pulled) == min(count, 3)  # two ahead, if nothing is said


def test_to_device_yields_what_never_changes():
    """Promise: a source may refill its buffer as soon as it is asked for the next item. Catches: NumPy memory
    that JAX aliases (it does so on a CPU for aligned memory, hence several sizes and offsets)."""
    for side in 1, 64, 1024:
        memory = np.zeros(side * side * 4 + 64, np.uint8)
        for offset in range(0, 64, 16):
            start = (offset - memory.ctypes.data) % 64
            buffer = memory[start:start + 4 * side * side].view(np.float32).reshape(side, side)

            def source():
                for i in range(5):
                    buffer[...] = i
                    yield {"x": buffer}
                buffer[...] = -1

            for i, item in enumerate(list(data.to_device(source()))):
                np.testing.assert_array_equal(item["x"], np.full((side, side), i))


@pytest.mark.parametrize("size", [0, 2, 9])
def test_to_device_raises_a_source_s_error_in_its_turn(size):
    """Promise: the items before an error all arrive, then the error itself, then the end. Catches: good
    batches lost because the error was met while working ahead, an error swallowed or wrapped."""
    problem = KeyError("row 3")

    def source():
        yield from (np.array([i]) for i in range(3))
        raise problem

    items = data.to_device(source(), size=size)
    assert [int(next(items)[0]) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError) as caught:
        next(items)
    assert caught.value is problem and next(items, "end") == "end"


def test_to_device_over_several_devices_and_processes():
    """Promise: with a sharding every leaf lies on the devices that it names; what does not divide is a
    ValueError with both numbers; over two processes each brings its own half of the batch. Catches: a
    sharding that is ignored, data that each process has to hold whole, an error from deep inside XLA."""
    code = """
import os, sys
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, numpy as np
import data
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
processes, rank = int(sys.argv[2]), int(sys.argv[3])
if processes > 1:
    jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", processes, rank)
devices = len(jax.devices())
assert devices == 4 and len(jax.local_devices()) == 4 // processes
mesh = Mesh(jax.devices(), ("data",))
whole = np.arange(2 * 20 * 3, dtype=np.uint8).reshape(2, 20, 3)
share = whole[:, 20 // processes * rank:20 // processes * (rank + 1)]
for spec, batch in (P("data"), share[0]), (P(None, "data"), share):
    sharding = NamedSharding(mesh, spec)
    for _ in range(2):
        item, = data.to_device([{"a": batch.copy(), "b": batch[..., 0].copy()}], sharding)
        for key, right in ("a", whole), ("b", whole[..., 0]):
            right = right if batch.ndim == 3 else right[0]
            assert item[key].shape == right.shape and item[key].sharding == sharding, (item[key].shape, key)
            assert len(item[key].addressable_shards) == 4 // processes
            for shard in item[key].addressable_shards:
                np.testing.assert_array_equal(shard.data, right[shard.index])
    good, bad = np.zeros((2, 20)), np.zeros((19, 19))
    items = data.to_device(iter([good if spec[0] is None else good.T, bad]), sharding)
    next(items)
    try:
        next(items)
    except ValueError as error:
        assert "19" in str(error) and "4" in str(error), error
    else:
        raise SystemExit("no error")
replicated, = data.to_device([share[0]], NamedSharding(Mesh(jax.local_devices(), ("data",)), P()))
assert replicated.is_fully_replicated
"""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flag = "--xla_force_host_platform_device_count="
    runs = [child(code, port, processes, rank, XLA_FLAGS=f"{flag}{4 // processes}")
            for processes in (1, 2) for rank in range(processes)]
    for run in runs:
        finish(run)


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


def result_of(process):
    """(exit code, stdout, stderr) of such a process."""
    try:
        out, err = process.communicate(timeout=150)
    finally:
        process.kill()
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


LAYER = [{"w": jnp.ones((4, 2)), "b": jnp.ones(2)}]


@pytest.mark.parametrize("call, words", [
    (lambda: train.init_mlp(jax.random.key(0), [5]), "two or more"),
    (lambda: train.init_mlp(jax.random.key(0), [5, 0]), "positive"),
    (lambda: train.mlp(LAYER, jnp.ones((3, 5))), r"\[B, 4\], got float32 \[3, 5\]"),
    (lambda: train.mlp(LAYER, jnp.ones(4)), r"\[B, 4\], got float32 \[4\]"),
    (lambda: train.mlp(LAYER, jnp.ones((3, 4), jnp.uint8)), "uint8"),
    (lambda: train.confusion_matrix(np.zeros(3, int), np.zeros(2, int), 2), r"\[3\], \[2\]"),
    (lambda: train.confusion_matrix(np.zeros((3, 1), int), np.zeros((3, 1), int), 2), r"\[3, 1\]"),
    (lambda: train.confusion_matrix(np.zeros(3), np.zeros(3, int), 2), "labels must be integers, got float32"),
    (lambda: train.confusion_matrix(np.zeros(3, int), np.zeros(3), 2), "predictions must be integers"),
    (lambda: train.confusion_matrix(np.zeros(3, int), np.zeros(3, int), 2, np.ones(2, bool)), r"\[2\]"),
    (lambda: train.confusion_matrix(np.zeros(3, int), np.zeros(3, int), 2, np.ones(3, int)), "mask must be bool"),
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
    optimizer, params = train.make_optimizer(lambda n: 0.1 / (1 + n), decay, b2=b2), {"w": jnp.array(1.0)}
    step, state = train.make_train_step(lambda p, b: (p["w"] * b, {}), optimizer), optimizer.init(params)
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
                like = {"params": params, "opt_state": optimizer.init(params)}
                state = train.load_checkpoint(tmp_path / "c.npz", like)
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
        state = train.interval_loop(
            many, {"params": jnp.zeros(()), "opt_state": (), "step": 10}, (np.zeros(len(g)) for g in groups),
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

    train.interval_loop(steps, {"params": 0, "opt_state": 0, "step": 0}, [np.zeros(2)] * 3,
                        lambda *_: events.append("report"))
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
    padded = spoil({k: np.concatenate([v[order], np.zeros_like(v, shape=(-10 % size, *v.shape[1:]))])
                    for k, v in whole.items()})
    cut = ({k: v[low:low + size] for k, v in padded.items()} for low in range(0, 10, size))
    result = train.evaluate(params, cut)
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
    lambda r: np.asarray(r.integers(0, 2**60)), lambda r: r.normal(size=(1, 2)),
    lambda r: jax.random.key(int(r.integers(99))),
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


SAVED = {"w": jnp.ones((2, 3)), "n": jnp.ones((), jnp.int32), "k": jax.random.key(0)}


@pytest.mark.parametrize("like, words", [
    ({"w": SAVED["w"], "n": SAVED["n"]}, r"\['k'\] is only in the checkpoint"),
    (SAVED | {"x": jnp.ones(1)}, r"\['x'\] is missing"),
    (SAVED | {"w": jnp.ones((3, 2))}, r"\['w'\] is float32\[2, 3\] there, expected float32\[3, 2\]"),
    (SAVED | {"n": jnp.ones(())}, r"\['n'\] is int32\[\] there, expected float32\[\]"),
    (SAVED | {"w": jnp.ones((2, 3), jnp.bfloat16)}, "expected bfloat16"),
    (SAVED | {"k": jax.random.key(0, impl="rbg")}, "key<fry>.* expected key<rbg>"),
    (list(SAVED.values()), "missing"),
])
def test_checkpoint_of_another_architecture_is_refused(like, words, tmp_path):
    """The error names the first leaf that differs, with what the file holds and what was expected."""
    train.save_checkpoint(tmp_path / "c.npz", SAVED)
    with pytest.raises(ValueError, match=words):
        train.load_checkpoint(tmp_path / "c.npz", like)


def test_checkpoint_keeps_the_sharding_and_compiles_nothing_anew(tmp_path):
    """A state loaded `like` the running one goes into the same compiled step. Catches uncommitted leaves."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("batch",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    tree, traces = jax.device_put({"w": jnp.ones(3)}, sharding), []
    step = jax.jit(lambda tree: traces.append(1) or jax.tree.map(lambda x: x + 1, tree), out_shardings=sharding)
    train.save_checkpoint(tmp_path / "c.npz", step(tree))
    loaded = train.load_checkpoint(tmp_path / "c.npz", tree)
    assert loaded["w"].sharding == sharding and step(loaded)["w"].tolist() == [3, 3, 3]
    assert len(traces) == 1 and step._cache_size() == 1


def test_damaged_checkpoint_is_a_value_error_and_never_the_latest(tmp_path, capsys):
    """Each bit flipped, each truncation: refused with a ValueError, or harmless. Catches garbage read as parameters.

    Both readers agree: what `load_checkpoint` refuses, `latest_checkpoint` passes over.
    """
    path, tree = tmp_path / "step_1.npz", {"w": np.arange(3.0)}
    train.save_checkpoint(path, tree)
    whole = path.read_bytes()
    damaged = [whole[:cut] for cut in range(len(whole))]
    for position in range(len(whole)):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << position % 8
        damaged.append(bytes(flipped))
    refused = 0
    for content in damaged:
        path.write_bytes(content)
        try:
            assert_trees_close(train.load_checkpoint(path, tree), tree)
            assert train.latest_checkpoint(tmp_path) == path
        except ValueError as error:
            refused += 1
            assert "step_1.npz is damaged" in str(error) and train.latest_checkpoint(tmp_path) is None
            assert "step_1.npz is damaged" in capsys.readouterr().err
    assert refused > len(whole) * 1.5


def test_checkpoints_that_cannot_be_written_or_read(tmp_path, monkeypatch):
    """Objects are refused (no pickle), a missing file is an OSError, a failed save keeps the old file and no other."""
    path = tmp_path / "c.npz"
    with pytest.raises(FileNotFoundError):
        train.load_checkpoint(path, {})
    train.save_checkpoint(path, [np.ones(2)])
    with pytest.raises(ValueError, match="must be arrays or numbers, got object"):
        train.save_checkpoint(path, [object()])
    train.save_checkpoint(tmp_path / "big.npz", [np.arange(3.0).astype(">f8")])
    assert train.load_checkpoint(tmp_path / "big.npz", [np.zeros(3)])[0].tolist() == [0, 1, 2]
    (tmp_path / "big.npz").unlink()
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
    err = capsys.readouterr().err
    assert "step_12.npz is damaged" in err and "step_11.npz is damaged" in err


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
    result = train.main("--dataset synthetic --hidden 64 --epochs 5 --batch-size 100 --learning-rate 3e-3".split())
    out = capsys.readouterr().out
    first, *lines = out.splitlines()
    assert jax.devices()[0].device_kind in first and jax.__version__ in first and "synthetic" in first
    assert result["confusion"].sum() == 2000 and result["accuracy"] == np.trace(result["confusion"]) / 2000
    assert result["accuracy"] > 0.8 and lines[-1] == f"test accuracy {result['accuracy']:.4f}"
    assert sum("examples/s" in line for line in lines) == 5 * 3 and sum("test loss" in line for line in lines) == 5
    assert any("step     39" in line and "epoch   1" in line for line in lines)
    slow = ["with compilation" in line for line in lines if "examples/s" in line]
    # The shorter last interval of an epoch is compiled as well, before the line of the interval before it is printed.
    assert slow == [True, True] + 13 * [False]
    assert all(name[:7] in out for name in data.CLASS_NAMES) and "rows: true class" in out


@pytest.mark.parametrize("every, compilations", [(5, 2), (3, 3)])
def test_a_whole_run_compiles_the_step_and_the_evaluation_once(every, compilations, monkeypatch):
    """Traces of the model in two epochs: one for training, one for evaluation, one for a shorter last interval."""
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
    flags, handler = [*TINY, "--seed", "3", "--checkpoint-dir"], signal.getsignal(signal.SIGINT)
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
    assert exit_.value.code == 130
    assert f"interrupted: saved {saves[-1]}, the same command with --resume" in capsys.readouterr().err
    assert len(saves) == stop + 1  # the interval in which Ctrl-C came was finished and saved
    again = train.main([*flags, str(tmp_path / "broken"), "--resume"])
    assert f"going on from step {5 * (stop + 1)}" in capsys.readouterr().out
    assert final_state(tmp_path / "broken") == final_state(tmp_path / "whole")
    assert again["accuracy"] == whole["accuracy"] and signal.getsignal(signal.SIGINT) is handler


def test_a_killed_run_resumes_to_the_same_bits(tmp_path):
    """kill -9 at a random moment, a damaged newest checkpoint: the resumed run still ends as the unbroken one."""
    flags = ["minijax_train.py", *TINY, "--epochs", "6", "--log-every", "2", "--checkpoint-dir"]
    train.main([*flags[1:], str(tmp_path / "whole")])
    process = start(*flags, str(tmp_path / "broken"))
    while not list(tmp_path.glob("broken/step_*.npz")) and process.poll() is None:
        time.sleep(0.01)
    time.sleep(np.random.default_rng().uniform(0, 0.2))
    process.kill()
    result_of(process)
    newest = train.list_checkpoints(tmp_path / "broken")[-1]
    newest.write_bytes(newest.read_bytes()[:-9])
    code, out, err = result_of(start(*flags, str(tmp_path / "broken"), "--resume"))
    assert code == 0 and err.splitlines() == [line for line in err.splitlines() if f"{newest.name} is damaged" in line]
    assert final_state(tmp_path / "broken") == final_state(tmp_path / "whole")


@pytest.mark.parametrize("flags, words", [
    (["--batch-size", "0"], "argument --batch-size: expected int of at least 1 and at most 2147483647, got '0'"),
    (["--learning-rate", "nan"], "argument --learning-rate: expected float of at least 0, got 'nan'"),
    (["--seed", "4294967296"], "--seed"), (["--hidden", "2000000000"], "minijax_train.py: "),
    ([*TINY, "--plot", "/nowhere/x.png"], "--plot"),
    ([*TINY, "--habits", "--checkpoint-dir", "x"], "--habits"), ([*TINY, "--habits", "--distributed"], "--habits"),
    ([*TINY, "--batch-size", "10000", "--epochs", "1", "--learning-rate", "1e38"], "the test loss is nan"),
    (["--learning-rate", "inf"], "argument --learning-rate"), (["--hidden"], "argument --hidden"),
    (["--epochs", "x"], "argument --epochs"), (["--dataset", "mnist"], "argument --dataset"),
    (["--resume"], "--resume needs --checkpoint-dir"), (["--frob"], "unrecognized arguments: --frob"),
    (["--data-dir", "/nowhere"], "'/nowhere'"),
    ([*TINY, "--batch-size", "20000"], "20000 is more than the 10000 training images"),
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
                         [["--resume", "--epochs", "3"], "epochs 2, expected 3"],
                         [["--resume", "--hidden", "9"], "does not fit"]):
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
    _, save = train.checkpointing(tmp_path, {}, state, False, [])
    with pytest.raises(FloatingPointError, match="after step 4"):
        save(state)
    assert not list(tmp_path.iterdir())


def test_habits_table_adds_up(capsys):
    """Every row is there, gains are quotients of the speeds beside them, their product is the row of all four."""
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


def test_padding_counts_neither_as_right_nor_as_wrong():
    """Zero padding whose label the model happens to predict adds nothing to the accuracy. Catches an unmasked count."""
    params = [{"w": jnp.zeros((2, 3)), "b": jnp.array([1.0, 0.0, 0.0])}]  # always says 0
    batch = {"image": np.zeros((4, 2), np.float32), "label": np.array([0, 1, 0, 0]),
             "mask": np.array([True, True, False, False])}
    assert train.loss_fn(params, batch)[1]["accuracy"] == 0.5


@pytest.mark.parametrize("given", [{}, {"b1": 0.5, "b2": 0.5, "eps": 0.3}])
def test_the_optimizers_numbers_are_used_and_their_defaults_are_adams(given):
    """b1 0.9, b2 0.999, eps 1e-8 (Kingma & Ba 2015) unless others are given: tiny gradients show eps."""
    b1, b2, eps = ({"b1": 0.9, "b2": 0.999, "eps": 1e-8} | given).values()
    for grads in ([1.0, 0.0, 0.0], [2e-8, 1e-8]):
        optimizer, params, m, v = train.make_optimizer(1.0, 0.0, **given), jnp.array(0.0), 0.0, 0.0
        state = optimizer.init(params)
        for n, g in enumerate(grads, start=1):
            updates, state = optimizer.update(jnp.float32(g), state, params)
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
            np.testing.assert_allclose(updates, -m / (1 - b1**n) / (np.sqrt(v / (1 - b2**n)) + eps), rtol=1e-3)


def test_interval_loop_times_from_report_to_report(monkeypatch):
    """Each interval's seconds run from the report before it to its own. Catches a start never moved."""
    clock = iter([100.0, 101.0, 103.0, 107.0])
    monkeypatch.setattr(train.time, "perf_counter", lambda: next(clock))
    seen = []
    train.interval_loop(lambda p, o, b: (p, o, {"loss": b}), {"params": 0, "opt_state": 0, "step": 0}, [np.ones(2)] * 3,
                        lambda step, metrics, seconds: seen.append(seconds))
    assert seen == [1, 2, 4]


def test_confusion_matrix_with_as_many_classes_as_the_labels_dtype_has_values():
    """Masked pairs of uint8 labels with 256 classes are dropped. Catches the mark 256 wrapping round to class 0."""
    counted = np.asarray(train.confusion_matrix(np.zeros(3, np.uint8), np.zeros(3, np.uint8), 256, np.zeros(3, bool)))
    assert counted.sum() == 0


def test_checkpoint_bytes_are_on_the_disk_before_the_name(tmp_path, monkeypatch):
    """fsync sees the whole file under the temporary name. Catches a missing flush, fsync after the rename."""
    seen, path = [], tmp_path / "c.npz"
    monkeypatch.setattr(os, "fsync", lambda fd: seen.append((os.fstat(fd).st_size, path.exists())))
    train.save_checkpoint(path, [np.arange(1000.0)])
    assert seen == [(path.stat().st_size, False)]


STATE = {"params": {"w": np.ones(2)}, "opt_state": (), "step": 4}


def test_a_new_checkpoint_survives_damaged_newer_ones(tmp_path):
    """After falling back past damaged files, saving keeps what it saved; a missing folder is made.

    Catches pruning from the end of the list.
    """
    folder = tmp_path / "a" / "b"
    _, save = train.checkpointing(folder, {}, STATE, False, [])
    for step in (7, 8, 9):
        (folder / f"step_{step}.npz").write_bytes(b"damaged")
    (folder / "step_98_best.npz").write_bytes(b"someone's own")
    save(STATE)
    assert train.latest_checkpoint(folder) == folder / "step_4.npz"
    assert [path.name for path in train.list_checkpoints(folder)] == [f"step_{n}.npz" for n in (4, 7, 8, 9)]


def test_processes_stop_together(tmp_path, monkeypatch):
    """Ctrl-C on another process stops this one too, after it saved. Catches one that waits for the other."""
    _, save = train.checkpointing(tmp_path, {}, STATE, False, [])
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(train.multihost_utils, "process_allgather", lambda stop: np.array([stop, True]))
    with pytest.raises(KeyboardInterrupt, match="step_4"):
        save(STATE)
    assert train.latest_checkpoint(tmp_path) == tmp_path / "step_4.npz"


@pytest.mark.parametrize("flags, words", [
    (["--learning-rate", "0.5"], "learning_rate 0.002, expected 0.5"),
    (["--weight-decay", "0"], "weight_decay 0.1, expected 0.0"),
    (["--batch-size", "500"], "batch_size 1000, expected 500")])
def test_a_resumed_run_must_share_its_settings(flags, words, tmp_path):
    """Every number that the schedule or the order of the images depends on is compared, and named with both values."""
    train.main([*TINY, "--epochs", "1", "--checkpoint-dir", str(tmp_path)])
    with pytest.raises(SystemExit, match=words):
        train.main([*TINY, "--epochs", "1", "--checkpoint-dir", str(tmp_path), "--resume", *flags])


def test_main_is_the_plain_loop_with_the_recipe_of_the_readme(tmp_path, monkeypatch, capsys):
    """main's last parameters are those of one step a batch, written out here; its lines say what happened.

    Catches another seed, order, schedule, smoothing, decay or beta than the README states, a state that is not
    donated, and a line with another interval's epoch, rate, loss or speed.
    """
    reports, donated, loop = [], [], train.interval_loop

    def spy(train_steps, state, intervals, report, save):
        before = jax.tree.leaves((state["params"], state["opt_state"]))
        state = loop(train_steps, state, intervals, lambda *a: reports.append(a) or report(*a), save)
        donated.extend(leaf.is_deleted() for leaf in before)
        return state

    monkeypatch.setattr(train, "interval_loop", spy)
    train.main([*TINY, "--log-every", "4", "--seed", "3", "--weight-decay", "0.3", "--checkpoint-dir", str(tmp_path)])
    out = capsys.readouterr().out
    assert donated and all(donated)

    dataset, total = data.synthetic(3, 10_000, 2_000)["train"], 20
    rate = lambda n: 2e-3 * (n / 2 if n < 2 else (1 + np.cos(np.pi * (n - 2) / 18)) / 2)  # noqa: E731
    optimizer = optax.adamw(lambda n: jnp.asarray([rate(k) for k in range(total)])[n], b2=0.95, weight_decay=0.3,
                            mask=[{"w": True, "b": False}] * 2)
    params = train.init_mlp(jax.random.key(3), [784, 8, 10])
    state = params, optimizer.init(params)
    step = jax.jit(train.make_train_step(functools.partial(train.loss_fn, label_smoothing=0.1), optimizer))
    losses = []
    for epoch in range(2):
        for batch in data.batches(dataset, 1000, seed=3, epoch=epoch):
            *state, metrics = step(*state, {**batch, "image": data.preprocess(batch["image"])})
            losses.append(float(metrics["loss"]))
    saved = train.load_checkpoint(train.latest_checkpoint(tmp_path), {
        "params": params, "opt_state": optimizer.init(params), "step": np.array(0),
        "settings": jax.tree.map(np.array, {"seed": 3, "epochs": 2, "batch_size": 1000, "examples": 10_000,
                                            "learning_rate": 2e-3, "weight_decay": 0.3})})
    assert_trees_close(saved["params"], state[0], atol=1e-5)

    lines = [line.split() for line in out.splitlines() if "examples/s" in line]
    starts, epochs = [0, 4, 8, 10, 14, 18], [1, 1, 1, 2, 2, 2]
    for words, (end, _, seconds), start, epoch in zip(lines, reports, starts, epochs, strict=True):
        assert words[1] == str(epoch) and words[3] == str(end)
        np.testing.assert_allclose(float(words[5]), np.mean(losses[start:end]), atol=2e-4)
        np.testing.assert_allclose(float(words[10]), rate(end - 1), rtol=1e-2, atol=1e-8)
        np.testing.assert_allclose(float(words[11].replace(",", "")), (end - start) * 1000 / seconds, rtol=1e-2, atol=1)


def test_least_values_are_allowed():
    """The bounds of a flag belong to it: seed 0, rate 0, one epoch."""
    assert [train.number(int, 0, 5)(text) for text in ("0", "5")] == [0, 5] and train.number(float, 0)("0") == 0.0


CONFUSION = np.array([[50, 7, 0], [1, 40, 2], [0, 9, 30]])


def test_confusion_table_names_the_worst_confusions():
    """Rows are true classes; the three largest off the diagonal come first, as "true taken for predicted", and none
    is made up where fewer were confused."""
    lines = train.confusion_table(CONFUSION, ["ant", "bee", "cat"]).splitlines()
    assert [line.split() for line in lines[3:6]] == ["ant 50 7 0".split(), "bee 1 40 2".split(), "cat 0 9 30".split()]
    worst = ["9 x cat taken for bee", "7 x ant taken for bee", "2 x bee taken for cat"]
    assert [line.strip() for line in lines[6:]] == worst
    lines = train.confusion_table(np.array([[5, 1], [0, 4]]), ["ant", "bee"]).splitlines()
    assert [line.strip() for line in lines[5:]] == ["1 x ant taken for bee"]


def test_plot_shows_the_matrix_as_printed():
    """True classes run down, predictions across, each number on its square. Catches a transposed picture."""
    plt = mock.MagicMock()
    figure, axes = plt.subplots.return_value = mock.MagicMock(), mock.MagicMock()
    train.plot_confusion(plt, CONFUSION, ["ant", "bee", "cat"], "x.png")
    np.testing.assert_array_equal(axes.imshow.call_args.args[0], CONFUSION)  # row 0 on top
    drawn = {call.args[:2]: call.args[2] for call in axes.text.call_args_list}
    assert drawn == {(x, y): CONFUSION[y, x] for x in range(3) for y in range(3)}
    assert axes.set.call_args.kwargs["xlabel"].startswith("predicted") and figure.savefig.call_args.args[0] == "x.png"


def test_matrix_products_are_all_there_and_stay_in_the_loop():
    """Three products a layer, less one (the images need no gradient), none moved out or dropped by the compiler."""
    products = jax.jit(lambda params: train.matrix_products(params, 6, 4))
    lowered = products.lower(train.init_mlp(jax.random.key(0), (5, 4, 3)))
    assert lowered.as_text().count("dot_general") == 5
    text = lowered.compile().as_text()
    assert text.count(" dot(") == 5, text


@pytest.mark.parametrize("change, words", [
    ({"label": np.zeros((2, 1), int)}, r"\[2, 1\]"), ({"label": np.zeros(1, int)}, r"\[1\]"),
    ({"label": np.zeros(2)}, "float"),
    ({"mask": np.ones(1, bool)}, r"\[1\]"), ({"mask": np.array([1, 2])}, "int")])
def test_loss_refuses_labels_and_masks_that_do_not_fit(change, words):
    """What would broadcast to a plausible loss is a ValueError that names dtype and shape."""
    with pytest.raises(ValueError, match=words):
        train.loss_fn(train.init_mlp(jax.random.key(0), (4, 3)), make_batch(0, (4, 3), 2) | change)


def test_uint8_labels_with_more_classes_than_it_counts():
    """300 classes: uint8 labels give the loss of int32 ones. Catches one-hot codes that wrap at 256."""
    params, batch = train.init_mlp(jax.random.key(0), (4, 300)), make_batch(0, (4, 3), 2)
    narrow = train.loss_fn(params, batch | {"label": batch["label"].astype(np.uint8)})[0]
    assert narrow == train.loss_fn(params, batch)[0]


def test_first_ctrl_c_is_noted_and_the_second_ends_the_process(capfd):
    """No exception is raised in the middle of JAX: the handler fills a list, says so, and steps aside."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        interrupted = train.note_interrupts()
        assert interrupted == []
        signal.raise_signal(signal.SIGINT)
        assert interrupted == [True] and signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        assert "stopping at the end of this interval" in capfd.readouterr().err
    finally:
        signal.signal(signal.SIGINT, handler)


def test_ctrl_c_without_a_checkpoint_folder_ends_after_the_interval(monkeypatch, capsys):
    """The run stops with status 130 and one line, and the interval's line is printed."""
    loop = train.interval_loop
    monkeypatch.setattr(train, "interval_loop", lambda *a: signal.raise_signal(signal.SIGINT) or loop(*a))
    with pytest.raises(SystemExit) as exit_:
        train.main(TINY)
    out, err = capsys.readouterr()
    assert exit_.value.code == 130 and out.count("examples/s") == 1 and err.endswith("interrupted: nothing was saved\n")


@pytest.mark.parametrize("variable, value", [("JAX_COORDINATOR_ADDRESS", "localhost"), ("JAX_NUM_PROCESSES", "two"),
                                             ("JAX_PROCESS_ID", "-1")])
def test_wrong_addresses_of_processes_are_named(variable, value, monkeypatch):
    """A malformed environment variable of --distributed is named with its value, before any connection is tried."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit, match=f"{variable} must look like .* got '{value}'"):
        train.main([*TINY, "--distributed"])


def test_processes_that_see_different_checkpoints_stop(tmp_path, monkeypatch):
    """A folder that is not shared is an error on every process, not a wait for ever."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(train.multihost_utils, "process_allgather", lambda mine: np.array([mine, 7]))
    with pytest.raises(ValueError, match="do not see the same checkpoints"):
        train.checkpointing(tmp_path, {}, STATE, True, [])


# ---------------------------------------------------------------- many devices

SHARDED = """
import jax, math, numpy as np, re, sys
import minijax_train as train
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
assert jax.device_count() == 8
mesh = Mesh(np.array(jax.devices()), ("batch",))
optimizer = train.make_optimizer(1e-2, 0.1)
step = train.make_train_step(train.loss_fn, optimizer)
for rows in (8, 24, 64):
    rng = np.random.default_rng(rows)
    batch = {"image": rng.normal(size=(rows, 5)).astype("f"), "label": rng.integers(0, 3, rows),
             "mask": rng.random(rows) < 0.8}
    params = train.init_mlp(jax.random.key(0), (5, 4, 3))
    state = params, optimizer.init(params)
    whole = jax.jit(step)(*state, batch)
    placed = *jax.device_put(state, NamedSharding(mesh, P())), jax.device_put(batch, NamedSharding(mesh, P("batch")))
    sharded = jax.jit(step)(*placed)
    for a, e in zip(jax.tree.leaves(sharded), jax.tree.leaves(whole)):
        assert a.sharding.is_fully_replicated
        np.testing.assert_allclose(a, e, atol=1e-5)
text = jax.jit(step).lower(*placed).compile().as_text()
results = [m[1] for line in text.splitlines() if (m := re.search(r"= (.*?) all-reduce(-start)?[(]", line))]
shapes = [dims for result in results for dims in re.findall(r"[fs]32[[]([0-9,]*)[]]", result)]
reduced = sum(math.prod(int(n) for n in dims.split(",") if n) for dims in shapes)
assert reduced == sum(x.size for x in jax.tree.leaves(params)) + 3, reduced  # the gradients, the loss and two counts
try:
    train.main("--dataset synthetic --batch-size 19".split())
except SystemExit as error:
    assert "--batch-size 19 cannot be shared evenly by 8 devices" in str(error)
else:
    raise SystemExit("not refused")
devices, loop = [], train.interval_loop
def spy(train_steps, state, intervals, *rest):
    def look(batches):
        images = batches["image"]
        devices.append((len(images.sharding.device_set), images.sharding.shard_shape(images.shape)[1]))
        return batches
    return loop(train_steps, state, map(look, intervals), *rest)
train.interval_loop = spy
result = train.main(sys.argv[1:])
assert set(devices) == {(8, 13)}, devices  # every device works, on its eighth of the 104 rows
print(result["loss"], result["accuracy"], result["confusion"].sum())
"""


def test_sharded_run_equals_the_unsharded_one():
    """On 8 forced host devices the same step gives the same update, and the whole run the same result.

    Each step reduces as many numbers as there are parameters, and three more. Catches a mean of shard means under
    a mask, padding counted on some shard, gradients reduced twice, a batch that does not divide.
    """
    flags = [*TINY, "--batch-size", "104"]
    code, out, err = result_of(start("-c", SHARDED, *flags, JAX_PLATFORMS="cpu",
                                     XLA_FLAGS="--xla_force_host_platform_device_count=8"))
    assert code == 0, err
    loss, accuracy, count = map(float, out.splitlines()[-1].split())
    alone = train.main(flags)
    assert count == 2000 and abs(accuracy - alone["accuracy"]) < 0.005 and abs(loss - alone["loss"]) < 1e-3


def test_two_processes_equal_one(tmp_path):
    """Two real processes on the loopback interface end in one process's parameters; only process 0 prints and saves.

    A third pair resumes from the checkpoint that the first wrote. Catches shares that overlap, double printing.
    """
    flags = [*TINY, "--checkpoint-dir"]
    alone = train.main([*flags, str(tmp_path / "one")])

    def pair(*more):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        both = [start("minijax_train.py", *flags, str(tmp_path / "two"), "--distributed", *more, JAX_PLATFORMS="cpu",
                      JAX_COORDINATOR_ADDRESS=address, JAX_NUM_PROCESSES="2", JAX_PROCESS_ID=str(k)) for k in range(2)]
        return [result_of(process) for process in both]

    (code, out, err), (code_1, out_1, err_1) = pair()
    assert code == code_1 == 0, err + err_1
    assert "2 x cpu" in out and abs(float(out.split()[-1]) - alone["accuracy"]) < 0.005
    rows = [line for line in out.splitlines() if line.startswith(data.CLASS_NAMES)]
    assert sum(int(n) for line in rows for n in line[12:].split()) == 2000  # both shares of the test images, each once
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
    """Each file imports from a folder with nothing else in it (decoder.py needs attention.py), and wakes no device."""
    for name in files:
        shutil.copy(os.path.join(HERE, name), tmp_path)
    code = (f"import {files[0][:-3]}; from jax._src import xla_bridge; assert not xla_bridge._backends; "
            "import sys; siblings = {'attention', 'data', 'decoder', 'minijax_train'}; "
            "assert not siblings & set(sys.modules) - set(sys.argv[1:])")
    done = subprocess.run([sys.executable, "-c", code, *(name[:-3] for name in files)], cwd=tmp_path,
                          capture_output=True, text=True)
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


# ---------------------------------------------------------------- the oracle: loops in NumPy float64


def oracle(
    query,
    key,
    value,
    bias=None,
    mask=None,
    *,
    scale=None,
    is_causal=False,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    local_window_size=None,
    cotangent=None,
):
    """Attention query by query over the keys it may see -> output, gradients, visible [B, N, T, S]."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    (B, T, N, H), (_, S, K, _) = query.shape, key.shape
    scale = 1 / np.sqrt(H) if scale is None else float(scale)
    bias = np.broadcast_to(np.asarray(0.0 if bias is None else bias, np.float64), (B, N, T, S))
    visible = np.broadcast_to(True if mask is None else np.asarray(mask), (B, N, T, S)) & (bias > -np.inf)
    window = (local_window_size,) * 2 if isinstance(local_window_size, int) else local_window_size
    cotangent = np.zeros((B, T, N, H)) if cotangent is None else np.asarray(cotangent, np.float64)
    out = np.zeros((B, T, N, H))
    d = {
        "query": np.zeros_like(query),
        "key": np.zeros_like(key),
        "value": np.zeros_like(value),
        "bias": np.zeros((B, N, T, S)),
        "scale": 0.0,
    }
    for b, n, i, j in np.ndindex(B, N, T, S):
        visible[b, n, i, j] &= (
            (not is_causal or j <= i)
            and (query_seq_lengths is None or i < query_seq_lengths[b])
            and (key_value_seq_lengths is None or j < key_value_seq_lengths[b])
            and (window is None or i - window[0] <= j <= i + window[1])
        )
    for b, n, i in np.ndindex(B, N, T):
        j, k = np.flatnonzero(visible[b, n, i]), n // (N // K)
        if len(j) == 0:
            continue
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


def sum_to(x, shape):
    """The gradient of a broadcast array: summed over the axes that were broadcast."""
    for axis, size in enumerate(shape):
        x = x.sum(axis=axis, keepdims=True) if size == 1 else x
    return x


def close(got, want, tolerance=2e-5):
    assert not np.isnan(np.asarray(want, np.float64)).any()
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=tolerance, atol=tolerance)


@functools.cache
def compiled(case, implementation, block=4):
    """(query, key, value, cotangent, arrays) -> output and gradients, for one case, with blocks small enough
    that a dozen tokens make several. Compiled once, so that Hypothesis may try many values."""

    def run(query, key, value, cotangent, arrays):
        def call(query, key, value, floats):
            return attention.dot_product_attention(
                query,
                key,
                value,
                **CASES[case]["static"],
                **floats,
                **{k: v for k, v in arrays.items() if k not in floats},
                implementation=implementation,
            )

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention, "BLOCK", block)
            patch.setattr(attention, "HEADS_IN_CACHE", 4)  # cases with more go one example at a time on a CPU
            floats = {k: v for k, v in arrays.items() if k in ("bias", "scale")}
            out, vjp = jax.vjp(call, query, key, value, floats)
            dquery, dkey, dvalue, dfloats = vjp(cotangent)
            return out, {"query": dquery, "key": dkey, "value": dvalue, **dfloats}

    return jax.jit(run)


def case(B, T, S, N, K, H, *, mask=None, bias=None, dynamic=(), **static):
    return {"shape": (B, T, S, N, K, H), "mask": mask, "bias": bias, "dynamic": dynamic, "static": static}


# Every argument alone and with the others, T = S, T < S, T > S, T = 1, K = 1, K = N, odd sizes.
CASES = {
    "one of each": case(1, 1, 1, 1, 1, 1),
    "odd sizes": case(2, 7, 13, 6, 3, 5),
    "causal, T < S, grouped": case(2, 7, 11, 4, 2, 8, is_causal=True),
    "causal, T > S, one head": case(1, 13, 5, 4, 1, 4, is_causal=True),
    "key lengths alone": case(3, 5, 9, 2, 2, 4, dynamic=("key_value_seq_lengths",)),
    "query lengths alone, causal": case(3, 9, 9, 4, 2, 4, dynamic=("query_seq_lengths",), is_causal=True),
    "both lengths, window": case(
        2, 9, 10, 2, 1, 4, dynamic=("query_seq_lengths", "key_value_seq_lengths"), local_window_size=(2, 1)
    ),
    "window on both sides": case(1, 14, 14, 2, 2, 4, local_window_size=2),
    "window that hides a corner of its first block, T > S": case(1, 14, 6, 2, 1, 4, local_window_size=(2, 2)),
    "window that hides the other corner": case(1, 12, 12, 2, 1, 4, local_window_size=(3, 2)),
    "window to the right only": case(1, 12, 12, 2, 2, 4, local_window_size=(-1, 3)),
    "causal cuts the window": case(1, 12, 12, 4, 2, 4, is_causal=True, local_window_size=(5, 3)),
    "mask per head": case(2, 6, 7, 4, 2, 4, mask=(1, 4, 6, 7)),
    "mask per key": case(2, 5, 9, 4, 2, 4, mask=(2, 1, 1, 9)),
    "mask per query, causal, lengths": case(
        2, 9, 9, 2, 1, 4, mask=(1, 2, 9, 1), is_causal=True, dynamic=("key_value_seq_lengths",)
    ),
    "scale": case(1, 6, 6, 2, 1, 4, dynamic=("scale",), is_causal=True),
    "bias per head, mask": case(2, 5, 6, 4, 2, 4, bias=(1, 4, 5, 6), mask=(2, 1, 5, 6)),
    "bias per key with -inf": case(2, 5, 6, 2, 2, 4, bias=(2, 1, 1, 6), is_causal=True),
}
IMPLEMENTATIONS = ("naive", "xla", "blockwise")


def draw(name, seed):
    """Inputs for a case: normal arrays, masks of every density, lengths from 0 to beyond the end."""
    B, T, S, N, K, H = CASES[name]["shape"]
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    inputs = normal(B, T, N, H), normal(B, S, K, H), normal(B, S, K, H), normal(B, T, N, H)
    arrays = {}
    if CASES[name]["mask"]:
        arrays["mask"] = rng.random(CASES[name]["mask"]) < rng.choice(
            [0.0, 0.3, 0.6, 1.0], p=[0.1, 0.4, 0.4, 0.1]
        )
    if CASES[name]["bias"]:
        arrays["bias"] = normal(*CASES[name]["bias"])
        if "inf" in name:
            arrays["bias"][rng.random(CASES[name]["bias"]) < 0.4] = -np.inf
    for what, longest in (("query_seq_lengths", T), ("key_value_seq_lengths", S)):
        if what in CASES[name]["dynamic"]:
            arrays[what] = rng.integers(0, longest + 2, B).astype(np.int32)
    if "scale" in CASES[name]["dynamic"]:
        arrays["scale"] = np.float32(rng.choice([-0.5, 0.0, 0.3, 2.0]))
    return inputs, arrays


def serves(implementation, name):
    return not (implementation == "blockwise" and CASES[name]["bias"])


@pytest.mark.parametrize("name", CASES)
@given(seed=st.integers(0, 2**32 - 1))
def test_values_and_gradients_match_the_float64_oracle(name, seed):
    """Every implementation returns the oracle's output and its gradients with respect to query, key, value,
    bias and scale, for every argument. Catches: a mask condition lost, inverted or off by one, the wrong
    causal corner, a key/value head served to the wrong query head, a lost scale, block edges handled wrongly,
    a wrong term in the hand-written backward pass, padding that leaks, rows without keys that are not exactly
    0."""
    (query, key, value, cotangent), arrays = draw(name, seed)
    out, grads, visible = oracle(query, key, value, **arrays, **CASES[name]["static"], cotangent=cotangent)
    for implementation in filter(lambda i: serves(i, name), IMPLEMENTATIONS):
        got, got_grads = compiled(name, implementation)(query, key, value, cotangent, arrays)
        close(got, out)
        for what, grad in got_grads.items():
            close(grad, sum_to(grads[what], grad.shape) if what == "bias" else grads[what], 5e-5)
        empty = ~visible.any(axis=3).swapaxes(1, 2)
        assert (np.asarray(got)[empty] == 0).all() and (np.asarray(got_grads["query"])[empty] == 0).all()


@pytest.mark.parametrize(
    "name",
    [
        "key lengths alone",
        "query lengths alone, causal",
        "both lengths, window",
        "mask per key",
        "mask per head",
        "causal, T < S, grouped",
        "bias per key with -inf",
    ],
)
@given(seed=st.integers(0, 2**32 - 1), garbage=st.sampled_from([np.nan, np.inf, -np.inf, 1e30]))
def test_what_takes_no_part_may_hold_anything(name, seed, garbage):
    """Queries that see no key, and keys and values that no query sees, change not one bit of outputs or
    gradients, even as NaN. Catches: 0 * NaN from padding, in the weighted sum or in the backward pass."""
    (query, key, value, cotangent), arrays = draw(name, seed)
    _, _, visible = oracle(query, key, value, **arrays, **CASES[name]["static"])
    B, T, S, N, K, H = CASES[name]["shape"]
    unseen = ~visible.any(axis=2).reshape(B, K, N // K, S).any(axis=2).swapaxes(1, 2)
    empty = ~visible.any(axis=3).swapaxes(1, 2)
    dirty = [np.array(x) for x in (query, key, value, cotangent)]
    for x, where in zip(dirty, (empty, unseen, unseen, empty)):
        x[where] = garbage
    for implementation in filter(lambda i: serves(i, name), IMPLEMENTATIONS):
        run = compiled(name, implementation)
        jax.tree.map(
            np.testing.assert_array_equal, run(*dirty, arrays), run(query, key, value, cotangent, arrays)
        )


CASES["causal"] = case(2, 12, 12, 4, 2, 4, is_causal=True)


@given(seed=st.integers(0, 2**32 - 1), i=st.integers(0, 10))
def test_causal_outputs_ignore_future_tokens(seed, i):
    """With is_causal: (1) outputs at and before i do not change, bit for bit, when queries, keys and values
    after i do; (2) their gradient with respect to anything after i is exactly 0; (3) it is not 0 at i.
    Catches: a diagonal off by one to either side, masking with a score that is merely small, a future that
    enters through a maximum."""
    (query, key, value, cotangent), _ = draw("causal", seed)
    other = [
        np.where(np.arange(12)[None, :, None, None] > i, 100 * y, x)
        for x, y in zip((query, key, value), draw("causal", seed + 1)[0])
    ]
    early = np.where(np.arange(12)[None, :, None, None] > i, 0, cotangent)
    for implementation in (*IMPLEMENTATIONS, None):
        run = compiled("causal", implementation)
        out, grads = run(query, key, value, early, {})
        np.testing.assert_array_equal(out[:, : i + 1], run(*other, early, {})[0][:, : i + 1])
        assert all((np.asarray(g)[:, i + 1 :] == 0).all() for g in grads.values())
        assert (np.asarray(grads["value"])[:, i] != 0).all()
        assert i == 0 or (
            (np.asarray(grads["query"])[:, i] != 0).any() and (np.asarray(grads["key"])[:, i] != 0).any()
        )


@given(i=st.integers(0, 2), seed=st.integers(0, 2**32 - 1))
def test_blocks_that_nobody_sees_are_not_computed(i, seed):
    """NaN in the keys and values of blocks above the diagonal, or outside the window, does not reach the rows
    before them, and lengths are divided evenly. Catches: masked blocks that are computed all the same, and a
    last block that is mostly padding."""
    assert attention._blocks((None, None), 300, 513, 1, None, (None, None))[0] == (150, 171)
    (query, key, value, cotangent), _ = draw("causal", seed)
    rows = np.arange(12)[None, :, None, None]
    early = np.where(rows < 4 * i + 4, cotangent, 0)
    want, want_grads, _ = oracle(query, key, value, is_causal=True, cotangent=early)
    bad = [np.where(rows >= 4 * i + 4, np.nan, x) for x in (key, value)]
    out, grads = compiled("causal", "blockwise")(query, *bad, early, {})
    close(out[:, : 4 * i + 4], want[:, : 4 * i + 4])
    (query, key, value, cotangent), _ = draw("window on both sides", seed)
    bad = [np.where(np.arange(14)[None, :, None, None] < 4, np.nan, x) for x in (key, value)]
    out, _ = compiled("window on both sides", "blockwise")(query, *bad, cotangent, {})
    close(out[:, 8:], oracle(query, key, value, local_window_size=2)[0][:, 8:])


@given(
    batch=st.sampled_from([1, 3]),
    length=st.sampled_from([1, 6]),
    heads=st.sampled_from([(8, 8), (8, 2), (8, 1)]),
)
def test_mha_gqa_mqa_output_shapes_agree(batch, length, heads):
    """Whatever the number of key/value heads, `dot_product_attention` returns the query's shape and dtype and
    `attention` that of x; nothing but the weights' shapes says which it is. Catches: heads of the output
    counted from the keys, an output in the accumulation dtype."""
    N, K = heads
    for dtype in (jnp.float32, jnp.bfloat16):
        query = jax.ShapeDtypeStruct((batch, length, N, 16), dtype)
        key = jax.ShapeDtypeStruct((batch, length, K, 16), dtype)
        for implementation in (*IMPLEMENTATIONS, None):
            out = jax.eval_shape(
                functools.partial(
                    attention.dot_product_attention, implementation=implementation, is_causal=True
                ),
                query,
                key,
                key,
            )
            assert out.shape == query.shape and out.dtype == dtype
        params = jax.eval_shape(lambda: attention.init_attention(jax.random.key(0), 24, N, K, 16, dtype))
        assert {k: v.shape for k, v in params.items()} == {
            "wq": (24, N, 16),
            "wk": (24, K, 16),
            "wv": (24, K, 16),
            "wo": (N, 16, 24),
        }
        x = jax.ShapeDtypeStruct((batch, length, 24), dtype)
        out = jax.eval_shape(attention.attention, params, x)
        assert out.shape == x.shape and out.dtype == dtype


@given(seed=st.integers(0, 2**32 - 1))
def test_grouped_heads_equal_repeated_heads(seed):
    """GQA equals MHA on keys and values whose heads are repeated N / K times each (not tiled). Catches: query
    head n served by head n % K."""
    (query, key, value, cotangent), _ = draw("causal", seed)
    repeated = [np.repeat(x, 2, axis=2) for x in (key, value)]
    for implementation in IMPLEMENTATIONS:
        run = compiled("causal", implementation)
        (out, grads), (want, want_grads) = run(query, key, value, cotangent, {}), run(
            query, *repeated, cotangent, {}
        )
        close(out, want)
        for what in ("key", "value"):
            close(grads[what], np.asarray(want_grads[what]).reshape(2, 12, 2, 2, 4).sum(axis=3))


@given(seed=st.integers(0, 2**32 - 1))
def test_order_of_keys_does_not_matter_and_outputs_are_convex_combinations(seed):
    """Permuting keys, values and mask together changes nothing, and each output lies within the range of the
    values that its query may see. Catches: a position that enters where it should not, weights that do not
    sum to 1."""
    (query, key, value, cotangent), arrays = draw("mask per head", seed)
    order = np.random.default_rng(seed).permutation(key.shape[1])
    visible = oracle(query, key, value, **arrays)[2]
    seen = np.where(visible[..., None], np.repeat(value, 2, axis=2).transpose(0, 2, 1, 3)[:, :, None], np.nan)
    some = visible.any(axis=3)
    for implementation in IMPLEMENTATIONS:
        run = compiled("mask per head", implementation)
        out, _ = run(query, key, value, cotangent, arrays)
        permuted, _ = run(
            query, key[:, order], value[:, order], cotangent, {"mask": arrays["mask"][..., order]}
        )
        close(out, permuted)
        out = np.asarray(out).swapaxes(1, 2)[some]
        assert (out >= np.nanmin(seen[some], axis=1) - 1e-6).all() and (
            out <= np.nanmax(seen[some], axis=1) + 1e-6
        ).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@given(seed=st.integers(0, 2**32 - 1), factor=st.sampled_from([1.0, 30.0]))
def test_low_precision_and_huge_scores_stay_finite_and_accurate(dtype, seed, factor):
    """Scores far beyond the range of exp, and two-byte inputs, give finite outputs and gradients close to the
    oracle's on the same (rounded) inputs. Catches: exp without the maximum subtracted, sums and scores kept
    in two bytes, an output in another dtype."""
    (query, key, value, cotangent), _ = draw("causal", seed)
    query, key = query * factor, key * factor
    inputs = [jnp.asarray(x, dtype) for x in (query, key, value, cotangent)]
    want, grads, _ = oracle(
        *(np.asarray(x, np.float64) for x in inputs[:3]),
        is_causal=True,
        cotangent=np.asarray(inputs[3], np.float64),
    )
    eps = float(jnp.finfo(dtype).eps)
    for implementation in IMPLEMENTATIONS:
        out, got = compiled("causal", implementation)(*inputs, {})
        assert out.dtype == dtype and all(g.dtype == dtype for g in got.values())
        assert np.isfinite(np.asarray(out, np.float32)).all()
        # Scores of size factor^2 carry a rounding error of their own, relative in float32.
        close(out, want, 4 * eps + 1e-6 * factor**2)
        for what, grad in got.items():
            limit = (8 * eps + 1e-5) * factor * max(1, np.abs(grads[what]).max())
            assert np.abs(np.asarray(grad, np.float64) - grads[what]).max() <= limit, (implementation, what)


@pytest.mark.parametrize("length", [512, 1200])
def test_uniform_weights_over_many_keys_in_bfloat16(length):
    """The mean of many ones is 1. Catches: a running sum in bfloat16, which stops at 256."""
    query, ones = jnp.zeros((1, 1, 1, 8), jnp.bfloat16), jnp.ones((1, length, 1, 8), jnp.bfloat16)
    for implementation in IMPLEMENTATIONS:
        out = attention.dot_product_attention(query, 0 * ones, ones, implementation=implementation)
        assert out.dtype == jnp.bfloat16
        close(out, np.ones(out.shape), 1 / 128)


# Zero scores: the output is the mean of the values that may be seen. v along S, one head, H = 1.
LOWER = np.tril(np.ones((3, 3), bool))
EXAMPLES = {
    "causal is top-left aligned, T < S": (2, [1, 2, 3, 4, 5], {"is_causal": True}, [1, 1.5]),
    "causal is top-left aligned, T > S": (5, [1, 2], {"is_causal": True}, [1, 1.5, 1.5, 1.5, 1.5]),
    "a padded cache by mask": (
        1,
        [10, 20, 30, 40, 99, 99],
        {"mask": np.arange(6)[None, None, None] < 4},
        [25],
    ),
    "a row without keys": (2, [1, 2, 6], {"mask": np.array([[[[0, 0, 0], [1, 0, 1]]]], bool)}, [0, 3.5]),
    "left padding": (
        4,
        [9, 9, 1, 3],
        {"mask": np.array([[[[0, 0, 1, 1]]]], bool), "is_causal": True},
        [0, 0, 1, 2],
    ),
    "True means may attend": (3, [1, 2, 3], {"mask": LOWER[None, None]}, [1, 1.5, 2]),
    "a mask of two axes": (3, [1, 2, 3], {"mask": LOWER}, [1, 1.5, 2]),
    "key lengths alone": (2, [1, 2, 3, 4], {"key_value_seq_lengths": [3]}, [2, 2]),
    "no key at all": (2, [1, 2, 3, 4], {"key_value_seq_lengths": [0]}, [0, 0]),
    "query lengths alone": (2, [1, 2, 3, 4], {"query_seq_lengths": [1]}, [2.5, 0]),
    "a window": (4, [1, 2, 3, 4], {"local_window_size": 1}, [1.5, 2, 3, 3.5]),
    "a window to the left": (4, [1, 2, 3, 4], {"local_window_size": (1, 0)}, [1, 1.5, 2.5, 3.5]),
    "finite garbage behind a mask": (
        1,
        [1, 3, 1e10, 1e30],
        {"mask": np.array([[[[1, 1, 0, 0]]]], bool)},
        [2],
    ),
    "NaN behind a mask": (1, [1, 3, np.nan, np.inf], {"mask": np.array([[[[1, 1, 0, 0]]]], bool)}, [2]),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_worked_out_by_hand(name):
    """Zero scores make the output a plain mean. Catches: another causal corner, an inverted mask, ignored
    lengths, a mean over everything (or NaN) in a row without keys. Also: a single example is the batched
    call's row."""
    T, values, options, want = EXAMPLES[name]
    query, value = jnp.zeros((1, T, 1, 1)), jnp.asarray(values, jnp.float32)[None, :, None, None]
    for implementation in (*IMPLEMENTATIONS, None):
        call = jax.jit(
            functools.partial(attention.dot_product_attention, implementation=implementation, **options)
        )
        out = call(query, jnp.zeros_like(value), value)
        np.testing.assert_array_equal(np.asarray(out)[0, :, 0, 0], np.float32(want))
        single = jax.jit(
            lambda q, k, v: attention.dot_product_attention(q, k, v, implementation=implementation, **options)
        )
        assert single(query[0], jnp.zeros_like(value)[0], value[0]).shape == (T, 1, 1)


def test_query_head_n_reads_key_value_head_n_over_g():
    """Values 10 in head 0 and 20 in head 1 give [10, 10, 20, 20]. Catches: tiling instead of repeating."""
    value = jnp.broadcast_to(jnp.array([10.0, 20.0])[:, None], (1, 3, 2, 1))
    for implementation in (*IMPLEMENTATIONS, None):
        out = attention.dot_product_attention(
            jnp.zeros((1, 3, 4, 1)), 0 * value, value, implementation=implementation
        )
        np.testing.assert_array_equal(np.asarray(out)[0, :, :, 0], np.tile([10.0, 10, 20, 20], (3, 1)))


def test_cached_attention_on_one_layer_of_a_stacked_cache():
    """With `layer`, that layer of the cache is used and written as it would be alone, and no other is touched.

    Catches a write to the wrong layer or to all, lengths that are not kept by layer, and a cache of the wrong shape.
    """
    params = attention.init_attention(jax.random.key(0), 8, 4, 2)
    empty = attention.init_kv_cache(2, 6, 2, 2)
    filled = jax.tree.map(lambda leaf: jnp.stack([leaf + 1, leaf + 2, leaf + 3]), empty)  # lengths 1, 2, 3
    for T in 1, 3:
        x = jax.random.normal(jax.random.key(T), (2, T, 8))
        for layer in 0, 2:
            alone = attention.cached_attention(params, x, jax.tree.map(lambda leaf: leaf[layer], filled))
            out, cache = attention.cached_attention(params, x, filled, layer=jnp.int32(layer))
            close(out, np.asarray(alone[0], np.float64))
            for name, leaf in cache.items():
                np.testing.assert_array_equal(leaf[layer], alone[1][name])
                others = [i for i in range(3) if i != layer]
                np.testing.assert_array_equal(leaf[np.array(others)], filled[name][np.array(others)])
    for bad, number in ((filled, None), (empty, 0)):
        with pytest.raises(ValueError, match="the cache must be"):
            attention.cached_attention(params, jnp.ones((2, 1, 8)), bad, layer=number)


@pytest.mark.parametrize("T", [1, 3])
def test_unused_slots_of_a_cache_stay_out_of_outputs_and_gradients(T):
    """NaN beyond the rows' lengths changes neither what comes out nor its gradients.

    Catches a weight of 0 that meets a NaN value, and a cotangent of 0 that meets a NaN key.
    """
    params, x = attention.init_attention(jax.random.key(0), 8, 4, 2), jax.random.normal(jax.random.key(1), (2, T, 8))
    empty = {**attention.init_kv_cache(2, 6, 2, 2), "length": jnp.array([0, 2], jnp.int32)}
    unused = jnp.arange(6)[None, :, None, None] >= empty["length"][:, None, None, None]
    dirty = {**empty, **{name: jnp.where(unused, jnp.nan, empty[name]) for name in ("k", "v")}}

    def loss(params, x, cache):
        return (attention.cached_attention(params, x, cache)[0] ** 2).sum()

    run = jax.jit(jax.value_and_grad(loss, (0, 1)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), run(params, x, dirty), run(params, x, empty))


def test_empty_inputs():
    """No queries, no keys, no batch or no width: zeros of the right shape. Catches: a maximum over nothing, and
    a division by the root of nothing."""
    for B, T, S, H in ((0, 2, 2, 4), (1, 0, 2, 4), (1, 2, 0, 4), (1, 2, 2, 0)):
        for implementation in (*IMPLEMENTATIONS, None):
            out = attention.dot_product_attention(
                jnp.ones((B, T, 2, H)),
                jnp.ones((B, S, 1, H)),
                jnp.ones((B, S, 1, H)),
                implementation=implementation,
            )
            np.testing.assert_array_equal(out, np.zeros((B, T, 2, H)))


# ---------------------------------------------------------------- transformations


@pytest.mark.parametrize("implementation", ["blockwise", None])
@given(seed=st.integers(0, 2**32 - 1))
def test_second_derivatives_match_differences_of_the_oracles_gradient(implementation, seed):
    """The derivative of |gradient . u| along u, all of query, key and value, is the oracle's difference
    quotient. Catches: a custom backward pass that cannot be differentiated or forgets what its residuals
    depend on."""
    (query, key, value, cotangent), _ = draw("causal", seed)
    (u, v, w, _), _ = draw("causal", seed + 1)
    got = second_derivative(implementation)((query, key, value), (u, v, w), cotangent)
    step = 1e-4
    plus, minus = (
        oracle(query + e * u, key + e * v, value + e * w, is_causal=True, cotangent=cotangent)[1]
        for e in (step, -step)
    )
    for g, what in zip(got, ("query", "key", "value")):
        close(g, (plus[what] - minus[what]) / (2 * step), 2e-3)


@functools.cache
def second_derivative(implementation):
    def along(x, u, cotangent):
        def loss(x):
            return jnp.vdot(
                cotangent, attention.dot_product_attention(*x, is_causal=True, implementation=implementation)
            )

        return jax.grad(lambda x: sum(map(jnp.vdot, jax.grad(loss)(x), u)))(x)

    def run(*args):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention, "BLOCK", 4)
            patch.setattr(attention, "HEADS_IN_CACHE", 4)
            return along(*args)

    return jax.jit(run)


@pytest.mark.parametrize("implementation", ["blockwise", None])
def test_under_vmap_scan_and_checkpoint(implementation):
    """The same numbers come out mapped (over axis 1, with shared keys, with lengths), scanned and
    rematerialised, also under grad, and in bfloat16, where None holds the fused call as a branch. Catches: a
    batching rule that wants every argument mapped, a loop that cannot be differentiated."""
    rng = np.random.default_rng(0)
    query, key = rng.normal(size=(4, 3, 4, 8)), rng.normal(size=(4, 2, 8))  # T, examples, N, H; S, K, H
    lengths = np.array([1, 3, 4], np.int32)
    for dtype, tolerance in ((jnp.float32, 2e-5), (jnp.bfloat16, 3e-2)):
        q, k = jnp.asarray(query, dtype), jnp.asarray(key, dtype)
        call = functools.partial(
            attention.dot_product_attention, is_causal=True, implementation=implementation
        )
        want, want_grads, _ = oracle(
            np.swapaxes(np.asarray(q, np.float64), 0, 1),
            np.stack([np.asarray(k, np.float64)] * 3),
            np.stack([np.asarray(k, np.float64)] * 3),
            is_causal=True,
            key_value_seq_lengths=lengths,
            cotangent=np.ones((3, 4, 4, 8)),
        )
        mapped = jax.vmap(lambda q, k, n: call(q, k, k, key_value_seq_lengths=n), in_axes=(1, None, 0))
        loss = lambda q, k: mapped(q, k, lengths).astype(jnp.float32).sum()
        close(jax.jit(mapped)(q, k, lengths), want, tolerance)
        dq, dk = jax.jit(jax.grad(loss, (0, 1)))(q, k)
        close(dq, want_grads["query"].swapaxes(0, 1), tolerance)
        close(dk, (want_grads["key"] + want_grads["value"]).sum(axis=0), 10 * tolerance)

        def scanned(q, k):
            layer = jax.checkpoint(
                lambda total, n: (
                    total + call(q, k, k, key_value_seq_lengths=n).astype(jnp.float32).sum(),
                    None,
                )
            )
            return jax.lax.scan(layer, 0.0, lengths)[0]

        one = q.swapaxes(0, 1)[0]
        total, grad = jax.jit(jax.value_and_grad(scanned))(one, k)
        wants = [
            oracle(
                np.asarray(one, np.float64)[None],
                *[np.asarray(k, np.float64)[None]] * 2,
                is_causal=True,
                key_value_seq_lengths=[n],
                cotangent=np.ones((1, 4, 4, 8)),
            )
            for n in lengths
        ]
        close(total, sum(w[0].sum() for w in wants), 20 * tolerance)
        close(grad, sum(w[1]["query"][0] for w in wants), 2 * tolerance)


def test_with_64_bit_types():
    """Under JAX_ENABLE_X64 float64 inputs give float64 accuracy, and decoding works with its int32 positions.
    Catches: a hard-wired float32, int64 positions mixed with int32 ones."""
    code = """
import jax, numpy as np, jax.numpy as jnp, attention
rng = np.random.default_rng(0)
q, k, v = rng.normal(size=(1, 5, 2, 4)), rng.normal(size=(1, 5, 1, 4)), rng.normal(size=(1, 5, 1, 4))
s = np.einsum("tnh,sh->nts", q[0], k[0, :, 0]) / 2 + np.where(np.tril(np.ones((5, 5))) > 0, 0, -np.inf)
w = np.exp(s) / np.exp(s).sum(-1, keepdims=True)
want = np.einsum("nts,sh->tnh", w, v[0, :, 0])
for name in ("naive", "blockwise", None):
    out = attention.dot_product_attention(q, k, v, is_causal=True, implementation=name)
    assert out.dtype == jnp.float64 and abs(out[0] - want).max() < 1e-12, (name, abs(out[0] - want).max())
    call = lambda q: attention.dot_product_attention(q, k, v, is_causal=True, implementation=name)
    grad = jax.grad(lambda q: call(q).sum())(q)
    assert grad.dtype == jnp.float64
params = attention.init_attention(jax.random.key(0), 8, 2, 1)
x = rng.normal(size=(2, 4, 8)).astype(np.float32)
cache = attention.init_kv_cache(2, 5, 1, 4)
full = attention.attention(params, x)
step = jax.jit(attention.cached_attention)
for t in range(4):
    out, cache = step(params, x[:, t:t + 1], cache, seq_lengths=np.array([1, 1]))
    assert out.dtype == jnp.float32 and cache["length"].dtype == jnp.int32 and cache["k"].dtype == jnp.float32
    assert abs(out[:, 0] - full[:, t]).max() < 1e-5
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "JAX_ENABLE_X64": "1",
            "PYTHONPATH": os.path.dirname(attention.__file__),
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        },
    )
    assert done.returncode == 0, done.stderr


def test_blockwise_memory_grows_linearly():
    """Twice the length takes about twice the temporary memory, in both directions, where scores would take
    four times. Catches: a [T, S] array anywhere in the blockwise path."""

    def temporary(length, f):
        x = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
        return jax.jit(f).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes

    call = functools.partial(attention.dot_product_attention, is_causal=True, implementation="blockwise")
    for f in (call, jax.grad(lambda *x: call(*x).sum(), (0, 1, 2))):
        assert temporary(4096, f) < 2.5 * temporary(2048, f)
        assert temporary(4096, f) < 4096 * 4096 * 4 / 4


# ---------------------------------------------------------------- what is refused


def bad(message, *, B=2, T=4, S=4, N=2, K=2, H=8, key=None, value=None, dtype=jnp.float32, **options):
    return message, (B, T, N, H), key or (B, S, K, H), value or key or (B, S, K, H), dtype, options


@pytest.mark.parametrize(
    "message, query, key, value, dtype, options",
    [
        bad("3 and 2", N=3),
        bad("2 and 0", K=0),
        bad("2 and 4", K=4),
        bad("must agree", key=(2, 4, 2, 16)),
        bad("must agree", value=(2, 5, 2, 8)),
        bad("must agree", key=(1, 4, 2, 8)),
        bad("expected query", key=(4, 2, 8)),
        bad("floating dtype.*int32", dtype=jnp.int32),
        bad("'flash' must be.*naive.*xla.*cudnn.*blockwise", implementation="flash"),
        bad("'blockwise' takes no bias", implementation="blockwise", bias=np.zeros((1, 1, 4, 4), np.float32)),
        bad("mask must be boolean", mask=np.zeros((1, 1, 4, 4), np.float32)),
        bad(r"mask must broadcast.*\[2, 2, 4, 4\].*\[1, 1, 4, 3\]", mask=np.ones((1, 1, 4, 3), bool)),
        bad("bias must broadcast", bias=np.ones((3, 1, 4, 4), np.float32)),
        bad("bias must broadcast", bias=np.ones((1, 2, 2, 4, 4), np.float32)),
        bad("query_seq_lengths must be 2 integers", query_seq_lengths=np.array([1], np.int32)),
        bad(
            "key_value_seq_lengths must be 2 integers.*float32", key_value_seq_lengths=np.ones(2, np.float32)
        ),
        bad("local_window_size", local_window_size=(1, 2, 3)),
        bad("local_window_size", local_window_size=1.5),
        bad("scale must be a scalar", scale=np.ones(2, np.float32)),
    ],
)
def test_calls_that_do_not_fit_are_refused(message, query, key, value, dtype, options):
    """Shapes, dtypes and names that do not fit raise a ValueError of one line that says what was given.
    Catches: silent broadcasting, floor division of heads, an error from deep inside."""
    for wrap in (lambda f: f, jax.jit):
        with pytest.raises(ValueError, match=message) as error:
            wrap(functools.partial(attention.dot_product_attention, **options))(
                jnp.zeros(query, dtype), jnp.zeros(key, dtype), jnp.zeros(value, dtype)
            )
        assert "\n" not in str(error.value)


# ---------------------------------------------------------------- cuDNN

HAS_PLUGIN = attention.cudnn_refusal(*[jax.ShapeDtypeStruct((1, 2, 1, 8), jnp.bfloat16)] * 3) is None
needs_plugin = pytest.mark.skipif(
    not HAS_PLUGIN, reason="jax's CUDA plugin is not installed, so nothing lowers for CUDA"
)
def abstract(*shape, dtype=jnp.bfloat16):
    """An array without content, for lowering."""
    return jax.ShapeDtypeStruct(shape, dtype)


def lowered(f, *args):
    """What `f` becomes on a CUDA GPU, as text. Needs the plugin, not a GPU."""
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def fused_calls(text):
    return re.findall(
        r"custom_call @__cudnn\$(\w+)\((.*?)\).*?mask_type\\22: \\22(\w+)\\22.*?: \((.*?)\) ->", text
    )


@needs_plugin
@given(
    is_causal=st.booleans(),
    lengths=st.sampled_from([(), ("query",), ("key_value",), ("query", "key_value")]),
    heads=st.sampled_from([(4, 4), (4, 2), (4, 1)]),
    implementation=st.sampled_from(["cudnn", None]),
    dtype=st.sampled_from([jnp.float16, jnp.bfloat16]),
)
def test_cuda_lowering_is_the_fused_kernel(is_causal, lengths, heads, implementation, dtype):
    """Lowered for CUDA, "cudnn" and None are one fused call with the right mask type, on keys and values that
    are not repeated, and two under grad. Catches: a fallback that nobody asked for, a lost condition,
    repeated heads."""
    (N, K), names = heads, [f"{name}_seq_lengths" for name in lengths]
    call = lambda q, k, v, *n: attention.dot_product_attention(
        q, k, v, is_causal=is_causal, implementation=implementation, **dict(zip(names, n))
    )
    args = [
        abstract(2, 8, N, 16, dtype=dtype),
        *[abstract(2, 6, K, 16, dtype=dtype)] * 2,
        *[abstract(2, dtype=jnp.int32)] * len(names),
    ]
    mask_type = {
        (False, False): "NO_MASK",
        (True, False): "CAUSAL",
        (False, True): "PADDING",
        (True, True): "PADDING_CAUSAL",
    }[is_causal, bool(names)]
    short = {jnp.float16: "f16", jnp.bfloat16: "bf16"}[dtype]
    operands = [
        f"tensor<2x8x{N}x16x{short}>",
        *[f"tensor<2x6x{K}x16x{short}>"] * 2,
        *["tensor<2xi32>"] * (2 * bool(names)),
    ]
    [(name, _, got_mask, got_operands)] = fused_calls(lowered(call, *args))
    assert (name, got_mask, got_operands.split(", ")) == ("fmhaSoftmax", mask_type, operands)
    grad = jax.grad(lambda *a: call(*a).astype(jnp.float32).sum(), (0, 1, 2))
    forward, backward = fused_calls(lowered(grad, *args))
    assert (forward[0], backward[0]) == ("fmhaSoftmax", "fmhaSoftmaxBackward")
    assert forward[2] == backward[2] == mask_type and backward[3].split(", ")[:3] == operands[:3]


@needs_plugin
def test_cuda_lowering_of_windows_masks_biases_and_vmap():
    """A window reaches the kernel as its length (the query itself counts); a mask or a bias is expanded to
    [B, N, T, S] and only taken when "cudnn" is named; vmap folds into the batch, also where only some
    arguments are mapped. Catches: an off-by-one window, a broadcast mask that the kernel misreads, a batching
    rule that wants all or nothing."""
    q, k = abstract(2, 8, 4, 16), abstract(2, 8, 2, 16)
    call = lambda implementation, **o: functools.partial(
        attention.dot_product_attention, implementation=implementation, **o
    )
    for options in ({"local_window_size": (3, 0)}, {"local_window_size": (3, 5), "is_causal": True}):
        for implementation in ("cudnn", None):
            text = lowered(call(implementation, **options), q, k, k)
            assert fused_calls(text)[0][2] == "CAUSAL" and re.search(r"sliding_window_length\\22: 4,", text)
    masked = lambda implementation: lambda q, k, v, m: call(implementation, mask=m)(q, k, v)
    text = lowered(masked("cudnn"), q, k, k, abstract(2, 1, 1, 8, dtype=bool))
    assert fused_calls(text)[0][0] == "fmhaScaleBiasSoftmax" and fused_calls(text)[0][3].endswith(
        "tensor<2x4x8x8xbf16>"
    )
    assert not fused_calls(lowered(masked(None), q, k, k, abstract(2, 1, 1, 8, dtype=bool)))
    assert (
        fused_calls(lowered(lambda q, k, v, b: call("cudnn")(q, k, v, b), q, k, k, abstract(1, 4, 8, 8)))[0][0]
        == "fmhaScaleBiasSoftmax"
    )
    one_k = abstract(8, 2, 16)
    shared = jax.vmap(call(None, key_value_seq_lengths=jnp.array([5])), in_axes=(1, None, None))
    assert fused_calls(lowered(shared, abstract(8, 3, 4, 16), one_k, one_k))[0][3].startswith(
        "tensor<3x8x4x16xbf16>, tensor<3x8x2x16"
    )


@needs_plugin
def test_cudnn_refusals_name_the_reason():
    """What the kernel cannot run is refused with its reason, by `cudnn_refusal` and, when "cudnn" is named,
    as a ValueError; None runs it all the same. Catches: an exception from inside JAX, a silent other
    answer."""
    make = lambda H=16, T=8, S=8, dtype=jnp.bfloat16: [
        jnp.ones((1, T, 4, H), dtype),
        *[jnp.ones((1, S, 2, H), dtype)] * 2,
    ]
    for word, arrays, options in (
        ("float32", make(dtype=jnp.float32), {}),
        ("multiple of 8", make(H=20), {}),
        ("multiple of 8", make(H=512), {}),
        ("even", make(T=7), {}),
        ("even", make(S=7), {}),
        ("window", make(), {"local_window_size": 2}),
        ("window", make(), {"local_window_size": (-1, 0)}),
        ("empty", make(T=0), {}),
    ):
        assert word in attention.cudnn_refusal(*arrays, **options)
        with pytest.raises(ValueError, match=word):
            attention.dot_product_attention(*arrays, **options, implementation="cudnn")
        assert attention.dot_product_attention(*arrays, **options).shape == arrays[0].shape
    with pytest.raises(ValueError, match="scale"):
        jax.jit(lambda s: attention.dot_product_attention(*make(), scale=s, implementation="cudnn"))(0.5)
    if not any(d.platform == "gpu" for d in jax.devices()):
        with pytest.raises(ValueError, match="no NVIDIA GPU"):
            attention.dot_product_attention(*make(), implementation="cudnn")


@given(
    is_causal=st.booleans(),
    heads=st.sampled_from([(4, 4), (4, 2), (4, 1)]),
    seed=st.integers(0, 2**32 - 1),
    lengths=st.sampled_from([None, "key_value_seq_lengths", "query_seq_lengths"]),
)
def test_cudnn_matches_naive_within_bf16_tolerance(is_causal, heads, seed, lengths):
    """On a GPU, outputs and gradients of the fused kernel are as close to the float64 oracle as those of
    "naive" in bfloat16, up to a factor of 2 and 1e-3. Catches: a mask type, a scale or a head mapping that
    the kernel takes otherwise. Runs wherever a supported GPU is found."""
    shapes = [abstract(2, 64, heads[0], 32), *[abstract(2, 64, heads[1], 32)] * 2]
    reason = attention.cudnn_refusal(*shapes)
    if not any("cuda" in d.client.platform_version.lower() for d in jax.devices()):
        reason = "no NVIDIA GPU here" if reason is None else reason
    if reason is not None:
        (pytest.fail if os.environ.get("MINIJAX_REQUIRE_GPU") == "1" else pytest.skip)(reason)
    rng = np.random.default_rng(seed)
    query, key, value, cotangent = (
        jnp.asarray(rng.normal(size=s.shape), jnp.bfloat16) for s in (*shapes, shapes[0])
    )
    options = {"is_causal": is_causal}
    if lengths:
        options[lengths] = rng.integers(0, 65, 2).astype(np.int32)
    exact = [np.asarray(x, np.float64) for x in (query, key, value, cotangent)]
    want, grads, _ = oracle(*exact[:3], **options, cotangent=exact[3])
    errors = {}
    for implementation in ("naive", "cudnn"):
        call = functools.partial(attention.dot_product_attention, implementation=implementation, **options)
        out, vjp = jax.vjp(jax.jit(call), query, key, value)
        got = [out, *vjp(cotangent)]
        errors[implementation] = [
            np.abs(np.asarray(g, np.float64) - w).max()
            for g, w in zip(got, (want, grads["query"], grads["key"], grads["value"]))
        ]
    assert all(fused <= 2 * naive + 1e-3 for naive, fused in zip(errors["naive"], errors["cudnn"])), errors


# ---------------------------------------------------------------- the layer and its cache

D, N, K, H, MAX_LENGTH = 6, 4, 2, 3, 8


def rotate(x, positions):
    """Stands in for rotary embeddings: a function of absolute positions, for JAX and NumPy alike."""
    return x * (1 + 0.3 * positions[..., None, None])


def layer_oracle(params, x, lengths=None, use_rotate=True):
    """The whole layer in float64: [B, T, D] -> [B, T, D]."""
    p = {k: np.asarray(v, np.float64) for k, v in params.items()}
    x = np.asarray(x, np.float64)
    q, k, v = (np.einsum("btd,dnh->btnh", x, p[w]) for w in ("wq", "wk", "wv"))
    if use_rotate:
        positions = np.broadcast_to(np.arange(x.shape[1]), x.shape[:2])
        q, k = rotate(q, positions), rotate(k, positions)
    return np.einsum(
        "btnh,nhd->btd", oracle(q, k, v, is_causal=True, key_value_seq_lengths=lengths)[0], p["wo"]
    )


PARAMS = attention.init_attention(jax.random.key(0), D, N, K, H)
cached = jax.jit(functools.partial(attention.cached_attention, rotate=rotate))


@given(
    seed=st.integers(0, 2**32 - 1),
    use_rotate=st.booleans(),
    implementation=st.sampled_from([*IMPLEMENTATIONS, None]),
)
def test_attention_layer_matches_the_oracle(seed, use_rotate, implementation):
    """Projections, positions, heads and output projection are those of the oracle, with key lengths. Catches:
    a transposed weight, rotation of only one of query and key, lengths or implementation that are not passed
    on."""
    x = np.random.default_rng(seed).normal(size=(2, 5, D)).astype(np.float32)
    lengths = np.random.default_rng(seed).integers(0, 6, 2).astype(np.int32)
    got = layer(use_rotate, implementation)(PARAMS, x, lengths)
    close(got, layer_oracle(PARAMS, x, lengths, use_rotate), 5e-5)


@functools.cache
def layer(use_rotate, implementation):
    return jax.jit(
        lambda params, x, n: attention.attention(
            params,
            x,
            key_value_seq_lengths=n,
            implementation=implementation,
            rotate=rotate if use_rotate else None,
        )
    )


@given(
    cuts=st.lists(st.integers(1, 3), min_size=2, max_size=6).filter(lambda c: sum(c) <= MAX_LENGTH),
    seed=st.integers(0, 2**32 - 1),
)
def test_chunks_equal_one_pass(cuts, seed):
    """However a sequence is cut into prefill, chunks and single steps, the outputs are those of one causal
    pass. Catches: a chunk masked as if it began at 0, or not at all; positions read after the cache has
    advanced."""
    x = np.random.default_rng(seed).normal(size=(2, sum(cuts), D)).astype(np.float32)
    cache, outs = attention.init_kv_cache(2, MAX_LENGTH, K, H), []
    for start, cut in zip(np.cumsum([0, *cuts]), cuts):
        out, cache = cached(PARAMS, x[:, start : start + cut], cache)
        outs.append(out)
    close(np.concatenate(outs, axis=1), layer_oracle(PARAMS, x), 5e-5)
    np.testing.assert_array_equal(cache["length"], [sum(cuts)] * 2)


@given(
    steps=st.lists(st.tuples(*[st.integers(-1, 4)] * 2), min_size=1, max_size=6),
    seed=st.integers(0, 2**32 - 1),
    garbage=st.sampled_from([0.0, np.nan, 1e30]),
)
def test_rows_of_different_lengths_and_the_bound_check(steps, seed, garbage):
    """Rows advance by their own numbers of tokens. A row that would run past max_length, or whose number is
    not in 0..T, keeps cache and length bit for bit and gets NaN; all others get the full pass's outputs, and
    0 for padding, whatever padding and unused slots hold. The cache that was passed in is unchanged. Catches:
    one index for all rows, a clamped write, padding that is written or read, updates in place."""
    rng = np.random.default_rng(seed)
    rows = [np.zeros((0, D), np.float32)] * 2
    cache = attention.init_kv_cache(2, MAX_LENGTH, K, H)
    cache = {**cache, "k": cache["k"] + garbage, "v": cache["v"] + garbage}
    for counts in steps:
        x = np.full((2, 3, D), garbage, np.float32)
        before = jax.tree.map(np.array, cache)
        fits = [0 <= n <= 3 and len(row) + n <= MAX_LENGTH for n, row in zip(counts, rows)]
        for b, n in enumerate(counts):
            x[b, : max(n, 0)] = rng.normal(size=(3, D))[: max(n, 0)]
        out, new = cached(PARAMS, x, cache, seq_lengths=np.array(counts, np.int32))
        jax.tree.map(np.testing.assert_array_equal, cache, before)
        for b, n in enumerate(counts):
            if not fits[b]:
                assert np.isnan(np.asarray(out)[b]).all()
                for leaf in new:
                    np.testing.assert_array_equal(new[leaf][b], before[leaf][b])
                continue
            rows[b] = np.concatenate([rows[b], x[b, :n]])
            assert (np.asarray(out)[b, n:] == 0).all() and new["length"][b] == len(rows[b])
            np.testing.assert_array_equal(new["k"][b, len(rows[b]) :], before["k"][b, len(rows[b]) :])
            if n:
                close(out[b, :n], layer_oracle(PARAMS, rows[b][None])[0, -n:], 5e-5)
        cache = new


@given(
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16]), shape=st.sampled_from([(1, 4, 1, 2), (3, 8, 4, 16)])
)
def test_cache_bytes_and_dtypes(dtype, shape):
    """`kv_cache_bytes` is what the keys and values of `init_kv_cache` take; the cache keeps its dtype, the
    output that of x. Catches: a factor of two, a dtype that is widened by a write."""
    cache = attention.init_kv_cache(*shape, dtype)
    assert attention.kv_cache_bytes(*shape, dtype) == cache["k"].nbytes + cache["v"].nbytes
    assert cache["length"].dtype == jnp.int32 and not any(
        np.asarray(x, np.float32).any() for x in cache.values()
    )
    params = jax.eval_shape(
        lambda: attention.init_attention(jax.random.key(0), 6, shape[2], shape[2], shape[3])
    )
    out, new = jax.eval_shape(
        attention.cached_attention, params, abstract(shape[0], 2, 6, dtype=jnp.float32), cache
    )
    assert out.dtype == jnp.float32
    assert all(
        jax.tree.leaves(jax.tree.map(lambda a, b: a.shape == b.shape and a.dtype == b.dtype, new, cache))
    )


def test_ten_decode_steps_are_one_trace():
    """Catches: a length that is a static argument, a cache that grows."""
    traces = []
    step = jax.jit(lambda *args: (traces.append(None), attention.cached_attention(*args))[1])
    cache = attention.init_kv_cache(1, 10, K, H)
    for _ in range(10):
        out, cache = step(PARAMS, jnp.ones((1, 1, D)), cache)
    assert len(traces) == 1 and cache["length"] == 10 and np.isfinite(np.asarray(out)).all()


def test_layer_and_cache_refuse_what_does_not_fit():
    """Catches: floor division of heads or width, a chunk longer than the cache, a cache of another layer."""
    sizes = ("4 and 3", (8, 4, 3)), ("10, 4", (10, 4)), ("4 and 0", (8, 4, 0)), ("8 and 0", (8, 4, 2, 0)), (
        "8 and -2", (8, 4, 2, -2)), ("0 and 0", (0, 4))
    for message, args in sizes:
        with pytest.raises(ValueError, match=message):
            attention.init_attention(jax.random.key(0), *args)
    cache = attention.init_kv_cache(1, 4, K, H)
    uneven = {**PARAMS, "wq": PARAMS["wq"][:, : K + 1], "wo": PARAMS["wo"][: K + 1]}
    for message, call in (
        (f"got {K + 1} and {K}", lambda: attention.cached_attention(uneven, jnp.ones((1, 1, D)), cache)),
        ("0..2, got 3", lambda: attention.cached_attention(
            PARAMS, jnp.ones((1, 1, D)), jax.tree.map(lambda x: jnp.stack([x] * 3), cache), layer=3)),
        ("5 tokens.* 4 ", lambda: attention.cached_attention(PARAMS, jnp.ones((1, 5, D)), cache)),
        ("x must be", lambda: attention.cached_attention(PARAMS, jnp.ones((1, 2, D + 1)), cache)),
        ("x must be", lambda: attention.attention(PARAMS, jnp.ones((2, D)))),
        ("cache must be", lambda: attention.cached_attention(PARAMS, jnp.ones((2, 2, D)), cache)),
        (
            "cache must be",
            lambda: attention.cached_attention(
                PARAMS, jnp.ones((1, 2, D)), attention.init_kv_cache(1, 4, 1, H)
            ),
        ),
        (
            "seq_lengths must be",
            lambda: attention.cached_attention(PARAMS, jnp.ones((1, 2, D)), cache, seq_lengths=[1, 2]),
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@given(seed=st.integers(0, 2**32 - 1))
def test_init_attention_scales_by_fan_in_and_keys_differ(seed):
    """Each matrix has variance 1 / fan-in, and no two are made from one key. Catches: a reused key, a fan-in
    that counts the wrong axes."""
    params = attention.init_attention(jax.random.key(seed), 64, 8, 8, 32)
    for name, fan_in in (("wq", 64), ("wk", 64), ("wv", 64), ("wo", 256)):
        assert abs(float(jnp.std(params[name])) * fan_in**0.5 - 1) < 0.05
    assert not any(
        np.array_equal(params[a], params[b]) for a, b in (("wq", "wk"), ("wk", "wv"), ("wq", "wv"))
    )


def test_main_prints_both_tables(capsys, monkeypatch, tmp_path):
    """`python attention.py` prints a line per length and implementation, with times and memory, and the
    cache's bytes for MHA, GQA and MQA; without matplotlib --plot says in one line what is missing. Catches: a
    table that breaks."""
    monkeypatch.setattr(attention, "_measure", functools.partial(attention._measure, lengths=(8,), budget_s=0.0))
    attention.main([])
    printed = capsys.readouterr().out
    for name in ("naive", "xla", "blockwise", "None"):
        assert (
            len(re.findall(rf"^ +8 {name} +[\d.]+ ms \( *[\d.]+x\) +[\d.]+ MiB +[\d.]+ ms", printed, re.M))
            == 1
        )
    for name, size in (("MHA", 4 * 2**30), ("GQA", 2**30), ("MQA", 2**27)):
        assert re.search(rf"{name} .*= +{size:,} bytes", printed)
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stop:
        attention.main(["--plot", str(tmp_path / "x.png")])
    assert stop.value.code and "pip install matplotlib" in capsys.readouterr().err


def test_a_full_cache_takes_not_one_token_more():
    """At exactly max_length one more token is refused: NaN, and cache and length as before; the row beside it goes on.

    Catches: a bound that is off by one, and a write that XLA moves back onto the last slot.
    """
    params = attention.init_attention(jax.random.key(0), 6, 4, 2, 4)
    x = jax.random.normal(jax.random.key(1), (2, 4, 6))
    full = attention.attention(params, x)
    _, cache = attention.cached_attention(params, x, attention.init_kv_cache(2, 4, 2, 4), seq_lengths=np.array([4, 3]))
    out, after = attention.cached_attention(params, x[:, 3:], cache)
    assert after["length"].tolist() == [4, 4] and np.isnan(out[0]).all()
    np.testing.assert_array_equal(after["k"][0], cache["k"][0])
    np.testing.assert_array_equal(after["v"][0], cache["v"][0])
    np.testing.assert_allclose(out[1, 0], full[1, 3], atol=1e-5)


# ---------------------------------------------------------------- decoder: the oracle

V, DIM, L = 23, 16, 3
HEADS = [(4, 4), (4, 2), (4, 1)]  # MHA, GQA, MQA
REQUIRED = ("wq", "wk", "wv", "wo")


@functools.cache
def small_decoder(N=4, K=2, seed=0, scale=1.0, num_layers=L):
    """A decoder of a few thousand parameters, drawn by NumPy (nothing to compile).

    Its norm scales are not 1, so that a forgotten one shows. scale: of the embedding; a tiny one makes the
    epsilon of the first norm matter.
    """
    shapes = jax.eval_shape(lambda: decoder.init_decoder(
        jax.random.key(0), vocab_size=V, num_layers=num_layers, model_dim=DIM, num_heads=N, num_kv_heads=K,
        mlp_dim=20))
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        name = jax.tree_util.keystr(path)
        draw = rng.uniform(0.5, 1.5, leaf.shape) if "norm" in name else rng.normal(size=leaf.shape) / 4
        return jnp.asarray(draw * (4 * scale if "embedding" in name else 1), jnp.float32)

    return jax.tree.map_with_path(draw, shapes)


def oracle_norm(x, scale):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale


def oracle_rotate(x, position):
    """x [H] at one position: pair (i, i + H/2) as a complex number, times e^(i position 10000^(-2i/H))."""
    half = len(x) // 2
    turned = (x[:half] + 1j * x[half:]) * np.exp(1j * position * 10000.0 ** (-2 * np.arange(half) / len(x)))
    return np.concatenate([turned.real, turned.imag])


def oracle_decoder(params, tokens):
    """Logits [T, V] of one row of tokens [T], in float64 and with loops, from the formulas."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    x = params["embedding"][tokens]  # [T, D]
    layers = params["layers"]
    for i in range(len(layers["mlp_norm"])):
        weights = {name: layers["attention"][name][i] for name in REQUIRED}
        h = oracle_norm(x, layers["attention_norm"][i])
        N, K, H = weights["wq"].shape[1], weights["wk"].shape[1], weights["wq"].shape[2]
        out = np.zeros_like(x)
        for n in range(N):
            k = n // (N // K)
            query = [oracle_rotate(row @ weights["wq"][:, n], t) for t, row in enumerate(h)]
            key = [oracle_rotate(row @ weights["wk"][:, k], t) for t, row in enumerate(h)]
            value = h @ weights["wv"][:, k]  # [T, H]
            for t in range(len(tokens)):
                scores = np.array([query[t] @ key[s] for s in range(t + 1)]) / np.sqrt(H)
                probs = np.exp(scores - scores.max())
                out[t] += probs / probs.sum() @ value[:t + 1] @ weights["wo"][n]
        x = x + out
        h = oracle_norm(x, layers["mlp_norm"][i])
        gate, up = h @ layers["mlp"]["w_gate"][i], h @ layers["mlp"]["w_up"][i]
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layers["mlp"]["w_down"][i]
    return oracle_norm(x, params["final_norm"]) @ params["output"]


def oracle_loss(params, batch):
    """(mean cross-entropy in nats over the True positions of the mask, their number)."""
    total, count = 0.0, 0
    for tokens, mask in zip(np.asarray(batch["tokens"], int), np.asarray(batch["mask"])):
        logits = oracle_decoder(params, np.clip(tokens[:-1], 0, V - 1))
        for t in np.flatnonzero(mask):
            top = logits[t].max()
            total += np.log(np.exp(logits[t] - top).sum()) + top - logits[t, tokens[t + 1]]
            count += 1
    return total / max(count, 1), count


def random_tokens(seed, *shape):
    return np.random.default_rng(seed).integers(0, V, shape)


decoder_jit = jax.jit(decoder.decoder, static_argnames=("implementation", "remat", "dtype"))
cached_jit = jax.jit(decoder.cached_decoder)
loss_and_grads = jax.jit(jax.value_and_grad(decoder.loss_fn, has_aux=True))


# ---------------------------------------------------------------- decoder: the arithmetic


@given(heads=st.sampled_from(HEADS), T=st.sampled_from([1, 7]), scale=st.sampled_from([1.0, 1e-3]),
       seed=st.integers(0, 99))
def test_decoder_matches_the_formulas(heads, T, scale, seed):
    """The logits are Llama's, for MHA, GQA and MQA.

    Catches a wrong epsilon, base, pairing or sign of the rotation, a wrong order of norm, attention and MLP,
    gate and up exchanged, the wrong key/value head, a missing scale or residual.
    """
    params, tokens = small_decoder(*heads, seed % 3, scale), random_tokens(seed, 2, T)
    want = np.stack([oracle_decoder(params, row) for row in tokens])
    np.testing.assert_allclose(decoder_jit(params, tokens), want, rtol=0, atol=2e-5 * max(1, abs(want).max()))


@given(heads=st.sampled_from(HEADS), seed=st.integers(0, 99))
@settings(max_examples=5 * SCALE)
def test_decoder_in_float64_is_exact(heads, seed):
    """With 64-bit numbers nothing on the way is rounded to 32 bits, far positions included.

    Catches a cast to float32 that the looser comparison cannot see, and frequencies that are nearly right.
    """
    params = small_decoder(*heads)
    with jax.enable_x64(True):
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params)
        tokens = random_tokens(seed, 1, 7)
        got = decoder.decoder(params, tokens, implementation="naive")
        assert got.dtype == jnp.float64
        np.testing.assert_allclose(got[0], oracle_decoder(params, tokens[0]), rtol=0, atol=1e-11)
        x = np.random.default_rng(seed).normal(size=(1, 3, 1, 8))
        positions = np.array([[1000, 1, 77777]])
        want = [oracle_rotate(x[0, t, 0], positions[0, t]) for t in range(3)]
        got = decoder.rotate(jnp.asarray(x), positions)[0, :, 0]
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-9)


@given(H=st.sampled_from([2, 8]), shift=st.integers(0, 3000), seed=st.integers(0, 999))
def test_rotary_depends_on_relative_positions_and_keeps_norms(H, shift, seed):
    """Shifting query and key by the same distance changes no score; no vector changes its length.

    Catches positions taken from the wrong end, a missing minus sign, different frequencies for the two
    halves.
    """
    x = np.random.default_rng(seed).normal(size=(1, 6, 2, H)).astype(np.float32)
    positions = np.random.default_rng(seed).integers(0, 50, (1, 6))
    near, far = decoder.rotate(x, positions), decoder.rotate(x, positions + shift)
    scores = [np.einsum("btnh,bsnh->bnts", y, y) for y in (np.asarray(near, float), np.asarray(far, float))]
    np.testing.assert_allclose(*scores, atol=5e-3)  # float32 angles of 3000 radians are right to 2e-4
    np.testing.assert_allclose(np.linalg.norm(near, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-5)


def test_rotary_by_hand():
    """One pair, frequency 1, query (1, 0) at 5, key (1, 0) at 3: their product is cos 2.

    Catches an offset that is forgotten (cos 3) or off by one. bfloat16 in, bfloat16 out, with float32 angles:
    at position 1001, bfloat16 would round the angle to 1000 (its steps are 8 there).
    """
    one = jnp.array([[[[1.0, 0.0]]]])
    dot = (decoder.rotate(one, jnp.array([[5]])) * decoder.rotate(one, jnp.array([[3]]))).sum()
    np.testing.assert_allclose(dot, -0.41614684, atol=1e-6)
    turned = decoder.rotate(one.astype(jnp.bfloat16), jnp.array([[1001]]))
    assert turned.dtype == jnp.bfloat16
    np.testing.assert_allclose(turned[0, 0, 0].astype(float), [np.cos(1001), np.sin(1001)], atol=4e-3)


@given(seed=st.integers(0, 999), t=st.integers(0, 6), heads=st.sampled_from(HEADS))
def test_decoder_is_causal(seed, t, heads):
    """(1) Logits at t have an exactly zero gradient in every later token's embedding; (2) a nonzero one in those
    at and before t; (3) changing the later tokens changes not one bit of the logits up to t.

    Catches a mask that is off by one, an output shifted by one, attention over the whole row.
    """
    params = small_decoder(*heads)
    tokens = np.random.default_rng(seed).permutation(V)[:7][None]  # all different
    grads = embedding_grads(params, tokens, t)
    used = np.abs(np.asarray(grads)[tokens[0]]).max(axis=1)  # [T]
    assert (used[t + 1:] == 0).all() and (used[:t + 1] > 0).all()
    changed = tokens.copy()
    changed[:, t + 1:] = random_tokens(seed, 1, 6 - t)
    np.testing.assert_array_equal(decoder_jit(params, tokens)[:, :t + 1], decoder_jit(params, changed)[:, :t + 1])


@jax.jit
def embedding_grads(params, tokens, t):
    return jax.grad(lambda p: (decoder.decoder(p, tokens)[0, t] ** 2).sum())(params)["embedding"]


@given(heads=st.sampled_from(HEADS), seed=st.integers(0, 9))
@settings(max_examples=5 * SCALE)
def test_stacked_layers_are_a_loop_over_layers(heads, seed):
    """The scan applies layer 0, 1, 2 in this order, each once.

    Catches layers run in reverse, a carry that is dropped, one layer used for all.
    """
    params, tokens = small_decoder(*heads), random_tokens(seed, 2, 7)
    x = decoder.embed(params, tokens, None)
    for i in range(L):
        layer = jax.tree.map(lambda leaf: leaf[i], params["layers"])
        x, _ = decoder.layer_fn(layer, x, lambda weights, h: (
            attention.attention(weights, h, rotate=decoder.rotate), None))
    np.testing.assert_allclose(decoder_jit(params, tokens), decoder.project(params, x), atol=1e-5)


def test_depth_does_not_grow_the_program(monkeypatch):
    """However many layers, one is traced.

    Catches a Python loop over layers, whose compile time grows with depth.
    """
    calls, layer_fn = [], decoder.layer_fn
    monkeypatch.setattr(decoder, "layer_fn", lambda *args: calls.append(1) or layer_fn(*args))
    for depth in 2, 5:
        calls.clear()
        jax.eval_shape(decoder.decoder, small_decoder(num_layers=depth), random_tokens(0, 1, 4))
        assert len(calls) == 1


def test_remat_changes_memory_and_nothing_else():
    """remat gives the same loss and gradients, and needs less memory for the backward pass.

    Catches an argument that is accepted and ignored.
    """
    batch = {"tokens": random_tokens(0, 4, 129), "mask": np.ones((4, 128), bool)}
    params, results, memory = small_decoder(num_layers=8), [], []
    for remat in False, True:
        loss = functools.partial(decoder.loss_fn, remat=remat, implementation="naive")
        compiled = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(params, batch).compile()
        results.append(compiled(params, batch))
        memory.append(compiled.memory_analysis().temp_size_in_bytes)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *results)
    assert memory[1] < memory[0] / 2


def test_unroll_changes_the_program_and_nothing_else():
    """unroll reaches the scan, and gives the same loss and gradients.

    Catches an argument that is accepted and ignored.
    """
    batch, params = {"tokens": random_tokens(0, 2, 8), "mask": np.ones((2, 7), bool)}, small_decoder()
    results = []
    for unroll in 1, L:
        loss = functools.partial(decoder.loss_fn, unroll=unroll)
        assert f"unroll={unroll}" in str(jax.make_jaxpr(loss)(params, batch))
        results.append(jax.jit(jax.value_and_grad(loss, has_aux=True))(params, batch))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *results)


def test_decoder_in_bfloat16_keeps_float32_masters():
    """dtype=bfloat16 computes in bfloat16 and gives float32 logits and gradients of the float32 parameters.

    Catches a dtype that is ignored, logits rounded to bfloat16 before the loss, gradients in the compute
    dtype.
    """
    params, tokens = small_decoder(), random_tokens(1, 2, 7)
    want = np.stack([oracle_decoder(params, row) for row in tokens])
    logits = decoder_jit(params, tokens, dtype=jnp.bfloat16)
    error = np.abs(logits - want).max() / np.abs(want).max()
    assert logits.dtype == jnp.float32 and 1e-4 < error < 0.03
    assert (logits != logits.astype(jnp.bfloat16).astype(jnp.float32)).any()
    batch = {"tokens": tokens, "mask": np.ones((2, 6), bool)}
    loss = functools.partial(decoder.loss_fn, dtype=jnp.bfloat16)
    (value, _), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, batch)
    assert {leaf.dtype for leaf in jax.tree.leaves((value, grads))} == {jnp.dtype(jnp.float32)}
    np.testing.assert_allclose(value, oracle_loss(params, batch)[0], rtol=0.02)


def test_decoder_options_reach_attention():
    """implementation is handed on: a name that does not exist is refused, those that do agree.

    Catches an argument that is accepted and ignored.
    """
    params, tokens = small_decoder(), random_tokens(2, 2, 7)
    with pytest.raises(ValueError, match="implementation"):
        decoder.decoder(params, tokens, implementation="fastest")
    for name in "xla", "blockwise":
        np.testing.assert_allclose(decoder_jit(params, tokens, implementation=name),
                                   decoder_jit(params, tokens, implementation="naive"), atol=1e-5)


# ---------------------------------------------------------------- decoder: the loss and training


@given(seed=st.integers(0, 999), data=st.data())
def test_decoder_loss_is_the_exact_masked_mean(seed, data):
    """The loss is the mean over the True positions of the mask, whatever the mask; with none it is 0.

    Catches a mean over all positions, a mean of row means, targets that are off by one, NaN for no token at
    all.
    """
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=12, max_size=12))).reshape(2, 6)
    batch = {"tokens": random_tokens(seed, 2, 7), "mask": mask}
    (loss, metrics), grads = loss_and_grads(small_decoder(), batch)
    want, count = oracle_loss(small_decoder(), batch)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    assert metrics["tokens"] == count and metrics["loss"] == loss
    assert any(np.any(leaf) for leaf in jax.tree.leaves(grads)) == mask.any()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


@given(seed=st.integers(0, 999), garbage=st.sampled_from([0, -1, V, -100, 2**31 - 1]),
       length=st.integers(0, 6))
def test_decoder_padding_changes_nothing(seed, garbage, length):
    """Whatever stands after a row's last counted token, the loss and all gradients stay the same to the bit.

    Catches padding that is attended to, and padding that is looked up (a NaN times 0 is a NaN).
    """
    tokens, mask = random_tokens(seed, 2, 7), np.ones((2, 6), bool)
    mask[1] = np.arange(6) < length
    clean, dirty = tokens.copy(), tokens.copy()
    clean[1, length + 1:], dirty[1, length + 1:] = 1, garbage
    results = [loss_and_grads(small_decoder(), {"tokens": rows, "mask": mask}) for rows in (clean, dirty)]
    jax.tree.map(np.testing.assert_array_equal, *results)
    want, _ = oracle_loss(small_decoder(), {"tokens": clean, "mask": mask})
    np.testing.assert_allclose(results[0][0][0], want, rtol=1e-5)


def test_decoder_tokens_out_of_range():
    """A number that is no token is an error when it can be seen, and else NaN, never another token's row.

    Catches -1 read from the end, large numbers clamped to the last row, uint8 compared with a V of 256.
    """
    params = small_decoder()
    for bad in -1, V:
        tokens = np.array([[1, bad, 2], [1, 0, 2]])
        with pytest.raises(ValueError, match=f"0..{V - 1}, got {bad}"):
            decoder.decoder(params, tokens)
        logits = np.asarray(decoder_jit(params, tokens))
        assert np.isnan(logits[0, 1:]).all() and np.isfinite(logits[1]).all()
        for place in 1, 2:  # as an input, and as the last target
            tokens = np.array([[1, 3, 2]])
            tokens[0, place] = bad
            (loss, _), _ = loss_and_grads(params, {"tokens": tokens, "mask": np.ones((1, 2), bool)})
            assert np.isnan(loss)
    wide = {**small_decoder(), "embedding": jnp.tile(small_decoder()["embedding"], (12, 1))[:256]}  # V = 256
    tokens = np.array([[0, 255, 128]], np.uint8)
    np.testing.assert_array_equal(decoder_jit(wide, tokens), decoder_jit(wide, tokens.astype(np.int32)))
    assert np.isfinite(decoder.decoder(wide, tokens)).all()


def test_decoder_gradient_tree_is_the_parameter_tree():
    """Every parameter has a gradient of its own shape and dtype, and none is zero or unused.

    Catches a matrix that was created and forgotten, and a leaf that changes dtype on the way.
    """
    batch = {"tokens": random_tokens(3, 2, 7), "mask": np.ones((2, 6), bool)}
    params = small_decoder()
    _, grads = loss_and_grads(params, batch)
    describe = functools.partial(jax.tree.map, lambda leaf: (leaf.shape, leaf.dtype))
    assert describe(grads) == describe(params)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(grads))


def test_decoder_initial_parameters():
    """Shapes are as documented, sizes of the matrices 1 / sqrt(fan-in), residual branches shrink with depth.

    Catches layers that are equal, a fan-in taken from the stacked shape, a missing residual scale, and that
    one seed does not give one model. A fresh model is close to knowing nothing: its loss is about log V.
    """
    init = jax.jit(functools.partial(decoder.init_decoder, vocab_size=64, num_layers=8, model_dim=128, num_heads=4,
                                     num_kv_heads=2))
    params = init(jax.random.key(1))
    layers = params["layers"]
    assert jax.tree.map(lambda leaf: leaf.shape, params) == {
        "embedding": (64, 128), "final_norm": (128,), "output": (128, 64), "layers": {
            "attention": {"wq": (8, 128, 4, 32), "wk": (8, 128, 2, 32), "wv": (8, 128, 2, 32), "wo": (8, 4, 32, 128)},
            "mlp": {"w_gate": (8, 128, 352), "w_up": (8, 128, 352), "w_down": (8, 352, 128)},
            "attention_norm": (8, 128), "mlp_norm": (8, 128)}}
    for name, std in [("w_gate", 128**-0.5), ("w_up", 128**-0.5), ("w_down", 352**-0.5 / 4)]:
        np.testing.assert_allclose(layers["mlp"][name].std(axis=(1, 2)), std, rtol=0.05)
    np.testing.assert_allclose(layers["attention"]["wo"].std(axis=(1, 2, 3)), 128**-0.5 / 4, rtol=0.05)
    np.testing.assert_allclose(params["output"].std(), 128**-0.5, rtol=0.05)
    assert all((leaf[0] != leaf[1]).any() for leaf in jax.tree.leaves((layers["attention"], layers["mlp"])))
    for norm in params["final_norm"], layers["attention_norm"], layers["mlp_norm"]:
        assert (norm == 1).all()
    again, other = init(jax.random.key(1)), init(jax.random.key(2))
    jax.tree.map(np.testing.assert_array_equal, again, params)
    for name in "embedding", "output":
        assert (params[name] != other[name]).any()
    batch = {"tokens": random_tokens(3, 8, 33), "mask": np.ones((8, 32), bool)}
    assert abs(jax.jit(decoder.loss_fn)(params, batch)[0] - np.log(64)) < 1


def test_one_train_step_trains_mlp_and_decoder():
    """make_train_step and make_optimizer serve both models: the loss falls, and only matrices are decayed.

    Catches a step that knows its model, and a stacked norm scale taken for a matrix because it has two axes.
    """
    optimizer = train.make_optimizer(3e-3, 0.1)
    mlp_batch = {"image": np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32),
                 "label": np.arange(8) % 3, "mask": np.ones(8, bool)}
    for params, loss_fn, batch in [
            (train.init_mlp(jax.random.key(0), [5, 16, 3]), train.loss_fn, mlp_batch),
            (small_decoder(), decoder.loss_fn, {"tokens": random_tokens(0, 4, 7), "mask": np.ones((4, 6), bool)})]:
        steps = jax.jit(train.make_train_steps(train.make_train_step(loss_fn, optimizer)))
        batches = jax.tree.map(lambda leaf: np.repeat(leaf[None], 60, axis=0), batch)
        _, _, metrics = steps(params, optimizer.init(params), batches)
        assert metrics["loss"][-1] < 0.5 * metrics["loss"][0]
    zeros = jax.tree.map(jnp.zeros_like, small_decoder())
    updates, _ = optimizer.update(zeros, optimizer.init(small_decoder()), small_decoder())
    for path, update in jax.tree.leaves_with_path(updates):
        assert np.any(update) == ("norm" not in jax.tree_util.keystr(path))


# ---------------------------------------------------------------- decoder: the cache and generation


@given(heads=st.sampled_from(HEADS), lengths=st.tuples(st.integers(1, 7), st.integers(1, 7)),
       cuts=st.sampled_from([(7,), (3, 4), (1, 1, 5), (1,) * 7]), garbage=st.sampled_from([0, -1]))
def test_chunked_prefill_is_one_pass(heads, lengths, cuts, garbage):
    """A row fed in chunks has the logits of the full pass at every position, also where rows differ in length.

    Catches a chunk masked as if it began at 0, a shared position for all rows, padding written into the
    cache.
    """
    params, tokens = small_decoder(*heads), random_tokens(sum(lengths), 2, 7)
    want = np.asarray(decoder_jit(params, tokens))
    padded = np.where(np.arange(7) < np.array(lengths)[:, None], tokens, garbage)
    cache, start = decoder.init_decoder_cache(params, 2, 8), 0
    for size in cuts:
        real = np.clip(np.array(lengths) - start, 0, size)  # tokens of this chunk per row; may be 0
        got, cache = cached_jit(params, padded[:, start:start + size], cache, seq_lengths=real)
        for row in range(2):
            np.testing.assert_allclose(got[row, :real[row]], want[row, start:start + real[row]], atol=1e-5)
        start += size
    np.testing.assert_array_equal(cache["length"], np.broadcast_to(lengths, (L, 2)))


@given(heads=st.sampled_from(HEADS), lengths=st.tuples(st.integers(1, 4), st.integers(1, 4)),
       seed=st.integers(0, 99))
@settings(max_examples=6 * SCALE)
def test_greedy_generation_is_argmax_over_full_passes(heads, lengths, seed):
    """Each new token is the argmax of a full pass over all before it; it stands after its row's own prompt.

    Catches positions that do not go on from the prompt, logits taken from the padded end, a stale cache, rows
    that see each other. What follows is 0; the prompt comes back as it was; padding of the prompt may hold
    anything.
    """
    params, prompt = small_decoder(*heads), random_tokens(seed, 2, 4)
    padded = np.where(np.arange(4) < np.array(lengths)[:, None], prompt, -1)
    got = np.asarray(decoder.generate(params, padded, 5, prompt_lengths=np.array(lengths)))
    assert got.shape == (2, 9) and got.dtype == np.int32
    for row, length in enumerate(lengths):
        np.testing.assert_array_equal(got[row, :length], prompt[row, :length])
        np.testing.assert_array_equal(got[row, length + 5:], 0)
        logits = np.asarray(decoder_jit(params, got[:, :8]))[row, length - 1:length + 4]
        best = np.sort(logits, axis=1)
        assert (best[:, -1] - best[:, -2] > 1e-5).all(), "a tie: choose another seed"
        np.testing.assert_array_equal(got[row, length:length + 5], logits.argmax(axis=1))


def test_generation_is_one_compiled_program(monkeypatch):
    """Prefill and step are traced once each, whatever num_tokens, and not at all the second time.

    Catches a loop in Python over tokens, and a position that is a static argument.
    """
    calls, cached_layers = [], decoder.cached_layers
    monkeypatch.setattr(decoder, "cached_layers", lambda *args: calls.append(1) or cached_layers(*args))
    for num_tokens, temperature, count in [(11, 0.5, 2), (11, 0.7, 0), (13, 0.7, 2), (1, 0.7, 2)]:
        calls.clear()
        got = decoder.generate(small_decoder(), np.array([[1, 2]]), num_tokens, key=jax.random.key(0),
                               temperature=temperature)
        assert got.shape == (1, 2 + num_tokens) and len(calls) <= count
    decoder.generate(small_decoder(), np.array([[1, 2]]), 11)
    calls.clear()
    for unused in {"temperature": 0}, {"temperature": np.float32(0)}, {"top_k": 3}, {"key": jax.random.key(0)}:
        decoder.generate(small_decoder(), np.array([[1, 2]]), 11, **unused)
    decoder.generate(small_decoder(), np.array([[1, 2]]), 11, key=jax.random.key(0), temperature=np.float32(2))
    assert not calls  # what greedy decoding does not use, and the number's type, compile nothing anew
    assert jax.eval_shape(lambda p: decoder.generate(small_decoder(), p, 3), np.array([[1, 2]])).shape == (1, 5)


@given(top_k=st.sampled_from([1, 3, V, None]), temperature=st.sampled_from([0.5, 2.0]), seed=st.integers(0, 99))
@settings(max_examples=6 * SCALE)
def test_sampled_tokens_are_among_the_top_k(top_k, temperature, seed):
    """Every sampled token is one of the top_k of its full pass; top_k=1 is greedy; a key gives one result.

    Catches top_k cut off by one or taken from the wrong end, a key that is used for every step, or not at
    all.
    """
    params, prompt, key = small_decoder(), random_tokens(seed, 2, 4), jax.random.key(seed)
    sampled = functools.partial(decoder.generate, params, prompt, 5, temperature=temperature, top_k=top_k)
    got = np.asarray(sampled(key=key))
    np.testing.assert_array_equal(got, sampled(key=key))
    logits = np.asarray(decoder_jit(params, got[:, :8]))[:, 3:]  # [2, 5, V]
    chosen = np.take_along_axis(logits, got[:, 4:, None], axis=2)
    assert ((logits > chosen).sum(axis=2) < (top_k or V)).all()
    if top_k == 1:
        np.testing.assert_array_equal(got, decoder.generate(params, prompt, 5))
    elif top_k is None and temperature == 2.0:
        others = [np.asarray(sampled(key=jax.random.key(seed + 1 + i))) for i in range(3)]
        assert any((got != other).any() for other in others)


def test_sampling_follows_the_softmax():
    """Frequencies are softmax(logits / temperature), cut to the top k and renormalised; rows are independent.

    Catches temperature multiplied instead of divided, forgotten, or applied before the cut changes its
    meaning. A temperature next to 0 is greedy, not NaN.
    """
    logits = jnp.log(jnp.array([[0.1, 0.4, 0.3, 0.2], [0.25, 0.25, 0.4, 0.1]]))
    keys = jax.random.split(jax.random.key(0), 20_000)
    for temperature, top_k in (1.0, None), (2.0, None), (0.5, 2), (1.0, 3):
        draw = jax.jit(jax.vmap(lambda key: decoder.sample(logits, key, temperature, top_k)))
        tokens = np.asarray(draw(keys))  # [20000, 2]
        for row in range(2):
            weights = np.exp(np.asarray(logits[row], np.float64)) ** (1 / temperature)
            weights[np.argsort(-weights, kind="stable")[top_k or 4:]] = 0
            share = np.bincount(tokens[:, row], minlength=4) / len(tokens)
            np.testing.assert_allclose(share, weights / weights.sum(), atol=0.02)
    assert (decoder.sample(logits * 1e5, keys[0], 1e-38, None) == jnp.array([1, 2])).all()
    # Two steps draw with two keys: were it one, equal logits would give equal tokens all along the row.
    flat = jax.tree.map(jnp.zeros_like, small_decoder())
    written = decoder.generate(flat, np.array([[1]] * 4), 11, key=jax.random.key(0), temperature=1.0)
    rows = written[:, 1:].tolist()
    assert all(len(set(row)) > 3 for row in rows) and len(set(map(tuple, rows))) == 4


def test_cached_decoding_with_64_bit_numbers_and_in_bfloat16():
    """Generation works with x64 switched on and gives the same tokens; a cache may have another dtype.

    Catches indices of mixed width, and a cache that dictates the dtype of the computation.
    """
    want = decoder.generate(small_decoder(), np.array([[1, 2, 3]]), 4)
    with jax.enable_x64(True):
        fresh = jax.eval_shape(lambda: decoder.init_decoder(
            jax.random.key(0), vocab_size=V, num_layers=1, model_dim=DIM, num_heads=4))
        assert {leaf.dtype for leaf in jax.tree.leaves(fresh)} == {jnp.dtype(jnp.float32)}
        np.testing.assert_array_equal(decoder.generate(small_decoder(), np.array([[1, 2, 3]]), 4), want)
        key = jax.random.key(0)
        tokens = decoder.generate(small_decoder(), np.array([[1, 2, 3]]), 4, key=key, temperature=1.0)
        assert tokens.shape == (1, 7)
    tokens = random_tokens(0, 1, 6)
    cache = decoder.init_decoder_cache(small_decoder(), 1, 6, jnp.bfloat16)
    logits, cache = decoder.cached_decoder(small_decoder(), tokens, cache)
    assert cache["k"].dtype == jnp.bfloat16 and logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, decoder_jit(small_decoder(), tokens), atol=0.05)
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), small_decoder())
    assert decoder.init_decoder_cache(low, 1, 6)["v"].dtype == jnp.bfloat16
    assert decoder.generate(low, tokens, 2).shape == (1, 8)
    cache = decoder.init_decoder_cache(small_decoder(), 1, 6)
    logits, _ = decoder.cached_decoder(small_decoder(), tokens, cache, dtype=jnp.bfloat16)
    assert 1e-4 < np.abs(logits - decoder_jit(small_decoder(), tokens)).max() < 0.1


def test_decoder_cache_end():
    """Tokens past the cache's end are an error when it can be seen; compiled, that row gives NaN and keeps its cache.

    So are a length outside 0..T and, always, more tokens than the cache has slots. Catches a write that is clamped to
    the last slot and destroys what is there.
    """
    params = small_decoder()
    cache = decoder.init_decoder_cache(params, 2, 4)
    _, cache = decoder.cached_decoder(params, np.array([[1, 2, 3], [1, 2, 0]]), cache, seq_lengths=np.array([3, 2]))
    for message, tokens, lengths in [("holds 4", [[4, 5], [4, 5]], None), ("x brings 5 tokens", [[1] * 5] * 2, [0, 0]),
                                     ("0..2, got .3, 1.", [[4, 5], [4, 5]], [3, 1]),
                                     ("0..2, got .-1, 1.", [[4, 5], [4, 5]], [-1, 1])]:
        with pytest.raises(ValueError, match=message):
            decoder.cached_decoder(params, np.array(tokens), cache, seq_lengths=lengths)
    logits, after = cached_jit(params, np.array([[4, 5], [4, 5]]), cache)
    assert np.isnan(logits[0]).all() and np.isfinite(logits[1]).all()
    np.testing.assert_array_equal(after["length"], np.broadcast_to([3, 4], (L, 2)))
    np.testing.assert_array_equal(after["k"][:, 0], cache["k"][:, 0])


KEY = {"key": "a key"}  # never used: what is wrong is found before


@pytest.mark.parametrize("message, change", [
    ("at least one token", {"prompt": np.zeros((1, 0), int)}),
    ("at least one token", {"prompt": np.zeros((0, 3), int)}),
    ("at least one token", {"prompt": np.array([1, 2])}),
    ("integers", {"prompt": np.array([[1.0, 2.0]])}),
    ("integers", {"prompt": np.array([[True, True]])}),
    ("0..22, got 23", {"prompt": np.array([[1, 23]])}),
    ("0..22, got -1", {"prompt": np.array([[1, -1]])}),
    ("num_tokens", {"num_tokens": 0}),
    ("num_tokens", {"num_tokens": -3}),
    ("num_tokens", {"num_tokens": 2.5}),
    ("temperature", {"temperature": -1.0}),
    ("temperature", {"temperature": float("nan")}),
    ("temperature", {"temperature": float("inf")}),
    ("key", {"temperature": 1.0}),
    ("top_k", {"temperature": 1.0, **KEY, "top_k": 0}),
    ("top_k", {"temperature": 1.0, **KEY, "top_k": 24}),
    ("top_k", {"top_k": 0}),
    ("top_k", {"top_k": 1.5}),
    ("prompt_lengths", {"prompt_lengths": np.array([0])}),
    ("prompt_lengths", {"prompt_lengths": np.array([3])}),
    ("prompt_lengths", {"prompt_lengths": np.array([1, 2])}),
    ("prompt_lengths", {"prompt_lengths": np.array([1.0])}),
])
def test_generate_refuses_before_it_works(message, change, monkeypatch):
    """Each wrong argument is a ValueError that names it, raised before anything is compiled.

    Catches an argument that is clamped, rounded or ignored, and a traceback from deep inside a trace.
    """
    monkeypatch.setattr(decoder, "generate_compiled", None)
    arguments = {"prompt": np.array([[1, 2]]), "num_tokens": 3, **change}
    with pytest.raises(ValueError, match=message):
        decoder.generate(small_decoder(), **arguments)


@pytest.mark.parametrize("message, change", [
    ("vocab_size 0", {"vocab_size": 0}), ("num_layers 0", {"num_layers": 0}), ("model_dim -4", {"model_dim": -4}),
    ("mlp_dim 0", {"mlp_dim": 0}), ("even, got 3", {"head_dim": 3}), ("4 and 3", {"num_kv_heads": 3}),
    ("17", {"model_dim": 17}),
])
def test_init_decoder_refuses(message, change):
    """Sizes that fit no model are a ValueError that names them.

    Catches floor division and an odd head_dim.
    """
    sizes = {"vocab_size": 5, "num_layers": 1, "model_dim": 16, "num_heads": 4, **change}
    with pytest.raises(ValueError, match=message):
        decoder.init_decoder(jax.random.key(0), **sizes)


def test_decoder_refuses_shapes():
    """Tokens and masks of other shapes or dtypes are a ValueError at trace time.

    Catches silent broadcasting.
    """
    for bad in np.array([1, 2]), np.array([[1.0]]), np.array([[True]]):
        with pytest.raises(ValueError, match="integers"):
            decoder.decoder(small_decoder(), bad)
    tokens = random_tokens(0, 2, 7)
    for mask in np.ones((2, 7), bool), np.ones((1, 6), bool), np.ones((2, 6)), np.ones(6, bool):
        with pytest.raises(ValueError, match="mask"):
            decoder.loss_fn(small_decoder(), {"tokens": tokens, "mask": mask})
    with pytest.raises(ValueError, match="integer tokens"):
        decoder.loss_fn(small_decoder(), {"tokens": np.ones((2, 7), bool), "mask": np.ones((2, 6), bool)})
    cache = decoder.init_decoder_cache(small_decoder(), 2, 8)
    ones = np.ones((2, 2), int)
    for bad, lengths in [(np.array([1, 2]), None), (ones > 0, None), (tokens[:1], None), (ones, np.ones(3, int)),
                         (ones, np.ones(2)), (ones, 1)]:
        with pytest.raises(ValueError, match="to fit the cache"):
            decoder.cached_decoder(small_decoder(), bad, cache, seq_lengths=lengths)


def test_narrow_integers_count_as_far_as_wide_ones():
    """Lengths and counts may be of any integer dtype; parameters may be NumPy arrays. Catches a comparison in uint8."""
    params, tokens = jax.tree.map(np.asarray, small_decoder()), random_tokens(0, 2, 300)
    wide, narrow = np.array([3, 100]), np.array([3, 100], np.uint8)
    for of in wide, narrow:
        cache = decoder.init_decoder_cache(params, 2, 300)
        logits, cache = decoder.cached_decoder(params, tokens, cache, seq_lengths=of)
        new = decoder.generate(params, tokens, np.uint8(2), prompt_lengths=of)
        if of is narrow:
            jax.tree.map(np.testing.assert_array_equal, before, (logits, cache, new))
        before = logits, cache, new


def test_decoder_of_nothing():
    """No tokens have no logits, and a loss of 0. Catches a division by the number of tokens."""
    params = small_decoder()
    assert decoder.decoder(params, np.zeros((2, 0), int)).shape == (2, 0, V)
    assert decoder.loss_fn(params, {"tokens": np.ones((2, 1), int), "mask": np.ones((2, 0), bool)})[0] == 0


# ---------------------------------------------------------------- decoder: weights from elsewhere


@given(heads=st.sampled_from(HEADS), data=st.data())
@settings(max_examples=6 * SCALE)
def test_llama_weights_round_trip(heads, data):
    """Every number stands where Llama keeps it (linear layers are [out, in], heads are blocks of rows), and comes back.

    Catches a transpose that is missing in both directions, heads and head dimension exchanged, layers mixed
    up.
    """
    params, (N, K) = small_decoder(*heads), heads
    state = decoder.to_llama(params)
    i, d, f, v = (data.draw(st.integers(0, size - 1)) for size in (L, DIM, 20, V))
    n, k, h = (data.draw(st.integers(0, size - 1)) for size in (N, K, 4))
    layers, prefix = params["layers"], f"model.layers.{i}."
    for name, index, want in [
            (prefix + "self_attn.q_proj", (n * 4 + h, d), layers["attention"]["wq"][i, d, n, h]),
            (prefix + "self_attn.k_proj", (k * 4 + h, d), layers["attention"]["wk"][i, d, k, h]),
            (prefix + "self_attn.v_proj", (k * 4 + h, d), layers["attention"]["wv"][i, d, k, h]),
            (prefix + "self_attn.o_proj", (d, n * 4 + h), layers["attention"]["wo"][i, n, h, d]),
            (prefix + "mlp.gate_proj", (f, d), layers["mlp"]["w_gate"][i, d, f]),
            (prefix + "mlp.up_proj", (f, d), layers["mlp"]["w_up"][i, d, f]),
            (prefix + "mlp.down_proj", (d, f), layers["mlp"]["w_down"][i, f, d]),
            (prefix + "input_layernorm", d, layers["attention_norm"][i, d]),
            (prefix + "post_attention_layernorm", d, layers["mlp_norm"][i, d]),
            ("model.embed_tokens", (v, d), params["embedding"][v, d]),
            ("model.norm", d, params["final_norm"][d]), ("lm_head", (v, d), params["output"][d, v])]:
        assert isinstance(state[f"{name}.weight"], np.ndarray) and state[f"{name}.weight"][index] == want, name
    assert len(state) == 3 + 9 * L
    back = decoder.from_llama({**state, "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2)}, N)
    assert jax.tree.structure(back) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, back, params)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(back))


def test_llama_weights_that_do_not_fit():
    """A name too few, one too many (a bias!) or a wrong head count is a ValueError; tied weights get their copy.

    Catches a bias that is dropped silently, and a state dict that only seems to be loaded.
    """
    state = decoder.to_llama(small_decoder())
    with pytest.raises(ValueError, match="no model.layers.1.mlp.up_proj.weight"):
        decoder.from_llama({name: state[name] for name in state if name != "model.layers.1.mlp.up_proj.weight"}, 4)
    with pytest.raises(ValueError, match="no model.embed_tokens.weight"):
        decoder.from_llama({}, 4)
    with pytest.raises(ValueError, match="q_proj.bias"):
        decoder.from_llama({**state, "model.layers.0.self_attn.q_proj.bias": np.zeros(DIM)}, 4)
    for heads in 3, 1, 0, 16, 32:
        with pytest.raises(ValueError, match=f"^{heads} heads"):
            decoder.from_llama(state, heads)
    wide = {name: np.ones((12, DIM)) if "k_proj" in name or "v_proj" in name else state[name] for name in state}
    with pytest.raises(ValueError, match="width 16 and 12"):  # 4 query heads cannot share 3
        decoder.from_llama(wide, 4)
    tied = decoder.from_llama({name: value for name, value in state.items() if name != "lm_head.weight"}, 4)
    np.testing.assert_array_equal(tied["output"], tied["embedding"].T)


# ---------------------------------------------------------------- decoder: the main job


@given(size=st.integers(1, 40), length=st.sampled_from([4, 5, 8, 16]))
def test_evaluation_predicts_every_held_out_byte_once(size, length):
    """Each byte of the held-out part is the target of exactly one True position, with 3/4 length bytes before it.

    Catches bytes dropped at the ragged end or counted twice, the first byte left out, padding counted, and an
    order in which one could learn from a byte before it is predicted.
    """
    text = np.random.default_rng(size).permutation(200)[:60 + size].astype(np.uint8)  # every value once
    windows = decoder.evaluation_windows(text, 60, length)
    count = len(windows["tokens"])
    assert windows["tokens"].shape == (count, 1, length + 1) and windows["mask"].shape == (count, 1, length)
    seen = []
    for (row,), (mask,) in zip(windows["tokens"], windows["mask"]):
        for t in np.flatnonzero(mask):
            where = np.flatnonzero(text == row[t + 1])[0]
            seen.append(where)
            np.testing.assert_array_equal(row[:t + 1], text[where - t - 1:where])
            assert t + 1 >= 0.75 * length - 1
    np.testing.assert_array_equal(seen, np.arange(60, 60 + size))
    decoder.evaluation_windows(text, length, length)
    for start, length in (length - 1, length), (len(text), length), (60, 0):
        with pytest.raises(ValueError, match=f"start < {len(text)}, got length {length}, start {start}"):
            decoder.evaluation_windows(text, start, length)


def test_held_out_bits():
    """Without learning: the mean of -log2 p over the counted bytes. With it: one step of SGD a window, taken after
    the window is predicted, on all of its bytes.

    Catches nats for bits, a mean of means over ragged windows, a model that learns from what it then predicts,
    and one that learns from the counted bytes only or keeps nothing of what it learned.
    """
    params, text = small_decoder(), random_tokens(0, 60).astype(np.uint8)
    windows = decoder.evaluation_windows(text, 43, 12)  # 17 bytes in windows of 3: the last one is ragged

    def nats(params):  # of each window's counted bytes
        totals = []
        for (row,), (mask,) in zip(windows["tokens"], windows["mask"]):
            logits = oracle_decoder(params, row[:-1])
            log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
            totals.append(-log_probs[np.arange(12), row[1:]][mask].sum())
        return np.array(totals)

    still = nats(params)
    np.testing.assert_allclose(decoder.held_out_bits(params, windows), still.sum() / 17 / np.log(2), rtol=1e-5)
    one = jax.tree.map(lambda x: x[:1], windows)
    assert decoder.held_out_bits(params, one, 0.5) == decoder.held_out_bits(params, one)
    learned, want = params, 0.0
    for i, tokens in enumerate(windows["tokens"]):
        want += nats(learned)[i]
        grads = loss_and_grads(learned, {"tokens": tokens, "mask": np.ones((1, 12), bool)})[1]
        learned = jax.tree.map(lambda w, g: w - 0.5 * g, learned, grads)
    got = decoder.held_out_bits(params, windows, 0.5)
    np.testing.assert_allclose(got, want / 17 / np.log(2), rtol=1e-4)
    assert abs(want - still.sum()) > 0.1


def test_muon_makes_the_updates_of_matrices_orthogonal():
    """The first step of each layer's matrix has singular values near the learning rate (times sqrt(out / in) where
    that is above 1), all else takes a step of Adam at a fifth of the rate; only the matrices are decayed.

    Catches axes that are taken for another, layers or heads mixed into one matrix, and a rate or decay that
    goes astray.
    """
    params = small_decoder()
    grads = jax.tree.map(lambda w: jax.random.normal(jax.random.key(w.size), w.shape), params)
    plain, decayed = (jax.jit(lambda o=o: o.update(grads, o.init(params), params)[0])()
                      for o in (decoder.make_muon(lambda step: 0.1, decay) for decay in (0.0, 0.5)))
    layers = plain["layers"]

    def matrices(tree):  # [inputs, outputs], one for each layer and name
        heads, mlp = tree["layers"]["attention"], tree["layers"]["mlp"]
        flat = {**{name: heads[name].reshape(L, DIM, -1) for name in ("wq", "wk", "wv")},
                "wo": heads["wo"].reshape(L, -1, DIM), **mlp}
        return {(name, i): stack[i] for name, stack in flat.items() for i in range(L)}

    single = optax.contrib.muon(0.1)
    want = jax.jit(lambda g: single.update(g, single.init(g), g)[0])(matrices(grads))
    for name, update in matrices(plain).items():
        np.testing.assert_allclose(update, want[name], rtol=1e-3, atol=1e-5, err_msg=str(name))
        rows, columns = update.shape
        singular = np.linalg.svd(np.asarray(update, np.float64), compute_uv=False) / max(1, columns / rows) ** 0.5
        assert 0.05 < singular.min() and singular.max() < 0.13, (name, singular)
    for name in "embedding", "output", "final_norm":
        # Adam's first step has size 1, and looking ahead with Nesterov adds what the momentum keeps of it.
        np.testing.assert_allclose(plain[name], -0.02 * (1 + 0.9 * 0.1 / 0.19) * np.sign(grads[name]), rtol=1e-3)
    changed = jax.tree.map(lambda a, b: np.abs(a - b).max() > 0, plain, decayed)
    assert all(jax.tree.leaves((changed["layers"]["attention"], changed["layers"]["mlp"])))
    changed["layers"] = {name: changed["layers"][name] for name in ("attention_norm", "mlp_norm")}
    assert not any(jax.tree.leaves(changed))
    np.testing.assert_allclose(decayed["layers"]["mlp"]["w_up"] - layers["mlp"]["w_up"],
                               -0.1 * 0.5 * params["layers"]["mlp"]["w_up"], atol=1e-6)


@given(seed=st.integers(0, 9), step=st.integers(0, 999))
def test_training_windows_are_a_function_of_seed_and_step(seed, step):
    """Windows are cut from the text, another step or seed gives others, the same the same.

    Catches an order that a resumed run could not find again, and windows that run over the end.
    """
    text = np.arange(200, dtype=np.uint8)
    batch = decoder.training_batch(text, 8, 190, seed, step)
    assert batch["mask"].all() and batch["mask"].shape == (8, 190)
    np.testing.assert_array_equal(batch["tokens"], batch["tokens"][:, :1] + np.arange(191))
    np.testing.assert_array_equal(batch["tokens"], decoder.training_batch(text, 8, 190, seed, step)["tokens"])
    assert (batch["tokens"] != decoder.training_batch(text, 8, 190, seed, step + 1)["tokens"]).any()
    assert (batch["tokens"] != decoder.training_batch(text, 8, 190, seed + 1, step)["tokens"]).any()


def test_training_windows_reach_both_ends():
    """Each start that fits is drawn. Catches a last byte that no window ever holds."""
    text = np.arange(12, dtype=np.uint8)
    starts = decoder.training_batch(text, 500, 8, 0, 0)["tokens"][:, 0]
    assert set(starts.tolist()) == {0, 1, 2, 3}


def test_documentation_is_the_help_topics():
    """The text is all topics in alphabetical order, so it is the same in every process.

    Catches an order by hash.
    """
    from pydoc_data.topics import topics
    text = decoder.documentation()
    assert text.dtype == np.uint8 and len(text) > 300_000
    assert text.tobytes().decode() == "\n".join(topics[name] for name in sorted(topics))


TINY_RUN = ["--steps", "4", "--log-every", "2", "--layers", "1", "--model-dim", "16", "--heads", "2", "--kv-heads", "1",
        "--length", "16", "--batch-size", "4"]


def test_decoder_main_trains_and_resumes_exactly(tmp_path, monkeypatch, capsys):
    """main trains, saves, measures beside both compressors, writes; resumed halfway it ends with the same numbers.

    Catches a resume that loses the optimizer's state or its place in the data, and a held-out part that is
    not the last tenth.
    """
    text = np.frombuffer(b"How much wood would a woodchuck chuck? " * 40, np.uint8)
    monkeypatch.setattr(decoder, "documentation", lambda: text)
    generate, keys = decoder.generate, []
    monkeypatch.setattr(decoder, "generate", lambda *a, key, **o: keys.append(key) or generate(*a, key=key, **o))
    whole = decoder.main([*TINY_RUN, "--checkpoint-dir", str(tmp_path / "a")])
    printed = capsys.readouterr().out
    assert printed.count("\nstep ") == 2 and "1,404 bytes to train on, 156 held out" in printed
    assert f"{whole['model']:.4f}" in printed and "(cpu)" in printed or jax.default_backend() != "cpu"
    raw = text.tobytes()
    xz = [len(lzma.compress(part, preset=9)) for part in (raw, raw[:1404])]
    assert whole["xz -9"] == 8 * (xz[0] - xz[1]) / 156
    assert whole["bz2 -9"] == 8 * (len(bz2.compress(raw)) - len(bz2.compress(raw[:1404]))) / 156
    assert keys[0] != jax.random.key(0)  # with which the parameters were drawn
    assert 2 < whole["model"] < 9 and whole["model, learning as it reads"] != whole["model"]
    (tmp_path / "b").mkdir()
    shutil.copy(tmp_path / "a" / "step_2.npz", tmp_path / "b")
    resumed = decoder.main([*TINY_RUN, "--checkpoint-dir", str(tmp_path / "b"), "--resume"])
    printed = capsys.readouterr().out
    assert resumed == whole and "going on from step 2" in printed and printed.count("\nstep ") == 1
    with pytest.raises(SystemExit, match="seed"):
        decoder.main([*TINY_RUN, "--seed", "5", "--checkpoint-dir", str(tmp_path / "b"), "--resume"])


@pytest.mark.parametrize("flags", [
    ["--resume"], ["--steps", "0"], ["--steps", "many"], ["--learning-rate", "-1"], ["--learning-rate", "nan"],
    ["--kv-heads", "3"], ["--length", "100000000"], ["--model-dim", "30", "--heads", "4"], ["--nonsense"],
])
def test_decoder_main_mistakes_are_one_line(flags, capsys):
    """A user's mistake ends with one line and a failure, before any training. Catches a traceback."""
    with pytest.raises(SystemExit) as error:
        decoder.main(flags)
    message = error.value.code if isinstance(error.value.code, str) else capsys.readouterr().err
    assert error.value.code not in (0, None) and message.strip().count("\n") == 0 and "decoder.py: " in message
