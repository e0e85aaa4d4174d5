"""The rule on layers, on modules that only look like torch's: the order part, and what is no container."""

from evener.core.layers import ROOT, find_layers, run_order


class Fake:
    """A module as far as the rule looks at it."""

    def __init__(self, tensors: int = 0, **children: "Fake") -> None:
        self.own, self.inner = [object()] * tensors, children

    def named_children(self):
        return self.inner.items()

    def modules(self):
        yield self
        for child in self.inner.values():
            yield from child.modules()

    def parameters(self, *, recurse: bool):
        return self.own

    def buffers(self, *, recurse: bool):
        return []


class Sequential(Fake):
    """Has the name of a container, and is none of torch's."""

    def forward(self) -> None: ...


class Block(Fake):
    pass


def names(model: Fake) -> list[str]:
    return [layer.name for layer in find_layers(model)]


def test_children_of_the_model_are_layers_and_its_own_tensors_are_the_root() -> None:
    assert names(Fake(1, a=Fake(1), b=Sequential(x=Fake()))) == [ROOT, "a", "b"]


def test_what_wraps_blocks_is_opened_and_its_own_tensors_run_by_no_module() -> None:
    model = Fake(body=Fake(1, embed=Fake(1), block=Block(inner=Fake())), head=Fake(1))
    model._no_split_modules = ["Block"]
    found = {layer.name: layer.whole for layer in find_layers(model)}
    assert found == {"body": False, "body.embed": True, "body.block": True, "head": True}


def test_run_order_keeps_what_is_never_used_beside_the_name_before() -> None:
    assert run_order("abc", {"b": 0, "a": 1}) == ["b", "c", "a"]
    assert run_order("abc", {"a": 0, "c": 1}) == ["a", "b", "c"]
    assert run_order((ROOT, "a", "b"), {"b": 0, "a": 1}) == [ROOT, "b", "a"]
