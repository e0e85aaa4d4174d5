"""What a user brings: a model, data, a loss, an optimiser and the global batch."""

import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import nn

from evener.core.tracebacks import is_out_of_memory, last_line, said
from evener.core.words import counted
from evener.errors import EvenerError, FileError, ModelError, UsageError
from evener.runtime.dropout import KeyedDropout, replace_dropout
from evener.runtime.problem import Inputs, Problem, default_inputs, loss_on_cpu, weight_of_loss
from evener.runtime.tables.optimizers import TableOptimizer
from evener.session.recipe_fields import checked_fields

LOSS_PLACE = "(loss)"
ALL_TABLES = "*"
_TOO_LARGE = (
    'a table that memory cannot hold is built with device="meta", see "A table larger than any memory" in '
    "docs/guide.md; else a smaller model"
)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that defines a training job, apart from the devices.

    model: any nn.Module. dataset: anything with `len()` and `[i]`. loss(output, target): a scalar mean or sum
    over the batch, or (scalar, {metric: (sum, count)}). optimizer(parameters): a torch optimiser.
    global_batch: samples per optimiser step, however many devices there are.

    inputs(batch) → (args, kwargs, target): default (x, y) → model(x), loss(out, y); mapping → model(**batch).
    reduction: "mean" or "sum"; taken from `loss.reduction` where the loss has one.
    weight(batch): what the mean divides by; default the samples, and for torch's CrossEntropyLoss and NLLLoss
    what these divide by: labels that are not ignored, by the weights of their classes.
    schedule(samples_seen): factor on the learning rate, a function of samples and not of steps or devices.
    max_norm: one clip norm over all gradients. figures: reference numbers printed beside the results.
    batch_norm: "local" normalises each micro-batch of a device by itself, as gradient accumulation does;
    "wave" all micro-batches with the same number together, as one device running them merged would.
    dropout: "per-device" draws masks on each device; "split-free" derives them from seed, step, layer and
    sample, the same under every plan. Both put layers of evener's in the place of torch's, names unchanged.
    compress: what gradients may go as between hosts, where the model predicts a gain: ("bf16", "int8").
    fewer: how hosts may exchange less often than once a step, where that is predicted faster; not exact:
    ("accumulate:4", "delayed", "local:16"), see core/fewer.py.
    steal: a device that is done takes waiting micro-batches of a slower one, within a step.
    place: embedding layers whose tables lie elsewhere: {"emb": "cpu"} keeps the table in host memory,
    {"emb": {"lab1/a": 5, "lab1/b": 3}} its rows in that proportion; {"emb": "auto"} where the planner finds
    it fastest, place="auto" so for all tables; {"(loss)": "cpu"} has the loss there.
    table_optimizer: how tables move (`ev.TableAdam` and others), for all or by name; default: as `optimizer`.
    ids: where a table's ids stand in a batch, {"emb": lambda batch: …}; default: found by running the model.
    None for a table: it is looked up when the model asks, on one device alone and with nothing sent ahead.
    """

    model: nn.Module
    dataset: Any
    loss: Callable[[Any, Any], Any]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    global_batch: int
    inputs: Inputs | None = None
    reduction: Literal["mean", "sum"] | None = None
    weight: Callable[[Any], Any] | None = None
    schedule: Callable[[int], float] | None = None
    heldout: Any = None
    max_norm: float | None = None
    collate: Callable[[list], Any] | None = None
    workers: int = 0
    shuffle: bool = True
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    on_non_finite: Literal["stop", "skip"] = "stop"
    batch_norm: Literal["local", "wave"] = "local"
    dropout: Literal["per-device", "split-free"] = "per-device"
    steal: bool = False
    compress: tuple[str, ...] = ()
    fewer: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    name: str = ""
    figures: dict[str, float] = field(default_factory=dict)
    place: Mapping[str, Any] | str | None = field(default_factory=dict)
    table_optimizer: TableOptimizer | Mapping[str, TableOptimizer] | None = None
    ids: Mapping[str, Callable[[Any], torch.Tensor] | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise UsageError(
                f"the recipe's model is a {type(self.model).__name__}",
                remedy="an instance of torch.nn.Module",
            )
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in checked_fields(given).items():
            object.__setattr__(self, name, value)
        if self.place is None or isinstance(self.place, str):
            object.__setattr__(self, "place", {ALL_TABLES: self.place} if self.place else {})
        if not isinstance(self.place, Mapping):
            raise UsageError(
                f"place is a {type(self.place).__name__}: {self.place!r}",
                remedy='places by table, {"emb": "cpu"}, or a word for all tables, "auto"',
            )
        for option, hint in get_type_hints(type(self)).items():
            kinds = (hint, *get_args(hint))
            choices = [c for kind in kinds if get_origin(kind) is Literal for c in get_args(kind)]
            given = getattr(self, option)
            if choices and given not in choices and not (given is None and type(None) in kinds):
                raise UsageError(f"{option}={given!r} is no choice", remedy=f"one of {', '.join(choices)}")
        self.rate_at(0)
        if self._reduction() not in ("mean", "sum"):
            raise ModelError(
                f"the loss has reduction={self._reduction()!r}, so its value is no single number",
                remedy='reduction="mean" or reduction="sum"',
            )

    def _reduction(self) -> Any:
        return self.reduction or getattr(self.loss, "reduction", "mean")

    @property
    def places(self) -> Mapping[str, Any]:
        """Place by layer; "*" is that of all tables which have none of their own."""
        assert isinstance(self.place, Mapping)
        return self.place

    @property
    def problem(self) -> Problem:
        """The same in the runtime's words."""
        inputs, reduction = self.inputs or default_inputs, self._reduction()
        known = weight_of_loss(self.loss, inputs) if reduction == "mean" else None
        return Problem(
            loss=loss_on_cpu(self.loss) if self._loss_is_on_host else self.loss,
            inputs=inputs,
            reduction=reduction,
            weight=self.weight or known,
            metrics=self.metrics,
        )

    def make_optimizer(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimiser for `parameters`; ModelError where its function fails or gives nothing to use."""
        try:
            made = self.optimizer_to_time(parameters)
        except EvenerError:
            raise
        except Exception as e:
            raise ModelError(
                f"the recipe's optimizer failed: {last_line(e)}",
                numbers=f"given {counted(len(parameters), 'parameter')}",
                remedy="a function of a list of parameters: lambda params: torch.optim.SGD(params, lr=0.1)",
            ) from e
        if not hasattr(made, "param_groups") or not callable(getattr(made, "step", None)):
            raise ModelError(
                f"the recipe's optimizer gave a {type(made).__name__}, which is no optimiser",
                remedy="a function that returns a torch.optim.Optimizer",
            )
        return made

    def optimizer_to_time(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """What the recipe's function gives, or raises; ModelError where that wants a closure."""
        made = self.optimizer(parameters)
        step = getattr(made, "step", None)
        try:
            closure = inspect.signature(step).parameters.get("closure") if callable(step) else None
        except (TypeError, ValueError):  # of a compiled extension: it does not say
            closure = None
        if closure is not None and closure.default is closure.empty:
            raise ModelError(
                f"{type(made).__name__} wants a closure: it runs the model by itself, several times a step, "
                "and cannot be shared out",
                remedy="an optimiser whose step() needs none: SGD, AdamW or most others of torch.optim",
            )
        return made

    def rate_at(self, samples_seen: int) -> float:
        """The factor on the learning rate; ModelError where the schedule fails or gives no number."""
        if self.schedule is None:
            return 1.0
        try:
            factor = self.schedule(samples_seen)
            if not math.isfinite(factor):
                raise ValueError(f"a factor of {factor}")
            return float(factor)
        except Exception as e:
            raise ModelError(
                f"the recipe's schedule failed at {counted(samples_seen, 'sample')}: {last_line(e)}",
                remedy="a function of samples seen that returns a factor on the learning rate, as "
                "lambda seen: min(1, seen / 1000); torch's schedulers are for ev.prepare",
            ) from e

    @property
    def _loss_is_on_host(self) -> bool:
        return self.places.get(LOSS_PLACE) == "cpu"

    def loss_to(self, device: torch.device) -> None:
        """Take what a loss module holds (weights of classes, say) to the device that computes the loss."""
        if isinstance(self.loss, nn.Module) and not self._loss_is_on_host:
            self.loss.to(device)

    @property
    def collate_fn(self) -> Callable[[list], Any]:
        """How samples become a batch: the recipe's own way or torch's."""
        return self.collate or torch.utils.data.default_collate

    def batch_of(self, samples: int) -> Any:
        """A batch of the dataset's first `samples` samples, repeated where it holds fewer."""
        size = len(self.dataset)
        return self.collate_fn([self.dataset[i % size] for i in range(samples)])

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of mixed precision, None for plain float32."""
        return self.autocast_of(None)

    def autocast_of(self, precision: str | None) -> torch.dtype | None:
        """The autocast dtype of a stage whose plan says `precision`; None there means the recipe's own."""
        name = precision or self.precision
        return None if name in ("float32", "float64") else getattr(torch, name)


def in_dtype(recipe: Recipe, dtype: torch.dtype) -> Recipe:
    """The same recipe with the model, a loss module and all floating tensors of its batches in `dtype`."""
    recipe.model.to(dtype)
    if isinstance(recipe.loss, nn.Module):
        recipe.loss.to(dtype)
    base = recipe.collate_fn
    return replace(recipe, collate=lambda samples: _cast(base(samples), dtype))


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(dtype) if batch.is_floating_point() else batch
    if isinstance(batch, Mapping):
        return {k: _cast(v, dtype) for k, v in batch.items()}
    if isinstance(batch, list | tuple):
        return tuple(_cast(v, dtype) for v in batch)
    return batch


def without_dropout(recipe: Recipe) -> Recipe:
    """The recipe with dropout off wherever it draws from a generator, for comparisons only."""
    for module in recipe.model.modules():
        if not isinstance(module, KeyedDropout):
            for name in dropout_names(module):
                setattr(module, name, 0.0)
    return recipe


def dropout_names(module: nn.Module) -> list[str]:
    """Attributes of `module` that are dropout probabilities: `p` of a Dropout, `dropout` of anything."""
    names = ["p", "dropout"] if "Dropout" in type(module).__name__ else ["dropout"]
    return [name for name in names if isinstance(getattr(module, name, None), float)]


def with_keys(recipe: Recipe, seed: int) -> Recipe:
    """The recipe with its model's dropout by keys, where it is to be free of the split."""
    if recipe.dropout == "split-free":
        replace_dropout(recipe.model, seed)
    return recipe


def check_recipe(given: Any) -> None:
    """UsageError where what was given as a recipe is none."""
    if not isinstance(given, Recipe):
        raise UsageError(
            f"a {type(given).__name__} was given for a recipe",
            remedy="ev.Recipe(model=…, dataset=…, loss=…, optimizer=…, global_batch=…)",
        )


def load_recipe(script: str | Path, seed: int) -> Recipe:
    """The recipe that `script` defines: its function `recipe()` is called after seeding torch with `seed`.

    Raises FileError, UsageError or ModelError that name the script and what it lacks.
    """
    path = Path(script).resolve()
    if not path.is_file():
        raise FileError(f"no script {script}", remedy="the path of a Python file with a function recipe()")
    name = "evener_recipe_" + path.stem
    # With a loader of its own, as a script need not end in .py.
    spec = importlib.util.spec_from_file_location(name, path, loader=SourceFileLoader(name, str(path)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # so that loader workers can find its classes
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
        if not callable(getattr(module, "recipe", None)):
            raise UsageError(
                f"{path} has no function recipe()",
                remedy="def recipe(): return ev.Recipe(model=…, dataset=…, loss=…, …)",
            )
        torch.manual_seed(seed)
        made = module.recipe()
    except EvenerError:
        raise
    except SyntaxError as e:
        raise ModelError(
            f"{e.filename or path}:{e.lineno} is no Python: SyntaxError: {e.msg}",
            remedy="the path of a Python file with a function recipe()",
        ) from e
    except Exception as e:
        line = _line_in(path, e)
        remedy = _TOO_LARGE if is_out_of_memory(e) else "run the script alone"
        raise ModelError(f"{path}{line} raised {said(e)}", remedy=remedy) from e
    if not isinstance(made, Recipe):
        raise UsageError(f"recipe() of {path} returned a {type(made).__name__}", remedy="return ev.Recipe(…)")
    return made


def _line_in(path: Path, error: BaseException) -> str:
    """`:12` for the last line of `path` that the error passed through."""
    line, trace = "", error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = f":{trace.tb_lineno}"
        trace = trace.tb_next
    return line
