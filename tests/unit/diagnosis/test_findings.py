"""Single findings at their borders, and what hosts can talk over."""

import pytest

from evener.core.host import (
    UNLIMITED,
    Card,
    Cpu,
    Failure,
    HostFacts,
    Interface,
    NvidiaDriver,
    Setting,
    TorchBuild,
)
from evener.diagnosis.across import across, together
from evener.diagnosis.finding import worst
from evener.diagnosis.findings import findings

CPU_BUILD = TorchBuild(version="2.13.0+cpu")
CU126 = TorchBuild(version="2.13.0+cu126", cuda="12.6", archs=("sm_80", "sm_86"), nccl="2.29.7")
CU130 = TorchBuild(version="2.13.0+cu130", cuda="13.0", archs=("sm_80", "sm_86"), nccl="2.30.1")
ROCM = TorchBuild(version="2.13.0+rocm7.2", hip="7.2", archs=("gfx1100",), nccl="2.27.7")
DRIVER = NvidiaDriver(library="580.95.05", kernel="580.95.05")


def card(index: int | None = 0, **more) -> Card:
    return Card(kind="NVIDIA A10", vendor="nvidia", arch="sm_86", torch_index=index, **more)


def host(name: str = "lab1", **more) -> HostFacts:
    return HostFacts(host=name, **({"torch": CPU_BUILD} | more))


def gpu_host(name: str = "lab1", torch: TorchBuild = CU126, **more) -> HostFacts:
    return host(name, **({"torch": torch, "nvidia": DRIVER, "cards": (card(),)} | more))


def codes(facts: HostFacts, *, peers: bool = False) -> dict[str, str]:
    return {f.code: f.grade for f in findings(facts, peers=peers) if f.code not in ("DR100", "DR902")}


def setting(**values) -> tuple[Setting, ...]:
    return tuple(Setting(name=n, value=v) for n, v in values.items())


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (host(open_files=1023), {"DR202": "slow"}),
        (host(open_files=1024), {}),
        (host(open_files=UNLIMITED, locked_bytes=0), {}),
        (host(infiniband=("mlx5_0:1",), locked_bytes=2**30 - 1), {"DR203": "fails"}),
        (host(infiniband=("mlx5_0:1",), locked_bytes=UNLIMITED), {}),
        (host(shm_bytes=2**30), {}),
        (host(shm_bytes=2**30 - 1), {"DR201": "slow"}),
        (gpu_host(shm_bytes=2**26), {"DR201": "slow"}),
        (gpu_host(shm_bytes=2**26, cards=(card(0), card(1))), {"DR201": "fails"}),
        (gpu_host(shm_bytes=2**27, cards=(card(0), card(1))), {"DR201": "slow"}),
        (host(failures=(Failure(asked="x", how="y"),)), {"DR901": "works"}),
        (host(settings=setting(OMP_NUM_THREADS="1"), cpu=Cpu(cores=4)), {}),
        (host(settings=setting(OMP_NUM_THREADS="1"), cpu=Cpu(cores=5)), {"DR206": "slow"}),
        (
            host(settings=(Setting(name="OMP_NUM_THREADS", value="1", origin="default"),), cpu=Cpu(cores=8)),
            {},
        ),
        (host(settings=setting(CUDA_LAUNCH_BLOCKING="0")), {}),
        (host(settings=setting(AMD_SERIALIZE_KERNEL="3")), {"DR207": "slow"}),
        (host(settings=setting(NCCL_IB_DISABLE="1")), {}),
        (host(settings=setting(NCCL_IB_DISABLE="1"), infiniband=("mlx5_0:1",)), {"DR207": "slow"}),
        (gpu_host(settings=setting(NCCL_P2P_DISABLE="1")), {"DR207": "slow"}),
        (gpu_host(settings=setting(NCCL_P2P_DISABLE="1"), acs=True, cards=(card(0), card(1))), {}),
        (gpu_host(acs=True), {}),
        (gpu_host(cards=(card(memory_bytes=100, free_memory_bytes=80),)), {}),
        (gpu_host(cards=(card(memory_bytes=100, free_memory_bytes=79),)), {"DR209": "slow"}),
        (gpu_host(cards=(card(power_limit_w=95.0, default_power_limit_w=100.0),)), {}),
        (gpu_host(cards=(card(power_limit_w=94.0, default_power_limit_w=100.0),)), {"DR402": "slow"}),
        (gpu_host(cards=(card(throttle=("brake",)),)), {"DR402": "slow"}),
        (gpu_host(cards=(card(throttle=("power",)),)), {}),
        (gpu_host(cards=(card(pcie_width=8, max_pcie_width=16),)), {"DR403": "slow"}),
        (gpu_host(cards=(card(pcie_width=16, max_pcie_width=16),)), {}),
        (gpu_host(cards=(card(compute_mode="exclusive", dtypes={"float32": 1e12}),)), {}),
        (gpu_host(cards=(card(compute_mode="prohibited"),)), {"DR115": "fails"}),
        (gpu_host(cards=(card(None),)), {"DR122": "fails"}),
    ],
    ids=str,
)
def test_a_finding_begins_where_it_says(facts, expected) -> None:
    assert codes(facts) == expected


