import resource

import pytest

from evener.core.host import UNLIMITED
from evener.probing import surroundings
from evener.probing.network import interfaces, is_virtual, route
from evener.probing.settings import in_force, nccl_settings, of_interest


def files(**texts: str):
    return lambda path: next((t for p, t in texts.items() if path.endswith(p.replace("__", "/"))), "")


@pytest.mark.parametrize(
    ("text", "found"), [("0-2,8\n", {0, 1, 2, 8}), ("3", {3}), ("", set()), ("x-y", set())]
)
def test_lists_of_numbers(text, found) -> None:
    assert surroundings.numbers(text) == found


def test_the_kernel_module_tells_version_and_flavour() -> None:
    closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07  Fri May 31 09:35:42 UTC 2024\n"
    opened = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.158.01  Release Build\n"
    assert surroundings.nvidia_kernel(lambda p: closed) == ("550.90.07", False)
    assert surroundings.nvidia_kernel(lambda p: opened) == ("570.158.01", True)
    assert surroundings.nvidia_kernel(lambda p: "") == ("", None)
    assert surroundings.nvidia_kernel(lambda p: "garbage without numbers") == ("", None)


@pytest.mark.parametrize(
    ("first", "markers", "environment", "kind"),
    [
        ("0::/", [], {}, ""),
        ("0::/", ["/.dockerenv"], {}, "docker"),
        ("12:devices:/docker/ab", [], {}, "docker"),
        ("0::/", ["/run/.containerenv"], {}, "podman"),
        ("0::/kubepods/besteffort/pod1", [], {}, "kubernetes"),
        ("0::/", ["/.dockerenv"], {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
    ],
)
def test_containers_are_told_apart(first, markers, environment, kind) -> None:
    read = files(__proc__1__cgroup=first)
    assert surroundings.container(read, markers, environment) == kind


def test_wsl_is_known_by_its_kernel() -> None:
    assert surroundings.wsl(lambda p: "Linux version 5.15.133.1-microsoft-standard-WSL2")
    assert not surroundings.wsl(lambda p: "Linux version 6.1.0-13-amd64 (debian-kernel)")


def test_limits_without_an_end_are_unlimited(monkeypatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (resource.RLIM_INFINITY, -1))
    found = surroundings.limits()
    assert found["open_files"] == found["locked_bytes"] == UNLIMITED


def bridge(control: int | None, *, before: bool = False) -> bytes:
    """A bridge's configuration space with an access control capability, after another one if `before`."""
    space = bytearray(0x1000)
    place = 0x100
    if before:
        space[0x100:0x104] = (0x0001 | 1 << 16 | 0x140 << 20).to_bytes(4, "little")
        place = 0x140
    if control is not None:
        space[place : place + 4] = (0x000D | 1 << 16).to_bytes(4, "little")
        space[place + 6 : place + 8] = control.to_bytes(2, "little")
    return bytes(space)


@pytest.mark.parametrize(
    ("configuration", "found"),
    [
        (bridge(0x001D), True),  # as in a report: validation, both redirections, forwarding
        (bridge(0x001D, before=True), True),
        (bridge(0x0001), False),
        (bridge(None), False),
        (b"\0" * 64, None),
    ],
)
def test_redirection_is_read_from_a_bridges_configuration(configuration, found) -> None:
    assert surroundings.redirects(configuration) is found


def test_kfd_that_may_not_be_opened(tmp_path, monkeypatch) -> None:
    file = tmp_path / "kfd"
    assert surroundings.amd_driver(lambda p: "", str(file)) is None
    assert surroundings.amd_driver(lambda p: "6.8.5", str(file)).kfd == "absent"
    file.touch()
    assert surroundings.amd_driver(lambda p: "", str(file)).kfd == "ok"

    def refused(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(surroundings.os, "open", refused)
    driver = surroundings.amd_driver(lambda p: "", str(file))
    assert driver.kfd == "denied" and "Permission denied" in driver.error


def test_the_first_origin_that_sets_a_name_wins() -> None:
    given = {
        "default": {"A": 1, "B": 1, "C": 1, "D": 1, "E": 1},
        "environment": {"A": 2, "B": 2, "C": 2, "D": 2},
        "file": {"A": 3, "B": 3, "C": 3},
        "command line": {"A": 4, "B": 4},
        "argument": {"A": 5},
    }
    found = {s.name: (s.value, s.origin) for s in in_force(given)}
    assert found == {
        "A": ("5", "argument"),
        "B": ("4", "command line"),
        "C": ("3", "file"),
        "D": ("2", "environment"),
        "E": ("1", "default"),
    }


def test_secrets_are_named_and_not_shown() -> None:
    environment = of_interest(
        {"EVENER_TOKEN": "s3cret", "NCCL_DEBUG": "INFO", "HOME": "/root", "OMP_X": "1" * 9999}
    )
    found = {s.name: s.value for s in in_force({"environment": environment})}
    assert set(found) == {"EVENER_TOKEN", "NCCL_DEBUG", "OMP_X"}
    assert "s3cret" not in found["EVENER_TOKEN"] and len(found["OMP_X"]) == 2000


def test_nccls_own_files_are_read() -> None:
    texts = {"/etc/nccl.conf": "NCCL_DEBUG=WARN\n# x\nPATH=/x\n", "/home/a/.nccl.conf": "NCCL_DEBUG = INFO\n"}
    assert nccl_settings(lambda p: texts.get(p, ""), "/home/a") == {"NCCL_DEBUG": "INFO"}


def test_interfaces_come_in_the_kernels_order_and_routes_lead_over_them() -> None:
    found = interfaces()
    assert "127.0.0.1" in next(i for i in found if i.name == "lo").addresses
    assert route("127.0.0.1") == {"peer": "127.0.0.1", "address": "127.0.0.1"}
    assert "error" in route("256.1.1.1")


def test_bridges_and_tunnels_are_virtual() -> None:
    given = ("docker0", "br-12ab", "veth9", "eth0", "ens5", "tailscale0", "bond0")
    assert [n for n in given if is_virtual(n)] == ["docker0", "br-12ab", "veth9", "tailscale0"]
