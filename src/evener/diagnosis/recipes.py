"""An environment as files: Dockerfile, conda environment and pip lines, which say the same three times."""

from evener.diagnosis.builds import INDEX
from evener.diagnosis.environments import PYTHON, Environment

SOURCE = "EVENER_SOURCE"
PLATFORMS = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}
RUN_OPTIONS = {
    "cu": "--gpus all",
    "rocm": "--device /dev/kfd --device /dev/dri --group-add render --group-add video",
    "xpu": "--device /dev/dri --group-add render",
}


def files(found: Environment) -> dict[str, str]:
    """The files of an environment by name. There is no Dockerfile for macOS, where containers see no GPU.

    All take torch from the index in the environment variable TORCH_INDEX, whose folders are named after
    builds (cu126, rocm7.2, cpu). evener itself comes from its checkout: the folder that is given to docker
    build, or that EVENER_SOURCE names, since conda takes relative paths from where its file lies.
    """
    made = {"environment.yml": conda(found), "requirements.txt": requirements(found)}
    if found.machine in PLATFORMS:
        made["Dockerfile"] = dockerfile(found)
    return made


def dockerfile(found: Environment) -> str:
    """A Dockerfile; its head says how to build and run it."""
    options = next((o for start, o in RUN_OPTIONS.items() if found.variant.startswith(start)), "")
    run = " ".join(
        f"docker run {options} --ipc=host --network=host --ulimit memlock=-1 {_tag(found)}".split()
    )
    lines = [
        *_head(found),
        f"# in evener's checkout: docker build --build-arg {INDEX}=${INDEX} -t {_tag(found)} -f THIS_FILE .",
        f"# then: {run} {_tag(found)} evener doctor",
        f"FROM --platform={PLATFORMS[found.machine]} python:{PYTHON}-slim",
        f"ARG {INDEX}",
        "ENV PIP_NO_CACHE_DIR=1",
        *(f"ENV {name}={value}" for name, value in found.settings.items()),
        f'RUN pip install "{found.requirement}"{_index(found, "--index-url")}',
        "COPY . /opt/evener",
        f'RUN pip install "{_evener(found, "/opt/evener")}"',
        "WORKDIR /work",
        'CMD ["evener", "doctor"]',
    ]
    return "\n".join(lines) + "\n"


def conda(found: Environment) -> str:
    """A conda environment file; settings become the environment's variables."""
    lines = [
        *_head(found),
        f"# in evener's checkout, with {INDEX} set: {SOURCE}=$PWD conda env create -f THIS_FILE",
        f"name: {_tag(found)}",
        "channels:",
        "  - conda-forge",
        "dependencies:",
        f"  - python={PYTHON}",
        "  - pip",
        "  - pip:",
        *(f'      - "{line}"' for line in _pip(found)),
    ]
    if found.settings:
        lines += ["variables:", *(f'  {name}: "{value}"' for name, value in found.settings.items())]
    return "\n".join(lines) + "\n"


def requirements(found: Environment) -> str:
    """Lines for pip."""
    told = [f"# set {name}={value}" for name, value in found.settings.items()]
    how = f"# in evener's checkout, with {INDEX} set: {SOURCE}=$PWD pip install -r THIS_FILE"
    return "\n".join([*_head(found), how, *told, *_pip(found)]) + "\n"


def _pip(found: Environment) -> list[str]:
    index = [f"--extra-index-url ${{{INDEX}}}/{found.variant}"] if found.variant else []
    return [*index, found.requirement, f"-e {_evener(found, f'${{{SOURCE}}}')}"]


def _index(found: Environment, option: str) -> str:
    return f' {option} "${INDEX}/{found.variant}"' if found.variant else ""


def _evener(found: Environment, place: str) -> str:
    return f"{place}[nvidia]" if found.variant.startswith("cu") else place


def _tag(found: Environment) -> str:
    return f"evener-{found.name}".replace(".", "")


def _head(found: Environment) -> list[str]:
    devices = ", ".join(n.name if n.name == n.arch else f"{n.name} ({n.arch})" for n in found.needs)
    lines = [f"# {found.requirement} for {devices}"]
    lines += [f"# driver {found.driver} or newer on the host"] if found.driver else []
    return lines + [f"# {note}" for note in found.notes]
