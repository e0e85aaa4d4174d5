"""Words of messages."""


def counted(number: int, word: str) -> str:
    """A number with its word. Examples: "1 device", "0 devices", "2 kinds"."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def printable(text: str) -> str:
    """`text` for a terminal, where a file of others could hold commands: what cannot be seen is replaced.

    Example: a string of "a", the escape character and "b" becomes "a�b".
    """
    return "".join(c if c.isprintable() else "�" for c in text)
