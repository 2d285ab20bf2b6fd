"""Starts the `whet` command, a native program in the package. Apart, since `import whet` would load NumPy first."""

import os
import signal
import sys


def main() -> None:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python, and exec would hand that on
        signal.signal(number, signal.SIG_DFL)
    os.execv(os.path.join(os.path.dirname(os.path.abspath(__file__)), "whet", "bin", "whet"), sys.argv)
