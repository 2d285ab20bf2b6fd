"""Files the command reads and writes: of every type, hostile, damaged, in the way, interrupted."""

import os
import resource
import signal
import stat
import struct
import subprocess
import time

import ml_dtypes
import numpy as np
import pytest
from command import SANITIZED, WHET, compute, logits, names, ok, refused, softmax


def npy(dictionary, data=b"", version=1, length=None):
    text = dictionary.encode("latin1")
    size = struct.pack("<H" if version == 1 else "<I", len(text) if length is None else length)
    return b"\x93NUMPY" + bytes([version, 0]) + size + text + data


def header(shape, descr="<f4", order="False"):
    return f"{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {shape}, }}\n"


# ---- files from and for NumPy


@pytest.mark.parametrize("dtype,tolerance", [(np.float16, 2e-3), (np.float32, 2e-6), (np.float64, 1e-12)])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_types_orders_versions(here, dtype, tolerance, order, version):
    x = np.asarray(logits(4, 9, 7, dtype=dtype, scale=1), order=order)
    with open("in.npy", "wb") as file:
        np.lib.format.write_array(file, x, version=version)
    ok("softmax", "in.npy", "out.npy", "--axis", "1")
    weights = np.load("out.npy")
    assert weights.dtype == dtype and weights.shape == x.shape and weights.flags.c_contiguous
    np.testing.assert_allclose(weights, softmax(x, axis=1), rtol=tolerance)


def test_bfloat16_by_hand(here):
    bits = (logits(4, 30, scale=1).view(np.uint32) >> 16).astype("<u2")
    (here / "in.npy").write_bytes(npy(header("(4, 30)", "<V2"), bits.tobytes()))
    ok("softmax", "in.npy", "out.npy")
    out = (here / "out.npy").read_bytes()
    assert b"'descr': '<V2'" in out[:128] and len(out) == 128 + bits.nbytes
    x, weights = ((b.astype(np.uint32) << 16).view(np.float32)
                  for b in (bits, np.frombuffer(out, "<u2", offset=128).reshape(4, 30)))
    np.testing.assert_allclose(weights, softmax(x), rtol=2 ** -8)


def test_bfloat16_of_ml_dtypes(here):
    x = logits(4, 30, scale=1).astype(ml_dtypes.bfloat16)
    np.save("in.npy", x)
    ok("softmax", "in.npy", "out.npy")
    weights = np.load("out.npy").view(ml_dtypes.bfloat16)
    np.testing.assert_allclose(weights.astype(float), softmax(x), rtol=2 ** -8)
    header = np.dtype(ml_dtypes.bfloat16).str.encode()
    assert header in open("out.npy", "rb").read(128)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (0, 0), (2, 0, 3)])
@pytest.mark.parametrize("axis", [0, -1])
def test_zero_sizes(here, shape, axis):
    weights, stats = compute(np.zeros(shape, np.float32), "--axis", axis, "--rule", "target-entropy:0.2")
    assert weights.shape == shape and weights.dtype == np.float32
    rows = tuple(np.delete(shape, axis))
    assert stats.shape == (*rows, 12)
    for row in stats.reshape(-1, 12):
        np.testing.assert_array_equal(row, [0, -np.inf, -np.inf, 0, 0, 0, 0, 1, 0, 0, 0, -np.inf])


def test_types_that_are_no_rows(here):
    for array, code, saying in [(np.float32(3), 2, "in.npy: is a single number"),
                                (np.ones(3, bool), 2, "in.npy: holds bool"),
                                (np.ones(3, np.int64), 2, "in.npy: holds int64"),
                                (np.ones(3, np.int32), 1, "'<i4'"),
                                (np.ones(3, ">f4"), 1, "big-endian"),
                                (np.array([None]), 1, "Python objects"),
                                (np.ones(3, np.complex64), 1, "'<c8'"),
                                (np.ones(3, "V2"), 1, "ml_dtypes.bfloat16"),
                                (np.zeros(3, [("a", "<f4")]), 1, "structured"),
                                (np.array(["text"]), 1, "'<U4'")]:
        np.save("in.npy", array)
        refused(code, "softmax", "in.npy", "out.npy", saying=saying)
    assert names(here) == ["in.npy"]


# ---- hostile and damaged files


HOSTILE = {
    "empty": b"",
    "text": b"1 2 3\n4 5 6\n",
    "zip": b"PK\x03\x04" + bytes(100),
    "magic only": b"\x93NUMPY",
    "version 9": npy(header("(1,)"), bytes(4), version=9),
    "header past the end": npy(header("(1,)"), b"", length=60000),
    "header of 4 GiB": npy(header("(1,)"), b"", version=2, length=0xFFFFFFFF),
    "negative size": npy(header("(-1,)")),
    "product overflows": npy(header("(4294967296, 4294967296)")),
    "bytes overflow": npy(header("(4611686018427387904,)")),
    "overflow behind a zero": npy(header("(9223372036854775807, 9223372036854775807, 0)")),
    "size beyond 64 bits": npy(header("(" + "9" * 400 + ",)")),
    "an exabyte": npy(header("(288230376151711744,)"), bytes(64)),
    "nine axes": npy(header("(1, 1, 1, 1, 1, 1, 1, 1, 1)"), bytes(4)),
    "cut short": npy(header("(3,)"), bytes(11)),
    "too long": npy(header("(3,)"), bytes(13)),
    "object": npy(header("(1,)", "|O"), bytes(8)),
    "code": npy("__import__('os').system('touch pwned')", bytes(4)),
    "escape sequence": npy(header("(1,)", "\x1b]0;title\x07\n"), bytes(4)),
    "no shape": npy("{'descr': '<f4', 'fortran_order': False, }", bytes(4)),
    "more keys": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1,), 'x': 1}", bytes(4)),
    "unfinished": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1,"),
    "deep": npy("(" * 60000, bytes(4)),
}


