"""Cards from four witnesses, as their own texts tell them."""

import pytest
from msgspec.structs import replace

from evener.core.host import Card
from evener.probing import cards
from evener.probing.overlay import overlay, with_torch

SMI = (
    "0, GPU-aaaa, NVIDIA A100-SXM4-80GB, 00000000:07:00.0, 8.0, 81920, 81000, Enabled, Default, 210, 1410, "
    "400.00, 400.00, 31, 16, 16, 550.54.15\n"
    "1, GPU-bbbb, NVIDIA GeForce GTX 1080, 00000000:0A:00.0, 6.1, 8192, 8000, [N/A], Exclusive_Process, 139, "
    "1911, [N/A], [N/A], 40, 1, 16, 550.54.15\n"
    "Unable to determine the device handle for GPU 0000:0B:00.0: Unknown Error\n"
)
LIST = """\
GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-aaaa)
  MIG 3g.40gb     Device  0: (UUID: MIG-1111)
  MIG 3g.40gb     Device  1: (UUID: MIG-2222)
GPU 1: NVIDIA GeForce GTX 1080 (UUID: GPU-bbbb)
"""


def test_nvidia_smi_is_read() -> None:
    (a100, gtx), driver = cards.from_smi(SMI)
    assert driver == "550.54.15"
    assert (a100.kind, a100.arch, a100.bus_id, a100.mig) == (
        "NVIDIA A100-SXM4-80GB",
        "sm_80",
        "0000:07:00.0",
        True,
    )
    assert (a100.memory_bytes, a100.max_clock_mhz, a100.power_limit_w) == (81920 * 2**20, 1410, 400)
    assert (gtx.compute_mode, gtx.pcie_width, gtx.max_pcie_width) == ("exclusive", 1, 16)
    assert gtx.mig is None and gtx.power_limit_w is None  # not told: absent
    assert cards.from_smi("Failed to initialize NVML: Unknown Error\n") == ([], "")


def test_slices_belong_to_their_cards() -> None:
    found, _ = cards.from_smi(SMI)
    first, second = cards.slices_from_smi(LIST, found)
    assert (first.kind, first.hardware_id) == ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "MIG-1111")
    assert first.parent == second.parent == "GPU-aaaa" and first.mig and first.arch == "sm_80"


def test_nvml_is_read_and_nonsense_makes_no_card() -> None:
    told = [
        {
            "stage": "card",
            "smi_index": 0,
            "kind": "NVIDIA L4",
            "bus_id": "00000000:01:00.0",
            "throttle": ["heat"],
        },
        {"stage": "card", "smi_index": 1, "error": "GPU is lost"},
        {"stage": "card", "smi_index": "two", "kind": 7},
    ]
    (l4, lost), wrong = cards.from_nvml(told)
    assert (l4.bus_id, l4.throttle, l4.smi_index) == ("0000:01:00.0", ("heat",), 0)
    assert lost.error == "GPU is lost"
    assert (len(wrong) == 1 and "$.kind" in wrong[0]) or "$.smi_index" in wrong[0]


KFD = {
    "/sys/class/kfd/kfd/topology/nodes/0/properties": "cpu_cores_count 16\nsimd_count 0\n",
    "/sys/class/kfd/kfd/topology/nodes/1/properties": (
        "cpu_cores_count 0\nsimd_count 440\ngfx_target_version 90010\nlocation_id 8448\nunique_id 42\n"
    ),
    "/sys/class/kfd/kfd/topology/nodes/1/mem_banks/0/properties": "heap_type 1\nsize_in_bytes 68702699520\n",
    "/sys/class/kfd/kfd/topology/nodes/2/properties": (
        "cpu_cores_count 8\nsimd_count 4\ngfx_target_version 100306\nlocation_id 768\ndomain 0\n"
    ),
    "/sys/class/kfd/kfd/topology/nodes/2/name": "raphael\n",
    "/sys/bus/pci/devices/0000:21:00.0/product_name": "AMD INSTINCT MI250 (MCM)\n",
    "/sys/bus/pci/devices/0000:21:00.0/vendor": "0x1002\n",
    "/sys/bus/pci/devices/0000:21:00.0/class": "0x038000\n",
    "/sys/bus/pci/devices/0000:21:00.0/device": "0x740c\n",
    "/sys/bus/pci/devices/0000:21:00.0/numa_node": "3\n",
    "/sys/bus/pci/devices/0000:21:00.0/mem_info_vram_total": "68702699520\n",
    "/sys/bus/pci/devices/0000:21:00.0/mem_info_vram_used": "702699520\n",
    "/sys/bus/pci/devices/0000:21:00.0/hwmon/hwmon3/power1_cap": "300000000\n",
    "/sys/bus/pci/devices/0000:21:00.0/hwmon/hwmon3/power1_cap_default": "560000000\n",
    "/sys/bus/pci/devices/0000:21:00.0/hwmon/hwmon3/temp1_input": "41000\n",
    "/sys/bus/pci/devices/0000:21:00.0/current_link_width": "8\n",
    "/sys/bus/pci/devices/0000:21:00.0/max_link_width": "16\n",
    "/sys/bus/pci/devices/0000:03:00.0/vendor": "0x1002\n",
    "/sys/bus/pci/devices/0000:03:00.0/class": "0x030000\n",
    "/sys/bus/pci/devices/0000:0a:00.0/vendor": "0x10de\n",
    "/sys/bus/pci/devices/0000:0a:00.0/class": "0x030000\n",
    "/sys/bus/pci/devices/0000:0a:00.0/device": "0x1b80\n",
    "/sys/bus/pci/devices/0000:0a:00.1/vendor": "0x10de\n",  # the card's sound
    "/sys/bus/pci/devices/0000:0a:00.1/class": "0x040300\n",
}


