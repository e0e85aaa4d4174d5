from evener.core.tracebacks import misplaced, raised_in


class Part:
    def __init__(self, inner: "Part | None" = None) -> None:
        self.inner = inner

    def forward(self) -> None:
        if self.inner is None:
            raise RuntimeError("Expected all tensors to be on the same device")
        self.inner.forward()


def caught(part: Part) -> Exception:
    try:
        part.forward()
    except RuntimeError as e:
        return e
    raise AssertionError


def test_the_innermost_known_part_counts():
    inner, unknown = Part(), Part()
    outer = Part(Part(inner))
    names = {id(outer): "", id(outer.inner): "blocks", id(inner): "blocks.norm"}
    assert raised_in(caught(outer), names) == "blocks.norm"
    assert raised_in(caught(unknown), names) == ""


def test_a_remedy_for_tensors_left_behind():
    assert "register_buffer" in misplaced(caught(Part()), "other")
    assert misplaced(ValueError("shape"), "other") == "other"
