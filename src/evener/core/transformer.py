"""A decoder transformer by its configuration alone: layers, bytes and FLOPs from published formulas.

embed ─► blocks.0 ─► blocks.1 ─► ... ─► head        s: sequence   h: hidden   f: feed-forward width
                                                    V: vocabulary a: heads    k: width of keys (h·kv/a)
"""

from functools import cache
from pathlib import Path

import msgspec

from evener.core.figures import Value
from evener.core.files import read
from evener.core.profile import GroupBytes, Layer
from evener.errors import FileError, UnknownNameError

_DATA = Path(__file__).with_name("transformers.json")
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an activation by the precision of the matrix products; parameters are float32 always."""


class Transformer(Value, frozen=True, kw_only=True):
    """Shapes of a decoder transformer; a sample is one sequence.

    `gated` means three matrices in the feed-forward part instead of two, `bias` biases everywhere and in the
    norms, `fused_attention` that no sequence × sequence scores are kept. `source` is where it was
    published.
    """

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    vocabulary: int
    sequence: int
    ffn_multiple: float = 4.0
    num_kv_heads: int | None = None
    gated: bool = False
    bias: bool = True
    tied: bool = True
    learned_positions: bool = True
    fused_attention: bool = True
    dropout: bool = False
    source: str = ""

    def __post_init__(self) -> None:
        sizes = {f: getattr(self, f) for f in ("num_layers", "hidden", "num_heads", "vocabulary", "sequence")}
        sizes |= {"ffn_multiple": self.ffn_multiple, "num_kv_heads": self.num_kv_heads or 1}
        for field, value in sizes.items():
            if not 0 < value < float("inf"):
                raise ValueError(f"{field} must be positive, got {value}")
        if self.hidden % self.num_heads or self.num_heads % (self.num_kv_heads or self.num_heads):
            raise ValueError(
                f"hidden {self.hidden} must be a multiple of num_heads {self.num_heads}, and that one of "
                f"num_kv_heads {self.num_kv_heads}"
            )

    @property
    def ffn(self) -> int:
        return round(self.hidden * self.ffn_multiple)

    @property
    def keys(self) -> int:
        """Width of the keys, as of the values: less than hidden where heads share them."""
        return self.hidden // self.num_heads * (self.num_kv_heads or self.num_heads)

    @property
    def block_params(self) -> int:
        """Parameters of one block: 2h² + 2hk of attention, 2hf (gated: 3hf), norms 2h, biases.

        Example: GPT-2, h = 768: 4·768² + 8·768² + 13·768 = 7 087 872 (Narayanan et al. 2021: 12h² + 13h).
        """
        h, k, f = self.hidden, self.keys, self.ffn
        matrices = 2 * h * h + 2 * h * k + (3 if self.gated else 2) * h * f
        biases = (h + 2 * k + h) + (f + h) + 2 * h + (f if self.gated else 0) if self.bias else 0
        return matrices + 2 * h + biases

    @property
    def embed_params(self) -> int:
        return self.vocabulary * self.hidden + (self.sequence * self.hidden if self.learned_positions else 0)

    @property
    def norm_params(self) -> int:
        """The norm in front of the head."""
        return self.hidden * (2 if self.bias else 1)

    @property
    def num_params(self) -> int:
        """All parameters, a tied matrix once. Example: GPT-2 has 124 439 808, Llama-3-8B 8 030 261 248."""
        head = 0 if self.tied else self.vocabulary * self.hidden
        return self.embed_params + self.num_layers * self.block_params + self.norm_params + head

    @property
    def block_flops(self) -> float:
        """FLOPs of one block's forward for a sample: 2s for each matrix entry, 4s²h for the scores.

        Example: GPT-3 175B, 24sh² + 4s²h = 7.42e12 + 2.06e11 (Narayanan et al. 2021). Backward takes twice
        as many.
        """
        s, h = self.sequence, self.hidden
        matrices = 2 * h * h + 2 * h * self.keys + (3 if self.gated else 2) * h * self.ffn
        return 2.0 * s * matrices + 4.0 * s * s * h

    @property
    def head_flops(self) -> float:
        """FLOPs of the head's forward for a sample: 2shV."""
        return 2.0 * self.sequence * self.hidden * self.vocabulary

    def saved_by_block(self, precision: str) -> tuple[int, int]:
        """(bytes whole on every device of a tensor-parallel group, bytes split over it) kept for a sample.

        With 16-bit activations, dropout and separate attention the two are s·h·10 and s·h·(24 + 5as/h): their
        sum is s·h·(34 + 5as/h) (Korthikanti et al. 2022). Whole: the inputs of both norms and both parts, and
        the dropout masks. Split: queries, keys, values, attention's output, the feed-forward's inner ones.
        """
        e, s, h, a = BYTES[precision], self.sequence, self.hidden, self.num_heads
        whole = s * h * (4 * e + (2 if self.dropout else 0))
        inner = (4 if self.gated else 2) * self.ffn
        split = s * e * (2 * h + 2 * self.keys + inner)
        if self.fused_attention:
            split += 4 * s * a  # the logarithm of each row's sum, float32
        else:
            split += a * s * s * (2 * e + 1 if self.dropout else e)
        return whole, split