def read(path: str) -> str:
    return KFD.get(path, "")


def names(path: str) -> list[str]:
    below = {p[len(path) + 1 :].split("/")[0] for p in KFD if p.startswith(path + "/")}
    return sorted(below)


def test_amds_table_tells_each_die_and_the_processors_graphics() -> None:
    die, graphics = cards.from_kfd(read, names)
    assert (die.kind, die.arch, die.bus_id) == ("AMD INSTINCT MI250 (MCM)", "gfx90a", "0000:21:00.0")
    assert (die.memory_bytes, die.hardware_id, die.smi_index) == (68702699520, "GPU-000000000000002a", 0)
    assert die.numa_node == 3 and die.integrated is None
    assert (die.free_memory_bytes, die.temperature_c) == (68 * 10**9, 41)
    assert (die.power_limit_w, die.default_power_limit_w) == (300, 560)
    assert (die.pcie_width, die.max_pcie_width) == (8, 16)
    assert (graphics.kind, graphics.arch, graphics.integrated) == ("AMD raphael", "gfx1036", True)


def test_the_bus_shows_what_no_driver_answers_for() -> None:
    found = overlay(cards.from_kfd(read, names), cards.from_bus(read, names))
    assert [c.bus_id for c in found] == ["0000:21:00.0", "0000:03:00.0", "0000:0a:00.0"]
    assert found[2].kind == "NVIDIA 10de:1b80"


@pytest.mark.parametrize(
    ("written", "address"),
    [("00000000:3B:00.0", "0000:3b:00.0"), ("3b:00", "0000:3b:00.0"), ("nonsense", "nonsense"), ("", "")],
)
def test_addresses_have_one_form(written, address) -> None:
    assert cards.bus(written) == address


def test_torchs_devices_are_found_again_by_id_address_or_name() -> None:
    known = [
        Card(kind="NVIDIA RTX A4000", vendor="nvidia", hardware_id="GPU-aa", smi_index=1),
        Card(kind="NVIDIA 10de:1b80", vendor="nvidia", bus_id="0000:0a:00.0"),
        Card(kind="Quadro P1000", vendor="nvidia", smi_index=0),
    ]
    devices = [
        {"index": 0, "type": "cuda", "name": "NVIDIA RTX A4000", "uuid": "aa", "arch": "sm_86"},
        {
            "index": 1,
            "type": "cuda",
            "name": "NVIDIA GeForce GTX 1080",
            "bus_id": "0000:0a:00.0",
            "arch": "sm_61",
        },
        {"index": 2, "type": "cuda", "name": "Quadro P1000"},
        {"index": 3, "type": "xpu", "name": "Intel(R) Arc(TM) B580 Graphics", "memory_bytes": 12},
    ]
    rates = [
        {"index": 0, "rates": {"float32": 1e13}, "errors": {"bfloat16": "no"}},
        {"index": None, "rates": {}},
    ]
    found = with_torch(known, devices, rates, hip=False)
    assert [c.torch_index for c in found] == [0, 1, 2, 3]
    assert (found[0].arch, found[0].dtypes, found[0].dtype_errors) == (
        "sm_86",
        {"float32": 1e13},
        {"bfloat16": "no"},
    )
    assert found[1].kind == "NVIDIA GeForce GTX 1080"
    assert (found[3].vendor, found[3].memory_bytes) == ("intel", 12)


def test_a_slice_is_told_from_its_card() -> None:
    found, _ = cards.from_smi(SMI)
    found = [replace(found[0], torch_index=None), *cards.slices_from_smi(LIST, found)]
    devices = [{"index": 0, "type": "cuda", "name": "NVIDIA A100-SXM4-80GB MIG 3g.40gb"}]
    whole, first, second = with_torch(found, devices, [], hip=False)
    assert whole.torch_index is None and second.torch_index is None
    assert first.torch_index == 0


def test_lines_of_others_are_passed_over() -> None:
    text = 'warning\nEVENER {"stage": "build"}\nEVENER {broken\nEVENER [1]\n'
    assert cards.lines(text) == [{"stage": "build"}]