def test_what_was_measured_goes_before_the_lists() -> None:
    works = card(dtypes={"float32": 1e12, "bfloat16": 1e12, "float16": 2e12})
    old_list = TorchBuild(version="2.13.0+cu126", cuda="12.6", archs=("sm_50",))
    assert codes(gpu_host(torch=old_list, cards=(works,))) == {}
    assert codes(gpu_host(torch=old_list)) == {"DR101": "fails"}
    fails = card(dtype_errors={"float32": "RuntimeError: CUDA error: no kernel image is available"})
    assert codes(gpu_host(cards=(fails,))) == {"DR101": "fails"}
    odd = card(dtype_errors={"float32": "RuntimeError: CUDA error: unspecified launch failure"})
    assert codes(gpu_host(cards=(odd,))) == {"DR122": "fails"}


def test_a_type_that_is_missing_is_told() -> None:
    facts = gpu_host(
        cards=(card(dtypes={"float32": 1e12, "float16": 2e12}, dtype_errors={"bfloat16": "no such"}),)
    )
    (finding,) = [f for f in findings(facts) if f.code == "DR404"]
    assert finding.mend == 'ev.Recipe(..., precision="float16")' and finding.evidence == "no such"


def test_a_network_matters_where_there_are_peers() -> None:
    nets = (
        Interface(name="br-1", addresses=("172.18.0.1",), virtual=True),
        Interface(name="eno1", addresses=("10.0.0.5",)),
    )
    facts = host(interfaces=nets, resolves_to=("127.0.1.1",))
    assert codes(facts) == {"DR301": "works", "DR302": "works"}
    assert codes(facts, peers=True) == {"DR301": "fails", "DR302": "fails"}
    named = host(interfaces=nets, settings=setting(GLOO_SOCKET_IFNAME="eno1"))
    assert codes(named, peers=True) == {}
    assert codes(host(interfaces=nets[::-1]), peers=True) == {}


@pytest.mark.parametrize(
    ("name", "value", "wrong"),
    [
        ("NCCL_SOCKET_IFNAME", "en", False),  # a prefix
        ("NCCL_SOCKET_IFNAME", "=eno1", False),  # exactly
        ("NCCL_SOCKET_IFNAME", "^docker", False),
        ("NCCL_SOCKET_IFNAME", "eth", True),
        ("GLOO_SOCKET_IFNAME", "en", True),  # Gloo takes whole names
        ("GLOO_SOCKET_IFNAME", "eno1", False),
        ("GLOO_SOCKET_IFNAME", "eno2", True),  # down
    ],
)
def test_a_named_interface_has_to_be_up(name, value, wrong) -> None:
    nets = (Interface(name="eno1", addresses=("10.0.0.5",)), Interface(name="eno2", up=False))
    assert codes(host(interfaces=nets, settings=setting(**{name: value}))) == (
        {"DR303": "fails"} if wrong else {}
    )


@pytest.mark.parametrize(
    ("a", "b", "transport"),
    [
        (gpu_host("a"), gpu_host("b"), "nccl"),
        (gpu_host("a"), gpu_host("b", CU130), "gloo"),
        (gpu_host("a"), host("b"), "gloo"),
        (gpu_host("a"), gpu_host("b", torch=ROCM), "gloo"),
        (gpu_host("a", torch=ROCM), gpu_host("b", torch=ROCM), "rccl"),
        (gpu_host("a"), host("b", torch=TorchBuild(version="2.14.0")), "none"),
        (gpu_host("a"), host("b", torch=TorchBuild(error="no")), "none"),
        (gpu_host("a"), host("b", torch=None), "none"),
        (gpu_host("a", cards=(card(None),)), gpu_host("b"), "gloo"),
    ],
)
def test_what_two_hosts_can_talk_over(a, b, transport) -> None:
    found = together(a, b)
    assert found.transport == transport and found.why


def test_one_host_has_nothing_across() -> None:
    assert across([gpu_host()]) == ()


def test_the_worst_grade_counts() -> None:
    assert worst(findings(host(open_files=9))) == "slow"
    assert worst(findings(host(python="3.8"))) == "fails"
    assert worst(()) == "works"
