"""Words of messages."""


def counted(number: int, word: str) -> str:
    """A number with its word. Examples: "1 device", "0 devices", "2 kinds"."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