class KnownTransformers(Value, frozen=True, kw_only=True):
    """All that is in transformers.json."""

    models: tuple[Transformer, ...]


@cache
def presets() -> dict[str, Transformer]:
    """The published configurations by name."""
    data = msgspec.json.decode(_DATA.read_bytes(), type=KnownTransformers)
    return {m.name: m for m in data.models}


def transformer(name: str) -> Transformer:
    """The preset called `name`, or the configuration in the JSON file at that path.

    Raises UnknownNameError that lists the presets, FileError for a file that is no configuration.
    """
    if name.casefold() in presets():
        return presets()[name.casefold()]
    if not name.endswith(".json"):
        raise UnknownNameError(
            f"no model is called {name!r}",
            remedy=f"one of: {', '.join(presets())}; or a JSON file with its configuration",
        )
    if not Path(name).is_file():
        raise FileError(
            f"cannot read {name}: no such file", remedy=f"check the path, or {', '.join(presets())}"
        )
    return read(name, Transformer)


def chain(model: Transformer, precision: str) -> tuple[Layer, ...]:
    """The layers in order: embed, blocks.0 to the last, head with the norm before it and the loss.

    Parameters take 4 bytes each, activations those of `precision`, logits and what the loss keeps of them 4
    bytes each. A tied matrix is held by embed and head.
    """
    e, s, h = BYTES[precision], model.sequence, model.hidden
    hidden, logits = s * h * e, 4 * s * model.vocabulary
    head_params = model.norm_params + model.vocabulary * h

    def layer(name: str, params: int, output: int, saved: int, flops: float, tied: str = "") -> Layer:
        return Layer(
            name=name,
            num_params=params,
            param_bytes=4 * params,
            output_bytes_per_sample=output,
            saved_bytes_per_sample=saved,
            flops_per_sample=flops,
            tied=(tied,) if tied and model.tied else (),
        )

    saved = sum(model.saved_by_block(precision))
    blocks = (
        layer(f"blocks.{i}", model.block_params, hidden, saved, model.block_flops)
        for i in range(model.num_layers)
    )
    first = layer("embed", model.embed_params, hidden, 8 * s, float(s * h), "head")
    return (
        first,
        *blocks,
        layer("head", head_params, logits, 2 * hidden + logits, model.head_flops, "embed"),
    )


def group_bytes(model: Transformer, precision: str, degree: int) -> tuple[GroupBytes, ...]:
    """What each device of a tensor-parallel group holds of each layer: matrices split, inputs whole."""
    whole, split = model.saved_by_block(precision)
    saved = {x.name: x.saved_bytes_per_sample for x in chain(model, precision)}
    hidden = model.sequence * model.hidden * BYTES[precision]
    saved |= {f"blocks.{i}": whole + split // degree for i in range(model.num_layers)}
    saved["head"] = 2 * hidden + (saved["head"] - 2 * hidden) // degree
    return tuple(
        GroupBytes(
            layer=x.name,
            tensor_parallel=degree,
            param_bytes=-(-x.param_bytes // degree),
            output_bytes_per_sample=-(-x.output_bytes_per_sample // (degree if x.name == "head" else 1)),
            saved_bytes_per_sample=saved[x.name],
        )
        for x in chain(model, precision)
    )
