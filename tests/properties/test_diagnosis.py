"""Whatever a description says, it is judged: findings never raise, and have grades, words and codes."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evener.core.files import decode, encode
from evener.core.host import (
    AmdDriver,
    Card,
    Cpu,
    HostFacts,
    Interface,
    NvidiaDriver,
    Route,
    Setting,
    TorchBuild,
)
from evener.diagnosis.across import across, pairs
from evener.diagnosis.environments import Need, environments
from evener.diagnosis.finding import CODES, GRADES
from evener.diagnosis.findings import findings
from evener.diagnosis.recipes import files

ARCHS = ("sm_61", "sm_86", "sm_120", "sm_37", "sm_" + "9" * 5000, "gfx1031", "gfx90a", "gfx1010", "gfx")
VERSIONS = ("2.13.0+cu126", "2.8.0+cu128", "12.6", "13.0", "580.95.05", "595.1", "470", "7" * 6000)
ERRORS = ("Unknown Error", "Driver/library version mismatch", "GPU is lost", "Error 802", "Error 803", "nccl")
NAMES = ("docker", "kubernetes", "eth0", "docker0", "lo", "^lo", "nouveau", "GPU-1", "MIG-1")
VALUES = ("", "0,1", "1", "-1", "127.0.1.1", "10.0.0.2", "10.3.0")
WORDS = st.sampled_from([*ARCHS, *VERSIONS, *ERRORS, *NAMES, *VALUES])
NUMBERS = st.sampled_from([None, 0, 1, 8, 64 * 2**20, 2**34, 2**63 - 1, -5])
RATES = st.dictionaries(st.sampled_from(["float32", "bfloat16", "float16"]), st.sampled_from([1e9, 1e12]))


def some(structure, /, **fixed):
    """Any value of a structure, its texts from WORDS, its numbers from NUMBERS."""
    given = {}
    for name, annotation in structure.__annotations__.items():
        text = str(annotation)
        if name in fixed:
            given[name] = fixed[name]
        elif "dict[str, float]" in text:
            given[name] = RATES
        elif "tuple[str, ...]" in text:
            given[name] = st.lists(WORDS, max_size=3).map(tuple)
        elif annotation is str or text == "str | None":
            given[name] = WORDS
        elif "bool" in text:
            given[name] = st.sampled_from([None, True, False]) if "None" in text else st.booleans()
        elif text in ("int | None", "float | None"):
            given[name] = NUMBERS.map(lambda n, f="float" in text: float(n) if f and n is not None else n)
    return st.builds(structure, **given)


CARDS = some(
    Card,
    kind=WORDS.map(lambda w: w or "card"),
    vendor=st.sampled_from(["nvidia", "amd", "intel", "apple"]),
    compute_mode=st.sampled_from([None, "default", "exclusive", "prohibited"]),
    throttle=st.lists(st.sampled_from(["heat", "power", "brake"]), max_size=2).map(tuple),
)
HOSTS = some(
    HostFacts,
    host=WORDS.map(lambda w: w or "a"),
    torch=st.none() | some(TorchBuild),
    nvidia=st.none() | some(NvidiaDriver, fabric=st.sampled_from([None, "running", "stopped"])),
    amd=st.none() | some(AmdDriver, kfd=st.sampled_from([None, "ok", "denied", "absent"])),
    cards=st.lists(CARDS, max_size=4).map(tuple),
    cpu=some(Cpu, nodes=st.just((0, 1)), allowed_nodes=st.sampled_from([(), (0,), (0, 1)])),
    interfaces=st.lists(some(Interface), max_size=3).map(tuple),
    routes=st.lists(some(Route), max_size=2).map(tuple),
    settings=st.lists(
        some(
            Setting,
            name=st.sampled_from(
                ["CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "HSA_OVERRIDE_GFX_VERSION", "OMP_NUM_THREADS"]
            ),
        ),
        max_size=3,
    ).map(tuple),
    version=st.just(1),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(hosts=st.lists(HOSTS, min_size=1, max_size=3), peers=st.booleans())
def test_every_description_is_judged(hosts: list[HostFacts], peers: bool) -> None:
    for facts in hosts:
        assert decode(encode(facts), HostFacts, "facts") == facts
    found = [*across(hosts), *(f for h in hosts for f in findings(h, peers=peers))]
    for finding in found:
        assert finding.code in CODES and finding.grade in GRADES and finding.what
    codes = {f.code for h in hosts for f in findings(h) if f.code.startswith(("DR1", "DR9"))}
    assert codes  # something is said of each host's devices
    assert len(pairs(hosts)) == len(hosts) * (len(hosts) - 1) // 2


NEEDS = some(
    Need, name=st.text("ab/0", min_size=1, max_size=3), arch=st.sampled_from([*ARCHS, "cpu", "xpu", "mps"])
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(needs=st.lists(NEEDS, max_size=6))
def test_every_device_gets_an_environment_and_its_files(needs: list[Need]) -> None:
    made = environments(needs)
    served = [n for e in made for n in e.needs]
    assert sorted(map(str, served)) == sorted(map(str, needs))
    for found in made:
        assert all(found.requirement in text for text in files(found).values())
