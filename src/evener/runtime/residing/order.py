"""In which order layers are wanted: learnt in the first forward and backward, the chain's own until then."""


class Order:
    """Follows the visits of `num_layers` layers, and says which one comes next.

    Example: three layers visited forward 0 1 2 and backward 2 1 0: behind the forward's 2 comes 1, behind
    the backward's 0 comes 1 again.
    """

    def __init__(self, num_layers: int) -> None:
        self._forward: list[int] | None = None
        self._backward: list[int] | None = None
        self._chain = list(range(num_layers))
        self._seen: list[int] = []
        self._phase, self._learns = "", False
        self._here: int | None = None

    def begin_forward(self, *, learns: bool) -> None:
        """A forward begins; a backward follows only where it `learns`."""
        self._keep()
        self._phase, self._learns, self._seen = "forward", learns, []

    def begin_backward(self) -> None:
        """A backward begins."""
        self._keep()
        self._phase, self._learns, self._seen = "backward", True, []
        self._here = None  # its first visit counts, be it of the layer where the forward ended

    def enter(self, layer: int) -> int | None:
        """`layer` is wanted now; the next other one, as far as one can tell."""
        self._seen.append(layer)
        self._here = layer
        forward = self._forward or self._chain
        backward = self._backward or self._chain[::-1]
        ways = {"forward": (forward, backward if self._learns else forward), "backward": (backward, forward)}
        way, then = ways[self._phase]
        at = len(self._seen) - 1
        if at >= len(way) or way[at] != layer:  # another way through the model than before
            at = way.index(layer) if layer in way else len(way)
        return next((x for x in (*way[at:], *then) if x != layer), None)

    def is_elsewhere(self, layer: int) -> bool:
        """Whether the newest visit was to another layer."""
        return layer != self._here

    def _keep(self) -> None:
        """What was seen is the order from now on, unless it is a forward that nothing follows."""
        if not (self._seen and self._learns):
            return
        if self._phase == "forward":
            self._forward = self._forward or self._seen
        elif self._phase == "backward":
            self._backward = self._backward or self._seen
