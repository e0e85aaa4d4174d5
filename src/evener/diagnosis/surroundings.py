"""What surrounds the devices: shared memory, limits, settings, order of indices, memory that others hold."""

from collections.abc import Iterator

from evener.core.host import UNLIMITED, Card, HostFacts
from evener.core.words import counted
from evener.diagnosis.finding import Finding, label, which

NEEDED_SHM_BYTES = 128 * 2**20
"""Below this several cards of one host cannot even set NCCL's channels up (about 10 MB each, see DR201)."""
GOOD_SHM_BYTES = 2**30
LEAST_OPEN_FILES = 1024
LEAST_LOCKED_BYTES = 2**30
MANY_CORES = 4
USED_BY_OTHERS = 0.2
DEBUGGING = {
    "CUDA_LAUNCH_BLOCKING": "each kernel is waited for",
    "HIP_LAUNCH_BLOCKING": "each kernel is waited for",
    "AMD_SERIALIZE_KERNEL": "each kernel is waited for",
    "NCCL_P2P_DISABLE": "cards pass data through the host's memory",
    "NCCL_SHM_DISABLE": "processes of one host pass data over the network",
    "NCCL_IB_DISABLE": "hosts pass data over TCP although there is InfiniBand",
}


def surroundings(facts: HostFacts) -> Iterator[Finding]:
    """Findings on the host itself."""
    yield from _shared_memory(facts)
    yield from _limits(facts)
    yield from _wsl(facts)
    yield from _settings(facts)
    yield from _order(facts)
    yield from _used_by_others(facts)
    for failure in facts.failures:
        yield Finding(
            code="DR901",
            grade="works",
            where=facts.host,
            what=f"could not be found out: {failure.asked}",
            evidence=failure.how,
        )


def _shared_memory(facts: HostFacts) -> Iterator[Finding]:
    size = facts.shm_bytes
    if size is None or size >= GOOD_SHM_BYTES:
        return
    several = len([c for c in facts.cards if c.torch_index is not None]) > 1
    fatal = several and size < NEEDED_SHM_BYTES
    lines = {
        "docker": "docker run --shm-size=8g ...",
        "podman": "podman run --shm-size=8g ...",
        "kubernetes": "volumes: [{name: shm, emptyDir: {medium: Memory}}], mounted at /dev/shm",
    }
    yield Finding(
        code="DR201",
        grade="fails" if fatal else "slow",
        where=facts.host,
        what="shared memory is too small for NCCL between cards of one host"
        if fatal
        else "shared memory is small: batches of loader workers and tensors between processes go through it",
        evidence=f"/dev/shm has {size / 2**20:.0f} MiB",
        mend=lines.get(facts.container, "sudo mount -o remount,size=8g /dev/shm"),
        rule="https://github.com/NVIDIA/nccl/issues/342 (2020-06-20)",
    )


def _limits(facts: HostFacts) -> Iterator[Finding]:
    files = facts.open_files
    if files is not None and files < LEAST_OPEN_FILES:
        yield Finding(
            code="DR202",
            grade="slow",
            where=facts.host,
            what="a process may open few files: loader workers that share tensors need one each",
            evidence=f"{files} open files",
            mend="ulimit -n 65536",
        )
    locked = facts.locked_bytes
    if facts.infiniband and locked is not None and locked != UNLIMITED and locked < LEAST_LOCKED_BYTES:
        container = facts.container == "docker"
        yield Finding(
            code="DR203",
            grade="fails",
            where=facts.host,
            what="InfiniBand has to lock memory, and a process may lock little",
            evidence=f"{locked / 2**20:.2g} MiB; ports {', '.join(facts.infiniband)}",
            mend="docker run --ulimit memlock=-1 ..." if container else "ulimit -l unlimited",
            rule="https://github.com/NVIDIA/nccl-tests/issues/206 (2024-04-18)",
        )


