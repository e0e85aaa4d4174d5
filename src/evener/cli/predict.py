"""`evener predict`: a model's outputs for a dataset, in its order, through any plan."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from evener.cli.options import MAX_SEED, AsJson, Devices, Rehearse, SamplesAtOnce
from evener.core.words import counted


def predict(
    script: Annotated[Path, typer.Argument(help="Python file with a function recipe() → ev.Recipe.")],
    out: Annotated[Path, typer.Option(help="File to write: NAME.safetensors or NAME.npz.")],
    weights: Annotated[
        Path | None,
        typer.Option(
            exists=True, help="A safetensors file or the folder of a run (default: recipe()'s own)."
        ),
    ] = None,
    data: Annotated[
        Literal["heldout", "dataset"], typer.Option(help="Which of the recipe's samples.")
    ] = "heldout",
    score: Annotated[bool, typer.Option("--score", help="Also the recipe's loss and metrics.")] = False,
    plan: Annotated[Path | None, typer.Option(help="A plan file, such as a run's plan.json.")] = None,
    profile: Annotated[Path | None, typer.Option(help="A profile file; without it it is measured.")] = None,
    fleet: Annotated[Path | None, typer.Option(help="A fleet file of this host's devices.")] = None,
    rehearse: Rehearse = None,
    devices: Devices = None,
    micro_batch: SamplesAtOnce = None,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Seed of recipe().")] = 0,
    as_json: AsJson = False,
) -> None:
    """Write the outputs of a recipe's model for its held-out samples, or for all of its dataset.

    The model is in evaluation mode. Outputs come in the order of the samples whatever the plan: pipelines,
    uneven shares, hybrids. Without a plan, one device computes all, and several get the plan of training.
    """
    import tempfile

    from evener.session.launching.server import start_early

    start_early(script)
    from evener.session.ask import request_for
    from evener.session.request import Prediction, check_out

    check_out(out)
    with tempfile.TemporaryDirectory(prefix="evener-predict-") as folder:
        request = request_for(
            script,
            fleet=fleet,
            rehearse=rehearse,
            devices=devices,
            batch=None,
            batch_per_device=None,
            plan=plan,
            profile=profile,
            run_dir=Path(folder),
            seed=seed,
            micro_batch=micro_batch,
            weights=str(weights.resolve()) if weights else None,
            elastic=False,
            quiet=as_json,
            predict=Prediction(data=data, out=str(out.resolve()), score=score),
        )
        from evener.session.predict import run_prediction

        found = run_prediction(request)
    if found is None:
        return
    for name, (shape, dtype) in found.outputs.items():
        print(f"{name}: {' × '.join(map(str, shape))} {dtype}")
    if found.loss is not None:
        told = {"loss": found.loss} | found.metrics
        print(", ".join(f"{name} {value:.4f}" for name, value in told.items()))
    for note in found.notes:
        print(note)
    print(f"{counted(found.samples, 'sample')} in {found.out}")
    if as_json:
        import json

        import msgspec

        print(json.dumps(msgspec.to_builtins(found)), flush=True)
