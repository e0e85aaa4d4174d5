"""What was found on one host: the cards it has, drivers, builds, limits, network and settings in force.

A host description is a file like a fleet: `evener doctor FILE` judges one from elsewhere. All is
optional: what could not be found out is absent, and `failures` says what was asked and how it failed.
"""

from typing import Literal

from evener.core.figures import Value

UNLIMITED = 2**63 - 1
"""How a limit of the operating system that is not set is written."""
BUSY_LOAD = 0.25
"""A load average above this part of the CPUs is reported: it slows what is measured."""

Vendor = Literal["nvidia", "amd", "intel", "apple"]


class Card(Value, frozen=True, kw_only=True):
    """One accelerator: a card, a die of a card with several, or a slice (MIG) of one; usable or not.

    `smi_index` counts as the vendor's tool does, `torch_index` as torch does; without the latter torch does
    not see the card. `arch` reads "sm_61" or "gfx1030". `parent` is the hardware id of the card that a slice
    or die is part of. `dtypes` holds measured rates of matrix products in FLOP/s, `dtype_errors` what torch
    said where there is no rate. `throttle` lists what slows the clock now: "power", "heat", "brake".
    """

    kind: str
    vendor: Vendor
    hardware_id: str = ""
    bus_id: str = ""
    smi_index: int | None = None
    torch_index: int | None = None
    arch: str = ""
    memory_bytes: int | None = None
    free_memory_bytes: int | None = None
    parent: str = ""
    mig: bool | None = None
    integrated: bool | None = None
    compute_mode: Literal["default", "exclusive", "prohibited"] | None = None
    clock_mhz: float | None = None
    max_clock_mhz: float | None = None
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None
    temperature_c: float | None = None
    throttle: tuple[str, ...] = ()
    pcie_width: int | None = None
    max_pcie_width: int | None = None
    numa_node: int | None = None
    dtypes: dict[str, float] = {}
    dtype_errors: dict[str, str] = {}
    error: str = ""


class TorchBuild(Value, frozen=True, kw_only=True):
    """The installed torch: `cuda` and `hip` are what it was built for, `archs` what it has kernels for.

    `error` is how its import ended, `device_error` what it said when asked for accelerators; `threads` are
    those of a fresh process.
    """

    version: str = ""
    cuda: str | None = None
    hip: str | None = None
    archs: tuple[str, ...] = ()
    nccl: str | None = None
    threads: int | None = None
    error: str = ""
    device_error: str = ""


class NvidiaDriver(Value, frozen=True, kw_only=True):
    """NVIDIA's driver: `library` is its user half, `kernel` the loaded module, `open_kernel` its flavour.

    `cuda` is the newest CUDA the driver says it serves. `fabric` is the state of the fabric manager where
    the host has NVSwitches. `compat_library` is a libcuda that lies before the driver's own.
    """

    library: str = ""
    kernel: str = ""
    open_kernel: bool | None = None
    cuda: str = ""
    fabric: Literal["running", "stopped"] | None = None
    compat_library: str = ""
    error: str = ""

    @property
    def version(self) -> str:
        """Of the user half, else of the loaded module; "" where neither is known."""
        return self.library or self.kernel


class AmdDriver(Value, frozen=True, kw_only=True):
    """AMD's driver: version of the kernel module, version of ROCm, and whether /dev/kfd may be opened."""

    kernel: str = ""
    rocm: str = ""
    kfd: Literal["ok", "denied", "absent"] | None = None
    error: str = ""


class Interface(Value, frozen=True, kw_only=True):
    """A network interface. `virtual` ones (bridges, tunnels, container ends) have no hardware behind them."""

    name: str
    up: bool = True
    addresses: tuple[str, ...] = ()
    bits_per_s: float | None = None
    virtual: bool | None = None


class Route(Value, frozen=True, kw_only=True):
    """How the host reaches a peer: from which address, over which interface; neither where it cannot."""

    peer: str
    interface: str = ""
    address: str = ""
    error: str = ""


class Setting(Value, frozen=True, kw_only=True):
    """A setting in force and where it comes from: argument, command line, file, environment or default."""

    name: str
    value: str
    origin: str = "environment"


class Failure(Value, frozen=True, kw_only=True):
    """Something that was asked and could not be answered."""

    asked: str
    how: str


class Cpu(Value, frozen=True, kw_only=True):
    """The host's processors: `cores` are physical, `threads` those this process may run on.

    `nodes` are NUMA nodes, `allowed_nodes` those that this process may run on. `dtypes` as for a card.
    """

    model: str = ""
    cores: int | None = None
    threads: int | None = None
    memory_bytes: int | None = None
    nodes: tuple[int, ...] = ()
    allowed_nodes: tuple[int, ...] = ()
    dtypes: dict[str, float] = {}
    dtype_errors: dict[str, str] = {}


class HostFacts(Value, frozen=True, kw_only=True):
    """What was found on one host.

    `cards` also holds what no driver answers for, by its address on the bus. `modules` are kernel modules of
    interest that are loaded. `resolves_to` is where the host's own name leads. `acs` says whether bridges
    redirect traffic between cards through the root. `infiniband` lists its ports. `shm_bytes` is /dev/shm,
    `open_files` and `locked_bytes` are limits of a process, `UNLIMITED` where there are none.
    `load` is the load average before anything was timed: rates are too low where it is not small.
    """

    host: str
    system: str = "linux"
    machine: str = "x86_64"
    kernel: str = ""
    python: str = ""
    evener: str = ""
    wsl: bool | None = None
    container: str = ""
    torch: TorchBuild | None = None
    nvidia: NvidiaDriver | None = None
    amd: AmdDriver | None = None
    cards: tuple[Card, ...] = ()
    modules: tuple[str, ...] = ()
    cpu: Cpu = Cpu()
    shm_bytes: int | None = None
    open_files: int | None = None
    locked_bytes: int | None = None
    interfaces: tuple[Interface, ...] = ()
    resolves_to: tuple[str, ...] = ()
    routes: tuple[Route, ...] = ()
    infiniband: tuple[str, ...] = ()
    acs: bool | None = None
    settings: tuple[Setting, ...] = ()
    failures: tuple[Failure, ...] = ()
    note: str = ""
    version: int = 1
    load: float | None = None

    def setting(self, name: str) -> str | None:
        """The value of the setting called `name`; None where nobody has set it."""
        return next((s.value for s in self.settings if s.name == name and s.origin != "default"), None)