def _wsl(facts: HostFacts) -> Iterator[Finding]:
    cards = [c for c in facts.cards if c.vendor == "nvidia" and c.torch_index is not None]
    if facts.wsl and len(cards) > 1 and facts.setting("NCCL_P2P_DISABLE") != "1":
        yield Finding(
            code="DR204",
            grade="slow",
            where=facts.host,
            what="under WSL cards do not reach each other directly, and NCCL may fail when it tries",
            evidence=f"{counted(len(cards), 'card')}, {facts.kernel or 'kernel unknown'}",
            mend="export NCCL_P2P_DISABLE=1",
            rule="https://github.com/vllm-project/vllm/issues/4411 (2024-04-27)",
        )


def _settings(facts: HostFacts) -> Iterator[Finding]:
    threads, cores = facts.setting("OMP_NUM_THREADS"), facts.cpu.cores
    if threads == "1" and cores is not None and cores > MANY_CORES:
        yield Finding(
            code="DR206",
            grade="slow",
            where=facts.host,
            what="work of the CPU runs on one thread: updates and tables there are slow",
            evidence=f"OMP_NUM_THREADS=1, {cores} cores",
            mend=f"export OMP_NUM_THREADS={cores}",
            rule="https://github.com/PrimeIntellect-ai/prime-rl/pull/3248 (2026-08-12)",
        )
    for name, meaning in DEBUGGING.items():
        value = facts.setting(name)
        needless = name == "NCCL_P2P_DISABLE" and bool(facts.wsl or facts.acs)
        needless |= name == "NCCL_IB_DISABLE" and not facts.infiniband
        if value in (None, "", "0") or needless:
            continue
        yield Finding(
            code="DR207",
            grade="slow",
            where=facts.host,
            what=f"{name} is set: {meaning}",
            evidence=f"{name}={value}",
            mend=f"unset {name}",
        )


def _order(facts: HostFacts) -> Iterator[Finding]:
    """CUDA counts the fastest card first, nvidia-smi by address."""
    pairs = [(c.smi_index, c.torch_index, c) for c in facts.cards if not c.parent]
    both = [(s, t, c) for s, t, c in pairs if s is not None and t is not None and c.vendor == "nvidia"]
    by_tool = [c.kind for _, _, c in sorted(both, key=lambda p: p[0])]
    by_torch = [c.kind for _, _, c in sorted(both, key=lambda p: p[1])]
    if by_tool == by_torch:
        return
    chosen = facts.setting("CUDA_VISIBLE_DEVICES")
    numbered = bool(chosen) and all(w.strip().isdigit() for w in (chosen or "").split(","))
    yield Finding(
        code="DR208",
        grade="slow" if numbered else "works",
        where=facts.host,
        what="torch counts the cards in another order than nvidia-smi"
        + (", and CUDA_VISIBLE_DEVICES chooses by number: it may be the wrong card" if numbered else ""),
        evidence=f"nvidia-smi: {', '.join(by_tool)}; torch: {', '.join(by_torch)}",
        mend="export CUDA_DEVICE_ORDER=PCI_BUS_ID",
        rule="https://github.com/microsoft/onnxruntime/issues/17546 (2023-09-21)",
    )


def _used_by_others(facts: HostFacts) -> Iterator[Finding]:
    for card in facts.cards:
        total, free = card.memory_bytes, card.free_memory_bytes
        if not total or free is None or card.torch_index is None or card.integrated:
            continue
        if free < (1 - USED_BY_OTHERS) * total:
            yield Finding(
                code="DR209",
                grade="slow",
                where=label(facts, card),
                what="others hold memory of the card: what fits there alone may run out of memory",
                evidence=f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB are free",
                mend=_who(card),
            )


def _who(card: Card) -> str:
    if card.vendor == "amd":
        return "rocm-smi --showpids"
    return f"nvidia-smi -i {which(card)} --query-compute-apps=pid,used_memory --format=csv"
