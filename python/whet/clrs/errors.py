"""What ends a program with one sentence."""

from whet.probe.errors import ProbeError, one_line

__all__ = ["ClrsError", "one_line"]


class ClrsError(ProbeError):
    """Something that its user can mend: the text says what is wrong and what to do. The programs exit with 1."""