def limit_memory():
    if not SANITIZED:
        resource.setrlimit(resource.RLIMIT_DATA, (1 << 27, 1 << 27))


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files(here, name):
    (here / "in.npy").write_bytes(HOSTILE[name])
    (here / "out.npy").write_bytes(b"as it was")

    line = refused(1, "softmax", "in.npy", "out.npy", preexec_fn=limit_memory, saying="whet softmax: in.npy: ")
    assert "out of memory" not in line and "\x1b" not in line and len(line) < 400
    assert (here / "out.npy").read_bytes() == b"as it was"
    assert names(here) == ["in.npy", "out.npy"]


def test_rows_without_keys_are_bounded(here):
    (here / "in.npy").write_bytes(npy(header("(1099511627776, 0)")))
    refused(2, "softmax", "in.npy", "out.npy", "--stats", "stats.npy", saying="rows without keys")
    assert ok("softmax", "in.npy", "out.npy", "--axis", "0") == ""


def test_inputs_that_cannot_be_read(here):
    refused(1, "softmax", "missing.npy", "out.npy", saying="missing.npy: cannot open: No such file")
    refused(1, "softmax", ".", "out.npy", saying=".: is a folder")
    refused(1, "softmax", "/dev/zero", "out.npy", saying="is a pipe or device")
    os.mkfifo("fifo")
    refused(1, "softmax", "fifo", "out.npy", saying="is a pipe or device")
    np.save("in.npy", logits(3))
    refused(1, "softmax", "in.npy", "out.npy", "--mask", "missing.npy", saying="missing.npy: cannot open")
    refused(1, "softmax", "in.npy", "out.npy", "--lengths", "missing.npy", saying="missing.npy: cannot open")
    refused(1, "softmax", "two\nlines.npy", "out.npy", saying="two\\x0alines.npy: ")
    if os.getuid():
        os.chmod("in.npy", 0)
        refused(1, "softmax", "in.npy", "out.npy", saying="in.npy: cannot open: Permission denied")
    assert names(here) == ["fifo", "in.npy"]


# ---- outputs: whole or not at all


def test_outputs_that_cannot_be_written(here):
    np.save("in.npy", logits(3, 4))
    os.mkdir("folder")
    refused(1, "softmax", "in.npy", "missing/out.npy", saying="missing/out.npy: cannot create")
    refused(1, "softmax", "in.npy", "folder", saying="folder: is a folder")
    refused(1, "softmax", "in.npy", "in.npy/out.npy", saying="Not a directory")
    refused(2, "softmax", "in.npy", "out.npy", "--stats", "./out.npy", saying="is OUT too")
    refused(1, "softmax", "in.npy", "out.npy", "--stats", "missing/stats.npy", saying="missing/stats.npy: ")
    assert names(here) == ["folder", "in.npy"]


def test_full_device(here):
    np.save("in.npy", logits(3, 4))
    before = (here / "in.npy").read_bytes()
    refused(1, "softmax", "in.npy", "/dev/full", saying="/dev/full: cannot write it: No space left on device")
    refused(1, "softmax", "in.npy", "in.npy", "--stats", "/dev/full", saying="/dev/full: cannot write it")
    assert (here / "in.npy").read_bytes() == before
    assert names(here) == ["in.npy"]


@pytest.fixture
def small_disk(here):
    """A disk of 64 KiB, where this process may mount one."""
    disk = here / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting a tmpfs isn't permitted")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_full_disk(here, small_disk):
    np.save("in.npy", logits(100, 1000))
    np.save(small_disk / "out.npy", logits(10))
    before = (small_disk / "out.npy").read_bytes()
    refused(1, "softmax", "in.npy", "disk/out.npy", saying="disk/out.npy: cannot write it: No space left on device")
    # The stats fit, the weights don't: neither appears.
    refused(1, "softmax", "in.npy", "disk/out.npy", "--stats", "disk/stats.npy", saying="disk/out.npy: cannot write")
    refused(1, "softmax", "in.npy", "disk/out.npy", "--stats", "stats.npy", saying="disk/out.npy: cannot write")
    assert (small_disk / "out.npy").read_bytes() == before
    assert names(small_disk) == ["out.npy"] and names(here) == ["disk", "in.npy"]


