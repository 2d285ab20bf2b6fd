"""What ends a program with one sentence."""


class ProbeError(Exception):
    """Something that its user can mend: the text says what is wrong and what to do. The programs exit with 1."""


def one_line(error: BaseException, limit: int = 200) -> str:
    """The first line of an error's text, and the next where that one only announces it, for use inside a sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    text = " ".join(lines[:2] if lines[0].endswith(":") else lines[:1]).rstrip(".")
    return text if len(text) <= limit else text[:limit - 3] + "..."
