"""How much a process grows over many calls."""

import subprocess
import sys

_SCRIPT = """
import os

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

{setup}
calls({count})
before = resident()
calls({count})
print(resident() - before)
"""


def growth(setup, count=100_000):
    """Bytes over `count` calls, made by the function calls(count) that `setup` defines, after as many. In a
    process of its own, and after calls that fill the holes of its heap, which takes a while."""
    script = _SCRIPT.format(setup=setup, count=count)
    return int(subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True).stdout)