@pytest.mark.parametrize("handling", [signal.SIG_IGN, signal.SIG_DFL])
def test_file_size_limit(here, handling):
    np.save("in.npy", logits(100, 1000))
    (here / "out.npy").write_bytes(b"as it was")

    def limit():
        signal.signal(signal.SIGXFSZ, handling)
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))

    refused(1, "softmax", "in.npy", "out.npy", preexec_fn=limit, saying="out.npy: cannot write it: File too large")
    assert (here / "out.npy").read_bytes() == b"as it was"
    assert names(here) == ["in.npy", "out.npy"]


@pytest.mark.skipif(SANITIZED, reason="its memory can't be limited")
def test_out_of_memory(here):
    np.save("in.npy", np.zeros((1, 1 << 26), np.float32))
    refused(1, "softmax", "in.npy", "out.npy", preexec_fn=limit_memory, saying="out of memory")
    assert names(here) == ["in.npy"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE])
def test_signal_leaves_no_temporary_file(here, number):
    """--stats waits as a temporary file while OUT, a pipe, takes no more."""
    np.save("in.npy", logits(1000, 100))
    os.mkfifo("pipe")
    # A program started in the background may inherit SIGINT ignored, and whet would leave it so.
    process = subprocess.Popen([WHET, "softmax", "in.npy", "pipe", "--stats", "stats.npy"],
                               preexec_fn=lambda: signal.signal(number, signal.SIG_DFL))
    reader = os.open("pipe", os.O_RDONLY)
    assert os.read(reader, 6) == b"\x93NUMPY"
    assert [name for name in names(here) if name.endswith(".tmp")]
    time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(timeout=30) == -number
    os.close(reader)
    assert names(here) == ["in.npy", "pipe"]


def test_output_to_a_pipe(here):
    x = logits(3, 4)
    np.save("in.npy", x)
    result = subprocess.run([WHET, "softmax", "in.npy", "/dev/stdout"], stdout=subprocess.PIPE, check=True)
    (here / "out.npy").write_bytes(result.stdout)
    np.testing.assert_allclose(np.load("out.npy"), softmax(x), rtol=2e-6)


def shell(command):
    """A line of bash, where W is whet."""
    subprocess.run(["bash", "-euc", f"W={WHET}\n{command}"], check=True, timeout=60)


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "log", "link"])
def test_output_to_where_standard_output_goes_is_appended(here, name):
    np.save("in.npy", logits(3, 4))
    ok("softmax", "in.npy", "out.npy")
    os.symlink("log", "link")
    shell(f"echo one >log; $W softmax in.npy {name} >>log; echo two >>log")
    assert (here / "log").read_bytes() == b"one\n" + (here / "out.npy").read_bytes() + b"two\n"
    shell(f"{{ echo one; $W softmax in.npy {name}; echo two; }} >log")
    assert (here / "log").read_bytes() == b"one\n" + (here / "out.npy").read_bytes() + b"two\n"
    assert names(here) == ["in.npy", "link", "log", "out.npy"] and os.path.islink("link")


def test_output_to_another_descriptor_is_appended(here):
    np.save("in.npy", logits(3, 4))
    shell("echo one >log; $W softmax in.npy out.npy --stats /dev/fd/3 3>>log; $W softmax in.npy /dev/stderr 2>>log")
    expected = b"one\n" + npy_bytes(compute(np.load("in.npy"))[1]) + (here / "out.npy").read_bytes()
    assert (here / "log").read_bytes() == expected


def npy_bytes(array):
    np.save("array.npy", array)
    with open("array.npy", "rb") as file:
        return file.read()


def test_inputs_are_not_overwritten(here):
    np.save("in.npy", logits(3, 4))
    np.save("mask.npy", np.ones((3, 4), bool))
    np.save("lengths.npy", np.full(3, 2))
    os.symlink("mask.npy", "link.npy")
    refused(2, "softmax", "in.npy", "link.npy", "--mask", "mask.npy", saying="link.npy: is --mask too; name another file for OUT")
    refused(2, "softmax", "in.npy", "lengths.npy", "--lengths", "lengths.npy", saying="is --lengths too")
    refused(2, "softmax", "in.npy", "out.npy", "--mask", "mask.npy", "--stats", "mask.npy", saying="for --stats")
    assert names(here) == ["in.npy", "lengths.npy", "link.npy", "mask.npy"]


def test_existing_output_keeps_its_permissions(here):
    np.save("in.npy", logits(3))
    (here / "out.npy").write_bytes(b"old")
    os.chmod("out.npy", 0o640)
    ok("softmax", "in.npy", "out.npy")
    assert stat.S_IMODE(os.stat("out.npy").st_mode) == 0o640
    ok("softmax", "in.npy", "new.npy", preexec_fn=lambda: os.umask(0o027))
    assert stat.S_IMODE(os.stat("new.npy").st_mode) == 0o640
    if os.getuid():
        os.chmod("out.npy", 0o440)
        refused(1, "softmax", "in.npy", "out.npy", saying="out.npy: cannot write it: Permission denied")
    assert names(here) == ["in.npy", "new.npy", "out.npy"]
